// lora: adapters beside a model's weights are trained.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "command.h"
#include "lr_schedule.h"
#include "mlxtape/base/files.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/jobs/lora.h"
#include "model_flags.h"
#include "output.h"
#include "train_flags.h"

namespace mlxtape::cli {

namespace {

namespace fs = std::filesystem;
using formats::Json;

struct Flags {
  std::string model, adapters = "adapters", kind = "lora", from, config;
  bool train = false, test = false, force = false, only_last = false;
  std::int64_t test_batches = 500;
  jobs::LoraJobOptions job;
  LoopFlags loop{job.train, {}};
  StateFlags state;
};

// ---- --config ----

// null, false, 0, nothing in it: a setting of mlx-lm's that asks for nothing.
bool says_nothing(const Json& value) {
  if (value.is_null() || value == Json(false) || value == Json(0) || value == Json("")) return true;
  if (value.is_array()) return value.array().empty();
  if (!value.is_object()) return false;
  return std::all_of(value.object().begin(), value.object().end(),
                     [](const auto& each) { return says_nothing(each.second); });
}

std::string text_of(const Json& value) { return value.is_string() ? value.string() : value.dump(); }

// What the file says of a flag, where the command line says nothing of it.
void set_flag(CLI::App& command, const std::string& flag, const std::string& key, const Json& value,
              const std::string& file) {
  if (value.is_null()) return;
  CLI::Option* option = command.get_option_no_throw(flag);
  if (option == nullptr) {
    if (says_nothing(value)) return;
    throw Error(Errc::kIo,
                file + ": " + shown(key) + ": unknown setting, got " + shown(value.dump()));
  }
  if (option->count() > 0) return;
  if (value.is_object()) throw Error(Errc::kIo, file + ": " + key + " must not be an object");
  if (value.is_array()) {
    for (const Json& each : value.array()) option->add_result(text_of(each));
  } else {
    option->add_result(text_of(value));
  }
  option->run_callback();
}

// "optimizer_config": {"adamw": {"betas": [0.9, 0.99], "weight_decay": 0.1}, ...}: of the one that is chosen.
void apply_optimizer_config(CLI::App& command, const Json& json, const std::string& optimiser,
                            const std::string& file) {
  const Json* all = json.find("optimizer_config");
  const Json* own = all != nullptr && all->is_object() ? all->find(optimiser) : nullptr;
  if (own == nullptr || !own->is_object()) return;
  for (const auto& [key, value] : own->object()) {
    const std::string path = "optimizer_config." + optimiser + "." + key;
    if (key != "betas") {
      std::string flag = "--" + key;
      std::replace(flag.begin(), flag.end(), '_', '-');
      set_flag(command, flag, path, value, file);
      continue;
    }
    if (!value.is_array() || value.array().size() != 2) {
      throw Error(Errc::kIo,
                  file + ": " + path + " must be two numbers, got " + shown(value.dump()));
    }
    set_flag(command, "--beta1", path, value.array()[0], file);
    set_flag(command, "--beta2", path, value.array()[1], file);
  }
}

// A flag of the command line and a file's schedule: whichever won, somebody would be surprised.
void expect_no_rate(const CLI::App& command, const std::string& file) {
  for (const char* flag : {"--learning-rate", "--schedule", "--warmup", "--final-share"}) {
    if (command.get_option(flag)->count() == 0) continue;
    called_wrongly(std::string(flag) + " and lr_schedule of " + file + " exclude each other");
  }
}

void apply_config(CLI::App& command, const std::string& file, const std::string& optimiser,
                  jobs::Schedule& schedule) {
  for (const char* ending : {".yaml", ".yml"}) {
    if (!file.ends_with(ending)) continue;
    throw Error(Errc::kIo, file +
                               ": YAML is not supported; write the same keys as JSON to a .json "
                               "file, or use flags");
  }
  const std::string text = read_whole(file, "--config");
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos || text[first] != '{') {
    throw Error(Errc::kIo, file +
                               ": must be a JSON object; YAML is not read: write the same keys as "
                               "JSON, or use flags");
  }
  const Json json = Json::parse(text, file);
  if (const Json* found = json.find("lr_schedule"); found != nullptr && !says_nothing(*found)) {
    expect_no_rate(command, file);
    schedule = schedule_of(*found, file);
  }
  // The optimizer first: of optimizer_config only its own part counts.
  if (const Json* name = json.find("optimizer")) {
    set_flag(command, "--optimizer", "optimizer", *name, file);
  }
  apply_optimizer_config(command, json, optimiser, file);
  for (const auto& [key, value] : json.object()) {
    if (key == "config" || key == "optimizer_config" || key == "lr_schedule") continue;
    if (key == "lora_parameters" && value.is_object()) {
      for (const auto& [inner, number] : value.object()) {
        set_flag(command, inner == "keys" ? "--lora-keys" : "--" + inner, key + "." + inner, number,
                 file);
      }
      continue;
    }
    std::string flag = "--" + key;
    std::replace(flag.begin(), flag.end(), '_', '-');
    set_flag(command, flag, key, value, file);
  }
}

// ---- the run ----

void expect_flags(const Flags& flags) {
  if (flags.model.empty()) called_wrongly("--model is required");
  if (!flags.train && !flags.test) called_wrongly("--train, --test or both are required");
  if (flags.kind == "full") {
    called_wrongly("--fine-tune-type full is a separate command: use mlxtape train");
  }
  if (flags.kind == "dora") {
    called_wrongly("DoRA is not supported; use lora, or mlxtape train for all weights");
  }
}

bool is_adapter_config(const std::string& path) {
  try {
    return Json::parse(read_whole(path, "lora"), path).find("lora_parameters") != nullptr;
  } catch (const Error&) {
    return false;
  }
}

// What is there must not be written over, and is not by going on.
void expect_adapters_place(Flags& flags, const Globals& globals) {
  const Place out{"--adapter-path", flags.adapters};
  expect_apart(out, {{"--model", flags.model},
                     {"--data", flags.loop.data},
                     {"--resume-adapter-file", flags.from}});
  expect_directory_or_none(flags.adapters);
  flags.state.folder = flags.adapters;
  flags.state.expect(out, {}, globals);
  std::error_code reason;
  const jobs::RunFolder run(without_slash(flags.adapters));
  const std::string config = run.adapter_config();
  if (fs::exists(config, reason) && !is_adapter_config(config)) {
    throw Error(Errc::kIo, config +
                               ": already exists and is not an adapter file, so --force does not " +
                               "overwrite it; use another --adapter-path");
  }
  const std::string file = run.result();
  if (!file.empty() && !run.has_state() && !flags.force) {
    throw Error(Errc::kIo, file +
                               ": already exists; use --force to overwrite, or another "
                               "--adapter-path");
  }
  const std::string strange = run.has_state() ? "" : run.strange_result();
  if (!strange.empty()) {
    throw Error(Errc::kIo, strange +
                               ": already exists and is not an adapter file, so --force does not " +
                               "overwrite it; use another --adapter-path");
  }
}

struct Test {
  double loss = 0;
  std::int64_t tokens = 0;
};

Test test(CommandEncoder& encoder, const models::Model& model, const jobs::DataSet& data,
          const jobs::TrainOptions& options, const Flags& flags) {
  jobs::check_tokens(data.test, model.config.plan.vocabulary);
  const auto batches = jobs::validation_batches(data.test, options.batches, flags.test_batches);
  Test result;
  for (const jobs::Batch& batch : batches) result.tokens += batch.counted;
  result.loss = jobs::mean_loss(encoder, model, batches);
  return result;
}

void tell(const Globals& globals, const Flags& flags, const jobs::TrainResult* trained,
          const Test* tested, Device& device) {
  if (globals.json) {
    Json::Object object{{"model", flags.model}, {"adapter_path", flags.adapters}};
    if (trained != nullptr) {
      object.emplace_back("step_of_adapters", trained->fit.held_step);
      for (auto& each : fit_json(trained->fit, device)) object.push_back(std::move(each));
    }
    if (tested != nullptr) {
      object.emplace_back("test_loss", tested->loss);
      object.emplace_back("test_perplexity", std::exp(tested->loss));
      object.emplace_back("test_tokens", tested->tokens);
    }
    return print_json(object);
  }
  if (trained != nullptr) {
    print_result(fit_text(trained->fit, device) + flags.adapters + ": adapters from step " +
                 std::to_string(trained->fit.held_step) + "\n");
  }
  if (tested != nullptr) {
    print("test loss " + fixed(tested->loss, 4) + ", perplexity " +
          fixed(std::exp(tested->loss), 3) + ", on " + std::to_string(tested->tokens) +
          " tokens\n");
  }
}

void lora(const Globals& globals, Flags flags) {
  expect_flags(flags);
  jobs::LoraJobOptions options = flags.job;
  options.train = flags.loop.options();
  options.seed = options.train.batches.seed;
  options.keep_saves = !flags.only_last;
  expect_model(flags.model);
  if (flags.train) expect_adapters_place(flags, globals);
  options.train.fit.folder = flags.adapters;
  options.train.fit.resume = flags.state.resume;

  const auto tokenizer = formats::Tokenizer::from_directory(flags.model);
  const jobs::DataSet data = flags.loop.read(tokenizer);
  if (flags.test && data.test.empty()) {
    throw Error(Errc::kIo,
                flags.loop.data + ": --test needs samples in test.jsonl or test.txt, got none");
  }
  Device& device = globals.device();
  const auto encoder = device.make_encoder();
  models::Model model = load_model(flags.model, *encoder, globals);
  jobs::TrainResult trained;
  if (flags.train) {
    if (!flags.from.empty()) {
      models::load_adapter_weights(*encoder, model, flags.from, flags.job.lora);
    }
    const jobs::RunFolder run(flags.adapters);
    if (flags.force && !run.has_state()) {  // a link, or of a run that is no more
      std::error_code ignored;
      fs::remove(run.best(), ignored);
    }
    with_state(flags.state, globals, [&] {
      Watch watch("lora", options.train.fit.iterations, globals);
      trained = jobs::lora(*encoder, model, data, options, watch.hooks());
    });
    if (trained.fit.stopped) {
      end_interrupted(trained.fit, options.train.fit.iterations, flags.state, device, globals);
    }
    if (!flags.state.keep) flags.state.run().remove();
  } else {
    models::load_adapters(*encoder, model, flags.adapters);
  }
  Test tested;
  if (flags.test) tested = test(*encoder, model, data, options.train, flags);
  tell(globals, flags, flags.train ? &trained : nullptr, flags.test ? &tested : nullptr, device);
}

void add_adapter_flags(CLI::App& command, Flags& flags) {
  const char* const group = "Adapters";
  command
      .add_option("--adapter-path", flags.adapters,
                  "folder to write the adapters to; with --test alone, to read them from")
      ->type_name("DIR")
      ->group(group);
  command.add_flag("--force", flags.force, "overwrite existing adapters (mlx-lm always does)")
      ->group(group);
  command
      .add_flag("--only-last", flags.only_last,
                "write adapters.safetensors only, without a numbered copy of each save")
      ->group(group);
  command
      .add_option("--fine-tune-type", flags.kind,
                  "lora; for full use mlxtape train; DoRA is not supported")
      ->check(CLI::IsMember({"lora", "dora", "full"}))
      ->type_name("TYPE")
      ->group(group);
  command.add_option("--rank", flags.job.lora.rank, "rank of the adapters")
      ->check(whole_number(1, 1U << 20U))
      ->type_name("N")
      ->group(group);
  command
      .add_option("--scale", flags.job.lora.scale,
                  "factor that the adapters' output is multiplied by; not divided by the rank")
      ->check(number(std::numeric_limits<float>::lowest(), std::numeric_limits<float>::max()))
      ->type_name("X")
      ->group(group);
  command
      .add_option("--dropout", flags.job.lora.dropout,
                  "dropout probability of the adapters' inputs")
      ->check(number(0, 0.999))
      ->type_name("X")
      ->group(group);
  command
      .add_option("--num-layers", flags.job.lora.num_layers,
                  "number of layers to adapt, counted from the last; -1: all")
      ->check(whole_number(-1, 1U << 20U))
      ->type_name("N")
      ->group(group);
  command
      .add_option(
          "--lora-keys", flags.job.lora.keys,
          "modules to adapt, by the ends of their paths, e.g. self_attn.q_proj [every linear layer "
          "and expert of those layers]")
      ->allow_extra_args(false)
      ->delimiter(',')
      ->type_name("KEY")
      ->group(group);
  command
      .add_option("--resume-adapter-file", flags.from,
                  "adapters to start from, of the same rank and keys; to resume a run use --resume")
      ->type_name("FILE")
      ->group(group);
}

}  // namespace

