// Graphs, traces, copies and foreign queues: what every backend's encoder promises beyond dispatch.
#include <gtest/gtest.h>

#include <cmath>

#include "mlxtape/ops/softmax.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

class OnEncoder : public OnDevice {
 protected:
  Tensor random(Shape shape, std::uint64_t seed) {
    return random_tensor(encoder(), shape, DType::kF32, seed);
  }
};

TEST_P(OnEncoder, AGraphRunsAgainOnWhatTheTensorsHoldNow) {
  const Tensor x = random({40, 300}, 1);
  const Tensor other = random({40, 300}, 2);
  Tensor y;
  encoder().begin_capture();
  {
    const Tensor once = ops::softmax(encoder(), x);
    y = ops::softmax(encoder(), once);  // the first result is dropped: the graph must keep it
  }
  const auto graph = encoder().end_capture();
  EXPECT_EQ(graph->nodes(), 2U);
  const auto twice = [&](const Tensor& t) {
    return bits_of(encoder(), ops::softmax(encoder(), ops::softmax(encoder(), t)));
  };
  encoder().replay(*graph);
  EXPECT_EQ(bits_of(encoder(), y), twice(x));
  encoder().copy(other, x);
  const Tensor noise = random({40, 300}, 3);  // whatever was free is used by somebody else
  encoder().replay(*graph);
  EXPECT_EQ(bits_of(encoder(), y), twice(other));
}

TEST_P(OnEncoder, ZerosOfAGraphAreZeroAtEveryReplay) {
  const Tensor ones = upload(std::vector<double>(100, 1.0), {100}, DType::kF32);
  encoder().begin_capture();
  const Tensor zero = encoder().zeros({100}, DType::kF32);
  const Tensor seen = encoder().empty({100}, DType::kF32);
  encoder().copy(zero, seen);
  encoder().copy(ones, zero);
  const auto graph = encoder().end_capture();
  for (int i = 0; i < 2; ++i) {
    encoder().replay(*graph);
    EXPECT_EQ(download(seen), std::vector<double>(100, 0.0));
    EXPECT_EQ(download(zero), std::vector<double>(100, 1.0));
  }
}

TEST_P(OnEncoder, ACaptureTakesKernelsAlone) {
  const Tensor x = random({4, 4}, 1);
  std::vector<float> host(16);
  EXPECT_THROW(encoder().end_capture(), Error);
  encoder().begin_capture();
  EXPECT_THROW(encoder().begin_capture(), Error);
  EXPECT_THROW(encoder().commit_and_wait(), Error);
  EXPECT_THROW(encoder().download(x, host.data(), 64), Error);
  EXPECT_THROW(encoder().upload(host.data(), 64, x), Error);
  EXPECT_EQ(encoder().end_capture()->nodes(), 0U);
  EXPECT_NO_THROW(encoder().download(x, host.data(), 64));
}

TEST_P(OnEncoder, ATraceNamesEveryKernel) {
  const auto trace = std::make_shared<Trace>();
  encoder().set_trace(trace);
  const Tensor x = random({8, 8}, 1);
  ops::softmax_backward(encoder(), ops::softmax(encoder(), x), x);
  encoder().commit_and_wait();
  encoder().set_trace(nullptr);
  EXPECT_EQ(trace->size(), 2U);
  EXPECT_NE(trace->json().find("softmax_bwd_f32"), std::string::npos);
}

TEST_P(OnEncoder, CopiesAreChecked) {
  const Tensor x = random({3, 5}, 1);
  const Tensor y = encoder().empty({3, 5}, DType::kF32);
  encoder().copy(x, y);
  EXPECT_EQ(bits_of(encoder(), x), bits_of(encoder(), y));
  EXPECT_THROW(encoder().copy(x, encoder().empty({5, 3}, DType::kF32)), Error);
  EXPECT_THROW(encoder().copy(x, encoder().empty({3, 5}, DType::kI32)), Error);
  EXPECT_THROW(encoder().copy(x.transpose({1, 0}), encoder().empty({5, 3}, DType::kF32)), Error);
}

TEST_P(OnEncoder, OutOfMemoryLeavesTheDeviceUsable) {
  MemoryPool& memory = encoder().device().memory();
  const Tensor x = random({40, 300}, 1);
  memory.set_limit(memory.stats().current + (1U << 20U));
  EXPECT_THROW(encoder().empty({1 << 22}, DType::kF32), Error);
  memory.set_limit(0);
  EXPECT_NO_THROW(ops::softmax(encoder(), x));
}

MT_ON_EVERY_BACKEND(OnEncoder);

}  // namespace
}  // namespace mlxtape::test
