#include "mlxtape/ops/take_along_axis.h"

#include <rapidcheck.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "support/indices.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using Values = std::vector<double>;

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr DType kIndexTypes[] = {DType::kU8, DType::kU16, DType::kU32, DType::kU64,
                                 DType::kI8, DType::kI16, DType::kI32, DType::kI64};

Shape shape_of_y(const Shape& x, const Shape& indices, std::int64_t axis) {
  Shape y = indices;
  for (std::int64_t i = 0; i < y.rank(); ++i) {
    if (i != axis && indices[i] == 1) y[i] = x[i];
  }
  return y;
}

struct Expected {
  Shape y_shape;
  Refs y, dx;
  std::int64_t terms;  // the most that one dx is made of
};

// The formula block of take_along_axis.h, in double, element by element; axis in [0, rank).
Expected oracle(const Shape& x_shape, const Shape& index_shape, std::int64_t axis, const Values& x,
                const Values& indices, const Values& dy) {
  Expected e{shape_of_y(x_shape, index_shape, axis), {}, Refs(x.size(), Ref{0, 0}), 0};
  std::vector<std::int64_t> terms(x.size());
  const std::int64_t length = x_shape[axis];
  for (std::int64_t n = 0; n < count_of(e.y_shape); ++n) {
    std::int64_t at_x = 0, at_index = 0, step_x = 1, step_index = 1, rest = n, axis_step = 0;
    for (std::int64_t d = e.y_shape.rank() - 1; d >= 0; --d) {
      const std::int64_t p = rest % e.y_shape[d];
      rest /= e.y_shape[d];
      if (d == axis) axis_step = step_x;
      if (d != axis && x_shape[d] != 1) at_x += p * step_x;
      if (index_shape[d] != 1) at_index += p * step_index;
      step_x *= x_shape[d];
      step_index *= index_shape[d];
    }
    double p = indices[static_cast<std::size_t>(at_index)];
    if (p < 0) p += static_cast<double>(length);
    if (!(p >= 0 && p < static_cast<double>(length))) {
      e.y.push_back({0, 0});
      continue;
    }
    const auto from = static_cast<std::size_t>(at_x + static_cast<std::int64_t>(p) * axis_step);
    e.y.push_back({x[from], std::abs(x[from])});
    const double g = dy.empty() ? 0 : dy[static_cast<std::size_t>(n)];
    e.dx[from].value += g;
    e.dx[from].scale += std::abs(g);
    e.terms = std::max(e.terms, ++terms[from]);
  }
  return e;
}

