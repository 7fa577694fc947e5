#include "mlxtape/models/lora.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "mlxtape/base/files.h"
#include "mlxtape/formats/safetensors.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/models/state.h"
#include "small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

namespace fs = std::filesystem;
using models::LoraOptions;
using models::Model;

class Lora : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    folder_ = fs::path(testing::TempDir()) /
              ("lora_" + std::string(name_of(GetParam())) + "_" +
               testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override {
    fs::remove_all(folder_);
    OnDevice::TearDown();
  }
  const std::string& folder() const { return folder_; }

  Model base(const std::string& type, bool quantized, DType dtype = DType::kF32) {
    const Model model = small_model(encoder(), type, dtype);
    if (!quantized) return model;
    return models::quantize_model(encoder(), model, models::usual_format({4, 32}));
  }
  // With numbers in every b, so that adapters count about as much as the weights do.
  Model adapted(const std::string& type, bool quantized, const LoraOptions& options = {4, 2}) {
    Model model = base(type, quantized);
    models::add_lora(encoder(), model, options, 7);
    Noise noise(11);
    for (const models::Parameter& p : models::lora_parameters(model)) {
      if (!p.name.ends_with(".lora_b")) continue;
      std::vector<float> values;
      for (const double v : random_values(noise, p.tensor.size(), DType::kF32, 0.05)) {
        values.push_back(static_cast<float>(v));
      }
      encoder().upload(values.data(), p.tensor.bytes(), p.tensor);
    }
    return model;
  }
  Tensor tokens(std::int64_t batch = 2, std::int64_t length = 9) {
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < batch * length; ++i) {
      ids.push_back(static_cast<std::int32_t>((i * 37 + 5) % 80));
    }
    const Tensor there = encoder().empty({batch, length}, DType::kI32);
    encoder().upload(ids.data(), there.bytes(), there);
    return there;
  }
  std::vector<double> logits(const Model& model) {
    Tape tape(encoder());
    return download(models::logits(tape, model, models::hidden(tape, model, tokens())));
  }
  // As a part of the largest. Rounding moves these models by less than 1e-6, adapters by more than 1e-2.
  static double apart(const std::vector<double>& a, const std::vector<double>& b) {
    double most = 0, far = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      most = std::max(most, std::abs(a[i]));
      far = std::max(far, std::abs(a[i] - b[i]));
    }
    return far / most;
  }

 private:
  std::string folder_;
};

TEST_P(Lora, AtFirstNothingChanges) {
  for (const std::string& type : model_types()) {
    for (const bool quantized : {false, true}) {
      Model model = base(type, quantized);
      const std::vector<double> before = logits(model);
      models::add_lora(encoder(), model, {}, 1);
      EXPECT_LT(apart(before, logits(model)), 1e-5) << type;
      EXPECT_GT(apart(before, logits(adapted(type, quantized))), 0.01)
          << type << ": adapters count";
      models::remove_lora(model);
      EXPECT_FALSE(models::has_lora(model));
    }
  }
}

TEST_P(Lora, ModulesAsMlxLmChoosesThem) {
  const Model model = base("qwen3_next", false);
  const std::string layer = "model.layers.3.";
  LoraOptions options;
  options.num_layers = 1;
  const std::vector<std::string> last = {layer + "self_attn.q_proj",
                                         layer + "self_attn.k_proj",
                                         layer + "self_attn.v_proj",
                                         layer + "self_attn.o_proj",
                                         layer + "mlp.gate",
                                         layer + "mlp.switch_mlp.gate_proj",
                                         layer + "mlp.switch_mlp.up_proj",
                                         layer + "mlp.switch_mlp.down_proj",
                                         layer + "mlp.shared_expert.gate_proj",
                                         layer + "mlp.shared_expert.up_proj",
                                         layer + "mlp.shared_expert.down_proj",
                                         layer + "mlp.shared_expert_gate"};
  EXPECT_EQ(models::lora_modules(model, options), last);
  // Delta nets: in_proj_qkvz, in_proj_ba, out_proj.
  EXPECT_EQ(models::lora_modules(model, {}).size(), 2 * last.size() + 2 * (last.size() - 1));
  options.num_layers = 9;
  EXPECT_EQ(models::lora_modules(model, options), models::lora_modules(model, {}));
  options.num_layers = 3;
  options.keys = {"q_proj", "mlp.gate", "lm_head", "model.layers.0.mlp.gate"};
  const std::vector<std::string> some = {"model.layers.0.mlp.gate",
                                         "model.layers.1.self_attn.q_proj",
                                         "model.layers.1.mlp.gate",
                                         "model.layers.2.mlp.gate",
                                         "model.layers.3.self_attn.q_proj",
                                         "model.layers.3.mlp.gate",
                                         "lm_head"};
  EXPECT_EQ(models::lora_modules(model, options), some);
  for (const std::string key : {"proj", "embed_tokens", "norm", "conv1d", ""}) {
    options.keys = {key};
    expect_error(Errc::kArgument, "lora: keys must be ends of paths",
                 [&] { models::lora_modules(model, options); });
  }
}

