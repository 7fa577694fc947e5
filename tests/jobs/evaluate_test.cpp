#include "mlxtape/jobs/evaluate.h"

#include <cmath>
#include <limits>

#include "mlxtape/models/quantize.h"
#include "models/small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using jobs::Batch;
using jobs::Estimate;
using jobs::Evaluation;
using jobs::Sample;

std::vector<Sample> some_samples(std::int64_t count, std::uint64_t seed) {
  Noise noise(seed);
  std::vector<Sample> samples;
  for (std::int64_t s = 0; s < count; ++s) {
    Sample sample;
    sample.tokens.resize(static_cast<std::size_t>(2 + noise.below(20)));
    for (std::int32_t& token : sample.tokens) token = static_cast<std::int32_t>(noise.below(80));
    sample.prompt = noise.below(static_cast<std::int64_t>(sample.tokens.size()));
    samples.push_back(std::move(sample));
  }
  return samples;
}

// The header's formulas in double.
Estimate mean_of(const std::vector<double>& x) {
  const auto n = static_cast<double>(x.size());
  double mean = 0, squares = 0;
  for (const double v : x) mean += v / n;
  for (const double v : x) squares += (v - mean) * (v - mean);
  return {mean, std::sqrt(squares / (n - 1)) / std::sqrt(n)};
}

struct Numbers {
  std::vector<double> loss, reference_loss, kl, agree;
  double largest = 1;  // logit
};

std::vector<double> log_softmax(const double* z, std::int64_t n) {
  double most = z[0], sum = 0;
  for (std::int64_t v = 0; v < n; ++v) most = std::max(most, z[v]);
  for (std::int64_t v = 0; v < n; ++v) sum += std::exp(z[v] - most);
  std::vector<double> y;
  for (std::int64_t v = 0; v < n; ++v) y.push_back(z[v] - most - std::log(sum));
  return y;
}

class Evaluate : public OnDevice {
 protected:
  std::vector<double> logits(const models::Model& model, const Batch& batch) {
    const Tensor ids = encoder().empty({batch.rows, batch.length}, DType::kI32);
    encoder().upload(batch.tokens.data(), ids.bytes(), ids);
    Tape tape(encoder());
    return download(models::logits(tape, model, models::hidden(tape, model, ids)));
  }

  Numbers direct(const models::Model& model, const models::Model& reference,
                 const std::vector<Batch>& batches) {
    Numbers all;
    const std::int64_t classes = model.config.plan.vocabulary;
    for (const Batch& batch : batches) {
      const std::vector<double> z = logits(model, batch), y = logits(reference, batch);
      for (const double v : z) all.largest = std::max(all.largest, std::abs(v));
      for (std::size_t r = 0; r < batch.targets.size(); ++r) {
        if (batch.targets[r] < 0) continue;
        const auto at = static_cast<std::int64_t>(r) * classes;
        const std::vector<double> q = log_softmax(z.data() + at, classes);
        const std::vector<double> p = log_softmax(y.data() + at, classes);
        const auto target = static_cast<std::size_t>(batch.targets[r]);
        all.loss.push_back(-q[target]);
        all.reference_loss.push_back(-p[target]);
        double kl = 0;
        for (std::size_t v = 0; v < q.size(); ++v) kl += std::exp(p[v]) * (p[v] - q[v]);
        all.kl.push_back(kl);
        all.agree.push_back(std::max_element(q.begin(), q.end()) - q.begin() ==
                                    std::max_element(p.begin(), p.end()) - p.begin()
                                ? 1
                                : 0);
      }
    }
    return all;
  }

  models::Model model_ = {}, quantized_ = {};
  void make(const std::string& type, int bits) {
    model_ = lively_model(encoder(), type);
    quantized_ = models::quantize_model(encoder(), model_, models::usual_format({bits, 32}));
  }
};

// From f32 numbers a target, each of which is off by roundings of numbers as large as the logits.
void expect_near(const char* what, Estimate got, Estimate want, double size) {
  const double bound = rounding_bound(DType::kF32, 80) * size;
  EXPECT_NEAR(got.value, want.value, bound) << what;
  EXPECT_NEAR(got.error, want.error, bound) << what;
  EXPECT_GT(want.error, 10 * bound) << what << ": a comparison that proves nothing";
}

