// CPU kernels of rms_norm (formula and layout: mlxtape/ops/rms_norm.h).
//
// Rows are cut into blocks, blocks go to threads. A block walks its rows four at a time: the sums of
// four rows hide each other's latency, their reads are four streams, and one load and store of dw
// serves all four. Each group of rows is read from memory once, for the sums; the results are made
// from the copy in the cache while the next group is fetched. What would be dear to make twice (h
// rounded, dy·silu(g)) waits in scratch memory instead. A block sums its own dw; the blocks' sums
// are added at the end, in order. Bound by memory, the gated form in 16 bits also by its exponential.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rms_norm/rms_norm.cpu.cpp"
#include <hwy/foreach_target.h>

#include <cmath>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "rms_norm_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kGroup = 4;           // rows side by side
constexpr std::int64_t kMostGrouped = 8192;  // columns: 4 rows of x and dy in f32 are 256 KiB
constexpr std::int64_t kMostBlocks = 128;    // enough to share out, few enough to add up
constexpr std::int64_t kLine = 32;           // 16-bit elements of a line
constexpr std::int64_t kChunk = 1024;        // columns of dw that one task adds up
constexpr std::size_t kAhead = 2048;         // elements fetched ahead, at least

// ---- how the work is cut: by shape alone ----

struct Blocks {
  std::int64_t rows, each, count;
};

std::int64_t group_of(std::int64_t cols) { return cols <= kMostGrouped ? kGroup : 1; }

// least: the rows that make a block worth its own sums.
Blocks blocks_of(const RmsNormArgs& a, std::int64_t least) {
  const std::int64_t row_bytes = 2 * a.cols * static_cast<std::int64_t>(sizeof(float));
  std::int64_t each = std::max(ceil_div(a.rows, kMostBlocks), cpu::rows_per_task(row_bytes));
  each = ceil_div(std::max(each, least), group_of(a.cols)) * group_of(a.cols);
  return {a.rows, each, ceil_div(a.rows, each)};
}

Blocks forward_blocks(const RmsNormArgs& a) { return blocks_of(a, 1); }

// A block's dw costs about one row and a half to write and add; 64 rows make that cheap. With few
// rows it stays in the cache, and a share for every thread matters more.
Blocks backward_blocks(const RmsNormArgs& a) {
  return blocks_of(a, std::min<std::int64_t>(64, ceil_div(a.rows, 4)));
}

// Columns rounded up to whole lines: the length of a row of scratch memory.
std::int64_t padded(std::int64_t cols) { return ceil_div(cols, kLine) * kLine; }

// Scratch memory, f32: w, then in the backward pass each block's dw; one where there is no block.
std::size_t forward_workspace(const void* args) {
  const auto& a = *static_cast<const RmsNormArgs*>(args);
  return static_cast<std::size_t>(padded(a.cols)) * sizeof(float);
}

std::size_t backward_workspace(const void* args) {
  const auto& a = *static_cast<const RmsNormArgs*>(args);
  const std::int64_t rows = 1 + std::max<std::int64_t>(1, backward_blocks(a).count);
  return static_cast<std::size_t>(rows * padded(a.cols)) * sizeof(float);
}

// Calls body(block, first row, rows as a constant) for every group of rows.
template <class Body>
void for_groups(const Blocks& blocks, std::int64_t cols, const Body& body) {
  const std::int64_t group = group_of(cols);
  parallel_for(blocks.count, [&](std::int64_t block) {
    std::int64_t row = block * blocks.each;
    const std::int64_t end = std::min(blocks.rows, row + blocks.each);
    for (; group == kGroup && row + kGroup <= end; row += kGroup) {
      body(block, row, std::integral_constant<int, kGroup>());
    }
    for (; row < end; ++row) body(block, row, std::integral_constant<int, 1>());
    hwy::FlushStream();
  });
}

// ---- a row in vectors ----
//
// A vector is named by where it starts and which elements it has. Ordinary rows: All, and First for
// the rest. Rows of bf16 in whole lines: Even and Odd elements of twice as many, because a bf16 is
// widened in place in one operation and rounded in place in three, without a shuffle. The f32 arrays
// that go with such a row (w, dw, what is kept) hold the even elements first, then the odd.

struct All {};
struct First {
  std::size_t n;
};
struct Even {};
struct Odd {};

