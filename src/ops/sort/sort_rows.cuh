// Rows of up to kMostSorted columns, a block each, and how results of the sort kernels are written.
#pragma once

#include <cstdint>

#include "backends/cuda/device/launch.cuh"
#include "sort_block.cuh"
#include "sort_keys.h"

namespace mlxtape::ops {

namespace {

template <class T>
__device__ __forceinline__ Entry entry_of(T v, std::int64_t index, bool down) {
  return static_cast<Entry>(key_in_order(v, down)) << 32U | static_cast<unsigned>(index);
}

template <class T>
struct Result {
  const T* x;
  T* values;  // may be null
  unsigned* indices;
  std::int64_t cols, keep;  // of x and of the results
  __device__ void put(std::int64_t row, std::int64_t at, Entry e) const {
    if (at >= keep) return;
    const auto i = static_cast<unsigned>(e);
    indices[row * keep + at] = i;
    if (values != nullptr) values[row * keep + at] = x[row * cols + i];
  }
};

template <class T, int kItems>
__global__ void __launch_bounds__(1024) sort_rows(bool down, Result<T> result) {
  cuda::wait_turn();
  extern __shared__ Entry room[];
  const std::int64_t row = blockIdx.x;
  Entry e[kItems];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const std::int64_t i = std::int64_t{j} * blockDim.x + threadIdx.x;
    e[j] = i < result.cols ? entry_of(result.x[row * result.cols + i], i, down) : kLastEntry;
  }
  block_sort(e, room);
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    result.put(row, std::int64_t{threadIdx.x} * kItems + j, e[j]);
  }
}

template <class T>
void launch_sort_rows(std::int64_t rows, bool down, const Result<T>& result, cudaStream_t stream) {
  const BlockSize size = block_for(result.cols);
  const auto kernel = size.items == kMostItems ? sort_rows<T, kMostItems> : sort_rows<T, 8>;
  cuda::launch(kernel, rows, size.threads, size.shared, 1, stream, down, result);
}

}  // namespace

}  // namespace mlxtape::ops
