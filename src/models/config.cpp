#include "mlxtape/models/config.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::models {

namespace {

using formats::Json;

// The keys of one object, each asked for with the type and the range that it must have.
class Fields {
 public:
  Fields(const Json& json, std::string source) : json_(json), source_(std::move(source)) {}

  const Json* find(const char* key) const {
    const Json* value = json_.find(key);
    return value == nullptr || value->is_null() ? nullptr : value;
  }

  std::int64_t whole(const char* key, std::optional<std::int64_t> otherwise = {},
                     std::int64_t least = 1) const {
    const Json* value = find(key);
    if (value == nullptr) return given(key, otherwise);
    if (!value->is_integer() || value->integer() < least || value->integer() > kMost) {
      fail(key, "a whole number from " + std::to_string(least) + " to 2^31 - 1", *value);
    }
    return value->integer();
  }
  double number(const char* key, std::optional<double> otherwise = {}) const {
    const Json* value = find(key);
    if (value == nullptr) return given(key, otherwise);
    // Kernels take them as floats, to which the smallest are 0 and the largest infinite.
    const float as_float = value->is_number() ? static_cast<float>(value->number()) : 0;
    if (!(as_float > 0) || !std::isfinite(as_float)) {
      fail(key, "a number above 0 that a float can hold", *value);
    }
    return value->number();
  }
  bool truth(const char* key, bool otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_bool()) fail(key, "true or false", *value);
    return value->boolean();
  }
  std::string text(const char* key, const std::optional<std::string>& otherwise = {}) const {
    const Json* value = find(key);
    if (value == nullptr) return given(key, otherwise);
    if (!value->is_string()) fail(key, "a string", *value);
    return value->string();
  }
  const Json* object(const char* key) const {
    const Json* value = find(key);
    if (value != nullptr && !value->is_object()) fail(key, "an object", *value);
    return value;
  }
  const std::string& source() const { return source_; }

  [[noreturn]] void fail(const std::string& key, const std::string& must, const Json& got) const {
    throw Error(Errc::kIo,
                source_ + ": \"" + key + "\" must be " + must + ", got " + shown(got.dump()));
  }

 private:
  static constexpr std::int64_t kMost = 2147483647;

  template <class T>
  T given(const char* key, const std::optional<T>& otherwise) const {
    if (!otherwise) throw Error(Errc::kIo, source_ + ": \"" + key + "\" is missing");
    return *otherwise;
  }

  const Json& json_;
  std::string source_;
};

Packing packing(const Fields& fields, const std::string& path) {
  const std::string mode = fields.text("mode", "affine");
  if (mode != "affine") {
    throw Error(Errc::kIo, fields.source() + ": quantization of " + shown(path) +
                               " has the mode \"" + shown(mode) +
                               "\"; only \"affine\" is supported");
  }
  const auto bits = static_cast<int>(fields.whole("bits", 4));
  const auto group = static_cast<int>(fields.whole("group_size", 64));
  if (std::string(" 2 3 4 5 6 8 ").find(" " + std::to_string(bits) + " ") == std::string::npos) {
    throw Error(Errc::kIo,
                fields.source() + ": quantization of " + shown(path) +
                    " has bits that are none of 2, 3, 4, 5, 6, 8: " + std::to_string(bits));
  }
  if (group != 32 && group != 64 && group != 128) {
    throw Error(Errc::kIo,
                fields.source() + ": quantization of " + shown(path) +
                    " has a group_size that is none of 32, 64, 128: " + std::to_string(group));
  }
  return {bits, group};
}

Quantization parse_quantization(const Json& json, const std::string& source) {
  Quantization result;
  const Fields fields(json, source);
  const Json* block = fields.object("quantization");
  if (block == nullptr) {
    if (const Json* other = fields.object("quantization_config")) {
      if (other->find("quant_method") != nullptr) {
        throw Error(Errc::kIo, source + ": weights quantised by \"" +
                                   shown(Fields(*other, source).text("quant_method")) +
                                   "\" are not supported: convert the unquantised model");
      }
      block = other;
    }
  }
  if (block == nullptr) return result;
  result.usual = packing(Fields(*block, source), "the model");
  for (const auto& [path, value] : block->object()) {
    if (value.is_object()) {
      result.of[path] = packing(Fields(value, source), path);
    } else if (value.is_bool() && !value.boolean()) {
      result.of[path] = {};
    }
  }
  return result;
}

