// Blocks of a cluster that share a row: each tells the others a pair of numbers, once.
#pragma once

#include "backends/cuda/device/ring.cuh"

namespace mlxtape::cuda {

// In shared memory; kBlocks > 1. No barrier at the end: a block may leave when it has heard from all, and
// then nothing more will be written to it.
template <int kBlocks>
struct Meeting {
  float2 told[kBlocks];
  std::uint64_t heard;

  // By all threads of the block, early.
  __device__ void open() {
    if (threadIdx.x == 0) {
      barrier_init(&heard, 1);
      barrier_init_done();
      barrier_arrive_expect(&heard, sizeof told);
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  // By all threads of the block; the same mine in each.
  __device__ const float2* tell(float2 mine) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the others have opened
    if (threadIdx.x < kBlocks) send(&told[cluster_rank()], mine, &heard, threadIdx.x);
    barrier_wait<true>(&heard, 0);
    return told;
  }
};
template <>
struct Meeting<1> {
  __device__ void open() {}
};

}  // namespace mlxtape::cuda
