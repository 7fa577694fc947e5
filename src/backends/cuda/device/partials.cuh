// Sums that blocks made for themselves and left in scratch memory, added up by a second kernel in one
// fixed order.
#pragma once

#include <cuda_runtime.h>

#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

constexpr int kPartialShares = 16;  // warps that share the rows of 32 columns

template <class Out>
__global__ void __launch_bounds__(kWarp* kPartialShares)
    sum_partials_kernel(const float* parts, int count, std::int64_t n, Out* out) {
  __shared__ float room[kPartialShares][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int share = threadIdx.x / kWarp;
  const std::int64_t c = std::int64_t{blockIdx.x} * kWarp + lane;
  float sum = 0;
  if (c < n) {
#pragma unroll 4
    for (int p = share; p < count; p += kPartialShares) sum += __ldcs(parts + p * n + c);
  }
  room[share][lane] = sum;
  __syncthreads();
  if (share != 0 || c >= n) return;
#pragma unroll
  for (int s = 1; s < kPartialShares; ++s) sum += room[s][lane];
  out[c] = narrow<Out>(sum);
}

// out [n] = the sum of the rows of parts [count, n]; zeros where count is 0.
template <class Out>
void sum_partials(const float* parts, std::int64_t count, std::int64_t n, Out* out,
                  cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((n + kWarp - 1) / kWarp);
  sum_partials_kernel<<<blocks, kWarp * kPartialShares, 0, stream>>>(parts, static_cast<int>(count),
                                                                     n, out);
}

}  // namespace mlxtape::cuda
