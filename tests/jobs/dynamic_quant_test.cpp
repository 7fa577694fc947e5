#include "mlxtape/jobs/dynamic_quant.h"

#include <cmath>
#include <filesystem>
#include <limits>

#include <unistd.h>

#include "mlxtape/base/files.h"
#include "mlxtape/ops/kl_divergence.h"
#include "models/small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

namespace fs = std::filesystem;
using jobs::Batch;
using jobs::DynamicQuantOptions;
using jobs::Sensitivities;

std::vector<Batch> some_rows(std::int64_t rows, std::int64_t length, std::uint64_t seed) {
  Noise noise(seed);
  std::vector<jobs::Sample> samples(1);
  for (std::int64_t t = 0; t < rows * length; ++t) {
    samples[0].tokens.push_back(static_cast<std::int32_t>(noise.below(80)));
  }
  return jobs::calibration_rows(samples, length, 2);
}

class DynamicQuant : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    folder_ = fs::temp_directory_path() / ("mlxtape_dynamic_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override {
    fs::remove_all(folder_);
    OnDevice::TearDown();
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  Tensor coarse(const Tensor& w, models::WeightFormat p) {
    return ops::dequantize(encoder(), ops::quantize(encoder(), w, {p.bits, p.group_size}));
  }

  static bool is_router(const std::string& name) {
    return name.ends_with("mlp.gate") || name.ends_with("shared_expert_gate");
  }

  // The header's formula with whole gradients: each with the size of what was added up.
  std::vector<std::pair<std::string, Ref>> direct(const models::Model& model,
                                                  const std::vector<Batch>& batches,
                                                  const DynamicQuantOptions& how) {
    models::Model low = model;
    std::vector<std::pair<std::string, Tensor>> originals;
    for (const models::Slot& slot : models::slots(low.weights, low.config)) {
      if (slot.weight == nullptr) continue;
      const Tensor w = slot.weight->plain;
      const bool router = how.keep_routers && is_router(slot.name);
      const models::WeightFormat p = router ? models::WeightFormat{8, 64} : how.low;
      if (w.shape().back() % p.group_size != 0) continue;
      slot.weight->plain = coarse(w, p);
      if (!router) originals.emplace_back(slot.name, w);
    }
    std::vector<std::pair<std::string, Ref>> result;
    for (const auto& [name, w] : originals) result.push_back({name, {0, 0}});
    for (const Batch& batch : batches) {
      const Tensor ids = encoder().empty({batch.rows, batch.length}, DType::kI32);
      encoder().upload(batch.tokens.data(), ids.bytes(), ids);
      Tape none(encoder());
      const Tensor theirs = models::logits(none, model, models::hidden(none, model, ids));
      Tape tape(encoder());
      models::Model watched = models::watch(tape, low);
      ops::KlDivergenceOptions kl;
      kl.reduction = ops::Reduction::kMean;
      tape.backward(ops::kl_divergence(
          tape, models::logits(tape, watched, models::hidden(tape, watched, ids)), theirs, kl));
      std::size_t i = 0;
      for (const models::Slot& slot : models::slots(watched.weights, watched.config)) {
        if (i == originals.size() || slot.name != originals[i].first) continue;
        const Tensor w = originals[i].second;
        const auto g = download(tape.grad(slot.weight->plain));
        const auto a = download(slot.weight->plain), b = download(coarse(w, how.high));
        for (std::size_t j = 0; j < g.size(); ++j) {
          const double term = g[j] * (a[j] - b[j]) / static_cast<double>(batches.size()) /
                              (static_cast<double>(g.size()) / 1e6);
          result[i].second.value += term;
          result[i].second.scale += std::abs(term);
        }
        ++i;
      }
    }
    return result;
  }

 private:
  fs::path folder_;
};

TEST_P(DynamicQuant, IsTheGradientTimesWhatIsLost) {
  for (const std::string& type : model_types()) {
    for (const bool keep : {true, false}) {
      SCOPED_TRACE(type + (keep ? " with routers in 8 bits" : ""));
      const models::Model model = lively_model(encoder(), type);
      const auto batches = some_rows(5, 11, 3);
      ASSERT_EQ(batches.size(), 3U);
      jobs::SensitivityOptions options;
      options.formats = {{2, 32}, {4, 32}, keep};
      const auto want = direct(model, batches, options.formats);
      const Sensitivities got = jobs::sensitivities(encoder(), model, batches, options);
      ASSERT_EQ(got.size(), want.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        const auto& [name, ref] = want[i];
        EXPECT_EQ(got[i].first, name);
        EXPECT_NEAR(got[i].second, ref.value, rounding_bound(DType::kF32, 80 * 64) * ref.scale)
            << name;
        EXPECT_GT(ref.scale, 0) << name;
      }
      // The same numbers when layers are computed twice.
      options.checkpoint = true;
      const Sensitivities again = jobs::sensitivities(encoder(), model, batches, options);
      EXPECT_EQ(again, got);
    }
  }
}

