// The mlxtape program: flags -> a job's config -> run. Results go to stdout, errors to stderr;
// exit 0 done, 1 failed, 2 called wrongly.
#include <CLI/CLI.hpp>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <optional>
#include <set>

#include "backends/cpu/targets.h"
#include "commit.h"
#include "core/op_kernels.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/source_kernel.h"
#include "mlxtape/core/threads.h"
#ifdef MLXTAPE_HAS_CASES
#include <gtest/gtest.h>

#include "bench.h"
#endif

namespace {

using namespace mlxtape;

void info() {
  std::printf("mlxtape %s (%s)\n", MLXTAPE_VERSION, MLXTAPE_COMMIT);
  for (Device* device : Device::all()) {
    const bool is_cpu = device->backend() == Backend::kCpu;
    std::printf("%s\n  %.1f GiB memory, %d %s", device->name().c_str(),
                static_cast<double>(device->limits().memory_bytes) / (1024.0 * 1024 * 1024),
                device->limits().compute_units, is_cpu ? "cores" : "multiprocessors");
    if (is_cpu) {
      std::printf(", %d threads used, instruction sets:", threads());
      for (const std::string& target : cpu::available_targets()) std::printf(" %s", target.c_str());
    }
    std::printf("\n  %zu kernels\n", KernelRegistry::instance().names(device->backend()).size());
    for (const auto& [what, value] : device->details()) {
      std::printf("  %s: %s\n", what.c_str(), value.c_str());
    }
  }
  for (const AbsentDevice& absent : Device::absent()) {
    std::printf("%s: none, %s\n", name_of(absent.backend), absent.reason.c_str());
  }
}

// A line per backend, op and kernel: "cpu softmax softmax_fwd f16 bf16 f32". Kernels of backends in
// the build, whether or not the machine has the device.
void list_kernels() {
  for (const OpKernels& of_op : op_kernels()) {
    KernelRegistry registry;
    of_op.add(registry);
    std::map<std::string, std::set<DType>> types;
    for (const std::string& name : registry.names(of_op.backend)) {
      const std::size_t cut = name.rfind('_');
      const std::optional<DType> type = dtype_from_name(name.substr(cut + 1));
      if (!type) throw Error(Errc::kArgument, "kernels: a name must end in its type, got " + name);
      types[name.substr(0, cut)].insert(*type);
    }
    for (const auto& [kernel, of_kernel] : types) {
      std::printf("%s %s %s", name_of(of_op.backend), of_op.op, kernel.c_str());
      for (const DType type : of_kernel) std::printf(" %s", name_of(type));
      std::printf("\n");
    }
  }
}

#ifdef MLXTAPE_HAS_CASES
int selftest(const std::string& filter) {
  testing::InitGoogleTest();
  testing::GTEST_FLAG(filter) = filter;
  const int status = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    throw Error(Errc::kArgument, "selftest: the filter must match a test, got '" + filter + "'");
  }
  return status;
}
#endif

// Where kernels from source are kept between runs; empty where the user has no such place.
std::string cache_folder() {
  const auto below = [](const char* variable, const char* rest) {
    const char* value = std::getenv(variable);
    return value != nullptr && *value != '\0' ? std::string(value) + rest : std::string();
  };
  const std::string folder = below("XDG_CACHE_HOME", "/mlxtape");
  return folder.empty() ? below("HOME", "/.cache/mlxtape") : folder;
}

constexpr int kCalledWrongly = 2;

