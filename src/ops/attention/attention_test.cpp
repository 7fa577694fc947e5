#include "mlxtape/ops/attention.h"

#include <cmath>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::AttentionOptions;

enum class Mask { kNone, kBool, kF32, kLikeQ };

struct Case {
  std::vector<std::pair<std::int64_t, std::int64_t>> sequences;  // queries, keys
  std::int64_t heads = 1, key_heads = 1, dim = 8, value_dim = 8;
  bool causal = false;
  std::int64_t window = 0;
  Mask mask = Mask::kNone;
  bool sinks = false;
  bool packed = false;
  double scale = 0;
  double size = 1;

  std::int64_t count(bool keys) const {
    std::int64_t n = 0;
    for (const auto& s : sequences) n += keys ? s.second : s.first;
    return n;
  }
  Shape shape(bool keys, std::int64_t last_heads, std::int64_t channels) const {
    const auto batch = static_cast<std::int64_t>(sequences.size());
    if (packed) return {count(keys), last_heads, channels};
    return {batch,
            batch == 0 ? 0
            : keys     ? sequences[0].second
                       : sequences[0].first,
            last_heads, channels};
  }
};

enum { kQ, kK, kV, kSinks, kInputs };

struct Data {
  Arrays in;  // kQ … kSinks
  std::vector<double> mask, dy;
};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Results {
  std::vector<double> y, dq, dk, dv, d_sinks;
};

// The formula block of attention.h in double. blur stands for what f32 does to each number that is made, store for
// what the stored type does to y, which D reads, weigh for what it does to p and ds.
// Types of callables, not std::function: they are called for every product.
template <class Blur, class Store, class Weigh>
Results oracle(const Case& c, const Data& data, const Blur& blur, const Store& store,
               const Weigh& weigh) {
  const std::int64_t group = c.heads / c.key_heads;
  const double scale = c.scale == 0 ? 1 / std::sqrt(static_cast<double>(c.dim)) : c.scale;
  Results e;
  e.y.resize(at(c.count(false) * c.heads * c.value_dim));
  e.dq.resize(data.in[kQ].size());
  e.dk.resize(data.in[kK].size());
  e.dv.resize(data.in[kV].size());
  e.d_sinks.resize(at(c.heads));
  std::int64_t query = 0, key = 0;
  for (std::size_t n = 0; n < c.sequences.size(); ++n) {
    const auto [queries, keys] = c.sequences[n];
    for (std::int64_t h = 0; h < c.heads; ++h) {
      const double sink = data.in[kSinks][at(h)];
      for (std::int64_t t = 0; t < queries; ++t) {
        const std::int64_t q_at = ((query + t) * c.heads + h) * c.dim;
        const std::int64_t y_at = ((query + t) * c.heads + h) * c.value_dim;
        const auto key_row = [&](std::int64_t j) {
          return (key + j) * c.key_heads + h / group;
        };
        std::vector<double> s(at(keys), -INFINITY);
        for (std::int64_t j = 0; j < keys; ++j) {
          const std::int64_t i = t + keys - queries;
          if (c.causal && (j > i || (c.window > 0 && j <= i - c.window))) continue;
          double mask = 0;
          if (c.mask != Mask::kNone) {
            const auto m = static_cast<std::int64_t>(n) * c.heads * queries * keys;
            mask = data.mask[at(m + (h * queries + t) * keys + j)];
            if (c.mask == Mask::kBool && mask == 0) continue;
            if (c.mask == Mask::kBool) mask = 0;
          }
          double product = 0;
          for (std::int64_t d = 0; d < c.dim; ++d) {
            product += blur(data.in[kQ][at(q_at + d)] * data.in[kK][at(key_row(j) * c.dim + d)]);
          }
          s[at(j)] = blur(blur(scale * product) + mask);
        }
        double most = c.sinks ? sink : -INFINITY;
        for (const double v : s) most = std::max(most, v);
        if (most == -INFINITY) continue;
        double sum = c.sinks ? std::exp(sink - most) : 0;
        for (const double v : s) sum += blur(std::exp(blur(v - most)));
        const double lse = blur(most + std::log(sum));
        std::vector<double> p(at(keys)), dp(at(keys));
        double dot = 0;
        for (std::int64_t j = 0; j < keys; ++j) {
          p[at(j)] = weigh(blur(std::exp(s[at(j)] - lse)));
          for (std::int64_t d = 0; d < c.value_dim; ++d) {
            const double v = data.in[kV][at(key_row(j) * c.value_dim + d)];
            const double dy = data.dy[at(y_at + d)];
            e.y[at(y_at + d)] += blur(p[at(j)] * v);
            dp[at(j)] += blur(v * dy);
            e.dv[at(key_row(j) * c.value_dim + d)] += blur(p[at(j)] * dy);
          }
        }
        for (std::int64_t d = 0; d < c.value_dim; ++d) {
          dot += blur(store(e.y[at(y_at + d)]) * data.dy[at(y_at + d)]);
        }
        for (std::int64_t j = 0; j < keys; ++j) {
          const double ds = weigh(blur(p[at(j)] * blur(dp[at(j)] - dot)));
          for (std::int64_t d = 0; d < c.dim; ++d) {
            const std::int64_t k_at = key_row(j) * c.dim + d;
            e.dq[at(q_at + d)] += blur(scale * ds * data.in[kK][at(k_at)]);
            e.dk[at(k_at)] += blur(scale * ds * data.in[kQ][at(q_at + d)]);
          }
        }
        if (c.sinks) e.d_sinks[at(h)] -= blur(std::exp(sink - lse) * dot);
      }
    }
    query += queries;
    key += keys;
  }
  return e;
}

