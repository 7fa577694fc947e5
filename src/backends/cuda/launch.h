// Launching clusters of blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/error.h"

namespace mlxtape::cuda {

// How many clusters run at once on this device; asked once per kernel, it takes a while. Also
// allows the kernel its shared memory.
template <class Kernel>
int clusters_of(Kernel* kernel, int blocks, int threads, int shared_bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "asking for shared memory");
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "counting clusters");
  return clusters;
}

template <class Kernel, class... Args>
void launch_cluster(Kernel* kernel, int blocks, std::int64_t clusters, int threads,
                    int shared_bytes, cudaStream_t stream, Args... args) {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  config.gridDim = static_cast<unsigned>(clusters * blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args...), "the launch");
}

}  // namespace mlxtape::cuda
