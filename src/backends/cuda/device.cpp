// CUDA devices: memory from cudaMalloc, kernels queued on a stream.
//
// All encoders of a device share its one stream, so a block of memory that goes back to the pool may
// be given out again at once: whoever uses it next comes later on the stream. An encoder on a foreign
// stream makes the two wait for each other around every kernel, which keeps that true.
//
// A failure on the device shows up at some later call, whoever makes it, and from then on every call
// fails. To name the kernel, the device's stream keeps the names of the latest launches, and after every
// kBatch of them the device writes into the host's memory how far it has come.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "backends/cuda/choose.h"
#include "backends/cuda/error.h"
#include "backends/cuda/library.h"
#include "backends/cuda/overlap.h"
#include "backends/cuda/source_kernel.h"
#include "backends/cuda/transfers.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/encoder.h"

namespace mlxtape::cuda {

namespace {

constexpr std::uint64_t kBatch = 16;

// While it lives, this thread talks to a device; then to the one it talked to before.
class Using {
 public:
  explicit Using(int ordinal) : ordinal_(ordinal) {
    check(cudaGetDevice(&before_), "asking for the device");
    if (before_ != ordinal_) check(cudaSetDevice(ordinal_), "choosing the device");
  }
  ~Using() {
    if (before_ != ordinal_) cudaSetDevice(before_);
  }
  Using(const Using&) = delete;
  Using& operator=(const Using&) = delete;

 private:
  int ordinal_;
  int before_ = 0;
};

// The stream of a device, and what was launched on it or on streams that wait for it.
class Queue {
 public:
  explicit Queue(int ordinal) : ordinal_(ordinal) {}

  // Made on first use, for good.
  void start() {
    std::call_once(started_, [&] {
      const Using device(ordinal_);
      check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "starting the device");
      void* word = nullptr;
      check(cudaHostAlloc(&word, sizeof *done_, cudaHostAllocMapped), "starting the device");
      done_ = static_cast<volatile std::uint64_t*>(word);
      *done_ = 0;
      void* function = nullptr;
      cudaDriverEntryPointQueryResult found{};
      const cudaError_t status = cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &function,
                                                                  12000, cudaEnableDefault, &found);
      if (status == cudaSuccess && found == cudaDriverEntryPointSuccess) {
        write_ = reinterpret_cast<WriteValue*>(function);
      }
      cudaGetLastError();
    });
  }
  int ordinal() const { return ordinal_; }
  cudaStream_t stream() const { return stream_; }
  Uploads& uploads() { return uploads_; }
  Downloads& downloads() { return downloads_; }

  void launched(const std::string& name, cudaStream_t where) {
    const std::lock_guard lock(mutex_);
    names_[count_ % names_.size()] = &name;
    if (++count_ % kBatch == 0 && where == stream_ && write_ != nullptr) {
      write_(where, reinterpret_cast<std::uintptr_t>(done_), count_, 0);
    }
  }
  // Everything launched so far has ended well.
  void all_ended(std::uint64_t launched) {
    const std::lock_guard lock(mutex_);
    ended_ = std::max(ended_, launched);
  }
  std::uint64_t launches() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }

  // Like cuda::check, but where the device itself has failed, the message is about that.
  void expect(cudaError_t status, const char* what) const {
    if (status == cudaSuccess || status == cudaErrorNotReady) return;
    cudaGetLastError();
    const cudaError_t device = cudaStreamQuery(stream_);
    cudaGetLastError();
    if (device == cudaSuccess || device == cudaErrorNotReady) check(status, what);
    throw Error(Errc::kBackend, "cuda: kernels must not fail, got " +
                                    std::string(cudaGetErrorString(device)) + " in " +
                                    unfinished() + "; this process cannot use the device any more");
  }

 private:
  using WriteValue = int(cudaStream_t, std::uint64_t address, std::uint64_t value, unsigned flags);

  // The launches that had not ended when the device failed, oldest first, each name once.
  std::string unfinished() const {
    const std::lock_guard lock(mutex_);
    std::uint64_t done = std::max(ended_, std::uint64_t{*done_});
    if (count_ > done + names_.size()) done = count_ - names_.size();
    std::vector<const std::string*> found;
    for (std::uint64_t i = done; i < count_; ++i) {
      const std::string* name = names_[i % names_.size()];
      const auto same = [&](const std::string* other) {
        return *other == *name;
      };
      if (std::none_of(found.begin(), found.end(), same)) found.push_back(name);
    }
    if (found.empty()) return "no kernel of ours";
    std::string list;
    for (const std::string* name : found) list += (list.empty() ? "" : ", ") + *name;
    return found.size() == 1
               ? list
               : "one of " + list + " (with CUDA_LAUNCH_BLOCKING=1 it is known which)";
  }

  int ordinal_;
  std::once_flag started_;
  cudaStream_t stream_ = nullptr;
  WriteValue* write_ = nullptr;
  volatile std::uint64_t* done_ = nullptr;  // written by the device
  mutable std::mutex mutex_;
  std::array<const std::string*, 8 * kBatch> names_{};
  std::uint64_t count_ = 0;  // launched
  std::uint64_t ended_ = 0;  // known from a wait
  Uploads uploads_;
  Downloads downloads_;
};

