// CUDA kernels of scan (formula: mlxtape/ops/scan.h). Bound by memory.
//
// Rows: 8 threads, a warp or a block walk along a row, a pack each at a time, and tell each other their sums. Columns: a
// thread walks down a pack of columns, or down one. Where there are too few of either, the axis is cut into
// pieces that are first summed by one kernel and then scanned by another: read twice, for 3 transfers instead
// of 2, in an order of additions that the shape alone decides.
#include <algorithm>

#include "backends/cuda/device/index.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/core/registry.h"
#include "scan_args.h"

namespace mlxtape::ops {

namespace {

using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::widen;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr std::int64_t kEnoughBlocks = 8 * cuda::kMultiprocessors;
constexpr std::int64_t kLeastPiece = 8192;  // of a row: elements worth a block
constexpr std::int64_t kMostPieces = 512;   // of columns: joined one after the other
constexpr int kRowsAtOnce = 4;              // loads of a column that are under way

// ---- how the work is cut: by shape alone ----

struct Cut {
  std::int64_t each, pieces;  // each: positions along the axis
};

template <class T>
Cut cut_of(const ScanArgs& a) {
  std::int64_t pieces = 0;
  if (a.inner == 1) {
    pieces = std::min(kEnoughBlocks / a.outer, a.count / kLeastPiece);
  } else {
    const std::int64_t threads = a.outer * cuda::blocks_for(a.inner, kPack<T>);
    pieces = std::min({kEnoughBlocks * kThreads / 2 / threads, a.count / 16, kMostPieces});
  }
  if (pieces < 2) return {a.count, 1};
  // Whole packs, also counted from the end where rows have whole packs.
  const std::int64_t each = cuda::blocks_for(cuda::blocks_for(a.count, pieces), 8) * 8;
  return {each, cuda::blocks_for(a.count, each)};
}

template <class T>
std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const ScanArgs*>(args);
  const std::int64_t pieces = cut_of<T>(a).pieces;
  return pieces == 1 ? 0 : static_cast<std::size_t>(a.outer * pieces * a.inner) * sizeof(float);
}

// ---- rows ----

// kEach neighbouring elements of a row, in the order of the sum. Positions count in that order; x is the row.
template <class T, bool kPacks>
struct Elements {
  static constexpr int kEach = kPack<T>;
  Pack<T> pack = {};

  static __device__ std::int64_t place(const ScanArgs& a, std::int64_t at) {
    return a.reverse != 0 ? a.count - at - kEach : at;  // of the first in memory
  }
  static __device__ std::int64_t single(const ScanArgs& a, std::int64_t at) {
    return a.reverse != 0 ? a.count - 1 - at : at;
  }
  static __device__ void turn(const ScanArgs& a, float (&v)[kEach]) {
    if (a.reverse == 0) return;
#pragma unroll
    for (int k = 0; k < kEach / 2; ++k) {
      const float t = v[k];
      v[k] = v[kEach - 1 - k];
      v[kEach - 1 - k] = t;
    }
  }
  // Those before end; zeros in the place of the others.
  __device__ __forceinline__ void load(const ScanArgs& a, const T* x, std::int64_t at,
                                       std::int64_t end) {
    if constexpr (kPacks) {
      pack = {};
      if (at < end) pack = cuda::load_pack(x + place(a, at));
    }
  }
  __device__ __forceinline__ void get(const ScanArgs& a, const T* x, std::int64_t at,
                                      std::int64_t end, float (&v)[kEach]) const {
    if constexpr (kPacks) {
      cuda::unpack(pack, v);
      turn(a, v);
    } else {
#pragma unroll
      for (int k = 0; k < kEach; ++k) v[k] = at + k < end ? widen(x[single(a, at + k)]) : 0;
    }
  }
  static __device__ __forceinline__ void put(const ScanArgs& a, T* y, std::int64_t at,
                                             std::int64_t end, float (&v)[kEach]) {
    if constexpr (kPacks) {
      if (at >= end) return;
      turn(a, v);
      cuda::store_pack(cuda::pack_of<T>(v), y + place(a, at));
    } else {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        if (at + k < end) y[single(a, at + k)] = narrow<T>(v[k]);
      }
    }
  }
};

