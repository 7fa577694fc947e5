// CUDA kernels of reduce (formulas and layout: mlxtape/ops/reduce.h).
//
// A first kernel folds: rows (inner = 1) by a warp or a block each, otherwise a warp's lanes are neighbouring
// results and the warps of a block share the rows. Where that is too little work side by side, what meets in
// one result is cut into chunks, by the shape alone, and a second kernel joins their partial results in order.
// var and logsumexp look at a row twice, in one block, so that the second look finds it in a cache.
// Backward is one pass, a pack of 16 bytes a thread. Bound by memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/index.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "mlxtape/core/registry.h"
#include "reduce_args.h"

namespace mlxtape::ops {

namespace {

using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::widen;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr std::int64_t kEnoughBlocks = 8 * cuda::kMultiprocessors;

// ---- folds, as in reduce.cpu.cpp ----

template <class T>
struct Sum {
  static constexpr float kStart = 0;
  static __device__ __forceinline__ float step(float all, float x, float) { return all + x; }
  static __device__ __forceinline__ float join(float a, float b) { return a + b; }
};
template <class T>
struct SumExp : Sum<T> {
  static __device__ __forceinline__ float step(float all, float x, float m) {
    return all + cuda::exp_for<T>(x - m);
  }
};
template <class T>
struct SumSquares : Sum<T> {
  static __device__ __forceinline__ float step(float all, float x, float mean) {
    return fmaf(x - mean, x - mean, all);
  }
};
template <class T>
struct CountEqual : Sum<T> {
  static __device__ __forceinline__ float step(float all, float x, float y) {
    return all + (x == y ? 1.0F : 0.0F);
  }
};
template <class T>
struct Max {
  static constexpr float kStart = -INFINITY;
  static __device__ __forceinline__ float step(float all, float x, float) { return join(all, x); }
  static __device__ __forceinline__ float join(float a, float b) { return cuda::max_nan(a, b); }
};
template <class T>
struct Min {
  static constexpr float kStart = INFINITY;
  static __device__ __forceinline__ float step(float all, float x, float) { return join(all, x); }
  static __device__ __forceinline__ float join(float a, float b) { return -cuda::max_nan(-a, -b); }
};

// Over the threads of a row; the same bits in each.
template <class Fold, int kRow>
__device__ __forceinline__ float fold_threads(float v, float* room) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    v = Fold::join(v, __shfl_xor_sync(cuda::kAll, v, step));
  }
  if constexpr (kRow > kWarp) {
    if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = v;
    __syncthreads();
    v = room[0];
#pragma unroll
    for (int w = 1; w < kRow / kWarp; ++w) v = Fold::join(v, room[w]);
  }
  return v;
}

// A thread's share of n neighbours: in packs where kPacks (then n is a number of whole ones), else one by one.
template <class Fold, int kRow, bool kPacks, class T>
__device__ __forceinline__ float fold_share(const T* x, std::int64_t n, float about) {
  constexpr int kUnroll = 4;
  const int rank = threadIdx.x % kRow;
  float all = Fold::kStart;
  if constexpr (kPacks) {
    const std::int64_t packs = n / kPack<T>;
    for (std::int64_t p = rank; p < packs; p += kUnroll * kRow) {
      cuda::Pack<T> pack[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const std::int64_t q = p + u * kRow;
        if (q < packs) pack[u] = cuda::load_pack_shared(x + q * kPack<T>);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (p + u * kRow >= packs) continue;
        float v[kPack<T>];
        cuda::unpack(pack[u], v);
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) all = Fold::step(all, v[i], about);
      }
    }
  } else {
    for (std::int64_t i = rank; i < n; i += kRow) all = Fold::step(all, widen(x[i]), about);
  }
  return all;
}

// How what meets in one result is cut: chunks of so many.
struct Cut {
  std::int64_t each, chunks;
};

