// CPU kernels of sum_rows (formula and layout: mlxtape/ops/sum_rows.h). Chunks of sorted positions over threads, wide
// rows also cut into tiles of columns. All terms of one row of y that a chunk has are added vector by vector and
// written once, past the cache where y is large; a sum that other chunks have a share in goes to scratch memory as f32, and
// whoever has its beginning adds the shares up. Bound by memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sum_rows/sum_rows.cpu.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <cstring>

#include "backends/cpu/device/places.h"
#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "sum_rows_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kCols = 4096;  // of a tile

void sum_rows_places(const KernelCall& call) {
  const auto& a = call.as<SumRowsPlacesArgs>();
  auto* places = call.output<std::int32_t>(0);
  constexpr std::int64_t kTask = 16384;
  parallel_for(ceil_div(a.count, kTask), [&](std::int64_t task) {
    cpu::with_index_type(a.index_type, [&](auto zero) {
      const auto* indices = call.input<decltype(zero)>(0);
      for (std::int64_t i = task * kTask; i < std::min(a.count, (task + 1) * kTask); ++i) {
        const std::uint64_t p = cpu::place_of(indices[i], a.rows);
        places[i] =
            p < static_cast<std::uint64_t>(a.rows) ? static_cast<std::int32_t>(p) : kSumRowsNowhere;
      }
    });
  });
}

void sum_rows_keys(const KernelCall& call) {
  const auto& a = call.as<SumRowsKeysArgs>();
  const auto* places = call.input<std::int32_t>(0);
  const auto* order = call.input<std::uint32_t>(1);
  auto* keys = call.output<std::int32_t>(0);
  constexpr std::int64_t kTask = 16384;
  parallel_for(ceil_div(a.count, kTask), [&](std::int64_t task) {
    for (std::int64_t i = task * kTask; i < std::min(a.count, (task + 1) * kTask); ++i) {
      keys[i] = places[order[i]];
    }
  });
  if (a.slots == 0) return;
  auto* slots = call.output<std::int32_t>(1);
  auto* ids = call.output<std::int32_t>(2);
  std::int32_t slot = -1;
  for (std::int64_t i = 0; i < a.count; ++i) {
    if (keys[i] != kSumRowsNowhere && (i == 0 || keys[i] != keys[i - 1])) ids[++slot] = keys[i];
    slots[i] = slot;
  }
  std::fill(ids + slot + 1, ids + a.slots, -1);
}

// What all chunks know.
template <class T>
struct Sums {
  const SumRowsArgs& a;
  const T* terms;              // [outer, count, width]
  const std::int32_t* keys;    // [count]
  const std::uint32_t* order;  // [count]
  const std::int32_t* slots;   // [count] or null
  float*
      partials;  // [outer, chunks, 2, width]: of a row that came from the chunk before, of one that goes on
  std::int64_t chunks() const { return ceil_div(a.count, kSumRowsChunk); }
  float* partial(std::int64_t o, std::int64_t chunk, int which) const {
    return partials + ((o * chunks() + chunk) * 2 + which) * a.width;
  }
  std::int64_t row_at(std::int64_t i) const { return slots != nullptr ? slots[i] : keys[i]; }
};

// out[i] = Σ_k rows[k][i] for n columns, plus what out has. The rows of one sum are added in order.
template <bool kStream, class T, class Out>
HWY_INLINE void sum_to(const T* const* rows, std::int64_t count, std::int64_t n, Out* out,
                       bool adds) {
  const DF d;
  const auto whole = [&](std::size_t i) HWY_ATTR {
    VF sum = load(d, rows[0] + i);
    for (std::int64_t k = 1; k < count; ++k) sum = hn::Add(sum, load(d, rows[k] + i));
    return adds ? hn::Add(load(d, out + i), sum) : sum;
  };
  const auto part = [&](std::size_t i, std::size_t some) HWY_ATTR {
    VF sum = load_n(d, rows[0] + i, some);
    for (std::int64_t k = 1; k < count; ++k) sum = hn::Add(sum, load_n(d, rows[k] + i, some));
    return adds ? hn::Add(load_n(d, out + i, some), sum) : sum;
  };
  write_row<kStream>(d, out, static_cast<std::size_t>(n), whole, part);
}

