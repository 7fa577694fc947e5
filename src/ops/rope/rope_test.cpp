#include "mlxtape/ops/rope.h"

#include <cmath>
#include <numeric>

#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::RopeOptions;

struct Case {
  std::int64_t batch, heads, tokens, cols;
  std::int64_t dims;
  bool traditional = false;
  std::int64_t offset = 0;
  std::vector<double> offsets = {};
  std::vector<double> periods = {};
  double base = 10000, scale = 1;
  Shape shape() const { return {batch, heads, tokens, cols}; }
};

// The formula block of rope.h in double; back turns the other way.
Refs oracle(const Case& c, const std::vector<double>& x, bool back) {
  Refs y(x.size());
  const std::int64_t h = c.dims / 2;
  for (std::int64_t row = 0; row < c.batch * c.heads * c.tokens; ++row) {
    const std::int64_t b = row / c.tokens / c.heads, t = row % c.tokens;
    double position = static_cast<double>(t + c.offset);
    if (!c.offsets.empty())
      position += c.offsets[c.offsets.size() == 1 ? 0 : static_cast<std::size_t>(b)];
    const auto at = [&](std::int64_t channel) {
      return static_cast<std::size_t>(row * c.cols + channel);
    };
    for (std::int64_t j = 0; j < h; ++j) {
      const double f = c.periods.empty()
                           ? std::pow(c.base, -static_cast<double>(j) / static_cast<double>(h))
                           : 1 / c.periods[static_cast<std::size_t>(j)];
      const double angle = position * c.scale * f * (back ? -1 : 1);
      const std::size_t p = at(c.traditional ? 2 * j : j),
                        q = at(c.traditional ? 2 * j + 1 : j + h);
      const double co = std::cos(angle), si = std::sin(angle);
      // An angle in (−π, π] is rounded to f32: up to 3.2 units more.
      const double size = 2 * (std::abs(x[p]) + std::abs(x[q]));
      y[p] = {x[p] * co - x[q] * si, size};
      y[q] = {x[p] * si + x[q] * co, size};
    }
    for (std::int64_t k = c.dims; k < c.cols; ++k) y[at(k)] = {x[at(k)], std::abs(x[at(k)])};
  }
  return y;
}

std::vector<double> values(const Refs& refs) {
  std::vector<double> v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

TEST(RopeOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  for (const bool traditional : {false, true}) {
    const Case c{2, 2, 3, 8, 6, traditional, 5};
    const auto x = random_values(noise, 96, DType::kF64),
               dy = random_values(noise, 96, DType::kF64);
    const auto loss = [&](const Arrays& at) {
      const auto y = values(oracle(c, at[0], false));
      return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
    };
    expect_gradient(loss, {x}, {values(oracle(c, dy, true))});
  }
}

class Rope : public OnDevice {
 protected:
  RopeOptions options_of(const Case& c, bool strided) {
    const auto place = [&](const std::vector<double>& v, DType dtype) {
      const Shape shape{static_cast<std::int64_t>(v.size())};
      return strided ? upload_strided(v, shape, dtype) : upload(v, shape, dtype);
    };
    RopeOptions o;
    o.dims = c.dims;
    o.traditional = c.traditional;
    o.base = c.base;
    o.scale = c.scale;
    o.offset = c.offset;
    if (!c.offsets.empty()) o.offsets = place(c.offsets, DType::kI32);
    if (!c.periods.empty()) o.periods = place(c.periods, DType::kF32);
    return o;
  }
  void check(const Case& c, DType dtype, bool strided = false) {
    Noise noise(static_cast<std::uint64_t>(c.cols + c.tokens));
    const auto n = *element_count(c.shape());
    const auto x = random_values(noise, n, dtype), dy = random_values(noise, n, dtype);
    Tape tape(encoder());
    const Tensor in =
        tape.watch(strided ? upload_strided(x, c.shape(), dtype) : upload(x, c.shape(), dtype));
    const Tensor y = ops::rope(tape, in, options_of(c, strided));
    const std::string at = to_string(c.shape()) + " " + name_of(dtype);
    expect_close("y " + at, download(y), oracle(c, x, false), dtype, 2);
    tape.backward(y, upload(dy, c.shape(), dtype));
    expect_close("dx " + at, download(tape.grad(in)), oracle(c, dy, true), dtype, 2);
  }
};

TEST_P(Rope, MatchesOracleForEveryShape) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool traditional : {false, true}) {
      for (const auto& [cols, dims] : std::vector<std::pair<std::int64_t, std::int64_t>>{
               {2, 2}, {4, 2}, {7, 6}, {33, 32}, {64, 64}, {65, 34}, {128, 32}, {256, 64}}) {
        check({1, 1, 1, cols, dims, traditional, 3}, dtype);
        check({2, 3, 17, cols, dims, traditional, 100}, dtype, true);
      }
    }
    check({1, 11, 3, 8, 8, false, 5}, dtype);  // more heads than a GPU's thread goes through
    check({0, 2, 3, 8, 8}, dtype);
    check({2, 2, 0, 8, 8}, dtype);
  }
}

