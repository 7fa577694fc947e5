// The vocabulary of formulas.h for CUDA threads, and the two kernels that every formula runs in.
//
// In packs of 16 bytes: flat where every operand is contiguous or one number, by rows where the rows (the last axis)
// of all consist of whole packs or of one number: a row's places are found once. Else element by element.
// Bound by memory.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <string>

#include "backends/cuda/device/functions.cuh"
#include "backends/cuda/device/index.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "elementwise_args.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

#undef MT_FORMULA
#define MT_FORMULA __device__ __forceinline__
#include "ops/elementwise/formulas.h"

// An f32 whose result is stored as T: functions need not be better than that.
template <class T>
struct Number {
  float v;
  Number() = default;
  __device__ __forceinline__ explicit Number(float value) : v(value) {}

  friend MT_FORMULA Number operator+(Number a, Number b) { return Number(a.v + b.v); }
  friend MT_FORMULA Number operator-(Number a, Number b) { return Number(a.v - b.v); }
  friend MT_FORMULA Number operator*(Number a, Number b) { return Number(a.v * b.v); }
  friend MT_FORMULA Number operator/(Number a, Number b) { return Number(a.v / b.v); }
  friend MT_FORMULA Number operator-(Number a) { return Number(-a.v); }
  friend MT_FORMULA bool operator==(Number a, Number b) { return a.v == b.v; }
  friend MT_FORMULA bool operator!=(Number a, Number b) { return a.v != b.v; }
  friend MT_FORMULA bool operator<(Number a, Number b) { return a.v < b.v; }
  friend MT_FORMULA bool operator<=(Number a, Number b) { return a.v <= b.v; }
  friend MT_FORMULA bool operator>(Number a, Number b) { return a.v > b.v; }
  friend MT_FORMULA bool operator>=(Number a, Number b) { return a.v >= b.v; }
  friend MT_FORMULA Number select(bool t, Number yes, Number no) { return t ? yes : no; }

  friend MT_FORMULA Number abs(Number x) { return Number(fabsf(x.v)); }
  friend MT_FORMULA Number sqrt(Number x) { return Number(cuda::sqrt_for<T>(x.v)); }
  friend MT_FORMULA Number rsqrt(Number x) { return Number(rsqrtf(x.v)); }
  friend MT_FORMULA Number exp(Number x) { return Number(cuda::exp_for<T>(x.v)); }
  friend MT_FORMULA Number log(Number x) { return Number(cuda::log_for<T>(x.v)); }
  friend MT_FORMULA Number log1p(Number x) { return Number(cuda::log1p_for<T>(x.v)); }
  friend MT_FORMULA Number tanh(Number x) { return Number(tanhf(x.v)); }
  friend MT_FORMULA Number pow(Number a, Number b) { return Number(cuda::pow_for<T>(a.v, b.v)); }
  // NaN if either is; b where they are equal.
  friend MT_FORMULA Number max(Number a, Number b) { return a.v != a.v || a.v > b.v ? a : b; }
  friend MT_FORMULA Number min(Number a, Number b) { return a.v != a.v || a.v < b.v ? a : b; }
};

template <class T>
struct SigmoidOf {
  Number<T> value, rest;
};
template <class T>
MT_FORMULA SigmoidOf<T> sigmoid(Number<T> x) {
  const cuda::Sigmoid s = cuda::sigmoid<T>(x.v);
  return {Number<T>(s.value), Number<T>(s.rest)};
}
template <class T>
struct NormalOf {
  Number<T> share, density;
};
template <class T>
MT_FORMULA NormalOf<T> normal(Number<T> x) {
  const cuda::Normal n = cuda::normal<T>(x.v);
  return {Number<T>(n.share), Number<T>(n.density)};
}

// An integer whose sums and products wrap around.
template <class T>
struct Whole {
  using Bits = std::make_unsigned_t<T>;
  T v;
  Whole() = default;
  __device__ __forceinline__ explicit Whole(T value) : v(value) {}
  static MT_FORMULA Whole of(Bits bits) { return Whole(static_cast<T>(bits)); }
  friend MT_FORMULA Whole operator+(Whole a, Whole b) { return of(Bits(a.v) + Bits(b.v)); }
  friend MT_FORMULA Whole operator-(Whole a, Whole b) { return of(Bits(a.v) - Bits(b.v)); }
  friend MT_FORMULA Whole operator*(Whole a, Whole b) { return of(Bits(a.v) * Bits(b.v)); }
  friend MT_FORMULA bool operator==(Whole a, Whole b) { return a.v == b.v; }
  friend MT_FORMULA bool operator!=(Whole a, Whole b) { return a.v != b.v; }
  friend MT_FORMULA bool operator<(Whole a, Whole b) { return a.v < b.v; }
  friend MT_FORMULA bool operator<=(Whole a, Whole b) { return a.v <= b.v; }
  friend MT_FORMULA bool operator>(Whole a, Whole b) { return a.v > b.v; }
  friend MT_FORMULA bool operator>=(Whole a, Whole b) { return a.v >= b.v; }
  friend MT_FORMULA Whole max(Whole a, Whole b) { return a.v > b.v ? a : b; }
  friend MT_FORMULA Whole min(Whole a, Whole b) { return a.v < b.v ? a : b; }
};