Values values(const Refs& refs) {
  Values v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

// The terms are added in f32 and only their sum is rounded to the stored type: half an ulp of the
// sum, however large the terms were. Scales made so that rounding_bound says that.
void sharpen(Refs& refs, DType dtype, std::int64_t terms) {
  const double all = rounding_bound(dtype, terms);
  const double stored = rounding_bound(dtype, -16);
  for (Ref& r : refs) r.scale = (stored * std::abs(r.value) + (all - stored) * r.scale) / all;
}

// Indices of every kind: legal ones, negative where the type has them, and some outside.
Values random_indices(Noise& noise, const Shape& shape, std::int64_t length, DType dtype,
                      bool strays) {
  Values v(static_cast<std::size_t>(count_of(shape)));
  for (double& i : v) {
    const std::int64_t low = is_signed(dtype) ? -length : 0;
    i = length == 0 ? 0 : static_cast<double>(low + noise.below(length - low));
    if (strays && noise.below(8) == 0) i = static_cast<double>(length + noise.below(3));
    if (strays && is_signed(dtype) && noise.below(8) == 0) i = static_cast<double>(-length - 1);
    i = round_to(dtype, i);  // a type too small for the number makes another one of it
  }
  return v;
}

TEST(TakeAlongAxisOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  // x is broadcast along the first axis, indices along the last; k > C, equal and stray indices.
  const Shape x_shape{1, 4, 3}, index_shape{2, 7, 1};
  const Values x = random_values(noise, 12, DType::kF64);
  const Values dy = random_values(noise, 42, DType::kF64);
  const Values indices = random_indices(noise, index_shape, 4, DType::kI32, true);
  const auto loss = [&](const Arrays& at) {
    const Values y = values(oracle(x_shape, index_shape, 1, at[0], indices, dy).y);
    return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
  };
  expect_gradient(loss, {x}, {values(oracle(x_shape, index_shape, 1, x, indices, dy).dx)});
}

Tensor meta(const Shape& shape, DType dtype = DType::kF32, Backend backend = Backend::kCpu) {
  return Tensor::meta(shape, dtype, backend);
}

TEST(TakeAlongAxisCheck, SaysWhatIsWrong) {
  const Tensor x = meta({4, 6}), u32 = meta({4, 2}, DType::kU32);
  const std::int64_t huge = std::int64_t{1} << 40;
  const auto fwd = ops::take_along_axis_check;
  const auto bwd = ops::take_along_axis_backward_check;
  const Tensor elsewhere = meta({4, 2}, DType::kU32, Backend::kMetal);
  expect_refused({
      {"flat, indices of rank 2", fwd(x, u32, std::nullopt), Errc::kShape,
       "[k] when there is no axis, got [4, 2]"},
      {"axis past the end", fwd(x, u32, 2), Errc::kArgument, "in [-2, 2), got 2"},
      {"axis before the start", fwd(x, u32, -3), Errc::kArgument, "got -3"},
      {"axis of nothing", fwd(meta({}), meta({}, DType::kU32), 0), Errc::kArgument, "got 0"},
      {"another rank", fwd(x, meta({4}, DType::kU32), 1), Errc::kShape, "x [4, 6], got [4]"},
      {"clash", fwd(x, meta({3, 2}, DType::kU32), 1), Errc::kShape, "but 1, got [3, 2]"},
      {"too large", fwd(meta({huge, 1, 1}), meta({1, huge, 1}, DType::kU32), 2), Errc::kShape,
       "63 bits, got ["},
      {"float indices", fwd(x, meta({4, 2}), 1), Errc::kDType, "integers, got f32"},
      {"bool indices", fwd(x, meta({4, 2}, DType::kBool), 1), Errc::kDType, "got bool"},
      {"two devices", fwd(x, elsewhere, 1), Errc::kDevice, "where x is (cpu), got metal"},
      {"no shape", bwd(meta({4, 2}), u32, {4, -1}, 1), Errc::kShape,
       "x_shape must be a shape, got [4, -1]"},
      {"shapes are checked", bwd(meta({4, 2}), u32, {3, 6}, 1), Errc::kShape, "against x [3, 6]"},
      {"dy of another shape", bwd(meta({4, 3}), u32, {4, 6}, 1), Errc::kShape,
       "y [4, 2], got [4, 3]"},
      {"dy in double", bwd(meta({4, 2}, DType::kF64), u32, {4, 6}, 1), Errc::kDType, "got f64"},
      {"dy elsewhere", bwd(meta({4, 2}), elsewhere, {4, 6}, 1), Errc::kDevice, "where dy is (cpu)"},
  });
  EXPECT_FALSE(fwd(x, meta({4, 9}, DType::kI8), 1)) << "k > C is legal";
  EXPECT_FALSE(fwd(meta({0, 3}), meta({0, 1}, DType::kI8), 1));
}

TEST(TakeAlongAxisCheck, TopkRefusesMore) {
  const Tensor x = meta({4, 6}), u32 = meta({4, 2}, DType::kU32), dy = meta({4, 2});
  const auto fwd = ops::take_along_axis_topk_check;
  const auto bwd = ops::take_along_axis_topk_backward_check;
  const auto indices = [](std::int64_t rows, std::int64_t k) {
    return meta({rows, k}, DType::kU32);
  };
  const Tensor elsewhere = meta({4, 2}, DType::kU32, Backend::kMetal);
  expect_refused({
      {"x of rank 1", fwd(meta({4}), u32), Errc::kShape, "x must be [R, C], got [4]"},
      {"indices of rank 1", fwd(x, meta({4}, DType::kU32)), Errc::kShape, "R = 4, got [4]"},
      {"no broadcasting", fwd(x, indices(1, 2)), Errc::kShape, "R = 4, got [1, 2]"},
      {"R = 0", fwd(meta({0, 6}), indices(0, 2)), Errc::kShape, "got 0, 6 and 2"},
      {"C = 0", fwd(meta({4, 0}), u32), Errc::kShape, "got 4, 0 and 2"},
      {"k = 0", fwd(x, indices(4, 0)), Errc::kShape, "got 4, 6 and 0"},
      {"k > C", fwd(meta({1, 4}), indices(1, 5)), Errc::kShape, "at most C = 4, got 5"},
      {"x not a float", fwd(meta({4, 6}, DType::kI32), u32), Errc::kDType,
       "x must be f32, f16 or bf16, got i32"},
      {"indices not u32", fwd(x, meta({4, 2}, DType::kI32)), Errc::kDType, "u32, got i32"},
      {"two devices", fwd(x, elsewhere), Errc::kDevice, "where x is (cpu), got metal"},
      {"dy of rank 1", bwd(meta({4}), u32, 6), Errc::kShape, "dy must be [R, k], got [4]"},
      {"dy refused like x", bwd(dy, u32, 0), Errc::kShape, "got 4, 0 and 2"},
      {"C negative", bwd(dy, u32, -1), Errc::kShape, "at most C = -1, got 2"},
      {"another k", bwd(dy, indices(4, 3), 6), Errc::kShape, "dy [4, 2], got [4, 3]"},
      {"dx too large", bwd(dy, u32, std::int64_t{1} << 62), Errc::kShape, "63 bits"},
  });
  EXPECT_FALSE(fwd(x, indices(4, 6)));
}

struct Options {
  DType index_type = DType::kU32;
  bool strays = false;
  bool strided = false;
  std::int64_t offset = 0;
};

class TakeAlongAxis : public OnDevice {
 protected:
  // Forward and backward of one pair of shapes against the oracle.
  void check(const Shape& x_shape, const Shape& index_shape, std::int64_t axis, DType dtype,
             const Options& o = {}) {
    const std::int64_t a = *normal_axis(axis, x_shape.rank());
    Noise noise(static_cast<std::uint64_t>(count_of(x_shape) + 31 * count_of(index_shape)));
    const Values x = random_values(noise, count_of(x_shape), dtype, 4);
    const Values indices = random_indices(noise, index_shape, x_shape[a], o.index_type, o.strays);
    const Shape y_shape = shape_of_y(x_shape, index_shape, a);
    const Values dy = random_values(noise, count_of(y_shape), dtype);
    Expected want = oracle(x_shape, index_shape, a, x, indices, dy);
    sharpen(want.dx, dtype, want.terms);
    const auto put = [&](const Values& v, const Shape& shape, DType type) {
      return o.strided ? upload_strided(v, shape, type) : upload(v, shape, type, o.offset);
    };
    const std::string at = to_string(x_shape) + " " + to_string(index_shape) + " axis " +
                           std::to_string(axis) + " " + name_of(dtype) + " " +
                           name_of(o.index_type);
    const Tensor named = put(indices, index_shape, o.index_type);
    const Tensor y = ops::take_along_axis(encoder(), put(x, x_shape, dtype), named, axis);
    EXPECT_EQ(y.shape(), y_shape) << at;
    const Values got = download(y);
    EXPECT_TRUE(got == values(want.y)) << at << ": y is a copy, not a result";
    expect_close("y " + at, got, want.y, dtype, 1);
    const Tensor dx =
        ops::take_along_axis_backward(encoder(), put(dy, y_shape, dtype), named, x_shape, axis);
    EXPECT_EQ(dx.shape(), x_shape) << at;
    expect_close("dx " + at, download(dx), want.dx, dtype, want.terms);
  }
};

TEST_P(TakeAlongAxis, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t rows : {0, 1, 2, 5, 37}) {
      for (const std::int64_t cols : {1, 2, 7, 31, 32, 33, 255, 256, 257, 512, 2048}) {
        for (const std::int64_t k : {0, 1, 2, 10, 33}) {
          check({rows, cols}, {rows, k}, -1, dtype, {DType::kU32, k == 10});
        }
      }
    }
  }
}

