#include "mlxtape/core/arena.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "mlxtape/base/error.h"

namespace mlxtape {

namespace {

constexpr std::size_t kAlign = 256;  // of every place: what the devices' own allocations have
// Tensors of a rehearsal have addresses from here on, which no process can have.
constexpr std::uintptr_t kNowhere = std::uintptr_t{1} << 62U;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

struct Arena::Impl : std::enable_shared_from_this<Arena::Impl> {
  // An allocation of the noted step. Times count allocations and ends.
  struct Entry {
    std::size_t bytes;
    std::size_t start;
    std::size_t end = 0;  // 0: it outlived the step
    std::size_t offset = 0;
  };
  struct Block : Storage {
    std::shared_ptr<Impl> keeper;  // while it is in use
  };
  // Of a tensor made in a rehearsal.
  struct Rehearsed : Storage {
    std::shared_ptr<Impl> arena;
    std::size_t entry = 0;
  };
  enum class State { kNote, kPlanned };

  Impl(MemoryPool& p, std::shared_ptr<ArenaMemory> memory_to_share)
      : pool(&p), shared(std::move(memory_to_share)) {}

  MemoryPool* pool;
  std::shared_ptr<ArenaMemory> shared;  // null: memory is this arena's alone
  std::mutex mutex;
  State state = State::kNote;
  bool in_step = false;
  bool rehearses = false;
  std::size_t rehearsed = 0;          // tensors of a rehearsal that are alive
  std::uintptr_t nowhere = kNowhere;  // of the next one
  std::size_t clock = 0;
  std::size_t next = 0;  // the entry of the next allocation
  std::vector<Entry> entries;
  std::vector<std::unique_ptr<Block>>
      blocks;  // of the entries with a place; given out again and again
  std::map<std::size_t, std::size_t> live;  // offset -> end, of places in use
  Buffer memory;
  ArenaStats stats;

  // Where each entry goes: the longest-lived bytes first, each at the lowest place that is free for all of
  // its life. That is within a few per cent of the least possible for training steps.
  void plan() {
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].end != 0) order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return entries[a].bytes != entries[b].bytes ? entries[a].bytes > entries[b].bytes : a < b;
    });
    std::vector<std::size_t> placed;  // by offset
    std::size_t top = 0;
    for (const std::size_t i : order) {
      Entry& e = entries[i];
      const std::size_t need = aligned(e.bytes);
      std::size_t at = 0, best = 0, best_gap = 0;
      for (const std::size_t j : placed) {
        const Entry& other = entries[j];
        if (other.end < e.start || e.end < other.start) continue;
        if (other.offset >= at + need) {
          const std::size_t gap = other.offset - at;
          if (best_gap == 0 || gap < best_gap) {
            best = at;
            best_gap = gap;
          }
        }
        at = std::max(at, other.offset + aligned(other.bytes));
      }
      e.offset = best_gap != 0 ? best : at;
      top = std::max(top, e.offset + need);
      placed.insert(std::upper_bound(placed.begin(), placed.end(), i,
                                     [&](std::size_t a, std::size_t b) {
                                       return entries[a].offset < entries[b].offset;
                                     }),
                    i);
    }
    stats.bytes = top;
    stats.most_live = most_live();
  }

  std::size_t most_live() const {
    std::map<std::size_t, std::int64_t> changes;  // time -> bytes more
    for (const Entry& e : entries) {
      if (e.end == 0) continue;
      changes[e.start] += static_cast<std::int64_t>(e.bytes);
      changes[e.end] -= static_cast<std::int64_t>(e.bytes);
    }
    std::int64_t now = 0, most = 0;
    for (const auto& [time, more] : changes) most = std::max(most, now += more);
    return static_cast<std::size_t>(most);
  }

  bool is_free(std::size_t offset, std::size_t bytes) const {
    const auto after = live.lower_bound(offset + bytes);  // the first that begins past the end
    return after == live.begin() || std::prev(after)->second <= offset;
  }

  static void give_back(Storage* storage) noexcept {
    auto* block = static_cast<Block*>(storage);
    const std::shared_ptr<Impl> self = std::move(block->keeper);
    const std::lock_guard lock(self->mutex);
    self->live.erase(static_cast<std::size_t>(static_cast<char*>(block->address) -
                                              static_cast<char*>(self->memory.address())));
  }

  // With the lock held.
  Buffer rehearse(std::size_t bytes, Device* device) {
    auto tensor = std::make_unique<Rehearsed>();
    tensor->address = reinterpret_cast<void*>(nowhere);
    nowhere += aligned(bytes);
    tensor->bytes = tensor->capacity = bytes;
    tensor->device = device;
    tensor->release = end_rehearsed;
    tensor->arena = shared_from_this();
    tensor->entry = entries.size();
    entries.push_back({bytes, ++clock});
    ++rehearsed;
    return Buffer(tensor.release());
  }

  static void end_rehearsed(Storage* storage) noexcept {
    const std::unique_ptr<Rehearsed> tensor(static_cast<Rehearsed*>(storage));
    Impl& self = *tensor->arena;
    const std::lock_guard lock(self.mutex);
    self.entries[tensor->entry].end = ++self.clock;
    --self.rehearsed;
  }

  // A step that is not like the noted one needs another plan, and what still lives keeps this one.
  bool must_note_again() {
    in_step = false;
    if (state == State::kPlanned) return stats.misses != 0;
    plan();
    blocks.resize(entries.size());
    state = State::kPlanned;
    return false;
  }
};

