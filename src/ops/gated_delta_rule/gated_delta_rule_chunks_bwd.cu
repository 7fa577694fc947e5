// The gradient of gated_delta_rule for 16-bit heads of width 128 with one decay a head (formula:
// mlxtape/ops/gated_delta_rule.h; the algebra: docs/decisions). Four kernels: what needs no state, for all chunks at
// once (meet); the walk forward that leaves the state before each chunk (walk); the walk back that leaves the state's
// gradient behind each (walk_back); and from these, for all chunks at once, everything else (gather).
#include <algorithm>

#include "gated_delta_rule_chunks.cuh"
#include "gated_delta_rule_chunks_meet.cuh"
#include "gated_delta_rule_chunks_walk.cuh"
#include "gated_delta_rule_chunks_walk_back.cuh"

namespace mlxtape::ops {

namespace {

using namespace chunks;

// ---- everything else; a block has a chunk of a key head, and its value heads one after another ----

constexpr int kThreads = 512;
constexpr int kParts = 4;  // of the channels: a warp has 16 tokens and one of them
constexpr int kTiles = 4;  // of 8 channels, in a part
constexpr int kPart = kTiles * 8;

// A task's first token, its values, its first value head, and how many tokens it has: in shared memory, for registers are short.
struct Place {
  std::int64_t start, v, head;
  int count;
};

enum { kQx, kKz, kKh, kDots };  // sums over channels of a token: q·x, k·z', k·h

template <class T>
struct GatherRoom {
  alignas(128) T q[kRows], k[kRows];
  T state[kState], d_state[kState];
  T dy[kRows], u[kRows];  // u: Uᵀ [128][64]
  T dr[kRows];            // at the end dq
  union {
    T du[kRows];
    float met
        [kPairs];  // what dM and dN owe to the tokens' meetings; column i of row t is at (i + t) mod 64
  };
  T solve[2][kPairs], m[kPairs];
  T pairs[2 * kPairs];  // A∘dM, A∘dN; at the end dk
  Numbers numbers[2];
  Fades fades[2];
  Place places[2];
  float dots[kParts][kDots][kChunk];
  float r_dots[kChunk];     // dr·v
  float n_dots[2][kChunk];  // Σ_i N_ti·(dr_t·u_i), i in either half of the tokens
  float along[kParts][2][kChunk];
  float start[kChunk];                 // q·x + k·z, then h_t·e_{t−1}
  float both[kThreads / cuda::kWarp];  // Σ dS∘S
  std::uint64_t keys_here, behind_here, before_here;
};

template <int kKinds>
__device__ __forceinline__ float all_parts(const float (&dots)[kParts][kKinds][kChunk], int kind,
                                           int t) {
  return (dots[0][kind][t] + dots[1][kind][t]) + (dots[2][kind][t] + dots[3][kind][t]);
}

// Sums of rows g and g + 8 over a warp's columns.
__device__ __forceinline__ void sum_columns(float& low, float& high) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    low += __shfl_xor_sync(cuda::kAll, low, step);
    high += __shfl_xor_sync(cuda::kAll, high, step);
  }
}

// The sum over this warp's columns of c∘tile, and to += scale∘c.
template <class T>
__device__ __forceinline__ void dot_and_add(const Lane& lane, const float (&c)[kTiles][4],
                                            const T* tile, int row, int col, float scale_low,
                                            float scale_high, float (&to)[kTiles][4], float* dots) {
  float low = 0, high = 0;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const T* at = tile + place<kWidth>(row + lane.g, col + n * 8 + 2 * lane.t4);
    const float2 one = cuda::both_of<T>(*reinterpret_cast<const unsigned*>(at));
    const float2 other = cuda::both_of<T>(*reinterpret_cast<const unsigned*>(at + 8 * kWidth));
    low = fmaf(c[n][0], one.x, fmaf(c[n][1], one.y, low));
    high = fmaf(c[n][2], other.x, fmaf(c[n][3], other.y, high));
    to[n][0] = fmaf(scale_low, c[n][0], to[n][0]);
    to[n][1] = fmaf(scale_low, c[n][1], to[n][1]);
    to[n][2] = fmaf(scale_high, c[n][2], to[n][2]);
    to[n][3] = fmaf(scale_high, c[n][3], to[n][3]);
  }
  sum_columns(low, high);
  if (lane.t4 == 0) {
    dots[row + lane.g] = low;
    dots[row + lane.g + 8] = high;
  }
}

