#include "cases/random.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace mlxtape::bench {

double Noise::normal() {
  // Box-Muller.
  const double u = 0.5 * (next() + 1);
  return std::sqrt(-2 * std::log(1 - u)) * std::cos(M_PI * next());
}

Tensor random_tensor(CommandEncoder& encoder, Shape shape, DType dtype, std::uint64_t seed,
                     double deviation) {
  // A large tensor repeats a block of a prime length: random to every kernel, and made in a moment.
  constexpr std::size_t kBlock = 1000003;
  const Tensor t = encoder.empty(shape, dtype);
  const auto n = static_cast<std::size_t>(t.size());
  Noise noise(seed);
  std::vector<double> block(std::min(n, kBlock));
  for (double& v : block) v = deviation * noise.normal();
  std::vector<unsigned char> bytes(block.size() * size_of(dtype));
  convert(block.data(), DType::kF64, bytes.data(), dtype, block.size());
  const Tensor flat = t.reshape({t.size()});
  for (std::size_t at = 0; at < n; at += kBlock) {
    const std::size_t count = std::min(kBlock, n - at);
    const auto start = static_cast<std::int64_t>(at);
    encoder.upload(bytes.data(), count * size_of(dtype),
                   flat.slice(0, start, start + static_cast<std::int64_t>(count)));
  }
  return t;
}

Tensor random_ids(CommandEncoder& encoder, const Shape& shape, std::int64_t length) {
  Noise noise(7);
  const Tensor t = encoder.empty(shape, DType::kI32);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(t.size()));
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(noise.below(length));
  encoder.upload(ids.data(), t.bytes(), t);
  return t;
}

Tensor random_codes(CommandEncoder& encoder, const Shape& shape, std::uint64_t seed) {
  const Tensor t = random_tensor(encoder, shape, DType::kF32, seed);
  return {t.buffer(), DType::kU32, shape, t.strides(), t.offset()};
}

}  // namespace mlxtape::bench
