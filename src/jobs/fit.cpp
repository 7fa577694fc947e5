#include "mlxtape/jobs/fit.h"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>

#include "fit_state.h"
#include "fit_step.h"
#include "mlxtape/models/finite.h"

namespace mlxtape::jobs {

namespace {

Error wrong(Errc code, const std::string& what) { return {code, "fit: " + what}; }

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Fit {
 public:
  Fit(CommandEncoder& encoder, const FitTask& task, const FitOptions& options,
      const FitHooks& hooks)
      : encoder_(encoder),
        task_(task),
        options_(options),
        hooks_(hooks),
        state_(options, task.validate != nullptr),
        device_step_(encoder, task.objective, options, slots_) {
    if (&encoder.device() != task.trainables.front().tensor.device()) {
      throw wrong(Errc::kDevice, "trained parameters must be on " + encoder.device().name());
    }
    const RunFolder& folder = state_.folder();
    if (folder.has_state() && !options.resume) {
      throw wrong(Errc::kArgument,
                  folder.state() +
                      " is the checkpoint of an unfinished run: resume it, or use another folder");
    }
    slots_ = make_slots(encoder, *options.optimiser, task.trainables);
  }

  FitResult run();

 private:
  bool is_due(std::int64_t every) const {
    return progress_.step == options_.iterations || (every > 0 && progress_.step % every == 0);
  }
  void begin();
  void step();
  void settle();
  void report();
  bool validate();
  void save(bool improved);
  void keep_best();
  std::int64_t end(bool stopped);
  void require_finite(const char* what, float value) const;
  void require_finite_weights() const;

  CommandEncoder& encoder_;
  const FitTask& task_;
  const FitOptions& options_;
  const FitHooks& hooks_;
  FitState state_;
  std::vector<OptimiserSlot> slots_;
  FitStep device_step_;
  // Of the last step, which the host checks once the next one is queued.
  struct Pending {
    std::unique_ptr<PendingDownload> loss, norm;
  };
  std::optional<Pending> pending_;
  FitProgress progress_;
  std::vector<Tensor> best_;  // the values of the lowest validation, where no folder keeps them
  double norm_ = 0;           // of the last step
};

void Fit::begin() {
  state_.folder().enter();
  if (state_.folder().has_state()) {
    progress_ = state_.read(encoder_, slots_);
    // A state comes before its best: what is missing of that can be only its own.
    const std::int64_t best = progress_.best_step;
    std::error_code none;
    if (best < 0 && std::filesystem::exists(state_.folder().best(), none)) {
      throw wrong(Errc::kIo, state_.folder().best() +
                                 " belongs to another run than the checkpoint next to it");
    }
    if (best >= 0 && !state_.has_best(best)) {
      if (best != progress_.step) {
        throw wrong(Errc::kIo, state_.folder().best() + " must be from step " +
                                   std::to_string(best) + ", as the checkpoint next to it says");
      }
      state_.write_best(encoder_, slots_, progress_);
    }
    if (progress_.step > options_.iterations) {
      throw wrong(Errc::kArgument, "the run has already done " + std::to_string(progress_.step) +
                                       " steps, so iterations must be at least that, got " +
                                       std::to_string(options_.iterations));
    }
    if (task_.with_state) {
      encoder_.commit_and_wait();
      task_.with_state(progress_.step);
    }
    if (hooks_.on_resumed) hooks_.on_resumed(progress_.step);
  }
  device_step_.begin(progress_.step);
}

// Of the step before the one that comes now.
void Fit::require_finite(const char* what, float value) const {
  if (std::isfinite(value)) return;
  throw NotFinite("fit: " + std::string(what) + " of step " + std::to_string(progress_.step) +
                  " must be finite, got " + text_of_nonfinite(static_cast<double>(value)) +
                  "; that step was discarded, and " + state_.last() +
                  ". A lower learning rate, a longer warm-up or gradient clipping may help");
}

// Queues one step and then checks the previous one, so the host never waits for what it has just queued. A step that is not
// finite changes nothing, nor do those after it (FitStep::guarded), so reporting it one step later is soon enough.
void Fit::step() {
  const auto start = std::chrono::steady_clock::now();
  progress_.tokens += device_step_.queue(progress_.step);
  Pending given{encoder_.begin_download(device_step_.loss_sum()),
                encoder_.begin_download(device_step_.norm())};
  progress_.seconds += seconds_since(start);
  settle();
  pending_ = std::move(given);
  ++progress_.step;
}

// Waits for the step that was queued last and checks it.
void Fit::settle() {
  if (!pending_) return;
  const auto start = std::chrono::steady_clock::now();
  const Pending last = std::move(*pending_);
  pending_.reset();
  const float loss =
      *static_cast<const float*>(last.loss->wait()) / static_cast<float>(options_.accumulation);
  const float size = *static_cast<const float*>(last.norm->wait());
  progress_.seconds += seconds_since(start);  // most of a step's time is spent here
  require_finite("the loss", loss);
  require_finite("the norm of the gradients", size);
  norm_ = static_cast<double>(size);
  progress_.loss += static_cast<double>(loss);
  ++progress_.steps;
}

void Fit::report() {
  const auto steps = static_cast<double>(progress_.steps);
  const double rate = learning_rate_at(options_, progress_.step);
  const double speed =
      progress_.seconds > 0 ? static_cast<double>(progress_.tokens) / progress_.seconds : 0;
  progress_.reports.push_back({progress_.step, progress_.loss / steps, rate, norm_, speed});
  progress_.loss = progress_.seconds = 0;
  progress_.steps = progress_.tokens = 0;
  if (hooks_.on_report) hooks_.on_report(progress_.reports.back());
}

// Is it the best so far?
bool Fit::validate() {
  device_step_.release();  // its memory is the validation's now
  const double loss = task_.validate();
  if (!std::isfinite(loss)) {
    throw NotFinite("fit: the validation loss after step " + std::to_string(progress_.step) +
                    " must be finite, got " + text_of_nonfinite(loss) + "; " + state_.last());
  }
  const double rate = progress_.step == 0 ? 0 : learning_rate_at(options_, progress_.step);
  progress_.validations.push_back({progress_.step, loss, rate, norm_, 0});
  const bool improved = progress_.best_step < 0 || loss < progress_.best_loss;
  if (improved) {
    progress_.best_step = progress_.step;
    progress_.best_loss = loss;
    if (task_.end_with != EndWith::kLast && !state_.folder().is_used()) keep_best();
  }
  if (hooks_.on_validated) hooks_.on_validated(progress_.validations.back());
  return improved;
}

void Fit::keep_best() {
  const bool is_first = best_.empty();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (is_first) best_.push_back(encoder_.empty_like(slots_[i].w));
    encoder_.copy(slots_[i].w, best_[i]);
  }
}

// Leaves the trainables as the task wants them; returns whose values they are then.
std::int64_t Fit::end(bool stopped) {
  const auto& seen = progress_.validations;
  bool wants_best = task_.end_with == EndWith::kBest;
  if (task_.end_with == EndWith::kBestIfWorse) {
    wants_best = !stopped && !seen.empty() && seen.back().loss > seen.front().loss;
  }
  if (!wants_best || progress_.best_step < 0) return progress_.step;
  if (progress_.best_step == progress_.step) return progress_.step;
  if (state_.folder().is_used()) {
    load_trainables(encoder_, state_.folder().best(), task_.trainables);
  } else {
    for (std::size_t i = 0; i < slots_.size(); ++i) encoder_.copy(best_[i], slots_[i].w);
  }
  return progress_.best_step;
}

// A finite gradient may still carry a weight away: by its rate, by its decay, by a type that is too narrow.
void Fit::require_finite_weights() const {
  std::vector<models::Parameter> weights;
  weights.reserve(slots_.size());
  for (const OptimiserSlot& slot : slots_) weights.push_back({slot.of.name, slot.w, {}});
  const models::NonFinite found = models::find_nonfinite(encoder_, weights);
  if (!found.any()) return;
  throw NotFinite("fit: the weights after step " + std::to_string(progress_.step) +
                  " must be finite: " + found.text() + "; they were not saved, and " +
                  state_.last() +
                  ". A lower learning rate, a longer warm-up or gradient clipping may help");
}

void Fit::save(bool improved) {
  require_finite_weights();  // also where the caller keeps them, not a folder
  if (!state_.folder().is_used()) return;
  state_.write(encoder_, slots_, progress_);
  if (improved) state_.write_best(encoder_, slots_, progress_);
  if (task_.with_state) task_.with_state(progress_.step);
  if (hooks_.on_saved) hooks_.on_saved(progress_.step);
}

FitResult Fit::run() {
  const auto start = std::chrono::steady_clock::now();
  encoder_.device().memory().reset_peak();
  begin();
  bool stopped = false;
  if (progress_.step == 0 && progress_.validations.empty() && task_.validate) save(validate());
  while (progress_.step < options_.iterations && !stopped) {
    step();
    if (hooks_.on_step) hooks_.on_step(progress_.step);
    const bool validates = task_.validate && is_due(options_.validate_every);
    const bool reports = is_due(options_.report_every);
    if (validates || reports || is_due(options_.save_every)) settle();
    if (reports) report();
    const bool improved = validates && validate();
    stopped = hooks_.stop && hooks_.stop();
    if (stopped) settle();
    if (improved || stopped || is_due(options_.save_every)) save(improved);
  }
  FitResult result;
  result.steps = progress_.step;
  result.stopped = stopped && progress_.step < options_.iterations;
  result.held_step = end(result.stopped);
  result.reports = std::move(progress_.reports);
  result.validations = std::move(progress_.validations);
  result.best_step = progress_.best_step;
  result.best_loss = progress_.best_loss;
  result.replays = static_cast<std::int64_t>(device_step_.replays());
  result.peak_bytes = encoder_.device().memory().stats().peak;
  encoder_.commit_and_wait();
  result.seconds = seconds_since(start);
  return result;
}

}  // namespace

FitResult fit(CommandEncoder& encoder, const FitTask& task, const FitOptions& options,
              const FitHooks& hooks) {
  require(fit_check(task.trainables, options));
  return Fit(encoder, task, options, hooks).run();
}

}  // namespace mlxtape::jobs
