#include "mlxtape/jobs/dwq.h"

#include <cmath>
#include <filesystem>

#include <unistd.h>

#include "jobs/head_kl.h"
#include "mlxtape/jobs/evaluate.h"
#include "mlxtape/jobs/train.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/kl_divergence.h"
#include "mlxtape/ops/sort.h"
#include "mlxtape/ops/take_along_axis.h"
#include "models/small_models.h"
#include "support/arrays.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

namespace fs = std::filesystem;
using jobs::Batch;
using jobs::Batches;
using jobs::BatchOptions;
using jobs::DwqOptions;
using jobs::DwqResult;
using jobs::Sample;

// Walks over the vocabulary, so that there is something to be known.
std::vector<Sample> walks(std::int64_t count, std::uint64_t seed, std::int64_t longest = 24) {
  Noise noise(seed);
  std::vector<Sample> samples(static_cast<std::size_t>(count));
  for (Sample& sample : samples) {
    std::int64_t at = noise.below(80);
    const std::int64_t length = 4 + noise.below(longest - 3);
    for (std::int64_t t = 0; t < length; ++t) {
      sample.tokens.push_back(static_cast<std::int32_t>(at));
      at = (at + 77 + noise.below(7)) % 80;
    }
  }
  return samples;
}

constexpr BatchOptions kSizes{4, 8, 24, 5, true};

