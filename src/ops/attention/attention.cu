// CUDA kernels of attention (formula: mlxtape/ops/attention.h).
//
// Forward: a block has 64 rows, queries of one head or, where queries are few, queries and heads that share keys,
// and goes over the keys that count, 64 at a time, with the softmax's maximum and sum so far. Few queries on many
// keys: the keys are cut into pieces, a block each, and the pieces are joined in order.
// Backward: one kernel for the rows' D, one whose blocks have 64 keys and go over the queries (dk, dv), and one
// whose blocks have 64 queries and go over the keys (dq): the products with the keys are made twice, so that nothing
// is added by two blocks. Products have the accuracy of f32 (products.cuh). Bound by arithmetic.
#include <algorithm>
#include <string>

#include "attention_args.h"
#include "attention_half.cuh"
#include "attention_places.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/products.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/base/checked.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / cuda::kWarp;
constexpr int kRows = 64;        // rows or keys that a block has
constexpr int kSide = 32;        // of the others at a time, going back
constexpr int kKeys = 64;        // keys at a time, forward
constexpr int kMostTiles = 16;   // of 8 columns: half of 256
constexpr int kFewRows = kRows;  // queries times heads of a group
constexpr std::int64_t kPiece = 512;

struct Sizes {
  int nd, nv;  // channels in whole units
  int pd, pv;  // from row to row
  __host__ __device__ explicit Sizes(const AttentionArgs& args)
      : nd((static_cast<int>(args.dim) + 15) / 16 * 16),
        nv((static_cast<int>(args.value_dim) + 15) / 16 * 16),
        pd(nd + 4),
        pv(nv + 4) {}
};

// ---- tiles ----

// `rows` rows as f32, times factor; row(i) is null where there is none.
template <class T, class Row>
__device__ __forceinline__ void load_rows(float* to, int pitch, int rows, int channels, int units,
                                          float factor, const Row& row) {
  for (int i = threadIdx.x / cuda::kWarp; i < rows; i += kWarps) {
    const T* from = row(i);
    for (int c = threadIdx.x % cuda::kWarp; c < units; c += cuda::kWarp) {
      to[i * pitch + c] = from != nullptr && c < channels ? factor * cuda::widen(from[c]) : 0;
    }
  }
}

// Sums in registers: 64 rows by up to 256 columns. A warp has 16 rows and every other tile of 8 columns.
struct Sums {
  float v[kMostTiles][4] = {};

  __device__ static int row() {
    return threadIdx.x / cuda::kWarp % 4 * 16 + threadIdx.x % cuda::kWarp / 4;
  }
  __device__ static int tile(int i) { return 2 * i + threadIdx.x / cuda::kWarp / 4; }

  // += a [64, depth] · b [depth, columns]; depth a multiple of 8.
  __device__ void add(cuda::Factor a, cuda::Factor b, int columns, int depth) {
    const int lane = threadIdx.x % cuda::kWarp, g = lane / 4, t = lane % 4;
    const float* left = a.at + row() * a.row + t * a.col;
    const float* right = b.at + t * b.row + g * b.col;
    for (int l = 0; l < depth; l += 8) {
      const cuda::Split a0(left[0]), a1(left[8 * a.row]), a2(left[4 * a.col]),
          a3(left[8 * a.row + 4 * a.col]);
      const unsigned high_a[4] = {a0.high, a1.high, a2.high, a3.high};
      const unsigned low_a[4] = {a0.low, a1.low, a2.low, a3.low};
#pragma unroll
      for (int i = 0; i < kMostTiles; ++i) {
        const int col = tile(i) * 8;
        if (col >= columns) break;
        const cuda::Split b0(right[col * b.col]), b1(right[col * b.col + 4 * b.row]);
        const unsigned high_b[2] = {b0.high, b1.high}, low_b[2] = {b0.low, b1.low};
        cuda::multiply_add(v[i], low_a, high_b);
        cuda::multiply_add(v[i], high_a, low_b);
        cuda::multiply_add(v[i], high_a, high_b);
      }
      left += 8 * a.col;
      right += 8 * b.row;
    }
  }
  // Row by row: of this thread's two rows the first or the second.
  __device__ void scale(float first, float second) {
#pragma unroll
    for (int i = 0; i < kMostTiles; ++i) {
      v[i][0] *= first;
      v[i][1] *= first;
      v[i][2] *= second;
      v[i][3] *= second;
    }
  }
  // fn(row, column, value) for each sum.
  template <class Fn>
  __device__ void each(int columns, const Fn& fn) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kMostTiles; ++i) {
      const int col = tile(i) * 8 + 2 * t;
      if (tile(i) * 8 >= columns) break;
      fn(row(), col, v[i][0]);
      fn(row(), col + 1, v[i][1]);
      fn(row() + 8, col, v[i][2]);
      fn(row() + 8, col + 1, v[i][3]);
    }
  }
};

