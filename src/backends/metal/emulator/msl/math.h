// Metal's math functions. Where the language leaves the last bits open, a seed moves the result by as much as the
// accuracy table of the language's specification allows; with none, it is rounded from double.
#pragma once

#include "backends/metal/emulator/lanes.h"
#include "backends/metal/emulator/msl/vectors.h"

namespace metal {
namespace emu = ::mlxtape::emulator;

// f32 nearest to exact, or one up to so many steps beside it. exp(0), log(1), tanh(0) and their like have no noise: what
// is exact there is so on the hardware.
inline float within(double exact, unsigned ulps) {
  count_function();
  const PlainFloat f = PlainFloat(exact);
  std::uint64_t chosen = emu::choice(std::bit_cast<std::uint64_t>(exact));
  const PlainFloat size = __builtin_fabsf(f);
  if (chosen == 0 || exact == 1 || exact == -1) return f;
  if (!(size >= FLT_MIN && size <= FLT_MAX)) return size < FLT_MIN ? __builtin_copysignf(0, f) : f;
  const int bits = std::bit_cast<int>(f) + int(emu::draw(chosen, 2 * ulps + 1)) - int(ulps);
  const PlainFloat moved = std::bit_cast<PlainFloat>(bits);
  const PlainFloat moved_size = __builtin_fabsf(moved);
  return moved_size >= FLT_MIN && moved_size <= FLT_MAX ? moved : f;
}
// The same for a bound that is no count of steps.
inline float within_absolute(double exact, double bound) {
  count_function();
  std::uint64_t chosen = emu::choice(std::bit_cast<std::uint64_t>(exact));
  if (chosen == 0 || exact == 0 || exact == 1 || exact == -1) return float(exact);
  return float(exact + bound * (double(emu::draw(chosen, 2001)) - 1000) / 1000);
}

// name(x) for float, half and their vectors.
#define MLXTAPE_SMALL_AND_VECTORS(name)                               \
  inline half name(half x) { return half(name(float(x))); }           \
  template <class T, int N>                                           \
  inline vec<T, N> name(vec<T, N> x) {                                \
    MLXTAPE_UNROLL for (int i = 0; i < N; ++i) x.v[i] = name(x.v[i]); \
    return x;                                                         \
  }
#define MLXTAPE_UNARY(name, ulps)                                                  \
  inline float name(float x) { return within(__builtin_##name(double(x)), ulps); } \
  MLXTAPE_SMALL_AND_VECTORS(name)
#define MLXTAPE_EXACT(name)                                     \
  inline float name(float x) { return __builtin_##name##f(x); } \
  MLXTAPE_SMALL_AND_VECTORS(name)

namespace precise {
MLXTAPE_UNARY(exp, 4)
MLXTAPE_UNARY(exp2, 4)
MLXTAPE_UNARY(log, 4)
MLXTAPE_UNARY(log2, 4)
MLXTAPE_UNARY(log10, 4)
MLXTAPE_UNARY(sin, 4)
MLXTAPE_UNARY(cos, 4)
MLXTAPE_UNARY(tan, 6)
MLXTAPE_UNARY(asin, 4)
MLXTAPE_UNARY(acos, 4)
MLXTAPE_UNARY(atan, 5)
MLXTAPE_UNARY(sinh, 4)
MLXTAPE_UNARY(cosh, 4)
MLXTAPE_UNARY(tanh, 5)
MLXTAPE_UNARY(asinh, 4)
MLXTAPE_UNARY(acosh, 4)
MLXTAPE_UNARY(atanh, 5)
inline float exp10(float x) { return within(__builtin_exp2(double(x) * 3.3219280948873623479), 4); }
MLXTAPE_SMALL_AND_VECTORS(exp10)
inline float rsqrt(float x) { return within(1 / __builtin_sqrt(double(x)), 2); }
MLXTAPE_SMALL_AND_VECTORS(rsqrt)
MLXTAPE_EXACT(sqrt)
inline float divide(float a, float b) { return a / b; }
inline float pow(float a, float b) { return within(__builtin_pow(double(a), double(b)), 16); }
inline half pow(half a, half b) { return half(pow(float(a), float(b))); }
inline float powr(float a, float b) { return a < 0 ? NAN : pow(a, b); }
inline float atan2(float a, float b) { return within(__builtin_atan2(double(a), double(b)), 6); }
}  // namespace precise

// As the hardware has them: fewer right digits, and for some a bound that is absolute.
namespace fast {
inline unsigned exp_ulps(PlainFloat x) {
  return 3 + (__builtin_fabsf(x) < 128 ? unsigned(__builtin_fabsf(2 * x)) : 256u);
}
inline float exp(float x) { return within(__builtin_exp(double(x)), exp_ulps(x)); }
inline float exp2(float x) { return within(__builtin_exp2(double(x)), exp_ulps(x)); }
inline float exp10(float x) {
  return within(__builtin_exp2(double(x) * 3.3219280948873623479), exp_ulps(x));
}
inline float log2(float x) {
  const double exact = __builtin_log2(double(x));
  return x >= 0.5F && x <= 2 ? within_absolute(exact, 0x1p-21) : within(exact, 3);
}
inline float log(float x) {
  const double exact = __builtin_log(double(x));
  return x >= 0.5F && x <= 2 ? within_absolute(exact, 0x1p-21) : within(exact, 3);
}
inline float log10(float x) {
  const double exact = __builtin_log10(double(x));
  return x >= 0.5F && x <= 2 ? within_absolute(exact, 0x1p-21) : within(exact, 3);
}
inline float sin(float x) { return within_absolute(__builtin_sin(double(x)), 0x1p-13); }
inline float cos(float x) { return within_absolute(__builtin_cos(double(x)), 0x1p-13); }
MLXTAPE_SMALL_AND_VECTORS(exp)
MLXTAPE_SMALL_AND_VECTORS(exp2)
MLXTAPE_SMALL_AND_VECTORS(exp10)
MLXTAPE_SMALL_AND_VECTORS(log)
MLXTAPE_SMALL_AND_VECTORS(log2)
MLXTAPE_SMALL_AND_VECTORS(log10)
MLXTAPE_SMALL_AND_VECTORS(sin)
MLXTAPE_SMALL_AND_VECTORS(cos)
MLXTAPE_UNARY(tanh, 5)
inline float rsqrt(float x) { return within(1 / __builtin_sqrt(double(x)), 2); }
MLXTAPE_SMALL_AND_VECTORS(rsqrt)
inline float sqrt(float x) { return within(__builtin_sqrt(double(x)), 2); }
MLXTAPE_SMALL_AND_VECTORS(sqrt)
inline float divide(float a, float b) { return within(double(a) / double(b), 2); }
inline float pow(float a, float b) { return within(__builtin_pow(double(a), double(b)), 16); }
inline float powr(float a, float b) { return a < 0 ? NAN : pow(a, b); }
}  // namespace fast

// Without a name before them they are the precise ones: texts are compiled without fast math.
using namespace precise;

MLXTAPE_EXACT(floor)
MLXTAPE_EXACT(ceil)
MLXTAPE_EXACT(trunc)
MLXTAPE_EXACT(round)
MLXTAPE_EXACT(rint)
MLXTAPE_EXACT(fabs)
inline float fract(float x) { return __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1F); }
MLXTAPE_SMALL_AND_VECTORS(fract)
inline float saturate(float x) { return __builtin_fminf(__builtin_fmaxf(x, 0), 1); }
MLXTAPE_SMALL_AND_VECTORS(saturate)
inline float sign(float x) { return x > 0 ? float(1) : x < 0 ? float(-1) : x == 0 ? x : float(0); }
MLXTAPE_SMALL_AND_VECTORS(sign)
#undef MLXTAPE_EXACT
#undef MLXTAPE_UNARY
#undef MLXTAPE_SMALL_AND_VECTORS

// Of two floats and of two whole numbers of one type; a NaN is passed over, as Metal's do.
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline half max(half a, half b) { return half(__builtin_fmaxf(float(a), float(b))); }
inline half min(half a, half b) { return half(__builtin_fminf(float(a), float(b))); }
template <class T>
  requires std::is_integral_v<T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
  requires std::is_integral_v<T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T, int N>
vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  MLXTAPE_UNROLL for (int i = 0; i < N; ++i) a.v[i] = max(a.v[i], b.v[i]);
  return a;
}
template <class T, int N>
vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  MLXTAPE_UNROLL for (int i = 0; i < N; ++i) a.v[i] = min(a.v[i], b.v[i]);
  return a;
}
inline float fmax(float a, float b) { return max(a, b); }
inline float fmin(float a, float b) { return min(a, b); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline half abs(half x) { return half(__builtin_fabsf(float(x))); }
template <class T>
  requires std::is_integral_v<T>
constexpr T abs(T x) {
  return x < 0 ? T(-x) : x;
}
template <class T>
T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
inline float fma(float a, float b, float c) {
  count_operations(2);
  return __builtin_fmaf(a, b, c);
}
inline half fma(half a, half b, half c) {  // the product of two is exact in f32, the sum in double
  count_operations(1);
  return half(float(double(float(a) * float(b)) + double(float(c))));
}
template <class T, int N>
vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  MLXTAPE_UNROLL for (int i = 0; i < N; ++i) a.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return a;
}
inline float fmod(float a, float b) { return __builtin_fmodf(a, b); }
inline float copysign(float a, float b) { return __builtin_copysignf(a, b); }
inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
inline float mix(float a, float b, float t) { return a + (b - a) * t; }
inline float step(float edge, float x) { return x < edge ? 0.0F : 1.0F; }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_fabsf(x) > FLT_MAX; }
inline bool isfinite(float x) { return __builtin_fabsf(x) <= FLT_MAX; }
inline bool signbit(float x) { return std::bit_cast<int>(x) < 0; }
inline float sincos(float x, float& c) {
  c = cos(x);
  return sin(x);
}

