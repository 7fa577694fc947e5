#include "mlxtape/ops/moe_route.h"

#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using Values = std::vector<double>;

const double kInf = INFINITY;
const double kNaN = std::nan("");

// A router's problem: logits [rows, experts].
struct Problem {
  std::int64_t rows, experts, k;
  bool full;
};

struct Expected {
  Values indices, counts, offsets;
  Refs scores, lse;
};

std::size_t at(std::int64_t r, std::int64_t width, std::int64_t c) {
  return static_cast<std::size_t>(r * width + c);
}

// The formula block of moe_route.h, in double.
Expected oracle(const Problem& p, const Values& x) {
  Expected e;
  e.counts.assign(static_cast<std::size_t>(p.experts), 0);
  for (std::int64_t r = 0; r < p.rows; ++r) {
    const double* row = x.data() + r * p.experts;
    std::vector<std::size_t> order(static_cast<std::size_t>(p.experts));
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      if (std::isnan(row[a]) != std::isnan(row[b])) return std::isnan(row[b]);
      return row[a] > row[b] || (!(row[a] < row[b]) && a < b);
    });
    order.resize(static_cast<std::size_t>(p.full ? p.experts : p.k));
    const double m = row[order[0]];
    double sum = 0;
    for (const std::size_t i : order) sum += std::exp(row[i] - m);
    for (std::size_t j = 0; j < static_cast<std::size_t>(p.k); ++j) {
      const double l = row[order[j]];
      const double s = std::exp(l - m) / sum;
      // l − m is rounded once: an error of half an ulp of it, in units of s.
      const double lost = l == m || s == 0 ? 0 : std::abs(l - m) / 16;
      e.indices.push_back(static_cast<double>(order[j]));
      e.scores.push_back({s, s * (1 + lost)});
      ++e.counts[order[j]];
    }
    e.lse.push_back({m + std::log(sum), std::abs(m) + std::log(sum) + 1});
  }
  e.offsets.push_back(0);
  for (const double c : e.counts) e.offsets.push_back(e.offsets.back() + c);
  return e;
}

// dl from what the device stored. lse is empty when renormalised.
Refs gradient(const Problem& p, const Values& x, const Values& indices, const Values& scores,
              const Values& lse, const Values& ds) {
  Refs dl(static_cast<std::size_t>(p.rows * p.experts), Ref{0, 0});
  for (std::int64_t r = 0; r < p.rows; ++r) {
    double c = 0, c_abs = 0;
    const auto valid = [&](std::int64_t j) {
      return indices[at(r, p.k, j)] < static_cast<double>(p.experts);
    };
    for (std::int64_t j = 0; j < p.k; ++j) {
      const double term = scores[at(r, p.k, j)] * ds[at(r, p.k, j)];
      if (valid(j)) c += term, c_abs += std::abs(term);
    }
    for (std::int64_t j = 0; j < p.k; ++j) {
      if (!valid(j)) continue;
      Ref& to = dl[at(r, p.experts, static_cast<std::int64_t>(indices[at(r, p.k, j)]))];
      const double s = p.full ? 1 : scores[at(r, p.k, j)];
      to.value += s * (ds[at(r, p.k, j)] - (p.full ? 0 : c));
      to.scale += std::abs(s) * (std::abs(ds[at(r, p.k, j)]) + (p.full ? 0 : c_abs));
    }
    for (std::int64_t e = 0; p.full && e < p.experts; ++e) {
      Ref& to = dl[at(r, p.experts, e)];
      const double distance = x[at(r, p.experts, e)] - lse[static_cast<std::size_t>(r)];
      const double g = std::exp(distance);
      const double lost = g == 0 ? 0 : std::abs(distance) / 16;
      to = {g * (to.value - c), g * (to.scale + c_abs) * (1 + lost)};
    }
  }
  return dl;
}

