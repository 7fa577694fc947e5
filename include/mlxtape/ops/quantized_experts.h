// quantized_experts: the mixture of SwiGLU networks of experts, with quantised weights (quantize.h). With gradients.
//
// Formula    y = experts(x, route, w), each of gate, up and down being w = s·q + b (quantize.h)
// Gradient   dx and dscores as for experts; ds and db of each weight: from experts' dw as for dequantize
// Layout     x, y: [T, H]; the route as for experts; codes of gate and up: [E, I, H·bits/32], of down
//            [E, H, I·bits/32]; scales and biases with rows by groups. Each weight has its own bits and group size. Strided
//            inputs are copied first. Saved for backward: the inputs, and what experts saves.
// Types      x, scores, y: one of f32, f16, bf16; scales, biases: that type or f32; codes, indices, offsets: u32.
//            Sums are f32. Without a tape g, u, a and w are f32, only y is rounded; on a tape g, u and their
//            gradients are, too. A CPU that multiplies pairs of bf16 may also round w, and a in y, to it, forward and for experts
//            with more than 8 pairs. On a GPU, on a tape and with more than 8·E pairs, w is rounded to the type of x
//            and the rest is as in experts. ds and db have the type of the scales.
// Cost       bound by reading the codes of the chosen experts if these have few pairs. Without a tape: on a CPU
//            codes are read for each 8 of an expert's pairs, up to 16, or strips of the weights dequantised in the cache
//            for each 128; on a GPU for each pair, from its cache if there are many. On a tape: on a CPU as before; the
//            gradient also dequantises strips and computes dw in strips of 64 or 128 inner channels of an expert.
//            Nothing of the size of the weights is stored. On a GPU, on a tape and with more than 8·E pairs, all weights
//            are dequantised, and the gradient of scales and biases computes the whole of dw.
// Limits     those of experts and of quantized_matmul
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/ops/experts.h"
#include "mlxtape/ops/quantize.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

struct QuantizedExpertWeights {
  QuantizedWeight gate, up, down;
};

Check quantized_experts_check(const Tensor& x, const ExpertRoute& route,
                              const QuantizedExpertWeights& weights);

Tensor quantized_experts(CommandEncoder& encoder, const Tensor& x, const ExpertRoute& route,
                         const QuantizedExpertWeights& weights);
Tensor quantized_experts(Tape& tape, const Tensor& x, const ExpertRoute& route,
                         const QuantizedExpertWeights& weights);

}  // namespace mlxtape::ops
