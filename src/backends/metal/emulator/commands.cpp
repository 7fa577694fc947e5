// Queues, command buffers, encoders: what is encoded, held to the limits of Apple's tables. Nothing runs here.
#include "backends/metal/calls.h"
#include "backends/metal/emulator/control.h"
#include "backends/metal/emulator/metal_objects.h"

namespace mlxtape::emulator {
namespace {

constexpr std::size_t kMaxSetBytes = 4096;

EncoderWork& open_work(const Encoder* self, const char* what) {
  if (self->work == nullptr) violation(std::string(what) + " after endEncoding");
  return *self->work;
}

unsigned checked_index(unsigned long index, const char* what) {
  if (index >= kMaxBuffers)
    violation(std::string(what) + ": there are 31 buffers, got index " + std::to_string(index));
  return static_cast<unsigned>(index);
}

void set_buffer(Encoder* self, Selector, Id buffer, unsigned long offset, unsigned long index) {
  open_work(self, "setBuffer:");
  const unsigned i = checked_index(index, "setBuffer:");
  self->buffers[i] = nullptr;
  Binding& binding = self->state.buffers[i];
  binding = {};
  binding.is_bound = true;
  if (buffer == nullptr) return;
  Buffer* found = as<Buffer>(buffer, "MTLBuffer", "setBuffer:");
  if (offset > found->block.bytes) {
    violation("setBuffer: offset " + std::to_string(offset) + " of a buffer of " +
              std::to_string(found->block.bytes));
  }
  self->buffers[i] = found;
  binding = Binding::of(found->block, offset);
}

void set_bytes(Encoder* self, Selector, const void* bytes, unsigned long length,
               unsigned long index) {
  open_work(self, "setBytes:");
  if (length == 0 || length > kMaxSetBytes) {
    violation("setBytes: takes 1 to 4096 bytes, got " + std::to_string(length));
  }
  const unsigned i = checked_index(index, "setBytes:");
  self->buffers[i] = nullptr;
  self->state.buffers[i] = Binding::of(bytes, length);
}

void set_threadgroup_bytes(Encoder* self, Selector, unsigned long bytes, unsigned long index) {
  open_work(self, "setThreadgroupMemoryLength:");
  if (index >= kMaxThreadgroupArguments) {
    violation("setThreadgroupMemoryLength: the emulator has 8 of them, got index " +
              std::to_string(index));
  }
  if (bytes % 16 != 0 || bytes > kThreadgroupBytes) {
    violation("setThreadgroupMemoryLength: a multiple of 16, at most 32768, got " +
              std::to_string(bytes));
  }
  self->state.threadgroup_bytes[index] = static_cast<std::uint32_t>(bytes);
}

Size3 size_of(const metal::Size& size, const char* what) {
  for (const unsigned long n : {size.width, size.height, size.depth}) {
    if (n == 0 || n > ~0U)
      violation(std::string("dispatchThreadgroups: ") + what + " of " + std::to_string(n));
  }
  return {static_cast<std::uint32_t>(size.width), static_cast<std::uint32_t>(size.height),
          static_cast<std::uint32_t>(size.depth)};
}

void dispatch(Encoder* self, Selector, metal::Size groups, metal::Size threads) {
  EncoderWork& work = open_work(self, "dispatchThreadgroups:");
  if (self->pipeline == nullptr) violation("dispatchThreadgroups: without a pipeline");
  EncodedLaunch launch;
  launch.pipeline = self->pipeline;
  std::copy(std::begin(self->buffers), std::end(self->buffers), std::begin(launch.buffers));
  Dispatch& d = launch.dispatch;
  d = self->state;
  d.kernel = self->pipeline->kernel;
  d.max_threads = self->pipeline->max_threads;
  d.groups = size_of(groups, "a size");
  d.threads = size_of(threads, "a threadgroup");
  d.grid = {d.groups.x * d.threads.x, d.groups.y * d.threads.y, d.groups.z * d.threads.z};
  work.segments.back().push_back(std::move(launch));
}

void barrier(Encoder* self, Selector, unsigned long scope) {
  constexpr unsigned long kBuffers = 1;
  EncoderWork& work = open_work(self, "memoryBarrierWithScope:");
  if ((scope & kBuffers) == 0)
    violation("memoryBarrierWithScope: buffers are what kernels share, got " +
              std::to_string(scope));
  if (!work.segments.back().empty()) work.segments.emplace_back();
}

void end_encoding(Encoder* self, Selector) {
  open_work(self, "endEncoding");
  self->work = nullptr;
  self->commands->open = nullptr;
}

Id compute_encoder(CommandBuffer* self, Selector, unsigned long type) {
  constexpr unsigned long kConcurrent = 1;
  if (self->status.load() != CommandBuffer::kNew)
    violation("computeCommandEncoder: the command buffer is committed");
  if (self->open != nullptr)
    violation("computeCommandEncoder: the encoder before it has not ended");
  if (type != kConcurrent)
    violation("computeCommandEncoder: the emulator has concurrent ones alone");
  self->encoders.push_back(std::make_unique<EncoderWork>());
  self->open = new Encoder(self, self->encoders.back().get());
  return autorelease(self->open);
}

Id error_of(CommandBuffer* self, Selector) {
  if (self->status.load() != CommandBuffer::kError) return nullptr;
  return self->error.get();
}

void register_encoder() {
  static Class encoder(
      "MTLComputeCommandEncoder", nullptr, +[](Object* object) {
        auto* self = static_cast<Encoder*>(object);
        if (self->work != nullptr) violation("an encoder goes without endEncoding");
        destroy<Encoder>(object);
      });
  encoder
      .on(
          "setComputePipelineState:",
          +[](Encoder* self, Selector, Id pipeline) {
            open_work(self, "setComputePipelineState:");
            self->pipeline =
                as<Pipeline>(pipeline, "MTLComputePipelineState", "setComputePipelineState:");
          })
      .on("setBuffer:offset:atIndex:", +set_buffer)
      .on("setBytes:length:atIndex:", +set_bytes)
      .on("setThreadgroupMemoryLength:atIndex:", +set_threadgroup_bytes)
      .on("dispatchThreadgroups:threadsPerThreadgroup:", +dispatch)
      .on("memoryBarrierWithScope:", +barrier)
      .on(
          "waitForFence:",
          +[](Encoder* self, Selector, Id fence) {
            EncoderWork& work = open_work(self, "waitForFence:");
            if (work.segments.size() > 1 || !work.segments[0].empty()) {
              violation("waitForFence: after a dispatch, which would not wait");
            }
            work.waits.push_back(as<Fence>(fence, "MTLFence", "waitForFence:"));
          })
      .on(
          "updateFence:",
          +[](Encoder* self, Selector, Id fence) {
            open_work(self, "updateFence:")
                .updates.push_back(as<Fence>(fence, "MTLFence", "updateFence:"));
          })
      .on(
          "useResource:usage:",
          +[](Encoder* self, Selector, Id buffer, unsigned long usage) {
            constexpr unsigned long kWrite = 2;
            open_work(self, "useResource:")
                .resources.emplace_back(as<Buffer>(buffer, "MTLBuffer", "useResource:"),
                                        (usage & kWrite) != 0);
          })
      .on("endEncoding", +end_encoding);
}

}  // namespace

void register_commands() {
  static Class queue("MTLCommandQueue", nullptr, destroy<Queue>);
  queue
      .on(
          "commandBufferWithUnretainedReferences",
          +[](Queue* self, Selector) -> Id { return autorelease(new CommandBuffer(self)); })
      .on(
          "addResidencySet:", +[](Queue* self, Selector, Id set) {
            self->sets.emplace_back(as<ResidencySet>(set, "MTLResidencySet", "addResidencySet:"));
          });
  static Class commands("MTLCommandBuffer", nullptr, destroy<CommandBuffer>);
  commands.on("computeCommandEncoderWithDispatchType:", +compute_encoder)
      .on(
          "commit", +[](CommandBuffer* self, Selector) -> void { commit(*self); })
      .on(
          "waitUntilCompleted",
          +[](CommandBuffer* self, Selector) -> void { wait_until_completed(*self); })
      .on(
          "status",
          +[](CommandBuffer* self, Selector) -> unsigned long { return self->status.load(); })
      .on("error", +error_of)
      .on(
          "GPUStartTime", +[](CommandBuffer* self, Selector) -> double { return self->start; })
      .on(
          "GPUEndTime", +[](CommandBuffer* self, Selector) -> double { return self->end; })
      .on(
          "setLabel:",
          +[](CommandBuffer*, Selector, Id label) { as<String>(label, "NSString", "setLabel:"); });
  register_encoder();
}

}  // namespace mlxtape::emulator

// Of the buffer that was set last at this index: the bytes that are the tensor's. Kernels may touch no others.
extern "C" void mlxtape_metal_extent(objc_object* encoder, unsigned long index,
                                     unsigned long before, unsigned long after) {
  using namespace mlxtape::emulator;
  auto* self = as<Encoder>(encoder, "MTLComputeCommandEncoder", "mlxtape_metal_extent");
  Binding& binding = self->state.buffers[checked_index(index, "mlxtape_metal_extent")];
  if (binding.block == nullptr || before > binding.offset ||
      binding.offset + after > binding.block->bytes) {
    violation("mlxtape_metal_extent: the extent is not inside of a buffer");
  }
  binding.begin = binding.offset - before;
  binding.end = binding.offset + after;
}
