// The kernels of gated_delta_rule for 16-bit heads of width 128 whose decay is one number for each head.
#pragma once

#include <cstddef>

#include "gated_delta_rule_args.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

// Whether they take a call of 16-bit heads.
bool chunks_take(const KernelCall& call);
// The room that they need: WorkspaceFns. 0 where they would not take it.
std::size_t chunks_room(const void* args);
std::size_t chunks_room_back(const void* args);

template <class T>
void chunks_forward(const KernelCall& call);
template <class T>
void chunks_backward(const KernelCall& call);

}  // namespace mlxtape::ops
