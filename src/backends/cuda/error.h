// cudaError_t as Error.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "mlxtape/base/error.h"

namespace mlxtape::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // else the next check would find it again
  throw Error(status == cudaErrorMemoryAllocation ? Errc::kOutOfMemory : Errc::kBackend,
              std::string("cuda: ") + what + " must succeed, got " + cudaGetErrorString(status));
}

}  // namespace mlxtape::cuda
