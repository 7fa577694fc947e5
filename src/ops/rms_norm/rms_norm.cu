// CUDA kernels of rms_norm (formula and layout: mlxtape/ops/rms_norm.h).
//
// Rows of whole 16-byte packs are read once and kept in registers by the threads that share them: a part
// of a warp, a warp, a block, or a cluster of blocks.
//
// Forward: a group of threads has one row, and there are enough groups on a multiprocessor to keep its
// memory busy.
//
// Backward: groups stay and walk many rows, for dw of a thread's columns is summed in registers over all
// of them, then over the groups of a block, and a second kernel adds the blocks' sums in order. Rows of
// one warp are loaded a few at once; longer ones stream through shared memory, where enough of them are
// under way however few threads fit. w stays in registers.
//
// Other rows (ragged, misaligned, or too long) are walked twice, dw in a kernel of its own. All are
// bound by memory.
#include <cuda_runtime.h>

#include <algorithm>

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/partials.cuh"
#include "mlxtape/core/registry.h"
#include "rms_norm_rows.cuh"

namespace mlxtape::ops {

namespace {

using cuda::narrow;
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

// ---- forward ----

template <class T>
struct ForwardCall {
  const T* x;      // [R, D]
  const T* other;  // [R, D]: residual or g
  const void* w;   // [D]
  T* y;            // [R, D]
  T* h;            // [R, D]
  float* r;        // [R]
};

// Blocks that a multiprocessor has registers for: 40, 64 or 128 a thread.
template <Form kForm, class C>
constexpr int forward_blocks() {
  constexpr bool kMany = C::kPacks > 4 && kForm != Form::kPlain;
  return std::max(1, (C::kPacks <= 2 ? 1536 : kMany ? 512 : 1024) / C::kBlock);
}

template <class T, Form kForm, class C>
__global__ void __launch_bounds__(C::kBlock, forward_blocks<kForm, C>())
    forward_kept(RmsNormArgs args, ForwardCall<T> f) {
  cuda::wait_turn();
  extern __shared__ uint4 room[];
  const Waiting<C, kForm == Form::kGated> waiting{room};
  const Part<C> part(args.cols / kPack<T>);
  const std::int64_t row = C::index();
  const auto place = place_of<T>(args, part, row);
  const auto columns = place_of<T>(args, part, 0);
  const bool like_x = args.weight == kRmsNormWeightLikeX;
  Pack<T> pack[C::kPacks];
  Pack<T> residual[C::kPacks];
  Pack<T> weight[C::kPacks];
#pragma unroll
  for (int j = 0; j < C::kPacks; ++j) {
    pack[j] = place.get(f.x, j);
    if constexpr (kForm == Form::kResidual) residual[j] = place.get(f.other, j);
    if constexpr (kForm == Form::kGated) {
      cuda::fetch(waiting.gate(j), f.other + place.at + place.offset(j), place.has(j));
    }
    if constexpr (waiting.kWeights) {
      cuda::fetch_common(waiting.weight(j),
                         static_cast<const T*>(f.w) + columns.at + columns.offset(j),
                         like_x && columns.has(j));
    }
  }
  cuda::end_batch();
  if (!waiting.kWeights && like_x) {
#pragma unroll
    for (int j = 0; j < C::kPacks; ++j) {
      weight[j] = {};
      if (!columns.has(j)) continue;
      weight[j] =
          cuda::load_pack_shared(static_cast<const T*>(f.w) + columns.at + columns.offset(j));
    }
  }
  __shared__ Sums<C, 1> sums;
  if constexpr (C::kCluster > 1) {  // all are ready to be told, while the row is on its way
    if (threadIdx.x == 0) sums.init();
    cuda::cluster_sync();
  }

  float sum = 0;
  float v[kPack<T>];
  float u[kPack<T>];
#pragma unroll
  for (int j = 0; j < C::kPacks; ++j) {
    cuda::unpack(pack[j], v);
    if constexpr (kForm == Form::kResidual) {
      cuda::unpack(residual[j], u);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) v[i] += u[i];
      pack[j] = cuda::pack_of<T>(v);
      place.put(f.h, j, pack[j]);
      cuda::unpack(pack[j], v);  // as stored
    }
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) sum = fmaf(v[i], v[i], sum);
  }
  keep_packed(pack);
  if constexpr (C::kCluster > 1) {
    sum = sums.sum(sum, 0);
  } else {
    sum = RowThreads<C::kThreads>::sum(sum, sums.part[0][0]);
  }
  const float r = inverse_root(sum, 1 / args.divisor, args.eps);
  if (row < args.rows && part.first == 0 && C::rank() == 0) f.r[row] = r;
  cuda::wait_batches<0>();
#pragma unroll
  for (int j = 0; j < C::kPacks; ++j) {
    cuda::unpack(pack[j], v);
    if (like_x) {
      cuda::unpack(waiting.kWeights ? pack_at<T>(waiting.weight(j)) : weight[j], u);
    } else {
      load_weight(args, f.w, columns, j, u);
    }
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) v[i] = v[i] * r * u[i];
    if constexpr (kForm == Form::kGated) {
      cuda::unpack(pack_at<T>(waiting.gate(j)), u);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) v[i] *= cuda::silu<T>(u[i]);
    }
    place.put(f.y, j, cuda::pack_of<T>(v));
  }
}