int run(int argc, char** argv) {
  CLI::App app{"mlxtape: trains, distils, quantises and runs MLX-format language models."};
  app.require_subcommand(0, 1);
  app.allow_extras();  // reported below, by name
  app.fallthrough();   // global flags may also follow the command
  app.set_version_flag("--version", std::string(MLXTAPE_VERSION) + " (" + MLXTAPE_COMMIT + ")");
  int thread_count = 0;
  std::string target;
  app.add_option("--threads", thread_count, "CPU threads; 0 = one per core")
      ->check(CLI::Range(0, 1024));
  app.add_option("--cpu-target", target, "use no better instruction set than this (see info)");

  CLI::App* info_command = app.add_subcommand("info", "what this machine and this build have");
  CLI::App* kernels_command =
      app.add_subcommand("kernels", "every kernel: backend, op, name, types");
#ifdef MLXTAPE_HAS_CASES
  CLI::App* bench_command = app.add_subcommand("bench", "measure this machine");
  bench_command->require_subcommand(0, 1);
  CLI::App* bench_ops = bench_command->add_subcommand(
      "ops", "every operation: time, bandwidth, share of what the memory allows");
  bench::BenchConfig config;
  config.commit = MLXTAPE_COMMIT;
  for (int i = 0; i < argc; ++i) config.command += (i == 0 ? "" : " ") + std::string(argv[i]);
  CLI::App* bench_step = bench_command->add_subcommand(
      "step", "a whole training step: time, the host's share of it, memory");
  bench::StepConfig step;
  bench_step->add_option("--layers", step.layers, "of the model")->capture_default_str();
  bench_step->add_option("--width", step.width, "of the stream through its layers")
      ->capture_default_str();
  bench_step->add_option("--hidden", step.hidden, "width inside each layer")->capture_default_str();
  bench_step->add_option("--vocab", step.vocab, "tokens it knows")->capture_default_str();
  bench_step->add_option("--tokens", step.tokens, "tokens of a step")->capture_default_str();
  CLI::App* bench_layers = bench_command->add_subcommand(
      "layers", "Qwen3-Next's blocks, forward and with every gradient: time and memory");
  bench::LayersConfig layers;
  bench_layers->add_option("--tokens", layers.tokens, "of one sequence")->capture_default_str();
  bench_layers->add_option("--experts", layers.experts, "of the expert block; the model has 512")
      ->capture_default_str();
  CLI::App* bench_model = bench_command->add_subcommand(
      "model", "a whole model: training, a prompt, tokens one by one: time and memory");
  bench::ModelConfig whole;
  bench_model->add_option("--tokens", whole.tokens, "of a training step, and of the prompt")
      ->capture_default_str();
  bench_model->add_option("--chunk", whole.chunk, "tokens of the prompt at a time")
      ->capture_default_str();
  bench_model->add_option("--context", whole.context, "tokens before those that come one by one")
      ->capture_default_str();
  bench_model->add_option("--batch", whole.batch, "sequences side by side")->capture_default_str();
  std::string type = "f32";
  for (CLI::App* each : {bench_step, bench_layers, bench_model}) {
    for (CLI::Option* size : each->get_options()) {
      if (size->get_name() != "--help") size->check(CLI::Range(1, 1 << 20));
    }
    each->add_option("--dtype", type, "of the parameters: f32, or bf16 (step: with f32 masters)")
        ->capture_default_str()
        ->check(CLI::IsMember({"f32", "bf16"}));
  }
  bench_model
      ->add_option("--model", whole.model,
                   "a directory, or random weights as qwen3-next-0.3b, qwen3-next-80b-period")
      ->capture_default_str();
  bench_model->add_option("--bits", whole.bits, "pack the weights: 2, 3, 4, 5, 6 or 8")
      ->check(CLI::IsMember({2, 3, 4, 5, 6, 8}));
  bench_model->add_option("--save", whole.save, "also write the model to this directory");
  bench_model->add_flag("!--no-train", whole.train, "leave the training step out");
  bench_ops->add_option("--filter", config.filter,
                        "only rows matching this expression, e.g. 'softmax bwd .* bf16'");
  for (CLI::App* each : {bench_ops, bench_step, bench_layers, bench_model}) {
    each->add_option("--json", config.json_path, "also write the rows to this file");
  }
  bench_ops->add_option("--peers", config.peers_script,
                        "measure other libraries too: bench/peers/cpu_peers.py or cuda_peers.py");
  bench_ops->add_option("--python", config.python, "the Python that has them")
      ->capture_default_str();
  std::string device = "cpu";
  bool one_by_one = false;
  for (CLI::App* each : {bench_ops, bench_step, bench_layers, bench_model}) {
    each->add_option("--seconds", config.seconds, "time for each row and contender")
        ->capture_default_str()
        ->check([](const std::string& text) {
          const double seconds = std::atof(text.c_str());
          return seconds >= 0.001 && seconds <= 60 ? "" : "must be from 0.001 to 60, got " + text;
        });
    each->add_option("--device", device, "what to measure: cpu or cuda")
        ->capture_default_str()
        ->check(CLI::IsMember({"cpu", "cuda"}));
    each->add_flag("--no-overlap", one_by_one,
                   "cuda: start each kernel after the one before has ended");
  }
  CLI::App* selftest_command = app.add_subcommand(
      "selftest", "check every kernel on this machine against its formula in double precision");
  std::string test_filter = "*";
  selftest_command->add_option("--filter", test_filter, "only these tests, e.g. '*Softmax*'");
#endif

  const auto called_wrongly = [](const std::string& what) {
    std::fprintf(stderr, "mlxtape: %s\nRun mlxtape --help for the commands.\n", what.c_str());
    return kCalledWrongly;
  };
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& e) {
    return app.exit(e);
  } catch (const CLI::CallForAllHelp& e) {
    return app.exit(e);
  } catch (const CLI::CallForVersion& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    return called_wrongly(e.what());
  }
  const std::vector<std::string> unknown = app.remaining(true);
  if (!unknown.empty()) return called_wrongly("no such command or flag here: " + unknown.front());
  if (app.get_subcommands().empty()) return called_wrongly("a command is needed");
#ifdef MLXTAPE_HAS_CASES
  if (*bench_command && bench_command->get_subcommands().empty()) {
    return called_wrongly("bench: what to measure is needed: ops, step, layers or model");
  }
#endif

  set_threads(thread_count);
  set_kernel_cache(cache_folder());
  if (!target.empty()) cpu::limit_target(target);
  if (*info_command) info();
  if (*kernels_command) list_kernels();
#ifdef MLXTAPE_HAS_CASES
  if (*bench_ops || *bench_step || *bench_layers || *bench_model) {
    Device& measured = Device::find(device == "cuda" ? Backend::kCuda : Backend::kCpu);
    measured.set_overlap(!one_by_one);
    step.dtype = layers.dtype = whole.dtype = type == "f32" ? DType::kF32 : DType::kBF16;
    if (*bench_ops) bench::run_ops(measured, config, std::cout);
    if (*bench_step) bench::run_step(measured, config, step, std::cout);
    if (*bench_layers) bench::run_layers(measured, config, layers, std::cout);
    if (*bench_model) bench::run_model(measured, config, whole, std::cout);
  }
  if (*selftest_command) return selftest(test_filter);
#endif
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int status = run(argc, argv);
    std::cout.flush();
    if (std::fflush(stdout) != 0 || !std::cout) {
      throw Error(Errc::kIo, "the output must be writable");
    }
    return status;
  } catch (const Error& e) {
    std::fprintf(stderr, "mlxtape: %s\n", e.what());
    return e.code() == Errc::kArgument ? kCalledWrongly : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "mlxtape: %s\n", e.what());
    return 1;
  }
}
