// Trace: what ran when, in the format that chrome://tracing and Perfetto read.
//
// Threads    Every member may be called from any thread at any time.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace mlxtape {

class Trace {
 public:
  using Clock = std::chrono::steady_clock;

  Trace();
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // track names a line of the picture: a backend, a stream.
  void add(std::string_view name, std::string_view track, Clock::time_point start,
           Clock::time_point end);
  std::size_t size() const;
  std::string json() const;
  void write(const std::string& path) const;  // throws kIo; a file is written whole or not at all

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mlxtape
