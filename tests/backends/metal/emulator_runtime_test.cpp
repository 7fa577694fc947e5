// The runtime that host code talks to: the objects of Metal, when work runs, what is injected, what is refused.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "backends/metal/calls.h"
#include "backends/metal/emulator/control.h"
#include "backends/metal/emulator/library.h"
#include "backends/metal/library.h"

extern "C" void mlxtape_metal_extent(objc_object* encoder, unsigned long index,
                                     unsigned long before, unsigned long after);

namespace mlxtape::metal::texts {
extern const Text emulator_language, emulator_matrices, emulator_rows;
}

namespace mlxtape::emulator::test {
namespace {

using namespace mlxtape::metal;
constexpr metal::Size kOne{1, 1, 1};

// A device with a queue, and kernels of emulator_rows.metal.
class Gpu {
 public:
  Gpu() {
    const Retained devices = Retained::adopt(MTLCopyAllDevices());
    if (count(devices.get()) == 0) return;
    device = Retained::share(object_at(devices.get(), 0));
    queue = new_queue(device.get());
  }
  Retained library(Id* error = nullptr, const Text& source = texts::emulator_rows) const {
    const Retained options = make("MTLCompileOptions");
    set_language_version(options.get(), language_version(3, 1));
    set_math_mode(options.get(), kMathSafe);
    set_math_functions(options.get(), kFunctionsPrecise);
    Id unused = nullptr;
    return new_library(device.get(), text(source.source), options.get(),
                       error != nullptr ? error : &unused);
  }
  Retained pipeline(const char* name, Id* error = nullptr,
                    const Text& source = texts::emulator_rows) const {
    Id unused = nullptr;
    const Retained constants = make("MTLFunctionConstantValues");
    const Retained function =
        new_function(library(nullptr, source).get(), name, constants.get(), &unused);
    return new_pipeline(device.get(), function.get(), error != nullptr ? error : &unused);
  }
  Retained buffer(const std::vector<float>& values) const {
    Retained b = new_buffer(device.get(), values.size() * sizeof(float));
    std::memcpy(contents(b.get()), values.data(), values.size() * sizeof(float));
    return b;
  }

  Retained device, queue;
};

std::vector<float> values_of(Id buffer) {
  const auto* begin = static_cast<const float*>(contents(buffer));
  return {begin, begin + length(buffer) / sizeof(float)};
}

// One command buffer with one encoder.
class Commands {
 public:
  explicit Commands(const Gpu& gpu)
      : buffer(Retained::share(command_buffer(gpu.queue.get()))),
        encoder(Retained::share(compute_encoder(buffer.get()))) {}
  Commands& run(Id pipeline, Id data, unsigned long threads) {
    set_pipeline(encoder.get(), pipeline);
    set_buffer(encoder.get(), data, 0, 0);
    dispatch_groups(encoder.get(), kOne, {threads, 1, 1});
    return *this;
  }
  Commands& end() {
    end_encoding(encoder.get());
    commit(buffer.get());
    return *this;
  }
  void wait() { wait_until_completed(buffer.get()); }

  Retained buffer, encoder;
};

class EmulatorRuntime : public testing::Test {
 protected:
  void SetUp() override {
    Retained::adopt(MTLCopyAllDevices());  // the device stays
    before_ = live_objects();
    pool_ = objc_autoreleasePoolPush();
  }
  void TearDown() override {
    objc_autoreleasePoolPop(pool_);
    inject("");
    set_seed(0);
    EXPECT_EQ(live_objects(), before_) << "objects leaked";
  }

