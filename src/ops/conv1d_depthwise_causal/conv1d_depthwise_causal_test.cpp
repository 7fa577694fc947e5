#include "mlxtape/ops/conv1d_depthwise_causal.h"

#include <rapidcheck.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// One call: sequence s is the rows starts[s] to starts[s+1]. Absent arrays are empty.
struct Problem {
  std::vector<std::int64_t> starts;
  std::int64_t channels, taps;
  bool silu;
  std::vector<double> x, w, initial, dy, d_final;

  std::int64_t sequences() const { return static_cast<std::int64_t>(starts.size()) - 1; }
};

struct Expected {
  Refs y, final_state, dx, dw, d_initial;
};

// The formula block of conv1d_depthwise_causal.h, in double.
Expected oracle(const Problem& p) {
  const std::int64_t channels = p.channels, taps = p.taps, sequences = p.sequences();
  const auto cells = [&](std::int64_t rows) {
    return static_cast<std::size_t>(rows * channels);
  };
  Expected out{Refs(cells(p.starts.back())), Refs(cells(sequences * (taps - 1))),
               Refs(cells(p.starts.back())), Refs(cells(taps)),
               p.initial.empty() ? Refs() : Refs(cells(sequences * (taps - 1)))};
  for (std::int64_t s = 0; s < sequences; ++s) {
    const std::int64_t start = p.starts[static_cast<std::size_t>(s)];
    const std::int64_t length = p.starts[static_cast<std::size_t>(s + 1)] - start;
    for (std::int64_t c = 0; c < channels; ++c) {
      const auto row = [&](std::int64_t t) {
        return cells(start + t) + static_cast<std::size_t>(c);
      };
      const auto state = [&](std::int64_t j) {
        return cells(s * (taps - 1) + j) + static_cast<std::size_t>(c);
      };
      const auto tap = [&](std::int64_t k) {
        return static_cast<std::size_t>(c * taps + k);
      };
      const auto e = [&](std::int64_t t) {
        if (t >= 0) return p.x[row(t)];
        return p.initial.empty() ? 0 : p.initial[state(taps - 1 + t)];
      };
      std::vector<Ref> dz(static_cast<std::size_t>(length));
      for (std::int64_t t = 0; t < length; ++t) {
        double z = 0, z_abs = 0;
        for (std::int64_t k = 0; k < taps; ++k) {
          z += p.w[tap(k)] * e(t + k - (taps - 1));
          z_abs += std::abs(p.w[tap(k)] * e(t + k - (taps - 1)));
        }
        const double dy = p.dy[row(t)];
        Ref& d = dz[static_cast<std::size_t>(t)];
        if (!p.silu) {
          out.y[row(t)] = {z, z_abs};
          d = {dy, std::abs(dy)};
          continue;
        }
        // What z lost in its sum moves y by the slope of silu, and the slope by at most half of it.
        const double sigma = 1 / (1 + std::exp(-z)), rest = 1 / (1 + std::exp(z));
        const double slope = sigma * (1 + z * rest);
        out.y[row(t)] = {z * sigma, std::abs(z * sigma) + std::abs(slope) * z_abs};
        d = {dy * slope, std::abs(dy) * (sigma * (1 + std::abs(z) * rest) + z_abs / 2)};
      }
      for (std::int64_t i = -(taps - 1); i < length; ++i) {
        double de = 0, de_abs = 0;
        for (std::int64_t k = 0; k < taps; ++k) {
          const std::int64_t t = i + (taps - 1) - k;
          if (t < 0 || t >= length) continue;
          const Ref& d = dz[static_cast<std::size_t>(t)];
          de += p.w[tap(k)] * d.value;
          de_abs += std::abs(p.w[tap(k)]) * d.scale;
          out.dw[tap(k)].value += e(i) * d.value;
          out.dw[tap(k)].scale += std::abs(e(i)) * d.scale;
        }
        const std::int64_t j = i - length + (taps - 1);
        if (j >= 0) {
          out.final_state[state(j)] = {e(i), std::abs(e(i))};
          if (!p.d_final.empty()) {
            de += p.d_final[state(j)];
            de_abs += std::abs(p.d_final[state(j)]);
          }
        }
        if (i >= 0) out.dx[row(i)] = {de, de_abs};
        if (i < 0 && !p.initial.empty()) out.d_initial[state(taps - 1 + i)] = {de, de_abs};
      }
    }
  }
  return out;
}

