// What the CPU kernels of several ops share, compiled once per SIMD target: elements of any stored
// type as vectors of f32, whole or in part; rows written past the cache; exp; sums.
//
// A kernel file includes this after hwy/foreach_target.h and works inside
// mlxtape::ops::HWY_NAMESPACE, where everything below is found by its plain name.
#include <hwy/highway.h>

#include <hwy/cache_control.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "mlxtape/base/half.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_SIMD_INL_H_
#undef MLXTAPE_CPU_SIMD_INL_H_
#else
#define MLXTAPE_CPU_SIMD_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using DU16 = hn::Rebind<std::uint16_t, DF>;  // as many 16-bit lanes as there are f32 lanes

// ---- elements <-> f32 vectors ----

HWY_INLINE VF widen(DF, BF16, hn::Vec<DU16> bits) {
  return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), bits)));
}

// v rounded to bf16 in the upper halves of its lanes; the lower halves are left over. A NaN stays
// one as long as its lower half is 0, which holds for every NaN that arithmetic makes and for bf16
// itself. Others go through plain_nan first: narrow does so, who calls store_pair sees to it.
HWY_INLINE hn::Vec<DU> round_bf16(VF v) {
  const DU du;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::TestBit(u, hn::Set(du, 0x10000U));
#if HWY_TARGET == HWY_AVX3  // a masked addition instead of choosing what to add
  const auto down = hn::Add(u, hn::Set(du, 0x7fffU));
  return hn::Vec<DU>{_mm512_mask_add_epi32(down.raw, odd.raw, u.raw, _mm512_set1_epi32(0x8000))};
#else
  return hn::Add(u, hn::IfThenElse(odd, hn::Set(du, 0x8000U), hn::Set(du, 0x7fffU)));
#endif
}
HWY_INLINE VF plain_nan(DF d, VF v) {
  return hn::IfThenElse(hn::IsNaN(v), hn::Set(d, std::numeric_limits<float>::quiet_NaN()), v);
}

HWY_INLINE hn::Vec<DU16> narrow(DF d, BF16, VF v) {
  const auto bits = hn::ShiftRight<16>(round_bf16(plain_nan(d, v)));
#if HWY_TARGET == HWY_AVX3
  return hn::Vec<DU16>{_mm512_cvtepi32_epi16(bits.raw)};
#else
  return hn::DemoteTo(DU16(), hn::BitCast(DI(), bits));
#endif
}

#if HWY_TARGET == HWY_SSSE3
// No conversion instruction here, and Highway's own does not round to even: go through the
// scalar code, which does. Calls: it is long, and hundreds of loops would each have copies of it.
inline HWY_NOINLINE VF widen(DF d, F16, hn::Vec<DU16> bits) {
  HWY_ALIGN std::uint16_t in[hn::MaxLanes(DU16())];
  HWY_ALIGN float out[hn::MaxLanes(DF())];
  hn::Store(bits, DU16(), in);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) out[i] = detail::f16_value(in[i]);
  return hn::Load(d, out);
}
inline HWY_NOINLINE hn::Vec<DU16> narrow(DF d, F16, VF v) {
  HWY_ALIGN float in[hn::MaxLanes(DF())];
  HWY_ALIGN std::uint16_t out[hn::MaxLanes(DU16())];
  hn::Store(v, d, in);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) out[i] = detail::f16_bits(in[i]);
  return hn::Load(DU16(), out);
}
#else
HWY_INLINE VF widen(DF d, F16, hn::Vec<DU16> bits) {
  const hn::Rebind<hwy::float16_t, DF> d16;
  return hn::PromoteTo(d, hn::BitCast(d16, bits));
}
HWY_INLINE hn::Vec<DU16> narrow(DF, F16, VF v) {
  const hn::Rebind<hwy::float16_t, DF> d16;
  return hn::BitCast(DU16(), hn::DemoteTo(d16, v));
}
#endif