struct Sums {
  float before, all;  // of the threads before this one, and of all
};

// Of kRow threads that share a row. room [kWarps]: another one for each call that follows another.
template <int kRow>
__device__ __forceinline__ Sums sums_of(float v, float* room) {
  constexpr int kLanes = kRow < kWarp ? kRow : kWarp;
  const int lane = threadIdx.x % kLanes;
  float upto = v;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const float other = __shfl_up_sync(cuda::kAll, upto, step, kLanes);
    if (lane >= step) upto += other;
  }
  float before = __shfl_up_sync(cuda::kAll, upto, 1, kLanes);
  if (lane == 0) before = 0;
  float all = __shfl_sync(cuda::kAll, upto, kLanes - 1, kLanes);
  if constexpr (kRow > kWarp) {
    const int warp = threadIdx.x / kWarp;
    if (lane == 0) room[warp] = all;
    __syncthreads();
    float earlier = 0;
    all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) earlier = all;
      all += room[w];
    }
    before += earlier;
  }
  return {before, all};
}

// kRow threads a row, of which there is one piece; or with a block a row, several.
template <class T, int kRow, bool kPacks>
__global__ void __launch_bounds__(kThreads)
    scan_rows(ScanArgs args, Cut cut, const T* x, const float* parts, T* y) {
  cuda::wait_turn();
  using Mine = Elements<T, kPacks>;
  __shared__ float room[3][kWarps];
  const std::int64_t item = std::int64_t{blockIdx.x} * (kThreads / kRow) + threadIdx.x / kRow;
  std::int64_t piece = 0;
  const std::int64_t row = cuda::divide(item, cut.pieces, piece);
  const std::int64_t first = piece * cut.each;
  const std::int64_t stop = min(args.count, first + cut.each);
  const std::int64_t end = row < args.outer ? stop : 0;  // nothing where there is no row
  x += row * args.count;
  y += row * args.count;
  float sum = 0;
  if (kRow == kThreads && piece > 0) {
    for (std::int64_t p = threadIdx.x; p < piece; p += kThreads) {
      sum += parts[row * cut.pieces + p];
    }
    sum = sums_of<kRow>(sum, room[2]).all;
  }
  constexpr int kStep = kRow * Mine::kEach;
  std::int64_t at = first + threadIdx.x % kRow * Mine::kEach;
  Mine mine;
  mine.load(args, x, at, end);
  int turn = 0;
  for (std::int64_t tile = first; tile < stop; tile += kStep, at += kStep, turn ^= 1) {
    Mine next;
    next.load(args, x, at + kStep, end);
    float v[Mine::kEach];
    mine.get(args, x, at, end, v);
    float own = 0;
#pragma unroll
    for (const float each : v) own += each;
    const Sums sums = sums_of<kRow>(own, room[turn]);
    float run = sum + sums.before;
#pragma unroll
    for (float& each : v) {
      const float before = run;
      run += each;
      each = args.exclusive != 0 ? before : run;
    }
    Mine::put(args, y, at, end, v);
    sum += sums.all;
    mine = next;
  }
}

template <class T, bool kPacks>
__global__ void __launch_bounds__(kThreads)
    sum_rows(ScanArgs args, Cut cut, const T* x, float* parts) {
  cuda::wait_turn();
  using Mine = Elements<T, kPacks>;
  __shared__ float room[kWarps];
  std::int64_t piece = 0;
  const std::int64_t row = cuda::divide(blockIdx.x, cut.pieces, piece);
  const std::int64_t end = min(args.count, (piece + 1) * cut.each);
  x += row * args.count;
  float own = 0;
  for (std::int64_t at = piece * cut.each + threadIdx.x * Mine::kEach; at < end;
       at += kThreads * Mine::kEach) {
    Mine mine;
    mine.load(args, x, at, end);
    float v[Mine::kEach];
    mine.get(args, x, at, end, v);
#pragma unroll
    for (const float each : v) own += each;
  }
  own = sums_of<kThreads>(own, room).all;
  if (threadIdx.x == 0) parts[blockIdx.x] = own;
}

