// CPU kernels of scan (formula: mlxtape/ops/scan.h). Bound by memory.
//
// A strip is a row, or some neighbouring columns where the axis is not the last. Where there are many
// strips, each is one task and read once. Where there are few, they are cut into pieces, and kGroup pieces at a time
// are first summed and then scanned, so that the second read finds them in the cache. Pieces are joined in
// their order: which thread has which does not matter.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/scan/scan.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "scan_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kTile = 512;  // columns at most: their sums stay in the first-level cache
constexpr std::int64_t kLeastTile =
    128;                                 // at least, if there are as many: lines next to each other
constexpr std::int64_t kPiece = 16384;   // elements
constexpr std::int64_t kGroup = 16;      // pieces of strips: 1 MiB of f32
constexpr std::int64_t kFewStrips = 16;  // fewer are cut
constexpr std::size_t kMostVectors = 4;  // of columns whose sums stay in registers

// ---- how the work is cut: by shape alone ----

struct Cut {
  std::int64_t tile, tiles;  // columns of a strip, and strips side by side
  std::int64_t each, pieces,
      group;  // each: positions along the axis; group: pieces worked on at once
};
Cut cut_of(const ScanArgs& a) {
  const std::int64_t share = a.outer * a.inner / (2 * kFewStrips) / kLeastTile * kLeastTile;
  const std::int64_t tile = std::clamp(share, kLeastTile, kTile);
  const std::int64_t tiles = ceil_div(a.inner, tile);
  const std::int64_t each = std::max<std::int64_t>(1, kPiece / std::min(a.inner, tile));
  if (a.outer * tiles >= kFewStrips || a.count < 2 * each) return {tile, tiles, a.count, 1, 1};
  return {tile, tiles, each, ceil_div(a.count, each), ceil_div(kGroup, tiles)};
}

// Each piece's sum, [group, inner], and the sum of all pieces before, [inner].
std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const ScanArgs*>(args);
  const Cut cut = cut_of(a);
  return cut.pieces == 1 ? 0 : static_cast<std::size_t>((cut.group + 1) * a.inner) * sizeof(float);
}

// ---- rows ----

// The sums of lanes 0 to i in lane i: in blocks of four lanes, then with the last lanes of the blocks before.
struct Running {
  static constexpr std::size_t kLanes = hn::MaxLanes(DF());
  using Places = decltype(hn::IndicesFromVec(DF(), hn::Zero(DI())));
  Places one_before, two_before, last;

  static HWY_INLINE Places places(int below) {  // of a block's first lane, less below
    const DI di;
    const auto block = hn::AndNot(hn::Set(di, 3), hn::Iota(di, 0));
    return hn::IndicesFromVec(DF(), hn::Max(hn::Sub(block, hn::Set(di, below)), hn::Zero(di)));
  }
  HWY_INLINE Running()
      : one_before(places(1)),
        two_before(places(5)),
        last(hn::IndicesFromVec(DF(), hn::Set(DI(), static_cast<int>(kLanes) - 1))) {}

  HWY_INLINE VF sums(VF v) const {
    const DF d;
    v = hn::Add(v, hn::ShiftLeftLanes<1>(d, v));
    v = hn::Add(v, hn::ShiftLeftLanes<2>(d, v));
    if constexpr (kLanes >= 8) {
      const auto from = hn::TableLookupLanes(v, one_before);
      v = hn::Add(v, hn::IfThenZeroElse(hn::FirstN(d, 4), from));
    }
    if constexpr (kLanes >= 16) {
      const auto from = hn::TableLookupLanes(v, two_before);
      v = hn::Add(v, hn::IfThenZeroElse(hn::FirstN(d, 8), from));
    }
    return v;
  }
  HWY_INLINE VF last_of(VF v) const { return hn::TableLookupLanes(v, last); }
};

// Of a piece that another follows: kPiece elements.
template <class T>
HWY_INLINE float sum_piece(DF d, const T* x) {
  static_assert(kPiece % (2 * hn::MaxLanes(DF())) == 0);
  VF a = hn::Zero(d), b = hn::Zero(d);
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t i = 0; i < kPiece; i += 2 * lanes) {
    a = hn::Add(a, load(d, x + i));
    b = hn::Add(b, load(d, x + i + lanes));
  }
  return sum_lanes(d, hn::Add(a, b));
}

