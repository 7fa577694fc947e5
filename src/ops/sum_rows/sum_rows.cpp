#include "mlxtape/ops/sum_rows.h"

#include <algorithm>
#include <string>

#include "mlxtape/ops/elementwise.h"
#include "mlxtape/ops/sort.h"
#include "sum_rows_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kPlaces("sum_rows_places");
constinit const KernelHandle kKeys("sum_rows_keys");
constinit const KernelHandle kForward("sum_rows_fwd");
constinit const KernelHandle kAdd("sum_rows_add");

constexpr std::int64_t kMost = INT32_MAX;

Error wrong(Errc code, const std::string& what) { return {code, "sum_rows: " + what}; }

// terms has n = its dimension `axis`.
Check check_terms(const Tensor& terms, std::int64_t axis, const Tensor& indices,
                  std::int64_t rows) {
  if (!is_kernel_float(terms.dtype())) {
    return wrong(Errc::kDType,
                 std::string("terms must be f32, f16 or bf16, got ") + name_of(terms.dtype()));
  }
  if (!is_integer(indices.dtype())) {
    return wrong(Errc::kDType,
                 std::string("indices must be integers, got ") + name_of(indices.dtype()));
  }
  if (!(indices.shape() == Shape{terms.dim(axis)})) {
    return wrong(Errc::kShape, "indices must be [n] = [" + std::to_string(terms.dim(axis)) +
                                   "], got " + to_string(indices.shape()));
  }
  if (rows < 0 || rows >= kMost || indices.size() >= kMost) {
    return wrong(Errc::kShape, "rows and indices must be fewer than 2^31 - 1, got " +
                                   std::to_string(rows) + " and " + std::to_string(indices.size()));
  }
  Shape y = terms.shape();
  y[axis] = rows;
  if (!element_count(y)) {
    return wrong(Errc::kShape,
                 "the elements of the result must fit in 63 bits, got " + to_string(y));
  }
  if (indices.backend() != terms.backend()) {
    return wrong(Errc::kDevice, std::string("indices must be where terms are, ") +
                                    name_of(terms.backend()) + ", got " +
                                    name_of(indices.backend()));
  }
  return std::nullopt;
}

// The places that indices name, sorted; with slots > 0 also which are different.
struct Sorted {
  Tensor keys, order, slots, ids;
};
Sorted sorted(CommandEncoder& encoder, const Tensor& indices, std::int64_t rows,
              std::int64_t slots) {
  const std::int64_t n = indices.size();
  const Tensor named = encoder.contiguous(indices), places = encoder.empty({n}, DType::kI32);
  encoder.dispatch(kPlaces, DType::kI32,
                   SumRowsPlacesArgs{n, rows, static_cast<std::int64_t>(indices.dtype())}, {named},
                   {places});
  Sorted s;
  s.order = argsort(encoder, places, 0);
  s.keys = encoder.empty({n}, DType::kI32);
  if (slots > 0) {
    s.slots = encoder.empty({n}, DType::kI32);
    s.ids = encoder.empty({slots}, DType::kI32);
  }
  encoder.dispatch(kKeys, DType::kI32, SumRowsKeysArgs{n, slots}, {places, s.order},
                   {s.keys, s.slots, s.ids});
  return s;
}

// y, which has zeros or what is added to.
void sum_into(CommandEncoder& encoder, const Tensor& terms, const Tensor& indices, const Tensor& y,
              bool adds) {
  if (y.size() == 0 || terms.size() == 0) return;
  const Tensor dense = encoder.contiguous(terms);
  const Sorted s = sorted(encoder, indices, y.dim(1), 0);
  const SumRowsArgs args{terms.dim(0), terms.dim(1), terms.dim(2), y.dim(1), 0, adds, 0};
  encoder.dispatch(kForward, terms.dtype(), args, {dense, s.keys, s.order, s.slots, s.ids}, {y});
}

std::int64_t width_of(const Tensor& rows) {
  std::int64_t width = 1;
  for (std::int64_t i = 1; i < rows.rank(); ++i) width *= rows.dim(i);
  return width;
}

}  // namespace

Check sum_rows_check(const Tensor& terms, const Tensor& indices, std::int64_t rows) {
  if (terms.rank() != 3) {
    return wrong(Errc::kShape, "terms must be [O, n, W], got " + to_string(terms.shape()));
  }
  return check_terms(terms, 1, indices, rows);
}

Check add_rows_check(const Tensor& x, const Tensor& indices, const Tensor& terms) {
  if (x.rank() != 3) {
    return wrong(Errc::kShape, "x must be [O, C, W], got " + to_string(x.shape()));
  }
  if (const Check check = sum_rows_check(terms, indices, x.dim(1))) return check;
  if (terms.dim(0) != x.dim(0) || terms.dim(2) != x.dim(2)) {
    return wrong(Errc::kShape, "terms must be [O, n, W] of x " + to_string(x.shape()) + ", got " +
                                   to_string(terms.shape()));
  }
  if (terms.dtype() != x.dtype()) {
    return wrong(Errc::kDType, std::string("terms must have the type of x, ") + name_of(x.dtype()) +
                                   ", got " + name_of(terms.dtype()));
  }
  if (terms.backend() != x.backend()) {
    return wrong(Errc::kDevice, std::string("terms must be where x is, ") + name_of(x.backend()) +
                                    ", got " + name_of(terms.backend()));
  }
  return std::nullopt;
}

