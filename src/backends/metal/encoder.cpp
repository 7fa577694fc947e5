#include "backends/metal/encoder.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "mlxtape/base/error.h"

namespace mlxtape::metal {

namespace {

// The bytes that a tensor's elements lie in.
Range range_of(const Tensor& t) {
  if (t.size() == 0) return {};
  std::int64_t first = 0, last = 0;  // elements, from data()
  for (std::int64_t i = 0; i < t.rank(); ++i) {
    const std::int64_t reach = (t.dim(i) - 1) * t.strides()[i];
    (reach < 0 ? first : last) += reach;
  }
  const auto size = static_cast<std::int64_t>(size_of(t.dtype()));
  const auto* data = static_cast<const char*>(t.data());
  return {data + first * size, data + (last + 1) * size};
}

struct MetalGraph final : Graph {
  std::vector<Dispatch> list;
};

class MetalEncoder final : public CommandEncoder {
 public:
  MetalEncoder(Device& device, Machine& machine, Uploads& uploads, Downloads& downloads)
      : CommandEncoder(device), machine_(machine), uploads_(uploads), downloads_(downloads) {}
  ~MetalEncoder() override {
    try {
      machine_.stream.commit();
    } catch (const Error&) {  // the device is lost: whoever uses it next will hear of it
    }
    machine_.library.save();
  }

 private:
  // What the call's tensors touch. A tensor's view may reach before its first element, but addresses of kernels are those
  // of first elements, so a range begins there or before.
  void launch(const Kernel& kernel, const KernelCall& call) override {
    machine_.stream.check();
    target_.machine = &machine_;
    target_.kernel = &kernel.name;
    target_.in.clear();
    target_.out.clear();
    for (const Tensor& t : operands().in) target_.in.push_back(range_of(t));
    for (const Tensor& t : operands().out) target_.out.push_back(range_of(t));
    const auto* scratch = static_cast<const char*>(call.workspace);
    target_.workspace = {scratch, scratch + operands().workspace_bytes};
    target_.recording = recording_ ? &recording_->list : nullptr;
    KernelCall queued = call;
    queued.queue = &target_;
    kernel.fn(queued);
  }

  void launch_traced(const Kernel& kernel, const KernelCall& call,
                     const std::shared_ptr<Trace>& trace) override {
    machine_.stream.begin_span(kernel.name, device().name(), trace);
    try {
      launch(kernel, call);
    } catch (...) {
      machine_.stream.end_span();
      throw;
    }
    machine_.stream.end_span();
  }

  void submit() override { machine_.stream.commit(); }
  void wait() override { machine_.stream.wait(); }

  void copy_in(const void* host, void* to, std::size_t bytes) override {
    uploads_.copy(host, to, bytes);
  }
  void copy_out(const void* from, void* host, std::size_t bytes) override {
    const auto* begin = static_cast<const char*>(from);
    const Block* block = machine_.blocks.find({begin, begin + bytes});
    if (block == nullptr) {
      throw Error(Errc::kDevice,
                  "download: the tensor's memory must be the device's, got other memory");
    }
    machine_.stream.wait_for(block->last_use);
    std::memcpy(host, from, bytes);
  }
  std::unique_ptr<PendingDownload> begin_copy_out(const void* from, std::size_t bytes) override {
    return downloads_.begin(from, bytes);
  }

  void start_recording() override { recording_ = std::make_unique<MetalGraph>(); }
  std::unique_ptr<Graph> finish_recording() override { return std::move(recording_); }
  void run_graph(const Graph& graph) override {
    for (const Dispatch& dispatch : static_cast<const MetalGraph&>(graph).list) {
      machine_.stream.add(dispatch);
    }
  }

  Machine& machine_;
  Uploads& uploads_;
  Downloads& downloads_;
  Target target_;  // of the launch that is under way
  std::unique_ptr<MetalGraph> recording_;
};

}  // namespace

std::unique_ptr<CommandEncoder> make_encoder(Device& device, Machine& machine, Uploads& uploads,
                                             Downloads& downloads) {
  return std::make_unique<MetalEncoder>(device, machine, uploads, downloads);
}

}  // namespace mlxtape::metal
