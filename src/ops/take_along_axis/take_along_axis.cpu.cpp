// CPU kernels of take_along_axis (formula and layout: mlxtape/ops/take_along_axis.h).
//
// Forward: elements of y over threads, in order, each read from x where its index says. Bound by
// the lines of x that are in flight at once. One load at a time serves elements of every size;
// gather instructions have no form for 1 and 2 bytes.
//
// Backward, rows: whole rows of dx are built in the first-level cache (zeros, plus the k sums of
// each) and leave it past the cache, so that memory is written once and never read. Only what was
// set is cleared again.
//
// Backward, any axes: dx is cut into pieces of some width × columns whose f32 sums stay in a cache;
// each piece looks at every index that may fall into it. Few pieces with many terms are also cut
// along the terms, and the parts added in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/take_along_axis/take_along_axis.cpu.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <bit>
#include <type_traits>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "take_along_axis_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

using ForwardArgs = TakeAlongAxisArgs;
using BackwardArgs = TakeAlongAxisBackwardArgs;

constexpr std::int64_t kTask = 1024;     // elements of y: 7 us from memory, 1 us from cache
constexpr std::int64_t kAhead = 64;      // of these the lines asked for before they are needed
constexpr std::int64_t kFar = 32768;     // and so many lines fill the caches
constexpr std::int64_t kRoom = 4096;     // elements of dx built at once: 16 KiB of f32
constexpr std::int64_t kHits = 512;      // and the most indices that may fall into them
constexpr std::uint32_t kNone = kRoom;   // where an index that names nothing goes
constexpr std::int64_t kPiece = 2048;    // elements that leave at once, or one row if it is longer
constexpr std::int64_t kSmall = 8192;    // elements of a piece whose sums share 48 KiB
constexpr std::int64_t kLarge = 131072;  // and of one whose sums take half the second-level cache
constexpr std::int64_t kParts = 16;      // at most, along the terms of one piece
constexpr std::int64_t kSlots = 64;      // pieces that hold scratch memory at once

// out[i] = the place that index[at + i·stride] names; outside [0, length) when it names none,
// whatever the index. Everything behind this knows one index type.
template <class I>
void places(const void* index, std::int64_t at, std::int64_t stride, std::int64_t count,
            std::int64_t length, std::uint64_t* HWY_RESTRICT out) {
  const I* from = static_cast<const I*>(index) + at;
  const auto place = [length](I i) {
    if constexpr (std::is_signed_v<I>) {
      return static_cast<std::uint64_t>(i < 0 ? i + length : std::int64_t{i});
    } else {
      (void)length;
      return std::uint64_t{i};
    }
  };
  if (stride == 1) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = place(from[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) out[i] = place(from[i * stride]);
  }
}
using Places = decltype(&places<std::int8_t>);

Places places_of(std::int64_t index_type) {
  return visit(static_cast<DType>(index_type), [](auto zero) -> Places {
    using I = decltype(zero);
    if constexpr (std::is_integral_v<I> && !std::is_same_v<I, bool>) return places<I>;
    return nullptr;  // the host lets integers through alone
  });
}

// bytes from the first-level cache to out, with kStream past the cache.
template <bool kStream>
HWY_INLINE void put(const void* from, void* out, std::size_t bytes) {
  if constexpr (!kStream) {
    std::memcpy(out, from, bytes);
    return;
  }
  const hn::ScalableTag<std::uint8_t> d;
  const auto* source = static_cast<const std::uint8_t*>(from);
  auto* target = static_cast<std::uint8_t*>(out);
  std::size_t i = (64 - reinterpret_cast<std::uintptr_t>(out) % 64) % 64;
  i = std::min(i, bytes);
  std::memcpy(target, source, i);
  for (; i + hn::Lanes(d) <= bytes; i += hn::Lanes(d)) {
    hn::Stream(hn::LoadU(d, source + i), d, target + i);
  }
  std::memcpy(target + i, source + i, bytes - i);
}

// ---- forward ----

