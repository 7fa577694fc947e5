#include "mlxtape/nn/head_loss.h"

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/quantize.h"
#include "support/arrays.h"

namespace mlxtape::test {
namespace {

class HeadLoss : public OnDevice {
 protected:
  static constexpr std::int64_t kRows = 37, kWidth = 64, kClasses = 80;

  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped()) return;
    Noise noise(6);
    x_ = upload(random_values(noise, kRows * kWidth, DType::kF32), {kRows, kWidth}, DType::kF32);
    w_ = upload(random_values(noise, kClasses * kWidth, DType::kF32), {kClasses, kWidth},
                DType::kF32);
    std::vector<std::int32_t> targets;
    for (std::int32_t r = 0; r < kRows; ++r) targets.push_back(r % 5 == 3 ? -1 : (r * 29) % 80);
    targets_ = encoder().empty({kRows}, DType::kI32);
    encoder().upload(targets.data(), targets_.bytes(), targets_);
  }

  // The loss, and what reaches hidden and, of a quantised head that learns, scales and biases.
  std::vector<std::vector<double>> run(bool is_quantized, bool learns,
                                       const ops::CrossEntropyOptions& how,
                                       std::int64_t chunk_rows) {
    Tape tape(encoder());
    const Tensor h = tape.watch(x_);
    nn::Weight head = w_;
    if (is_quantized) head = ops::quantize(encoder(), w_, {4, 32});
    if (learns) {
      head.quantized.scales = tape.watch(head.quantized.scales);
      head.quantized.biases = tape.watch(head.quantized.biases);
    }
    const Tensor loss = chunk_rows < 0
                            ? ops::cross_entropy(tape, nn::linear(tape, h, head), targets_, how)
                            : nn::head_cross_entropy(tape, h, head, targets_, how, chunk_rows);
    tape.backward(ops::multiply(tape, loss, 3.0));
    std::vector<std::vector<double>> all = {download(loss), download(tape.grad(h))};
    if (learns) {
      all.push_back(download(tape.grad(head.quantized.scales)));
      all.push_back(download(tape.grad(head.quantized.biases)));
    }
    return all;
  }

  Tensor x_, w_, targets_;
};

// The same as of all logits at once.
TEST_P(HeadLoss, ChunksAreTheWhole) {
  for (const auto& [is_quantized, learns] :
       {std::pair(true, true), {true, false}, {false, false}}) {
    for (const ops::Reduction reduction : {ops::Reduction::kSum, ops::Reduction::kMean}) {
      ops::CrossEntropyOptions how;
      how.reduction = reduction;
      how.ignore_index = -1;
      how.label_smoothing = 0.1F;
      const auto want = run(is_quantized, learns, how, -1);
      for (const std::int64_t chunk : {0, 33, 36}) {
        SCOPED_TRACE(std::string(is_quantized ? "quantised" : "plain") +
                     (learns ? ", learns, " : ", ") + std::to_string(chunk));
        expect_same_arrays(run(is_quantized, learns, how, chunk), want, DType::kF32,
                           kClasses + kRows);
      }
    }
  }
}

// Of the logits' size nothing is there but a chunk.
TEST_P(HeadLoss, NeedsAChunksMemory) {
  const std::int64_t rows = 4096;
  const Tensor x = encoder().zeros({rows, kWidth}, DType::kF32);
  const Tensor targets = encoder().zeros({rows}, DType::kI32);
  nn::Weight head = ops::quantize(encoder(), w_, {4, 32});
  ops::CrossEntropyOptions how;
  how.reduction = ops::Reduction::kMean;
  encoder().commit_and_wait();
  MemoryPool& memory = encoder().device().memory();
  const auto peak_of = [&](std::int64_t chunk) {
    memory.reset_peak();
    const std::size_t before = memory.stats().peak;
    Tape tape(encoder());
    nn::head_cross_entropy(tape, tape.watch(x), head, targets, how, chunk);
    encoder().commit_and_wait();
    return memory.stats().peak - before;
  };
  const std::size_t whole = peak_of(rows), some = peak_of(128);
  EXPECT_LT(some + (rows - 128) * kClasses * 4 / 2, whole);
}

TEST_P(HeadLoss, SaysWhatIsWrong) {
  Tape tape(encoder());
  ops::CrossEntropyOptions how;
  expect_error(Errc::kArgument, "reduction must be sum or mean",
               [&] { nn::head_cross_entropy(tape, x_, w_, targets_, how); });
  how.reduction = ops::Reduction::kMean;
  expect_error(Errc::kNoGradient, "a plain head must not be watched",
               [&] { nn::head_cross_entropy(tape, x_, tape.watch(w_), targets_, how); });
  expect_error(Errc::kShape, "linear: w must be",
               [&] { nn::head_cross_entropy(tape, x_.slice(1, 0, 32), w_, targets_, how); });
  expect_error(Errc::kShape, "hidden must be [rows, width]", [&] {
    nn::head_cross_entropy(tape, x_.reshape({1, kRows, kWidth}), w_, targets_.slice(0, 0, 1), how);
  });
  expect_error(Errc::kArgument, "chunk_rows must be at least 0, got -1",
               [&] { nn::head_cross_entropy(tape, x_, w_, targets_, how, -1); });
}

MT_ON_EVERY_BACKEND(HeadLoss);

}  // namespace
}  // namespace mlxtape::test
