// CUDA kernels of reduce (formulas and layout: mlxtape/ops/reduce.h).
//
// One look at x, whatever the result: what was seen of it is a state of one to three numbers, and two states
// are joined. Rows (inner = 1) by a warp or a block each, otherwise a warp's lanes are neighbouring results
// and the warps of a block share the rows. Where that is too little work side by side, what meets in one
// result is cut into chunks, by the shape alone, and a second kernel joins their states in a fixed order.
// Backward is one pass, a pack of 16 bytes a thread. Bound by memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/index.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/partials.cuh"
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
constexpr int kResident = 4;  // blocks of a multiprocessor side by side

// ---- folds: start is the state of nothing seen, take sees a few numbers, join is of what both saw, gather of
// what all threads of a row did: the same as joins, with fewer functions on the way ----

template <int kParts>
struct State {
  float part[kParts];
};

// Over the threads of a row, kRow of them; the same bits in each. room: its own for each call.
template <int kRow>
__device__ __forceinline__ float row_sum(float v, float (&room)[kWarps]) {
  v = cuda::lanes_sum(v);
  if constexpr (kRow > kWarp) {
    if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = v;
    __syncthreads();
    v = room[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) v += room[w];
  }
  return v;
}
template <int kRow>
__device__ __forceinline__ float row_max(float v, float (&room)[kWarps]) {
  v = cuda::lanes_max(v);
  if constexpr (kRow > kWarp) {
    if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = v;
    __syncthreads();
    v = room[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) v = cuda::max_nan(v, room[w]);
  }
  return v;
}
using Rooms = float[3][kWarps];

template <class T>
struct Sum {
  static constexpr int kParts = 1;
  __device__ Sum(const T*, std::int64_t) {}
  static __device__ State<1> start() { return {{0}}; }
  template <int kN>
  __device__ void take(State<1>& all, const float (&v)[kN]) const {
#pragma unroll
    for (const float x : v) all.part[0] += x;
  }
  static __device__ State<1> join(State<1> a, State<1> b) { return {{a.part[0] + b.part[0]}}; }
  template <int kRow>
  static __device__ State<1> gather(State<1> all, Rooms& room) {
    return {{row_sum<kRow>(all.part[0], room[0])}};
  }
};

template <class T>
struct CountEqual {  // to what about says of the result
  static constexpr int kParts = 1;
  float y;
  __device__ CountEqual(const T* about, std::int64_t result) : y(widen(about[result])) {}
  static __device__ State<1> start() { return {{0}}; }
  template <int kN>
  __device__ void take(State<1>& all, const float (&v)[kN]) const {
#pragma unroll
    for (const float x : v) all.part[0] += x == y ? 1.0F : 0.0F;
  }
  static __device__ State<1> join(State<1> a, State<1> b) { return {{a.part[0] + b.part[0]}}; }
  template <int kRow>
  static __device__ State<1> gather(State<1> all, Rooms& room) {
    return {{row_sum<kRow>(all.part[0], room[0])}};
  }
};

template <class T>
struct Max {
  static constexpr int kParts = 1;
  __device__ Max(const T*, std::int64_t) {}
  static __device__ State<1> start() { return {{-INFINITY}}; }
  template <int kN>
  __device__ void take(State<1>& all, const float (&v)[kN]) const {
#pragma unroll
    for (const float x : v) all.part[0] = cuda::max_nan(all.part[0], x);
  }
  static __device__ State<1> join(State<1> a, State<1> b) {
    return {{cuda::max_nan(a.part[0], b.part[0])}};
  }
  template <int kRow>
  static __device__ State<1> gather(State<1> all, Rooms& room) {
    return {{row_max<kRow>(all.part[0], room[0])}};
  }
};

template <class T>
struct Min {
  static constexpr int kParts = 1;
  __device__ Min(const T*, std::int64_t) {}
  static __device__ State<1> start() { return {{INFINITY}}; }
  template <int kN>
  __device__ void take(State<1>& all, const float (&v)[kN]) const {
#pragma unroll
    for (const float x : v) all.part[0] = -cuda::max_nan(-all.part[0], -x);
  }
  static __device__ State<1> join(State<1> a, State<1> b) {
    return {{-cuda::max_nan(-a.part[0], -b.part[0])}};
  }
  template <int kRow>
  static __device__ State<1> gather(State<1> all, Rooms& room) {
    return {{-row_max<kRow>(-all.part[0], room[0])}};
  }
};

