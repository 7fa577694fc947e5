#include "mlxtape/formats/chat_template.h"

#include <ctime>
#include <utility>

#include "formats/template_run.h"
#include "formats/utf8.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {

struct ParsedTemplate {
  jinja::Body body;
};

namespace {

// What raise_exception says is the template's own text. No line: what was given to the template is at fault.
Error at_line(const std::string& source, int line, const char* what) {
  constexpr std::size_t kMostBytes = 1000;
  const std::string place = line > 0 ? ": line " + std::to_string(line) : "";
  return {Errc::kIo, source + place + ": " + shown(what, kMostBytes)};
}

}  // namespace

ChatTemplate::ChatTemplate(std::string_view text, std::string source)
    : text_(text), source_(std::move(source)) {
  if (!is_valid_utf8(text_))
    throw Error(Errc::kIo, source_ + ": a chat template must be valid UTF-8");
  if (text_.size() > kMaxTemplateBytes) {
    throw Error(Errc::kIo, source_ + ": a chat template must be at most " +
                               std::to_string(kMaxTemplateBytes) + " bytes long, got " +
                               std::to_string(text_.size()));
  }
  try {
    parsed_ = std::make_shared<const ParsedTemplate>(ParsedTemplate{jinja::parse(text_)});
  } catch (const jinja::Syntax& s) {
    throw at_line(source_, s.line, s.what());
  }
}

std::string ChatTemplate::render(const Json& messages, const ChatOptions& options) const {
  using jinja::Value;
  if (!messages.is_array()) throw Error(Errc::kArgument, source_ + ": messages must be an array");
  if (!options.variables.is_null() && !options.variables.is_object())
    throw Error(Errc::kArgument, source_ + ": variables must be an object");
  const jinja::Budget budget(options.max_steps);
  jinja::Runner runner(options.now.value_or(std::time(nullptr)));
  try {
    jinja::Scope globals{nullptr};
    globals.set("messages", Value::from(messages));
    globals.set("tools", Value::from(options.tools));
    globals.set("documents", nullptr);
    globals.set("add_generation_prompt", options.add_generation_prompt);
    globals.set("bos_token", options.bos_token);
    globals.set("eos_token", options.eos_token);
    if (options.variables.is_object()) {
      for (const auto& [key, value] : options.variables.object())
        globals.set(key, Value::from(value));
    }
    return runner.run(parsed_->body, std::move(globals.names));
  } catch (const jinja::Fault& f) {
    throw at_line(source_, runner.line(), f.what());
  }
}

}  // namespace mlxtape::formats
