// Against the ids that the package `tokenizers` gives (make_tokenizer_golden.py), and what must hold of any text.
#include "mlxtape/formats/tokenizer.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <random>

#include "formats/utf8.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"
#include "support/op_test.h"

namespace mlxtape::formats {
namespace {

using test::expect_error;

using Ids = std::vector<TokenId>;

const Json& golden() {
  static const Json json =
      Json::parse(read_whole(MLXTAPE_GOLDEN "/tokenizer.json", "test"), "tokenizer.json");
  return json;
}
const Json& vocabulary(const std::string& name) {
  return *golden().find("vocabularies")->find(name);
}
const Tokenizer& tokenizer(const std::string& name) {
  static const Tokenizer qwen = Tokenizer::from_json(vocabulary("qwen").dump(), "qwen");
  static const Tokenizer llama = Tokenizer::from_json(vocabulary("llama").dump(), "llama");
  return name == "qwen" ? qwen : llama;
}

Ids ids_of(const Json& json) {
  Ids out;
  for (const Json& id : json.array()) out.push_back(static_cast<TokenId>(id.integer()));
  return out;
}

// A text of characters that the steps tell apart.
std::string random_text(std::mt19937& random, int length) {
  static const std::u32string kPool =
      U"etaoin ETAOIN  0123\n\r\t'.,s\u0301\u0323\u00a0\u180eéß日本\uD55Cд🙂\U00010348<|im_end|>";
  std::string out;
  for (int i = 0; i < length; ++i) append_utf8(out, kPool[random() % kPool.size()]);
  return out;
}

TEST(Tokenizer, IdsAsTokenizers) {
  for (const auto& [name, cases] : golden().find("cases")->object()) {
    for (const Json& row : cases.array()) {
      const std::string& text = row.array()[0].string();
      const Ids want = ids_of(row.array()[1]);
      EXPECT_EQ(tokenizer(name).encode(text), want) << name << ": " << row.array()[0].dump();
      EXPECT_EQ(tokenizer(name).decode(want, true), row.array()[2].string())
          << name << ": " << row.array()[0].dump();
    }
  }
}

TEST(Tokenizer, StepsAsTokenizers) {
  for (const Json& row : golden().find("variants")->array()) {
    Json json = vocabulary("qwen");
    for (const auto& [key, value] : row.array()[0].object()) json.set(key, value);
    const Tokenizer t = Tokenizer::from_json(json.dump(), "variant");
    for (const Json& c : row.array()[1].array()) {
      EXPECT_EQ(t.encode(c.array()[0].string()), ids_of(c.array()[1]))
          << row.array()[0].dump() << ": " << c.array()[0].dump();
    }
  }
}

TEST(Tokenizer, DecodesAsTokenizers) {
  for (const Json& row : golden().find("decodes")->array()) {
    EXPECT_EQ(tokenizer("qwen").decode(ids_of(row.array()[0])), row.array()[1].string())
        << row.array()[0].dump();
  }
}

TEST(Tokenizer, SpecialTokensAroundAndSkipped) {
  const Tokenizer& t = tokenizer("llama");
  const TokenId begin = *t.id_of("<|begin|>");
  Ids with = t.encode("the");
  EXPECT_EQ(with.front(), begin);
  with.erase(with.begin());
  EXPECT_EQ(t.encode("the", false), with);
  EXPECT_EQ(t.decode(t.encode("the")), "<|begin|>the");
  EXPECT_EQ(t.decode(t.encode("the"), true), "the");
  EXPECT_TRUE(t.is_special(begin));
  EXPECT_FALSE(t.is_special(*t.id_of("word")));
  EXPECT_FALSE(t.is_special(-1));
  EXPECT_EQ(t.token_of(begin), "<|begin|>");
  EXPECT_EQ(t.token_of(*t.id_of("Ġt")), "Ġt");
  EXPECT_EQ(t.id_of("no such token"), std::nullopt);
  EXPECT_EQ(t.vocabulary_size(), 908);
  EXPECT_THROW(t.token_of(908), Error);
  EXPECT_THROW(t.token_of(-1), Error);

  // Behind the text as well.
  Json json = vocabulary("qwen");
  json.set(
      "post_processor",
      Json::parse(
          R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "B"}}, {"Sequence": {"id": "A"}},
    {"SpecialToken": {"id": "E"}}], "special_tokens": {"B": {"ids": [1, 2]}, "E": {"ids": [3]}}})",
          "p"));
  EXPECT_EQ(Tokenizer::from_json(json.dump(), "x").encode("!"),
            (Ids{1, 2, *tokenizer("qwen").id_of("!"), 3}));
}

