#include "mlxtape/ops/embedding.h"

#include <string>

#include "mlxtape/ops/sum_rows.h"
#include "mlxtape/ops/take.h"

namespace mlxtape::ops {

namespace {

Error wrong(Errc code, const std::string& what) { return {code, "embedding: " + what}; }

struct Kept {
  Shape weight_shape;
};

void rows_pullback(Pullback& pullback) {
  pullback.give_rows(
      0, embedding_backward(pullback.encoder(), pullback.grad(), pullback.saved()[0],
                            pullback.saved().args<Kept>().weight_shape, pullback.sum_type(0)));
}

void dense_pullback(Pullback& pullback) {
  CommandEncoder& encoder = pullback.encoder();
  const Shape& shape = pullback.saved().args<Kept>().weight_shape;
  if (const DType sum = pullback.sum_type(0); sum != pullback.grad().dtype()) {  // rounded once
    const RowGrad rows =
        embedding_backward(encoder, pullback.grad(), pullback.saved()[0], shape, sum);
    const Tensor dense = encoder.zeros(shape, sum);
    rows.add_to(encoder, dense, rows);
    return pullback.give(0, dense);
  }
  pullback.give(0, embedding_backward_dense(encoder, pullback.grad(), pullback.saved()[0], shape));
}

}  // namespace

Check embedding_check(const Tensor& weight, const Tensor& ids) {
  if (weight.rank() < 1) {
    return wrong(Errc::kShape, "weight must be [V, …], got " + to_string(weight.shape()));
  }
  return take_check(weight, ids, 0);
}

Tensor embedding(CommandEncoder& encoder, const Tensor& weight, const Tensor& ids) {
  require(embedding_check(weight, ids));
  return take(encoder, weight, ids, 0);
}

RowGrad embedding_backward(CommandEncoder& encoder, const Tensor& dy, const Tensor& ids,
                           const Shape& weight_shape, DType type) {
  require(take_backward_check(dy, ids, weight_shape, 0));
  Shape rows = weight_shape;
  rows[0] = ids.size();
  return row_grad(encoder, encoder.contiguous(dy).reshape(rows),
                  encoder.contiguous(ids).reshape({ids.size()}), weight_shape[0], type);
}

Tensor embedding_backward_dense(CommandEncoder& encoder, const Tensor& dy, const Tensor& ids,
                                const Shape& weight_shape) {
  return take_backward(encoder, dy, ids, weight_shape, 0);
}

Tensor embedding(Tape& tape, const Tensor& weight, const Tensor& ids, EmbeddingGrad grad) {
  Tensor y = embedding(tape.encoder(), weight, ids);
  if (tape.wants({weight})) {
    tape.record("embedding", grad == EmbeddingGrad::kRows ? rows_pullback : dense_pullback,
                {weight}, {&y}, Saved({ids}, Kept{weight.shape()}));
  }
  return y;
}

}  // namespace mlxtape::ops