// The lengths at which a GPU changes from one form to the next.
TEST_P(TakeAlongAxis, MatchesOracleForEveryForm) {
  for (const DType dtype : kTypes) {
    check({scaled(6145), 512}, {scaled(6145), 10}, -1, dtype, {DType::kU32, true});
    check({scaled(9001), 33}, {scaled(9001), 1}, -1, dtype, {DType::kI32, false});
    check({5, 256}, {5, 600}, -1, dtype, {DType::kU32, true});
    check({2, 3000}, {2, 5000}, -1, dtype, {DType::kU32, true});
    check({3, 40, 33}, {3, 7, 33}, 1, dtype, {DType::kU32, true});
  }
}

TEST_P(TakeAlongAxis, MatchesOracleForLongRows) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols : {4095, 4096, 4097, 8191, 12288}) {
      for (const std::int64_t k : {10, 64, 511, 512, 513, 4099}) {
        check({3, cols}, {3, k}, -1, dtype, {DType::kI32, true});
      }
    }
    check({3, 151937}, {3, 100}, -1, dtype, {DType::kI64, true});
    check({2, 151937}, {2, scaled(40000)}, -1, dtype,
          {DType::kU32, true});  // large blocks, two of them
    check({400007}, {scaled(30011)}, 0, dtype);
  }
  // More pieces than have scratch memory at once.
  check({70, 9000}, {70, 3000}, -1, DType::kBF16, {DType::kU32, true});
}