template <class T, bool kPacks>
void rows(const ScanArgs& args, const Cut& cut, const T* x, float* parts, T* y,
          cudaStream_t stream) {
  const std::int64_t items = args.outer * cut.pieces;
  if (cut.pieces > 1) {
    cuda::launch(sum_rows<T, kPacks>, items, kThreads, 0, 1, stream, args, cut, x, parts);
  }
  const auto run = [&](auto kernel, int threads) {
    cuda::launch(kernel, cuda::blocks_for(items * threads, kThreads), kThreads, 0, 1, stream, args,
                 cut, x, static_cast<const float*>(parts), y);
  };
  if (cut.pieces > 1 || args.count > 16 * kWarp * kPack<T>) {
    run(scan_rows<T, kThreads, kPacks>, kThreads);
  } else if (args.count > 2 * 8 * kPack<T>) {
    run(scan_rows<T, kWarp, kPacks>, kWarp);
  } else {
    run(scan_rows<T, 8, kPacks>, 8);
  }
}

// ---- columns ----

// A thread has kColumns columns of one piece. kSum: their sums into parts [outer, pieces, inner]; else they are
// scanned from what is there.
template <class T, int kColumns, bool kSum>
__global__ void __launch_bounds__(kThreads)
    scan_columns(ScanArgs args, Cut cut, const T* x, float* parts, T* y) {
  cuda::wait_turn();
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t units = args.inner / kColumns;
  if (thread >= args.outer * cut.pieces * units) return;
  std::int64_t unit = 0, piece = 0;
  const std::int64_t item = cuda::divide(thread, units, unit);
  const std::int64_t outer = cuda::divide(item, cut.pieces, piece);
  const std::int64_t first = piece * cut.each;
  const std::int64_t n = min(cut.each, args.count - first);
  const std::int64_t row = args.reverse != 0 ? args.count - 1 - first : first;
  const std::int64_t step = args.reverse != 0 ? -args.inner : args.inner;
  const std::int64_t at = (outer * args.count + row) * args.inner + unit * kColumns;
  x += at;
  y += kSum ? 0 : at;
  parts += item * args.inner + unit * kColumns;
  float sum[kColumns];
#pragma unroll
  for (int k = 0; k < kColumns; ++k) sum[k] = kSum || cut.pieces == 1 ? 0 : parts[k];
  for (std::int64_t r = 0; r < n; r += kRowsAtOnce) {
    float v[kRowsAtOnce][kColumns];
    Pack<T> pack[kRowsAtOnce];
#pragma unroll
    for (int b = 0; b < kRowsAtOnce; ++b) {
      if constexpr (kColumns == 1) {
        v[b][0] = r + b < n ? widen(x[(r + b) * step]) : 0;
      } else {
        pack[b] = {};
        if (r + b < n) pack[b] = cuda::load_pack(x + (r + b) * step);
      }
    }
#pragma unroll
    for (int b = 0; b < kRowsAtOnce; ++b) {
      if constexpr (kColumns != 1) cuda::unpack(pack[b], v[b]);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        const float before = sum[k];
        sum[k] += v[b][k];
        v[b][k] = args.exclusive != 0 ? before : sum[k];
      }
      if (kSum || r + b >= n) continue;
      if constexpr (kColumns == 1) {
        y[(r + b) * step] = narrow<T>(v[b][0]);
      } else {
        cuda::store_pack(cuda::pack_of<T>(v[b]), y + (r + b) * step);
      }
    }
  }
  if constexpr (kSum) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) parts[k] = sum[k];
  }
}

// parts [outer, pieces, inner]: each piece's sum becomes that of the pieces before, a thread a column.
__global__ void __launch_bounds__(kThreads)
    join_pieces(ScanArgs args, std::int64_t pieces, float* parts) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.outer * args.inner) return;
  std::int64_t inner = 0;
  const std::int64_t outer = cuda::divide(i, args.inner, inner);
  parts += outer * pieces * args.inner + inner;
  constexpr int kBatch = 16;  // loads under way at once
  float sum = 0;
  for (std::int64_t p = 0; p < pieces; p += kBatch) {
    float v[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) v[k] = p + k < pieces ? parts[(p + k) * args.inner] : 0;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (p + k < pieces) parts[(p + k) * args.inner] = sum;
      sum += v[k];
    }
  }
}

