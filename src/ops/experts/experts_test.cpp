#include "mlxtape/ops/experts.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "mlxtape/ops/moe_route.h"
#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::ExpertRoute;
using ops::ExpertWeights;

struct Case {
  std::int64_t tokens, chosen, experts, width, inner;
  enum class Choice { kRandom, kOneTakesAll, kSomePastTheEnd } choice = Choice::kRandom;
};

enum { kX, kScores, kGate, kUp, kDown, kInputs };

struct Data {
  Arrays in;
  std::vector<double> indices, offsets, dy;
};

struct Results {
  std::vector<double> y;
  Arrays grads;
};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// The formula block of experts.h in double. blur stands for what f32 does to each number that is made, store for
// what the stored type does to g, u and their gradients, and may do to a and to what pairs add to y and dx.
using Blur = std::function<double(double)>;
Results oracle(
    const Case& c, const Data& data, const Blur& blur = [](double v) { return v; },
    const Blur& store = [](double v) { return v; }) {
  Results r;
  r.y.resize(at(c.tokens * c.width));
  for (int i = 0; i < kInputs; ++i) r.grads.emplace_back(data.in[at(i)].size(), 0.0);
  for (std::int64_t pair = 0; pair < c.tokens * c.chosen; ++pair) {
    const std::int64_t t = pair / c.chosen;
    const auto e = static_cast<std::int64_t>(data.indices[at(pair)]);
    if (e >= c.experts) continue;
    const double score = data.in[kScores][at(pair)];
    double dscore = 0;
    std::vector<double> y(at(c.width)), dx(at(c.width));
    for (std::int64_t i = 0; i < c.inner; ++i) {
      const std::int64_t row = (e * c.inner + i) * c.width;
      double g = 0, u = 0, b = 0;
      for (std::int64_t h = 0; h < c.width; ++h) {
        const double x = data.in[kX][at(t * c.width + h)];
        g += blur(data.in[kGate][at(row + h)] * x);
        u += blur(data.in[kUp][at(row + h)] * x);
        b += blur(data.in[kDown][at((e * c.width + h) * c.inner + i)] *
                  data.dy[at(t * c.width + h)]);
      }
      g = store(blur(g));
      u = store(blur(u));
      const double s = 1 / (1 + std::exp(-g)), a = blur(g * s * u);
      dscore += blur(b * a);
      const double stored = store(a), scaled = store(blur(score * a));
      const double du = store(blur(score * b * g * s));
      const double dg = store(blur(score * b * u * s * (1 + g * (1 - s))));
      for (std::int64_t h = 0; h < c.width; ++h) {
        const double x = data.in[kX][at(t * c.width + h)], dy = data.dy[at(t * c.width + h)];
        const std::int64_t down = (e * c.width + h) * c.inner + i;
        y[at(h)] += blur(data.in[kDown][at(down)] * stored);
        dx[at(h)] += blur(data.in[kGate][at(row + h)] * dg) + blur(data.in[kUp][at(row + h)] * du);
        r.grads[kGate][at(row + h)] += blur(dg * x);
        r.grads[kUp][at(row + h)] += blur(du * x);
        r.grads[kDown][at(down)] += blur(dy * scaled);
      }
    }
    for (std::int64_t h = 0; h < c.width; ++h) {
      r.y[at(t * c.width + h)] += blur(score * store(y[at(h)]));
      r.grads[kX][at(t * c.width + h)] += store(dx[at(h)]);
    }
    r.grads[kScores][at(pair)] = dscore;
  }
  return r;
}

Data data_of(const Case& c, DType dtype, std::uint64_t seed) {
  Noise noise(seed);
  const double unit = 2 / std::sqrt(static_cast<double>(std::max<std::int64_t>(c.width, 1)));
  Data data;
  data.in = {random_values(noise, c.tokens * c.width, dtype),
             random_values(noise, c.tokens * c.chosen, dtype),
             random_values(noise, c.experts * c.inner * c.width, dtype, unit),
             random_values(noise, c.experts * c.inner * c.width, dtype, unit),
             random_values(noise, c.experts * c.inner * c.width, dtype, unit)};
  data.dy = random_values(noise, c.tokens * c.width, dtype);
  data.offsets.assign(at(c.experts + 1), 0);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    std::vector<std::int64_t> all(at(c.experts));
    std::iota(all.begin(), all.end(), 0);
    for (std::int64_t j = 0; j < c.chosen; ++j) {
      std::int64_t e = c.choice == Case::Choice::kOneTakesAll ? c.experts / 2 : all[at(j)];
      if (c.choice != Case::Choice::kOneTakesAll && j < c.experts) {
        const std::int64_t other = j + noise.below(c.experts - j);
        std::swap(all[at(j)], all[at(other)]);
        e = all[at(j)];
      }
      if (c.choice == Case::Choice::kSomePastTheEnd && noise.next() > 0.5) e = c.experts + j;
      data.indices.push_back(static_cast<double>(e));
      if (e < c.experts) data.offsets[at(e + 1)] += 1;
    }
  }
  std::partial_sum(data.offsets.begin(), data.offsets.end(), data.offsets.begin());
  return data;
}