// Calls run(x, index, count) for the runs of [first, end) along the last axis: offsets and elements.
template <class Run>
HWY_INLINE void for_runs(const ForwardArgs& a, std::int64_t first, std::int64_t end,
                         const Run& run) {
  const std::int64_t last = a.rank - 1;
  std::int64_t at[8] = {};
  std::int64_t rest = first, x = 0, index = 0;
  for (std::int64_t d = last; d >= 0; --d) {
    at[d] = rest % a.n[d];
    rest /= a.n[d];
    if (d == last) continue;
    x += at[d] * a.x[d];
    index += at[d] * a.index[d];
  }
  for (std::int64_t i = at[last]; first < end; i = 0) {
    const std::int64_t count = std::min(a.n[last] - i, end - first);
    run(x + i * a.x[last], index + i * a.index[last], count);
    first += count;
    for (std::int64_t d = last - 1; d >= 0; --d) {
      x += a.x[d];
      index += a.index[d];
      if (++at[d] < a.n[d]) break;
      at[d] = 0;
      x -= a.n[d] * a.x[d];
      index -= a.n[d] * a.index[d];
    }
  }
}

// Elements [first, end) of y, to out. kRow: the last axis is the one indexed, x not strided there.
// far: x will not be found in a cache, so its lines are asked for early.
template <bool kRow, class T>
void take(const ForwardArgs& a, const T* x, const void* index, T* HWY_RESTRICT out,
          std::int64_t first, std::int64_t end, bool far) {
  HWY_ALIGN std::uint64_t named[kTask];
  const std::uint64_t* p = named;
  const Places fill = places_of(a.index_type);
  const std::int64_t last = a.rank - 1;
  bool flat = a.index[last] == 1;
  for (std::int64_t d = last; d > 0; --d) flat &= a.index[d - 1] == a.n[d] * a.index[d];
  if (flat) {
    fill(index, first, 1, end - first, a.length, named);
  } else {
    std::uint64_t* to = named;
    for_runs(a, first, end, [&](std::int64_t, std::int64_t at, std::int64_t count) HWY_ATTR {
      fill(index, at, a.index[last], count, a.length, to);
      to += count;
    });
  }
  const auto length = static_cast<std::uint64_t>(a.length);
  const std::int64_t xs = kRow ? 0 : a.x[last];
  const std::int64_t step = kRow ? 1 : a.axis_stride;
  const auto gather = [&](std::int64_t begin, std::int64_t stop) HWY_ATTR {
    for_runs(a, begin, stop, [&](std::int64_t at, std::int64_t, std::int64_t count) HWY_ATTR {
      const T* from = x + at;
      for (std::int64_t i = 0; i < count; ++i) {
        out[i] = p[i] < length ? from[i * xs + static_cast<std::int64_t>(p[i]) * step] : T{};
      }
      p += count;
      out += count;
    });
  };
  if (!far) return gather(first, end);
  const std::uint64_t* q = named;  // ahead of p
  const auto fetch = [&](std::int64_t begin, std::int64_t stop) HWY_ATTR {
    for_runs(a, begin, stop, [&](std::int64_t at, std::int64_t, std::int64_t count) HWY_ATTR {
      const T* from = x + at;
      for (std::int64_t i = 0; i < count; ++i) {
        hwy::Prefetch(from + i * xs + static_cast<std::int64_t>(q[i] < length ? q[i] : 0) * step);
      }
      q += count;
    });
  };
  fetch(first, std::min(end, first + kAhead));
  for (std::int64_t e = first; e < end; e += kAhead) {
    const std::int64_t next = std::min(end, e + kAhead);
    fetch(next, std::min(end, next + kAhead));
    gather(e, next);
  }
}

// From the first to the last element of x, if strides are not negative.
std::int64_t size_of_x(const ForwardArgs& a) {
  std::int64_t size = 1 + (a.length - 1) * a.axis_stride;
  for (std::int64_t d = 0; d < a.rank; ++d) size += (a.n[d] - 1) * a.x[d];
  return size;
}

