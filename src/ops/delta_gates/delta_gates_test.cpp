#include "mlxtape/ops/delta_gates.h"

#include <cmath>
#include <numeric>

#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::DeltaGatesInputs;

enum { kA, kB, kALog, kDtBias, kInputs };

struct Results {
  Refs decay, beta;
  std::vector<Refs> grads;  // kA … kDtBias
};

double sigma(double z) { return 1 / (1 + std::exp(-z)); }

// The formula block of delta_gates.h in double. z is a sum, whose rounding all that is made of it feels.
Results oracle(const Arrays& in, const std::vector<double>& d_decay,
               const std::vector<double>& d_beta) {
  const std::size_t heads = in[kALog].size();
  Results r;
  r.grads.resize(kInputs);
  r.grads[kALog].resize(heads);
  r.grads[kDtBias].resize(heads);
  for (std::size_t i = 0; i < in[kA].size(); ++i) {
    const std::size_t h = i % heads;
    const double z = in[kA][i] + in[kDtBias][h], s = sigma(z), beta = sigma(in[kB][i]);
    const double size = std::abs(in[kA][i]) + std::abs(in[kDtBias][h]);
    const double speed = std::exp(in[kALog][h]);
    const double softplus = std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z)));
    const Ref decay{-speed * softplus, speed * (softplus + s * size)};
    const Ref dz{-d_decay[i] * speed * s, std::abs(d_decay[i]) * speed * s * (1 + (1 - s) * size)};
    r.decay.push_back(decay);
    r.beta.push_back({beta, beta * (1 + std::abs(in[kB][i]))});
    r.grads[kA].push_back(dz);
    const double db = d_beta[i] * beta * sigma(-in[kB][i]);
    r.grads[kB].push_back({db, std::abs(db) * (1 + std::abs(in[kB][i]))});
    r.grads[kALog][h].value += d_decay[i] * decay.value;
    r.grads[kALog][h].scale += std::abs(d_decay[i]) * decay.scale;
    r.grads[kDtBias][h].value += dz.value;
    r.grads[kDtBias][h].scale += dz.scale;
  }
  return r;
}

Arrays inputs(std::int64_t tokens, std::int64_t heads, DType dtype, DType of_heads) {
  Noise noise(static_cast<std::uint64_t>(tokens * 7 + heads));
  return {random_values(noise, tokens * heads, dtype, 4),
          random_values(noise, tokens * heads, dtype, 4), random_values(noise, heads, of_heads, 2),
          random_values(noise, heads, of_heads, 2)};
}

TEST(DeltaGatesOracle, GradientMatchesCentralDifference) {
  const Arrays in = inputs(5, 3, DType::kF64, DType::kF64);
  Noise noise(4);
  const auto dd = random_values(noise, 15, DType::kF64), db = random_values(noise, 15, DType::kF64);
  const auto loss = [&](const Arrays& at) {
    const Results r = oracle(at, dd, db);
    const auto decay = values_of(r.decay), beta = values_of(r.beta);
    return std::inner_product(decay.begin(), decay.end(), dd.begin(), 0.0) +
           std::inner_product(beta.begin(), beta.end(), db.begin(), 0.0);
  };
  Arrays grads;
  for (const Refs& g : oracle(in, dd, db).grads) grads.push_back(values_of(g));
  expect_gradient(loss, in, grads);
}

class DeltaGates : public OnDevice {
 protected:
  void check(const Shape& tokens, std::int64_t heads, DType dtype, DType of_heads = DType::kF32,
             bool strided = false) {
    const std::int64_t count = *element_count(tokens);
    const Arrays in = inputs(count, heads, dtype, of_heads);
    Noise noise(8);
    const auto dd = random_values(noise, count * heads, DType::kF32);
    const auto db = random_values(noise, count * heads, DType::kF32);
    const Results want = oracle(in, dd, db);
    Shape shape = tokens;
    shape.push_back(heads);
    const auto up = [&](int i, const Shape& s, DType type) {
      const auto& v = in[static_cast<std::size_t>(i)];
      return strided ? upload_strided(v, s, type) : upload(v, s, type);
    };
    Tape tape(encoder());
    const DeltaGatesInputs at{tape.watch(up(kA, shape, dtype)), tape.watch(up(kB, shape, dtype)),
                              tape.watch(up(kALog, {heads}, of_heads)),
                              tape.watch(up(kDtBias, {heads}, of_heads))};
    const auto gates = ops::delta_gates(tape, at);
    const std::string label = " " + to_string(shape) + " " + name_of(dtype);
    const auto expect = [&](const char* what, const Tensor& got, const Refs& refs,
                            std::int64_t terms) {
      if (refs.size() > 8)
        return expect_close(what + label, download(got), refs, got.dtype(), terms);
      EXPECT_EQ(count_wrong(download(got), refs, got.dtype(), terms), 0) << what << label;
    };
    EXPECT_EQ(gates.decay.dtype(), DType::kF32);
    expect("decay", gates.decay, want.decay, 1);
    expect("beta", gates.beta, want.beta, 1);
    tape.backward({{gates.decay, upload(dd, shape, DType::kF32)},
                   {gates.beta, upload(db, shape, DType::kF32)}});
    expect("da", tape.grad(at.a), want.grads[kA], 1);
    expect("db", tape.grad(at.b), want.grads[kB], 1);
    expect("dA_log", tape.grad(at.a_log), want.grads[kALog], count);
    expect("ddt_bias", tape.grad(at.dt_bias), want.grads[kDtBias], count);
  }
};

