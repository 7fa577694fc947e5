#include "mlxtape/nn/delta_net.h"

#include <cmath>

#include "block.h"

namespace mlxtape::test {
namespace {

struct Case {
  std::int64_t batch, tokens, width, key_heads, value_heads, key_dim, value_dim, taps;
  bool by_head = true;     // how the projections lie
  bool has_state = false;  // given and returned
  std::int64_t mixed() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
  std::int64_t values() const { return value_heads * value_dim; }
};
enum { kX, kConv, kALog, kDtBias, kNorm, kOut, kConvState, kRuleState };  // then the projections
constexpr double kEps = 1e-3, kNormEps = 1e-2;

std::size_t place(std::int64_t i) { return static_cast<std::size_t>(i); }

// What a token is projected to: [q | k | v], z, b, a, whichever way the weights lie.
struct Projected {
  Values mixed, z, b, a;
};
Projected project(const Case& c, const Arrays& in, const Values& x, const Blur& blur) {
  const std::size_t first = c.has_state ? kRuleState + 1 : kConvState;
  const auto times = [&](std::size_t i, std::int64_t out) {
    return product(x, in[first + i], 1, c.width, out, blur);
  };
  if (!c.by_head) {
    return {times(0, c.mixed()), times(1, c.values()), times(2, c.value_heads),
            times(3, c.value_heads)};
  }
  const Values slabs = times(0, c.mixed() + c.values()), pairs = times(1, 2 * c.value_heads);
  const std::int64_t group = c.value_heads / c.key_heads, wide = group * c.value_dim;
  const std::int64_t slab = 2 * c.key_dim + 2 * wide;
  Projected p;
  const auto take = [&](Values& to, const Values& from, std::int64_t begin, std::int64_t count) {
    to.insert(to.end(), from.begin() + begin, from.begin() + begin + count);
  };
  for (std::int64_t h = 0; h < c.key_heads; ++h) take(p.mixed, slabs, h * slab, c.key_dim);
  for (std::int64_t h = 0; h < c.key_heads; ++h) {
    take(p.mixed, slabs, h * slab + c.key_dim, c.key_dim);
  }
  for (std::int64_t h = 0; h < c.key_heads; ++h) {
    take(p.mixed, slabs, h * slab + 2 * c.key_dim, wide);
    take(p.z, slabs, h * slab + 2 * c.key_dim + wide, wide);
    take(p.b, pairs, h * 2 * group, group);
    take(p.a, pairs, h * 2 * group + group, group);
  }
  return p;
}

// x·rsqrt(Σx² + ε)·scale of count numbers.
Values unit(const double* x, std::int64_t count, double scale, const Blur& blur) {
  double squares = 0;
  for (std::int64_t i = 0; i < count; ++i) squares += x[i] * x[i];
  Values y;
  for (std::int64_t i = 0; i < count; ++i) {
    y.push_back(blur(x[i] / std::sqrt(squares + kNormEps) * scale));
  }
  return y;
}

// One token after the other, state and all.
Arrays delta_net_in_double(const Case& c, const Arrays& in, const Blur& blur) {
  const std::int64_t dk = c.key_dim, dv = c.value_dim, back = c.taps - 1;
  Values y, conv_states, rule_states;
  for (std::int64_t b = 0; b < c.batch; ++b) {
    Values past(place(back * c.mixed())), memory(place(c.value_heads * dv * dk));
    if (c.has_state) {
      const auto size = static_cast<std::int64_t>(past.size());
      past.assign(in[kConvState].begin() + b * size, in[kConvState].begin() + (b + 1) * size);
      const auto all = static_cast<std::int64_t>(memory.size());
      memory.assign(in[kRuleState].begin() + b * all, in[kRuleState].begin() + (b + 1) * all);
    }
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      const auto row = in[kX].begin() + (b * c.tokens + t) * c.width;
      const Projected p = project(c, in, Values(row, row + c.width), blur);
      past.insert(past.end(), p.mixed.begin(), p.mixed.end());  // the last `taps` rows
      Values mixed;
      for (std::int64_t ch = 0; ch < c.mixed(); ++ch) {
        double z = 0;
        for (std::int64_t k = 0; k < c.taps; ++k) {
          z += in[kConv][place(ch * c.taps + k)] * past[place(k * c.mixed() + ch)];
        }
        mixed.push_back(blur(z * sigma(z)));
      }
      past.erase(past.begin(), past.begin() + c.mixed());
      Values gated;
      for (std::int64_t h = 0; h < c.value_heads; ++h) {
        const std::int64_t key_head = h / (c.value_heads / c.key_heads);
        const Values q =
            unit(&mixed[place(key_head * dk)], dk, 1 / std::sqrt(static_cast<double>(dk)), blur);
        const Values k = unit(&mixed[place((c.key_heads + key_head) * dk)], dk, 1, blur);
        const double* v = &mixed[place(2 * c.key_heads * dk + h * dv)];
        const double speed = std::exp(in[kALog][place(h)]);
        const double keep =
            std::exp(blur(-speed * std::log1p(std::exp(p.a[place(h)] + in[kDtBias][place(h)]))));
        const double beta = blur(sigma(p.b[place(h)]));
        Values read(place(dv));
        for (std::int64_t i = 0; i < dv; ++i) {
          double* s = &memory[place((h * dv + i) * dk)];
          double known = 0;
          for (std::int64_t j = 0; j < dk; ++j) known += (s[j] *= keep) * k[place(j)];
          const double change = blur(beta * (v[i] - known));
          for (std::int64_t j = 0; j < dk; ++j) {
            s[j] = blur(s[j] + change * k[place(j)]);
            read[place(i)] += s[j] * q[place(j)];
          }
          read[place(i)] = blur(read[place(i)]);
        }
        const Values even = normed(read, in[kNorm], kEps, blur);
        for (std::int64_t i = 0; i < dv; ++i) {
          const double z = p.z[place(h * dv + i)];
          gated.push_back(blur(even[place(i)] * z * sigma(z)));
        }
      }
      const Values out = product(gated, in[kOut], 1, c.values(), c.width, blur);
      y.insert(y.end(), out.begin(), out.end());
    }
    conv_states.insert(conv_states.end(), past.begin(), past.end());
    rule_states.insert(rule_states.end(), memory.begin(), memory.end());
  }
  if (!c.has_state) return {y};
  return {y, conv_states, rule_states};
}

nn::DeltaNetWeights weights_of(const Case& c, const std::vector<Tensor>& in) {
  const std::size_t first = c.has_state ? kRuleState + 1 : kConvState;
  nn::DeltaNetWeights w;
  w.conv = in[kConv], w.a_log = in[kALog], w.dt_bias = in[kDtBias];
  w.norm = in[kNorm], w.out = in[kOut];
  if (c.by_head) {
    w.qkvz = in[first], w.ba = in[first + 1];
  } else {
    w.qkv = in[first], w.z = in[first + 1], w.b = in[first + 2], w.a = in[first + 3];
  }
  return w;
}

nn::DeltaNetShape shape_of(const Case& c) {
  return {c.key_heads, c.value_heads, c.key_dim, c.value_dim, kNormEps, kEps};
}

Block block_of(const Case& c) {
  const double size = 1.5 / std::sqrt(static_cast<double>(c.width));
  const double by_values = 1.5 / std::sqrt(static_cast<double>(c.values()));
  const Shape x{c.batch, c.tokens, c.width};
  const Shape conv_state{c.batch, c.taps - 1, c.mixed()};
  const Shape rule_state{c.batch, c.value_heads, c.value_dim, c.key_dim};
  Block block{"delta_net",
              {{"x", x},
               {"conv", {c.mixed(), c.taps}, 1},
               {"A_log", {c.value_heads}, 1, -1},
               {"dt_bias", {c.value_heads}, 1},
               {"norm", {c.value_dim}, 0.5, 1},
               {"out", {c.width, c.values()}, by_values}},
              {x},
              [c](const Arrays& in, const Blur& blur) { return delta_net_in_double(c, in, blur); },
              {}};
  if (c.has_state) {
    block.inputs.insert(block.inputs.end(), {{"conv state", conv_state}, {"state", rule_state}});
    block.outputs.insert(block.outputs.end(), {conv_state, rule_state});
  }
  if (c.by_head) {
    block.inputs.insert(block.inputs.end(), {{"qkvz", {c.mixed() + c.values(), c.width}, size},
                                             {"ba", {2 * c.value_heads, c.width}, size}});
  } else {
    block.inputs.insert(block.inputs.end(), {{"qkv", {c.mixed(), c.width}, size},
                                             {"z", {c.values(), c.width}, size},
                                             {"b", {c.value_heads, c.width}, size},
                                             {"a", {c.value_heads, c.width}, size}});
  }
  block.on_tape = [c](Tape& tape, const std::vector<Tensor>& in) {
    const nn::DeltaNetWeights w = weights_of(c, in);
    const nn::DeltaNetShape shape = shape_of(c);
    if (!c.has_state) return std::vector<Tensor>{nn::delta_net(tape, in[kX], w, shape).y};
    const auto r = nn::delta_net(tape, in[kX], w, shape, {in[kConvState], in[kRuleState]}, true);
    return std::vector<Tensor>{r.y, r.state.conv, r.state.rule};
  };
  return block;
}

class DeltaNet : public Blocks {};

TEST_P(DeltaNet, EveryNumbersGradient) {
  check_every_number(block_of({2, 4, 5, 2, 4, 3, 2, 3, true}));
  check_every_number(block_of({1, 6, 4, 1, 2, 4, 3, 4, false}));
}

TEST_P(DeltaNet, EveryNumbersGradientWithState) {
  check_every_number(block_of({2, 3, 4, 1, 2, 3, 2, 4, false, true}));
}

TEST_P(DeltaNet, WideHeads) {
  check_directions(block_of({1, 66, 8, 1, 2, 128, 128, 4, true}), DType::kF32);
  check_directions(block_of({1, 66, 8, 1, 2, 128, 128, 4, false}), DType::kBF16);
}

// Tokens one by one are as good as all at once, and leave the same state.
TEST_P(DeltaNet, OneTokenAtATime) {
  const Case c{2, 5, 6, 2, 4, 8, 6, 4, true, true};
  Noise noise(5);
  std::vector<Tensor> in;
  for (const Input& input : block_of(c).inputs) {
    std::vector<double> values =
        random_values(noise, *element_count(input.shape), DType::kF32, input.size);
    for (double& v : values) v += input.around;
    in.push_back(upload(values, input.shape, DType::kF32));
  }
  const nn::DeltaNetWeights w = weights_of(c, in);
  Tape tape(encoder());
  const nn::DeltaNetState state{in[kConvState], in[kRuleState]};
  const auto whole = nn::delta_net(tape, in[kX], w, shape_of(c), state, true);
  const auto expect_same = [&](const char* what, const Tensor& got, const Tensor& want) {
    const std::vector<double> a = download(got), b = download(want);
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_NEAR(a[i], b[i], 1e-5 * (1 + std::abs(b[i]))) << what << " " << i;
    }
  };
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    const Tensor x = encoder().contiguous(in[kX].slice(1, t, t + 1));
    expect_same("y", nn::delta_net_step(tape, x, w, shape_of(c), state),
                encoder().contiguous(whole.y.slice(1, t, t + 1)));
  }
  expect_same("conv", state.conv, whole.state.conv);
  expect_same("rule", state.rule, whole.state.rule);

  const Tensor one = encoder().contiguous(in[kX].slice(1, 0, 1));
  expect_error(Errc::kNoGradient, "NoGrad",
               [&] { nn::delta_net_step(tape, tape.watch(one), w, shape_of(c), state); });
  expect_error(Errc::kArgument, "and no state",
               [&] { nn::delta_net_step(tape, one, w, shape_of(c), {}); });
  expect_error(Errc::kArgument, "one token of each",
               [&] { nn::delta_net_step(tape, in[kX], w, shape_of(c), state); });
}