template <bool kRow, class T>
void forward(const ForwardArgs& a, const T* x, const void* index, T* y) {
  std::int64_t size = 1;
  for (std::int64_t d = 0; d < a.rank; ++d) size *= a.n[d];
  if (a.length == 0) {
    std::memset(y, 0, static_cast<std::size_t>(size) * sizeof(T));
    return;
  }
  const bool streams = size * static_cast<std::int64_t>(sizeof(T)) >= cpu::kStreamBytes;
  const bool far = size >= kFar && size_of_x(a) * static_cast<std::int64_t>(sizeof(T)) >= 64 * kFar;
  parallel_for(ceil_div(size, kTask), [&](std::int64_t task) {
    const std::int64_t first = task * kTask;
    const std::int64_t end = std::min(size, first + kTask);
    if (streams) {
      HWY_ALIGN T values[kTask];
      take<kRow>(a, x, index, values, first, end, far);
      put<true>(values, y + first, static_cast<std::size_t>(end - first) * sizeof(T));
      hwy::FlushStream();
    } else {
      take<kRow>(a, x, index, y + first, first, end, far);
    }
  });
}

// ---- backward, rows ----

// axis is the last of x, no axis of x is broadcast, and a row is short or has few indices. With one
// index a row, axis itself is not summed along, and a broadcast axis may stand in its place.
bool in_rows(const BackwardArgs& a) {
  const bool dy_in_rows = (a.sum_n[0] <= 1 || a.sum_dy[0] == 1) &&
                          (a.rank == 0 || a.n[0] <= 1 || a.dy[0] == a.sum_n[0]);
  return a.width == 1 && a.rank <= 1 && a.sum_rank == 1 && dy_in_rows &&
         (a.length <= kRoom || a.sum_n[0] <= kHits);
}

// Which rows and columns of dx.
struct Rows {
  std::int64_t first, count;
  std::int64_t lo, cols;
};

// Calls fn(i) for i in [0, n) where at[i] names something; most is the largest of at, or kNone.
template <class Fn>
HWY_INLINE void for_named(const std::uint32_t* at, std::int64_t n, std::uint32_t most,
                          const Fn& fn) {
  std::int64_t i = 0;
  if (most != kNone) {
    for (; i + 4 <= n; i += 4) fn(i), fn(i + 1), fn(i + 2), fn(i + 3);
    for (; i < n; ++i) fn(i);
  }
  for (; i < n; ++i) {
    if (at[i] != kNone) fn(i);
  }
}

// out[at] = the sum in f32 of the terms that go there, rounded once.
template <class T>
HWY_NOINLINE void add_equal(const std::uint32_t* at, const T* dy, std::int64_t count, T* out) {
  float sums[kRoom + 1];  // only what is named is ever read
  for (std::int64_t i = 0; i < count; ++i) sums[at[i]] = 0;
  for (std::int64_t i = 0; i < count; ++i) sums[at[i]] += static_cast<float>(dy[i]);
  for (std::int64_t i = 0; i < count; ++i) {
    if (at[i] != kNone) out[at[i]] = T(sums[at[i]]);
  }
}

// Few indices: out, which is zero, gets what they name. at tells where that was; row[i] is where
// the row of the i'th index begins in out.
template <class T>
HWY_INLINE void fill_sparse(const BackwardArgs& a, const T* dy, const void* index, const Rows& rows,
                            const std::uint32_t* row, T* out, std::uint32_t* HWY_RESTRICT at) {
  HWY_ALIGN std::uint64_t named[kHits];
  const std::int64_t k = a.sum_n[0];
  const std::int64_t is = a.sum_index[0];
  const std::int64_t row_index = a.rank == 0 ? 0 : a.index[0];
  const std::int64_t n = rows.count * k;
  const Places fill = places_of(a.index_type);
  if (is == 1 && row_index == k) {
    fill(index, rows.first * k, 1, n, a.length, named);
  } else {
    for (std::int64_t r = 0; r < rows.count; ++r) {
      fill(index, (rows.first + r) * row_index, is, k, a.length, named + r * k);
    }
  }
  dy += rows.first * k;
  const auto lo = static_cast<std::uint64_t>(rows.lo);
  const auto cols = static_cast<std::uint64_t>(rows.cols);
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint64_t c = named[i] - lo;
    at[i] = c < cols ? row[i] + static_cast<std::uint32_t>(c) : kNone;
    most = std::max(most, at[i]);
  }
  // A 16-bit element that is named once is copied. One that is not zero any more is named again:
  // then all are summed.
  std::uint32_t again = 0;
  const auto set = [&](std::int64_t i) HWY_ATTR {
    if constexpr (sizeof(T) == 4) {
      out[at[i]] += dy[i];
    } else {
      again |= out[at[i]].bits;
      out[at[i]] = dy[i];
    }
  };
  for_named(at, n, most, set);
  if constexpr (sizeof(T) != 4) {
    if (again != 0) add_equal(at, dy, n, out);
  }
}