// Into a warp's part of a tile [64][128].
template <class T>
__device__ __forceinline__ void lay_tile(const Lane& lane, const float (&c)[kTiles][4], int row,
                                         int col, T* tile) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    T* to = tile + place<kWidth>(row + lane.g, col + n * 8 + 2 * lane.t4);
    *reinterpret_cast<unsigned*>(to) = cuda::two_of<T>(c[n][0], c[n][1]);
    *reinterpret_cast<unsigned*>(to + 8 * kWidth) = cuda::two_of<T>(c[n][2], c[n][3]);
  }
}

constexpr int kAll = 1 << 20;  // columns

// c += A·B over kLength, or its steps of 16 from `first` on, for this warp's 16 rows and the columns of B up to `last`.
template <class T, int kLength, bool kTurnA, bool kTurnB, class A, class B>
__device__ __forceinline__ void add_product(const Lane& lane, float (&c)[kTiles][4], const A& a,
                                            int row, const B& b, int col, int first = 0,
                                            int last = kAll) {
#pragma unroll
  for (int l = 0; l < kLength; l += 16) {
    if (l < first) continue;
    unsigned factor[4];
    if constexpr (kTurnA) {
      a.a_turned(factor, lane, row, l);
    } else {
      a.a(factor, lane, row, l);
    }
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
      if (col + n * 16 > last) continue;
      unsigned other[4];
      if constexpr (kTurnB) {
        b.b_turned(other, lane, l, col + n * 16);
      } else {
        b.b(other, lane, l, col + n * 16);
      }
      multiply_add_two<T>(c[2 * n], c[2 * n + 1], factor, other);
    }
  }
}

template <class T>
struct GradientsOut {
  T *dq, *dk, *dv;
  float *decay, *beta;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    gather(GatedDeltaRuleArgs args, Made<T> made, const T* v, const T* dy, const bool* mask,
           unsigned tasks, GradientsOut<T> out) {
  cuda::wait_turn();
  extern __shared__ __align__(128) char memory[];
  auto& room = *reinterpret_cast<GatherRoom<T>*>(memory);
  const auto key_heads = static_cast<unsigned>(args.key_heads);
  const unsigned group = static_cast<unsigned>(args.value_heads) / key_heads;
  const auto per_sequence = static_cast<unsigned>((args.sequence_tokens + kChunk - 1) / kChunk);
  const int warp = threadIdx.x / cuda::kWarp, thread = threadIdx.x % cuda::kWarp;
  Lane lane;
  const int g = lane.g, t4 = lane.t4;
  const int part = warp / 4;
  int row = warp % 4 * 16, col = part * kPart;
  // Of pairs of tokens: the first eight warps have M's, the others N's; a warp 16 by 32 of them, up to the diagonal.
  const int half = warp / 8, other_row = warp / 4 % 2 * 32;
  int low = row + g, high = low + 8;  // this thread's two tokens
  // Addresses made in one product are not kept for the next: registers are short.
  const auto forget = [&] {
    lane.forget();
    asm volatile("" : "+r"(row), "+r"(col), "+r"(low), "+r"(high));
  };

  // An item is a value head of a task; fetches are one item ahead.
  const auto pair_of = [&](unsigned task, unsigned member) {
    return std::int64_t{task / key_heads} * args.value_heads + task % key_heads * group + member;
  };
  const auto fetch_keys = [&](unsigned task) {
    cuda::barrier_arrive_expect(&room.keys_here, 2 * sizeof(room.q));
    cuda::bulk_copy(room.q, made.q + std::int64_t{task} * kRows, sizeof(room.q), &room.keys_here);
    cuda::bulk_copy(room.k, made.k + std::int64_t{task} * kRows, sizeof(room.k), &room.keys_here);
  };
  const auto fetch_behind = [&](std::int64_t pair, unsigned slot) {
    std::uint64_t* here = &room.behind_here;
    cuda::barrier_arrive_expect(here, sizeof(room.d_state) + sizeof(room.m) + sizeof(Numbers));
    cuda::bulk_copy(room.d_state, made.d_states + pair * kState, sizeof(room.d_state), here);
    cuda::bulk_copy(room.m, made.m + pair * kPairs, sizeof(room.m), here);
    cuda::bulk_copy(&room.numbers[slot], made.numbers + pair, sizeof(Numbers), here);
  };
  const auto fetch_before = [&](std::int64_t pair) {
    std::uint64_t* here = &room.before_here;
    cuda::barrier_arrive_expect(here, sizeof(room.state) + sizeof(room.u) + sizeof(room.solve));
    cuda::bulk_copy(room.u, made.u + pair * kRows, sizeof(room.u), here);
    cuda::bulk_copy(room.state, made.states + pair * kState, sizeof(room.state), here);
    cuda::bulk_copy(room.solve, made.solve + pair * 2 * kPairs, sizeof(room.solve), here);
  };
  const auto fetch_dy = [&](unsigned task, unsigned member) {
    const unsigned chunk = task / key_heads, head = task % key_heads * group + member;
    const std::int64_t first = std::int64_t{chunk % per_sequence} * kChunk;
    const std::int64_t start = std::int64_t{chunk / per_sequence} * args.sequence_tokens + first;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows / 8; i += kThreads) {
      const int t = i / (kWidth / 8), c = i % (kWidth / 8) * 8;
      const bool on =
          dy != nullptr && first + t < args.sequence_tokens && (mask == nullptr || mask[start + t]);
      const T* from = dy + ((start + t) * args.value_heads + head) * kWidth + c;
      cuda::copy_later(room.dy + place<kWidth>(t, c),
                       on ? from : reinterpret_cast<const T*>(made.k), on);
    }
    cuda::commit_copies();
  };

