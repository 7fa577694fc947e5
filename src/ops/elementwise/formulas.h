// The elementwise formulas, each written once and read by every backend's compiler and by the host files.
//
// V is a number of the backend: a vector of f32, one f32, or, where only the value is used, an integer.
// It has the operators, and abs, exp, log, log1p, max, min, normal, pow, rsqrt, select, sigmoid, sqrt, tanh:
// what those do at the edges (NaN, infinity) is the backend's promise. g is dL/dy.
//
// Included inside the namespace of whoever reads it, once for each instruction set: no guard, no includes.

#ifndef MT_FORMULA
#define MT_FORMULA \
  inline  // a kernel file says how its functions are declared before it includes this
#endif
#ifdef __METAL_VERSION__
#define MT_OWN thread  // where references to results point
#else
#define MT_OWN
#endif

// name, what the gradient is made from (x, y or nothing), y of x, dx of that and g
#define MT_UNARY_FORMULAS(F)                                               \
  F(abs, x, abs(x), select(x > V(0), g, select(x < V(0), -g, V(0))))       \
  F(exp, y, exp(x), g* y)                                                  \
  F(gelu, x, gelu_value(x), g* gelu_slope(x))                              \
  F(gelu_tanh, x, x* sigmoid(gelu_inner(x)).value, g* gelu_tanh_slope(x))  \
  F(log, x, log(x), g / x)                                                 \
  F(log1p, x, log1p(x), g / (x + V(1)))                                    \
  F(negative, nothing, -x, -g)                                             \
  F(rsqrt, y, rsqrt(x), g* V(-0.5F) * y * y * y)                           \
  F(sigmoid, y, sigmoid(x).value, g* y*(V(1) - y))                         \
  F(silu, x, x* sigmoid(x).value, g* silu_slope(x))                        \
  F(softplus, x, max(x, V(0)) + log1p(exp(-abs(x))), g * sigmoid(x).value) \
  F(sqrt, y, sqrt(x), V(0.5F) * g / y)                                     \
  F(square, x, x* x, V(2) * g * x)                                         \
  F(tanh, y, tanh(x), g*(V(1) - y * y))

// name, y of a and b. The gradients are made of dy and these functions themselves (elementwise_tape.cpp).
#define MT_PLAIN_FORMULAS(F) \
  F(add, a + b)              \
  F(multiply, a* b)          \
  F(subtract, a - b)

// name, y of a and b, then da and db, each after what it is made from besides g. Where a and b are equal,
// the larger and the smaller is b.
#define MT_BINARY_FORMULAS(F)                                                    \
  F(divide, a / b, b, g / b, ab, -(g * (a / b)) / b)                             \
  F(maximum, max(a, b), ab, select(a > b, g, V(0)), ab, select(a <= b, g, V(0))) \
  F(minimum, min(a, b), ab, select(a < b, g, V(0)), ab, select(a >= b, g, V(0))) \
  F(power, pow(a, b), ab, g*(b * pow(a, b - V(1))), ab, power_slope(a, b, g))

// name, is it so?
#define MT_COMPARE_FORMULAS(F) \
  F(equal, a == b)             \
  F(greater, a > b)            \
  F(greater_equal, a >= b)     \
  F(less, a < b)               \
  F(less_equal, a <= b)        \
  F(not_equal, a != b)

// clip: x where low < x < high, else the nearer of the two (high where they cross).
template <class V>
MT_FORMULA V clip_value(V x, V low, V high) {
  return min(max(x, low), high);
}
template <class V>
MT_FORMULA V clip_pull(V g, V x, V low, V high) {
  return select(x > low, select(x < high, g, V(0)), V(0));
}

// gelu: x·Φ(x), with the slope Φ(x) + x·φ(x).
template <class V>
MT_FORMULA V gelu_value(V x) {
  return x * normal(x).share;
}
template <class V>
MT_FORMULA V gelu_slope(V x) {
  const auto n = normal(x);
  return n.share + x * n.density;
}

