// StepGraphs: captures the work of training steps, one graph for each shape, and replays it.
//
// A LoRA step of Qwen3-0.6B is a few thousand kernels. Recording it, running the backward pass and launching the kernels costs
// the host a good part of the time that a GPU needs for it; a replay is one call. A shape that comes for the first time is
// rehearsed, which plans its memory, and run; the second time it is captured.
//
// Memory     one block for all shapes, as large as the largest step needs: steps follow each other on one queue. When a larger
//            shape comes, the graphs of all others are dropped, to be captured again when their shapes come back.
// Results    the same bits as without capture: the same kernels with the same arguments.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "mlxtape/core/arena.h"
#include "mlxtape/core/encoder.h"

namespace mlxtape::jobs {

class StepGraphs {
 public:
  // With captures off, run only calls body.
  StepGraphs(CommandEncoder& encoder, bool captures);

  // body dispatches a step's work: the same work whenever the shape is the same. It reads and writes tensors that stay in
  // place, keeps nothing that it makes, and neither waits nor copies between host and device. It is called twice for a new
  // shape and not at all for a replay. While the encoder is traced, nothing is replayed, so that the trace shows each kernel.
  void run(const std::string& shape, FunctionRef<void()> body);
  // Drops graphs and memory until the next step.
  void clear();

  bool captures() const { return captures_; }
  std::size_t replays() const { return replays_; }

 private:
  struct Shape {
    explicit Shape(const std::shared_ptr<ArenaMemory>& memory) : arena(memory) {}
    Arena arena;
    bool is_planned = false;
    std::unique_ptr<Graph> graph;
    std::uint64_t used = 0;  // clock_ of its last run
  };
  void plan(Shape& shape, FunctionRef<void()> body);
  void run_planned(Shape& shape, FunctionRef<void()> body);
  void drop_all_but(const Shape* kept);
  void drop_oldest();

  CommandEncoder& encoder_;
  bool captures_;
  std::shared_ptr<ArenaMemory> memory_;
  std::map<std::string, Shape> shapes_;
  std::uint64_t clock_ = 0;
  std::size_t replays_ = 0;
};

}  // namespace mlxtape::jobs
