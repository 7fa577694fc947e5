// Vectors of 2, 3 and 4 elements: aligned ones, and packed ones that convert to and from them.
#pragma once

#include "backends/metal/emulator/msl/numbers.h"

#define MLXTAPE_UNROLL _Pragma("GCC unroll 4")

namespace metal {
template <class T, int N>
struct vec;
template <class T, int N>
struct packed_vec;
template <class T, int N, int... kPlaces>
struct Places;

template <class T, int N>
struct Elements;
template <class T>
struct Elements<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
  };
};
template <class T>
struct Elements<T, 3> {
  union {
    T v[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
  };
};
template <class T>
struct Elements<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
  };
};

template <class T>
inline constexpr int count_of = 1;  // elements
template <class T, int N>
inline constexpr int count_of<vec<T, N>> = N;
template <class T, int N>
inline constexpr int count_of<packed_vec<T, N>> = N;

template <class S>
concept ScalarValue = Arithmetic<S> || is_small<S>;
// A vector takes a scalar of its elements' type, or one that loses nothing by becoming it.
template <class S, class T>
concept ScalarFor =
    ScalarValue<S> && (std::is_same_v<S, T> || !is_small<T> || std::is_integral_v<S>);

template <class T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : Elements<T, N> {
  using Elements<T, N>::v;
  vec() = default;
  template <ScalarValue S>
  constexpr vec(S s) {
    const T t = T(s);
    MLXTAPE_UNROLL for (int i = 0; i < N; ++i) v[i] = t;
  }
  template <class U>
    requires(!std::is_same_v<U, T>)
  constexpr explicit vec(const vec<U, N>& o) {
    MLXTAPE_UNROLL for (int i = 0; i < N; ++i) v[i] = T(o.v[i]);
  }
  template <class... A>
    requires(sizeof...(A) >= 2 && (count_of<A> + ...) == N)
  constexpr vec(const A&... parts) {
    int i = 0;
    (put(i, parts), ...);
  }
  constexpr T& operator[](int i) { return v[i]; }
  constexpr const T& operator[](int i) const { return v[i]; }

  // v.zw is written so by bind.
  template <int... kPlaces>
  constexpr vec<T, sizeof...(kPlaces)> swizzle() const {
    return vec<T, sizeof...(kPlaces)>(v[kPlaces]...);
  }
  // v.zw = or v.zw += is.
  template <int... kPlaces>
  constexpr auto places() {
    return Places<T, N, kPlaces...>{*this};
  }

 private:
  template <class A>
  constexpr void put(int& i, const A& part) {
    if constexpr (count_of<A> == 1) {
      v[i++] = T(part);
    } else {
      for (int k = 0; k < count_of<A>; ++k) v[i++] = T(part.v[k]);
    }
  }
};

template <class T, int N, int... kPlaces>
struct Places {
  using Value = vec<T, sizeof...(kPlaces)>;
  vec<T, N>& whole;
  constexpr void operator=(Value from) {
    int i = 0;
    ((whole.v[kPlaces] = from.v[i++]), ...);
  }
  constexpr void operator+=(Value by) { *this = whole.template swizzle<kPlaces...>() + by; }
  constexpr void operator-=(Value by) { *this = whole.template swizzle<kPlaces...>() - by; }
  constexpr void operator*=(Value by) { *this = whole.template swizzle<kPlaces...>() * by; }
};

template <class T, int N>
struct packed_vec {
  T v[N];
  packed_vec() = default;
  constexpr packed_vec(vec<T, N> o) { MLXTAPE_UNROLL for (int i = 0; i < N; ++i) v[i] = o.v[i]; }
  template <ScalarFor<T> S>
  constexpr explicit packed_vec(S s) : packed_vec(vec<T, N>(s)) {}
  template <class... A>
    requires(sizeof...(A) >= 2)
  constexpr packed_vec(const A&... parts) : packed_vec(vec<T, N>(parts...)) {}
  constexpr operator vec<T, N>() const {
    vec<T, N> r;
    MLXTAPE_UNROLL for (int i = 0; i < N; ++i) r.v[i] = v[i];
    return r;
  }
  constexpr T& operator[](int i) { return v[i]; }
  constexpr const T& operator[](int i) const { return v[i]; }
};

