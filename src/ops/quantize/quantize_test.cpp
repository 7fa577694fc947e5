#include "mlxtape/ops/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::QuantizedWeight;
using ops::QuantizeFormat;
using ops::QuantizeRule;
using Values = std::vector<double>;

constexpr int kBits[] = {2, 3, 4, 5, 6, 8};
constexpr int kGroups[] = {32, 64, 128};
constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr QuantizeRule kRules[] = {QuantizeRule::kGpu, QuantizeRule::kCpu};

std::string text_of(const QuantizeFormat& f) {
  return std::to_string(f.bits) + " bits in " + std::to_string(f.group_size);
}

// ---- the header's rule, one number at a time in f32; codes as a stream of bits ----

struct Group {
  float s, b;
  Values q;
};
Group rule_of(const double* w, const QuantizeFormat& format, QuantizeRule rule) {
  const bool gpu = rule == QuantizeRule::kGpu;
  const auto round = [&](float x) {
    return gpu ? std::round(x) : std::rint(x);
  };
  const auto n = static_cast<float>((1 << format.bits) - 1);
  auto hi = static_cast<float>(*std::max_element(w, w + format.group_size));
  const auto lo = static_cast<float>(*std::min_element(w, w + format.group_size));
  if (gpu) hi = std::max(hi, 0.0F);
  const bool low = std::abs(lo) > std::abs(hi);
  const float e = low ? lo : hi;
  Group group{std::max((hi - lo) / n, 1e-7F), 0, {}};
  if (!low) group.s = -group.s;
  const float q0 = round(e / group.s);
  if (q0 != 0) {
    group.s = e / q0;
    group.b = e;
  }
  for (int i = 0; i < format.group_size; ++i) {
    const float q = round((static_cast<float>(w[i]) - group.b) / group.s);
    group.q.push_back(q > 0 ? std::min(q, n) : 0);  // 0/0 where s is 0
  }
  return group;
}

Values quantized(const Values& q, int bits) {
  Values words(q.size() * static_cast<std::size_t>(bits) / 32);
  for (std::size_t bit = 0; bit < words.size() * 32; ++bit) {
    const auto code = static_cast<unsigned>(q[bit / static_cast<std::size_t>(bits)]);
    if ((code >> bit % static_cast<std::size_t>(bits) & 1U) != 0) {
      words[bit / 32] += std::ldexp(1, static_cast<int>(bit % 32));
    }
  }
  return words;
}

Values dequantized(const Values& words, int bits) {
  Values q(words.size() * 32 / static_cast<std::size_t>(bits));
  for (std::size_t bit = 0; bit < words.size() * 32; ++bit) {
    const auto word = static_cast<std::uint32_t>(words[bit / 32]);
    if ((word >> bit % 32 & 1U) != 0) {
      q[bit / static_cast<std::size_t>(bits)] +=
          1U << static_cast<unsigned>(bit % static_cast<std::size_t>(bits));
    }
  }
  return q;
}

// ---- dequantize and its gradient in double ----

Refs oracle(const Values& q, const Values& s, const Values& b, int group) {
  Refs w;
  for (std::size_t i = 0; i < q.size(); ++i) {
    const std::size_t g = i / static_cast<std::size_t>(group);
    w.push_back({s[g] * q[i] + b[g], std::abs(s[g] * q[i]) + std::abs(b[g])});
  }
  return w;
}

struct Slopes {
  Refs ds, db;
};
Slopes oracle_backward(const Values& q, const Values& dw, int group) {
  const std::size_t groups = q.size() / static_cast<std::size_t>(group);
  Slopes out{Refs(groups, Ref{0, 0}), Refs(groups, Ref{0, 0})};
  for (std::size_t i = 0; i < q.size(); ++i) {
    const std::size_t g = i / static_cast<std::size_t>(group);
    out.ds[g].value += dw[i] * q[i];
    out.ds[g].scale += std::abs(dw[i] * q[i]);
    out.db[g].value += dw[i];
    out.db[g].scale += std::abs(dw[i]);
  }
  return out;
}

