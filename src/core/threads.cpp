#include "mlxtape/core/threads.h"

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "mlxtape/base/error.h"

namespace mlxtape {

namespace {

constexpr int kMostThreads = 1024;
// A pause is 40 to 140 cycles on x86, so this is 50 to 100 us: longer than the gap between two
// kernels of one model, shorter than a scheduler tick.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

thread_local bool inside = false;  // this thread is running a task: nested calls stay on it

int usable_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#elif defined(__APPLE__)
  // The fast cores alone: all threads of a call wait for the last of them. An Intel Mac has no such levels.
  int fast = 0;
  std::size_t size = sizeof fast;
  if (sysctlbyname("hw.perflevel0.logicalcpu", &fast, &size, nullptr, 0) == 0 && fast > 0)
    return fast;
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// One share of the tasks; on a cache line of its own because every thread adds to its own.
struct alignas(64) Share {
  std::atomic<std::int64_t> next{0};
  std::int64_t end = 0;
};

class Pool {
 public:
  explicit Pool(int count) : size_(count), shares_(static_cast<std::size_t>(count)) {
    workers_.reserve(static_cast<std::size_t>(count - 1));
    try {
      for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {
      // The system gives no more: those that started, and the caller, do the work of all.
    }
  }

  ~Pool() {
    stop_.store(true, std::memory_order_relaxed);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Only one thread at a time (the caller holds the pool's mutex).
  void run(std::int64_t tasks, FunctionRef<void(std::int64_t)> body) {
    for (int i = 0; i < size_; ++i) {
      Share& share = shares_[static_cast<std::size_t>(i)];
      share.next.store(first_task(tasks, i), std::memory_order_relaxed);
      share.end = first_task(tasks, i + 1);
    }
    body_ = &body;
    failed_.store(false, std::memory_order_relaxed);
    door_.store(kOpen, std::memory_order_release);
    epoch_.fetch_add(1);  // sequentially consistent, as is sleepers_: no wake-up is lost
    if (sleepers_.load() != 0) epoch_.notify_all();

    inside = true;
    take_tasks(0);
    inside = false;

    // Close the door; whoever is already in finishes its task.
    std::uint32_t door = door_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    for (int spins = 0; door != 0; door = door_.load(std::memory_order_acquire)) {
      ++spins < kSpins ? relax() : std::this_thread::yield();
    }
    if (failed_.load(std::memory_order_relaxed)) {
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
  }

 private:
  static constexpr std::uint32_t kOpen = 1U << 31U;  // the rest of door_ counts workers inside

  // tasks · i / size_, without the overflow.
  std::int64_t first_task(std::int64_t tasks, int i) const {
    return tasks / size_ * i + tasks % size_ * i / size_;
  }

  bool enter() {
    std::uint32_t door = door_.load(std::memory_order_relaxed);
    while ((door & kOpen) != 0) {
      if (door_.compare_exchange_weak(door, door + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  void take_tasks(int self) {
    for (int i = 0; i < size_; ++i) {
      Share& share = shares_[static_cast<std::size_t>((self + i) % size_)];
      for (;;) {
        const std::int64_t task = share.next.fetch_add(1, std::memory_order_relaxed);
        if (task >= share.end) break;
        if (failed_.load(std::memory_order_relaxed)) {
          share.next.store(share.end, std::memory_order_relaxed);
          break;
        }
        try {
          (*body_)(task);
        } catch (...) {
          const std::lock_guard lock(failure_mutex_);
          if (!failed_.exchange(true, std::memory_order_relaxed)) {
            failure_ = std::current_exception();
          }
        }
      }
    }
  }

  void work(int self) {
    inside = true;
    std::uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen; ++spins) {
        if (spins < kSpins) {
          relax();
          continue;
        }
        sleepers_.fetch_add(1);
        epoch_.wait(seen);
        sleepers_.fetch_sub(1);
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (stop_.load(std::memory_order_relaxed)) return;
      if (enter()) {
        take_tasks(self);
        door_.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  const int size_;
  std::vector<Share> shares_;
  FunctionRef<void(std::int64_t)>* body_ = nullptr;
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  alignas(64) std::atomic<std::uint32_t> door_{0};
  std::atomic<std::uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
  std::vector<std::thread> workers_;
};

// The pool and who may use it. Never destroyed: detached host threads may compute until exit.
struct Shared {
  std::mutex mutex;            // held while a call runs, or while the pool is replaced
  std::unique_ptr<Pool> pool;  // null until the first call that needs it
  std::atomic<int> wanted{usable_cores()};
};
std::atomic<Shared*> current{nullptr};

// A child has the parent's memory but none of its workers, and perhaps a locked mutex: it leaves
// all that behind and starts anew.
void after_fork_in_child() {
  Shared* old = current.load();
  if (old == nullptr) return;
  auto* fresh = new Shared;
  fresh->wanted = old->wanted.load();
  current = fresh;
  inside = false;
}

Shared& shared() {
  Shared* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  static std::once_flag once;
  std::call_once(once, [] {
    current = new Shared;
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
  });
  return *current.load();
}

}  // namespace

void set_threads(int count) {
  if (count < 0 || count > kMostThreads) {
    throw Error(Errc::kArgument, "set_threads: from 0 (one per core) to " +
                                     std::to_string(kMostThreads) + " threads, got " +
                                     std::to_string(count));
  }
  if (inside) throw Error(Errc::kArgument, "set_threads: not from inside parallel_for");
  Shared& s = shared();
  const std::lock_guard lock(s.mutex);
  s.wanted = count == 0 ? usable_cores() : count;
  s.pool.reset();
}

int threads() { return shared().wanted; }

void parallel_for(std::int64_t tasks, FunctionRef<void(std::int64_t)> body) {
  const auto alone = [&] {
    for (std::int64_t task = 0; task < tasks; ++task) body(task);
  };
  if (tasks <= 1 || inside) return alone();
  Shared& s = shared();
  if (s.wanted.load(std::memory_order_relaxed) == 1) return alone();
  const std::unique_lock lock(s.mutex, std::try_to_lock);
  if (!lock) return alone();
  if (!s.pool) s.pool = std::make_unique<Pool>(s.wanted);
  s.pool->run(tasks, body);
}

}  // namespace mlxtape
