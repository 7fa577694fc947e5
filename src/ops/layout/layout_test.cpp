#include "mlxtape/ops/layout.h"

#include <numeric>

#include "support/nan.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

using ops::AxisList;
using ops::SliceAxis;
constexpr std::int64_t kEnd = SliceAxis::kEnd;

// For each element of a result: the flat number of the element of x that it is, or -1 for the padding.
using Places = std::vector<std::int64_t>;

std::vector<double> pick(const std::vector<double>& x, const Places& places, double padding = 0) {
  std::vector<double> y;
  for (const std::int64_t p : places) y.push_back(p < 0 ? padding : x[static_cast<std::size_t>(p)]);
  return y;
}

class Layout : public OnDevice {
 protected:
  // y must be x[places]; its gradient, the sum of dy over the places of each element.
  void check(const std::string& what, const Shape& shape, const Places& places, const Shape& result,
             const std::function<Tensor(Tape&, const Tensor&)>& op, double padding = 0) {
    Noise noise(places.size() + 1);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool strided : {false, true}) {
        if (strided && shape.rank() == kMaxRank) continue;  // would need one more
        const auto n = *element_count(shape);
        const std::vector<double> x = random_values(noise, n, dtype);
        Tape tape(encoder());
        const Tensor in =
            tape.watch(strided ? upload_strided(x, shape, dtype) : upload(x, shape, dtype));
        const Tensor y = op(tape, in);
        EXPECT_EQ(y.shape(), result) << what;
        EXPECT_EQ(download(y), pick(x, places, padding)) << what;
        const std::vector<double> dy =
            random_values(noise, static_cast<std::int64_t>(places.size()), dtype);
        std::vector<double> dx(static_cast<std::size_t>(n), 0);
        for (std::size_t i = 0; i < places.size(); ++i) {
          if (places[i] < 0) continue;
          double& sum = dx[static_cast<std::size_t>(places[i])];
          sum =
              round_to(dtype, sum + dy[i]);  // two terms at most: one rounding, whatever the order
        }
        tape.backward(y, upload(dy, result, dtype));
        EXPECT_EQ(download(tape.grad(in)), dx) << what;
        const Tape::NoGrad pause(tape);
        EXPECT_EQ(op(tape, in).identity(), 0U) << what;
      }
    }
  }
};

Places counted(std::int64_t n) {
  Places places(static_cast<std::size_t>(n));
  std::iota(places.begin(), places.end(), 0);
  return places;
}

TEST_P(Layout, Reshape) {
  const auto to = [](Shape shape) {
    return [shape](Tape& tape, const Tensor& x) {
      return ops::reshape(tape, x, shape);
    };
  };
  check("flat", {2, 3, 4}, counted(24), {24}, to({24}));
  check("-1", {2, 3, 4}, counted(24), {6, 4}, to({-1, 4}));
  check("same", {5}, counted(5), {5, 1, 1}, to({5, 1, -1}));
  check("one", {1, 1}, counted(1), {}, to({}));
  check("empty", {0, 3}, {}, {3, 0}, to({3, 0}));
}

TEST_P(Layout, Transpose) {
  const auto by = [](const AxisList& axes) {
    return [axes](Tape& tape, const Tensor& x) {
      return ops::transpose(tape, x, axes);
    };
  };
  check("matrix", {2, 3}, {0, 3, 1, 4, 2, 5}, {3, 2}, by({}));
  Places places;
  for (std::int64_t k = 0; k < 4; ++k) {
    for (std::int64_t i = 0; i < 2; ++i) {
      for (std::int64_t j = 0; j < 3; ++j) places.push_back((i * 3 + j) * 4 + k);
    }
  }
  check("three axes", {2, 3, 4}, places, {4, 2, 3}, by({2, 0, -2}));
  check("none", {}, {0}, {}, by({}));
}

