// Group: a threadgroup that runs, with all that it needs. One for each worker, used again and again.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "backends/metal/emulator/dispatch.h"
#include "backends/metal/emulator/fibers.h"
#include "backends/metal/emulator/lanes.h"

namespace mlxtape::emulator {

// Lanes that can go on, in the order in which they were let go.
class ReadyLanes {
 public:
  bool is_empty() const { return size_ == 0; }
  std::uint32_t size() const { return size_; }
  void clear() { size_ = 0; }
  void push(std::uint32_t lane) {
    ring_[(first_ + size_++) % kMaxThreads] = static_cast<std::uint16_t>(lane);
  }
  std::uint32_t pop() {
    const std::uint32_t lane = ring_[first_];
    first_ = (first_ + 1) % kMaxThreads;
    --size_;
    return lane;
  }
  std::uint32_t pop(std::uint32_t place) {
    std::swap(ring_[first_], ring_[(first_ + place) % kMaxThreads]);
    return pop();
  }

 private:
  std::uint16_t ring_[kMaxThreads];
  std::uint32_t first_ = 0, size_ = 0;
};

class Group : public Threadgroup {
 public:
  Group() : stacks_(kMaxThreads) {}

  // Runs threadgroup number linear of the dispatch; false: it has failed, and fault() says how.
  bool run(const Dispatch& dispatch, void* const* addresses, std::uint32_t linear);

  const std::string& fault() const { return fault_; }
  Counters& counters() { return counters_; }

  // ---- called by lanes ----
  Exchange wait_for_simdgroup(const char* what, std::source_location where);
  void wait_for_group(MemoryFlags flags, std::source_location where);
  void order_simdgroup(MemoryFlags flags, std::source_location where);
  void* variable(const void* key, const char* name, std::size_t bytes, std::size_t align);
  // Ends the threadgroup with a fault. what is kept.
  [[noreturn]] void fail(const std::string& what);
  [[noreturn]] void abandon();  // fault_ is set

  // ---- for check.cpp ----
  struct Variable {
    const void* key;
    const char* name;
    std::uint32_t begin, end;
  };
  const Dispatch& dispatch() const { return *dispatch_; }
  std::uint32_t linear() const { return linear_; }
  std::uint32_t device_epoch() const { return device_epoch_; }
  std::uint32_t threadgroup_epoch() const { return threadgroup_epoch_; }
  const Stacks& stacks() const { return stacks_; }
  bool is_arena(const void* p) const { return p >= arena_ && p < arena_ + sizeof arena_; }
  std::uint32_t arena_offset(const void* p) const {
    return static_cast<std::uint32_t>(static_cast<const unsigned char*>(p) - arena_);
  }
  const Variable* variable_at(std::uint32_t offset) const;
  const Variable* variables_begin() const { return variables_; }
  const Variable* variables_end() const { return variables_ + variable_count_; }
  std::string describe(const Lane& lane) const;

 private:
  static constexpr std::uint32_t kMaxVariables = 32;
  static constexpr std::uint32_t kGap = 64;  // between two variables: nothing may touch it

  static void fiber_main();
  void reset(const Dispatch& dispatch, void* const* addresses, std::uint32_t linear);
  Lane& begin_lane();
  void end_lane(Lane& lane);
  void run_lanes_here(std::uint32_t stack);
  void let_go(Lane& lane) {
    lane.state = Lane::State::kReady;
    ready_.push(lane.index);
  }
  std::uint32_t take_ready() {
    return order_state != 0 ? ready_.pop(draw(order_state, ready_.size())) : ready_.pop();
  }
  void go_on(Lane& from);
  void release(Simdgroup& simd);
  Lane* first_of(const Simdgroup& simd) { return lanes_ + (&simd - simds_) * kSimdWidth; }
  [[noreturn]] void fail_stuck();
  [[noreturn]] void fail_simdgroup(const Simdgroup& simd);

  Lane lanes_[kMaxThreads];
  Simdgroup simds_[kMaxSimdgroups];
  std::uint16_t order_[kMaxThreads];
  ReadyLanes ready_;
  std::uint32_t started_ = 0, live_ = 0, waiting_ = 0;
  std::uint32_t device_epoch_ = 0, threadgroup_epoch_ = 0;  // barriers that ordered such memory

  alignas(128) unsigned char arena_[kThreadgroupBytes + kMaxVariables * kGap];
  Variable variables_[kMaxVariables];
  std::uint32_t variable_count_ = 0, arena_used_ = 0, threadgroup_bytes_ = 0;

  const Dispatch* dispatch_ = nullptr;
  std::uint32_t linear_ = 0;
  Stacks stacks_;
  std::uint32_t fresh_ = 0;  // the stack of the fiber that is about to begin
  void* scheduler_ = nullptr;
  std::string fault_;
  bool failed_ = false;
  Counters counters_;
};

std::string to_string(const std::source_location& where);  // "softmax.metal:65"

// The one that runs on this thread; null between dispatches.
extern thread_local Group* running;

}  // namespace mlxtape::emulator
