// tokenizer.model: SentencePiece's model, a protocol buffer.
#include <array>
#include <cmath>

#include "formats/protobuf.h"
#include "formats/tokenizer_bpe.h"
#include "formats/tokenizer_json.h"
#include "formats/tokenizer_parts.h"
#include "formats/tokenizer_scores.h"
#include "formats/tokenizer_unigram.h"
#include "formats/utf8.h"

namespace mlxtape::formats {
namespace {

enum Type : std::uint8_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };
enum Kind : std::uint8_t { kUnigram = 1, kBpe = 2 };

struct Pieces {
  std::vector<std::string> texts;
  std::vector<float> scores;
  std::vector<Type> types;
};

struct Spec {
  Pieces pieces;
  bool has_trainer = false;
  std::int64_t kind = kUnigram, bos = 1, eos = 2, pad = -1;
  bool byte_fallback = false, whitespace_as_suffix = false;
  std::string_view charsmap, normalizer;
  bool add_dummy_prefix = true, remove_extra_whitespaces = true, escape_whitespaces = true;
};

void read_piece(ProtobufReader reader, Pieces& out) {
  std::string text;
  float score = 0;
  std::int64_t type = kNormal;
  while (reader.next()) {
    if (reader.field() == 1) text = reader.text();
    if (reader.field() == 2) score = reader.real();
    if (reader.field() == 3) type = reader.integer();
  }
  if (text.empty()) reader.fail("a piece must not be empty");
  if (!is_valid_utf8(text)) reader.fail("a piece must be UTF-8, got '" + shown(text) + "'");
  if (!std::isfinite(score)) reader.fail("a score must be finite, for '" + shown(text) + "'");
  if (type < kNormal || type > kByte)
    reader.fail("the type of a piece must be from 1 to 6, got " + std::to_string(type));
  if (type == kByte && byte_of(text) < 0)
    reader.fail("a byte must be spelled <0xNN>, got '" + shown(text) + "'");
  out.texts.push_back(std::move(text));
  out.scores.push_back(score);
  out.types.push_back(static_cast<Type>(type));
}

void read_trainer(ProtobufReader reader, Spec& out) {
  out.has_trainer = true;
  while (reader.next()) {
    switch (reader.field()) {
      case 3: out.kind = reader.integer(); break;
      case 24: out.whitespace_as_suffix = reader.boolean(); break;
      case 35: out.byte_fallback = reader.boolean(); break;
      case 41: out.bos = reader.integer(); break;
      case 42: out.eos = reader.integer(); break;
      case 43: out.pad = reader.integer(); break;
      default: break;
    }
  }
  if (out.kind != kUnigram && out.kind != kBpe)
    reader.fail("the model must be BPE or Unigram (type 2 or 1), got type " +
                std::to_string(out.kind));
}

void read_normalizer(ProtobufReader reader, Spec& out) {
  while (reader.next()) {
    switch (reader.field()) {
      case 1: out.normalizer = reader.text(); break;
      case 2: out.charsmap = reader.text(); break;
      case 3: out.add_dummy_prefix = reader.boolean(); break;
      case 4: out.remove_extra_whitespaces = reader.boolean(); break;
      case 5: out.escape_whitespaces = reader.boolean(); break;
      default: break;
    }
  }
}

// Text on the way back is changed by a table of its own, which few models have.
void check_denormalizer(ProtobufReader reader) {
  while (reader.next()) {
    if (reader.field() == 2 && !reader.text().empty())
      reader.fail("a denormalizer with a charsmap is not supported");
  }
}

Spec read_spec(std::string_view bytes, const std::string& source) {
  Spec spec;
  ProtobufReader reader(bytes, source);
  while (reader.next()) {
    if (reader.field() == 1) read_piece(reader.message(), spec.pieces);
    if (reader.field() == 2) read_trainer(reader.message(), spec);
    if (reader.field() == 3) read_normalizer(reader.message(), spec);
    if (reader.field() == 5) check_denormalizer(reader.message());
  }
  if (spec.pieces.texts.empty()) reader.fail("a model must have pieces");
  // Without it the file is cut short, or something else.
  if (!spec.has_trainer) reader.fail("a model must say what kind it is (a trainer_spec)");
  return spec;
}

std::unique_ptr<Model> make_bpe(const Spec& spec, TokenId unknown, const Vocabulary& vocabulary) {
  auto bpe = std::make_unique<Bpe>(vocabulary);
  bpe->options = {false, spec.byte_fallback, true, unknown, ""};
  std::vector<std::uint8_t> joins;
  for (const Type type : spec.pieces.types)
    joins.push_back(type == kNormal || type == kUserDefined);
  const std::vector<ScoredMerge> merges = merges_by_score(vocabulary, spec.pieces.scores, joins);
  bpe->merges.reserve(merges.size());
  for (const ScoredMerge& m : merges) bpe->merges.add(m.left, m.right, m.merged, m.rank);
  return bpe;
}

std::unique_ptr<Model> make_unigram(const Spec& spec, TokenId unknown,
                                    const Vocabulary& vocabulary) {
  auto unigram = std::make_unique<Unigram>(vocabulary);
  unigram->options = {unknown, spec.byte_fallback, true};
  for (std::size_t i = 0; i < spec.pieces.types.size(); ++i) {
    const Type type = spec.pieces.types[i];
    const auto use = type == kNormal        ? Unigram::Use::kPiece
                     : type == kUserDefined ? Unigram::Use::kAlways
                                            : Unigram::Use::kNever;
    unigram->pieces.push_back({spec.pieces.scores[i], use, type == kNormal});
  }
  return unigram;
}

std::vector<DecodeStep> make_decoder(const Spec& spec) {
  std::vector<DecodeStep> out;
  if (spec.escape_whitespaces)
    out.emplace_back(DecodeReplace{"\xE2\x96\x81", Regex::literal("\xE2\x96\x81"), " "});
  if (spec.byte_fallback) out.emplace_back(DecodeByteTokens{true});
  out.emplace_back(DecodeFuse{});
  // The space before the text goes; all of them, where there are never two.
  constexpr std::size_t kAll = std::size_t{1} << 20;
  if (spec.add_dummy_prefix || spec.remove_extra_whitespaces)
    out.emplace_back(DecodeStrip{" ", spec.remove_extra_whitespaces ? kAll : 1, 0});
  return out;
}

}  // namespace

