#include "mlxtape/ops/take.h"

#include <cmath>
#include <numeric>

#include "support/indices.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using Values = std::vector<double>;
using Axis = std::optional<std::int64_t>;

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// Where in x [outer, length, width] each element of y comes from, or -1: the formula of take.h.
std::vector<std::int64_t> sources(std::int64_t outer, std::int64_t length, std::int64_t width,
                                  const Values& indices) {
  std::vector<std::int64_t> from;
  for (std::int64_t o = 0; o < outer; ++o) {
    for (const double index : indices) {
      const auto p =
          static_cast<std::int64_t>(index < 0 ? index + static_cast<double>(length) : index);
      for (std::int64_t i = 0; i < width; ++i) {
        from.push_back(p >= 0 && p < length ? (o * length + p) * width + i : -1);
      }
    }
  }
  return from;
}

Values taken(const std::vector<std::int64_t>& from, const Values& x) {
  Values y;
  for (const std::int64_t i : from) y.push_back(i < 0 ? 0 : x[at(i)]);
  return y;
}

Refs returned(const std::vector<std::int64_t>& from, const Values& dy, std::int64_t size) {
  Refs dx(at(size), Ref{0, 0});
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] < 0) continue;
    dx[at(from[i])].value += dy[i];
    dx[at(from[i])].scale += std::abs(dy[i]);
  }
  return dx;
}

TEST(TakeOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  const auto from = sources(2, 5, 3, {0, 4, 4, -1, 2, 9});
  const Values x = random_values(noise, 30, DType::kF64),
               dy = random_values(noise, 36, DType::kF64);
  const auto loss = [&](const Arrays& in) {
    const Values y = taken(from, in[0]);
    return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
  };
  expect_gradient(loss, {x}, {values_of(returned(from, dy, 30))});
}

class Take : public OnDevice {
 protected:
  struct How {
    DType index_type = DType::kI32;
    bool strided = false;
    std::int64_t offset = 0;
  };
  void check(const Shape& shape, const Shape& index_shape, Axis axis, DType dtype, How how) {
    Noise noise(static_cast<std::uint64_t>(count_of(shape) + count_of(index_shape)));
    std::int64_t outer = 1, length = count_of(shape), width = 1;
    Shape y_shape = index_shape;
    if (axis) {
      const std::int64_t a = *normal_axis(*axis, shape.rank());
      length = shape[a];
      y_shape = Shape(shape.begin(), shape.begin() + a);
      for (const std::int64_t n : index_shape) y_shape.push_back(n);
      for (std::int64_t i = a + 1; i < shape.rank(); ++i) y_shape.push_back(shape[i]);
      for (std::int64_t i = 0; i < shape.rank(); ++i) {
        if (i != a) (i < a ? outer : width) *= shape[i];
      }
    }
    const Values v = random_indices(noise, count_of(index_shape), length, how.index_type);
    const Values x = random_values(noise, count_of(shape), dtype);
    const Values dy = random_values(noise, count_of(y_shape), dtype);
    const auto put = [&](const Values& values, const Shape& s, DType type) {
      return how.strided && s.rank() > 0 ? upload_strided(values, s, type)
                                         : upload(values, s, type, how.offset);
    };
    Tape tape(encoder());
    const Tensor in = tape.watch(put(x, shape, dtype));
    const Tensor y = ops::take(tape, in, put(v, index_shape, how.index_type), axis);
    const std::string where = to_string(shape) + to_string(index_shape) + " " + name_of(dtype);
    ASSERT_EQ(y.shape(), y_shape) << where;
    const auto from = sources(outer, length, width, v);
    EXPECT_EQ(download(y), taken(from, x)) << where;
    tape.backward(y, put(dy, y_shape, dtype));
    expect_close("dx " + where, download(tape.grad(in)), returned(from, dy, count_of(shape)), dtype,
                 count_of(index_shape));
  }
};

TEST_P(Take, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t width : {1, 2, 7, 31, 32, 33, 63, 64, 65, 257}) {
      check({11, width}, {40}, 0, dtype, {});
      check({3, 5, width}, {2, 9}, 1, dtype, {DType::kU32, false, 1});
    }
    for (const std::int64_t length : {1, 2, 31, 300}) {
      check({length}, {17}, 0, dtype, {});
      check({4, length}, {70}, -1, dtype, {DType::kI64, true});
    }
    check({5, 6, 7}, {}, 1, dtype, {});
    check({5, 6, 7}, {31}, std::nullopt, dtype, {});
    check({5, 6}, {2, 3, 4}, std::nullopt, dtype, {DType::kU8, true});
    check({7, 3, 1, 5}, {2, 2}, 0, dtype, {DType::kI16, true, 0});
  }
}

