// What the emulator costs: nanoseconds of a thread, of a switch, of an access. Not a test; docs/metal.md has its numbers.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "backends/metal/emulator_support.h"

namespace mlxtape::emulator::test {
namespace {

// Of the processor, all threads together: another program's share of the machine is not in it.
double processor_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double seconds_of(Launch& launch, std::uint32_t groups, std::uint32_t threads, Outcome& outcome) {
  double best = 1e9;
  for (int i = 0; i < 7; ++i) {
    const double start = processor_seconds();
    outcome = launch.run(groups, threads);
    best = std::min(best, processor_seconds() - start);
  }
  return best;
}

void time(const std::string& kernel, std::uint32_t groups, std::uint32_t threads, unsigned workers,
          std::uint64_t seed) {
  set_workers(workers);
  Memory<float> x(std::size_t{groups} * threads, 1), y(groups);
  Launch launch(kernel);
  launch.buffer(0, x).buffer(1, y).room(0, 4 * threads).seed(seed);
  Outcome outcome;
  const double seconds = seconds_of(launch, groups, threads, outcome);
  const double per_thread = seconds * 1e9 / (double{groups} * threads);
  std::printf("%-16s %6u x %4u  workers %u  seed %llu  %8.2f ms  %7.1f ns a thread", kernel.c_str(),
              groups, threads, workers, static_cast<unsigned long long>(seed), seconds * 1e3,
              per_thread);
  if (outcome.counters.switches != 0) {
    std::printf("  %5.1f ns a switch",
                seconds * 1e9 / static_cast<double>(outcome.counters.switches));
  }
  std::printf("%s\n", outcome.fault.empty() ? "" : ("  " + outcome.fault).c_str());
}

}  // namespace
}  // namespace mlxtape::emulator::test

int main() {
  using mlxtape::emulator::test::time;
  for (const unsigned workers : {1U, 2U}) {
    for (const std::uint64_t seed : {0U, 1U}) {
      time("nothing", 4096, 256, workers, seed);
      time("add_one", 4096, 256, workers, seed);
      time("twenty_sums", 64, 256, workers, seed);
      time("twenty_barriers", 16, 1024, workers, seed);
      time("twenty_barriers", 256, 64, workers, seed);
      time("sum_by_tree", 256, 256, workers, seed);
      time("add_one", 1, 32, workers, seed);
    }
  }
}
