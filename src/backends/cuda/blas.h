// Products of matrices by cuBLASLt, which is opened when the first one is wanted.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "mlxtape/base/dtype.h"

namespace mlxtape::cuda {

// What is done to a product before it is stored.
enum class BlasEpilogue : std::int32_t { kNone, kBias, kGeluTanh, kBiasGeluTanh };

// c [m, n] = a [m, k] · b [k, n], `batch` times. Rows and columns as the caller counts them: c has
// contiguous rows; of the two strides of a and of b one is 1, the other at least the length it steps over.
struct BlasShape {
  std::int64_t m, n, k;
  std::int64_t a_row, a_col, b_row, b_col;
  std::int64_t batch, a_batch, b_batch, c_batch;  // strides in elements; of a and b may be 0
  DType in, out;                                  // f32, f16, bf16; out like in, or f32
  BlasEpilogue epilogue;
};

struct BlasMemory {
  const void* a;
  const void* b;
  const void*
      added;  // to the product, times beta; c or another matrix like it; not read if beta is 0
  void* c;
  const void* bias;  // [n] of out's type, aligned to 16 bytes
  void* workspace;   // aligned to 256 bytes
  std::size_t workspace_bytes;
};

// c = epilogue(a · b + beta · added) on the stream, in f32 arithmetic, the same bits every time. False, and
// nothing done, where cuBLASLt has no such function; throws kBackend where it fails or is not there. How a
// shape is best done is asked once and kept; nothing is timed or allocated on the device.
bool blas_product(const BlasShape& shape, const BlasMemory& memory, float beta,
                  cudaStream_t stream);

// What it may use for these, by the shape alone.
std::size_t blas_workspace(std::int64_t m, std::int64_t n, std::int64_t batch);

}  // namespace mlxtape::cuda
