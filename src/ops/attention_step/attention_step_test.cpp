#include "mlxtape/ops/attention_step.h"

#include <cmath>
#include <functional>
#include <limits>

#include "mlxtape/ops/attention.h"
#include "support/indices.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::AttentionCache;
using ops::AttentionStepOptions;
using Values = std::vector<double>;

constexpr std::int64_t kEndless = std::numeric_limits<std::int64_t>::max();

struct Case {
  std::vector<std::int64_t> lengths;
  std::int64_t tokens = 1, capacity = 16;
  std::int64_t heads = 1, key_heads = 1, dim = 8, value_dim = 8;
  std::int64_t window = 0;
  bool sinks = false;
  double scale = 0;
  double size = 1;

  std::int64_t batch() const { return static_cast<std::int64_t>(lengths.size()); }
  Shape q() const { return {batch(), tokens, heads, dim}; }
  Shape k() const { return {batch(), tokens, key_heads, dim}; }
  Shape v() const { return {batch(), tokens, key_heads, value_dim}; }
  Shape keys() const { return {batch(), capacity, key_heads, dim}; }
  Shape values() const { return {batch(), capacity, key_heads, value_dim}; }
};

// Of the caches only the rows before are numbers.
struct Data {
  Values q, k, v, keys, values, sinks;
};

void poison(const Case& c, std::int64_t row, Values& cache) {
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (std::int64_t i = c.lengths[at(b)] * row; i < c.capacity * row; ++i) {
      cache[at(b * c.capacity * row + i)] = std::nan("");
    }
  }
}

Data data_of(const Case& c, DType dtype, std::uint64_t seed) {
  Noise noise(seed);
  Data data{random_values(noise, count_of(c.q()), dtype, c.size),
            random_values(noise, count_of(c.k()), dtype, c.size),
            random_values(noise, count_of(c.v()), dtype),
            random_values(noise, count_of(c.keys()), dtype, c.size),
            random_values(noise, count_of(c.values()), dtype),
            random_values(noise, c.heads, DType::kF32, 2)};
  poison(c, c.key_heads * c.dim, data.keys);
  poison(c, c.key_heads * c.value_dim, data.values);
  return data;
}

// A cache with the new rows in it.
Values joined(const Case& c, Values cache, const Values& fresh, std::int64_t row) {
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    const auto from = fresh.begin() + b * c.tokens * row;
    std::copy(from, from + c.tokens * row,
              cache.begin() + (b * c.capacity + c.lengths[at(b)]) * row);
  }
  return cache;
}
Values joined_keys(const Case& c, const Data& data) {
  return joined(c, data.keys, data.k, c.key_heads * c.dim);
}
Values joined_values(const Case& c, const Data& data) {
  return joined(c, data.values, data.v, c.key_heads * c.value_dim);
}

// The formula block of attention_step.h in double. blur stands for what f32 does to each number that is made, weigh for
// what the stored type does to p.
using Blur = std::function<double(double)>;
Values oracle(
    const Case& c, const Data& data, const Blur& blur = [](double v) { return v; },
    const Blur& weigh = [](double v) { return v; }) {
  const Values keys = joined_keys(c, data), values = joined_values(c, data);
  const std::int64_t group = c.heads / c.key_heads;
  const double scale = c.scale == 0 ? 1 / std::sqrt(static_cast<double>(c.dim)) : c.scale;
  Values y(at(c.batch() * c.tokens * c.heads * c.value_dim));
  for (std::int64_t row = 0; row < c.batch() * c.tokens * c.heads; ++row) {
    const std::int64_t h = row % c.heads, t = row / c.heads % c.tokens;
    const std::int64_t b = row / c.heads / c.tokens;
    const std::int64_t last = c.lengths[at(b)] + t;
    const std::int64_t first = c.window == 0 ? 0 : std::max<std::int64_t>(0, last - c.window + 1);
    const auto place = [&](std::int64_t j) {
      return (b * c.capacity + j) * c.key_heads + h / group;
    };
    Values s;
    double most = c.sinks ? data.sinks[at(h)] : -INFINITY;
    for (std::int64_t j = first; j <= last; ++j) {
      double product = 0;
      for (std::int64_t d = 0; d < c.dim; ++d) {
        product += blur(data.q[at(row * c.dim + d)] * keys[at(place(j) * c.dim + d)]);
      }
      s.push_back(blur(scale * product));
      most = std::max(most, s.back());
    }
    double sum = c.sinks ? blur(std::exp(data.sinks[at(h)] - most)) : 0;
    for (const double v : s) sum += blur(std::exp(blur(v - most)));
    for (std::int64_t j = first; j <= last; ++j) {
      const double p = weigh(blur(std::exp(s[at(j - first)] - most) / sum));
      for (std::int64_t d = 0; d < c.value_dim; ++d) {
        y[at(row * c.value_dim + d)] += blur(p * values[at(place(j) * c.value_dim + d)]);
      }
    }
  }
  return y;
}

