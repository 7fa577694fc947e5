#include "mlxtape/jobs/fit.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <numbers>
#include <random>

#include "formats/support.h"
#include "mlxtape/base/files.h"
#include "mlxtape/ops/cross_entropy.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/embedding.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/reduce.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using formats::TempFolder;
using jobs::FitHooks;
using jobs::FitOptions;
using jobs::FitPoint;
using jobs::FitResult;
using jobs::Recorded;
using jobs::Trainable;
using Values = std::vector<double>;

// An embedding, whose gradient is one of rows, and two products; what follows each token is drawn from the number of the
// batch.
class Toy {
 public:
  static constexpr std::int64_t kVocabulary = 12, kWidth = 8, kTokens = 6;

  Toy(CommandEncoder& encoder, DType dtype) : encoder_(encoder) {
    std::mt19937 bits(3);
    const auto add = [&](const char* name, Shape shape) {
      std::vector<float> values(static_cast<std::size_t>(*element_count(shape)));
      for (float& v : values) v = static_cast<float>(bits() % 2001) / 1000 - 1;
      const Tensor t = encoder.empty(shape, dtype);
      std::vector<std::byte> stored(t.bytes());
      convert(values.data(), DType::kF32, stored.data(), dtype, values.size());
      encoder.upload(stored.data(), stored.size(), t);
      trainables.push_back({name, t});
    };
    add("embedding", {kVocabulary, kWidth});
    add("mix", {kWidth, kWidth});
    add("head", {kWidth, kVocabulary});
  }

  Recorded record(Tape& tape, std::int64_t batch) const {
    std::mt19937 bits(static_cast<unsigned>(batch));
    std::vector<std::int32_t> ids(kTokens), next(kTokens);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int32_t>(bits() % 10);  // the last two are never there
      next[i] = (ids[i] * 7 + 3) % 12;
    }
    Recorded result;
    result.tokens = kTokens;
    for (const Trainable& t : trainables) result.watched.push_back(tape.watch(t.tensor));
    const Tensor h = ops::embedding(tape, result.watched[0], on_device(ids));
    const Tensor mixed = ops::add(tape, h, ops::matmul(tape, h, result.watched[1]));
    result.loss = ops::cross_entropy(tape, ops::matmul(tape, mixed, result.watched[2]),
                                     on_device(next), {.reduction = ops::Reduction::kMean});
    return result;
  }
  jobs::Objective objective() const {
    return [this](Tape& tape, std::int64_t batch) {
      return record(tape, batch);
    };
  }
  // The loss of one batch that is never trained on.
  double validation() const {
    Tape tape(encoder_);
    float loss = 0;
    encoder_.download(record(tape, 1000).loss, &loss, sizeof loss);
    return static_cast<double>(loss);
  }
  std::vector<std::vector<unsigned char>> bits() const {
    std::vector<std::vector<unsigned char>> all;
    for (const Trainable& t : trainables) all.push_back(bits_of(encoder_, t.tensor));
    return all;
  }

  std::vector<Trainable> trainables;

 private:
  Tensor on_device(const std::vector<std::int32_t>& values) const {
    const Tensor t = encoder_.empty({kTokens}, DType::kI32);
    encoder_.upload(values.data(), values.size() * 4, t);
    return t;
  }
  CommandEncoder& encoder_;
};

class Fit : public OnDevice {
 protected:
  FitOptions options(std::int64_t iterations = 8) const {
    FitOptions o;
    o.iterations = iterations;
    o.learning_rate = 0.05;
    o.warmup = 2;
    o.cosine = true;
    o.clip = 0.7;
    o.adamw.bias_correction = true;
    o.report_every = 3;
    o.validate_every = 2;
    o.save_every = 2;
    o.fingerprint = {{"data", "toy"}};
    return o;
  }
  FitOptions in_folder(const std::string& name, std::int64_t iterations = 8) const {
    FitOptions o = options(iterations);
    o.folder = folder_ / name;
    o.resume = true;
    return o;
  }
  FitResult run(const Toy& toy, const FitOptions& o, FitHooks hooks = {}) {
    hooks.validate = [&toy] {
      return toy.validation();
    };
    return jobs::fit(encoder(), toy.trainables, toy.objective(), o, hooks);
  }
  void expect_resumable(DType dtype, const FitOptions& parts, std::int64_t k, const Toy& whole,
                        const FitResult& want);
  TempFolder folder_;
};

