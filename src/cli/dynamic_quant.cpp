// dynamic-quant: a model packed in more bits where that matters most, for a size.
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
  jobs::DynamicQuantOptions packing;
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
                               "; it is no list of sensitivities, so --force does not overwrite " +
                               "it: move it away");
  }
}

void expect_flags(const Flags& flags) {
  if (flags.sensitivities.empty() && flags.rows.data.empty()) {
    called_wrongly(
        "--data-path, texts to measure by (mlx-lm downloads some), or --sensitivities is needed");
  }
  if (flags.report && flags.rows.data.empty()) called_wrongly("--report-ppl needs --data-path");
  const models::Packing low = flags.packing.low, high = flags.packing.high;
  if (high.bits < low.bits || (high.bits == low.bits && high.group_size >= low.group_size)) {
    called_wrongly("--high-bits must be above --low-bits, or its groups smaller");
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
  const Interrupts interrupts("stopping, nothing is written");
  Progress progress("measuring", static_cast<std::int64_t>(rows.size()), globals);
  jobs::SensitivityOptions options;
  options.packing = flags.packing;
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
  jobs::require_target(model, flags.target, flags.packing);  // before long work
  const jobs::Sensitivities values = flags.sensitivities.empty()
                                         ? measure(*encoder, model, samples, flags, globals)
                                         : jobs::read_sensitivities(flags.sensitivities);
  const jobs::DynamicPacking chosen =
      jobs::choose_packing(model, values, flags.target, flags.packing);
  const models::Model packed =
      models::quantize_model(*encoder, model, chosen.rule, flags.packing.rounding);
  encoder->commit_and_wait();
  save_result(packed, flags.to, flags.model, flags.force);
  if (flags.sensitivities.empty()) jobs::write_sensitivities(file_of(flags), values);

  jobs::Evaluation e;
  if (flags.report) {
    const auto rows =
        jobs::rows_of_length(samples, flags.rows.length, flags.rows.batch_size, flags.rows.most());
    e = evaluate(*encoder, packed, &model, rows, globals);
  }
  const std::string file = flags.sensitivities.empty() ? file_of(flags) : flags.sensitivities;
  const double bits = models::bits_per_weight(packed);
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
  facts.add("more bits", std::to_string(high) + " of " + std::to_string(values.size()) +
                             " modules" +
                             (all_high ? "" : ", those above " + Json(chosen.threshold).dump()));
  if (flags.report) {
    facts.add("perplexity", with_error(e.reference_perplexity) + " before, " +
                                with_error(e.perplexity) + " after");
    facts.add("KL to the model", with_error(e.kl));
  }
  print_result(facts.text() + flags.to + ": " + fixed(bits, 3) + " bits per weight, " +
               human_bytes(static_cast<double>(models::weight_bytes(packed))) + "\n");
}

void add_packing(CLI::App& command, Flags& flags) {
  const auto add = [&](const std::string& name, models::Packing& packing, const char* which) {
    command.add_option("--" + name + "-bits", packing.bits, std::string("bits of ") + which)
        ->check(CLI::IsMember({2, 3, 4, 5, 6, 8}))
        ->type_name("N")
        ->group("Packing");
    command.add_option("--" + name + "-group-size", packing.group_size, "and their groups")
        ->check(CLI::IsMember({32, 64, 128}))
        ->type_name("N")
        ->group("Packing");
  };
  command
      .add_option("--target-bpw", flags.target,
                  "bits per weight at the most, scales and biases among them")
      ->check(number_above(0, std::numeric_limits<double>::infinity()))
      ->type_name("X")
      ->group("Packing");
  add("low", flags.packing.low, "modules that matter little");
  add("high", flags.packing.high, "modules that matter more");
}

}  // namespace

void add_dynamic_quant(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "dynamic-quant",
      "a model packed in few bits, and in more where gradients say that it matters most, for a "
      "size. Routers and gates of shared experts have 8 bits (in mlx-lm they are like all "
      "others); gradients are summed in double, so there is no --accumulation-dtype.",
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
      ->add_option("-m,--model", flags->model, "the model's directory, in MLX format, not packed")
      ->required()
      ->type_name("DIR")
      ->group(group);
  command->add_option("--mlx-path", flags->to, "the directory to write")
      ->type_name("DIR")
      ->group(group);
  command
      ->add_flag("--force", flags->force, "replace the model at --mlx-path, and the sensitivities")
      ->group(group);
  command
      ->add_option("--sensitivities", flags->sensitivities,
                   "a file of them, mlx-lm's too; without it they are measured and written beside "
                   "--mlx-path as MODEL_sensitivities.json")
      ->type_name("FILE")
      ->group(group);
  flags->finite.add_to(*command, group);
  add_packing(*command, *flags);
  flags->rows.add_to(*command, "--data-path,--data", "train is taken, or else valid");
  command
      ->add_option("--seed", flags->seed,
                   "as mlx-lm has it; nothing is drawn here, it does nothing")
      ->check(whole_number(0, std::numeric_limits<std::uint32_t>::max()))
      ->type_name("N")
      ->group("Data");
  command->add_flag("--report-ppl", flags->report, "perplexity before and after, on --data-path")
      ->group("Output");
  command
      ->add_flag("--grad-checkpoint", flags->checkpoint,
                 "less memory, more time: layers are computed again on the way back")
      ->group("Data");
  command->callback([&globals, flags] { dynamic_quant(globals, *flags); });
}

}  // namespace mlxtape::cli
