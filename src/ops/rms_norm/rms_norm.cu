// CUDA kernels of rms_norm (formula and layout: mlxtape/ops/rms_norm.h).
//
// Rows of whole 16-byte packs are shared by a group of threads, from half a warp to four blocks, that
// keeps the row in registers, so that it is read once. A group walks many rows, and each thread
// fetches its own packs of the next few into shared memory, where it alone reads them: no barrier,
// and enough bytes under way however few threads fit. w waits in shared memory as f32. The backward
// sums dw of a thread's columns in registers over all its rows, then over the groups of its block,
// and a second kernel adds the blocks' sums in order. Bound by memory.
//
// Other rows (ragged, misaligned, or too long) are walked twice, dw in a kernel of its own.
#include <cuda_runtime.h>

#include <algorithm>

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/fetch.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/partials.cuh"
#include "backends/cuda/device/rows.cuh"
#include "mlxtape/core/registry.h"
#include "rms_norm_args.h"

namespace mlxtape::ops {

namespace {

using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::RowThreads;
using cuda::widen;

enum class Form { kPlain, kResidual, kGated };

// ---- scalars ----

template <class T>
__device__ __forceinline__ float weight_at(const RmsNormArgs& args, const void* w, std::int64_t i) {
  if (args.weight == kRmsNormNoWeight) return 1;
  if (args.weight == kRmsNormWeightF32) return static_cast<const float*>(w)[i];
  return widen(static_cast<const T*>(w)[i]);
}

// share: 1/D.
__device__ __forceinline__ float inverse_root(float sum, float share, float eps) {
  return __frsqrt_rn(fmaf(sum, share, eps));
}

// s·r²/D, in an order that does not overflow where the result does not.
__device__ __forceinline__ float pull(float s, float r, float share) { return s * r * share * r; }

template <class T>
__device__ __forceinline__ float silu(float g) {
  return g * cuda::sigmoid<T>(g).value;
}

// silu and its derivative.
struct Gate {
  float silu, slope;
};
template <class T>
__device__ __forceinline__ Gate gate(float g) {
  const auto [value, rest] = cuda::sigmoid<T>(g);
  const float silu = g * value;
  return {silu, fmaf(silu, rest, value)};
}

// ---- how rows are cut ----

// kThreads_ threads of each of kCluster_ blocks share a row, up to kPacks_ packs each.
template <int kThreads_, int kPacks_, int kCluster_ = 1>
struct Cut {
  static constexpr int kThreads = kThreads_, kPacks = kPacks_, kCluster = kCluster_;
  static constexpr int kBlock = kThreads < 128 ? 256 : 512;  // threads
  static constexpr int kGroups = kBlock / kThreads;          // of a block; each has its own row
  static constexpr int kSlots = kThreads * kPacks;           // packs of a row in one block
  static constexpr int kWarps = std::max(1, kThreads / kWarp);
  static constexpr int kSums = kWarps * kCluster;  // that make a row's
  static constexpr bool kOneWarp = kThreads <= kWarp;

  static __device__ int rank() { return threadIdx.x % kThreads; }
  static __device__ int group() { return threadIdx.x / kThreads; }
  static __device__ void barrier() {  // of the threads that share a row
    if constexpr (kCluster > 1) {
      cuda::cluster_sync();
    } else {
      asm volatile("bar.sync %0, %1;" : : "r"(1 + group()), "n"(kThreads) : "memory");
    }
  }

