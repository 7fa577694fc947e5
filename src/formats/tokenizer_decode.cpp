#include "formats/tokenizer_decode.h"

#include <utility>

#include "formats/tokenizer_json.h"
#include "formats/tokenizer_model.h"
#include "formats/utf8.h"

namespace mlxtape::formats {
namespace {

constexpr std::string_view kReplacement = "\uFFFD";

// Files can ask for more than there is memory; real ones make a token shorter.
void check_length(const std::string& out, std::size_t before) {
  if (out.size() > 64 * before + 65536)
    throw Error(Errc::kArgument,
                "tokenizer: the decoder may make a token at most 64 times as long, and got to " +
                    std::to_string(out.size()) + " bytes");
}

std::string replaced(std::string_view text, std::string_view part, std::string_view with) {
  std::string out;
  std::size_t at = 0;
  for (std::size_t found; (found = text.find(part, at)) != text.npos; at = found + part.size()) {
    out.append(text.substr(at, found - at)).append(with);
    check_length(out, text.size());
  }
  return out.append(text.substr(at));
}

std::string replaced(const DecodeReplace& step, const std::string& text) {
  if (!step.text.empty()) return replaced(text, step.text, step.content);
  if (!is_valid_utf8(text)) return text;  // tokens are text, unless a file has others
  std::vector<Regex::Match> matches;
  step.pattern.find_all(text, matches);
  std::string out;
  std::size_t at = 0;
  for (const auto& [begin, end] : matches) {
    out.append(text, at, begin - at).append(step.content);
    at = end;
    check_length(out, text.size());
  }
  return out.append(text, at);
}

std::string stripped(const DecodeStrip& step, std::string_view text) {
  for (std::size_t i = 0; i < step.start && text.starts_with(step.content); ++i)
    text.remove_prefix(step.content.size());
  for (std::size_t i = 0; i < step.stop && text.ends_with(step.content); ++i)
    text.remove_suffix(step.content.size());
  return std::string(text);
}

std::size_t read_count(const Json& step, const char* key, const std::string& who) {
  const std::int64_t count = member(step, key, who).integer();
  if (count < 0 || count > (1 << 20))
    refuse(who,
           std::string("'") + key + "' must be from 0 to 1048576, got " + std::to_string(count));
  return static_cast<std::size_t>(count);
}

DecodeStep read_step(const std::string& type, const Json& step, const std::string& who) {
  if (type == "ByteLevel") return DecodeLetters{};
  if (type == "ByteFallback") return DecodeByteTokens{false};
  if (type == "Fuse") return DecodeFuse{};
  if (type == "Replace") {
    const Pattern pattern = read_pattern(step, who);
    return DecodeReplace{pattern.text, pattern.compiled(who),
                         member(step, "content", who).string()};
  }
  if (type == "Strip") {
    const std::string& content = member(step, "content", who).string();
    if (count_code_points(content) != 1)
      refuse(who, "the content of Strip must be one character, got '" + shown(content) + "'");
    return DecodeStrip{content, read_count(step, "start", who), read_count(step, "stop", who)};
  }
  if (type == "Metaspace") {
    const Json* scheme = step.find("prepend_scheme");
    const bool never =
        scheme != nullptr ? scheme->string() == "never" : !flag(step, "add_prefix_space", true);
    return DecodeSpaces{member(step, "replacement", who).string(), !never};
  }
  refuse(who, "the decoder '" + shown(type) + "' is not supported");
}

}  // namespace

std::vector<DecodeStep> read_decoder(const Json& json, const std::string& who) {
  std::vector<DecodeStep> out;
  if (json.is_null()) return {DecodeApart{}};
  for (const Json* step : steps_of(json, "decoders", who))
    out.push_back(read_step(member(*step, "type", who).string(), *step, who));
  return out;
}

Decoding::Decoding(const std::vector<DecodeStep>& steps) : steps_(&steps) {
  while (fuse_ < steps.size() && !std::holds_alternative<DecodeFuse>(steps[fuse_]) &&
         !std::holds_alternative<DecodeLetters>(steps[fuse_]))
    ++fuse_;
  by_strip_ = fuse_ + 1 >= steps.size() ||
              (fuse_ + 2 == steps.size() && std::holds_alternative<DecodeStrip>(steps[fuse_ + 1]));
}

// One token through the steps from `step` on, up to the one that fuses.
void Decoding::pass(std::size_t step, std::string token) {
  const std::size_t before = token.size();
  for (; step < fuse_; ++step) {
    check_length(token, before);
    const DecodeStep& s = (*steps_)[step];
    if (const auto* replace = std::get_if<DecodeReplace>(&s)) {
      token = replaced(*replace, token);
    } else if (const auto* strip = std::get_if<DecodeStrip>(&s)) {
      token = stripped(*strip, token);
    } else if (const auto* spaces = std::get_if<DecodeSpaces>(&s)) {
      const bool drops = spaces->drops_first && !std::exchange(spaces_begun_, true);
      token = replaced(token, spaces->replacement, drops ? "" : " ");
    } else if (std::holds_alternative<DecodeByteTokens>(s)) {
      if (const int byte = byte_of(token); byte >= 0) {
        run_.push_back(static_cast<char>(byte));
        return;
      }
      end_bytes(step);
    } else if (std::holds_alternative<DecodeApart>(s)) {
      if (begun_) token.insert(0, 1, ' ');
    }
  }
  begun_ = true;
  const bool letters =
      fuse_ < steps_->size() && std::holds_alternative<DecodeLetters>((*steps_)[fuse_]);
  letters ? append_bytes(held_, token) : void(held_ += token);
}

// The byte tokens so far go on as text.
void Decoding::end_bytes(std::size_t step) {
  const std::string bytes = std::exchange(run_, {});
  if (bytes.empty()) return;
  if (is_valid_utf8(bytes)) return pass(step + 1, bytes);
  const bool one_by_one = std::get<DecodeByteTokens>((*steps_)[step]).one_by_one;
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t length = one_by_one ? utf8_length(bytes, at) : 0;
    pass(step + 1, length > 0 ? bytes.substr(at, length) : std::string(kReplacement));
    at += length > 0 ? length : 1;
  }
}

