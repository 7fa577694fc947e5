// Metal's library as declarations alone, with address spaces as types: for the pass that reads every kernel with Clang in
// its mode for OpenCL C++, whose address spaces behave as Metal's do (bind writes the text for it, scripts/metal_strict.sh
// runs it). Nothing here is ever linked.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define MAXFLOAT 3.402823466e+38F
#define FLT_MAX 3.402823466e+38F
#define FLT_MIN 1.175494351e-38F
#define FLT_EPSILON 1.192092896e-07F
#define HUGE_VALF INFINITY
#define M_PI_F 3.14159265358979323846F
#define M_PI_2_F 1.57079632679489661923F
#define M_1_PI_F 0.318309886183790671538F
#define M_2_SQRTPI_F 1.12837916709551257390F
#define M_SQRT2_F 1.41421356237309504880F
#define M_SQRT1_2_F 0.707106781186547524401F
#define M_E_F 2.71828182845904523536F
#define M_LOG2E_F 1.44269504088896340736F
#define M_LN2_F 0.693147180559945309417F
#define INT_MAX 0x7FFFFFFF
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 0xFFFFFFFFu

typedef __bf16 bfloat;

// Words of OpenCL that are none of Metal's.
#define local local_
#define global global_
#define generic generic_
#define pipe pipe_
#define uniform uniform_
#define read_only read_only_
#define write_only write_only_
#define read_write read_write_

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <class T, int N>
struct packed_vec {
  packed_vec() = default;
  packed_vec(vec<T, N>);
  template <class... A>
  explicit packed_vec(A...);
  operator vec<T, N>() const;
  T operator[](int) const;
  T v[N];
};

template <class A, class B>
struct is_same {
  static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
  static constexpr bool value = true;
};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;
template <bool kChoice, class A, class B>
struct conditional {
  typedef A type;
};
template <class A, class B>
struct conditional<false, A, B> {
  typedef B type;
};
template <bool kChoice, class A, class B>
using conditional_t = typename conditional<kChoice, A, B>::type;
template <bool kChoice, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool kChoice, class T = void>
using enable_if_t = typename enable_if<kChoice, T>::type;

// What float4(...) is read as: any vectors and scalars, as many as there are elements.
template <class V, class... A>
V made_of(A...);
template <class To, class From>
To as_type(From);
// What threadgroup variables are.
template <class T>
__local T& room_of();

template <class T>
struct numeric_limits {
  static constexpr T max() { return T(1); }
  static constexpr T min() { return T(1); }
  static constexpr T lowest() { return T(1); }
  static constexpr T epsilon() { return T(1); }
  static constexpr T infinity() { return T(1); }
  static constexpr T quiet_NaN() { return T(1); }
};

#define MLXTAPE_UNARY(name)          \
  float name(float);                 \
  half name(half);                   \
  template <int N>                   \
  vec<float, N> name(vec<float, N>); \
  template <int N>                   \
  vec<half, N> name(vec<half, N>);
#define MLXTAPE_PRECISE_AND_FAST(name) \
  namespace precise {                  \
  MLXTAPE_UNARY(name)                  \
  }                                    \
  namespace fast {                     \
  MLXTAPE_UNARY(name)                  \
  }                                    \
  using precise::name;
