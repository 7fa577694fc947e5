// How products step along what they sum over: numbers as f32, or pairs of bf16 where the processor multiplies two of them
// at once. A step has 4 bytes either way, so whoever copies, turns and counts steps does not mind which.
#include "backends/cpu/device/simd-inl.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "backends/cpu/targets.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_STEPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_STEPS_INL_H_
#undef MLXTAPE_CPU_STEPS_INL_H_
#else
#define MLXTAPE_CPU_STEPS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// A number of k, or those of k and k + 1, the first in the lower half.
enum class ProductStep : std::uint8_t { kNumber, kPair };
constexpr std::int64_t width_of(ProductStep step) {
  return step == ProductStep::kPair ? 2 : 1;
}  // of k

// Calls body(integral_constant of the step) for sums over k elements of type T.
template <class T, class Body>
HWY_INLINE void with_step(std::int64_t k, const Body& body) {
  if constexpr (HWY_TARGET == HWY_AVX3 && std::is_same_v<T, BF16>) {
    if (k % 2 == 0 && cpu::bf16_dots())
      return body(std::integral_constant<ProductStep, ProductStep::kPair>());
  }
  body(std::integral_constant<ProductStep, ProductStep::kNumber>());
}

template <ProductStep kStep>
HWY_INLINE VF add_product(VF a, VF b, VF sum) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (kStep == ProductStep::kPair) {
    return add_pairs(sum, _mm512_castps_si512(a.raw), _mm512_castps_si512(b.raw));
  }
#endif
  return hn::MulAdd(a, b, sum);
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
