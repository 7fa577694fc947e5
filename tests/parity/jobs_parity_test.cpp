// Perplexity, dwq and dynamic_quant against what mlx-lm's own gave with the same model, data, order and seed. The
// directories: MLXTAPE_PARITY_JOBS, or the ones kept in the tree (README.md).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "mlxtape/base/files.h"
#include "mlxtape/jobs/dwq.h"
#include "mlxtape/jobs/dynamic_quant.h"
#include "mlxtape/jobs/evaluate.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/quantize.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

namespace fs = std::filesystem;
using formats::Json;
using jobs::Sample;

std::vector<std::string> directories() {
  const char* given = std::getenv("MLXTAPE_PARITY_JOBS");
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(given != nullptr ? given : MLXTAPE_GOLDEN_JOBS)) {
    if (fs::exists(entry.path() / "jobs.json")) paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Cut as read_samples cuts them: batches are of samples of like lengths, and of those after that.
std::vector<Sample> samples_of(const Json& json, int longest = 1000) {
  std::vector<Sample> samples;
  for (const Json& tokens : json.array()) {
    samples.emplace_back();
    for (const Json& token : tokens.array()) {
      samples.back().tokens.push_back(static_cast<std::int32_t>(token.integer()));
    }
    samples.back().tokens.resize(
        std::min(samples.back().tokens.size(), static_cast<std::size_t>(longest)));
  }
  return samples;
}

const Json& at(const Json& json, const char* key) {
  const Json* found = json.find(key);
  if (found == nullptr) throw std::logic_error(std::string("jobs.json has no ") + key);
  return *found;
}
int small(const Json& json, const char* key) { return static_cast<int>(at(json, key).integer()); }

struct JobsParityCase {
  std::string path;
  Json found;
  models::Model model;
};

class JobsParity : public OnDevice {
 protected:
  using Case = JobsParityCase;
  Case load(const std::string& path) {
    const std::string file = path + "/jobs.json";
    return {path, Json::parse(read_whole(file, "parity"), file),
            models::load_model(path, encoder())};
  }
};

// The same weights get more bits. mlx-lm searches to a thousandth of the range, and may end above the target: then it has
// one or more of the next sensitive ones too.
void expect_same_choice(const JobsParityCase& c, const Json& want, const jobs::Sensitivities& got,
                        const jobs::DynamicQuantOptions& options) {
  int same = 0;
  for (const Json& choice : at(want, "choices").array()) {
    const double target = at(choice, "target").number();
    jobs::DynamicFormats p = jobs::choose_formats(c.model, got, target, options);
    std::sort(p.high.begin(), p.high.end());
    std::vector<std::string> high;
    for (const Json& name : at(choice, "high").array()) high.push_back(name.string());
    EXPECT_LE(p.bits_per_weight, target);
    if (at(choice, "bits").number() <= target) {
      EXPECT_EQ(p.high, high) << target;
      // mlx-lm leaves A_log and dt_bias out when it counts parameters.
      EXPECT_NEAR(p.bits_per_weight, at(choice, "bits").number(), 1e-4 * p.bits_per_weight);
      ++same;
    } else {
      EXPECT_TRUE(std::includes(high.begin(), high.end(), p.high.begin(), p.high.end())) << target;
    }
  }
  EXPECT_GT(same, 1);
}

TEST_P(JobsParity, Perplexity) {
  ASSERT_FALSE(directories().empty());
  for (const std::string& path : directories()) {
    SCOPED_TRACE(path);
    const Case c = load(path);
    const Json& want = at(c.found, "perplexity");
    const auto rows = jobs::rows_of_length(samples_of(at(c.found, "valid")), small(want, "length"),
                                           small(want, "batch_size"));
    const jobs::Estimate got = jobs::evaluate(encoder(), c.model, nullptr, rows).perplexity;
    // Both add up in f32 losses that rounding moves by some 1e-6 each.
    EXPECT_NEAR(got.value, at(want, "value").number(), 1e-5 * got.value);
    EXPECT_NEAR(got.error, at(want, "error").number(), 1e-5 * got.value);
  }
}

TEST_P(JobsParity, Sensitivities) {
  for (const std::string& path : directories()) {
    SCOPED_TRACE(path);
    const Case c = load(path);
    const Json& want = at(c.found, "dynamic");
    jobs::SensitivityOptions options;
    const int group = small(want, "group_size");
    options.formats = {{small(want, "low_bits"), group},
                       {small(want, "high_bits"), group},
                       false,
                       ops::QuantizeRule::kCpu};
    const auto rows = jobs::calibration_rows(samples_of(at(c.found, "valid")),
                                             small(want, "length"), small(want, "batch_size"));
    const jobs::Sensitivities got = jobs::sensitivities(encoder(), c.model, rows, options);
    std::map<std::string, double> theirs;
    double most = 0, farthest = 0;
    for (const Json& row : at(want, "values").array()) {
      theirs[row.array()[0].string()] = row.array()[1].number();
      most = std::max(most, std::abs(row.array()[1].number()));
    }
    ASSERT_EQ(got.size(), theirs.size());
    for (const auto& [name, value] : got) {
      ASSERT_EQ(theirs.count(name), 1U) << name;
      farthest = std::max(farthest, std::abs(value - theirs[name]) / most);
      EXPECT_NEAR(value, theirs[name], 0.01 * std::abs(theirs[name]) + 1e-4 * most) << name;
    }
    expect_same_choice(c, want, got, options.formats);
    if (std::getenv("MLXTAPE_PARITY_JOBS") != nullptr) {
      std::printf("%s: sensitivities within %.2e of the largest\n", path.c_str(), farthest);
    }
  }
}

// Each loss within 1 % of mlx-lm's, the end no worse.
TEST_P(JobsParity, Dwq) {
  for (const std::string& path : directories()) {
    const Case c = load(path);
    for (const bool others : {false, true}) {
      SCOPED_TRACE(path + (others ? " with norms" : ""));
      const Json& want = at(c.found, others ? "dwq_others" : "dwq");
      const models::WeightFormat format{small(want, "bits"), small(want, "group_size")};
      models::Model student = models::quantize_model(
          encoder(), c.model, models::usual_format(format), ops::QuantizeRule::kCpu);
      jobs::BatchOptions sizes;
      sizes.batch_size = small(want, "batch_size");
      sizes.max_tokens = small(want, "max_tokens");
      sizes.seed = static_cast<std::uint32_t>(small(want, "seed"));
      const jobs::Batches train(samples_of(at(c.found, "train"), small(want, "max_tokens")), sizes);
      const auto valid =
          jobs::every_batch(samples_of(at(c.found, "valid"), small(want, "max_tokens")), sizes);
      const auto losses = at(want, "losses").array(), tokens = at(want, "tokens").array();
      jobs::DwqOptions options;
      options.fit.learning_rate = at(want, "learning_rate").number();
      options.fit.report_every = 1;
      options.others = others;
      const jobs::DwqResult r =
          jobs::dwq(encoder(), student, {&c.model, nullptr}, train, valid, options);
      ASSERT_EQ(r.fit.reports.size(), losses.size());
      double farthest = 0;
      for (std::size_t i = 0; i < losses.size(); ++i) {
        const double theirs = losses[i].number();
        EXPECT_EQ(train.at(static_cast<std::int64_t>(i)).counted, tokens[i].integer());
        farthest = std::max(farthest, std::abs(r.fit.reports[i].loss - theirs) / theirs);
        EXPECT_NEAR(r.fit.reports[i].loss, theirs, 0.01 * theirs) << i;
      }
      EXPECT_NEAR(r.initial, at(want, "initial").number(), 1e-4 * r.initial);
      EXPECT_NEAR(r.final, at(want, "final").number(), 0.01 * r.final);
      if (std::getenv("MLXTAPE_PARITY_JOBS") != nullptr) {
        std::printf(
            "%s: dwq%s within %.1e of mlx-lm's loss in %zu steps, %.6f to %.6f (mlx-lm %.6f), %.2f "
            "s\n",
            path.c_str(), others ? " with norms" : "", farthest, losses.size(), r.initial, r.final,
            at(want, "final").number(), r.fit.seconds);
      }
    }
  }
}

MT_ON_EVERY_BACKEND(JobsParity);

}  // namespace
}  // namespace mlxtape::test
