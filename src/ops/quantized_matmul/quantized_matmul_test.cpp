#include "mlxtape/ops/quantized_matmul.h"

#include <cmath>
#include <numeric>

#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::QuantizedWeight;
using Values = std::vector<double>;

struct Case {
  std::int64_t m, n, k;
  int bits = 4;
  std::int64_t group = 64;
};

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

enum { kX, kScales, kBiases, kInputs };

struct Data {
  Arrays in;
  Values codes, dy;
};

struct Results {
  Refs y;
  std::vector<Refs> grads;
};

// A sum and what its roundings may come to: size is what f32 is relative to, square that of terms whose factor w was
// rounded to the stored type, which err independently: three times their root is five deviations.
struct Sum {
  double value = 0, size = 0, square = 0;
  void add(double v, double most, bool rounded = false) {
    value += v;
    size += std::abs(most);
    square += rounded ? v * v : 0;
  }
  Ref ref(DType dtype, std::int64_t terms) const {
    const double step = rounding_bound(dtype, -16), sums = rounding_bound(dtype, terms) - step;
    const double error = step * (std::abs(value) + 3 * std::sqrt(square)) + sums * size;
    return {value, error / rounding_bound(dtype, terms)};
  }
};

// The formula block of quantized_matmul.h in double.
Results oracle(const Case& c, const Data& data, DType dtype, DType params) {
  const std::int64_t groups = c.k / c.group;
  std::vector<Sum> y(at(c.m * c.n)), dx(data.in[kX].size()), ds(data.in[kScales].size()), db = ds;
  for (std::int64_t n = 0; n < c.n; ++n) {
    for (std::int64_t k = 0; k < c.k; ++k) {
      const std::size_t g = at(n * groups + k / c.group);
      const double q = data.codes[at(n * c.k + k)], s = data.in[kScales][g],
                   b = data.in[kBiases][g];
      const double w = s * q + b, size = std::abs(s * q) + std::abs(b);
      for (std::int64_t m = 0; m < c.m; ++m) {
        const double x = data.in[kX][at(m * c.k + k)], dy = data.dy[at(m * c.n + n)];
        y[at(m * c.n + n)].add(x * w, x * size, c.m > 8);
        dx[at(m * c.k + k)].add(dy * w, dy * size, true);
        ds[g].add(dy * x * q, dy * x * q);
        db[g].add(dy * x, dy * x);
      }
    }
  }
  const auto refs = [](const std::vector<Sum>& sums, DType type, std::int64_t terms) {
    Refs all;
    for (const Sum& sum : sums) all.push_back(sum.ref(type, terms));
    return all;
  };
  const std::int64_t in_group = c.m * c.group;
  return {refs(y, dtype, c.k),
          {refs(dx, dtype, c.n), refs(ds, params, in_group), refs(db, params, in_group)}};
}

Data data_of(const Case& c, DType dtype, DType params, std::uint64_t seed) {
  Noise noise(seed);
  const std::int64_t most = std::int64_t{1} << c.bits;
  Data data;
  data.in = {random_values(noise, c.m * c.k, dtype),
             random_values(noise, c.n * c.k / c.group, params),
             random_values(noise, c.n * c.k / c.group, params, static_cast<double>(most) / 2)};
  for (std::int64_t i = 0; i < c.n * c.k; ++i) {
    data.codes.push_back(static_cast<double>(noise.below(most)));
  }
  data.dy = random_values(noise, c.m * c.n, dtype);
  return data;
}

// A row's codes as one stream of bits, in words.
Values quantized(const Values& codes, int bits) {
  Values words(codes.size() * at(bits) / 32);
  for (std::size_t i = 0; i < codes.size() * at(bits); ++i) {
    const auto code = static_cast<unsigned>(codes[i / at(bits)]);
    words[i / 32] += std::ldexp((code >> (i % at(bits))) & 1U, static_cast<int>(i % 32));
  }
  return words;
}

TEST(QuantizedMatmulOracle, GradientMatchesCentralDifference) {
  const Case c{3, 2, 64, 3, 32};
  const Data data = data_of(c, DType::kF64, DType::kF64, 2);
  const auto loss = [&](const Arrays& in) {
    Data moved = data;
    moved.in = in;
    const Values y = values_of(oracle(c, moved, DType::kF32, DType::kF32).y);
    return std::inner_product(y.begin(), y.end(), data.dy.begin(), 0.0);
  };
  Arrays grads;
  for (const Refs& g : oracle(c, data, DType::kF32, DType::kF32).grads)
    grads.push_back(values_of(g));
  expect_gradient(loss, data.in, grads);
}

