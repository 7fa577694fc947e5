// What every architecture gets from its plan: random weights, gradients, a state, saving and loading, quantisation, LoRA, and the
// jobs: training, training of adapters, generation by the engine.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <span>
#include <vector>

#include "mlxtape/jobs/engine.h"
#include "mlxtape/jobs/lora.h"
#include "mlxtape/jobs/train.h"
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

// Tokens that count up in threes from anywhere.
jobs::DataSet counting() {
  jobs::DataSet data;
  for (int s = 0; s < 16; ++s) {
    jobs::Sample sample;
    for (int i = 0; i < 17; ++i) sample.tokens.push_back((s * 5 + 3 * i) % 64);
    data.train.push_back(sample);
  }
  return data;
}

jobs::TrainOptions short_run(double rate) {
  jobs::TrainOptions options;
  options.fit.iterations = 60;
  options.fit.learning_rate = rate;
  options.validation_batches = 0;
  return options;
}

double loss_of(CommandEncoder& encoder, const Model& model) {
  return jobs::mean_loss(encoder, model, jobs::every_batch(counting().train, {}));
}

// Greedy tokens by the engine: of two prompts side by side, the first of which joins later.
std::vector<int> by_engine(CommandEncoder& encoder, const Model& model,
                           const std::vector<int>& prompt, std::size_t count) {
  jobs::EngineOptions options;
  options.slots = 2;
  options.prefill_chunk = 4;
  jobs::Engine engine(encoder, model, options);
  engine.admit({.prompt = {1, 2, 3}});
  while (engine.is_reading()) engine.step();
  engine.step();
  const std::int64_t slot = engine.admit({.prompt = prompt});
  std::vector<int> tokens;
  while (tokens.size() < count) {
    for (const jobs::Choice& choice : engine.step()) {
      if (choice.slot == slot) tokens.push_back(choice.token);
    }
  }
  tokens.resize(count);
  return tokens;
}
std::vector<int> one_by_one(CommandEncoder& encoder, const Model& model, std::vector<int> tokens,
                            std::size_t count) {
  const std::size_t before = tokens.size();
  while (tokens.size() < before + count) {
    const std::vector<float> z = whole(encoder, model, tokens);
    tokens.push_back(static_cast<int>(std::max_element(z.begin(), z.end()) - z.begin()));
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(before), tokens.end()};
}

// The jobs: a model that learns, generates what it has learned, and takes adapters.
void run_jobs(CommandEncoder& encoder, const Config& config) {
  const Model model = random_model(config, encoder, DType::kF32, 2);
  const double before = loss_of(encoder, model);
  jobs::train(encoder, model, counting(), short_run(3e-3));
  const double after = loss_of(encoder, model);
  expect(after < before / 2, "training halves the loss");
  const std::vector<int> prompt{3, 6, 9, 12, 15, 18};
  expect(by_engine(encoder, model, prompt, 9) == one_by_one(encoder, model, prompt, 9),
         "the engine chooses as the whole model does");

  Model adapted = random_model(config, encoder, DType::kF32, 2);
  jobs::LoraJobOptions options;
  options.train = short_run(1e-2);
  options.lora.rank = 4;
  jobs::lora(encoder, adapted, counting(), options);
  expect(loss_of(encoder, adapted) < 0.8 * before, "adapters learn");
  remove_lora(adapted);
  expect(std::abs(loss_of(encoder, adapted) - before) < 1e-6, "and leave their base as it is");
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
  const Model quantized = quantize_model(*encoder, model, usual_format({8, 32}));
  expect(distance(logits, whole(*encoder, quantized, tokens)) < 0.2, "8 bits are near");
  Model tuned = model;
  add_lora(*encoder, tuned, {.rank = 2}, 1);
  expect(lora_parameters(tuned).size() == 2 * (3 * 7 + 8), "every linear layer has an adapter");
  expect(whole(*encoder, tuned, tokens) == logits, "new adapters change nothing");
  run_jobs(*encoder, config);
  if (failures == 0) std::puts("all holds");
  return failures == 0 ? 0 : 1;
}
