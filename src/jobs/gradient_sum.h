// The sum of one trainable's gradients over the batches of a step.
#pragma once

#include "mlxtape/tape/rows.h"

namespace mlxtape::jobs {

// Dense, or rows where all of them were.
struct GradientSum {
  Tensor dense;
  RowGrad rows;

  bool is_rows() const { return rows.ids.defined(); }
  const Tensor& values() const { return is_rows() ? rows.rows : dense; }
  // shape: the trainable's.
  void add(CommandEncoder& encoder, const GradientSum& more, const Shape& shape);
};

}  // namespace mlxtape::jobs