Values random_words(Noise& noise, std::int64_t n) {
  Values words;
  for (std::int64_t i = 0; i < n; ++i) {
    words.push_back(static_cast<double>(noise.below(std::int64_t{1} << 32)));
  }
  return words;
}

TEST(QuantizeOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  const Values q = dequantized(random_words(noise, 3 * 6), 6);
  const auto s = random_values(noise, 3, DType::kF64), b = random_values(noise, 3, DType::kF64);
  const auto dw = random_values(noise, 96, DType::kF64);
  const auto loss = [&](const Arrays& at) {
    const Values w = values_of(oracle(q, at[0], at[1], 32));
    return std::inner_product(w.begin(), w.end(), dw.begin(), 0.0);
  };
  const Slopes slopes = oracle_backward(q, dw, 32);
  expect_gradient(loss, {s, b}, {values_of(slopes.ds), values_of(slopes.db)});
}

class Quantize : public OnDevice {
 protected:
  // The kernels' bits must be the rule's.
  void check(const Values& w, const Tensor& at, const QuantizeFormat& format, QuantizeRule rule) {
    Values q, s, b;
    for (std::size_t i = 0; i < w.size(); i += static_cast<std::size_t>(format.group_size)) {
      const Group group = rule_of(&w[i], format, rule);
      q.insert(q.end(), group.q.begin(), group.q.end());
      s.push_back(round_to(at.dtype(), group.s));
      b.push_back(round_to(at.dtype(), group.b));
    }
    const QuantizedWeight out = ops::quantize(encoder(), at, format, rule);
    const std::string what = text_of(format) + " " + name_of(at.dtype()) + " of " +
                             to_string(at.shape()) + " rule " +
                             std::to_string(static_cast<int>(rule));
    EXPECT_EQ(download(out.codes), quantized(q, format.bits)) << what;
    EXPECT_EQ(download(out.scales), s) << what;
    EXPECT_EQ(download(out.biases), b) << what;
  }
  void check(const Values& w, Shape shape, DType dtype, const QuantizeFormat& format) {
    for (const QuantizeRule rule : kRules) check(w, upload(w, shape, dtype), format, rule);
  }

  Values random_weights(std::int64_t n, DType dtype, std::uint64_t seed) {
    Noise noise(seed);
    return random_values(noise, n, dtype, 0.1);
  }
};

TEST_P(Quantize, MatchesTheRuleForEveryFormat) {
  for (const DType dtype : kFloats) {
    for (const int bits : kBits) {
      for (const int group : kGroups) {
        for (const std::int64_t groups : {1, 2, 3, 7, 40}) {
          const auto n = groups * group;
          check(random_weights(n, dtype, static_cast<std::uint64_t>(n + bits)), {1, n}, dtype,
                {bits, group});
        }
      }
    }
  }
}

TEST_P(Quantize, AnyLayout) {
  for (const DType dtype : kFloats) {
    const Values w = random_weights(2 * 3 * 128, dtype, 5);
    for (const QuantizeRule rule : kRules) {
      check(w, upload(w, {2, 3, 128}, dtype), {3, 64}, rule);
      check(w, upload(w, {6, 128}, dtype, 1), {5, 32}, rule);  // off a 16-byte address
      check(w, upload_strided(w, {6, 128}, dtype), {4, 64}, rule);
    }
    for (const Shape& shape : {Shape{0, 64}, Shape{3, 0}, Shape{2, 0, 64}}) {
      check({}, shape, dtype, {4, 64});
      Shape groups = shape;
      groups[groups.rank() - 1] /= 64;
      const QuantizedWeight out = ops::quantize(encoder(), upload({}, shape, dtype));
      EXPECT_EQ(out.scales.shape(), groups);
      EXPECT_EQ(ops::dequantize(encoder(), out).shape(), shape);
    }
  }
}

