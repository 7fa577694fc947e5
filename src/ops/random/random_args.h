// Read by random.cpp and the random kernels. in: the key, [2] u32; random_key has none. out: the numbers;
// random_advance: the key, written in place, and the one drawn.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct RandomArgs {
  int64_t count;        // words drawn
  int64_t bytes;        // random_bits: of the result, at most 4·count
  uint64_t seed;        // random_key
  float low, span;      // random_uniform; random_normal: the mean and √2·deviation
  uint32_t last;        // random_bernoulli: true where the word is at most this
  uint32_t unused = 0;  // the size is a multiple of 8
};
static_assert(sizeof(RandomArgs) == 40, "host and device must agree");
