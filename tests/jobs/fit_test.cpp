// What fit computes, and what it refuses.
#include "jobs/fit_support.h"

#include <cmath>

#include "mlxtape/ops/reduce.h"

namespace mlxtape::test {
namespace {

class Fit : public FitTest {};

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

// What mlx_lm.tuner.utils.build_schedule gives for updates 0, 1, ...
TEST(FitRates, SchedulesAreThoseOfMlxLm) {
  struct Row {
    jobs::Schedule schedule;
    std::vector<double> rates;
  };
  const Row table[] = {
      {{"cosine_decay", {1e-5, 10, 1e-7}, 3, 1e-7},
       {1e-7, 3.4e-6, 6.7e-6, 1e-5, 1e-5, 9.75773e-6, 9.05463e-6, 7.95954e-6, 6.57963e-6, 5.05e-6,
        3.52037e-6, 2.14046e-6, 1.04537e-6, 3.4227e-7, 1e-7, 1e-7}},
      {{"cosine_decay", {1e-5, 4}}, {1e-5, 8.53553e-6, 5e-6, 1.46447e-6, 0, 0}},
      {{"linear_schedule", {1e-3, 1e-4, 5}, 2},
       {0, 5e-4, 1e-3, 1e-3, 8.2e-4, 6.4e-4, 4.6e-4, 2.8e-4, 1e-4, 1e-4}},
      {{"exponential_decay", {0.1, 0.9}}, {0.1, 0.09, 0.081, 0.0729, 0.06561, 0.059049}},
      {{"step_decay", {0.1, 0.5, 3}, 1},
       {0, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025, 0.0125}},
  };
  for (const Row& row : table) {
    FitOptions o;
    o.learning_rate = 1;  // not asked for
    o.schedule = row.schedule;
    for (std::size_t i = 0; i < row.rates.size(); ++i) {
      EXPECT_NEAR(jobs::learning_rate_at(o, static_cast<std::int64_t>(i) + 1), row.rates[i],
                  6e-6 * row.schedule.arguments[0])
          << row.schedule.name << " " << i;
    }
  }
}

TEST(FitRates, SchedulesThatAreNone) {
  expect_refused({
      {"name", jobs::schedule_check({"join_schedules", {1}}), Errc::kArgument,
       "exponential_decay or step_decay, got 'join_schedules'"},
      {"few", jobs::schedule_check({"cosine_decay", {1}}), Errc::kArgument,
       "arguments of cosine_decay must be [rate, steps] or [rate, steps, end], got 1 numbers"},
      {"many", jobs::schedule_check({"exponential_decay", {1, 1, 1}}), Errc::kArgument,
       "must be [rate, decay], got 3 numbers"},
      {"steps", jobs::schedule_check({"cosine_decay", {1e-5, 0.5}}), Errc::kArgument,
       "argument 2 of cosine_decay, [rate, steps] or [rate, steps, end], must be a whole number "
       "from 1 to 2^30, got 0.5"},
      {"rate", jobs::schedule_check({"linear_schedule", {1, -1, 5}}), Errc::kArgument,
       "must be a rate of at least 0, got -1"},
      {"decay", jobs::schedule_check({"step_decay", {1, 1.5, 5}}), Errc::kArgument,
       "must be a decay from 0 to 1, got 1.5"},
      {"warmup", jobs::schedule_check({"cosine_decay", {1, 5}, -1}), Errc::kArgument,
       "warmup must be a whole number from 0"},
      {"init", jobs::schedule_check({"cosine_decay", {1, 5}, 1, -1}), Errc::kArgument,
       "warmup_init must be a rate of at least 0"},
  });
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
  o.optimiser = adamw({{"beta1", 0.8}, {"beta2", 0.9}, {"eps", 1e-3}, {"weight_decay", 0.1}});
  const Values first = {1, -2, 0.5, 3, -0.25};
  const Trainable w{"w", upload(first, {kSize}, DType::kF32)};
  const auto objective = [&](Tape& tape, std::int64_t batch) {
    Values slope;
    for (std::size_t i = 0; i < kSize; ++i) slope.push_back(static_cast<double>(c(batch, i)));
    const Tensor x = tape.watch(w.tensor);
    const Tensor at = upload(slope, {kSize}, DType::kF32);
    return Recorded{ops::sum(tape, ops::multiply(tape, x, at)), {x}};
  };
  const FitResult result = jobs::fit(encoder(), {{w}, uncaptured(objective)}, o);

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
      o.optimiser = adamw({{"weight_decay", 0.5}});
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
    o.optimiser = jobs::make_optimiser(
        "adamw", {{"beta1", 0}, {"beta2", 0}, {"eps", 1}, {"weight_decay", 0}});
    o.accumulation = 2;
    run(two, o);
    o.accumulation = 1;
    const auto both = [&](Tape& tape, std::int64_t) {
      const Recorded a = one.record_batch(tape, 0);
      // The same leaves for the second batch: watched tensors keep who they are.
      Toy again(encoder(), DType::kF32);
      for (std::size_t i = 0; i < a.watched.size(); ++i) again.trainables[i].tensor = a.watched[i];
      const Recorded b = again.record_batch(tape, 1);
      const Tensor half = encoder().full({}, DType::kF32, 0.5);
      return Recorded{ops::multiply(tape, ops::add(tape, a.loss, b.loss), half), a.watched};
    };
    jobs::fit(encoder(), {one.trainables, uncaptured(both)}, o);
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
    return Recorded{ops::sum(tape, ops::add(tape, a, b)), {a, b}};
  };
  const FitResult result = jobs::fit(encoder(), {pair, uncaptured(objective)}, o);
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
    return Recorded{ops::sum(tape, ops::multiply(tape, w, slope)), {w}};
  };
  EXPECT_EQ(jobs::fit(encoder(), {one, uncaptured(objective)}, o).reports[0].norm, 0.5 + 0x1p-11);
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
    const std::string begin = "fit: first/state.safetensors is the checkpoint of another run: ";
    return said.starts_with(begin) ? said.substr(begin.size()) : said;
  };
  EXPECT_EQ(says([](FitOptions& x) { x.learning_rate = 0.25; }),
            "learning_rate must be 0.050000000000000003 to resume it, got 0.25");
  EXPECT_EQ(says([](FitOptions& x) { x.accumulation = 4; }),
            "accumulation must be 1 to resume it, got 4");
  EXPECT_EQ(says([](FitOptions& x) { x.iterations = 20; }),
            "iterations must be 8 to resume it, got 20");
  EXPECT_EQ(says([](FitOptions& x) { x.cosine = false; }),
            "cosine must be on to resume it, got off");
  const auto with = [&](const char* setting, double value) {
    return says([&](FitOptions& x) { x.optimiser = adamw({{setting, value}}); });
  };
  EXPECT_EQ(with("bias_correction", 0), "bias_correction must be on to resume it, got off");
  EXPECT_EQ(says([](FitOptions& x) { x.optimiser = jobs::make_optimiser("lion"); }),
            "optimizer must be adamw to resume it, got lion");
  EXPECT_EQ(says([](FitOptions& x) { x.clip = 0.5; }).substr(0, 5), "clip ");
  EXPECT_EQ(says([](FitOptions& x) { x.warmup = 1; }).substr(0, 7), "warmup ");
  EXPECT_EQ(says([](FitOptions& x) { x.final_share = 0.5; }).substr(0, 12), "final_share ");
  EXPECT_EQ(with("beta1", 0.5).substr(0, 6), "beta1 ");
  EXPECT_EQ(with("beta2", 0.5).substr(0, 6), "beta2 ");
  EXPECT_EQ(with("eps", 1).substr(0, 4), "eps ");
  EXPECT_EQ(with("weight_decay", 0).substr(0, 13), "weight_decay ");
  EXPECT_EQ(says([](FitOptions& x) { x.lazy_rows = false; }).substr(0, 10), "lazy_rows ");
  EXPECT_EQ(says([](FitOptions& x) { x.validate_every = 3; }).substr(0, 15), "validate_every ");
  EXPECT_EQ(says([](FitOptions& x) { x.fingerprint["data"] = "other"; }),
            "data must be toy to resume it, got other");
  EXPECT_EQ(says([](FitOptions& x) { x.fingerprint["model"] = "m"; }),
            "model must be absent to resume it, got m");
  EXPECT_EQ(says([](FitOptions& x) { x.fingerprint.clear(); }),
            "data must be toy to resume it, got none");
  EXPECT_EQ(says([](FitOptions& x) { x.resume = false; }),
            "fit: first/state.safetensors is the checkpoint of an unfinished run: resume it, or "
            "use another folder");
  EXPECT_TRUE(toy.bits() == first);  // nothing was loaded

  FitOptions free = o;
  free.report_every = 1;
  free.save_every = 0;
  run(toy, free, hooks);
  EXPECT_EQ(steps, 4);

  Toy other(encoder(), DType::kF32);
  other.trainables[1].name = "mixed";
  expect_error(Errc::kIo, "must contain \"mixed\"", [&] { run(other, o); });
  other.trainables[1] = {"mix", encoder().zeros({2, 2}, DType::kF32)};
  expect_error(Errc::kIo, "\"mix\" must be [2, 2] of a float, got [8, 8] f32",
               [&] { run(other, o); });
  other.trainables.pop_back();
  expect_error(Errc::kIo, "must contain 6 tensors for the 2 trained parameters, got 9",
               [&] { run(other, o); });
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
      {"nothing", tensors({}), Errc::kArgument, "at least one parameter to train"},
      {"no name", tensors({{"", t}}), Errc::kArgument, "unique names"},
      {"a name twice", tensors({{"a", t}, {"a", t}}), Errc::kArgument, "got \"a\""},
      {"a state's name", tensors({{"a", t}, {"adamw.m:a", t}}), Errc::kArgument,
       "got \"adamw.m:a\""},
      {"no optimiser", options_with([](auto& o) { o.optimiser = nullptr; }), Errc::kArgument,
       "an optimiser is needed"},
      {"optimiser",
       options_with([](auto& o) { o.optimiser = std::make_shared<jobs::Sgd>(ops::SgdOptions{2}); }),
       Errc::kArgument, "momentum must be in [0, 1)"},
      {"codes", tensors({{"a", Tensor::meta({4}, DType::kU32)}}), Errc::kDType, "got u32"},
      {"strided", tensors({{"a", t.slice(1, 0, 2)}}), Errc::kShape, "must be contiguous"},
      {"elsewhere", tensors({{"a", t}, {"b", Tensor::meta({4}, DType::kF32, Backend::kMetal)}}),
       Errc::kDevice, "must be on the same backend as the first, got metal"},
      {"iterations", options_with([](auto& o) { o.iterations = 0; }), Errc::kArgument,
       "iterations"},
      {"accumulation", options_with([](auto& o) { o.accumulation = 0; }), Errc::kArgument,
       "accumulation"},
      {"rate", options_with([](auto& o) { o.learning_rate = NAN; }), Errc::kArgument,
       "learning_rate"},
      {"rate too large", options_with([](auto& o) { o.learning_rate = 1e39; }), Errc::kArgument,
       "learning_rate"},
      {"decay", options_with([](auto& o) {
         o.optimiser = std::make_shared<jobs::AdamW>(ops::AdamWOptions{.weight_decay = INFINITY});
       }),
       Errc::kArgument, "weight_decay"},
      {"warmup", options_with([](auto& o) { o.warmup = -1; }), Errc::kArgument, "warmup"},
      {"share", options_with([](auto& o) { o.final_share = 1.5; }), Errc::kArgument, "final_share"},
      {"schedule", options_with([](auto& o) { o.schedule = {"odd", {1}}; }), Errc::kArgument,
       "schedule: name"},
      {"two warmups", options_with([](auto& o) {
         o.schedule = {"cosine_decay", {1, 5}};
         o.cosine = false;
         o.warmup = 1;
       }),
       Errc::kArgument, "a schedule has its own warmup"},
      {"two schedules", options_with([](auto& o) {
         o.schedule = {"cosine_decay", {1, 5}};
         o.cosine = true;
         o.warmup = 0;
       }),
       Errc::kArgument, "a schedule has its own warmup and decay, got cosine too"},
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
      jobs::fit(encoder(), {toy.trainables, uncaptured([&](Tape& tape, std::int64_t batch) {
                              Recorded r = toy.record_batch(tape, batch);
                              change(tape, r);
                              return r;
                            })},
                options());
    });
  };
  fails(Errc::kShape, "the loss must be one number, got [8, 8]",
        [](Tape&, Recorded& r) { r.loss = r.watched[1]; });
  fails(Errc::kArgument, "must watch all 3", [](Tape&, Recorded& r) { r.watched.pop_back(); });
  fails(Errc::kArgument, "in place of \"mix\"", [&](Tape& tape, Recorded& r) {
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
