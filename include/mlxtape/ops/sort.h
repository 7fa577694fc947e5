// sort: sorts all or the first elements along an axis, or returns their indices.
//
// Formula    argsort p: x[p_0] ≤ x[p_1] ≤ …; ties by index; −0 = +0; NaN after every number
//            argpartition q: a permutation with x[q_i] ≤ x[q_kth] ≤ x[q_j] for i ≤ kth ≤ j, NaN as above. Where
//            m = kth + 1 or m = n − kth is at most min(1024, n/4), those m are as in p at the beginning or
//            the end, and the others in the order of their indices; otherwise q = p
//            topk t: the first k of x[t_0] ≥ x[t_1] ≥ …; ties by index; NaN after every number
//            sort, partition, topk: x[p_j], x[q_j], x[t_j]
//            argmax, argmin: the first index of the largest, of the smallest; of NaN if there is one
// Gradient   dx[p_j] = dy_j, and 0 for elements that topk did not choose. Indices have none: nothing is recorded.
// Layout     x: any shape, sorted along axis (negative: from the end); without an axis x is flattened. kth may
//            also count from the end. Axes other than the last and strided inputs are copied first. Saved: the indices.
// Types      x: f32, f16, bf16, i32, u32. Indices are u32. Values are moved, never changed.
// Cost       sort: radix, a pass over the row for each 8 bits of the type, in cache up to 65,536 columns on a CPU
//            and in one block's memory up to 16,384 on CUDA. topk with k ≤ 1024 and partition at its ends:
//            reads the row once, on CUDA once and a sample of it, unless many elements are equal; a larger
//            k is a sort. argmax, argmin: read x once.
// Limits     rank ≥ 1 with an axis, of fewer than 2³² elements; any extent may be 0. 0 ≤ k ≤ n, −n ≤ kth < n.
//            argmax and argmin of nothing are errors.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/ops/take_along_axis.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// The contract as code: the first rule violated, or nothing. op: the function's name.
Check sort_check(const char* op, const Tensor& x, OptionalAxis axis);

Check partition_check(const char* op, const Tensor& x, std::int64_t kth, OptionalAxis axis);
Check topk_check(const Tensor& x, std::int64_t k, OptionalAxis axis);

Tensor argsort(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis = -1);
Tensor sort(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis = -1);
Tensor sort(Tape& tape, const Tensor& x, OptionalAxis axis = -1);

Tensor argpartition(CommandEncoder& encoder, const Tensor& x, std::int64_t kth,
                    OptionalAxis axis = -1);
Tensor partition(CommandEncoder& encoder, const Tensor& x, std::int64_t kth,
                 OptionalAxis axis = -1);
Tensor partition(Tape& tape, const Tensor& x, std::int64_t kth, OptionalAxis axis = -1);

struct TopK {
  Tensor values, indices;  // k along the axis
};
TopK topk(CommandEncoder& encoder, const Tensor& x, std::int64_t k, OptionalAxis axis = -1);
TopK topk(Tape& tape, const Tensor& x, std::int64_t k, OptionalAxis axis = -1);

// Without an axis: of all elements, as if x were flattened.
Check argmax_check(const char* op, const Tensor& x, OptionalAxis axis);
Tensor argmax(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis = std::nullopt,
              bool keepdims = false);
Tensor argmin(CommandEncoder& encoder, const Tensor& x, OptionalAxis axis = std::nullopt,
              bool keepdims = false);

}  // namespace mlxtape::ops