TEST_P(Lora, AdaptersAsMlxLmDrawsThem) {
  Model model = base("qwen3_next", true);
  models::add_lora(encoder(), model, {3}, 1);
  for (const models::Parameter& p : models::lora_parameters(model)) {
    const std::vector<double> values = download(p.tensor);
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    if (p.name.ends_with(".lora_b")) {
      EXPECT_EQ(std::pair(*least, *most), std::pair(0.0, 0.0)) << p.name;
      continue;
    }
    const bool experts = p.name.find("switch_mlp") != std::string::npos;
    EXPECT_EQ(p.tensor.rank(), experts ? 3 : 2) << p.name;
    const double in = static_cast<double>(p.tensor.shape()[experts ? 2 : 0]),
                 edge = 1 / std::sqrt(in);
    EXPECT_TRUE(*least >= -edge && *least < -0.8 * edge) << p.name << ": from " << *least;
    EXPECT_TRUE(*most <= edge && *most > 0.8 * edge) << p.name << ": to " << *most;
  }
  Model other = base("qwen3_next", true), same = other;
  models::add_lora(encoder(), other, {3}, 2);
  models::add_lora(encoder(), same, {3}, 1);
  const auto first = [&](const Model& m) {
    return download(models::lora_parameters(m)[0].tensor);
  };
  EXPECT_EQ(first(model), first(same));
  EXPECT_NE(first(model), first(other));
}

// Chunks and steps see the adapters as whole sequences do.
TEST_P(Lora, InChunksAndSteps) {
  for (const std::string& type : model_types()) {
    for (const bool quantized : {false, true}) {
      const Model model = adapted(type, quantized);
      const std::vector<double> whole = logits(model);
      const std::int64_t length = 9, vocabulary = 80;
      const Tensor all = tokens();
      std::vector<std::int32_t> ids(static_cast<std::size_t>(all.size()));
      encoder().download(all, ids.data(), all.bytes());
      models::State state(model, 2, 12);
      for (std::int64_t b = 0; b < 2; ++b) {
        const std::span row(ids.data() + b * length, 6);
        models::prefill(encoder(), model, state, b, row, 4);
      }
      models::Stepper stepper(encoder(), model, state);
      for (std::int64_t t = 6; t < length; ++t) {
        const std::vector<std::int32_t> next = {ids[static_cast<std::size_t>(t)],
                                                ids[static_cast<std::size_t>(length + t)]};
        const std::vector<double> got = download(stepper.step(next));
        for (std::int64_t b = 0; b < 2; ++b) {
          const auto at = [&](const std::vector<double>& v, std::int64_t row) {
            return std::vector<double>(v.begin() + row * vocabulary,
                                       v.begin() + (row + 1) * vocabulary);
          };
          EXPECT_LT(apart(at(whole, b * length + t), at(got, b)), 1e-5) << type << " " << t;
        }
      }
    }
  }
}

