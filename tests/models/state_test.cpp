#include "mlxtape/models/state.h"

#include <cmath>
#include <filesystem>
#include <numeric>

#include "mlxtape/base/files.h"
#include "mlxtape/ops/elementwise.h"
#include "small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using models::State;

std::vector<std::int32_t> some_tokens(std::size_t n, std::int32_t seed) {
  std::vector<std::int32_t> tokens(n);
  for (std::size_t i = 0; i < n; ++i) {
    tokens[i] = static_cast<std::int32_t>((i * 37 + static_cast<std::size_t>(seed) * 11) % 80);
  }
  return tokens;
}

class ModelState : public OnDevice {
 protected:
  std::vector<float> values(const Tensor& t) {
    std::vector<float> result(static_cast<std::size_t>(t.size()));
    encoder().download(t, result.data(), t.bytes());
    return result;
  }
  // Two ways to the same logits, in f32: what is left is the order of sums, 2⁻²⁴ of terms about as large as the
  // largest logit, through a few layers of them.
  static void expect_alike(const std::vector<float>& a, const std::vector<float>& b) {
    ASSERT_EQ(a.size(), b.size());
    double most = 0;
    for (const float v : b) most = std::max(most, std::abs(static_cast<double>(v)));
    ASSERT_GT(most, 0);
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(a[i]), static_cast<double>(b[i]), 0x1p-17 * most) << i;
    }
  }
  // Of the last token, all at once and without a state.
  std::vector<float> at_once(const models::Model& model, const std::vector<std::int32_t>& tokens) {
    Tape tape(encoder());
    const auto n = static_cast<std::int64_t>(tokens.size());
    const Tensor ids = encoder().empty({1, n}, DType::kI32);
    encoder().upload(tokens.data(), ids.bytes(), ids);
    const Tensor all = models::logits(tape, model, models::hidden(tape, model, ids));
    return values(encoder().contiguous(all.slice(1, n - 1, n)));
  }
};

TEST_P(ModelState, ChunksAndSteps) {
  for (const std::string& type : model_types()) {
    SCOPED_TRACE(type);
    const models::Model model = small_model(encoder(), type);
    const std::vector<std::int32_t> tokens = some_tokens(23, 1);
    const std::vector<float> want = at_once(model, tokens);
    State state(model, 1, 23);
    expect_alike(values(models::prefill(encoder(), model, state, 0, tokens, 5)), want);
    EXPECT_EQ(state.length(0), 23);
    state.trim(encoder(), 0, 0);
    expect_alike(values(models::prefill(encoder(), model, state, 0, {tokens.data(), 4})),
                 at_once(model, {tokens.begin(), tokens.begin() + 4}));
    models::Stepper stepper(encoder(), model, state);
    for (std::size_t i = 4; i < tokens.size(); ++i) {
      const std::vector<float> got = values(stepper.step({&tokens[i], 1}));
      if (i % 6 == 4) {
        expect_alike(got, at_once(model, {tokens.begin(),
                                          tokens.begin() + static_cast<std::ptrdiff_t>(i) + 1}));
      }
    }
    EXPECT_EQ(state.length(0), 23);
    expect_error(Errc::kArgument, "capacity of 23 tokens is used up",
                 [&] { stepper.step({tokens.data(), 1}); });
    expect_error(Errc::kArgument, "do not fit into a capacity of 23",
                 [&] { models::prefill(encoder(), model, state, 0, tokens); });
    state.trim(encoder(), 0, 0);  // a step may be the first as well, and finds nothing of before
    expect_alike(values(stepper.step({tokens.data(), 1})), at_once(model, {tokens[0]}));
  }
}

TEST_P(ModelState, Grows) {
  for (const std::string& type : model_types()) {
    SCOPED_TRACE(type);
    const models::Model model = small_model(encoder(), type);
    const std::vector<std::int32_t> tokens = some_tokens(20, 5), other = some_tokens(7, 6);
    State state(model, 2, 9);
    models::prefill(encoder(), model, state, 0, {tokens.data(), 5});
    models::prefill(encoder(), model, state, 1, {other.data(), 3});
    for (std::size_t i = 0; i < 15; ++i) {
      if (i == 4) state.grow(encoder(), 10);
      if (i == 5) state.grow(encoder(), 20);
      const std::int32_t next[] = {tokens[5 + i], other[3 + i % 4]};
      models::Stepper stepper(encoder(), model, state);
      const std::vector<float> got = values(stepper.step(next));
      ASSERT_EQ(got.size(), 160U);
      const std::vector<std::int32_t> so_far(tokens.begin(),
                                             tokens.begin() + 6 + static_cast<std::ptrdiff_t>(i));
      if (i > 2) expect_alike({got.begin(), got.begin() + 80}, at_once(model, so_far));
    }
    EXPECT_EQ(state.capacity(), 20);
    EXPECT_EQ(state.length(0), 20);
    EXPECT_EQ(state.bytes(), State::bytes_of(model.config.plan, model.dtype(), 2, 20));
    expect_error(Errc::kArgument, "can grow to 20 tokens or more, not to 19",
                 [&] { state.grow(encoder(), 19); });
  }
}