// With checkpoint neither the gradients nor the coarse weights of all layers are there at once.
TEST_P(DynamicQuant, HoldsALayerAtATime) {
  formats::Json json = small_config("qwen3");
  json.set("hidden_size", 256);
  json.set("intermediate_size", 1024);
  json.set("num_hidden_layers", 8);
  const models::Model model =
      models::random_model(models::Config::parse(json, "deep"), encoder(), DType::kF32, 1);
  std::size_t all = 0;
  for (const auto& p : models::parameters(model)) all += p.tensor.bytes();
  jobs::SensitivityOptions options;
  options.formats = {{2, 32}, {4, 32}, true};
  options.checkpoint = true;
  MemoryPool& memory = encoder().device().memory();
  memory.reset_peak();
  const std::size_t before = memory.stats().current;
  jobs::sensitivities(encoder(), model, some_rows(2, 8, 1), options);
  EXPECT_LT(memory.stats().peak - before, all * 3 / 4 + product_room());
}

TEST_P(DynamicQuant, ChoosesWhatFits) {
  const models::Model model = lively_model(encoder(), "qwen3_next");
  const DynamicQuantOptions how{{2, 32}, {6, 32}, true};
  jobs::SensitivityOptions options;
  options.formats = how;
  const Sensitivities values = jobs::sensitivities(encoder(), model, some_rows(2, 9, 4), options);
  std::size_t before = 0;
  for (const double target : {4.5, 5.0, 6.0, 7.0, 100.0}) {
    const jobs::DynamicFormats p = jobs::choose_formats(model, values, target, how);
    EXPECT_LE(p.bits_per_weight, target);
    EXPECT_GT(p.high.size(), before);
    before = p.high.size();
    // The next one would be too much, and none that was left out matters more than one that was not.
    double least = std::numeric_limits<double>::infinity(), most = -least;
    for (const auto& [path, value] : values) {
      const bool high = std::find(p.high.begin(), p.high.end(), path) != p.high.end();
      if (high) least = std::min(least, value);
      if (!high) most = std::max(most, value);
    }
    EXPECT_LT(most, least);
    if (target < 100) {
      const auto with_next = [&](const models::Part& part) {
        for (const auto& [name, value] : values) {
          if (name == part.name && value == most) return how.high;
        }
        return p.rule(part);
      };
      EXPECT_GT(jobs::bits_per_weight(model, with_next), target);
    } else {
      EXPECT_EQ(p.high.size(), values.size());
    }
    const models::Model quantized = models::quantize_model(encoder(), model, p.rule);
    EXPECT_EQ(quantized.weights.layers[0].moe.router.quantized.format.bits, 8);
    std::size_t bytes = 0;
    std::int64_t elements = 0;
    for (const auto& q : models::parameters(quantized)) bytes += q.tensor.bytes();
    for (const auto& q : models::parameters(model)) elements += q.tensor.size();
    EXPECT_DOUBLE_EQ(p.bits_per_weight,
                     8 * static_cast<double>(bytes) / static_cast<double>(elements));
    EXPECT_DOUBLE_EQ(jobs::bits_per_weight(quantized, p.rule), p.bits_per_weight);
  }
}

