#include "mlxtape/ops/gated_delta_rule.h"

#include <cmath>
#include <functional>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::GatedDeltaRuleInputs;
using ops::GatedDeltaRuleOptions;

struct Case {
  std::vector<std::int64_t> lengths;  // of the sequences
  std::int64_t key_heads = 1, heads = 1, dk = 4, dv = 4;
  bool per_channel = false;
  bool log_decay = true;
  bool normalise = false;
  bool initial = true;
  bool masked = false;
  bool packed = false;
  double low = -2, high = 0;  // of log g
  double scale = 1;

  std::int64_t tokens() const {
    return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  }
  std::int64_t sequences() const { return static_cast<std::int64_t>(lengths.size()); }
  Shape axes(std::initializer_list<std::int64_t> more) const {
    Shape shape = packed ? Shape{tokens()} : Shape{sequences(), lengths.empty() ? 0 : lengths[0]};
    for (const std::int64_t n : more) shape.push_back(n);
    return shape;
  }
  Shape state() const { return {sequences(), heads, dv, dk}; }
  std::int64_t decays() const { return tokens() * heads * (per_channel ? dk : 1); }
};

enum { kQ, kK, kV, kDecay, kBeta, kState, kInputs };
enum { kDy = kInputs, kDFinal, kAll };

// Every number the formula block of gated_delta_rule.h has, token by token, in double. `blur` stands for what
// f32 does to each number that is made.
struct Oracle {
  const Case& c;
  std::function<double(double)> blur;
  std::vector<bool> mask = {};
  Arrays in = {};  // kQ … kDFinal
  std::vector<double> y = {}, final_state = {};
  Arrays grads = {};  // kQ … kState

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  // A row of q or k as it is used, and what it was multiplied with.
  std::vector<double> row(int which, std::int64_t t, std::int64_t h, double& factor) const {
    std::vector<double> x(at(c.dk));
    double squares = 0;
    for (std::int64_t j = 0; j < c.dk; ++j) {
      x[at(j)] = in[at(which)][at((t * c.key_heads + h) * c.dk + j)];
      squares += x[at(j)] * x[at(j)];
    }
    factor = c.normalise ? 1 / std::sqrt(squares + 1e-6) : 1;
    for (double& v : x) v = blur(v * factor * (which == kQ ? c.scale : 1));
    return x;
  }

  void run() {
    const std::int64_t dk = c.dk, dv = c.dv, group = c.heads / c.key_heads;
    y.assign(at(c.tokens() * c.heads * dv), 0);
    final_state.assign(in[kState].size(), 0);
    grads.clear();
    for (int i = 0; i < kInputs; ++i) grads.emplace_back(in[at(i)].size(), 0.0);
    std::int64_t first = 0;
    for (std::int64_t s = 0; s < c.sequences(); first += c.lengths[at(s)], ++s) {
      for (std::int64_t h = 0; h < c.heads; ++h) {
        const std::int64_t count = c.lengths[at(s)];
        std::vector<std::vector<double>> states;  // before each token, and behind the last
        Arrays qs, ks, gs, us, ms;
        std::vector<double> q_factors, k_factors;
        const std::int64_t place = (s * c.heads + h) * dv * dk;
        std::vector<double> state(at(dv * dk));
        for (std::int64_t i = 0; i < dv * dk; ++i) state[at(i)] = in[kState][at(place + i)];
        for (std::int64_t t = first; t < first + count; ++t) {
          double fq = 1, fk = 1;
          qs.push_back(row(kQ, t, h / group, fq));
          ks.push_back(row(kK, t, h / group, fk));
          q_factors.push_back(fq);
          k_factors.push_back(fk);
          states.push_back(state);
          std::vector<double> g(at(dk)), u(at(dv)), m(at(dv));
          for (std::int64_t j = 0; j < dk; ++j) {
            const std::int64_t d = t * c.heads + h;
            const double raw = in[kDecay][at(c.per_channel ? d * dk + j : d)];
            g[at(j)] = blur(c.log_decay ? std::exp(raw) : raw);
          }
          if (mask[at(t)]) {
            for (std::int64_t i = 0; i < dv; ++i) {
              double* r = state.data() + i * dk;
              for (std::int64_t j = 0; j < dk; ++j) r[j] = blur(r[j] * g[at(j)]);
              for (std::int64_t j = 0; j < dk; ++j) m[at(i)] += r[j] * ks.back()[at(j)];
              u[at(i)] = blur(in[kBeta][at(t * c.heads + h)] *
                              (in[kV][at((t * c.heads + h) * dv + i)] - blur(m[at(i)])));
              double out = 0;
              for (std::int64_t j = 0; j < dk; ++j) {
                r[j] = blur(r[j] + u[at(i)] * ks.back()[at(j)]);
                out += r[j] * qs.back()[at(j)];
              }
              y[at((t * c.heads + h) * dv + i)] = blur(out);
            }
          }
          gs.push_back(g);
          us.push_back(u);
          ms.push_back(m);
        }
        states.push_back(state);
        for (std::int64_t i = 0; i < dv * dk; ++i) final_state[at(place + i)] = state[at(i)];

        std::vector<double> ds(at(dv * dk));
        for (std::int64_t i = 0; i < dv * dk; ++i) ds[at(i)] = in[kDFinal][at(place + i)];
        for (std::int64_t n = count - 1; n >= 0; --n) {
          const std::int64_t t = first + n, by_head = t * c.heads + h;
          if (!mask[at(t)]) continue;
          const auto &q = qs[at(n)], &k = ks[at(n)], &g = gs[at(n)], &u = us[at(n)], &m = ms[at(n)];
          const auto &before = states[at(n)], &behind = states[at(n + 1)];
          const double beta = in[kBeta][at(by_head)];
          std::vector<double> dq(at(dk)), dkey(at(dk)), dg(at(dk));
          for (std::int64_t i = 0; i < dv; ++i) {
            const double dy = in[kDy][at(by_head * dv + i)];
            double du = 0;
            for (std::int64_t j = 0; j < dk; ++j) {
              double& cell = ds[at(i * dk + j)];
              cell = blur(cell + dy * q[at(j)]);
              dq[at(j)] += behind[at(i * dk + j)] * dy;
              du += cell * k[at(j)];
            }
            du = blur(du);
            grads[kBeta][at(by_head)] += blur(du * (in[kV][at(by_head * dv + i)] - m[at(i)]));
            grads[kV][at(by_head * dv + i)] = beta * du;
            for (std::int64_t j = 0; j < dk; ++j) {
              double& cell = ds[at(i * dk + j)];
              const double old = before[at(i * dk + j)];
              dkey[at(j)] += blur(cell * u[at(i)]) - blur(beta * du * old * g[at(j)]);
              cell = blur(cell - beta * du * k[at(j)]);
              dg[at(j)] += blur(cell * old);
              cell = blur(cell * g[at(j)]);
            }
          }
          for (std::int64_t j = 0; j < dk; ++j) {
            const double made = c.log_decay ? dg[at(j)] * g[at(j)] : dg[at(j)];
            grads[kDecay][at(c.per_channel ? by_head * dk + j : by_head)] += blur(made);
          }
          const auto give = [&](int which, const std::vector<double>& used, double factor,
                                double scale, const std::vector<double>& grad) {
            double along = 0;
            for (std::int64_t j = 0; j < dk; ++j) along += grad[at(j)] * used[at(j)] / scale;
            for (std::int64_t j = 0; j < dk; ++j) {
              const double part = c.normalise ? along * used[at(j)] / scale : 0;
              grads[at(which)][at((t * c.key_heads + h / group) * dk + j)] +=
                  blur(scale * factor * (blur(grad[at(j)]) - part));
            }
          };
          give(kQ, q, q_factors[at(n)], c.scale, dq);
          give(kK, k, k_factors[at(n)], 1, dkey);
        }
        for (std::int64_t i = 0; i < dv * dk; ++i) grads[kState][at(place + i)] = ds[at(i)];
      }
    }
  }
};