// In the direction kBack the last element comes first; vectors are turned round when loaded and stored.
template <bool kStream, bool kBack, class T>
HWY_INLINE void scan_row(DF d, const T* x, T* y, std::size_t n, float before) {
  const std::size_t lanes = hn::Lanes(d);
  const auto turned = [](VF v) HWY_ATTR {
    if constexpr (kBack) {
      return hn::Reverse(DF(), v);
    } else {
      return v;
    }
  };
  const Running running;
  VF sum = hn::Set(d, before);
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const std::size_t at = kBack ? n - i - 2 * lanes : i;
    const VF low = load(d, x + at), high = load(d, x + at + lanes);
    const VF a = running.sums(turned(kBack ? high : low));
    const VF b = running.sums(turned(kBack ? low : high));
    const VF first = turned(hn::Add(sum, a));
    sum = hn::Add(sum, running.last_of(a));
    const VF second = turned(hn::Add(sum, b));
    sum = hn::Add(sum, running.last_of(b));
    store2<kStream>(d, kBack ? second : first, kBack ? first : second, y + at);
  }
  for (std::size_t count; i < n; i += count) {
    count = std::min(lanes, n - i);
    const std::size_t at = kBack ? n - i - count : i;
    // Turned round, the lanes that are not there come first, as zeros.
    const VF a = running.sums(turned(load_n(d, x + at, count)));
    store_n(d, turned(hn::Add(sum, a)), y + at, count);
    sum = hn::Add(sum, running.last_of(a));
  }
}

// An exclusive sum is the inclusive one of the element before: the first is what came before the row.
template <bool kStream, class T>
HWY_INLINE void scan_piece_of_row(const ScanArgs& args, const T* x, T* y, std::int64_t n,
                                  float before) {
  const DF d;
  auto count = static_cast<std::size_t>(n);
  const bool back = args.reverse != 0;
  if (args.exclusive != 0) {
    y[back ? n - 1 : 0] = static_cast<T>(before);
    --count;
    if (back) {
      ++x;
    } else {
      ++y;
    }
  }
  const auto* line = back ? y + count : y;
  const bool aligned = reinterpret_cast<std::uintptr_t>(line) % 64 == 0;
  if (kStream && aligned) {
    back ? scan_row<true, true>(d, x, y, count, before)
         : scan_row<true, false>(d, x, y, count, before);
  } else {
    back ? scan_row<false, true>(d, x, y, count, before)
         : scan_row<false, false>(d, x, y, count, before);
  }
}

// ---- columns ----

// width columns of n rows, step elements apart (below 0: the last row first); sum [width] is what came before
// and becomes what comes after. kWrite: also y; kStream: past the cache.
template <bool kWrite, bool kStream, class T>
HWY_INLINE void scan_wide(DF d, const T* x, T* y, std::int64_t n, std::int64_t step,
                          std::size_t width, bool exclusive, float* sum) {
  const std::size_t lanes = hn::Lanes(d);
  for (std::int64_t r = 0; r < n; ++r, x += step, y += kWrite ? step : 0) {
    std::size_t i = 0;
    for (; i + 2 * lanes <= width; i += 2 * lanes) {
      const VF a = hn::LoadU(d, sum + i), b = hn::LoadU(d, sum + i + lanes);
      const VF after_a = hn::Add(a, load(d, x + i));
      const VF after_b = hn::Add(b, load(d, x + i + lanes));
      if constexpr (kWrite) {
        store2<kStream>(d, exclusive ? a : after_a, exclusive ? b : after_b, y + i);
      }
      hn::StoreU(after_a, d, sum + i);
      hn::StoreU(after_b, d, sum + i + lanes);
    }
    for (std::size_t count; i < width; i += count) {
      count = std::min(lanes, width - i);
      const VF before = load_n(d, sum + i, count);
      const VF after = hn::Add(before, load_n(d, x + i, count));
      if constexpr (kWrite) store_n(d, exclusive ? before : after, y + i, count);
      store_n(d, after, sum + i, count);
    }
  }
}

