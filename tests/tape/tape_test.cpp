#include "mlxtape/tape/functions.h"

#include <functional>
#include <numeric>

#include "mlxtape/ops/conv1d_depthwise_causal.h"
#include "mlxtape/ops/layout.h"
#include "mlxtape/ops/moe_route.h"
#include "mlxtape/ops/rms_norm.h"
#include "mlxtape/ops/softmax.h"
#include "mlxtape/ops/take_along_axis.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

// Ops of the tests' own, made from what every encoder has.

void plus_backward(Pullback& pullback) {
  const Tensor dy = pullback.take_grad();
  pullback.give(0, dy);
  pullback.give(1, dy);
}

Tensor plus(Tape& tape, const Tensor& a, const Tensor& b) {
  CommandEncoder& encoder = tape.encoder();
  Tensor y = encoder.empty_like(a);
  encoder.copy(encoder.contiguous(a), y);
  encoder.add_into(y, b);
  tape.record("plus", plus_backward, {a, b}, {&y}, {});
  return y;
}

// y = Σ x, by x's copies; dx = dy everywhere.
void total_backward(Pullback& pullback) {
  pullback.give(0, pullback.grad().broadcast_to(pullback.saved().args<Shape>()));
}

Tensor total(Tape& tape, const Tensor& x) {
  CommandEncoder& encoder = tape.encoder();
  Tensor y = encoder.zeros({1}, x.dtype());
  const Tensor flat = encoder.contiguous(x).reshape({x.size()});
  for (std::int64_t i = 0; i < x.size(); ++i) encoder.add_into(y, flat.slice(0, i, i + 1));
  tape.record("total", total_backward, {x}, {&y}, Saved({}, x.shape()));
  return y;
}

class OnTape : public OnDevice {
 protected:
  Tensor numbers(const std::vector<double>& values, DType dtype = DType::kF32) {
    const auto n = static_cast<std::int64_t>(values.size());
    return upload(values, {n}, dtype);
  }
  void expect(const Tensor& t, const std::vector<double>& want) { EXPECT_EQ(download(t), want); }

  std::size_t in_use() { return encoder().device().memory().stats().current; }
};

// ---- what flows ----

TEST_P(OnTape, AGradientIsTheSumOverAllUses) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor b = tape.watch(numbers({3, 4}));
  const Tensor c = plus(tape, a, plus(tape, a, b));  // 2a + b
  const Tensor y = plus(tape, c, plus(tape, c, a));  // 5a + 2b
  expect(y, {11, 18});
  tape.backward(y, numbers({1, 10}));
  expect(tape.grad(a), {5, 50});
  expect(tape.grad(b), {2, 20});
}

TEST_P(OnTape, ScalarsNeedNoSeed) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2, 3}));
  tape.backward(total(tape, plus(tape, a, a)));
  expect(tape.grad(a), {2, 2, 2});
}

TEST_P(OnTape, WalksAddUpUntilCleared) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor seed = numbers({1, 1});
  for (int i = 1; i <= 3; ++i) {
    tape.backward(plus(tape, a, a), seed);
    expect(tape.grad(a), {2.0 * i, 2.0 * i});
  }
  const Tensor held = tape.grad(a);  // must not change under its owner
  tape.backward(plus(tape, a, a), seed);
  expect(held, {6, 6});
  expect(tape.grad(a), {8, 8});
  tape.clear_grads();
  EXPECT_FALSE(tape.has_grad(a));
  tape.backward(plus(tape, a, a), seed);
  expect(tape.grad(a), {2, 2});
  expect(seed, {1, 1});
}

TEST_P(OnTape, RetainedTapesAreWalkedAgain) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor h = tape.watch(plus(tape, a, a));
  const Tensor y = plus(tape, h, a);
  const Tensor seed = numbers({1, 1});
  tape.backward(y, seed, {.retain = true});
  tape.backward(h, seed, {.retain = true});
  expect(tape.grad(a), {5, 5});
  expect(tape.grad(h), {2, 2});
  tape.backward(y, seed);
  expect(tape.grad(a), {8, 8});
  EXPECT_EQ(tape.nodes(), 0U);
}

TEST_P(OnTape, KeepsTheGradientOfAnythingWatched) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor h = plus(tape, a, a);
  EXPECT_EQ(tape.watch(h).identity(), h.identity());
  const Tensor y = plus(tape, h, h);
  tape.backward(y, numbers({1, 3}));
  expect(tape.grad(h), {2, 6});
  expect(tape.grad(a), {4, 12});
}