// What one chunk has where rows are one element: the terms are fetched first, for each waits for memory.
template <class T, class Out>
void sum_scalars(const Sums<T>& s, std::int64_t o, std::int64_t chunk, Out* y) {
  const std::int64_t count = s.a.count;
  const std::int64_t first = chunk * kSumRowsChunk, end = std::min(count, first + kSumRowsChunk);
  const T* terms = s.terms + o * count;
  float v[kSumRowsChunk];
  for (std::int64_t i = first; i < end; ++i) v[i - first] = static_cast<float>(terms[s.order[i]]);
  for (std::int64_t i = first, next; i < end; i = next) {
    const std::int32_t key = s.keys[i];
    if (key == kSumRowsNowhere) return;
    float sum = v[i - first];
    for (next = i + 1; next < end && s.keys[next] == key; ++next) sum += v[next - first];
    const bool begins = i > first || i == 0 || s.keys[i - 1] != key;
    const bool ends = next < end || next == count || s.keys[next] != key;
    if (!begins || !ends) {
      *s.partial(o, chunk, begins ? 1 : 0) = sum;
      continue;
    }
    Out& to = y[o * s.a.rows + s.row_at(i)];
    to = static_cast<Out>(s.a.adds != 0 ? static_cast<float>(to) + sum : sum);
  }
}

// Columns [lo, lo + n) of what one chunk has.
template <bool kStream, class T, class Out>
void sum_chunk(const Sums<T>& s, std::int64_t o, std::int64_t chunk, std::int64_t lo,
               std::int64_t n, Out* y) {
  const std::int64_t count = s.a.count, width = s.a.width;
  const std::int64_t first = chunk * kSumRowsChunk, end = std::min(count, first + kSumRowsChunk);
  const T* rows[kSumRowsChunk];
  for (std::int64_t i = first, next; i < end; i = next) {
    const std::int32_t key = s.keys[i];
    if (key == kSumRowsNowhere) return;
    for (next = i; next < end && s.keys[next] == key; ++next) {
      rows[next - i] = s.terms + (o * count + s.order[next]) * width + lo;
    }
    const bool begins = i > first || i == 0 || s.keys[i - 1] != key;
    const bool ends = next < end || next == count || s.keys[next] != key;
    if (begins && ends) {
      sum_to<kStream>(rows, next - i, n, y + (o * s.a.rows + s.row_at(i)) * width + lo,
                      s.a.adds != 0);
    } else {
      sum_to<false>(rows, next - i, n, s.partial(o, chunk, begins ? 1 : 0) + lo, false);
    }
  }
}

// The row that begins in this chunk and goes on, if there is one.
template <class T, class Out>
void sum_crossing(const Sums<T>& s, std::int64_t o, std::int64_t chunk, std::int64_t lo,
                  std::int64_t n, Out* y) {
  const std::int64_t count = s.a.count;
  const std::int64_t first = chunk * kSumRowsChunk, end = first + kSumRowsChunk;
  if (end >= count) return;
  const std::int32_t key = s.keys[end - 1];
  if (key == kSumRowsNowhere || s.keys[end] != key) return;
  if (s.keys[first] == key && first > 0 && s.keys[first - 1] == key) return;
  float* sum = s.partial(o, chunk, 1) + lo;
  const DF d;
  for (std::int64_t at = end; at < count && s.keys[at] == key; at += kSumRowsChunk) {
    const float* more = s.partial(o, at / kSumRowsChunk, 0) + lo;
    for_row(
        d, static_cast<std::size_t>(n),
        [&](std::size_t i)
            HWY_ATTR { store(d, hn::Add(load(d, sum + i), load(d, more + i)), sum + i); },
        [&](std::size_t i, std::size_t some) HWY_ATTR {
          store_n(d, hn::Add(load_n(d, sum + i, some), load_n(d, more + i, some)), sum + i, some);
        });
  }
  const float* const rows[] = {sum};
  sum_to<false>(rows, 1, n, y + (o * s.a.rows + s.row_at(end - 1)) * s.a.width + lo, s.a.adds != 0);
}

