// CUDA kernels of dropout (formula: mlxtape/ops/dropout.h). A thread has two packs, half the tensor apart, whose
// words come from the same counters. Bound by memory for f32, for 16-bit types by the rounds of Threefry.
#include "backends/cuda/device/threefry.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "dropout_args.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

template <class T>
struct Drop {
  static constexpr int kEach = cuda::kPack<T>;
  const T* x;
  T* y;
  std::uint32_t* key_copy;
  std::uint32_t last;
  float scale;

  __device__ void start(const std::uint32_t* key) const {
    if (key_copy == nullptr) return;
    key_copy[0] = key[0];
    key_copy[1] = key[1];
  }
  __device__ __forceinline__ float value(unsigned word, float v) const {
    return word <= last ? v * scale : 0;
  }
  __device__ __forceinline__ void one(std::int64_t at, unsigned word) const {
    y[at] = cuda::narrow<T>(value(word, cuda::widen(x[at])));
  }
  __device__ __forceinline__ void pack(std::int64_t at, const unsigned (&words)[kEach]) const {
    float v[kEach];
    cuda::unpack(cuda::load_pack(x + at), v);
#pragma unroll
    for (int k = 0; k < kEach; ++k) v[k] = value(words[k], v[k]);
    cuda::store_pack(cuda::pack_of<T>(v), y + at);
  }
};

template <class T>
void dropout_fwd(const KernelCall& call) {
  const auto& args = call.as<DropoutArgs>();
  const Drop<T> drop{call.input<T>(0), call.output<T>(0), call.output<std::uint32_t>(1), args.last,
                     args.scale};
  cuda::for_words(args.count, call.input<std::uint32_t>(1), drop,
                  cuda::is_aligned(drop.x) && cuda::is_aligned(drop.y),
                  static_cast<cudaStream_t>(call.queue));
}

}  // namespace

void register_dropout_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "dropout_fwd_f32", dropout_fwd<float>);
  registry.add(Backend::kCuda, "dropout_fwd_f16", dropout_fwd<F16>);
  registry.add(Backend::kCuda, "dropout_fwd_bf16", dropout_fwd<BF16>);
}

}  // namespace mlxtape::ops