void expect_same(const FitResult& a, const FitResult& b) {
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_EQ(a.best_step, b.best_step);
  EXPECT_EQ(a.best_loss, b.best_loss);
  const auto expect_points = [](const std::vector<FitPoint>& x, const std::vector<FitPoint>& y) {
    ASSERT_EQ(x.size(), y.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(x[i].step, y[i].step);
      EXPECT_EQ(x[i].loss, y[i].loss);
      EXPECT_EQ(x[i].rate, y[i].rate);
      EXPECT_EQ(x[i].norm, y[i].norm);
    }
  };
  expect_points(a.reports, b.reports);
  expect_points(a.validations, b.validations);
}

// ---- the formula ----

TEST(FitRates, WarmupAndCosine) {
  FitOptions o;
  o.learning_rate = 0.8;
  EXPECT_EQ(jobs::learning_rate_at(o, 1), 0.8);
  EXPECT_EQ(jobs::learning_rate_at(o, 1000), 0.8);
  o.warmup = 4;
  EXPECT_EQ(jobs::learning_rate_at(o, 1), 0.2);
  EXPECT_EQ(jobs::learning_rate_at(o, 4), 0.8);
  EXPECT_EQ(jobs::learning_rate_at(o, 5), 0.8);
  o.cosine = true;
  o.final_share = 0.25;
  o.iterations = 12;
  EXPECT_EQ(jobs::learning_rate_at(o, 3), 0.8 * 3 / 4);
  EXPECT_EQ(jobs::learning_rate_at(o, 4), 0.8);
  EXPECT_NEAR(jobs::learning_rate_at(o, 6), 0.2 + 0.6 * (1 + std::sqrt(0.5)) / 2, 0x1p-50);
  EXPECT_NEAR(jobs::learning_rate_at(o, 8), 0.5, 0x1p-50);  // half way
  EXPECT_NEAR(jobs::learning_rate_at(o, 12), 0.2, 0x1p-50);
  o.iterations = 4;  // all of it warmup
  EXPECT_EQ(jobs::learning_rate_at(o, 4), 0.8);
}

// The loss of batch b is Σ w·c(b): its gradient is c(b) and nothing else, so the run can be written down in double.
TEST_P(Fit, FollowsTheFormulaInDouble) {
  constexpr std::size_t kSize = 5;
  const auto c = [](std::int64_t batch, std::size_t i) {
    const double size = 0.2 * static_cast<double>(1 + batch / 3 % 3);  // some steps are clipped
    return static_cast<float>(size *
                              std::sin(static_cast<double>(batch) + 2.0 * static_cast<double>(i)));
  };
  FitOptions o = options(9);
  o.accumulation = 3;
  o.report_every = 1;
  o.clip = 0.5;
  o.adamw = {
      .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-3F, .weight_decay = 0.1F, .bias_correction = true};
  const Values first = {1, -2, 0.5, 3, -0.25};
  const Trainable w{"w", upload(first, {kSize}, DType::kF32)};
  const auto objective = [&](Tape& tape, std::int64_t batch) {
    Values slope;
    for (std::size_t i = 0; i < kSize; ++i) slope.push_back(static_cast<double>(c(batch, i)));
    const Tensor x = tape.watch(w.tensor);
    const Tensor at = upload(slope, {kSize}, DType::kF32);
    return Recorded{ops::sum(tape, ops::multiply(tape, x, at)), {x}, 1};
  };
  const FitResult result = jobs::fit(encoder(), {w}, objective, o);

  Values x = first, m(kSize), v(kSize);
  int clipped = 0;
  ASSERT_EQ(result.reports.size(), 9U);
  for (std::int64_t t = 1; t <= 9; ++t) {
    Values g(kSize);
    double loss = 0, norm = 0, terms = 0;
    for (std::int64_t b = 3 * (t - 1); b < 3 * t; ++b) {
      for (std::size_t i = 0; i < kSize; ++i) {
        g[i] += static_cast<double>(c(b, i)) / 3;
        loss += x[i] * static_cast<double>(c(b, i)) / 3;
        terms += std::abs(x[i]);
      }
    }
    for (const double each : g) norm += each * each;
    norm = std::sqrt(norm);
    const FitPoint& point = result.reports[static_cast<std::size_t>(t - 1)];
    EXPECT_EQ(point.step, t);
    EXPECT_NEAR(point.norm, norm, 64 * 0x1p-24 * norm);
    EXPECT_NEAR(point.loss, loss, 64 * 0x1p-24 * terms);
    EXPECT_EQ(point.rate, jobs::learning_rate_at(o, t));
    const double scale = std::min(1.0, 0.5 / (norm + 1e-6)), rate = point.rate;
    clipped += norm > 0.5 ? 1 : 0;
    for (std::size_t i = 0; i < kSize; ++i) {
      const double each = scale * g[i];
      m[i] = 0.8 * m[i] + 0.2 * each;
      v[i] = 0.9 * v[i] + 0.1 * each * each;
      const double step =
          m[i] / (1 - std::pow(0.8, t)) / (std::sqrt(v[i] / (1 - std::pow(0.9, t))) + 1e-3F);
      x[i] = x[i] * (1 - rate * 0.1F) - rate * step;
    }
  }
  EXPECT_GT(clipped, 0);
  EXPECT_LT(clipped, 9);
  const Values got = download(w.tensor);
  // A step is of the size of the rate; roundings of each are 2^-24 of its terms, a few dozen in a step.
  for (std::size_t i = 0; i < kSize; ++i) EXPECT_NEAR(got[i], x[i], 9 * 64 * 0x1p-24 * 3);
}

