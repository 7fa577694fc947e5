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

CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& sentence,
                      const std::string& examples) {
  return app.add_subcommand(name, sentence)->footer(examples);
}

void called_wrongly(const std::string& what) { throw Error(Errc::kArgument, what); }

}  // namespace mlxtape::cli
