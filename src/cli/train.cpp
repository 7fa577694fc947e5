// train: every weight of a model, from scratch or from an existing one.
#include <CLI/CLI.hpp>

#include <filesystem>

#include "command.h"
#include "mlxtape/base/files.h"
#include "mlxtape/models/quantize.h"
#include "mlxtape/models/size.h"
#include "model_flags.h"
#include "output.h"
#include "output_paths.h"
#include "train_flags.h"

namespace mlxtape::cli {

namespace {

namespace fs = std::filesystem;
using formats::Json;

struct Flags {
  std::string model, config, out, dtype;
  bool from_scratch = false, force = false;
  LoopFlags loop{{}, jobs::train_usual()};
  StateFlags state;
  const CLI::Option* rate = nullptr;
};

// Where config.json and the tokenizer are.
std::string source_of(const Flags& flags) {
  if (flags.model.empty() == flags.config.empty()) {
    called_wrongly(
        "use either --model (an existing model) or --config with --from-scratch (a new one)");
  }
  if (!flags.model.empty()) {
    expect_model(flags.model);
    return flags.model;
  }
  if (!flags.from_scratch) {
    called_wrongly("--config describes a model without weights: add --from-scratch");
  }
  std::error_code reason;
  if (!fs::is_regular_file(flags.config, reason)) {
    throw Error(Errc::kIo, flags.config + ": no such file; --config must be a config.json with " +
                               "tokenizer.json next to it");
  }
  const fs::path folder = fs::path(flags.config).parent_path();
  return folder.empty() ? "." : folder.string();
}

std::optional<DType> type_named(const std::string& name) {
  if (name == "float32") return DType::kF32;
  if (name == "float16") return DType::kF16;
  if (name == "bfloat16") return DType::kBF16;
  return std::nullopt;
}

models::Model new_model(CommandEncoder& encoder, const Flags& flags, const std::string& source) {
  const std::string file = flags.config.empty() ? source + "/config.json" : flags.config;
  Json json = Json::parse(read_whole(file, "train"), file);
  for (const char* key : {"quantization", "quantization_config"}) {
    if (json.find(key) != nullptr) json.erase(key);  // there are no codes to begin with
  }
  const models::Config config = models::Config::parse(json, file);
  std::optional<DType> type = type_named(flags.dtype);
  const Json* said = json.find("torch_dtype");
  if (!type && said != nullptr && said->is_string()) type = type_named(said->string());
  const DType dtype = type.value_or(DType::kF32);
  models::Model model = models::random_model(config, encoder, dtype, flags.loop.job.batches.seed);
  return flags.dtype.empty() ? model : models::cast_model(encoder, model, dtype);
}

models::Model model_of(CommandEncoder& encoder, const Flags& flags, const std::string& source,
                       const Globals& globals) {
  if (flags.from_scratch) return new_model(encoder, flags, source);
  models::Model model = load_model(flags.model, encoder, globals);
  if (const auto type = type_named(flags.dtype)) model = models::cast_model(encoder, model, *type);
  return model;
}

void tell(const Globals& globals, const Flags& flags, const models::Model& model,
          const jobs::TrainResult& result) {
  Device& device = model.device();
  const jobs::FitResult& fit = result.fit;
  if (globals.json) {
    Json::Object object{{"out", flags.out},
                        {"parameters", models::parameter_count(model.config)},
                        {"step_of_weights", fit.held_step}};
    for (auto& each : fit_json(fit, device)) object.push_back(std::move(each));
    return print_json(object);
  }
  print_result(fit_text(fit, device) + flags.out + ": " +
               human_count(static_cast<double>(models::parameter_count(model.config))) +
               " parameters, weights from step " + std::to_string(fit.held_step) + "\n");
}

void train(const Globals& globals, Flags flags) {
  const std::string source = source_of(flags);
  if (flags.from_scratch && flags.rate->count() == 0) {
    flags.loop.job.fit.learning_rate = jobs::kRateFromScratch;
  }
  jobs::TrainOptions options = flags.loop.options();
  const std::vector<Place> inputs = {
      {"--model", flags.model}, {"--config", flags.config}, {"--data", flags.loop.data}};
  expect_apart({"--out", flags.out}, inputs);
  expect_place(flags.out, flags.force, "--out", source);
  flags.state.expect({"--out", flags.out}, inputs, globals);
  options.fit.folder = flags.state.folder;
  options.fit.resume = flags.state.resume;

  const auto tokenizer = formats::Tokenizer::from_directory(source);
  const jobs::DataSet data = flags.loop.read(tokenizer);
  Device& device = globals.device();
  const auto encoder = device.make_encoder();
  const models::Model model = model_of(*encoder, flags, source, globals);
  jobs::TrainResult result;
  with_state(flags.state, globals, [&] {
    Watch watch("train", options.fit.iterations, globals);
    result = jobs::train(*encoder, model, data, options, watch.hooks());
  });
  if (result.fit.stopped) {
    end_interrupted(result.fit, options.fit.iterations, flags.state, device, globals);
  }
  with_state(flags.state, globals, [&] { save_result(model, flags.out, source, flags.force); });
  if (!flags.state.keep) flags.state.run().remove();
  tell(globals, flags, model, result);
}

}  // namespace

void add_train(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "train",
      "train every weight of a model, from scratch or from an existing model, on plain text, "
      "prompt/completion pairs or conversations. In quantised weights the scales and biases are "
      "trained. The default optimiser is AdamW. The weights with the lowest validation loss are "
      "written, or the last ones if there is no validation data.",
      "Examples:\n"
      "  mlxtape train --config examples/bytes/config.json --from-scratch --data my-data --out "
      "new\n"
      "  mlxtape train --model my-model --data my-data --out tuned --iters 500 --schedule cosine\n"
      "\n"
      "After Ctrl-C, a full disk or a crash, the same command with --resume continues from the "
      "last\n"
      "checkpoint, with the same bits as if it had never stopped.");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  const char* const group = "Model";
  command->add_option("--model", flags->model, "the model to start from, in MLX format")
      ->type_name("DIR")
      ->group(group);
  command
      ->add_option("--config", flags->config,
                   "config.json of a new model, with tokenizer.json next to it")
      ->type_name("FILE")
      ->group(group);
  command
      ->add_flag("--from-scratch", flags->from_scratch,
                 "start with random weights; --learning-rate then defaults to 1e-3")
      ->group(group);
  command->add_option("--out", flags->out, "the model directory to write, in MLX format")
      ->required()
      ->type_name("DIR")
      ->group(group);
  command
      ->add_flag("--force", flags->force,
                 "overwrite the model at --out, once the new one is complete")
      ->group(group);
  command
      ->add_option("--dtype", flags->dtype,
                   "dtype of the weights; 16-bit ones have float32 master copies [the model's, or "
                   "float32 if config.json names none]")
      ->check(CLI::IsMember({"float16", "bfloat16", "float32"}))
      ->type_name("TYPE")
      ->group(group);
  flags->rate = flags->loop.add_to(*command);
  flags->state.add_to(*command);
  command->callback([&globals, flags] { train(globals, *flags); });
}

}  // namespace mlxtape::cli
