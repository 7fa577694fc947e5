#include <cstring>
#include <span>

#include "fuzz/targets.h"
#include "jobs/fit_state.h"
#include "mlxtape/base/checksum.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/encoder.h"
#include "support/temp_folder.h"

namespace mlxtape::fuzz {

namespace {

using jobs::FitOptions;
using jobs::FitPoint;
using jobs::FitProgress;
using jobs::FitState;
using jobs::OptimiserSlot;

// The run whose states these are: two trainables, one of them in 16 bits.
struct Run {
  Run() {
    options.folder = folder.path.string();
    options.resume = true;
    options.fingerprint = {{"data", "fuzz"}};
    for (const auto& [name, dtype] : {std::pair("a", DType::kF32), {"b", DType::kBF16}}) {
      const Shape shape = dtype == DType::kF32 ? Shape{2, 3} : Shape{4};
      trainables.push_back({name, encoder->zeros(shape, dtype)});
    }
    slots = jobs::make_slots(*encoder, *options.optimiser, trainables);
  }
  test::TempFolder folder;
  std::unique_ptr<CommandEncoder> encoder = Device::cpu().make_encoder();
  FitOptions options;
  std::vector<jobs::Trainable> trainables;
  std::vector<OptimiserSlot> slots;
};

// Its last 8 bytes are the checksum of those before, or every state would be refused for that alone.
std::string with_checksum(std::string_view input) {
  std::string state(input);
  if (state.size() < sizeof(std::uint64_t)) return state;
  const std::size_t end = state.size() - sizeof(std::uint64_t);
  Checksum sum;
  sum.add(std::as_bytes(std::span(state.data(), end)));
  const std::uint64_t value = sum.value();
  std::memcpy(state.data() + end, &value, sizeof value);
  return state;
}

void check_points(const std::vector<FitPoint>& points, std::int64_t step) {
  std::int64_t before = 0;
  for (const FitPoint& point : points) {
    check(point.step >= before && point.step <= step, "points lie in order, before the step");
    before = point.step;
  }
}

void check_progress(const FitProgress& p) {
  check(p.step >= 0, "a run has 0 or more steps behind it");
  check(p.best_step >= -1 && p.best_step <= p.step, "the best step is one of the run's");
  check(p.steps >= 0 && p.steps <= p.step, "steps since a report are the run's");
  check(p.tokens >= 0 && p.seconds >= 0, "tokens and time count up");
  check_points(p.reports, p.step);
  check_points(p.validations, p.step);
}

bool same(const std::vector<FitPoint>& a, const std::vector<FitPoint>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.step == y.step && x.loss == y.loss && x.rate == y.rate && x.norm == y.norm &&
           x.tokens_per_second == y.tokens_per_second;
  });
}

}  // namespace

bool run_state(std::string_view input) {
  static Run run;
  FitState kept(run.options, true);
  FitProgress p;
  const std::string state = with_checksum(input);
  for (const std::string& file : {kept.folder().state(), kept.folder().best()})
    test::put(file, state);
  accepts([&] { kept.has_best(7); });
  if (!accepts([&] { p = kept.read(*run.encoder, run.slots); })) return false;
  check_progress(p);
  kept.write(*run.encoder, run.slots, p);
  const FitProgress again = kept.read(*run.encoder, run.slots);
  check(again.step == p.step && again.best_step == p.best_step && again.best_loss == p.best_loss &&
            again.loss == p.loss && again.seconds == p.seconds && again.steps == p.steps &&
            again.tokens == p.tokens && same(again.reports, p.reports) &&
            same(again.validations, p.validations),
        "a state that is written is read as it was");
  return true;
}

}  // namespace mlxtape::fuzz
