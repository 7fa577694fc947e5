#include "mlxtape/ops/random.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

constexpr std::uint64_t kSeed = 0x123456789abcdef;
using Words = std::vector<std::uint32_t>;

// Threefry-2x32 a word at a time, and the order of words that random.h states.
std::pair<std::uint32_t, std::uint32_t> hash(std::uint32_t k0, std::uint32_t k1, std::uint32_t x,
                                             std::uint32_t y) {
  const std::array<std::uint32_t, 3> k{k0, k1, k0 ^ k1 ^ 0x1bd11bdaU};
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  x += k[0];
  y += k[1];
  for (std::uint32_t four = 0; four < 5; ++four) {
    for (const int turn : kTurns[four % 2]) {
      x += y;
      y = (std::rotl(y, turn)) ^ x;
    }
    x += k[(four + 1) % 3];
    y += k[(four + 2) % 3] + four + 1;
  }
  return {x, y};
}
Words words(std::uint64_t seed, std::int64_t n) {
  const auto k0 = static_cast<std::uint32_t>(seed >> 32U), k1 = static_cast<std::uint32_t>(seed);
  Words out(static_cast<std::size_t>(n));
  const std::size_t pairs = out.size() / 2, h = out.size() - pairs;
  for (std::size_t i = 0; i < pairs; ++i) {
    std::tie(out[i], out[i + h]) =
        hash(k0, k1, static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(i + h));
  }
  if (h != pairs) out[pairs] = hash(k0, k1, static_cast<std::uint32_t>(pairs), 0).first;
  return out;
}

double unit(std::uint32_t word, DType dtype) {
  const double below = dtype == DType::kF32   ? 1 - 0x1p-24
                       : dtype == DType::kF16 ? 1 - 0x1p-11
                                              : 1 - 0x1p-8;
  return std::min(static_cast<double>(static_cast<float>(word)) * 0x1p-32, below);
}

// By Newton's method on erfc, which is exact where erf is close to 1.
double erfinv(double a) {
  const double size = std::abs(a);
  double z = std::sqrt(-std::log1p(-size * size)) * 0.9;
  for (int i = 0; i < 60; ++i) {
    z += (std::erfc(z) - (1 - size)) / (2 / std::sqrt(M_PI) * std::exp(-z * z));
  }
  return std::copysign(z, a);
}

const std::vector<std::int64_t> kSizes{0,  1,  2,  3,  5,  7,   8,   15,   16,   17,    31,
                                       32, 33, 63, 64, 65, 127, 128, 1000, 1001, 16384, 40003};

class Random : public OnDevice {
 protected:
  Tensor key(std::uint64_t seed = kSeed) { return ops::random_key(encoder(), seed); }
  Words u32(const Tensor& t) {
    Words out(static_cast<std::size_t>(t.size()));
    encoder().download(t, out.data(), t.bytes());
    return out;
  }
  std::vector<std::uint16_t> u16(const Tensor& t) {
    std::vector<std::uint16_t> out(static_cast<std::size_t>(t.size()));
    encoder().download(t, out.data(), t.bytes());
    return out;
  }
};

// k = mx.random.key(0x123456789abcdef); mx.random.split(k, 4)
TEST_P(Random, KeysAreThoseOfMlx) {
  EXPECT_EQ(u32(key()), (Words{0x01234567, 0x89abcdef}));
  EXPECT_EQ(u32(ops::split_key(encoder(), key(), 4)),
            (Words{0x9e240cb9, 0x4f100eac, 0x08cda27e, 0xe06d7976, 0x5203310d, 0x7456923d,
                   0xbfa5ab77, 0x92384c4d}));
  EXPECT_EQ(u32(ops::split_key(encoder(), key(), 3)),
            (Words{0xb56625d1, 0xca66f4e5, 0x25061b0a, 0xa83ecbad, 0xbbce5c09, 0x23683a9b}));
  EXPECT_EQ(ops::split_key(encoder(), key(), 0).shape(), (Shape{0, 2}));
}

TEST_P(Random, BitsMatchTheFormula) {
  for (const std::int64_t n : kSizes) {
    EXPECT_EQ(u32(ops::random_bits(encoder(), key(), {n})), words(kSeed, n)) << n;
  }
  const std::int64_t many = scaled(1000);
  EXPECT_EQ(u32(ops::random_bits(encoder(), key(7), {4, many, 1000})), words(7, 4000 * many));
}