TEST_P(OnTape, SumsSixteenBitsInF32WhereAsked) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 1}, DType::kBF16), DType::kF32);
  const Tensor b = tape.watch(numbers({1, 1}, DType::kBF16));
  const Tensor large = numbers({256, 256}, DType::kBF16);
  const Tensor small = numbers({1, 1}, DType::kBF16);
  tape.backward(plus(tape, a, b), large);
  for (int i = 0; i < 8; ++i) tape.backward(plus(tape, a, b), small);
  EXPECT_EQ(tape.grad(a).dtype(), DType::kF32);
  expect(tape.grad(a), {264, 264});
  expect(tape.grad(b), {256, 256});  // 256 + 1 is 256 in 8 bits, each time
}

TEST_P(OnTape, SeedsMayBeSeveral) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor h = plus(tape, a, a);
  const Tensor y = plus(tape, h, a);
  tape.backward({{y, numbers({1, 1})}, {h, numbers({10, 20})}});
  expect(tape.grad(a), {23, 43});
}

TEST_P(OnTape, WhatTheResultDoesNotDependOnHasZeros) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor b = tape.watch(numbers({1, 2, 3}));
  tape.backward(plus(tape, a, a), numbers({1, 1}));
  EXPECT_FALSE(tape.has_grad(b));
  expect(tape.grad(b), {0, 0, 0});
}

// ---- what does not ----

TEST_P(OnTape, NothingFlowsThroughWhatIsDetached) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor seed = numbers({1, 1});
  tape.backward(plus(tape, a, stop_gradient(plus(tape, a, a))), seed);
  expect(tape.grad(a), {1, 1});
  const Tensor still = [&] {
    const Tape::NoGrad pause(tape);
    const Tape::NoGrad again(tape);
    return plus(tape, a, a);
  }();
  EXPECT_EQ(tape.nodes(), 0U);
  EXPECT_EQ(still.identity(), 0U);
  tape.backward(plus(tape, a, still), seed);
  expect(tape.grad(a), {2, 2});
}

TEST_P(OnTape, WithoutSomethingWatchedNothingIsKept) {
  Tape tape(encoder());
  const Tensor a = numbers({1, 2});
  const Tensor y = ops::softmax(tape, plus(tape, a, a));
  EXPECT_EQ(tape.nodes(), 0U);
  EXPECT_EQ(y.identity(), 0U);
  EXPECT_FALSE(tape.wants({a, y}));
}

TEST_P(OnTape, IntegersCarryNoGradient) {
  Tape tape(encoder());
  const Tensor x = tape.watch(upload({3, 1, 2, 1, 5, 4}, {2, 3}, DType::kF32));
  const ops::MoeRoute route = ops::moe_route(tape, x, 2);
  EXPECT_EQ(route.indices.identity(), 0U);
  EXPECT_NE(route.scores.identity(), 0U);
  const Tensor taken = ops::take_along_axis(tape, x, route.indices, 1);
  tape.backward(taken, upload({1, 2, 3, 4}, {2, 2}, DType::kF32));
  expect(tape.grad(x), {1, 0, 2, 0, 3, 4});
  expect_error(Errc::kDType, "only floats have gradients, got u32",
               [&] { tape.watch(route.indices); });
  expect_error(Errc::kDType, "integers have no gradient", [&] { tape.grad(route.indices); });
}

// ---- misuse: a clear error, and the tape goes on ----

