#include "support/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace mlxtape::test {

namespace {

bool flushes_subnormals = false;

struct FloatFacts {
  int precision;     // bits of the significand
  int min_exponent;  // of the smallest subnormal
};

FloatFacts float_facts(DType t) {
  switch (t) {
    case DType::kF16: return {11, -24};
    case DType::kBF16: return {8, -133};
    case DType::kF32: return {24, -149};
    default: return {53, -1074};
  }
}

// Whether a number is further from what is wanted than bound and floor allow. Written so that NaN is wrong.
bool is_wrong(double got, const Ref& want, double bound, double floor) {
  if (std::isnan(want.value)) return !std::isnan(got);
  const double error = got == want.value ? 0 : std::abs(got - want.value);
  return !(error <= bound * want.scale + floor);
}

double floor_of(DType stored) { return 2 * smallest_step(stored); }

// Whether one of the numbers got(0), got(1), … is wrong. From the end, where the planted mistakes are that are only there.
template <class Got>
bool any_wrong(const Refs& want, DType stored, std::int64_t n, const Got& got) {
  const double bound = rounding_bound(stored, n);
  const double floor = floor_of(stored);
  for (std::size_t i = want.size(); i-- > 0;) {
    if (is_wrong(got(i), want[i], bound, floor)) return true;
  }
  return false;
}

// v with so many bits of its significand.
double coarse(double v, int bits) {
  int exponent = 0;
  v = std::frexp(v, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(v, bits)), exponent - bits);
}

}  // namespace

Refs refs_of(const std::vector<double>& values, double cancelled) {
  Refs refs;
  refs.reserve(values.size());
  for (const double v : values) refs.push_back({v, std::abs(v) + cancelled});
  return refs;
}

std::vector<double> values_of(const Refs& refs) {
  std::vector<double> v;
  v.reserve(refs.size());
  for (const Ref& r : refs) v.push_back(r.value);
  return v;
}

double rounding_bound(DType stored, std::int64_t n) {
  return std::ldexp(1, -float_facts(stored).precision) +
         static_cast<double>(n + 16) * std::ldexp(1, -24);
}

void set_flushes_subnormals(bool may) { flushes_subnormals = may; }

double smallest_step(DType stored) {
  constexpr int kSmallestNormal = -126;
  const int exponent = float_facts(stored).min_exponent;
  const bool is_flushed = flushes_subnormals && (stored == DType::kF32 || stored == DType::kBF16);
  return std::ldexp(1, is_flushed ? kSmallestNormal : exponent);
}

std::int64_t count_wrong(const std::vector<double>& got, const Refs& want, DType stored,
                         std::int64_t n) {
  const double bound = rounding_bound(stored, n);
  const double floor = floor_of(stored);
  std::int64_t wrong = static_cast<std::int64_t>(std::max(got.size(), want.size()) -
                                                 std::min(got.size(), want.size()));
  for (std::size_t i = 0; i < want.size() && i < got.size(); ++i) {
    if (is_wrong(got[i], want[i], bound, floor)) ++wrong;
  }
  return wrong;
}

Refs blurred(const std::vector<double>& exact, const std::vector<std::vector<double>>& tries,
             std::int64_t row, DType stored) {
  Refs refs(exact.size());
  // A row may stray as one, and once in a few tries hardly at all: eight stand together.
  const auto width = static_cast<std::size_t>(8 * row);
  for (std::size_t first = 0; first < exact.size(); first += width) {
    const std::size_t last = std::min(first + width, exact.size());
    double most = 0;
    for (const auto& values : tries) {
      for (std::size_t i = first; i < last; ++i) {
        most = std::max(most, std::abs(values[i] - exact[i]));
      }
    }
    for (std::size_t i = first; i < last; ++i) {
      refs[i] = {exact[i], std::abs(exact[i]) + 8 * most / rounding_bound(stored, 0)};
    }
  }
  return refs;
}

