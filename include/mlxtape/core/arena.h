// Arena: planned memory for work that repeats with the same allocations, such as a training step.
//
//   Arena arena(device.memory());
//   while (...) {
//     const Arena::Step step(arena);
//     ... the same tensors are made and dropped in the same order ...
//   }
//
// During the first step the arena notes what is allocated from the pool: sizes and lifetimes. From the second step on,
// everything that the first also freed comes from one block of memory, each tensor at its planned place: a step allocates
// nothing and needs little more than its peak of live bytes. Tensors that outlive a step come from the pool. So do, counted as
// misses, allocations that are not as planned: another size, or a place that is still in use. After a step with misses the
// next one is noted anew.
//
// A step can also be planned without running it: rehearse notes its allocations and takes no memory for them.
//
// A graph captured during a planned step owns the arena's memory: until the graph is destroyed the arena takes no further
// steps. With guarded memory (MemoryPool::set_guarded) nothing is planned.
//
// Arenas of one ArenaMemory share a block: for steps of different shapes, of which one runs at a time. Each step, and each
// replayed graph, overwrites what the others left there, so nothing made in a step may be used after it. In return such an
// arena takes further steps while graphs hold its memory.
//
// Threads    A step belongs to the thread that began it and ignores what other threads allocate; one step of an arena at a
//            time. Tensors made in it may go to any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "mlxtape/base/function_ref.h"
#include "mlxtape/core/memory.h"

namespace mlxtape {

struct ArenaStats {
  std::size_t bytes = 0;      // of the one piece
  std::size_t most_live = 0;  // the most that the noted step had in use at once, of what is planned
  std::uint64_t planned = 0;  // allocations of the last step that found their place
  std::uint64_t misses = 0;   // of the last step
};

// One block of memory for several arenas, as large as the largest of their steps needs. When it grows, existing arenas and
// graphs keep the smaller block until they are destroyed.
class ArenaMemory {
 public:
  explicit ArenaMemory(MemoryPool& pool) : pool_(&pool) {}
  MemoryPool& pool() const { return *pool_; }
  std::size_t bytes() const { return memory_.bytes(); }

 private:
  friend class Arena;
  Buffer at_least(std::size_t bytes);

  MemoryPool* pool_;
  Buffer memory_;
};

class Arena {
 public:
  explicit Arena(MemoryPool& pool);
  explicit Arena(const std::shared_ptr<ArenaMemory>& shared);
  ~Arena();  // what still lives keeps its memory
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  ArenaStats stats() const;

  // Plans a step anew. body makes and drops the step's tensors in their order; these have addresses but no memory, so nothing
  // may read or write them, which CommandEncoder::rehearse ensures. Throws kArgument if one of them outlives body.
  void rehearse(FunctionRef<void()> body);

  class Step {
   public:
    explicit Step(
        Arena& arena);  // throws kArgument inside another step, or when a graph has the memory
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    Arena& arena_;
  };

 private:
  friend class MemoryPool;
  struct Impl;
  struct Note {  // of an allocation that the pool served
    std::shared_ptr<Impl> arena;
    std::size_t entry = 0;
  };
  static Impl* current_of(const MemoryPool& pool);  // this thread's step, if it is of that pool
  // Memory at the next planned place; a Buffer without any where the pool must serve.
  static Buffer place(const MemoryPool& pool, std::size_t bytes);
  static bool rehearses(const MemoryPool& pool);
  static void note(const MemoryPool& pool, std::size_t bytes, Note& note);
  static void ended(const Note& note) noexcept;

  std::shared_ptr<Impl> impl_;
};

}  // namespace mlxtape
