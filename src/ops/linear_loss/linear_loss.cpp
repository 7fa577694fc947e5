#include "mlxtape/ops/linear_loss.h"

#include <algorithm>

#include "linear_loss_args.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/ops/matmul.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kBackward("linear_loss_bwd");

constexpr std::int64_t kRowStep = 128;  // rows of a chunk are a multiple: tiles of the products

Error wrong(Errc code, const std::string& what) { return {code, "linear_loss: " + what}; }

std::int64_t rows_of(const Tensor& hidden) {
  return *element_count(Shape(hidden.shape().begin(), hidden.shape().end() - 1));
}

Tensor as_rows(CommandEncoder& encoder, const Tensor& hidden) {
  return encoder.contiguous(hidden).reshape({rows_of(hidden), hidden.shape().back()});
}

// All rows in equal chunks, as few as there may be.
std::int64_t chunk_rows(const Device& device, std::int64_t rows, const Tensor& weight,
                        const LinearLossOptions& how) {
  if (how.chunk_rows > 0) return how.chunk_rows;
  const std::int64_t row_bytes = weight.dim(0) * static_cast<std::int64_t>(size_of(weight.dtype()));
  const std::int64_t bytes = device.traits().logits_bytes;
  const std::int64_t fit = std::max(bytes / row_bytes / kRowStep * kRowStep, kRowStep);
  const std::int64_t chunks = std::max<std::int64_t>(ceil_div(rows, fit), 1);
  return std::max(ceil_div(ceil_div(rows, chunks), kRowStep) * kRowStep, kRowStep);
}

Check check_projection(const char* whose, const Tensor& hidden, const Tensor& weight) {
  const std::string of(whose);
  if (hidden.rank() < 1 || weight.rank() != 2 || weight.dim(1) != hidden.shape().back() ||
      weight.dim(0) < 1) {
    return wrong(Errc::kShape,
                 of + "hidden and weight must be [..., D] and [V, D], V of at least 1, got " +
                     to_string(hidden.shape()) + " and " + to_string(weight.shape()));
  }
  if (!is_kernel_float(hidden.dtype()) || weight.dtype() != hidden.dtype()) {
    return wrong(Errc::kDType, of + "hidden and weight must be one of f32, f16, bf16, got " +
                                   name_of(hidden.dtype()) + " and " + name_of(weight.dtype()));
  }
  if (weight.backend() != hidden.backend()) {
    return wrong(Errc::kDevice, of + "weight must be where hidden is (" +
                                    name_of(hidden.backend()) + "), got " +
                                    name_of(weight.backend()));
  }
  return std::nullopt;
}

Check check_how(Reduction reduction, const LinearLossOptions& how) {
  if (reduction == Reduction::kNone) {
    return wrong(Errc::kArgument, "reduction must be sum or mean, got none");
  }
  if (how.chunk_rows < 0) {
    return wrong(Errc::kArgument,
                 "chunk_rows must be at least 0, got " + std::to_string(how.chunk_rows));
  }
  if (how.f32_dweight && !how.f32_sums) {
    return wrong(Errc::kArgument, "f32_dweight must come with f32_sums");
  }
  return std::nullopt;
}

Tensor logits_like(const Tensor& hidden, const Tensor& weight) {
  return Tensor::meta({rows_of(hidden), weight.dim(0)}, hidden.dtype(), hidden.backend());
}