Oracle oracle_of(const Case& c, DType dtype, std::uint64_t seed) {
  Noise noise(seed);
  Oracle o{c, [](double v) {
             return v;
           }};
  const double unit = 1.5 / std::sqrt(static_cast<double>(c.dk));  // keys of about unit length
  o.in = {random_values(noise, c.tokens() * c.key_heads * c.dk, dtype, c.normalise ? 2 : unit),
          random_values(noise, c.tokens() * c.key_heads * c.dk, dtype, c.normalise ? 2 : unit),
          random_values(noise, c.tokens() * c.heads * c.dv, dtype),
          random_values(noise, c.decays(), DType::kF32),
          random_values(noise, c.tokens() * c.heads, DType::kF32),
          random_values(noise, c.sequences() * c.heads * c.dv * c.dk, DType::kF32),
          random_values(noise, c.tokens() * c.heads * c.dv, dtype),
          random_values(noise, c.sequences() * c.heads * c.dv * c.dk, DType::kF32)};
  for (double& v : o.in[kDecay]) {
    const double log_g = c.low + (c.high - c.low) * (v + 1) / 2;
    v = round_to(DType::kF32, c.log_decay ? log_g : std::exp(log_g));
  }
  for (double& v : o.in[kBeta]) v = round_to(DType::kF32, (v + 1) / 2);
  if (!c.initial) std::fill(o.in[kState].begin(), o.in[kState].end(), 0.0);
  for (std::int64_t t = 0; t < c.tokens(); ++t) o.mask.push_back(!c.masked || noise.next() > -0.5);
  o.run();
  return o;
}

struct Expected {
  Refs y, final_state;
  std::vector<Refs> grads;
};

Expected expected_of(const Oracle& exact, DType dtype, double rounding = kBlur) {
  std::vector<Oracle> tries;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    Noise noise(seed);
    tries.push_back(exact);
    tries.back().blur = [&noise, rounding](double v) {
      return v * (1 + noise.next() * rounding);
    };
    tries.back().run();
  }
  const auto all = [&](const std::function<const std::vector<double>&(const Oracle&)>& part,
                       std::int64_t row, DType stored) {
    std::vector<std::vector<double>> values;
    for (const Oracle& o : tries) values.push_back(part(o));
    return blurred(part(exact), values, row, stored);
  };
  const Case& c = exact.c;
  Expected e;
  e.y = all([](const Oracle& o) -> const auto& { return o.y; }, c.dv, dtype);
  e.final_state =
      all([](const Oracle& o) -> const auto& { return o.final_state; }, c.dk, DType::kF32);
  const std::int64_t rows[] = {c.dk, c.dk, c.dv, c.per_channel ? c.dk : c.heads, c.heads, c.dk};
  for (std::size_t i = 0; i < kInputs; ++i) {
    e.grads.push_back(all([i](const Oracle& o) -> const auto& { return o.grads[i]; }, rows[i],
                          i <= kV ? dtype : DType::kF32));
  }
  return e;
}