std::vector<double> values(const Refs& refs) {
  std::vector<double> v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// expect_close with a bound that knows the two errors apart: the rounding of the result is relative
// to the result, only that of the sum is relative to its terms.
void expect_near(const std::string& what, const std::vector<double>& got, Refs want, DType stored,
                 std::int64_t n) {
  const double sum = static_cast<double>(n + 16) * 0x1p-24;
  const double both = rounding_bound(stored, n);
  for (Ref& r : want) {
    const double lost = sum * r.scale;
    r.scale = ((both - sum) * (std::abs(r.value) + lost) + lost) / both;
  }
  expect_close(what, got, want, stored, n);
}

TEST(Conv1dDepthwiseCausalOracle, GradientMatchesCentralDifference) {
  for (const bool silu : {false, true}) {
    for (const std::int64_t taps : {1, 3, 4}) {
      Noise noise(static_cast<std::uint64_t>(taps));
      const auto random = [&](std::int64_t n) {
        return random_values(noise, n, DType::kF64);
      };
      // Longer than, as long as and shorter than the taps reach, and empty.
      const Problem p{{0, 7, 10, 12, 12},
                      3,
                      taps,
                      silu,
                      random(36),
                      random(3 * taps),
                      random(12 * (taps - 1)),
                      random(36),
                      random(12 * (taps - 1))};
      const auto loss = [&](const Arrays& at) {
        Problem q = p;
        q.x = at[0];
        q.w = at[1];
        if (taps > 1) q.initial = at[2];
        const Expected e = oracle(q);
        return dot(values(e.y), p.dy) + dot(values(e.final_state), p.d_final);
      };
      const Expected e = oracle(p);
      Arrays inputs{p.x, p.w}, gradients{values(e.dx), values(e.dw)};
      if (taps > 1) {
        inputs.push_back(p.initial);
        gradients.push_back(values(e.d_initial));
      }
      expect_gradient(loss, inputs, gradients);
    }
  }
}

TEST(Conv1dDepthwiseCausalCheck, SaysWhatIsWrong) {
  using Options = ops::Conv1dDepthwiseCausalOptions;
  const auto meta = [](Shape shape, DType t = DType::kF32, Backend b = Backend::kCpu) {
    return Tensor::meta(shape, t, b);
  };
  const auto x = meta({9, 8}), w = meta({8, 4}), state = meta({1, 3, 8}),
             starts = meta({3}, DType::kI32);
  const auto bf16 = meta({9, 8}, DType::kBF16), f16_taps = meta({8, 4}, DType::kF16);
  const auto fwd = [](const Tensor& a, const Tensor& b, const Options& o = {}) {
    return ops::conv1d_depthwise_causal_check(a, b, o);
  };
  const auto bwd = [&](const Tensor& dy, const Tensor& d_final = {}) {
    return ops::conv1d_depthwise_causal_backward_check(x, w, dy, {}, d_final);
  };
  const auto step = ops::conv1d_depthwise_causal_step_check;
  const Backend far = Backend::kMetal;
  expect_refused({
      {"rank 1", fwd(meta({8}), w), Errc::kShape, "x must be [T, C] or [B, T, C], got [8]"},
      {"rank 4", fwd(meta({1, 1, 1, 8}), w), Errc::kShape, "got [1, 1, 1, 8]"},
      {"double", fwd(meta({9, 8}, DType::kF64), w), Errc::kDType, "f32, f16 or bf16, got f64"},
      {"w of rank 3", fwd(x, meta({8, 4, 1})), Errc::kShape, "[C, K] = [8, K], got [8, 4, 1]"},
      {"w for other channels", fwd(x, meta({7, 4})), Errc::kShape, "got [7, 4]"},
      {"no tap", fwd(x, meta({8, 0})), Errc::kShape, "K must be from 1 to 16, got 0"},
      {"17 taps", fwd(x, meta({8, 17})), Errc::kShape, "got 17"},
      {"another 16-bit type", fwd(bf16, f16_taps), Errc::kDType, "type of x bf16 or f32, got f16"},
      {"w elsewhere", fwd(x, meta({8, 4}, DType::kF32, far)), Errc::kDevice,
       "w must be where x is (cpu), got metal"},
      {"starts for a batch", fwd(meta({2, 9, 8}), w, {.sequence_starts = starts}), Errc::kShape,
       "x must be [T, C] with sequence_starts, got [2, 9, 8]"},
      {"one start", fwd(x, w, {.sequence_starts = meta({1}, DType::kI32)}), Errc::kShape,
       "[S+1] with S at least 1, got [1]"},
      {"starts of rank 2", fwd(x, w, {.sequence_starts = meta({3, 1}, DType::kI32)}), Errc::kShape,
       "got [3, 1]"},
      {"float starts", fwd(x, w, {.sequence_starts = meta({3})}), Errc::kDType,
       "i32 or i64, got f32"},
      {"starts elsewhere", fwd(x, w, {.sequence_starts = meta({3}, DType::kI64, far)}),
       Errc::kDevice, "sequence_starts must be where x is"},
      {"a state too many", fwd(x, w, {.initial_state = meta({2, 3, 8})}), Errc::kShape,
       "initial_state must be [1, 3, 8], got [2, 3, 8]"},
      {"a state too few", fwd(x, w, {.sequence_starts = starts, .initial_state = state}),
       Errc::kShape, "must be [2, 3, 8], got [1, 3, 8]"},
      {"state of another type", fwd(bf16, w, {.initial_state = state}), Errc::kDType,
       "type of x bf16, got f32"},
      {"state elsewhere", fwd(x, w, {.initial_state = meta({1, 3, 8}, DType::kF32, far)}),
       Errc::kDevice, "got metal"},
      {"backward refuses like forward",
       ops::conv1d_depthwise_causal_backward_check(meta({8}), w, x), Errc::kShape, "got [8]"},
      {"dy of another shape", bwd(meta({8, 9})), Errc::kShape, "dy must be [9, 8], got [8, 9]"},
      {"d_final_state of another shape", bwd(x, meta({1, 4, 8})), Errc::kShape,
       "d_final_state must be [1, 3, 8]"},
      {"step of a batch", step(meta({2, 9, 8}), w, state), Errc::kShape, "[B, C], got [2, 9, 8]"},
      {"step refuses taps like forward", step(x, meta({8, 0}), state), Errc::kShape, "got 0"},
      {"step with another state", step(x, w, state), Errc::kShape, "state must be [9, 3, 8]"},
      {"step with a view", step(x, w, meta({9, 3, 16}).slice(2, 0, 16, 2)), Errc::kShape,
       "state must be contiguous"},
  });
  EXPECT_FALSE(fwd(meta({0, 8}, DType::kF16), w, {.silu = true}));
  EXPECT_FALSE(fwd(meta({0, 0}), meta({0, 1})));
  EXPECT_FALSE(fwd(x, w, {.sequence_starts = starts, .initial_state = meta({2, 3, 8})}));
}

struct Form {
  bool silu = false, state = false;
  std::vector<std::int64_t> starts = {};  // packed when not empty, as stored
  DType start_type = DType::kI32;
  bool f32_taps = false, strided = false;
  std::int64_t offset = 0;
};

class Conv1dDepthwiseCausal : public OnDevice {
 protected:
  // Forward and backward of one call against the oracle. shape: x; used: the starts as clamped.
  void check(const Shape& shape, std::int64_t taps, DType dtype, const Form& form = {},
             std::vector<std::int64_t> used = {}) {
    const bool batched = shape.rank() == 3;
    const std::int64_t rows = batched ? shape[0] * shape[1] : shape[0], channels = shape.back();
    if (used.empty()) used = form.starts;
    if (used.empty())
      used = batched ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{0, rows};
    for (std::int64_t b = 0; batched && b <= shape[0]; ++b) used.push_back(b * shape[1]);
    const DType w_type = form.f32_taps ? DType::kF32 : dtype;
    Noise noise(static_cast<std::uint64_t>(rows + 31 * channels + 97 * taps));
    Problem p{used,
              channels,
              taps,
              form.silu,
              random_values(noise, rows * channels, dtype),
              random_values(noise, channels * taps, w_type),
              {},
              random_values(noise, rows * channels, dtype),
              {}};
    const Shape state_shape{p.sequences(), taps - 1, channels};
    const std::int64_t state_size = p.sequences() * (taps - 1) * channels;
    if (form.state) {
      p.initial = random_values(noise, state_size, dtype);
      p.d_final = random_values(noise, state_size, dtype);
    }
    const auto put = [&](const std::vector<double>& v, const Shape& s, DType t) {
      return form.strided ? upload_strided(v, s, t) : upload(v, s, t, form.offset);
    };
    ops::Conv1dDepthwiseCausalOptions options{.silu = form.silu, .want_final_state = true};
    Tensor d_final;
    if (form.state) {
      options.initial_state = put(p.initial, state_shape, dtype);
      d_final = put(p.d_final, state_shape, dtype);
    }
    if (!form.starts.empty()) {
      const std::vector<double> stored(form.starts.begin(), form.starts.end());
      options.sequence_starts = put(stored, {p.sequences() + 1}, form.start_type);
    }
    const Tensor x = put(p.x, shape, dtype), w = put(p.w, {channels, taps}, w_type);
    const std::string at = to_string(shape) + " K " + std::to_string(taps) + " " + name_of(dtype) +
                           (form.silu ? " silu" : "") + (form.state ? " state" : "");
    const Expected want = oracle(p);
    const auto got = ops::conv1d_depthwise_causal(encoder(), x, w, options);
    expect_near("y " + at, download(got.y), want.y, dtype, taps);
    EXPECT_EQ(download(got.final_state), values(want.final_state)) << at;
    const auto grad = ops::conv1d_depthwise_causal_backward(
        encoder(), x, w, put(p.dy, shape, dtype), options, d_final);
    expect_near("dx " + at, download(grad.dx), want.dx, dtype, 2 * taps);
    expect_near("dw " + at, download(grad.dw), want.dw, w_type, rows + taps);
    EXPECT_EQ(grad.d_initial_state.defined(), form.state);
    if (form.state) {
      expect_near("d_initial " + at, download(grad.d_initial_state), want.d_initial, dtype,
                  2 * taps);
    }
  }
};

TEST_P(Conv1dDepthwiseCausal, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t rows : {0, 1, 2, 3, 4, 7, 33}) {
      for (const std::int64_t channels : {1, 2, 7, 31, 32, 33, 255, 256, 257}) {
        check({rows, channels}, 4, dtype);
        check({rows, channels}, 3, dtype, {.silu = true});
      }
    }
    for (const std::int64_t rows : {255, 256, 257}) check({rows, 37}, 4, dtype, {.silu = true});
    check({65, 2048}, 4, dtype);
    check({37, 8192}, 4, dtype, {.silu = true});
    check({5, 0}, 4, dtype);
  }
}