// The largest, m, and Σ exp(x − m).
template <class T>
struct SumExp {
  static constexpr int kParts = 2;
  __device__ SumExp(const T*, std::int64_t) {}
  static __device__ State<2> start() { return {{-INFINITY, 0}}; }
  // What exponents are relative to: any number serves while all are −inf, and −inf − (−inf) is none.
  static __device__ __forceinline__ float reference(float m) { return m == -INFINITY ? 0 : m; }
  template <int kN>
  __device__ void take(State<2>& all, const float (&v)[kN]) const {
    float m = all.part[0];
#pragma unroll
    for (const float x : v) m = cuda::max_nan(m, x);
    const float at = reference(m);
    float s = all.part[1] * cuda::exp_for<T>(all.part[0] - at);
#pragma unroll
    for (const float x : v) s += cuda::exp_for<T>(x - at);
    all = {{m, s}};
  }
  static __device__ State<2> join(State<2> a, State<2> b) {
    const float m = cuda::max_nan(a.part[0], b.part[0]);
    const float at = reference(m);
    return {{m, a.part[1] * cuda::exp_for<T>(a.part[0] - at) +
                    b.part[1] * cuda::exp_for<T>(b.part[0] - at)}};
  }
  template <int kRow>
  static __device__ State<2> gather(State<2> all, Rooms& room) {
    const float m = row_max<kRow>(all.part[0], room[0]);
    const float mine = all.part[1] * cuda::exp_for<T>(all.part[0] - reference(m));
    return {{m, row_sum<kRow>(mine, room[1])}};
  }
};

// How many, their mean, Σ (x − mean)². A few at a time have their own mean, so nothing cancels; joined with
// d = the difference of the means and w = the second's share of both: mean + d·w, squares + d²·n·w.
template <class T>
struct Moments {
  static constexpr int kParts = 3;
  __device__ Moments(const T*, std::int64_t) {}
  static __device__ State<3> start() { return {{0, 0, 0}}; }
  template <int kN>
  __device__ void take(State<3>& all, const float (&v)[kN]) const {
    float mean = v[0];
#pragma unroll
    for (int i = 1; i < kN; ++i) mean += v[i];
    mean *= 1.0F / kN;
    float squares = 0;
#pragma unroll
    for (const float x : v) squares = fmaf(x - mean, x - mean, squares);
    all = join(all, {{kN, mean, squares}});
  }
  static __device__ State<3> join(State<3> a, State<3> b) {
    if (a.part[0] == 0) return b;  // also where d overflows
    const float n = a.part[0] + b.part[0];
    const float w = n > 0 ? __fdividef(b.part[0], n) : 0;
    const float d = b.part[1] - a.part[1];
    return {{n, fmaf(d, w, a.part[1]), fmaf(d * (a.part[0] * w), d, a.part[2] + b.part[2])}};
  }
  template <int kRow>
  static __device__ State<3> gather(State<3> all, Rooms& room) {
    const float n = row_sum<kRow>(all.part[0], room[0]);
    const float sum = row_sum<kRow>(all.part[0] * all.part[1], room[1]);
    const float mean = n > 0 ? sum / n : 0;
    const float d = all.part[1] - mean;
    return {{n, mean, row_sum<kRow>(fmaf(all.part[0] * d, d, all.part[2]), room[2])}};
  }
};

// ---- what becomes of each state ----

template <class T>
struct Divided {  // sum, mean, max, min, counts
  T* y;
  float divisor;
  __device__ void finish(State<1> all, std::int64_t i) const {
    y[i] = narrow<T>(all.part[0] / divisor);
  }
};
template <class T>
struct Logarithm {  // logsumexp
  T* y;
  float* m;
  float* s;
  __device__ void finish(State<2> all, std::int64_t i) const {
    m[i] = all.part[0];
    s[i] = all.part[1];
    y[i] = narrow<T>(isinf(all.part[0]) ? all.part[0] : all.part[0] + logf(all.part[1]));
  }
};
template <class T>
struct Variance {
  T* y;
  float* mean;
  float divisor;
  __device__ void finish(State<3> all, std::int64_t i) const {
    mean[i] = all.part[1];
    y[i] = narrow<T>(all.part[2] / divisor);
  }
};
struct Kept {  // of a chunk, for join_chunks: planes of stride numbers
  float* parts;
  std::int64_t stride;
  template <int kParts>
  __device__ void finish(State<kParts> all, std::int64_t i) const {
#pragma unroll
    for (int k = 0; k < kParts; ++k) parts[k * stride + i] = all.part[k];
  }
  template <int kParts>
  __device__ State<kParts> load(std::int64_t i) const {
    State<kParts> all;
#pragma unroll
    for (int k = 0; k < kParts; ++k) all.part[k] = parts[k * stride + i];
    return all;
  }
};

