#include "rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "mlxtape/ops/elementwise.h"

namespace mlxtape::models {

namespace {

// Wavelengths of channel j are 2π·period; period = base^(2j/dims).
std::vector<double> plain_periods(const RopeConfig& rope) {
  std::vector<double> periods(static_cast<std::size_t>(rope.dims / 2));
  for (std::size_t j = 0; j < periods.size(); ++j) {
    periods[j] = std::pow(rope.base, 2 * static_cast<double>(j) / static_cast<double>(rope.dims));
  }
  return periods;
}

// Channels that turn more than beta_fast times in the original context stay, those that turn less than beta_slow
// times are stretched by factor, and between them 1/period is mixed linearly in j.
std::vector<double> yarn_periods(const RopeConfig& rope) {
  const auto dims = static_cast<double>(rope.dims);
  const auto channel = [&](double turns) {
    return dims *
           std::log(static_cast<double>(rope.original_positions) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(rope.base));
  };
  const double low = std::max(std::floor(channel(rope.beta_fast)), 0.0);
  double high = std::min(std::ceil(channel(rope.beta_slow)), dims - 1);
  if (low == high) high += 0.001;
  std::vector<double> periods = plain_periods(rope);
  for (std::size_t j = 0; j < periods.size(); ++j) {
    const double stretched = std::clamp((static_cast<double>(j) - low) / (high - low), 0.0, 1.0);
    periods[j] = 1 / (stretched / (rope.factor * periods[j]) + (1 - stretched) / periods[j]);
  }
  return periods;
}

// Wavelengths above original/low are stretched by factor, those below original/high stay, between them 1/period is
// mixed.
std::vector<double> llama3_periods(const RopeConfig& rope) {
  const auto original = static_cast<double>(rope.original_positions);
  std::vector<double> periods = plain_periods(rope);
  for (double& period : periods) {
    const double turns = original / (2 * std::numbers::pi * period);
    const double kept = std::clamp(
        (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0);
    period = 1 / ((1 - kept) / (rope.factor * period) + kept / period);
  }
  return periods;
}

double yarn_gain(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

nn::Rope make_rope(const RopeConfig& from, std::int64_t head_dim, CommandEncoder& encoder,
                   DType dtype) {
  nn::Rope rope;
  rope.dims = from.dims;
  rope.base = from.base;
  rope.scale = from.scale;
  rope.traditional = from.traditional;
  if (from.kind == RopeConfig::Kind::kPlain) return rope;
  const bool yarn = from.kind == RopeConfig::Kind::kYarn;
  const std::vector<double> periods = yarn ? yarn_periods(from) : llama3_periods(from);
  const std::vector<float> rounded(periods.begin(), periods.end());
  rope.periods = encoder.empty({from.dims / 2}, DType::kF32);
  encoder.upload(rounded.data(), rounded.size() * sizeof(float), rope.periods);
  const double gain =
      yarn ? yarn_gain(from.factor, from.mscale) / yarn_gain(from.factor, from.mscale_all_dim) : 1;
  if (gain != 1) {
    std::vector<float> gains(static_cast<std::size_t>(head_dim), 1);
    std::fill_n(gains.begin(), from.dims, static_cast<float>(gain));
    const Tensor wide = encoder.empty({head_dim}, DType::kF32);
    encoder.upload(gains.data(), gains.size() * sizeof(float), wide);
    rope.gain = ops::cast(encoder, wide, dtype);
  }
  return rope;
}

}  // namespace

std::vector<nn::Rope> make_ropes(const ModelPlan& plan, CommandEncoder& encoder, DType dtype) {
  std::vector<nn::Rope> ropes;
  for (std::size_t r = 0; r < plan.ropes.size(); ++r) {
    std::int64_t head_dim = plan.ropes[r].dims;  // of a rope that no layer has
    for (const LayerPlan& layer : plan.layers) {
      const AttentionPlan* attention = layer.attention();
      if (attention != nullptr && attention->rope == r) head_dim = attention->head_dim;
    }
    ropes.push_back(make_rope(plan.ropes[r], head_dim, encoder, dtype));
  }
  return ropes;
}

}  // namespace mlxtape::models
