#include "mlxtape/ops/optimiser.h"

#include <cmath>

#include "support/optimiser_support.h"

namespace mlxtape::test {
namespace {

using ops::AdamWOptions;
using ops::AdamWSlot;
using ops::LionOptions;
using ops::LionSlot;
using ops::SgdOptions;
using ops::SgdSlot;

// One element's step in double, each result with the size of its terms.
struct AdamWRef {
  Ref w, m, v;
};
AdamWRef adamw(double w, double g, double m, double v, double lr, int t, const AdamWOptions& o) {
  const double b1 = o.beta1, b2 = o.beta2;
  AdamWRef r{};
  r.m = {b1 * m + (1 - b1) * g, std::abs(b1 * m) + std::abs((1 - b1) * g)};
  r.v.value = r.v.scale = b2 * v + (1 - b2) * g * g;
  const double c1 = o.bias_correction ? 1 / (1 - std::pow(b1, t)) : 1;
  const double c2 = o.bias_correction ? 1 / std::sqrt(1 - std::pow(b2, t)) : 1;
  const double under = std::sqrt(r.v.value) * c2 + static_cast<double>(o.eps);
  const double keep = w * (1 - lr * static_cast<double>(o.weight_decay));
  r.w = {keep - lr * c1 * r.m.value / under, std::abs(keep) + lr * c1 * r.m.scale / under};
  return r;
}

class Optimiser : public OptimiserTest {
 protected:
  // Parameters of these sizes at once; offset moves every array past an aligned address.
  void check_adamw(DType dtype, DType grads, bool master, const AdamWOptions& o,
                   const std::vector<std::int64_t>& sizes, double scale = 1,
                   std::int64_t offset = 0) {
    Noise noise(sizes.size() + static_cast<std::uint64_t>(offset));
    constexpr int kStep = 3;
    const double lr = round_to(DType::kF32, 0.03);
    std::vector<AdamWSlot> slots;
    std::vector<Values> w, g, m, v;
    for (const std::int64_t n : sizes) {
      w.push_back(random_values(noise, n, master ? DType::kF32 : dtype));
      g.push_back(random_values(noise, n, grads));
      m.push_back(random_values(noise, n, DType::kF32));
      v.push_back(random_values(noise, n, DType::kF32));
      for (double& x : v.back()) x = std::abs(x);
      AdamWSlot s{upload(w.back(), {n}, dtype, offset), upload(g.back(), {n}, grads, offset),
                  upload(m.back(), {n}, DType::kF32, offset),
                  upload(v.back(), {n}, DType::kF32, offset)};
      if (master) s.master = upload(w.back(), {n}, DType::kF32, offset);
      slots.push_back(s);
    }
    const Tensor t = count(kStep - 1);
    ops::advance(encoder(), t);
    ops::adamw_step(encoder(), slots, {number(lr), t, scale == 1 ? Tensor() : number(scale)}, o);
    for (std::size_t p = 0; p < sizes.size(); ++p) {
      Refs want_w, want_m, want_v;
      for (std::size_t i = 0; i < w[p].size(); ++i) {
        const AdamWRef r = adamw(w[p][i], g[p][i] * scale, m[p][i], v[p][i], lr, kStep, o);
        want_w.push_back(r.w);
        want_m.push_back(r.m);
        want_v.push_back(r.v);
      }
      const std::string at = std::string(name_of(dtype)) + " parameter " + std::to_string(p);
      expect_close("m " + at, download(slots[p].m), want_m, DType::kF32, 4);
      expect_close("v " + at, download(slots[p].v), want_v, DType::kF32, 4);
      expect_close("w " + at, download(slots[p].w), want_w, dtype, 16);
      if (master) expect_close("master " + at, download(slots[p].master), want_w, DType::kF32, 16);
    }
  }
};

const std::vector<std::int64_t> kSizes = {1, 0, 33, 5000, 16384, 16385, 40001};

TEST_P(Optimiser, AdamWMatchesOracleForEveryType) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    check_adamw(dtype, dtype, false, {}, kSizes);
    check_adamw(dtype, DType::kF32, false, {}, kSizes, 0.25);
    check_adamw(dtype, dtype, true, {.bias_correction = true}, kSizes, 0.5, 1);
    check_adamw(dtype, DType::kF32, true, {.weight_decay = 0, .bias_correction = true}, kSizes);
  }
}