// ---- elements in memory ----

// As cuda::load_pack, for memory that the same thread may write afterwards: a result may lie where an operand
// was.
template <class T>
MT_FORMULA cuda::Pack<T> load_own(const T* p) {
  cuda::Pack<T> pack;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(p)
               : "memory");
  return pack;
}

// How a stored T is computed with: floats as Number, integers and bytes as Whole.
template <class T>
constexpr bool kIsFloat =
    std::is_same_v<T, float> || std::is_same_v<T, F16> || std::is_same_v<T, BF16>;
template <class T>
using ValueOf = typename std::conditional_t<kIsFloat<T>, std::type_identity<Number<T>>,
                                            std::type_identity<Whole<T>>>::type;

template <class T>
MT_FORMULA ValueOf<T> read(T stored) {
  if constexpr (kIsFloat<T>) {
    return Number<T>(cuda::widen(stored));
  } else {
    return Whole<T>(stored);
  }
}
template <class T>
MT_FORMULA void read_pack(const cuda::Pack<T>& pack, ValueOf<T> (&v)[cuda::kPack<T>]) {
  if constexpr (kIsFloat<T>) {
    float f[cuda::kPack<T>];
    cuda::unpack(pack, f);
#pragma unroll
    for (int i = 0; i < cuda::kPack<T>; ++i) v[i] = Number<T>(f[i]);
  } else {
#pragma unroll
    for (int i = 0; i < cuda::kPack<T>; ++i) {
      constexpr int kEach = sizeof(T) < 4 ? 4 / sizeof(T) : 1;  // in a word
      if constexpr (sizeof(T) == 8) {
        v[i] = Whole<T>(static_cast<T>((static_cast<std::uint64_t>(pack.word[2 * i + 1]) << 32U) |
                                       pack.word[2 * i]));
      } else {
        v[i] = Whole<T>(static_cast<T>(pack.word[i / kEach] >> (8 * sizeof(T) * (i % kEach))));
      }
    }
  }
}

// Results are of the operands' type, or truth values in bytes.
template <class Out, class Value>
MT_FORMULA Out written(Value v) {
  if constexpr (std::is_same_v<Value, bool>) {
    return v ? 1 : 0;
  } else if constexpr (kIsFloat<Out>) {
    return cuda::narrow<Out>(v.v);
  } else {
    return v.v;
  }
}
template <class Out, int kCount, class Value>
MT_FORMULA void write_pack(const Value (&v)[kCount], Out* p) {
  constexpr int kBytes = kCount * sizeof(Out);
  if constexpr (kIsFloat<Out>) {
    float f[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) f[i] = v[i].v;
    cuda::store_pack(cuda::pack_of<Out>(f), p);
  } else {
    unsigned word[kBytes >= 4 ? kBytes / 4 : 1] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Out one = written<Out>(v[i]);
      if constexpr (sizeof(Out) == 8) {
        word[2 * i] = static_cast<unsigned>(static_cast<std::uint64_t>(one));
        word[2 * i + 1] = static_cast<unsigned>(static_cast<std::uint64_t>(one) >> 32U);
      } else {
        constexpr int kEach = 4 / sizeof(Out);
        word[i / kEach] |= static_cast<unsigned>(one) << (8 * sizeof(Out) * (i % kEach));
      }
    }
    if constexpr (kBytes == 16) {
      *reinterpret_cast<uint4*>(p) = make_uint4(word[0], word[1], word[2], word[3]);
    } else if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2*>(p) = make_uint2(word[0], word[1]);
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<unsigned*>(p) = word[0];
    } else {
      *reinterpret_cast<std::uint16_t*>(p) = static_cast<std::uint16_t>(word[0]);
    }
  }
}

// ---- kernels. F: In and Out, kIn operands, kOut results, apply(const Value* in, auto* out) ----

constexpr int kThreads = 256;

template <class F>
struct Tensors {
  const typename F::In* in[F::kIn];  // null: a number
  typename F::Out* out[F::kOut];
  typename F::In number[F::kIn];
};