TEST_P(Lora, GradientsOfAdaptersAlone) {
  for (const std::string& type : model_types()) {
    const Model model = adapted(type, true);
    std::vector<std::vector<double>> found[2];
    for (const bool checkpoint : {false, true}) {
      Tape tape(encoder());
      const Model watched = models::watch_lora(tape, model);
      const Tensor all = tokens();
      models::HiddenOptions options;
      options.checkpoint = checkpoint;
      const Tensor loss = models::loss(tape, watched, all, all, options);
      tape.backward(loss);
      for (const models::Parameter& p : models::lora_parameters(watched)) {
        EXPECT_TRUE(tape.has_grad(p.tensor)) << p.name;
        found[checkpoint ? 1 : 0].push_back(download(tape.grad(p.tensor)));
      }
      for (const models::Parameter& p : models::parameters(watched)) {
        EXPECT_EQ(p.tensor.identity(), 0) << p.name;
      }
    }
    EXPECT_EQ(found[0], found[1]) << type;
  }
}

TEST_P(Lora, QuantizedUnderItsAdapters) {
  const Model model = adapted("qwen3_next", false);
  const Model quantized = models::quantize_model(encoder(), model, models::usual_format({8, 32}));
  EXPECT_EQ(models::lora_parameters(quantized).size(), models::lora_parameters(model).size());
  const double by_format = apart(logits(model), logits(quantized));
  EXPECT_LT(by_format, 0.1 * apart(logits(base("qwen3_next", false)), logits(model)));
}

TEST_P(Lora, AHeadsAdapter) {
  const Model model = adapted("qwen3", false, {4, 2, 0, -1, {"lm_head"}});
  Tape tape(encoder());
  const Model watched = models::watch_lora(tape, model);
  const Tensor all = tokens();
  const Tensor loss = models::loss(tape, watched, all, all);
  Model fused = models::fuse_lora(encoder(), model);
  EXPECT_NEAR(download(loss)[0], download(models::loss(tape, fused, all, all))[0], 1e-5);
  tape.backward(loss);
  EXPECT_TRUE(tape.has_grad(watched.weights.head.adapter.b));
}

TEST_P(Lora, FusedModelsAreTheSame) {
  for (const std::string& type : model_types()) {
    const Model plain = adapted(type, false), quantized = adapted(type, true);
    const Model fused = models::fuse_lora(encoder(), plain);
    EXPECT_FALSE(models::has_lora(fused));
    EXPECT_LT(apart(logits(plain), logits(fused)), 1e-5) << type;
    EXPECT_GT(apart(logits(base(type, false)), logits(fused)), 0.01) << type;
    const Model wide = models::fuse_lora(encoder(), quantized, {true});
    EXPECT_LT(apart(logits(quantized), logits(wide)), 1e-5) << type;
    for (const models::Parameter& p : models::parameters(wide)) {
      EXPECT_TRUE(is_float(p.tensor.dtype())) << p.name;
    }
    EXPECT_EQ(wide.config.quantization.usual.bits, 0);
    EXPECT_EQ(wide.config.json.find("quantization"), nullptr);
    // Quantised again as it was: the nearest codes of the sum.
    const Model again = models::fuse_lora(encoder(), quantized);
    const Model want = models::quantize_model(encoder(), wide, models::usual_format({4, 32}));
    const auto got_all = models::parameters(again), want_all = models::parameters(want);
    ASSERT_EQ(got_all.size(), want_all.size());
    for (std::size_t i = 0; i < got_all.size(); ++i) {
      if (got_all[i].name.find("layers") == std::string::npos) continue;  // quantised twice there
      EXPECT_EQ(download(got_all[i].tensor), download(want_all[i].tensor)) << got_all[i].name;
    }
    EXPECT_EQ(again.config.json, quantized.config.json);
  }
}