  // room [kGroups · kSums]: not that of the row before.
  static __device__ float sum(float v, float* room) {
    v = cuda::lanes_sum<std::min(kThreads, kWarp)>(v);
    if constexpr (kOneWarp) return v;
    room += group() * kSums;
    const int lane = threadIdx.x % kWarp;
    const int warp = rank() / kWarp;
    if constexpr (kCluster > 1) {
      const int block = blockIdx.x % kCluster;
      if (lane < kCluster) cuda::store_in_peer(room + block * kWarps + warp, lane, v);
    } else {
      if (lane == 0) room[warp] = v;
    }
    barrier();
    if constexpr (kSums > 16) {
      static_assert(kSums == 2 * kWarp);
      return cuda::lanes_sum(room[lane] + room[lane + kWarp]);
    }
    float all = 0;
#pragma unroll
    for (int i = 0; i < kSums; ++i) all += room[i];
    return all;
  }
};

// What a block has in shared memory when kBlocks_ of them share a multiprocessor: w, then the packs
// that are fetched ahead, for kStages rows of each group.
template <class T, class C, int kArrays_, int kBlocks_>
struct Plan {
  static constexpr int kArrays = kArrays_, kBlocks = kBlocks_;
  static constexpr int kCols = C::kSlots * kPack<T>;
  static constexpr int kWeightBytes = kCols * static_cast<int>(sizeof(float));
  static constexpr int kStageBytes = kArrays * C::kPacks * C::kBlock * 16;
  static constexpr int kReserved = 2048;  // of each block: the sums' room, and the system's
  static constexpr int kShare = (cuda::kSharedBytes + 1024) / kBlocks - kReserved;
  static constexpr int kStages = std::clamp((kShare - kWeightBytes) / kStageBytes, 1, 4);
  static constexpr int kBytes = kWeightBytes + kStages * kStageBytes;
  static constexpr bool kFits = kBytes <= kShare;
};
// As many blocks as fit, up to kMost.
template <class T, class C, int kArrays, int kMost>
constexpr int blocks_that_fit() {
  if constexpr (kMost == 1 || Plan<T, C, kArrays, kMost>::kFits) {
    static_assert(Plan<T, C, kArrays, kMost>::kFits);
    return kMost;
  } else {
    return blocks_that_fit<T, C, kArrays, kMost - 1>();
  }
}
template <class T, class C, int kArrays, int kMost>
using PlanFor = Plan<T, C, kArrays, blocks_that_fit<T, C, kArrays, kMost>()>;

// How many blocks have room for their registers: w is not in them, but rows are, and dw.
template <class T, Form kForm, class C>
constexpr int forward_blocks() {
  if (C::kOneWarp) return 4;
  return kForm == Form::kPlain || sizeof(T) < sizeof(float) || C::kPacks == 1 ? 2 : 1;
}
template <class T, Form kForm, class C>
using ForwardPlan = PlanFor<T, C, kForm == Form::kPlain ? 1 : 2, forward_blocks<T, kForm, C>()>;

template <class T, Form kForm, class C>
constexpr int backward_blocks() {
  constexpr bool kLarge = kForm == Form::kGated && sizeof(T) < sizeof(float);
  if (!C::kOneWarp) return C::kPacks > 1 || kLarge ? 1 : 2;
  if (C::kPacks * kPack<T> > 8) return 2;
  return kLarge ? 3 : 4;
}
template <class T, Form kForm, class C>
using BackwardPlan = PlanFor<T, C, kForm == Form::kPlain ? 2 : 3, backward_blocks<T, kForm, C>()>;

// Blocks of a launch. Clusters of 4 that an H200 runs at once with one block a multiprocessor: 30.
template <class C>
std::int64_t grid(std::int64_t rows, int blocks) {
  if constexpr (C::kCluster > 1) return C::kCluster * std::min<std::int64_t>(rows, 30 * blocks);
  return std::min<std::int64_t>(cuda::blocks_for(rows, C::kGroups),
                                cuda::kMultiprocessors * blocks);
}

// The rows of a group, one after another, from kArrays tensors: fetched ahead, then taken.
template <class T, class C, class P>
struct Rows {
  static constexpr int kArrays = P::kArrays;
  const T* const (&in)[kArrays];
  uint4* slots;  // [kStages][kArrays][kPacks][threads]
  std::int64_t rows, step;
  std::int64_t row;     // taken, or the first
  std::int64_t at;      // where this thread's first pack of it is
  std::int64_t stride;  // from there to the next row's
  int first;            // pack of a row where this block's part begins
  int packs;            // of that part, from this thread's first on
  int stage = 0;

  __device__ Rows(const RmsNormArgs& args, const T* const (&tensors)[kArrays], void* room)
      : in(tensors), slots(static_cast<uint4*>(room) + threadIdx.x), rows(args.rows) {
    const int whole = static_cast<int>(args.cols / kPack<T>);
    const int each = (whole + C::kCluster - 1) / C::kCluster;
    first = static_cast<int>(blockIdx.x % C::kCluster) * each;
    packs = min(each, whole - first) - C::rank();
    row = std::int64_t{blockIdx.x / C::kCluster} * C::kGroups + C::group();
    step = std::int64_t{gridDim.x / C::kCluster} * C::kGroups;
    at = row * args.cols + std::int64_t{first + C::rank()} * kPack<T>;
    stride = step * args.cols;
#pragma unroll
    for (int s = 0; s < P::kStages; ++s) fetch(s, s);
  }

