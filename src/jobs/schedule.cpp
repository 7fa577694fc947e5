#include "mlxtape/jobs/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "digits.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::jobs {

namespace {

constexpr double kMostSteps = 1 << 30;

struct Kind {
  const char* name;
  const char* takes;
  std::size_t least, most;     // arguments
  int steps, rate_too, decay;  // which of them; -1: none
};
constexpr std::array kKinds = {
    Kind{"cosine_decay", "[rate, steps] or [rate, steps, end]", 2, 3, 1, 2, -1},
    Kind{"linear_schedule", "[rate, end, steps]", 3, 3, 2, 1, -1},
    Kind{"exponential_decay", "[rate, decay]", 2, 2, -1, -1, 1},
    Kind{"step_decay", "[rate, decay, steps]", 3, 3, 2, -1, 1}};

const Kind* kind_of(const Schedule& schedule) {
  const auto* found = std::find_if(kKinds.begin(), kKinds.end(),
                                   [&](const Kind& kind) { return schedule.name == kind.name; });
  return found != kKinds.end() ? found : nullptr;
}

bool is_rate(double x) { return x >= 0 && x <= std::numeric_limits<float>::max(); }

bool is_count(double x) { return x >= 1 && x <= kMostSteps && x == std::floor(x); }

Error wrong(const std::string& what) { return {Errc::kArgument, "schedule: " + what}; }

std::string list(const std::vector<double>& numbers) {
  std::string text = "[";
  for (const double x : numbers) text += (text.size() > 1 ? ", " : "") + digits(x);
  return text + "]";
}

}  // namespace

Check schedule_check(const Schedule& schedule) {
  const Kind* kind = kind_of(schedule);
  if (kind == nullptr) {
    return wrong(
        "name must be cosine_decay, linear_schedule, exponential_decay or step_decay, got '" +
        shown(schedule.name) + "'");
  }
  const std::vector<double>& given = schedule.arguments;
  const std::string name = kind->name;
  if (given.size() < kind->least || given.size() > kind->most) {
    return wrong("arguments of " + name + " must be " + kind->takes + ", got " +
                 std::to_string(given.size()) + " numbers");
  }
  for (std::size_t i = 0; i < given.size(); ++i) {
    const int at = static_cast<int>(i);
    const char* must = at == kind->steps   ? "a whole number from 1 to 2^30"
                       : at == kind->decay ? "a decay from 0 to 1"
                                           : "a rate of at least 0";
    const bool is = at == kind->steps   ? is_count(given[i])
                    : at == kind->decay ? given[i] >= 0 && given[i] <= 1
                                        : is_rate(given[i]);
    if (is) continue;
    return wrong("argument " + std::to_string(i + 1) + " of " + name + ", " + kind->takes +
                 ", must be " + must + ", got " + formats::Json(given[i]).dump());
  }
  if (schedule.warmup < 0 || static_cast<double>(schedule.warmup) > kMostSteps) {
    return wrong("warmup must be a whole number from 0 to 2^30, got " +
                 std::to_string(schedule.warmup));
  }
  if (!is_rate(schedule.warmup_init)) {
    return wrong("warmup_init must be a rate of at least 0, got " +
                 formats::Json(schedule.warmup_init).dump());
  }
  return std::nullopt;
}

double rate_at(const Schedule& schedule, std::int64_t done) {
  const std::vector<double>& a = schedule.arguments;
  const double rate = a[0];
  auto s = static_cast<double>(done);
  if (const auto warmup = static_cast<double>(schedule.warmup); warmup > 0) {
    if (s <= warmup) return schedule.warmup_init + (rate - schedule.warmup_init) * (s / warmup);
    s -= warmup + 1;
  }
  const Kind& kind = *kind_of(schedule);
  if (kind.rate_too >= 0) {
    const double n = a[static_cast<std::size_t>(kind.steps)], share = std::min(s, n) / n;
    const auto last = static_cast<std::size_t>(kind.rate_too);
    const double end = last < a.size() ? a[last] : 0;
    if (schedule.name == "linear_schedule") return rate + (end - rate) * share;
    return end + (rate - end) * (1 + std::cos(std::numbers::pi * share)) / 2;
  }
  return rate * std::pow(a[1], kind.steps < 0 ? s : std::floor(s / a[2]));
}

std::string to_string(const Schedule& schedule) {
  std::string text = schedule.name + list(schedule.arguments);
  if (schedule.warmup == 0) return text;
  return text + ", warmup " + std::to_string(schedule.warmup) + " from " +
         digits(schedule.warmup_init);
}

}  // namespace mlxtape::jobs
