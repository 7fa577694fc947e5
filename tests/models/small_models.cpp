#include "small_models.h"

#include "mlxtape/ops/elementwise.h"

namespace mlxtape::test {

using formats::Json;

Json small_config(const std::string& type) {
  Json json = Json::parse(R"({"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 80,
      "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
      "tie_word_embeddings": false})",
                          "small");
  json.set("model_type", type);
  if (type == "qwen3" || type == "llama") return json;
  const Json more = Json::parse(R"({"linear_num_value_heads": 4, "linear_num_key_heads": 2,
      "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
      "full_attention_interval": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
      "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": true})",
                                "small");
  for (const auto& [key, value] : more.object()) json.set(key, value);
  if (type == "qwen3_5") json.erase("num_experts");
  return json;
}

models::Model small_model(CommandEncoder& encoder, const std::string& type, DType dtype,
                          std::uint64_t seed) {
  return models::random_model(models::Config::parse(small_config(type), type), encoder, dtype,
                              seed);
}

models::Model lively_model(CommandEncoder& encoder, const std::string& type, DType dtype,
                           std::uint64_t seed) {
  models::Model model = small_model(encoder, type, dtype, seed);
  for (const models::Slot& slot : models::slots(model.weights, model.config)) {
    if (slot.weight == nullptr) continue;
    slot.weight->plain =
        ops::multiply(encoder, slot.weight->plain, slot.name.ends_with("lm_head") ? 10.0 : 4.0);
  }
  return model;
}

std::vector<std::string> model_types() { return {"qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe"}; }

std::string small_tokenizer_json() {
  formats::Json vocabulary = formats::Json::Object{};
  int next = 0;
  for (int byte = 0; byte < 256; ++byte) {
    // The letters that stand for bytes in such files: printable ones for themselves, others from U+0100 on.
    const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int code = printable ? byte : 256 + next++;
    std::string letter;
    if (code > 127) letter += static_cast<char>(0xC0 | code >> 6);
    letter += static_cast<char>(code > 127 ? 0x80 | (code & 63) : code);
    vocabulary.set(letter, byte);
  }
  const std::string bytes =
      R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})";
  return R"({"added_tokens": [], "normalizer": null, "pre_tokenizer": )" + bytes +
         R"(, "post_processor": null, "decoder": )" + bytes +
         R"(, "model": {"type": "BPE", "merges": [], "vocab": )" + vocabulary.dump() + "}}";
}

}  // namespace mlxtape::test
