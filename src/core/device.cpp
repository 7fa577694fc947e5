#include "mlxtape/core/device.h"

#include <mutex>

#include "mlxtape/base/checked.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/core/source_kernel.h"

namespace mlxtape {

namespace {

std::size_t bytes_or_throw(const Shape& shape, DType dtype) {
  const auto count = element_count(shape);
  const auto bytes =
      count ? checked_mul(*count, static_cast<std::int64_t>(size_of(dtype))) : std::nullopt;
  if (!bytes) {
    throw Error(Errc::kShape,
                "device: a tensor must have dimensions of 0 or more and fit in 2^63 "
                "bytes, got " +
                    to_string(shape) + " " + name_of(dtype));
  }
  return static_cast<std::size_t>(*bytes);
}

}  // namespace

namespace {

struct Found {
  std::vector<Device*> devices;
  std::vector<AbsentDevice> absent;
};

const Found& found() {
  // Never destroyed, as the devices in it are not.
  static const Found* const all = [] {
    auto list = std::make_unique<Found>();
    register_all_devices(list->devices, list->absent);
    return list.release();
  }();
  return *all;
}

}  // namespace

const std::vector<Device*>& Device::all() { return found().devices; }
const std::vector<AbsentDevice>& Device::absent() { return found().absent; }

Device& Device::cpu() { return *all().front(); }

Device& Device::best() { return all().size() > 1 ? *all()[1] : cpu(); }

Device& Device::find(const std::string& backend) {
  for (std::size_t i = 0; i < kBackendCount; ++i) {
    if (backend == name_of(static_cast<Backend>(i))) return find(static_cast<Backend>(i));
  }
  throw Error(Errc::kArgument,
              "device: must be cpu, cuda or metal, got \"" + shown(backend) + "\"");
}

Device& Device::find(Backend backend) {
  std::string names;
  for (Device* device : all()) {
    if (device->backend() == backend) return *device;
    names += (names.empty() ? "" : ", ") + device->name();
  }
  for (const AbsentDevice& absent : Device::absent()) {
    if (absent.backend == backend) names += "; " + absent.reason;
  }
  throw Error(Errc::kDevice, std::string("device: ") + name_of(backend) +
                                 " must exist on this machine, got only " + names);
}

std::unique_ptr<CommandEncoder> Device::make_encoder_on(void*) {
  throw Error(Errc::kDevice,
              "device: an encoder for a queue needs a device with queues, got " + name());
}

namespace {

struct KernelCache {
  std::mutex mutex;
  std::string folder;
};
KernelCache& the_kernel_cache() {
  static KernelCache cache;
  return cache;
}

}  // namespace

void set_kernel_cache(const std::string& folder) {
  const std::lock_guard lock(the_kernel_cache().mutex);
  the_kernel_cache().folder = folder;
}

std::string kernel_cache() {
  const std::lock_guard lock(the_kernel_cache().mutex);
  return the_kernel_cache().folder;
}

void Device::set_option(const std::string& option, double) {
  throw Error(Errc::kArgument, "device: " + name() + " has no option " + shown(option));
}

Buffer Device::adopt(const Buffer&) { return {}; }

const Kernel& Device::add_kernel(const SourceKernel& kernel) {
  throw Error(Errc::kDevice, "device: kernel " + kernel.name +
                                 " comes as source, which needs a cuda or metal device, got " +
                                 name());
}

// A tensor without elements still belongs to its device, so it holds the smallest block.
Tensor Device::zeros(Shape shape, DType dtype) {
  return {memory().allocate_zeroed(std::max<std::size_t>(bytes_or_throw(shape, dtype), 1)), dtype,
          shape};
}

Tensor Device::empty(Shape shape, DType dtype) {
  return {memory().allocate(std::max<std::size_t>(bytes_or_throw(shape, dtype), 1)), dtype, shape};
}

}  // namespace mlxtape
