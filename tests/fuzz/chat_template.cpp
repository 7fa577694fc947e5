#include "mlxtape/formats/chat_template.h"

#include <optional>

#include "formats/utf8.h"
#include "fuzz/targets.h"

namespace mlxtape::fuzz {

namespace {

using formats::ChatOptions;
using formats::ChatTemplate;
using formats::Json;

constexpr std::string_view kMark = "\n----\n";

const Json& some_messages() {
  static const Json messages = Json::parse(R"([{"role": "system", "content": "Be brief."},
      {"role": "user", "content": "d\u00e9j\u00e0 vu?\n"},
      {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes.", "tool_calls":
        [{"type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, null, true]}}}]},
      {"role": "tool", "content": "3"}])",
                                           "messages");
  return messages;
}

// What the template is given, by the second half of the input: {"messages", "tools", "variables", "add_generation_prompt"},
// each of which may be absent.
struct Given {
  Json messages = some_messages();
  ChatOptions options;

  void read(std::string_view text) {
    Json json;
    accepts([&] { json = Json::parse(text, "given"); });
    if (const Json* found = json.find("messages")) messages = *found;
    if (const Json* found = json.find("tools")) options.tools = *found;
    if (const Json* found = json.find("variables")) options.variables = *found;
    const Json* found = json.find("add_generation_prompt");
    options.add_generation_prompt = found != nullptr && found->is_bool() && found->boolean();
  }
};

}  // namespace

bool chat_template(std::string_view input) {
  const std::size_t mark = input.find(kMark);
  Given given;
  given.options.bos_token = "<s>";
  given.options.eos_token = "</s>";
  given.options.now = 1'700'000'000;
  given.options.max_steps = 20'000;  // the same limit, reached sooner
  if (mark != std::string_view::npos) given.read(input.substr(mark + kMark.size()));
  std::optional<ChatTemplate> parsed;
  if (!accepts([&] { parsed.emplace(input.substr(0, mark), "template"); })) return false;
  std::string text, again;
  const bool rendered = accepts([&] { text = parsed->render(given.messages, given.options); });
  const bool twice = accepts([&] { again = parsed->render(given.messages, given.options); });
  check(rendered == twice && text == again, "a template gives the same each time");
  check(formats::is_valid_utf8(text), "a template gives UTF-8");
  return rendered;
}

}  // namespace mlxtape::fuzz