Results oracle(const Case& c, const Data& data) {
  const auto exact = [](double v) {
    return v;
  };
  return oracle(c, data, exact, exact, exact);
}

struct Expected {
  Refs y, dq, dk, dv, d_sinks;
};

Expected expected_of(const Case& c, const Data& data, DType dtype) {
  const Results exact = oracle(c, data);
  std::vector<Results> tries;
  Noise noise(17);
  for (int i = 0; i < 3; ++i) {
    tries.push_back(oracle(
        c, data, [&](double v) { return v * (1 + noise.next() * kBlur); },
        [&](double v) { return round_to(dtype, v); },
        [&](double v) {
          return dtype == DType::kF32 ? v : round_to(dtype, v * (1 + noise.next() * kBlur));
        }));
  }
  const auto all = [&](std::vector<double> Results::* part, std::int64_t row, DType stored) {
    std::vector<std::vector<double>> parts;
    for (const Results& r : tries) parts.push_back(r.*part);
    return blurred(exact.*part, parts, row, stored);
  };
  return {all(&Results::y, c.value_dim, dtype), all(&Results::dq, c.dim, dtype),
          all(&Results::dk, c.dim, dtype), all(&Results::dv, c.value_dim, dtype),
          all(&Results::d_sinks, c.heads, DType::kF32)};
}

Data data_of(const Case& c, DType dtype, std::uint64_t seed) {
  Noise noise(seed);
  Data data;
  data.in = {random_values(noise, c.count(false) * c.heads * c.dim, dtype, c.size),
             random_values(noise, c.count(true) * c.key_heads * c.dim, dtype, c.size),
             random_values(noise, c.count(true) * c.key_heads * c.value_dim, dtype),
             random_values(noise, c.heads, DType::kF32, 2)};
  data.dy = random_values(noise, c.count(false) * c.heads * c.value_dim, dtype);
  if (c.mask != Mask::kNone && !c.sequences.empty()) {
    const auto [queries, keys] = c.sequences[0];
    data.mask = random_values(
        noise, static_cast<std::int64_t>(c.sequences.size()) * c.heads * queries * keys,
        c.mask == Mask::kF32 ? DType::kF32 : dtype, 3);
    if (c.mask == Mask::kBool) {
      for (double& v : data.mask) v = v > -1 ? 1 : 0;
      // A query for which nothing counts.
      for (std::int64_t j = 0; j < keys; ++j) data.mask[at(j)] = 0;
    } else {
      for (std::size_t i = 0; i < data.mask.size(); i += 7) data.mask[i] = -INFINITY;
    }
  }
  return data;
}

TEST(AttentionOracle, GradientMatchesCentralDifference) {
  for (const Case& c : std::vector<Case>{{{{4, 6}, {4, 6}}, 4, 2, 3, 2, true, 0, Mask::kF32, true},
                                         {{{3, 3}}, 1, 1, 2, 2, true, 2},
                                         {{{2, 5}, {2, 5}}, 2, 1, 3, 4, false, 0, Mask::kBool}}) {
    const Data data = data_of(c, DType::kF64, 7);
    const Results e = oracle(c, data);
    const auto loss = [&](const Arrays& in) {
      Data moved = data;
      moved.in = in;
      const auto y = oracle(c, moved).y;
      return std::inner_product(y.begin(), y.end(), data.dy.begin(), 0.0);
    };
    expect_gradient(loss, data.in, {e.dq, e.dk, e.dv, e.d_sinks});
  }
}

