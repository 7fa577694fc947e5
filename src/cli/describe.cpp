#include "describe.h"

#include <CLI/CLI.hpp>

#include <algorithm>

namespace mlxtape::cli {

namespace {

constexpr std::size_t kWidth = 100, kNames = 30;

// "TEXT:{cpu,cuda}" -> TEXT and the choices; "INT:INT in [1 - 9]" -> INT.
void read_type(const CLI::Option& option, FlagText& flag) {
  const std::string type = option.get_type_name();
  const std::size_t open = type.find('{'), close = type.find('}');
  if (open != std::string::npos && close != std::string::npos && open < close) {
    for (std::size_t at = open + 1; at <= close;) {
      const std::size_t end = std::min(type.find(',', at), close);
      flag.choices.push_back(type.substr(at, end - at));
      at = end + 1;
    }
  }
  flag.value = type.substr(0, type.find(':'));
  if (flag.value == "UINT") flag.value = "INT";
}

FlagText describe(const CLI::Option& option) {
  FlagText flag;
  for (const std::string& name : option.get_snames()) flag.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) flag.names.push_back("--" + name);
  flag.positional = flag.names.empty();
  if (flag.positional) flag.names.push_back(option.get_name(true));
  flag.description = option.get_description();
  flag.group = option.get_group() == "Options" ? "" : option.get_group();
  flag.required = option.get_required();
  if (option.get_items_expected_max() == 0) return flag;
  read_type(option, flag);
  flag.repeatable = option.get_items_expected_max() > 1;
  const std::string value = option.get_default_str();
  if (value != "\"\"" && value != "[]") flag.otherwise = value;
  return flag;
}

// Words below each other, each line from column `indent` on.
std::string wrapped(const std::string& text, std::size_t indent, std::size_t at) {
  std::string out;
  std::size_t begin = 0;
  while (begin < text.size()) {
    std::size_t end = text.find(' ', begin);
    if (end == std::string::npos) end = text.size();
    const std::string word = text.substr(begin, end - begin);
    if (at > indent && at + 1 + word.size() > kWidth) {
      out += "\n" + std::string(indent, ' ');
      at = indent;
    } else if (at > indent) {
      out += " ";
      ++at;
    }
    out += word;
    at += word.size();
    begin = end + 1;
  }
  return out;
}

std::string entry(const std::string& name, const std::string& meaning) {
  std::string line = "  " + name;
  if (line.size() + 2 > kNames) {
    line += "\n" + std::string(kNames, ' ');
  } else {
    line.resize(kNames, ' ');
  }
  return line + wrapped(meaning, kNames, kNames) + "\n";
}

// For a list of commands: the others are in the command's own help.
std::string first_sentence(const std::string& text) {
  const std::size_t end = text.find(". ");
  return end == std::string::npos ? text : text.substr(0, end + 1);
}

std::string help_of(const CommandText& command, const std::string& path) {
  std::string out = wrapped(path + ": " + command.sentence, 0, 0) + "\n\n";
  out += "Usage: " + command.usage(path) + "\n";
  std::string group = "none";
  for (const CommandText& inner : command.commands) {
    if (inner.group != group) {
      group = inner.group;
      out += "\n" + (group.empty() ? "Commands" : group) + ":\n";
    }
    out += entry(inner.name, first_sentence(inner.sentence));
  }
  group = "none";
  for (const FlagText& flag : command.flags) {
    const std::string of = flag.positional      ? "Arguments"
                           : flag.group.empty() ? "Flags"
                                                : flag.group;
    if (of != group) {
      group = of;
      out += "\n" + of + ":\n";
    }
    out += entry(flag.spelling(), flag.meaning());
  }
  if (!command.examples.empty()) out += "\n" + command.examples + "\n";
  if (path.find(' ') != std::string::npos) {
    out +=
        "\nSee mlxtape --help for the flags of every command: --device, --threads, --json, ...\n";
  }
  return out;
}

class Help : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string path, CLI::AppFormatMode) const override {
    return help_of(cli::describe(*app), path);
  }
};

}  // namespace

std::string FlagText::spelling() const {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  if (positional || value.empty()) return out;
  return out + " " + value;
}

std::string FlagText::meaning() const {
  std::string out = description;
  if (!choices.empty()) {
    std::string list;
    for (const std::string& choice : choices) list += (list.empty() ? "" : ", ") + choice;
    out += "; one of " + list;
  }
  if (required && !positional) out += " (required)";
  if (repeatable) out += " (may be repeated)";
  if (!otherwise.empty()) out += " [" + otherwise + "]";
  return out;
}

std::string CommandText::usage(const std::string& path) const {
  std::string out = path;
  for (const FlagText& flag : flags) {
    if (flag.required && !flag.positional) out += " " + flag.names.back() + " " + flag.value;
  }
  out += commands.empty() ? " [flags]" : " [flags] COMMAND";
  for (const FlagText& flag : flags) {
    if (flag.positional) out += flag.required ? " " + flag.names[0] : " [" + flag.names[0] + "]";
  }
  return out;
}

CommandText describe(const CLI::App& app) {
  CommandText command;
  command.name = app.get_name();
  command.sentence = app.get_description();
  command.examples = app.get_footer();
  command.group = app.get_group() == "Subcommands" ? "" : app.get_group();
  std::vector<std::string> groups;
  const auto place = [&](const FlagText& flag) {
    if (flag.positional) return std::size_t{0};
    if (flag.group.empty()) return groups.size() + (flag.names.back() == "--help" ? 2 : 1);
    return 1 + static_cast<std::size_t>(std::find(groups.begin(), groups.end(), flag.group) -
                                        groups.begin());
  };
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    command.flags.push_back(describe(*option));
    const std::string& group = command.flags.back().group;
    if (!group.empty() && std::find(groups.begin(), groups.end(), group) == groups.end()) {
      groups.push_back(group);
    }
  }
  std::stable_sort(command.flags.begin(), command.flags.end(),
                   [&](const FlagText& a, const FlagText& b) { return place(a) < place(b); });
  for (const CLI::App* inner : app.get_subcommands({})) {
    command.commands.push_back(cli::describe(*inner));
  }
  return command;
}

void set_help(CLI::App& app) {
  app.formatter(std::make_shared<Help>());
  app.set_help_flag("-h,--help", "show this help");
}

}  // namespace mlxtape::cli