Values values(const Refs& refs) {
  Values v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

TEST(MoeRouteOracle, GradientMatchesCentralDifference) {
  for (const bool full : {false, true}) {
    const Problem p{5, 12, 4, full};
    Noise noise(1);
    const Values x = random_values(noise, p.rows * p.experts, DType::kF64, 3);
    const Values ds = random_values(noise, p.rows * p.k, DType::kF64);
    const auto loss = [&](const Arrays& inputs) {
      const Values s = values(oracle(p, inputs[0]).scores);
      return std::inner_product(s.begin(), s.end(), ds.begin(), 0.0);
    };
    const Expected e = oracle(p, x);
    expect_gradient(loss, {x},
                    {values(gradient(p, x, e.indices, values(e.scores), values(e.lse), ds))});
  }
}

// softmax over all, the k largest, divided by their sum: what the renormalised form stands for.
TEST(MoeRouteOracle, RenormalisedFullSoftmaxIsTheSoftmaxOfTheChosen) {
  Noise noise(2);
  const Problem p{4, 20, 6, true};
  const Values x = random_values(noise, p.rows * p.experts, DType::kF64, 3);
  const Values full = values(oracle(p, x).scores);
  const Values chosen = values(oracle({p.rows, p.experts, p.k, false}, x).scores);
  for (std::size_t i = 0; i < full.size(); ++i) {
    const auto row = full.begin() + static_cast<std::ptrdiff_t>(i / 6 * 6);
    EXPECT_NEAR(full[i] / std::accumulate(row, row + 6, 0.0), chosen[i], 1e-14);
  }
}

TEST(MoeRouteCheck, SaysWhatIsWrong) {
  const auto fwd = [](Shape shape, std::int64_t k, DType dtype = DType::kF32) {
    return ops::moe_route_check(Tensor::meta(shape, dtype), k);
  };
  const Tensor logits = Tensor::meta({4, 8});
  const Tensor indices = Tensor::meta({4, 2}, DType::kU32);
  const Tensor scores = Tensor::meta({4, 2});
  const Tensor elsewhere = Tensor::meta({4, 2}, DType::kF32, Backend::kMetal);
  const auto bwd = [&](const ops::MoeRouteSaved& saved, const Tensor& ds) {
    return ops::moe_route_backward_check(saved, ds);
  };
  const Tensor lse = Tensor::meta({4});
  const Tensor wide = Tensor::meta({4, 2}, DType::kF16);
  expect_refused({
      {"rank 1", fwd({8}, 2), Errc::kShape, "must be [T, E], got [8]"},
      {"integers", fwd({4, 8}, 2, DType::kI32), Errc::kDType, "got i32"},
      {"double", fwd({4, 8}, 2, DType::kF64), Errc::kDType, "got f64"},
      {"no expert", fwd({4, 0}, 1), Errc::kShape, "[1, 1024], got 0"},
      {"too many experts", fwd({4, 1025}, 1), Errc::kShape, "[1, 1024], got 1025"},
      {"k 0", fwd({4, 8}, 0), Errc::kArgument, "[1, 8], got 0"},
      {"k below 0", fwd({4, 8}, -3), Errc::kArgument, "got -3"},
      {"k > E", fwd({4, 8}, 9), Errc::kArgument, "[1, 8], got 9"},
      {"k > 64", fwd({4, 100}, 65), Errc::kArgument, "[1, 64], got 65"},
      {"2^32 chosen", fwd({std::int64_t{1} << 29, 8}, 8), Errc::kShape, "less than 2^32"},
      {"indices of rank 1", bwd({logits, lse, scores, {}}, scores), Errc::kShape, "got [4]"},
      {"no indices", bwd({logits, {}, scores, {}}, scores), Errc::kShape, "[T, k], got []"},
      {"logits as forward", bwd({lse, indices, scores, {}}, scores), Errc::kShape, "[T, E]"},
      {"rows of indices", bwd({logits, Tensor::meta({3, 2}, DType::kU32), scores, {}}, scores),
       Errc::kShape, "indices must be [4, 2], got [3, 2]"},
      {"type of indices", bwd({logits, scores, scores, {}}, scores), Errc::kDType,
       "indices must be u32, got f32"},
      {"device of indices",
       bwd({logits, Tensor::meta({4, 2}, DType::kU32, Backend::kMetal), scores, {}}, scores),
       Errc::kDevice, "got metal"},
      {"shape of scores", bwd({logits, indices, logits, {}}, scores), Errc::kShape,
       "scores must be [4, 2], got [4, 8]"},
      {"type of scores", bwd({logits, indices, wide, {}}, scores), Errc::kDType, "got f16"},
      {"device of scores", bwd({logits, indices, elsewhere, {}}, scores), Errc::kDevice, "metal"},
      {"shape of dscores", bwd({logits, indices, scores, {}}, logits), Errc::kShape,
       "dscores must be [4, 2], got [4, 8]"},
      {"type of dscores", bwd({logits, indices, scores, {}}, wide), Errc::kDType, "got f16"},
      {"device of dscores", bwd({logits, indices, scores, {}}, elsewhere), Errc::kDevice, "metal"},
      {"shape of lse", bwd({logits, indices, scores, scores}, scores), Errc::kShape,
       "lse must be [4], got [4, 2]"},
      {"logits without memory", bwd({logits, indices, scores, lse}, scores), Errc::kArgument,
       "must have memory"},
  });
  EXPECT_FALSE(fwd({0, 3}, 3, DType::kF16));
  EXPECT_FALSE(fwd({(std::int64_t{1} << 29) - 1, 8}, 8));
  EXPECT_FALSE(bwd({logits, indices, scores, {}}, scores));
}

// Few of a sparse row's elements say anything: then the comparison alone, without its own check.
void expect_gradient_close(const std::string& what, const Values& got, const Refs& want,
                           DType dtype, std::int64_t n) {
  const auto telling =
      std::count_if(want.begin(), want.end(), [](const Ref& r) { return r.value != 0; });
  if (telling >= 64) return expect_close(what, got, want, dtype, n);
  EXPECT_EQ(count_wrong(got, want, dtype, n), 0) << what;
}

class MoeRoute : public OnDevice {
 protected:
  // Forward and backward of given logits against the oracle.
  void check(const Problem& p, const Values& x, DType dtype, bool strided = false,
             std::int64_t offset = 0) {
    const auto put = [&](const Values& v, Shape shape) {
      return strided ? upload_strided(v, shape, dtype) : upload(v, shape, dtype, offset);
    };
    const std::string name = std::to_string(p.rows) + "x" + std::to_string(p.experts) + "x" +
                             std::to_string(p.k) + (p.full ? " full " : " ") + name_of(dtype);
    const Tensor logits = put(x, {p.rows, p.experts});
    const ops::MoeRoute got = ops::moe_route(encoder(), logits, p.k, {.renormalise = !p.full});
    const Expected want = oracle(p, x);
    const Values indices = download(got.indices);
    ASSERT_EQ(indices, want.indices) << "indices " << name;
    EXPECT_EQ(download(got.counts), want.counts) << "counts " << name;
    EXPECT_EQ(download(got.offsets), want.offsets) << "offsets " << name;
    const std::int64_t terms = p.full ? p.experts : p.k;
    const Values scores = download(got.scores);
    Values lse;
    expect_gradient_close("scores " + name, scores, want.scores, dtype, terms);
    ASSERT_EQ(got.lse.defined(), p.full);
    if (p.full) {
      lse = download(got.lse);
      EXPECT_EQ(count_wrong(lse, want.lse, DType::kF32, p.experts), 0) << "lse " << name;
    }
    Noise noise(static_cast<std::uint64_t>(p.rows + p.experts));
    const Values ds = random_values(noise, p.rows * p.k, dtype);
    const Tensor dl = ops::moe_route_backward(encoder(), {logits, got.indices, got.scores, got.lse},
                                              put(ds, {p.rows, p.k}));
    expect_gradient_close("dl " + name, download(dl), gradient(p, x, indices, scores, lse, ds),
                          dtype, p.k);
  }

  void check_random(const Problem& p, DType dtype, bool strided = false, std::int64_t offset = 0) {
    Noise noise(static_cast<std::uint64_t>(p.rows + 31 * p.experts + 97 * p.k));
    check(p, random_values(noise, p.rows * p.experts, dtype, 4), dtype, strided, offset);
  }
};

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST_P(MoeRoute, MatchesOracleForEveryWidthAndK) {
  const std::int64_t rows[] = {1, 2, 5, 15, 16, 17, 33};
  std::size_t turn = 0;
  for (const DType dtype : kTypes) {
    for (const std::int64_t experts : {1,   2,   7,   15,  16,  17,  31,  32,  33,   60,  64,
                                       127, 128, 255, 256, 257, 511, 512, 513, 1023, 1024}) {
      for (const std::int64_t k : {1, 2, 7, 8, 10, 15, 16, 17, 33, 63, 64}) {
        if (k <= experts) check_random({rows[turn % 7], experts, k, turn % 2 == 0}, dtype);
        ++turn;
      }
    }
  }
}

TEST_P(MoeRoute, MatchesOracleForEveryNumberOfRows) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t rows : {0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 255, 256, 257, 2049}) {
      check_random({rows, 64, 6, rows % 2 == 0}, dtype);
    }
    for (const bool full : {false, true}) {
      check_random({211, 512, 10, full}, dtype);
      check_random({211, 256, 8, full}, dtype);
      check_random({50, 128, 20, full}, dtype);
    }
  }
}