TEST_P(Fit, RowsThatNoTokenHadStay) {
  for (const bool lazy : {true, false}) {
    for (const std::int64_t accumulation : {1, 2}) {
      const Toy toy(encoder(), DType::kF32);
      const Values before = download(toy.trainables[0].tensor);
      FitOptions o = options();
      o.accumulation = accumulation;
      o.lazy_rows = lazy;
      o.adamw.weight_decay = 0.5F;
      run(toy, o);
      const Values after = download(toy.trainables[0].tensor);
      EXPECT_NE(before[0], after[0]);
      for (std::size_t i = 10 * Toy::kWidth; i < before.size(); ++i) {
        if (lazy) {
          EXPECT_EQ(before[i], after[i]);
        } else if (before[i] != 0) {
          EXPECT_LT(std::abs(after[i]), std::abs(before[i]));
        }
      }
    }
  }
}

// Two batches of one step are as one of both: rows and dense sums alike.
TEST_P(Fit, AccumulationIsAMean) {
  for (const bool lazy : {true, false}) {
    const Toy two(encoder(), DType::kF32), one(encoder(), DType::kF32);
    FitOptions o = options(1);
    o.warmup = 0;
    o.cosine = false;
    o.lazy_rows = lazy;
    o.adamw = {.beta1 = 0, .beta2 = 0, .eps = 1, .weight_decay = 0};
    o.accumulation = 2;
    run(two, o);
    o.accumulation = 1;
    const auto both = [&](Tape& tape, std::int64_t) {
      const Recorded a = one.record(tape, 0);
      // The same leaves for the second batch: watched tensors keep who they are.
      Toy again = one;
      for (std::size_t i = 0; i < a.watched.size(); ++i) again.trainables[i].tensor = a.watched[i];
      const Recorded b = again.record(tape, 1);
      const Tensor half = encoder().full({}, DType::kF32, 0.5);
      return Recorded{ops::multiply(tape, ops::add(tape, a.loss, b.loss), half), a.watched, 12};
    };
    jobs::fit(encoder(), one.trainables, both, o);
    for (std::size_t i = 0; i < 3; ++i) {
      const Values x = download(two.trainables[i].tensor), y = download(one.trainables[i].tensor);
      // Gradients are sums of at most 12 terms below 1, and the step is at most 0.05 of them.
      for (std::size_t j = 0; j < x.size(); ++j) EXPECT_NEAR(x[j], y[j], 0x1p-24 * (1 + 12 * 0.05));
    }
  }
}

