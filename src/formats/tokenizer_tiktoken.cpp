// Lists of byte sequences by rank: tiktoken's files, and Mistral's tekken.json.
#include <algorithm>
#include <utility>

#include "formats/tokenizer_base64.h"
#include "formats/tokenizer_bpe.h"
#include "formats/tokenizer_json.h"
#include "formats/tokenizer_known.h"
#include "formats/tokenizer_parts.h"
#include "formats/tokenizer_scores.h"

namespace mlxtape::formats {
namespace {

PreTokenizer cut_by(const std::string& pattern, const std::string& source) {
  try {
    PreTokenizer out;
    out.steps.emplace_back(
        Split{"", Regex(pattern, Regex::Flavor::kRust), Split::Behavior::kIsolated, false});
    out.byte_level = true;
    return out;
  } catch (const Error& e) {
    refuse(source, e.what());
  }
}

// The vocabulary's tokens, in letters, and the merges that lead to them. A word that is a token is not taken apart.
std::unique_ptr<Model> make_model(Vocabulary& vocabulary) {
  vocabulary.end_model();
  auto bpe = std::make_unique<Bpe>(vocabulary);
  bpe->options.ignore_merges = true;
  const std::vector<std::uint8_t> joins(static_cast<std::size_t>(vocabulary.size()), 1);
  const std::vector<ScoredMerge> merges = merges_by_rank(vocabulary, joins);
  bpe->merges.reserve(merges.size());
  for (const ScoredMerge& m : merges) bpe->merges.add(m.left, m.right, m.merged, m.rank);
  return bpe;
}

// Each byte must be a token, or there would be texts without ids.
void check_bytes(const Vocabulary& vocabulary, const std::string& source) {
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    if (vocabulary.find(letters_of({&byte, 1})) < 0)
      refuse(source, "there must be a token for each byte, got none for " + std::to_string(b));
  }
}

void add_ranked(Vocabulary& vocabulary, std::string_view base64, std::int64_t id,
                const std::string& where) {
  std::string bytes;
  if (!append_base64(bytes, base64) || bytes.empty())
    refuse(where, "a token must be base64, got '" + shown(base64) + "'");
  const std::string problem = vocabulary.add(letters_of(bytes), id);
  if (!problem.empty()) refuse(where, problem);
}

std::vector<AddedToken> special_tokens(const std::vector<KnownToken>& known) {
  std::vector<AddedToken> out;
  for (const KnownToken& token : known) {
    AddedToken& added = out.emplace_back();
    added.id = token.id, added.content = token.text, added.special = true;
  }
  return out;
}

}  // namespace

// "base64 rank" in each line. The rest is known by how many there are; a config may have other special tokens.
void Tokenizer::Parts::read_tiktoken(std::string_view text, const Json& config,
                                     const std::string& source) {
  vocabulary.reserve(text.size() / 16, text.size());
  std::int64_t count = 0, line = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view row = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++line;
    if (row.ends_with('\r')) row.remove_suffix(1);
    if (row.empty()) continue;
    const std::string where = source + ": line " + std::to_string(line);
    const std::size_t space = row.find(' ');
    const std::string_view digits = space == row.npos ? "" : row.substr(space + 1);
    if (digits.empty() || digits.size() > 9 ||
        digits.find_first_not_of("0123456789") != digits.npos)
      refuse(where, "there must be a token and its rank, got '" + shown(row) + "'");
    std::int64_t rank = 0;
    for (const char c : digits) rank = rank * 10 + (c - '0');
    add_ranked(vocabulary, row.substr(0, space), rank, where);
    ++count;
  }
  check_bytes(vocabulary, source);
  const KnownRanks* known = known_ranks(count);
  if (known == nullptr)
    refuse(source, "a list of " + std::to_string(count) +
                       " tokens is not known, and its pattern and special tokens are not in the "
                       "file; known are " +
                       all_known_ranks());
  model = make_model(vocabulary);
  pre_tokenizer = cut_by(known->pattern, source);
  if (known->composes) normalizers = {UnicodeForm{true, false}};
  decoder = {DecodeLetters{}};
  const std::vector<AddedToken> configured = added_in_config(config, source);
  add_tokens(configured.empty() ? special_tokens(known->special()) : configured, source);
  const auto role = [&](const char* token) -> std::optional<TokenId> {
    const TokenId id = *token != 0 ? vocabulary.find(token) : -1;
    return id < 0 ? std::nullopt : std::optional(id);
  };
  bos = role(known->bos), eos = role(known->eos);
  if (eos) eos_ids = {*eos};
  put_around(config, true, source);
  prepare();
}

