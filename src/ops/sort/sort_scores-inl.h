// Numbers as vectors of signed integers, for the CPU kernels of sort that compare: a larger score is better.
// −0 and +0 have the same.
#if defined(MLXTAPE_SORT_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_SORT_SCORES_INL_H_
#undef MLXTAPE_SORT_SCORES_INL_H_
#else
#define MLXTAPE_SORT_SCORES_INL_H_
#endif

#include "backends/cpu/device/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {

using VI = hn::Vec<DI>;

// kSmall: the smallest number is the best. kNanBest: NaN is better than all, or else worse.
template <bool kSmall, bool kNanBest>
HWY_INLINE VI score_of(VF v) {
  const DI di;
  v = hn::Add(v, hn::Zero(DF()));  // −0 becomes +0
  const VI bits = hn::BitCast(di, v);
  VI key = hn::Xor(bits, hn::And(hn::ShiftRight<31>(bits), hn::Set(di, 0x7fffffff)));
  if constexpr (kSmall) key = hn::Not(key);
  const std::int32_t nan = kNanBest ? 0x7fffffff : -0x7fffffff - 1;
  return hn::IfThenElse(hn::RebindMask(di, hn::IsNaN(v)), hn::Set(di, nan), key);
}
template <bool kSmall, class T>
HWY_INLINE VI score_of_whole(VI v) {
  if constexpr (std::is_same_v<T, std::uint32_t>) v = hn::Xor(v, hn::Set(DI(), -0x7fffffff - 1));
  return kSmall ? hn::Not(v) : v;
}

// Lanes elements, or the first n of them.
template <bool kSmall, bool kNanBest, class T>
HWY_INLINE VI scores_of(const T* x) {
  if constexpr (std::is_integral_v<T>) {
    return score_of_whole<kSmall, T>(hn::LoadU(DI(), reinterpret_cast<const std::int32_t*>(x)));
  } else {
    return score_of<kSmall, kNanBest>(load(DF(), x));
  }
}
template <bool kSmall, bool kNanBest, class T>
HWY_INLINE VI first_scores_of(const T* x, std::size_t n) {
  if constexpr (std::is_integral_v<T>) {
    return score_of_whole<kSmall, T>(
        hn::BitCast(DI(), load_n(DF(), reinterpret_cast<const float*>(x), n)));
  } else {
    return score_of<kSmall, kNanBest>(load_n(DF(), x, n));
  }
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
