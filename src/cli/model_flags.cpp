#include "model_flags.h"

#include <CLI/CLI.hpp>

#include <filesystem>
#include <limits>
#include <utility>

#include <sys/resource.h>

#include "mlxtape/formats/model_directory.h"
#include "mlxtape/models/finite.h"
#include "mlxtape/models/lora.h"
#include "output.h"

namespace mlxtape::cli {

namespace fs = std::filesystem;

CLI::Option* add_model_flag(CLI::App& command, std::string& directory) {
  return command
      .add_option("--model", directory, "the model's directory in MLX format, or a .gguf file")
      ->required()
      ->type_name("DIR")
      ->group("Model");
}

void expect_model(const std::string& directory) {
  require(formats::gguf_check(directory));
  std::error_code reason;
  const fs::file_status there = fs::status(directory, reason);
  if (!fs::exists(there)) {
    throw Error(Errc::kIo, directory +
                               ": no such directory; models are not downloaded, so it must " +
                               "be a directory on this machine");
  }
  if (!fs::is_directory(there)) {
    if (formats::is_gguf_path(directory)) return;
    throw Error(Errc::kIo,
                directory + ": must be a model directory or a .gguf file, got another file");
  }
  if (!fs::exists(fs::path(directory) / "config.json", reason)) {
    throw Error(Errc::kIo, directory + ": must be a model directory, but has no config.json");
  }
}

models::Model load_model(const std::string& directory, CommandEncoder& encoder,
                         const Globals& globals) {
  expect_model(directory);
  Progress::Options options;
  options.unit = Progress::Unit::kBytes;
  options.plain_first = 1;
  std::unique_ptr<Progress> progress;
  models::LoadOptions load;
  load.progress = [&](std::size_t done, std::size_t all) {
    if (progress == nullptr) {
      progress =
          std::make_unique<Progress>("loading", static_cast<std::int64_t>(all), globals, options);
    }
    progress->at(static_cast<std::int64_t>(done));
  };
  return models::load_model(directory, encoder, load);
}

CLI::Option* add_adapter_flag(CLI::App& command, std::string& folder) {
  return command.add_option("--adapter-path", folder, "a folder of LoRA adapters for the model")
      ->type_name("DIR")
      ->group("Model");
}

models::Model load_model(const std::string& directory, const std::string& adapters,
                         CommandEncoder& encoder, const Globals& globals) {
  models::Model model = load_model(directory, encoder, globals);
  if (!adapters.empty()) models::load_adapters(encoder, model, adapters);
  return model;
}

void AnswerFlags::add_to(CLI::App& command) {
  const auto add = [&](const char* name, auto& value, const char* what) {
    return command.add_option(name, value, what)->type_name("X")->group("Sampling");
  };
  jobs::SamplingOptions& sampling = options.sampling;
  command.add_option("-m,--max-tokens", options.max_tokens, "maximum number of tokens to generate")
      ->check(whole_number(1, std::uint64_t{1} << 31U))
      ->type_name("N")
      ->group("Stopping");
  constexpr double kNoMost = std::numeric_limits<double>::infinity();
  add("--temp", sampling.temperature, "sampling temperature; 0: always the most likely token")
      ->check(number(0, kNoMost));
  add("--top-p", sampling.top_p,
      "nucleus sampling: the smallest set of tokens with cumulative probability >= p; 1: off")
      ->check(number_above(0, 1));
  add("--min-p", sampling.min_p,
      "drop tokens below this share of the most likely token's probability; 0: off")
      ->check(number(0, 1));
  add("--top-k", sampling.top_k, "sample from the k most likely tokens only; 0: off")
      ->check(whole_number(0, std::numeric_limits<std::int64_t>::max()))
      ->type_name("N");
  add("--repetition-penalty", sampling.repetition_penalty,
      "above 1: the last 20 tokens become less likely")
      ->check(number_above(0, kNoMost));
  add("--presence-penalty", sampling.presence_penalty,
      "subtracted from the logits of tokens already in the answer; 0: off")
      ->check(number(-kNoMost, kNoMost));
  add("--frequency-penalty", sampling.frequency_penalty,
      "subtracted from a token's logit once for each time it is in the answer; 0: off")
      ->check(number(-kNoMost, kNoMost));
  add("--seed", sampling.seed, "random seed; the same seed gives the same text on the same device")
      ->check(whole_number(0, std::numeric_limits<std::uint64_t>::max()))
      ->type_name("N");
  // What users of mlx-lm's Python API, of Hugging Face and of llama.cpp type.
  add_hidden_names(command, "--max-tokens", "-n,--n-predict,--predict,--max-new-tokens");
  add_hidden_names(command, "--temp", "--temperature");
  add_hidden_names(command, "--repetition-penalty", "--repeat-penalty");
  command.add_option("--stop", options.stop_strings, "stop before this text")
      ->allow_extra_args(false)
      ->type_name("TEXT")
      ->group("Stopping");
  command
      .add_option("--extra-eos-token", extra_ends,
                  "an additional end-of-text token, as the tokenizer spells it")
      ->allow_extra_args(false)
      ->type_name("TOKEN")
      ->group("Stopping");
}

jobs::GenerateOptions AnswerFlags::for_tokenizer(const formats::Tokenizer& tokenizer) const {
  require(jobs::sampling_check(options.sampling));
  for (const std::string& text : options.stop_strings) {
    if (text.empty()) called_wrongly("--stop must not be empty");
  }
  jobs::GenerateOptions result = options;
  for (const std::string& end : extra_ends) {
    const std::optional<formats::TokenId> id = tokenizer.id_of(end);
    if (!id) called_wrongly("--extra-eos-token: the tokenizer has no token '" + end + "'");
    result.stop_tokens.push_back(*id);
  }
  return result;
}

void AnswerWatch::attach(jobs::GenerateOptions& options) {
  options.on_read = [this](std::int64_t done, std::int64_t all) {
    if (progress_ == nullptr) {
      Progress::Options how;
      how.first_after = 1;
      how.plain_first = how.plain_every = std::numeric_limits<double>::infinity();
      progress_ = std::make_unique<Progress>("processing the prompt", all, globals_, how);
    }
    progress_->at(done);
    if (done == all) progress_.reset();
  };
  options.on_beyond = [this](std::int64_t tokens, std::int64_t positions) {
    if (globals_.quiet) return;
    const std::string warning =
        positions_warning("a text of " + std::to_string(tokens) + " tokens", positions);
    if (writing_) {
      held_ = warning;
    } else {
      remark(warning);
    }
  };
  options.on_text = [this, inner = options.on_text](std::size_t sequence, std::string_view text) {
    writing_ = true;
    return !inner || inner(sequence, text);
  };
}

void AnswerWatch::end() {
  progress_.reset();  // a prompt that was not read to its end
  writing_ = false;
  if (!held_.empty()) remark(std::exchange(held_, ""));
}

std::string positions_warning(const std::string& what, std::int64_t positions) {
  return "mlxtape: warning: " + what + " is longer than the model's maximum context length of " +
         std::to_string(positions) + " tokens; quality may suffer";
}

void TemplateFlags::add_to(CLI::App& command) {
  command.add_option("--system-prompt", system, "system prompt")
      ->type_name("TEXT")
      ->group("Chat template");
  command
      .add_option("--chat-template-config", config,
                  "more variables for the chat template, e.g. '{\"enable_thinking\": false}'")
      ->type_name("JSON")
      ->group("Chat template");
}

formats::Json TemplateFlags::variables() const {
  if (config.empty()) return {};
  try {
    formats::Json variables = formats::Json::parse(config, "--chat-template-config");
    if (variables.is_object()) return variables;
  } catch (const Error& e) {
    called_wrongly(e.what());
  }
  called_wrongly("--chat-template-config must be a JSON object, got " + config);
}

void FiniteFlag::add_to(CLI::App& command, const std::string& group) {
  command
      .add_flag("--allow-nonfinite", allow,
                "warn instead of failing if weights are NaN or infinite")
      ->group(group);
}

bool FiniteFlag::expect(CommandEncoder& encoder, const models::Model& model, const std::string& of,
                        const std::string& why) const {
  const models::NonFinite found = models::find_nonfinite(encoder, model);
  if (!found.any()) return true;
  const std::string what = of + ": " + found.text();
  if (!allow) {
    throw Error(Errc::kIo, what + ": " + why + "; use --allow-nonfinite to continue anyway");
  }
  remark("mlxtape: warning: " + what);
  return false;
}

std::size_t peak_memory(Device& device, std::size_t allocated) {
  if (!device.traits().uses_host_memory) return allocated;
  rusage usage{};
  if (::getrusage(RUSAGE_SELF, &usage) != 0) return allocated;
#ifdef __APPLE__
  return static_cast<std::size_t>(usage.ru_maxrss);
#else
  return static_cast<std::size_t>(usage.ru_maxrss) * 1024;
#endif
}

std::string rate(std::int64_t tokens, double seconds) {
  std::string text = std::to_string(tokens) + (tokens == 1 ? " token" : " tokens");
  if (tokens > 0 && seconds > 0) {
    text += ", " + fixed(static_cast<double>(tokens) / seconds, 1) + " tokens/s";
  }
  return text;
}

}  // namespace mlxtape::cli