HWY_INLINE VF load(DF d, const float* p) { return hn::LoadU(d, p); }
template <class T>
HWY_INLINE VF load(DF d, const T* p) {
  return widen(d, T(), hn::LoadU(DU16(), reinterpret_cast<const std::uint16_t*>(p)));
}

HWY_INLINE void store(DF d, VF v, float* p) { hn::StoreU(v, d, p); }
template <class T>
HWY_INLINE void store(DF d, VF v, T* p) {
  hn::StoreU(narrow(d, T(), v), DU16(), reinterpret_cast<std::uint16_t*>(p));
}

// Two vectors to 2·Lanes neighbouring elements: for 16-bit types cheaper than one by one, and a
// whole line at a time where vectors have 16 lanes. With kStream past the cache: p must be
// aligned to both vectors, and lines written whole and in order for it to pay.
template <bool kStream>
HWY_INLINE void store2(DF d, VF v0, VF v1, float* p) {
  if constexpr (kStream) {
    hn::Stream(v0, d, p);
    hn::Stream(v1, d, p + hn::Lanes(d));
  } else {
    hn::StoreU(v0, d, p);
    hn::StoreU(v1, d, p + hn::Lanes(d));
  }
}
template <bool kStream, class T>
HWY_INLINE void store2(DF d, VF v0, VF v1, T* p) {
  auto* p16 = reinterpret_cast<std::uint16_t*>(p);
#if HWY_TARGET == HWY_AVX3
  __m512i both;
  if constexpr (std::is_same_v<T, BF16>) {
    const auto upper = [&](VF v) HWY_ATTR {
      return hn::ShiftRight<16>(round_bf16(plain_nan(d, v)));
    };
    const __m512i mixed = _mm512_packus_epi32(upper(v0).raw, upper(v1).raw);
    both = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), mixed);
  } else {
    both = _mm512_inserti64x4(_mm512_castsi256_si512(narrow(d, T(), v0).raw),
                              narrow(d, T(), v1).raw, 1);
  }
  kStream ? _mm512_stream_si512(reinterpret_cast<__m512i*>(p16), both)
          : _mm512_storeu_si512(p16, both);
#else
  const hn::Twice<DU16> d2;
  const auto both = hn::Combine(d2, narrow(d, T(), v1), narrow(d, T(), v0));
  if constexpr (kStream) {
    hn::Stream(both, d2, p16);
  } else {
    hn::StoreU(both, d2, p16);
  }
#endif
}

// 2·Lanes neighbouring elements as two vectors, in the order that store_pair puts them back: as
// they stand for f32 and f16; for bf16 first the even ones, then the odd ones, which are the two
// halves of 32-bit words and cost half as much. For whatever is done element by element.
HWY_INLINE void load_pair(DF d, const float* p, VF& a, VF& b) {
  a = hn::LoadU(d, p);
  b = hn::LoadU(d, p + hn::Lanes(d));
}
HWY_INLINE void load_pair(DF d, const F16* p, VF& a, VF& b) {
  a = load(d, p);
  b = load(d, p + hn::Lanes(d));
}
using DWords = hn::Repartition<std::uint16_t, DU>;  // the 16-bit halves of 32-bit words
HWY_INLINE VF load_even(DF d, const BF16* p) {
  const auto words = hn::LoadU(DWords(), reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::BitCast(DU(), words)));
}
HWY_INLINE VF load_odd(DF d, const BF16* p) {
  const auto words = hn::LoadU(DWords(), reinterpret_cast<const std::uint16_t*>(p));
  return hn::BitCast(d, hn::And(hn::BitCast(DU(), words), hn::Set(DU(), 0xffff0000U)));
}
HWY_INLINE void load_pair(DF d, const BF16* p, VF& even, VF& odd) {
  even = load_even(d, p);
  odd = load_odd(d, p);
}
template <bool kStream, class T>
HWY_INLINE void store_pair(DF d, VF a, VF b, T* p) {
  store2<kStream>(d, a, b, p);
}
template <bool kStream>
HWY_INLINE void store_pair(DF, VF even, VF odd, BF16* p) {
  const auto low = hn::BitCast(DWords(), hn::ShiftRight<16>(round_bf16(even)));
  const auto words = hn::OddEven(hn::BitCast(DWords(), round_bf16(odd)), low);
  auto* p16 = reinterpret_cast<std::uint16_t*>(p);
  if constexpr (kStream) {
    hn::Stream(words, DWords(), p16);
  } else {
    hn::StoreU(words, DWords(), p16);
  }
}

