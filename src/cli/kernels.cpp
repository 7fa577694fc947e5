// kernels: a line per backend, op and kernel: "cpu softmax softmax_fwd f16 bf16 f32". Kernels of backends in the build,
// whether or not the machine has the device.
#include <CLI/CLI.hpp>

#include <map>
#include <optional>
#include <set>

#include "command.h"
#include "core/op_kernels.h"
#include "mlxtape/core/registry.h"
#include "output.h"

namespace mlxtape::cli {

namespace {

using formats::Json;

void list(const Globals& globals) {
  Json::Array all;
  for (const OpKernels& of_op : op_kernels()) {
    KernelRegistry registry;
    of_op.add(registry);
    std::map<std::string, std::set<DType>> types;
    for (const std::string& name : registry.names(of_op.backend)) {
      const std::size_t cut = name.rfind('_');
      const std::optional<DType> type = dtype_from_name(name.substr(cut + 1));
      if (!type) throw Error(Errc::kBackend, "kernels: a name must end in its type, got " + name);
      types[name.substr(0, cut)].insert(*type);
    }
    for (const auto& [kernel, of_kernel] : types) {
      std::string line = std::string(name_of(of_op.backend)) + " " + of_op.op + " " + kernel;
      Json::Array names;
      for (const DType type : of_kernel) {
        line += std::string(" ") + name_of(type);
        names.emplace_back(name_of(type));
      }
      if (!globals.json) print(line + "\n");
      all.emplace_back(Json::Object{{"backend", name_of(of_op.backend)},
                                    {"op", of_op.op},
                                    {"kernel", kernel},
                                    {"types", std::move(names)}});
    }
  }
  if (globals.json) print_json(all);
}

}  // namespace

void add_kernels(CLI::App& app, const Globals& globals) {
  add_command(app, "kernels", "list every kernel of this build: backend, op, name, types.",
              "Example:\n  mlxtape kernels | grep softmax")
      ->group("This machine")
      ->callback([&globals] { list(globals); });
}

}  // namespace mlxtape::cli
