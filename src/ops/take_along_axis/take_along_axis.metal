// Metal kernels of take_along_axis (formula and layout: mlxtape/ops/take_along_axis.h).
//
// Forward: a thread an element of y, 256 a group. Bound by the lines of x that are read.
//
// Backward: dx is cut into pieces that one simdgroup makes in threadgroup memory, in f32, and writes once; each piece looks
// at every index that may fall into it. By terms: a piece is up to 1024 columns of one row; the lanes are terms, of those
// that meet in one place the first adds all, in order. By width: a piece is up to 32 columns of 32 neighbours in dx; each
// lane has its own sums and goes through the terms alone. Few pieces with many terms are also cut along the terms; the
// parts' sums go to scratch memory and a second kernel adds them in order. Four simdgroups a group, 16 KB of threadgroup
// memory, some 30 registers a thread. Bound by writing dx while the indices are few.
#include "take_along_axis_args.h"

// How dx is cut, by the shape alone.
struct TakeAlongAxisPieces {
  int64_t size;          // elements of dx
  int64_t terms;         // of one element's sum
  int64_t cols, slices;  // of the axis indexed
  int64_t tiles;         // of the axis of neighbours: by width 32 of them, else one
  int64_t rows;          // of the axes kept
  int64_t parts;         // of the terms
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/index.h"
#include "backends/metal/device/partials.h"
#include "backends/metal/device/places.h"

constant uint index_type [[function_constant(0)]];
constant bool by_width [[function_constant(1)]];
constant bool to_parts [[function_constant(2)]];
constant bool in_fours
    [[function_constant(3)]];  // pieces by terms are whole fours, next to each other

// ---- forward ----

// T: as wide as the elements, whatever they mean.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void take_along_axis_fwd(
    device const T* x [[buffer(0)]], device const uchar* indices [[buffer(1)]],
    device T* y [[buffer(2)]], constant TakeAlongAxisArgs& args [[buffer(3)]],
    constant int64_t& size [[buffer(4)]], constant uint& first_group [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]]) {
  const long i = (long(group) + first_group) * 256 + index;
  if (i >= size) return;
  long rest = i, from = 0, at = 0;
  for (uint d = uint(args.rank); d-- > 0;) {
    long p = rest;
    if (d > 0) rest = divide(rest, args.n[d], p);
    from += p * args.x[d];
    at += p * args.index[d];
  }
  const ulong place = place_of(indices, index_type, at, args.length);
  T v = T(0);
  if (place < ulong(args.length)) v = x[from + long(place) * args.axis_stride];
  y[i] = v;
}

// ---- backward ----

// What a simdgroup does: where its first element of dx, its dy and its indices are.
struct Piece {
  long dx, dy, index;
  long first, end;  // of its terms
  long low;         // its first column
  uint cols;
  uint width;  // by width: neighbours
};

inline Piece piece_of(constant TakeAlongAxisBackwardArgs& args,
                      constant TakeAlongAxisPieces& pieces, long number) {
  Piece piece;
  long slice = 0, tile = 0, row = 0;
  long rest = divide(divide(number, pieces.slices, slice), pieces.tiles, tile);
  const long part = divide(rest, pieces.rows, row);
  const bool exists = part < pieces.parts;
  piece.low = slice * pieces.cols;
  piece.cols = exists ? uint(min(pieces.cols, args.length - piece.low)) : 0;
  const long w = tile * (by_width ? 32 : 1);
  piece.width = uint(min(32l, long(args.width) - w));
  piece.first = exists ? pieces.terms * part / pieces.parts : 0;
  piece.end = exists ? pieces.terms * (part + 1) / pieces.parts : 0;
  piece.dx = part * pieces.size + w + piece.low * args.axis_stride;
  piece.dy = w * args.width_dy;
  piece.index = w * args.width_index;
  for (uint d = uint(args.rank); d-- > 0;) {
    long at = row;
    if (d > 0) row = divide(row, args.n[d], at);
    piece.dx += at * args.dx[d];
    piece.dy += at * args.dy[d];
    piece.index += at * args.index[d];
  }
  return piece;
}

// Where a term of a piece is, from the piece's own place.
struct Offset {
  long dy, index;
};
inline Offset offset_of(constant TakeAlongAxisBackwardArgs& args, long term) {
  Offset at;
  at.dy = 0;
  at.index = 0;
  long rest = term;
  for (uint e = uint(args.sum_rank); e-- > 0;) {
    long q = rest;
    if (e > 0) rest = divide(rest, args.sum_n[e], q);
    at.dy += q * args.sum_dy[e];
    at.index += q * args.sum_index[e];
  }
  return at;
}

enum { kRoom = 1024 };  // sums of a piece
constant uint kNowhere = 0xffffffffu;

// The column of a piece that the index at a place names, or kNowhere.
inline uint column_named(constant TakeAlongAxisBackwardArgs& args, Piece piece,
                         device const uchar* indices, long at) {
  const ulong place = place_of(indices, index_type, at, args.length);
  const ulong c = place - ulong(piece.low);
  return place < ulong(args.length) && c < piece.cols ? uint(c) : kNowhere;
}