TEST(GatedDeltaRuleOracle, GradientMatchesCentralDifference) {
  for (const bool per_channel : {false, true}) {
    for (const bool log_decay : {false, true}) {
      for (const bool normalise : {false, true}) {
        Case c{{5, 5}, 2, 4, 3, 2, per_channel, log_decay, normalise};
        c.masked = true;
        c.scale = 0.7;
        const Oracle o = oracle_of(c, DType::kF64, 11);
        const auto loss = [&](const Arrays& at) {
          Oracle moved{c, [](double v) { return v; }, o.mask, at};
          moved.in.push_back(o.in[kDy]);
          moved.in.push_back(o.in[kDFinal]);
          moved.run();
          return std::inner_product(moved.y.begin(), moved.y.end(), o.in[kDy].begin(), 0.0) +
                 std::inner_product(moved.final_state.begin(), moved.final_state.end(),
                                    o.in[kDFinal].begin(), 0.0);
        };
        expect_gradient(loss, {o.in.begin(), o.in.begin() + kInputs}, o.grads);
      }
    }
  }
}

TEST(GatedDeltaRuleCheck, SaysWhatIsWrong) {
  const Backend far = Backend::kMetal;
  const auto meta = [](Shape shape, DType t = DType::kF32, Backend b = Backend::kCpu) {
    return Tensor::meta(std::move(shape), t, b);
  };
  const GatedDeltaRuleInputs good{meta({2, 5, 2, 8}), meta({2, 5, 2, 8}), meta({2, 5, 4, 6}),
                                  meta({2, 5, 4}), meta({2, 5, 4})};
  const GatedDeltaRuleInputs packed{meta({9, 2, 8}), meta({9, 2, 8}), meta({9, 4, 6}), meta({9, 4}),
                                    meta({9, 4})};
  const GatedDeltaRuleInputs one{meta({2, 1, 2, 8}), meta({2, 1, 2, 8}), meta({2, 1, 4, 6}),
                                 meta({2, 1, 4}), meta({2, 1, 4})};
  const auto state = meta({2, 4, 6, 8}), starts = meta({3}, DType::kI32);
  const auto check = ops::gated_delta_rule_check;
  const auto with = [&](Tensor GatedDeltaRuleInputs::* part, const Tensor& t) {
    GatedDeltaRuleInputs in = good;
    in.*part = t;
    return check(in, {});
  };
  const auto heads = [&](std::int64_t key, std::int64_t value, std::int64_t dk, std::int64_t dv) {
    return check({meta({2, 5, key, dk}), meta({2, 5, key, dk}), meta({2, 5, value, dv}),
                  meta({2, 5, value}), meta({2, 5, value})},
                 {});
  };
  const auto begins = [&](const Tensor& t) {
    return check(packed, {.sequence_starts = t});
  };
  const auto bwd = [&](const Tensor& dy, const Tensor& d_final = {}) {
    return ops::gated_delta_rule_backward_check(good, dy, {}, d_final);
  };
  const auto step = ops::gated_delta_rule_step_check;
  using In = GatedDeltaRuleInputs;
  expect_refused({
      {"double", with(&In::q, meta({2, 5, 2, 8}, DType::kF64)), Errc::kDType,
       "q must be f32, f16 or bf16, got f64"},
      {"q of rank 3", with(&In::q, meta({5, 2, 8})), Errc::kShape,
       "q must be [B, T, Hk, Dk], got [5, 2, 8]"},
      {"starts for a batch", check(good, {.sequence_starts = starts}), Errc::kShape,
       "q must be [T, Hk, Dk] with sequence_starts, got [2, 5, 2, 8]"},
      {"one start", begins(meta({1}, DType::kI32)), Errc::kShape,
       "[S+1] with S at least 1, got [1]"},
      {"starts of rank 2", begins(meta({3, 1}, DType::kI32)), Errc::kShape, "got [3, 1]"},
      {"float starts", begins(meta({3})), Errc::kDType, "must be i32 or i64, got f32"},
      {"starts elsewhere", begins(meta({3}, DType::kI64, far)), Errc::kDevice,
       "sequence_starts must be where q is (cpu), got metal"},
      {"v of rank 3", with(&In::v, meta({5, 4, 6})), Errc::kShape,
       "v must have the axes of q [2, 5, 2, 8], got [5, 4, 6]"},
      {"no key head", heads(0, 4, 8, 6), Errc::kShape, "at least 1 each, got 4 and 0"},
      {"no value head", heads(2, 0, 8, 6), Errc::kShape, "got 0 and 2"},
      {"heads that do not share", heads(2, 3, 8, 6), Errc::kShape,
       "value heads must be a multiple of key heads, at least 1 each, got 3 and 2"},
      {"wide keys", heads(2, 4, 257, 6), Errc::kShape,
       "Dk and Dv must be from 1 to 256, got 257 and 6"},
      {"wide values", heads(2, 4, 8, 257), Errc::kShape, "got 8 and 257"},
      {"k", with(&In::k, meta({2, 5, 4, 8})), Errc::kShape,
       "k must be [2, 5, 2, 8], got [2, 5, 4, 8]"},
      {"type of k", with(&In::k, meta({2, 5, 2, 8}, DType::kF16)), Errc::kDType,
       "k must be f32, got f16"},
      {"k elsewhere", with(&In::k, meta({2, 5, 2, 8}, DType::kF32, far)), Errc::kDevice,
       "k must be where q is (cpu), got metal"},
      {"v of other tokens", with(&In::v, meta({2, 6, 4, 6})), Errc::kShape,
       "v must be [2, 5, 4, 6], got [2, 6, 4, 6]"},
      {"type of v", with(&In::v, meta({2, 5, 4, 6}, DType::kBF16)), Errc::kDType, "v must be f32"},
      {"beta", with(&In::beta, meta({2, 5, 2})), Errc::kShape,
       "beta must be [2, 5, 4], got [2, 5, 2]"},
      {"type of beta", with(&In::beta, meta({2, 5, 4}, DType::kBF16)), Errc::kDType,
       "beta must be f32, got bf16"},
      {"decay", with(&In::decay, meta({2, 5, 2})), Errc::kShape, "decay must be [2, 5, 4]"},
      {"decay by channels of v", with(&In::decay, meta({2, 5, 4, 6})), Errc::kShape,
       "decay must be [2, 5, 4, 8], got [2, 5, 4, 6]"},
      {"type of decay", with(&In::decay, meta({2, 5, 4}, DType::kF16)), Errc::kDType,
       "decay must be f32, got f16"},
      {"no decay", with(&In::decay, {}), Errc::kShape, "decay must be [2, 5, 4], got []"},
      {"no scale", check(good, {.scale = 0}), Errc::kArgument,
       "scale must be finite and not 0, got 0"},
      {"endless scale", check(good, {.scale = INFINITY}), Errc::kArgument, "got inf"},
      {"negative eps", check(good, {.eps = -1}), Errc::kArgument,
       "eps must be finite and at least 0, got -1"},
      {"eps is no number", check(good, {.eps = NAN}), Errc::kArgument, "got nan"},
      {"mask", check(good, {.mask = meta({2, 4}, DType::kBool)}), Errc::kShape,
       "mask must be [2, 5], got [2, 4]"},
      {"float mask", check(good, {.mask = meta({2, 5})}), Errc::kDType,
       "mask must be bool, got f32"},
      {"a state too many", check(good, {.initial_state = meta({3, 4, 6, 8})}), Errc::kShape,
       "initial_state must be [2, 4, 6, 8], got [3, 4, 6, 8]"},
      {"a state too few",
       check(packed, {.sequence_starts = starts, .initial_state = meta({1, 4, 6, 8})}),
       Errc::kShape, "initial_state must be [2, 4, 6, 8], got [1, 4, 6, 8]"},
      {"state turned around", check(good, {.initial_state = meta({2, 4, 8, 6})}), Errc::kShape,
       "got [2, 4, 8, 6]"},
      {"backward refuses like forward",
       ops::gated_delta_rule_backward_check(good, {}, {.scale = 0}), Errc::kArgument, "scale"},
      {"dy", bwd(meta({2, 5, 2, 8})), Errc::kShape, "dy must be [2, 5, 4, 6]"},
      {"type of dy", bwd(meta({2, 5, 4, 6}, DType::kF16)), Errc::kDType, "dy must be f32, got f16"},
      {"d_final_state", bwd({}, meta({2, 4, 8, 6})), Errc::kShape,
       "d_final_state must be [2, 4, 6, 8]"},
      {"step with starts", step(one, state, {.sequence_starts = starts}), Errc::kArgument,
       "must be absent in a step: give the state as state"},
      {"step with an initial state", step(one, state, {.initial_state = state}), Errc::kArgument,
       "must be absent in a step"},
      {"step refuses like forward", step(one, state, {.eps = -1}), Errc::kArgument, "eps"},
      {"step of five tokens", step(good, state, {}), Errc::kShape,
       "q of a step must be [B, 1, Hk, Dk], got [2, 5, 2, 8]"},
      {"state of a step", step(one, meta({1, 4, 6, 8}), {}), Errc::kShape,
       "state must be [2, 4, 6, 8], got [1, 4, 6, 8]"},
      {"a view as state", step(one, meta({2, 4, 6, 16}).slice(3, 0, 16, 2), {}), Errc::kShape,
       "state must be contiguous, for it is changed in place, got strides"},
  });
  EXPECT_FALSE(check(good, {.initial_state = state, .mask = meta({2, 5}, DType::kBool)}));
  EXPECT_FALSE(check(packed, {.sequence_starts = starts, .initial_state = state}));
  EXPECT_FALSE(with(&In::decay, meta({2, 5, 4, 8})));
  EXPECT_FALSE(bwd({}, state));
  EXPECT_FALSE(step(one, state, {}));
}

