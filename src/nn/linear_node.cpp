#include "linear_node.h"

#include <algorithm>
#include <array>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/quantize.h"
#include "mlxtape/ops/reduce.h"

namespace mlxtape::nn {

namespace {

// Places of the node's inputs: x, then of each weight.
enum Input : std::uint8_t { kPlain, kScales, kBiases, kBias, kA, kB, kInputs };
std::size_t input(std::size_t weight, Input which) { return 1 + weight * kInputs + which; }

// Places of what is saved: the rows of x, then of each weight, then of each group of adapters.
enum Kept : std::uint8_t { kNumbers, kKeptScales, kKeptBiases, kNarrowB, kKept };
enum GroupKept : std::uint8_t { kNarrowA, kSeen, kGroupKept };
std::size_t kept(std::size_t weight, Kept which) { return 1 + weight * kKept + which; }

struct Form {
  std::int32_t bits, group_size;  // bits 0: plain
  std::int32_t rank;              // of its adapter; 0: none
  std::int32_t group;             // of adapters
  float scale;
};
struct Forms {
  std::int32_t count, groups;
  std::array<Form, kMostLinears> of;

  std::size_t size() const { return static_cast<std::size_t>(count); }
  std::size_t kept(std::int32_t group, GroupKept which) const {
    return 1 + size() * kKept + static_cast<std::size_t>(group) * kGroupKept + which;
  }
  std::int64_t rank_of(std::int32_t group) const {
    std::int64_t rank = 0;
    for (std::size_t i = 0; i < size(); ++i) {
      if (of[i].rank > 0 && of[i].group == group) rank += of[i].rank;
    }
    return rank;
  }
};

// Adapters whose first products are one: those with the same scale and type.
Forms forms_of(std::span<const Linear> weights) {
  Forms forms{};
  forms.count = static_cast<std::int32_t>(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const Weight& w = weights[i].weight;
    Form& form = forms.of[i];
    if (w.is_quantized()) form.bits = w.quantized.format.bits;
    if (w.is_quantized()) form.group_size = w.quantized.format.group_size;
    if (!w.adapter.defined()) continue;
    form.rank = static_cast<std::int32_t>(w.adapter.a.dim(1));
    form.scale = w.adapter.scale;
    form.group = forms.groups;
    for (std::size_t j = 0; j < i; ++j) {
      const Adapter& other = weights[j].weight.adapter;
      if (other.defined() && other.scale == form.scale && other.a.dtype() == w.adapter.a.dtype()) {
        form.group = forms.of[j].group;
      }
    }
    if (form.group == forms.groups) ++forms.groups;
  }
  return forms;
}

// Matrices with as many rows, side by side.
Tensor side_by_side(CommandEncoder& encoder, const std::vector<Tensor>& parts) {
  if (parts.size() == 1) return parts.front();
  std::int64_t cols = 0;
  for (const Tensor& part : parts) cols += part.dim(1);
  Tensor all = encoder.empty({parts.front().dim(0), cols}, parts.front().dtype());
  std::int64_t at = 0;
  for (const Tensor& part : parts) {
    encoder.copy(part, all.slice(1, at, at + part.dim(1)));
    at += part.dim(1);
  }
  return all;
}

Tensor times(CommandEncoder& encoder, const Tensor& x, float scale) {
  return scale == 1 ? x : ops::multiply(encoder, x, static_cast<double>(scale));
}

Tensor turned(const Tensor& t) { return t.transpose({1, 0}); }

Tensor product(CommandEncoder& encoder, const Tensor& rows, const Linear& linear) {
  const auto& [w, bias] = linear;
  if (!w.is_quantized()) {
    ops::MatmulOptions options;
    options.bias = bias;
    return ops::matmul(encoder, rows, turned(w.plain), options);
  }
  const Tensor y = ops::quantized_matmul(encoder, rows, w.quantized);
  return bias.defined() ? ops::add(encoder, y, bias) : y;
}

// What the gradients need of the adapters.
struct Adapted {
  std::array<Tensor, kMostLinears> narrow_b;
  std::array<Tensor, kMostLinears> narrow_a, seen;  // by group; seen: rows·a·scale
};

// The scale is given to the narrow product; the wide one is added to y as it is stored.
Adapted add_adapters(CommandEncoder& encoder, const Tensor& rows, std::span<const Linear> weights,
                     const Forms& forms, const std::vector<Tensor>& ys) {
  Adapted kept;
  for (std::int32_t group = 0; group < forms.groups; ++group) {
    std::vector<Tensor> parts;
    float scale = 1;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (forms.of[i].rank == 0 || forms.of[i].group != group) continue;
      parts.push_back(weights[i].weight.adapter.a);
      scale = forms.of[i].scale;
    }
    const auto at = static_cast<std::size_t>(group);
    kept.narrow_a[at] = ops::cast(encoder, side_by_side(encoder, parts), rows.dtype());
    kept.seen[at] = times(encoder, ops::matmul(encoder, rows, kept.narrow_a[at]), scale);
    std::int64_t col = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const std::int64_t rank = forms.of[i].rank;
      if (rank == 0 || forms.of[i].group != group) continue;
      kept.narrow_b[i] = ops::cast(encoder, weights[i].weight.adapter.b, rows.dtype());
      ops::matmul_into(encoder, kept.seen[at].slice(1, col, col + rank), kept.narrow_b[i], ys[i]);
      col += rank;
    }
  }
  return kept;
}