// What the two rules treat apart, and where the rule has its edges.
TEST_P(Quantize, MatchesTheRuleForUnusualGroups) {
  Noise noise(3);
  const auto group_of = [&](const std::function<double()>& next) {
    Values w;
    for (int i = 0; i < 128; ++i) w.push_back(next());
    return w;
  };
  std::vector<Values> groups;
  for (const double c : {0.0, -0.0, 1.0, -1.0, 0.3, -7e-8, 3e-8, 1e-30, -1e-30, 5e-8}) {
    groups.push_back(group_of([&] { return c; }));
  }
  for (const double size : {1e-30, 4e-8, 1e-7, 1e-6, 1e3, 1e4}) {
    groups.push_back(group_of([&] { return noise.next() * size; }));
    groups.push_back(group_of([&] { return (noise.next() - 1.5) * size; }));
    groups.push_back(group_of([&] { return (noise.next() + 1.5) * size; }));
  }
  for (const int size : {3, 4, 6, 7, 15, 30, 62, 63, 126, 255, 510}) {  // quotients with a half
    groups.push_back(group_of([&] { return static_cast<double>(noise.below(size + 1)) / 2; }));
    groups.push_back(group_of([&] { return -static_cast<double>(noise.below(size + 1)) / 2; }));
    groups.push_back(
        group_of([&] { return static_cast<double>(noise.below(size + 1)) - size / 2.0; }));
  }
  groups.push_back(group_of([&] { return noise.next() < 0 ? -1.0 : 1.0; }));
  for (const DType dtype : kFloats) {
    Values w;
    for (const Values& group : groups) {
      for (const double v : group) w.push_back(round_to(dtype, v));
    }
    for (const int bits : kBits) {
      for (const int group : kGroups) {
        check(w, {static_cast<std::int64_t>(groups.size()), 128}, dtype, {bits, group});
      }
    }
  }
  Values edges = group_of([&] { return noise.next(); });  // 3.4e38/1e-7 overflows
  std::fill(edges.begin(), edges.begin() + 64, 1e35);
  check(edges, {2, 64}, DType::kF32, {4, 64});
}

// Within half a step, or a step where the code is the last; a 0 in the middle within a rounding of b.
TEST_P(Quantize, ComesBackWithinAStep) {
  for (const int bits : kBits) {
    for (const QuantizeRule rule : kRules) {
      const QuantizeFormat format{bits, 32};
      Values w = random_weights(64 * 32, DType::kF32, 7);
      for (std::size_t i = 0; i < w.size(); i += 32) w[i + i / 32 % 32] = 0;
      const QuantizedWeight out =
          ops::quantize(encoder(), upload(w, {64, 32}, DType::kF32), format, rule);
      const Values q = dequantized(download(out.codes), bits), s = download(out.scales),
                   b = download(out.biases), back = download(ops::dequantize(encoder(), out));
      for (std::size_t i = 0; i < w.size(); ++i) {
        const double step = std::abs(s[i / 32]);
        const double most = q[i] == (1 << bits) - 1 ? step : step / 2;
        EXPECT_LE(std::abs(back[i] - w[i]), most * (1 + 0x1p-20) + 0x1p-22 * std::abs(b[i / 32]));
        const double kept = w[i] == 0 ? 0x1p-22 * std::abs(b[i / 32]) : INFINITY;
        EXPECT_LE(std::abs(back[i]), kept);
        EXPECT_TRUE(w[i] != b[i / 32] || back[i] == w[i]);
      }
    }
  }
}

TEST_P(Quantize, WhatIsNotFiniteShows) {
  for (const DType dtype : kFloats) {
    for (const double bad : {std::nan(""), double{INFINITY}, -double{INFINITY}}) {
      for (const std::size_t where : {0, 5, 31, 40, 63}) {
        for (const QuantizeRule rule : kRules) {
          Values w = random_weights(128, dtype, 9);
          w[where] = bad;
          const QuantizedWeight out =
              ops::quantize(encoder(), upload(w, {1, 128}, dtype), {}, rule);
          const Values words = download(out.codes), s = download(out.scales),
                       b = download(out.biases), back = download(ops::dequantize(encoder(), out));
          EXPECT_EQ(Values(words.begin(), words.begin() + 8), Values(8));
          EXPECT_TRUE(std::isnan(s[0]) && std::isnan(b[0]) && std::isnan(back[17]));
          EXPECT_TRUE(std::isfinite(s[1]) && std::isfinite(b[1]) && std::isfinite(back[64]));
        }
      }
    }
  }
  Values w(64, 3e38);
  w[1] = -3e38;
  const QuantizedWeight out = ops::quantize(encoder(), upload(w, {1, 64}, DType::kF32));
  EXPECT_TRUE(std::isinf(download(out.scales)[0]));
  EXPECT_TRUE(std::isnan(download(ops::dequantize(encoder(), out))[0]));
}

