// CUDA kernels of attention for 16-bit types (formula: mlxtape/ops/attention.h).
//
// As in attention.cu, but the factors of each product stay in their type, p and ds are rounded to it, and a warp has
// 16 whole rows: the softmax needs no other warp, and p goes from the sums of one product to the factor of the next
// in registers. Rows of the other side are fetched a step ahead. Bound by shared memory: a warp reads all keys for its
// 16 queries (width 256: 1 byte for each 16 operations, where the tensor cores make 20).
#include "attention_half.cuh"

#include <algorithm>
#include <type_traits>

#include "attention_args.h"
#include "attention_hopper.h"
#include "attention_places.cuh"
#include "attention_rows.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/mma16.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 256;
constexpr int kQueries = 128;  // of a block, 16 of a warp
constexpr int kKeys = 64;      // of a block that goes over the queries

// Widths are filled up to 64, 128 or 256.
template <int kWidth>
struct Tiles {
  static constexpr int kPitch = kWidth + 8;              // rows in different banks
  static constexpr int kStep = kWidth == 256 ? 32 : 64;  // keys fetched at once
  static constexpr int kStepRoom = kStep * kPitch;
};

// Rows of 16-byte packs to shared memory, later; zeros where row(i) is null and behind `channels`.
template <int kWidth, int kCount, class T, class Row>
__device__ __forceinline__ void fetch_rows(T* to, int channels, const T* any, const Row& row) {
  constexpr int kPacks = kWidth / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < kCount * kPacks; i += kThreads) {
    const int r = i / kPacks, c = i % kPacks * 8;
    const T* from = row(r);
    const bool there = from != nullptr && c < channels;
    cuda::copy_later(to + r * Tiles<kWidth>::kPitch + c, there ? from + c : any, there);
  }
}

// sums [16, 8·kTiles] = a [16, kWidth] · bᵀ, both rows in shared memory.
template <int kWidth, int kTiles, class T>
__device__ __forceinline__ void scores_of(float (&sums)[kTiles][4], const T* a, const T* b) {
  constexpr int kPitch = Tiles<kWidth>::kPitch;
#pragma unroll
  for (auto& tile : sums) {
#pragma unroll
    for (float& v : tile) v = 0;
  }
#pragma unroll 4
  for (int l = 0; l < kWidth; l += 16) {
    unsigned left[4];
    cuda::load_a(left, a + l, kPitch);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      unsigned right[4];
      cuda::load_b_turned(right, b + n * 8 * kPitch + l, kPitch);
      cuda::multiply_add16<T>(sums[n], left, right[0], right[1]);
      cuda::multiply_add16<T>(sums[n + 1], left, right[2], right[3]);
    }
  }
}

// sums [16, 8·kTiles] += a · b, a the weights of 16 rows and 16·kDeep columns in registers, b rows in shared memory.
template <int kWidth, int kTiles, int kDeep, class T>
__device__ __forceinline__ void add_product(float (&sums)[kTiles][4], const unsigned (&a)[kDeep][4],
                                            const T* b) {
  constexpr int kPitch = Tiles<kWidth>::kPitch;
#pragma unroll
  for (int l = 0; l < kDeep; ++l) {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      unsigned right[4];
      cuda::load_b(right, b + l * 16 * kPitch + n * 8, kPitch);
      cuda::multiply_add16<T>(sums[n], a[l], right[0], right[1]);
      cuda::multiply_add16<T>(sums[n + 1], a[l], right[2], right[3]);
    }
  }
}

// ---- forward ----

