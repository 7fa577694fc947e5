// compare: two models side by side: size, speed, and how well they predict.
#include <CLI/CLI.hpp>

#include <memory>

#include "command.h"
#include "eval_flags.h"
#include "interrupt.h"
#include "mlxtape/jobs/generate.h"
#include "mlxtape/models/size.h"
#include "model_flags.h"
#include "output.h"
#include "output_paths.h"

namespace mlxtape::cli {

namespace {

using formats::Json;

struct Flags {
  std::string a, b;
  RowFlags rows;
  std::int64_t prompt_tokens = 128, tokens = 64;
};

// The best of three runs.
struct Speed {
  double prompt = 0, generation = 0;  // tokens per second
};

struct Numbers {
  std::size_t bytes = 0;
  double bits = 0;
  Speed speed;
  jobs::Estimate perplexity;
};

// Tokens of the data, as many as asked for: from the beginning again where there are fewer.
std::vector<std::int32_t> prompt_of(const std::vector<jobs::Batch>& rows, std::int64_t count) {
  std::vector<std::int32_t> prompt;
  while (static_cast<std::int64_t>(prompt.size()) < count) {
    for (const jobs::Batch& batch : rows) {
      prompt.insert(prompt.end(), batch.tokens.begin(), batch.tokens.end());
    }
  }
  prompt.resize(static_cast<std::size_t>(count));
  return prompt;
}

Speed speed_of(CommandEncoder& encoder, const models::Model& model,
               const formats::Tokenizer& tokenizer, const std::vector<std::int32_t>& prompt,
               std::int64_t tokens) {
  jobs::GenerateOptions options;
  options.ignore_ends = true;
  options.stop = [] {
    return Interrupts::asked();
  };
  options.max_tokens = tokens;
  Speed best;
  for (int i = 0; i < 3; ++i) {  // the best: the first finds nothing warm, others are disturbed
    const jobs::GenerateReport report =
        jobs::generate(encoder, model, tokenizer, {prompt}, options);
    if (Interrupts::asked()) throw Exit{kInterrupted};
    const auto rate = [](std::int64_t count, double seconds) {
      return static_cast<double>(count) / std::max(seconds, 1e-9);
    };
    best.prompt = std::max(best.prompt, rate(report.prompt_tokens, report.prompt_seconds));
    // The first token comes with the prompt.
    best.generation = std::max(best.generation, rate(report.tokens - 1, report.seconds));
  }
  return best;
}

Json to_json(const Numbers& n, const std::string& path) {
  return Json::Object{{"model", path},
                      {"bytes", static_cast<std::int64_t>(n.bytes)},
                      {"bits_per_weight", n.bits},
                      {"prompt_tokens_per_second", n.speed.prompt},
                      {"generation_tokens_per_second", n.speed.generation},
                      {"perplexity", cli::to_json(n.perplexity)}};
}

void tell(const Flags& flags, const Numbers& a, const Numbers& b, const jobs::Evaluation& e) {
  const auto ratio = [](double x, double y) {
    return y > 0 ? "× " + fixed(x / y, 2) : std::string();
  };
  Table table({"", last_part(flags.a), last_part(flags.b), ""}, {false, true, true, false});
  table.add({"size", human_bytes(static_cast<double>(a.bytes)),
             human_bytes(static_cast<double>(b.bytes)),
             ratio(static_cast<double>(b.bytes), static_cast<double>(a.bytes))});
  table.add({"bits per weight", fixed(a.bits, 3), fixed(b.bits, 3), ""});
  table.add({"prompt, tokens/s", fixed(a.speed.prompt, 1), fixed(b.speed.prompt, 1),
             ratio(b.speed.prompt, a.speed.prompt)});
  table.add({"generation, tokens/s", fixed(a.speed.generation, 1), fixed(b.speed.generation, 1),
             ratio(b.speed.generation, a.speed.generation)});
  table.add({"perplexity", with_error(a.perplexity), with_error(b.perplexity),
             ratio(b.perplexity.value, a.perplexity.value)});
  table.add({"KL to the first", "", with_error(e.kl), ""});
  table.add({"top-1 agreement, %", "",
             with_error({100 * e.agreement.value, 100 * e.agreement.error}), ""});
  print_result(table.text());
}

void compare(const Globals& globals, const Flags& flags) {
  expect_model(flags.a);
  expect_model(flags.b);
  const auto tokenizer = formats::Tokenizer::from_directory(flags.a);
  const std::vector<jobs::Batch> rows = flags.rows.read(tokenizer);
  Device& device = globals.device();
  const auto encoder = device.make_encoder();
  const models::Model a = load_model(flags.a, *encoder, globals);
  const models::Model b = load_model(flags.b, *encoder, globals);
  const jobs::Evaluation e = evaluate(*encoder, b, &a, rows, globals);
  if (e.stopped) throw Exit{kInterrupted};
  const Interrupts interrupts("stopping");
  const auto prompt = prompt_of(rows, flags.prompt_tokens);
  const auto numbers_of = [&](const models::Model& model, const jobs::Estimate& perplexity) {
    return Numbers{models::weight_bytes(model), models::bits_per_weight(model),
                   speed_of(*encoder, model, tokenizer, prompt, flags.tokens), perplexity};
  };
  const Numbers first = numbers_of(a, e.reference_perplexity), second = numbers_of(b, e.perplexity);
  if (!globals.json) return tell(flags, first, second, e);
  print_json(Json::Object{{"device", device.name()},
                          {"data", flags.rows.data},
                          {"tokens", e.tokens},
                          {"a", to_json(first, flags.a)},
                          {"b", to_json(second, flags.b)},
                          {"kl_of_b_to_a", cli::to_json(e.kl)},
                          {"top1_agreement", cli::to_json(e.agreement)}});
}

}  // namespace

void add_compare(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "compare",
      "compare two models: size, speed, perplexity, and the KL divergence of the second from the "
      "first.",
      "Example:\n  mlxtape compare my-model small --data texts.jsonl");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  command->add_option("A", flags->a, "directory of the first model; its tokenizer is used for both")
      ->required()
      ->type_name("DIR");
  command->add_option("B", flags->b, "directory of the second model")->required()->type_name("DIR");
  flags->rows.add_to(*command, "--data,--data-path", "uses test, or else valid");
  flags->rows.add_mask_to(*command);
  command
      ->add_option("--prompt-tokens", flags->prompt_tokens,
                   "prompt length for the speed test, in tokens")
      ->check(whole_number(1, 1U << 24U))
      ->type_name("N")
      ->group("Speed");
  command
      ->add_option("-m,--max-tokens", flags->tokens,
                   "number of tokens to generate in the speed test")
      ->check(whole_number(2, 1U << 24U))
      ->type_name("N")
      ->group("Speed");
  command->callback([&globals, flags] { compare(globals, *flags); });
}

}  // namespace mlxtape::cli