// ---- gradients ----

class Gradients {
 public:
  explicit Gradients(Pullback& pullback)
      : pullback_(pullback),
        encoder_(pullback.encoder()),
        saved_(pullback.saved()),
        forms_(saved_.args<Forms>()),
        rows_(saved_[0]) {
    for (std::size_t i = 0; i < forms_.size(); ++i) {
      if (!pullback.has_grad(i)) continue;
      const Tensor dy = encoder_.contiguous(pullback.grad(i));
      dy_[i] = dy.reshape({rows_.dim(0), dy.shape().back()});
    }
  }

  void give() {
    for (std::size_t i = 0; i < forms_.size(); ++i) of_weight(i);
    for (std::int32_t group = 0; group < forms_.groups; ++group) of_adapters(group);
    if (!pullback_.needs(0)) return;
    if (dx_.defined()) {
      pullback_.give(0, dx_.reshape(pullback_.input_shape(0)));
    } else {
      pullback_.give_none(0);
    }
  }

 private:
  // The type of a product that goes to the sum of an input's gradient without another rounding.
  DType type_for(std::size_t input) const {
    return pullback_.sum_type(input) == DType::kF32 ? DType::kF32 : rows_.dtype();
  }

  void add_to_x(const Tensor& left, const Tensor& right) {
    const bool adds = begin_or_add();
    ops::matmul_into(encoder_, left, right, dx_, adds ? 1 : 0);
  }
  // Is there a sum for the next product to be added to?
  bool begin_or_add() {
    const bool adds = dx_.defined();
    if (!adds) dx_ = encoder_.empty(rows_.shape(), rows_.dtype());
    return adds;
  }

  // left·right, [m, n], for that input.
  void give_product(std::size_t input, const Tensor& left, const Tensor& right) {
    const Tensor out = encoder_.empty({left.dim(0), right.dim(1)}, type_for(input));
    ops::matmul_into(encoder_, left, right, out, 0);
    pullback_.give(input, out);
  }

  ops::QuantizedWeight quantized(std::size_t i) const {
    return {saved_[kept(i, kNumbers)],
            saved_[kept(i, kKeptScales)],
            saved_[kept(i, kKeptBiases)],
            {forms_.of[i].bits, forms_.of[i].group_size}};
  }

  void of_weight(std::size_t i) {
    const Tensor& dy = dy_[i];
    if (!dy.defined()) {
      for (const Input which : {kPlain, kScales, kBiases, kBias}) {
        pullback_.give_none(input(i, which));
      }
      return;
    }
    if (pullback_.needs(input(i, kBias))) pullback_.give(input(i, kBias), gradient_of_bias(i));
    if (forms_.of[i].bits == 0) {
      if (pullback_.needs(0)) add_to_x(dy, saved_[kept(i, kNumbers)]);
      if (pullback_.needs(input(i, kPlain))) give_product(input(i, kPlain), turned(dy), rows_);
      return;
    }
    const ops::QuantizedWeight w = quantized(i);
    if (pullback_.needs(0)) {
      const bool adds = begin_or_add();
      ops::quantized_matmul_dx_into(encoder_, w, dy, dx_, adds);
    }
    if (pullback_.needs(input(i, kScales)) || pullback_.needs(input(i, kBiases))) {
      const ops::QuantizedMatmulGrads grads =
          ops::quantized_matmul_backward(encoder_, rows_, w, dy, {false, true});
      pullback_.give(input(i, kScales), grads.d_scales);
      pullback_.give(input(i, kBiases), grads.d_biases);
    }
  }

