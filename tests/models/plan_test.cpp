// What a plan can say beyond the architectures that the library has: each field against the same by other means, and all of
// them together through everything that a model can do.
#include <cmath>
#include <filesystem>
#include <map>

#include "mlxtape/models/load.h"
#include "mlxtape/models/lora.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/models/state.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/rms_norm.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using models::Config;
using models::LayerPlan;
using models::Model;
using models::ModelPlan;

ModelPlan plain_plan() {
  ModelPlan plan;
  plan.vocabulary = 40;
  plan.width = 32;
  plan.max_positions = 128;
  plan.initial_deviation = 0.2;
  plan.ropes = {{.base = 5000, .dims = 8}};
  models::AttentionPlan attention;
  attention.heads = 4;
  attention.key_heads = 2;
  attention.head_dim = 8;
  plan.layers.assign(2, {attention, models::SwigluPlan{32}});
  return plan;
}

models::AttentionPlan& attention_of(LayerPlan& layer) {
  return std::get<models::AttentionPlan>(layer.mixer);
}

// All that is supported, at once.
void everything(const models::Fields&, ModelPlan& plan) {
  plan = plain_plan();
  plan.norms_from_0 = true;
  plan.embedding_scale = 5.5;
  plan.logit_scale = 0.25;
  plan.ropes[0].traditional = true;
  for (LayerPlan& layer : plan.layers) {
    attention_of(layer).bias = {.q = true, .k = true, .v = true};
    attention_of(layer).sinks = true;
    layer.norms = {true, true, true, true};
    layer.residual = 0.7;
    layer.network = models::SwigluPlan{32, models::Activation::kGeluTanh, {true, false, true}};
  }
  attention_of(plan.layers[0]).window = 5;
  plan.layers[1].norms.mixer_pre = false;
}

const models::Architecture kEverything{
    {"everything"}, "", "", everything, {}, {{"self_attn.o_proj", "self_attn.out_proj"}}};

class Plans : public OnDevice {
 protected:
  Model model_of(const ModelPlan& plan) {
    Config config;
    config.model_type = "by hand";
    config.plan = plan;
    return with_all(models::random_model(config, encoder(), DType::kF32, 3));
  }
  Model model_of_everything() {
    const auto json = formats::Json::parse(R"({"model_type": "everything"})", "config.json");
    return with_all(models::random_model(Config::parse(json, "config.json", &kEverything),
                                         encoder(), DType::kF32, 4));
  }
  // Norms, biases and sinks with numbers that are not those of the beginning.
  Model with_all(Model model) {
    Noise noise(9);
    for (const models::Slot& slot : models::slots(model.weights, model.config)) {
      if (slot.is_weight) continue;
      const std::vector<double> more =
          random_values(noise, *element_count(slot.shape), DType::kF32, 0.4);
      *slot.tensor = ops::add(encoder(), *slot.tensor, upload(more, slot.shape, DType::kF32));
    }
    return model;
  }