TEST(ExpertsOracle, GradientMatchesCentralDifference) {
  const Case c{5, 2, 3, 4, 3};
  const Data data = data_of(c, DType::kF64, 2);
  const auto loss = [&](const Arrays& in) {
    Data moved = data;
    moved.in = in;
    const auto y = oracle(c, moved).y;
    return std::inner_product(y.begin(), y.end(), data.dy.begin(), 0.0);
  };
  expect_gradient(loss, data.in, oracle(c, data).grads);
}

TEST(ExpertsCheck, SaysWhatIsWrong) {
  const Backend far = Backend::kMetal;
  const auto meta = [](Shape shape, DType t = DType::kF32, Backend b = Backend::kCpu) {
    return Tensor::meta(std::move(shape), t, b);
  };
  const auto u32 = [&](Shape shape) {
    return meta(std::move(shape), DType::kU32);
  };
  const auto x = meta({9, 16});
  const ExpertRoute route{u32({9, 2}), meta({9, 2}), u32({5})};
  const ExpertWeights weights{meta({4, 8, 16}), meta({4, 8, 16}), meta({4, 16, 8})};
  const auto check = ops::experts_check;
  const auto routed = [&](Tensor ExpertRoute::* part, const Tensor& t) {
    ExpertRoute r = route;
    r.*part = t;
    return check(x, r, weights);
  };
  const auto with = [&](Tensor ExpertWeights::* part, const Tensor& t) {
    ExpertWeights w = weights;
    w.*part = t;
    return check(x, route, w);
  };
  const auto hidden = meta({18, 2, 8}), order = u32({18});
  const auto bwd = [&](const Tensor& h, const Tensor& o, const Tensor& dy) {
    return ops::experts_backward_check(x, route, weights, {{}, h, o}, dy);
  };
  using Route = ExpertRoute;
  using Weights = ExpertWeights;
  const std::int64_t many = std::int64_t{1} << 31U;
  expect_refused({
      {"double", check(meta({9, 16}, DType::kF64), route, weights), Errc::kDType,
       "x must be f32, f16 or bf16, got f64"},
      {"x of rank 3", check(meta({1, 9, 16}), route, weights), Errc::kShape,
       "x must be [T, H], got [1, 9, 16]"},
      {"gate of rank 2", with(&Weights::gate, meta({8, 16})), Errc::kShape, "got [8, 16]"},
      {"gate turned around", with(&Weights::gate, meta({4, 16, 8})), Errc::kShape,
       "gate must be [E, I, H] with H = 16 and E from 1 to 1024, got [4, 16, 8]"},
      {"no expert", with(&Weights::gate, meta({0, 8, 16})), Errc::kShape, "got [0, 8, 16]"},
      {"1025 experts", with(&Weights::gate, meta({1025, 8, 16})), Errc::kShape,
       "got [1025, 8, 16]"},
      {"indices of rank 1", routed(&Route::indices, u32({9})), Errc::kShape, "got [9]"},
      {"indices of other tokens", routed(&Route::indices, u32({8, 2})), Errc::kShape,
       "indices must be [T, k] with T = 9 and k from 1 to 64, got [8, 2]"},
      {"none chosen", routed(&Route::indices, u32({9, 0})), Errc::kShape, "got [9, 0]"},
      {"65 chosen", routed(&Route::indices, u32({9, 65})), Errc::kShape, "got [9, 65]"},
      {"too many pairs",
       check(meta({many, 16}), {u32({many, 2}), meta({many, 2}), u32({5})}, weights), Errc::kShape,
       "T·k must be below 2^32, got 2147483648·2"},
      {"type of gate", with(&Weights::gate, meta({4, 8, 16}, DType::kF16)), Errc::kDType,
       "gate must be f32, got f16"},
      {"gate elsewhere", with(&Weights::gate, meta({4, 8, 16}, DType::kF32, far)), Errc::kDevice,
       "gate must be where x is (cpu), got metal"},
      {"up", with(&Weights::up, meta({4, 16, 8})), Errc::kShape, "up must be [4, 8, 16]"},
      {"type of up", with(&Weights::up, meta({4, 8, 16}, DType::kBF16)), Errc::kDType,
       "up must be"},
      {"down like up", with(&Weights::down, meta({4, 8, 16})), Errc::kShape,
       "down must be [4, 16, 8], got [4, 8, 16]"},
      {"type of down", with(&Weights::down, meta({4, 16, 8}, DType::kBF16)), Errc::kDType,
       "down must be f32, got bf16"},
      {"signed indices", routed(&Route::indices, meta({9, 2}, DType::kI32)), Errc::kDType,
       "indices must be u32, got i32"},
      {"scores", routed(&Route::scores, meta({9, 3})), Errc::kShape,
       "scores must be [9, 2], got [9, 3]"},
      {"type of scores", routed(&Route::scores, meta({9, 2}, DType::kF16)), Errc::kDType,
       "scores must be f32, got f16"},
      {"an offset too few", routed(&Route::offsets, u32({4})), Errc::kShape,
       "offsets must be [5], got [4]"},
      {"long offsets", routed(&Route::offsets, meta({5}, DType::kI64)), Errc::kDType,
       "offsets must be u32, got i64"},
      {"backward refuses like forward",
       ops::experts_backward_check(meta({16}), route, weights, {{}, hidden, order}, x),
       Errc::kShape, "x must be [T, H]"},
      {"hidden", bwd(meta({18, 8, 2}), order, x), Errc::kShape,
       "hidden must be [18, 2, 8], got [18, 8, 2]"},
      {"type of hidden", bwd(meta({18, 2, 8}, DType::kF16), order, x), Errc::kDType,
       "hidden must be f32, got f16"},
      {"order", bwd(hidden, u32({9, 2}), x), Errc::kShape, "order must be [18], got [9, 2]"},
      {"type of order", bwd(hidden, meta({18}, DType::kI32), x), Errc::kDType, "order must be u32"},
      {"dy", bwd(hidden, order, meta({9, 8})), Errc::kShape, "dy must be [9, 16], got [9, 8]"},
      {"type of dy", bwd(hidden, order, meta({9, 16}, DType::kF16)), Errc::kDType,
       "dy must be f32, got f16"},
  });
  EXPECT_FALSE(check(x, route, weights));
  EXPECT_FALSE(check(meta({0, 16}), {u32({0, 2}), meta({0, 2}), u32({5})}, weights));
  EXPECT_FALSE(bwd(hidden, order, x));
}

