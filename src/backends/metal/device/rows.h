// Sums and maxima over the threads that share a row. Their order is that of the lanes, whatever the chip.
#pragma once

#include "backends/metal/device/exp.h"

// Where a thread stands in its group.
struct Place {
  uint thread_index, lane, simd, simds;
};

// Over lanes that are neighbours, 4, 8, 16 or 32 of them: every lane of the simdgroup must come here.
inline float lanes_sum(float v, uint lanes) {
  for (uint step = lanes / 2; step > 0; step /= 2) v += simd_shuffle_xor(v, ushort(step));
  return v;
}
inline float lanes_max(float v, uint lanes) {
  for (uint step = lanes / 2; step > 0; step /= 2) v = max(v, simd_shuffle_xor(v, ushort(step)));
  return v;
}

// Over a group, whose simdgroups meet once. A group that does this again in a loop takes room in turns of two: who comes
// back early then writes what nobody reads any more.
inline float group_sum(float v, threadgroup float* room, Place place) {
  v = simd_sum(v);
  if (place.simds == 1) return v;
  if (place.lane == 0) room[place.simd] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(place.lane < place.simds ? room[place.lane] : 0.0f);
}

// A sum of exponentials relative to the largest exponent. max drops NaN, the sum keeps it.
struct Total {
  float top, sum;
};

// What to subtract where nothing but -inf was seen: exp(-inf - 0) is 0, and exp(-inf + inf) would be NaN.
inline float finite_reference(float m) { return m == -INFINITY ? 0.0f : m; }

// sum, which was made relative to m, relative to top. A sum of 0 stays one, whatever exp makes of -inf.
template <typename T>
inline float moved_sum(float sum, float m, float top) {
  return sum == 0 ? 0.0f : sum * exp_for<T>(m - top);
}

template <typename T>
inline Total simd_total(Total part) {
  Total all;
  all.top = simd_max(part.top);
  all.sum = simd_sum(moved_sum<T>(part.sum, part.top, all.top));
  return all;
}

// Over a group; room: 64 floats.
template <typename T>
inline Total group_total(Total part, threadgroup float* room, Place place) {
  part = simd_total<T>(part);
  if (place.simds == 1) return part;
  if (place.lane == 0) {
    room[2 * place.simd] = part.top;
    room[2 * place.simd + 1] = part.sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  part.top = place.lane < place.simds ? room[2 * place.lane] : -INFINITY;
  part.sum = place.lane < place.simds ? room[2 * place.lane + 1] : 0.0f;
  return simd_total<T>(part);
}