  if (threadIdx.x == 0) {
    cuda::barrier_init(&room.keys_here, 1);
    cuda::barrier_init(&room.behind_here, 1);
    cuda::barrier_init(&room.before_here, 1);
    cuda::barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    fetch_keys(blockIdx.x);
    fetch_behind(pair_of(blockIdx.x, 0), 0);
    fetch_before(pair_of(blockIdx.x, 0));
  }
  fetch_dy(blockIdx.x, 0);
  cuda::barrier_wait(&room.behind_here, 0);
  room.fades[0].fill(room.numbers[0].g, static_cast<int>(threadIdx.x), kThreads);

  const Tile<kWidth> q_tile(room.q), k_tile(room.k), dy_tile(room.dy), du_tile(room.du),
      dr_tile(room.dr), state_tile(room.state), d_state_tile(room.d_state);
  const Tile<kChunk> u_tile(room.u), m_tile(room.m), dm_tile(room.pairs),
      dn_tile(room.pairs + kPairs);
  unsigned phases = 0;  // of the items' barriers, and, the next bit, of the tasks'
  for (auto task = blockIdx.x; task < tasks; task += gridDim.x, phases ^= 2U) {
    Place& here = room.places[phases >> 1U];
    if (threadIdx.x == 0) {
      const unsigned chunk = task / key_heads;
      const std::int64_t entry = chunk / per_sequence;
      const std::int64_t first = std::int64_t{chunk % per_sequence} * kChunk;
      here.start = entry * args.sequence_tokens + first;
      here.head = task % key_heads * group;
      here.v = entry * args.v[0] + first * args.v[1];
      here.count = static_cast<int>(min(std::int64_t{kChunk}, args.sequence_tokens - first));
    }
    float dq[kTiles][4] = {}, dk[kTiles][4] = {};
    cuda::barrier_wait(&room.keys_here, phases >> 1U);
    for (unsigned member = 0; member < group; ++member, phases ^= 1U) {
      const unsigned item = phases & 1U;
      // What comes next, made again where it is needed.
      const auto next_task = [&] {
        return member + 1 == group ? task + gridDim.x : task;
      };
      const auto next_member = [&] {
        return member + 1 == group ? 0 : member + 1;
      };
      const Numbers& numbers = room.numbers[item];
      const Fades& fades = room.fades[item];
      cuda::wait_copies<0>();
      cuda::barrier_wait(&room.behind_here, item);
      __syncthreads();

      float c[kTiles][4];
      const auto clear = [&] {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) c[n][i] = 0;
        }
      };
      // dU = A_C∘(K·dS) + Mᵀ·dY
      clear();
      forget();
      add_product<T, kWidth, false, true>(lane, c, k_tile, row, d_state_tile, col);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        c[n][0] *= numbers.f[low];
        c[n][1] *= numbers.f[low];
        c[n][2] *= numbers.f[high];
        c[n][3] *= numbers.f[high];
      }
      add_product<T, kChunk, true, false>(lane, c, m_tile, row, dy_tile, col, row);
      lay_tile(lane, c, row, col, room.du);

      cuda::barrier_wait(&room.before_here, item);
      // h = U·dSᵀ, and Σ dS∘S.
      clear();
      forget();
      add_product<T, kWidth, true, false>(lane, c, u_tile, row, d_state_tile, col);
      dot_and_add(lane, c, room.k, row, col, numbers.f[low], numbers.f[high], dk,
                  room.dots[part][kKh]);
      {
        float sum = 0;
#pragma unroll 2
        for (int i = threadIdx.x; i < kState / 8; i += kThreads) {
          const uint4 one = reinterpret_cast<const uint4*>(room.state)[i];
          const uint4 other = reinterpret_cast<const uint4*>(room.d_state)[i];
          const unsigned a[4] = {one.x, one.y, one.z, one.w};
          const unsigned b[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 x = cuda::both_of<T>(a[j]), y = cuda::both_of<T>(b[j]);
            sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
          }
        }
        sum = cuda::lanes_sum<cuda::kWarp>(sum);
        if (thread == 0) room.both[warp] = sum;
      }
      __syncthreads();
      if (threadIdx.x == 0 && next_task() < tasks) {
        fetch_behind(pair_of(next_task(), next_member()), item ^ 1U);
      }

      // dR = solveᵀ·dU
      clear();
      forget();
