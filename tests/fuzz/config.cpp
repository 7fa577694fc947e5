#include "mlxtape/models/config.h"

#include "fuzz/targets.h"

namespace mlxtape::fuzz {

bool config(std::string_view input) {
  using formats::Json;
  using models::Config;
  Json json;
  Config c;
  if (!accepts([&] {
        json = Json::parse(input, "config.json");
        c = Config::parse(json, "config.json");
      })) {
    return false;
  }
  check(c.json == json, "a config keeps what it was read from");
  check(!models::plan_check(c.plan), "a plan that was read can be run");
  check(c.plan.eps > 0 && c.plan.eps < 1e30F, "eps is a positive number in f32");
  check(c.quantization.of_module("model.layers.0.mlp").bits <= 8, "codes have at most 8 bits");
  return true;
}

}  // namespace mlxtape::fuzz
