#include "mlxtape/nn/moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "block.h"
#include "mlxtape/ops/quantize.h"

namespace mlxtape::test {
namespace {

struct Case {
  std::int64_t batch, tokens, width, experts, chosen, inner, shared;  // shared 0: no such expert
  bool renormalise = true;
  std::int64_t rank = 0;  // of the experts' adapters; 0: there are none
};
enum { kX, kRouter, kGate, kUp, kDown, kSharedGate, kSharedUp, kSharedDown, kOpen };
constexpr float kScale = 1.5F;
constexpr std::size_t kAdapted = 3;  // gate, up and down; a and b of each are the last inputs

Values part(const Values& all, std::int64_t index, std::int64_t count) {
  return {all.begin() + index * count, all.begin() + (index + 1) * count};
}

Values network(const Values& x, const Values& gate, const Values& up, const Values& down,
               std::int64_t width, std::int64_t inner, const Blur& blur) {
  const Values g = product(x, gate, 1, width, inner, blur);
  const Values u = product(x, up, 1, width, inner, blur);
  Values a(g.size());
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = blur(g[i] * sigma(g[i]) * u[i]);
  return product(a, down, 1, inner, width, blur);
}

// x·wᵀ + scale·b·(a·x), with the adapter of expert e, where there is one.
Values adapted(const Case& c, const Values& x, const Values& w, const Arrays& in, std::size_t which,
               std::int64_t e, const Blur& blur) {
  const auto from = static_cast<std::int64_t>(x.size());
  const std::int64_t to = static_cast<std::int64_t>(w.size()) / from;
  Values y = product(x, w, 1, from, to, blur);
  if (c.rank == 0) return y;
  const std::size_t first = in.size() - 2 * kAdapted + 2 * which;
  const Values seen = product(x, part(in[first], e, c.rank * from), 1, from, c.rank, blur);
  const Values more = product(seen, part(in[first + 1], e, to * c.rank), 1, c.rank, to, blur);
  for (std::size_t i = 0; i < y.size(); ++i) y[i] = blur(y[i] + kScale * more[i]);
  return y;
}

Values expert(const Case& c, const Values& x, const Arrays& in, std::int64_t e, const Blur& blur) {
  const std::int64_t each = c.inner * c.width;
  const Values g = adapted(c, x, part(in[kGate], e, each), in, 0, e, blur);
  const Values u = adapted(c, x, part(in[kUp], e, each), in, 1, e, blur);
  Values a(g.size());
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = blur(g[i] * sigma(g[i]) * u[i]);
  return adapted(c, a, part(in[kDown], e, each), in, 2, e, blur);
}

Arrays moe_in_double(const Case& c, const Arrays& in, const Blur& blur) {
  Values y;
  for (std::int64_t t = 0; t < c.batch * c.tokens; ++t) {
    const Values x = part(in[kX], t, c.width);
    const Values logits = product(x, in[kRouter], 1, c.width, c.experts, blur);
    std::vector<std::int64_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
      return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
    });
    double all = 0;
    for (std::int64_t j = 0; j < (c.renormalise ? c.chosen : c.experts); ++j) {
      all += std::exp(logits[static_cast<std::size_t>(order[static_cast<std::size_t>(j)])]);
    }
    Values sum(static_cast<std::size_t>(c.width));
    const auto add = [&](double weight, const Values& v) {
      for (std::size_t i = 0; i < v.size(); ++i) sum[i] += weight * v[i];
    };
    for (std::int64_t j = 0; j < c.chosen; ++j) {
      const std::int64_t e = order[static_cast<std::size_t>(j)];
      const Values out = expert(c, x, in, e, blur);  // in this order: each call of blur draws
      add(blur(std::exp(logits[static_cast<std::size_t>(e)]) / all), out);
    }
    for (double& v : sum) v = blur(v);
    if (c.shared > 0) {
      const double open = blur(sigma(product(x, in[kOpen], 1, c.width, 1, blur)[0]));
      add(open,
          network(x, in[kSharedGate], in[kSharedUp], in[kSharedDown], c.width, c.shared, blur));
    }
    for (const double v : sum) y.push_back(blur(v));
  }
  return {y};
}

