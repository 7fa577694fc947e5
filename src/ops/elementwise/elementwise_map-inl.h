// The vocabulary of formulas.h for vectors of f32, and the loops that every formula runs in.
#include "backends/cpu/device/math-inl.h"
#include "backends/cpu/device/tasks.h"
#include "elementwise_pieces.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_ELEMENTWISE_MAP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_ELEMENTWISE_MAP_INL_H_
#undef MLXTAPE_ELEMENTWISE_MAP_INL_H_
#else
#define MLXTAPE_ELEMENTWISE_MAP_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {

#undef MT_FORMULA
#define MT_FORMULA HWY_INLINE
#include "ops/elementwise/formulas.h"

struct Truth {
  hn::Mask<DF> m;
};

// f32 lanes whose result is stored as T: functions need not be better than that.
template <class T>
struct Number {
  VF v;
  HWY_INLINE Number() = default;
  HWY_INLINE explicit Number(VF value) : v(value) {}
  HWY_INLINE explicit Number(float value) : v(hn::Set(DF(), value)) {}

  friend HWY_INLINE Number operator+(Number a, Number b) { return Number(hn::Add(a.v, b.v)); }
  friend HWY_INLINE Number operator-(Number a, Number b) { return Number(hn::Sub(a.v, b.v)); }
  friend HWY_INLINE Number operator*(Number a, Number b) { return Number(hn::Mul(a.v, b.v)); }
  friend HWY_INLINE Number operator/(Number a, Number b) { return Number(hn::Div(a.v, b.v)); }
  friend HWY_INLINE Number operator-(Number a) { return Number(hn::Neg(a.v)); }
  friend HWY_INLINE Truth operator==(Number a, Number b) { return {hn::Eq(a.v, b.v)}; }
  // Not Ne, which is false for NaN on some targets.
  friend HWY_INLINE Truth operator!=(Number a, Number b) { return {hn::Not(hn::Eq(a.v, b.v))}; }
  friend HWY_INLINE Truth operator<(Number a, Number b) { return {hn::Lt(a.v, b.v)}; }
  friend HWY_INLINE Truth operator<=(Number a, Number b) { return {hn::Le(a.v, b.v)}; }
  friend HWY_INLINE Truth operator>(Number a, Number b) { return {hn::Gt(a.v, b.v)}; }
  friend HWY_INLINE Truth operator>=(Number a, Number b) { return {hn::Ge(a.v, b.v)}; }
  friend HWY_INLINE Number select(Truth t, Number yes, Number no) {
    return Number(hn::IfThenElse(t.m, yes.v, no.v));
  }

  friend HWY_INLINE Number abs(Number x) { return Number(hn::Abs(x.v)); }
  friend HWY_INLINE Number sqrt(Number x) { return Number(hn::Sqrt(x.v)); }
  friend HWY_INLINE Number rsqrt(Number x) { return Number(rsqrt_f32(DF(), x.v)); }
  friend HWY_INLINE Number exp(Number x) { return Number(exp_for(DF(), T(), x.v)); }
  friend HWY_INLINE Number log(Number x) { return Number(log_f32(DF(), x.v)); }
  friend HWY_INLINE Number log1p(Number x) { return Number(log1p_f32(DF(), x.v)); }
  friend HWY_INLINE Number tanh(Number x) { return Number(tanh_f32(DF(), x.v)); }
  friend HWY_INLINE Number pow(Number a, Number b) { return Number(pow_f32(DF(), a.v, b.v)); }
  // NaN if either is; b where they are equal.
  friend HWY_INLINE Number max(Number a, Number b) {
    const VF larger = hn::IfThenElse(hn::Gt(a.v, b.v), a.v, b.v);
    return Number(hn::IfThenElse(hn::IsNaN(a.v), a.v, larger));
  }
  friend HWY_INLINE Number min(Number a, Number b) {
    const VF smaller = hn::IfThenElse(hn::Lt(a.v, b.v), a.v, b.v);
    return Number(hn::IfThenElse(hn::IsNaN(a.v), a.v, smaller));
  }
};

template <class T>
struct SigmoidOf {
  Number<T> value, rest;
};
template <class T>
HWY_INLINE SigmoidOf<T> sigmoid(Number<T> x) {
  const Sigmoid s = sigmoid(DF(), T(), x.v);
  return {Number<T>(s.value), Number<T>(s.rest)};
}
template <class T>
struct NormalOf {
  Number<T> share, density;
};
template <class T>
HWY_INLINE NormalOf<T> normal(Number<T> x) {
  const Normal n = normal(DF(), x.v);
  return {Number<T>(n.share), Number<T>(n.density)};
}

// ---- loops ----

// fn(numbers...) of K operands, one vector.
template <class T, class Fn, std::size_t... I>
HWY_INLINE auto apply(const Fn& fn, const VF* v, std::index_sequence<I...>) {
  return fn(Number<T>(v[I])...);
}

template <class T, int K>
struct Inputs {
  const T* in[K];
  std::size_t step[K];

  HWY_INLINE explicit Inputs(const Piece& piece) {
    for (int k = 0; k < K; ++k) {
      in[k] = static_cast<const T*>(piece.in[k]);
      step[k] = piece.step[k];
    }
  }
  HWY_INLINE void pair(DF d, std::size_t i, VF* a, VF* b) const {
    for (int k = 0; k < K; ++k) load_pair(d, in[k] + i * step[k], a[k], b[k]);
  }
  HWY_INLINE void part(DF d, std::size_t i, std::size_t count, VF* a) const {
    for (int k = 0; k < K; ++k) a[k] = load_n(d, in[k] + i * step[k], count);
  }
};

// The first count of a vector's elements. A call: rare, and formulas are long.
template <class T, int K, class Fn>
HWY_NOINLINE VF map_part(const Inputs<T, K>& inputs, std::size_t i, std::size_t count,
                         const Fn& fn) {
  VF u[K];
  inputs.part(DF(), i, count, u);
  return apply<T>(fn, u, std::make_index_sequence<K>()).v;
}

template <bool kStream, class T, int K, class Fn>
HWY_INLINE void map_piece(const Piece& piece, T* out, const Fn& fn) {
  const DF d;
  const Inputs<T, K> inputs(piece);
  constexpr auto kAll = std::make_index_sequence<K>();
  write_pairs<kStream>(
      d, out + piece.at, piece.n,
      [&](std::size_t i, VF& a, VF& b) HWY_ATTR {
        VF u[K], v[K];
        inputs.pair(d, i, u, v);
        a = apply<T>(fn, u, kAll).v;
        b = apply<T>(fn, v, kAll).v;
      },
      [&](std::size_t i, std::size_t count) HWY_ATTR { return map_part(inputs, i, count, fn); });
}

inline bool streams(const KernelCall& call, std::size_t element) {
  return call.as<ElementwiseArgs>().size * static_cast<std::int64_t>(element) >= cpu::kStreamBytes;
}

// out = fn of K operands of type T.
template <class T, int K, class Fn>
void map(const KernelCall& call, const Fn& fn) {
  T* out = call.output<T>(0);
  const bool stream = streams(call, sizeof(T));
  for_pieces(call, {K, {sizeof(T), sizeof(T), sizeof(T), sizeof(T)}, kDType<T>, false, stream},
             [&](const Piece& piece) HWY_ATTR {
               stream ? map_piece<true, T, K>(piece, out, fn)
                      : map_piece<false, T, K>(piece, out, fn);
             });
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