template <class T, int kWidth>
struct ForwardRoom {
  T q[kQueries * Tiles<kWidth>::kPitch];
  T k[2][Tiles<kWidth>::kStepRoom], v[2][Tiles<kWidth>::kStepRoom];
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    forward(AttentionArgs args, AttentionInputs<T> in, T* y, float* lse) {
  cuda::wait_turn();
  constexpr int kStep = Tiles<kWidth>::kStep, kPitch = Tiles<kWidth>::kPitch;
  extern __shared__ __align__(16) char memory[];
  auto& room = *reinterpret_cast<ForwardRoom<T, kWidth>*>(memory);
  const auto heads = static_cast<unsigned>(args.heads);
  const unsigned h = blockIdx.x % heads;
  Sequence s{};
  const std::int64_t first = find<kQueries>(args, in, from_the_end(heads), false, s);
  if (first < 0) return;
  const int count_here = static_cast<int>(min(std::int64_t{kQueries}, s.queries - first));
  const unsigned kh = h / static_cast<unsigned>(args.heads / args.key_heads);
  const T* q = in.q + s.batch * args.q[0] + (s.query + first) * args.q[1] + h * args.q[2];
  const T* k = in.k + s.batch * args.k[0] + s.key * args.k[1] + kh * args.k[2];
  const T* v = in.v + s.batch * args.v[0] + s.key * args.v[1] + kh * args.v[2];
  const auto dim = static_cast<int>(args.dim), value_dim = static_cast<int>(args.value_dim);
  const auto keys = static_cast<int>(s.keys);
  const int warp_row = threadIdx.x / cuda::kWarp * 16;
  const auto row = [&](int i) {  // the query of this thread's row, one that exists
    return first +
           min(warp_row + static_cast<int>(threadIdx.x) % cuda::kWarp / 4 + 8 * i, count_here - 1);
  };
  const Span span[2] = {span_of(args, s, row(0)), span_of(args, s, row(1))};
  const int from = static_cast<int>(first_key(args, s, first)) / kStep * kStep;
  const int to = static_cast<int>(last_key(args, s, first + count_here - 1));

  const auto fetch = [&](int j) {
    const int stage = j / kStep % 2;
    fetch_rows<kWidth, kStep>(room.k[stage], dim, in.k, [&](int i) -> const T* {
      return j + i < keys ? k + (j + i) * args.k[1] : nullptr;
    });
    fetch_rows<kWidth, kStep>(room.v[stage], value_dim, in.v, [&](int i) -> const T* {
      return j + i < keys ? v + (j + i) * args.v[1] : nullptr;
    });
    cuda::commit_copies();
  };
  if (from < to) {
    fetch_rows<kWidth, kQueries>(room.q, dim, in.q, [&](int i) -> const T* {
      return i < count_here ? q + i * args.q[1] : nullptr;
    });
    fetch(from);
  }
  Softening soft;
  float values[kWidth / 8][4] = {};
  for (int j = from; j < to; j += kStep) {
    cuda::wait_copies<0>();
    __syncthreads();
    if (j + kStep < to) fetch(j + kStep);
    const int stage = j / kStep % 2;
    float p[kStep / 8][4];
    scores_of<kWidth>(p, room.q + warp_row * kPitch, room.k[stage]);
    const bool all = args.scale >= 0 && all_count(args, span, j, kStep);
    if (!all) count(p, args, in, s, h, j, span, row);
    soft.next(p, all ? args.scale * kLog2E : 1);
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[n][i] *= soft.keep[i / 2];
    }
    unsigned weights[kStep / 16][4];
    as_factor<T>(weights, p);
    add_product<kWidth>(values, weights, room.v[stage]);
  }
  const int two = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Total total = total_of(soft.most[i], over_lanes_of_row(soft.sum[i]),
                                 in.sinks == nullptr ? -INFINITY : in.sinks[h]);
    const int r = warp_row + static_cast<int>(threadIdx.x) % cuda::kWarp / 4 + 8 * i;
    if (r >= count_here) continue;
    const std::int64_t at = (s.batch * args.queries + s.query + first + r) * args.heads + h;
    if (two == 0) lse[at] = total.lse;
    T* out = y + at * value_dim + two;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      if (n * 8 < value_dim) {
        *reinterpret_cast<unsigned*>(out + n * 8) =
            cuda::two_of<T>(values[n][2 * i] * total.factor, values[n][2 * i + 1] * total.factor);
      }
    }
  }
}

// ---- backward ----

template <class T, int kWidth>
struct QueriesRoom {
  T q[kQueries * Tiles<kWidth>::kPitch], dy[kQueries * Tiles<kWidth>::kPitch];
  T k[2][32 * Tiles<kWidth>::kPitch], v[2][32 * Tiles<kWidth>::kPitch];
};