TEST_P(OnTape, MisuseIsAnErrorAndTheTapeStaysUsable) {
  Tape tape(encoder());
  Tape other(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor seed = numbers({1, 1});
  const Tensor y = plus(tape, a, a);
  const Tensor foreign = plus(other, other.watch(numbers({1, 2})), a.detach());
  const Tensor f16 = numbers({1, 1}, DType::kF16);
  Tensor odd = plus(tape, a, a);
  tape.record("odd", nullptr, {a}, {&odd}, {});

  const auto nodes = tape.nodes();
  expect_error(Errc::kShape, "needs one number, got [2]", [&] { tape.backward(y); });
  expect_error(Errc::kShape, "the shape and type of y, [2] f32, got [3] f32",
               [&] { tape.backward(y, numbers({1, 2, 3})); });
  expect_error(Errc::kDType, "got [2] f16", [&] { tape.backward(y, f16); });
  expect_error(Errc::kNoGradient, "made on another tape", [&] { tape.backward(foreign, seed); });
  expect_error(Errc::kNoGradient, "that nothing was recorded of",
               [&] { tape.backward(seed, seed); });
  expect_error(Errc::kArgument, "undefined", [&] { tape.backward(Tensor(), seed); });
  expect_error(Errc::kDType, "starts from a float",
               [&] { tape.backward(numbers({1}, DType::kI32)); });
  expect_error(Errc::kNoGradient, "odd has no gradient", [&] { tape.backward(odd, seed); });
  expect_error(Errc::kArgument, "needs a backward first", [&] { tape.grad(a); });
  expect_error(Errc::kArgument, "is not kept; watch() it", [&] { tape.grad(y); });
  expect_error(Errc::kArgument, "is not kept; watch() it", [&] { tape.grad(seed); });
  expect_error(Errc::kArgument, "made on the tape", [&] { tape.backward(y.slice(0, 0, 1)); });
  expect_error(Errc::kArgument, "made on the tape", [&] { ops::softmax(tape, a.reshape({2, 1})); });
  expect_error(Errc::kArgument, "made on the tape", [&] { tape.watch(y.slice(0, 0, 1)); });
  expect_error(Errc::kArgument, "made on the tape", [&] { tape.grad(a.slice(0, 0, 1)); });
  expect_error(Errc::kArgument, "must have an output",
               [&] { tape.record("none", plus_backward, {a}, {}, {}); });
  expect_error(Errc::kDevice, "without memory", [&] { tape.watch(Tensor::meta({2})); });
  expect_error(Errc::kDType, "summed in f32, f16 or bf16, got i32",
               [&] { tape.watch(a, DType::kI32); });
  EXPECT_EQ(tape.nodes(), nodes);

  tape.backward(y, seed);
  expect(tape.grad(a), {2, 2});
  expect_error(Errc::kArgument, "pass retain to walk twice", [&] { tape.backward(y, seed); });
  expect_error(Errc::kArgument, "chosen before a walk", [&] { tape.watch(a, DType::kF16); });
  expect(tape.grad(a), {2, 2});

  Tape taken = std::move(tape);
  expect_error(Errc::kArgument, "moved from", [&] { tape.backward(y, seed); });  // NOLINT
  expect(taken.grad(a), {2, 2});
  taken.reset();
  expect_error(Errc::kArgument, "is not kept", [&] { taken.grad(a); });
}

TEST_P(OnTape, TensorsOfAnotherDeviceAreRefused) {
  float host[2] = {1, 2};
  if (encoder().backend() != Backend::kCpu) {
    Tape tape(encoder());
    expect_error(Errc::kDevice, "must be on", [&] { tape.watch(Tensor::wrap(host, {2})); });
  }
}

TEST_P(OnTape, ASavedTensorThatChangesIsNoticed) {
  const Tensor seed = upload({1, 2, 3}, {1, 3}, DType::kF32);
  const std::vector<float> host{1, 2, 3};
  const auto changed_by = [&](const std::function<void(const Tensor&)>& change) {
    Tape tape(encoder());
    const Tensor x = tape.watch(upload({1, 2, 3}, {1, 3}, DType::kF32));
    const Tensor y = ops::softmax(tape, x);
    change(y);
    expect_error(Errc::kArgument, "softmax saved a tensor [1, 3] f32",
                 [&] { tape.backward(y, seed); });
    EXPECT_EQ(tape.nodes(), 1U);
  };
  changed_by([&](const Tensor& y) { encoder().add_into(y, seed); });
  changed_by([&](const Tensor& y) { encoder().add_into(y.slice(1, 0, 1), seed.slice(1, 0, 1)); });
  changed_by([&](const Tensor& y) { encoder().upload(host.data(), 12, y); });
  changed_by([&](const Tensor& y) { encoder().copy(seed, y); });
  changed_by([&](const Tensor& y) {
    encoder().begin_capture();
    encoder().add_into(y, seed);
    const auto graph = encoder().end_capture();
    encoder().replay(*graph);
  });
}

TEST_P(OnTape, AReplayIsSeenAsAWrite) {
  const Tensor seed = upload({1, 2, 3}, {1, 3}, DType::kF32);
  const Tensor room = upload({1, 2, 3}, {1, 3}, DType::kF32);
  encoder().begin_capture();
  encoder().add_into(room, seed);
  const auto graph = encoder().end_capture();
  Tape tape(encoder());
  const Tensor w = tape.watch(upload({1, 2, 3}, {3}, DType::kF32));
  const Tensor y = ops::rms_norm(tape, room, w, 1e-6F);
  encoder().replay(*graph);
  expect_error(Errc::kArgument, "rms_norm saved a tensor", [&] { tape.backward(y, seed); });
}

// A backward function's own mistakes.
TEST_P(OnTape, GradientsMustFit) {
  const auto with = [&](BackwardFn backward) {
    Tape tape(encoder());
    const Tensor a = tape.watch(numbers({1, 2}));
    Tensor h = plus(tape, a, a);
    Tensor y = encoder().empty_like(h);
    tape.record("mine", backward, {h}, {&y}, Saved({a}));
    tape.backward(y, numbers({1, 1}));
  };
  expect_error(Errc::kShape, "mine gives input 0 a gradient of its shape [2], got [1]",
               [&] { with([](Pullback& p) { p.give(0, p.grad().slice(0, 0, 1)); }); });
  expect_error(Errc::kDType, "of its type f32, got f16",
               [&] { with([](Pullback& p) { p.give(0, p.encoder().zeros({2}, DType::kF16)); }); });
  expect_error(Errc::kArgument, "gives each gradient once, got input 0 twice", [&] {
    with([](Pullback& p) {
      p.give(0, p.grad());
      p.give(0, p.grad());
    });
  });
  expect_error(Errc::kNoGradient, "got none for input 0", [&] { with([](Pullback&) {}); });
  expect_error(Errc::kArgument, "must not be recorded on a tape that is being walked",
               [&] { with([](Pullback& p) { plus(p.tape(), p.saved()[0], p.grad()); }); });
  expect_error(Errc::kArgument, "one walk at a time",
               [&] { with([](Pullback& p) { p.tape().backward(p.saved()[0], p.grad()); }); });
  with([](Pullback& p) { p.give_none(0); });
}

// Gradients of half a walk are of no use, and nobody can tell them from whole ones.
TEST_P(OnTape, AWalkThatFailsLeavesNoHalfGradients) {
  static bool fails;
  fails = false;
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor seed = numbers({1, 1});
  const auto make = [&] {
    Tensor h = a.detach();
    tape.record("moody",
                [](Pullback& p) {
                  if (fails) throw Error(Errc::kBackend, "moody");
                  p.give(0, p.take_grad());
                },
                {a}, {&h}, {});
    return plus(tape, h, a);  // the walk has been at a when it comes to h
  };
  const Tensor y = make();
  tape.backward(y, seed, {.retain = true});
  expect(tape.grad(a), {2, 2});
  const auto expect_refusal = [&] {
    const char* says = "gradients must be whole";
    expect_error(Errc::kArgument, says, [&] { tape.grad(a); });
    expect_error(Errc::kArgument, says, [&] { tape.row_grad(a); });
    expect_error(Errc::kArgument, says, [&] { tape.has_grad(a); });
    expect_error(Errc::kArgument, says, [&] { tape.has_row_grad(a); });
    expect_error(Errc::kArgument, says, [&] { tape.backward(y, seed); });
    expect_error(Errc::kArgument, says, [&] { tape.backward(total(tape, a)); });
  };
  fails = true;
  expect_error(Errc::kBackend, "moody", [&] { tape.backward(y, seed, {.retain = true}); });
  expect_refusal();
  fails = false;
  tape.clear_grads();
  EXPECT_FALSE(tape.has_grad(a));
  tape.backward(y, seed, {.retain = true});  // what was recorded is whole
  expect(tape.grad(a), {2, 2});
  tape.backward(total(tape, y));
  expect(tape.grad(a), {4, 4});

  const Tensor again = make();
  fails = true;
  expect_error(Errc::kBackend, "moody", [&] { tape.backward(again, seed); });
  expect_refusal();
  tape.reset();
  EXPECT_FALSE(tape.has_grad(a));
}

TEST_P(OnTape, AskingForTheGradientOfAnUnusedOutputIsAnError) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  Tensor y = encoder().empty_like(a), z = encoder().empty_like(a);
  tape.record("two", [](Pullback& p) { p.give(0, p.grad(1)); }, {a}, {&y, &z}, {});
  expect_error(Errc::kNoGradient, "two asks for the gradient of output 1",
               [&] { tape.backward(y, numbers({1, 1})); });
}