TEST_P(Optimiser, AdamWOverManyParameters) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t i = 0; i < 150; ++i) sizes.push_back(17 + i % 40);
  check_adamw(DType::kF32, DType::kF32, false, {}, sizes);
  check_adamw(DType::kBF16, DType::kBF16, true, {}, sizes);
}

TEST_P(Optimiser, KindsMayBeMixed) {
  const auto slot = [&](DType dtype, DType grad) {
    return AdamWSlot{upload({1, 2}, {2}, dtype), upload({1, 1}, {2}, grad),
                     upload({0, 0}, {2}, DType::kF32), upload({0, 0}, {2}, DType::kF32)};
  };
  const std::vector<AdamWSlot> slots = {slot(DType::kF32, DType::kF32),
                                        slot(DType::kBF16, DType::kBF16),
                                        slot(DType::kBF16, DType::kF32)};
  ops::adamw_step(encoder(), slots, {number(0.5), count(1)},
                  {.weight_decay = 0, .bias_correction = true});
  for (const AdamWSlot& s : slots) {
    const Values w = download(s.w);
    EXPECT_NEAR(w[0], 0.5, 1e-2);  // the first step is lr long
    EXPECT_NEAR(w[1], 1.5, 1e-2);
  }
}

TEST_P(Optimiser, SgdMatchesOracle) {
  const SgdOptions forms[] = {{},
                              {.weight_decay = 0.1F},
                              {.momentum = 0.9F},
                              {.momentum = 0.9F, .weight_decay = 0.1F, .dampening = 0.3F},
                              {.momentum = 0.9F, .weight_decay = 0.1F, .nesterov = true}};
  for (const SgdOptions& o : forms) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool master : {false, true}) {
        Noise noise(9);
        const double lr = round_to(DType::kF32, 0.1), scale = 0.5;
        std::vector<SgdSlot> slots;
        std::vector<Values> w, g, v;
        for (const std::int64_t n : kSizes) {
          w.push_back(random_values(noise, n, master ? DType::kF32 : dtype));
          g.push_back(random_values(noise, n, dtype));
          v.push_back(random_values(noise, n, DType::kF32));
          SgdSlot s{upload(w.back(), {n}, dtype), upload(g.back(), {n}, dtype)};
          if (o.momentum != 0) s.v = upload(v.back(), {n}, DType::kF32);
          if (master) s.master = upload(w.back(), {n}, DType::kF32);
          slots.push_back(s);
        }
        ops::sgd_step(encoder(), slots, {number(lr), {}, number(scale)}, o);
        for (std::size_t p = 0; p < kSizes.size(); ++p) {
          Refs want_w, want_v;
          for (std::size_t i = 0; i < w[p].size(); ++i) {
            const double decay = o.weight_decay, momentum = o.momentum, rest = 1 - o.dampening;
            const double grad = scale * g[p][i] + decay * w[p][i];
            const double size = std::abs(scale * g[p][i]) + std::abs(decay * w[p][i]);
            const double moved = momentum * v[p][i] + rest * grad;
            const double moved_size = std::abs(momentum * v[p][i]) + rest * size;
            want_v.push_back({moved, moved_size});
            double step = grad, step_size = size;
            if (momentum != 0) {
              step = o.nesterov ? grad + momentum * moved : moved;
              step_size = o.nesterov ? size + momentum * moved_size : moved_size;
            }
            want_w.push_back({w[p][i] - lr * step, std::abs(w[p][i]) + lr * step_size});
          }
          expect_close("w", download(slots[p].w), want_w, dtype, 8);
          if (o.momentum != 0) expect_close("v", download(slots[p].v), want_v, DType::kF32, 4);
          if (master) expect_close("master", download(slots[p].master), want_w, DType::kF32, 8);
        }
      }
    }
  }
}

