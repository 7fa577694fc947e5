// What readers of the parts of tokenizer.json share.
#pragma once

#include <string>
#include <vector>

#include "formats/regex.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::formats {

[[noreturn]] inline void refuse(const std::string& who, const std::string& what) {
  throw Error(Errc::kIo, who + ": " + what);
}

inline const Json& member(const Json& json, const char* key, const std::string& who) {
  const Json* found = json.find(key);
  if (found == nullptr)
    refuse(who, std::string("'") + key + "' must be given in " + shown(json.dump()));
  return *found;
}

inline bool flag(const Json& json, const char* key, bool otherwise) {
  const Json* found = json.find(key);
  return found != nullptr ? found->boolean() : otherwise;
}

// The steps of a Sequence, those of a Sequence in it too; one step; none for null.
inline std::vector<const Json*> steps_of(const Json& json, const char* list,
                                         const std::string& who) {
  if (json.is_null()) return {};
  if (member(json, "type", who).string() != "Sequence") return {&json};
  std::vector<const Json*> out;
  for (const Json& step : member(json, list, who).array()) {
    for (const Json* s : steps_of(step, list, who)) out.push_back(s);
  }
  return out;
}

// {"String": ...} or {"Regex": ...}; a literal pattern has text, any other one a regex.
struct Pattern {
  std::string text, regex;
  Regex compiled(const std::string& who) const {
    if (!text.empty()) return Regex::literal(text);
    try {
      return Regex(regex);
    } catch (const Error& e) {
      refuse(who, e.what());
    }
  }
};
inline Pattern read_pattern(const Json& json, const std::string& who) {
  const Json& pattern = member(json, "pattern", who);
  const Json *text = pattern.find("String"), *regex = pattern.find("Regex");
  if (text == nullptr && regex == nullptr)
    refuse(who, "a pattern must be a String or a Regex, got " + shown(pattern.dump()));
  if (text == nullptr) return {"", regex->string()};
  if (text->string().empty()) refuse(who, "a pattern must not be empty");
  return {text->string(), ""};
}

}  // namespace mlxtape::formats
