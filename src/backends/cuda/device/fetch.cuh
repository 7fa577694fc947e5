// Copies of a few bytes from memory to shared memory that a thread starts now and waits for later. What a
// thread fetches it may read after its own wait, without a barrier; others need one.
#pragma once

#include "backends/cuda/device/ring.cuh"

namespace mlxtape::cuda {

// Zeros where not in; then from may be any address. Whole packs pass the first-level cache by.
template <int kBytes = 16>
__device__ __forceinline__ void fetch(void* to, const void* from, bool in) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(in ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(shared_address(to)), "l"(from), "n"(kBytes), "r"(in ? kBytes : 0)
                 : "memory");
  }
}

// 16 bytes that other blocks fetch too: they stay in the first-level cache.
__device__ __forceinline__ void fetch_common(void* to, const void* from, bool in) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(in ? 16 : 0)
               : "memory");
}

// Ends a batch of copies, empty or not.
__device__ __forceinline__ void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All batches but the latest kLatest have arrived.
template <int kLatest>
__device__ __forceinline__ void wait_batches() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kLatest) : "memory");
}

}  // namespace mlxtape::cuda