template <class T, class Fold, int kRow, bool kPacks>
__global__ void __launch_bounds__(kThreads)
    fold_rows(ReduceArgs args, Cut cut, const T* x, const float* about, float* out) {
  __shared__ float room[kWarps];
  cuda::wait_turn();
  const std::int64_t item = std::int64_t{blockIdx.x} * (kThreads / kRow) + threadIdx.x / kRow;
  std::int64_t chunk = 0;
  const std::int64_t row = cuda::divide(item, cut.chunks, chunk);
  const bool in = row < args.outer;
  const std::int64_t first = chunk * cut.each;
  const std::int64_t n = in ? min(cut.each, args.count - first) : 0;
  const float reference = in && about != nullptr ? about[row] : 0;
  float all = fold_share<Fold, kRow, kPacks>(x + row * args.count + first, n, reference);
  all = fold_threads<Fold, kRow>(all, room);
  if (in && threadIdx.x % kRow == 0) out[item] = all;
}

// kColumns neighbours a lane; a block's warps share a chunk of the rows of one tile of columns.
template <class T, class Fold, int kColumns>
__global__ void __launch_bounds__(kThreads)
    fold_columns(ReduceArgs args, Cut cut, std::int64_t tiles, const T* x, const float* about,
                 float* out) {
  __shared__ float room[kWarps][kColumns][kWarp];
  cuda::wait_turn();
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  std::int64_t tile = 0, chunk = 0;
  const std::int64_t outer = cuda::divide(cuda::divide(blockIdx.x, tiles, tile), cut.chunks, chunk);
  const std::int64_t column = (tile * kWarp + lane) * kColumns;
  const bool in = column < args.inner;
  const std::int64_t end = min((chunk + 1) * cut.each, args.count);
  float all[kColumns];
  float reference[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    all[i] = Fold::kStart;
    reference[i] = in && about != nullptr ? about[outer * args.inner + column + i] : 0;
  }
  const T* from = x + outer * args.count * args.inner + column;
  constexpr int kUnroll = 4;
  for (std::int64_t r = chunk * cut.each + warp; in && r < end; r += kUnroll * kWarps) {
    if constexpr (kColumns > 1) {
      cuda::Pack<T> pack[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const std::int64_t q = r + u * kWarps;
        if (q < end) pack[u] = cuda::load_pack(from + q * args.inner);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (r + u * kWarps >= end) continue;
        float v[kColumns];
        cuda::unpack(pack[u], v);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) all[i] = Fold::step(all[i], v[i], reference[i]);
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const std::int64_t q = r + u * kWarps;
        if (q < end) all[0] = Fold::step(all[0], widen(from[q * args.inner]), reference[0]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) room[warp][i][lane] = all[i];
  __syncthreads();
  if (warp != 0 || !in) return;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    float sum = room[0][i][lane];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum = Fold::join(sum, room[w][i][lane]);
    out[(outer * cut.chunks + chunk) * args.inner + column + i] = sum;
  }
}

// What becomes of each folded number. finish(number, result's index)
template <class T>
struct Divided {  // sum, mean, var
  T* y;
  float divisor;
  __device__ void finish(float v, std::int64_t i) const { y[i] = narrow<T>(v / divisor); }
};
template <class T>
struct Joined {  // logsumexp, of the largest number and the sum of exponentials
  T* y;
  const float* m;
  float* s;
  __device__ void finish(float v, std::int64_t i) const {
    const float top = m[i];
    s[i] = v;
    y[i] = narrow<T>(isinf(top) ? top : top + logf(v));
  }
};

// Partial results [outer, chunks, inner] joined in order, a thread a result.
template <class Fold, class Finish>
__global__ void __launch_bounds__(kThreads)
    join_chunks(ReduceArgs args, std::int64_t chunks, const float* parts, Finish to) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.outer * args.inner) return;
  std::int64_t inner = 0;
  const std::int64_t outer = cuda::divide(i, args.inner, inner);
  const float* from = parts + outer * chunks * args.inner + inner;
  float all = Fold::kStart;
  for (std::int64_t c = 0; c < chunks; ++c) all = Fold::join(all, from[c * args.inner]);
  to.finish(all, i);
}

