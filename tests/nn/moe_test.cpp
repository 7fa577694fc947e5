#include "mlxtape/nn/moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "block.h"

namespace mlxtape::test {
namespace {

struct Case {
  std::int64_t batch, tokens, width, experts, chosen, inner, shared;  // shared 0: no such expert
  bool renormalise = true;
};
enum { kX, kRouter, kGate, kUp, kDown, kSharedGate, kSharedUp, kSharedDown, kOpen };

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

Arrays moe_in_double(const Case& c, const Arrays& in, const Blur& blur) {
  const std::int64_t each = c.inner * c.width;
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
      add(blur(std::exp(logits[static_cast<std::size_t>(e)]) / all),
          network(x, part(in[kGate], e, each), part(in[kUp], e, each), part(in[kDown], e, each),
                  c.width, c.inner, blur));
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
  block.in_double = [c](const Arrays& in, const Blur& blur) {
    return moe_in_double(c, in, blur);
  };
  block.on_tape = [c](Tape& tape, const std::vector<Tensor>& in) {
    nn::MoeWeights w{in[kRouter], {in[kGate], in[kUp], in[kDown]}, {}, {}};
    if (c.shared > 0) {
      w.shared = {in[kSharedGate], in[kSharedUp], in[kSharedDown]};
      w.shared_gate = in[kOpen];
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
      {"no gate", with([](auto& w) { w.shared_gate = {}; }), Errc::kArgument,
       "shared.gate must not be given without shared_gate"},
  });
}

}  // namespace
}  // namespace mlxtape::test
