// Metal kernels of matmul (formula and layout: mlxtape/ops/matmul.h).
//
// Products of more than 8 rows and columns: a group has a tile of 64 x 64 results, or of 32 x 32 where that would make few
// groups (backends/metal/device/tiles.h); what follows a product is done from its registers. Bound by arithmetic.
//
// Up to 8 rows or columns: the long matrix is read once and bounds the time. Where it is contiguous along the depth, a
// simdgroup has four of its rows, and its lanes go along them a pack at a time: 4 to 32 sums, 32 numbers of the matrix and 8 of
// the short one a thread, about 90 registers. Where it is contiguous across, a lane has four neighbours, and the eight
// simdgroups of a group share the depth: 4 to 32 sums, and 4 KB of threadgroup memory in which they meet, a row at a time.
//
// Where either makes few groups and the depth is long, it is cut, by the shape alone; parts are added in order by a kernel of
// its own, which then does what follows. The short form and that kernel use 128 and 256 threads a group, tiles 128.
#include "matmul_args.h"

// Tiles of a batch of products, and how the depth is cut.
struct MatmulPlan {
  int64_t tiles, col_tiles;  // of one product
  int64_t splits, depth;     // parts, and how long they are
  int64_t total;             // numbers of all results: where the next part's begin
};
// A short matrix [few, k] and a long one [many, k], or [k, many].
struct MatmulFew {
  int64_t few, many;
  int64_t few_row, few_col;  // strides of the short one
  int64_t step;              // of the long one; the other stride is 1
  int64_t to_few, to_many;   // strides of the result
  int64_t splits, depth, total;
};
// Rows of dz, in parts.
struct MatmulColumnParts {
  int64_t each;
};
// What follows a product.
enum : uint32_t {
  kMatmulAddsBias = 1,
  kMatmulAddsResidual = 2,
  kMatmulKeepsZ = 4,
  kMatmulAddsY = 8
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/exp.h"
#include "backends/metal/device/partials.h"
#include "backends/metal/device/tiles.h"

constant uint follows [[function_constant(0)]];
constant int activation [[function_constant(1)]];
constant bool a_turned [[function_constant(2)]];
constant bool b_turned [[function_constant(3)]];
constant bool a_packs [[function_constant(4)]];   // or those of the short matrix
constant bool b_packs [[function_constant(5)]];   // or those of the long one
constant bool few_rows [[function_constant(6)]];  // a is the short one, else b

// ---- activations ----

constant constexpr float kGeluInner = 0.7978845608028654f;  // sqrt(2/pi)
constant constexpr float kGeluCubic = 0.044715f;

// The normal distribution, without a difference where it is small: erfc by a rational variable and a polynomial in the
// exponent, within 3e-7 of its value.
inline float normal_share(float z) {
  const float x = fabs(z) * 0.70710678f;
  const float t = 1.0f / fma(0.5f, x, 1.0f);
  float p = 0.17087277f;
  p = fma(p, t, -0.82215223f);
  p = fma(p, t, 1.48851587f);
  p = fma(p, t, -1.13520398f);
  p = fma(p, t, 0.27886807f);
  p = fma(p, t, -0.18628806f);
  p = fma(p, t, 0.09678418f);
  p = fma(p, t, 0.37409196f);
  p = fma(p, t, 1.00002368f);
  p = fma(p, t, -1.26551223f);
  const float half_share = 0.5f * t * precise::exp(fma(-x, x, p));
  return z < 0 ? half_share : 1.0f - half_share;
}

inline float gelu_tanh_inner(float z) {  // 2 sqrt(2/pi) (z + 0.044715 z^3)
  return 2 * kGeluInner * z * fma(z * z, kGeluCubic, 1.0f);
}

template <typename O>
inline float activate(float z) {
  if (activation == kMatmulSilu) return z * sigmoid<O>(z).value;
  if (activation == kMatmulGelu) return z * normal_share(z);
  if (activation == kMatmulGeluTanh) return z * sigmoid<O>(gelu_tanh_inner(z)).value;
  return z;
}

// The activation's slope at z; beyond 110 it is 0 or 1 to the last bit, and products of z would overflow.
template <typename O>
inline float slope(float z) {
  if (z > 110.0f) z = 110.0f;
  if (z < -110.0f) z = -110.0f;
  if (activation == kMatmulSilu) {
    const Sigmoid s = sigmoid<O>(z);
    return s.value * fma(z, s.rest, 1.0f);
  }
  if (activation == kMatmulGelu) {
    return fma(z, 0.3989422804f * exp_for<O>(-0.5f * z * z), normal_share(z));
  }
  if (activation == kMatmulGeluTanh) {
    const Sigmoid s = sigmoid<O>(gelu_tanh_inner(z));
    const float rate = 2 * kGeluInner * fma(z * z, 3 * kGeluCubic, 1.0f);
    return s.value * fma(z * s.rest, rate, 1.0f);
  }
  return 1;
}

// ---- what follows a product ----

// Everything a sum meets on its way to y.
template <typename T, typename O>
struct Finish {
  device const T* bias;      // [n]
  device const O* residual;  // like y
  device O* y;
  device O* z;  // like y
  float beta;
};
template <typename T, typename O>
inline void finish(thread const Finish<T, O>& to, float v, long at, uint column) {
  if (follows & kMatmulAddsBias) v += widen(to.bias[column]);
  if (follows & kMatmulKeepsZ) to.z[at] = narrow<O>(v);
  v = activate<O>(v);
  if (follows & kMatmulAddsResidual) v += widen(to.residual[at]);
  if (follows & kMatmulAddsY) v = fma(to.beta, widen(to.y[at]), v);
  to.y[at] = narrow<O>(v);
}

#define MATMUL_TENSORS                                                        \
  device const T *bias [[buffer(2)]], device const O *residual [[buffer(3)]], \
      device O *y [[buffer(4)]], device O *z [[buffer(5)]],                   \
      constant MatmulArgs &args [[buffer(6)]]
#define MATMUL_PLACE                                                                          \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],     \
      uint index [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
      uint simd [[simdgroup_index_in_threadgroup]]

// Where the matrices of a product in a batch begin.
struct Starts {
  long a, b;
};
inline Starts starts_of(constant MatmulArgs& args, long batch) {
  Starts at;
  at.a = 0;
  at.b = 0;
  for (int i = int(args.batch_axes) - 1; i >= 0; --i) {
    const long here = batch % args.batch[i];
    batch /= args.batch[i];
    at.a += here * args.a_batch[i];
    at.b += here * args.b_batch[i];
  }
  return at;
}

// ---- tiles ----

template <typename T, typename O, int kTile>
[[kernel, max_total_threads_per_threadgroup(128)]] void matmul_tiles(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], MATMUL_TENSORS,
    constant MatmulPlan& plan [[buffer(7)]], MATMUL_PLACE) {
  threadgroup uint4 room_a[TileRoom<T, kTile>::kPacks], room_b[TileRoom<T, kTile>::kPacks];
  const long whole = long(group) + first_group;
  const long split = whole % plan.splits, rest = whole / plan.splits;
  const long batch = rest / plan.tiles, tile = rest % plan.tiles;
  const long row = tile / plan.col_tiles * kTile, col = tile % plan.col_tiles * kTile;
  const long k = split * plan.depth;
  const Starts at = starts_of(args, batch);
  Factor<PlainRows<T>> left, right;
  left.from.first = a + at.a + row * args.a_row + k * args.a_col;
  left.from.step = a_turned ? args.a_col : args.a_row;
  left.outer = uint(min(long(kTile), args.m - row));
  left.turned = a_turned;
  left.packs = a_packs;
  right.from.first = b + at.b + k * args.b_row + col * args.b_col;
  right.from.step = b_turned ? args.b_row : args.b_col;
  right.outer = uint(min(long(kTile), args.n - col));
  right.turned = b_turned;
  right.packs = b_packs;
  TileSums<kTile> sums;
  clear(sums);
  add_product(left, right, uint(min(plan.depth, args.k - k)), (threadgroup T*)room_a,
              (threadgroup T*)room_b, sums, index, lane, simd);

  Finish<T, O> to;
  to.bias = bias;
  to.residual = residual;
  to.y = y;
  to.z = z;
  to.beta = args.beta;
  const uint r0 = tile_row<kTile>(lane, simd), c0 = tile_col<kTile>(lane, simd);
  const long start = split * plan.total + (batch * args.m + row) * args.n + col;
  for (int i = 0; i < TileSums<kTile>::kCount; ++i) {
    for (int j = 0; j < TileSums<kTile>::kCount; ++j) {
      for (int e = 0; e < 2; ++e) {
        const uint r = r0 + 8 * i, c = c0 + 8 * j + e;
        if (r >= left.outer || c >= right.outer) continue;
        finish(to, sums.v[i][j].thread_elements()[e], start + r * args.n + c, uint(col) + c);
      }
    }
  }
}

// ---- few rows or columns ----

// A pack's worth of numbers that are `step` apart; there: how many of them are.
template <typename T>
inline void load_some(device const T* p, long step, bool whole, uint there, thread float* v) {
  if (whole && there >= uint(Pack<T>::kCount)) {
    Pack<T>::unpack(load_pack(p), v);
    return;
  }
  for (uint i = 0; i < uint(Pack<T>::kCount); ++i) v[i] = i < there ? widen(p[i * step]) : 0.0f;
}

// What a group of the short form has.
struct FewPart {
  long split, batch, block;
  uint first, end;  // of the depth
};
inline FewPart few_part(constant MatmulArgs& args, constant MatmulFew& few, long group, long each) {
  const long blocks = (few.many + each - 1) / each;
  FewPart part;
  part.split = group % few.splits;
  part.batch = group / few.splits / blocks;
  part.block = group / few.splits % blocks;
  part.first = uint(part.split * few.depth);
  part.end = uint(min(args.k, (part.split + 1) * few.depth));
  return part;
}
template <typename T, typename O>
inline void finish_few(thread const Finish<T, O>& to, constant MatmulArgs& args,
                       constant MatmulFew& few, thread const FewPart& part, uint f, uint j,
                       float v) {
  if (f >= few.few || j >= few.many) return;
  const long start = part.split * few.total + part.batch * args.m * args.n;
  finish(to, v, start + f * few.to_few + j * few.to_many, few_rows ? j : f);
}

template <typename T, typename O, int kFew>
[[kernel, max_total_threads_per_threadgroup(128)]] void matmul_dots(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], MATMUL_TENSORS,
    constant MatmulFew& few [[buffer(7)]], MATMUL_PLACE) {
  enum { kCount = Pack<T>::kCount, kRows = 4 };
  const FewPart part = few_part(args, few, long(group) + first_group, 4 * kRows);
  const Starts at = starts_of(args, part.batch);
  device const T* shorts = few_rows ? a + at.a : b + at.b;
  device const T* longs = few_rows ? b + at.b : a + at.a;
  const uint first = uint(part.block) * (4 * kRows) + simd * kRows;
  float sum[kRows][kFew];
  for (int r = 0; r < kRows; ++r) {
    for (int f = 0; f < kFew; ++f) sum[r][f] = 0;
  }
  for (uint k = part.first + lane * kCount; k < part.end; k += 32 * kCount) {
    const uint there = part.end - k;
    float u[kRows][kCount], v[kCount];
    for (int r = 0; r < kRows; ++r) {
      const uint j = min(first + r, uint(few.many) - 1);  // who is past the end does it again
      load_some(longs + j * few.step + k, 1, b_packs, there, u[r]);
    }
    for (int f = 0; f < kFew; ++f) {
      const uint row = uint(f) < few.few ? f : 0;
      load_some(shorts + row * few.few_row + k * few.few_col, few.few_col, a_packs, there, v);
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kCount; ++i) sum[r][f] = fma(u[r][i], v[i], sum[r][f]);
      }
    }
  }
  float mine = 0;
  for (int r = 0; r < kRows; ++r) {
    for (int f = 0; f < kFew; ++f) {
      const float v = simd_sum(sum[r][f]);
      if (lane == uint(r * kFew + f)) mine = v;
    }
  }
  Finish<T, O> to;
  to.bias = bias;
  to.residual = residual;
  to.y = y;
  to.z = z;
  to.beta = args.beta;
  if (lane < uint(kRows * kFew)) {
    finish_few(to, args, few, part, lane % kFew, first + lane / kFew, mine);
  }
}