TEST_P(Conv1dDepthwiseCausal, MatchesOracleForEveryNumberOfTaps) {
  for (const DType dtype : kTypes) {
    for (std::int64_t taps = 1; taps <= 16; ++taps) {
      for (const bool silu : {false, true}) {
        check({41, 100}, taps, dtype, {.silu = silu, .state = true, .f32_taps = silu});
        check({3, 100}, taps, dtype, {.silu = silu});
      }
    }
    check({20, 1100}, 16, dtype, {.silu = true, .state = true});
  }
}

TEST_P(Conv1dDepthwiseCausal, MatchesOracleForBatches) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t batch : {0, 1, 3}) {
      for (const std::int64_t rows : {0, 1, 2, 3, 9, 40}) {
        for (const bool state : {false, true}) {
          check({batch, rows, 70}, 4, dtype, {.silu = state, .state = state});
          check({batch, rows, 70}, 4, dtype, {.silu = !state, .state = state, .f32_taps = true});
        }
      }
    }
  }
}

TEST_P(Conv1dDepthwiseCausal, MatchesOracleForPackedSequences) {
  for (const DType dtype : kTypes) {
    for (const DType type : {DType::kI32, DType::kI64}) {
      for (const bool state : {false, true}) {
        for (const std::vector<std::int64_t>& starts : {std::vector<std::int64_t>{0, 50},
                                                        {0, 0, 50},
                                                        {0, 1, 2, 3, 50},
                                                        {0, 20, 20, 20, 50},
                                                        {0, 13, 17, 19, 22, 48, 50, 50}}) {
          check({50, 70}, 4, dtype,
                {.silu = !state, .state = state, .starts = starts, .start_type = type});
          check({50, 70}, 7, dtype,
                {.silu = state, .state = state, .starts = starts, .start_type = type});
        }
      }
    }
  }
}

