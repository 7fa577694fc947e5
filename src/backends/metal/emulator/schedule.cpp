// When work runs, and in which order. A command buffer that is committed waits: it runs when the host waits for it or for
// a later one, or with a seed perhaps at once. Of its encoders, and of those of other command buffers, any order is taken
// that fences allow; of launches between two barriers, any at all.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>

#include "backends/metal/emulator/check.h"
#include "backends/metal/emulator/control.h"
#include "backends/metal/emulator/metal_objects.h"

namespace mlxtape::emulator {
namespace {

constexpr const char* kCommandErrors = "MTLCommandBufferErrorDomain";

// A launch's serial: which encoder it is of, and between which barriers it lies.
constexpr unsigned kSegmentBits = 24;
std::uint64_t serial_of(const EncoderWork& encoder, std::size_t segment) {
  return encoder.serial << kSegmentBits | segment;
}

class OrderOf : public Order {
 public:
  OrderOf(const EncoderWork& encoder, std::size_t segment, std::uint64_t over)
      : encoder_(encoder), segment_(segment), over_(over) {}
  bool is_before(std::uint64_t serial) const override {
    const std::uint64_t other = serial >> kSegmentBits;
    if (other == encoder_.serial) return (serial & ((1U << kSegmentBits) - 1)) < segment_;
    return encoder_.is_after(other);
  }
  std::uint64_t first_serial() const override { return over_ << kSegmentBits; }

 private:
  const EncoderWork& encoder_;
  std::uint64_t segment_;
  std::uint64_t over_;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Schedule {
  std::mutex mutex;
  std::vector<Reference<CommandBuffer>> pending;  // committed, in order
  std::uint64_t commits = 0;
  std::uint64_t encoders = 1;  // the next one's serial
  std::uint64_t over = 1;      // all encoders before this one had ended when the host last looked
  std::uint64_t state = 1;     // of what is drawn
  std::uint64_t state_seed = 0;
  std::map<std::uint64_t, std::pair<std::uint64_t, std::vector<std::uint64_t>>>
      ancestors;  // of encoders that fences name
};

Schedule& schedule() {
  static auto* schedule = new Schedule;
  return *schedule;
}

std::uint32_t drawn(Schedule& s, std::uint32_t limit) {
  if (s.state_seed != seed()) {
    s.state_seed = seed();
    s.state = mix(s.state_seed, 1) | 1;
  }
  return s.state_seed == 0 ? 0 : draw(s.state, limit);
}

void check_alive(const EncodedLaunch& launch) {
  const auto gone = [](const Object* o) {
    return o != nullptr && o->references.load() <= 0;
  };
  if (gone(launch.pipeline)) violation("a pipeline is released before its kernel has run");
  for (unsigned i = 0; i < kMaxBuffers; ++i) {
    if (gone(launch.buffers[i])) {
      violation("buffer(" + std::to_string(i) + ") of " + launch.dispatch.kernel->name +
                " is released before it has run");
    }
  }
}

// ---- errors ----

struct KnownError {
  FaultKind kind;
  long code;
  const char* text;
};
constexpr KnownError kErrors[] = {
    {FaultKind::kTimeout, 2,
     "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"},
    {FaultKind::kPage, 3,
     "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)"},
    {FaultKind::kIgnored, 4,
     "Ignored (for causing prior/excessive GPU errors) "
     "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"},
    {FaultKind::kInteractivity, 1,
     "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"},
    {FaultKind::kMemory, 8,
     "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"},
};

void end_with_error(CommandBuffer& commands, long code, const std::string& text) {
  auto* error = new ErrorObject(kCommandErrors, code, text);
  commands.error = Reference<ErrorObject>(error);
  release(error);
}

// ---- running ----

class Batch {
 public:
  Batch(Schedule& schedule, std::vector<Reference<CommandBuffer>> buffers)
      : schedule_(schedule), buffers_(std::move(buffers)) {
    for (const Reference<CommandBuffer>& b : buffers_) {
      for (const std::unique_ptr<EncoderWork>& e : b->encoders)
        states_.emplace_back(b.get(), e.get());
    }
  }

  void run() {
    for (const Reference<CommandBuffer>& b : buffers_) b->start = now();
    while (step()) {
    }
    for (const Reference<CommandBuffer>& b : buffers_) finish(*b.get());
  }