// ---- forward ----

constexpr int kScores = kKeys + 8;

int forward_shared(const Sizes& size) {
  return ((kRows + kKeys) * size.pd + kKeys * (size.nv + 8) + kRows * kScores + 3 * kRows) *
         static_cast<int>(sizeof(float));
}

// Rows of a block: queries of one head, or, few, queries and the heads of a group.
struct RowPlace {
  std::int64_t t, h;
};

// parts null: y and lse at once. Else [pieces, rows of all, nv + 2]: the values' sum, the maximum, the sum.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    forward(AttentionArgs args, AttentionInputs<T> in, int pieces, float* parts, T* y, float* lse) {
  cuda::wait_turn();
  extern __shared__ float shared[];
  const Sizes size(args);
  const bool few = parts != nullptr;
  const auto group = static_cast<int>(args.heads / args.key_heads);
  const auto heads = static_cast<unsigned>(few ? args.key_heads : args.heads);
  const unsigned piece = few ? blockIdx.x % static_cast<unsigned>(pieces) : 0;
  const unsigned number = few ? blockIdx.x / static_cast<unsigned>(pieces) : blockIdx.x;
  const unsigned head = number % heads;
  Sequence s{};
  std::int64_t first = 0;
  if (few) {
    s = {number / heads, 0, args.queries, 0, args.keys};
  } else {
    first = find<kRows>(args, in, number / heads, false, s);
    if (first < 0) return;
  }
  const int count = few ? static_cast<int>(args.queries) * group
                        : static_cast<int>(min(std::int64_t{kRows}, s.queries - first));
  const unsigned key_head = few ? head : head / static_cast<unsigned>(group);
  const auto place = [&](int r) {
    return few ? RowPlace{r / group, static_cast<std::int64_t>(head) * group + r % group}
               : RowPlace{first + r, head};
  };
  float* q = shared;
  float* k = q + kRows * size.pd;
  float* v = k + kKeys * size.pd;
  const int pv = size.nv + 8;
  float* scores = v + kKeys * pv;
  float* most = scores + kRows * kScores;
  float* sum = most + kRows;
  float* keep = sum + kRows;
  load_rows<T>(q, size.pd, kRows, static_cast<int>(args.dim), size.nd, args.scale,
               [&](int r) -> const T* {
                 if (r >= count) return nullptr;
                 const RowPlace p = place(r);
                 return in.q + s.batch * args.q[0] + (s.query + p.t) * args.q[1] + p.h * args.q[2];
               });
  for (int r = threadIdx.x; r < kRows; r += kThreads) {
    most[r] = -INFINITY;
    sum[r] = 0;
  }
  Sums values;
  const std::int64_t newest = place(count - 1).t;
  std::int64_t from = first_key(args, s, place(0).t) / kKeys * kKeys,
               to = last_key(args, s, newest);
  if (few) {
    from = max(from, piece * kPiece);
    to = min(to, (piece + 1) * kPiece);
  }
  for (std::int64_t j = from; j < to; j += kKeys) {
    __syncthreads();
    load_rows<T>(k, size.pd, kKeys, static_cast<int>(args.dim), size.nd, 1, [&](int i) -> const T* {
      return j + i < s.keys
                 ? in.k + s.batch * args.k[0] + (s.key + j + i) * args.k[1] + key_head * args.k[2]
                 : nullptr;
    });
    load_rows<T>(v, pv, kKeys, static_cast<int>(args.value_dim), size.nv, 1,
                 [&](int i) -> const T* {
                   return j + i < s.keys ? in.v + s.batch * args.v[0] +
                                               (s.key + j + i) * args.v[1] + key_head * args.v[2]
                                         : nullptr;
                 });
    __syncthreads();
    cuda::product(false, {q, size.pd, 1}, {k, 1, size.pd}, scores, kScores, kRows, kKeys, size.nd);
    __syncthreads();
    {  // four threads have a row
      const int r = threadIdx.x / 4, part = threadIdx.x % 4;
      const RowPlace p = place(min(r, count - 1));
      float row[kKeys / 4];
      float largest = most[r];
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        const int c = i * 4 + part;
        row[i] = r < count && j + c < to
                     ? counted(args, in, s, p.t, p.h, j + c, scores[r * kScores + c])
                     : -INFINITY;
        largest = fmaxf(largest, row[i]);
      }
      largest = fmaxf(largest, __shfl_xor_sync(cuda::kAll, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(cuda::kAll, largest, 2));
      const float shift =
          largest == -INFINITY ? 0 : largest;  // NaN, if that is all there is, stays
      float total = 0;
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        const float weight = expf(row[i] - shift);
        total += weight;
        scores[r * kScores + i * 4 + part] = weight;
      }
      total += __shfl_xor_sync(cuda::kAll, total, 1);
      total += __shfl_xor_sync(cuda::kAll, total, 2);
      if (part == 0) {
        const float kept = expf(most[r] - shift);
        keep[r] = kept;
        sum[r] = fmaf(sum[r], kept, total);
        most[r] = largest;
      }
    }
    __syncthreads();
    values.scale(keep[Sums::row()], keep[Sums::row() + 8]);
    values.add({scores, kScores, 1}, {v, pv, 1}, size.nv, kKeys);
  }
  __syncthreads();
  if (few) {
    const std::int64_t rows = args.batch * args.queries * args.heads;
    float* out = parts + piece * rows * (size.nv + 2);
    const auto at = [&](int r) {
      const RowPlace p = place(r);
      return ((s.batch * args.queries + p.t) * args.heads + p.h) * (size.nv + 2);
    };
    values.each(size.nv, [&](int r, int c, float value) {
      if (r < count) out[at(r) + c] = value;
    });
    for (int r = threadIdx.x; r < count; r += kThreads) {
      out[at(r) + size.nv] = most[r];
      out[at(r) + size.nv + 1] = sum[r];
    }
    return;
  }
  for (int r = threadIdx.x; r < count; r += kThreads) {
    float all = sum[r], shift = most[r];
    if (in.sinks != nullptr && in.sinks[head] != -INFINITY) {
      shift = fmaxf(shift, in.sinks[head]);
      all = all * (most[r] == -INFINITY ? 0 : expf(most[r] - shift)) + expf(in.sinks[head] - shift);
    }
    const float scale = most[r] == -INFINITY ? 0 : expf(most[r] - shift) / all;
    keep[r] = scale;
    lse[(s.batch * args.queries + s.query + first + r) * args.heads + head] =
        all == 0 ? -INFINITY : shift + logf(all);
  }
  __syncthreads();
  values.each(size.nv, [&](int r, int c, float value) {
    if (r < count && c < args.value_dim) {
      y[((s.batch * args.queries + s.query + first + r) * args.heads + head) * args.value_dim + c] =
          cuda::narrow<T>(value * keep[r]);
    }
  });
}

