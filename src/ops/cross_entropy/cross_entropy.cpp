#include "mlxtape/ops/cross_entropy.h"

#include "cross_entropy_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("cross_entropy_fwd");
constinit const KernelHandle kBackward("cross_entropy_bwd");

Error wrong(Errc code, const std::string& what) { return {code, "cross_entropy: " + what}; }

Shape row_shape(const Tensor& logits) { return {logits.shape().begin(), logits.shape().end() - 1}; }
std::int64_t rows_of(const Tensor& logits) { return *element_count(row_shape(logits)); }

LossRowsOptions rows_options(const Tensor& logits, const Tensor& targets,
                             const CrossEntropyOptions& options) {
  return {options.mask, targets, logits.shape().back(), options.ignore_index, options.reduction};
}

CrossEntropyArgs args_of(const Tensor& logits, float smoothing) {
  return {rows_of(logits), logits.shape().back(), 0, smoothing, 0};
}

Check check_logits(const Tensor& logits, float smoothing) {
  if (logits.rank() < 1) return wrong(Errc::kShape, "logits must have at least one axis, got []");
  if (logits.shape().back() < 1) {
    return wrong(Errc::kShape,
                 "the last axis of logits must not be empty, got " + to_string(logits.shape()));
  }
  if (!is_kernel_float(logits.dtype())) {
    return wrong(Errc::kDType,
                 std::string("logits must be f32, f16 or bf16, got ") + name_of(logits.dtype()));
  }
  if (!(smoothing >= 0 && smoothing <= 1)) {
    return wrong(Errc::kArgument,
                 "label_smoothing must be in [0, 1], got " + std::to_string(smoothing));
  }
  return std::nullopt;
}

// In place or apart: a gradient that overlaps the logits by a part would overwrite what is still to be read.
Check check_dlogits(const Tensor& logits, const Tensor& dlogits) {
  if (!(dlogits.shape() == logits.shape())) {
    return wrong(Errc::kShape, "dlogits must have the shape of logits " +
                                   to_string(logits.shape()) + ", got " +
                                   to_string(dlogits.shape()));
  }
  if (dlogits.dtype() != logits.dtype()) {
    return wrong(Errc::kDType, std::string("dlogits must have the type of logits ") +
                                   name_of(logits.dtype()) + ", got " + name_of(dlogits.dtype()));
  }
  if (dlogits.backend() != logits.backend()) {
    return wrong(Errc::kDevice, std::string("dlogits must be where logits are (") +
                                    name_of(logits.backend()) + "), got " +
                                    name_of(dlogits.backend()));
  }
  if (!dlogits.is_contiguous()) {
    return wrong(Errc::kShape,
                 "dlogits must be contiguous, got strides " + to_string(dlogits.strides()));
  }
  return std::nullopt;
}

}  // namespace

Check cross_entropy_check(const Tensor& logits, const Tensor& targets,
                          const CrossEntropyOptions& options) {
  if (const Check check = check_logits(logits, options.label_smoothing)) return check;
  if (!targets.defined()) return wrong(Errc::kArgument, "targets must be given, got none");
  return loss_rows_check(rows_of(logits), logits.backend(), rows_options(logits, targets, options));
}

Check cross_entropy_with_gradient_check(const Tensor& logits, const Tensor& targets,
                                        const CrossEntropyOptions& options, const Tensor& dlogits) {
  if (const Check check = cross_entropy_check(logits, targets, options)) return check;
  return check_dlogits(logits, dlogits);
}

Check cross_entropy_rows_check(const Tensor& logits, const LossRows& rows, float label_smoothing,
                               const Tensor& losses, const Tensor& dlogits) {
  if (const Check check = check_logits(logits, label_smoothing)) return check;
  const Shape all{rows_of(logits)};
  if (!(rows.weight.shape() == all) || !(rows.index.shape() == all)) {
    return wrong(Errc::kShape, "rows must have a weight and an index each, " + to_string(all) +
                                   ", got " + to_string(rows.weight.shape()) + " and " +
                                   to_string(rows.index.shape()));
  }
  if (losses.size() != all[0] || losses.dtype() != DType::kF32 || !losses.is_contiguous()) {
    return wrong(Errc::kShape, "losses must be contiguous f32 " + to_string(all) + ", got " +
                                   name_of(losses.dtype()) + " " + to_string(losses.shape()));
  }
  return dlogits.defined() ? check_dlogits(logits, dlogits) : std::nullopt;
}

