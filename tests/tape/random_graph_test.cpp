// Random graphs of 5 to 30 ops against the same graph in double: values and every gradient.
//
// How far a result may be off depends on how the graph amplifies rounding. The oracle finds out by itself: it runs
// again with a random error of one rounding put on every result, relative to the size of the terms that made
// it, and the spread of what comes out is the measure of what a kernel may be off by.
#include <cmath>
#include <functional>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/matmul.h"
#include "mlxtape/ops/reduce.h"
#include "mlxtape/ops/softmax.h"
#include "mlxtape/tape/functions.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

constexpr std::int64_t kN = 6;  // every tensor is [6, 6]
constexpr std::size_t kSize = kN * kN;
using Matrix = std::vector<double>;

double& at(Matrix& m, std::int64_t i, std::int64_t j) {
  return m[static_cast<std::size_t>(i * kN + j)];
}
double at(const Matrix& m, std::int64_t i, std::int64_t j) {
  return m[static_cast<std::size_t>(i * kN + j)];
}

// A result and the size of its terms.
struct Sized {
  Matrix value = Matrix(kSize), size = Matrix(kSize);
  void add(std::int64_t i, std::int64_t j, double term) {
    at(value, i, j) += term;
    at(size, i, j) += std::abs(term);
  }
};

template <class Fn>
void for_all(const Fn& fn) {
  for (std::int64_t i = 0; i < kN; ++i) {
    for (std::int64_t j = 0; j < kN; ++j) fn(i, j);
  }
}

Sized matmul(const Matrix& a, const Matrix& b, bool ta, bool tb) {
  Sized y;
  for_all([&](std::int64_t i, std::int64_t j) {
    for (std::int64_t k = 0; k < kN; ++k) {
      y.add(i, j, at(a, ta ? k : i, ta ? i : k) * at(b, tb ? j : k, tb ? k : j));
    }
  });
  return y;
}