 private:
  std::map<std::string, long> before_;
  void* pool_ = nullptr;
};
using EmulatorRuntimeDeathTest = EmulatorRuntime;

TEST_F(EmulatorRuntime, RunsAKernel) {
  const Gpu gpu;
  EXPECT_EQ(device_name(gpu.device.get()), "Apple M1 (emulated)");
  EXPECT_EQ(architecture(gpu.device.get()), "applegpu_g13g");
  EXPECT_TRUE(supports_family(gpu.device.get(), kFamilyApple7));
  const Retained add = gpu.pipeline("add_one");
  const Retained data = gpu.buffer({1, 2, 3, 4});
  Commands commands(gpu);
  commands.run(add.get(), data.get(), 4).end().wait();
  EXPECT_EQ(status(commands.buffer.get()), kStatusCompleted);
  EXPECT_EQ(error_of(commands.buffer.get()), nullptr);
  EXPECT_EQ(values_of(data.get()), (std::vector<float>{2, 3, 4, 5}));
  EXPECT_LE(gpu_start(commands.buffer.get()), gpu_end(commands.buffer.get()));
}

TEST_F(EmulatorRuntime, TheHostsAddressIsNotTheGpus) {
  const Gpu gpu;
  const Retained data = gpu.buffer({7});
  const auto* there = reinterpret_cast<const float*>(gpu_address(data.get()));
  EXPECT_NE(there, contents(data.get()));
  EXPECT_EQ(*there, 7);
}

TEST_F(EmulatorRuntime, WorkRunsWhenItIsWaitedFor) {
  const Gpu gpu;
  const Retained add = gpu.pipeline("add_one");
  const Retained data = gpu.buffer({1});
  Commands commands(gpu);
  commands.run(add.get(), data.get(), 1).end();
  EXPECT_EQ(values_of(data.get()), std::vector<float>{1});
  EXPECT_LT(status(commands.buffer.get()), kStatusCompleted);
  static_cast<float*>(contents(data.get()))[0] = 10;  // too early: the kernel has not read it
  commands.wait();
  EXPECT_EQ(values_of(data.get()), std::vector<float>{11});
}

// With a seed it may run at once as well, so a host that relies on either is found.
TEST_F(EmulatorRuntime, ASeedRunsSomeWorkAtOnce) {
  set_seed(1);
  const Gpu gpu;
  const Retained add = gpu.pipeline("add_one");
  int at_once = 0;
  for (int i = 0; i < 64; ++i) {
    const Retained data = gpu.buffer({1});
    Commands commands(gpu);
    commands.run(add.get(), data.get(), 1).end();
    at_once += values_of(data.get())[0] == 2 ? 1 : 0;
    commands.wait();
    EXPECT_EQ(values_of(data.get())[0], 2);
  }
  EXPECT_GT(at_once, 4);
  EXPECT_LT(at_once, 60);
}

TEST_F(EmulatorRuntime, ALateWaitRunsWhatWasBefore) {
  const Gpu gpu;
  const Retained add = gpu.pipeline("add_one");
  const Retained data = gpu.buffer({0});
  Commands first(gpu), second(gpu), third(gpu);
  const Retained others = gpu.buffer({0});
  first.run(add.get(), data.get(), 1).end();
  second.run(add.get(), others.get(), 1).end();
  third.run(add.get(), data.get(), 1).end();
  second.wait();
  EXPECT_EQ(values_of(data.get()), std::vector<float>{1});
  EXPECT_EQ(status(first.buffer.get()), kStatusCompleted);
  EXPECT_LT(status(third.buffer.get()), kStatusCompleted);
  third.wait();
}

// ---- order: x = (0 + 1) / 2 or 0 / 2 + 1 ----

enum class Between { kNothing, kBarrier, kFence, kEncoders };
constexpr float kRefused = -1;  // by the checked build

float add_then_halve(std::uint64_t seed, Between between) {
  set_seed(seed);
  const Gpu gpu;
  const Retained add = gpu.pipeline("add_one"), halve = gpu.pipeline("halve");
  const Retained data = gpu.buffer({0}), fence = new_fence(gpu.device.get());
  Commands one(gpu), two(gpu);
  one.run(add.get(), data.get(), 1);
  if (between == Between::kFence) update_fence(one.encoder.get(), fence.get());
  if (between == Between::kFence) wait_for_fence(two.encoder.get(), fence.get());
  const bool together = between == Between::kNothing || between == Between::kBarrier;
  if (between == Between::kBarrier) barrier(one.encoder.get());
  (together ? one : two).run(halve.get(), data.get(), 1);
  one.end();
  two.end().wait();
  for (const Id buffer : {one.buffer.get(), two.buffer.get()}) {
    if (status(buffer) == kStatusCompleted) continue;
    const std::string why = description(error_of(buffer));
    EXPECT_NE(why.find("an earlier launch"), std::string::npos) << why;
    return kRefused;
  }
  return values_of(data.get())[0];
}

TEST_F(EmulatorRuntime, OnlyBarriersAndFencesOrderLaunches) {
  for (const Between between : {Between::kNothing, Between::kEncoders}) {
    int swapped = 0;
    const bool checked = find_kernel("halve")->is_checked;
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      const float x = add_then_halve(seed, between);
      EXPECT_EQ(x == kRefused, checked) << seed;
      swapped += x == 1 ? 1 : 0;
    }
    EXPECT_EQ(swapped > 3, !checked);
  }
  for (const Between between : {Between::kBarrier, Between::kFence}) {
    for (std::uint64_t seed = 0; seed < 40; ++seed)
      EXPECT_EQ(add_then_halve(seed, between), 0.5F) << seed;
  }
}

// ---- injected faults ----

TEST_F(EmulatorRuntime, InjectedErrorsOfCommandBuffers) {
  const struct {
    const char* fault;
    long code;
    const char* says;
  } rows[] = {{"timeout:2", 2, "Timeout"},
              {"memory:2", 8, "OutOfMemory"},
              {"page:2", 3, "PageFault"},
              {"interactivity:2", 1, "ImpactingInteractivity"},
              {"ignored:2", 4, "SubmissionsIgnored"}};
  for (const auto& row : rows) {
    inject(row.fault);
    const Gpu gpu;
    const Retained add = gpu.pipeline("add_one");
    const Retained data = gpu.buffer({0});
    for (int i = 1; i <= 3; ++i) {
      Commands commands(gpu);
      commands.run(add.get(), data.get(), 1).end().wait();
      EXPECT_EQ(status(commands.buffer.get()), i == 2 ? kStatusError : kStatusCompleted)
          << row.fault;
      if (i != 2) continue;
      const Id error = error_of(commands.buffer.get());
      EXPECT_EQ(code(error), row.code);
      EXPECT_EQ(domain(error), "MTLCommandBufferErrorDomain");
      EXPECT_NE(description(error).find(row.says), std::string::npos) << description(error);
    }
  }
}

TEST_F(EmulatorRuntime, InjectedRefusals) {
  inject("allocation:2,library:2,pipeline:1");
  const Gpu gpu;
  EXPECT_TRUE(new_buffer(gpu.device.get(), 16));
  EXPECT_FALSE(new_buffer(gpu.device.get(), 16));
  EXPECT_TRUE(new_buffer(gpu.device.get(), 16));
  Id error = nullptr;
  EXPECT_TRUE(gpu.library());
  EXPECT_FALSE(gpu.library(&error));
  EXPECT_NE(description(error).find("error:"), std::string::npos);
  EXPECT_FALSE(gpu.pipeline("add_one", &error));
  EXPECT_TRUE(gpu.pipeline("add_one"));
}

TEST_F(EmulatorRuntime, OtherDevicesAndSystems) {
  inject("devices:0");
  EXPECT_FALSE(Gpu().device);
  inject("family:1006,system:14");
  EXPECT_FALSE(supports_family(Gpu().device.get(), kFamilyApple7));
  EXPECT_EQ(objc_getClass("MTLResidencySetDescriptor"), nullptr);
  inject("");
  EXPECT_NE(objc_getClass("MTLResidencySetDescriptor"), nullptr);
}

TEST_F(EmulatorRuntime, WhatCannotBeMade) {
  const Gpu gpu;
  Id error = nullptr;
  const Retained options = make("MTLCompileOptions");
  set_language_version(options.get(), language_version(3, 1));
  set_math_mode(options.get(), kMathSafe);
  set_math_functions(options.get(), kFunctionsPrecise);
  EXPECT_FALSE(new_library(gpu.device.get(), text("kernel void x() {}"), options.get(), &error));
  EXPECT_NE(description(error).find("no compiler"), std::string::npos);
  const Retained constants = make("MTLFunctionConstantValues");
  EXPECT_FALSE(new_function(gpu.library().get(), "absent", constants.get(), &error));
  const int wrong = 1;
  set_constant(constants.get(), &wrong, ConstantType::kInt, 0);
  EXPECT_FALSE(new_function(gpu.library().get(), "norm_backward_f32", constants.get(), &error));
  EXPECT_EQ(description(error), "function constant 0 of norm_backward_f32 is a bool");
  EXPECT_FALSE(new_buffer(gpu.device.get(), max_buffer_length(gpu.device.get()) + 1));
}

TEST_F(EmulatorRuntime, ASeedDrawsHowManyThreadsAPipelineTakes) {
  const Gpu gpu;
  EXPECT_EQ(max_threads(gpu.pipeline("add_one").get()), 1024U);
  unsigned long least = 1024;
  for (std::uint64_t seed = 1; seed < 20; ++seed) {
    set_seed(seed);
    const Retained pipeline = gpu.pipeline("add_one");
    least = std::min(least, max_threads(pipeline.get()));
    const Retained data = gpu.buffer(std::vector<float>(1024));
    Commands commands(gpu);
    commands.run(pipeline.get(), data.get(), 1024).end().wait();
    EXPECT_EQ(status(commands.buffer.get()),
              max_threads(pipeline.get()) == 1024 ? kStatusCompleted : kStatusError);
  }
  EXPECT_EQ(least, 512U);
}

TEST_F(EmulatorRuntime, CountsByKernelAndKeepsToTheTime) {
  const Gpu gpu;
  const Retained sums = gpu.pipeline("twenty_sums");
  const Retained data = gpu.buffer(std::vector<float>(64));
  reset_counters();
  for (int i = 0; i < 3; ++i) Commands(gpu).run(sums.get(), data.get(), 64).end().wait();
  const Counters counted = counters()["twenty_sums"];
  EXPECT_EQ(counted.launches, 3U);
  EXPECT_EQ(counted.threads, 192U);
  EXPECT_EQ(counted.exchanges, 3U * 2 * 20);
  if (!find_kernel("twenty_sums")->is_checked) return;
  EXPECT_EQ(counted.bytes_first_read, 3U * 256);
}

TEST_F(EmulatorRuntime, ALaunchThatTakesAnM1TooLongIsAFault) {
  const Gpu gpu;
  const Retained product = gpu.pipeline("product_f32", nullptr, texts::emulator_matrices);
  const Retained a = gpu.buffer(std::vector<float>(32 * 32)),
                 c = gpu.buffer(std::vector<float>(32 * 32));
  const std::uint32_t sizes[] = {32, 32, 32};  // 64 products of 8x8: 44 ns of an M1
  const auto run = [&](int launches) {
    Commands commands(gpu);
    for (int i = 0; i < launches; ++i) {
      set_bytes(commands.encoder.get(), sizes, sizeof sizes, 3);
      set_buffer(commands.encoder.get(), a.get(), 0, 1);
      set_buffer(commands.encoder.get(), c.get(), 0, 2);
      commands.run(product.get(), a.get(), 128);
      barrier(commands.encoder.get());
    }
    commands.end().wait();
    return status(commands.buffer.get()) == kStatusCompleted
               ? ""
               : description(error_of(commands.buffer.get()));
  };
  EXPECT_EQ(run(3), "");
  set_time_limits(40e-9, 1);
  EXPECT_NE(run(1).find("product_f32: an M1 would need"), std::string::npos);
  set_time_limits(1, 100e-9);
  EXPECT_NE(run(3).find("for the command buffer so far"), std::string::npos);
  set_time_limits(0.05, 0.1);
}

// Addresses in a table reach what was named to the encoder, or lies in a set of the queue, and nothing else.
TEST_F(EmulatorRuntime, AddressesReachWhatIsResident) {
  if (!find_kernel("scale_all")->is_checked) GTEST_SKIP() << "the checked program finds it";
  enum class By { kNothing, kUse, kSet, kSetNotCommitted };
  for (const By by : {By::kNothing, By::kUse, By::kSet, By::kSetNotCommitted}) {
    const Gpu gpu;
    const Retained scale = gpu.pipeline("scale_all", nullptr, texts::emulator_language);
    const Retained x = gpu.buffer({1, 2, 3}), factor = gpu.buffer({2});
    const unsigned long long table[] = {gpu_address(x.get()), gpu_address(x.get()),
                                        gpu_address(x.get()), gpu_address(factor.get())};
    if (by == By::kSet || by == By::kSetNotCommitted) {
      Id error = nullptr;
      const Retained set =
          new_residency_set(gpu.device.get(), make("MTLResidencySetDescriptor").get(), &error);
      for (const Id buffer : {x.get(), factor.get()}) add_allocation(set.get(), buffer);
      if (by == By::kSet) metal::commit(set.get());
      add_residency_set(gpu.queue.get(), set.get());
    }
    Commands commands(gpu);
    set_pipeline(commands.encoder.get(), scale.get());
    set_bytes(commands.encoder.get(), table, sizeof table, 0);
    if (by == By::kUse) {
      use_resource(commands.encoder.get(), x.get());
      use_resource(commands.encoder.get(), factor.get());
    }
    dispatch_groups(commands.encoder.get(), kOne, {3, 1, 1});
    commands.end().wait();
    const bool reached = by == By::kUse || by == By::kSet;
    EXPECT_EQ(status(commands.buffer.get()), reached ? kStatusCompleted : kStatusError);
    EXPECT_EQ(values_of(x.get())[2], reached ? 6 : 3);
  }
}

// ---- misuse ends the program ----

TEST_F(EmulatorRuntimeDeathTest, Misuse) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto encoded = [](auto&& use) {
    const AutoreleasePool pool;
    const Gpu gpu;
    const Retained add = gpu.pipeline("add_one"), data = gpu.buffer({0});
    Commands commands(gpu);
    use(gpu, commands, add.get(), data.get());
  };
  const char bytes[5000] = {};
  EXPECT_DEATH(
      encoded([](auto&, auto& c, Id, Id data) { set_buffer(c.encoder.get(), data, 0, 31); }),
      "there are 31 buffers");
  EXPECT_DEATH(
      encoded([](auto&, auto& c, Id, Id data) { set_buffer(c.encoder.get(), data, 8, 0); }),
      "offset 8 of a buffer of 4");
  EXPECT_DEATH(encoded([&](auto&, auto& c, Id, Id) { set_bytes(c.encoder.get(), bytes, 4097, 0); }),
               "1 to 4096 bytes");
  EXPECT_DEATH(encoded([](auto&, auto& c, Id, Id) { set_group_memory(c.encoder.get(), 40, 0); }),
               "multiple of 16");
  EXPECT_DEATH(
      encoded([](auto&, auto& c, Id, Id) { dispatch_groups(c.encoder.get(), kOne, kOne); }),
      "without a pipeline");
  EXPECT_DEATH(encoded([](auto&, auto& c, Id add, Id) {
                 set_pipeline(c.encoder.get(), add);
                 dispatch_groups(c.encoder.get(), {0, 1, 1}, kOne);
               }),
               "a size of 0");
  EXPECT_DEATH(encoded([](auto&, auto& c, Id, Id) { metal::commit(c.buffer.get()); }),
               "an encoder has not ended");
  EXPECT_DEATH(encoded([](auto&, auto& c, Id, Id) {
                 c.end();
                 metal::commit(c.buffer.get());
               }),
               "committed twice");
  EXPECT_DEATH(encoded([](auto&, auto& c, Id, Id) { c.wait(); }), "not committed");
  EXPECT_DEATH(encoded([](auto&, auto& c, Id, Id) {
                 end_encoding(c.encoder.get());
                 end_encoding(c.encoder.get());
               }),
               "after endEncoding");
  EXPECT_DEATH(encoded([](auto& gpu, auto& c, Id add, Id data) {
                 c.run(add, data, 1);
                 wait_for_fence(c.encoder.get(), new_fence(gpu.device.get()).get());
               }),
               "which would not wait");
}