  std::vector<float> values(const Tensor& t) {
    const Tensor whole = encoder().contiguous(t);
    std::vector<float> result(static_cast<std::size_t>(whole.size()));
    encoder().download(whole, result.data(), whole.bytes());
    return result;
  }
  static void expect_alike(const std::vector<float>& a, const std::vector<float>& b, double times,
                           const std::string& what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    double most = 0;
    for (const float v : b) most = std::max(most, std::abs(static_cast<double>(v)));
    EXPECT_GT(most, 0) << what;
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(a[i]), static_cast<double>(b[i]), times * most)
          << what << " " << i;
    }
  }
  Tensor ids(std::int64_t n) {
    std::vector<std::int32_t> numbers(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = static_cast<std::int32_t>(i * 17 % 40);
    }
    const Tensor t = encoder().empty({1, n}, DType::kI32);
    encoder().upload(numbers.data(), t.bytes(), t);
    return t;
  }
  struct Computed {
    std::vector<float> logits;
    std::map<std::string, std::vector<float>> gradients;
  };
  Computed compute(const Model& model, bool checkpoint = false) {
    Tape tape(encoder());
    const Model watched = models::watch(tape, model);
    const Tensor tokens = ids(11);
    Computed result;
    tape.backward(models::loss(tape, watched, tokens, tokens, {.checkpoint = checkpoint}));
    for (const models::Parameter& p : models::parameters(watched)) {
      result.gradients[p.name] = values(tape.grad(p.tensor));
    }
    result.logits = values(models::logits(tape, model, models::hidden(tape, model, tokens)));
    return result;
  }
  // One model's weights with a factor are another's: as are then the gradients, the other way round.
  void expect_same(const Computed& got, const Computed& want, const std::string& scaled,
                   double factor) {
    expect_alike(got.logits, want.logits, 1e-5, "logits");
    ASSERT_EQ(got.gradients.size(), want.gradients.size());
    for (const auto& [name, gradient] : want.gradients) {
      std::vector<float> ours = got.gradients.at(name);
      if (name.find(scaled) != std::string::npos) {
        for (float& v : ours) v = static_cast<float>(static_cast<double>(v) / factor);
      }
      expect_alike(ours, gradient, 2e-5, name);
    }
  }
  // The model with those weights multiplied.
  Model scaled(Model model, const std::vector<std::string>& names, double factor) {
    for (const models::Slot& slot : models::slots(model.weights, model.config)) {
      for (const std::string& name : names) {
        if (slot.name.ends_with(name))
          slot.weight->plain = ops::multiply(encoder(), slot.weight->plain, factor);
      }
    }
    return model;
  }
};

TEST_P(Plans, Scales) {
  const Model plain = model_of(plain_plan());
  Model said = plain;
  said.config.plan.embedding_scale = 3;
  expect_same(compute(said), compute(scaled(plain, {"embed_tokens"}, 3)), "embed_tokens", 3);
  said = plain;
  said.config.plan.logit_scale = 0.5;
  expect_same(compute(said), compute(scaled(plain, {"lm_head"}, 0.5)), "lm_head", 0.5);
  said = plain;
  for (LayerPlan& layer : said.config.plan.layers) layer.residual = 0.25;
  const Model other = scaled(plain, {"o_proj", "down_proj"}, 0.25);
  Computed got = compute(said);
  for (auto& [name, gradient] : got.gradients) {
    const bool is_scaled = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
    for (float& v : gradient) v *= is_scaled ? 4.0F : 1.0F;
  }
  expect_same(got, compute(other), "none", 1);
}

TEST_P(Plans, NormsFrom0) {
  ModelPlan plan = plain_plan();
  plan.norms_from_0 = true;
  const Model from_0 = model_of(plan);
  Model from_1 = from_0;
  from_1.config.plan.norms_from_0 = false;
  for (const models::Slot& slot : models::slots(from_1.weights, from_1.config)) {
    if (slot.role == models::Role::kNorm)
      *slot.tensor = ops::add(encoder(), *slot.tensor, encoder().full({}, DType::kF32, 1));
  }
  expect_same(compute(from_0), compute(from_1), "none", 1);
}