class QuantizedMatmul : public OnDevice {
 protected:
  // offset: elements between an aligned address and the first of each tensor.
  void check(const Case& c, DType dtype, bool wide = false, bool strided = false,
             std::int64_t offset = 0) {
    const DType params = wide ? DType::kF32 : dtype;
    const Data data = data_of(c, dtype, params, static_cast<std::uint64_t>(c.m + c.n + c.bits));
    const Results want = oracle(c, data, dtype, params);
    const auto up = [&](const Values& v, const Shape& shape, DType type) {
      return strided ? upload_strided(v, shape, type) : upload(v, shape, type, offset);
    };
    const Shape groups{c.n, c.k / c.group};
    Tape tape(encoder());
    const Tensor x = tape.watch(up(data.in[kX], {c.m, c.k}, dtype));
    const Tensor s = tape.watch(up(data.in[kScales], groups, params));
    const Tensor b = tape.watch(up(data.in[kBiases], groups, params));
    const Tensor codes = up(quantized(data.codes, c.bits), {c.n, c.k * c.bits / 32}, DType::kU32);
    const Tensor y =
        ops::quantized_matmul(tape, x, {codes, s, b, c.bits, static_cast<int>(c.group)});
    const std::string label = " " + std::to_string(c.m) + "x" + std::to_string(c.n) + "x" +
                              std::to_string(c.k) + " bits " + std::to_string(c.bits) + " group " +
                              std::to_string(c.group) + " " + name_of(dtype) +
                              (wide ? " wide" : "");
    expect_close("y" + label, download(y), want.y, dtype, c.k);
    tape.backward(y, up(data.dy, {c.m, c.n}, dtype));
    expect_close("dx" + label, download(tape.grad(x)), want.grads[kX], dtype, c.n);
    expect_close("ds" + label, download(tape.grad(s)), want.grads[kScales], params, c.m * c.group);
    expect_close("db" + label, download(tape.grad(b)), want.grads[kBiases], params, c.m * c.group);
  }
};

TEST_P(QuantizedMatmul, EveryWidthAndGroup) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int bits : {2, 3, 4, 5, 6, 8}) {
      for (const std::int64_t group : {32, 64, 128}) {
        check({2, 7, 256, bits, group}, dtype);
        check({35, 7, 256, bits, group}, dtype, dtype != DType::kF32);
      }
    }
  }
}

// Every number of few rows; rows of weights that do and do not fill the blocks in which they are taken.
TEST_P(QuantizedMatmul, EveryShape) {
  for (const int bits : {4, 5, 8}) {
    for (std::int64_t m = 1; m <= 10; ++m) check({m, 5, 64, bits, 32}, DType::kF32);
    check({32, 6, 64, bits}, DType::kBF16);
    for (const std::int64_t n : {1, 2, 3, 4, 33, 150}) check({1, n, 128, bits}, DType::kBF16);
    check({4, 600, 32, bits, 32}, DType::kF32);
    check({5, 16, 64, bits}, DType::kF32);
    check({3, 9, 4096, bits, 128}, DType::kBF16, true);
  }
  check({1, 20, 2048}, DType::kF32);
  check({70, 40, 192}, DType::kF16);
  check({2, 5, 0}, DType::kF32);
  check({0, 5, 64}, DType::kF32);
  check({9, 0, 64}, DType::kF32);
}

TEST_P(QuantizedMatmul, InputsAnywhereAndScalesOfF32) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool wide : {false, true}) {
      check({3, 10, 128, 4}, dtype, wide, true);
      check({3, 10, 128, 4}, dtype, wide, false, 1);
      check({36, 10, 128, 6}, dtype, wide, true);
    }
  }
}

// More weights than are dequantised at a time.
TEST_P(QuantizedMatmul, InSeveralParts) {
  check({33, 40 + scaled(560), 512}, DType::kF32);
  check({2, 100 + scaled(1000), 512, 2}, DType::kBF16);
}