// How what meets in one result is cut: chunks of so many.
struct Cut {
  std::int64_t each, chunks;
};

// A thread's share of n neighbours: in packs where kPacks (then n is a number of whole ones), else one by one.
template <class Fold, int kRow, bool kPacks, class T>
__device__ __forceinline__ State<Fold::kParts> fold_share(const Fold& fold, const T* x,
                                                          std::int64_t n) {
  const int rank = threadIdx.x % kRow;
  State<Fold::kParts> all = Fold::start();
  if constexpr (kPacks) {
    constexpr int kUnroll = 4;
    const std::int64_t packs = n / kPack<T>;
    float v[kPack<T>];
    std::int64_t p = rank;
    for (; p + (kUnroll - 1) * kRow < packs; p += kUnroll * kRow) {
      cuda::Pack<T> pack[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        pack[u] = cuda::load_pack_shared(x + (p + u * kRow) * kPack<T>);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        cuda::unpack(pack[u], v);
        fold.take(all, v);
      }
    }
    for (; p < packs; p += kRow) {
      cuda::unpack(cuda::load_pack_shared(x + p * kPack<T>), v);
      fold.take(all, v);
    }
  } else {
    for (std::int64_t i = rank; i < n; i += kRow) {
      const float v[1] = {widen(x[i])};
      fold.take(all, v);
    }
  }
  return all;
}

template <class T, class Fold, class Finish, int kRow, bool kPacks>
__global__ void __launch_bounds__(kThreads)
    fold_rows(ReduceArgs args, Cut cut, const T* x, const T* about, Finish to) {
  __shared__ Rooms room;
  cuda::wait_turn();
  const std::int64_t item = std::int64_t{blockIdx.x} * (kThreads / kRow) + threadIdx.x / kRow;
  std::int64_t chunk = 0;
  const std::int64_t row = cuda::divide(item, cut.chunks, chunk);
  const bool in = row < args.outer;
  const std::int64_t first = chunk * cut.each;
  const std::int64_t n = in ? min(cut.each, args.count - first) : 0;
  const Fold fold(about, in ? row : 0);
  auto all = fold_share<Fold, kRow, kPacks>(fold, x + row * args.count + first, n);
  all = Fold::template gather<kRow>(all, room);
  if (in && threadIdx.x % kRow == 0) to.finish(all, item);
}

// Four neighbours, read at once where kTogether, else kColumns = 1.
template <class T>
struct Four {
  unsigned word[sizeof(T)];
};
template <class T>
__device__ __forceinline__ Four<T> load_four(const T* p) {
  if constexpr (sizeof(T) == 4) {
    const cuda::Pack<T> pack = cuda::load_pack(p);
    return {{pack.word[0], pack.word[1], pack.word[2], pack.word[3]}};
  } else {
    Four<T> four;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(four.word[0]), "=r"(four.word[1])
                 : "l"(p));
    return four;
  }
}
template <class T>
__device__ __forceinline__ float part_of(const Four<T>& four, int i) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(four.word[i]);
  } else {
    T v;
    v.bits = static_cast<std::uint16_t>(four.word[i / 2] >> (i % 2 * 16));
    return widen(v);
  }
}

// kColumns neighbours a lane, 4 or 1; a block's warps share a chunk of the rows of one tile of columns.
template <class T, class Fold, class Finish, int kColumns>
__global__ void __launch_bounds__(kThreads, kResident)
    fold_columns(ReduceArgs args, Cut cut, std::int64_t tiles, const T* x, const T* about,
                 Finish to) {
  using Partial = State<Fold::kParts>;
  __shared__ float room[kWarps][kColumns][Fold::kParts][kWarp];
  cut.chunks > 1 ? cuda::hold_next_wait_turn() : cuda::wait_turn();
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  std::int64_t tile = 0, chunk = 0;
  const std::int64_t outer = cuda::divide(cuda::divide(blockIdx.x, tiles, tile), cut.chunks, chunk);
  const std::int64_t column = (tile * kWarp + lane) * kColumns;
  const bool in = column < args.inner;
  const std::int64_t end = min((chunk + 1) * cut.each, args.count);
  Partial all[kColumns];
#pragma unroll
  for (Partial& each : all) each = Fold::start();
  if (in) {
    const T* from = x + outer * args.count * args.inner + column;
    const std::int64_t result = outer * args.inner + column;
    constexpr int kUnroll = Fold::kParts == 1 ? 8 : 4;
    std::int64_t r = chunk * cut.each + warp;
    if constexpr (kColumns > 1) {
      for (; r + (kUnroll - 1) * kWarps < end; r += kUnroll * kWarps) {
        Four<T> four[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) four[u] = load_four(from + (r + u * kWarps) * args.inner);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          float v[kUnroll];
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) v[u] = part_of(four[u], i);
          Fold(about, result + i).take(all[i], v);
        }
      }
    }
    for (; r < end; r += kWarps) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const float v[1] = {widen(from[r * args.inner + i])};
        Fold(about, result + i).take(all[i], v);
      }
    }
  }
  if (cut.chunks > 1) cuda::next_may_start();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
