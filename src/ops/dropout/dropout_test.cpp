#include "mlxtape/ops/dropout.h"

#include <cmath>
#include <numeric>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/random.h"
#include "mlxtape/tape/functions.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

// The formula block of dropout.h in double, with what was kept.
Refs oracle(const std::vector<double>& x, const std::vector<double>& kept, double p) {
  Refs y;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double v = kept[i] != 0 ? x[i] / (1 - p) : 0;
    y.push_back({v, std::abs(v)});
  }
  return y;
}

class Dropout : public OnDevice {
 protected:
  Tensor key(std::uint64_t seed = 3) { return ops::random_key(encoder(), seed); }

  void check(const Shape& shape, DType dtype, double p, bool strided = false,
             std::int64_t offset = 0) {
    const std::int64_t n = *element_count(shape);
    Noise noise(static_cast<std::uint64_t>(n));
    const auto x = random_values(noise, n, dtype), dy = random_values(noise, n, dtype);
    const auto kept = download(ops::random_bernoulli(encoder(), key(), shape, 1 - p));
    Tape tape(encoder());
    const Tensor in =
        tape.watch(strided ? upload_strided(x, shape, dtype) : upload(x, shape, dtype, offset));
    const Tensor drawn_from = key();
    const Tensor y = ops::dropout(tape, in, p, drawn_from);
    static_cast<void>(ops::advance_key(encoder(), drawn_from));  // must not matter
    const std::string at = to_string(shape) + " " + name_of(dtype) + " p " + std::to_string(p);
    expect_close("y " + at, download(y), oracle(x, kept, p), dtype, 1);
    tape.backward(y, strided ? upload_strided(dy, shape, dtype) : upload(dy, shape, dtype));
    expect_close("dx " + at, download(tape.grad(in)), oracle(dy, kept, p), dtype, 1);
  }
};

TEST(DropoutOracle, GradientMatchesCentralDifference) {
  Noise noise(1);
  const auto x = random_values(noise, 20, DType::kF64), dy = random_values(noise, 20, DType::kF64);
  std::vector<double> kept;
  for (int i = 0; i < 20; ++i) kept.push_back(i % 3 == 0 ? 0 : 1);
  const auto values = [&](const std::vector<double>& in) {
    std::vector<double> v;
    for (const Ref& r : oracle(in, kept, 0.3)) v.push_back(r.value);
    return v;
  };
  const auto loss = [&](const Arrays& at) {
    const auto y = values(at[0]);
    return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
  };
  expect_gradient(loss, {x}, {values(dy)});
}

TEST_P(Dropout, MatchesOracleForEveryShape) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const double p : {0.1, 0.5, 0.9}) {
      for (const std::int64_t n : {0,  1,  2,  3,   7,   8,   15,   16,   17,    31,    32,   33,
                                   63, 64, 65, 127, 128, 129, 1000, 1001, 16384, 16391, 40003}) {
        check({n}, dtype, p);
      }
      check({3, 5, 7}, dtype, p, true);
      check({4, 96}, dtype, p, false, 1);
    }
    check({scaled(1500), 1024}, dtype, 0.2);  // past the cache
    check({3, scaled(700002)}, dtype, 0.2);   // large, but its second half does not begin a line
    check({9}, dtype, 0);
    check({9}, dtype, 1);
  }
}

// mx.random.seed(7); d = nn.Dropout(0.25); d(mx.arange(1, 12, dtype=float32)) twice
TEST_P(Dropout, IsThatOfMlx) {
  ops::KeySequence keys(encoder(), 7);
  std::vector<double> x(11);
  std::iota(x.begin(), x.end(), 1);
  const Tensor in = upload(x, {11}, DType::kF32);
  const auto left_out = [&](std::initializer_list<int> places) {
    std::vector<double> want;
    for (const double v : x) want.push_back(static_cast<float>(v) * static_cast<float>(1 / 0.75));
    for (const int i : places) want[static_cast<std::size_t>(i)] = 0;
    return want;
  };
  EXPECT_EQ(download(ops::dropout(encoder(), in, 0.25, keys.next(encoder()))), left_out({2, 4, 8}));
  EXPECT_EQ(download(ops::dropout(encoder(), in, 0.25, keys.next(encoder()))), left_out({5, 7}));
}