namespace {

// norm: not defined where nobody wants it.
void run_rows(CommandEncoder& encoder, const Tensor& logits, const LossRows& rows, float smoothing,
              const Tensor& losses, const Tensor& norm, const Tensor& dlogits) {
  require(cross_entropy_rows_check(logits, rows, smoothing, losses, dlogits));
  if (losses.size() == 0) return;
  CrossEntropyArgs args = args_of(logits, smoothing);
  args.wants_gradient = dlogits.defined() ? 1 : 0;
  const Tensor z = encoder.contiguous(logits);
  encoder.dispatch(kForward, logits.dtype(), args, {z, rows.weight, rows.index, rows.scale},
                   {losses, norm, dlogits});
}

Tensor finish(CommandEncoder& encoder, const Tensor& logits, const Tensor& losses,
              const LossRows& rows, Reduction reduction) {
  const Tensor loss = loss_rows_reduce(encoder, losses, rows, reduction);
  return reduction == Reduction::kNone ? loss.reshape(row_shape(logits)) : loss;
}

}  // namespace

void cross_entropy_rows(CommandEncoder& encoder, const Tensor& logits, const LossRows& rows,
                        float label_smoothing, const Tensor& losses, const Tensor& dlogits) {
  run_rows(encoder, logits, rows, label_smoothing, losses, Tensor(), dlogits);
}

CrossEntropyParts cross_entropy_parts(CommandEncoder& encoder, const Tensor& logits,
                                      const Tensor& targets, const CrossEntropyOptions& options) {
  require(cross_entropy_check(logits, targets, options));
  const std::int64_t rows = rows_of(logits);
  CrossEntropyParts parts{{},
                          encoder.empty({rows, 2}, DType::kF32),
                          loss_rows(encoder, rows, rows_options(logits, targets, options))};
  const Tensor losses = encoder.empty({rows}, DType::kF32);
  run_rows(encoder, logits, parts.rows, options.label_smoothing, losses, parts.norm, {});
  parts.loss = finish(encoder, logits, losses, parts.rows, options.reduction);
  return parts;
}

Tensor cross_entropy(CommandEncoder& encoder, const Tensor& logits, const Tensor& targets,
                     const CrossEntropyOptions& options) {
  return cross_entropy_parts(encoder, logits, targets, options).loss;
}

Tensor cross_entropy_with_gradient(CommandEncoder& encoder, const Tensor& logits,
                                   const Tensor& targets, const CrossEntropyOptions& options,
                                   const Tensor& dlogits) {
  require(cross_entropy_with_gradient_check(logits, targets, options, dlogits));
  const std::int64_t count = rows_of(logits);
  const LossRows rows = loss_rows(encoder, count, rows_options(logits, targets, options));
  const Tensor losses = encoder.empty({count}, DType::kF32);
  run_rows(encoder, logits, rows, options.label_smoothing, losses, {}, dlogits);
  return finish(encoder, logits, losses, rows, options.reduction);
}

Tensor cross_entropy_backward(CommandEncoder& encoder, const Tensor& logits,
                              const CrossEntropyParts& parts, const Tensor& dloss,
                              float label_smoothing) {
  require(check_logits(logits, label_smoothing));
  const std::int64_t rows = rows_of(logits);
  if ((dloss.size() != 1 && dloss.size() != rows) || dloss.dtype() != DType::kF32) {
    throw wrong(Errc::kShape, "dloss must be f32, one or one a row, " + std::to_string(rows) +
                                  ", got " + name_of(dloss.dtype()) + " " +
                                  to_string(dloss.shape()));
  }
  Tensor dlogits = encoder.empty_like(logits);
  if (dlogits.size() == 0) return dlogits;
  const Tensor z = encoder.contiguous(logits);
  const Tensor upstream = encoder.contiguous(dloss);
  CrossEntropyArgs args = args_of(logits, label_smoothing);
  args.dloss_step = dloss.size() == 1 ? 0 : 1;
  encoder.dispatch(kBackward, logits.dtype(), args,
                   {z, parts.rows.weight, parts.rows.index, parts.rows.scale, parts.norm, upstream},
                   {dlogits});
  return dlogits;
}

// ---- on a tape ----

namespace {

void cross_entropy_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // logits, norm, weight, index, scale
  const CrossEntropyParts parts{{}, saved[1], {saved[2], saved[3], saved[4]}};
  pullback.give(0, cross_entropy_backward(pullback.encoder(), saved[0], parts, pullback.grad(),
                                          saved.args<float>()));
}

}  // namespace

Tensor cross_entropy(Tape& tape, const Tensor& logits, const Tensor& targets,
                     const CrossEntropyOptions& options) {
  if (!tape.wants({logits})) return cross_entropy(tape.encoder(), logits, targets, options);
  CrossEntropyParts parts = cross_entropy_parts(tape.encoder(), logits, targets, options);
  const LossRows& rows = parts.rows;
  tape.record(
      "cross_entropy", cross_entropy_pullback, {logits}, {&parts.loss},
      Saved({logits, parts.norm, rows.weight, rows.index, rows.scale}, options.label_smoothing));
  return parts.loss;
}

}  // namespace mlxtape::ops
