// What control.h sets, as the runtime asks for it.
#pragma once

#include <cstdint>
#include <string>

#include "backends/metal/emulator/dispatch.h"

namespace mlxtape::emulator {

struct TimeLimits {
  double launch, buffer;
};

enum class FaultKind {
  kTimeout,
  kMemory,
  kPage,
  kInteractivity,
  kIgnored,
  kHang,
  kAllocation,
  kLibrary,
  kPipeline
};

// Is it this one's turn? Counts.
bool is_due(FaultKind kind);
int fault_value(const char* name, int otherwise);  // of devices, family, system

TimeLimits time_limits();
void note_launch(const std::string& kernel, const Counters& counters);
double seconds_on_m1(const Counters& counters);

}  // namespace mlxtape::emulator
