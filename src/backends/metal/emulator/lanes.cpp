// How lanes run, and wait for each other.
//
// A fiber runs lanes one after the other on its stack as long as none of them waits, so a kernel without barriers never
// switches. A lane that has to wait goes straight to the next one that can run; the last to arrive goes on itself.
#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/metal/emulator/group.h"

namespace mlxtape::emulator {

thread_local Lane* self = nullptr;
thread_local Threadgroup* self_group = nullptr;
thread_local std::uint64_t order_state = 0;
thread_local std::uint64_t salt = 0;
thread_local std::uint64_t operations = 0, functions = 0;
thread_local Group* running = nullptr;

namespace {

bool same_place(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

std::string count_of(std::uint32_t some, std::uint32_t all) {
  return std::to_string(some) + " of " + std::to_string(all) + " threads";
}

}  // namespace

std::string to_string(const std::source_location& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line());
}

std::string Group::describe(const Lane& lane) const {
  return "thread " + std::to_string(lane.index) + " of threadgroup " + std::to_string(linear_);
}

// ---- one threadgroup ----

void Group::reset(const Dispatch& dispatch, void* const* addresses, std::uint32_t linear) {
  dispatch_ = &dispatch;
  linear_ = linear;
  buffers = addresses;
  constants = dispatch.constants.data();
  groups = dispatch.groups;
  full_size = dispatch.threads;
  grid = dispatch.grid;
  id = {linear % groups.x, linear / groups.x % groups.y, linear / groups.x / groups.y};
  size = {std::min(full_size.x, grid.x - id.x * full_size.x),
          std::min(full_size.y, grid.y - id.y * full_size.y),
          std::min(full_size.z, grid.z - id.z * full_size.z)};
  Threadgroup::threads = size.x * size.y * size.z;
  simdgroups = (Threadgroup::threads + kSimdWidth - 1) / kSimdWidth;
  live_ = Threadgroup::threads;
  started_ = waiting_ = 0;
  ready_.clear();
  device_epoch_ = threadgroup_epoch_ = 1;
  for (std::uint32_t i = 0; i < simdgroups; ++i) {
    Simdgroup& s = simds_[i];
    s.turn = 0;
    s.has_result[0] = s.has_result[1] = false;
    s.waiting = 0;
    s.size = s.live = std::min(kSimdWidth, Threadgroup::threads - i * kSimdWidth);
    s.device_epoch = s.threadgroup_epoch = 1;
  }
  order_state = dispatch.seed == 0 ? 0 : mix(dispatch.seed, linear + 1) | 1;
  salt = dispatch.salt;
  if (order_state != 0) {
    for (std::uint32_t i = 0; i < Threadgroup::threads; ++i)
      order_[i] = static_cast<std::uint16_t>(i);
    for (std::uint32_t i = Threadgroup::threads; i > 1; --i)
      std::swap(order_[i - 1], order_[draw(order_state, i)]);
  }
  variable_count_ = arena_used_ = threadgroup_bytes_ = 0;
  for (std::uint32_t i = 0; i < kMaxThreadgroupArguments; ++i) {
    static constexpr const char* kNames[] = {"threadgroup(0)", "threadgroup(1)", "threadgroup(2)",
                                             "threadgroup(3)", "threadgroup(4)", "threadgroup(5)",
                                             "threadgroup(6)", "threadgroup(7)"};
    const std::uint32_t bytes = dispatch.threadgroup_bytes[i];
    arguments[i] = bytes == 0
                       ? nullptr
                       : static_cast<unsigned char*>(variable(&arguments[i], kNames[i], bytes, 16));
  }
}

bool Group::run(const Dispatch& dispatch, void* const* addresses, std::uint32_t linear) {
  running = this;
  self_group = this;
  failed_ = false;
  reset(dispatch, addresses, linear);
  fresh_ = stacks_.take();
  mlxtape_switch_fiber(&scheduler_, stacks_.prepare(fresh_, &Group::fiber_main));
  if (failed_) stacks_.give_back_all();
  running = nullptr;
  self_group = nullptr;
  self = nullptr;
  ++counters_.groups;
  counters_.operations += std::exchange(operations, 0);
  counters_.functions += std::exchange(functions, 0);
  counters_.threads += Threadgroup::threads;
  counters_.threadgroup_bytes = std::max(counters_.threadgroup_bytes, threadgroup_bytes_);
  return !failed_;
}

Lane& Group::begin_lane() {
  const std::uint32_t index = order_state != 0 ? order_[started_] : started_;
  ++started_;
  Lane& lane = lanes_[index];
  lane.simd = &simds_[index / kSimdWidth];
  lane.index = index;
  lane.lane = index % kSimdWidth;
  lane.position = {index, 0, 0};
  if (size.x != Threadgroup::threads) {
    lane.position = {index % size.x, index / size.x % size.y, index / size.x / size.y};
  }
  lane.state = Lane::State::kReady;
  self = &lane;
  return lane;
}

void Group::end_lane(Lane& lane) {
  lane.state = Lane::State::kEnded;
  --live_;
  Simdgroup& simd = *lane.simd;
  --simd.live;
  if (simd.waiting != 0 && simd.waiting == simd.live) fail_simdgroup(simd);
  if (waiting_ != 0 && waiting_ == live_) fail_stuck();
}

// The body of every fiber. It leaves for good once nothing is left to start here.
void Group::fiber_main() {
  Group& group = *running;
  group.run_lanes_here(group.fresh_);
  void* nowhere;
  if (!group.ready_.is_empty()) {
    Lane& next = group.lanes_[group.take_ready()];
    ++group.counters_.switches;
    self = &next;
    mlxtape_switch_fiber(&nowhere, next.stack_pointer);
  }
  if (group.live_ != 0) group.fail_stuck();
  mlxtape_switch_fiber(&nowhere, group.scheduler_);
}

void Group::run_lanes_here(std::uint32_t stack) {
  const Entry entry = dispatch_->kernel->entry;
  while (started_ < Threadgroup::threads) {
    Lane& lane = begin_lane();
    lane.stack = stack;
    entry();
    end_lane(*self);
    if (order_state != 0 && !ready_.is_empty() && draw(order_state, 2) != 0) break;
  }
  // Nothing takes it before this fiber has left.
  stacks_.give_back(stack);
}

// Leaves a lane that waits for another that can run; returns when it may go on.
void Group::go_on(Lane& from) {
  const bool may_start = started_ < Threadgroup::threads;
  if (may_start && (ready_.is_empty() || order_state == 0 || draw(order_state, 2) != 0)) {
    fresh_ = stacks_.take();
    ++counters_.switches;
    mlxtape_switch_fiber(&from.stack_pointer, stacks_.prepare(fresh_, &Group::fiber_main));
    return;
  }
  if (ready_.is_empty()) fail_stuck();
  Lane& next = lanes_[take_ready()];
  self = &next;
  if (&next == &from) return;
  ++counters_.switches;
  mlxtape_switch_fiber(&from.stack_pointer, next.stack_pointer);
}

// ---- waiting ----

Exchange Group::wait_for_simdgroup(const char* what, std::source_location where) {
  Lane& lane = *self;
  Simdgroup& simd = *lane.simd;
  const unsigned turn = simd.turn;
  lane.what = what;
  lane.where = where;
  lane.state = Lane::State::kExchange;
  if (++simd.waiting == simd.size) {
    release(simd);
  } else if (simd.waiting == simd.live) {
    fail_simdgroup(simd);
  }
  if (lane.state != Lane::State::kReady || order_state != 0) go_on(lane);
  return {simd.slots[turn], simd.result[turn], &simd.has_result[turn]};
}

// All lanes of the simdgroup wait. With a seed the one that came last has its place in the queue as well.
void Group::release(Simdgroup& simd) {
  Lane* lanes = first_of(simd);
  for (std::uint32_t i = 1; i < simd.size; ++i) {
    if (!same_place(lanes[i].where, lanes[0].where)) fail_simdgroup(simd);
  }
  if (simd.size != kSimdWidth) {
    fail(std::string(lanes[0].what) + " at " + to_string(lanes[0].where) +
         " needs a simdgroup of 32 threads, this has " + std::to_string(simd.size));
  }
  ++counters_.exchanges;
  simd.waiting = 0;
  simd.turn ^= 1;
  simd.has_result[simd.turn] = false;
  for (std::uint32_t i = 0; i < simd.size; ++i) {
    if (order_state == 0 && &lanes[i] == self) {
      lanes[i].state = Lane::State::kReady;
    } else {
      let_go(lanes[i]);
    }
  }
}

void Group::order_simdgroup(MemoryFlags flags, std::source_location where) {
  Simdgroup& simd = *self->simd;
  self->flags = flags;
  // The epochs change when the barrier is passed, before anybody goes on: by the last to arrive.
  if (simd.waiting + 1 == simd.size) {
    simd.device_epoch += static_cast<std::uint32_t>(flags) & 1;
    simd.threadgroup_epoch += static_cast<std::uint32_t>(flags) >> 1 & 1;
  }
  wait_for_simdgroup("simdgroup_barrier", where);
}

void Group::wait_for_group(MemoryFlags flags, std::source_location where) {
  Lane& lane = *self;
  lane.what = "threadgroup_barrier";
  lane.where = where;
  lane.flags = flags;
  lane.state = Lane::State::kBarrier;
  if (++waiting_ == Threadgroup::threads) {
    for (std::uint32_t i = 0; i < Threadgroup::threads; ++i) {
      if (!same_place(lanes_[i].where, where) || lanes_[i].flags != flags) {
        fail("threads wait at different barriers: " + to_string(where) + " and " +
             to_string(lanes_[i].where));
      }
    }
    waiting_ = 0;
    ++counters_.barriers;
    device_epoch_ += static_cast<std::uint32_t>(flags) & 1;
    threadgroup_epoch_ += static_cast<std::uint32_t>(flags) >> 1 & 1;
    for (std::uint32_t i = 0; i < Threadgroup::threads; ++i) {
      if (order_state != 0 || i != lane.index) let_go(lanes_[i]);
    }
    lane.state = Lane::State::kReady;
    if (order_state == 0) return;
  } else if (waiting_ == live_) {
    fail_stuck();
  }
  go_on(lane);
}

// ---- memory ----

// Fresh memory is all ones: NaN in every type of float, until it is written.
void* Group::variable(const void* key, const char* name, std::size_t bytes, std::size_t align) {
  for (std::uint32_t i = 0; i < variable_count_; ++i) {
    if (variables_[i].key == key) return arena_ + variables_[i].begin;
  }
  if (variable_count_ == kMaxVariables) fail("more than 32 variables in threadgroup memory");
  const auto up = [align](std::size_t n) {
    return (n + align - 1) / align * align;
  };
  threadgroup_bytes_ =
      static_cast<std::uint32_t>(std::min<std::size_t>(up(threadgroup_bytes_) + bytes, 1U << 30));
  if (threadgroup_bytes_ > kThreadgroupBytes) {
    fail("threadgroup memory: at most 32768 bytes, and with '" + std::string(name) + "' it takes " +
         std::to_string(threadgroup_bytes_));
  }
  const auto begin = static_cast<std::uint32_t>(up(arena_used_));
  const auto end = static_cast<std::uint32_t>(begin + bytes);
  variables_[variable_count_++] = {key, name, begin, end};
  arena_used_ = end + kGap;
  std::memset(arena_ + begin, 0xFF, bytes);
  return arena_ + begin;
}

const Group::Variable* Group::variable_at(std::uint32_t offset) const {
  for (const Variable* v = variables_begin(); v != variables_end(); ++v) {
    if (offset >= v->begin && offset < v->end) return v;
  }
  return nullptr;
}

// ---- faults ----

void Group::abandon() {
  failed_ = true;
  void* nowhere;
  mlxtape_switch_fiber(&nowhere, scheduler_);
  __builtin_unreachable();
}

void Group::fail(const std::string& what) {
  fault_ = what;
  abandon();
}

void Group::fail_simdgroup(const Simdgroup& simd) {
  const Lane* lanes = first_of(simd);
  const Lane* first = nullptr;
  std::uint32_t there = 0, ended = 0;
  const Lane* other = nullptr;
  for (std::uint32_t i = 0; i < simd.size; ++i) {
    const Lane& l = lanes[i];
    if (l.state == Lane::State::kEnded) ++ended;
    if (l.state != Lane::State::kExchange) continue;
    if (first == nullptr) first = &l;
    if (same_place(l.where, first->where)) {
      ++there;
    } else {
      other = &l;
    }
  }
  fault_ = std::string(first->what) + " at " + to_string(first->where) + " is reached by " +
           count_of(there, simd.size) + " of the simdgroup";
  if (other != nullptr)
    fault_ += ", others wait in " + std::string(other->what) + " at " + to_string(other->where);
  if (ended != 0) fault_ += ", " + std::to_string(ended) + " have ended before it";
  abandon();
}

// Nobody can run, and not all have ended.
void Group::fail_stuck() {
  for (std::uint32_t i = 0; i < simdgroups; ++i) {
    if (simds_[i].waiting != 0) fail_simdgroup(simds_[i]);
  }
  const Lane* first = nullptr;
  std::uint32_t ended = 0;
  for (std::uint32_t i = 0; i < Threadgroup::threads; ++i) {
    if (lanes_[i].state == Lane::State::kEnded) ++ended;
    if (lanes_[i].state == Lane::State::kBarrier && first == nullptr) first = &lanes_[i];
  }
  fault_ = "threadgroup_barrier at " + to_string(first->where) +
           " is not reached by every thread: " + count_of(ended, Threadgroup::threads) +
           " ended before it";
  abandon();
}

// ---- what kernels call ----

Exchange wait_for_simdgroup(const char* what, std::source_location where) {
  return running->wait_for_simdgroup(what, where);
}
void threadgroup_barrier(MemoryFlags flags, std::source_location where) {
  running->wait_for_group(flags, where);
}
void simdgroup_barrier(MemoryFlags flags, std::source_location where) {
  running->order_simdgroup(flags, where);
}
void* threadgroup_variable(const void* key, const char* name, std::size_t bytes,
                           std::size_t align) {
  return running->variable(key, name, bytes, align);
}
void count_matrix_product() {
  if (self->lane == 0) ++running->counters().matrix_products;
}
void fail(const char* message) { running->fail(message); }
void fail_lane(const char* what, unsigned from) {
  running->fail(std::string(what) + " reads lane " + std::to_string(from) +
                ", and there are 32: " + running->describe(*self));
}
void fail_constant(int index) {
  running->fail("function constant " + std::to_string(index) + " is read and not set");
}
void fail_argument(const char* kind, unsigned index) {
  running->fail(std::string(kind) + "(" + std::to_string(index) + ") is not bound");
}

}  // namespace mlxtape::emulator
