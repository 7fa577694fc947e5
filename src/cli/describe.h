// The commands and their flags as data, read from the CLI11 app itself: help, man page and completions are printed from
// this alone and cannot go stale.
#pragma once

#include <string>
#include <vector>

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's own
class App;
}

namespace mlxtape::cli {

struct FlagText {
  std::vector<std::string> names;    // "-p", "--prompt"; of a positional one, its name alone
  std::string value;                 // "TEXT"; empty where it takes none
  std::vector<std::string> choices;  // empty: anything
  std::string description, otherwise, group;
  bool positional = false, required = false, repeatable = false;

  std::string spelling() const;  // "-p, --prompt TEXT"
  std::string meaning() const;   // the description, default and the like behind it
};

struct CommandText {
  std::string name, sentence, examples, group;
  std::vector<FlagText> flags;  // by groups, in their order
  std::vector<CommandText> commands;

  std::string usage(const std::string& path) const;
};

CommandText describe(const CLI::App& app);

// Makes --help print what describe finds.
void set_help(CLI::App& app);

}  // namespace mlxtape::cli
