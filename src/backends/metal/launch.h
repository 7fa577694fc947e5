// Launch: how an op's host half starts one of its kernels.
//
//   metal::Launch(call, metal::kernel<T>("softmax_fwd"))
//       .constant(0, true)                 // [[function_constant(0)]]
//       .buffers()                         // inputs, outputs, then the arguments, then the workspace at 0..
//       .groups(rows).threads(256).run();
//
// Whatever is launched knows what it reads and writes, which is what barriers are made from: all of the call's tensors and
// its workspace after buffers(), else what input and output name.
//
// Included by the host half of .metal files alone: the build defines MLXTAPE_METAL_TEXT as the name of the file's text.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include "backends/metal/library.h"
#include "backends/metal/machine.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::metal {

constexpr std::int64_t kSimd = 32;           // threads of a simdgroup
constexpr std::int64_t kMostThreads = 1024;  // of a group

// Which kernel of which text.
struct KernelName {
  const Text* text;
  const char* base;
  const char* suffix;  // null: base is all of the name
};

// Threads for a row whose threads take so many elements each: whole simdgroups.
inline std::int64_t row_threads(std::int64_t elements, std::int64_t each,
                                std::int64_t most = kMostThreads) {
  return std::min(most, ceil_div(ceil_div(elements, each), kSimd) * kSimd);
}

// May packs of 16 bytes be read here? A null pointer is never read.
inline bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
}

class Launch {
 public:
  Launch(const KernelCall& call, const KernelName& name);
  Launch(const KernelCall& call, const Pipeline& pipeline);  // which must live as long as graphs do

  Launch& constant(unsigned long index, bool value);
  Launch& constant(unsigned long index, std::int32_t value);
  Launch& constant(unsigned long index, std::uint32_t value);
  Launch& constant(unsigned long index, float value);

  Launch& buffers();
  // An address in one of the call's tensors or in its workspace, which then counts as touched; null binds nothing.
  Launch& input(unsigned long index, const void* address);
  Launch& output(unsigned long index, const void* address);
  template <class T>
  Launch& bytes(unsigned long index, const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kMostBytes);
    return raw_bytes(index, &value, sizeof value);
  }
  // The GPU's addresses of tensors, 8 bytes each, as the array of pointers that a struct of the constant space holds: for
  // more tensors than a kernel can have buffers. size: of that array, at most 512; what is left of it is null.
  Launch& table(unsigned long index, std::size_t size, std::span<void* const> inputs,
                std::span<void* const> outputs);

  Launch& group_memory(std::int64_t bytes);                                // [[threadgroup(0)]]
  Launch& groups(std::int64_t x, std::int64_t y = 1, std::int64_t z = 1);  // none: nothing runs
  Launch& threads(std::int64_t x, std::int64_t y = 1, std::int64_t z = 1);
  // The kernel adds first_group [[buffer(30)]] to its group's first coordinate: a launch that would take long is cut.
  Launch& in_parts();
  // Floating-point operations of the whole launch, where they and not memory take the time.
  Launch& operations(double count);
  // Bytes read and written, where they are not those of all that was bound.
  Launch& traffic(double bytes);

  // What the compiled kernel allows in a group, for kernels that take any number; after all constants.
  std::int64_t most_threads();

  void run();

 private:
  Launch& add_constant(unsigned long index, ConstantType type, std::uint32_t bits);
  Launch& raw_bytes(unsigned long index, const void* value, std::size_t size);
  Block& block_of(const Range& range) const;
  void bind(unsigned long index, const void* address, const Range& range,
            std::vector<Range>& touched);
  Range range_of(const void* address) const;
  const Pipeline& pipeline();

  const KernelCall& call_;
  const Target& target_;
  PipelineKey key_;
  Dispatch dispatch_;
  bool is_empty_ = false;
  double operations_ = 0;
  double traffic_ = -1;
};

#ifdef MLXTAPE_METAL_TEXT
namespace texts {
extern const Text MLXTAPE_METAL_TEXT;
}

// A kernel of this file's text: "softmax_fwd" for BF16 is softmax_fwd_bf16 there.
template <class T>
KernelName kernel(const char* base) {
  return {&texts::MLXTAPE_METAL_TEXT, base, name_of(kDType<T>)};
}
inline KernelName kernel(const char* name) { return {&texts::MLXTAPE_METAL_TEXT, name, nullptr}; }
#endif

}  // namespace mlxtape::metal