// The first n lanes, n <= Lanes; the others are read as 0 and never touched in memory.
template <class T>
HWY_INLINE VF load_n(DF d, const T* p, std::size_t n) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (sizeof(T) == 4) {
    return hn::MaskedLoad(hn::FirstN(d, n), d, p);
  } else {
    const DU16 d16;
    return widen(
        d, T(), hn::MaskedLoad(hn::FirstN(d16, n), d16, reinterpret_cast<const std::uint16_t*>(p)));
  }
#else
  HWY_ALIGN T lanes[hn::MaxLanes(DF())] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return load(d, lanes);
#endif
}

template <class T>
HWY_INLINE void store_n(DF d, VF v, T* p, std::size_t n) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (sizeof(T) == 4) {
    hn::BlendedStore(v, hn::FirstN(d, n), d, p);
  } else {
    const DU16 d16;
    hn::BlendedStore(narrow(d, T(), v), hn::FirstN(d16, n), d16,
                     reinterpret_cast<std::uint16_t*>(p));
  }
#else
  HWY_ALIGN T lanes[hn::MaxLanes(DF())];
  store(d, v, lanes);
  std::memcpy(p, lanes, n * sizeof(T));
#endif
}

// ---- rows ----

// For each vector of a row of n elements calls whole(i); for the rest, if any, part(i, count).
template <class Whole, class Part>
HWY_INLINE void for_row(DF d, std::size_t n, const Whole& whole, const Part& part) {
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) whole(i);
  if (i < n) part(i, n - i);
}

// How many of a row's n elements lie before the first line of out that starts inside it.
template <class T>
HWY_INLINE std::size_t before_line(const T* out, std::size_t n) {
  const std::size_t past_line = reinterpret_cast<std::uintptr_t>(out) % 64;
  const std::size_t before = past_line == 0 ? 0 : (64 - past_line) / sizeof(T);
  return before < n ? before : n;
}

// out[i] = value for a row of n elements. whole(i) gives Lanes values from i on, part(i, count)
// gives count of them. With kStream the row goes past the cache: the elements before the first
// aligned line and after the last pair of vectors are stored the ordinary way.
template <bool kStream, class T, class Whole, class Part>
HWY_INLINE void write_row(DF d, T* out, std::size_t n, const Whole& whole, const Part& part) {
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  if constexpr (kStream) {
    const std::size_t head = before_line(out, n);
    for (; head - i >= lanes; i += lanes) store(d, whole(i), out + i);
    if (i < head) store_n(d, part(i, head - i), out + i, head - i);
    i = head;
  }
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const VF first = whole(i);
    store2<kStream>(d, first, whole(i + lanes), out + i);
  }
  if (i + lanes <= n) {
    store(d, whole(i), out + i);
    i += lanes;
  }
  if (i < n) store_n(d, part(i, n - i), out + i, n - i);
}

// As write_row, for values made two vectors at a time: pair(i, a, b) sets them for 2·Lanes elements
// from i on, in the order of load_pair; part(i, count) gives count <= Lanes as they stand. Pairs
// start at before_line(out, n) when streamed, else at 0.
template <bool kStream, class T, class Pair, class Part>
HWY_INLINE void write_pairs(DF d, T* out, std::size_t n, const Pair& pair, const Part& part) {
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  if constexpr (kStream) {
    const std::size_t head = before_line(out, n);
    while (i < head) {
      const std::size_t count = std::min(lanes, head - i);
      store_n(d, part(i, count), out + i, count);
      i += count;
    }
  }
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    VF a, b;
    pair(i, a, b);
    store_pair<kStream>(d, a, b, out + i);
  }
  while (i < n) {
    const std::size_t count = std::min(lanes, n - i);
    store_n(d, part(i, count), out + i, count);
    i += count;
  }
}

