// What jobs that look at logits share: tokens on a device, and logits of some rows at a time.
#pragma once

#include "mlxtape/jobs/dataset.h"
#include "mlxtape/models/model.h"

namespace mlxtape::jobs {

// Throws kIo, beginning with who, for a token or a target that the model does not know: the tokenizer is another model's.
void check_batch(const char* who, const models::Model& model, const Batch& batch);
void check_prompt(const char* who, const models::Model& model,
                  const std::vector<std::int32_t>& tokens);
void check_targets(const char* who, const models::Model& model,  // -1: no target
                   const std::vector<std::int32_t>& targets);

Tensor upload_tokens(CommandEncoder& encoder, const Batch& batch);  // [rows, length]
Tensor upload_ints(CommandEncoder& encoder, const std::vector<std::int32_t>& ids);  // [n]

// What the head takes of a batch, [rows·length, width]; nothing is remembered.
Tensor hidden_rows(CommandEncoder& encoder, const models::Model& model, const Tensor& tokens);
// [n, width] → [n, vocabulary]
Tensor head_logits(CommandEncoder& encoder, const models::Model& model, const Tensor& rows);

// How many rows of logits may be there at a time; asked: what the caller says, 0 for nothing.
std::int64_t chunk_of(CommandEncoder& encoder, const models::Model& model, std::int64_t asked);

}  // namespace mlxtape::jobs