TEST_P(Take, EveryIndexAndElementType) {
  for (const DType type : {DType::kU8, DType::kU16, DType::kU32, DType::kU64, DType::kI8,
                           DType::kI16, DType::kI32, DType::kI64}) {
    check({90, 5}, {50}, 0, DType::kF32, {type});
  }
  for (const DType type :
       {DType::kBool, DType::kI8, DType::kU16, DType::kI32, DType::kI64, DType::kF64}) {
    const Tensor x = upload({0, 1, 1, 0, 1, 0}, {3, 2}, type);
    const Tensor index = upload({-1, 0, 3}, {3}, DType::kI32);
    EXPECT_EQ(download(ops::take(encoder(), x, index, 0)), (Values{1, 0, 0, 1, 0, 0}));
  }
}

TEST_P(Take, EmptyExtents) {
  for (const DType dtype : kTypes) {
    check({0, 4}, {3}, 0, dtype, {});
    check({4, 0}, {3}, 0, dtype, {});
    check({4, 3}, {0}, 0, dtype, {});
    check({0, 4, 3}, {2}, 1, dtype, {});
  }
}

// Rows past a mebibyte are cut, results past 4 MiB go past the cache; one row that all name.
TEST_P(Take, LargeRowsAndManyOfThem) {
  check({3, scaled(300001)}, {4}, 0, DType::kF32, {});
  check({50, 515}, {scaled(3000)}, 0, DType::kF32, {});
  check({50, 515}, {scaled(3000)}, 0, DType::kBF16, {DType::kI32, false, 3});
  check({1, 70}, {scaled(5000)}, 0, DType::kF32, {});
  check({2, 3, 1}, {scaled(9000)}, 1, DType::kBF16, {});
  check({200000}, {scaled(5000)}, 0, DType::kF32,
        {});  // single elements, too many to look at all indices for each
  check({scaled(100000)}, {5000}, 0, DType::kF32, {});
}

