#include "mlxtape/jobs/train.h"

#include <cmath>
#include <random>

#include "formats/support.h"
#include "mlxtape/formats/safetensors.h"
#include "mlxtape/models/quantize.h"
#include "models/small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using formats::TempFolder;
using jobs::DataSet;
using jobs::FitHooks;
using jobs::Sample;
using jobs::TrainOptions;
using jobs::TrainResult;

// A word of 4 tokens, drawn at random, twice: the first half cannot be known, the second is the first again.
constexpr std::int64_t kWord = 4, kLetters = 16;
std::vector<Sample> words(unsigned seed, std::size_t count) {
  std::mt19937 bits(seed);
  std::vector<Sample> samples(count);
  for (Sample& sample : samples) {
    for (std::int64_t i = 0; i < kWord; ++i) {
      sample.tokens.push_back(static_cast<std::int32_t>(bits() % kLetters));
    }
    sample.tokens.push_back(kLetters);  // between the two
    sample.prompt = static_cast<std::int64_t>(sample.tokens.size());
    for (std::size_t i = 0; i < kWord; ++i) sample.tokens.push_back(sample.tokens[i]);
  }
  return samples;
}

class Train : public OnDevice {
 protected:
  models::Model model(const std::string& type = "qwen3", DType dtype = DType::kF32,
                      std::int64_t layers = 2, std::uint64_t seed = 1) {
    formats::Json config = small_config(type);
    config.set("num_hidden_layers", layers);
    config.set("vocab_size", 20);
    return models::random_model(models::Config::parse(config, type), encoder(), dtype, seed);
  }
  TrainOptions options(std::int64_t iterations) const {
    TrainOptions o;
    o.fit.iterations = iterations;
    o.fit.learning_rate = 3e-3;
    o.fit.validate_every = 2;
    o.fit.save_every = 0;
    o.fit.clip = 0;
    o.batches = {.batch_size = 4, .pad_to = 8, .learn_prompt = false};
    return o;
  }
  std::vector<std::vector<unsigned char>> bits(const models::Model& model) {
    std::vector<std::vector<unsigned char>> all;
    for (const auto& p : models::parameters(model)) all.push_back(bits_of(encoder(), p.tensor));
    return all;
  }
  TempFolder folder_;
};

// Who does not look where a letter stands must guess among those of the word: 4, or now and then one less.
TEST_P(Train, LearnsToCopy) {
  TrainOptions o = options(80);
  o.batches.batch_size = 16;
  o.fit.warmup = 20;
  o.fit.cosine = true;
  o.fit.clip = 1;
  o.fit.validate_every = 40;
  const models::Model learner = model("qwen3_next");
  const DataSet data{words(1, 400), words(2, 30), {}};
  const TrainResult result = jobs::train(encoder(), learner, data, o);
  const double first = result.fit.validations.front().loss;
  EXPECT_NEAR(first, std::log(20), 0.2);  // a model that knows nothing
  EXPECT_LT(result.fit.best_loss, std::log(4) / 5);
  EXPECT_EQ(result.fit.held_step, result.fit.best_step);
  EXPECT_EQ(jobs::mean_loss(encoder(), learner, jobs::every_batch(data.valid, o.batches)),
            result.fit.best_loss);
}