// 128 queries of a head: dq, over the keys.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    queries_back(AttentionArgs args, AttentionInputs<T> in, const T* dy, const float* lse,
                 const float* row_dots, T* dq) {
  cuda::wait_turn();
  constexpr int kStep = 32, kPitch = Tiles<kWidth>::kPitch;
  extern __shared__ __align__(16) char memory[];
  auto& room = *reinterpret_cast<QueriesRoom<T, kWidth>*>(memory);
  const auto heads = static_cast<unsigned>(args.heads);
  const unsigned h = blockIdx.x % heads;
  Sequence s{};
  const std::int64_t first = find<kQueries>(args, in, from_the_end(heads), false, s);
  if (first < 0) return;
  const int count_here = static_cast<int>(min(std::int64_t{kQueries}, s.queries - first));
  const unsigned kh = h / static_cast<unsigned>(args.heads / args.key_heads);
  const T* q = in.q + s.batch * args.q[0] + (s.query + first) * args.q[1] + h * args.q[2];
  const T* k = in.k + s.batch * args.k[0] + s.key * args.k[1] + kh * args.k[2];
  const T* v = in.v + s.batch * args.v[0] + s.key * args.v[1] + kh * args.v[2];
  const auto dim = static_cast<int>(args.dim), value_dim = static_cast<int>(args.value_dim);
  const auto keys = static_cast<int>(s.keys);
  const std::int64_t head_row = (s.batch * args.queries + s.query + first) * args.heads + h;
  const int warp_row = threadIdx.x / cuda::kWarp * 16;
  const auto row = [&](int i) {
    return first +
           min(warp_row + static_cast<int>(threadIdx.x) % cuda::kWarp / 4 + 8 * i, count_here - 1);
  };
  const Span span[2] = {span_of(args, s, row(0)), span_of(args, s, row(1))};
  const int from = static_cast<int>(first_key(args, s, first)) / kStep * kStep;
  const int to = static_cast<int>(last_key(args, s, first + count_here - 1));
  float shift[2], dot[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::int64_t at = head_row + (row(i) - first) * args.heads;
    // Where no key counts every score is −inf; then p is 0 with any number here.
    shift[i] = lse[at] == -INFINITY ? 0 : lse[at] * kLog2E;
    dot[i] = row_dots[at];
  }
  const auto fetch = [&](int j) {
    const int stage = j / kStep % 2;
    fetch_rows<kWidth, kStep>(room.k[stage], dim, in.k, [&](int i) -> const T* {
      return j + i < keys ? k + (j + i) * args.k[1] : nullptr;
    });
    fetch_rows<kWidth, kStep>(room.v[stage], value_dim, in.v, [&](int i) -> const T* {
      return j + i < keys ? v + (j + i) * args.v[1] : nullptr;
    });
    cuda::commit_copies();
  };
  if (from < to) {
    fetch_rows<kWidth, kQueries>(room.q, dim, in.q, [&](int i) -> const T* {
      return i < count_here ? q + i * args.q[1] : nullptr;
    });
    fetch_rows<kWidth, kQueries>(room.dy, value_dim, dy, [&](int i) -> const T* {
      return i < count_here ? dy + (head_row + i * args.heads) * value_dim : nullptr;
    });
    fetch(from);
  }
  float sums[kWidth / 8][4] = {};
  for (int j = from; j < to; j += kStep) {
    cuda::wait_copies<0>();
    __syncthreads();
    if (j + kStep < to) fetch(j + kStep);
    const int stage = j / kStep % 2;
    float p[kStep / 8][4], d[kStep / 8][4];
    scores_of<kWidth>(p, room.q + warp_row * kPitch, room.k[stage]);
    scores_of<kWidth>(d, room.dy + warp_row * kPitch, room.v[stage]);
    const bool all = all_count(args, span, j, kStep);
    if (!all) count(p, args, in, s, h, j, span, row);
    const float factor = all ? args.scale * kLog2E : 1;
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d[n][i] = power_of_two(fmaf(p[n][i], factor, -shift[i / 2])) * (d[n][i] - dot[i / 2]);
      }
    }
    unsigned weights[kStep / 16][4];
    as_factor<T>(weights, d);
    add_product<kWidth>(sums, weights, room.k[stage]);
  }
  const int two = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = warp_row + static_cast<int>(threadIdx.x) % cuda::kWarp / 4 + 8 * i;
    if (r >= count_here) continue;
    T* out = dq + (head_row + r * args.heads) * dim + two;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      if (n * 8 < dim) {
        *reinterpret_cast<unsigned*>(out + n * 8) =
            cuda::two_of<T>(sums[n][2 * i] * args.scale, sums[n][2 * i + 1] * args.scale);
      }
    }
  }
}

constexpr int kSide = 32;  // queries at a time
constexpr int kWeightPitch = kSide + 8;

