// What every architecture gets from its plan: random weights, gradients, a state, saving and loading, packing, LoRA.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <span>
#include <vector>

#include "mlxtape/jobs/generate.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/lora.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/models/state.h"

using namespace mlxtape;
using namespace mlxtape::models;

namespace {

int failures = 0;
void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  ++failures;
}

std::vector<float> numbers(CommandEncoder& encoder, const Tensor& t) {
  std::vector<float> values(static_cast<std::size_t>(t.size()));
  encoder.download(t, values.data(), t.bytes());
  return values;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return most;
}

// The logits after the last token: all at once, and in two pieces and a step.
std::vector<float> whole(CommandEncoder& encoder, const Model& model, std::span<const int> tokens) {
  State state(model, 1, 32);
  return numbers(encoder, prefill(encoder, model, state, 0, tokens));
}
std::vector<float> in_pieces(CommandEncoder& encoder, const Model& model,
                             std::span<const int> tokens) {
  State state(model, 1, 32);
  prefill(encoder, model, state, 0, tokens.first(5));
  prefill(encoder, model, state, 0, tokens.subspan(5, tokens.size() - 6));
  Stepper stepper(encoder, model, state);
  return numbers(encoder, stepper.step(tokens.last(1)));
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = argv[1];
  const auto encoder = Device::cpu().make_encoder();
  const auto json = formats::Json::parse(R"({"model_type": "fictional", "hidden_size": 32,
      "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
      "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64, "rope_theta": 10000,
      "window": 3, "num_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2})",
                                         "config.json");
  const Config config = Config::parse(json, "config.json");
  const Model model = random_model(config, *encoder, DType::kF32, 1);
  const std::vector<int> tokens{3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3};

  // A gradient for everything that it has.
  Tape tape(*encoder);
  const Model watched = watch(tape, model);
  const Tensor ids = encoder->empty({1, 12}, DType::kI32);
  encoder->upload(tokens.data(), ids.bytes(), ids);
  tape.backward(loss(tape, watched, ids, ids));
  for (const Parameter& p : parameters(watched)) {
    double sum = 0;
    for (const float g : numbers(*encoder, tape.grad(p.tensor)))
      sum += std::abs(static_cast<double>(g));
    expect(sum > 0 && std::isfinite(sum), p.name.c_str());
  }

  const std::vector<float> logits = whole(*encoder, model, tokens);
  expect(distance(logits, in_pieces(*encoder, model, tokens)) < 1e-4,
         "pieces and steps are the whole");
  Model wide = model;
  for (LayerPlan& layer : wide.config.plan.layers) {
    std::get<AttentionPlan>(layer.mixer).window = 0;
  }
  expect(distance(logits, whole(*encoder, wide, tokens)) > 1e-3, "windows count");

  save_model(model, folder + "/model");
  const Model loaded = load_model(folder + "/model", *encoder);
  expect(whole(*encoder, loaded, tokens) == logits, "what was loaded is what was saved");
  const Model packed = quantize_model(*encoder, model, usual_packing({8, 32}));
  expect(distance(logits, whole(*encoder, packed, tokens)) < 0.2, "8 bits are near");
  Model tuned = model;
  add_lora(*encoder, tuned, {.rank = 2}, 1);
  expect(lora_parameters(tuned).size() == 2 * (3 * 7 + 8), "every linear layer has an adapter");
  expect(whole(*encoder, tuned, tokens) == logits, "new adapters change nothing");
  if (failures == 0) std::puts("all holds");
  return failures == 0 ? 0 : 1;
}