TEST(AttentionCheck, SaysWhatIsWrong) {
  const Backend far = Backend::kMetal;
  const auto meta = [](Shape shape, DType t = DType::kF32, Backend b = Backend::kCpu) {
    return Tensor::meta(shape, t, b);
  };
  const auto q = meta({2, 5, 4, 8}), k = meta({2, 7, 2, 8}), v = meta({2, 7, 2, 6});
  const auto packed_q = meta({9, 4, 8}), packed_k = meta({11, 2, 8}), packed_v = meta({11, 2, 6});
  const auto starts = meta({3}, DType::kI32), mask = meta({2, 4, 5, 7}, DType::kBool);
  const auto check = [](const Tensor& a, const Tensor& b, const Tensor& c,
                        const AttentionOptions& o = {}) {
    return ops::attention_check(a, b, c, o);
  };
  const auto with = [&](const AttentionOptions& o) {
    return check(q, k, v, o);
  };
  const auto packed = [&](const AttentionOptions& o) {
    return check(packed_q, packed_k, packed_v, o);
  };
  const auto y = meta({2, 5, 4, 6}), lse = meta({2, 5, 4});
  const auto bwd = [&](const Tensor& a, const Tensor& b, const Tensor& dy) {
    return ops::attention_backward_check(q, k, v, {a, b}, dy);
  };
  expect_refused({
      {"double", check(meta({2, 5, 4, 8}, DType::kF64), k, v), Errc::kDType,
       "q must be f32, f16 or bf16, got f64"},
      {"q of rank 3", check(packed_q, k, v), Errc::kShape, "q must be [B, T, H, D], got [9, 4, 8]"},
      {"starts for a batch", with({.sequence_starts = starts}), Errc::kShape,
       "q must be [T, H, D] with sequence_starts, got [2, 5, 4, 8]"},
      {"one start", packed({.sequence_starts = meta({1}, DType::kI32)}), Errc::kShape,
       "sequence_starts must be [S+1] with S at least 1, got [1]"},
      {"starts of rank 2", packed({.sequence_starts = meta({3, 1}, DType::kI32)}), Errc::kShape,
       "got [3, 1]"},
      {"float starts", packed({.sequence_starts = meta({3})}), Errc::kDType,
       "sequence_starts must be i32 or i64, got f32"},
      {"starts elsewhere", packed({.sequence_starts = meta({3}, DType::kI32, far)}), Errc::kDevice,
       "sequence_starts must be where q is (cpu), got metal"},
      {"starts of keys of rank 0",
       packed({.sequence_starts = starts, .key_starts = meta({}, DType::kI32)}), Errc::kShape,
       "key_starts must be [3], got []"},
      {"more keys' sequences",
       packed({.sequence_starts = starts, .key_starts = meta({4}, DType::kI32)}), Errc::kShape,
       "key_starts must be [3], got [4]"},
      {"starts of two types",
       packed({.sequence_starts = starts, .key_starts = meta({3}, DType::kI64)}), Errc::kDType,
       "key_starts must be i32, got i64"},
      {"starts of keys alone", with({.key_starts = starts}), Errc::kArgument,
       "key_starts must come with sequence_starts, got it alone"},
      {"k of rank 3", check(q, packed_k, v), Errc::kShape,
       "k and v must have the axes of q [2, 5, 4, 8], got [11, 2, 8] and"},
      {"v of rank 3", check(q, k, packed_v), Errc::kShape, "and [11, 2, 6]"},
      {"no head", check(meta({2, 5, 0, 8}), k, v), Errc::kShape, "got 0 and 2"},
      {"no key head", check(q, meta({2, 7, 0, 8}), meta({2, 7, 0, 6})), Errc::kShape,
       "got 4 and 0"},
      {"heads that do not share", check(q, meta({2, 7, 3, 8}), meta({2, 7, 3, 6})), Errc::kShape,
       "heads must be a multiple of key heads, at least 1 each, got 4 and 3"},
      {"no channel", check(meta({2, 5, 4, 0}), meta({2, 7, 2, 0}), v), Errc::kShape,
       "D and Dv must be from 1 to 256, got 0 and 6"},
      {"wide", check(meta({2, 5, 4, 257}), meta({2, 7, 2, 257}), v), Errc::kShape, "got 257 and 6"},
      {"values without channels", check(q, k, meta({2, 7, 2, 0})), Errc::kShape, "got 8 and 0"},
      {"wide values", check(q, k, meta({2, 7, 2, 257})), Errc::kShape, "got 8 and 257"},
      {"keys of another batch", check(q, meta({1, 7, 2, 8}), v), Errc::kShape,
       "k must be [2, 7, 2, 8], got [1, 7, 2, 8]"},
      {"keys of another width", check(q, meta({2, 7, 2, 6}), v), Errc::kShape,
       "k must be [2, 7, 2, 8], got [2, 7, 2, 6]"},
      {"type of k", check(q, meta({2, 7, 2, 8}, DType::kF16), v), Errc::kDType,
       "k must be f32, got f16"},
      {"k elsewhere", check(q, meta({2, 7, 2, 8}, DType::kF32, far), v), Errc::kDevice,
       "k must be where q is (cpu), got metal"},
      {"fewer values than keys", check(q, k, meta({2, 6, 2, 6})), Errc::kShape,
       "v must be [2, 7, 2, 6], got [2, 6, 2, 6]"},
      {"type of v", check(q, k, meta({2, 7, 2, 6}, DType::kBF16)), Errc::kDType,
       "v must be f32, got bf16"},
      {"endless scale", with({.scale = -INFINITY}), Errc::kArgument,
       "scale must be finite, got -inf"},
      {"scale is no number", with({.scale = NAN}), Errc::kArgument, "got nan"},
      {"negative window", with({.causal = true, .window = -1}), Errc::kArgument,
       "window must be at least 0, got -1"},
      {"window without causal", with({.window = 3}), Errc::kArgument,
       "window must be 0 without causal, got 3"},
      {"mask of packed ones", packed({.mask = mask, .sequence_starts = starts}), Errc::kArgument,
       "mask must be absent with sequence_starts: pad to [B, T, H, D] for one"},
      {"mask of rank 2", with({.mask = meta({5, 7}, DType::kBool)}), Errc::kShape,
       "mask must be [2, 4, 5, 7], each but the last may be 1, got [5, 7]"},
      {"mask of key heads", with({.mask = meta({2, 2, 5, 7}, DType::kBool)}), Errc::kShape,
       "got [2, 2, 5, 7]"},
      {"mask of one key", with({.mask = meta({2, 4, 5, 1}, DType::kBool)}), Errc::kShape,
       "got [2, 4, 5, 1]"},
      {"mask of another 16-bit type", with({.mask = meta({2, 4, 5, 7}, DType::kF16)}), Errc::kDType,
       "mask must be bool, f32 or the type of q (f32), got f16"},
      {"mask elsewhere", with({.mask = meta({2, 4, 5, 7}, DType::kBool, far)}), Errc::kDevice,
       "mask must be where q is (cpu), got metal"},
      {"sinks of key heads", with({.sinks = meta({2})}), Errc::kShape,
       "sinks must be [4], got [2]"},
      {"type of sinks", with({.sinks = meta({4}, DType::kBF16)}), Errc::kDType,
       "sinks must be f32, got bf16"},
      {"backward refuses like forward",
       ops::attention_backward_check(q, k, v, {y, lse}, y, {.window = 1}), Errc::kArgument,
       "window"},
      {"y", bwd(q, lse, y), Errc::kShape, "y must be [2, 5, 4, 6], got [2, 5, 4, 8]"},
      {"lse by heads first", bwd(y, meta({2, 4, 5}), y), Errc::kShape,
       "lse must be [2, 5, 4], got [2, 4, 5]"},
      {"type of lse", bwd(y, meta({2, 5, 4}, DType::kF16), y), Errc::kDType, "lse must be f32"},
      {"dy", bwd(y, lse, q), Errc::kShape, "dy must be [2, 5, 4, 6], got [2, 5, 4, 8]"},
      {"no dy", bwd(y, lse, {}), Errc::kShape, "dy must be [2, 5, 4, 6], got []"},
  });
  EXPECT_FALSE(with({.causal = true, .window = 3, .mask = mask, .sinks = meta({4})}));
  EXPECT_FALSE(with({.mask = meta({1, 1, 1, 7})}));
  EXPECT_FALSE(packed({.sequence_starts = starts, .key_starts = starts}));
  EXPECT_FALSE(bwd(y, lse, y));
}