TEST_P(Lora, SavedAndLoaded) {
  for (const std::string& type : model_types()) {
    LoraOptions options{4, 2, 0, 3};
    if (type == "qwen3_next") options.keys = {"q_proj", "switch_mlp.up_proj", "in_proj_ba"};
    const Model model = adapted(type, true, options);
    const std::string path = folder() + "/" + type;
    models::save_adapters(model, path, options);
    Model again = base(type, true);
    const LoraOptions read = models::load_adapters(encoder(), again, path);
    EXPECT_EQ(std::tuple(read.rank, read.scale, read.dropout, read.num_layers),
              std::tuple(4, 2.0, 0.0, 3));
    const auto ours = models::lora_parameters(model), theirs = models::lora_parameters(again);
    ASSERT_EQ(ours.size(), theirs.size());
    for (std::size_t i = 0; i < ours.size(); ++i) {
      EXPECT_EQ(ours[i].name, theirs[i].name);
      EXPECT_EQ(download(ours[i].tensor), download(theirs[i].tensor));
    }
    EXPECT_EQ(logits(model), logits(again));
    Model alone = base(type, true);  // without the other file
    models::load_adapter_weights(encoder(), alone, path + "/adapters.safetensors", options);
    EXPECT_EQ(logits(model), logits(alone));
    if (!options.keys.empty()) {  // in full, as mlx-lm asks for them
      const std::vector<std::string> full = {"linear_attn.in_proj_ba", "mlp.switch_mlp.up_proj",
                                             "self_attn.q_proj"};
      EXPECT_EQ(read.keys, full);
    }
    models::save_adapters(again, path, read);
  }
}

TEST_P(Lora, BadFilesAreRefused) {
  const LoraOptions options{4, 2, 0, 1};
  const Model good = adapted("qwen3", false, options);
  const std::string config_file = folder() + "/adapter_config.json";
  const std::string weights_file = folder() + "/adapters.safetensors";
  const auto fails = [&](const std::string& says) {
    Model model = base("qwen3", false);
    expect_error(Errc::kIo, says, [&] { models::load_adapters(encoder(), model, folder()); });
    EXPECT_FALSE(models::has_lora(model)) << "the model stays as it was";
  };
  fails("adapter_config.json");
  const auto with_config = [&](const std::string& text) {
    models::save_adapters(good, folder(), options);
    write_whole(config_file, text, "test");
  };
  const std::string lora = R"("lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0)";
  with_config("[]");
  fails("must be an object");
  with_config(R"({"fine_tune_type": "dora", "num_layers": 1, )" + lora + "}}");
  fails("fine_tune_type must be \"lora\", got \"dora\"");
  with_config(R"({"num_layers": 1})");
  fails("lora_parameters must be an object");
  with_config("{" + lora + "}}");
  fails("num_layers is missing");
  with_config(R"({"num_layers": "all", )" + lora + "}}");
  fails("num_layers must be an integer");
  with_config(R"({"num_layers": 1, "lora_parameters": {"rank": 4, "alpha": 2}})");
  fails("scale is missing");
  with_config(R"({"num_layers": 1, "lora_parameters": {"rank": 0, "scale": 2}})");
  fails("rank must be at least 1");
  with_config(R"({"num_layers": 1, "lora_parameters": {"rank": 4, "scale": "x"}})");
  fails("scale must be a number");
  with_config(R"({"num_layers": 1, )" + lora + R"(, "keys": "q_proj"}})");
  fails("keys must be a list of names");
  with_config(R"({"num_layers": 1, )" + lora + R"(, "keys": [1]}})");
  fails("keys must be a list of names");
  with_config(R"({"num_layers": 1, )" + lora + R"(, "keys": ["nothing"]}})");
  fails("keys must name modules of the model");
  with_config(R"({"num_layers": 1, )" + lora + R"(, "keys": ["self_attn.q_proj"]}})");
  fails("model.layers.3.mlp.down_proj.lora_a is not an adapter of this model");
  with_config(R"({"num_layers": 1, "lora_parameters": {"rank": 5, "scale": 2.0}})");
  fails(".lora_a must be [");

  const auto with_weights =
      [&](const std::function<void(std::vector<formats::NamedTensor>&)>& change) {
        models::save_adapters(good, folder(), options);
        std::vector<formats::NamedTensor> all;
        for (const models::Parameter& p : models::lora_parameters(good))
          all.push_back({p.name, p.tensor});
        change(all);
        formats::write_safetensors(weights_file, all);
      };
  with_weights([](auto& all) { all[0].name = "model.layers.3.self_attn.q_proj.m"; });
  fails("model.layers.3.self_attn.q_proj.m is not an adapter of this model");
  with_weights([](auto& all) { all[0].name = "model.layers.2.self_attn.q_proj.lora_a"; });
  fails("model.layers.2.self_attn.q_proj.lora_a is not an adapter of this model");
  with_weights([](auto& all) { all.erase(all.begin()); });
  fails(
      "model.layers.3.self_attn.q_proj.lora_a is missing, but the other half of the pair is "
      "present");
  with_weights([&](auto& all) { all[1].tensor = encoder().zeros({4, 3}, DType::kF32); });
  fails("model.layers.3.self_attn.q_proj.lora_b must be [4, 64] of f32, f16 or bf16");
  with_weights([&](auto& all) { all[1].tensor = encoder().zeros({4, 64}, DType::kI32); });
  fails("got [4, 64] I32");
  with_weights([](auto& all) { all.clear(); });
  fails("contains no adapters");
  fs::remove(weights_file);
  fails("adapters.safetensors");

  // Some of the modules that the config chooses: the others are as they were.
  with_weights([](auto& all) { all.resize(2); });
  Model some = base("qwen3", false);
  models::load_adapters(encoder(), some, folder());
  EXPECT_EQ(models::lora_parameters(some).size(), 2);
  expect_error(Errc::kArgument, "must not already have adapters",
               [&] { models::load_adapters(encoder(), some, folder()); });
  const auto from_file = [&](Model model, const LoraOptions& as) {
    models::load_adapter_weights(encoder(), model, weights_file, as);
  };
  expect_error(Errc::kArgument, "must not already have adapters",
               [&] { from_file(some, options); });
  expect_error(Errc::kIo, "for this model and rank",
               [&] { from_file(base("qwen3", false), {.rank = 5}); });
  expect_error(Errc::kIo, "not an adapter of this model for these layers", [&] {
    from_file(base("qwen3", false), {.rank = 4, .num_layers = 1, .keys = {"down_proj"}});
  });
  expect_error(Errc::kArgument, "rank", [&] { from_file(base("qwen3", false), {.rank = 0}); });
}