TEST_P(DeltaGates, MatchesOracleForEveryShape) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t heads : {1, 2, 7, 8, 15, 16, 17, 31, 32, 33}) {
      for (const std::int64_t tokens : {1, 3, 100}) check({tokens}, heads, dtype);
    }
    check({2, 9}, 32, dtype, dtype);
    check({3, 40}, 12, dtype, DType::kF32, true);
    check({0}, 4, dtype);
    check({2, 3000}, 32, dtype);
  }
  check({}, 5, DType::kF32);
}

// Where exp z is infinite or nothing.
TEST_P(DeltaGates, LargeNumbers) {
  const auto of = [&](const std::vector<double>& v) {
    return upload(v, {static_cast<std::int64_t>(v.size())}, DType::kF32);
  };
  const std::vector<double> x{-1e4, -200, -88, 88, 200, 1e4};
  const std::vector<double> zeros(x.size()), ones(x.size(), 1);
  Arrays in{x, x, zeros, zeros};
  const Results want = oracle(in, ones, ones);
  const DeltaGatesInputs at{of(x), of(x), of(zeros), of(zeros)};
  const auto gates = ops::delta_gates(encoder(), at);
  EXPECT_EQ(count_wrong(download(gates.decay), want.decay, DType::kF32, 1), 0);
  EXPECT_EQ(count_wrong(download(gates.beta), want.beta, DType::kF32, 1), 0);
  const auto grads = ops::delta_gates_backward(encoder(), at, of(ones), of(ones));
  EXPECT_EQ(count_wrong(download(grads.da), want.grads[kA], DType::kF32, 1), 0);
  EXPECT_EQ(count_wrong(download(grads.db), want.grads[kB], DType::kF32, 1), 0);
}

TEST_P(DeltaGates, AGradientMayBeAbsent) {
  const Arrays in = inputs(6, 4, DType::kF32, DType::kF32);
  const auto up = [&](int i, const Shape& s) {
    return upload(in[static_cast<std::size_t>(i)], s, DType::kF32);
  };
  const DeltaGatesInputs at{up(kA, {6, 4}), up(kB, {6, 4}), up(kALog, {4}), up(kDtBias, {4})};
  const std::vector<double> ones(24, 1), none(24, 0);
  const Tensor given = upload(ones, {6, 4}, DType::kF32);
  const auto of_decay = ops::delta_gates_backward(encoder(), at, given, {});
  EXPECT_EQ(download(of_decay.db), none);
  EXPECT_NE(download(of_decay.da), none);
  const auto of_beta = ops::delta_gates_backward(encoder(), at, {}, given);
  EXPECT_EQ(download(of_beta.da), none);
  EXPECT_EQ(download(of_beta.d_a_log), std::vector<double>(4, 0));
  EXPECT_NE(download(of_beta.db), none);
}

TEST_P(DeltaGates, GradientsHaveTheTypesOfTheirInputs) {
  const std::vector<double> ones(4, 1);
  const DeltaGatesInputs at{upload(ones, {1, 4}, DType::kF16), upload(ones, {1, 4}, DType::kF16),
                            upload(ones, {4}, DType::kBF16), upload(ones, {4}, DType::kF32)};
  const auto grads = ops::delta_gates_backward(encoder(), at, {}, {});
  EXPECT_EQ(grads.da.dtype(), DType::kF16);
  EXPECT_EQ(grads.db.dtype(), DType::kF16);
  EXPECT_EQ(grads.d_a_log.dtype(), DType::kBF16);
  EXPECT_EQ(grads.d_dt_bias.dtype(), DType::kF32);
}

// −mx.exp(A)·nn.softplus(a + dt), mx.sigmoid(b), and mx.grad of their sums with the weights below.
TEST_P(DeltaGates, AsMlx) {
  const auto of = [&](const std::vector<double>& v, const Shape& s) {
    return upload(v, s, DType::kF32);
  };
  const DeltaGatesInputs at{of({0.5, -2, 3, 30}, {2, 2}), of({0, 1.5, -4, 0.25}, {2, 2}),
                            of({0.2, -1}, {2}), of({0.1, -0.3}, {2})};
  const auto gates = ops::delta_gates(encoder(), at);
  const auto same = [&](const char* what, const Tensor& got, const std::vector<double>& want) {
    EXPECT_EQ(count_wrong(download(got), refs_of(want), DType::kF32, 1), 0) << what;
  };
  same("decay", gates.decay,
       {-1.26719069480896, -0.035149216651916504, -3.8401684761047363, -10.926019668579102});
  same("beta", gates.beta, {0.5, 0.8175745010375977, 0.01798621006309986, 0.5621764659881592});
  const auto grads = ops::delta_gates_backward(encoder(), at, of({1, 2, -1, 0.5}, {2, 2}),
                                               of({1, -1, 2, 3}, {2, 2}));
  same("da", grads.da,
       {-0.7886063456535339, -0.06704453378915787, 1.1687514781951904, -0.18393972516059875});
  same("db", grads.db, {0.25, -0.1491464376449585, 0.03532541170716286, 0.738402247428894});
  same("dA_log", grads.d_a_log, {2.5729777812957764, -5.533308506011963});
  same("ddt_bias", grads.d_dt_bias, {0.3801451325416565, -0.250984251499176});
}

