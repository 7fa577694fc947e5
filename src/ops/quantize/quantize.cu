// CUDA kernels of quantize (formula: mlxtape/ops/quantize.h). A thread has the 16 bytes of weights that it moves at
// once, 4 or 8 of a group, whose threads are neighbours in one warp; their codes lie within 64 bits. Codes are written
// by way of shared memory, a word each, because a thread's own need not fill words. Bound by memory; quantize would be by
// its divisions, so they are products but where that could show.
#include <cmath>
#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/quantized.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "quantize_args.h"

namespace mlxtape::ops {

namespace {

using cuda::kPack;

constexpr int kThreads = 256;

// ---- memory ----

template <class T>
__device__ __forceinline__ void load(const T* p, bool aligned, float (&v)[kPack<T>]) {
  if (aligned) {
    cuda::unpack(cuda::load_pack(p), v);
  } else {
#pragma unroll
    for (int k = 0; k < kPack<T>; ++k) v[k] = cuda::widen(p[k]);
  }
}

// The codes that go with the weights of a pack, the first in the lowest bits.
template <class T, int kBits>
__device__ __forceinline__ std::uint64_t codes_of(const std::uint32_t* codes, std::int64_t pack) {
  constexpr int kAll = kPack<T> * kBits;
  const auto bit = static_cast<std::uint64_t>(pack) * kAll;
  const auto shift = static_cast<unsigned>(bit % 32);
  std::uint64_t words = __ldg(codes + bit / 32);
  if (shift + kAll > 32) words |= std::uint64_t{__ldg(codes + bit / 32 + 1)} << 32U;
  return words >> shift;
}

template <int kBits>
__device__ __forceinline__ float code(std::uint64_t codes, int k) {
  return static_cast<float>(static_cast<std::uint32_t>(codes >> k * kBits) & ((1U << kBits) - 1));
}

// Scales and biases of any type.
__device__ __forceinline__ float get(const void* p, std::int32_t dtype, std::int64_t i) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF16: return cuda::widen(static_cast<const F16*>(p)[i]);
    case DType::kBF16: return cuda::widen(static_cast<const BF16*>(p)[i]);
    default: return static_cast<const float*>(p)[i];
  }
}
__device__ __forceinline__ void put(void* p, std::int32_t dtype, std::int64_t i, float v) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF16: static_cast<F16*>(p)[i] = cuda::narrow<F16>(v); return;
    case DType::kBF16: static_cast<BF16*>(p)[i] = cuda::narrow<BF16>(v); return;
    default: static_cast<float*>(p)[i] = v;
  }
}

// This thread's pack, and its place among those of a group.
template <class T>
struct Place {
  std::int64_t pack, group;
  int lanes;  // packs of a group, at most a warp
  bool exists, first;
  __device__ explicit Place(const QuantizeArgs& args)
      : pack(std::int64_t{blockIdx.x} * kThreads + threadIdx.x),
        group(pack * kPack<T> >> args.group_shift),
        lanes((1 << args.group_shift) / kPack<T>),
        exists(group < args.groups),
        first((threadIdx.x & (lanes - 1)) == 0) {}
  template <class Fn>
  __device__ __forceinline__ void join(float& v, const Fn& fn) const {
    for (int step = lanes / 2; step > 0; step /= 2) {
      v = fn(v, __shfl_xor_sync(cuda::kAll, v, step));
    }
  }
};

// ---- kernels ----

// d/s rounded and clamped. The product is off by less than 2^-14, so that the quotient itself matters only near a half.
__device__ __forceinline__ std::uint32_t quotient(float d, float s, float inverse, float n,
                                                  bool gpu_rule) {
  float t = d * inverse;
  if (fabsf(t - floorf(t) - 0.5F) < 0x1p-13F) t = __fdiv_rn(d, s);
  t = t > 0 ? fminf(t, n) : 0;  // NaN gives 0
  const std::uint32_t q = __float2uint_rn(t);
  return gpu_rule && t - static_cast<float>(q) == 0.5F ? q + 1 : q;
}

