#include "mlxtape/ops/scatter.h"

#include <cmath>
#include <numeric>

#include "support/indices.h"
#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using Values = std::vector<double>;
using Axis = std::optional<std::int64_t>;

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// Where in x [outer, length, width] each element of values [outer, count, width] goes, or -1.
std::vector<std::int64_t> targets(std::int64_t outer, std::int64_t length, std::int64_t width,
                                  const Values& indices) {
  const std::int64_t count =
      outer * width == 0 ? 0 : static_cast<std::int64_t>(indices.size()) / (outer * width);
  std::vector<std::int64_t> to;
  for (std::size_t e = 0; e < indices.size(); ++e) {
    auto p = static_cast<std::int64_t>(indices[e]);
    if (p < 0) p += length;
    const std::int64_t i = static_cast<std::int64_t>(e) % width;
    const std::int64_t o = static_cast<std::int64_t>(e) / width / count;
    to.push_back(p >= 0 && p < length ? (o * length + p) * width + i : -1);
  }
  return to;
}

Values put(const std::vector<std::int64_t>& to, Values x, const Values& values) {
  for (std::size_t e = 0; e < to.size(); ++e) {
    if (to[e] >= 0) x[at(to[e])] = values[e];
  }
  return x;
}

Refs added(const std::vector<std::int64_t>& to, const Values& x, const Values& values) {
  Refs y;
  for (const double v : x) y.push_back({v, std::abs(v)});
  for (std::size_t e = 0; e < to.size(); ++e) {
    if (to[e] < 0) continue;
    y[at(to[e])].value += values[e];
    y[at(to[e])].scale += std::abs(values[e]);
  }
  return y;
}

// dvalues of both.
Values fetched(const std::vector<std::int64_t>& to, const Values& dy) {
  Values d;
  for (const std::int64_t p : to) d.push_back(p < 0 ? 0 : dy[at(p)]);
  return d;
}