TEST(Tokenizer, AnyTextComesBack) {
  std::mt19937 random(3);
  Json json = vocabulary("qwen");
  json.set("normalizer", Json());
  const Tokenizer t = Tokenizer::from_json(json.dump(), "qwen");
  for (int i = 0; i < 2000; ++i) {
    const std::string text = random_text(random, static_cast<int>(random() % 40));
    EXPECT_EQ(t.decode(t.encode(text)), text);
  }
}

TEST(Tokenizer, BytesThatAreNoTextCountAsReplaced) {
  const Tokenizer& t = tokenizer("qwen");
  EXPECT_EQ(t.encode("a\xff\xe2\x82z\xc0\x80\xed\xa0\x80"),
            t.encode("a\ufffd\ufffdz\ufffd\ufffd\ufffd\ufffd\ufffd"));
  std::mt19937 random(4);
  for (int i = 0; i < 500; ++i) {
    std::string bytes(random() % 60, ' ');
    for (char& b : bytes) b = static_cast<char>(random());
    EXPECT_EQ(t.encode(bytes), t.encode(replace_invalid_utf8(bytes)));
    EXPECT_TRUE(is_valid_utf8(replace_invalid_utf8(bytes)));
  }
}

// One word of many letters goes another way than a short one; both must give the same, as must words seen before.
TEST(Tokenizer, LongWordsAndLongTexts) {
  const Tokenizer& t = tokenizer("qwen");
  std::string word, text;
  std::mt19937 random(5);
  for (int i = 0; i < 48; ++i) word += static_cast<char>('a' + random() % 20);
  const Ids shorter = t.encode(word), longer = t.encode(word + "q");
  EXPECT_EQ(t.decode(longer), word + "q");
  EXPECT_TRUE(std::equal(shorter.begin(), shorter.end() - 2, longer.begin()));
  Ids want;
  for (int i = 0; i < 3000;
       ++i) {  // so many that some of them share a place among the words seen before
    std::string next = " ";
    for (int j = 0; j < 4; ++j) next += static_cast<char>('a' + random() % 8);
    const Ids ids = t.encode(next);  // too short to remember any
    want.insert(want.end(), ids.begin(), ids.end());
    text += next;
    if (std::has_single_bit(static_cast<unsigned>(i))) {
      EXPECT_EQ(t.encode(text), want) << i;
    }
  }
  EXPECT_EQ(t.encode(text), want);
  // Each would take minutes if it were quadratic.
  const std::size_t n = 1 << 18;
  for (const std::string& unit : {std::string("the"), std::string(" "), std::string("\u0301\u0316"),
                                  std::string("<"), std::string("日")}) {
    std::string many;
    while (many.size() < n) many += unit;
    const Ids ids = t.encode(many);
    EXPECT_LT(ids.size(), many.size() + 1);
    if (unit == "\u0301\u0316") continue;  // its order is another in normal form
    EXPECT_EQ(t.decode(ids), many);
  }
}