// ---- backward ----

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

template <Form kForm>
constexpr int kBackwardArrays = kForm == Form::kPlain ? 2 : 3;

// A thread's packs of one row, from dy to dx.
template <class T, Form kForm, class C>
struct RowGradient {
  static constexpr bool kGated = kForm == Form::kGated;
  Pack<T> pack[kBackwardArrays<kForm>][C::kPacks];  // x, dy, and dh_in or g
  float through[kGated ? C::kPacks : 1][kPack<T>];  // dy·silu(g)

  // Returns their part of s, adds to dw, writes dg.
  __device__ float begin(const BackwardCall<T>& b, const Place<T, C>& place, float r,
                         Columns<T, C>& columns) {
    float x[kPack<T>], dy[kPack<T>], g[kPack<T>];
    float s = 0;
#pragma unroll
    for (int j = 0; j < C::kPacks; ++j) {
      cuda::unpack(pack[0][j], x);
      cuda::unpack(pack[1][j], dy);
      if constexpr (kGated) {
        cuda::unpack(pack[2][j], g);
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) {
          const auto [silu, slope] = cuda::silu_and_slope<T>(g[i]);
          g[i] = x[i] * r * columns.w[j][i] * (dy[i] * slope);
          dy[i] *= silu;
          through[j][i] = dy[i];
        }
        place.put(b.dg, j, cuda::pack_of<T>(g));
      }
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        const float term = x[i] * dy[i];
        s = fmaf(term, columns.w[j][i], s);
        columns.dw[j][i] = fmaf(term, r, columns.dw[j][i]);
      }
    }
    keep_packed(pack[0]);
    keep_packed(pack[1]);
    return s;
  }

  // s: of the whole row.
  __device__ void finish(const BackwardCall<T>& b, const Place<T, C>& place, float r, float s,
                         float share, const Columns<T, C>& columns) {
    const float back = pull(s, r, share);
    float x[kPack<T>], dy[kPack<T>], dh[kPack<T>];
#pragma unroll
    for (int j = 0; j < C::kPacks; ++j) {
      cuda::unpack(pack[0][j], x);
      cuda::unpack(pack[1][j], dy);
      if constexpr (kForm == Form::kResidual) cuda::unpack(pack[2][j], dh);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) {
        if constexpr (kGated) dy[i] = through[j][i];
        const float inner = fmaf(-x[i], back, dy[i] * columns.w[j][i]);
        x[i] = kForm == Form::kResidual ? fmaf(inner, r, dh[i]) : inner * r;
      }
      place.put(b.dx, j, cuda::pack_of<T>(x));
    }
  }
};

