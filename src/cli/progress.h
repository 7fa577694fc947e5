// Progress: how far long work is: on a terminal a bar in one place, elsewhere a plain line every few seconds.
//
//   Progress progress("train", iterations, globals);
//   hooks.on_step = [&](std::int64_t step) { progress.at(step, "loss 1.234"); };
//   progress.line("step 100: validation loss 1.5");
//
//   train   412/1000 [================>                      ] 12.3/s, 0:48 left, loss 1.234
//
// Written to stderr: stdout is for results. Nothing with --quiet, but for what line says.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "command.h"

namespace mlxtape::cli {

class Progress {
 public:
  enum class Unit : std::uint8_t { kSteps, kBytes };
  struct Options {
    std::int64_t start = 0;  // where a resumed run goes on; not counted in the rate
    Unit unit = Unit::kSteps;
    double first_after = 0.1;  // seconds until the first bar: work that is done at once needs none
    double plain_first = 5;    // where there is no terminal: seconds until the first line,
    double plain_every = 5;    // and between lines; infinity: none
    std::FILE* to = nullptr;   // null: stderr
    bool as_terminal = false;  // whatever `to` is
    int columns = 0;           // 0: the terminal's
  };

  Progress(std::string title, std::int64_t total, const Globals& globals);
  Progress(std::string title, std::int64_t total, const Globals& globals, const Options& options);
  ~Progress();  // takes the bar away
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // So much is done; extra stands at the end of the line until the next call.
  void at(std::int64_t done, const std::string& extra = "");
  // A line of text above the bar, or between the plain lines.
  void line(const std::string& text);

 private:
  using Clock = std::chrono::steady_clock;
  std::string text(std::size_t width) const;
  std::string amount(std::int64_t done) const;
  void clear();
  void draw();

  std::string title_, extra_;
  std::int64_t total_, done_;
  Options options_;
  bool quiet_, terminal_, drawn_ = false;
  Clock::time_point begun_, shown_;
};

}  // namespace mlxtape::cli
