#include "mlxtape/core/threads.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/sanitizers.h"
#include "mlxtape/base/error.h"

namespace mlxtape {
namespace {

struct Threads : testing::Test {
  void TearDown() override { set_threads(0); }
};

TEST_F(Threads, EveryTaskRunsOnce) {
  for (const int count : {1, 2, 3, 8}) {
    set_threads(count);
    EXPECT_EQ(threads(), count);
    for (const std::int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      parallel_for(tasks, [&](std::int64_t i) { ++runs[static_cast<std::size_t>(i)]; });
      for (const auto& r : runs) ASSERT_EQ(r.load(), 1) << count << " threads, " << tasks;
    }
  }
}

TEST_F(Threads, WorkIsSharedWhenItTakesTime) {
  set_threads(4);
  std::atomic<int> together{0}, most{0};
  parallel_for(16, [&](std::int64_t) {
    const int now = ++together;
    int seen = most.load();
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    --together;
  });
  EXPECT_GE(most.load(), 2);
}

TEST_F(Threads, NestedCallsStayOnTheirThread) {
  set_threads(3);
  std::atomic<int> runs{0};
  parallel_for(5, [&](std::int64_t) {
    const auto self = std::this_thread::get_id();
    parallel_for(7, [&](std::int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), self);
      ++runs;
    });
  });
  EXPECT_EQ(runs.load(), 35);
}

TEST_F(Threads, HostThreadsCallAtTheSameTime) {
  set_threads(2);
  std::vector<std::thread> hosts;
  std::atomic<std::int64_t> sum{0};
  for (int h = 0; h < 4; ++h) {
    hosts.emplace_back([&] {
      for (int i = 0; i < 200; ++i) parallel_for(10, [&](std::int64_t task) { sum += task; });
    });
  }
  for (std::thread& host : hosts) host.join();
  EXPECT_EQ(sum.load(), 4 * 200 * 45);
}

TEST_F(Threads, TheCountCanChangeWhileOthersWork) {
  std::atomic<bool> stop{false};
  std::atomic<std::int64_t> sum{0};
  std::thread host([&] {
    while (!stop) parallel_for(3, [&](std::int64_t) { ++sum; });
  });
  for (int i = 0; i < 50; ++i) set_threads(1 + i % 4);
  stop = true;
  host.join();
  EXPECT_EQ(sum.load() % 3, 0);
}

TEST_F(Threads, AnExceptionReachesTheCallerAndThePoolGoesOn) {
  set_threads(3);
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(parallel_for(50,
                              [&](std::int64_t i) {
                                if (i == 31) throw std::runtime_error("task");
                              }),
                 std::runtime_error);
    std::atomic<int> runs{0};
    parallel_for(50, [&](std::int64_t) { ++runs; });
    ASSERT_EQ(runs.load(), 50);
  }
}

TEST_F(Threads, AfterAnExceptionTheOtherTasksAreNotEvenCounted) {
  set_threads(3);
  EXPECT_THROW(
      parallel_for(std::int64_t{1} << 62, [](std::int64_t) { throw std::runtime_error("stop"); }),
      std::runtime_error);
}

TEST_F(Threads, BadCountsAreRefused) {
  EXPECT_THROW(set_threads(-1), Error);
  EXPECT_THROW(set_threads(5000), Error);
  set_threads(2);  // else a machine of one core has no inside
  parallel_for(2, [](std::int64_t) { EXPECT_THROW(set_threads(2), Error); });
}

// Workers that sleep must wake up again.
TEST_F(Threads, WorksAfterAPause) {
  set_threads(2);
  for (int i = 0; i < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic<int> runs{0};
    parallel_for(100, [&](std::int64_t) { ++runs; });
    EXPECT_EQ(runs.load(), 100);
  }
}

#ifndef MT_THREAD_SANITIZER  // ThreadSanitizer does not follow threads into a child
TEST_F(Threads, AForkedChildHasItsOwnWorkers) {
  set_threads(2);
  parallel_for(10, [](std::int64_t) {});
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> runs{0};
    parallel_for(100, [&](std::int64_t) { ++runs; });
    _exit(runs.load() == 100 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

}  // namespace
}  // namespace mlxtape
