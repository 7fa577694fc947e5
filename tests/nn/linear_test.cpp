#include "mlxtape/nn/linear.h"

#include <bit>
#include <cmath>
#include <numbers>

#include "block.h"
#include "mlxtape/ops/dropout.h"
#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/quantize.h"
#include "mlxtape/ops/random.h"

namespace mlxtape::test {
namespace {

// m [from, to] transposed.
Values turned(const Values& m, std::int64_t from, std::int64_t to) {
  Values result;
  for (std::int64_t j = 0; j < to; ++j) {
    for (std::int64_t i = 0; i < from; ++i)
      result.push_back(m[static_cast<std::size_t>(i * to + j)]);
  }
  return result;
}

// x·wᵀ + bias + scale·(x·a)·b.
Block with_adapter(std::int64_t rows, std::int64_t in, std::int64_t out, std::int64_t rank) {
  constexpr float kScale = 2.5F;
  const double by_in = 1 / std::sqrt(static_cast<double>(in));
  Block block{"linear",
              {{"x", {rows, 1, in}},
               {"w", {out, in}, by_in},
               {"bias", {out}},
               {"a", {in, rank}, by_in},
               {"b", {rank, out}}},
              {{rows, 1, out}},
              {},
              {}};
  block.in_double = [=](const Arrays& v, const Blur& blur) {
    Values y = product(v[0], v[1], rows, in, out, blur);
    const Values seen = product(v[0], turned(v[3], in, rank), rows, in, rank, blur);
    const Values more = product(seen, turned(v[4], rank, out), rows, rank, out, blur);
    for (std::size_t i = 0; i < y.size(); ++i) {
      y[i] = blur(blur(y[i] + v[2][i % static_cast<std::size_t>(out)]) + kScale * more[i]);
    }
    return Arrays{y};
  };
  block.on_tape = [](Tape& tape, const std::vector<Tensor>& t) {
    nn::Weight w = t[1];
    w.adapter = {t[3], t[4], kScale};
    return std::vector<Tensor>{nn::linear(tape, t[0], w, t[2])};
  };
  return block;
}

// A gated network; biases: of gate, up and down, by bits.
Block network(nn::GateActivation activation, unsigned biases) {
  constexpr std::int64_t kRows = 3, kIn = 5, kInner = 4;
  const double by_in = 1 / std::sqrt(static_cast<double>(kIn));
  Block block{"swiglu_network",
              {{"x", {kRows, 1, kIn}, 2},
               {"gate", {kInner, kIn}, by_in},
               {"up", {kInner, kIn}, by_in},
               {"down", {kIn, kInner}, by_in}},
              {{kRows, 1, kIn}},
              {},
              {}};
  const auto place_of = [=](unsigned bias) {
    return static_cast<std::size_t>(4 + std::popcount(biases & (bias - 1)));
  };
  for (const unsigned bias : {1U, 2U, 4U}) {
    if ((biases & bias) != 0) block.inputs.push_back({"bias", {bias == 4 ? kIn : kInner}});
  }
  block.in_double = [=](const Arrays& v, const Blur& blur) {
    const auto linear = [&](const Values& x, std::size_t w, unsigned bias, std::int64_t in,
                            std::int64_t out) {
      Values y = product(x, v[w], kRows, in, out, blur);
      for (std::size_t i = 0; (biases & bias) != 0 && i < y.size(); ++i) {
        y[i] = blur(y[i] + v[place_of(bias)][i % static_cast<std::size_t>(out)]);
      }
      return y;
    };
    const auto open = [&](double z) {
      const double cube = std::sqrt(2 / std::numbers::pi) * (z + 0.044715 * z * z * z);
      switch (activation) {
        case nn::GateActivation::kGelu: return z / 2 * std::erfc(-z / std::numbers::sqrt2);
        case nn::GateActivation::kGeluTanh: return z / 2 * (1 + std::tanh(cube));
        case nn::GateActivation::kSilu: break;
      }
      return z * sigma(z);
    };
    Values h = linear(v[0], 1, 1, kIn, kInner);
    const Values up = linear(v[0], 2, 2, kIn, kInner);
    for (std::size_t i = 0; i < h.size(); ++i) h[i] = blur(blur(open(h[i])) * up[i]);
    return Arrays{linear(h, 3, 4, kInner, kIn)};
  };
  block.on_tape = [=](Tape& tape, const std::vector<Tensor>& t) {
    nn::SwigluWeights w{t[1], t[2], t[3]};
    if ((biases & 1) != 0) w.gate_bias = t[place_of(1)];
    if ((biases & 2) != 0) w.up_bias = t[place_of(2)];
    if ((biases & 4) != 0) w.down_bias = t[place_of(4)];
    return std::vector<Tensor>{nn::swiglu_network(tape, t[0], w, activation)};
  };
  return block;
}

// Three weights of one x: quantised, with a bias and an adapter; plain, with a bias and an adapter of the same scale; plain, with an
// adapter of another scale.
Block several(std::int64_t rows, std::int64_t in, const std::vector<std::int64_t>& outs,
              const std::vector<std::uint32_t>& codes) {
  constexpr std::int64_t kGroup = 32;
  const std::int64_t groups = in / kGroup;
  static constexpr std::array<std::int64_t, 3> kRanks = {2, 3, 1};
  static constexpr std::array<float, 3> kScales = {1.5F, 1.5F, 0.5F};
  const double by_in = 1 / std::sqrt(static_cast<double>(in));
  Block block{"linears",
              {{"x", {rows, in}},
               {"scales", {outs[0], groups}, by_in / 16},
               {"biases", {outs[0], groups}, by_in},
               {"w1", {outs[1], in}, by_in},
               {"bias", {outs[1]}},
               {"w2", {outs[2], in}, by_in}},
              {},
              {},
              {}};
  for (std::size_t i = 0; i < 3; ++i) {
    block.inputs.push_back({"a", {in, kRanks[i]}, by_in});
    block.inputs.push_back({"b", {kRanks[i], outs[i]}});
    block.outputs.push_back({rows, outs[i]});
  }
  block.inputs.push_back({"bias of the first", {outs[0]}});
  block.in_double = [=](const Arrays& v, const Blur& blur) {
    Values w0;
    for (std::int64_t n = 0; n < outs[0]; ++n) {
      for (std::int64_t k = 0; k < in; ++k) {
        const auto group = static_cast<std::size_t>(n * groups + k / kGroup);
        const std::uint32_t word = codes[static_cast<std::size_t>((n * in + k) / 8)];
        w0.push_back(v[1][group] * (word >> (k % 8 * 4) & 15U) + v[2][group]);
      }
    }
    const std::array<const Values*, 3> weights = {&w0, &v[3], &v[5]};
    Arrays ys;
    for (std::size_t i = 0; i < 3; ++i) {
      const Values& a = v[6 + 2 * i];
      const Values& b = v[7 + 2 * i];
      Values y = product(v[0], *weights[i], rows, in, outs[i], blur);
      const Values seen = product(v[0], turned(a, in, kRanks[i]), rows, in, kRanks[i], blur);
      const Values more =
          product(seen, turned(b, kRanks[i], outs[i]), rows, kRanks[i], outs[i], blur);
      for (std::size_t j = 0; j < y.size(); ++j) {
        if (i == 0) y[j] = blur(y[j]) + v[12][j % static_cast<std::size_t>(outs[0])];
        if (i == 1) y[j] += v[4][j % static_cast<std::size_t>(outs[1])];
        y[j] = blur(blur(y[j]) + static_cast<double>(kScales[i]) * more[j]);
      }
      ys.push_back(std::move(y));
    }
    return ys;
  };
  block.on_tape = [=](Tape& tape, const std::vector<Tensor>& t) {
    const Tensor words = tape.encoder().empty({outs[0], in / 8}, DType::kU32);
    tape.encoder().upload(codes.data(), codes.size() * sizeof(std::uint32_t), words);
    std::vector<nn::Weight> w = {ops::QuantizedWeight{words, t[1], t[2], {4, kGroup}}, t[3], t[5]};
    for (std::size_t i = 0; i < 3; ++i) w[i].adapter = {t[6 + 2 * i], t[7 + 2 * i], kScales[i]};
    return nn::linears(tape, t[0], {{w[0], t[12]}, {w[1], t[4]}, {w[2]}});
  };
  return block;
}

class Linear : public Blocks {};

TEST_P(Linear, SeveralOfOneInput) {
  Noise noise(5);
  const auto codes = [&](std::int64_t words) {
    std::vector<std::uint32_t> all(static_cast<std::size_t>(words));
    for (std::uint32_t& word : all)
      word = static_cast<std::uint32_t>(noise.below(std::int64_t{1} << 32U));
    return all;
  };
  check_every_number(several(3, 32, {4, 5, 2}, codes(4 * 32 / 8)));
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    check_directions(several(40, 64, {96, 40, 8}, codes(96 * 64 / 8)), dtype);
  }
}

// What nothing was made of has no gradient, and what is not wanted is not computed.
TEST_P(Linear, SomeOfSeveral) {
  Noise noise(6);
  const auto random = [&](const Shape& shape) {
    return upload(random_values(noise, *element_count(shape), DType::kF32), shape, DType::kF32);
  };
  const Tensor x = random({3, 8}), w = random({4, 8}), a = random({8, 2}), b = random({2, 5});
  const Tensor unused_a = random({8, 3}), unused_b = random({3, 4});
  nn::Weight adapted = random({5, 8});
  const auto gradients = [&](bool together) {
    Tape tape(encoder());
    const Tensor in = tape.watch(x);
    adapted.adapter = {tape.watch(a), tape.watch(b), 2};
    nn::Weight plain = tape.watch(w);
    plain.adapter = {tape.watch(unused_a), tape.watch(unused_b), 2};
    std::vector<Tensor> ys;
    if (together) {
      ys = nn::linears(tape, in, {{plain}, {adapted}});
    } else {
      ys = {nn::linear(tape, in, plain), nn::linear(tape, in, adapted)};
    }
    tape.backward(ys[1], ys[1].detach());
    EXPECT_FALSE(tape.has_grad(plain.plain) && download(tape.grad(plain.plain)) != Values(32, 0));
    return std::vector<Values>{download(tape.grad(in)), download(tape.grad(adapted.adapter.a)),
                               download(tape.grad(adapted.adapter.b))};
  };
  const auto got = gradients(true), want = gradients(false);
  for (std::size_t i = 0; i < want.size(); ++i) {
    expect_close("gradient " + std::to_string(i), got[i], refs_of(want[i], 8), DType::kF32, 16);
  }
  Tape tape(encoder());
  expect_error(Errc::kArgument, "linears: from 1 to 4 weights, got 5",
               [&] { nn::linears(tape, x, {{w}, {w}, {w}, {w}, {w}}); });
}

TEST_P(Linear, GatedNetworksGradients) {
  using enum nn::GateActivation;
  for (const auto activation : {kSilu, kGelu, kGeluTanh}) {
    for (const unsigned biases : {0U, 7U, 1U, 2U, 4U}) {
      check_every_number(network(activation, biases));
    }
  }
}

TEST_P(Linear, AdaptersGradients) {
  check_every_number(with_adapter(3, 5, 4, 2));
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    check_directions(with_adapter(40, 64, 96, 8), dtype);
  }
}

