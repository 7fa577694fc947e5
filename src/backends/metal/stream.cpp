#include "backends/metal/stream.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

#include "backends/metal/calls.h"

#ifdef MLXTAPE_METAL_EMULATED
// Tells the emulator how many bytes on both sides of a binding's offset belong to the tensor: it faults on all others.
extern "C" void mlxtape_metal_extent(objc_object* encoder, unsigned long index,
                                     unsigned long before, unsigned long after);
#endif

namespace mlxtape::metal {

namespace {

// Of MTLCommandBufferErrorDomain.
constexpr long kTimeout = 2, kOutOfMemory = 8;

double bytes_of(const std::vector<Range>& ranges) {
  double bytes = 0;
  for (const Range& range : ranges) bytes += static_cast<double>(range.end - range.begin);
  return bytes;
}

bool any_overlap(const std::vector<Range>& some, const std::vector<Range>& others) {
  return std::any_of(some.begin(), some.end(), [&](const Range& one) {
    return std::any_of(others.begin(), others.end(),
                       [&](const Range& other) { return one.overlaps(other); });
  });
}

// "a", or "one of a, b, c".
std::string list_of(const std::vector<const std::string*>& kernels) {
  std::string list;
  for (const std::string* name : kernels) list += (list.empty() ? "" : ", ") + *name;
  return kernels.size() == 1 ? list
                             : "one of " + list + " (with the option serial it is known which)";
}

}  // namespace

Stream::Stream(Id device, bool has_residency)
    : device_(Retained::share(device)), queue_(new_queue(device)), fence_(new_fence(device)) {
  if (!queue_ || !fence_) {
    throw Error(Errc::kBackend, "metal: the device must give a queue and a fence, got none");
  }
  if (has_residency) residency_.start(device, queue_.get());
}

void Stream::set(const StreamOptions& options) {
  const Lock lock(mutex_);
  commit_open();
  options_ = options;
  residency_.set_on(options.residency);
}

StreamOptions Stream::options() const {
  const Lock lock(mutex_);
  return options_;
}

Stream::Counts Stream::counts() const {
  const Lock lock(mutex_);
  return counts_;
}

// ---- encoding ----

void Stream::add(const Dispatch& dispatch) {
  const Lock lock(mutex_);
  check_locked();
  unsigned long each = dispatch.groups.width;  // groups of a part
  if (dispatch.takes_first_group && dispatch.seconds > options_.dispatch_seconds) {
    const double most = options_.dispatch_seconds / dispatch.seconds;
    each = std::max(1UL, static_cast<unsigned long>(static_cast<double>(each) * most));
  }
  const double longest =
      dispatch.seconds * static_cast<double>(each) / static_cast<double>(dispatch.groups.width);
  if (options_.strict && longest > options_.dispatch_seconds) {
    throw Error(Errc::kBackend, dispatch.pipeline->name + " must take at most " +
                                    std::to_string(std::lround(options_.dispatch_seconds * 1e3)) +
                                    " ms on a small chip, got an estimate of " +
                                    std::to_string(std::lround(longest * 1e3)) +
                                    " ms: let it be cut (in_parts)");
  }
  for (unsigned long first = 0; first < dispatch.groups.width; first += each) {
    Size groups = dispatch.groups;
    groups.width = std::min(each, dispatch.groups.width - first);
    add_part(dispatch, static_cast<std::uint32_t>(first), groups,
             dispatch.seconds * static_cast<double>(groups.width) /
                 static_cast<double>(dispatch.groups.width),
             first != 0);
  }
}

void Stream::add_part(const Dispatch& dispatch, std::uint32_t first, Size groups, double seconds,
                      bool continues) {
  if (encoder_ && open_seconds_ + seconds > options_.seconds) commit_open();
  if (!encoder_) open();
  order(dispatch, continues);
  const Id encoder = encoder_.get();
  set_pipeline(encoder, dispatch.pipeline->state.get());
  for (const Dispatch::Binding& binding : dispatch.buffers) {
    if (binding.block == nullptr) {
      set_buffer(encoder, nullptr, 0, binding.index);
      continue;
    }
    set_buffer(encoder, binding.block->buffer.get(), binding.offset, binding.index);
#ifdef MLXTAPE_METAL_EMULATED
    mlxtape_metal_extent(encoder, binding.index, binding.before, binding.after);
#endif
    binding.block->last_use = open_.number;
  }
  for (const Dispatch::Bytes& bytes : dispatch.bytes) {
    set_bytes(encoder, bytes.value.data(), bytes.value.size(), bytes.index);
  }
  if (dispatch.takes_first_group) set_bytes(encoder, &first, sizeof first, kFirstGroupAt);
  for (Block* block : dispatch.tables) {
    if (!block->is_resident) use_resource(encoder, block->buffer.get());
    block->last_use = open_.number;
  }
  if (dispatch.group_memory != 0) set_group_memory(encoder, dispatch.group_memory, 0);
  dispatch_groups(encoder, groups, dispatch.threads);
  ++counts_.dispatches;
  ++open_dispatches_;
  open_seconds_ += seconds;
  if (!continues) open_bytes_ += bytes_of(dispatch.reads) + bytes_of(dispatch.writes);
  if (std::find(open_.kernels.begin(), open_.kernels.end(), dispatch.kernel) ==
      open_.kernels.end()) {
    open_.kernels.push_back(dispatch.kernel);
  }
  const double most = in_flight_.empty() ? options_.first_dispatches : options_.dispatches;
  if (options_.serial || open_dispatches_ >= most || open_bytes_ >= options_.megabytes * 1e6) {
    commit_open();
  }
}

void Stream::open() {
  const AutoreleasePool pool;
  open_ = {};
  open_.commands = Retained::share(command_buffer(queue_.get()));
  if (open_.commands) encoder_ = Retained::share(compute_encoder(open_.commands.get()));
  if (!encoder_) {
    throw Error(Errc::kBackend, "metal: the queue must give a command buffer, got none");
  }
  open_.number = next_;
  wait_for_fence(encoder_.get(), fence_.get());
}

// A barrier where one is needed, and what the dispatch touches for those to come.
void Stream::order(const Dispatch& dispatch, bool continues) {
  const bool is_first = open_dispatches_ == 0;
  const bool depends = any_overlap(dispatch.reads, writes_) ||
                       any_overlap(dispatch.writes, writes_) ||
                       any_overlap(dispatch.writes, reads_);
  if (!is_first && !continues && (depends || !options_.overlap)) {
    barrier(encoder_.get());
    ++counts_.barriers;
    reads_.clear();
    writes_.clear();
  }
  reads_.insert(reads_.end(), dispatch.reads.begin(), dispatch.reads.end());
  writes_.insert(writes_.end(), dispatch.writes.begin(), dispatch.writes.end());
}

void Stream::commit_open() {
  if (!encoder_) return;
  const AutoreleasePool pool;
  residency_.update();
  update_fence(encoder_.get(), fence_.get());
  end_encoding(encoder_.get());
  metal::commit(open_.commands.get());
  open_.span = span_;
  if (span_) ++span_->running;
  in_flight_.push_back(std::move(open_));
  encoder_ = {};
  reads_.clear();
  writes_.clear();
  open_dispatches_ = open_bytes_ = open_seconds_ = 0;
  ++next_;
  ++counts_.command_buffers;
}

void Stream::commit() {
  const Lock lock(mutex_);
  check_locked();
  commit_open();
}

// ---- waiting ----

void Stream::wait() {
  std::uint64_t last = 0;
  {
    const Lock lock(mutex_);
    last = encoder_ ? next_ : next_ - 1;
  }
  wait_for(last);
}

void Stream::wait_for(std::uint64_t number) {
  Lock lock(mutex_);
  check_locked();
  if (number == next_) commit_open();
  number = std::min(number, next_ - 1);
  reap();
  while (completed_ < number && lost_.empty()) {
    wanted_ = std::max(wanted_, number);
    if (!std::exchange(has_thread_, true)) std::thread([this] { complete(); }).detach();
    work_.notify_one();
    const std::uint64_t before = ended_;
    const std::chrono::duration<double> patience(options_.patience_seconds);
    if (progress_.wait_for(lock, patience, [&] { return ended_ != before || !lost_.empty(); })) {
      continue;
    }
    lose(Errc::kBackend, "metal: the GPU must make progress, got none for " +
                             std::to_string(std::lround(options_.patience_seconds)) + " s in " +
                             list_of(in_flight_.front().kernels));
  }
  check_locked();
}

// Waits for command buffers that somebody waits for, in their order. It is a thread of its own, because a driver that
// hangs would never return from here.
void Stream::complete() {
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return !in_flight_.empty() && in_flight_.front().number <= wanted_; });
    const Retained commands = in_flight_.front().commands;
    lock.unlock();
    {
      const AutoreleasePool pool;
      wait_until_completed(commands.get());
    }
    lock.lock();
    reap();
  }
}