// Rows enough that a GPU's warps have several, for each of the widths at which it changes its form.
TEST_P(MoeRoute, MatchesOracleForEveryForm) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool full : {false, true}) {
      check_random({scaled(6145), 128, 6, full}, dtype);
      check_random({scaled(6145), 512, 10, full}, dtype);
      check_random({scaled(2201), 1024, 40, full}, dtype);
      check_random({scaled(9001), 100, 3, full}, dtype);
      check_random({scaled(9001), 33, 1, full}, dtype);
    }
  }
}

TEST_P(MoeRoute, NoRowsCountZeros) {
  for (const bool full : {false, true}) {
    const auto route =
        ops::moe_route(encoder(), upload({}, {0, 5}, DType::kF32), 2, {.renormalise = !full});
    EXPECT_EQ(download(route.counts), Values(5, 0));
    EXPECT_EQ(download(route.offsets), Values(6, 0));
    EXPECT_EQ(route.indices.shape(), (Shape{0, 2}));
  }
}

TEST_P(MoeRoute, MatchesOracleForViews) {
  for (const DType dtype : kTypes) {
    for (const bool full : {false, true}) {
      check_random({21, 100, 7, full}, dtype, true);
      for (const std::int64_t offset : {1, 3, 17}) {
        check_random({35, 257, 10, full}, dtype, false, offset);
        check_random({35, 256, 10, full}, dtype, false, offset);
      }
    }
  }
}

