#include "mlxtape/ops/embedding.h"

#include <cmath>
#include <map>
#include <numeric>

#include "support/indices.h"
#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::EmbeddingGrad;
using Values = std::vector<double>;

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// The row that an id names, or -1.
std::int64_t row_of(double id, std::int64_t rows) {
  const auto p = static_cast<std::int64_t>(id < 0 ? id + static_cast<double>(rows) : id);
  return p >= 0 && p < rows ? p : -1;
}

Values looked_up(const Values& weight, const Values& ids, std::int64_t rows, std::int64_t width) {
  Values y;
  for (const double id : ids) {
    const std::int64_t row = row_of(id, rows);
    for (std::int64_t i = 0; i < width; ++i) y.push_back(row < 0 ? 0 : weight[at(row * width + i)]);
  }
  return y;
}

Refs gradient(const Values& dy, const Values& ids, std::int64_t rows, std::int64_t width) {
  Refs d(at(rows * width), Ref{0, 0});
  for (std::size_t j = 0; j < ids.size(); ++j) {
    const std::int64_t row = row_of(ids[j], rows);
    for (std::int64_t i = 0; row >= 0 && i < width; ++i) {
      d[at(row * width + i)].value += dy[j * at(width) + at(i)];
      d[at(row * width + i)].scale += std::abs(dy[j * at(width) + at(i)]);
    }
  }
  return d;
}

TEST(EmbeddingOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  const Values ids{3, 0, 3, -1, 9};
  const Values weight = random_values(noise, 12, DType::kF64),
               dy = random_values(noise, 15, DType::kF64);
  Values want;
  for (const Ref& r : gradient(dy, ids, 4, 3)) want.push_back(r.value);
  expect_gradient(
      [&](const Arrays& in) {
        const Values y = looked_up(in[0], ids, 4, 3);
        return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
      },
      {weight}, {want});
}

class Embedding : public OnDevice {
 protected:
  void check(std::int64_t rows, std::int64_t width, const Shape& id_shape, DType dtype, DType sum,
             DType id_type, EmbeddingGrad how) {
    const std::int64_t n = *element_count(id_shape);
    Noise noise(static_cast<std::uint64_t>(rows + width + n));
    Values ids;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t id = noise.below(rows + 1);  // rows itself is outside
      ids.push_back(
          static_cast<double>(is_signed(id_type) && noise.below(4) == 0 ? id - rows : id));
    }
    const Values weight = random_values(noise, rows * width, dtype);
    Values dy = random_values(noise, n * width, dtype);
    Shape y_shape = id_shape;
    y_shape.push_back(width);
    Tape tape(encoder());
    const Tensor w = tape.watch(upload(weight, {rows, width}, dtype), sum);
    const Tensor y = ops::embedding(tape, w, upload(ids, id_shape, id_type), how);
    ASSERT_EQ(y.shape(), y_shape);
    EXPECT_EQ(download(y), looked_up(weight, ids, rows, width));
    tape.backward(y, upload(dy, y_shape, dtype));
    EXPECT_EQ(tape.has_row_grad(w), how == EmbeddingGrad::kRows);
    EXPECT_EQ(tape.grad(w).dtype(), sum);
    // Rows are summed in the type that is watched; a dense gradient has the weight's own first.
    expect_close("dweight " + to_string(y_shape) + " " + name_of(dtype), download(tape.grad(w)),
                 gradient(dy, ids, rows, width), how == EmbeddingGrad::kRows ? sum : dtype, n);
    if (how == EmbeddingGrad::kDense) return;
    const RowGrad grad = tape.row_grad(w);
    EXPECT_EQ(grad.rows.shape(), (Shape{std::min(n, rows), width}));
    EXPECT_EQ(grad.rows.dtype(), sum);
  }
};

TEST_P(Embedding, MatchesOracleForEveryShape) {
  for (const EmbeddingGrad how : {EmbeddingGrad::kRows, EmbeddingGrad::kDense}) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t width : {1, 2, 31, 32, 33, 256, 257}) {
        check(7, width, {20}, dtype, dtype, DType::kI32, how);
        check(100, width, {3, 11}, dtype, DType::kF32, DType::kU32, how);
      }
      check(1, 8, {40}, dtype, DType::kF32, DType::kI64, how);
      check(5, 8, {}, dtype, dtype, DType::kI32, how);
      check(5, 8, {0}, dtype, dtype, DType::kI32, how);
      check(300, 64, {2, 3, 40}, dtype, DType::kF32, DType::kU16, how);
    }
  }
}

