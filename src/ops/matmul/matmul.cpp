#include "mlxtape/ops/matmul.h"

#include <algorithm>
#include <array>

#include "matmul_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("matmul_fwd");
constinit const KernelHandle kDz("matmul_dz_bwd");
constinit const KernelHandle kBias("matmul_bias_bwd");

static_assert(static_cast<std::int32_t>(Activation::kSilu) == kMatmulSilu);
static_assert(static_cast<std::int32_t>(Activation::kGelu) == kMatmulGelu);
static_assert(static_cast<std::int32_t>(Activation::kGeluTanh) == kMatmulGeluTanh);

Error wrong(Errc code, const std::string& what) { return {code, "matmul: " + what}; }

// ---- shapes ----

Tensor view(const Tensor& t, const Shape& shape, const Strides& strides) {
  return {t.buffer(), t.dtype(), shape, strides, t.offset()};
}

// With at least two axes: a vector on the left is a row, one on the right a column.
Shape as_matrices(const Shape& shape, bool left) {
  if (shape.rank() != 1) return shape;
  return left ? Shape{1, shape[0]} : Shape{shape[0], 1};
}
Tensor as_matrices(const Tensor& t, bool left) {
  if (t.rank() != 1) return t;
  const std::int64_t step = t.strides()[0];
  return view(t, as_matrices(t.shape(), left), left ? Strides{0, step} : Strides{step, 0});
}

Shape batch_of(const Shape& matrices) { return {matrices.begin(), matrices.end() - 2}; }
std::int64_t rows_of(const Shape& matrices) { return matrices[matrices.rank() - 2]; }

// [..., M, N] of two shapes that fit, both with two axes or more.
Shape product_shape(const Shape& a, const Shape& b) {
  Shape shape = *broadcast_shapes(batch_of(a), batch_of(b));
  shape.push_back(rows_of(a));
  shape.push_back(b.back());
  return shape;
}

// As the caller sees it: without the axes that vectors were given.
Shape result_shape(const Tensor& a, const Tensor& b) {
  const Shape whole = product_shape(as_matrices(a.shape(), true), as_matrices(b.shape(), false));
  Shape shape(whole.begin(), whole.end() - 2);
  if (a.rank() > 1) shape.push_back(rows_of(whole));
  if (b.rank() > 1) shape.push_back(whole.back());
  return shape;
}

// ---- checks ----

Check check_place(const char* name, const Tensor& t, const Tensor& a) {
  if (t.backend() == a.backend()) return std::nullopt;
  return wrong(Errc::kDevice, std::string(name) + " must be where a is (" + name_of(a.backend()) +
                                  "), got " + name_of(t.backend()));
}

Check check_operands(const Tensor& a, const Tensor& b) {
  if (a.rank() < 1 || b.rank() < 1) {
    return wrong(Errc::kShape, "a and b must have at least one axis, got " + to_string(a.shape()) +
                                   " and " + to_string(b.shape()));
  }
  const Shape left = as_matrices(a.shape(), true), right = as_matrices(b.shape(), false);
  if (left.back() != rows_of(right)) {
    return wrong(Errc::kShape, "the last axis of a must be as long as the last but one of b, got " +
                                   to_string(a.shape()) + " and " + to_string(b.shape()));
  }
  if (!broadcast_shapes(batch_of(left), batch_of(right))) {
    return wrong(Errc::kShape, "the batch axes must broadcast, got " + to_string(a.shape()) +
                                   " and " + to_string(b.shape()));
  }
  if (!is_kernel_float(a.dtype())) {
    return wrong(Errc::kDType,
                 std::string("a must be f32, f16 or bf16, got ") + name_of(a.dtype()));
  }
  if (b.dtype() != a.dtype()) {
    return wrong(Errc::kDType, std::string("a and b must have one type, cast one of them, got ") +
                                   name_of(a.dtype()) + " and " + name_of(b.dtype()));
  }
  return check_place("b", b, a);
}

