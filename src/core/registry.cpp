#include "mlxtape/core/registry.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "core/op_kernels.h"

namespace mlxtape {

struct KernelRegistry::Impl {
  using Key = std::pair<Backend, std::string>;
  mutable std::shared_mutex mutex;
  std::map<Key, Kernel, std::less<>> kernels;  // a map: its nodes never move

  const Kernel* look(Backend backend, std::string_view name) const {
    const std::shared_lock lock(mutex);
    const auto it = kernels.find(Key(backend, name));
    return it == kernels.end() ? nullptr : &it->second;
  }
};

KernelRegistry::KernelRegistry() : impl_(std::make_unique<Impl>()) {}
KernelRegistry::~KernelRegistry() = default;

KernelRegistry& KernelRegistry::instance() {
  // Never destroyed: static tensors of the user may still be computed with at exit.
  static KernelRegistry& registry = []() -> KernelRegistry& {
    auto filled = std::make_unique<KernelRegistry>();
    for (const OpKernels& of_op : op_kernels()) of_op.add(*filled);
    return *filled.release();
  }();
  return registry;
}

void KernelRegistry::add(Backend backend, const std::string& name, KernelFn fn,
                         WorkspaceFn workspace, const void* state) {
  if (name.empty() || fn == nullptr) {
    throw Error(Errc::kArgument, "registry: a kernel must have a name and a function, got '" +
                                     name + "'" + (fn == nullptr ? " without a function" : ""));
  }
  const std::unique_lock lock(impl_->mutex);
  Impl::Key key(backend, name);
  if (!impl_->kernels.try_emplace(std::move(key), Kernel{backend, name, fn, workspace, state})
           .second) {
    throw Error(Errc::kArgument, "registry: a kernel is registered once, got a second " + name +
                                     " for " + name_of(backend));
  }
}

const Kernel& KernelRegistry::find(Backend backend, std::string_view name) const {
  const Kernel* kernel = impl_->look(backend, name);
  if (kernel == nullptr) {
    throw Error(Errc::kNoKernel, std::string("registry: ") + name_of(backend) +
                                     " must have the kernel asked for, got " + std::string(name));
  }
  return *kernel;
}

bool KernelRegistry::has(Backend backend, std::string_view name) const {
  return impl_->look(backend, name) != nullptr;
}

std::vector<std::string> KernelRegistry::names(Backend backend) const {
  const std::shared_lock lock(impl_->mutex);
  std::vector<std::string> found;
  for (const auto& [key, kernel] : impl_->kernels) {
    if (key.first == backend) found.push_back(key.second);
  }
  return found;
}

bool KernelHandle::exists(Backend backend, DType dtype) const {
  const auto& slot = found_[static_cast<std::size_t>(backend)][static_cast<std::size_t>(dtype)];
  if (slot.load(std::memory_order_acquire) != nullptr) return true;
  const std::string name = std::string(base_) + "_" + name_of(dtype);
  if (!KernelRegistry::instance().has(backend, name)) return false;
  static_cast<void>(look_up(backend, dtype));
  return true;
}

const Kernel& KernelHandle::look_up(Backend backend, DType dtype) const {
  const Kernel& kernel =
      KernelRegistry::instance().find(backend, std::string(base_) + "_" + name_of(dtype));
  found_[static_cast<std::size_t>(backend)][static_cast<std::size_t>(dtype)].store(
      &kernel, std::memory_order_release);
  return kernel;
}

}  // namespace mlxtape