class DeviceMemory final : public RawMemory {
 public:
  explicit DeviceMemory(const Queue& queue) : queue_(queue) {}

  void* allocate(std::size_t bytes, bool& is_zero) override {
    const Using device(queue_.ordinal());
    is_zero = false;
    void* address = nullptr;
    const cudaError_t status = cudaMalloc(&address, bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    queue_.expect(status, "cudaMalloc");
    return address;
  }
  void release(void* address, std::size_t) noexcept override { cudaFree(address); }
  void fill(void* address, unsigned char value, std::size_t bytes) override {
    const Using device(queue_.ordinal());
    queue_.expect(cudaMemsetAsync(address, value, bytes, queue_.stream()), "filling memory");
  }
  bool is_filled(const void* address, unsigned char value, std::size_t bytes) override {
    const Using device(queue_.ordinal());
    std::vector<unsigned char> host(bytes);
    queue_.expect(
        cudaMemcpyAsync(host.data(), address, bytes, cudaMemcpyDeviceToHost, queue_.stream()),
        "reading guard bands");
    queue_.expect(cudaStreamSynchronize(queue_.stream()), "reading guard bands");
    for (const unsigned char byte : host) {
      if (byte != value) return false;
    }
    return true;
  }

 private:
  const Queue& queue_;
};

struct CudaGraph final : Graph {
  cudaGraphExec_t exec = nullptr;
  mutable std::mutex mutex;  // one launch at a time
  ~CudaGraph() override {
    if (exec != nullptr) cudaGraphExecDestroy(exec);
  }
};

const std::string kReplay = "a replayed graph";

class CudaDownload final : public PendingDownload {
 public:
  CudaDownload(Queue& queue, std::size_t bytes)
      : queue_(queue), bytes_(bytes), block_(queue.downloads().take(bytes)) {}
  ~CudaDownload() override {
    if (started_) cudaEventSynchronize(block_.written->get());  // a failure shows elsewhere
    queue_.downloads().give_back(std::move(block_));
  }
  void start(const void* from, cudaStream_t stream) {
    queue_.expect(
        cudaMemcpyAsync(block_.memory->data(), from, bytes_, cudaMemcpyDeviceToHost, stream),
        "download");
    queue_.expect(cudaEventRecord(block_.written->get(), stream), "download");
    started_ = true;
  }
  const void* wait() override {
    const Using device(queue_.ordinal());
    queue_.expect(cudaEventSynchronize(block_.written->get()), "download");
    return block_.memory->data();
  }

 private:
  Queue& queue_;
  std::size_t bytes_;
  Downloads::Block block_;
  bool started_ = false;
};

class CudaEncoder final : public CommandEncoder {
 public:
  CudaEncoder(Device& device, Queue& queue, cudaStream_t stream)
      : CommandEncoder(device), queue_(queue), stream_(stream) {}

  ~CudaEncoder() override {
    if (!spans_.empty()) {
      try {
        wait();
      } catch (const Error&) {  // whoever waits for the device next will hear of it
      }
    }
    if (private_stream_ != nullptr) cudaStreamDestroy(private_stream_);
  }

 private:
  // What comes next on ours waits for what is on the device's stream now, and at the end, whatever
  // happens, the other way round.
  class Joined {
   public:
    explicit Joined(CudaEncoder& encoder) : encoder_(encoder) {
      encoder_.follow(encoder_.stream_, encoder_.queue_.stream());
    }
    ~Joined() {
      try {
        encoder_.follow(encoder_.queue_.stream(), encoder_.stream_);
      } catch (const Error&) {  // the device has failed; the next wait says so
      }
    }
    Joined(const Joined&) = delete;
    Joined& operator=(const Joined&) = delete;

   private:
    CudaEncoder& encoder_;
  };

  void follow(cudaStream_t a, cudaStream_t b) {
    if (a == b) return;
    if (!crossing_) crossing_ = std::make_unique<Event>();
    queue_.expect(cudaEventRecord(crossing_->get(), b), "joining streams");
    queue_.expect(cudaStreamWaitEvent(a, crossing_->get(), 0), "joining streams");
  }

