#include "mlxtape/core/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "mlxtape/core/device.h"

namespace mlxtape {
namespace {

// Memory that can run out, and counts what it gave.
class TinyMemory final : public RawMemory {
 public:
  explicit TinyMemory(std::size_t room) : left_(room) {}
  ~TinyMemory() override { EXPECT_EQ(blocks_, 0) << "blocks not given back"; }
  void* allocate(std::size_t bytes, bool& is_zero) override {
    is_zero = false;
    if (bytes > left_) return nullptr;
    left_ -= bytes;
    ++blocks_;
    return std::aligned_alloc(64, bytes);
  }
  void release(void* address, std::size_t bytes) noexcept override {
    left_ += bytes;
    --blocks_;
    std::free(address);
  }
  void fill(void* address, unsigned char value, std::size_t bytes) override {
    std::memset(address, value, bytes);
  }
  bool is_filled(const void* address, unsigned char value, std::size_t bytes) override {
    const auto* b = static_cast<const unsigned char*>(address);
    for (std::size_t i = 0; i < bytes; ++i) {
      if (b[i] != value) return false;
    }
    return true;
  }

 private:
  std::size_t left_;
  int blocks_ = 0;
};

struct Memory : testing::Test {
  MemoryPool pool{Device::cpu(), std::make_unique<TinyMemory>(std::size_t{1} << 20)};

  Errc code_of(std::size_t bytes) {
    try {
      pool.allocate(bytes);
    } catch (const Error& e) {
      return e.code();
    }
    ADD_FAILURE() << bytes << " bytes were allowed";
    return Errc::kIo;
  }
};

TEST_F(Memory, ExactBlocksAreNotRoundedAndNotKept) {
  constexpr std::size_t kBytes =
      (std::size_t{512} << 10) + 64;  // the pool's next size has 64 KiB more
  {
    const Buffer exact = pool.allocate_exact(kBytes);
    EXPECT_EQ(exact.bytes(), kBytes);
    EXPECT_EQ(pool.stats().current, kBytes);
    EXPECT_EQ(pool.allocate_exact(1).bytes(), 1U);
  }
  EXPECT_EQ(pool.stats().current, 0U);
  EXPECT_EQ(pool.stats().cached, 0U);
}

TEST_F(Memory, CountsCurrentPeakCachedAndReuse) {
  {
    const Buffer a = pool.allocate(1000);
    EXPECT_EQ(a.bytes(), 1000);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.address()) % 64, 0);
    const Buffer b = pool.allocate(5000);
    EXPECT_GE(pool.stats().current, 6000);
    EXPECT_LE(pool.stats().current, 6000 * 9 / 8 + 128);  // at most an eighth is lost
  }
  const MemoryStats after = pool.stats();
  EXPECT_EQ(after.current, 0);
  EXPECT_GE(after.peak, 6000);
  EXPECT_EQ(after.cached, after.peak);
  EXPECT_EQ(after.allocations, 2);
  const Buffer c = pool.allocate(990);  // the same step of size as 1000
  EXPECT_EQ(pool.stats().allocations, 2);
  EXPECT_EQ(pool.stats().reuses, 1);
  EXPECT_GE(pool.stats().peak, 6000);
  pool.reset_peak();
  EXPECT_EQ(pool.stats().peak, pool.stats().current);
  pool.trim();
  EXPECT_EQ(pool.stats().cached, 0);
}

TEST_F(Memory, ZeroMeansZeroAlsoWhenUsedAgain) {
  for (int round = 0; round < 3; ++round) {
    const Buffer b = pool.allocate_zeroed(4096);
    auto* bytes = static_cast<unsigned char*>(b.address());
    for (int i = 0; i < 4096; ++i) ASSERT_EQ(bytes[i], 0) << "round " << round;
    std::memset(bytes, 0x77, 4096);
  }
  EXPECT_EQ(pool.stats().allocations, 1);
}

// Large blocks come from the system as zeros, but only the first time.
TEST(SystemMemory, ZeroMeansZeroAlsoWhenUsedAgain) {
  constexpr std::size_t kBytes = std::size_t{4} << 20;
  for (int round = 0; round < 3; ++round) {
    const Buffer b = Device::cpu().memory().allocate_zeroed(kBytes);
    auto* bytes = static_cast<unsigned char*>(b.address());
    EXPECT_TRUE(std::all_of(bytes, bytes + kBytes, [](unsigned char v) { return v == 0; }))
        << "round " << round;
    std::memset(bytes, 0x77, kBytes);
  }
}

