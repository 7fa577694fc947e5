// CPU kernels of conv1d_depthwise_causal (formula and layout: mlxtape/ops/conv1d_depthwise_causal.h).
//
// Four rows at a time: K+3 rows of input give four of output, so a channel's taps are loaded once
// for four results and the K−1 rows before come from the cache. A block of rows is a table of row
// addresses; where a sequence ends, entries point into its initial state or at zeros, so no kernel
// knows about borders. The forward walks whole rows, tasks are strips of rows. The backward walks
// strips of rows within a tile of channels whose taps and dw sums stay in the first-level cache; the
// sums of each strip are added in order at the end. With silu it first computes dz, in f32, for the
// rows it is about to need, into a ring of rows. Bound by memory.
//
// The arithmetic is in conv1d_depthwise_causal_pairs-inl.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/conv1d_depthwise_causal/conv1d_depthwise_causal.cpu.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "conv1d_depthwise_causal_args.h"
#include "conv1d_depthwise_causal_pairs-inl.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

using Args = Conv1dDepthwiseCausalArgs;

constexpr int kRows = 4;                         // output rows made together
constexpr std::int64_t kTileBytes = 4096;        // of a row: what is staged, and how long zeros are
constexpr std::int64_t kTile = 1024;             // channels whose taps and sums fit 48 KiB together
constexpr std::int64_t kMostStrips = 32;         // of the backward: [strips, K, C] sums stay small
constexpr std::int64_t kRingFloats = 7 * kTile;  // rows of dz for K = 4

alignas(64) const unsigned char kZeros[kTileBytes] = {};

// ---- rows, sequences, pieces ----

// Rows of one sequence: position 0 is its first, the K−1 before are its initial state.
template <class T>
struct Sequence {
  const T* first;    // [length, C]
  const T* initial;  // [K−1, C] or null
  std::int64_t length, channels, before;

  // Null: a row of zeros.
  const T* row(std::int64_t p) const {
    if (p >= 0) return p < length ? first + p * channels : nullptr;
    return initial != nullptr ? initial + (before + p) * channels : nullptr;
  }
  // The same from channel c on, readable for a tile.
  const T* tile(std::int64_t p, std::int64_t c) const {
    const T* found = row(p);
    return found != nullptr ? found + c : reinterpret_cast<const T*>(kZeros);
  }
};

struct Sequences {
  const std::int64_t* starts;  // [S+1], or null: all of one length
  std::int64_t each, count;

  std::int64_t start(std::int64_t s) const { return starts != nullptr ? starts[s] : s * each; }
  std::int64_t holding(std::int64_t row) const {
    if (starts == nullptr) return row / each;
    return std::upper_bound(starts, starts + count, row) - starts - 1;
  }
};

// Calls body(s, first row, length, p0, p1) for the positions of each sequence among rows [r0, r1).
template <class Body>
void for_pieces(const Sequences& sequences, std::int64_t r0, std::int64_t r1, const Body& body) {
  if (r0 >= r1) return;
  for (std::int64_t s = sequences.holding(r0); s < sequences.count; ++s) {
    const std::int64_t start = sequences.start(s);
    const std::int64_t end = sequences.start(s + 1);
    if (start >= r1) return;
    const std::int64_t p0 = std::max(r0, start) - start;
    const std::int64_t p1 = std::min(r1, end) - start;
    if (p0 < p1) body(s, start, end - start, p0, p1);
  }
}

// The starts as they would be if they obeyed the contract: from 0 to rows, never falling.
template <class I>
void clamp_starts(const I* from, std::int64_t sequences, std::int64_t rows, std::int64_t* to) {
  to[0] = 0;
  for (std::int64_t s = 1; s < sequences; ++s) {
    to[s] = std::clamp(static_cast<std::int64_t>(from[s]), to[s - 1], rows);
  }
  to[sequences] = rows;
}