// Both have the same gradient, of which the tape has one copy.
TEST_P(Fit, TwoMayShareAGradient) {
  const std::vector<Trainable> pair = {{"a", upload({1, 2}, {2}, DType::kF32)},
                                       {"b", upload({3, 4}, {2}, DType::kF32)}};
  FitOptions o = options(1);
  o.accumulation = 4;
  const auto objective = [&](Tape& tape, std::int64_t) {
    const Tensor a = tape.watch(pair[0].tensor), b = tape.watch(pair[1].tensor);
    return Recorded{ops::sum(tape, ops::add(tape, a, b)), {a, b}, 1};
  };
  const FitResult result = jobs::fit(encoder(), pair, objective, o);
  EXPECT_EQ(result.reports[0].norm, 2);  // of four ones
}

// 1 and 2^-10 have a sum in f32, but none in bf16.
TEST_P(Fit, GradientsOfSixteenBitsAreSummedInF32) {
  const std::vector<Trainable> one = {{"w", upload({1}, {1}, DType::kBF16)}};
  FitOptions o = options(1);
  o.accumulation = 2;
  const auto objective = [&](Tape& tape, std::int64_t batch) {
    const Tensor w = tape.watch(one[0].tensor);
    const Tensor slope = upload({batch == 0 ? 1 : 0x1p-10}, {1}, DType::kBF16);
    return Recorded{ops::sum(tape, ops::multiply(tape, w, slope)), {w}, 1};
  };
  EXPECT_EQ(jobs::fit(encoder(), one, objective, o).reports[0].norm, 0.5 + 0x1p-11);
}

// ---- stopping and going on ----

// Stopped after k of its steps and resumed: as `want` and `whole`, which were not.
void Fit::expect_resumable(DType dtype, const FitOptions& parts, std::int64_t k, const Toy& whole,
                           const FitResult& want) {
  std::int64_t steps = 0, resumed = -1;
  FitHooks hooks;
  hooks.on_step = [&](std::int64_t step) {
    steps = step;
  };
  hooks.on_resumed = [&](std::int64_t step) {
    resumed = step;
  };
  hooks.stop = [&] {
    return steps == k;
  };
  const FitResult part = run(Toy(encoder(), dtype), parts, hooks);
  EXPECT_TRUE(part.stopped);
  EXPECT_EQ(part.steps, k);
  EXPECT_EQ(resumed, -1);
  const Toy rest(encoder(), dtype);
  hooks.stop = {};
  const FitResult got = run(rest, parts, hooks);
  EXPECT_FALSE(got.stopped);
  EXPECT_EQ(resumed, k);
  expect_same(got, want);
  EXPECT_TRUE(rest.bits() == whole.bits());
  if (k != 3) return;
  // One that is over has nothing more to do, and still knows its weights.
  const Toy over(encoder(), dtype);
  expect_same(run(over, parts), want);
  EXPECT_TRUE(over.bits() == whole.bits());
}