  __device__ bool has(int j) const { return j * C::kThreads < packs; }
  __device__ bool exists() const { return row < rows; }
  // The same in all threads of a warp: the first of its groups has a row.
  __device__ bool more() const {
    const int before = C::kOneWarp ? C::group() % (kWarp / std::min(kWarp, C::kThreads)) : 0;
    return row - before < rows;
  }
  __device__ void next() {
    row += step;
    at += stride;
  }
  __device__ uint4* slot(int s, int a, int j) const {
    return slots + ((s * kArrays + a) * C::kPacks + j) * C::kBlock;
  }

  __device__ void fetch(int s, int ahead) const {
    const bool there = row + ahead * step < rows;
    const std::int64_t from = at + ahead * stride;
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
#pragma unroll
      for (int j = 0; j < C::kPacks; ++j) {
        cuda::fetch(slot(s, a, j), in[a] + from + j * C::kThreads * kPack<T>, there && has(j));
      }
    }
    cuda::end_batch();
  }

  // The row's packs; zeros where there is no row or no pack.
  __device__ void take(Pack<T> (&to)[kArrays][C::kPacks]) {
    cuda::wait_batches<P::kStages - 1>();
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
#pragma unroll
      for (int j = 0; j < C::kPacks; ++j) {
        const uint4 bits = *slot(stage, a, j);
        to[a][j] = {{bits.x, bits.y, bits.z, bits.w}};
      }
    }
    fetch(stage, P::kStages);
    stage = stage + 1 == P::kStages ? 0 : stage + 1;
  }

  __device__ void put(T* to, int j, const Pack<T>& pack) const {
    if (exists() && has(j)) cuda::store_pack(pack, to + at + j * C::kThreads * kPack<T>);
  }
};

// Stops the compiler from keeping 16-bit elements as f32 until they are needed again.
template <class T, int kPacks>
__device__ __forceinline__ void keep_packed(Pack<T> (&packs)[kPacks]) {
  if constexpr (sizeof(T) < sizeof(float)) {
#pragma unroll
    for (Pack<T>& pack : packs) {
#pragma unroll
      for (unsigned& word : pack.word) asm volatile("" : "+r"(word));
    }
  }
}

// w of this block's columns as f32: the first four elements of every pack, then the next four.
template <class T, class C>
struct Weights {
  float* room;

  __device__ void fill(const RmsNormArgs& args, const void* w, std::int64_t first) const {
    for (int i = threadIdx.x; i < C::kSlots * kPack<T>; i += C::kBlock) {
      const std::int64_t c = first + i;
      const int place = (i % kPack<T> / 4 * C::kSlots + i / kPack<T>)*4 + i % 4;
      room[place] = c < args.cols ? weight_at<T>(args, w, c) : 0;
    }
  }
  __device__ void get(int j, float (&v)[kPack<T>]) const {
#pragma unroll
    for (int h = 0; h < kPack<T> / 4; ++h) {
      const int p = h * C::kSlots + C::rank() + j * C::kThreads;
      const float4 four = *reinterpret_cast<const float4*>(room + 4 * p);
      v[4 * h] = four.x;
      v[4 * h + 1] = four.y;
      v[4 * h + 2] = four.z;
      v[4 * h + 3] = four.w;
    }
  }
};

// ---- rows that are kept ----

template <class T>
struct ForwardCall {
  const T* x;      // [R, D]
  const T* other;  // [R, D]: residual or g
  const void* w;   // [D]
  T* y;            // [R, D]
  T* h;            // [R, D]
  float* r;        // [R]
};