// Rows that many indices fall into are built another way than rows that few do.
TEST_P(TakeAlongAxis, EqualIndicesAddUp) {
  for (const DType dtype : kTypes) {
    check({50, 3}, {50, 400}, -1, dtype);
    check({2, 4096}, {2, 512}, -1, dtype);
    const Tensor ones = upload(Values(300, 1.0), {1, 300}, dtype);
    for (const std::int64_t cols : {3000, 5}) {  // few, many
      const Tensor at = upload(Values(300, 4.0), {1, 300}, DType::kU32);
      Values want(static_cast<std::size_t>(cols));
      want[4] = 300;  // in 8 bits a sum of ones stays at 256
      EXPECT_EQ(download(ops::take_along_axis_backward(encoder(), ones, at, {1, cols}, 1)), want);
    }
  }
}

TEST_P(TakeAlongAxis, MatchesOracleOnEveryAxisAndBroadcast) {
  for (const DType dtype : kTypes) {
    const Options strays{DType::kI32, true};
    for (const std::int64_t axis : {0, 1, 2, -1}) {
      check({3, 5, 7}, {3, 5, 7}, axis, dtype, strays);
      check({5, 5, 5}, {5, 5, 5}, axis, dtype, strays);
      Shape one{4, 4, 4};
      one[*normal_axis(axis, 3)] = 9;  // k > C
      check({4, 4, 4}, one, axis, dtype, strays);
    }
    check({2, 33, 300}, {2, 10, 300}, 1, dtype, strays);
    check({700, 300}, {20, 300}, 0, dtype, strays);                    // tiles of 16, two blocks
    check({scaled(20000), 18}, {scaled(9000), 18}, 0, dtype, strays);  // large blocks of tiles
    check({2, 1, 3, 2, 1, 2, 2, 5}, {2, 1, 4, 2, 3, 2, 1, 5}, 2, dtype, strays);
    check({1, 6}, {5, 3}, 1, dtype, strays);        // x along rows
    check({5, 6}, {1, 3}, 1, dtype, strays);        // indices along rows
    check({5, 100}, {1, 3}, 1, dtype, strays);      // the same, few of many
    check({6, 1}, {3, 5}, 0, dtype, strays);        // x along columns
    check({1, 6, 5}, {4, 3, 1}, 1, dtype, strays);  // both ways at once
    check({6, 5, 1}, {3, 1, 4}, 0, dtype, strays);
    check({3, 1, 6, 1}, {1, 4, 3, 5}, 2, dtype, strays);
    check({70, 1}, {70, 9}, 1, dtype, strays);      // C = 1
    check({1, 5, 7}, {4, 5, 1}, 2, dtype, strays);  // one index a row, x along another axis
    check({1, 3, 3, 4}, {3, 3, 3, 1}, 3, dtype, strays);
    check({3, 1, 7}, {3, 4, 1}, 2, dtype, strays);
    check({1, 1}, {1, 1}, 0, dtype);
  }
}