// Rows in one block, folded twice: the second relative to what the first found. First: 0 the mean, 1 the largest.
template <class T, class First, class Second, class Finish, int kRow, bool kPacks>
__global__ void __launch_bounds__(kThreads)
    fold_rows_twice(ReduceArgs args, float by, const T* x, float* found, Finish to) {
  __shared__ float room[2][kWarps];
  cuda::wait_turn();
  const std::int64_t row = std::int64_t{blockIdx.x} * (kThreads / kRow) + threadIdx.x / kRow;
  const bool in = row < args.outer;
  const std::int64_t n = in ? args.count : 0;
  const T* from = x + row * args.count;
  float about = fold_share<First, kRow, kPacks>(from, n, 0);
  about = fold_threads<First, kRow>(about, room[0]) / by;
  float all = fold_share<Second, kRow, kPacks>(from, n, about);
  all = fold_threads<Second, kRow>(all, room[1]);
  if (in && threadIdx.x % kRow == 0) {
    found[row] = about;
    to.finish(all, row);
  }
}

// ---- launch ----

std::int64_t results(const ReduceArgs& args) { return args.outer * args.inner; }

// Columns a lane has at most, in the widest form: the cut must not depend on addresses.
Cut cut_of(const ReduceArgs& args) {
  const std::int64_t count = std::max<std::int64_t>(args.count, 1);
  const std::int64_t side_by_side =
      args.inner == 1 ? args.outer : args.outer * cuda::blocks_for(args.inner, 4 * kWarp);
  const std::int64_t least = args.inner == 1 ? 16384 : 64;  // worth a block of its own
  std::int64_t chunks =
      std::min(cuda::blocks_for(kEnoughBlocks, side_by_side), cuda::blocks_for(count, least));
  chunks = std::max<std::int64_t>(chunks, 1);
  const std::int64_t each =
      cuda::blocks_for(cuda::blocks_for(count, chunks), 8) * 8;  // whole packs
  return {each, cuda::blocks_for(count, each)};
}

bool is_short(const ReduceArgs& args) { return args.count <= 1024; }

template <class T>
bool rows_in_packs(const ReduceArgs& args, const T* x) {
  return args.count % kPack<T> == 0 && cuda::is_aligned(x);
}

template <class Fold, class T>
void fold(const ReduceArgs& args, const Cut& cut, const T* x, const float* about, float* out,
          cudaStream_t stream) {
  if (args.inner != 1) {
    const bool packs = args.inner % kPack<T> == 0 && cuda::is_aligned(x);
    const int columns = packs ? kPack<T> : 1;
    const std::int64_t tiles = cuda::blocks_for(args.inner, columns * kWarp);
    const auto kernel = packs ? fold_columns<T, Fold, kPack<T>> : fold_columns<T, Fold, 1>;
    return cuda::launch(kernel, args.outer * cut.chunks * tiles, kThreads, 0, 1, stream, args, cut,
                        tiles, x, about, out);
  }
  const bool packs = rows_in_packs(args, x);
  const std::int64_t items = args.outer * cut.chunks;
  if (is_short(args)) {
    const auto kernel = packs ? fold_rows<T, Fold, kWarp, true> : fold_rows<T, Fold, kWarp, false>;
    return cuda::launch(kernel, cuda::blocks_for(items, kWarps), kThreads, 0, 1, stream, args, cut,
                        x, about, out);
  }
  const auto kernel =
      packs ? fold_rows<T, Fold, kThreads, true> : fold_rows<T, Fold, kThreads, false>;
  cuda::launch(kernel, items, kThreads, 0, 1, stream, args, cut, x, about, out);
}