bool Stream::is_done(std::uint64_t number) {
  const Lock lock(mutex_);
  if (number > completed_) reap();
  return number <= completed_;
}

// Takes note of the command buffers that have ended.
void Stream::reap() {
  const std::uint64_t before = ended_;
  while (!in_flight_.empty()) {
    const CommandBuffer& first = in_flight_.front();
    const unsigned long state = status(first.commands.get());
    if (state != kStatusCompleted && state != kStatusError) break;
    if (state == kStatusError) lose(first);
    end_of(first);
    completed_ = first.number;
    ++ended_;
    in_flight_.pop_front();
  }
  const auto gone = std::remove_if(buried_.begin(), buried_.end(),
                                   [&](const auto& each) { return each.first <= completed_; });
  buried_.erase(gone, buried_.end());
  if (ended_ != before) progress_.notify_all();
}

void Stream::bury(std::unique_ptr<Block> block) {
  const Lock lock(mutex_);
  const std::uint64_t last = block->last_use;
  if (last > completed_) reap();
  if (last > completed_) buried_.emplace_back(last, std::move(block));
}

// ---- failures ----

void Stream::lose(Errc code, const std::string& why) {
  if (!lost_.empty()) return;  // what comes after a failure is its consequence
  lost_code_ = code;
  lost_ = why + "; this process cannot use the device any more";
  progress_.notify_all();
}