// ---- memory ----

TEST_P(OnTape, WhatTheWalkHasPassedIsFree) {
  constexpr std::int64_t kRows = 256, kCols = 1024;
  const std::size_t bytes =  // with its guard bands
      encoder().zeros({kRows, kCols}, DType::kF32).buffer().storage()->capacity;
  static std::vector<std::size_t> seen;  // bytes in use at each probe
  seen.clear();
  const auto probe = [](Tape& tape, const Tensor& x) {
    Tensor y = x.detach();
    tape.record("probe",
                [](Pullback& p) {
                  seen.push_back(p.encoder().device().memory().stats().current);
                  p.give(0, p.take_grad());
                },
                {x}, {&y}, {});
    return y;
  };
  const std::size_t before = in_use();
  Tape tape(encoder());
  {
    Tensor h = tape.watch(encoder().zeros({kRows, kCols}, DType::kF32));
    for (int i = 0; i < 8; ++i) h = probe(tape, ops::softmax(tape, h));
    EXPECT_EQ(in_use(), before + 8 * bytes);  // softmax needs its result, not what it was given
    EXPECT_GE(tape.report().saved_bytes, 8 * bytes);
    const Tensor dy = encoder().zeros({kRows, kCols}, DType::kF32);
    tape.backward(h, dy);
  }
  ASSERT_EQ(seen.size(), 8U);
  // At the first probe there are all 8 results and dy, which the walk goes on with; at the second
  // the gradient that took dy's place as well, for dy is held here; then always a result less.
  EXPECT_EQ(seen[0], before + 9 * bytes);
  EXPECT_EQ(seen[1], before + 10 * bytes);  // the last result is held here too
  for (std::size_t i = 2; i < seen.size(); ++i) EXPECT_EQ(seen[i] + bytes, seen[i - 1]) << i;
  tape.reset();
  EXPECT_EQ(in_use(), before);
}