class Experts : public OnDevice {
 protected:
  void check(const Case& c, DType dtype, bool strided = false) {
    const Data data = data_of(c, dtype, static_cast<std::uint64_t>(c.tokens + c.width));
    const Results exact = oracle(c, data);
    std::vector<Results> tries;
    Noise noise(23);
    for (int i = 0; i < 3; ++i) {
      tries.push_back(oracle(
          c, data, [&](double v) { return v * (1 + noise.next() * kBlur); },
          [&](double v) { return round_to(dtype, v * (1 + noise.next() * 0x1p-20)); }));
    }
    const auto up = [&](int which, const Shape& shape) {
      const auto& v = data.in[at(which)];
      return strided ? upload_strided(v, shape, dtype) : upload(v, shape, dtype);
    };
    const Shape shapes[] = {{c.tokens, c.width},
                            {c.tokens, c.chosen},
                            {c.experts, c.inner, c.width},
                            {c.experts, c.inner, c.width},
                            {c.experts, c.width, c.inner}};
    Tape tape(encoder());
    Tensor in[kInputs];
    for (int i = 0; i < kInputs; ++i) in[i] = tape.watch(up(i, shapes[i]));
    const ExpertRoute route{upload(data.indices, shapes[kScores], DType::kU32), in[kScores],
                            upload(data.offsets, {c.experts + 1}, DType::kU32)};
    const Tensor y = ops::experts(tape, in[kX], route, {in[kGate], in[kUp], in[kDown]});
    const std::string label = " T " + std::to_string(c.tokens) + " k " + std::to_string(c.chosen) +
                              " E " + std::to_string(c.experts) + " H " + std::to_string(c.width) +
                              " I " + std::to_string(c.inner) + " " + name_of(dtype);
    const auto compare = [&](const std::string& what, const Tensor& got,
                             const std::vector<double>& want, const auto& part, std::int64_t row) {
      std::vector<std::vector<double>> parts;
      for (const Results& r : tries) parts.push_back(part(r));
      const Refs refs = blurred(want, parts, std::max<std::int64_t>(row, 1), dtype);
      // In 16 bits what is rounded on the way weighs as much as the last rounding.
      if (want.size() > 8 && dtype == DType::kF32) {
        expect_close(what + label, download(got), refs, dtype, 0);
      } else {
        EXPECT_EQ(count_wrong(download(got), refs, dtype, 0), 0) << what << label;
      }
    };
    compare("y", y, exact.y, [](const Results& r) { return r.y; }, c.width);
    tape.backward(y, upload(data.dy, y.shape(), dtype));
    const char* names[] = {"dx", "dscores", "dgate", "dup", "ddown"};
    const std::int64_t rows[] = {c.width, c.chosen, c.width, c.width, c.inner};
    for (int i = 0; i < kInputs; ++i) {
      compare(
          names[i], tape.grad(in[i]), exact.grads[at(i)],
          [i](const Results& r) { return r.grads[at(i)]; }, rows[i]);
    }
  }
};

