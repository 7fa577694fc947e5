#include "formats/gguf_config.h"

#include <algorithm>

#include "formats/gguf_rope.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {

namespace {

// What GGUF's u32 holds, and no kernel goes beyond.
constexpr std::int64_t kMaxCount = std::int64_t{1} << 31U;

// More layers than that is no model, and a list of them would only take memory.
constexpr std::int64_t kMaxLayers = 4096;

// ---- reading ----

// A number of the architecture's, the same in every layer. Files may give it layer by layer, with 0 where a layer does not
// need it.
class Keys {
 public:
  Keys(const GgufFile& file, const GgufArchitecture& architecture)
      : file_(file), prefix_(std::string(architecture.name) + ".") {}

  std::optional<std::int64_t> maybe(const char* name) const {
    const std::string key = prefix_ + name;
    if (!file_.is_array(key)) return file_.whole(key);
    std::int64_t value = 0;
    const std::vector<std::int64_t> by_layer = *file_.wholes(key);
    for (const std::int64_t one : by_layer) {
      if (one == 0 || one == value) continue;
      if (value != 0)
        file_.fail("key \"" + key + "\" must be the same in every layer, got several");
      value = one;
    }
    return value;
  }

  std::int64_t whole(const char* name, std::int64_t least = 1) const {
    const std::optional<std::int64_t> value = maybe(name);
    const std::string key = prefix_ + name;
    if (!value) file_.fail_key(key, "must be a whole number");
    if (*value < least) {
      file_.fail("key \"" + key + "\" must be at least " + std::to_string(least) + ", got " +
                 std::to_string(*value));
    }
    return *value;
  }

  void add(const GgufField& field, Json& sizes) const {
    const std::string key = prefix_ + field.key;
    if (field.kind == GgufField::Kind::kNumber) {
      const std::optional<double> value = file_.number(key);
      if (!value && field.required) file_.fail_key(key, "must be a number");
      if (value) sizes.set(field.config, shortest(static_cast<float>(*value)));
    } else if (field.kind == GgufField::Kind::kTruth) {
      if (const auto value = file_.truth(key)) sizes.set(field.config, *value);
    } else if (field.required) {
      sizes.set(field.config, whole(field.key));
    } else if (const auto value = maybe(field.key)) {
      sizes.set(field.config, *value);
    }
  }

  void expect_neutral() const {
    for (const GgufNeutral& one : gguf_neutral_keys()) {
      const std::string key = prefix_ + one.key;
      const std::optional<double> value = file_.number(key);
      if (!value || *value == one.neutral || *value == 0) continue;
      file_.fail("key \"" + key + "\" is " + Json(*value).dump() +
                 ", which is not supported for this architecture");
    }
  }

  const GgufFile& file() const { return file_; }

