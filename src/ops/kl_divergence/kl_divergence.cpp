#include "mlxtape/ops/kl_divergence.h"

#include <cmath>

#include "kl_divergence_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("kl_divergence_fwd");
constinit const KernelHandle kBackward("kl_divergence_bwd");
constinit const KernelHandle kTopForward("kl_divergence_top_fwd");
constinit const KernelHandle kTopBackward("kl_divergence_top_bwd");

Error wrong(Errc code, const std::string& what) { return {code, "kl_divergence: " + what}; }

Shape row_shape(const Tensor& t) { return {t.shape().begin(), t.shape().end() - 1}; }
std::int64_t rows_of(const Tensor& student) { return *element_count(row_shape(student)); }

bool is_top(const KlTeacher& teacher) { return !teacher.logits.defined(); }

KlDivergenceArgs args_of(const Tensor& student, const KlTeacher& teacher,
                         const KlDivergenceOptions& options) {
  const Tensor& given = is_top(teacher) ? teacher.values : teacher.logits;
  const DType type = given.dtype();
  return {rows_of(student),
          student.shape().back(),
          is_top(teacher) ? given.shape().back() : 0,
          0,
          1 / options.temperature,
          options.scale_by_t2 ? options.temperature * options.temperature : 1,
          type == DType::kF32   ? kKlTeacherF32
          : type == DType::kF16 ? kKlTeacherF16
                                : kKlTeacherBF16,
          0};
}

LossRowsOptions rows_options(const KlDivergenceOptions& options) {
  return {options.mask, {}, 0, {}, options.reduction};
}

Check check_float(const char* name, const Tensor& t) {
  if (is_kernel_float(t.dtype())) return std::nullopt;
  return wrong(Errc::kDType,
               std::string(name) + " must be f32, f16 or bf16, got " + name_of(t.dtype()));
}

Check check_place(const char* name, const Tensor& t, const Tensor& student) {
  if (t.backend() == student.backend()) return std::nullopt;
  return wrong(Errc::kDevice, std::string(name) + " must be where student is (" +
                                  name_of(student.backend()) + "), got " + name_of(t.backend()));
}

Check check_top(const Tensor& student, const KlTeacher& teacher) {
  const Tensor& values = teacher.values;
  const Tensor& indices = teacher.indices;
  if (values.rank() != student.rank() || !(row_shape(values) == row_shape(student)) ||
      values.shape().back() < 1) {
    return wrong(Errc::kShape, "values must be like student " + to_string(student.shape()) +
                                   " but for the last axis, k of at least 1, got " +
                                   to_string(values.shape()));
  }
  if (!(indices.shape() == values.shape())) {
    return wrong(Errc::kShape, "indices must have the shape of values " +
                                   to_string(values.shape()) + ", got " +
                                   to_string(indices.shape()));
  }
  if (const Check check = check_float("values", values)) return check;
  if (indices.dtype() != DType::kU32) {
    return wrong(Errc::kDType, std::string("indices must be u32, got ") + name_of(indices.dtype()));
  }
  if (const Check check = check_place("values", values, student)) return check;
  return check_place("indices", indices, student);
}

Check check_inputs(const Tensor& student, const KlTeacher& teacher,
                   const KlDivergenceOptions& options) {
  if (student.rank() < 1) return wrong(Errc::kShape, "student must have at least one axis, got []");
  if (student.shape().back() < 1) {
    return wrong(Errc::kShape,
                 "the last axis of student must not be empty, got " + to_string(student.shape()));
  }
  if (const Check check = check_float("student", student)) return check;
  if (!(options.temperature > 0 && std::isfinite(options.temperature))) {
    return wrong(Errc::kArgument, "temperature must be positive and finite, got " +
                                      std::to_string(options.temperature));
  }
  if (is_top(teacher)) return check_top(student, teacher);
  if (!(teacher.logits.shape() == student.shape())) {
    return wrong(Errc::kShape, "teacher must have the shape of student " +
                                   to_string(student.shape()) + ", got " +
                                   to_string(teacher.logits.shape()));
  }
  if (const Check check = check_float("teacher", teacher.logits)) return check;
  return check_place("teacher", teacher.logits, student);
}