// Sequences of different lengths side by side are as good as each alone.
TEST_P(ModelState, SequencesSideBySide) {
  for (const std::string& type : model_types()) {
    SCOPED_TRACE(type);
    const models::Model model = small_model(encoder(), type);
    const std::vector<std::vector<std::int32_t>> prompts = {some_tokens(9, 2), some_tokens(3, 3),
                                                            some_tokens(14, 4)};
    State state(model, 3, 20);
    for (std::size_t b = 0; b < prompts.size(); ++b) {
      models::prefill(encoder(), model, state, static_cast<std::int64_t>(b), prompts[b], 4);
    }
    models::Stepper stepper(encoder(), model, state);
    std::vector<std::vector<std::int32_t>> so_far = prompts;
    for (std::int32_t step = 0; step < 3; ++step) {
      std::vector<std::int32_t> next;
      for (auto& tokens : so_far) {
        next.push_back((step * 5 + static_cast<std::int32_t>(tokens.size())) % 80);
        tokens.push_back(next.back());
      }
      const std::vector<float> got = values(stepper.step(next));
      for (std::size_t b = 0; b < so_far.size(); ++b) {
        const auto row = got.begin() + static_cast<std::ptrdiff_t>(b) * 80;
        expect_alike({row, row + 80}, at_once(model, so_far[b]));
      }
    }
  }
}

TEST_P(ModelState, SnapshotsAndFiles) {
  const std::string path =
      (std::filesystem::temp_directory_path() / "mlxtape_state_test.safetensors").string();
  for (const std::string& type : model_types()) {
    SCOPED_TRACE(type);
    const models::Model model = small_model(encoder(), type);
    const std::vector<std::int32_t> first = some_tokens(7, 5), second = some_tokens(4, 6);
    State state(model, 2, 16);
    models::prefill(encoder(), model, state, 0, first);
    models::prefill(encoder(), model, state, 1, second);
    const State then = state.snapshot(encoder());
    state.save(path);
    const auto go_on = [&](State& from) {
      return values(models::prefill(encoder(), model, from, 1, first));
    };
    const std::vector<float> want = go_on(state);
    EXPECT_EQ(state.length(1), 11);
    state.restore(encoder(), then);
    EXPECT_EQ(state.length(1), 4);
    EXPECT_EQ(go_on(state), want);
    State loaded = State::load(model, path, 30);
    EXPECT_EQ(loaded.length(0), 7);
    expect_alike(go_on(loaded), want);

    State other(model, 2, 17);
    expect_error(Errc::kShape, "snapshot of the same model",
                 [&] { other.restore(encoder(), then); });
    models::Config fewer = model.config;
    fewer.plan.layers.resize(2);
    const models::Model shallow = models::random_model(fewer, encoder(), DType::kF32, 1);
    expect_error(Errc::kIo, "has 8 tensors, this model's states have 4",
                 [&] { State::load(shallow, path, 30); });
    expect_error(Errc::kArgument, "the token 80 is not in the model's vocabulary of 80", [&] {
      const std::int32_t bad[] = {1, 80};
      models::prefill(encoder(), model, other, 0, bad);
    });
    expect_error(Errc::kIo, "capacity is 6", [&] { State::load(model, path, 6); });
    const models::Model wider = small_model(encoder(), type, DType::kBF16);
    expect_error(Errc::kIo, "for this model", [&] { State::load(wider, path, 30); });
    if (type == "qwen3") {
      state.trim(encoder(), 1, 4);
      expect_alike(go_on(state), want);
    } else {
      expect_error(Errc::kArgument, "cannot drop", [&] { state.trim(encoder(), 1, 4); });
    }
    expect_error(Errc::kArgument, "0 to 11", [&] { state.trim(encoder(), 1, 12); });
    expect_error(Errc::kArgument, "from 0 to 1, got 2",
                 [&] { static_cast<void>(state.length(2)); });
  }
  write_whole(path, "nothing", "test");
  const models::Model model = small_model(encoder(), "qwen3");
  expect_error(Errc::kIo, path, [&] { State::load(model, path, 30); });
  std::filesystem::remove(path);
}

// Back to where a mark was made, also of one sequence of several, as if nothing had come since.
TEST_P(ModelState, Marks) {
  for (const std::string& type : model_types()) {
    SCOPED_TRACE(type);
    const models::Model model = small_model(encoder(), type);
    const std::vector<std::int32_t> first = some_tokens(7, 5), second = some_tokens(4, 6);
    State state(model, 2, 24);
    EXPECT_EQ(state.bytes(), State::bytes_of(model.config.plan, model.dtype(), 2, 24));
    models::prefill(encoder(), model, state, 0, first);
    models::prefill(encoder(), model, state, 1, second);
    const State::Mark mark = state.mark(encoder(), 1);
    const std::vector<float> want = values(models::prefill(encoder(), model, state, 1, first));
    models::prefill(encoder(), model, state, 0, second);
    state.rewind(encoder(), 1, mark);
    EXPECT_EQ(state.length(0), 11);
    EXPECT_EQ(state.length(1), 4);
    EXPECT_EQ(values(models::prefill(encoder(), model, state, 1, first)), want);

    state.trim(encoder(), 1, 0);
    expect_error(Errc::kArgument, "at most 0 tokens", [&] { state.rewind(encoder(), 1, mark); });
    State::Mark other = mark;
    other.caches.emplace_back();
    expect_error(Errc::kArgument, "this sequence's own",
                 [&] { state.rewind(encoder(), 0, other); });
  }
}

// A step that has been captured gives the same bits each time, on any number of threads.
TEST_P(ModelState, SameBits) {
  const models::Model model = small_model(encoder(), "qwen3_next", DType::kBF16);
  const std::vector<std::int32_t> tokens = some_tokens(9, 7);
  State state(model, 1, 16);
  models::prefill(encoder(), model, state, 0, tokens);
  const State then = state.snapshot(encoder());
  models::Stepper stepper(encoder(), model, state);
  expect_repeatable(encoder(), [&] {
    state.restore(encoder(), then);
    const Tensor& logits = stepper.step({tokens.data(), 1});
    const Tensor copy = encoder().empty_like(logits);
    encoder().copy(logits, copy);
    return std::vector<Tensor>{copy};
  });
}

MT_ON_EVERY_BACKEND(ModelState);

}  // namespace
}  // namespace mlxtape::test