 private:
  struct State {
    State(CommandBuffer* c, EncoderWork* w) : commands(c), work(w) {}
    CommandBuffer* commands;
    EncoderWork* work;
    std::size_t segment = 0;
    std::vector<std::size_t> left;  // launches of the segment
    bool is_open = false, is_done = false;
  };

  // One launch of an encoder that may run; false: none is left.
  bool step() {
    std::vector<State*> ready;
    while (first_ < states_.size() && states_[first_].is_done) ++first_;
    for (std::size_t i = first_; i < states_.size() && (ready.empty() || seed() != 0); ++i) {
      if (!states_[i].is_done && may_run(states_[i])) ready.push_back(&states_[i]);
    }
    if (ready.empty()) return false;
    State& s = *ready[drawn(schedule_, static_cast<std::uint32_t>(ready.size()))];
    if (!s.is_open) open_segment(s);
    if (s.left.empty()) {
      next_segment(s);
      return true;
    }
    const std::size_t place = drawn(schedule_, static_cast<std::uint32_t>(s.left.size()));
    const std::size_t launch = s.left[place];
    s.left.erase(s.left.begin() + static_cast<std::ptrdiff_t>(place));
    run_launch(s, s.work->segments[s.segment][launch]);
    return true;
  }

  bool may_run(const State& s) const {
    const auto begin = states_.begin() + static_cast<std::ptrdiff_t>(first_);
    return std::none_of(begin, states_.end(), [&](const State& other) {
      return !other.is_done && &other != &s && s.work->is_after(other.work->serial);
    });
  }

  static void open_segment(State& s) {
    s.is_open = true;
    s.left.resize(s.work->segments[s.segment].size());
    for (std::size_t i = 0; i < s.left.size(); ++i) s.left[i] = i;
  }

  static void next_segment(State& s) {
    s.is_open = false;
    if (++s.segment == s.work->segments.size()) s.is_done = true;
  }

  void run_launch(State& s, EncodedLaunch& launch) {
    if (s.commands->error || skips(s)) return;
    check_alive(launch);
    Dispatch& d = launch.dispatch;
    std::map<unsigned long, ConstantValues::Value>& constants = launch.pipeline->constants;
    for (auto& [index, value] : constants) d.constants[index] = &value.bits;
    collect_residents(s);
    d.residents = residents_;
    d.serial = serial_of(*s.work, s.segment);
    const OrderOf order(*s.work, s.segment, schedule_.over);
    d.order = &order;
    d.seed = seed() == 0 ? 0 : mix(seed(), ++launches_) | 1;
    d.salt = seed();
    Outcome outcome = emulator::run(d);
    note_launch(d.kernel->name, outcome.counters);
    const double seconds = seconds_on_m1(outcome.counters);
    seconds_[s.commands] += seconds;
    if (outcome.fault.empty() && seconds > time_limits().launch) {
      outcome.fault = std::string(d.kernel->name) + ": an M1 would need " +
                      std::to_string(seconds * 1e3) + " ms for one launch";
    }
    if (outcome.fault.empty() && seconds_[s.commands] > time_limits().buffer) {
      outcome.fault = std::string(d.kernel->name) + ": an M1 would need " +
                      std::to_string(seconds_[s.commands] * 1e3) +
                      " ms for the command buffer so far";
    }
    if (!outcome.fault.empty()) {
      const std::string how =
          seed() == 0 ? "" : " [MLXTAPE_METAL_SEED=" + std::to_string(seed()) + "]";
      end_with_error(*s.commands, 3, outcome.fault + how);
    }
  }

  // An injected error strikes in the middle.
  static bool skips(const State& s) {
    return s.commands->planned_error != 0 && s.segment * 2 >= s.work->segments.size();
  }

  void collect_residents(const State& s) {
    residents_.clear();
    for (const auto& [buffer, is_written] : s.work->resources)
      residents_.push_back({&buffer->block, is_written});
    for (const Reference<ResidencySet>& set : s.commands->queue->sets) {
      for (const Reference<Buffer>& buffer : set->committed)
        residents_.push_back({&buffer->block, true});
    }
  }

