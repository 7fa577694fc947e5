#include "command.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>

#include "formats/real.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::cli {

namespace {

Device& named(const std::string& name, Device& otherwise) {
  return name == "auto" ? otherwise : Device::find(name);
}

}  // namespace

Device& Globals::device() const { return named(device_name, Device::best()); }

Device& Globals::device_or_cpu() const { return named(device_name, Device::cpu()); }

namespace {

// As $'...', for what no terminal should be given: a name with control characters.
std::string in_hexadecimal(const std::string& word) {
  std::string out = "$'";
  for (const char c : word) {
    const auto byte = static_cast<unsigned char>(c);
    std::array<char, 8> text{c};
    if (byte < 0x20 || byte >= 0x7f) std::snprintf(text.data(), text.size(), "\\x%02x", byte);
    if (c == '\'' || c == '\\') out += '\\';
    out += text.data();
  }
  return out + "'";
}

}  // namespace

std::string shell_word(const std::string& word) {
  if (word != escaped(word)) return in_hexadecimal(word);
  const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%^";
  if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::string Globals::again_with(const std::string& flag) const {
  std::string line;
  bool is_there = false;
  for (const std::string& word : arguments) {
    line += (line.empty() ? "" : " ") + shell_word(word);
    is_there = is_there || word == flag;
  }
  return is_there ? line : line + " " + flag;
}

CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& sentence,
                      const std::string& examples) {
  return app.add_subcommand(name, sentence)->footer(examples);
}

namespace {

// As people write numbers: no more digits than it has.
std::string text_of(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

// Digits with a point before, among or behind them, perhaps a minus and an exponent.
bool is_decimal(std::string_view text) {
  const auto skip_digits = [&text] {
    const std::size_t count = std::min(text.find_first_not_of("0123456789"), text.size());
    text.remove_prefix(count);
    return count;
  };
  if (text.starts_with('-')) text.remove_prefix(1);
  std::size_t digits = skip_digits();
  if (text.starts_with('.')) {
    text.remove_prefix(1);
    digits += skip_digits();
  }
  if (digits == 0) return false;
  if (text.starts_with('e') || text.starts_with('E')) {
    text.remove_prefix(1);
    if (text.starts_with('-') || text.starts_with('+')) text.remove_prefix(1);
    if (skip_digits() == 0) return false;
  }
  return text.empty();
}

std::optional<double> read_number(const std::string& text) {
  double value = 0;
  if (!is_decimal(text) || !formats::to_real(text, value)) return std::nullopt;
  return value;
}

template <class Whole>
bool is_whole(const std::string& text, Whole& value) {
  const char* const end = text.data() + text.size();
  const auto [stopped, wrong] = std::from_chars(text.data(), end, value);
  return wrong == std::errc{} && stopped == end;
}

CLI::Validator checked(const std::string& takes,
                       const std::function<bool(const std::string&)>& fits) {
  return {[takes, fits](std::string& text) {
            return fits(text) ? std::string() : "must be " + takes + ", got '" + text + "'";
          },
          ""};
}

}  // namespace

CLI::Validator whole_number(std::int64_t least, std::uint64_t most) {
  return checked("a whole number from " + std::to_string(least) + " to " + std::to_string(most),
                 [=](const std::string& text) {
                   std::int64_t negative = 0;
                   std::uint64_t value = 0;
                   if (is_whole(text, negative) && negative < 0) return negative >= least;
                   return is_whole(text, value) && std::cmp_greater_equal(value, least) &&
                          value <= most;
                 });
}

CLI::Validator number(double least, double most) {
  return checked(std::isfinite(most) ? "a number from " + text_of(least) + " to " + text_of(most)
                                     : "a number of at least " + text_of(least),
                 [=](const std::string& text) {
                   const auto value = read_number(text);
                   return value && *value >= least && *value <= most;
                 });
}

CLI::Validator number_above(double least, double most) {
  return checked("a number above " + text_of(least) +
                     (std::isfinite(most) ? " and at most " + text_of(most) : ""),
                 [=](const std::string& text) {
                   const auto value = read_number(text);
                   return value && *value > least && *value <= most;
                 });
}

void add_hidden_names(CLI::App& command, const std::string& flag, const std::string& names) {
  CLI::Option* const target = command.get_option(flag);
  command
      .add_option_function<std::string>(names,
                                        [target](const std::string& value) {
                                          target->add_result(value);
                                          target->run_callback();
                                        })
      ->group("");
}

void called_wrongly(const std::string& what) { throw Error(Errc::kArgument, what); }

}  // namespace mlxtape::cli