TEST_P(DeltaGates, SameBitsOnEveryRun) {
  const Arrays in = inputs(3000, 32, DType::kBF16, DType::kF32);
  const Tensor a = upload(in[kA], {3000, 32}, DType::kBF16),
               b = upload(in[kB], {3000, 32}, DType::kBF16);
  const DeltaGatesInputs at{a, b, upload(in[kALog], {32}, DType::kF32),
                            upload(in[kDtBias], {32}, DType::kF32)};
  expect_repeatable(encoder(), [&] {
    const auto gates = ops::delta_gates(encoder(), at);
    const auto g = ops::delta_gates_backward(encoder(), at, gates.decay, gates.beta);
    return std::vector<Tensor>{gates.decay, gates.beta, g.da, g.db, g.d_a_log, g.d_dt_bias};
  });
}

TEST_P(DeltaGates, NaNStaysNaN) {
  using Where = std::vector<std::size_t>;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Tensor zeros = upload({0, 0, 0}, {3}, DType::kF32);
    const Tensor ones = upload(std::vector<double>(6, 1), {2, 3}, DType::kF32);
    const DeltaGatesInputs at{upload({1, NAN, 2, 3, 4, 5}, {2, 3}, dtype),
                              upload({1, 2, NAN, 3, 4, 5}, {2, 3}, dtype), zeros, zeros};
    const auto gates = ops::delta_gates(encoder(), at);
    EXPECT_EQ(nans_of(download(gates.decay)), Where{1});
    EXPECT_EQ(nans_of(download(gates.beta)), Where{2});
    const auto grads = ops::delta_gates_backward(encoder(), at, ones, ones);
    EXPECT_EQ(nans_of(download(grads.da)), Where{1});
    EXPECT_EQ(nans_of(download(grads.db)), Where{2});
    EXPECT_EQ(nans_of(download(grads.d_a_log)), Where{1});
    EXPECT_EQ(nans_of(download(grads.d_dt_bias)), Where{1});
  }
}

MT_ON_EVERY_BACKEND(DeltaGates);

TEST(DeltaGatesCheck, SaysWhatIsWrong) {
  const Tensor a = Tensor::meta({3, 4}), h = Tensor::meta({4});
  const auto with = [&](auto set) {
    DeltaGatesInputs in{a, a, h, h};
    set(in);
    return ops::delta_gates_check(in);
  };
  const auto back = [&](const Tensor& dd, const Tensor& db) {
    return ops::delta_gates_backward_check({a, a, h, h}, dd, db);
  };
  expect_refused({
      {"rank", with([](auto& in) { in.a = Tensor::meta({}); }), Errc::kShape, "axis of heads"},
      {"type", with([](auto& in) { in.a = Tensor::meta({3, 4}, DType::kI32); }), Errc::kDType,
       "got i32"},
      {"no b", with([](auto& in) { in.b = {}; }), Errc::kShape, "b must be [3, 4], got []"},
      {"b", with([](auto& in) { in.b = Tensor::meta({4, 3}); }), Errc::kShape,
       "[3, 4], got [4, 3]"},
      {"b type", with([](auto& in) { in.b = Tensor::meta({3, 4}, DType::kF16); }), Errc::kDType,
       "b must be f32, got f16"},
      {"b far", with([](auto& in) { in.b = Tensor::meta({3, 4}, DType::kF32, Backend::kMetal); }),
       Errc::kDevice, "where a is"},
      {"A_log", with([](auto& in) { in.a_log = Tensor::meta({3}); }), Errc::kShape,
       "A_log must be [4]"},
      {"dt_bias type", with([](auto& in) { in.dt_bias = Tensor::meta({4}, DType::kI64); }),
       Errc::kDType, "dt_bias must be f32"},
      {"d_decay", back(Tensor::meta({3}), {}), Errc::kShape, "d_decay must be [3, 4]"},
      {"d_beta type", back({}, Tensor::meta({3, 4}, DType::kF16)), Errc::kDType,
       "d_beta must be f32"},
      {"inputs", ops::delta_gates_backward_check({a, a, h, a}, {}, {}), Errc::kShape, "dt_bias"},
  });
}

}  // namespace
}  // namespace mlxtape::test
