#include "backends/cuda/library.h"

#include <dlfcn.h>

#include <cstddef>

#include "mlxtape/base/error.h"

namespace mlxtape::cuda {

Library::Library(const char* title, std::initializer_list<const char*> files) : title_(title) {
  for (const char* file : files) {
    handle_ = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) return;
    if (reason_.empty()) reason_ = dlerror();  // of the name it should have
  }
}

void* Library::symbol(const char* name) const {
  if (handle_ == nullptr) {
    throw Error(Errc::kBackend, std::string(title_) +
                                    " must be installed (it comes with the CUDA toolkit or the "
                                    "nvidia-* packages of pip; LD_LIBRARY_PATH may have to name "
                                    "its folder), got " +
                                    reason_);
  }
  void* found = dlsym(handle_, name);
  if (found == nullptr) {
    throw Error(Errc::kBackend, std::string(title_) + " must have " + name + ", got " + dlerror());
  }
  return found;
}

// Not closed: what they started in the driver must outlive every static object.
const Library& cublaslt() {
  static const auto* const library =
      new Library("cuBLASLt", {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"});
  return *library;
}
const Library& cudnn() {
  static const auto* const library = new Library("cuDNN", {"libcudnn.so.9", "libcudnn.so"});
  return *library;
}
const Library& nvrtc() {
  static const auto* const library = new Library(
      "NVRTC",
      {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"});
  return *library;
}

namespace {

// number = ((major · thousands) + minor · hundreds + patch)
std::string dotted(std::size_t number, std::size_t thousands, std::size_t hundreds) {
  return std::to_string(number / thousands) + "." + std::to_string(number % thousands / hundreds) +
         "." + std::to_string(number % hundreds);
}

std::string absent(const Library& library) { return "absent, " + library.reason(); }

}  // namespace

std::string cublaslt_version() {
  if (!cublaslt().is_open()) return absent(cublaslt());
  const std::size_t number = cublaslt().function<std::size_t()>("cublasLtGetVersion")();
  return number >= 100000 ? dotted(number, 10000, 100) : dotted(number, 1000, 100);
}

std::string cudnn_version() {
  if (!cudnn().is_open()) return absent(cudnn());
  return dotted(cudnn().function<std::size_t()>("cudnnGetVersion")(), 10000, 100);
}

std::string nvrtc_version() {
  if (!nvrtc().is_open()) return absent(nvrtc());
  int major = 0, minor = 0;
  nvrtc().function<int(int*, int*)>("nvrtcVersion")(&major, &minor);
  return std::to_string(major) + "." + std::to_string(minor);
}

}  // namespace mlxtape::cuda
