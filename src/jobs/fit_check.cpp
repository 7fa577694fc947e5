// What a run is asked to do: is it possible, and how fast does it learn?
#include <cmath>
#include <limits>
#include <numbers>
#include <set>

#include "fit_state.h"
#include "mlxtape/jobs/fit.h"

namespace mlxtape::jobs {

namespace {

constexpr double kMost = std::numeric_limits<float>::max();

Error wrong(Errc code, const std::string& what) { return {code, "fit: " + what}; }

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
  if (!(o.learning_rate >= 0 && o.learning_rate <= kMost)) {
    return number("learning_rate must be at least 0 and finite as f32", o.learning_rate);
  }
  if (o.warmup < 0) return count("warmup must be at least 0", o.warmup);
  if (!(o.final_share >= 0 && o.final_share <= 1)) {
    return number("final_share must be from 0 to 1", o.final_share);
  }
  if (!o.schedule.name.empty()) {
    if (const Check check = schedule_check(o.schedule)) return check;
    if (o.warmup > 0 || o.cosine) {
      return wrong(Errc::kArgument, "a schedule has its own warmup and decay, got " +
                                        std::string(o.cosine ? "cosine" : "warmup") + " too");
    }
  }
  if (!(o.clip >= 0 && o.clip <= kMost)) {
    return number("clip must be at least 0 and finite as f32", o.clip);
  }
  if (o.report_every < 0) return count("report_every must be at least 0", o.report_every);
  if (o.validate_every < 0) return count("validate_every must be at least 0", o.validate_every);
  if (o.save_every < 0) return count("save_every must be at least 0", o.save_every);
  if (o.resume && o.folder.empty()) {
    return wrong(Errc::kArgument, "resume needs a folder with a checkpoint, got none");
  }
  return std::nullopt;
}

}  // namespace

double learning_rate_at(const FitOptions& options, std::int64_t step) {
  if (!options.schedule.name.empty()) return rate_at(options.schedule, step - 1);
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
  if (options.optimiser == nullptr)
    return wrong(Errc::kArgument, "an optimiser is needed, got none");
  if (const Check check = options.optimiser->check()) return check;
  if (trainables.empty())
    return wrong(Errc::kArgument, "there must be at least one parameter to train, got none");
  std::set<std::string> names;
  for (const Trainable& each : trainables) {
    const Tensor& t = each.tensor;
    const std::string name = "\"" + each.name + "\" ";
    bool is_new = !each.name.empty() && names.insert(each.name).second;
    for (const std::string& state : options.optimiser->states(each)) {
      is_new = is_new && names.insert(state_name(state, each.name)).second;
    }
    if (!is_new) {
      return wrong(Errc::kArgument,
                   "trained parameters must have unique names, also among the optimiser's "
                   "states, got " +
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
      return wrong(Errc::kDevice,
                   name + "must be on the same backend as the first, got " + name_of(t.backend()));
    }
  }
  return check_options(options);
}

}  // namespace mlxtape::jobs
