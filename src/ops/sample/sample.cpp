#include "mlxtape/ops/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "ops/expect.h"
#include "ops/views.h"
#include "sample_run.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("sample_fwd");

constexpr std::int64_t kMostTokens = (std::int64_t{1} << 24U) - 1;  // of a vocabulary
constexpr std::int64_t kMostRoom = std::int64_t{1} << 30U;

Error wrong(Errc code, const std::string& what) { return {code, "sample: " + what}; }

Error wrong_setting(const char* what, const std::string& got) {
  return wrong(Errc::kArgument, std::string(what) + ", got " + got);
}

std::int32_t narrow(std::int64_t v) {
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(v, -1, std::numeric_limits<std::int32_t>::max()));
}

Check check_biases(const Beside& logits, const SampleRows& rows) {
  if (rows.bias_ids.defined() != rows.bias.defined()) {
    return wrong(Errc::kArgument, std::string("bias_ids and bias must come together, got ") +
                                      (rows.bias.defined() ? "bias" : "bias_ids") + " alone");
  }
  if (!rows.bias_ids.defined()) return std::nullopt;
  const std::int64_t count = rows.bias_ids.rank() == 2 ? rows.bias_ids.dim(1) : -1;
  if (count < 0 || count > kSampleMostBiases) {
    return wrong(Errc::kShape, "bias_ids must be [B, K] with K at most 1024, got " +
                                   to_string(rows.bias_ids.shape()));
  }
  const Shape shape{logits.tensor.dim(0), count};
  if (Check check = expect_tensor(logits, "bias_ids", rows.bias_ids, shape, DType::kI32)) {
    return check;
  }
  return expect_tensor(logits, "bias", rows.bias, shape, DType::kF32);
}

}  // namespace

Check sample_row_check(const SampleRow& r) {
  const auto finite = [](double v) {
    return std::isfinite(static_cast<float>(v));
  };
  const auto text = [](double v) {
    return std::to_string(v);
  };
  if (!(r.temperature >= 0 && finite(r.temperature))) {
    return wrong_setting("temperature must be a finite number of at least 0", text(r.temperature));
  }
  if (!(r.top_p > 0 && r.top_p <= 1)) {
    return wrong_setting("top_p must be above 0 and at most 1", text(r.top_p));
  }
  if (!(r.min_p >= 0 && r.min_p <= 1)) {
    return wrong_setting("min_p must be from 0 to 1", text(r.min_p));
  }
  if (r.top_k < 0) return wrong_setting("top_k must be at least 0", std::to_string(r.top_k));
  if (!(static_cast<float>(r.repetition_penalty) > 0 && finite(r.repetition_penalty))) {
    return wrong_setting("repetition_penalty must be a finite number above 0",
                         text(r.repetition_penalty));
  }
  if (!finite(r.presence_penalty) || !finite(r.frequency_penalty)) {
    return wrong_setting("presence_penalty and frequency_penalty must be finite",
                         text(r.presence_penalty) + " and " + text(r.frequency_penalty));
  }
  if (r.start < 0) return wrong_setting("start must be at least 0", std::to_string(r.start));
  return std::nullopt;
}

void put_sample_row(const SampleRow& r, std::span<float, kSampleNumbers> numbers,
                    std::span<std::int32_t, kSampleWhole> whole) {
  require(sample_row_check(r));
  // Above 0 stays above 0: a temperature too small for f32 is not greedy.
  const float least = std::numeric_limits<float>::denorm_min();
  numbers[0] = r.temperature == 0 ? 0 : std::max(least, static_cast<float>(r.temperature));
  numbers[1] = static_cast<float>(r.top_p);
  numbers[2] = static_cast<float>(r.min_p == 0 ? std::numeric_limits<double>::infinity()
                                               : std::abs(std::log(r.min_p)));
  numbers[3] = static_cast<float>(r.repetition_penalty);
  numbers[4] = static_cast<float>(r.presence_penalty);
  numbers[5] = static_cast<float>(r.frequency_penalty);
  whole[0] = narrow(r.top_k);
  whole[1] = narrow(r.repetition_context);
  whole[2] = narrow(r.penalty_context);
  whole[3] = narrow(r.start);
  whole[4] = static_cast<std::int32_t>(static_cast<std::uint32_t>(r.seed));
  whole[5] = static_cast<std::int32_t>(static_cast<std::uint32_t>(r.seed >> 32U));
}