// Gradients and moments of few bits: c is exact in f32, and so is its sign, also where it is 0.
TEST_P(Optimiser, LionMatchesOracle) {
  const LionOptions forms[] = {{.beta1 = 0.5, .beta2 = 0.75},
                               {.beta1 = 0.75, .beta2 = 0.9375, .weight_decay = 0.3F}};
  const auto few = [](Noise& noise, std::int64_t n) {
    Values values;
    for (std::int64_t i = 0; i < n; ++i) values.push_back((noise.below(17) - 8.0) / 8);
    return values;
  };
  for (const LionOptions& o : forms) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const bool master : {false, true}) {
        Noise noise(11);
        const double lr = round_to(DType::kF32, 0.1), scale = 0.5, decay = o.weight_decay;
        const DType grads = master ? DType::kF32 : dtype;
        std::vector<LionSlot> slots;
        std::vector<Values> w, g, m;
        for (const std::int64_t n : kSizes) {
          w.push_back(random_values(noise, n, master ? DType::kF32 : dtype));
          g.push_back(few(noise, n));
          m.push_back(few(noise, n));
          LionSlot s{upload(w.back(), {n}, dtype), upload(g.back(), {n}, grads),
                     upload(m.back(), {n}, DType::kF32)};
          if (master) s.master = upload(w.back(), {n}, DType::kF32);
          slots.push_back(s);
        }
        ops::lion_step(encoder(), slots, {number(lr), {}, number(scale)}, o);
        std::size_t ties = 0;
        for (std::size_t p = 0; p < kSizes.size(); ++p) {
          Refs want_w, want_m;
          for (std::size_t i = 0; i < w[p].size(); ++i) {
            const double grad = scale * g[p][i];
            const double c = o.beta1 * m[p][i] + (1 - o.beta1) * grad;
            const double moved = o.beta2 * m[p][i] + (1 - o.beta2) * grad;
            want_m.push_back({moved, std::abs(m[p][i]) + std::abs(grad)});
            const double sign = c > 0 ? 1 : c < 0 ? -1 : 0;
            ties += c == 0 ? 1U : 0U;
            const double keep = w[p][i] * (1 - lr * decay);
            want_w.push_back({keep - lr * sign, std::abs(keep) + lr});
          }
          expect_close("w", download(slots[p].w), want_w, dtype, 8);
          expect_close("m", download(slots[p].m), want_m, DType::kF32, 4);
          if (master) expect_close("master", download(slots[p].master), want_w, DType::kF32, 8);
        }
        EXPECT_GT(ties, 0U);
      }
    }
  }
  const LionSlot bad{upload({1, 2}, {2}, DType::kF32), upload({NAN, 1}, {2}, DType::kF32),
                     encoder().zeros({2}, DType::kF32)};
  ops::lion_step(encoder(), {bad}, {number(0.5), {}});
  EXPECT_TRUE(std::isnan(download(bad.w)[0]));
  EXPECT_EQ(download(bad.w)[1], 1.5);
}

TEST_P(Optimiser, NormIsThatOfAllGradients) {
  Noise noise(4);
  for (const std::int64_t offset : {0, 1}) {
    std::vector<Tensor> grads;
    double sum = 0;
    std::int64_t n = 0;
    for (int i = 0; i < 70; ++i) {
      const DType dtype = i % 3 == 0 ? DType::kBF16 : i % 3 == 1 ? DType::kF32 : DType::kF16;
      const std::int64_t size = i == 5 ? 50000 : i == 6 ? 0 : 100 + i;
      const Values g = random_values(noise, size, dtype);
      for (const double x : g) sum += x * x;
      n += size;
      grads.push_back(upload(g, {size}, dtype, offset));
    }
    const auto got = ops::grad_norm(encoder(), grads, 1);
    const double norm = std::sqrt(sum);
    expect_close("norm", download(got.norm), {{norm, norm}}, DType::kF32, n);
    expect_close("scale", download(got.scale), {{1 / (norm + 1e-6), 1 / norm}}, DType::kF32, n);
    EXPECT_EQ(download(ops::grad_norm(encoder(), grads, 1e6F).scale), Values{1});
  }
  const auto bad = ops::grad_norm(encoder(), {upload({1, NAN}, {2}, DType::kF32)}, 1);
  EXPECT_TRUE(std::isnan(download(bad.norm)[0]));
}