class GatedDeltaRule : public OnDevice {
 protected:
  GatedDeltaRuleInputs inputs_of(const Oracle& o, DType dtype, bool strided) {
    const Case& c = o.c;
    const auto up = [&](int which, std::initializer_list<std::int64_t> more) {
      const auto& values = o.in[static_cast<std::size_t>(which)];
      return strided ? upload_strided(values, c.axes(more), dtype)
                     : upload(values, c.axes(more), dtype);
    };
    return {up(kQ, {c.key_heads, c.dk}), up(kK, {c.key_heads, c.dk}), up(kV, {c.heads, c.dv}),
            upload(o.in[kDecay], c.per_channel ? c.axes({c.heads, c.dk}) : c.axes({c.heads}),
                   DType::kF32),
            upload(o.in[kBeta], c.axes({c.heads}), DType::kF32)};
  }
  GatedDeltaRuleOptions options_of(const Oracle& o) {
    const Case& c = o.c;
    GatedDeltaRuleOptions options;
    options.log_decay = c.log_decay;
    options.normalise = c.normalise;
    options.scale = c.scale;
    options.want_final_state = true;
    if (c.initial) options.initial_state = upload(o.in[kState], c.state(), DType::kF32);
    if (c.masked) {
      std::vector<double> mask(o.mask.begin(), o.mask.end());
      options.mask = upload(mask, c.axes({}), DType::kBool);
    }
    if (c.packed) {
      std::vector<double> starts{0};
      for (const std::int64_t n : c.lengths)
        starts.push_back(starts.back() + static_cast<double>(n));
      options.sequence_starts =
          upload(starts, {static_cast<std::int64_t>(starts.size())}, DType::kI32);
    }
    return options;
  }

