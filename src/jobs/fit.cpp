#include "mlxtape/jobs/fit.h"

#include <chrono>
#include <cmath>
#include <numbers>
#include <set>

#include "fit_state.h"

namespace mlxtape::jobs {

namespace {

Error wrong(Errc code, const std::string& what) { return {code, "fit: " + what}; }

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Check check_options(const FitOptions& o) {
  const auto number = [](const char* what, double got) {
    return wrong(Errc::kArgument, std::string(what) + ", got " + std::to_string(got));
  };
  const auto count = [](const char* what, std::int64_t got) {
    return wrong(Errc::kArgument, std::string(what) + ", got " + std::to_string(got));
  };
  if (o.iterations < 1 || o.iterations > INT32_MAX) {
    return count("iterations must be at least 1 and below 2^31", o.iterations);
  }
  if (o.accumulation < 1) return count("accumulation must be at least 1", o.accumulation);
  if (!(o.learning_rate >= 0) || !std::isfinite(o.learning_rate)) {
    return number("learning_rate must be at least 0 and finite", o.learning_rate);
  }
  if (o.warmup < 0) return count("warmup must be at least 0", o.warmup);
  if (!(o.final_share >= 0 && o.final_share <= 1)) {
    return number("final_share must be from 0 to 1", o.final_share);
  }
  if (!(o.clip >= 0) || !std::isfinite(o.clip)) {
    return number("clip must be at least 0 and finite", o.clip);
  }
  if (o.report_every < 0) return count("report_every must be at least 0", o.report_every);
  if (o.validate_every < 0) return count("validate_every must be at least 0", o.validate_every);
  if (o.save_every < 0) return count("save_every must be at least 0", o.save_every);
  if (o.resume && o.folder.empty()) {
    return wrong(Errc::kArgument, "to resume there must be a folder with a state, got none");
  }
  return std::nullopt;
}

// The sum of one trainable's gradients: dense, or rows where all of them were.
struct GradientSum {
  Tensor dense;
  RowGrad rows;

  bool is_rows() const { return rows.ids.defined(); }
  const Tensor& values() const { return is_rows() ? rows.rows : dense; }
};

class Fit {
 public:
  Fit(CommandEncoder& encoder, const std::vector<Trainable>& trainables, const Objective& objective,
      const FitOptions& options, const FitHooks& hooks)
      : encoder_(encoder),
        objective_(objective),
        options_(options),
        hooks_(hooks),
        folder_(options, hooks.validate != nullptr) {
    if (&encoder.device() != trainables.front().tensor.device()) {
      throw wrong(Errc::kDevice, "what is trained must be on " + encoder.device().name());
    }
    if (folder_.has_state() && !options.resume) {
      throw wrong(Errc::kArgument,
                  folder_.state() + " is the state of a run: resume it, or take another folder");
    }
    for (const Trainable& each : trainables) {
      const Tensor& w = each.tensor;
      FitSlot slot{each.name, w.detach(), {}, {}, {}};
      if (w.dtype() != DType::kF32) {
        slot.master = encoder.zeros(w.shape(), DType::kF32);
        encoder.add_into(slot.master, slot.w);
      }
      slot.m = encoder.zeros(w.shape(), DType::kF32);
      slot.v = encoder.zeros(w.shape(), DType::kF32);
      slots_.push_back(slot);
    }
  }

  FitResult run();

 private:
  bool is_due(std::int64_t every) const {
    return progress_.step == options_.iterations || (every > 0 && progress_.step % every == 0);
  }
  void begin();
  void step();
  void add_gradients(std::int64_t batch, const Tensor& loss_sum);
  void check_recorded(const Recorded& recorded) const;
  void update(const ops::GradNorm& norm);
  void report();
  bool validate();
  void save(bool improved);
  void require_finite(const char* what, float value) const;

