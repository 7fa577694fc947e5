#include "backends/metal/emulator/dispatch.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "backends/metal/emulator/check.h"
#include "backends/metal/emulator/crash.h"
#include "backends/metal/emulator/group.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace mlxtape::emulator {
namespace {

// Denormals of f32 need not survive on the GPU: with a salt they do not.
class FloatModes {
 public:
  explicit FloatModes(bool flushes_denormals) : flushes_(flushes_denormals) {
    if (!flushes_) return;
#if defined(__x86_64__)
    before_ = _mm_getcsr();
    _mm_setcsr(static_cast<unsigned>(before_) | 0x8040U);
#else
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | std::uint64_t{1} << 24));
#endif
  }
  ~FloatModes() {
    if (!flushes_) return;
#if defined(__x86_64__)
    _mm_setcsr(static_cast<unsigned>(before_));
#else
    asm volatile("msr fpcr, %0" : : "r"(before_));
#endif
  }
  FloatModes(const FloatModes&) = delete;
  FloatModes& operator=(const FloatModes&) = delete;

 private:
  bool flushes_;
  std::uint64_t before_ = 0;
};

// One launch, whose threadgroups the workers share.
struct Job {
  const Dispatch* dispatch = nullptr;
  void* const* addresses = nullptr;
  const std::uint32_t* order = nullptr;  // of the threadgroups; null: as they are
  std::uint32_t total = 0;
  std::atomic<std::uint32_t> next{0};
  std::mutex mutex;
  std::uint32_t failed_at = ~0U;  // the first in the order that failed
  Outcome outcome;

  void work(Group& group) {
    name_crashes();
    const FloatModes modes(dispatch->salt != 0);
    for (std::uint32_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total;) {
      if (group.run(*dispatch, addresses, order == nullptr ? i : order[i])) continue;
      const std::lock_guard lock(mutex);
      next.store(total, std::memory_order_relaxed);
      if (i < failed_at) {
        failed_at = i;
        outcome.fault = group.fault();
      }
    }
    const std::lock_guard lock(mutex);
    outcome.counters.add(group.counters());
    group.counters() = {};
  }
};

// The threads besides the caller's. They wait for a job, take part in it, and say when they have left it.
class Workers {
 public:
  static Workers& instance() {
    static auto* workers = new Workers;  // its threads may outlive what is destroyed at exit
    return *workers;
  }

  void resize(unsigned count) {
    const std::lock_guard lock(use_);
    count_ = std::max(1U, count == 0 ? std::thread::hardware_concurrency() : count);
  }

  void run(Job& job, bool shares) {
    const std::lock_guard lock(use_);
    const unsigned others = shares ? std::min(count_, job.total) - 1 : 0;
    while (threads_ < others) {
      ++threads_;
      std::thread([this, place = threads_] { serve(place); }).detach();
    }
    if (others != 0) {
      const std::lock_guard posting(mutex_);
      job_ = &job;
      wanted_ = others;
      busy_ = others;
      ++turn_;
      posted_.notify_all();
    }
    job.work(group_);
    if (others != 0) {
      std::unique_lock waiting(mutex_);
      done_.wait(waiting, [this] { return busy_ == 0; });
      job_ = nullptr;
    }
  }