MLXTAPE_PRECISE_AND_FAST(exp)
MLXTAPE_PRECISE_AND_FAST(exp2)
MLXTAPE_PRECISE_AND_FAST(exp10)
MLXTAPE_PRECISE_AND_FAST(log)
MLXTAPE_PRECISE_AND_FAST(log2)
MLXTAPE_PRECISE_AND_FAST(log10)
MLXTAPE_PRECISE_AND_FAST(sin)
MLXTAPE_PRECISE_AND_FAST(cos)
MLXTAPE_PRECISE_AND_FAST(tan)
MLXTAPE_PRECISE_AND_FAST(tanh)
MLXTAPE_PRECISE_AND_FAST(rsqrt)
MLXTAPE_PRECISE_AND_FAST(sqrt)
MLXTAPE_UNARY(asin)
MLXTAPE_UNARY(acos)
MLXTAPE_UNARY(atan)
MLXTAPE_UNARY(sinh)
MLXTAPE_UNARY(cosh)
MLXTAPE_UNARY(asinh)
MLXTAPE_UNARY(acosh)
MLXTAPE_UNARY(atanh)
MLXTAPE_UNARY(floor)
MLXTAPE_UNARY(ceil)
MLXTAPE_UNARY(trunc)
MLXTAPE_UNARY(round)
MLXTAPE_UNARY(rint)
MLXTAPE_UNARY(fabs)
MLXTAPE_UNARY(fract)
MLXTAPE_UNARY(saturate)
MLXTAPE_UNARY(sign)
#undef MLXTAPE_PRECISE_AND_FAST
#undef MLXTAPE_UNARY
namespace precise {
float divide(float, float);
float pow(float, float);
float powr(float, float);
float atan2(float, float);
}  // namespace precise
namespace fast {
float divide(float, float);
float pow(float, float);
float powr(float, float);
}  // namespace fast
using precise::atan2;
using precise::divide;
using precise::pow;
using precise::powr;
half pow(half, half);

// Of one type: a call with two types is ambiguous, as it is in Metal.
#define MLXTAPE_EACH(declare)                                                              \
  declare(float) declare(half) declare(bfloat) declare(char) declare(uchar) declare(short) \
      declare(ushort) declare(int) declare(uint) declare(long) declare(ulong)
#define MLXTAPE_DECLARE(T) \
  T min(T, T);             \
  T max(T, T);             \
  T clamp(T, T, T);        \
  T select(T, T, bool);
MLXTAPE_EACH(MLXTAPE_DECLARE)
#undef MLXTAPE_DECLARE
template <class T, int N>
vec<T, N> min(vec<T, N>, vec<T, N>);
template <class T, int N>
vec<T, N> max(vec<T, N>, vec<T, N>);
template <class T, int N>
vec<T, N> clamp(vec<T, N>, vec<T, N>, vec<T, N>);
template <class T, int N, class C>
vec<T, N> select(vec<T, N>, vec<T, N>, C);
float abs(float);
half abs(half);
int abs(int);
long abs(long);
float fmin(float, float);
float fmax(float, float);
float fmod(float, float);
float fma(float, float, float);
half fma(half, half, half);
template <class T, int N>
vec<T, N> fma(vec<T, N>, vec<T, N>, vec<T, N>);
float copysign(float, float);
float ldexp(float, int);
float mix(float, float, float);
float step(float, float);
float sincos(float, __private float&);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
bool signbit(float);
template <class T, int N>
T dot(vec<T, N>, vec<T, N>);
template <class T>
bool all(T);
template <class T>
bool any(T);
template <class T>
T popcount(T);
template <class T>
T clz(T);
template <class T>
T ctz(T);
template <class T>
T rotate(T, T);
template <class T>
T reverse_bits(T);
template <class T>
T mulhi(T, T);
template <class T>
T extract_bits(T, uint, uint);
template <class T>
T absdiff(T, T);

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define MLXTAPE_LANES(name) \
  template <class T>        \
  T name(T);
MLXTAPE_LANES(simd_sum)
MLXTAPE_LANES(simd_product)
MLXTAPE_LANES(simd_max)
MLXTAPE_LANES(simd_min)
MLXTAPE_LANES(simd_and)
MLXTAPE_LANES(simd_or)
MLXTAPE_LANES(simd_xor)
MLXTAPE_LANES(simd_broadcast_first)
MLXTAPE_LANES(simd_prefix_inclusive_sum)
MLXTAPE_LANES(simd_prefix_exclusive_sum)
MLXTAPE_LANES(simd_prefix_inclusive_product)
MLXTAPE_LANES(simd_prefix_exclusive_product)
#undef MLXTAPE_LANES
#define MLXTAPE_LANES(name) \
  template <class T>        \
  T name(T, ushort);
