// Prompts and running sequences take turns, and none is changed by the others.
#include "jobs/engine_support.h"

namespace mlxtape::test {
namespace {

using jobs::Choice;
using jobs::Engine;
using jobs::EngineOptions;
using jobs::Request;

class EngineTurns : public Engines {
 protected:
  // One step: a chunk of a prompt was read ('p', 'P' the last one), or sequences went on ('a' and so on, by slot).
  std::string step(Engine& engine) {
    const bool reads = engine.is_reading();
    std::int64_t before = 0, after = 0;
    for (std::int64_t s = 0; s < slots_; ++s) before += engine.held(s);
    const std::vector<Choice> choices = engine.step();
    for (std::int64_t s = 0; s < slots_; ++s) after += engine.held(s);
    std::string what;
    for (const Choice& choice : choices) {
      said_[choice.slot].push_back(choice.token);
      what += static_cast<char>('a' + choice.slot);
    }
    const auto count = static_cast<std::int64_t>(choices.size());
    if (!reads || (count > 0 && after - before == count && !first(choices))) return what;
    return count > 0 ? "P" : "p";
  }
  bool first(const std::vector<Choice>& choices) const {
    return choices.size() == 1 && said_.at(choices[0].slot).size() == 1;
  }
  std::string steps(Engine& engine, int count) {
    std::string all;
    for (int i = 0; i < count; ++i) all += (i > 0 ? " " : "") + step(engine);
    return all;
  }

  std::int64_t slots_ = 3;
  std::map<std::int64_t, Tokens> said_;
};

TEST_P(EngineTurns, AChunkThenAToken) {
  for (const std::string& type : model_types()) {
    for (const bool prompts_first : {false, true}) {
      SCOPED_TRACE(type + (prompts_first ? ", prompts first" : ""));
      said_.clear();
      const models::Model model = lively_model(encoder(), type);
      EngineOptions options;
      options.slots = slots_;
      options.first_room = 2;  // grows while prompts are half read
      options.prefill_chunk = 4;
      options.prompts_first = prompts_first;
      Engine engine(encoder(), model, options);
      const Request a = drawn(3, 1), b = drawn(17, 2), c = drawn(6, 3);
      engine.admit(a);
      EXPECT_EQ(steps(engine, 3), "P a a");
      engine.admit(b);
      engine.admit(c);
      // b has five chunks, c two.
      EXPECT_EQ(steps(engine, 14), prompts_first ? "p p p p P p P abc abc abc abc abc abc abc"
                                                 : "p a p a p a p a P ab p ab P abc");
      steps(engine, 6);
      for (std::int64_t s = 0; s < 3; ++s) {
        const Request& request = s == 0 ? a : s == 1 ? b : c;
        EXPECT_EQ(said_[s], alone(model, request, said_[s].size())) << s;
      }
    }
  }
}

// One whose past is kept waits for its turn while others go on; another is given up half way.
TEST_P(EngineTurns, HalfReadPastsAreSafe) {
  for (const char* type : {"qwen3", "qwen3_next"}) {
    SCOPED_TRACE(type);
    said_.clear();
    const models::Model model = lively_model(encoder(), type);
    Engine engine(encoder(), model, {.slots = 3, .first_room = 1, .prefill_chunk = 4});
    const Request a = drawn(3, 1);
    Request b = drawn(7, 2);
    engine.admit(b);
    EXPECT_EQ(steps(engine, 3), "p P a");
    engine.cancel(0);
    engine.admit({some_prompt(21, 5)});  // takes another slot, is read in six chunks
    engine.admit(a);
    const Tokens begun = said_[0];
    b.prompt.insert(b.prompt.end(), begun.begin(), begun.begin() + 1);
    b.prompt.push_back(4);
    said_.clear();
    EXPECT_EQ(engine.held(0), 8);
    const std::int64_t slot_b = engine.admit(b);
    EXPECT_EQ(engine.kept(slot_b), 8);
    EXPECT_FALSE(engine.has_free_slot());
    engine.cancel(1);  // never read
    const Request d = drawn(18, 6);
    EXPECT_EQ(engine.admit(d), 1);
    EXPECT_EQ(steps(engine, 7), "P c P ac p ac p");
    steps(engine, 9);
    EXPECT_EQ(said_[slot_b], alone(model, b, said_[slot_b].size()));
    EXPECT_EQ(said_[2], alone(model, a, said_[2].size()));
    EXPECT_EQ(said_[1], alone(model, d, said_[1].size()));
    EXPECT_GT(said_[1].size(), 2U);

    // Given up between two chunks, while others went on; what was read is used at once.
    engine.cancel(1);
    Request e = drawn(15, 8);
    EXPECT_EQ(engine.admit(e), 1);
    while (engine.held(1) != 8) step(engine);
    step(engine);  // the others
    EXPECT_EQ(engine.held(1), 8);
    engine.cancel(1);
    e.prompt[12] = (e.prompt[12] + 1) % 80;
    EXPECT_EQ(engine.admit(e), 1);
    EXPECT_EQ(engine.kept(1), 8);
    said_[1].clear();
    while (said_[1].size() < 5) step(engine);
    EXPECT_EQ(said_[1], alone(model, e, said_[1].size()));
    EXPECT_EQ(said_[slot_b], alone(model, b, said_[slot_b].size()));
  }
}

// Scoring takes its turns as well.
TEST_P(EngineTurns, WithScores) {
  const models::Model model = lively_model(encoder(), "qwen3_5");
  Engine engine(encoder(), model, {.slots = 3, .prefill_chunk = 4});
  const Request a = drawn(5, 1);
  Request b{some_prompt(10, 2)}, c{some_prompt(4, 3)};
  for (Request* request : {&b, &c}) {
    request->generate = false;
    request->targets = {request->prompt.begin() + 1, request->prompt.end()};
  }
  engine.admit(a);
  EXPECT_EQ(steps(engine, 2), "p P");
  engine.admit(b);
  engine.admit(c);
  const std::vector<Choice> none;
  for (int i = 0; i < 8; ++i) {
    const std::vector<Choice> choices = engine.step();
    // Three chunks of b, one of c, each followed by a token of a.
    EXPECT_EQ(choices.size(), i % 2 == 0 ? 1U : 0U) << i;
    for (const Choice& choice : choices) said_[choice.slot].push_back(choice.token);
  }
  EXPECT_EQ(said_[0], alone(model, a, said_[0].size()));
  Engine quiet(encoder(), model, {.slots = 1});
  std::int64_t slot = 1;
  for (const Request& request : {b, c}) {
    const std::vector<jobs::Score> got = engine.take_scores(slot++);
    quiet.admit(request);
    quiet.step();
    const std::vector<jobs::Score> want = quiet.take_scores(0);
    quiet.cancel(0);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i].logprob, want[i].logprob, 1e-4);
    }
  }
}

MT_ON_EVERY_BACKEND(EngineTurns);

}  // namespace
}  // namespace mlxtape::test