// ---- dequantize ----

// s·q + b in f32, rounded once: the same bits, and close to the oracle.
TEST_P(Quantize, DequantizeMatchesOracle) {
  for (const int bits : kBits) {
    for (const int group : kGroups) {
      for (const DType stored : kFloats) {
        for (const std::int64_t groups : {1, 3, 40}) {
          const DType dtype = kFloats[static_cast<std::size_t>(groups + bits) % 3];
          const QuantizeFormat format{bits, group};
          Noise noise(static_cast<std::uint64_t>(groups * group + bits));
          const Values words = random_words(noise, groups * group * bits / 32);
          const Values q = dequantized(words, bits), s = random_values(noise, groups, stored),
                       b = random_values(noise, groups, stored);
          const QuantizedWeight w{
              upload(words, {1, groups * group * bits / 32}, DType::kU32, groups % 2),
              upload(s, {1, groups}, stored), upload(b, {1, groups}, stored), bits, group};
          Values exact;
          for (std::size_t i = 0; i < q.size(); ++i) {
            const std::size_t g = i / static_cast<std::size_t>(group);
            const float product = static_cast<float>(s[g]) * static_cast<float>(q[i]);
            exact.push_back(round_to(dtype, product + static_cast<float>(b[g])));
          }
          const std::string at = text_of(format) + " " + name_of(stored) + " to " + name_of(dtype);
          const Values got = download(ops::dequantize(encoder(), w, dtype));
          EXPECT_EQ(got, exact) << at;
          expect_close(at, got, oracle(q, s, b, group), dtype, 2);
        }
      }
    }
  }
}

// Several axes, and gaps between the numbers.
TEST_P(Quantize, DequantizeTakesAnyLayout) {
  const Tensor w = random_tensor(encoder(), {2, 3, 128}, DType::kF32, 8);
  const QuantizedWeight q = ops::quantize(encoder(), w, {5, 32});
  const auto apart = [&](const Tensor& t) {
    return upload_strided(download(t), t.shape(), t.dtype());
  };
  const QuantizedWeight strided{apart(q.codes), apart(q.scales), apart(q.biases), 5, 32};
  const auto same = [&](const Tensor& got, const Tensor& want) {
    EXPECT_EQ(got.shape(), want.shape());
    EXPECT_EQ(download(got), download(want));
  };
  const Tensor back = ops::dequantize(encoder(), q);
  EXPECT_EQ(back.shape(), w.shape());
  same(ops::dequantize(encoder(), strided), back);
  const auto grads = ops::dequantize_backward(encoder(), q, w);
  const auto again = ops::dequantize_backward(encoder(), strided, apart(w));
  same(again.d_scales, grads.d_scales);
  same(again.d_biases, grads.d_biases);
  const QuantizedWeight rows{q.codes.slice(0, 1, 2), q.scales.slice(0, 1, 2),
                             q.biases.slice(0, 1, 2), 5, 32};
  same(ops::dequantize(encoder(), rows), back.slice(0, 1, 2));
}

// Large enough to be written past the cache.
TEST_P(Quantize, LargeOnesComeBackAsSmallOnes) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::int64_t rows = 1 + scaled(dtype == DType::kF32 ? 1024 : 2048);
    const Tensor w = random_tensor(encoder(), {rows, 1024}, dtype, 3);
    const QuantizedWeight all = ops::quantize(encoder(), w, {5, 64});
    const Tensor back = ops::dequantize(encoder(), all);
    for (const std::int64_t r : {std::int64_t{0}, rows / 2, rows - 1}) {
      const QuantizedWeight one = ops::quantize(encoder(), w.slice(0, r, r + 1), {5, 64});
      EXPECT_EQ(download(one.codes), download(all.codes.slice(0, r, r + 1)));
      EXPECT_EQ(download(ops::dequantize(encoder(), one)), download(back.slice(0, r, r + 1)));
    }
  }
}

