// Device: one thing that computes, with its memory. Devices live as long as the process.
//
// Threads    Every member may be called from any thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mlxtape/core/memory.h"
#include "mlxtape/core/tensor.h"

namespace mlxtape {

class CommandEncoder;
struct Kernel;
struct SourceKernel;

struct DeviceLimits {
  std::size_t memory_bytes = 0;  // what the device has in all
  int compute_units = 0;         // cores, multiprocessors
  bool host_visible = false;     // can the host read and write its memory in place?
};

// What ops and jobs ask of a device before they choose how to compute, so that they need not know its backend. The
// defaults suit a device that nothing is known of: they are slower nowhere but there where a backend says more.
struct DeviceTraits {
  // Tensors in the host's memory are the device's own, those in a mapped file among them: nothing is uploaded.
  bool uses_host_memory = false;
  // Kernels for 16-bit numbers read packs of so many bytes, and want tensors to begin at a multiple of it.
  std::size_t pack_bytes = 1;
  // Products with quantised weights read the codes as they are for up to so many rows of x; for more rows weights are
  // dequantised first, so many bytes at a time.
  std::int64_t quantized_rows = 8;
  std::int64_t dequantized_bytes = std::int64_t{64} << 20;
  // Bytes of logits that a loss makes at a time.
  std::int64_t logits_bytes = std::int64_t{512} << 20;
  // Launches cost the host more than a replay does: training steps are captured.
  bool captures_steps = false;
  // Experts in 16 bits hand their activations on in 16 bits, from one kernel to a later one.
  bool keeps_half_activations = false;
};

// A backend that this machine or this build has no device of, and why.
struct AbsentDevice {
  Backend backend;
  std::string reason;
};

class Device {
 public:
  virtual ~Device() = default;

  // What exists here, cpu first. Asking does not start a device: the first allocation or
  // encoder does.
  static const std::vector<Device*>& all();
  static Device& cpu();
  static Device& best();                 // the first that is not the cpu, else the cpu
  static Device& find(Backend backend);  // throws kDevice, naming what exists and why not this
  static Device& find(const std::string& backend);  // by name_of
  static const std::vector<AbsentDevice>& absent();

  virtual Backend backend() const = 0;
  virtual const std::string& name() const = 0;  // "cpu: Intel(R) Xeon(R) ..."
  virtual const DeviceLimits& limits() const = 0;
  virtual const DeviceTraits& traits() const = 0;
  // What else there is to know, for people: {"driver", "580.159.04"}. May open libraries to ask.
  virtual std::vector<std::pair<std::string, std::string>> details() const { return {}; }
  virtual MemoryPool& memory() = 0;
  virtual std::unique_ptr<CommandEncoder> make_encoder() = 0;

  // An encoder that works on a queue of another library (a cudaStream_t), in order with what is
  // put there by others. The queue must outlive it. Throws kDevice where there are no queues.
  virtual std::unique_ptr<CommandEncoder> make_encoder_on(void* queue);

  // May a kernel of ours start while the one before it ends? Yes by default; results are the same.
  virtual void set_overlap(bool) {}

  // One of a backend's own settings (backends/metal/stream.h), for measurements and for machines that need another than the
  // default. Throws kArgument where there is no such option.
  virtual void set_option(const std::string& name, double value);

  // Memory of the host as this device's own, without a copy, which it holds as long as somebody has the result. A Buffer
  // without memory where the device cannot: most can use a mapped file's pages at best.
  virtual Buffer adopt(const Buffer& host);

  // Adds a kernel from source text to the registry (core/source_kernel.h); every device of this backend
  // can run it. Throws kDevice where there is no compiler for such.
  virtual const Kernel& add_kernel(const SourceKernel& kernel);

  // Zero-filled memory; at least one byte.
  Buffer allocate(std::size_t bytes) { return memory().allocate_zeroed(bytes); }
  Tensor zeros(Shape shape, DType dtype);
  Tensor empty(Shape shape, DType dtype);  // contents undefined
};

// Generated from the backends in the build: appends each backend's devices, or why it has none.
void register_all_devices(std::vector<Device*>& devices, std::vector<AbsentDevice>& absent);

}  // namespace mlxtape
