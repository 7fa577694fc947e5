// The messages that this backend sends, each with the types of its method: NSUInteger and enumerations are unsigned long,
// NSInteger is long, BOOL is bool. Names and numbers are those of Apple's documentation.
#pragma once

#include <string>

#include "backends/metal/objc.h"

extern "C" {
objc_object* MTLCopyAllDevices();
}

namespace mlxtape::metal {

struct Size {
  unsigned long width, height, depth;
};

// ---- enumerations ----

constexpr unsigned long kSharedUntracked =
    0x100;  // storage shared, hazards not tracked, the default cache mode
constexpr unsigned long kDispatchConcurrent = 1;
constexpr unsigned long kBarrierBuffers = 1;
constexpr unsigned long kUseReadWrite = 3;
constexpr unsigned long kStatusCompleted = 4, kStatusError = 5;
constexpr long kMathSafe = 0;
constexpr long kFunctionsPrecise = 1;
constexpr long kFamilyApple7 = 1007;

enum class ConstantType : unsigned long { kFloat = 3, kInt = 29, kUInt = 33, kBool = 53 };

constexpr unsigned long language_version(unsigned long major, unsigned long minor) {
  return (major << 16U) + minor;
}

// ---- Foundation ----

inline Id text(const char* utf8) {  // autoreleased
  static const Message<Id(const char*)> call("stringWithUTF8String:");
  return call(objc_getClass("NSString"), utf8);
}
inline std::string text_of(Id string) {
  static const Message<const char*()> call("UTF8String");
  const char* utf8 = string == nullptr ? nullptr : call(string);
  return utf8 == nullptr ? std::string() : utf8;
}
inline std::string description(Id error) {
  static const Message<Id()> call("localizedDescription");
  return error == nullptr ? "no reason given" : text_of(call(error));
}
inline long code(Id error) {
  static const Message<long()> call("code");
  return call(error);
}
inline std::string domain(Id error) {
  static const Message<Id()> call("domain");
  return text_of(call(error));
}
inline unsigned long count(Id array) {
  static const Message<unsigned long()> call("count");
  return call(array);
}
inline Id object_at(Id array, unsigned long index) {
  static const Message<Id(unsigned long)> call("objectAtIndex:");
  return call(array, index);
}
inline Id array_with(Id object) {  // autoreleased
  static const Message<Id(Id)> call("arrayWithObject:");
  return call(objc_getClass("NSArray"), object);
}
inline Id file_url(const char* path) {  // autoreleased
  static const Message<Id(Id)> call("fileURLWithPath:");
  return call(objc_getClass("NSURL"), text(path));
}
// Null where the system knows no such class.
inline Retained make(const char* of_class) {
  static const Message<Id()> alloc("alloc");
  static const Message<Id()> init("init");
  const Id found = objc_getClass(of_class);
  return found == nullptr ? Retained() : Retained::adopt(init(alloc(found)));
}

// ---- device ----

inline std::string device_name(Id device) {
  static const Message<Id()> call("name");
  return text_of(call(device));
}
inline std::string architecture(Id device) {
  static const Message<Id()> call("architecture");
  static const Message<Id()> name("name");
  const Id found = call(device);
  return found == nullptr ? std::string() : text_of(name(found));
}
inline bool supports_family(Id device, long family) {
  static const Message<bool(long)> call("supportsFamily:");
  return call(device, family);
}
inline unsigned long long recommended_working_set(Id device) {
  static const Message<unsigned long long()> call("recommendedMaxWorkingSetSize");
  return call(device);
}
inline unsigned long max_buffer_length(Id device) {
  static const Message<unsigned long()> call("maxBufferLength");
  return call(device);
}
inline bool has_unified_memory(Id device) {
  static const Message<bool()> call("hasUnifiedMemory");
  return call(device);
}
inline unsigned long max_group_memory(Id device) {
  static const Message<unsigned long()> call("maxThreadgroupMemoryLength");
  return call(device);
}
inline Retained new_queue(Id device) {
  static const Message<Id()> call("newCommandQueue");
  return Retained::adopt(call(device));
}
inline Retained new_buffer(Id device, unsigned long bytes) {
  static const Message<Id(unsigned long, unsigned long)> call("newBufferWithLength:options:");
  return Retained::adopt(call(device, bytes, kSharedUntracked));
}
// The pages of the host are the buffer's memory; nothing is called when the buffer goes.
inline Retained new_buffer_on(Id device, void* pages, unsigned long bytes) {
  static const Message<Id(void*, unsigned long, unsigned long, Id)> call(
      "newBufferWithBytesNoCopy:length:options:deallocator:");
  return Retained::adopt(call(device, pages, bytes, kSharedUntracked, nullptr));
}
inline Retained new_fence(Id device) {
  static const Message<Id()> call("newFence");
  return Retained::adopt(call(device));
}
inline Retained new_library(Id device, Id source, Id options, Id* error) {
  static const Message<Id(Id, Id, Id*)> call("newLibraryWithSource:options:error:");
  return Retained::adopt(call(device, source, options, error));
}
inline Retained new_pipeline(Id device, Id function, Id* error) {
  static const Message<Id(Id, Id*)> call("newComputePipelineStateWithFunction:error:");
  return Retained::adopt(call(device, function, error));
}
inline Retained new_pipeline_of(Id device, Id descriptor, unsigned long options, Id* error) {
  static const Message<Id(Id, unsigned long, Id*, Id*)> call(
      "newComputePipelineStateWithDescriptor:options:reflection:error:");
  return Retained::adopt(call(device, descriptor, options, nullptr, error));
}
inline Retained new_residency_set(Id device, Id descriptor, Id* error) {
  static const Message<Id(Id, Id*)> call("newResidencySetWithDescriptor:error:");
  return Retained::adopt(call(device, descriptor, error));
}
inline Retained new_archive(Id device, Id descriptor, Id* error) {
  static const Message<Id(Id, Id*)> call("newBinaryArchiveWithDescriptor:error:");
  return Retained::adopt(call(device, descriptor, error));
}

// ---- kernels ----

inline void set_language_version(Id options, unsigned long version) {
  static const Message<void(unsigned long)> call("setLanguageVersion:");
  call(options, version);
}
inline void set_math_mode(Id options, long mode) {  // macOS 15
  static const Message<void(long)> call("setMathMode:");
  call(options, mode);
}
inline void set_math_functions(Id options, long functions) {  // macOS 15
  static const Message<void(long)> call("setMathFloatingPointFunctions:");
  call(options, functions);
}
inline void set_fast_math(Id options, bool on) {
  static const Message<void(bool)> call("setFastMathEnabled:");
  call(options, on);
}
inline void set_constant(Id values, const void* value, ConstantType type, unsigned long index) {
  static const Message<void(const void*, unsigned long, unsigned long)> call(
      "setConstantValue:type:atIndex:");
  call(values, value, static_cast<unsigned long>(type), index);
}
inline Retained new_function(Id library, const char* name, Id constants, Id* error) {
  static const Message<Id(Id, Id, Id*)> call("newFunctionWithName:constantValues:error:");
  return Retained::adopt(call(library, text(name), constants, error));
}
inline void set_function(Id descriptor, Id function) {
  static const Message<void(Id)> call("setComputeFunction:");
  call(descriptor, function);
}
inline void set_archives(Id descriptor, Id archives) {
  static const Message<void(Id)> call("setBinaryArchives:");
  call(descriptor, archives);
}
inline unsigned long max_threads(Id pipeline) {
  static const Message<unsigned long()> call("maxTotalThreadsPerThreadgroup");
  return call(pipeline);
}
inline unsigned long simd_width(Id pipeline) {
  static const Message<unsigned long()> call("threadExecutionWidth");
  return call(pipeline);
}
inline unsigned long group_memory(Id pipeline) {
  static const Message<unsigned long()> call("staticThreadgroupMemoryLength");
  return call(pipeline);
}
inline void set_url(Id archive_descriptor, Id url) {
  static const Message<void(Id)> call("setUrl:");
  call(archive_descriptor, url);
}
inline bool add_to_archive(Id archive, Id pipeline_descriptor, Id* error) {
  static const Message<bool(Id, Id*)> call("addComputePipelineFunctionsWithDescriptor:error:");
  return call(archive, pipeline_descriptor, error);
}
inline bool write_archive(Id archive, Id url, Id* error) {
  static const Message<bool(Id, Id*)> call("serializeToURL:error:");
  return call(archive, url, error);
}

// ---- buffers and residency ----

inline void* contents(Id buffer) {
  static const Message<void*()> call("contents");
  return call(buffer);
}
inline unsigned long long gpu_address(Id buffer) {
  static const Message<unsigned long long()> call("gpuAddress");
  return call(buffer);
}
inline unsigned long length(Id buffer) {
  static const Message<unsigned long()> call("length");
  return call(buffer);
}
inline void add_allocation(Id set, Id buffer) {
  static const Message<void(Id)> call("addAllocation:");
  call(set, buffer);
}
inline void remove_allocation(Id set, Id buffer) {
  static const Message<void(Id)> call("removeAllocation:");
  call(set, buffer);
}
inline void request_residency(Id set) {
  static const Message<void()> call("requestResidency");
  call(set);
}
inline void add_residency_set(Id queue, Id set) {
  static const Message<void(Id)> call("addResidencySet:");
  call(queue, set);
}

// ---- command buffers and encoders ----

inline Id command_buffer(Id queue) {  // autoreleased
  static const Message<Id()> call("commandBufferWithUnretainedReferences");
  return call(queue);
}
inline Id compute_encoder(Id commands) {  // autoreleased
  static const Message<Id(unsigned long)> call("computeCommandEncoderWithDispatchType:");
  return call(commands, kDispatchConcurrent);
}
inline void commit(Id commands_or_set) {
  static const Message<void()> call("commit");
  call(commands_or_set);
}
inline void wait_until_completed(Id commands) {
  static const Message<void()> call("waitUntilCompleted");
  call(commands);
}
inline unsigned long status(Id commands) {
  static const Message<unsigned long()> call("status");
  return call(commands);
}
inline Id error_of(Id commands) {
  static const Message<Id()> call("error");
  return call(commands);
}
inline double gpu_start(Id commands) {
  static const Message<double()> call("GPUStartTime");
  return call(commands);
}
inline double gpu_end(Id commands) {
  static const Message<double()> call("GPUEndTime");
  return call(commands);
}
inline void set_pipeline(Id encoder, Id pipeline) {
  static const Message<void(Id)> call("setComputePipelineState:");
  call(encoder, pipeline);
}
inline void set_buffer(Id encoder, Id buffer, unsigned long offset, unsigned long index) {
  static const Message<void(Id, unsigned long, unsigned long)> call("setBuffer:offset:atIndex:");
  call(encoder, buffer, offset, index);
}
inline void set_bytes(Id encoder, const void* bytes, unsigned long length, unsigned long index) {
  static const Message<void(const void*, unsigned long, unsigned long)> call(
      "setBytes:length:atIndex:");
  call(encoder, bytes, length, index);
}
inline void set_group_memory(Id encoder, unsigned long bytes, unsigned long index) {
  static const Message<void(unsigned long, unsigned long)> call(
      "setThreadgroupMemoryLength:atIndex:");
  call(encoder, bytes, index);
}
inline void dispatch_groups(Id encoder, Size groups, Size threads) {
  static const Message<void(Size, Size)> call("dispatchThreadgroups:threadsPerThreadgroup:");
  call(encoder, groups, threads);
}
inline void barrier(Id encoder) {
  static const Message<void(unsigned long)> call("memoryBarrierWithScope:");
  call(encoder, kBarrierBuffers);
}
inline void wait_for_fence(Id encoder, Id fence) {
  static const Message<void(Id)> call("waitForFence:");
  call(encoder, fence);
}
inline void update_fence(Id encoder, Id fence) {
  static const Message<void(Id)> call("updateFence:");
  call(encoder, fence);
}
inline void use_resource(Id encoder, Id buffer) {
  static const Message<void(Id, unsigned long)> call("useResource:usage:");
  call(encoder, buffer, kUseReadWrite);
}
inline void end_encoding(Id encoder) {
  static const Message<void()> call("endEncoding");
  call(encoder);
}

}  // namespace mlxtape::metal
