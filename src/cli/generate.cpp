// generate: text from one or several prompts.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <memory>

#include "command.h"
#include "formats/utf8.h"
#include "interrupt.h"
#include "mlxtape/base/files.h"
#include "model_flags.h"
#include "output.h"

namespace mlxtape::cli {

namespace {

using formats::Json;

struct Flags {
  std::string model, adapters, prefill;
  std::vector<std::string> prompts, files, biases;
  std::string logprobs;
  const CLI::Option* logprobs_flag = nullptr;  // it may come without a number
  bool no_template = false, verbose = true;
  AnswerFlags answer;
  TemplateFlags chat;
};

// As mlx-lm: \n and \t in a prompt of the command line are a new line and a tab.
std::string unescaped(std::string text) {
  for (const auto& [from, to] : {std::pair{"\\n", "\n"}, {"\\t", "\t"}}) {
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; ++at) {
      text.replace(at, 2, to);
    }
  }
  return text;
}

// All of it, of which there may be as much as of a file.
std::string read_stdin() {
  std::string text;
  std::array<char, std::size_t{1} << 16U> piece{};
  while (const std::size_t got = std::fread(piece.data(), 1, piece.size(), stdin)) {
    if (text.size() + got > kMaxReadBytes) {
      throw Error(Errc::kIo, "--prompt -: stdin must have at most " +
                                 std::to_string(kMaxReadBytes) + " bytes, got more");
    }
    text.append(piece.data(), got);
  }
  return text;
}

std::vector<std::string> read_prompts(const Flags& flags) {
  std::vector<std::string> prompts;
  for (const std::string& prompt : flags.prompts) {
    prompts.push_back(prompt == "-" ? read_stdin() : unescaped(prompt));
  }
  for (const std::string& file : flags.files) prompts.push_back(read_whole(file, "--prompt-file"));
  // As the tokenizer takes them.
  for (std::string& prompt : prompts) prompt = formats::replace_invalid_utf8(prompt);
  if (prompts.empty()) called_wrongly("a prompt is required: use --prompt or --prompt-file");
  return prompts;
}

// The template's text up to the end of what the answer begins with, as Hugging Face cuts it.
std::string begun_answer(const formats::Tokenizer& tokenizer, Json messages, const Flags& flags) {
  messages.array().push_back(Json::Object{{"role", "assistant"}, {"content", flags.prefill}});
  formats::ChatOptions options;
  options.variables = flags.chat.variables();
  options.bos_token = tokenizer.bos_token();
  options.eos_token = tokenizer.eos_token();
  const std::string text = tokenizer.chat_template()->render(messages, options);
  const char* spaces = " \t\r\n";
  std::size_t first = flags.prefill.find_first_not_of(spaces);
  if (first == std::string::npos) first = 0;
  const std::string from = flags.prefill.substr(first);
  const std::string bare = from.substr(0, from.find_last_not_of(spaces) + 1);
  const std::size_t at = text.rfind(bare);
  if (bare.empty() || at == std::string::npos) {
    throw Error(bare.empty() ? Errc::kArgument : Errc::kIo,
                "--prefill-response: this model's chat template changes the "
                "beginning of an answer, so it cannot be given");
  }
  return text.substr(0, at + (text.compare(at, from.size(), from) == 0 ? from : bare).size());
}

std::vector<std::int32_t> encode(const formats::Tokenizer& tokenizer, const std::string& prompt,
                                 const Flags& flags) {
  if (flags.no_template || tokenizer.chat_template() == nullptr) {
    if (!flags.chat.system.empty() || !flags.prefill.empty()) {
      called_wrongly(
          "--system-prompt and --prefill-response need a chat template; the model has none, or "
          "--ignore-chat-template is given");
    }
    return tokenizer.encode(prompt);
  }
  Json messages = Json::Array{};
  if (!flags.chat.system.empty()) {
    messages.array().push_back(Json::Object{{"role", "system"}, {"content", flags.chat.system}});
  }
  messages.array().push_back(Json::Object{{"role", "user"}, {"content", prompt}});
  if (!flags.prefill.empty()) {
    return tokenizer.encode(begun_answer(tokenizer, messages, flags), false);
  }
  formats::ChatOptions options;
  options.add_generation_prompt = true;
  options.variables = flags.chat.variables();
  std::vector<std::int32_t> ids = tokenizer.encode_chat(messages, options);
  if (ids.empty()) {
    throw Error(Errc::kIo, flags.model +
                               ": the chat template renders to an empty prompt; use "
                               "--ignore-chat-template to do without it");
  }
  return ids;
}

template <class Number>
bool read_all(std::string_view text, Number& value) {
  const auto [stopped, wrong] = std::from_chars(text.data(), text.data() + text.size(), value);
  return wrong == std::errc{} && stopped == text.data() + text.size();
}

// Of ID=VALUE.
std::pair<std::int32_t, float> read_bias(const std::string& text) {
  const std::size_t middle = std::min(text.find('='), text.size());
  const std::string_view id = std::string_view(text).substr(0, middle);
  const std::string_view value = std::string_view(text).substr(std::min(middle + 1, text.size()));
  std::pair<std::int32_t, float> bias;
  const bool fits = read_all(id, bias.first) && bias.first >= 0 && read_all(value, bias.second) &&
                    (std::isfinite(bias.second) || bias.second == -INFINITY);
  if (!fits) {
    called_wrongly("--logit-bias must be a token's id, '=' and a number or -inf, got '" + text +
                   "'");
  }
  return bias;
}

void read_biases(const Flags& flags, jobs::SamplingOptions& sampling) {
  for (const std::string& text : flags.biases) {
    const auto bias = read_bias(text);
    for (const auto& [token, value] : sampling.logit_bias) {
      if (token == bias.first) {
        called_wrongly("--logit-bias: the token " + std::to_string(token) + " is given twice");
      }
    }
    sampling.logit_bias.push_back(bias);
  }
  require(jobs::sampling_check(sampling));
}

void expect_in_vocabulary(const jobs::SamplingOptions& sampling, const models::Model& model) {
  for (const auto& [token, value] : sampling.logit_bias) {
    if (token < model.config.plan.vocabulary) continue;
    called_wrongly("--logit-bias: the model has tokens 0 to " +
                   std::to_string(model.config.plan.vocabulary - 1) + ", got " +
                   std::to_string(token));
  }
}

// How many of the most likely tokens are listed beside each token; -1: log-probabilities are not wanted.
std::int64_t listed(const Flags& flags) {
  if (flags.logprobs_flag->count() == 0) return -1;
  std::int64_t count = 0;
  if (flags.logprobs.empty()) return count;
  if (!read_all(flags.logprobs, count) || count < 0 || count > ops::kSampleTop) {
    called_wrongly("--logprobs must be a whole number from 0 to " +
                   std::to_string(ops::kSampleTop) + ", got '" + flags.logprobs + "'");
  }
  return count;
}

// A token, its text and its log-probability. A token may be a part of a character: its text then is the sign for that.
Json::Object token_json(const formats::Tokenizer& tokenizer, std::int32_t id, float logprob) {
  const std::array<formats::TokenId, 1> ids = {id};
  return {{"id", static_cast<std::int64_t>(id)},
          {"token", formats::replace_invalid_utf8(tokenizer.decode(ids))},
          {"logprob", static_cast<double>(logprob)}};
}

Json logprobs_json(const formats::Tokenizer& tokenizer, const jobs::Generated& one,
                   std::int64_t count) {
  Json::Array tokens;
  for (std::size_t t = 0; t < one.tokens.size(); ++t) {
    Json::Object token = token_json(tokenizer, one.tokens[t], one.logprobs[t]);
    Json::Array top;
    for (const auto& [id, logprob] : one.top[t]) {
      if (static_cast<std::int64_t>(top.size()) == count) break;
      top.emplace_back(token_json(tokenizer, id, logprob));
    }
    if (count > 0) token.emplace_back("top", std::move(top));
    tokens.emplace_back(std::move(token));
  }
  return tokens;
}

double per_second(std::int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

// The first token of each comes with its prompt.
std::int64_t stepped(const jobs::GenerateReport& report) {
  return std::max<std::int64_t>(0,
                                report.tokens - static_cast<std::int64_t>(report.sequences.size()));
}

Json to_json(const jobs::GenerateReport& report, const std::vector<std::string>& prompts,
             const Flags& flags, const formats::Tokenizer& tokenizer, Device& device) {
  Json::Array sequences;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const jobs::Generated& one = report.sequences[i];
    Json::Object sequence{{"prompt", prompts[i]},
                          {"text", one.text},
                          {"tokens", static_cast<std::int64_t>(one.tokens.size())},
                          {"finish", name_of(one.finish)}};
    if (const std::int64_t count = listed(flags); count >= 0) {
      sequence.emplace_back("logprobs", logprobs_json(tokenizer, one, count));
    }
    sequences.emplace_back(std::move(sequence));
  }
  return Json::Object{
      {"model", flags.model},
      {"device", device.name()},
      {"sequences", std::move(sequences)},
      {"prompt_tokens", report.prompt_tokens},
      {"prompt_tokens_per_second", per_second(report.prompt_tokens, report.prompt_seconds)},
      {"generation_tokens", report.tokens},
      {"generation_tokens_per_second", per_second(stepped(report), report.seconds)},
      {"peak_memory_bytes", static_cast<std::int64_t>(peak_memory(device, report.peak_bytes))},
      {"interrupted", Interrupts::asked()}};
}

void print_texts(const jobs::GenerateReport& report, const std::vector<std::string>& prompts) {
  if (prompts.size() == 1) {
    print("\n");  // the text has been printed as it came
    return;
  }
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    print((i == 0 ? "" : "\n") + std::string("==> ") + prompts[i] + "\n" +
          report.sequences[i].text + "\n");
  }
}