template <class Fold, class Finish>
void join(const ReduceArgs& args, const Cut& cut, const float* parts, const Finish& to,
          cudaStream_t stream) {
  cuda::launch(join_chunks<Fold, Finish>, cuda::blocks_for(results(args), kThreads), kThreads, 0, 1,
               stream, args, cut.chunks, parts, to);
}

std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const ReduceArgs*>(args);
  return static_cast<std::size_t>(results(a) * cut_of(a).chunks) * sizeof(float);
}

template <class T, template <class> class Fold>
void once_fwd(const KernelCall& call) {  // sum, mean, max, min
  const auto& args = call.as<ReduceArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const Cut cut = cut_of(args);
  auto* parts = static_cast<float*>(call.workspace);  // [outer, chunks, inner]
  fold<Fold<T>>(args, cut, call.input<T>(0), nullptr, parts, stream);
  join<Fold<T>>(args, cut, parts, Divided<T>{call.output<T>(0), static_cast<float>(args.divisor)},
                stream);
}

// found [outer, inner]: what the second fold is relative to, the first one's divided by `by`.
template <class First, class Second, class T, class Finish>
void twice(const KernelCall& call, float by, float* found, const Finish& to) {
  const auto& args = call.as<ReduceArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const T* x = call.input<T>(0);
  const Cut cut = cut_of(args);
  if (args.inner == 1 && cut.chunks == 1) {
    const bool packs = rows_in_packs(args, x);
    if (is_short(args)) {
      const auto kernel = packs ? fold_rows_twice<T, First, Second, Finish, kWarp, true>
                                : fold_rows_twice<T, First, Second, Finish, kWarp, false>;
      return cuda::launch(kernel, cuda::blocks_for(args.outer, kWarps), kThreads, 0, 1, stream,
                          args, by, x, found, to);
    }
    const auto kernel = packs ? fold_rows_twice<T, First, Second, Finish, kThreads, true>
                              : fold_rows_twice<T, First, Second, Finish, kThreads, false>;
    return cuda::launch(kernel, args.outer, kThreads, 0, 1, stream, args, by, x, found, to);
  }
  auto* parts = static_cast<float*>(call.workspace);  // [outer, chunks, inner]
  fold<First>(args, cut, x, nullptr, parts, stream);
  join<First>(args, cut, parts, Divided<float>{found, by}, stream);
  fold<Second>(args, cut, x, found, parts, stream);
  join<Second>(args, cut, parts, to, stream);
}

template <class T>
void logsumexp_fwd(const KernelCall& call) {
  float* m = call.output<float>(1);               // [outer, inner]
  float* s = m + results(call.as<ReduceArgs>());  // [outer, inner]
  twice<Max<T>, SumExp<T>, T>(call, 1, m, Joined<T>{call.output<T>(0), m, s});
}

template <class T>
void var_fwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  twice<Sum<T>, SumSquares<T>, T>(call, static_cast<float>(args.count), call.output<float>(1),
                                  Divided<T>{call.output<T>(0), static_cast<float>(args.divisor)});
}

// ---- backward: dx = apply(x, of(result)) ----

struct Pair {
  float a, b;
};
template <class T>
struct SpreadSum {
  static constexpr bool kHasX = false;
  const T* dy;
  float divisor;
  __device__ Pair of(std::int64_t r) const { return {widen(dy[r]) / divisor, 0}; }
  __device__ float apply(float, Pair p) const { return p.a; }
};
template <class T>
struct SpreadExtreme {  // nothing equals y where it is NaN
  static constexpr bool kHasX = true;
  const T* dy;
  const T* y;
  const float* count;
  __device__ Pair of(std::int64_t r) const { return {widen(dy[r]) / count[r], widen(y[r])}; }
  __device__ float apply(float x, Pair p) const { return x == p.b ? p.a : p.b != p.b ? p.b : 0; }
};
template <class T>
struct SpreadLogsumexp {
  static constexpr bool kHasX = true;
  const T* dy;
  const float* m;
  const float* s;
  __device__ Pair of(std::int64_t r) const { return {widen(dy[r]) / s[r], m[r]}; }
  __device__ float apply(float x, Pair p) const { return p.a * cuda::exp_for<T>(x - p.b); }
};
template <class T>
struct SpreadVar {
  static constexpr bool kHasX = true;
  const T* dy;
  const float* mean;
  float divisor;
  __device__ Pair of(std::int64_t r) const { return {2 * widen(dy[r]) / divisor, mean[r]}; }
  __device__ float apply(float x, Pair p) const { return p.a * (x - p.b); }
};

