// Kernels that are right give what they should, in every order and with any number of workers. One program has them
// compiled as they are, another one checked.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/metal/emulator_support.h"

namespace mlxtape::emulator::test {
namespace {

constexpr std::uint64_t kSeeds[] = {0, 1, 2};

std::vector<std::uint16_t> bfloats(const std::vector<float>& values) {
  std::vector<std::uint16_t> bits;
  for (const float f : values)
    bits.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(f) >> 16));
  return bits;
}
float widened(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// What an exact kernel leaves in its first buffer must not depend on the seed.
TEST(EmulatorLanguage, Scalars) {
  for (const std::uint64_t seed : kSeeds) {
    Memory<float> y(16);
    ASSERT_EQ(Launch("scalars").buffer(0, y).seed(seed).run(1, 1).fault, "");
    const float h = 0.333251953125F, b = 0.333984375F;
    EXPECT_EQ(y[0], h);
    EXPECT_EQ(y[1], b);
    EXPECT_EQ(y[2], 0.4443359375F);
    EXPECT_EQ(y[3], h + h * h);
    EXPECT_EQ(y[4], 0.111328125F);
    EXPECT_EQ(y[5], 1.0F);
    EXPECT_EQ(y[6], h * 0.1F);
    EXPECT_EQ(y[7], 0.1F + 0.2F);
    EXPECT_EQ(y[8], 3.5F);
    EXPECT_EQ(y[9], 0x3555);
    EXPECT_EQ(y[10], 3.14159274F);
    EXPECT_EQ(y[11], std::numeric_limits<float>::infinity());
    EXPECT_EQ(y[12], 0x1p-23F);
    EXPECT_EQ(y[13], 0.199951171875F);
    EXPECT_EQ(y[14], -h);
    EXPECT_EQ(y[15], 100.0F);
  }
}

TEST(EmulatorLanguage, Vectors) {
  Memory<float> y(11), three{0, 0, 0, 1, 2, 3}, four{0, 0, 0, 0, 1, 2, 3, 4};
  Memory<std::uint16_t> out(6, 7);
  ASSERT_EQ(Launch("vectors")
                .buffer(0, y)
                .buffer(1, three)
                .buffer(2, four)
                .buffer(3, out)
                .run(1, 1)
                .fault,
            "");
  const std::vector<float> expected = {14, 1 + 3 * 5 - 13, 0,    12,          3, 2,
                                       92, 1216,           5.5F, 3.14159274F, 41};
  EXPECT_EQ(y.values(), expected);
  EXPECT_EQ(out.values(), (std::vector<std::uint16_t>{7, 7, 7, 0x3C00, 0x4000, 0x4200}));
}

TEST(EmulatorLanguage, WholeNumbers) {
  Memory<std::uint32_t> y(12);
  ASSERT_EQ(Launch("whole_numbers").buffer(0, y).run(1, 1).fault, "");
  EXPECT_EQ(y.values(), (std::vector<std::uint32_t>{8, 31, 3, 0xFFFFFFFE, 0xFFFFFFFF, 24,
                                                    0x80000000, 0xBC, 11, 5, 0x7FFFFFFE, 9}));
}

TEST(EmulatorLanguage, FunctionConstants) {
  Memory<float> y(4), x(counting(4)), bias(counting(4, 10));
  Launch plain("constants");
  ASSERT_EQ(plain.buffer(0, y).buffer(1, x).constant(0, 5).constant(1, false).run(1, 4).fault, "");
  EXPECT_EQ(y.values(), counting(4, 5));
  Launch all("constants");
  all.buffer(0, y).buffer(1, x).buffer(2, bias).constant(0, 5).constant(1, true).constant(2, 2.0F);
  ASSERT_EQ(all.run(1, 4).fault, "");
  EXPECT_EQ(y.values(), (std::vector<float>{30, 34, 38, 42}));
  Launch missing("constants");
  EXPECT_EQ(missing.buffer(0, y).buffer(1, x).constant(0, 5).constant(1, true).run(1, 4).fault,
            "constants: buffer(2) is not bound");
}

// The last threadgroups are smaller where the grid is no multiple.
TEST(EmulatorLanguage, Positions) {
  const Size3 grid{10, 5, 3}, threads{4, 2, 2}, groups{3, 3, 2};
  for (const std::uint64_t seed : kSeeds) {
    Memory<std::uint32_t> y(150);
    Launch launch("positions");
    ASSERT_EQ(launch.buffer(0, y).grid(grid).seed(seed).run(groups, threads).fault, "");
    for (std::uint32_t z = 0; z < 3; ++z) {
      for (std::uint32_t row = 0; row < 5; ++row) {
        for (std::uint32_t x = 0; x < 10; ++x) {
          const Size3 g{x / 4, row / 2, z / 2};
          const Size3 n{g.x == 2 ? 2U : 4U, g.y == 2 ? 1U : 2U, g.z == 1 ? 1U : 2U};
          const std::uint32_t index = (z % 2 * n.y + row % 2) * n.x + x % 4;
          std::uint32_t sum = x % 4 + 10 * (row % 2) + 100 * (z % 2);
          sum = sum * 31 + g.x + 10 * g.y + 100 * g.z;
          sum = sum * 31 + index + n.x + n.y + n.z + 3 + 3 + 2;
          EXPECT_EQ(y[(z * 5 + row) * 10 + x], sum * 31 + index + 1 + 32);
        }
      }
    }
  }
}

TEST(EmulatorLanguage, Simdgroups) {
  constexpr std::size_t n = 64;
  for (const std::uint64_t seed : kSeeds) {
    Memory<float> x(n), y(n * 15);
    for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>(i * 7 % 32) - 11;
    Memory<std::uint32_t> z(n * 2);
    ASSERT_EQ(Launch("lanes").buffer(0, x).buffer(1, y).buffer(2, z).seed(seed).run(1, n).fault,
              "");
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t first = i / 32 * 32, lane = i % 32;
      float sum = 0, before = 0;
      std::uint32_t votes = 0;
      for (std::size_t k = 0; k < 32; ++k) {
        if (k < lane) before += x[first + k];
        sum += x[first + k];
        votes |= (x[first + k] > 0 ? 1U : 0U) << k;
      }
      const float expected[] = {sum,
                                20,
                                -11,
                                x[first] * x[first + 1] * x[first + 2],
                                x[first + 31 - lane],
                                x[first + (lane ^ 5)],
                                x[lane + 3 < 32 ? i + 3 : i],
                                x[lane >= 3 ? i - 3 : i],
                                x[first + 7],
                                x[first],
                                before + x[i],
                                before,
                                x[first + (lane + 9) % 32],
                                496,
                                192};
      for (std::size_t k = 0; k < 15; ++k)
        EXPECT_EQ(y[k * n + i], expected[k]) << "function " << k << ", thread " << i;
      EXPECT_EQ(z[i], votes);
      std::uint32_t parity = 0;
      for (std::uint32_t k = 0; k < 32; ++k) parity ^= k * 77;
      EXPECT_EQ(z[n + i], parity + 3000);
    }
  }
}