Refs expected_of(const Case& c, const Data& data, DType dtype) {
  std::vector<Values> tries;
  Noise noise(17);
  for (int i = 0; i < 3; ++i) {
    tries.push_back(oracle(
        c, data, [&](double v) { return v * (1 + noise.next() * kBlur); },
        [&](double v) {
          return dtype == DType::kF32 ? v : round_to(dtype, v * (1 + noise.next() * kBlur));
        }));
  }
  return blurred(oracle(c, data), tries, c.value_dim, dtype);
}

void expect_same(const char* what, const Values& got, const Values& want) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_TRUE(got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i])))
        << what << " at " << i << ": " << got[i] << ", not " << want[i];
  }
}

TEST(AttentionStepCheck, SaysWhatIsWrong) {
  const Backend far = Backend::kMetal;
  const auto meta = [](const Shape& shape, DType t = DType::kF32, Backend b = Backend::kCpu) {
    return Tensor::meta(shape, t, b);
  };
  const auto q = meta({2, 3, 4, 8}), k = meta({2, 3, 2, 8}), v = meta({2, 3, 2, 6});
  const AttentionCache cache{meta({2, 9, 2, 8}), meta({2, 9, 2, 6}), meta({2}, DType::kI32)};
  const auto with = [&](const Tensor& a, const Tensor& b, const Tensor& c) {
    return ops::attention_step_check(a, b, c, cache);
  };
  const auto on = [&](const Tensor& keys, const Tensor& values, const Tensor& lengths) {
    return ops::attention_step_check(q, k, v, {keys, values, lengths});
  };
  const auto options = [&](const AttentionStepOptions& o) {
    return ops::attention_step_check(q, k, v, cache, o);
  };
  const auto encoder = Device::cpu().make_encoder();
  const auto zeros = [&](const Shape& shape, DType t = DType::kF32) {
    return encoder->zeros(shape, t);
  };
  const Tensor both = zeros({2, 2, 4, 1, 2});
  const Tensor a = both.select(0, 0), b = both.select(0, 1), fresh = zeros({2, 1, 1, 2});
  const Tensor two = zeros({2}, DType::kI32), own = zeros({2, 4, 1, 2});
  const auto real = [&](const Tensor& new_q, const Tensor& new_k, const Tensor& new_v,
                        const Tensor& keys, const Tensor& values) {
    return ops::attention_step_check(new_q, new_k, new_v, {keys, values, two});
  };
  expect_refused({
      {"double", with(meta({2, 3, 4, 8}, DType::kF64), k, v), Errc::kDType,
       "q must be f32, f16 or bf16, got f64"},
      {"q of rank 3", with(meta({3, 4, 8}), k, v), Errc::kShape,
       "q, k and v must be [B, T, heads, channels], got [3, 4, 8], [2, 3, 2, 8] and [2, 3, 2, 6]"},
      {"k of rank 3", with(q, meta({3, 2, 8}), v), Errc::kShape, "got [2, 3, 4, 8], [3, 2, 8]"},
      {"v of rank 5", with(q, k, meta({2, 3, 2, 6, 1})), Errc::kShape, "and [2, 3, 2, 6, 1]"},
      {"no token", with(meta({2, 0, 4, 8}), k, v), Errc::kShape, "T must be from 1 to 16, got 0"},
      {"many tokens", with(meta({2, 17, 4, 8}), k, v), Errc::kShape, "got 17"},
      {"no head", with(meta({2, 3, 0, 8}), k, v), Errc::kShape, "got 0 and 2"},
      {"no key head", with(q, meta({2, 3, 0, 8}), v), Errc::kShape, "got 4 and 0"},
      {"heads that do not share", with(q, meta({2, 3, 3, 8}), v), Errc::kShape,
       "heads must be a multiple of key heads, at least 1 each, got 4 and 3"},
      {"no channel", with(meta({2, 3, 4, 0}), k, v), Errc::kShape,
       "D and Dv must be from 1 to 256, got 0 and 6"},
      {"wide", with(meta({2, 3, 4, 257}), k, v), Errc::kShape, "got 257 and 6"},
      {"values without channels", with(q, k, meta({2, 3, 2, 0})), Errc::kShape, "got 8 and 0"},
      {"wide values", with(q, k, meta({2, 3, 2, 257})), Errc::kShape, "got 8 and 257"},
      {"k of other tokens", with(q, meta({2, 2, 2, 8}), v), Errc::kShape,
       "k must be [2, 3, 2, 8], got [2, 2, 2, 8]"},
      {"v of another batch", with(q, k, meta({1, 3, 2, 6})), Errc::kShape,
       "v must be [2, 3, 2, 6], got [1, 3, 2, 6]"},
      {"type of v", with(q, k, meta({2, 3, 2, 6}, DType::kF16)), Errc::kDType,
       "v must be f32, got f16"},
      {"keys of rank 3", on(meta({9, 2, 8}), cache.values, cache.lengths), Errc::kShape,
       "keys must be [B, C, Hk, D] with C from T = 3 to 2^30, got [9, 2, 8]"},
      {"no room", on(meta({2, 2, 2, 8}), cache.values, cache.lengths), Errc::kShape,
       "got [2, 2, 2, 8]"},
      {"far too much room", on(meta({2, (1 << 30) + 1, 2, 8}), cache.values, cache.lengths),
       Errc::kShape, "got [2, 1073741825, 2, 8]"},
      {"keys of another width", on(meta({2, 9, 2, 6}), cache.values, cache.lengths), Errc::kShape,
       "keys must be [2, 9, 2, 8], got [2, 9, 2, 6]"},
      {"keys that are no rows",
       on(meta({2, 9, 8, 2}).transpose({0, 1, 3, 2}), cache.values, cache.lengths), Errc::kShape,
       "keys must be contiguous, for they are changed in place, got strides"},
      {"fewer values than keys", on(cache.keys, meta({2, 8, 2, 6}), cache.lengths), Errc::kShape,
       "values must be [2, 9, 2, 6], got [2, 8, 2, 6]"},
      {"type of values", on(cache.keys, meta({2, 9, 2, 6}, DType::kBF16), cache.lengths),
       Errc::kDType, "values must be f32, got bf16"},
      {"values that are no rows",
       on(cache.keys, meta({2, 2, 9, 6}).transpose({0, 2, 1, 3}), cache.lengths), Errc::kShape,
       "values must be contiguous"},
      {"lengths of rank 0", on(cache.keys, cache.values, meta({}, DType::kI32)), Errc::kShape,
       "lengths must be [2], got []"},
      {"type of lengths", on(cache.keys, cache.values, meta({2}, DType::kI64)), Errc::kDType,
       "lengths must be i32, got i64"},
      {"lengths elsewhere", on(cache.keys, cache.values, meta({2}, DType::kI32, far)),
       Errc::kDevice, "lengths must be where q is (cpu), got metal"},
      {"endless scale", options({.scale = -INFINITY}), Errc::kArgument,
       "scale must be finite, got -inf"},
      {"negative window", options({.window = -1}), Errc::kArgument,
       "window must be at least 0, got -1"},
      {"sinks of key heads", options({.sinks = meta({2})}), Errc::kShape,
       "sinks must be [4], got [2]"},
      {"one buffer", real(fresh, fresh, fresh, a, b), Errc::kArgument,
       "values must lie in a buffer of their own, for they are changed in place, got that of keys"},
      {"q in the cache", real(own.slice(1, 0, 1), fresh, fresh, own, a), Errc::kArgument,
       "keys must lie in a buffer of their own, for they are changed in place, got that of q"},
      {"k in the cache", real(fresh, own.slice(1, 0, 1), fresh, own, a), Errc::kArgument,
       "got that of k"},
      {"v in the cache", real(fresh, fresh, own.slice(1, 0, 1), a, own), Errc::kArgument,
       "values must lie in a buffer of their own, for they are changed in place, got that of v"},
  });
  EXPECT_FALSE(options({.scale = 2, .window = 3, .sinks = meta({4})}));
  EXPECT_FALSE(real(fresh, fresh, fresh, own, a));
}