// By rows, a row that is named makes the step that it would make alone, and no other row moves.
class OptimiserRows : public Optimiser {
 protected:
  static constexpr std::int64_t kTable = 40;
  struct Param {
    std::int64_t width;
    Values w, m, v, g;  // g [ids, width]
    Values ids;
  };
  static Param random_param(Noise& noise, std::int64_t width, DType dtype, DType grads) {
    Param p{width,
            random_values(noise, kTable * width, dtype),
            random_values(noise, kTable * width, DType::kF32),
            random_values(noise, kTable * width, DType::kF32),
            {},
            {}};
    for (double& x : p.v) x = std::abs(x);
    for (std::int64_t id = 0; id < kTable; ++id) {
      if (noise.below(3) == 0) p.ids.push_back(static_cast<double>(id));
    }
    p.ids.insert(p.ids.end(), {-1, -1, kTable});  // not used; and one outside
    p.g = random_values(noise, static_cast<std::int64_t>(p.ids.size()) * width, grads);
    return p;
  }
  static Values rows_of(const Values& all, const Param& p) {
    Values rows;
    const auto width = static_cast<std::size_t>(p.width);
    for (const double id : p.ids) {
      const auto at = static_cast<std::size_t>(id < 0 || id >= kTable ? 0 : id) * width;
      rows.insert(rows.end(), all.begin() + static_cast<std::ptrdiff_t>(at),
                  all.begin() + static_cast<std::ptrdiff_t>(at + width));
    }
    return rows;
  }
  // after [kTable, width] is before, but for the rows that moved has.
  void expect_moved(const Tensor& after, const Values& before, const Tensor& moved,
                    const Param& p) {
    Values want = before;
    const Values rows = download(moved);
    const auto width = static_cast<std::size_t>(p.width);
    for (std::size_t u = 0; u < p.ids.size(); ++u) {
      if (p.ids[u] < 0 || p.ids[u] >= kTable) continue;
      std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(u * width), width,
                  want.begin() + static_cast<std::ptrdiff_t>(p.ids[u]) * p.width);
    }
    EXPECT_EQ(download(after), want);
  }
  static constexpr std::int64_t kWidths[] = {1, 3, 4, 16, 33, 3001, 3004, 5, 8, 12, 64, 7};

  void check(DType dtype, DType grads, bool master, std::int64_t offset) {
    Noise noise(static_cast<std::uint64_t>(offset) + 3);
    std::vector<Param> params;
    std::vector<AdamWSlot> adamw, adamw_alone;
    std::vector<SgdSlot> sgd, sgd_alone;
    std::vector<LionSlot> lion, lion_alone;
    for (const std::int64_t width : kWidths) {
      params.push_back(random_param(noise, width, dtype, grads));
      const Param& p = params.back();
      const auto n = static_cast<std::int64_t>(p.ids.size());
      const Shape table{kTable, width}, few{n, width};
      const Tensor g = upload(p.g, few, grads, offset), ids = upload(p.ids, {n}, DType::kI32);
      const auto whole = [&](const Values& v, DType t) {
        return upload(v, table, t, offset);
      };
      const auto part = [&](const Values& v, DType t) {
        return upload(rows_of(v, p), few, t);
      };
      const auto f32 = DType::kF32;
      adamw.push_back({whole(p.w, dtype), g, whole(p.m, f32), whole(p.v, f32),
                       master ? whole(p.w, f32) : Tensor(), ids});
      adamw_alone.push_back({part(p.w, dtype), g, part(p.m, f32), part(p.v, f32),
                             master ? part(p.w, f32) : Tensor()});
      sgd.push_back(
          {whole(p.w, dtype), g, whole(p.v, f32), master ? whole(p.w, f32) : Tensor(), ids});
      sgd_alone.push_back(
          {part(p.w, dtype), g, part(p.v, f32), master ? part(p.w, f32) : Tensor()});
      lion.push_back(
          {whole(p.w, dtype), g, whole(p.m, f32), master ? whole(p.w, f32) : Tensor(), ids});
      lion_alone.push_back(
          {part(p.w, dtype), g, part(p.m, f32), master ? part(p.w, f32) : Tensor()});
    }
    const ops::StepNumbers numbers{number(0.1), count(3), number(0.5)};
    const AdamWOptions o{.bias_correction = true};
    ops::adamw_step(encoder(), adamw, numbers, o);
    ops::adamw_step(encoder(), adamw_alone, numbers, o);
    const SgdOptions momentum{.momentum = 0.9F, .weight_decay = 0.1F, .nesterov = true};
    ops::sgd_step(encoder(), sgd, numbers, momentum);
    ops::sgd_step(encoder(), sgd_alone, numbers, momentum);
    ops::lion_step(encoder(), lion, numbers, {.weight_decay = 0.1F});
    ops::lion_step(encoder(), lion_alone, numbers, {.weight_decay = 0.1F});
    for (std::size_t i = 0; i < params.size(); ++i) {
      const Param& p = params[i];
      expect_moved(adamw[i].w, p.w, adamw_alone[i].w, p);
      expect_moved(adamw[i].m, p.m, adamw_alone[i].m, p);
      expect_moved(adamw[i].v, p.v, adamw_alone[i].v, p);
      expect_moved(sgd[i].w, p.w, sgd_alone[i].w, p);
      expect_moved(sgd[i].v, p.v, sgd_alone[i].v, p);
      expect_moved(lion[i].w, p.w, lion_alone[i].w, p);
      expect_moved(lion[i].m, p.m, lion_alone[i].m, p);
      if (!master) continue;
      expect_moved(adamw[i].master, p.w, adamw_alone[i].master, p);
      expect_moved(sgd[i].master, p.w, sgd_alone[i].master, p);
      expect_moved(lion[i].master, p.w, lion_alone[i].master, p);
    }
  }
};