template <class T, Form kForm, class C>
__global__ void __launch_bounds__(C::kBlock, ForwardPlan<T, kForm, C>::kBlocks)
    forward_kept(RmsNormArgs args, ForwardCall<T> f) {
  using P = ForwardPlan<T, kForm, C>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float room[2][C::kGroups * C::kSums];
  const T* in[P::kArrays];
  in[0] = f.x;
  if constexpr (P::kArrays > 1) in[1] = f.other;
  Rows<T, C, P> walk(args, in, shared + P::kWeightBytes);
  const Weights<T, C> w{reinterpret_cast<float*>(shared)};
  w.fill(args, f.w, std::int64_t{walk.first} * kPack<T>);
  __syncthreads();
  if constexpr (C::kCluster > 1) cuda::cluster_sync();  // the peers are there to be written to
  const float share = 1 / static_cast<float>(args.cols);
  Pack<T> pack[P::kArrays][C::kPacks];
  float v[kPack<T>];
  float u[kPack<T>];
  for (int turn = 0; walk.more(); walk.next(), turn ^= 1) {
    walk.take(pack);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < C::kPacks; ++j) {
      cuda::unpack(pack[0][j], v);
      if constexpr (kForm == Form::kResidual) {
        cuda::unpack(pack[1][j], u);
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) v[i] += u[i];
        pack[0][j] = cuda::pack_of<T>(v);
        walk.put(f.h, j, pack[0][j]);
        cuda::unpack(pack[0][j], v);  // as stored
      }
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) sum = fmaf(v[i], v[i], sum);
    }
    keep_packed(pack[0]);
    const float r = inverse_root(C::sum(sum, room[turn]), share, args.eps);
    if (walk.exists() && walk.first == 0 && C::rank() == 0) f.r[walk.row] = r;
#pragma unroll
    for (int j = 0; j < C::kPacks; ++j) {
      cuda::unpack(pack[0][j], v);
      w.get(j, u);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) v[i] = v[i] * r * u[i];
      if constexpr (kForm == Form::kGated) {
        cuda::unpack(pack[1][j], u);
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) v[i] *= silu<T>(u[i]);
      }
      walk.put(f.y, j, cuda::pack_of<T>(v));
    }
  }
  cuda::wait_batches<0>();  // nothing is on its way to a block that is gone
}

template <class T>
struct BackwardCall {
  const T* x;      // [R, D]
  const T* dy;     // [R, D]
  const T* other;  // [R, D]: dh_in or g
  const void* w;   // [D]
  const float* r;  // [R]
  T* dx;           // [R, D]
  T* dg;           // [R, D]
  float* parts;    // [blocks or clusters, D]: their dw
};

template <class T, Form kForm, class C>
__global__ void __launch_bounds__(C::kBlock, BackwardPlan<T, kForm, C>::kBlocks)
    backward_kept(RmsNormArgs args, BackwardCall<T> b) {
  using P = BackwardPlan<T, kForm, C>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float room[2][C::kGroups * C::kSums];
  const T* in[P::kArrays];
  in[0] = b.x;
  in[1] = b.dy;
  if constexpr (P::kArrays > 2) in[2] = b.other;
  Rows<T, C, P> walk(args, in, shared + P::kWeightBytes);
  const Weights<T, C> weights{reinterpret_cast<float*>(shared)};
  const std::int64_t first = std::int64_t{walk.first} * kPack<T>;
  weights.fill(args, b.w, first);
  __syncthreads();
  if constexpr (C::kCluster > 1) cuda::cluster_sync();
  const float share = 1 / static_cast<float>(args.cols);
  float dw[C::kPacks][kPack<T>] = {};
  Pack<T> pack[P::kArrays][C::kPacks];
  float r_next = walk.exists() ? b.r[walk.row] : 0;
  for (int turn = 0; walk.more(); walk.next(), turn ^= 1) {
    const float r = r_next;
    r_next = walk.row + walk.step < args.rows ? b.r[walk.row + walk.step] : 0;
    walk.take(pack);
    float x[kPack<T>], through[kPack<T>], w[kPack<T>], other[kPack<T>];
    float kept[C::kPacks][kForm == Form::kGated ? kPack<T> : 1];  // dy·silu(g)
    float s = 0;
#pragma unroll
    for (int j = 0; j < C::kPacks; ++j) {
      cuda::unpack(pack[0][j], x);
      cuda::unpack(pack[1][j], through);
      weights.get(j, w);
      if constexpr (kForm == Form::kGated) {
        cuda::unpack(pack[2][j], other);
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) {
          const auto [silu, slope] = gate<T>(other[i]);
          other[i] = x[i] * r * w[i] * (through[i] * slope);
          through[i] *= silu;
          kept[j][i] = through[i];
        }
        walk.put(b.dg, j, cuda::pack_of<T>(other));
      }
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        const float term = x[i] * through[i];
        s = fmaf(term, w[i], s);
        dw[j][i] = fmaf(term, r, dw[j][i]);
      }
    }
    keep_packed(pack[0]);
    keep_packed(pack[1]);
    const float back = pull(C::sum(s, room[turn]), r, share);