// Of y, dy, z and out: the type of a, or f32.
Check check_out_type(const char* name, DType dtype, const Tensor& a) {
  if (dtype == a.dtype() || dtype == DType::kF32) return std::nullopt;
  return wrong(Errc::kDType, std::string(name) + " must have the type of a " + name_of(a.dtype()) +
                                 ", or f32, got " + name_of(dtype));
}

Check check_like(const char* name, const Tensor& t, const Shape& shape, DType dtype,
                 const Tensor& a) {
  if (!(t.shape() == shape)) {
    return wrong(Errc::kShape, std::string(name) + " must have the shape of the result " +
                                   to_string(shape) + ", got " + to_string(t.shape()));
  }
  if (t.dtype() != dtype) {
    return wrong(Errc::kDType, std::string(name) + " must have the type of the result " +
                                   name_of(dtype) + ", got " + name_of(t.dtype()));
  }
  return check_place(name, t, a);
}

// ---- one product ----

// Where the elements of a matrix are; false where they must be copied first.
struct Steps {
  std::int64_t row = 1, col = 1;
};
bool find_steps(const Tensor& t, Steps& steps) {
  const std::int64_t rows = rows_of(t.shape()), cols = t.shape().back();
  steps = {t.strides()[t.rank() - 2], t.strides().back()};
  if (cols <= 1) steps.col = 1;
  if (rows <= 1) steps.row = steps.col == 1 ? std::max<std::int64_t>(cols, 1) : 1;
  return (steps.col == 1 && steps.row >= cols) || (steps.row == 1 && steps.col >= rows);
}

// t, or a copy of it, whose matrices have a stride of 1.
Tensor usable(CommandEncoder& encoder, const Tensor& t, Steps& steps) {
  if (t.size() == 0 || find_steps(t, steps)) return t;
  Tensor copy = encoder.contiguous(t);
  find_steps(copy, steps);
  return copy;
}

// Strides of a tensor's batch axes as those of the whole batch: 0 where it is stretched.
Strides batch_strides(const Tensor& t, const Shape& batch) {
  Strides strides;
  const std::int64_t missing = batch.rank() - (t.rank() - 2);
  for (std::int64_t i = 0; i < batch.rank(); ++i) {
    const bool stretched = i < missing || t.dim(i - missing) == 1;
    strides.push_back(stretched ? 0 : t.strides()[i - missing]);
  }
  return strides;
}

// Batch axes that can be one are; those that b does not have become rows of a where these follow each
// other: a linear layer is one product, however many axes its input has.
void join_axes(MatmulArgs& args, const Shape& batch, const Strides& a, const Strides& b) {
  bool folding = true;
  std::int64_t count = 0;  // innermost first
  for (std::int64_t i = batch.rank() - 1; i >= 0; --i) {
    const std::int64_t n = batch[i];
    if (n == 1) continue;
    const bool follows = args.m == 1 ? a[i] >= args.k : a[i] == args.m * args.a_row;
    if (folding && b[i] == 0 && args.a_col == 1 && follows) {
      if (args.m == 1) args.a_row = a[i];
      args.m *= n;
      continue;
    }
    folding = false;
    if (count > 0) {
      const std::int64_t last = count - 1;
      if (a[i] == args.a_batch[last] * args.batch[last] &&
          b[i] == args.b_batch[last] * args.batch[last]) {
        args.batch[last] *= n;
        continue;
      }
    }
    args.batch[count] = n;
    args.a_batch[count] = a[i];
    args.b_batch[count] = b[i];
    ++count;
  }
  args.batch_axes = count;
  std::reverse(args.batch, args.batch + count);
  std::reverse(args.a_batch, args.a_batch + count);
  std::reverse(args.b_batch, args.b_batch + count);
}

