#include "mlxtape/ops/elementwise.h"

#include <array>
#include <cmath>
#include <string>

#include "elementwise_args.h"
#include "elementwise_run.h"
#include "mlxtape/core/reuse.h"

namespace mlxtape::ops {

#include "ops/elementwise/formulas.h"  // the tables' names

using elementwise::Operand;
using elementwise::run_into;

namespace elementwise {

namespace {

// Axes of length 1 are dropped, and an axis joins the one before it where every operand steps from the
// end of one row to the next as it does inside it.
ElementwiseArgs args_of(const Shape& shape, std::initializer_list<Operand> operands) {
  ElementwiseArgs args{};
  args.size = 1;
  std::array<Strides, 4> strides;
  std::size_t k = 0;
  for (const Operand& o : operands) {
    if (o.tensor == nullptr) {
      args.numbers |= std::int64_t{1} << k;
      args.value[k] = o.value;
      for (std::int64_t i = 0; i < shape.rank(); ++i) strides[k].push_back(0);
    } else {
      strides[k] = o.tensor->broadcast_to(shape).strides();
    }
    ++k;
  }
  for (std::int64_t i = 0; i < shape.rank(); ++i) {
    args.size *= shape[i];
    if (shape[i] == 1) continue;
    bool joins = args.rank > 0;
    for (std::size_t o = 0; o < k && joins; ++o) {
      joins = args.strides[o][args.rank - 1] == strides[o][i] * shape[i];
    }
    if (!joins) args.shape[args.rank++] = 1;
    args.shape[args.rank - 1] *= shape[i];
    for (std::size_t o = 0; o < k; ++o) args.strides[o][args.rank - 1] = strides[o][i];
  }
  if (args.rank == 0) {  // one element
    args.rank = args.shape[0] = 1;
    for (std::size_t o = 0; o < k; ++o) args.strides[o][0] = (args.numbers >> o & 1) != 0 ? 0 : 1;
  }
  return args;
}

}  // namespace

void run(CommandEncoder& encoder, const KernelHandle& handle, DType dtype, const Shape& shape,
         std::initializer_list<Operand> operands, std::initializer_list<TensorRef> out) {
  const ElementwiseArgs args = args_of(shape, operands);
  if (args.size == 0) return;
  std::array<const Tensor*, 4> t{};
  std::size_t count = 0;
  for (const Operand& o : operands) {
    if (o.tensor != nullptr) t[count++] = o.tensor;
  }
  switch (count) {
    case 1: return encoder.dispatch(handle, dtype, args, {*t[0]}, out);
    case 2: return encoder.dispatch(handle, dtype, args, {*t[0], *t[1]}, out);
    case 3: return encoder.dispatch(handle, dtype, args, {*t[0], *t[1], *t[2]}, out);
    default: return encoder.dispatch(handle, dtype, args, {*t[0], *t[1], *t[2], *t[3]}, out);
  }
}

Tensor run_into(CommandEncoder& encoder, const KernelHandle& handle, DType dtype,
                const Shape& shape, std::initializer_list<Operand> operands,
                const Tensor& candidate) {
  const Tensor y = reuse_or_empty(encoder, candidate, shape, dtype);
  run(encoder, handle, dtype, shape, operands, {y});
  return y;
}

}  // namespace elementwise

namespace {

Error wrong(const char* op, Errc code, const std::string& what) {
  return {code, std::string(op) + ": " + what};
}

bool is_arithmetic(DType t) {
  return is_kernel_float(t) || t == DType::kBool || t == DType::kI32 || t == DType::kU32 ||
         t == DType::kI64;
}

bool takes_integers(std::string_view op) {
  return op != "divide" && op != "power" && op != "swiglu";
}

Check together_check(const char* op, const Tensor& a, const Tensor& b) {
  if (!broadcast_shapes(a.shape(), b.shape())) {
    return wrong(
        op, Errc::kShape,
        "a and b must broadcast, got " + to_string(a.shape()) + " and " + to_string(b.shape()));
  }
  if (a.backend() != b.backend()) {
    return wrong(op, Errc::kDevice,
                 std::string("b must be where a is (") + name_of(a.backend()) + "), got " +
                     name_of(b.backend()));
  }
  return std::nullopt;
}

Check type_check(const char* op, const std::string& what, DType t) {
  if (takes_integers(op) ? is_arithmetic(t) : is_kernel_float(t)) return std::nullopt;
  const char* allowed =
      takes_integers(op) ? "f32, f16, bf16, bool, i32, u32 or i64, got " : "f32, f16 or bf16, got ";
  return wrong(op, Errc::kDType, what + " must be " + allowed + name_of(t));
}

}  // namespace

Check unary_check(const char* op, const Tensor& x) {
  if (!is_kernel_float(x.dtype())) {
    return wrong(op, Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  return std::nullopt;
}

Check binary_check(const char* op, const Tensor& a, const Tensor& b) {
  if (const Check check = together_check(op, a, b)) return check;
  return type_check(op, "the type of a and b together", promote(a.dtype(), b.dtype()));
}

Check number_check(const char* op, const Tensor& x, double number) {
  if (const Check check = type_check(op, "the tensor", x.dtype())) return check;
  if (is_float(x.dtype())) return std::nullopt;
  double stored = 0;
  visit(x.dtype(), [&](auto zero) {
    convert(&number, DType::kF64, &zero, x.dtype(), 1);
    convert(&zero, x.dtype(), &stored, DType::kF64, 1);
  });
  // Just past the largest integer the nearest double is the same as theirs.
  const double past = x.dtype() == DType::kI64 ? 0x1p63 : 0x1p64;
  if (stored != number || number >= past) {
    return wrong(op, Errc::kArgument,
                 std::string("the number must be one that ") + name_of(x.dtype()) + " has, got " +
                     std::to_string(number));
  }
  return std::nullopt;
}

Check logical_check(const char* op, const Tensor& a, const Tensor& b) {
  return together_check(op, a, b);
}

Check where_check(const Tensor& condition, const Tensor& a, const Tensor& b) {
  if (const Check check = together_check("where", a, b)) return check;
  const Shape both = *broadcast_shapes(a.shape(), b.shape());
  if (!broadcast_shapes(condition.shape(), both)) {
    return wrong("where", Errc::kShape,
                 "condition must broadcast with " + to_string(both) + ", got " +
                     to_string(condition.shape()));
  }
  if (condition.backend() != a.backend()) {
    return wrong("where", Errc::kDevice,
                 std::string("condition must be where a is (") + name_of(a.backend()) + "), got " +
                     name_of(condition.backend()));
  }
  return std::nullopt;
}

namespace {

constinit const std::array<KernelHandle, kDTypeCount> kCast{
    KernelHandle("cast_bool"), KernelHandle("cast_u8"),   KernelHandle("cast_u16"),
    KernelHandle("cast_u32"),  KernelHandle("cast_u64"),  KernelHandle("cast_i8"),
    KernelHandle("cast_i16"),  KernelHandle("cast_i32"),  KernelHandle("cast_i64"),
    KernelHandle("cast_f16"),  KernelHandle("cast_bf16"), KernelHandle("cast_f32"),
    KernelHandle("cast_f64")};
constinit const KernelHandle kClip("clip_fwd");
constinit const KernelHandle kSwiglu("swiglu_fwd");
constinit const KernelHandle kAnd("logical_and_fwd");
constinit const KernelHandle kOr("logical_or_fwd");
constinit const KernelHandle kNot("logical_not_fwd");
constinit const KernelHandle kWhere("where_fwd");

double rounded_to(DType dtype, double number) {
  double result = 0;
  visit(dtype, [&](auto zero) {
    convert(&number, DType::kF64, &zero, dtype, 1);
    convert(&zero, dtype, &result, DType::kF64, 1);
  });
  return result;
}

// What is given away by value may have its memory used for the result, where nobody else has a share.
// NOLINTBEGIN(performance-unnecessary-value-param)
Tensor unary(CommandEncoder& encoder, const KernelHandle& handle, const char* op, Tensor x) {
  require(unary_check(op, x));
  return run_into(encoder, handle, x.dtype(), x.shape(), {x}, x);
}

// Moves a to the kernel: it may have the result, b where a does not fit.
Tensor binary(CommandEncoder& encoder, const KernelHandle& handle, const char* op, Tensor a,
              const Tensor& b) {
  require(binary_check(op, a, b));
  const DType dtype = promote(a.dtype(), b.dtype());
  const Shape shape = *broadcast_shapes(a.shape(), b.shape());
  a = cast(encoder, std::move(a), dtype);
  const Tensor other = cast(encoder, b, dtype);
  return run_into(encoder, handle, dtype, shape, {a, other}, a);
}
Tensor binary(CommandEncoder& encoder, const KernelHandle& handle, const char* op, Tensor a,
              double b) {
  require(number_check(op, a, b));
  return run_into(encoder, handle, a.dtype(), a.shape(), {a, rounded_to(a.dtype(), b)}, a);
}
Tensor binary(CommandEncoder& encoder, const KernelHandle& handle, const char* op, double a,
              Tensor b) {
  require(number_check(op, b, a));
  return run_into(encoder, handle, b.dtype(), b.shape(), {rounded_to(b.dtype(), a), b}, b);
}
// NOLINTEND(performance-unnecessary-value-param)

Tensor compare(CommandEncoder& encoder, const KernelHandle& handle, const char* op, const Tensor& a,
               const Tensor& b) {
  require(binary_check(op, a, b));
  const DType dtype = promote(a.dtype(), b.dtype());
  const Shape shape = *broadcast_shapes(a.shape(), b.shape());
  const Tensor y = encoder.empty(shape, DType::kBool);
  const Tensor left = cast(encoder, a, dtype);
  const Tensor right = cast(encoder, b, dtype);
  elementwise::run(encoder, handle, dtype, shape, {left, right}, {y});
  return y;
}

Tensor logical(CommandEncoder& encoder, const KernelHandle& handle, const char* op, Tensor a,
               const Tensor& b) {
  require(logical_check(op, a, b));
  const Shape shape = *broadcast_shapes(a.shape(), b.shape());
  a = cast(encoder, std::move(a), DType::kBool);
  const Tensor other = cast(encoder, b, DType::kBool);
  return run_into(encoder, handle, DType::kBool, shape, {a, other}, a);
}

DType unsigned_of_size(std::size_t bytes) {
  switch (bytes) {
    case 1: return DType::kU8;
    case 2: return DType::kU16;
    case 4: return DType::kU32;
    default: return DType::kU64;
  }
}

}  // namespace

#define MT_DEFINE(name, keeps, value, pull)                     \
  Tensor name(CommandEncoder& encoder, Tensor x) {              \
    static constinit const KernelHandle kForward(#name "_fwd"); \
    return unary(encoder, kForward, #name, std::move(x));       \
  }
MT_UNARY_FORMULAS(MT_DEFINE)
#undef MT_DEFINE

#define MT_DEFINE(name, ...)                                        \
  static constinit const KernelHandle k_##name(#name "_fwd");       \
  Tensor name(CommandEncoder& encoder, Tensor a, const Tensor& b) { \
    return binary(encoder, k_##name, #name, std::move(a), b);       \
  }                                                                 \
  Tensor name(CommandEncoder& encoder, Tensor a, double b) {        \
    return binary(encoder, k_##name, #name, std::move(a), b);       \
  }                                                                 \
  Tensor name(CommandEncoder& encoder, double a, Tensor b) {        \
    return binary(encoder, k_##name, #name, a, std::move(b));       \
  }
MT_PLAIN_FORMULAS(MT_DEFINE)
MT_BINARY_FORMULAS(MT_DEFINE)
#undef MT_DEFINE

#define MT_DEFINE(name, truth)                                             \
  Tensor name(CommandEncoder& encoder, const Tensor& a, const Tensor& b) { \
    static constinit const KernelHandle kForward(#name "_fwd");            \
    return compare(encoder, kForward, #name, a, b);                        \
  }
MT_COMPARE_FORMULAS(MT_DEFINE)
#undef MT_DEFINE

Tensor clip(CommandEncoder& encoder, Tensor x,  // NOLINT(performance-unnecessary-value-param)
            double low, double high) {
  require(unary_check("clip", x));
  const DType dtype = x.dtype();
  return run_into(encoder, kClip, dtype, x.shape(),
                  {x, rounded_to(dtype, low), rounded_to(dtype, high)}, x);
}

Tensor cast(CommandEncoder& encoder, Tensor x, DType dtype) {
  if (x.dtype() == dtype) return x;
  const Tensor from = encoder.contiguous(x);
  Tensor y = encoder.empty(x.shape(), dtype);
  if (y.size() != 0) {
    encoder.dispatch(kCast[static_cast<std::size_t>(x.dtype())], dtype, CastArgs{y.size()}, {from},
                     {y});
  }
  return y;
}

Tensor swiglu(CommandEncoder& encoder, Tensor a, const Tensor& b) {
  return binary(encoder, kSwiglu, "swiglu", std::move(a), b);
}

Tensor logical_and(CommandEncoder& encoder, Tensor a, const Tensor& b) {
  return logical(encoder, kAnd, "logical_and", std::move(a), b);
}
Tensor logical_or(CommandEncoder& encoder, Tensor a, const Tensor& b) {
  return logical(encoder, kOr, "logical_or", std::move(a), b);
}
Tensor logical_not(CommandEncoder& encoder, Tensor a) {
  a = cast(encoder, std::move(a), DType::kBool);
  return run_into(encoder, kNot, DType::kBool, a.shape(), {a}, a);
}

Tensor where(CommandEncoder& encoder, const Tensor& condition, Tensor a, const Tensor& b) {
  require(where_check(condition, a, b));
  const DType dtype = promote(a.dtype(), b.dtype());
  const Shape shape = *broadcast_shapes(condition.shape(), *broadcast_shapes(a.shape(), b.shape()));
  const Tensor chosen = cast(encoder, condition, DType::kBool);
  a = cast(encoder, std::move(a), dtype);
  const Tensor other = cast(encoder, b, dtype);
  const Tensor y = reuse_or_empty(encoder, a, shape, dtype);
  elementwise::run(encoder, kWhere, unsigned_of_size(size_of(dtype)), shape, {chosen, a, other},
                   {y});
  return y;
}

}  // namespace mlxtape::ops
