#include "mlxtape/ops/kl_divergence.h"

#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::KlDivergenceOptions;
using ops::KlTeacher;
using ops::Reduction;

// A loss in double: student q and teacher p [R, V], or p [R, k] with its indices.
struct Problem {
  std::int64_t rows, cols, top;  // top: k, 0 for a teacher of all V
  std::vector<double> q, p, index, weight;
  double temperature = 1;
  bool by_t2 = false;
};

struct Expected {
  Refs loss;  // [R]
  Refs dq;    // [R, V], for the c given
};

// A row's softmax at 1/T: shares, and the sizes that rounding is judged against.
struct Softmax {
  std::vector<double> share, below;
  double m = -INFINITY, log_sum = 0, lost = 0;

  Softmax(const double* z, std::int64_t n, double t) {
    for (std::int64_t v = 0; v < n; ++v) m = std::max(m, z[v] / t);
    double sum = 0;
    for (std::int64_t v = 0; v < n; ++v) {
      below.push_back(m - z[v] / t);
      share.push_back(std::exp(-below.back()));
      sum += share.back();
    }
    for (double& s : share) s /= sum;
    for (std::size_t v = 0; v < share.size(); ++v) {
      if (share[v] > 0) lost += share[v] * below[v] / 16;
    }
    log_sum = std::log(sum);
  }
};

// The formula block of kl_divergence.h. c: dloss·w a row, divided by Σ w for a mean.
Expected oracle(const Problem& x, const std::vector<double>& c) {
  Expected e{Refs(x.weight.size()), Refs(x.q.size(), {0, 0})};
  const double t = x.temperature, factor = x.by_t2 ? t * t : 1;
  const std::int64_t given = x.top == 0 ? x.cols : x.top;
  for (std::int64_t r = 0; r < x.rows; ++r) {
    const auto row = static_cast<std::size_t>(r);
    const double w = x.weight[row];
    e.loss[row] = {0, 0};
    if (w == 0) continue;
    const double* zq = x.q.data() + r * x.cols;
    const double* zp = x.p.data() + r * given;
    const Softmax q(zq, x.cols, t), p(zp, given, t);
    const double rate = std::abs(c[row]) * factor / t;
    Ref* dq = e.dq.data() + r * x.cols;
    for (std::int64_t v = 0; v < x.cols; ++v) {
      const auto at = static_cast<std::size_t>(v);
      const double lost = q.share[at] > 0 ? q.below[at] / 8 : 0;
      dq[v] = {c[row] * factor / t * q.share[at], rate * q.share[at] * (1 + lost)};
    }
    // Σ p·(log p − log q), and its size: of z/T the difference to m is what counts, but both z are
    // subtracted as they are; a relative error of a sum is an absolute one of its logarithm.
    Ref loss{0, 2 + p.log_sum + q.log_sum + p.lost + q.lost + std::abs(q.m - p.m)};
    for (std::int64_t j = 0; j < given; ++j) {
      const auto at = static_cast<std::size_t>(j);
      const auto v =
          x.top == 0 ? at
                     : static_cast<std::size_t>(x.index[static_cast<std::size_t>(r * given + j)]);
      const double share = p.share[at];
      if (share == 0) continue;
      loss.value += share * ((q.below[v] + q.log_sum) - (p.below[at] + p.log_sum));
      loss.scale += share * (std::abs(zp[j] - zq[v]) / t * (1 + p.below[at] / 16) + q.below[v]);
      dq[v].value -= c[row] * factor / t * share;
      dq[v].scale += rate * share * (1 + p.below[at] / 8);
    }
    e.loss[row] = {w * factor * loss.value, std::abs(w) * factor * loss.scale};
  }
  return e;
}

// Sums are made of many short ones: no chain of additions is longer than this.
std::int64_t chain(std::int64_t n) { return std::min<std::int64_t>(n, 1024); }

Ref reduced(const Refs& rows, double scale) {
  Ref sum{0, 0};
  for (const Ref& r : rows) sum.value += r.value * scale, sum.scale += r.scale * scale;
  return sum;
}