void Decoding::end_of_tokens() {
  for (std::size_t step = 0; step < fuse_; ++step) {
    if (std::holds_alternative<DecodeByteTokens>((*steps_)[step])) end_bytes(step);
  }
}

void Decoding::put(std::string_view token, std::string& out) {
  pass(0, std::string(token));
  if (by_strip_) give(out, false);
}

void Decoding::end(std::string& out) {
  end_of_tokens();
  if (by_strip_) {
    give(out, true);
  } else {
    std::string text = replace_invalid_utf8(held_);
    for (std::size_t i = fuse_ + 1; i < steps_->size(); ++i) {
      const DecodeStep& s = (*steps_)[i];
      check_length(text, held_.size());
      if (const auto* replace = std::get_if<DecodeReplace>(&s)) text = replaced(*replace, text);
      if (const auto* strip = std::get_if<DecodeStrip>(&s)) text = stripped(*strip, text);
      if (const auto* spaces = std::get_if<DecodeSpaces>(&s))
        text = replaced(text, spaces->replacement, spaces->drops_first ? "" : " ");
      if (std::holds_alternative<DecodeLetters>(s)) {
        std::string bytes;
        append_bytes(bytes, text);
        text = replace_invalid_utf8(bytes);
      }
      if (std::holds_alternative<DecodeByteTokens>(s) && byte_of(text) >= 0)
        text = replace_invalid_utf8(std::string(1, static_cast<char>(byte_of(text))));
    }
    out += text;
  }
  *this = Decoding(*steps_);
}

// Of what is held, all that is whole: a character may have its last bytes in the next token.
void Decoding::give(std::string& out, bool last) {
  const std::size_t whole = last ? held_.size() : complete_prefix(held_);
  const bool strips = fuse_ + 2 == steps_->size();
  if (!strips) {
    const std::string_view text = std::string_view(held_).substr(0, whole);
    is_valid_utf8(text) ? out += text : out += replace_invalid_utf8(text);
    held_.erase(0, whole);
    return;
  }
  const std::string rest = held_.substr(whole);
  held_ = replace_invalid_utf8(std::string_view(held_).substr(0, whole));
  give_stripped(out, last);
  held_ += rest;
}

void Decoding::give_stripped(std::string& out, bool last) {
  const auto& strip = std::get<DecodeStrip>((*steps_)[fuse_ + 1]);
  std::string_view text = held_;
  while (!start_is_over_ && stripped_ < strip.start && text.starts_with(strip.content)) {
    text.remove_prefix(strip.content.size());
    ++stripped_;
  }
  start_is_over_ = start_is_over_ || !text.empty();
  std::string_view tail = text;  // without what may be taken from the end
  for (std::size_t i = 0; i < strip.stop && tail.ends_with(strip.content); ++i)
    tail.remove_suffix(strip.content.size());
  out += tail;
  held_ = last ? std::string() : std::string(text.substr(tail.size()));
}

}  // namespace mlxtape::formats
