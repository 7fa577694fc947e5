// A whole training step of a model without attention: kernel by kernel, planned, and captured and replayed.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ostream>

#include "allocations.h"
#include "bench.h"
#include "cases/small_model.h"
#include "measure.h"
#include "mlxtape/core/arena.h"

namespace mlxtape::bench {

namespace {

struct Timed {
  std::vector<double> whole, host;  // us; host: until the last call of the step has returned
};

// step() issues the work of one step.
Timed run_for(CommandEncoder& encoder, double seconds, const std::function<void()>& step) {
  Timed timed;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (timed.whole.size() < 3 || Clock::now() < end) {
    const auto from = Clock::now();
    step();
    timed.host.push_back(microseconds(Clock::now() - from));
    encoder.commit_and_wait();
    timed.whole.push_back(microseconds(Clock::now() - from));
  }
  return timed;
}

}  // namespace

void run_step(Device& device, const BenchConfig& config, const StepConfig& model_config,
              std::ostream& out) {
  const auto encoder = device.make_encoder();
  SmallModelConfig shape;
  shape.vocab = model_config.vocab;
  shape.width = model_config.width;
  shape.hidden = model_config.hidden;
  shape.layers = model_config.layers;
  shape.dtype = model_config.dtype;
  SmallModel model(*encoder, shape, 1);
  const std::int64_t rows = 1;
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(rows * model_config.tokens));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::int32_t>(i * 7919 % static_cast<std::size_t>(shape.vocab));
  }
  const Tensor ids = encoder->empty({rows, model_config.tokens}, DType::kI32);
  const Tensor targets = encoder->empty({rows, model_config.tokens}, DType::kI32);
  encoder->upload(tokens.data(), tokens.size() * 4, ids);
  encoder->upload(tokens.data(), tokens.size() * 4, targets);

  char line[200];
  std::snprintf(line, sizeof line, "%s: %.1f M parameters in %s, %lld layers, %lld tokens",
                device.name().c_str(), static_cast<double>(model.parameters()) / 1e6,
                name_of(shape.dtype), static_cast<long long>(shape.layers),
                static_cast<long long>(model_config.tokens));
  out << line << "\n";
  std::snprintf(line, sizeof line, "%-22s %10s %10s %8s %8s %10s", "step", "us", "host us", "host",
                "allocs", "peak MiB");
  out << line << std::endl;

  Report report(device, config);
  report.set("parameters", model.parameters());
  report.set("dtype", name_of(shape.dtype));
  report.set("layers", shape.layers);
  report.set("tokens", model_config.tokens);
  const bool queued = !device.limits().host_visible;
  const auto show = [&](const char* name, const std::function<void()>& step) {
    step();
    step();
    encoder->commit_and_wait();
    device.memory().reset_peak();
    const std::uint64_t before = allocations() + device.memory().stats().allocations;
    step();
    const std::uint64_t news = allocations() + device.memory().stats().allocations - before;
    encoder->commit_and_wait();
    const std::size_t peak = device.memory().stats().peak;
    const Timed timed = run_for(*encoder, config.seconds, step);
    const double us = median(timed.whole), host = median(timed.host);
    std::snprintf(line, sizeof line, "%-22s %10.1f", name, us);
    out << line;
    if (queued) {
      std::snprintf(line, sizeof line, " %10.1f %6.1f %%", host, 100 * host / us);
    } else {
      std::snprintf(line, sizeof line, " %10s %8s", "-", "-");  // kernels run within the calls
    }
    out << line;
    std::snprintf(line, sizeof line, " %8llu %10.1f", static_cast<unsigned long long>(news),
                  static_cast<double>(peak) / (1 << 20));
    out << line << std::endl;
    report.add(Json::Object{{"step", name},
                            {"us", us},
                            {"best_us", best(timed.whole)},
                            {"host_us", host},
                            {"host_percent", 100 * host / us},
                            {"allocations", count(news)},
                            {"peak_bytes", count(peak)}});
  };
  show("one kernel at a time", [&] { model.step(ids, targets); });
  Arena arena(device.memory());
  show("planned memory", [&] {
    const Arena::Step step(arena);
    model.step(ids, targets);
  });
  std::unique_ptr<Graph> graph;
  {
    const Arena::Step step(arena);
    encoder->begin_capture();
    model.step(ids, targets);
    graph = encoder->end_capture();
  }
  show("captured and replayed", [&] { encoder->replay(*graph); });

  // The host's own cost of recording and walking: nothing is launched.
  graph.reset();
  encoder->set_launching(false);
  std::vector<double> host;
  sample([&] { model.step(ids, targets); }, std::min(config.seconds, 0.5), host);
  encoder->set_launching(true);
  const auto nodes = static_cast<double>(model.nodes());
  std::snprintf(line, sizeof line, "without launches: %.1f us a step, %.2f us a node of %.0f",
                median(host), median(host) / nodes, nodes);
  out << line << std::endl;
  report.set("unlaunched_us", median(host));
  report.set("nodes", count(model.nodes()));
  report.write();
}

}  // namespace mlxtape::bench