// The gradient of x on its own, and added to what is there: of one part of the weights, and of several.
TEST_P(QuantizedMatmul, GradientOfXIsAdded) {
  for (const Case& c : {Case{36, 10, 128, 6}, Case{33, 600, 512}}) {
    const Data data = data_of(c, DType::kF32, DType::kF32, 4);
    const Results want = oracle(c, data, DType::kF32, DType::kF32);
    const auto up = [&](const Values& v, const Shape& shape) {
      return upload(v, shape, DType::kF32);
    };
    const std::int64_t groups = c.k / c.group;
    const QuantizedWeight w{
        upload(quantized(data.codes, c.bits), {c.n, c.k * c.bits / 32}, DType::kU32),
        up(data.in[kScales], {c.n, groups}),
        up(data.in[kBiases], {c.n, groups}),
        {c.bits, static_cast<int>(c.group)}};
    const Tensor dy = up(data.dy, {c.m, c.n});
    const Tensor dx = up(Values(static_cast<std::size_t>(c.m * c.k), std::nan("")), {c.m, c.k});
    ops::quantized_matmul_dx_into(encoder(), w, dy, dx, false);
    const std::string what = std::to_string(c.n);
    expect_close("alone " + what, download(dx), want.grads[kX], DType::kF32, c.n);
    ops::quantized_matmul_dx_into(encoder(), w, dy, dx, true);
    Refs twice = want.grads[kX];
    for (auto& one : twice) one = {2 * one.value, 2 * one.scale};
    expect_close("added " + what, download(dx), twice, DType::kF32, c.n);
    expect_error(Errc::kShape, "dx must be contiguous", [&] {
      ops::quantized_matmul_dx_into(encoder(), w, dy, dx.slice(1, 0, 32), true);
    });
  }
}

// One axis or three; x's axes stay those of y.
TEST_P(QuantizedMatmul, AnyNumberOfAxes) {
  const Case c{6, 5, 64};
  const Data data = data_of(c, DType::kF32, DType::kF32, 3);
  const Results want = oracle(c, data, DType::kF32, DType::kF32);
  const auto up = [&](const Values& v, const Shape& shape) {
    return upload(v, shape, DType::kF32);
  };
  const QuantizedWeight w{upload(quantized(data.codes, 4), {5, 8}, DType::kU32),
                          up(data.in[kScales], {5, 1}), up(data.in[kBiases], {5, 1})};
  const Tensor y = ops::quantized_matmul(encoder(), up(data.in[kX], {1, 2, 3, 64}), w);
  EXPECT_EQ(y.shape(), (Shape{1, 2, 3, 5}));
  expect_close("y", download(y), want.y, DType::kF32, 64);
  const auto grads = ops::quantized_matmul_backward(encoder(), up(data.in[kX], {1, 2, 3, 64}), w,
                                                    up(data.dy, {1, 2, 3, 5}), {.params = false});
  EXPECT_EQ(grads.dx.shape(), (Shape{1, 2, 3, 64}));
  expect_close("dx", download(grads.dx), want.grads[kX], DType::kF32, 5);
  const Values row(data.in[kX].begin(), data.in[kX].begin() + 64);
  const Tensor one = ops::quantized_matmul(encoder(), up(row, {64}), w);
  EXPECT_EQ(one.shape(), (Shape{5}));
  expect_close("one row", download(one), Refs(want.y.begin(), want.y.begin() + 5), DType::kF32, 64);
}

// What nobody asks for is not made.
TEST_P(QuantizedMatmul, OnlyWantedGradientsAreMade) {
  const Case c{9, 6, 64};
  const Data data = data_of(c, DType::kF32, DType::kF32, 4);
  const Tensor x = upload(data.in[kX], {9, 64}, DType::kF32);
  const QuantizedWeight w{upload(quantized(data.codes, 4), {6, 8}, DType::kU32),
                          upload(data.in[kScales], {6, 1}, DType::kF32),
                          upload(data.in[kBiases], {6, 1}, DType::kF32)};
  const Tensor dy = upload(data.dy, {9, 6}, DType::kF32);
  const auto all = ops::quantized_matmul_backward(encoder(), x, w, dy);
  const auto same = [&](const Tensor& got, const Tensor& want) {
    EXPECT_EQ(bits_of(encoder(), got), bits_of(encoder(), want));
  };
  for (const bool params : {false, true}) {
    const auto before = encoder().counters().dispatches;
    const auto one = ops::quantized_matmul_backward(encoder(), x, w, dy, {!params, params});
    EXPECT_EQ(encoder().counters().dispatches - before, 2U);  // a product, and to or from w
    EXPECT_EQ(one.dx.defined(), !params);
    EXPECT_EQ(one.d_scales.defined(), params);
    EXPECT_EQ(one.d_biases.defined(), params);
    if (!params) same(one.dx, all.dx);
    if (params) same(one.d_scales, all.d_scales);
    if (params) same(one.d_biases, all.d_biases);
  }
  Tape tape(encoder());
  const Tensor watched = tape.watch(w.biases);
  const Tensor y = ops::quantized_matmul(tape, x, {w.codes, w.scales, watched});
  tape.backward(y, dy);
  same(tape.grad(watched), all.d_biases);
}

