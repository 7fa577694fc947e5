#include "backends/cuda/source_kernel.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

#include "backends/cuda/error.h"
#include "backends/cuda/library.h"
#include "mlxtape/base/files.h"

namespace mlxtape::cuda {

namespace fs = std::filesystem;

namespace {

// ---- the disk ----

std::uint64_t hash_of(std::string_view bytes) {  // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

// A file holds the key before the code: two keys of one hash are not mistaken for each other.
struct Header {
  std::array<char, 8> magic{'m', 'l', 'x', 'k', 'e', 'r', 'n', '1'};
  std::uint64_t key_bytes = 0, code_bytes = 0, code_hash = 0;
};

std::string path_of(const std::string& folder, const std::string& key) {
  std::array<char, 32> name;
  std::snprintf(name.data(), name.size(), "%016llx.cubin",
                static_cast<unsigned long long>(hash_of(key)));
  return folder + "/" + name.data();
}

std::string load(const std::string& path, const std::string& key) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return {};
  std::string file;
  try {
    file = read_whole(path, "kernel cache");
  } catch (const Error&) {
    return {};
  }
  Header header;
  if (file.size() < sizeof header) return {};
  std::memcpy(&header, file.data(), sizeof header);
  const std::string_view rest = std::string_view(file).substr(sizeof header);
  if (header.magic != Header{}.magic || header.key_bytes != key.size() ||
      rest.size() < key.size() || rest.substr(0, key.size()) != key ||
      rest.size() - key.size() != header.code_bytes) {
    return {};
  }
  const std::string_view code = rest.substr(key.size());
  return hash_of(code) == header.code_hash ? std::string(code) : std::string();
}

// What cannot be kept is compiled again next time: no reason to fail.
void keep(const std::string& folder, const std::string& path, const std::string& key,
          const std::string& code) {
  Header header;
  header.key_bytes = key.size();
  header.code_bytes = code.size();
  header.code_hash = hash_of(code);
  std::string file(sizeof header, '\0');
  std::memcpy(file.data(), &header, sizeof header);
  std::error_code failed;
  fs::create_directories(folder, failed);
  if (failed) return;
  try {
    write_whole(path, file + key + code, "kernel cache");
  } catch (const Error&) {
  }
}

// ---- the compiler ----

using Program = void*;

class Compiler {
 public:
  explicit Compiler(const SourceKernel& kernel) : kernel_(kernel) {
    check(nvrtc()
              .function<int(Program*, const char*, const char*, int, const char* const*,
                            const char* const*)>("nvrtcCreateProgram")(
                  &program_, kernel.source.c_str(), (kernel.name + ".cu").c_str(), 0, nullptr,
                  nullptr),
          "reading the source");
  }
  ~Compiler() { nvrtc().function<int(Program*)>("nvrtcDestroyProgram")(&program_); }
  Compiler(const Compiler&) = delete;
  Compiler& operator=(const Compiler&) = delete;

  std::string compile(const std::vector<std::string>& options) const {
    std::vector<const char*> words;
    for (const std::string& option : options) words.push_back(option.c_str());
    const int status = nvrtc().function<int(Program, int, const char* const*)>(
        "nvrtcCompileProgram")(program_, static_cast<int>(words.size()), words.data());
    if (status == 0) return text("nvrtcGetCUBINSize", "nvrtcGetCUBIN");
    std::string log = text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog");
    while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
    throw Error(Errc::kArgument, "kernel " + kernel_.name + ": the source must compile, got\n" +
                                     (log.empty() ? error_name(status) : log));
  }

 private:
  static std::string error_name(int status) {
    return nvrtc().function<const char*(int)>("nvrtcGetErrorString")(status);
  }
  void check(int status, const char* what) const {
    if (status == 0) return;
    throw Error(Errc::kBackend, "kernel " + kernel_.name + ": " + what + " must succeed, got " +
                                    error_name(status));
  }
  std::string text(const char* size_name, const char* name) const {
    std::size_t size = 0;
    check(nvrtc().function<int(Program, std::size_t*)>(size_name)(program_, &size), size_name);
    std::string out(size, '\0');
    check(nvrtc().function<int(Program, char*)>(name)(program_, out.data()), name);
    return out;
  }