// Random merges of three letters, against the definition: the pair of the lowest rank, the leftmost of those.
TEST(Tokenizer, MergesInTheOrderOfTheirRanks) {
  using Pair = std::pair<std::string, std::string>;
  std::mt19937 random(8);
  for (int round = 0; round < 20; ++round) {
    Json tokens(Json::Object{});
    for (const auto& [token, id] : vocabulary("qwen").find("model")->find("vocab")->object()) {
      if (count_code_points(token) == 1) tokens.set(token, id);
    }
    std::vector<std::string> parts = {"a", "b", "c"};
    std::vector<Pair> merges;
    Json::Array written;
    while (merges.size() < 40) {
      const Pair pair{parts[random() % parts.size()], parts[random() % parts.size()]};
      const std::string both = pair.first + pair.second;
      if (both.size() > 6 || std::find(merges.begin(), merges.end(), pair) != merges.end())
        continue;
      if (tokens.find(both) == nullptr) {
        tokens.set(both, static_cast<int>(tokens.object().size()) + 1000);
        parts.push_back(both);
      }
      merges.push_back(pair);
      written.push_back(Json(Json::Array{Json(pair.first), Json(pair.second)}));
    }
    Json json = vocabulary("qwen");
    json.set("added_tokens", Json(Json::Array{}));
    json.set("model", Json(Json::Object{{"vocab", tokens}, {"merges", Json(written)}}));
    const Tokenizer t = Tokenizer::from_json(json.dump(), "random");
    for (const int length : {1, 2, 7, 30, 48, 49, 120}) {
      std::vector<std::string> want;
      for (int i = 0; i < length; ++i) want.emplace_back(1, static_cast<char>('a' + random() % 3));
      std::string word;
      for (const std::string& letter : want) word += letter;
      for (;;) {
        std::size_t best = 0, rank = merges.size();
        for (std::size_t i = 0; i + 1 < want.size(); ++i) {
          const auto at = std::find(merges.begin(), merges.end(), Pair{want[i], want[i + 1]});
          const auto r = static_cast<std::size_t>(at - merges.begin());
          if (r < rank) best = i, rank = r;
        }
        if (rank == merges.size()) break;
        want[best] += want[best + 1];
        want.erase(want.begin() + static_cast<std::ptrdiff_t>(best) + 1);
      }
      std::vector<std::string> got;
      for (const TokenId id : t.encode(word)) got.emplace_back(t.token_of(id));
      EXPECT_EQ(got, want) << word;
    }
  }
}

TEST(StreamDecoder, CutsAtEveryPlaceAsDecode) {
  const Tokenizer& t = tokenizer("qwen");
  std::mt19937 random(6);
  for (int i = 0; i < 300; ++i) {
    Ids ids = t.encode(random_text(random, 12));
    if (i % 3 == 0) {
      for (TokenId& id : ids) id = static_cast<TokenId>(random() % 300);  // bytes in any order
    }
    if (i % 5 == 0) ids.push_back(*t.id_of("<|im_end|>")), ids.push_back(5000);
    for (const bool skip : {false, true}) {
      StreamDecoder stream(t, skip);
      std::string all;
      for (const TokenId id : ids) {
        const std::string piece = stream.put(id);
        EXPECT_TRUE(is_valid_utf8(piece));
        all += piece;
      }
      all += stream.end();
      EXPECT_EQ(all, t.decode(ids, skip));
      EXPECT_EQ(stream.end(), "");
    }
  }
}

TEST(StreamDecoder, HoldsBackWhatIsNotWhole) {
  const Tokenizer& t = tokenizer("qwen");
  StreamDecoder stream(t);
  EXPECT_EQ(stream.put(*t.id_of("ð")), "");
  EXPECT_EQ(stream.put(*t.id_of("Ł")), "");
  EXPECT_EQ(stream.put(*t.id_of("Ļ")), "");
  EXPECT_EQ(stream.put(*t.id_of("Ĥ")), "🙂");
  EXPECT_EQ(stream.put(*t.id_of("ð")), "");
  EXPECT_EQ(stream.put(*t.id_of("a")),
            "\ufffd"
            "a");
  EXPECT_EQ(stream.put(*t.id_of("Ã")), "");
  EXPECT_EQ(stream.end(), "\ufffd");
}

