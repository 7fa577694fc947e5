// A kernel that comes as source text in the language of its backend (CUDA C++ on cuda, MSL on metal). It is
// compiled when it is first launched, and can be kept on disk for the next process; it is dispatched like ours.
//
//   extern "C" __global__ void scale(const float* x, float* y, Args args);
//
//   const Kernel& kernel = device.add_kernel({"my_scale_f32", "scale", text, grid});
//   encoder.dispatch(kernel, Args{n, 2.0F}, {x}, {y});
//
// The function gets the addresses of the inputs, then those of the outputs, then the arguments by value. On
// metal it is a `kernel` with inputs, outputs and `constant Args&` at buffer(0), buffer(1)...; options must be
// empty, and shared_bytes are at threadgroup(0).
//
// Kept in the folder of set_kernel_cache: one file for each text, compiler and GPU. Files may be deleted
// at any time; a damaged one is made again. A text that includes files of its own ("...") is not kept,
// for nothing would notice when they change.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mlxtape/core/registry.h"

namespace mlxtape {

struct Grid {
  std::array<std::uint32_t, 3> blocks{1, 1, 1};
  std::array<std::uint32_t, 3> threads{1, 1, 1};
  std::size_t shared_bytes = 0;  // beside what the source declares
};

struct SourceKernel {
  std::string name;   // in the registry
  std::string entry;  // the function in source, declared extern "C"
  std::string source;
  std::function<Grid(const KernelCall&)> grid;  // how many threads a call needs
  std::vector<std::string> options;             // for the compiler, e.g. "--use_fast_math"
};

// Where compiled kernels are kept from now on; empty, as at the start: nowhere. The program uses
// $XDG_CACHE_HOME/mlxtape or $HOME/.cache/mlxtape. Any thread.
void set_kernel_cache(const std::string& folder);
std::string kernel_cache();

}  // namespace mlxtape
