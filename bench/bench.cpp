#include "bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <ostream>

#include "allocations.h"
#include "cases/bench_case.h"
#include "floor.h"
#include "formats/regex.h"
#include "measure.h"
#include "mlxtape/core/threads.h"
#include "mlxtape/ops/softmax.h"
#include "peers.h"

namespace mlxtape::bench {

namespace {

using formats::Regex;

constexpr int kRounds = 4;  // each contender's time is cut into this many turns

Regex compiled(const std::string& filter) {
  try {
    return Regex(filter.empty() ? ".*" : filter);
  } catch (const Error& e) {
    throw Error(Errc::kArgument, "bench: the filter must be a regular expression, got '" + filter +
                                     "': " + e.what());
  }
}

bool matches(const Regex& wanted, const std::string& name) {
  std::vector<Regex::Match> found;
  wanted.find_all(name, found);
  return !found.empty();
}

void empty_kernel(const KernelCall&) {}

// What a dispatch costs when the kernel does nothing.
double empty_dispatch_us(CommandEncoder& encoder) {
  KernelRegistry& registry = KernelRegistry::instance();
  const char* name = "bench_empty_f32";
  if (!registry.has(encoder.backend(), name)) {
    registry.add(encoder.backend(), name, empty_kernel);
  }
  const Kernel& kernel = registry.find(encoder.backend(), name);
  const Tensor in = encoder.zeros({16}, DType::kF32);
  const Tensor out = encoder.zeros({16}, DType::kF32);
  std::vector<double> samples;
  sample([&] { encoder.dispatch(kernel, 0, {in}, {out}); }, 0.2, samples);
  return median(samples);
}

// Bytes read and written per second by a large copy: on the CPU streamed by all threads, elsewhere
// the device's own copy of 2 GB.
double copy_gbps(CommandEncoder& encoder) {
  Device& device = encoder.device();
  std::vector<double> samples;
  if (device.limits().host_visible) {
    constexpr std::int64_t kBytes = std::int64_t{256} << 20;
    const Floor copy(device, kBytes, 1, kBytes, 1);
    sample([&] { copy.run(); }, 0.5, samples);
    return 2 * kBytes / median(samples) / 1e3;
  }
  constexpr std::int64_t kBytes = std::int64_t{2} << 30;
  constexpr int kTimes = 4;
  const Tensor from = encoder.zeros({kBytes}, DType::kU8);
  const Tensor to = encoder.empty({kBytes}, DType::kU8);
  const auto copies = [&] {
    for (int i = 0; i < kTimes; ++i) encoder.copy(from, to);
    encoder.commit_and_wait();
  };
  copies();
  sample(copies, 0.3, samples);
  return kTimes * 2 * kBytes / median(samples) / 1e3;
}

// What a replay costs per kernel when the kernel does next to nothing; 0 where kernels run at once.
double graph_node_us(CommandEncoder& encoder) {
  if (encoder.device().limits().host_visible) return 0;
  constexpr int kNodes = 1000;
  const Tensor small = encoder.zeros({1, 32}, DType::kF32);
  encoder.begin_capture();
  for (int i = 0; i < kNodes; ++i) ops::softmax(encoder, small);
  const auto graph = encoder.end_capture();
  std::vector<double> samples;
  const auto run = [&] {
    encoder.replay(*graph);
    encoder.commit_and_wait();
  };
  run();
  sample(run, 0.2, samples);
  return median(samples) / kNodes;
}

void add(Samples& all, const Samples& more) {
  for (const auto& [peer, times] : more) {
    all[peer].insert(all[peer].end(), times.begin(), times.end());
  }
}

// Of a row on the host: two cores take about 3 s.
constexpr std::int64_t kMostHostFlops = 500'000'000'000;

class Row {
 public:
  Row(const char* op, const BenchCase& bench) : op_(op), case_(&bench) {}

  std::string name() const {
    return std::string(op_) + " " + (case_->form.empty() ? "" : case_->form + " ") + case_->pass +
           " " + case_->shape + " " + name_of(case_->dtype);
  }

  // Why this device does not run the row; null: it does.
  const char* left_out(const Device& device) const {
    if (floor_bytes() > device.limits().memory_bytes / 2) {
      return "it needs more than half of the device's memory";
    }
    if (device.limits().host_visible && case_->flops > kMostHostFlops) {
      return "a call takes many seconds on a processor";
    }
    return nullptr;
  }

  // A row that was measured, now with the peers' times.
  Json ask(Peers& peers, double seconds, Json row) const {
    row.set("peers", medians(peers.measure(request(seconds))));
    return row;
  }
  Json measure(CommandEncoder& encoder, const BenchConfig& config, Peers* peers, double gbps) {
    return encoder.device().limits().host_visible ? measure_here(encoder, config, peers)
                                                  : measure_queued(encoder, config, gbps);
  }

