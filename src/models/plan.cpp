#include "mlxtape/models/plan.h"

#include <cmath>
#include <string>

namespace mlxtape::models {

namespace {

Error wrong(const std::string& must, std::int64_t got) {
  return {Errc::kArgument, "plan: " + must + ", got " + std::to_string(got)};
}

Error unsupported(const std::string& what) {
  return {Errc::kArgument, "plan: " + what + " is not supported yet"};
}

bool is_scale(double number) { return std::isfinite(number) && number > 0; }

Check attention_check(const AttentionPlan& a, const ModelPlan& plan) {
  if (a.heads < 1 || a.key_heads < 1 || a.heads % a.key_heads != 0) {
    return wrong("heads must be a multiple of key_heads " + std::to_string(a.key_heads), a.heads);
  }
  if (a.head_dim < 1 || a.head_dim > 256)
    return wrong("head_dim must be from 1 to 256", a.head_dim);
  if (a.softcap != 0) return unsupported("a softcap of attention's scores");
  if (a.scale != 0 && !is_scale(a.scale)) {
    return Error(Errc::kArgument,
                 "plan: scale must be a number above 0, or 0 for head_dim^-1/2, got " +
                     std::to_string(a.scale));
  }
  if (a.window < 0) return wrong("window must be at least 0", a.window);
  if (a.rope >= plan.ropes.size()) {
    return wrong("rope must be one of the plan's " + std::to_string(plan.ropes.size()),
                 static_cast<std::int64_t>(a.rope));
  }
  const std::int64_t dims = plan.ropes[a.rope].dims;
  if (dims < 0 || dims > a.head_dim || dims % 2 != 0) {
    return wrong("a rope's dims must be even and at most head_dim " + std::to_string(a.head_dim),
                 dims);
  }
  return std::nullopt;
}

Check delta_check(const DeltaPlan& d) {
  if (d.key_heads < 1 || d.value_heads < 1 || d.value_heads % d.key_heads != 0) {
    return wrong("value_heads must be a multiple of key_heads " + std::to_string(d.key_heads),
                 d.value_heads);
  }
  for (const std::int64_t dim : {d.key_dim, d.value_dim}) {
    if (dim < 1 || dim > 256) return wrong("key_dim and value_dim must be from 1 to 256", dim);
  }
  if (d.kernel < 1 || d.kernel > 16) return wrong("kernel must be from 1 to 16", d.kernel);
  return std::nullopt;
}

Check moe_check(const MoePlan& m) {
  if (m.experts < 1 || m.experts > 1024) return wrong("experts must be from 1 to 1024", m.experts);
  if (m.chosen < 1 || m.chosen > m.experts || m.chosen > 64) {
    return wrong("chosen must be from 1 to 64 and at most experts " + std::to_string(m.experts),
                 m.chosen);
  }
  if (m.width < 1) return wrong("the width of an expert must be at least 1", m.width);
  if (m.shared_width < 0) return wrong("shared_width must be at least 0", m.shared_width);
  return std::nullopt;
}

Check swiglu_check(const SwigluPlan& s) {
  if (s.width < 1) return wrong("the width of a network must be at least 1", s.width);
  if (s.activation == Activation::kClampedSilu) {
    return unsupported("the activation of a network by clamped silu");
  }
  return std::nullopt;
}

Check scales_check(const ModelPlan& plan) {
  if (plan.logit_softcap != 0) return unsupported("a softcap of logits");
  for (const double scale : {plan.embedding_scale, plan.logit_scale}) {
    if (!is_scale(scale)) {
      return Error(Errc::kArgument,
                   "plan: embedding_scale and logit_scale must be numbers above 0, got " +
                       std::to_string(scale));
    }
  }
  for (const LayerPlan& layer : plan.layers) {
    if (!is_scale(layer.residual)) {
      return Error(Errc::kArgument, "plan: residual must be a number above 0, got " +
                                        std::to_string(layer.residual));
    }
  }
  return std::nullopt;
}

}  // namespace

Check plan_check(const ModelPlan& plan) {
  if (plan.vocabulary < 1) return wrong("vocabulary must be at least 1", plan.vocabulary);
  if (plan.width < 1) return wrong("width must be at least 1", plan.width);
  if (plan.max_positions < 1) return wrong("max_positions must be at least 1", plan.max_positions);
  if (plan.layers.empty()) return wrong("layers must be at least 1", 0);
  for (const LayerPlan& layer : plan.layers) {
    const Check mixer = layer.attention() != nullptr ? attention_check(*layer.attention(), plan)
                                                     : delta_check(*layer.delta());
    if (mixer) return mixer;
    if (const MoePlan* moe = layer.moe()) {
      if (const Check check = moe_check(*moe)) return check;
    } else if (const Check check = swiglu_check(*layer.swiglu())) {
      return check;
    }
  }
  return scales_check(plan);
}

}  // namespace mlxtape::models