TEST_P(Lora, WrongCallsAreRefused) {
  Model model = base("qwen3_5_moe", false);
  const auto check = [&](const LoraOptions& options) {
    return models::lora_check(model, options);
  };
  LoraOptions dropout{8, 20, 0.1};
  expect_refused({
      {"rank", check({0}), Errc::kArgument, "rank must be at least 1, got 0"},
      {"scale", check({8, INFINITY}), Errc::kArgument, "scale must be a number"},
      {"dropout", check({8, 20, 1}), Errc::kArgument, "dropout must be from 0 to below 1"},
      {"experts", check(dropout), Errc::kArgument, "dropout must be 0 where experts have adapters"},
  });
  dropout.keys = {"q_proj"};
  EXPECT_FALSE(check(dropout));
  expect_error(Errc::kArgument, "has no adapters",
               [&] { models::save_adapters(model, folder(), {}); });
  models::add_lora(encoder(), model, {}, 1);
  expect_error(Errc::kArgument, "must not already have adapters",
               [&] { models::add_lora(encoder(), model, {}, 1); });
  expect_error(Errc::kArgument, "must be one that the options choose",
               [&] { models::save_adapters(model, folder(), {9}); });
  expect_error(Errc::kArgument, "must be one that the options choose",
               [&] { models::save_adapters(model, folder(), {8, 20, 0, 2}); });
  expect_error(Errc::kArgument, "fuse them into the weights with fuse_lora",
               [&] { models::save_model(model, folder() + "/model"); });
}

TEST_P(Lora, DropoutIsAFunctionOfTheBatch) {
  const Model model = adapted("qwen3", true);
  const auto loss = [&](double part, std::uint64_t seed, std::int64_t batch) {
    Tape tape(encoder());
    const Tensor key = models::lora_dropout_key(encoder(), seed, batch);
    const Model watched = models::watch_lora(tape, model, {part, key});
    return download(models::loss(tape, watched, tokens(), tokens()))[0];
  };
  EXPECT_EQ(loss(0.5, 1, 3), loss(0.5, 1, 3));
  EXPECT_NE(loss(0.5, 1, 3), loss(0.5, 1, 4));
  EXPECT_NE(loss(0.5, 1, 3), loss(0.5, 2, 3));
  EXPECT_NE(loss(0.5, 1, 3), loss(0, 1, 3));
}

MT_ON_EVERY_BACKEND(Lora);

}  // namespace
}  // namespace mlxtape::test