// ---- files ----

std::string message_of(const Json& json) {
  try {
    Tokenizer::from_json(json.dump(), "f");
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::kIo) << e.what();
    EXPECT_TRUE(std::string(e.what()).starts_with("f: ")) << e.what();
    return e.what();
  }
  return "no error";
}

TEST(Tokenizer, SaysWhatIsWrongInAFile) {
  struct Row {
    const char *path, *value, *message;  // value "" takes it away
  };
  const Row table[] = {
      {"model", "", "there must be a model"},
      {"model.type", R"("WordPiece")", "must be of type BPE or Unigram, got WordPiece"},
      {"model.type", R"("\u001b[2J")", "must be of type BPE or Unigram, got \\x1b[2J"},
      {"model.type", R"("Unigram")", "must be of type BPE, got Unigram"},
      {"model.vocab", "", "must have vocab and merges"},
      {"model.merges", "", "must have vocab and merges"},
      {"model.vocab", R"({"a": 0})", "a merge must be of tokens"},
      {"model.vocab.a", "", "a merge must be of tokens"},
      {"model.vocab.a", "3", "each id must have one token"},
      {"model.vocab.a", "-1", "an id must be at least 0"},
      {"model.vocab.a", "16777216", "less than 16777216, got 16777216"},
      {"model.vocab.a", "1.5", "integer"},
      {"model.merges", R"(["a"])", "two tokens with a space between, got 'a'"},
      {"model.merges", R"(["a b c"])", "two tokens with a space between, got 'a b c'"},
      {"model.merges", "[[]]", "two tokens, got none"},
      {"model.merges", R"([["a"]])", "two tokens, got one"},
      {"model.merges", R"([["a", "b", "c"]])", "two tokens, got more"},
      {"model.merges", R"(["a 日"])", "must be of tokens and give a token, got 'a' and '日'"},
      {"model.byte_fallback", "1", "true or false"},
      {"model.dropout", "0.1", "dropout must be null or 0, got 0.1"},
      {"model.end_of_word_suffix", R"("</w>")", "end_of_word_suffix is not supported"},
      {"normalizer", R"({"type": "Nmt"})", "the normalizer 'Nmt' is not supported"},
      {"normalizer", R"({"type": "Sequence"})", "'normalizers' must be given"},
      {"normalizer", R"({"type": "Replace", "pattern": {"Glob": "*"}, "content": ""})",
       "must be a String or a Regex"},
      {"normalizer", R"({"type": "Replace", "pattern": {"String": ""}, "content": ""})",
       "must not be empty"},
      {"normalizer", R"({"type": "Replace", "pattern": {"Regex": "(a"}, "content": ""})",
       "byte 2 of '(a'"},
      {"normalizer", R"({"type": "Replace", "pattern": {"Regex": "[a[^b]]"}, "content": ""})",
       "this set in a set is not supported"},
      {"normalizer", R"({"type": "Precompiled", "precompiled_charsmap": "?"})", "must be base64"},
      {"normalizer", R"({"type": "Precompiled", "precompiled_charsmap": "AAAA"})",
       "at least 4 bytes"},
      {"normalizer", R"({"type": "Precompiled", "precompiled_charsmap": "AwAAAAAAAAAA"})",
       "the trie of a charsmap must lie in it, got 3 of 9 bytes"},
      {"normalizer", R"({"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAABB"})",
       "must end with a zero"},
      {"normalizer", R"({"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAD/AA=="})",
       "must be UTF-8"},
      {"pre_tokenizer", R"({"type": "UnicodeScripts"})",
       "the pre-tokenizer 'UnicodeScripts' is not supported"},
      {"pre_tokenizer", R"({"type": "Metaspace"})", "'replacement' must be given"},
      {"pre_tokenizer", R"({"type": "Metaspace", "replacement": "ab"})", "must be one character"},
      {"pre_tokenizer",
       R"({"type": "Metaspace", "replacement": "_", "prepend_scheme": "sometimes"})",
       "must be always, first or never, got 'sometimes'"},
      {"pre_tokenizer", R"({"type": "CharDelimiterSplit", "delimiter": ""})", "must not be empty"},
      {"pre_tokenizer", R"({"type": "Split", "pattern": {"String": "a"}, "behavior": "Odd"})",
       "the behavior 'Odd'"},
      {"pre_tokenizer", "{}", "'type' must be given"},
      {"post_processor", R"({"type": "Pair"})", "the post-processor 'Pair' is not supported"},
      {"post_processor", R"({"type": "BertProcessing"})", "'cls' must be given"},
      {"post_processor", R"({"type": "BertProcessing", "cls": ["a"], "sep": ["b", 2]})",
       "'cls' must be a token and its id"},
      {"post_processor", R"({"type": "BertProcessing", "cls": ["a", 9999], "sep": ["b", 2]})",
       "that of a token, got 9999"},
      {"post_processor", "{}", "must have a type"},
      {"post_processor", R"({"type": "Sequence"})", "'processors' must be given"},
      {"post_processor", R"({"type": "TemplateProcessing"})",
       "must have 'single' and 'special_tokens'"},
      {"post_processor", R"({"type": "TemplateProcessing", "single": [], "special_tokens": {}})",
       "must have a Sequence"},
      {"post_processor",
       R"({"type": "TemplateProcessing", "single": [{"Sequence": {}}, {"Sequence": {}}], "special_tokens": {}})",
       "one Sequence, got two"},
      {"post_processor",
       R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}], "special_tokens": {}})",
       "a token of 'special_tokens'"},
      {"post_processor",
       R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}], "special_tokens": {"x": {"ids": [5000]}}})",
       "that of a token, got 5000"},
      {"decoder", R"({"type": "WordPiece"})", "the decoder 'WordPiece' is not supported"},
      {"decoder", R"({"type": "Sequence"})", "'decoders' must be given"},
      {"decoder", R"({"type": "Sequence", "decoders": [{"type": "Strip"}]})",
       "'content' must be given"},
      {"decoder", R"({"type": "Strip", "content": "ab", "start": 1, "stop": 0})",
       "must be one character"},
      {"decoder", R"({"type": "Strip", "content": "a", "start": -1, "stop": 0})",
       "'start' must be from 0 to 1048576, got -1"},
      {"added_tokens", R"([{"content": "x"}])", "'id' must be given"},
      {"added_tokens", R"([{"id": 9999999999, "content": "x"}])",
       "an added token's id must be at least 0"},
      {"added_tokens", R"([{"id": -5, "content": "x"}])", "an added token's id must be at least 0"},
      {"added_tokens", R"([{"id": 1, "content": "xx"}])", "each id must have one token"},
      {"added_tokens", R"([{"id": 1000, "content": "a"}])", "the id that it has in the vocabulary"},
  };
  EXPECT_EQ(message_of(vocabulary("qwen")), "no error");
  for (const Row& row : table) {
    Json json = vocabulary("qwen");
    Json* at = &json;
    std::string path = row.path;
    for (std::size_t dot; (dot = path.find('.')) != path.npos; path.erase(0, dot + 1))
      at = const_cast<Json*>(at->find(path.substr(0, dot)));
    at->erase(path);
    if (*row.value != 0) at->set(path, Json::parse(row.value, "row"));
    EXPECT_NE(message_of(json).find(row.message), std::string::npos)
        << row.path << " = " << row.value << "\n  " << message_of(json);
  }
  const std::string text = vocabulary("qwen").dump();
  for (std::size_t cut = 0; cut < text.size(); cut += text.size() / 50)
    EXPECT_THROW(Tokenizer::from_json(text.substr(0, cut), "f"), Error) << cut;
  EXPECT_THROW(Tokenizer::from_json(R"({"model": {"vocab": {"a": 0, "a": 1}, "merges": []}})", "f"),
               Error);
  EXPECT_THROW(Tokenizer::from_file("/no/such/file"), Error);
}