class Attention : public OnDevice {
 protected:
  AttentionOptions options_of(const Case& c, const Data& data, DType dtype) {
    AttentionOptions o;
    o.causal = c.causal;
    o.window = c.window;
    o.scale = c.scale;
    if (c.sinks) o.sinks = upload(data.in[kSinks], {c.heads}, DType::kF32);
    if (c.mask != Mask::kNone) {
      const auto [queries, keys] = c.sequences[0];
      const DType type = c.mask == Mask::kBool  ? DType::kBool
                         : c.mask == Mask::kF32 ? DType::kF32
                                                : dtype;
      o.mask = upload(
          data.mask, {static_cast<std::int64_t>(c.sequences.size()), c.heads, queries, keys}, type);
    }
    if (c.packed) {
      std::vector<double> starts{0}, key_starts{0};
      bool same = true;
      for (const auto& [queries, keys] : c.sequences) {
        starts.push_back(starts.back() + static_cast<double>(queries));
        key_starts.push_back(key_starts.back() + static_cast<double>(keys));
        same = same && queries == keys;
      }
      const Shape shape{static_cast<std::int64_t>(starts.size())};
      o.sequence_starts = upload(starts, shape, DType::kI32);
      if (!same) o.key_starts = upload(key_starts, shape, DType::kI32);
    }
    return o;
  }

  void check(const Case& c, DType dtype, bool strided = false) {
    const Data data = data_of(c, dtype, static_cast<std::uint64_t>(c.count(true) + c.dim));
    const Expected want = expected_of(c, data, dtype);
    const auto up = [&](int which, const Shape& shape) {
      const auto& v = data.in[at(which)];
      return strided ? upload_strided(v, shape, dtype) : upload(v, shape, dtype);
    };
    Tape tape(encoder());
    const Tensor q = tape.watch(up(kQ, c.shape(false, c.heads, c.dim)));
    const Tensor k = tape.watch(up(kK, c.shape(true, c.key_heads, c.dim)));
    const Tensor v = tape.watch(up(kV, c.shape(true, c.key_heads, c.value_dim)));
    AttentionOptions options = options_of(c, data, dtype);
    if (c.sinks) options.sinks = tape.watch(options.sinks);
    const Tensor y = ops::attention(tape, q, k, v, options);
    const std::string label = " " + to_string(q.shape()) + to_string(k.shape()) +
                              (c.causal ? " causal " : " ") + name_of(dtype);
    const auto compare = [&](const std::string& what, const Tensor& got, const Refs& refs,
                             DType type) {
      // Where all but one weight are 0, so are the gradients of the scores: nothing to plant a mistake in. Where weights
      // are rounded to 16 bits, so are their sums, or nearly.
      const bool sharp = dtype == DType::kF32;
      if (sharp && c.count(true) > 2 && c.size == 1 && refs.size() > 8) {
        expect_close(what + label, download(got), refs, type, 0);
      } else {
        EXPECT_EQ(count_wrong(download(got), refs, type, 0), 0) << what << label;
      }
    };
    compare("y", y, want.y, dtype);
    tape.backward(y, upload(data.dy, y.shape(), dtype));
    compare("dq", tape.grad(q), want.dq, dtype);
    compare("dk", tape.grad(k), want.dk, dtype);
    compare("dv", tape.grad(v), want.dv, dtype);
    if (c.sinks) compare("d_sinks", tape.grad(options.sinks), want.d_sinks, DType::kF32);
  }
};

