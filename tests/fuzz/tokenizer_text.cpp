#include <map>
#include <optional>

#include "formats/tokenizer_model.h"
#include "formats/utf8.h"
#include "fuzz/tokens.h"
#include "mlxtape/base/files.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::fuzz {

namespace {

using formats::Json;
using formats::TokenId;
using formats::Tokenizer;

// The two of tests/formats/make_tokenizer_golden.py, and the first without what changes a text.
struct Tokenizers {
  Tokenizers() {
    const Json golden =
        Json::parse(read_whole(MLXTAPE_GOLDEN "/tokenizer.json", "fuzz"), "tokenizer.json");
    const Json& both = *golden.find("vocabularies");
    Json without = *both.find("qwen");
    without.set("normalizer", Json());
    lossless.push_back(Tokenizer::from_json(without.dump(), "lossless"));
    stable.push_back(Tokenizer::from_json(both.find("qwen")->dump(), "qwen"));
    stable.push_back(Tokenizer::from_json(both.find("llama")->dump(), "llama"));
  }
  std::vector<Tokenizer> lossless, stable;
};

Json golden_model(const char* file, const char* group, const char* name) {
  const std::string path = std::string(MLXTAPE_GOLDEN "/") + file;
  Json json = *Json::parse(read_whole(path, "fuzz"), file).find(group)->find(name);
  json.set("added_tokens", Json::Array{});
  json.set("post_processor", Json());
  return json;
}

// A text comes back however its bytes are put together. So the pairs that are merged are found once more here: by a
// vocabulary for a text that is all one word, and by the definition, the pair of the lowest rank first.
class OneWord {
 public:
  // bytes: the vocabulary spells them in letters; else it has characters, and <0xNN> for the bytes of others.
  OneWord(const Json& json, bool bytes) : bytes_(bytes) {
    tokenizer_ = Tokenizer::from_json(json.dump(), "one word");
    for (const Json& merge : json.find("model")->find("merges")->array()) {
      const bool is_pair = merge.is_array();
      const std::string both = is_pair ? "" : merge.string();
      const std::size_t cut = both.find(' ');
      const std::string left = is_pair ? merge.array()[0].string() : both.substr(0, cut);
      const std::string right = is_pair ? merge.array()[1].string() : both.substr(cut + 1);
      const auto rank = static_cast<int>(merges_.size());
      merges_[{id(left), id(right)}] = {rank, id(left + right)};
    }
  }
  static OneWord of_bytes() {
    Json json = golden_model("tokenizer.json", "vocabularies", "qwen");
    json.set("normalizer", Json());
    json.set("pre_tokenizer", Json(Json::Object{{"type", Json("ByteLevel")},
                                                {"add_prefix_space", Json(false)},
                                                {"use_regex", Json(false)}}));
    return {json, true};
  }
  // Where it is cut for speed, nothing may change.
  static OneWord of_characters() {
    Json json = golden_model("tokenizer_files.json", "json", "bpe");
    json.set("normalizer", Json());
    return {json, false};
  }

  void check_merges(std::string_view word) const {
    std::vector<TokenId> ids = symbols(word);
    std::vector<const Merge*> pairs;  // of an id and the next
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) pairs.push_back(find(ids, i));
    while (true) {
      std::size_t best = pairs.size();
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        if (pairs[i] != nullptr && (best == pairs.size() || pairs[i]->rank < pairs[best]->rank))
          best = i;
      }
      if (best == pairs.size()) break;
      ids[best] = pairs[best]->id;
      ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
      pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(best));
      for (const std::size_t i : {best, best - 1}) {
        if (i < pairs.size()) pairs[i] = find(ids, i);
      }
    }
    check(tokenizer_->encode(word) == ids, "the pair of the lowest rank is merged first");
  }

 private:
  struct Merge {
    int rank;
    TokenId id;
  };
  TokenId id(const std::string& token) const { return *tokenizer_->id_of(token); }
  std::vector<TokenId> symbols(std::string_view word) const {
    std::vector<TokenId> out;
    for (std::size_t at = 0; at < word.size();) {
      const std::size_t begin = at;
      at = bytes_ ? at + 1 : formats::forward(word, at, 1);
      const std::string symbol(word.substr(begin, at - begin));
      if (bytes_) {
        out.push_back(id(formats::letters_of(symbol)));
      } else if (const auto known = tokenizer_->id_of(symbol)) {
        out.push_back(*known);
      } else {
        for (const char c : symbol)
          out.push_back(id(formats::byte_token(static_cast<unsigned char>(c))));
      }
    }
    return out;
  }
  const Merge* find(const std::vector<TokenId>& ids, std::size_t i) const {
    const auto found = merges_.find({ids[i], ids[i + 1]});
    return found == merges_.end() ? nullptr : &found->second;
  }
  std::optional<Tokenizer> tokenizer_;
  std::map<std::pair<TokenId, TokenId>, Merge> merges_;
  bool bytes_;
};

}  // namespace

bool tokenizer_text(std::string_view input) {
  static const Tokenizers tokenizers;
  const std::string text = formats::replace_invalid_utf8(input);
  for (const Tokenizer& t : tokenizers.lossless) {
    check(check_ids(t, t.encode(input)) == text, "a text comes back");
  }
  // Normal forms and spaces that belong to tokens change a text once.
  for (const Tokenizer& t : tokenizers.stable) {
    const std::string once = check_ids(t, t.encode(input, false));
    check(t.decode(t.encode(once)) == t.decode(t.encode("")) + once,
          "a text that came back comes back again, behind what begins every text");
  }
  static const OneWord one_word = OneWord::of_bytes(), one_text = OneWord::of_characters();
  constexpr std::size_t kMostBytes = 128;  // the time is quadratic; above 48 a heap is used
  const std::string word = formats::replace_invalid_utf8(text.substr(0, kMostBytes));
  one_word.check_merges(word);
  std::string spelled;  // in the characters that the vocabulary has words of
  for (const char c : word) c == ' ' ? spelled += "\xE2\x96\x81" : spelled += c;
  one_text.check_merges(spelled);
  return true;
}

}  // namespace mlxtape::fuzz