TEST(EmulatorLanguage, Atomics) {
  for (const std::uint64_t seed : kSeeds) {
    Memory<std::uint32_t> counts(5);
    Memory<std::int32_t> extremes{-5, 5};
    ASSERT_EQ(Launch("atomics").buffer(0, counts).buffer(1, extremes).seed(seed).run(64, 64).fault,
              "");
    for (std::uint32_t k = 0; k < 4; ++k) EXPECT_EQ(counts[k], 4 * (1024 * 1023 / 2) + 1024 * k);
    EXPECT_EQ(counts[4], 64U);
    EXPECT_EQ(extremes.values(), (std::vector<std::int32_t>{3995, -100}));
  }
}

TEST(EmulatorLanguage, AddressesInConstants) {
  Memory<float> a(counting(8)), b(counting(8)), c(counting(8)), by{3};
  struct {
    float* x[3];
    const float* by;
  } table = {{&a[0], &b[0], &c[0]}, &by[0]};
  const Resident residents[] = {
      {&a.block(), true}, {&b.block(), true}, {&c.block(), true}, {&by.block(), false}};
  Launch launch("scale_all");
  launch.dispatch().residents = residents;
  ASSERT_EQ(launch.bytes(0, table).run(3, 8).fault, "");
  for (Memory<float>* m : {&a, &b, &c}) EXPECT_EQ((*m)[7], 21.0F);
}