// How a kernel walks its rows, fixed when it starts.
template <bool kStreamed, bool kPaired>
struct Way {
  static constexpr bool kStream = kStreamed;  // results go past the cache
  static constexpr bool kPairs = kPaired;     // Even and Odd
};

template <class T>
HWY_INLINE VF get(DF d, const T* p, All) {
  return load(d, p);
}
template <class T>
HWY_INLINE VF get(DF d, const T* p, First first) {
  return load_n(d, p, first.n);
}
HWY_INLINE VF get(DF d, const BF16* p, Even) { return load_even(d, p); }
HWY_INLINE VF get(DF d, const BF16* p, Odd) { return load_odd(d, p); }
HWY_INLINE VF get(DF d, const float* p, Even) { return hn::LoadU(d, p); }
HWY_INLINE VF get(DF d, const float* p, Odd) { return hn::LoadU(d, p + hn::Lanes(d)); }

HWY_INLINE void put(DF d, VF v, float* p, All) { store(d, v, p); }
HWY_INLINE void put(DF d, VF v, float* p, First first) { store_n(d, v, p, first.n); }
HWY_INLINE void put(DF d, VF v, float* p, Even) { hn::StoreU(v, d, p); }
HWY_INLINE void put(DF d, VF v, float* p, Odd) { hn::StoreU(v, d, p + hn::Lanes(d)); }

template <class W, class Body>
HWY_INLINE void each_vector(DF d, std::size_t n, const Body& body) {
  if constexpr (W::kPairs) {
    for (std::size_t i = 0; i < n; i += 2 * hn::Lanes(d)) body(i, Even()), body(i, Odd());
  } else {
    for_row(
        d, n, [&](std::size_t i) HWY_ATTR { body(i, All()); },
        [&](std::size_t i, std::size_t count) HWY_ATTR { body(i, First{count}); });
  }
}

// out[i] = value(i, which)
template <class W, class T, class Value>
HWY_INLINE void write(DF d, T* out, std::size_t n, const Value& value) {
  if constexpr (W::kPairs) {
    for (std::size_t i = 0; i < n; i += 2 * hn::Lanes(d)) {
      const VF even = value(i, Even());
      store_pair<W::kStream>(d, even, value(i, Odd()), out + i);
    }
  } else {
    write_row<W::kStream>(
        d, out, n, [&](std::size_t i) HWY_ATTR { return value(i, All()); },
        [&](std::size_t i, std::size_t count) HWY_ATTR { return value(i, First{count}); });
  }
}

// v as it will be once it is stored.
template <class W, class T>
HWY_INLINE VF rounded(DF d, VF v) {
  if constexpr (sizeof(T) == sizeof(float)) return v;
  if constexpr (W::kPairs) {
    return hn::BitCast(d, hn::And(round_bf16(v), hn::Set(DU(), 0xffff0000U)));
  } else if constexpr (sizeof(T) == 2) {
    return widen(d, T(), narrow(d, T(), v));
  }
}

HWY_INLINE float inverse_root(float sum, const RmsNormArgs& a) {
  return 1 / std::sqrt(sum / a.divisor + a.eps);
}

// s·r²/divisor, in an order that does not overflow where the result does not.
HWY_INLINE float pull(float s, float r, float divisor) { return s * r / divisor * r; }

// ---- groups of kRows rows of n columns ----

template <class W, int kRows, class T>
HWY_INLINE void find_r(DF d, const T* x, std::size_t n, const RmsNormArgs& a, float* r) {
  VF sum[kRows];
  for (VF& s : sum) s = hn::Zero(d);
  each_vector<W>(d, n, [&](std::size_t i, auto part) HWY_ATTR {
    for (int k = 0; k < kRows; ++k) {
      const VF v = get(d, x + k * n + i, part);
      sum[k] = hn::MulAdd(v, v, sum[k]);
    }
  });
  for (int k = 0; k < kRows; ++k) r[k] = inverse_root(sum_lanes(d, sum[k]), a);
}