Check check_dstudent(const Tensor& student, const Tensor& dstudent) {
  if (!(dstudent.shape() == student.shape())) {
    return wrong(Errc::kShape, "dstudent must have the shape of student " +
                                   to_string(student.shape()) + ", got " +
                                   to_string(dstudent.shape()));
  }
  if (dstudent.dtype() != student.dtype()) {
    return wrong(Errc::kDType, std::string("dstudent must have the type of student ") +
                                   name_of(student.dtype()) + ", got " + name_of(dstudent.dtype()));
  }
  if (const Check check = check_place("dstudent", dstudent, student)) return check;
  if (!dstudent.is_contiguous()) {
    return wrong(Errc::kShape,
                 "dstudent must be contiguous, got strides " + to_string(dstudent.strides()));
  }
  return std::nullopt;
}

}  // namespace

KlTeacher KlTeacher::slice(std::int64_t start, std::int64_t stop) const {
  if (logits.defined()) return {logits.slice(0, start, stop)};
  return {values.slice(0, start, stop), indices.slice(0, start, stop)};
}

Check kl_divergence_check(const Tensor& student, const KlTeacher& teacher,
                          const KlDivergenceOptions& options) {
  if (const Check check = check_inputs(student, teacher, options)) return check;
  return loss_rows_check(rows_of(student), student.backend(), rows_options(options));
}

Check kl_divergence_with_gradient_check(const Tensor& student, const KlTeacher& teacher,
                                        const KlDivergenceOptions& options,
                                        const Tensor& dstudent) {
  if (const Check check = kl_divergence_check(student, teacher, options)) return check;
  return check_dstudent(student, dstudent);
}

Check kl_divergence_rows_check(const Tensor& student, const KlTeacher& teacher,
                               const KlDivergenceOptions& options, const LossRows& rows,
                               const Tensor& losses, const Tensor& dstudent) {
  if (const Check check = check_inputs(student, teacher, options)) return check;
  const Shape all{rows_of(student)};
  if (!(rows.weight.shape() == all)) {
    return wrong(Errc::kShape, "rows must have a weight each, " + to_string(all) + ", got " +
                                   to_string(rows.weight.shape()));
  }
  if (losses.size() != all[0] || losses.dtype() != DType::kF32 || !losses.is_contiguous()) {
    return wrong(Errc::kShape, "losses must be contiguous f32 " + to_string(all) + ", got " +
                                   name_of(losses.dtype()) + " " + to_string(losses.shape()));
  }
  return dstudent.defined() ? check_dstudent(student, dstudent) : std::nullopt;
}

namespace {

// norm: not defined where nobody wants it.
void run_rows(CommandEncoder& encoder, const Tensor& student, const KlTeacher& teacher,
              const KlDivergenceOptions& options, const LossRows& rows, const Tensor& losses,
              const Tensor& norm, const Tensor& dstudent) {
  require(kl_divergence_rows_check(student, teacher, options, rows, losses, dstudent));
  if (losses.size() == 0) return;
  KlDivergenceArgs args = args_of(student, teacher, options);
  args.wants_gradient = dstudent.defined() ? 1 : 0;
  const Tensor q = encoder.contiguous(student);
  if (is_top(teacher)) {
    const Tensor values = encoder.contiguous(teacher.values);
    const Tensor indices = encoder.contiguous(teacher.indices);
    encoder.dispatch(kTopForward, student.dtype(), args,
                     {q, values, rows.weight, rows.scale, indices}, {losses, norm, dstudent});
    return;
  }
  const Tensor p = encoder.contiguous(teacher.logits);
  encoder.dispatch(kForward, student.dtype(), args, {q, p, rows.weight, rows.scale},
                   {losses, norm, dstudent});
}

Tensor finish(CommandEncoder& encoder, const Tensor& student, const Tensor& losses,
              const LossRows& rows, Reduction reduction) {
  const Tensor loss = loss_rows_reduce(encoder, losses, rows, reduction);
  return reduction == Reduction::kNone ? loss.reshape(row_shape(student)) : loss;
}

}  // namespace

void kl_divergence_rows(CommandEncoder& encoder, const Tensor& student, const KlTeacher& teacher,
                        const KlDivergenceOptions& options, const LossRows& rows,
                        const Tensor& losses, const Tensor& dstudent) {
  run_rows(encoder, student, teacher, options, rows, losses, Tensor(), dstudent);
}

KlDivergenceParts kl_divergence_parts(CommandEncoder& encoder, const Tensor& student,
                                      const KlTeacher& teacher,
                                      const KlDivergenceOptions& options) {
  require(kl_divergence_check(student, teacher, options));
  const std::int64_t rows = rows_of(student);
  KlDivergenceParts parts{
      {}, encoder.empty({rows, 4}, DType::kF32), loss_rows(encoder, rows, rows_options(options))};
  const Tensor losses = encoder.empty({rows}, DType::kF32);
  run_rows(encoder, student, teacher, options, parts.rows, losses, parts.norm, {});
  parts.loss = finish(encoder, student, losses, parts.rows, options.reduction);
  return parts;
}

