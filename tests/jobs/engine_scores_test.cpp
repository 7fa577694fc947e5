// Prompts that are scored: what their log-probabilities are, what they cost, and that nothing else changes by them.
#include "jobs/engine_support.h"

#include <cmath>
#include <limits>

namespace mlxtape::test {
namespace {

using jobs::Choice;
using jobs::Engine;
using jobs::EngineOptions;
using jobs::Request;
using jobs::Score;

class EngineScores : public Engines {
 protected:
  // log_softmax in double of the logits that the whole model gives at once, [length][vocabulary].
  std::vector<std::vector<double>> expected(const models::Model& model, const Tokens& prompt) {
    const auto length = static_cast<std::int64_t>(prompt.size());
    const Tensor ids = encoder().empty({1, length}, DType::kI32);
    encoder().upload(prompt.data(), ids.bytes(), ids);
    Tape tape(encoder());
    const std::vector<double> z =
        download(models::logits(tape, model, models::hidden(tape, model, ids)));
    const std::size_t classes = z.size() / prompt.size();
    std::vector<std::vector<double>> rows;
    for (std::size_t t = 0; t < prompt.size(); ++t) {
      std::vector<double> row(z.begin() + static_cast<std::ptrdiff_t>(t * classes),
                              z.begin() + static_cast<std::ptrdiff_t>((t + 1) * classes));
      double sum = 0;
      for (const double v : row) sum += std::exp(v);
      for (double& v : row) v -= std::log(sum);
      rows.push_back(std::move(row));
    }
    return rows;
  }

  void expect_scores(const models::Model& model, const Request& request,
                     const std::vector<Score>& got) {
    const auto want = expected(model, request.prompt);
    std::size_t i = 0;
    for (std::size_t t = 0; t < request.targets.size(); ++t) {
      const std::int32_t target = request.targets[t];
      if (target < 0) continue;
      ASSERT_LT(i, got.size());
      EXPECT_EQ(got[i].at, static_cast<std::int64_t>(t));
      EXPECT_EQ(got[i].token, target);
      EXPECT_NEAR(got[i].logprob, want[t][static_cast<std::size_t>(target)], 1e-4) << t;
      ++i;
    }
    EXPECT_EQ(i, got.size());
  }