// More sequences than a warp, and than a block, has threads; strips of more than 32 rows; wide rows of
// every kind.
TEST_P(Conv1dDepthwiseCausal, MatchesOracleForEveryForm) {
  std::vector<std::int64_t> many{0};
  Noise noise(5);
  while (many.size() < 301)
    many.push_back(std::min<std::int64_t>(900, many.back() + noise.below(7)));
  many.back() = 900;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool silu : {false, true}) {
      check({900, 64}, 4, dtype,
            {.silu = silu, .state = true, .starts = many, .start_type = DType::kI64});
      check({3, 53, 64}, 3, dtype, {.silu = silu, .state = true});
      check({1100, GetParam() == Backend::kCpu ? 512 : scaled(8192)}, 4, dtype, {.silu = silu});
      check({300, 72}, 16, dtype, {.silu = silu});
    }
  }
}

TEST_P(Conv1dDepthwiseCausal, AnyStartsAreClampedToASequence) {
  const auto far = std::int64_t{1} << 62;
  const auto near = std::int64_t{1} << 30;
  for (const bool state : {false, true}) {
    check({9, 40}, 4, DType::kF32,
          {.silu = state, .state = state, .starts = {5, 3, -near, near, 4, -1}},
          {0, 3, 3, 9, 9, 9});
    check({9, 40}, 4, DType::kF32,
          {.state = state, .starts = {far, -far, 2, 1, far}, .start_type = DType::kI64},
          {0, 0, 2, 2, 9});
  }
  // More than a GPU's group looks at together: what fell stays up.
  std::vector<std::int64_t> falling(301, 3), used(301, 7);
  falling[1] = 7;
  used[0] = 0;
  used[300] = 9;
  check({9, 40}, 4, DType::kF32, {.starts = falling}, used);
}