// The pieces of a row, in order; a warp each.
template <class T>
__global__ void __launch_bounds__(kThreads)
    join(AttentionArgs args, const float* sinks, int pieces, const float* parts, T* y, float* lse) {
  cuda::wait_turn();
  const Sizes size(args);
  const std::int64_t rows = args.batch * args.queries * args.heads;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / cuda::kWarp;
  if (row >= rows) return;
  const int lane = threadIdx.x % cuda::kWarp;
  const auto part = [&](int p) {
    return parts + (p * rows + row) * (size.nv + 2);
  };
  const float sink = sinks != nullptr ? sinks[row % args.heads] : -INFINITY;
  float most = sink;
  for (int p = 0; p < pieces; ++p) most = fmaxf(most, part(p)[size.nv]);
  // A piece without a key has sums of 0, or NaN, which is to stay.
  const auto weight_of = [&](int p) {
    return part(p)[size.nv] == -INFINITY ? 0 : expf(part(p)[size.nv] - most);
  };
  float sum = sink != -INFINITY ? expf(sink - most) : 0;
  for (int p = 0; p < pieces; ++p) {
    sum += part(p)[size.nv + 1] * weight_of(p);
  }
  for (int c = lane; c < args.value_dim; c += cuda::kWarp) {
    float value = 0;
    for (int p = 0; p < pieces; ++p) {
      value += part(p)[c] * weight_of(p);
    }
    y[row * args.value_dim + c] = cuda::narrow<T>(sum == 0 ? 0 : value / sum);
  }
  if (lane == 0) lse[row] = sum == 0 ? -INFINITY : most + logf(sum);
}

