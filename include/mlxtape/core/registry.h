// KernelRegistry: (backend, kernel name) -> launcher. One per process, filled on first use from
// ops.list; users add their own kernels beside ours with the same call.
//
// Threads    Every member may be called from any thread at any time. A Kernel, once found, never
//            moves and never changes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mlxtape/core/tensor.h"

namespace mlxtape {

// All that a launcher may see: addresses in the order the op's host file lists them, the op's
// *Args struct, scratch memory of the size its workspace function asked for, the backend's queue
// (null on the CPU, a cudaStream_t on CUDA, a metal::Target on Metal), and the state given at registration.
struct KernelCall {
  std::span<void* const> in;
  std::span<void* const> out;
  const void* args = nullptr;
  std::size_t args_bytes = 0;
  void* workspace = nullptr;
  void* queue = nullptr;
  const void* state = nullptr;

  template <class T>
  const T* input(std::size_t i) const {
    return static_cast<const T*>(in[i]);
  }
  template <class T>
  T* output(std::size_t i) const {
    return static_cast<T*>(out[i]);
  }
  template <class Args>
  const Args& as() const {
    return *static_cast<const Args*>(args);
  }
};

// What a backend may need to know of a call's tensors beyond their addresses.
struct Operands {
  std::span<const TensorRef> in, out;
  std::size_t workspace_bytes = 0;
};

using KernelFn = void (*)(const KernelCall&);
using WorkspaceFn = std::size_t (*)(const void* args);  // bytes of scratch for these arguments

struct Kernel {
  Backend backend;
  std::string name;  // "softmax_fwd_bf16"
  KernelFn fn;
  WorkspaceFn workspace;  // may be null: no scratch
  const void* state;      // handed to fn as call.state
};

class KernelRegistry {
 public:
  static KernelRegistry& instance();

  // Throws kArgument when the name is taken or empty or fn is null.
  void add(Backend backend, const std::string& name, KernelFn fn, WorkspaceFn workspace = nullptr,
           const void* state = nullptr);

  // Throws kNoKernel with the name. The reference stays valid for the life of the process.
  const Kernel& find(Backend backend, std::string_view name) const;
  bool has(Backend backend, std::string_view name) const;
  std::vector<std::string> names(Backend backend) const;  // sorted

  KernelRegistry();
  ~KernelRegistry();
  KernelRegistry(const KernelRegistry&) = delete;
  KernelRegistry& operator=(const KernelRegistry&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// "<base>_<dtype>" on every backend, looked up once each and remembered. Made to be a static
// constant in an op's host file: constexpr KernelHandle kForward("softmax_fwd").
class KernelHandle {
 public:
  constexpr explicit KernelHandle(const char* base) : base_(base) {}

  // Has this backend such a kernel? Remembered where it has.
  bool exists(Backend backend, DType dtype) const;

  const Kernel& get(Backend backend, DType dtype) const {
    auto& slot = found_[static_cast<std::size_t>(backend)][static_cast<std::size_t>(dtype)];
    const Kernel* kernel = slot.load(std::memory_order_acquire);
    return kernel != nullptr ? *kernel : look_up(backend, dtype);
  }

 private:
  const Kernel& look_up(Backend backend, DType dtype) const;

  const char* base_;
  mutable std::array<std::array<std::atomic<const Kernel*>, kDTypeCount>, kBackendCount> found_{};
};

}  // namespace mlxtape