TEST_P(Fit, StoppedAnywhereItGoesOnWithTheSameBits) {
  const std::vector<std::pair<DType, std::int64_t>> kinds = {
      {DType::kF32, 3}, {DType::kBF16, 1}, {DType::kF16, 2}};
  for (const auto& [dtype, accumulation] : kinds) {
    FitOptions o = options();
    o.accumulation = accumulation;
    o.save_every = 0;
    const Toy whole(encoder(), dtype);
    const FitResult want = run(whole, o);
    EXPECT_EQ(want.steps, 8);
    EXPECT_EQ(want.validations.size(), 5U);
    EXPECT_EQ(want.reports.size(), 3U);
    EXPECT_LT(want.best_loss, want.validations[0].loss);
    for (std::int64_t k = 1; k < 8; ++k) {
      o.folder = folder_ / (name_of(dtype) + std::to_string(k));
      o.resume = true;
      SCOPED_TRACE(o.folder);
      expect_resumable(dtype, o, k, whole, want);
    }
  }
}

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not follow threads into a child
TEST_P(Fit, KilledAnywhereItGoesOnWithTheSameBits) {
  if (GetParam() != Backend::kCpu) GTEST_SKIP() << "a forked child cannot use the parent's device";
  FitOptions o = in_folder("killed", 40);
  o.save_every = 1;
  o.accumulation = 2;
  const Toy whole(encoder(), DType::kBF16);
  FitOptions alone = o;
  alone.folder.clear();
  alone.resume = false;
  const FitResult want = run(whole, alone);

  std::mt19937 bits(std::random_device{}());
  int killed = 0;
  for (int i = 0; i < 10; ++i) {
    const unsigned wait = bits() % 12000;
    SCOPED_TRACE("killed after us: " + std::to_string(wait));
    const pid_t child = fork();
    if (child == 0) {
      try {
        run(Toy(encoder(), DType::kBF16), o);
      } catch (...) {
        _exit(1);
      }
      _exit(0);
    }
    usleep(wait);
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    killed += WIFSIGNALED(status) ? 1 : 0;
    EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
  }
  EXPECT_GT(killed, 0);
  const Toy last(encoder(), DType::kBF16);
  expect_same(run(last, o), want);
  EXPECT_TRUE(last.bits() == whole.bits());
  const Toy best(encoder(), DType::kBF16);
  jobs::load_trainables(encoder(), o.folder + "/best.safetensors", best.trainables);
  EXPECT_EQ(best.validation(), want.best_loss);
  std::size_t files = 0;  // the state and the best; nothing that was half written
  for (const auto& entry : std::filesystem::directory_iterator(o.folder)) {
    files += entry.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 2U);
}
#endif

// As if the disk were full: no file has more than 1000 bytes.
class SmallFiles {
 public:
  SmallFiles() {
    std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit small = before_;
    small.rlim_cur = 1000;
    setrlimit(RLIMIT_FSIZE, &small);
  }
  SmallFiles(const SmallFiles&) = delete;
  SmallFiles& operator=(const SmallFiles&) = delete;
  ~SmallFiles() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, SIG_DFL);
  }

 private:
  rlimit before_{};
};

TEST_P(Fit, AFullDiskLeavesTheStateBefore) {
  FitOptions o = in_folder("full");
  std::int64_t steps = 0, saved = -1;
  FitHooks hooks;
  hooks.on_step = [&](std::int64_t step) {
    steps = step;
  };
  hooks.on_saved = [&](std::int64_t step) {
    saved = step;
  };
  hooks.stop = [&] {
    return steps == 2;
  };
  run(Toy(encoder(), DType::kF32), o, hooks);
  hooks.stop = {};
  const std::string before = read_whole(o.folder + "/state.safetensors", "test");

  std::optional<SmallFiles> small(std::in_place);
  const std::string said = formats::message_of([&] { run(Toy(encoder(), DType::kF32), o, hooks); },
                                               Errc::kIo, folder_.path.string() + "/");
  small.reset();
  EXPECT_EQ(
      said,
      "fit: the state of step 4 could not be written: safetensors: full/state.safetensors must "
      "be writable, got File too large; the state of step 2 in full/state.safetensors is whole");
  EXPECT_EQ(read_whole(o.folder + "/state.safetensors", "test"), before);
  EXPECT_EQ(saved, 2);

  const Toy rest(encoder(), DType::kF32), whole(encoder(), DType::kF32);
  expect_same(run(rest, o), run(whole, options()));
  EXPECT_TRUE(rest.bits() == whole.bits());
}

// ---- what is not finite ----

