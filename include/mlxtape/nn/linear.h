// linear: rows times a weight in the layout of model files, plain or quantised, with or without a LoRA adapter.
//
// Formula    y = x·wᵀ + bias;  with an adapter: y + scale·((dropout(x)·a)·b)
//            swiglu_network: y = (f(x·gateᵀ + gate_bias)∘(x·upᵀ + up_bias))·downᵀ + down_bias, f being silu, gelu or
//            gelu_tanh, each bias if given;  embed: y[j…] = w[ids[j…]]
// Layout     x: […, In], w: [Out, In], bias: [Out], y: […, Out]; gate, up: [I, H], down: [H, I]. Quantised: see
//            mlxtape/ops/quantize.h. a: [In, r], b: [r, Out]; of experts, whose w is [E, Out, In]: [E, r, In], [E, Out, r].
// Types      as matmul takes them, or quantized_matmul; a and b: x's type or f32, used in x's type
#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "mlxtape/ops/quantized_matmul.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::nn {

// LoRA: the product of two low-rank matrices, added to a weight and trained instead of it.
struct Adapter {
  Tensor a, b;
  float scale = 1;
  double dropout = 0;  // of a's input, drawn from key; not for experts
  Tensor key = {};     // [2] u32, if there is dropout

  bool defined() const { return a.defined() || b.defined(); }
};

// A weight of a model: plain, in the model's type, or quantised: codes of a few bits with a scale and a bias per group.
struct Weight {
  Weight() = default;
  Weight(Tensor numbers) : plain(std::move(numbers)) {}  // NOLINT(google-explicit-constructor)
  Weight(ops::QuantizedWeight codes)
      : quantized(std::move(codes)) {}  // NOLINT(google-explicit-constructor)

  bool defined() const { return plain.defined() || is_quantized(); }
  bool is_quantized() const { return quantized.codes.defined(); }
  Shape shape() const;  // of the values, quantised or not
  DType dtype() const { return is_quantized() ? quantized.scales.dtype() : plain.dtype(); }

  // Exactly one of the two.
  Tensor plain;
  ops::QuantizedWeight quantized;

  Adapter adapter = {};  // none if undefined
};

// Its values without the adapter: dequantised if need be, otherwise the plain weight itself.
Tensor dequantized(Tape& tape, const Weight& w);

Check linear_check(const Tensor& x, const Weight& w, const Tensor& bias = {});
Tensor linear(Tape& tape, const Tensor& x, const Weight& w, const Tensor& bias = {});

// Up to four of one x. The parts of its gradient are added as the products that make them are stored, and adapters with the
// same scale share one product x·a.
struct Linear {
  Weight weight;
  Tensor bias = {};
};
std::vector<Tensor> linears(Tape& tape, const Tensor& x, std::initializer_list<Linear> all);

// Rows of w by ids; w has no adapter. The gradient of a plain w is row-sparse (mlxtape/ops/embedding.h).
Tensor embed(Tape& tape, const Weight& w, const Tensor& ids);

// Of one network, or with a leading axis of experts.
struct SwigluWeights {
  Weight gate, up, down;
  Tensor gate_bias = {}, up_bias = {}, down_bias = {};  // each may be there; of one network alone
};
enum class GateActivation : std::uint8_t { kSilu, kGelu, kGeluTanh };
Check swiglu_network_check(const Tensor& x, const SwigluWeights& w);
Tensor swiglu_network(Tape& tape, const Tensor& x, const SwigluWeights& w,
                      GateActivation activation = GateActivation::kSilu);

}  // namespace mlxtape::nn