Block block_of(const Case& c) {
  const double by_width = 1.5 / std::sqrt(static_cast<double>(c.width));
  const double by_inner = 1.5 / std::sqrt(static_cast<double>(c.inner));
  const Shape x{c.batch, c.tokens, c.width};
  Block block{"moe",
              {{"x", x},
               {"router", {c.experts, c.width}, 2 * by_width},
               {"experts.gate", {c.experts, c.inner, c.width}, by_width},
               {"experts.up", {c.experts, c.inner, c.width}, by_width},
               {"experts.down", {c.experts, c.width, c.inner}, by_inner}},
              {x},
              {},
              {}};
  if (c.shared > 0) {
    block.inputs.insert(block.inputs.end(), {{"shared.gate", {c.shared, c.width}, by_width},
                                             {"shared.up", {c.shared, c.width}, by_width},
                                             {"shared.down", {c.width, c.shared}, by_inner},
                                             {"shared_gate", {1, c.width}, by_width}});
  }
  for (std::size_t i = 0; c.rank > 0 && i < kAdapted; ++i) {
    const std::int64_t from = i == 2 ? c.inner : c.width, to = i == 2 ? c.width : c.inner;
    const std::string name = std::string("adapter ") + std::to_string(i);
    block.inputs.push_back({name + " a", {c.experts, c.rank, from}, i == 2 ? by_inner : by_width});
    block.inputs.push_back({name + " b", {c.experts, to, c.rank}, 1});
  }
  block.in_double = [c](const Arrays& in, const Blur& blur) {
    return moe_in_double(c, in, blur);
  };
  block.on_tape = [c](Tape& tape, const std::vector<Tensor>& in) {
    nn::MoeWeights w{in[kRouter], {in[kGate], in[kUp], in[kDown]}, {}, {}};
    if (c.shared > 0) {
      w.shared = {in[kSharedGate], in[kSharedUp], in[kSharedDown]};
      w.shared_gate = in[kOpen];
    }
    std::size_t at = in.size() - 2 * kAdapted;
    for (nn::Weight* e : {&w.experts.gate, &w.experts.up, &w.experts.down}) {
      if (c.rank == 0) break;
      e->adapter = {in[at], in[at + 1], kScale};
      at += 2;
    }
    return std::vector<Tensor>{nn::moe(tape, in[kX], w, {c.chosen, c.renormalise})};
  };
  return block;
}

class Moe : public Blocks {};

TEST_P(Moe, EveryNumbersGradient) {
  check_every_number(block_of({2, 3, 5, 4, 2, 3, 4}));
  check_every_number(block_of({1, 4, 4, 3, 2, 5, 0, false}));
}

TEST_P(Moe, WideOnes) { check_directions(block_of({1, 40, 64, 8, 3, 64, 32}), DType::kF32); }

TEST_P(Moe, EveryNumbersGradientWithAdapters) {
  check_every_number(block_of({1, 4, 4, 3, 2, 5, 0, true, 2}));
}

TEST_P(Moe, WideOnesWithAdapters) {
  check_directions(block_of({1, 24, 32, 8, 3, 32, 0, true, 4}), DType::kF32);
  // All are chosen: in 16 bits a choice could hang on rounding.
  check_directions(block_of({1, 24, 32, 3, 3, 32, 0, true, 4}), DType::kBF16);
}

// Weights of experts in every form, in one place: the same numbers plain and quantised.
class MoeAdapters : public OnDevice {
 protected:
  static constexpr std::int64_t kWidth = 64, kInner = 32, kExperts = 8, kRank = 2;

  Tensor noise(const Shape& shape, double size) {
    return upload(random_values(noise_, *element_count(shape), DType::kF32, size), shape,
                  DType::kF32);
  }
  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped()) return;
    quantized_.router = noise({kExperts, kWidth}, 0.5);
    const auto weight = [&](std::int64_t to, std::int64_t from) {
      nn::Weight w = ops::quantize(encoder(), noise({kExperts, to, from}, 0.3), {4, 32});
      w.adapter = {noise({kExperts, kRank, from}, 0.2), noise({kExperts, to, kRank}, 1), 2};
      return w;
    };
    quantized_.experts = {weight(kInner, kWidth), weight(kInner, kWidth), weight(kWidth, kInner)};
    plain_ = quantized_;
    for (nn::Weight* w : {&plain_.experts.gate, &plain_.experts.up, &plain_.experts.down}) {
      const nn::Adapter adapter = w->adapter;
      *w = ops::dequantize(encoder(), w->quantized);
      w->adapter = adapter;
    }
  }
  nn::MoeWeights watched(Tape& tape, nn::MoeWeights w) {
    for (nn::Weight* e : {&w.experts.gate, &w.experts.up, &w.experts.down}) {
      e->adapter.a = tape.watch(e->adapter.a);
      e->adapter.b = tape.watch(e->adapter.b);
    }
    return w;
  }

  Noise noise_{5};
  nn::MoeWeights quantized_, plain_;
};

TEST_P(MoeAdapters, QuantizedWeightsAsTheirNumbers) {
  const Tensor x = noise({1, 9, kWidth}, 1);
  std::vector<std::vector<double>> found[2];
  for (const bool pack : {false, true}) {
    Tape tape(encoder());
    const nn::MoeWeights w = watched(tape, pack ? quantized_ : plain_);
    const Tensor at = tape.watch(x), y = nn::moe(tape, at, w, {2});
    tape.backward(y, y);
    auto& values = found[pack ? 1 : 0];
    values = {download(y), download(tape.grad(at))};
    for (const nn::Weight* e : {&w.experts.gate, &w.experts.up, &w.experts.down}) {
      values.push_back(download(tape.grad(e->adapter.a)));
      values.push_back(download(tape.grad(e->adapter.b)));
    }
  }
  EXPECT_EQ(found[0], found[1]);
}