Sequences sequences_of(const Args& args, const void* starts, void* room) {
  if (args.start_bytes == 0) return {nullptr, args.sequence_rows, args.sequences};
  auto* clamped = static_cast<std::int64_t*>(room);
  if (args.start_bytes == 4) {
    clamp_starts(static_cast<const std::int32_t*>(starts), args.sequences, args.rows, clamped);
  } else {
    clamp_starts(static_cast<const std::int64_t*>(starts), args.sequences, args.rows, clamped);
  }
  return {clamped, 0, args.sequences};
}

// to[0, n) past the cache, except for the parts of a line at either end.
template <class T>
void stream_copy(const T* from, T* to, std::size_t n) {
  const hn::ScalableTag<std::uint8_t> d8;
  const auto* in = reinterpret_cast<const std::uint8_t*>(from);
  auto* out = reinterpret_cast<std::uint8_t*>(to);
  const std::size_t bytes = n * sizeof(T);
  const std::size_t head = std::min(bytes, (64 - reinterpret_cast<std::uintptr_t>(out) % 64) % 64);
  std::memcpy(out, in, head);
  std::size_t i = head;
  for (; i + 64 <= bytes; i += 64) {
    for (std::size_t j = 0; j < 64; j += hn::Lanes(d8)) {
      hn::Stream(hn::LoadU(d8, in + i + j), d8, out + i + j);
    }
  }
  std::memcpy(out + i, in + i, bytes - i);
}

// How output rows are written: through the cache, past it, or, where rows begin in the middle of a
// line, past it by way of a copy in the first-level cache.
enum class Write { kCached, kStreamed, kStaged };

template <class T>
Write way_to_write(const Args& args, const T* out, const T* state = nullptr) {
  const std::int64_t row_bytes = args.channels * static_cast<std::int64_t>(sizeof(T));
  if (args.rows * row_bytes < cpu::kStreamBytes) return Write::kCached;
  const bool aligned = reinterpret_cast<std::uintptr_t>(out) % 64 == 0 &&
                       reinterpret_cast<std::uintptr_t>(state) % 64 == 0 && row_bytes % 64 == 0;
  return aligned ? Write::kStreamed : Write::kStaged;
}

// Where a tile of kR rows is written, and its way from there to out.
template <int kR, class T>
class Stage {
 public:
  Stage(Write write, T* const* out) : staged_(write == Write::kStaged) {
    for (int r = 0; r < kR; ++r) {
      out_[r] = out[r];
      to_[r] = staged_ ? reinterpret_cast<T*>(rows_[r]) : out[r];
    }
  }
  T* const* to() const { return to_; }
  void finish(std::size_t n) {
    if (!staged_) return;
    for (int r = 0; r < kR; ++r) stream_copy(to_[r], out_[r], n);
  }

 private:
  alignas(64) unsigned char rows_[kR][kTileBytes];  // bytes: an array of T would be set to zero
  T* out_[kR];
  T* to_[kR];
  bool staged_;
};

// ---- forward ----

template <class T>
struct Forward {
  Args args;
  const T* x;        // [rows, C]
  const T* initial;  // [S, K−1, C] or null
  T* y;              // [rows, C]
  T* final_state;    // [S, K−1, C] or null
  const float* w;    // [pair][K][2·lanes]
  Sequences sequences;
  Write write;

  Sequence<T> sequence(std::int64_t s, std::int64_t start, std::int64_t length) const {
    const std::int64_t before = args.taps - 1;
    return {x + start * args.channels,
            initial != nullptr ? initial + s * before * args.channels : nullptr, length,
            args.channels, before};
  }
};