// One kind of op: in double there and back, and on a tape. b is not used by those of one input.
struct Op {
  const char* name;
  int inputs;
  bool jumps;  // its gradient has a step that rounding can cross
  std::function<Sized(const Matrix& a, const Matrix& b)> forward;
  std::function<void(const Matrix& a, const Matrix& b, const Matrix& y, const Matrix& dy, Sized& da,
                     Sized& db)>
      backward;
  std::function<Tensor(Tape&, const Tensor& a, const Tensor& b)> run;
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// f(a) element by element, with its derivative.
Op unary(const char* name, double (*f)(double), double (*slope)(double),
         Tensor (*run)(Tape&, const Tensor&)) {
  return {name,
          1,
          false,
          [=](const Matrix& a, const Matrix&) {
            Sized y;
            for_all([&](std::int64_t i, std::int64_t j) {
              y.add(i, j, f(at(a, i, j)));
              at(y.size, i, j) += std::abs(slope(at(a, i, j)) * at(a, i, j));
            });
            return y;
          },
          [=](const Matrix& a, const Matrix&, const Matrix&, const Matrix& dy, Sized& da, Sized&) {
            for_all([&](std::int64_t i, std::int64_t j) {
              da.add(i, j, slope(at(a, i, j)) * at(dy, i, j));
              at(da.size, i, j) += std::abs(at(dy, i, j));
            });
          },
          [=](Tape& tape, const Tensor& a, const Tensor&) {
            return run(tape, a);
          }};
}

std::vector<Op> all_ops() {
  std::vector<Op> kinds;
  kinds.push_back(unary(
      "tanh", [](double x) { return std::tanh(x); },
      [](double x) { return 1 - std::tanh(x) * std::tanh(x); },
      [](Tape& t, const Tensor& x) { return ops::tanh(t, x); }));
  kinds.push_back(unary(
      "sigmoid", sigmoid, [](double x) { return sigmoid(x) * (1 - sigmoid(x)); },
      [](Tape& t, const Tensor& x) { return ops::sigmoid(t, x); }));
  kinds.push_back(unary(
      "silu", [](double x) { return x * sigmoid(x); },
      [](double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); },
      [](Tape& t, const Tensor& x) { return ops::silu(t, x); }));
  kinds.push_back(unary(
      "softplus", [](double x) { return std::log1p(std::exp(x)); }, sigmoid,
      [](Tape& t, const Tensor& x) { return ops::softplus(t, x); }));
  kinds.push_back(
      {"plus", 2, false,
       [](const Matrix& a, const Matrix& b) {
         Sized y;
         for_all([&](std::int64_t i, std::int64_t j) {
           y.add(i, j, at(a, i, j));
           y.add(i, j, at(b, i, j));
         });
         return y;
       },
       [](const Matrix&, const Matrix&, const Matrix&, const Matrix& dy, Sized& da, Sized& db) {
         for_all([&](std::int64_t i, std::int64_t j) {
           da.add(i, j, at(dy, i, j));
           db.add(i, j, at(dy, i, j));
         });
       },
       [](Tape& t, const Tensor& a, const Tensor& b) {
         return ops::add(t, a, b);
       }});
  kinds.push_back(
      {"times", 2, false,
       [](const Matrix& a, const Matrix& b) {
         Sized y;
         for_all([&](std::int64_t i, std::int64_t j) { y.add(i, j, at(a, i, j) * at(b, i, j)); });
         return y;
       },
       [](const Matrix& a, const Matrix& b, const Matrix&, const Matrix& dy, Sized& da, Sized& db) {
         for_all([&](std::int64_t i, std::int64_t j) {
           da.add(i, j, at(dy, i, j) * at(b, i, j));
           db.add(i, j, at(dy, i, j) * at(a, i, j));
         });
       },
       [](Tape& t, const Tensor& a, const Tensor& b) {
         return ops::multiply(t, a, b);
       }});
  kinds.push_back(
      {"maximum", 2, true,
       [](const Matrix& a, const Matrix& b) {
         Sized y;
         for_all([&](std::int64_t i, std::int64_t j) {
           y.add(i, j, std::max(at(a, i, j), at(b, i, j)));
         });
         return y;
       },
       [](const Matrix& a, const Matrix& b, const Matrix&, const Matrix& dy, Sized& da, Sized& db) {
         for_all([&](std::int64_t i, std::int64_t j) {
           (at(a, i, j) > at(b, i, j) ? da : db).add(i, j, at(dy, i, j));
         });
       },
       [](Tape& t, const Tensor& a, const Tensor& b) {
         return ops::maximum(t, a, b);
       }});
  kinds.push_back(
      {"matmul", 2, false,
       [](const Matrix& a, const Matrix& b) { return matmul(a, b, false, false); },
       [](const Matrix& a, const Matrix& b, const Matrix&, const Matrix& dy, Sized& da, Sized& db) {
         da = matmul(dy, b, false, true);
         db = matmul(a, dy, true, false);
       },
       [](Tape& t, const Tensor& a, const Tensor& b) {
         return ops::matmul(t, a, b);
       }});
  kinds.push_back(
      {"transposed heads", 1, false,
       [](const Matrix& a, const Matrix&) {
         Sized y;
         for_all([&](std::int64_t i, std::int64_t j) { y.add(i, j, at(a, j, i)); });
         return y;
       },
       [](const Matrix&, const Matrix&, const Matrix&, const Matrix& dy, Sized& da, Sized&) {
         for_all([&](std::int64_t i, std::int64_t j) { da.add(i, j, at(dy, j, i)); });
       },
       [](Tape& t, const Tensor& a, const Tensor&) {
         // [6, 6] as [6, 2, 3], its axes in another order, and then as a matrix again.
         const Tensor cube = ops::reshape(t, a, {kN, 2, 3});
         return ops::reshape(t, ops::transpose(t, cube, {1, 2, 0}), {kN, kN});
       }});
  kinds.push_back(
      {"rows reversed and cut", 1, false,
       [](const Matrix& a, const Matrix&) {
         Sized y;
         for_all([&](std::int64_t i, std::int64_t j) {
           if (i < 4) y.add(i, j, at(a, kN - 1 - i, j));
         });
         return y;
       },
       [](const Matrix&, const Matrix&, const Matrix&, const Matrix& dy, Sized& da, Sized&) {
         for_all([&](std::int64_t i, std::int64_t j) {
           if (i < 4) da.add(kN - 1 - i, j, at(dy, i, j));
         });
       },
       [](Tape& t, const Tensor& a, const Tensor&) {
         const Tensor rows = ops::slice(t, a, {{ops::SliceAxis::kEnd, 1, -1}});
         return ops::pad(t, rows, {{0, 2}});
       }});
  kinds.push_back(
      {"less its mean", 1, false,
       [](const Matrix& a, const Matrix&) {
         Sized y;
         for_all([&](std::int64_t i, std::int64_t j) {
           y.add(i, j, at(a, i, j));
           for (std::int64_t k = 0; k < kN; ++k) y.add(i, j, -at(a, k, j) / kN);
         });
         return y;
       },
       [](const Matrix&, const Matrix&, const Matrix&, const Matrix& dy, Sized& da, Sized&) {
         for_all([&](std::int64_t i, std::int64_t j) {
           da.add(i, j, at(dy, i, j));
           for (std::int64_t k = 0; k < kN; ++k) da.add(i, j, -at(dy, k, j) / kN);
         });
       },
       [](Tape& t, const Tensor& a, const Tensor&) {
         return ops::subtract(t, a, ops::mean(t, a, 0, true));
       }});
  kinds.push_back(
      {"softmax", 1, false,
       [](const Matrix& a, const Matrix&) {
         Sized y;
         for (std::int64_t i = 0; i < kN; ++i) {
           double sum = 0, most = 0;
           for (std::int64_t j = 0; j < kN; ++j) {
             sum += std::exp(at(a, i, j));
             most = std::max(most, std::abs(at(a, i, j)));
           }
           for (std::int64_t j = 0; j < kN; ++j) {
             y.add(i, j, std::exp(at(a, i, j)) / sum);
             at(y.size, i, j) *= 1 + 2 * most;
           }
         }
         return y;
       },
       [](const Matrix&, const Matrix&, const Matrix& y, const Matrix& dy, Sized& da, Sized&) {
         for_all([&](std::int64_t i, std::int64_t j) {
           da.add(i, j, at(y, i, j) * at(dy, i, j));
           for (std::int64_t k = 0; k < kN; ++k) {
             da.add(i, j, -at(y, i, j) * at(y, i, k) * at(dy, i, k));
           }
         });
       },
       [](Tape& t, const Tensor& a, const Tensor&) {
         return ops::softmax(t, a);
       }});
  return kinds;
}