// ---- the larger and the smaller ----

// Highway's Max and Min do not say what they make of NaN: x86 returns the second operand when either is one,
// NEON the operand that is none. So kernels call these, which say it, and give the same on every machine.
// Where x86's instruction does what is meant they are that instruction.

// x, or the bound where x is less; NaN stays NaN.
template <class V>
HWY_INLINE V not_below(V bound, V x) {
#if HWY_ARCH_X86
  return hn::Max(bound, x);
#else
  return hn::IfThenElse(hn::Lt(x, bound), bound, x);
#endif
}
// x, or the bound where x is more; NaN stays NaN.
template <class V>
HWY_INLINE V not_above(V bound, V x) {
#if HWY_ARCH_X86
  return hn::Min(bound, x);
#else
  return hn::IfThenElse(hn::Gt(x, bound), bound, x);
#endif
}
// For the largest of many, most from −inf on: NaN among the x is passed over.
template <class V>
HWY_INLINE V largest(V most, V x) {
#if HWY_ARCH_X86
  return hn::Max(x, most);
#else
  return hn::IfThenElse(hn::Gt(x, most), x, most);
#endif
}

// ---- functions ----

#if HWY_TARGET != HWY_AVX3
// p · 2^n for a whole n in [-252, 254], in two factors: n reaches further than one normal exponent.
HWY_INLINE VF times_power_of_two(DF d, VF p, VF n) {
  const DI di;
  const auto whole = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(whole);
  const auto power = [&](hn::Vec<DI> e) HWY_ATTR {
    return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(e, hn::Set(di, 127))));
  };
  return hn::Mul(hn::Mul(p, power(half)), power(hn::Sub(whole, half)));
}
#endif