template <typename T>
inline void add_by_terms(device const T* dy, device const uchar* indices, device T* dx,
                         device float* parts, constant TakeAlongAxisBackwardArgs& args, Piece piece,
                         threadgroup float* sums, uint lane) {
  for (uint c = lane; c < piece.cols; c += 32) sums[c] = 0;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (long t = piece.first; t < piece.end; t += 32) {
    uint column = kNowhere;
    float v = 0;
    if (t + lane < piece.end) {
      const Offset at = offset_of(args, t + lane);
      column = column_named(args, piece, indices, piece.index + at.index);
      if (column != kNowhere) v = widen(dy[piece.dy + at.dy]);
    }
    const bool is_named = column != kNowhere;
    uint named = uint(simd_vote::vote_t(simd_ballot(is_named)));
    if (named == 0) continue;
    float sum = is_named ? sums[column] : 0.0f;
    bool is_first = is_named;
    for (; named != 0; named &= named - 1) {
      const uint j = ctz(named);
      const bool same = simd_shuffle(column, ushort(j)) == column;
      const float term = simd_shuffle(v, ushort(j));
      if (same && j < lane) is_first = false;
      if (same) sum += term;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // all have read
    if (is_first) sums[column] = sum;
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (to_parts) {
    for (uint c = lane; c < piece.cols; c += 32) parts[piece.dx + c * args.axis_stride] = sums[c];
  } else if (in_fours) {
    for (uint c = 4 * lane; c < piece.cols; c += 128) {
      store_four(float4(sums[c], sums[c + 1], sums[c + 2], sums[c + 3]), dx + piece.dx + c);
    }
  } else {
    for (uint c = lane; c < piece.cols; c += 32) {
      dx[piece.dx + c * args.axis_stride] = narrow<T>(sums[c]);
    }
  }
}

template <typename T>
inline void add_by_width(device const T* dy, device const uchar* indices, device T* dx,
                         device float* parts, constant TakeAlongAxisBackwardArgs& args, Piece piece,
                         threadgroup float* sums, uint lane) {
  if (lane >= piece.width) return;
  for (uint c = 0; c < piece.cols; ++c) sums[c * 32 + lane] = 0;
  for (long t = piece.first; t < piece.end; ++t) {
    const Offset at = offset_of(args, t);
    const uint c =
        column_named(args, piece, indices, piece.index + lane * args.width_index + at.index);
    if (c != kNowhere) {
      sums[c * 32 + lane] += widen(dy[piece.dy + lane * args.width_dy + at.dy]);
    }
  }
  for (uint c = 0; c < piece.cols; ++c) {
    const long to = piece.dx + lane + c * args.axis_stride;
    if (to_parts) {
      parts[to] = sums[c * 32 + lane];
    } else {
      dx[to] = narrow<T>(sums[c * 32 + lane]);
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void take_along_axis_bwd(
    device const T* dy [[buffer(0)]], device const uchar* indices [[buffer(1)]],
    device T* dx [[buffer(2)]], device float* parts [[buffer(3)]],
    constant TakeAlongAxisBackwardArgs& args [[buffer(4)]],
    constant TakeAlongAxisPieces& pieces [[buffer(5)]], constant uint& first_group [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float room[4 * kRoom];
  const Piece piece = piece_of(args, pieces, (long(group) + first_group) * 4 + simd);
  threadgroup float* sums = room + simd * kRoom;
  if (by_width) {
    add_by_width(dy, indices, dx, parts, args, piece, sums, lane);
  } else {
    add_by_terms(dy, indices, dx, parts, args, piece, sums, lane);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void take_along_axis_sum(
    device const float* parts [[buffer(0)]], device T* dx [[buffer(1)]],
    constant uint& count [[buffer(2)]], constant uint& columns [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float room[8 * 32];
  sum_partials(parts, count, columns, dx, room, group, lane, simd);
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
#define MAKE_BOTH(type, T)                                  \
  MAKE("take_along_axis_bwd_" type, take_along_axis_bwd<T>) \
  MAKE("take_along_axis_sum_" type, take_along_axis_sum<T>)
MAKE("take_along_axis_fwd_u8", take_along_axis_fwd<uchar>)
MAKE("take_along_axis_fwd_u16", take_along_axis_fwd<ushort>)
MAKE("take_along_axis_fwd_u32", take_along_axis_fwd<uint>)
MAKE("take_along_axis_fwd_u64", take_along_axis_fwd<ulong>)
MAKE_BOTH("f32", float)
MAKE_BOTH("f16", half)
MAKE_BOTH("bf16", bf16)

#else

#include <algorithm>
#include <string>

#include "backends/metal/device/types.h"
#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

static_assert(static_cast<int>(DType::kU8) == kStoredU8 &&
                  static_cast<int>(DType::kU64) == kStoredU64 &&
                  static_cast<int>(DType::kI8) == kStoredI8 &&
                  static_cast<int>(DType::kI64) == kStoredI64,
              "the kernels read a DType's number");

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kAdders = 4;      // simdgroups of a group of the backward
constexpr std::int64_t kRoom = 1024;     // sums of a piece
constexpr std::int64_t kWide = 8;        // neighbours from which on they are the lanes
constexpr std::int64_t kEnough = 1024;   // simdgroups below which pieces are cut along their terms
constexpr std::int64_t kFewTerms = 256;  // but not into parts of fewer than these
constexpr std::int64_t kMostParts = 64;
constexpr double kByTerms = 60;  // operations of a piece for each term that it looks at
constexpr double kByWidth = 640;

bool is_by_width(const TakeAlongAxisBackwardArgs& args) { return args.width >= kWide; }

std::int64_t simdgroups_of(const TakeAlongAxisPieces& p) {
  return p.slices * p.tiles * p.rows * p.parts;
}

TakeAlongAxisPieces pieces_of(const TakeAlongAxisBackwardArgs& args) {
  TakeAlongAxisPieces p{};
  p.rows = p.terms = p.parts = 1;
  for (std::int64_t d = 0; d < args.rank; ++d) p.rows *= args.n[d];
  for (std::int64_t e = 0; e < args.sum_rank; ++e) p.terms *= args.sum_n[e];
  p.size = p.rows * args.width * args.length;
  const bool by_width = is_by_width(args);
  p.tiles = by_width ? ceil_div(args.width, metal::kSimd) : args.width;
  p.cols = std::min(args.length, by_width ? kRoom / metal::kSimd : kRoom);
  p.slices = ceil_div(args.length, p.cols);
  const std::int64_t worth = std::min(p.terms / kFewTerms, kEnough / simdgroups_of(p));
  p.parts = std::clamp<std::int64_t>(worth, 1, kMostParts);
  return p;
}

template <class T>
void forward(const KernelCall& call) {
  const auto& args = call.as<TakeAlongAxisArgs>();
  std::int64_t size = 1;
  for (std::int64_t d = 0; d < args.rank; ++d) size *= args.n[d];
  Launch(call, metal::kernel<T>("take_along_axis_fwd"))
      .constant(0, static_cast<std::uint32_t>(args.index_type))
      .input(0, call.in[0])
      .input(1, call.in[1])
      .output(2, call.out[0])
      .bytes(3, args)
      .bytes(4, size)
      .in_parts()
      .groups(ceil_div(size, kThreads))
      .threads(kThreads)
      .run();
}

std::size_t backward_workspace(const void* args) {
  const auto p = pieces_of(*static_cast<const TakeAlongAxisBackwardArgs*>(args));
  return p.parts == 1 ? 0 : static_cast<std::size_t>(p.parts * p.size) * sizeof(float);
}

template <class T>
void backward(const KernelCall& call) {
  const auto& args = call.as<TakeAlongAxisBackwardArgs>();
  const TakeAlongAxisPieces p = pieces_of(args);
  const bool is_cut = p.parts > 1;
  const bool by_width = is_by_width(args);
  bool in_fours = args.axis_stride == 1 && args.width == 1 && args.length % 4 == 0 &&
                  metal::is_aligned(call.out[0]);
  for (std::int64_t d = 0; d < args.rank; ++d) in_fours = in_fours && args.dx[d] % 4 == 0;
  Launch(call, metal::kernel<T>("take_along_axis_bwd"))
      .constant(0, static_cast<std::uint32_t>(args.index_type))
      .constant(1, by_width)
      .constant(2, is_cut)
      .constant(3, in_fours)
      .input(0, call.in[0])
      .input(1, call.in[1])
      .output(2, is_cut ? nullptr : call.out[0])
      .output(3, is_cut ? call.workspace : nullptr)
      .bytes(4, args)
      .bytes(5, p)
      .in_parts()
      .operations(static_cast<double>(p.slices * p.tiles * p.rows) * static_cast<double>(p.terms) *
                  (by_width ? kByWidth : kByTerms))
      .groups(ceil_div(simdgroups_of(p), kAdders))
      .threads(kAdders * metal::kSimd)
      .run();
  if (!is_cut) return;
  Launch(call, metal::kernel<T>("take_along_axis_sum"))
      .input(0, call.workspace)
      .output(1, call.out[0])
      .bytes(2, static_cast<std::uint32_t>(p.parts))
      .bytes(3, static_cast<std::uint32_t>(p.size))
      .groups(ceil_div(p.size, metal::kSimd))
      .threads(kThreads)
      .run();
}

template <class T>
void add_forward(KernelRegistry& registry) {
  registry.add(Backend::kMetal, std::string("take_along_axis_fwd_") + name_of(kDType<T>),
               forward<T>);
}
template <class T>
void add_backward(KernelRegistry& registry) {
  registry.add(Backend::kMetal, std::string("take_along_axis_bwd_") + name_of(kDType<T>),
               backward<T>, backward_workspace);
}

}  // namespace

void register_take_along_axis_metal(KernelRegistry& registry) {
  add_forward<std::uint8_t>(registry);
  add_forward<std::uint16_t>(registry);
  add_forward<std::uint32_t>(registry);
  add_forward<std::uint64_t>(registry);
  add_backward<float>(registry);
  add_backward<F16>(registry);
  add_backward<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