struct Step {
  std::size_t op;
  std::size_t a, b;  // numbers of values: the leaves first, then the steps' results
};
struct RandomGraph {
  std::size_t leaves;
  std::vector<Step> steps;
  std::vector<std::size_t> ends;  // values that gradients are given for
};

RandomGraph random_graph(Noise& noise, const std::vector<Op>& kinds, bool smooth) {
  RandomGraph graph{2 + static_cast<std::size_t>(noise.below(3)), {}, {}};
  const std::int64_t steps = 5 + noise.below(26);
  for (std::int64_t s = 0; s < steps; ++s) {
    const auto values = static_cast<std::int64_t>(graph.leaves) + s;
    // Mostly what was made last, so that graphs grow deep; sometimes anything.
    const auto any = [&] {
      const std::int64_t back = noise.below(3) == 0 ? values : std::min<std::int64_t>(values, 4);
      return static_cast<std::size_t>(values - 1 - noise.below(back));
    };
    std::size_t op = 0;
    do {
      op = static_cast<std::size_t>(noise.below(static_cast<std::int64_t>(kinds.size())));
    } while (smooth && kinds[op].jumps);
    graph.steps.push_back({op, any(), any()});
  }
  const std::size_t values = graph.leaves + graph.steps.size();
  graph.ends = {values - 1, values - 2, values - 3};
  return graph;
}

struct Outcome {
  std::vector<Matrix> values, grads;  // of every value
};