TEST_P(Experts, MatchesOracleForEveryShape) {
  check({1, 1, 1, 1, 1}, DType::kF32);
  check({3, 2, 4, 16, 16}, DType::kF32);
  check({70, 1, 1, 33, 17}, DType::kF32);
  check({10 + scaled(30), 4, 7, 100, 65}, DType::kF32);
  check({5, 3, 40, 130, 70}, DType::kF32);  // most experts have nobody
  check({9, 8, 8, 300, 20}, DType::kF32);
  check({20 + scaled(180), 2, 3, 48, 40}, DType::kF32);
  check({6, 64, 64, 16, 8}, DType::kF32);
  check({3, 5, 1024, 8, 4}, DType::kF32);
  check({0, 2, 4, 16, 16}, DType::kF32);
  check({9, 2, 4, 16, 0}, DType::kF32);  // sums of nothing
}

TEST_P(Experts, MatchesOracleForEveryType) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    check({11 + scaled(26), 3, 6, 40, 24}, dtype);
    check({11 + scaled(26), 3, 6, 40, 24}, dtype, true);
    check({7, 2, 3, 40, 24}, dtype);  // few tokens
    check({5, 2, 3, 33, 17}, dtype);
  }
  check({40, 1, 2, 600, 20}, DType::kBF16);  // rows and a depth that fill no unit, in two parts
  check({40, 1, 2, 33, 17}, DType::kBF16);   // no pairs
}

// Multiples of 64, which some devices have other kernels for: more than a tile of pairs, half tiles, parts of tiles.
TEST_P(Experts, MatchesOracleForWideRowsOf16Bits) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    check({60 + scaled(230), 1, 2, 64, 64}, dtype);
    check({5 + scaled(135), 2, 3, 320, 64}, dtype);
    check({8 + scaled(32), 3, 12, 64, 192}, dtype, true);
    check({33 + scaled(117), 1, 3, 64, 128, Case::Choice::kOneTakesAll}, dtype);
    check({10 + scaled(80), 2, 3, 128, 64, Case::Choice::kSomePastTheEnd}, dtype);
  }
}

// Multiples of 8 but not of 64, which have kernels of their own: more than a tile of pairs, parts of tiles and of steps.
TEST_P(Experts, MatchesOracleForRowsOf16BitsInEights) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    check({60 + scaled(270), 1, 2, 72, 40}, dtype);
    check({9, 3, 7, 24 + scaled(176), 40 + scaled(96)}, dtype, true);
    check({33 + scaled(117), 1, 3, 8, 152, Case::Choice::kOneTakesAll}, dtype);
    check({10 + scaled(60), 2, 3, 136, 40, Case::Choice::kSomePastTheEnd}, dtype);
  }
}

TEST_P(Experts, OneTakesAllAndSomeGoNowhere) {
  check({90, 2, 5, 32, 24, Case::Choice::kOneTakesAll}, DType::kF32);
  check({50, 3, 5, 32, 24, Case::Choice::kSomePastTheEnd}, DType::kF32);
}