 private:
  // A device with a queue: a graph of calls over so many sets of inputs and outputs that no cache
  // holds one from its last turn, replayed. The floor is the bytes at the speed of a large copy.
  Json measure_queued(CommandEncoder& encoder, const BenchConfig& config, double gbps) {
    constexpr std::size_t kCold = std::size_t{256} << 20;  // five times the cache of an H200
    constexpr double kGraphUs = 3000;                      // of one graph, at the floor
    constexpr double kSampleUs = 10000;  // the launch and the wait, about 10 us, are in it
    Device& device = encoder.device();
    const std::size_t in_use = device.memory().stats().current;
    std::vector<BenchCall> sets{case_->prepare(encoder)};
    device.memory().reset_peak();
    sets[0]();
    const std::size_t held = device.memory().stats().peak - in_use;
    const std::uint64_t before = allocations() + device.memory().stats().allocations;
    sets[0]();
    const std::uint64_t news = allocations() + device.memory().stats().allocations - before;
    while (sets.size() * floor_bytes() < kCold && sets.size() < 64) {
      sets.push_back(case_->prepare(encoder));
    }
    encoder.commit_and_wait();

    std::vector<double> host;
    for (int i = 0; i < 5; ++i) {
      constexpr int kCalls = 32;
      const auto from = Clock::now();
      for (int c = 0; c < kCalls; ++c) sets[static_cast<std::size_t>(c) % sets.size()]();
      host.push_back(microseconds(Clock::now() - from) / kCalls);
      encoder.commit_and_wait();
    }
    const double floor_us = static_cast<double>(floor_bytes()) / gbps / 1e3;
    const auto calls = static_cast<int>(std::clamp<double>(
        kGraphUs / std::max(floor_us, 2.0), 20, std::max<double>(20, 4.0 * sets.size())));
    encoder.begin_capture();
    for (int c = 0; c < calls; ++c) sets[static_cast<std::size_t>(c) % sets.size()]();
    const auto graph = encoder.end_capture();
    const auto run_times = [&](int times) {
      const auto from = Clock::now();
      for (int i = 0; i < times; ++i) encoder.replay(*graph);
      encoder.commit_and_wait();
      return microseconds(Clock::now() - from);
    };
    run_times(1);
    const int repeats = std::max(1, static_cast<int>(kSampleUs / run_times(1)));
    std::vector<double> ours;
    const auto end = Clock::now() + std::chrono::duration<double>(config.seconds);
    while (ours.size() < 5 || Clock::now() < end) {
      ours.push_back(run_times(repeats) / (calls * repeats));
    }
    return report(ours, {floor_us}, host, news, held, {});
  }

  Json measure_here(CommandEncoder& encoder, const BenchConfig& config, Peers* peers) {
    Device& device = encoder.device();
    const BenchCall call = case_->prepare(encoder);
    call();
    const Floor floor(device, case_->read_bytes, case_->read_streams, case_->write_bytes,
                      case_->write_streams);
    floor.run();
    device.memory().reset_peak();
    call();
    const std::size_t held = device.memory().stats().peak - floor_bytes();
    const std::uint64_t before = allocations() + device.memory().stats().allocations;
    call();
    const std::uint64_t news = allocations() + device.memory().stats().allocations - before;

    std::vector<double> ours, bare, host;
    Samples theirs;
    for (int round = 0; round < kRounds; ++round) {
      const double turn = config.seconds / kRounds;
      sample([&] { floor.run(); }, turn, bare);
      sample(call, turn, ours);
      if (peers != nullptr) add(theirs, peers->measure(request(turn)));
    }
    encoder.set_launching(false);
    sample(call, 0.01, host);
    encoder.set_launching(true);

    return report(ours, bare, host, news, held, theirs);
  }

  static Json medians(const Samples& samples) {
    Json all = Json::Object{};
    for (const auto& [peer, times] : samples) all.set(peer, median(times));
    return all;
  }

  Json report(const std::vector<double>& ours, const std::vector<double>& bare,
              const std::vector<double>& host, std::uint64_t news, std::size_t held,
              const Samples& theirs) const {
    Json row = Json::Object{
        {"op", op_},
        {"pass", case_->pass},
        {"shape", case_->shape},
        {"dtype", name_of(case_->dtype)},
        {"us", median(ours)},
        {"best_us", best(ours)},
        {"floor_us", median(bare)},
        {"percent", 100 * median(bare) / median(ours)},
        {"gbps", static_cast<double>(case_->read_bytes + case_->write_bytes) / median(ours) / 1e3},
        {"host_us", median(host)},
        {"allocations", count(news)},
        {"peak_bytes", count(held)}};
    if (!case_->form.empty()) row.set("form", case_->form);
    if (case_->flops != 0) {
      row.set("gflops", static_cast<double>(case_->flops) / median(ours) / 1e3);
    }
    row.set("peers", medians(theirs));
    return row;
  }