TEST_P(OptimiserRows, MovesTheNamedRowsAlone) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool master : {false, true}) {
      check(dtype, dtype, master, 0);
      check(dtype, DType::kF32, master, 1);
    }
  }
}

TEST_P(OptimiserRows, MixesWithDenseOnesAndMayBeEmpty) {
  const auto f32 = DType::kF32;
  const Tensor w = upload({1, 2, 3, 4}, {2, 2}, f32), u = upload({5, 6}, {2}, f32);
  const Tensor none = upload({7}, {1, 1}, f32);
  const SgdSlot by_rows{
      w, upload({1, 1, 9, 9}, {2, 2}, f32), {}, {}, upload({1, -1}, {2}, DType::kI32)};
  const SgdSlot dense{u, upload({1, 2}, {2}, f32)};
  const SgdSlot empty{
      none, encoder().empty({0, 1}, f32), {}, {}, encoder().empty({0}, DType::kI32)};
  ops::sgd_step(encoder(), {by_rows, empty, dense}, {number(1), {}});
  EXPECT_EQ(download(w), (Values{1, 2, 2, 3}));
  EXPECT_EQ(download(u), (Values{4, 4}));
  EXPECT_EQ(download(none), Values{7});
  // √(3² + 4² + 12²), with rows that are zero past the last
  const auto norm =
      ops::grad_norm(encoder(), {upload({3, 4, 0, 0}, {2, 2}, f32), upload({12}, {1}, f32)}, 1);
  EXPECT_EQ(download(norm.norm), Values{13});
}

TEST_P(Optimiser, SameBitsOnEveryRun) {
  Noise noise(2);
  const Values w = random_values(noise, 70001, DType::kF32),
               g = random_values(noise, 70001, DType::kF32);
  expect_repeatable(encoder(), [&] {
    const AdamWSlot s{upload(w, {70001}, DType::kF32), upload(g, {70001}, DType::kF32),
                      encoder().zeros({70001}, DType::kF32), encoder().zeros({70001}, DType::kF32)};
    const auto norm = ops::grad_norm(encoder(), {s.grad, s.grad}, 1);
    ops::adamw_step(encoder(), {s}, {number(0.1), count(1), norm.scale}, {});
    return std::vector<Tensor>{s.w, s.m, s.v, norm.norm};
  });
}