TEST_P(OnTape, NothingOutlivesATapeButWhatIsHeld) {
  const std::size_t before = in_use();
  {
    Tape tape(encoder());
    const Tensor w = tape.watch(upload(std::vector<double>(64, 1), {64}, DType::kF32));
    Tensor h = encoder().zeros({128, 64}, DType::kF32);
    for (int i = 0; i < 4; ++i) h = ops::rms_norm(tape, h, w, 1e-5F);
    const std::size_t held = in_use(), result = h.buffer().storage()->capacity;
    h = Tensor();  // the tape has the inputs of the four, not the result of the last
    EXPECT_EQ(in_use(), held - result);
  }
  EXPECT_EQ(in_use(), before);
}

TEST_P(OnTape, GradientsAreAddedInPlace) {
  Tape tape(encoder());
  const Tensor a = tape.watch(encoder().zeros({1024}, DType::kF32));
  const Tensor seed = encoder().full({1024}, DType::kF32, 1);
  tape.backward(plus(tape, a, a), seed);
  const void* address = tape.grad(a).data();
  for (int i = 0; i < 3; ++i) {
    tape.backward(plus(tape, a, a), seed);
    EXPECT_EQ(tape.grad(a).data(), address);
  }
  expect(seed, std::vector<double>(1024, 1));  // what the user gave was never written
}

TEST_P(OnTape, ReportsWhatItHolds) {
  Tape tape(encoder());
  const Tensor x = tape.watch(encoder().zeros({64, 1024}, DType::kF32));
  const Tensor w = tape.watch(encoder().zeros({1024}, DType::kF32));
  const Tensor y = ops::softmax(tape, ops::softmax(tape, ops::rms_norm(tape, x, w, 1e-5F)));
  const TapeReport report = tape.report();
  ASSERT_EQ(report.rows.size(), 2U);
  EXPECT_EQ(report.rows[0].name, "softmax");
  EXPECT_EQ(report.rows[0].nodes, 2U);
  EXPECT_GE(report.rows[0].bytes, 2U * 64 * 1024 * 4);
  EXPECT_EQ(report.rows[1].name, "rms_norm");
  EXPECT_EQ(report.saved_bytes, report.rows[0].bytes + report.rows[1].bytes);
  EXPECT_GE(report.peak_bytes, report.saved_bytes);
  EXPECT_NE(to_string(report).find("softmax"), std::string::npos);
  tape.backward(y, encoder().zeros({64, 1024}, DType::kF32));
  EXPECT_EQ(tape.report().saved_bytes, 0U);
  EXPECT_GE(tape.report().grad_bytes, 64U * 1024 * 4);
}

// ---- functions ----