TEST_P(Attention, MatchesOracleForEveryLength) {
  for (const bool causal : {false, true}) {
    for (const std::int64_t queries : {1, 2, 5, 63, 64, 65, 130}) {
      for (const std::int64_t keys : {1, 17, 64, 65, 200, 600}) {
        check({{{queries, keys}}, 1, 1, 16, 16, causal}, DType::kF32);
      }
    }
  }
  check({{{2, 1300}}, 8, 2, 8, 8, true}, DType::kF32);  // heads whose largest score comes late
  check({{{0, 5}, {0, 5}}, 2, 1}, DType::kF32);
  check({{{5, 0}, {5, 0}}, 2, 1}, DType::kF32);
  check({}, DType::kF32);
}

TEST_P(Attention, MatchesOracleForEveryWidth) {
  for (const auto& [dim, value_dim] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1},
                                                          {1, 33},
                                                          {15, 17},
                                                          {33, 1},
                                                          {64, 40},
                                                          {64, 128},
                                                          {128, 64},
                                                          {100, 60},
                                                          {72, 96},
                                                          {128, 128},
                                                          {256, 256}}) {
    check({{{70, 90}}, 1, 1, dim, value_dim, true}, DType::kF32);
    check({{{1, 90}}, 2, 1, dim, value_dim, true}, DType::kBF16);
    check({{{30 + scaled(110), 40 + scaled(160)}}, 2, 1, dim, value_dim, true},
          dim > 64 ? DType::kBF16 : DType::kF16);
  }
  // More keys than are on their way at once.
  const std::int64_t queries = 20 + scaled(130), keys = 20 + scaled(680);  // 150 and 700
  const std::int64_t tokens = 100 + scaled(200);
  for (const std::int64_t dim : {128, 256}) {
    check({{{queries, keys}, {queries, keys}}, 2, 1, dim, dim, true}, DType::kBF16);
    check({{{tokens, tokens}}, 2, 2, dim, dim, true, 100}, DType::kF16);
  }
}

TEST_P(Attention, MatchesOracleForEveryOption) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const Mask mask : {Mask::kNone, Mask::kBool, Mask::kF32, Mask::kLikeQ}) {
      for (const bool sinks : {false, true}) {
        for (const std::int64_t queries : {std::int64_t{3}, 34 + scaled(32)}) {
          const std::int64_t keys = 38 + scaled(32);
          Case c{
              {{queries, keys}, {queries, keys}}, 4, 2, 20, 18, sinks, sinks ? 33 : 0, mask, sinks};
          c.scale = 0.3;
          check(c, dtype, mask == Mask::kNone);
          c.dim = c.value_dim = 24;  // whole packs of 16 bytes
          check(c, dtype);
        }
      }
    }
  }
}

// Heads that share keys, cut into parts where keys are few.
TEST_P(Attention, ManyHeadsShareKeys) {
  Case c{{{40, 70}, {40, 70}}, 6, 2, 24, 24, true};
  check(c, DType::kBF16);
  c.heads = 16;
  c.window = 40;
  c.sinks = true;
  check(c, DType::kF16);
  c.sequences = {{40, 70}};
  for (const std::int64_t dim : {128, 136}) {
    c.dim = c.value_dim = dim;
    check(c, DType::kBF16);
  }
}

TEST_P(Attention, PackedSequencesAreApart) {
  const std::int64_t tokens = 66 + scaled(64), queries = 70 + scaled(80), keys = 100 + scaled(160);
  Case c{{{17, 17}, {0, 0}, {1, 1}, {70, 70}, {tokens, tokens}}, 4, 2, 16, 16, true};
  c.packed = true;
  check(c, DType::kF32);
  check(c, DType::kBF16);
  check(c, DType::kBF16, true);
  c.sequences = {{5, 20}, {0, 7}, {64, 100}, {3, 0}, {1, 70}, {queries, keys}};
  c.sinks = true;
  check(c, DType::kF32);
  check(c, DType::kBF16);
  c.window = 9;
  check(c, DType::kF32);
  check(c, DType::kF16);
  for (const std::int64_t dim : {72, 128, 136}) {
    c.dim = dim;
    check(c, DType::kBF16);
  }
  c.window = 0;
  c.dim = c.value_dim = 128;
  check(c, DType::kBF16);
}

// Starts of 64 bits, of which the first and the last count as the ends and others go no further back.
TEST_P(Attention, StartsAreKeptInOrder) {
  Case c{{{4, 4}, {0, 0}, {8, 8}, {8, 8}}, 2, 1, 8, 8, true};
  c.packed = true;
  const Data data = data_of(c, DType::kF32, 5);
  const Tensor q = upload(data.in[kQ], c.shape(false, 2, 8), DType::kF32);
  const Tensor k = upload(data.in[kK], c.shape(true, 1, 8), DType::kF32);
  const Tensor v = upload(data.in[kV], c.shape(true, 1, 8), DType::kF32);
  AttentionOptions options = options_of(c, data, DType::kF32);
  const auto want = bits_of(encoder(), ops::attention(encoder(), q, k, v, options).y);
  for (const DType type : {DType::kI32, DType::kI64}) {
    options.sequence_starts = upload({3, 4, 1, 12, 99}, {5}, type);
    EXPECT_EQ(bits_of(encoder(), ops::attention(encoder(), q, k, v, options).y), want);
  }
}