// Of what a result consists: elements of T for arithmetic, of bool for comparisons.
#define MLXTAPE_VECTOR(op, R)                                                \
  template <class T, int N>                                                  \
  constexpr vec<R, N> operator op(vec<T, N> a, vec<T, N> b) {                \
    vec<R, N> r;                                                             \
    MLXTAPE_UNROLL for (int i = 0; i < N; ++i) r.v[i] = R(a.v[i] op b.v[i]); \
    return r;                                                                \
  }                                                                          \
  template <class T, int N, ScalarFor<T> S>                                  \
  constexpr vec<R, N> operator op(vec<T, N> a, S b) {                        \
    return a op vec<T, N>(b);                                                \
  }                                                                          \
  template <class T, int N, ScalarFor<T> S>                                  \
  constexpr vec<R, N> operator op(S a, vec<T, N> b) {                        \
    return vec<T, N>(a) op b;                                                \
  }
#define MLXTAPE_ASSIGNING(op)                                            \
  MLXTAPE_VECTOR(op, T)                                                  \
  template <class T, int N, class S>                                     \
  constexpr vec<T, N>& operator op##=(vec<T, N>& a, S b) {               \
    return a = a op b;                                                   \
  }                                                                      \
  template <class T, int N, class S>                                     \
  constexpr packed_vec<T, N>& operator op##=(packed_vec<T, N>& a, S b) { \
    return a = vec<T, N>(a) op b;                                        \
  }
MLXTAPE_ASSIGNING(+)
MLXTAPE_ASSIGNING(-)
MLXTAPE_ASSIGNING(*)
MLXTAPE_ASSIGNING(/)
MLXTAPE_ASSIGNING(%)
MLXTAPE_ASSIGNING(&)
MLXTAPE_ASSIGNING(|)
MLXTAPE_ASSIGNING(^)
MLXTAPE_ASSIGNING(<<)
MLXTAPE_ASSIGNING(>>)
MLXTAPE_VECTOR(<, bool)
MLXTAPE_VECTOR(<=, bool)
MLXTAPE_VECTOR(>, bool)
MLXTAPE_VECTOR(>=, bool)
MLXTAPE_VECTOR(==, bool)
MLXTAPE_VECTOR(!=, bool)
MLXTAPE_VECTOR(&&, bool)
MLXTAPE_VECTOR(||, bool)
#undef MLXTAPE_ASSIGNING
#undef MLXTAPE_VECTOR

template <class T, int N>
constexpr vec<T, N> operator-(vec<T, N> a) {
  MLXTAPE_UNROLL for (int i = 0; i < N; ++i) a.v[i] = T(-a.v[i]);
  return a;
}
template <class T, int N>
constexpr vec<T, N> operator~(vec<T, N> a) {
  MLXTAPE_UNROLL for (int i = 0; i < N; ++i) a.v[i] = T(~a.v[i]);
  return a;
}
template <int N>
constexpr vec<bool, N> operator!(vec<bool, N> a) {
  MLXTAPE_UNROLL for (int i = 0; i < N; ++i) a.v[i] = !a.v[i];
  return a;
}

template <class T, int N>
constexpr T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a.v[0] * b.v[0];
  for (int i = 1; i < N; ++i) sum = T(sum + a.v[i] * b.v[i]);
  return sum;
}
template <int N>
constexpr bool all(vec<bool, N> a) {
  bool r = true;
  for (int i = 0; i < N; ++i) r = r && a.v[i];
  return r;
}
template <int N>
constexpr bool any(vec<bool, N> a) {
  bool r = false;
  for (int i = 0; i < N; ++i) r = r || a.v[i];
  return r;
}
constexpr bool all(bool a) { return a; }
constexpr bool any(bool a) { return a; }
}  // namespace metal

#define MLXTAPE_VECTORS_OF(t)                    \
  using t##2 = metal::vec<t, 2>;                 \
  using t##3 = metal::vec<t, 3>;                 \
  using t##4 = metal::vec<t, 4>;                 \
  using packed_##t##2 = metal::packed_vec<t, 2>; \
  using packed_##t##3 = metal::packed_vec<t, 3>; \
  using packed_##t##4 = metal::packed_vec<t, 4>;
MLXTAPE_VECTORS_OF(float)
MLXTAPE_VECTORS_OF(half)
MLXTAPE_VECTORS_OF(bfloat)
MLXTAPE_VECTORS_OF(char)
MLXTAPE_VECTORS_OF(uchar)
MLXTAPE_VECTORS_OF(short)
MLXTAPE_VECTORS_OF(ushort)
MLXTAPE_VECTORS_OF(int)
MLXTAPE_VECTORS_OF(uint)
MLXTAPE_VECTORS_OF(long)
MLXTAPE_VECTORS_OF(ulong)
#undef MLXTAPE_VECTORS_OF
using bool2 = metal::vec<bool, 2>;
using bool3 = metal::vec<bool, 3>;
using bool4 = metal::vec<bool, 4>;