TEST_P(Take, StridedRowsAreReadInPlace) {
  const Tensor x = upload({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {4, 3}, DType::kF32);
  const Tensor part = x.slice(0, 1, 4, 2);  // rows 1 and 3
  const Tensor index = upload({1, 0, 1}, {3}, DType::kI32);
  EXPECT_EQ(download(ops::take(encoder(), part, index, 0)),
            (Values{9, 10, 11, 3, 4, 5, 9, 10, 11}));
  EXPECT_EQ(download(ops::take(encoder(), part, index, 1)), (Values{4, 3, 4, 10, 9, 10}));
  EXPECT_EQ(download(ops::take(encoder(), x.transpose({1, 0}), index, 0)),
            (Values{1, 4, 7, 10, 0, 3, 6, 9, 1, 4, 7, 10}));
  EXPECT_EQ(download(ops::take(encoder(), x.transpose({1, 0}), index)), (Values{3, 0, 3}));
  EXPECT_EQ(download(ops::take(encoder(), x.slice(1, 0, 2), index, 0)), (Values{3, 4, 0, 1, 3, 4}));
}

// Axes before or behind that no single step walks through.
TEST_P(Take, StridesThatDoNotJoin) {
  const Values v{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  const Tensor before = upload(v, {2, 3, 2}, DType::kF32).slice(1, 0, 2);
  EXPECT_EQ(download(ops::take(encoder(), before, upload({1, 0, 1}, {3}, DType::kI32), 2)),
            (Values{1, 0, 1, 3, 2, 3, 7, 6, 7, 9, 8, 9}));
  const Tensor behind = upload(v, {2, 2, 3}, DType::kF32).slice(2, 0, 2);
  EXPECT_EQ(download(ops::take(encoder(), behind, upload({1, 0}, {2}, DType::kI32), 0)),
            (Values{6, 7, 9, 10, 0, 1, 3, 4}));
}

TEST_P(Take, NanAndInfinityStayWhereTheyAre) {
  const double inf = INFINITY, nan = std::nan("");
  for (const DType dtype : kTypes) {
    const Tensor dy = upload({nan, inf, 2, 3, 4, 5, inf, inf}, {4, 2}, dtype);
    const Values dx = download(
        ops::take_backward(encoder(), dy, upload({1, 0, 3, 77}, {4}, DType::kU32), {4, 2}, 0));
    EXPECT_TRUE(std::isnan(dx[2]));
    EXPECT_EQ(dx[3], inf);
    EXPECT_EQ((Values{dx[0], dx[1], dx[4], dx[5], dx[6], dx[7]}), (Values{2, 3, 0, 0, 4, 5}));
  }
}

TEST_P(Take, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const DType dtype : kTypes) {
    const Tensor dy = upload(random_values(noise, 2000 * 33, dtype), {2000, 33}, dtype);
    const Tensor index = upload(random_indices(noise, 2000, 40, DType::kI32), {2000}, DType::kI32);
    expect_repeatable(encoder(), [&] {
      return std::vector<Tensor>{ops::take_backward(encoder(), dy, index, {40, 33}, 0),
                                 ops::take(encoder(), dy, index, 0)};
    });
  }
}

// mx.take(a, indices, axis=…) of mx.arange(12).reshape(3, 4), and mx.grad of (take(a)·a).sum().
TEST_P(Take, AsMlx) {
  const Values v{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  Tape tape(encoder());
  const Tensor a = tape.watch(upload(v, {3, 4}, DType::kF32));
  const auto take = [&](const Values& indices, const Shape& shape, Axis axis) {
    return download(ops::take(encoder(), a, upload(indices, shape, DType::kI32), axis));
  };
  EXPECT_EQ(take({3, -4, 1}, {3}, -1), (Values{3, 0, 1, 7, 4, 5, 11, 8, 9}));
  EXPECT_EQ(take({2, 0, -1, 1}, {2, 2}, -2),
            (Values{8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7}));
  EXPECT_EQ(take({11, 0, -1, 5}, {2, 2}, std::nullopt), (Values{11, 0, 11, 5}));
  EXPECT_EQ(take({1}, {}, 1), (Values{1, 5, 9}));
  tape.backward(ops::take(tape, a, upload({2, 2, -3}, {3}, DType::kI32), 0), a.detach());
  EXPECT_EQ(download(tape.grad(a)), (Values{8, 9, 10, 11, 0, 0, 0, 0, 4, 6, 8, 10}));
}

// ---- gather ----

class TakeGather : public Take {};

// The formula of take.h, one element at a time.
std::vector<std::int64_t> gather_sources(const Shape& x, const std::vector<Values>& indices,
                                         const std::vector<std::int64_t>& axes,
                                         const Shape& slice) {
  std::vector<std::int64_t> from;
  const Strides strides = contiguous_strides(x);
  for (std::size_t j = 0; j < indices[0].size(); ++j) {
    std::int64_t base = 0;
    bool inside = true;
    for (std::size_t k = 0; k < axes.size(); ++k) {
      auto p = static_cast<std::int64_t>(indices[k][j]);
      if (p < 0) p += x[axes[k]];
      inside &= p >= 0 && p < x[axes[k]];
      base += p * strides[axes[k]];
    }
    for (std::int64_t s = 0; s < count_of(slice); ++s) {
      std::int64_t rest = s, place = base;
      for (std::int64_t a = x.rank() - 1; a >= 0; --a) {
        place += rest % slice[a] * strides[a];
        rest /= slice[a];
      }
      from.push_back(inside ? place : -1);
    }
  }
  return from;
}

TEST_P(TakeGather, MatchesOracleForEveryChoiceOfAxes) {
  struct Case {
    Shape x;
    std::vector<std::int64_t> axes;
    Shape slice;
  };
  for (const Case& c : {Case{{5, 6, 7}, {0}, {1, 6, 7}}, Case{{5, 6, 7}, {0, 1}, {1, 1, 7}},
                        Case{{5, 6, 7}, {2, 0}, {1, 6, 1}}, Case{{5, 6, 7}, {1}, {2, 1, 3}},
                        Case{{5, 6, 7}, {0, 1, 2}, {1, 1, 1}}, Case{{5, 6, 7}, {2}, {5, 0, 1}},
                        Case{{4, 33}, {0}, {1, 20}}}) {
    for (const DType dtype : kTypes) {
      Noise noise(3);
      std::vector<Values> indices;
      std::vector<Tensor> tensors;
      for (std::size_t k = 0; k < c.axes.size(); ++k) {
        const DType type = k == 0 ? DType::kI32 : DType::kI64;
        indices.push_back(random_indices(noise, 60, c.x[c.axes[k]], type));
        tensors.push_back(upload(indices.back(), {4, 15}, type));
      }
      Shape y_shape{4, 15};
      for (const std::int64_t n : c.slice) y_shape.push_back(n);
      const Values x = random_values(noise, count_of(c.x), dtype);
      const Values dy = random_values(noise, count_of(y_shape), dtype);
      Tape tape(encoder());
      const Tensor in = tape.watch(upload(x, c.x, dtype));
      const Tensor y = ops::gather(tape, in, tensors, c.axes, c.slice);
      ASSERT_EQ(y.shape(), y_shape);
      const auto from = gather_sources(c.x, indices, c.axes, c.slice);
      EXPECT_EQ(download(y), taken(from, x));
      EXPECT_EQ(download(ops::gather(encoder(), in, tensors, c.axes, c.slice)), taken(from, x));
      tape.backward(y, upload(dy, y_shape, dtype));
      expect_close("dx", download(tape.grad(in)), returned(from, dy, count_of(c.x)), dtype, 60);
    }
  }
}

TEST_P(TakeGather, LeadingAxesWithBroadcastIndices) {
  Tape tape(encoder());
  const Tensor x =
      tape.watch(upload({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {2, 3, 2}, DType::kF32));
  const Tensor rows = upload({0, 1}, {2, 1}, DType::kI32), cols = upload({2, -3}, {2}, DType::kI32);
  const Tensor y = ops::gather(tape, x, {rows, cols});
  EXPECT_EQ(y.shape(), (Shape{2, 2, 2}));
  EXPECT_EQ(download(y), (Values{4, 5, 0, 1, 10, 11, 6, 7}));
  EXPECT_EQ(download(ops::gather(encoder(), x, {rows, cols})), download(y));
  tape.backward(y, upload({1, 2, 3, 4, 5, 6, 7, 8}, {2, 2, 2}, DType::kF32));
  EXPECT_EQ(download(tape.grad(x)), (Values{3, 4, 0, 0, 1, 2, 7, 8, 0, 0, 5, 6}));
}

// a[i, j], a[:, i] and a[i, :, j] of mx.arange(24).reshape(2, 3, 4), and mx.grad of (a[i, j]·dy).sum().
TEST_P(TakeGather, AsMlx) {
  Values v(24);
  std::iota(v.begin(), v.end(), 0);
  Tape tape(encoder());
  const Tensor a = tape.watch(upload(v, {2, 3, 4}, DType::kF32));
  const auto ids = [&](const Values& i) {
    return upload(i, {static_cast<std::int64_t>(i.size())}, DType::kI32);
  };
  EXPECT_EQ(download(ops::gather(encoder(), a, {ids({0, 1}), ids({2, -3})})),
            (Values{8, 9, 10, 11, 12, 13, 14, 15}));
  // The indexed axes are ones behind the others: MLX puts a single one back where it was.
  const Tensor rows = ops::gather(encoder(), a, {ids({2, 0})}, {1}, {2, 1, 4});
  EXPECT_EQ(rows.shape(), (Shape{2, 2, 1, 4}));
  EXPECT_EQ(download(rows), (Values{8, 9, 10, 11, 20, 21, 22, 23, 0, 1, 2, 3, 12, 13, 14, 15}));
  const Tensor ends =
      ops::gather(encoder(), a, {ids({0, 1, 1}), ids({3, 0, -1})}, {0, 2}, {1, 3, 1});
  EXPECT_EQ(ends.shape(), (Shape{3, 1, 3, 1}));
  EXPECT_EQ(download(ends), (Values{3, 7, 11, 12, 16, 20, 15, 19, 23}));
  const Tensor y = ops::gather(tape, a, {ids({0, 1, 0}), ids({2, -3, 2})});
  tape.backward(y, upload({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, {3, 4}, DType::kF32));
  EXPECT_EQ(download(tape.grad(a)),
            (Values{0, 0, 0, 0, 0, 0, 0, 0, 10, 12, 14, 16, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0}));
}

// What counts is the axes of y: those that are indexed are not among them in the short form.
TEST_P(TakeGather, AsManyAxesAsYCanHave) {
  Noise noise(4);
  const Values v = random_values(noise, 256, DType::kF32);
  const Shape eight{2, 2, 2, 2, 2, 2, 2, 2};
  Tape tape(encoder());
  const Tensor x = tape.watch(upload(v, eight, DType::kF32));
  const Tensor i = upload({1}, {1}, DType::kI32), row = upload({1, 0}, {1, 2}, DType::kI32);
  const Tensor y = ops::gather(tape, x, {i, row});  // 2 + 8 − 2 axes
  EXPECT_EQ(y.shape(), (Shape{1, 2, 2, 2, 2, 2, 2, 2}));
  Values want(v.begin() + 192, v.end());
  want.insert(want.end(), v.begin() + 128, v.begin() + 192);
  EXPECT_EQ(download(y), want);
  EXPECT_EQ(download(ops::gather(encoder(), x, {i, row})), want);
  tape.backward(y, upload(want, y.shape(), DType::kF32));
  Values dx(v);
  std::fill(dx.begin(), dx.begin() + 128, 0);
  EXPECT_EQ(download(tape.grad(x)), dx);
  EXPECT_EQ(ops::gather(encoder(), x, std::vector<Tensor>(8, i)).shape(), Shape{1});
}

TEST(TakeCheck, SaysWhatIsWrong) {
  const auto x = Tensor::meta({4, 5}), i = Tensor::meta({3}, DType::kI32);
  const auto far = Tensor::meta({3}, DType::kI32, Backend::kMetal);
  const auto many = Tensor::meta({1, 1, 1, 1, 1, 1, 1, 1}, DType::kI32);
  const auto huge = Tensor::meta({std::int64_t{1} << 62}, DType::kI32);
  const auto back = [&](const Tensor& dy, const Tensor& indices, const Shape& shape, Axis axis) {
    return ops::take_backward_check(dy, indices, shape, axis);
  };
  const auto dy = Tensor::meta({3, 5});
  using List = std::vector<Tensor>;
  const auto gather = [&](const List& indices, const std::vector<std::int64_t>& axes,
                          const Shape& slice) {
    return ops::gather_check(x, indices, axes, slice);
  };
  EXPECT_FALSE(ops::gather_check(x, {many, i}));
  const auto odd = Tensor::meta({2}, DType::kI32);
  const auto half = Tensor::meta({std::int64_t{1} << 61}, DType::kI32);
  expect_refused({
      {"axis", ops::take_check(x, i, 2), Errc::kArgument, "axis must be in [-2, 2), got 2"},
      {"type", ops::take_check(x, x, 0), Errc::kDType, "integers, got f32"},
      {"rank", ops::take_check(x, many, 0), Errc::kShape, "at most 8 axes"},
      {"size", ops::take_check(x, huge, 0), Errc::kShape, "63 bits"},
      {"device", ops::take_check(x, far, 0), Errc::kDevice, "got metal"},
      {"x_shape", back(dy, i, {-1, 5}, 0), Errc::kShape, "x_shape must be a shape"},
      {"back axis", back(dy, i, {4, 5}, 3), Errc::kArgument, "got 3"},
      {"dy", back(x, i, {4, 5}, 0), Errc::kShape, "[3, 5], got [4, 5]"},
      {"dy type", back(Tensor::meta({3, 5}, DType::kI32), i, {4, 5}, 0), Errc::kDType, "got i32"},
      {"no index", gather({}, {}, {4, 5}), Errc::kArgument, "1 or more indices, got 0 and 0"},
      {"axes", gather({i}, {0, 1}, {1, 1}), Errc::kArgument, "got 1 and 2 axes"},
      {"slice rank", gather({i}, {0}, {1}), Errc::kShape, "each axis of x [4, 5], got [1]"},
      {"gather axis", gather({i}, {2}, {1, 5}), Errc::kArgument, "each once, got 2"},
      {"axis twice", gather({i, i}, {0, -2}, {1, 5}), Errc::kArgument, "each once, got -2"},
      {"slice", gather({i}, {0}, {2, 5}), Errc::kShape, "1 along an indexed axis"},
      {"gather type", gather({x}, {0}, {1, 5}), Errc::kDType, "integers, got f32"},
      {"gather device", gather({far}, {0}, {1, 5}), Errc::kDevice, "where x is"},
      {"broadcast", gather({i, odd}, {0, 1}, {1, 1}), Errc::kShape, "[2] after [3]"},
      {"wide slice", gather({i}, {0}, {1, 6}), Errc::kShape, "must lie in x [4, 5], got [1, 6]"},
      {"negative slice", gather({i}, {0}, {1, -1}), Errc::kShape, "must lie in x"},
      {"gather rank", gather({many}, {0}, {1, 5}), Errc::kShape, "at most 8 axes"},
      {"whole rank", ops::gather_check(x, {many}), Errc::kShape, "8 axes, got indices"},
      {"gather size", gather({half}, {0}, {1, 5}), Errc::kShape, "63 bits"},
  });
}

MT_ON_EVERY_BACKEND(Take);
MT_ON_EVERY_BACKEND(TakeGather);

}  // namespace
}  // namespace mlxtape::test
