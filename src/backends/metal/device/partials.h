// Sums that groups made for themselves and left in scratch memory, added up by a second kernel in one fixed order.
#pragma once

#include "backends/metal/device/vectors.h"

// out[c] = the sum over p of parts[p, c]: a group has 32 columns, one to a lane, and its eight simdgroups share the parts.
// Zeros where there are none. room: [8, 32].
template <typename Out>
inline void sum_partials(device const float* parts, uint count, uint columns, device Out* out,
                         threadgroup float* room, uint group, uint lane, uint simd) {
  const uint c = group * 32 + lane;
  float sum = 0;
  if (c < columns) {
    for (uint p = simd; p < count; p += 8) sum += parts[long(p) * columns + c];
  }
  room[simd * 32 + lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd != 0 || c >= columns) return;
  for (uint s = 1; s < 8; ++s) sum += room[s * 32 + lane];
  out[c] = narrow<Out>(sum);
}