// The mean over tokens, not over batches: a batch of one short sample counts less than one of four long ones.
TEST_P(Train, TheMeanIsOverTokens) {
  const models::Model learner = model();
  std::vector<Sample> samples = words(3, 9);
  samples[2].tokens.resize(3);
  samples[7].tokens.resize(6);
  const jobs::BatchOptions how{.batch_size = 4, .pad_to = 8};
  double sum = 0;
  std::int64_t counted = 0;
  for (const Sample& sample : samples) {
    const auto one = jobs::every_batch({sample}, {.batch_size = 1, .pad_to = 1});
    ASSERT_EQ(one.size(), 1U);
    const double mean = jobs::mean_loss(encoder(), learner, one);
    sum += mean * static_cast<double>(one[0].counted);
    counted += one[0].counted;
  }
  const auto batches = jobs::validation_batches(samples, how, -1);
  EXPECT_EQ(batches.size(), 3U);
  const double mean = jobs::mean_loss(encoder(), learner, batches);
  // Each loss is f32 and near 3; its parts are sums of 64 terms in another order.
  EXPECT_NEAR(mean, sum / static_cast<double>(counted), 3 * 64 * 0x1p-24);
  EXPECT_NE(mean, (jobs::mean_loss(encoder(), learner, {batches[0]}) +
                   jobs::mean_loss(encoder(), learner, {batches[1]}) +
                   jobs::mean_loss(encoder(), learner, {batches[2]})) /
                      3);
  EXPECT_THROW(jobs::mean_loss(encoder(), learner, {}), Error);

  const auto two = jobs::validation_batches(samples, how, 2);
  ASSERT_EQ(two.size(), 2U);
  EXPECT_EQ(two[0].tokens, batches[0].tokens);
  EXPECT_EQ(two[1].tokens, batches[2].tokens);
  samples[0].prompt = 100;
  EXPECT_TRUE(jobs::validation_batches({samples[0]}, {.learn_prompt = false}, -1).empty());
}

TEST_P(Train, ResumesWithTheSameBits) {
  const DataSet data{words(1, 13), words(2, 3), {}};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    TrainOptions o = options(5);
    o.fit.accumulation = 2;
    o.fit.clip = 1;
    o.checkpoint = dtype == DType::kBF16;
    const models::Model whole = model("qwen3_next", dtype);
    const TrainResult want = jobs::train(encoder(), whole, data, o);
    EXPECT_EQ(want.fit.validations.size(), 4U);
    for (const std::int64_t k : {1, 3}) {
      o.fit.folder = folder_ / (name_of(dtype) + std::to_string(k));
      o.fit.resume = true;
      std::int64_t steps = 0;
      FitHooks hooks;
      hooks.on_step = [&](std::int64_t step) {
        steps = step;
      };
      hooks.stop = [&] {
        return steps == k;
      };
      EXPECT_TRUE(jobs::train(encoder(), model("qwen3_next", dtype), data, o, hooks).fit.stopped);
      const models::Model rest = model("qwen3_next", dtype);
      const TrainResult got = jobs::train(encoder(), rest, data, o);
      EXPECT_EQ(got.fit.best_step, want.fit.best_step);
      EXPECT_EQ(got.fit.best_loss, want.fit.best_loss);
      EXPECT_TRUE(bits(rest) == bits(whole)) << o.fit.folder;
    }
  }
}

// Batches of several lengths, whose steps are replayed.
TEST_P(Train, ACapturedRunHasTheSameBits) {
  encoder().device().memory().set_guarded(false);  // else nothing is planned
  std::vector<Sample> samples = words(1, 30);
  for (std::size_t i = 0; i < 12; ++i) {  // a third of the batches is longer than the others
    const std::vector<std::int32_t> more = words(static_cast<unsigned>(5 + i), 1)[0].tokens;
    samples[i].tokens.insert(samples[i].tokens.end(), more.begin(), more.end());
  }
  for (const std::string type : {"qwen3", "qwen3_next"}) {
    for (const bool checkpoint : {false, true}) {
      TrainOptions o = options(9);
      o.fit.accumulation = checkpoint ? 2 : 1;
      o.fit.lazy_rows = !checkpoint;  // with accumulation rows are not captured
      o.fit.validate_every = 0;
      o.checkpoint = checkpoint;
      std::vector<std::vector<unsigned char>> ends[2];
      for (const bool capture : {false, true}) {
        o.fit.capture = capture;
        const models::Model learner = model(type, DType::kBF16);
        const TrainResult r = jobs::train(encoder(), learner, {samples, {}, {}}, o);
        EXPECT_EQ(r.fit.replays > 0, capture);
        ends[capture ? 1 : 0] = bits(learner);
      }
      EXPECT_TRUE(ends[0] == ends[1]) << type << (checkpoint ? ", layers computed again" : "");
    }
  }
}