  CommandEncoder& encoder_;
  const Objective& objective_;
  const FitOptions& options_;
  const FitHooks& hooks_;
  FitFolder folder_;
  std::vector<FitSlot> slots_;
  std::vector<GradientSum> sums_;
  Tensor t_, rate_;  // the step's numbers, on the device
  FitProgress progress_;
  double norm_ = 0;  // of the last step
};

void Fit::begin() {
  folder_.prepare();
  if (folder_.has_state()) {
    progress_ = folder_.read_state(encoder_, slots_);
    // A state comes before its best: what is missing of that can be only its own.
    const std::int64_t best = progress_.best_step;
    if (best >= 0 && !folder_.has_best(best)) {
      if (best != progress_.step) {
        throw wrong(Errc::kIo, folder_.best() + " must be of step " + std::to_string(best) +
                                   ", as the state beside it says");
      }
      folder_.write_best(encoder_, slots_, progress_);
    }
    if (progress_.step > options_.iterations) {
      throw wrong(Errc::kArgument,
                  "the run has " + std::to_string(progress_.step) +
                      " steps behind it, so iterations must be at least that, got " +
                      std::to_string(options_.iterations));
    }
    if (hooks_.on_resumed) hooks_.on_resumed(progress_.step);
  }
  rate_ = encoder_.zeros({1}, DType::kF32);
  t_ = encoder_.zeros({1}, DType::kI32);
  const auto done = static_cast<std::int32_t>(progress_.step);
  encoder_.upload(&done, sizeof done, t_);
}

void Fit::check_recorded(const Recorded& recorded) const {
  if (recorded.loss.size() != 1) {
    throw wrong(Errc::kShape,
                "the loss must be one number, got " + to_string(recorded.loss.shape()));
  }
  if (recorded.watched.size() != slots_.size()) {
    throw wrong(Errc::kArgument, "the objective must watch all " + std::to_string(slots_.size()) +
                                     " that are trained, got " +
                                     std::to_string(recorded.watched.size()));
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Tensor& w = slots_[i].w;
    const Tensor& x = recorded.watched[i];
    if (x.data() != w.data() || !(x.shape() == w.shape()) || x.dtype() != w.dtype()) {
      throw wrong(Errc::kArgument,
                  "what the objective watches must be what is trained, in its order, got another "
                  "tensor in the place of \"" +
                      slots_[i].name + "\"");
    }
  }
}

// The gradients of one batch, of which accumulation make a step. Each has a tape of its own: what is in it twice, the
// batch's gradients and their sum, is small beside what a tape of several batches would hold.
void Fit::add_gradients(std::int64_t batch, const Tensor& loss_sum) {
  std::vector<GradientSum> gradients(slots_.size());
  {
    Tape tape(encoder_);
    const Recorded recorded = objective_(tape, batch);
    check_recorded(recorded);
    for (const Tensor& x : recorded.watched) tape.watch(x, DType::kF32);
    const Tensor& loss = recorded.loss;
    const double share = 1 / static_cast<double>(options_.accumulation);
    tape.backward(loss, encoder_.full(loss.shape(), loss.dtype(), share));
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const Tensor& x = recorded.watched[i];
      if (options_.lazy_rows && tape.has_row_grad(x)) {
        gradients[i].rows = tape.row_grad(x);
      } else {
        gradients[i].dense = encoder_.contiguous(tape.grad(x));
      }
    }
    encoder_.add_into(loss_sum, loss.detach().reshape({1}));
    progress_.tokens += recorded.tokens;
  }
  if (sums_.empty()) {
    sums_ = std::move(gradients);
    return;
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    GradientSum& sum = sums_[i];
    const GradientSum& more = gradients[i];
    if (sum.is_rows() && more.is_rows()) {
      sum.rows = sum.rows.merge(encoder_, sum.rows, more.rows, slots_[i].w.shape(), DType::kF32);
      continue;
    }
    if (sum.is_rows()) {
      sum.dense = encoder_.zeros(slots_[i].w.shape(), DType::kF32);
      sum.rows.add_to(encoder_, sum.dense, sum.rows);
      sum.rows = {};
    } else if (sum.dense.buffer().owners() != 1) {  // two trainables may have had the same one
      const Tensor shared = sum.dense;
      sum.dense = encoder_.empty_like(shared);
      encoder_.copy(shared, sum.dense);
    }
    if (more.is_rows()) {
      more.rows.add_to(encoder_, sum.dense, more.rows);
    } else {
      encoder_.add_into(sum.dense, more.dense);
    }
  }
}

void Fit::require_finite(const char* what, float value) const {
  if (std::isfinite(value)) return;
  throw NotFinite("fit: " + std::string(what) + " of step " + std::to_string(progress_.step + 1) +
                  " must be finite, got " + text_of_nonfinite(static_cast<double>(value)) +
                  "; nothing of that step was kept, and " + folder_.last_state() +
                  ". A lower learning rate, a longer warmup or a clip may help");
}

// One step, or an error before anything is changed.
void Fit::step() {
  const auto start = std::chrono::steady_clock::now();
  sums_.clear();
  const Tensor loss_sum = encoder_.zeros({1}, DType::kF32);
  for (std::int64_t a = 0; a < options_.accumulation; ++a) {
    add_gradients(options_.accumulation * progress_.step + a, loss_sum);
  }
  std::vector<Tensor> gradients;
  gradients.reserve(sums_.size());
  for (const GradientSum& sum : sums_) gradients.push_back(sum.values());
  const ops::GradNorm norm = ops::grad_norm(
      encoder_, gradients, options_.clip > 0 ? static_cast<float>(options_.clip) : 1);
  float loss = 0, size = 0;
  encoder_.download(loss_sum, &loss, sizeof loss);
  encoder_.download(norm.norm, &size, sizeof size);
  loss /= static_cast<float>(options_.accumulation);
  require_finite("the loss", loss);
  require_finite("the norm of the gradients", size);
  norm_ = static_cast<double>(size);
  update(norm);
  ++progress_.step;
  progress_.loss += static_cast<double>(loss);
  ++progress_.steps;
  progress_.seconds += seconds_since(start);
}

void Fit::update(const ops::GradNorm& norm) {
  std::vector<ops::AdamWSlot> slots;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const FitSlot& s = slots_[i];
    slots.push_back({s.w, sums_[i].values(), s.m, s.v, s.master, sums_[i].rows.ids});
  }
  const auto rate = static_cast<float>(learning_rate_at(options_, progress_.step + 1));
  encoder_.upload(&rate, sizeof rate, rate_);
  ops::advance(encoder_, t_);
  ops::adamw_step(encoder_, slots, {rate_, t_, options_.clip > 0 ? norm.scale : Tensor()},
                  options_.adamw);
  sums_.clear();
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
  const double loss = hooks_.validate();
  if (!std::isfinite(loss)) {
    throw NotFinite("fit: the loss of the validation after step " + std::to_string(progress_.step) +
                    " must be finite, got " + text_of_nonfinite(loss) + "; " +
                    folder_.last_state());
  }
  const double rate = progress_.step == 0 ? 0 : learning_rate_at(options_, progress_.step);
  progress_.validations.push_back({progress_.step, loss, rate, norm_, 0});
  const bool improved = progress_.best_step < 0 || loss < progress_.best_loss;
  if (improved) {
    progress_.best_step = progress_.step;
    progress_.best_loss = loss;
  }
  if (hooks_.on_validated) hooks_.on_validated(progress_.validations.back());
  return improved;
}