// Narrow types are the bytes of the same words.
TEST_P(Random, NarrowBitsAreBytesOfWords) {
  for (const DType dtype : {DType::kU8, DType::kU16}) {
    for (const std::int64_t n : kSizes) {
      const Tensor t = ops::random_bits(encoder(), key(), {n}, dtype);
      const Words from = words(kSeed, static_cast<std::int64_t>(t.bytes() + 3) / 4);
      std::vector<unsigned char> want(t.bytes()), got(t.bytes());
      if (n != 0) std::memcpy(want.data(), from.data(), want.size());
      encoder().download(t, got.data(), got.size());
      EXPECT_EQ(got, want) << n << name_of(dtype);
    }
  }
}

// The same seed as KeySequence of MLX: mx.random.seed(7), then mx.random.uniform(shape=(3,)) twice.
TEST_P(Random, SequenceIsThatOfMlx) {
  ops::KeySequence keys(encoder(), 7);
  EXPECT_EQ(u32(ops::random_uniform(encoder(), keys.next(encoder()), {3})),
            (Words{0x3d9f3935, 0x3e32a426, 0x3f55284f}));
  EXPECT_EQ(u32(ops::random_uniform(encoder(), keys.next(encoder()), {3})),
            (Words{0x3f15b004, 0x3edfa60c, 0x3f34dbc1}));
  ops::KeySequence again(key(7));
  const auto rows = u32(ops::split_key(encoder(), key(7), 2));
  EXPECT_EQ(u32(again.next(encoder())), (Words{rows[2], rows[3]}));
  EXPECT_EQ(u32(again.state()), (Words{rows[0], rows[1]}));
}

// A row of split_key is a key; so is one that is not contiguous.
TEST_P(Random, KeysMayBeViews) {
  const Tensor keys = ops::split_key(encoder(), key(), 3);
  const Words all = u32(keys);
  const std::uint64_t second = (std::uint64_t{all[2]} << 32U) | all[3];
  EXPECT_EQ(u32(ops::random_bits(encoder(), keys.select(0, 1), {9})), words(second, 9));
  const std::uint64_t across = (std::uint64_t{all[0]} << 32U) | all[2];
  EXPECT_EQ(u32(ops::random_bits(encoder(), keys.slice(0, 0, 2).select(1, 0), {9})),
            words(across, 9));
}

// mx.random.uniform(shape=..., key=k), mx.random.uniform(-0.3, 2.7, ..., dtype, key=k)
TEST_P(Random, UniformHasTheBitsOfMlx) {
  const auto f32 = [&](Shape shape, double low, double high) {
    return u32(ops::random_uniform(encoder(), key(), shape, DType::kF32, low, high));
  };
  EXPECT_EQ(f32({1}, 0, 1), (Words{0x3e9b1092}));
  EXPECT_EQ(f32({5}, 0, 1), (Words{0x3f356626, 0x3f4a66f5, 0x3f27064d, 0x3f283ecc, 0x3f3bce5c}));
  EXPECT_EQ(f32({2, 3}, -0.3, 2.7),
            (Words{0x3fe9b2d2, 0x40049a05, 0x3e091610, 0x3fd5f7cc, 0x3ff34f24, 0x3deb5f14}));
  EXPECT_EQ(u16(ops::random_uniform(encoder(), key(), {6}, DType::kF16, -0.3, 2.7)),
            (std::vector<std::uint16_t>{0x3f4d, 0x4024, 0x304a, 0x3eb0, 0x3f99, 0x2f5c}));
  EXPECT_EQ(u16(ops::random_uniform(encoder(), key(), {7}, DType::kBF16, -0.3, 2.7)),
            (std::vector<std::uint16_t>{0x3fc6, 0x3f20, 0xbe4a, 0x3f43, 0x3f29, 0x3f88, 0x3ffa}));
}

TEST_P(Random, UniformMatchesTheFormula) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const auto& [low, high] : {std::pair{0.0, 1.0}, {-0.7, 3.1}}) {
      const double lo = round_to(dtype, low);
      const double span = round_to(dtype, round_to(dtype, high) - lo);
      for (const std::int64_t n : kSizes) {
        const Words from = words(kSeed, n);
        std::vector<double> want;
        for (const std::uint32_t w : from) {
          const double u = round_to(dtype, unit(w, dtype));
          want.push_back(round_to(dtype, round_to(dtype, span * u) + lo));
        }
        EXPECT_EQ(download(ops::random_uniform(encoder(), key(), {n}, dtype, low, high)), want)
            << n << name_of(dtype);
      }
    }
  }
}