// Axes of 1, and masks whose last axis has a stride, give the bits of the whole mask.
TEST_P(Attention, MasksMayBeViews) {
  const Case c{{{5, 70}, {5, 70}}, 4, 2, 8, 8};
  const Data data = data_of(c, DType::kF32, 5);
  const Tensor q = upload(data.in[kQ], c.shape(false, 4, 8), DType::kF32);
  const Tensor k = upload(data.in[kK], c.shape(true, 2, 8), DType::kF32);
  const Tensor v = upload(data.in[kV], c.shape(true, 2, 8), DType::kF32);
  const Tensor dy = upload(data.dy, c.shape(false, 4, 8), DType::kF32);
  const auto bits = [&](const Tensor& mask) {
    AttentionOptions options;
    options.mask = mask;
    const auto r = ops::attention(encoder(), q, k, v, options);
    const auto g = ops::attention_backward(encoder(), q, k, v, r, dy, options);
    std::vector<std::vector<unsigned char>> all;
    for (const Tensor& t : {r.y, g.dq, g.dk, g.dv}) all.push_back(bits_of(encoder(), t));
    return all;
  };
  for (const DType type : {DType::kBool, DType::kF32}) {
    for (const Shape& shape : {Shape{1, 4, 5, 70}, Shape{2, 1, 5, 70}, Shape{2, 4, 1, 70},
                               Shape{1, 1, 1, 70}, Shape{2, 4, 5, 70}}) {
      Noise noise(3);
      auto values = random_values(noise, *element_count(shape), DType::kF32, 3);
      for (double& value : values) value = type == DType::kBool ? value > -1 : value;
      const Tensor mask = upload(values, shape, type);
      const auto want = bits(encoder().contiguous(mask.broadcast_to({2, 4, 5, 70})));
      EXPECT_EQ(bits(mask), want) << to_string(shape);
      EXPECT_EQ(bits(upload_strided(values, shape, type)), want) << to_string(shape);
    }
  }
}

// Scores of ±1e4 and a softmax that is all but one-hot.
TEST_P(Attention, WideScores) {
  Case c{{{70, 90}}, 2, 1, 16, 16, true};
  c.size = 50;
  c.scale = 1;
  check(c, DType::kF32);
}

// mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask=…, sinks=…) on [B, H, T, D], turned to our [B, T, H, D],
// and mx.grad of (y·dy).sum(). Where no key counts MLX gives the mean of all values for bool and causal masks, and NaN for
// one of −inf: there y = 0 here.
TEST_P(Attention, AsMlx) {
  using Values = std::vector<double>;
  const Tensor q = upload({-0.8125, 0.0625, 0.9375, -0.5625, 0.3125, -1.1875, -0.3125, 0.5625,
                           -0.9375, -0.0625, 0.8125, -0.6875, 0.1875, 1.0625, -0.4375, 0.4375},
                          {1, 2, 4, 2}, DType::kF32);
  const Tensor k = upload({-0.6875, -0.0625, 0.5625, -0.9375, -0.3125, 0.3125, 0.9375, -0.5625,
                           0.0625, 0.6875, -0.8125, -0.1875},
                          {1, 3, 2, 2}, DType::kF32);
  const Tensor v = upload({-1.0625, 0.3125, -1.1875, 0.1875, -1.3125, 0.0625, -1.4375, -0.0625,
                           1.3125, -0.1875, 1.1875, -0.3125},
                          {1, 3, 2, 2}, DType::kF32);
  const Values dy{-0.4375, -0.0625, 0.3125, 0.6875, -0.5625, -0.1875, 0.1875,  0.5625,
                  -0.6875, -0.3125, 0.0625, 0.4375, -0.8125, -0.4375, -0.0625, 0.3125};
  const auto close = [&](const char* what, const Tensor& got, const Values& want) {
    expect_close(what, download(got), refs_of(want, 1), DType::kF32, 4);
  };
  const auto expect = [&](const char* what, AttentionOptions o, const Values& want) {
    o.scale = 0.5;
    close(what, ops::attention(encoder(), q, k, v, o).y, want);
  };
  const Tensor sinks = upload({0.5, -1, 0, 2}, {4}, DType::kF32);
  const double never = -INFINITY;
  expect("plain", {},
         {-0.461986423, 0.0858605802, -0.297759771, 0.050790906, -0.758341193, -0.0114285946,
          -0.244826317, -0.0995787308, -0.496174783, 0.0935682803, -0.33552587, 0.0585940927,
          -0.405716866, -0.0841421708, -0.204573095, -0.103689037});
  expect("causal", {.causal = true},
         {-1.17872536, 0.196274608, -1.19189286, 0.183107287, -1.30226898, 0.0727309585,
          -1.31542921, 0.0595708489, -0.496174783, 0.0935682803, -0.33552587, 0.0585940927,
          -0.405716866, -0.0841421708, -0.204573095, -0.103689037});
  expect("bool", {.mask = upload({1, 0, 1, 0, 1, 1}, {1, 1, 2, 3}, DType::kBool)},
         {-0.0409000516, 0.0974263251, 0.208358794, 0.0449507758, -0.378326744, 0.0171477348,
          0.249056309, -0.11493291, -0.122687578, -0.0508154631, 0.0153801441, -0.0639647841,
          -0.101931095, -0.189697042, 0.174676895, -0.216040656});
  expect("added", {.mask = upload({0.5, -1, 0.25, never, 0, 1}, {1, 1, 2, 3}, DType::kF32)},
         {-0.306085229, 0.120327309, -0.093724072, 0.0746274069, -0.616770864, 0.0313446522,
          -0.0444895029, -0.0823037922, 0.50568521, -0.110660493, 0.618559301, -0.121410415,
          0.49952507, -0.246978566, 0.694715023, -0.265568078});
  expect("sinks", {.sinks = sinks},
         {-0.312956005, 0.0581631362, -0.257854402, 0.0439839661, -0.620621741, -0.0093530938,
          -0.0622253269, -0.0253090318, -0.336668491, 0.0634887144, -0.290502161, 0.0507314429,
          -0.282370538, -0.0585612208, -0.0530508459, -0.0268891305});
  expect("causal, sinks", {.causal = true, .sinks = sinks},
         {-0.706438065, 0.117632031, -0.960667014, 0.147584707, -1.01427913, 0.0566468984,
          -0.214661062, 0.00972119533, -0.336668491, 0.0634887144, -0.290502161, 0.0507314429,
          -0.282370538, -0.0585612208, -0.0530508459, -0.0268891305});

  AttentionOptions options{.scale = 0.5, .causal = true};
  const Tensor dys = upload(dy, {1, 2, 4, 2}, DType::kF32);
  auto r = ops::attention(encoder(), q, k, v, options);
  const auto g = ops::attention_backward(encoder(), q, k, v, r, dys, options);
  close("dq", g.dq,
        {0.00583050214, 0.00583050214, -0.011704281, -0.0117042772, 0.00873020478, 0.00873016007,
         -0.00878423639, -0.00878423639, -0.0830964446, -0.0830964521, -0.00430561043,
         -0.00430561043, 0.355899096, -0.109162949, 0.0510845222, -0.0206090435});
  close("dk", g.dk,
        {-0.00920885429, -0.0298603754, -0.0103321988, 0.126869366, -0.138101146, 0.0194495488,
         0.0366066545, 0.12042205, 0.147310004, 0.010410822, -0.0262744427, -0.247291461});
  close("dv", g.dv,
        {-0.336216092, 0.316466033, -0.457487583, 0.137810677, -0.24732855, 0.369623661,
         -0.467107087, 0.134002328, -0.166455388, 0.0639103055, -0.325405359, -0.0218129903});
  options.sinks = sinks;
  r = ops::attention(encoder(), q, k, v, options);
  close("d_sinks", ops::attention_backward(encoder(), q, k, v, r, dys, options).d_sinks,
        {-0.188919574, 0.0380141363, -0.201360732, 0.0328729451});

  // Queries before the first key.
  const auto early = download(ops::attention(encoder(), q.slice(2, 0, 2), k.slice(1, 0, 1),
                                             v.slice(1, 0, 1), {.causal = true})
                                  .y);
  EXPECT_EQ(Values(early.begin(), early.begin() + 4), Values(4, 0));
}