TEST_P(Embedding, TablesOfAnyRank) {
  Tape tape(encoder());
  const Tensor w =
      tape.watch(upload({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, {3, 2, 2}, DType::kF32));
  const Tensor y = ops::embedding(tape, w, upload({2, 0, 2}, {3}, DType::kI32));
  EXPECT_EQ(download(y), (Values{8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11}));
  tape.backward(y, upload(Values(12, 1.0), {3, 2, 2}, DType::kF32));
  EXPECT_EQ(download(tape.row_grad(w).ids), (Values{0, 2, -1}));
  EXPECT_EQ(tape.row_grad(w).rows.shape(), (Shape{3, 2, 2}));
  EXPECT_EQ(download(tape.grad(w)), (Values{1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 2, 2}));
}

TEST_P(Embedding, GradientsAreRoundedOnceToTheTypeTheyAreWatchedIn) {
  for (const auto grad : {ops::EmbeddingGrad::kRows, ops::EmbeddingGrad::kDense}) {
    Tape tape(encoder());
    const Tensor w = tape.watch(upload({1, 2, 3}, {3, 1}, DType::kBF16), DType::kF32);
    const Tensor ids = encoder().empty({2}, DType::kI32);
    const std::int32_t twos[] = {2, 2};
    encoder().upload(twos, sizeof twos, ids);
    tape.backward(ops::embedding(tape, w, ids, grad), upload({256, 1}, {2, 1}, DType::kBF16));
    EXPECT_EQ(download(tape.grad(w)), (std::vector<double>{0, 0, 257}));  // bf16 has 256 and 258
  }
}

// mlx.nn.Embedding of mx.arange(15).reshape(5, 3), and mx.grad of (weight[ids]·dy).sum().
TEST_P(Embedding, AsMlx) {
  Values v(15), dy(12);
  std::iota(v.begin(), v.end(), 0);
  std::iota(dy.begin(), dy.end(), 0);
  const Tensor table = upload(v, {5, 3}, DType::kF32);
  EXPECT_EQ(download(ops::embedding(encoder(), table, upload({4, 0, -1, 2}, {2, 2}, DType::kI32))),
            (Values{12, 13, 14, 0, 1, 2, 12, 13, 14, 6, 7, 8}));
  for (const EmbeddingGrad how : {EmbeddingGrad::kRows, EmbeddingGrad::kDense}) {
    Tape tape(encoder());
    const Tensor w = tape.watch(table);
    const Tensor y = ops::embedding(tape, w, upload({4, 0, 4, 2}, {2, 2}, DType::kI32), how);
    tape.backward(y, upload(dy, {2, 2, 3}, DType::kF32));
    EXPECT_EQ(download(tape.grad(w)), (Values{3, 4, 5, 0, 0, 0, 9, 10, 11, 0, 0, 0, 6, 8, 10}));
  }
}

TEST_P(Embedding, SameBitsOnEveryRun) {
  Noise noise(5);
  const Tensor dy = upload(random_values(noise, 2000 * 24, DType::kBF16), {2000, 24}, DType::kBF16);
  Values v;
  for (int i = 0; i < 2000; ++i) v.push_back(static_cast<double>(noise.below(30)));
  const Tensor ids = upload(v, {2000}, DType::kI32);
  expect_repeatable(encoder(), [&] {
    const RowGrad grad = ops::embedding_backward(encoder(), dy, ids, {500, 24}, DType::kF32);
    return std::vector<Tensor>{grad.ids, grad.rows};
  });
}

TEST_P(Embedding, NaNStaysInItsRow) {
  for (const EmbeddingGrad how : {EmbeddingGrad::kRows, EmbeddingGrad::kDense}) {
    Tape tape(encoder());
    const Tensor w = tape.watch(upload({1, 2, NAN, 4, 5, 6}, {3, 2}, DType::kBF16));
    const Tensor y = ops::embedding(tape, w, upload({1, 0, 1}, {3}, DType::kI32), how);
    EXPECT_EQ(nans_of(download(y)), (std::vector<std::size_t>{0, 4}));
    tape.backward(y, upload({1, 2, 3, NAN, 5, 6}, {3, 2}, DType::kBF16));
    EXPECT_EQ(nans_of(download(tape.grad(w))), places(1, 1));
  }
}

TEST(EmbeddingCheck, SaysWhatIsWrong) {
  const auto ids = Tensor::meta({3}, DType::kI32);
  expect_refused({
      {"rank", ops::embedding_check(Tensor::meta({}), ids), Errc::kShape, "[V, …], got []"},
      {"ids", ops::embedding_check(Tensor::meta({4, 2}), Tensor::meta({3})), Errc::kDType,
       "integers, got f32"},
  });
}

MT_ON_EVERY_BACKEND(Embedding);

}  // namespace
}  // namespace mlxtape::test
