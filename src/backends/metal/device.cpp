// Metal devices: Apple GPUs, whose memory is the host's.
//
// One stream and one pool for all encoders of a device, so a block of memory that goes back to the pool may be given out
// again at once: whoever uses it next comes later on the stream.
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/metal/choose.h"
#include "backends/metal/encoder.h"
#include "backends/metal/memory.h"
#include "backends/metal/source_kernel.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/mapped_ranges.h"
#include "mlxtape/core/device.h"

namespace mlxtape::metal {

namespace {

// macOS 15 brought residency sets and math modes together.
bool is_modern() { return objc_getClass("MTLResidencySetDescriptor") != nullptr; }

// What the pool may use: the driver fails in the middle of the work where there is no more, and others need some.
std::size_t memory_limit(std::size_t working_set) {
  constexpr std::size_t kOthers = std::size_t{2} << 30;
  return working_set > 2 * kOthers ? working_set - kOthers : working_set / 2;
}

// Everything that exists once the device is used.
struct Started {
  Started(Device& device, Id found, std::size_t limit)
      : machine(found, is_modern()),
        uploads(machine),
        downloads(machine),
        pool(device, std::make_unique<DeviceMemory>(machine)) {
    pool.set_limit(limit);
  }
  Machine machine;
  Uploads uploads;
  Downloads downloads;
  MemoryPool pool;
};

// Pages of a file that kernels read where it is mapped.
struct AdoptedStorage : Storage {
  Machine* machine = nullptr;
  Block* block = nullptr;
  Buffer host;  // what keeps the file mapped

  static void let_go(Storage* storage) noexcept {
    const std::unique_ptr<AdoptedStorage> self(static_cast<AdoptedStorage*>(storage));
    // The file must stay mapped until the GPU has read what it was told to.
    try {
      self->machine->stream.wait_for(self->block->last_use);
    } catch (const Error&) {  // the device is lost and reads no more
    }
    self->machine->stream.residency().forget(*self->block);
    self->machine->stream.bury(self->machine->blocks.remove(*self->block));
  }
};

class MetalDevice final : public Device {
 public:
  MetalDevice(Id device, std::string others)
      : device_(Retained::share(device)),
        name_("metal: " + device_name(device)),
        others_(std::move(others)) {
    limits_.memory_bytes = recommended_working_set(device);
    traits_.pack_bytes = 16;
    traits_.captures_steps = true;
    traits_.logits_bytes = std::int64_t{256} << 20;
  }

  Backend backend() const override { return Backend::kMetal; }
  const std::string& name() const override { return name_; }
  const DeviceLimits& limits() const override { return limits_; }
  const DeviceTraits& traits() const override { return traits_; }
  std::vector<std::pair<std::string, std::string>> details() const override;

  void set_overlap(bool on) override {
    change([on](StreamOptions& options) { options.overlap = on; });
  }
  void set_option(const std::string& name, double value) override;
  const Kernel& add_kernel(const SourceKernel& kernel) override {
    return add_source_kernel(kernel);
  }
  MemoryPool& memory() override { return started().pool; }
  std::unique_ptr<CommandEncoder> make_encoder() override {
    Started& s = started();
    return metal::make_encoder(*this, s.machine, s.uploads, s.downloads);
  }
  Buffer adopt(const Buffer& host) override;

 private:
  Started& started() {
    const std::lock_guard lock(mutex_);
    if (!started_) {
      started_ =
          std::make_unique<Started>(*this, device_.get(), memory_limit(limits_.memory_bytes));
      started_->machine.stream.set(options_);
    }
    return *started_;
  }
  // Of a device that nobody uses yet, for when it starts.
  template <class Change>
  void change(const Change& change) {
    const std::lock_guard lock(mutex_);
    change(options_);
    if (started_) started_->machine.stream.set(options_);
  }

