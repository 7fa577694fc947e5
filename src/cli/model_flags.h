// What commands that use a model share: its directory, how it answers, what that took.
#pragma once

#include <memory>
#include <string>

#include "command.h"
#include "mlxtape/jobs/generate.h"
#include "mlxtape/models/load.h"
#include "progress.h"

namespace mlxtape::cli {

// --model DIR, required.
CLI::Option* add_model_flag(CLI::App& command, std::string& directory);

// Throws kIo and says what to do where this is no model's directory.
void expect_model(const std::string& directory);

// --adapter-path DIR.
CLI::Option* add_adapter_flag(CLI::App& command, std::string& folder);

// With a bar while it takes long.
models::Model load_model(const std::string& directory, CommandEncoder& encoder,
                         const Globals& globals);
// And its adapters, where a folder of such is given.
models::Model load_model(const std::string& directory, const std::string& adapters,
                         CommandEncoder& encoder, const Globals& globals);

// --max-tokens, --temp, --top-p, ..., --stop, --extra-eos-token; mlx-lm's names.
struct AnswerFlags {
  jobs::GenerateOptions options;
  std::vector<std::string> extra_ends;

  void add_to(CLI::App& command);
  // options with what the tokenizer must know for.
  jobs::GenerateOptions for_tokenizer(const formats::Tokenizer& tokenizer) const;
};

// Of what, in tokens, goes beyond the model's positions.
std::string positions_warning(const std::string& what, std::int64_t positions);

// What a person sees while prompts are read, and where a text outgrows the model.
class AnswerWatch {
 public:
  explicit AnswerWatch(const Globals& globals) : globals_(globals) {}
  // Sets on_read and on_beyond, and looks at on_text, which must be set before. It must outlive the options' use.
  void attach(jobs::GenerateOptions& options);
  // An answer is whole: what was held back while it was written is said now.
  void end();

 private:
  const Globals& globals_;
  std::unique_ptr<Progress> progress_;
  std::string held_;  // a warning that would stand in the middle of a line
  bool writing_ = false;
};

// --system-prompt, --chat-template-config.
struct TemplateFlags {
  std::string system, config;

  void add_to(CLI::App& command);
  formats::Json variables() const;
};

// --allow-nonfinite, of commands that write a model from another.
struct FiniteFlag {
  bool allow = false;

  void add_to(CLI::App& command, const std::string& group);
  // Throws kIo where a weight or an adapter is NaN or infinite, or warns where that is allowed. The message begins with of
  // and ends with why. True: all is finite.
  bool expect(CommandEncoder& encoder, const models::Model& model, const std::string& of,
              const std::string& why = "the file is damaged, or training diverged") const;
};

// The most memory so far: of a GPU what was allocated there, on the CPU what the process had in use, mapped weights among
// it.
std::size_t peak_memory(Device& device, std::size_t allocated);

// "12 tokens, 34.5 tokens/s".
std::string rate(std::int64_t tokens, double seconds);

}  // namespace mlxtape::cli