// The base's numbers quantised or not, and an adapter in f32 beside 16 bits, which is rounded to them.
TEST_P(Linear, AdapterBesideEveryKindOfWeight) {
  Noise noise(3);
  const auto random = [&](const Shape& shape, DType dtype, DType rounded) {
    return upload(random_values(noise, *element_count(shape), rounded), shape, dtype);
  };
  Tape tape(encoder());
  const Tensor x = random({4, 64}, DType::kBF16, DType::kBF16);
  const nn::Weight quantized =
      ops::quantize(encoder(), random({32, 64}, DType::kBF16, DType::kBF16), {4, 32});
  const Tensor a = random({64, 3}, DType::kF32, DType::kF32);
  const Tensor b = random({3, 32}, DType::kF32, DType::kF32);
  for (nn::Weight w : {quantized, nn::Weight(nn::dequantized(tape, quantized))}) {
    w.adapter = {tape.watch(a), tape.watch(b), 0.5F};
    const Tensor y = nn::linear(tape, x, w);
    nn::Weight rounded = w;
    rounded.adapter.a = ops::cast(encoder(), a, DType::kBF16);
    rounded.adapter.b = ops::cast(encoder(), b, DType::kBF16);
    EXPECT_EQ(download(y), download(nn::linear(tape, x, rounded)));
    tape.backward(y, y);
    EXPECT_EQ(tape.grad(w.adapter.a).dtype(), DType::kF32);
    EXPECT_TRUE(tape.has_grad(w.adapter.b));
    const Refs base =
        refs_of(download(nn::linear(tape, x, quantized.is_quantized() ? quantized : w)));
    EXPECT_NE(count_wrong(download(y), base, DType::kBF16, 64), 0) << "the adapter is not seen";
  }
}

