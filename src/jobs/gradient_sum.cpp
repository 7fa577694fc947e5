#include "gradient_sum.h"

namespace mlxtape::jobs {

void GradientSum::add(CommandEncoder& encoder, const GradientSum& more, const Shape& shape) {
  if (is_rows() && more.is_rows()) {
    rows = rows.merge(encoder, rows, more.rows, shape, DType::kF32);
    return;
  }
  if (is_rows()) {
    dense = encoder.zeros(shape, DType::kF32);
    rows.add_to(encoder, dense, rows);
    rows = {};
  } else if (dense.buffer().owners() != 1) {  // two trainables may have had the same one
    const Tensor shared = dense;
    dense = encoder.empty_like(shared);
    encoder.copy(shared, dense);
  }
  if (more.is_rows()) {
    more.rows.add_to(encoder, dense, more.rows);
  } else {
    encoder.add_into(dense, more.dense);
  }
}

}  // namespace mlxtape::jobs