void print_costs(const jobs::GenerateReport& report, Device& device) {
  remark("prompt:      " + rate(report.prompt_tokens, report.prompt_seconds));
  std::string generation = std::to_string(report.tokens) + " tokens";
  if (stepped(report) > 0) {
    generation += ", " + fixed(per_second(stepped(report), report.seconds), 1) + " tokens/s";
  }
  remark("generation:  " + generation);
  remark("peak memory: " +
         human_bytes(static_cast<double>(peak_memory(device, report.peak_bytes))));
}

void generate(const Globals& globals, const Flags& flags) {
  const std::vector<std::string> prompts = read_prompts(flags);
  static_cast<void>(flags.chat.variables());  // what is wrong with it is said before all else
  const bool logprobs = listed(flags) >= 0;
  if (logprobs && !globals.json) called_wrongly("--logprobs needs --json, which prints them");
  expect_model(flags.model);
  const auto tokenizer = formats::Tokenizer::from_directory(flags.model);
  jobs::GenerateOptions options = flags.answer.for_tokenizer(tokenizer);
  options.logprobs = logprobs;
  read_biases(flags, options.sampling);
  std::vector<std::vector<std::int32_t>> ids;
  for (const std::string& prompt : prompts) ids.push_back(encode(tokenizer, prompt, flags));
  Device& device = globals.device();
  const auto encoder = device.make_encoder();
  const models::Model model = load_model(flags.model, flags.adapters, *encoder, globals);

  expect_in_vocabulary(options.sampling, model);
  const bool stream = prompts.size() == 1 && !globals.json;
  options.on_text = [&](std::size_t, std::string_view text) {
    if (!stream) return true;
    std::fwrite(text.data(), 1, text.size(), stdout);
    return std::fflush(stdout) == 0;
  };
  const Interrupts interrupts("stopping");
  options.stop = [] {
    return Interrupts::asked();
  };
  AnswerWatch watch(globals);
  watch.attach(options);
  const jobs::GenerateReport report = jobs::generate(*encoder, model, tokenizer, ids, options);
  if (globals.json) {
    print_json(to_json(report, prompts, flags, tokenizer, device));
  } else {
    print_texts(report, prompts);
  }
  std::fflush(stdout);
  watch.end();
  if (flags.verbose && !globals.quiet && !globals.json) print_costs(report, device);
  if (Interrupts::asked()) throw Exit{kInterrupted};
}

}  // namespace