TEST_P(Dropout, LeavesOutNaNAndInfinity) {
  const std::vector<double> x(64, INFINITY), nan(64, NAN);
  for (const auto& values : {x, nan}) {
    int zeros = 0;
    for (const double y :
         download(ops::dropout(encoder(), upload(values, {64}, DType::kF32), 0.5, key()))) {
      zeros += y == 0 ? 1 : 0;
      EXPECT_TRUE(y == 0 || !std::isfinite(y));
    }
    EXPECT_GT(zeros, 16);
  }
}

TEST_P(Dropout, KeepsTheExpectedShare) {
  const std::int64_t n = 1 << 18;
  const Tensor ones = encoder().full({n}, DType::kF32, 1);
  for (const double p : {0.1, 0.5, 0.75}) {
    double sum = 0;
    for (const double v : download(ops::dropout(encoder(), ones, p, key()))) sum += v;
    // n·(1 − p) are kept, give or take sqrt(n·p·(1 − p)) times a normal number.
    EXPECT_LT(std::abs(sum - n), 6 * std::sqrt(n * p / (1 - p)));
  }
}

TEST_P(Dropout, WithoutATapeAllOrNothing) {
  const Tensor x = upload({1, -2, NAN}, {3}, DType::kF32);
  EXPECT_EQ(ops::dropout(encoder(), x, 0, key()).data(), x.data());
  EXPECT_EQ(download(ops::dropout(encoder(), x, 1, key())), (std::vector<double>{0, 0, 0}));
}

TEST_P(Dropout, NothingWatchedRecordsNothing) {
  Tape tape(encoder());
  static_cast<void>(ops::dropout(tape, upload({1, 2}, {2}, DType::kF32), 0.5, key()));
  EXPECT_EQ(tape.nodes(), 0U);
}

// Layers that draw keys from one sequence, with none, every or every other layer run again. Each has weights of its
// own: a gradient that several layers add to is added up in another order where some are run again.
TEST_P(Dropout, CheckpointDrawsTheSameKeysAgain) {
  Noise noise(5);
  const std::int64_t n = 1000;
  const Tensor start = upload(random_values(noise, n, DType::kF32), {n}, DType::kF32);
  std::vector<Tensor> weights;
  for (int i = 0; i < 4; ++i) {
    weights.push_back(upload(random_values(noise, n, DType::kF32, 2), {n}, DType::kF32));
  }
  enum Kind { kNone, kEvery, kEveryOther, kNested };
  const auto train = [&](Kind kind) {
    ops::KeySequence keys(encoder(), 11);
    Tape tape(encoder());
    const Tensor x = tape.watch(start);
    std::vector<Tensor> w;
    for (const Tensor& each : weights) w.push_back(tape.watch(each));
    const auto layer = [&](int i) {
      return [&keys, &w, i](Tape& t, const std::vector<Tensor>& in) {
        const Tensor& scale = w[static_cast<std::size_t>(i)];
        const Tensor a = ops::dropout(t, ops::multiply(t, in[0], scale), 0.3, keys.next(t));
        return std::vector<Tensor>{ops::dropout(t, ops::tanh(t, a), 0.2, keys.next(t))};
      };
    };
    const auto two = [&](int i) {
      return [&layer, i](Tape& t, const std::vector<Tensor>& in) {
        return checkpoint(t, layer(i + 1), checkpoint(t, layer(i), in));
      };
    };
    std::vector<Tensor> h{x};
    if (kind == kNested) {
      h = checkpoint(tape, two(2), checkpoint(tape, two(0), h));
    } else {
      for (int i = 0; i < 4; ++i) {
        const bool again = kind == kEvery || (kind == kEveryOther && i % 2 == 0);
        h = again ? checkpoint(tape, layer(i), h) : layer(i)(tape, h);
      }
    }
    tape.backward(h[0], encoder().full({n}, DType::kF32, 1));
    std::vector all{bits_of(encoder(), h[0]), bits_of(encoder(), tape.grad(x)),
                    bits_of(encoder(), keys.state())};
    for (const Tensor& each : w) all.push_back(bits_of(encoder(), tape.grad(each)));
    return all;
  };
  const auto plain = train(kNone);
  for (const Kind kind : {kEvery, kEveryOther, kNested}) EXPECT_TRUE(train(kind) == plain) << kind;
}