bool has_few(const AttentionArgs& args) {
  return args.sequences == 0 && args.queries * (args.heads / args.key_heads) <= kFewRows &&
         args.queries <= 4;
}
int pieces_of(const AttentionArgs& args) {
  return static_cast<int>(std::max<std::int64_t>(1, cuda::blocks_for(args.keys, kPiece)));
}
std::size_t forward_room(const void* opaque) {
  const auto& args = *static_cast<const AttentionArgs*>(opaque);
  if (!has_few(args)) return 0;
  return static_cast<std::size_t>(pieces_of(args) * args.batch * args.queries * args.heads *
                                  (Sizes(args).nv + 2)) *
         sizeof(float);
}

template <class T>
void attention_fwd(const KernelCall& call) {
  const auto& args = call.as<AttentionArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const AttentionInputs<T> in = inputs_of<T>(call);
  const bool few = has_few(args);
  if constexpr (sizeof(T) == 2) {
    if (!few && half_takes(call)) return half_forward<T>(call);
  }
  const int pieces = few ? pieces_of(args) : 1;
  auto* parts = few ? static_cast<float*>(call.workspace) : nullptr;
  const std::int64_t blocks =
      few ? args.batch * args.key_heads * pieces : blocks_of(args, false, kRows) * args.heads;
  cuda::launch(forward<T>, blocks, kThreads, forward_shared(Sizes(args)), 1, stream, args, in,
               pieces, parts, call.output<T>(0), call.output<float>(1));
  if (!few) return;
  cuda::launch(join<T>, cuda::blocks_for(args.batch * args.queries * args.heads, kWarps), kThreads,
               0, 1, stream, args, in.sinks, pieces, static_cast<const float*>(parts),
               call.output<T>(0), call.output<float>(1));
}

// ---- backward ----

// D_t; a warp has a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dots(std::int64_t rows, std::int64_t width, const T* y, const T* dy, float* out) {
  cuda::wait_turn();
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / cuda::kWarp;
  if (row >= rows) return;
  float sum = 0;
  for (std::int64_t c = threadIdx.x % cuda::kWarp; c < width; c += cuda::kWarp) {
    sum = fmaf(cuda::widen(y[row * width + c]), cuda::widen(dy[row * width + c]), sum);
  }
  sum = cuda::lanes_sum<cuda::kWarp>(sum);
  if (threadIdx.x % cuda::kWarp == 0) out[row] = sum;
}