 private:
  const GgufFile& file_;
  std::string prefix_;
};

std::int64_t layers_of(const Keys& keys) {
  const std::int64_t all = keys.whole("block_count");
  const std::int64_t ahead = keys.maybe("nextn_predict_layers").value_or(0);
  const std::size_t tensors = keys.file().tensors().size();
  if (all > 0 && static_cast<std::uint64_t>(all) > tensors) {
    keys.file().fail("it must have tensors for each of " + std::to_string(all) + " layers, got " +
                     std::to_string(tensors));
  }
  if (all > kMaxLayers || ahead < 0 || ahead >= all) {
    keys.file().fail("it must have 1 to 4096 layers, got " + std::to_string(all) + ", of which " +
                     std::to_string(ahead) + " predict several tokens");
  }
  return all - ahead;
}

bool has_fields_of_experts(const GgufArchitecture& architecture) {
  bool found = false;
  each_field(architecture, [&](const GgufField& field) {
    found = found || std::string_view(field.key) == "expert_count";
  });
  return found;
}

void read_experts(const Keys& keys, const GgufArchitecture& architecture, std::int64_t layers,
                  Json& sizes) {
  if (!has_fields_of_experts(architecture)) {
    if (keys.maybe("expert_count").value_or(0) == 0) return;
    keys.file().fail(std::string("a ") + architecture.name +
                     " with experts is not supported, got expert_count above 0");
  }
  if (sizes.find("norm_topk_prob") == nullptr) sizes.set("norm_topk_prob", true);
  if (sizes.find("intermediate_size") == nullptr) {
    sizes.set("intermediate_size", *sizes.find("moe_intermediate_size"));
  }
  Json::Array dense;
  for (std::int64_t l = 0; l < layers; ++l) {
    const std::string router = "blk." + std::to_string(l) + ".ffn_gate_inp.weight";
    if (!keys.file().has(router)) dense.emplace_back(l);
  }
  sizes.set("decoder_sparse_step", 1);
  sizes.set("mlp_only_layers", std::move(dense));
}

Json sizes_of(const GgufFile& file, const GgufArchitecture& architecture) {
  const Keys keys(file, architecture);
  keys.expect_neutral();
  Json sizes = Json::Object{};
  const std::int64_t layers = layers_of(keys);
  sizes.set("num_hidden_layers", layers);
  sizes.set("vocab_size", file.tensor("token_embd.weight").shape[0]);
  each_field(architecture, [&](const GgufField& field) { keys.add(field, sizes); });
  const std::int64_t heads = keys.whole("attention.head_count");
  sizes.set("num_key_value_heads", keys.maybe("attention.head_count_kv").value_or(heads));
  const std::int64_t head_dim =
      keys.maybe("attention.key_length").value_or(keys.whole("embedding_length") / heads);
  if (keys.maybe("attention.value_length").value_or(head_dim) != head_dim) {
    file.fail("values must have as many channels as keys, " + std::to_string(head_dim) + ", got " +
              std::to_string(*keys.maybe("attention.value_length")));
  }
  sizes.set("head_dim", head_dim);
  if (architecture.delta) {
    const std::int64_t inner = keys.whole("ssm.inner_size"),
                       values = keys.whole("ssm.time_step_rank");
    if (inner % values != 0) {
      file.fail("ssm.inner_size must be a multiple of ssm.time_step_rank, got " +
                std::to_string(inner) + " and " + std::to_string(values));
    }
    sizes.set("linear_value_head_dim", inner / values);
  }
  read_experts(keys, architecture, layers, sizes);
  read_gguf_rope(file, architecture, head_dim, sizes);
  sizes.set("hidden_act", "silu");
  if (file.has("blk.0.attn_output.bias")) sizes.set("attention_bias", true);
  if (file.has("blk.0.ffn_gate.bias")) sizes.set("mlp_bias", true);
  return sizes;
}

// ---- sizes ----

const Json& nested(const Json& config, const GgufArchitecture& architecture) {
  const Json* inner = *architecture.nested == '\0' ? nullptr : config.find(architecture.nested);
  return inner != nullptr && inner->is_object() ? *inner : config;
}

// Products of three sizes up to this fit in 63 bits.
constexpr std::int64_t kMaxSize = std::int64_t{1} << 20U;

std::int64_t size_in(const Json& sizes, const char* key, std::optional<std::int64_t> otherwise,
                     const std::string& source, std::int64_t most = kMaxSize) {
  const Json* found = sizes.find(key);
  if (found == nullptr && otherwise) return *otherwise;
  if (found != nullptr && found->is_integer() && found->integer() >= 1 &&
      found->integer() <= most) {
    return found->integer();
  }
  throw Error(Errc::kIo, source + ": \"" + key + "\" must be a whole number from 1 to " +
                             std::to_string(most) + ", " +
                             (found == nullptr ? "and is missing" : "got " + shown(found->dump())));
}

}  // namespace

const GgufArchitecture& architecture_of(const GgufFile& file) {
  const std::string name(file.text("general.architecture").value_or(""));
  const GgufArchitecture* found = gguf_architecture(name);
  if (found == nullptr) {
    file.fail("models of architecture \"" + shown(name) + "\" are not supported, only " +
              gguf_architecture_names());
  }
  return *found;
}

const GgufArchitecture& architecture_of(const Json& config, const std::string& source) {
  const Json* type = config.find("model_type");
  const std::string name = type != nullptr && type->is_string() ? type->string() : "";
  const GgufArchitecture* found = gguf_architecture_of(name);
  if (found == nullptr) {
    throw Error(Errc::kArgument, source + ": models of type \"" + shown(name) +
                                     "\" cannot be written as GGUF; those that GGUF calls " +
                                     gguf_architecture_names() + " can");
  }
  return *found;
}

