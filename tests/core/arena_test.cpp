#include "mlxtape/core/arena.h"

#include <thread>

#include "mlxtape/ops/rms_norm.h"
#include "mlxtape/ops/softmax.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

class OnArena : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (!IsSkipped()) pool().set_guarded(false);  // guarded memory is never planned
  }
  MemoryPool& pool() { return encoder().device().memory(); }
  Tensor floats(std::int64_t n) { return encoder().empty({n}, DType::kF32); }
  static char* address(const Tensor& t) { return static_cast<char*>(t.data()); }
};

TEST_P(OnArena, TheSecondStepAllocatesNothing) {
  Arena arena(pool());
  const auto step = [&](std::vector<char*>* places = nullptr) {
    const Arena::Step now(arena);
    const Tensor a = floats(1000);
    Tensor b = floats(3000);
    if (places != nullptr) *places = {address(a), address(b)};
    b = Tensor();
    const Tensor c = floats(2500);  // where b was
    if (places != nullptr) places->push_back(address(c));
  };
  step();
  EXPECT_EQ(arena.stats().most_live, 4000U * 4);
  EXPECT_GE(arena.stats().bytes, 4000U * 4);
  EXPECT_LE(arena.stats().bytes, 4000U * 4 + 2 * 256);
  std::vector<char*> first, second;
  step(&first);
  const MemoryStats before = pool().stats();
  step(&second);
  EXPECT_EQ(pool().stats().allocations, before.allocations);
  EXPECT_EQ(pool().stats().reuses, before.reuses);  // not even from the pool's cache
  EXPECT_EQ(arena.stats().planned, 3U);
  EXPECT_EQ(arena.stats().misses, 0U);
  EXPECT_EQ(first, second);
  EXPECT_EQ(first[1], first[2]);
  const auto in = [&](char* p) {
    return p >= first[0] - 12256 && p < first[0] + 16512;
  };
  EXPECT_TRUE(in(first[1]));
}

TEST_P(OnArena, WhatOutlivesAStepIsThePools) {
  Arena arena(pool());
  Tensor kept;
  for (int i = 0; i < 4; ++i) {
    const Arena::Step now(arena);
    const Tensor a = floats(1000);
    kept = floats(500);
    encoder().copy(encoder().full({500}, DType::kF32, i), kept);
  }
  EXPECT_EQ(arena.stats().misses, 0U);
  EXPECT_EQ(arena.stats().planned, 2U);
  EXPECT_EQ(kept.buffer().storage()->backing, nullptr);
  EXPECT_EQ(download(kept), std::vector<double>(500, 3));
}

// A tensor that lives longer than it did when it was noted must not be written over.
TEST_P(OnArena, WhatLivesIsLeftAlone) {
  Arena arena(pool());
  Tensor held;
  const auto step = [&](bool holds) {
    const Arena::Step now(arena);
    Tensor a = encoder().full({1000}, DType::kF32, 7);
    if (holds) held = a;
    a = Tensor();
    const Tensor b = encoder().full({1000}, DType::kF32, 8);
    const Tensor c = encoder().full({1000}, DType::kF32, 9);
  };
  step(false);
  step(false);
  EXPECT_EQ(arena.stats().misses, 0U);
  step(true);
  EXPECT_GT(arena.stats().misses, 0U);
  EXPECT_EQ(download(held), std::vector<double>(1000, 7));
  step(false);  // noted anew, while the old place is still in use
  step(false);
  EXPECT_EQ(arena.stats().misses, 0U);
  EXPECT_EQ(download(held), std::vector<double>(1000, 7));
}

TEST_P(OnArena, AnotherShapeIsAnotherPlan) {
  Arena arena(pool());
  for (const std::int64_t n : {100, 100, 200, 200, 200}) {
    const Arena::Step now(arena);
    const Tensor a = floats(n), b = floats(n);
  }
  EXPECT_EQ(arena.stats().misses, 0U);
  EXPECT_EQ(arena.stats().planned, 2U);
  EXPECT_EQ(arena.stats().most_live, 1600U);
}

