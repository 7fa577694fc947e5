// CUDA devices: memory from cudaMalloc, kernels queued on a stream.
//
// All encoders of a device share its one stream, so a block of memory that goes back to the pool may
// be given out again at once: whoever uses it next comes later on the stream. An encoder on a foreign
// stream makes the two wait for each other around every kernel, which keeps that true.
//
// A failure on the device shows up at some later call. To name the kernel, the encoder remembers the
// launches since the last event known to have passed, one event for every kBatch of them.
#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "backends/cuda/error.h"
#include "backends/cuda/library.h"
#include "backends/cuda/source_kernel.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/encoder.h"

namespace mlxtape::cuda {

namespace {

constexpr int kOldest = 90;  // compute capability 9.0: bulk copies and clusters
constexpr std::size_t kBatch = 16;

// This thread talks to a device from here on; asking is cheap, switching is not.
void use(int ordinal) {
  thread_local int current = -1;
  if (current == ordinal) return;
  check(cudaSetDevice(ordinal), "choosing the device");
  current = ordinal;
}

class DeviceMemory final : public RawMemory {
 public:
  DeviceMemory(int ordinal, const cudaStream_t& stream) : ordinal_(ordinal), stream_(stream) {}

  void* allocate(std::size_t bytes, bool& is_zero) override {
    use(ordinal_);
    is_zero = false;
    void* address = nullptr;
    const cudaError_t status = cudaMalloc(&address, bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    check(status, "cudaMalloc");
    return address;
  }
  void release(void* address, std::size_t) noexcept override { cudaFree(address); }
  void fill(void* address, unsigned char value, std::size_t bytes) override {
    use(ordinal_);
    check(cudaMemsetAsync(address, value, bytes, stream_), "filling memory");
  }
  bool is_filled(const void* address, unsigned char value, std::size_t bytes) override {
    use(ordinal_);
    std::vector<unsigned char> host(bytes);
    check(cudaMemcpyAsync(host.data(), address, bytes, cudaMemcpyDeviceToHost, stream_),
          "reading guard bands");
    check(cudaStreamSynchronize(stream_), "reading guard bands");
    for (const unsigned char byte : host) {
      if (byte != value) return false;
    }
    return true;
  }

 private:
  int ordinal_;
  const cudaStream_t& stream_;  // the device's; made after this object
};

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming) {
    check(cudaEventCreateWithFlags(&event_, flags), "making an event");
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

struct CudaGraph final : Graph {
  cudaGraphExec_t exec = nullptr;
  int ordinal = 0;
  ~CudaGraph() override {
    if (exec != nullptr) cudaGraphExecDestroy(exec);
  }
};

// The names of the latest launches of a stream, and how many of them the device is known to have done.
class Launches {
 public:
  void add(const Kernel& kernel, cudaStream_t stream) {
    names_[count_ % names_.size()] = &kernel;
    if (++count_ % kBatch != 0) return;
    Mark& mark = marks_[count_ / kBatch % marks_.size()];
    if (!mark.event) mark.event = std::make_unique<Event>();
    mark.count = count_;
    cudaEventRecord(mark.event->get(), stream);
  }

  // The launches that had not ended when the device failed, oldest first.
  std::string unfinished() const {
    std::size_t done = count_ > names_.size() ? count_ - names_.size() : 0;
    for (const Mark& mark : marks_) {
      if (mark.event && mark.count > done && cudaEventQuery(mark.event->get()) == cudaSuccess) {
        done = mark.count;
      }
    }
    std::string list;
    std::size_t named = 0;
    for (std::size_t i = done; i < count_ && named < 4; ++i, ++named) {
      list += (list.empty() ? "" : ", ") + names_[i % names_.size()]->name;
    }
    if (count_ > done + named) list += " and " + std::to_string(count_ - done - named) + " more";
    return list.empty() ? "no kernel of this encoder" : list;
  }

  void all_done() { count_ = 0; }

 private:
  struct Mark {
    std::unique_ptr<Event> event;
    std::size_t count = 0;
  };
  std::array<const Kernel*, 8 * kBatch> names_{};
  std::array<Mark, 8> marks_;
  std::size_t count_ = 0;
};

class CudaEncoder final : public CommandEncoder {
 public:
  CudaEncoder(Device& device, int ordinal, cudaStream_t stream, cudaStream_t home)
      : CommandEncoder(device), ordinal_(ordinal), stream_(stream), home_(home) {}

  ~CudaEncoder() override {
    if (private_stream_ != nullptr) cudaStreamDestroy(private_stream_);
  }

 private:
  void launch(const Kernel& kernel, const KernelCall& call) override {
    use(ordinal_);
    KernelCall queued = call;
    queued.queue = recording_ ? private_stream_ : stream_;
    if (!recording_) follow(stream_, home_);
    kernel.fn(queued);
    check(cudaPeekAtLastError(), "the launch");
    if (recording_) return;
    follow(home_, stream_);
    launches_.add(kernel, stream_);
  }

  // What comes next on a waits for what is on b now.
  void follow(cudaStream_t a, cudaStream_t b) {
    if (a == b) return;
    if (!crossing_) crossing_ = std::make_unique<Event>();
    check(cudaEventRecord(crossing_->get(), b), "joining streams");
    check(cudaStreamWaitEvent(a, crossing_->get(), 0), "joining streams");
  }

  void launch_traced(const Kernel& kernel, const KernelCall& call, Trace& trace) override {
    use(ordinal_);
    if (spans_.empty()) {  // the moment that events are counted from
      wait();
      origin_ = std::make_unique<Event>(cudaEventDefault);
      check(cudaEventRecord(origin_->get(), stream_), "tracing");
      check(cudaEventSynchronize(origin_->get()), "tracing");
      origin_time_ = Trace::Clock::now();
    }
    Span span{kernel.name, std::make_unique<Event>(cudaEventDefault),
              std::make_unique<Event>(cudaEventDefault), &trace};
    check(cudaEventRecord(span.start->get(), stream_), "tracing");
    launch(kernel, call);
    check(cudaEventRecord(span.end->get(), stream_), "tracing");
    spans_.push_back(std::move(span));
    if (spans_.size() >= kMostSpans) wait();
  }

  void submit() override {}

  void wait() override {
    use(ordinal_);
    const cudaError_t status = cudaStreamSynchronize(stream_);
    if (status != cudaSuccess) {
      const std::string names = launches_.unfinished();
      throw Error(Errc::kBackend, "cuda: kernels must not fail, got " +
                                      std::string(cudaGetErrorString(status)) + " in " + names);
    }
    launches_.all_done();
    for (const Span& span : spans_) {
      float start = 0, end = 0;
      check(cudaEventElapsedTime(&start, origin_->get(), span.start->get()), "tracing");
      check(cudaEventElapsedTime(&end, origin_->get(), span.end->get()), "tracing");
      const auto at = [&](float ms) {
        return origin_time_ + std::chrono::duration_cast<Trace::Clock::duration>(
                                  std::chrono::duration<double, std::milli>(ms));
      };
      span.trace->add(span.name, device().name(), at(start), at(end));
    }
    spans_.clear();
  }

  void copy_in(const void* host, void* device, std::size_t bytes) override {
    use(ordinal_);
    follow(stream_, home_);
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "upload");
    check(cudaStreamSynchronize(stream_), "upload");  // the host may change its memory now
  }
  void copy_out(const void* device, void* host, std::size_t bytes) override {
    use(ordinal_);
    check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_), "download");
    check(cudaStreamSynchronize(stream_), "download");
  }