// ---- whole kernels ----

struct RowsArgs {
  std::int64_t rows, cols;
  std::uint32_t rows_each, unused;
};

void check_norm_backward(std::uint64_t seed, std::size_t rows, std::size_t cols,
                         const std::string& kernel, std::uint32_t threads) {
  std::vector<float> x, dy, w;
  for (std::size_t i = 0; i < rows * cols; ++i) {
    x.push_back(widened(bfloats({std::sin(static_cast<float>(i) * 0.7F)})[0]));
    dy.push_back(widened(bfloats({std::cos(static_cast<float>(i) * 1.3F)})[0]));
  }
  for (std::size_t c = 0; c < cols; ++c)
    w.push_back(widened(bfloats({1 + 0.01F * static_cast<float>(c)})[0]));
  std::vector<double> parts(cols), dx(rows * cols);
  Memory<float> r(rows);
  for (std::size_t row = 0; row < rows; ++row) {
    double squares = 0, sum = 0;
    for (std::size_t c = 0; c < cols; ++c)
      squares += double{x[row * cols + c]} * double{x[row * cols + c]};
    r[row] = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(cols) + 1e-6));
    const double scale = static_cast<double>(r[row]);
    for (std::size_t c = 0; c < cols; ++c) {
      sum += double{dy[row * cols + c]} * double{w[c]} * double{x[row * cols + c]};
      parts[c] += double{x[row * cols + c]} * scale * double{dy[row * cols + c]};
    }
    for (std::size_t c = 0; c < cols; ++c) {
      const std::size_t i = row * cols + c;
      dx[i] = scale * (double{dy[i]} * double{w[c]} -
                       double{x[i]} * sum * scale * scale / static_cast<double>(cols));
    }
  }
  const std::uint32_t each = 3, groups = static_cast<std::uint32_t>((rows + each - 1) / each);
  Memory<std::uint16_t> bx(bfloats(x)), bw(bfloats(w)), bdy(bfloats(dy)), bdx(rows * cols);
  Memory<float> made(groups * cols);
  Launch launch(kernel);
  launch.buffer(0, bx)
      .buffer(1, bw)
      .buffer(2, r)
      .buffer(3, bdy)
      .buffer(4, bdx)
      .buffer(5, made)
      .constant(0, true)
      .seed(seed);
  launch.bytes(6,
               RowsArgs{static_cast<std::int64_t>(rows), static_cast<std::int64_t>(cols), each, 0});
  ASSERT_EQ(launch.run(groups, threads).fault, "");
  for (std::size_t i = 0; i < rows * cols; ++i) {
    EXPECT_NEAR(widened(bdx[i]), dx[i], std::abs(dx[i]) / 256 + 1e-5) << i;
  }
  for (std::size_t c = 0; c < cols; ++c) {
    double sum = 0;
    for (std::size_t g = 0; g < groups; ++g) sum += double{made[g * cols + c]};
    EXPECT_NEAR(sum, parts[c], 1e-4) << c;
  }
}

TEST(EmulatorKernels, NormBackward) {
  for (const std::uint64_t seed : kSeeds) {
    check_norm_backward(seed, 7, 256, "norm_backward_bf16", 64);
    check_norm_backward(seed, 4, 1000, "norm_backward_bf16_2", 128);
    check_norm_backward(seed, 2, 20, "norm_backward_bf16", 32);
  }
}

TEST(EmulatorKernels, SumByTree) {
  for (const std::uint64_t seed : kSeeds) {
    Memory<float> x(counting(4096)), y(4);
    ASSERT_EQ(
        Launch("sum_by_tree").buffer(0, x).buffer(1, y).room(0, 4096).seed(seed).run(4, 1024).fault,
        "");
    for (std::size_t g = 0; g < 4; ++g)
      EXPECT_EQ(y[g], static_cast<float>(1024 * 1023 / 2 + g * 1024 * 1024));
  }
}