// Captured once, with a rate that changes between replays: the same as steps one by one.
// A step whose gradients are not finite can be told to be none, by its scale.
TEST_P(Optimiser, AScaleOfNaNMakesNoStep) {
  const auto ramp = [&](double from) {
    Values values(60);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = from + 0.1 * static_cast<double>(i);
    return upload(values, {6, 10}, DType::kF32);
  };
  const Tensor w = ramp(1), master = ramp(1), m = ramp(2), v = ramp(3);
  const Tensor g = upload(Values(60, NAN), {6, 10}, DType::kF32);
  const Tensor row = g.slice(0, 0, 1), id = encoder().full({1}, DType::kI32, 2);
  const auto same = [&](const char* what) {
    SCOPED_TRACE(what);
    EXPECT_EQ(download(w), download(ramp(1)));
    EXPECT_EQ(download(m), download(ramp(2)));
    EXPECT_EQ(download(v), download(ramp(3)));
  };
  const ops::StepNumbers none{number(0.1), count(1), number(NAN)};
  ops::adamw_step(encoder(), {{w, g, m, v}}, none, {});
  ops::adamw_step(encoder(), {{w, row, m, v, {}, id}}, none, {});
  same("adamw");
  ops::sgd_step(encoder(), {{w, g, m}}, none, {.momentum = 0.5F, .weight_decay = 0.1F});
  same("sgd");
  ops::lion_step(encoder(), {{w, g, m}}, none, {});
  same("lion");
  ops::muon_step(encoder(), {{w, g, m}}, none, {});
  same("muon");
  ops::sgd_step(encoder(), {{w, m}}, {number(0.1), {}, number(1)}, {});
  EXPECT_NE(download(w), download(ramp(1)));
}

TEST_P(Optimiser, AStepIsReplayedWithANewRate) {
  const Values start{1, 2, 3, 4}, g{0.5, -1, 2, 0.25};
  const auto make = [&] {
    return AdamWSlot{upload(start, {4}, DType::kF32), upload(g, {4}, DType::kF32),
                     encoder().zeros({4}, DType::kF32), encoder().zeros({4}, DType::kF32)};
  };
  const AdamWSlot once = make(), again = make();
  const Tensor lr = number(0.1), t = count(0), lr2 = number(0.1), t2 = count(0);
  const AdamWOptions o{.bias_correction = true};
  encoder().begin_capture();
  ops::advance(encoder(), t2);
  ops::adamw_step(encoder(), {again}, {lr2, t2}, o);
  const auto graph = encoder().end_capture();
  for (int i = 0; i < 4; ++i) {
    const auto rate = static_cast<float>(0.1 / (i + 1));
    encoder().upload(&rate, 4, lr);
    encoder().upload(&rate, 4, lr2);
    ops::advance(encoder(), t);
    ops::adamw_step(encoder(), {once}, {lr, t}, o);
    encoder().replay(*graph);
    EXPECT_EQ(bits_of(encoder(), once.w), bits_of(encoder(), again.w)) << i;
  }
  EXPECT_EQ(download(t2), Values{4});
}

// Slots write at once: what one of them writes must be no other's.
TEST_P(Optimiser, AParameterIsSteppedOnce) {
  const auto f32 = DType::kF32;
  const Tensor all = upload({1, 2, 3, 4, 5, 6}, {6}, f32), other = upload({1, 2}, {2}, f32);
  const auto part = [&](std::int64_t first) {
    const Tensor w = all.slice(0, first, first + 2);
    return AdamWSlot{w, upload({1, 1}, {2}, f32), encoder().zeros({2}, f32),
                     encoder().zeros({2}, f32)};
  };
  AdamWSlot apart = part(0);
  apart.w = other;
  const ops::StepNumbers numbers{number(0.1), count(1)};
  const auto check = [&](const std::vector<AdamWSlot>& slots) {
    return ops::adamw_step_check(slots, numbers, {});
  };
  const auto sgd = [&](const Tensor& a, const Tensor& b) {
    return ops::sgd_step_check({{a, part(0).grad}, {b, part(0).grad}}, numbers, {});
  };
  EXPECT_FALSE(check({part(4), apart, part(0), part(2)}));
  expect_refused({
      {"twice", check({part(2), apart, part(0), part(2)}), Errc::kArgument,
       "w of parameter 3 must have memory of its own, got that of parameter 0"},
      {"overlapping", check({part(3), part(0), part(4)}), Errc::kArgument, "parameter 2"},
      {"sgd", sgd(other, other), Errc::kArgument, "each parameter once"},
  });
  EXPECT_FALSE(sgd(all.slice(0, 0, 2), other));
}