// ---- tekken.json ----

namespace {

// Each is made, named or not.
constexpr std::int64_t kMostSpecial = 1 << 16;

struct Tekken {
  std::string pattern, version;
  std::int64_t vocabulary = 0,
               special = 0;  // how many tokens there are in all, and before the words
  std::vector<KnownToken> named;
  bool has_config = false, has_words = false;
};

void read_tekken_config(const Json& config, Tekken& out, const std::string& source) {
  out.pattern = member(config, "pattern", source).string();
  out.vocabulary = member(config, "default_vocab_size", source).integer();
  out.special = member(config, "default_num_special_tokens", source).integer();
  out.version = member(config, "version", source).string();
  if (out.special < 0 || out.special > kMostSpecial || out.vocabulary <= out.special ||
      out.vocabulary > Vocabulary::kMaxIds)
    refuse(source, "default_num_special_tokens must be at most " + std::to_string(kMostSpecial) +
                       ", and default_vocab_size above it and at most " +
                       std::to_string(Vocabulary::kMaxIds) + ", got " +
                       std::to_string(out.special) + " and " + std::to_string(out.vocabulary));
  out.has_config = true;
}

void read_tekken_special(const Json& list, Tekken& out, const std::string& source) {
  for (const Json& token : list.array()) {
    const std::int64_t rank = member(token, "rank", source).integer();
    out.named.push_back({rank, member(token, "token_str", source).string()});
  }
}

// [{"rank": 0, "token_bytes": "AA=="}, ...]: more of them than are used.
void read_tekken_words(JsonReader& reader, const Tekken& tekken, Vocabulary& vocabulary,
                       const std::string& source) {
  const std::int64_t used = tekken.vocabulary - tekken.special;
  std::string key, base64;
  std::int64_t count = 0;
  for (reader.begin_array(); reader.next_element();) {
    std::int64_t rank = -1;
    base64.clear();
    for (reader.begin_object(); reader.next_key(key);) {
      if (key == "rank") {
        rank = reader.integer();
      } else if (key == "token_bytes") {
        reader.read_string(base64);
      } else {
        reader.skip();
      }
    }
    if (rank < 0 || rank >= used) continue;
    add_ranked(vocabulary, base64, tekken.special + rank, source);
    ++count;
  }
  if (count != used)
    refuse(source, "vocab must have ranks 0 to " + std::to_string(used - 1) + ", got " +
                       std::to_string(count) + " of them");
}

}  // namespace

void Tokenizer::Parts::read_tekken(std::string_view json, const std::string& source) {
  Tekken tekken;
  JsonReader reader(json, source);
  std::string key;
  std::optional<JsonReader> words;
  for (reader.begin_object(); reader.next_key(key);) {
    if (key == "config") {
      read_tekken_config(Json::read(reader), tekken, source);
    } else if (key == "special_tokens") {
      const Json list = Json::read(reader);
      if (!list.is_null()) read_tekken_special(list, tekken, source);
    } else if (key == "vocab") {
      words = reader;
      reader.skip();
    } else {
      reader.skip();
    }
  }
  reader.end();
  if (!tekken.has_config || !words) reader.fail("there must be config and vocab");
  read_tekken_words(*words, tekken, vocabulary, source);
  check_bytes(vocabulary, source);
  model = make_model(vocabulary);
  pre_tokenizer = cut_by(tekken.pattern, source);
  decoder = {DecodeLetters{}};
  if (tekken.named.empty()) {
    if (!tekken_has_fixed_tokens(tekken.version))
      refuse(source, "special_tokens must be given in a file of version " + shown(tekken.version));
    tekken.named = tekken_fixed_tokens();
  }
  for (auto id = static_cast<std::int64_t>(tekken.named.size()); id < tekken.special; ++id)
    tekken.named.push_back({id, "<SPECIAL_" + std::to_string(id) + ">"});
  for (const KnownToken& token : tekken.named) {
    if (token.id < 0 || token.id >= tekken.special)
      refuse(source, "a special token's rank must be less than " + std::to_string(tekken.special) +
                         ", got " + std::to_string(token.id));
  }
  add_tokens(special_tokens(tekken.named), source);
  const auto role = [&](const char* token) -> std::optional<TokenId> {
    const TokenId id = vocabulary.find(token);
    return id < 0 ? std::nullopt : std::optional(id);
  };
  bos = role("<s>"), eos = role("</s>"), pad = role("<pad>");
  if (eos) eos_ids = {*eos};
  put_around(Json(), true, source);
  prepare();
}

}  // namespace mlxtape::formats
