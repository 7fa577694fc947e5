// dynamic-quant: a model quantised in more bits where that matters most, for a size.
#include <CLI/CLI.hpp>

#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>

#include "command.h"
#include "eval_flags.h"
#include "interrupt.h"
#include "mlxtape/jobs/dynamic_quant.h"
#include "mlxtape/models/size.h"
#include "model_flags.h"
#include "output.h"
#include "output_paths.h"
#include "progress.h"

namespace mlxtape::cli {

namespace {

namespace fs = std::filesystem;
using formats::Json;

struct Flags {
  std::string model, to = "mlx_model", sensitivities;
  double target = 5;
  jobs::DynamicQuantOptions formats;
  bool report = false, checkpoint = false, force = false;
  FiniteFlag finite;
  std::uint32_t seed = 123;
  RowFlags rows;
};

// Where sensitivities that were measured are written: beside what is made, by the model's name.
std::string file_of(const Flags& flags) {
  return (fs::path(without_slash(flags.to)).parent_path() /
          (last_part(flags.model) + "_sensitivities.json"))
      .string();
}

// With --force only a file of their kind is replaced.
void expect_sensitivities_or_none(const std::string& file) {
  std::error_code reason;
  if (!fs::exists(file, reason)) return;
  try {
    static_cast<void>(jobs::read_sensitivities(file));
  } catch (const Error& e) {
    throw Error(Errc::kIo, std::string(e.what()) +
                               "; it is not a list of sensitivities, so --force does not " +
                               "overwrite it: move it away");
  }
}

void expect_flags(const Flags& flags) {
  if (flags.sensitivities.empty() && flags.rows.data.empty()) {
    called_wrongly(
        "--data-path (text data to measure sensitivities on) or --sensitivities is required");
  }
  if (flags.report && flags.rows.data.empty()) called_wrongly("--report-ppl needs --data-path");
  const models::WeightFormat low = flags.formats.low, high = flags.formats.high;
  if (high.bits < low.bits || (high.bits == low.bits && high.group_size >= low.group_size)) {
    called_wrongly(
        "--high-bits must be above --low-bits, or --high-group-size below --low-group-size");
  }
  expect_model(flags.model);
  expect_apart({"--mlx-path", flags.to}, {{"--model", flags.model},
                                          {"--data-path", flags.rows.data},
                                          {"--sensitivities", flags.sensitivities}});
  expect_place(flags.to, flags.force, "--mlx-path", flags.model);
  std::error_code reason;
  if (flags.sensitivities.empty() && fs::exists(file_of(flags), reason) && !flags.force) {
    throw Error(Errc::kIo,
                file_of(flags) +
                    ": already exists; use it with --sensitivities, or --force to measure again");
  }
  if (flags.sensitivities.empty()) expect_sensitivities_or_none(file_of(flags));
}

jobs::Sensitivities measure(CommandEncoder& encoder, const models::Model& model,
                            const std::vector<jobs::Sample>& samples, const Flags& flags,
                            const Globals& globals) {
  const auto rows =
      jobs::calibration_rows(samples, flags.rows.length, flags.rows.batch_size, flags.rows.most());
  const Interrupts interrupts("stopping, nothing will be written");
  Progress progress("measuring", static_cast<std::int64_t>(rows.size()), globals);
  jobs::SensitivityOptions options;
  options.formats = flags.formats;
  options.checkpoint = flags.checkpoint;
  options.progress = [&](std::int64_t done, std::int64_t) {
    progress.at(done);
  };
  options.stop = [] {
    return Interrupts::asked();
  };
  const jobs::Sensitivities values = jobs::sensitivities(encoder, model, rows, options);
  if (Interrupts::asked()) throw Exit{kInterrupted};
  // Of those that are there already the place is taken once there is a model: what is measured must not be lost either way.
  std::error_code reason;
  if (!fs::exists(file_of(flags), reason)) jobs::write_sensitivities(file_of(flags), values);
  return values;
}

void dynamic_quant(const Globals& globals, const Flags& flags) {
  expect_flags(flags);
  std::vector<jobs::Sample> samples;
  if (!flags.rows.data.empty()) {
    const auto tokenizer = formats::Tokenizer::from_directory(flags.model);
    samples = read_texts(flags.rows.data, tokenizer, {"train", "valid"});
  }
  Device& device = globals.device();
  const auto encoder = device.make_encoder();
  const models::Model model = load_model(flags.model, *encoder, globals);
  flags.finite.expect(*encoder, model, flags.model);
  jobs::require_target(model, flags.target, flags.formats);  // before long work
  const jobs::Sensitivities values = flags.sensitivities.empty()
                                         ? measure(*encoder, model, samples, flags, globals)
                                         : jobs::read_sensitivities(flags.sensitivities);
  const jobs::DynamicFormats chosen =
      jobs::choose_formats(model, values, flags.target, flags.formats);
  const models::Model quantized =
      models::quantize_model(*encoder, model, chosen.rule, flags.formats.rounding);
  encoder->commit_and_wait();
  save_result(quantized, flags.to, flags.model, flags.force);
  if (flags.sensitivities.empty()) jobs::write_sensitivities(file_of(flags), values);

  jobs::Evaluation e;
  if (flags.report) {
    const auto rows =
        jobs::rows_of_length(samples, flags.rows.length, flags.rows.batch_size, flags.rows.most());
    e = evaluate(*encoder, quantized, &model, rows, globals);
  }
  const std::string file = flags.sensitivities.empty() ? file_of(flags) : flags.sensitivities;
  const double bits = models::bits_per_weight(quantized);
  const auto high = static_cast<std::int64_t>(chosen.high.size());
  // All of them fit: there is nothing that they are above.
  const bool all_high = !std::isfinite(chosen.threshold);
  if (globals.json) {
    Json::Array modules;
    for (const std::string& path : chosen.high) modules.emplace_back(path);
    Json::Object object{
        {"model", flags.model},    {"mlx_path", flags.to},
        {"sensitivities", file},   {"threshold", all_high ? Json() : Json(chosen.threshold)},
        {"bits_per_weight", bits}, {"high", std::move(modules)}};
    if (flags.report) {
      object.emplace_back("perplexity_before", to_json(e.reference_perplexity));
      object.emplace_back("perplexity", to_json(e.perplexity));
      object.emplace_back("kl", to_json(e.kl));
    }
    return print_json(object);
  }
  Facts facts;
  facts.add("sensitivities", file);
  facts.add("high bits",
            std::to_string(high) + " of " + std::to_string(values.size()) + " modules" +
                (all_high ? "" : ", with sensitivities above " + Json(chosen.threshold).dump()));
  if (flags.report) {
    facts.add("perplexity", with_error(e.reference_perplexity) + " before, " +
                                with_error(e.perplexity) + " after");
    facts.add("KL to the original", with_error(e.kl));
  }
  print_result(facts.text() + flags.to + ": " + fixed(bits, 3) + " bits per weight, " +
               human_bytes(static_cast<double>(models::weight_bytes(quantized))) + "\n");
}

void add_format(CLI::App& command, Flags& flags) {
  const auto add = [&](const std::string& name, models::WeightFormat& format, const char* which) {
    command.add_option("--" + name + "-bits", format.bits, std::string("bits for ") + which)
        ->check(CLI::IsMember({2, 3, 4, 5, 6, 8}))
        ->type_name("N")
        ->group("Quantisation");
    command
        .add_option("--" + name + "-group-size", format.group_size,
                    std::string("group size for ") + which)
        ->check(CLI::IsMember({32, 64, 128}))
        ->type_name("N")
        ->group("Quantisation");
  };
  command
      .add_option("--target-bpw", flags.target,
                  "maximum bits per weight, including scales and biases")
      ->check(number_above(0, std::numeric_limits<double>::infinity()))
      ->type_name("X")
      ->group("Quantisation");
  add("low", flags.formats.low, "the less sensitive modules");
  add("high", flags.formats.high, "the more sensitive modules");
}

}  // namespace

void add_dynamic_quant(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "dynamic-quant",
      "quantise a model to a given size, with more bits where gradients show that they matter "
      "most. "
      "Routers and shared-expert gates get 8 bits (mlx-lm treats them like other modules).",
      "Examples:\n"
      "  mlxtape dynamic-quant --model my-model --data-path texts.txt --target-bpw 4.5 --low-bits "
      "3\n"
      "  mlxtape dynamic-quant --model my-model --sensitivities my-model_sensitivities.json");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  flags->rows.rows = -1;
  flags->rows.batch_size = 4;
  const char* const group = "Model";
  command
      ->add_option("-m,--model", flags->model,
                   "the model's directory, in MLX format, not quantised")
      ->required()
      ->type_name("DIR")
      ->group(group);
  command->add_option("--mlx-path", flags->to, "the directory to write")
      ->type_name("DIR")
      ->group(group);
  command
      ->add_flag("--force", flags->force,
                 "overwrite the model at --mlx-path, and its file of sensitivities")
      ->group(group);
  command
      ->add_option("--sensitivities", flags->sensitivities,
                   "a file of sensitivities, in mlx-lm's format; without it they are measured and "
                   "written next to --mlx-path as MODEL_sensitivities.json")
      ->type_name("FILE")
      ->group(group);
  flags->finite.add_to(*command, group);
  add_format(*command, *flags);
  flags->rows.add_to(*command, "--data-path,--data", "uses train, or else valid");
  command
      ->add_option("--seed", flags->seed,
                   "no effect, because nothing is random; accepted for compatibility with mlx-lm")
      ->check(whole_number(0, std::numeric_limits<std::uint32_t>::max()))
      ->type_name("N")
      ->group("Data");
  command
      ->add_flag("--report-ppl", flags->report,
                 "report the perplexity on --data-path before and after, and the KL divergence")
      ->group("Output");
  command
      ->add_flag(
          "--grad-checkpoint", flags->checkpoint,
          "gradient checkpointing: recompute layers in the backward pass; less memory, more time")
      ->group("Data");
  command->callback([&globals, flags] { dynamic_quant(globals, *flags); });
}

}  // namespace mlxtape::cli