  static void read_all(Engine& engine) {
    while (engine.is_busy()) EXPECT_TRUE(engine.step().empty());
  }
};

// Its own next tokens, without some of them.
Request scored(std::size_t length, std::int32_t seed, std::size_t leave_out = 0) {
  Request request{some_prompt(length, seed)};
  request.generate = false;
  request.targets = {request.prompt.begin() + 1, request.prompt.end()};
  for (std::size_t i = 0; i < request.targets.size(); ++i) {
    if (leave_out > 0 && i % leave_out == 0) request.targets[i] = -1;
  }
  return request;
}

TEST_P(EngineScores, AreWhatLogSoftmaxSays) {
  for (const std::string& type : model_types()) {
    const models::Model model = lively_model(encoder(), type);
    // In one go, in chunks, and a few rows of logits at a time.
    for (const std::int64_t chunk : {2048, 5, 1}) {
      for (const std::int64_t rows : {0, 3}) {
        SCOPED_TRACE(type + " " + std::to_string(chunk) + " " + std::to_string(rows));
        Engine engine(encoder(), model, {.slots = 1, .prefill_chunk = chunk, .score_rows = rows});
        Request request = scored(12, 2, 3);
        request.targets.push_back(7);  // what might come next
        engine.admit(request);
        EXPECT_FALSE(engine.has_free_slot());
        read_all(engine);
        EXPECT_FALSE(engine.has_free_slot());
        expect_scores(model, request, engine.take_scores(0));
        EXPECT_TRUE(engine.take_scores(0).empty());
        // Without a state where one chunk was enough.
        EXPECT_EQ(engine.held(0), chunk > 12 ? 0 : 12);
        engine.cancel(0);
        EXPECT_TRUE(engine.has_free_slot());
      }
    }
  }
}

// Side by side, of many lengths, with fewer slots than prompts: each as if it were alone.
TEST_P(EngineScores, ManyPrompts) {
  for (const std::string& type : model_types()) {
    SCOPED_TRACE(type);
    const models::Model model = lively_model(encoder(), type);
    Engine engine(encoder(), model, {.slots = 4, .prefill_chunk = 24});
    std::vector<Request> requests;
    for (const std::size_t length : {7, 11, 3, 23, 30, 2, 2, 9}) {
      requests.push_back(scored(length, static_cast<std::int32_t>(requests.size())));
    }
    requests[1].targets.back() = -1;  // is read less far
    std::size_t next = 0, done = 0;
    std::vector<std::size_t> request_of(4);
    while (done < requests.size()) {
      while (next < requests.size() && engine.has_free_slot()) {
        request_of[static_cast<std::size_t>(engine.admit(requests[next]))] = next;
        ++next;
      }
      read_all(engine);
      for (std::int64_t s = 0; s < 4 && done < requests.size(); ++s) {
        expect_scores(model, requests[request_of[static_cast<std::size_t>(s)]],
                      engine.take_scores(s));
        engine.cancel(s);
        ++done;
      }
    }
  }
}

// As many at once as fit a chunk, in the order of admission.
TEST_P(EngineScores, ShareAStep) {
  const models::Model model = lively_model(encoder(), "qwen3_next");
  std::vector<Shape> passes;
  std::vector<std::int64_t> read;
  EngineOptions options;
  options.slots = 4;
  options.prefill_chunk = 20;
  options.on_hidden = [&](const Tensor& hidden) {
    passes.push_back(hidden.shape());
    return true;
  };
  options.on_read = [&](std::int64_t slot, std::int64_t done, std::int64_t all) {
    if (done == all) read.push_back(slot);
  };
  Engine engine(encoder(), model, options);
  for (const std::size_t length : {6, 11, 4, 3}) engine.admit(scored(length, 1));
  const auto steps = [&] {
    std::size_t count = 0;
    for (; engine.is_busy(); ++count) engine.step();
    return count;
  };
  EXPECT_EQ(steps(), 2U);  // 5 and 10 tokens, padded to 10 each; then 3 and 2
  EXPECT_EQ(passes, (std::vector<Shape>{{15, 64}, {5, 64}}));
  EXPECT_EQ(read, (std::vector<std::int64_t>{0, 1, 2, 3}));
  for (std::int64_t s = 0; s < 4; ++s) engine.cancel(s);
  // One that goes on is not among them, and neither are those after it.
  engine.admit(scored(5, 1));
  engine.admit({some_prompt(5, 2)});
  engine.admit(scored(5, 3));
  engine.step();
  EXPECT_EQ(passes.back(), (Shape{4, 64}));
  EXPECT_EQ(engine.step().size(), 1U);
  EXPECT_EQ(engine.step().size(), 1U);  // their turn
  EXPECT_TRUE(engine.step().empty());
  EXPECT_EQ(passes.size(), 4U);
}

// Scores of a prompt that goes on: what it says afterwards has the same bits.
TEST_P(EngineScores, DoNotChangeWhatIsChosen) {
  for (const std::string& type : model_types()) {
    for (const std::int64_t chunk : {2048, 4}) {
      SCOPED_TRACE(type + " " + std::to_string(chunk));
      const models::Model model = lively_model(encoder(), type);
      const auto run = [&](const Request& request, std::vector<Score>& scores) {
        Engine engine(encoder(), model, {.slots = 1, .prefill_chunk = chunk, .logprobs = true});
        engine.admit(request);
        std::vector<std::pair<std::int32_t, float>> said;
        while (said.size() < 12) {
          for (const Choice& choice : engine.step())
            said.emplace_back(choice.token, choice.logprob);
        }
        scores = engine.take_scores(0);
        return said;
      };
      const Request plain = drawn(13, 3);
      Request echo = plain;
      echo.targets = {echo.prompt.begin() + 1, echo.prompt.end()};
      std::vector<Score> none, scores;
      EXPECT_EQ(run(echo, scores), run(plain, none));
      EXPECT_TRUE(none.empty());
      expect_scores(model, echo, scores);
    }
  }
}

TEST_P(EngineScores, MostLikelyTokens) {
  const models::Model model = lively_model(encoder(), "qwen3_5_moe");
  for (const std::int64_t chunk : {2048, 4}) {
    EngineOptions options;
    options.prefill_chunk = chunk;
    options.score_rows = 2;
    options.logprobs = true;
    Engine engine(encoder(), model, options);
    const Request request = scored(9, 4, 2);
    engine.admit(request);
    read_all(engine);
    const auto want = expected(model, request.prompt);
    const std::vector<Score> scores = engine.take_scores(0);
    ASSERT_EQ(scores.size(), 4U);
    for (const Score& score : scores) {
      const std::vector<double>& row = want[static_cast<std::size_t>(score.at)];
      std::vector<double> sorted = row;
      std::sort(sorted.rbegin(), sorted.rend());
      ASSERT_EQ(score.top.size(), 20U);
      for (std::size_t i = 0; i < 20; ++i) {
        const auto& [token, logprob] = score.top[i];
        EXPECT_NEAR(logprob, row[static_cast<std::size_t>(token)], 1e-4);
        EXPECT_NEAR(logprob, sorted[i], 1e-4);
      }
    }
  }
}

// Positions to be scored are read though the past holds them; those before are not.
TEST_P(EngineScores, AfterAPast) {
  for (const char* type : {"qwen3", "qwen3_next"}) {
    SCOPED_TRACE(type);
    const models::Model model = lively_model(encoder(), type);
    Engine engine(encoder(), model, {.slots = 1});
    Request first{some_prompt(10, 2)};
    engine.admit(first);
    finish(engine, 1);
    EXPECT_EQ(engine.held(0), 10);
    Request again = scored(14, 2);
    std::fill(again.targets.begin(), again.targets.begin() + 10, -1);
    engine.admit(again);
    EXPECT_EQ(engine.kept(0), 10);
    read_all(engine);
    expect_scores(model, again, engine.take_scores(0));
    EXPECT_EQ(engine.held(0), 13);
    engine.cancel(0);
    again.targets[6] = 3;
    engine.admit(again);
    EXPECT_EQ(engine.kept(0), std::string(type) == "qwen3" ? 6 : 0);
    read_all(engine);
    expect_scores(model, again, engine.take_scores(0));
  }
}

// Rows of logits come to a program that wants all of them, or none is made.
TEST_P(EngineScores, WholeRows) {
  const models::Model model = lively_model(encoder(), "qwen3");
  std::vector<double> seen, hidden_seen;
  bool wanted = true;
  EngineOptions options;
  options.slots = 2;
  options.score_rows = 4;
  options.on_hidden = [&](const Tensor& hidden) {
    hidden_seen = download(hidden);
    return wanted;
  };
  options.on_logits = [&](std::int64_t start, std::int64_t stop, const Tensor& logits) {
    EXPECT_EQ(start * 80, std::ssize(seen));
    EXPECT_EQ(logits.shape(), (Shape{stop - start, 80}));
    const std::vector<double> rows = download(logits);
    seen.insert(seen.end(), rows.begin(), rows.end());
  };
  Engine engine(encoder(), model, options);
  const Request a = scored(6, 1), b = scored(8, 2, 2);
  engine.admit(a);
  engine.admit(b);
  read_all(engine);
  std::size_t row = 0;
  for (const Request& request : {a, b}) {
    const auto want = expected(model, request.prompt);
    for (std::size_t t = 0; t < request.targets.size(); ++t) {
      if (request.targets[t] < 0) continue;
      double sum = 0;
      for (std::size_t v = 0; v < 80; ++v) sum += std::exp(seen[row * 80 + v]);
      for (std::size_t v = 0; v < 80; ++v) {
        EXPECT_NEAR(seen[row * 80 + v] - std::log(sum), want[t][v], 1e-4);
      }
      ++row;
    }
  }
  EXPECT_EQ(row * 80, seen.size());
  EXPECT_EQ(hidden_seen.size(), row * 64);
  engine.cancel(0);
  engine.cancel(1);
  wanted = false;
  engine.admit(a);
  read_all(engine);
  EXPECT_TRUE(engine.take_scores(0).empty());
  EXPECT_EQ(row * 80, seen.size());
}

// With a large vocabulary, logits of all positions are far more than what there is at any time.
TEST_P(EngineScores, HoldFewLogits) {
  formats::Json json = small_config("qwen3_next");
  json.set("vocab_size", 20000);
  const models::Model model =
      models::random_model(models::Config::parse(json, "large"), encoder(), DType::kF32, 1);
  for (const std::int64_t chunk : {2048, 256}) {
    Engine engine(encoder(), model,
                  {.slots = 1, .context = 1025, .prefill_chunk = chunk, .score_rows = 64});
    MemoryPool& memory = encoder().device().memory();
    memory.reset_peak();
    const auto before = memory.stats().current;
    engine.admit(scored(1025, 1));
    read_all(engine);
    EXPECT_EQ(engine.take_scores(0).size(), 1024U);
    EXPECT_LT(memory.stats().peak - before, std::size_t{1024} * 20000 * 4 / 2 + product_room());
  }
}

TEST_P(EngineScores, LongerThanTheModel) {
  const models::Model model = lively_model(encoder(), "qwen3");
  for (const std::int64_t chunk : {2048, 200}) {
    std::vector<std::int64_t> heard;
    EngineOptions options;
    options.context = 600;
    options.prefill_chunk = chunk;
    options.on_beyond = [&](std::int64_t tokens, std::int64_t positions) {
      heard = {tokens, positions};
    };
    Engine engine(encoder(), model, options);
    engine.admit(scored(513, 1));  // the last is not read
    read_all(engine);
    EXPECT_TRUE(heard.empty());
    engine.cancel(0);
    engine.admit(scored(600, 2));
    read_all(engine);
    EXPECT_EQ(heard, (std::vector<std::int64_t>{599, 512}));
  }
}

TEST_P(EngineScores, SaysWhatIsWrong) {
  const models::Model model = small_model(encoder(), "qwen3");
  expect_error(Errc::kArgument, "score_rows must be at least 0, got -1",
               [&] { Engine none(encoder(), model, {.score_rows = -1}); });
  Engine engine(encoder(), model, {.slots = 1, .context = 12});
  const auto refused = [&](Errc code, const std::string& says, const Request& request) {
    expect_error(code, says, [&] { engine.admit(request); });
    EXPECT_TRUE(engine.has_free_slot());
  };
  Request request = scored(5, 1);
  request.targets.resize(6, 1);
  refused(Errc::kArgument, "a prompt of 5 tokens must have at most as many targets, got 6",
          request);
  request.targets = {1, 80};
  refused(Errc::kIo, "a target must be in the vocabulary of 80, got 80", request);
  request.targets = {1, -2};
  refused(Errc::kIo, "a target must be in the vocabulary of 80, got -2", request);
  request.targets = {-1, -1};
  refused(Errc::kArgument, "must have a target, got none", request);
  refused(Errc::kArgument, "1 to 12 tokens, got 13", scored(13, 1));
  expect_error(Errc::kArgument, "from 0 to 0, got 1", [&] { engine.take_scores(1); });
  engine.admit(scored(12, 1));  // nothing comes after it
  read_all(engine);
  EXPECT_EQ(engine.take_scores(0).size(), 11U);

  models::Model broken = model;
  broken.weights.norm = encoder().full(model.weights.norm.shape(), DType::kF32, NAN);
  Engine ill(encoder(), broken, {});
  ill.admit(scored(4, 1));
  read_all(ill);
  for (const Score& score : ill.take_scores(0)) EXPECT_TRUE(std::isnan(score.logprob));
}

MT_ON_EVERY_BACKEND(EngineScores);

}  // namespace
}  // namespace mlxtape::test
