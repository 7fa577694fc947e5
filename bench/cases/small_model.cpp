#include "cases/small_model.h"

#include <cmath>
#include <random>

#include "mlxtape/ops/conv1d_depthwise_causal.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/embedding.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/linear_loss.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/rms_norm.h"

namespace mlxtape::bench {

namespace {

constexpr float kEps = 1e-5F;
constexpr std::size_t kEachLayer = 8;
enum : std::uint8_t { kNorm1, kIn, kTaps, kOut, kNorm2, kGate, kUp, kDown };

}  // namespace

SmallModel::SmallModel(CommandEncoder& encoder, const SmallModelConfig& config, unsigned seed)
    : encoder_(encoder), config_(config) {
  std::mt19937 bits(seed);
  std::normal_distribution<double> normal;
  const auto add = [&](Shape shape, double spread, double around) {
    const Tensor master = encoder.empty(shape, DType::kF32);
    std::vector<float> values(static_cast<std::size_t>(master.size()));
    for (float& v : values) {
      v = static_cast<float>((around + spread * normal(bits)) * (1 + config.nudge));
    }
    encoder.upload(values.data(), values.size() * sizeof(float), master);
    const bool wide = config.dtype == DType::kF32;
    weights_.push_back(wide ? master : ops::cast(encoder, master, config.dtype));
    master_.push_back(wide ? Tensor() : master);
    m_.push_back(encoder.zeros(shape, DType::kF32));
    v_.push_back(encoder.zeros(shape, DType::kF32));
  };
  const std::int64_t d = config.width, h = config.hidden;
  const auto of = [](std::int64_t inputs) {
    return 1 / std::sqrt(static_cast<double>(inputs));
  };
  add({config.vocab, d}, 1, 0);
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    add({d}, 0, 1);
    add({d, 2 * d}, of(d), 0);
    add({d, config.taps}, of(config.taps), 0);
    add({d, d}, of(d), 0);
    add({d}, 0, 1);
    add({d, h}, of(d), 0);
    add({d, h}, of(d), 0);
    add({h, d}, of(h), 0);
  }
  add({d}, 0, 1);
  add({config.vocab, d}, of(d), 0);
  rate_ = encoder.full({1}, DType::kF32, config.rate);
  t_ = encoder.zeros({1}, DType::kI32);
}

std::int64_t SmallModel::parameters() const {
  std::int64_t all = 0;
  for (const Tensor& w : weights_) all += w.size();
  return all;
}

Tensor SmallModel::loss(Tape& tape, const std::vector<Tensor>& weights, const Tensor& ids,
                        const Tensor& targets) const {
  Tensor x = ops::embedding(tape, weights[0], ids);  // [B, T, D]
  for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
    const Tensor* w = &weights[1 + static_cast<std::size_t>(layer) * kEachLayer];
    const Tensor in = ops::matmul(tape, ops::rms_norm(tape, x, w[kNorm1], kEps), w[kIn]);
    const std::vector<Tensor> halves = ops::split(tape, in, 2, -1);
    const Tensor mixed = ops::conv1d_depthwise_causal(tape, halves[0], w[kTaps]).y;
    const Tensor gated = ops::swiglu(tape, halves[1], mixed);
    x = ops::matmul(tape, gated, w[kOut], {.residual = x});
    const Tensor y = ops::rms_norm(tape, x, w[kNorm2], kEps);
    const Tensor inner =
        ops::swiglu(tape, ops::matmul(tape, y, w[kGate]), ops::matmul(tape, y, w[kUp]));
    x = ops::matmul(tape, inner, w[kDown], {.residual = x});
  }
  const Tensor y = ops::rms_norm(tape, x, weights[weights.size() - 2], kEps);
  return ops::linear_cross_entropy(tape, y, weights.back(), targets,
                                   {.reduction = ops::Reduction::kMean});
}

Tensor SmallModel::step(const Tensor& ids, const Tensor& targets) {
  Tape tape(encoder_);
  std::vector<Tensor> watched;
  for (const Tensor& w : weights_) watched.push_back(tape.watch(w, DType::kF32));
  const Tensor loss = this->loss(tape, watched, ids, targets);
  nodes_ = tape.nodes();
  tape.backward(loss);

  std::vector<ops::AdamWSlot> slots;
  std::vector<Tensor> grads;
  const RowGrad rows = tape.row_grad(watched[0]);
  for (std::size_t i = 0; i < watched.size(); ++i) {
    const Tensor grad = i == 0 ? rows.rows : tape.grad(watched[i]);
    slots.push_back({weights_[i], grad, m_[i], v_[i], master_[i], i == 0 ? rows.ids : Tensor()});
    grads.push_back(grad);
  }
  const ops::GradNorm norm = ops::grad_norm(encoder_, grads, 1);
  ops::advance(encoder_, t_);
  ops::adamw_step(encoder_, slots, {rate_, t_, norm.scale}, {.bias_correction = true});
  return loss;
}

}  // namespace mlxtape::bench