  // On a stream of its own: other encoders may go on using the device's meanwhile.
  void start_recording() override {
    use(ordinal_);
    if (private_stream_ == nullptr) {
      check(cudaStreamCreateWithFlags(&private_stream_, cudaStreamNonBlocking), "capture");
    }
    check(cudaStreamBeginCapture(private_stream_, cudaStreamCaptureModeRelaxed), "capture");
    recording_ = true;
  }
  std::unique_ptr<Graph> finish_recording() override {
    use(ordinal_);
    recording_ = false;
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(private_stream_, &graph), "capture");
    auto made = std::make_unique<CudaGraph>();
    made->ordinal = ordinal_;
    const cudaError_t status = cudaGraphInstantiate(&made->exec, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "making a graph");
    return made;
  }
  void run_graph(const Graph& graph) override {
    use(ordinal_);
    follow(stream_, home_);
    check(cudaGraphLaunch(static_cast<const CudaGraph&>(graph).exec, stream_), "replay");
    follow(home_, stream_);
  }

  static constexpr std::size_t kMostSpans = 4096;
  struct Span {
    std::string name;
    std::unique_ptr<Event> start, end;
    Trace* trace;
  };

  int ordinal_;
  cudaStream_t stream_;
  cudaStream_t home_;  // the device's
  cudaStream_t private_stream_ = nullptr;
  std::unique_ptr<Event> crossing_;
  bool recording_ = false;
  Launches launches_;
  std::vector<Span> spans_;
  std::unique_ptr<Event> origin_;
  Trace::Clock::time_point origin_time_;
};

