// What the tests of ops that take indices share.
#pragma once

#include <cstdint>
#include <vector>

#include "mlxtape/core/encoder.h"
#include "support/oracle.h"

namespace mlxtape::test {

std::int64_t count_of(const Shape& shape);                                     // elements
inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }  // in a std::vector

// n indices into an axis of length: some twice, some from the end where the type has negative numbers, and a
// few outside.
std::vector<double> random_indices(Noise& noise, std::int64_t n, std::int64_t length, DType type);

}  // namespace mlxtape::test