template <class W, int kRows, class T>
void forward_group(const T* x, const float* w, T* y, float* r, std::size_t n,
                   const RmsNormArgs& a) {
  const DF d;
  find_r<W, kRows>(d, x, n, a, r);
  const std::size_t ahead = std::max(kRows * n, kAhead);
  for (int k = 0; k < kRows; ++k) {
    const T* row = x + k * n;
    const VF vr = hn::Set(d, r[k]);
    write<W>(d, y + k * n, n, [&](std::size_t i, auto part) HWY_ATTR {
      hwy::Prefetch(row + i + ahead);
      return hn::Mul(hn::Mul(get(d, row + i, part), vr), get(d, w + i, part));
    });
  }
}

// kept: kRows · n, the rows of h in f32.
template <class W, int kRows, class T>
void residual_forward_group(const T* x, const T* residual, const float* w, T* y, T* h, float* r,
                            std::size_t n, const RmsNormArgs& a, float* kept) {
  const DF d;
  VF sum[kRows];
  for (int k = 0; k < kRows; ++k) {
    float* keep = kept + k * n;
    sum[k] = hn::Zero(d);
    write<W>(d, h + k * n, n, [&](std::size_t i, auto part) HWY_ATTR {
      const VF v = hn::Add(get(d, x + k * n + i, part), get(d, residual + k * n + i, part));
      const VF stored = rounded<W, T>(d, v);
      sum[k] = hn::MulAdd(stored, stored, sum[k]);
      put(d, stored, keep + i, part);
      return v;
    });
  }
  const std::size_t ahead = std::max(kRows * n, kAhead);
  for (int k = 0; k < kRows; ++k) {
    r[k] = inverse_root(sum_lanes(d, sum[k]), a);
    const float* keep = kept + k * n;
    const VF vr = hn::Set(d, r[k]);
    write<W>(d, y + k * n, n, [&](std::size_t i, auto part) HWY_ATTR {
      hwy::Prefetch(x + k * n + i + ahead);
      hwy::Prefetch(residual + k * n + i + ahead);
      return hn::Mul(hn::Mul(get(d, keep + i, part), vr), get(d, w + i, part));
    });
  }
}

template <class W, int kRows, class T>
void gated_forward_group(const T* x, const T* g, const float* w, T* y, float* r, std::size_t n,
                         const RmsNormArgs& a) {
  const DF d;
  find_r<W, kRows>(d, x, n, a, r);
  const std::size_t ahead = std::max(kRows * n, kAhead);
  for (int k = 0; k < kRows; ++k) {
    const VF vr = hn::Set(d, r[k]);
    write<W>(d, y + k * n, n, [&](std::size_t i, auto part) HWY_ATTR {
      hwy::Prefetch(x + k * n + i + ahead);
      hwy::Prefetch(g + k * n + i + ahead);
      const VF gate = get(d, g + k * n + i, part);
      const VF normed = hn::Mul(get(d, x + k * n + i, part), vr);
      return hn::Mul(hn::Mul(normed, get(d, w + i, part)),
                     hn::Mul(gate, sigmoid(d, T(), gate).value));
    });
  }
}

// dw grows by the group's part of it. With kAdd, dx = add + the gradient.
template <class W, bool kAdd, int kRows, class T>
void backward_group(const T* x, const T* dy, const T* add, const float* w, const float* r, T* dx,
                    float* dw, std::size_t n, float divisor) {
  const DF d;
  VF s[kRows], vr[kRows];
  for (int k = 0; k < kRows; ++k) s[k] = hn::Zero(d), vr[k] = plain_nan(d, hn::Set(d, r[k]));
  each_vector<W>(d, n, [&](std::size_t i, auto part) HWY_ATTR {
    const VF vw = get(d, w + i, part);
    VF vdw = get(d, dw + i, part);
    for (int k = 0; k < kRows; ++k) {
      const VF xdy = hn::Mul(get(d, x + k * n + i, part), get(d, dy + k * n + i, part));
      s[k] = hn::MulAdd(xdy, vw, s[k]);
      vdw = hn::MulAdd(xdy, vr[k], vdw);
    }
    put(d, vdw, dw + i, part);
  });
  const std::size_t ahead = std::max(kRows * n, kAhead);
  for (int k = 0; k < kRows; ++k) {
    const VF back = hn::Set(d, pull(sum_lanes(d, s[k]), hn::GetLane(vr[k]), divisor));
    write<W>(d, dx + k * n, n, [&](std::size_t i, auto part) HWY_ATTR {
      const std::size_t at = k * n + i;
      hwy::Prefetch(x + at + ahead);
      hwy::Prefetch(dy + at + ahead);
      const VF vdy = hn::Mul(get(d, dy + at, part), get(d, w + i, part));
      const VF inner = hn::NegMulAdd(get(d, x + at, part), back, vdy);
      if constexpr (kAdd) {
        hwy::Prefetch(add + at + ahead);
        return hn::MulAdd(inner, vr[k], get(d, add + at, part));
      } else {
        return hn::Mul(inner, vr[k]);
      }
    });
  }
}