  Retained device_;
  std::string name_;
  std::string others_;  // GPUs beside it that cannot be used, and why
  DeviceLimits limits_;
  DeviceTraits traits_;
  std::mutex mutex_;
  StreamOptions options_;
  std::unique_ptr<Started> started_;
};

std::vector<std::pair<std::string, std::string>> MetalDevice::details() const {
  const AutoreleasePool pool;
  const auto megabytes = [](unsigned long long bytes) {
    return std::to_string(bytes >> 20U) + " MiB";
  };
  std::vector<std::pair<std::string, std::string>> all = {
      {"architecture", architecture(device_.get())},
      {"largest buffer", megabytes(max_buffer_length(device_.get()))},
      {"memory of a threadgroup", std::to_string(max_group_memory(device_.get())) + " bytes"},
      {"residency sets", is_modern() ? "yes" : "no: they need macOS 15"}};
  if (!others_.empty()) all.emplace_back("GPUs not used", others_);
  return all;
}

void MetalDevice::set_option(const std::string& name, double value) {
  static const std::map<std::string, double StreamOptions::*> kNumbers = {
      {"dispatches", &StreamOptions::dispatches},
      {"first_dispatches", &StreamOptions::first_dispatches},
      {"megabytes", &StreamOptions::megabytes},
      {"seconds", &StreamOptions::seconds},
      {"dispatch_seconds", &StreamOptions::dispatch_seconds},
      {"patience_seconds", &StreamOptions::patience_seconds}};
  static const std::map<std::string, bool StreamOptions::*> kSwitches = {
      {"serial", &StreamOptions::serial},
      {"strict", &StreamOptions::strict},
      {"residency", &StreamOptions::residency}};
  if (const auto found = kNumbers.find(name); found != kNumbers.end()) {
    if (!(value > 0)) {
      throw Error(Errc::kArgument, "device: option " + name + " must be greater than 0, got " +
                                       std::to_string(value));
    }
    change([&](StreamOptions& options) { options.*found->second = value; });
  } else if (const auto on = kSwitches.find(name); on != kSwitches.end()) {
    change([&](StreamOptions& options) { options.*on->second = value != 0; });
  } else {
    Device::set_option(name, value);
  }
}

Buffer MetalDevice::adopt(const Buffer& host) {
  constexpr std::uintptr_t kPage = 16384;
  constexpr std::uintptr_t kPack = 16;
  const auto begin = reinterpret_cast<std::uintptr_t>(host.address());
  if (host.bytes() == 0 || begin % kPack != 0 || mapped_file_at(host.address()) == nullptr) {
    return {};
  }
  Machine& machine = started().machine;
  const std::uintptr_t first = begin / kPage * kPage;
  const std::uintptr_t end = (begin + host.bytes() + kPage - 1) / kPage * kPage;
  if (end - first > max_buffer_length(device_.get())) return {};
  const AutoreleasePool pool;
  Retained buffer = new_buffer_on(device_.get(), reinterpret_cast<void*>(first), end - first);
  if (!buffer) return {};
  auto storage = std::make_unique<AdoptedStorage>();
  const auto* address = static_cast<const char*>(host.address());
  storage->block =
      &machine.blocks.add({address, address + host.bytes()}, std::move(buffer), begin - first);
  machine.stream.residency().collect(*storage->block);
  storage->machine = &machine;
  storage->host = host;
  storage->address = host.address();
  storage->bytes = storage->capacity = host.bytes();
  storage->device = this;
  storage->is_foreign = true;
  storage->release = AdoptedStorage::let_go;
  return Buffer(storage.release());
}

}  // namespace

void register_metal_devices(std::vector<Device*>& devices, std::vector<AbsentDevice>& absent) {
  const AutoreleasePool pool;
  const Retained all = Retained::adopt(MTLCopyAllDevices());
  std::vector<GpuFacts> facts;
  for (unsigned long i = 0; all && i < count(all.get()); ++i) {
    const Id gpu = object_at(all.get(), i);
    facts.push_back(
        {device_name(gpu), supports_family(gpu, kFamilyApple7), has_unified_memory(gpu)});
  }
  const GpuChoice choice = choose_gpus(facts);
  for (const std::size_t i : choice.usable) {  // they live as long as the process
    devices.push_back(new MetalDevice(object_at(all.get(), i), choice.others));
  }
  if (choice.usable.empty()) {
    absent.push_back(
        {Backend::kMetal, choice.others.empty() ? "no GPU that Metal knows" : choice.others});
  }
}

}  // namespace mlxtape::metal
