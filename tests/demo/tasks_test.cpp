#include "demo/tasks.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "jobs/byte_tokenizer.h"
#include "mlxtape/jobs/generate.h"
#include "mlxtape/jobs/train.h"
#include "models/small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using demo::Task;
using demo::task_answer;
using demo::TaskCase;
using demo::TaskScores;
using demo::TaskSide;

TEST(Tasks, AnswersByHand) {
  EXPECT_EQ(task_answer("copy qzvwe>"), "qzvwe\n");
  EXPECT_EQ(task_answer("flip kdtx>"), "xtdk\n");
  EXPECT_EQ(task_answer("plus 37+25>"), "62\n");
  EXPECT_EQ(task_answer("plus 0+9>"), "9\n");
  EXPECT_EQ(task_answer("plus 99+99>"), "198\n");
  EXPECT_EQ(task_answer("find a3k7q1 k>"), "7\n");
  EXPECT_EQ(task_answer("find a3k7q1 a>"), "3\n");
  EXPECT_EQ(task_answer("find a3k7q1 q>"), "1\n");
  EXPECT_EQ(task_answer("shut ([]{>"), "})\n");
  EXPECT_EQ(task_answer("shut ([{>"), "}])\n");
  EXPECT_EQ(task_answer("shut {}[>"), "]\n");
}

TEST(Tasks, WhatIsNoCase) {
  for (const char* prompt :
       {"", "copy >", "copy abc", "subtract 3-2>", "plus 3>", "plus 3+>", "plus 3+123>",
        "plus a+1>", "find a3k7>", "find a3k7 q>", "find a3k7 kk>", "shut (]>", "shut )>"}) {
    try {
      task_answer(prompt);
      ADD_FAILURE() << prompt;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Errc::kArgument) << prompt;
      EXPECT_NE(std::string(e.what()).find("a prompt must look like 'plus 37+25>', got '"),
                std::string::npos);
    }
  }
}

TEST(Tasks, CasesAreOfAllTasksAndAnsweredRight) {
  std::array<std::set<std::size_t>, demo::kTasks> lengths;
  for (const TaskSide side : {TaskSide::kTraining, TaskSide::kHeldOut}) {
    const auto cases = demo::task_cases(side, 3, 1000);
    ASSERT_EQ(cases.size(), 1000U);
    std::array<int, demo::kTasks> counts{};
    for (const TaskCase& one : cases) {
      ++counts[static_cast<std::size_t>(one.task)];
      EXPECT_EQ(one.answer, task_answer(one.prompt));
      EXPECT_EQ(demo::side_of(one.prompt), side);
      lengths[static_cast<std::size_t>(one.task)].insert(one.answer.size());
    }
    const bool is_training = side == TaskSide::kTraining;
    EXPECT_EQ(counts, (is_training ? std::array{125, 125, 250, 375, 125}
                                   : std::array{200, 200, 200, 200, 200}));
  }
  const auto expect_lengths = [&](Task task, const std::set<std::size_t>& want) {
    EXPECT_EQ(lengths[static_cast<std::size_t>(task)], want) << name_of(task);
  };
  expect_lengths(Task::kCopy, {4, 5, 6, 7});
  expect_lengths(Task::kReverse, {4, 5, 6, 7});
  expect_lengths(Task::kAdd, {2, 3, 4});
  expect_lengths(Task::kRecall, {2});
  expect_lengths(Task::kClose, {2, 3, 4, 5});
}

// A tenth of the sums is held out, and what is asked on one side is never asked on the other.
TEST(Tasks, SidesAreDisjoint) {
  std::int64_t held = 0;
  for (int a = 0; a < 100; ++a) {
    for (int b = 0; b < 100; ++b) {
      const auto sum = [](int x, int y) {
        return "plus " + std::to_string(x) + "+" + std::to_string(y) + ">";
      };
      EXPECT_EQ(demo::side_of(sum(a, b)), demo::side_of(sum(b, a)));
      held += demo::side_of(sum(a, b)) == TaskSide::kHeldOut ? 1 : 0;
    }
  }
  EXPECT_NEAR(static_cast<double>(held), 1000, 5 * std::sqrt(2 * 1000 * 0.9));  // drawn in pairs
  std::set<std::string> asked;
  for (const TaskCase& one : demo::task_cases(TaskSide::kHeldOut, 1, 2000)) {
    asked.insert(one.prompt);
  }
  for (const TaskCase& one : demo::task_cases(TaskSide::kTraining, 1, 20000)) {
    EXPECT_EQ(asked.count(one.prompt), 0U) << one.prompt;
  }
}