void Tokenizer::Parts::read_sentencepiece(std::string_view bytes, const Json& config,
                                          const std::string& source) {
  const Spec spec = read_spec(bytes, source);
  TokenId unknown = -1;
  std::vector<AddedToken> tokens;
  auto words = std::make_shared<
      AddedMatcher>();  // they are found after normalization, which passes over them
  for (std::size_t i = 0; i < spec.pieces.texts.size(); ++i) {
    const std::string& text = spec.pieces.texts[i];
    const Type type = spec.pieces.types[i];
    const std::string problem = vocabulary.add(text, static_cast<std::int64_t>(i));
    if (!problem.empty()) refuse(source, problem);
    if (type == kUnknown) unknown = static_cast<TokenId>(i);
    AddedToken added;
    added.id = static_cast<std::int64_t>(i), added.content = text, added.special = true;
    if (type == kUnknown || type == kControl) tokens.push_back(added);
    if (type != kUserDefined) continue;
    words->add(added, text);
    if (spec.kind == kBpe)
      normalized.add(added, text);  // Unigram weighs them higher than all others
  }
  words->prepare();
  if (unknown < 0) refuse(source, "a model must have a piece for what is unknown");
  vocabulary.end_model();
  model = spec.kind == kBpe ? make_bpe(spec, unknown, vocabulary)
                            : make_unigram(spec, unknown, vocabulary);
  SentencePieceForm form{nullptr,
                         words,
                         spec.add_dummy_prefix,
                         spec.remove_extra_whitespaces,
                         spec.escape_whitespaces,
                         spec.whitespace_as_suffix};
  if (!spec.charsmap.empty()) form.map = std::make_shared<const Charsmap>(spec.charsmap, source);
  normalizers = {form};
  decoder = make_decoder(spec);
  normalizes_bytes = true;
  add_tokens(tokens, source);
  add_tokens(added_in_config(config, source), source);
  const auto role = [&](std::int64_t id) -> std::optional<TokenId> {
    const bool there = id >= 0 && id < static_cast<std::int64_t>(spec.pieces.types.size());
    if (!there || spec.pieces.types[static_cast<std::size_t>(id)] != kControl) return std::nullopt;
    return static_cast<TokenId>(id);
  };
  bos = role(spec.bos), eos = role(spec.eos), pad = role(spec.pad);
  if (eos) eos_ids = {*eos};
  put_around(config, spec.kind == kBpe, source);
  prepare();
}

}  // namespace mlxtape::formats