// kept: kRows · n, the rows of dy·silu(g).
template <class W, int kRows, class T>
void gated_backward_group(const T* x, const T* dy, const T* g, const float* w, const float* r,
                          T* dx, T* dg, float* dw, std::size_t n, float divisor, float* kept) {
  const DF d;
  VF s[kRows], vr[kRows];
  for (int k = 0; k < kRows; ++k) {
    float* keep = kept + k * n;
    s[k] = hn::Zero(d);
    vr[k] = plain_nan(d, hn::Set(d, r[k]));
    write<W>(d, dg + k * n, n, [&](std::size_t i, auto part) HWY_ATTR {
      const VF vg = get(d, g + k * n + i, part);
      const VF vdy = get(d, dy + k * n + i, part);
      const VF vx = get(d, x + k * n + i, part);
      const VF vw = get(d, w + i, part);
      const Sigmoid gate = sigmoid(d, T(), vg);
      const VF silu = hn::Mul(vg, gate.value);
      const VF through = hn::Mul(vdy, silu);
      const VF term = hn::Mul(vx, through);
      s[k] = hn::MulAdd(term, vw, s[k]);
      put(d, hn::MulAdd(term, vr[k], get(d, dw + i, part)), dw + i, part);
      put(d, through, keep + i, part);
      const VF slope = hn::MulAdd(silu, gate.rest, gate.value);
      return hn::Mul(hn::Mul(hn::Mul(vx, vr[k]), vw), hn::Mul(vdy, slope));
    });
  }
  const std::size_t ahead = std::max(kRows * n, kAhead);
  for (int k = 0; k < kRows; ++k) {
    const float* keep = kept + k * n;
    const VF back = hn::Set(d, pull(sum_lanes(d, s[k]), hn::GetLane(vr[k]), divisor));
    write<W>(d, dx + k * n, n, [&](std::size_t i, auto part) HWY_ATTR {
      const std::size_t at = k * n + i;
      hwy::Prefetch(x + at + ahead);
      hwy::Prefetch(dy + at + ahead);
      hwy::Prefetch(g + at + ahead);
      const VF through = hn::Mul(get(d, keep + i, part), get(d, w + i, part));
      return hn::Mul(hn::NegMulAdd(get(d, x + at, part), back, through), vr[k]);
    });
  }
}

// ---- weights ----

// w as f32, in the order of the kernel's vectors: in place where it is that already, else in scratch
// memory.
template <class W, class T>
const float* weights(const KernelCall& call, const RmsNormArgs& a) {
  const bool f32 = a.weight == kRmsNormWeightF32 || sizeof(T) == sizeof(float);
  if (f32 && a.weight != kRmsNormNoWeight && !W::kPairs) return call.input<float>(1);
  const DF d;
  auto* room = static_cast<float*>(call.workspace);
  const auto n = static_cast<std::size_t>(a.cols);
  const T* w = call.input<T>(1);
  if (a.weight == kRmsNormNoWeight) {
    std::fill_n(room, n, 1.0F);
  } else if (f32) {
    const float* w32 = call.input<float>(1);
    for (std::size_t i = 0; i < n; i += 2 * hn::Lanes(d)) {
      VF even, odd;
      hn::LoadInterleaved2(d, w32 + i, even, odd);
      put(d, plain_nan(d, even), room + i, Even());
      put(d, plain_nan(d, odd), room + i, Odd());
    }
  } else {
    each_vector<W>(d, n, [&](std::size_t i, auto part) HWY_ATTR {
      put(d, get(d, w + i, part), room + i, part);
    });
  }
  return room;
}

