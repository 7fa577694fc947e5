#include "mlxtape/core/device.h"

#include "mlxtape/base/checked.h"

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

const std::vector<Device*>& Device::all() {
  // Never destroyed, as the devices in it are not.
  static const std::vector<Device*>* const devices = [] {
    auto found = std::make_unique<std::vector<Device*>>();
    register_all_devices(*found);
    return found.release();
  }();
  return *devices;
}

Device& Device::cpu() { return *all().front(); }

Device& Device::find(Backend backend) {
  std::string names;
  for (Device* device : all()) {
    if (device->backend() == backend) return *device;
    names += (names.empty() ? "" : ", ") + device->name();
  }
  throw Error(Errc::kDevice, std::string("device: ") + name_of(backend) +
                                 " must exist on this machine, got only " + names);
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