// The result that element i of x goes into.
__device__ __forceinline__ std::int64_t result_of(const ReduceArgs& args, std::int64_t i) {
  std::int64_t inner = 0, in_row = 0;
  const std::int64_t row = cuda::divide(i, args.inner, inner);
  return cuda::divide(row, args.count, in_row) * args.inner + inner;
}

template <class T, class Spread, bool kPacks>
__global__ void __launch_bounds__(kThreads)
    spread_kernel(ReduceArgs args, Spread f, const T* x, T* dx) {
  cuda::wait_turn();
  const std::int64_t size = args.outer * args.count * args.inner;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  if constexpr (!kPacks) {
    for (std::int64_t i = thread; i < size; i += step) {
      dx[i] = narrow<T>(f.apply(Spread::kHasX ? widen(x[i]) : 0, f.of(result_of(args, i))));
    }
  } else {
    for (std::int64_t p = thread; p < size / kPack<T>; p += step) {
      const std::int64_t i = p * kPack<T>;
      float v[kPack<T>] = {};
      if constexpr (Spread::kHasX) cuda::unpack(cuda::load_pack(x + i), v);
      const std::int64_t r = result_of(args, i);
      if (args.inner == 1) {
        const Pair pair = f.of(r);
#pragma unroll
        for (int k = 0; k < kPack<T>; ++k) v[k] = f.apply(v[k], pair);
      } else {
#pragma unroll
        for (int k = 0; k < kPack<T>; ++k) v[k] = f.apply(v[k], f.of(r + k));
      }
      cuda::store_pack(cuda::pack_of<T>(v), dx + i);
    }
  }
}

template <class T, class Spread>
void spread(const ReduceArgs& args, const Spread& f, const T* x, T* dx, cudaStream_t stream) {
  constexpr std::int64_t kMostBlocks = 64 * cuda::kMultiprocessors;
  const bool packs = (args.inner == 1 ? args.count : args.inner) % kPack<T> == 0 &&
                     cuda::is_aligned(dx) && (x == nullptr || cuda::is_aligned(x));
  const std::int64_t work = args.outer * args.count * args.inner / (packs ? kPack<T> : 1);
  const auto kernel = packs ? spread_kernel<T, Spread, true> : spread_kernel<T, Spread, false>;
  cuda::launch(kernel, std::min(cuda::blocks_for(work, kThreads), kMostBlocks), kThreads, 0, 1,
               stream, args, f, x, dx);
}

template <class T>
void sum_bwd(const KernelCall& call) {  // dy
  const auto& args = call.as<ReduceArgs>();
  const SpreadSum<T> f{call.input<T>(0), static_cast<float>(args.divisor)};
  spread<T>(args, f, static_cast<const T*>(nullptr), call.output<T>(0),
            static_cast<cudaStream_t>(call.queue));
}

