#include "step_graphs.h"

#include <algorithm>

namespace mlxtape::jobs {

namespace {

// A graph of a few thousand kernels takes a few MB of host and device memory. Batches padded to multiples of 32 and cut at 2048
// tokens, as mlx-lm's are, have at most 64 shapes.
constexpr std::size_t kMostShapes = 64;

}  // namespace

StepGraphs::StepGraphs(CommandEncoder& encoder, bool captures)
    : encoder_(encoder), captures_(captures) {
  clear();
}

void StepGraphs::drop_all_but(const Shape* kept) {
  const auto is_dropped = [&](const auto& known) {
    return &known.second != kept;
  };
  if (std::none_of(shapes_.begin(), shapes_.end(), is_dropped)) return;
  encoder_.commit_and_wait();  // a graph may still be running
  std::erase_if(shapes_, is_dropped);
}

void StepGraphs::clear() {
  drop_all_but(nullptr);
  memory_ = std::make_shared<ArenaMemory>(encoder_.device().memory());
}

void StepGraphs::drop_oldest() {
  encoder_.commit_and_wait();
  shapes_.erase(std::min_element(shapes_.begin(), shapes_.end(), [](const auto& a, const auto& b) {
    return a.second.used < b.second.used;
  }));
}

void StepGraphs::plan(Shape& shape, FunctionRef<void()> body) {
  encoder_.rehearse([&] { shape.arena.rehearse(body); });
  if (shape.arena.stats().bytes > memory_->bytes()) drop_all_but(&shape);
}

void StepGraphs::run_planned(Shape& shape, FunctionRef<void()> body) {
  {
    const Arena::Step step(shape.arena);
    body();
  }
  // Misses mean that it differed from the rehearsal, for example because something was made once and kept: plan it again.
  shape.is_planned = shape.arena.stats().misses == 0;
}

void StepGraphs::run(const std::string& shape, FunctionRef<void()> body) {
  if (!captures_) {
    body();
    return;
  }
  const auto [at, is_new] = shapes_.try_emplace(shape, memory_);
  Shape& known = at->second;
  known.used = ++clock_;
  if (is_new && shapes_.size() > kMostShapes) drop_oldest();
  if (!known.is_planned) {
    try {
      plan(known, body);
      run_planned(known, body);
    } catch (...) {
      shapes_.erase(at);
      throw;
    }
    return;
  }
  if (encoder_.is_traced()) {
    run_planned(known, body);
    return;
  }
  if (known.graph == nullptr) {
    const Arena::Step step(known.arena);
    known.graph = capture(encoder_, body);
  }
  encoder_.replay(*known.graph);
  ++replays_;
}

}  // namespace mlxtape::jobs