  const SourceKernel& kernel_;
  Program program_ = nullptr;
};

// Where <cuda_fp16.h> and its like are, unless an option says otherwise.
constexpr const char* kIncludes = "--include-path=/usr/local/cuda/include";

}  // namespace

Compiled compile(const SourceKernel& kernel, int capability) {
  std::vector<std::string> options = {"--gpu-architecture=sm_" + std::to_string(capability),
                                      "--std=c++20"};
  options.insert(options.end(), kernel.options.begin(), kernel.options.end());
  options.emplace_back(kIncludes);
  std::string key = "nvrtc " + nvrtc_version();
  for (const std::string& option : options) key += "\n" + option;
  key += "\n\n" + kernel.source;
  const bool has_own_files = kernel.source.find("#include \"") != std::string::npos;
  const std::string folder = has_own_files ? "" : kernel_cache();
  const std::string path = folder.empty() ? "" : path_of(folder, key);
  std::string code = folder.empty() ? "" : load(path, key);
  if (!code.empty()) return {std::move(code), true};
  code = Compiler(kernel).compile(options);
  if (!folder.empty()) keep(folder, path, key, code);
  return {std::move(code), false};
}

namespace {

// What a Kernel's state points to; it lives as long as the registry.
struct Loaded {
  SourceKernel source;
  std::mutex mutex;
  struct OnDevice {
    cudaKernel_t kernel = nullptr;
    std::size_t tensors = 0, args_bytes = 0;  // of the latest call, which were right
    std::size_t shared_bytes = 0;             // that it may have
  };
  std::map<int, OnDevice> by_device;
};

int capability_of(int device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "asking");
  return 10 * major + minor;
}

cudaKernel_t load_on(int device, const SourceKernel& source) {
  const std::string code = compile(source, capability_of(device)).code;
  cudaLibrary_t library = nullptr;
  check(cudaLibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
        "loading the machine code");
  cudaKernel_t kernel = nullptr;
  if (cudaLibraryGetKernel(&kernel, library, source.entry.c_str()) == cudaSuccess) return kernel;
  cudaGetLastError();
  cudaLibraryUnload(library);
  throw Error(Errc::kArgument, "the source must have a function extern \"C\" __global__ " +
                                   source.entry + ", got none");
}

// The kernel reads as many parameters as it declares, whatever it is given.
void check_parameters(cudaKernel_t kernel, const KernelCall& call) {
  const std::size_t tensors = call.in.size() + call.out.size();
  std::size_t offset = 0, bytes = 0;
  for (std::size_t i = 0; i <= tensors; ++i) {
    const std::size_t wanted = i < tensors ? sizeof(void*) : call.args_bytes;
    if (cudaFuncGetParamInfo(kernel, i, &offset, &bytes) != cudaSuccess) bytes = 0;
    if (bytes == wanted) continue;
    cudaGetLastError();
    throw Error(Errc::kArgument, "parameter " + std::to_string(i + 1) + " must have the " +
                                     std::to_string(wanted) + " bytes of " +
                                     (i < tensors ? "an address" : "the arguments") + ", got " +
                                     std::to_string(bytes));
  }
  if (cudaFuncGetParamInfo(kernel, tensors + 1, &offset, &bytes) == cudaSuccess) {
    throw Error(Errc::kArgument, "one parameter for each tensor and one for the arguments, " +
                                     std::to_string(tensors + 1) + ", got more");
  }
  cudaGetLastError();
}

// The kernel on the current device, loaded and found to take what the call has for it.
cudaKernel_t kernel_for(Loaded& loaded, const KernelCall& call, std::size_t shared_bytes) {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  const std::size_t tensors = call.in.size() + call.out.size();
  const std::lock_guard lock(loaded.mutex);
  Loaded::OnDevice& here = loaded.by_device[device];
  if (here.kernel == nullptr) here.kernel = load_on(device, loaded.source);
  if (here.tensors != tensors || here.args_bytes != call.args_bytes) {
    check_parameters(here.kernel, call);
    here.tensors = tensors;
    here.args_bytes = call.args_bytes;
  }
  if (shared_bytes > here.shared_bytes) {
    check(cudaFuncSetAttribute(here.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "asking for shared memory");
    here.shared_bytes = shared_bytes;
  }
  return here.kernel;
}

void launch_source(const KernelCall& call) {
  auto& loaded = *const_cast<Loaded*>(static_cast<const Loaded*>(call.state));
  const Grid grid = loaded.source.grid(call);
  const cudaKernel_t kernel = kernel_for(loaded, call, grid.shared_bytes);
  std::array<void*, 32> addresses;
  std::array<void*, 33> parameters;
  std::size_t n = 0;
  for (const auto& list : {call.in, call.out}) {
    for (void* address : list) {
      addresses[n] = address;
      parameters[n] = &addresses[n];
      ++n;
    }
  }
  parameters[n] = const_cast<void*>(call.args);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks[0], grid.blocks[1], grid.blocks[2]);
  config.blockDim = dim3(grid.threads[0], grid.threads[1], grid.threads[2]);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = static_cast<cudaStream_t>(call.queue);
  check(cudaLaunchKernelExC(&config, kernel, parameters.data()), "the launch");
}

}  // namespace

const Kernel& add_source_kernel(const SourceKernel& kernel) {
  if (kernel.entry.empty() || kernel.source.empty() || !kernel.grid) {
    throw Error(Errc::kArgument, "kernel " + kernel.name +
                                     ": a source, the name of its function and a grid are needed");
  }
  auto loaded = std::make_unique<Loaded>();
  loaded->source = kernel;
  KernelRegistry& registry = KernelRegistry::instance();
  registry.add(Backend::kCuda, kernel.name, launch_source, nullptr, loaded.get());
  static_cast<void>(loaded.release());  // the registry keeps kernels for good
  return registry.find(Backend::kCuda, kernel.name);
}

}  // namespace mlxtape::cuda
