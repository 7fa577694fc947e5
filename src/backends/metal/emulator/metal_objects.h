// The objects of Metal, as the emulator has them.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backends/metal/emulator/dispatch.h"
#include "backends/metal/emulator/foundation.h"
#include "backends/metal/emulator/library.h"
#include "backends/metal/emulator/objects.h"
#include "backends/metal/emulator/state.h"

namespace mlxtape::emulator {

struct Buffer : Object {
  Buffer(char* host, char* gpu, std::size_t bytes, std::size_t mapped)
      : Object("MTLBuffer"), contents(host), mapped_bytes(mapped), block(gpu, bytes) {}
  ~Buffer();  // memory.cpp
  char* contents;
  std::size_t mapped_bytes;  // 0: the host's own pages
  Block block;               // at the GPU's address
};
// Two mappings of the same memory; null where there is none.
Buffer* make_buffer(std::size_t bytes);
Buffer* make_buffer_on(void* pages, std::size_t bytes);

struct CompileOptions : Object {
  CompileOptions() : Object("MTLCompileOptions") {}
  unsigned long version = 0;
  bool is_safe = false;
  bool is_precise = false;
};
struct LibraryObject : Object {
  explicit LibraryObject(const KernelFile* f) : Object("MTLLibrary"), file(f) {}
  const KernelFile* file;
};
struct ConstantValues : Object {
  ConstantValues() : Object("MTLFunctionConstantValues") {}
  struct Value {
    unsigned long type;
    std::uint32_t bits;
  };
  std::map<unsigned long, Value> values;
};
struct Function : Object {
  Function(const KernelInfo* k, std::map<unsigned long, ConstantValues::Value> v)
      : Object("MTLFunction"), kernel(k), constants(std::move(v)) {}
  const KernelInfo* kernel;
  std::map<unsigned long, ConstantValues::Value> constants;
};
struct Pipeline : Object {
  Pipeline(const Function& function, std::uint32_t threads)
      : Object("MTLComputePipelineState"),
        kernel(function.kernel),
        max_threads(threads),
        constants(function.constants) {}
  const KernelInfo* kernel;
  std::uint32_t max_threads;
  std::map<unsigned long, ConstantValues::Value> constants;
};
struct PipelineDescriptor : Object {
  PipelineDescriptor() : Object("MTLComputePipelineDescriptor") {}
  Reference<Function> function;
  Reference<Array> archives;
};
struct ArchiveDescriptor : Object {
  ArchiveDescriptor() : Object("MTLBinaryArchiveDescriptor") {}
  Reference<Url> url;
};
struct Archive : Object {
  Archive() : Object("MTLBinaryArchive") {}
  std::map<std::string, std::uint64_t>
      pipelines;  // by name: a number that stands for the machine code
};
struct Architecture : Object {
  Architecture() : Object("MTLArchitecture") {}
};
struct DeviceObject : Object {
  DeviceObject() : Object("MTLDevice") {}
};
struct Fence : Object {
  Fence() : Object("MTLFence") {}
  std::uint64_t updated_by = 0;  // serial of the encoder, by the order of commits
};
struct ResidencyDescriptor : Object {
  ResidencyDescriptor() : Object("MTLResidencySetDescriptor") {}
};
struct ResidencySet : Object {
  ResidencySet() : Object("MTLResidencySet") {}
  std::vector<Reference<Buffer>> wanted, committed;
};
struct Queue : Object {
  Queue() : Object("MTLCommandQueue") {}
  std::vector<Reference<ResidencySet>> sets;
};

// A launch as it was encoded. Nothing is retained, as the command buffer says: what it needs must be there when it runs.
struct EncodedLaunch {
  Pipeline* pipeline = nullptr;
  Buffer* buffers[kMaxBuffers] = {};
  Dispatch dispatch;
};

struct EncoderWork {
  std::uint64_t serial = 0;
  std::vector<std::vector<EncodedLaunch>> segments{1};  // between two barriers
  std::vector<Fence*> waits, updates;
  std::vector<std::pair<Buffer*, bool>> resources;  // named by useResource; may they be written
  // Encoders that are over before this one begins: all before prefix, and others.
  std::uint64_t prefix = 0;
  std::vector<std::uint64_t> others;
  bool is_after(std::uint64_t serial) const;
};

struct Encoder;
struct CommandBuffer : Object {
  explicit CommandBuffer(Queue* q) : Object("MTLCommandBuffer"), queue(q) {}
  Reference<Queue> queue;
  Encoder* open = nullptr;
  std::vector<std::unique_ptr<EncoderWork>> encoders;
  enum Status : unsigned long { kNew = 0, kCommitted = 2, kCompleted = 4, kError = 5 };
  std::atomic<unsigned long> status{kNew};
  std::uint64_t number = 0;  // of its commit
  bool hangs = false;
  long planned_error = 0;  // a code, where one was injected
  Reference<ErrorObject> error;
  double start = 0, end = 0;
};
struct Encoder : Object {
  Encoder(CommandBuffer* c, EncoderWork* w)
      : Object("MTLComputeCommandEncoder"), commands(c), work(w) {}
  Reference<CommandBuffer> commands;
  EncoderWork* work;  // null: encoding has ended
  Pipeline* pipeline = nullptr;
  Buffer* buffers[kMaxBuffers] = {};
  Dispatch state;  // bindings so far
};

// schedule.cpp
void commit(CommandBuffer& commands);
void wait_until_completed(CommandBuffer& commands);

// commands.cpp and metal.cpp
void register_commands();

}  // namespace mlxtape::emulator
