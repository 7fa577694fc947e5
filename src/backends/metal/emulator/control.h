// What a test asks of the emulated device. The same can be said before a program starts:
//   MLXTAPE_METAL_SEED=3                  as set_seed
//   MLXTAPE_METAL_FAULT=timeout:17,...    as inject
//   MLXTAPE_METAL_COUNTERS=1              counters of all kernels, to stderr, when the program ends
//
// Threads    Every function may be called from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "backends/metal/emulator/dispatch.h"

namespace mlxtape::emulator {

// 0: work runs when it is waited for, in the order in which it was committed, and numbers are the nearest ones. Others draw
// when it runs, in which of the orders that are allowed, what a kernel may ask of the device, and the last bits of exp.
void set_seed(std::uint64_t seed);
std::uint64_t seed();

// Comma-separated. n counts from 1, from this call on.
//   timeout:n memory:n page:n interactivity:n ignored:n   the n-th command buffer ends with this error, half done
//   hang:n          the n-th command buffer never ends, nor does any after it in its queue
//   allocation:n    the n-th buffer cannot be made
//   library:n       the n-th text does not compile
//   pipeline:n      the n-th pipeline cannot be made
//   devices:0       there is no device
//   family:n        the device is of family n (1006: A13, before the M1)
//   system:n        macOS n: 14 has no residency sets and no math modes
// An empty text takes back all of it.
void inject(const std::string& faults);

// Live objects by class: strings, buffers, pipelines ... What is more after a piece of work than before it has leaked.
std::map<std::string, long> live_objects();

// By kernel, since the last reset.
std::map<std::string, Counters> counters();
void reset_counters();

// A launch, and a command buffer, that an M1 would need longer for is a fault: its system kills what keeps the display
// waiting. By what was counted: bytes in the checked build, products of matrices in both.
void set_time_limits(double launch_seconds, double buffer_seconds);

}  // namespace mlxtape::emulator