// The places of result number i, counted over the axes before `axes`, in each operand.
template <int kIn>
MT_FORMULA void locate(const ElementwiseArgs& args, std::int64_t axes, std::int64_t i,
                       std::int64_t (&at)[kIn]) {
#pragma unroll
  for (int k = 0; k < kIn; ++k) at[k] = 0;
  for (std::int64_t axis = axes - 1; axis > 0; --axis) {
    std::int64_t index = 0;
    i = cuda::divide(i, args.shape[axis], index);
#pragma unroll
    for (int k = 0; k < kIn; ++k) at[k] += index * args.strides[k][axis];
  }
#pragma unroll
  for (int k = 0; k < kIn; ++k) at[k] += i * args.strides[k][0];
}

// Element i of the results.
template <class F>
MT_FORMULA void map_one(const Tensors<F>& t, const ValueOf<typename F::In> (&in)[F::kIn],
                        std::int64_t i) {
  typename F::Result out[F::kOut];
  F::apply(in, out);
#pragma unroll
  for (int o = 0; o < F::kOut; ++o) t.out[o][i] = written<typename F::Out>(out[o]);
}

// The pack at element i of the results. constants: a bit for each operand that is one number along it.
template <class F, class Packs, class Constants>
MT_FORMULA void map_pack(const Tensors<F>& t, int constants, const Packs& pack,
                         const Constants& constant, std::int64_t i) {
  using In = typename F::In;
  constexpr int kCount = cuda::kPack<In>;
  ValueOf<In> v[F::kIn][kCount];
#pragma unroll
  for (int k = 0; k < F::kIn; ++k) {
    if ((constants >> k & 1) == 0) {
      read_pack(pack[k], v[k]);
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e) v[k][e] = read(constant[k]);
    }
  }
  typename F::Result y[F::kOut][kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    ValueOf<In> in[F::kIn];
    typename F::Result out[F::kOut];
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) in[k] = v[k][e];
    F::apply(in, out);
#pragma unroll
    for (int o = 0; o < F::kOut; ++o) y[o][e] = out[o];
  }
#pragma unroll
  for (int o = 0; o < F::kOut; ++o) write_pack(y[o], t.out[o] + i);
}

// Packs of a thread that are under way at once: the fewer, the more threads, and those serve one operand best.
template <class F>
constexpr int kFlatEach = F::kIn > 1 ? 2 : 1;

template <class F>
__global__ void __launch_bounds__(kThreads)
    map_flat(std::int64_t size, int constants, Tensors<F> t) {
  using In = typename F::In;
  constexpr int kCount = cuda::kPack<In>;
  constexpr int kEach = kFlatEach<F>;
  cuda::wait_turn();
  const std::int64_t packs = size / kCount;
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads * kEach + threadIdx.x;
  cuda::Pack<In> pack[kEach][F::kIn];
  In constant[F::kIn];  // as it is stored: to widen it would be to wait for it
#pragma unroll
  for (int k = 0; k < F::kIn; ++k) {
    if ((constants >> k & 1) != 0) constant[k] = t.in[k] == nullptr ? t.number[k] : *t.in[k];
  }
#pragma unroll
  for (int u = 0; u < kEach; ++u) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) {
      const std::int64_t p = first + u * kThreads;
      if (p < packs && (constants >> k & 1) == 0) pack[u][k] = load_own(t.in[k] + p * kCount);
    }
  }
#pragma unroll
  for (int u = 0; u < kEach; ++u) {
    const std::int64_t p = first + u * kThreads;
    if (p < packs) map_pack<F>(t, constants, pack[u], constant, p * kCount);
  }
  // What is left of a pack, an element a thread.
  const std::int64_t i = packs * kCount + threadIdx.x;
  if (blockIdx.x == 0 && i < size) {
    ValueOf<In> in[F::kIn];
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) {
      in[k] = read((constants >> k & 1) != 0 ? constant[k] : t.in[k][i]);
    }
    map_one(t, in, i);
  }
}

template <class F>
constexpr int kRowEach = F::kIn > 2 ? 1 : 2;

// lanes threads, a power of two, have a row or one of its chunks; args.rank >= 2.
template <class F>
__global__ void __launch_bounds__(kThreads)
    map_rows(const __grid_constant__ ElementwiseArgs args, int constants, int lanes,
             std::int64_t chunks, Tensors<F> t) {
  using In = typename F::In;
  constexpr int kCount = cuda::kPack<In>;
  constexpr int kEach = kRowEach<F>;
  cuda::wait_turn();
  const std::int64_t last = args.rank - 1;
  const std::int64_t length = args.shape[last];
  const std::int64_t item =
      std::int64_t{blockIdx.x} * (kThreads / lanes) + static_cast<int>(threadIdx.x) / lanes;
  std::int64_t chunk = 0;
  const std::int64_t row = cuda::divide(item, chunks, chunk);
  if (row * length >= args.size) return;
  std::int64_t at[F::kIn];
  locate(args, last, row, at);
  const std::int64_t first =
      (chunk * kEach * lanes + (static_cast<int>(threadIdx.x) & (lanes - 1))) * kCount;
  cuda::Pack<In> pack[kEach][F::kIn];
  In constant[F::kIn];
#pragma unroll
  for (int u = 0; u < kEach; ++u) {
    const std::int64_t i = first + std::int64_t{u} * lanes * kCount;
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) {
      if (i < length && (constants >> k & 1) == 0) pack[u][k] = load_own(t.in[k] + at[k] + i);
    }
  }
