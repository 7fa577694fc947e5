// bench: what the ops, a training step, a model's layers and a whole model take on this machine.
#include <CLI/CLI.hpp>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>

#include "bench.h"
#include "command.h"
#include "commit.h"

namespace mlxtape::cli {

namespace {

struct Flags {
  bench::BenchConfig config;
  bench::StepConfig step;
  bench::LayersConfig layers;
  bench::ModelConfig model;
  std::string dtype = "f32";
  bool one_by_one = false;
  double seconds_of_all = 0.1;  // for each row where all is measured
  std::string folder;           // of all: where its files go; empty: nowhere
};

CLI::Option* add_size(CLI::App& command, const char* name, std::int64_t& size, const char* what) {
  return command.add_option(name, size, what)->check(whole_number(1, 1U << 20U))->type_name("N");
}

void add_dtype(CLI::App& command, Flags& flags) {
  command
      .add_option("--dtype", flags.dtype,
                  "dtype of the parameters; bench step keeps f32 master copies of bf16 ones")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->type_name("TYPE");
}

void add_model_name(CLI::App& command, bench::ModelConfig& config) {
  command
      .add_option("--model", config.model,
                  "a model directory, or a built-in shape with random weights: qwen3-0.6b, "
                  "qwen3-next-0.3b or "
                  "qwen3-next-80b-period")
      ->type_name("DIR");
}

void add_seconds(CLI::App& command, double& seconds) {
  command.add_option("--seconds", seconds, "seconds spent on each row, for each library compared")
      ->type_name("S")
      ->check(number(0.001, 60));
}

// What all of them take.
void add_measuring(CLI::App& command, Flags& flags) {
  command.add_option("--json", flags.config.json_path, "also write the rows to this file")
      ->type_name("FILE");
  add_seconds(command, flags.config.seconds);
  command.add_flag("--no-overlap", flags.one_by_one,
                   "CUDA: start each kernel only when the previous one has finished");
}

Device& device_of(const Globals& globals, Flags& flags) {
  Device& device = globals.device_or_cpu();
  device.set_overlap(!flags.one_by_one);
  flags.step.dtype = flags.layers.dtype = flags.model.dtype =
      flags.dtype == "f32" ? DType::kF32 : DType::kBF16;
  flags.config.command = globals.command_line;
  return device;
}

void add_ops(CLI::App& bench, const Globals& globals, const std::shared_ptr<Flags>& flags) {
  CLI::App* ops = add_command(
      bench, "ops", "benchmark every op: time, bandwidth, percentage of memory bandwidth.",
      "Example:\n  mlxtape bench ops --filter 'softmax bwd .* bf16'");
  ops->add_option("--filter", flags->config.filter,
                  "only rows that match this regular expression, e.g. 'softmax bwd .* bf16'")
      ->type_name("REGEX");
  ops->add_option(
         "--peers", flags->config.peers_script,
         "script that measures other libraries too: bench/peers/cpu_peers.py or cuda_peers.py")
      ->type_name("FILE");
  ops->add_option("--python", flags->config.python,
                  "Python interpreter for --peers, with those libraries installed")
      ->type_name("FILE");
  add_measuring(*ops, *flags);
  ops->callback(
      [&globals, flags] { bench::run_ops(device_of(globals, *flags), flags->config, std::cout); });
}

void add_step(CLI::App& bench, const Globals& globals, const std::shared_ptr<Flags>& flags) {
  CLI::App* step = add_command(
      bench, "step", "benchmark a whole training step: time, the host's share of it, memory.",
      "Example:\n  mlxtape bench step --layers 4 --dtype bf16");
  bench::StepConfig& model = flags->step;
  add_size(*step, "--layers", model.layers, "number of layers");
  add_size(*step, "--width", model.width, "width of the hidden state");
  add_size(*step, "--hidden", model.hidden, "inner width of each layer");
  add_size(*step, "--vocab", model.vocab, "vocabulary size");
  add_size(*step, "--tokens", model.tokens, "tokens per step");
  add_dtype(*step, *flags);
  add_measuring(*step, *flags);
  step->callback([&globals, flags] {
    bench::run_step(device_of(globals, *flags), flags->config, flags->step, std::cout);
  });
}

void add_layers(CLI::App& bench, const Globals& globals, const std::shared_ptr<Flags>& flags) {
  CLI::App* layers = add_command(
      bench, "layers", "benchmark Qwen3-Next's blocks, forward and backward: time and memory.",
      "Example:\n  mlxtape bench layers --tokens 1024");
  add_size(*layers, "--tokens", flags->layers.tokens, "tokens per sequence");
  add_size(*layers, "--experts", flags->layers.experts, "number of experts; the model has 512");
  add_dtype(*layers, *flags);
  add_measuring(*layers, *flags);
  layers->callback([&globals, flags] {
    bench::run_layers(device_of(globals, *flags), flags->config, flags->layers, std::cout);
  });
}

void add_model(CLI::App& bench, const Globals& globals, const std::shared_ptr<Flags>& flags) {
  CLI::App* model = add_command(
      bench, "model",
      "benchmark a whole model: training, prompt processing, decoding: time and memory.",
      "Example:\n  mlxtape bench model --model my-model --bits 4 --no-train");
  bench::ModelConfig& config = flags->model;
  add_size(*model, "--tokens", config.tokens, "tokens per training step, and of the prompt");
  add_size(*model, "--chunk", config.chunk, "prompt tokens processed at a time");
  add_size(*model, "--context", config.context, "tokens in the cache before decoding starts");
  add_size(*model, "--batch", config.batch, "number of sequences at once");
  add_model_name(*model, config);
  model->add_option("--bits", config.bits, "quantise the weights to this many bits; 0: do not")
      ->check(CLI::IsMember({2, 3, 4, 5, 6, 8}))
      ->type_name("N");
  model->add_option("--save", config.save, "also write the model to this directory")
      ->type_name("DIR");
  model->add_flag("!--no-train", config.train, "skip the training step");
  add_dtype(*model, *flags);
  add_measuring(*model, *flags);
  model->callback([&globals, flags] {
    bench::run_model(device_of(globals, *flags), flags->config, flags->model, std::cout);
  });
}

// The table of ops and the table of a model, as it is and in 4 bits.
void run_all(const Globals& globals, Flags& flags) {
  Device& device = device_of(globals, flags);
  bench::BenchConfig config = flags.config;
  config.seconds = flags.seconds_of_all;
  if (!flags.folder.empty()) {
    std::error_code failed;
    std::filesystem::create_directories(flags.folder, failed);
    if (failed) {
      throw Error(Errc::kIo,
                  "bench: " + flags.folder + ": cannot create this folder: " + failed.message());
    }
    for (const char* name : {"ops.json", "model.json", "model-4bit.json"}) {
      bench::expect_report_or_none(flags.folder + "/" + name);
    }
  }
  const auto write_to = [&](const char* name) {
    if (!flags.folder.empty()) config.json_path = flags.folder + "/" + name;
  };
  write_to("ops.json");
  bench::run_ops(device, config, std::cout);
  bench::ModelConfig model;
  model.model = flags.model.model;
  model.dtype = DType::kBF16;  // of random weights
  for (const int bits : {0, 4}) {
    model.bits = bits;
    model.train = bits == 0;
    write_to(bits == 0 ? "model.json" : "model-4bit.json");
    std::cout << "\n";
    bench::run_model(device, config, model, std::cout);
  }
}

}  // namespace

void add_bench(CLI::App& app, const Globals& globals) {
  CLI::App* bench = add_command(app, "bench",
                                "benchmark this machine: every op, then a whole model. Each "
                                "subcommand measures one part. Here --device auto means the CPU.",
                                "Examples:\n  mlxtape bench --out results\n  mlxtape bench ops "
                                "--filter softmax --device cuda");
  bench->group("This machine");
  bench->require_subcommand(0, 1);
  const auto flags = std::make_shared<Flags>();
  flags->config.commit = MLXTAPE_COMMIT;
  bench
      ->add_option("--filter", flags->config.filter,
                   "only ops whose row matches this regular expression, e.g. 'bwd .* bf16'")
      ->type_name("REGEX");
  add_model_name(*bench, flags->model);
  add_seconds(*bench, flags->seconds_of_all);
  bench
      ->add_option("--out", flags->folder,
                   "also write the rows to ops.json, model.json and model-4bit.json in this folder")
      ->type_name("DIR");
  add_ops(*bench, globals, flags);
  add_step(*bench, globals, flags);
  add_layers(*bench, globals, flags);
  add_model(*bench, globals, flags);
  bench->callback([bench, &globals, flags] {
    if (bench->get_subcommands().empty()) run_all(globals, *flags);
  });
}

}  // namespace mlxtape::cli
