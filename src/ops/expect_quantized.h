// What the validators of ops with quantised weights ask of them.
#pragma once

#include "mlxtape/ops/quantize.h"
#include "ops/expect.h"

namespace mlxtape::ops {

// who: "quantize: ", or "quantized_experts: gate ".
inline Check expect_format(const std::string& who, int bits, int group_size) {
  if (bits < 2 || bits > 8 || bits == 7) {
    return Error(Errc::kArgument,
                 who + "bits must be 2, 3, 4, 5, 6 or 8, got " + std::to_string(bits));
  }
  if (group_size != 32 && group_size != 64 && group_size != 128) {
    return Error(Errc::kArgument,
                 who + "group_size must be 32, 64 or 128, got " + std::to_string(group_size));
  }
  return std::nullopt;
}

// w [rows..., k] beside a first tensor, scales and biases of its type, type, or f32. whose: "", or "gate ".
inline Check expect_quantized(const Beside& first, const std::string& whose,
                              const QuantizedWeight& w, Shape rows, std::int64_t k, DType type) {
  const std::string who = std::string(first.op) + ": " + whose;
  if (const Check check = expect_format(who, w.format.bits, w.format.group_size)) return check;
  if (k % w.format.group_size != 0) {
    return Error(Errc::kShape, who + "rows must be a multiple of the group size " +
                                   std::to_string(w.format.group_size) + " long, got " +
                                   std::to_string(k));
  }
  const auto expect = [&](const char* name, const Tensor& t, std::int64_t length, DType dtype) {
    Shape shape = rows;
    shape.push_back(length);
    return expect_tensor(first, (whose + name).c_str(), t, shape, dtype);
  };
  if (const Check check = expect("codes", w.codes, k * w.format.bits / 32, DType::kU32))
    return check;
  const DType params = w.scales.dtype() == DType::kF32 ? DType::kF32 : type;
  if (const Check check = expect("scales", w.scales, k / w.format.group_size, params)) return check;
  return expect("biases", w.biases, k / w.format.group_size, params);
}

}  // namespace mlxtape::ops
