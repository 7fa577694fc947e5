// Tensor-core products of 16-bit numbers with sums of f32: tiles of 16 × 16 by 16 × 8 from rows in shared memory.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "backends/cuda/device/ring.cuh"
#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

// Four 8 × 8 matrices, whose rows' addresses in shared memory the lanes give, eight after eight.
__device__ __forceinline__ void load_matrices_at(unsigned (&r)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
__device__ __forceinline__ void load_turned_at(unsigned (&r)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
__device__ __forceinline__ void store_turned_at(unsigned row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
  load_matrices_at(r, shared_address(row));
}
__device__ __forceinline__ void load_turned(unsigned (&r)[4], const void* row) {
  load_turned_at(r, shared_address(row));
}

// a [16, 16] as the first factor, from rows [m][k] or, turned, from rows [k][m].
template <class T>
__device__ __forceinline__ void load_a(unsigned (&a)[4], const T* at, int pitch) {
  const int lane = threadIdx.x % kWarp;
  load_matrices(a, at + lane % 16 * pitch + lane / 16 * 8);
}
template <class T>
__device__ __forceinline__ void load_a_turned(unsigned (&a)[4], const T* at, int pitch) {
  const int lane = threadIdx.x % kWarp;
  load_turned(a, at + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}
// Two second factors [16, 8] side by side, b[0..1] and b[2..3], from rows [k][n], or from rows [n][k].
template <class T>
__device__ __forceinline__ void load_b(unsigned (&b)[4], const T* at, int pitch) {
  const int lane = threadIdx.x % kWarp;
  load_turned(b, at + lane % 16 * pitch + lane / 16 * 8);
}
template <class T>
__device__ __forceinline__ void load_b_turned(unsigned (&b)[4], const T* at, int pitch) {
  const int lane = threadIdx.x % kWarp;
  load_matrices(b, at + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}

// Two neighbours, rounded, as the factors have them.
template <class T>
__device__ __forceinline__ unsigned two_of(float first, float second) {
  unsigned both;
  if constexpr (std::is_same_v<T, BF16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  }
  return both;
}

template <class T>
__device__ __forceinline__ float2 both_of(unsigned pair) {
  if constexpr (std::is_same_v<T, BF16>) {
    return {__uint_as_float(pair << 16U), __uint_as_float(pair & 0xffff0000U)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

template <class T>
__device__ __forceinline__ void multiply_add16(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1) {
  if constexpr (std::is_same_v<T, BF16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 16 bytes from device memory to shared memory, later; zeros where !there.
__device__ __forceinline__ void copy_later(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace mlxtape::cuda
