// The checked build: every access of a kernel is looked at. Whose memory is it, may it be written, has somebody written
// it, and did another thread touch it with nothing in between that orders the two?
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "backends/metal/emulator/dispatch.h"

namespace mlxtape::emulator {

// Who touched a byte last. epoch, sync: how many barriers of the threadgroup and of the simdgroup had been passed that
// order this kind of memory.
struct Stamp {
  std::uint32_t run = 0;  // which threadgroup of which launch; 0: nobody
  std::uint32_t epoch = 0, sync = 0;
  std::uint16_t lane = 0;
  std::uint16_t flags = 0;
  bool operator==(const Stamp&) const = default;
};
struct Cell {
  Stamp writer, reader;
  bool operator==(const Cell&) const = default;
};

// A cell for each byte of a block. It takes memory only for what is touched.
class Shadow {
 public:
  explicit Shadow(std::size_t bytes);
  ~Shadow();
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;
  Cell* cells() { return cells_; }
  void clear();  // as if nobody had touched anything

 private:
  Cell* cells_;
  std::size_t bytes_;
};

// Looks at one access of the kernel that runs on this thread; does not return if it is refused.
void check(const void* address, std::size_t bytes, bool write, bool atomic);

// No launch that has run can still disturb one to come: what cells say is of no use any more. Gives their memory back once
// there is much of it.
void forget_launches();

// "buffer(0) at byte 256 of 256": of an address that a checked kernel touches.
std::string where_is(const void* address);

// Around a launch of a checked kernel, whose threadgroups must run one after the other on this thread.
class CheckedLaunch {
 public:
  CheckedLaunch(const Dispatch& dispatch, Counters& counters);
  ~CheckedLaunch();
  CheckedLaunch(const CheckedLaunch&) = delete;
  CheckedLaunch& operator=(const CheckedLaunch&) = delete;
};

}  // namespace mlxtape::emulator
