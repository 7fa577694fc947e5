// Read by experts.cpp and its kernels.
// order: in indices, offsets; out order [T·k]: pairs t·k + j by expert, then by pair; from the last offset on
//        those whose index is past E.
// hidden_fwd: in x, order, offsets, gate, up; out hidden, active: a.
// out_fwd: in hidden, order, offsets, scores, down, active; out y.
// hidden_bwd: in dy, hidden, order, offsets, scores, down; out d_hidden, dscores, active: scores∘a.
// x_bwd: in d_hidden, order, offsets, gate, up; out dx.
// weights_bwd: in x, dy, hidden, d_hidden, order, offsets, scores, active; out dgate, dup, ddown.
// active: [T·k, I] rounded, on CUDA in 16 bits where H and I are multiples of 8; else nothing, and what is needed is
// made from hidden.
// On CUDA in 16 bits x, dy, hidden, d_hidden and the weights begin at multiples of 16 bytes.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mlxtape::ops {

struct ExpertsArgs {
  int64_t tokens, chosen, experts, width, inner;  // T, k, E, H, I
};
static_assert(sizeof(ExpertsArgs) == 40, "host and device must agree");

}  // namespace mlxtape::ops
