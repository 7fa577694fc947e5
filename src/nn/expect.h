// What the checks of blocks ask of their input and their weights.
#pragma once

#include <initializer_list>
#include <optional>

#include "ops/expect.h"

namespace mlxtape::nn {

// x: [B, L, H].
inline Check expect_tokens(const char* block, const Tensor& x) {
  if (x.rank() == 3) return std::nullopt;
  return Error(Errc::kShape, std::string(block) + ": x must be [batch, tokens, width], got " +
                                 to_string(x.shape()));
}

struct Weight {
  bool wanted;
  const char* name;
  const Tensor& tensor;
  Shape shape;
  std::optional<DType> dtype = {};  // that of x unless said
};

// Those that are wanted have their shapes, the others are not defined.
inline Check expect_weights(const char* block, const Tensor& x,
                            std::initializer_list<Weight> weights) {
  for (const Weight& w : weights) {
    if (!w.wanted && w.tensor.defined()) {
      return Error(Errc::kArgument,
                   std::string(block) + ": " + w.name + " must not be given beside the others");
    }
    if (!w.wanted) continue;
    if (!w.tensor.defined()) {
      return Error(Errc::kArgument, std::string(block) + ": " + w.name + " must be given");
    }
    if (const Check check = ops::expect_tensor({block, "x", x}, w.name, w.tensor, w.shape,
                                               w.dtype.value_or(x.dtype()))) {
      return check;
    }
  }
  return std::nullopt;
}

}  // namespace mlxtape::nn