// So many terms for so few elements that the terms are cut over threads.
TEST_P(TakeAlongAxis, MatchesOracleForLongSums) {
  for (const DType dtype : kTypes) {
    check({1, 512}, {9001, 10}, 1, dtype);
    check({512, 1}, {10, 9001}, 0, dtype);
    check({1, 3, 40}, {777, 5, 40}, 1, dtype, {DType::kI8, true});
    check({5}, {70001}, 0, dtype, {DType::kI64, true});
  }
}

TEST_P(TakeAlongAxis, EveryIndexType) {
  for (const DType index_type : kIndexTypes) {
    for (const DType dtype : kTypes) {
      check({6, 40}, {6, 13}, 1, dtype, {index_type, true});
      check({40, 6}, {13, 6}, 0, dtype, {index_type, true});
      check({3, 5000}, {3, 600}, 1, dtype, {index_type, true});
    }
  }
}

// The ends of every index type name no element, near or far.
TEST_P(TakeAlongAxis, FarIndicesGiveZeroAndNoGradient) {
  for (const DType index_type : kIndexTypes) {
    const double most = std::ldexp(1, static_cast<int>(8 * size_of(index_type)) - 1);
    const Values far = is_signed(index_type)
                           ? Values{-most, most - 1, 3, -4, -3, 2, -5, -most + 1}
                           : Values{2 * most - 1, most, 3, 4, 0, 2, 127, most - 1};
    const Tensor at = upload(far, {1, 8}, index_type);
    const Tensor x = upload({5, 6, 7}, {1, 3}, DType::kF32);
    EXPECT_EQ(download(ops::take_along_axis(encoder(), x, at, 1)), (Values{0, 0, 0, 0, 5, 7, 0, 0}))
        << name_of(index_type);
    const Tensor dy = upload({1, 2, 3, 4, 5, 6, 7, 8}, {1, 8}, DType::kF32);
    for (const std::int64_t copies : {1, 2}) {  // both ways of building dx
      const Tensor wide = at.broadcast_to({copies, 8});
      const Tensor dys = dy.broadcast_to({copies, 8});
      const double n = static_cast<double>(copies);
      EXPECT_EQ(download(ops::take_along_axis_backward(encoder(), dys, wide, {1, 3}, 1)),
                (Values{5 * n, 0, 6 * n}))
          << name_of(index_type);
    }
  }
}

TEST_P(TakeAlongAxis, EveryElementTypeIsMoved) {
  for (std::size_t t = 0; t < kDTypeCount; ++t) {
    const auto dtype = static_cast<DType>(t);
    Noise noise(t + 1);
    const Values x = random_values(noise, 20, dtype, 100);
    const Values indices = random_indices(noise, {5, 6}, 4, DType::kI16, true);
    const Tensor named = upload(indices, {5, 6}, DType::kI16);
    EXPECT_EQ(download(ops::take_along_axis(encoder(), upload(x, {5, 4}, dtype), named, 1)),
              values(oracle({5, 4}, {5, 6}, 1, x, indices, {}).y))
        << name_of(dtype);
  }
}