// A query that is no number has no result; the others have theirs. Here each sees one key, or one of many.
// A row that an added mask takes away altogether, as padding does, has no keys; neither has one whose sink is −inf.
TEST_P(Attention, MaskedRowsAndSinksThatDoNotCount) {
  using Values = std::vector<double>;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const double none : {-1e9, static_cast<double>(std::numeric_limits<float>::lowest())}) {
      const Tensor q = upload({1, 2, 0.5, -1}, {1, 2, 1, 2}, dtype);
      const Tensor k = upload({1, 0, 0, 1, 1, 1}, {1, 3, 1, 2}, dtype);
      const Tensor v = upload({1, 2, 3, 4, 5, 6}, {1, 3, 1, 2}, dtype);
      AttentionOptions o;
      o.mask = upload({none, none, none, none, 0, none}, {1, 1, 2, 3}, DType::kF32);
      o.sinks = upload({-INFINITY}, {1}, DType::kF32);
      const auto r = ops::attention(encoder(), q, k, v, o);
      EXPECT_EQ(download(r.y), (Values{0, 0, 3, 4}));
      const auto g = ops::attention_backward(encoder(), q, k, v, r,
                                             upload({1, 1, 1, 1}, {1, 2, 1, 2}, dtype), o);
      EXPECT_EQ(download(g.dv), (Values{0, 0, 1, 1, 0, 0}));
      EXPECT_EQ(download(g.dq), Values(4, 0));
      EXPECT_EQ(download(g.dk), Values(6, 0));
      EXPECT_EQ(download(g.d_sinks), Values(1, 0));
    }
  }
}

TEST_P(Attention, NothingHasSinksThatDoNotMatter) {
  AttentionOptions o;
  o.sinks = upload({1, 2}, {2}, DType::kF32);
  const Tensor none = encoder().zeros({0, 3, 2, 4}, DType::kF32);
  const auto r = ops::attention(encoder(), none, none, none, o);
  const auto g = ops::attention_backward(encoder(), none, none, none, r, none, o);
  EXPECT_EQ(download(g.d_sinks), std::vector<double>(2, 0));
}

TEST_P(Attention, AMaskHasNoGradient) {
  Tape tape(encoder());
  const Tensor x = tape.watch(encoder().zeros({1, 2, 1, 4}, DType::kF32));
  AttentionOptions o;
  o.mask = tape.watch(encoder().zeros({1, 1, 2, 2}, DType::kF32));
  expect_error(Errc::kNoGradient, "mask must not be watched",
               [&] { static_cast<void>(ops::attention(tape, x, x, x, o)); });
}