TEST_P(Fit, NothingIsKeptOfAStepThatIsNotFinite) {
  for (const bool of_norm : {false, true}) {
    FitOptions o = in_folder(of_norm ? "norm" : "loss");
    const Toy toy(encoder(), DType::kF32), until(encoder(), DType::kF32);
    const auto objective = [&](Tape& tape, std::int64_t batch) {
      Recorded r = toy.record(tape, batch);
      if (batch != 5) return r;
      const Tensor x = ops::sum(tape, r.watched[1]);
      if (of_norm) {  // 1e30·(x − x): no loss, and a slope whose square is too much
        const Tensor much = encoder().full({}, DType::kF32, 1e30);
        const Tensor zero = ops::subtract(tape, x, x.detach());
        r.loss = ops::add(tape, r.loss, ops::multiply(tape, zero, much));
      } else {
        r.loss = ops::add(tape, r.loss, encoder().full({}, DType::kF32, NAN));
      }
      return r;
    };
    FitHooks hooks;
    hooks.validate = [&toy] {
      return toy.validation();
    };
    std::int64_t steps = 0;
    hooks.on_step = [&](std::int64_t step) {
      steps = step;
    };
    const std::string said =
        formats::message_of([&] { jobs::fit(encoder(), toy.trainables, objective, o, hooks); },
                            Errc::kArgument, folder_.path.string() + "/");
    EXPECT_EQ(steps, 5);
    const std::string begin =
        of_norm ? "fit: the norm of the gradients of step 6 must be finite, got inf"
                : "fit: the loss of step 6 must be finite, got nan";
    EXPECT_EQ(said.substr(0, begin.size()), begin);
    EXPECT_NE(said.find("nothing of that step was kept, and the state of step 4"),
              std::string::npos)
        << said;
    hooks.stop = [&] {
      return steps == 5;
    };
    run(until, options(), hooks);
    EXPECT_TRUE(toy.bits() == until.bits());
  }
  FitHooks hooks;
  const Toy toy(encoder(), DType::kF32);
  hooks.validate = [] {
    return NAN;
  };
  expect_error(Errc::kArgument, "the loss of the validation after step 0 must be finite",
               [&] { jobs::fit(encoder(), toy.trainables, toy.objective(), options(), hooks); });
}

// ---- the best ----

TEST_P(Fit, KeepsTheBest) {
  const Values losses = {5, 3, 4, 2.5, 2.5, 7};  // before the first step and after 2, 4, …
  FitOptions o = in_folder("best", 10);
  Toy toy(encoder(), DType::kBF16);
  std::size_t asked = 0;
  std::vector<std::vector<unsigned char>> after_six;
  FitHooks hooks;
  hooks.validate = [&] {
    return losses[asked++];
  };
  hooks.on_step = [&](std::int64_t step) {
    if (step == 6) after_six = toy.bits();
  };
  const FitResult result = jobs::fit(encoder(), toy.trainables, toy.objective(), o, hooks);
  EXPECT_EQ(asked, 6U);
  EXPECT_EQ(result.best_step, 6);
  EXPECT_EQ(result.best_loss, 2.5);
  EXPECT_TRUE(toy.bits() != after_six);
  const Toy best(encoder(), DType::kBF16);
  jobs::load_trainables(encoder(), o.folder + "/best.safetensors", best.trainables);
  EXPECT_TRUE(best.bits() == after_six);
  // Of the state, the last; into a wider type, the masters.
  jobs::load_trainables(encoder(), o.folder + "/state.safetensors", best.trainables);
  EXPECT_TRUE(best.bits() == toy.bits());
  const Toy wide(encoder(), DType::kF32);
  jobs::load_trainables(encoder(), o.folder + "/state.safetensors", wide.trainables);
  EXPECT_NE(download(wide.trainables[1].tensor), download(best.trainables[1].tensor));

  std::filesystem::remove(o.folder + "/best.safetensors");
  expect_error(Errc::kIo, "best.safetensors must be of step 6",
               [&] { jobs::fit(encoder(), toy.trainables, toy.objective(), o, hooks); });
}

// A run that was killed between a state and its best.
TEST_P(Fit, TheBestOfTheStatesOwnStepIsWrittenAgain) {
  const FitOptions o = in_folder("between");
  std::int64_t steps = 0;
  FitHooks hooks;
  hooks.on_step = [&](std::int64_t step) {
    steps = step;
  };
  hooks.stop = [&] {
    return steps == 2;
  };
  const FitResult part = run(Toy(encoder(), DType::kF32), o, hooks);
  ASSERT_EQ(part.best_step, 2);
  const std::string best = read_whole(o.folder + "/best.safetensors", "test");
  std::filesystem::remove(o.folder + "/best.safetensors");
  formats::put(o.folder + "/state.safetensors.tmp12.0", "half a state");
  hooks.stop = [] {
    return true;
  };
  FitOptions free = o;
  free.validate_every = 2;
  run(Toy(encoder(), DType::kF32), free, hooks);  // one step, no validation
  EXPECT_EQ(read_whole(o.folder + "/best.safetensors", "test"), best);
  EXPECT_FALSE(std::filesystem::exists(o.folder + "/state.safetensors.tmp12.0"));
}

