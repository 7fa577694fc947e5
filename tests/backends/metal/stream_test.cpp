// The parts of a Metal device from inside, on a machine of their own, whose failures concern no other test.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "backends/metal/machine.h"
#include "backends/metal/memory.h"
#include "backends/metal/transfers.h"
#include "support/op_test.h"

namespace mlxtape::metal {
namespace {

Id first_device() {
  static const Retained all = Retained::adopt(MTLCopyAllDevices());
  return object_at(all.get(), 0);
}

// A machine must outlive the thread that waits for it, as those of devices do: these are kept.
struct MetalStream : testing::Test {
  Machine& machine =
      *new Machine(first_device(), objc_getClass("MTLResidencySetDescriptor") != nullptr);
  DeviceMemory& memory = *new DeviceMemory(machine);

  char* allocate(std::size_t bytes) {
    bool is_zero = false;
    return static_cast<char*>(memory.allocate(bytes, is_zero));
  }
  static Range range(const char* p, std::size_t bytes) { return {p, p + bytes}; }
  template <class Change>
  void with(const Change& change) {
    StreamOptions options = machine.stream.options();
    change(options);
    machine.stream.set(options);
  }
};

// ---- blocks ----

TEST_F(MetalStream, BlocksAreFoundByAnyOfTheirBytes) {
  const std::size_t before = machine.blocks.size();
  char* a = allocate(1U << 20U);
  char* b = allocate(2U << 20U);
  EXPECT_EQ(machine.blocks.size(), before + 2);
  const Block* of_a = machine.blocks.find(range(a, 1));
  ASSERT_NE(of_a, nullptr);
  EXPECT_EQ(machine.blocks.find(range(a + (1U << 20U) - 1, 1)), of_a);
  EXPECT_EQ(machine.blocks.find(range(a, 1U << 20U)), of_a);
  EXPECT_EQ(machine.blocks.find(range(a, (1U << 20U) + 1)), nullptr);
  EXPECT_EQ(of_a->offset(a + 48), 48U);
  EXPECT_NE(machine.blocks.find(range(b, 1)), of_a);
  int elsewhere = 0;
  EXPECT_EQ(machine.blocks.find(range(reinterpret_cast<char*>(&elsewhere), 1)), nullptr);
  memory.release(a, 1U << 20U);
  EXPECT_EQ(machine.blocks.find(range(a, 1)), nullptr);
  memory.release(b, 2U << 20U);
  EXPECT_EQ(machine.blocks.size(), before);
}

TEST_F(MetalStream, SmallBlocksShareABuffer) {
  const std::size_t before = machine.blocks.size();
  std::vector<char*> all;
  constexpr std::size_t kBytes = 4096, kCount = (std::size_t{4} << 20) / kBytes;
  for (std::size_t i = 0; i < kCount; ++i) all.push_back(allocate(kBytes));
  EXPECT_EQ(machine.blocks.size(), before + 1);
  for (std::size_t i = 0; i < kCount; ++i) std::memset(all[i], static_cast<int>(i % 251), kBytes);
  for (std::size_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(all[i]) % 64, 0U);
    ASSERT_EQ(static_cast<unsigned char>(all[i][kBytes - 1]), i % 251);
  }
  char* more = allocate(64);
  EXPECT_EQ(machine.blocks.size(), before + 2);
  // What comes back in pieces is one again: neighbours on both sides, then all.
  for (const std::size_t i : {5U, 7U, 6U}) memory.release(all[i], kBytes);
  EXPECT_EQ(allocate(3 * kBytes), all[5]);
  memory.release(all[5], 3 * kBytes);
  for (std::size_t i = 0; i < kCount; ++i) {
    if (i < 5 || i > 7) memory.release(all[i], kBytes);
  }
  memory.release(more, 64);
  EXPECT_EQ(machine.blocks.size(), before + 1);  // one is kept
}

// ---- order ----

TEST_F(MetalStream, ABarrierStandsWhereOneIsNeeded) {
  constexpr std::size_t kBytes = 256;
  char* room = allocate(4 * kBytes);
  const auto part = [&](std::size_t i) {
    return range(room + i * kBytes, kBytes);
  };
  const auto barriers = [&](const std::function<void()>& work) {
    machine.stream.wait();
    const auto before = machine.stream.counts().barriers;
    work();
    return machine.stream.counts().barriers - before;
  };
  EXPECT_EQ(barriers([&] {  // different memory
              fill(machine, part(0), 1);
              fill(machine, part(1), 2);
            }),
            0U);
  EXPECT_EQ(barriers([&] {  // read what was written
              fill(machine, part(0), 3);
              move(machine, part(0), part(1));
            }),
            1U);
  EXPECT_EQ(barriers([&] {  // write what is read
              move(machine, part(0), part(1));
              fill(machine, part(0), 4);
            }),
            1U);
  EXPECT_EQ(barriers([&] {  // written twice, by halves
              fill(machine, {room, room + 3 * kBytes}, 5);
              fill(machine, part(2), 6);
            }),
            1U);
  EXPECT_EQ(barriers([&] {  // read twice
              move(machine, part(0), part(1));
              move(machine, part(0), part(2));
            }),
            0U);
  EXPECT_EQ(barriers([&] {  // a barrier covers all that was before it
              fill(machine, part(0), 7);
              fill(machine, part(1), 8);
              move(machine, part(0), part(2));
              move(machine, part(1), part(3));
            }),
            1U);
  with([](StreamOptions& options) { options.overlap = false; });
  EXPECT_EQ(barriers([&] {
              fill(machine, part(0), 9);
              fill(machine, part(1), 9);
            }),
            1U);
  machine.stream.wait();
  EXPECT_EQ(room[0], 9);
  EXPECT_EQ(room[2 * kBytes], 7);
  EXPECT_EQ(room[3 * kBytes], 8);
}

TEST_F(MetalStream, CommandBuffersAreHandedOverByCountBytesAndTime) {
  char* room = allocate(1U << 20U);
  const auto buffers = [&](int fills, std::size_t bytes) {
    machine.stream.wait();
    const auto before = machine.stream.counts().command_buffers;
    for (int i = 0; i < fills; ++i) fill(machine, range(room, bytes), 1);
    const auto after = machine.stream.counts().command_buffers;
    machine.stream.wait();
    return after - before;
  };
  with([](StreamOptions& options) {
    options.dispatches = 4;
    options.first_dispatches = 2;
  });
  EXPECT_EQ(buffers(1, 64), 0U);
  EXPECT_EQ(buffers(2, 64), 1U);  // the first one early
  EXPECT_EQ(buffers(5, 64), 1U);
  EXPECT_EQ(buffers(6, 64), 2U);
  with([](StreamOptions& options) {
    options = {};
    options.megabytes = 1.5;
  });
  EXPECT_EQ(buffers(1, 1U << 20U), 0U);
  EXPECT_EQ(buffers(2, 1U << 20U), 1U);
  with([](StreamOptions& options) {
    options = {};
    options.seconds = 40e-6;  // a megabyte is 17 us
  });
  EXPECT_EQ(buffers(2, 1U << 20U), 0U);
  EXPECT_EQ(buffers(3, 1U << 20U), 1U);
  with([](StreamOptions& options) {
    options = {};
    options.serial = true;
  });
  EXPECT_EQ(buffers(3, 64), 3U);
}

TEST_F(MetalStream, ADispatchThatTakesLongIsCut) {
  char* room = allocate(1U << 20U);
  std::memset(room, 0, 1U << 20U);
  with([](StreamOptions& options) { options.dispatch_seconds = 2e-6; });
  const auto before = machine.stream.counts();
  fill(machine, range(room, 1U << 20U), 0x5A);
  const auto after = machine.stream.counts();
  // 64 groups take 17.5 us: 7 at a time.
  EXPECT_EQ(after.dispatches - before.dispatches, 10U);
  EXPECT_EQ(after.barriers, before.barriers);  // parts of one need none between them
  machine.stream.wait();
  for (std::size_t i = 0; i < 1U << 20U; ++i) ASSERT_EQ(room[i], 0x5A) << i;
}

TEST_F(MetalStream, WhatTakesTooLongAndCannotBeCutIsAnErrorInTests) {
  char* room = allocate(1U << 20U);
  with([](StreamOptions& options) { options.strict = true; });
  fill(machine, range(room, 1U << 20U), 1);
  machine.stream.wait();
  with([](StreamOptions& options) { options.dispatch_seconds = 1e-7; });  // a group takes 0.27 us
  test::expect_error(Errc::kBackend, "fill_bytes must take at most 0 ms on a small chip",
                     [&] { fill(machine, range(room, 1U << 20U), 2); });
  with([](StreamOptions& options) { options.strict = false; });
  fill(machine, range(room, 1U << 20U), 3);
  machine.stream.wait();
  EXPECT_EQ(room[(1U << 20U) - 1], 3);
}

// ---- the host and the GPU ----

TEST_F(MetalStream, MemoryInUseIsWrittenInItsTurn) {
  constexpr std::size_t kBytes = 1U << 20U;
  char* a = allocate(kBytes);
  char* b = allocate(kBytes);
  Uploads& uploads = *new Uploads(machine);
  std::vector<char> ones(kBytes, 1), twos(kBytes, 2);
  uploads.copy(ones.data(), a, kBytes);
  EXPECT_EQ(a[0], 1);  // nobody used it: at once
  EXPECT_TRUE(machine.stream.is_done(*machine.blocks.find(range(a, 1))));
  move(machine, range(a, kBytes), range(b, kBytes));
  EXPECT_FALSE(machine.stream.is_done(*machine.blocks.find(range(a, 1))));
  uploads.copy(twos.data(), a, kBytes);
  memory.fill(b + kBytes / 2, 3, kBytes / 2);
  machine.stream.wait();
  EXPECT_EQ(a[kBytes - 1], 2);
  EXPECT_EQ(b[0], 1);
  EXPECT_EQ(b[kBytes - 1], 3);
  EXPECT_TRUE(memory.is_filled(b, 1, kBytes / 2));
  EXPECT_FALSE(memory.is_filled(b, 1, kBytes / 2 + 1));
}

TEST_F(MetalStream, MemoryThatGoesIsKeptUntilTheGpuIsDone) {
  constexpr std::size_t kBytes = 1U << 20U;
  char* a = allocate(kBytes);
  char* b = allocate(kBytes);
  fill(machine, range(a, kBytes), 7);
  move(machine, range(a, kBytes), range(b, kBytes));
  memory.release(a, kBytes);  // its block is known to nobody any more, but the buffer lives
  machine.stream.wait();
  EXPECT_EQ(b[kBytes - 1], 7);
}

TEST_F(MetalStream, WaitingForNothingReturns) {
  machine.stream.wait();
  machine.stream.wait_for(0);
  EXPECT_TRUE(machine.stream.is_done(0));
  machine.stream.commit();
  EXPECT_EQ(machine.stream.counts().command_buffers, 0U);
}

}  // namespace
}  // namespace mlxtape::metal