Check sample_check(const Tensor& logits, const SampleRows& rows, SampleOptions options) {
  if (logits.rank() != 2) {
    return wrong(Errc::kShape, "logits must be [B, V], got " + to_string(logits.shape()));
  }
  if (!is_kernel_float(logits.dtype())) {
    return wrong(Errc::kDType,
                 std::string("logits must be f32, f16 or bf16, got ") + name_of(logits.dtype()));
  }
  if (logits.dim(1) < 1 || logits.dim(1) > kMostTokens) {
    return wrong(Errc::kShape,
                 "V must be at least 1 and less than 2^24, got " + std::to_string(logits.dim(1)));
  }
  const std::int64_t count = logits.dim(0);
  const Beside first{"sample", "logits", logits};
  if (Check check =
          expect_tensor(first, "numbers", rows.numbers, {count, kSampleNumbers}, DType::kF32)) {
    return check;
  }
  if (Check check = expect_tensor(first, "whole", rows.whole, {count, kSampleWhole}, DType::kI32)) {
    return check;
  }
  if (rows.history.rank() != 2 || rows.history.dim(1) > kMostRoom) {
    return wrong(Errc::kShape, "history must be [B, H] with H at most 2^30, got " +
                                   to_string(rows.history.shape()));
  }
  if (Check check = expect_tensor(first, "history", rows.history, {count, rows.history.dim(1)},
                                  DType::kI32)) {
    return check;
  }
  if (Check check = expect_tensor(first, "lengths", rows.lengths, {count}, DType::kI32)) {
    return check;
  }
  if (Check check = check_biases(first, rows)) return check;
  if (options.top && !options.logprobs) {
    return wrong(Errc::kArgument, "top must come with logprobs, got it alone");
  }
  if (options.append && !(rows.history.is_contiguous() && rows.lengths.is_contiguous())) {
    return wrong(Errc::kArgument,
                 "history and lengths must be contiguous, for they are changed in place, got "
                 "strided ones");
  }
  return std::nullopt;
}

Sampled run_sample(CommandEncoder& encoder, const Tensor& logits, const SampleRows& rows,
                   SampleOptions options, SampleForm form) {
  require(sample_check(logits, rows, options));
  const std::int64_t count = logits.dim(0);
  Sampled sampled;
  sampled.tokens = encoder.empty({count}, DType::kI32);
  if (options.logprobs) sampled.logprobs = encoder.empty({count}, DType::kF32);
  if (options.top) {
    sampled.top_ids = encoder.empty({count, kSampleTop}, DType::kI32);
    sampled.top_logprobs = encoder.empty({count, kSampleTop}, DType::kF32);
  }
  if (count == 0) return sampled;
  SampleArgs args{};
  args.rows = count;
  args.vocabulary = logits.dim(1);
  args.room = rows.history.dim(1);
  args.biases = rows.bias_ids.defined() ? rows.bias_ids.dim(1) : 0;
  args.logprobs = options.logprobs ? 1 : 0;
  args.top = options.top ? 1 : 0;
  args.append = options.append ? 1 : 0;
  args.form = form;
  const Tensor x = encoder.contiguous(logits);
  const Tensor numbers = encoder.contiguous(rows.numbers);
  const Tensor whole = encoder.contiguous(rows.whole);
  const Tensor history = encoder.contiguous(rows.history);
  const Tensor lengths = encoder.contiguous(rows.lengths);
  const Tensor bias_ids = contiguous_or_absent(encoder, rows.bias_ids);
  const Tensor bias = contiguous_or_absent(encoder, rows.bias);
  const Tensor none;
  encoder.dispatch(kForward, logits.dtype(), args,
                   {x, numbers, whole, history, lengths, bias_ids, bias},
                   {sampled.tokens, sampled.logprobs, sampled.top_ids, sampled.top_logprobs,
                    options.append ? history : none, options.append ? lengths : none});
  return sampled;
}

Sampled sample(CommandEncoder& encoder, const Tensor& logits, const SampleRows& rows,
               SampleOptions options) {
  return run_sample(encoder, logits, rows, options, SampleForm::kQuickest);
}

}  // namespace mlxtape::ops