TEST_P(Conv1dDepthwiseCausal, MatchesOracleForViews) {
  for (const DType dtype : kTypes) {
    check({9, 33}, 4, dtype, {.silu = true, .state = true, .strided = true});
    check({9, 33}, 4, dtype, {.state = true, .starts = {0, 4, 9}, .strided = true});
    for (const std::int64_t offset : {1, 3, 17}) {
      check({9, 257}, 4, dtype, {.state = true, .offset = offset});
    }
  }
}

// Large enough to be written past the cache, with rows that start in the middle of a line and not.
TEST_P(Conv1dDepthwiseCausal, MatchesOracleWhenStreamed) {
  for (const DType dtype : kTypes) {
    const bool silu = dtype == DType::kF16;
    check({scaled(1100), 2047}, 3, dtype, {.silu = silu, .offset = 3});
    const std::int64_t rows = scaled(1030);
    check({rows, 2080}, 4, dtype,
          {.silu = !silu, .state = true, .starts = {0, 1, rows / 2 - 1, rows}});
  }
}

// The tests of the seed: both sizes against double, and every difference quotient within 1 %.
TEST_P(Conv1dDepthwiseCausal, SeedSizes) {
  for (const std::int64_t rows : {16, 32}) check({rows, 8}, 4, DType::kF32);
  check({2, 8}, 4, DType::kF32);
  check({16, 8}, 1, DType::kF32);
}