  void run_kernel(const Kernel& kernel, const KernelCall& call, cudaStream_t stream) {
    KernelCall queued = call;
    queued.queue = stream;
    cudaGetLastError();  // what others left is not ours
    try {
      kernel.fn(queued);
    } catch (const Error&) {
      queue_.expect(cudaStreamQuery(queue_.stream()), "the launch");  // not this kernel's failure?
      throw;
    }
    queue_.expect(cudaGetLastError(), "the launch");
  }

  void launch(const Kernel& kernel, const KernelCall& call) override {
    const Using device(queue_.ordinal());
    if (recording_) return run_kernel(kernel, call, private_stream_);
    const Joined streams(*this);
    run_kernel(kernel, call, stream_);
    queue_.launched(kernel.name, stream_);
  }

  void launch_traced(const Kernel& kernel, const KernelCall& call,
                     const std::shared_ptr<Trace>& trace) override {
    const Using device(queue_.ordinal());
    if (spans_.empty()) {  // the moment that events are counted from
      wait();
      origin_ = std::make_unique<Event>(cudaEventDefault);
      queue_.expect(cudaEventRecord(origin_->get(), stream_), "tracing");
      queue_.expect(cudaEventSynchronize(origin_->get()), "tracing");
      origin_time_ = Trace::Clock::now();
    }
    Span span{kernel.name, std::make_unique<Event>(cudaEventDefault),
              std::make_unique<Event>(cudaEventDefault), trace};
    queue_.expect(cudaEventRecord(span.start->get(), stream_), "tracing");
    launch(kernel, call);
    queue_.expect(cudaEventRecord(span.end->get(), stream_), "tracing");
    spans_.push_back(std::move(span));
    if (spans_.size() >= kMostSpans) wait();
  }

  void submit() override {}

  void wait() override {
    const Using device(queue_.ordinal());
    const std::uint64_t launched = queue_.launches();
    queue_.expect(cudaStreamSynchronize(stream_), "waiting");
    if (stream_ == queue_.stream()) queue_.all_ended(launched);
    const std::vector<Span> spans = std::exchange(spans_, {});
    for (const Span& span : spans) {
      float start = 0, end = 0;
      queue_.expect(cudaEventElapsedTime(&start, origin_->get(), span.start->get()), "tracing");
      queue_.expect(cudaEventElapsedTime(&end, origin_->get(), span.end->get()), "tracing");
      const auto at = [&](float ms) {
        return origin_time_ + std::chrono::duration_cast<Trace::Clock::duration>(
                                  std::chrono::duration<double, std::milli>(ms));
      };
      span.trace->add(span.name, this->device().name(), at(start), at(end));
    }
  }

  void copy_in(const void* host, void* to, std::size_t bytes) override {
    const Using device(queue_.ordinal());
    const Joined streams(*this);
    try {
      queue_.uploads().copy(host, to, bytes, stream_);
    } catch (const Error&) {
      queue_.expect(cudaStreamQuery(queue_.stream()), "upload");  // has the device itself failed?
      throw;
    }
  }
  void copy_out(const void* from, void* host, std::size_t bytes) override {
    const Using device(queue_.ordinal());
    const Joined streams(*this);
    queue_.expect(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, stream_), "download");
    queue_.expect(cudaStreamSynchronize(stream_), "download");
  }

  std::unique_ptr<PendingDownload> begin_copy_out(const void* from, std::size_t bytes) override {
    const Using device(queue_.ordinal());
    const Joined streams(*this);
    auto download = std::make_unique<CudaDownload>(queue_, bytes);
    download->start(from, stream_);
    return download;
  }

  // On a stream of its own: other encoders may go on using the device's meanwhile.
  void start_recording() override {
    const Using device(queue_.ordinal());
    if (private_stream_ == nullptr) {
      queue_.expect(cudaStreamCreateWithFlags(&private_stream_, cudaStreamNonBlocking), "capture");
    }
    queue_.expect(cudaStreamBeginCapture(private_stream_, cudaStreamCaptureModeRelaxed), "capture");
    recording_ = true;
  }
  std::unique_ptr<Graph> finish_recording() override {
    const Using device(queue_.ordinal());
    recording_ = false;
    cudaGraph_t graph = nullptr;
    queue_.expect(cudaStreamEndCapture(private_stream_, &graph), "capture");
    auto made = std::make_unique<CudaGraph>();
    const cudaError_t status = cudaGraphInstantiate(&made->exec, graph, 0);
    cudaGraphDestroy(graph);
    queue_.expect(status, "making a graph");
    return made;
  }
  void run_graph(const Graph& graph) override {
    const Using device(queue_.ordinal());
    const auto& ours = static_cast<const CudaGraph&>(graph);
    const Joined streams(*this);
    {
      const std::lock_guard lock(ours.mutex);
      queue_.expect(cudaGraphLaunch(ours.exec, stream_), "replay");
    }
    queue_.launched(kReplay, stream_);
  }