  // vanishing: numbers may be smaller than what is allowed, so that planted mistakes are, too.
  void check(const Case& c, DType dtype, bool strided = false, bool vanishing = false,
             double rounding = kBlur) {
    const auto expect_close = [&](const std::string& what, const std::vector<double>& got,
                                  const Refs& refs, DType stored, std::int64_t terms) {
      if (!vanishing) return test::expect_close(what, got, refs, stored, terms);
      EXPECT_EQ(count_wrong(got, refs, stored, terms), 0) << what;
    };
    const Oracle o = oracle_of(c, dtype, static_cast<std::uint64_t>(c.tokens() + c.dk));
    const Expected want = expected_of(o, dtype, rounding);
    const GatedDeltaRuleOptions options = options_of(o);
    Tape tape(encoder());
    GatedDeltaRuleInputs in = inputs_of(o, dtype, strided);
    GatedDeltaRuleOptions watched = options;
    for (Tensor* t : {&in.q, &in.k, &in.v, &in.decay, &in.beta}) *t = tape.watch(*t);
    if (c.initial) watched.initial_state = tape.watch(options.initial_state);
    const auto result = ops::gated_delta_rule(tape, in, watched);
    const std::string at = " T " + std::to_string(c.tokens()) + " heads " +
                           std::to_string(c.key_heads) + "/" + std::to_string(c.heads) + " of " +
                           std::to_string(c.dk) + "/" + std::to_string(c.dv) + " " + name_of(dtype);
    expect_close("y" + at, download(result.y), want.y, dtype, 0);
    expect_close("state" + at, download(result.final_state), want.final_state, DType::kF32, 0);
    if (c.tokens() == 0) return;
    tape.backward({{result.y, upload(o.in[kDy], c.axes({c.heads, c.dv}), dtype)},
                   {result.final_state, upload(o.in[kDFinal], c.state(), DType::kF32)}});
    expect_close("dq" + at, download(tape.grad(in.q)), want.grads[kQ], dtype, 0);
    expect_close("dk" + at, download(tape.grad(in.k)), want.grads[kK], dtype, 0);
    expect_close("dv" + at, download(tape.grad(in.v)), want.grads[kV], dtype, 0);
    expect_close("ddecay" + at, download(tape.grad(in.decay)), want.grads[kDecay], DType::kF32, 0);
    expect_close("dbeta" + at, download(tape.grad(in.beta)), want.grads[kBeta], DType::kF32, 0);
    if (c.initial) {
      expect_close("dstate" + at, download(tape.grad(watched.initial_state)), want.grads[kState],
                   DType::kF32, 0);
    }
  }
};

TEST_P(GatedDeltaRule, MatchesOracleForEveryLength) {
  for (const std::int64_t length : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300}) {
    check({{length}, 1, 2, 8, 16}, DType::kF32);
  }
  check({{0, 0}, 1, 2, 8, 16}, DType::kF32);
}

TEST_P(GatedDeltaRule, MatchesOracleForEveryWidth) {
  for (const auto& [dk, dv] : std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1},
                                                                                 {1, 33},
                                                                                 {15, 17},
                                                                                 {16, 16},
                                                                                 {33, 1},
                                                                                 {64, 128},
                                                                                 {100, 60},
                                                                                 {128, 128},
                                                                                 {256, 256}}) {
    check({{37}, 1, 1, dk, dv}, DType::kF32);
  }
}

TEST_P(GatedDeltaRule, MatchesOracleForEveryOption) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool per_channel : {false, true}) {
      for (const bool log_decay : {false, true}) {
        for (const bool normalise : {false, true}) {
          const std::int64_t tokens = 24 + scaled(16);
          Case c{{tokens, tokens}, 2, 6, 24, 20, per_channel, log_decay, normalise};
          c.initial = per_channel == log_decay;
          c.masked = normalise;
          c.scale = 0.25;
          check(c, dtype, log_decay);
        }
      }
    }
  }
}