// Chunk by chunk: logits; the loss of its rows and, in place, their gradient by
// loss_of(start, stop, logits, losses, dlogits); then its share of the gradients.
template <class LossOf>
LinearLoss run_chunks(CommandEncoder& encoder, const Tensor& hidden, const Tensor& weight,
                      const LossRows& rows, Reduction reduction, const LinearLossOptions& how,
                      LinearLossWanted wanted, const LossOf& loss_of) {
  const std::int64_t count = rows_of(hidden), classes = weight.dim(0);
  const std::int64_t each = chunk_rows(encoder.device(), count, weight, how);
  const Tensor h = as_rows(encoder, hidden);
  const Tensor losses = encoder.empty({count}, DType::kF32);
  const Tensor room = encoder.empty({std::min(count, each), classes}, hidden.dtype());
  const DType sum = how.f32_sums ? DType::kF32 : weight.dtype();
  LinearLoss out;
  if (wanted.dhidden) out.dhidden = encoder.empty(h.shape(), h.dtype());
  if (wanted.dweight) {
    out.dweight =
        count == 0 ? encoder.zeros(weight.shape(), sum) : encoder.empty(weight.shape(), sum);
  }
  for (std::int64_t start = 0; start < count; start += each) {
    const std::int64_t stop = std::min(count, start + each);
    const Tensor some = h.slice(0, start, stop);
    const Tensor logits = room.slice(0, 0, stop - start);
    matmul_into(encoder, some, weight.transpose({1, 0}), logits, 0);
    const bool gradient = wanted.dhidden || wanted.dweight;
    loss_of(start, stop, logits, losses.slice(0, start, stop), gradient ? logits : Tensor());
    if (wanted.dhidden) {
      matmul_into(encoder, logits, weight, out.dhidden.slice(0, start, stop), 0);
    }
    if (wanted.dweight) {
      matmul_into(encoder, logits.transpose({1, 0}), some, out.dweight, start == 0 ? 0 : 1);
    }
  }
  out.loss = loss_rows_reduce(encoder, losses, rows, reduction);
  if (wanted.dhidden) out.dhidden = out.dhidden.reshape(hidden.shape());
  return out;
}

LinearLoss run_cross_entropy(CommandEncoder& encoder, const Tensor& hidden, const Tensor& weight,
                             const Tensor& targets, const CrossEntropyOptions& options,
                             const LinearLossOptions& how, LinearLossWanted wanted) {
  require(linear_cross_entropy_check(hidden, weight, targets, options, how));
  const LossRows rows =
      loss_rows(encoder, rows_of(hidden),
                {options.mask, targets, weight.dim(0), options.ignore_index, options.reduction});
  return run_chunks(encoder, hidden, weight, rows, options.reduction, how, wanted,
                    [&](std::int64_t start, std::int64_t stop, const Tensor& logits,
                        const Tensor& losses, const Tensor& dlogits) {
                      cross_entropy_rows(encoder, logits, rows.slice(start, stop),
                                         options.label_smoothing, losses, dlogits);
                    });
}

bool is_projected(const LinearTeacher& teacher) { return teacher.hidden.defined(); }

LinearLoss run_kl_divergence(CommandEncoder& encoder, const Tensor& hidden, const Tensor& weight,
                             const LinearTeacher& teacher, const KlDivergenceOptions& options,
                             const LinearLossOptions& how, LinearLossWanted wanted) {
  require(linear_kl_divergence_check(hidden, weight, teacher, options, how));
  const LossRows rows =
      loss_rows(encoder, rows_of(hidden), {options.mask, {}, 0, {}, options.reduction});
  const Tensor teacher_rows = is_projected(teacher) ? as_rows(encoder, teacher.hidden) : Tensor();
  Tensor room;
  return run_chunks(encoder, hidden, weight, rows, options.reduction, how, wanted,
                    [&](std::int64_t start, std::int64_t stop, const Tensor& logits,
                        const Tensor& losses, const Tensor& dlogits) {
                      const auto against = [&](const KlTeacher& given) {
                        kl_divergence_rows(encoder, logits, given, options, rows.slice(start, stop),
                                           losses, dlogits);
                      };
                      if (!is_projected(teacher)) return against(teacher.logits.slice(start, stop));
                      if (!room.defined())
                        room = encoder.empty(logits.shape(), teacher_rows.dtype());
                      const Tensor given = room.slice(0, 0, stop - start);
                      matmul_into(encoder, teacher_rows.slice(0, start, stop),
                                  teacher.weight.transpose({1, 0}), given, 0);
                      against(KlTeacher(given));
                    });
}

}  // namespace

Check linear_cross_entropy_check(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                                 const CrossEntropyOptions& options, const LinearLossOptions& how) {
  if (const Check check = check_projection("", hidden, weight)) return check;
  if (const Check check = check_how(options.reduction, how)) return check;
  return cross_entropy_check(logits_like(hidden, weight), targets, options);
}

