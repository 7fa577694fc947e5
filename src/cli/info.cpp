// info: what this machine and this build have, and why a backend is absent.
#include <CLI/CLI.hpp>

#include "command.h"
#include "commit.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/models/architecture.h"
#include "output.h"

namespace mlxtape::cli {

namespace {

using formats::Json;

std::string compiler() {
#if defined(__clang__)
  return std::string("Clang ") + __clang_version__;
#elif defined(__GNUC__)
  return std::string("GCC ") + __VERSION__;
#else
  return "unknown";
#endif
}

Json of_device(Device& device) {
  Json result = Json::Object{
      {"backend", name_of(device.backend())},
      {"name", device.name()},
      {"memory_bytes", static_cast<std::int64_t>(device.limits().memory_bytes)},
      {"compute_units", device.limits().compute_units},
      {"kernels",
       static_cast<std::int64_t>(KernelRegistry::instance().names(device.backend()).size())}};
  Json details = Json::Object{};
  for (const auto& [what, value] : device.details()) details.set(what, value);
  result.set("details", std::move(details));
  return result;
}

// What models may have, as Config checks it.
Json limits() {
  return Json::Object{{"architectures", models::architecture_names()},
                      {"weights",
                       "f32, f16, bf16; quantised to 2, 3, 4, 5, 6 or 8 bits in groups of "
                       "32, 64 or 128"}};
}

Json everything() {
  Json::Array devices, absent;
  for (Device* device : Device::all()) devices.push_back(of_device(*device));
  for (const AbsentDevice& one : Device::absent()) {
    absent.emplace_back(Json::Object{{"backend", name_of(one.backend)}, {"reason", one.reason}});
  }
  return Json::Object{{"version", MLXTAPE_VERSION},  {"commit", MLXTAPE_COMMIT},
                      {"compiler", compiler()},      {"devices", std::move(devices)},
                      {"absent", std::move(absent)}, {"limits", limits()}};
}

std::string text(const Json& value) {
  if (value.is_string()) return value.string();
  if (!value.is_array()) return value.dump();
  std::string all;
  for (const Json& one : value.array()) all += (all.empty() ? "" : " ") + text(one);
  return all;
}

void info(const Globals& globals) {
  const Json all = everything();
  if (globals.json) return print_json(all);
  const auto get = [&](const char* key) {
    return text(*all.find(key));
  };
  print("mlxtape " + get("version") + " (" + get("commit") + "), " + get("compiler") + "\n");
  for (const Json& device : all.find("devices")->array()) {
    const std::string backend = text(*device.find("backend"));
    print("\n" + text(*device.find("name")) + "\n");
    Facts facts;
    facts.add("  memory", human_bytes(device.find("memory_bytes")->number()));
    // Metal does not tell how many there are.
    if (backend != "metal") {
      facts.add(backend == "cuda" ? "  multiprocessors" : "  cores",
                text(*device.find("compute_units")));
    }
    facts.add("  kernels", text(*device.find("kernels")));
    for (const auto& [what, value] : device.find("details")->object()) {
      facts.add("  " + what, text(value));
    }
    print(facts.text());
  }
  for (const Json& one : all.find("absent")->array()) {
    print("\n" + text(*one.find("backend")) + ": not available, " + text(*one.find("reason")) +
          "\n");
  }
  print("\nmodels\n");
  Facts facts;
  for (const auto& [what, value] : all.find("limits")->object())
    facts.add("  " + what, text(value));
  print(facts.text());
}

}  // namespace

void add_info(CLI::App& app, const Globals& globals) {
  add_command(app, "info",
              "show what this machine and this build have: devices, memory, instruction sets, "
              "versions, and why a backend is not available.",
              "Example:\n  mlxtape info --json")
      ->group("This machine")
      ->callback([&globals] { info(globals); });
}

}  // namespace mlxtape::cli
