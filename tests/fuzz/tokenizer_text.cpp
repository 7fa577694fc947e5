#include <map>
#include <optional>

#include "formats/tokenizer_bpe.h"
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

// A text comes back however its bytes are put together. So the pairs that are merged are found once more here: by the first
// one's vocabulary for a text that is all one word, and by the definition, the pair of the lowest rank first.
class OneWord {
 public:
  OneWord() {
    Json json = *Json::parse(read_whole(MLXTAPE_GOLDEN "/tokenizer.json", "fuzz"), "tokenizer.json")
                     .find("vocabularies")
                     ->find("qwen");
    for (const char* key : {"normalizer", "post_processor"}) json.set(key, Json());
    json.set("added_tokens", Json::Array{});
    json.set("pre_tokenizer", Json(Json::Object{{"type", Json("ByteLevel")},
                                                {"add_prefix_space", Json(false)},
                                                {"use_regex", Json(false)}}));
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
    for (int b = 0; b < 256; ++b) {
      const char byte = static_cast<char>(b);
      bytes_.push_back(id(formats::letters_of({&byte, 1})));
    }
  }

  void check_merges(std::string_view word) const {
    std::vector<TokenId> ids;
    for (const char c : word) ids.push_back(bytes_[static_cast<unsigned char>(c)]);
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
  const Merge* find(const std::vector<TokenId>& ids, std::size_t i) const {
    const auto found = merges_.find({ids[i], ids[i + 1]});
    return found == merges_.end() ? nullptr : &found->second;
  }
  std::optional<Tokenizer> tokenizer_;
  std::map<std::pair<TokenId, TokenId>, Merge> merges_;
  std::vector<TokenId> bytes_;
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
  static const OneWord one_word;
  constexpr std::size_t kMostBytes = 128;  // the time is quadratic; above 48 a heap is used
  one_word.check_merges(formats::replace_invalid_utf8(text.substr(0, kMostBytes)));
  return true;
}

}  // namespace mlxtape::fuzz
