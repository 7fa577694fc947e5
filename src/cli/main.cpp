// The mlxtape program: global flags, the commands, errors and exit codes (command.h).
#include <CLI/CLI.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <new>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "backends/cpu/targets.h"
#include "bus_error.h"
#include "command.h"
#include "commit.h"
#include "describe.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/source_kernel.h"
#include "mlxtape/core/threads.h"
#include "mlxtape/jobs/not_finite.h"
#include "output.h"
#include "suggest.h"

namespace {

using namespace mlxtape;
using namespace mlxtape::cli;

const char* const kFooter =
    "Exit codes:\n"
    "  0    success\n"
    "  1    failure: file, device, memory, NaN or infinite loss; existing files are untouched\n"
    "  2    usage error\n"
    "  130  interrupted (Ctrl-C, SIGTERM, SIGHUP); progress has been saved\n"
    "\n"
    "mlxtape COMMAND --help shows its flags. Results go to stdout, progress and errors to stderr.";

// Where kernels from source are kept between runs; empty where the user has no such place.
std::string cache_folder() {
  const auto below = [](const char* variable, const char* rest) {
    const char* value = std::getenv(variable);
    return value != nullptr && *value != '\0' ? std::string(value) + rest : std::string();
  };
  const std::string folder = below("XDG_CACHE_HOME", "/mlxtape");
  return folder.empty() ? below("HOME", "/.cache/mlxtape") : folder;
}

// What --device takes: backends that this program knows, be they here or absent.
std::vector<std::string> device_names() {
  std::vector<std::string> names{"auto"};
  const auto add = [&](Backend backend) {
    const std::string name = name_of(backend);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const Device* device : Device::all()) add(device->backend());
  for (const AbsentDevice& absent : Device::absent()) add(absent.backend);
  return names;
}

void add_global_flags(CLI::App& app, Globals& globals) {
  const char* group = "Flags of every command";
  app.add_option("--device", globals.device_name,
                 "where to compute; auto: a GPU if available, else cpu")
      ->check(CLI::IsMember(device_names()))
      ->type_name("NAME")
      ->group(group);
  app.add_option("--threads", globals.threads, "number of CPU threads; 0: one per core")
      ->check(whole_number(0, 1024))
      ->type_name("N")
      ->group(group);
  app.add_option("--cpu-target", globals.cpu_target,
                 "highest CPU instruction set to use; mlxtape info lists them")
      ->type_name("NAME")
      ->group(group);
  app.add_flag("--json", globals.json, "print the result as JSON")->group(group);
  app.add_flag("--quiet", globals.quiet, "print no progress and no warnings")->group(group);
}

// What a path looks like where its value was forgotten: the next flag.
bool is_flag(const std::string& word) {
  return word.size() > 1 && word[0] == '-' && (word[1] == '-' || word.size() == 2);
}

// An empty path is a variable of a script that was never set: it must not become the current folder.
void refuse_empty_paths(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    if (type != "DIR" && type != "FILE") continue;
    option->check([type](const std::string& path) {
      const std::string must = "must be a " + std::string(type == "DIR" ? "directory" : "file");
      if (path.empty()) return must + ", got an empty path";
      if (!is_flag(path)) return std::string();
      return must + ", got the flag " + path + "; for a path of that name write ./" + path;
    });
  }
  for (CLI::App* command : app.get_subcommands({})) refuse_empty_paths(*command);
}

// What is like it, of what the command that was asked for takes and of the flags of all.
std::string unknown_text(const CLI::App& app, const std::string& word) {
  Known known;
  const CLI::App* inner = &app;
  for (;;) {
    for (const CLI::Option* option : inner->get_options()) {
      for (const std::string& name : option->get_lnames()) known.flags.push_back("--" + name);
    }
    if (inner->get_subcommands().empty()) break;
    inner = inner->get_subcommands().front();
  }
  for (const CLI::App* command : inner->get_subcommands({})) {
    known.commands.push_back(command->get_name());
  }
  const std::string advice = suggestion(word, known);
  const char* const what = word.starts_with("-")    ? "unknown flag: "
                           : known.commands.empty() ? "unexpected argument: "
                                                    : "unknown command: ";
  return what + word + (advice.empty() ? "" : ". " + advice);
}

// What Device::set_option offers and somebody may want to try on a machine: MLXTAPE_METAL_SERIAL=1.
void set_device_options() {
  constexpr std::pair<const char*, const char*> kMetal[] = {
      {"MLXTAPE_METAL_OPS", "dispatches"},
      {"MLXTAPE_METAL_MB", "megabytes"},
      {"MLXTAPE_METAL_SERIAL", "serial"},
      {"MLXTAPE_METAL_RESIDENCY", "residency"}};
  for (const auto& [variable, option] : kMetal) {
    const char* text = std::getenv(variable);
    if (text == nullptr) continue;
    char* end = nullptr;
    const double value = std::strtod(text, &end);
    if (end == text || *end != '\0' || !(value >= 0)) {
      called_wrongly(std::string(variable) + " must be a number of 0 or more, got " + shown(text));
    }
    for (Device* device : Device::all()) {
      if (device->backend() == Backend::kMetal) device->set_option(option, value);
    }
  }
}