// "580.159.04", from the first line of what the kernel module says of itself.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;) {
    if (word.find('.') != std::string::npos &&
        word.find_first_not_of("0123456789.") == std::string::npos) {
      return word;
    }
  }
  return "unknown";
}

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, const cudaDeviceProp& properties)
      : ordinal_(ordinal),
        name_("cuda:" + std::to_string(ordinal) + ": " + properties.name),
        capability_(std::to_string(properties.major) + "." + std::to_string(properties.minor)),
        memory_(*this, std::make_unique<DeviceMemory>(ordinal, stream_)) {
    limits_.memory_bytes = properties.totalGlobalMem;
    limits_.compute_units = properties.multiProcessorCount;
  }

  Backend backend() const override { return Backend::kCuda; }
  const std::string& name() const override { return name_; }
  const DeviceLimits& limits() const override { return limits_; }
  std::vector<std::pair<std::string, std::string>> details() const override {
    int runtime = 0;
    cudaDriverGetVersion(&runtime);
    return {{"compute capability", capability_},
            {"driver", driver_version()},
            {"driver's CUDA", std::to_string(runtime / 1000) + "." +
                                  std::to_string(runtime % 1000 / 10)},
            {"cuBLASLt", cublaslt_version()},
            {"cuDNN", cudnn_version()},
            {"NVRTC", nvrtc_version()}};
  }
  const Kernel& add_kernel(const SourceKernel& kernel) override {
    return add_source_kernel(kernel);
  }
  MemoryPool& memory() override {
    start();
    return memory_;
  }
  std::unique_ptr<CommandEncoder> make_encoder() override {
    start();
    return std::make_unique<CudaEncoder>(*this, ordinal_, stream_, stream_);
  }
  std::unique_ptr<CommandEncoder> make_encoder_on(void* queue) override {
    start();
    return std::make_unique<CudaEncoder>(*this, ordinal_, static_cast<cudaStream_t>(queue),
                                         stream_);
  }

 private:
  void start() {
    std::call_once(started_, [&] {
      use(ordinal_);
      check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "starting the device");
    });
  }

  int ordinal_;
  std::string name_;
  std::string capability_;
  DeviceLimits limits_;
  std::once_flag started_;
  cudaStream_t stream_ = nullptr;
  MemoryPool memory_;
};

}  // namespace

void register_cuda_devices(std::vector<Device*>& devices, std::vector<AbsentDevice>& absent) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    absent.push_back({Backend::kCuda, status == cudaErrorInsufficientDriver
                                          ? "no NVIDIA driver, or one too old for CUDA 13"
                                          : cudaGetErrorString(status)});
    return;
  }
  std::string reason = "no NVIDIA GPU";
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    const int capability = 10 * properties.major + properties.minor;
    if (capability < kOldest) {
      reason = std::string(properties.name) + " has compute capability " +
               std::to_string(properties.major) + "." + std::to_string(properties.minor) +
               ", the kernels need 9.0";
      continue;
    }
    devices.push_back(new CudaDevice(i, properties));  // lives as long as the process
    reason.clear();
  }
  if (!reason.empty()) absent.push_back({Backend::kCuda, reason});
}

}  // namespace mlxtape::cuda
