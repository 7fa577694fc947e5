// The cpu device: memory from the system, kernels run at once on the calling thread, which
// shares the work with the pool (mlxtape/core/threads.h).
#include "base/sanitizers.h"
#ifdef MT_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif
#include <sys/mman.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "backends/cpu/targets.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/core/threads.h"

namespace mlxtape::cpu {

namespace {

// Pages of 2 MiB spare the kernels' many streams most of their address-translation misses.
constexpr std::size_t kHugePage = std::size_t{2} << 20U;
constexpr std::size_t kAlignment = 64;

class SystemMemory final : public RawMemory {
 public:
  void* allocate(std::size_t bytes, bool& is_zero) override {
    is_zero = bytes >= kHugePage;
    if (is_zero) return map_aligned(bytes);
    // macOS gives nothing for a size that is no multiple of the alignment.
    return std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  void release(void* address, std::size_t bytes) noexcept override {
    if (bytes >= kHugePage) {
      munmap(address, bytes);
    } else {
      std::free(address);
    }
  }
  void fill(void* address, unsigned char value, std::size_t bytes) override {
    std::memset(address, value, bytes);
  }
  bool is_filled(const void* address, unsigned char value, std::size_t bytes) override {
    const auto* byte = static_cast<const unsigned char*>(address);
    return std::all_of(byte, byte + bytes, [=](unsigned char b) { return b == value; });
  }
#ifdef MT_ADDRESS_SANITIZER
  void close(const void* address, std::size_t bytes) noexcept override {
    __asan_poison_memory_region(address, bytes);
  }
  void open(const void* address, std::size_t bytes) noexcept override {
    __asan_unpoison_memory_region(address, bytes);
  }
#endif

 private:
  static void* map(std::size_t bytes) {
    void* const base =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return base == MAP_FAILED ? nullptr : base;
  }
#ifndef MADV_HUGEPAGE  // a system without pages of that size has nothing to gain from its alignment
  static void* map_aligned(std::size_t bytes) { return map(bytes); }
#else
  static void* map_aligned(std::size_t bytes) {
    const std::size_t all = bytes + kHugePage;
    void* const base = map(all);
    if (base == nullptr) return nullptr;
    // Cut off what lies before the first huge page and after the block.
    const auto start = reinterpret_cast<std::uintptr_t>(base);
    const std::uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
    const std::size_t before = aligned - start;
    if (before != 0) munmap(base, before);
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t kept = (bytes + page - 1) / page * page;
    auto* const block = static_cast<char*>(base) + before;
    if (all - before - kept != 0) munmap(block + kept, all - before - kept);
    madvise(block, kept, MADV_HUGEPAGE);  // advice: without huge pages it is slower, not wrong
    return block;
  }
#endif
};

std::string processor_name() {
#ifdef __APPLE__
  char brand[128] = {};
  std::size_t size = sizeof brand - 1;
  if (sysctlbyname("machdep.cpu.brand_string", brand, &size, nullptr, 0) == 0) return brand;
#endif
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

// Launches as they were given, arguments copied.
struct CpuGraph final : Graph {
  struct Node {
    const Kernel* kernel;
    KernelCall call;
    std::vector<void*> addresses;
    std::vector<std::max_align_t> args;
  };
  std::vector<Node> list;

  void add(const Kernel& kernel, const KernelCall& call) {
    Node node{&kernel, call, {}, {}};
    node.addresses.assign(call.in.begin(), call.in.end());
    node.addresses.insert(node.addresses.end(), call.out.begin(), call.out.end());
    node.args.resize(ceil_div(static_cast<std::int64_t>(call.args_bytes),
                              static_cast<std::int64_t>(sizeof(std::max_align_t))));
    std::memcpy(node.args.data(), call.args, call.args_bytes);
    list.push_back(std::move(node));
  }

  void run() const {
    for (const Node& node : list) {
      KernelCall call = node.call;
      call.in = {node.addresses.data(), call.in.size()};
      call.out = {node.addresses.data() + call.in.size(), call.out.size()};
      call.args = node.args.data();
      try {
        node.kernel->fn(call);
      } catch (const std::exception& e) {
        throw Error(Errc::kBackend,
                    node.kernel->name + ": the kernel must not fail, got " + e.what());
      } catch (...) {
        throw Error(Errc::kBackend,
                    node.kernel->name + ": the kernel must not fail, got an exception");
      }
    }
  }
};

// Kernels have run when dispatch returns, so that the copy can be made at once.
class CpuDownload final : public PendingDownload {
 public:
  CpuDownload(const void* from, std::size_t bytes)
      : copy_(static_cast<const std::byte*>(from), static_cast<const std::byte*>(from) + bytes) {}
  const void* wait() override { return copy_.data(); }

 private:
  std::vector<std::byte> copy_;
};

class CpuEncoder final : public CommandEncoder {
 public:
  explicit CpuEncoder(Device& device) : CommandEncoder(device) {}

 private:
  void launch(const Kernel& kernel, const KernelCall& call) override {
    recording_ ? recording_->add(kernel, call) : kernel.fn(call);
  }
  void submit() override {}
  void wait() override {}
  void copy_in(const void* host, void* device, std::size_t bytes) override {
    std::memcpy(device, host, bytes);
  }
  void copy_out(const void* device, void* host, std::size_t bytes) override {
    std::memcpy(host, device, bytes);
  }
  std::unique_ptr<PendingDownload> begin_copy_out(const void* from, std::size_t bytes) override {
    return std::make_unique<CpuDownload>(from, bytes);
  }
  void start_recording() override { recording_ = std::make_unique<CpuGraph>(); }
  std::unique_ptr<Graph> finish_recording() override { return std::move(recording_); }
  void run_graph(const Graph& graph) override { static_cast<const CpuGraph&>(graph).run(); }

  std::unique_ptr<CpuGraph> recording_;
};

class CpuDevice final : public Device {
 public:
  CpuDevice()
      : name_("cpu: " + processor_name()), memory_(*this, std::make_unique<SystemMemory>()) {
    const auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES));
    limits_.memory_bytes = pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    limits_.compute_units = static_cast<int>(std::thread::hardware_concurrency());
    limits_.host_visible = true;
    traits_.uses_host_memory = true;
    traits_.quantized_rows = 32;  // kernels widen codes again for each 8 rows, so more share less
    traits_.dequantized_bytes = std::int64_t{1}
                                << 20;  // the last cache keeps them until the product reads them
    // 128 rows of 32768 or 256 of 16384 in f32: products of more rows are no quicker.
    traits_.logits_bytes = std::int64_t{16} << 20;
  }

  Backend backend() const override { return Backend::kCpu; }
  const std::string& name() const override { return name_; }
  const DeviceLimits& limits() const override { return limits_; }
  const DeviceTraits& traits() const override { return traits_; }
  std::vector<std::pair<std::string, std::string>> details() const override {
    std::string sets;
    for (const std::string& target : available_targets())
      sets += (sets.empty() ? "" : " ") + target;
    return {{"threads", std::to_string(threads())}, {"instruction sets", sets}};
  }
  MemoryPool& memory() override { return memory_; }
  std::unique_ptr<CommandEncoder> make_encoder() override {
    return std::make_unique<CpuEncoder>(*this);
  }

 private:
  std::string name_;
  DeviceLimits limits_;
  DeviceTraits traits_;
  MemoryPool memory_;
};

}  // namespace

void register_cpu_devices(std::vector<Device*>& devices, std::vector<AbsentDevice>&) {
  devices.push_back(new CpuDevice);  // lives as long as the process: tensors may outlive statics
}

}  // namespace mlxtape::cpu