TEST_P(TakeAlongAxis, MatchesOracleForViews) {
  for (const DType dtype : kTypes) {
    check({5, 33}, {5, 7}, 1, dtype, {DType::kU32, true, true});
    check({33, 5}, {7, 5}, 0, dtype, {DType::kI64, true, true});
    for (const std::int64_t offset : {1, 3, 17}) {
      check({5, 257}, {5, 10}, 1, dtype, {DType::kU32, false, false, offset});
      check({5, 257}, {5, 200}, 1, dtype, {DType::kU8, false, false, offset});
    }
  }
}

// Large enough to be written past the cache, with rows that start in the middle of a line.
TEST_P(TakeAlongAxis, MatchesOracleWhenStreamed) {
  for (const DType dtype : kTypes) {
    const std::int64_t half = dtype == DType::kF32 ? 1 : 2;
    check({scaled(550 * half), 2047}, {scaled(550 * half), 7}, 1, dtype,
          {DType::kU32, true, false, 3});
    check({scaled(16 * half), 70001}, {scaled(16 * half), 9}, 1, dtype,
          {DType::kU32, true, false, 3});
  }
  check({scaled(320), 3331}, {scaled(320), 3301}, 1, DType::kF32, {DType::kU16, true, false, 1});
  check({scaled(640), 3331}, {scaled(640), 3301}, 1, DType::kBF16, {DType::kU16, true, false, 1});
}

TEST_P(TakeAlongAxis, WithoutAnAxisXIsFlat) {
  Noise noise(3);
  const Values x = random_values(noise, 24, DType::kF32);
  const Values indices{0, 23, -1, 24, 7, 7, -24, -25, 11};
  const Values dy = random_values(noise, 9, DType::kF32);
  const Expected want = oracle({24}, {9}, 0, x, indices, dy);
  const Tensor at = upload(indices, {9}, DType::kI64);
  for (const Tensor& t :
       {upload(x, {2, 3, 4}, DType::kF32), upload_strided(x, {4, 6}, DType::kF32)}) {
    EXPECT_EQ(download(ops::take_along_axis(encoder(), t, at)), values(want.y));
    const Tensor dx =
        ops::take_along_axis_backward(encoder(), upload(dy, {9}, DType::kF32), at, t.shape());
    EXPECT_EQ(dx.shape(), t.shape());
    expect_close("flat dx", download(dx), want.dx, DType::kF32, want.terms);
  }
  EXPECT_EQ(download(ops::take_along_axis(encoder(), upload({9}, {}, DType::kF32),
                                          upload({0, -1, 1}, {3}, DType::kI8))),
            (Values{9, 9, 0}));
}

TEST_P(TakeAlongAxis, EmptyExtents) {
  const Tensor at = upload({0, -1}, {2, 1}, DType::kI32);
  const Tensor none = encoder().empty({2, 0}, DType::kF32);
  EXPECT_EQ(download(ops::take_along_axis(encoder(), none, at, 1)), (Values{0, 0}));  // C = 0
  EXPECT_EQ(ops::take_along_axis(encoder(), none, at, 0).size(), 0);
  const Tensor no_index = encoder().empty({2, 0}, DType::kI32);
  for (const Shape& x : {Shape{2, 5}, Shape{1, 5}}) {  // k = 0: nothing reaches dx
    EXPECT_EQ(download(ops::take_along_axis_backward(encoder(), none, no_index, x, 1)),
              Values(static_cast<std::size_t>(count_of(x)), 0.0));
  }
  const Tensor dy = upload({1, 2}, {2, 1}, DType::kF32);
  EXPECT_EQ(ops::take_along_axis_backward(encoder(), dy, at, {2, 0}, 1).size(), 0);
}