TEST_P(OnArena, TensorsOutliveTheArena) {
  Tensor kept;
  {
    Arena arena(pool());
    for (int i = 0; i < 3; ++i) {
      const Arena::Step now(arena);
      Tensor a = encoder().full({100}, DType::kF32, i);
      if (i == 2) kept = a;
    }
  }
  EXPECT_EQ(download(kept), std::vector<double>(100, 2));
  EXPECT_NE(kept.buffer().storage()->backing, nullptr);
}

TEST_P(OnArena, StepsDoNotNest) {
  Arena arena(pool()), other(pool());
  const Arena::Step now(arena);
  EXPECT_THROW(Arena::Step again(arena), Error);
  EXPECT_THROW(Arena::Step again(other), Error);
  std::thread([&] { EXPECT_THROW(Arena::Step again(arena), Error); }).join();
  std::thread([&] { const Arena::Step fine(other); }).join();
}

TEST_P(OnArena, OtherThreadsAreNotNoted) {
  Arena arena(pool());
  for (int i = 0; i < 3; ++i) {
    const Arena::Step now(arena);
    const Tensor a = floats(100);
    std::thread([&] { static_cast<void>(floats(50)); }).join();
  }
  EXPECT_EQ(arena.stats().planned, 1U);
  EXPECT_EQ(arena.stats().misses, 0U);
}

// A step that is captured needs its places as long as the graph lives, and no more than they are.
TEST_P(OnArena, AGraphOwnsThePlacesOfItsStep) {
  Arena arena(pool());
  const Tensor x = upload(std::vector<double>(64 * 1024, 1), {64, 1024}, DType::kF32);
  Tensor result;
  const auto step = [&] {
    Tensor h = x;
    for (int i = 0; i < 16; ++i) h = ops::softmax(encoder(), h);
    result = encoder().empty_like(h);
    encoder().copy(h, result);
  };
  {
    const Arena::Step now(arena);
    step();
  }
  const std::size_t before = pool().stats().current;
  std::unique_ptr<Graph> graph;
  {
    const Arena::Step now(arena);
    encoder().begin_capture();
    step();
    graph = encoder().end_capture();
  }
  EXPECT_EQ(arena.stats().misses, 0U);
  EXPECT_LE(pool().stats().current - before, 4U * 64 * 1024 * 4);  // of 16 results, two at once
  encoder().replay(*graph);
  const std::vector<double> got = download(result);
  EXPECT_NEAR(got[5], 1.0 / 1024, 1e-6);
  EXPECT_THROW(Arena::Step again(arena), Error);
  graph.reset();
  const Arena::Step fine(arena);
}

// A tape must not walk over what a replay has written, wherever it lives.
TEST_P(OnArena, AReplayIsSeenAsAWriteOfItsPlaces) {
  Arena arena(pool());
  const Tensor seed = upload({1, 2, 3}, {1, 3}, DType::kF32);
  const Tensor w = upload({1, 1, 1}, {3}, DType::kF32);
  for (const bool planned : {false, true}) {
    const Arena::Step now(arena);
    const Tensor room = encoder().full({1, 3}, DType::kF32, 2);
    EXPECT_EQ(room.buffer().storage()->backing != nullptr, planned);
    encoder().begin_capture();
    encoder().add_into(room, seed);
    const auto graph = encoder().end_capture();
    Tape tape(encoder());
    const Tensor y = ops::rms_norm(tape, room, tape.watch(w), 1e-6F);
    encoder().replay(*graph);
    expect_error(Errc::kArgument, "rms_norm saved a tensor", [&] { tape.backward(y, seed); });
  }
}

// ---- rehearsals ----