// The graph in double. noise: how large a random error to put on every result, relative to its terms.
Outcome in_double(const RandomGraph& graph, const std::vector<Op>& kinds,
                  const std::vector<Matrix>& leaves, const std::vector<Matrix>& seeds, double unit,
                  Noise& noise) {
  const auto disturbed = [&](const Sized& exact) {
    Matrix m = exact.value;
    for (std::size_t i = 0; unit != 0 && i < kSize; ++i)
      m[i] += unit * noise.next() * exact.size[i];
    return m;
  };
  Outcome out{leaves, {}};
  for (const Step& s : graph.steps) {
    out.values.push_back(disturbed(kinds[s.op].forward(out.values[s.a], out.values[s.b])));
  }
  out.grads.assign(out.values.size(), Matrix(kSize));
  const auto give = [&](std::size_t value, const Matrix& more) {
    Sized sum;
    for_all([&](std::int64_t i, std::int64_t j) {
      sum.add(i, j, at(out.grads[value], i, j));
      sum.add(i, j, at(more, i, j));
    });
    out.grads[value] = disturbed(sum);
  };
  for (std::size_t i = 0; i < graph.ends.size(); ++i) give(graph.ends[i], seeds[i]);
  for (std::size_t n = graph.steps.size(); n-- > 0;) {
    const Step& s = graph.steps[n];
    const std::size_t y = graph.leaves + n;
    Sized da, db;
    kinds[s.op].backward(out.values[s.a], out.values[s.b], out.values[y], out.grads[y], da, db);
    give(s.a, disturbed(da));
    if (kinds[s.op].inputs == 2) give(s.b, disturbed(db));
  }
  return out;
}

class RandomGraphs : public OnDevice {
 protected:
  // Some steps are run as checkpoints of themselves: nothing may change but what is remembered.
  std::vector<Matrix> on_tape(const RandomGraph& graph, const std::vector<Op>& kinds,
                              const std::vector<Matrix>& leaves, const std::vector<Matrix>& seeds,
                              DType dtype, bool checkpoints) {
    Tape tape(encoder());
    std::vector<Tensor> values;
    for (const Matrix& m : leaves) values.push_back(tape.watch(upload(m, {kN, kN}, dtype)));
    for (const Step& s : graph.steps) {
      const Op& op = kinds[s.op];
      Tensor y;
      if (checkpoints && s.op % 2 == 0) {
        y = checkpoint(tape,
                       [run = op.run](Tape& t, const std::vector<Tensor>& in) {
                         return std::vector<Tensor>{run(t, in[0], in[1])};
                       },
                       {values[s.a], values[s.b]})[0];
      } else {
        y = op.run(tape, values[s.a], values[s.b]);
      }
      values.push_back(tape.watch(y));
    }
    std::vector<std::pair<Tensor, Tensor>> given;
    for (std::size_t i = 0; i < seeds.size(); ++i) {
      given.emplace_back(values[graph.ends[i]], upload(seeds[i], {kN, kN}, dtype));
    }
    std::vector<Matrix> all;
    for (const Tensor& v : values) all.push_back(download(v));
    tape.backward(given);
    for (const Tensor& v : values) all.push_back(download(tape.grad(v)));
    return all;
  }

