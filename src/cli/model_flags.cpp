#include "model_flags.h"

#include <CLI/CLI.hpp>

#include <filesystem>

#include <sys/resource.h>

#include "mlxtape/formats/model_directory.h"
#include "mlxtape/models/lora.h"
#include "output.h"
#include "progress.h"

namespace mlxtape::cli {

namespace fs = std::filesystem;

CLI::Option* add_model_flag(CLI::App& command, std::string& directory) {
  return command.add_option("--model", directory, "the model's directory, in MLX format")
      ->required()
      ->type_name("DIR")
      ->group("Model");
}

void expect_model(const std::string& directory) {
  std::error_code reason;
  const fs::file_status there = fs::status(directory, reason);
  if (!fs::exists(there)) {
    throw Error(Errc::kIo, directory + ": there is no such directory; models are not downloaded, " +
                               "so it must be one on this machine");
  }
  if (!fs::is_directory(there)) {
    throw Error(Errc::kIo, directory + ": must be a model's directory, got a file");
  }
  if (!fs::exists(fs::path(directory) / "config.json", reason)) {
    throw Error(Errc::kIo, directory + ": must be a model's directory, and has no config.json");
  }
}

models::Model load_model(const std::string& directory, CommandEncoder& encoder,
                         const Globals& globals) {
  expect_model(directory);
  Progress::Options options;
  options.unit = Progress::Unit::kBytes;
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
  return command
      .add_option("--adapter-path", folder,
                  "a folder of adapters that lora has made, for the model")
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
  const auto number = [&](const char* name, auto& value, const char* what) {
    return command.add_option(name, value, what)->type_name("X")->group("Sampling");
  };
  jobs::SamplingOptions& sampling = options.sampling;
  command.add_option("-m,--max-tokens", options.max_tokens, "at most so many tokens of an answer")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31))
      ->type_name("N")
      ->group("Ends");
  number("--temp", sampling.temperature, "temperature; 0: always the most likely token");
  number("--top-p", sampling.top_p, "only the likeliest tokens that have so much together");
  number("--min-p", sampling.min_p, "only tokens with this share of the likeliest one's chance");
  number("--top-k", sampling.top_k, "only so many of the likeliest tokens; 0: all")->type_name("N");
  number("--repetition-penalty", sampling.repetition_penalty,
         "above 1: tokens that were said a short while ago are less likely");
  number("--seed", sampling.seed, "of the random draws: the same seed gives the same text")
      ->type_name("N");
  command
      .add_option("--stop", options.stop_strings, "text that ends an answer and is not part of it")
      ->allow_extra_args(false)
      ->type_name("TEXT")
      ->group("Ends");
  command
      .add_option("--extra-eos-token", extra_ends,
                  "a token, as the tokenizer spells it, that ends an answer too")
      ->allow_extra_args(false)
      ->type_name("TOKEN")
      ->group("Ends");
}

jobs::GenerateOptions AnswerFlags::for_tokenizer(const formats::Tokenizer& tokenizer) const {
  require(jobs::sampling_check(options.sampling));
  for (const std::string& text : options.stop_strings) {
    if (text.empty()) called_wrongly("--stop must be some text, got none");
  }
  jobs::GenerateOptions result = options;
  for (const std::string& end : extra_ends) {
    const std::optional<formats::TokenId> id = tokenizer.id_of(end);
    if (!id) called_wrongly("--extra-eos-token: the tokenizer has no token '" + end + "'");
    result.stop_tokens.push_back(*id);
  }
  return result;
}

void TemplateFlags::add_to(CLI::App& command) {
  command.add_option("--system-prompt", system, "said to the model before all else")
      ->type_name("TEXT")
      ->group("Chat template");
  command
      .add_option("--chat-template-config", config,
                  "what else the template is told, e.g. '{\"enable_thinking\": false}'")
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

std::size_t peak_memory(Device& device, std::size_t allocated) {
  if (device.backend() != Backend::kCpu) return allocated;
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
