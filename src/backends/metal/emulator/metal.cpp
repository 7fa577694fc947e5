// Devices, texts, pipelines, buffers and residency: what host code asks for before it encodes.
#include <fstream>

#include "backends/metal/emulator/control.h"
#include "backends/metal/emulator/metal_objects.h"

namespace mlxtape::emulator {
namespace {

constexpr const char* kLibraryErrors = "MTLLibraryErrorDomain";
constexpr const char* kPipelineErrors = "AGXMetalG13X";
constexpr unsigned long kMaxBufferBytes = 8UL << 30;
constexpr unsigned long long kWorkingSet = 11'453'251'584;  // of 16 GB
constexpr unsigned long kVersion31 = (3UL << 16) + 1;

// ---- texts ----

Id new_library(DeviceObject*, Selector, Id source, Id options, Id* error) {
  const std::string& text = as<String>(source, "NSString", "newLibraryWithSource:")->text;
  const auto* how = as<CompileOptions>(options, "MTLCompileOptions", "newLibraryWithSource:");
  if (how->version < kVersion31)
    violation("newLibraryWithSource: kernels need language version 3.1");
  if (!how->is_safe)
    violation("newLibraryWithSource: the math mode must be safe, and the default is fast");
  if (!how->is_precise)
    violation("newLibraryWithSource: functions must be the precise ones, and the default are fast");
  if (is_due(FaultKind::kLibrary)) {
    give_error(error, kLibraryErrors, 3,
               "program_source:1:1: error: refused by MLXTAPE_METAL_FAULT");
    return nullptr;
  }
  const KernelFile* file = find_file(text);
  if (file == nullptr) {
    give_error(error, kLibraryErrors, 3,
               "the emulator has no compiler: it knows the kernels of its build alone");
    return nullptr;
  }
  return new LibraryObject(file);
}

std::size_t bytes_of(unsigned long type) {
  switch (type) {
    case 3:             // float
    case 29:            // int
    case 33: return 4;  // uint
    case 53: return 1;  // bool
    default: violation("setConstantValue: type " + std::to_string(type) + " is not used here");
  }
}

unsigned long type_of(const std::string& name) {
  return name == "float" ? 3 : name == "int" ? 29 : name == "uint" ? 33 : name == "bool" ? 53 : 0;
}

void set_constant(ConstantValues* self, Selector, const void* value, unsigned long type,
                  unsigned long index) {
  ConstantValues::Value copy{type, 0};
  if (index >= kMaxConstants)
    violation("setConstantValue: at most 64 function constants, got " + std::to_string(index));
  __builtin_memcpy(&copy.bits, value, bytes_of(type));
  self->values[index] = copy;
}

Id new_function(LibraryObject* self, Selector, Id name, Id constants, Id* error) {
  const std::string& wanted = as<String>(name, "NSString", "newFunctionWithName:")->text;
  const auto* values =
      as<ConstantValues>(constants, "MTLFunctionConstantValues", "newFunctionWithName:");
  const KernelInfo* kernel = find_kernel(*self->file, wanted);
  if (kernel == nullptr) {
    give_error(error, kLibraryErrors, 5, "no function " + wanted + " in " + self->file->name);
    return nullptr;
  }
  for (unsigned i = 0; i < self->file->constant_count; ++i) {
    const ConstantInfo& constant = self->file->constants[i];
    const auto value = values->values.find(static_cast<unsigned long>(constant.index));
    if (value != values->values.end() && value->second.type != type_of(constant.type)) {
      give_error(error, kLibraryErrors, 3,
                 "function constant " + std::to_string(constant.index) + " of " + wanted +
                     " is a " + constant.type);
      return nullptr;
    }
  }
  return new Function(kernel, values->values);
}

// ---- pipelines ----

// Registers decide how many threads a threadgroup may have: with a seed, a launcher that does not ask is found.
std::uint32_t max_threads_of(const KernelInfo& kernel) {
  if (kernel.max_threads != 0) return kernel.max_threads;
  if (seed() == 0) return kMaxThreads;
  constexpr std::uint32_t kChoices[] = {1024, 896, 768, 512};
  std::uint64_t hash = seed();
  for (const char* c = kernel.name; *c != '\0'; ++c)
    hash = mix(hash, static_cast<unsigned char>(*c));
  return kChoices[hash >> 32 & 3];
}

Id new_pipeline(const Function& function, Id* error) {
  if (is_due(FaultKind::kPipeline)) {
    give_error(error, kPipelineErrors, 3, "refused by MLXTAPE_METAL_FAULT");
    return nullptr;
  }
  return new Pipeline(function, max_threads_of(*function.kernel));
}

// What an archive keeps for a function: its constants matter.
std::string archive_key(const Function& function) {
  std::string key = function.kernel->name;
  for (const auto& [index, value] : function.constants) {
    key += "," + std::to_string(index) + "=" + std::to_string(value.bits);
  }
  return key;
}

Id new_pipeline_of(DeviceObject*, Selector, Id descriptor, unsigned long options, Id*, Id* error) {
  constexpr unsigned long kFailOnArchiveMiss = 4;
  const auto* how =
      as<PipelineDescriptor>(descriptor, "MTLComputePipelineDescriptor", "newComputePipelineState");
  if (!how->function) violation("newComputePipelineState: a descriptor without a function");
  if ((options & kFailOnArchiveMiss) != 0) {
    bool found = false;
    for (std::size_t i = 0; how->archives && i < how->archives->objects.size(); ++i) {
      const auto* archive =
          as<Archive>(how->archives->objects[i].get(), "MTLBinaryArchive", "setBinaryArchives:");
      found = found || archive->pipelines.count(archive_key(*how->function.get())) != 0;
    }
    if (!found) {
      give_error(error, kPipelineErrors, 2, "the function is in no archive");
      return nullptr;
    }
  }
  return new_pipeline(*how->function.get(), error);
}

constexpr const char* kArchiveHead = "metal emulator archive 1";

Id new_archive(DeviceObject*, Selector, Id descriptor, Id* error) {
  const auto* how =
      as<ArchiveDescriptor>(descriptor, "MTLBinaryArchiveDescriptor", "newBinaryArchive");
  auto* archive = new Archive;
  if (!how->url) return archive;
  std::ifstream in(how->url->path);
  std::string line;
  if (!std::getline(in, line) || line != kArchiveHead) {
    release(archive);
    give_error(error, "MTLBinaryArchiveDomain", 1, how->url->path + " is no archive");
    return nullptr;
  }
  while (std::getline(in, line)) archive->pipelines[line] = 1;
  return archive;
}

bool write_archive(Archive* self, Selector, Id url, Id* error) {
  const std::string& path = as<Url>(url, "NSURL", "serializeToURL:")->path;
  std::ofstream out(path);
  out << kArchiveHead << '\n';
  for (const auto& [key, code] : self->pipelines) out << key << '\n';
  out.close();
  if (out) return true;
  give_error(error, "MTLBinaryArchiveDomain", 2, path + " cannot be written");
  return false;
}

// ---- device ----

Id new_buffer(DeviceObject*, Selector, unsigned long bytes, unsigned long) {
  if (bytes == 0) violation("newBufferWithLength: 0");
  if (bytes > kMaxBufferBytes || is_due(FaultKind::kAllocation)) return nullptr;
  return make_buffer(bytes);
}

Id new_buffer_on(DeviceObject*, Selector, void* pages, unsigned long bytes, unsigned long,
                 Id deallocator) {
  if (bytes == 0 || deallocator != nullptr)
    violation("newBufferWithBytesNoCopy: no bytes, or a block that the emulator cannot call");
  if (bytes > kMaxBufferBytes || is_due(FaultKind::kAllocation)) return nullptr;
  return make_buffer_on(pages, bytes);
}

bool supports_family(DeviceObject*, Selector, long family) {
  constexpr long kApple1 = 1001;
  constexpr long kMac1 = 2001;
  constexpr long kMac2 = 2002;
  constexpr long kCommon1 = 3001;
  constexpr long kCommon3 = 3003;
  constexpr long kMetal3 = 5001;
  const long newest = fault_value("family", 1007);
  return (family >= kApple1 && family <= newest) || family == kMac1 || family == kMac2 ||
         (family >= kCommon1 && family <= kCommon3) || family == kMetal3;
}

void set_math_mode(CompileOptions* self, Selector, long mode) {
  if (fault_value("system", 15) < 15)
    violation("-[MTLCompileOptions setMathMode:]: unrecognized selector on macOS 14");
  self->is_safe = mode == 0;
}

// On macOS 15 a mode of its own decides on exp, sin and their like, and on quotients: fast ones are the default.
void set_math_functions(CompileOptions* self, Selector, long functions) {
  if (fault_value("system", 15) < 15)
    violation(
        "-[MTLCompileOptions setMathFloatingPointFunctions:]: unrecognized selector on macOS 14");
  self->is_precise = functions == 1;
}

DeviceObject* the_device() {
  static auto* device = new DeviceObject;
  return device;
}

void register_device() {
  static Class device("MTLDevice", nullptr, destroy<DeviceObject>);
  device
      .on(
          "name",
          +[](DeviceObject*, Selector) -> Id {
            return autorelease(new String("Apple M1 (emulated)"));
          })
      .on(
          "architecture",
          +[](DeviceObject*, Selector) -> Id { return autorelease(new Architecture); })
      .on("supportsFamily:", +supports_family)
      .on(
          "recommendedMaxWorkingSetSize",
          +[](DeviceObject*, Selector) -> unsigned long long { return kWorkingSet; })
      .on(
          "maxBufferLength",
          +[](DeviceObject*, Selector) -> unsigned long { return kMaxBufferBytes; })
      .on(
          "hasUnifiedMemory", +[](DeviceObject*, Selector) -> bool { return true; })
      .on(
          "maxThreadgroupMemoryLength",
          +[](DeviceObject*, Selector) -> unsigned long { return kThreadgroupBytes; })
      .on(
          "newCommandQueue", +[](DeviceObject*, Selector) -> Id { return new Queue; })
      .on(
          "newFence", +[](DeviceObject*, Selector) -> Id { return new Fence; })
      .on("newBufferWithLength:options:", +new_buffer)
      .on("newBufferWithBytesNoCopy:length:options:deallocator:", +new_buffer_on)
      .on("newLibraryWithSource:options:error:", +new_library)
      .on(
          "newComputePipelineStateWithFunction:error:",
          +[](DeviceObject*, Selector, Id function, Id* error) -> Id {
            return new_pipeline(*as<Function>(function, "MTLFunction", "newComputePipelineState"),
                                error);
          })
      .on("newComputePipelineStateWithDescriptor:options:reflection:error:", +new_pipeline_of)
      .on(
          "newResidencySetWithDescriptor:error:",
          +[](DeviceObject*, Selector, Id descriptor, Id*) -> Id {
            as<ResidencyDescriptor>(descriptor, "MTLResidencySetDescriptor", "newResidencySet");
            return new ResidencySet;
          })
      .on("newBinaryArchiveWithDescriptor:error:", +new_archive);
  static Class architecture("MTLArchitecture", nullptr, destroy<Architecture>);
  architecture.on(
      "name",
      +[](Architecture*, Selector) -> Id { return autorelease(new String("applegpu_g13g")); });
}

void register_kernels() {
  static Class options(
      "MTLCompileOptions", +[]() -> Id { return new CompileOptions; }, destroy<CompileOptions>);
  options
      .on(
          "setLanguageVersion:",
          +[](CompileOptions* self, Selector, unsigned long version) { self->version = version; })
      .on("setMathMode:", +set_math_mode)
      .on("setMathFloatingPointFunctions:", +set_math_functions)
      .on(
          "setFastMathEnabled:",
          +[](CompileOptions* self, Selector, bool on) { self->is_safe = self->is_precise = !on; });
  static Class library("MTLLibrary", nullptr, destroy<LibraryObject>);
  library.on("newFunctionWithName:constantValues:error:", +new_function);
  static Class constants(
      "MTLFunctionConstantValues", +[]() -> Id { return new ConstantValues; },
      destroy<ConstantValues>);
  constants.on("setConstantValue:type:atIndex:", +set_constant);
  static Class function("MTLFunction", nullptr, destroy<Function>);
  static Class pipeline("MTLComputePipelineState", nullptr, destroy<Pipeline>);
  pipeline
      .on(
          "maxTotalThreadsPerThreadgroup",
          +[](Pipeline* self, Selector) -> unsigned long { return self->max_threads; })
      .on(
          "threadExecutionWidth", +[](Pipeline*, Selector) -> unsigned long { return kSimdWidth; })
      // What its variables take is known once it has run.
      .on(
          "staticThreadgroupMemoryLength", +[](Pipeline* self, Selector) -> unsigned long {
            return counters()[self->kernel->name].threadgroup_bytes;
          });
  static Class descriptor(
      "MTLComputePipelineDescriptor", +[]() -> Id { return new PipelineDescriptor; },
      destroy<PipelineDescriptor>);
  descriptor
      .on(
          "setComputeFunction:",
          +[](PipelineDescriptor* self, Selector, Id function) {
            self->function =
                Reference<Function>(as<Function>(function, "MTLFunction", "setComputeFunction:"));
          })
      .on(
          "setBinaryArchives:", +[](PipelineDescriptor* self, Selector, Id archives) {
            self->archives =
                archives == nullptr
                    ? Reference<Array>()
                    : Reference<Array>(as<Array>(archives, "NSArray", "setBinaryArchives:"));
          });
  static Class archive_descriptor(
      "MTLBinaryArchiveDescriptor", +[]() -> Id { return new ArchiveDescriptor; },
      destroy<ArchiveDescriptor>);
  archive_descriptor.on(
      "setUrl:", +[](ArchiveDescriptor* self, Selector, Id url) {
        self->url =
            url == nullptr ? Reference<Url>() : Reference<Url>(as<Url>(url, "NSURL", "setUrl:"));
      });
  static Class archive("MTLBinaryArchive", nullptr, destroy<Archive>);
  archive
      .on(
          "addComputePipelineFunctionsWithDescriptor:error:",
          +[](Archive* self, Selector, Id descriptor, Id*) -> bool {
            const auto* how = as<PipelineDescriptor>(descriptor, "MTLComputePipelineDescriptor",
                                                     "addComputePipelineFunctions");
            if (!how->function)
              violation("addComputePipelineFunctions: a descriptor without a function");
            self->pipelines[archive_key(*how->function.get())] = 1;
            return true;
          })
      .on("serializeToURL:error:", +write_archive);
}

void register_memory() {
  static Class buffer("MTLBuffer", nullptr, destroy<Buffer>);
  buffer.on(
            "contents", +[](Buffer* self, Selector) -> void* { return self->contents; })
      .on(
          "gpuAddress",
          +[](Buffer* self, Selector) -> unsigned long long {
            return reinterpret_cast<unsigned long long>(self->block.base);
          })
      .on("length", +[](Buffer* self, Selector) -> unsigned long { return self->block.bytes; });
  static Class fence("MTLFence", nullptr, destroy<Fence>);
  static Class descriptor(
      "MTLResidencySetDescriptor", +[]() -> Id { return new ResidencyDescriptor; },
      destroy<ResidencyDescriptor>);
  static Class set("MTLResidencySet", nullptr, destroy<ResidencySet>);
  set.on(
         "addAllocation:",
         +[](ResidencySet* self, Selector, Id buffer) {
           self->wanted.emplace_back(as<Buffer>(buffer, "MTLBuffer", "addAllocation:"));
         })
      .on(
          "removeAllocation:",
          +[](ResidencySet* self, Selector, Id buffer) {
            const auto* gone = as<Buffer>(buffer, "MTLBuffer", "removeAllocation:");
            std::erase_if(self->wanted,
                          [gone](const Reference<Buffer>& b) { return b.get() == gone; });
          })
      .on(
          "commit", +[](ResidencySet* self, Selector) -> void { self->committed = self->wanted; })
      .on("requestResidency", +[](ResidencySet*, Selector) -> void {});
}

}  // namespace

void register_metal() {
  register_device();
  register_kernels();
  register_memory();
  register_commands();
}

}  // namespace mlxtape::emulator

// The caller's to release.
extern "C" objc_object* MTLCopyAllDevices() {
  using namespace mlxtape::emulator;
  std::vector<Reference<Object>> devices;
  if (fault_value("devices", 1) != 0) devices.emplace_back(the_device());
  return new Array(std::move(devices));
}
