#include "mlxtape/ops/sum_rows.h"

#include <cmath>
#include <map>
#include <numeric>

#include "support/indices.h"
#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using Values = std::vector<double>;

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// The formula of sum_rows.h: y [outer, rows, width] from terms [outer, n, width].
Refs oracle(const Values& terms, const Values& indices, std::int64_t outer, std::int64_t rows,
            std::int64_t width) {
  Refs y(at(outer * rows * width), Ref{0, 0});
  const auto n = static_cast<std::int64_t>(indices.size());
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t j = 0; j < n; ++j) {
      auto p = static_cast<std::int64_t>(indices[at(j)]);
      if (p < 0) p += rows;
      if (p < 0 || p >= rows) continue;
      for (std::int64_t i = 0; i < width; ++i) {
        const double term = terms[at((o * n + j) * width + i)];
        Ref& r = y[at((o * rows + p) * width + i)];
        r.value += term;
        r.scale += std::abs(term);
      }
    }
  }
  return y;
}

TEST(SumRowsOracle, IsLinearWithTheTransposedGather) {
  Noise noise(1);
  const Values indices{3, 0, 3, -1, 9, 2};
  const Values terms = random_values(noise, 12, DType::kF64),
               w = random_values(noise, 8, DType::kF64);
  const auto loss = [&](const Arrays& in) {
    const Refs y = oracle(in[0], indices, 1, 4, 2);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i].value * w[i];
    return sum;
  };
  Values gradient;
  for (const double index : indices) {
    const auto p = static_cast<std::int64_t>(index < 0 ? index + 4 : index);
    for (std::int64_t i = 0; i < 2; ++i) gradient.push_back(p < 4 ? w[at(p * 2 + i)] : 0);
  }
  expect_gradient(loss, {terms}, {gradient});
}

class SumRows : public OnDevice {
 protected:
  // How the ids are spread: most different, few that many share, all the same, runs that end at chunks.
  enum class Ids { kMany, kFew, kOne, kRuns, kOutside };
  static Values ids_of(Ids how, std::int64_t n, std::int64_t rows) {
    Noise noise(static_cast<std::uint64_t>(n + rows));
    Values v;
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t id = 0;
      switch (how) {
        case Ids::kMany: id = noise.below(rows); break;
        case Ids::kFew: id = noise.below(std::min<std::int64_t>(rows, 3)); break;
        case Ids::kOne: id = rows - 1; break;
        case Ids::kRuns: id = std::min(rows - 1, i / 32); break;
        case Ids::kOutside: id = noise.below(4) == 0 ? noise.below(rows) : rows + i; break;
      }
      if (noise.below(5) == 0) id -= rows;
      v.push_back(static_cast<double>(id));
    }
    return v;
  }
  static constexpr Ids kSpreads[] = {Ids::kMany, Ids::kFew, Ids::kOne, Ids::kRuns, Ids::kOutside};

  // The rows of a gradient put where they belong, after a look at what RowGrad promises.
  Values dense_of(const RowGrad& grad, std::int64_t rows) {
    const Values ids = download(grad.ids), values = download(grad.rows);
    const std::size_t width = ids.empty() ? 0 : values.size() / ids.size();
    Values dense(at(rows) * width, 0.0);
    double last = -1;
    bool used = true;
    for (std::size_t u = 0; u < ids.size(); ++u) {
      if (ids[u] < 0) {
        used = false;
        EXPECT_EQ(ids[u], -1);
        for (std::size_t i = 0; i < width; ++i) EXPECT_EQ(values[u * width + i], 0) << u;
        continue;
      }
      EXPECT_TRUE(used) << "an id after the last, " << u;
      EXPECT_GT(ids[u], last) << u;
      EXPECT_LT(ids[u], static_cast<double>(rows));
      last = ids[u];
      for (std::size_t i = 0; i < width; ++i) {
        dense[static_cast<std::size_t>(ids[u]) * width + i] = values[u * width + i];
      }
    }
    return dense;
  }
  static std::size_t different(const Values& ids, std::int64_t rows) {
    std::map<std::int64_t, int> seen;
    for (const double id : ids) {
      const auto p = static_cast<std::int64_t>(id < 0 ? id + static_cast<double>(rows) : id);
      if (p >= 0 && p < rows) ++seen[p];
    }
    return seen.size();
  }

  void check(std::int64_t outer, std::int64_t n, std::int64_t rows, std::int64_t width, Ids how,
             DType dtype, std::int64_t offset = 0) {
    Noise noise(static_cast<std::uint64_t>(outer + n + width));
    const Values ids = ids_of(how, n, rows);
    // The terms of one sum have one sign: what cancels would hide how sums are rounded.
    Values terms = random_values(noise, outer * n * width, dtype);
    for (std::size_t e = 0; e < terms.size(); ++e) {
      terms[e] = e % at(width) % 2 == 0 ? std::abs(terms[e]) : -std::abs(terms[e]);
    }
    const Values x = random_values(noise, outer * rows * width, dtype);
    const Tensor t = upload(terms, {outer, n, width}, dtype, offset);
    const Tensor i = upload(ids, {n}, DType::kI32);
    const std::string where = std::to_string(outer) + "x" + std::to_string(n) + "x" +
                              std::to_string(width) + " to " + std::to_string(rows) + " " +
                              name_of(dtype) + " " + std::to_string(static_cast<int>(how));
    Refs want = oracle(terms, ids, outer, rows, width);
    expect_close("sum " + where, download(ops::sum_rows(encoder(), t, i, rows)), want, dtype, n);
    if (outer == 1) {
      const Tensor by_row = t.reshape({n, width});
      for (const DType type : {dtype, DType::kF32, DType::kF16}) {
        const RowGrad grad = ops::row_grad(encoder(), by_row, i, rows, type);
        EXPECT_EQ(grad.ids.shape(), (Shape{std::min(n, rows)}));
        const Values got = download(grad.ids);
        EXPECT_EQ(std::count_if(got.begin(), got.end(), [](double id) { return id >= 0; }),
                  static_cast<std::int64_t>(different(ids, rows)));
        expect_close("rows " + where, dense_of(grad, rows), want, type, n);
      }
    }
    for (std::size_t e = 0; e < want.size(); ++e) {
      want[e].value += x[e];
      want[e].scale += std::abs(x[e]);
    }
    const Tensor onto = upload(x, {outer, rows, width}, dtype, offset);
    expect_close("add " + where, download(ops::add_rows(encoder(), onto, i, t)), want, dtype,
                 n + 1);
    EXPECT_EQ(download(onto), x);
  }
};