// As tokenizers: bytes without a token are left out, or become the unknown token; one that is missing is an error then.
TEST(Tokenizer, BytesWithoutTokens) {
  Json json = vocabulary("qwen"), model = *json.find("model"), tokens = *model.find("vocab");
  tokens.erase("q");
  const auto with = [&](const Json& unknown, bool fused) {
    model.set("vocab", tokens);
    model.set("merges", Json::Array{});
    model.set("unk_token", unknown);
    model.set("fuse_unk", fused);
    json.set("model", model);
    return Tokenizer::from_json(json.dump(), "x");
  };
  const TokenId a = *tokenizer("qwen").id_of("a"), b = *tokenizer("qwen").id_of("b");
  EXPECT_EQ(with(Json(), false).encode("aqqb"), (Ids{a, b}));
  EXPECT_EQ(with("a", false).encode("bqqb"), (Ids{b, a, a, b}));
  EXPECT_EQ(with("a", true).encode("bqqb"), (Ids{b, a, b}));
  EXPECT_EQ(with("a", true).encode("bqq"), (Ids{b, a}));
  EXPECT_EQ(with("none", false).encode("ab"), (Ids{a, b}));
  expect_error(Errc::kArgument, "no token for 'q', nor its unk_token 'none'",
               [&] { with("none", false).encode("aq"); });
}