// dw = the sum of the blocks' own; the first block's is used up.
template <class W, class T>
void add_blocks(const RmsNormArgs& a, float* dw_blocks, std::int64_t count, T* dw) {
  parallel_for(ceil_div(a.cols, kChunk), [&](std::int64_t task) {
    const DF d;
    const std::int64_t first = task * kChunk;
    const auto n = static_cast<std::size_t>(std::min(kChunk, a.cols - first));
    using Plain = Way<false, false>;
    float* sum = dw_blocks + first;
    if (count == 0) std::fill_n(sum, n, 0.0F);
    for (std::int64_t b = 1; b < count; ++b) {
      const float* more = sum + b * padded(a.cols);
      each_vector<Plain>(d, n, [&](std::size_t i, auto part) HWY_ATTR {
        put(d, hn::Add(get(d, sum + i, part), get(d, more + i, part)), sum + i, part);
      });
    }
    if constexpr (W::kPairs && sizeof(T) == sizeof(float)) {
      for (std::size_t i = 0; i < n; i += 2 * hn::Lanes(d)) {
        hn::StoreInterleaved2(get(d, sum + i, Even()), get(d, sum + i, Odd()), d, dw + first + i);
      }
    } else {
      using Ordered = Way<false, W::kPairs>;
      write<Ordered>(d, dw + first, n,
                     [&](std::size_t i, auto part) HWY_ATTR { return get(d, sum + i, part); });
    }
  });
}

template <class W, class T>
void finish_dw(const KernelCall& call, const RmsNormArgs& a, float* dw_blocks, std::int64_t count) {
  if (a.weight == kRmsNormWeightF32) add_blocks<W>(a, dw_blocks, count, call.output<float>(1));
  if (a.weight == kRmsNormWeightLikeX) add_blocks<W>(a, dw_blocks, count, call.output<T>(1));
}

// Calls fn with the Way that fits the shape. Whole lines: every row of the output starts one.
template <class T, class Fn>
void choose_way(const RmsNormArgs& a, const Fn& fn) {
  const bool large = a.rows * a.cols * static_cast<std::int64_t>(sizeof(T)) >= cpu::kStreamBytes;
  if constexpr (std::is_same_v<T, BF16>) {
    if (a.cols % kLine == 0) return large ? fn(Way<true, true>()) : fn(Way<false, true>());
  }
  large ? fn(Way<true, false>()) : fn(Way<false, false>());
}

// ---- kernels ----

template <class T>
void rms_norm_fwd(const KernelCall& call) {
  const auto& a = call.as<RmsNormArgs>();
  const auto n = static_cast<std::size_t>(a.cols);
  const T* x = call.input<T>(0);     // [R, D]
  T* y = call.output<T>(0);          // [R, D]
  float* r = call.output<float>(1);  // [R]
  choose_way<T>(a, [&](auto way) {
    using W = decltype(way);
    const float* w = weights<W, T>(call, a);  // [D]
    for_groups(forward_blocks(a), a.cols, [&](std::int64_t, std::int64_t row, auto rows) {
      const std::int64_t at = row * a.cols;
      forward_group<W, rows()>(x + at, w, y + at, r + row, n, a);
    });
  });
}

template <class T>
void rms_norm_residual_fwd(const KernelCall& call) {
  const auto& a = call.as<RmsNormArgs>();
  const auto n = static_cast<std::size_t>(a.cols);
  const T* x = call.input<T>(0);         // [R, D]
  const T* residual = call.input<T>(2);  // [R, D]
  T* y = call.output<T>(0);              // [R, D]
  T* h = call.output<T>(1);              // [R, D]
  float* r = call.output<float>(2);      // [R]
  choose_way<T>(a, [&](auto way) {
    using W = decltype(way);
    const float* w = weights<W, T>(call, a);  // [D]
    for_groups(forward_blocks(a), a.cols, [&](std::int64_t, std::int64_t row, auto rows) {
      const std::int64_t at = row * a.cols;
      residual_forward_group<W, rows()>(x + at, residual + at, w, y + at, h + at, r + row, n, a,
                                        cpu::thread_scratch(rows() * a.cols));
    });
  });
}

