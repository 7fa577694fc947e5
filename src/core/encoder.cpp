#include "mlxtape/core/encoder.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "core/memory_kernels.h"

namespace mlxtape {

namespace {

constexpr std::size_t kMostTensors = 384;

constinit const KernelHandle kCopy("copy");
constinit const KernelHandle kZero("zero");
constinit const KernelHandle kMove("move");
constinit const KernelHandle kFill("fill");
constinit const KernelHandle kAddInto("add_into");

DType unsigned_of_size(std::size_t bytes) {
  switch (bytes) {
    case 1: return DType::kU8;
    case 2: return DType::kU16;
    case 4: return DType::kU32;
    default: return DType::kU64;
  }
}

}  // namespace

// The encoder's lock. The thread that holds it runs a kernel, and that kernel must not come back.
class CommandEncoder::Lock {
 public:
  explicit Lock(const CommandEncoder& encoder) : encoder_(encoder) {
    const std::thread::id self = std::this_thread::get_id();
    if (encoder_.holder_.load(std::memory_order_relaxed) == self) {
      throw Error(Errc::kArgument, "encoder: a kernel must not call the encoder that runs it");
    }
    encoder_.mutex_.lock();
    encoder_.holder_.store(self, std::memory_order_relaxed);
  }
  ~Lock() {
    encoder_.holder_.store(std::thread::id(), std::memory_order_relaxed);
    encoder_.mutex_.unlock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  const CommandEncoder& encoder_;
};

void CommandEncoder::run(const Kernel& kernel, const void* args, std::size_t args_bytes,
                         std::span<const TensorRef> in, std::span<const TensorRef> out) {
  const Lock lock(*this);
  // A graph that lacks a kernel would be wrong at every replay.
  struct Failed {
    CommandEncoder& encoder;
    bool on = true;
    ~Failed() { encoder.recording_failed_ |= on && encoder.recording_; }
  } failed{*this};
  std::array<void*, kMostTensors> addresses;  // NOLINT: as many as there are tensors are set
  if (in.size() + out.size() > kMostTensors) {
    throw Error(Errc::kArgument, kernel.name + ": at most " + std::to_string(kMostTensors) +
                                     " tensors, got " + std::to_string(in.size() + out.size()));
  }
  std::size_t n = 0;
  for (const auto& list : {in, out}) {
    for (const Tensor& t : list) {
      if (t.size() != 0 && !t.has_memory()) {
        throw Error(Errc::kArgument, kernel.name + ": every tensor must have memory, got " +
                                         to_string(t.shape()) + " without any");
      }
      if (t.has_memory() && t.device() != device_) {
        throw Error(Errc::kDevice, kernel.name + ": every tensor must be on " + device_->name() +
                                       ", got one on " + t.device()->name());
      }
      addresses[n++] = t.data();
    }
  }
  Buffer workspace;
  if (!rehearsing_) ++counters_.dispatches;
  try {
    if (kernel.workspace != nullptr) {
      const std::size_t bytes = kernel.workspace(args);
      if (bytes != 0) workspace = device_->memory().allocate(bytes);
    }
    if (!launching_ || rehearsing_) {
      failed.on = false;
      return;
    }
    if (recording_) {
      for (const auto& list : {in, out}) {
        for (const Tensor& t : list) recorded_memory_.push_back(t.buffer().backing());
      }
      for (const Tensor& t : out) {
        const Buffer memory = t.buffer().backing();
        if (memory) recorded_writes_.push_back(memory.storage());
      }
      if (workspace) recorded_memory_.push_back(workspace.backing());
    }
    operands_ = {in, out, workspace.bytes()};
    const KernelCall call{{addresses.data(), in.size()},
                          {addresses.data() + in.size(), out.size()},
                          args,
                          args_bytes,
                          workspace.address(),
                          nullptr,
                          kernel.state};
    trace_ && !recording_ ? launch_traced(kernel, call, trace_) : launch(kernel, call);
    if (recording_) ++recorded_nodes_;
    for (const Tensor& t : out) t.buffer().note_write();
    failed.on = false;
  } catch (const Error& e) {
    throw Error(e.code(), kernel.name + ": " + e.what());
  } catch (const std::exception& e) {
    throw Error(Errc::kBackend, kernel.name + ": the kernel must not fail, got " + e.what());
  } catch (...) {
    throw Error(Errc::kBackend, kernel.name + ": the kernel must not fail, got an exception");
  }
}

void CommandEncoder::launch_traced(const Kernel& kernel, const KernelCall& call,
                                   const std::shared_ptr<Trace>& trace) {
  const Trace::Clock::time_point start = Trace::Clock::now();
  launch(kernel, call);
  trace->add(kernel.name, name_of(backend()), start, Trace::Clock::now());
}

void CommandEncoder::check_not_recording(const char* what) const {
  if (rehearsing_) {
    throw Error(Errc::kArgument,
                std::string("encoder: work that is to be captured may only run kernels, got ") +
                    what + "; do that before, or do not capture");
  }
  if (recording_) {
    throw Error(
        Errc::kArgument,
        std::string("encoder: between begin_capture and end_capture kernels alone, got ") + what);
  }
}

void CommandEncoder::begin_capture() {
  const Lock lock(*this);
  check_not_recording("begin_capture");
  submit();
  start_recording();
  recording_ = true;
  recording_failed_ = false;
}

std::unique_ptr<Graph> CommandEncoder::end_capture() {
  const Lock lock(*this);
  if (!recording_) throw Error(Errc::kArgument, "encoder: end_capture needs a begin_capture first");
  recording_ = false;
  std::vector<Buffer> memory = std::exchange(recorded_memory_, {});
  const std::size_t nodes = std::exchange(recorded_nodes_, 0);
  std::vector<Storage*> writes = std::exchange(recorded_writes_, {});
  std::unique_ptr<Graph> graph = finish_recording();
  if (recording_failed_) {
    throw Error(Errc::kArgument,
                "encoder: every kernel of a capture must be recorded, got one that failed");
  }
  graph->device_ = device_;
  graph->nodes_ = nodes;
  graph->memory_ = std::move(memory);
  std::sort(writes.begin(), writes.end());
  writes.erase(std::unique(writes.begin(), writes.end()), writes.end());
  graph->writes_ = std::move(writes);
  return graph;
}

void CommandEncoder::replay(const Graph& graph) {
  if (&graph.device() != device_) {
    throw Error(Errc::kDevice, "encoder: a graph runs on the device it was captured on, " +
                                   graph.device().name() + ", got " + device_->name());
  }
  const Lock lock(*this);
  check_not_recording("replay");
  counters_.dispatches += graph.nodes();
  if (!launching_) return;
  run_graph(graph);
  for (Storage* written : graph.writes_) written->version.fetch_add(1, std::memory_order_relaxed);
}

void CommandEncoder::commit() {
  const Lock lock(*this);
  check_not_recording("commit");
  ++counters_.commits;
  submit();
}

void CommandEncoder::commit_and_wait() {
  const Lock lock(*this);
  check_not_recording("commit_and_wait");
  ++counters_.commits;
  ++counters_.waits;
  submit();
  wait();
}

EncoderCounters CommandEncoder::counters() const {
  const Lock lock(*this);
  return counters_;
}

void CommandEncoder::set_trace(std::shared_ptr<Trace> trace) {
  const Lock lock(*this);
  trace_ = std::move(trace);
}

bool CommandEncoder::is_traced() const {
  const Lock lock(*this);
  return trace_ != nullptr;
}

void CommandEncoder::rehearse(FunctionRef<void()> body) {
  struct Rehearsal {
    CommandEncoder& encoder;
    explicit Rehearsal(CommandEncoder& of) : encoder(of) {
      const Lock lock(encoder);
      encoder.check_not_recording("rehearse");
      encoder.rehearsing_ = true;
    }
    ~Rehearsal() {
      const Lock lock(encoder);
      encoder.rehearsing_ = false;
    }
  } rehearsal(*this);
  body();
}

void CommandEncoder::set_launching(bool on) {
  const Lock lock(*this);
  launching_ = on;
}

Tensor CommandEncoder::zeros(Shape shape, DType dtype) {
  Tensor t = empty(shape, dtype);
  if (t.size() != 0) dispatch(kZero, DType::kU8, BytesArgs{t.bytes()}, {}, {t});
  return t;
}

Tensor CommandEncoder::full(Shape shape, DType dtype, double value) {
  Tensor t = empty(shape, dtype);
  FillArgs args{t.size(), 0};
  convert(&value, DType::kF64, &args.bits, dtype, 1);
  if (t.size() != 0) dispatch(kFill, unsigned_of_size(size_of(dtype)), args, {}, {t});
  return t;
}

void CommandEncoder::add_into(const Tensor& sum, const Tensor& x) {
  if (!sum.is_contiguous() || !(sum.shape() == x.shape())) {
    throw Error(Errc::kShape, "add_into: a contiguous sum of the shape of x " +
                                  to_string(x.shape()) + ", got " + to_string(sum.shape()) +
                                  " with strides " + to_string(sum.strides()));
  }
  if (!is_kernel_float(sum.dtype()) || !is_kernel_float(x.dtype())) {
    throw Error(Errc::kDType, std::string("add_into: f32, f16 or bf16, got ") +
                                  name_of(sum.dtype()) + " and " + name_of(x.dtype()));
  }
  const AddIntoArgs args{sum.size(), static_cast<std::int64_t>(x.dtype())};
  const Tensor terms = contiguous(x);
  if (sum.size() != 0) dispatch(kAddInto, sum.dtype(), args, {terms}, {sum});
}

Tensor CommandEncoder::contiguous(const Tensor& t) {
  if (t.is_contiguous()) return t;
  Tensor copy = empty(t.shape(), t.dtype());
  this->copy(t, copy);
  copy.identity_ = t.loose().identity_;  // the same numbers: a tape must not take them for new ones
  return copy;
}

namespace {

// CopyArgs as the kernels want them; both tensors have the same shape and at least one element.
CopyArgs copy_args(const Tensor& from, const Tensor& to) {
  struct Axis {
    std::int64_t size, from, to;
  };
  std::array<Axis, kMaxRank> axes{};  // the target's widest stride first
  std::size_t count = 0;
  for (std::int64_t i = 0; i < from.rank(); ++i) {
    if (from.dim(i) == 1) continue;
    const Axis axis{from.dim(i), from.strides()[i], to.strides()[i]};
    std::size_t place = count++;
    for (; place > 0 && std::abs(axes[place - 1].to) < std::abs(axis.to); --place) {
      axes[place] = axes[place - 1];
    }
    axes[place] = axis;
  }
  CopyArgs args{};
  for (const Axis& axis : std::span(axes).first(count)) {
    const std::int64_t last = args.rank - 1;
    if (args.rank > 0 && args.from[last] == axis.from * axis.size &&
        args.to[last] == axis.to * axis.size) {
      args.shape[last] *= axis.size;
      args.from[last] = axis.from;
      args.to[last] = axis.to;
      continue;
    }
    args.shape[args.rank] = axis.size;
    args.from[args.rank] = axis.from;
    args.to[args.rank++] = axis.to;
  }
  return args;
}

}  // namespace

void CommandEncoder::copy(const Tensor& from, const Tensor& to) {
  if (!(from.shape() == to.shape()) || from.dtype() != to.dtype()) {
    throw Error(Errc::kShape, "copy: two tensors of one type and shape, got " +
                                  to_string(from.shape()) + " " + name_of(from.dtype()) + " and " +
                                  to_string(to.shape()) + " " + name_of(to.dtype()));
  }
  if (to.size() == 0) return;
  if (from.is_contiguous() && to.is_contiguous()) {
    dispatch(kMove, DType::kU8, BytesArgs{to.bytes()}, {from}, {to});
    return;
  }
  const CopyArgs args = copy_args(from, to);
  for (std::int64_t i = 0; i < args.rank; ++i) {
    if (args.to[i] != 0) continue;
    throw Error(Errc::kShape, "copy: the target's elements must lie apart, got strides " +
                                  to_string(to.strides()) + " for " + to_string(to.shape()));
  }
  dispatch(kCopy, unsigned_of_size(size_of(to.dtype())), args, {from}, {to});
}

void CommandEncoder::check_transfer(const Tensor& t, std::size_t bytes, const char* what) const {
  if (!t.is_contiguous() || t.bytes() != bytes) {
    throw Error(Errc::kShape, std::string(what) + ": a contiguous tensor of " +
                                  std::to_string(bytes) + " bytes, got " + to_string(t.shape()) +
                                  " " + name_of(t.dtype()) + " with strides " +
                                  to_string(t.strides()));
  }
  if (t.size() != 0 && t.device() != device_) {
    throw Error(Errc::kDevice, std::string(what) + ": the tensor must be on " + device_->name());
  }
}

void CommandEncoder::upload(const void* host, std::size_t bytes, const Tensor& to) {
  check_transfer(to, bytes, "upload");
  const Lock lock(*this);
  check_not_recording("upload");
  if (bytes == 0) return;
  copy_in(host, to.data(), bytes);
  to.buffer().note_write();
}

Tensor CommandEncoder::place(const Tensor& host) {
  if (device_->traits().uses_host_memory) return host;
  if (const Buffer same = device_->adopt(host.buffer())) {
    return {same, host.dtype(), host.shape(), host.strides(), host.offset()};
  }
  const Tensor there = empty(host.shape(), host.dtype());
  upload(host.data(), host.bytes(), there);
  return there;
}

void CommandEncoder::download(const Tensor& from, void* host, std::size_t bytes) {
  check_transfer(from, bytes, "download");
  const Lock lock(*this);
  check_not_recording("download");
  submit();
  wait();
  if (bytes != 0) copy_out(from.data(), host, bytes);
}

std::unique_ptr<PendingDownload> CommandEncoder::begin_download(const Tensor& from) {
  check_transfer(from, from.bytes(), "begin_download");
  const Lock lock(*this);
  check_not_recording("begin_download");
  submit();
  return begin_copy_out(from.data(), from.bytes());
}

std::unique_ptr<Graph> capture(CommandEncoder& encoder, FunctionRef<void()> body) {
  encoder.begin_capture();
  try {
    body();
  } catch (...) {
    try {
      static_cast<void>(encoder.end_capture());
    } catch (const Error&) {  // the first failure is the one to tell of
    }
    throw;
  }
  return encoder.end_capture();
}

}  // namespace mlxtape
