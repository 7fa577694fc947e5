// selftest: the ops' own tests, on the user's machine. They are a program of their own, mlxtape-selftest, beside this
// one: whoever does not ask for them needs no test library.
#include <CLI/CLI.hpp>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>

#include <unistd.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#endif

#include "command.h"

namespace mlxtape::cli {

namespace {

std::filesystem::path this_program() {
#ifdef __APPLE__
  std::uint32_t size = 0;
  _NSGetExecutablePath(nullptr, &size);
  std::string path(size, '\0');
  _NSGetExecutablePath(path.data(), &size);
  return std::filesystem::canonical(path.c_str());
#else
  return std::filesystem::read_symlink("/proc/self/exe");
#endif
}

void selftest(const Globals& globals, const std::string& filter) {
  const std::string tests = this_program().replace_filename("mlxtape-selftest").string();
  std::vector<std::string> words{tests, "--gtest_filter=" + filter,
                                 "--threads=" + std::to_string(globals.threads)};
  if (!globals.cpu_target.empty()) words.push_back("--cpu-target=" + globals.cpu_target);
  std::vector<char*> call;
  for (std::string& word : words) call.push_back(word.data());
  call.push_back(nullptr);
  // Ignored here, and would stay so in the other program.
  std::signal(SIGPIPE, SIG_DFL);
  std::signal(SIGXFSZ, SIG_DFL);
  ::execv(tests.c_str(), call.data());
  const int why = errno;
  if (why == ENOENT) {
    throw Error(Errc::kIo, "selftest: " + tests +
                               " does not exist; it is built with the tests: run make build, then "
                               "make install if mlxtape is installed");
  }
  throw Error(Errc::kIo, "selftest: " + tests + ": cannot be run: " + std::strerror(why));
}

}  // namespace

void add_selftest(CLI::App& app, const Globals& globals) {
  CLI::App* command =
      add_command(app, "selftest",
                  "check every kernel on this machine against its formula in double precision.",
                  "Example:\n  mlxtape selftest --filter '*Softmax*'");
  command->group("This machine");
  const auto filter = std::make_shared<std::string>("*");
  command->add_option("--filter", *filter, "only these tests, e.g. '*Softmax*'")
      ->type_name("PATTERN");
  command->callback([&globals, filter] { selftest(globals, *filter); });
}

}  // namespace mlxtape::cli
