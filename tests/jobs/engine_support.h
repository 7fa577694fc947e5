// What tests of the engine share: prompts, and what a request says when it is alone.
#pragma once

#include <map>

#include "mlxtape/jobs/engine.h"
#include "models/small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {

using Tokens = std::vector<std::int32_t>;

inline Tokens some_prompt(std::size_t count, std::int32_t seed) {
  Tokens tokens;
  for (std::size_t i = 0; i < count; ++i) {
    tokens.push_back(
        static_cast<std::int32_t>((i * 37 + 11) * static_cast<std::size_t>(seed + 3) % 80));
  }
  return tokens;
}

inline jobs::Request drawn(std::size_t length, std::uint64_t seed) {
  jobs::Request request{some_prompt(length, static_cast<std::int32_t>(seed))};
  request.sampling.temperature = 0.8;
  request.sampling.seed = seed;
  return request;
}

class Engines : public OnDevice {
 protected:
  // Steps until every sequence has so many tokens, and ends it then; what each slot said.
  static std::map<std::int64_t, Tokens> finish(jobs::Engine& engine, std::size_t count) {
    std::map<std::int64_t, Tokens> said;
    while (engine.is_busy()) {
      for (const jobs::Choice& choice : engine.step()) {
        said[choice.slot].push_back(choice.token);
        if (said[choice.slot].size() == count) engine.cancel(choice.slot);
      }
    }
    return said;
  }
  Tokens alone(const models::Model& model, const jobs::Request& request, std::size_t count) {
    jobs::Engine engine(encoder(), model, {});
    const std::int64_t slot = engine.admit(request);
    return finish(engine, count)[slot];
  }
};

}  // namespace mlxtape::test