TEST(Tokenizer, MergesMayComeBeforeTheTokens) {
  Json json = vocabulary("qwen"), model = *json.find("model");
  const Json tokens = *model.find("vocab");
  model.erase("vocab");
  model.set("vocab", tokens);
  json.set("model", model);
  EXPECT_EQ(Tokenizer::from_json(json.dump(), "x").encode("the model there"),
            tokenizer("qwen").encode("the model there"));
}

class TokenizerFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "tokenizer_test.XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    write("tokenizer.json", vocabulary("llama").dump());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& name, const std::string& text) {
    write_whole(folder_ / name, text, "test");
  }
  Tokenizer load() const { return Tokenizer::from_directory(folder_); }
  std::string message() const {
    try {
      load();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }
  std::filesystem::path folder_;
};

TEST_F(TokenizerFolder, AllButTokenizerJsonMayBeAbsent) {
  const Tokenizer t = load();
  EXPECT_EQ(t.encode("the"), tokenizer("llama").encode("the"));
  EXPECT_FALSE(t.bos_id() || t.pad_id());
  EXPECT_TRUE(t.eos_ids().empty());
  EXPECT_EQ(t.bos_token() + t.eos_token(), "");
  EXPECT_EQ(t.chat_template(), nullptr);
  std::filesystem::remove(folder_ / "tokenizer.json");
  EXPECT_NE(message().find("tokenizer.json"), std::string::npos);
}

TEST_F(TokenizerFolder, ConfigsAreRead) {
  write(
      "tokenizer_config.json",
      R"({"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", "pad_token": null, "chat_template": "one"})");
  const Tokenizer one = load();
  EXPECT_EQ(one.bos_token(), "<|begin|>");
  EXPECT_EQ(one.bos_id(), one.id_of("<|begin|>"));
  EXPECT_EQ(one.eos_ids(), Ids{*one.id_of("<|end|>")});
  EXPECT_EQ(one.chat_template()->text(), "one");

  write(
      "tokenizer_config.json",
      R"({"eos_token": "<|end|>", "pad_token": "<|end|>", "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]})");
  write("generation_config.json", R"({"eos_token_id": 7})");
  const Tokenizer two = load();
  EXPECT_EQ(two.chat_template()->text(), "two");
  EXPECT_EQ(two.eos_ids(), Ids{7});
  EXPECT_EQ(two.eos_token(), "<|end|>");
  EXPECT_EQ(two.pad_id(), two.id_of("<|end|>"));
  EXPECT_EQ(two.bos_id(), std::nullopt);

  write("generation_config.json", R"({"eos_token_id": [8, 9]})");
  write("chat_template.jinja", "{{ bos_token }}three");
  EXPECT_EQ(load().eos_ids(), (Ids{8, 9}));
  EXPECT_EQ(load().chat_template()->text(), "{{ bos_token }}three");
}

