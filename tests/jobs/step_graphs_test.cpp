// Steps that are captured and replayed: the bits, the memory they take, and what happens where a step fails.
#include "jobs/step_graphs.h"

#include "mlxtape/core/trace.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/softmax.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using jobs::StepGraphs;

class StepGraphsTest : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped()) return;
    pool().set_guarded(false);  // guarded memory is never planned
    pool().trim();
    x_ = upload(std::vector<double>(kMost, 0), {kMost}, DType::kF32);
    y_ = upload(std::vector<double>(kMost, 0), {kMost}, DType::kF32);
  }
  MemoryPool& pool() { return encoder().device().memory(); }

  static constexpr std::int64_t kMost = 1 << 16;

  // Of the first n numbers of x: y = softmax(x + x) + softmax(x), which takes some memory on the way.
  void work(std::int64_t n) {
    const Tensor x = x_.slice(0, 0, n);
    const Tensor twice = ops::softmax(encoder(), ops::add(encoder(), x, x));
    encoder().copy(ops::add(encoder(), twice, ops::softmax(encoder(), x)), y_.slice(0, 0, n));
  }
  std::vector<double> x_for(std::int64_t step, std::int64_t n) {
    Noise noise(static_cast<std::uint64_t>(step));
    std::vector<double> values(static_cast<std::size_t>(n));
    for (double& v : values) v = static_cast<double>(noise.below(1000)) / 250;
    return values;
  }
  void stage(std::int64_t step, std::int64_t n) {
    const std::vector<double> values = x_for(step, n);
    const std::vector<float> floats(values.begin(), values.end());
    encoder().upload(floats.data(), floats.size() * 4, x_.slice(0, 0, n));
  }
  std::vector<unsigned char> step(StepGraphs& graphs, std::int64_t number, std::int64_t n) {
    stage(number, n);
    graphs.run(std::to_string(n), [&] {
      ++called_;
      work(n);
    });
    return bits_of(encoder(), y_.slice(0, 0, n));
  }
  std::vector<unsigned char> plain_step(std::int64_t number, std::int64_t n) {
    stage(number, n);
    work(n);
    return bits_of(encoder(), y_.slice(0, 0, n));
  }

  Tensor x_, y_;
  int called_ = 0;
};

TEST_P(StepGraphsTest, ReplaysHaveTheSameBits) {
  StepGraphs graphs(encoder(), true);
  constexpr std::int64_t kLengths[] = {512, 300, 512, 300, 512, 1000, 300, 512, 1000, 1000};
  std::int64_t number = 0;
  for (const std::int64_t n : kLengths) {
    ++number;
    EXPECT_EQ(step(graphs, number, n), plain_step(number, n)) << "step " << number;
  }
  EXPECT_GT(graphs.replays(), 0U);
}

TEST_P(StepGraphsTest, AReplayCallsNothing) {
  StepGraphs graphs(encoder(), true);
  step(graphs, 1, 512);
  EXPECT_EQ(called_, 2);  // rehearsed, and run
  EXPECT_EQ(graphs.replays(), 0U);
  step(graphs, 2, 512);
  EXPECT_EQ(called_, 3);  // captured
  EXPECT_EQ(graphs.replays(), 1U);
  for (int i = 3; i < 6; ++i) step(graphs, i, 512);
  EXPECT_EQ(called_, 3);
  EXPECT_EQ(graphs.replays(), 4U);
}

TEST_P(StepGraphsTest, OffItCallsAndNoMore) {
  StepGraphs graphs(encoder(), false);
  for (int i = 1; i < 4; ++i) step(graphs, i, 512);
  EXPECT_EQ(called_, 3);
  EXPECT_EQ(graphs.replays(), 0U);
}

// Three arrays of one step are there at a time: shapes do not add up, and the rehearsal takes none.
TEST_P(StepGraphsTest, ShapesShareTheirMemory) {
  const std::size_t before = pool().stats().current;
  StepGraphs graphs(encoder(), true);
  pool().reset_peak();
  for (int round = 0; round < 3; ++round) {
    for (const std::int64_t n : {kMost, kMost / 2, kMost / 4 * 3}) step(graphs, round, n);
  }
  EXPECT_GT(graphs.replays(), 0U);
  EXPECT_LE(pool().stats().peak - before, 3U * kMost * 4 + 4096);
}

