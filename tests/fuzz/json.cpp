#include "mlxtape/formats/json.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <optional>

#include "fuzz/targets.h"

namespace mlxtape::fuzz {

namespace {

using formats::Json;
using formats::JsonReader;

// May be refused although it is JSON: too deep, a number that no double comes near to, a byte order mark, a zero
// byte (where the other reader takes the text to end).
bool has_excuse(std::string_view text) {
  const auto opens =
      std::count_if(text.begin(), text.end(), [](char c) { return c == '[' || c == '{'; });
  return opens > formats::kJsonDepth || text.find_first_of("eE") != std::string_view::npos ||
         text.size() > 300 || text.starts_with("\xEF\xBB\xBF") ||
         text.find('\0') != std::string_view::npos;
}

}  // namespace

bool json(std::string_view input) {
  std::optional<Json> value;
  const bool parsed = accepts([&] { value = Json::parse(input, "input"); });
  const bool skipped = accepts([&] {
    JsonReader reader(input, "input");
    reader.skip();
    reader.end();
  });
  check(skipped || !parsed, "what can be read can be skipped");
  const bool is_json = nlohmann::json::accept(input);
  check(is_json || !skipped, "what is no JSON is refused");
  check(skipped || !is_json || has_excuse(input), "what is JSON is read");
  if (!parsed) return false;
  const std::string line = value->dump();
  for (const int indent : {-1, 0, 2}) {
    const std::string text = value->dump(indent);
    const Json again = Json::parse(text, "dump");
    check(again == *value && again.dump() == line, "what is written is read back", text);
  }
  const std::string sorted = value->dump(-1, true);
  check(Json::parse(sorted, "dump").dump(-1, true) == sorted, "sorted once is sorted");
  return true;
}

}  // namespace mlxtape::fuzz
