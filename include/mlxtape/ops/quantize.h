// quantize: quantises weights to small integer codes with a scale and a bias per group; dequantize reverses it.
//
// Formula    For each group of group_size neighbours of a row, n = 2^bits − 1:
//            hi = max w, lo = min w;  low = |lo| > |hi|;  e = low ? lo : hi, the edge that is represented exactly
//            s₀ = max((hi − lo)/n, 1e-7), negative unless low;  q₀ = round(e/s₀)
//            s = e/q₀, b = e, or if q₀ = 0: s = s₀, b = 0
//            q = round((w − b)/s), within [0, n]
//            dequantize: w = s·q + b
//            kCpu rounds half to even. kGpu rounds half away from 0 and lets hi begin at 0, as for
//            published files: an all-negative group is quantised as if it contained a 0.
// Gradient   of dequantize: ds = Σ dw·q, db = Σ dw over the group. quantize and the codes have none.
// Layout     w: [..., out, in]; scales, biases: [..., out, in/group_size]; codes: u32 [..., out, in·bits/32], a row's
//            codes form one stream of bits, beginning with the lowest bits of the first word. Strided inputs are
//            copied first. Saved: codes.
// Types      w: f32, f16, bf16; quantize returns scales and biases of w's type, dequantize any of the three, by default
//            that of the scales. Arithmetic is f32, rounded once when stored: codes are computed with the unrounded s.
//            With kCpu, quantize is bit-identical to MLX on a CPU; so is dequantize for f32. In 16 bits MLX rounds s·q
//            first, so that of normally distributed weights 16 % at 2 bits, 49 % at 4 and 64 % at 8 differ by one
//            rounding. Gradients: f32 sums.
// Cost       quantize reads w once and writes the rest; dequantize reads codes, scales and biases once and writes w, its
//            gradient reads codes and dw. Memory-bound.
// Limits     bits 2, 3, 4, 5, 6, 8; group_size 32, 64, 128, a divisor of in; rank ≥ 2; any extent may be 0.
//            With s and b in f32, the error of w is at most |s|/2, or |s| if q = n, and that of a 0 one rounding of b.
//            A group with NaN or ±inf has NaN for s and b and codes 0; one whose hi − lo overflows has s = ±inf
//            and becomes NaN.
#pragma once

#include <optional>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct QuantizeFormat {
  int bits = 4;
  int group_size = 64;
};
enum class QuantizeRule { kGpu, kCpu };

struct QuantizedWeight {
  Tensor codes, scales, biases;
  QuantizeFormat format = {};
};

Check quantize_check(const Tensor& w, const QuantizeFormat& format);
QuantizedWeight quantize(CommandEncoder& encoder, const Tensor& w,
                         const QuantizeFormat& format = {}, QuantizeRule rule = QuantizeRule::kGpu);

Check dequantize_check(const QuantizedWeight& w, DType dtype);
Tensor dequantize(CommandEncoder& encoder, const QuantizedWeight& w,
                  std::optional<DType> dtype = std::nullopt);
Tensor dequantize(Tape& tape, const QuantizedWeight& w, std::optional<DType> dtype = std::nullopt);

struct DequantizeGradients {
  Tensor d_scales, d_biases;  // in the scales' type
};
Check dequantize_backward_check(const QuantizedWeight& w, const Tensor& dw);
DequantizeGradients dequantize_backward(CommandEncoder& encoder, const QuantizedWeight& w,
                                        const Tensor& dw);

}  // namespace mlxtape::ops