void add_generate(CLI::App& app, const Globals& globals) {
  CLI::App* command =
      add_command(app, "generate", "generate text from a prompt, or from several as a batch.",
                  "Examples:\n"
                  "  mlxtape generate --model my-model -p \"Why is the sky blue?\" -m 200\n"
                  "  mlxtape generate --model my-model -p - --temp 0.7 --top-p 0.9 < question.txt");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  flags->answer.options.max_tokens = 100;
  add_model_flag(*command, flags->model);
  add_adapter_flag(*command, flags->adapters);
  command
      ->add_option("-p,--prompt", flags->prompts,
                   "the prompt; - reads it from stdin; several run as a batch")
      ->allow_extra_args(false)
      ->type_name("TEXT")
      ->group("Prompt");
  command->add_option("--prompt-file", flags->files, "read a prompt from a file")
      ->allow_extra_args(false)
      ->type_name("FILE")
      ->group("Prompt");
  flags->chat.add_to(*command);
  command
      ->add_flag("--ignore-chat-template", flags->no_template,
                 "use the prompt as it is, without the chat template")
      ->group("Chat template");
  command->add_option("--prefill-response", flags->prefill, "beginning of the answer")
      ->type_name("TEXT")
      ->group("Chat template");
  flags->answer.add_to(*command);
  command
      ->add_option("--logit-bias", flags->biases,
                   "add VALUE to the logit of the token with this id; -inf: never choose it")
      ->allow_extra_args(false)
      ->type_name("ID=VALUE")
      ->group("Sampling");
  flags->logprobs_flag =
      command
          ->add_option(
              "--logprobs", flags->logprobs,
              "with --json: the log-probability of each generated token, and of the N most "
              "likely tokens at its position (at most 20; default 0)")
          ->expected(0, 1)
          ->type_name("N")
          ->group("Output");
  command->add_option("--verbose", flags->verbose, "print speed and memory at the end, on stderr")
      ->expected(0, 1)
      ->default_str("true")
      ->type_name("BOOL")
      ->group("Output");
  command->callback([&globals, flags] { generate(globals, *flags); });
}

}  // namespace mlxtape::cli
