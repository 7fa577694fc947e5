#include "head.h"

#include "mlxtape/nn/head_loss.h"

namespace mlxtape::jobs {

void check_batch(const char* who, const models::Model& model, const Batch& batch) {
  const auto fail = [&](const char* what, std::int32_t token) {
    throw Error(Errc::kArgument, std::string(who) + ": " + what + " must be in the vocabulary of " +
                                     std::to_string(model.config.vocabulary) + ", got " +
                                     std::to_string(token));
  };
  if (batch.rows < 1 || batch.length < 1 ||
      batch.tokens.size() != static_cast<std::size_t>(batch.rows * batch.length) ||
      batch.targets.size() != batch.tokens.size()) {
    throw Error(Errc::kArgument, std::string(who) +
                                     ": a batch must have a token and a target in each of its rows "
                                     "and columns, at least one of each, got " +
                                     std::to_string(batch.tokens.size()) + " and " +
                                     std::to_string(batch.targets.size()) + " in " +
                                     to_string(Shape{batch.rows, batch.length}));
  }
  for (const std::int32_t token : batch.tokens) {
    if (token < 0 || token >= model.config.vocabulary) fail("a token", token);
  }
  for (const std::int32_t token : batch.targets) {
    if (token < -1 || token >= model.config.vocabulary) fail("a target", token);
  }
}

Tensor upload_ints(CommandEncoder& encoder, const std::vector<std::int32_t>& ids) {
  const Tensor t = encoder.empty({static_cast<std::int64_t>(ids.size())}, DType::kI32);
  encoder.upload(ids.data(), t.bytes(), t);
  return t;
}

Tensor upload_tokens(CommandEncoder& encoder, const Batch& batch) {
  return upload_ints(encoder, batch.tokens).reshape({batch.rows, batch.length});
}

Tensor hidden_rows(CommandEncoder& encoder, const models::Model& model, const Tensor& tokens) {
  Tape tape(encoder);
  const Tensor h = models::hidden(tape, model, tokens);
  return encoder.contiguous(h).reshape({tokens.size(), model.config.width});
}

Tensor head_logits(CommandEncoder& encoder, const models::Model& model, const Tensor& rows) {
  Tape tape(encoder);
  return models::logits(tape, model, rows);
}

std::int64_t chunk_of(CommandEncoder& encoder, const models::Model& model, std::int64_t asked) {
  if (asked > 0) return asked;
  return nn::head_chunk_rows(encoder.backend(), model.config.vocabulary, model.dtype());
}

}  // namespace mlxtape::jobs