TEST_P(DynamicQuant, SaysWhatIsWrong) {
  const models::Model model = small_model(encoder(), "qwen3");
  const DynamicQuantOptions how{{2, 32}, {4, 32}, true};
  Sensitivities values;
  models::Weights weights = model.weights;
  for (const models::Slot& slot : models::slots(weights, model.config)) {
    if (slot.weight != nullptr) values.emplace_back(slot.name, 1.0);
  }
  const auto refused = [](const std::string& says, const std::function<void()>& call) {
    expect_error(Errc::kArgument, says, call);
  };
  const auto choose = [&](const Sensitivities& v, double target, const DynamicQuantOptions& o) {
    return [&, v, target, o] {
      jobs::choose_formats(model, v, target, o);
    };
  };
  EXPECT_TRUE(
      jobs::choose_formats(model, values, 4.5, how).high.empty());  // equal ones: all or none
  refused("the target must be at least 4.147", choose(values, 3, how));
  refused("high must be larger than low, 4 bits in groups of 64, got 4 bits in groups of 64",
          choose(values, 4, {{4, 64}, {4, 64}, true}));
  // In f32 scales and biases are 64 bits a group.
  refused("high must be larger than low, 4 bits in groups of 32, got 5 bits in groups of 128",
          choose(values, 4, {{4, 32}, {5, 128}, true}));
  refused("got 7 in groups of 64", choose(values, 4, {{7, 64}, {8, 64}, true}));
  Sensitivities other = values;
  other.emplace_back("model.layers.9.mlp.up_proj", 1);
  refused("model.layers.9.mlp.up_proj has a sensitivity but is not a weight",
          choose(other, 5, how));
  other = values;
  other.pop_back();
  refused("there must be a sensitivity for lm_head", choose(other, 5, how));
  other = values;
  other.back().second = std::numeric_limits<double>::quiet_NaN();
  refused("the sensitivity of lm_head must be finite, got nan", choose(other, 5, how));

  jobs::SensitivityOptions options;
  options.formats = how;
  refused("there must be at least one batch",
          [&] { jobs::sensitivities(encoder(), model, {}, options); });
  expect_error(Errc::kIo, "a token must be in the vocabulary of 80, got 99",
               [&] { jobs::sensitivities(encoder(), model, {{1, 1, {99}, {1}, 1}}, options); });
  const models::Model quantized =
      models::quantize_model(encoder(), model, models::usual_format({4, 32}));
  refused("must not be quantised, got model.embed_tokens in 4 bits",
          [&] { jobs::sensitivities(encoder(), quantized, some_rows(1, 4, 1), options); });
  options.chunk_rows = -1;
  refused("chunk_rows must be at least 0, got -1",
          [&] { jobs::sensitivities(encoder(), model, some_rows(1, 4, 1), options); });
  refused("at least 1, got 0 and 4", [] { jobs::calibration_rows({}, 0); });
  refused("one row of 512 tokens, got 0", [] { jobs::calibration_rows({}); });
}

TEST_P(DynamicQuant, FilesComeBack) {
  const Sensitivities values = {{"model.layers.0.mlp.up_proj", 0.1}, {"lm_head", -3e-9}};
  jobs::write_sensitivities(path("s.json"), values);
  EXPECT_EQ(jobs::read_sensitivities(path("s.json")), values);
  // As Python's json.dump writes it.
  write_whole(path("s.json"), R"([["a", 1], ["b", -2.5e-07]])", "test");
  EXPECT_EQ(jobs::read_sensitivities(path("s.json")), (Sensitivities{{"a", 1}, {"b", -2.5e-7}}));
  for (const auto& [text, says] : std::vector<std::pair<std::string, std::string>>{
           {R"({"a": 1})", "a list of [path, number], got {"},
           {R"([["a", "b"]])", R"(got ["a", "b"])"},
           {R"([["a", 1, 2]])", R"(got ["a", 1, 2])"},
           {R"([["a", 1], ["a", 2]])", "got a twice"}}) {
    write_whole(path("s.json"), text, "test");
    expect_error(Errc::kIo, says, [&] { jobs::read_sensitivities(path("s.json")); });
  }
}

TEST_P(DynamicQuant, Stops) {
  const models::Model model = lively_model(encoder(), "qwen3");
  const auto batches = some_rows(6, 5, 9);
  jobs::SensitivityOptions options;
  options.formats = {{2, 32}, {4, 32}, true};
  std::int64_t heard = 0;
  options.progress = [&](std::int64_t done, std::int64_t all) {
    heard = done;
    EXPECT_EQ(all, 3);
  };
  options.stop = [&] {
    return heard == 2;
  };
  const Sensitivities some = jobs::sensitivities(encoder(), model, batches, options);
  EXPECT_EQ(heard, 2);
  options.stop = {};
  options.progress = {};
  EXPECT_EQ(jobs::sensitivities(encoder(), model, {batches[0], batches[1]}, options), some);
}

MT_ON_EVERY_BACKEND(DynamicQuant);

}  // namespace
}  // namespace mlxtape::test
