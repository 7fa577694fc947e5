// Read by quantized_experts.cpp and its kernels. Weights come as codes, scales, biases.
// hidden_fwd: in x, indices, gate, up; out active: a of each pair as f32, [T·k, I], in an order of the kernels' own,
//             with nothing where an index is past E.
// out_fwd: in active, indices, scores, down; out y.
#pragma once

#include <cstdint>

namespace mlxtape::ops {

struct QuantizedExpertsArgs {
  std::int64_t tokens, chosen, experts, width, inner;  // T, k, E, H, I
  struct Form {
    std::int32_t bits, group;
    std::int32_t wide;  // scales and biases are f32 whatever x is
  } gate, up, down;
  std::int32_t unused;
};
static_assert(sizeof(QuantizedExpertsArgs) == 80, "host and device must agree");

}  // namespace mlxtape::ops
