#include "block.h"

#include <algorithm>
#include <cmath>

namespace mlxtape::test {

namespace {

constexpr int kTries = 3;  // of the blurred block

// Blurred the same way on every run with the same seed, so that differences of it are slopes of one function.
Blur blur_of(double size, std::uint64_t seed) {
  if (size == 0)
    return [](double v) {
      return v;
    };
  return [size, noise = Noise(seed)](double v) mutable {
    return v * (1 + size * noise.next());
  };
}

double dot(const Arrays& a, const Arrays& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < a[i].size(); ++j) sum += a[i][j] * b[i][j];
  }
  return sum;
}

// The change of Σ seeds∘outputs along each direction, by central differences: at a step of 1e-4 they miss the slope of
// a smooth function by about 1e-9 of it, and lose 1e-10 to cancelling; f32 is 1e-7.
Values slopes(const Block& block, const Arrays& at, const Arrays& seeds,
              const std::vector<Arrays>& directions, double blur, std::uint64_t seed) {
  constexpr double kStep = 1e-4;
  const auto loss = [&](const Arrays& direction, double step) {
    Arrays moved = at;
    for (std::size_t i = 0; i < at.size(); ++i) {
      for (std::size_t j = 0; j < direction[i].size(); ++j) moved[i][j] += step * direction[i][j];
    }
    return dot(block.in_double(moved, blur_of(blur, seed)), seeds);
  };
  Values found;
  for (const Arrays& d : directions) {
    found.push_back((loss(d, kStep) - loss(d, -kStep)) / (2 * kStep));
  }
  return found;
}

}  // namespace

void Blocks::check(const Block& block, DType dtype, const std::vector<Arrays>& directions) {
  Noise noise(17);
  Arrays at, seeds;
  std::vector<Tensor> inputs;
  Tape tape(encoder());
  for (const Input& in : block.inputs) {
    Values values = random_values(noise, *element_count(in.shape), DType::kF64, in.size);
    for (double& v : values) v = round_to(dtype, v + in.around);
    at.push_back(values);
    inputs.push_back(tape.watch(upload(values, in.shape, dtype)));
  }
  const std::vector<Tensor> outputs = block.on_tape(tape, inputs);
  ASSERT_EQ(outputs.size(), block.outputs.size());

  // 16-bit numbers are rounded, and the products of tensor cores cut off, by half a step of theirs.
  const double size = dtype == DType::kF32 ? kBlur : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  const Arrays exact = block.in_double(at, blur_of(0, 0));
  std::vector<Arrays> tries;
  for (std::uint64_t s = 1; s <= kTries; ++s)
    tries.push_back(block.in_double(at, blur_of(size, s)));
  std::vector<std::pair<Tensor, Tensor>> walk;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::string what = block.name + " output " + std::to_string(i);
    ASSERT_EQ(to_string(outputs[i].shape()), to_string(block.outputs[i])) << what;
    std::vector<Values> strayed;
    for (const Arrays& t : tries) strayed.push_back(t[i]);
    const Refs want = blurred(exact[i], strayed, block.outputs[i].back(), dtype);
    if (dtype == DType::kF32) {
      expect_close(what, download(outputs[i]), want, dtype, 0);
    } else {  // what is rounded again and again hides a coarser type, which expect_close would plant
      EXPECT_EQ(count_wrong(download(outputs[i]), want, dtype, 0), 0) << what;
      EXPECT_NE(count_wrong(Values(want.size()), want, dtype, 0), 0) << what << ": zeros pass";
    }
    seeds.push_back(
        random_values(noise, static_cast<std::int64_t>(exact[i].size()), outputs[i].dtype()));
    walk.emplace_back(outputs[i], upload(seeds.back(), outputs[i].shape(), outputs[i].dtype()));
  }

  tape.backward(walk);
  Arrays grads;
  for (const Tensor& in : inputs) grads.push_back(download(tape.grad(in)));
  Values got;
  for (const Arrays& d : directions) got.push_back(dot(d, grads));
  std::vector<Values> strayed;
  for (std::uint64_t s = 1; s <= kTries; ++s) {
    strayed.push_back(slopes(block, at, seeds, directions, size, s));
  }
  const Values exact_slopes = slopes(block, at, seeds, directions, 0, 0);
  // Each input alone: others may stray further, and a failure names one.
  for (std::size_t i = 0, first = 0; i < block.inputs.size(); ++i) {
    std::size_t last = first;
    while (last < directions.size() && !directions[last][i].empty()) ++last;
    ASSERT_GT(last, first);
    const auto part = [&](const Values& all) {
      return Values(all.begin() + static_cast<std::ptrdiff_t>(first),
                    all.begin() + static_cast<std::ptrdiff_t>(last));
    };
    std::vector<Values> parts;
    for (const Values& s : strayed) parts.push_back(part(s));
    const Refs want = blurred(part(exact_slopes), parts, 1, dtype);
    const std::string what = block.name + ": gradient of " + block.inputs[i].name;
    EXPECT_EQ(count_wrong(part(got), want, dtype, 0), 0) << what;
    EXPECT_NE(count_wrong(Values(want.size()), want, dtype, 0), 0) << what << ": zeros pass";
    first = last;
  }
}

void Blocks::check_every_number(const Block& block) {
  std::vector<Arrays> directions;
  for (std::size_t i = 0; i < block.inputs.size(); ++i) {
    const auto count = static_cast<std::size_t>(*element_count(block.inputs[i].shape));
    for (std::size_t j = 0; j < count; ++j) {
      directions.emplace_back(block.inputs.size());
      directions.back()[i].resize(count);
      directions.back()[i][j] = 1;
    }
  }
  check(block, DType::kF32, directions);
}

void Blocks::check_directions(const Block& block, DType dtype) {
  constexpr int kDirections = 2;
  Noise noise(23);
  std::vector<Arrays> directions;
  for (std::size_t i = 0; i < block.inputs.size(); ++i) {
    const std::int64_t count = *element_count(block.inputs[i].shape);
    for (int k = 0; k < kDirections; ++k) {
      directions.emplace_back(block.inputs.size());
      // As long as one number's: a step along it moves the function as little.
      directions.back()[i] =
          random_values(noise, count, DType::kF64, 1 / std::sqrt(static_cast<double>(count)));
    }
  }
  check(block, dtype, directions);
}

double sigma(double z) { return 1 / (1 + std::exp(-z)); }

Values product(const Values& x, const Values& w, std::int64_t rows, std::int64_t in,
               std::int64_t out, const Blur& blur) {
  Values y(static_cast<std::size_t>(rows * out));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t o = 0; o < out; ++o) {
      double sum = 0;
      for (std::int64_t i = 0; i < in; ++i) {
        sum += x[static_cast<std::size_t>(r * in + i)] * w[static_cast<std::size_t>(o * in + i)];
      }
      y[static_cast<std::size_t>(r * out + o)] = blur(sum);
    }
  }
  return y;
}

Values normed(const Values& x, const Values& w, double eps, const Blur& blur) {
  Values y(x.size());
  for (std::size_t first = 0; first < x.size(); first += w.size()) {
    double squares = 0;
    for (std::size_t i = 0; i < w.size(); ++i) squares += x[first + i] * x[first + i];
    const double r = 1 / std::sqrt(squares / static_cast<double>(w.size()) + eps);
    for (std::size_t i = 0; i < w.size(); ++i) y[first + i] = blur(x[first + i] * r * w[i]);
  }
  return y;
}

}  // namespace mlxtape::test