// Pieces [0, count) of dx, of at most room elements and named indices; piece(i) says which rows.
template <bool kStream, class T, class PieceAt>
void build_sparse(const BackwardArgs& a, const T* dy, const void* index, T* dx, std::int64_t count,
                  std::int64_t room, std::int64_t named, const PieceAt& piece) {
  const auto place_of = [&](const Rows& r) {
    return dx + r.first * a.length + r.lo;
  };
  const auto bytes_of = [](const Rows& r) {
    return static_cast<std::size_t>(r.count * r.cols) * sizeof(T);
  };
  HWY_ALIGN std::uint32_t row[kHits];
  HWY_ALIGN std::uint32_t at[2 * kHits];
  const std::int64_t k = a.sum_n[0];
  for (std::int64_t i = 0, r = 0; i < named; ++r) {
    for (const std::int64_t end = i + k; i < end; ++i) {
      row[i] = static_cast<std::uint32_t>(r * a.length);
    }
  }
  if constexpr (!kStream) {
    for (std::int64_t i = 0; i < count; ++i) {
      const Rows rows = piece(i);
      std::memset(static_cast<void*>(place_of(rows)), 0, bytes_of(rows));
      fill_sparse(a, dy, index, rows, row, place_of(rows), at);
    }
  } else {
    // Pieces are built some way ahead of the one that leaves: a vector cannot be loaded from where
    // narrower stores still wait behind streaming ones.
    HWY_ALIGN unsigned char memory[2 * kRoom * sizeof(T)];
    T* ring = reinterpret_cast<T*>(memory);  // [slots, room]
    const std::int64_t most =
        std::min(2 * kRoom / room, 2 * kHits / std::max<std::int64_t>(1, named));
    const auto slots = static_cast<std::int64_t>(std::bit_floor(
        static_cast<std::uint64_t>(std::min<std::int64_t>(most, 8))));  // a power of 2 from 2 on
    std::memset(memory, 0, static_cast<std::size_t>(slots * room) * sizeof(T));
    const auto fill = [&](std::int64_t i) HWY_ATTR {
      const std::int64_t slot = i & (slots - 1);
      fill_sparse(a, dy, index, piece(i), row, ring + slot * room, at + slot * named);
    };
    for (std::int64_t i = 0; i < std::min(slots - 1, count); ++i) fill(i);
    for (std::int64_t i = 0; i < count; ++i) {
      if (i + slots - 1 < count) fill(i + slots - 1);
      const std::int64_t slot = i & (slots - 1);
      const Rows rows = piece(i);
      T* out = ring + slot * room;
      put<true>(out, place_of(rows), bytes_of(rows));
      const std::uint32_t* set = at + slot * named;
      for_named(set, rows.count * k, kNone, [&](std::int64_t j) HWY_ATTR { out[set[j]] = T{}; });
    }
  }
}

// n sums, rounded, to dx.
template <bool kStream, class T>
HWY_INLINE void put_sums(const float* sums, T* dx, std::int64_t n) {
  const DF d;
  write_row<kStream>(
      d, dx, static_cast<std::size_t>(n),
      [&](std::size_t i) HWY_ATTR { return hn::LoadU(d, sums + i); },
      [&](std::size_t i, std::size_t count) HWY_ATTR { return load_n(d, sums + i, count); });
}

// sums[c·width + i·ss] += dy[i·ds] for count indices, where c is the place they name less lo.
template <class T>
HWY_INLINE void add_run(const std::uint64_t* named, std::int64_t count, std::int64_t lo,
                        std::int64_t cols, const T* dy, std::int64_t ds, float* sums,
                        std::int64_t width, std::int64_t ss) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t c = named[i] - static_cast<std::uint64_t>(lo);
    if (c < static_cast<std::uint64_t>(cols)) {
      sums[static_cast<std::int64_t>(c) * width + i * ss] += static_cast<float>(dy[i * ds]);
    }
  }
}