// By expert, then by pair; behind the last those that go nowhere.
TEST_P(Experts, PairsStandInOrder) {
  for (const auto choice : {Case::Choice::kRandom, Case::Choice::kSomePastTheEnd}) {
    const Case c{150, 3, 5, 8, 4, choice};
    const Data data = data_of(c, DType::kF32, 6);
    const auto up = [&](int i, const Shape& shape) {
      return upload(data.in[at(i)], shape, DType::kF32);
    };
    const auto order =
        download(ops::experts(encoder(), up(kX, {150, 8}),
                              {upload(data.indices, {150, 3}, DType::kU32), up(kScores, {150, 3}),
                               upload(data.offsets, {6}, DType::kU32)},
                              {up(kGate, {5, 4, 8}), up(kUp, {5, 4, 8}), up(kDown, {5, 8, 4})})
                     .order);
    std::vector<double> want(at(450));
    std::iota(want.begin(), want.end(), 0);
    const auto expert = [&](double pair) {
      return std::min(data.indices[static_cast<std::size_t>(pair)], 5.0);
    };
    std::stable_sort(want.begin(), want.end(),
                     [&](double a, double b) { return expert(a) < expert(b); });
    EXPECT_EQ(order, want);
  }
}

// mlx_lm.models.switch_layers.SwitchGLU(H, I, E)(x, indices), then (…·scores[..., None]).sum(-2); mx.grad of (y·dy).sum().
TEST_P(Experts, AsMlx) {
  using Values = std::vector<double>;
  const auto up = [&](const Values& values, Shape shape) {
    return upload(values, std::move(shape), DType::kF32);
  };
  const Tensor x = up({-0.8125, 0.0625, 0.9375, -0.5625, 0.3125, -1.1875}, {3, 2});
  const ExpertRoute route{upload({2, 0, 0, 3, 2, 3}, {3, 2}, DType::kU32),
                          up({0.75, 0.25, 0.5, 0.5, 1, 0.125}, {3, 2}),
                          upload({0, 2, 2, 4, 6}, {5}, DType::kU32)};
  const ExpertWeights weights{
      up({-0.6875, -0.0625, 0.5625, -0.9375, -0.3125, 0.3125, 0.9375, -0.5625, 0.0625, 0.6875,
          -0.8125, -0.1875, 0.4375, -1.0625, -0.4375, 0.1875},
         {4, 2, 2}),
      up({-1.0625, 0.3125, -1.1875, 0.1875, -1.3125, 0.0625, -1.4375, -0.0625, 1.3125, -0.1875,
          1.1875, -0.3125, 1.0625, -0.4375, 0.9375, -0.5625},
         {4, 2, 2}),
      up({-0.4375, -0.0625, 0.3125, 0.6875, -0.5625, -0.1875, 0.1875, 0.5625, -0.6875, -0.3125,
          0.0625, 0.4375, -0.8125, -0.4375, -0.0625, 0.3125},
         {4, 2, 2})};
  const auto close = [&](const char* what, const Tensor& got, const Values& want) {
    expect_close(what, download(got), refs_of(want, 1), DType::kF32, 8);
  };
  const auto r = ops::experts(encoder(), x, route, weights);
  close("y", r.y,
        {0.0649944693, -0.145392492, -0.347401351, -0.353079975, 0.0220539719, -0.0277930796});
  const auto g =
      ops::experts_backward(encoder(), x, route, weights, r,
                            up({-0.4375, -0.0625, 0.3125, 0.6875, -0.5625, -0.1875}, {3, 2}));
  close("dx", g.dx,
        {0.0481307954, -0.0765030682, -0.545119286, 0.512124419, -0.0631449893, -0.045336403});
  close("dscores", g.dscores,
        {-0.0445990115, 0.0564048402, -0.412336558, -0.290274233, -0.0598231852, 0.42103225});
  close("dgate", g.dgate,
        {-0.0326877125, 0.00729967142, -0.243518308, 0.146521434, 0, 0, 0, 0, 0.107143484,
         -0.0469041876, 0.0632066131, -0.0440742224, -0.144798964, 0.0357828215, 0.013363353,
         -0.0153175332});
  close("dup", g.dup,
        {-0.0201610066, 0.00566208828, 0.165536553, -0.0996419787, 0, 0, 0, 0, -0.0283099078,
         0.110198364, -0.0288304724, 0.00389539055, -0.0822095647, -0.0163846463, -0.00814190507,
         0.00834786892});
  close("ddown", g.ddown,
        {0.00527656823, -0.12836954, 0.0815967023, -0.324771821, 0, 0, 0, 0, 0.0867529958,
         0.143954396, 0.0291798525, 0.0217880011, 0.0761531293, -0.0260226075, 0.292879432,
         -0.0758835301});
}