TEST_P(OnTape, ValueAndGradOfAFunction) {
  const auto fn = value_and_grad([](Tape& tape, const std::vector<Tensor>& in) {
    return total(tape, plus(tape, in[0], plus(tape, in[0], in[1])));
  });
  const auto [value, grads] = fn(encoder(), {numbers({1, 2}), numbers({3, 4})});
  expect(value, {13});
  ASSERT_EQ(grads.size(), 2U);
  expect(grads[0], {2, 2});
  expect(grads[1], {1, 1});
  const auto second = value_and_grad(
      [](Tape& tape, const std::vector<Tensor>& in) {
        return total(tape, plus(tape, in[0], in[1]));
      },
      {1});
  EXPECT_EQ(second(encoder(), {numbers({1, 2}), numbers({3, 4})}).second.size(), 1U);
  const auto indices = value_and_grad(
      [](Tape& tape, const std::vector<Tensor>& in) { return total(tape, in[0]); }, {1});
  expect_error(Errc::kDType, "only floats have gradients",
               [&] { indices(encoder(), {numbers({1, 2}), numbers({3, 4}, DType::kI32)}); });
  expect_error(Errc::kArgument, "it has 1 inputs, got number 1",
               [&] { indices(encoder(), {numbers({1, 2})}); });
}

// ---- checkpoints ----

struct Net {
  Tensor w1, w2;
  std::vector<Tensor> operator()(Tape& tape, const std::vector<Tensor>& in) const {
    const Tensor a = ops::softmax(tape, ops::rms_norm(tape, in[0], w1, 1e-5F));
    const Tensor b = ops::rms_norm(tape, plus(tape, a, in[1]), w2, 1e-5F);
    return {b, a};
  }
};

TEST_P(OnTape, ACheckpointGivesTheSameBits) {
  Noise noise(3);
  const auto random = [&](Shape shape) {
    return upload(random_values(noise, *element_count(shape), DType::kF32), shape, DType::kF32);
  };
  const Tensor x = random({8, 32}), x2 = random({8, 32}), w1 = random({32}), w2 = random({32});
  const Tensor dy = random({8, 32}), dz = random({8, 32});
  const auto run = [&](int how) {
    Tape tape(encoder());
    const Tensor tx = tape.watch(x), tx2 = tape.watch(x2);
    const Net net{tape.watch(w1), tape.watch(w2)};
    const Tensor before = ops::softmax(tape, tx);
    const TapeFn fn = how < 2 ? TapeFn(net) : [&](Tape& inner, const std::vector<Tensor>& in) {
      return checkpoint(inner, net, in);
    };
    const std::vector<Tensor> out =
        how == 0 ? net(tape, {before, tx2}) : checkpoint(tape, fn, {before, tx2});
    EXPECT_EQ(tape.nodes(), how == 0 ? 5U : 2U);
    const Tensor end = ops::softmax(tape, out[0]);
    tape.backward({{end, dy}, {out[1], dz}});
    std::vector<std::vector<unsigned char>> bits;
    for (const Tensor& t :
         {end, tape.grad(tx), tape.grad(tx2), tape.grad(net.w1), tape.grad(net.w2)}) {
      bits.push_back(bits_of(encoder(), t));
    }
    return bits;
  };
  const auto want = run(0);
  EXPECT_EQ(run(1), want);
  EXPECT_EQ(run(2), want);  // a checkpoint inside of one
}

TEST_P(OnTape, ACheckpointHoldsItsInputsAlone) {
  constexpr std::size_t kBytes = 256 * 1024 * 4;
  const auto peak = [&](bool saves) {
    Tape tape(encoder());
    Tensor h = tape.watch(encoder().zeros({256, 1024}, DType::kF32));
    const TapeFn four = [](Tape& t, const std::vector<Tensor>& in) {
      Tensor y = in[0];
      for (int i = 0; i < 4; ++i) y = ops::softmax(t, y);
      return std::vector<Tensor>{y};
    };
    encoder().device().memory().reset_peak();
    const std::size_t start = in_use();
    for (int i = 0; i < 4; ++i) h = saves ? checkpoint(tape, four, {h})[0] : four(tape, {h})[0];
    tape.backward(h, encoder().zeros({256, 1024}, DType::kF32));
    return encoder().device().memory().stats().peak - start;
  };
  const std::size_t all = peak(false), some = peak(true);
  EXPECT_GE(all, 16 * kBytes);
  EXPECT_LE(some, 13 * kBytes);  // 4 inputs, 4 of one block again, gradients
}

TEST_P(OnTape, ACheckpointNoticesWhatChanged) {
  Tape tape(encoder());
  const Tensor x = tape.watch(upload({1, 2, 3}, {1, 3}, DType::kF32));
  const Tensor h = ops::softmax(tape, x);
  const Tensor y = checkpoint(tape,
                              [](Tape& t, const std::vector<Tensor>& in) {
                                return std::vector<Tensor>{plus(t, in[0], in[0])};
                              },
                              {h})[0];
  encoder().add_into(h, x);
  expect_error(Errc::kArgument, "saved a tensor", [&] { tape.backward(y, x.detach()); });
}

