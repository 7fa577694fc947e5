// The scalar types of Metal's language that C++ lacks. half and bfloat round once after every operation, which for
// + - * / of both is exact: f32 has more than twice their digits and two more.
#pragma once

#include "backends/metal/emulator/msl/counted.h"

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::ptrdiff_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

namespace metal {
using std::conditional_t;
using std::enable_if_t;
using std::is_same;
using std::is_same_v;
using std::remove_cv_t;

// float is one of these where it is counted, too.
template <class T>
inline constexpr bool is_real = std::is_floating_point_v<T> || std::is_same_v<T, float>;
template <class T>
concept Arithmetic = std::is_integral_v<T> || is_real<T>;

struct HalfFormat {
  static constexpr bool kFromFloat = true;  // by itself
  static constexpr float widen(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16;
    const uint32_t exponent = h >> 10 & 31u;
    const uint32_t fraction = h & 1023u;
    if (exponent == 0) {  // a whole number of 2^-24, no denormal of f32
      const float f = float(fraction) * 0x1p-24F;
      return sign != 0 ? -f : f;
    }
    const uint32_t rest =
        exponent == 31 ? 0x7F800000u | fraction << 13 : (exponent + 112) << 23 | fraction << 13;
    return std::bit_cast<float>(sign | rest);
  }
  static constexpr uint16_t round(float f) {
    uint32_t u = std::bit_cast<uint32_t>(f);
    const uint32_t sign = u >> 16 & 0x8000u;
    u &= 0x7FFFFFFFu;
    if (u > 0x7F800000u) return uint16_t(sign | 0x7E00u);
    if (u >= 0x477FF000u) return uint16_t(sign | 0x7C00u);
    if (u <
        0x38800000u) {  // adding 2^-1 leaves the multiple of 2^-24 in the last bits, rounded to even
      const uint32_t shifted = std::bit_cast<uint32_t>(std::bit_cast<float>(u) + 0.5F);
      return uint16_t(sign | (shifted - 0x3F000000u));
    }
    return uint16_t(sign | (((u + 0xFFFu + (u >> 13 & 1u)) >> 13) - (112u << 10)));
  }
};

struct BfloatFormat {
  static constexpr bool kFromFloat = false;
  static constexpr float widen(uint16_t h) { return std::bit_cast<float>(uint32_t(h) << 16); }
  static constexpr uint16_t round(float f) {
    const uint32_t u = std::bit_cast<uint32_t>(f);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t(u >> 16 | 64u);
    return uint16_t((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
  }
};

// A bfloat is never made from another type unless it is written, as in Metal.
template <class Format>
struct Small {
  uint16_t bits;
  Small() = default;
  template <Arithmetic T>
  constexpr explicit(!Format::kFromFloat) Small(T v) : bits(Format::round(float(v))) {}
  template <class Other>
    requires(!std::is_same_v<Other, Format>)
  constexpr explicit Small(Small<Other> v) : bits(Format::round(float(v))) {}
  constexpr operator float() const { return Format::widen(bits); }
};
template <class T>
inline constexpr bool is_small = false;
template <class F>
inline constexpr bool is_small<Small<F>> = true;

// With a float the other becomes one; with a whole number that becomes the other.
#define MLXTAPE_SMALL(op)                                            \
  template <class F>                                                 \
  constexpr Small<F> operator op(Small<F> a, Small<F> b) {           \
    return Small<F>(float(a) op float(b));                           \
  }                                                                  \
  template <class F, Arithmetic T>                                   \
  constexpr auto operator op(Small<F> a, T b) {                      \
    if constexpr (is_real<T>) {                                      \
      return float(a) op b;                                          \
    } else {                                                         \
      return Small<F>(float(a) op float(Small<F>(b)));               \
    }                                                                \
  }                                                                  \
  template <class F, Arithmetic T>                                   \
  constexpr auto operator op(T a, Small<F> b) {                      \
    if constexpr (is_real<T>) {                                      \
      return a op float(b);                                          \
    } else {                                                         \
      return Small<F>(float(Small<F>(a)) op float(b));               \
    }                                                                \
  }                                                                  \
  template <class F, class T>                                        \
    requires(std::is_same_v<T, Small<F>> || std::is_integral_v<T> || \
             (F::kFromFloat && Arithmetic<T>))                       \
  constexpr Small<F>& operator op##=(Small<F>& a, T b) {             \
    return a = Small<F>(a op b);                                     \
  }
MLXTAPE_SMALL(+)
MLXTAPE_SMALL(-)
MLXTAPE_SMALL(*)
MLXTAPE_SMALL(/)
#undef MLXTAPE_SMALL
template <class F>
constexpr Small<F> operator-(Small<F> a) {
  Small<F> r = a;
  r.bits = uint16_t(a.bits ^ 0x8000u);
  return r;
}

template <class To, class From>
constexpr To as_type(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return std::bit_cast<To>(from);
}
}  // namespace metal

using half = metal::Small<metal::HalfFormat>;
using bfloat = metal::Small<metal::BfloatFormat>;
using metal::as_type;

#define MAXFLOAT 3.402823466e+38F
#define HUGE_VALF INFINITY
#define INFINITY float(__builtin_inff())
#define NAN float(__builtin_nanf(""))
#define FLT_MAX 3.402823466e+38F
#define FLT_MIN 1.175494351e-38F
#define FLT_EPSILON 1.192092896e-07F
#define M_PI_F 3.14159265358979323846264338327950288F
#define M_PI_2_F 1.57079632679489661923132169163975144F
#define M_1_PI_F 0.318309886183790671537767526745028724F
#define M_2_SQRTPI_F 1.12837916709551257389615890312154517F
#define M_SQRT2_F 1.41421356237309504880168872420969808F
#define M_SQRT1_2_F 0.707106781186547524400844362104849039F
#define M_E_F 2.71828182845904523536028747135266250F
#define M_LOG2E_F 1.44269504088896340735992468100189214F
#define M_LN2_F 0.693147180559945309417232121458176568F
#define INT_MAX 0x7FFFFFFF
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 0xFFFFFFFFu

namespace metal {
template <class T>
struct numeric_limits {
  static_assert(std::is_integral_v<T>);
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr int digits = int(sizeof(T) * 8) - is_signed;
  static constexpr T max() { return T(~std::make_unsigned_t<T>(0) >> is_signed); }
  static constexpr T min() { return T(~max()); }
  static constexpr T lowest() { return min(); }
};
template <>
struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
  static constexpr bool lowest() { return false; }
};
template <>
struct numeric_limits<float> {
  static constexpr float max() { return FLT_MAX; }
  static constexpr float min() { return FLT_MIN; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float epsilon() { return FLT_EPSILON; }
  static constexpr float infinity() { return INFINITY; }
  static constexpr float quiet_NaN() { return NAN; }
};
// largest, least normal, distance from 1 to the next: as bits
template <class T, uint16_t kMax, uint16_t kMin, uint16_t kEpsilon, uint16_t kInfinity>
struct SmallLimits {
  static constexpr T of(uint16_t bits) { return std::bit_cast<T>(bits); }
  static constexpr T max() { return of(kMax); }
  static constexpr T min() { return of(kMin); }
  static constexpr T lowest() { return of(kMax | 0x8000u); }
  static constexpr T epsilon() { return of(kEpsilon); }
  static constexpr T infinity() { return of(kInfinity); }
  static constexpr T quiet_NaN() { return of(0x7FFFu); }
};
template <>
struct numeric_limits<half> : SmallLimits<half, 0x7BFF, 0x0400, 0x1400, 0x7C00> {};
template <>
struct numeric_limits<bfloat> : SmallLimits<bfloat, 0x7F7F, 0x0080, 0x3C00, 0x7F80> {};
}  // namespace metal
