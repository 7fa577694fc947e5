// Random inputs of bench cases and tests, the same on every run and every platform.
#pragma once

#include <cstdint>

#include "mlxtape/core/encoder.h"

namespace mlxtape::bench {

// Small deterministic generator.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : state_(seed * 2 + 1) {
    for (int i = 0; i < 4; ++i) bits();
  }
  double next() { return static_cast<double>(bits() >> 11U) * 0x1p-52 - 1; }  // [-1, 1)
  double normal();                                                            // mean 0, deviation 1
  std::int64_t below(std::int64_t n) {                                        // [0, n)
    return static_cast<std::int64_t>((bits() >> 20U) % static_cast<std::uint64_t>(n));
  }

 private:
  std::uint64_t bits() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return state_ ^ (state_ >> 29U);
  }
  std::uint64_t state_;
};

// Normally distributed numbers: mean 0, the given deviation.
Tensor random_tensor(CommandEncoder& encoder, Shape shape, DType dtype, std::uint64_t seed,
                     double deviation = 1);

// i32 in [0, length).
Tensor random_ids(CommandEncoder& encoder, const Shape& shape, std::int64_t length);

// u32 for codes of quantised weights: any word is some codes.
Tensor random_codes(CommandEncoder& encoder, const Shape& shape, std::uint64_t seed);

}  // namespace mlxtape::bench
