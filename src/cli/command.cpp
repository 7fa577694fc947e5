#include "command.h"

#include <CLI/CLI.hpp>

namespace mlxtape::cli {

namespace {

bool has(Backend backend) {
  for (const Device* device : Device::all()) {
    if (device->backend() == backend) return true;
  }
  return false;
}

Device& named(const std::string& name, Backend otherwise) {
  if (name == "cpu") return Device::cpu();
  if (name == "cuda") return Device::find(Backend::kCuda);
  return Device::find(otherwise);
}

}  // namespace

Device& Globals::device() const {
  return named(device_name, has(Backend::kCuda) ? Backend::kCuda : Backend::kCpu);
}

Device& Globals::device_or_cpu() const { return named(device_name, Backend::kCpu); }

std::string shell_word(const std::string& word) {
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

void called_wrongly(const std::string& what) { throw Error(Errc::kArgument, what); }

}  // namespace mlxtape::cli
