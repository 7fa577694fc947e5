#include "backends/metal/emulator/control.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "backends/metal/emulator/objects.h"
#include "backends/metal/emulator/state.h"

namespace mlxtape::emulator {
namespace {

struct Fault {
  FaultKind kind;
  long left;  // until it is due
};
constexpr std::array<std::pair<const char*, FaultKind>, 9> kKinds = {
    {{"timeout", FaultKind::kTimeout},
     {"memory", FaultKind::kMemory},
     {"page", FaultKind::kPage},
     {"interactivity", FaultKind::kInteractivity},
     {"ignored", FaultKind::kIgnored},
     {"hang", FaultKind::kHang},
     {"allocation", FaultKind::kAllocation},
     {"library", FaultKind::kLibrary},
     {"pipeline", FaultKind::kPipeline}}};

void print_counters();

struct State {
  std::mutex mutex;
  std::uint64_t seed = 0;
  std::vector<Fault> faults;
  std::map<std::string, int> values;
  std::map<std::string, Counters> counters;
  TimeLimits limits = {0.05, 0.1};

  State() {
    if (const char* text = std::getenv("MLXTAPE_METAL_SEED"); text != nullptr) {
      char* end = nullptr;
      seed = std::strtoull(text, &end, 10);
      if (*text == '\0' || *end != '\0')
        violation(std::string("MLXTAPE_METAL_SEED must be a whole number, got ") + text);
    }
    if (const char* text = std::getenv("MLXTAPE_METAL_FAULT"); text != nullptr) set(text);
    if (std::getenv("MLXTAPE_METAL_COUNTERS") != nullptr) std::atexit(print_counters);
  }

  void set(const std::string& text) {
    faults.clear();
    values.clear();
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, ',');) {
      const std::size_t colon = part.find(':');
      const std::string name = part.substr(0, colon);
      char* end = nullptr;
      const long n =
          colon == std::string::npos ? -1 : std::strtol(part.c_str() + colon + 1, &end, 10);
      if (n < 0 || end == nullptr || *end != '\0')
        violation("a fault must be kind:number, got " + part);
      if (name == "devices" || name == "family" || name == "system") {
        values[name] = static_cast<int>(n);
        continue;
      }
      bool known = false;
      for (const auto& [kind_name, kind] : kKinds) {
        if (name == kind_name) faults.push_back({kind, n});
        known = known || name == kind_name;
      }
      if (!known) violation("no such fault: " + part);
    }
    hide_classes();
  }

  void hide_classes() {
    const auto system = values.find("system");
    set_class_hidden("MTLResidencySetDescriptor", system != values.end() && system->second < 15);
  }
};

State& state() {
  static auto* state = new State;
  return *state;
}

// A line for each kernel: what all its launches did together.
void print_counters() {
  std::fprintf(stderr, "%-40s %8s %12s %12s %12s %12s %12s %10s %10s %10s %10s\n", "kernel",
               "launches", "threads", "bytes read", "once each", "written", "once each",
               "operations", "functions", "8x8", "ms on M1");
  for (const auto& [kernel, c] : counters()) {
    const auto n = [](std::uint64_t v) {
      return static_cast<unsigned long long>(v);
    };
    std::fprintf(stderr,
                 "%-40s %8llu %12llu %12llu %12llu %12llu %12llu %10llu %10llu %10llu %10.4f\n",
                 kernel.c_str(), n(c.launches), n(c.threads), n(c.bytes_read),
                 n(c.bytes_first_read), n(c.bytes_written), n(c.bytes_first_written),
                 n(c.operations), n(c.functions), n(c.matrix_products), seconds_on_m1(c) * 1e3);
  }
}

}  // namespace

void load_control() { state(); }

void set_seed(std::uint64_t seed) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.seed = seed;
}

std::uint64_t seed() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.seed;
}

void inject(const std::string& faults) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.set(faults);
}

bool is_due(FaultKind kind) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  bool due = false;
  for (Fault& fault : s.faults) {
    if (fault.kind == kind && fault.left > 0 && --fault.left == 0) due = true;
  }
  return due;
}

int fault_value(const char* name, int otherwise) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.values.find(name);
  return found == s.values.end() ? otherwise : found->second;
}

std::map<std::string, long> live_objects() { return count_objects(); }

std::map<std::string, Counters> counters() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.counters;
}

void reset_counters() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.counters.clear();
}

void note_launch(const std::string& kernel, const Counters& counters) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.counters[kernel].add(counters);
}

void set_time_limits(double launch_seconds, double buffer_seconds) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.limits = {launch_seconds, buffer_seconds};
}

TimeLimits time_limits() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.limits;
}

// 60 of its 68 GB/s, and 1.5 of its 2.6 TFLOP/s: what kernels reach there.
double seconds_on_m1(const Counters& counters) {
  constexpr double kBytes = 60e9;
  constexpr double kOperations = 1.5e12;
  constexpr double kProduct = 8 * 8 * 8 * 2;
  return static_cast<double>(counters.bytes_first_read + counters.bytes_first_written) / kBytes +
         (static_cast<double>(counters.matrix_products) * kProduct +
          static_cast<double>(counters.operations)) /
             kOperations;
}

}  // namespace mlxtape::emulator