// dlogits large enough to be written past the cache, with rows that start in the middle of a line.
TEST_P(MoeRoute, MatchesOracleWhenStreamed) {
  for (const DType dtype : kTypes) {
    for (const bool full : {false, true})
      check_random({scaled(4200), 511, 7, full}, dtype, false, 3);
  }
}

// Rows that the quick path must leave or must not fall over, all in one tensor.
Values hard_rows(std::int64_t experts, DType dtype, std::int64_t* rows) {
  Noise noise(static_cast<std::uint64_t>(experts));
  Values x;
  const auto add = [&](const std::function<double(std::int64_t)>& value) {
    for (std::int64_t e = 0; e < experts; ++e) x.push_back(round_to(dtype, value(e)));
    ++*rows;
  };
  const auto random = [&](std::int64_t) {
    return 3 * noise.next();
  };
  const auto coin = [&](std::int64_t n) {
    return noise.below(n) == 0;
  };
  *rows = 0;
  for (int again = 0; again < 3; ++again) {
    add([](std::int64_t) { return 0.5; });
    add([](std::int64_t) { return -7.0; });
    add([&](std::int64_t) { return static_cast<double>(noise.below(7) - 3); });
    add([&](std::int64_t) { return static_cast<double>(noise.below(2)); });
    add([&](std::int64_t) { return static_cast<double>(noise.below(40)) / 2 - 20; });
    add([&](std::int64_t) { return coin(2) ? 0.0 : -0.0; });
    add([&](std::int64_t) { return coin(2) ? -0.0 : coin(9) ? 1 : 0.0; });
    add([&](std::int64_t e) { return coin(3) ? -0.0 : -std::abs(random(e)); });
    add([](std::int64_t e) { return static_cast<double>(e) / 8; });
    add([](std::int64_t e) { return -static_cast<double>(e) / 8; });
    add([&](std::int64_t e) { return (e % 32 == 5 ? 10 : 0) + random(e); });  // one bucket
    add([&](std::int64_t e) { return (e % 32 < 9 ? 10 : 0) + random(e); });   // nine buckets
    add([&](std::int64_t e) { return e % 32 < 9 ? 3 : 2.0; });
    add([&](std::int64_t e) { return e == experts - 1 ? 9 : random(e); });
    add([&](std::int64_t e) { return coin(4) ? kNaN : random(e); });
    add([&](std::int64_t e) { return coin(4) ? -kNaN : random(e); });
    add([&](std::int64_t e) { return coin(40) ? random(e) : coin(2) ? kNaN : -kNaN; });
    add([&](std::int64_t) { return coin(2) ? kNaN : -kNaN; });
    add([&](std::int64_t e) { return coin(40) ? random(e) : -kInf; });
    add([&](std::int64_t e) { return coin(40) ? random(e) : coin(20) ? -kInf : kNaN; });
    add([&](std::int64_t e) { return coin(90) ? kInf : coin(3) ? -kInf : random(e); });
    add([&](std::int64_t e) { return coin(3) ? kInf : coin(3) ? kNaN : random(e); });
    add([](std::int64_t) { return -kInf; });
    add([](std::int64_t) { return kInf; });
    add([](std::int64_t e) { return e == 0 ? 1 : -kInf; });
    add([&](std::int64_t e) { return 60000 * random(e) / 3; });
    add([&](std::int64_t e) {
      return dtype == DType::kF32 ? 1e-40 * random(e) : 3e-7 * random(e);
    });
  }
  return x;
}

