#include "mlxtape/models/model.h"

#include <cmath>
#include <filesystem>

#include <unistd.h>

#include "mlxtape/base/files.h"
#include "mlxtape/formats/model_directory.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/ops/optimiser.h"
#include "small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

namespace fs = std::filesystem;

class Models : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    folder_ = fs::temp_directory_path() / ("mlxtape_model_test_" + std::to_string(::getpid()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override {
    fs::remove_all(folder_);
    OnDevice::TearDown();
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  Tensor ids(const std::vector<std::int32_t>& tokens) {
    const Tensor t = encoder().empty({1, static_cast<std::int64_t>(tokens.size())}, DType::kI32);
    encoder().upload(tokens.data(), t.bytes(), t);
    return t;
  }
  std::vector<unsigned char> logit_bits(const models::Model& model) {
    Tape tape(encoder());
    const Tensor h = models::hidden(tape, model, ids({3, 1, 4, 1, 5, 9, 2, 6}));
    return bits_of(encoder(), models::logits(tape, model, h));
  }

 private:
  fs::path folder_;
};

// What was saved comes back with the same bits, quantised or not, in one file or many.
TEST_P(Models, SavedAndLoaded) {
  for (const std::string& type : model_types()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int bits : {0, 2, 3, 4, 5, 6, 8}) {
        SCOPED_TRACE(type + " " + name_of(dtype) + " " + std::to_string(bits));
        models::Model model = small_model(encoder(), type, dtype);
        if (bits > 0) {
          model = models::quantize_model(encoder(), model, models::usual_format({bits, 32}));
        }
        const std::vector<unsigned char> want = logit_bits(model);
        models::SaveOptions options;
        options.replace = true;
        if (bits == 4) options.shard_bytes = 20000;
        models::save_model(model, path("m"), options);
        const models::Model loaded = models::load_model(path("m"), encoder());
        EXPECT_EQ(logit_bits(loaded), want);
        EXPECT_EQ(loaded.config.quantization.usual.bits, bits);
      }
    }
  }
}

TEST_P(Models, RoutersInEightBits) {
  const models::Model model = models::quantize_model(
      encoder(), small_model(encoder(), "qwen3_next"), models::usual_format({4, 32}));
  const nn::MoeWeights& moe = model.weights.layers[0].moe;
  EXPECT_EQ(moe.router.quantized.format.bits, 8);
  EXPECT_EQ(moe.router.quantized.format.group_size, 64);
  EXPECT_EQ(moe.shared_gate.quantized.format.bits, 8);
  EXPECT_EQ(moe.experts.down.quantized.format.bits, 4);
}

// As many tokens as there are go to as many experts as each has; those of a row are the same as if it were alone.
TEST_P(Models, TellsWhereTokensWent) {
  const models::Model model = lively_model(encoder(), "qwen3_next");
  const auto routes = [&](const std::vector<std::int32_t>& tokens) {
    std::vector<std::vector<std::uint32_t>> all;
    models::HiddenOptions options;
    options.routed = [&](std::int64_t layer, const Tensor& counts) {
      EXPECT_EQ(layer, std::ssize(all));
      all.emplace_back(static_cast<std::size_t>(counts.size()));
      encoder().download(counts, all.back().data(), counts.bytes());
    };
    Tape tape(encoder());
    models::hidden(tape, model, ids(tokens), options);
    return all;
  };
  const auto first = routes({3}), both = routes({3, 7});
  ASSERT_EQ(std::ssize(both), model.config.plan.layer_count());
  for (std::size_t l = 0; l < both.size(); ++l) {
    ASSERT_EQ(std::ssize(both[l]), model.config.plan.moe()->experts);
    std::int64_t sent = 0;
    for (std::size_t e = 0; e < both[l].size(); ++e) {
      sent += both[l][e];
      EXPECT_LE(first[l][e], both[l][e]);
      EXPECT_LE(both[l][e] - first[l][e], 1U);
    }
    EXPECT_EQ(sent, 2 * model.config.plan.moe()->chosen);
  }
  models::HiddenOptions both_ways;
  both_ways.checkpoint = true;
  both_ways.routed = [](std::int64_t, const Tensor&) {
  };
  Tape tape(encoder());
  EXPECT_THROW(models::hidden(tape, model, ids({3}), both_ways), Error);
}