TEST_P(TakeAlongAxis, NanAndInfinityStayWhereTheyAre) {
  const double inf = INFINITY, nan = std::nan("");
  const Tensor x = upload({nan, 1, inf, -inf, nan}, {1, 5}, DType::kBF16);
  EXPECT_EQ(
      download(ops::take_along_axis(encoder(), x, upload({1, 3, 2, 9}, {1, 4}, DType::kU8), 1)),
      (Values{1, -inf, inf, 0}));
  const Tensor bits = upload({0x7f81, 0xffff, 0x8000}, {3}, DType::kU16);  // payloads and −0
  const Tensor as_bf16(bits.buffer(), DType::kBF16, {3});
  const Tensor y = ops::take_along_axis(encoder(), as_bf16, upload({2, 1, 0}, {3}, DType::kU8), 0);
  EXPECT_EQ(download(Tensor(y.buffer(), DType::kU16, {3})), (Values{0x8000, 0xffff, 0x7f81}));
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols : {6, 100}) {
      const Tensor dy = upload({nan, inf, 2, inf, 3}, {1, 5}, dtype);
      const Tensor at = upload({1, 2, 3, 77777, 4}, {1, 5}, DType::kU32);
      const Values dx = download(ops::take_along_axis_backward(encoder(), dy, at, {1, cols}, 1));
      EXPECT_TRUE(std::isnan(dx[1]));
      EXPECT_EQ(Values(dx.begin() + 2, dx.begin() + 6), (Values{inf, 2, 3, 0}));
      EXPECT_EQ(dx[0], 0);
    }
  }
}

TEST_P(TakeAlongAxis, SameBitsOnEveryRun) {
  Noise noise(5);
  struct Case {
    Shape x, indices;
    std::int64_t axis;
  };
  for (const Case& c :
       {Case{{300, 512}, {300, 10}, 1}, Case{{300, 64}, {300, 200}, 1},
        Case{{4, 20000}, {4, scaled(30000)}, 1}, Case{{1, 50}, {scaled(9000), 10}, 1},
        Case{{50, 1}, {10, scaled(9000)}, 0}, Case{{scaled(900), 70}, {scaled(900), 70}, 0},
        Case{{1, 3, 40}, {777, 5, 40}, 1}}) {
    for (const DType dtype : kTypes) {
      const Shape y_shape = shape_of_y(c.x, c.indices, c.axis);
      const Tensor x = upload(random_values(noise, count_of(c.x), dtype, 4), c.x, dtype);
      const Tensor dy = upload(random_values(noise, count_of(y_shape), dtype), y_shape, dtype);
      const Tensor at = upload(random_indices(noise, c.indices, c.x[c.axis], DType::kI32, true),
                               c.indices, DType::kI32);
      expect_repeatable(encoder(), [&] {
        return std::vector<Tensor>{ops::take_along_axis(encoder(), x, at, c.axis),
                                   ops::take_along_axis_backward(encoder(), dy, at, c.x, c.axis)};
      });
    }
  }
}

TEST_P(TakeAlongAxis, RandomShapesAndAxes) {
  EXPECT_TRUE(rc::check("take_along_axis matches its oracle", [this] {
    Shape x, indices;
    const int rank = *rc::gen::inRange(1, 5);
    for (int i = 0; i < rank; ++i) {
      const std::int64_t n = *rc::gen::inRange(1, 7);
      const int stretched = *rc::gen::inRange(0, 4);
      x.push_back(stretched == 1 ? 1 : n);
      indices.push_back(stretched == 2 ? 1 : n);
    }
    const int axis = *rc::gen::inRange(0, rank);
    x[axis] = *rc::gen::inRange(1, 60);
    indices[axis] = *rc::gen::inRange(0, 90);
    const auto pick = [](const auto& types) {
      return *rc::gen::elementOf(std::vector<DType>(std::begin(types), std::end(types)));
    };
    check(x, indices, axis - (*rc::gen::arbitrary<bool>() ? rank : 0), pick(kTypes),
          {pick(kIndexTypes), *rc::gen::arbitrary<bool>(), *rc::gen::arbitrary<bool>()});
    RC_ASSERT(!HasFailure());
  }));
}