// Rows of one warp or a part of one, kAtOnce of each group at once, from memory to registers. Four at once
// take 0.5 us more for 16384 rows of 128 columns.
constexpr int kAtOnce = 2;

template <Form kForm, class C>
constexpr int loaded_blocks() {
  return kForm == Form::kPlain && C::kPacks == 1 ? 4 : 2;
}

template <class T, Form kForm, class C>
__global__ void __launch_bounds__(C::kBlock, loaded_blocks<kForm, C>())
    backward_loaded(RmsNormArgs args, BackwardCall<T> b) {
  cuda::hold_next_wait_turn();
  __shared__ __align__(16) float room[C::kGroups * C::kSlots * kPack<T>];
  const Part<C> part(args.cols / kPack<T>);
  const float share = 1 / args.divisor;
  Columns<T, C> columns(args, b.w, part);
  // A warp goes on while the first of its groups has a row.
  const std::int64_t before = C::group() % (kWarp / C::kThreads);
  for (std::int64_t row = C::index(); row - before < args.rows; row += kAtOnce * C::groups()) {
    RowGradient<T, kForm, C> gradient[kAtOnce];
    float r[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const auto place = place_of<T>(args, part, row + k * C::groups());
#pragma unroll
      for (int j = 0; j < C::kPacks; ++j) {
        gradient[k].pack[0][j] = place.get(b.x, j);
        gradient[k].pack[1][j] = place.get(b.dy, j);
        if constexpr (kForm != Form::kPlain) gradient[k].pack[2][j] = place.get(b.other, j);
      }
      r[k] = row + k * C::groups() < args.rows ? b.r[row + k * C::groups()] : 0;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const auto place = place_of<T>(args, part, row + k * C::groups());
      const float s = cuda::lanes_sum<C::kThreads>(gradient[k].begin(b, place, r[k], columns));
      gradient[k].finish(b, place, r[k], s, share, columns);
    }
  }
  cuda::next_may_start();
  if (args.weight != kRmsNormNoWeight) columns.leave_dw(args, part, room, b.parts);
}

template <class T, Form kForm, class C>
using BackwardStream = Stream<T, C, kBackwardArrays<kForm>>;

template <class T, Form kForm, class C>
__global__ void __launch_bounds__(C::kBlock, 1)
    backward_streamed(RmsNormArgs args, BackwardCall<T> b) {
  cuda::hold_next_wait_turn();
  using Rows = BackwardStream<T, kForm, C>;
  static_assert(C::kGroups * Columns<T, C>::kAll * sizeof(float) <= Rows::kBytes);
  extern __shared__ __align__(128) unsigned char slots[];
  __shared__ typename Rows::Shared shared;
  const T* in[kBackwardArrays<kForm>];
  in[0] = b.x;
  in[1] = b.dy;
  if constexpr (kForm != Form::kPlain) in[2] = b.other;
  Rows rows(args, in, slots, shared);
  const float share = 1 / args.divisor;
  Columns<T, C> columns(args, b.w, rows.part);
  float r_next = rows.more() ? b.r[rows.row] : 0;
  __syncthreads();
  if constexpr (C::kCluster > 1) cuda::cluster_sync();
  for (; rows.more(); rows.next()) {
    const float r = r_next;
    r_next = rows.row + C::groups() < args.rows ? b.r[rows.row + C::groups()] : 0;
    RowGradient<T, kForm, C> gradient;
    rows.take(gradient.pack);
    const float s = rows.sum(gradient.begin(b, rows.place, r, columns));
    gradient.finish(b, rows.place, r, s, share, columns);
  }
  cuda::next_may_start();
  if (args.weight == kRmsNormNoWeight) return;
  __syncthreads();  // no group needs its slots any more
  columns.leave_dw(args, rows.part, reinterpret_cast<float*>(slots), b.parts);
}