// Many indices: every element of the rows is likely to be named.
template <bool kStream, class T>
void build_dense(const BackwardArgs& a, const T* dy, const void* index, T* dx, const Rows& rows) {
  HWY_ALIGN float sums[kRoom];
  HWY_ALIGN std::uint64_t named[kHits];
  const std::int64_t k = a.sum_n[0];
  const std::int64_t is = a.sum_index[0];
  const std::int64_t row_index = a.rank == 0 ? 0 : a.index[0];
  const Places fill = places_of(a.index_type);
  std::memset(sums, 0, static_cast<std::size_t>(rows.count * a.length) * sizeof(float));
  for (std::int64_t r = 0; r < rows.count; ++r) {
    for (std::int64_t j = 0; j < k; j += kHits) {
      const std::int64_t count = std::min(kHits, k - j);
      fill(index, (rows.first + r) * row_index + j * is, is, count, a.length, named);
      add_run(named, count, 0, a.length, dy + (rows.first + r) * k + j, 1, sums + r * a.length, 1,
              0);
    }
  }
  put_sums<kStream>(sums, dx + rows.first * a.length, rows.count * a.length);
}

template <bool kStream, class T>
void backward_rows(const BackwardArgs& a, const T* dy, const void* index, T* dx) {
  const std::int64_t rows = a.rank == 0 ? 1 : a.n[0];
  const std::int64_t k = a.sum_n[0];
  const bool dense = a.length <= kRoom && (k > kHits || 8 * k > a.length);
  const std::int64_t cols = std::min(a.length, kRoom);
  const std::int64_t blocks = ceil_div(a.length, cols);
  const std::int64_t most = dense ? kRoom : kPiece;
  std::int64_t each = std::max<std::int64_t>(1, most / cols);  // rows of a piece
  if (!dense && k > 0) each = std::min(each, kHits / k);
  const std::int64_t pieces = ceil_div(rows, each) * blocks;
  const std::int64_t piece_bytes = each * cols * static_cast<std::int64_t>(sizeof(T));
  // Larger tasks when streaming: each begins by clearing its room.
  const std::int64_t per_task =
      std::max<std::int64_t>(1, (kStream ? 4 : 1) * cpu::kTaskBytes / piece_bytes);
  parallel_for(ceil_div(pieces, per_task), [&](std::int64_t task) {
    const std::int64_t first = task * per_task;
    const std::int64_t count = std::min(per_task, pieces - first);
    const auto piece = [&](std::int64_t i) {
      const std::int64_t group = blocks == 1 ? first + i : (first + i) / blocks;
      const std::int64_t lo = (first + i - group * blocks) * cols;
      const std::int64_t r = group * each;
      return Rows{r, std::min(each, rows - r), lo, std::min(cols, a.length - lo)};
    };
    if (dense) {
      for (std::int64_t i = 0; i < count; ++i) build_dense<kStream>(a, dy, index, dx, piece(i));
    } else {
      build_sparse<kStream>(a, dy, index, dx, count, each * cols, each * k, piece);
    }
    if (kStream) hwy::FlushStream();
  });
}

// ---- backward, any axes ----

// How dx is cut, by the shape alone.
struct Plan {
  std::int64_t width, tiles;   // of the axis of neighbours
  std::int64_t cols, blocks;   // of the axis indexed
  std::int64_t lanes, pieces;  // lanes × tiles × blocks
  std::int64_t terms, parts;   // of one element's sum; parts of the outermost summed axis
  std::int64_t at_once;        // pieces, as far as scratch memory goes
  bool scratch;                // the sums do not fit the stack
};

