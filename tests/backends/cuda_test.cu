// What is special about CUDA: failures that come later, memory and streams of other libraries.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "mlxtape/core/encoder.h"
#include "mlxtape/ops/softmax.h"

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

// The context is lost with it, so another process does it.
TEST_F(Cuda, AFailureOnTheDeviceNamesItsKernel) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const auto encoder = cuda_device()->make_encoder();
        const Tensor t = encoder->zeros({64}, DType::kF32);
        encoder->dispatch(user_kernel("user_fill", fill), 2.0F, {}, {t});
        encoder->commit_and_wait();
        encoder->dispatch(user_kernel("user_stray", write_nowhere), 0, {}, {t});
        try {
          encoder->commit_and_wait();
        } catch (const Error& e) {
          std::fprintf(stderr, "%s\n", e.what());
          std::_Exit(0);
        }
        std::_Exit(1);
      },
      testing::ExitedWithCode(0), "illegal memory access.*user_stray");
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

TEST_F(Cuda, AStreamOfAnotherLibraryIsKeptInOrder) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  {
    const auto ours = cuda_device()->make_encoder();
    const auto theirs = cuda_device()->make_encoder_on(stream);
    const Tensor x = ours->zeros({4096, 4096}, DType::kF32);
    for (int i = 0; i < 20; ++i) {
      const Tensor y = ops::softmax(i % 2 == 0 ? *ours : *theirs, x);
      const Tensor z = ops::softmax(i % 2 == 0 ? *theirs : *ours, y);
      EXPECT_EQ(values(i % 3 == 0 ? *ours : *theirs, z.select(0, 4095)),
                std::vector<float>(4096, 1.0F / 4096));
    }
  }
  cudaStreamDestroy(stream);
}

TEST_F(Cuda, AskingForMoreThanThereIsIsAnError) {
  const auto encoder = cuda_device()->make_encoder();
  EXPECT_THROW(encoder->empty({std::int64_t{1} << 40}, DType::kF32), Error);
  const Tensor t = encoder->zeros({64}, DType::kF32);
  EXPECT_EQ(values(*encoder, t), std::vector<float>(64, 0));
}

}  // namespace
}  // namespace mlxtape