struct Extras {
  Tensor bias, residual, z;  // defined or not
  Activation activation = Activation::kNone;
  float beta = 0;
};

// y, contiguous, of the product's shape; a and b have two axes or more.
void product(CommandEncoder& encoder, const Tensor& a, const Tensor& b, const Tensor& y,
             const Extras& extras = {}) {
  if (y.size() == 0) return;
  Steps a_steps, b_steps;
  const Tensor left = usable(encoder, a, a_steps), right = usable(encoder, b, b_steps);
  MatmulArgs args{};
  args.m = rows_of(a.shape());
  args.n = b.shape().back();
  args.k = a.shape().back();
  args.a_row = a_steps.row, args.a_col = a_steps.col;
  args.b_row = b_steps.row, args.b_col = b_steps.col;
  const Shape batch = *broadcast_shapes(batch_of(a.shape()), batch_of(b.shape()));
  join_axes(args, batch, batch_strides(left, batch), batch_strides(right, batch));
  args.beta = extras.beta;
  args.activation = static_cast<std::int32_t>(extras.activation);
  args.wide = y.dtype() != a.dtype() ? 1 : 0;
  args.has = (extras.bias.defined() ? kMatmulHasBias : 0) |
             (extras.residual.defined() ? kMatmulHasResidual : 0) |
             (extras.z.defined() ? kMatmulHasZ : 0);
  encoder.dispatch(kForward, a.dtype(), args, {left, right, extras.bias, extras.residual},
                   {y, extras.z});
}

MatmulWithZ run(CommandEncoder& encoder, const Tensor& a, const Tensor& b,
                const MatmulOptions& options, bool keep_z) {
  require(matmul_check(a, b, options));
  const DType dtype = options.out_dtype.value_or(a.dtype());
  const Shape shape = result_shape(a, b);
  Extras extras;
  if (options.bias.defined()) extras.bias = encoder.contiguous(options.bias);
  if (options.residual.defined()) extras.residual = encoder.contiguous(options.residual);
  if (keep_z && options.activation != Activation::kNone) extras.z = encoder.empty(shape, dtype);
  extras.activation = options.activation;
  const Tensor y = encoder.empty(shape, dtype);
  product(encoder, as_matrices(a, true), as_matrices(b, false), y, extras);
  return {y, extras.z};
}

// ---- gradients ----

// The axes of t [batch..., rows, cols], whose batch axes count those of the product, in an order: first the
// batch axes that are not summed over, then rows or nothing, then those that are, then what is left.
Tensor with_sums_inside(CommandEncoder& encoder, const Tensor& t, const Shape& batch,
                        const std::array<bool, kMaxRank>& summed, bool rows_first) {
  const std::int64_t missing = batch.rank() - (t.rank() - 2);
  Shape shape;
  Strides strides;
  const auto add = [&](std::int64_t axis) {
    shape.push_back(t.dim(axis));
    strides.push_back(t.strides()[axis]);
  };
  const auto add_batch = [&](bool sums) {
    for (std::int64_t i = missing; i < batch.rank(); ++i) {
      if (summed[static_cast<std::size_t>(i)] == sums) add(i - missing);
    }
  };
  add_batch(false);
  Shape joined = shape;
  if (rows_first) add(t.rank() - 2);
  std::int64_t inside = 1;
  for (std::int64_t i = missing; i < batch.rank(); ++i) {
    if (summed[static_cast<std::size_t>(i)]) inside *= t.dim(i - missing);
  }
  add_batch(true);
  if (!rows_first) add(t.rank() - 2);
  add(t.rank() - 1);
  const std::int64_t rows = t.dim(t.rank() - 2), cols = t.dim(t.rank() - 1);
  joined.push_back(rows_first ? rows : inside * rows);
  joined.push_back(rows_first ? inside * cols : cols);
  return encoder.contiguous(view(t, shape, strides)).reshape(joined);
}

