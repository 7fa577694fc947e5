// Products of small matrices of f32 in shared memory, by all warps of a block, on the tensor cores. Each factor is
// split into two parts of tf32, v = high + low with 11 bits each, and high·high + high·low + low·high is summed in
// f32: what is left out is below 2^-22 of a product. Sizes are multiples of 16 rows and 8 columns and depth, for
// which the caller fills up with zeros.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

// Element (i, l) is at[i·row + l·col]: a matrix or its transpose.
struct Factor {
  const float* at;
  int row, col;
};

struct Split {
  unsigned high, low;
  __device__ explicit Split(float v) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(v));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(v - __uint_as_float(high)));
  }
};

__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c [m, n] = (or +=) a [m, depth] · b [depth, n], b an array of rows b_pitch apart, or turned around. A warp has
// one tile of 16 × 8 after another. The caller synchronises before and after.
__device__ __forceinline__ void product(bool add, Factor a, Factor b, float* c, int c_pitch, int m,
                                        int n, int depth) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int g = lane / 4, t = lane % 4;
  const int across = n / 8, tiles = m / 16 * across;
  for (int tile = warp; tile < tiles; tile += warps) {
    const int row = tile / across * 16 + g, col = tile % across * 8;
    float* out = c + row * c_pitch + col + 2 * t;
    float sum[4] = {};
    if (add) {
      sum[0] = out[0];
      sum[1] = out[1];
      sum[2] = out[8 * c_pitch];
      sum[3] = out[8 * c_pitch + 1];
    }
    const float* left = a.at + row * a.row + t * a.col;
    const float* right = b.at + t * b.row + (col + g) * b.col;
    for (int l = 0; l < depth; l += 8) {
      const Split a0(left[0]), a1(left[8 * a.row]), a2(left[4 * a.col]),
          a3(left[8 * a.row + 4 * a.col]);
      const Split b0(right[0]), b1(right[4 * b.row]);
      const unsigned high_a[4] = {a0.high, a1.high, a2.high, a3.high};
      const unsigned low_a[4] = {a0.low, a1.low, a2.low, a3.low};
      const unsigned high_b[2] = {b0.high, b1.high}, low_b[2] = {b0.low, b1.low};
      multiply_add(sum, low_a, high_b);
      multiply_add(sum, high_a, low_b);
      multiply_add(sum, high_a, high_b);
      left += 8 * a.col;
      right += 8 * b.row;
    }
    out[0] = sum[0];
    out[1] = sum[1];
    out[8 * c_pitch] = sum[2];
    out[8 * c_pitch + 1] = sum[3];
  }
}

}  // namespace mlxtape::cuda