  void check(std::uint64_t seed, DType dtype) {
    const std::vector<Op> kinds = all_ops();
    Noise noise(seed);
    const RandomGraph graph = random_graph(noise, kinds, dtype != DType::kF32);
    const auto draw = [&](std::size_t count) {
      std::vector<Matrix> drawn;
      for (std::size_t i = 0; i < count; ++i) {
        drawn.push_back(random_values(noise, kSize, dtype, 1));
      }
      return drawn;
    };
    const std::vector<Matrix> leaves = draw(graph.leaves), seeds = draw(graph.ends.size());
    const auto flat = [](const Outcome& o) {
      std::vector<Matrix> all = o.values;
      all.insert(all.end(), o.grads.begin(), o.grads.end());
      return all;
    };
    const std::vector<Matrix> want = flat(in_double(graph, kinds, leaves, seeds, 0, noise));
    const double unit = dtype == DType::kF32 ? 0x1p-24 : 0x1p-9;
    std::vector<Matrix> spread(want.size(), Matrix(kSize));
    constexpr int kRuns = 16;
    for (int run = 0; run < kRuns; ++run) {
      const auto other = flat(in_double(graph, kinds, leaves, seeds, unit, noise));
      for (std::size_t v = 0; v < want.size(); ++v) {
        double most = 0;
        for (std::size_t i = 0; i < kSize; ++i) {
          most = std::max(most, std::abs(other[v][i] - want[v][i]));
        }
        // One measure for a tensor: a single element's spread over so few runs would be luck.
        for (double& s : spread[v]) s = std::max(s, most);
      }
    }
    for (const bool checkpoints : {false, true}) {
      const auto got = on_tape(graph, kinds, leaves, seeds, dtype, checkpoints);
      ASSERT_EQ(got.size(), want.size());
      for (std::size_t v = 0; v < want.size(); ++v) {
        for (std::size_t i = 0; i < kSize; ++i) {
          // An op's own formula may take several roundings where the oracle puts one.
          ASSERT_LE(std::abs(got[v][i] - want[v][i]), 8 * spread[v][i] + smallest_step(dtype))
              << "seed " << seed << (v < want.size() / 2 ? ", value " : ", gradient ")
              << v % (want.size() / 2) << " of " << want.size() / 2 << " element " << i << ": got "
              << got[v][i] << ", want " << want[v][i];
        }
      }
    }
  }
};

TEST_P(RandomGraphs, MatchTheOracle) {
  for (std::uint64_t seed = 1; seed <= 400 && !HasFatalFailure(); ++seed) check(seed, DType::kF32);
}

TEST_P(RandomGraphs, MatchTheOracleInSixteenBits) {
  for (std::uint64_t seed = 1; seed <= 300 && !HasFatalFailure(); ++seed) check(seed, DType::kBF16);
}

TEST_P(RandomGraphs, GiveTheSameBits) {
  const std::vector<Op> kinds = all_ops();
  Noise noise(77);
  const RandomGraph graph = random_graph(noise, kinds, false);
  std::vector<Matrix> leaves, seeds;
  for (std::size_t i = 0; i < graph.leaves; ++i) {
    leaves.push_back(random_values(noise, kSize, DType::kF32, 1));
  }
  for (std::size_t i = 0; i < graph.ends.size(); ++i) {
    seeds.push_back(random_values(noise, kSize, DType::kF32, 1));
  }
  const auto first = on_tape(graph, kinds, leaves, seeds, DType::kF32, false);
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(on_tape(graph, kinds, leaves, seeds, DType::kF32, i % 2 == 1), first) << i;
  }
}

MT_ON_EVERY_BACKEND(RandomGraphs);

// The oracle's own gradients, by central differences.
TEST(RandomGraphOracle, GradientMatchesCentralDifference) {
  const std::vector<Op> kinds = all_ops();
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Noise noise(seed);
    const RandomGraph graph = random_graph(noise, kinds, true);
    std::vector<Matrix> leaves, seeds;
    for (std::size_t i = 0; i < graph.leaves; ++i) {
      leaves.push_back(random_values(noise, kSize, DType::kF64, 1));
    }
    for (std::size_t i = 0; i < graph.ends.size(); ++i) {
      seeds.push_back(random_values(noise, kSize, DType::kF64, 1));
    }
    const auto loss = [&](const Arrays& in) {
      const Outcome o = in_double(graph, kinds, in, seeds, 0, noise);
      double sum = 0;
      for (std::size_t e = 0; e < graph.ends.size(); ++e) {
        for (std::size_t i = 0; i < kSize; ++i) sum += o.values[graph.ends[e]][i] * seeds[e][i];
      }
      return sum;
    };
    const Outcome o = in_double(graph, kinds, leaves, seeds, 0, noise);
    const Arrays grads(o.grads.begin(), o.grads.begin() + static_cast<std::int64_t>(graph.leaves));
    expect_gradient(loss, leaves, grads);
  }
}

}  // namespace
}  // namespace mlxtape::test