TEST_P(OnArena, ARehearsalPlansWithoutMemory) {
  Arena rehearsed(pool()), noted(pool());
  const Tensor x = upload(std::vector<double>(64 * 1024, 1), {64, 1024}, DType::kF32);
  const Tensor result = upload(std::vector<double>(64 * 1024, 5), {64, 1024}, DType::kF32);
  const auto step = [&] {
    Tensor h = encoder().zeros(x.shape(), DType::kF32);
    for (int i = 0; i < 8; ++i) h = ops::softmax(encoder(), i == 0 ? x : h);
    encoder().copy(h, result);
  };
  {
    const Arena::Step now(noted);
    step();
  }
  const std::vector<unsigned char> want = bits_of(encoder(), result);
  encoder().copy(encoder().full(result.shape(), DType::kF32, 5), result);

  pool().trim();
  const MemoryStats before = pool().stats();
  const std::uint64_t dispatches = encoder().counters().dispatches;
  encoder().rehearse([&] { rehearsed.rehearse(step); });
  EXPECT_EQ(pool().stats().current, before.current);
  EXPECT_EQ(pool().stats().allocations, before.allocations);
  EXPECT_EQ(encoder().counters().dispatches, dispatches);
  EXPECT_EQ(download(result), std::vector<double>(64 * 1024, 5));  // nothing ran
  EXPECT_EQ(rehearsed.stats().bytes, noted.stats().bytes);
  EXPECT_EQ(rehearsed.stats().most_live, noted.stats().most_live);
  {
    const Arena::Step now(rehearsed);
    step();
  }
  EXPECT_EQ(rehearsed.stats().misses, 0U);
  EXPECT_EQ(pool().stats().allocations, before.allocations + 1);  // of the arena's memory
  EXPECT_EQ(bits_of(encoder(), result), want);
}

TEST_P(OnArena, WhatOutlivesARehearsalIsRefused) {
  Arena arena(pool());
  Tensor kept;
  expect_error(Errc::kArgument, "must not outlive it, got 1 tensors that do", [&] {
    encoder().rehearse([&] {
      arena.rehearse([&] {
        const Tensor a = floats(100);
        kept = floats(200);
      });
    });
  });
  kept = {};
  expect_error(Errc::kIo, "as planned", [&] {
    encoder().rehearse([&] {
      arena.rehearse([&] {
        const Tensor a = floats(100);
        throw Error(Errc::kIo, "as planned");
      });
    });
  });
  for (int i = 0; i < 2; ++i) {  // the arena is as new
    const Arena::Step now(arena);
    const Tensor a = encoder().full({100}, DType::kF32, 3);
    EXPECT_EQ(a.buffer().storage()->backing != nullptr, i == 1);
  }
  EXPECT_EQ(arena.stats().misses, 0U);
}

TEST_P(OnArena, ARehearsalLaunchesAndCopiesNothing) {
  const Tensor x = upload({1, 2, 3}, {3}, DType::kF32);
  float host[3] = {};
  encoder().rehearse([&] {
    encoder().add_into(x, x);
    expect_error(Errc::kArgument, "may only run kernels, got download",
                 [&] { encoder().download(x, host, sizeof host); });
    expect_error(Errc::kArgument, "may only run kernels, got upload",
                 [&] { encoder().upload(host, sizeof host, x); });
    expect_error(Errc::kArgument, "may only run kernels, got rehearse",
                 [&] { encoder().rehearse([] {}); });
  });
  EXPECT_EQ(download(x), (std::vector<double>{1, 2, 3}));
  encoder().add_into(x, x);
  EXPECT_EQ(download(x), (std::vector<double>{2, 4, 6}));
}