// Small whole numbers: exact in every type and order.
template <class T, class Narrow, class Widen>
void check_product(std::uint64_t seed, const std::string& kernel, Narrow narrow, Widen widen) {
  constexpr std::uint32_t m = 70, n = 33, k = 40;
  Memory<T> a(m * k), b(n * k), c(m * n);
  const auto of = [](std::size_t i) {
    return static_cast<float>(i * 5 % 7) - 3;
  };
  for (std::size_t i = 0; i < m * k; ++i) a[i] = narrow(of(i));
  for (std::size_t i = 0; i < n * k; ++i) b[i] = narrow(of(i + 3));
  struct {
    std::uint32_t m, n, k;
  } args = {m, n, k};
  Launch launch(kernel);
  ASSERT_EQ(launch.buffer(0, a)
                .buffer(1, b)
                .buffer(2, c)
                .bytes(3, args)
                .seed(seed)
                .run({2, 3, 1}, {128, 1, 1})
                .fault,
            "");
  for (std::size_t row = 0; row < m; ++row) {
    for (std::size_t column = 0; column < n; ++column) {
      float sum = 0;
      for (std::size_t i = 0; i < k; ++i) sum += of(row * k + i) * of(column * k + i + 3);
      EXPECT_EQ(widen(c[row * n + column]), sum);
    }
  }
}

TEST(EmulatorKernels, ProductOfMatrices) {
  for (const std::uint64_t seed : kSeeds) {
    check_product<float>(seed, "product_f32", [](float f) { return f; }, [](float f) { return f; });
    check_product<std::uint16_t>(
        seed, "product_bf16", [](float f) { return bfloats({f})[0]; }, widened);
  }
}

TEST(EmulatorKernels, WhereMatricesLie) {
  Memory<float> first(32), second(32), diagonal(64);
  ASSERT_EQ(
      Launch("places").buffer(0, first).buffer(1, second).buffer(2, diagonal).run(1, 32).fault, "");
  const auto at = [](std::size_t lane) {
    return (lane / 16 * 4 + lane / 2 % 4) * 8 + lane / 8 % 2 * 4 + lane % 2 * 2;
  };
  for (std::size_t lane = 0; lane < 32; ++lane) {
    EXPECT_EQ(first[lane], static_cast<float>(at(lane)));
    EXPECT_EQ(second[lane], static_cast<float>(at(lane) + 1));
  }
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(diagonal[i], i % 9 == 0 ? 1.0F : 0.0F);
}

// ---- orders, noise, workers ----

std::vector<float> functions_of(std::uint64_t seed, const std::vector<float>& values) {
  Memory<float> x(values), y(values.size() * 7);
  EXPECT_EQ(Launch("functions")
                .buffer(0, x)
                .buffer(1, y)
                .seed(seed)
                .run(1, static_cast<std::uint32_t>(values.size()))
                .fault,
            "");
  return y.values();
}

TEST(EmulatorNoise, StaysWithinTheTableAndIsThere) {
  std::vector<float> x(500);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = (static_cast<float>(i) - 249.5F) / 100;
  const std::vector<float> exact = functions_of(0, x);
  const float ulps[] = {4, 8, 4, 2, 5, 0, 0};
  for (const std::uint64_t seed : {1, 2, 77}) {
    const std::vector<float> noisy = functions_of(seed, x);
    for (std::size_t k = 0; k < 7; ++k) {
      std::size_t moved = 0;
      for (std::size_t i = k * 500; i < k * 500 + 500; ++i) {
        EXPECT_LE(std::abs(noisy[i] - exact[i]), ulps[k] * std::abs(exact[i]) * 0x1p-23F)
            << k << " " << x[i - k * 500];
        moved += noisy[i] != exact[i] ? 1 : 0;
      }
      EXPECT_EQ(moved > 250, ulps[k] != 0) << k;
    }
    EXPECT_EQ(functions_of(seed, x), noisy) << "a seed gives the same bits every time";
  }
  EXPECT_NE(functions_of(1, x), functions_of(2, x));
}

