#include "formats/tokenizer_known.h"

#include <initializer_list>

namespace mlxtape::formats {
namespace {

// ---- patterns ----

constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen35 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// A word of GPT-4o begins with capitals or has none; words of Kimi are without Chinese characters, which come first.
constexpr const char* kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kKimi =
    R"([\p{Han}]+|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kCl100k =
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s)";
constexpr const char* kR50k =
    R"('(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s)";

// ---- special tokens ----

class List {
 public:
  explicit List(std::int64_t first) : next_(first) {}
  List& named(std::initializer_list<const char*> texts) {
    for (const char* text : texts) tokens_.push_back({next_++, text});
    return *this;
  }
  // `count` of them, numbered from `first` on.
  List& numbered(const std::string& before, int count, std::int64_t first,
                 const std::string& after = "|>") {
    for (int i = 0; i < count; ++i)
      tokens_.push_back({next_++, before + std::to_string(first + i) + after});
    return *this;
  }
  std::vector<KnownToken> all() { return std::move(tokens_); }

 private:
  std::int64_t next_;
  std::vector<KnownToken> tokens_;
};

std::vector<KnownToken> llama3() {
  return List(128000)
      .named({"<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
              "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|step_id|>",
              "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
              "<|python_tag|>", "<|image|>"})
      .numbered("<|reserved_special_token_", 244, 2)
      .all();
}

std::vector<KnownToken> llama4() {
  return List(200000)
      .named({"<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>",
              "<|fim_suffix|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>",
              "<|step|>"})
      .numbered("<|text_post_train_reserved_special_token_", 6, 0)
      .named({"<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"})
      .numbered("<|text_post_train_reserved_special_token_", 61, 8)
      .named({"<|image_start|>", "<|image_end|>"})
      .numbered("<|vision_reserved_special_token_", 2, 0)
      .named({"<|tile_x_separator|>", "<|tile_y_separator|>"})
      .numbered("<|vision_reserved_special_token_", 4, 2)
      .named({"<|image|>", "<|vision_reserved_special_token_6|>", "<|patch|>"})
      .numbered("<|vision_reserved_special_token_", 1041, 7)
      .numbered("<|reasoning_reserved_special_token_", 8, 0)
      .named({"<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"})
      .numbered("<|reserved_special_token_", 2048 - 5 - 14 - 61 - 13 - 1041 - 10, 0)
      .all();
}

std::vector<KnownToken> qwen() {
  return List(151643)
      .named({"<|endoftext|>", "<|im_start|>", "<|im_end|>"})
      .numbered("<|extra_", 205, 0)
      .all();
}

std::vector<KnownToken> qwen35() {
  return List(248044)
      .named({"<|endoftext|>",
              "<|im_start|>",
              "<|im_end|>",
              "<|object_ref_start|>",
              "<|object_ref_end|>",
              "<|box_start|>",
              "<|box_end|>",
              "<|quad_start|>",
              "<|quad_end|>",
              "<|vision_start|>",
              "<|vision_end|>",
              "<|vision_pad|>",
              "<|image_pad|>",
              "<|video_pad|>",
              "<tool_call>",
              "</tool_call>",
              "<|fim_prefix|>",
              "<|fim_middle|>",
              "<|fim_suffix|>",
              "<|fim_pad|>",
              "<|repo_name|>",
              "<|file_sep|>",
              "<tool_response>",
              "</tool_response>",
              "<think>",
              "</think>",
              "<|audio_start|>",
              "<|audio_end|>",
              "<tts_pad>",
              "<tts_text_bos>",
              "<tts_text_eod>",
              "<tts_text_bos_single>",
              "<|audio_pad|>"})
      .all();
}

// Those of the Harmony format, which gpt-oss speaks, and of the vocabulary itself.
std::vector<KnownToken> o200k() {
  return List(199998)
      .named({"<|startoftext|>", "<|endoftext|>"})
      .numbered("<|reserved_", 2, 200000)
      .named({"<|return|>", "<|constrain|>"})
      .numbered("<|reserved_", 1, 200004)
      .named({"<|channel|>", "<|start|>", "<|end|>", "<|message|>"})
      .numbered("<|reserved_", 3, 200009)
      .named({"<|call|>"})
      .numbered("<|reserved_", 5, 200013)
      .named({"<|endofprompt|>"})
      .numbered("<|reserved_", 201088 - 200019, 200019)
      .all();
}

std::vector<KnownToken> cl100k() {
  std::vector<KnownToken> out =
      List(100257)
          .named({"<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"})
          .all();
  out.push_back({100276, "<|endofprompt|>"});
  return out;
}

std::vector<KnownToken> r50k() { return {{50256, "<|endoftext|>"}}; }

std::vector<KnownToken> kimi() { return List(163584).named({"[BOS]", "[EOS]"}).all(); }

constexpr const char* kEnd = "<|endoftext|>";
constexpr KnownRanks kKnown[] = {
    {"llama3", 128000, kLlama3, false, "<|begin_of_text|>", "<|end_of_text|>", llama3},
    {"llama4", 200000, kO200k, false, "<|begin_of_text|>", "<|end_of_text|>", llama4},
    {"qwen", 151643, kQwen, true, "", kEnd, qwen},
    {"qwen3.5", 248044, kQwen35, true, "", kEnd, qwen35},
    {"o200k", 199998, kO200k, false, "", kEnd, o200k},
    {"cl100k", 100256, kCl100k, false, "", kEnd, cl100k},
    {"p50k", 50280, kR50k, false, "", kEnd, r50k},
    {"r50k", 50256, kR50k, false, "", kEnd, r50k},
    {"kimi", 163584, kKimi, false, "[BOS]", "[EOS]", kimi},
};

}  // namespace

const KnownRanks* known_ranks(std::int64_t count) {
  for (const KnownRanks& known : kKnown) {
    if (known.count == count) return &known;
  }
  return nullptr;
}

std::string all_known_ranks() {
  std::string out;
  for (const KnownRanks& known : kKnown) {
    if (!out.empty()) out += ", ";
    out += std::string(known.name) + " (" + std::to_string(known.count) + ")";
  }
  return out;
}

bool tekken_has_fixed_tokens(std::string_view version) {
  return version == "v1" || version == "v2" || version == "v3" || version == "v7";
}

std::vector<KnownToken> tekken_fixed_tokens() {
  return List(0)
      .named({"<unk>",
              "<s>",
              "</s>",
              "[INST]",
              "[/INST]",
              "[AVAILABLE_TOOLS]",
              "[/AVAILABLE_TOOLS]",
              "[TOOL_RESULTS]",
              "[/TOOL_RESULTS]",
              "[TOOL_CALLS]",
              "[IMG]",
              "<pad>",
              "[IMG_BREAK]",
              "[IMG_END]",
              "[PREFIX]",
              "[MIDDLE]",
              "[SUFFIX]",
              "[SYSTEM_PROMPT]",
              "[/SYSTEM_PROMPT]",
              "[TOOL_CONTENT]"})
      .all();
}

}  // namespace mlxtape::formats
