#include "backends/metal/source_kernel.h"

#include <map>
#include <memory>
#include <mutex>

#include "backends/metal/launch.h"
#include "mlxtape/base/error.h"

namespace mlxtape::metal {

namespace {

// What a Kernel's state points to; it lives as long as the registry.
struct Loaded {
  SourceKernel source;
  std::mutex mutex;
  std::map<const Machine*, std::unique_ptr<Pipeline>> pipelines;
};

void launch_source(const KernelCall& call) {
  auto& loaded = *const_cast<Loaded*>(static_cast<const Loaded*>(call.state));
  Machine& machine = *static_cast<const Target*>(call.queue)->machine;
  const Grid grid = loaded.source.grid(call);
  const Pipeline* pipeline = nullptr;
  {
    const std::lock_guard lock(loaded.mutex);
    std::unique_ptr<Pipeline>& here = loaded.pipelines[&machine];
    if (!here) here = machine.library.compile(loaded.source.source, loaded.source.entry);
    pipeline = here.get();
  }
  Launch launch(call, *pipeline);
  launch.buffers();
  if (grid.shared_bytes != 0) {
    launch.group_memory(static_cast<std::int64_t>(grid.shared_bytes));
  }
  launch.groups(grid.blocks[0], grid.blocks[1], grid.blocks[2])
      .threads(grid.threads[0], grid.threads[1], grid.threads[2])
      .run();
}

}  // namespace

const Kernel& add_source_kernel(const SourceKernel& kernel) {
  if (kernel.entry.empty() || kernel.source.empty() || !kernel.grid) {
    throw Error(Errc::kArgument,
                "add_kernel: " + kernel.name + " must have an entry, a source and a grid");
  }
  if (!kernel.options.empty()) {
    throw Error(Errc::kArgument, "add_kernel: " + kernel.name +
                                     " must have no options on metal, got " +
                                     kernel.options.front());
  }
  auto loaded = std::make_unique<Loaded>();
  loaded->source = kernel;
  KernelRegistry& registry = KernelRegistry::instance();
  registry.add(Backend::kMetal, kernel.name, launch_source, nullptr, loaded.get());
  static_cast<void>(loaded.release());
  return registry.find(Backend::kMetal, kernel.name);
}

}  // namespace mlxtape::metal
