#include "mlxtape/jobs/sampler.h"

#include <algorithm>
#include <cmath>

#include "mix.h"
#include "mlxtape/jobs/not_finite.h"

namespace mlxtape::jobs {

Check sampling_check(const SamplingOptions& o) {
  const auto wrong = [](const char* what, auto got) {
    return Error(Errc::kArgument,
                 std::string("sampling: ") + what + ", got " + std::to_string(got));
  };
  if (!(o.temperature >= 0 && std::isfinite(o.temperature))) {
    return wrong("temperature must be a finite number of at least 0", o.temperature);
  }
  if (!(o.top_p > 0 && o.top_p <= 1)) return wrong("top_p must be above 0 and at most 1", o.top_p);
  if (!(o.min_p >= 0 && o.min_p <= 1)) return wrong("min_p must be from 0 to 1", o.min_p);
  if (o.top_k < 0) return wrong("top_k must be at least 0", o.top_k);
  if (!(o.repetition_penalty > 0 && std::isfinite(o.repetition_penalty))) {
    return wrong("repetition_penalty must be a finite number above 0", o.repetition_penalty);
  }
  if (o.repetition_context < 0) {
    return wrong("repetition_context must be at least 0", o.repetition_context);
  }
  return std::nullopt;
}

Sampler::Sampler(const SamplingOptions& options, std::uint64_t sequence)
    : options_(options), sequence_(sequence) {
  require(sampling_check(options));
}

std::int32_t Sampler::operator()(std::span<float> logits, std::span<const std::int32_t> before) {
  if (options_.repetition_penalty != 1) penalise(logits, before);
  float most = -INFINITY;
  std::int32_t best = -1;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > most) {
      most = logits[i];
      best = static_cast<std::int32_t>(i);
    }
  }
  if (best < 0 || !std::isfinite(most)) {
    throw NotFinite(
        "sampling: the logits have no largest finite number: the model's weights or its input are "
        "broken");
  }
  if (options_.temperature == 0) return best;
  gather(logits, most);
  return draw();
}

void Sampler::penalise(std::span<float> logits, std::span<const std::int32_t> before) const {
  const std::size_t context =
      std::min(before.size(), static_cast<std::size_t>(options_.repetition_context));
  std::vector<std::int32_t> seen(before.end() - static_cast<std::ptrdiff_t>(context), before.end());
  std::sort(seen.begin(), seen.end());
  seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
  const auto penalty = static_cast<float>(options_.repetition_penalty);
  for (const std::int32_t token : seen) {
    if (token < 0 || static_cast<std::size_t>(token) >= logits.size()) continue;
    float& z = logits[static_cast<std::size_t>(token)];
    z = z < 0 ? z * penalty : z / penalty;
  }
}

// Who may be drawn. Rows are long and few of them likely: they are sorted only as far as somebody looks.
void Sampler::gather(std::span<const float> logits, float most) {
  // A token 40 below the best in log-probability has 4e-18 of its weight: below the grain of a draw.
  const double reach = 40 * std::max(1.0, options_.temperature);
  double all = 0;  // Σ exp(z − most)
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const float z = logits[i] - most;
    if (!(static_cast<double>(z) > -reach)) continue;
    all += std::exp(static_cast<double>(z));
    if (static_cast<double>(z) < -40 * options_.temperature) continue;
    candidates_.push_back({z, static_cast<std::int32_t>(i)});
  }
  std::size_t kept = candidates_.size(), sorted = 0;
  const auto sort_to = [&](std::size_t n) {
    n = std::min(n, candidates_.size());
    if (n <= sorted) return;
    const auto at = [&](std::size_t i) {
      return candidates_.begin() + static_cast<std::ptrdiff_t>(i);
    };
    std::partial_sort(at(sorted), at(n), candidates_.end(),
                      [](const Candidate& a, const Candidate& b) {
                        return a.z != b.z ? a.z > b.z : a.token < b.token;
                      });
    sorted = n;
  };
  if (options_.top_k > 0) {
    kept = std::min(kept, static_cast<std::size_t>(options_.top_k));
    sort_to(kept);
  }
  if (options_.top_p < 1) {
    double mass = 0;
    std::size_t n = 0;
    while (n < kept && mass < options_.top_p * all) {
      if (n == sorted) sort_to(std::max<std::size_t>(64, 4 * sorted));
      mass += std::exp(static_cast<double>(candidates_[n++].z));
    }
    kept = n;
  }
  if (options_.min_p > 0) {
    const auto low = static_cast<float>(std::log(options_.min_p));
    sort_to(kept);
    while (kept > 1 && candidates_[kept - 1].z < low) --kept;
  }
  candidates_.resize(kept);
}

std::int32_t Sampler::draw() {
  const std::uint64_t bits = mixed(mixed(mixed(options_.seed) ^ sequence_) ^ draws_++);
  const double u = static_cast<double>(bits >> 11U) * 0x1p-53;
  double all = 0;
  for (const Candidate& c : candidates_) {
    all += std::exp(static_cast<double>(c.z) / options_.temperature);
  }
  double rest = u * all;
  for (const Candidate& c : candidates_) {
    rest -= std::exp(static_cast<double>(c.z) / options_.temperature);
    if (rest < 0) return c.token;
  }
  return candidates_.back().token;
}

}  // namespace mlxtape::jobs
