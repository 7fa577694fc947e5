#include "tasks.h"

#include <algorithm>
#include <iterator>

#include "jobs/head.h"
#include "jobs/mix.h"
#include "mlxtape/ops/sort.h"

namespace mlxtape::demo {

namespace {

constexpr std::int64_t kLetters = 26, kNumbers = 100;
constexpr std::int64_t kFewestLetters = 3, kMostLetters = 6;
constexpr std::int64_t kFewestPairs = 2, kMostPairs = 4;
constexpr std::int64_t kFewestBrackets = 3, kMostBrackets = 7, kDeepest = 4;
constexpr std::uint64_t kHeldOutOneIn = 10;
constexpr std::array<const char*, kTasks> kNames = {"copy", "reverse", "add", "recall", "close"};
constexpr std::array<const char*, kTasks> kWords = {"copy ", "flip ", "plus ", "find ", "shut "};
// The turn of a training set. A line of these teaches one digit or two, one of the others up to six letters.
constexpr std::array kTurn = {Task::kCopy,   Task::kAdd,   Task::kRecall, Task::kReverse,
                              Task::kRecall, Task::kClose, Task::kAdd,    Task::kRecall};
constexpr std::string_view kOpening = "([{", kClosing = ")]}";
constexpr char kAsk = '>';

// Draws from numbers that follow each other.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : at_(seed) {}
  // From 0 to n − 1. The bias of a remainder by n this small is below 2^-57.
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(jobs::mixed(at_++) % static_cast<std::uint64_t>(n));
  }
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least + below(most - least + 1);
  }

 private:
  std::uint64_t at_;
};

// Different ones: each is then a place.
std::string letters(Draw& draw, std::int64_t count) {
  std::string all = "abcdefghijklmnopqrstuvwxyz";
  for (std::int64_t i = 0; i < count; ++i) {
    std::swap(all[static_cast<std::size_t>(i)],
              all[static_cast<std::size_t>(draw.between(i, kLetters - 1))]);
  }
  return all.substr(0, static_cast<std::size_t>(count));
}

std::string pairs_and_key(Draw& draw) {
  const std::int64_t count = draw.between(kFewestPairs, kMostPairs);
  const std::string keys = letters(draw, count);
  std::string text;
  for (const char key : keys) {
    text += key;
    text += static_cast<char>('0' + draw.below(10));
  }
  return text + ' ' + keys[static_cast<std::size_t>(draw.below(count))];
}

// Of so many brackets none closes what is not open, and one at least stays open.
std::string brackets(Draw& draw) {
  const std::int64_t count = draw.between(kFewestBrackets, kMostBrackets);
  std::string text, open;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto depth = static_cast<std::int64_t>(open.size());
    const bool is_last = i + 1 == count;
    const bool opens =
        depth == 0 || (depth == 1 && is_last) || (depth < kDeepest && draw.below(2) == 0);
    if (opens) {
      const auto kind = static_cast<std::size_t>(draw.below(std::ssize(kOpening)));
      text += kOpening[kind];
      open += kClosing[kind];
    } else {
      text += open.back();
      open.pop_back();
    }
  }
  return text;
}

std::string question(Task task, Draw& draw) {
  switch (task) {
    case Task::kCopy:
    case Task::kReverse: return letters(draw, draw.between(kFewestLetters, kMostLetters));
    case Task::kAdd: {
      const std::int64_t a = draw.below(kNumbers), b = draw.below(kNumbers);
      return std::to_string(a) + '+' + std::to_string(b);
    }
    case Task::kRecall: return pairs_and_key(draw);
    case Task::kClose: return brackets(draw);
  }
  return {};
}

[[noreturn]] void no_case(const std::string& prompt) {
  throw Error(Errc::kArgument,
              "tasks: a prompt must look like 'plus 37+25>', got '" + prompt + "'");
}

struct Question {
  Task task;
  std::string text;  // between the task's word and the '>'
};
Question parse(const std::string& prompt) {
  for (std::size_t t = 0; t < kTasks; ++t) {
    const std::string_view word = kWords[t];
    if (prompt.compare(0, word.size(), word) != 0) continue;
    if (prompt.size() < word.size() + 2 || prompt.back() != kAsk) break;
    return {static_cast<Task>(t), prompt.substr(word.size(), prompt.size() - word.size() - 1)};
  }
  no_case(prompt);
}

// The two numbers of a sum.
std::pair<int, int> numbers(const Question& q, const std::string& prompt) {
  const std::size_t plus = q.text.find('+');
  const auto number = [&](const std::string& digits) {
    if (digits.empty() || digits.size() > 2 ||
        digits.find_first_not_of("0123456789") != std::string::npos) {
      no_case(prompt);
    }
    return std::stoi(digits);
  };
  if (plus == std::string::npos) no_case(prompt);
  return {number(q.text.substr(0, plus)), number(q.text.substr(plus + 1))};
}