Check linear_kl_divergence_check(const Tensor& hidden, const Tensor& weight,
                                 const LinearTeacher& teacher, const KlDivergenceOptions& options,
                                 const LinearLossOptions& how) {
  if (const Check check = check_projection("", hidden, weight)) return check;
  if (const Check check = check_how(options.reduction, how)) return check;
  const Tensor student = logits_like(hidden, weight);
  if (!is_projected(teacher)) return kl_divergence_check(student, teacher.logits, options);
  if (const Check check = check_projection("the teacher's ", teacher.hidden, teacher.weight)) {
    return check;
  }
  return kl_divergence_check(student, logits_like(teacher.hidden, teacher.weight), options);
}

Tensor linear_cross_entropy(CommandEncoder& encoder, const Tensor& hidden, const Tensor& weight,
                            const Tensor& targets, const CrossEntropyOptions& options,
                            const LinearLossOptions& how) {
  return run_cross_entropy(encoder, hidden, weight, targets, options, how, {false, false}).loss;
}

Tensor linear_kl_divergence(CommandEncoder& encoder, const Tensor& hidden, const Tensor& weight,
                            const LinearTeacher& teacher, const KlDivergenceOptions& options,
                            const LinearLossOptions& how) {
  return run_kl_divergence(encoder, hidden, weight, teacher, options, how, {false, false}).loss;
}

LinearLoss linear_cross_entropy_with_gradient(CommandEncoder& encoder, const Tensor& hidden,
                                              const Tensor& weight, const Tensor& targets,
                                              const CrossEntropyOptions& options,
                                              const LinearLossOptions& how,
                                              LinearLossWanted wanted) {
  return run_cross_entropy(encoder, hidden, weight, targets, options, how, wanted);
}

LinearLoss linear_kl_divergence_with_gradient(CommandEncoder& encoder, const Tensor& hidden,
                                              const Tensor& weight, const LinearTeacher& teacher,
                                              const KlDivergenceOptions& options,
                                              const LinearLossOptions& how,
                                              LinearLossWanted wanted) {
  return run_kl_divergence(encoder, hidden, weight, teacher, options, how, wanted);
}

// ---- on a tape ----

namespace {

// x·dloss in the type asked for.
Tensor times(CommandEncoder& encoder, const Tensor& x, const Tensor& dloss, DType type) {
  Tensor out = encoder.empty(x.shape(), type);
  const bool from_f32 = x.dtype() == DType::kF32;
  if (out.size() != 0) {
    encoder.dispatch(kBackward, type, LinearLossArgs{x.size(), from_f32 ? 1 : 0, 0}, {x, dloss},
                     {out});
  }
  return out;
}

void linear_loss_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // dhidden, dweight for dloss = 1; one may be missing
  CommandEncoder& encoder = pullback.encoder();
  const Tensor dloss = encoder.contiguous(pullback.grad());
  if (pullback.needs(0)) {
    pullback.give(0, times(encoder, saved[0], dloss, saved[0].dtype()));
  }
  if (pullback.needs(1)) {
    pullback.give(1, times(encoder, saved[1], dloss, saved.args<DType>()));
  }
}

template <class Run>
Tensor record(Tape& tape, const char* name, const Tensor& hidden, const Tensor& weight,
              const LinearLossOptions& how, const Run& run) {
  LinearLoss out = run(LinearLossWanted{tape.wants({hidden}), tape.wants({weight})});
  if (tape.wants({hidden, weight})) {
    const DType type = how.f32_dweight ? DType::kF32 : weight.dtype();
    tape.record(name, linear_loss_pullback, {hidden, weight}, {&out.loss},
                Saved({out.dhidden, out.dweight}, type));
  }
  return out.loss;
}

}  // namespace

Tensor linear_cross_entropy(Tape& tape, const Tensor& hidden, const Tensor& weight,
                            const Tensor& targets, const CrossEntropyOptions& options,
                            const LinearLossOptions& how) {
  return record(tape, "linear_cross_entropy", hidden, weight, how, [&](LinearLossWanted wanted) {
    return run_cross_entropy(tape.encoder(), hidden, weight, targets, options, how, wanted);
  });
}

Tensor linear_kl_divergence(Tape& tape, const Tensor& hidden, const Tensor& weight,
                            const LinearTeacher& teacher, const KlDivergenceOptions& options,
                            const LinearLossOptions& how) {
  return record(tape, "linear_kl_divergence", hidden, weight, how, [&](LinearLossWanted wanted) {
    return run_kl_divergence(tape.encoder(), hidden, weight, teacher, options, how, wanted);
  });
}

}  // namespace mlxtape::ops