std::vector<double> values(const Refs& refs) {
  std::vector<double> v;
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

Problem random_problem(std::int64_t rows, std::int64_t cols, std::int64_t top, DType student,
                       DType teacher, double size = 4) {
  Noise noise(static_cast<std::uint64_t>(rows + 31 * cols + 7 * top));
  Problem x{rows,
            cols,
            top,
            random_values(noise, rows * cols, student, size),
            random_values(noise, rows * (top == 0 ? cols : top), teacher, size),
            {},
            {}};
  x.weight.assign(static_cast<std::size_t>(rows), 1);
  for (std::int64_t r = 0; r < rows; ++r) {
    // k distinct columns, the first and the last among them: a stride that has no factor of V
    std::int64_t step = cols / 2 + 1;
    while (std::gcd(step, cols) != 1) ++step;
    for (std::int64_t j = 0; j < top; ++j) {
      x.index.push_back(static_cast<double>((cols - 1 + j * step) % cols));
    }
  }
  return x;
}

TEST(KlDivergenceOracle, GradientMatchesCentralDifference) {
  for (const std::int64_t top : {0, 3}) {
    Problem x = random_problem(4, 7, top, DType::kF64, DType::kF64, 3);
    x.weight = {1, 0.5, 0, 2};
    x.temperature = 1.5;
    for (const bool by_t2 : {false, true}) {
      x.by_t2 = by_t2;
      const std::vector<double> dloss{0.3, -1, 2, 0.7};
      std::vector<double> c(4);
      for (std::size_t r = 0; r < 4; ++r) c[r] = dloss[r] * x.weight[r];
      const auto loss = [&](const Arrays& at) {
        Problem moved = x;
        moved.q = at[0];
        double sum = 0;
        const auto rows = values(oracle(moved, c).loss);
        for (std::size_t r = 0; r < 4; ++r) sum += dloss[r] * rows[r];
        return sum;
      };
      expect_gradient(loss, {x.q}, {values(oracle(x, c).dq)});
    }
  }
}

TEST(KlDivergenceCheck, SaysWhatIsWrong) {
  const auto q = Tensor::meta({4, 9});
  const auto values = Tensor::meta({4, 3});
  const auto indices = Tensor::meta({4, 3}, DType::kU32);
  const auto metal = Backend::kMetal;
  const auto fwd = [&](const Tensor& student, const KlTeacher& teacher,
                       const KlDivergenceOptions& options = {}) {
    return ops::kl_divergence_check(student, teacher, options);
  };
  const auto at = [](float temperature) {
    KlDivergenceOptions options;
    options.temperature = temperature;
    return options;
  };
  KlDivergenceOptions short_mask;
  short_mask.mask = Tensor::meta({3});
  const auto grad = [&](const Tensor& dstudent) {
    return ops::kl_divergence_with_gradient_check(q, q, {}, dstudent);
  };
  const auto rows = [&](std::int64_t count, const Tensor& losses, const Tensor& dstudent = {}) {
    return ops::kl_divergence_rows_check(q, q, {}, {Tensor::meta({count}), {}, Tensor::meta({})},
                                         losses, dstudent);
  };
  expect_refused({
      {"rank 0", fwd(Tensor::meta({}), q), Errc::kShape, "at least one axis, got []"},
      {"no columns", fwd(Tensor::meta({4, 0}), q), Errc::kShape, "not be empty, got [4, 0]"},
      {"integers", fwd(Tensor::meta({4, 9}, DType::kI32), q), Errc::kDType, "student must be f32"},
      {"temperature 0", fwd(q, q, at(0)), Errc::kArgument, "positive and finite, got 0"},
      {"temperature inf", fwd(q, q, at(INFINITY)), Errc::kArgument, "got inf"},
      {"another shape", fwd(q, Tensor::meta({4, 8})), Errc::kShape, "[4, 9], got [4, 8]"},
      {"a teacher of integers", fwd(q, Tensor::meta({4, 9}, DType::kU8)), Errc::kDType,
       "teacher must be f32"},
      {"a teacher elsewhere", fwd(q, Tensor::meta({4, 9}, DType::kF32, metal)), Errc::kDevice,
       "teacher must be where student is (cpu), got metal"},
      {"no teacher", fwd(q, Tensor()), Errc::kShape, "values must be like student"},
      {"values of other rows", fwd(q, {Tensor::meta({3, 3}), indices}), Errc::kShape,
       "k of at least 1, got [3, 3]"},
      {"no values", fwd(q, {Tensor::meta({4, 0}), indices}), Errc::kShape, "got [4, 0]"},
      {"indices of another shape", fwd(q, {values, Tensor::meta({4, 2}, DType::kU32)}),
       Errc::kShape, "shape of values [4, 3], got [4, 2]"},
      {"values of integers", fwd(q, {Tensor::meta({4, 3}, DType::kI32), indices}), Errc::kDType,
       "values must be f32"},
      {"indices of another type", fwd(q, {values, values}), Errc::kDType, "u32, got f32"},
      {"values elsewhere", fwd(q, {Tensor::meta({4, 3}, DType::kF32, metal), indices}),
       Errc::kDevice, "values must be"},
      {"indices elsewhere", fwd(q, {values, Tensor::meta({4, 3}, DType::kU32, metal)}),
       Errc::kDevice, "indices must be"},
      {"a short mask", fwd(q, q, short_mask), Errc::kShape, "mask must have an element a row"},
      {"forward first", ops::kl_divergence_with_gradient_check(q, values, {}, q), Errc::kShape,
       "teacher"},
      {"a gradient of another shape", grad(values), Errc::kShape, "[4, 9], got [4, 3]"},
      {"a gradient of another type", grad(Tensor::meta({4, 9}, DType::kF16)), Errc::kDType,
       "got f16"},
      {"a gradient elsewhere", grad(Tensor::meta({4, 9}, DType::kF32, metal)), Errc::kDevice,
       "dstudent must be"},
      {"a strided gradient", grad(Tensor::meta({9, 4}).transpose({1, 0})), Errc::kShape,
       "contiguous"},
      {"rows: inputs first",
       ops::kl_divergence_rows_check(q, values, {}, {Tensor::meta({4}), {}, Tensor::meta({})},
                                     Tensor::meta({4}), {}),
       Errc::kShape, "teacher"},
      {"rows of another count", rows(3, Tensor::meta({4})), Errc::kShape, "[4], got [3]"},
      {"losses of another count", rows(4, Tensor::meta({3})), Errc::kShape, "f32 [4], got f32"},
      {"losses of another type", rows(4, Tensor::meta({4}, DType::kF16)), Errc::kShape, "got f16"},
      {"rows: a gradient of another shape", rows(4, Tensor::meta({4}), values), Errc::kShape,
       "dstudent"},
  });
  EXPECT_FALSE(fwd(Tensor::meta({2, 2, 9}, DType::kF16), Tensor::meta({2, 2, 9}, DType::kBF16)));
  EXPECT_FALSE(
      fwd(Tensor::meta({0, 9}), {Tensor::meta({0, 3}), Tensor::meta({0, 3}, DType::kU32)}));
}

class KlDivergence : public OnDevice {
 protected:
  struct How {
    DType student = DType::kF32;
    DType teacher = DType::kF32;
    bool strided = false;
    std::int64_t offset = 0;
    bool brief = false;    // the mean alone
    bool extreme = false;  // results of 0 and ±1: nothing that planted mistakes would change
  };

  // Every form of the op on one problem: each reduction, gradient apart and in place, from saved parts.
  void check(const Problem& x, const How& how, KlDivergenceOptions options = {}) {
    options.temperature = static_cast<float>(x.temperature);
    options.scale_by_t2 = x.by_t2;
    const Shape shape{x.rows, x.cols};
    const auto put = [&](const std::vector<double>& v, const Shape& s, DType dtype) {
      return how.strided ? upload_strided(v, s, dtype) : upload(v, s, dtype, how.offset);
    };
    const Shape some{x.rows, x.top};
    const KlTeacher teacher =
        x.top == 0 ? KlTeacher(put(x.p, shape, how.teacher))
                   : KlTeacher(put(x.p, some, how.teacher), put(x.index, some, DType::kU32));
    const std::string at = to_string(shape) + " of " + std::to_string(x.top) + " " +
                           name_of(how.student) + " " + name_of(how.teacher);
    double counts = 0;
    for (const double w : x.weight) counts += w;
    const auto close = [&](const std::string& what, const std::vector<double>& got,
                           const Refs& want, DType stored, std::int64_t n) {
      if (!how.extreme) return expect_close(what, got, want, stored, n);
      EXPECT_EQ(count_wrong(got, want, stored, n), 0) << what;
    };
    Noise noise(3);
    for (const Reduction reduction : {Reduction::kNone, Reduction::kSum, Reduction::kMean}) {
      if (how.brief && reduction != Reduction::kMean) continue;
      options.reduction = reduction;
      const bool one = reduction != Reduction::kNone;
      const double scale = reduction != Reduction::kMean ? 1 : counts == 0 ? 0 : 1 / counts;
      std::vector<double> c, c_upstream;
      const auto dloss = random_values(noise, one ? 1 : x.rows, DType::kF32);
      for (std::int64_t r = 0; r < x.rows; ++r) {
        const auto row = static_cast<std::size_t>(r);
        c.push_back(x.weight[row] * scale);
        c_upstream.push_back(c.back() * dloss[one ? 0 : row]);
      }
      const Expected want = oracle(x, c);
      const Refs loss = one ? Refs{reduced(want.loss, scale)} : want.loss;
      const std::int64_t terms = chain(x.cols + x.top) + (one ? x.rows : 0);

      const Tensor student = put(x.q, shape, how.student);
      const ops::KlDivergenceParts parts =
          ops::kl_divergence_parts(encoder(), student, teacher, options);
      EXPECT_EQ(parts.loss.shape(), one ? Shape{} : Shape{x.rows});
      close("loss " + at, download(parts.loss), loss, DType::kF32, terms);
      const Tensor dq =
          ops::kl_divergence_backward(encoder(), student, teacher, parts,
                                      upload(dloss, parts.loss.shape(), DType::kF32), options);
      close("dq from parts " + at, download(dq), oracle(x, c_upstream).dq, how.student,
            chain(x.cols));

      const Tensor apart = encoder().empty(shape, how.student);
      const Tensor fused =
          ops::kl_divergence_with_gradient(encoder(), student, teacher, options, apart);
      close("loss with gradient " + at, download(fused), loss, DType::kF32, terms);
      close("dq " + at, download(apart), want.dq, how.student, chain(x.cols));
      EXPECT_EQ(download(student), x.q) << "the student's logits are as they were";
      if (how.strided) continue;
      EXPECT_EQ(bits_of(encoder(), ops::kl_divergence_with_gradient(encoder(), student, teacher,
                                                                    options, student)),
                bits_of(encoder(), fused))
          << "in place " << at;
      EXPECT_EQ(bits_of(encoder(), student), bits_of(encoder(), apart)) << "in place " << at;
    }
  }
  void check_random(std::int64_t rows, std::int64_t cols, std::int64_t top, DType student,
                    DType teacher, double size = 4) {
    check(random_problem(rows, cols, top, student, teacher, size),
          {.student = student, .teacher = teacher, .brief = cols > 5000});
  }
};

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST_P(KlDivergence, MatchesOracleForEveryShape) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t rows :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, 2 * scaled(3) - 1}) {
      for (const std::int64_t cols : {1, 2, 7, 31, 32, 33, 255, 256, 257, 2048, 2049, 4097}) {
        check_random(rows, cols, 0, dtype, dtype);
        check_random(rows, cols, std::min<std::int64_t>(cols, cols < 300 ? 5 : 64), dtype, dtype);
      }
    }
  }
}

