// Launches with more shared memory than a block has by default, and in clusters.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <utility>

#include "backends/cuda/device/ring.cuh"
#include "backends/cuda/error.h"

namespace mlxtape::cuda {

// Of an H100 or H200. Grids and scratch memory follow from the shape alone, so that the order of
// sums, and with it every bit, does not depend on the device.
constexpr int kMultiprocessors = 132;
constexpr int kSharedBytes = 227 * 1024;  // most that one block may have

// cluster: consecutive blocks that may reach each other's shared memory; 1: none.
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};

  Launch(std::int64_t blocks, int threads, int shared, int cluster, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared);
    config.stream = stream;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  Launch(const Launch&) = delete;  // config points into it
  Launch& operator=(const Launch&) = delete;
};

// Lets kernel have as much shared memory as there is. That holds for one device, so each thread remembers
// what it asked for where: asking takes longer than a launch.
inline void allow_shared(const void* kernel, int shared) {
  if (shared <= 32 * 1024) return;  // 48 KiB, less what the kernel has of its own, needs no asking
  struct Asked {
    const void* kernel;
    int device;
  };
  constexpr std::size_t kRemembered = 256;
  thread_local std::array<Asked, kRemembered> asked{};
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  Asked& slot = asked[reinterpret_cast<std::uintptr_t>(kernel) / 16 % kRemembered];
  if (slot.kernel == kernel && slot.device == device) return;
  cudaFuncAttributes has{};
  check(cudaFuncGetAttributes(&has, kernel), "asking for shared memory");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSharedBytes - static_cast<int>(has.sharedSizeBytes)),
        "asking for shared memory");
  slot = {kernel, device};
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), std::int64_t blocks, int threads, int shared, int cluster,
            cudaStream_t stream, Args&&... args) {
  allow_shared(reinterpret_cast<const void*>(kernel), shared);
  Launch how(blocks, threads, shared, cluster, stream);
  how.config.numAttrs = cluster > 1 ? 1 : 0;
  check(cudaLaunchKernelEx(&how.config, kernel, std::forward<Args>(args)...), "the launch");
}

// How many clusters of this kernel run side by side on the device; to be asked once, it takes a while.
template <class... Params>
int clusters_at_once(void (*kernel)(Params...), int cluster, int threads, int shared) {
  allow_shared(reinterpret_cast<const void*>(kernel), shared);
  const Launch how(cluster, threads, shared, cluster, nullptr);
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, kernel, &how.config), "counting clusters");
  return count;
}

// *p = v in the shared memory of another block of the cluster.
__device__ __forceinline__ void store_in_peer(float* p, int peer, float v) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(peer));
  asm volatile("st.shared::cluster.f32 [%0], %1;" : : "r"(address), "f"(v) : "memory");
}

}  // namespace mlxtape::cuda