MT_ON_EVERY_BACKEND(DeltaNet);

TEST(DeltaNetCheck, SaysWhatIsWrong) {
  const Tensor x = Tensor::meta({1, 3, 8});
  nn::DeltaNetWeights good;
  good.qkvz = Tensor::meta({2 * 6 + 2 * 8, 8}), good.ba = Tensor::meta({8, 8});
  good.conv = Tensor::meta({20, 4}), good.a_log = good.dt_bias = Tensor::meta({4});
  good.norm = Tensor::meta({2}), good.out = Tensor::meta({8, 8});
  const nn::DeltaNetShape shape{2, 4, 3, 2};
  EXPECT_FALSE(nn::delta_net_check(x, good, shape));
  const auto with = [&](auto set) {
    nn::DeltaNetWeights w = good;
    set(w);
    return nn::delta_net_check(x, w, shape);
  };
  expect_refused({
      {"rank", nn::delta_net_check(Tensor::meta({8}), good, shape), Errc::kShape, "x must be"},
      {"heads", nn::delta_net_check(x, good, {3, 4, 3, 2}), Errc::kArgument,
       "multiple of key_heads"},
      {"both", with([](auto& w) { w.z = Tensor::meta({8, 8}); }), Errc::kArgument,
       "z must not be given beside qkvz and ba"},
      {"ba", with([](auto& w) { w.ba = {}; }), Errc::kArgument, "ba must be given"},
      {"qkv", with([](auto& w) { w.qkvz = {}, w.ba = {}; }), Errc::kArgument, "qkv must be given"},
      {"qkvz", with([](auto& w) { w.qkvz = Tensor::meta({20, 8}); }), Errc::kShape, "[28, 8], got"},
      {"conv", with([](auto& w) { w.conv = Tensor::meta({20, 4, 1}); }), Errc::kShape,
       "conv must be [20, any], got [20, 4, 1]"},
      {"half a state", nn::delta_net_check(x, good, shape, {Tensor::meta({1, 3, 20}), {}}),
       Errc::kArgument, "the state's rule must be given"},
      {"state",
       nn::delta_net_check(x, good, shape, {Tensor::meta({1, 3, 20}), Tensor::meta({1, 4, 3, 2})}),
       Errc::kShape, "the state's rule must be [1, 4, 2, 3]"},
      {"type", with([](auto& w) { w.out = Tensor::meta({8, 8}, DType::kF16); }), Errc::kDType,
       "out must be f32"},
  });
}

}  // namespace
}  // namespace mlxtape::test