double dot(const Values& a, const Values& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

TEST(ScatterOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  const Values x = random_values(noise, 20, DType::kF64),
               dy = random_values(noise, 20, DType::kF64);
  const Values values = random_values(noise, 12, DType::kF64);
  // Places that differ: where two meet, the gradient of put is MLX's and not that of the formula.
  const auto apart = targets(2, 5, 2, {0, 1, 2, 4, -1, 9, 3, 1, 0, 0, 9, 2});
  const auto meeting = targets(2, 5, 2, {0, 1, 0, 4, 0, 1, 3, 1, 3, 9, -2, 2});
  expect_gradient([&](const Arrays& in) { return dot(put(apart, in[0], in[1]), dy); }, {x, values},
                  {put(apart, dy, Values(12, 0.0)), fetched(apart, dy)});
  expect_gradient(
      [&](const Arrays& in) { return dot(values_of(added(meeting, in[0], in[1])), dy); },
      {x, values}, {dy, fetched(meeting, dy)});
}

class Scatter : public OnDevice {
 protected:
  // Shapes that agree: x [outer…, length, …], k indices along axis.
  void check(const Shape& shape, std::int64_t k, std::int64_t axis, DType dtype,
             DType index_type = DType::kI32, bool strided = false) {
    Noise noise(static_cast<std::uint64_t>(count_of(shape) + k));
    std::int64_t outer = 1, width = 1;
    Shape v_shape = shape;
    v_shape[axis] = k;
    for (std::int64_t i = 0; i < shape.rank(); ++i) {
      if (i != axis) (i < axis ? outer : width) *= shape[i];
    }
    const Values indices = random_indices(noise, count_of(v_shape), shape[axis], index_type);
    const Values x = random_values(noise, count_of(shape), dtype);
    const Values values = random_values(noise, count_of(v_shape), dtype);
    const Values dy = random_values(noise, count_of(shape), dtype);
    const auto to = targets(outer, shape[axis], width, indices);
    const auto up = [&](const Values& v, const Shape& s, DType type) {
      return strided ? upload_strided(v, s, type) : upload(v, s, type);
    };
    const std::string where = to_string(shape) + " " + std::to_string(k) + " along " +
                              std::to_string(axis) + " " + name_of(dtype);
    const Tensor index = up(indices, v_shape, index_type);
    const auto both = [&](auto op, const Values* exact, const Refs& want, const Values& dx) {
      Tape tape(encoder());
      const Tensor tx = tape.watch(up(x, shape, dtype)),
                   tv = tape.watch(up(values, v_shape, dtype));
      const Tensor y = op(tape, tx, index, tv);
      if (exact != nullptr) {
        EXPECT_EQ(download(y), *exact) << where;
      } else {
        expect_close("y " + where, download(y), want, dtype, k + 1);
      }
      EXPECT_EQ(download(tx), x) << where;
      tape.backward(y, up(dy, shape, dtype));
      EXPECT_EQ(download(tape.grad(tx)), dx) << where;
      EXPECT_EQ(download(tape.grad(tv)), fetched(to, dy)) << where;
    };
    const Values last = put(to, x, values);
    both([&](Tape& t, const Tensor& a, const Tensor& i,
             const Tensor& v) { return ops::put_along_axis(t, a, i, v, axis); },
         &last, {}, put(to, dy, Values(values.size(), 0.0)));
    both([&](Tape& t, const Tensor& a, const Tensor& i,
             const Tensor& v) { return ops::scatter_add_axis(t, a, i, v, axis); },
         nullptr, added(to, x, values), dy);
    EXPECT_EQ(download(ops::put_along_axis(encoder(), up(x, shape, dtype), index,
                                           up(values, v_shape, dtype), axis - shape.rank())),
              last);
    expect_close("y " + where,
                 download(ops::scatter_add_axis(encoder(), up(x, shape, dtype), index,
                                                up(values, v_shape, dtype), axis)),
                 added(to, x, values), dtype, k + 1);
  }

  // Whole rows: x [rows, width], as many ids as index_shape has.
  void check_rows(std::int64_t rows, std::int64_t width, const Shape& index_shape, DType dtype) {
    Noise noise(static_cast<std::uint64_t>(rows + width));
    const std::int64_t n = count_of(index_shape);
    const Values ids = random_indices(noise, n, rows, DType::kI32);
    Values indices;
    for (const double id : ids) indices.insert(indices.end(), at(width), id);
    const auto to = targets(1, rows, width, indices);
    const Values x = random_values(noise, rows * width, dtype);
    const Values values = random_values(noise, n * width, dtype);
    const Values dy = random_values(noise, rows * width, dtype);
    Shape v_shape = index_shape;
    v_shape.push_back(width);
    Tape tape(encoder());
    const Tensor tx = tape.watch(upload(x, {rows, width}, dtype));
    const Tensor tv = tape.watch(upload(values, v_shape, dtype));
    const Tensor y = ops::scatter_add(tape, tx, upload(ids, index_shape, DType::kI32), tv);
    expect_close("y", download(y), added(to, x, values), dtype, n + 1);
    tape.backward(y, upload(dy, {rows, width}, dtype));
    EXPECT_EQ(download(tape.grad(tx)), dy);
    EXPECT_EQ(tape.grad(tv).shape(), v_shape);
    EXPECT_EQ(download(tape.grad(tv)), fetched(to, dy));
  }
};

TEST_P(Scatter, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const bool strided : {false, true}) {
      for (const std::int64_t width : {1, 2, 31, 32, 33}) {
        check({3, 5, width}, 7, 1, dtype, DType::kI32, strided);
        check({6, width}, 4, 0, dtype, DType::kI64, strided);
      }
      for (const std::int64_t k : {1, 2, 31, 32, 33, 200}) {
        check({2, 17}, k, 1, dtype, DType::kI32, strided);
        check({40}, k, 0, dtype, DType::kU32, strided);
      }
      check({2, 3, 4, 5}, 6, 2, dtype, DType::kI8, strided);
    }
    check({3, 0}, 2, 1, dtype);
    check({3, 4}, 0, 1, dtype);
    check({0, 4}, 2, 1, dtype);
    check({2, 40, 1500}, 3, 1, dtype);  // several tiles of columns
    check({3000, 12}, 5, 1, dtype);     // several tasks of rows
    check({1, 50}, scaled(40000), 1, dtype);
  }
}