TEST_P(MoeRoute, TiesInfinitiesAndNaNs) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t experts : {1, 5, 31, 64, 100, 512, 513, 1024}) {
      Problem p{0, experts, 0, false};
      const Values x = hard_rows(experts, dtype, &p.rows);
      for (const std::int64_t k : {1, 2, 5, 10, 16, 17, 40, 64}) {
        if (k > experts) continue;
        p.k = k;
        for (const bool full : {false, true}) check({p.rows, experts, k, full}, x, dtype);
      }
    }
  }
}

TEST_P(MoeRoute, EveryKOnTiesAndRandomRows) {
  for (std::int64_t k = 1; k <= 64; ++k) {
    Problem p{0, 101, k, false};
    const Values x = hard_rows(p.experts, DType::kF32, &p.rows);
    check(p, x, DType::kF32);
    check_random({20, 64 + 3 * k, k, k % 2 == 0}, kTypes[k % 3]);
  }
}

TEST_P(MoeRoute, ExtremeNumbers) {
  const auto run = [&](const Values& x, std::int64_t k) {
    const auto n = static_cast<std::int64_t>(x.size());
    return ops::moe_route(encoder(), upload(x, {1, n}, DType::kF32), k);
  };
  const ops::MoeRoute one = run({-kInf, 3, -kInf}, 2);
  EXPECT_EQ(download(one.indices), (Values{1, 0}));
  EXPECT_EQ(download(one.scores), (Values{1, 0}));
  const ops::MoeRoute far = run({-3e38, 3e38}, 2);
  EXPECT_EQ(download(far.scores), (Values{1, 0}));
  const ops::MoeRoute zeros = run({-0.0, 0.0, -0.0, 0.0}, 3);
  EXPECT_EQ(download(zeros.indices), (Values{0, 1, 2}));
  const ops::MoeRoute last = run({kNaN, 1, kNaN, -kInf}, 3);
  EXPECT_EQ(download(last.indices), (Values{1, 3, 0}));
  for (const double v : download(last.scores)) EXPECT_TRUE(std::isnan(v));
  const ops::MoeRoute unchosen = run({kNaN, 1, 1}, 2);
  EXPECT_EQ(download(unchosen.scores), (Values{0.5, 0.5}));
}

// Indices may come from anywhere: past the end counts nothing, equal ones add up.
TEST_P(MoeRoute, BackwardTakesAnyIndices) {
  Noise noise(3);
  for (const DType dtype : kTypes) {
    for (const bool full : {false, true}) {
      for (const std::int64_t k : {5, 10, 40}) {
        const Problem p{70, 40, k, full};
        const Values x = random_values(noise, p.rows * p.experts, dtype, 3);
        const Values s = random_values(noise, p.rows * k, dtype);
        const Values ds = random_values(noise, p.rows * k, dtype);
        const Values lse = random_values(noise, p.rows, DType::kF32);
        Values indices;
        for (std::int64_t i = 0; i < p.rows * k; ++i) {
          const std::int64_t kind = noise.below(8);
          indices.push_back(static_cast<double>(kind == 0   ? 40
                                                : kind == 1 ? 0xffffffffLL
                                                : kind == 2 ? 0x80000007LL
                                                            : noise.below(40)));
        }
        const Tensor dl = ops::moe_route_backward(
            encoder(),
            {upload(x, {p.rows, p.experts}, dtype), upload(indices, {p.rows, k}, DType::kU32),
             upload(s, {p.rows, k}, dtype), full ? upload(lse, {p.rows}, DType::kF32) : Tensor()},
            upload(ds, {p.rows, k}, dtype));
        expect_gradient_close("dl", download(dl), gradient(p, x, indices, s, lse, ds), dtype, k);
      }
    }
  }
}