TEST_P(OnTape, ACheckpointNoticesThatWhatItCapturedChanged) {
  Tape tape(encoder());
  const Tensor x = tape.watch(upload({1, 2, 3}, {1, 3}, DType::kF32));
  const Tensor seed = upload({1, 2, 3}, {1, 3}, DType::kF32);
  const auto captures = [&](const Tensor& h) {
    return checkpoint(tape,
                      [h](Tape& t, const std::vector<Tensor>& in) {
                        return std::vector<Tensor>{plus(t, in[0], h)};
                      },
                      {x})[0];
  };
  const Tensor h = plus(tape, x, x);
  const Tensor y = captures(h);
  encoder().add_into(h, seed);
  expect_error(Errc::kArgument, "checkpoint saved a tensor [1, 3] f32",
               [&] { tape.backward(y, seed); });
  tape.backward(captures(h), seed);
  expect(tape.grad(x), {3, 6, 9});
}

TEST_P(OnTape, ACheckpointOfNothingWatchedIsACall) {
  Tape tape(encoder());
  const TapeFn fn = [](Tape& t, const std::vector<Tensor>& in) {
    return std::vector<Tensor>{plus(t, in[0], in[0])};
  };
  expect(checkpoint(tape, fn, {numbers({1, 2})})[0], {2, 4});
  EXPECT_EQ(tape.nodes(), 0U);
  const Tape::NoGrad pause(tape);
  expect(checkpoint(tape, fn, {tape.watch(numbers({1, 2}))})[0], {2, 4});
  EXPECT_EQ(tape.nodes(), 0U);
}

// ---- the five operations, with the functions that they are ----

TEST_P(OnTape, OpsGiveTheirOwnGradients) {
  Noise noise(5);
  const auto random = [&](Shape shape) {
    return upload(random_values(noise, *element_count(shape), DType::kF32), shape, DType::kF32);
  };
  Tape tape(encoder());
  const Tensor x = tape.watch(random({6, 16})), w = tape.watch(random({16}));
  const Tensor g = tape.watch(random({6, 16})), taps = tape.watch(random({16, 3}));
  const Tensor state = tape.watch(random({1, 2, 16}));
  const Tensor dy = random({6, 16}), dh = random({6, 16}), ds = random({1, 2, 16});
  const auto same = [&](const Tensor& a, const Tensor& b) {
    EXPECT_EQ(bits_of(encoder(), a), bits_of(encoder(), b));
  };
  const auto fresh = [&] {
    for (const Tensor& t : {x, w, g, taps, state}) static_cast<void>(tape.watch(t));
    tape.clear_grads();
  };

  const ops::RmsNormResidual sum = ops::rms_norm_residual(tape, x, g, w, 1e-5F);
  tape.backward({{sum.y, dy}, {sum.h, dh}});
  const auto plain_sum = ops::rms_norm_residual(encoder(), x, g, w, 1e-5F);
  const auto want_sum =
      ops::rms_norm_residual_backward(encoder(), plain_sum.h, w, plain_sum.r, dy, dh);
  same(tape.grad(x), want_sum.dh);
  same(tape.grad(g), want_sum.dh);
  same(tape.grad(w), want_sum.dw);
  fresh();
  tape.backward(ops::rms_norm_residual(tape, x, g, w, 1e-5F).h, dh);  // y is not used
  same(tape.grad(x), dh);
  EXPECT_FALSE(tape.has_grad(w));
  fresh();
  tape.backward(ops::rms_norm_gated(tape, x, w, g, 1e-5F), dy);
  const auto gated = ops::rms_norm_gated(encoder(), x, w, g, 1e-5F);
  const auto want_gated = ops::rms_norm_gated_backward(encoder(), x, w, g, gated.r, dy);
  same(tape.grad(x), want_gated.dx);
  same(tape.grad(w), want_gated.dw);
  same(tape.grad(g), want_gated.dg);
  fresh();
  ops::Conv1dDepthwiseCausalOptions options;
  options.initial_state = state;
  options.silu = true;
  options.want_final_state = true;
  const auto conv = ops::conv1d_depthwise_causal(tape, x, taps, options);
  tape.backward({{conv.y, dy}, {conv.final_state, ds}});
  const auto want_conv = ops::conv1d_depthwise_causal_backward(encoder(), x, taps, dy, options, ds);
  same(tape.grad(x), want_conv.dx);
  same(tape.grad(taps), want_conv.dw);
  same(tape.grad(state), want_conv.d_initial_state);
  fresh();
  tape.backward(ops::conv1d_depthwise_causal(tape, x, taps, options).final_state, ds);
  same(tape.grad(state), ops::conv1d_depthwise_causal_backward(
                             encoder(), x, taps, encoder().zeros({6, 16}, DType::kF32), options, ds)
                             .d_initial_state);
  fresh();
  const Tensor dk = random({6, 4});
  for (const bool renormalise : {true, false}) {
    const ops::MoeRoute route = ops::moe_route(tape, x, 4, {renormalise});
    tape.backward(route.scores, dk);
    const ops::MoeRoute plain = ops::moe_route(encoder(), x, 4, {renormalise});
    same(tape.grad(x),
         ops::moe_route_backward(encoder(), {x, plain.indices, plain.scores, plain.lse}, dk));
    fresh();
  }
  const Tensor flat = upload({1, 2, 3}, {3}, DType::kU32);
  tape.backward(ops::take_along_axis(tape, x, flat), random({3}));
  EXPECT_EQ(tape.grad(x).shape(), x.shape());
}