class AttentionStep : public OnDevice {
 protected:
  AttentionCache cache_of(const Case& c, const Data& data, DType dtype) {
    return {upload(data.keys, c.keys(), dtype), upload(data.values, c.values(), dtype),
            lengths_of(c)};
  }
  Tensor lengths_of(const Case& c) {
    return upload(Values(c.lengths.begin(), c.lengths.end()), {c.batch()}, DType::kI32);
  }
  AttentionStepOptions options_of(const Case& c, const Data& data) {
    AttentionStepOptions o{.scale = c.scale, .window = c.window};
    if (c.sinks) o.sinks = upload_strided(data.sinks, {c.heads}, DType::kF32);
    return o;
  }

  enum class How { kPlain, kStrided, kShifted };
  void check(const Case& c, DType dtype, How how = How::kPlain) {
    const Data data = data_of(c, dtype, static_cast<std::uint64_t>(c.capacity + c.dim));
    const auto up = [&](const Values& values, const Shape& shape) {
      return how == How::kStrided ? upload_strided(values, shape, dtype)
                                  : upload(values, shape, dtype, how == How::kShifted ? 1 : 0);
    };
    const AttentionCache cache = cache_of(c, data, dtype);
    const Tensor y = ops::attention_step(encoder(), up(data.q, c.q()), up(data.k, c.k()),
                                         up(data.v, c.v()), cache, options_of(c, data));
    const std::string label = "y " + to_string(c.q()) + " on " + to_string(c.keys()) + " " +
                              name_of(dtype) + " window " + std::to_string(c.window);
    const Refs want = expected_of(c, data, dtype);
    // Where weights are rounded to 16 bits, a mistake of one step of that type would not be seen.
    if (dtype == DType::kF32 && want.size() > 8 && c.size == 1) {
      expect_close(label, download(y), want, dtype, 0);
    } else {
      EXPECT_EQ(count_wrong(download(y), want, dtype, 0), 0) << label;
    }
    expect_same("keys", download(cache.keys), joined_keys(c, data));
    expect_same("values", download(cache.values), joined_values(c, data));
    expect_same("lengths", download(cache.lengths), Values(c.lengths.begin(), c.lengths.end()));
  }
};