// What was captured for the small ones is dropped with their memory, and captured again.
TEST_P(StepGraphsTest, ALargerShapeTakesTheMemoryOfTheOthers) {
  StepGraphs graphs(encoder(), true);
  const std::size_t before = pool().stats().current;
  for (int i = 0; i < 3; ++i) step(graphs, i, kMost / 4);
  EXPECT_EQ(graphs.replays(), 2U);
  pool().reset_peak();
  step(graphs, 3, kMost);
  EXPECT_LE(pool().stats().peak - before, 3U * kMost * 4 + 4096);
  called_ = 0;
  EXPECT_EQ(step(graphs, 4, kMost / 4), plain_step(4, kMost / 4));
  EXPECT_GT(called_, 0);
}

TEST_P(StepGraphsTest, TheShapeUsedLongestAgoIsDropped) {
  StepGraphs graphs(encoder(), true);
  for (std::int64_t n = 200; n > 136; --n) step(graphs, 1, n);  // 64 shapes, the largest first
  step(graphs, 1, 200);
  called_ = 0;
  step(graphs, 1, 100);  // one more
  EXPECT_EQ(called_, 2);
  step(graphs, 1, 200);  // it was used after all others
  EXPECT_EQ(called_, 2);
  step(graphs, 1, 199);  // dropped: rehearsed and run again
  EXPECT_EQ(called_, 4);
}

TEST_P(StepGraphsTest, ClearGivesTheMemoryBack) {
  const std::size_t before = pool().stats().current;
  StepGraphs graphs(encoder(), true);
  for (int i = 0; i < 3; ++i) step(graphs, i, kMost);
  EXPECT_GT(pool().stats().current, before);
  graphs.clear();
  EXPECT_EQ(pool().stats().current, before);
  EXPECT_EQ(step(graphs, 7, kMost), plain_step(7, kMost));
}

TEST_P(StepGraphsTest, AStepThatFailsIsForgotten) {
  StepGraphs graphs(encoder(), true);
  for (int failing_call = 0; failing_call < 3; ++failing_call) {
    int call = 0;
    for (int i = 0; i < 3; ++i) {
      stage(i, 512);
      const auto body = [&] {
        work(512);
        if (call++ == failing_call) throw Error(Errc::kArgument, "as planned");
      };
      const std::string shape = "512, fails in " + std::to_string(failing_call);
      try {
        graphs.run(shape, body);
      } catch (const Error& e) {
        EXPECT_STREQ(e.what(), "as planned");
        graphs.run(shape, body);
      }
      const auto got = bits_of(encoder(), y_.slice(0, 0, 512));
      EXPECT_EQ(got, plain_step(i, 512));
    }
    EXPECT_GT(call, failing_call);
  }
}

// Else a replay would write over what somebody still reads, or wait in the middle.
TEST_P(StepGraphsTest, WhatAStepMayNotDo) {
  StepGraphs graphs(encoder(), true);
  Tensor kept;
  expect_error(Errc::kArgument, "must not outlive it, got 1 tensors",
               [&] { graphs.run("keeps", [&] { kept = ops::softmax(encoder(), x_); }); });
  kept = {};
  expect_error(Errc::kArgument, "may only run kernels, got download", [&] {
    float first = 0;
    graphs.run("waits", [&] {
      encoder().download(ops::softmax(encoder(), x_).slice(0, 0, 1), &first, sizeof first);
    });
  });
  EXPECT_EQ(step(graphs, 1, 512), plain_step(1, 512));
}

TEST_P(StepGraphsTest, ATraceShowsEachKernel) {
  StepGraphs graphs(encoder(), true);
  for (int i = 0; i < 3; ++i) step(graphs, i, 512);
  const auto trace = std::make_shared<Trace>();
  encoder().set_trace(trace);
  const auto replays = graphs.replays();
  step(graphs, 3, 512);
  encoder().set_trace(nullptr);
  EXPECT_EQ(graphs.replays(), replays);
  EXPECT_GE(trace->size(), 5U);
}

MT_ON_EVERY_BACKEND(StepGraphsTest);

}  // namespace
}  // namespace mlxtape::test