#pragma unroll
      for (int l = 0; l < kChunk; l += 16) {
        if (l < row) continue;
        unsigned a[4], rest[4];
        Tile<kChunk>(room.solve[0]).a_turned(a, lane, row, l);
        Tile<kChunk>(room.solve[1]).a_turned(rest, lane, row, l);
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
          unsigned b[4];
          du_tile.b(b, lane, l, col + n * 16);
          multiply_add_two<T>(c[2 * n], c[2 * n + 1], rest, b);
          multiply_add_two<T>(c[2 * n], c[2 * n + 1], a, b);
        }
      }
      lay_tile(lane, c, row, col, room.dr);
      __syncthreads();

      // x = dY·Sᵀ
      clear();
      forget();
      add_product<T, kWidth, false, false>(lane, c, dy_tile, row, state_tile, col);
      dot_and_add(lane, c, room.q, row, col, numbers.e[low], numbers.e[high], dq,
                  room.dots[part][kQx]);
      // z' = dR·Sᵀ
      clear();
      forget();
      add_product<T, kWidth, false, false>(lane, c, dr_tile, row, state_tile, col);
      dot_and_add(lane, c, room.k, row, col, -numbers.beta[low] * numbers.e[low],
                  -numbers.beta[high] * numbers.e[high], dk, room.dots[part][kKz]);
      forget();
      float met[kTiles][4] = {};  // Q·Kᵀ, K·Kᵀ
      add_product<T, kWidth, false, true>(lane, met, (half == 0 ? q_tile : k_tile), row, k_tile,
                                          other_row, 0, row);
      // dM = dY·Uᵀ, and dR·Uᵀ.
      Tile<kWidth> rows(room.dy);
      rows.base += static_cast<unsigned>(half) * (dr_tile.base - dy_tile.base);
      clear();
      forget();
      add_product<T, kWidth, false, false>(lane, c, rows, row, u_tile, other_row, 0, row);
      {
        const float scale_low = half == 0 ? 1 : -numbers.beta[low];
        const float scale_high = half == 0 ? 1 : -numbers.beta[high];
        float sum_low = 0, sum_high = 0;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int column = other_row + n * 8;
          if (column > row + 8) continue;
          const bool far = column < row;
          float2 after = {1, 1};
          if (far)
            after = *reinterpret_cast<const float2*>(&fades.after[row / 16 - 1][column + 2 * t4]);
          float faded[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int t = i < 2 ? low : high, s = column + 2 * t4 + i % 2;
            // The diagonal is of M alone.
            const bool counts = half == 0 ? s <= t : s < t;
            float a = 0;
            if (far) {
              a = fades.within[t] * (i % 2 == 0 ? after.x : after.y);
            } else if (counts) {
              a = fades.near[t][s % 16];
            }
            const float both = counts ? c[n][i] * met[n][i] : 0;
            float& sum = i < 2 ? sum_low : sum_high;
            sum = fmaf(a, both, sum);
            faded[i] = counts ? a * c[n][i] * (i < 2 ? scale_low : scale_high) : 0;
            c[n][i] = both * (i < 2 ? scale_low : scale_high);
            if (half == 0) room.met[t * kChunk + (s + t) % kChunk] = c[n][i];
          }
          T* to = room.pairs + half * kPairs + place<kChunk>(low, column + 2 * t4);
          *reinterpret_cast<unsigned*>(to) = cuda::two_of<T>(faded[0], faded[1]);
          *reinterpret_cast<unsigned*>(to + 8 * kChunk) = cuda::two_of<T>(faded[2], faded[3]);
        }
        if (half == 1) {
          sum_columns(sum_low, sum_high);
          if (t4 == 0) {
            room.n_dots[part % 2][low] = sum_low;
            room.n_dots[part % 2][high] = sum_high;
          }
        }
      }
      __syncthreads();
      if (half == 1) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if (other_row + n * 8 > row + 8) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int t = i < 2 ? low : high, s = other_row + n * 8 + 2 * t4 + i % 2;
            room.met[t * kChunk + (s + t) % kChunk] += c[n][i];
          }
        }
      }
      if (next_task() < tasks) {
        if (threadIdx.x == 0) fetch_before(pair_of(next_task(), next_member()));
        fetch_dy(next_task(), next_member());
      }
      if (threadIdx.x < kChunk) {
        const int t = threadIdx.x;
        room.start[t] =
            all_parts(room.dots, kQx, t) - numbers.beta[t] * all_parts(room.dots, kKz, t);
      }
      // What the pairs owe to queries and keys.
      forget();