#pragma unroll
    for (int k = 0; k < Fold::kParts; ++k) room[warp][i][k][lane] = all[i].part[k];
  }
  __syncthreads();
  if (warp >= kColumns || !in) return;
  const int i = warp;
  const auto of = [&](int w) {
    Partial part;
#pragma unroll
    for (int k = 0; k < Fold::kParts; ++k) part.part[k] = room[w][i][k][lane];
    return part;
  };
  Partial sum = of(0);
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum = Fold::join(sum, of(w));
  to.finish(sum, (outer * cut.chunks + chunk) * args.inner + column + i);
}

// The states [outer, chunks, inner] of chunks. lanes: results of a block, a power of two; its other threads
// share the chunks of these.
template <class Fold, class Finish>
__global__ void __launch_bounds__(kThreads)
    join_chunks(ReduceArgs args, std::int64_t chunks, int lanes, Kept parts, Finish to) {
  __shared__ State<Fold::kParts> room[kThreads];
  cuda::wait_turn();
  const int lane = threadIdx.x & (lanes - 1);
  const int share = threadIdx.x / lanes;
  const int shares = kThreads / lanes;
  const std::int64_t i = std::int64_t{blockIdx.x} * lanes + lane;
  const bool in = i < args.outer * args.inner;
  std::int64_t inner = 0;
  const std::int64_t outer = cuda::divide(i, args.inner, inner);
  auto all = Fold::start();
  for (std::int64_t c = share; in && c < chunks; c += shares) {
    all = Fold::join(all,
                     parts.template load<Fold::kParts>((outer * chunks + c) * args.inner + inner));
  }
  room[threadIdx.x] = all;
  for (int half = shares / 2; half > 0; half /= 2) {
    __syncthreads();
    if (share < half) {
      room[threadIdx.x] = Fold::join(room[threadIdx.x], room[threadIdx.x + half * lanes]);
    }
  }
  if (share == 0 && in) to.finish(room[lane], i);
}

// ---- launch ----

std::int64_t results(const ReduceArgs& args) { return args.outer * args.inner; }

bool is_short(const ReduceArgs& args) { return args.count <= 1024; }

// Enough chunks that every multiprocessor has its blocks, and no more: all run side by side, to the end. But of a
// row, small blocks that come and go hide each other's waiting better (sum of 64 MB: 20 us, not 25), each of as many
// elements as its threads have under way at once, four packs of eight; not of logsumexp, which computes more than it
// waits.
// Columns a lane has at most, in the widest form: the cut must not depend on addresses.
Cut cut_of(const ReduceArgs& args, int parts) {
  constexpr std::int64_t kAtOnce = std::int64_t{kResident} * cuda::kMultiprocessors;
  const bool row = args.inner == 1;
  const bool small = row && parts != 2;
  const std::int64_t most = small ? 4096 : kAtOnce;
  const std::int64_t least = small ? 32 * kThreads : row ? 16384 : 64;  // worth a block of its own
  const std::int64_t step = small ? least : 8;                          // whole packs
  const std::int64_t count = std::max<std::int64_t>(args.count, 1);
  const std::int64_t side_by_side =
      row ? args.outer : args.outer * cuda::blocks_for(args.inner, 4 * kWarp);
  std::int64_t chunks =
      std::min(most / std::max<std::int64_t>(side_by_side, 1), cuda::blocks_for(count, least));
  chunks = std::max<std::int64_t>(chunks, 1);
  const std::int64_t each = cuda::blocks_for(cuda::blocks_for(count, chunks), step) * step;
  return {each, cuda::blocks_for(count, each)};
}

std::size_t parts_bytes(const ReduceArgs& args, int parts) {
  const Cut cut = cut_of(args, parts);
  return cut.chunks == 1 ? 0 : static_cast<std::size_t>(parts * results(args) * cut.chunks) * 4;
}
template <int kParts>
std::size_t workspace(const void* args) {
  return parts_bytes(*static_cast<const ReduceArgs*>(args), kParts);
}

template <class T>
bool rows_in_packs(const ReduceArgs& args, const T* x) {
  return args.count % kPack<T> == 0 && cuda::is_aligned(x);
}