// scaling: null, or "rope_scaling", "rope_parameters".
RopeConfig parse_rope(const Json* scaling, double base, std::int64_t dims,
                      const std::string& source) {
  RopeConfig rope;
  rope.base = base;
  rope.dims = dims;
  if (scaling == nullptr) return rope;
  const Fields fields(*scaling, source);
  const std::string kind = fields.text("type", fields.text("rope_type", "default"));
  if (kind == "default" || kind == "mrope") return rope;
  rope.factor = fields.number("factor");
  if (kind == "linear") {
    rope.scale = 1 / rope.factor;
  } else if (kind == "yarn") {
    rope.kind = RopeConfig::Kind::kYarn;
    rope.original_positions = fields.whole("original_max_position_embeddings", 4096);
    rope.beta_fast = fields.number("beta_fast", 32);
    rope.beta_slow = fields.number("beta_slow", 1);
    rope.mscale = fields.number("mscale", 1);
    if (const Json* all = fields.find("mscale_all_dim")) {
      if (!all->is_number()) fields.fail("mscale_all_dim", "a number", *all);
      rope.mscale_all_dim = all->number();
    }
  } else if (kind == "llama3") {
    rope.kind = RopeConfig::Kind::kLlama3;
    rope.original_positions = fields.whole("original_max_position_embeddings", 8192);
    rope.low_freq_factor = fields.number("low_freq_factor", 1);
    rope.high_freq_factor = fields.number("high_freq_factor", 4);
  } else {
    throw Error(Errc::kIo, source + ": rope of type \"" + shown(kind) +
                               "\" is not supported; default, mrope, linear, yarn and llama3 are");
  }
  return rope;
}

// transformers 5 puts everything about positions under rope_parameters, qwen3_5 always did.
RopeConfig parse_positions(const Fields& f, const Config& c) {
  const bool qwen3_5 = c.family == Config::Family::kQwen35;
  const double usual = c.family == Config::Family::kQwen3 ? 1 : 0.25;
  const Json* parameters = f.object("rope_parameters");
  const Json* scaling = f.object("rope_scaling");
  double base = 100000, turned = usual;
  if (parameters != nullptr && (qwen3_5 || f.find("rope_theta") == nullptr)) {
    const Fields rope(*parameters, f.source());
    base = qwen3_5 ? rope.number("rope_theta", base) : rope.number("rope_theta");
    turned = rope.number("partial_rotary_factor",
                         qwen3_5 ? usual : f.number("partial_rotary_factor", usual));
    if (scaling == nullptr || qwen3_5) scaling = parameters;
  } else if (!qwen3_5) {
    base = f.number("rope_theta");
    if (c.family == Config::Family::kQwen3Next) turned = f.number("partial_rotary_factor");
  }
  const double share = std::min(turned, 2.0);  // what no integer can hold is too much as well
  const auto dims = static_cast<std::int64_t>(static_cast<double>(c.head_dim) * share);
  if (dims < 2 || dims > c.head_dim || dims % 2 != 0) {
    throw Error(Errc::kIo, f.source() + ": \"partial_rotary_factor\" " + Json(turned).dump() +
                               " of \"head_dim\" " + std::to_string(c.head_dim) +
                               " must be an even number of channels, got " + std::to_string(dims) +
                               (turned > share ? " or more" : ""));
  }
  return parse_rope(scaling, base, dims, f.source());
}

void parse_experts(const Fields& f, bool required, Config& c) {
  const std::optional<std::int64_t> none = required ? std::nullopt : std::optional<std::int64_t>(0);
  c.experts = f.whole("num_experts", none, 0);
  if (c.experts == 0) return;
  c.chosen = f.whole("num_experts_per_tok");
  c.expert_width = f.whole("moe_intermediate_size");
  c.shared_width = f.whole("shared_expert_intermediate_size");
  if (c.chosen > c.experts) {
    throw Error(Errc::kIo, f.source() + ": \"num_experts_per_tok\" is " + std::to_string(c.chosen) +
                               ", but there are " + std::to_string(c.experts) + " experts");
  }
}

// A size that qwen3_5's files may leave out.
std::int64_t size(const Fields& f, const Config& c, const char* key, std::int64_t in_qwen3_5) {
  using Maybe = std::optional<std::int64_t>;
  return f.whole(key, c.family == Config::Family::kQwen35 ? Maybe(in_qwen3_5) : Maybe());
}

void parse_linear(const Fields& f, Config& c) {
  c.attention_interval = f.whole("full_attention_interval", 4);
  c.linear_value_heads = size(f, c, "linear_num_value_heads", 64);
  c.linear_key_heads = size(f, c, "linear_num_key_heads", 16);
  c.linear_key_dim = size(f, c, "linear_key_head_dim", 192);
  c.linear_value_dim = size(f, c, "linear_value_head_dim", 128);
  c.linear_kernel = size(f, c, "linear_conv_kernel_dim", 4);
  if (c.linear_value_heads % c.linear_key_heads != 0) {
    throw Error(Errc::kIo, f.source() +
                               ": \"linear_num_value_heads\" must be a multiple of "
                               "\"linear_num_key_heads\", got " +
                               std::to_string(c.linear_value_heads) + " and " +
                               std::to_string(c.linear_key_heads));
  }
}

