// attention_step in 16 bits, on the tensor cores.
//
// A warp takes 16 keys at a time. Lane = 4·g + c. First scores [16 keys, 8 rows] = keys · queriesᵀ: a product does not
// mind in which order channels are summed up, so a lane takes 8 neighbours of key g in one access and gives them to two
// products of depth 16 as if they were the ones that belong to it. Then sums [channels, rows] += valuesᵀ · weightsᵀ: a
// lane takes 8 channels of four keys, and puts those of two keys together in pairs. So nothing goes through shared
// memory but the warps' results at the end, and all that is read is in registers when it is needed: half of it, 8 KiB
// for each warp, is on its way at a time, which is twice what the memory asks for where 8 warps are on a multiprocessor.
#pragma once

#include "attention_step_cut.cuh"
#include "backends/cuda/device/mma16.cuh"

namespace mlxtape::ops {

// 8 × 8 numbers of 16 bits, of which a lane has two neighbours of row lane / 4, turned around.
__device__ __forceinline__ unsigned turned(unsigned pair) {
  unsigned out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// As cuda::load_pack, but without a branch: sixteen of them go out one after the other.
template <class T>
__device__ __forceinline__ cuda::Pack<T> pack_or_zeros(const T* row, int channel, int channels,
                                                       bool there) {
  cuda::Pack<T> pack{};
  asm volatile(
      "{ .reg .pred there;\n setp.ne.u32 there, %5, 0;\n"
      "@there ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(pack.word[0]), "+r"(pack.word[1]), "+r"(pack.word[2]), "+r"(pack.word[3])
      : "l"(row + channel), "r"(there && channel < channels ? 1U : 0U));
  return pack;
}

// The softmax of rows 2c and 2c + 1 so far, in powers of two.
struct StepSoftmax {
  float most[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // over this lane's keys

  // Scores of keys g (i = 0, 1) and g + 8 (i = 2, 3) to weights in their place. keep: what sums so far are to be
  // multiplied with.
  __device__ __forceinline__ void take(float (&scores)[4], float (&keep)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = fmaxf(scores[i], scores[2 + i]);
#pragma unroll
      for (int step = 4; step < cuda::kWarp; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(cuda::kAll, largest, step));
      }
      const float next = fmaxf(most[i], largest), shift = next == -INFINITY ? 0 : next;
      keep[i] = exp2f(most[i] - shift);
      most[i] = next;
      scores[i] = exp2f(scores[i] - shift);
      scores[2 + i] = exp2f(scores[2 + i] - shift);
      sum[i] = fmaf(sum[i], keep[i], scores[i] + scores[2 + i]);
    }
  }
};

// kSize: the wider of keys and values, filled up to 64, 128 or 256.
template <class T, int kSize>
__global__ void __launch_bounds__(kStepThreads, 2)
    step_half(AttentionStepArgs args, StepCut cut, const T* q, const T* k, const T* v,
              const std::int32_t* lengths, T* keys, T* values, StepParts parts) {
  __shared__ StepRoom<kSize> room;
  cuda::hold_next_wait_turn();
  const StepPlace p(args, cut, lengths);
  if (p.count <= 0) return;
  const auto dim = static_cast<int>(args.dim), value_dim = static_cast<int>(args.value_dim);
  const StepRowsOf<T> key_rows(args, p, keys, k, args.k, dim);
  const StepRowsOf<T> value_rows(args, p, values, v, args.v, value_dim);
  if (p.tile == 0) {
    key_rows.store_new(p.count, dim);
    value_rows.store_new(p.count, value_dim);
  }
  const int lane = threadIdx.x % cuda::kWarp, warp = threadIdx.x / cuda::kWarp;
  const int g = lane / 4, c = lane % 4, r = p.tile * kStepRows + g;
  const float factor = args.scale * kStepLog2E;

  cuda::Pack<T> query[kSize / 32];
  const std::int64_t head = p.kh * cut.group + r % cut.group;
  const T* query_row = q + p.b * args.q[0] + r / cut.group * args.q[1] + head * args.q[2];
#pragma unroll
  for (int s = 0; s < kSize / 32; ++s) {
    query[s] = pack_or_zeros(query_row, 32 * s + 8 * c, dim, r < cut.rows);
  }
  const StepRange ranges[2] = {range_of(args, cut, p, p.tile * kStepRows + 2 * c),
                               range_of(args, cut, p, p.tile * kStepRows + 2 * c + 1)};
  StepSoftmax softmax;
  float sums[kSize / 64][4][4] = {};
  for (int j = 16 * warp; j < p.count; j += kStepKeys) {
    cuda::Pack<T> key[kSize / 32][2], value[kSize / 64][4];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = j + g + 8 * e;
      const T* row = key_rows.row(at);
#pragma unroll
      for (int s = 0; s < kSize / 32; ++s) {
        key[s][e] = pack_or_zeros(row, 32 * s + 8 * c, dim, at < p.count);
      }
    }
    float scores[4] = {}, others[4] = {};  // two chains of products, each half as long
#pragma unroll
    for (int s = 0; s < kSize / 32; ++s) {
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const unsigned a[4] = {key[s][0].word[w], key[s][1].word[w], key[s][0].word[w + 1],
                               key[s][1].word[w + 1]};
        cuda::multiply_add16<T>(w == 0 ? scores : others, a, query[s].word[w],
                                query[s].word[w + 1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // on their way while the weights are made
      const int at = j + 2 * c + e % 2 + e / 2 * 8;
      const T* row = value_rows.row(at);
#pragma unroll
      for (int u = 0; u < kSize / 64; ++u) {
        value[u][e] = pack_or_zeros(row, 64 * u + 8 * g, value_dim, at < p.count);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = j + g + i / 2 * 8;
      const StepRange& range = ranges[i % 2];
      const bool counts = at >= range.start && at < range.stop;
      scores[i] = counts ? (scores[i] + others[i]) * factor : -INFINITY;
    }
    float keep[2];
    softmax.take(scores, keep);
    const unsigned near = turned(cuda::two_of<T>(scores[0], scores[1]));
    const unsigned far = turned(cuda::two_of<T>(scores[2], scores[3]));
    const bool scaled = __any_sync(cuda::kAll, keep[0] != 1 || keep[1] != 1);
#pragma unroll
    for (int u = 0; u < kSize / 64; ++u) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float(&sum)[4] = sums[u][w];
        if (scaled) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] *= keep[i % 2];
        }
        const unsigned word[4] = {value[u][0].word[w], value[u][1].word[w], value[u][2].word[w],
                                  value[u][3].word[w]};
        const unsigned a[4] = {
            __byte_perm(word[0], word[1], 0x5410), __byte_perm(word[0], word[1], 0x7632),
            __byte_perm(word[2], word[3], 0x5410), __byte_perm(word[2], word[3], 0x7632)};
        cuda::multiply_add16<T>(sum, a, near, far);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int step = 4; step < cuda::kWarp; step *= 2) {
      softmax.sum[i] += __shfl_xor_sync(cuda::kAll, softmax.sum[i], step);
    }
    if (g == 0) {
      room.most[warp][2 * c + i] = softmax.most[i];
      room.sum[warp][2 * c + i] = softmax.sum[i];
    }
#pragma unroll
    for (int u = 0; u < kSize / 64; ++u) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        room.sums[warp][2 * c + i][64 * u + 8 * g + 2 * w] = sums[u][w][i];
        room.sums[warp][2 * c + i][64 * u + 8 * g + 2 * w + 1] = sums[u][w][2 + i];
      }
    }
  }
  room.leave(cut, p, value_dim, parts);
  cuda::next_may_start();
}

}  // namespace mlxtape::ops
