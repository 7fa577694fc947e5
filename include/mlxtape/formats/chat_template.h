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
// Anything else, and what a template does wrong when it is rendered, is an Error(kIo) "source: line 3: what"; messages or
// variables of another kind than below are kArgument. Templates see nothing but what is given to them and, by strftime_now,
// the clock.
//
// Limits       Any template ends, with its text or an error: with the default max_steps within about 2 seconds, and 1 GB of
//              memory beside what it was given. A template has at most kMaxTemplateBytes, any text that it makes 64 MiB, a list
//              or dict 2^20 elements, those inside of it counted.
//
// Threads      A ChatTemplate is constant after construction: render from any number of threads.
#pragma once

#include <cstddef>
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
  // A step is a node that is evaluated, 32 bytes that are copied or compared, 4 bytes that are looked at one by one.
  std::int64_t max_steps = 20'000'000;
};

inline constexpr std::size_t kMaxTemplateBytes = std::size_t{2} << 20U;

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
