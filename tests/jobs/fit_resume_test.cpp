// Runs that are stopped, killed or fail, and go on.
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <optional>

#include "base/sanitizers.h"
#include "jobs/fit_support.h"
#include "mlxtape/base/files.h"
#include "mlxtape/formats/safetensors.h"
#include "mlxtape/jobs/run_folder.h"
#include "mlxtape/ops/reduce.h"

namespace mlxtape::test {
namespace {

using jobs::RunFolder;

class FitResume : public FitTest {};

TEST_P(FitResume, StoppedAnywhereItGoesOnWithTheSameBits) {
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

#ifndef MT_THREAD_SANITIZER  // ThreadSanitizer does not follow threads into a child
TEST_P(FitResume, KilledAnywhereItGoesOnWithTheSameBits) {
  if (GetParam() != Backend::kCpu) GTEST_SKIP() << "a forked child cannot use the parent's device";
  expect_survives_kills(in_folder("killed", 40), 10);
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

TEST_P(FitResume, AFullDiskLeavesTheStateBefore) {
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
  EXPECT_EQ(said,
            "fit: the checkpoint of step 4 could not be written: safetensors: "
            "full/state.safetensors must "
            "be writable, got File too large; the checkpoint of step 2 is saved in "
            "full/state.safetensors");
  EXPECT_EQ(read_whole(o.folder + "/state.safetensors", "test"), before);
  EXPECT_EQ(saved, 2);

  const Toy rest(encoder(), DType::kF32), whole(encoder(), DType::kF32);
  expect_same(run(rest, o), run(whole, options()));
  EXPECT_TRUE(rest.bits() == whole.bits());
}

// ---- what is not finite ----

TEST_P(FitResume, NothingIsKeptOfAStepThatIsNotFinite) {
  for (const bool of_norm : {false, true}) {
    FitOptions o = in_folder(of_norm ? "norm" : "loss");
    const Toy toy(encoder(), DType::kF32), until(encoder(), DType::kF32);
    const auto objective = [&](Tape& tape, std::int64_t batch) {
      Recorded r = toy.record_batch(tape, batch);
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
    jobs::FitTask task = toy.task();
    task.objective = uncaptured(objective);
    std::int64_t steps = 0;
    hooks.on_step = [&](std::int64_t step) {
      steps = step;
    };
    const auto fails = [&] {
      jobs::fit(encoder(), task, o, hooks);
    };
    const std::string said =
        formats::message_of(fails, Errc::kArgument, folder_.path.string() + "/");
    EXPECT_EQ(steps, 6);  // it is looked at when the next one is on its way
    const std::string begin =
        of_norm ? "fit: the norm of the gradients of step 6 must be finite, got inf"
                : "fit: the loss of step 6 must be finite, got nan";
    EXPECT_EQ(said.substr(0, begin.size()), begin);
    EXPECT_NE(said.find("that step was discarded, and the checkpoint of step 4"), std::string::npos)
        << said;
    hooks.stop = [&] {
      return steps == 5;
    };
    run(until, options(), hooks);
    EXPECT_TRUE(toy.bits() == until.bits());
  }
  const Toy toy(encoder(), DType::kF32);
  jobs::FitTask task = toy.task();
  task.validate = [] {
    return NAN;
  };
  const auto fails = [&] {
    jobs::fit(encoder(), task, options());
  };
  expect_error(Errc::kArgument, "the validation loss after step 0 must be finite", fails);
  EXPECT_THROW(fails(), jobs::NotFinite);
}

// A step of finite gradients whose rate carries the weights away: with no step after it there is no loss to show that.
TEST_P(FitResume, WeightsThatAreNotFiniteAreNotKept) {
  for (const char* name : {"away", ""}) {
    FitOptions o = options(3);
    o.save_every = 0;
    if (*name != '\0') o.folder = (folder_.path / name).string();
    o.warmup = 0;
    o.cosine = false;
    o.learning_rate = 3e38;
    o.iterations = 1;
    const Toy toy(encoder(), DType::kF32);
    jobs::FitTask task = toy.task();
    task.validate = nullptr;
    const std::string says =
        formats::message_of([&] { jobs::fit(encoder(), task, o); }, Errc::kArgument);
    const std::string begin = "fit: the weights after step 1 must be finite: the tensor ";
    EXPECT_EQ(says.substr(0, begin.size()), begin);
    EXPECT_FALSE(jobs::RunFolder(o.folder).has_state());
  }
}

// ---- what is not as it was written ----

TEST_P(FitResume, ADamagedStateIsNotUsed) {
  FitOptions o = in_folder("damaged");
  std::int64_t steps = 0;
  FitHooks hooks;
  hooks.on_step = [&](std::int64_t step) {
    steps = step;
  };
  hooks.stop = [&] {
    return steps == 3;
  };
  run(Toy(encoder(), DType::kF32), o, hooks);
  EXPECT_EQ(RunFolder(o.folder).fault(), "");
  for (const char* name : {"/state.safetensors", "/best.safetensors"}) {
    const std::string file = o.folder + name, good = read_whole(file, "test");
    const auto refuses = [&](const std::string& bytes, const std::string& what) {
      SCOPED_TRACE(name + (": " + what));
      formats::put(file, bytes);
      const Toy toy(encoder(), DType::kF32), untouched(encoder(), DType::kF32);
      const std::string said = formats::message_of([&] { run(toy, o); }, Errc::kIo);
      EXPECT_TRUE(said.starts_with("fit: " + file + ": is damaged (safetensors: ")) << said;
      EXPECT_TRUE(said.ends_with("; restore it from a copy, or delete it to start over")) << said;
      EXPECT_EQ(RunFolder(o.folder).fault(), said);
      EXPECT_TRUE(read_whole(file, "test") == bytes);
      const bool is_state = file.ends_with("/state.safetensors");  // the best comes behind it
      EXPECT_TRUE(!is_state || toy.bits() == untouched.bits());
    };
    for (std::size_t at = 0; at < good.size(); at += 97) {
      std::string bytes = good;
      bytes[at] = static_cast<char>(bytes[at] ^ 4);
      refuses(bytes, "bit of byte " + std::to_string(at));
    }
    std::string random = good;
    std::mt19937 bits(5);
    for (std::size_t i = good.size() / 2; i < good.size(); ++i) {
      random[i] = static_cast<char>(bits());
    }
    refuses(random, "random bytes");
    refuses(good.substr(0, good.size() - 1), "the last byte is gone");
    refuses(good + "x", "a byte more");
    refuses("", "empty");
    formats::put(file, good);
  }
  const Toy rest(encoder(), DType::kF32), whole(encoder(), DType::kF32);
  expect_same(run(rest, o), run(whole, options()));
}

TEST_P(FitResume, AStateWithoutAChecksumIsRefused) {
  const FitOptions o = in_folder("older");
  const std::string file = o.folder + "/state.safetensors";
  std::filesystem::create_directories(o.folder);
  const Tensor t = Device::cpu().zeros({1}, DType::kF32);
  formats::write_safetensors(file, std::vector<formats::NamedTensor>{{"mix", t}},
                             {{"format", "mlxtape fit 1"}});
  expect_error(Errc::kIo, file + ": was written by an older version, without a checksum",
               [&] { run(Toy(encoder(), DType::kF32), o); });
  formats::write_safetensors(file, std::vector<formats::NamedTensor>{{"mix", t}},
                             {{"format", "mlxtape fit 2"}});
  expect_error(Errc::kIo, "must end with its checksum, got none",
               [&] { run(Toy(encoder(), DType::kF32), o); });
}

// What a run says of its state it has looked at.
TEST_P(FitResume, AStateThatIsGoneIsNotCalledSaved) {
  for (const bool is_gone : {true, false}) {
    const FitOptions o = in_folder(is_gone ? "gone" : "spoilt");
    const std::string file = o.folder + "/state.safetensors";
    const Toy toy(encoder(), DType::kF32);
    FitHooks hooks;
    hooks.on_step = [&](std::int64_t step) {
      if (step != 5) return;
      if (is_gone) {
        std::filesystem::remove_all(o.folder);
      } else {
        formats::put(file, read_whole(file, "test") + "x");
      }
    };
    const auto objective = [&](Tape& tape, std::int64_t batch) {
      Recorded r = toy.record_batch(tape, batch);
      if (batch == 5) r.loss = ops::add(tape, r.loss, encoder().full({}, DType::kF32, NAN));
      return r;
    };
    const std::string said = formats::message_of(
        [&] { jobs::fit(encoder(), {toy.trainables, uncaptured(objective)}, o, hooks); },
        Errc::kArgument);
    EXPECT_NE(said.find("the checkpoint of step 4 is lost: fit: " + file +
                        (is_gone ? ": is missing" : ": is damaged")),
              std::string::npos)
        << said;
    EXPECT_NE(RunFolder(o.folder).fault(), "");
  }
}

TEST_P(FitResume, AStateIsTakenAway) {
  FitOptions o = in_folder("away");
  o.cosine = false;
  EXPECT_FALSE(RunFolder(o.folder).has_state());
  run(Toy(encoder(), DType::kF32), o);
  EXPECT_TRUE(RunFolder(o.folder).has_state());
  EXPECT_TRUE(std::filesystem::exists(o.folder + "/best.safetensors"));
  FitOptions fewer = o;  // than it has behind it
  fewer.resume = true;
  fewer.iterations = 7;
  expect_error(Errc::kArgument, "8 steps, so iterations must be at least that, got 7",
               [&] { run(Toy(encoder(), DType::kF32), fewer); });
  formats::put(o.folder + "/state.safetensors.tmp12.3", "cut");
  formats::put(o.folder + "/mine.txt", "mine");
  jobs::RunFolder(o.folder).remove();
  EXPECT_FALSE(RunFolder(o.folder).has_state());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(o.folder), {}), 1);
  std::filesystem::remove(o.folder + "/mine.txt");
  jobs::RunFolder(o.folder).remove();  // nothing is there
  EXPECT_FALSE(std::filesystem::exists(o.folder));
}

// Files of these names that no run wrote.
TEST_P(FitResume, WhatIsNotOfARunStays) {
  FitOptions o = in_folder("mine");
  o.cosine = false;
  std::filesystem::create_directory(o.folder);
  const std::string state = o.folder + "/state.safetensors", best = o.folder + "/best.safetensors";
  for (const std::string& file : {best, state}) {
    EXPECT_EQ(jobs::RunFolder(o.folder).new_run_fault(), "");
    formats::put(file, "mine");
    EXPECT_FALSE(jobs::RunFolder::is_best_file(file));
    EXPECT_FALSE(jobs::RunFolder::is_state_file(file));
    expect_error(Errc::kIo, file, [&] { run(Toy(encoder(), DType::kF32), o); });
    jobs::RunFolder(o.folder).remove();
    EXPECT_EQ(read_whole(file, "test"), "mine");
    std::filesystem::remove(file);
  }
  std::filesystem::create_symlink("nowhere", state);
  EXPECT_EQ(jobs::RunFolder(o.folder).new_run_fault(),
            state + ": already exists, belongs to no run, and would be overwritten");
  std::filesystem::remove(state);
  for (const char* name :
       {"/mine.safetensors.tmp12.0", "/a.json.tmp3", "/state.safetensors.tmpx"}) {
    formats::put(o.folder + name, "mine");
  }
  // A run without a validation has no best: one that comes later is not its own.
  const auto fit_without = [&] {
    const Toy toy(encoder(), DType::kF32);
    jobs::FitTask task = toy.task();
    task.validate = nullptr;
    jobs::fit(encoder(), task, o);
  };
  o.iterations = 2;
  fit_without();
  EXPECT_TRUE(jobs::RunFolder::is_state_file(state));
  formats::put(best, "mine");
  expect_error(Errc::kIo, "belongs to another run than the checkpoint next to it", fit_without);
  jobs::RunFolder(o.folder).remove();
  EXPECT_FALSE(std::filesystem::exists(state));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(o.folder), {}), 4);
  std::filesystem::remove(best);
  run(Toy(encoder(), DType::kF32), o);
  EXPECT_TRUE(jobs::RunFolder::is_best_file(best));
  jobs::RunFolder(o.folder).remove();
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(o.folder), {}), 3);
}

