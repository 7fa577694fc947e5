// Kernels that move memory (arguments: core/memory_kernels.h). A strided copy walks the target in
// order, so writes are contiguous; the innermost axis is a plain strided loop.
#include "core/memory_kernels.h"

#include <algorithm>
#include <cstring>

#include "mlxtape/base/checked.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

namespace mlxtape::ops {
void register_add_into_cpu(KernelRegistry& registry);  // add_into.cpp
}

namespace mlxtape::cpu {

namespace {

constexpr std::int64_t kTaskElements = 16384;
constexpr std::int64_t kTaskBytes = std::int64_t{1} << 20;

template <class T>
void copy(const KernelCall& call) {
  const auto& args = call.as<CopyArgs>();
  const T* from = call.input<T>(0);
  T* to = call.output<T>(0);
  const std::int64_t last = args.rank - 1;  // a tensor of rank 0 is contiguous: it never comes here
  const std::int64_t run = args.shape[last];
  const std::int64_t step = args.strides[last];
  std::int64_t runs = 1;
  for (std::int64_t i = 0; i < last; ++i) runs *= args.shape[i];

  const std::int64_t runs_per_task =
      std::max<std::int64_t>(1, kTaskElements / std::max<std::int64_t>(run, 1));
  parallel_for(ceil_div(runs, runs_per_task), [&](std::int64_t task) {
    const std::int64_t end = std::min(runs, (task + 1) * runs_per_task);
    for (std::int64_t r = task * runs_per_task; r < end; ++r) {
      std::int64_t rest = r;
      const T* source = from;
      for (std::int64_t i = last - 1; i >= 0; --i) {
        source += rest % args.shape[i] * args.strides[i];
        rest /= args.shape[i];
      }
      T* target = to + r * run;
      for (std::int64_t i = 0; i < run; ++i) target[i] = source[i * step];
    }
  });
}

// body(first byte, bytes) for each piece.
template <class Body>
void in_pieces(const KernelCall& call, const Body& body) {
  const auto bytes = static_cast<std::int64_t>(call.as<BytesArgs>().bytes);
  parallel_for(ceil_div(bytes, kTaskBytes), [&](std::int64_t task) {
    const std::int64_t first = task * kTaskBytes;
    body(first, static_cast<std::size_t>(std::min(kTaskBytes, bytes - first)));
  });
}

void zero(const KernelCall& call) {
  in_pieces(call, [to = call.output<char>(0)](std::int64_t first, std::size_t n) {
    std::memset(to + first, 0, n);
  });
}

void move(const KernelCall& call) {
  in_pieces(call,
            [from = call.input<char>(0), to = call.output<char>(0)](
                std::int64_t first, std::size_t n) { std::memmove(to + first, from + first, n); });
}

template <class T>
void fill(const KernelCall& call) {
  const auto& args = call.as<FillArgs>();
  T* to = call.output<T>(0);
  parallel_for(ceil_div(args.size, kTaskElements), [&](std::int64_t task) {
    const std::int64_t first = task * kTaskElements;
    std::fill(to + first, to + std::min(args.size, first + kTaskElements),
              static_cast<T>(args.bits));
  });
}

}  // namespace

void register_memory_kernels(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "zero_u8", zero);
  registry.add(Backend::kCpu, "move_u8", move);
  registry.add(Backend::kCpu, "copy_u8", copy<std::uint8_t>);
  registry.add(Backend::kCpu, "copy_u16", copy<std::uint16_t>);
  registry.add(Backend::kCpu, "copy_u32", copy<std::uint32_t>);
  registry.add(Backend::kCpu, "copy_u64", copy<std::uint64_t>);
  registry.add(Backend::kCpu, "fill_u8", fill<std::uint8_t>);
  registry.add(Backend::kCpu, "fill_u16", fill<std::uint16_t>);
  registry.add(Backend::kCpu, "fill_u32", fill<std::uint32_t>);
  registry.add(Backend::kCpu, "fill_u64", fill<std::uint64_t>);
  ops::register_add_into_cpu(registry);
}

}  // namespace mlxtape::cpu