GgufSizes gguf_sizes(const Json& config, const GgufArchitecture& architecture,
                     const std::string& source) {
  const Json& sizes = nested(config, architecture);
  const auto get = [&](const char* key, std::optional<std::int64_t> otherwise = {}) {
    return size_in(sizes, key, otherwise, source);
  };
  GgufSizes result;
  result.layers = get("num_hidden_layers");
  result.heads = get("num_attention_heads");
  result.key_heads = get("num_key_value_heads", result.heads);
  result.head_dim = get("head_dim", std::max<std::int64_t>(1, get("hidden_size") / result.heads));
  if (!architecture.delta) return result;
  result.delta_key_heads = get("linear_num_key_heads");
  result.delta_value_heads = get("linear_num_value_heads");
  result.delta_key_dim = get("linear_key_head_dim");
  result.delta_value_dim = get("linear_value_head_dim");
  return result;
}

Json config_of_gguf(const GgufFile& file, const GgufArchitecture& architecture) {
  Json sizes = sizes_of(file, architecture);
  Json config = Json::Object{{"model_type", architecture.model_type}};
  config.set("tie_word_embeddings", !file.has("output.weight"));
  if (*architecture.nested != '\0') {
    sizes.set("model_type", architecture.nested_type);
    config.set(architecture.nested, std::move(sizes));
  } else {
    for (auto& [key, value] : sizes.object()) config.set(key, std::move(value));
  }
  for (const auto& [key, ours] : {std::pair("tokenizer.ggml.bos_token_id", "bos_token_id"),
                                  std::pair("tokenizer.ggml.eos_token_id", "eos_token_id")}) {
    if (const auto id = file.whole(key)) config.set(ours, *id);
  }
  return config;
}

// ---- writing ----

std::vector<GgufKey> gguf_keys_of_config(const Json& config, const GgufArchitecture& architecture) {
  const std::string source = "gguf: config.json";
  const Json& sizes = nested(config, architecture);
  const GgufSizes known = gguf_sizes(config, architecture, source);
  const std::string prefix = std::string(architecture.name) + ".";
  std::vector<GgufKey> keys;
  const auto add = [&](const char* key, std::int64_t value) {
    keys.push_back({prefix + key, static_cast<std::uint32_t>(value)});
  };
  add("block_count", known.layers);
  each_field(architecture, [&](const GgufField& field) {
    const Json* value = sizes.find(field.config);
    if (field.kind == GgufField::Kind::kNumber) {
      const double number = value != nullptr && value->is_number() ? value->number() : 1e-6;
      keys.push_back({prefix + field.key, static_cast<float>(number)});
    } else if (field.kind == GgufField::Kind::kTruth) {
      if (value != nullptr && value->is_bool())
        keys.push_back({prefix + field.key, value->boolean()});
    } else if (field.required || value != nullptr) {
      add(field.key, size_in(sizes, field.config, {}, source, kMaxCount));
    }
  });
  add("attention.head_count_kv", known.key_heads);
  add("attention.key_length", known.head_dim);
  add("attention.value_length", known.head_dim);
  add("vocab_size", size_in(sizes, "vocab_size", {}, source, kMaxCount));
  if (architecture.delta) {
    add("ssm.inner_size", known.delta_value_heads * known.delta_value_dim);
  }
  const Json* dense = sizes.find("mlp_only_layers");
  if (dense != nullptr && dense->is_array() && !dense->array().empty()) {
    throw Error(Errc::kArgument,
                source + ": \"mlp_only_layers\": GGUF has no key for layers without experts");
  }
  write_gguf_rope(sizes, architecture, known.head_dim, keys);
  return keys;
}

std::vector<float> rope_factors_of_config(const Json& config,
                                          const GgufArchitecture& architecture) {
  const GgufSizes sizes = gguf_sizes(config, architecture, "gguf: config.json");
  return llama3_factors(nested(config, architecture), sizes.head_dim);
}

}  // namespace mlxtape::formats