template <class T>
constexpr T select(T a, T b, bool takes_b) {
  return takes_b ? b : a;
}
template <class T, int N>
constexpr vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> takes_b) {
  MLXTAPE_UNROLL for (int i = 0; i < N; ++i) a.v[i] = takes_b.v[i] ? b.v[i] : a.v[i];
  return a;
}

// ---- whole numbers ----
template <class T>
  requires std::is_integral_v<T>
constexpr T popcount(T x) {
  return T(__builtin_popcountll(std::make_unsigned_t<T>(x)));
}
template <class T>
  requires std::is_integral_v<T>
constexpr T clz(T x) {
  return T(std::countl_zero(std::make_unsigned_t<T>(x)));
}
template <class T>
  requires std::is_integral_v<T>
constexpr T ctz(T x) {
  return T(std::countr_zero(std::make_unsigned_t<T>(x)));
}
template <class T>
  requires std::is_integral_v<T>
constexpr T rotate(T x, T by) {
  using U = std::make_unsigned_t<T>;
  return T(std::rotl(U(x), int(U(by) % (sizeof(T) * 8))));
}
template <class T>
  requires std::is_integral_v<T>
constexpr T reverse_bits(T x) {
  using U = std::make_unsigned_t<T>;
  U r = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; ++i) r = U(r << 1 | (U(x) >> i & 1));
  return T(r);
}
template <class T>
  requires(std::is_integral_v<T> && sizeof(T) <= 8)
constexpr T mulhi(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return T(Wide(a) * Wide(b) >> sizeof(T) * 8);
}
template <class T>
  requires std::is_integral_v<T>
constexpr T extract_bits(T x, uint offset, uint bits) {
  using U = std::make_unsigned_t<T>;
  if (bits == 0) return 0;
  const unsigned up = unsigned(sizeof(T) * 8) - bits;
  return T(T(U(U(x) >> offset) << up) >> up);
}
template <class T>
  requires std::is_integral_v<T>
constexpr T absdiff(T a, T b) {
  return a < b ? T(b - a) : T(a - b);
}
}  // namespace metal
