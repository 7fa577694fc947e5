// Dispatch: one launch of a kernel on the emulator, and how it ends. What the runtime (and a test) calls.
//
// Threads    run may be called from any thread; one runs at a time, and uses the other cores itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backends/metal/emulator/lanes.h"

namespace mlxtape::emulator {

class Shadow;

inline constexpr std::uint32_t kThreadgroupBytes = 32 << 10;

// Memory that kernels can reach by an address: a buffer.
struct Block {
  Block(char* base, std::size_t bytes);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  char* base;
  std::size_t bytes;
  std::unique_ptr<Shadow> shadow;  // made when a checked kernel first reaches it
};

// What a kernel gets as buffer(i): a place in a block, or bytes of its own, or nothing. begin, end: what it may touch
// of the block.
struct Binding {
  Block* block = nullptr;
  std::size_t offset = 0, begin = 0, end = 0;
  std::shared_ptr<const std::vector<char>> bytes;
  bool is_bound = false;

  static Binding of(Block& block, std::size_t offset = 0);
  static Binding of(const void* bytes, std::size_t count);
};

// A block that kernels may reach by addresses in what they read.
struct Resident {
  Block* block;
  bool is_written;
};

// Which launches are over before this one begins, whatever the order they were run in.
class Order {
 public:
  virtual ~Order() = default;
  virtual bool is_before(std::uint64_t serial) const = 0;
  virtual std::uint64_t first_serial() const = 0;  // all before this one are over
};

struct Dispatch {
  const KernelInfo* kernel = nullptr;
  std::array<Binding, kMaxBuffers> buffers;
  std::array<std::uint32_t, kMaxThreadgroupArguments> threadgroup_bytes = {};
  std::array<const void*, kMaxConstants> constants = {};
  std::span<const Resident> residents;
  Size3 groups, threads,
      grid;  // grid: threads, fewer than groups x threads where the last ones are smaller
  std::uint32_t max_threads = kMaxThreads;
  std::uint64_t seed = 0;  // of orders; 0: everything in order
  std::uint64_t salt = 0;  // of what arithmetic leaves open; 0: the nearest numbers, sums in order
  std::uint64_t serial = 0;
  const Order* order = nullptr;  // null: all others are
};

// What a launch did. Bytes are known of checked kernels alone.
struct Counters {
  std::uint64_t launches = 0, groups = 0, threads = 0;
  std::uint64_t switches = 0, barriers = 0, exchanges = 0;
  std::uint64_t operations = 0,
                functions = 0;  // of scalars: + - * /, exp and its like; of counted kernels alone
  std::uint64_t matrix_products = 0;                // of 8x8 matrices
  std::uint64_t bytes_read = 0, bytes_written = 0;  // of device memory, each access counted
  std::uint64_t bytes_first_read = 0, bytes_first_written = 0;  // each byte once a launch
  std::uint32_t threadgroup_bytes = 0;                          // most of any

  void add(const Counters& other);
};

struct Outcome {
  std::string fault;  // empty: none
  Counters counters;
};
Outcome run(const Dispatch& dispatch);

// Threads that run threadgroups, the caller's among them. Results do not depend on it. 0: one for each core.
void set_workers(unsigned count);

}  // namespace mlxtape::emulator