// What comes before the command that was asked for.
void start(const CLI::App& app, const Globals& globals) {
  const std::vector<std::string> unknown = app.remaining(true);
  if (!unknown.empty()) called_wrongly(unknown_text(app, unknown.front()));
  if (app.get_subcommands().empty()) called_wrongly("a command is required");
  set_threads(globals.threads);
  set_kernel_cache(cache_folder());
  if (!globals.cpu_target.empty()) cpu::limit_target(globals.cpu_target);
  set_device_options();
}

// "mlxtape bench ops", for "see mlxtape bench ops --help".
std::string path_of(const CLI::App& app) {
  std::string path = app.get_name();
  for (const CLI::App* inner = &app; !inner->get_subcommands().empty();) {
    inner = inner->get_subcommands().front();
    path += " " + inner->get_name();
  }
  return path;
}

void complain(const std::string& what) { remark("mlxtape: " + what); }

int fail_call(const CLI::App& app, const std::string& what) {
  complain(what + " (see " + path_of(app) + " --help)");
  return kCalledWrongly;
}

const char* advice(Errc code) {
  switch (code) {
    case Errc::kOutOfMemory:
      return " (shorter contexts, smaller batches and quantised weights need less; mlxtape inspect "
             "shows how much)";
    case Errc::kDevice: return " (mlxtape info lists the devices)";
    default: return "";
  }
}

int run(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return kDone;
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::RequiredError& e) {  // perhaps it is there, and has another name
    const std::vector<std::string> unknown = app.remaining(true);
    return fail_call(app, unknown.empty() ? e.what() : unknown_text(app, unknown.front()));
  } catch (const CLI::ParseError& e) {
    return fail_call(app, e.what());
  } catch (const Exit& e) {
    return e.code;
  } catch (const jobs::NotFinite& e) {
    complain(e.what());
  } catch (const Error& e) {
    if (e.code() == Errc::kArgument) return fail_call(app, e.what());
    complain(std::string(e.what()) + advice(e.code()));
  } catch (const std::bad_alloc&) {
    complain(std::string("out of memory") + advice(Errc::kOutOfMemory));
  } catch (const std::exception& e) {
    complain(e.what());
  }
  return kFailed;
}

// A closed stdin, stdout or stderr: its number must not become that of a model's file, which results would then be
// written to. What takes its place cannot be written.
void keep_standard_files() {
  for (int file = 0; file <= 2; ++file) {
    if (::fcntl(file, F_GETFD) == -1 && ::open("/dev/null", O_RDONLY) != file) std::exit(kFailed);
  }
  // A reader that left and a file that may grow no more are errors of writing, not the end of a job.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

// Is stdout a pipe that nobody reads any more?
bool reader_left() {
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  return ::poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0;
}

}  // namespace

int main(int argc, char** argv) {
  keep_standard_files();
  tell_bus_errors();
  Globals globals;
  globals.arguments.assign(argv, argv + argc);
  for (int i = 0; i < argc; ++i) globals.command_line += (i == 0 ? "" : " ") + std::string(argv[i]);

  CLI::App app{"train, fine-tune, distil, quantise and run MLX-format language models.", "mlxtape"};
  set_help(app);
  app.footer(kFooter);
  app.set_version_flag("--version", std::string(MLXTAPE_VERSION) + " (" + MLXTAPE_COMMIT + ")",
                       "print the version");
  app.require_subcommand(0, 1);
  app.allow_extras();  // reported by start, by name
  app.fallthrough();   // global flags may also follow the command
  app.option_defaults()->always_capture_default();
  // Of a flag that is given twice the last counts: a command line is changed by adding to it.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_global_flags(app, globals);
  app.parse_complete_callback([&] { start(app, globals); });

  add_demo(app, globals);
  add_generate(app, globals);
  add_chat(app, globals);
  add_new(app, globals);
  add_train(app, globals);
  add_lora(app, globals);
  add_fuse(app, globals);
  add_convert(app, globals);  // and quantize
  add_dwq(app, globals);
  add_dynamic_quant(app, globals);
  add_eval(app, globals);  // and perplexity
  add_compare(app, globals);
  add_inspect(app, globals);
  add_info(app, globals);
  add_kernels(app, globals);
  add_bench(app, globals);
  add_selftest(app, globals);
  add_completion(app, globals);
  add_man(app, globals);

  refuse_empty_paths(app);
  int status = run(app, argc, argv);
  std::cout.flush();
  if ((std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout) && status != kFailed) {
    if (reader_left()) return status;  // it has seen enough (head), and needs no word of it
    std::fprintf(stderr, "mlxtape: cannot write to stdout\n");
    status = kFailed;
  }
  return status;
}