Plan plan_of(const BackwardArgs& a) {
  Plan p{};
  p.width = std::min(a.width, std::clamp<std::int64_t>(kSmall / a.length, 16, 256));
  p.tiles = ceil_div(a.width, p.width);
  p.terms = 1;
  for (std::int64_t e = 0; e < a.sum_rank; ++e) p.terms *= a.sum_n[e];
  // Each block reads all indices again: with many of them, fewer and larger blocks.
  p.cols = std::min(a.length, kSmall / p.width);
  if (p.cols < a.length && 4 * p.terms > p.cols) p.cols = std::min(a.length, kLarge / p.width);
  p.blocks = ceil_div(a.length, p.cols);
  p.lanes = 1;
  for (std::int64_t d = 0; d < a.rank; ++d) p.lanes *= a.n[d];
  p.pieces = p.lanes * p.tiles * p.blocks;
  p.parts = 1;
  if (p.pieces < kParts) {
    const std::int64_t worth = p.terms * p.width / std::max(kTask * 16, p.cols * p.width);
    p.parts = std::clamp<std::int64_t>(std::min(worth, a.sum_n[0]), 1, kParts);
  }
  p.scratch = p.parts > 1 || p.cols * p.width > kSmall;
  p.at_once = p.scratch ? std::min(p.pieces, kSlots / p.parts) : p.pieces;
  return p;
}

// One piece of dx: where its first element, its dy and its indices are.
struct Piece {
  std::int64_t dx, dy, index;
  std::int64_t width, lo, cols;
};

Piece piece_of(const BackwardArgs& a, const Plan& p, std::int64_t number) {
  const std::int64_t block = number % p.blocks;
  number /= p.blocks;
  const std::int64_t first = number % p.tiles * p.width;
  number /= p.tiles;
  Piece piece{};
  piece.width = std::min(p.width, a.width - first);
  piece.lo = block * p.cols;
  piece.cols = std::min(p.cols, a.length - piece.lo);
  piece.dx = first + piece.lo * a.axis_stride;
  piece.dy = first * a.width_dy;
  piece.index = first * a.width_index;
  for (std::int64_t d = a.rank - 1; d >= 0; --d) {
    const std::int64_t at = number % a.n[d];
    number /= a.n[d];
    piece.dx += at * a.dx[d];
    piece.dy += at * a.dy[d];
    piece.index += at * a.index[d];
  }
  return piece;
}

// sums [cols, width] = the terms of a piece, of those only the part'th of parts, in order.
template <class T>
void sum_piece(const BackwardArgs& a, const Plan& p, const Piece& piece, std::int64_t part,
               const T* dy, const void* index, float* sums) {
  std::memset(sums, 0, static_cast<std::size_t>(piece.cols * piece.width) * sizeof(float));
  if (p.terms == 0) return;
  const std::int64_t start = a.sum_n[0] * part / p.parts;
  std::int64_t n[8];
  std::copy_n(a.sum_n, 8, n);
  n[0] = a.sum_n[0] * (part + 1) / p.parts - start;
  dy += piece.dy + start * a.sum_dy[0];
  std::int64_t at_index = piece.index + start * a.sum_index[0];

  // Innermost: neighbours in dx if there are any, else the last summed axis.
  const bool wide = a.width > 1;
  const std::int64_t outer = wide ? a.sum_rank : a.sum_rank - 1;
  const std::int64_t run = wide ? piece.width : n[outer];
  const std::int64_t ds = wide ? a.width_dy : a.sum_dy[outer];
  const std::int64_t is = wide ? a.width_index : a.sum_index[outer];
  const std::int64_t ss = wide ? 1 : 0;
  std::int64_t runs = 1;
  for (std::int64_t e = 0; e < outer; ++e) runs *= n[e];
  std::int64_t at[8] = {};
  const Places fill = places_of(a.index_type);
  HWY_ALIGN std::uint64_t named[kHits];
  for (std::int64_t r = 0; r < runs; ++r) {
    for (std::int64_t i = 0; i < run; i += kHits) {
      const std::int64_t count = std::min(kHits, run - i);
      fill(index, at_index + i * is, is, count, a.length, named);
      add_run(named, count, piece.lo, piece.cols, dy + i * ds, ds, sums + i * ss, piece.width, ss);
    }
    for (std::int64_t e = outer - 1; e >= 0; --e) {
      dy += a.sum_dy[e];
      at_index += a.sum_index[e];
      if (++at[e] < n[e]) break;
      at[e] = 0;
      dy -= n[e] * a.sum_dy[e];
      at_index -= n[e] * a.sum_index[e];
    }
  }
}