TEST_P(SumRows, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const Ids how : kSpreads) {
      for (const std::int64_t n : {1, 2, 31, 32, 33, 64, 97}) check(1, n, 13, 5, how, dtype);
      for (const std::int64_t width : {1, 2, 8, 15, 16, 17, 33, 255, 256, 257}) {
        check(1, 70, 9, width, how, dtype);
      }
      check(3, 100, 11, 7, how, dtype, 1);
      check(2, 40, 1, 64, how, dtype, 8);
      check(1, 300, 1000, 24, how, dtype);
    }
  }
}

// Tiles of columns, several tasks of chunks, results past the cache.
TEST_P(SumRows, LargeOnes) {
  for (const Ids how : {Ids::kMany, Ids::kFew}) {
    check(1, 70, 5, scaled(9001), how, DType::kF32);
    check(1, 2100, 2500, scaled(513), how, DType::kF32, 1);
    check(1, 2100, 2200, scaled(1040), how, DType::kBF16);
    check(1, 30000, 17, 1, how, DType::kF32);
  }
}

TEST_P(SumRows, EmptyExtents) {
  const Tensor no_id = encoder().empty({0}, DType::kI32), ids = upload({0, 1}, {2}, DType::kI32);
  const Tensor none = encoder().empty({1, 0, 3}, DType::kF32);
  EXPECT_EQ(download(ops::sum_rows(encoder(), none, no_id, 2)), Values(6, 0.0));
  EXPECT_EQ(ops::row_grad(encoder(), none.reshape({0, 3}), no_id, 2, DType::kF32).rows.shape(),
            (Shape{0, 3}));
  const Tensor two = upload({1, 2}, {2}, DType::kF32);
  EXPECT_EQ(ops::row_grad(encoder(), two, ids, 0, DType::kF32).ids.size(), 0);
  EXPECT_EQ(download(ops::row_grad(encoder(), two, ids, 5, DType::kF32).rows), (Values{1, 2}));
  const RowGrad thin =
      ops::row_grad(encoder(), encoder().empty({2, 0}, DType::kF32), ids, 5, DType::kF32);
  EXPECT_EQ(download(thin.ids), (Values{0, 1}));
  EXPECT_EQ(ops::sum_rows(encoder(), two.reshape({1, 2, 1}), ids, 0).size(), 0);
}

