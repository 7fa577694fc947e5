#include "demo_run.h"

#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "command.h"
#include "commit.h"
#include "demo/demo_model.h"
#include "demo/report.h"
#include "interrupt.h"
#include "mlxtape/base/files.h"
#include "mlxtape/jobs/generate.h"
#include "mlxtape/jobs/train.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/models/size.h"
#include "model_flags.h"
#include "output.h"
#include "output_paths.h"
#include "progress.h"
#include "train_flags.h"

namespace mlxtape::cli {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using demo::TaskSide;
using formats::Json;

constexpr std::int64_t kLines = 64, kPoints = 10;
constexpr double kRate = 3e-3;
// Scales of weights quantised in 2 bits are about 0.1.
constexpr double kDwqRate = 1e-3;
constexpr std::int64_t kDwqShare = 6;  // a step for each so many of training
constexpr std::int64_t kTracedSteps = 8, kQuestions = 2 * demo::kTasks;
constexpr double kTrainingShare = 0.6;  // of all seconds
constexpr const char *kTraining = "training", *kDistilling = "distilling";
constexpr const char *kState = "state", *kProgress = "state/progress.json";

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Demo {
 public:
  Demo(const Globals& globals, const DemoFlags& flags)
      : globals_(globals), flags_(flags), encoder_(globals.device().make_encoder()) {}

  const demo::DemoResult& run();
  // Of training, which is there as long as there is anything to go on from.
  StateFlags state() const { return state_of(kTraining); }

 private:
  // Seeds of different things must not meet.
  std::uint64_t seed(std::uint64_t of) const { return flags_.seed * 8 + of; }
  std::string path(const std::string& name) const { return flags_.out + "/" + name; }
  void put(const std::string& name, const std::string& text) const {
    write_whole(path(name), text, "demo", WholeFile::Links::kReplace);
  }
  jobs::BatchOptions batches() const {
    return {.batch_size = kLines,
            .pad_to = 1,
            .seed = static_cast<std::uint32_t>(seed(0)),
            .learn_prompt = false,
            .by_length = false};
  }
  void stage(const std::string& name);  // the one before has ended
  [[noreturn]] void stop();
  void keep();  // progress.json, with the time up to now
  double& seconds_of(const std::string& stage);
  StateFlags state_of(const std::string& job) const;
  void enter();
  void begin();
  void go_on();
  jobs::TrainOptions training(std::int64_t iterations) const;
  void choose_iterations();
  void train();
  jobs::FitHooks watch(const std::string& title, std::int64_t iterations);
  void mark(std::int64_t step);
  void trace(std::int64_t step);
  void add_kernels(const std::string& trace);
  void count_routes();
  void distil();
  void forget();
  void add(const std::string& name, const std::string& folder, const models::Model& model);

  const Globals& globals_;
  const DemoFlags& flags_;
  std::unique_ptr<CommandEncoder> encoder_;
  demo::DemoResult result_;
  std::vector<demo::TaskCase> held_;
  std::vector<jobs::Batch> held_batches_;
  models::Model model_, student_;
  models::Model reference_;  // the full one, as it was saved
  std::string stage_;
  Clock::time_point stage_begun_;
  std::optional<FolderLock> lock_;  // of all that is in out
  bool is_accepted_ = true;         // off: a state is there, and may be of other flags
  // Of the loop that is under way.
  std::unique_ptr<Progress> bar_;
  double loss_ = 0;
  std::int64_t resumed_ = 0, traced_from_ = 0;
  std::shared_ptr<Trace> trace_;
  Clock::time_point traced_begun_;
  Clock::duration scoring_{};  // in all: not counted in rates and traced times
};

void Demo::stage(const std::string& name) {
  if (!stage_.empty()) keep();
  if (Interrupts::asked()) stop();
  stage_ = name;
  stage_begun_ = Clock::now();
}

void Demo::stop() {
  if (!has_demo_state(flags_.out)) {
    remark("stopped before there was anything to save");
    throw Exit{kInterrupted};
  }
  for (const char* job : {kTraining, kDistilling}) {
    const jobs::RunFolder run = state_of(job).run();
    const std::string fault = run.has_state() ? run.fault() : "";
    if (!fault.empty()) {
      throw Error(Errc::kIo, "stopped while " + stage_ + "; progress has not been saved: " + fault);
    }
  }
  const std::string command = globals_.again_with("--resume");
  if (globals_.json) {
    print_json(Json::Object{
        {"interrupted", true}, {"stage", stage_}, {"state", path(kState)}, {"resume", command}});
  }
  remark("stopped while " + stage_ + "; progress has been saved in " + path(kState) +
         ", resume with:\n  " + command);
  throw Exit{kInterrupted};
}

double& Demo::seconds_of(const std::string& stage) {
  for (auto& [name, seconds] : result_.stages) {
    if (name == stage) return seconds;
  }
  return result_.stages.emplace_back(stage, 0).second;
}

void Demo::keep() {
  seconds_of(stage_) += since(stage_begun_);
  stage_begun_ = Clock::now();
  Device& device = encoder_->device();
  const std::size_t peak = device.memory().stats().peak;
  if (stage_ == kTraining) {
    result_.training.peak_bytes = std::max(result_.training.peak_bytes, peak);
  }
  result_.peak_bytes = std::max(result_.peak_bytes, peak_memory(device, peak));
  if (!is_accepted_) return;
  put(kProgress, demo::demo_progress(result_).dump(2) + "\n");
}

StateFlags Demo::state_of(const std::string& job) const {
  StateFlags state;
  state.folder = path(std::string(kState) + "/" + job);
  state.resume = flags_.resume;
  return state;
}

// Scores of steps after the state are found out again.
void Demo::go_on() {
  is_accepted_ = false;
  const std::string file = path(kProgress);
  try {
    demo::read_demo_progress(Json::parse(read_whole(file, "demo"), file), result_);
  } catch (const Error& e) {
    throw Error(Errc::kIo, file + ": is damaged (" + e.what() + "); delete " + path(kState) +
                               " to start over");
  }
}

// Nobody else is in the folder, and what one has left there that was killed while it wrote is gone.
void Demo::enter() {
  std::error_code reason;
  fs::create_directories(flags_.out, reason);
  if (reason) {
    throw Error(Errc::kIo, flags_.out + ": cannot create this folder: " + reason.message());
  }
  lock_.emplace(flags_.out);
  put("demo.json", "{}\n");  // from now on it is a demo's
  for (const char* name : {"demo.json", "report.html", kProgress, "tokenizer/tokenizer.json",
                           "tokenizer/tokenizer_config.json"}) {
    remove_half_written(path(name));
  }
  for (const char* folder : {"tokenizer", kState}) {
    if (!reason) fs::create_directories(path(folder), reason);
  }
  if (reason)
    throw Error(Errc::kIo, flags_.out + ": cannot write to this folder: " + reason.message());
}

void Demo::begin() {
  stage("preparing");
  demo::write_byte_tokenizer(path("tokenizer"));

  Device& device = encoder_->device();
  result_.machine = {{"device", device.name()},
                     {"memory", human_bytes(static_cast<double>(device.limits().memory_bytes))}};
  for (const auto& detail : device.details()) result_.machine.push_back(detail);
  result_.machine.emplace_back("mlxtape",
                               std::string(MLXTAPE_VERSION) + " (" + MLXTAPE_COMMIT + ")");
  result_.machine.emplace_back("command", globals_.command_line);

  const models::Config config = demo::demo_config();
  model_ = models::random_model(config, *encoder_, DType::kF32, seed(0));
  result_.seed = flags_.seed;
  result_.parameters = models::parameter_count(config);
  result_.active_parameters = models::active_parameter_count(config);
  result_.layers = config.plan.layer_count();
  result_.width = config.plan.width;
  result_.experts = config.plan.moe()->experts;
  result_.experts_per_token = config.plan.moe()->chosen;
  result_.batch_size = kLines;
  result_.cases = flags_.cases;
  held_ = demo::task_cases(TaskSide::kHeldOut, seed(1), flags_.cases);
  result_.questions.assign(held_.begin(),
                           held_.begin() + std::min<std::ptrdiff_t>(kQuestions, std::ssize(held_)));
  jobs::BatchOptions all = batches();
  all.by_length = true;
  held_batches_ = jobs::every_batch(demo::task_samples(held_), all);
}

jobs::TrainOptions Demo::training(std::int64_t iterations) const {
  jobs::TrainOptions o;
  o.fit.iterations = iterations;
  o.fit.learning_rate = kRate;
  o.fit.warmup = std::min<std::int64_t>(50, iterations / 10);
  o.fit.cosine = true;
  o.fit.final_share = 0.02;
  o.fit.optimiser = jobs::make_optimiser("adamw", {{"beta2", 0.98}}, jobs::train_usual());
  o.fit.report_every = std::max<std::int64_t>(1, iterations / 100);
  o.fit.validate_every = o.fit.save_every = 0;
  o.batches = batches();
  return o;
}

// As many as fit into the time that was asked for, by the time of a few.
void Demo::choose_iterations() {
  if (flags_.seconds > 0 && result_.iterations > 0) return;  // as the run began
  result_.iterations = flags_.iterations;
  if (flags_.seconds <= 0) return;
  constexpr std::int64_t kCold = 2, kTimed = 4;
  const models::Model other = models::random_model(model_.config, *encoder_, DType::kF32, 0);
  const auto cases = demo::task_cases(TaskSide::kTraining, seed(2), (kCold + kTimed) * kLines);
  jobs::FitHooks hooks;
  Clock::time_point start;
  hooks.on_step = [&](std::int64_t step) {
    encoder_->commit_and_wait();
    if (step == kCold) start = Clock::now();
  };
  jobs::train(*encoder_, other, {demo::task_samples(cases), {}, {}}, training(kCold + kTimed),
              hooks);
  const double each = since(start) / kTimed;
  const auto fit = static_cast<std::int64_t>(kTrainingShare * flags_.seconds / each);
  result_.iterations = std::clamp<std::int64_t>(fit, 1, flags_.iterations);
}

void Demo::mark(std::int64_t step) {
  const auto start = Clock::now();
  if (trace_ != nullptr) {
    encoder_->commit_and_wait();
    encoder_->set_trace(nullptr);
  }
  result_.points.push_back({step, demo::score_tasks(*encoder_, model_, held_)});
  keep();
  if (trace_ != nullptr) encoder_->set_trace(trace_);
  scoring_ += Clock::now() - start;
  if (globals_.quiet) return;
  const demo::TaskScores& scores = result_.points.back().scores;
  std::string line = "step " +
                     std::string(4 - std::min<std::size_t>(4, std::to_string(step).size()), ' ') +
                     std::to_string(step) + ": accuracy";
  const auto percent = [](double share) {
    const std::string text = fixed(100 * share, 0);
    return std::string(4 - text.size(), ' ') + text + " %";
  };
  line += percent(scores.all().share()) + " (";
  for (std::size_t t = 0; t < demo::kTasks; ++t) {
    line += (t == 0 ? "" : ", ") + std::string(demo::name_of(static_cast<demo::Task>(t))) +
            percent(scores.of[t].share());
  }
  bar_->line(line + ")");
}

// Kernels of a few steps in the middle, or the first ones after it where a run was stopped there.
void Demo::trace(std::int64_t step) {
  const std::int64_t n = result_.iterations;
  if (trace_ == nullptr && result_.kernels.empty() && step >= n / 2 && step < n) {
    encoder_->commit_and_wait();
    trace_ = std::make_shared<Trace>();
    encoder_->set_trace(trace_);
    traced_from_ = step;
    traced_begun_ = Clock::now() - scoring_;
  } else if (trace_ != nullptr && (step == n || step == traced_from_ + kTracedSteps)) {
    encoder_->commit_and_wait();
    result_.traced_seconds = since(traced_begun_ + scoring_);
    encoder_->set_trace(nullptr);
    result_.traced_steps = step - traced_from_;
    add_kernels(trace_->json());
    trace_ = nullptr;
  }
}

jobs::FitHooks Demo::watch(const std::string& title, std::int64_t iterations) {
  const auto show = [this, title, iterations](std::int64_t start) {
    Progress::Options options;
    options.start = start;
    bar_ = std::make_unique<Progress>(title, iterations, globals_, options);
  };
  show(0);
  loss_ = 0;
  jobs::FitHooks hooks;
  hooks.stop = [] {
    return Interrupts::asked();
  };
  hooks.on_report = [this](const jobs::FitPoint& point) {
    loss_ = point.loss;
  };
  hooks.on_resumed = [this, show](std::int64_t step) {
    show(step);
    resumed_ = step;
    if (!globals_.quiet) bar_->line(stage_ + " resumed after step " + std::to_string(step));
  };
  return hooks;
}

void Demo::train() {
  stage(kTraining);
  const std::int64_t n = result_.iterations;
  const auto samples =
      demo::task_samples(demo::task_cases(TaskSide::kTraining, seed(2), n * kLines));
  for (const jobs::Sample& sample : samples) result_.tokens += std::ssize(sample.tokens) - 1;
  const double tokens_per_step = static_cast<double>(result_.tokens) / static_cast<double>(n);
  const std::int64_t every = std::max<std::int64_t>(1, n / kPoints);

  jobs::FitHooks hooks = watch(kTraining, n);
  if (result_.points.empty()) mark(0);
  const auto start = Clock::now() - scoring_;
  const auto goes_on = hooks.on_resumed;
  hooks.on_resumed = [&](std::int64_t step) {
    is_accepted_ = true;
    goes_on(step);
    std::erase_if(result_.points, [&](const demo::DemoPoint& point) { return point.step > step; });
  };
  hooks.on_step = [&](std::int64_t step) {
    if (trace_ != nullptr) trace(step);
    if (step == n || step % every == 0) mark(step);
    const double rate =
        tokens_per_step * static_cast<double>(step - resumed_) / since(start + scoring_);
    const std::string known = loss_ > 0 ? "loss " + fixed(loss_, 3) + ", " : "";
    bar_->at(step, known + fixed(rate, 0) + " tokens/s");
    if (trace_ == nullptr) trace(step);
  };
  jobs::TrainOptions options = training(n);
  const StateFlags state = state_of(kTraining);
  options.fit.folder = state.folder;
  options.fit.resume = state.resume;
  options.fit.save_every = every;
  options.fit.fingerprint = {{"cases", std::to_string(flags_.cases)},
                             {"seed", std::to_string(flags_.seed)}};
  const double seconds = seconds_of(kTraining);
  jobs::FitResult fit = jobs::train(*encoder_, model_, {samples, {}, {}}, options, hooks).fit;
  encoder_->set_trace(nullptr);
  bar_ = nullptr;
  if (fit.stopped) {
    keep();
    stop();
  }
  fit.seconds += seconds;
  fit.peak_bytes = std::max(fit.peak_bytes, result_.training.peak_bytes);
  result_.training = std::move(fit);
}

void Demo::add_kernels(const std::string& trace) {
  std::map<std::string, demo::KernelTime> all;
  const Json events = Json::parse(trace, "trace");
  for (const Json& event : events.find("traceEvents")->array()) {
    demo::KernelTime& kernel = all[event.find("name")->string()];
    ++kernel.calls;
    kernel.seconds += 1e-6 * event.find("dur")->number();
  }
  for (auto& [name, kernel] : all) {
    kernel.name = name;
    result_.kernels.push_back(kernel);
  }
  std::stable_sort(
      result_.kernels.begin(), result_.kernels.end(),
      [](const demo::KernelTime& a, const demo::KernelTime& b) { return a.seconds > b.seconds; });
}

// Of the held-out lines, those of one length together: no padding is counted.
void Demo::count_routes() {
  std::map<std::int64_t, std::vector<std::int32_t>> by_length;
  for (const jobs::Sample& sample : demo::task_samples(held_)) {
    std::vector<std::int32_t>& rows = by_length[std::ssize(sample.tokens)];
    rows.insert(rows.end(), sample.tokens.begin(), sample.tokens.end());
  }
  result_.routes.assign(
      model_.config.plan.layers.size(),
      std::vector<double>(static_cast<std::size_t>(model_.config.plan.moe()->experts)));
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
  demo::DemoModel row;
  row.name = name;
  row.folder = folder;
  row.bytes = models::weight_bytes(loaded);
  row.bits_per_weight = models::bits_per_weight(loaded);
  row.scores = demo::score_tasks(*encoder_, loaded, held_);
  row.evaluation = jobs::evaluate(*encoder_, loaded, &reference_, held_batches_);

  const auto tokenizer = formats::Tokenizer::from_directory(path(folder));
  std::vector<std::vector<std::int32_t>> prompts;
  for (const demo::TaskCase& one : result_.questions) {
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
  stage(kDistilling);
  const StateFlags state = state_of(kDistilling);
  jobs::DwqOptions o;
  o.fit.learning_rate = kDwqRate;
  o.fit.iterations = std::max<std::int64_t>(1, result_.iterations / kDwqShare);
  o.fit.report_every = std::max<std::int64_t>(1, o.fit.iterations / 30);
  o.fit.validate_every = 0;
  o.fit.save_every = std::max<std::int64_t>(1, o.fit.iterations / kPoints);
  o.fit.folder = state.folder;
  o.fit.resume = state.resume;
  o.others = true;
  const auto lines = [&](std::uint64_t of, std::int64_t count) {
    return demo::task_samples(demo::task_cases(TaskSide::kTraining, seed(of), count));
  };
  const jobs::Batches train(lines(3, o.fit.iterations * kLines), batches());
  jobs::FitHooks hooks = watch(kDistilling, o.fit.iterations);
  hooks.on_step = [&](std::int64_t step) {
    bar_->at(step, loss_ > 0 ? "KL divergence " + fixed(loss_, 4) : "");
  };
  hooks.on_saved = [&](std::int64_t) {
    keep();
  };
  result_.dwq = jobs::dwq(*encoder_, student_, {&model_, nullptr}, train,
                          jobs::every_batch(lines(4, 4 * kLines), batches()), o, hooks);
  bar_ = nullptr;
  if (result_.dwq.fit.stopped) stop();
  if (!result_.dwq.warning.empty()) remark(result_.dwq.warning);
}

// Once all is written nothing is left to go on from. Training goes last: what is left without it is no run.
void Demo::forget() {
  for (const char* job : {kDistilling, kTraining}) state_of(job).run().remove();
  std::error_code ignored;
  fs::remove(path(kProgress), ignored);
  fs::remove(path(kState), ignored);
}

const demo::DemoResult& Demo::run() {
  enter();
  if (flags_.resume && has_demo_state(flags_.out)) go_on();
  begin();
  choose_iterations();
  train();
  add("full", "full", model_);
  count_routes();
  add("4 bits", "4bit", models::quantize_model(*encoder_, model_, models::usual_format({4, 64})));
  student_ = models::quantize_model(*encoder_, model_, models::usual_format({2, 64}));
  add("2 bits", "2bit", student_);
  distil();
  add("2 bits, DWQ", "2bit-dwq", student_);
  stage("");
  for (const auto& [name, seconds] : result_.stages) result_.seconds += seconds;
  put("demo.json", demo::to_json(result_).dump(2) + "\n");
  put("report.html", demo::report_page(result_));
  forget();
  return result_;
}

}  // namespace

bool has_demo_state(const std::string& out) {
  const std::string state = out + "/" + kState + "/";
  return jobs::RunFolder(state + kTraining).has_state() ||
         jobs::RunFolder(state + kDistilling).has_state();
}

demo::DemoResult run_demo(const Globals& globals, const DemoFlags& flags) {
  Demo demo(globals, flags);
  demo::DemoResult result;
  with_state(demo.state(), globals, [&] { result = demo.run(); });
  return result;
}

}  // namespace mlxtape::cli