TEST_P(Conv1dDepthwiseCausal, SeedDifferenceQuotients) {
  Noise noise(11);
  const Shape shape{16, 8};
  const auto x = random_values(noise, 128, DType::kF32), w = random_values(noise, 32, DType::kF32);
  const auto dy = random_values(noise, 128, DType::kF32);
  const auto loss = [&](const std::vector<double>& xs, const std::vector<double>& ws) {
    const auto y = ops::conv1d_depthwise_causal(encoder(), upload(xs, shape, DType::kF32),
                                                upload(ws, {8, 4}, DType::kF32));
    return dot(download(y.y), dy);
  };
  const auto grad = ops::conv1d_depthwise_causal_backward(encoder(), upload(x, shape, DType::kF32),
                                                          upload(w, {8, 4}, DType::kF32),
                                                          upload(dy, shape, DType::kF32));
  const auto quotients = [&](std::vector<double> at, const auto& loss_at, const Tensor& gradient) {
    const auto slopes = download(gradient);
    for (std::size_t i = 0; i < at.size(); ++i) {
      const double kept = at[i];
      at[i] = kept + 0.125;
      const double ahead = loss_at(at);
      at[i] = kept - 0.125;
      EXPECT_NEAR((ahead - loss_at(at)) / 0.25, slopes[i],
                  0.01 * std::max(0.01, std::abs(slopes[i])));
      at[i] = kept;
    }
  };
  quotients(x, [&](const auto& xs) { return loss(xs, w); }, grad.dx);
  quotients(w, [&](const auto& ws) { return loss(x, ws); }, grad.dw);
}

TEST_P(Conv1dDepthwiseCausal, StepsEqualOneForward) {
  Noise noise(3);
  for (const DType dtype : kTypes) {
    for (const std::int64_t taps : {1, 2, 3, 4, 9}) {
      for (const std::int64_t channels : {1, 33, 300, 2100}) {
        for (const bool silu : {false, true}) {
          const std::int64_t batch = 3, steps = 5;
          const DType w_type = silu ? DType::kF32 : dtype;
          Problem p{{0, 5, 10, 15},
                    channels,
                    taps,
                    silu,
                    random_values(noise, batch * steps * channels, dtype),
                    random_values(noise, channels * taps, w_type),
                    random_values(noise, batch * (taps - 1) * channels, dtype),
                    std::vector<double>(static_cast<std::size_t>(batch * steps * channels)),
                    {}};
          const Expected want = oracle(p);
          const Tensor x = upload(p.x, {batch, steps, channels}, dtype, 1);
          const Tensor w = upload(p.w, {channels, taps}, w_type, 1);
          const Tensor state = upload(p.initial, {batch, taps - 1, channels}, dtype, 1);
          for (std::int64_t t = 0; t < steps; ++t) {
            const Tensor y =
                ops::conv1d_depthwise_causal_step(encoder(), x.select(1, t), w, state, silu);
            Refs now;
            for (std::int64_t b = 0; b < batch; ++b) {
              const auto from = want.y.begin() + (b * steps + t) * channels;
              now.insert(now.end(), from, from + channels);
            }
            expect_near("step " + std::to_string(t) + " " + name_of(dtype), download(y), now, dtype,
                        taps);
          }
          EXPECT_EQ(download(state), values(want.final_state));
        }
      }
    }
  }
  const Tensor none = encoder().empty({0, 8}, DType::kF32);
  const Tensor w = upload(std::vector<double>(32, 1.0), {8, 4}, DType::kF32);
  const Tensor state = encoder().empty({0, 3, 8}, DType::kF32);
  EXPECT_EQ(ops::conv1d_depthwise_causal_step(encoder(), none, w, state).size(), 0);
}

