#include "mlxtape/jobs/dwq_targets.h"

#include <cmath>
#include <cstring>
#include <filesystem>

#include <unistd.h>

#include "mlxtape/base/files.h"
#include "mlxtape/formats/safetensors.h"
#include "mlxtape/jobs/dwq.h"
#include "mlxtape/models/load.h"
#include "mlxtape/models/quantize.h"
#include "models/small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

namespace fs = std::filesystem;
using jobs::Batch;
using jobs::Batches;
using jobs::BatchOptions;
using jobs::Sample;
using jobs::TargetsPlan;

std::vector<Sample> samples(std::int64_t count, std::uint64_t seed) {
  Noise noise(seed);
  std::vector<Sample> all(static_cast<std::size_t>(count));
  for (Sample& sample : all) {
    sample.tokens.resize(static_cast<std::size_t>(3 + noise.below(15)));
    for (std::int32_t& token : sample.tokens) token = static_cast<std::int32_t>(noise.below(80));
  }
  return all;
}

class DwqTargets : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped()) return;
    folder_ = fs::temp_directory_path() / ("mlxtape_targets_test_" + std::to_string(::getpid()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    teacher_ = lively_model(encoder(), "qwen3");
    plan_.train = &train_;
    plan_.valid = &valid_;
    plan_.options = sizes_;
    plan_.tokenizer = "words";
    plan_.teacher = "teacher";
    plan_.k = 16;
  }
  void TearDown() override {
    fs::remove_all(folder_);
    OnDevice::TearDown();
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  BatchOptions sizes_{4, 8, 16, 5, true};
  Batches train_ = Batches(samples(24, 1), sizes_);
  std::vector<Batch> valid_ = jobs::every_batch(samples(6, 2), sizes_);
  models::Model teacher_;
  TargetsPlan plan_;

 private:
  fs::path folder_;
};

TEST_P(DwqTargets, AreTheLargestLogits) {
  const auto wrote = jobs::write_targets(encoder(), teacher_, plan_, path("t"));
  EXPECT_EQ(wrote.written, 6 + 2);
  const formats::SafetensorsFile file(path("t/train/0000000003.safetensors"));
  const Batch batch = train_.at(3);
  const Tensor values = file.tensor("logits"), indices = file.tensor("indices");
  ASSERT_EQ(values.shape(), (Shape{batch.rows, batch.length, 16}));
  ASSERT_EQ(indices.dtype(), DType::kU32);
  const Tensor ids = encoder().empty({batch.rows, batch.length}, DType::kI32);
  encoder().upload(batch.tokens.data(), ids.bytes(), ids);
  Tape tape(encoder());
  const auto all = download(models::logits(tape, teacher_, models::hidden(tape, teacher_, ids)));
  const auto z = values.host<float>();
  const auto at = indices.host<std::uint32_t>();
  for (std::size_t r = 0; r < batch.tokens.size(); ++r) {
    std::vector<double> row(all.begin() + static_cast<std::ptrdiff_t>(r * 80),
                            all.begin() + static_cast<std::ptrdiff_t>(r * 80 + 80));
    for (std::size_t j = 0; j < 16; ++j) {
      EXPECT_NEAR(z[r * 16 + j], row[at[r * 16 + j]], 1e-5 * std::abs(row[at[r * 16 + j]]));
    }
    std::sort(row.rbegin(), row.rend());
    EXPECT_NEAR(z[r * 16 + 15], row[15], 1e-5 * std::abs(row[15]));
  }
  const jobs::Targets targets(path("t"), plan_, 80);
  EXPECT_EQ(targets.train_batches(), 6);
  const auto loaded = targets.load(encoder(), true, 3, batch);
  EXPECT_EQ(loaded.values.shape(), (Shape{batch.rows * batch.length, 16}));
  EXPECT_EQ(bits_of(encoder(), loaded.values).size(), values.bytes());
}

// Stored with k = V they are the teacher itself.
TEST_P(DwqTargets, OfAllLogitsAreTheTeacher) {
  plan_.k = 1024;
  jobs::write_targets(encoder(), teacher_, plan_, path("t"));
  const jobs::Targets targets(path("t"), plan_, 80);
  jobs::DwqOptions options;
  options.fit.learning_rate = 1e-3;
  options.fit.report_every = 1;
  options.fit.validate_every = 3;
  std::vector<jobs::DwqResult> results;
  for (const bool stored : {false, true}) {
    models::Model student =
        models::quantize_model(encoder(), teacher_, models::usual_format({2, 32}));
    const jobs::DwqTeacher teacher =
        stored ? jobs::DwqTeacher{nullptr, &targets} : jobs::DwqTeacher{&teacher_, nullptr};
    results.push_back(jobs::dwq(encoder(), student, teacher, train_, valid_, options));
  }
  EXPECT_LT(results[0].final, 0.95 * results[0].initial);
  // Another order of the sum over V, a step's share of which Adam brings to the next.
  const auto near = [](double a, double b, std::int64_t steps) {
    EXPECT_NEAR(a, b, rounding_bound(DType::kF32, 80) * 10 * static_cast<double>(1 + steps) * b);
  };
  for (std::size_t i = 0; i < 3; ++i) {
    near(results[1].fit.validations[i].loss, results[0].fit.validations[i].loss,
         results[0].fit.validations[i].step);
  }
  for (std::size_t i = 0; i < 6; ++i) {
    near(results[1].fit.reports[i].loss, results[0].fit.reports[i].loss,
         static_cast<std::int64_t>(i));
  }
}

// Batches' targets come to the device one after the other, where a captured step finds them.
TEST_P(DwqTargets, ACapturedRunHasTheSameBits) {
  encoder().device().memory().set_guarded(false);  // else nothing is planned
  jobs::write_targets(encoder(), teacher_, plan_, path("t"));
  const jobs::Targets targets(path("t"), plan_, 80);
  std::vector<std::vector<unsigned char>> ends[2];
  for (const bool capture : {false, true}) {
    models::Model student =
        models::quantize_model(encoder(), teacher_, models::usual_format({2, 32}));
    jobs::DwqOptions options;
    options.fit.learning_rate = 1e-3;
    options.fit.validate_every = 0;
    options.fit.capture = capture;
    const auto r = jobs::dwq(encoder(), student, {nullptr, &targets}, train_, valid_, options);
    EXPECT_EQ(r.fit.replays > 0, capture);
    for (const auto& p : models::parameters(student)) {
      ends[capture ? 1 : 0].push_back(bits_of(encoder(), p.tensor));
    }
  }
  EXPECT_TRUE(ends[0] == ends[1]);
}

TEST_P(DwqTargets, FewLogitsStillTeach) {
  jobs::write_targets(encoder(), teacher_, plan_, path("t"));
  const jobs::Targets targets(path("t"), plan_, 80);
  models::Model student =
      models::quantize_model(encoder(), teacher_, models::usual_format({2, 32}));
  jobs::DwqOptions options;
  options.fit.learning_rate = 5e-4;
  const auto r = jobs::dwq(encoder(), student, {nullptr, &targets}, train_, valid_, options);
  EXPECT_LT(r.final, 0.97 * r.initial) << r.initial;
  options.fit.iterations = 7;
  expect_error(Errc::kArgument, "targets for all 7 batches, got 6", [&] {
    jobs::dwq(encoder(), student, {nullptr, &targets}, train_, valid_, options);
  });
}

TEST_P(DwqTargets, GoOnWhereTheyStopped) {
  std::int64_t heard = 0;
  jobs::WriteTargetsHooks hooks;
  hooks.progress = [&](std::int64_t done, std::int64_t all) {
    heard = done;
    EXPECT_EQ(all, 8);
  };
  hooks.stop = [&] {
    return heard == 3;
  };
  auto wrote = jobs::write_targets(encoder(), teacher_, plan_, path("t"), hooks);
  EXPECT_TRUE(wrote.stopped);
  EXPECT_EQ(wrote.written, 3);
  expect_error(Errc::kIo, "train/0000000001.safetensors: missing, so the targets are incomplete",
               [&] { jobs::Targets(path("t"), plan_, 80); });
  hooks.stop = {};
  wrote = jobs::write_targets(encoder(), teacher_, plan_, path("t"), hooks);
  EXPECT_EQ(wrote.found, 3);
  EXPECT_EQ(wrote.written, 5);
  jobs::write_targets(encoder(), teacher_, plan_, path("whole"));
  for (const auto& file : fs::recursive_directory_iterator(path("whole"))) {
    if (file.is_directory()) continue;
    const std::string name = fs::relative(file.path(), path("whole")).string();
    EXPECT_EQ(read_whole(path("t/" + name), "test"), read_whole(file.path().string(), "test"));
  }
}

TEST_P(DwqTargets, RefuseEveryDifference) {
  jobs::write_targets(encoder(), teacher_, plan_, path("t"));
  const auto refused = [&](const std::string& says, const std::function<void(TargetsPlan&)>& change,
                           std::int64_t vocabulary = 80) {
    TargetsPlan other = plan_;
    change(other);
    expect_error(Errc::kArgument, says, [&] { jobs::Targets(path("t"), other, vocabulary); });
    if (vocabulary != 80) return;
    expect_error(Errc::kArgument, says,
                 [&] { jobs::write_targets(encoder(), teacher_, other, path("t")); });
  };
  const jobs::Targets good(path("t"), plan_, 80);
  EXPECT_EQ(good.train_batches(), 6);
  refused("batch_size must be 5, got 4", [](TargetsPlan& p) { p.options.batch_size = 5; });
  refused("seed must be 6, got 5", [](TargetsPlan& p) { p.options.seed = 6; });
  refused("max_tokens must be 17, got 16", [](TargetsPlan& p) { p.options.max_tokens = 17; });
  refused("pad_to must be 16, got 8", [](TargetsPlan& p) { p.options.pad_to = 16; });
  refused("learn_prompt must be false", [](TargetsPlan& p) { p.options.learn_prompt = false; });
  refused("k must be 17, got 16", [](TargetsPlan& p) { p.k = 17; });
  refused("train_batches must be 3, got 6", [](TargetsPlan& p) { p.train_batches = 3; });
  refused(R"(tokenizer must be "other", got "words")",
          [](TargetsPlan& p) { p.tokenizer = "other"; });
  refused(R"(teacher must be "other", got "teacher")", [](TargetsPlan& p) { p.teacher = "other"; });
  refused("vocabulary must be 81, got 80", [](TargetsPlan&) {}, 81);
  const Batches other_train(samples(24, 3), sizes_);
  refused("train_data must be", [&](TargetsPlan& p) { p.train = &other_train; });
  const auto other_valid = jobs::every_batch(samples(6, 4), sizes_);
  refused("valid_data must be", [&](TargetsPlan& p) { p.valid = &other_valid; });
  const auto more_valid = jobs::every_batch(samples(9, 4), sizes_);
  refused("valid_batches must be 3, got 2", [&](TargetsPlan& p) { p.valid = &more_valid; });
  refused("k must be at least 1, got 0", [](TargetsPlan& p) { p.k = 0; });
  refused("train_batches must be at least 0, got -1", [](TargetsPlan& p) { p.train_batches = -1; });
  refused("train and valid", [](TargetsPlan& p) { p.valid = nullptr; });

  const std::string manifest = read_whole(path("t/manifest.json"), "test");
  formats::Json changed = formats::Json::parse(manifest, "manifest");
  changed.erase("seed");
  write_whole(path("t/manifest.json"), changed.dump(), "test");
  refused("seed must be 5, got nothing", [](TargetsPlan&) {});
  changed.set("format", "mlxtape targets 1");
  write_whole(path("t/manifest.json"), changed.dump(), "test");
  refused(R"(format must be "mlxtape targets 2")", [](TargetsPlan&) {});
  fs::remove(path("t/manifest.json"));
  expect_error(Errc::kIo, "manifest.json: missing", [&] { jobs::Targets(path("t"), plan_, 80); });
}

TEST_P(DwqTargets, RefuseDamagedFiles) {
  jobs::write_targets(encoder(), teacher_, plan_, path("t"));
  const jobs::Targets targets(path("t"), plan_, 80);
  const Batch batch = train_.at(0);
  const std::string file = path("t/train/0000000000.safetensors");
  const auto refused = [&](const std::string& says, std::int64_t k, std::uint32_t index,
                           DType type) {
    Device& cpu = Device::cpu();
    const auto there = cpu.make_encoder();
    const Shape shape{batch.rows, batch.length, k};
    const std::vector<formats::NamedTensor> tensors = {
        {"logits", there->full(shape, DType::kF32, 1)},
        {"indices", there->full(shape, type, index)}};
    formats::write_safetensors(file, tensors);
    expect_error(Errc::kIo, says, [&] { targets.load(encoder(), true, 0, batch); });
  };
  refused("0000000000.safetensors: logits and indices must be", 15, 1, DType::kU32);
  refused("got f32", 16, 1, DType::kI32);
  refused("an index must be below 80, got 80", 16, 80, DType::kU32);
  refused("match its hash, which is missing", 16, 79, DType::kU32);
  // One bit of a logit, which is as good a logit as before.
  std::filesystem::remove(file);
  jobs::write_targets(encoder(), teacher_, plan_, path("t"));
  targets.load(encoder(), true, 0, batch);
  std::string bytes = read_whole(file, "test");
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  char& byte = bytes[sizeof header + header];
  byte = static_cast<char>(byte ^ 1);
  write_whole(file, bytes, "test");
  expect_error(Errc::kIo, "0000000000.safetensors: the content must match its hash",
               [&] { targets.load(encoder(), true, 0, batch); });
  write_whole(file, "no such thing", "test");
  expect_error(Errc::kIo, "delete this file, and it will be written again",
               [&] { targets.load(encoder(), true, 0, batch); });
  // Another batch's, alike in every size.
  std::filesystem::remove(file);
  jobs::write_targets(encoder(), teacher_, plan_, path("t"));
  std::int64_t other = 1;
  while (other < 6 && train_.at(other).length != batch.length) ++other;
  ASSERT_LT(other, 6);
  std::filesystem::copy_file(path("t/train/000000000" + std::to_string(other) + ".safetensors"),
                             file, std::filesystem::copy_options::overwrite_existing);
  expect_error(Errc::kIo, "0000000000.safetensors: the content must match its hash",
               [&] { targets.load(encoder(), true, 0, batch); });
  // Whatever they were made from.
  std::filesystem::remove(path("t/manifest.json"));
  expect_error(Errc::kIo, "t/train: contains targets but no manifest.json",
               [&] { jobs::write_targets(encoder(), teacher_, plan_, path("t")); });
}

TEST_P(DwqTargets, AFoldersFingerprint) {
  models::save_model(teacher_, path("a"));
  models::save_model(teacher_, path("b"));
  const std::string one = jobs::model_fingerprint(path("a"));
  EXPECT_EQ(one.size(), 16U);
  EXPECT_EQ(jobs::model_fingerprint(path("b")), one);
  models::save_model(lively_model(encoder(), "qwen3", DType::kF32, 2), path("c"));
  EXPECT_NE(jobs::model_fingerprint(path("c")), one);
  models::Model other = teacher_;
  other.config.json.set("rope_theta", 1234.0);
  models::save_model(other, path("d"));
  EXPECT_NE(jobs::model_fingerprint(path("d")), one);
  write_whole(path("a/tokenizer.json"), "{}", "test");
  write_whole(path("b/tokenizer.json"), "{ }", "test");
  EXPECT_NE(jobs::tokenizer_fingerprint(path("a")), jobs::tokenizer_fingerprint(path("b")));
  expect_error(Errc::kIo, "tokenizer.json", [&] { jobs::tokenizer_fingerprint(path("c")); });
  expect_error(Errc::kIo, "nowhere", [&] { jobs::model_fingerprint(path("nowhere")); });
}

MT_ON_EVERY_BACKEND(DwqTargets);

}  // namespace
}  // namespace mlxtape::test
