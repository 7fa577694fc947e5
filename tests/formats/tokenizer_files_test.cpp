// Tokenizers of every kind of file, against what sentencepiece, tiktoken and tokenizers give
// (make_tokenizer_files_golden.py), and what is wrong in such files.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "formats/support.h"
#include "formats/tokenizer_base64.h"
#include "formats/utf8.h"
#include "mlxtape/base/files.h"
#include "mlxtape/formats/tokenizer.h"

namespace mlxtape::formats {
namespace {

using Ids = std::vector<TokenId>;

const Json& golden() {
  static const Json json = Json::parse(read_whole(MLXTAPE_GOLDEN "/tokenizer_files.json", "test"),
                                       "tokenizer_files.json");
  return json;
}

std::string bytes_of(const Json& base64) {
  std::string out;
  EXPECT_TRUE(append_base64(out, base64.string()));
  return out;
}
std::string text_of(const Json& json) {
  return json.is_string() ? json.string() : bytes_of(*json.find("base64"));
}

// [text, ids, text again or null]; and the same when ids come one by one.
void expect_cases(const Tokenizer& t, const Json& cases, const std::string& about) {
  for (const Json& row : cases.array()) {
    const std::string text = text_of(row.array()[0]);
    Ids want;
    for (const Json& id : row.array()[1].array())
      want.push_back(static_cast<TokenId>(id.integer()));
    EXPECT_EQ(t.encode(text, false), want) << about << ": " << row.array()[0].dump();
    const std::string whole = t.decode(want, true);
    if (!row.array()[2].is_null()) {
      EXPECT_EQ(whole, row.array()[2].string()) << about << ": " << row.array()[0].dump();
    }
    StreamDecoder stream(t, true);
    std::string pieces;
    for (const TokenId id : want) pieces += stream.put(id);
    EXPECT_EQ(pieces + stream.end(), whole) << about << ": " << row.array()[0].dump();
  }
}

class TokenizerFiles : public ::testing::Test {
 protected:
  Tokenizer read(const std::string& name, const std::string& bytes) {
    put(path(name), bytes);
    return Tokenizer::from_file(path(name));
  }
  std::string refused(const std::string& name, const std::string& bytes) {
    return message_of([&] { read(name, bytes); }, Errc::kIo, folder_.path.string() + "/");
  }
  std::string path(const std::string& name) const { return folder_ / name; }
  TempFolder folder_;
};

TEST_F(TokenizerFiles, IdsAsSentencePiece) {
  for (const auto& [name, file] : golden().find("sentencepiece")->object()) {
    expect_cases(read("tokenizer.model", bytes_of(*file.find("model"))), *file.find("cases"), name);
  }
}

TEST_F(TokenizerFiles, IdsAsTekken) {
  const Json& file = *golden().find("tekken");
  const Tokenizer t = read("tekken.json", file.find("json")->dump());
  expect_cases(t, *file.find("cases"), "tekken");
  EXPECT_EQ(t.bos_token() + t.eos_token(), "<s></s>");
  EXPECT_EQ(*t.pad_id(), 11);
  EXPECT_EQ(t.encode("[INST]a"), (Ids{1, 3, 30 + 'a'}));
  EXPECT_EQ(t.token_of(29), "<SPECIAL_29>");
  EXPECT_TRUE(t.is_special(29));
  EXPECT_EQ(t.id_of("never"), std::nullopt);  // more tokens are in the file than are used
}

// A patch that begins with "model." goes into the model; "model.without" takes tokens out of it.
Json patched(const Json& base, const Json& patch) {
  Json json = base, model = *json.find("model");
  for (const auto& [key, value] : patch.object()) {
    if (key == "model.without") {
      Json vocab = *model.find("vocab");
      for (const Json& token : value.array()) vocab.erase(token.string());
      model.set("vocab", vocab);
    } else if (key.starts_with("model.")) {
      model.set(key.substr(6), value);
    } else {
      json.set(key, value);
    }
  }
  json.set("model", model);
  return json;
}

TEST_F(TokenizerFiles, StepsAsTokenizers) {
  for (const Json& row : golden().find("variants")->array()) {
    const Json& base = *golden().find("json")->find(row.array()[0].string());
    const std::string about = row.array()[0].string() + " " + row.array()[1].dump().substr(0, 200);
    expect_cases(Tokenizer::from_json(patched(base, row.array()[1]).dump(), "variant"),
                 row.array()[2], replace_invalid_utf8(about));
  }
}

// ---- lists of ranks ----

std::string base64_of(const std::string& bytes) {
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t bits = 0;
    for (std::size_t j = 0; j < 3; ++j)
      bits = bits << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0U);
    for (std::size_t j = 0; j < 4; ++j)
      out += i + j > bytes.size() ? '=' : kAlphabet[bits >> (18 - 6 * j) & 63];
  }
  return out;
}