// Chosen by moe_route: the whole path from the router's logits to their gradient.
// What nobody asks for takes neither time nor memory.
TEST_P(Experts, OnlyWantedGradientsAreMade) {
  const Case c{40, 2, 4, 64, 64};
  const Data data = data_of(c, DType::kF32, 3);
  const auto up = [&](int which, const Shape& shape) {
    return upload(data.in[at(which)], shape, DType::kF32);
  };
  const auto walk = [&](bool x_too, bool weights_too) {
    Tape tape(encoder());
    const auto maybe = [&](bool yes, const Tensor& t) {
      return yes ? tape.watch(t) : t;
    };
    const Tensor x = maybe(x_too, up(kX, {40, 64}));
    const Tensor scores = tape.watch(up(kScores, {40, 2}));
    const ExpertWeights weights{maybe(weights_too, up(kGate, {4, 64, 64})),
                                maybe(weights_too, up(kUp, {4, 64, 64})),
                                maybe(weights_too, up(kDown, {4, 64, 64}))};
    const ExpertRoute route{upload(data.indices, {40, 2}, DType::kU32), scores,
                            upload(data.offsets, {5}, DType::kU32)};
    const Tensor y = ops::experts(tape, x, route, weights);
    const Tensor dy = up(kX, {40, 64});
    encoder().commit_and_wait();
    encoder().device().memory().reset_peak();
    const std::size_t before = encoder().device().memory().stats().current;
    tape.backward(y, dy);
    encoder().commit_and_wait();
    const std::size_t peak = encoder().device().memory().stats().peak - before;
    std::vector<std::vector<double>> grads{download(tape.grad(scores))};
    if (x_too) grads.push_back(download(tape.grad(x)));
    return std::pair(peak, grads);
  };
  const auto all = walk(true, true), frozen = walk(true, false), scores = walk(false, false);
  EXPECT_EQ(frozen.second, all.second);
  EXPECT_EQ(scores.second[0], all.second[0]);
  const std::size_t weights = 3 * 4 * 64 * 64 * sizeof(float);
  EXPECT_LE(frozen.first + weights, all.first);
}

TEST_P(Experts, FollowsARouter) {
  Noise noise(9);
  Tape tape(encoder());
  const auto tensor = [&](Shape shape) {
    return tape.watch(
        upload(random_values(noise, *element_count(shape), DType::kF32), shape, DType::kF32));
  };
  const Tensor x = tensor({12, 16}), logits = tensor({12, 6});
  const ExpertWeights weights{tensor({6, 8, 16}), tensor({6, 8, 16}), tensor({6, 16, 8})};
  const ops::MoeRoute route = ops::moe_route(tape, logits, 2);
  const Tensor y = ops::experts(tape, x, {route.indices, route.scores, route.offsets}, weights);
  Case c{12, 2, 6, 16, 8};
  Data data;
  data.in = {download(x), download(route.scores), download(weights.gate), download(weights.up),
             download(weights.down)};
  data.indices = download(route.indices);
  data.dy.assign(12 * 16, 1);
  // Scores are the softmax of the chosen logits.
  const auto dlogits = [&](const Results& r) {
    std::vector<double> d(12 * 6);
    for (std::size_t t = 0; t < 12; ++t) {
      const double *scores = &data.in[kScores][2 * t], *ds = &r.grads[kScores][2 * t];
      const double mean = scores[0] * ds[0] + scores[1] * ds[1];
      for (std::size_t j = 0; j < 2; ++j) {
        d[6 * t + static_cast<std::size_t>(data.indices[2 * t + j])] = scores[j] * (ds[j] - mean);
      }
    }
    return d;
  };
  Arrays ys, ds;
  Noise blur(5);
  for (int i = 0; i < 3; ++i) {
    const Results r = oracle(c, data, [&](double v) { return v * (1 + blur.next() * kBlur); });
    ys.push_back(r.y);
    ds.push_back(dlogits(r));
  }
  const Results want = oracle(c, data);
  expect_close("y", download(y), blurred(want.y, ys, 16, DType::kF32), DType::kF32, 0);
  tape.backward(y, upload(data.dy, {12, 16}, DType::kF32));
  expect_close("dlogits", download(tape.grad(logits)), blurred(dlogits(want), ds, 6, DType::kF32),
               DType::kF32, 0);
}

