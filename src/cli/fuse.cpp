// fuse: a model with its adapters in its weights.
#include <CLI/CLI.hpp>

#include <memory>

#include "command.h"
#include "mlxtape/models/lora.h"
#include "mlxtape/models/size.h"
#include "model_flags.h"
#include "output.h"
#include "output_paths.h"

namespace mlxtape::cli {

namespace {

using formats::Json;

struct Flags {
  std::string model = "mlx_model", to = "fused_model", adapters = "adapters";
  bool dequantize = false, force = false;
  FiniteFlag finite;
};

void fuse(const Globals& globals, const Flags& flags) {
  expect_model(flags.model);
  expect_apart({"--save-path", flags.to},
               {{"--model", flags.model}, {"--adapter-path", flags.adapters}});
  expect_place(flags.to, flags.force, "--save-path", flags.model);
  const auto encoder = globals.device_or_cpu().make_encoder();
  const models::Model model = load_model(flags.model, flags.adapters, *encoder, globals);
  const bool was_finite = flags.finite.expect(*encoder, model, flags.model + " with its adapters");
  models::FuseOptions options;
  options.dequantize = flags.dequantize;
  const models::Model fused = models::fuse_lora(*encoder, model, options);
  encoder->commit_and_wait();
  if (was_finite)
    flags.finite.expect(*encoder, fused, flags.model + ", fused",
                        "they are out of range for the weights' type");
  save_result(fused, flags.to, flags.model, flags.force);

  const std::size_t bytes = models::weight_bytes(fused);
  const double bits = models::bits_per_weight(fused);
  const auto modules = static_cast<std::int64_t>(models::lora_parameters(model).size() / 2);
  if (globals.json) {
    return print_json(Json::Object{{"model", flags.model},
                                   {"adapter_path", flags.adapters},
                                   {"save_path", flags.to},
                                   {"modules", modules},
                                   {"bits_per_weight", bits},
                                   {"bytes", static_cast<std::int64_t>(bytes)}});
  }
  print_result(flags.to + ": " + std::to_string(modules) + " modules fused, " + fixed(bits, 3) +
               " bits per weight, " + human_bytes(static_cast<double>(bytes)) + "\n");
}

}  // namespace

void add_fuse(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "fuse",
      "fuse LoRA adapters into the weights; quantised weights are requantised, or dequantised with "
      "--dequantize. Here --device auto means the CPU.",
      "Example:\n"
      "  mlxtape fuse --model my-model --adapter-path adapters --save-path fused");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  const char* const group = "Model";
  command->add_option("--model", flags->model, "the model's directory, in MLX format")
      ->type_name("DIR")
      ->group(group);
  command->add_option("--adapter-path", flags->adapters, "the folder of the adapters")
      ->type_name("DIR")
      ->group(group);
  command->add_option("--save-path", flags->to, "the directory to write")
      ->type_name("DIR")
      ->group(group);
  command
      ->add_flag("--force", flags->force,
                 "overwrite the model at --save-path, once the new one is complete")
      ->group(group);
  command
      ->add_flag("-d,--dequantize", flags->dequantize, "dequantise the weights of the whole model")
      ->group(group);
  flags->finite.add_to(*command, group);
  command->callback([&globals, flags] { fuse(globals, *flags); });
}

}  // namespace mlxtape::cli
