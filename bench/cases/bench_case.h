// BenchCase: one row of `mlxtape bench ops`. Each op lists its own in <op>_bench.cpp, in
// <op>_bench_cases(); the list of ops comes from ops.list.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mlxtape/core/encoder.h"

namespace mlxtape::bench {

// One call of the op. The tensors it returns are dropped at once, so their memory is used again.
using BenchCall = std::function<void()>;

struct BenchCase {
  std::string form;   // "" or what differs from the plain op: "residual", "silu", "decode"
  std::string pass;   // "fwd", "bwd" or "fwd+bwd"
  std::string shape;  // "16384x512"
  DType dtype;

  // The fewest bytes the op can move and over how many arrays: the floor is a bare loop that
  // moves as much. A gather counts whole lines of 64 bytes.
  std::int64_t read_bytes, write_bytes;
  int read_streams, write_streams;

  // Makes random inputs on the encoder's device and returns the call to time.
  std::function<BenchCall(CommandEncoder&)> prepare;

  std::int64_t flops = 0;  // of one call, where arithmetic may be the bound
};

// What ops that compute with floats are measured in.
inline constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16};

// The ops with their cases, in the order of ops.list (generated).
struct BenchOp {
  const char* name;
  std::vector<BenchCase> (*cases)();
};
const std::vector<BenchOp>& bench_ops();

}  // namespace mlxtape::bench
