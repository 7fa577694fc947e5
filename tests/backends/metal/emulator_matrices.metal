// A product by simdgroup matrices: a threadgroup of 4 simdgroups makes 32x32 elements of c = a bᵀ.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

struct ProductArgs {
  uint m, n, k;
};

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void product(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device T* c [[buffer(2)]],
    constant ProductArgs& args [[buffer(3)]], uint2 tile [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  constexpr int kStep = 16, kRow = kStep + 8;
  threadgroup T as[32 * kRow], bs[32 * kRow];
  threadgroup float out[32 * 36];
  simdgroup_matrix<float, 8, 8> sums[2][2];
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  const uint m0 = tile.y * 32, n0 = tile.x * 32;
  for (uint k0 = 0; k0 < args.k; k0 += kStep) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tid; i < 32 * kStep; i += 128) {
      const uint row = i / kStep, k = i % kStep;
      const bool is_in = k0 + k < args.k;
      as[row * kRow + k] = is_in && m0 + row < args.m ? a[ulong(m0 + row) * args.k + k0 + k] : T(0);
      bs[row * kRow + k] = is_in && n0 + row < args.n ? b[ulong(n0 + row) * args.k + k0 + k] : T(0);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < kStep; k += 8) {
      simdgroup_matrix<T, 8, 8> fa[2], fb[2];
      for (int i = 0; i < 2; ++i)
        simdgroup_load(fa[i], as + ((simd / 2) * 16 + i * 8) * kRow + k, kRow);
      for (int j = 0; j < 2; ++j) {
        simdgroup_load(fb[j], bs + ((simd % 2) * 16 + j * 8) * kRow + k, kRow, ulong2(0, 0), true);
      }
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j)
          simdgroup_multiply_accumulate(sums[i][j], fa[i], fb[j], sums[i][j]);
      }
    }
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      simdgroup_store(sums[i][j], out + ((simd / 2) * 16 + i * 8) * 36 + (simd % 2) * 16 + j * 8,
                      36);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tid; i < 32 * 32; i += 128) {
    const uint row = i / 32, column = i % 32;
    if (m0 + row < args.m && n0 + column < args.n) {
      c[ulong(m0 + row) * args.n + n0 + column] = T(out[row * 36 + column]);
    }
  }
}
template [[host_name("product_f32")]] [[kernel]] decltype(product<float>) product<float>;
template [[host_name("product_f16")]] [[kernel]] decltype(product<half>) product<half>;
template [[host_name("product_bf16")]] [[kernel]] decltype(product<bfloat>) product<bfloat>;

// Where each element of a matrix lies, and the matrix that has ones on its diagonal.
kernel void places(device float* first [[buffer(0)]], device float* second [[buffer(1)]],
                   device float* diagonal [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float room[64];
  room[lane] = float(lane);
  room[lane + 32] = float(lane + 32);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 m;
  simdgroup_load(m, (threadgroup const float*)room);
  first[lane] = m.thread_elements()[0];
  second[lane] = m.thread_elements()[1];
  simdgroup_store(simdgroup_float8x8(1.0f), diagonal, 8);
}
