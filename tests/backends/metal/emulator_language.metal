// What the language has and C++ has not, a kernel for each part; the tests compute the same in C++.
#include <metal_simdgroup>
#include <metal_stdlib>
using namespace metal;

constant int offset [[function_constant(0)]];
constant bool has_bias [[function_constant(1)]];
constant float factor [[function_constant(2)]];
constant float table[4] = {1.5, -2.0, 0.25, 1e2};

// Types: what rounds when, what a literal is, where the bytes lie.
kernel void scalars(device float* y [[buffer(0)]]) {
  const half h = half(1.0f / 3.0f);
  const bfloat b = bfloat(1.0f / 3.0f);
  y[0] = h;
  y[1] = b;
  y[2] = h + h * h;  // two roundings
  y[3] = float(h) + float(h) * float(h);
  y[4] = b / bfloat(3.0f);
  y[5] = h * 3;
  y[6] = h * 0.1f;   // a float: no rounding to half
  y[7] = 0.1 + 0.2;  // floats, not doubles
  y[8] = 1.5h + float(2.0bf);
  y[9] = float(as_type<ushort>(h));
  y[10] = as_type<float>(0x40490fdbu);
  y[11] = float(half(65520.0f));  // rounds up to infinity
  y[12] = float(half(1e-7f));     // a denormal of half
  half sum = 0.0h;
  sum += 0.1f;
  sum *= 2;
  y[13] = sum;
  y[14] = -h;
  y[15] = table[3];
}

kernel void vectors(device float* y [[buffer(0)]], device const packed_float3* three [[buffer(1)]],
                    device const float4* four [[buffer(2)]],
                    device packed_half3* out [[buffer(3)]]) {
  const float3 a = float3(three[1]);
  const float4 b = four[1];
  y[0] = dot(a, b.xyz);
  const float4 c = float4(b.xy, a.z, 7) * 2 - 1.0f;
  y[1] = c.x + c.y * c.z - c.w;
  const int4 whole = int4(b) << 1;
  y[2] = float(whole[3] & 6);
  const half2 h = half2(b.zw);
  y[3] = float(h.x * h.y);
  y[4] = float(select(float4(0), b, b > 2.5f).z);
  y[5] = any(b < 0) ? 1.0f : 2.0f;
  float4 d = b;
  d.zw = float2(9, 8);
  d += 1;
  y[6] = d.z * d.w + d[0];
  y[7] = float(sizeof(float3)) + float(sizeof(packed_float3)) * 100;
  y[8] = max(b, float4(2.5f)).x + clamp(b, float4(2), float4(3)).w;
  y[9] = as_type<float>(as_type<uint>(ushort2(0x0fdb, 0x4049)));
  out[1] = packed_half3(half3(a));
  const uchar4 codes = as_type<uchar4>(0x04030201u);
  y[10] = float(codes.x + codes.w * 10);
}

kernel void whole_numbers(device uint* y [[buffer(0)]]) {
  y[0] = popcount(0xF0F0u);
  y[1] = clz(1u);
  y[2] = ctz(8u);
  y[3] = mulhi(0xFFFFFFFFu, 0xFFFFFFFFu);
  y[4] = uint(mulhi(-2, 3));
  y[5] = rotate(0x80000001u, 4u);
  y[6] = reverse_bits(1u);
  y[7] = extract_bits(0xABCDu, 4, 8);
  y[8] = uint(abs(-5)) + absdiff(3u, 9u);
  y[9] = min(3u, 4u) + uint(max(-3, 2));
  y[10] = uint(numeric_limits<int>::max()) + numeric_limits<uint>::max();
  y[11] = uint(clamp(17, 0, 9));
}

// y = (x + offset + bias) * factor, by function constants; a buffer that is there only with its constant.
kernel void constants(device float* y [[buffer(0)]], device const float* x [[buffer(1)]],
                      device const float* bias [[buffer(2), function_constant(has_bias)]],
                      uint i [[thread_position_in_grid]]) {
  const float by = is_function_constant_defined(factor) ? factor : 1.0f;
  y[i] = (x[i] + float(offset) + (has_bias ? bias[i] : 0.0f)) * by;
}

