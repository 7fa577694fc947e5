// CPU kernels of take (formula and layout: mlxtape/ops/take.h). Rows of y over threads, each copied from where its
// index says, past the cache where y is large. Bound by memory; rows of few elements by the latency of their
// lines, so they are asked for ahead.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/take/take.cpu.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <cstring>

#include "backends/cpu/device/places.h"
#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "take_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kMostRows = 1024;  // of a task
constexpr std::int64_t kAhead = 16;       // rows whose first line is asked for early
constexpr std::int64_t kWhole = 1 << 20;  // bytes of a row that one task copies at once

// bytes to out past the cache.
HWY_INLINE void stream(const unsigned char* from, unsigned char* out, std::size_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t past = reinterpret_cast<std::uintptr_t>(out) % 64;
  std::size_t i = std::min(bytes, past == 0 ? 0 : 64 - past);
  std::memcpy(out, from, i);
  const std::size_t lanes = hn::Lanes(d);
  for (; i + 4 * lanes <= bytes; i += 4 * lanes) {
    const auto a = hn::LoadU(d, from + i), b = hn::LoadU(d, from + i + lanes);
    const auto c = hn::LoadU(d, from + i + 2 * lanes), e = hn::LoadU(d, from + i + 3 * lanes);
    hn::Stream(a, d, out + i);
    hn::Stream(b, d, out + i + lanes);
    hn::Stream(c, d, out + i + 2 * lanes);
    hn::Stream(e, d, out + i + 3 * lanes);
  }
  std::memcpy(out + i, from + i, bytes - i);
}

// Rows [first, end) of y, counted over the outer axes: y [end − first, width] from x. One element to a row is a
// plain loop: a call of memcpy takes ten times as long.
template <class T>
void take_rows(const TakeArgs& a, const T* x, const std::uint64_t* named, std::int64_t first,
               std::int64_t end, std::int64_t lo, std::int64_t width, T* y, bool streams) {
  const auto length = static_cast<std::uint64_t>(a.length);
  const auto bytes = static_cast<std::size_t>(width) * sizeof(T);
  std::int64_t o = first / a.count, j = first % a.count;
  const auto place = [&](std::int64_t row, std::int64_t outer) {
    return x + outer * a.outer_stride + static_cast<std::int64_t>(named[row]) * a.axis_stride + lo;
  };
  for (std::int64_t r = first; r < end; ++r) {
    const std::int64_t i = r - first;
    if (r + kAhead < end && named[i + kAhead] < length) hwy::Prefetch(place(i + kAhead, o));
    T* to = y + r * a.width + lo;
    if (named[i] >= length) {
      std::memset(static_cast<void*>(to), 0, bytes);
    } else if (width == 1) {
      *to = *place(i, o);
    } else if (streams) {
      stream(reinterpret_cast<const unsigned char*>(place(i, o)),
             reinterpret_cast<unsigned char*>(to), bytes);
    } else {
      std::memcpy(to, place(i, o), bytes);
    }
    if (++j == a.count) {
      j = 0;
      ++o;
    }
  }
}

template <class T>
void take_fwd(const KernelCall& call) {
  const auto& a = call.as<TakeArgs>();
  const T* x = call.input<T>(0);
  const auto* indices = call.input<void>(1);
  T* y = call.output<T>(0);
  const std::int64_t rows = a.outer * a.count;
  const auto size = static_cast<std::int64_t>(sizeof(T));
  const std::int64_t row_bytes = a.width * size;
  // Few lines of y are whole where rows are short: those go the ordinary way.
  const bool streams = rows * row_bytes >= cpu::kStreamBytes && row_bytes >= 256;
  const std::int64_t each = std::clamp<std::int64_t>(cpu::kTaskBytes / row_bytes, 1, kMostRows);
  const std::int64_t cols = std::min(a.width, kWhole / size);
  const std::int64_t cuts = ceil_div(a.width, cols);
  parallel_for(ceil_div(rows, each) * cuts, [&](std::int64_t task) {
    HWY_ALIGN std::uint64_t named[kMostRows];
    const std::int64_t first = task / cuts * each, end = std::min(rows, first + each);
    const std::int64_t lo = task % cuts * cols;
    cpu::with_index_type(a.index_type, [&](auto zero) {
      const auto* from = static_cast<const decltype(zero)*>(indices);
      std::int64_t j = first % a.count;
      for (std::int64_t r = first; r < end; ++r) {
        named[r - first] = cpu::place_of(from[j], a.length);
        if (++j == a.count) j = 0;
      }
    });
    take_rows(a, x, named, first, end, lo, std::min(cols, a.width - lo), y, streams);
    if (streams) hwy::FlushStream();
  });
}

void take_places(const KernelCall& call) {
  const auto& a = call.as<TakePlacesArgs>();
  auto* places = call.output<std::int64_t>(0);
  constexpr std::int64_t kTask = 4096;
  parallel_for(ceil_div(a.count, kTask), [&](std::int64_t task) {
    const std::int64_t first = task * kTask, end = std::min(a.count, first + kTask);
    std::fill(places + first, places + end, 0);
    for (std::int64_t k = 0; k < a.axes; ++k) {
      const std::int64_t length = a.lengths[k];
      cpu::with_index_type(a.index_types[k], [&](auto zero) {
        const auto* from = call.input<decltype(zero)>(static_cast<std::size_t>(k));
        for (std::int64_t i = first; i < end; ++i) {
          const std::uint64_t p = cpu::place_of(from[i], length);
          const bool outside = p >= static_cast<std::uint64_t>(length) || places[i] == kTakeNowhere;
          places[i] = outside ? kTakeNowhere : places[i] * length + static_cast<std::int64_t>(p);
        }
      });
    }
  });
}

}  // namespace

void register_take(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "take_fwd_u8", take_fwd<std::uint8_t>);
  registry.add(Backend::kCpu, "take_fwd_u16", take_fwd<std::uint16_t>);
  registry.add(Backend::kCpu, "take_fwd_u32", take_fwd<std::uint32_t>);
  registry.add(Backend::kCpu, "take_fwd_u64", take_fwd<std::uint64_t>);
  registry.add(Backend::kCpu, "take_places_i64", take_places);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(take)
