// How the copy engine finds tiles in device memory (wgmma.cuh). Made by the host for each launch, without the device,
// and handed to the kernel as a __grid_constant__ parameter: a captured graph keeps it with the launch.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "backends/cuda/error.h"
#include "mlxtape/base/half.h"

namespace mlxtape::cuda {

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto found = [] {
    void* fn = nullptr;
    cudaDriverEntryPointQueryResult how{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault,
                                           &how),
          "finding cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(fn);
  }();
  if (found == nullptr) {
    throw Error(Errc::kBackend, "cuda: the driver must have cuTensorMapEncodeTiled, got none");
  }
  return found;
}

// Tiles of `rows` rows of 64 numbers, swizzled; zeros past the ends. size, the quickest axis first: each below 2^32;
// step: bytes from one to the next of every axis but the first. The address and the steps are multiples of 16.
template <class T, int kAxes>
CUtensorMap tiles_of(const T* from, const cuuint64_t (&size)[kAxes],
                     const cuuint64_t (&step)[kAxes - 1], int rows) {
  static_assert(sizeof(T) == 2);
  CUtensorMap map{};
  cuuint32_t box[kAxes] = {64, static_cast<cuuint32_t>(rows)}, every[kAxes] = {1, 1};
  for (int i = 2; i < kAxes; ++i) box[i] = every[i] = 1;
  const CUresult status = tensor_map_encoder()(
      &map,
      std::is_same_v<T, BF16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      kAxes, const_cast<T*>(from), size, step, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(Errc::kBackend, "cuda: cuTensorMapEncodeTiled must succeed, got error " +
                                    std::to_string(static_cast<int>(status)));
  }
  return map;
}

// Of a matrix [count, high, wide] without gaps.
template <class T>
CUtensorMap tensor_map(const T* from, std::int64_t wide, std::int64_t high, std::int64_t count,
                       int rows) {
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(wide), static_cast<cuuint64_t>(high),
                              static_cast<cuuint64_t>(count)};
  const cuuint64_t step[2] = {size[0] * sizeof(T), size[0] * size[1] * sizeof(T)};
  return tiles_of(from, size, step, rows);
}

}  // namespace mlxtape::cuda
