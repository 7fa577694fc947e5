// completion: what shells offer after a Tab, written from the commands themselves.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>

#include "command.h"
#include "describe.h"
#include "output.h"

namespace mlxtape::cli {

namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : " ") + word;
  return all;
}

std::string in_quotes(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

// The command's own flags, and those of every command that it has no other meaning for.
CommandText with_globals(CommandText command, const CommandText& root) {
  const std::vector<FlagText> own = command.flags;
  const auto is_own = [&](const FlagText& flag) {
    return std::any_of(own.begin(), own.end(), [&](const FlagText& other) {
      return other.names.back() == flag.names.back();
    });
  };
  for (const FlagText& flag : root.flags) {
    if (!flag.group.empty() && !is_own(flag)) command.flags.push_back(flag);
  }
  return command;
}

std::vector<std::string> flag_names(const CommandText& command) {
  std::vector<std::string> names;
  for (const FlagText& flag : command.flags) {
    if (!flag.positional) names.insert(names.end(), flag.names.begin(), flag.names.end());
  }
  return names;
}

bool takes_folder(const FlagText& flag) { return flag.value == "DIR"; }
bool takes_file(const FlagText& flag) { return flag.value == "FILE"; }

// Calls function(command, path) for each, outer ones first; the path of the outermost is empty, that of ops "bench ops".
template <class Function>
void each(const CommandText& root, const Function& function, const CommandText* command = nullptr,
          const std::string& path = "") {
  if (command == nullptr) command = &root;
  function(path.empty() ? root : with_globals(*command, root), path);
  for (const CommandText& inner : command->commands) {
    each(root, function, &inner, path.empty() ? inner.name : path + " " + inner.name);
  }
}

// ---- bash: one function; `path` is the command so far, and a case for each says what may follow ----

std::string bash_values(const CommandText& command) {
  std::string cases;
  for (const FlagText& flag : command.flags) {
    if (flag.positional || flag.value.empty()) continue;
    std::string names;
    for (const std::string& name : flag.names) names += (names.empty() ? "" : "|") + name;
    const std::string action =
        !flag.choices.empty()
            ? "COMPREPLY=($(compgen -W " + in_quotes(joined(flag.choices)) + " -- \"$word\"))"
        : takes_folder(flag) ? "COMPREPLY=($(compgen -d -- \"$word\"))"
        : takes_file(flag)   ? "COMPREPLY=($(compgen -f -- \"$word\"))"
                             : "COMPREPLY=()";
    cases += "        " + names + ") " + action + "; return ;;\n";
  }
  return cases;
}

std::string bash(const CommandText& root) {
  std::string words, commands;
  each(root, [&](const CommandText& command, const std::string& path) {
    std::vector<std::string> next = flag_names(command);
    for (const CommandText& inner : command.commands) {
      const std::string full = path.empty() ? inner.name : path + " " + inner.name;
      commands +=
          "      " + in_quotes(path + "|" + inner.name) + ") path=" + in_quotes(full) + " ;;\n";
      next.push_back(inner.name);
    }
    bool folders = false;
    for (const FlagText& flag : command.flags) {
      if (!flag.positional) continue;
      folders = folders || takes_folder(flag);
      next.insert(next.end(), flag.choices.begin(), flag.choices.end());
    }
    words += "    " + in_quotes(path) + ")\n      case \"$previous\" in\n" + bash_values(command) +
             "      esac\n      COMPREPLY=($(compgen -W " + in_quotes(joined(next)) +
             " -- \"$word\")" + (folders ? " $(compgen -d -- \"$word\")" : "") + ")\n      ;;\n";
  });
  return "# bash completion of mlxtape, written by `mlxtape completion bash`\n"
         "_mlxtape() {\n"
         "  local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} path= i\n"
         "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
         "    case \"$path|${COMP_WORDS[i]}\" in\n" +
         commands +
         "    esac\n"
         "  done\n"
         "  case \"$path\" in\n" +
         words +
         "  esac\n"
         "}\n"
         "complete -o filenames -F _mlxtape mlxtape\n";
}

// ---- zsh: _arguments for each command ----

// In a specification brackets and colons are syntax.
std::string zsh_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string zsh_value(const FlagText& flag) {
  if (flag.value.empty()) return "";
  const std::string action = !flag.choices.empty() ? "(" + joined(flag.choices) + ")"
                             : takes_folder(flag)  ? "_files -/"
                             : takes_file(flag)    ? "_files"
                                                   : "";
  return ":" + zsh_text(flag.value) + ":" + action;
}

std::string zsh_flags(const CommandText& command) {
  std::string out;
  for (const FlagText& flag : command.flags) {
    if (flag.positional) {
      out += " \\\n    " + in_quotes("1" + zsh_value(flag));
      continue;
    }
    for (const std::string& name : flag.names) {
      out += " \\\n    " + in_quotes(std::string(flag.repeatable ? "*" : "") + name + "[" +
                                     zsh_text(flag.description) + "]" + zsh_value(flag));
    }
  }
  return out;
}

std::string zsh_name(const std::string& path) {
  std::string name = "_mlxtape";
  for (const char c : path.empty() ? "" : " " + path) name += c == ' ' || c == '-' ? '_' : c;
  return name;
}

std::string zsh(const CommandText& root) {
  std::string out =
      "#compdef mlxtape\n# zsh completion of mlxtape, written by `mlxtape completion zsh`\n";
  each(root, [&](const CommandText& command, const std::string& path) {
    out += "\n" + zsh_name(path) + "() {\n  local context state line\n  typeset -A opt_args\n";
    out += "  _arguments -C" + zsh_flags(command);
    if (command.commands.empty()) {
      out += "\n}\n";
      return;
    }
    std::string list, cases;
    for (const CommandText& inner : command.commands) {
      list += " " + in_quotes(zsh_text(inner.name) + ":" + inner.sentence);
      cases += "        " + inner.name + ") " +
               zsh_name(path.empty() ? inner.name : path + " " + inner.name) + " ;;\n";
    }
    out +=
        " \\\n    '1: :->command' '*:: :->rest'\n  case $state in\n    command)\n"
        "      local -a commands=(" +
        list +
        ")\n      _describe command commands\n      ;;\n"
        "    rest)\n      case $line[1] in\n" +
        cases + "      esac\n      ;;\n  esac\n}\n";
  });
  return out + "\n_mlxtape \"$@\"\n";
}

// ---- fish: a line for each flag ----

std::string fish_flag(const FlagText& flag, const std::string& condition) {
  std::string line = "complete -c mlxtape -n " + in_quotes(condition);
  for (const std::string& name : flag.names) {
    line += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  }
  if (!flag.value.empty()) {
    line += " -r";
    if (!flag.choices.empty()) line += " -f -a " + in_quotes(joined(flag.choices));
    if (takes_folder(flag)) line += " -f -a '(__fish_complete_directories)'";
  }
  return line + " -d " + in_quotes(flag.description) + "\n";
}

std::string fish(const CommandText& root) {
  std::string out =
      "# fish completion of mlxtape, written by `mlxtape completion fish`\n"
      "complete -c mlxtape -f\n";
  each(root, [&](const CommandText& command, const std::string& path) {
    std::string condition = path.empty() ? "__fish_use_subcommand" : "";
    for (std::size_t at = 0; at < path.size();) {
      const std::size_t end = std::min(path.find(' ', at), path.size());
      condition += (condition.empty() ? "" : "; and ") +
                   std::string("__fish_seen_subcommand_from ") + path.substr(at, end - at);
      at = end + 1;
    }
    std::string inner_names;
    for (const CommandText& inner : command.commands) inner_names += " " + inner.name;
    for (const CommandText& inner : command.commands) {
      out += "complete -c mlxtape -n " +
             in_quotes((path.empty() ? "" : condition + "; and ") +
                       std::string("not __fish_seen_subcommand_from") + inner_names) +
             " -a " + in_quotes(inner.name) + " -d " + in_quotes(inner.sentence) + "\n";
    }
    for (const FlagText& flag : command.flags) {
      if (!flag.positional) {
        out += fish_flag(flag, condition);
      } else if (!flag.choices.empty()) {
        out += "complete -c mlxtape -n " + in_quotes(condition) + " -a " +
               in_quotes(joined(flag.choices)) + "\n";
      } else if (takes_folder(flag)) {
        out += "complete -c mlxtape -n " + in_quotes(condition) +
               " -a '(__fish_complete_directories)'\n";
      }
    }
  });
  return out;
}

}  // namespace

void add_completion(CLI::App& app, const Globals&) {
  CLI::App* command =
      add_command(app, "completion", "print the completion script for a shell.",
                  "Examples:\n"
                  "  mlxtape completion bash > ~/.local/share/bash-completion/completions/mlxtape\n"
                  "  mlxtape completion zsh > ~/.zfunc/_mlxtape\n"
                  "  mlxtape completion fish > ~/.config/fish/completions/mlxtape.fish");
  command->group("About the program");
  const auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, "the shell to print it for")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->type_name("NAME");
  command->callback([&app, shell] {
    const CommandText root = describe(app);
    print(*shell == "bash" ? bash(root) : *shell == "zsh" ? zsh(root) : fish(root));
  });
}

}  // namespace mlxtape::cli