// Heads as models have them may be multiplied in their own type on the tensor cores of a GPU: what stands between two
// products is then rounded to it.
TEST_P(GatedDeltaRule, WideHeadsOfSixteenBits) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const double rounding = dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
    const std::int64_t longest = 80 + scaled(120);
    for (const std::int64_t length :
         {std::int64_t{1}, std::int64_t{63}, std::int64_t{64}, std::int64_t{65}, longest}) {
      if (dtype == DType::kF16 && length < 65) continue;
      const std::int64_t width = 80 + scaled(48);
      Case c{{length}, 1, 2, width, width};
      if (length < 65) c.lengths = {length, length};
      c.normalise = true;
      c.masked = length == 65;
      c.log_decay = length != 63;
      c.initial = length != 64;
      c.low = length == longest ? -0.05 : -2;
      c.scale = 0.088;
      check(c, dtype, length == 64, true, rounding);
    }
  }
}

// What a long sequence adds up: states that hardly fade over thousands of tokens.
TEST_P(GatedDeltaRule, LongSequences) {
  for (const double low : {-1e-3, -0.3}) {
    Case c{{scaled(16384)}, 1, 1, 8, 8};
    c.normalise = true;
    c.low = low;
    check(c, DType::kF32);
  }
}

TEST_P(GatedDeltaRule, PackedSequencesAreApart) {
  for (const bool per_channel : {false, true}) {
    Case c{{17, 0, 1, 64, 130, 5}, 2, 4, 16, 16, per_channel};
    c.packed = true;
    check(c, DType::kF32);
    c.masked = true;
    check(c, DType::kBF16);
  }
}

// Starts of 64 bits, of which the first and the last count as the ends and others go no further back.
TEST_P(GatedDeltaRule, StartsAreKeptInOrder) {
  Case c{{12, 0, 8}, 1, 2, 8, 8};
  c.packed = true;
  const Oracle o = oracle_of(c, DType::kF32, 5);
  const GatedDeltaRuleInputs in = inputs_of(o, DType::kF32, false);
  GatedDeltaRuleOptions options = options_of(o);
  const auto bits = [&] {
    const auto r = ops::gated_delta_rule(encoder(), in, options);
    return std::pair{bits_of(encoder(), r.y), bits_of(encoder(), r.final_state)};
  };
  const auto want = bits();
  for (const DType type : {DType::kI32, DType::kI64}) {
    options.sequence_starts = upload({3, 12, 7, 99}, {4}, type);
    EXPECT_EQ(bits(), want);
  }
}

// Decays that are gone within a token, hardly any decay, and β of 0 and 1.
TEST_P(GatedDeltaRule, ExtremeDecays) {
  for (const bool per_channel : {false, true}) {
    for (const bool log_decay : {false, true}) {
      for (const auto& [low, high] :
           std::vector<std::pair<double, double>>{{-200, -50}, {-1e-6, 0}, {-90, 0}, {-1e4, 0}}) {
        Case c{{50}, 1, 1, 16, 16, per_channel, log_decay, true};
        c.low = low;
        c.high = high;
        check(c, DType::kF32, false, true);
      }
    }
  }
}

TEST_P(GatedDeltaRule, StepsAreTheSame) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool per_channel : {false, true}) {
      const std::int64_t dk =
          per_channel ? 20 : 18;  // with and without whole packs in a state's rows
      Case c{{9, 9}, 2, 4, dk, 12, per_channel, true, true};
      c.masked = true;
      c.scale = 0.5;
      const Oracle o = oracle_of(c, dtype, 5);
      const Expected want = expected_of(o, dtype);
      const GatedDeltaRuleInputs in = inputs_of(o, dtype, false);
      const GatedDeltaRuleOptions all = options_of(o);
      const Tensor state = all.initial_state;
      std::vector<double> y(o.y.size());
      for (std::int64_t t = 0; t < 9; ++t) {
        GatedDeltaRuleOptions options = all;
        options.initial_state = {};
        const auto at = [&](const Tensor& x) {
          return x.slice(1, t, t + 1);
        };
        options.mask = at(all.mask);
        const auto row = download(ops::gated_delta_rule_step(
            encoder(), {at(in.q), at(in.k), at(in.v), at(in.decay), at(in.beta)}, state, options));
        const std::size_t width = 4 * 12;
        for (std::size_t b = 0; b < 2; ++b) {
          for (std::size_t i = 0; i < width; ++i) {
            y[(b * 9 + static_cast<std::size_t>(t)) * width + i] = row[b * width + i];
          }
        }
      }
      expect_close("y", y, want.y, dtype, 0);
      expect_close("state", download(state), want.final_state, DType::kF32, 0);
    }
  }
}

