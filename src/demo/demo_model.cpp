#include "demo_model.h"

#include "mlxtape/base/files.h"

namespace mlxtape::demo {

namespace {

using formats::Json;

// Three delta nets and a gated attention; 2 of 16 experts and a shared one for each token.
const char* const kConfig = R"({
  "model_type": "qwen3_next",
  "vocab_size": 256, "eos_token_id": 10, "tie_word_embeddings": true,
  "hidden_size": 128, "num_hidden_layers": 4, "full_attention_interval": 4,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
  "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
  "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
  "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
  "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": true, "decoder_sparse_step": 1,
  "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "mlp_only_layers": [],
  "intermediate_size": 256, "rms_norm_eps": 1e-06, "initializer_range": 0.06
})";

// The letter that stands for a byte in such files: printable ones for themselves, others from U+0100 on.
std::string letter_of(int byte, int& next) {
  const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
  const int code = printable ? byte : 256 + next++;
  if (code < 128) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 63))};
}

Json tokenizer() {
  Json vocabulary = Json::Object{};
  int next = 0;
  for (int byte = 0; byte < 256; ++byte) vocabulary.set(letter_of(byte, next), byte);
  const Json bytes = Json::Object{{"type", "ByteLevel"},
                                  {"add_prefix_space", false},
                                  {"trim_offsets", false},
                                  {"use_regex", false}};
  return Json::Object{{"version", "1.0"},
                      {"truncation", nullptr},
                      {"padding", nullptr},
                      {"added_tokens", Json::Array{}},
                      {"normalizer", nullptr},
                      {"pre_tokenizer", bytes},
                      {"post_processor", nullptr},
                      {"decoder", bytes},
                      {"model", Json::Object{{"type", "BPE"},
                                             {"dropout", nullptr},
                                             {"unk_token", nullptr},
                                             {"continuing_subword_prefix", nullptr},
                                             {"end_of_word_suffix", nullptr},
                                             {"fuse_unk", false},
                                             {"byte_fallback", false},
                                             {"vocab", std::move(vocabulary)},
                                             {"merges", Json::Array{}}}}};
}

}  // namespace

models::Config demo_config() { return models::Config::parse(Json::parse(kConfig, "demo"), "demo"); }

void write_byte_tokenizer(const std::string& folder, const char* who) {
  const Json settings =
      Json::Object{{"tokenizer_class", "PreTrainedTokenizerFast"}, {"model_max_length", 2048}};
  const auto write = [&](const char* name, const std::string& text) {
    write_whole(folder + name, text + "\n", who, WholeFile::Links::kReplace);
  };
  write("/tokenizer.json", tokenizer().dump());
  write("/tokenizer_config.json", settings.dump(2));
}

}  // namespace mlxtape::demo
