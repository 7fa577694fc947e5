#include <cmath>

#include "support/optimiser_support.h"

namespace mlxtape::test {
namespace {

using ops::MuonOptions;
using ops::MuonSlot;

struct Matrix {
  std::int64_t rows, columns;
  Values at;

  double& operator()(std::int64_t r, std::int64_t c) {
    return at[static_cast<std::size_t>(r * columns + c)];
  }
  double operator()(std::int64_t r, std::int64_t c) const {
    return at[static_cast<std::size_t>(r * columns + c)];
  }
  Matrix transposed() const {
    Matrix t{columns, rows, Values(at.size())};
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) t(c, r) = (*this)(r, c);
    }
    return t;
  }
  Matrix times(const Matrix& b) const {
    Matrix y{rows, b.columns, Values(static_cast<std::size_t>(rows * b.columns))};
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t k = 0; k < columns; ++k) {
        for (std::int64_t c = 0; c < b.columns; ++c) y(r, c) += (*this)(r, k) * b(k, c);
      }
    }
    return y;
  }
};

// The header's X, as MLX computes it: a tall matrix by its transpose.
Matrix orthogonal(Matrix u, int steps) {
  const bool tall = u.rows > u.columns;
  if (tall) u = u.transposed();
  double squares = 0;
  for (const double v : u.at) squares += v * v;
  for (double& v : u.at) v /= std::sqrt(squares) + 1e-7;
  for (int i = 0; i < steps; ++i) {
    const Matrix a = u.times(u.transposed());
    Matrix b = a.times(a);
    for (std::size_t j = 0; j < b.at.size(); ++j) b.at[j] = -4.7750 * a.at[j] + 2.0315 * b.at[j];
    const Matrix bu = b.times(u);
    for (std::size_t j = 0; j < u.at.size(); ++j) u.at[j] = 3.4445 * u.at[j] + bu.at[j];
  }
  return tall ? u.transposed() : u;
}

// One step in double, in place: of w and v, with the gradient as it is given to the device.
void step(const Shape& shape, Values& w, Values& v, const Values& grad, double lr,
          const MuonOptions& o) {
  const std::int64_t rank = shape.rank(), rows = shape[rank - 2], columns = shape[rank - 1];
  const double decay = o.weight_decay, rest = 1 - o.momentum;
  Values u(w.size());
  for (std::size_t i = 0; i < w.size(); ++i) {
    const double g = grad[i] + decay * w[i];
    v[i] = o.momentum * v[i] + rest * g;
    u[i] = o.nesterov ? rest * g + o.momentum * v[i] : v[i];
  }
  const double longer =
      std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(columns)));
  const auto one = static_cast<std::size_t>(rows * columns);
  for (std::size_t first = 0; one != 0 && first < w.size(); first += one) {
    const auto begin = u.begin() + static_cast<std::ptrdiff_t>(first);
    const Matrix x = orthogonal(
        {rows, columns, Values(begin, begin + static_cast<std::ptrdiff_t>(one))}, o.ns_steps);
    for (std::size_t i = 0; i < one; ++i) w[first + i] -= lr * longer * x.at[i];
  }
}

// What is small in u grows by 3.4445 at each of 5 steps, its rounding too.
constexpr std::int64_t kGrowth = 2000;

class OptimiserMuon : public OptimiserTest {
 protected:
  void check(const Shape& shape, DType grads, bool master, const MuonOptions& o) {
    const std::int64_t n = *element_count(shape);
    Noise noise(static_cast<std::uint64_t>(n));
    const double lr = round_to(DType::kF32, 0.1), scale = 0.5;
    const Values first = random_values(noise, n, DType::kF32);
    const Values g = random_values(noise, n, grads);
    const Values velocity = random_values(noise, n, DType::kF32);
    const Values before = round_all(first, DType::kBF16);
    MuonSlot s{upload(master ? before : first, shape, master ? DType::kBF16 : DType::kF32),
               upload(g, shape, grads), upload(velocity, shape, DType::kF32)};
    if (master) s.master = upload(first, shape, DType::kF32);
    ops::muon_step(encoder(), {s}, {number(lr), {}, number(scale)}, o);
    Values w = first, v = velocity, scaled = g;
    for (double& x : scaled) x *= scale;
    step(shape, w, v, scaled, lr, o);
    const std::string at = to_string(shape);
    expect_close("v " + at, download(s.v), refs_of(v, 2), DType::kF32, 4);
    if (!master) return expect_close("w " + at, download(s.w), refs_of(w, 1), DType::kF32, kGrowth);
    const Values got = download(s.master);
    expect_alike(got, w, first);
    EXPECT_EQ(download(s.w), round_all(got, DType::kBF16));
  }
  // Products in 16 bits: singular values about 1 stray by a fifth, as they do from one step of the iteration to the next. So
  // both must point one way and be about as long.
  static void expect_alike(const Values& got, const Values& want, const Values& first) {
    double both = 0, of_got = 0, of_want = 0;
    for (std::size_t i = 0; i < first.size(); ++i) {
      const double a = got[i] - first[i], b = want[i] - first[i];
      both += a * b;
      of_got += a * a;
      of_want += b * b;
    }
    EXPECT_GT(both / std::sqrt(of_got * of_want), 0.98);
    EXPECT_NEAR(std::sqrt(of_got / of_want), 1, 0.2);
  }
  static Values round_all(Values values, DType dtype) {
    for (double& v : values) v = round_to(dtype, v);
    return values;
  }
};