// mx.quantized_matmul(x, codes, scales, biases, transpose=True, group_size=32, bits=…) and mx.grad of its sum with dy.
TEST_P(QuantizedMatmul, AsMlx) {
  Values x;
  for (int i = 0; i < 64; ++i) x.push_back((i * 5 % 17 - 8) / 8.0);
  const Tensor in = upload(x, {2, 32}, DType::kF32);
  const Tensor dy = upload({0.5, -1, 0.25, 0.75}, {2, 2}, DType::kF32);
  struct Numbers {
    int bits;
    Values y, dx, ds;  // of dx the first row's begin
  };
  for (const auto& [bits, want_y, want_dx, want_ds] :
       {Numbers{3,
                {1.90625, 0.8046875, -1.375, -0.96875},
                {-0.4375, -0.25, -0.5, -0.1875, -0.3125},
                {3.75, 27.5}},
        Numbers{4,
                {2.28125, 0.0546875, -3.5, 0.21875},
                {0.0625, -0.25, 0.5, 0.3125, 0.1875},
                {1.0, 1.25}},
        Numbers{8,
                {-2.96875, 0.5546875, 19.25, 8.96875},
                {10.0625, 11.75, 13.5, 15.3125, 1.1875},
                {25.5, -95.75}}}) {
    Values codes;
    for (int i = 0; i < 64; ++i) codes.push_back((i * 7 + 3 * (i / 32) + i * i / 5) % (1 << bits));
    const QuantizedWeight w{upload(quantized(codes, bits), {2, bits}, DType::kU32),
                            upload({0.125, -0.0625}, {2, 1}, DType::kF32),
                            upload({-0.75, 0.5}, {2, 1}, DType::kF32), bits, 32};
    EXPECT_EQ(download(ops::quantized_matmul(encoder(), in, w)), want_y);  // every sum is exact
    const auto grads = ops::quantized_matmul_backward(encoder(), in, w, dy);
    Values dx = download(grads.dx);
    dx.resize(5);
    EXPECT_EQ(dx, want_dx);
    EXPECT_EQ(download(grads.d_scales), want_ds);
    EXPECT_EQ(download(grads.d_biases), (Values{-0.1875, 0.375}));
  }
}

TEST_P(QuantizedMatmul, SameBitsOnEveryRun) {
  for (const std::int64_t m : {3, 40}) {
    const std::int64_t n = 12 + scaled(288);
    const Case c{m, n, 512, m == 3 ? 4 : 5};
    const Data data = data_of(c, DType::kBF16, DType::kBF16, 5);
    const Tensor x = upload(data.in[kX], {m, 512}, DType::kBF16);
    const QuantizedWeight w{
        upload(quantized(data.codes, c.bits), {n, std::int64_t{16} * c.bits}, DType::kU32),
        upload(data.in[kScales], {n, 8}, DType::kBF16),
        upload(data.in[kBiases], {n, 8}, DType::kBF16), c.bits};
    const Tensor dy = upload(data.dy, {m, n}, DType::kBF16);
    expect_repeatable(encoder(), [&] {
      const auto g = ops::quantized_matmul_backward(encoder(), x, w, dy);
      return std::vector<Tensor>{ops::quantized_matmul(encoder(), x, w), g.dx, g.d_scales,
                                 g.d_biases};
    });
  }
}

TEST_P(QuantizedMatmul, NaNStaysInItsRowsAndColumns) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t m : {3, 20}) {
      const Case c{m, 4, 128};
      Data data = data_of(c, dtype, dtype, 5);
      data.in[kX][1 * 128 + 5] = NAN;
      const Tensor x = upload(data.in[kX], {m, 128}, dtype), dy = upload(data.dy, {m, 4}, dtype);
      const Tensor codes = upload(quantized(data.codes, 4), {4, 16}, DType::kU32);
      const auto weight = [&](const Values& scales) {
        return QuantizedWeight{codes, upload(scales, {4, 2}, dtype),
                               upload(data.in[kBiases], {4, 2}, dtype), 4, 64};
      };
      const QuantizedWeight w = weight(data.in[kScales]);
      EXPECT_EQ(nans_of(download(ops::quantized_matmul(encoder(), x, w))), places(4, 4));
      const auto g = ops::quantized_matmul_backward(encoder(), x, w, dy);
      EXPECT_TRUE(nans_of(download(g.dx)).empty());
      EXPECT_EQ(nans_of(download(g.d_scales)), (std::vector<std::size_t>{0, 2, 4, 6}));
      EXPECT_EQ(nans_of(download(g.d_biases)), (std::vector<std::size_t>{0, 2, 4, 6}));

      Values scales = data.in[kScales];
      scales[2 * 3 + 1] = NAN;  // of the last output, channels from 64 on
      data.in[kX][1 * 128 + 5] = 0;
      const QuantizedWeight bad = weight(scales);
      std::vector<std::size_t> last, upper;
      for (std::size_t r = 0; r < at(m); ++r) {
        last.push_back(r * 4 + 3);
        for (std::size_t i = 64; i < 128; ++i) upper.push_back(r * 128 + i);
      }
      const Tensor plain = upload(data.in[kX], {m, 128}, dtype);
      EXPECT_EQ(nans_of(download(ops::quantized_matmul(encoder(), plain, bad))), last);
      const auto back = ops::quantized_matmul_backward(encoder(), plain, bad, dy);
      EXPECT_EQ(nans_of(download(back.dx)), upper);
    }
  }
}

