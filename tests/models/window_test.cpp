// Layers with windows: their caches are rings, which must be as good as caches of every token.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "mlxtape/models/state.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using models::State;
constexpr std::int64_t kVocabulary = 60;

std::vector<std::int32_t> some_tokens(std::size_t n, std::int32_t seed) {
  std::vector<std::int32_t> tokens(n);
  for (std::size_t i = 0; i < n; ++i) {
    tokens[i] = static_cast<std::int32_t>((i * 37 + static_cast<std::size_t>(seed) * 11) % 59);
  }
  return tokens;
}

class Windows : public OnDevice {
 protected:
  // A layer for each window, 0 being none; delta: and a delta net.
  models::Model model_of(const std::vector<std::int64_t>& windows, bool delta = false) {
    models::Config config;
    config.model_type = "by hand";
    models::ModelPlan& plan = config.plan;
    plan.vocabulary = kVocabulary;
    plan.width = 32;
    plan.max_positions = 512;
    plan.initial_deviation = 0.3;
    plan.ropes = {{.base = 5000, .dims = 8}};
    for (const std::int64_t window : windows) {
      models::AttentionPlan attention;
      attention.heads = 4;
      attention.key_heads = 2;
      attention.head_dim = 8;
      attention.window = window;
      plan.layers.push_back({attention, models::SwigluPlan{48}});
    }
    if (delta) {
      plan.layers.push_back({models::DeltaPlan{2, 4, 8, 8, 4, models::DeltaPlan::Rows::kByKind},
                             models::SwigluPlan{48}});
    }
    return models::random_model(config, encoder(), DType::kF32, 3);
  }

  std::vector<float> values(const Tensor& t) {
    std::vector<float> result(static_cast<std::size_t>(t.size()));
    encoder().download(t, result.data(), t.bytes());
    return result;
  }
  // What is left is the order of sums, as in state_test.cpp.
  static void expect_alike(const std::vector<float>& a, const std::vector<float>& b) {
    ASSERT_EQ(a.size(), b.size());
    double most = 0;
    for (const float v : b) most = std::max(most, std::abs(static_cast<double>(v)));
    ASSERT_GT(most, 0);
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(a[i]), static_cast<double>(b[i]), 0x1p-17 * most) << i;
    }
    EXPECT_EQ(std::max_element(a.begin(), a.end()) - a.begin(),
              std::max_element(b.begin(), b.end()) - b.begin());
  }
  // The same tokens into both, and the same logits out of them.
  void expect_go_on_alike(const models::Model& model, State& a, State& b, std::size_t steps,
                          std::int32_t seed) {
    models::Stepper of_a(encoder(), model, a), of_b(encoder(), model, b);
    const auto batch = static_cast<std::size_t>(a.batch());
    for (std::size_t s = 0; s < steps; ++s) {
      const std::vector<std::int32_t> next =
          some_tokens(batch, seed + static_cast<std::int32_t>(s));
      const std::vector<float> got = values(of_a.step(next)), want = values(of_b.step(next));
      for (std::size_t r = 0; r < batch; ++r) {
        const auto row = [&](const std::vector<float>& all) {
          const auto from = all.begin() + static_cast<std::ptrdiff_t>(r * kVocabulary);
          return std::vector<float>(from, from + kVocabulary);
        };
        expect_alike(row(got), row(want));
      }
    }
  }
};

constexpr models::StateOptions kWhole{.rings = false};

TEST_P(Windows, RingsAreAsGoodAsWholeCaches) {
  const models::Model model = model_of({3, 0, 1, 8, 2});
  for (const std::int64_t chunk : {1, 2, 5, 7, 8, 30}) {
    SCOPED_TRACE(chunk);
    State ring(model, 1, 60), whole(model, 1, 60, kWhole);
    const std::vector<std::int32_t> tokens = some_tokens(23, 1);
    expect_alike(values(models::prefill(encoder(), model, ring, 0, tokens, chunk)),
                 values(models::prefill(encoder(), model, whole, 0, tokens, chunk)));
    expect_go_on_alike(model, ring, whole, 11, 5);
    // Prefill goes on after steps.
    expect_alike(values(models::prefill(encoder(), model, ring, 0, tokens, chunk)),
                 values(models::prefill(encoder(), model, whole, 0, tokens, chunk)));
    EXPECT_EQ(ring.length(0), 57);
  }
}

// The same sums in the same order give the same bits: until a ring has gone around once, it is a cache as any other.
TEST_P(Windows, SameBitsUntilFull) {
  const models::Model model = model_of({9, 12});
  State ring(model, 1, 40), whole(model, 1, 40, kWhole);
  const std::vector<std::int32_t> tokens = some_tokens(4, 1);
  EXPECT_EQ(values(models::prefill(encoder(), model, ring, 0, tokens)),
            values(models::prefill(encoder(), model, whole, 0, tokens)));
  models::Stepper of_ring(encoder(), model, ring), of_whole(encoder(), model, whole);
  for (std::int32_t s = 0; s < 5; ++s) {
    EXPECT_EQ(values(of_ring.step({&s, 1})), values(of_whole.step({&s, 1}))) << s;
  }
}

