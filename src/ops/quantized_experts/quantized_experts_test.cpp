#include "mlxtape/ops/quantized_experts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::ExpertRoute;
using ops::QuantizedExpertWeights;
using ops::QuantizedWeight;
using Values = std::vector<double>;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Form {
  int bits = 4;
  std::int64_t group = 32;
};

struct Case {
  std::int64_t tokens, chosen, experts, width, inner;
  Form forms[3] = {{}, {}, {}};  // gate, up, down
  bool past_the_end = false;     // some indices are

  std::int64_t weights() const { return experts * width * inner; }
};

enum { kX, kScores, kParams, kInputs = kParams + 6 };  // then scales and biases of gate, up, down

struct Data {
  Arrays in;
  Values codes[3], indices, offsets, dy;
};

struct Results {
  Values y;
  Arrays grads;
};

// The formulas of experts.h and quantize.h in double. blur stands for what f32 does to each number, store for
// what the stored type does to w, dw, g, u, their gradients, and may do to a and to what pairs add to y and dx.
using Blur = std::function<double(double)>;
Results oracle(
    const Case& c, const Data& data, const Blur& blur = [](double v) { return v; },
    const Blur& store = [](double v) { return v; }) {
  Arrays w, dw;
  for (int i = 0; i < 3; ++i) {
    w.emplace_back();
    for (std::int64_t j = 0; j < c.weights(); ++j) {
      const std::size_t g = at(j / c.forms[i].group);
      w.back().push_back(store(blur(data.in[at(kParams + 2 * i)][g] * data.codes[i][at(j)] +
                                    data.in[at(kParams + 2 * i + 1)][g])));
    }
    dw.emplace_back(at(c.weights()), 0.0);
  }
  Results r;
  r.y.resize(at(c.tokens * c.width));
  for (const Values& in : data.in) r.grads.emplace_back(in.size(), 0.0);
  for (std::int64_t pair = 0; pair < c.tokens * c.chosen; ++pair) {
    const std::int64_t t = pair / c.chosen;
    const auto e = static_cast<std::int64_t>(data.indices[at(pair)]);
    if (e >= c.experts) continue;
    const double score = data.in[kScores][at(pair)];
    Values y(at(c.width)), dx(at(c.width));
    for (std::int64_t i = 0; i < c.inner; ++i) {
      const std::int64_t row = (e * c.inner + i) * c.width;
      const auto down = [&](std::int64_t h) {
        return at((e * c.width + h) * c.inner + i);
      };
      double g = 0, u = 0, b = 0;
      for (std::int64_t h = 0; h < c.width; ++h) {
        const double x = data.in[kX][at(t * c.width + h)];
        g += blur(w[0][at(row + h)] * x);
        u += blur(w[1][at(row + h)] * x);
        b += blur(w[2][down(h)] * data.dy[at(t * c.width + h)]);
      }
      g = store(blur(g));
      u = store(blur(u));
      const double s = 1 / (1 + std::exp(-g)), a = blur(g * s * u);
      r.grads[kScores][at(pair)] += blur(b * a);
      const double stored = store(a), scaled = store(blur(score * a));
      const double du = store(blur(score * b * g * s));
      const double dg = store(blur(score * b * u * s * (1 + g * (1 - s))));
      for (std::int64_t h = 0; h < c.width; ++h) {
        const double x = data.in[kX][at(t * c.width + h)];
        y[at(h)] += blur(w[2][down(h)] * stored);
        dx[at(h)] += blur(w[0][at(row + h)] * dg) + blur(w[1][at(row + h)] * du);
        dw[0][at(row + h)] += blur(dg * x);
        dw[1][at(row + h)] += blur(du * x);
        dw[2][down(h)] += blur(data.dy[at(t * c.width + h)] * scaled);
      }
    }
    for (std::int64_t h = 0; h < c.width; ++h) {
      r.y[at(t * c.width + h)] += blur(score * store(y[at(h)]));
      r.grads[kX][at(t * c.width + h)] += store(dx[at(h)]);
    }
  }
  for (int i = 0; i < 3; ++i) {
    for (std::int64_t j = 0; j < c.weights(); ++j) {
      const std::size_t g = at(j / c.forms[i].group);
      const double d = store(blur(dw[at(i)][at(j)]));
      r.grads[at(kParams + 2 * i)][g] += blur(d * data.codes[i][at(j)]);
      r.grads[at(kParams + 2 * i + 1)][g] += blur(d);
    }
  }
  return r;
}

