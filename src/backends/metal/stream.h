// Stream: the one queue of a device. It puts dispatches into command buffers, hands those to the GPU, and knows how far it
// has come.
//
// Order      Dispatches of one encoder may run side by side, so a barrier stands before each that reads what was written, or
//            writes what was read or written, since the last one, by the bytes that each says it touches. Encoders of
//            different command buffers may overlap as well: each waits for a fence that the one before it updates.
//            Memory that goes back to the pool can therefore be given out again at once, as far as the GPU is concerned.
// Commit     After so many dispatches, so many bytes, or so much estimated time: the system ends a command buffer that
//            keeps the display waiting. The first one after a pause goes early, so that the GPU does not wait for work.
// Failure    A command buffer that ends with an error takes the device with it: every later call throws the same words,
//            which name the kernels of that buffer. A GPU that makes no progress for long is a failure, too.
//
// Threads    Every member may be called from any thread at any time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/metal/blocks.h"
#include "backends/metal/dispatch.h"
#include "backends/metal/residency.h"
#include "mlxtape/base/error.h"
#include "mlxtape/core/trace.h"

namespace mlxtape::metal {

// What the device may be told (Device::set_option). The defaults suit the smallest chips.
struct StreamOptions {
  double dispatches = 40;          // of a command buffer
  double first_dispatches = 8;     // of one that starts a pause's end
  double megabytes = 40;           // touched by a command buffer
  double seconds = 0.1;            // estimated, of a command buffer
  double dispatch_seconds = 0.05;  // estimated, of one dispatch; longer ones are launched in parts
  double patience_seconds = 60;    // without any progress
  bool serial = false;             // one dispatch in each command buffer: a failure has one name
  bool overlap = true;             // false: a barrier before every dispatch
  bool strict =
      false;  // a dispatch that would take longer than that, and cannot be cut, is an error: for tests
  bool residency = true;  // false: nothing is kept wired between command buffers
};

class Stream {
 public:
  Stream(Id device, bool has_residency);

  void set(const StreamOptions& options);
  StreamOptions options() const;
  Residency& residency() { return residency_; }

  void add(const Dispatch& dispatch);
  // What comes until end_span is one entry of the trace, in command buffers of its own.
  void begin_span(const std::string& name, const std::string& track,
                  const std::shared_ptr<Trace>& trace);
  void end_span();

  void commit();
  void wait();                          // for everything so far
  void wait_for(std::uint64_t number);  // for that command buffer and those before it
  bool is_done(std::uint64_t number);
  bool is_done(const Block& block) { return is_done(block.last_use); }
  void check() const;  // throws if the device is lost

  // Let go when the GPU cannot use it any more.
  void bury(std::unique_ptr<Block> block);

  struct Counts {
    std::uint64_t command_buffers = 0, dispatches = 0, barriers = 0;
  };
  Counts counts() const;

 private:
  struct Span {
    std::string name, track;
    std::shared_ptr<Trace> trace;
    int running = 0;            // command buffers of it that have not ended
    bool is_over = false;       // no more will come
    double start = 0, end = 0;  // seconds of the GPU's clock; both 0: nothing ran yet
  };
  struct CommandBuffer {
    std::uint64_t number = 0;
    Retained commands;
    std::vector<const std::string*> kernels;  // each once, in their order
    std::shared_ptr<Span> span;
  };

  using Lock = std::unique_lock<std::mutex>;
  void open();
  void add_part(const Dispatch& dispatch, std::uint32_t first, Size groups, double seconds,
                bool continues);
  void order(const Dispatch& dispatch, bool continues);
  void commit_open();
  void check_locked() const;
  void reap();
  void lose(const CommandBuffer& failed);
  void lose(Errc code, const std::string& why);
  void end_of(const CommandBuffer& ended);
  void show(Span& span);
  void complete();  // what the thread does

  mutable std::mutex mutex_;
  StreamOptions options_;
  Retained device_, queue_, fence_;
  Residency residency_;
  std::string lost_;  // why the device cannot be used any more
  Errc lost_code_ = Errc::kBackend;

  // The command buffer that is being encoded.
  CommandBuffer open_;
  Retained encoder_;
  std::vector<Range> reads_, writes_;  // since the last barrier
  double open_dispatches_ = 0, open_bytes_ = 0, open_seconds_ = 0;
  std::shared_ptr<Span> span_;

  std::deque<CommandBuffer> in_flight_;
  std::uint64_t next_ = 1;       // number of the open one
  std::uint64_t completed_ = 0;  // of the last that ended
  std::uint64_t wanted_ = 0;     // what somebody waits for
  std::uint64_t ended_ = 0;      // how many ended, well or not: progress
  bool has_thread_ = false;
  std::condition_variable work_, progress_;
  std::vector<std::pair<std::uint64_t, std::unique_ptr<Block>>> buried_;
  bool has_clock_ = false;
  Trace::Clock::duration clock_offset_{};  // of the trace's clock to the GPU's
  Counts counts_;
};

}  // namespace mlxtape::metal