// d_sink of a head; a block each.
__global__ void __launch_bounds__(kThreads)
    sinks_back(std::int64_t tokens, std::int64_t heads, const float* sinks, const float* lse,
               const float* row_dots, float* out) {
  cuda::wait_turn();
  __shared__ float room[kWarps];
  float sum = 0;
  const bool counts = sinks[blockIdx.x] != -INFINITY;
  for (std::int64_t t = threadIdx.x; counts && t < tokens; t += kThreads) {
    const std::int64_t at = t * heads + blockIdx.x;
    sum -= expf(sinks[blockIdx.x] - lse[at]) * row_dots[at];
  }
  sum = cuda::RowThreads<kThreads>::sum(sum, room);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

constexpr int kSidePitch = kRows + 8;  // [kSide, kRows]

// From scores and dy·v in shared memory [rows, columns] to p and p∘(dy·v − D); row(r) and key(c) say which.
template <class T, class Row, class Key>
__device__ __forceinline__ void weigh(const AttentionArgs& args, const AttentionInputs<T>& in,
                                      const Sequence& s, std::int64_t h, int rows, int columns,
                                      int pitch, float* scores, float* grads, const float* lse,
                                      const float* row_dots, const Row& row, const Key& key) {
  for (int i = threadIdx.x; i < rows * columns; i += kThreads) {
    const int r = i / columns, c = i % columns;
    const std::int64_t t = row(r), j = key(c);
    float p = 0, d = 0;
    if (t >= 0 && j >= 0) {
      const std::int64_t at = (s.batch * args.queries + s.query + t) * args.heads + h;
      const float shift = lse[at];
      if (shift != -INFINITY) {
        p = expf(counted(args, in, s, t, h, j, scores[r * pitch + c]) - shift);
        d = p * (grads[r * pitch + c] - row_dots[at]);
      }
    }
    scores[r * pitch + c] = p;
    grads[r * pitch + c] = d;
  }
}

int keys_shared(const Sizes& size) {
  return ((kRows + kSide) * (size.pd + size.pv) + 2 * kSide * kSidePitch) *
         static_cast<int>(sizeof(float));
}

// 64 keys: dk and dv, over the heads that share them and their queries.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    keys_back(AttentionArgs args, AttentionInputs<T> in, const T* dy, const float* lse,
              const float* row_dots, T* dk, T* dv) {
  cuda::wait_turn();
  extern __shared__ float shared[];
  const Sizes size(args);
  const auto heads = static_cast<unsigned>(args.key_heads);
  const unsigned kh = blockIdx.x % heads;
  Sequence s{};
  const std::int64_t first = find<kRows>(args, in, blockIdx.x / heads, true, s);
  if (first < 0) return;
  const int count = static_cast<int>(min(std::int64_t{kRows}, s.keys - first));
  const std::int64_t group = args.heads / args.key_heads;
  float* k = shared;
  float* v = k + kRows * size.pd;
  float* q = v + kRows * size.pv;
  float* dys = q + kSide * size.pd;
  float* scores = dys + kSide * size.pv;  // [kSide, 64]
  float* grads = scores + kSide * kSidePitch;
  const auto dim = static_cast<int>(args.dim), value_dim = static_cast<int>(args.value_dim);
  load_rows<T>(k, size.pd, kRows, dim, size.nd, 1, [&](int i) -> const T* {
    return i < count ? in.k + s.batch * args.k[0] + (s.key + first + i) * args.k[1] + kh * args.k[2]
                     : nullptr;
  });
  load_rows<T>(v, size.pv, kRows, value_dim, size.nv, 1, [&](int i) -> const T* {
    return i < count ? in.v + s.batch * args.v[0] + (s.key + first + i) * args.v[1] + kh * args.v[2]
                     : nullptr;
  });
  Sums sum_k, sum_v;
  for (std::int64_t member = 0; member < group; ++member) {
    const std::int64_t h = kh * group + member;
    for (std::int64_t t0 = 0; t0 < s.queries; t0 += kSide) {
      const std::int64_t newest = min(t0 + kSide, s.queries) - 1;
      if (last_key(args, s, newest) <= first || first_key(args, s, t0) >= first + count) continue;
      __syncthreads();
      load_rows<T>(q, size.pd, kSide, dim, size.nd, args.scale, [&](int i) -> const T* {
        return t0 + i <= newest
                   ? in.q + s.batch * args.q[0] + (s.query + t0 + i) * args.q[1] + h * args.q[2]
                   : nullptr;
      });
      load_rows<T>(dys, size.pv, kSide, value_dim, size.nv, 1, [&](int i) -> const T* {
        return t0 + i <= newest
                   ? dy + ((s.batch * args.queries + s.query + t0 + i) * args.heads + h) * value_dim
                   : nullptr;
      });
      __syncthreads();
      cuda::product(false, {q, size.pd, 1}, {k, 1, size.pd}, scores, kSidePitch, kSide, kRows,
                    size.nd);
      cuda::product(false, {dys, size.pv, 1}, {v, 1, size.pv}, grads, kSidePitch, kSide, kRows,
                    size.nv);
      __syncthreads();
      weigh(
          args, in, s, h, kSide, kRows, kSidePitch, scores, grads, lse, row_dots,
          [&](int r) { return t0 + r <= newest ? t0 + r : std::int64_t{-1}; },
          [&](int c) { return c < count ? first + c : std::int64_t{-1}; });
      __syncthreads();
      sum_v.add({scores, 1, kSidePitch}, {dys, size.pv, 1}, size.nv, kSide);
      sum_k.add({grads, 1, kSidePitch}, {q, size.pd, 1}, size.nd, kSide);
    }
  }
  const auto at = [&](int r) {
    return (s.batch * args.keys + s.key + first + r) * args.key_heads + kh;
  };
  sum_k.each(size.nd, [&](int r, int c, float value) {
    if (r < count && c < dim) dk[at(r) * dim + c] = cuda::narrow<T>(value);
  });
  sum_v.each(size.nv, [&](int r, int c, float value) {
    if (r < count && c < value_dim) dv[at(r) * value_dim + c] = cuda::narrow<T>(value);
  });
}