// Norms before and behind each block, and each activation, against the formula.
TEST_P(Plans, PostNorms) {
  ModelPlan plan = plain_plan();
  plan.layers.resize(1);
  const std::pair<models::Activation, nn::GateActivation> activations[] = {
      {models::Activation::kGelu, nn::GateActivation::kGelu},
      {models::Activation::kGeluTanh, nn::GateActivation::kGeluTanh},
      {models::Activation::kSilu, nn::GateActivation::kSilu}};
  std::size_t at = 0;
  for (const models::NormsPlan norms :
       {models::NormsPlan{true, true, true, true}, models::NormsPlan{false, true, false, true},
        models::NormsPlan{true, false, true, true}, models::NormsPlan{false, false, true, false}}) {
    plan.layers[0].norms = norms;
    const auto [activation, same] = activations[at++ % 3];
    plan.layers[0].network = models::SwigluPlan{32, activation};
    const Model model = model_of(plan);
    Tape tape(encoder()), other(encoder());
    const Model watched = models::watch(tape, model), again = models::watch(other, model);
    const Tensor tokens = ids(7);
    const auto normed = [&](const Tensor& x, bool there, const Tensor& w) {
      return there ? ops::rms_norm(other, x, w, plan.eps) : x;
    };
    const models::LayerWeights& w = again.weights.layers[0];
    Tensor h = nn::embed(other, again.weights.embedding, tokens);
    const nn::SelfAttentionShape shape{4, 2, 8, false, model.ropes[0], plan.eps};
    Tensor y =
        nn::self_attention(other, normed(h, norms.mixer_pre, w.mixer_norm), w.attention, shape);
    h = ops::add(other, h, normed(y, norms.mixer_post, w.mixer_post_norm));
    y = nn::swiglu_network(other, normed(h, norms.network_pre, w.network_norm), w.mlp, same);
    h = ops::add(other, h, normed(y, norms.network_post, w.network_post_norm));
    h = ops::rms_norm(other, h, again.weights.norm, plan.eps);
    const Tensor got = models::hidden(tape, watched, tokens);
    expect_alike(values(got), values(h), 1e-5, "hidden");
    Noise noise(5);
    const Tensor seed = upload(random_values(noise, h.size(), DType::kF32), h.shape(), DType::kF32);
    tape.backward(got, seed);
    std::map<std::string, std::vector<float>> ours;
    const auto collect = [&](Tape& on, const Model& of, auto& into) {
      for (const models::Parameter& p : models::parameters(of)) {
        if (p.name != "lm_head.weight") into[p.name] = values(on.grad(p.tensor));
      }
    };
    collect(tape, watched, ours);
    other.backward(h, seed);
    std::map<std::string, std::vector<float>> theirs;
    collect(other, again, theirs);
    for (const auto& [name, gradient] : theirs) expect_alike(ours[name], gradient, 2e-5, name);
  }
}

// Names as Gemma's files have them, and an architecture's own.
TEST(PlanNames, OfNormsBehindAndOfOnesOwn) {
  const auto json = formats::Json::parse(R"({"model_type": "everything"})", "config.json");
  const Config config = Config::parse(json, "config.json", &kEverything);
  std::string names;
  for (const models::Part& part : models::parts(config)) {
    if (part.layer == 0) names += part.path + " ";
  }
  EXPECT_EQ(names,
            "input_layernorm.weight self_attn.q_proj self_attn.k_proj self_attn.v_proj "
            "self_attn.out_proj self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias "
            "self_attn.sinks self_attn.q_norm.weight self_attn.k_norm.weight "
            "post_attention_layernorm.weight pre_feedforward_layernorm.weight mlp.gate_proj "
            "mlp.up_proj mlp.down_proj mlp.gate_proj.bias mlp.down_proj.bias "
            "post_feedforward_layernorm.weight ");
}