TEST_P(Linear, DropoutIsTheAdaptersAlone) {
  Noise noise(4);
  Tape tape(encoder());
  const Tensor x = upload(random_values(noise, 6 * 16, DType::kF32), {2, 3, 16}, DType::kF32);
  nn::Weight w = upload(random_values(noise, 8 * 16, DType::kF32), {8, 16}, DType::kF32);
  const Tensor a = upload(random_values(noise, 16 * 2, DType::kF32), {16, 2}, DType::kF32);
  const Tensor b = upload(random_values(noise, 2 * 8, DType::kF32), {2, 8}, DType::kF32);
  const Tensor key = ops::random_key(encoder(), 9);
  const Tensor base = nn::linear(tape, x, w);
  nn::Weight alone = encoder().zeros({8, 16}, DType::kF32);
  alone.adapter = {a, b, 3};
  const Tensor more = nn::linear(tape, ops::dropout(encoder(), x, 0.5, key), alone);
  w.adapter = {a, b, 3, 0.5, key};
  expect_close("dropout", download(nn::linear(tape, x, w)),
               refs_of(download(ops::add(encoder(), base, more)), 8), DType::kF32, 16);
}

TEST_P(Linear, NoAdapterOnATable) {
  Tape tape(encoder());
  nn::Weight w = upload({1, 2, 3, 4}, {2, 2}, DType::kF32);
  w.adapter = {upload({1, 2}, {2, 1}, DType::kF32), upload({1, 2}, {1, 2}, DType::kF32)};
  const Tensor ids = encoder().zeros({1}, DType::kI32);
  expect_error(Errc::kArgument, "embed: w must not have an adapter",
               [&] { nn::embed(tape, w, ids); });
}