Data data_of(const Case& c, DType dtype, DType params, std::uint64_t seed) {
  Noise noise(seed);
  Data data;
  data.in = {random_values(noise, c.tokens * c.width, dtype),
             random_values(noise, c.tokens * c.chosen, dtype)};
  for (int i = 0; i < 3; ++i) {
    const Form& form = c.forms[i];
    const std::int64_t most = std::int64_t{1} << form.bits, groups = c.weights() / form.group;
    const double unit = 4 / std::sqrt(static_cast<double>(c.width)) / static_cast<double>(most);
    data.in.push_back(random_values(noise, groups, params, unit));
    data.in.push_back(random_values(noise, groups, params, unit * static_cast<double>(most) / 2));
    for (std::int64_t j = 0; j < c.weights(); ++j) {
      data.codes[i].push_back(static_cast<double>(noise.below(most)));
    }
  }
  data.dy = random_values(noise, c.tokens * c.width, dtype);
  data.offsets.assign(at(c.experts + 1), 0);
  for (std::int64_t pair = 0; pair < c.tokens * c.chosen; ++pair) {
    const std::int64_t e = noise.below(c.experts + (c.past_the_end ? c.experts / 2 : 0));
    data.indices.push_back(static_cast<double>(e));
    if (e < c.experts) data.offsets[at(e + 1)] += 1;
  }
  std::partial_sum(data.offsets.begin(), data.offsets.end(), data.offsets.begin());
  return data;
}

Values quantized(const Values& codes, int bits) {
  Values words(codes.size() * at(bits) / 32);
  for (std::size_t i = 0; i < codes.size() * at(bits); ++i) {
    const auto code = static_cast<unsigned>(codes[i / at(bits)]);
    words[i / 32] += std::ldexp((code >> (i % at(bits))) & 1U, static_cast<int>(i % 32));
  }
  return words;
}

TEST(QuantizedExpertsOracle, GradientMatchesCentralDifference) {
  const Case c{3, 2, 2, 32, 32, {{2}, {3}, {2}}};
  const Data data = data_of(c, DType::kF64, DType::kF64, 2);
  const auto loss = [&](const Arrays& in) {
    Data moved = data;
    moved.in = in;
    const Values y = oracle(c, moved).y;
    return std::inner_product(y.begin(), y.end(), data.dy.begin(), 0.0);
  };
  expect_gradient(loss, data.in, oracle(c, data).grads);
}

class QuantizedExperts : public OnDevice {
 protected:
  // What the op is given: inputs is parallel to data.in.
  struct Given {
    std::vector<Tensor> inputs;
    ExpertRoute route;
    QuantizedExpertWeights weights;
  };
  Given give(const Case& c, const Data& data, DType dtype, DType params, Tape* tape = nullptr,
             bool strided = false) {
    Given given;
    const auto up = [&](const Values& v, const Shape& shape, DType type) {
      return strided ? upload_strided(v, shape, type) : upload(v, shape, type);
    };
    const auto input = [&](const Shape& shape, DType type) {
      const Tensor t = up(data.in[given.inputs.size()], shape, type);
      given.inputs.push_back(tape == nullptr ? t : tape->watch(t));
      return given.inputs.back();
    };
    input({c.tokens, c.width}, dtype);
    given.route = {up(data.indices, {c.tokens, c.chosen}, DType::kU32),
                   input({c.tokens, c.chosen}, dtype),
                   up(data.offsets, {c.experts + 1}, DType::kU32)};
    QuantizedWeight* const weights[] = {&given.weights.gate, &given.weights.up,
                                        &given.weights.down};
    for (int i = 0; i < 3; ++i) {
      const auto [bits, group] = c.forms[i];
      const std::int64_t rows = i == 2 ? c.width : c.inner, length = i == 2 ? c.inner : c.width;
      const Tensor s = input({c.experts, rows, length / group}, params);
      const Tensor b = input({c.experts, rows, length / group}, params);
      *weights[i] = {
          up(quantized(data.codes[i], bits), {c.experts, rows, length * bits / 32}, DType::kU32), s,
          b, bits, static_cast<int>(group)};
    }
    return given;
  }