template <class Fold, class T, class Finish>
void fold_chunks(const ReduceArgs& args, const Cut& cut, const T* x, const T* about,
                 const Finish& to, cudaStream_t stream) {
  if (args.inner != 1) {
    const bool together = args.inner % 4 == 0 && cuda::is_aligned(x);
    const std::int64_t tiles = cuda::blocks_for(args.inner, (together ? 4 : 1) * kWarp);
    const auto kernel =
        together ? fold_columns<T, Fold, Finish, 4> : fold_columns<T, Fold, Finish, 1>;
    return cuda::launch(kernel, args.outer * cut.chunks * tiles, kThreads, 0, 1, stream, args, cut,
                        tiles, x, about, to);
  }
  const bool packs = rows_in_packs(args, x);
  const std::int64_t items = args.outer * cut.chunks;
  if (is_short(args)) {
    const auto kernel =
        packs ? fold_rows<T, Fold, Finish, kWarp, true> : fold_rows<T, Fold, Finish, kWarp, false>;
    return cuda::launch(kernel, cuda::blocks_for(items, kWarps), kThreads, 0, 1, stream, args, cut,
                        x, about, to);
  }
  const auto kernel = packs ? fold_rows<T, Fold, Finish, kThreads, true>
                            : fold_rows<T, Fold, Finish, kThreads, false>;
  cuda::launch(kernel, items, kThreads, 0, 1, stream, args, cut, x, about, to);
}

// scratch: workspace<Fold::kParts>.
template <class Fold, class T, class Finish>
void fold(const ReduceArgs& args, void* scratch, const T* x, const T* about, const Finish& to,
          cudaStream_t stream) {
  const Cut cut = cut_of(args, Fold::kParts);
  if (cut.chunks == 1) return fold_chunks<Fold>(args, cut, x, about, to, stream);
  const Kept parts{static_cast<float*>(scratch), results(args) * cut.chunks};
  fold_chunks<Fold>(args, cut, x, about, parts, stream);
  constexpr std::int64_t kEach = 4;  // chunks of a thread; 8 results are a sector of memory
  int lanes = kWarp;
  while (lanes > (args.inner == 1 ? 1 : 8) && kThreads / lanes * kEach < cut.chunks) lanes /= 2;
  cuda::launch(join_chunks<Fold, Finish>, cuda::blocks_for(results(args), lanes), kThreads, 0, 1,
               stream, args, cut.chunks, lanes, parts, to);
}

template <class T, template <class> class Fold>
void once_fwd(const KernelCall& call) {  // sum, mean, max, min
  const auto& args = call.as<ReduceArgs>();
  const Divided<T> to{call.output<T>(0), static_cast<float>(args.divisor)};
  fold<Fold<T>, T>(args, call.workspace, call.input<T>(0), nullptr, to,
                   static_cast<cudaStream_t>(call.queue));
}

template <class T>
void logsumexp_fwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  float* m = call.output<float>(1);  // [outer, inner]
  float* s = m + results(args);      // [outer, inner]
  fold<SumExp<T>, T>(args, call.workspace, call.input<T>(0), nullptr,
                     Logarithm<T>{call.output<T>(0), m, s}, static_cast<cudaStream_t>(call.queue));
}

template <class T>
void var_fwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const Variance<T> to{call.output<T>(0), call.output<float>(1), static_cast<float>(args.divisor)};
  fold<Moments<T>, T>(args, call.workspace, call.input<T>(0), nullptr, to,
                      static_cast<cudaStream_t>(call.queue));
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

// Scratch: the counts, then their chunks.
std::size_t extreme_workspace(const void* args) {
  const auto& a = *static_cast<const ReduceArgs*>(args);
  return static_cast<std::size_t>(results(a)) * sizeof(float) + parts_bytes(a, 1);
}
template <class T>
void extreme_bwd(const KernelCall& call) {  // dy, x, y
  const auto& args = call.as<ReduceArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const T* x = call.input<T>(1);
  const T* y = call.input<T>(2);
  auto* count = static_cast<float*>(call.workspace);  // [outer, inner]
  fold<CountEqual<T>>(args, count + results(args), x, y, Divided<float>{count, 1}, stream);
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
  add("sum_fwd_", once_fwd<T, Sum>, workspace<1>);
  add("max_fwd_", once_fwd<T, Max>, workspace<1>);
  add("min_fwd_", once_fwd<T, Min>, workspace<1>);
  add("logsumexp_fwd_", logsumexp_fwd<T>, workspace<2>);
  add("var_fwd_", var_fwd<T>, workspace<3>);
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
