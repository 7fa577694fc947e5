// Read by quantized_matmul.cpp and its kernels. codes, scales and biases are those of n rows.
// fwd: in x, codes, scales, biases; out y. m is at most as large as the host says.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mlxtape::ops {

struct QuantizedMatmulArgs {
  int64_t m, n, k;
  int32_t bits, group;
  int32_t wide;  // scales and biases are f32 whatever x is
  int32_t unused;
};
static_assert(sizeof(QuantizedMatmulArgs) == 40, "host and device must agree");

}  // namespace mlxtape::ops
