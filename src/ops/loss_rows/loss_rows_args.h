// Read by loss_rows.cpp and the loss_rows kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

enum LossRowsMask : int32_t {
  kLossRowsNoMask,
  kLossRowsBool,
  kLossRowsF32,
  kLossRowsF16,
  kLossRowsBF16,
};

struct LossRowsArgs {
  int64_t rows;
  int64_t classes;
  int64_t ignore;      // a target, where ignores
  int32_t ignores;     // 0 or 1
  int32_t has_target;  // 0 or 1
  int32_t mean;        // 0 or 1
  LossRowsMask mask;
};
static_assert(sizeof(LossRowsArgs) == 40, "host and device must agree");