TEST_P(OptimiserMuon, MatchesOracle) {
  const MuonOptions forms[] = {
      {}, {.momentum = 0.6, .weight_decay = 0.3F, .nesterov = false, .ns_steps = 3}};
  for (const MuonOptions& o : forms) {
    for (const Shape& shape : {Shape{1, 1}, Shape{6, 1}, Shape{1, 7}, Shape{3, 5}, Shape{7, 4},
                               Shape{16, 33}, Shape{40, 9}, Shape{3, 4, 6}, Shape{2, 9, 2},
                               Shape{2, 2, 3, 2}, Shape{0, 4}, Shape{4, 0}}) {
      check(shape, DType::kF32, false, o);
    }
  }
}

TEST_P(OptimiserMuon, MasterCopiesAndSixteenBits) {
  for (const Shape& shape : {Shape{4, 200}, Shape{160, 3}}) {
    check(shape, DType::kBF16, true, {});
    check(shape, DType::kF32, true, {.weight_decay = 0});
  }
  const Shape shape{3, 100};
  Noise noise(5);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {  // without a master
    const Values first = random_values(noise, 300, dtype), g = random_values(noise, 300, dtype);
    const MuonSlot s{upload(first, shape, dtype), upload(g, shape, dtype),
                     encoder().zeros(shape, DType::kF32)};
    ops::muon_step(encoder(), {s}, {number(1), {}});
    Values w = first, v(300);
    step(shape, w, v, g, 1, {});
    expect_alike(download(s.w), w, first);
  }
}

// Several at once are as one after the other, and a stack as its matrices.
TEST_P(OptimiserMuon, EachMatrixByItself) {
  Noise noise(8);
  const Values w = random_values(noise, 60, DType::kF32), g = random_values(noise, 60, DType::kF32);
  const auto part = [](const Values& all, std::size_t i) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(20 * i);
    return Values(begin, begin + 20);
  };
  const MuonSlot stack{upload(w, {3, 4, 5}, DType::kF32), upload(g, {3, 4, 5}, DType::kF32),
                       encoder().zeros({3, 4, 5}, DType::kF32)};
  std::vector<MuonSlot> apart;
  for (std::size_t i = 0; i < 3; ++i) {
    apart.push_back({upload(part(w, i), {4, 5}, DType::kF32),
                     upload(part(g, i), {4, 5}, DType::kF32),
                     encoder().zeros({4, 5}, DType::kF32)});
  }
  ops::muon_step(encoder(), {stack}, {number(0.1), {}});
  ops::muon_step(encoder(), apart, {number(0.1), {}});
  const Values all = download(stack.w);
  for (std::size_t i = 0; i < 3; ++i) {
    expect_close("w", part(all, i), refs_of(download(apart[i].w), 1), DType::kF32, kGrowth);
  }
}

TEST_P(OptimiserMuon, AGradientOfZerosLeavesTheWeight) {
  const MuonSlot s{upload({1, 2, 3, 4}, {2, 2}, DType::kF32), encoder().zeros({2, 2}, DType::kF32),
                   encoder().zeros({2, 2}, DType::kF32)};
  ops::muon_step(encoder(), {s}, {number(1), {}}, {.weight_decay = 0});
  EXPECT_EQ(download(s.w), (Values{1, 2, 3, 4}));
}

TEST_P(OptimiserMuon, SameBitsOnEveryRun) {
  Noise noise(2);
  const Values w = random_values(noise, 300 * 70, DType::kBF16),
               g = random_values(noise, 300 * 70, DType::kF32);
  expect_repeatable(encoder(), [&] {
    const MuonSlot s{upload(w, {300, 70}, DType::kBF16), upload(g, {300, 70}, DType::kF32),
                     encoder().zeros({300, 70}, DType::kF32), upload(w, {300, 70}, DType::kF32)};
    ops::muon_step(encoder(), {s}, {number(0.1), {}});
    return std::vector<Tensor>{s.w, s.v, s.master};
  });
}

MT_ON_EVERY_BACKEND(OptimiserMuon);

}  // namespace
}  // namespace mlxtape::test