// By whole packs and not: 12 pairs in 16 bits. More heads than a GPU's thread takes at once.
TEST_P(Rope, ManyTokens) {
  const std::int64_t tokens = scaled(150);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const auto& [cols, dims] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {64, 64}, {64, 24}, {128, 32}, {16, 16}}) {
      for (const bool strided : {false, true}) {
        check({2, 5, tokens, cols, dims, false, 3}, dtype, strided);
        check({2, 5, tokens, cols, dims, false, 7, {11, -4}}, dtype, strided);
        check({1, 37, 3, cols, dims, false, 7}, dtype, strided);
      }
    }
    check({2, 1, tokens, 16, 16, false, 1, {}, {1, 3.5, INFINITY, 2, 9, 1, 1, 0.5}}, dtype, true);
  }
}

TEST_P(Rope, OffsetsPeriodsAndScale) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool strided : {false, true}) {
      check({3, 2, 5, 8, 8, false, 7, {0, 11, -4}}, dtype, strided);
      check({3, 2, 5, 8, 8, true, 0, {9}}, dtype, strided);
      check({2, 2, 5, 8, 6, false, 1, {}, {1, 3.5, INFINITY}}, dtype, strided);
      check({2, 2, 5, 8, 6, true, 1, {}, {}, 500000, 0.25}, dtype, strided);
    }
  }
}

// One axis of heads, none or two; no dims named: all channels turn.
TEST_P(Rope, AnyNumberOfAxes) {
  const std::pair<Shape, std::int64_t> cases[] = {
      {{2, 5, 8}, 1}, {{2, 3, 5, 8}, 3}, {{2, 3, 2, 5, 8}, 6}};
  for (const auto& [shape, heads] : cases) {
    const Case c{2, heads, 5, 8, 8, false, 3};
    RopeOptions options;
    options.offset = c.offset;
    Noise noise(static_cast<std::uint64_t>(heads));
    const auto x = random_values(noise, *element_count(shape), DType::kF32);
    const Tensor in = upload(x, shape, DType::kF32);
    const Tensor y = ops::rope(encoder(), in, options);
    EXPECT_EQ(y.shape(), shape);
    expect_close("y " + to_string(shape), download(y), oracle(c, x, false), DType::kF32, 2);
    expect_close("dx " + to_string(shape), download(ops::rope_backward(encoder(), in, options)),
                 oracle(c, x, true), DType::kF32, 2);
  }
}

// Tokens before heads, as projections leave them: no copy is made, and the results lie alike.
TEST_P(Rope, HeadsOfATokenSideBySide) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool traditional : {false, true}) {
      const Case c{2, 3, 17, 40, 32, traditional, 5, {1, 30}};
      Noise noise(9);
      const auto n = *element_count(c.shape());
      const auto x = random_values(noise, n, dtype), dy = random_values(noise, n, dtype);
      const auto by_token = [&](const std::vector<double>& v) {
        const Tensor dense = upload(v, c.shape(), dtype);
        return encoder().contiguous(dense.transpose({0, 2, 1, 3})).transpose({0, 2, 1, 3});
      };
      Tape tape(encoder());
      const Tensor in = tape.watch(by_token(x));
      const Tensor y = ops::rope(tape, in, options_of(c, false));
      EXPECT_EQ(y.shape(), c.shape());
      EXPECT_TRUE(y.transpose({0, 2, 1, 3}).is_contiguous());
      expect_close("y", download(encoder().contiguous(y)), oracle(c, x, false), dtype, 2);
      tape.backward(y, by_token(dy));
      expect_close("dx", download(tape.grad(in)), oracle(c, dy, true), dtype, 2);
      const Tensor dx = ops::rope_backward(encoder(), by_token(dy), options_of(c, false));
      EXPECT_TRUE(dx.transpose({0, 2, 1, 3}).is_contiguous());
    }
  }
}

