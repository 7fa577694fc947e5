#include "mlxtape/jobs/lora.h"

#include <cmath>
#include <filesystem>
#include <random>

#include "formats/support.h"
#include "mlxtape/base/files.h"
#include "mlxtape/models/quantize.h"
#include "models/small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

namespace fs = std::filesystem;
using formats::TempFolder;
using jobs::DataSet;
using jobs::FitHooks;
using jobs::LoraJobOptions;
using jobs::Sample;
using jobs::TrainResult;
using models::Model;

// Each letter after the one that comes 3 before it in the alphabet: what a model without the past can learn.
constexpr int kLetters = 20;
std::vector<Sample> walks(unsigned seed, std::size_t count) {
  std::mt19937 bits(seed);
  std::vector<Sample> samples(count);
  for (Sample& sample : samples) {
    auto letter = static_cast<std::int32_t>(bits() % kLetters);
    for (int i = 0; i < 9; ++i) {
      sample.tokens.push_back(letter);
      letter = (letter + 3) % kLetters;
    }
  }
  return samples;
}

class LoraJob : public OnDevice {
 protected:
  Model base(const std::string& type, bool quantized, DType dtype = DType::kF32,
             std::uint64_t seed = 1) {
    formats::Json config = small_config(type);
    config.set("num_hidden_layers", 2);
    config.set("vocab_size", kLetters);
    const Model model =
        models::random_model(models::Config::parse(config, type), encoder(), dtype, seed);
    if (!quantized) return model;
    return models::quantize_model(encoder(), model, models::usual_format({4, 32}));
  }
  static LoraJobOptions options(std::int64_t iterations) {
    LoraJobOptions o;
    o.train.fit.iterations = iterations;
    o.train.fit.learning_rate = 1e-2;
    o.train.fit.validate_every = 2;
    o.train.fit.save_every = 0;
    o.train.fit.optimiser = jobs::make_optimiser("adamw", {{"bias_correction", 1}});
    o.train.batches = {.batch_size = 4, .pad_to = 8};
    o.lora = {4, 4};
    o.seed = 3;
    return o;
  }
  using Bits = std::vector<std::vector<unsigned char>>;
  Bits bits(const std::vector<models::Parameter>& parameters) {
    Bits all;
    for (const auto& p : parameters) all.push_back(bits_of(encoder(), p.tensor));
    return all;
  }
  Bits adapters(const Model& model) { return bits(models::lora_parameters(model)); }

  const DataSet data_{walks(1, 16), walks(2, 6), {}};
  TempFolder folder_;
};

TEST_P(LoraJob, LearnsBesideWeightsThatStay) {
  for (const bool quantized : {false, true}) {
    Model model = base("qwen3_next", quantized);
    // The head stays as it was drawn: only with larger numbers before it can it be sure of a letter.
    model.weights.norm = encoder().full(model.weights.norm.shape(), DType::kF32, 6);
    const Bits before = bits(models::parameters(model));
    LoraJobOptions o = options(40);
    o.train.fit.validate_every = 20;
    o.train.fit.clip = 1;
    const TrainResult result = jobs::lora(encoder(), model, data_, o);
    EXPECT_GT(result.fit.validations.front().loss, std::log(kLetters));  // who knows nothing
    EXPECT_LT(result.fit.best_loss, std::log(2));
    EXPECT_TRUE(bits(models::parameters(model)) == before);
    EXPECT_TRUE(models::has_lora(model));
    EXPECT_EQ(jobs::mean_loss(encoder(), model, jobs::every_batch(data_.valid, o.train.batches)),
              result.fit.best_loss);
  }
}

TEST_P(LoraJob, ResumesWithTheSameBits) {
  for (const std::string type : {"qwen3", "qwen3_5_moe"}) {
    LoraJobOptions o = options(5);
    o.train.fit.accumulation = 2;
    o.train.checkpoint = type == "qwen3";
    o.lora.dropout = type == "qwen3" ? 0.2 : 0;
    Model whole = base(type, true);
    const TrainResult want = jobs::lora(encoder(), whole, data_, o);
    o.train.fit.folder = folder_ / type;
    o.train.fit.resume = true;
    for (const std::int64_t k : {1, 3, 5}) {  // stopped again and again; the last one is not
      std::int64_t steps = 0;
      FitHooks hooks;
      hooks.on_step = [&](std::int64_t step) {
        steps = step;
      };
      hooks.stop = [&] {
        return steps == k;
      };
      Model model = base(type, true);
      const TrainResult got = jobs::lora(encoder(), model, data_, o, hooks);
      EXPECT_EQ(got.fit.stopped, k < 5);
      if (k < 5) continue;
      EXPECT_EQ(got.fit.best_loss, want.fit.best_loss);
      EXPECT_TRUE(adapters(model) == adapters(whole)) << type;
    }
  }
}

