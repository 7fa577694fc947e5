// What is special about CUDA: failures that come later, memory and streams of other libraries.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "mlxtape/core/encoder.h"
#include "mlxtape/ops.h"

namespace mlxtape {
namespace {

Device* cuda_device() {
  for (Device* device : Device::all()) {
    if (device->backend() == Backend::kCuda) return device;
  }
  return nullptr;
}

struct Cuda : testing::Test {
  void SetUp() override {
    if (cuda_device() == nullptr) {
      GTEST_SKIP() << Device::absent().front().reason;
    }
  }
};

__global__ void fill_kernel(float* to, float value, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = value;
}

void fill(const KernelCall& call) {
  fill_kernel<<<1, 128, 0, static_cast<cudaStream_t>(call.queue)>>>(call.output<float>(0),
                                                                    call.as<float>(), 64);
}

void write_nowhere(const KernelCall& call) {
  fill_kernel<<<1, 128, 0, static_cast<cudaStream_t>(call.queue)>>>(
      reinterpret_cast<float*>(std::uintptr_t{64}), 1, 64);
}

void refuse_to_launch(const KernelCall& call) {
  fill_kernel<<<1, 4096, 0, static_cast<cudaStream_t>(call.queue)>>>(call.output<float>(0), 1, 64);
}

const Kernel& user_kernel(const char* name, KernelFn fn) {
  KernelRegistry& registry = KernelRegistry::instance();
  if (!registry.has(Backend::kCuda, name)) registry.add(Backend::kCuda, name, fn);
  return registry.find(Backend::kCuda, name);
}

std::vector<float> values(CommandEncoder& encoder, const Tensor& t) {
  std::vector<float> host(static_cast<std::size_t>(t.size()));
  encoder.download(t, host.data(), t.bytes());
  return host;
}

TEST_F(Cuda, UserKernelsRunBesideOurs) {
  const auto encoder = cuda_device()->make_encoder();
  const Tensor t = encoder->zeros({64}, DType::kF32);
  encoder->dispatch(user_kernel("user_fill", fill), 3.0F, {}, {t});
  EXPECT_EQ(values(*encoder, t), std::vector<float>(64, 3));
}

TEST_F(Cuda, AFailedLaunchIsNamedAndTheEncoderGoesOn) {
  const auto encoder = cuda_device()->make_encoder();
  const Tensor t = encoder->zeros({64}, DType::kF32);
  try {
    encoder->dispatch(user_kernel("user_too_wide", refuse_to_launch), 0, {}, {t});
    FAIL() << "a block of 4096 threads was launched";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("user_too_wide"), std::string::npos) << e.what();
  }
  encoder->dispatch(user_kernel("user_fill", fill), 2.0F, {}, {t});
  EXPECT_EQ(values(*encoder, t), std::vector<float>(64, 2));
}

// The context is lost with a failure, so another process has it. body ends it with exit code 0 after
// printing the message.
#define EXPECT_DEVICE_FAILURE(body, message)                \
  GTEST_FLAG_SET(death_test_style, "threadsafe");           \
  EXPECT_EXIT(                                              \
      {                                                     \
        const auto encoder = cuda_device()->make_encoder(); \
        const Tensor t = encoder->zeros({64}, DType::kF32); \
        try {                                               \
          body;                                             \
        } catch (const Error& e) {                          \
          std::fprintf(stderr, "%s\n", e.what());           \
          std::_Exit(0);                                    \
        }                                                   \
        std::_Exit(1);                                      \
      },                                                    \
      testing::ExitedWithCode(0), message)

void run(CommandEncoder& encoder, const Tensor& t, const char* name, KernelFn fn, int times) {
  for (int i = 0; i < times; ++i) encoder.dispatch(user_kernel(name, fn), 2.0F, {}, {t});
}

TEST_F(Cuda, AFailureOnTheDeviceNamesItsKernel) {
  EXPECT_DEVICE_FAILURE(
      {
        run(*encoder, t, "user_fill", fill, 1);
        encoder->commit_and_wait();
        run(*encoder, t, "user_stray", write_nowhere, 1);
        encoder->commit_and_wait();
      },
      "illegal memory access was encountered in user_stray;");
}

TEST_F(Cuda, AFailureAmongManyIsNarrowedDown) {
  EXPECT_DEVICE_FAILURE(
      {
        run(*encoder, t, "user_early", fill, 40);
        encoder->commit_and_wait();
        run(*encoder, t, "user_before", fill, 48);
        run(*encoder, t, "user_near", fill, 8);
        run(*encoder, t, "user_stray", write_nowhere, 1);
        run(*encoder, t, "user_after", fill, 5);
        encoder->commit_and_wait();
      },
      "illegal memory access was encountered in one of user_near, user_stray, user_after ");
}

TEST_F(Cuda, AFailureIsNotBlamedOnWhoeverFindsIt) {
  EXPECT_DEVICE_FAILURE(
      {
        encoder->commit_and_wait();
        run(*encoder, t, "user_stray", write_nowhere, 1);
        cudaDeviceSynchronize();
        cuda_device()->make_encoder()->dispatch(user_kernel("user_innocent", fill), 1.0F, {}, {t});
      },
      "illegal memory access was encountered in user_stray;");
}

TEST_F(Cuda, AFailureInAReplayIsOne) {
  EXPECT_DEVICE_FAILURE(
      {
        encoder->commit_and_wait();
        encoder->begin_capture();
        run(*encoder, t, "user_stray", write_nowhere, 1);
        const auto graph = encoder->end_capture();
        encoder->replay(*graph);
        encoder->commit_and_wait();
      },
      "illegal memory access was encountered in a replayed graph;");
}

TEST_F(Cuda, MemoryOfAnotherLibraryIsUsedInPlace) {
  const auto encoder = cuda_device()->make_encoder();
  float* raw = nullptr;
  ASSERT_EQ(cudaMalloc(&raw, 256), cudaSuccess);
  bool done = false;
  {
    const Tensor t(Buffer::wrap(*cuda_device(), raw, 256, [&] { done = true; }), DType::kF32, {64});
    EXPECT_EQ(t.data(), raw);
    encoder->dispatch(user_kernel("user_fill", fill), 5.0F, {}, {t});
    EXPECT_EQ(values(*encoder, t), std::vector<float>(64, 5));
  }
  EXPECT_TRUE(done);
  cudaFree(raw);
}

__global__ void slow_add_kernel(float* to, float value, int n) {
  const long long end = clock64() + 200000;  // about 0.1 ms
  while (clock64() < end) {
  }
  for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] += value;
}