template <class T, class Out>
void sum_all(const KernelCall& call) {
  const auto& a = call.as<SumRowsArgs>();
  const Sums<T> s{a,
                  call.input<T>(0),
                  call.input<std::int32_t>(1),
                  call.input<std::uint32_t>(2),
                  a.by_slot != 0 ? call.input<std::int32_t>(3) : nullptr,
                  static_cast<float*>(call.workspace)};
  const auto* ids = call.input<std::int32_t>(4);
  Out* y = call.output<Out>(0);
  const std::int64_t cols = std::min(a.width, kCols);
  const std::int64_t tiles = ceil_div(a.width, cols);
  const std::int64_t chunk_bytes = kSumRowsChunk * cols * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t each = std::max<std::int64_t>(1, cpu::kTaskBytes / chunk_bytes);
  const std::int64_t groups = ceil_div(s.chunks(), each);
  // What y gets, not what it is: a dense y is mostly zeros that were there before.
  const bool streams =
      a.adds == 0 && cols >= 256 &&
      std::min(a.count, a.rows) * a.outer * a.width * static_cast<std::int64_t>(sizeof(Out)) >=
          cpu::kStreamBytes;
  const auto for_chunks = [&](std::int64_t task, const auto& body) HWY_ATTR {
    const std::int64_t lo = task % tiles * cols, n = std::min(cols, a.width - lo);
    const std::int64_t group = task / tiles % groups, o = task / tiles / groups;
    for (std::int64_t c = group * each; c < std::min(s.chunks(), (group + 1) * each); ++c) {
      body(o, c, lo, n);
    }
  };
  parallel_for(a.outer * groups * tiles, [&](std::int64_t task) {
    for_chunks(task, [&](std::int64_t o, std::int64_t c, std::int64_t lo, std::int64_t n) HWY_ATTR {
      if (a.width == 1) {
        sum_scalars(s, o, c, y);
      } else {
        streams ? sum_chunk<true>(s, o, c, lo, n, y) : sum_chunk<false>(s, o, c, lo, n, y);
      }
      if (a.by_slot == 0) return;
      for (std::int64_t u = c * kSumRowsChunk; u < std::min(a.rows, (c + 1) * kSumRowsChunk); ++u) {
        if (ids[u] < 0) std::fill_n(y + u * a.width + lo, n, Out{});
      }
    });
    if (streams) hwy::FlushStream();
  });
  parallel_for(a.outer * groups * tiles, [&](std::int64_t task) {
    for_chunks(task, [&](std::int64_t o, std::int64_t c, std::int64_t lo, std::int64_t n)
                         HWY_ATTR { sum_crossing(s, o, c, lo, n, y); });
  });
}

std::size_t sum_rows_workspace(const void* args) {
  const auto& a = *static_cast<const SumRowsArgs*>(args);
  return static_cast<std::size_t>(a.outer * ceil_div(a.count, kSumRowsChunk) * 2 * a.width) *
         sizeof(float);
}

template <class T>
void sum_rows_fwd(const KernelCall& call) {
  call.as<SumRowsArgs>().f32_sums != 0 ? sum_all<T, float>(call) : sum_all<T, T>(call);
}

template <class T, class R>
void add_all_rows(const KernelCall& call) {
  const auto& a = call.as<SumRowsAddArgs>();
  const auto* ids = call.input<std::int32_t>(0);
  const R* rows = call.input<R>(1);
  T* dense = call.output<T>(0);
  const std::int64_t each = cpu::rows_per_task(a.width * static_cast<std::int64_t>(sizeof(T)));
  parallel_for(ceil_div(a.count, each), [&](std::int64_t task) {
    for (std::int64_t u = task * each; u < std::min(a.count, (task + 1) * each); ++u) {
      const R* const row[] = {rows + u * a.width};
      if (ids[u] < 0 || ids[u] >= a.rows) continue;
      sum_to<false>(row, 1, a.width, dense + ids[u] * a.width, true);
    }
  });
}

template <class T>
void sum_rows_add(const KernelCall& call) {
  switch (static_cast<DType>(call.as<SumRowsAddArgs>().from)) {
    case DType::kF16: return add_all_rows<T, F16>(call);
    case DType::kBF16: return add_all_rows<T, BF16>(call);
    default: return add_all_rows<T, float>(call);
  }
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "sum_rows_fwd_" + type, sum_rows_fwd<T>, sum_rows_workspace);
  registry.add(Backend::kCpu, "sum_rows_add_" + type, sum_rows_add<T>);
}

}  // namespace

void register_sum_rows(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "sum_rows_places_i32", sum_rows_places);
  registry.add(Backend::kCpu, "sum_rows_keys_i32", sum_rows_keys);
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(sum_rows)
