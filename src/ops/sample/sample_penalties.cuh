// Bias and penalties of sample, by the blocks that have the tokens. None waits for another.
#pragma once

#include "sample_search.cuh"

namespace mlxtape::ops::sampling {

struct Biases {
  const int* ids;  // [K]
  const float* bias;
  int count;
};

__device__ inline void add_biases(const Biases& biases, float* z, const Share& share) {
  for (int k = static_cast<int>(threadIdx.x); k < biases.count; k += kThreads) {
    const int id = biases.ids[k];
    const unsigned i = static_cast<unsigned>(id) - share.first;
    if (id < 0 || i >= static_cast<unsigned>(share.n)) continue;
    bool is_first = true;
    for (int j = 0; j < k; ++j) is_first = is_first && biases.ids[j] != id;
    if (is_first) z[i] = counted(sum(z[i], biases.bias[k]));
  }
  __syncthreads();
}

// marks: a word for each token of the block, whatever is in it. How often presence and frequency count the token, and
// above that whether repetition does. Who takes a mark away changes the logit.
__device__ inline void add_penalties(const Settings& settings, const Windows& windows,
                                     const int* history, unsigned* marks, float* z,
                                     const Share& share) {
  constexpr unsigned kRepeated = 1U << 31U;
  const auto for_window = [&](const auto& each) {
    for (std::int64_t j = windows.begin() + threadIdx.x; j < windows.end; j += kThreads) {
      const unsigned i = static_cast<unsigned>(history[j]) - share.first;
      if (history[j] >= 0 && i < static_cast<unsigned>(share.n)) each(j, i);
    }
    __syncthreads();
  };
  for_window([&](std::int64_t, unsigned i) { atomicExch(&marks[i], 0U); });
  for_window([&](std::int64_t j, unsigned i) {
    if (j >= windows.penalty) atomicAdd(&marks[i], 1U);
    if (j >= windows.repetition) atomicOr(&marks[i], kRepeated);
  });
  for_window([&](std::int64_t, unsigned i) {
    const unsigned mark = atomicExch(&marks[i], 0U);
    if (mark != 0) {
      z[i] = penalised(settings, z[i], (mark & kRepeated) != 0, mark & ~kRepeated);
    }
  });
}

}  // namespace mlxtape::ops::sampling