TEST_P(KlDivergence, MatchesOracleForTwoTypes) {
  for (const DType student : kTypes) {
    for (const DType teacher : kTypes) {
      for (const std::int64_t cols : {5, 64, 1000, 5000}) {
        check_random(scaled(3), cols, 0, student, teacher);
        check_random(scaled(3), cols, 5, student, teacher);
      }
    }
  }
}

// Lengths at which a GPU changes from one form to the next, and rows cut over a CPU's threads.
TEST_P(KlDivergence, MatchesOracleForEveryForm) {
  for (const std::int64_t cols : {512, 1024, 8192, 16384, 32768, 65536, 131072}) {
    check_random(2, cols, 0, DType::kF32, DType::kF32);
    check_random(3, cols, 0, DType::kBF16, DType::kBF16);
  }
  check_random(2, 151936, 0, DType::kBF16, DType::kBF16);
  check_random(2, 151936, 64, DType::kBF16, DType::kBF16);
  check_random(1, 151937, 0, DType::kF16, DType::kF16);
  check_random(1, 250000, 0, DType::kBF16, DType::kBF16);
  check_random(1, 250000, 1000, DType::kF32, DType::kBF16);
  check_random(scaled(40), 33000, 0, DType::kBF16, DType::kBF16);
}

TEST_P(KlDivergence, MatchesOracleForViews) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t top : {0, 5}) {
      check(random_problem(5, 33, top, dtype, dtype),
            {.student = dtype, .teacher = dtype, .strided = true});
      for (const std::int64_t offset : {1, 3, 17}) {
        check(random_problem(5, 257, top, dtype, dtype),
              {.student = dtype, .teacher = dtype, .offset = offset});
      }
    }
  }
  // Past the cache, also at stored indices; rows that begin in the middle of a line.
  check(random_problem(scaled(1100), 2047, 0, DType::kF32, DType::kF32),
        {.offset = 3, .brief = true});
  check(random_problem(scaled(1100), 2047, 9, DType::kBF16, DType::kF32),
        {.student = DType::kBF16, .offset = 3, .brief = true});
  check(random_problem(scaled(1100), 2047, 0, DType::kBF16, DType::kF32),
        {.student = DType::kBF16, .offset = 3, .brief = true});
  const Problem x = random_problem(6, 9, 0, DType::kF32, DType::kF32);
  const Tensor loss = ops::kl_divergence(encoder(), upload(x.q, {2, 3, 9}, DType::kF32),
                                         upload(x.p, {2, 3, 9}, DType::kF32));
  EXPECT_EQ(loss.shape(), (Shape{2, 3}));
  expect_close("leading axes", download(loss), oracle(x, x.weight).loss, DType::kF32, 9);
}