// Of 2²⁰ numbers many lie so close to 1 that they would round to it.
TEST_P(Random, UniformIsBelowOne) {
  const std::int64_t n = scaled(1 << 20);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto u = download(ops::random_uniform(encoder(), key(), {n}, dtype));
    const auto [least, most] = std::minmax_element(u.begin(), u.end());
    EXPECT_GE(*least, 0);
    EXPECT_LT(*most, 1);
    double sum = 0;
    for (const double v : u) sum += v;
    // The mean of n is off by 1/sqrt(12·n) times a normal number.
    const auto count = static_cast<double>(n);
    EXPECT_LT(std::abs(sum / count - 0.5), 6 / std::sqrt(12 * count));
  }
}

// mx.random.normal((7,), key=k) and mx.random.normal((6,), loc=0.5, scale=3.0, key=k): to the rounding of
// each step there.
TEST_P(Random, NormalIsThatOfMlx) {
  const auto near = [&](Shape shape, double mean, double deviation,
                        const std::vector<double>& want) {
    const auto got =
        download(ops::random_normal(encoder(), key(), shape, DType::kF32, mean, deviation));
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_NEAR(got[i], want[i], 8 * 0x1p-24 * (std::abs(mean) + std::abs(want[i])));
    }
  };
  near({7}, 0, 1,
       {0.2995443344116211, -0.499144583940506, -1.819891333580017, -0.37189409136772156,
        -0.46668896079063416, -0.11443624645471573, 0.6701586246490479});
  near({6}, 0.5, 3,
       {2.147810459136963, 2.9258639812469482, -2.679311990737915, 1.7145673036575317,
        2.371372938156128, -2.7638418674468994});
}

TEST_P(Random, NormalMatchesOracle) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const auto& [mean, deviation] : {std::pair{0.0, 1.0}, {-2.5, 0.3}}) {
      for (const std::int64_t n : kSizes) {
        Refs want;
        for (const std::uint32_t w : words(kSeed, n)) {
          const double a =
              static_cast<float>(2 * unit(w, DType::kF32) - (1 - 0x1p-24));  // made in f32
          const double z = deviation * std::sqrt(2) * erfinv(a);
          want.push_back({mean + z, std::abs(mean) + std::abs(z)});
        }
        expect_close("normal " + std::to_string(n) + " " + name_of(dtype),
                     download(ops::random_normal(encoder(), key(), {n}, dtype, mean, deviation)),
                     want, dtype, 1);
      }
    }
  }
}

// mx.random.bernoulli(0.3, (11,), key=k); mx.random.bernoulli(mx.array([0, 0.2, 0.5, 0.8, 1]), (3, 5), key=k)
TEST_P(Random, BernoulliIsThatOfMlx) {
  using V = std::vector<double>;
  EXPECT_EQ(download(ops::random_bernoulli(encoder(), key(), {11}, 0.3)),
            (V{1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0}));
  const V want{0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1};
  EXPECT_EQ(download(ops::random_bernoulli(encoder(), key(), {3, 5},
                                           upload({0, 0.2, 0.5, 0.8, 1}, {5}, DType::kF32))),
            want);
}

TEST_P(Random, BernoulliMatchesTheFormula) {
  for (const double p : {0.0, 1e-9, 0.25, 0.5, 0.9, 1.0, 1.5, -1.0, std::nan("")}) {
    for (const std::int64_t n : kSizes) {
      std::vector<double> want;
      for (const std::uint32_t w : words(kSeed, n)) {
        want.push_back(static_cast<float>(w) < static_cast<float>(p) * (0x1p32F + 512) ? 1 : 0);
      }
      const Tensor got = ops::random_bernoulli(encoder(), key(), {n}, p);
      EXPECT_EQ(got.dtype(), DType::kBool);
      EXPECT_EQ(download(got), want) << n << " " << p;
    }
  }
  // Just enough for the smallest of the words, and for no other.
  const Words many = words(kSeed, 40003);
  const double least = *std::min_element(many.begin(), many.end());
  double count = 0;
  for (const double is :
       download(ops::random_bernoulli(encoder(), key(), {40003}, (least + 0.5) / (0x1p32 + 512)))) {
    count += is;
  }
  EXPECT_EQ(count, 1);
  EXPECT_EQ(ops::bernoulli_last_word(1), 0xffffffffU);
  EXPECT_EQ(ops::bernoulli_last_word(0x1p-32), 1U);  // those below 1.0000001
  EXPECT_EQ(ops::bernoulli_last_word(0x1p-33), 0U);
}