// What the kernels can, and what would change the results if it were passed over.
void check_limits(const Fields& f, const Config& c) {
  struct Limit {
    const char* key;
    std::int64_t value, most;
  };
  for (const Limit& limit : {Limit{"num_hidden_layers", c.layers, 4096},
                             {"head_dim", c.head_dim, 256},
                             {"linear_key_head_dim", c.linear_key_dim, 256},
                             {"linear_value_head_dim", c.linear_value_dim, 256},
                             {"linear_conv_kernel_dim", c.linear_kernel, 16},
                             {"num_experts", c.experts, 1024},
                             {"num_experts_per_tok", c.chosen, 64}}) {
    if (limit.value > limit.most) {
      throw Error(Errc::kIo, f.source() + ": \"" + limit.key + "\" above " +
                                 std::to_string(limit.most) + " is not supported, got " +
                                 std::to_string(limit.value));
    }
  }
  if (f.text("hidden_act", "silu") != "silu")
    f.fail("hidden_act", "\"silu\"", *f.find("hidden_act"));
  if (f.truth("use_sliding_window", false)) {
    f.fail("use_sliding_window", "false: windows are not supported", *f.find("use_sliding_window"));
  }
}

Config::Family family_of(const std::string& type, const std::string& source) {
  if (type == "qwen3") return Config::Family::kQwen3;
  if (type == "qwen3_next") return Config::Family::kQwen3Next;
  if (type == "qwen3_5" || type == "qwen3_5_moe" || type == "qwen3_5_text" ||
      type == "qwen3_5_moe_text") {
    return Config::Family::kQwen35;
  }
  throw Error(Errc::kIo,
              source + ": models of type \"" + shown(type) +
                  "\" are not supported; qwen3, qwen3_next, qwen3_5 and qwen3_5_moe are");
}

}  // namespace

Packing Quantization::of_module(const std::string& path) const {
  const auto found = of.find(path);
  return found == of.end() ? usual : found->second;
}

bool Config::has_experts(std::int64_t layer) const {
  return experts > 0 && (layer + 1) % sparse_step == 0 &&
         std::find(dense_layers.begin(), dense_layers.end(), layer) == dense_layers.end();
}

Config Config::parse(const Json& json, const std::string& source) {
  const Fields top(json, source);
  Config c;
  c.model_type = top.text("model_type");
  c.family = family_of(c.model_type, source);
  const Json* nested = c.family == Family::kQwen35 ? top.object("text_config") : nullptr;
  const Fields f(nested == nullptr ? json : *nested, source);
  if (c.family == Family::kQwen35) c.prefix = "language_model.";

  c.vocabulary = size(f, c, "vocab_size", 151936);
  c.width = size(f, c, "hidden_size", 4096);
  c.layers = size(f, c, "num_hidden_layers", 32);
  c.max_positions = size(f, c, "max_position_embeddings", 131072);
  c.eps = static_cast<float>(f.number("rms_norm_eps", 1e-6));
  c.initial_deviation = f.number("initializer_range", c.initial_deviation);
  c.tied = f.truth("tie_word_embeddings", top.truth("tie_word_embeddings", false));
  c.heads = size(f, c, "num_attention_heads", 32);
  c.key_heads = size(f, c, "num_key_value_heads", 8);
  c.head_dim = f.whole("head_dim", std::max<std::int64_t>(1, c.width / c.heads));
  if (c.heads % c.key_heads != 0) {
    throw Error(Errc::kIo, source +
                               ": \"num_attention_heads\" must be a multiple of "
                               "\"num_key_value_heads\", got " +
                               std::to_string(c.heads) + " and " + std::to_string(c.key_heads));
  }
  c.attention_bias = f.truth("attention_bias", false);
  if (c.family != Family::kQwen3) parse_linear(f, c);
  if (c.family == Family::kQwen3Next) {
    parse_experts(f, true, c);
    c.sparse_step = f.whole("decoder_sparse_step", 1);
    c.renormalise = f.truth("norm_topk_prob", false);
    if (const Json* dense = f.find("mlp_only_layers")) {
      if (!dense->is_array()) f.fail("mlp_only_layers", "an array", *dense);
      for (const Json& layer : dense->array()) {
        if (!layer.is_integer()) f.fail("mlp_only_layers", "numbers of layers", layer);
        c.dense_layers.push_back(layer.integer());
      }
    }
  } else if (c.family == Family::kQwen35) {
    parse_experts(f, false, c);
    c.renormalise = f.truth("norm_topk_prob", true);
  }
  check_limits(f, c);
  bool any_dense = false;
  for (std::int64_t l = 0; l < c.layers; ++l) any_dense = any_dense || !c.has_experts(l);
  if (any_dense) c.intermediate = size(f, c, "intermediate_size", 14336);

  c.rope = parse_positions(f, c);
  c.quantization = parse_quantization(json, source);
  c.json = json;
  return c;
}

}  // namespace mlxtape::models