TEST_P(Layout, Slice) {
  const auto of = [](const std::vector<SliceAxis>& axes) {
    return [axes](Tape& tape, const Tensor& x) {
      return ops::slice(tape, x, axes);
    };
  };
  check("plain", {6}, {1, 2, 3}, {3}, of({{1, 4}}));
  check("step", {7}, {1, 3, 5}, {3}, of({{1, 7, 2}}));
  check("from the end", {7}, {4, 5}, {2}, of({{-3, -1}}));
  check("past the end", {4}, {2, 3}, {2}, of({{2, 100}}));
  check("nothing", {4}, {}, {0}, of({{3, 1}}));
  check("past everything", {4}, {}, {0}, of({{9, 12}}));
  check("backwards", {5}, {4, 3, 2, 1, 0}, {5}, of({{kEnd, kEnd, -1}}));
  check("backwards by two", {6}, {4, 2, 0}, {3}, of({{-2, kEnd, -2}}));
  check("backwards to", {6}, {5, 4, 3}, {3}, of({{100, 2, -1}}));
  check("backwards past the front", {4}, {3, 2, 1, 0}, {4}, of({{kEnd, -100, -1}}));
  check("backwards from before the front", {4}, {}, {0}, of({{-100, kEnd, -1}}));
  check("from before the front", {4}, {0, 1}, {2}, of({{-100, 2}}));
  check("a step past all", {4}, {1}, {1}, of({{1, kEnd, INT64_MAX}}));
  check("two axes", {3, 4}, {11, 9, 7, 5}, {2, 2}, of({{2, 0, -1}, {3, 0, -2}}));
  check("the first only", {2, 3}, {3, 4, 5}, {1, 3}, of({{1, 2}}));
  check("empty x", {0, 3}, {}, {0, 1}, of({{}, {1, 2}}));
}

TEST_P(Layout, SqueezeAndExpand) {
  check("all", {1, 3, 1, 2}, counted(6), {3, 2},
        [](Tape& tape, const Tensor& x) { return ops::squeeze(tape, x); });
  check("one", {1, 3, 1}, counted(3), {1, 3},
        [](Tape& tape, const Tensor& x) { return ops::squeeze(tape, x, {-1}); });
  check("in", {2, 3}, counted(6), {1, 2, 3, 1},
        [](Tape& tape, const Tensor& x) { return ops::expand_dims(tape, x, {0, -1}); });
  check("contiguous", {3, 5}, counted(15), {3, 5},
        [](Tape& tape, const Tensor& x) { return ops::contiguous(tape, x); });
}

TEST_P(Layout, BroadcastAndRepeat) {
  check("rows", {1, 2}, {0, 1, 0, 1}, {2, 2},
        [](Tape& tape, const Tensor& x) { return ops::broadcast_to(tape, x, {2, 2}); });
  check("a new axis", {2, 1}, {0, 1, 0, 1}, {2, 2, 1},
        [](Tape& tape, const Tensor& x) { return ops::broadcast_to(tape, x, {2, 2, 1}); });
  check("nothing to do", {3}, {0, 1, 2}, {3},
        [](Tape& tape, const Tensor& x) { return ops::broadcast_to(tape, x, {3}); });
  check("each twice", {2, 2}, {0, 0, 1, 1, 2, 2, 3, 3}, {2, 4},
        [](Tape& tape, const Tensor& x) { return ops::repeat(tape, x, 2, -1); });
  check("rows twice", {2, 2}, {0, 1, 0, 1, 2, 3, 2, 3}, {4, 2},
        [](Tape& tape, const Tensor& x) { return ops::repeat(tape, x, 2, 0); });
  check("none", {2}, {}, {0},
        [](Tape& tape, const Tensor& x) { return ops::repeat(tape, x, 0, 0); });
  check("of 8 axes", {1, 2, 1, 1, 1, 2, 1, 2}, {0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7},
        {1, 2, 1, 1, 1, 4, 1, 2},
        [](Tape& tape, const Tensor& x) { return ops::repeat(tape, x, 2, 5); });
  check("the last of 8", {1, 1, 1, 1, 1, 1, 1, 2}, {0, 0, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 4},
        [](Tape& tape, const Tensor& x) { return ops::repeat(tape, x, 2, -1); });
  const Tensor turned = upload({0, 1, 2, 3, 4, 5, 6, 7}, {1, 2, 1, 1, 1, 2, 1, 2}, DType::kF32)
                            .transpose({0, 5, 2, 3, 4, 1, 7, 6});
  EXPECT_EQ(download(ops::repeat(encoder(), turned, 2, 5)),
            (std::vector<double>{0, 1, 0, 1, 4, 5, 4, 5, 2, 3, 2, 3, 6, 7, 6, 7}));
}