#pragma unroll
      for (int l = 0; l < kChunk; l += 16) {
        unsigned a_m[4], a_n[4];
        if (l <= row) {
          dm_tile.a(a_m, lane, row, l);
          dn_tile.a(a_n, lane, row, l);
#pragma unroll
          for (int n = 0; n < kTiles / 2; ++n) {
            unsigned b[4];
            k_tile.b(b, lane, l, col + n * 16);
            multiply_add_two<T>(dq[2 * n], dq[2 * n + 1], a_m, b);
            multiply_add_two<T>(dk[2 * n], dk[2 * n + 1], a_n, b);
          }
        }
        if (l >= row) {
          dm_tile.a_turned(a_m, lane, row, l);
          dn_tile.a_turned(a_n, lane, row, l);
#pragma unroll
          for (int n = 0; n < kTiles / 2; ++n) {
            unsigned b[4], other[4];
            q_tile.b(b, lane, l, col + n * 16);
            k_tile.b(other, lane, l, col + n * 16);
            multiply_add_two<T>(dk[2 * n], dk[2 * n + 1], a_m, b);
            multiply_add_two<T>(dk[2 * n], dk[2 * n + 1], a_n, other);
          }
        }
      }
      __syncthreads();

      // Back over the tokens: column i of H, a thread each, and the state before the chunk.
      if (threadIdx.x <= kChunk) {
        const int i = threadIdx.x;
        const bool column = i < kChunk;
        float h = 0, next = 1;
        if (column) {
          h = all_parts(room.dots, kKh, i);
        } else {
#pragma unroll
          for (int w = 0; w < kThreads / cuda::kWarp; ++w) h += room.both[w];
        }
        const float* cells = column ? room.met : room.start;
#pragma unroll 1
        for (int block = kChunk - 8; block >= 0; block -= 8) {
          // All are fetched, whether they count or not, before the first is stored.
          float cell[8], before[8];
          const int far = max(block / 16 - 1, 0);
          const float after = fades.after[far][i % kChunk];
          // Of the token before the block, which may lie in the 16 before.
          const float after_first = fades.after[max((block - 1) / 16 - 1, 0)][i % kChunk];
#pragma unroll
          for (int r = 0; r < 8; ++r) {
            const int t = block + r, last = max(t - 1, 0);
            cell[r] = cells[column ? t * kChunk + (i + t) % kChunk : t];
            const float near = fades.near[last][i % 16];
            before[r] = fades.within[last] * (r == 0 ? after_first : after);
            if (last / 16 == i / 16) before[r] = near;
            if (!column) before[r] = t == 0 ? 1 : numbers.e[last];
            if (column && t <= i) cell[r] = 0;
          }
#pragma unroll
          for (int r = 7; r >= 0; --r) {
            h = fmaf(next, h, cell[r]);
            cell[r] = h * before[r];
            next = numbers.g[block + r];
          }
#pragma unroll
          for (int r = 0; r < 8; ++r) {
            const int t = block + r;
            if (column) {
              room.met[t * kChunk + (i + t) % kChunk] = t > i ? cell[r] : 0;
            } else {
              room.start[t] = cell[r];
            }
          }
        }
      } else if (threadIdx.x >= kThreads / 2) {
        // dV, and dr·v: 16 threads have a token.
        constexpr int kEach = kChunk * 16 / (kThreads / 2);
        const int first = (static_cast<int>(threadIdx.x) - kThreads / 2) / 16;
        const int channel = static_cast<int>(threadIdx.x) % 16 * 8;
        uint4 values[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const int t = first + j * (kChunk / kEach);
          values[j] = make_uint4(0, 0, 0, 0);
          if (t < here.count) {
            values[j] = __ldg(reinterpret_cast<const uint4*>(
                v + here.v + t * args.v[1] + (here.head + member) * args.v[2] + channel));
          }
        }
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const int t = first + j * (kChunk / kEach);
          const float beta = numbers.beta[t];
          const uint4 bits = *reinterpret_cast<const uint4*>(room.dr + place<kWidth>(t, channel));
          const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
          const unsigned value[4] = {values[j].x, values[j].y, values[j].z, values[j].w};
          unsigned made_v[4];
          float sum = 0;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 gradient = cuda::both_of<T>(words[i]), with = cuda::both_of<T>(value[i]);
            made_v[i] = cuda::two_of<T>(beta * gradient.x, beta * gradient.y);
            sum = fmaf(gradient.x, with.x, fmaf(gradient.y, with.y, sum));
          }
          sum = cuda::lanes_sum<16>(sum);
          if (channel == 0) room.r_dots[t] = sum;
          if (t < here.count) {
            __stcs(
                reinterpret_cast<uint4*>(
                    out.dv + ((here.start + t) * args.value_heads + here.head + member) * kWidth +
                    channel),
                make_uint4(made_v[0], made_v[1], made_v[2], made_v[3]));
          }
        }
      } else if (threadIdx.x >= kThreads / 4 && next_task() < tasks) {
        cuda::barrier_wait(&room.behind_here, item ^ 1U);
        room.fades[item ^ 1U].fill(room.numbers[item ^ 1U].g,
                                   static_cast<int>(threadIdx.x) - kThreads / 4, kThreads / 4);
      }
      __syncthreads();
      for (int t = warp; t < here.count; t += kThreads / cuda::kWarp) {
        float sum = 0;
#pragma unroll
        for (int i = thread; i < kChunk; i += cuda::kWarp) {
          if (i < t) sum += room.met[t * kChunk + (i + t) % kChunk];
        }
        sum = cuda::lanes_sum<cuda::kWarp>(sum);
        if (thread == 0) {
          const bool on = mask == nullptr || mask[here.start + t];
          const std::int64_t at = (here.start + t) * args.value_heads + here.head + member;
          const float dg = sum + room.start[t];
          out.decay[at] = !on ? 0 : args.log_decay != 0 ? dg * numbers.g[t] : dg;
          out.beta[at] = !on ? 0
                             : room.r_dots[t] - numbers.e[t] * all_parts(room.dots, kKz, t) -
                                   (room.n_dots[0][t] + room.n_dots[1][t]);
        }
      }
    }

    // The normalisation's gradient: less what lies along the row.
    forget();
    const float scale = args.scale;
    if (args.normalise != 0) {
      float sums[4] = {};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = place<kWidth>(i == 0 ? low : high, col + n * 8 + 2 * t4);
          const float2 query = cuda::both_of<T>(*reinterpret_cast<const unsigned*>(room.q + at));
          const float2 key = cuda::both_of<T>(*reinterpret_cast<const unsigned*>(room.k + at));
          sums[i] = fmaf(dq[n][2 * i], query.x, fmaf(dq[n][2 * i + 1], query.y, sums[i]));
          sums[2 + i] = fmaf(dk[n][2 * i], key.x, fmaf(dk[n][2 * i + 1], key.y, sums[2 + i]));
        }
      }
      sum_columns(sums[0], sums[1]);
      sum_columns(sums[2], sums[3]);
      if (t4 == 0) {
        room.along[part][0][low] = sums[0];
        room.along[part][0][high] = sums[1];
        room.along[part][1][low] = sums[2];
        room.along[part][1][high] = sums[3];
      }
      __syncthreads();
    }
    const Factors& factors = made.factors[task];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = i == 0 ? low : high;
      float less_q = 0, less_k = 0;
      if (args.normalise != 0) {
        less_q = all_parts(room.along, 0, t) / (scale * scale);
        less_k = all_parts(room.along, 1, t);
      }
      const float factor_q = factors.q[t] * scale, factor_k = factors.k[t];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int at = place<kWidth>(t, col + n * 8 + 2 * t4);
        const float2 query = cuda::both_of<T>(*reinterpret_cast<const unsigned*>(room.q + at));
        const float2 key = cuda::both_of<T>(*reinterpret_cast<const unsigned*>(room.k + at));
        *reinterpret_cast<unsigned*>(room.dr + at) =
            cuda::two_of<T>(factor_q * fmaf(-less_q, query.x, dq[n][2 * i]),
                            factor_q * fmaf(-less_q, query.y, dq[n][2 * i + 1]));
        *reinterpret_cast<unsigned*>(room.pairs + at) =
            cuda::two_of<T>(factor_k * fmaf(-less_k, key.x, dk[n][2 * i]),
                            factor_k * fmaf(-less_k, key.y, dk[n][2 * i + 1]));
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && task + gridDim.x < tasks) fetch_keys(task + gridDim.x);
    int first = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(first));  // as in forget
    for (int i = first; i < kRows / 8; i += kThreads) {
      const int t = i / (kWidth / 8), channel = i % (kWidth / 8) * 8;
      if (t >= here.count) continue;
      const int from = place<kWidth>(t, channel);
      const std::int64_t to =
          ((here.start + t) * args.key_heads + task % key_heads) * kWidth + channel;
      __stcs(reinterpret_cast<uint4*>(out.dq + to),
             *reinterpret_cast<const uint4*>(room.dr + from));
      __stcs(reinterpret_cast<uint4*>(out.dk + to),
             *reinterpret_cast<const uint4*>(room.pairs + from));
    }
  }
}