TEST_P(Conv1dDepthwiseCausal, ExtremeNumbers) {
  const double inf = INFINITY, nan = std::nan("");
  const auto run = [&](const std::vector<double>& x, const std::vector<double>& w, DType dtype,
                       bool silu) {
    const auto n = static_cast<std::int64_t>(x.size()), k = static_cast<std::int64_t>(w.size());
    return download(ops::conv1d_depthwise_causal(encoder(), upload(x, {n, 1}, dtype),
                                                 upload(w, {1, k}, dtype), {.silu = silu})
                        .y);
  };
  for (const DType dtype : kTypes) {
    const auto y = run({1, nan, 2, inf, 3, 4}, {1, 2}, dtype, false);
    const std::vector<double> want{2, nan, nan, inf, inf, 11};
    for (std::size_t i = 0; i < y.size(); ++i) {
      EXPECT_TRUE(y[i] == want[i] || (std::isnan(y[i]) && std::isnan(want[i])))
          << i << ": " << y[i];
    }
    const auto s = run({1000, -1000, 0, inf, nan, -inf}, {1}, dtype, true);
    EXPECT_EQ(s[0], 1000);
    EXPECT_EQ(s[1], 0);
    EXPECT_EQ(s[2], 0);
    EXPECT_EQ(s[3], inf);
    EXPECT_TRUE(std::isnan(s[4]) && std::isnan(s[5])) << s[4] << " " << s[5];
  }
  // Where sigma is subnormal, its rounding counts |z| times.
  const auto deep = run({-88, -95, -102, -104, -110}, {1}, DType::kF32, true);
  const double z[] = {-88, -95, -102, -104, -110};
  for (std::size_t i = 0; i < 5; ++i) {
    const double y = z[i] * std::exp(z[i]);
    EXPECT_NEAR(deep[i], y, 110 * (smallest_step(DType::kF32) - y * 0x1p-24));
  }
  // The tails of silu, where it is all in the exponential.
  std::vector<double> x;
  for (double v = -86; v < 40; v += 0.37) x.push_back(round_to(DType::kF32, v));
  const auto n = static_cast<std::int64_t>(x.size());
  const Problem p{{0, n}, 1, 1, true, x, {1}, {}, std::vector<double>(x.size(), 1.0), {}};
  const Tensor xs = upload(x, {n, 1}, DType::kF32), one = upload({1}, {1, 1}, DType::kF32);
  const Tensor ones = upload(p.dy, {n, 1}, DType::kF32);
  const Expected want = oracle(p);
  expect_near("tails", run(x, {1}, DType::kF32, true), want.y, DType::kF32, 1);
  const auto grad = ops::conv1d_depthwise_causal_backward(encoder(), xs, one, ones, {.silu = true});
  expect_near("slopes", download(grad.dx), want.dx, DType::kF32, 1);
}

// A product halfway between two stored numbers goes to the even one, in the vectors and in the rest.
TEST_P(Conv1dDepthwiseCausal, TiesGoToEven) {
  for (const auto& [dtype, ulp] :
       {std::pair{DType::kF16, 0x1p-10}, std::pair{DType::kBF16, 0x1p-7}}) {
    for (const bool odd : {false, true}) {
      const double tap = 1 + (odd ? 1.5 : 0.5) * ulp, even = odd ? 1 + 2 * ulp : 1;
      const Tensor x = upload(std::vector<double>(5 * 35, 1.0), {5, 35}, dtype);
      const Tensor w = upload(std::vector<double>(35, tap), {35, 1}, DType::kF32);
      const auto want = std::vector<double>(5 * 35, even);
      EXPECT_EQ(download(ops::conv1d_depthwise_causal(encoder(), x, w).y), want);
      EXPECT_EQ(download(ops::conv1d_depthwise_causal_backward(encoder(), x, w, x).dx), want);
    }
  }
}