TEST_P(Evaluate, IsWhatTheFormulasSay) {
  for (const std::string& type : {std::string("qwen3"), std::string("qwen3_next")}) {
    make(type, 2);
    const std::vector<Sample> samples = some_samples(13, 5);
    jobs::BatchOptions padded;
    padded.batch_size = 5;
    padded.learn_prompt = false;
    for (const auto& batches :
         {jobs::rows_of_length(samples, 9, 4), jobs::every_batch(samples, padded)}) {
      const Numbers want = direct(quantized_, model_, batches);
      for (const std::int64_t chunk : {0, 7, 17}) {
        SCOPED_TRACE(type + " " + std::to_string(chunk));
        jobs::EvaluateOptions options;
        options.chunk_rows = chunk;
        const Evaluation got = jobs::evaluate(encoder(), quantized_, &model_, batches, options);
        EXPECT_EQ(got.tokens, static_cast<std::int64_t>(want.loss.size()));
        const double size = want.largest + std::log(80.0);
        const auto perplexity = [](const std::vector<double>& loss) {
          const Estimate l = mean_of(loss);
          return Estimate{std::exp(l.value), std::exp(l.value) * l.error};
        };
        const double large = perplexity(want.loss).value * size;
        expect_near("loss", {got.loss, got.perplexity.error / got.perplexity.value},
                    mean_of(want.loss), size);
        expect_near("perplexity", got.perplexity, perplexity(want.loss), large);
        expect_near("the reference's", got.reference_perplexity, perplexity(want.reference_loss),
                    large);
        expect_near("kl", got.kl, mean_of(want.kl), size);
        EXPECT_DOUBLE_EQ(got.agreement.value, mean_of(want.agree).value);
        EXPECT_NEAR(got.agreement.error, mean_of(want.agree).error, 1e-12);
        EXPECT_LT(got.agreement.value, 1);
        EXPECT_GT(got.peak_bytes, 0U);

        const Evaluation alone = jobs::evaluate(encoder(), quantized_, nullptr, batches, options);
        EXPECT_EQ(alone.perplexity.value, got.perplexity.value);
        EXPECT_EQ(alone.perplexity.error, got.perplexity.error);
        EXPECT_EQ(alone.kl.value, 0);
      }
    }
  }
}

TEST_P(Evaluate, AModelIsItself) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const models::Model model = small_model(encoder(), "qwen3_5_moe", dtype);
    const Evaluation e =
        jobs::evaluate(encoder(), model, &model, jobs::rows_of_length(some_samples(10, 2), 16, 2));
    EXPECT_EQ(e.kl.value, 0);
    EXPECT_EQ(e.agreement.value, 1);
    EXPECT_EQ(e.reference_perplexity.value, e.perplexity.value);
  }
}

// How many rows run side by side changes roundings alone, and so do rows without a target among them.
TEST_P(Evaluate, RowsSideBySide) {
  make("qwen3_next", 4);
  const std::vector<Sample> samples = some_samples(12, 8);
  const Evaluation alone =
      jobs::evaluate(encoder(), quantized_, &model_, jobs::rows_of_length(samples, 8, 1));
  std::vector<Batch> batches = jobs::rows_of_length(samples, 8, 5);
  batches.back().rows += 1;
  batches.back().tokens.insert(batches.back().tokens.begin(), 7, 3);
  batches.back().targets.insert(batches.back().targets.begin(), 7, -1);
  const Evaluation together = jobs::evaluate(encoder(), quantized_, &model_, batches);
  EXPECT_EQ(together.tokens, alone.tokens);
  EXPECT_NEAR(together.loss, alone.loss, 1e-5);
  EXPECT_NEAR(together.kl.value, alone.kl.value, 1e-5);
  EXPECT_NEAR(together.reference_perplexity.value / alone.reference_perplexity.value, 1, 1e-5);
}

TEST_P(Evaluate, Stops) {
  make("qwen3", 4);
  const auto batches = jobs::rows_of_length(some_samples(30, 3), 8, 2);
  ASSERT_GT(batches.size(), 4U);
  jobs::EvaluateOptions options;
  std::vector<std::int64_t> heard;
  options.progress = [&](std::int64_t done, std::int64_t all) {
    heard.push_back(done);
    EXPECT_EQ(all, static_cast<std::int64_t>(batches.size()));
  };
  options.stop = [&] {
    return heard.size() == 2;
  };
  const Evaluation some = jobs::evaluate(encoder(), quantized_, &model_, batches, options);
  EXPECT_TRUE(some.stopped);
  EXPECT_EQ(some.tokens, 2 * 2 * 7);
  EXPECT_EQ(heard, (std::vector<std::int64_t>{1, 2}));
  const Evaluation two = jobs::evaluate(encoder(), quantized_, &model_, {batches[0], batches[1]});
  EXPECT_FALSE(two.stopped);
  EXPECT_EQ(two.kl.value, some.kl.value);
}

