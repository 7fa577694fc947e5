// Training whose steps are captured: the same bits, losses and errors as step by step.
#include "jobs/fit_support.h"
#include "mlxtape/ops/reduce.h"

namespace mlxtape::test {
namespace {

class FitCapture : public FitTest {
 protected:
  void SetUp() override {
    FitTest::SetUp();
    if (!IsSkipped()) encoder().device().memory().set_guarded(false);  // else nothing is planned
  }
  struct Run {
    FitResult result;
    std::vector<std::vector<unsigned char>> bits;
  };
  Run run_toy(FitOptions o, DType dtype, std::int64_t shapes, bool capture) {
    Toy toy(encoder(), dtype);
    toy.shapes = shapes;
    o.capture = capture;
    Run r;
    r.result = run(toy, o);
    r.bits = toy.bits();
    return r;
  }
};

// Between two validations seven steps: each shape is run once before it is replayed. With accumulation first and later batches
// of a step are apart, and so is the update. Row-sparse gradients of several batches are not captured.
TEST_P(FitCapture, TheSameBitsAsStepByStep) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t accumulation : {1, 2}) {
      for (const std::int64_t shapes : {1, 3}) {
        for (const bool lazy : {false, true}) {
          SCOPED_TRACE(std::string(name_of(dtype)) + ", accumulation " +
                       std::to_string(accumulation) + ", shapes " + std::to_string(shapes) +
                       (lazy ? ", by rows" : ""));
          FitOptions o = options(14);
          o.accumulation = accumulation;
          o.validate_every = 7;
          o.lazy_rows = lazy;
          const Run want = run_toy(o, dtype, shapes, false);
          const Run got = run_toy(o, dtype, shapes, true);
          expect_same(got.result, want.result);
          EXPECT_TRUE(got.bits == want.bits);
          EXPECT_EQ(want.result.replays, 0);
          const std::int64_t of_one = 2 * (7 - shapes);
          const std::int64_t of_two = lazy ? 0 : 2 * of_one + 2 * 6;
          EXPECT_EQ(got.result.replays, accumulation == 1 ? of_one : of_two);
        }
      }
    }
  }
}

TEST_P(FitCapture, EveryOptimiser) {
  for (const char* name : {"adamw", "adam", "sgd", "muon", "lion"}) {
    FitOptions o = options(6);
    o.optimiser = jobs::make_optimiser(name, {}, {});
    o.validate_every = 0;
    const Run want = run_toy(o, DType::kBF16, 2, false);
    const Run got = run_toy(o, DType::kBF16, 2, true);
    expect_same(got.result, want.result);
    EXPECT_TRUE(got.bits == want.bits) << name;
    EXPECT_GT(got.result.replays, 0) << name;
  }
}

// Stopped with capture and resumed without, and the other way round.
TEST_P(FitCapture, AStateGoesOnEitherWay) {
  const FitOptions alone = options(9);
  Toy whole(encoder(), DType::kBF16);
  whole.shapes = 2;
  const FitResult want = run(whole, alone);
  for (const bool first : {false, true}) {
    FitOptions o = in_folder(first ? "first" : "second", 9);
    std::int64_t steps = 0;
    FitHooks hooks;
    hooks.on_step = [&](std::int64_t step) {
      steps = step;
    };
    hooks.stop = [&] {
      return steps == 5;
    };
    o.capture = first;
    Toy part(encoder(), DType::kBF16), rest(encoder(), DType::kBF16);
    part.shapes = rest.shapes = 2;
    EXPECT_TRUE(run(part, o, hooks).stopped);
    o.capture = !first;
    expect_same(run(rest, o), want);
    EXPECT_TRUE(rest.bits() == whole.bits());
  }
}

// A loss that a replay makes is looked at like any other, and nothing is kept of it.
TEST_P(FitCapture, AReplayedStepThatIsNotFiniteIsFound) {
  for (const bool capture : {false, true}) {
    SCOPED_TRACE(capture ? "captured" : "step by step");
    const Toy toy(encoder(), DType::kF32);
    const Tensor factor = encoder().empty({}, DType::kF32);
    FitOptions o = in_folder(capture ? "captured" : "plain", 12);
    o.validate_every = 0;
    o.capture = capture;
    jobs::FitTask task{toy.trainables, {}};
    task.objective.stage = [&](std::int64_t batch) {
      const float value = batch == 7 ? NAN : 1;
      encoder().upload(&value, sizeof value, factor);
      return toy.stage(batch);
    };
    task.objective.record = [&](Tape& tape) {
      Recorded r = toy.record(tape);
      r.loss = ops::multiply(tape, r.loss, factor);
      return r;
    };
    expect_error(Errc::kArgument, "the loss of step 8 must be finite, got nan",
                 [&] { jobs::fit(encoder(), task, o); });
    const Toy saved(encoder(), DType::kF32);
    jobs::load_trainables(encoder(), o.folder + "/state.safetensors", saved.trainables);
    const Toy want(encoder(), DType::kF32);
    FitOptions six = options(12);
    six.validate_every = 0;
    FitHooks hooks;
    std::int64_t steps = 0;
    hooks.on_step = [&](std::int64_t step) {
      steps = step;
    };
    hooks.stop = [&] {
      return steps == 6;
    };
    run(want, six, hooks);
    EXPECT_TRUE(saved.bits() == want.bits());
  }
}

MT_ON_EVERY_BACKEND(FitCapture);

}  // namespace
}  // namespace mlxtape::test
