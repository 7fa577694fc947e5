// CommandEncoder: the only way host code makes a device do something. Work runs in the order it
// was given; each kernel sees what the ones before it wrote.
//
//   dispatch         one kernel. The CPU runs it before returning, a GPU some time later.
//   commit           hands everything so far to the device. Needed before another encoder or
//                    library may rely on it; cheap.
//   commit_and_wait  returns when it is done. A failure on the device surfaces here, with the
//                    kernel's name.
//   begin_capture    from here to end_capture kernels are not run but recorded, with the memory
//                    they use, as a Graph. replay runs it again and again at the cost of one call.
//
// Threads    Every member may be called from any thread at any time; calls on one encoder are
//            ordered one after the other. Encoders of one device work side by side. A kernel must
//            not call the encoder that runs it: that is an error.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "mlxtape/base/function_ref.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/graph.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/tensor.h"
#include "mlxtape/core/trace.h"

namespace mlxtape {

class CommandEncoder {
 public:
  virtual ~CommandEncoder() = default;
  CommandEncoder(const CommandEncoder&) = delete;
  CommandEncoder& operator=(const CommandEncoder&) = delete;

  Device& device() const { return *device_; }
  Backend backend() const { return device_->backend(); }

  Tensor empty(Shape shape, DType dtype) { return device_->empty(shape, dtype); }
  Tensor empty_like(const Tensor& t) { return device_->empty(t.shape(), t.dtype()); }
  Tensor zeros(Shape shape, DType dtype);
  Tensor full(Shape shape, DType dtype, double value);  // value is converted to dtype first

  // sum += x, floats of any two types, added in f32. sum must be contiguous.
  void add_into(const Tensor& sum, const Tensor& x);

  // t itself if it is contiguous, else a contiguous copy.
  Tensor contiguous(const Tensor& t);

  // The elements of one tensor into another of the same type and shape; either may be strided.
  void copy(const Tensor& from, const Tensor& to);

  // Host memory -> tensor and back; the tensor must be contiguous and the sizes equal. After upload the
  // host's memory may change, whether or not the device has it yet; download waits for the work before it.
  void upload(const void* host, std::size_t bytes, const Tensor& to);
  void download(const Tensor& from, void* host, std::size_t bytes);
  // The tensor's contents at this point in the queue; waiting for them does not wait for work queued later.
  std::unique_ptr<PendingDownload> begin_download(const Tensor& from);

  // A contiguous tensor of the host's memory: itself if the device computes in host memory, else an uploaded copy.
  Tensor place(const Tensor& host);

  // Runs a kernel. The order of in and out is the kernel's contract; args is copied. A tensor
  // that is not on this encoder's device is an error, and so are more than 384 in all.
  template <class Args>
  void dispatch(const Kernel& kernel, const Args& args, std::initializer_list<TensorRef> in,
                std::initializer_list<TensorRef> out) {
    dispatch(kernel, args, std::span(in.begin(), in.size()), std::span(out.begin(), out.size()));
  }
  template <class Args>
  void dispatch(const Kernel& kernel, const Args& args, std::span<const TensorRef> in,
                std::span<const TensorRef> out) {
    run(kernel, &args, sizeof(Args), in, out);
  }
  template <class Args>
  void dispatch(const KernelHandle& handle, DType dtype, const Args& args,
                std::initializer_list<TensorRef> in, std::initializer_list<TensorRef> out) {
    dispatch(handle.get(backend(), dtype), args, in, out);
  }
  template <class Args>
  void dispatch(const KernelHandle& handle, DType dtype, const Args& args,
                std::span<const TensorRef> in, std::span<const TensorRef> out) {
    dispatch(handle.get(backend(), dtype), args, in, out);
  }

  void commit();
  void commit_and_wait();

  // Between the two, kernels alone: what would wait or copy is an error. end_capture after a failure
  // in between throws, and the encoder is as before.
  void begin_capture();
  std::unique_ptr<Graph> end_capture();
  void replay(const Graph& graph);  // counts its nodes as dispatches

  EncoderCounters counters() const;
  void set_trace(std::shared_ptr<Trace> trace);  // null stops tracing; a replay is not traced
  bool is_traced() const;

  // With false, dispatch does everything but the launch: what remains is the host's own cost.
  void set_launching(bool on);
  // Calls body without launching its kernels; what would wait or copy is an error. Arena::rehearse plans by it.
  void rehearse(FunctionRef<void()> body);

 protected:
  explicit CommandEncoder(Device& device) : device_(&device) {}

  const Operands& operands() const { return operands_; }  // of the launch that is under way

  // What a backend does; called with the encoder locked.
  virtual void launch(const Kernel& kernel, const KernelCall& call) = 0;
  virtual void launch_traced(const Kernel& kernel, const KernelCall& call,
                             const std::shared_ptr<Trace>& trace);
  virtual void submit() = 0;
  virtual void wait() = 0;
  virtual void copy_in(const void* host, void* device, std::size_t bytes) = 0;
  virtual void copy_out(const void* device, void* host, std::size_t bytes) = 0;
  virtual std::unique_ptr<PendingDownload> begin_copy_out(const void* device,
                                                          std::size_t bytes) = 0;
  virtual void start_recording() = 0;
  virtual std::unique_ptr<Graph> finish_recording() = 0;
  virtual void run_graph(const Graph& graph) = 0;

 private:
  void run(const Kernel& kernel, const void* args, std::size_t args_bytes,
           std::span<const TensorRef> in, std::span<const TensorRef> out);
  void check_not_recording(const char* what) const;
  void check_transfer(const Tensor& t, std::size_t bytes, const char* what) const;

  class Lock;

  Device* device_;
  mutable std::mutex mutex_;
  mutable std::atomic<std::thread::id> holder_{};  // of the mutex
  EncoderCounters counters_;
  std::shared_ptr<Trace> trace_;
  Operands operands_;
  bool launching_ = true;
  bool rehearsing_ = false;
  bool recording_ = false;
  bool recording_failed_ = false;
  std::vector<Buffer> recorded_memory_;
  std::vector<Storage*> recorded_writes_;
  std::size_t recorded_nodes_ = 0;
};

// Captures what body dispatches. If body throws, the capture ends and the exception passes through.
std::unique_ptr<Graph> capture(CommandEncoder& encoder, FunctionRef<void()> body);

}  // namespace mlxtape
