// The one error type. Thrown by host code when the caller's data breaks a contract;
// never thrown by a destructor or a completion callback.
//
// Threads    Error is a value: copy it, throw it and catch it on any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace mlxtape {

enum class Errc : std::uint8_t {
  kShape,        // a shape, a stride or an extent that does not fit
  kDType,        // an element type that is not allowed here
  kDevice,       // a device that does not exist, or tensors on different devices
  kArgument,     // any other argument out of its range
  kNoKernel,     // no kernel of that name on this backend
  kNoGradient,   // a gradient was asked for where none is defined
  kOutOfMemory,  // the allocation would pass the limit, or the system refused it
  kIo,           // a file could not be read or written
  kBackend,      // the device reported a failure
};

const char* name_of(Errc code) noexcept;  // "shape", "dtype", ...

// Messages read `op: what must hold, got what came`.
class Error : public std::runtime_error {
 public:
  Error(Errc code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Errc code() const noexcept { return code_; }

 private:
  Errc code_;
};

// Validators return this, so a table test can read them without try/catch.
using Check = std::optional<Error>;

inline void require(const Check& check) {
  if (check) throw *check;
}

// Prints the broken invariant and ends the process. For our own mistakes, never for user data.
[[noreturn]] void assert_failed(const char* condition, const char* file, int line) noexcept;

}  // namespace mlxtape

#define MT_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::mlxtape::assert_failed(#condition, __FILE__, __LINE__))