TEST_P(SumRows, RowGradsAreAddedAndMerged) {
  Noise noise(9);
  constexpr std::int64_t kRows = 40, kWidth = 19;
  for (const DType first : kTypes) {
    for (const DType second : kTypes) {
      const Values a_ids = ids_of(Ids::kMany, 25, kRows), b_ids = ids_of(Ids::kMany, 60, kRows);
      const Values a = random_values(noise, 25 * kWidth, first),
                   b = random_values(noise, 60 * kWidth, second);
      const RowGrad ga = ops::row_grad(encoder(), upload(a, {25, kWidth}, first),
                                       upload(a_ids, {25}, DType::kI32), kRows, first);
      const RowGrad gb = ops::row_grad(encoder(), upload(b, {60, kWidth}, second),
                                       upload(b_ids, {60}, DType::kI32), kRows, second);
      // Rounded as they are: the sums of two rows in one type.
      const Values da = dense_of(ga, kRows), db = dense_of(gb, kRows);
      Refs want;
      for (std::size_t i = 0; i < da.size(); ++i) {
        want.push_back({da[i] + db[i], std::abs(da[i]) + std::abs(db[i])});
      }
      const RowGrad both = ops::merge_row_grads(encoder(), ga, gb, {kRows, kWidth}, DType::kF32);
      EXPECT_EQ(both.ids.size(), kRows);
      Values all = a_ids;
      all.insert(all.end(), b_ids.begin(), b_ids.end());
      const Values ids = download(both.ids);
      EXPECT_EQ(std::count_if(ids.begin(), ids.end(), [](double id) { return id >= 0; }),
                static_cast<std::int64_t>(different(all, kRows)));
      expect_close("merged", dense_of(both, kRows), want, DType::kF32, 2);
      const RowGrad alone = ops::merge_row_grads(encoder(), ga, {}, {kRows, kWidth}, DType::kF32);
      EXPECT_EQ(dense_of(alone, kRows), da);
      EXPECT_EQ(alone.rows.dtype(), DType::kF32);

      const Values start = random_values(noise, kRows * kWidth, second);
      const Tensor dense = upload(start, {kRows, kWidth}, second);
      ops::add_row_grad(encoder(), dense, ga);
      for (std::size_t i = 0; i < da.size(); ++i) {
        want[i] = {start[i] + da[i], std::abs(start[i]) + std::abs(da[i])};
      }
      expect_close("added", download(dense), want, second, 2);
    }
  }
}

// The last row is not touched for what is not used.
TEST_P(SumRows, MergedTailsNameNoRow) {
  const auto grad = [&](const Values& ids) {
    const auto n = static_cast<std::int64_t>(ids.size());
    return ops::row_grad(encoder(), upload(Values(ids.size(), 1.0), {n}, DType::kF32),
                         upload(ids, {n}, DType::kI32), 10, DType::kF32);
  };
  const RowGrad both =
      ops::merge_row_grads(encoder(), grad({4, 4, 4}), grad({2, 4, 2}), {10}, DType::kF32);
  EXPECT_EQ(download(both.ids), (Values{2, 4, -1, -1, -1, -1}));
  EXPECT_EQ(download(both.rows), (Values{2, 4, 0, 0, 0, 0}));
}

// Whatever their rows hold.
TEST_P(SumRows, IdsThatNameNothingAddNothing) {
  const Tensor dense = upload({1, 2, 3}, {3, 1}, DType::kF32);
  const Tensor ids = upload({1, 3, -1}, {3}, DType::kI32);
  ops::add_row_grad(encoder(), dense, {ids, upload({10, 20, 30}, {3, 1}, DType::kF32)});
  EXPECT_EQ(download(dense), (Values{1, 12, 3}));
}

TEST_P(SumRows, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const DType dtype : kTypes) {
    const Tensor terms = upload(random_values(noise, 3000 * 40, dtype), {3000, 40}, dtype);
    const Tensor ids = upload(ids_of(Ids::kFew, 3000, 50), {3000}, DType::kI32);
    expect_repeatable(encoder(), [&] {
      const RowGrad grad = ops::row_grad(encoder(), terms, ids, 50, DType::kF32);
      return std::vector<Tensor>{ops::sum_rows(encoder(), terms.reshape({1, 3000, 40}), ids, 50),
                                 grad.ids, grad.rows};
    });
  }
}

// Nothing waits for the host: the same graph serves other ids.
TEST_P(SumRows, IsReplayedWithOtherIds) {
  const Tensor terms = upload({1, 2, 4, 8}, {4, 1}, DType::kF32);
  const Tensor ids = upload({3, 3, 3, 3}, {4}, DType::kI32);
  encoder().begin_capture();
  const RowGrad grad = ops::row_grad(encoder(), terms, ids, 9, DType::kF32);
  const auto graph = encoder().end_capture();
  encoder().replay(*graph);
  EXPECT_EQ(download(grad.ids), (Values{3, -1, -1, -1}));
  EXPECT_EQ(download(grad.rows), (Values{15, 0, 0, 0}));
  const std::int32_t other[] = {8, 1, 8, 99};
  encoder().upload(other, sizeof other, ids);
  encoder().replay(*graph);
  EXPECT_EQ(download(grad.ids), (Values{1, 8, -1, -1}));
  EXPECT_EQ(download(grad.rows), (Values{2, 5, 0, 0}));
}