#pragma unroll
    for (int j = 0; j < C::kPacks; ++j) {
      cuda::unpack(pack[0][j], x);
      cuda::unpack(pack[1][j], through);
      weights.get(j, w);
      if constexpr (kForm == Form::kResidual) cuda::unpack(pack[2][j], other);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        if constexpr (kForm == Form::kGated) through[i] = kept[j][i];
        const float inner = fmaf(-x[i], back, through[i] * w[i]);
        x[i] = kForm == Form::kResidual ? fmaf(inner, r, other[i]) : inner * r;
      }
      walk.put(b.dx, j, cuda::pack_of<T>(x));
    }
  }
  cuda::wait_batches<0>();
  if (args.weight == kRmsNormNoWeight) return;

  // The groups' sums meet where the rows were fetched to.
  __syncthreads();
  auto* sums = reinterpret_cast<float*>(shared + P::kWeightBytes);  // [kGroups, kCols]
#pragma unroll
  for (int j = 0; j < C::kPacks; ++j) {
    float* to = sums + C::group() * P::kCols + (C::rank() + j * C::kThreads) * kPack<T>;
#pragma unroll
    for (int i = 0; i < kPack<T>; i += 4) {
      *reinterpret_cast<float4*>(to + i) =
          make_float4(dw[j][i], dw[j][i + 1], dw[j][i + 2], dw[j][i + 3]);
    }
  }
  __syncthreads();
  float* part = b.parts + std::int64_t{blockIdx.x / C::kCluster} * args.cols + first;
  const int mine = (walk.packs + C::rank()) * kPack<T>;
  for (int c = threadIdx.x; c < mine; c += C::kBlock) {
    float sum = sums[c];
#pragma unroll
    for (int g = 1; g < C::kGroups; ++g) sum += sums[g * P::kCols + c];
    part[c] = sum;
  }
}

// ---- any row: walked twice ----

template <class T, Form kForm, int kThreads>
__global__ void __launch_bounds__(RowThreads<kThreads>::kBlock)
    forward_walked(RmsNormArgs args, ForwardCall<T> f) {
  using Row = RowThreads<kThreads>;
  __shared__ float room[Row::kWarps];
  if (Row::row() >= args.rows) return;
  const std::int64_t at = Row::row() * args.cols;
  const T* x = kForm == Form::kResidual ? f.h : f.x;
  float sum = 0;
  for (std::int64_t c = Row::rank(); c < args.cols; c += kThreads) {
    if constexpr (kForm == Form::kResidual) {
      f.h[at + c] = narrow<T>(widen(f.x[at + c]) + widen(f.other[at + c]));
    }
    const float v = widen(x[at + c]);
    sum = fmaf(v, v, sum);
  }
  const float r = inverse_root(Row::sum(sum, room), 1 / static_cast<float>(args.cols), args.eps);
  if (Row::rank() == 0) f.r[Row::row()] = r;
  for (std::int64_t c = Row::rank(); c < args.cols; c += kThreads) {
    float v = widen(x[at + c]) * r * weight_at<T>(args, f.w, c);
    if constexpr (kForm == Form::kGated) v *= silu<T>(widen(f.other[at + c]));
    f.y[at + c] = narrow<T>(v);
  }
}

// dy, or dy·silu(g).
template <Form kForm, class T>
__device__ __forceinline__ float through_at(const BackwardCall<T>& b, std::int64_t i) {
  const float dy = widen(b.dy[i]);
  return kForm == Form::kGated ? dy * silu<T>(widen(b.other[i])) : dy;
}

template <class T, Form kForm, int kThreads>
__global__ void __launch_bounds__(RowThreads<kThreads>::kBlock)
    backward_walked(RmsNormArgs args, BackwardCall<T> b) {
  using Row = RowThreads<kThreads>;
  __shared__ float room[Row::kWarps];
  if (Row::row() >= args.rows) return;
  const std::int64_t at = Row::row() * args.cols;
  const float r = b.r[Row::row()];
  float s = 0;
  for (std::int64_t c = Row::rank(); c < args.cols; c += kThreads) {
    const float term = widen(b.x[at + c]) * through_at<kForm>(b, at + c);
    s = fmaf(term, weight_at<T>(args, b.w, c), s);
  }
  const float back = pull(Row::sum(s, room), r, 1 / static_cast<float>(args.cols));
  for (std::int64_t c = Row::rank(); c < args.cols; c += kThreads) {
    const float x = widen(b.x[at + c]);
    const float w = weight_at<T>(args, b.w, c);
    const float inner = fmaf(-x, back, through_at<kForm>(b, at + c) * w);
    float dx = inner * r;
    if constexpr (kForm == Form::kResidual) dx = fmaf(inner, r, widen(b.other[at + c]));
    b.dx[at + c] = narrow<T>(dx);
    if constexpr (kForm == Form::kGated) {
      const float slope = gate<T>(widen(b.other[at + c])).slope;
      b.dg[at + c] = narrow<T>(x * r * w * (widen(b.dy[at + c]) * slope));
    }
  }
}

