// What the engine knows of a slot, and what follows from its request alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mlxtape/jobs/engine.h"

namespace mlxtape::jobs {

enum class Phase : std::uint8_t { kFree, kReading, kRunning, kScored };

struct Slot {
  Phase phase = Phase::kFree;
  Request request;
  std::uint64_t order = 0;         // of admission
  std::vector<std::int32_t> past;  // the tokens that the state has read
  models::State::Mark mark;        // none where its length is 0
  bool stateless = false;          // its prompt is only scored, and in one chunk
  bool parked = false;             // its past is safe from steps of others
  models::State::Mark aside;       // parked: what delta nets held
  std::int64_t kept = 0;
  std::int32_t last = 0;  // chosen, and not read yet
  std::vector<Score> scores;

  bool is_busy() const { return phase == Phase::kReading || phase == Phase::kRunning; }
};

// Positions of a prompt's targets: the first, and one past the last. Both 0 where there is none.
struct ScoredRange {
  std::int64_t first = 0, end = 0;
};
inline ScoredRange scored_range(const Request& request) {
  const auto counts = [](std::int32_t target) {
    return target >= 0;
  };
  const std::vector<std::int32_t>& targets = request.targets;
  const auto first = std::find_if(targets.begin(), targets.end(), counts);
  const auto last = std::find_if(targets.rbegin(), targets.rend(), counts);
  if (first == targets.end()) return {};
  return {first - targets.begin(), targets.rend() - last};
}

// How many tokens of the prompt are read.
inline std::int64_t read_length(const Request& request) {
  return request.generate ? std::ssize(request.prompt) : scored_range(request).end;
}

inline std::int64_t common_prefix(const std::vector<std::int32_t>& a,
                                  const std::vector<std::int32_t>& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

}  // namespace mlxtape::jobs
