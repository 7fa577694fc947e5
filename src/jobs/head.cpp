#include "head.h"

#include "mlxtape/nn/head_loss.h"

namespace mlxtape::jobs {

namespace {

// The least token that may be there: -1 is a target that does not count.
void check_tokens(const char* who, const char* what, const models::Model& model,
                  const std::vector<std::int32_t>& tokens, std::int32_t least) {
  for (const std::int32_t token : tokens) {
    if (token >= least && token < model.config.plan.vocabulary) continue;
    throw Error(Errc::kIo, std::string(who) + ": " + what + " must be in the vocabulary of " +
                               std::to_string(model.config.plan.vocabulary) + ", got " +
                               std::to_string(token) +
                               "; does the tokenizer belong to this model?");
  }
}

}  // namespace

void check_prompt(const char* who, const models::Model& model,
                  const std::vector<std::int32_t>& tokens) {
  check_tokens(who, "the prompt's tokens", model, tokens, 0);
}

void check_targets(const char* who, const models::Model& model,
                   const std::vector<std::int32_t>& targets) {
  check_tokens(who, "a target", model, targets, -1);
}

void check_batch(const char* who, const models::Model& model, const Batch& batch) {
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
  check_tokens(who, "a token", model, batch.tokens, 0);
  check_targets(who, model, batch.targets);
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
  return encoder.contiguous(h).reshape({tokens.size(), model.config.plan.width});
}

Tensor head_logits(CommandEncoder& encoder, const models::Model& model, const Tensor& rows) {
  Tape tape(encoder);
  return models::logits(tape, model, rows);
}

std::int64_t chunk_of(CommandEncoder& encoder, const models::Model& model, std::int64_t asked) {
  if (asked > 0) return asked;
  return nn::head_chunk_rows(encoder.device(), model.config.plan.vocabulary, model.dtype());
}

}  // namespace mlxtape::jobs