namespace {

thread_local void* current = nullptr;  // Arena::Impl* of this thread's step

}  // namespace

Buffer ArenaMemory::at_least(std::size_t bytes) {
  if (memory_.bytes() < bytes) {
    memory_ = {};
    memory_ = pool_->allocate_exact(bytes);
  }
  return memory_;
}

Arena::Arena(MemoryPool& pool) : impl_(std::make_shared<Impl>(pool, nullptr)) {}
Arena::Arena(const std::shared_ptr<ArenaMemory>& shared)
    : impl_(std::make_shared<Impl>(shared->pool(), shared)) {}
Arena::~Arena() = default;

ArenaStats Arena::stats() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->stats;
}

void Arena::rehearse(FunctionRef<void()> body) {
  const auto plan = std::make_shared<Impl>(*impl_->pool, impl_->shared);
  impl_ = plan;
  plan->rehearses = true;
  try {
    const Step step(*this);
    body();
  } catch (...) {
    impl_ = std::make_shared<Impl>(*plan->pool, plan->shared);
    throw;
  }
  const std::lock_guard lock(plan->mutex);
  plan->rehearses = false;
  if (plan->rehearsed == 0) return;
  impl_ = std::make_shared<Impl>(*plan->pool, plan->shared);
  throw Error(Errc::kArgument, "arena: what is made in a rehearsal must not outlive it, got " +
                                   std::to_string(plan->rehearsed) + " tensors that do");
}

Arena::Step::Step(Arena& arena) : arena_(arena) {
  Impl& impl = *arena.impl_;
  if (current != nullptr) {
    throw Error(Errc::kArgument, "arena: one step at a time on a thread, got a step inside a step");
  }
  {
    const std::lock_guard lock(impl.mutex);
    if (impl.in_step) {
      throw Error(Errc::kArgument, "arena: one step at a time, got one on each of two threads");
    }
    if (impl.shared == nullptr && impl.memory && impl.memory.owners() != 1) {
      throw Error(Errc::kArgument,
                  "arena: its memory belongs to the graph that was captured in it; destroy the "
                  "graph, or use an arena for each");
    }
    if (impl.state == Impl::State::kPlanned && !impl.memory && impl.stats.bytes != 0) {
      impl.memory = impl.shared != nullptr ? impl.shared->at_least(impl.stats.bytes)
                                           : impl.pool->allocate_exact(impl.stats.bytes);
    }
    impl.in_step = true;
    impl.next = 0;
    impl.stats.planned = impl.stats.misses = 0;
  }
  current = &impl;
}

Arena::Step::~Step() {
  current = nullptr;
  std::shared_ptr<Impl> impl = arena_.impl_;
  const std::lock_guard lock(impl->mutex);
  if (!impl->must_note_again()) return;
  arena_.impl_ = std::make_shared<Impl>(*impl->pool, impl->shared);
  arena_.impl_->stats = impl->stats;
}

Arena::Impl* Arena::current_of(const MemoryPool& pool) {
  auto* impl = static_cast<Impl*>(current);
  return impl != nullptr && impl->pool == &pool ? impl : nullptr;
}

Buffer Arena::place(const MemoryPool& pool, std::size_t bytes) {
  Impl* impl = current_of(pool);
  if (impl == nullptr) return {};
  const std::lock_guard lock(impl->mutex);
  if (impl->rehearses) return impl->rehearse(bytes, &pool.device());
  if (impl->state != Impl::State::kPlanned) return {};
  const std::size_t i = impl->next++;
  const bool as_planned = i < impl->entries.size() && impl->entries[i].bytes == bytes;
  if (as_planned && impl->entries[i].end == 0) return {};
  if (!as_planned || !impl->is_free(impl->entries[i].offset, aligned(bytes))) {
    ++impl->stats.misses;
    return {};
  }
  const std::size_t offset = impl->entries[i].offset;
  std::unique_ptr<Impl::Block>& block = impl->blocks[i];
  if (!block) {
    block = std::make_unique<Impl::Block>();
    block->address = static_cast<char*>(impl->memory.address()) + offset;
    block->bytes = block->capacity = bytes;
    block->device = impl->memory.device();
    block->backing = impl->memory.storage();
    block->release = Impl::give_back;
  }
  impl->live[offset] = offset + aligned(bytes);
  ++impl->stats.planned;
  block->keeper = impl->shared_from_this();
  return Buffer(block.get());
}

bool Arena::rehearses(const MemoryPool& pool) {
  const Impl* impl = current_of(pool);
  return impl != nullptr && impl->rehearses;
}

void Arena::note(const MemoryPool& pool, std::size_t bytes, Note& note) {
  Impl* impl = current_of(pool);
  if (impl == nullptr) return;
  const std::lock_guard lock(impl->mutex);
  if (impl->state != Impl::State::kNote) return;
  note.arena = impl->shared_from_this();
  note.entry = impl->entries.size();
  impl->entries.push_back({bytes, ++impl->clock});
}

void Arena::ended(const Note& note) noexcept {
  const std::lock_guard lock(note.arena->mutex);
  if (note.arena->in_step && note.arena->state == Impl::State::kNote) {
    note.arena->entries[note.entry].end = ++note.arena->clock;
  }
}

}  // namespace mlxtape