TEST(Tasks, SeedDecides) {
  const auto prompts = [](std::uint64_t seed, std::int64_t count) {
    std::vector<std::string> all;
    for (const TaskCase& one : demo::task_cases(TaskSide::kTraining, seed, count)) {
      all.push_back(one.prompt);
    }
    return all;
  };
  const auto some = prompts(7, 50), more = prompts(7, 80);
  EXPECT_TRUE(std::equal(some.begin(), some.end(), more.begin()));
  EXPECT_NE(prompts(8, 50), some);
  EXPECT_GT(std::set<std::string>(more.begin(), more.end()).size(), 70U);
}

TEST(Tasks, SamplesAreBytesWithTheirPrompt) {
  const auto samples = demo::task_samples({{Task::kAdd, "plus 1+2>", "3\n"}});
  ASSERT_EQ(samples.size(), 1U);
  EXPECT_EQ(samples[0].tokens,
            (std::vector<std::int32_t>{'p', 'l', 'u', 's', ' ', '1', '+', '2', '>', '3', '\n'}));
  EXPECT_EQ(samples[0].prompt, 9);
}

class TaskModels : public OnDevice {
 protected:
  models::Model model() {
    formats::Json config = small_config("qwen3_next");
    config.set("vocab_size", 256);
    return models::random_model(models::Config::parse(config, "test"), encoder(), DType::kF32, 1);
  }
};

// A model that has half learned: some answers right, some wrong, and each as decoding finds it.
TEST_P(TaskModels, ScoresAreThoseOfGreedyDecoding) {
  const models::Model learner = model();
  const auto cases = demo::task_cases(TaskSide::kTraining, 5, 40);
  jobs::TrainOptions o;
  o.fit.iterations = 120;
  o.fit.learning_rate = 1e-2;
  o.fit.clip = 0;
  o.fit.save_every = 0;
  o.batches = {.batch_size = 8, .pad_to = 1, .learn_prompt = false};
  jobs::train(encoder(), learner, {demo::task_samples(cases), {}, {}}, o);

  const auto tokenizer = formats::Tokenizer::from_json(byte_tokenizer_json(), "test");
  jobs::GenerateOptions greedy;
  greedy.max_tokens = 10;
  greedy.stop_tokens = {'\n'};
  std::vector<std::vector<std::int32_t>> prompts;
  for (const TaskCase& one : cases) prompts.push_back(tokenizer.encode(one.prompt));
  const auto report = jobs::generate(encoder(), learner, tokenizer, prompts, greedy);
  TaskScores want;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    auto& score = want.of[static_cast<std::size_t>(cases[i].task)];
    ++score.cases;
    score.right += report.sequences[i].finish == jobs::Finish::kStopToken &&
                           report.sequences[i].text + "\n" == cases[i].answer
                       ? 1
                       : 0;
  }
  for (const std::int64_t batch_size : {1, 3, 128}) {
    const TaskScores got = demo::score_tasks(encoder(), learner, cases, batch_size);
    for (std::size_t t = 0; t < demo::kTasks; ++t) {
      EXPECT_EQ(got.of[t].right, want.of[t].right) << demo::name_of(static_cast<Task>(t));
      EXPECT_EQ(got.of[t].cases, want.of[t].cases);
    }
    EXPECT_EQ(got.all().right, want.all().right);
    EXPECT_EQ(got.all().cases, 40);
  }
  EXPECT_GT(want.all().right, 0);  // else the comparison says nothing
  EXPECT_LT(want.all().right, 40);
}

TEST_P(TaskModels, VocabularyMustHaveTheBytes) {
  const models::Model small = small_model(encoder(), "qwen3_next");
  EXPECT_THROW(demo::score_tasks(encoder(), small, demo::task_cases(TaskSide::kHeldOut, 1, 5)),
               Error);
}

MT_ON_EVERY_BACKEND(TaskModels);

}  // namespace
}  // namespace mlxtape::test