// Logits of all rows never exist: with a large vocabulary the peak is far below them.
TEST_P(Evaluate, HoldsFewLogits) {
  formats::Json json = small_config("qwen3");
  json.set("vocab_size", 20000);
  const models::Model model =
      models::random_model(models::Config::parse(json, "large"), encoder(), DType::kF32, 1);
  std::vector<Sample> samples(1);
  samples[0].tokens.assign(1025, 7);
  jobs::EvaluateOptions options;
  options.chunk_rows = 64;
  const auto before = encoder().device().memory().stats().current;
  const Evaluation e =
      jobs::evaluate(encoder(), model, &model, jobs::rows_of_length(samples, 1025, 1), options);
  EXPECT_LT(e.peak_bytes - before, std::size_t{1024} * 20000 * 4 / 2 + product_room());
}

TEST_P(Evaluate, SaysWhatIsWrong) {
  make("qwen3", 4);
  const auto refused = [&](const std::string& says, const std::vector<Batch>& batches,
                           const models::Model* reference = nullptr, std::int64_t chunk = 0,
                           Errc code = Errc::kArgument) {
    jobs::EvaluateOptions options;
    options.chunk_rows = chunk;
    expect_error(code, says,
                 [&] { jobs::evaluate(encoder(), model_, reference, batches, options); });
  };
  const Batch good{1, 2, {1, 2}, {2, 3}, 2};
  refused("there must be at least one batch", {});
  refused("chunk_rows must be at least 0, got -1", {good}, nullptr, -1);
  const auto foreign = [&](const std::string& says, const std::vector<Batch>& batches) {
    refused(says, batches, nullptr, 0, Errc::kIo);
  };
  foreign("a token must be in the vocabulary of 80, got 80", {good, {1, 2, {1, 80}, {2, 3}, 2}});
  foreign("a token must be in the vocabulary of 80, got -1", {{1, 2, {1, -1}, {2, 3}, 2}});
  foreign("a target must be in the vocabulary of 80, got 90", {{1, 2, {1, 2}, {90, 3}, 2}});
  refused("got 2 and 1 in [1, 2]", {{1, 2, {1, 2}, {3}, 2}});
  refused("got 0 and 0 in [0, 2]", {{0, 2, {}, {}, 0}});
  refused("a token to score", {{1, 2, {1, 2}, {-1, -1}, 0}});
  formats::Json json = small_config("qwen3");
  json.set("vocab_size", 81);
  const models::Model other =
      models::random_model(models::Config::parse(json, "other"), encoder(), DType::kF32, 1);
  refused("the model's vocabulary of 80, got 81", {good}, &other);
  const float broken = std::numeric_limits<float>::quiet_NaN();
  model_.weights.norm = encoder().full({64}, DType::kF32, static_cast<double>(broken));
  refused("the loss must be finite, got nan in batch 1, row 1, token 0",
          {{1, 2, {1, 2}, {-1, -1}, 0}, {2, 2, {1, 2, 3, 4}, {-1, -1, 3, 4}, 2}});
}

MT_ON_EVERY_BACKEND(Evaluate);

TEST(EvaluateRows, OfLength) {
  const std::vector<Sample> samples = {
      {{1, 2, 3}, 1}, {{4}, 0}, {{5, 6, 7, 8, 9}, 3}, {{10, 11}, 1}};
  const auto rows = jobs::rows_of_length(samples, 3, 2);
  ASSERT_EQ(rows.size(), 2U);  // 11 tokens: three rows, two left over
  EXPECT_EQ(rows[0].tokens, (std::vector<std::int32_t>{1, 2, 4, 5}));
  EXPECT_EQ(rows[0].targets, (std::vector<std::int32_t>{2, 3, 5, 6}));
  EXPECT_EQ(rows[1].tokens, (std::vector<std::int32_t>{7, 8}));
  EXPECT_EQ(rows[1].rows, 1);
  EXPECT_EQ(rows[0].counted, 4);
  EXPECT_EQ(jobs::rows_of_length(samples, 3, 2, 2).size(), 1U);

  const auto refused = [](const std::string& says, const std::function<void()>& call) {
    expect_error(Errc::kArgument, says, call);
  };
  refused("at least 2 tokens, got 1", [&] { jobs::rows_of_length(samples, 1); });
  refused("batch_size must be at least 1, got 0", [&] { jobs::rows_of_length(samples, 3, 0); });
  refused("the 12 tokens of one row, got 11", [&] { jobs::rows_of_length(samples, 12); });
}

}  // namespace
}  // namespace mlxtape::test
