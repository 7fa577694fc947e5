// Planted faults: each is found in every order that is tried, and said in words that lead to it. Beside them stand kernels
// that look alike and are right.
#include <gtest/gtest.h>

#include "backends/metal/emulator_support.h"

namespace mlxtape::emulator::test {
namespace {

constexpr std::uint64_t kSeeds[] = {0, 1, 2};
#ifdef MLXTAPE_COUNTED_KERNELS
constexpr bool kIsCounted = true;
#else
constexpr bool kIsCounted = false;
#endif

// What launches need that is not alike in all: two buffers of 256 floats, the second one a part of the first or not.
struct Row {
  const char* kernel;
  const char* says;  // a piece of it; empty: no fault
  std::uint32_t groups = 1, threads = 64;
  bool in_checked_alone = true;
  std::uint32_t bytes = 4;  // of a buffer, for each thread
};

void PrintTo(const Row& row, std::ostream* out) { *out << row.kernel; }

class Fault : public testing::TestWithParam<Row> {};

std::string fault_of(const Row& row, std::uint64_t seed) {
  Memory<float> x(counting(256)), y(counting(256));
  Launch launch(row.kernel);
  launch.buffer(0, x).buffer(1, y).seed(seed);
  // Fewer of them are the tensor: what reaches further hits memory of the test's and not of others.
  launch.dispatch().buffers[0].end = launch.dispatch().buffers[1].end =
      std::size_t{row.groups} * row.threads * row.bytes;
  return launch.run(row.groups, row.threads).fault;
}

TEST_P(Fault, IsFoundInEveryOrder) {
  const Row& row = GetParam();
  if (row.in_checked_alone && *row.says != '\0' && !find_kernel(row.kernel)->is_checked) {
    GTEST_SKIP() << "the checked program finds it";
  }
  for (const std::uint64_t seed : kSeeds) {
    const std::string fault = fault_of(row, seed);
    if (*row.says == '\0') {
      EXPECT_EQ(fault, "") << "seed " << seed;
    } else {
      EXPECT_EQ(fault.find(std::string(row.kernel) + ": "), 0U) << fault;
      EXPECT_NE(fault.find(row.says), std::string::npos) << "seed " << seed << ": " << fault;
    }
  }
}

// Of one simdgroup or two, in groups of 64 threads: what is found whenever lanes wait for each other.
constexpr Row kWaiting[] = {
    {"returns_early", "is not reached by every thread: 23 of 64 threads ended before it", 1, 64,
     false},
    {"barrier_under_if",
     "threads wait at different barriers: tests/backends/metal/emulator_faults.metal:", 1, 64,
     false},
    {"sum_under_if",
     "is reached by 16 of 32 threads of the simdgroup, others wait in simd_sum at "
     "tests/backends/metal/emulator_faults.metal:",
     1, 64, false},
    {"sum_after_return", "is reached by 21 of 32 threads of the simdgroup, 11 have ended before it",
     1, 64, false},
    {"sums_of_two_branches",
     "is reached by 16 of 32 threads of the simdgroup, others wait in simd_", 1, 64, false},
    {"shuffle_past_the_end", "simd_shuffle reads lane", 1, 64, false},
    {"broadcast_from_many", "from lanes that differ among the threads", 1, 64, false},
    {"too_much_room", "threadgroup memory: at most 32768 bytes, and with 'one_more' it takes 32772",
     1, 64, false},
    {"constant_not_set", "function constant 0 is read and not set", 1, 64, false},
    {"at_most_32", "at most 32 threads in a threadgroup, got 64x1x1", 1, 64, false},
    {"needs_argument", "threadgroup(0) has no length", 1, 64, false},
    {"sum_under_if", "is reached by 16 of 32 threads", 3, 96, false},
    {"simdgroup_barrier_is_enough", "", 1, 64, false},
    {"sum_after_return", "needs a simdgroup of 32 threads, this has 20", 1, 20, false},
};
INSTANTIATE_TEST_SUITE_P(Waiting, Fault, testing::ValuesIn(kWaiting));

constexpr Row kRaces[] = {
    {"no_barrier", "threadgroup memory 'room' at byte"},
    {"barrier_of_other_memory",
     "with no barrier between that orders them: threadgroup memory 'room'"},
    {"writes_after_reads", "with no barrier between that orders them: threadgroup memory 'room'"},
    {"reads_of_many", "with no barrier between that orders them: threadgroup memory 'one'"},
    {"simdgroup_barrier_is_not_enough", "threadgroup memory 'room'"},
    {"sum_orders_nothing", "with no barrier between that orders them: threadgroup memory 'room'"},
    {"device_barrier_without_flag", "with no barrier between that orders them: buffer(0)"},
    {"groups_write_one_place",
     "with no barrier between that orders them: buffer(0) at byte 0 of 512", 2},
    {"groups_add_without_atomics", "buffer(0) at byte 0 of 8", 2, 1},
    {"group_reads_anothers", "of threadgroup", 4},
    {"device_barrier", ""},
    {"atomics_of_all", "", 32, 8},
    {"add_one", "", 4},
};
INSTANTIATE_TEST_SUITE_P(Races, Fault, testing::ValuesIn(kRaces));

constexpr Row kMemory[] = {
    {"one_not_written", "reads what nobody wrote: threadgroup memory 'room' at byte 252 of 256"},
    {"adds_to_nothing", "reads what nobody wrote: threadgroup memory 'room'"},
    {"past_the_end", "writes out of bounds: buffer(0) at byte 256 of 256"},
    {"reads_past_the_end", "reads out of bounds: buffer(0) at byte 256 of 256"},
    {"before_the_beginning", "writes out of bounds: buffer(0) at byte -4 of 256"},
    {"past_a_variable", "past the end of threadgroup memory 'room' at byte 256 of 256"},
    {"writes_const", "writes a const buffer: buffer(0)"},
    {"writes_constant", "writes a const buffer: buffer(0)"},
#ifndef __clang__  // which copies a vector without a look at its address
    {"misaligned", "at an address that is no multiple of 16: buffer(0) at byte", 1, 4, true, 16},
#endif
    {"anothers_stack", "reads the memory of another thread"},
    {"past_an_array", "index 4 of an array of 4"},
};
INSTANTIATE_TEST_SUITE_P(Memory, Fault, testing::ValuesIn(kMemory));

// One block under two bindings: what one parameter writes and the other reads is one memory.
TEST(FaultsOfMemory, OverlappingBindings) {
  if (!find_kernel("in_place_of_another")->is_checked)
    GTEST_SKIP() << "the checked program finds it";
  for (const std::uint64_t seed : kSeeds) {
    Memory<float> x(counting(64));
    Launch launch("in_place_of_another");
    const std::string fault = launch.buffer(0, x).buffer(1, x).seed(seed).run(1, 64).fault;
    EXPECT_NE(fault.find("with no barrier between that orders them: buffer("), std::string::npos)
        << fault;
  }
  Memory<float> x(counting(64)), y(64);
  EXPECT_EQ(Launch("in_place_of_another").buffer(0, x).buffer(1, y).run(1, 64).fault, "");
}

TEST(FaultsOfMemory, AtomicsAndPlainAccessesOfOnePlace) {
  if (!find_kernel("atomic_and_plain")->is_checked) GTEST_SKIP() << "the checked program finds it";
  for (const std::uint64_t seed : kSeeds) {
    Memory<std::uint32_t> x(1), y(1);
    const std::string fault =
        Launch("atomic_and_plain").buffer(0, x).buffer(1, x).seed(seed).run(1, 64).fault;
    EXPECT_NE(fault.find("with no barrier between"), std::string::npos) << fault;
    EXPECT_EQ(Launch("atomic_and_plain").buffer(0, x).buffer(1, y).seed(seed).run(1, 64).fault, "");
  }
}

// An address that is in no resident buffer, and one that may not be written.
TEST(FaultsOfMemory, AddressesInConstants) {
  if (!find_kernel("by_an_old_address")->is_checked) GTEST_SKIP() << "the checked program finds it";
  for (const std::uint64_t seed : kSeeds) {
    Memory<float> x(64);
    const auto address = reinterpret_cast<std::uintptr_t>(&x[0]);
    Launch launch("by_an_old_address");
    launch.bytes(0, address).seed(seed);
    EXPECT_NE(launch.run(1, 64).fault.find("writes out of bounds: "), std::string::npos);
    const Resident read_only[] = {{&x.block(), false}}, writable[] = {{&x.block(), true}};
    launch.dispatch().residents = read_only;
    EXPECT_NE(launch.run(1, 64).fault.find("a const buffer: a buffer reached by its address"),
              std::string::npos);
    launch.dispatch().residents = writable;
    EXPECT_EQ(launch.run(1, 64).fault, "");
  }
}

// A smaller extent than the block: a tensor in a larger buffer.
TEST(FaultsOfMemory, BeyondTheTensor) {
  if (!find_kernel("add_one")->is_checked) GTEST_SKIP() << "the checked program finds it";
  Memory<float> x(64);
  Launch launch("add_one");
  launch.buffer(0, x, 16);
  launch.dispatch().buffers[0].begin = 64;
  launch.dispatch().buffers[0].end = 128;
  EXPECT_EQ(launch.run(1, 16).fault, "");
  EXPECT_NE(launch.run(1, 17).fault.find("out of bounds: buffer(0) at byte 64 of 64"),
            std::string::npos);
}

TEST(FaultsOfMemory, LaunchesThatCannotBe) {
  Memory<float> x(64);
  EXPECT_EQ(Launch("add_one").run(1, 64).fault, "add_one: buffer(0) is not bound");
  EXPECT_EQ(Launch("add_one").buffer(0, x).run(0, 64).fault,
            "add_one: sizes must not be 0, got 0x1x1 threadgroups of 64x1x1");
  EXPECT_EQ(Launch("add_one").buffer(0, x).run(1, 1025).fault,
            "add_one: at most 1024 threads in a threadgroup, got 1025x1x1");
  EXPECT_EQ(Launch("needs_argument").buffer(0, x).bytes(1, 1.0F).room(0, 16).run(1, 1).fault,
            "needs_argument: buffer(1) holds 4 bytes, its parameter has 8");
  EXPECT_EQ(Launch("add_one").bytes(0, 1.0F).run(1, 1).fault,
            "add_one: buffer(0) is written, and was given as bytes");
  Launch launch("add_one");
  launch.buffer(0, x);
  launch.dispatch().buffers[0].offset = 2;
  EXPECT_EQ(launch.run(1, 1).fault, "add_one: buffer(0) begins at byte 2, no multiple of 4");
}

// A fault leaves nothing behind: the next launch is as if there had been none.
TEST(FaultsOfMemory, TheNextLaunchIsAsBefore) {
  for (int i = 0; i < 50; ++i) {
    Memory<float> x(counting(128));
    EXPECT_NE(Launch("returns_early").buffer(0, x).run(2, 64).fault, "");
    Memory<float> y(counting(256));
    EXPECT_EQ(Launch("sum_orders_nothing").buffer(0, y).run(1, 32).fault.empty(),
              !find_kernel("add_one")->is_checked);
    Memory<float> z(64);
    EXPECT_EQ(Launch("twenty_barriers").buffer(0, z).run(1, 64).fault, "");
  }
}

// Not checked, a kernel that touches what is nobody's ends the program, which says its name.
TEST(FaultsOfMemoryDeathTest, SayWhoTheyAre) {
  if (find_kernel("add_one")->is_checked) GTEST_SKIP() << "the checked program goes on";
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const std::uintptr_t address = 64;
  EXPECT_DEATH(Launch("nobodys_memory").bytes(0, address).run(1, 1),
               "nobodys_memory, thread 0 of threadgroup 0, touches memory that is nobody's: 0x40");
  Memory<float> x(64);
  EXPECT_DEATH(Launch("too_much_of_its_own").buffer(0, x).run(1, 1),
               "needs more than 128 KB of private memory");
}

// What a launch read and wrote, by the byte.
TEST(CountersOfBytes, AreExact) {
  if (!find_kernel("norm_backward_f32")->is_checked) GTEST_SKIP() << "the checked program counts";
  constexpr std::size_t kRows = 6, kCols = 128;
  Memory<float> x(kRows * kCols, 1), w(kCols, 1), r(kRows, 1), dy(kRows * kCols, 1),
      dx(kRows * kCols), parts(2 * kCols);
  struct {
    std::int64_t rows, cols;
    std::uint32_t each, unused;
  } args = {kRows, kCols, 3, 0};
  Launch launch("norm_backward_f32");
  launch.buffer(0, x)
      .buffer(1, w)
      .buffer(2, r)
      .buffer(3, dy)
      .buffer(4, dx)
      .buffer(5, parts)
      .bytes(6, args)
      .constant(0, true);
  const Outcome outcome = launch.run(2, 32);
  ASSERT_EQ(outcome.fault, "");
  const std::size_t floats_read = 2 * kRows * kCols + kCols + kRows,
                    floats_written = kRows * kCols + 2 * kCols;
  EXPECT_EQ(outcome.counters.bytes_first_read, 4 * floats_read);
  EXPECT_EQ(outcome.counters.bytes_first_written, 4 * floats_written);
  EXPECT_EQ(outcome.counters.bytes_written, 4 * floats_written);
  EXPECT_GE(outcome.counters.bytes_read, 4 * (floats_read + kCols));
  EXPECT_EQ(outcome.counters.threadgroup_bytes, 256U);
  if (!kIsCounted) return;
  // An element: 3 for dw, 3 for the sum, 4 for dx. A thread: 3 for what dx takes off. A simdgroup: two sums of 32.
  EXPECT_EQ(outcome.counters.operations, kRows * (kCols * 10 + 32 * 3 + 2 * 31));
  EXPECT_EQ(outcome.counters.functions, 0U);
}

TEST(CountersOfOperations, KnowFunctionsAndMatrices) {
  Memory<float> x(64, 1), y(64 * 7);
  const Counters functions = Launch("functions").buffer(0, x).buffer(1, y).run(1, 64).counters;
  EXPECT_EQ(functions.functions,
            kIsCounted ? 64U * 5 : 0U);  // the reciprocal and the root are exact
  EXPECT_EQ(functions.operations, kIsCounted ? 64U : 0U);
  Memory<float> a(32 * 32), b(32 * 32), c(32 * 32);
  const std::uint32_t sizes[] = {32, 32, 32};
  const Counters product = Launch("product_f32")
                               .buffer(0, a)
                               .buffer(1, b)
                               .buffer(2, c)
                               .bytes(3, sizes)
                               .run(1, 128)
                               .counters;
  EXPECT_EQ(product.matrix_products, 4U * 4 * 4);
  EXPECT_EQ(product.operations, 0U);
}

}  // namespace
}  // namespace mlxtape::emulator::test
