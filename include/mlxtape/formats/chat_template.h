// Chat templates: the part of Jinja that model cards use, rendered as Python's jinja2 does with trim_blocks,
// lstrip_blocks and loop controls on, which is how these templates are meant to be read.
//
// Statements   if elif else, for (unpacking, filter, else, loop.*), set (names, namespace members, blocks), macro,
//              break, continue, generation (its body is rendered like any other)
// Expressions  literals, attributes, items, slices, calls, arithmetic, ~, comparisons, in, and or not, is, inline if,
//              the filters, tests and methods in src/formats/template_filters.cpp and template_calls.cpp
// Differences  filters that give a generator in Jinja give a list; integers have 64 bits; keys of a dict are strings;
//              upper and lower map one code point to one; macros are defined outside of loops and other macros
//
// Anything else is an Error(kArgument) "source: line 3: what". Hostile templates end: the steps, the depth and the size
// of every text are limited. Templates see nothing but what is given to them and, by strftime_now, the clock.
//
// Threads      A ChatTemplate is constant after construction: render from any number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "mlxtape/formats/json.h"

namespace mlxtape::formats {

struct ChatOptions {
  bool add_generation_prompt = false;  // ends with the beginning of an answer
  Json tools;                          // an array of function schemas; null where there is none
  std::string bos_token, eos_token;
  Json variables;  // an object: what else the template may ask for, as enable_thinking
  std::optional<std::int64_t>
      now{};  // seconds since 1970 for strftime_now; the clock's where absent
  std::int64_t max_steps = 20'000'000;  // evaluated nodes and, by 64, bytes that were put together
};

class ChatTemplate {
 public:
  // Parses; source names the template in errors.
  ChatTemplate(std::string_view text, std::string source);

  // messages: an array of objects with at least a role, whatever else the template reads.
  std::string render(const Json& messages, const ChatOptions& options = {}) const;

  const std::string& text() const noexcept { return text_; }

 private:
  std::string text_, source_;
  std::shared_ptr<const struct ParsedTemplate> parsed_;
};

}  // namespace mlxtape::formats