// A call for a block of rows is nothing beside its work, and the compiler has one copy of each to think about.
template <int kTaps, int kR, bool kSilu, bool kStream, class T>
HWY_NOINLINE void forward_block(const Forward<T>& f, const Sequence<T>& sequence,
                                std::int64_t start, std::int64_t p) {
  const int taps = kTaps != 0 ? kTaps : static_cast<int>(f.args.taps);
  const std::size_t step = pair_lanes();
  constexpr std::int64_t kChannels = kTileBytes / static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t c = 0; c < f.args.channels; c += kChannels) {
    const auto n = static_cast<std::size_t>(std::min(kChannels, f.args.channels - c));
    const T* e[kRows + kMostTaps - 1];
    for (int j = 0; j < kR + taps - 1; ++j) e[j] = sequence.tile(p + j - (taps - 1), c);
    T* y[kR];
    for (int r = 0; r < kR; ++r) y[r] = f.y + (start + p + r) * f.args.channels + c;
    const float* w = f.w + c * taps;
    Stage<kR, T> stage(f.write, y);
    std::size_t i = 0;
    for (; i + step <= n; i += step) {
      forward_pair<kTaps, kR, kSilu, kStream, true>(e, w, taps, i, step, stage.to());
    }
    for (int r = 0; i < n && r < kR; ++r) {
      forward_rest<kSilu>(e + r, w, taps, i, n - i, stage.to() + r);
    }
    stage.finish(n);
  }
}

template <int kTaps, bool kSilu, bool kStream, class T>
void forward_strips(const Forward<T>& f) {
  const std::int64_t bytes = 2 * f.args.channels * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t each =
      ceil_div(std::max<std::int64_t>(8, cpu::rows_per_task(bytes)), kRows) * kRows;
  parallel_for(ceil_div(f.args.rows, each), [&](std::int64_t task) {
    for_pieces(f.sequences, task * each, std::min(f.args.rows, (task + 1) * each),
               [&](std::int64_t s, std::int64_t start, std::int64_t length, std::int64_t p0,
                   std::int64_t p1) {
                 const Sequence<T> sequence = f.sequence(s, start, length);
                 std::int64_t p = p0;
                 for (; p + kRows <= p1; p += kRows) {
                   forward_block<kTaps, kRows, kSilu, kStream>(f, sequence, start, p);
                 }
                 for (; p < p1; ++p) forward_block<0, 1, kSilu, false>(f, sequence, start, p);
               });
    if (f.write != Write::kCached) hwy::FlushStream();
  });
}

template <class T>
void write_final_state(const Forward<T>& f) {
  const std::int64_t before = f.args.taps - 1;
  const std::size_t bytes = static_cast<std::size_t>(f.args.channels) * sizeof(T);
  parallel_for(f.sequences.count, [&](std::int64_t s) {
    const std::int64_t start = f.sequences.start(s);
    const Sequence<T> sequence = f.sequence(s, start, f.sequences.start(s + 1) - start);
    for (std::int64_t j = 0; j < before; ++j) {
      T* to = f.final_state + (s * before + j) * f.args.channels;
      const T* from = sequence.row(sequence.length - before + j);
      from != nullptr ? std::memcpy(to, from, bytes)
                      : std::memset(static_cast<void*>(to), 0, bytes);
    }
  });
}

// ---- backward ----

template <class T>
struct Backward {
  Args args;
  const T* x;        // [rows, C]
  const T* dy;       // [rows, C]
  const T* initial;  // [S, K−1, C] or null
  const T* d_final;  // [S, K−1, C] or null
  T* dx;             // [rows, C]
  T* d_initial;      // [S, K−1, C] or null
  const float* w;    // [pair][K][2·lanes]
  float* sums;       // [strip][pair][K][2·lanes]
  Sequences sequences;
  Write write;
};

// Of a tile: a ring of dz rows must hold four output rows' worth.
std::int64_t backward_tile_channels(const Args& args) {
  if (args.silu == 0) return kTile;
  return std::min(kTile, kRingFloats / (kRows + args.taps - 1) / 64 * 64);
}

