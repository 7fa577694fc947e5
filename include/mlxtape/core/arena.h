// Arena: memory for work that is done again and again in the same way, as a training step is.
//
//   Arena arena(device.memory());
//   while (...) {
//     const Arena::Step step(arena);
//     ... the same tensors are made and dropped in the same order ...
//   }
//
// The first step is noted: what it allocates from the pool, how much, from when to when. From the second on
// all that it also dropped comes from one piece of memory, each tensor at the place planned for it, so
// that a step allocates nothing and needs little more than the most that it has in use at once. What
// outlives a step comes from the pool, as ever. So does, counted as a miss, what is not as planned: another
// size, or a place where something still lives. After a step with misses the next one is noted anew.
//
// A graph that was captured during a planned step owns the places it uses; until it is gone the arena has no
// further steps. With guarded memory (MemoryPool::set_guarded) nothing is planned.
//
// Threads    A step belongs to the thread that began it, what other threads allocate is none of its business;
//            one step of an arena at a time. Tensors made in it may go to any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "mlxtape/core/memory.h"

namespace mlxtape {

struct ArenaStats {
  std::size_t bytes = 0;      // of the one piece
  std::size_t most_live = 0;  // the most that the noted step had in use at once, of what is planned
  std::uint64_t planned = 0;  // allocations of the last step that found their place
  std::uint64_t misses = 0;   // of the last step
};

class Arena {
 public:
  explicit Arena(MemoryPool& pool);
  ~Arena();  // what still lives keeps its memory
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  ArenaStats stats() const;

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
  static void note(const MemoryPool& pool, std::size_t bytes, Note& note);
  static void ended(const Note& note) noexcept;

  std::shared_ptr<Impl> impl_;
};

}  // namespace mlxtape