void slow_add(const KernelCall& call) {
  slow_add_kernel<<<1, 128, 0, static_cast<cudaStream_t>(call.queue)>>>(call.output<float>(0),
                                                                        call.as<float>(), 64);
}

// Whoever of two encoders comes later sees what the other did, although the kernels are slow and nobody
// waits; so does a download.
TEST_F(Cuda, AStreamOfAnotherLibraryIsKeptInOrder) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  {
    const auto ours = cuda_device()->make_encoder();
    const auto theirs = cuda_device()->make_encoder_on(stream);
    const Kernel& fill_now = user_kernel("user_fill", fill);
    const Kernel& add_late = user_kernel("user_slow_add", slow_add);
    for (int i = 0; i < 20; ++i) {
      CommandEncoder& first = i % 2 == 0 ? *ours : *theirs;
      CommandEncoder& second = i % 2 == 0 ? *theirs : *ours;
      const auto start = static_cast<float>(100 * i);
      const Tensor t = first.empty({64}, DType::kF32);
      first.dispatch(add_late, 0.0F, {}, {t});
      first.dispatch(fill_now, start, {}, {t});
      first.dispatch(add_late, 1.0F, {}, {t});
      second.dispatch(add_late, 2.0F, {}, {t});
      first.dispatch(add_late, 4.0F, {}, {t});
      EXPECT_EQ(values(second, t), std::vector<float>(64, start + 7)) << i;
      const Tensor copy = second.empty({64}, DType::kF32);  // t's block, if it came back too early
      first.dispatch(add_late, 8.0F, {}, {t});
      second.copy(t, copy);
      EXPECT_EQ(values(first, copy), std::vector<float>(64, start + 15)) << i;
    }
  }
  cudaStreamDestroy(stream);
}

