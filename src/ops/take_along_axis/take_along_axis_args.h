// Read by take_along_axis.cpp and the take_along_axis kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Axes of length 1 are left out, and neighbours that one step walks through are joined.
// Strides count elements and are 0 along an axis that is broadcast.

// y[p] = x[Σ p_d·x_d + axis_stride·index], index = indices[Σ p_d·index_d], p over n; y is contiguous.
struct TakeAlongAxisArgs {
  int64_t rank;  // >= 1
  int64_t n[8];
  int64_t x[8];  // 0 along axis
  int64_t index[8];
  int64_t length;       // C
  int64_t axis_stride;  // of x
  int64_t index_type;   // a DType
};
static_assert(sizeof(TakeAlongAxisArgs) == 224, "host and device must agree");

// dx[Σ p_d·dx_d + w + axis_stride·c], p over kept and w over width, is the sum over q, in order, of
// dy[Σ p_d·dy_d + w·width_dy + Σ q_e·sum_dy_e] where the index at the same place is c.
struct TakeAlongAxisBackwardArgs {
  int64_t rank;  // of the axes that x and y share; may be 0
  int64_t n[8];
  int64_t dx[8];
  int64_t dy[8];
  int64_t index[8];
  int64_t width;  // of the innermost axis after axis, if x has it: neighbours in dx; else 1
  int64_t width_dy;
  int64_t width_index;
  int64_t sum_rank;  // >= 1: axis itself and the axes along which x is broadcast
  int64_t sum_n[8];
  int64_t sum_dy[8];
  int64_t sum_index[8];
  int64_t length;       // C
  int64_t axis_stride;  // of dx
  int64_t index_type;   // a DType
};
static_assert(sizeof(TakeAlongAxisBackwardArgs) == 512, "host and device must agree");