  std::size_t floor_bytes() const {
    return static_cast<std::size_t>(case_->read_bytes + case_->write_bytes);
  }
  std::string request(double seconds) const {
    return Json(Json::Object{{"op", op_},
                             {"form", case_->form},
                             {"pass", case_->pass},
                             {"shape", case_->shape},
                             {"dtype", name_of(case_->dtype)},
                             {"seconds", seconds},
                             {"threads", threads()}})
        .dump();
  }

  const char* op_;
  const BenchCase* case_;
};

void print_row(std::ostream& out, const std::string& name, const Json& row) {
  const auto number = [&](const char* key) {
    return row.find(key)->number();
  };
  char line[256];
  std::snprintf(line, sizeof line, "%-52s %10.1f %10.1f %8.2f %6.0f %% %7.2f %6d", name.c_str(),
                number("us"), number("best_us"), number("gbps"), number("percent"),
                number("host_us"), static_cast<int>(number("allocations")));
  out << line;
  if (row.find("gflops") != nullptr) {
    std::snprintf(line, sizeof line, " %8.1f GFLOP/s", number("gflops"));
    out << line;
  }
  for (const auto& [peer, us] : row.find("peers")->object()) {
    std::snprintf(line, sizeof line, "  %s %.1f (%.2fx)", peer.c_str(), us.number(),
                  us.number() / number("us"));
    out << line;
  }
  out << std::endl;
}

}  // namespace

void run_ops(Device& device, const BenchConfig& config, std::ostream& out) {
  const Regex wanted = compiled(config.filter);
  int rows = 0;
  for (const BenchOp& op : bench_ops()) {
    for (const BenchCase& bench : op.cases()) rows += matches(wanted, Row(op.name, bench).name());
  }
  if (rows == 0) {
    throw Error(Errc::kArgument, "bench: the filter must match a row, got '" + config.filter + "'");
  }
  Report report(device, config);
  const auto encoder = device.make_encoder();
  // On a GPU a second process, though idle, costs the first up to 9 %: peers come after us.
  const bool at_once = device.limits().host_visible;
  std::unique_ptr<Peers> peers;
  const auto start_peers = [&](bool now) {
    if (!config.peers_script.empty() && now) {
      peers = std::make_unique<Peers>(config.python, config.peers_script);
    }
  };
  start_peers(at_once);
  const double gbps = copy_gbps(*encoder), dispatch_us = empty_dispatch_us(*encoder);
  report.set("backend", name_of(device.backend()));
  report.set("device", device.name());
  report.set("copy_gbps", gbps);
  report.set("empty_dispatch_us", dispatch_us);
  report.set("graph_node_us", graph_node_us(*encoder));
  Json details = Json::Object{};
  for (const auto& [what, value] : device.details()) details.set(what, value);
  report.set("details", std::move(details));
  char line[160];
  std::snprintf(line, sizeof line, "%s, %d threads, copy %.1f GB/s, empty dispatch %.3f us",
                device.name().c_str(), threads(), gbps, dispatch_us);
  out << line << "\n";
  std::snprintf(line, sizeof line, "%-52s %10s %10s %8s %8s %7s %6s  %s", "op pass shape dtype",
                "us", "best us", "GB/s", "floor", "host us", "allocs",
                "[arithmetic] peers: us (their time / ours)");
  out << line << std::endl;
  for (const BenchOp& op : bench_ops()) {
    for (const BenchCase& bench : op.cases()) {
      Row row(op.name, bench);
      if (!matches(wanted, row.name())) continue;
      if (const char* why = row.left_out(device)) {
        out << row.name() << ": left out, " << why << "\n";
        continue;
      }
      Json result = row.measure(*encoder, config, peers.get(), gbps);
      print_row(out, row.name(), result);
      report.add(std::move(result));
      device.memory().trim();
    }
  }
  start_peers(!at_once);
  if (peers == nullptr || at_once) return;
  std::size_t i = 0;
  for (const BenchOp& op : bench_ops()) {
    for (const BenchCase& bench : op.cases()) {
      const Row row(op.name, bench);
      if (!matches(wanted, row.name()) || row.left_out(device) != nullptr) continue;
      Json result = row.ask(*peers, config.seconds, report.row(i));
      print_row(out, row.name(), result);
      report.replace(i++, std::move(result));
    }
  }
}

}  // namespace mlxtape::bench