constexpr int kRowPitch = kSide + 8;  // [64, kSide]

int queries_shared(const Sizes& size) {
  return ((kRows + kSide) * (size.pd + size.pv) + 2 * kRows * kRowPitch) *
         static_cast<int>(sizeof(float));
}

// 64 queries of a head: dq, over the keys.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    queries_back(AttentionArgs args, AttentionInputs<T> in, const T* dy, const float* lse,
                 const float* row_dots, T* dq) {
  cuda::wait_turn();
  extern __shared__ float shared[];
  const Sizes size(args);
  const auto heads = static_cast<unsigned>(args.heads);
  const unsigned h = blockIdx.x % heads;
  Sequence s{};
  const std::int64_t first = find<kRows>(args, in, blockIdx.x / heads, false, s);
  if (first < 0) return;
  const int count = static_cast<int>(min(std::int64_t{kRows}, s.queries - first));
  const std::int64_t kh = h / (args.heads / args.key_heads);
  float* q = shared;
  float* dys = q + kRows * size.pd;
  float* k = dys + kRows * size.pv;
  float* v = k + kSide * size.pd;
  float* scores = v + kSide * size.pv;  // [64, kSide]
  float* grads = scores + kRows * kRowPitch;
  const auto dim = static_cast<int>(args.dim), value_dim = static_cast<int>(args.value_dim);
  load_rows<T>(q, size.pd, kRows, dim, size.nd, args.scale, [&](int i) -> const T* {
    return i < count
               ? in.q + s.batch * args.q[0] + (s.query + first + i) * args.q[1] + h * args.q[2]
               : nullptr;
  });
  const auto at = [&](int r) {
    return (s.batch * args.queries + s.query + first + r) * args.heads + h;
  };
  load_rows<T>(dys, size.pv, kRows, value_dim, size.nv, 1,
               [&](int i) -> const T* { return i < count ? dy + at(i) * value_dim : nullptr; });
  Sums sum;
  const std::int64_t to = last_key(args, s, first + count - 1);
  for (std::int64_t j = first_key(args, s, first) / kSide * kSide; j < to; j += kSide) {
    __syncthreads();
    load_rows<T>(k, size.pd, kSide, dim, size.nd, 1, [&](int i) -> const T* {
      return j + i < s.keys
                 ? in.k + s.batch * args.k[0] + (s.key + j + i) * args.k[1] + kh * args.k[2]
                 : nullptr;
    });
    load_rows<T>(v, size.pv, kSide, value_dim, size.nv, 1, [&](int i) -> const T* {
      return j + i < s.keys
                 ? in.v + s.batch * args.v[0] + (s.key + j + i) * args.v[1] + kh * args.v[2]
                 : nullptr;
    });
    __syncthreads();
    cuda::product(false, {q, size.pd, 1}, {k, 1, size.pd}, scores, kRowPitch, kRows, kSide,
                  size.nd);
    cuda::product(false, {dys, size.pv, 1}, {v, 1, size.pv}, grads, kRowPitch, kRows, kSide,
                  size.nv);
    __syncthreads();
    weigh(
        args, in, s, h, kRows, kSide, kRowPitch, scores, grads, lse, row_dots,
        [&](int r) { return r < count ? first + r : std::int64_t{-1}; },
        [&](int c) { return j + c < s.keys ? j + c : std::int64_t{-1}; });
    __syncthreads();
    sum.add({grads, kRowPitch, 1}, {k, size.pd, 1}, size.nd, kSide);
  }
  sum.each(size.nd, [&](int r, int c, float value) {
    if (r < count && c < dim) dq[at(r) * dim + c] = cuda::narrow<T>(args.scale * value);
  });
}