// ---- any row: walked twice ----

template <class T, Form kForm, int kThreads>
__global__ void __launch_bounds__(RowThreads<kThreads>::kBlock)
    forward_walked(RmsNormArgs args, ForwardCall<T> f) {
  cuda::wait_turn();
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
  const float r = inverse_root(Row::sum(sum, room), 1 / args.divisor, args.eps);
  if (Row::rank() == 0) f.r[Row::row()] = r;
  for (std::int64_t c = Row::rank(); c < args.cols; c += kThreads) {
    float v = widen(x[at + c]) * r * weight_at<T>(args, f.w, c);
    if constexpr (kForm == Form::kGated) v *= cuda::silu<T>(widen(f.other[at + c]));
    f.y[at + c] = narrow<T>(v);
  }
}

// dy, or dy·silu(g).
template <Form kForm, class T>
__device__ __forceinline__ float through_at(const BackwardCall<T>& b, std::int64_t i) {
  const float dy = widen(b.dy[i]);
  return kForm == Form::kGated ? dy * cuda::silu<T>(widen(b.other[i])) : dy;
}

template <class T, Form kForm, int kThreads>
__global__ void __launch_bounds__(RowThreads<kThreads>::kBlock)
    backward_walked(RmsNormArgs args, BackwardCall<T> b) {
  cuda::wait_turn();
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
  const float back = pull(Row::sum(s, room), r, 1 / args.divisor);
  for (std::int64_t c = Row::rank(); c < args.cols; c += kThreads) {
    const float x = widen(b.x[at + c]);
    const float w = weight_at<T>(args, b.w, c);
    const float inner = fmaf(-x, back, through_at<kForm>(b, at + c) * w);
    float dx = inner * r;
    if constexpr (kForm == Form::kResidual) dx = fmaf(inner, r, widen(b.other[at + c]));
    b.dx[at + c] = narrow<T>(dx);
    if constexpr (kForm == Form::kGated) {
      const float slope = cuda::silu_and_slope<T>(widen(b.other[at + c])).slope;
      b.dg[at + c] = narrow<T>(x * r * w * (widen(b.dy[at + c]) * slope));
    }
  }
}

constexpr int kShares = 8;  // warps that share the rows of 32 columns