TEST_P(KlDivergence, Temperature) {
  for (const DType dtype : kTypes) {
    for (const double t : {0.5, 2.0, 3.0}) {
      for (const std::int64_t cols : {std::int64_t{33}, std::int64_t{3000}, 4 * scaled(10000)}) {
        for (const std::int64_t top : {0, 7}) {
          Problem x = random_problem(scaled(3), cols, top, dtype, dtype);
          x.temperature = t;
          x.by_t2 = t != 2.0;
          check(x, {.student = dtype, .teacher = dtype, .brief = cols > 5000});
        }
      }
    }
  }
}

TEST_P(KlDivergence, MaskedRows) {
  const std::int64_t rows = std::max<std::int64_t>(6, scaled(40));
  for (const std::int64_t top : {0, 5}) {
    for (const std::int64_t cols : {33, 256, 5000, 40000}) {
      Problem x = random_problem(rows, cols, top, DType::kBF16, DType::kBF16);
      for (std::int64_t r = 0; r < rows; ++r) {
        x.weight[static_cast<std::size_t>(r)] = static_cast<double>(r % 3) / 2;
      }
      KlDivergenceOptions options;
      options.mask = upload(x.weight, {rows}, DType::kF32);
      check(x, {.student = DType::kBF16, .teacher = DType::kBF16, .brief = cols > 300}, options);
      // What does not count is not looked at.
      for (std::int64_t r = 0; r < rows; r += 3) x.q[static_cast<std::size_t>(r * cols)] = NAN;
      const Expected want = oracle(x, x.weight);
      const KlTeacher teacher = top == 0 ? KlTeacher(upload(x.p, {rows, cols}, DType::kBF16))
                                         : KlTeacher(upload(x.p, {rows, top}, DType::kBF16),
                                                     upload(x.index, {rows, top}, DType::kU32));
      const Tensor student = upload(x.q, {rows, cols}, DType::kBF16);
      const Tensor loss =
          ops::kl_divergence_with_gradient(encoder(), student, teacher, options, student);
      expect_close("masked loss", download(loss), want.loss, DType::kF32, chain(cols));
      expect_close("masked dq", download(student), want.dq, DType::kBF16, chain(cols));
    }
    Problem none = random_problem(6, 300, top, DType::kF32, DType::kF32);
    std::fill(none.weight.begin(), none.weight.end(), 0);
    KlDivergenceOptions options;
    options.mask = upload(none.weight, {6}, DType::kBool);
    check(none, {}, options);
  }
}