// ---- what a caller may do with its own ----

TEST_P(OnTape, ASeedMayBeWrittenAgain) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor b = tape.watch(numbers({3, 4}));
  const Tensor dy = numbers({1, 10});
  tape.backward(plus(tape, a, b), dy);
  const std::vector<float> more = {100, 1000};
  encoder().upload(more.data(), 8, dy);
  expect(tape.grad(a), {1, 10});
  tape.backward(plus(tape, a, b), dy);
  expect(tape.grad(a), {101, 1010});
  expect(tape.grad(b), {101, 1010});
  expect(dy, {100, 1000});
}

TEST_P(OnTape, WatchedAgainKeepsTheTypeOfItsSum) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 1}, DType::kBF16), DType::kF32);
  EXPECT_EQ(tape.watch(a).identity(), a.identity());
  tape.backward(plus(tape, a, a), numbers({256, 1}, DType::kBF16));
  EXPECT_EQ(tape.grad(a).dtype(), DType::kF32);
  tape.watch(a);  // also after a walk
}

TEST_P(OnTape, GradientsAreContiguous) {
  Tape tape(encoder());
  const Tensor a = tape.watch(upload({1, 2, 3, 4, 5, 6}, {2, 3}, DType::kF32));
  const Tensor y = ops::transpose(tape, a, {1, 0});
  tape.backward(y, upload({1, 2, 3, 4, 5, 6}, {3, 2}, DType::kF32));
  EXPECT_TRUE(tape.grad(a).is_contiguous());
  expect(tape.grad(a), {1, 3, 5, 2, 4, 6});
}

TEST_P(OnTape, WhatWasMadeBeforeResetSaysSo) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1}));
  const Tensor y = plus(tape, a, a);
  tape.reset();
  expect_error(Errc::kNoGradient, "before reset", [&] { tape.backward(y); });
}

TEST_P(OnTape, CheckpointsHandThroughArgumentsAndConstants) {
  Tape tape(encoder());
  const Tensor a = tape.watch(numbers({1, 2}));
  const Tensor b = tape.watch(numbers({3, 4}));
  const auto results = checkpoint(tape,
                                  [](Tape& t, const std::vector<Tensor>& in) {
                                    const Tensor h = plus(t, in[1], in[1]);
                                    return std::vector<Tensor>{in[0], h, stop_gradient(h)};
                                  },
                                  {a, b});
  const Tensor y = plus(tape, results[0], plus(tape, results[1], results[2]));
  tape.backward(y, numbers({1, 10}));
  expect(tape.grad(a), {1, 10});
  expect(tape.grad(b), {2, 20});
}

TEST_P(OnTape, ACheckpointsOutputsNeedNotAllBeUsed) {
  for (const std::size_t used : {std::size_t{0}, std::size_t{1}}) {
    Tape tape(encoder());
    const Tensor a = tape.watch(numbers({1, 2}));
    const Tensor b = tape.watch(numbers({3, 4}));
    const auto results =
        checkpoint(tape,
                   [](Tape& t, const std::vector<Tensor>& in) {
                     return std::vector<Tensor>{plus(t, in[0], in[0]), plus(t, in[0], in[1])};
                   },
                   {a, b});
    tape.backward(results[used], numbers({1, 10}));
    const double twice = used == 0 ? 2 : 1, other = used == 0 ? 0 : 1;
    expect(tape.grad(a), {twice, 10 * twice});
    expect(tape.grad(b), {other, 10 * other});
  }
}

MT_ON_EVERY_BACKEND(OnTape);

}  // namespace
}  // namespace mlxtape::test
