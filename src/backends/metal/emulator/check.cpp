// Kernels are compiled with -fsanitize=thread and linked without its runtime: the functions that it calls at each access
// are these. A byte of device or threadgroup memory has a cell that says who wrote and who read it last.
#include "backends/metal/emulator/check.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "backends/metal/emulator/group.h"

extern "C" const char __executable_start, _end;  // the linker's: the program with its constants

namespace mlxtape::emulator {
namespace {

enum Flags : std::uint16_t {
  kAtomic = 1,
  kManyLanes = 2,   // of one simdgroup read it since the barrier
  kManySimds = 4,   // lanes of several did
  kManyGroups = 8,  // threadgroups of one launch did
};

// What the kernel may touch of device memory.
struct Extent {
  const char* begin;
  const char* end;
  Cell* cells;  // null: constants, which nobody writes
  int index;    // of the binding; -1: reached by an address
  bool is_written;
};

struct Launch {
  std::uint32_t first_run, runs;
  std::uint64_t serial;
  std::string name;
};

struct Checker {
  const Dispatch* dispatch = nullptr;
  Counters* counters = nullptr;
  std::vector<Extent> extents;
  std::size_t last_extent = 0;
  std::uint32_t first_run = 0, runs = 0;
  std::uint32_t ordered_below = 0;  // whatever ran before this is over
  std::uint32_t next_run = 1;
  std::deque<Launch> launches;  // the last ones
  std::vector<Cell> threadgroup_cells;
};
constexpr std::size_t kLaunchesKept = 4096;

struct Shadows {
  std::mutex mutex;
  std::set<Shadow*> all;
  std::size_t reached =
      0;  // bytes of cells that launches came to since the last time they were given back
};
Shadows& shadows() {
  static auto* shadows = new Shadows;  // blocks may outlive what is destroyed at exit
  return *shadows;
}

Checker& checker() {
  static Checker checker;
  return checker;
}
// The one above without the question whether it is made.
Checker* active = nullptr;

const Launch* launch_of(const Checker& c, std::uint32_t run) {
  const auto after =
      std::upper_bound(c.launches.begin(), c.launches.end(), run,
                       [](std::uint32_t r, const Launch& l) { return r < l.first_run; });
  return after == c.launches.begin() ? nullptr : &*std::prev(after);
}

}  // namespace

std::string where_is(const void* address) {
  const auto* p = static_cast<const char*>(address);
  const Group& g = *running;
  if (g.is_arena(p)) {
    const std::uint32_t at = g.arena_offset(p);
    const Group::Variable* v = g.variable_at(at);
    if (v == nullptr) {  // behind the nearest one
      for (const Group::Variable* other = g.variables_begin(); other != g.variables_end();
           ++other) {
        if (other->begin <= at && (v == nullptr || other->begin > v->begin)) v = other;
      }
    }
    if (v == nullptr) return "threadgroup memory";
    return "threadgroup memory '" + std::string(v->name) + "' at byte " +
           std::to_string(at - v->begin) + " of " + std::to_string(v->end - v->begin);
  }
  constexpr std::ptrdiff_t kNear = 4096;
  const Extent* nearest = nullptr;
  std::ptrdiff_t distance = kNear;
  for (const Extent& e : active->extents) {
    const std::ptrdiff_t d = p < e.begin ? e.begin - p : p < e.end ? 0 : p - e.end;
    if (d < distance) {
      nearest = &e;
      distance = d;
    }
  }
  if (nearest == nullptr) return "an address that is in none of its buffers";
  const std::string name = nearest->index < 0 ? "a buffer reached by its address"
                                              : "buffer(" + std::to_string(nearest->index) + ")";
  return name + " at byte " + std::to_string(p - nearest->begin) + " of " +
         std::to_string(nearest->end - nearest->begin);
}

namespace {

[[noreturn]] void refuse(const char* does, const std::string& what) {
  Group& g = *running;
  g.fail(std::string(does) + " " + what + " (" + g.describe(*self) + ")");
}

std::string who(const Stamp& s) {
  const Checker& c = *active;
  if (s.run - c.first_run >= c.runs) {
    const Launch* launch = launch_of(c, s.run);
    return launch == nullptr ? "an earlier launch" : "an earlier launch, " + launch->name + ",";
  }
  return "thread " + std::to_string(s.lane) + " of threadgroup " +
         std::to_string(s.run - c.first_run);
}

// How far this lane is, for one kind of memory.
struct Now {
  std::uint32_t run, epoch, sync;
  std::uint16_t lane;
};

// Is what was done then over for this lane?
bool is_over(const Stamp& then, const Now& now, const Checker& c) {
  if (then.run == now.run) {
    if (then.epoch != now.epoch) return true;
    if ((then.flags & kManySimds) != 0) return false;
    if (then.lane == now.lane && (then.flags & kManyLanes) == 0) return true;
    return then.lane / kSimdWidth == now.lane / kSimdWidth && then.sync != now.sync;
  }
  if (then.run < c.ordered_below) return true;
  if (then.run - c.first_run < c.runs) return false;  // another threadgroup of this launch
  const Launch* launch = launch_of(c, then.run);
  return launch == nullptr || c.dispatch->order->is_before(launch->serial);
}

[[noreturn]] void refuse_race(const Stamp& then, bool writes, bool wrote, const char* p) {
  refuse(writes ? "writes" : "reads",
         "what " + who(then) + (wrote ? " writes" : " reads") +
             ", with no barrier between that orders them: " + where_is(p));
}

void note_read(Stamp& reader, const Now& now, bool atomic) {
  std::uint16_t flags = atomic ? kAtomic : 0;
  if (reader.run != 0) {
    if (reader.run == now.run && reader.epoch == now.epoch) {
      const std::uint16_t before = reader.flags & (kManyLanes | kManySimds);
      flags |= before;
      if (reader.lane / kSimdWidth != now.lane / kSimdWidth) {
        flags |= kManySimds;
      } else if (reader.lane != now.lane) {
        flags |= kManyLanes;
      }
      if ((reader.flags & kAtomic) == 0) flags &= static_cast<std::uint16_t>(~kAtomic);
    }
    if (reader.run != now.run && reader.run - active->first_run < active->runs)
      flags |= kManyGroups;
    if (reader.run == now.run) flags |= reader.flags & kManyGroups;
  }
  reader = {now.run, now.epoch, now.sync, now.lane, flags};
}

void check_cell(Cell& cell, const Now& now, bool write, bool atomic, bool is_device,
                const char* p) {
  const Checker& c = *active;
  if (!is_device && cell.writer.run != now.run) {  // what another threadgroup left is nothing
    if (!write) refuse("reads", "what nobody wrote: " + where_is(p));
    cell = {};
  }
  const Stamp& w = cell.writer;
  if (w.run != 0 && !(atomic && (w.flags & kAtomic) != 0) && !is_over(w, now, c))
    refuse_race(w, write, true, p);
  if (!write) {
    note_read(cell.reader, now, atomic);
    return;
  }
  const Stamp& r = cell.reader;
  if (r.run != 0 && !(atomic && (r.flags & kAtomic) != 0) &&
      (!is_over(r, now, c) || ((r.flags & kManyGroups) != 0 && r.run - c.first_run < c.runs))) {
    refuse_race(r, true, false, p);
  }
  cell.writer = {now.run, now.epoch, now.sync, now.lane,
                 static_cast<std::uint16_t>(atomic ? kAtomic : 0)};
}

// Bytes that one access touches mostly have one history.
void check_cells(Cell* cells, std::size_t bytes, const Now& now, bool write, bool atomic,
                 bool is_device, const char* p) {
  const Cell before = cells[0];
  check_cell(cells[0], now, write, atomic, is_device, p);
  for (std::size_t i = 1; i < bytes; ++i) {
    if (cells[i] == before) {
      cells[i] = cells[0];
    } else {
      check_cell(cells[i], now, write, atomic, is_device, p + i);
    }
  }
}

void check_threadgroup(const char* p, std::size_t bytes, bool write, bool atomic) {
  Checker& c = *active;
  const Group& g = *running;
  const std::uint32_t at = g.arena_offset(p);
  const Group::Variable* v = g.variable_at(at);
  if (v == nullptr || at + bytes > v->end) {
    refuse(write ? "writes" : "reads",
           "past the end of " + where_is(v == nullptr ? p : p + (v->end - at)));
  }
  const Now now = {c.first_run + g.linear(), g.threadgroup_epoch(), self->simd->threadgroup_epoch,
                   static_cast<std::uint16_t>(self->index)};
  check_cells(&c.threadgroup_cells[at], bytes, now, write, atomic, false, p);
}

void count(const Cell* cells, std::size_t bytes, bool write) {
  Checker& c = *active;
  Counters& n = *c.counters;
  (write ? n.bytes_written : n.bytes_read) += bytes;
  for (std::size_t i = 0; i < bytes; ++i) {
    const bool written = cells[i].writer.run - c.first_run < c.runs;
    if (write) {
      n.bytes_first_written += written ? 0 : 1;
    } else if (!written) {
      n.bytes_first_read += cells[i].reader.run - c.first_run < c.runs ? 0 : 1;
    }
  }
}

bool touch(const Extent& e, const char* p, std::size_t bytes, bool write, bool atomic) {
  if (p < e.begin || p + bytes > e.end || (write && !e.is_written)) return false;
  if (e.cells == nullptr) return true;
  const Group& g = *running;
  Cell* cells = e.cells + (p - e.begin);
  count(cells, bytes, write);
  const Now now = {active->first_run + g.linear(), g.device_epoch(), self->simd->device_epoch,
                   static_cast<std::uint16_t>(self->index)};
  check_cells(cells, bytes, now, write, atomic, true, p);
  return true;
}

void add_extent(Checker& c, Block& block, std::size_t begin, std::size_t end, int index,
                bool is_written) {
  if (block.shadow == nullptr) block.shadow = std::make_unique<Shadow>(block.bytes);
  c.extents.push_back(
      {block.base + begin, block.base + end, block.shadow->cells() + begin, index, is_written});
  Shadows& s = shadows();
  const std::lock_guard lock(s.mutex);
  s.reached += (end - begin) * sizeof(Cell);
}

// The resident block that p lies in, once a kernel comes to it.
bool add_resident(Checker& c, const char* p) {
  for (const Resident& r : c.dispatch->residents) {
    if (p < r.block->base || p >= r.block->base + r.block->bytes) continue;
    add_extent(c, *r.block, 0, r.block->bytes, -1, r.is_written);
    return true;
  }
  return false;
}

// Constants of the program may be read. Nothing else that is not the kernel's may be touched.
[[noreturn]] void refuse_address(const char* p, std::size_t bytes, bool write) {
  const char* does = write ? "writes" : "reads";
  if (running->stacks().holds(p)) refuse(does, "the memory of another thread");
  for (const Extent& e : active->extents) {
    if (p >= e.begin && p + bytes <= e.end) refuse(does, "a const buffer: " + where_is(p));
  }
  refuse(does, "out of bounds: " + where_is(p));
}

}  // namespace

void check(const void* address, std::size_t bytes, bool write, bool atomic) {
  if (running == nullptr || self == nullptr) return;
  const auto* p = static_cast<const char*>(address);
  const Stacks& stacks = running->stacks();
  if (p >= stacks.low(self->stack) && p + bytes <= stacks.high(self->stack)) return;
  if (running->is_arena(p)) {
    check_threadgroup(p, bytes, write, atomic);
    return;
  }
  Checker& c = *active;
  if (c.last_extent < c.extents.size() && touch(c.extents[c.last_extent], p, bytes, write, atomic))
    return;
  for (std::size_t i = 0; i < c.extents.size(); ++i) {
    if (touch(c.extents[i], p, bytes, write, atomic)) {
      c.last_extent = i;
      return;
    }
  }
  if (!write && p >= &__executable_start && p + bytes <= &_end) return;
  if (add_resident(c, p) && touch(c.extents.back(), p, bytes, write, atomic)) return;
  refuse_address(p, bytes, write);
}

// ---- what is checked ----

Shadow::Shadow(std::size_t bytes) : bytes_(bytes) {
  Shadows& s = shadows();
  const std::lock_guard lock(s.mutex);
  s.all.insert(this);
  void* memory = mmap(nullptr, std::max<std::size_t>(bytes, 1) * sizeof(Cell),
                      PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  cells_ = static_cast<Cell*>(memory);
}

Shadow::~Shadow() {
  Shadows& s = shadows();
  const std::lock_guard lock(s.mutex);
  s.all.erase(this);
  munmap(cells_, std::max<std::size_t>(bytes_, 1) * sizeof(Cell));
}

void Shadow::clear() {
  madvise(cells_, std::max<std::size_t>(bytes_, 1) * sizeof(Cell), MADV_DONTNEED);
}

void forget_launches() {
  constexpr std::size_t kMuch = std::size_t{256} << 20;
  Shadows& s = shadows();
  const std::lock_guard lock(s.mutex);
  if (s.reached < kMuch) return;
  s.reached = 0;
  for (Shadow* shadow : s.all) shadow->clear();
}

CheckedLaunch::CheckedLaunch(const Dispatch& d, Counters& counters) {
  Checker& c = checker();
  active = &c;
  c.dispatch = &d;
  c.counters = &counters;
  c.extents.clear();
  c.last_extent = 0;
  c.threadgroup_cells.resize(kThreadgroupBytes * 2);
  for (unsigned i = 0; i < d.kernel->parameter_count; ++i) {
    const Parameter& p = d.kernel->parameters[i];
    if (p.slot.kind != Kind::kBuffer) continue;
    const Binding& b = d.buffers[p.slot.index];
    if (b.bytes != nullptr) {
      c.extents.push_back(
          {b.bytes->data(), b.bytes->data() + b.bytes->size(), nullptr, p.slot.index, false});
    } else if (b.block != nullptr) {
      add_extent(c, *b.block, b.begin, b.end, p.slot.index, p.is_written);
    }
  }
  c.first_run = c.next_run;
  c.runs = d.groups.x * d.groups.y * d.groups.z;
  c.next_run += c.runs;
  c.ordered_below = c.first_run;
  if (d.order != nullptr) {
    for (auto l = c.launches.rbegin();
         l != c.launches.rend() && l->serial >= d.order->first_serial(); ++l) {
      if (!d.order->is_before(l->serial)) c.ordered_below = l->first_run;
    }
  }
  c.launches.push_back({c.first_run, c.runs, d.serial, d.kernel->name});
  if (c.launches.size() > kLaunchesKept) c.launches.pop_front();
}

CheckedLaunch::~CheckedLaunch() {
  active->dispatch = nullptr;
  active->counters = nullptr;
}

void check_atomic(const void* address, std::size_t bytes) { check(address, bytes, true, true); }

}  // namespace mlxtape::emulator