class Dwq : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    folder_ = fs::temp_directory_path() / ("mlxtape_dwq_test_" + std::to_string(::getpid()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override {
    fs::remove_all(folder_);
    OnDevice::TearDown();
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  models::Model quantized(const models::Model& model, int bits = 2) {
    return models::quantize_model(encoder(), model, models::usual_format({bits, 32}));
  }
  // Everything that a file would hold.
  std::vector<std::vector<unsigned char>> bits(const models::Model& model) {
    std::vector<std::vector<unsigned char>> all;
    for (const auto& p : models::parameters(model)) all.push_back(bits_of(encoder(), p.tensor));
    return all;
  }

  // One that has learned how the walks go.
  models::Model trained(const std::string& type) {
    models::Model model = small_model(encoder(), type);
    jobs::TrainOptions options;
    options.fit.iterations = 150;
    options.fit.learning_rate = 3e-3;
    options.fit.clip = 0;
    options.batches = kSizes;
    jobs::train(encoder(), model, {walks(200, 5), {}, {}}, options);
    return model;
  }

  Batches train_ = Batches(walks(40, 1), kSizes);
  std::vector<Batch> valid_ = jobs::every_batch(walks(10, 2), kSizes);

 private:
  fs::path folder_;
};

TEST_P(Dwq, BringsTheStudentNearer) {
  // Texts enough that none is seen twice: then 0.42 to 0.71 of the divergence are left, for eight teachers.
  const Batches batches(walks(1200, 1), kSizes);
  const std::vector<Batch> valid = jobs::every_batch(walks(40, 2), kSizes);
  const models::Model teacher = trained("qwen3_next");
  models::Model student = quantized(teacher);
  const models::Model before = student;
  const auto teacher_bits = bits(teacher), before_bits = bits(before);
  const auto kl_before = jobs::evaluate(encoder(), student, &teacher, valid).kl;
  DwqOptions options;
  options.fit.learning_rate = 1e-4;
  options.fit.iterations = 300;
  options.fit.validate_every = 150;
  const DwqResult r = jobs::dwq(encoder(), student, {&teacher, nullptr}, batches, valid, options);
  EXPECT_EQ(r.fit.steps, 300);
  EXPECT_EQ(r.fit.validations.size(), 3U);
  EXPECT_LT(r.final, 0.75 * r.initial) << r.initial;
  EXPECT_FALSE(r.worse);
  EXPECT_EQ(r.warning, "");
  EXPECT_EQ(r.fit.held_step, 300);
  const auto kl_after = jobs::evaluate(encoder(), student, &teacher, valid).kl;
  EXPECT_LT(kl_after.value, 0.75 * kl_before.value) << kl_before.value;

  // Scales and biases of less than 8 bits changed, all of them, and nothing else, nor any other copy.
  EXPECT_EQ(bits(teacher), teacher_bits);
  EXPECT_EQ(bits(before), before_bits);
  std::int64_t trained = 0;
  const auto now = models::parameters(student);
  for (std::size_t i = 0; i < now.size(); ++i) {
    const bool router = now[i].name.find("mlp.gate.") != std::string::npos ||
                        now[i].name.find("shared_expert_gate.") != std::string::npos;
    const bool learns =
        !router && (now[i].name.ends_with(".scales") || now[i].name.ends_with(".biases"));
    EXPECT_EQ(bits_of(encoder(), now[i].tensor) != before_bits[i], learns) << now[i].name;
    if (learns) trained += now[i].tensor.size();
  }
  EXPECT_EQ(r.trained, trained);
}

// The loss of the header, from all logits at once and on the tape's own ops.
TEST_P(Dwq, HeadKlIsTheFormula) {
  Noise noise(4);
  const std::int64_t rows = 37, width = 64, classes = 80;
  const Tensor x =
      upload(random_values(noise, rows * width, DType::kF32), {rows, width}, DType::kF32);
  const Tensor w =
      upload(random_values(noise, classes * width, DType::kF32), {classes, width}, DType::kF32);
  const Tensor theirs =
      upload(random_values(noise, rows * classes, DType::kF32, 4), {rows, classes}, DType::kF32);
  std::vector<double> counts;
  for (std::int64_t r = 0; r < rows; ++r) counts.push_back(r % 5 == 3 ? 0 : 1);
  const Tensor weights = upload(counts, {rows}, DType::kF32);
  for (const bool is_quantized : {true, false}) {
    for (const std::int64_t k : {std::int64_t{0}, std::int64_t{9}, classes}) {
      for (const std::int64_t chunk : {33, 64}) {
        SCOPED_TRACE((is_quantized ? "quantised " : "plain ") + std::to_string(k) + " " +
                     std::to_string(chunk));
        jobs::HeadTeacher teacher;
        if (k == 0) {
          teacher.logits = [&](std::int64_t a, std::int64_t b) {
            return theirs.slice(0, a, b);
          };
        } else {
          const ops::TopK top = ops::topk(encoder(), theirs, k);
          teacher.values = top.values;
          teacher.indices = top.indices;
        }
        const auto run = [&](bool ours) {
          Tape tape(encoder());
          const Tensor h = tape.watch(x);
          nn::Weight head = w;
          if (is_quantized) {
            head = ops::quantize(encoder(), w, {4, 32});
            head.quantized.scales = tape.watch(head.quantized.scales);
            head.quantized.biases = tape.watch(head.quantized.biases);
          }
          Tensor loss;
          if (ours) {
            loss = jobs::head_kl(tape, h, head, teacher, weights, {2, chunk});
          } else {
            ops::KlDivergenceOptions kl;
            kl.temperature = 2;
            kl.mask = weights;
            kl.reduction = ops::Reduction::kMean;
            Tensor z = nn::linear(tape, h, head);
            if (k > 0) z = ops::take_along_axis(tape, z, teacher.indices, -1);
            loss = ops::kl_divergence(tape, z, k > 0 ? teacher.values : theirs, kl);
          }
          tape.backward(ops::multiply(tape, loss, 3.0));
          std::vector<std::vector<double>> all = {download(loss), download(tape.grad(h))};
          if (is_quantized) {
            all.push_back(download(tape.grad(head.quantized.scales)));
            all.push_back(download(tape.grad(head.quantized.biases)));
          }
          return all;
        };
        expect_same_arrays(run(true), run(false), DType::kF32, classes + rows);
      }
    }
  }
}

// A student that comes from another folder, or not at all, ends with the same bits.
TEST_P(Dwq, GoesOnWithTheSameBits) {
  const models::Model teacher = lively_model(encoder(), "qwen3_next", DType::kBF16);
  DwqOptions options;
  options.fit.learning_rate = 1e-3;
  options.fit.validate_every = 4;
  options.fit.folder = path("whole");
  models::Model whole = quantized(teacher);
  const DwqResult one = jobs::dwq(encoder(), whole, {&teacher, nullptr}, train_, valid_, options);
  EXPECT_EQ(one.fit.steps, 10);  // one pass

  options.fit.folder = path("parts");
  std::int64_t until = 0;
  jobs::FitHooks hooks;
  hooks.on_step = [&](std::int64_t step) {
    until = step;
  };
  hooks.stop = [&] {
    return until == 3 || until == 8;
  };
  DwqResult last;
  models::Model parts;
  for (int part = 0; part < 3; ++part) {
    parts = quantized(teacher);
    options.fit.resume = part > 0;
    last = jobs::dwq(encoder(), parts, {&teacher, nullptr}, train_, valid_, options, hooks);
    EXPECT_EQ(last.fit.stopped, part < 2);
  }
  EXPECT_EQ(bits(parts), bits(whole));
  EXPECT_EQ(last.initial, one.initial);
  EXPECT_EQ(last.final, one.final);

  options.temperature = 1;
  parts = quantized(teacher);
  expect_error(Errc::kArgument, "dwq temperature",
               [&] { jobs::dwq(encoder(), parts, {&teacher, nullptr}, train_, valid_, options); });
}

TEST_P(Dwq, ACapturedRunHasTheSameBits) {
  encoder().device().memory().set_guarded(false);  // else nothing is planned
  const models::Model teacher = lively_model(encoder(), "qwen3_next", DType::kBF16);
  std::vector<std::vector<unsigned char>> ends[2];
  for (const bool capture : {false, true}) {
    DwqOptions options;
    options.fit.learning_rate = 1e-3;
    options.fit.validate_every = 0;
    options.fit.capture = capture;
    models::Model student = quantized(teacher);
    const DwqResult r = jobs::dwq(encoder(), student, {&teacher, nullptr}, train_, valid_, options);
    EXPECT_EQ(r.fit.replays > 0, capture);
    ends[capture ? 1 : 0] = bits(student);
  }
  EXPECT_TRUE(ends[0] == ends[1]);
}

TEST_P(Dwq, KeepsTheBestWhereItEndsWorse) {
  const models::Model teacher = lively_model(encoder(), "qwen3");
  for (const bool with_folder : {false, true}) {
    models::Model student = quantized(teacher, 4);
    const auto before = bits(student);
    DwqOptions options;
    options.fit.learning_rate = 1;
    options.fit.iterations = 4;
    options.fit.validate_every = 2;
    if (with_folder) options.fit.folder = path("worse");
    const DwqResult r = jobs::dwq(encoder(), student, {&teacher, nullptr}, train_, valid_, options);
    EXPECT_TRUE(r.worse);
    EXPECT_GT(r.final, r.initial);
    EXPECT_EQ(r.kept, r.initial);
    EXPECT_EQ(r.fit.held_step, 0);
    EXPECT_NE(r.warning.find("has the weights of step 0"), std::string::npos) << r.warning;
    EXPECT_EQ(bits(student), before);
  }
}

TEST_P(Dwq, LayersComputedAgainAreTheSame) {
  const models::Model teacher = lively_model(encoder(), "qwen3_5_moe");
  std::vector<std::vector<std::vector<unsigned char>>> ends;
  for (const bool checkpoint : {false, true}) {
    models::Model student = quantized(teacher);
    DwqOptions options;
    options.fit.learning_rate = 1e-3;
    options.fit.iterations = 3;
    options.checkpoint = checkpoint;
    jobs::dwq(encoder(), student, {&teacher, nullptr}, train_, valid_, options);
    ends.push_back(bits(student));
  }
  EXPECT_EQ(ends[0], ends[1]);
}

// Logits of all tokens never exist, neither the teacher's nor the student's.
TEST_P(Dwq, HoldsFewLogits) {
  formats::Json json = small_config("qwen3");
  json.set("vocab_size", 20000);
  json.set("num_hidden_layers", 1);
  const models::Model teacher =
      models::random_model(models::Config::parse(json, "wide"), encoder(), DType::kF32, 1);
  models::Model student = quantized(teacher, 4);
  const BatchOptions sizes{2, 8, 257, 0, true};
  const Batches train(walks(2, 1, 300), sizes);
  DwqOptions options;
  options.chunk_rows = 64;
  const std::size_t before = encoder().device().memory().stats().current;
  const DwqResult r =
      jobs::dwq(encoder(), student, {&teacher, nullptr}, train, {train.at(0)}, options);
  const Batch batch = train.at(0);
  const auto logits = static_cast<std::size_t>(batch.rows * batch.length) * 20000 * 4;
  EXPECT_LT(r.fit.peak_bytes - before, logits + product_room());
}

TEST_P(Dwq, SaysWhatIsWrong) {
  const models::Model teacher = small_model(encoder(), "qwen3");
  models::Model student = quantized(teacher);
  const auto refused = [&](const std::string& says, const jobs::DwqTeacher& from,
                           const DwqOptions& options = {}) {
    expect_error(Errc::kArgument, says,
                 [&] { jobs::dwq(encoder(), student, from, train_, valid_, options); });
  };
  refused("either a model or stored targets", {});
  DwqOptions options;
  options.temperature = 0;
  refused("temperature must be above 0, got 0", {&teacher, nullptr}, options);
  options = {};
  options.fit.iterations = -1;
  refused("at least 0, got -1 and 0", {&teacher, nullptr}, options);
  formats::Json json = small_config("qwen3");
  json.set("vocab_size", 96);
  const models::Model other =
      models::random_model(models::Config::parse(json, "other"), encoder(), DType::kF32, 1);
  refused("the student's vocabulary of 80, got 96", {&other, nullptr});
  models::Model eight = quantized(teacher, 8);
  expect_error(Errc::kArgument, "quantised to fewer than 8 bits, got none",
               [&] { jobs::dwq(encoder(), eight, {&teacher, nullptr}, train_, valid_); });
  expect_error(Errc::kArgument, "the validation set must have a token to score", [&] {
    jobs::dwq(encoder(), student, {&teacher, nullptr}, train_, {{1, 1, {1}, {-1}, 0}});
  });
  expect_error(Errc::kIo, "a token must be in the vocabulary of 80, got 81", [&] {
    jobs::dwq(encoder(), student, {&teacher, nullptr}, train_, {{1, 1, {81}, {1}, 1}});
  });
}

MT_ON_EVERY_BACKEND(Dwq);

}  // namespace
}  // namespace mlxtape::test
