#include "mlxtape/core/trace.h"

#include <cstdio>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "mlxtape/base/files.h"

namespace mlxtape {

namespace {

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string microseconds(Trace::Clock::duration d) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", std::chrono::duration<double, std::micro>(d).count());
  return text;
}

}  // namespace

struct Trace::Impl {
  struct Event {
    std::string name, track;
    Clock::time_point start, end;
    std::size_t thread;
  };
  const Clock::time_point origin = Clock::now();
  mutable std::mutex mutex;
  std::vector<Event> events;
};

Trace::Trace() : impl_(std::make_unique<Impl>()) {}
Trace::~Trace() = default;

void Trace::add(std::string_view name, std::string_view track, Clock::time_point start,
                Clock::time_point end) {
  const std::size_t thread = std::hash<std::thread::id>{}(std::this_thread::get_id()) % 1000000;
  const std::lock_guard lock(impl_->mutex);
  impl_->events.push_back({std::string(name), std::string(track), start, end, thread});
}

std::size_t Trace::size() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->events.size();
}

std::string Trace::json() const {
  const std::lock_guard lock(impl_->mutex);
  std::string out = "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [";
  const char* separator = "\n";
  for (const Impl::Event& e : impl_->events) {
    out += separator;
    out += "{\"name\": " + json_string(e.name) + ", \"cat\": " + json_string(e.track) +
           ", \"ph\": \"X\", \"pid\": 1, \"tid\": " + std::to_string(e.thread) +
           ", \"ts\": " + microseconds(e.start - impl_->origin) +
           ", \"dur\": " + microseconds(e.end - e.start) + "}";
    separator = ",\n";
  }
  return out + "\n]}\n";
}

void Trace::write(const std::string& path) const { write_whole(path, json(), "trace"); }

}  // namespace mlxtape