  void finish(CommandBuffer& commands) {
    for (const KnownError& known : kErrors) {
      if (commands.planned_error == known.code && !commands.error)
        end_with_error(commands, known.code, known.text);
    }
    commands.end = now();
    commands.encoders.clear();
    commands.status.store(commands.error ? CommandBuffer::kError : CommandBuffer::kCompleted);
  }

  Schedule& schedule_;
  std::vector<Reference<CommandBuffer>> buffers_;
  std::vector<State> states_;
  std::size_t first_ = 0;  // all states before it are done
  std::vector<Resident> residents_;
  std::map<CommandBuffer*, double> seconds_;
  static inline std::uint64_t launches_ = 0;
};

// Everything that was committed up to this one. Behind one that hangs nothing of its queue runs, and nothing is left
// behind otherwise: true.
bool run_up_to(Schedule& s, std::uint64_t number) {
  std::vector<Reference<CommandBuffer>> batch, left;
  std::vector<const Queue*> stuck;
  bool runs_all = true;
  for (Reference<CommandBuffer>& commands : s.pending) {
    const Queue* queue = commands->queue.get();
    if (commands->hangs) stuck.push_back(queue);
    const bool is_stuck = std::find(stuck.begin(), stuck.end(), queue) != stuck.end();
    const bool runs = commands->number <= number && !is_stuck;
    runs_all = runs_all && (runs || is_stuck);
    (runs ? batch : left).push_back(std::move(commands));
  }
  s.pending = std::move(left);
  if (!batch.empty()) Batch(s, std::move(batch)).run();
  return runs_all;
}

// What this encoder waits for, by the fences as they are when it is committed.
void order_encoder(Schedule& s, EncoderWork& work) {
  work.serial = s.encoders++;
  work.prefix = s.over;
  for (const Fence* fence : work.waits) {
    const std::uint64_t before = fence->updated_by;
    const auto found = s.ancestors.find(before);
    if (before == 0 || found == s.ancestors.end()) continue;
    work.prefix = std::max(work.prefix, found->second.first);
    work.others.insert(work.others.end(), found->second.second.begin(), found->second.second.end());
    work.others.push_back(before);
  }
  std::sort(work.others.begin(), work.others.end());
  work.others.erase(std::unique(work.others.begin(), work.others.end()), work.others.end());
  for (const std::uint64_t other : work.others) {
    if (other == work.prefix) ++work.prefix;
  }
  std::erase_if(work.others, [&](std::uint64_t other) { return other < work.prefix; });
  for (Fence* fence : work.updates) fence->updated_by = work.serial;
  if (!work.updates.empty()) s.ancestors[work.serial] = {work.prefix, work.others};
}

}  // namespace

bool EncoderWork::is_after(std::uint64_t other) const {
  return other < prefix || std::binary_search(others.begin(), others.end(), other);
}

void commit(CommandBuffer& commands) {
  if (commands.status.load() != CommandBuffer::kNew)
    violation("a command buffer is committed twice");
  if (commands.open != nullptr) violation("commit: an encoder has not ended");
  commands.hangs = is_due(FaultKind::kHang);
  for (const KnownError& known : kErrors) {
    if (is_due(known.kind)) commands.planned_error = known.code;
  }
  Schedule& s = schedule();
  const std::lock_guard lock(s.mutex);
  for (const std::unique_ptr<EncoderWork>& encoder : commands.encoders) order_encoder(s, *encoder);
  commands.number = ++s.commits;
  commands.status.store(CommandBuffer::kCommitted);
  s.pending.emplace_back(&commands);
  if (seed() != 0 && drawn(s, 4) == 0) run_up_to(s, commands.number);
}

void wait_until_completed(CommandBuffer& commands) {
  if (commands.status.load() == CommandBuffer::kNew)
    violation("waitUntilCompleted: the command buffer is not committed");
  Schedule& s = schedule();
  std::unique_lock lock(s.mutex);
  if (run_up_to(s, commands.number)) {  // the host knows that all have ended
    s.over = s.encoders;
    s.ancestors.clear();
    forget_launches();
  }
  while (commands.status.load() < CommandBuffer::kCompleted) {
    lock.unlock();
    pause();
    lock.lock();
  }
}

}  // namespace mlxtape::emulator
