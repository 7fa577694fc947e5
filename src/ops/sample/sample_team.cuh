// The blocks that share a row of sample: what they tell each other, and where a running sum passes a number.
//
// A team is a cluster, or one block. Numbers go through two boards in turn, in every block's shared memory: who writes
// on a board again has met all others since they read it.
#pragma once

#include "backends/cuda/device/ring.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "formulas.h"

namespace mlxtape::ops::sampling {

using cuda::kAll;
using cuda::kWarp;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;

using Number = unsigned long long;  // as shuffles and atomics have it

__device__ __forceinline__ unsigned lane_of() { return threadIdx.x % kWarp; }
__device__ __forceinline__ unsigned warp_of() { return threadIdx.x / kWarp; }

// ---- a warp ----

__device__ __forceinline__ Number warp_sum(Number v) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAll, v, step);
  return v;
}
__device__ __forceinline__ Number warp_least(Number v) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) v = min(v, __shfl_xor_sync(kAll, v, step));
  return v;
}
// With what comes before in the order of the lanes.
template <class N>
__device__ __forceinline__ N warp_running_sum(N v) {
#pragma unroll
  for (unsigned step = 1; step < kWarp; step *= 2) {
    const N left = __shfl_up_sync(kAll, v, step);
    if (lane_of() >= step) v += left;
  }
  return v;
}

// ---- a team ----

template <int kBlocks>
struct Boards {
  Number told[2][kBlocks];
  Number of_warp[kWarps];
};

template <int kBlocks>
struct Team {
  Boards<kBlocks>& boards;
  unsigned block;     // of the team
  unsigned turn = 0;  // of the boards

  __device__ void meet() const {
    if constexpr (kBlocks > 1) {
      __syncwarp();
      cuda::cluster_sync();
    } else {
      __syncthreads();
    }
  }
  // begin() early, begun() before the first block writes to another, by all threads: then all run.
  __device__ void begin() const {
    if constexpr (kBlocks > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  __device__ void begun() const {
    if constexpr (kBlocks > 1) {
      __syncwarp();
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
  }
  // The same variable of another block.
  template <class V>
  static __device__ V* in_block(V* mine, unsigned other) {
    if constexpr (kBlocks == 1) {
      return mine;
    } else {
      Number address;
      asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(mine), "r"(other));
      return reinterpret_cast<V*>(address);
    }
  }

  // By all threads; the same mine in each of a block.
  __device__ const Number* tell(Number mine) {
    Number* told = boards.told[turn];
    turn ^= 1U;
    if (threadIdx.x < kBlocks) *in_block(&told[block], threadIdx.x) = mine;
    meet();
    return told;
  }
  __device__ Number sum(Number mine) {
    mine = warp_sum(mine);
    if (lane_of() == 0) boards.of_warp[warp_of()] = mine;
    __syncthreads();
    const Number* told = tell(warp_sum(boards.of_warp[lane_of()]));
    Number all = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) all += told[b];
    return all;
  }
  __device__ Number least(Number mine) {
    mine = warp_least(mine);
    if (lane_of() == 0) boards.of_warp[warp_of()] = mine;
    __syncthreads();
    const Number* told = tell(warp_least(boards.of_warp[lane_of()]));
    Number all = told[0];
#pragma unroll
    for (int b = 1; b < kBlocks; ++b) all = min(all, told[b]);
    return all;
  }

  // value(i) for i < n are the numbers of this block, those of the blocks one after the other. True in one thread of the
  // team: `at` is where their running sum passes target(sum of all), which is less than that sum.
  template <class Value, class Target>
  __device__ __forceinline__ bool pass(int n, const Value& value, const Target& target, int& at) {
    // Neighbours of a thread are an odd number, so that lanes read different banks.
    const int each = (n + kThreads - 1) / kThreads | 1;
    const int begin = static_cast<int>(threadIdx.x) * each;
    Number own = 0;
    for (int i = begin; i < min(begin + each, n); ++i) own += value(i);
    const Number to_lane = warp_running_sum(own);
    if (lane_of() == kWarp - 1) boards.of_warp[warp_of()] = to_lane;
    __syncthreads();
    const Number to_warp = warp_running_sum(boards.of_warp[lane_of()]);
    const Number of_block = __shfl_sync(kAll, to_warp, kWarp - 1);
    const Number other_warps = __shfl_sync(kAll, to_warp, (warp_of() + kWarp - 1) % kWarp);
    const Number* told = tell(of_block);
    Number before = 0, all = 0;
#pragma unroll
    for (unsigned b = 0; b < kBlocks; ++b) {
      if (b < block) before += told[b];
      all += told[b];
    }
    if (warp_of() > 0) before += other_warps;
    before += to_lane - own;
    Number rest = target(all);
    const bool mine = rest >= before && rest - before < own;
    const unsigned who = __ballot_sync(kAll, mine);
    if (who == 0) return false;
    const int lane = __ffs(static_cast<int>(who)) - 1;
    rest = __shfl_sync(kAll, rest - before, lane);
    const int from = __shfl_sync(kAll, begin, lane);
    for (int i = from + static_cast<int>(lane_of());; i += kWarp) {
      const Number running = warp_running_sum(i < min(from + each, n) ? Number{value(i)} : 0);
      const unsigned past = __ballot_sync(kAll, running > rest);
      if (past != 0) {
        at = i;
        return static_cast<int>(lane_of()) == __ffs(static_cast<int>(past)) - 1;
      }
      rest -= __shfl_sync(kAll, running, kWarp - 1);
    }
  }
};

}  // namespace mlxtape::ops::sampling