TEST_P(Windows, KeepNoMoreThanTheySee) {
  const models::Model model = model_of({3, 0, 1, 200});
  const std::size_t row = 2 * 2 * 8 * sizeof(float);  // keys and values of two heads
  EXPECT_EQ(State(model, 2, 60).bytes(), 2 * row * (3 + 60 + 1 + 60));
  EXPECT_EQ(State(model, 2, 60, kWhole).bytes(), 2 * row * 4 * 60);
  EXPECT_EQ(State::bytes_of(model.config.plan, DType::kF32, 2, 300), 2 * row * (3 + 300 + 1 + 200));
  EXPECT_EQ(State::bytes_of(model.config.plan, DType::kF32, 2, 300, kWhole), 2 * row * 4 * 300);
}

TEST_P(Windows, SequencesOfDifferentLengths) {
  const models::Model model = model_of({4, 0, 6}, true);
  State ring(model, 3, 40), whole(model, 3, 40, kWhole);
  const std::size_t lengths[] = {1, 4, 17};
  for (std::int64_t b = 0; b < 3; ++b) {
    const std::vector<std::int32_t> tokens =
        some_tokens(lengths[b], static_cast<std::int32_t>(b + 2));
    models::read_on(encoder(), model, ring, b, tokens, 6);
    models::read_on(encoder(), model, whole, b, tokens, 6);
  }
  expect_go_on_alike(model, ring, whole, 14, 3);
}

TEST_P(Windows, ForgetUntilTheyAreFull) {
  const models::Model model = model_of({6, 0});
  State ring(model, 1, 30);
  EXPECT_FALSE(ring.forgets());
  EXPECT_TRUE(State(model, 1, 5).forgets());
  EXPECT_TRUE(State(model, 1, 30, kWhole).forgets());
  const std::vector<std::int32_t> tokens = some_tokens(20, 4);
  models::read_on(encoder(), model, ring, 0, {tokens.data(), 5});
  ring.trim(encoder(), 0, 2);
  State whole(model, 1, 30, kWhole);
  models::read_on(encoder(), model, whole, 0, {tokens.data(), 2});
  expect_alike(values(models::prefill(encoder(), model, ring, 0, tokens, 9)),
               values(models::prefill(encoder(), model, whole, 0, tokens, 9)));
  expect_error(Errc::kArgument, "a window keeps only its last tokens",
               [&] { ring.trim(encoder(), 0, 21); });
  ring.trim(encoder(), 0, 22);
  ring.trim(encoder(), 0, 0);
  whole.trim(encoder(), 0, 0);
  expect_alike(values(models::prefill(encoder(), model, ring, 0, tokens, 3)),
               values(models::prefill(encoder(), model, whole, 0, tokens, 3)));
}

TEST_P(Windows, GrowBeyondTheWindow) {
  const models::Model model = model_of({6, 0, 1, 25});
  State ring(model, 2, 5), whole(model, 2, 5, kWhole);
  for (State* state : {&ring, &whole}) {
    models::read_on(encoder(), model, *state, 0, some_tokens(5, 1));
    models::read_on(encoder(), model, *state, 1, some_tokens(2, 2));
  }
  for (const std::int64_t capacity : {6, 8, 24, 25, 50}) {
    const std::int64_t more = capacity - ring.length(0);
    for (State* state : {&ring, &whole}) state->grow(encoder(), capacity);
    EXPECT_EQ(ring.bytes(), State::bytes_of(model.config.plan, DType::kF32, 2, capacity));
    expect_go_on_alike(model, ring, whole, static_cast<std::size_t>(more), 7);
  }
}

TEST_P(Windows, MarksSnapshotsAndFiles) {
  const std::string path =
      (std::filesystem::temp_directory_path() / "mlxtape_window_test.safetensors").string();
  const models::Model model = model_of({4, 0, 7});
  for (const std::size_t before : {3U, 6U, 15U}) {
    SCOPED_TRACE(before);
    const std::vector<std::int32_t> first = some_tokens(before, 5), more = some_tokens(9, 6);
    State state(model, 2, 40);
    models::read_on(encoder(), model, state, 0, more);
    models::read_on(encoder(), model, state, 1, first);
    const State::Mark mark = state.mark(encoder(), 1);
    EXPECT_EQ(mark.caches.size(), 2U);
    const State then = state.snapshot(encoder());
    state.save(path);
    const auto go_on = [&](State& from) {
      return values(models::prefill(encoder(), model, from, 1, more, 4));
    };
    const std::vector<float> want = go_on(state);
    state.rewind(encoder(), 1, mark);
    EXPECT_EQ(go_on(state), want);
    state.restore(encoder(), then);
    EXPECT_EQ(go_on(state), want);
    State smaller = State::load(model, path, 24), whole(model, 2, 40, kWhole);
    EXPECT_EQ(go_on(smaller), want);
    models::read_on(encoder(), model, whole, 1, first);
    expect_alike(go_on(whole), want);
  }
  // A mark that was made before there was room for a whole window.
  State state(model, 1, 5);
  models::read_on(encoder(), model, state, 0, some_tokens(4, 1));
  const State::Mark mark = state.mark(encoder(), 0);
  state.grow(encoder(), 40);
  const std::vector<float> want =
      values(models::prefill(encoder(), model, state, 0, some_tokens(20, 2)));
  state.rewind(encoder(), 0, mark);
  EXPECT_EQ(values(models::prefill(encoder(), model, state, 0, some_tokens(20, 2))), want);
  std::filesystem::remove(path);
}

MT_ON_EVERY_BACKEND(Windows);

}  // namespace
}  // namespace mlxtape::test