TEST_P(Attention, NaNStaysNaN) {
  for (const std::int64_t tokens : {2, 70}) {
    for (const bool causal : {false, true}) {
      std::vector<double> q(at(tokens * 4), 0.5);
      q[0] = std::nan("");
      const std::vector<double> ones(at(tokens * 4), 1);
      const Shape shape{1, tokens, 1, 4};
      AttentionOptions options;
      options.causal = causal;
      const auto y = download(ops::attention(encoder(), upload(q, shape, DType::kF32),
                                             upload(ones, shape, DType::kF32),
                                             upload(ones, shape, DType::kF32), options)
                                  .y);
      for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(std::isnan(y[i])) << tokens << causal;
      for (std::size_t i = 4; i < y.size(); ++i) EXPECT_NEAR(y[i], 1, 1e-6) << tokens << causal;
    }
  }
}

// Twice the tokens, twice the memory: nothing of size [T, S].
TEST_P(Attention, MemoryGrowsWithTokens) {
  const auto peak = [&](std::int64_t tokens) {
    MemoryPool& memory = encoder().device().memory();
    const std::size_t before = memory.stats().current;
    memory.reset_peak();
    const auto zeros = [&](std::int64_t heads) {
      return encoder().zeros({1, tokens, heads, 16}, DType::kF32);
    };
    Tape tape(encoder());
    const Tensor q = tape.watch(zeros(4)), k = tape.watch(zeros(2)), v = tape.watch(zeros(2));
    const Tensor y = ops::attention(tape, q, k, v, {.causal = true});
    tape.backward(y, zeros(4));
    return memory.stats().peak - before;
  };
  const std::int64_t tokens = 192 + scaled(832);
  const std::size_t once = peak(tokens), twice = peak(2 * tokens);
  EXPECT_LE(twice, once * 9 / 4) << once;
  EXPECT_LE(twice, std::size_t{2048} * 2048 * 4) << once;  // the scores of one head
}

TEST_P(Attention, SameBitsOnEveryRun) {
  for (const auto& [dim, dtype] : std::vector<std::pair<std::int64_t, DType>>{
           {16, DType::kF32}, {24, DType::kBF16}, {128, DType::kBF16}, {136, DType::kBF16}}) {
    const std::int64_t queries = 38 + scaled(32), keys = 60 + scaled(90);
    const Case c{{{queries, keys}, {queries, keys}}, 4, 2, dim, dim, true};
    const Data data = data_of(c, dtype, 3);
    const Tensor q = upload(data.in[kQ], c.shape(false, 4, dim), dtype);
    const Tensor k = upload(data.in[kK], c.shape(true, 2, dim), dtype);
    const Tensor v = upload(data.in[kV], c.shape(true, 2, dim), dtype);
    const AttentionOptions options = options_of(c, data, dtype);
    const Tensor dy = upload(data.dy, c.shape(false, 4, dim), dtype);
    expect_repeatable(encoder(), [&] {
      const auto r = ops::attention(encoder(), q, k, v, options);
      const auto g = ops::attention_backward(encoder(), q, k, v, r, dy, options);
      return std::vector<Tensor>{r.y, r.lse, g.dq, g.dk, g.dv};
    });
  }
}

// Heads of each set of kernels, from the beginning of memory, behind it, and with gaps between them.
TEST_P(Attention, SameBitsAtAnyAddress) {
  const DType dtype = DType::kBF16;
  for (const std::int64_t dim : {64, 128}) {
    const Case c{{{40, 70}}, 2, 1, dim, dim, true};
    const Data data = data_of(c, dtype, 5);
    const AttentionOptions options = options_of(c, data, dtype);
    const auto run = [&](const auto& up) {
      const Tensor q = up(data.in[kQ], c.shape(false, 2, dim)),
                   k = up(data.in[kK], c.shape(true, 1, dim)),
                   v = up(data.in[kV], c.shape(true, 1, dim)),
                   dy = up(data.dy, c.shape(false, 2, dim));
      const auto r = ops::attention(encoder(), q, k, v, options);
      const auto g = ops::attention_backward(encoder(), q, k, v, r, dy, options);
      return Arrays{download(r.y), download(r.lse), download(g.dq), download(g.dk), download(g.dv)};
    };
    const auto at_offset = [&](std::int64_t offset) {
      return run([&, offset](const std::vector<double>& values, const Shape& shape) {
        return upload(values, shape, dtype, offset);
      });
    };
    const Arrays want = at_offset(0);
    for (const std::int64_t offset : {1, 4}) EXPECT_EQ(at_offset(offset), want) << dim;
    const auto with_gaps = [&](const std::vector<double>& values, const Shape& shape) {
      const Tensor wide = encoder().empty({shape[0], shape[1], shape[2], dim + 1}, dtype);
      const Tensor view = wide.slice(3, 0, dim);
      encoder().copy(upload(values, shape, dtype), view);
      return view;
    };
    EXPECT_EQ(run(with_gaps), want) << dim;
  }
}

MT_ON_EVERY_BACKEND(Attention);

}  // namespace
}  // namespace mlxtape::test