std::size_t dots_bytes(const AttentionArgs& args) {
  return static_cast<std::size_t>(ceil_div(args.batch * args.queries * args.heads, 64) * 64) *
         sizeof(float);
}
template <class T>
std::size_t backward_room(const void* opaque) {
  const auto& args = *static_cast<const AttentionArgs*>(opaque);
  return dots_bytes(args) + (sizeof(T) == 2 ? half_room(args) : 0);
}

template <class T>
void attention_bwd(const KernelCall& call) {
  const auto& args = call.as<AttentionArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const AttentionInputs<T> in = inputs_of<T>(call);
  const Sizes size(args);
  auto* row_dots = static_cast<float*>(call.workspace);
  const auto* lse = call.input<float>(8);
  const T* dy = call.input<T>(9);
  const std::int64_t rows = args.batch * args.queries * args.heads;
  if (rows > 0) {
    cuda::launch(dots<T>, cuda::blocks_for(rows, kWarps), kThreads, 0, 1, stream, rows,
                 args.value_dim, call.input<T>(7), dy, row_dots);
  }
  const bool half = sizeof(T) == 2 && half_takes(call);
  if constexpr (sizeof(T) == 2) {
    if (half) half_backward<T>(call, row_dots, row_dots + dots_bytes(args) / sizeof(float));
  }
  if (!half && rows > 0) {
    cuda::launch(queries_back<T>, blocks_of(args, false, kRows) * args.heads, kThreads,
                 queries_shared(size), 1, stream, args, in, dy, lse,
                 static_cast<const float*>(row_dots), call.output<T>(0));
  }
  if (!half && args.batch * args.keys > 0) {
    cuda::launch(keys_back<T>, blocks_of(args, true, kRows) * args.key_heads, kThreads,
                 keys_shared(size), 1, stream, args, in, dy, lse,
                 static_cast<const float*>(row_dots), call.output<T>(1), call.output<T>(2));
  }
  if (call.output<float>(3) != nullptr && args.heads > 0) {
    cuda::launch(sinks_back, args.heads, kThreads, 0, 1, stream, args.batch * args.queries,
                 args.heads, in.sinks, lse, static_cast<const float*>(row_dots),
                 call.output<float>(3));
  }
}

}  // namespace

void register_attention_cuda(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCuda, "attention_fwd_" + type, attention_fwd<T>, forward_room);
    registry.add(Backend::kCuda, "attention_bwd_" + type, attention_bwd<T>, backward_room<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops
