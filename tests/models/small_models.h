// Small models with random weights, of every kind.
#pragma once

#include <string>
#include <vector>

#include "mlxtape/models/model.h"

namespace mlxtape::test {

// "llama", "qwen3", "qwen3_next", "qwen3_5", "qwen3_5_moe".
formats::Json small_config(const std::string& type);
models::Model small_model(CommandEncoder& encoder, const std::string& type,
                          DType dtype = DType::kF32, std::uint64_t seed = 1);
// The same with larger weights: its logits differ as those of a model that has learned do.
models::Model lively_model(CommandEncoder& encoder, const std::string& type,
                           DType dtype = DType::kF32, std::uint64_t seed = 1);
std::vector<std::string> model_types();

// A tokenizer.json in which every byte is a token. The models know the first 80 alone: the characters up to 'O'.
std::string small_tokenizer_json();

}  // namespace mlxtape::test