MLXTAPE_LANES(simd_shuffle)
MLXTAPE_LANES(simd_shuffle_xor)
MLXTAPE_LANES(simd_shuffle_down)
MLXTAPE_LANES(simd_shuffle_up)
MLXTAPE_LANES(simd_shuffle_rotate_down)
MLXTAPE_LANES(simd_shuffle_rotate_up)
MLXTAPE_LANES(simd_broadcast)
#undef MLXTAPE_LANES
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();
struct simd_vote {
  typedef ulong vote_t;
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
template <class T>
bool is_function_constant_defined(__constant const T&);

template <class T, int kColumns, int kRows>
struct simdgroup_matrix {
  static_assert(kColumns == 8 && kRows == 8, "Metal has 8x8 alone");
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  __private vec<T, 2>& thread_elements() __private;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int kColumns, int kRows>
simdgroup_matrix<T, kColumns, kRows> make_filled_simdgroup_matrix(T);
#define MLXTAPE_MATRICES(space)                                                           \
  template <class T>                                                                      \
  void simdgroup_load(__private simdgroup_matrix<T, 8, 8>&, space const T*, ulong = 8,    \
                      vec<ulong, 2> = 0, bool = false);                                   \
  template <class T>                                                                      \
  void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, vec<ulong, 2> = 0, \
                       bool = false);
MLXTAPE_MATRICES(__global)
MLXTAPE_MATRICES(__local)
#undef MLXTAPE_MATRICES
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                                   simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(__private simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                        simdgroup_matrix<B, 8, 8>);

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint>, "atomics are int or uint");
  T value;
};
template <class T>
struct same {
  typedef T type;
};
#define MLXTAPE_ATOMIC(name, space) \
  template <class T>                \
  T name(volatile space atomic<T>*, typename same<T>::type, memory_order);
#define MLXTAPE_ATOMICS(space)                                                                 \
  MLXTAPE_ATOMIC(atomic_fetch_add_explicit, space)                                             \
  MLXTAPE_ATOMIC(atomic_fetch_sub_explicit, space)                                             \
  MLXTAPE_ATOMIC(atomic_fetch_and_explicit, space)                                             \
  MLXTAPE_ATOMIC(atomic_fetch_or_explicit, space)                                              \
  MLXTAPE_ATOMIC(atomic_fetch_xor_explicit, space)                                             \
  MLXTAPE_ATOMIC(atomic_fetch_min_explicit, space)                                             \
  MLXTAPE_ATOMIC(atomic_fetch_max_explicit, space)                                             \
  MLXTAPE_ATOMIC(atomic_exchange_explicit, space)                                              \
  template <class T>                                                                           \
  T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                       \
  template <class T>                                                                           \
  void atomic_store_explicit(volatile space atomic<T>*, typename same<T>::type, memory_order); \
  template <class T>                                                                           \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, __private T*,          \
                                             typename same<T>::type, memory_order, memory_order);
MLXTAPE_ATOMICS(__global)
MLXTAPE_ATOMICS(__local)
#undef MLXTAPE_ATOMICS
#undef MLXTAPE_ATOMIC
}  // namespace metal

using metal::as_type;
using metal::memory_order_relaxed;
// OpenCL has types of these names.
typedef metal::atomic<int> metal_atomic_int;
typedef metal::atomic<uint> metal_atomic_uint;
#define atomic_int metal_atomic_int
#define atomic_uint metal_atomic_uint
#define MLXTAPE_VECTORS(T)                       \
  typedef metal::vec<T, 2> T##2;                 \
  typedef metal::vec<T, 3> T##3;                 \
  typedef metal::vec<T, 4> T##4;                 \
  typedef metal::packed_vec<T, 2> packed_##T##2; \
  typedef metal::packed_vec<T, 3> packed_##T##3; \
  typedef metal::packed_vec<T, 4> packed_##T##4;
MLXTAPE_EACH(MLXTAPE_VECTORS)
#undef MLXTAPE_VECTORS
#undef MLXTAPE_EACH
