#include "jobs/fit_support.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace mlxtape::test {

void FitTest::expect_resumable(DType dtype, const FitOptions& parts, std::int64_t k,
                               const Toy& whole, const FitResult& want) {
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

void FitTest::expect_survives_kills(FitOptions o, int kills) {
  o.save_every = 1;
  o.accumulation = 2;
  const Toy whole(encoder(), DType::kBF16);
  FitOptions alone = o;
  alone.folder.clear();
  alone.resume = false;
  const FitResult want = run(whole, alone);

  // Others are drawn with --gtest_random_seed.
  const auto seed = static_cast<unsigned>(GTEST_FLAG_GET(random_seed));
  std::mt19937 bits(seed);
  int killed = 0;
  for (int i = 0; i < kills; ++i) {
    const unsigned wait = bits() % 12000;
    SCOPED_TRACE("seed " + std::to_string(seed) + ", killed after us: " + std::to_string(wait));
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

}  // namespace mlxtape::test