// Delta nets that forget at once would not learn to remember.
TEST_P(Models, RandomWeightsAreAsTheConfigSays) {
  formats::Json json = small_config("qwen3_next");
  const auto deviation = [&] {
    const auto config = models::Config::parse(json, "test");
    const models::Model model = models::random_model(config, encoder(), DType::kF32, 3);
    for (const double bias : download(model.weights.layers[0].delta.dt_bias)) {
      EXPECT_GE(bias, std::log(0.001));
      EXPECT_LE(bias, std::log(0.1));
    }
    double squares = 0;
    const std::vector<double> values = download(model.weights.embedding.plain);
    for (const double value : values) squares += value * value;
    return std::sqrt(squares / static_cast<double>(values.size()));
  };
  EXPECT_NEAR(deviation(), 0.02, 0.002);
  json.set("initializer_range", 0.05);
  EXPECT_NEAR(deviation(), 0.05, 0.005);
  json.set("initializer_range", 100);
  EXPECT_NEAR(deviation() * std::sqrt(json.find("hidden_size")->number()), 1, 0.1);
}

// Tokens see none that follow, so the last one may as well not be there.
TEST_P(Models, TargetsBelowZeroDoNotCount) {
  const models::Model model = small_model(encoder(), "qwen3_5");
  Tape tape(encoder());
  const double all = download(models::loss(tape, model, ids({3, 1, 4}), ids({1, 4, -1})))[0];
  const double two = download(models::loss(tape, model, ids({3, 1}), ids({1, 4})))[0];
  EXPECT_NEAR(all, two, 0x1p-20 * two);
}

TEST_P(Models, LearnsOneSentence) {
  for (const std::string& type : model_types()) {
    SCOPED_TRACE(type);
    models::Model model = small_model(encoder(), type);
    const Tensor in = ids({3, 1, 4, 1, 5, 9, 2, 6}), out = ids({1, 4, 1, 5, 9, 2, 6, 5});
    std::vector<std::pair<Tensor, Tensor>> moments;
    for (const auto& p : models::parameters(model)) {
      moments.emplace_back(encoder().zeros(p.tensor.shape(), DType::kF32),
                           encoder().zeros(p.tensor.shape(), DType::kF32));
    }
    double first = 0, last = 0;
    const ops::StepNumbers numbers{encoder().full({}, DType::kF32, 0.01),
                                   encoder().full({}, DType::kI32, 0)};
    for (int step = 0; step < 60; ++step) {
      Tape tape(encoder());
      const models::Model watched = models::watch(tape, model);
      const Tensor loss = models::loss(tape, watched, in, out);
      tape.backward(loss);
      std::vector<ops::AdamWSlot> parameters;
      std::size_t i = 0;
      for (const auto& p : models::parameters(watched)) {
        parameters.push_back({p.tensor, tape.grad(p.tensor), moments[i].first, moments[i].second});
        ++i;
      }
      ops::advance(encoder(), numbers.t);
      ops::adamw_step(encoder(), parameters, numbers);
      last = download(loss)[0];
      if (step == 0) first = last;
    }
    EXPECT_NEAR(first, std::log(80.0), 0.5);
    EXPECT_LT(last, 0.1 * first);
  }
}

