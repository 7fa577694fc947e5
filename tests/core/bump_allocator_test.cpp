#include "mlxtape/core/bump_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "mlxtape/core/encoder.h"

namespace mlxtape {
namespace {

constexpr std::int64_t kOwn = BumpAllocator::kOwnBlock;

struct Bump : testing::Test {
  ~Bump() override { pool.set_guarded(false); }

  MemoryPool& pool = Device::cpu().memory();
  const std::size_t before = pool.stats().current;

  std::size_t taken() const { return pool.stats().current - before; }
  static Tensor bytes(BumpAllocator& memory, std::int64_t n) {
    return memory.empty({n}, DType::kU8);
  }
};

TEST_F(Bump, TakesWhatIsExpectedAndNoMore) {
  const std::vector<std::int64_t> sizes = {1,       255,  256,      257,
                                           100'000, kOwn, kOwn + 1, 9 * kOwn + 64};
  BumpAllocator memory(Device::cpu());
  std::size_t sum = 0;
  for (const std::int64_t n : sizes) {
    memory.expect(static_cast<std::size_t>(n));
    const std::int64_t unit = n > kOwn ? 64 : 256;
    sum += static_cast<std::size_t>((n + unit - 1) / unit * unit);
  }
  std::vector<Tensor> tensors;
  for (const std::int64_t n : sizes) tensors.push_back(bytes(memory, n));
  EXPECT_EQ(taken(), sum);

  // They lie apart, each where vectors may be read.
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::memset(tensors[i].data(), static_cast<int>(i), tensors[i].bytes());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensors[i].data()) % 64, 0U);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto values = tensors[i].host<std::uint8_t>();
    EXPECT_TRUE(std::all_of(values.begin(), values.end(), [&](std::uint8_t v) { return v == i; }));
  }
}

TEST_F(Bump, MoreThanExpectedIsServed) {
  BumpAllocator memory(Device::cpu());
  memory.expect(256);
  std::vector<Tensor> tensors;
  for (int i = 0; i < 3; ++i) tensors.push_back(bytes(memory, 256));
  EXPECT_EQ(taken(), 3U * 256);
  EXPECT_EQ(memory.empty({0, 3}, DType::kF32).size(), 0);
}

TEST_F(Bump, WhatIsForgottenTakesNoMemory) {
  BumpAllocator memory(Device::cpu());
  for (int i = 0; i < 4; ++i) memory.expect(1000);
  memory.expect(kOwn + 1);
  memory.forget(1000);
  memory.forget(kOwn + 1);
  memory.forget(1000);
  const Tensor a = bytes(memory, 1000), b = bytes(memory, 1000);
  EXPECT_EQ(taken(), 2U * 1024);
  for (int i = 0; i < 9; ++i) memory.forget(1000);  // more than was expected
  const Tensor c = bytes(memory, 1000);
  EXPECT_EQ(taken(), 3U * 1024);
}

TEST_F(Bump, ABlockGoesWithItsLastTensor) {
  Tensor last;
  {
    BumpAllocator memory(Device::cpu());
    for (int i = 0; i < 3; ++i) memory.expect(kOwn);
    const Tensor first = bytes(memory, kOwn), second = bytes(memory, kOwn);
    last = bytes(memory, kOwn);
    EXPECT_EQ(second.buffer().owners(), 1U);
  }
  EXPECT_EQ(taken(), 3U * kOwn);
  last = {};
  EXPECT_EQ(taken(), 0U);
}

// A tape must not take a write to one tensor for a write to its neighbour.
TEST_F(Bump, WritesAreCountedForEach) {
  BumpAllocator memory(Device::cpu());
  memory.expect(4);
  memory.expect(4);
  const Tensor a = memory.empty({1}, DType::kF32), b = memory.empty({1}, DType::kF32);
  ASSERT_EQ(a.buffer().backing().storage(), b.buffer().backing().storage());
  const float one = 1;
  Device::cpu().make_encoder()->upload(&one, sizeof one, a);
  EXPECT_EQ(a.buffer().version(), 1U);
  EXPECT_EQ(b.buffer().version(), 0U);
}

TEST_F(Bump, GuardedTensorsAreApart) {
  pool.set_guarded(true);
  BumpAllocator memory(Device::cpu());
  memory.expect(4);
  memory.expect(4);
  const Tensor a = bytes(memory, 4), b = bytes(memory, 4);
  EXPECT_NE(a.buffer().backing().storage(), b.buffer().backing().storage());
  EXPECT_EQ(a.host<std::uint8_t>()[0], 0xFF);
  pool.check_guards();
}

TEST_F(Bump, NoSizeIsAnError) {
  BumpAllocator memory(Device::cpu());
  EXPECT_THROW(memory.empty({std::int64_t{1} << 62U, 8}, DType::kF32), Error);
}

}  // namespace
}  // namespace mlxtape