// ---- the best ----

TEST_P(FitResume, KeepsTheBest) {
  const Values losses = {5, 3, 4, 2.5, 2.5, 7};  // before the first step and after 2, 4, …
  FitOptions o = in_folder("best", 10);
  Toy toy(encoder(), DType::kBF16);
  std::size_t asked = 0;
  std::vector<std::vector<unsigned char>> after_six;
  FitHooks hooks;
  jobs::FitTask task = toy.task();
  task.validate = [&] {
    return losses[asked++];
  };
  hooks.on_step = [&](std::int64_t step) {
    if (step == 6) after_six = toy.bits();
  };
  const FitResult result = jobs::fit(encoder(), task, o, hooks);
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
  expect_error(Errc::kIo, "best.safetensors must be from step 6",
               [&] { jobs::fit(encoder(), task, o, hooks); });
}

// A run that was killed between a state and its best has an older one, or none.
TEST_P(FitResume, TheBestOfTheStatesOwnStepIsWrittenAgain) {
  const FitOptions o = in_folder("between");
  const std::string file = o.folder + "/best.safetensors";
  std::int64_t steps = 0;
  std::string older;
  FitHooks hooks;
  hooks.on_step = [&](std::int64_t step) {
    steps = step;
  };
  hooks.on_saved = [&](std::int64_t step) {
    if (step == 0) older = read_whole(file, "test");
  };
  hooks.stop = [&] {
    return steps == 2;
  };
  ASSERT_EQ(run(Toy(encoder(), DType::kF32), o, hooks).best_step, 2);
  const std::string best = read_whole(file, "test");
  const std::string state = read_whole(o.folder + "/state.safetensors", "test");
  ASSERT_NE(best, older);
  for (const bool has_older : {true, false}) {
    formats::put(o.folder + "/state.safetensors", state);
    formats::put(o.folder + "/state.safetensors.tmp12.0", "half a state");
    std::filesystem::remove(file);
    if (has_older) formats::put(file, older);
    hooks.stop = [] {
      return true;
    };
    run(Toy(encoder(), DType::kF32), o, hooks);  // one step, no validation
    EXPECT_EQ(steps, 3);
    EXPECT_TRUE(read_whole(file, "test") == best);
    EXPECT_FALSE(std::filesystem::exists(o.folder + "/state.safetensors.tmp12.0"));
  }
}

MT_ON_EVERY_BACKEND(FitResume);

}  // namespace
}  // namespace mlxtape::test
