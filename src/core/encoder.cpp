#include "mlxtape/core/encoder.h"

#include <array>
#include <exception>
#include <string>

#include "core/memory_kernels.h"

namespace mlxtape {

namespace {

constexpr std::size_t kMostTensors = 16;

constinit const KernelHandle kCopy("copy");

DType unsigned_of_size(std::size_t bytes) {
  switch (bytes) {
    case 1: return DType::kU8;
    case 2: return DType::kU16;
    case 4: return DType::kU32;
    default: return DType::kU64;
  }
}

}  // namespace

void CommandEncoder::run(const Kernel& kernel, const void* args,
                         std::initializer_list<TensorRef> in,
                         std::initializer_list<TensorRef> out) {
  std::array<void*, kMostTensors> addresses{};
  MT_ASSERT(in.size() + out.size() <= kMostTensors);
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
  if (kernel.workspace != nullptr) {
    const std::size_t bytes = kernel.workspace(args);
    if (bytes != 0) workspace = device_->memory().allocate(bytes);
  }
  const std::lock_guard lock(mutex_);
  ++counters_.dispatches;
  if (!launching_) return;
  const Trace::Clock::time_point start = trace_ ? Trace::Clock::now() : Trace::Clock::time_point();
  try {
    launch(kernel, {{addresses.data(), in.size()},
                    {addresses.data() + in.size(), out.size()},
                    args,
                    workspace.address(),
                    nullptr,
                    kernel.state});
  } catch (const Error& e) {
    throw Error(e.code(), kernel.name + ": " + e.what());
  } catch (const std::exception& e) {
    throw Error(Errc::kBackend, kernel.name + ": the kernel must not fail, got " + e.what());
  }
  if (trace_) trace_->add(kernel.name, name_of(backend()), start, Trace::Clock::now());
}

void CommandEncoder::commit() {
  const std::lock_guard lock(mutex_);
  ++counters_.commits;
  submit();
}

void CommandEncoder::commit_and_wait() {
  const std::lock_guard lock(mutex_);
  ++counters_.commits;
  ++counters_.waits;
  submit();
  wait();
}

EncoderCounters CommandEncoder::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

void CommandEncoder::set_trace(std::shared_ptr<Trace> trace) {
  const std::lock_guard lock(mutex_);
  trace_ = std::move(trace);
}

void CommandEncoder::set_launching(bool on) {
  const std::lock_guard lock(mutex_);
  launching_ = on;
}

Tensor CommandEncoder::contiguous(const Tensor& t) {
  if (t.is_contiguous()) return t;
  CopyArgs args{t.rank(), {}, {}};
  for (std::int64_t i = 0; i < t.rank(); ++i) {
    args.shape[i] = t.dim(i);
    args.strides[i] = t.strides()[i];
  }
  Tensor copy = empty(t.shape(), t.dtype());
  dispatch(kCopy, unsigned_of_size(size_of(t.dtype())), args, {t}, {copy});
  return copy;
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
  const std::lock_guard lock(mutex_);
  if (bytes != 0) copy_in(host, to.data(), bytes);
}

void CommandEncoder::download(const Tensor& from, void* host, std::size_t bytes) {
  check_transfer(from, bytes, "download");
  const std::lock_guard lock(mutex_);
  submit();
  wait();
  if (bytes != 0) copy_out(from.data(), host, bytes);
}

}  // namespace mlxtape
