#include "mlxtape/ops/loss_rows.h"

#include "loss_rows_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("loss_rows_fwd");
constinit const KernelHandle kReduce("loss_rows_reduce_fwd");

Error wrong(Errc code, const std::string& what) { return {code, "loss_rows: " + what}; }

Check check_place(const char* name, const Tensor& t, std::int64_t rows, Backend backend) {
  if (t.size() != rows) {
    return wrong(Errc::kShape, std::string(name) + " must have an element a row, " +
                                   std::to_string(rows) + ", got " + to_string(t.shape()));
  }
  if (t.backend() != backend) {
    return wrong(Errc::kDevice, std::string(name) + " must be on " + name_of(backend) + ", got " +
                                    name_of(t.backend()));
  }
  return std::nullopt;
}

LossRowsMask mask_of(const Tensor& mask) {
  if (!mask.defined()) return kLossRowsNoMask;
  switch (mask.dtype()) {
    case DType::kBool: return kLossRowsBool;
    case DType::kF16: return kLossRowsF16;
    case DType::kBF16: return kLossRowsBF16;
    default: return kLossRowsF32;
  }
}

}  // namespace

LossRows LossRows::slice(std::int64_t start, std::int64_t stop) const {
  return {weight.slice(0, start, stop), index.defined() ? index.slice(0, start, stop) : Tensor(),
          scale};
}

Check loss_rows_check(std::int64_t rows, Backend backend, const LossRowsOptions& options) {
  const Tensor& mask = options.mask;
  if (mask.defined()) {
    if (mask.dtype() != DType::kBool && !is_kernel_float(mask.dtype())) {
      return wrong(Errc::kDType, std::string("mask must be bool, f32, f16 or bf16, got ") +
                                     name_of(mask.dtype()));
    }
    if (const Check check = check_place("mask", mask, rows, backend)) return check;
  }
  const Tensor& targets = options.targets;
  if (targets.defined()) {
    const DType type = targets.dtype();
    if (type != DType::kI32 && type != DType::kU32 && type != DType::kI64) {
      return wrong(Errc::kDType,
                   std::string("targets must be i32, u32 or i64, got ") + name_of(type));
    }
    if (const Check check = check_place("targets", targets, rows, backend)) return check;
  }
  return std::nullopt;
}

Check loss_rows_reduce_check(const Tensor& losses, const LossRows& rows) {
  if (losses.dtype() != DType::kF32) {
    return wrong(Errc::kDType, std::string("losses must be f32, got ") + name_of(losses.dtype()));
  }
  if (losses.size() != rows.weight.size()) {
    return wrong(Errc::kShape, "losses must have an element a row, " +
                                   std::to_string(rows.weight.size()) + ", got " +
                                   to_string(losses.shape()));
  }
  if (losses.backend() != rows.scale.backend()) {
    return wrong(Errc::kDevice, std::string("losses must be on ") + name_of(rows.scale.backend()) +
                                    ", got " + name_of(losses.backend()));
  }
  return std::nullopt;
}

LossRows loss_rows(CommandEncoder& encoder, std::int64_t rows, const LossRowsOptions& options) {
  require(loss_rows_check(rows, encoder.backend(), options));
  const Tensor mask = encoder.contiguous(options.mask);
  const Tensor targets = encoder.contiguous(options.targets);
  const bool has_target = targets.defined();
  LossRows out{encoder.empty({rows}, DType::kF32),
               has_target ? encoder.empty({rows}, DType::kI64) : Tensor(),
               encoder.empty({}, DType::kF32)};
  const LossRowsArgs args{rows,
                          options.classes,
                          options.ignore_index.value_or(0),
                          options.ignore_index.has_value() ? 1 : 0,
                          has_target ? 1 : 0,
                          options.reduction == Reduction::kMean ? 1 : 0,
                          mask_of(mask)};
  encoder.dispatch(kForward, has_target ? targets.dtype() : DType::kI32, args, {mask, targets},
                   {out.weight, out.index, out.scale});
  return out;
}

Tensor loss_rows_reduce(CommandEncoder& encoder, const Tensor& losses, const LossRows& rows,
                        Reduction reduction) {
  require(loss_rows_reduce_check(losses, rows));
  if (reduction == Reduction::kNone) return losses;
  const Tensor l = encoder.contiguous(losses);
  Tensor loss = encoder.empty({}, DType::kF32);
  encoder.dispatch(kReduce, DType::kF32, losses.size(), {l, rows.scale}, {loss});
  return loss;
}

}  // namespace mlxtape::ops
