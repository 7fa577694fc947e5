// The products of experts on compute capability 9.0 in 16 bits, called by experts.cu in the place of its own with 16-byte
// addresses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "experts_args.h"

namespace mlxtape::ops {

// Pairs [first, first + count) of the order, all of one expert; expert −1: none, nor later in the list.
struct ExpertsTile {
  int expert;
  unsigned first;
  int count;
  int unused;
};

struct ExpertsTiles {
  const ExpertsTile* list;
  unsigned most;
};

namespace hopper {

constexpr int kTilePairs = 192;  // of a tile at most, in the lists given here

// Whether this device and these sizes are for it: H and I multiples of 64.
bool takes(const ExpertsArgs& args);

// hidden [pairs, 2, I] and active [pairs, I]: a, rounded.
template <class T>
void hidden_forward(const ExpertsArgs& args, ExpertsTiles tiles, const T* x, const unsigned* order,
                    const T* gate, const T* up, T* hidden, T* active, cudaStream_t stream);

// out [pairs, H] = down[e]·a, rounded.
template <class T>
void out_forward(const ExpertsArgs& args, ExpertsTiles tiles, const T* active, const T* down,
                 T* out, cudaStream_t stream);

// d_hidden, active = scores∘a rounded, and parts [score_parts(I), pairs] of dscores.
constexpr std::int64_t score_parts(std::int64_t inner) { return inner / 64; }
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

}  // namespace hopper
}  // namespace mlxtape::ops