Check row_grad_check(const Tensor& terms, const Tensor& indices, std::int64_t rows, DType type) {
  if (terms.rank() < 1) {
    return wrong(Errc::kShape, "terms must be [n, …], got " + to_string(terms.shape()));
  }
  if (!is_kernel_float(type)) {
    return wrong(Errc::kDType, std::string("rows must be f32, f16 or bf16, got ") + name_of(type));
  }
  return check_terms(terms, 0, indices, rows);
}

Check add_row_grad_check(const Tensor& dense, const RowGrad& rows) {
  if (dense.rank() < 1 || !dense.is_contiguous()) {
    return wrong(Errc::kShape,
                 "dense must be [C, …] and contiguous, got " + to_string(dense.shape()));
  }
  Shape shape = dense.shape();
  shape[0] = rows.ids.size();
  if (rows.ids.rank() != 1 || !(rows.rows.shape() == shape)) {
    return wrong(Errc::kShape,
                 "ids must be [n] and rows [n, …] as dense " + to_string(dense.shape()) + ", got " +
                     to_string(rows.ids.shape()) + " and " + to_string(rows.rows.shape()));
  }
  if (!is_kernel_float(dense.dtype()) || !is_kernel_float(rows.rows.dtype()) ||
      rows.ids.dtype() != DType::kI32) {
    return wrong(Errc::kDType, std::string("ids must be i32, the others f32, f16 or bf16, got ") +
                                   name_of(rows.ids.dtype()) + ", " + name_of(rows.rows.dtype()) +
                                   " and " + name_of(dense.dtype()));
  }
  if (rows.ids.backend() != dense.backend() || rows.rows.backend() != dense.backend()) {
    return wrong(Errc::kDevice, "ids and rows must be where dense is");
  }
  return std::nullopt;
}

Tensor sum_rows(CommandEncoder& encoder, const Tensor& terms, const Tensor& indices,
                std::int64_t rows) {
  require(sum_rows_check(terms, indices, rows));
  Tensor y = encoder.zeros({terms.dim(0), rows, terms.dim(2)}, terms.dtype());
  sum_into(encoder, terms, indices, y, false);
  return y;
}

Tensor add_rows(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                const Tensor& terms) {
  require(add_rows_check(x, indices, terms));
  Tensor y = encoder.empty(x.shape(), x.dtype());
  encoder.copy(x, y);
  sum_into(encoder, terms, indices, y, true);
  return y;
}

RowGrad row_grad(CommandEncoder& encoder, const Tensor& terms, const Tensor& indices,
                 std::int64_t rows, DType type) {
  require(row_grad_check(terms, indices, rows, type));
  const std::int64_t n = indices.size();
  const std::int64_t slots = std::min(n, rows);
  Shape shape = terms.shape();
  shape[0] = slots;
  RowGrad grad{encoder.empty({slots}, DType::kI32), encoder.empty(shape, type), add_row_grad,
               merge_row_grads};
  if (slots == 0) return grad;
  const Sorted s = sorted(encoder, indices, rows, slots);
  grad.ids = s.ids;
  if (grad.rows.size() == 0) return grad;
  // The kernel rounds to the type of terms or not at all; the third kind is rare.
  const bool f32_sums = type != terms.dtype();
  const Tensor sums =
      f32_sums && type != DType::kF32 ? encoder.empty(shape, DType::kF32) : grad.rows;
  const Tensor dense = encoder.contiguous(terms);
  const SumRowsArgs args{1, n, width_of(terms), slots, 1, 0, f32_sums};
  encoder.dispatch(kForward, terms.dtype(), args, {dense, s.keys, s.order, s.slots, s.ids}, {sums});
  if (sums.dtype() != type) grad.rows = cast(encoder, sums, type);
  return grad;
}

void add_row_grad(CommandEncoder& encoder, const Tensor& dense, const RowGrad& rows) {
  require(add_row_grad_check(dense, rows));
  if (dense.size() == 0 || rows.rows.size() == 0) return;
  const SumRowsAddArgs args{rows.ids.size(), width_of(rows.rows), dense.dim(0),
                            static_cast<std::int64_t>(rows.rows.dtype())};
  const Tensor ids = encoder.contiguous(rows.ids), terms = encoder.contiguous(rows.rows);
  encoder.dispatch(kAdd, dense.dtype(), args, {ids, terms}, {dense});
}

RowGrad merge_row_grads(CommandEncoder& encoder, const RowGrad& a, const RowGrad& b,
                        const Shape& shape, DType type) {
  require(add_row_grad_check(Tensor::meta(shape, type, a.rows.backend()), a));
  if (!b.rows.defined()) {
    RowGrad same = a;
    same.rows = cast(encoder, a.rows, type);
    return same;
  }
  require(add_row_grad_check(Tensor::meta(shape, type, a.rows.backend()), b));
  const std::int64_t first = a.ids.size(), n = first + b.ids.size();
  const Tensor ids = encoder.empty({n}, DType::kI32);
  Shape both = shape;
  both[0] = n;
  const DType common = promote(a.rows.dtype(), b.rows.dtype());
  const Tensor terms = encoder.empty(both, common);
  encoder.copy(a.ids, ids.slice(0, 0, first));
  encoder.copy(b.ids, ids.slice(0, first, n));
  encoder.copy(cast(encoder, a.rows, common), terms.slice(0, 0, first));
  encoder.copy(cast(encoder, b.rows, common), terms.slice(0, first, n));
  // Without a sign the -1 of what is not used is outside, and not the last row.
  return row_grad(encoder, terms, Tensor(ids.buffer(), DType::kU32, {n}), shape[0], type);
}

}  // namespace mlxtape::ops