// mlx_lm.models.gated_delta.gated_delta_ops(q, k, v, g, beta, state, mask), and mx.grad of (y·dy).sum() +
// (state·d_final).sum(). Where the mask is false that function gives y as if it were true, and mlx_lm's Metal kernel 0, as
// here: y of those tokens is left out of the comparison.
TEST_P(GatedDeltaRule, AsMlx) {
  using Values = std::vector<double>;
  const auto up = [&](const Values& values, Shape shape) {
    return upload(values, std::move(shape), DType::kF32);
  };
  GatedDeltaRuleInputs in{
      up({-0.40625, 0.03125, 0.46875, -0.28125, 0.15625, -0.59375}, {1, 3, 1, 2}),
      up({-0.34375, -0.03125, 0.28125, -0.46875, -0.15625, 0.15625}, {1, 3, 1, 2}),
      up({-1.0625, 0.3125, -1.1875, 0.1875, -1.3125, 0.0625, -1.4375, -0.0625, 1.3125, -0.1875,
          1.1875, -0.3125},
         {1, 3, 2, 2}),
      {},
      up({0.5, 1, 0.25, 0.75, 0.625, 0.375}, {1, 3, 2})};
  const Tensor by_head = up({0.5, 0.25, 0.75, 1, 0.125, 0.875}, {1, 3, 2});
  const Tensor by_channel =
      up({0.5, 0.25, 0.75, 1, 0.125, 0.875, 0.375, 0.625, 0.5, 0.9375, 0.0625, 0.25}, {1, 3, 2, 2});
  const Tensor state =
      up({-0.4375, -0.0625, 0.3125, 0.6875, -0.5625, -0.1875, 0.1875, 0.5625}, {1, 2, 2, 2});
  const Tensor mask = upload({1, 0, 1}, {1, 3}, DType::kBool);
  const Tensor dy = up({-0.4375, -0.0625, 0.3125, 0.6875, -0.5625, -0.1875, 0.1875, 0.5625, -0.6875,
                        -0.3125, 0.0625, 0.4375},
                       {1, 3, 2, 2});
  const Tensor d_final =
      up({-0.3125, 0.3125, -0.4375, 0.1875, -0.5625, 0.0625, -0.6875, -0.0625}, {1, 2, 2, 2});
  const auto close = [&](const char* what, const Values& got, const Values& want) {
    expect_close(what, got, refs_of(want, 1), DType::kF32, 8);
  };
  const auto expect = [&](const char* what, const Tensor& decay, GatedDeltaRuleOptions o,
                          Values want_y, const Values& want_state) {
    in.decay = decay;
    o.log_decay = false;
    o.want_final_state = true;
    const auto r = ops::gated_delta_rule(encoder(), in, o);
    if (o.mask.defined()) std::fill_n(want_y.begin() + 4, 4, 0);
    close(what, download(r.y), want_y);
    close(what, download(r.final_state), want_state);
  };
  expect("by head", by_head, {},
         {-0.0736694336, 0.0216674805, -0.164672852, 0.0260009766, -0.0279723555, -0.0130992383,
          -0.122626662, -0.0378824472, -0.107743815, 0.0139772072, -0.337311417, -0.00148870517},
         {-0.122632787, 0.149191484, 0.0139530133, -0.0198687147, 0.00824214518, 0.570272446,
          -0.0461010188, -0.00962455384});
  expect("by channel, state", by_channel, {.initial_state = state},
         {0.00946187973, -0.0323414803, -0.0200681686, -0.00440883636, -0.0882916749, -0.0270596743,
          -0.261187017, -0.0694240704, -0.187901318, -0.0559610948, -0.118173502, -0.031883575},
         {-0.172752336, 0.27100426, 0.030271031, 0.102216326, -0.0870952681, 0.176109254,
          0.0215029307, 0.059357319});
  expect("by head, state, mask", by_head, {.initial_state = state, .mask = mask},
         {0.00893974304, -0.0265979767, -0.115915298, 0.0141963959, -0.0917702764, -0.0284352303,
          -0.165105402, -0.0478237048, -0.0955678299, -0.0092038177, -0.0107563175, -0.0583623536},
         {-0.131035656, 0.126473278, 0.0302131623, 0.0234519988, 0.177184656, 0.0647434443,
          -0.00196693465, 0.0977768749});

  const auto expect_back = [&](const char* what, const Tensor& decay,
                               const std::vector<Values>& want) {
    in.decay = decay;
    const auto g = ops::gated_delta_rule_backward(
        encoder(), in, dy, {.log_decay = false, .initial_state = state}, d_final);
    const Tensor got[] = {g.dq, g.dk, g.dv, g.d_decay, g.d_beta, g.d_initial_state};
    for (std::size_t i = 0; i < want.size(); ++i) close(what, download(got[i]), want[i]);
  };
  expect_back(
      "back by head", by_head,
      {{0.0764007568, 0.0744171143, 0.0268487707, 0.0479682609, 0.0819302201, -0.0288006887},
       {0.520751059, -0.107023098, 0.564831674, -0.0477425158, -0.435872614, 0.57337594},
       {0.0056898403, 0.0128056416, 0.17312701, 0.211930811, -0.0509188324, -0.0217912048,
        -0.070144996, 0.0974337906, 0.11138916, 0.0839233398, 0.0338745117, 0.0173950195},
       {0.0304778088, -0.046227634, 0.0205919687, -0.15094471, 0.191684902, 0.00189395621},
       {-0.00330346823, -0.1701276, 0.253178149, 0.143241316, 0.207453668, 0.0848409235},
       {-0.0225294828, 0.0765956789, -0.0379463732, 0.0320403315, -0.109708279, -0.0132133709,
        -0.127386704, -0.0921961144}});
  expect_back(
      "back by channel", by_channel,
      {{0.053068161, 0.324426651, 0.0160890631, 0.145164788, 0.113271616, -0.181282386},
       {0.0201444775, -0.353193462, 0.095580183, -0.252197564, -0.435946584, 0.548609614},
       {-0.0314760543, -0.00267114351, 0.0381090567, 0.0745592862, -0.128496543, -0.0685396045,
        0.0280952081, 0.131672919, 0.11138916, 0.0839233398, 0.0338745117, 0.0173950195},
       {-0.0538506657, 0.173486367, 0.0200510621, -0.0470933542, -0.0182820186, 0.0610952154,
        0.0118146073, -0.0935324654, 0.0285592563, 0.156291917, 0.138914123, -0.0932090357},
       {0.069665961, -0.0321096927, 0.638815284, -0.0390376896, 0.20100762, 0.0904401094},
       {0.0566578135, 0.161998287, -0.00684012845, 0.0778130665, -0.0725159869, -0.0106311627,
        -0.137343705, -0.0872652382}});
}