template <class T, int kWidth>
struct KeysRoom {
  T k[kKeys * Tiles<kWidth>::kPitch], v[kKeys * Tiles<kWidth>::kPitch];
  T q[2][kSide * Tiles<kWidth>::kPitch], dy[2][kSide * Tiles<kWidth>::kPitch];
  T p[kKeys * kWeightPitch], d[kKeys * kWeightPitch];  // [keys, queries]
  float shift[2][kSide], dot[2][kSide];
  Span span[2][kSide];
};

// 64 keys: dk and dv, over the heads that share them and their queries. A warp has 16 keys and half of the queries,
// then half of the channels: two warps make the weights that both need.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    keys_back(AttentionArgs args, AttentionInputs<T> in, const T* dy, const float* lse,
              const float* row_dots, KeyGradients<T> to) {
  cuda::wait_turn();
  constexpr int kPitch = Tiles<kWidth>::kPitch, kHalf = kWidth / 2;
  extern __shared__ __align__(16) char memory[];
  auto& room = *reinterpret_cast<KeysRoom<T, kWidth>*>(memory);
  const auto heads = static_cast<unsigned>(args.key_heads), parts = static_cast<unsigned>(to.count);
  const unsigned part = blockIdx.x % parts, kh = blockIdx.x / parts % heads;
  Sequence s{};
  const std::int64_t first = find<kKeys>(args, in, blockIdx.x / parts / heads, true, s);
  if (first < 0) return;
  const int count_here = static_cast<int>(min(std::int64_t{kKeys}, s.keys - first));
  const auto group = static_cast<int>(args.heads / args.key_heads) / to.count;
  const std::int64_t first_head = std::int64_t{kh} * to.count * group + part * group;
  const auto dim = static_cast<int>(args.dim), value_dim = static_cast<int>(args.value_dim);
  const int warp = threadIdx.x / cuda::kWarp, lane = threadIdx.x % cuda::kWarp;
  const int warp_row = warp % 4 * 16, half = warp / 4;
  const T* k = in.k + s.batch * args.k[0] + (s.key + first) * args.k[1] + kh * args.k[2];
  const T* v = in.v + s.batch * args.v[0] + (s.key + first) * args.v[1] + kh * args.v[2];

  // The queries for which one of these keys counts.
  const std::int64_t ahead = s.keys - s.queries;
  std::int64_t begin = 0, end = s.queries;
  if (args.causal != 0) begin = min(max(first - ahead, std::int64_t{0}), s.queries) / kSide * kSide;
  if (args.window != 0)
    end = min(max(first + count_here + args.window - 1 - ahead, begin), s.queries);
  const auto steps = static_cast<int>((end - begin + kSide - 1) / kSide);

  const auto fetch = [&](int step) {
    const int stage = step % 2;
    const std::int64_t h = first_head + step / steps,
                       t0 = begin + std::int64_t{step % steps} * kSide;
    const auto left = s.queries - t0;
    const T* q = in.q + s.batch * args.q[0] + (s.query + t0) * args.q[1] + h * args.q[2];
    const std::int64_t head_row = (s.batch * args.queries + s.query + t0) * args.heads + h;
    fetch_rows<kWidth, kSide>(room.q[stage], dim, in.q, [&](int i) -> const T* {
      return i < left ? q + i * args.q[1] : nullptr;
    });
    fetch_rows<kWidth, kSide>(room.dy[stage], value_dim, dy, [&](int i) -> const T* {
      return i < left ? dy + (head_row + i * args.heads) * value_dim : nullptr;
    });
    cuda::commit_copies();
    if (threadIdx.x < kSide) {
      const int i = threadIdx.x;
      const bool there = i < left;
      const std::int64_t at = head_row + (there ? i : 0) * args.heads;
      room.shift[stage][i] = there && lse[at] != -INFINITY ? lse[at] * kLog2E : 0;
      room.dot[stage][i] = there ? row_dots[at] : 0;
      room.span[stage][i] = there ? span_of(args, s, t0 + i) : Span{0, 0};
    }
  };
  const int all = steps * group;
  if (all > 0) {
    fetch_rows<kWidth, kKeys>(room.k, dim, in.k, [&](int i) -> const T* {
      return i < count_here ? k + i * args.k[1] : nullptr;
    });
    fetch_rows<kWidth, kKeys>(room.v, value_dim, in.v, [&](int i) -> const T* {
      return i < count_here ? v + i * args.v[1] : nullptr;
    });
    fetch(0);
  }
  float sum_k[kHalf / 8][4] = {}, sum_v[kHalf / 8][4] = {};
  for (int step = 0; step < all; ++step) {
    const int stage = step % 2;
    cuda::wait_copies<0>();
    __syncthreads();
    if (step + 1 < all) fetch(step + 1);
    float p[2][4], d[2][4];
    scores_of<kWidth>(p, room.k + warp_row * kPitch, room.q[stage] + half * 16 * kPitch);
    scores_of<kWidth>(d, room.v + warp_row * kPitch, room.dy[stage] + half * 16 * kPitch);
    const std::int64_t h = first_head + step / steps,
                       t0 = begin + std::int64_t{step % steps} * kSide;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = half * 16 + n * 8 + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = column + i % 2, j = static_cast<int>(first) + warp_row + lane / 4 + i / 2 * 8;
        const Span span = room.span[stage][c];
        float weight = 0;
        if (j >= span.first && j < span.last) {
          const float score = masked(args, in, s, t0 + c, h, j, p[n][i] * (args.scale * kLog2E));
          weight = power_of_two(score - room.shift[stage][c]);
        }
        p[n][i] = weight;
        d[n][i] = weight * (d[n][i] - room.dot[stage][c]);
      }
      const int at = (warp_row + lane / 4) * kWeightPitch + column;
      *reinterpret_cast<unsigned*>(room.p + at) = cuda::two_of<T>(p[n][0], p[n][1]);
      *reinterpret_cast<unsigned*>(room.p + at + 8 * kWeightPitch) =
          cuda::two_of<T>(p[n][2], p[n][3]);
      *reinterpret_cast<unsigned*>(room.d + at) = cuda::two_of<T>(d[n][0], d[n][1]);
      *reinterpret_cast<unsigned*>(room.d + at + 8 * kWeightPitch) =
          cuda::two_of<T>(d[n][2], d[n][3]);
    }
    // The two warps of these 16 keys.
    asm volatile("bar.sync %0, 64;" ::"r"(1 + warp % 4) : "memory");
    unsigned weights[kSide / 16][4];