template <class T>
void put_piece(const BackwardArgs& a, const Piece& piece, const float* sums, T* dx) {
  if (piece.width == a.axis_stride)
    return put_sums<false>(sums, dx + piece.dx, piece.cols * piece.width);
  for (std::int64_t c = 0; c < piece.cols; ++c) {
    put_sums<false>(sums + c * piece.width, dx + piece.dx + c * a.axis_stride, piece.width);
  }
}

template <class T>
void backward_any(const BackwardArgs& a, const T* dy, const void* index, T* dx, float* scratch) {
  const Plan p = plan_of(a);
  const std::int64_t room = p.cols * p.width;
  if (!p.scratch) {
    const std::int64_t each = std::max<std::int64_t>(1, 16 * kTask / (room + p.terms * p.width));
    parallel_for(ceil_div(p.pieces, each), [&](std::int64_t task) {
      HWY_ALIGN float sums[kSmall];
      for (std::int64_t i = task * each; i < std::min(p.pieces, (task + 1) * each); ++i) {
        const Piece piece = piece_of(a, p, i);
        sum_piece(a, p, piece, 0, dy, index, sums);
        put_piece(a, piece, sums, dx);
      }
    });
    return;
  }
  for (std::int64_t first = 0; first < p.pieces; first += p.at_once) {
    const std::int64_t count = std::min(p.at_once, p.pieces - first);
    parallel_for(count * p.parts, [&](std::int64_t slot) {
      sum_piece(a, p, piece_of(a, p, first + slot / p.parts), slot % p.parts, dy, index,
                scratch + slot * room);
    });
    parallel_for(count, [&](std::int64_t i) {
      const Piece piece = piece_of(a, p, first + i);
      float* sums = scratch + i * p.parts * room;
      for (std::int64_t part = 1; part < p.parts; ++part) {
        for (std::int64_t c = 0; c < piece.cols * piece.width; ++c)
          sums[c] += sums[part * room + c];
      }
      put_piece(a, piece, sums, dx);
    });
  }
}

std::size_t backward_workspace(const void* args) {
  const auto& a = *static_cast<const BackwardArgs*>(args);
  if (in_rows(a)) return 0;
  const Plan p = plan_of(a);
  if (!p.scratch) return 0;
  return static_cast<std::size_t>(p.at_once * p.parts * p.cols * p.width) * sizeof(float);
}

// ---- entry points ----

template <class T>
void take_along_axis_fwd(const KernelCall& call) {
  const auto& a = call.as<ForwardArgs>();
  const T* x = call.input<T>(0);
  const auto* index = call.input<void>(1);
  T* y = call.output<T>(0);
  a.x[a.rank - 1] == 0 && a.axis_stride == 1 ? forward<true>(a, x, index, y)
                                             : forward<false>(a, x, index, y);
}

template <class T>
void take_along_axis_bwd(const KernelCall& call) {
  const auto& a = call.as<BackwardArgs>();
  const T* dy = call.input<T>(0);
  const auto* index = call.input<void>(1);
  T* dx = call.output<T>(0);
  if (!in_rows(a)) return backward_any(a, dy, index, dx, static_cast<float*>(call.workspace));
  const std::int64_t size = (a.rank == 0 ? 1 : a.n[0]) * a.length;
  size* static_cast<std::int64_t>(sizeof(T)) >= cpu::kStreamBytes
      ? backward_rows<true>(a, dy, index, dx)
      : backward_rows<false>(a, dy, index, dx);
}

}  // namespace

void register_take_along_axis(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "take_along_axis_fwd_u8", take_along_axis_fwd<std::uint8_t>);
  registry.add(Backend::kCpu, "take_along_axis_fwd_u16", take_along_axis_fwd<std::uint16_t>);
  registry.add(Backend::kCpu, "take_along_axis_fwd_u32", take_along_axis_fwd<std::uint32_t>);
  registry.add(Backend::kCpu, "take_along_axis_fwd_u64", take_along_axis_fwd<std::uint64_t>);
  registry.add(Backend::kCpu, "take_along_axis_bwd_f32", take_along_axis_bwd<float>,
               backward_workspace);
  registry.add(Backend::kCpu, "take_along_axis_bwd_f16", take_along_axis_bwd<F16>,
               backward_workspace);
  registry.add(Backend::kCpu, "take_along_axis_bwd_bf16", take_along_axis_bwd<BF16>,
               backward_workspace);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(take_along_axis)