struct Strips {
  std::int64_t rows, count;
};
Strips backward_strips(const Args& args) {
  const std::int64_t tile = std::min(args.channels, backward_tile_channels(args));
  const std::int64_t least = ceil_div(2 * cpu::rows_per_task(12 * tile), kRows) * kRows;
  const std::int64_t rows =
      std::max(least, ceil_div(ceil_div(args.rows, kMostStrips), kRows) * kRows);
  return {rows, std::max<std::int64_t>(1, ceil_div(args.rows, rows))};
}

std::size_t packed_floats(const Args& args) {
  const auto step = static_cast<std::int64_t>(pair_lanes());
  return static_cast<std::size_t>(ceil_div(args.channels, step) * step * args.taps);
}

// Positions [p0, p1) of one sequence, for a tile of n channels from c on.
template <bool kSilu, class T>
struct Piece {
  const Backward<T>& b;
  const Sequence<T> x, dy;
  const T* d_final;  // [K−1, C] of this sequence, or null
  T* dx;             // [length, C] of this sequence
  T* d_initial;      // [K−1, C] of this sequence, or null
  std::int64_t c;
  std::size_t n;
  float* dw;
  Dz* ring;                  // [ring rows, tile]: dz of position q is row q mod ring rows
  std::int64_t dz_made = 0;  // positions before it are in the ring

  int taps() const { return static_cast<int>(b.args.taps); }
  Dz* ring_row(std::int64_t q) const { return ring + q % (kRows + taps() - 1) * tile_channels(); }
  std::int64_t tile_channels() const { return backward_tile_channels(b.args); }
  T* out_row(std::int64_t p) const {
    const std::int64_t C = b.args.channels;
    return c + (p >= 0 ? dx + p * C : d_initial + (taps() - 1 + p) * C);
  }

  template <int kTaps, int kR>
  HWY_NOINLINE void make_dz() {
    const T* e[kR + kMostTaps - 1];
    const T* g[kR];
    Dz* to[kR];
    for (int j = 0; j < kR + taps() - 1; ++j) e[j] = x.tile(dz_made + j - (taps() - 1), c);
    for (int r = 0; r < kR; ++r) {
      g[r] = dy.tile(dz_made + r, c);
      to[r] = ring_row(dz_made + r);
    }
    const float* w = b.w + c * taps();
    const std::size_t step = pair_lanes();
    std::size_t i = 0;
    for (; i + step <= n; i += step) dz_pair<kTaps, kR, true>(e, g, w, taps(), i, step, to);
    for (int r = 0; i < n && r < kR; ++r) {
      dz_rest(e + r, g + r, w, taps(), i, n - i, to + r);
    }
    dz_made += kR;
  }

  template <int kTaps, int kR, bool kStream, class D>
  HWY_NOINLINE void make_de(std::int64_t p, const D* const* dz, const T* add) {
    const T* e[kR];
    T* out[kR];
    for (int r = 0; r < kR; ++r) {
      e[r] = x.tile(p + r, c);
      out[r] = out_row(p + r);
    }
    const float* w = b.w + c * taps();
    const std::size_t step = pair_lanes();
    Stage<kR, T> stage(b.write, out);
    std::size_t i = 0;
    for (; i + step <= n; i += step) {
      backward_pair<kTaps, kR, kStream, true>(e, dz, add, w, taps(), i, step, stage.to(), dw);
    }
    for (int r = 0; i < n && r < kR; ++r) {
      backward_rest(e + r, dz + r, add, w, taps(), i, n - i, stage.to() + r, dw);
    }
    stage.finish(n);
  }

  template <int kTaps, int kR, bool kStream>
  void rows(std::int64_t p, const T* add) {
    if constexpr (kSilu) {
      const std::int64_t need = std::min(x.length, p + kR + taps() - 1);
      while (dz_made + kRows <= need) make_dz<kTaps, kRows>();
      while (dz_made < need) make_dz<0, 1>();
      const Dz* dz[kR + kMostTaps - 1];
      for (int j = 0; j < kR + taps() - 1; ++j) {
        const bool inside = p + j >= 0 && p + j < x.length;
        dz[j] = inside ? ring_row(p + j) : reinterpret_cast<const Dz*>(kZeros);
      }
      make_de<kTaps, kR, kStream>(p, dz, add);
    } else {
      const T* dz[kR + kMostTaps - 1];
      for (int j = 0; j < kR + taps() - 1; ++j) dz[j] = dy.tile(p + j, c);
      make_de<kTaps, kR, kStream>(p, dz, add);
    }
  }