  void compare(const std::string& what, const Tensor& got, const Values& want, const Arrays& tries,
               std::int64_t row, DType dtype, bool all_f32) {
    const Refs refs = blurred(want, tries, std::max<std::int64_t>(row, 1), dtype);
    // In 16 bits what is rounded on the way weighs as much as the last rounding.
    if (want.size() > 8 && all_f32) {
      expect_close(what, download(got), refs, dtype, 0);
    } else {
      EXPECT_EQ(count_wrong(download(got), refs, dtype, 0), 0) << what;
    }
  }

  void check(const Case& c, DType dtype, bool wide = false, bool strided = false) {
    const DType params = wide ? DType::kF32 : dtype;
    const bool f32 = dtype == DType::kF32;
    const Data data = data_of(c, dtype, params, static_cast<std::uint64_t>(c.tokens + c.width));
    const std::string label = " T " + std::to_string(c.tokens) + " k " + std::to_string(c.chosen) +
                              " E " + std::to_string(c.experts) + " H " + std::to_string(c.width) +
                              " I " + std::to_string(c.inner) + " " + name_of(dtype);
    const Results exact = oracle(c, data);
    Noise noise(23);
    // Of sums of n terms the last bits stray as √n; kBlur has those of up to 128.
    const auto longest = static_cast<double>(std::max({c.width, c.inner, c.tokens}));
    const double stray = kBlur * std::sqrt(std::max(1.0, longest / 128));
    const Blur blur = [&](double v) {
      return v * (1 + noise.next() * stray);
    };
    const Blur store = [&](double v) {
      return round_to(dtype, v * (1 + noise.next() * 2 * stray));
    };
    Arrays few, ys;
    std::vector<Arrays> grads(at(kInputs));
    // Off a tape many pairs may take the way of a tape; on a CPU in bf16 alone, and those of one expert.
    std::int64_t most = 0;
    for (std::size_t e = 0; e + 1 < data.offsets.size(); ++e) {
      most = std::max(most, static_cast<std::int64_t>(data.offsets[e + 1] - data.offsets[e]));
    }
    const bool exactly = GetParam() == Backend::kCpu ? dtype != DType::kBF16 || most <= 8
                                                     : c.tokens * c.chosen <= 8 * c.experts;
    for (int i = 0; i < 3; ++i) {
      const Results r = oracle(c, data, blur, store);
      ys.push_back(r.y);
      for (std::size_t g = 0; g < grads.size(); ++g) grads[g].push_back(r.grads[g]);
      few.push_back(exactly && !f32 ? oracle(c, data, blur).y : r.y);
    }
    const Given plain = give(c, data, dtype, params, nullptr, strided);
    compare("y" + label,
            ops::quantized_experts(encoder(), plain.inputs[kX], plain.route, plain.weights),
            exact.y, few, c.width, dtype, f32);
    Tape tape(encoder());
    const Given given = give(c, data, dtype, params, &tape, strided);
    const Tensor y = ops::quantized_experts(tape, given.inputs[kX], given.route, given.weights);
    compare("y on a tape" + label, y, exact.y, ys, c.width, dtype, f32);
    tape.backward(y, upload(data.dy, y.shape(), dtype));
    for (int i = 0; i < kInputs; ++i) {
      compare("gradient " + std::to_string(i) + label, tape.grad(given.inputs[at(i)]),
              exact.grads[at(i)], grads[at(i)], i == kX ? c.width : 1, i < kParams ? dtype : params,
              f32);
    }
  }
};

TEST_P(QuantizedExperts, MatchesOracle) {
  check({1, 2, 4, 64, 32}, DType::kF32);
  check({5, 3, 4, 96, 64}, DType::kF32);   // a strip of 64 and half of one
  check({20, 2, 3, 32, 96}, DType::kF32);  // more than 8 pairs an expert
  check({4, 3, 5, 64, 32, {}, true}, DType::kF32);
  check({0, 2, 4, 32, 32}, DType::kF32);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    check({6, 2, 4, 64, 64, {{8, 64}, {3, 32}, {5, 64}}}, dtype);
    check({16, 2, 3, 64, 32, {{2, 32}, {4, 64}, {6, 32}}, true}, dtype, true);
    check({4, 2, 3, 64, 32, {{3, 32}, {8, 64}, {5, 32}}}, dtype, true);
  }
  check({6, 2, 4, 64, 64, {{6, 32}, {4, 64}, {8, 32}}}, DType::kF32, false, true);
}