template <class T>
void rms_norm_gated_fwd(const KernelCall& call) {
  const auto& a = call.as<RmsNormArgs>();
  const auto n = static_cast<std::size_t>(a.cols);
  const T* x = call.input<T>(0);     // [R, D]
  const T* g = call.input<T>(2);     // [R, D]
  T* y = call.output<T>(0);          // [R, D]
  float* r = call.output<float>(1);  // [R]
  choose_way<T>(a, [&](auto way) {
    using W = decltype(way);
    const float* w = weights<W, T>(call, a);  // [D]
    for_groups(forward_blocks(a), a.cols, [&](std::int64_t, std::int64_t row, auto rows) {
      const std::int64_t at = row * a.cols;
      gated_forward_group<W, rows()>(x + at, g + at, w, y + at, r + row, n, a);
    });
  });
}

// What the backward kernels share: body(W, block's dw, first row, rows) for every group, then dw.
template <class T, class Body>
void backward(const KernelCall& call, const Body& body) {
  const auto& a = call.as<RmsNormArgs>();
  const Blocks blocks = backward_blocks(a);
  float* dw_blocks = static_cast<float*>(call.workspace) + padded(a.cols);  // [blocks, padded D]
  choose_way<T>(a, [&](auto way) {
    using W = decltype(way);
    const float* w = weights<W, T>(call, a);  // [D]
    for_groups(blocks, a.cols, [&](std::int64_t block, std::int64_t row, auto rows) {
      float* dw = dw_blocks + block * padded(a.cols);
      if (row == block * blocks.each) std::fill_n(dw, a.cols, 0.0F);
      body(way, w, dw, row, rows);
    });
    finish_dw<W, T>(call, a, dw_blocks, blocks.count);
  });
}

template <bool kAdd, class T>
void rms_norm_bwd(const KernelCall& call) {
  const std::int64_t cols = call.as<RmsNormArgs>().cols;
  const float divisor = call.as<RmsNormArgs>().divisor;
  const auto n = static_cast<std::size_t>(cols);
  const T* x = call.input<T>(0);                     // [R, D]
  const float* r = call.input<float>(2);             // [R]
  const T* dy = call.input<T>(3);                    // [R, D]
  const T* add = kAdd ? call.input<T>(4) : nullptr;  // [R, D]
  T* dx = call.output<T>(0);                         // [R, D]
  backward<T>(call, [&](auto way, const float* w, float* dw, std::int64_t row, auto rows) {
    const std::int64_t at = row * cols;
    backward_group<decltype(way), kAdd, rows()>(x + at, dy + at, kAdd ? add + at : add, w, r + row,
                                                dx + at, dw, n, divisor);
  });
}

template <class T>
void rms_norm_gated_bwd(const KernelCall& call) {
  const std::int64_t cols = call.as<RmsNormArgs>().cols;
  const float divisor = call.as<RmsNormArgs>().divisor;
  const auto n = static_cast<std::size_t>(cols);
  const T* x = call.input<T>(0);          // [R, D]
  const float* r = call.input<float>(2);  // [R]
  const T* dy = call.input<T>(3);         // [R, D]
  const T* g = call.input<T>(4);          // [R, D]
  T* dx = call.output<T>(0);              // [R, D]
  T* dg = call.output<T>(2);              // [R, D]
  backward<T>(call, [&](auto way, const float* w, float* dw, std::int64_t row, auto rows) {
    const std::int64_t at = row * cols;
    gated_backward_group<decltype(way), rows()>(x + at, dy + at, g + at, w, r + row, dx + at,
                                                dg + at, dw, n, divisor,
                                                cpu::thread_scratch(rows() * cols));
  });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  const auto add = [&](const char* name, KernelFn fn, WorkspaceFn workspace) {
    registry.add(Backend::kCpu, name + type, fn, workspace);
  };
  add("rms_norm_fwd_", rms_norm_fwd<T>, forward_workspace);
  add("rms_norm_bwd_", rms_norm_bwd<false, T>, backward_workspace);
  add("rms_norm_residual_fwd_", rms_norm_residual_fwd<T>, forward_workspace);
  add("rms_norm_residual_bwd_", rms_norm_bwd<true, T>, backward_workspace);
  add("rms_norm_gated_fwd_", rms_norm_gated_fwd<T>, forward_workspace);
  add("rms_norm_gated_bwd_", rms_norm_gated_bwd<T>, backward_workspace);
}

}  // namespace

void register_rms_norm(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(rms_norm)
