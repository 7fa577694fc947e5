// The run of the demo: training, packing, distillation, and measuring what came of each.
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>

#include "backends/cpu/targets.h"
#include "command.h"
#include "commit.h"
#include "demo.h"
#include "interrupt.h"
#include "mlxtape/base/files.h"
#include "mlxtape/core/threads.h"
#include "mlxtape/jobs/generate.h"
#include "mlxtape/jobs/train.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/models/size.h"
#include "model_flags.h"
#include "output.h"
#include "progress.h"
#include "report.h"

namespace mlxtape::cli {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using formats::Json;
using jobs::TaskSide;

constexpr std::int64_t kLines = 64, kPoints = 10;
constexpr double kRate = 3e-3;
// Scales of weights packed in 2 bits are about 0.1.
constexpr double kDwqRate = 1e-3;
constexpr std::int64_t kDwqShare = 6;  // a step for each so many of training
constexpr std::int64_t kTracedSteps = 8, kQuestions = 2 * jobs::kTasks;
constexpr double kTrainingShare = 0.6;  // of all seconds

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Demo {
 public:
  Demo(const Globals& globals, const DemoFlags& flags)
      : globals_(globals), flags_(flags), encoder_(globals.device().make_encoder()) {}

  const DemoResult& run();

 private:
  // Seeds of different things must not meet.
  std::uint64_t seed(std::uint64_t of) const { return flags_.seed * 8 + of; }
  std::string path(const std::string& name) const { return flags_.out + "/" + name; }
  jobs::BatchOptions batches() const {
    return {.batch_size = kLines,
            .pad_to = 1,
            .seed = static_cast<std::uint32_t>(seed(0)),
            .learn_prompt = false,
            .by_length = false};
  }
  void stage(const std::string& name);  // the one before has ended
  void begin();
  jobs::TrainOptions training(std::int64_t iterations) const;
  void choose_iterations();
  void train();
  void mark(std::int64_t step, Progress& progress);
  void add_kernels(const std::string& trace);
  void count_routes();
  void distil();
  void add(const std::string& name, const std::string& folder, const models::Model& model);

  const Globals& globals_;
  const DemoFlags& flags_;
  std::unique_ptr<CommandEncoder> encoder_;
  DemoResult result_;
  std::vector<jobs::TaskCase> held_;
  std::vector<jobs::Batch> held_batches_;
  models::Model model_, student_;
  models::Model reference_;  // the full one, as it was saved
  std::string stage_;
  Clock::time_point begun_ = Clock::now(), stage_begun_ = begun_;
};

void Demo::stage(const std::string& name) {
  if (!stage_.empty()) result_.stages.emplace_back(stage_, since(stage_begun_));
  if (Interrupts::asked()) {
    remark(result_.models.empty() ? "stopped before a model was saved"
                                  : "stopped; what was saved before is in " + flags_.out);
    throw Exit{kInterrupted};
  }
  stage_ = name;
  stage_begun_ = Clock::now();
}

void Demo::begin() {
  stage("preparing");
  std::error_code reason;
  fs::create_directories(path("tokenizer"), reason);
  if (reason) {
    throw Error(Errc::kIo,
                flags_.out + ": must be a folder that can be made, got " + reason.message());
  }
  write_whole(path("demo.json"), "{}\n", "demo");
  write_byte_tokenizer(path("tokenizer"));

  Device& device = encoder_->device();
  result_.machine = {{"device", device.name()},
                     {"memory", human_bytes(static_cast<double>(device.limits().memory_bytes))}};
  if (device.backend() == Backend::kCpu) {
    result_.machine.emplace_back("threads", std::to_string(threads()));
    result_.machine.emplace_back("instruction set", cpu::available_targets().front());
  }
  result_.machine.emplace_back("mlxtape",
                               std::string(MLXTAPE_VERSION) + " (" + MLXTAPE_COMMIT + ")");
  result_.machine.emplace_back("command", globals_.command_line);

  const models::Config config = demo_config();
  model_ = models::random_model(config, *encoder_, DType::kF32, seed(0));
  result_.seed = flags_.seed;
  result_.parameters = models::parameter_count(config);
  result_.active_parameters = models::active_parameter_count(config);
  result_.layers = config.layers;
  result_.width = config.width;
  result_.experts = config.experts;
  result_.experts_per_token = config.chosen;
  result_.batch_size = kLines;
  result_.cases = flags_.cases;
  held_ = jobs::task_cases(TaskSide::kHeldOut, seed(1), flags_.cases);
  result_.questions.assign(held_.begin(),
                           held_.begin() + std::min<std::ptrdiff_t>(kQuestions, std::ssize(held_)));
  jobs::BatchOptions all = batches();
  all.by_length = true;
  held_batches_ = jobs::every_batch(jobs::task_samples(held_), all);
}

jobs::TrainOptions Demo::training(std::int64_t iterations) const {
  jobs::TrainOptions o;
  o.fit.iterations = iterations;
  o.fit.learning_rate = kRate;
  o.fit.warmup = std::min<std::int64_t>(50, iterations / 10);
  o.fit.cosine = true;
  o.fit.final_share = 0.02;
  o.fit.clip = 1;
  o.fit.adamw.beta2 = 0.98;
  o.fit.adamw.bias_correction = true;
  o.fit.report_every = std::max<std::int64_t>(1, iterations / 100);
  o.fit.validate_every = o.fit.save_every = 0;
  o.batches = batches();
  return o;
}

// As many as fit into the time that was asked for, by the time of a few.
void Demo::choose_iterations() {
  result_.iterations = flags_.iterations;
  if (flags_.seconds <= 0) return;
  constexpr std::int64_t kCold = 2, kTimed = 4;
  const models::Model other = models::random_model(model_.config, *encoder_, DType::kF32, 0);
  const auto cases = jobs::task_cases(TaskSide::kTraining, seed(2), (kCold + kTimed) * kLines);
  jobs::FitHooks hooks;
  Clock::time_point start;
  hooks.on_step = [&](std::int64_t step) {
    encoder_->commit_and_wait();
    if (step == kCold) start = Clock::now();
  };
  jobs::train(*encoder_, other, {jobs::task_samples(cases), {}, {}}, training(kCold + kTimed),
              hooks);
  const double each = since(start) / kTimed;
  const auto fit = static_cast<std::int64_t>(kTrainingShare * flags_.seconds / each);
  result_.iterations = std::clamp<std::int64_t>(fit, 1, flags_.iterations);
}

void Demo::mark(std::int64_t step, Progress& progress) {
  result_.points.push_back({step, jobs::score_tasks(*encoder_, model_, held_)});
  if (globals_.quiet) return;
  const jobs::TaskScores& scores = result_.points.back().scores;
  std::string line = "step " +
                     std::string(4 - std::min<std::size_t>(4, std::to_string(step).size()), ' ') +
                     std::to_string(step) + ": right on held-out cases";
  const auto percent = [](double share) {
    const std::string text = fixed(100 * share, 0);
    return std::string(4 - text.size(), ' ') + text + " %";
  };
  line += percent(scores.all().share()) + " (";
  for (std::size_t t = 0; t < jobs::kTasks; ++t) {
    line += (t == 0 ? "" : ", ") + std::string(jobs::name_of(static_cast<jobs::Task>(t))) +
            percent(scores.of[t].share());
  }
  progress.line(line + ")");
}

void Demo::train() {
  stage("training");
  const std::int64_t n = result_.iterations;
  const auto samples =
      jobs::task_samples(jobs::task_cases(TaskSide::kTraining, seed(2), n * kLines));
  for (const jobs::Sample& sample : samples) result_.tokens += std::ssize(sample.tokens) - 1;
  const double tokens_per_step = static_cast<double>(result_.tokens) / static_cast<double>(n);

  Progress progress("training", n, globals_);
  const auto start = Clock::now();
  double scoring = 0, loss = 0;
  const auto trace = std::make_shared<Trace>();
  Clock::time_point traced;
  const std::int64_t first = n / 2, last = std::min(n, first + kTracedSteps);
  jobs::FitHooks hooks;
  hooks.stop = [] {
    return Interrupts::asked();
  };
  hooks.on_report = [&](const jobs::FitPoint& point) {
    loss = point.loss;
  };
  hooks.on_step = [&](std::int64_t step) {
    if (step == last) {
      encoder_->commit_and_wait();
      result_.traced_seconds = since(traced);
      encoder_->set_trace(nullptr);
    }
    if (step == n || step % std::max<std::int64_t>(1, n / kPoints) == 0) {
      const auto before = Clock::now();
      mark(step, progress);
      scoring += since(before);
    }
    const double rate = tokens_per_step * static_cast<double>(step) / (since(start) - scoring);
    const std::string known = loss > 0 ? "loss " + fixed(loss, 3) + ", " : "";
    progress.at(step, known + fixed(rate, 0) + " tokens/s");
    if (step == first && first < last) {
      encoder_->commit_and_wait();
      encoder_->set_trace(trace);
      traced = Clock::now();
    }
  };
  mark(0, progress);
  result_.training = jobs::train(*encoder_, model_, {samples, {}, {}}, training(n), hooks).fit;
  encoder_->set_trace(nullptr);
  if (first < last) result_.traced_steps = last - first;
  add_kernels(trace->json());
}

void Demo::add_kernels(const std::string& trace) {
  std::map<std::string, KernelTime> all;
  const Json events = Json::parse(trace, "trace");
  for (const Json& event : events.find("traceEvents")->array()) {
    KernelTime& kernel = all[event.find("name")->string()];
    ++kernel.calls;
    kernel.seconds += 1e-6 * event.find("dur")->number();
  }
  for (auto& [name, kernel] : all) {
    kernel.name = name;
    result_.kernels.push_back(kernel);
  }
  std::stable_sort(result_.kernels.begin(), result_.kernels.end(),
                   [](const KernelTime& a, const KernelTime& b) { return a.seconds > b.seconds; });
}

// Of the held-out lines, those of one length together: no padding is counted.
void Demo::count_routes() {
  std::map<std::int64_t, std::vector<std::int32_t>> by_length;
  for (const jobs::Sample& sample : jobs::task_samples(held_)) {
    std::vector<std::int32_t>& rows = by_length[std::ssize(sample.tokens)];
    rows.insert(rows.end(), sample.tokens.begin(), sample.tokens.end());
  }
  result_.routes.assign(static_cast<std::size_t>(model_.config.layers),
                        std::vector<double>(static_cast<std::size_t>(model_.config.experts)));
  models::HiddenOptions options;
  options.routed = [&](std::int64_t layer, const Tensor& counts) {
    std::vector<std::uint32_t> host(static_cast<std::size_t>(counts.size()));
    encoder_->download(counts, host.data(), counts.bytes());
    std::vector<double>& sums = result_.routes[static_cast<std::size_t>(layer)];
    for (std::size_t e = 0; e < host.size(); ++e) sums[e] += host[e];
  };
  for (const auto& [length, rows] : by_length) {
    const Tensor tokens = encoder_->empty({std::ssize(rows) / length, length}, DType::kI32);
    encoder_->upload(rows.data(), tokens.bytes(), tokens);
    Tape tape(*encoder_);
    models::hidden(tape, model_, tokens, options);
  }
  for (std::vector<double>& layer : result_.routes) {
    double sum = 0;
    for (const double count : layer) sum += count;
    for (double& count : layer) count /= sum;
  }
}

// Saved in 16 bits, as models are passed on, and measured as a user would load it.
void Demo::add(const std::string& name, const std::string& folder, const models::Model& model) {
  stage("measuring " + name);
  models::SaveOptions save;
  save.files_from = path("tokenizer");
  save.replace = true;
  models::save_model(models::cast_model(*encoder_, model, DType::kBF16), path(folder), save);
  const models::Model loaded = models::load_model(path(folder), *encoder_);
  if (result_.models.empty()) reference_ = loaded;
  DemoModel row;
  row.name = name;
  row.folder = folder;
  row.bytes = models::weight_bytes(loaded);
  row.bits_per_weight = models::bits_per_weight(loaded);
  row.scores = jobs::score_tasks(*encoder_, loaded, held_);
  row.evaluation = jobs::evaluate(*encoder_, loaded, &reference_, held_batches_);

  const auto tokenizer = formats::Tokenizer::from_directory(path(folder));
  std::vector<std::vector<std::int32_t>> prompts;
  for (const jobs::TaskCase& one : result_.questions) {
    prompts.push_back(tokenizer.encode(one.prompt));
  }
  jobs::GenerateOptions greedy;
  greedy.max_tokens = 12;
  const auto said = jobs::generate(*encoder_, loaded, tokenizer, prompts, greedy);
  for (const jobs::Generated& one : said.sequences) {
    row.answers.push_back(one.text);
  }
  result_.models.push_back(std::move(row));
}

void Demo::distil() {
  stage("distilling");
  jobs::DwqOptions o;
  o.learning_rate = kDwqRate;
  o.iterations = std::max<std::int64_t>(1, result_.iterations / kDwqShare);
  o.report_every = std::max<std::int64_t>(1, o.iterations / 30);
  o.validate_every = o.save_every = 0;
  o.others = true;
  const auto lines = [&](std::uint64_t of, std::int64_t count) {
    return jobs::task_samples(jobs::task_cases(TaskSide::kTraining, seed(of), count));
  };
  const jobs::Batches train(lines(3, o.iterations * kLines), batches());
  Progress progress("distilling", o.iterations, globals_);
  double loss = 0;
  jobs::FitHooks hooks;
  hooks.stop = [] {
    return Interrupts::asked();
  };
  hooks.on_report = [&](const jobs::FitPoint& point) {
    loss = point.loss;
  };
  hooks.on_step = [&](std::int64_t step) {
    progress.at(step, loss > 0 ? "divergence " + fixed(loss, 4) : "");
  };
  result_.dwq = jobs::dwq(*encoder_, student_, {&model_, nullptr}, train,
                          jobs::every_batch(lines(4, 4 * kLines), batches()), o, hooks);
  if (!result_.dwq.warning.empty()) remark(result_.dwq.warning);
}

const DemoResult& Demo::run() {
  begin();
  choose_iterations();
  train();
  add("full", "full", model_);
  count_routes();
  add("4 bits", "4bit", models::quantize_model(*encoder_, model_, models::usual_packing({4, 64})));
  student_ = models::quantize_model(*encoder_, model_, models::usual_packing({2, 64}));
  add("2 bits", "2bit", student_);
  distil();
  add("2 bits, DWQ", "2bit-dwq", student_);
  stage("");
  result_.peak_bytes = peak_memory(encoder_->device(), result_.training.peak_bytes);
  result_.seconds = since(begun_);
  write_whole(path("demo.json"), to_json(result_).dump(2) + "\n", "demo");
  write_whole(path("report.html"), report_page(result_), "demo");
  return result_;
}

}  // namespace

DemoResult run_demo(const Globals& globals, const DemoFlags& flags) {
  return Demo(globals, flags).run();
}

}  // namespace mlxtape::cli