TEST_P(Scatter, RowsMatchOracle) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t width : {1, 3, 16, 33, 257}) {
      check_rows(9, width, {40}, dtype);
      check_rows(50, width, {2, 15}, dtype);
    }
    check_rows(4, 5, {}, dtype);
    check_rows(4, 5, {0}, dtype);
  }
  EXPECT_EQ(ops::scatter_add(encoder(), encoder().empty({0, 3}, DType::kF32),
                             upload({0}, {1}, DType::kI32), upload({1, 2, 3}, {1, 3}, DType::kF32))
                .shape(),
            (Shape{0, 3}));
}

TEST_P(Scatter, PutMovesEveryType) {
  for (const DType type :
       {DType::kBool, DType::kU8, DType::kI16, DType::kI32, DType::kI64, DType::kF64}) {
    const Tensor x = upload({0, 1, 0, 1}, {4}, type), values = upload({1, 0, 1}, {3}, type);
    EXPECT_EQ(
        download(ops::put_along_axis(encoder(), x, upload({0, 3, 9}, {3}, DType::kU64), values, 0)),
        (Values{1, 1, 0, 0}));
  }
  const Tensor bits = upload({0x7f81, 0xffff, 0x8000}, {3}, DType::kU16);  // payloads and −0
  const Tensor x(bits.buffer(), DType::kBF16, {3});
  const Tensor y =
      ops::put_along_axis(encoder(), x, upload({0, 1}, {2}, DType::kU8), x.slice(0, 1, 3), 0);
  EXPECT_EQ(download(Tensor(y.buffer(), DType::kU16, {3})), (Values{0xffff, 0x8000, 0x8000}));
}

// mx.put_along_axis and its mx.grad of the same numbers.
TEST_P(Scatter, AsMlx) {
  Tape tape(encoder());
  const Tensor a = tape.watch(upload({1, 2, 3, 4, 5, 6}, {2, 3}, DType::kF32));
  const Tensor v = tape.watch(upload({10, 20, 30, 40}, {2, 2}, DType::kF32));
  const Tensor i = upload({0, 0, 2, -3}, {2, 2}, DType::kI32);
  const Tensor y = ops::put_along_axis(tape, a, i, v, 1);
  EXPECT_EQ(download(y), (Values{20, 2, 3, 40, 5, 30}));
  tape.backward(y, upload({1, 2, 3, 4, 5, 6}, {2, 3}, DType::kF32));
  EXPECT_EQ(download(tape.grad(a)), (Values{0, 2, 3, 0, 5, 0}));
  EXPECT_EQ(download(tape.grad(v)), (Values{1, 1, 6, 4}));

  const Tensor nine = upload({9}, {}, DType::kF32);
  EXPECT_EQ(
      download(ops::put_along_axis(encoder(), a, upload({1, 0}, {2, 1}, DType::kI32), nine, 1)),
      (Values{1, 9, 3, 9, 5, 6}));
  const Tensor flat = ops::put_along_axis(encoder(), a, upload({1, 5, 1}, {3}, DType::kI32),
                                          upload({7, 8, 9}, {3}, DType::kF32));
  EXPECT_EQ(flat.shape(), (Shape{2, 3}));
  EXPECT_EQ(download(flat), (Values{1, 9, 3, 4, 5, 8}));
  EXPECT_EQ(download(ops::scatter_add(encoder(), encoder().zeros({4, 2}, DType::kF32),
                                      upload({1, 1, 3, -4}, {2, 2}, DType::kI32),
                                      upload({0, 1, 2, 3, 4, 5, 6, 7}, {2, 2, 2}, DType::kF32))),
            (Values{6, 7, 2, 4, 0, 0, 4, 5}));
}