TEST_P(Quantize, GradientsMatchOracle) {
  for (const int bits : kBits) {
    for (const int group : kGroups) {
      for (const DType stored : kFloats) {
        const std::int64_t rows = 3, groups = 5, cols = groups * group;
        const DType dtype = kFloats[static_cast<std::size_t>(group / 32 + bits) % 3];
        const QuantizeFormat format{bits, group};
        Noise noise(static_cast<std::uint64_t>(group + bits));
        const Values words = random_words(noise, rows * cols * bits / 32);
        const Values dw = random_values(noise, rows * cols, dtype);
        Tape tape(encoder());
        const auto s = upload(random_values(noise, rows * groups, stored), {rows, groups}, stored);
        const auto b = upload(random_values(noise, rows * groups, stored), {rows, groups}, stored);
        const QuantizedWeight w{upload(words, {rows, cols * bits / 32}, DType::kU32), tape.watch(s),
                                tape.watch(b), bits, group};
        const Tensor y = ops::dequantize(tape, w, dtype);
        tape.backward(y, bits == 3 ? upload_strided(dw, {rows, cols}, dtype)
                                   : upload(dw, {rows, cols}, dtype, bits % 2));
        const Slopes want = oracle_backward(dequantized(words, bits), dw, group);
        const std::string at = text_of(format) + " " + name_of(stored) + " of " + name_of(dtype);
        expect_close("ds " + at, download(tape.grad(w.scales)), want.ds, stored, group);
        expect_close("db " + at, download(tape.grad(w.biases)), want.db, stored, group);
      }
    }
  }
}

// Nothing is recorded without need, and scales may be written before the walk.
TEST_P(Quantize, OneGradientAlone) {
  const Values w = random_weights(128, DType::kF32, 11);
  const QuantizedWeight out = ops::quantize(encoder(), upload(w, {1, 128}, DType::kF32));
  Tape tape(encoder());
  static_cast<void>(ops::dequantize(tape, out));
  EXPECT_EQ(tape.nodes(), 0U);
  const Tensor biases = tape.watch(out.biases);
  const Tensor y = ops::dequantize(tape, {out.codes, out.scales, biases});
  encoder().add_into(out.scales, out.scales);
  tape.backward(y, upload(Values(128, 1), {1, 128}, DType::kF32));
  EXPECT_EQ(download(tape.grad(biases)), Values(2, 64));
}