// A block sums dw of 32 columns over one strip of rows.
template <class T, Form kForm>
__global__ void __launch_bounds__(kWarp* kShares)
    dw_walked(RmsNormArgs args, std::int64_t each, BackwardCall<T> b) {
  cuda::wait_turn();
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

// Two packs of a thread rather than four, four rather than eight; but one block of threads with eight
// rather than clusters with four: of 16 bits, 8192 columns reach 92 % of a copy's speed with two packs and
// 91 % with four, 32768 columns 91 % in one block and 88 % in clusters. The longest rows of two tensors
// have no room in the registers of one block.
template <Form kForm, class Body>
bool with_forward_cut(std::int64_t packs, const Body& body) {
  using Longest = std::conditional_t<kForm == Form::kPlain, Cut<1024, 8>, Cut<512, 8, 1, 2>>;
  return with_cut<Cut<16, 1, 16>, Cut<32, 1, 8>, Cut<32, 4, 4>, Cut<128, 2>, Cut<256, 2>,
                  Cut<512, 2>, Cut<512, 4>, Cut<512, 8>, Longest>(packs, body);
}

// Eight or sixteen elements of a thread, for w and dw take a register each for every one. Several groups
// in a block hide each other's exchange of sums: 16 bits of 8192 columns reach 92 % of a copy's speed
// with four groups in clusters, 86 % with a row a block; f32 of 32768 columns, with so many bytes under
// way that it does not matter, 93 % with one group.
template <class T, class Body>
bool with_backward_cut(std::int64_t packs, const Body& body) {
  constexpr int kEight = 8 / kPack<T>;
  return with_cut<Cut<16, 1, 16>, Cut<32, 1, 8>, Cut<32, 2, 8>, Cut<128, 1, 8>,
                  Cut<128, 2 * kEight, 4>, Cut<256, 2 * kEight, 2>, Cut<256, kEight, 4, 4>,
                  Cut<512, 2 * kEight, 1, 4>>(packs, body);
}

// Blocks or clusters that run at once. Clusters of 4 do not fill all parts of an H200: it runs 30.
template <Form kForm, class C>
constexpr std::int64_t backward_at_once() {
  if (C::kCluster == 4) return 30;
  return cuda::kMultiprocessors * (C::kOneWarp ? loaded_blocks<kForm, C>() : 1);
}

template <class... Pointers>
bool all_aligned(Pointers... pointers) {
  return (cuda::is_aligned(pointers) && ...);  // a null pointer is
}

constexpr std::int64_t kMostByWarp = 512;  // columns of a walked row that one warp shares
constexpr int kWalkers = 512;              // threads that share a longer one

template <int kThreads, class Call>
void launch_walked(void (*kernel)(RmsNormArgs, Call), const RmsNormArgs& args, const Call& call,
                   cudaStream_t stream) {
  using Row = RowThreads<kThreads>;
  cuda::launch(kernel, cuda::blocks_for(args.rows, Row::kRows), Row::kBlock, 0, 1, stream, args,
               call);
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
  if (args.cols % kPack<T> == 0 && all_aligned(f.x, f.other, f.w, f.y, f.h) &&
      with_forward_cut<kForm>(args.cols / kPack<T>, [&]<class C>(C) {
        constexpr int kBytes = Waiting < C, kForm == Form::kGated > ::kBytes;
        cuda::launch(forward_kept<T, kForm, C>,
                     cuda::blocks_for(args.rows, C::kGroups) * C::kCluster, C::kBlock, kBytes,
                     C::kCluster, stream, args, f);
      })) {
    return;
  }
  if (args.cols <= kMostByWarp) {
    launch_walked<kWarp>(forward_walked<T, kForm, kWarp>, args, f, stream);
  } else {
    launch_walked<kWalkers>(forward_walked<T, kForm, kWalkers>, args, f, stream);
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
  with_backward_cut<T>(args.cols / kPack<T>, [&]<class C>(C) {
    parts = blocks_of<C>(args.rows, backward_at_once<kForm, C>()) / C::kCluster;
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
  if (args.cols % kPack<T> == 0 && all_aligned(b.x, b.dy, b.other, b.w, b.dx, b.dg) &&
      with_backward_cut<T>(args.cols / kPack<T>, [&]<class C>(C) {
        const std::int64_t blocks = blocks_of<C>(args.rows, backward_at_once<kForm, C>());
        if constexpr (C::kOneWarp) {
          cuda::launch(backward_loaded<T, kForm, C>, blocks, C::kBlock, 0, 1, stream, args, b);
        } else {
          cuda::launch(backward_streamed<T, kForm, C>, blocks, C::kBlock,
                       BackwardStream<T, kForm, C>::kBytes, C::kCluster, stream, args, b);
        }
      })) {
    return kept_parts<kForm, T>(args);
  }
  if (args.cols <= kMostByWarp) {
    launch_walked<kWarp>(backward_walked<T, kForm, kWarp>, args, b, stream);
  } else {
    launch_walked<kWalkers>(backward_walked<T, kForm, kWalkers>, args, b, stream);
  }
  if (args.weight == kRmsNormNoWeight) return 0;
  const Strips strips = strips_of(args);
  cuda::launch(dw_walked<T, kForm>, {cuda::blocks_for(args.cols, kWarp), strips.count},
               kWarp * kShares, 0, 1, stream, args, strips.each, b);
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