TEST_P(Layout, ConcatenateStackSplitPad) {
  check("with itself", {2, 2}, {0, 1, 0, 1, 2, 3, 2, 3}, {2, 4},
        [](Tape& tape, const Tensor& x) { return ops::concatenate(tape, {x, x}, -1); });
  check("with others", {2}, {-1, 0, 1, -1, -1}, {5}, [&](Tape& tape, const Tensor& x) {
    const Tensor zero = tape.encoder().zeros({1}, x.dtype());
    const Tensor zeros = tape.encoder().zeros({2}, x.dtype());
    return ops::concatenate(tape, {zero, x, zeros});
  });
  check("stack", {3}, {0, 0, 1, 1, 2, 2}, {3, 2},
        [](Tape& tape, const Tensor& x) { return ops::stack(tape, {x, x}, 1); });
  check("split", {2, 6}, {2, 3, 8, 9}, {2, 2},
        [](Tape& tape, const Tensor& x) { return ops::split(tape, x, 3, 1)[1]; });
  check("split, all used", {4}, {2, 3, 0, 1}, {4}, [](Tape& tape, const Tensor& x) {
    const auto parts = ops::split(tape, x, 2);
    return ops::concatenate(tape, {parts[1], parts[0]});
  });
  check("split at", {5}, {2, 3}, {2},
        [](Tape& tape, const Tensor& x) { return ops::split_at(tape, x, {2, 2, 4})[2]; });
  check("split at the end", {5}, {}, {0},
        [](Tape& tape, const Tensor& x) { return ops::split_at(tape, x, {5})[1]; });
  check(
      "pad", {2, 2}, {-1, -1, -1, -1, -1, 0, 1, -1, -1, 2, 3, -1}, {3, 4},
      [](Tape& tape, const Tensor& x) { return ops::pad(tape, x, {{1, 0}, {1, 1}}, -3); }, -3);
  check("pad the first", {2, 2}, {0, 1, 2, 3, -1, -1}, {3, 2},
        [](Tape& tape, const Tensor& x) { return ops::pad(tape, x, {{0, 1}}); });
}

// Heads: [T, H·D] as [H, T, D] and back is a permutation, and its gradient too.
TEST_P(Layout, HeadsAreNotScrambled) {
  constexpr std::int64_t kT = 5, kH = 3, kD = 4;
  Places places;
  for (std::int64_t h = 0; h < kH; ++h) {
    for (std::int64_t t = 0; t < kT; ++t) {
      for (std::int64_t d = 0; d < kD; ++d) places.push_back(t * kH * kD + h * kD + d);
    }
  }
  const auto heads = [](Tape& tape, const Tensor& x) {
    return ops::transpose(tape, ops::reshape(tape, x, {kT, kH, kD}), {1, 0, 2});
  };
  check("heads", {kT, kH * kD}, places, {kH, kT, kD}, heads);
  check("and back", {kT, kH * kD}, counted(kT * kH * kD), {kT, kH * kD},
        [&](Tape& tape, const Tensor& x) {
          return ops::reshape(tape, ops::transpose(tape, heads(tape, x), {1, 0, 2}), {kT, kH * kD});
        });
}