// The four acceptance tests of the top-k entry point, with the inputs and tolerances they came with.
class TakeAlongAxisTopk : public OnDevice {
 protected:
  static Values wave(int n, double step, double start, double size) {
    Values v;
    for (int i = 0; i < n; ++i)
      v.push_back(round_to(DType::kF32, std::sin(step * i + start) * size));
    return v;
  }
};

TEST_P(TakeAlongAxisTopk, ForwardMatchesOracle) {
  const Values x = wave(32, 0.137, -0.4, 0.7);
  const Values indices{0, 3, 7, 1, 4, 6, 2, 5, 0, 7, 0, 4};
  const Values y = download(ops::take_along_axis_topk(encoder(), upload(x, {4, 8}, DType::kF32),
                                                      upload(indices, {4, 3}, DType::kU32)));
  ASSERT_EQ(y.size(), 12U);
  for (std::size_t i = 0; i < 12; ++i) {
    const double want = x[i / 3 * 8 + static_cast<std::size_t>(indices[i])];
    EXPECT_NEAR(y[i], want, 1e-6 * std::max(1.0, std::abs(want)));
  }
}

TEST_P(TakeAlongAxisTopk, BackwardScatterMatchesOracle) {
  const Values dy = wave(6, 0.231, 0.1, 0.6);
  const Values indices{0, 4, 1, 5, 2, 3};
  Values want(18);
  for (std::size_t i = 0; i < 6; ++i)
    want[i / 2 * 6 + static_cast<std::size_t>(indices[i])] = dy[i];
  const Values dx = download(ops::take_along_axis_topk_backward(
      encoder(), upload(dy, {3, 2}, DType::kF32), upload(indices, {3, 2}, DType::kU32), 6));
  ASSERT_EQ(dx.size(), 18U);
  for (std::size_t i = 0; i < 18; ++i) EXPECT_NEAR(dx[i], want[i], 1e-6);
}

TEST_P(TakeAlongAxisTopk, BackwardMatchesFiniteDifference) {
  Values x;
  for (int i = 0; i < 24; ++i) x.push_back(0.3 + 0.013 * i);
  const Tensor at = upload({0, 3, 1, 5, 2, 4, 0, 4}, {4, 2}, DType::kU32);
  const auto loss = [&](const Values& v) {
    const Values y =
        download(ops::take_along_axis_topk(encoder(), upload(v, {4, 6}, DType::kF32), at));
    return std::accumulate(y.begin(), y.end(), 0.0);
  };
  const Values dx = download(ops::take_along_axis_topk_backward(
      encoder(), upload(Values(8, 1.0), {4, 2}, DType::kF32), at, 6));
  for (std::size_t i = 0; i < 24; ++i) {
    Values ahead = x, behind = x;
    ahead[i] += 1e-3;
    behind[i] -= 1e-3;
    const double slope = (loss(ahead) - loss(behind)) / 2e-3;
    EXPECT_NEAR(dx[i], slope, 1e-3 * std::max(1.0, std::abs(slope)));
  }
}

TEST_P(TakeAlongAxisTopk, RejectsMoreThanTheRowHas) {
  const Tensor x = encoder().zeros({1, 4}, DType::kF32), dy = encoder().zeros({1, 5}, DType::kF32);
  const Tensor at = encoder().zeros({1, 5}, DType::kU32);
  EXPECT_THROW(ops::take_along_axis_topk(encoder(), x, at), Error);
  EXPECT_THROW(ops::take_along_axis_topk_backward(encoder(), dy, at, 4), Error);
  EXPECT_EQ(ops::take_along_axis(encoder(), x, at, 1).shape(), (Shape{1, 5}));  // not top-k: legal
}

MT_ON_EVERY_BACKEND(TakeAlongAxis);
MT_ON_EVERY_BACKEND(TakeAlongAxisTopk);

}  // namespace
}  // namespace mlxtape::test
