// What the commands of the program share: how one is added, the flags of all, how one ends.
//
// A command is a file <name>.cpp with a function add_<name> that adds a subcommand, its flags and a callback. The
// callback runs once all flags are read and the globals applied: flags -> a job's config -> run. Results go to stdout,
// everything else to stderr. It returns when it is done and throws otherwise: mlxtape::Error, or Exit after having said
// all there is to say.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mlxtape/core/device.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's own
class App;
class Option;
class Validator;
}  // namespace CLI

namespace mlxtape::cli {

// Exit codes.
inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;         // a file, a device, memory
inline constexpr int kCalledWrongly = 2;  // the user's flags
inline constexpr int kInterrupted = 130;  // what was to be kept is kept

// Ends the program with this code.
struct Exit {
  int code;
};

// The flags that every command takes.
struct Globals {
  int threads = 0;
  std::string cpu_target;
  std::string device_name = "auto";
  bool json = false;   // the result as one JSON value on stdout
  bool quiet = false;  // no progress, no remarks; errors still come
  std::string command_line;
  std::vector<std::string> arguments;  // the same, one by one

  // The command line once more, as a shell takes it, with this flag where it is not there yet.
  std::string again_with(const std::string& flag) const;

  // What --device asks for; auto: the best there is.
  Device& device() const;
  // The same for commands that are as good on the CPU: auto: cpu.
  Device& device_or_cpu() const;
};

// A word as a shell takes it.
std::string shell_word(const std::string& word);

// A subcommand: one sentence, and examples as a user types them, a line each.
CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& sentence,
                      const std::string& examples);

// What a flag takes, for Option::check: errors name the flag, what it takes and what it got. No value is left out in silence:
// "1e2" is no whole number, "inf" and "nan" are no numbers.
CLI::Validator whole_number(std::int64_t least, std::uint64_t most);
CLI::Validator number(double least, double most);  // most: infinity where there is no such
CLI::Validator number_above(double least, double most);

// Another name of a flag with one value, which help and completions do not show: what users of other programs type. Where
// both are given this one counts.
void add_hidden_names(CLI::App& command, const std::string& flag, const std::string& names);

// Errors of calls: kArgument, so that the program ends with kCalledWrongly.
[[noreturn]] void called_wrongly(const std::string& what);

// The commands, one file each. The order of main.cpp is that of --help.
void add_bench(CLI::App& app, const Globals& globals);
void add_chat(CLI::App& app, const Globals& globals);
void add_compare(CLI::App& app, const Globals& globals);
void add_completion(CLI::App& app, const Globals& globals);
void add_convert(CLI::App& app, const Globals& globals);
void add_demo(CLI::App& app, const Globals& globals);
void add_dwq(CLI::App& app, const Globals& globals);
void add_dynamic_quant(CLI::App& app, const Globals& globals);
void add_eval(CLI::App& app, const Globals& globals);
void add_fuse(CLI::App& app, const Globals& globals);
void add_generate(CLI::App& app, const Globals& globals);
void add_info(CLI::App& app, const Globals& globals);
void add_inspect(CLI::App& app, const Globals& globals);
void add_kernels(CLI::App& app, const Globals& globals);
void add_lora(CLI::App& app, const Globals& globals);
void add_man(CLI::App& app, const Globals& globals);
void add_new(CLI::App& app, const Globals& globals);
void add_selftest(CLI::App& app, const Globals& globals);
void add_train(CLI::App& app, const Globals& globals);

}  // namespace mlxtape::cli