TEST_P(Layout, ViewsCopyNothing) {
  const Tensor x = upload(std::vector<double>(24, 1), {2, 3, 4}, DType::kF32);
  const std::uint64_t before = encoder().counters().dispatches;
  for (const Tensor& y :
       {ops::reshape(encoder(), x, {6, 4}), ops::transpose(encoder(), x),
        ops::slice(encoder(), x, {{}, {2, kEnd, -1}}), ops::expand_dims(encoder(), x, {0}),
        ops::squeeze(encoder(), x), ops::split(encoder(), x, 2, 2)[0]}) {
    EXPECT_EQ(y.buffer().address(), x.buffer().address());
  }
  EXPECT_EQ(encoder().counters().dispatches, before);
}

// The calls of MLX that are named, of x = mx.arange(12).reshape(3, 4) and m = [[1, 2], [3, 4]].
TEST_P(Layout, AsMlx) {
  using Values = std::vector<double>;
  Values counted(12);
  std::iota(counted.begin(), counted.end(), 0);
  const Tensor x = upload(counted, {3, 4}, DType::kF32);
  const Tensor m = upload({1, 2, 3, 4}, {2, 2}, DType::kF32);
  const auto expect = [&](const Tensor& t, const Shape& shape, const Values& want) {
    EXPECT_EQ(t.shape(), shape);
    EXPECT_EQ(download(t), want);
  };
  const auto slice = [&](const std::vector<SliceAxis>& axes) {
    return ops::slice(encoder(), x, axes);
  };
  expect(slice({{2, 0, -1}, {kEnd, kEnd, -2}}), {2, 2}, {11, 9, 7, 5});      // x[2:0:-1, ::-2]
  expect(slice({{-1, -4, -2}}), {2, 4}, {8, 9, 10, 11, 0, 1, 2, 3});         // x[-1:-4:-2]
  expect(slice({{}, {3, -5, -3}}), {3, 2}, {3, 0, 7, 4, 11, 8});             // x[:, 3:-5:-3]
  expect(slice({{5, 1}}), {0, 4}, {});                                       // x[5:1]
  expect(slice({{1, 100, 2}}), {1, 4}, {4, 5, 6, 7});                        // x[1:100:2]
  expect(slice({{}, {100, 0, -1}}), {3, 3}, {3, 2, 1, 7, 6, 5, 11, 10, 9});  // x[:, 100:0:-1]
  expect(slice({{-100, 2}}), {2, 4}, {0, 1, 2, 3, 4, 5, 6, 7});              // x[-100:2]
  expect(slice({{0, -100, -1}}), {1, 4}, {0, 1, 2, 3});                      // x[0:-100:-1]
  // mx.pad(m, [(1, 0), (0, 2)], constant_values=-1)
  expect(ops::pad(encoder(), m, {{1, 0}, {0, 2}}, -1), {3, 4},
         {-1, -1, -1, -1, 1, 2, -1, -1, 3, 4, -1, -1});
  // mx.repeat(m, …, axis=…)
  expect(ops::repeat(encoder(), m, 2, 0), {4, 2}, {1, 2, 1, 2, 3, 4, 3, 4});
  expect(ops::repeat(encoder(), m, 3, -1), {2, 6}, {1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4});
  expect(ops::repeat(encoder(), m, 0, 1), {2, 0}, {});
  // mx.stack([[1, 2, 3], [4, 5, 6]], axis=…)
  const Tensor a = upload({1, 2, 3}, {3}, DType::kF32), b = upload({4, 5, 6}, {3}, DType::kF32);
  expect(ops::stack(encoder(), {a, b}), {2, 3}, {1, 2, 3, 4, 5, 6});
  expect(ops::stack(encoder(), {a, b}, -1), {3, 2}, {1, 4, 2, 5, 3, 6});
  // mx.split(x, 2, axis=1), mx.split(x, [1, 3], axis=-1), mx.split(x, [1, 1], axis=-1)
  expect(ops::split(encoder(), x, 2, 1)[1], {3, 2}, {2, 3, 6, 7, 10, 11});
  const auto parts = ops::split_at(encoder(), x, {1, 3}, -1);
  ASSERT_EQ(parts.size(), 3U);
  expect(parts[0], {3, 1}, {0, 4, 8});
  expect(parts[1], {3, 2}, {1, 2, 5, 6, 9, 10});
  expect(parts[2], {3, 1}, {3, 7, 11});
  expect(ops::split_at(encoder(), x, {1, 1}, -1)[1], {3, 0}, {});
  // mx.broadcast_to([[1], [2]], (2, 2, 3)) and (2, 0)
  const Tensor column = upload({1, 2}, {2, 1}, DType::kF32);
  expect(ops::broadcast_to(encoder(), column, {2, 2, 3}), {2, 2, 3},
         {1, 1, 1, 2, 2, 2, 1, 1, 1, 2, 2, 2});
  expect(ops::broadcast_to(encoder(), column, {2, 0}), {2, 0}, {});
  // mx.grad of the sum of each times mx.arange(…)
  const auto gradient = [&](const Tensor& of, auto op) {
    Tape tape(encoder());
    const Tensor t = tape.watch(of);
    const Tensor y = op(tape, t);
    Values dy(static_cast<std::size_t>(y.size()));
    std::iota(dy.begin(), dy.end(), 0);
    tape.backward(y, upload(dy, y.shape(), DType::kF32));
    return download(tape.grad(t));
  };
  EXPECT_EQ(gradient(m, [](Tape& t, const Tensor& v) { return ops::repeat(t, v, 2, 1); }),
            (Values{1, 5, 9, 13}));
  EXPECT_EQ(gradient(m, [](Tape& t, const Tensor& v) { return ops::pad(t, v, {{1, 0}, {0, 2}}); }),
            (Values{4, 5, 8, 9}));
  EXPECT_EQ(
      gradient(column, [](Tape& t, const Tensor& v) { return ops::broadcast_to(t, v, {2, 2, 3}); }),
      (Values{24, 42}));
}