TEST_P(KlDivergence, SpreadLogits) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols : {300, 5000, 40000}) {
      for (const std::int64_t top : {0, 9}) {
        check(random_problem(3, cols, top, dtype, dtype, 1e4),
              {.student = dtype, .teacher = dtype, .brief = cols > 5000, .extreme = true});
        check_random(3, cols, top, dtype, dtype, 90);
      }
      // Blocks of their own, student and teacher rising against each other; padding of −inf in both.
      Problem x = random_problem(3, cols, 0, dtype, dtype);
      for (std::int64_t v = 0; v < cols; ++v) {
        const auto at = static_cast<std::size_t>(v);
        const std::int64_t block = v / 2048;
        const double rise = 60.0 * static_cast<double>(block);
        x.q[at] = round_to(dtype, x.q[at] + rise);
        x.p[at] = round_to(dtype, x.p[at] - rise);
        const auto second = at + static_cast<std::size_t>(cols);
        if (v < 100 || (v >= 2048 && v < 4096)) x.q[second] = x.p[second] = -INFINITY;
        const auto third = second + static_cast<std::size_t>(cols);
        x.p[third] = v % 3 == 0 ? -INFINITY : round_to(dtype, x.p[third] + rise);
      }
      check(x, {.student = dtype, .teacher = dtype, .brief = cols > 5000, .extreme = true});
    }
  }
}

