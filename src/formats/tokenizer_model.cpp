#include "formats/tokenizer_model.h"

#include <array>
#include <cmath>
#include <optional>

#include "formats/tokenizer_bpe.h"
#include "formats/tokenizer_unigram.h"
#include "formats/utf8.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {
namespace {

struct Letters {
  std::array<char32_t, 256> of_byte{};
  std::array<int, 0x200> of_letter{};  // -1: none
  Letters() {
    of_letter.fill(-1);
    char32_t next = 0x100;
    for (unsigned b = 0; b < 256; ++b) {
      const bool printed = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      of_byte[b] = printed ? b : next++;
      of_letter[of_byte[b]] = static_cast<int>(b);
    }
  }
};
const Letters& letters() {
  static const Letters table;
  return table;
}

void add(Vocabulary& vocabulary, std::string_view token, std::int64_t id,
         const JsonReader& reader) {
  const std::string problem = vocabulary.add(token, id);
  if (!problem.empty()) reader.fail(problem);
}

// What the vocabulary has shown it to be, where the type comes later.
void check_type(JsonReader& reader, const char* type) {
  const std::string got = reader.string();
  if (got == type) return;
  const bool known = got == "BPE" || got == "Unigram";
  reader.fail(std::string("the model must be of type ") + (known ? type : "BPE or Unigram") +
              ", got " + shown(got));
}

// ---- BPE ----

// "a b" or ["a", "b"]: both without what is between them, and where the first ends.
std::size_t read_merge(JsonReader& reader, std::string& both, std::string& right) {
  if (reader.peek() != JsonReader::Kind::kArray) {
    reader.read_string(both);
    const std::size_t cut = both.find(' ');
    if (cut == both.npos || both.find(' ', cut + 1) != both.npos)
      reader.fail("a merge must be two tokens with a space between, got '" + shown(both) + "'");
    both.erase(cut, 1);
    return cut;
  }
  reader.begin_array();
  if (!reader.next_element()) reader.fail("a merge must be two tokens, got none");
  reader.read_string(both);
  const std::size_t cut = both.size();
  if (!reader.next_element()) reader.fail("a merge must be two tokens, got one");
  reader.read_string(right);
  if (reader.next_element()) reader.fail("a merge must be two tokens, got more");
  both += right;
  return cut;
}

void read_merges(JsonReader& reader, const Vocabulary& vocabulary, Merges& merges) {
  std::string both, right;
  std::uint32_t rank = 0;
  merges.reserve(vocabulary.count());
  for (reader.begin_array(); reader.next_element(); ++rank) {
    const std::size_t cut = read_merge(reader, both, right);
    const std::string_view view = both;
    const TokenId a = vocabulary.find(view.substr(0, cut)), b = vocabulary.find(view.substr(cut)),
                  c = vocabulary.find(view);
    if (a < 0 || b < 0 || c < 0)
      reader.fail("a merge must be of tokens and give a token, got '" + shown(view.substr(0, cut)) +
                  "' and '" + shown(view.substr(cut)) + "'");
    merges.add(a, b, c, rank);
  }
}

// Of what changes the ids; false: the key is none of these.
bool read_bpe_option(const std::string& key, JsonReader& reader, BpeOptions& options,
                     std::string& unknown) {
  if (key == "ignore_merges") {
    options.ignore_merges = reader.boolean();
  } else if (key == "byte_fallback") {
    options.byte_fallback = reader.boolean();
  } else if (key == "fuse_unk") {
    options.fuse_unknown = reader.boolean();
  } else if (key == "unk_token") {
    const Json value = Json::read(reader);
    if (!value.is_null()) unknown = value.string();
  } else if (key == "dropout") {
    const Json value = Json::read(reader);
    if (!value.is_null() && value.number() != 0)
      reader.fail("dropout must be null or 0, got " + shown(value.dump()));
  } else if (key == "continuing_subword_prefix" || key == "end_of_word_suffix") {
    const Json value = Json::read(reader);
    if (!value.is_null() && !value.string().empty())
      reader.fail(key + " is not supported, got " + shown(value.dump()));
  } else {
    return false;
  }
  return true;
}

std::unique_ptr<Model> read_bpe(JsonReader& reader, Vocabulary& vocabulary) {
  auto bpe = std::make_unique<Bpe>(vocabulary);
  std::string key, token, unknown;
  bool has_vocabulary = false, has_merges = false;
  std::optional<JsonReader> merges;  // where they begin, if they come before the tokens
  for (reader.begin_object(); reader.next_key(key);) {
    if (key == "type") {
      check_type(reader, "BPE");
    } else if (key == "vocab") {
      for (reader.begin_object(); reader.next_key(token);)
        add(vocabulary, token, reader.integer(), reader);
      has_vocabulary = true;
    } else if (key == "merges") {
      has_merges = true;
      if (has_vocabulary) {
        read_merges(reader, vocabulary, bpe->merges);
      } else {
        merges = reader;
        reader.skip();
      }
    } else if (!read_bpe_option(key, reader, bpe->options, unknown)) {
      reader.skip();
    }
  }
  if (!has_vocabulary || !has_merges) reader.fail("the model must have vocab and merges");
  if (merges) read_merges(*merges, vocabulary, bpe->merges);
  if (!unknown.empty()) {
    bpe->options.unknown = vocabulary.find(unknown);
    if (bpe->options.unknown < 0) bpe->options.missing = unknown;  // most models never need it
  }
  return bpe;
}

// ---- Unigram ----

// [["token", score], ...]: the place is the id.
void read_scores(JsonReader& reader, Vocabulary& vocabulary, std::vector<Unigram::Piece>& pieces) {
  std::string token;
  for (reader.begin_array(); reader.next_element();) {
    reader.begin_array();
    if (!reader.next_element()) reader.fail("a token must have a score, got neither");
    reader.read_string(token);
    if (!reader.next_element()) reader.fail("a token must have a score, got none");
    const double score = reader.number();
    if (reader.next_element()) reader.fail("a token must have a score, got more");
    add(vocabulary, token, static_cast<std::int64_t>(pieces.size()), reader);
    pieces.push_back({score, Unigram::Use::kPiece, true});
  }
}

std::unique_ptr<Model> read_unigram(JsonReader& reader, Vocabulary& vocabulary) {
  auto unigram = std::make_unique<Unigram>(vocabulary);
  std::string key, token;
  std::int64_t unknown = -1;
  bool has_vocabulary = false;
  for (reader.begin_object(); reader.next_key(key);) {
    if (key == "type") {
      check_type(reader, "Unigram");
    } else if (key == "vocab") {
      read_scores(reader, vocabulary, unigram->pieces);
      has_vocabulary = true;
    } else if (key == "unk_id") {
      const Json value = Json::read(reader);
      if (!value.is_null()) unknown = value.integer();
    } else if (key == "byte_fallback") {
      unigram->options.byte_fallback = reader.boolean();
    } else {
      reader.skip();
    }
  }
  if (!has_vocabulary) reader.fail("the model must have a vocab");
  if (unknown >= vocabulary.size())
    reader.fail("unk_id must be that of a token, got " + std::to_string(unknown));
  if (unknown >= 0) unigram->options.unknown = static_cast<TokenId>(unknown);
  return unigram;
}

}  // namespace