TEST_F(TokenizerFolder, Chats) {
  write("tokenizer_config.json",
        R"({"bos_token": "<|begin|>", "eos_token": "<|end|>",
            "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"})");
  const Tokenizer t = load();
  const Json messages = Json::parse(R"([{"role": "user", "content": "the"}])", "messages");
  EXPECT_EQ(t.encode_chat(messages), t.encode("<|begin|>the<|end|>", false));
  // A template that cannot be read spoils chats alone.
  write("chat_template.jinja", "{% if %}");
  const Tokenizer other = load();
  EXPECT_EQ(other.encode("the"), t.encode("the"));
  expect_error(Errc::kIo, "chat_template.jinja: line 1", [&] { other.encode_chat(messages); });
  std::filesystem::remove(folder_ / "chat_template.jinja");
  std::filesystem::remove(folder_ / "tokenizer_config.json");
  expect_error(Errc::kArgument, "has no chat template", [&] { load().encode_chat(messages); });
}

TEST_F(TokenizerFolder, EosIdsComeFromTheFirstFileThatHasThem) {
  write("tokenizer_config.json", R"({"eos_token": "<|end|>"})");
  write("config.json", R"({"eos_token_id": null, "text_config": {"hidden_size": 8}})");
  const Ids last{*load().id_of("<|end|>")};
  EXPECT_EQ(load().eos_ids(), last);
  write("config.json", R"({"text_config": {"eos_token_id": 5}})");
  EXPECT_EQ(load().eos_ids(), Ids{5});
  write("config.json", R"({"eos_token_id": [3, 4], "text_config": {"eos_token_id": 5}})");
  EXPECT_EQ(load().eos_ids(), (Ids{3, 4}));
  write("generation_config.json", R"({"temperature": 1.0})");
  EXPECT_EQ(load().eos_ids(), (Ids{3, 4}));
  write("generation_config.json", R"({"eos_token_id": 7})");
  EXPECT_EQ(load().eos_ids(), Ids{7});
}

TEST_F(TokenizerFolder, SaysWhatIsWrong) {
  const std::pair<const char*, const char*> table[] = {
      {R"({"bos_token": "nope"})", "bos_token must be a token, got 'nope'"},
      {R"({"chat_template": [{"name": "default"}]})", "must have a name and a template"},
      {"[", "tokenizer_config.json"},
  };
  for (const auto& [config, text] : table) {
    write("tokenizer_config.json", config);
    EXPECT_NE(message().find(text), std::string::npos) << message();
  }
  write("tokenizer_config.json", "{}");
  for (const auto& [json, got] :
       {std::pair(R"("x")", R"("x")"), {"[1, \"y\"]", "\"y\""}, {"{}", "{}"}}) {
    write("generation_config.json", R"({"eos_token_id": )" + std::string(json) + "}");
    const std::string says =
        std::string("/generation_config.json: eos_token_id must be an id, got ") + got;
    EXPECT_NE(message().find(says), std::string::npos) << message();
  }
  write("generation_config.json", R"({"eos_token_id": -3})");
  EXPECT_NE(message().find("eos_token_id must be an id, got -3"), std::string::npos) << message();
  write("generation_config.json", "{}");
  write("config.json", R"({"text_config": {"eos_token_id": -4}})");
  EXPECT_NE(message().find("config.json: eos_token_id must be an id, got -4"), std::string::npos)
      << message();
}

}  // namespace
}  // namespace mlxtape::formats