// The weights are those of the lowest validation, from the disk or from memory; without one, the last.
TEST_P(Train, EndsWithTheBest) {
  const DataSet data{words(1, 12), words(2, 3), {}};
  for (const bool on_disk : {false, true}) {
    TrainOptions o = options(6);
    if (on_disk) o.fit.folder = folder_ / "best";
    const models::Model learner = model();
    std::vector<std::vector<unsigned char>> after_two;
    FitHooks hooks;
    int asked = 0;
    o.validate = [&] {
      return std::abs(asked++ - 1) + 1.0;
    };  // lowest after step 2
    hooks.on_step = [&](std::int64_t step) {
      if (step == 2) after_two = bits(learner);
    };
    int seen = 0;
    hooks.on_validated = [&](const jobs::FitPoint&) {
      ++seen;
    };
    const TrainResult result = jobs::train(encoder(), learner, data, o, hooks);
    EXPECT_EQ(result.fit.held_step, 2);
    EXPECT_EQ(result.fit.best_step, 2);
    EXPECT_EQ(seen, 4);
    EXPECT_TRUE(bits(learner) == after_two);
  }
  TrainOptions o = options(3);
  o.validation_batches = 0;
  const models::Model learner = model(), again = model();
  EXPECT_EQ(jobs::train(encoder(), learner, data, o).fit.held_step, 3);
  EXPECT_EQ(jobs::train(encoder(), again, {data.train, {}, {}}, o).fit.best_step, -1);
  EXPECT_TRUE(bits(learner) == bits(again));
}

// Training data is held once, however large it is: what changes in it during a run is what is trained on.
TEST_P(Train, SamplesAreNotCopied) {
  const auto trained = [&](bool changes) {
    DataSet data{words(1, 40), {}, {}};
    const models::Model learner = model();
    FitHooks hooks;
    hooks.on_step = [&](std::int64_t step) {
      if (!changes || step != 1) return;
      for (Sample& sample : data.train) sample.tokens.assign(sample.tokens.size(), 1);
    };
    jobs::train(encoder(), learner, data, options(8), hooks);
    return bits(learner);
  };
  const auto same = trained(false);
  EXPECT_TRUE(trained(false) == same);
  EXPECT_FALSE(trained(true) == same);
}

TEST_P(Train, CheckpointsChangeRoundingsAlone) {
  encoder().device().memory().set_guarded(false);  // else a captured step holds all that it makes
  const DataSet data{words(1, 12), {}, {}};
  std::size_t peak = 0;
  const auto losses = [&](bool checkpoint, double nudge) {
    TrainOptions o = options(4);
    o.fit.report_every = 1;
    o.batches.batch_size = 12;
    o.checkpoint = checkpoint;
    models::Model learner = model("qwen3_next", DType::kF32, 4);
    learner.weights.norm = encoder().full(learner.weights.norm.shape(), DType::kF32, 1 + nudge);
    const TrainResult result = jobs::train(encoder(), learner, data, o);
    peak = result.fit.peak_bytes;
    std::vector<double> all;
    for (const auto& point : result.fit.reports) all.push_back(point.loss);
    return all;
  };
  const auto want = losses(false, 0);
  const std::size_t most = peak;
  const auto got = losses(true, 0);
  EXPECT_LT(peak, most);
  const auto beside = losses(false, 0x1p-22);  // what a rounding does to this training
  ASSERT_EQ(want.size(), 4U);
  double limit = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    limit = std::max(limit, 16 * std::max(std::abs(beside[i] - want[i]), want[i] * 0x1p-23));
    EXPECT_LE(std::abs(got[i] - want[i]), limit) << "step " << i + 1;
  }
  EXPECT_LT(want[3], 0.8 * want[0]);
}

TEST_P(Train, QuantizedWeightsLearnByTheirScales) {
  const models::Model quantized =
      models::quantize_model(encoder(), model("qwen3", DType::kF32), models::usual_format({4, 32}));
  const auto before = bits(quantized);
  TrainOptions o = options(2);
  jobs::train(encoder(), quantized, {words(1, 8), {}, {}}, o);
  const auto after = bits(quantized);
  const auto parameters = models::parameters(quantized);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_EQ(before[i] != after[i], is_float(parameters[i].tensor.dtype())) << parameters[i].name;
  }
}