  template <int kTaps, bool kStream>
  void run(std::int64_t p0, std::int64_t p1) {
    dz_made = std::max<std::int64_t>(p0, 0);
    // The last K−1 rows also receive the gradient of the final state.
    const std::int64_t final_from = x.length - (taps() - 1);
    const std::int64_t plain_end = d_final != nullptr ? std::min(p1, final_from) : p1;
    std::int64_t p = p0;
    for (; p + kRows <= plain_end; p += kRows) rows<kTaps, kRows, kStream>(p, nullptr);
    for (; p < p1; ++p) {
      const bool last = d_final != nullptr && p >= final_from;
      rows<0, 1, false>(p, last ? d_final + (p - final_from) * b.args.channels + c : nullptr);
    }
  }
};

template <int kTaps, bool kSilu, bool kStream, class T>
void backward_task(const Backward<T>& b, std::int64_t strip, const Strips& strips, std::int64_t c) {
  const Args& args = b.args;
  const std::int64_t n = std::min(backward_tile_channels(args), args.channels - c);
  float* dw = b.sums + static_cast<std::size_t>(strip) * packed_floats(args) + c * args.taps;
  const auto step = static_cast<std::int64_t>(pair_lanes());
  std::fill_n(dw, ceil_div(n, step) * step * args.taps, 0.0F);
  alignas(64) Dz ring[kSilu ? kRingFloats : 1];
  const std::int64_t before = args.taps - 1;
  const std::int64_t r1 = std::min(args.rows, (strip + 1) * strips.rows);
  for_pieces(b.sequences, strip * strips.rows, r1,
             [&](std::int64_t s, std::int64_t start, std::int64_t length, std::int64_t p0,
                 std::int64_t p1) {
               const std::int64_t at = start * args.channels;
               const std::int64_t state = s * before * args.channels;
               Piece<kSilu, T> piece{b,
                                     {b.x + at, b.initial != nullptr ? b.initial + state : nullptr,
                                      length, args.channels, before},
                                     {b.dy + at, nullptr, length, args.channels, before},
                                     b.d_final != nullptr ? b.d_final + state : nullptr,
                                     b.dx + at,
                                     b.initial != nullptr ? b.d_initial + state : nullptr,
                                     c,
                                     static_cast<std::size_t>(n),
                                     dw,
                                     ring};
               // Whoever has a sequence's first row also has the state before it.
               piece.template run<kTaps, kStream>(p0 == 0 && b.initial != nullptr ? -before : p0,
                                                  p1);
             });
  if (b.write != Write::kCached) hwy::FlushStream();
}

template <int kTaps, bool kSilu, bool kStream, class T>
void backward_tiles(const Backward<T>& b) {
  const std::int64_t tile = backward_tile_channels(b.args);
  const std::int64_t tiles = ceil_div(b.args.channels, tile);
  const Strips strips = backward_strips(b.args);
  parallel_for(strips.count * tiles, [&](std::int64_t task) {
    backward_task<kTaps, kSilu, kStream>(b, task / tiles, strips, task % tiles * tile);
  });
}

// Sequences without a row: the state passes through unchanged, and so does its gradient.
template <class T>
void pass_through_empty(const Backward<T>& b) {
  const std::int64_t state = (b.args.taps - 1) * b.args.channels;
  const std::size_t bytes = static_cast<std::size_t>(state) * sizeof(T);
  for (std::int64_t s = 0; s < b.sequences.count; ++s) {
    if (b.sequences.start(s) != b.sequences.start(s + 1)) continue;
    T* to = b.d_initial + s * state;
    b.d_final != nullptr ? std::memcpy(to, b.d_final + s * state, bytes)
                         : std::memset(static_cast<void*>(to), 0, bytes);
  }
}

