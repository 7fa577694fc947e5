#include "eval_flags.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>

#include "interrupt.h"
#include "mlxtape/jobs/train.h"
#include "output.h"
#include "progress.h"

namespace mlxtape::cli {

using formats::Json;

void RowFlags::add_to(CLI::App& command, const std::string& names, const std::string& of_a_folder) {
  const char* const group = "Data";
  constexpr std::uint64_t kMost = std::uint64_t{1} << 30U;
  command
      .add_option(names, data,
                  "text data: a .jsonl or .txt file, or a folder (" + of_a_folder +
                      "); all text is joined and cut into rows")
      ->type_name("FILE")
      ->group(group);
  command.add_option("--sequence-length", length, "tokens per row")
      ->check(whole_number(2, kMost))
      ->type_name("N")
      ->group(group);
  command.add_option("--num-samples", rows, "number of rows to use, from the first; 0 or -1: all")
      ->check(whole_number(-1, kMost))
      ->type_name("N")
      ->group(group);
  command.add_option("--batch-size", batch_size, "rows per batch")
      ->check(whole_number(1, kMost))
      ->type_name("N")
      ->group(group);
}

void RowFlags::add_mask_to(CLI::App& command) {
  command
      .add_flag("--mask-prompt", answers_alone,
                "score completions only; each sample is a row of its own, cut to --sequence-length")
      ->group("Data");
}

std::vector<jobs::Batch> RowFlags::read(const formats::Tokenizer& tokenizer) const {
  const std::vector<std::string> order = {"test", "valid"};
  if (!answers_alone) {
    return jobs::rows_of_length(read_texts(data, tokenizer, order), length, batch_size, most());
  }
  std::vector<jobs::Sample> samples = read_texts(data, tokenizer, order, {length, true});
  if (most() > 0 && most() < static_cast<std::int64_t>(samples.size())) {
    samples.resize(static_cast<std::size_t>(most()));
  }
  jobs::BatchOptions options;
  options.batch_size = batch_size;
  options.max_tokens = length;
  options.learn_prompt = false;
  std::vector<jobs::Batch> batches = jobs::validation_batches(samples, options, -1);
  if (batches.empty()) {
    throw Error(Errc::kIo, data + ": --mask-prompt needs samples with a completion, got none");
  }
  return batches;
}

std::vector<jobs::Sample> read_texts(const std::string& path, const formats::Tokenizer& tokenizer,
                                     const std::vector<std::string>& order,
                                     const jobs::DataOptions& options) {
  if (path.empty()) called_wrongly("--data is required");
  jobs::DataSet data = jobs::read_data(path, tokenizer, options);
  for (const std::string& name : order) {
    std::vector<jobs::Sample>& part = name == "train"   ? data.train
                                      : name == "valid" ? data.valid
                                                        : data.test;
    if (!part.empty()) return std::move(part);
  }
  if (!data.train.empty()) return std::move(data.train);  // one file
  throw Error(Errc::kIo, path + ": must contain " + order.front() + ".jsonl or " + order.front() +
                             ".txt, got neither");
}

jobs::Evaluation evaluate(CommandEncoder& encoder, const models::Model& model,
                          const models::Model* reference, const std::vector<jobs::Batch>& rows,
                          const Globals& globals) {
  const Interrupts interrupts("stopping after this batch");
  Progress progress("evaluating", static_cast<std::int64_t>(rows.size()), globals);
  jobs::EvaluateOptions options;
  options.progress = [&](std::int64_t done, std::int64_t) {
    progress.at(done);
  };
  options.stop = [] {
    return Interrupts::asked();
  };
  return jobs::evaluate(encoder, model, reference, rows, options);
}

std::string with_error(const jobs::Estimate& estimate) {
  // Two digits of the error.
  const int digits =
      estimate.error > 0
          ? std::clamp(1 - static_cast<int>(std::floor(std::log10(estimate.error))), 1, 6)
          : 1;
  return fixed(estimate.value, digits) + " ± " + fixed(estimate.error, digits);
}

Json to_json(const jobs::Estimate& estimate) {
  return Json::Object{{"value", estimate.value}, {"error", estimate.error}};
}

}  // namespace mlxtape::cli