// As many tokens as a known list has: bytes in a random order, then what chance merges of them.
std::map<std::string, TokenId> random_ranks(std::size_t count, std::mt19937& random) {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  std::shuffle(tokens.begin(), tokens.end(), random);
  std::map<std::string, TokenId> out;
  for (const std::string& token : tokens) out.emplace(token, static_cast<TokenId>(out.size()));
  const std::string letters = "etaoinshr ";
  while (out.size() < count) {
    const auto pick = [&] {
      return random() % 2 == 0 ? std::string(1, letters[random() % letters.size()])
                               : tokens[random() % tokens.size()];
    };
    const std::string token = pick() + pick();
    if (token.size() > 12) continue;
    if (out.emplace(token, static_cast<TokenId>(out.size())).second) tokens.push_back(token);
  }
  return out;
}

std::string list_of(const std::map<std::string, TokenId>& ranks) {
  std::string out;
  for (const auto& [token, rank] : ranks)
    out += base64_of(token) + " " + std::to_string(rank) + "\n";
  return out;
}

// Words of letters alone are whole to every pattern. By the definition: the neighbours whose joined bytes have the
// lowest rank, the leftmost of those.
TEST_F(TokenizerFiles, RanksAreMergedLowestFirst) {
  std::mt19937 random(11);
  const auto ranks = random_ranks(50256, random);
  const Tokenizer t = read("r50k.tiktoken", list_of(ranks));
  for (int i = 0; i < 300; ++i) {
    std::string word;
    const std::size_t length = 1 + random() % (i % 10 == 0 ? 90 : 12);
    while (word.size() < length) word += "etaoinshr"[random() % 9];
    std::vector<std::string> parts;
    for (const char c : word) parts.emplace_back(1, c);
    if (ranks.contains(word)) parts = {word};
    while (parts.size() > 1) {
      std::size_t best = 0;
      TokenId rank = 1 << 30;
      for (std::size_t j = 0; j + 1 < parts.size(); ++j) {
        const auto found = ranks.find(parts[j] + parts[j + 1]);
        if (found != ranks.end() && found->second < rank) rank = found->second, best = j;
      }
      if (rank == 1 << 30) break;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    Ids want;
    for (const std::string& part : parts) want.push_back(ranks.at(part));
    EXPECT_EQ(t.encode(word), want) << word;
    EXPECT_EQ(t.decode(want), word);
  }
  EXPECT_EQ(t.encode("<|endoftext|>"), Ids{50256});
  EXPECT_EQ(t.eos_ids(), Ids{50256});
  EXPECT_EQ(t.bos_id(), std::nullopt);
}

TEST_F(TokenizerFiles, ListsOfRanksAreKnownByTheirLength) {
  std::mt19937 random(12);
  struct Row {
    std::size_t count;
    const char *text, *tokens;  // what it is cut into, with | between
    TokenId special;
    const char* name;
  };
  const Row table[] = {
      {128000, "1234", "123|4", 128009, "<|eot_id|>"},
      {128000, "x", "x", 128255, "<|reserved_special_token_245|>"},
      {151643, "1234", "1|2|3|4", 151644, "<|im_start|>"},
      {151643, "x", "x", 151850, "<|extra_204|>"},
      {200000, "x", "x", 200006, "<|header_end|>"},
      {200000, "x", "x", 200080, "<|image_start|>"},
      {200000, "x", "x", 201143, "<|reasoning_thinking_end|>"},
      {200000, "x", "x", 202047, "<|reserved_special_token_903|>"},
      {199998, "x", "x", 200006, "<|start|>"},
      {199998, "x", "x", 200018, "<|endofprompt|>"},
      {199998, "x", "x", 201087, "<|reserved_201087|>"},
      {248044, "x", "x", 248076, "<|audio_pad|>"},
      {100256, "x", "x", 100276, "<|endofprompt|>"},
      {163584, "x", "x", 163585, "[EOS]"},
  };
  std::map<std::size_t, Tokenizer> known;
  for (const Row& row : table) {
    if (!known.contains(row.count)) {
      auto ranks = random_ranks(256, random);
      // What the digits are merged to shows how they were cut; the rest has no letters of the texts.
      for (const char* token : {"12", "123", "1234", "34"})
        ranks.emplace(token, static_cast<TokenId>(ranks.size()));
      while (ranks.size() < row.count)
        ranks.emplace("\x01" + std::to_string(ranks.size()), static_cast<TokenId>(ranks.size()));
      known.emplace(row.count, read("tokenizer.model", list_of(ranks)));
    }
    const Tokenizer& t = known.at(row.count);
    EXPECT_EQ(t.token_of(row.special), row.name);
    EXPECT_TRUE(t.is_special(row.special));
    std::string cut;
    for (const TokenId id : t.encode(row.text, false)) {
      if (!cut.empty()) cut += '|';
      cut += t.token_of(id);
    }
    EXPECT_EQ(cut, row.tokens) << row.count;
  }
  EXPECT_EQ(known.at(128000).encode("x").front(), 128000);
  EXPECT_EQ(known.at(128000).vocabulary_size(), 128256);
  // Chinese characters are words of their own, and others are not joined with them.
  const std::string mixed = "ab日本ab";
  EXPECT_EQ(known.at(163584).decode(known.at(163584).encode(mixed, false)), mixed);
  EXPECT_EQ(known.at(151643).encode("e\u0301", false), known.at(151643).encode("\u00e9", false));
}

TEST_F(TokenizerFiles, SaysWhatIsWrongInLists) {
  const std::pair<const char*, const char*> table[] = {
      {"IQ== 0\nIQ== 1\n", "tokenizer.model: line 2: each token must be there once, got '!' twice"},
      {"IQ== 0\nIg== 0\n", "line 2: each id must have one token, got '!' and '\"' for 0"},
      {"IQ==0\n", "line 1: there must be a token and its rank, got 'IQ==0'"},
      {"IQ== -1\n", "line 1: there must be a token and its rank, got 'IQ== -1'"},
      {"IQ== 1234567890\n", "there must be a token and its rank"},
      {"IQ== 16777216\n", "less than 16777216, got 16777216"},
      {"I*== 0\n", "a token must be base64, got 'I*=='"},
      {"IQ= 0\n", "a token must be base64"},
      {"IR== 0\n", "a token must be base64"},
      {" 0\n", "a token must be base64, got ''"},
      {"IQ== 0\r\n\r\n", "a token for each byte, got none for 0"},
  };
  for (const auto& [text, says] : table) {
    EXPECT_NE(refused("tokenizer.model", text).find(says), std::string::npos)
        << text << "\n  " << refused("tokenizer.model", text);
  }
  std::mt19937 random(13);
  EXPECT_NE(refused("tokenizer.model", list_of(random_ranks(300, random)))
                .find("a list of 300 tokens is not known, and its pattern and special tokens are "
                      "not in the file; known are llama3 (128000), "),
            std::string::npos);
}

TEST_F(TokenizerFiles, SaysWhatIsWrongInTekken) {
  const Json good = *golden().find("tekken")->find("json");
  struct Row {
    const char *path, *value, *message;
  };
  const Row table[] = {
      {"config", "", "there must be config and vocab"},
      {"vocab", "", "there must be config and vocab"},
      {"config.pattern", "", "'pattern' must be given"},
      {"config.pattern", R"("(a")", "regex: byte 2 of '(a'"},
      {"config.default_vocab_size", "30",
       "default_vocab_size above it and at most 16777216, got 30 and 30"},
      {"config.default_vocab_size", "16777217", "at most 16777216, got 30 and 16777217"},
      {"config.default_vocab_size", "400", "vocab must have ranks 0 to 369, got 272 of them"},
      {"config.default_num_special_tokens", "-1", "got -1 and 301"},
      {"config.default_num_special_tokens", "65537", "must be at most 65536"},
      {"config.version", R"("v11")", "special_tokens must be given in a file of version v11"},
      {"special_tokens", R"([{"rank": 30, "token_str": "x"}])", "must be less than 30, got 30"},
      {"special_tokens", R"([{"rank": 0}])", "'token_str' must be given"},
      {"vocab", R"([{"rank": 0, "token_bytes": "?"}])", "a token must be base64, got '?'"},
  };
  EXPECT_EQ(refused("tekken.json", good.dump()), "no error");
  for (const Row& row : table) {
    Json json = good;
    Json* at = &json;
    std::string key = row.path;
    if (const std::size_t dot = key.find('.'); dot != key.npos) {
      at = const_cast<Json*>(json.find(key.substr(0, dot)));
      key = key.substr(dot + 1);
    }
    at->erase(key);
    if (*row.value != 0) at->set(key, Json::parse(row.value, "row"));
    EXPECT_NE(refused("tekken.json", json.dump()).find(row.message), std::string::npos)
        << row.path << " = " << row.value << "\n  " << refused("tekken.json", json.dump());
  }
}

// ---- SentencePiece ----

std::string field(int number, int wire, const std::string& body) {
  return std::string(1, static_cast<char>(number << 3 | wire)) + body;
}
std::string block(int number, const std::string& body) {
  std::string size(1, static_cast<char>(body.size() & 0x7F));
  if (body.size() > 0x7F) {
    size[0] = static_cast<char>(size[0] | 0x80);
    size += static_cast<char>(body.size() >> 7);
  }
  return field(number, 2, size + body);
}
std::string piece(const std::string& text, int type = 1, const std::string& score = {4, '\0'}) {
  return block(1, block(1, text) + field(2, 5, score.size() == 4 ? score : std::string(4, '\0')) +
                      field(3, 0, std::string(1, static_cast<char>(type))));
}
const std::string kUnknown = piece("<unk>", 2);
const std::string kBpe = block(2, field(3, 0, "\x02"));

TEST_F(TokenizerFiles, SaysWhatIsWrongInModels) {
  const std::string nan("\0\0\xC0\x7F", 4);
  const std::pair<std::string, const char*> table[] = {
      {block(1, block(1, "")), "byte 4: a piece must not be empty"},
      {piece("\xff"), "a piece must be UTF-8, got '\\xff'"},
      {piece("a", 7), "the type of a piece must be from 1 to 6, got 7"},
      {piece("a", 6), "a byte must be spelled <0xNN>, got 'a'"},
      {piece("a", 1, nan), "a score must be finite, for 'a'"},
      {kUnknown, "a model must say what kind it is"},
      {kBpe, "a model must have pieces"},
      {piece("a") + kBpe, "a model must have a piece for what is unknown"},
      {kUnknown + piece("a") + piece("a") + kBpe, "each token must be there once, got 'a' twice"},
      {kUnknown + block(2, field(3, 0, "\x04")), "BPE or Unigram (type 2 or 1), got type 4"},
      {kUnknown + kBpe + block(3, block(2, "abc")), "a charsmap must have at least 4 bytes"},
      {kUnknown + block(5, block(2, "abc")), "a denormalizer with a charsmap is not supported"},
      {kUnknown + "\x0A\x7F",
       "a block must end within the message, which has 0 bytes left, got 127"},
      {"\x0A", "a number must end within the message"},
      {kUnknown + std::string("\x20\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", 11),
       "at most 10 bytes"},
      {kUnknown + std::string("\x25\0\0", 3), "a number must end within the message"},
      {kUnknown + "\x23", "a wire type must be 0, 1, 2 or 5, got 3"},
      {kUnknown + field(2, 0, "\x01"), "field 2 must be text or a message, got wire type 0"},
      {kUnknown + std::string("\x02\x00", 2), "a field must have a number above 0"},
      {block(1, field(2, 0, "\x01")), "field 2 must be a float, got wire type 0"},
  };
  for (const auto& [bytes, says] : table) {
    EXPECT_NE(refused("tokenizer.model", bytes).find(says), std::string::npos)
        << says << "\n  " << refused("tokenizer.model", bytes);
  }
  EXPECT_EQ(refused("tokenizer.model", kUnknown + kBpe), "no error");
  const std::string whole =
      bytes_of(*golden().find("sentencepiece")->find("unigram")->find("model"));
  for (std::size_t cut = 0; cut + 1 < whole.size(); cut += 37)
    EXPECT_THROW(read("tokenizer.model", whole.substr(0, cut)), Error) << cut;
}

TEST_F(TokenizerFiles, FoldersWithoutTokenizerJson) {
  const std::string model = bytes_of(*golden().find("sentencepiece")->find("llama")->find("model"));
  const std::string folder = folder_.path.string();
  put(path("tokenizer.model"), model);
  const Tokenizer plain = Tokenizer::from_directory(folder);
  const Ids words = plain.encode("hello world", false);
  Ids around = words;
  around.insert(around.begin(), 1);
  EXPECT_EQ(plain.encode("hello world"), around);
  EXPECT_EQ(plain.bos_token() + plain.eos_token(), "<s></s>");
  EXPECT_EQ(plain.eos_ids(), Ids{2});

  put(path("tokenizer_config.json"),
      R"({"add_bos_token": false, "add_eos_token": true, "eos_token": "<|end|>",
                  "added_tokens_decoder": {"2": {"content": "</s>", "special": true},
                                           "520": {"content": "<|end|>", "special": true},
                                           "521": {"content": "<tool>", "special": false}}})");
  const Tokenizer configured = Tokenizer::from_directory(folder);
  around = words;
  around.push_back(520);
  EXPECT_EQ(configured.encode("hello world"), around);
  EXPECT_EQ(configured.encode("<tool></s>", false), (Ids{521, 2}));
  EXPECT_TRUE(configured.is_special(520));
  EXPECT_FALSE(configured.is_special(521));
  EXPECT_EQ(configured.bos_token(), "<s>");
  EXPECT_EQ(configured.eos_ids(), Ids{520});

  const auto refused_config = [&](const char* config) {
    put(path("tokenizer_config.json"), config);
    return message_of([&] { Tokenizer::from_directory(folder); }, Errc::kIo, folder + "/");
  };
  EXPECT_NE(refused_config(R"({"added_tokens_decoder": {"x": {"content": "y"}}})")
                .find("a key of added_tokens_decoder must be an id, got 'x'"),
            std::string::npos);
  EXPECT_NE(refused_config(R"({"bos_token": "nope"})").find("bos_token of tokenizer_config.json"),
            std::string::npos);
  // Without the config's own list.
  put(path("tokenizer_config.json"), R"({"pad_token": {"content": "<pad>"}})");
  put(path("added_tokens.json"), R"({"<pad>": 520, "<tool>": 521})");
  const Tokenizer older = Tokenizer::from_directory(folder);
  EXPECT_EQ(older.encode("<tool><pad>", false), (Ids{521, 520}));
  EXPECT_EQ(older.pad_id(), 520);
  EXPECT_TRUE(older.is_special(520));
  EXPECT_FALSE(older.is_special(521));
  put(path("added_tokens.json"), R"({"<pad>": -1})");
  EXPECT_NE(refused_config("{}").find("a key of added_tokens_decoder must be an id, got '-1'"),
            std::string::npos);
  std::filesystem::remove(path("added_tokens.json"));
  EXPECT_EQ(Tokenizer::file_in(folder), path("tokenizer.model"));
  // tokenizer.json, where there is one, comes first.
  put(path("tokenizer.json"), "{}");
  EXPECT_NE(refused_config("{}").find("tokenizer.json: byte 2: there must be a model"),
            std::string::npos);
}

TEST_F(TokenizerFiles, FromTexts) {
  const std::string json = golden().find("json")->find("bpe")->dump();
  const Json config = Json::parse(R"({"bos_token": "<s>", "eos_token": "</s>"})", "config");
  EXPECT_EQ(Tokenizer::from_texts(json, config, {}, "x").eos_ids(), Ids{2});
  EXPECT_EQ(Tokenizer::from_texts(json, config, {5, 6}, "x").eos_ids(), (Ids{5, 6}));
  EXPECT_EQ(message_of([&] { Tokenizer::from_texts(json, config, {-1}, "x"); }),
            "x: the end of a text must be an id, got -1");
}

// A word that has no cuts would take minutes if its time were quadratic.
TEST_F(TokenizerFiles, LongTextsInLittleTime) {
  for (const char* name : {"llama", "gemma", "unigram", "unigram_bytes"}) {
    const Tokenizer t = read("tokenizer.model",
                             bytes_of(*golden().find("sentencepiece")->find(name)->find("model")));
    for (const std::string unit : {"e", " ", "the", "日", "▁", "\xff"}) {
      std::string many;
      while (many.size() < (1U << 18U)) many += unit;
      EXPECT_LT(t.encode(many).size(), 3 * many.size() + 3) << name;
    }
  }
}

}  // namespace
}  // namespace mlxtape::formats