// ---- step ----

// Channels [c0, c0+n) of every sequence: one forward row each, then the state moves up by a row.
template <int kTaps, bool kSilu, class T>
void step_channels(const Args& args, const T* x, const float* w, T* y, T* state, std::int64_t c0,
                   std::size_t n) {
  const int taps = kTaps != 0 ? kTaps : static_cast<int>(args.taps);
  const std::size_t step = pair_lanes();
  for (std::int64_t b = 0; b < args.sequences; ++b) {
    T* e[kMostTaps];
    for (int k = 0; k < taps - 1; ++k) {
      e[k] = state + (b * (args.taps - 1) + k) * args.channels + c0;
    }
    e[taps - 1] = const_cast<T*>(x) + b * args.channels + c0;
    T* to = y + b * args.channels + c0;
    std::size_t i = 0;
    for (; i + step <= n; i += step) {
      forward_pair<kTaps, 1, kSilu, false, true, T>(e, w, taps, i, step, &to);
    }
    if (i < n) forward_rest<kSilu, T>(e, w, taps, i, n - i, &to);
    for (int k = 0; k < taps - 1; ++k) std::memcpy(e[k], e[k + 1], n * sizeof(T));
  }
}

template <int kTaps, class T, class W>
void step_all(const Args& args, const T* x, const W* w, T* y, T* state) {
  // Few enough that their taps fit the stack, enough that a task is worth its start.
  constexpr std::int64_t kChannels = 512;
  parallel_for(ceil_div(args.channels, kChannels), [&](std::int64_t task) {
    alignas(64) float taps[kChannels * (kTaps != 0 ? kTaps : kMostTaps)];
    const std::int64_t c = task * kChannels;
    const std::int64_t n = std::min(kChannels, args.channels - c);
    pack_taps<T>(w + c * args.taps, n, static_cast<int>(args.taps), taps);
    const auto run =
        args.silu != 0 ? step_channels<kTaps, true, T> : step_channels<kTaps, false, T>;
    run(args, x, taps, y, state, c, static_cast<std::size_t>(n));
  });
}

// ---- kernels ----

// f16 without a conversion instruction: arithmetic in registers gains nothing, and code unrolled
// around the conversions would be enormous.
template <class T>
constexpr bool kSlow = std::is_same_v<T, F16> && HWY_TARGET == HWY_SSSE3;

// Calls body with K as a constant where it pays, 3 or 4, or with 0 for any other.
template <class T, class Body>
void with_taps(std::int64_t taps, const Body& body) {
  if constexpr (!kSlow<T>) {
    switch (taps) {
      case 3: return body(std::integral_constant<int, 3>());
      case 4: return body(std::integral_constant<int, 4>());
      default: break;
    }
  }
  body(std::integral_constant<int, 0>());
}

// Calls body with two facts as constants.
template <class Body>
void with_flags(bool silu, bool stream, const Body& body) {
  if (silu) {
    stream ? body(std::true_type(), std::true_type()) : body(std::true_type(), std::false_type());
  } else {
    stream ? body(std::false_type(), std::true_type()) : body(std::false_type(), std::false_type());
  }
}

template <class T>
const float* packed(const KernelCall& call, const Args& args) {
  auto* room = static_cast<float*>(call.workspace);
  const int taps = static_cast<int>(args.taps);
  if (args.w_is_f32 != 0) {
    pack_taps<T>(call.input<float>(1), args.channels, taps, room);
  } else {
    pack_taps<T>(call.input<T>(1), args.channels, taps, room);
  }
  return room;
}

