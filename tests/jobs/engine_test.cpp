#include "jobs/engine_support.h"

#include <cmath>

#include "mlxtape/jobs/not_finite.h"

namespace mlxtape::test {
namespace {

using jobs::Choice;
using jobs::Engine;
using jobs::EngineOptions;
using jobs::Request;

// Greedy ones, drawn ones with every filter, penalties and biases beside each other: each as if it were alone.
TEST_P(Engines, AnyMixtureOfRows) {
  for (const std::string& type : model_types()) {
    SCOPED_TRACE(type);
    const models::Model model = lively_model(encoder(), type);
    std::vector<Request> requests = {
        {some_prompt(5, 1)}, drawn(9, 4), drawn(2, 7), drawn(6, 4), drawn(7, 9)};
    requests[1].sampling.top_p = 0.9;
    requests[2].sampling.top_k = 5;
    requests[2].sampling.repetition_penalty = 1.3;
    requests[3].sampling.min_p = 0.02;
    requests[3].sampling.presence_penalty = 0.5;
    requests[3].sampling.frequency_penalty = 0.4;
    requests[4].sampling.logit_bias = {{3, 4.0F}, {8, -INFINITY}};
    EngineOptions options;
    options.slots = 5;
    options.first_room = 1;
    options.prefill_chunk = 4;
    Engine engine(encoder(), model, options);
    for (std::int64_t s = 0; s < 5; ++s) {
      EXPECT_EQ(engine.admit(requests[static_cast<std::size_t>(s)]), s);
    }
    EXPECT_FALSE(engine.has_free_slot());
    std::map<std::int64_t, Tokens> said = finish(engine, 20);
    for (std::int64_t s = 0; s < 5; ++s) {
      EXPECT_EQ(said[s], alone(model, requests[static_cast<std::size_t>(s)], 20)) << s;
      EXPECT_EQ(std::count(said[4].begin(), said[4].end(), 8), 0);
    }
    // Another seed says something else.
    Request other = requests[1];
    other.sampling.seed = 5;
    EXPECT_NE(alone(model, other, 20), said[1]);
  }
}

// One comes while another goes on, takes a slot that is free, and ends before it.
TEST_P(Engines, ComingAndGoing) {
  for (const char* type : {"qwen3", "qwen3_next"}) {
    SCOPED_TRACE(type);
    const models::Model model = lively_model(encoder(), type);
    const Request first = drawn(6, 1), second = drawn(3, 2), third = drawn(11, 3);
    Engine engine(encoder(), model, {.slots = 2, .first_room = 4});
    std::map<std::int64_t, Tokens> said;
    const auto step = [&](int times) {
      for (int i = 0; i < times; ++i) {
        for (const Choice& choice : engine.step()) said[choice.slot].push_back(choice.token);
      }
    };
    EXPECT_EQ(engine.admit(first), 0);
    step(4);
    EXPECT_EQ(engine.admit(second), 1);
    EXPECT_TRUE(engine.is_reading());
    step(3);
    EXPECT_FALSE(engine.is_reading());
    engine.cancel(1);
    EXPECT_EQ(said[1], alone(model, second, 3));
    step(2);
    EXPECT_EQ(engine.held(1), 0);  // steps of the other took it away
    said[1].clear();
    EXPECT_EQ(engine.admit(third), 1);
    step(7);
    EXPECT_EQ(said[0], alone(model, first, said[0].size()));
    EXPECT_EQ(said[1], alone(model, third, 7));
    engine.cancel(0);
    engine.cancel(1);
    EXPECT_TRUE(engine.step().empty());
  }
}

// Presence and frequency penalties look at the answer, not at the prompt.
TEST_P(Engines, PenaltiesOfTheAnswer) {
  const models::Model model = lively_model(encoder(), "qwen3");
  for (const bool presence : {true, false}) {
    Request request{some_prompt(5, 1)};
    const std::int32_t token = request.prompt[2];
    request.sampling.logit_bias = {{token, 100.0F}};
    (presence ? request.sampling.presence_penalty : request.sampling.frequency_penalty) = 1000;
    const Tokens said = alone(model, request, 2);
    EXPECT_EQ(said[0], token);
    EXPECT_NE(said[1], token);
  }
}

// What comes back is what log_softmax makes of the model's logits.
TEST_P(Engines, Logprobs) {
  const models::Model model = lively_model(encoder(), "qwen3_next");
  Request request = drawn(8, 2);
  request.sampling.logit_bias = {{2, 3.0F}};  // changes what is chosen, not what the model said
  EngineOptions options;
  options.slots = 2;
  options.logprobs = true;
  Engine engine(encoder(), model, options);
  engine.admit(drawn(5, 9));
  engine.step();
  EXPECT_EQ(engine.admit(request), 1);
  Tokens so_far = request.prompt;
  for (int i = 0; i < 5; ++i) {
    std::vector<Choice> choices = engine.step();
    while (choices.empty() || choices.back().slot != 1) choices = engine.step();
    choices.erase(choices.begin(), choices.end() - 1);
    models::State state(model, 1, 32);
    const std::vector<double> z = download(models::prefill(encoder(), model, state, 0, so_far));
    double sum = 0;
    for (const double v : z) sum += std::exp(v);
    const auto of = [&](std::int32_t token) {
      return z[static_cast<std::size_t>(token)] - std::log(sum);
    };
    EXPECT_NEAR(choices[0].logprob, of(choices[0].token), 1e-4);
    ASSERT_EQ(choices[0].top.size(), 20U);
    double before = 0;
    for (const auto& [token, logprob] : choices[0].top) {
      EXPECT_NEAR(logprob, of(token), 1e-4);
      EXPECT_LE(static_cast<double>(logprob), before);
      before = static_cast<double>(logprob);
    }
    so_far.push_back(choices[0].token);
  }
}

// A prompt that begins as a past does is read from there on: exactly where it can be, for delta nets from the mark.
TEST_P(Engines, PastsAreUsedAgain) {
  for (const char* type : {"qwen3", "qwen3_next"}) {
    SCOPED_TRACE(type);
    const bool forgets = std::string(type) == "qwen3";
    const models::Model model = lively_model(encoder(), type);
    Engine engine(encoder(), model, {.slots = 1, .prefill_chunk = 3});
    Request request{some_prompt(10, 2)};
    request.mark_at = 7;
    engine.admit(request);
    const Tokens answer = finish(engine, 4)[0];
    EXPECT_EQ(engine.held(0), 13);  // the last one was not read

    Request more = request;  // goes on from all of it
    more.prompt.insert(more.prompt.end(), answer.begin(), answer.end());
    more.prompt.push_back(1);
    more.mark_at = 0;
    engine.admit(more);
    EXPECT_EQ(engine.kept(0), 13);
    EXPECT_EQ(finish(engine, 4)[0], alone(model, more, 4));

    Request other = request;  // leaves it after 8 tokens
    other.prompt.resize(8);
    other.prompt.push_back(79);
    other.prompt.push_back(2);
    engine.admit(other);
    EXPECT_EQ(engine.kept(0), forgets ? 8 : 7);
    EXPECT_EQ(finish(engine, 4)[0], alone(model, other, 4));

    Request early = request;  // leaves it before the mark
    early.prompt[3] = (early.prompt[3] + 1) % 80;
    engine.admit(early);
    EXPECT_EQ(engine.kept(0), forgets ? 3 : 0);
    EXPECT_EQ(finish(engine, 4)[0], alone(model, early, 4));
    engine.forget();
    EXPECT_EQ(engine.held(0), 0);
    engine.admit(early);
    EXPECT_EQ(engine.kept(0), 0);
  }
}

TEST_P(Engines, SaysWhatIsWrong) {
  const models::Model model = small_model(encoder(), "qwen3_next");
  expect_error(Errc::kArgument, "slots must be at least 1, got 0",
               [&] { Engine none(encoder(), model, {.slots = 0}); });
  Engine engine(encoder(), model, {.slots = 1, .context = 12});
  const auto refused = [&](const std::string& says, const Request& request) {
    expect_error(Errc::kArgument, says, [&] { engine.admit(request); });
  };
  refused("1 to 11 tokens, got 0", {});
  refused("1 to 11 tokens, got 12", {some_prompt(12, 1)});
  Request hot{some_prompt(3, 1)};
  hot.sampling.temperature = -1;
  refused("temperature", hot);
  Request biased{some_prompt(3, 1)};
  biased.sampling.logit_bias = {{-1, 1.0F}};
  refused("logit_bias must be numbers by tokens", biased);
  biased.sampling.logit_bias.assign(1025, {1, 1.0F});
  refused("at most 1024 tokens, got 1025", biased);
  expect_error(Errc::kIo, "in the vocabulary of 80, got 80", [&] { engine.admit({{1, 80}}); });
  expect_error(Errc::kArgument, "slot 0 must be in use", [&] { engine.cancel(0); });
  expect_error(Errc::kArgument, "from 0 to 0, got 1", [&] { engine.cancel(1); });
  EXPECT_FALSE(engine.is_busy());

  engine.admit({some_prompt(10, 1)});
  refused("all 1 slots are in use", {some_prompt(2, 1)});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(engine.step().size(), 1U);
  expect_error(Errc::kArgument, "has reached the context length, 12", [&] { engine.step(); });
  EXPECT_FALSE(engine.is_busy());  // and is as new
  engine.admit({some_prompt(4, 1)});
  EXPECT_EQ(finish(engine, 3)[0], alone(model, {some_prompt(4, 1)}, 3));

  models::Model broken = model;
  broken.weights.norm = encoder().full(model.weights.norm.shape(), DType::kF32, NAN);
  Engine ill(encoder(), broken, {});
  ill.admit({some_prompt(4, 1)});
  EXPECT_THROW(ill.step(), jobs::NotFinite);
  EXPECT_FALSE(ill.is_busy());
}

MT_ON_EVERY_BACKEND(Engines);

}  // namespace
}  // namespace mlxtape::test