Tensor turned(const Tensor& t) {
  Shape shape = t.shape();
  Strides strides = t.strides();
  std::swap(shape[t.rank() - 2], shape[t.rank() - 1]);
  std::swap(strides[t.rank() - 2], strides[t.rank() - 1]);
  return view(t, shape, strides);
}

// Batch axes of the product along which t was stretched.
bool find_stretched(const Tensor& t, const Shape& batch, std::array<bool, kMaxRank>& stretched) {
  bool any = false;
  const std::int64_t missing = batch.rank() - (t.rank() - 2);
  for (std::int64_t i = 0; i < batch.rank(); ++i) {
    const bool is = batch[i] != 1 && (i < missing || t.dim(i - missing) == 1);
    stretched[static_cast<std::size_t>(i)] = is;
    any |= is;
  }
  return any;
}

// Where the batch was stretched, the sum over it is part of the product's own.
Tensor gradient_a(CommandEncoder& encoder, const Tensor& a, const Tensor& b, const Tensor& dz) {
  const Shape batch = batch_of(dz.shape());
  std::array<bool, kMaxRank> summed{};
  const Tensor da = encoder.empty_like(a);
  if (find_stretched(a, batch, summed)) {  // Σ over [S, N]
    product(encoder, with_sums_inside(encoder, dz, batch, summed, true),
            with_sums_inside(encoder, turned(b), batch, summed, false), da);
  } else {
    product(encoder, dz, turned(b), da);
  }
  return da;
}

Tensor gradient_b(CommandEncoder& encoder, const Tensor& a, const Tensor& b, const Tensor& dz) {
  const Shape batch = batch_of(dz.shape());
  std::array<bool, kMaxRank> summed{};
  const Tensor db = encoder.empty_like(b);
  if (find_stretched(b, batch, summed)) {  // Σ over [S, M]
    product(encoder, turned(with_sums_inside(encoder, a, batch, summed, false)),
            with_sums_inside(encoder, dz, batch, summed, false), db);
  } else {
    product(encoder, turned(a), dz, db);
  }
  return db;
}

void matmul_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();
  const MatmulWanted wanted{pullback.needs(0), pullback.needs(1), pullback.needs(2)};
  const MatmulGrads grads = matmul_backward(pullback.encoder(), saved[0], saved[1], saved[2],
                                            pullback.grad(), saved.args<Activation>(), wanted);
  if (wanted.da) pullback.give(0, grads.da);
  if (wanted.db) pullback.give(1, grads.db);
  if (wanted.dbias) pullback.give(2, grads.dbias);
  if (pullback.needs(3)) pullback.give(3, pullback.grad());
}

}  // namespace

Check matmul_check(const Tensor& a, const Tensor& b, const MatmulOptions& options) {
  if (const Check check = check_operands(a, b)) return check;
  const DType dtype = options.out_dtype.value_or(a.dtype());
  if (const Check check = check_out_type("out_dtype", dtype, a)) return check;
  if (options.bias.defined()) {
    const Tensor& bias = options.bias;
    const std::int64_t n = as_matrices(b.shape(), false).back();
    if (!(bias.shape() == Shape{n})) {
      return wrong(Errc::kShape, "bias must be [N] = [" + std::to_string(n) + "], got " +
                                     to_string(bias.shape()));
    }
    if (bias.dtype() != a.dtype()) {
      return wrong(Errc::kDType, std::string("bias must have the type of a ") + name_of(a.dtype()) +
                                     ", got " + name_of(bias.dtype()));
    }
    if (const Check check = check_place("bias", bias, a)) return check;
  }
  if (!options.residual.defined()) return std::nullopt;
  return check_like("residual", options.residual, result_shape(a, b), dtype, a);
}

