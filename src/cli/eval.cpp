// eval, perplexity: how well a model predicts texts, and how near it is to another.
#include <CLI/CLI.hpp>

#include <memory>

#include "command.h"
#include "eval_flags.h"
#include "model_flags.h"
#include "output.h"

namespace mlxtape::cli {

namespace {

using formats::Json;

struct Flags {
  std::string model, adapters, reference;
  RowFlags rows;
};

void tell(const jobs::Evaluation& e, const Flags& flags, Device& device) {
  Facts facts;
  facts.add("tokens", std::to_string(e.tokens) + " in " + human_time(e.seconds) + ", " +
                          fixed(static_cast<double>(e.tokens) / std::max(e.seconds, 1e-9), 0) +
                          " tokens/s, peak memory " +
                          human_bytes(static_cast<double>(peak_memory(device, e.peak_bytes))));
  facts.add("perplexity", with_error(e.perplexity));
  if (!flags.reference.empty()) {
    facts.add("  of the reference", with_error(e.reference_perplexity));
    facts.add("KL to the reference", with_error(e.kl));
    facts.add("top-1 agreement",
              with_error({100 * e.agreement.value, 100 * e.agreement.error}) + " %");
  }
  print(facts.text());
}

Json to_json(const jobs::Evaluation& e, const Flags& flags, Device& device) {
  Json::Object object{{"model", flags.model},
                      {"data", flags.rows.data},
                      {"tokens", e.tokens},
                      {"loss", e.loss},
                      {"perplexity", cli::to_json(e.perplexity)}};
  if (!flags.reference.empty()) {
    object.emplace_back("reference", flags.reference);
    object.emplace_back("reference_perplexity", cli::to_json(e.reference_perplexity));
    object.emplace_back("kl", cli::to_json(e.kl));
    object.emplace_back("top1_agreement", cli::to_json(e.agreement));
  }
  object.emplace_back("seconds", e.seconds);
  object.emplace_back("peak_memory_bytes",
                      static_cast<std::int64_t>(peak_memory(device, e.peak_bytes)));
  object.emplace_back("interrupted", e.stopped);
  return object;
}

void run(const Globals& globals, const Flags& flags) {
  expect_model(flags.model);
  if (!flags.reference.empty()) expect_model(flags.reference);
  const auto tokenizer = formats::Tokenizer::from_directory(flags.model);
  const std::vector<jobs::Batch> rows = flags.rows.read(tokenizer);
  Device& device = globals.device();
  const auto encoder = device.make_encoder();
  const models::Model model = load_model(flags.model, flags.adapters, *encoder, globals);
  if (flags.rows.length > model.config.plan.max_positions && !globals.quiet) {
    remark(positions_warning("a row of " + std::to_string(flags.rows.length) + " tokens",
                             model.config.plan.max_positions));
  }
  models::Model reference;
  if (!flags.reference.empty()) reference = load_model(flags.reference, *encoder, globals);
  const jobs::Evaluation e =
      evaluate(*encoder, model, flags.reference.empty() ? nullptr : &reference, rows, globals);
  if (globals.json) {
    print_json(to_json(e, flags, device));
  } else {
    tell(e, flags, device);
  }
  if (e.stopped) {
    remark("stopped early: these numbers are for the tokens evaluated so far");
    throw Exit{kInterrupted};
  }
}

void add(CLI::App& app, const Globals& globals, const char* name, const char* sentence) {
  CLI::App* command = add_command(app, name, sentence,
                                  std::string("Examples:\n  mlxtape ") + name +
                                      " --model my-model --data texts.jsonl --num-samples -1\n"
                                      "  mlxtape " +
                                      name + " --model small --reference my-model --data my-data");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  add_model_flag(*command, flags->model);
  add_adapter_flag(*command, flags->adapters);
  command
      ->add_option(
          "--reference", flags->reference,
          "a model to compare with: KL divergence, and top-1 agreement (how often both models "
          "find the same token most likely)")
      ->type_name("DIR")
      ->group("Model");
  flags->rows.add_to(*command, "--data,--data-path", "uses test, or else valid");
  flags->rows.add_mask_to(*command);
  command->callback([&globals, flags] { run(globals, *flags); });
}

}  // namespace

void add_eval(CLI::App& app, const Globals& globals) {
  add(app, globals, "eval",
      "compute a model's perplexity on text data and, with --reference, its KL divergence from "
      "another model, each with its standard error. Samples are read in the order of the file "
      "(mlx-lm picks them at random).");
  add(app, globals, "perplexity", "same as eval.");
}

}  // namespace mlxtape::cli