// A million positions in: the angle has 20 more bits than f32 keeps; with periods, ten more.
TEST_P(Rope, FarPositionsAreExact) {
  check({1, 1, 4, 64, 64, false, 1000003}, DType::kF32);
  check({1, 1, 4, 8, 8, false, 1000000003, {}, {1, 3, 70, 900}}, DType::kF32);
}

// mx.fast.rope(x, dims, traditional=…, base=…, scale=…, offset=…, freqs=…), and mx.grad of (rope(x)·x).sum().
TEST_P(Rope, AsMlx) {
  using Values = std::vector<double>;
  const Values x{0.1F, 0.2F, 0.3F, 0.4F, 0.5F, 0.6F, 1, 2, 3, 4, 5, 6, -1, 0.5, -0.25, 2, -3, 4};
  const auto expect = [&](const RopeOptions& o, const Values& want) {
    const Tensor y = ops::rope(encoder(), upload(x, {1, 3, 6}, DType::kF32), o);
    expect_close("rope", download(y), refs_of(want, 1), DType::kF32, 2);
  };
  expect({}, {0.100000001, 0.200000003, 0.300000012, 0.400000006, 0.5, 0.600000024, -2.82558155,
              1.76584983, 2.98706651, 3.00268006, 5.08741331, 6.0064497, -1.40244794, 0.775942624,
              -0.267233104, -1.74159098, -2.94073343, 3.99888563});
  expect({.traditional = true},
         {0.100000001, 0.200000003, 0.300000012, 0.400000006, 0.5, 0.600000024, -1.14263964,
          1.92207551, 2.81117201, 4.1348896, 4.98706198, 6.0107584, -0.0385018885, -1.11737084,
          -0.434320569, 1.9682138, -3.01720762, 3.98703623});
  const RopeOptions part{.dims = 4, .base = 100, .offset = 2};
  expect(part, {-0.314403921, 0.11654558, -0.0339143127, 0.43176049, 0.5, 0.600000024, -1.41335249,
                0.728592157, -2.82885742, 4.41238642, 5.0, 6.0, 0.464442968, -0.318306237,
                0.920213401, 2.03683114, -3.0, 4.0});
  expect({.dims = 4, .traditional = true, .base = 100, .scale = 0.5, .offset = 2},
         {-0.114263967, 0.192207545, 0.25856787, 0.427951694, 0.5, 0.600000024, -1.92425275,
          1.13896942, 2.36856079, 4.40339851, 5.0, 6.0, -0.0385018885, -1.11737084, -0.642355323,
          1.91046584, -3.0, 4.0});
  RopeOptions periods{.dims = 4, .offset = 1};
  periods.periods = upload({1, 4}, {2}, DType::kF32);
  expect(periods, {-0.198411062, 0.0948209092, 0.246237785, 0.437045783, 0.5, 0.600000024,
                   -3.14403892, -0.162537098, -0.339143097, 4.46918106, 5.0, 6.0, 1.02527249,
                   -0.997433126, 0.106378123, 1.80419707, -3.0, 4.0});
  periods.dims = 6;
  periods.traditional = true;
  periods.periods = upload({2, INFINITY, 8}, {3}, DType::kF32);
  expect(periods, {-0.0081268549, 0.223459065, 0.300000012, 0.400000006, 0.421294004, 0.657655954,
                   -1.14263964, 1.92207551, 3.0, 4.0, 3.36013842, 7.05049419, -0.569484711,
                   -0.962126374, -0.25, 2.0, -4.25661278, 2.62321281});
  const Values two(x.begin(), x.begin() + 12);
  Values twice = two;
  twice.insert(twice.end(), two.begin(), two.end());
  RopeOptions offsets{.dims = 4, .base = 100};
  offsets.offsets = upload({3, 7}, {2}, DType::kI32);
  const Tensor y = ops::rope(encoder(), upload(twice, {2, 2, 6}, DType::kF32), offsets);
  expect_close("offsets", download(y),
               refs_of({-0.141335249, 0.0728592202, -0.28288576, 0.441238672, 0.5, 0.600000024,
                        1.61676383,   0.284448504,  -2.71773338, 4.46308041,  5.0, 6.0,
                        -0.121705763, -0.104718655, 0.291869342, 0.434780419, 0.5, 0.600000024,
                        -3.11357474,  -1.47601151,  0.552858114, 4.22153902,  5.0, 6.0},
                       1),
               DType::kF32, 2);
  Tape tape(encoder());
  const Tensor in = tape.watch(upload(x, {1, 3, 6}, DType::kF32));
  tape.backward(ops::rope(tape, in, part), in.detach());
  expect_close("dx", download(tape.grad(in)),
               refs_of({0.231174558, 0.275481045, -0.215773791, 0.352292776, 0.5, 0.600000024,
                        -0.566632509, 3.09275389, -3.11109734, 3.23030567, 5.0, 6.0, 0.842844248,
                        1.23936725, -0.593391597, 1.64741278, -3.0, 4.0},
                       1),
               DType::kF32, 2);
}

