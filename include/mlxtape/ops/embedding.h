// embedding: looks up rows of a table by ids, with a row-sparse gradient.
//
// Formula    y[j…, d…] = weight[ids[j…], d…]; ids as the indices of mlxtape/ops/take.h: negative ones count from the end; 0
//            if there is no such row
// Gradient   dweight[v] = Σ_j dy[j]·[ids[j] = v]. kRows: only the rows that ids name, as a RowGrad on the tape
//            (mlxtape/tape/rows.h, tape.row_grad); kDense: all of them.
// Layout     weight: [V, …]; ids: any shape; y: [ids, …]. Saved for backward: ids.
// Types      weight, y: any type; gradients f32, f16, bf16, summed in f32 and rounded once to the type that the gradient
//            is watched in. ids: any integer type.
// Cost       forward: reads and writes each row of y; backward, rows: reads dy, writes as many rows; dense: writes V rows
// Kernels    none of its own
// Limits     V and the number of ids below 2³¹ − 1 for a gradient. At most 8 axes in y.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

enum class EmbeddingGrad : std::uint8_t { kRows, kDense };

Check embedding_check(const Tensor& weight, const Tensor& ids);
Tensor embedding(CommandEncoder& encoder, const Tensor& weight, const Tensor& ids);
Tensor embedding(Tape& tape, const Tensor& weight, const Tensor& ids,
                 EmbeddingGrad grad = EmbeddingGrad::kRows);

// dweight as rows of this type, and dense.
RowGrad embedding_backward(CommandEncoder& encoder, const Tensor& dy, const Tensor& ids,
                           const Shape& weight_shape, DType type);
Tensor embedding_backward_dense(CommandEncoder& encoder, const Tensor& dy, const Tensor& ids,
                                const Shape& weight_shape);

}  // namespace mlxtape::ops