// Products' weights are Muon's, of quantised ones nothing; all else is AdamW's.
TEST_P(Train, MuonIsForProducts) {
  for (const bool quantized : {false, true}) {
    models::Model learner = model("qwen3_next");
    if (quantized) {
      learner = models::quantize_model(encoder(), learner, models::usual_format({4, 32}));
    }
    TrainOptions o = options(2);
    o.fit.optimiser = jobs::make_optimiser("muon");
    o.fit.folder = folder_ / (quantized ? "quantised" : "plain");
    jobs::train(encoder(), learner, {words(1, 8), {}, {}}, o);
    const formats::SafetensorsFile state(o.fit.folder + "/state.safetensors");
    const auto is_muons = [&](const std::string& name) {
      EXPECT_NE(state.has("muon.v:" + name), state.has("adamw.m:" + name)) << name;
      return state.has("muon.v:" + name);
    };
    std::size_t matrices = 0;
    for (const models::Parameter& p : models::parameters(learner)) {
      if (!is_float(p.tensor.dtype())) continue;
      const bool is_product = p.name.find("_proj") != std::string::npos ||
                              p.name.find("gate.weight") != std::string::npos;
      EXPECT_EQ(is_muons(p.name), is_product && !quantized) << p.name;
      matrices += is_product ? 1 : 0;
    }
    EXPECT_GT(matrices, 10U);
  }
}

TEST_P(Train, RefusesWhatDoesNotFit) {
  const models::Model learner = model();
  const auto first = bits(learner);
  const TrainOptions o = options(2);
  const auto fails = [&](const std::string& says, const DataSet& data, const TrainOptions& how,
                         Errc code = Errc::kArgument) {
    expect_error(code, says, [&] { jobs::train(encoder(), learner, data, how); });
  };
  fails("there must be samples to train on, got none", {}, o);
  fails("at least batch_size = 4 samples, got 3", {words(1, 3), {}, {}}, o);
  DataSet foreign{words(1, 8), words(2, 4), {}};
  foreign.valid[3].tokens[1] = 20;
  fails("in the model's vocabulary of 20, got 20", foreign, o, Errc::kIo);
  foreign.train[7].tokens[0] = -1;
  fails("in the model's vocabulary of 20, got -1", foreign, o, Errc::kIo);
  TrainOptions bad = o;
  bad.validation_batches = -2;
  fails("validation_batches must be at least -1", {words(1, 8), {}, {}}, bad);
  bad = o;
  bad.fit.iterations = 0;
  fails("iterations must be at least 1", {words(1, 8), {}, {}}, bad);
  EXPECT_TRUE(bits(learner) == first);

  // Another run's state: by data, by model, by how it is computed.
  TrainOptions kept = o;
  kept.fit.folder = folder_ / "kept";
  kept.fit.resume = true;
  const DataSet data{words(1, 8), words(2, 4), {}};
  jobs::train(encoder(), model(), data, kept);
  const std::string other = "is the checkpoint of another run: ";
  fails(other + "training data must be ", {words(5, 8), data.valid, {}}, kept);
  fails(other + "validation data must be ", {data.train, words(5, 4), {}}, kept);
  bad = kept;
  bad.checkpoint = true;
  fails(other + "checkpoint must be off to resume it, got on", data, bad);
  bad = kept;
  bad.batches.seed = 3;
  fails(other + "training data must be ", data, bad);
  expect_error(Errc::kArgument, other + "model must be ",
               [&] { jobs::train(encoder(), model("qwen3", DType::kF32, 3), data, kept); });
  expect_error(Errc::kArgument, other + "weights must be ",
               [&] { jobs::train(encoder(), model("qwen3", DType::kF32, 2, 7), data, kept); });
  expect_error(Errc::kArgument, other + "dtype must be f32 to resume it, got bf16",
               [&] { jobs::train(encoder(), model("qwen3", DType::kBF16), data, kept); });
}

MT_ON_EVERY_BACKEND(Train);

}  // namespace
}  // namespace mlxtape::test