TEST_P(KlDivergence, WhatIsNoNumber) {
  const double inf = INFINITY, nan = std::nan("");
  const auto run = [&](const std::vector<double>& q, const KlTeacher& teacher) {
    const auto n = static_cast<std::int64_t>(q.size());
    const Tensor dq = encoder().empty({1, n}, DType::kF32);
    const Tensor loss = ops::kl_divergence_with_gradient(encoder(), upload(q, {1, n}, DType::kF32),
                                                         teacher, {}, dq);
    auto all = download(dq);
    all.push_back(download(loss)[0]);
    return all;
  };
  const auto full = [&](const std::vector<double>& p) {
    return KlTeacher(upload(p, {1, static_cast<std::int64_t>(p.size())}, DType::kF32));
  };
  const auto top = [&](const std::vector<double>& p, const std::vector<double>& index) {
    const auto k = static_cast<std::int64_t>(p.size());
    return KlTeacher(upload(p, {1, k}, DType::kF32), upload(index, {1, k}, DType::kU32));
  };
  EXPECT_EQ(run({-inf, 3, -inf}, full({-inf, 5, -inf})), (std::vector<double>{0, 0, 0, 0}));
  EXPECT_EQ(run({-inf, 3}, full({1, -inf})), (std::vector<double>{-1, 1, inf}));
  EXPECT_EQ(run({-inf, 3}, top({1}, {0})), (std::vector<double>{-1, 1, inf}));
  EXPECT_EQ(run({7}, full({3})), (std::vector<double>{0, 0}));
  for (const std::size_t length : {std::size_t{3}, std::size_t{5000}}) {
    const std::vector<double> good(length, 1);
    for (std::vector<double> bad : {std::vector<double>{-inf, -inf}, {inf, 1}, {1, nan, 2}}) {
      bad.resize(length, -inf);
      for (const double v : run(bad, full(good))) EXPECT_TRUE(std::isnan(v)) << v;
      for (const double v : run(good, full(bad))) EXPECT_TRUE(std::isnan(v)) << v;
      for (const double v : run(bad, top({1, 2}, {0, 2}))) EXPECT_TRUE(std::isnan(v)) << v;
    }
    EXPECT_TRUE(std::isnan(run(good, top({1, 2}, {0, static_cast<double>(length)})).back()));
  }
}