TEST_P(AttentionStep, MatchesOracleForEveryLength) {
  for (const std::int64_t tokens : {1, 2, 5, 16}) {
    Case c{
        {0, 1, 15, 16, 17, 63, 64, 240, 254, 255, 256, 257, 510, 600 - tokens}, tokens, 600, 2, 1};
    check(c, DType::kF32);
    c.dim = c.value_dim = 64;
    if (tokens != 5) check(c, DType::kBF16);
  }
  check({{0}, 1, 1}, DType::kF32);
  check({{0, 0}, 3, 3, 2, 2}, DType::kF32);
  check({{3000}, 1, 3001, 8, 1, 16, 8}, DType::kF32);
  check({{1500, 2900}, 2, 3001, 8, 1, 16, 8}, DType::kF16);
  check({}, DType::kF32);
}

TEST_P(AttentionStep, MatchesOracleForEveryWidth) {
  for (const auto& [dim, value_dim] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1},
                                                          {1, 33},
                                                          {15, 17},
                                                          {33, 1},
                                                          {64, 40},
                                                          {40, 128},
                                                          {128, 64},
                                                          {72, 200},
                                                          {100, 60},
                                                          {256, 256}}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      check({{0, 270}, 1, 271, 4, 2, dim, value_dim}, dtype);
    }
  }
}

TEST_P(AttentionStep, MatchesOracleForEveryOption) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t heads : {2, 16, 34}) {
      if (dtype == DType::kF16 && heads != 16) continue;
      for (const std::int64_t tokens : {1, 3}) {
        for (const std::int64_t window :
             {std::int64_t{0}, std::int64_t{1}, std::int64_t{70}, kEndless}) {
          Case c{{0, 5, 130, 350}, tokens, 353, heads, 2, 16, 24, window, window % 70 != 0};
          c.scale = window == 70 ? 0.3 : 0;
          check(c, dtype);
        }
      }
    }
  }
}