TEST_P(MoeAdapters, TheWeightsOwnGradientStays) {
  const Tensor x = noise({1, 9, kWidth}, 1);
  Tape tape(encoder());
  nn::MoeWeights w = quantized_, p = plain_;
  Tensor& scales = w.experts.up.quantized.scales;
  Tensor& biases = w.experts.up.quantized.biases;
  scales = tape.watch(scales);
  biases = tape.watch(biases);
  p.experts.up.plain = tape.watch(p.experts.up.plain);
  for (const nn::MoeWeights& each : {w, p}) {
    const Tensor y = nn::moe(tape, x, each, {2});
    tape.backward(y, y);
  }
  const ops::DequantizeGradients want = ops::dequantize_backward(
      encoder(), quantized_.experts.up.quantized, tape.grad(p.experts.up.plain));
  EXPECT_EQ(download(tape.grad(scales)), download(want.d_scales));
  EXPECT_EQ(download(tape.grad(biases)), download(want.d_biases));
}

// Without a tape, of one token, only the chosen ones' weights are made.
TEST_P(MoeAdapters, FewTokensWithoutATape) {
  const Tensor x = noise({1, 3, kWidth}, 1);  // 3 tokens of 2: fewer pairs than experts
  for (const nn::MoeWeights& w : {quantized_, plain_}) {
    Tape tape(encoder());
    const Refs want = refs_of(download(nn::moe(tape, x, watched(tape, w), {2})), 1);
    const Tensor y = nn::moe(tape, x, w, {2});
    expect_close("few tokens", download(y), want, DType::kF32, kWidth);
    for (std::int64_t t = 0; t < 3; ++t) {
      const Tensor one = nn::moe(tape, encoder().contiguous(x.slice(1, t, t + 1)), w, {2});
      const Refs row(want.begin() + t * kWidth, want.begin() + (t + 1) * kWidth);
      expect_close("one token", download(one), row, DType::kF32, kWidth);
    }
  }
}

MT_ON_EVERY_BACKEND(MoeAdapters);
MT_ON_EVERY_BACKEND(Moe);

TEST(MoeCheck, SaysWhatIsWrong) {
  const Tensor x = Tensor::meta({1, 3, 8});
  const nn::MoeWeights good{
      Tensor::meta({4, 8}),
      {Tensor::meta({4, 2, 8}), Tensor::meta({4, 2, 8}), Tensor::meta({4, 8, 2})},
      {Tensor::meta({5, 8}), Tensor::meta({5, 8}), Tensor::meta({8, 5})},
      Tensor::meta({1, 8})};
  EXPECT_FALSE(nn::moe_check(x, good, {2}));
  const auto with = [&](auto set) {
    nn::MoeWeights w = good;
    set(w);
    return nn::moe_check(x, w, {2});
  };
  expect_refused({
      {"rank", nn::moe_check(Tensor::meta({3, 8}), good, {2}), Errc::kShape,
       "[batch, tokens, width]"},
      {"router", with([](auto& w) { w.router = Tensor::meta({8}); }), Errc::kShape,
       "router must be [any, 8], got [8]"},
      {"no router", with([](auto& w) { w.router = {}; }), Errc::kArgument, "router must be given"},
      {"experts", with([](auto& w) { w.experts.down = Tensor::meta({4, 2, 8}); }), Errc::kShape,
       "experts.down must be [4, 8, 2]"},
      {"type", with([](auto& w) { w.shared.up = Tensor::meta({5, 8}, DType::kF16); }), Errc::kDType,
       "moe: shared.up must be f32"},
      {"chosen", nn::moe_check(x, good, {5}), Errc::kArgument, "from 1 to the router's 4, got 5"},
      {"inner", with([](auto& w) { w.experts.gate = Tensor::meta({4, 8}); }), Errc::kShape,
       "experts.gate must be [4, any, 8], got [4, 8]"},
      {"no shared", with([](auto& w) { w.shared.down = {}; }), Errc::kArgument,
       "shared.down must be given"},
      {"place",
       with([](auto& w) { w.shared_gate = Tensor::meta({1, 8}, DType::kF32, Backend::kMetal); }),
       Errc::kDevice, "where x is"},
      {"adapter", with([](auto& w) {
         w.experts.up.adapter = {Tensor::meta({4, 8, 3}), Tensor::meta({4, 2, 3})};
       }),
       Errc::kShape, "experts.up's adapter must be a [E, r, in] and b [E, out, r]"},
      {"adapter's dropout", with([](auto& w) {
         w.experts.up.adapter = {Tensor::meta({4, 3, 8}), Tensor::meta({4, 2, 3}), 1, 0.5,
                                 Tensor::meta({2}, DType::kU32)};
       }),
       Errc::kArgument, "experts.up's adapter must have no dropout, being of experts"},
      {"no gate", with([](auto& w) { w.shared_gate = {}; }), Errc::kArgument,
       "shared.gate must not be given without shared_gate"},
  });
}

}  // namespace
}  // namespace mlxtape::test