// Dropout is drawn anew at each replay.
TEST_P(LoraJob, ACapturedRunHasTheSameBits) {
  encoder().device().memory().set_guarded(false);  // else nothing is planned
  for (const bool is_quantized : {false, true}) {
    for (const double dropout : {0.0, 0.2}) {
      for (const std::int64_t accumulation : {1, 2}) {
        LoraJobOptions o = options(7);
        o.train.fit.accumulation = accumulation;
        o.train.fit.report_every = 1;
        o.lora.dropout = dropout;
        Bits ends[2];
        std::vector<double> losses[2];
        for (const bool capture : {false, true}) {
          o.train.fit.capture = capture;
          Model model = base("qwen3", is_quantized);
          const TrainResult r = jobs::lora(encoder(), model, data_, o);
          EXPECT_EQ(r.fit.replays > 0, capture);
          ends[capture ? 1 : 0] = adapters(model);
          for (const auto& point : r.fit.reports) losses[capture ? 1 : 0].push_back(point.loss);
        }
        EXPECT_EQ(losses[0], losses[1]);
        EXPECT_TRUE(ends[0] == ends[1]);
      }
    }
  }
}

// The first steps' losses, at a rate of 0: what is left out differs from batch to batch.
TEST_P(LoraJob, DropoutIsOn) {
  std::vector<double> losses[2];
  for (const bool on : {false, true}) {
    LoraJobOptions o = options(3);
    o.train.fit.learning_rate = 0;
    o.train.fit.report_every = 1;
    o.lora.dropout = on ? 0.5 : 0;
    Model model = base("qwen3", false);
    models::add_lora(encoder(), model, o.lora, 1);
    for (const models::Parameter& p : models::lora_parameters(model)) {
      encoder().copy(encoder().full(p.tensor.shape(), DType::kF32, 0.1), p.tensor);
    }
    // One sample again and again: without dropout every batch is the same.
    const DataSet same{std::vector<Sample>(8, walks(1, 1)[0]), {}, {}};
    const TrainResult result = jobs::lora(encoder(), model, same, o);
    for (const auto& point : result.fit.reports) losses[on ? 1 : 0].push_back(point.loss);
  }
  EXPECT_EQ(losses[0][0], losses[0][2]);
  EXPECT_NE(losses[1][0], losses[0][0]);
  EXPECT_NE(losses[1][0], losses[1][1]);
}

TEST_P(LoraJob, FilesAsMlxLmHasThem) {
  LoraJobOptions o = options(5);
  o.train.fit.save_every = 2;
  o.train.fit.folder = folder_ / "adapters";
  o.train.fit.validate_every = 3;
  o.lora.keys = {"q_proj", "down_proj"};
  Model model = base("qwen3", false);
  Bits after_four;
  std::vector<std::int64_t> saved;
  FitHooks hooks;
  int asked = 0;
  o.train.validate = [&] {
    return std::abs(asked++ - 1) + 1.0;
  };  // lowest after step 3
  Bits after_three;
  hooks.on_step = [&](std::int64_t step) {
    Model now = base("qwen3", false);
    if (step == 5) {  // written at step 4, and not touched since
      fs::copy(folder_ / "adapters/adapter_config.json", folder_ / "adapter_config.json");
      fs::copy(folder_ / "adapters/0000004_adapters.safetensors", folder_ / "adapters.safetensors");
      models::load_adapters(encoder(), now, folder_.path.string());
      after_four = adapters(now);
      now = base("qwen3", false);
      models::load_adapters(encoder(), now, folder_ / "adapters");
      EXPECT_TRUE(adapters(now) == after_four) << "the last save's";
    }
  };
  hooks.on_saved = [&](std::int64_t step) {
    saved.push_back(step);
    if (step == 3) {
      Model now = base("qwen3", false);
      models::load_adapters(encoder(), now, folder_ / "adapters");
      after_three = adapters(now);
    }
  };
  const TrainResult result = jobs::lora(encoder(), model, data_, o, hooks);
  EXPECT_EQ(result.fit.best_step, 3);
  EXPECT_EQ(saved, (std::vector<std::int64_t>{0, 2, 3, 4, 5}));
  EXPECT_TRUE(fs::exists(folder_ / "adapters/0000002_adapters.safetensors"));
  EXPECT_FALSE(fs::exists(folder_ / "adapters/0000003_adapters.safetensors"));
  EXPECT_FALSE(fs::exists(folder_ / "adapters/0000005_adapters.safetensors"));
  Model again = base("qwen3", false);
  const models::LoraOptions read = models::load_adapters(encoder(), again, folder_ / "adapters");
  EXPECT_EQ(read.keys, (std::vector<std::string>{"mlp.down_proj", "self_attn.q_proj"}));
  EXPECT_TRUE(adapters(again) == adapters(model)) << "at the end the best's";
  EXPECT_TRUE(adapters(again) == after_three);
  EXPECT_FALSE(adapters(again) == after_four);

  // On from adapters that are there, to a run of its own.
  LoraJobOptions more = options(1);
  more.lora = read;
  more.train.fit.learning_rate = 0;
  more.seed = 9;
  const Bits before = adapters(again);
  jobs::lora(encoder(), again, data_, more);
  EXPECT_TRUE(adapters(again) == before);
}