TEST_P(Plans, EverythingAtOnce) {
  const Model model = model_of_everything();
  const Computed computed = compute(model);
  for (const auto& [name, gradient] : compute(model, true).gradients) {
    expect_alike(gradient, computed.gradients.at(name), 2e-5, name);
  }
  // Pieces and steps.
  const std::vector<std::int32_t> tokens = [&] {
    std::vector<std::int32_t> all(11);
    encoder().download(ids(11), all.data(), 44);
    return all;
  }();
  const std::vector<float> last(computed.logits.end() - 40, computed.logits.end());
  models::State state(model, 1, 20);
  models::read_on(encoder(), model, state, 0, {tokens.data(), 8}, 3);
  models::Stepper stepper(encoder(), model, state);
  for (std::size_t i = 8; i < 10; ++i) stepper.step({&tokens[i], 1});
  expect_alike(values(stepper.step({&tokens[10], 1})), last, 1e-5, "steps");
  // A file and back, with the same bits.
  const std::string folder =
      (std::filesystem::temp_directory_path() / "mlxtape_plan_test").string();
  models::save_model(model, folder, {.replace = true});
  models::LoadOptions options;
  options.architecture = &kEverything;
  const Model loaded = models::load_model(folder, encoder(), options);
  EXPECT_EQ(compute(loaded).logits, computed.logits);
  std::filesystem::remove_all(folder);
  // Quantised, adapted, fused.
  const auto logits = [&](const Model& of) {
    Tape tape(encoder());
    return values(models::logits(tape, of, models::hidden(tape, of, ids(11))));
  };
  const Model small = models::quantize_model(encoder(), model, models::usual_format({8, 32}));
  expect_alike(logits(small), computed.logits, 0.1, "quantised");
  Model adapted = model;
  models::add_lora(encoder(), adapted, {.rank = 2}, 1);
  EXPECT_EQ(models::lora_parameters(adapted).size(), 2U * 2 * 7);
  Noise noise(2);
  for (const models::Slot& slot : models::slots(adapted.weights, adapted.config)) {
    if (!slot.is_weight || !slot.weight->adapter.defined()) continue;
    nn::Adapter& adapter = slot.weight->adapter;
    adapter.b = upload(random_values(noise, adapter.b.size(), DType::kF32, 0.1), adapter.b.shape(),
                       DType::kF32);
  }
  expect_alike(logits(models::fuse_lora(encoder(), adapted)), logits(adapted), 1e-5, "fused");
}

// Each field changes the result: none is passed over.
TEST_P(Plans, EveryFieldCounts) {
  const Model model = model_of_everything();
  const std::vector<float> logits = compute(model).logits;
  const auto differs = [&](const char* what, const auto& change) {
    Model other = model;
    change(other);
    Tape tape(encoder());
    const std::vector<float> got =
        values(models::logits(tape, other, models::hidden(tape, other, ids(11))));
    double most = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      most = std::max(most, std::abs(static_cast<double>(got[i]) - static_cast<double>(logits[i])));
    }
    EXPECT_GT(most, 1e-4) << what;
  };
  const auto of_layer = [](Model& m) -> LayerPlan& {
    return m.config.plan.layers[1];
  };
  const auto weights = [](Model& m) -> models::LayerWeights& {
    return m.weights.layers[1];
  };
  differs("embedding_scale", [](Model& m) { m.config.plan.embedding_scale = 1; });
  differs("logit_scale", [](Model& m) { m.config.plan.logit_scale = 1; });
  differs("norms_from_0", [](Model& m) { m.config.plan.norms_from_0 = false; });
  differs("residual", [&](Model& m) { of_layer(m).residual = 1; });
  differs("mixer_post", [&](Model& m) { of_layer(m).norms.mixer_post = false; });
  differs("network_post", [&](Model& m) { of_layer(m).norms.network_post = false; });
  differs("activation", [&](Model& m) { of_layer(m).network = models::SwigluPlan{32}; });
  differs("q bias", [&](Model& m) { weights(m).attention.q_bias = {}; });
  differs("k bias", [&](Model& m) { weights(m).attention.k_bias = {}; });
  differs("v bias", [&](Model& m) { weights(m).attention.v_bias = {}; });
  differs("gate bias", [&](Model& m) { weights(m).mlp.gate_bias = {}; });
  differs("down bias", [&](Model& m) { weights(m).mlp.down_bias = {}; });
  differs("sinks", [&](Model& m) { weights(m).attention.sinks = {}; });
  differs("traditional", [](Model& m) { m.ropes[0].traditional = false; });
}

MT_ON_EVERY_BACKEND(Plans);

}  // namespace
}  // namespace mlxtape::test