TEST_P(GatedDeltaRule, AStepRefusesInputsInTheStatesBuffer) {
  const Tensor all = encoder().zeros({64}, DType::kF32);
  const auto part = [&](std::int64_t from, Shape shape) {
    return all.slice(0, from, from + *element_count(shape)).reshape(shape);
  };
  const auto apart = [&](const Shape& shape) {
    return encoder().zeros(shape, DType::kF32);
  };
  const Tensor state = part(0, {1, 1, 4, 4});
  const GatedDeltaRuleInputs good{apart({1, 1, 1, 4}), apart({1, 1, 1, 4}), apart({1, 1, 1, 4}),
                                  apart({1, 1, 1}), apart({1, 1, 1})};
  EXPECT_FALSE(ops::gated_delta_rule_step_check(good, state));
  const auto with = [&](Tensor GatedDeltaRuleInputs::* which) {
    GatedDeltaRuleInputs in = good;
    in.*which = part(32, (in.*which).shape());
    return ops::gated_delta_rule_step_check(in, state);
  };
  using In = GatedDeltaRuleInputs;
  expect_refused({
      {"q", with(&In::q), Errc::kArgument, "state must lie in a buffer of its own"},
      {"beta", with(&In::beta), Errc::kArgument, "got that of beta"},
  });
}

// 4096 tokens of an eighth of Qwen3-Next's heads, forward and back. The chunked rule made of a framework's own ops keeps
// f32 squares and states of every chunk for all heads, 2.5 GB: here little is held beyond what goes in and comes out.
TEST_P(GatedDeltaRule, LittleMemory) {
  const std::int64_t tokens = scaled(4096), key_heads = 2, heads = 4, width = 16 + scaled(112);
  MemoryPool& memory = encoder().device().memory();
  const std::size_t before = memory.stats().current;
  memory.reset_peak();
  const auto zeros = [&](const Shape& shape) {
    return encoder().zeros(shape, DType::kF32);
  };
  Tape tape(encoder());
  GatedDeltaRuleInputs in{zeros({1, tokens, key_heads, width}),
                          zeros({1, tokens, key_heads, width}), zeros({1, tokens, heads, width}),
                          zeros({1, tokens, heads}), zeros({1, tokens, heads})};
  for (Tensor* t : {&in.q, &in.k, &in.v, &in.decay, &in.beta}) *t = tape.watch(*t);
  const Tensor y = ops::gated_delta_rule(tape, in, {.normalise = true}).y;
  tape.backward(y, zeros(y.shape()));
  std::size_t held = 2 * y.bytes();  // with dy
  for (const Tensor& t : {in.q, in.k, in.v, in.decay, in.beta})
    held += t.bytes() + tape.grad(t).bytes();
  const std::size_t peak = memory.stats().peak - before;
  const bool host = GetParam() == Backend::kCpu;
  EXPECT_LE(peak, host ? held * 5 / 4 : std::size_t{2'500'000'000} / 8) << held;
}

TEST_P(GatedDeltaRule, SameBitsOnEveryRun) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::int64_t width = dtype == DType::kF32 ? 16 : 64 + scaled(64);
    const std::int64_t tokens = dtype == DType::kF32 ? 70 : 20 + scaled(50);
    Case c{{tokens, tokens}, 2, 4, width, width};
    const Oracle o = oracle_of(c, dtype, 3);
    const GatedDeltaRuleInputs in = inputs_of(o, dtype, false);
    const GatedDeltaRuleOptions options = options_of(o);
    const Tensor dy = upload(o.in[kDy], c.axes({c.heads, c.dv}), dtype);
    const Tensor d_final = upload(o.in[kDFinal], c.state(), DType::kF32);
    expect_repeatable(encoder(), [&] {
      const auto r = ops::gated_delta_rule(encoder(), in, options);
      const auto g = ops::gated_delta_rule_backward(encoder(), in, dy, options, d_final);
      return std::vector<Tensor>{r.y,  r.final_state, g.dq,     g.dk,
                                 g.dv, g.d_decay,     g.d_beta, g.d_initial_state};
    });
  }
}

MT_ON_EVERY_BACKEND(GatedDeltaRule);

}  // namespace
}  // namespace mlxtape::test