// More pairs than meet codes at once: from dequantised strips, which are 64 rows or columns and parts of them, in groups that
// are shorter, as long and longer; steps of the depth and parts of them; more columns than one block has.
TEST_P(QuantizedExperts, MatchesOracleForManyPairs) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    check({17 + scaled(33), 1, 2, 96, 128, {{4, 32}, {8, 32}, {4, 128}}}, dtype);
    check({17 + scaled(23), 1, 2, 64, 96, {{3, 64}, {2, 32}, {5, 32}}}, dtype, true);
  }
  const std::int64_t tokens = 17 + scaled(27);
  check({tokens, 1, 2, 640, 32, {{4, 128}, {6, 64}, {8, 32}}}, DType::kBF16, true);
  check({tokens, 1, 2, 640, 32, {{4, 64}, {5, 128}, {3, 32}}}, DType::kF32);
  check({17 + scaled(23), 1, 2, 32, 320, {{8, 32}, {4, 32}, {4, 64}}}, DType::kBF16);
  check({17 + scaled(23), 1, 2, 32, 320, {{2, 32}, {4, 32}, {6, 64}}}, DType::kF32);
  check({9 + scaled(141), 1, 1, 32, 32}, DType::kF32);
  check({13 + scaled(17), 2, 3, 128, 128, {{4, 128}, {8, 128}, {3, 128}}, true}, DType::kBF16);
}

// Most experts have nobody, and gradients of 0.
TEST_P(QuantizedExperts, ExpertsWithoutPairs) {
  check({2, 2, 12, 64, 64, {{4, 64}, {8, 32}, {6, 64}}}, DType::kF32);
  check({25, 1, 2, 32, 32, {}, true}, DType::kBF16);
}

// Nothing of the size of the weights is stored, forward or backward.
TEST_P(QuantizedExperts, StaysPackedOnATape) {
  if (GetParam() != Backend::kCpu) GTEST_SKIP() << "all weights are dequantised";
  const Case c{16, 2, 48, 128, 128, {{4, 64}, {4, 64}, {4, 64}}};
  const Data data = data_of(c, DType::kF32, DType::kF32, 8);
  Tape tape(encoder());
  const Given given = give(c, data, DType::kF32, DType::kF32, &tape);
  const Tensor dy = upload(data.dy, {16, 128}, DType::kF32);
  encoder().commit_and_wait();
  encoder().device().memory().reset_peak();
  const std::size_t before = encoder().device().memory().stats().current;
  tape.backward(ops::quantized_experts(tape, given.inputs[kX], given.route, given.weights), dy);
  encoder().commit_and_wait();
  const std::size_t peak = encoder().device().memory().stats().peak - before;
  EXPECT_LT(peak, 3 * at(c.weights()) * sizeof(float) / 4);
}

// Nothing that is wanted by nobody; frozen weights give x and scores alone.
TEST_P(QuantizedExperts, FrozenWeights) {
  const Case c{6, 2, 4, 64, 64};
  const Data data = data_of(c, DType::kF32, DType::kF32, 3);
  Tape all(encoder()), some(encoder());
  const Given watched = give(c, data, DType::kF32, DType::kF32, &all);
  const Given frozen = give(c, data, DType::kF32, DType::kF32);
  const Tensor dy = upload(data.dy, {6, 64}, DType::kF32);
  const Tensor x = some.watch(frozen.inputs[kX]);
  all.backward(ops::quantized_experts(all, watched.inputs[kX], watched.route, watched.weights), dy);
  some.backward(ops::quantized_experts(some, x, frozen.route, frozen.weights), dy);
  EXPECT_EQ(bits_of(encoder(), some.grad(x)), bits_of(encoder(), all.grad(watched.inputs[kX])));
}

