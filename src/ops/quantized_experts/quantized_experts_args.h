// Read by quantized_experts.cpp and its kernels. Weights come as codes, scales, biases.
// On a GPU, each pair by itself, for few of them:
// hidden_fwd: in x, indices, gate, up; out active: a of each pair as f32, [T·k, I], with nothing where an index is past E.
// out_fwd: in active, indices, scores, down; out y.
// On a CPU, pairs in the order of their experts; hidden: [T·k, 2, I], in the type of x or f32:
// order: in indices; out order [T·k]: as that of experts.
// hidden_fwd: in x, order, offsets, gate, up; out hidden.
// out_fwd: in hidden, order, offsets, scores, down; out y.
// hidden_bwd: in dy, hidden, order, offsets, scores, down; out d_hidden, dscores.
// x_bwd: in d_hidden, order, offsets, gate, up; out dx.
// params_bwd: in x, dy, hidden, d_hidden, order, offsets, scores, codes of gate, up, down; out scales' and biases'
//             gradients of gate, up, down.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mlxtape::ops {

struct QuantizedExpertsArgs {
  int64_t tokens, chosen, experts, width, inner;  // T, k, E, H, I
  struct Form {
    int32_t bits, group;
    int32_t wide;  // scales and biases are f32 whatever x is
  } gate, up, down;
  int32_t wide_hidden;  // hidden is f32 whatever x is
};
static_assert(sizeof(QuantizedExpertsArgs) == 80, "host and device must agree");

}  // namespace mlxtape::ops