Tensor kl_divergence(CommandEncoder& encoder, const Tensor& student, const KlTeacher& teacher,
                     const KlDivergenceOptions& options) {
  return kl_divergence_parts(encoder, student, teacher, options).loss;
}

Tensor kl_divergence_with_gradient(CommandEncoder& encoder, const Tensor& student,
                                   const KlTeacher& teacher, const KlDivergenceOptions& options,
                                   const Tensor& dstudent) {
  require(kl_divergence_with_gradient_check(student, teacher, options, dstudent));
  const std::int64_t count = rows_of(student);
  const LossRows rows = loss_rows(encoder, count, rows_options(options));
  const Tensor losses = encoder.empty({count}, DType::kF32);
  run_rows(encoder, student, teacher, options, rows, losses, {}, dstudent);
  return finish(encoder, student, losses, rows, options.reduction);
}

Tensor kl_divergence_backward(CommandEncoder& encoder, const Tensor& student,
                              const KlTeacher& teacher, const KlDivergenceParts& parts,
                              const Tensor& dloss, const KlDivergenceOptions& options) {
  require(check_inputs(student, teacher, options));
  const std::int64_t rows = rows_of(student);
  if ((dloss.size() != 1 && dloss.size() != rows) || dloss.dtype() != DType::kF32) {
    throw wrong(Errc::kShape, "dloss must be f32, one or one a row, " + std::to_string(rows) +
                                  ", got " + name_of(dloss.dtype()) + " " +
                                  to_string(dloss.shape()));
  }
  Tensor dstudent = encoder.empty_like(student);
  if (dstudent.size() == 0) return dstudent;
  KlDivergenceArgs args = args_of(student, teacher, options);
  args.dloss_step = dloss.size() == 1 ? 0 : 1;
  const Tensor q = encoder.contiguous(student);
  const Tensor upstream = encoder.contiguous(dloss);
  const LossRows& counted = parts.rows;
  if (is_top(teacher)) {
    const Tensor values = encoder.contiguous(teacher.values);
    const Tensor indices = encoder.contiguous(teacher.indices);
    encoder.dispatch(kTopBackward, student.dtype(), args,
                     {q, values, counted.weight, counted.scale, parts.norm, upstream, indices},
                     {dstudent});
    return dstudent;
  }
  const Tensor p = encoder.contiguous(teacher.logits);
  encoder.dispatch(kBackward, student.dtype(), args,
                   {q, p, counted.weight, counted.scale, parts.norm, upstream}, {dstudent});
  return dstudent;
}

// ---- on a tape ----

namespace {

struct Kept {
  float temperature;
  bool scale_by_t2;
  bool top;
};

void kl_divergence_pullback(Pullback& pullback) {
  // student, norm, weight, scale, then the teacher's logits, or values and indices
  const Saved& saved = pullback.saved();
  const Kept& kept = saved.args<Kept>();
  const KlDivergenceParts parts{{}, saved[1], {saved[2], {}, saved[3]}};
  const KlTeacher teacher = kept.top ? KlTeacher(saved[4], saved[5]) : KlTeacher(saved[4]);
  KlDivergenceOptions options;
  options.temperature = kept.temperature;
  options.scale_by_t2 = kept.scale_by_t2;
  pullback.give(0, kl_divergence_backward(pullback.encoder(), saved[0], teacher, parts,
                                          pullback.grad(), options));
}

}  // namespace

Tensor kl_divergence(Tape& tape, const Tensor& student, const KlTeacher& teacher,
                     const KlDivergenceOptions& options) {
  if (!tape.wants({student})) return kl_divergence(tape.encoder(), student, teacher, options);
  KlDivergenceParts parts = kl_divergence_parts(tape.encoder(), student, teacher, options);
  const Kept kept{options.temperature, options.scale_by_t2, is_top(teacher)};
  const LossRows& rows = parts.rows;
  tape.record(
      "kl_divergence", kl_divergence_pullback, {student}, {&parts.loss},
      kept.top
          ? Saved({student, parts.norm, rows.weight, rows.scale, teacher.values, teacher.indices},
                  kept)
          : Saved({student, parts.norm, rows.weight, rows.scale, teacher.logits}, kept));
  return parts.loss;
}

}  // namespace mlxtape::ops