TEST_P(Linear, LeadingAxesStay) {
  Tape tape(encoder());
  const Tensor x = upload({1, 2, 3, 4, 5, 6}, {3, 1, 2}, DType::kF32);
  const Tensor w = upload({1, 0, 0, 1, 1, 1, 2, -1}, {4, 2}, DType::kF32);
  const Tensor y = nn::linear(tape, x, w);
  EXPECT_EQ(to_string(y.shape()), "[3, 1, 4]");
  EXPECT_EQ(download(y), (std::vector<double>{1, 2, 3, 0, 3, 4, 7, 2, 5, 6, 11, 4}));
}

TEST_P(Linear, NothingAndWidthZero) {
  Tape tape(encoder());
  const Tensor none =
      nn::linear(tape, upload({}, {2, 0, 3}, DType::kF32), upload({1, 2, 3}, {1, 3}, DType::kF32));
  EXPECT_EQ(to_string(none.shape()), "[2, 0, 1]");
  const Tensor zeros =
      nn::linear(tape, upload({}, {2, 0}, DType::kF32), upload({}, {3, 0}, DType::kF32));
  EXPECT_EQ(download(zeros), std::vector<double>(6, 0));
}

MT_ON_EVERY_BACKEND(Linear);

TEST(SwigluNetworkCheck, SaysWhatIsWrong) {
  const Tensor x = Tensor::meta({3, 8}), gate = Tensor::meta({5, 8}), down = Tensor::meta({8, 5});
  EXPECT_FALSE(nn::swiglu_network_check(x, {gate, gate, down}));
  expect_refused({
      {"scalar", nn::swiglu_network_check(Tensor::meta({}), {gate, gate, down}), Errc::kShape, "x"},
      {"gate", nn::swiglu_network_check(x, {down, gate, down}), Errc::kShape,
       "gate must be [any, 8]"},
      {"bias", nn::swiglu_network_check(x, {gate, gate, down, Tensor::meta({1})}), Errc::kShape,
       "gate_bias must be"},
      {"up", nn::swiglu_network_check(x, {gate, {}, down}), Errc::kArgument, "up must be given"},
      {"down", nn::swiglu_network_check(x, {gate, gate, gate}), Errc::kShape,
       "down must be [8, 5]"},
  });
}

TEST(LinearCheck, SaysWhatIsWrong) {
  const Tensor x = Tensor::meta({3, 8});
  const auto with = [&](const nn::Adapter& adapter) {
    nn::Weight w = Tensor::meta({4, 8});
    w.adapter = adapter;
    return nn::linear_check(x, w);
  };
  const Tensor a = Tensor::meta({8, 2}), b = Tensor::meta({2, 4});
  EXPECT_FALSE(with({a, b}));
  EXPECT_FALSE(with({a, b, 1, 0.5, Tensor::meta({2}, DType::kU32)}));
  expect_refused({
      {"turned", with({b, a}), Errc::kShape,
       "w's adapter must be a [in, r] and b [r, out] for a weight [4, 8], got [2, 4] and [8, 2]"},
      {"no b", with({a, {}}), Errc::kShape, "got [8, 2] and []"},
      {"no a", with({{}, b}), Errc::kShape, "got [] and [2, 4]"},
      {"rank 0", with({Tensor::meta({8, 0}), Tensor::meta({0, 4})}), Errc::kShape, "got [8, 0]"},
      {"type", with({a, Tensor::meta({2, 4}, DType::kF16)}), Errc::kDType, "w must be f32"},
      {"place", with({a, Tensor::meta({2, 4}, DType::kF32, Backend::kMetal)}), Errc::kDevice,
       "where x is"},
      {"no key", with({a, b, 1, 0.5}), Errc::kArgument, "and a key with it, got 0.5"},
      {"dropout", with({a, b, 1, 1, Tensor::meta({2}, DType::kU32)}), Errc::kArgument,
       "from 0 to below 1"},
      {"width", nn::linear_check(x, Tensor::meta({8, 3})), Errc::kShape, "got [8, 3] and [3, 8]"},
      {"rank", nn::linear_check(x, Tensor::meta({8})), Errc::kShape, "[out, in]"},
      {"scalar", nn::linear_check(Tensor::meta({}), Tensor::meta({1, 1})), Errc::kShape,
       "[out, in]"},
  });
}

}  // namespace
}  // namespace mlxtape::test