void Stream::lose(const CommandBuffer& failed) {
  const AutoreleasePool pool;
  const Id error = error_of(failed.commands.get());
  std::string why = "metal: kernels must not fail, got " + description(error);
  long number = 0;
  if (error != nullptr) {
    number = code(error);
    why += " (" + domain(error) + " " + std::to_string(number) + ")";
  }
  why += " in " + list_of(failed.kernels);
  if (number == kTimeout) why += "; a kernel ran for so long that the system ended it";
  if (number == kOutOfMemory) {
    why += "; the GPU may use more of the memory with sysctl iogpu.wired_limit_mb";
  }
  lose(number == kOutOfMemory ? Errc::kOutOfMemory : Errc::kBackend, why);
}

void Stream::check() const {
  const Lock lock(mutex_);
  check_locked();
}

void Stream::check_locked() const {
  if (!lost_.empty()) throw Error(lost_code_, lost_);
}

// ---- traces ----

void Stream::begin_span(const std::string& name, const std::string& track,
                        const std::shared_ptr<Trace>& trace) {
  const Lock lock(mutex_);
  check_locked();
  commit_open();
  span_ = std::make_shared<Span>(Span{name, track, trace, 0, false, 0, 0});
}

void Stream::end_span() {
  const Lock lock(mutex_);
  commit_open();
  const std::shared_ptr<Span> span = std::exchange(span_, nullptr);
  span->is_over = true;
  if (span->running == 0) show(*span);
}

// The GPU's clock is not the trace's: how far it is behind is learned from when an end is seen, the sooner the better.
void Stream::end_of(const CommandBuffer& ended) {
  if (!ended.span) return;
  Span& span = *ended.span;
  const double start = gpu_start(ended.commands.get()), end = gpu_end(ended.commands.get());
  span.start = span.end == 0 ? start : std::min(span.start, start);
  span.end = std::max(span.end, end);
  const auto seen =
      Trace::Clock::now().time_since_epoch() -
      std::chrono::duration_cast<Trace::Clock::duration>(std::chrono::duration<double>(end));
  clock_offset_ = has_clock_ ? std::min(clock_offset_, seen) : seen;
  has_clock_ = true;
  --span.running;
  if (span.is_over && span.running == 0) show(span);
}

void Stream::show(Span& span) {
  const auto at = [&](double seconds) {
    return Trace::Clock::time_point(
        clock_offset_ +
        std::chrono::duration_cast<Trace::Clock::duration>(std::chrono::duration<double>(seconds)));
  };
  if (span.end == 0) {  // a kernel that had nothing to do
    span.trace->add(span.name, span.track, Trace::Clock::now(), Trace::Clock::now());
  } else {
    span.trace->add(span.name, span.track, at(span.start), at(span.end));
  }
}

}  // namespace mlxtape::metal
