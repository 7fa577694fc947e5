// A launch of a bound kernel on the emulator, without the runtime: buffers are arrays here.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "backends/metal/emulator/check.h"
#include "backends/metal/emulator/dispatch.h"
#include "backends/metal/emulator/library.h"

namespace mlxtape::emulator::test {

// Numbers in a block of memory of their own, 64 bytes aligned.
template <class T>
class Memory {
 public:
  explicit Memory(std::size_t count, T value = T()) : Memory(std::vector<T>(count, value)) {}
  Memory(std::initializer_list<T> values) : Memory(std::vector<T>(values)) {}
  explicit Memory(const std::vector<T>& values)
      : count_(values.size()),
        bytes_(new(std::align_val_t{64}) char[values.size() * sizeof(T)]),
        block_(bytes_.get(), values.size() * sizeof(T)) {
    std::memcpy(bytes_.get(), values.data(), block_.bytes);
  }
  T& operator[](std::size_t i) { return reinterpret_cast<T*>(bytes_.get())[i]; }
  std::vector<T> values() const {
    const auto* begin = reinterpret_cast<const T*>(bytes_.get());
    return {begin, begin + count_};
  }
  Block& block() { return block_; }

 private:
  struct Free {
    void operator()(char* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::size_t count_;
  std::unique_ptr<char[], Free> bytes_;
  Block block_;
};

inline std::vector<float> counting(std::size_t count, float from = 0) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = from + static_cast<float>(i);
  return values;
}

class Launch {
 public:
  explicit Launch(const std::string& kernel) {
    dispatch_.kernel = find_kernel(kernel);
    if (dispatch_.kernel == nullptr) ADD_FAILURE() << "no kernel " << kernel;
  }
  template <class T>
  Launch& buffer(unsigned index, Memory<T>& memory, std::size_t first = 0) {
    dispatch_.buffers[index] = Binding::of(memory.block(), first * sizeof(T));
    return *this;
  }
  template <class T>
  Launch& bytes(unsigned index, const T& value) {
    dispatch_.buffers[index] = Binding::of(&value, sizeof value);
    return *this;
  }
  template <class T>
  Launch& constant(unsigned index, const T& value) {
    auto copy = std::make_shared<T>(value);
    dispatch_.constants[index] = copy.get();
    kept_.push_back(copy);
    return *this;
  }
  Launch& room(unsigned index, std::uint32_t count) {
    dispatch_.threadgroup_bytes[index] = count;
    return *this;
  }
  // 0: in order; others draw orders, and what arithmetic leaves open.
  Launch& seed(std::uint64_t seed) {
    dispatch_.seed = seed;
    dispatch_.salt = seed;
    return *this;
  }
  // Fewer threads than groups x threads: the last ones are smaller.
  Launch& grid(Size3 grid) {
    dispatch_.grid = grid;
    has_grid_ = true;
    return *this;
  }
  Dispatch& dispatch() { return dispatch_; }

  Outcome run(Size3 groups, Size3 threads) {
    dispatch_.groups = groups;
    dispatch_.threads = threads;
    if (!has_grid_)
      dispatch_.grid = {groups.x * threads.x, groups.y * threads.y, groups.z * threads.z};
    return emulator::run(dispatch_);
  }
  Outcome run(std::uint32_t groups, std::uint32_t threads) {
    return run({groups, 1, 1}, {threads, 1, 1});
  }
  bool is_checked() const { return dispatch_.kernel->is_checked; }

 private:
  Dispatch dispatch_;
  bool has_grid_ = false;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace mlxtape::emulator::test