// One by one, in the stored type, the ones would be lost beside the first number.
TEST_P(MoeRoute, EqualIndicesAddUpBeforeRounding) {
  const std::pair<DType, double> types[] = {{DType::kBF16, 256}, {DType::kF16, 2048}};
  for (const auto& [dtype, first] : types) {
    for (const bool full : {false, true}) {
      Values indices(64, 4), ds(64, 1), want(70);
      ds[0] = first;
      indices[63] = 0;  // balances the rest, so that c = 0
      ds[63] = -(first + 62);
      want[0] = ds[63];
      want[4] = -ds[63];
      const Tensor lse = full ? upload({0}, {1}, DType::kF32) : Tensor();
      const Tensor dl = ops::moe_route_backward(
          encoder(),
          {upload(Values(70), {1, 70}, dtype), upload(indices, {1, 64}, DType::kU32),
           upload(Values(64, 1), {1, 64}, dtype), lse},
          upload(ds, {1, 64}, dtype));
      EXPECT_EQ(download(dl), want) << name_of(dtype) << (full ? " full" : "");
    }
  }
}

TEST_P(MoeRoute, BackwardNeedsOnlyTheShapeWhenRenormalised) {
  const Tensor logits = upload({1, 3, 2, 0}, {1, 4}, DType::kF32);
  const auto route = ops::moe_route(encoder(), logits, 2);
  const Tensor ds = upload({1, 0}, {1, 2}, DType::kF32);
  const auto from = [&](const Tensor& l) {
    return download(ops::moe_route_backward(encoder(), {l, route.indices, route.scores, {}}, ds));
  };
  EXPECT_EQ(from(Tensor::meta({1, 4}, DType::kF32, GetParam())), from(logits));
}

TEST_P(MoeRoute, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const DType dtype : kTypes) {
    for (const bool full : {false, true}) {
      for (const std::int64_t k : {10, 20}) {
        const std::int64_t rows = scaled(900);
        const Tensor x = upload(random_values(noise, rows * 200, dtype, 4), {rows, 200}, dtype);
        const Tensor ds = upload(random_values(noise, rows * k, dtype), {rows, k}, dtype);
        expect_repeatable(encoder(), [&] {
          const auto r = ops::moe_route(encoder(), x, k, {.renormalise = !full});
          const Tensor dl = ops::moe_route_backward(encoder(), {x, r.indices, r.scores, r.lse}, ds);
          std::vector<Tensor> all{r.indices, r.scores, r.counts, r.offsets, dl};
          if (full) all.push_back(r.lse);
          return all;
        });
      }
    }
  }
}

TEST_P(MoeRoute, RandomShapes) {
  EXPECT_TRUE(rc::check("moe_route matches its oracle", [this] {
    Problem p{*rc::gen::inRange(1, 40), *rc::gen::inRange(1, 300), 0, *rc::gen::arbitrary<bool>()};
    p.k = *rc::gen::inRange<std::int64_t>(1, std::min<std::int64_t>(p.experts, 64) + 1);
    const DType dtype =
        *rc::gen::elementOf(std::vector<DType>(std::begin(kTypes), std::end(kTypes)));
    const auto levels = *rc::gen::inRange<std::int64_t>(1, 1000);  // few: many ties, far apart
    const double step = std::max(1.0 / 64, 8.0 / static_cast<double>(levels));
    Noise noise(*rc::gen::arbitrary<std::uint32_t>());
    Values x;
    for (std::int64_t i = 0; i < p.rows * p.experts; ++i) {
      x.push_back(round_to(dtype, static_cast<double>(noise.below(levels)) * step - 3));
    }
    check(p, x, dtype, *rc::gen::arbitrary<bool>());
    RC_ASSERT(!HasFailure());
  }));
}

MT_ON_EVERY_BACKEND(MoeRoute);

}  // namespace
}  // namespace mlxtape::test