template <typename T, typename O, int kFew>
[[kernel, max_total_threads_per_threadgroup(256)]] void matmul_columns(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], MATMUL_TENSORS,
    constant MatmulFew& few [[buffer(7)]], MATMUL_PLACE) {
  enum { kColumns = 128, kShares = 8 };
  threadgroup float room[kShares * kColumns];
  const FewPart part = few_part(args, few, long(group) + first_group, kColumns);
  const Starts at = starts_of(args, part.batch);
  device const T* shorts = few_rows ? a + at.a : b + at.b;
  device const T* longs = few_rows ? b + at.b : a + at.a;
  const uint first = uint(part.block) * kColumns, mine = first + lane * 4;
  float4 sum[kFew];
  for (int f = 0; f < kFew; ++f) sum[f] = float4(0.0f);
  for (uint k = part.first + simd; k < part.end; k += kShares) {
    device const T* row = longs + k * few.step + mine;
    float4 v = float4(0.0f);
    if (b_packs && mine + 4 <= few.many) {
      v = load_four(row);
    } else {
      for (int i = 0; i < 4; ++i) {
        if (mine + i < few.many) v[i] = widen(row[i]);
      }
    }
    for (int f = 0; f < kFew; ++f) {
      const uint which = uint(f) < few.few ? f : 0;
      const float w = widen(shorts[which * few.few_row + k * few.few_col]);
      for (int i = 0; i < 4; ++i) sum[f][i] = fma(v[i], w, sum[f][i]);
    }
  }
  Finish<T, O> to;
  to.bias = bias;
  to.residual = residual;
  to.y = y;
  to.z = z;
  to.beta = args.beta;
  for (int f = 0; f < kFew; ++f) {
    for (int i = 0; i < 4; ++i) room[simd * kColumns + lane * 4 + i] = sum[f][i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index < uint(kColumns)) {
      float total = 0;
      for (uint s = 0; s < uint(kShares); ++s) total += room[s * kColumns + index];
      finish_few(to, args, few, part, f, first + index, total);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// ---- the depth in parts ----

// parts: [splits, total]
template <typename T, typename O>
[[kernel, max_total_threads_per_threadgroup(256)]] void matmul_join(
    device const float* parts [[buffer(0)]], MATMUL_TENSORS,
    constant MatmulPlan& plan [[buffer(7)]], MATMUL_PLACE) {
  const long at = (long(group) + first_group) * 256 + index;
  if (at >= plan.total) return;
  float sum = 0;
  for (uint s = 0; s < uint(plan.splits); ++s) sum += parts[s * plan.total + at];
  Finish<T, O> to;
  to.bias = bias;
  to.residual = residual;
  to.y = y;
  to.z = z;
  to.beta = args.beta;
  finish(to, sum, at, uint(at % args.n));
}

// ---- gradients of what is not a product ----

template <typename T, typename O>
[[kernel, max_total_threads_per_threadgroup(256)]] void matmul_dz(
    device const O* dy [[buffer(0)]], device const O* z [[buffer(1)]], device T* dz [[buffer(2)]],
    constant MatmulDzArgs& args [[buffer(3)]], MATMUL_PLACE) {
  enum { kCount = Pack<T>::kCount };
  const long at = ((long(group) + first_group) * 256 + index) * kCount;
  if (at >= args.count) return;
  if (!a_packs || at + kCount > args.count) {
    for (long i = at; i < min(at + kCount, args.count); ++i) {
      const float v = widen(dy[i]);
      dz[i] = narrow<T>(activation == kMatmulNone ? v : v * slope<O>(widen(z[i])));
    }
    return;
  }
  for (int i = 0; i < kCount; i += 4) {
    float4 v = load_four(dy + at + i);
    if (activation != kMatmulNone) {
      const float4 u = load_four(z + at + i);
      for (int j = 0; j < 4; ++j) v[j] *= slope<O>(u[j]);
    }
    store_four(v, dz + at + i);
  }
}

// Sums of columns: a group has 128 of them, four to a lane, and a part of the rows, which its eight simdgroups share.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void matmul_bias_parts(
    device const T* dz [[buffer(0)]], device float* parts [[buffer(1)]],
    constant MatmulBiasArgs& args [[buffer(2)]], constant MatmulColumnParts& part [[buffer(3)]],
    MATMUL_PLACE) {
  threadgroup float room[8 * 128];
  const long blocks = (args.n + 127) / 128, whole = long(group) + first_group;
  const long first = whole / blocks * part.each, end = min(first + part.each, args.rows);
  const long column = whole % blocks * 128, mine = column + lane * 4;
  float4 sum = float4(0.0f);
  for (long r = first + simd; r < end; r += 8) {
    device const T* row = dz + r * args.n + mine;
    if (a_packs && mine + 4 <= args.n) {
      sum += load_four(row);
    } else {
      for (int i = 0; i < 4; ++i) {
        if (mine + i < args.n) sum[i] += widen(row[i]);
      }
    }
  }
  for (int i = 0; i < 4; ++i) room[simd * 128 + lane * 4 + i] = sum[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index >= 128 || column + index >= args.n) return;
  float total = 0;
  for (uint s = 0; s < 8; ++s) total += room[s * 128 + index];
  parts[whole / blocks * args.n + column + index] = total;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void matmul_bias_sum(
    device const float* parts [[buffer(0)]], device T* db [[buffer(1)]],
    constant uint& count [[buffer(2)]], constant uint& n [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float room[8 * 32];
  sum_partials(parts, count, n, db, room, group, lane, simd);
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_PAIR(type, T, O)                           \
  MAKE("matmul_tiles64" type, matmul_tiles<T, O, 64>)   \
  MAKE("matmul_tiles32" type, matmul_tiles<T, O, 32>)   \
  MAKE("matmul_dots1" type, matmul_dots<T, O, 1>)       \
  MAKE("matmul_dots4" type, matmul_dots<T, O, 4>)       \
  MAKE("matmul_dots8" type, matmul_dots<T, O, 8>)       \
  MAKE("matmul_columns1" type, matmul_columns<T, O, 1>) \
  MAKE("matmul_columns4" type, matmul_columns<T, O, 4>) \
  MAKE("matmul_columns8" type, matmul_columns<T, O, 8>) \
  MAKE("matmul_join" type, matmul_join<T, O>)           \
  MAKE("matmul_dz" type, matmul_dz<T, O>)
#define MAKE_TYPE(type, T)                             \
  MAKE("matmul_bias_parts" type, matmul_bias_parts<T>) \
  MAKE("matmul_bias_sum" type, matmul_bias_sum<T>)
MAKE_PAIR("_f32", float, float)
MAKE_PAIR("_f16", half, half)
MAKE_PAIR("_bf16", bf16, bf16)
MAKE_PAIR("_wide_f16", half, float)
MAKE_PAIR("_wide_bf16", bf16, float)
MAKE_TYPE("_f32", float)
MAKE_TYPE("_f16", half)
MAKE_TYPE("_bf16", bf16)

#else

#include <algorithm>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kFew = 8;          // rows or columns that are not worth a tile
constexpr std::int64_t kFewGroups = 32;   // that leave most of a GPU idle
constexpr std::int64_t kMostGroups = 64;  // to which cutting the depth may lead
constexpr std::int64_t kShortestPart = 512;
constexpr std::int64_t kDotRows = 16;  // rows or columns of the long matrix that a group has
constexpr std::int64_t kColumns = 128;

// ---- how the work is cut, by the shape alone ----

enum class Way { kTiles, kDots, kColumns };

struct Plan {
  Way way = Way::kTiles;
  bool few_rows = false;
  std::int64_t batches = 1;
  std::int64_t tile = 64;
  std::int64_t groups = 1;  // without splits
  std::int64_t splits = 1, depth = 0;

  explicit Plan(const MatmulArgs& args);
  std::int64_t total(const MatmulArgs& args) const { return batches * args.m * args.n; }
};

Plan::Plan(const MatmulArgs& args) {
  for (std::int64_t i = 0; i < args.batch_axes; ++i) batches *= args.batch[i];
  const std::int64_t few = std::min(args.m, args.n), many = std::max(args.m, args.n);
  if (few <= kFew) {
    few_rows = args.m <= args.n;
    const bool along = few_rows ? args.b_row == 1 : args.a_col == 1;
    way = along ? Way::kDots : Way::kColumns;
    groups = batches * ceil_div(many, along ? kDotRows : kColumns);
  } else {
    const auto tiles = [&](std::int64_t side) {
      return batches * ceil_div(args.m, side) * ceil_div(args.n, side);
    };
    tile = few > 32 && tiles(64) >= kFewGroups ? 64 : 32;
    groups = tiles(tile);
  }
  if (groups < kFewGroups && args.k >= 2 * kShortestPart) {
    splits = std::clamp<std::int64_t>(args.k / kShortestPart, 1, kMostGroups / groups);
  }
  depth = splits == 1 ? args.k : ceil_div(ceil_div(args.k, splits), 64) * 64;  // whole packs
  splits = depth == 0 ? 1 : ceil_div(args.k, depth);
}

std::size_t workspace(const void* opaque) {
  const auto& args = *static_cast<const MatmulArgs*>(opaque);
  const Plan plan(args);
  return plan.splits == 1
             ? 0
             : static_cast<std::size_t>(plan.splits * plan.total(args)) * sizeof(float);
}

// Do all rows of a factor begin at multiples of 16 bytes?
bool in_packs(const void* p, std::int64_t rows, std::int64_t step, const std::int64_t* batch,
              std::int64_t axes, std::size_t size) {
  const auto is_whole = [&](std::int64_t n) {
    return n * static_cast<std::int64_t>(size) % 16 == 0;
  };
  return metal::is_aligned(p) && (rows <= 1 || is_whole(step)) &&
         std::all_of(batch, batch + axes, is_whole);
}

// ---- forward ----

// The names of a kind of kernel, for results of the type of a and for f32.
struct Names {
  const char *same, *wide;
  const char* of(bool is_wide) const { return is_wide ? wide : same; }
};
constexpr Names kTiles64{"matmul_tiles64", "matmul_tiles64_wide"};
constexpr Names kTiles32{"matmul_tiles32", "matmul_tiles32_wide"};
constexpr Names kDots[] = {{"matmul_dots1", "matmul_dots1_wide"},
                           {"matmul_dots4", "matmul_dots4_wide"},
                           {"matmul_dots8", "matmul_dots8_wide"}};
constexpr Names kAcross[] = {{"matmul_columns1", "matmul_columns1_wide"},
                             {"matmul_columns4", "matmul_columns4_wide"},
                             {"matmul_columns8", "matmul_columns8_wide"}};
constexpr Names kJoin{"matmul_join", "matmul_join_wide"};
constexpr Names kDz{"matmul_dz", "matmul_dz_wide"};

const Names& kernels_of(const MatmulArgs& args, const Plan& plan) {
  if (plan.way == Way::kTiles) return plan.tile == 64 ? kTiles64 : kTiles32;
  const std::int64_t few = std::min(args.m, args.n);
  return (plan.way == Way::kDots ? kDots : kAcross)[few == 1 ? 0 : few <= 4 ? 1 : 2];
}

std::uint32_t follows_of(const MatmulArgs& args, const KernelCall& call) {
  std::uint32_t all = 0;
  if (call.in[2] != nullptr) all |= kMatmulAddsBias;
  if (call.in[3] != nullptr) all |= kMatmulAddsResidual;
  if (call.out[1] != nullptr) all |= kMatmulKeepsZ;
  if (args.beta != 0) all |= kMatmulAddsY;
  return all;
}

// What follows is done by this launch, or by a later one, for which it leaves sums in f32 in the workspace.
void bind_result(Launch& launch, const KernelCall& call, bool last) {
  const auto& args = call.as<MatmulArgs>();
  launch.constant(0, last ? follows_of(args, call) : 0U)
      .constant(1, last ? args.activation : std::int32_t{kMatmulNone})
      .input(2, last ? call.in[2] : nullptr)
      .input(3, last ? call.in[3] : nullptr)
      .output(4, last ? call.out[0] : call.workspace)
      .output(5, last ? call.out[1] : nullptr)
      .bytes(6, args);
}

template <class T>
void product(const KernelCall& call, const Plan& plan) {
  const auto& args = call.as<MatmulArgs>();
  const bool last = plan.splits == 1, is_wide = sizeof(T) == 2 && (!last || args.wide != 0);
  const bool a_turned = args.a_col != 1, b_turned = args.b_col == 1;
  const void* a = args.k == 0 ? nullptr : call.in[0];
  const void* b = args.k == 0 ? nullptr : call.in[1];
  const auto a_packs = [&](std::int64_t rows, std::int64_t step) {
    return in_packs(a, rows, step, args.a_batch, args.batch_axes, sizeof(T));
  };
  const auto b_packs = [&](std::int64_t rows, std::int64_t step) {
    return in_packs(b, rows, step, args.b_batch, args.batch_axes, sizeof(T));
  };
  Launch launch(call, metal::kernel<T>(kernels_of(args, plan).of(is_wide)));
  bind_result(launch, call, last);
  launch.input(0, a).input(1, b);
  std::int64_t threads = 128;
  if (plan.way == Way::kTiles) {
    const std::int64_t across = ceil_div(args.n, plan.tile);
    launch.constant(2, a_turned)
        .constant(3, b_turned)
        .constant(4, a_turned ? a_packs(args.k, args.a_col) : a_packs(args.m, args.a_row))
        .constant(5, b_turned ? b_packs(args.k, args.b_row) : b_packs(args.n, args.b_col));
    launch.bytes(7, MatmulPlan{ceil_div(args.m, plan.tile) * across, across, plan.splits,
                               plan.depth, plan.total(args)});
  } else {
    const bool rows = plan.few_rows, along = plan.way == Way::kDots;
    MatmulFew few{std::min(args.m, args.n),
                  std::max(args.m, args.n),
                  rows ? args.a_row : args.b_col,
                  rows ? args.a_col : args.b_row,
                  0,
                  rows ? args.n : 1,
                  rows ? 1 : args.n,
                  plan.splits,
                  plan.depth,
                  plan.total(args)};
    few.step = rows ? (along ? args.b_col : args.b_row) : along ? args.a_row : args.a_col;
    const std::int64_t long_rows = along ? few.many : args.k;
    launch
        .constant(4, few.few_col == 1 &&
                         (rows ? a_packs(few.few, few.few_row) : b_packs(few.few, few.few_row)))
        .constant(5, rows ? b_packs(long_rows, few.step) : a_packs(long_rows, few.step))
        .constant(6, rows);
    launch.bytes(7, few);
    if (!along) threads = 256;
  }
  launch.operations(2.0 * static_cast<double>(plan.total(args)) * static_cast<double>(args.k))
      .in_parts()
      .groups(plan.groups * plan.splits)
      .threads(threads)
      .run();
}

template <class T>
void join(const KernelCall& call, const Plan& plan) {
  const auto& args = call.as<MatmulArgs>();
  Launch launch(call, metal::kernel<T>(kJoin.of(sizeof(T) == 2 && args.wide != 0)));
  bind_result(launch, call, true);
  launch.input(0, call.workspace)
      .bytes(7, MatmulPlan{0, 0, plan.splits, plan.depth, plan.total(args)})
      .in_parts()
      .groups(ceil_div(plan.total(args), 256))
      .threads(256)
      .run();
}

template <class T>
void forward(const KernelCall& call) {
  const Plan plan(call.as<MatmulArgs>());
  product<T>(call, plan);
  if (plan.splits > 1) join<T>(call, plan);
}

// ---- backward ----

template <class T>
void dz(const KernelCall& call) {
  const auto& args = call.as<MatmulDzArgs>();
  const bool whole = metal::is_aligned(call.in[0]) && metal::is_aligned(call.in[1]) &&
                     metal::is_aligned(call.out[0]);
  constexpr std::int64_t kPack = 16 / sizeof(T);
  Launch(call, metal::kernel<T>(kDz.of(sizeof(T) == 2 && args.wide != 0)))
      .constant(1, args.activation)
      .constant(4, whole)
      .buffers()
      .in_parts()
      .groups(ceil_div(ceil_div(args.count, kPack), 256))
      .threads(256)
      .run();
}

std::int64_t row_parts(const MatmulBiasArgs& args) {
  return std::clamp<std::int64_t>(args.rows / 64, 1, 256);
}
std::size_t bias_workspace(const void* p) {
  const auto& args = *static_cast<const MatmulBiasArgs*>(p);
  return static_cast<std::size_t>(row_parts(args) * args.n) * sizeof(float);
}

template <class T>
void bias(const KernelCall& call) {
  const auto& args = call.as<MatmulBiasArgs>();
  const void* dz = args.rows == 0 ? nullptr : call.in[0];  // [rows, n]
  const std::int64_t parts = row_parts(args);
  const std::int64_t size = sizeof(T);
  Launch(call, metal::kernel<T>("matmul_bias_parts"))
      .constant(4, metal::is_aligned(dz) && args.n * size % 16 == 0)
      .input(0, dz)
      .output(1, call.workspace)
      .bytes(2, args)
      .bytes(3, MatmulColumnParts{ceil_div(args.rows, parts)})
      .in_parts()
      .groups(parts * ceil_div(args.n, kColumns))
      .threads(256)
      .run();
  Launch(call, metal::kernel<T>("matmul_bias_sum"))
      .input(0, call.workspace)
      .output(1, call.out[0])
      .bytes(2, static_cast<std::uint32_t>(parts))
      .bytes(3, static_cast<std::uint32_t>(args.n))
      .groups(ceil_div(args.n, metal::kSimd))
      .threads(256)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "matmul_fwd_" + type, forward<T>, workspace);
  registry.add(Backend::kMetal, "matmul_dz_bwd_" + type, dz<T>);
  registry.add(Backend::kMetal, "matmul_bias_bwd_" + type, bias<T>, bias_workspace);
}

}  // namespace

void register_matmul_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
