// Graphs, traces, copies and foreign queues: what every backend's encoder promises beyond dispatch.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
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
  EXPECT_THROW(encoder().copy(x, y.select(0, 0).broadcast_to({3, 5})), Error);
}

// Any view to any view: transposed, sliced, stretched, reversed, of every element size.
TEST_P(OnEncoder, CopiesBetweenViews) {
  Noise noise(7);
  const auto view_of = [&](DType dtype, const Shape& shape, bool stretches) {
    // The axes in a random order, each with a random step in one direction or the other.
    const std::int64_t rank = shape.rank();
    std::vector<std::int64_t> order(static_cast<std::size_t>(rank));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1],
                order[static_cast<std::size_t>(noise.below(static_cast<std::int64_t>(i)))]);
    }
    Strides strides = shape;
    std::int64_t room = 1, offset = 0;
    for (const std::int64_t axis : order) {
      if (stretches && noise.below(6) == 0) {
        strides[axis] = 0;
        continue;
      }
      const std::int64_t step = 1 + noise.below(2) * noise.below(3);
      const bool backwards = noise.below(4) == 0;
      strides[axis] = backwards ? -room * step : room * step;
      if (backwards) offset += (shape[axis] - 1) * room * step;
      room *= shape[axis] * step;
    }
    const Tensor whole = encoder().empty({room}, dtype);
    std::vector<unsigned char> bytes(whole.bytes());
    for (unsigned char& b : bytes) b = static_cast<unsigned char>(noise.below(256));
    encoder().upload(bytes.data(), bytes.size(), whole);
    return Tensor(whole.buffer(), dtype, shape, strides, offset);
  };
  // Element by element, on the host.
  const auto elements = [&](const Tensor& t) {
    const std::int64_t room = static_cast<std::int64_t>(t.buffer().bytes() / size_of(t.dtype()));
    const std::vector<unsigned char> bytes =
        bits_of(encoder(), Tensor(t.buffer(), t.dtype(), {room}));
    std::vector<unsigned char> result;
    for (std::int64_t i = 0; i < t.size(); ++i) {
      std::int64_t rest = i, at = t.offset();
      for (std::int64_t axis = t.rank() - 1; axis >= 0; --axis) {
        at += rest % t.dim(axis) * t.strides()[axis];
        rest /= t.dim(axis);
      }
      const auto size = static_cast<std::int64_t>(size_of(t.dtype()));
      result.insert(result.end(), bytes.begin() + at * size, bytes.begin() + (at + 1) * size);
    }
    return result;
  };
  const Shape shapes[] = {
      {},          {1},         {7},          {33, 65},       {65, 33},
      {2, 40, 70}, {5, 1, 64},  {3, 4, 5, 6}, {1, 100, 1, 9}, {2, 2, 2, 2, 2, 3},
      {4, 300},    {3, 2, 512}, {2, 5000}};
  for (const DType dtype : {DType::kU8, DType::kF16, DType::kF32, DType::kI64}) {
    for (const Shape& shape : shapes) {
      for (int i = 0; i < 6; ++i) {
        const Tensor from = view_of(dtype, shape, true);
        const Tensor to = view_of(dtype, shape, false);
        encoder().copy(from, to);
        ASSERT_EQ(elements(to), elements(from))
            << name_of(dtype) << " " << to_string(shape) << " " << to_string(from.strides())
            << " to " << to_string(to.strides());
        const Tensor dense = encoder().contiguous(from);
        ASSERT_EQ(bits_of(encoder(), dense), elements(from));
      }
    }
  }
}

TEST_P(OnEncoder, FillsAndAdds) {
  for (const DType dtype :
       {DType::kBool, DType::kU16, DType::kI64, DType::kF16, DType::kBF16, DType::kF32}) {
    for (const std::int64_t n : {0, 1, 1000, 40000}) {
      const double value = dtype == DType::kBool ? 1 : 3;
      EXPECT_EQ(download(encoder().full({n}, dtype, value)),
                std::vector<double>(static_cast<std::size_t>(n), value));
    }
  }
  Noise noise(3);
  for (const DType sum : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType more : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const std::int64_t n : {0, 1, 15, 17, 40001}) {
        for (const std::int64_t offset : {0, 1}) {
          const auto a = random_values(noise, n, sum), b = random_values(noise, n, more);
          const Tensor total = upload(a, {n}, sum, offset);
          encoder().add_into(total, upload(b, {n}, more, offset));
          std::vector<double> want;
          for (std::size_t i = 0; i < a.size(); ++i) {
            want.push_back(round_to(sum, round_to(DType::kF32, a[i] + b[i])));
          }
          ASSERT_EQ(download(total), want) << name_of(sum) << " " << name_of(more) << " " << n;
        }
      }
    }
  }
  const Tensor x = random({4, 3}, 1);
  EXPECT_THROW(encoder().add_into(x, random({3, 4}, 1)), Error);
  EXPECT_THROW(encoder().add_into(x.transpose({1, 0}), random({3, 4}, 1)), Error);
  EXPECT_THROW(encoder().add_into(x, encoder().zeros({4, 3}, DType::kI32)), Error);
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