// Every position that a kernel can ask for.
kernel void positions(
    device uint* y [[buffer(0)]], uint3 grid [[thread_position_in_grid]],
    uint3 inside [[thread_position_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint3 threads [[threads_per_threadgroup]],
    uint3 all [[threads_per_grid]], uint3 groups [[threadgroups_per_grid]],
    ushort lane [[thread_index_in_simdgroup]], ushort simd [[simdgroup_index_in_threadgroup]],
    uint simds [[simdgroups_per_threadgroup]], uint width [[threads_per_simdgroup]]) {
  const uint at = (grid.z * all.y + grid.y) * all.x + grid.x;
  uint sum = inside.x + 10 * inside.y + 100 * inside.z;
  sum = sum * 31 + group.x + 10 * group.y + 100 * group.z;
  sum = sum * 31 + index + threads.x + threads.y + threads.z + groups.x + groups.y + groups.z;
  y[at] = sum * 31 + lane + 32 * simd + simds + width;
}

// One value for each function of a simdgroup.
kernel void lanes(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  device uint* z [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]], uint n [[threads_per_threadgroup]]) {
  const float v = x[i];
  uint k = 0;
  y[k++ * n + i] = simd_sum(v);
  y[k++ * n + i] = simd_max(v);
  y[k++ * n + i] = simd_min(v);
  y[k++ * n + i] = simd_product(lane < 3 ? v : 1.0f);
  y[k++ * n + i] = simd_shuffle(v, ushort(31 - lane));
  y[k++ * n + i] = simd_shuffle_xor(v, 5);
  y[k++ * n + i] = simd_shuffle_down(v, 3);
  y[k++ * n + i] = simd_shuffle_up(v, 3);
  y[k++ * n + i] = simd_broadcast(v, 7);
  y[k++ * n + i] = simd_broadcast_first(v);
  y[k++ * n + i] = simd_prefix_inclusive_sum(v);
  y[k++ * n + i] = simd_prefix_exclusive_sum(v);
  y[k++ * n + i] = simd_shuffle_rotate_down(v, 9);
  y[k++ * n + i] = float(simd_sum(half(lane)));
  const float4 four = simd_sum(float4(v, 1, 2, 3));
  y[k++ * n + i] = four.y + four.z + four.w;
  z[i] = uint(simd_vote::vote_t(simd_ballot(v > 0)));
  z[n + i] =
      simd_xor(lane * 77) + (simd_any(lane == 9) ? 1000 : 0) + (simd_all(lane < 31) ? 1 : 2000);
}

kernel void atomics(device atomic_uint* counts [[buffer(0)]],
                    device atomic_int* extremes [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  threadgroup atomic_uint local;
  if (i % 64 == 0) atomic_store_explicit(&local, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&local, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&counts[i % 4], i, memory_order_relaxed);
  atomic_fetch_max_explicit(&extremes[0], int(i) - 100, memory_order_relaxed);
  atomic_fetch_min_explicit(&extremes[1], int(i) - 100, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i % 64 == 0)
    atomic_fetch_or_explicit(&counts[4], atomic_load_explicit(&local, memory_order_relaxed),
                             memory_order_relaxed);
}

// Addresses of buffers in a table of constants, as an optimiser's kernel reads them.
struct Table {
  device float* x[3];
  device const float* by;
};
kernel void scale_all(constant Table& table_of [[buffer(0)]],
                      uint i [[thread_position_in_threadgroup]],
                      uint which [[threadgroup_position_in_grid]]) {
  table_of.x[which][i] *= *table_of.by;
}

// Functions whose last bits are open, for the test that a seed moves them by no more than it may.
kernel void functions(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                      uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  y[i] = exp(x[i]);
  y[n + i] = fast::exp(x[i]);
  y[2 * n + i] = log(abs(x[i]));
  y[3 * n + i] = rsqrt(abs(x[i]));
  y[4 * n + i] = tanh(x[i]);
  y[5 * n + i] = 1.0f / x[i];
  y[6 * n + i] = sqrt(abs(x[i]));
}

// Who came when: before a barrier, after it, and after a sum of the simdgroup.
kernel void arrivals(device atomic_uint* clock [[buffer(0)]], device uint* y [[buffer(1)]],
                     uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  y[i] = atomic_fetch_add_explicit(clock, 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_device);
  y[n + i] = atomic_fetch_add_explicit(clock, 1, memory_order_relaxed);
  const uint all = simd_sum(1u);
  y[2 * n + i] = atomic_fetch_add_explicit(clock, 1, memory_order_relaxed) + all;
}
