// Metal devices from outside: what they say of themselves, launches in every form, kernels of users, memory of others.
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "backends/metal/choose.h"
#include "backends/metal/host_kernels.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/base/files.h"
#include "mlxtape/core/source_kernel.h"
#include "support/op_test.h"
#include "support/temp_folder.h"

namespace mlxtape::test {
namespace {

struct Metal : testing::Test {
  Device& device = Device::find(Backend::kMetal);
  std::unique_ptr<CommandEncoder> encoder = device.make_encoder();

  Tensor counting(std::int64_t n, float first = 0) {
    std::vector<float> values(static_cast<std::size_t>(n));
    std::iota(values.begin(), values.end(), first);
    const Tensor t = encoder->empty({n}, DType::kF32);
    encoder->upload(values.data(), t.bytes(), t);
    return t;
  }
  template <class T>
  std::vector<T> read(const Tensor& t) {
    std::vector<T> values(static_cast<std::size_t>(t.size()));
    encoder->download(t, values.data(), t.bytes());
    return values;
  }
};

TEST(MetalChoose, TakesAppleGpusAndNamesTheOthers) {
  using metal::choose_gpus;
  EXPECT_TRUE(choose_gpus({}).usable.empty());
  EXPECT_EQ(choose_gpus({}).others, "");
  const auto choice = choose_gpus(
      {{"AMD Radeon Pro", false, false}, {"Apple M4", true, true}, {"External", true, false}});
  EXPECT_EQ(choice.usable, std::vector<std::size_t>{1});
  EXPECT_EQ(
      choice.others,
      "AMD Radeon Pro is not an Apple GPU of the M1's family or a newer one, which the kernels "
      "need; External has memory of its own; the kernels need memory that the host sees");
}

TEST_F(Metal, SaysWhatItIs) {
  EXPECT_EQ(device.name().rfind("metal: ", 0), 0U);
  EXPECT_GT(device.limits().memory_bytes, 0U);
  EXPECT_FALSE(device.limits().host_visible);
  EXPECT_EQ(device.traits().pack_bytes, 16U);
  EXPECT_FALSE(device.traits().uses_host_memory);
  const auto details = device.details();
  ASSERT_FALSE(details.empty());
  EXPECT_EQ(details[0].first, "architecture");
  EXPECT_GT(device.memory().stats().limit, 0U);
}

TEST_F(Metal, OptionsAreNamed) {
  device.set_option("serial", 1);
  const Tensor x = counting(100, 1), y = encoder->empty({100}, DType::kF32);
  for (int i = 0; i < 3; ++i) encoder->dispatch(host_scale(), ScaleArgs{2, 100}, {x}, {y});
  EXPECT_EQ(read<float>(y)[99], 200);
  device.set_option("serial", 0);
  expect_error(Errc::kArgument, "has no option speed", [&] { device.set_option("speed", 9); });
  expect_error(Errc::kArgument, "dispatches must be greater than 0, got 0",
               [&] { device.set_option("dispatches", 0); });
  device.set_overlap(false);
  encoder->dispatch(host_scale(), ScaleArgs{3, 100}, {x}, {y});
  EXPECT_EQ(read<float>(y)[99], 300);
  device.set_overlap(true);
}

// ---- launches ----

TEST_F(Metal, ConstantsReachTheKernel) {
  const Tensor y = encoder->zeros({4}, DType::kF32);
  encoder->dispatch(host_constants(), 0, {}, {y});
  EXPECT_EQ(read<float>(y), (std::vector<float>{1, -7, 4e9F, 0.25F}));
}

TEST_F(Metal, ALongLaunchIsCutAndComplete) {
  for (const Kernel* kernel : {&host_parts(), &host_slow()}) {
    for (const std::int64_t groups : {0, 1, 4, 5, 6, 37}) {
      const Tensor y = encoder->full({groups + 1, 32}, DType::kU32, 99);
      encoder->dispatch(*kernel, groups, {}, {y});
      const auto got = read<std::uint32_t>(y);
      for (std::int64_t i = 0; i < (groups + 1) * 32; ++i) {
        const auto want = static_cast<std::uint32_t>(i / 32 < groups ? i / 32 : 99);
        ASSERT_EQ(got[static_cast<std::size_t>(i)], want) << groups << " " << i;
      }
    }
  }
}

TEST_F(Metal, ATableHoldsMoreTensorsThanThereAreBuffers) {
  for (const int count : {1, 28, 29, 383}) {
    std::vector<Tensor> all;
    std::vector<TensorRef> in;
    all.reserve(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) all.push_back(counting(64, static_cast<float>(i)));
    for (const Tensor& t : all) in.emplace_back(t);
    const Tensor y = encoder->empty({64}, DType::kF32);
    const TensorRef out[] = {y};
    encoder->dispatch(host_table(), 0, in, out);
    const auto got = read<float>(y);
    for (int i = 0; i < 64; ++i) {
      const int want = count * i + count * (count - 1) / 2;
      ASSERT_EQ(got[static_cast<std::size_t>(i)], static_cast<float>(want)) << count << " " << i;
    }
  }
}

TEST_F(Metal, MemoryOfAGroupIsAsLargeAsAskedFor) {
  const Tensor y = counting(64);
  encoder->dispatch(host_shared(), 0, {}, {y});
  const auto got = read<float>(y);
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(got[i], static_cast<float>(63 - i));
}

TEST_F(Metal, AWrongLaunchIsNamedAndTheEncoderGoesOn) {
  const Tensor y = encoder->zeros({64}, DType::kU32);
  expect_error(Errc::kBackend, "host_too_wide: host_parts must be launched with at most",
               [&] { encoder->dispatch(host_too_wide(), 0, {}, {y}); });
  expect_error(Errc::kBackend, "host_stray: a launch must use the call's tensors",
               [&] { encoder->dispatch(host_stray(), 0, {}, {y}); });
  const Tensor x = counting(28);
  const std::vector<TensorRef> many(29, x);
  const TensorRef out[] = {y};
  expect_error(Errc::kBackend, "at most 28 tensors as buffers, got 30",
               [&] { encoder->dispatch(host_scale(), ScaleArgs{1, 1}, many, out); });
  encoder->dispatch(host_parts(), std::int64_t{2}, {}, {y});
  EXPECT_EQ(read<std::uint32_t>(y)[63], 1U);
}

TEST_F(Metal, MemoryOfTheHostIsRefused) {
  float values[64] = {};
  const Tensor wrapped(Buffer::wrap(device, values, sizeof values), DType::kF32, {64});
  const Tensor y = encoder->empty({64}, DType::kF32);
  expect_error(Errc::kDevice, "every tensor must be in memory of the device",
               [&] { encoder->dispatch(host_scale(), ScaleArgs{1, 64}, {wrapped}, {y}); });
  expect_error(Errc::kDevice, "must be the device's",
               [&] { encoder->upload(values, sizeof values, wrapped); });
}

TEST_F(Metal, ManyEncodersOnManyThreads) {
  std::vector<std::thread> users;
  for (int u = 0; u < 4; ++u) {
    users.emplace_back([&, u] {
      const auto own = device.make_encoder();
      for (int i = 0; i < 20; ++i) {
        const Tensor x = own->full({1000}, DType::kF32, u + 1);
        const Tensor y = own->empty({1000}, DType::kF32);
        own->dispatch(host_scale(), ScaleArgs{static_cast<float>(i), 1000}, {x}, {y});
        std::vector<float> got(1000);
        own->download(y, got.data(), y.bytes());
        ASSERT_EQ(got[999], static_cast<float>(i * (u + 1)));
      }
    });
  }
  for (std::thread& user : users) user.join();
}

// ---- kernels of users ----

TEST_F(Metal, UserKernelsComeAsText) {
  const auto grid = [](const KernelCall& call) {
    return Grid{
        {static_cast<std::uint32_t>(ceil_div(call.as<ScaleArgs>().n, 64)), 1, 1}, {64, 1, 1}, 0};
  };
  const Kernel& kernel =
      device.add_kernel({"user_scale_text", "host_scale", host_source(), grid, {}});
  const Tensor x = counting(100, 1), y = encoder->empty({100}, DType::kF32);
  encoder->dispatch(kernel, ScaleArgs{5, 100}, {x}, {y});
  EXPECT_EQ(read<float>(y)[99], 500);
  const Kernel& missing =
      device.add_kernel({"user_missing", "no_such_kernel", host_source(), grid, {}});
  expect_error(Errc::kArgument, "the source must have a kernel no_such_kernel",
               [&] { encoder->dispatch(missing, ScaleArgs{5, 100}, {x}, {y}); });
  const Kernel& wrong = device.add_kernel({"user_wrong", "wrong", "not a kernel", grid, {}});
  expect_error(Errc::kArgument, "the source of wrong must compile",
               [&] { encoder->dispatch(wrong, ScaleArgs{5, 100}, {x}, {y}); });
  expect_error(Errc::kArgument, "an entry, a source and a grid",
               [&] { device.add_kernel({"user_empty", "", "", grid, {}}); });
  expect_error(Errc::kArgument, "must have no options on metal, got --fast", [&] {
    device.add_kernel({"user_options", "host_scale", host_source(), grid, {"--fast"}});
  });
}

// ---- memory of files ----

TEST_F(Metal, PagesOfAFileAreReadInPlace) {
  const TempFolder folder;
  std::vector<float> values(40000);
  std::iota(values.begin(), values.end(), 0.0F);
  put(folder / "values", {reinterpret_cast<const char*>(values.data()), values.size() * 4});
  auto file = std::make_shared<MappedFile>(folder / "values", "test");
  auto* first = reinterpret_cast<float*>(file->bytes().data());
  bool gone = false;
  const auto host = [&](std::size_t at, std::size_t count) {
    return Buffer::wrap(Device::cpu(), first + at, count * 4, [file, &gone] { gone = true; });
  };
  {
    const Buffer middle = device.adopt(host(5000, 20000));
    ASSERT_TRUE(middle);
    EXPECT_EQ(middle.address(), first + 5000);
    EXPECT_TRUE(middle.is_foreign());
    const Tensor x(middle, DType::kF32, {20000});
    const Tensor y = encoder->empty({20000}, DType::kF32);
    encoder->dispatch(host_scale(), ScaleArgs{2, 20000}, {x}, {y});
    const auto got = read<float>(y);
    EXPECT_EQ(got.front(), 10000);
    EXPECT_EQ(got.back(), 2 * 24999.0F);
    // Another part that shares a page with it.
    const Tensor z(device.adopt(host(25000, 100)), DType::kF32, {100});
    EXPECT_EQ(read<float>(z)[99], 25099);
    encoder->dispatch(host_scale(), ScaleArgs{1, 100}, {z}, {z});  // not waited for when it goes
    EXPECT_FALSE(gone);
  }
  EXPECT_TRUE(gone);
  // Where packs do not begin, and what is no file's.
  EXPECT_FALSE(device.adopt(host(5001, 100)));
  EXPECT_FALSE(device.adopt(Buffer::wrap(Device::cpu(), values.data(), 400)));
}

}  // namespace
}  // namespace mlxtape::test