constexpr int kShares = 8;  // warps that share the rows of 32 columns

// A block sums dw of 32 columns over one strip of rows.
template <class T, Form kForm>
__global__ void __launch_bounds__(kWarp* kShares)
    dw_walked(RmsNormArgs args, std::int64_t each, BackwardCall<T> b) {
  __shared__ float room[kShares][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int share = threadIdx.x / kWarp;
  const std::int64_t c = std::int64_t{blockIdx.x} * kWarp + lane;
  const std::int64_t start = blockIdx.y * each;
  const std::int64_t end = min(args.rows, start + each);
  float sum = 0;
  for (std::int64_t row = start + share; c < args.cols && row < end; row += kShares) {
    const std::int64_t i = row * args.cols + c;
    sum = fmaf(widen(b.x[i]) * through_at<kForm>(b, i), b.r[row], sum);
  }
  room[share][lane] = sum;
  __syncthreads();
  if (share != 0 || c >= args.cols) return;
#pragma unroll
  for (int s = 1; s < kShares; ++s) sum += room[s][lane];
  b.parts[blockIdx.y * args.cols + c] = sum;
}

// ---- launch ----

// Calls body with the narrowest cut that holds a row; false where none does.
template <class T, class Body>
bool with_cut(std::int64_t cols, const Body& body) {
  constexpr int kMost = 16 / kPack<T>;  // more would not leave room for dw
  if (cols % kPack<T> != 0) return false;
  const auto fits = [&]<class C>(C cut) {
    if (cols / kPack<T> > C::kSlots * C::kCluster) return false;
    body(cut);
    return true;
  };
  return fits(Cut<16, 1>()) || fits(Cut<32, 1>()) || fits(Cut<32, 2>()) || fits(Cut<128, 1>()) ||
         fits(Cut<128, kMost>()) || fits(Cut<256, kMost>()) || fits(Cut<512, kMost>()) ||
         fits(Cut<512, kMost, 4>());
}

template <class... Pointers>
bool all_aligned(Pointers... pointers) {
  return (cuda::is_aligned(pointers) && ...);  // a null pointer is
}

constexpr std::int64_t kMostByWarp = 512;  // columns of a walked row that one warp shares
constexpr int kWalkers = 512;              // threads that share a longer one

template <int kThreads>
unsigned walked_grid(const RmsNormArgs& args) {
  return static_cast<unsigned>(cuda::blocks_for(args.rows, RowThreads<kThreads>::kRows));
}

template <Form kForm, class T>
void forward(const KernelCall& call) {
  const auto& args = call.as<RmsNormArgs>();
  constexpr bool kResidual = kForm == Form::kResidual;
  const ForwardCall<T> f{call.input<T>(0),
                         kForm == Form::kPlain ? nullptr : call.input<T>(2),
                         call.in[1],
                         call.output<T>(0),
                         kResidual ? call.output<T>(1) : nullptr,
                         call.output<float>(kResidual ? 2 : 1)};
  const auto stream = static_cast<cudaStream_t>(call.queue);
  if (args.rows == 0) return;
  if (all_aligned(f.x, f.other, f.y, f.h) && with_cut<T>(args.cols, [&]<class C>(C) {
        using P = ForwardPlan<T, kForm, C>;
        cuda::launch(forward_kept<T, kForm, C>, grid<C>(args.rows, P::kBlocks), C::kBlock,
                     P::kBytes, C::kCluster, stream, args, f);
      })) {
    return;
  }
  if (args.cols <= kMostByWarp) {
    forward_walked<T, kForm, kWarp>
        <<<walked_grid<kWarp>(args), RowThreads<kWarp>::kBlock, 0, stream>>>(args, f);
  } else {
    forward_walked<T, kForm, kWalkers>
        <<<walked_grid<kWalkers>(args), kWalkers, 0, stream>>>(args, f);
  }
}

struct Strips {
  std::int64_t each, count;  // rows of one, and how many
};

// Of walked rows: enough blocks for the device, but at least 64 rows in each.
Strips strips_of(const RmsNormArgs& args) {
  const std::int64_t tiles = cuda::blocks_for(args.cols, kWarp);
  const std::int64_t wanted = cuda::blocks_for(8 * cuda::kMultiprocessors, tiles);
  const std::int64_t each = std::max<std::int64_t>(64, cuda::blocks_for(args.rows, wanted));
  return {each, cuda::blocks_for(args.rows, each)};
}

template <Form kForm, class T>
std::int64_t kept_parts(const RmsNormArgs& args) {
  std::int64_t parts = 0;
  with_cut<T>(args.cols, [&]<class C>(C) {
    parts = grid<C>(args.rows, BackwardPlan<T, kForm, C>::kBlocks) / C::kCluster;
  });
  return parts;
}

// The blocks' dw, of rows kept or walked: which, the addresses will say.
template <Form kForm, class T>
std::size_t backward_workspace(const void* p) {
  const auto& args = *static_cast<const RmsNormArgs*>(p);
  if (args.weight == kRmsNormNoWeight) return 0;
  const std::int64_t parts = std::max(kept_parts<kForm, T>(args), strips_of(args).count);
  return static_cast<std::size_t>(parts * args.cols) * sizeof(float);
}

// Returns the number of parts of dw.
template <Form kForm, class T>
std::int64_t backward_rows(const RmsNormArgs& args, const BackwardCall<T>& b, cudaStream_t stream) {
  if (args.rows == 0) return 0;
  if (all_aligned(b.x, b.dy, b.other, b.dx, b.dg) && with_cut<T>(args.cols, [&]<class C>(C) {
        using P = BackwardPlan<T, kForm, C>;
        cuda::launch(backward_kept<T, kForm, C>, grid<C>(args.rows, P::kBlocks), C::kBlock,
                     P::kBytes, C::kCluster, stream, args, b);
      })) {
    return kept_parts<kForm, T>(args);
  }
  if (args.cols <= kMostByWarp) {
    backward_walked<T, kForm, kWarp>
        <<<walked_grid<kWarp>(args), RowThreads<kWarp>::kBlock, 0, stream>>>(args, b);
  } else {
    backward_walked<T, kForm, kWalkers>
        <<<walked_grid<kWalkers>(args), kWalkers, 0, stream>>>(args, b);
  }
  if (args.weight == kRmsNormNoWeight) return 0;
  const Strips strips = strips_of(args);
  const dim3 blocks(static_cast<unsigned>(cuda::blocks_for(args.cols, kWarp)),
                    static_cast<unsigned>(strips.count));
  dw_walked<T, kForm><<<blocks, kWarp * kShares, 0, stream>>>(args, strips.each, b);
  return strips.count;
}

template <Form kForm, class T>
void backward(const KernelCall& call) {
  const auto& args = call.as<RmsNormArgs>();
  auto* parts = static_cast<float*>(call.workspace);
  const BackwardCall<T> b{call.input<T>(0),
                          call.input<T>(3),
                          kForm == Form::kPlain ? nullptr : call.input<T>(4),
                          call.in[1],
                          call.input<float>(2),
                          call.output<T>(0),
                          kForm == Form::kGated ? call.output<T>(2) : nullptr,
                          parts};
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const std::int64_t count = backward_rows<kForm>(args, b, stream);
  if (args.weight == kRmsNormWeightF32) {
    cuda::sum_partials(parts, count, args.cols, call.output<float>(1), stream);
  } else if (args.weight == kRmsNormWeightLikeX) {
    cuda::sum_partials(parts, count, args.cols, call.output<T>(1), stream);
  }
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  const auto add = [&]<Form kForm>(const std::string& name, std::integral_constant<Form, kForm>) {
    registry.add(Backend::kCuda, name + "_fwd_" + type, forward<kForm, T>);
    registry.add(Backend::kCuda, name + "_bwd_" + type, backward<kForm, T>,
                 backward_workspace<kForm, T>);
  };
  add("rms_norm", std::integral_constant<Form, Form::kPlain>());
  add("rms_norm_residual", std::integral_constant<Form, Form::kResidual>());
  add("rms_norm_gated", std::integral_constant<Form, Form::kGated>());
}

}  // namespace

void register_rms_norm_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