// FNV-1a of codes, scales and biases, and for f32 of what comes back: by mx.quantize(w, group_size=…, bits=…) and
// mx.dequantize on a CPU, and by the rule for GPUs written with NumPy's f32.
TEST_P(Quantize, AsMlx) {
  Values w;
  for (std::uint32_t i = 0; i < 6 * 256; ++i) {
    const double v = (i * 2654435761U >> 12U) * 0x1p-20 - 0.5;
    const double by_row[] = {v, v - 1, v + 1, v * 0x1p-22, std::floor(v * 16) / 16, 0};
    w.push_back(by_row[i / 256]);
  }
  const struct {
    DType dtype;
    QuantizeFormat format;
    std::uint64_t cpu, gpu;
  } table[] = {
      {DType::kF32, {2, 64}, 0xd826e842afd681e6U, 0x31761706a42a40ebU},
      {DType::kF32, {3, 64}, 0x4d05cb150bbbaec5U, 0x2eb9f58ca06ea8e6U},
      {DType::kF32, {4, 64}, 0x46e35307a495edfbU, 0x68624ba436263170U},
      {DType::kF32, {5, 64}, 0xfb83edabd24ad98aU, 0x39bd57f15a662851U},
      {DType::kF32, {6, 64}, 0x140ebd57cce70622U, 0x11b46369ef461f43U},
      {DType::kF32, {8, 64}, 0x5c00ef8019d57750U, 0x78e0f01118fe4f04U},
      {DType::kF32, {4, 32}, 0xa082e17300ea898aU, 0x820ca10acb410ac3U},
      {DType::kF32, {4, 128}, 0xaf8e57e0838e11cdU, 0xea0674fa42b928b4U},
      {DType::kF16, {2, 64}, 0x96ad2684c93c24aaU, 0xe5f263081300f37bU},
      {DType::kF16, {3, 64}, 0xa77d479e8398e114U, 0x2f3575227b3ca04eU},
      {DType::kF16, {4, 64}, 0x4eed6622b12c40b3U, 0x7308bd061b752a70U},
      {DType::kF16, {5, 64}, 0x23d83a472c17e1e3U, 0x7b459d753dca8089U},
      {DType::kF16, {6, 64}, 0x196883e13accd627U, 0x763cb1a83da89922U},
      {DType::kF16, {8, 64}, 0x48639264448c74feU, 0x3593f762de1cb0b5U},
      {DType::kF16, {4, 32}, 0xb3598545d4b70a45U, 0x167be3886fba80e6U},
      {DType::kF16, {4, 128}, 0x04308e84773bf2c4U, 0x7a2d7d9d763d2718U},
      {DType::kBF16, {2, 64}, 0x72556d913f7bccd3U, 0x6558d557c3e9e1beU},
      {DType::kBF16, {3, 64}, 0xd765b88ee8fa5837U, 0x7fdc66048a9010b8U},
      {DType::kBF16, {4, 64}, 0x1fd90d5a87e111b7U, 0x4b683dbb4c169d9aU},
      {DType::kBF16, {5, 64}, 0x4d26c88124d2fac7U, 0x796755b085b8a210U},
      {DType::kBF16, {6, 64}, 0x7ad8595e27eb52b8U, 0x9902be41cea7edb3U},
      {DType::kBF16, {8, 64}, 0x1e7ceb663fe912dbU, 0x7c25eb195ef62e9bU},
      {DType::kBF16, {4, 32}, 0x295a961577f5a120U, 0xed70f6828c44bfc1U},
      {DType::kBF16, {4, 128}, 0x502e8ad4ffbf0c4dU, 0x69a2fce1774bf492U},
  };
  for (const auto& row : table) {
    for (const QuantizeRule rule : kRules) {
      const Tensor in = upload(w, {6, 256}, row.dtype);
      const QuantizedWeight q = ops::quantize(encoder(), in, row.format, rule);
      std::vector<Tensor> parts{q.codes, q.scales, q.biases};
      if (row.dtype == DType::kF32) parts.push_back(ops::dequantize(encoder(), q));
      std::uint64_t hash = 0xcbf29ce484222325U;
      for (const Tensor& part : parts) {
        for (const unsigned char byte : bits_of(encoder(), part)) {
          hash = (hash ^ byte) * 0x100000001b3U;
        }
      }
      EXPECT_EQ(hash, rule == QuantizeRule::kCpu ? row.cpu : row.gpu)
          << text_of(row.format) << " " << name_of(row.dtype);
    }
  }
}

TEST_P(Quantize, SameBitsOnEveryRun) {
  const Tensor w = random_tensor(encoder(), {scaled(64), 2048}, DType::kBF16, 4);
  for (const QuantizeFormat& format : {QuantizeFormat{3, 32}, {4, 64}, {8, 128}}) {
    const QuantizedWeight codes = ops::quantize(encoder(), w, format);
    expect_repeatable(encoder(), [&] {
      const QuantizedWeight q = ops::quantize(encoder(), w, format);
      const auto grads = ops::dequantize_backward(encoder(), codes, w);
      return std::vector<Tensor>{q.codes,        q.scales,
                                 q.biases,       ops::dequantize(encoder(), codes),
                                 grads.d_scales, grads.d_biases};
    });
  }
}