TEST_P(KlDivergence, GradientThroughTheTape) {
  for (const std::int64_t top : {0, 5}) {
    Problem x = random_problem(4, 33, top, DType::kBF16, DType::kF32);
    x.weight = {1, 0, 2, 0.5};
    x.temperature = 2;
    x.by_t2 = true;
    KlDivergenceOptions options;
    options.temperature = 2;
    options.scale_by_t2 = true;
    options.mask = upload(x.weight, {4}, DType::kF32);
    const std::int64_t given = top == 0 ? 33 : top;
    for (const Reduction reduction : {Reduction::kNone, Reduction::kMean}) {
      options.reduction = reduction;
      Tape tape(encoder());
      const Tensor student = tape.watch(upload(x.q, {4, 33}, DType::kBF16));
      const Tensor p = tape.watch(upload(x.p, {4, given}, DType::kF32));
      const KlTeacher teacher =
          top == 0 ? KlTeacher(p) : KlTeacher(p, upload(x.index, {4, top}, DType::kU32));
      const Tensor loss = ops::kl_divergence(tape, student, teacher, options);
      std::vector<double> c = x.weight;
      if (reduction == Reduction::kNone) {
        const std::vector<double> dloss{0.5, -1, 3, 2};
        tape.backward(loss, upload(dloss, {4}, DType::kF32));
        for (std::size_t r = 0; r < 4; ++r) c[r] *= dloss[r];
      } else {
        tape.backward(loss);
        for (double& v : c) v /= 3.5;
      }
      expect_close("dq", download(tape.grad(student)), oracle(x, c).dq, DType::kBF16, 33);
      EXPECT_FALSE(tape.has_grad(p)) << "the teacher is a constant";
    }
    Tape tape(encoder());
    const Tensor q = upload(x.q, {4, 33}, DType::kBF16);
    ops::kl_divergence(tape, q, q);
    EXPECT_EQ(tape.nodes(), 0) << "nothing tracked, nothing recorded";
  }
}

// mlx.nn.losses.kl_div_loss(log_softmax(student / T), log_softmax(teacher / T), reduction=…), and mx.grad of it.
TEST_P(KlDivergence, AsMlx) {
  const Tensor teacher = upload({0.5, 1, -1, 0, 0, 2, 0, 1, 1, 1, 1, 1}, {3, 4}, DType::kF32);
  const auto loss = [&](Tape& tape, const Tensor& student, float t, Reduction reduction) {
    return ops::kl_divergence(tape, student, teacher, {.temperature = t, .reduction = reduction});
  };
  Tape tape(encoder());
  const Tensor student =
      tape.watch(upload({1, 2, 3, -1, 0, 0, 0, 5, -2, 0.5, 0.25, 1}, {3, 4}, DType::kF32));
  expect_close("none", download(loss(tape, student, 1, Reduction::kNone)),
               refs_of({0.973194242, 2.84873104, 0.431709766}, 1), DType::kF32, 4);
  expect_close("T = 2", download(loss(tape, student, 2, Reduction::kNone)),
               refs_of({0.324388862, 0.778051496, 0.134206861}, 1), DType::kF32, 4);
  expect_close("mean", download(loss(tape, student, 1, Reduction::kMean)), refs_of({1.41787839}, 1),
               DType::kF32, 4);
  const Tensor sum = loss(tape, student, 1, Reduction::kSum);
  expect_close("sum", download(sum), refs_of({4.25363493}, 1), DType::kF32, 4);
  tape.backward(sum);
  expect_close(
      "dstudent", download(tape.grad(student)),
      refs_of({-0.198543161, -0.232208312, 0.593085289, -0.162333846, -0.0759901032, -0.60369122,
               -0.0759901032, 0.755671382, -0.226611346, 0.0349321663, -0.0280945897, 0.21977374},
              1),
      DType::kF32, 4);
}

