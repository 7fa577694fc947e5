// The demo's parts: the model it builds, what a run finds out, and the page that tells of it.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "mlxtape/formats/json.h"
#include "mlxtape/jobs/dwq.h"
#include "mlxtape/jobs/evaluate.h"
#include "mlxtape/jobs/tasks.h"

namespace mlxtape::cli {

struct Globals;

// A Qwen3-Next of 2 M parameters whose tokens are bytes, the line's end the end of text.
models::Config demo_config();
// tokenizer.json and tokenizer_config.json; errors begin with who.
void write_byte_tokenizer(const std::string& folder, const char* who = "demo");

struct DemoPoint {
  std::int64_t step = 0;
  jobs::TaskScores scores;
};

// One of the models that the run made and saved.
struct DemoModel {
  std::string name, folder;
  std::size_t bytes = 0;
  double bits_per_weight = 0;
  jobs::TaskScores scores;
  jobs::Evaluation evaluation;
  std::vector<std::string> answers;  // as DemoResult::questions
};

struct KernelTime {
  std::string name;
  std::int64_t calls = 0;
  double seconds = 0;
};

struct DemoResult {
  std::vector<std::pair<std::string, std::string>> machine;  // facts, by name
  std::uint64_t seed = 0;
  std::int64_t parameters = 0, active_parameters = 0, layers = 0, width = 0;
  std::int64_t experts = 0, experts_per_token = 0;
  std::int64_t iterations = 0, batch_size = 0, tokens = 0, cases = 0;
  jobs::FitResult training;
  std::vector<DemoPoint> points;
  std::vector<std::vector<double>> routes;  // [layer][expert]: share of the tokens' choices
  jobs::DwqResult dwq;
  std::vector<DemoModel> models;  // full, 4 bits, 2 bits, 2 bits after DWQ
  std::vector<jobs::TaskCase> questions;
  std::vector<KernelTime> kernels;  // of traced_steps training steps, the longest first
  std::int64_t traced_steps = 0;
  double traced_seconds = 0;  // of these steps, with all that is not a kernel
  std::size_t peak_bytes = 0;
  std::vector<std::pair<std::string, double>> stages;  // seconds
  double seconds = 0;

  // The share of the 2-bit model's divergence that DWQ removed.
  double removed() const;
};

struct DemoFlags {
  std::string out = "mlxtape-demo";
  bool resume = false;
  // What 98 to 99 % of the answers right take: on two cores less than two minutes.
  std::int64_t iterations = 1800, cases = 2000;
  double seconds = 0;  // above 0: no more iterations than fit into about so many in all
  std::uint64_t seed = 1;
};
// Writes the models, demo.json and report.html to out. Until it is done out/state holds what it goes on from, to the same
// bits: the states of training and distillation, and progress.json. Where Interrupts asks to stop it says how to go on and
// ends with kInterrupted.
DemoResult run_demo(const Globals& globals, const DemoFlags& flags);
// The models' folders in out.
inline constexpr std::array kDemoModels = {"full", "4bit", "2bit", "2bit-dwq"};

// Is there a run in out that is not done?
bool has_demo_state(const std::string& out);

formats::Json to_json(const DemoResult& result);

// What a run has found out that no state of a training holds: steps to make, held-out scores, kernels, times, memory.
formats::Json demo_progress(const DemoResult& result);
// The other way. Throws kIo where it is no such thing.
void read_demo_progress(const formats::Json& progress, DemoResult& result);

// Bytes that a model wrote, which may be anything: those that are no printable ASCII as '?'.
std::string printable(const std::string& bytes);

}  // namespace mlxtape::cli