// ---- what is refused ----

TEST_P(Fit, AStateOfAnotherRunIsRefused) {
  const FitOptions o = in_folder("first");
  std::int64_t steps = 0;
  FitHooks hooks;
  hooks.on_step = [&](std::int64_t step) {
    steps = step;
  };
  hooks.stop = [&] {
    return steps % 2 == 0;
  };
  run(Toy(encoder(), DType::kF32), o, hooks);
  const Toy toy(encoder(), DType::kF32);
  const auto first = toy.bits();
  const auto says = [&](auto change) {
    FitOptions other = o;
    change(other);
    const std::string said =
        formats::message_of([&] { run(toy, other); }, Errc::kArgument, folder_.path.string() + "/");
    const std::string begin = "fit: first/state.safetensors is the state of another run: ";
    return said.starts_with(begin) ? said.substr(begin.size()) : said;
  };
  EXPECT_EQ(says([](FitOptions& x) { x.learning_rate = 0.25; }),
            "learning_rate must be 0.050000000000000003 to go on from it, got 0.25");
  EXPECT_EQ(says([](FitOptions& x) { x.accumulation = 4; }),
            "accumulation must be 1 to go on from it, got 4");
  EXPECT_EQ(says([](FitOptions& x) { x.iterations = 20; }),
            "iterations must be 8 to go on from it, got 20");
  EXPECT_EQ(says([](FitOptions& x) { x.cosine = false; }),
            "cosine must be on to go on from it, got off");
  EXPECT_EQ(says([](FitOptions& x) { x.adamw.bias_correction = false; }),
            "bias_correction must be on to go on from it, got off");
  EXPECT_EQ(says([](FitOptions& x) { x.clip = 0.5; }).substr(0, 5), "clip ");
  EXPECT_EQ(says([](FitOptions& x) { x.warmup = 1; }).substr(0, 7), "warmup ");
  EXPECT_EQ(says([](FitOptions& x) { x.final_share = 0.5; }).substr(0, 12), "final_share ");
  EXPECT_EQ(says([](FitOptions& x) { x.adamw.beta1 = 0.5; }).substr(0, 6), "beta1 ");
  EXPECT_EQ(says([](FitOptions& x) { x.adamw.beta2 = 0.5; }).substr(0, 6), "beta2 ");
  EXPECT_EQ(says([](FitOptions& x) { x.adamw.eps = 1; }).substr(0, 4), "eps ");
  EXPECT_EQ(says([](FitOptions& x) { x.adamw.weight_decay = 0; }).substr(0, 13), "weight_decay ");
  EXPECT_EQ(says([](FitOptions& x) { x.lazy_rows = false; }).substr(0, 10), "lazy_rows ");
  EXPECT_EQ(says([](FitOptions& x) { x.validate_every = 3; }).substr(0, 15), "validate_every ");
  EXPECT_EQ(says([](FitOptions& x) { x.fingerprint["data"] = "other"; }),
            "data must be toy to go on from it, got other");
  EXPECT_EQ(says([](FitOptions& x) { x.fingerprint["model"] = "m"; }),
            "model must be absent to go on from it, got m");
  EXPECT_EQ(says([](FitOptions& x) { x.fingerprint.clear(); }),
            "data must be toy to go on from it, got none");
  EXPECT_EQ(
      says([](FitOptions& x) { x.resume = false; }),
      "fit: first/state.safetensors is the state of a run: resume it, or take another folder");
  EXPECT_TRUE(toy.bits() == first);  // nothing was loaded

  FitOptions free = o;
  free.report_every = 1;
  free.save_every = 0;
  run(toy, free, hooks);
  EXPECT_EQ(steps, 4);

  Toy other(encoder(), DType::kF32);
  other.trainables[1].name = "mixed";
  expect_error(Errc::kIo, "must hold \"mixed\"", [&] { run(other, o); });
  other.trainables[1] = {"mix", encoder().zeros({2, 2}, DType::kF32)};
  expect_error(Errc::kIo, "\"mix\" must be [2, 2] of a float, got [8, 8] f32",
               [&] { run(other, o); });
  other.trainables.pop_back();
  expect_error(Errc::kIo, "must hold 3 tensors for each of 2", [&] { run(other, o); });
  formats::put(o.folder + "/state.safetensors", "no state");
  expect_error(Errc::kIo, "state.safetensors", [&] { run(toy, o); });
}

