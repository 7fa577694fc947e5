// sum_rows: sums rows by index: turns the gradients of selected rows into a gradient of all rows.
//
// Formula    sum_rows   y[o,c,i] = Σ_j terms[o,j,i]·[p(j) = c], p as in mlxtape/ops/take.h; rows outside are dropped
//            add_rows   y = x + that
//            row_grad   only the rows c of y that some p names, and their ids: rows[u] = y[ids[u]]
//            add_row_grad      dense[ids[u]] += rows[u]
//            merge_row_grads   the row gradient of the sum of two
// Gradient   none of its own: scatter_add is add_rows on a tape
// Layout     terms: [O, n, W], indices: [n], x, y: [O, C, W]; contiguous or copied first. row_grad: terms: [n, …], m = min(n, C):
//            ids: [m] ascending, each once, then -1; rows: [m, …], zero where ids are -1. dense: contiguous.
// Types      terms, x, y: f32, f16, bf16; rows: any of them. indices: any integer type; ids: i32. Sums are f32, for equal
//            indices in the order of j, cut into runs of 32 by their rank among all; rounded once.
// Cost       sorts n indices; reads terms, writes y (zeros first) or rows once. Runs that are cut: 1/16 more.
//            Nothing of size C exists except y.
// Limits     C < 2³¹, n < 2³¹. The number of different rows is known on the device only.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/rows.h"

namespace mlxtape::ops {

Check sum_rows_check(const Tensor& terms, const Tensor& indices, std::int64_t rows);
Check add_rows_check(const Tensor& x, const Tensor& indices, const Tensor& terms);
Check row_grad_check(const Tensor& terms, const Tensor& indices, std::int64_t rows, DType type);
Check add_row_grad_check(const Tensor& dense, const RowGrad& rows);

// y [O, rows, W]
Tensor sum_rows(CommandEncoder& encoder, const Tensor& terms, const Tensor& indices,
                std::int64_t rows);
Tensor add_rows(CommandEncoder& encoder, const Tensor& x, const Tensor& indices,
                const Tensor& terms);

// For a tensor [rows, …], in type; to be passed to a tape.
RowGrad row_grad(CommandEncoder& encoder, const Tensor& terms, const Tensor& indices,
                 std::int64_t rows, DType type);
void add_row_grad(CommandEncoder& encoder, const Tensor& dense, const RowGrad& rows);
RowGrad merge_row_grads(CommandEncoder& encoder, const RowGrad& a, const RowGrad& b,
                        const Shape& shape, DType type);

}  // namespace mlxtape::ops
