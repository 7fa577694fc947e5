// What a run of the demo finds out, and its files: demo.json, and progress.json while it is under way.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "mlxtape/formats/json.h"
#include "mlxtape/jobs/dwq.h"
#include "mlxtape/jobs/evaluate.h"
#include "tasks.h"

namespace mlxtape::demo {

struct DemoPoint {
  std::int64_t step = 0;
  TaskScores scores;
};

// One of the models that the run made and saved.
struct DemoModel {
  std::string name, folder;
  std::size_t bytes = 0;
  double bits_per_weight = 0;
  TaskScores scores;
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
  std::vector<TaskCase> questions;
  std::vector<KernelTime> kernels;  // of traced_steps training steps, the longest first
  std::int64_t traced_steps = 0;
  double traced_seconds = 0;  // of these steps, with all that is not a kernel
  std::size_t peak_bytes = 0;
  std::vector<std::pair<std::string, double>> stages;  // seconds
  double seconds = 0;

  // The share of the 2-bit model's divergence that DWQ removed.
  double removed() const;
};

formats::Json to_json(const DemoResult& result);

// What a run has found out that no state of a training holds: steps to make, held-out scores, kernels, times, memory.
formats::Json demo_progress(const DemoResult& result);
// The other way. Throws kIo where it is no such thing.
void read_demo_progress(const formats::Json& progress, DemoResult& result);

// Bytes that a model wrote, which may be anything: those that are no printable ASCII as '?'.
std::string printable(const std::string& bytes);

}  // namespace mlxtape::demo