void add_lora(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "lora",
      "train LoRA adapters on a model with plain or quantised weights; adapters are "
      "interchangeable "
      "with mlx-lm's. The default optimiser is Adam without bias correction, as in mlx-lm. If "
      "--data "
      "has valid, the adapters with the lowest validation loss are kept (mlx-lm keeps the last).",
      "Examples:\n"
      "  mlxtape lora --model my-model --train --data my-data --iters 600\n"
      "  mlxtape lora -c lora.json --test\n"
      "  mlxtape generate --model my-model --adapter-path adapters -p \"Hello\"\n"
      "\n"
      "The file of -c is JSON with the keys of mlx-lm's YAML:\n"
      "  {\"model\": \"my-model\", \"train\": true, \"lora_parameters\": {\"rank\": 8, \"scale\": "
      "20.0}}\n"
      "Flags on the command line take precedence. \"lr_schedule\" may be cosine_decay,\n"
      "linear_schedule, exponential_decay or step_decay.");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  command->add_option("--model", flags->model, "the model's directory, in MLX format")
      ->type_name("DIR")
      ->group("Model");
  command->add_option("-c,--config", flags->config, "settings as JSON (YAML is not supported)")
      ->type_name("FILE")
      ->group("Model");
  command->add_flag("--train", flags->train, "train adapters")->group("Model");
  command
      ->add_flag("--test", flags->test, "compute the loss on --data's test set, after any training")
      ->group("Model");
  command->add_option("--test-batches", flags->test_batches, "number of test batches; -1: all")
      ->check(whole_number(-1, 1U << 30U))
      ->type_name("N")
      ->group("Model");
  add_adapter_flags(*command, *flags);
  flags->loop.add_to(*command);
  add_hidden_names(*command, "--rank", "--lora-rank");
  add_hidden_names(*command, "--scale", "--lora-scale");
  add_hidden_names(*command, "--dropout", "--lora-dropout");
  flags->state.add_to(*command, "--adapter-path");
  command->callback([&globals, flags, command] {
    if (!flags->config.empty())
      apply_config(*command, flags->config, flags->loop.optimiser.name(),
                   flags->loop.job.fit.schedule);
    lora(globals, *flags);
  });
}

}  // namespace mlxtape::cli