TEST(QuantizeCheck, SaysWhatIsWrong) {
  const auto meta = [](const Shape& shape, DType dtype = DType::kF32,
                       Backend backend = Backend::kCpu) {
    return Tensor::meta(shape, dtype, backend);
  };
  const auto quantize = [&](const Shape& shape, QuantizeFormat format, DType dtype = DType::kF32) {
    return ops::quantize_check(meta(shape, dtype), format);
  };
  const QuantizedWeight good{meta({3, 16}, DType::kU32), meta({3, 2}), meta({3, 2})};
  ASSERT_FALSE(ops::dequantize_check(good, DType::kF16));
  ASSERT_FALSE(ops::dequantize_backward_check(good, meta({3, 128}, DType::kBF16)));
  const auto with = [&](auto set) {
    QuantizedWeight w = good;
    set(w);
    return ops::dequantize_check(w, DType::kF32);
  };
  const auto far = Backend::kMetal;
  expect_refused({
      {"bits 1", quantize({2, 64}, {1, 64}), Errc::kArgument, "quantize: bits must be 2, 3, 4"},
      {"bits 7", quantize({2, 64}, {7, 64}), Errc::kArgument, "got 7"},
      {"bits 9", quantize({2, 64}, {9, 64}), Errc::kArgument, "got 9"},
      {"group", quantize({2, 64}, {4, 16}), Errc::kArgument, "32, 64 or 128, got 16"},
      {"rank", quantize({64}, {}), Errc::kShape, "[..., out, in], got [64]"},
      {"type", quantize({2, 64}, {}, DType::kI32), Errc::kDType, "w must be f32, f16 or bf16"},
      {"f64", quantize({2, 64}, {}, DType::kF64), Errc::kDType, "got f64"},
      {"cols", quantize({2, 96}, {}), Errc::kShape, "multiple of group_size 64, got [2, 96]"},
      {"format", with([](QuantizedWeight& w) { w.format.bits = 7; }), Errc::kArgument,
       "dequantize: bits"},
      {"scales' rank", with([&](QuantizedWeight& w) { w.scales = meta({2}); }), Errc::kShape,
       "scales must be [..., out, groups], got [2]"},
      {"scales' type", with([&](QuantizedWeight& w) { w.scales = meta({3, 2}, DType::kU8); }),
       Errc::kDType, "scales must be f32"},
      {"codes", with([&](QuantizedWeight& w) { w.codes = meta({3, 15}, DType::kU32); }),
       Errc::kShape, "codes must be [3, 16], got [3, 15]"},
      {"codes' type", with([&](QuantizedWeight& w) { w.codes = meta({3, 16}, DType::kI32); }),
       Errc::kDType, "codes must be u32"},
      {"codes far", with([&](QuantizedWeight& w) { w.codes = meta({3, 16}, DType::kU32, far); }),
       Errc::kDevice, "codes must be where scales is"},
      {"biases", with([&](QuantizedWeight& w) { w.biases = meta({3, 1}); }), Errc::kShape,
       "biases must be [3, 2], got [3, 1]"},
      {"biases' type", with([&](QuantizedWeight& w) { w.biases = meta({3, 2}, DType::kF16); }),
       Errc::kDType, "biases must be f32, got f16"},
      {"biases far", with([&](QuantizedWeight& w) { w.biases = meta({3, 2}, DType::kF32, far); }),
       Errc::kDevice, "biases must be where"},
      {"result", ops::dequantize_check(good, DType::kI8), Errc::kDType,
       "the result must be f32, f16 or bf16, got i8"},
      {"codes and dw",
       ops::dequantize_backward_check({good.codes, good.scales, good.biases, 8}, meta({3, 128})),
       Errc::kShape, "codes must be [3, 32]"},
      {"dw", ops::dequantize_backward_check(good, meta({3, 64})), Errc::kShape,
       "dw must be [3, 128], got [3, 64]"},
      {"dw far", ops::dequantize_backward_check(good, meta({3, 128}, DType::kF32, far)),
       Errc::kDevice, "dw must be where"},
  });
}

MT_ON_EVERY_BACKEND(Quantize);

}  // namespace
}  // namespace mlxtape::test
