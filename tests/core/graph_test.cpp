// Graphs, traces, copies and foreign queues: what every backend's encoder promises beyond dispatch.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <stdexcept>

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
  // Whatever was free is used by somebody else, who must not see the replay.
  std::vector<Tensor> others;
  for (std::uint64_t i = 0; i < 4; ++i) others.push_back(random({40, 300}, 3 + i));
  std::vector<std::vector<unsigned char>> before;
  for (const Tensor& t : others) before.push_back(bits_of(encoder(), t));
  const std::uint64_t dispatches = encoder().counters().dispatches;
  encoder().replay(*graph);
  EXPECT_EQ(encoder().counters().dispatches, dispatches + 2);
  EXPECT_EQ(bits_of(encoder(), y), twice(other));
  for (std::size_t i = 0; i < others.size(); ++i) {
    EXPECT_EQ(bits_of(encoder(), others[i]), before[i]) << i;
  }
}

TEST(Graph, KeepsTheScratchMemoryOfItsKernels) {
  constexpr std::size_t kBytes = 5000;
  KernelRegistry& registry = KernelRegistry::instance();
  registry.add(
      Backend::kCpu, "fill_scratch",
      [](const KernelCall& call) { std::memset(call.workspace, 0x5A, kBytes); },
      [](const void*) { return kBytes; });
  const auto encoder = Device::cpu().make_encoder();
  encoder->begin_capture();
  encoder->dispatch(registry.find(Backend::kCpu, "fill_scratch"), 0, {}, {});
  const auto graph = encoder->end_capture();
  const Tensor other =
      encoder->zeros({kBytes}, DType::kU8);  // as large: it would get the same block
  encoder->replay(*graph);
  for (const std::uint8_t byte : other.host<std::uint8_t>()) ASSERT_EQ(byte, 0);
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

TEST(Graph, OfAFailedCaptureThereIsNone) {
  KernelRegistry& registry = KernelRegistry::instance();
  registry.add(
      Backend::kCpu, "never_has_room", [](const KernelCall&) {},
      [](const void*) { return std::size_t{1} << 61; });
  registry.add(Backend::kCpu, "is_fine", [](const KernelCall&) {});
  registry.add(Backend::kCpu, "fails_when_replayed",
               [](const KernelCall&) { throw std::runtime_error("of itself"); });
  const auto encoder = Device::cpu().make_encoder();
  const auto dispatch = [&](const char* name) {
    encoder->dispatch(registry.find(Backend::kCpu, name), 0, {}, {});
  };
  encoder->begin_capture();
  dispatch("is_fine");
  EXPECT_THROW(dispatch("never_has_room"), Error);
  EXPECT_THROW(encoder->end_capture(), Error);
  encoder->begin_capture();  // as if nothing had happened
  dispatch("is_fine");
  dispatch("fails_when_replayed");
  const auto graph = encoder->end_capture();
  EXPECT_EQ(graph->nodes(), 2U);
  try {
    encoder->replay(*graph);
    FAIL() << "a kernel that failed was not noticed";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("fails_when_replayed"), std::string::npos) << e.what();
  }
}

TEST_P(OnEncoder, ATraceMayGoBeforeItsKernelsEnd) {
  const Tensor x = random({40, 300}, 1);
  encoder().set_trace(std::make_shared<Trace>());
  ops::softmax(encoder(), x);
  encoder().set_trace(nullptr);
  encoder().commit_and_wait();
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