TEST_P(KlDivergence, RowsOfALoss) {
  for (const std::int64_t top : {0, 5}) {
    const Problem x = random_problem(7, 40, top, DType::kF32, DType::kF32);
    const std::int64_t given = top == 0 ? 40 : top;
    const Tensor p = upload(x.p, {7, given}, DType::kF32);
    const KlTeacher teacher =
        top == 0 ? KlTeacher(p) : KlTeacher(p, upload(x.index, {7, top}, DType::kU32));
    ops::LossRowsOptions options;
    options.reduction = Reduction::kMean;
    const ops::LossRows rows = ops::loss_rows(encoder(), 7, options);
    const Tensor losses = encoder().zeros({7}, DType::kF32);
    const Tensor student = upload(x.q, {7, 40}, DType::kF32);
    for (const auto& [start, stop] : {std::pair{0, 3}, std::pair{3, 7}}) {
      const Tensor some = student.slice(0, start, stop);
      ops::kl_divergence_rows(encoder(), some, teacher.slice(start, stop), {},
                              rows.slice(start, stop), losses.slice(0, start, stop), some);
    }
    const Expected want = oracle(x, std::vector<double>(7, 1.0 / 7));
    expect_close("losses", download(losses), want.loss, DType::kF32, 40);
    expect_close("dq", download(student), want.dq, DType::kF32, 40);
    EXPECT_THROW(ops::kl_divergence_backward(encoder(), student, teacher, {{}, {}, rows},
                                             upload({1, 2}, {2}, DType::kF32), {}),
                 Error);
  }
}

TEST_P(KlDivergence, SameBitsOnEveryRun) {
  for (const auto& [rows, cols] : {std::pair{scaled(300), 512}, std::pair{std::int64_t{3}, 40000},
                                   std::pair{scaled(40), 9000}}) {
    for (const std::int64_t top : {0, 9}) {
      const Problem x = random_problem(rows, cols, top, DType::kBF16, DType::kBF16);
      const Tensor student = upload(x.q, {rows, cols}, DType::kBF16);
      const KlTeacher teacher = top == 0 ? KlTeacher(upload(x.p, {rows, cols}, DType::kBF16))
                                         : KlTeacher(upload(x.p, {rows, top}, DType::kBF16),
                                                     upload(x.index, {rows, top}, DType::kU32));
      KlDivergenceOptions options;
      options.reduction = Reduction::kMean;
      expect_repeatable(encoder(), [&] {
        const Tensor dq = encoder().empty_like(student);
        const Tensor loss =
            ops::kl_divergence_with_gradient(encoder(), student, teacher, options, dq);
        return std::vector<Tensor>{loss, dq};
      });
    }
  }
}

TEST_P(KlDivergence, RandomShapes) {
  EXPECT_TRUE(rc::check("kl_divergence matches its oracle", [this] {
    const std::vector<DType> types(std::begin(kTypes), std::end(kTypes));
    const DType student = *rc::gen::elementOf(types), teacher = *rc::gen::elementOf(types);
    const std::int64_t rows = *rc::gen::inRange(1, 9), cols = *rc::gen::inRange(1, 400);
    const std::int64_t top = *rc::gen::inRange<std::int64_t>(0, cols + 1);
    check(random_problem(rows, cols, top, student, teacher),
          {.student = student, .teacher = teacher, .strided = *rc::gen::arbitrary<bool>()});
    RC_ASSERT(!HasFailure());
  }));
}

MT_ON_EVERY_BACKEND(KlDivergence);

}  // namespace
}  // namespace mlxtape::test