// Two sequences, and one that a checkpoint does not touch.
TEST_P(Dropout, CheckpointLeavesOtherSequencesAlone) {
  const Tensor ones = encoder().full({256}, DType::kF32, 1);
  const auto grad = [&](bool again) {
    ops::KeySequence a(encoder(), 1), b(encoder(), 2), other(encoder(), 3);
    Tape tape(encoder());
    const Tensor x = tape.watch(ones);
    const auto fn = [&](Tape& t, const std::vector<Tensor>& in) {
      const Tensor h = ops::dropout(t, in[0], 0.5, a.next(t));
      return std::vector<Tensor>{ops::dropout(t, h, 0.5, b.next(t)),
                                 ops::dropout(t, h, 0.25, b.next(t))};
    };
    const auto h = again ? checkpoint(tape, fn, {x}) : fn(tape, {x});
    static_cast<void>(other.next(tape));
    const Tensor y = ops::add(tape, h[0], h[1]);
    tape.backward(y, ones);
    return std::vector{bits_of(encoder(), tape.grad(x)), bits_of(encoder(), a.state()),
                       bits_of(encoder(), b.state()), bits_of(encoder(), other.state())};
  };
  EXPECT_EQ(grad(true), grad(false));
}

// A whole step as a graph: each replay draws on, and its checkpoint draws again what it drew.
TEST_P(Dropout, ReplayedStepsAreThoseOfTheTape) {
  Noise noise(6);
  const Tensor start = upload(random_values(noise, 500, DType::kF32), {500}, DType::kF32);
  const Tensor dy = upload(random_values(noise, 500, DType::kF32), {500}, DType::kF32);
  const auto step = [&](ops::KeySequence& keys) {
    Tape tape(encoder());
    const Tensor x = tape.watch(start);
    const auto layer = [&](Tape& t, const std::vector<Tensor>& in) {
      return std::vector<Tensor>{ops::dropout(t, ops::tanh(t, in[0]), 0.4, keys.next(t))};
    };
    const Tensor y = checkpoint(tape, layer, checkpoint(tape, layer, {x}))[0];
    tape.backward(y, dy);
    return std::vector<Tensor>{y, tape.grad(x), keys.state()};
  };
  ops::KeySequence keys(encoder(), 9), plain(encoder(), 9);
  encoder().begin_capture();
  const std::vector<Tensor> results = step(keys);
  const auto graph = encoder().end_capture();
  std::vector<unsigned char> last;
  for (int i = 0; i < 3; ++i) {
    encoder().replay(*graph);
    const std::vector<Tensor> want = step(plain);
    for (std::size_t k = 0; k < want.size(); ++k) {
      EXPECT_EQ(bits_of(encoder(), results[k]), bits_of(encoder(), want[k])) << i << " " << k;
    }
    EXPECT_NE(bits_of(encoder(), results[1]), last);
    last = bits_of(encoder(), results[1]);
  }
}

TEST_P(Dropout, SameBitsOnEveryRun) {
  Noise noise(2);
  const Tensor x = upload(random_values(noise, 100003, DType::kF32), {100003}, DType::kF32);
  expect_repeatable(encoder(),
                    [&] { return std::vector<Tensor>{ops::dropout(encoder(), x, 0.3, key())}; });
}

TEST(DropoutCheck, SaysWhatIsWrong) {
  const auto key = Tensor::meta({2}, DType::kU32);
  const auto x = Tensor::meta({4});
  expect_refused({
      {"type", ops::dropout_check(key, 0.5, key), Errc::kDType, "got u32"},
      {"p below", ops::dropout_check(x, -0.1, key), Errc::kArgument, "p must be in [0, 1]"},
      {"p above", ops::dropout_check(x, 1.1, key), Errc::kArgument, "p must be in [0, 1]"},
      {"p NaN", ops::dropout_check(x, NAN, key), Errc::kArgument, "p must be in [0, 1]"},
      {"key", ops::dropout_check(x, 0.5, x), Errc::kShape, "the key must be [2], got [4]"},
      {"key far", ops::dropout_check(x, 0.5, Tensor::meta({2}, DType::kU32, Backend::kMetal)),
       Errc::kDevice, "where x is"},
  });
}

MT_ON_EVERY_BACKEND(Dropout);

}  // namespace
}  // namespace mlxtape::test