// Scratch: partial counts, then y as f32, then the counts.
std::size_t extreme_workspace(const void* args) {
  return workspace(args) +
         2 * static_cast<std::size_t>(results(*static_cast<const ReduceArgs*>(args))) *
             sizeof(float);
}
template <class T>
__global__ void __launch_bounds__(kThreads) widen_kernel(std::int64_t n, const T* from, float* to) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) to[i] = widen(from[i]);
}
template <class T>
void extreme_bwd(const KernelCall& call) {  // dy, x, y
  const auto& args = call.as<ReduceArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const Cut cut = cut_of(args);
  const T* x = call.input<T>(1);
  const T* y = call.input<T>(2);
  auto* parts = static_cast<float*>(call.workspace);  // [outer, chunks, inner]
  float* wide = parts + results(args) * cut.chunks;   // [outer, inner]
  float* count = wide + results(args);                // [outer, inner]
  cuda::launch(widen_kernel<T>, cuda::blocks_for(results(args), kThreads), kThreads, 0, 1, stream,
               results(args), y, wide);
  fold<CountEqual<T>>(args, cut, x, wide, parts, stream);
  join<CountEqual<T>>(args, cut, parts, Divided<float>{count, 1}, stream);
  spread<T>(args, SpreadExtreme<T>{call.input<T>(0), y, count}, x, call.output<T>(0), stream);
}

template <class T>
void logsumexp_bwd(const KernelCall& call) {  // dy, x, m and s
  const auto& args = call.as<ReduceArgs>();
  const float* m = call.input<float>(2);
  const SpreadLogsumexp<T> f{call.input<T>(0), m, m + results(args)};
  spread<T>(args, f, call.input<T>(1), call.output<T>(0), static_cast<cudaStream_t>(call.queue));
}

template <class T>
void var_bwd(const KernelCall& call) {  // dy, x, mean
  const auto& args = call.as<ReduceArgs>();
  const SpreadVar<T> f{call.input<T>(0), call.input<float>(2), static_cast<float>(args.divisor)};
  spread<T>(args, f, call.input<T>(1), call.output<T>(0), static_cast<cudaStream_t>(call.queue));
}

// ---- integers: a warp a result ----

template <class U>
__global__ void __launch_bounds__(kThreads) whole_sum_kernel(ReduceArgs args, const U* x, U* y) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (i >= args.outer * args.inner) return;
  std::int64_t inner = 0;
  const std::int64_t outer = cuda::divide(i, args.inner, inner);
  const U* from = x + outer * args.count * args.inner + inner;
  U sum = 0;
  for (std::int64_t c = threadIdx.x % kWarp; c < args.count; c += kWarp)
    sum += from[c * args.inner];
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(cuda::kAll, sum, step);
  if (threadIdx.x % kWarp == 0) y[i] = sum;
}
template <class U>
void whole_sum_fwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  cuda::launch(whole_sum_kernel<U>, cuda::blocks_for(results(args), kWarps), kThreads, 0, 1,
               static_cast<cudaStream_t>(call.queue), args, call.input<U>(0), call.output<U>(0));
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  const auto add = [&](const char* name, KernelFn fn, WorkspaceFn scratch) {
    registry.add(Backend::kCuda, name + type, fn, scratch);
  };
  add("sum_fwd_", once_fwd<T, Sum>, workspace);
  add("max_fwd_", once_fwd<T, Max>, workspace);
  add("min_fwd_", once_fwd<T, Min>, workspace);
  add("logsumexp_fwd_", logsumexp_fwd<T>, workspace);
  add("var_fwd_", var_fwd<T>, workspace);
  add("sum_bwd_", sum_bwd<T>, nullptr);
  add("extreme_bwd_", extreme_bwd<T>, extreme_workspace);
  add("logsumexp_bwd_", logsumexp_bwd<T>, nullptr);
  add("var_bwd_", var_bwd<T>, nullptr);
}

}  // namespace

void register_reduce_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  registry.add(Backend::kCuda, "sum_fwd_i32", whole_sum_fwd<unsigned>);
  registry.add(Backend::kCuda, "sum_fwd_u32", whole_sum_fwd<unsigned>);
  registry.add(Backend::kCuda, "sum_fwd_i64", whole_sum_fwd<unsigned long long>);
  registry.add(Backend::kCuda, "sum_fwd_u64", whole_sum_fwd<unsigned long long>);
}

}  // namespace mlxtape::ops