// Our kernels start while the one before ends. Memory is unguarded here, so that nothing lies between
// them, and every buffer is used again at once.
TEST_F(Cuda, OverlappingKernelsKeepTheirOrder) {
  const auto encoder = cuda_device()->make_encoder();
  const Tensor wide = encoder->empty({512, 4096}, DType::kF32);
  std::vector<float> host(512 * 4096);
  for (std::size_t i = 0; i < host.size(); ++i) {
    host[i] = static_cast<float>(i * 2654435761U % 1000) / 500.0F - 1;
  }
  encoder->upload(host.data(), wide.bytes(), wide);
  const Tensor w = encoder->zeros({512}, DType::kF32);
  const Tensor taps = encoder->empty({512, 4}, DType::kF32);
  encoder->upload(host.data(), taps.bytes(), taps);
  encoder->upload(host.data(), w.bytes(), w);
  const auto chain = [&](bool waits) {
    const auto pause = [&] {
      if (waits) encoder->commit_and_wait();
    };
    Tensor x = encoder->contiguous(wide.transpose({1, 0}));  // [4096, 512]
    pause();
    for (int i = 0; i < 4; ++i) {
      const ops::RmsNorm norm = ops::rms_norm(*encoder, x, w, 1e-6F);
      pause();
      const auto back = ops::rms_norm_backward(*encoder, x, w, norm.r, norm.y);
      pause();
      const Tensor y =
          ops::conv1d_depthwise_causal(*encoder, back.dx.reshape({1, 4096, 512}), taps).y;
      pause();
      const auto conv =
          ops::conv1d_depthwise_causal_backward(*encoder, back.dx.reshape({1, 4096, 512}), taps, y);
      pause();
      const Tensor p = ops::softmax(*encoder, conv.dx.reshape({4096, 512}));
      pause();
      const ops::MoeRoute route = ops::moe_route(*encoder, p, 10);
      pause();
      const Tensor taken = ops::take_along_axis(*encoder, p, route.indices, 1);
      pause();
      x = ops::take_along_axis_backward(*encoder, taken, route.indices, {4096, 512}, 1);
      pause();
      x = ops::softmax_backward(*encoder, p, x);
      pause();
    }
    return x;
  };
  const std::vector<float> want = values(*encoder, chain(true));
  for (int i = 0; i < 20; ++i) ASSERT_EQ(values(*encoder, chain(false)), want) << i;
  encoder->begin_capture();
  const Tensor captured = chain(false);
  const auto graph = encoder->end_capture();
  for (int i = 0; i < 20; ++i) {
    encoder->replay(*graph);
    ASSERT_EQ(values(*encoder, captured), want) << i;
  }
  encoder->device().set_overlap(false);
  EXPECT_EQ(values(*encoder, chain(false)), want);
  encoder->device().set_overlap(true);
}

// A kernel reads what the one before it wrote, where the one before that has just read the old numbers
// through the same caches.
TEST_F(Cuda, AWeightThatChangesIsSeen) {
  const auto encoder = cuda_device()->make_encoder();
  const auto filled = [&](Shape shape, float value) {
    const Tensor t = encoder->empty(shape, DType::kF32);
    const std::vector<float> host(static_cast<std::size_t>(t.size()), value);
    encoder->upload(host.data(), t.bytes(), t);
    return t;
  };
  const Tensor x = filled({64, 512}, 1);
  const Tensor taps = filled({512, 2}, 1);
  const Tensor w = filled({512}, 0);
  const Tensor steps[] = {filled({1, 512}, 1), filled({1, 512}, 2), filled({1, 512}, 3)};
  std::vector<Tensor> results;
  for (int i = 0; i < 300; ++i) {
    results.push_back(ops::rms_norm(*encoder, x, w, 0).y);
    // The state of a convolution of two taps is the row before: here, w.
    ops::conv1d_depthwise_causal_step(*encoder, steps[i % 3], taps, w.reshape({1, 1, 512}));
  }
  for (int i = 0; i < 300; ++i) {
    const auto want = static_cast<float>(i == 0 ? 0 : (i - 1) % 3 + 1);
    ASSERT_EQ(values(*encoder, results[static_cast<std::size_t>(i)]),
              std::vector<float>(64 * 512, want))
        << i;
  }
}

TEST_F(Cuda, AskingForMoreThanThereIsIsAnError) {
  const auto encoder = cuda_device()->make_encoder();
  EXPECT_THROW(encoder->empty({std::int64_t{1} << 40}, DType::kF32), Error);
  const Tensor t = encoder->zeros({64}, DType::kF32);
  EXPECT_EQ(values(*encoder, t), std::vector<float>(64, 0));
}

}  // namespace
}  // namespace mlxtape