TEST(EmulatorNoise, WhatIsExactOnTheHardwareStaysSo) {
  const std::vector<float> y = functions_of(3, {0, 1});
  EXPECT_EQ(y[0], 1.0F);          // exp(0)
  EXPECT_EQ(y[2 * 2 + 1], 0.0F);  // log(1)
}

TEST(EmulatorNoise, DenormalsAreFlushedWithASeed) {
  for (const std::uint64_t seed : kSeeds) {
    Memory<float> x{2e-40F, 1};
    ASSERT_EQ(Launch("halve").buffer(0, x).seed(seed).run(1, 2).fault, "");
    EXPECT_EQ(x.values(), (std::vector<float>{seed == 0 ? 1e-40F : 0, 0.5F}));
    volatile float tiny = 1e-39F;
    EXPECT_NE(tiny * 2, 0) << "the host's mode is as it was";
  }
}

// Threads before a barrier, behind it and behind a sum, and threadgroups: in order without a seed, else not.
TEST(EmulatorOrders, AreDrawnFromTheSeed) {
  constexpr std::size_t kThreads = 64, kGroups = 8, n = kThreads * kGroups;
  std::vector<std::vector<std::uint32_t>> seen;
  for (const std::uint64_t seed : {0, 1, 2, 1}) {
    set_workers(1);
    Memory<std::uint32_t> clock(1), y(3 * n);
    ASSERT_EQ(
        Launch("arrivals").buffer(0, clock).buffer(1, y).seed(seed).run(kGroups, kThreads).fault,
        "");
    set_workers(0);
    seen.push_back(y.values());
    std::size_t groups_early = 0;
    for (std::size_t part = 0; part < 3; ++part) {
      std::size_t in_place = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t first =
            *std::min_element(&y[part * n + i / kThreads * kThreads],
                              &y[part * n + i / kThreads * kThreads] + kThreads);
        in_place += y[part * n + i] - first == i % kThreads ? 1 : 0;
        groups_early += first < i / kThreads * kThreads * 3 ? 1 : 0;
      }
      // Without a seed the last at a barrier goes first behind it, and all others one later.
      EXPECT_EQ(in_place > n / 2, seed == 0 && part == 0) << "seed " << seed << ", part " << part;
    }
    EXPECT_EQ(groups_early > 0, seed != 0);
  }
  EXPECT_EQ(seen[1], seen[3]);
  EXPECT_NE(seen[1], seen[2]);
}

TEST(EmulatorWorkers, GiveTheSameBits) {
  for (const std::uint64_t seed : kSeeds) {
    std::vector<float> one;
    for (const unsigned workers : {1U, 2U, 3U, 5U}) {
      set_workers(workers);
      Memory<float> x(counting(64 * 256));
      const Outcome outcome = Launch("twenty_sums").buffer(0, x).seed(seed).run(64, 256);
      ASSERT_EQ(outcome.fault, "");
      EXPECT_EQ(outcome.counters.groups, 64U);
      EXPECT_EQ(outcome.counters.threads, 64U * 256);
      EXPECT_EQ(outcome.counters.exchanges, 64U * 8 * 20);
      if (one.empty()) one = x.values();
      EXPECT_EQ(x.values(), one);
    }
    set_workers(0);
  }
}

TEST(EmulatorLanes, WithoutBarriersNothingSwitches) {
  Memory<float> x(4096);
  EXPECT_EQ(Launch("add_one").buffer(0, x).run(4, 1024).counters.switches, 0U);
  EXPECT_EQ(x.values(), std::vector<float>(4096, 1));
}

TEST(EmulatorLanes, TheLastAtABarrierGoesOn) {
  Memory<float> x(64);
  const Outcome outcome = Launch("twenty_barriers").buffer(0, x).run(1, 64);
  EXPECT_EQ(outcome.counters.barriers, 20U);
  // 63 lanes that wait leave for another at each of 20 barriers, and go back once all have ended.
  EXPECT_LE(outcome.counters.switches, 64U * 20 + 64);
}

}  // namespace
}  // namespace mlxtape::emulator::test