TEST_P(QuantizedExperts, SameBitsOnEveryRun) {
  const std::int64_t tokens = scaled(60);
  const Case c{tokens, 3, 5, 128, 96, {{4, 64}, {8, 32}, {3, 32}}};
  const Data data = data_of(c, DType::kBF16, DType::kBF16, 4);
  const Given given = give(c, data, DType::kBF16, DType::kBF16);
  const Tensor dy = upload(data.dy, {tokens, 128}, DType::kBF16);
  expect_repeatable(encoder(), [&] {
    Tape tape(encoder());
    const Given watched = give(c, data, DType::kBF16, DType::kBF16, &tape);
    const Tensor y =
        ops::quantized_experts(tape, watched.inputs[kX], watched.route, watched.weights);
    tape.backward(y, dy);
    std::vector<Tensor> all{
        ops::quantized_experts(encoder(), given.inputs[kX], given.route, given.weights), y};
    for (const Tensor& input : watched.inputs) all.push_back(tape.grad(input));
    return all;
  });
}

TEST_P(QuantizedExperts, NaNStaysWithItsToken) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t tokens : {4, 40}) {
      const Case c{tokens, 2, 3, 64, 32};
      Data data = data_of(c, dtype, dtype, 6);
      data.in[kX][2 * 64 + 5] = NAN;
      Tape tape(encoder());
      const Given given = give(c, data, dtype, dtype, &tape);
      const Tensor y = ops::quantized_experts(tape, given.inputs[kX], given.route, given.weights);
      EXPECT_EQ(nans_of(download(y)), places(128, 64));
      tape.backward(y, upload(data.dy, {tokens, 64}, dtype));
      EXPECT_EQ(nans_of(download(tape.grad(given.inputs[kX]))), places(128, 64));
      EXPECT_EQ(nans_of(download(tape.grad(given.inputs[kScores]))), places(4, 2));
      const Given plain = give(c, data, dtype, dtype);
      EXPECT_EQ(nans_of(download(ops::quantized_experts(encoder(), plain.inputs[kX], plain.route,
                                                        plain.weights))),
                places(128, 64));
    }
  }
}

TEST(QuantizedExpertsCheck, SaysWhatIsWrong) {
  const auto meta = [](const Shape& shape, DType t = DType::kF32) {
    return Tensor::meta(shape, t);
  };
  const auto u32 = [&](const Shape& shape) {
    return meta(shape, DType::kU32);
  };
  const Tensor x = meta({9, 64});
  const ExpertRoute route{u32({9, 2}), meta({9, 2}), u32({5})};
  const QuantizedWeight in{u32({4, 128, 8}), meta({4, 128, 1}), meta({4, 128, 1})};
  const QuantizedWeight out{u32({4, 64, 16}), meta({4, 64, 2}), meta({4, 64, 2})};
  const QuantizedExpertWeights weights{in, in, out};
  const auto with = [&](auto set) {
    QuantizedExpertWeights w = weights;
    set(w);
    return ops::quantized_experts_check(x, route, w);
  };
  using W = QuantizedExpertWeights;
  expect_refused({
      {"gate of rank 2", with([&](W& w) { w.gate.codes = u32({128, 8}); }), Errc::kShape,
       "quantized_experts: gate codes must be [E, I, H·bits/32], got [128, 8]"},
      {"x of rank 1", ops::quantized_experts_check(meta({64}), route, weights), Errc::kShape,
       "x must be [T, H], got [64]"},
      {"offsets", ops::quantized_experts_check(x, {route.indices, route.scores, u32({4})}, weights),
       Errc::kShape, "offsets must be [5], got [4]"},
      {"bits of gate", with([](W& w) { w.gate.format.bits = 7; }), Errc::kArgument,
       "quantized_experts: gate bits must be"},
      {"codes of up", with([&](W& w) { w.up.codes = u32({4, 128, 4}); }), Errc::kShape,
       "up codes must be [4, 128, 8], got [4, 128, 4]"},
      {"scales of down", with([&](W& w) { w.down.scales = meta({4, 64, 1}); }), Errc::kShape,
       "down scales must be [4, 64, 2], got [4, 64, 1]"},
      {"group of down", with([](W& w) { w.down.format.group_size = 100; }), Errc::kArgument,
       "down group_size must be 32, 64 or 128, got 100"},
  });
  EXPECT_FALSE(ops::quantized_experts_check(x, route, weights));
}

MT_ON_EVERY_BACKEND(QuantizedExperts);

}  // namespace
}  // namespace mlxtape::test