TEST(OptimiserCheck, SaysWhatIsWrong) {
  const auto f32 = Tensor::meta({4}), f16 = Tensor::meta({4}, DType::kF16);
  const auto one = Tensor::meta({1}), step = Tensor::meta({1}, DType::kI32);
  const auto far = Tensor::meta({4}, DType::kF32, Backend::kMetal);
  const auto far_one = Tensor::meta({1}, DType::kF32, Backend::kMetal);
  const auto wide = Tensor::meta({5});
  const auto far_ids = Tensor::meta({2}, DType::kI32, Backend::kMetal);
  const auto wide_w = Tensor::meta({0, std::int64_t{1} << 40});
  const auto long_ids = Tensor::meta({std::int64_t{1} << 30}, DType::kI32);
  const auto strided = Tensor::meta({4, 2}).transpose({1, 0});
  const auto adamw = [&](const AdamWSlot& s, const ops::StepNumbers& n, AdamWOptions o = {}) {
    return ops::adamw_step_check({{f32, f32, f32, f32}, s}, n, o);
  };
  const AdamWSlot good{f32, f32, f32, f32};
  const ops::StepNumbers numbers{one, step};
  const auto sgd = [&](const SgdSlot& s, SgdOptions o) {
    return ops::sgd_step_check({s}, {one, {}}, o);
  };
  const auto lion = [&](const LionSlot& s, const LionOptions& o) {
    return ops::lion_step_check({s}, {one, {}}, o);
  };
  const auto square = Tensor::meta({4, 4});
  const auto muon = [&](const ops::MuonSlot& s, const ops::MuonOptions& o) {
    return ops::muon_step_check({s}, {one, {}}, o);
  };
  EXPECT_FALSE(adamw(good, numbers));
  expect_refused({
      {"beta1", adamw(good, numbers, {.beta1 = 1}), Errc::kArgument, "beta1 must be in [0, 1)"},
      {"beta2", adamw(good, numbers, {.beta2 = -1}), Errc::kArgument, "beta2 must be in [0, 1)"},
      {"eps", adamw(good, numbers, {.eps = -1}), Errc::kArgument, "eps must be at least 0"},
      {"decay", adamw(good, numbers, {.weight_decay = NAN}), Errc::kArgument,
       "weight_decay must be at least 0 and finite, got nan"},
      {"type", adamw({step, step, step, step}, numbers), Errc::kDType, "w of parameter 1"},
      {"device", adamw({far, far, far, far}, numbers), Errc::kDevice, "w of parameter 1"},
      {"strides", adamw({strided, strided, strided, strided}, numbers), Errc::kShape, "contiguous"},
      {"grad type", adamw({f32, f16, f32, f32}, numbers), Errc::kDType, "grad of parameter 1"},
      {"grad shape", adamw({f32, wide, f32, f32}, numbers), Errc::kShape, "[4], got [5]"},
      {"grad far", adamw({f32, far, f32, f32}, numbers), Errc::kDevice, "grad of parameter 1"},
      {"m", adamw({f32, f32, f16, f32}, numbers), Errc::kDType, "m of parameter 1 must be f32"},
      {"v", adamw({f32, f32, f32, f16}, numbers), Errc::kDType, "v of parameter 1 must be f32"},
      {"master", adamw({f16, f16, f32, f32, f16}, numbers), Errc::kDType, "master of parameter 1"},
      {"lr", adamw(good, {f32, step}), Errc::kShape, "lr must be one f32, got [4]"},
      {"lr type", adamw(good, {step, step}), Errc::kDType, "lr must be one f32, got [1] i32"},
      {"lr far", adamw(good, {far_one, step}), Errc::kDevice, "lr must be where"},
      {"t", adamw(good, {one, one}), Errc::kDType, "t must be one i32"},
      {"scale", adamw(good, {one, step, wide}), Errc::kShape, "scale must be one f32"},
      {"momentum", sgd({f32, f32}, {.momentum = 1}), Errc::kArgument, "momentum must be in [0, 1)"},
      {"nesterov", sgd({f32, f32}, {.nesterov = true}), Errc::kArgument, "nesterov needs momentum"},
      {"sgd decay", sgd({f32, f32}, {.weight_decay = -1}), Errc::kArgument, "weight_decay must be"},
      {"dampening", sgd({f32, f32}, {.dampening = -1}), Errc::kArgument, "dampening must be"},
      {"lion beta1", lion({f32, f32, f32}, {.beta1 = 1}), Errc::kArgument, "beta1 must be in"},
      {"lion beta2", lion({f32, f32, f32}, {.beta2 = 1}), Errc::kArgument, "beta2 must be in"},
      {"lion decay", lion({f32, f32, f32}, {.weight_decay = -1}), Errc::kArgument,
       "weight_decay must be"},
      {"lion m", lion({f32, f32, f16}, {}), Errc::kDType, "m of parameter 0 must be f32"},
      {"lion w", lion({step, step, f32}, {}), Errc::kDType, "w of parameter 0"},
      {"lion lr", ops::lion_step_check({{f32, f32, f32}}, {f32, {}}, {}), Errc::kShape, "lr must"},
      {"muon momentum", muon({square, square, square}, {.momentum = 1}), Errc::kArgument,
       "momentum must be in [0, 1)"},
      {"muon decay", muon({square, square, square}, {.weight_decay = -1}), Errc::kArgument,
       "weight_decay must be"},
      {"muon steps", muon({square, square, square}, {.ns_steps = 0}), Errc::kArgument,
       "ns_steps must be from 1 to 100, got 0"},
      {"muon rank", muon({f32, f32, f32}, {}), Errc::kShape,
       "w of parameter 0 must be a matrix or a stack of them, got [4]"},
      {"muon v", muon({square, square, f32}, {}), Errc::kShape, "v of parameter 0"},
      {"sgd v", sgd({f32, f32, f16}, {.momentum = 0.5F}), Errc::kDType, "v of parameter 0"},
      {"sgd w", sgd({step, step}, {}), Errc::kDType, "w of parameter 0"},
      {"sgd lr", ops::sgd_step_check({{f32, f32}}, {f32, {}}, {}), Errc::kShape, "lr must be"},
      {"ids", adamw({f32, f32, f32, f32, {}, far_ids.reshape({2, 1})}, numbers), Errc::kShape,
       "ids of parameter 1 must be [n] and it [V, …], got [2, 1]"},
      {"ids type", adamw({f32, f32, f32, f32, {}, one}, numbers), Errc::kDType,
       "ids of parameter 1"},
      {"ids far", adamw({f32, f32, f32, f32, {}, far_ids}, numbers), Errc::kDevice,
       "ids of parameter 1 must be where it is, cpu, got metal"},
      {"rows", adamw({f32, f32, f32, f32, {}, step}, numbers), Errc::kShape, "[1], got [4]"},
      {"rows size", adamw({wide_w, wide_w, wide_w, wide_w, {}, long_ids}, numbers), Errc::kShape,
       "must fit in 63 bits"},
      {"no grads", ops::grad_norm_check({}), Errc::kArgument, "got none"},
      {"grads type", ops::grad_norm_check({step}), Errc::kDType, "got i32"},
      {"grads strided", ops::grad_norm_check({strided}), Errc::kShape, "contiguous"},
      {"grads apart", ops::grad_norm_check({f32, far}), Errc::kDevice, "got metal"},
  });
  EXPECT_FALSE(ops::adamw_step_check({}, {}, {}));
  EXPECT_FALSE(ops::sgd_step_check({}, {}, {}));
  EXPECT_FALSE(ops::lion_step_check({}, {}, {}));
  EXPECT_FALSE(ops::muon_step_check({}, {}, {}));
}

MT_ON_EVERY_BACKEND(Optimiser);
MT_ON_EVERY_BACKEND(OptimiserRows);

}  // namespace
}  // namespace mlxtape::test