// Killed between the state and the adapters: going on writes what is missing.
TEST_P(LoraJob, AKilledRunsAdaptersAreWritten) {
  LoraJobOptions o = options(4);
  o.train.fit.save_every = 2;
  o.train.fit.folder = folder_ / "killed";
  o.train.fit.resume = true;
  const fs::path file = folder_.path / "killed/0000002_adapters.safetensors";
  std::int64_t steps = 0;
  FitHooks hooks;
  hooks.on_step = [&](std::int64_t step) {
    steps = step;
  };
  hooks.stop = [&] {
    return steps == 2;
  };
  Model model = base("qwen3", false);
  jobs::lora(encoder(), model, data_, o, hooks);
  const std::string want = read_whole(file, "test");
  fs::remove(file);
  formats::put(file.string() + ".tmp12.3", "half");
  bool resumed = false;
  hooks.on_resumed = [&](std::int64_t step) {
    resumed = step == 2 && fs::exists(file) && read_whole(file, "test") == want;
  };
  Model rest = base("qwen3", false);
  jobs::lora(encoder(), rest, data_, o, hooks);
  EXPECT_TRUE(resumed);
  EXPECT_FALSE(fs::exists(file.string() + ".tmp12.3"));
}

TEST_P(LoraJob, RefusesWhatDoesNotFit) {
  LoraJobOptions o = options(2);
  o.train.fit.folder = folder_ / "kept";
  o.train.fit.resume = true;
  Model model = base("qwen3", false);
  jobs::lora(encoder(), model, data_, o);
  const auto fails = [&](const std::string& says, const LoraJobOptions& how, const Model& from) {
    Model tried = from;
    const bool had = models::has_lora(tried);
    expect_error(Errc::kArgument, says, [&] { jobs::lora(encoder(), tried, data_, how); });
    EXPECT_EQ(models::has_lora(tried), had);
  };
  const Model fresh = base("qwen3", false);
  const std::string other = "is the checkpoint of another run: ";
  LoraJobOptions bad = o;
  bad.lora.scale = 5;
  fails(other + "lora scale must be ", bad, fresh);
  bad = o;
  bad.seed = 4;
  fails(other + "lora seed must be 3 to resume it, got 4", bad, fresh);
  bad = o;
  bad.lora.dropout = 0.5;
  fails(other + "lora dropout must be ", bad, fresh);
  fails(other + "base must be ", o, base("qwen3", false, DType::kF32, 2));
  bad = o;
  bad.lora.num_layers = 1;
  fails(other + "lora modules must be ", bad, fresh);
  fails("must be one that the options choose", bad, model);
  bad = options(2);
  bad.lora.rank = 0;
  fails("rank must be at least 1", bad, fresh);
  bad.lora = {8, 20, 0.5};
  fails("dropout must be 0 where experts have adapters", bad, base("qwen3_next", false));
}

MT_ON_EVERY_BACKEND(LoraJob);

}  // namespace
}  // namespace mlxtape::test