TEST_P(Fit, RefusesWhatItCannotTrain) {
  const Toy toy(encoder(), DType::kF32);
  const auto options_with = [&](auto change) {
    FitOptions o = options();
    change(o);
    return jobs::fit_check(toy.trainables, o);
  };
  const auto tensors = [&](const std::vector<Trainable>& t) {
    return jobs::fit_check(t, options());
  };
  const Tensor t = Tensor::meta({4, 4});
  EXPECT_FALSE(tensors({{"a", t}, {"b", t}}));
  expect_refused({
      {"nothing", tensors({}), Errc::kArgument, "something must be trained"},
      {"no name", tensors({{"", t}}), Errc::kArgument, "names of their own"},
      {"a name twice", tensors({{"a", t}, {"a", t}}), Errc::kArgument, "got \"a\""},
      {"our name", tensors({{"adamw.m:a", t}}), Errc::kArgument, "begin with adamw."},
      {"codes", tensors({{"a", Tensor::meta({4}, DType::kU32)}}), Errc::kDType, "got u32"},
      {"strided", tensors({{"a", t.slice(1, 0, 2)}}), Errc::kShape, "must be contiguous"},
      {"elsewhere", tensors({{"a", t}, {"b", Tensor::meta({4}, DType::kF32, Backend::kMetal)}}),
       Errc::kDevice, "must be where the first is, got metal"},
      {"iterations", options_with([](auto& o) { o.iterations = 0; }), Errc::kArgument,
       "iterations"},
      {"accumulation", options_with([](auto& o) { o.accumulation = 0; }), Errc::kArgument,
       "accumulation"},
      {"rate", options_with([](auto& o) { o.learning_rate = NAN; }), Errc::kArgument,
       "learning_rate"},
      {"warmup", options_with([](auto& o) { o.warmup = -1; }), Errc::kArgument, "warmup"},
      {"share", options_with([](auto& o) { o.final_share = 1.5; }), Errc::kArgument, "final_share"},
      {"clip", options_with([](auto& o) { o.clip = -1; }), Errc::kArgument, "clip"},
      {"reports", options_with([](auto& o) { o.report_every = -1; }), Errc::kArgument,
       "report_every"},
      {"validations", options_with([](auto& o) { o.validate_every = -1; }), Errc::kArgument,
       "validate_every"},
      {"saves", options_with([](auto& o) { o.save_every = -1; }), Errc::kArgument, "save_every"},
      {"no folder", options_with([](auto& o) { o.resume = true; }), Errc::kArgument, "a folder"},
  });
  const auto fails = [&](Errc code, const char* says, auto change) {
    expect_error(code, says, [&] {
      jobs::fit(
          encoder(), toy.trainables,
          [&](Tape& tape, std::int64_t batch) {
            Recorded r = toy.record(tape, batch);
            change(tape, r);
            return r;
          },
          options());
    });
  };
  fails(Errc::kShape, "the loss must be one number, got [8, 8]",
        [](Tape&, Recorded& r) { r.loss = r.watched[1]; });
  fails(Errc::kArgument, "must watch all 3", [](Tape&, Recorded& r) { r.watched.pop_back(); });
  fails(Errc::kArgument, "in the place of \"mix\"", [&](Tape& tape, Recorded& r) {
    r.watched[1] = tape.watch(encoder().zeros({8, 8}, DType::kF32));
  });
  expect_error(Errc::kIo, "must be a folder", [&] {
    formats::put(folder_ / "file", "x");
    run(toy, in_folder("file/in"));
  });
}

MT_ON_EVERY_BACKEND(Fit);

}  // namespace
}  // namespace mlxtape::test
