// linear: rows times a weight that lies as files have it, plain or packed, with or without an adapter beside it.
//
// Formula    y = x·wᵀ + bias;  with an adapter: y + scale·((dropout(x)·a)·b)
//            swiglu_network: y = (silu(x·gateᵀ)∘(x·upᵀ))·downᵀ;  embed: y[j…] = w[ids[j…]]
// Layout     x: […, In], w: [Out, In], bias: [Out], y: […, Out]; gate, up: [I, H], down: [H, I]. Packed: see
//            mlxtape/ops/quantize.h. a: [In, r], b: [r, Out]; of experts, whose w is [E, Out, In]: [E, r, In], [E, Out, r].
// Types      as matmul takes them, or quantized_matmul; a and b: x's type or f32, used in x's type
#pragma once

#include <utility>

#include "mlxtape/ops/quantized_matmul.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::nn {

// A product of two narrow matrices beside a weight, which is trained in the weight's place (LoRA).
struct Adapter {
  Tensor a, b;
  float scale = 1;
  double dropout = 0;  // of what a sees, with the key's numbers; none for experts
  Tensor key = {};     // [2] u32, where there is dropout

  bool defined() const { return a.defined() || b.defined(); }
};

// A weight of a model: numbers of the model's type, or codes of a few bits with a scale and a bias for each group.
struct Weight {
  Weight() = default;
  Weight(Tensor numbers) : plain(std::move(numbers)) {}  // NOLINT(google-explicit-constructor)
  Weight(ops::QuantizedWeight codes)
      : packed(std::move(codes)) {}  // NOLINT(google-explicit-constructor)

  bool defined() const { return plain.defined() || is_packed(); }
  bool is_packed() const { return packed.codes.defined(); }
  Shape shape() const;  // of the numbers, packed or not
  DType dtype() const { return is_packed() ? packed.scales.dtype() : plain.dtype(); }

  // One of the two.
  Tensor plain;
  ops::QuantizedWeight packed;

  Adapter adapter = {};  // none unless defined
};

// Its numbers, without the adapter's: those of a plain weight themselves.
Tensor unpacked(Tape& tape, const Weight& w);

Check linear_check(const Tensor& x, const Weight& w, const Tensor& bias = {});
Tensor linear(Tape& tape, const Tensor& x, const Weight& w, const Tensor& bias = {});

// Rows of w by their ids; w has no adapter. The gradient of a plain w is rows as well (mlxtape/ops/embedding.h).
Tensor embed(Tape& tape, const Weight& w, const Tensor& ids);

// Of one network, or with an axis of experts before the others.
struct SwigluWeights {
  Weight gate, up, down;
};
Check swiglu_network_check(const Tensor& x, const SwigluWeights& w);
Tensor swiglu_network(Tape& tape, const Tensor& x, const SwigluWeights& w);

}  // namespace mlxtape::nn