void expect_close(const std::string& what, const std::vector<double>& got, const Refs& want,
                  DType stored, std::int64_t n) {
  const std::int64_t wrong = count_wrong(got, want, stored, n);
  if (wrong != 0) {
    std::size_t worst = 0;
    double ratio = -1;
    for (std::size_t i = 0; i < want.size() && i < got.size(); ++i) {
      const double error = std::abs(got[i] - want[i].value);
      const double r = error <= 1e300 ? error / (want[i].scale + smallest_step(stored)) : 1e300;
      if (r > ratio) ratio = r, worst = i;
    }
    ADD_FAILURE() << what << ": " << wrong << " of " << want.size() << " wrong (got " << got.size()
                  << "); worst at " << worst << ": got "
                  << (worst < got.size() ? got[worst] : std::nan("")) << ", want "
                  << (worst < want.size() ? want[worst].value : std::nan("")) << ", relative error "
                  << ratio << ", allowed " << rounding_bound(stored, n);
  }
  const bool has_nan =
      std::any_of(want.begin(), want.end(), [](const Ref& r) { return std::isnan(r.value); });
  if (want.size() < 2 || has_nan) return;

  const double first = want.front().value;
  const double last = want.back().value;
  const bool constant = std::all_of(want.begin(), want.end(), [&](const Ref& r) {
    return std::abs(r.value - first) <= 1e-12 * std::abs(first);  // but for the last bits of double
  });
  if (constant) return;  // 0/1-like data: the faults below would change nothing
  const std::size_t size = want.size();
  double mean = 0;
  for (const Ref& r : want) mean += r.value / static_cast<double>(size);
  const auto rejects = [&](const char* mistake, const auto& bad) {
    EXPECT_TRUE(any_wrong(want, stored, n, bad)) << what << ": blind to " << mistake;
  };
  rejects("all zeros", [](std::size_t) { return 0.0; });
  if (size >=
      4) {  // two or three long sums lie within each other's bounds by chance, once in some thousand tries
    rejects("a constant", [&](std::size_t) { return mean; });
    rejects("a shift by one", [&](std::size_t i) { return want[(i + 1) % size].value; });
  }
  rejects("a flipped sign", [&](std::size_t i) { return -want[i].value; });
  const auto with_last = [&](double v) {
    return [&want, size, v](std::size_t i) {
      return i + 1 == size ? v : want[i].value;
    };
  };
  if (std::abs(last) > 4 * smallest_step(stored)) {
    // Where the last value is what is left of much larger terms, no honest bound can see it.
    if (std::abs(last) > 2 * rounding_bound(stored, n) * want.back().scale) {
      rejects("a missing last element", with_last(0));
    }
    rejects("an unwritten last element", with_last(std::nan("")));
  }
  // Results kept in too coarse a type: f32 through bf16, 16-bit floats through 6 bits.
  if (n <= 4096 && size >= 64) {
    const int bits = stored == DType::kF32 ? 8 : 5;
    const auto kept = [&](std::size_t i) {
      return coarse(want[i].value, bits);
    };
    const bool same = std::all_of(want.begin(), want.end(),
                                  [&](const Ref& r) { return coarse(r.value, bits) == r.value; });
    if (!same) rejects("a result kept in a coarser type", kept);
  }
}

double round_to(DType t, double v) {
  double result = 0;
  visit(t, [&](auto zero) {
    auto stored = zero;
    convert(&v, DType::kF64, &stored, t, 1);
    convert(&stored, t, &result, DType::kF64, 1);
  });
  return result;
}

std::vector<double> random_values(Noise& noise, std::int64_t n, DType dtype, double size) {
  std::vector<double> values(static_cast<std::size_t>(n));
  for (double& v : values) v = size * noise.next();
  visit(dtype, [&](auto zero) {
    std::vector<unsigned char> stored(values.size() * sizeof(zero));
    convert(values.data(), DType::kF64, stored.data(), dtype, values.size());
    convert(stored.data(), dtype, values.data(), DType::kF64, values.size());
  });
  return values;
}

void expect_gradient(const std::function<double(const Arrays&)>& loss, const Arrays& inputs,
                     const Arrays& gradients) {
  constexpr double kStep = 1e-5;
  ASSERT_EQ(inputs.size(), gradients.size());
  for (std::uint64_t seed = 101; seed < 105; ++seed) {
    Noise noise(seed);
    Arrays ahead = inputs;
    Arrays behind = inputs;
    double slope = 0;
    double size = 1;
    for (std::size_t a = 0; a < inputs.size(); ++a) {
      ASSERT_EQ(inputs[a].size(), gradients[a].size()) << "input " << a;
      for (std::size_t i = 0; i < inputs[a].size(); ++i) {
        const double direction = noise.next();
        ahead[a][i] += kStep * direction;
        behind[a][i] -= kStep * direction;
        slope += gradients[a][i] * direction;
        size += std::abs(gradients[a][i] * direction);
      }
    }
    const double difference = (loss(ahead) - loss(behind)) / (2 * kStep);
    EXPECT_NEAR(difference, slope, 1e-8 * size) << "direction " << seed;
  }
}

}  // namespace mlxtape::test
