// Fragments: what a lane has of an 8x8 matrix. Two neighbours of a row, so that rows and columns can be worked on in
// registers, and matrices filled from memory of any type. Four lanes share a row: those that differ in bits 0 and 3; eight
// share a pair of columns: those that differ in bits 1, 2 and 4.
#pragma once

#include <metal_simdgroup_matrix>

#include "backends/metal/device/vectors.h"

inline uint fragment_row(uint lane) { return ((lane / 4) & 4u) + (lane / 2) % 4; }
// The first of the two.
inline uint fragment_column(uint lane) { return ((lane / 4) & 2u) * 2 + (lane % 2) * 2; }

inline void set_fragment(thread simdgroup_float8x8& m, float first, float second) {
  m.thread_elements()[0] = first;
  m.thread_elements()[1] = second;
}
inline float2 fragment_pair(thread simdgroup_float8x8& m) {
  return float2(m.thread_elements()[0], m.thread_elements()[1]);
}
inline void scale_fragment(thread simdgroup_float8x8& m, float first, float second) {
  m.thread_elements()[0] *= first;
  m.thread_elements()[1] *= second;
}

// Over the lanes that share a row, and over those that share columns: every lane of the simdgroup must come here.
inline float row_sum(float v) {
  v += simd_shuffle_xor(v, ushort(1));
  return v + simd_shuffle_xor(v, ushort(8));
}
inline float row_max(float v) {
  v = max(v, simd_shuffle_xor(v, ushort(1)));
  return max(v, simd_shuffle_xor(v, ushort(8)));
}
inline float column_sum(float v) {
  v += simd_shuffle_xor(v, ushort(2));
  v += simd_shuffle_xor(v, ushort(4));
  return v + simd_shuffle_xor(v, ushort(16));
}
inline float column_max(float v) {
  v = max(v, simd_shuffle_xor(v, ushort(2)));
  v = max(v, simd_shuffle_xor(v, ushort(4)));
  return max(v, simd_shuffle_xor(v, ushort(16)));
}
