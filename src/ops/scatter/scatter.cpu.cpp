// CPU kernels of scatter (formula and layout: mlxtape/ops/scatter.h). Tiles of columns of an outer position over threads; each
// walks along the axis, so that what comes later is written later. Bound by the lines of y that are touched.
#include <algorithm>
#include <cstdint>

#include "backends/cpu/device/places.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "scatter_args.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kTile = 1024;   // columns
constexpr std::int64_t kTask = 16384;  // elements

template <class T>
void scatter_put(const KernelCall& call) {
  const auto& a = call.as<ScatterArgs>();
  const T* values = call.input<T>(1);  // [outer, count, width]
  T* y = call.output<T>(0);            // [outer, length, width]
  const std::int64_t tiles = ceil_div(a.width, kTile);
  const std::int64_t work = a.count * std::min(a.width, kTile);
  const std::int64_t each = std::max<std::int64_t>(1, kTask / work);
  const std::int64_t all = a.outer * tiles;
  parallel_for(ceil_div(all, each), [&](std::int64_t task) {
    cpu::with_index_type(a.index_type, [&](auto zero) {
      const auto* indices = call.input<decltype(zero)>(0);
      for (std::int64_t t = task * each; t < std::min(all, (task + 1) * each); ++t) {
        const std::int64_t o = t / tiles, lo = t % tiles * kTile;
        const std::int64_t hi = std::min(a.width, lo + kTile);
        for (std::int64_t j = 0; j < a.count; ++j) {
          const std::int64_t row = (o * a.count + j) * a.width;
          for (std::int64_t i = lo; i < hi; ++i) {
            const std::uint64_t p = cpu::place_of(indices[row + i], a.length);
            if (p >= static_cast<std::uint64_t>(a.length)) continue;
            y[(o * a.length + static_cast<std::int64_t>(p)) * a.width + i] = values[row + i];
          }
        }
      }
    });
  });
}

}  // namespace

void register_scatter_cpu(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "scatter_put_u8", scatter_put<std::uint8_t>);
  registry.add(Backend::kCpu, "scatter_put_u16", scatter_put<std::uint16_t>);
  registry.add(Backend::kCpu, "scatter_put_u32", scatter_put<std::uint32_t>);
  registry.add(Backend::kCpu, "scatter_put_u64", scatter_put<std::uint64_t>);
}

}  // namespace mlxtape::ops