// Workspace: taps; then, in the backward, sums; then the clamped starts.
std::size_t starts_bytes(const Args& args) {
  return args.start_bytes == 0
             ? 0
             : static_cast<std::size_t>(args.sequences + 1) * sizeof(std::int64_t);
}
std::size_t forward_workspace(const void* p) {
  const auto& args = *static_cast<const Args*>(p);
  return packed_floats(args) * sizeof(float) + starts_bytes(args);
}
std::size_t backward_workspace(const void* p) {
  const auto& args = *static_cast<const Args*>(p);
  const auto parts = static_cast<std::size_t>(1 + backward_strips(args).count);
  return parts * packed_floats(args) * sizeof(float) + starts_bytes(args);
}

template <class T>
void conv1d_fwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  float* room = static_cast<float*>(call.workspace) + packed_floats(args);
  const Forward<T> f{args,
                     call.input<T>(0),
                     call.input<T>(3),
                     call.output<T>(0),
                     call.output<T>(1),
                     packed<T>(call, args),
                     sequences_of(args, call.input<void>(2), room),
                     way_to_write(args, call.output<T>(0))};
  if (args.rows != 0) {
    with_taps<T>(args.taps, [&](auto taps) {
      with_flags(args.silu != 0, f.write == Write::kStreamed,
                 [&](auto silu, auto stream) { forward_strips<taps(), silu(), stream()>(f); });
    });
  }
  if (f.final_state != nullptr) write_final_state(f);
}

template <class T>
void conv1d_bwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const std::size_t stride = packed_floats(args);
  const std::int64_t strips = backward_strips(args).count;
  float* sums = static_cast<float*>(call.workspace) + stride;
  float* room = sums + static_cast<std::size_t>(strips) * stride;
  const Backward<T> b{args,
                      call.input<T>(0),
                      call.input<T>(2),
                      call.input<T>(4),
                      call.input<T>(5),
                      call.output<T>(0),
                      call.output<T>(2),
                      packed<T>(call, args),
                      sums,
                      sequences_of(args, call.input<void>(3), room),
                      way_to_write(args, call.output<T>(0), call.output<T>(2))};
  with_taps<T>(args.taps, [&](auto taps) {
    with_flags(args.silu != 0, b.write == Write::kStreamed,
               [&](auto silu, auto stream) { backward_tiles<taps(), silu(), stream()>(b); });
  });
  if (b.d_initial != nullptr) pass_through_empty(b);
  constexpr std::int64_t kChannels = 256;
  const auto k_count = static_cast<std::size_t>(args.taps);
  parallel_for(ceil_div(args.channels, kChannels), [&](std::int64_t task) {
    const auto from = static_cast<std::size_t>(task * kChannels);
    const auto to = static_cast<std::size_t>(std::min(args.channels, (task + 1) * kChannels));
    if (args.w_is_f32 != 0) {
      reduce_taps<T>(sums, strips, stride, from, to, k_count, call.output<float>(1));
    } else {
      reduce_taps<T>(sums, strips, stride, from, to, k_count, call.output<T>(1));
    }
  });
}

template <class T>
void conv1d_step(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const T* x = call.input<T>(0);  // [B, C]
  T* y = call.output<T>(0);       // [B, C]
  T* state = call.output<T>(1);   // [B, K−1, C], read and written
  with_taps<T>(args.taps, [&](auto taps) {
    args.w_is_f32 != 0 ? step_all<taps()>(args, x, call.input<float>(1), y, state)
                       : step_all<taps()>(args, x, call.input<T>(1), y, state);
  });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string op = "conv1d_depthwise_causal_";
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, op + "fwd_" + type, conv1d_fwd<T>, forward_workspace);
  registry.add(Backend::kCpu, op + "bwd_" + type, conv1d_bwd<T>, backward_workspace);
  registry.add(Backend::kCpu, op + "step_" + type, conv1d_step<T>);
}

}  // namespace

void register_conv1d_depthwise_causal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(conv1d_depthwise_causal)
