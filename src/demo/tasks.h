// tasks: small questions whose answers are known, to see from nothing how well a model learns. A case is a line of bytes:
//
//   copy     copy qzvwe>qzvwe      the letters again
//   reverse  flip kdtx>xtdk        the last one first
//   add      plus 37+25>62         numbers below 100
//   recall   find a3k7q1 k>7       what stood behind the letter
//   close    shut ([]{>})          the brackets that are still open, closed
//
// Layout     a prompt up to '>', an answer up to the end of the line. A token is a byte, the line's end is the end of text.
// Held out   a hash of the question says on which side it is, a tenth on one: what is asked there is in no training set, of
//            any seed. Of a sum both orders of its numbers are on one side.
// Random     case i is a function of the side, the seed and i alone.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "mlxtape/jobs/dataset.h"
#include "mlxtape/models/model.h"

namespace mlxtape::demo {

enum class Task : std::uint8_t { kCopy, kReverse, kAdd, kRecall, kClose };
inline constexpr std::size_t kTasks = 5;
const char* name_of(Task task) noexcept;

enum class TaskSide : std::uint8_t { kTraining, kHeldOut };

struct TaskCase {
  Task task = Task::kCopy;
  std::string prompt, answer;  // "plus 37+25>", "62\n"
};

// The tasks in turn, count cases in all; for training those that teach less by the line come more often.
std::vector<TaskCase> task_cases(TaskSide side, std::uint64_t seed, std::int64_t count);
// What the answer to a prompt is, and on which side it is. Throws kArgument where it is of no task.
std::string task_answer(const std::string& prompt);
TaskSide side_of(const std::string& prompt);

// Prompts and answers as bytes, for Batches with learn_prompt off.
std::vector<jobs::Sample> task_samples(const std::vector<TaskCase>& cases);

struct TaskScore {
  std::int64_t right = 0, cases = 0;
  double share() const {
    return cases == 0 ? 0 : static_cast<double>(right) / static_cast<double>(cases);
  }
};
struct TaskScores {
  std::array<TaskScore, kTasks> of{};  // by task
  TaskScore all() const;
};
// An answer is right if every byte of it is what the model finds most likely after the prompt and the right bytes before
// it, of equal ones the first: exactly where decoding greedily gives the whole answer, but all bytes are looked at at once.
TaskScores score_tasks(CommandEncoder& encoder, const models::Model& model,
                       const std::vector<TaskCase>& cases, std::int64_t batch_size = 128);

}  // namespace mlxtape::demo
