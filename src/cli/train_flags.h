// What train, lora and dwq share: the flags of the loop, its progress, what is told at the end, and how a run that was
// stopped goes on.
#pragma once

#include <memory>
#include <string>

#include "command.h"
#include "interrupt.h"
#include "mlxtape/formats/json.h"
#include "mlxtape/jobs/run_folder.h"
#include "mlxtape/jobs/train.h"
#include "optimiser_flags.h"
#include "output_paths.h"
#include "progress.h"

namespace mlxtape::cli {

// --data, --iters, --batch-size, --optimizer, ...: mlx-lm's names and the job's defaults.
struct LoopFlags {
  std::string data, schedule = "constant";
  bool mask_prompt = false;
  jobs::TrainOptions job;  // its own, where no flag says otherwise
  OptimiserFlags optimiser;

  LoopFlags(jobs::TrainOptions defaults, jobs::OptimiserNumbers usual)
      : job(std::move(defaults)), optimiser(job.fit.optimiser->name(), std::move(usual)) {}

  // Returns --learning-rate.
  CLI::Option* add_to(CLI::App& command);
  // Throws what is wrong with them; the state's folder is not set.
  jobs::TrainOptions options() const;
  jobs::DataSet read(const formats::Tokenizer& tokenizer) const;
};

// --state, --resume, --keep-state. Where what a run is made from lies until it is done.
struct StateFlags {
  std::string folder;
  bool resume = false, keep = false;
  bool beside = true;  // the output, not in it

  jobs::RunFolder run() const { return jobs::RunFolder(folder); }
  // without: the folder that the run has anyway, e.g. --adapter-path; no --state then.
  void add_to(CLI::App& command, const std::string& without = "");
  // The folder is <out>.state where none was given. Throws where it meets the output or an input, and where a state is
  // there and --resume is not given; says so where it is the other way round.
  void expect(const Place& out, const std::vector<Place>& inputs, const Globals& globals);
};

// A loop that is watched: a bar and lines, and Ctrl-C asks it to stop.
class Watch {
 public:
  Watch(std::string title, std::int64_t iterations, const Globals& globals);
  ~Watch();
  jobs::FitHooks hooks();

 private:
  Progress& progress();
  void say(const std::string& text);

  std::string title_, extra_;
  std::int64_t iterations_, start_ = 0;
  const Globals& globals_;
  Interrupts interrupts_;
  std::unique_ptr<Progress> progress_;
};

// Runs function; what goes wrong is told with how the run goes on.
template <class Function>
void with_state(const StateFlags& state, const Globals& globals, const Function& function);

// {"step": ..., "loss": ...}, ...
formats::Json points_json(const std::vector<jobs::FitPoint>& points);
// steps, losses, time; for all three.
formats::Json::Object fit_json(const jobs::FitResult& fit, Device& device);
std::string fit_text(const jobs::FitResult& fit, Device& device);

// After a stop: what to type to go on, as JSON too where that was asked for; ends with kInterrupted.
[[noreturn]] void end_interrupted(const jobs::FitResult& fit, std::int64_t iterations,
                                  const StateFlags& state, Device& device, const Globals& globals);

// An error of a run under way, with how to go on.
[[noreturn]] void rethrow_with_advice(const StateFlags& state, const Globals& globals);

template <class Function>
void with_state(const StateFlags& state, const Globals& globals, const Function& function) {
  try {
    function();
  } catch (const Error&) {
    rethrow_with_advice(state, globals);
  }
}

}  // namespace mlxtape::cli