  static constexpr std::size_t kMostSpans = 4096;
  struct Span {
    std::string name;
    std::unique_ptr<Event> start, end;
    std::shared_ptr<Trace> trace;
  };

  Queue& queue_;         // the device's
  cudaStream_t stream_;  // its stream, or another library's
  cudaStream_t private_stream_ = nullptr;
  std::unique_ptr<Event> crossing_;
  bool recording_ = false;
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
  CudaDevice(int ordinal, const cudaDeviceProp& properties, std::string others)
      : name_("cuda:" + std::to_string(ordinal) + ": " + properties.name),
        capability_(std::to_string(properties.major) + "." + std::to_string(properties.minor)),
        others_(std::move(others)),
        queue_(ordinal),
        memory_(*this, std::make_unique<DeviceMemory>(queue_)) {
    limits_.memory_bytes = properties.totalGlobalMem;
    limits_.compute_units = properties.multiProcessorCount;
    traits_.pack_bytes = 16;
    traits_.captures_steps = true;
    traits_.keeps_half_activations = true;
    // 2048 rows of 151936 in 16 bits: products of fewer rows are no slower, but a loss that has the weights' gradient reads
    // and writes it for each part, 0.6 ms in f32.
    traits_.logits_bytes = std::int64_t{640} << 20;
  }

  Backend backend() const override { return Backend::kCuda; }
  const std::string& name() const override { return name_; }
  const DeviceLimits& limits() const override { return limits_; }
  const DeviceTraits& traits() const override { return traits_; }
  std::vector<std::pair<std::string, std::string>> details() const override {
    int cuda = 0;
    cudaDriverGetVersion(&cuda);
    std::vector<std::pair<std::string, std::string>> all = {
        {"compute capability", capability_},
        {"driver", driver_version()},
        {"driver's CUDA", std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10)},
        {"cuBLASLt", cublaslt_version()},
        {"cuDNN", cudnn_version()},
        {"NVRTC", nvrtc_version()}};
    if (!others_.empty()) all.emplace_back("GPUs not used", others_);
    return all;
  }
  void set_overlap(bool on) override { cuda::set_overlap(on); }
  const Kernel& add_kernel(const SourceKernel& kernel) override {
    return add_source_kernel(kernel);
  }
  MemoryPool& memory() override {
    queue_.start();
    return memory_;
  }
  std::unique_ptr<CommandEncoder> make_encoder() override {
    queue_.start();
    return std::make_unique<CudaEncoder>(*this, queue_, queue_.stream());
  }
  std::unique_ptr<CommandEncoder> make_encoder_on(void* stream) override {
    queue_.start();
    const auto theirs = static_cast<cudaStream_t>(stream);
    int ordinal = 0;
    check(cudaStreamGetDevice(theirs, &ordinal), "asking a stream for its device");
    if (ordinal != queue_.ordinal()) {
      throw Error(Errc::kDevice, "device: the stream must be one of " + name_ +
                                     ", got one of cuda:" + std::to_string(ordinal));
    }
    return std::make_unique<CudaEncoder>(*this, queue_, theirs);
  }

 private:
  std::string name_;
  std::string capability_;
  std::string others_;  // GPUs beside it that cannot be used, and why
  DeviceLimits limits_;
  DeviceTraits traits_;
  Queue queue_;
  MemoryPool memory_;
};

}  // namespace

void register_cuda_devices(std::vector<Device*>& devices, std::vector<AbsentDevice>& absent) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    int cuda = 0;
    cudaDriverGetVersion(&cuda);
    absent.push_back({Backend::kCuda, status == cudaErrorInsufficientDriver
                                          ? driver_reason(cuda, CUDART_VERSION)
                                          : cudaGetErrorString(status)});
    return;
  }
  std::vector<cudaDeviceProp> properties(static_cast<std::size_t>(count));
  std::vector<GpuFacts> facts;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp& gpu = properties[static_cast<std::size_t>(i)];
    const cudaError_t answer = cudaGetDeviceProperties(&gpu, i);
    if (answer != cudaSuccess) cudaGetLastError();
    facts.push_back({gpu.name, answer == cudaSuccess ? "" : cudaGetErrorString(answer), gpu.major,
                     gpu.minor, gpu.sharedMemPerBlockOptin});
  }
  const GpuChoice choice = choose_gpus(facts);
  for (const int i : choice.usable) {  // they live as long as the process
    devices.push_back(new CudaDevice(i, properties[static_cast<std::size_t>(i)], choice.others));
  }
  if (choice.usable.empty()) {
    absent.push_back({Backend::kCuda, choice.others.empty() ? "no NVIDIA GPU" : choice.others});
  }
}

}  // namespace mlxtape::cuda