// Large enough to be written past the cache.
TEST_P(Random, LargeDrawsMatchTheFormula) {
  const std::int64_t whole = scaled(3 << 20);
  for (const std::int64_t n : {whole, whole + 6}) {  // the second half begins a line, or not
    const Words from = words(kSeed, n);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      std::vector<double> want;
      for (const std::uint32_t w : from) want.push_back(round_to(dtype, unit(w, dtype)));
      EXPECT_TRUE(download(ops::random_uniform(encoder(), key(), {n}, dtype)) == want) << n;
    }
    EXPECT_TRUE(u32(ops::random_bits(encoder(), key(), {n})) == from) << n;
  }
}

// A graph that draws has another key each time it is replayed, the same ones as without a graph.
TEST_P(Random, ReplayedStepsDrawOn) {
  ops::KeySequence keys(encoder(), 5), plain(encoder(), 5);
  encoder().begin_capture();
  const Tensor drawn = ops::random_bits(encoder(), keys.next(encoder()), {4});
  const auto graph = encoder().end_capture();
  for (int step = 0; step < 3; ++step) {
    encoder().replay(*graph);
    EXPECT_EQ(u32(drawn), u32(ops::random_bits(encoder(), plain.next(encoder()), {4})));
  }
}

TEST_P(Random, SameBitsOnEveryRun) {
  expect_repeatable(encoder(), [&] {
    return std::vector<Tensor>{ops::random_uniform(encoder(), key(), {100003}),
                               ops::random_normal(encoder(), key(), {100003}, DType::kBF16)};
  });
}

TEST(RandomCheck, SaysWhatIsWrong) {
  const auto key = Tensor::meta({2}, DType::kU32);
  const auto p = Tensor::meta({3});
  expect_refused({
      {"key shape", ops::random_key_check("x", Tensor::meta({3}, DType::kU32)), Errc::kShape,
       "x: the key must be [2], got [3]"},
      {"key type", ops::random_key_check("x", Tensor::meta({2})), Errc::kDType, "got f32"},
      {"split key", ops::split_key_check(Tensor::meta({2}), 1), Errc::kDType, "split_key"},
      {"split", ops::split_key_check(key, -1), Errc::kArgument, "got -1"},
      {"bits key", ops::random_bits_check(Tensor::meta({2}), DType::kU32), Errc::kDType, "key"},
      {"bits", ops::random_bits_check(key, DType::kU64), Errc::kDType, "got u64"},
      {"uniform key", ops::random_uniform_check(p, DType::kF32, 0, 1), Errc::kShape, "key"},
      {"uniform", ops::random_uniform_check(key, DType::kI32, 0, 1), Errc::kDType, "got i32"},
      {"low", ops::random_uniform_check(key, DType::kF32, -INFINITY, 1), Errc::kArgument,
       "low and high must be finite"},
      {"normal key", ops::random_normal_check(p, DType::kF32, 0, 1), Errc::kShape, "key"},
      {"normal", ops::random_normal_check(key, DType::kF64, 0, 1), Errc::kDType, "got f64"},
      {"deviation", ops::random_normal_check(key, DType::kF32, 0, NAN), Errc::kArgument,
       "deviation must be finite"},
      {"bernoulli key", ops::random_bernoulli_check(p, {3}, p), Errc::kShape, "key"},
      {"p type", ops::random_bernoulli_check(key, {3}, Tensor::meta({3}, DType::kI32)),
       Errc::kDType, "got i32"},
      {"p shape", ops::random_bernoulli_check(key, {2}, p), Errc::kShape, "to [2], got [3]"},
      {"p far",
       ops::random_bernoulli_check(key, {3}, Tensor::meta({3}, DType::kF32, Backend::kMetal)),
       Errc::kDevice, "where the key is"},
  });
}

TEST_P(Random, KeyAdvancedInPlaceMustBeContiguous) {
  const Tensor across = ops::split_key(encoder(), key(), 2).select(1, 0);
  EXPECT_THROW(ops::advance_key(encoder(), across), Error);
  EXPECT_THROW(ops::KeySequence(across.slice(0, 0, 1)), Error);
}

MT_ON_EVERY_BACKEND(Random);

}  // namespace
}  // namespace mlxtape::test
