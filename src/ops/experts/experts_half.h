// The products of experts in 16 bits on any device, called by experts.cu in the place of its own where those of
// experts_hopper.h are not to be had: the same lists, scratch arrays and roundings. All are called with 16-byte addresses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "experts_args.h"
#include "experts_hopper.h"

namespace mlxtape::ops {

namespace half_types {

constexpr int kTilePairs = 128;  // of a tile at most, in the lists given here

// Whether these sizes are for it: H and I multiples of 8.
bool takes(const ExpertsArgs& args);

// hidden [pairs, 2, I] and active [pairs, I]: a, rounded.
template <class T>
void hidden_forward(const ExpertsArgs& args, ExpertsTiles tiles, const T* x, const unsigned* order,
                    const T* gate, const T* up, T* hidden, T* active, cudaStream_t stream);

// out [pairs, H] = down[e]·a, rounded.
template <class T>
void out_forward(const ExpertsArgs& args, ExpertsTiles tiles, const T* active, const T* down,
                 T* out, cudaStream_t stream);

// to [T, H] = Σ_j scores[t, j]·from[places[t, j]], in the order of j; scores null: all 1.
template <class T>
void combine(const ExpertsArgs& args, const T* from, const unsigned* places,
             const unsigned* offsets, const T* scores, T* to, cudaStream_t stream);

// d_hidden, active = scores∘a rounded, and parts [score_parts(I), pairs] of dscores.
constexpr std::int64_t score_parts(std::int64_t inner) { return (inner + 63) / 64; }
template <class T>
void hidden_backward(const ExpertsArgs& args, ExpertsTiles tiles, const T* dy, const T* hidden,
                     const unsigned* order, const T* scores, const T* down, T* d_hidden, T* active,
                     float* parts, cudaStream_t stream);

// out [pairs, H] = gateᵀ[e]·dg + upᵀ[e]·du, rounded.
template <class T>
void x_backward(const ExpertsArgs& args, ExpertsTiles tiles, const T* d_hidden, const T* gate,
                const T* up, T* out, cudaStream_t stream);

template <class T>
void weights_backward(const ExpertsArgs& args, const T* x, const T* dy, const T* d_hidden,
                      const T* active, const unsigned* order, const unsigned* offsets, T* dgate,
                      T* dup, T* ddown, cudaStream_t stream);

}  // namespace half_types

// Either set of kernels.
template <class T>
struct ExpertsProducts {
  int tile_pairs;
  std::int64_t (*score_parts)(std::int64_t inner);
  decltype(&half_types::hidden_forward<T>) hidden_forward;
  decltype(&half_types::out_forward<T>) out_forward;
  decltype(&half_types::hidden_backward<T>) hidden_backward;
  decltype(&half_types::x_backward<T>) x_backward;
  decltype(&half_types::weights_backward<T>) weights_backward;
};

// The faster one that takes these sizes on this device; null: none does.
template <class T>
const ExpertsProducts<T>* products_for(const ExpertsArgs& args) {
  if constexpr (sizeof(T) == 2) {
    static constexpr ExpertsProducts<T> kHopper{hopper::kTilePairs,         hopper::score_parts,
                                                hopper::hidden_forward<T>,  hopper::out_forward<T>,
                                                hopper::hidden_backward<T>, hopper::x_backward<T>,
                                                hopper::weights_backward<T>};
    static constexpr ExpertsProducts<T> kHalf{
        half_types::kTilePairs,         half_types::score_parts,
        half_types::hidden_forward<T>,  half_types::out_forward<T>,
        half_types::hidden_backward<T>, half_types::x_backward<T>,
        half_types::weights_backward<T>};
    if (hopper::takes(args)) return &kHopper;
    if (half_types::takes(args)) return &kHalf;
  }
  return nullptr;
}

}  // namespace mlxtape::ops
