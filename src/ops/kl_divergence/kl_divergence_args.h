// Read by kl_divergence.cpp and the kl_divergence kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

enum KlDivergenceTeacher : int32_t { kKlTeacherF32, kKlTeacherF16, kKlTeacherBF16 };

struct KlDivergenceArgs {
  int64_t rows;
  int64_t cols;
  int64_t top;         // k: columns of a stored teacher; 0 where it has all
  int64_t dloss_step;  // 1 where there is a dloss a row, 0 where one serves all
  float inverse;       // 1/T
  float factor;        // of the loss: T² or 1
  KlDivergenceTeacher teacher;
  int32_t wants_gradient;  // 0 or 1: of the forward
};
static_assert(sizeof(KlDivergenceArgs) == 48, "host and device must agree");