// gelu_tanh: x/2·(1 + tanh(u/2)) = x·σ(u). Its slope's second term is 0 in f32 from |x| = 16 on, before
// x³ can overflow.
template <class V>
MT_FORMULA V gelu_inner(V x) {
  constexpr float kTwice = 1.5957691216F;  // 2·√(2/π)
  return V(kTwice) * (x + V(0.044715F) * x * x * x);
}
template <class V>
MT_FORMULA V gelu_tanh_slope(V x) {
  constexpr float kTwice = 1.5957691216F;
  const auto s = sigmoid(gelu_inner(x));
  const V near = min(max(x, V(-16)), V(16));
  return s.value + near * s.value * s.rest * (V(kTwice) * (V(1) + V(3 * 0.044715F) * near * near));
}

template <class V>
MT_FORMULA V silu_slope(V x) {
  const auto s = sigmoid(x);
  return s.value * (V(1) + x * s.rest);
}

// swiglu: silu(a)·b and both gradients from one σ.
template <class V>
MT_FORMULA V swiglu_value(V a, V b) {
  return a * sigmoid(a).value * b;
}
template <class V>
MT_FORMULA void swiglu_pull(V g, V a, V b, MT_OWN V& da, MT_OWN V& db) {
  const auto s = sigmoid(a);
  const V silu = a * s.value;
  da = g * b * (s.value * (V(1) + a * s.rest));
  db = g * silu;
}

// d(a^b)/db = a^b·log a; 0 where a^b is, whatever log a.
template <class V>
MT_FORMULA V power_slope(V a, V b, V g) {
  const V y = pow(a, b);
  return select(y == V(0), V(0), g * (log(a) * y));
}

#undef MT_OWN

#ifndef __METAL_VERSION__
// <name>_formula: the rows of the tables as types. Metal's kernels choose a row by its number instead.
#define MT_UNARY_TYPE(name, kept, of_x, pulled)                  \
  struct name##_formula {                                        \
    static constexpr char kKeeps = *#kept; /* 'x', 'y' or 'n' */ \
    template <class V>                                           \
    static MT_FORMULA V value(V x) {                             \
      return of_x;                                               \
    }                                                            \
    template <class V>                                           \
    static MT_FORMULA V pull(V g, [[maybe_unused]] V kept) {     \
      return pulled;                                             \
    }                                                            \
  };
#define MT_PLAIN_TYPE(name, of_ab)        \
  struct name##_formula {                 \
    template <class V>                    \
    static MT_FORMULA V value(V a, V b) { \
      return of_ab;                       \
    }                                     \
  };
#define MT_BINARY_TYPE(name, of_ab, a_needs, of_a, b_needs, of_b)                 \
  struct name##_formula {                                                         \
    template <class V>                                                            \
    static MT_FORMULA V value(V a, V b) {                                         \
      return of_ab;                                                               \
    }                                                                             \
    template <class V>                                                            \
    static MT_FORMULA V pull_a(V g, [[maybe_unused]] V a, [[maybe_unused]] V b) { \
      return of_a;                                                                \
    }                                                                             \
    template <class V>                                                            \
    static MT_FORMULA V pull_b(V g, [[maybe_unused]] V a, [[maybe_unused]] V b) { \
      return of_b;                                                                \
    }                                                                             \
  };
#define MT_COMPARE_TYPE(name, of_ab)         \
  struct name##_formula {                    \
    template <class V>                       \
    static MT_FORMULA auto value(V a, V b) { \
      return of_ab;                          \
    }                                        \
  };
MT_UNARY_FORMULAS(MT_UNARY_TYPE)
MT_PLAIN_FORMULAS(MT_PLAIN_TYPE)
MT_BINARY_FORMULAS(MT_BINARY_TYPE)
MT_COMPARE_FORMULAS(MT_COMPARE_TYPE)
#undef MT_UNARY_TYPE
#undef MT_PLAIN_TYPE
#undef MT_BINARY_TYPE
#undef MT_COMPARE_TYPE
#endif