// What is stretched gets the sum of its copies' gradients.
TEST_P(Scatter, BroadcastingOnATape) {
  const Tensor dy = upload({1, 2, 3, 4, 5, 6}, {2, 3}, DType::kF32);
  for (const bool adds : {false, true}) {
    Tape tape(encoder());
    const Tensor x = tape.watch(upload({1, 2, 3}, {1, 3}, DType::kF32));
    const Tensor v = tape.watch(upload({10}, {1}, DType::kF32));
    const Tensor i = upload({0, 2, 1, 1}, {2, 2}, DType::kI32);
    const Tensor y =
        adds ? ops::scatter_add_axis(tape, x, i, v, 1) : ops::put_along_axis(tape, x, i, v, 1);
    EXPECT_EQ(download(y), adds ? (Values{11, 2, 13, 1, 22, 3}) : (Values{10, 2, 10, 1, 10, 3}));
    EXPECT_EQ(download(adds ? ops::scatter_add_axis(encoder(), x, i, v, 1)
                            : ops::put_along_axis(encoder(), x, i, v, 1)),
              download(y));
    tape.backward(y, dy);
    EXPECT_EQ(download(tape.grad(x)), adds ? (Values{5, 7, 9}) : (Values{4, 2, 6}));
    EXPECT_EQ(download(tape.grad(v)), (Values{1 + 3 + 5 + 5}));
  }
  for (const bool adds : {false, true}) {  // without an axis
    Tape tape(encoder());
    const Tensor x = tape.watch(upload({1, 2, 3, 4, 5, 6}, {2, 3}, DType::kF32));
    const Tensor v = tape.watch(upload({10, 20}, {2}, DType::kF32));
    const Tensor i = upload({4, -6}, {2}, DType::kI32);
    const Tensor y =
        adds ? ops::scatter_add_axis(tape, x, i, v) : ops::put_along_axis(tape, x, i, v);
    EXPECT_EQ(y.shape(), (Shape{2, 3}));
    EXPECT_EQ(download(y), adds ? (Values{21, 2, 3, 4, 15, 6}) : (Values{20, 2, 3, 4, 10, 6}));
    tape.backward(y, dy);
    EXPECT_EQ(download(tape.grad(x)),
              adds ? (Values{1, 2, 3, 4, 5, 6}) : (Values{0, 2, 3, 4, 0, 6}));
    EXPECT_EQ(download(tape.grad(v)), (Values{5, 1}));
  }
}

TEST_P(Scatter, SameBitsOnEveryRun) {
  Noise noise(5);
  for (const DType dtype : kTypes) {
    const Tensor x = upload(random_values(noise, 5000, dtype), {5, 1000}, dtype);
    const Tensor v = upload(random_values(noise, 50000, dtype), {5, 10000}, dtype);
    const Tensor i =
        upload(random_indices(noise, 50000, 1000, DType::kI32), {5, 10000}, DType::kI32);
    expect_repeatable(encoder(), [&] {
      return std::vector<Tensor>{ops::put_along_axis(encoder(), x, i, v, 1),
                                 ops::scatter_add_axis(encoder(), x, i, v, 1)};
    });
  }
}

TEST_P(Scatter, NaNStaysWhereItIsPut) {
  const Tensor x = upload({NAN, 1, 2, 3}, {4}, DType::kF32);
  const Tensor to = upload({0, 2}, {2}, DType::kI32);
  const Tensor values = upload({5, NAN}, {2}, DType::kF32);
  const Tensor put = ops::put_along_axis(encoder(), x, to, values, 0);
  EXPECT_EQ(nans_of(download(put)), places(2, 1));  // what was at 0 is gone
  const Tensor added = ops::scatter_add_axis(encoder(), x, to, values, 0);
  EXPECT_EQ(nans_of(download(added)), (std::vector<std::size_t>{0, 2}));
}