TEST_P(SumRows, NaNStaysInItsSum) {
  const Tensor ids = upload({0, 2, 0, 9}, {4}, DType::kI32);  // the last names no row
  const Tensor terms = upload({1, NAN, 3, 4, 5, 6, NAN, NAN}, {1, 4, 2}, DType::kF32);
  EXPECT_EQ(nans_of(download(ops::sum_rows(encoder(), terms, ids, 3))), places(1, 1));
  const Tensor onto = upload({1, 2, NAN, 4, 5, 6}, {1, 3, 2}, DType::kF32);
  EXPECT_EQ(nans_of(download(ops::add_rows(encoder(), onto, ids, terms))), places(1, 2));
  const RowGrad grad = ops::row_grad(encoder(), terms.reshape({4, 2}), ids, 3, DType::kF32);
  EXPECT_EQ(nans_of(download(grad.rows)), places(1, 1));
}

TEST(SumRowsCheck, SaysWhatIsWrong) {
  const auto terms = Tensor::meta({2, 4, 3}), ids = Tensor::meta({4}, DType::kI32);
  const auto far = Tensor::meta({4}, DType::kI32, Backend::kMetal);
  const auto x = Tensor::meta({2, 7, 3});
  const auto far_terms = Tensor::meta({2, 4, 3}, DType::kF32, Backend::kMetal);
  const RowGrad rows{ids, Tensor::meta({4, 3})};
  const auto dense = Tensor::meta({7, 3});
  expect_refused({
      {"rank", ops::sum_rows_check(dense, ids, 7), Errc::kShape, "[O, n, W], got [7, 3]"},
      {"type", ops::sum_rows_check(Tensor::meta({2, 4, 3}, DType::kI32), ids, 7), Errc::kDType,
       "terms must be f32, f16 or bf16, got i32"},
      {"ids type", ops::sum_rows_check(terms, Tensor::meta({4}), 7), Errc::kDType, "got f32"},
      {"ids", ops::sum_rows_check(terms, Tensor::meta({5}, DType::kI32), 7), Errc::kShape,
       "[n] = [4], got [5]"},
      {"rows", ops::sum_rows_check(terms, ids, -1), Errc::kShape, "fewer than 2^31 - 1, got -1"},
      {"many rows", ops::sum_rows_check(terms, ids, INT32_MAX), Errc::kShape, "fewer than 2^31"},
      {"size", ops::sum_rows_check(Tensor::meta({std::int64_t{1} << 40, 4, 1}), ids, 1 << 30),
       Errc::kShape, "63 bits"},
      {"device", ops::sum_rows_check(terms, far, 7), Errc::kDevice, "cpu, got metal"},
      {"x", ops::add_rows_check(dense, ids, terms), Errc::kShape, "x must be [O, C, W]"},
      {"x terms", ops::add_rows_check(x, ids, dense), Errc::kShape, "terms must be [O, n, W]"},
      {"widths", ops::add_rows_check(Tensor::meta({2, 7, 4}), ids, terms), Errc::kShape,
       "of x [2, 7, 4], got [2, 4, 3]"},
      {"types", ops::add_rows_check(Tensor::meta({2, 7, 3}, DType::kF16), ids, terms), Errc::kDType,
       "type of x, f16, got f32"},
      {"apart", ops::add_rows_check(x, far, far_terms), Errc::kDevice, "where x is, cpu"},
      {"scalar", ops::row_grad_check(Tensor::meta({}), ids, 7, DType::kF32), Errc::kShape,
       "[n, …], got []"},
      {"rows type", ops::row_grad_check(Tensor::meta({4, 3}), ids, 7, DType::kF64), Errc::kDType,
       "rows must be f32, f16 or bf16, got f64"},
      {"rows ids", ops::row_grad_check(dense, ids, 7, DType::kF32), Errc::kShape, "[n] = [7]"},
      {"dense", ops::add_row_grad_check(Tensor::meta({}), rows), Errc::kShape, "[C, …]"},
      {"strided", ops::add_row_grad_check(Tensor::meta({3, 7}).transpose({1, 0}), rows),
       Errc::kShape, "contiguous"},
      {"other width", ops::add_row_grad_check(Tensor::meta({7, 2}), rows), Errc::kShape,
       "as dense [7, 2], got [4] and [4, 3]"},
      {"dense type", ops::add_row_grad_check(Tensor::meta({7, 3}, DType::kI32), rows), Errc::kDType,
       "got i32, f32 and i32"},
      {"far rows", ops::add_row_grad_check(dense, {far, Tensor::meta({4, 3})}), Errc::kDevice,
       "where dense is"},
  });
}

MT_ON_EVERY_BACKEND(SumRows);

}  // namespace
}  // namespace mlxtape::test