std::unique_ptr<Model> read_model(JsonReader& reader, Vocabulary& vocabulary) {
  JsonReader ahead = reader;
  std::string key, type;
  for (ahead.begin_object(); type.empty() && ahead.next_key(key);) {
    if (key == "type") {
      ahead.read_string(type);
    } else if (key == "vocab") {  // files of the first versions have no type
      type = ahead.peek() == JsonReader::Kind::kArray ? "Unigram" : "BPE";
    } else {
      ahead.skip();
    }
  }
  if (type != "" && type != "BPE" && type != "Unigram")
    reader.fail("the model must be of type BPE or Unigram, got " + shown(type));
  auto model = type == "Unigram" ? read_unigram(reader, vocabulary) : read_bpe(reader, vocabulary);
  vocabulary.end_model();
  return model;
}

std::string letters_of(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) append_utf8(out, letters().of_byte[static_cast<unsigned char>(c)]);
  return out;
}

void append_bytes(std::string& out, std::string_view token) {
  const std::size_t before = out.size();
  for (std::size_t at = 0; at < token.size();) {
    const char32_t c = next_code_point(token, at);
    const int b = c < 0x200 ? letters().of_letter[c] : -1;
    if (b < 0) {
      out.resize(before);
      out += token;
      return;
    }
    out.push_back(static_cast<char>(b));
  }
}

std::string byte_token(unsigned char byte) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  return {'<', '0', 'x', kDigits[byte >> 4], kDigits[byte & 15], '>'};
}

int byte_of(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const char lower = static_cast<char>(c | 0x20);
    if (c >= '0' && c <= '9') {
      value = value * 16 + (c - '0');
    } else if (lower >= 'a' && lower <= 'f') {
      value = value * 16 + (lower - 'a' + 10);
    } else {
      return -1;
    }
  }
  return value;
}

}  // namespace mlxtape::formats