// The same for kVectors vectors, of which the last has count lanes: the sums stay in registers.
template <bool kWrite, bool kStream, int kVectors, class T>
HWY_INLINE void scan_narrow(DF d, const T* x, T* y, std::int64_t n, std::int64_t step,
                            std::size_t count, bool exclusive, float* sum) {
  const std::size_t lanes = hn::Lanes(d);
  constexpr std::size_t kLast = kVectors - 1;
  VF all[kVectors], out[kVectors];
  for (std::size_t v = 0; v < kLast; ++v) all[v] = hn::LoadU(d, sum + v * lanes);
  all[kLast] = load_n(d, sum + kLast * lanes, count);
  const bool is_whole = count == lanes;
  for (std::int64_t r = 0; r < n; ++r, x += step, y += kWrite ? step : 0) {
    for (std::size_t v = 0; v <= kLast; ++v) {
      const T* from = x + v * lanes;
      const VF before = all[v];
      all[v] = hn::Add(before, v < kLast || is_whole ? load(d, from) : load_n(d, from, count));
      out[v] = exclusive ? before : all[v];
    }
    if constexpr (kWrite) {
      for (std::size_t v = 0; v + 1 < kLast; v += 2) {
        store2<kStream>(d, out[v], out[v + 1], y + v * lanes);
      }
      T* to = y + kLast * lanes;
      if constexpr (kVectors % 2 == 0) {
        if (is_whole) {
          store2<kStream>(d, out[kLast - 1], out[kLast], to - lanes);
          continue;
        }
        store(d, out[kLast - 1], to - lanes);
      }
      is_whole ? store(d, out[kLast], to) : store_n(d, out[kLast], to, count);
    }
  }
  for (std::size_t v = 0; v < kLast; ++v) hn::StoreU(all[v], d, sum + v * lanes);
  store_n(d, all[kLast], sum + kLast * lanes, count);
}

template <bool kWrite, bool kStream, class T>
void scan_columns(const T* x, T* y, std::int64_t n, std::int64_t step, std::size_t width,
                  bool exclusive, float* sum) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t vectors = (width + lanes - 1) / lanes;
  const auto narrow_by = [&](auto count) HWY_ATTR {
    scan_narrow<kWrite, kStream, count()>(d, x, y, n, step, width - (vectors - 1) * lanes,
                                          exclusive, sum);
  };
  static_assert(kMostVectors == 4);
  switch (vectors) {
    case 1: return narrow_by(std::integral_constant<int, 1>());
    case 2: return narrow_by(std::integral_constant<int, 2>());
    case 3: return narrow_by(std::integral_constant<int, 3>());
    case 4: return narrow_by(std::integral_constant<int, 4>());
    default: scan_wide<kWrite, kStream>(d, x, y, n, step, width, exclusive, sum);
  }
}

// ---- strips ----

// Piece p of a strip: where it starts in memory, counted from the strip's first element, and how long it is.
struct Range {
  std::int64_t first, n;
};
Range range_of(const ScanArgs& a, const Cut& cut, std::int64_t p) {
  const std::int64_t n = std::min(cut.each, a.count - p * cut.each);
  return {a.reverse != 0 ? a.count - p * cut.each - n : p * cut.each, n};
}

template <class T>
struct Strips {
  const ScanArgs& args;
  const Cut cut;
  const T* x;
  T* y;
  bool stream;

  std::size_t width_of(std::int64_t tile) const {
    return static_cast<std::size_t>(std::min(cut.tile, args.inner - tile * cut.tile));
  }

  // The columns of a tile, of piece p, summed into sum; with kWrite also scanned.
  template <bool kWrite>
  void columns(std::int64_t outer, std::int64_t tile, std::int64_t p, float* sum) const {
    const Range range = range_of(args, cut, p);
    const bool back = args.reverse != 0;
    const std::int64_t row = outer * args.count + range.first + (back ? range.n - 1 : 0);
    const std::int64_t at = row * args.inner + tile * cut.tile;
    const auto run = [&](auto past_cache) {
      scan_columns<kWrite, past_cache()>(x + at, kWrite ? y + at : y, range.n,
                                         back ? -args.inner : args.inner, width_of(tile),
                                         args.exclusive != 0, sum);
    };
    // Every row of the strip must begin a line.
    const bool aligned = reinterpret_cast<std::uintptr_t>(y + at) % 64 == 0 &&
                         args.inner * static_cast<std::int64_t>(sizeof(T)) % 64 == 0;
    if (kWrite && stream && aligned) {
      run(std::true_type());
    } else {
      run(std::false_type());
    }
  }
  float sum_of_row(std::int64_t outer, std::int64_t p) const {
    return sum_piece(DF(), x + outer * args.count + range_of(args, cut, p).first);
  }
  void row(std::int64_t outer, std::int64_t p, float before) const {
    const Range range = range_of(args, cut, p);
    const std::int64_t at = outer * args.count + range.first;
    stream ? scan_piece_of_row<true>(args, x + at, y + at, range.n, before)
           : scan_piece_of_row<false>(args, x + at, y + at, range.n, before);
  }

