#include "mlxtape/ops/optimiser.h"

#include <cmath>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::AdamWOptions;
using ops::AdamWSlot;
using ops::LionOptions;
using ops::LionSlot;
using ops::SgdOptions;
using ops::SgdSlot;

using Values = std::vector<double>;

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

class Optimiser : public OnDevice {
 protected:
  Tensor number(double v) { return upload({v}, {1}, DType::kF32); }
  Tensor count(int t) { return upload({static_cast<double>(t)}, {1}, DType::kI32); }

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

// Three steps of mlx.optimizers with lr 0.1 and these options: the parameters after each, and the states at the end.
TEST_P(Optimiser, AsMlx) {
  const Values start{1, -2, 0.5, 3};
  const Values grads[] = {{0.5, -1, 2, 0.25}, {-0.25, 1, 0.5, 0}, {1, 1, -1, 0.125}};
  const auto f32 = DType::kF32;
  const auto expect = [&](const char* what, const Tensor& t, const Values& want) {
    expect_close(what, download(t), refs_of(want, 1), f32, 8);
  };
  const auto adamw = [&](const AdamWOptions& options, const std::vector<Values>& w,
                         const Values& end_m, const Values& end_v) {
    AdamWSlot s{upload(start, {4}, f32), {}, encoder().zeros({4}, f32), encoder().zeros({4}, f32)};
    const Tensor t = count(0);
    for (std::size_t i = 0; i < 3; ++i) {
      s.grad = upload(grads[i], {4}, f32);
      ops::advance(encoder(), t);
      ops::adamw_step(encoder(), {s}, {number(0.1), t}, options);
      expect("w", s.w, w[i]);
    }
    expect_close("m", download(s.m), refs_of(end_m), f32, 8);
    expect_close("v", download(s.v), refs_of(end_v), f32, 8);
  };
  const Values plain_m{0.118000001, 0.109000005, 0.106999986, 0.0327499993};
  const Values plain_v{0.00131193781, 0.00299700117, 0.00524175446, 7.80000701e-05};
  adamw({},  // AdamW(0.1)
        {{0.682772398, -1.68177235, 0.183272272, 2.68077254},
         {0.56890732, -1.70245683, -0.169880971, 2.39334488},
         {0.242557734, -1.89985979, -0.317501187, 2.02013159}},
        plain_m, plain_v);
  adamw({.bias_correction = true},  // AdamW(0.1, bias_correction=True)
        {{0.899000704, -1.89800072, 0.399500668, 2.89700055},
         {0.871468246, -1.90136588, 0.316042244, 2.82709837},
         {0.804785848, -1.9396857, 0.285871148, 2.74936175}},
        plain_m, plain_v);
  const Values m{0.145507812, 0.138671875, 0.12109375, 0.0395507812};
  const Values v{0.040473938, 0.0908508301, 0.15612793, 0.00232124329};
  AdamWOptions o{.beta1 = 0.875, .beta2 = 0.96875};
  adamw(o,  // AdamW(0.1, betas=[0.875, 0.96875])
        {{0.928289354, -1.92728937, 0.428789318, 2.92628932},
         {0.90334183, -1.93166149, 0.350025564, 2.86050105},
         {0.830111861, -1.97573686, 0.319029003, 2.77554965}},
        m, v);
  o.weight_decay = 0;
  adamw(o,  // Adam(0.1, betas=[0.875, 0.96875])
        {{0.929289341, -1.92928934, 0.429289311, 2.92928934},
         {0.9052701, -1.93558872, 0.350954354, 2.86642742},
         {0.832943439, -1.98159575, 0.320307821, 2.78433657}},
        m, v);
  o.bias_correction = true;
  adamw(o,  // Adam(0.1, betas=[0.875, 0.96875], bias_correction=True)
        {{0.899999976, -1.89999998, 0.399999976, 2.9000001},
         {0.874580443, -1.90666664, 0.317098051, 2.83347344},
         {0.808534503, -1.94867849, 0.289112806, 2.7585113}},
        m, v);
  // AdamW(0.1, bias_correction=True, weight_decay=0.05, betas=[0.8, 0.95], eps=1e-6)
  adamw({.beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6F, .weight_decay = 0.05F, .bias_correction = true},
        {{0.89500016, -1.8900001, 0.397500038, 2.88500047},
         {0.869279265, -1.89166129, 0.314558893, 2.80690026},
         {0.796543479, -1.92974389, 0.291607827, 2.71936274}},
        {0.224000007, 0.231999993, 0.136000022, 0.0570000038},
        {0.0642499998, 0.142624989, 0.242375001, 0.00360156246});

  const auto sgd = [&](const SgdOptions& options, const std::vector<Values>& w,
                       const Values& velocity) {
    SgdSlot s{upload(start, {4}, f32), {}};
    if (options.momentum != 0) s.v = encoder().zeros({4}, f32);
    for (std::size_t i = 0; i < 3; ++i) {
      s.grad = upload(grads[i], {4}, f32);
      ops::sgd_step(encoder(), {s}, {number(0.1), {}}, options);
      expect("w", s.w, w[i]);
    }
    if (options.momentum != 0) expect("v", s.v, velocity);
  };
  sgd({},
      {{0.949999988, -1.89999998, 0.300000012, 2.9749999},
       {0.974999964, -2, 0.25, 2.9749999},
       {0.87499994, -2.0999999, 0.349999994, 2.96249986}},
      {});
  sgd({.weight_decay = 0.1F},
      {{0.939999998, -1.88, 0.295000017, 2.94499993},
       {0.955600023, -1.9612, 0.242050022, 2.91554999},
       {0.846044004, -2.04158807, 0.339629531, 2.87389445}},
      {});
  sgd({.momentum = 0.9F},
      {{0.949999988, -1.89999998, 0.300000012, 2.9749999},
       {0.930000007, -1.90999997, 0.0700000077, 2.95249987},
       {0.812000036, -2.01900005, -0.0369999856, 2.91974998}},
      {1.17999995, 1.09000003, 1.06999993, 0.327499986});
  sgd({.momentum = 0.9F, .weight_decay = 0.1F, .dampening = 0.3F},
      {{0.958000004, -1.91600001, 0.3565, 2.96149993},
       {0.930994034, -1.89698803, 0.189854488, 2.90611935},
       {0.830171704, -1.9365983, 0.108544551, 2.82718396}},
      {1.00822353, 0.396102816, 0.813099325, 0.789352834});
  sgd({.momentum = 0.9F, .weight_decay = 0.1F, .nesterov = true},
      {{0.885999978, -1.77199996, 0.110500008, 2.89549994},
       {0.868065953, -1.83113194, -0.152649492, 2.79593539},
       {0.630906105, -1.96550727, -0.150589198, 2.655514}},
      {1.4275465, 0.585406721, 1.10518003, 1.11068857});
  const auto lion = [&](const LionOptions& options, const std::vector<Values>& w,
                        const Values& end_m) {
    LionSlot s{upload(start, {4}, f32), {}, encoder().zeros({4}, f32)};
    for (std::size_t i = 0; i < 3; ++i) {
      s.grad = upload(grads[i], {4}, f32);
      ops::lion_step(encoder(), {s}, {number(0.1), {}}, options);
      expect("w", s.w, w[i]);
    }
    expect_close("m", download(s.m), refs_of(end_m), f32, 8);
  };
  lion({},  // Lion(0.1)
       {{0.899999976, -1.89999998, 0.400000006, 2.9000001},
        {1, -2, 0.300000012, 2.80000019},
        {0.899999976, -2.0999999, 0.400000006, 2.70000029}},
       {0.0124255, 0.0100989994, 0.014551999, 0.00370025006});
  lion({.beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.1F},
       {{0.889999986, -1.88, 0.395000011, 2.87000012},
        {0.981100023, -1.9612, 0.291050017, 2.74130034},
        {0.871289015, -2.04158807, 0.388139516, 2.61388755}},
       {0.060687501, 0.0523750037, 0.0639999956, 0.0175312497});
  lion({.beta1 = 0.5, .beta2 = 0.5},  // at the second step the first weight stays: its c is 0
       {{0.899999976, -1.89999998, 0.400000006, 2.9000001},
        {0.899999976, -2, 0.300000012, 2.80000019},
        {0.799999952, -2.0999999, 0.400000006, 2.70000029}},
       {0.5, 0.625, -0.125, 0.09375});
  // mlx.optimizers.clip_grad_norm(…, 1): a gradient times our scale
  const auto norm =
      ops::grad_norm(encoder(), {upload(grads[0], {4}, f32), upload(grads[1], {4}, f32)}, 1);
  expect("norm", norm.norm, {2.57390761});
  expect("scale", norm.scale, {0.388514191});
}

// Captured once, with a rate that changes between replays: the same as steps one by one.
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
}

MT_ON_EVERY_BACKEND(Optimiser);
MT_ON_EVERY_BACKEND(OptimiserRows);

}  // namespace
}  // namespace mlxtape::test