#pragma unroll
    for (int l = 0; l < kSide / 16; ++l) {
      cuda::load_a(weights[l], room.p + warp_row * kWeightPitch + l * 16, kWeightPitch);
    }
    add_product<kWidth>(sum_v, weights, room.dy[stage] + half * kHalf);
#pragma unroll
    for (int l = 0; l < kSide / 16; ++l) {
      cuda::load_a(weights[l], room.d + warp_row * kWeightPitch + l * 16, kWeightPitch);
    }
    add_product<kWidth>(sum_k, weights, room.q[stage] + half * kHalf);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = warp_row + lane / 4 + 8 * i;
    if (r >= count_here) continue;
    const std::int64_t at = (s.batch * args.keys + s.key + first + r) * args.key_heads + kh;
#pragma unroll
    for (int n = 0; n < kHalf / 8; ++n) {
      const int c = half * kHalf + n * 8, two = lane % 4 * 2;
      if (c < dim) {
        to.store(args, static_cast<int>(part), at, c + two, sum_k[n][2 * i] * args.scale,
                 sum_k[n][2 * i + 1] * args.scale);
      }
      if (c < value_dim) {
        to.store(args, static_cast<int>(part), at, dim + c + two, sum_v[n][2 * i],
                 sum_v[n][2 * i + 1]);
      }
    }
  }
}

// Whether the copy engine finds rows of such a tensor: from each to the next forward, by less than 2^40 bytes.
bool goes_forward(const std::int64_t (&strides)[3], std::int64_t batch, std::int64_t tokens,
                  std::int64_t heads) {
  const auto fits = [](std::int64_t count, std::int64_t stride) {
    return count == 1 || (stride > 0 && stride < (std::int64_t{1} << 39));
  };
  return fits(batch, strides[0]) && fits(tokens, strides[1]) && fits(heads, strides[2]);
}
// Whether attention_hopper.h is for these.
bool hopper_takes(const AttentionArgs& args) {
  return std::max(args.dim, args.value_dim) > 64 && args.mask_kind == AttentionMask::kNone &&
         std::min({args.batch, args.queries, args.keys, args.heads, args.dim, args.value_dim}) >
             0 &&
         args.queries < INT32_MAX / 2 &&
         goes_forward(args.q, args.batch, args.queries, args.heads) &&
         goes_forward(args.k, args.batch, args.keys, args.key_heads) &&
         goes_forward(args.v, args.batch, args.keys, args.key_heads) && cuda::on_hopper();
}

