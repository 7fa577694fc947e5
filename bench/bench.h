// Measures every op's bench cases on one device, beside the bare loop that moves as many bytes and
// beside other libraries. How and why: bench/protocol.md.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "mlxtape/core/device.h"

namespace mlxtape::bench {

struct BenchConfig {
  std::string filter;        // a regular expression on "op form pass shape dtype"; empty = all
  std::string json_path;     // empty = no file
  std::string peers_script;  // a program that speaks the protocol of bench/peers; empty = none
  std::string python = "python3";
  std::string commit = "unknown";
  std::string command;   // as the user typed it, for the record
  double seconds = 0.5;  // measuring time per row and contender
};

// Of the model that a whole step is measured with.
struct StepConfig {
  std::int64_t layers = 12, width = 768, hidden = 2400, vocab = 8192, tokens = 512;
  DType dtype = DType::kF32;
};

// Of Qwen3-Next's layers, of which the last has as many experts as fit.
struct LayersConfig {
  std::int64_t tokens = 4096, experts = 64;
  DType dtype = DType::kF32;
};

// A model of one of the built-in shapes, with random weights, or a directory's.
struct ModelConfig {
  std::string model = "qwen3-next-0.3b";
  std::string
      save;  // also write it to this directory, for other programs to measure; empty: do not
  std::int64_t tokens = 512, chunk = 8192, context = 128, batch = 1;
  int bits = 0;  // 0: not quantised
  bool train = true;
  DType dtype = DType::kF32;
};

// Throws kIo where a file is that no benchmark has written: one that has is written over.
void expect_report_or_none(const std::string& path);

// Prints a table as it goes; the JSON file is brought up to date after every row.
void run_ops(Device& device, const BenchConfig& config, std::ostream& out);

// A training step as a whole: its time, the host's share of it, memory.
void run_step(Device& device, const BenchConfig& config, const StepConfig& model,
              std::ostream& out);

// Attention, delta-net and expert blocks, forward and with every gradient: time and memory.
void run_layers(Device& device, const BenchConfig& config, const LayersConfig& layers,
                std::ostream& out);

// A whole model: forward and backward, a prompt, tokens one by one.
void run_model(Device& device, const BenchConfig& config, const ModelConfig& model,
               std::ostream& out);

}  // namespace mlxtape::bench