TEST_P(Layout, KeepsTheBits) {
  const Tensor x = upload({1, 2, 3, 4, 5, 6}, {2, 3}, DType::kI64);
  EXPECT_EQ(download(ops::concatenate(encoder(), {x, x}, 1)),
            (std::vector<double>{1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6}));
  EXPECT_EQ(download(ops::pad(encoder(), x, {{0, 1}}, 7)),
            (std::vector<double>{1, 2, 3, 4, 5, 6, 7, 7, 7}));
}

TEST_P(Layout, NaNKeepsItsBits) {
  const Tensor bits = upload({0x7f81, 0xffff, 0x8000}, {3}, DType::kU16);  // payloads and −0
  const Tensor x(bits.buffer(), DType::kBF16, {3});
  const Tensor y = ops::concatenate(encoder(), {x, x}, 0);
  EXPECT_EQ(download(Tensor(y.buffer(), DType::kU16, {6})),
            (std::vector<double>{0x7f81, 0xffff, 0x8000, 0x7f81, 0xffff, 0x8000}));
}

TEST(LayoutCheck, SaysWhatIsWrong) {
  const auto x = Tensor::meta({2, 3, 1});
  const auto f16 = Tensor::meta({2, 3, 1}, DType::kF16);
  const auto far = Tensor::meta({2, 3, 1}, DType::kF32, Backend::kMetal);
  const auto deep = Tensor::meta({1, 1, 1, 1, 1, 1, 1, 1});
  expect_refused({
      {"negative", ops::reshape_check(x, {-2, 3}), Errc::kShape, "0 or more, or -1 once"},
      {"two unknown", ops::reshape_check(x, {-1, -1}), Errc::kShape, "at most one -1"},
      {"count", ops::reshape_check(x, {4}), Errc::kShape, "element count of [2, 3, 1]"},
      {"no fit", ops::reshape_check(x, {4, -1}), Errc::kShape, "must stay, got [4, -1]"},
      {"axis", ops::transpose_check(x, {0, 1, 3}), Errc::kArgument, "in [-3, 3), got 3"},
      {"twice", ops::transpose_check(x, {0, 1, -2}), Errc::kArgument, "each axis once"},
      {"few", ops::transpose_check(x, {0, 1}), Errc::kArgument, "each of the 3 axes once"},
      {"many", ops::slice_check(x, {{}, {}, {}, {}}), Errc::kArgument, "got 4"},
      {"step 0", ops::slice_check(x, {{0, 1, 0}}), Errc::kArgument, "must not be 0"},
      {"squeeze", ops::squeeze_check(x, {1}), Errc::kShape, "size 1, got axis 1 of [2, 3, 1]"},
      {"squeeze axis", ops::squeeze_check(x, {5}), Errc::kArgument, "got 5"},
      {"expand", ops::expand_dims_check(x, {5}), Errc::kArgument, "in [-4, 4), got 5"},
      {"expand far", ops::expand_dims_check(deep, {0}), Errc::kShape, "at most 8 axes, got 9"},
      {"stretch", ops::broadcast_to_check(x, {2, 4, 1}), Errc::kShape, "must stretch to"},
      {"shrink", ops::broadcast_to_check(x, {3, 1}), Errc::kShape, "[2, 3, 1] must stretch"},
      {"repeat axis", ops::repeat_check(x, 2, 3), Errc::kArgument, "got 3"},
      {"repeat less", ops::repeat_check(x, -1, 0), Errc::kArgument, "0 or more times, got -1"},
      {"repeat far", ops::repeat_check(x, INT64_MAX / 2, 1), Errc::kShape, "must fit in 63 bits"},
      {"repeat size", ops::repeat_check(x, INT64_MAX / 3, 1), Errc::kShape, "[2, 3, 1] times"},
      {"none", ops::concatenate_check({}, 0), Errc::kArgument, "got none"},
      {"along", ops::concatenate_check({x}, 3), Errc::kArgument, "got 3"},
      {"alike", ops::concatenate_check({x, Tensor::meta({2, 2, 1})}, 0), Errc::kShape,
       "[2, 3, 1] and [2, 2, 1]"},
      {"rank", ops::concatenate_check({x, Tensor::meta({2, 3})}, 0), Errc::kShape, "and [2, 3]"},
      {"types", ops::concatenate_check({x, f16}, 0), Errc::kDType, "f32 and f16; cast"},
      {"devices", ops::concatenate_check({x, far}, 0), Errc::kDevice, "cpu and metal"},
      {"stack none", ops::stack_check({}, 0), Errc::kArgument, "got none"},
      {"stack deep", ops::stack_check({deep}, 0), Errc::kShape, "got 9"},
      {"stack axis", ops::stack_check({x}, 4), Errc::kArgument, "in [-4, 4), got 4"},
      {"stack alike", ops::stack_check({x, Tensor::meta({2, 3, 2})}, 0), Errc::kShape, "[2, 3, 2]"},
      {"split axis", ops::split_check(x, std::vector<std::int64_t>{1}, 3), Errc::kArgument,
       "got 3"},
      {"split falls", ops::split_check(x, {2, 1}, 1), Errc::kArgument, "rise from 0 to 3"},
      {"split past", ops::split_check(x, std::vector<std::int64_t>{4}, 1), Errc::kArgument,
       "got [4]"},
      {"unequal", ops::split_check(x, 2, 1), Errc::kArgument, "3 in equal parts, got 2"},
      {"no parts", ops::split_check(x, 0, 1), Errc::kArgument, "got 0 of them"},
      {"parts axis", ops::split_check(x, 1, -4), Errc::kArgument, "got -4"},
      {"pad many", ops::pad_check(x, {{}, {}, {}, {}}), Errc::kArgument, "got 4"},
      {"pad less", ops::pad_check(x, {{0, -1}}), Errc::kArgument, "0 or more, got 0 and -1"},
  });
}

MT_ON_EVERY_BACKEND(Layout);

}  // namespace
}  // namespace mlxtape::test