TEST_P(AttentionStep, InputsMayBeViews) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Case c{{0, 30}, 2, 40, 4, 2, 16, 24};
    check(c, dtype, How::kStrided);
    check(c, dtype, How::kShifted);
  }
  // Heads of one projection: channels side by side, heads and tokens further apart.
  for (const std::int64_t dim : {5, 8}) {
    const Case c{{3, 9}, 2, 12, 4, 2, dim, dim};
    const Data data = data_of(c, DType::kBF16, 4);
    const AttentionCache cache = cache_of(c, data, DType::kBF16);
    const Tensor all = encoder().zeros({2, 2, 8, 2 * dim}, DType::kBF16);
    const Tensor q = all.slice(2, 0, 4).slice(3, dim, 2 * dim);
    const Tensor k = all.slice(2, 4, 6).slice(3, 0, dim), v = all.slice(2, 6, 8).slice(3, 0, dim);
    encoder().copy(upload(data.q, c.q(), DType::kBF16), q);
    encoder().copy(upload(data.k, c.k(), DType::kBF16), k);
    encoder().copy(upload(data.v, c.v(), DType::kBF16), v);
    const Tensor y = ops::attention_step(encoder(), q, k, v, cache);
    EXPECT_EQ(count_wrong(download(y), expected_of(c, data, DType::kBF16), DType::kBF16, 0), 0);
    expect_same("values", download(cache.values), joined_values(c, data));
  }
}

// Scores of ±1e4 and a softmax that is all but one-hot, whose maximum comes early, late or between.
TEST_P(AttentionStep, WideScores) {
  Case c{{700, 80, 300}, 2, 702, 4, 1, 16, 16};
  c.size = 50;
  c.scale = 1;
  check(c, DType::kF32);
  c.sinks = true;
  check(c, DType::kBF16);
}

// A length that leaves no room, or is negative, counts as the nearest that does; nothing is read or written behind.
TEST_P(AttentionStep, LengthsAreClamped) {
  const double most = std::numeric_limits<std::int32_t>::max();
  const double least = std::numeric_limits<std::int32_t>::min();
  const Case c{{0, 0, 7, 7, 7}, 3, 10, 2, 1};
  const Data data = data_of(c, DType::kF32, 5);
  const AttentionCache cache = cache_of(c, data, DType::kF32);
  const Tensor lengths = upload_strided({-1, least, 8, 10, most}, {5}, DType::kI32);
  const Tensor y = ops::attention_step(
      encoder(), upload(data.q, c.q(), DType::kF32), upload(data.k, c.k(), DType::kF32),
      upload(data.v, c.v(), DType::kF32), {cache.keys, cache.values, lengths});
  expect_close("y", download(y), expected_of(c, data, DType::kF32), DType::kF32, 0);
  expect_same("keys", download(cache.keys), joined_keys(c, data));
  expect_same("values", download(cache.values), joined_values(c, data));
}

// The same numbers as attention, which gets the cache as a view.
TEST_P(AttentionStep, AsAttention) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case c{{290, 290}, 4, 310, 8, 2, 64, 64, 0, true};
    for (const std::int64_t window : {0, 100}) {
      c.window = window;
      const Data data = data_of(c, dtype, 8);
      const AttentionCache cache = cache_of(c, data, dtype);
      const Tensor q = upload(data.q, c.q(), dtype);
      const AttentionStepOptions o = options_of(c, data);
      const Tensor y = ops::attention_step(encoder(), q, upload(data.k, c.k(), dtype),
                                           upload(data.v, c.v(), dtype), cache, o);
      const auto whole =
          ops::attention(encoder(), q, cache.keys.slice(1, 0, 294), cache.values.slice(1, 0, 294),
                         {.causal = true, .window = window, .sinks = o.sinks});
      Refs want = expected_of(c, data, dtype);
      const Values values = download(whole.y);
      for (std::size_t i = 0; i < want.size(); ++i) {
        want[i] = {values[i], 2 * want[i].scale};  // each may be off by the bound
      }
      EXPECT_EQ(count_wrong(download(y), want, dtype, 0), 0) << name_of(dtype);
    }
  }
}

// mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.5, mask=…, sinks=…) on [B, H, T, D], one sequence after
// the other: causal, causal with sinks, and a bool mask for the window.
TEST_P(AttentionStep, AsMlx) {
  const auto up = [&](const Values& v, Shape shape) {
    return upload(v, shape, DType::kF32);
  };
  const Tensor q =
      up({0.15625,  0.46875,  -0.40625, 0.03125,  0.84375,  0.84375,  -0.71875, -0.53125,
          -0.84375, -0.09375, -0.90625, -0.03125, 0.34375,  -0.40625, 0.40625,  0.21875,
          -0.90625, 0.15625,  -0.46875, -0.15625, -0.40625, 0.40625,  -0.09375, -0.65625,
          0.09375,  0.59375,  -0.34375, -0.53125, -0.21875, 0.90625,  0.96875,  0.40625},
         {2, 2, 4, 2});
  const Tensor k =
      up({0.84375, 0.71875, -0.21875, -0.78125, 0.34375, 0.15625, -0.21875, -0.53125, -0.15625,
          -0.03125, -0.40625, -0.40625, -0.03125, 0.78125, 0.21875, -0.40625},
         {2, 2, 2, 2});
  const Tensor v =
      up({-0.40625, -0.03125, -0.53125, -0.59375, 0.03125, -0.78125, -0.03125, -0.21875, 0.46875,
          0.53125, 0.40625, 0.40625, -0.21875, 0.34375, -0.28125, 0.15625},
         {2, 2, 2, 2});
  // Three keys of the first sequence, none of the second, room for five.
  Values keys{-0.34375, -0.09375, -0.84375, -0.46875, 0.96875, -0.53125,
              0.40625,  0.34375,  0.46875,  -0.03125, 0.21875, -0.84375};
  Values values{0.90625, 0.71875, 0.46875, -0.03125, 0.71875, 0.53125,
                0.34375, 0.84375, 0.28125, -0.21875, 0.15625, -0.59375};
  keys.resize(40, std::nan(""));
  values.resize(40, std::nan(""));
  const auto expect = [&](const char* what, AttentionStepOptions o, const Values& want) {
    o.scale = 0.5;
    const Tensor y = ops::attention_step(
        encoder(), q, k, v,
        {up(keys, {2, 5, 2, 2}), up(values, {2, 5, 2, 2}), upload({3, 0}, {2}, DType::kI32)}, o);
    expect_close(what, download(y), refs_of(want, 1), DType::kF32, 4);
  };
  expect("causal", {},
         {0.315258205,  0.220475242,  0.401884258,  0.26794225,    0.152109057,  0.0873010978,
          0.0963694304, -0.178697333, 0.363023728,  0.0773117095,  0.362683862,  0.077322647,
          0.0648284033, -0.152746409, 0.0894474387, -0.0768857151, 0.46875,      0.53125,
          0.46875,      0.53125,      0.40625,      0.40625,       0.40625,      0.40625,
          0.0827495009, 0.42597717,   0.165596411,  0.448571801,   0.0742446929, 0.285520792,
          0.0108613074, 0.262472302});
  expect("sinks", {.sinks = up({0.5, -1, 0, 2}, {4})},
         {0.22636652,    0.158308983,   0.365051508,  0.243385315,   0.117309779,  0.0673284903,
          0.0379998088,  -0.0704628602, 0.260692745,  0.0555187017,  0.333201706,  0.0710371882,
          0.0546758361,  -0.128825277,  0.0346032679, -0.0297437105, 0.184563115,  0.209171519,
          0.3462511,     0.392417938,   0.203125,     0.203125,      0.0553102493, 0.0553102493,
          0.0476903319,  0.245499879,   0.13816303,   0.374259531,   0.0465607122, 0.17905727,
          0.00210854411, 0.0509547479});
  expect("window", {.window = 2},
         {-0.0976247638, -0.115420505, -0.0514259487, -0.128020197, -0.160365433, -0.59375,
          -0.211630166,  -0.59375,     -0.161665946,  -0.450537026, -0.161876589, -0.450175852,
          -0.287596285,  -0.411009699, -0.27783224,   -0.403686672, 0.46875,      0.53125,
          0.46875,       0.53125,      0.40625,       0.40625,      0.40625,      0.40625,
          0.0827495009,  0.42597717,   0.165596411,   0.448571801,  0.0742446929, 0.285520792,
          0.0108613074,  0.262472302});
}

