// CUDA kernels of random (formula: mlxtape/ops/random.h). A thread has two packs of results, half the tensor
// apart. Bound by the rounds of Threefry (backends/cuda/device/threefry.cuh).
#include <string>
#include <type_traits>

#include "backends/cuda/device/threefry.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "random_args.h"

namespace mlxtape::ops {

namespace {

cudaStream_t stream_of(const KernelCall& call) { return static_cast<cudaStream_t>(call.queue); }

// ---- keys ----

__global__ void key_kernel(std::uint64_t seed, std::uint32_t* key) {
  cuda::wait_turn();
  key[0] = static_cast<std::uint32_t>(seed >> 32U);
  key[1] = static_cast<std::uint32_t>(seed);
}
void random_key_fwd(const KernelCall& call) {
  cuda::launch(key_kernel, 1, 1, 0, 1, stream_of(call), call.as<RandomArgs>().seed,
               call.output<std::uint32_t>(0));
}

// The four words of split_key(key, 2): counters (0, 2) and (1, 3).
__global__ void advance_kernel(std::uint32_t* key, std::uint32_t* next) {
  cuda::wait_turn();
  const cuda::Threefry hash(key);
  unsigned a = 0, b = 2, c = 1, d = 3;
  hash(a, b);
  hash(c, d);
  key[0] = a;
  key[1] = c;
  next[0] = b;
  next[1] = d;
}
void random_advance_fwd(const KernelCall& call) {
  cuda::launch(advance_kernel, 1, 1, 0, 1, stream_of(call), call.output<std::uint32_t>(0),
               call.output<std::uint32_t>(1));
}

// ---- bits ----

struct Bits {
  static constexpr int kEach = 4;
  std::uint8_t* out;
  std::int64_t bytes;

  __device__ void start(const std::uint32_t*) const {}
  __device__ __forceinline__ void one(std::int64_t at, unsigned word) const {
    if (4 * at + 4 <= bytes) {
      reinterpret_cast<std::uint32_t*>(out)[at] = word;
      return;
    }
    for (std::int64_t b = 4 * at; b < bytes; ++b, word >>= 8U) {
      out[b] = static_cast<std::uint8_t>(word);
    }
  }
  __device__ __forceinline__ void pack(std::int64_t at, const unsigned (&w)[kEach]) const {
    cuda::store_pack(cuda::Pack<unsigned>{{w[0], w[1], w[2], w[3]}},
                     reinterpret_cast<unsigned*>(out) + at);
  }
};
void random_bits_fwd(const KernelCall& call) {
  const auto& args = call.as<RandomArgs>();
  const Bits bits{call.output<std::uint8_t>(0), args.bytes};
  cuda::for_words(args.count, call.input<std::uint32_t>(0), bits,
                  args.bytes == 4 * args.count && cuda::is_aligned(bits.out), stream_of(call));
}

// ---- floats ----

template <class T>
__device__ __forceinline__ float rounded(float v) {
  return cuda::widen(cuda::narrow<T>(v));
}

// min(f32(w)/2³², the largest T below 1): 24, 11 or 8 bits of it.
template <class T>
__device__ __forceinline__ float unit(unsigned word) {
  constexpr float kBelowOne = 1 - (sizeof(T) == 4           ? 0x1p-24F
                                   : std::is_same_v<T, F16> ? 0x1p-11F
                                                            : 0x1p-8F);
  return fminf(__uint2float_rn(word) * 0x1p-32F, kBelowOne);
}

// Each step is rounded, none fused: the bits are those of every other backend.
template <class T>
struct Uniform {
  float low, span;
  __device__ __forceinline__ float value(unsigned word) const {
    const float product = rounded<T>(__fmul_rn(span, rounded<T>(unit<T>(word))));
    return __fadd_rn(product, low);
  }
};

template <class T>
struct Gaussian {
  float mean, scale;
  __device__ __forceinline__ float value(unsigned word) const {
    const float u = unit<float>(word);
    return fmaf(scale, erfinvf(__fadd_rn(u + u, -(1 - 0x1p-24F))), mean);
  }
};

template <class T, class Value>
struct Draw {
  static constexpr int kEach = cuda::kPack<T>;
  T* out;
  Value of;

  __device__ void start(const std::uint32_t*) const {}
  __device__ __forceinline__ void one(std::int64_t at, unsigned word) const {
    out[at] = cuda::narrow<T>(of.value(word));
  }
  __device__ __forceinline__ void pack(std::int64_t at, const unsigned (&words)[kEach]) const {
    float v[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) v[k] = of.value(words[k]);
    cuda::store_pack(cuda::pack_of<T>(v), out + at);
  }
};

template <class T, template <class> class Value>
void draw_fwd(const KernelCall& call) {
  const auto& args = call.as<RandomArgs>();
  const Draw<T, Value<T>> draw{call.output<T>(0), {args.low, args.span}};
  cuda::for_words(args.count, call.input<std::uint32_t>(0), draw, cuda::is_aligned(draw.out),
                  stream_of(call));
}

struct Truth {
  static constexpr int kEach = 16;
  std::uint8_t* out;
  std::uint32_t last;

  __device__ void start(const std::uint32_t*) const {}
  __device__ __forceinline__ void one(std::int64_t at, unsigned word) const {
    out[at] = word <= last ? 1 : 0;
  }
  __device__ __forceinline__ void pack(std::int64_t at, const unsigned (&words)[kEach]) const {
    cuda::Pack<std::uint8_t> pack;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      pack.word[w] = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) pack.word[w] |= (words[4 * w + b] <= last ? 1U : 0U) << (8 * b);
    }
    cuda::store_pack(pack, out + at);
  }
};
void random_bernoulli_fwd(const KernelCall& call) {
  const auto& args = call.as<RandomArgs>();
  const Truth truth{call.output<std::uint8_t>(0), args.last};
  cuda::for_words(args.count, call.input<std::uint32_t>(0), truth, cuda::is_aligned(truth.out),
                  stream_of(call));
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "random_uniform_fwd_" + type, draw_fwd<T, Uniform>);
  registry.add(Backend::kCuda, "random_normal_fwd_" + type, draw_fwd<T, Gaussian>);
}

}  // namespace

void register_random_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "random_key_fwd_u32", random_key_fwd);
  registry.add(Backend::kCuda, "random_advance_fwd_u32", random_advance_fwd);
  registry.add(Backend::kCuda, "random_bits_fwd_u32", random_bits_fwd);
  registry.add(Backend::kCuda, "random_bernoulli_fwd_bool", random_bernoulli_fwd);
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