 private:
  void serve(unsigned place) {
    const auto group = std::make_unique<Group>();
    std::uint64_t seen = 0;
    for (;;) {
      Job* job = nullptr;
      {
        std::unique_lock waiting(mutex_);
        posted_.wait(waiting, [&] { return turn_ != seen; });
        seen = turn_;
        if (place <= wanted_) job = job_;
      }
      if (job == nullptr) continue;
      job->work(*group);
      const std::lock_guard leaving(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex use_;  // one launch at a time
  unsigned count_ = std::max(1U, std::thread::hardware_concurrency());
  unsigned threads_ = 0;
  Group group_;  // the caller's

  std::mutex mutex_;
  std::condition_variable posted_, done_;
  Job* job_ = nullptr;
  unsigned wanted_ = 0, busy_ = 0;
  std::uint64_t turn_ = 0;
};

std::string shape(const Size3& s) {
  return std::to_string(s.x) + "x" + std::to_string(s.y) + "x" + std::to_string(s.z);
}

// What is wrong with the launch itself, or nothing.
std::string refusal(const Dispatch& d) {
  const std::uint64_t threads = std::uint64_t{d.threads.x} * d.threads.y * d.threads.z;
  const std::uint64_t groups = std::uint64_t{d.groups.x} * d.groups.y * d.groups.z;
  if (threads == 0 || groups == 0) {
    return "sizes must not be 0, got " + shape(d.groups) + " threadgroups of " + shape(d.threads);
  }
  if (groups > ~0U) return "more than 2^32 threadgroups: " + shape(d.groups);
  const std::uint32_t most =
      d.kernel->max_threads == 0 ? d.max_threads : std::min(d.max_threads, d.kernel->max_threads);
  if (threads > most) {
    return "at most " + std::to_string(most) + " threads in a threadgroup, got " + shape(d.threads);
  }
  for (unsigned i = 0; i < d.kernel->parameter_count; ++i) {
    const Parameter& p = d.kernel->parameters[i];
    if (p.slot.condition != 0) {
      const auto* wanted = static_cast<const bool*>(d.constants[p.slot.condition - 1]);
      if (wanted == nullptr || !*wanted) continue;
    }
    const std::string index = "(" + std::to_string(p.slot.index) + ")";
    if (p.slot.kind == Kind::kThreadgroupArgument && d.threadgroup_bytes[p.slot.index] == 0) {
      return "threadgroup" + index + " has no length";
    }
    if (p.slot.kind != Kind::kBuffer) continue;
    const Binding& b = d.buffers[p.slot.index];
    if (!b.is_bound) return "buffer" + index + " is not bound";
    const std::size_t reach = b.bytes != nullptr ? b.bytes->size() : b.end - b.offset;
    if (reach < p.bytes) {
      return "buffer" + index + " holds " + std::to_string(reach) + " bytes, its parameter has " +
             std::to_string(p.bytes);
    }
    if (b.bytes != nullptr && p.is_written)
      return "buffer" + index + " is written, and was given as bytes";
    if (b.block != nullptr && b.offset % p.align != 0) {
      return "buffer" + index + " begins at byte " + std::to_string(b.offset) +
             ", no multiple of " + std::to_string(p.align);
    }
  }
  return "";
}

}  // namespace

Block::Block(char* memory, std::size_t size) : base(memory), bytes(size) {}
Block::~Block() = default;

Binding Binding::of(Block& block, std::size_t offset) {
  return {&block, offset, 0, block.bytes, nullptr, true};
}

Binding Binding::of(const void* bytes, std::size_t count) {
  const auto* begin = static_cast<const char*>(bytes);
  Binding b;
  b.bytes = std::make_shared<const std::vector<char>>(begin, begin + count);
  b.is_bound = true;
  return b;
}

void Counters::add(const Counters& o) {
  launches += o.launches;
  groups += o.groups;
  threads += o.threads;
  switches += o.switches;
  barriers += o.barriers;
  exchanges += o.exchanges;
  operations += o.operations;
  functions += o.functions;
  matrix_products += o.matrix_products;
  bytes_read += o.bytes_read;
  bytes_written += o.bytes_written;
  bytes_first_read += o.bytes_first_read;
  bytes_first_written += o.bytes_first_written;
  threadgroup_bytes = std::max(threadgroup_bytes, o.threadgroup_bytes);
}

void set_workers(unsigned count) { Workers::instance().resize(count); }

Outcome run(const Dispatch& d) {
  Outcome outcome;
  outcome.fault = refusal(d);
  if (outcome.fault.empty()) {
    std::array<void*, kMaxBuffers> addresses = {};
    for (unsigned i = 0; i < kMaxBuffers; ++i) {
      const Binding& b = d.buffers[i];
      if (b.bytes != nullptr) {
        addresses[i] = const_cast<char*>(b.bytes->data());  // its parameter is const
      } else if (b.block != nullptr) {
        addresses[i] = b.block->base + b.offset;
      }
    }
    const std::uint32_t total = d.groups.x * d.groups.y * d.groups.z;
    std::vector<std::uint32_t> order;
    if (d.seed != 0) {
      order.resize(total);
      for (std::uint32_t i = 0; i < total; ++i) order[i] = i;
      std::uint64_t state = d.seed | 1;
      for (std::uint32_t i = total; i > 1; --i) std::swap(order[i - 1], order[draw(state, i)]);
    }
    Job job;
    job.dispatch = &d;
    job.addresses = addresses.data();
    job.order = order.empty() ? nullptr : order.data();
    job.total = total;
    Counters checked;
    std::optional<CheckedLaunch> launch;
    if (d.kernel->is_checked) launch.emplace(d, checked);
    // Waking the others takes about as long as this many threads without a barrier.
    constexpr std::uint64_t kWorthSharing = 2048;
    const std::uint64_t threads = std::uint64_t{total} * d.threads.x * d.threads.y * d.threads.z;
    Workers::instance().run(job, !d.kernel->is_checked && threads >= kWorthSharing);
    outcome = std::move(job.outcome);
    outcome.counters.add(checked);
  }
  outcome.counters.launches = 1;
  if (!outcome.fault.empty()) outcome.fault = std::string(d.kernel->name) + ": " + outcome.fault;
  return outcome;
}

}  // namespace mlxtape::emulator
