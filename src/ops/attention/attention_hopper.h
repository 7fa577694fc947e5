// Kernels of attention for compute capability 9.0, called for what attention_half.cuh takes with a width over 64.
#pragma once

#include "mlxtape/core/registry.h"

namespace mlxtape::ops {
template <class T>
struct KeyGradients;  // attention_places.cuh
}

namespace mlxtape::ops::hopper {

template <class T>
void attention_forward(const KernelCall& call);
// row_dots: D [B, T, H], made before.
template <class T>
void attention_backward(const KernelCall& call, const float* row_dots, const KeyGradients<T>& to);

}  // namespace mlxtape::ops::hopper