#pragma unroll
  for (int k = 0; k < F::kIn; ++k) {
    if ((constants >> k & 1) != 0) constant[k] = t.in[k] == nullptr ? t.number[k] : t.in[k][at[k]];
  }
#pragma unroll
  for (int u = 0; u < kEach; ++u) {
    const std::int64_t i = first + std::int64_t{u} * lanes * kCount;
    if (i < length) map_pack<F>(t, constants, pack[u], constant, row * length + i);
  }
}

template <class F>
__global__ void __launch_bounds__(kThreads)
    map_elements(const __grid_constant__ ElementwiseArgs args, Tensors<F> t) {
  cuda::wait_turn();
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < args.size;
       i += step) {
    std::int64_t at[F::kIn];
    locate(args, args.rank, i, at);
    ValueOf<typename F::In> in[F::kIn];
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) {
      in[k] = read(t.in[k] == nullptr ? t.number[k] : t.in[k][at[k]]);
    }
    map_one(t, in, i);
  }
}

template <class T>
T number_as(double value) {
  if constexpr (std::is_same_v<T, F16> || std::is_same_v<T, BF16>) {
    return T(static_cast<float>(value));  // exact: the host has rounded it
  } else {
    return static_cast<T>(value);
  }
}

template <class F>
void map(const KernelCall& call) {
  using In = typename F::In;
  constexpr int kCount = cuda::kPack<In>;
  const auto& args = call.as<ElementwiseArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const std::int64_t last = args.rank - 1;
  Tensors<F> t{};
  std::size_t tensor = 0;
  int constants = 0;
  bool flat = args.rank == 1;
  bool in_packs = args.shape[last] % kCount == 0;
  for (int k = 0; k < F::kIn; ++k) {
    if ((args.numbers >> k & 1) != 0) {
      t.number[k] = number_as<In>(args.value[k]);
    } else {
      t.in[k] = call.input<In>(tensor++);
    }
    const std::int64_t inner = args.strides[k][last];
    if (inner == 0) constants |= 1 << k;
    const bool whole = inner == 0 || (inner == 1 && cuda::is_aligned(t.in[k]));
    flat = flat && whole;
    in_packs = in_packs && whole;
    for (std::int64_t axis = 0; axis < last && inner == 1; ++axis) {
      in_packs = in_packs && args.strides[k][axis] % kCount == 0;
    }
  }
  for (int o = 0; o < F::kOut; ++o) {
    t.out[o] = call.output<typename F::Out>(static_cast<std::size_t>(o));
    flat = flat && cuda::is_aligned(t.out[o]);
    in_packs = in_packs && cuda::is_aligned(t.out[o]);
  }
  if (flat) {
    constexpr std::int64_t kEach = std::int64_t{kThreads} * kFlatEach<F>;
    return cuda::launch(map_flat<F>, cuda::blocks_for(args.size / kCount + 1, kEach), kThreads, 0,
                        1, stream, args.size, constants, t);
  }
  if (in_packs) {
    const std::int64_t packs = args.shape[last] / kCount;
    int lanes = kThreads;
    while (lanes / 2 >= packs) lanes /= 2;
    const std::int64_t chunks = cuda::blocks_for(packs, std::int64_t{lanes} * kRowEach<F>);
    const std::int64_t items = args.size / args.shape[last] * chunks;
    return cuda::launch(map_rows<F>, cuda::blocks_for(items, kThreads / lanes), kThreads, 0, 1,
                        stream, args, constants, lanes, chunks, t);
  }
  constexpr std::int64_t kMostBlocks = 64 * cuda::kMultiprocessors;
  cuda::launch(map_elements<F>, std::min(cuda::blocks_for(args.size, kThreads), kMostBlocks),
               kThreads, 0, 1, stream, args, t);
}

template <class T, int kOperands, int kResults = 1>
struct OfFloats {
  using In = T;
  using Out = T;
  using Result = Number<T>;
  static constexpr int kIn = kOperands, kOut = kResults;
};

inline void add_kernel(KernelRegistry& registry, const std::string& name, KernelFn fn) {
  registry.add(Backend::kCuda, name, fn);
}

}  // namespace

}  // namespace mlxtape::ops