Check matmul_into_check(const Tensor& a, const Tensor& b, const Tensor& out) {
  if (const Check check = check_operands(a, b)) return check;
  if (const Check check = check_out_type("out", out.dtype(), a)) return check;
  if (!out.is_contiguous()) {
    return wrong(Errc::kShape, "out must be contiguous, got strides " + to_string(out.strides()));
  }
  return check_like("out", out, result_shape(a, b), out.dtype(), a);
}

Check matmul_backward_check(const Tensor& a, const Tensor& b, const Tensor& z, const Tensor& dy,
                            Activation activation) {
  if (const Check check = check_operands(a, b)) return check;
  if (const Check check = check_out_type("dy", dy.dtype(), a)) return check;
  const Shape shape = result_shape(a, b);
  if (const Check check = check_like("dy", dy, shape, dy.dtype(), a)) return check;
  if (activation == Activation::kNone) return std::nullopt;
  if (!z.defined()) return wrong(Errc::kArgument, "an activation's gradient needs z, got none");
  return check_like("z", z, shape, dy.dtype(), a);
}

Tensor matmul(CommandEncoder& encoder, const Tensor& a, const Tensor& b,
              const MatmulOptions& options) {
  return run(encoder, a, b, options, false).y;
}

MatmulWithZ matmul_with_z(CommandEncoder& encoder, const Tensor& a, const Tensor& b,
                          const MatmulOptions& options) {
  return run(encoder, a, b, options, true);
}

Tensor matmul(Tape& tape, const Tensor& a, const Tensor& b, const MatmulOptions& options) {
  const Tensor &bias = options.bias, &residual = options.residual;
  if (!tape.wants({a, b, bias, residual})) return matmul(tape.encoder(), a, b, options);
  MatmulWithZ out = matmul_with_z(tape.encoder(), a, b, options);
  tape.record("matmul", matmul_pullback, {a, b, bias, residual}, {&out.y},
              Saved({a, b, out.z}, options.activation));
  return out.y;
}

void matmul_into(CommandEncoder& encoder, const Tensor& a, const Tensor& b, const Tensor& out,
                 float beta) {
  require(matmul_into_check(a, b, out));
  Extras extras;
  extras.beta = beta;
  product(encoder, as_matrices(a, true), as_matrices(b, false), out, extras);
}

MatmulGrads matmul_backward(CommandEncoder& encoder, const Tensor& a, const Tensor& b,
                            const Tensor& z, const Tensor& dy, Activation activation,
                            MatmulWanted wanted) {
  require(matmul_backward_check(a, b, z, dy, activation));
  MatmulGrads grads;
  if (!wanted.da && !wanted.db && !wanted.dbias) return grads;
  Tensor dz = encoder.contiguous(dy);
  if (activation != Activation::kNone || dy.dtype() != a.dtype()) {
    const Tensor dy_rows = dz;
    dz = encoder.empty(dy.shape(), a.dtype());
    const Tensor z_rows = activation != Activation::kNone ? encoder.contiguous(z) : Tensor();
    const MatmulDzArgs args{dz.size(), static_cast<std::int32_t>(activation),
                            dy.dtype() != a.dtype() ? 1 : 0};
    if (dz.size() != 0) encoder.dispatch(kDz, a.dtype(), args, {dy_rows, z_rows}, {dz});
  }
  const Tensor left = as_matrices(a, true), right = as_matrices(b, false);
  dz = dz.reshape(product_shape(left.shape(), right.shape()));
  if (wanted.da) grads.da = gradient_a(encoder, left, right, dz).reshape(a.shape());
  if (wanted.db) grads.db = gradient_b(encoder, left, right, dz).reshape(b.shape());
  if (wanted.dbias) {
    const std::int64_t n = dz.shape().back();
    grads.dbias = encoder.empty({n}, a.dtype());
    const MatmulBiasArgs args{n == 0 ? 0 : dz.size() / n, n};
    if (n != 0) encoder.dispatch(kBias, a.dtype(), args, {dz}, {grads.dbias});
  }
  return grads;
}

}  // namespace mlxtape::ops