// Steps of several shapes, and graphs of them, in one piece of memory.
TEST_P(OnArena, ArenasShareMemory) {
  const auto memory = std::make_shared<ArenaMemory>(pool());
  Arena large(memory), small(memory);
  const auto step = [&](Arena& arena, std::int64_t n, double value, const Tensor& result) {
    const Arena::Step now(arena);
    const Tensor a = encoder().full({n}, DType::kF32, value);
    const Tensor b = encoder().full({n}, DType::kF32, 1);
    encoder().add_into(a, b);
    encoder().copy(a, result);
  };
  const Tensor of_large = floats(5000), of_small = floats(1000);
  step(large, 5000, 1, of_large);
  step(small, 1000, 1, of_small);
  step(large, 5000, 2, of_large);  // takes the memory
  const std::size_t allocations = pool().stats().allocations;
  step(small, 1000, 3, of_small);
  EXPECT_EQ(pool().stats().allocations, allocations);
  EXPECT_EQ(memory->bytes(), large.stats().bytes);
  EXPECT_EQ(download(of_large), std::vector<double>(5000, 3));
  EXPECT_EQ(download(of_small), std::vector<double>(1000, 4));

  const auto captured = [&](Arena& arena, std::int64_t n, const Tensor& result) {
    return capture(encoder(), [&] { step(arena, n, 7, result); });
  };
  const auto graph_of_large = captured(large, 5000, of_large);
  const auto graph_of_small = captured(small, 1000, of_small);
  step(large, 5000, 1, of_large);  // goes on beside its graph
  encoder().replay(*graph_of_small);
  EXPECT_EQ(download(of_large), std::vector<double>(5000, 2));
  EXPECT_EQ(download(of_small), std::vector<double>(1000, 8));
  encoder().replay(*graph_of_large);
  EXPECT_EQ(download(of_large), std::vector<double>(5000, 8));
  EXPECT_EQ(pool().stats().allocations, allocations);
}

// Who was there before it grew keeps what it has.
TEST_P(OnArena, SharedMemoryGrows) {
  const auto memory = std::make_shared<ArenaMemory>(pool());
  Arena small(memory), large(memory);
  const auto step = [&](Arena& arena, std::int64_t n) {
    const Arena::Step now(arena);
    const Tensor a = floats(n);
    return address(a);
  };
  step(small, 1000);
  const char* place = step(small, 1000);
  const std::size_t bytes = memory->bytes();
  step(large, 9000);
  step(large, 9000);
  EXPECT_GT(memory->bytes(), bytes);
  EXPECT_EQ(step(small, 1000), place);
}

TEST_P(OnArena, GuardedMemoryIsNotPlanned) {
  pool().set_guarded(true);
  Arena arena(pool());
  for (int i = 0; i < 3; ++i) {
    const Arena::Step now(arena);
    EXPECT_EQ(floats(100).buffer().storage()->backing, nullptr);
  }
  EXPECT_EQ(arena.stats().bytes, 0U);
}

// Random lives: what is in use at the same time never shares a byte.
TEST_P(OnArena, PlacesInUseAreApart) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Arena arena(pool());
    for (int i = 0; i < 3; ++i) {
      Noise noise(seed);
      const Arena::Step now(arena);
      std::vector<Tensor> live;
      for (int event = 0; event < 200; ++event) {
        if (noise.below(5) < 3 || live.empty()) {
          live.push_back(floats(1 + noise.below(5000)));
        } else {
          live.erase(live.begin() + noise.below(static_cast<std::int64_t>(live.size())));
        }
        for (const Tensor& a : live) {
          for (const Tensor& b : live) {
            ASSERT_TRUE(address(a) == address(b) ? &a == &b
                                                 : address(a) + a.bytes() <= address(b) ||
                                                       address(b) + b.bytes() <= address(a));
          }
        }
      }
      live.clear();
      if (i > 0) {
        EXPECT_EQ(arena.stats().misses, 0U);
      }
    }
    EXPECT_LE(static_cast<double>(arena.stats().bytes),
              1.25 * static_cast<double>(arena.stats().most_live) + 256 * 100);
  }
}

MT_ON_EVERY_BACKEND(OnArena);

}  // namespace
}  // namespace mlxtape::test