template <class T, int kColumns>
void columns(const ScanArgs& args, const Cut& cut, const T* x, float* parts, T* y,
             cudaStream_t stream) {
  const std::int64_t blocks =
      cuda::blocks_for(args.outer * cut.pieces * (args.inner / kColumns), kThreads);
  if (cut.pieces > 1) {
    cuda::launch(scan_columns<T, kColumns, true>, blocks, kThreads, 0, 1, stream, args, cut, x,
                 parts, y);
    cuda::launch(join_pieces, cuda::blocks_for(args.outer * args.inner, kThreads), kThreads, 0, 1,
                 stream, args, cut.pieces, parts);
  }
  cuda::launch(scan_columns<T, kColumns, false>, blocks, kThreads, 0, 1, stream, args, cut, x,
               parts, y);
}

template <class T>
void cumsum_fwd(const KernelCall& call) {
  const auto& args = call.as<ScanArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const Cut cut = cut_of<T>(args);
  const T* x = call.input<T>(0);
  T* y = call.output<T>(0);
  auto* parts = static_cast<float*>(call.workspace);
  const bool packs = (args.inner == 1 ? args.count : args.inner) % kPack<T> == 0 &&
                     cuda::is_aligned(x) && cuda::is_aligned(y);
  if (args.inner == 1) {
    packs ? rows<T, true>(args, cut, x, parts, y, stream)
          : rows<T, false>(args, cut, x, parts, y, stream);
  } else {
    packs ? columns<T, kPack<T>>(args, cut, x, parts, y, stream)
          : columns<T, 1>(args, cut, x, parts, y, stream);
  }
}

// ---- integers: a warp a row or column ----

template <class U, class Wide>
__global__ void __launch_bounds__(kThreads) whole_kernel(ScanArgs args, const U* x, U* y) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (i >= args.outer * args.inner) return;
  std::int64_t inner = 0;
  const std::int64_t outer = cuda::divide(i, args.inner, inner);
  x += outer * args.count * args.inner + inner;
  y += outer * args.count * args.inner + inner;
  const int lane = threadIdx.x % kWarp;
  Wide sum = 0;
  for (std::int64_t tile = 0; tile < args.count; tile += kWarp) {
    const std::int64_t at = tile + lane;
    const bool in = at < args.count;
    const std::int64_t place = (args.reverse != 0 ? args.count - 1 - at : at) * args.inner;
    const Wide v = in ? x[place] : 0;
    Wide upto = v;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const Wide other = __shfl_up_sync(cuda::kAll, upto, step);
      if (lane >= step) upto += other;
    }
    if (in) y[place] = static_cast<U>(sum + (args.exclusive != 0 ? upto - v : upto));
    sum += __shfl_sync(cuda::kAll, upto, kWarp - 1);
  }
}
template <class U, class Wide>
void cumsum_whole_fwd(const KernelCall& call) {
  const auto& args = call.as<ScanArgs>();
  cuda::launch(whole_kernel<U, Wide>, cuda::blocks_for(args.outer * args.inner, kWarps), kThreads,
               0, 1, static_cast<cudaStream_t>(call.queue), args, call.input<U>(0),
               call.output<U>(0));
}

}  // namespace

void register_scan_cuda(KernelRegistry& registry) {
  registry.add(Backend::kCuda, "cumsum_fwd_f32", cumsum_fwd<float>, workspace<float>);
  registry.add(Backend::kCuda, "cumsum_fwd_f16", cumsum_fwd<F16>, workspace<F16>);
  registry.add(Backend::kCuda, "cumsum_fwd_bf16", cumsum_fwd<BF16>, workspace<BF16>);
  registry.add(Backend::kCuda, "cumsum_fwd_u8", cumsum_whole_fwd<std::uint8_t, unsigned>);
  registry.add(Backend::kCuda, "cumsum_fwd_u16", cumsum_whole_fwd<std::uint16_t, unsigned>);
  registry.add(Backend::kCuda, "cumsum_fwd_u32", cumsum_whole_fwd<std::uint32_t, unsigned>);
  registry.add(Backend::kCuda, "cumsum_fwd_u64",
               cumsum_whole_fwd<unsigned long long, unsigned long long>);
}

}  // namespace mlxtape::ops
