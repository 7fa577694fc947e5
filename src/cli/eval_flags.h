// What eval, compare and dynamic-quant share: texts in rows of tokens, and a model's numbers on them.
#pragma once

#include <string>
#include <vector>

#include "command.h"
#include "mlxtape/jobs/evaluate.h"

namespace mlxtape::cli {

// --data, --sequence-length, --num-samples, --batch-size.
struct RowFlags {
  std::string data;
  std::int64_t length = 512, rows = 256, batch_size = 8;
  bool answers_alone = false;

  // names: of the flag for data. What a folder's files are for is told by the command itself.
  void add_to(CLI::App& command, const std::string& names, const std::string& of_a_folder);
  // --mask-prompt.
  void add_mask_to(CLI::App& command);
  std::int64_t most() const { return rows < 1 ? 0 : rows; }  // as jobs::rows_of_length takes it
  // Of test, or else valid, where data is a folder.
  std::vector<jobs::Batch> read(const formats::Tokenizer& tokenizer) const;
};

// Rows are cut later, and where prompts end does not matter.
inline constexpr jobs::DataOptions kWholeTexts{std::int64_t{1} << 40U, false};

// The whole of a file's texts; of a folder the first of these that is there: "test", "valid", "train".
std::vector<jobs::Sample> read_texts(const std::string& path, const formats::Tokenizer& tokenizer,
                                     const std::vector<std::string>& order,
                                     const jobs::DataOptions& options = kWholeTexts);

// With a bar; Ctrl-C ends it with the numbers so far.
jobs::Evaluation evaluate(CommandEncoder& encoder, const models::Model& model,
                          const models::Model* reference, const std::vector<jobs::Batch>& rows,
                          const Globals& globals);

// "12.34 ± 0.05", with digits by the size of the error.
std::string with_error(const jobs::Estimate& estimate);
formats::Json to_json(const jobs::Estimate& estimate);

}  // namespace mlxtape::cli
