// Read by quantized_matmul.cpp and its kernels. codes, scales and biases are those of n rows.
// fwd: in x, codes, scales, biases; out y. m is at most as large as the host says.
#pragma once

#include <cstdint>

namespace mlxtape::ops {

struct QuantizedMatmulArgs {
  std::int64_t m, n, k;
  std::int32_t bits, group;
  std::int32_t wide;  // scales and biases are f32 whatever x is
  std::int32_t unused;
};
static_assert(sizeof(QuantizedMatmulArgs) == 40, "host and device must agree");

}  // namespace mlxtape::ops
