#include "progress.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <sys/ioctl.h>
#include <unistd.h>

#include "output.h"

namespace mlxtape::cli {

namespace {

constexpr double kRedrawSeconds = 0.1;

bool is_terminal(std::FILE* file) {
  const char* kind = std::getenv("TERM");
  return ::isatty(::fileno(file)) != 0 && kind != nullptr && std::strcmp(kind, "dumb") != 0;
}

std::size_t columns_of(std::FILE* file) {
  winsize size{};
  if (::ioctl(::fileno(file), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

double seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

}  // namespace

Progress::Progress(std::string title, std::int64_t total, const Globals& globals)
    : Progress(std::move(title), total, globals, Options{}) {}

Progress::Progress(std::string title, std::int64_t total, const Globals& globals,
                   const Options& options)
    : title_(std::move(title)),
      total_(total),
      done_(options.start),
      options_(options),
      quiet_(globals.quiet),
      begun_(Clock::now()),
      shown_(begun_) {
  if (options_.to == nullptr) options_.to = stderr;
  terminal_ = options_.as_terminal || is_terminal(options_.to);
}

Progress::~Progress() { clear(); }

void Progress::at(std::int64_t done, const std::string& extra) {
  done_ = done;
  extra_ = extra;
  if (quiet_) return;
  const auto now = Clock::now();
  const bool first = shown_ == begun_;
  const double wait = terminal_ ? (first ? options_.first_after : kRedrawSeconds)
                                : (first ? options_.plain_first : options_.plain_every);
  if (seconds(now - shown_) < wait) return;
  shown_ = now;
  draw();
}

void Progress::line(const std::string& said) {
  const bool was_drawn = drawn_;
  clear();
  std::fprintf(options_.to, "%s\n", said.c_str());
  if (was_drawn) draw();
}

void Progress::clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", options_.to);
  std::fflush(options_.to);
  drawn_ = false;
}

void Progress::draw() {
  if (!terminal_) {
    std::fprintf(options_.to, "%s\n", text(0).c_str());
    std::fflush(options_.to);
    return;
  }
  const std::size_t width =
      options_.columns > 0 ? static_cast<std::size_t>(options_.columns) : columns_of(options_.to);
  // One column less: a full line would make some terminals begin the next.
  std::fprintf(options_.to, "\r%s\033[K", text(width - 1).c_str());
  std::fflush(options_.to);
  drawn_ = true;
}

std::string Progress::amount(std::int64_t done) const {
  return options_.unit == Unit::kBytes ? human_bytes(static_cast<double>(done))
                                       : std::to_string(done);
}

// width 0: no bar.
std::string Progress::text(std::size_t width) const {
  const double took = seconds(Clock::now() - begun_);
  const auto gone = static_cast<double>(done_ - options_.start);
  const double rate = took > 0 ? gone / took : 0;
  const std::string head = title_ + "  " + amount(done_) + "/" + amount(total_) + " ";
  std::string tail;
  if (rate > 0) {
    const bool slow = options_.unit == Unit::kSteps && rate < 1;
    tail = options_.unit == Unit::kBytes ? human_bytes(rate) + "/s"
           : slow                        ? human_time(1 / rate) + " each"
                                         : fixed(rate, rate < 100 ? 1 : 0) + "/s";
    tail += ", " + human_time(static_cast<double>(total_ - done_) / rate) + " left";
  }
  if (!extra_.empty()) tail += (tail.empty() ? "" : ", ") + extra_;
  if (width == 0) return head + (tail.empty() ? "" : " ") + tail;
  constexpr std::size_t kLeast = 8, kMost = 40;
  const std::size_t other = head.size() + tail.size() + 3;
  std::string bar;
  if (other + kLeast <= width) {
    const std::size_t room = std::min(kMost, width - other);
    const double share =
        total_ > 0 ? std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 0.0, 1.0)
                   : 0;
    const auto filled = static_cast<std::size_t>(share * static_cast<double>(room));
    bar = std::string(filled, '=');
    if (filled < room) bar += ">" + std::string(room - filled - 1, ' ');
    bar = "[" + bar + "] ";
  }
  return (head + bar + tail).substr(0, width);
}

}  // namespace mlxtape::cli
