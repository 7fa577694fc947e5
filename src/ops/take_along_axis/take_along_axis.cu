// CUDA kernels of take_along_axis (formula and layout: mlxtape/ops/take_along_axis.h).
//
// Forward: a thread an element of y, four where there are many. Bound by the 32-byte sectors of x,
// for small y by the latency of one read after another.
//
// Backward: dx is cut into pieces that one warp makes in shared memory and writes once; bound by that
// writing while the indices are few. Each piece looks at every index that may fall into it. By rows:
// a piece is whole rows of dx that have up to 32 terms together, one a lane. By terms: a piece is
// columns of one row, in f32; the lanes are terms, and those that meet in one place take turns. By
// width: a piece is columns × 32 neighbours in dx, in f32; each lane has its own sums and goes
// through the terms alone. Few pieces with many terms are also cut along the terms; the parts' sums
// go to scratch memory and are added by a second kernel.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/partials.cuh"
#include "backends/cuda/device/scatter.cuh"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "take_along_axis_args.h"

namespace mlxtape::ops {

namespace {

using cuda::kWarp;
using cuda::narrow;
using cuda::widen;
using ForwardArgs = TakeAlongAxisArgs;
using BackwardArgs = TakeAlongAxisBackwardArgs;

constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();

// The place that an index names; not in [0, length) when it names none.
template <class I>
__device__ __forceinline__ std::uint64_t place_of(I index, std::int64_t length) {
  if constexpr (std::is_signed_v<I>) {
    return static_cast<std::uint64_t>(index < 0 ? index + length : std::int64_t{index});
  } else {
    return index;
  }
}

// body(a value of the C++ type), for the integer types that the host lets through.
template <class Body>
void with_index_type(std::int64_t type, const Body& body) {
  visit(static_cast<DType>(type), [&](auto zero) {
    using I = decltype(zero);
    if constexpr (std::is_integral_v<I> && !std::is_same_v<I, bool>) body(zero);
  });
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// ---- forward ----

constexpr int kTakers = 256;                     // threads of a block
constexpr std::int64_t kManyTaken = 132 * 8192;  // elements of y: four a resident thread

// N: wide enough for the number of an element of y.
template <class T, class I, class N, int kEach>
__global__ void __launch_bounds__(kTakers)
    take(__grid_constant__ const ForwardArgs a, N size, const T* x, const I* index, T* y) {
  cuda::wait_turn();
  const N first = static_cast<N>(blockIdx.x) * (kTakers * kEach) + threadIdx.x;
  std::int64_t from[kEach];
  std::uint64_t place[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    N rest = first + j * kTakers;
    place[j] = ~std::uint64_t{0};
    if (rest >= size) continue;
    std::int64_t at = 0;
    from[j] = 0;
    for (int d = static_cast<int>(a.rank) - 1; d > 0; --d) {
      const N n = static_cast<N>(a.n[d]);
      const N above = rest / n;
      const auto p = static_cast<std::int64_t>(rest - above * n);
      from[j] += p * a.x[d];
      at += p * a.index[d];
      rest = above;
    }
    from[j] += static_cast<std::int64_t>(rest) * a.x[0];
    at += static_cast<std::int64_t>(rest) * a.index[0];
    place[j] = place_of(index[at], a.length);
  }
  T v[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    v[j] = T{};
    if (place[j] < static_cast<std::uint64_t>(a.length)) {
      v[j] = x[from[j] + static_cast<std::int64_t>(place[j]) * a.axis_stride];
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const N i = first + j * kTakers;
    if (i < size) y[i] = v[j];
  }
}

template <class T>
void take_along_axis_fwd(const KernelCall& call) {
  const auto& a = call.as<ForwardArgs>();
  const T* x = call.input<T>(0);
  T* y = call.output<T>(0);
  const auto stream = static_cast<cudaStream_t>(call.queue);
  std::int64_t size = 1;
  for (std::int64_t d = 0; d < a.rank; ++d) size *= a.n[d];
  with_index_type(a.index_type, [&](auto zero) {
    using I = decltype(zero);
    const I* index = call.input<I>(1);
    const auto run = [&]<class N, int kEach>() {
      cuda::launch(take<T, I, N, kEach>, ceil_div(size, std::int64_t{kEach} * kTakers), kTakers, 0,
                   1, stream, a, static_cast<N>(size), x, index, y);
    };
    if (size >= std::int64_t{1} << 31) {
      run.template operator()<std::uint64_t, 4>();
    } else if (size >= kManyTaken) {
      run.template operator()<std::uint32_t, 4>();
    } else {
      run.template operator()<std::uint32_t, 1>();
    }
  });
}

// ---- backward ----

constexpr int kAdders = 4;                 // warps of a block
constexpr int kShort = 1024;               // sums of a piece: 50 warps on a multiprocessor
constexpr int kLong = 2944;                // and of one that looks at more than kManyTerms
constexpr std::int64_t kManyTerms = 2048;  // terms, which every piece of a row reads again
constexpr std::int64_t kWide = 8;          // neighbours from which on they are the lanes
constexpr std::int64_t kEnough = 2048;     // warps below which pieces are cut along their terms
constexpr std::int64_t kFewTerms = 256;    // but not into parts of fewer than these
constexpr std::int64_t kMostParts = 128;
constexpr std::int64_t kMostTogether = 1536;  // elements of a piece by rows: 3 rows of 512
static_assert(kAdders * cuda::room_for<float, F16>(kLong) * sizeof(float) <= 48 * 1024);

enum class Cut { kByRows, kByTerms, kByWidth };

// How dx is cut, by the shape alone.
struct Plan {
  Cut cut;
  std::int64_t size;          // elements of dx
  std::int64_t terms;         // of one element's sum
  std::int64_t cols, slices;  // of the axis indexed
  std::int64_t tiles;         // of the axis of neighbours: by width kWarp of them, else one
  std::int64_t rows;          // of the axes kept
  std::int64_t group;         // by rows: of a piece
  std::int64_t parts;         // of the terms
  std::int32_t room;          // elements of a warp

  std::int64_t warps() const { return slices * tiles * ceil_div(rows, group) * parts; }
};

Plan plan_of(const BackwardArgs& a) {
  Plan p{};
  p.rows = 1;
  p.terms = 1;
  for (std::int64_t d = 0; d < a.rank; ++d) p.rows *= a.n[d];
  for (std::int64_t e = 0; e < a.sum_rank; ++e) p.terms *= a.sum_n[e];
  p.size = p.rows * a.width * a.length;
  p.group = 1;
  p.parts = 1;
  if (a.width == 1 && a.rank == 1 && a.sum_rank == 1 && p.terms >= 1 && p.terms <= kWarp &&
      a.length <= kMostTogether) {
    p.cut = Cut::kByRows;
    p.cols = a.length;
    p.slices = p.tiles = 1;
    const std::int64_t fitting = std::min(kWarp / p.terms, kMostTogether / a.length);
    p.group = std::clamp<std::int64_t>(p.rows / kEnough, 1, fitting);
    p.room = static_cast<std::int32_t>(p.group * a.length);  // and what the alignment takes
    return p;
  }
  const bool by_width = a.width >= kWide;
  p.cut = by_width ? Cut::kByWidth : Cut::kByTerms;
  p.tiles = by_width ? ceil_div(a.width, kWarp) : a.width;
  const std::int64_t most = p.terms > kManyTerms ? kLong : kShort;
  p.cols = std::min(a.length, by_width ? most / kWarp : most);
  p.slices = ceil_div(a.length, p.cols);
  const std::int64_t worth = std::min(p.terms / kFewTerms, kEnough / p.warps());
  p.parts = std::clamp<std::int64_t>(worth, 1, kMostParts);
  const auto cols = static_cast<std::int32_t>(p.cols);
  p.room = by_width ? cols * kWarp : cuda::room_for<float, F16>(cols);
  return p;
}

// What a warp does: where its first element of dx, its dy and its indices are, counted in elements.
struct Piece {
  std::int64_t dx, dy, index;
  std::int64_t first, end;  // of its terms
  std::int64_t lo;          // its first column
  std::int32_t cols;
  std::int32_t width;  // by width: neighbours
};

// dx is where the sums go: with several parts, the part's own.
__device__ __forceinline__ Piece piece_of(const BackwardArgs& a, const Plan& p,
                                          std::int64_t number) {
  const auto take_off = [&number](std::int64_t n) {
    if (n == 1) return std::int64_t{0};
    const auto all = static_cast<std::uint64_t>(number);
    const std::uint64_t above = all / static_cast<std::uint64_t>(n);
    number = static_cast<std::int64_t>(above);
    return static_cast<std::int64_t>(all - above * static_cast<std::uint64_t>(n));
  };
  Piece piece;
  piece.lo = take_off(p.slices) * p.cols;
  piece.cols = static_cast<std::int32_t>(min(p.cols, a.length - piece.lo));
  const std::int64_t w = take_off(p.tiles) * (p.cut == Cut::kByWidth ? kWarp : 1);
  piece.width = static_cast<std::int32_t>(min(std::int64_t{kWarp}, a.width - w));
  const std::int64_t part = p.parts == 1 ? 0 : number / p.rows;
  number -= part * p.rows;
  piece.first = p.terms * part / p.parts;
  piece.end = p.terms * (part + 1) / p.parts;
  piece.dx = part * p.size + w + piece.lo * a.axis_stride;
  piece.dy = w * a.width_dy;
  piece.index = w * a.width_index;
  for (int d = static_cast<int>(a.rank) - 1; d >= 0; --d) {
    const std::int64_t at = d == 0 ? number : take_off(a.n[d]);
    piece.dx += at * a.dx[d];
    piece.dy += at * a.dy[d];
    piece.index += at * a.index[d];
  }
  return piece;
}

// Where a term of a piece is, from the piece's own place.
struct Offset {
  std::int64_t dy, index;
};
__device__ __forceinline__ Offset offset_of(const BackwardArgs& a, std::int64_t term) {
  Offset at{0, 0};
  auto rest = static_cast<std::uint64_t>(term);
  for (int e = static_cast<int>(a.sum_rank) - 1; e > 0; --e) {
    const auto n = static_cast<std::uint64_t>(a.sum_n[e]);
    const std::uint64_t above = rest / n;
    const auto q = static_cast<std::int64_t>(rest - above * n);
    at.dy += q * a.sum_dy[e];
    at.index += q * a.sum_index[e];
    rest = above;
  }
  at.dy += static_cast<std::int64_t>(rest) * a.sum_dy[0];
  at.index += static_cast<std::int64_t>(rest) * a.sum_index[0];
  return at;
}

struct Term {
  bool named;
  unsigned at;  // of the sums
  float v;
};

template <class T, class I>
__device__ __forceinline__ Term load_term(const BackwardArgs& a, const Piece& piece,
                                          std::int64_t number, const T* dy, const I* index) {
  Term term{false, 0, 0};
  if (number >= piece.end) return term;
  const Offset at = offset_of(a, number);
  term.v = widen(dy[piece.dy + at.dy]);
  const std::uint64_t place = place_of(index[piece.index + at.index], a.length);
  const std::uint64_t c = place - static_cast<std::uint64_t>(piece.lo);
  term.named = c < static_cast<std::uint64_t>(piece.cols);
  term.at = static_cast<unsigned>(c);
  return term;
}

template <class T, class I>
__global__ void __launch_bounds__(kAdders* kWarp)
    add_by_rows(__grid_constant__ const BackwardArgs a, __grid_constant__ const Plan p,
                cuda::LaneDivisor by_terms, const T* dy, const I* index, T* dx) {
  cuda::wait_turn();
  extern __shared__ float4 memory[];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const auto length = static_cast<int>(a.length);
  const int row = by_terms.divide(lane);
  const int term = lane - row * static_cast<int>(p.terms);
  T* room = reinterpret_cast<T*>(memory) + warp * cuda::room_for<T, T>(p.room);
  const std::int64_t first = (std::int64_t{blockIdx.x} * kAdders + warp) * p.group;
  if (first >= p.rows) return;
  const auto rows = static_cast<int>(min(p.group, p.rows - first));
  const bool in = row < rows;
  // Both on their way while the zeros are written.
  T v{};
  I named{};
  if (in) {
    v = dy[(first + row) * a.dy[0] + term * a.sum_dy[0]];
    named = index[(first + row) * a.index[0] + term * a.sum_index[0]];
  }
  T* out = dx + first * length;
  const int skew = cuda::skew_of(out);
  cuda::zero(room, skew + rows * length);
  const std::uint64_t place = place_of(named, a.length);
  cuda::place(room + skew, in && place < static_cast<std::uint64_t>(a.length),
              static_cast<unsigned>(row * length) + static_cast<unsigned>(place), widen(v));
  cuda::store_row(room, out, rows * length);
}

// Out: T, or float for the sums of one of several parts.
template <class T, class I, class Out>
__global__ void __launch_bounds__(kAdders* kWarp, 7)
    add_by_terms(__grid_constant__ const BackwardArgs a, __grid_constant__ const Plan p,
                 std::int64_t warps, const T* dy, const I* index, Out* dx) {
  cuda::wait_turn();
  extern __shared__ float4 memory[];
  const int lane = threadIdx.x % kWarp;
  float* room = reinterpret_cast<float*>(memory) + threadIdx.x / kWarp * p.room;
  const std::int64_t step = std::int64_t{gridDim.x} * kAdders;
  for (std::int64_t w = std::int64_t{blockIdx.x} * kAdders + threadIdx.x / kWarp; w < warps;
       w += step) {
    const Piece piece = piece_of(a, p, w);
    Term next = load_term(a, piece, piece.first + lane, dy, index);
    Out* out = dx + piece.dx;
    const int n = piece.cols;
    const int skew = a.axis_stride == 1 ? cuda::skew_of(out) : 0;
    float* sums = room + skew;
    __syncwarp();  // the piece before has been read
    cuda::zero(room, skew + n);
    __syncwarp();
    for (std::int64_t t = piece.first; t < piece.end; t += kWarp) {
      const Term term = next;
      next = load_term(a, piece, t + kWarp + lane, dy, index);
      cuda::add_in_order(sums, term.named, term.at, term.v);
    }
    if (a.axis_stride == 1) {
      cuda::store_row(room, out, n);
    } else {
      for (int c = lane; c < n; c += kWarp) out[c * a.axis_stride] = narrow<Out>(sums[c]);
    }
  }
}

template <class T, class I, class Out>
__global__ void __launch_bounds__(kAdders* kWarp)
    add_by_width(__grid_constant__ const BackwardArgs a, __grid_constant__ const Plan p,
                 std::int64_t warps, const T* dy, const I* index, Out* dx) {
  cuda::wait_turn();
  constexpr int kAhead = 4;  // terms that are read together
  extern __shared__ float4 memory[];
  const int lane = threadIdx.x % kWarp;
  // [cols, kWarp], a column of it for each lane: none sees another's.
  float* sums = reinterpret_cast<float*>(memory) + threadIdx.x / kWarp * p.room + lane;
  const std::int64_t step = std::int64_t{gridDim.x} * kAdders;
  for (std::int64_t w = std::int64_t{blockIdx.x} * kAdders + threadIdx.x / kWarp; w < warps;
       w += step) {
    const Piece piece = piece_of(a, p, w);
    if (lane >= piece.width) continue;
    const T* own_dy = dy + piece.dy + lane * a.width_dy;
    const I* own_index = index + piece.index + lane * a.width_index;
    for (int c = 0; c < piece.cols; ++c) sums[c * kWarp] = 0;
    for (std::int64_t t = piece.first; t < piece.end; t += kAhead) {
      Offset at[kAhead];
      std::uint64_t c[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        c[j] = ~std::uint64_t{0};
        if (t + j >= piece.end) continue;
        at[j] = offset_of(a, t + j);
        c[j] = place_of(own_index[at[j].index], a.length) - static_cast<std::uint64_t>(piece.lo);
      }
      float v[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (c[j] < static_cast<std::uint64_t>(piece.cols)) v[j] = widen(own_dy[at[j].dy]);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (c[j] < static_cast<std::uint64_t>(piece.cols)) sums[c[j] * kWarp] += v[j];
      }
    }
    Out* out = dx + piece.dx + lane;
    for (int c = 0; c < piece.cols; ++c) out[c * a.axis_stride] = narrow<Out>(sums[c * kWarp]);
  }
}

template <class T, class Out>
void add(const BackwardArgs& a, const Plan& p, const T* dy, const void* indices, Out* dx,
         cudaStream_t stream) {
  const std::int64_t warps = p.warps();
  const std::int64_t blocks = std::min(ceil_div(warps, kAdders), kMostBlocks);
  with_index_type(a.index_type, [&](auto zero) {
    using I = decltype(zero);
    const auto* index = static_cast<const I*>(indices);
    if constexpr (std::is_same_v<T, Out>) {
      if (p.cut == Cut::kByRows) {
        const int shared = kAdders * static_cast<int>(sizeof(T)) * cuda::room_for<T, T>(p.room);
        cuda::launch(add_by_rows<T, I>, ceil_div(warps, kAdders), kAdders * kWarp, shared, 1,
                     stream, a, p, cuda::LaneDivisor(p.terms), dy, index, dx);
        return;
      }
    }
    const auto kernel = p.cut == Cut::kByWidth ? add_by_width<T, I, Out> : add_by_terms<T, I, Out>;
    const int shared = kAdders * static_cast<int>(sizeof(float)) * p.room;
    cuda::launch(kernel, blocks, kAdders * kWarp, shared, 1, stream, a, p, warps, dy, index, dx);
  });
}

std::size_t backward_workspace(const void* args) {
  const Plan p = plan_of(*static_cast<const BackwardArgs*>(args));
  return p.parts == 1 ? 0 : static_cast<std::size_t>(p.parts * p.size) * sizeof(float);
}

template <class T>
void take_along_axis_bwd(const KernelCall& call) {
  const auto& a = call.as<BackwardArgs>();
  const T* dy = call.input<T>(0);
  const auto* index = call.input<void>(1);
  T* dx = call.output<T>(0);
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const Plan p = plan_of(a);
  if (p.parts == 1) return add(a, p, dy, index, dx, stream);
  auto* parts = static_cast<float*>(call.workspace);  // [parts, size]
  add(a, p, dy, index, parts, stream);
  cuda::sum_partials(parts, p.parts, p.size, dx, stream);
}

template <class T>
void add_forward(KernelRegistry& registry) {
  registry.add(Backend::kCuda, std::string("take_along_axis_fwd_") + name_of(kDType<T>),
               take_along_axis_fwd<T>);
}

template <class T>
void add_backward(KernelRegistry& registry) {
  registry.add(Backend::kCuda, std::string("take_along_axis_bwd_") + name_of(kDType<T>),
               take_along_axis_bwd<T>, backward_workspace);
}

}  // namespace

void register_take_along_axis_cuda(KernelRegistry& registry) {
  add_forward<std::uint8_t>(registry);
  add_forward<std::uint16_t>(registry);
  add_forward<std::uint32_t>(registry);
  add_forward<std::uint64_t>(registry);
  add_backward<float>(registry);
  add_backward<F16>(registry);
  add_backward<BF16>(registry);
}

}  // namespace mlxtape::ops