// Broken directories: each is one error that names the file and the tensor.
// What others' files have beside the model, by the architecture's rules: wherever it stands in a name, and no more than that.
TEST_P(Models, LeavesOutWhatIsNoPart) {
  const auto loads = [&](const std::string& type, bool tied, const std::string& more) {
    formats::Json json = small_config(type);
    json.set("tie_word_embeddings", tied);
    const models::Model model =
        models::random_model(models::Config::parse(json, type), encoder(), DType::kF32, 1);
    formats::ModelToSave out;
    for (const auto& [name, tensor, shape] : models::parameters(model)) {
      out.tensors.push_back({name, tensor.reshape(shape)});
    }
    out.tensors.push_back({more, encoder().zeros({2}, DType::kF32)});
    out.config = json;
    formats::save_model(path("more"), out, true);
    models::load_model(path("more"), encoder());
  };
  loads("qwen3_next", false, "mtp.norm.weight");
  loads("qwen3_next", false, "model.mtp.norm.weight");
  loads("qwen3_5", false, "vision_tower.norm.weight");
  loads("qwen3", true, "lm_head.weight");
  loads("llama", false, "model.layers.0.self_attn.rotary_emb.inv_freq");
  const auto refused = [&](const std::string& type, const std::string& more) {
    expect_error(Errc::kIo, "does not belong to a", [&] { loads(type, false, more); });
  };
  refused("llama", "mtp.norm.weight");
  refused("qwen3_next", "model.layers.0.vision_tower.weight");
  refused("qwen3", "lm_head.scale");
}

TEST_P(Models, BrokenDirectories) {
  const models::Model model = small_model(encoder(), "qwen3_next");
  const auto refused = [&](const std::string& says,
                           const std::function<void(formats::ModelToSave&)>& change) {
    formats::ModelToSave out;
    for (const auto& [name, tensor, shape] : models::parameters(model)) {
      out.tensors.push_back({name, tensor.reshape(shape)});
    }
    out.config = model.config.json;
    change(out);
    formats::save_model(path("broken"), out, true);
    expect_error(Errc::kIo, says, [&] { models::load_model(path("broken"), encoder()); });
    expect_error(Errc::kIo, says, [&] { models::load_shapes(path("broken")); });
  };
  const auto find = [](formats::ModelToSave& out,
                       const std::string& name) -> formats::NamedTensor& {
    for (auto& tensor : out.tensors) {
      if (tensor.name == name) return tensor;
    }
    throw std::logic_error(name);
  };
  refused("the tensor model.norm.weight is missing",
          [&](auto& out) { find(out, "model.norm.weight").name = "model.norm.weights"; });
  refused("the tensor model.layers.0.extra does not belong to a qwen3", [&](auto& out) {
    out.tensors.push_back({"model.layers.0.extra", encoder().zeros({2}, DType::kF32)});
  });
  refused(
      "the tensor model.embed_tokens.weight must be [80, 64] according to config.json, got [81, "
      "64]",
      [&](auto& out) {
        find(out, "model.embed_tokens.weight").tensor = encoder().zeros({81, 64}, DType::kF32);
      });
  refused("must be f32, f16 or bf16, got i32", [&](auto& out) {
    find(out, "model.norm.weight").tensor = encoder().zeros({64}, DType::kI32);
  });
  refused("weights must have the same type", [&](auto& out) {
    find(out, "model.layers.1.self_attn.k_proj.weight").tensor =
        encoder().zeros({32, 64}, DType::kBF16);
  });
  refused("model.layers.0.input_layernorm.weight is f16, the embedding f32", [&](auto& out) {
    find(out, "model.layers.0.input_layernorm.weight").tensor = encoder().zeros({64}, DType::kF16);
  });
  refused("no multiple of the group size 128", [&](auto& out) {
    out.config.set("quantization", formats::Json::parse(R"({"bits": 4, "group_size": 128})", "q"));
    out.tensors.push_back({"lm_head.scales", encoder().zeros({80, 2}, DType::kF32)});
    out.tensors.push_back({"lm_head.biases", encoder().zeros({80, 2}, DType::kF32)});
  });
  refused("does not say how it is quantised", [&](auto& out) {
    out.tensors.push_back({"lm_head.scales", encoder().zeros({80, 2}, DType::kF32)});
  });
  refused("the tensor lm_head.scales is missing", [&](auto& out) {
    out.config.set(
        "quantization",
        formats::Json::parse(R"({"bits": 4, "lm_head": {"bits": 4, "group_size": 32}})", "q"));
  });
  refused("\"hidden_size\" is missing", [&](auto& out) { out.config.erase("hidden_size"); });
  expect_error(Errc::kIo, path("nowhere"), [&] { models::load_model(path("nowhere"), encoder()); });
}

MT_ON_EVERY_BACKEND(Models);

}  // namespace
}  // namespace mlxtape::test