// A sink of −inf is none, and a query that is no number has no result while the others have theirs.
TEST_P(AttentionStep, SinksThatDoNotCountAndNaN) {
  const Tensor none = upload({-INFINITY, -INFINITY}, {2}, DType::kF32);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Case c{{300}, 1, 301, 2, 1, 16, 16};
    Data data = data_of(c, dtype, 3);
    const auto step = [&](const AttentionStepOptions& o) {
      return ops::attention_step(encoder(), upload(data.q, c.q(), dtype),
                                 upload(data.k, c.k(), dtype), upload(data.v, c.v(), dtype),
                                 cache_of(c, data, dtype), o);
    };
    const Values want = download(step({}));
    EXPECT_EQ(download(step({.sinks = none})), want);
    data.q[0] = std::nan("");
    const Values got = download(step({}));
    for (std::size_t i = 0; i < 16; ++i) EXPECT_TRUE(std::isnan(got[i])) << i;
    EXPECT_EQ(Values(got.begin() + 16, got.end()), Values(want.begin() + 16, want.end()));
  }
}

// Keys that have no weight at all, and queries for which none has any.
TEST_P(AttentionStep, ScoresOfMinusInfinity) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Case c{{600, 3}, 1, 601, 2, 1, 8, 8};
    Data data = data_of(c, dtype, 3);
    for (const std::int64_t h : {0, 1}) {
      for (const std::int64_t b : {0, 1}) data.q[at((b * 2 + h) * 8)] = 1;
    }
    for (std::int64_t j = 0; j < 400; ++j) data.keys[at(j * 8)] = -INFINITY;
    for (std::int64_t j = 0; j < 3; ++j) data.keys[at((601 + j) * 8)] = -INFINITY;
    data.k[8] = -INFINITY;
    const Tensor y =
        ops::attention_step(encoder(), upload(data.q, c.q(), dtype), upload(data.k, c.k(), dtype),
                            upload(data.v, c.v(), dtype), cache_of(c, data, dtype));
    const Values got = download(y);
    Case first = c;  // the oracle would divide by 0 in the second sequence
    first.lengths = {600};
    const Refs want = expected_of(first, data, dtype);
    EXPECT_EQ(count_wrong(Values(got.begin(), got.begin() + 16), want, dtype, 0), 0);
    EXPECT_EQ(Values(got.begin() + 16, got.end()), Values(16, 0));
  }
}

// A step that was captured once decodes token after token, as single calls do.
TEST_P(AttentionStep, ReplaysWhileLengthsGrow) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case c{{0, 250}, 1, 300, 4, 2, 64, 64};
    const Data data = data_of(c, dtype, 6);
    const AttentionCache cache = cache_of(c, data, dtype), other = cache_of(c, data, dtype);
    const Tensor q = upload(data.q, c.q(), dtype), k = upload(data.k, c.k(), dtype);
    const Tensor v = upload(data.v, c.v(), dtype);
    encoder().begin_capture();
    const Tensor y = ops::attention_step(encoder(), q, k, v, cache);
    const auto graph = encoder().end_capture();
    for (std::uint64_t step = 0; step < 9; ++step) {
      const Data next = data_of(c, dtype, 20 + step);
      encoder().copy(upload(next.q, c.q(), dtype), q);
      encoder().copy(upload(next.k, c.k(), dtype), k);
      encoder().copy(upload(next.v, c.v(), dtype), v);
      encoder().copy(lengths_of(c), cache.lengths);
      encoder().replay(*graph);
      const Tensor want =
          ops::attention_step(encoder(), q, k, v, {other.keys, other.values, lengths_of(c)});
      EXPECT_EQ(bits_of(encoder(), y), bits_of(encoder(), want)) << step;
      for (std::int64_t& n : c.lengths) n += c.tokens;
    }
    EXPECT_EQ(bits_of(encoder(), cache.keys), bits_of(encoder(), other.keys));
    EXPECT_EQ(bits_of(encoder(), cache.values), bits_of(encoder(), other.values));
  }
}

TEST_P(AttentionStep, SameBitsOnEveryRun) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Case c{{1000, 37}, 2, 1010, 8, 2, 32, 32, 0, true};
    const Data data = data_of(c, dtype, 3);
    const AttentionCache cache = cache_of(c, data, dtype);
    const Tensor q = upload(data.q, c.q(), dtype), k = upload(data.k, c.k(), dtype);
    const Tensor v = upload(data.v, c.v(), dtype);
    const AttentionStepOptions options = options_of(c, data);
    expect_repeatable(encoder(), [&] {
      return std::vector<Tensor>{ops::attention_step(encoder(), q, k, v, cache, options)};
    });
  }
}

MT_ON_EVERY_BACKEND(AttentionStep);

}  // namespace
}  // namespace mlxtape::test