TEST_P(Conv1dDepthwiseCausal, NanOfAnyPayloadStaysNan) {
  const Tensor w = encoder().empty({4, 1}, DType::kF32);
  const float taps[] = {std::bit_cast<float>(0x7fffffffU), std::bit_cast<float>(0xffffffffU),
                        std::bit_cast<float>(0x7f800001U), 1};
  encoder().upload(taps, sizeof taps, w);
  for (const DType dtype : kTypes) {
    const Tensor x = upload(std::vector<double>(8, 1.0), {2, 4}, dtype);
    const auto y = download(ops::conv1d_depthwise_causal(encoder(), x, w).y);
    for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(std::isnan(y[i]), i % 4 != 3) << y[i];
  }
}

TEST_P(Conv1dDepthwiseCausal, ASequenceNeverSeesItsNeighbour) {
  const double nan = std::nan("");
  for (const DType dtype : kTypes) {
    std::vector<double> x(12 * 40, 1.0);
    for (std::size_t i = 4 * 40; i < 8 * 40; ++i) x[i] = nan;  // the middle one of three
    const Tensor w = upload(std::vector<double>(160, 1.0), {40, 4}, dtype);
    const Tensor rows = upload(x, {12, 40}, dtype);
    const ops::Conv1dDepthwiseCausalOptions options{.sequence_starts =
                                                        upload({0, 4, 8, 12}, {4}, DType::kI32)};
    const auto y = download(ops::conv1d_depthwise_causal(encoder(), rows, w, options).y);
    const auto dx =
        download(ops::conv1d_depthwise_causal_backward(encoder(), rows, w, rows, options).dx);
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(std::isnan(y[i]), std::isnan(x[i])) << i;
      EXPECT_EQ(std::isnan(dx[i]), std::isnan(x[i])) << i;
    }
  }
}

TEST_P(Conv1dDepthwiseCausal, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const Shape& shape :
       {Shape{300, 512}, Shape{1000, 40}, Shape{70, scaled(8192)}, Shape{scaled(1200), 2047}}) {
    for (const DType dtype : kTypes) {
      for (const bool silu : {false, true}) {
        const std::int64_t n = shape[0] * shape[1];
        const Tensor x = upload(random_values(noise, n, dtype), shape, dtype);
        const Tensor dy = upload(random_values(noise, n, dtype), shape, dtype);
        const Tensor w = upload(random_values(noise, 4 * shape[1], dtype), {shape[1], 4}, dtype);
        expect_repeatable(encoder(), [&] {
          const auto y = ops::conv1d_depthwise_causal(encoder(), x, w, {.silu = silu}).y;
          const auto grad =
              ops::conv1d_depthwise_causal_backward(encoder(), x, w, dy, {.silu = silu});
          return std::vector<Tensor>{y, grad.dx, grad.dw};
        });
      }
    }
  }
}

TEST_P(Conv1dDepthwiseCausal, RandomShapesAndForms) {
  EXPECT_TRUE(rc::check("conv1d_depthwise_causal matches its oracle", [this] {
    const DType dtype =
        *rc::gen::elementOf(std::vector<DType>(std::begin(kTypes), std::end(kTypes)));
    const std::int64_t channels = *rc::gen::inRange(1, 90);
    Form form{.silu = *rc::gen::arbitrary<bool>(), .state = *rc::gen::arbitrary<bool>()};
    form.f32_taps = *rc::gen::arbitrary<bool>();
    form.strided = *rc::gen::arbitrary<bool>();
    Shape shape{*rc::gen::inRange(0, 40), channels};
    if (*rc::gen::arbitrary<bool>()) {
      shape = {*rc::gen::inRange(0, 4), *rc::gen::inRange(0, 20), channels};
    } else if (*rc::gen::arbitrary<bool>()) {
      form.starts = {0};
      const int sequences = *rc::gen::inRange(1, 6);
      for (int s = 0; s < sequences; ++s)
        form.starts.push_back(form.starts.back() + *rc::gen::inRange(0, 12));
      shape[0] = form.starts.back();
      if (*rc::gen::arbitrary<bool>()) form.start_type = DType::kI64;
    }
    check(shape, *rc::gen::inRange(1, 17), dtype, form);
    RC_ASSERT(!HasFailure());
  }));
}

MT_ON_EVERY_BACKEND(Conv1dDepthwiseCausal);

}  // namespace
}  // namespace mlxtape::test