  void of_adapters(std::int32_t group) {
    const std::int64_t rank = forms_.rank_of(group);
    const Tensor& seen = saved_[forms_.kept(group, kSeen)];
    std::vector<Tensor> parts;  // dy·bᵀ
    float scale = 1;
    std::int64_t col = 0;
    for (std::size_t i = 0; i < forms_.size(); ++i) {
      const Form& form = forms_.of[i];
      if (form.rank == 0 || form.group != group) continue;
      scale = form.scale;
      if (!dy_[i].defined()) {
        pullback_.give_none(input(i, kB));
        parts.push_back(encoder_.zeros({rows_.dim(0), form.rank}, rows_.dtype()));
      } else {
        if (pullback_.needs(input(i, kB))) {
          give_product(input(i, kB), turned(seen.slice(1, col, col + form.rank)), dy_[i]);
        }
        parts.push_back(ops::matmul(encoder_, dy_[i], turned(saved_[kept(i, kNarrowB)])));
      }
      col += form.rank;
    }
    const Tensor d_seen = times(encoder_, side_by_side(encoder_, parts), scale);
    if (pullback_.needs(0)) add_to_x(d_seen, turned(saved_[forms_.kept(group, kNarrowA)]));
    DType dtype = rows_.dtype();
    bool wanted = false;
    for (std::size_t i = 0; i < forms_.size(); ++i) {
      if (forms_.of[i].rank == 0 || forms_.of[i].group != group) continue;
      if (!pullback_.needs(input(i, kA))) continue;
      wanted = true;
      if (type_for(input(i, kA)) == DType::kF32) dtype = DType::kF32;
    }
    if (!wanted) return;
    const Tensor da = encoder_.empty({rows_.dim(1), rank}, dtype);
    ops::matmul_into(encoder_, turned(rows_), d_seen, da, 0);
    col = 0;
    for (std::size_t i = 0; i < forms_.size(); ++i) {
      const Form& form = forms_.of[i];
      if (form.rank == 0 || form.group != group) continue;
      if (pullback_.needs(input(i, kA))) {
        const Tensor part = da.slice(1, col, col + form.rank);
        pullback_.give(input(i, kA),
                       ops::cast(encoder_, encoder_.contiguous(part), type_for(input(i, kA))));
      }
      col += form.rank;
    }
  }

  Tensor gradient_of_bias(std::size_t i) {
    if (forms_.of[i].bits != 0) return ops::sum(encoder_, dy_[i], {0});
    return ops::matmul_backward(encoder_, rows_, turned(saved_[kept(i, kNumbers)]), {}, dy_[i],
                                ops::Activation::kNone, {false, false, true})
        .dbias;
  }

  Pullback& pullback_;
  CommandEncoder& encoder_;
  const Saved& saved_;
  const Forms& forms_;
  const Tensor& rows_;
  std::array<Tensor, kMostLinears> dy_;
  Tensor dx_;
};

void linear_backward(Pullback& pullback) { Gradients(pullback).give(); }

}  // namespace

std::vector<Tensor> linear_node(Tape& tape, const Tensor& x, std::span<const Linear> weights) {
  CommandEncoder& encoder = tape.encoder();
  Shape shape = x.shape();
  const std::int64_t width = shape.back();
  const std::int64_t count = *element_count(Shape(shape.begin(), shape.end() - 1));
  const Tensor rows = encoder.contiguous(x).reshape({count, width});
  std::vector<Tensor> ys;
  for (const Linear& linear : weights) ys.push_back(product(encoder, rows, linear));
  const Forms forms = forms_of(weights);
  const Adapted adapted = add_adapters(encoder, rows, weights, forms, ys);
  std::vector<TensorRef> inputs{x};
  std::vector<Tensor> saved{rows};
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto& [w, bias] = weights[i];
    const auto& [codes, scales, biases, format] = w.quantized;
    shape[shape.rank() - 1] = ys[i].dim(1);
    ys[i] = ys[i].reshape(shape);
    inputs.insert(inputs.end(), {w.plain, scales, biases, bias, w.adapter.a, w.adapter.b});
    saved.insert(saved.end(),
                 {w.is_quantized() ? codes : w.plain, scales, biases, adapted.narrow_b[i]});
  }
  if (!tape.wants(inputs)) return ys;
  for (std::size_t group = 0; group < static_cast<std::size_t>(forms.groups); ++group) {
    saved.insert(saved.end(), {adapted.narrow_a[group], adapted.seen[group]});
  }
  std::vector<Tensor*> outputs;
  for (Tensor& y : ys) outputs.push_back(&y);
  tape.record("linear", linear_backward, inputs, outputs, Saved(saved, forms));
  return ys;
}

}  // namespace mlxtape::nn