void Fit::save(bool improved) {
  if (!folder_.is_used()) return;
  folder_.write_state(encoder_, slots_, progress_);
  if (improved) folder_.write_best(encoder_, slots_, progress_);
  if (hooks_.on_saved) hooks_.on_saved(progress_.step);
}

FitResult Fit::run() {
  const auto start = std::chrono::steady_clock::now();
  encoder_.device().memory().reset_peak();
  begin();
  bool stopped = false;
  if (progress_.step == 0 && progress_.validations.empty() && hooks_.validate) save(validate());
  while (progress_.step < options_.iterations && !stopped) {
    step();
    if (hooks_.on_step) hooks_.on_step(progress_.step);
    if (is_due(options_.report_every)) report();
    const bool improved = hooks_.validate && is_due(options_.validate_every) && validate();
    stopped = hooks_.stop && hooks_.stop();
    if (improved || stopped || is_due(options_.save_every)) save(improved);
  }
  FitResult result;
  result.steps = progress_.step;
  result.stopped = stopped && progress_.step < options_.iterations;
  result.reports = std::move(progress_.reports);
  result.validations = std::move(progress_.validations);
  result.best_step = progress_.best_step;
  result.best_loss = progress_.best_loss;
  result.peak_bytes = encoder_.device().memory().stats().peak;
  encoder_.commit_and_wait();
  result.seconds = seconds_since(start);
  return result;
}

}  // namespace

double learning_rate_at(const FitOptions& options, std::int64_t step) {
  const double most = options.learning_rate;
  if (step <= options.warmup && options.warmup > 0) {
    return most * static_cast<double>(step) / static_cast<double>(options.warmup);
  }
  if (!options.cosine) return most;
  const double least = most * options.final_share;
  const double u = static_cast<double>(step - options.warmup) /
                   static_cast<double>(options.iterations - options.warmup);
  return least + (most - least) * (1 + std::cos(std::numbers::pi * u)) / 2;
}

Check fit_check(const std::vector<Trainable>& trainables, const FitOptions& options) {
  if (trainables.empty()) return wrong(Errc::kArgument, "something must be trained, got nothing");
  std::set<std::string> names;
  for (const Trainable& each : trainables) {
    const Tensor& t = each.tensor;
    const std::string name = "\"" + each.name + "\" ";
    if (each.name.empty() || each.name.starts_with("adamw.") || !names.insert(each.name).second) {
      return wrong(Errc::kArgument,
                   "what is trained must have names of their own that do not begin "
                   "with adamw., got " +
                       name);
    }
    if (!is_kernel_float(t.dtype())) {
      return wrong(Errc::kDType, name + "must be f32, f16 or bf16, got " + name_of(t.dtype()));
    }
    if (!t.is_contiguous()) {
      return wrong(Errc::kShape,
                   name + "must be contiguous, got strides " + to_string(t.strides()));
    }
    if (t.backend() != trainables.front().tensor.backend()) {
      return wrong(Errc::kDevice, name + "must be where the first is, got " + name_of(t.backend()));
    }
  }
  return check_options(options);
}

FitResult fit(CommandEncoder& encoder, const std::vector<Trainable>& trainables,
              const Objective& objective, const FitOptions& options, const FitHooks& hooks) {
  require(fit_check(trainables, options));
  return Fit(encoder, trainables, objective, options, hooks).run();
}

}  // namespace mlxtape::jobs