TEST_P(Rope, SameBitsOnEveryRun) {
  Noise noise(2);
  const Tensor x =
      upload(random_values(noise, 2 * 3 * 50 * 64, DType::kF32), {2, 3, 50, 64}, DType::kF32);
  expect_repeatable(encoder(), [&] { return std::vector<Tensor>{ops::rope(encoder(), x)}; });
}

TEST_P(Rope, NaNStaysInItsPair) {
  std::vector<double> x(16, 1);
  x[8 + 2] = NAN;
  for (const bool traditional : {false, true}) {
    RopeOptions o;
    o.traditional = traditional;
    const Tensor y = ops::rope(encoder(), upload(x, {1, 1, 2, 8}, DType::kF32), o);
    EXPECT_EQ(nans_of(download(y)), (std::vector<std::size_t>{10, traditional ? 11U : 14U}));
  }
}

TEST(RopeCheck, SaysWhatIsWrong) {
  const auto x = Tensor::meta({2, 3, 4, 8});
  const auto with = [&](auto set) {
    RopeOptions o;
    set(o);
    return ops::rope_check(x, o);
  };
  expect_refused({
      {"rank", ops::rope_check(Tensor::meta({3, 4}), {}), Errc::kShape, "got [3, 4]"},
      {"type", ops::rope_check(Tensor::meta({1, 3, 4}, DType::kI32), {}), Errc::kDType, "got i32"},
      {"odd", with([](RopeOptions& o) { o.dims = 3; }), Errc::kArgument, "in [2, 8], got 3"},
      {"wide", with([](RopeOptions& o) { o.dims = 10; }), Errc::kArgument, "got 10"},
      {"negative", with([](RopeOptions& o) { o.dims = -2; }), Errc::kArgument, "got -2"},
      {"base", with([](RopeOptions& o) { o.base = 0; }), Errc::kArgument, "above 0"},
      {"base inf", with([](RopeOptions& o) { o.base = INFINITY; }), Errc::kArgument, "got inf"},
      {"scale", with([](RopeOptions& o) { o.scale = NAN; }), Errc::kArgument, "scale finite"},
      {"offsets type", with([](RopeOptions& o) { o.offsets = Tensor::meta({2}); }), Errc::kDType,
       "i32"},
      {"offsets", with([](RopeOptions& o) { o.offsets = Tensor::meta({3}, DType::kI32); }),
       Errc::kShape, "[B] = [2], got [3]"},
      {"offsets far",
       with([](RopeOptions& o) { o.offsets = Tensor::meta({2}, DType::kI32, Backend::kMetal); }),
       Errc::kDevice, "offsets must be where"},
      {"periods type", with([](RopeOptions& o) { o.periods = Tensor::meta({4}, DType::kF16); }),
       Errc::kDType, "f32"},
      {"periods", with([](RopeOptions& o) { o.periods = Tensor::meta({3}); }), Errc::kShape,
       "[dims/2] = [4], got [3]"},
      {"periods far",
       with([](RopeOptions& o) { o.periods = Tensor::meta({4}, DType::kF32, Backend::kMetal); }),
       Errc::kDevice, "periods must be where"},
  });
}

MT_ON_EVERY_BACKEND(Rope);

}  // namespace
}  // namespace mlxtape::test