// exp within 2 ulp for x <= 0: exactly 0 from -104 down and for -inf, NaN for NaN.
//
// x = n·ln2 + r with |r| <= ln2/2 (ln2 in two parts, so that r is good to the last bit), then
// exp(r) by a polynomial of degree 6 fitted to the smallest relative error on that interval
// (3.6e-9 of the value; degree 5 would leave 1.8 ulp), then the exponent n.
HWY_INLINE VF exp_nonpositive(DF d, VF x) {
  x = not_below(hn::Set(d, -105.0F), x);
  const VF magic = hn::Set(d, 0x1.8p23F);  // adding it rounds to an integer
  const VF shifted = hn::MulAdd(x, hn::Set(d, 0x1.715476p0F), magic);
  const VF n = hn::Sub(shifted, magic);
  VF r = hn::NegMulAdd(n, hn::Set(d, 0x1.62e4p-1F), x);
  r = hn::NegMulAdd(n, hn::Set(d, 0x1.7f7d1cp-20F), r);
  VF p = hn::MulAdd(hn::Set(d, 0x1.6a23dp-10F), r, hn::Set(d, 0x1.123a2p-7F));
  p = hn::MulAdd(p, r, hn::Set(d, 0x1.5558f2p-5F));
  p = hn::MulAdd(p, r, hn::Set(d, 0x1.555492p-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 0x1.fffffcp-2F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
#if HWY_TARGET == HWY_AVX3
  return VF{_mm512_scalef_ps(p.raw, n.raw)};
#else
  return times_power_of_two(d, p, n);
#endif
}

// exp within 2 ulp for every x; infinity above the largest finite f32.
HWY_INLINE VF exp_f32(DF d, VF x) { return exp_nonpositive(d, not_above(hn::Set(d, 89.0F), x)); }

// exp(x) where x or the result has 16 bits of type T, within 3 + 5/4·|x| ulp of f32, which x, rounded
// to 16 bits, is off a thousand times over: exp(x) = 2^t, the fraction of t by a polynomial of degree
// 5 fitted to the smallest relative error on [0, 1] (7.5e-8), the rest as the exponent. That takes
// two thirds of the operations.
HWY_INLINE VF exp_for(DF d, float, VF x) { return exp_f32(d, x); }
template <class T>
HWY_INLINE VF exp_for(DF d, T, VF x) {
  VF t = hn::Mul(x, hn::Set(d, 0x1.715476p0F));
#if HWY_TARGET == HWY_AVX3
  const VF f{_mm512_reduce_ps(t.raw, 1)};  // t − floor(t), 0 for an infinity
#else
  t = not_above(hn::Set(d, 130.0F), not_below(hn::Set(d, -152.0F), t));
  const VF n = hn::Floor(t);
  const VF f = hn::Sub(t, n);
#endif
  VF p = hn::MulAdd(hn::Set(d, 0x1.ec320ap-10F), f, hn::Set(d, 0x1.26900cp-7F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.c95446p-5F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.ebd5a8p-3F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.62e4f6p-1F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.fffffep-1F));
#if HWY_TARGET == HWY_AVX3
  return VF{_mm512_scalef_ps(p.raw, t.raw)};  // p · 2^floor(t)
#else
  return times_power_of_two(d, p, n);
#endif
}

// σ(z) and 1 − σ(z) for a result stored as T, neither by a subtraction, from exp(−|z|), which
// cannot overflow.
struct Sigmoid {
  VF value, rest;
};
template <class T>
HWY_INLINE Sigmoid sigmoid(DF d, T type, VF z) {
  const VF one = hn::Set(d, 1.0F);
  const VF t = exp_for(d, type, hn::Or(z, hn::Set(d, -0.0F)));
  const VF whole = hn::Add(one, t);  // in [1, 2]
#if HWY_TARGET == HWY_AVX3
  // An estimate of 14 bits and one Newton step: a division takes three times as long.
  const VF guess = hn::ApproximateReciprocal(whole);
  const VF large = hn::MulAdd(guess, hn::NegMulAdd(whole, guess, one), guess);
#else
  const VF large = hn::Div(one, whole);
#endif
  const VF small = hn::Mul(t, large);
  const auto negative = hn::Lt(z, hn::Zero(d));
  return {hn::IfThenElse(negative, small, large), hn::IfThenElse(negative, large, small)};
}

#if HWY_TARGET == HWY_AVX3
// Each lane of a and b is a pair of bf16: sum + a₁·b₁ + a₀·b₀, in f32 but for subnormal numbers, which count as 0. To be
// called where cpu::bf16_dots() says so. Written as assembly because the compiler's own form asks for the instruction
// set of every function around it.
HWY_INLINE VF add_pairs(VF sum, __m512i a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a), "v"(b));
  return sum;
}
#endif

HWY_INLINE float sum_lanes(DF d, VF v) { return hn::GetLane(hn::SumOfLanes(d, v)); }
HWY_INLINE float max_lanes(DF d, VF v) { return hn::GetLane(hn::MaxOfLanes(d, v)); }

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

// The last line of a kernel file: register_<op>_cpu, which register_all.cpp calls, registers what
// register_<op> of the best SIMD target registers.
#undef MT_REGISTER_CPU_KERNELS
#if HWY_ONCE
#define MT_REGISTER_CPU_KERNELS(op)                    \
  namespace mlxtape::ops {                             \
  HWY_EXPORT(register_##op);                           \
  void register_##op##_cpu(KernelRegistry& registry) { \
    HWY_DYNAMIC_DISPATCH(register_##op)(registry);     \
  }                                                    \
  }
#else
#define MT_REGISTER_CPU_KERNELS(op)
#endif