template <class T>
void launch_gather(const KernelCall& call, const GatedDeltaRuleArgs& args, const Made<T>& made) {
  const std::int64_t tasks =
      chunks_of(args) * args.key_heads;  // fewer than 2^31: meet has as many blocks
  const GradientsOut<T> out{call.output<T>(0), call.output<T>(1), call.output<T>(2),
                            call.output<float>(3), call.output<float>(4)};
  cuda::launch(gather<T>, std::min<std::int64_t>(tasks, cuda::kMultiprocessors), kThreads,
               static_cast<int>(sizeof(GatherRoom<T>)), 1, static_cast<cudaStream_t>(call.queue),
               args, made, call.input<T>(2), call.input<T>(8), call.input<bool>(5),
               static_cast<unsigned>(tasks), out);
}

}  // namespace

template <class T>
void chunks_backward(const KernelCall& call) {
  const auto& args = call.as<GatedDeltaRuleArgs>();
  const Made<T> made(args, call.workspace, true);
  launch_meet<T, true>(call, args, made);
  if (made.groups == 2) {
    launch_walk<T, 2, true>(call, args, made, nullptr, nullptr);
    launch_walk_back<T, 2>(call, args, made);
  } else {
    launch_walk<T, 4, true>(call, args, made, nullptr, nullptr);
    launch_walk_back<T, 4>(call, args, made);
  }
  launch_gather<T>(call, args, made);
}

template void chunks_backward<F16>(const KernelCall& call);
template void chunks_backward<BF16>(const KernelCall& call);

}  // namespace mlxtape::ops