TEST_F(Memory, TheLimitIsAnErrorAndEverythingStaysUsable) {
  pool.set_limit(10000);
  const Buffer kept = pool.allocate_zeroed(4096);
  EXPECT_EQ(code_of(8192), Errc::kOutOfMemory);
  EXPECT_EQ(static_cast<char*>(kept.address())[4095], 0);
  EXPECT_NO_THROW(pool.allocate(4096));
  // What is cached makes room before the answer is no.
  EXPECT_NO_THROW(pool.allocate(5000));
  EXPECT_LE(pool.stats().current + pool.stats().cached, 10000);
  pool.set_limit(0);
  EXPECT_NO_THROW(pool.allocate(100000));
}

TEST_F(Memory, ALimitHoldsForWhatIsCachedToo) {
  pool.allocate(1 << 16);
  pool.set_limit(1 << 10);
  EXPECT_EQ(pool.stats().cached, 0U);
  EXPECT_EQ(code_of(1 << 16), Errc::kOutOfMemory);
  pool.set_limit(0);
}

TEST_F(Memory, ASystemWithoutMemoryIsAnErrorToo) {
  const Buffer a = pool.allocate(700 << 10);
  EXPECT_EQ(code_of(500 << 10), Errc::kOutOfMemory);
  EXPECT_NO_THROW(pool.allocate(100 << 10));
  EXPECT_EQ(code_of(0), Errc::kArgument);
  EXPECT_EQ(code_of(~std::size_t{0}), Errc::kOutOfMemory);
}

TEST_F(Memory, TheCacheIsGivenBackBeforeTheSystemSaysNo) {
  pool.allocate(900 << 10);
  EXPECT_NO_THROW(pool.allocate(300 << 10));
}

TEST_F(Memory, GuardsFindWritesOutside) {
  pool.set_guarded(true);
  {
    const Buffer b = pool.allocate(100);
    auto* bytes = static_cast<unsigned char*>(b.address());
    EXPECT_EQ(bytes[0], 0xFF);
    EXPECT_NO_THROW(pool.check_guards());
    bytes[100] = 1;
    EXPECT_THROW(pool.check_guards(), Error);
    bytes[100] = 0xA5;
  }
  EXPECT_NO_THROW(pool.check_guards());
  {
    const Buffer b = pool.allocate(100);
    static_cast<unsigned char*>(b.address())[-1] = 1;
  }
  EXPECT_THROW(pool.check_guards(), Error);  // found when it came back
  EXPECT_NO_THROW(pool.check_guards());      // and told once
  pool.set_guarded(false);
  const Buffer zero = pool.allocate_zeroed(100);
  EXPECT_EQ(static_cast<unsigned char*>(zero.address())[99], 0);
}

TEST_F(Memory, ManyThreadsAtOnce) {
  std::vector<std::thread> users;
  for (int t = 0; t < 4; ++t) {
    users.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        const std::size_t bytes = 64U + static_cast<std::size_t>((i * 37 + t * 11) % 3000);
        const Buffer b = pool.allocate_zeroed(bytes);
        const Buffer copy = b;
        auto* p = static_cast<unsigned char*>(copy.address());
        ASSERT_EQ(p[bytes - 1], 0);
        std::memset(p, t + 1, bytes);
        ASSERT_EQ(p[bytes / 2], t + 1);
      }
    });
  }
  for (std::thread& user : users) user.join();
  EXPECT_EQ(pool.stats().current, 0);
}

TEST(Buffer, ForeignMemoryIsUsedInPlaceAndLetGoOnce) {
  float values[4] = {1, 2, 3, 4};
  int released = 0;
  {
    const Tensor t = Tensor::wrap(values, {2, 2}, [&] { ++released; });
    const Tensor view = t.select(0, 1);
    EXPECT_EQ(view.host<float>()[0], 3);
    view.host<float>()[1] = 9;
    EXPECT_EQ(released, 0);
  }
  EXPECT_EQ(released, 1);
  EXPECT_EQ(values[3], 9);
  EXPECT_THROW(Tensor::wrap(static_cast<float*>(nullptr), {2}), Error);
  EXPECT_EQ(Tensor::wrap(static_cast<float*>(nullptr), {0, 4}).size(), 0);
  auto* odd = reinterpret_cast<float*>(reinterpret_cast<char*>(values) + 1);
  EXPECT_THROW(Tensor::wrap(odd, {2}), Error);
}

}  // namespace
}  // namespace mlxtape
