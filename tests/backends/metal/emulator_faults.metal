// Kernels with one fault each, and beside some the same without it. Which is which, and what is said, is in emulator_test.cpp.
#include <metal_stdlib>
using namespace metal;

// ---- barriers and simdgroups that not all threads reach: found in every build ----

kernel void returns_early(device float* x [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[64];
  if (tid > 40) return;
  room[tid] = x[tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[tid] = room[40 - tid];
}
kernel void barrier_under_if(device float* x [[buffer(0)]],
                             uint tid [[thread_index_in_threadgroup]]) {
  if (tid < 32) threadgroup_barrier(mem_flags::mem_threadgroup);
  x[tid] = 1;
  if (tid >= 32) threadgroup_barrier(mem_flags::mem_threadgroup);
}
kernel void sum_under_if(device float* x [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  float sum = 1;
  if (tid < 16) sum = simd_sum(x[tid]);
  x[tid] = simd_sum(sum);
}
kernel void sum_after_return(device float* x [[buffer(0)]],
                             uint tid [[thread_index_in_threadgroup]]) {
  if (tid % 32 > 20) return;
  x[tid] = simd_sum(x[tid]);
}
kernel void sums_of_two_branches(device float* x [[buffer(0)]],
                                 uint tid [[thread_index_in_threadgroup]]) {
  float sum;
  if (tid % 2 == 0) {
    sum = simd_sum(x[tid]);
  } else {
    sum = simd_max(x[tid]);
  }
  x[tid] = sum;
}
kernel void shuffle_past_the_end(device float* x [[buffer(0)]],
                                 uint tid [[thread_index_in_threadgroup]]) {
  x[tid] = simd_shuffle(x[tid], ushort(tid + 1));
}
kernel void broadcast_from_many(device float* x [[buffer(0)]],
                                uint tid [[thread_index_in_threadgroup]]) {
  x[tid] = simd_broadcast(x[tid], ushort(tid / 2 % 32));
}
kernel void too_much_room(device float* x [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[8192];
  threadgroup float one_more;
  room[tid] = x[tid];
  one_more = 1;
  x[tid] = room[tid];
}
constant float absent [[function_constant(0)]];
kernel void constant_not_set(device float* x [[buffer(0)]]) { x[0] = absent; }
[[kernel, max_total_threads_per_threadgroup(32)]] void at_most_32(device float* x [[buffer(0)]]) {}
kernel void needs_argument(device float* x [[buffer(0)]],
                           threadgroup float* room [[threadgroup(0)]],
                           constant float2& by [[buffer(1)]]) {
  x[0] = by.x;
}

kernel void too_much_of_its_own(device float* x [[buffer(0)]]) {
  float mine[40000];
  for (uint i = 0; i < 40000; ++i) mine[i] = x[i % 64];
  x[0] = mine[uint(x[1]) * 1000];
}
kernel void nobodys_memory(constant ulong& address [[buffer(0)]]) { *(device float*)address = 1; }

// ---- races: found in the checked build ----

kernel void no_barrier(device float* x [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[64];
  room[tid] = x[tid];
  x[tid] = room[63 - tid];
}
kernel void barrier_of_other_memory(device float* x [[buffer(0)]],
                                    uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[64];
  room[tid] = x[tid];
  threadgroup_barrier(mem_flags::mem_device);
  x[tid] = room[63 - tid];
}
kernel void writes_after_reads(device float* x [[buffer(0)]],
                               uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[64];
  room[tid] = x[tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float v = room[63 - tid];
  room[tid] = v;
  x[tid] = v;
}
kernel void reads_of_many(device float* x [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float one;
  if (tid == 0) one = x[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[tid] += one;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (tid == 0) one = 2;
}
kernel void simdgroup_barrier_is_not_enough(device float* x [[buffer(0)]],
                                            uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[64];
  room[tid] = x[tid];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  x[tid] = room[tid ^ 32];
}
kernel void simdgroup_barrier_is_enough(device float* x [[buffer(0)]],
                                        uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[64];
  room[tid] = x[tid];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  x[tid] = room[tid ^ 1];
}
kernel void device_barrier_without_flag(device float* x [[buffer(0)]],
                                        uint tid [[thread_index_in_threadgroup]]) {
  x[tid] = float(tid);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float v = x[63 - tid];
  threadgroup_barrier(mem_flags::mem_device);
  x[tid] = v;
}
kernel void device_barrier(device float* x [[buffer(0)]],
                           uint tid [[thread_index_in_threadgroup]]) {
  x[tid] = float(tid);
  threadgroup_barrier(mem_flags::mem_device);
  const float v = x[63 - tid];
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  x[tid] = v;
}
kernel void sum_orders_nothing(device float* x [[buffer(0)]],
                               uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[64];
  room[tid] = x[tid];
  const float sum = simd_sum(x[tid]);
  x[tid] = sum + room[tid ^ 1];
}
kernel void groups_write_one_place(device float* x [[buffer(0)]],
                                   uint group [[threadgroup_position_in_grid]],
                                   uint tid [[thread_index_in_threadgroup]]) {
  if (tid == 0) x[0] = float(group);
}
kernel void groups_add_without_atomics(device float* x [[buffer(0)]],
                                       uint group [[threadgroup_position_in_grid]]) {
  x[group / 2] += 1;
}
kernel void group_reads_anothers(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]],
                                 uint n [[threads_per_grid]]) {
  x[i] = x[(i + 64) % n] + 1;
}
kernel void atomics_of_all(device atomic_uint* x [[buffer(0)]],
                           uint group [[threadgroup_position_in_grid]]) {
  atomic_fetch_add_explicit(x, group, memory_order_relaxed);
}
kernel void atomic_and_plain(device atomic_uint* x [[buffer(0)]], device uint* y [[buffer(1)]],
                             uint tid [[thread_index_in_threadgroup]]) {
  if (tid == 0) {
    y[0] = 5;
  } else {
    atomic_fetch_add_explicit(x, 1, memory_order_relaxed);
  }
}
kernel void in_place_of_another(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  y[n - 1 - i] = x[i];
}

// ---- memory: found in the checked build ----

kernel void one_not_written(device float* x [[buffer(0)]],
                            uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[64];
  if (tid < 63) room[tid] = x[tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[tid] = room[63 - tid];
}
kernel void adds_to_nothing(device float* x [[buffer(0)]],
                            uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[64];
  room[tid] += x[tid];
  x[tid] = room[tid];
}
kernel void past_the_end(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i + 1] = 1;
}
kernel void reads_past_the_end(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                               uint i [[thread_position_in_grid]]) {
  y[i] = x[i + 1];
}
kernel void before_the_beginning(device float* x [[buffer(0)]],
                                 uint tid [[thread_index_in_threadgroup]]) {
  x[int(tid) - 1] = 1;
}
kernel void past_a_variable(device float* x [[buffer(0)]],
                            uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float room[64];
  threadgroup float next[64];
  next[tid] = 0;
  threadgroup float* p = room;
  p[tid + 1] = x[tid];
  x[tid] = next[tid];
}
kernel void writes_const(device const float* x [[buffer(0)]],
                         uint tid [[thread_index_in_threadgroup]]) {
  ((device float*)(ulong)x)[tid] = 1;
}
kernel void writes_constant(constant float* x [[buffer(0)]],
                            uint tid [[thread_index_in_threadgroup]]) {
  ((device float*)(ulong)x)[tid] = 1;
}
kernel void misaligned(device const float* x [[buffer(0)]], device float4* y [[buffer(1)]],
                       uint tid [[thread_index_in_threadgroup]]) {
  y[tid] = *(device const float4*)(x + 1 + 4 * tid);
}
kernel void by_an_old_address(constant ulong& address [[buffer(0)]],
                              uint tid [[thread_index_in_threadgroup]]) {
  ((device float*)address)[tid] = 1;
}
kernel void anothers_stack(device float* x [[buffer(0)]],
                           uint tid [[thread_index_in_threadgroup]]) {
  threadgroup ulong where;
  float mine = x[tid];
  if (tid == 0) where = (ulong)&mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[tid] = *(thread float*)where + mine;
}
kernel void past_an_array(device float* x [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  float mine[4] = {1, 2, 3, 4};
  x[tid] = mine[(tid + uint(x[tid])) % 5];
}
