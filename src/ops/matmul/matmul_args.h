// Read by matmul.cpp and the matmul kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

enum MatmulActivationCode : int32_t {  // as mlxtape/ops/matmul.h has them
  kMatmulNone,
  kMatmulSilu,
  kMatmulGelu,
  kMatmulGeluTanh,
};

// in:  a, b, bias or nothing, residual or nothing. out: y, z or nothing.
// y = act(a·b + bias) + residual + beta·y, z what the activation is of; y, z and residual are contiguous.
struct MatmulArgs {
  int64_t m, n, k;
  int64_t a_row,
      a_col;  // strides of a [m, k] and b [k, n]; of each pair one is 1, the other at least
  int64_t b_row, b_col;  // the length of what it steps over
  int64_t batch_axes;
  int64_t batch[6], a_batch[6],
      b_batch[6];  // sizes and strides, outermost first; y counts through them
  float beta;
  int32_t activation;
  int32_t wide;  // y, z and residual are f32 whatever a and b are
  int32_t has;   // of kMatmulHas..., for workspaces, which see no tensors
};
static_assert(sizeof(MatmulArgs) == 224, "host and device must agree");

enum : int32_t { kMatmulHasBias = 1, kMatmulHasResidual = 2, kMatmulHasZ = 4 };

// in: dy, z or nothing. out: dz = dy·act'(z), in the type of a and b; or only rounded to it.
struct MatmulDzArgs {
  int64_t count;
  int32_t activation;
  int32_t wide;  // dy and z are f32
};
static_assert(sizeof(MatmulDzArgs) == 16, "host and device must agree");

// in: dz [rows, n]. out: the sums of its columns.
struct MatmulBiasArgs {
  int64_t rows, n;
};
static_assert(sizeof(MatmulBiasArgs) == 16, "host and device must agree");
