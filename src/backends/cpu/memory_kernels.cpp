// Kernels that move memory (arguments: core/memory_kernels.h). A strided copy walks the target in
// order, so writes are contiguous, or in squares where the source is contiguous along another axis.
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

// Where an outer position lies in both tensors; axes [0, count) but skip.
struct Origin {
  std::int64_t from = 0, to = 0;
  Origin(const CopyArgs& args, std::int64_t count, std::int64_t skip, std::int64_t position) {
    for (std::int64_t i = count - 1; i >= 0; --i) {
      if (i == skip) continue;
      from += position % args.shape[i] * args.from[i];
      to += position % args.shape[i] * args.to[i];
      position /= args.shape[i];
    }
  }
};

// The axis that the source is contiguous along, if that is not the last; -1: none.
std::int64_t source_axis(const CopyArgs& args) {
  if (args.from[args.rank - 1] == 1) return -1;
  for (std::int64_t i = 0; i < args.rank - 1; ++i) {
    if (args.from[i] == 1) return i;
  }
  return -1;
}

// Squares of kTile x kTile: read along one axis, written along the other, both from the first-level cache.
template <class T>
void copy_tiles(const CopyArgs& args, std::int64_t a, const T* from, T* to) {
  constexpr std::int64_t kTile = 32;
  const std::int64_t b = args.rank - 1;
  std::int64_t outer = 1;
  for (std::int64_t i = 0; i < b; ++i) outer *= i == a ? 1 : args.shape[i];
  const std::int64_t strips = ceil_div(args.shape[a], kTile);
  parallel_for(outer * strips, [&](std::int64_t task) {
    const Origin origin(args, b, a, task / strips);
    const std::int64_t first = task % strips * kTile;
    const std::int64_t height = std::min(kTile, args.shape[a] - first);
    const std::int64_t from_b = args.from[b], to_a = args.to[a], to_b = args.to[b];
    for (std::int64_t c = 0; c < args.shape[b]; c += kTile) {
      const std::int64_t width = std::min(kTile, args.shape[b] - c);
      const T* source = from + origin.from + first + c * from_b;
      T* target = to + origin.to + first * to_a + c * to_b;
      if (height == kTile && width == kTile && to_b == 1) {
        T tile[kTile][kTile];
        for (std::int64_t j = 0; j < kTile; ++j) {
          for (std::int64_t i = 0; i < kTile; ++i) tile[i][j] = source[j * from_b + i];
        }
        for (std::int64_t i = 0; i < kTile; ++i) {
          std::memcpy(target + i * to_a, tile[i], sizeof(tile[i]));
        }
        continue;
      }
      for (std::int64_t i = 0; i < height; ++i) {
        for (std::int64_t j = 0; j < width; ++j) {
          target[i * to_a + j * to_b] = source[j * from_b + i];
        }
      }
    }
  });
}

template <class T>
void copy(const KernelCall& call) {
  const auto& args = call.as<CopyArgs>();
  const T* from = call.input<T>(0);
  T* to = call.output<T>(0);
  if (args.rank == 0) {
    *to = *from;
    return;
  }
  if (const std::int64_t axis = source_axis(args); axis >= 0) {
    return copy_tiles(args, axis, from, to);
  }
  const std::int64_t last = args.rank - 1;
  const std::int64_t from_step = args.from[last], to_step = args.to[last];
  std::int64_t runs = 1;
  for (std::int64_t i = 0; i < last; ++i) runs *= args.shape[i];
  // A long run is cut into pieces, short ones are taken together.
  const std::int64_t piece = std::min(args.shape[last], kTaskElements);
  const std::int64_t pieces = ceil_div(args.shape[last], piece);
  const std::int64_t each = std::max<std::int64_t>(1, kTaskElements / piece);
  const std::int64_t all = runs * pieces;
  parallel_for(ceil_div(all, each), [&](std::int64_t task) {
    for (std::int64_t r = task * each; r < std::min(all, (task + 1) * each); ++r) {
      const Origin origin(args, last, -1, r / pieces);
      const std::int64_t first = r % pieces * piece;
      const std::int64_t count = std::min(piece, args.shape[last] - first);
      const T* source = from + origin.from + first * from_step;
      T* target = to + origin.to + first * to_step;
      if (from_step == 1 && to_step == 1) {
        std::memcpy(target, source, static_cast<std::size_t>(count) * sizeof(T));
      } else if (from_step == 0 && to_step == 1) {
        std::fill(target, target + count, *source);
      } else {
        for (std::int64_t i = 0; i < count; ++i) target[i * to_step] = source[i * from_step];
      }
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