TEST(ScatterCheck, SaysWhatIsWrong) {
  const auto x = Tensor::meta({4, 5}), i = Tensor::meta({4, 2}, DType::kI32);
  const auto v = Tensor::meta({4, 2});
  const auto check = [](const Tensor& a, const Tensor& b, const Tensor& c, Axis axis) {
    return ops::put_along_axis_check(a, b, c, axis);
  };
  const auto rows = [](const Tensor& a, const Tensor& b, const Tensor& c) {
    return ops::scatter_add_check(a, b, c);
  };
  const auto flat = Tensor::meta({3}, DType::kI32);
  const auto values = Tensor::meta({3, 5});
  const std::int64_t many = std::int64_t{1} << 40;
  const auto seven = Tensor::meta({1, 1, 1, 1, 1, 1, 1, 1}, DType::kI32);
  EXPECT_FALSE(check(Tensor::meta({7}), Tensor::meta({std::int64_t{0xfffffffe}}, DType::kI32),
                     Tensor::meta({1}), 0));
  expect_refused({
      {"axis", check(x, i, v, 2), Errc::kArgument,
       "put_along_axis: axis must be in [-2, 2), got 2"},
      {"type", check(x, v, v, 1), Errc::kDType, "integers, got f32"},
      {"values type", check(x, i, Tensor::meta({4, 2}, DType::kF16), 1), Errc::kDType, "got f16"},
      {"device", check(x, Tensor::meta({4, 2}, DType::kI32, Backend::kMetal), v, 1), Errc::kDevice,
       "where x is"},
      {"values far", check(x, i, Tensor::meta({4, 2}, DType::kF32, Backend::kMetal), 1),
       Errc::kDevice, "where x is"},
      {"rank", check(x, flat, v, 1), Errc::kShape, "as many axes as x [4, 5], got [3]"},
      {"no axis", check(x, i, v, std::nullopt), Errc::kShape, "[k] when there is no axis"},
      {"values", check(x, i, Tensor::meta({4, 3}), 1), Errc::kShape,
       "against indices [4, 2], got [4, 3]"},
      {"values rank", check(x, i, Tensor::meta({1, 4, 2}), 1), Errc::kShape, "got [1, 4, 2]"},
      {"x", check(Tensor::meta({3, 5}), i, v, 1), Errc::kShape, "against x [3, 5] on every axis"},
      {"size",
       check(Tensor::meta({1, 5, many}), Tensor::meta({many, 1, 1}, DType::kI32),
             Tensor::meta({1, 1, 1}), 1),
       Errc::kShape, "63 bits"},
      {"many",
       check(Tensor::meta({7}), Tensor::meta({std::int64_t{0xffffffff}}, DType::kI32),
             Tensor::meta({1}), 0),
       Errc::kShape, "fewer than 2^32 - 1 indices along the axis, got [4294967295]"},
      {"add type", ops::scatter_add_axis_check(i, i, i, 1), Errc::kDType,
       "scatter_add_axis: x must be f32, f16 or bf16, got i32"},
      {"add axis", ops::scatter_add_axis_check(x, i, v, 2), Errc::kArgument,
       "scatter_add_axis: axis"},
      {"rows x", rows(Tensor::meta({}), flat, values), Errc::kShape, "x must be [C, …], got []"},
      {"rows type", rows(Tensor::meta({4, 5}, DType::kF16), flat, values), Errc::kDType,
       "f16, got f32"},
      {"rows values", rows(x, flat, v), Errc::kShape,
       "[indices [3], rest of x [4, 5]], got [4, 2]"},
      {"rows rank", rows(x, seven, values), Errc::kShape, "values must be"},
      {"rows device", rows(x, flat, Tensor::meta({3, 5}, DType::kF32, Backend::kMetal)),
       Errc::kDevice, "values must be where"},
      {"rows ids", rows(x, Tensor::meta({3}), values), Errc::kDType, "integers, got f32"},
  });
}

MT_ON_EVERY_BACKEND(Scatter);

}  // namespace
}  // namespace mlxtape::test
