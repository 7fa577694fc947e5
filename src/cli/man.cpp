// man: the manual page, in roff, written from the commands themselves.
#include <CLI/CLI.hpp>

#include "command.h"
#include "describe.h"
#include "output.h"

namespace mlxtape::cli {

namespace {

// Backslashes, dashes and quotes as they are; a dot or quote at the beginning of a line is no request.
std::string roff(const std::string& text) {
  std::string out;
  bool start = true;
  for (const char c : text) {
    if (start && (c == '.' || c == '\'')) out += "\\&";
    start = c == '\n';
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else if (c == '\'') {
      out += "\\(aq";
    } else {
      out += c;
    }
  }
  return out;
}

std::string flags_text(const CommandText& command, bool with_help) {
  std::string out, group;
  for (const FlagText& flag : command.flags) {
    if (!with_help && flag.names.back() == "--help") continue;
    if (flag.group != group && !flag.group.empty()) out += ".PP\n" + roff(flag.group) + ":\n";
    group = flag.group;
    out += ".TP\n\\fB" + roff(flag.spelling()) + "\\fR\n" + roff(flag.meaning()) + "\n";
  }
  return out;
}

std::string literal(const std::string& text) { return ".PP\n.nf\n" + roff(text) + "\n.fi\n"; }

void add_section(const CommandText& command, const std::string& path, std::string& out) {
  out += ".SS " + roff(path) + "\n" + roff(command.sentence) + "\n.PP\nUsage: \\fB" +
         roff(command.usage(path)) + "\\fR\n" + flags_text(command, false);
  if (!command.examples.empty()) out += literal(command.examples);
  for (const CommandText& inner : command.commands) {
    add_section(inner, path + " " + inner.name, out);
  }
}

std::string page(const CommandText& root) {
  std::string out = ".TH MLXTAPE 1 \"\" \"mlxtape " MLXTAPE_VERSION "\" \"User Commands\"\n";
  out += ".SH NAME\nmlxtape \\- " + roff(root.sentence) + "\n";
  out += ".SH SYNOPSIS\n\\fB" + roff(root.usage("mlxtape")) + "\\fR\n";
  out += ".SH OPTIONS\n" + flags_text(root, true);
  out += ".SH COMMANDS\n";
  for (const CommandText& command : root.commands) {
    add_section(command, "mlxtape " + command.name, out);
  }
  return out + ".SH NOTES\n" + literal(root.examples);
}

}  // namespace

void add_man(CLI::App& app, const Globals&) {
  add_command(app, "man", "print the manual page, in roff format.",
              "Example:\n  mlxtape man > mlxtape.1 && man ./mlxtape.1")
      ->group("About the program")
      ->callback([&app] { print(page(describe(app))); });
}

}  // namespace mlxtape::cli
