// What goes wrong on a Metal device, and what is said of it: failures that the emulator makes on order.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "backends/metal/emulator/control.h"
#include "backends/metal/machine.h"
#include "backends/metal/memory.h"
#include "backends/metal/transfers.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/core/source_kernel.h"
#include "support/op_test.h"
#include "support/temp_folder.h"

namespace mlxtape::metal {

void register_metal_devices(std::vector<Device*>& devices, std::vector<AbsentDevice>& absent);

namespace {

using emulator::inject;
using test::expect_error;

Id first_device() {
  static const Retained all = Retained::adopt(MTLCopyAllDevices());
  return object_at(all.get(), 0);
}

// Each with a machine of its own, which is never destroyed: a thread may wait for it for good.
struct MetalFailures : testing::Test {
  Machine& machine = *new Machine(first_device(), true);
  DeviceMemory& memory = *new DeviceMemory(machine);
  char* room = allocate(1U << 20U);

  ~MetalFailures() override { inject(""); }
  char* allocate(std::size_t bytes) {
    bool is_zero = false;
    return static_cast<char*>(memory.allocate(bytes, is_zero));
  }
  Range part(std::size_t i) const { return {room + 4096 * i, room + 4096 * (i + 1)}; }
  void work() {
    fill(machine, part(0), 1);
    move(machine, part(0), part(1));
  }
  void with(void (*change)(StreamOptions&)) {
    StreamOptions options = machine.stream.options();
    change(options);
    machine.stream.set(options);
  }
  // From the first failure on whoever comes hears of it.
  void expect_lost(Errc code, const std::string& says) {
    expect_error(code, says, [&] { machine.stream.wait(); });
    expect_error(code, says, [&] { machine.stream.wait(); });
    expect_error(code, says, [&] { machine.stream.commit(); });
    expect_error(code, says, [&] { work(); });
    expect_error(code, says, [&] { allocate(4096); });
    expect_error(code, "this process cannot use the device any more",
                 [&] { machine.stream.check(); });
  }
};

TEST_F(MetalFailures, AKernelThatTakesTooLongIsNamed) {
  inject("timeout:1");
  work();
  expect_lost(Errc::kBackend,
              "in one of fill_u8, move_u8 (with the option serial it is known which); a kernel ran "
              "for so long that the system ended it");
}

TEST_F(MetalFailures, WithTheOptionSerialItIsKnownWhich) {
  with([](StreamOptions& options) { options.serial = true; });
  inject("page:2");
  work();
  expect_lost(Errc::kBackend, " in move_u8; ");
}

TEST_F(MetalFailures, ACommandBufferWithoutMemorySaysWhatToDo) {
  inject("memory:1");
  work();
  expect_lost(Errc::kOutOfMemory, "sysctl iogpu.wired_limit_mb");
}

TEST_F(MetalFailures, ALaterFailureIsNotBlamedOnAnEarlierKernel) {
  with([](StreamOptions& options) { options.first_dispatches = 1; });
  fill(machine, part(0), 1);
  machine.stream.wait();
  inject("ignored:1");
  move(machine, part(0), part(1));
  expect_lost(Errc::kBackend, " in move_u8;");
}

TEST_F(MetalFailures, AGpuThatHangsIsGivenUp) {
  with([](StreamOptions& options) { options.patience_seconds = 1; });
  inject("hang:1");
  work();
  expect_lost(Errc::kBackend, "the GPU must make progress, got none for 1 s in one of fill_u8");
}

TEST_F(MetalFailures, ABufferThatCannotBeMadeIsNoBlock) {
  const std::size_t before = machine.blocks.size();
  inject("allocation:1");
  EXPECT_EQ(allocate(1U << 20U), nullptr);
  EXPECT_EQ(machine.blocks.size(), before);
  EXPECT_NE(allocate(1U << 20U), nullptr);
}

TEST_F(MetalFailures, ATextThatDoesNotCompileIsTriedAgain) {
  inject("library:1");
  expect_error(Errc::kBackend, "the kernels of memory_kernels.metal must compile, got",
               [&] { work(); });
  inject("pipeline:1");
  expect_error(Errc::kBackend, "fill_bytes must compile, got", [&] { work(); });
  work();
  machine.stream.wait();
  EXPECT_EQ(room[4096], 1);
}

TEST_F(MetalFailures, WithoutAUsableGpuThereIsAReason) {
  const auto reason = [](const char* fault) {
    inject(fault);
    std::vector<Device*> devices;
    std::vector<AbsentDevice> absent;
    register_metal_devices(devices, absent);
    inject("");
    EXPECT_TRUE(devices.empty());
    return absent.size() == 1 && absent[0].backend == Backend::kMetal ? absent[0].reason : "";
  };
  EXPECT_EQ(reason("devices:0"), "no GPU that Metal knows");
  EXPECT_NE(reason("family:1006").find("is not an Apple GPU of the M1's family"),
            std::string::npos);
}

// What the system compiled is kept for the next process, and made again where the file is of no use.
TEST_F(MetalFailures, PipelinesAreKeptOnDisk) {
  const test::TempFolder folder;
  const std::string before = kernel_cache();
  set_kernel_cache((folder.path / "kernels").string());
  work();
  machine.library.save();
  const std::filesystem::path kept = folder.path / "kernels";
  std::vector<std::filesystem::path> files(std::filesystem::directory_iterator(kept), {});
  ASSERT_EQ(files.size(), 1U);
  const auto written = std::filesystem::last_write_time(files[0]);
  const auto work_again = [&] {
    auto& next = *new Machine(first_device(), true);
    auto& its_memory = *new DeviceMemory(next);
    bool is_zero = false;
    const auto* bytes = static_cast<char*>(its_memory.allocate(1U << 20U, is_zero));
    fill(next, {bytes, bytes + 4096}, 5);
    next.stream.wait();
    EXPECT_EQ(bytes[4095], 5);
    next.library.save();
  };
  work_again();
  EXPECT_EQ(std::filesystem::last_write_time(files[0]), written);  // nothing was new
  test::put(files[0].string(), "damaged");
  work_again();
  std::string first(6, ' ');
  std::ifstream(files[0]).read(first.data(), 6);
  EXPECT_NE(first, "damage");
  set_kernel_cache(before);
}

// macOS 14: no sets, so that each use of an address must name its memory.
TEST(MetalSystem, OlderSystemsHaveNoResidencySets) {
  inject("system:14");
  std::vector<Device*> devices;
  std::vector<AbsentDevice> absent;
  register_metal_devices(devices, absent);
  ASSERT_EQ(devices.size(), 1U);
  const auto encoder = devices[0]->make_encoder();
  const Tensor x = encoder->full({3000000}, DType::kF32, 2);
  encoder->add_into(x, x);
  std::vector<float> got(3000000);
  encoder->download(x, got.data(), x.bytes());
  EXPECT_EQ(got[2999999], 4);
  EXPECT_EQ(devices[0]->details()[3].second, "no: they need macOS 15");
  inject("");
}

TEST(MetalSystem, WorkLeavesNoObjectsBehind) {
  Device& device = Device::find(Backend::kMetal);
  const auto work = [&] {
    const auto encoder = device.make_encoder();
    for (int i = 0; i < 50; ++i) {
      const Tensor x = encoder->full({100000 + i}, DType::kF32, 2);
      encoder->add_into(x, x);
      if (i % 10 == 0) encoder->begin_download(x)->wait();
    }
    encoder->commit_and_wait();
    device.memory().trim();
  };
  work();
  const auto before = emulator::live_objects();
  for (int i = 0; i < 3; ++i) work();
  EXPECT_EQ(emulator::live_objects(), before);
}

}  // namespace
}  // namespace mlxtape::metal