std::string recalled(const Question& q, const std::string& prompt) {
  const std::size_t space = q.text.find(' ');
  if (space == std::string::npos || space + 2 != q.text.size()) no_case(prompt);
  for (std::size_t i = 0; i + 1 < space; i += 2) {
    if (q.text[i] == q.text.back()) return q.text.substr(i + 1, 1);
  }
  no_case(prompt);
}

std::string closed(const Question& q, const std::string& prompt) {
  std::string open;
  for (const char c : q.text) {
    if (const std::size_t kind = kOpening.find(c); kind != std::string_view::npos) {
      open += kClosing[kind];
    } else if (!open.empty() && open.back() == c) {
      open.pop_back();
    } else {
      no_case(prompt);
    }
  }
  std::reverse(open.begin(), open.end());
  return open;
}

}  // namespace

const char* name_of(Task task) noexcept { return kNames[static_cast<std::size_t>(task)]; }

std::string task_answer(const std::string& prompt) {
  const Question q = parse(prompt);
  std::string answer = q.text;
  switch (q.task) {
    case Task::kCopy: break;
    case Task::kReverse: std::reverse(answer.begin(), answer.end()); break;
    case Task::kAdd: {
      const auto [a, b] = numbers(q, prompt);
      answer = std::to_string(a + b);
      break;
    }
    case Task::kRecall: answer = recalled(q, prompt); break;
    case Task::kClose: answer = closed(q, prompt); break;
  }
  return answer + '\n';
}

TaskSide side_of(const std::string& prompt) {
  const Question q = parse(prompt);
  std::string key = prompt;
  if (q.task == Task::kAdd) {
    const auto [a, b] = numbers(q, prompt);
    key = std::to_string(std::min(a, b)) + '+' + std::to_string(std::max(a, b));
  }
  std::uint64_t hash = 0;
  for (const char c : key) hash = jobs::mixed(hash ^ static_cast<unsigned char>(c));
  return hash % kHeldOutOneIn == 0 ? TaskSide::kHeldOut : TaskSide::kTraining;
}

std::vector<TaskCase> task_cases(TaskSide side, std::uint64_t seed, std::int64_t count) {
  std::vector<TaskCase> cases;
  for (std::int64_t i = 0; i < count; ++i) {
    TaskCase one;
    const auto n = static_cast<std::size_t>(i);
    one.task =
        side == TaskSide::kTraining ? kTurn[n % kTurn.size()] : static_cast<Task>(n % kTasks);
    Draw draw(jobs::mixed(jobs::mixed(seed) + static_cast<std::uint64_t>(i) * 2 +
                          static_cast<std::uint64_t>(side)));
    do {
      one.prompt = kWords[static_cast<std::size_t>(one.task)] + question(one.task, draw) + kAsk;
    } while (side_of(one.prompt) != side);
    one.answer = task_answer(one.prompt);
    cases.push_back(std::move(one));
  }
  return cases;
}

std::vector<jobs::Sample> task_samples(const std::vector<TaskCase>& cases) {
  std::vector<jobs::Sample> samples;
  for (const TaskCase& one : cases) {
    jobs::Sample sample;
    for (const std::string& text : {one.prompt, one.answer}) {
      for (const char c : text) sample.tokens.push_back(static_cast<unsigned char>(c));
    }
    sample.prompt = static_cast<std::int64_t>(one.prompt.size());
    samples.push_back(std::move(sample));
  }
  return samples;
}

TaskScore TaskScores::all() const {
  TaskScore sum;
  for (const TaskScore& one : of) {
    sum.right += one.right;
    sum.cases += one.cases;
  }
  return sum;
}

TaskScores score_tasks(CommandEncoder& encoder, const models::Model& model,
                       const std::vector<TaskCase>& cases, std::int64_t batch_size) {
  jobs::BatchOptions how{.batch_size = batch_size, .pad_to = 1, .learn_prompt = false};
  TaskScores scores;
  for (std::size_t t = 0; t < kTasks; ++t) {
    std::vector<TaskCase> some;
    for (const TaskCase& one : cases) {
      if (one.task == static_cast<Task>(t)) some.push_back(one);
    }
    if (some.empty()) continue;
    for (const jobs::Batch& batch : jobs::every_batch(task_samples(some), how)) {
      jobs::check_batch("tasks", model, batch);
      const Tensor hidden = jobs::hidden_rows(encoder, model, jobs::upload_tokens(encoder, batch));
      const Tensor best = ops::argmax(encoder, jobs::head_logits(encoder, model, hidden), -1);
      std::vector<std::uint32_t> likeliest(batch.tokens.size());
      encoder.download(best, likeliest.data(), best.bytes());
      for (std::int64_t row = 0; row < batch.rows; ++row) {
        bool is_right = true;
        for (std::int64_t i = row * batch.length; i < (row + 1) * batch.length; ++i) {
          const std::int32_t target = batch.targets[static_cast<std::size_t>(i)];
          is_right &= target < 0 ||
                      likeliest[static_cast<std::size_t>(i)] == static_cast<std::uint32_t>(target);
        }
        ++scores.of[t].cases;
        scores.of[t].right += is_right ? 1 : 0;
      }
    }
  }
  return scores;
}

}  // namespace mlxtape::demo