  void whole() const {
    const std::int64_t strips = args.outer * cut.tiles;
    const std::int64_t strip_bytes =
        2 * args.count * std::min(args.inner, cut.tile) * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t each = cpu::rows_per_task(strip_bytes);
    parallel_for(ceil_div(strips, each), [&](std::int64_t task) {
      for (std::int64_t s = task * each; s < std::min(strips, (task + 1) * each); ++s) {
        if (args.inner == 1) {
          row(s, 0, 0);
          continue;
        }
        float* sum = cpu::thread_scratch(cut.tile);
        std::fill(sum, sum + cut.tile, 0.0F);
        columns<true>(s / cut.tiles, s % cut.tiles, 0, sum);
      }
      hwy::FlushStream();
    });
  }

  void in_pieces(float* sums) const {
    float* before = sums + cut.group * args.inner;  // [inner]
    for (std::int64_t outer = 0; outer < args.outer; ++outer) {
      std::fill(before, before + args.inner, 0.0F);
      for (std::int64_t first = 0; first < cut.pieces; first += cut.group) {
        const std::int64_t tasks = std::min(cut.group, cut.pieces - first) * cut.tiles;
        const auto sum_of = [&](std::int64_t task) {
          return sums + task / cut.tiles * args.inner + task % cut.tiles * cut.tile;
        };
        parallel_for(tasks, [&](std::int64_t task) {
          float* sum = sum_of(task);
          const std::int64_t p = first + task / cut.tiles, tile = task % cut.tiles;
          std::fill(sum, sum + width_of(tile), 0.0F);
          if (p + 1 == cut.pieces) return;  // nobody asks for the sum of the last
          if (args.inner == 1) {
            *sum = sum_of_row(outer, p);
          } else {
            columns<false>(outer, tile, p, sum);
          }
        });
        for (std::int64_t p = 0; p < tasks / cut.tiles; ++p) {
          for (std::int64_t i = 0; i < args.inner; ++i) {
            before[i] += std::exchange(sums[p * args.inner + i], before[i]);
          }
        }
        parallel_for(tasks, [&](std::int64_t task) {
          float* sum = sum_of(task);
          const std::int64_t p = first + task / cut.tiles, tile = task % cut.tiles;
          args.inner == 1 ? row(outer, p, *sum) : columns<true>(outer, tile, p, sum);
          hwy::FlushStream();
        });
      }
    }
  }
};

template <class T>
void cumsum_fwd(const KernelCall& call) {
  const auto& args = call.as<ScanArgs>();
  const std::int64_t bytes =
      args.outer * args.count * args.inner * static_cast<std::int64_t>(sizeof(T));
  const Strips<T> strips{args, cut_of(args), call.input<T>(0), call.output<T>(0),
                         bytes >= cpu::kStreamBytes};
  strips.cut.pieces == 1 ? strips.whole() : strips.in_pieces(static_cast<float*>(call.workspace));
}

// ---- integers: a strip a task ----

template <class U>
void cumsum_whole_fwd(const KernelCall& call) {
  const auto& args = call.as<ScanArgs>();
  const std::int64_t step = args.reverse != 0 ? -args.inner : args.inner;
  const std::int64_t tiles = ceil_div(args.inner, kTile);
  parallel_for(args.outer * tiles, [&](std::int64_t strip) {
    const std::int64_t first = strip % tiles * kTile;
    const std::int64_t width = std::min(kTile, args.inner - first);
    std::int64_t at = strip / tiles * args.count * args.inner + first;
    if (args.reverse != 0) at += (args.count - 1) * args.inner;
    const U* x = call.input<U>(0) + at;
    U* y = call.output<U>(0) + at;
    U sum[kTile] = {};
    for (std::int64_t r = 0; r < args.count; ++r, x += step, y += step) {
      for (std::int64_t i = 0; i < width; ++i) {
        const U after = static_cast<U>(sum[i] + x[i]);
        y[i] = args.exclusive != 0 ? sum[i] : after;
        sum[i] = after;
      }
    }
  });
}

}  // namespace

void register_scan(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "cumsum_fwd_f32", cumsum_fwd<float>, workspace);
  registry.add(Backend::kCpu, "cumsum_fwd_f16", cumsum_fwd<F16>, workspace);
  registry.add(Backend::kCpu, "cumsum_fwd_bf16", cumsum_fwd<BF16>, workspace);
  registry.add(Backend::kCpu, "cumsum_fwd_u8", cumsum_whole_fwd<std::uint8_t>);
  registry.add(Backend::kCpu, "cumsum_fwd_u16", cumsum_whole_fwd<std::uint16_t>);
  registry.add(Backend::kCpu, "cumsum_fwd_u32", cumsum_whole_fwd<std::uint32_t>);
  registry.add(Backend::kCpu, "cumsum_fwd_u64", cumsum_whole_fwd<std::uint64_t>);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(scan)
