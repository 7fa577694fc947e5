// What the checks of blocks ask of their input and their weights.
#pragma once

#include <initializer_list>
#include <optional>

#include "mlxtape/nn/linear.h"
#include "ops/expect.h"

namespace mlxtape::nn {

// x: [B, L, H].
inline Check expect_tokens(const char* block, const Tensor& x) {
  if (x.rank() == 3) return std::nullopt;
  return Error(Errc::kShape, std::string(block) + ": x must be [batch, tokens, width], got " +
                                 to_string(x.shape()));
}

// What a weight has beside it, if anything.
inline Check expect_adapter(const char* block, const char* name, const Tensor& x, const Weight& w) {
  const auto& [a, b, scale, dropout, key] = w.adapter;
  if (!w.adapter.defined()) return std::nullopt;
  const std::string must = std::string(block) + ": " + name + "'s adapter must ";
  const Shape shape = w.shape();
  const bool experts = shape.rank() == 3;
  const std::int64_t axis = experts ? 1 : a.rank() - 1;
  const std::int64_t rank = a.rank() == shape.rank() ? a.shape()[axis] : 0;
  const Shape a_shape = experts ? Shape{shape[0], rank, shape[2]} : Shape{shape[1], rank};
  const Shape b_shape = experts ? Shape{shape[0], shape[1], rank} : Shape{rank, shape[0]};
  if (rank < 1 || !(a.shape() == a_shape) || !(b.shape() == b_shape)) {
    return Error(
        Errc::kShape,
        must + (experts ? "be a [E, r, in] and b [E, out, r]" : "be a [in, r] and b [r, out]") +
            " for a weight " + to_string(shape) + ", got " + to_string(a.shape()) + " and " +
            to_string(b.shape()));
  }
  for (const Tensor& t : {a, b}) {
    const DType dtype = t.dtype() == DType::kF32 ? DType::kF32 : x.dtype();
    if (const Check check = ops::expect_tensor({block, "x", x}, name, t, t.shape(), dtype)) {
      return check;
    }
  }
  if (dropout < 0 || dropout >= 1 || (dropout > 0 && (experts || !key.defined()))) {
    return Error(Errc::kArgument,
                 must +
                     (experts ? "have no dropout, being of experts, got "
                              : "have a dropout from 0 to below 1, and a key with it, got ") +
                     std::to_string(dropout));
  }
  return std::nullopt;
}

constexpr std::int64_t kAny = -1;  // in a weight's shape: any number from 1 on

struct Expected {
  const char* name;
  Weight weight;
  Shape shape;                      // of the numbers, quantised or not
  std::optional<DType> dtype = {};  // that of x unless said
};

inline Check expect_weights(const char* block, const Tensor& x,
                            std::initializer_list<Expected> weights) {
  for (const Expected& w : weights) {
    const std::string must = std::string(block) + ": " + w.name + " must be ";
    if (!w.weight.defined()) return Error(Errc::kArgument, must + "given");
    Shape shape = w.shape;
    const Shape got = w.weight.shape();
    bool fits = got.rank() == shape.rank();
    std::string said = "[";
    for (std::int64_t i = 0; i < shape.rank(); ++i) {
      said += (i == 0 ? "" : ", ") + (shape[i] == kAny ? "any" : std::to_string(shape[i]));
      if (fits && shape[i] == kAny) shape[i] = got[i];
      fits = fits && shape[i] == got[i] && (w.shape[i] != kAny || shape[i] > 0);
    }
    if (!fits) {
      return Error(Errc::kShape, must + said + "], got " + to_string(got));
    }
    if (const Check check = expect_adapter(block, w.name, x, w.weight)) return check;
    if (w.weight.is_quantized()) continue;  // the op that unpacks it says what it needs
    if (const Check check = ops::expect_tensor({block, "x", x}, w.name, w.weight.plain, shape,
                                               w.dtype.value_or(x.dtype()))) {
      return check;
    }
  }
  return std::nullopt;
}

// The same of weights that need not be there.
inline Check expect_those_given(const char* block, const Tensor& x,
                                std::initializer_list<Expected> weights) {
  for (const Expected& w : weights) {
    if (!w.weight.defined()) continue;
    if (const Check check = expect_weights(block, x, {w})) return check;
  }
  return std::nullopt;
}

// A network of its own, or of a block, in which its weights have these names.
inline Check expect_swiglu(const char* block, const Tensor& x, const SwigluWeights& w,
                           const char* gate, const char* up, const char* down) {
  const std::int64_t width = x.shape().back();
  if (const Check check = expect_weights(block, x, {{gate, w.gate, {kAny, width}}})) return check;
  const std::int64_t inner = w.gate.shape()[0];
  if (const Check check =
          expect_weights(block, x, {{up, w.up, {inner, width}}, {down, w.down, {width, inner}}})) {
    return check;
  }
  return expect_those_given(block, x,
                            {{"gate_bias", w.gate_bias, {inner}},
                             {"up_bias", w.up_bias, {inner}},
                             {"down_bias", w.down_bias, {width}}});
}

// Weights of another form of the block: why says beside what, or without what, they must not come.
struct Other {
  const char* name;
  Weight weight;
};
inline Check expect_absent(const char* block, std::initializer_list<Other> others,
                           const char* why) {
  for (const Other& other : others) {
    if (other.weight.defined()) {
      return Error(Errc::kArgument,
                   std::string(block) + ": " + other.name + " must not be given " + why);
    }
  }
  return std::nullopt;
}

}  // namespace mlxtape::nn