TEST(QuantizedMatmulCheck, SaysWhatIsWrong) {
  const auto meta = [](const Shape& shape, DType t = DType::kF32, Backend b = Backend::kCpu) {
    return Tensor::meta(shape, t, b);
  };
  const Tensor x = meta({3, 128});
  const QuantizedWeight w{meta({5, 16}, DType::kU32), meta({5, 2}), meta({5, 2})};
  const auto check = ops::quantized_matmul_check;
  const auto with = [&](auto set) {
    QuantizedWeight other = w;
    set(other);
    return check(x, other);
  };
  const auto bwd = [&](const Tensor& dy) {
    return ops::quantized_matmul_backward_check(x, w, dy);
  };
  using Weight = QuantizedWeight;
  expect_refused({
      {"no axis", check(meta({}), w), Errc::kShape, "x must have at least one axis, got []"},
      {"double", check(meta({3, 128}, DType::kF64), w), Errc::kDType, "got f64"},
      {"1 bit", with([](Weight& o) { o.format.bits = 1; }), Errc::kArgument,
       "bits must be 2, 3, 4, 5, 6 or 8, got 1"},
      {"7 bits", with([](Weight& o) { o.format.bits = 7; }), Errc::kArgument, "got 7"},
      {"9 bits", with([](Weight& o) { o.format.bits = 9; }), Errc::kArgument, "got 9"},
      {"group", with([](Weight& o) { o.format.group_size = 16; }), Errc::kArgument,
       "group_size must be 32, 64 or 128, got 16"},
      {"half a group", check(meta({3, 96}), w), Errc::kShape,
       "rows must be a multiple of the group size 64 long, got 96"},
      {"codes of rank 1", with([&](Weight& o) { o.codes = meta({16}, DType::kU32); }), Errc::kShape,
       "codes must be"},
      {"codes of 8 bits", with([](Weight& o) { o.format.bits = 8; }), Errc::kShape,
       "codes must be [5, 32], got [5, 16]"},
      {"signed codes", with([&](Weight& o) { o.codes = meta({5, 16}, DType::kI32); }), Errc::kDType,
       "codes must be u32, got i32"},
      {"codes elsewhere",
       with([&](Weight& o) { o.codes = meta({5, 16}, DType::kU32, Backend::kMetal); }),
       Errc::kDevice, "codes must be where x is (cpu), got metal"},
      {"scales", with([&](Weight& o) { o.scales = meta({5, 4}); }), Errc::kShape,
       "scales must be [5, 2], got [5, 4]"},
      {"type of scales", with([&](Weight& o) { o.scales = meta({5, 2}, DType::kF16); }),
       Errc::kDType, "scales must be f32, got f16"},
      {"biases", with([&](Weight& o) { o.biases = meta({4, 2}); }), Errc::kShape,
       "biases must be [5, 2], got [4, 2]"},
      {"biases of another type", with([&](Weight& o) { o.biases = meta({5, 2}, DType::kBF16); }),
       Errc::kDType, "biases must be f32, got bf16"},
      {"backward refuses like forward",
       ops::quantized_matmul_backward_check(meta({3, 96}), w, meta({3, 5})), Errc::kShape,
       "rows must be a multiple"},
      {"dy", bwd(meta({5, 3})), Errc::kShape, "dy must be [3, 5], got [5, 3]"},
      {"type of dy", bwd(meta({3, 5}, DType::kF16)), Errc::kDType, "dy must be f32, got f16"},
  });
  EXPECT_FALSE(check(x, w));
  EXPECT_FALSE(check(meta({3, 128}, DType::kBF16), w));  // scales of f32 beside bf16
  EXPECT_FALSE(bwd(meta({3, 5})));
}

MT_ON_EVERY_BACKEND(QuantizedMatmul);

}  // namespace
}  // namespace mlxtape::test