template <class T, int kBits>
__global__ void __launch_bounds__(kThreads) quantize(QuantizeArgs args, bool aligned, const T* w,
                                                     std::uint32_t* codes, T* scales, T* biases) {
  cuda::wait_turn();
  constexpr int kAll = kPack<T> * kBits;
  constexpr float kLast = (1 << kBits) - 1;
  const Place<T> at(args);
  const bool gpu_rule = args.gpu_rule != 0;
  float v[kPack<T>] = {};
  if (at.exists) load(w + at.pack * kPack<T>, aligned, v);
  float hi = v[0], lo = v[0], poison = 0;
#pragma unroll
  for (int k = 0; k < kPack<T>; ++k) {
    hi = fmaxf(hi, v[k]);
    lo = fminf(lo, v[k]);
    poison = fmaf(v[k], 0.0F, poison);
  }
  at.join(hi, [](float a, float b) { return fmaxf(a, b); });
  at.join(lo, [](float a, float b) { return fminf(a, b); });
  at.join(poison, [](float a, float b) { return a + b; });
  const GroupFit fit = fit_group(hi, lo, poison, kLast, gpu_rule);
  if (at.exists && at.first) {
    scales[at.group] = cuda::narrow<T>(fit.s);
    biases[at.group] = cuda::narrow<T>(fit.b);
  }
  const float inverse = __frcp_rn(fit.s);
  std::uint64_t own = 0;
#pragma unroll
  for (int k = 0; k < kPack<T>; ++k) {
    own |= std::uint64_t{quotient(v[k] - fit.b, fit.s, inverse, kLast, gpu_rule)} << k * kBits;
  }
  __shared__ std::uint64_t all[kThreads];  // kAll bits of each
  all[threadIdx.x] = own;
  __syncthreads();
  constexpr int kWords = kThreads * kAll / 32;
  const std::int64_t begin = std::int64_t{blockIdx.x} * kWords;
  const std::int64_t end = (args.groups << args.group_shift) / 32 * kBits;
  for (int j = static_cast<int>(threadIdx.x); j < kWords && begin + j < end; j += kThreads) {
    int from = 32 * j / kAll, have = kAll - 32 * j % kAll;
    std::uint64_t word = all[from] >> (kAll - have);
    for (; have < 32; have += kAll) word |= all[++from] << have;
    codes[begin + j] = static_cast<std::uint32_t>(word);
  }
}

template <class T, int kBits>
__global__ void __launch_bounds__(kThreads)
    dequantize(QuantizeArgs args, const std::uint32_t* codes, const void* scales,
               const void* biases, T* w) {
  cuda::wait_turn();
  const Place<T> at(args);
  if (!at.exists) return;
  const float s = get(scales, args.scales, at.group), b = get(biases, args.scales, at.group);
  const std::uint64_t q = codes_of<T, kBits>(codes, at.pack);
  float v[kPack<T>];
#pragma unroll
  for (int k = 0; k < kPack<T>; ++k) v[k] = __fadd_rn(__fmul_rn(s, code<kBits>(q, k)), b);
  cuda::store_pack(cuda::pack_of<T>(v), w + at.pack * kPack<T>);
}

template <class T, int kBits>
__global__ void __launch_bounds__(kThreads)
    dequantize_back(QuantizeArgs args, bool aligned, const std::uint32_t* codes, const T* dw,
                    void* d_scales, void* d_biases) {
  cuda::wait_turn();
  const Place<T> at(args);
  float ds = 0, db = 0;
  if (at.exists) {
    float v[kPack<T>];
    load(dw + at.pack * kPack<T>, aligned, v);
    const std::uint64_t q = codes_of<T, kBits>(codes, at.pack);
#pragma unroll
    for (int k = 0; k < kPack<T>; ++k) {
      ds = fmaf(v[k], code<kBits>(q, k), ds);
      db += v[k];
    }
  }
  const auto add = [](float a, float b) {
    return a + b;
  };
  at.join(ds, add);
  at.join(db, add);
  if (at.exists && at.first) {
    put(d_scales, args.scales, at.group, ds);
    put(d_biases, args.scales, at.group, db);
  }
}

template <class T, class Kernel, class... Args>
void launch(const KernelCall& call, Kernel kernel, Args... args) {
  const auto& a = call.as<QuantizeArgs>();
  cuda::launch(kernel, cuda::blocks_for((a.groups << a.group_shift) / kPack<T>, kThreads), kThreads,
               0, 1, static_cast<cudaStream_t>(call.queue), a, args...);
}

template <class T>
void quantize_fwd(const KernelCall& call) {
  cuda::with_bits(call.as<QuantizeArgs>().bits, [&](auto bits) {
    launch<T>(call, quantize<T, decltype(bits)::value>, cuda::is_aligned(call.in[0]),
              call.input<T>(0), call.output<std::uint32_t>(0), call.output<T>(1),
              call.output<T>(2));
  });
}

template <class T>
void dequantize_fwd(const KernelCall& call) {
  cuda::with_bits(call.as<QuantizeArgs>().bits, [&](auto bits) {
    launch<T>(call, dequantize<T, decltype(bits)::value>, call.input<std::uint32_t>(0),
              call.input<void>(1), call.input<void>(2), call.output<T>(0));
  });
}

template <class T>
void dequantize_bwd(const KernelCall& call) {
  cuda::with_bits(call.as<QuantizeArgs>().bits, [&](auto bits) {
    launch<T>(call, dequantize_back<T, decltype(bits)::value>, cuda::is_aligned(call.in[1]),
              call.input<std::uint32_t>(0), call.input<T>(1), call.output<void>(0),
              call.output<void>(1));
  });
}

template <class T>
void register_type(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "quantize_fwd_" + type, quantize_fwd<T>);
  registry.add(Backend::kCuda, "dequantize_fwd_" + type, dequantize_fwd<T>);
  registry.add(Backend::kCuda, "dequantize_bwd_" + type, dequantize_bwd<T>);
}

}  // namespace

void register_quantize_cuda(KernelRegistry& registry) {
  register_type<float>(registry);
  register_type<F16>(registry);
  register_type<BF16>(registry);
}

}  // namespace mlxtape::ops
