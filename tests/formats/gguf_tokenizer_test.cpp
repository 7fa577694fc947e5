#include "mlxtape/formats/gguf_tokenizer.h"

#include <gtest/gtest.h>

#include <limits>

#include "formats/support.h"
#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::formats {
namespace {

using Keys = std::vector<GgufKey>;
using Texts = std::vector<std::string>;
using Ids = std::vector<TokenId>;

void set(Keys& keys, const std::string& name, auto value) {
  std::erase_if(keys, [&](const GgufKey& key) { return key.key == name; });
  keys.push_back({name, value});
}

Keys byte_level() {
  return {{"general.architecture", std::string("llama")},
          {"tokenizer.ggml.model", std::string("gpt2")},
          {"tokenizer.ggml.pre", std::string("qwen2")},
          {"tokenizer.ggml.tokens", Texts{"a", "b", "ab", "1", "\u0120", "<|end|>", "<tool>"}},
          {"tokenizer.ggml.token_type", std::vector<std::int32_t>{1, 1, 1, 1, 1, 3, 4}},
          {"tokenizer.ggml.merges", Texts{"a b"}},
          {"tokenizer.ggml.eos_token_id", std::uint32_t{5}}};
}

// Scores, not order, say what is merged first: "b c" before "a b".
Keys sentence_piece() {
  return {{"tokenizer.ggml.model", std::string("llama")},
          {"tokenizer.ggml.tokens",
           Texts{"<unk>", "<s>", "</s>", "<0x41>", "\u2581", "a", "b", "c", "ab", "bc"}},
          {"tokenizer.ggml.token_type", std::vector<std::int32_t>{2, 3, 3, 6, 1, 1, 1, 1, 1, 1}},
          {"tokenizer.ggml.scores", std::vector<float>{0, 0, 0, 0, -9, -9, -9, -9, -2, -1}},
          {"tokenizer.ggml.bos_token_id", std::uint32_t{1}},
          {"tokenizer.ggml.eos_token_id", std::uint32_t{2}},
          {"tokenizer.ggml.unknown_token_id", std::uint32_t{0}}};
}

struct Made {
  TempFolder folder;
  Tokenizer tokenizer(const Keys& keys) const {
    write_gguf(folder / "t.gguf", keys, {});
    return Tokenizer::from_gguf(folder / "t.gguf");
  }
  std::string refusal(const Keys& keys) const {
    return message_of([&] { tokenizer(keys); }, Errc::kIo, folder / "");
  }
};

TEST(GgufTokenizer, ByteLevelTokensAndPatterns) {
  const Made made;
  const Tokenizer t = made.tokenizer(byte_level());
  EXPECT_EQ(t.encode("ab ab11"), (Ids{2, 4, 2, 3, 3}));
  EXPECT_EQ(t.encode("ab<|end|><tool>"), (Ids{2, 5, 6}));
  EXPECT_EQ(t.decode(Ids{2, 4, 0, 5}), "ab a<|end|>");
  EXPECT_TRUE(t.is_special(5));
  EXPECT_FALSE(t.is_special(6));
  EXPECT_EQ(t.eos_ids(), Ids{5});
  EXPECT_EQ(t.eos_token(), "<|end|>");
  EXPECT_EQ(t.chat_template(), nullptr);
}

TEST(GgufTokenizer, SentencePieceMergesByScore) {
  const Made made;
  Keys keys = sentence_piece();
  const Tokenizer t = made.tokenizer(keys);
  EXPECT_EQ(t.encode("abc", false), (Ids{4, 5, 9}));
  EXPECT_EQ(t.encode("abc"), (Ids{1, 4, 5, 9}));  // bos is usual for this kind
  EXPECT_EQ(t.encode("A", false), (Ids{4, 3}));   // a byte
  EXPECT_EQ(t.encode("B", false), (Ids{4, 0}));   // no token for it
  EXPECT_EQ(t.decode(Ids{4, 5, 9}), "abc");
  set(keys, "tokenizer.ggml.add_space_prefix", false);
  set(keys, "tokenizer.ggml.add_bos_token", false);
  set(keys, "tokenizer.ggml.add_eos_token", true);
  EXPECT_EQ(made.tokenizer(keys).encode("abc"), (Ids{5, 9, 2}));
}

TEST(GgufTokenizer, AllEndsOfATextCount) {
  const Made made;
  Keys keys = byte_level();
  set(keys, "tokenizer.ggml.eot_token_id", std::uint32_t{6});
  set(keys, "tokenizer.ggml.eom_token_id", std::uint32_t{5});
  set(keys, "tokenizer.ggml.padding_token_id", std::uint32_t{0xFFFFFFFF});  // none
  set(keys, "tokenizer.chat_template", std::string("{{ messages[0].content }}"));
  const Tokenizer t = made.tokenizer(keys);
  EXPECT_EQ(t.eos_ids(), (Ids{5, 6}));
  EXPECT_EQ(t.pad_id(), std::nullopt);
  EXPECT_NE(t.chat_template(), nullptr);
}

TEST(GgufTokenizer, AWholeTokenizerJsonCountsFirst) {
  const Made made;
  Keys keys = byte_level();
  set(keys, "tokenizer.huggingface.json",
      std::string(R"({"model": {"type": "BPE", "vocab": {"a": 7}, "merges": []},
                      "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
                      "decoder": {"type": "ByteLevel"}})"));
  std::erase_if(keys, [](const GgufKey& key) { return key.key == "tokenizer.ggml.eos_token_id"; });
  EXPECT_EQ(made.tokenizer(keys).encode("a"), Ids{7});
}

TEST(GgufTokenizer, RefusesWhatItDoesNotKnow) {
  const Made made;
  const auto with = [&](Keys keys, const std::string& name, auto value) {
    set(keys, name, value);
    return made.refusal(keys);
  };
  const std::string f = "gguf: t.gguf: ";
  EXPECT_EQ(made.refusal({}), f + "it must have a tokenizer (tokenizer.ggml.model and .tokens)");
  EXPECT_EQ(with(byte_level(), "tokenizer.ggml.model", std::string("bert")),
            f + "tokenizers of kind \"bert\" are not supported, only gpt2 and llama");
  EXPECT_EQ(
      with(byte_level(), "tokenizer.ggml.pre", std::string("odd")).substr(0, 70),
      (f + "tokenizer.ggml.pre \"odd\" is not supported, only qwen2, llama-bpe").substr(0, 70));
  EXPECT_EQ(
      with(byte_level(), "tokenizer.ggml.token_type", std::vector<std::int32_t>{1}),
      f + "key \"tokenizer.ggml.token_type\" must have a value for each of the 7 tokens, got 1");
  EXPECT_EQ(with(byte_level(), "tokenizer.ggml.token_type",
                 std::vector<std::int32_t>{1, 1, 1, 1, 1, 1, 7}),
            f + "key \"tokenizer.ggml.token_type\" must have types from 1 to 6, got 7");
  EXPECT_EQ(with(byte_level(), "tokenizer.ggml.eos_token_id", std::uint32_t{7}),
            f + "key \"tokenizer.ggml.eos_token_id\" must be the id of one of 7 tokens, got 7");
  EXPECT_EQ(with(byte_level(), "tokenizer.ggml.bos_token_id", std::int32_t{-2}),
            f + "key \"tokenizer.ggml.bos_token_id\" must be the id of one of 7 tokens, got -2");
  std::vector<float> scores(10, 0);
  scores[3] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(with(sentence_piece(), "tokenizer.ggml.scores", scores),
            f + "key \"tokenizer.ggml.scores\" must have finite numbers");
  EXPECT_EQ(with(sentence_piece(), "tokenizer.ggml.scores", std::vector<float>{1}),
            f + "key \"tokenizer.ggml.scores\" must have a value for each of the 10 tokens, got 1");
  for (const std::string byte : {"<0x-1>", "<0x1>", "<0x123>", "0x41", "<0xG0>"}) {
    EXPECT_EQ(with(sentence_piece(), "tokenizer.ggml.tokens",
                   Texts{"<unk>", "<s>", "</s>", byte, "\u2581", "a", "b", "c", "ab", "bc"}),
              f + "a token of a byte must be <0x00> to <0xFF>, got \"" + byte + "\"");
  }
  EXPECT_NE(with(byte_level(), "tokenizer.ggml.tokens",
                 Texts{"a", "a", "ab", "1", "\u0120", "<|end|>", "<tool>"}),
            "no error");
}

// From a folder to the keys and back: the same ids.
TEST(GgufTokenizer, FilesBecomeKeysAndFilesAgain) {
  for (const Keys& keys : {byte_level(), sentence_piece()}) {
    const Made made;
    const Tokenizer before = made.tokenizer(keys);
    const GgufFile file(made.folder / "t.gguf");
    const TokenizerFiles files = tokenizer_files(*read_gguf_tokenizer(file), "test");
    put(made.folder / "tokenizer.json", files.tokenizer_json);
    put(made.folder / "tokenizer_config.json", files.tokenizer_config.dump());
    put(made.folder / "chat_template.jinja", "{{ 1 }}");
    const Keys again = gguf_tokenizer_keys(made.folder.path.string(), 12);
    const Tokenizer after = made.tokenizer(again);
    for (const std::string text : {"abc ab", "A1 1ab<|end|>", "bca"}) {
      EXPECT_EQ(after.encode(text), before.encode(text)) << text;
      EXPECT_EQ(after.decode(after.encode(text)), before.decode(before.encode(text)));
    }
    EXPECT_EQ(after.eos_ids(), before.eos_ids());
    EXPECT_EQ(after.bos_id(), before.bos_id());
    EXPECT_NE(after.chat_template(), nullptr);
    EXPECT_EQ(after.vocabulary_size(), 12);  // rows without a token have a name
    EXPECT_EQ(after.token_of(11), "[PAD11]");
    // From one GGUF file to another.
    const Tokenizer third = made.tokenizer(gguf_tokenizer_keys(made.folder / "t.gguf", 12));
    EXPECT_EQ(third.encode("abc ab"), before.encode("abc ab"));
  }
  const TempFolder empty;
  EXPECT_TRUE(gguf_tokenizer_keys(empty.path.string(), 1).empty());
}

TEST(GgufTokenizer, SaysWhatLlamaCppHasNoNameFor) {
  const TempFolder folder;
  const auto said = [&](const std::string& json) {
    put(folder / "tokenizer.json", json);
    return message_of([&] { gguf_tokenizer_keys(folder.path.string(), 2); }, Errc::kArgument,
                      folder / "");
  };
  const std::string f = "gguf: tokenizer.json: ";
  EXPECT_EQ(said(R"({"model": {"type": "WordPiece", "vocab": {}}})"),
            f + "a tokenizer of type \"WordPiece\" cannot be written, only BPE");
  EXPECT_EQ(said(R"({"model": {"type": "BPE", "vocab": {"a": 2}, "merges": []}})"),
            f + "it must have no more tokens than the model has rows of embeddings, 2, got 3");
  EXPECT_EQ(said(R"({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}})"),
            f + "an id must be from 0 to 16777215, got -1");
  EXPECT_EQ(
      said(R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
                     "pre_tokenizer": {"type": "Whitespace"}})")
          .substr(0, 84),
      (f + "its pre_tokenizer is none that GGUF has a name for; those of qwen2, ll").substr(0, 84));
}

}  // namespace
}  // namespace mlxtape::formats