// Views may begin at any element: what is read by words has to bear it.
// Widths of each set of kernels.
TEST_P(Experts, SameBitsAtAnyAddress) {
  const DType dtype = DType::kBF16;
  for (const std::int64_t n : {64, 72, 60}) {
    const Data data = data_of({40, 1, 2, n, n}, dtype, 8);
    const auto run = [&](std::int64_t offset) {
      const auto up = [&](const std::vector<double>& values, const Shape& shape) {
        return upload(values, shape, dtype, offset);
      };
      const Tensor x = up(data.in[kX], {40, n}), dy = up(data.dy, {40, n});
      const ExpertRoute route{upload(data.indices, {40, 1}, DType::kU32),
                              up(data.in[kScores], {40, 1}),
                              upload(data.offsets, {3}, DType::kU32)};
      const ExpertWeights weights{up(data.in[kGate], {2, n, n}), up(data.in[kUp], {2, n, n}),
                                  up(data.in[kDown], {2, n, n})};
      const auto r = ops::experts(encoder(), x, route, weights);
      const auto g = ops::experts_backward(encoder(), x, route, weights, r, dy);
      return Arrays{download(r.y),     download(g.dx),  download(g.dscores),
                    download(g.dgate), download(g.dup), download(g.ddown)};
    };
    const Arrays want = run(0);
    for (const std::int64_t offset : {1, 3}) EXPECT_EQ(run(offset), want) << n << " + " << offset;
  }
}

TEST_P(Experts, SameBitsOnEveryRun) {
  const std::int64_t tokens = scaled(350);
  struct Size {
    DType dtype;
    std::int64_t width, inner;
  };
  for (const auto& [dtype, width, inner] :
       {Size{DType::kF32, 48, 40}, Size{DType::kBF16, 192, 64}, Size{DType::kF16, 200, 72}}) {
    const Case c{tokens, 3, 6, width, inner};
    const Data data = data_of(c, dtype, 4);
    const auto up = [&](int i, const Shape& shape) {
      return upload(data.in[at(i)], shape, dtype);
    };
    const Tensor x = up(kX, {tokens, width});
    const ExpertRoute route{upload(data.indices, {tokens, 3}, DType::kU32),
                            up(kScores, {tokens, 3}), upload(data.offsets, {7}, DType::kU32)};
    const ExpertWeights weights{up(kGate, {6, inner, width}), up(kUp, {6, inner, width}),
                                up(kDown, {6, width, inner})};
    const Tensor dy = upload(data.dy, {tokens, width}, dtype);
    expect_repeatable(encoder(), [&] {
      const auto r = ops::experts(encoder(), x, route, weights);
      const auto g = ops::experts_backward(encoder(), x, route, weights, r, dy);
      return std::vector<Tensor>{r.y, g.dx, g.dscores, g.dgate, g.dup, g.ddown};
    });
  }
}

TEST_P(Experts, NaNStaysWithItsToken) {
  const Case c{6, 2, 3, 64, 16};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Data data = data_of(c, dtype, 3);
    data.in[kX][2 * 64 + 5] = NAN;
    const auto up = [&](int i, const Shape& shape) {
      return upload(data.in[at(i)], shape, dtype);
    };
    const Tensor x = up(kX, {6, 64});
    const ExpertRoute route{upload(data.indices, {6, 2}, DType::kU32), up(kScores, {6, 2}),
                            upload(data.offsets, {4}, DType::kU32)};
    const ExpertWeights weights{up(kGate, {3, 16, 64}), up(kUp, {3, 16, 64}),
                                up(kDown, {3, 64, 16})};
    const auto r = ops::experts(encoder(), x, route, weights);
    EXPECT_EQ(nans_of(download(r.y)), places(128, 64));
    const auto g =
        ops::experts_backward(encoder(), x, route, weights, r, upload(data.dy, {6, 64}, dtype));
    EXPECT_EQ(nans_of(download(g.dx)), places(128, 64));
    EXPECT_EQ(nans_of(download(g.dscores)), places(4, 2));
  }
}

MT_ON_EVERY_BACKEND(Experts);

}  // namespace
}  // namespace mlxtape::test
