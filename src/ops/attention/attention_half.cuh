// The kernels of attention for 16-bit types, whose products are made on the tensor cores in that type.
#pragma once

#include "attention_args.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

// Whether they take a call: rows in whole packs. Queries that are few are better cut by their keys: not theirs.
bool half_takes(const KernelCall& call);

template <class T>
void half_forward(const KernelCall& call);
// row_dots: D [B, T, H], made before; room: as half_room says.
template <class T>
void half_backward(const KernelCall& call, const float* row_dots, float* room);
std::size_t half_room(const AttentionArgs& args);

}  // namespace mlxtape::ops