TEST_F(EmulatorRuntimeDeathTest, ObjectsAndMessages) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        const Gpu gpu;
        const Id device = gpu.device.get();
        static const Message<void(int)> call("newFence");
        call(device, 1);
      },
      "newFence");
  EXPECT_DEATH(
      {
        static const Message<void()> call("dance");
        call(Gpu().device.get());
      },
      "-\\[MTLDevice dance\\]: unrecognized selector");
  EXPECT_DEATH(
      {
        static const Message<unsigned(unsigned, unsigned long)> call(
            "newBufferWithLength:options:");
        call(Gpu().device.get(), 16, 0);
      },
      "newBufferWithLength:options:.*types");
  EXPECT_DEATH(
      {
        const Gpu gpu;
        Retained data = gpu.buffer({1});
        const Id gone = data.get();
        data = Retained();
        length(gone);
      },
      "-\\[MTLBuffer length\\]: the object is gone");
  EXPECT_DEATH(
      {
        const Gpu gpu;
        const Retained data = gpu.buffer({1});
        release(data.get());
      },
      "-\\[MTLBuffer release\\]: the object is gone");
  EXPECT_DEATH(
      {
        const Gpu gpu;
        const Retained add = gpu.pipeline("add_one");
        Retained data = gpu.buffer({1});
        Commands commands(gpu);
        commands.run(add.get(), data.get(), 1).end();
        data = Retained();
        commands.wait();
      },
      "buffer\\(0\\) of add_one is released before it has run");
}

TEST(EmulatorRuntimeThreadDeathTest, NoPool) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(text("x"), "no autorelease pool");
}

}  // namespace
}  // namespace mlxtape::emulator::test