// The parts of a row, in order; a thread has two channels.
template <class T>
__global__ void __launch_bounds__(kThreads) join_parts(AttentionArgs args, KeyGradients<T> to) {
  cuda::wait_turn();
  const std::int64_t rows = args.batch * args.keys * args.key_heads,
                     width = args.dim + args.value_dim;
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * 2;
  if (i >= rows * width) return;
  float2 sum = {};
  for (int part = 0; part < to.count; ++part) {
    const float2 more = *reinterpret_cast<const float2*>(to.parts + part * rows * width + i);
    sum.x += more.x;
    sum.y += more.y;
  }
  to.parts = nullptr;
  to.store(args, 0, i / width, static_cast<int>(i % width), sum.x, sum.y);
}

bool in_packs(const void* at, const std::int64_t (&strides)[3]) {
  return cuda::is_aligned(at) && strides[0] % 8 == 0 && strides[1] % 8 == 0 && strides[2] % 8 == 0;
}

// fn with the width that both kinds of rows fit into.
template <class Fn>
void with_width(const AttentionArgs& args, const Fn& fn) {
  const std::int64_t width = std::max(args.dim, args.value_dim);
  if (width <= 64) return fn(std::integral_constant<int, 64>());
  if (width <= 128) return fn(std::integral_constant<int, 128>());
  fn(std::integral_constant<int, 256>());
}

}  // namespace

bool half_takes(const KernelCall& call) {
  const auto& args = call.as<AttentionArgs>();
  return args.dim % 8 == 0 && args.value_dim % 8 == 0 && args.keys < INT32_MAX / 2 &&
         in_packs(call.in[0], args.q) && in_packs(call.in[1], args.k) &&
         in_packs(call.in[2], args.v);
}

template <class T>
void half_forward(const KernelCall& call) {
  const auto& args = call.as<AttentionArgs>();
  if (hopper_takes(args)) return hopper::attention_forward<T>(call);
  with_width(args, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    cuda::launch(forward<T, kWidth>, blocks_of(args, false, kQueries) * args.heads, kThreads,
                 static_cast<int>(sizeof(ForwardRoom<T, kWidth>)), 1,
                 static_cast<cudaStream_t>(call.queue), args, inputs_of<T>(call), call.output<T>(0),
                 call.output<float>(1));
  });
}

std::size_t half_room(const AttentionArgs& args) {
  const int parts = key_parts(args, kKeys);
  const std::int64_t rows = args.batch * args.keys * args.key_heads;
  return parts == 1
             ? 0
             : static_cast<std::size_t>(parts * rows * (args.dim + args.value_dim)) * sizeof(float);
}

template <class T>
void half_backward(const KernelCall& call, const float* row_dots, float* room) {
  const auto& args = call.as<AttentionArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const AttentionInputs<T> in = inputs_of<T>(call);
  const auto* lse = call.input<float>(8);
  const T* dy = call.input<T>(9);
  const int parts = key_parts(args, kKeys);
  const KeyGradients<T> to{call.output<T>(1), call.output<T>(2), parts == 1 ? nullptr : room,
                           parts};
  if (hopper_takes(args)) {
    hopper::attention_backward<T>(call, row_dots, to);
  } else {
    with_width(args, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
      if (args.batch * args.queries * args.heads > 0) {
        cuda::launch(queries_back<T, kWidth>, blocks_of(args, false, kQueries) * args.heads,
                     kThreads, static_cast<int>(sizeof(QueriesRoom<T, kWidth>)), 1, stream, args,
                     in, dy, lse, row_dots, call.output<T>(0));
      }
      if (args.batch * args.keys > 0) {
        cuda::launch(keys_back<T, kWidth>, blocks_of(args, true, kKeys) * args.key_heads * parts,
                     kThreads, static_cast<int>(sizeof(KeysRoom<T, kWidth>)), 1, stream, args, in,
                     dy, lse, row_dots, to);
      }
    });
  }
  const std::int64_t pairs =
      args.batch * args.keys * args.key_heads * (args.dim + args.value_dim) / 2;
  if (parts > 1 && pairs > 0) {
    cuda::launch(join_parts<T>, cuda::blocks_for(pairs, kThreads), kThreads, 0, 1, stream, args,
                 to);
  }
}

template void half_forward<F16>(const KernelCall& call);
template void half_forward<BF16>(const KernelCall& call);
template void half_backward<F16>(const KernelCall& call, const float* row_dots, float* room);
template void half_backward<BF16>(const KernelCall& call, const float* row_dots, float* room);

}  // namespace mlxtape::ops
