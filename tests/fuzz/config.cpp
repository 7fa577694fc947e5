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
  check(c.width > 0 && c.layers > 0 && c.vocabulary > 0 && c.max_positions > 0,
        "a model has sizes");
  check(c.key_heads > 0 && c.heads % c.key_heads == 0, "heads share keys evenly");
  check(c.rope.dims >= 2 && c.rope.dims <= c.head_dim && c.rope.dims % 2 == 0,
        "pairs of a head's channels are turned");
  check(c.eps > 0 && c.eps < 1e30F, "eps is a positive number in f32");
  check(c.chosen <= c.experts, "no more experts are chosen than there are");
  bool dense = false;
  for (std::int64_t l = 0; l < c.layers; ++l) {
    dense = dense || !c.has_experts(l);
    check(c.has_attention(l) || c.linear_key_heads > 0, "a layer has attention or a delta net");
  }
  check(!dense || c.intermediate > 0, "a dense layer has a width");
  check(c.quantization.of_module("model.layers.0.mlp").bits <= 8, "codes have at most 8 bits");
  return true;
}

}  // namespace mlxtape::fuzz
