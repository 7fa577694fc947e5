// The arithmetic of the CPU kernels of conv1d_depthwise_causal: everything that touches a vector.
//
// Channels come in pairs of vectors, which for bf16 are the even and the odd channels: widening then
// is one shift or one mask, and narrowing needs no shuffle. Taps and dw sums are kept in that order,
// as [pair][K][2·lanes] f32.
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "backends/cpu/device/simd-inl.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CONV1D_DEPTHWISE_CAUSAL_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CONV1D_DEPTHWISE_CAUSAL_PAIRS_INL_H_
#undef MLXTAPE_CONV1D_DEPTHWISE_CAUSAL_PAIRS_INL_H_
#else
#define MLXTAPE_CONV1D_DEPTHWISE_CAUSAL_PAIRS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr int kMostTaps = 16;
constexpr std::size_t kMostLanes = hn::MaxLanes(DF());

// ---- pairs ----

struct Pair {
  VF lo, hi;
};

struct Dz {  // f32 in the order of the pair that was stored, always whole pairs
  float value;
};

HWY_INLINE std::size_t pair_lanes() { return 2 * hn::Lanes(DF()); }

HWY_INLINE Pair load_f32(const float* p) {
  const DF d;
  return {hn::LoadU(d, p), hn::LoadU(d, p + hn::Lanes(d))};
}
HWY_INLINE void store_f32(Pair v, float* p) {
  const DF d;
  hn::StoreU(v.lo, d, p);
  hn::StoreU(v.hi, d, p + hn::Lanes(d));
}

template <class T>
HWY_INLINE Pair load_both(const T* p) {
  Pair v;
  load_pair(DF(), p, v.lo, v.hi);
  return v;
}
HWY_INLINE Pair load_both(const Dz* p) { return load_f32(&p->value); }

// kWhole: a whole pair; else the first n of its channels, the others read as 0.
template <bool kWhole, class T>
HWY_INLINE Pair get(const T* p, std::size_t n) {
  const DF d;
  if constexpr (kWhole || std::is_same_v<T, Dz>) {
    return load_both(p);
  } else if constexpr (std::is_same_v<T, BF16>) {
    HWY_ALIGN std::uint16_t lanes[2 * kMostLanes] = {};
    std::memcpy(lanes, p, n * sizeof(T));
    return load_both(reinterpret_cast<const BF16*>(lanes));
  } else {
    const std::size_t half = std::min(n, hn::Lanes(d));
    return {load_n(d, p, half), load_n(d, p + half, n - half)};
  }
}
template <bool kWhole, bool kStream, class T>
HWY_INLINE void put(Pair v, T* p, std::size_t n) {
  const DF d;
  if constexpr (kWhole) {
    store_pair<kStream>(d, v.lo, v.hi, p);
  } else if constexpr (std::is_same_v<T, BF16>) {
    HWY_ALIGN std::uint16_t lanes[2 * kMostLanes];
    store_pair<false>(d, v.lo, v.hi, reinterpret_cast<BF16*>(lanes));
    std::memcpy(static_cast<void*>(p), lanes, n * sizeof(T));
  } else {
    const std::size_t half = std::min(n, hn::Lanes(d));
    store_n(d, v.lo, p, half);
    store_n(d, v.hi, p + half, n - half);
  }
}

HWY_INLINE Pair mul(Pair a, Pair b) { return {hn::Mul(a.lo, b.lo), hn::Mul(a.hi, b.hi)}; }
HWY_INLINE Pair mul_add(Pair a, Pair b, Pair c) {
  return {hn::MulAdd(a.lo, b.lo, c.lo), hn::MulAdd(a.hi, b.hi, c.hi)};
}

// ---- silu ----

template <class T>
HWY_INLINE VF silu(VF z) {
  return hn::Mul(z, sigmoid(DF(), T(), z).value);
}
template <class T>
HWY_INLINE VF silu_slope(VF z) {
  const Sigmoid s = sigmoid(DF(), T(), z);
  return hn::MulAdd(hn::Mul(z, s.value), s.rest, s.value);
}

// ---- taps ----

// out[k][lane] = w[lane][k] for n ≤ Lanes channels, 0 for the others. NaN loses its payload, see
// round_bf16.
template <class W>
HWY_INLINE void load_taps(const W* w, std::size_t n, int taps, float* out) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  const auto k_count = static_cast<std::size_t>(taps);
  HWY_ALIGN float flat[kMostTaps * kMostLanes];
  const std::size_t count = n * k_count;
  for (std::size_t i = 0; i < lanes * k_count; i += lanes) {
    const VF v = i + lanes <= count ? load(d, w + i)
                 : i < count        ? load_n(d, w + i, count - i)
                                    : hn::Zero(d);
    hn::Store(plain_nan(d, v), d, flat + i);
  }
  if (taps == 4) {
    VF a, b, c, e;
    hn::LoadInterleaved4(d, flat, a, b, c, e);
    hn::StoreU(a, d, out);
    hn::StoreU(b, d, out + lanes);
    hn::StoreU(c, d, out + 2 * lanes);
    hn::StoreU(e, d, out + 3 * lanes);
    return;
  }
  for (std::size_t k = 0; k < k_count; ++k) {
    for (std::size_t j = 0; j < lanes; ++j) out[k * lanes + j] = flat[j * k_count + k];
  }
}

// w [C, K] as [pair][K][2·lanes], in T's order of channels.
template <class T, class W>
void pack_taps(const W* w, std::int64_t channels, int taps, float* packed) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  const auto n = static_cast<std::size_t>(channels);
  const auto k_count = static_cast<std::size_t>(taps);
  HWY_ALIGN float halves[2][kMostTaps * kMostLanes];
  for (std::size_t c = 0; c < n; c += 2 * lanes) {
    for (std::size_t half = 0; half < 2; ++half) {
      const std::size_t from = std::min(n, c + half * lanes);
      load_taps(w + from * k_count, std::min(lanes, n - from), taps, halves[half]);
    }
    for (std::size_t k = 0; k < k_count; ++k) {
      const VF lo = hn::Load(d, halves[0] + k * lanes);
      const VF hi = hn::Load(d, halves[1] + k * lanes);
      float* to = packed + c * k_count + k * 2 * lanes;
      if constexpr (std::is_same_v<T, BF16>) {
        store_f32({hn::ConcatEven(d, hi, lo), hn::ConcatOdd(d, hi, lo)}, to);
      } else {
        store_f32({lo, hi}, to);
      }
    }
  }
}

// The sums of all strips, [strip][pair][K][2·lanes], added in order, as dw [C, K].
template <class T, class W>
void reduce_taps(const float* sums, std::int64_t strips, std::size_t stride, std::size_t from,
                 std::size_t channels, std::size_t k_count, W* dw) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  HWY_ALIGN float packed[2 * kMostTaps * kMostLanes];
  HWY_ALIGN float flat[2 * kMostTaps * kMostLanes];
  for (std::size_t c = from; c < channels; c += 2 * lanes) {
    for (std::size_t i = 0; i < 2 * lanes * k_count; i += lanes) {
      VF sum = hn::LoadU(d, sums + c * k_count + i);
      for (std::int64_t s = 1; s < strips; ++s) {
        sum = hn::Add(sum,
                      hn::LoadU(d, sums + static_cast<std::size_t>(s) * stride + c * k_count + i));
      }
      hn::Store(sum, d, packed + i);
    }
    for (std::size_t j = 0; j < 2 * lanes; ++j) {
      const std::size_t place = std::is_same_v<T, BF16> ? j % 2 * lanes + j / 2 : j;
      for (std::size_t k = 0; k < k_count; ++k)
        flat[j * k_count + k] = packed[k * 2 * lanes + place];
    }
    const std::size_t n = std::min(2 * lanes, channels - c) * k_count;
    W* to = dw + c * k_count;
    for_row(
        d, n, [&](std::size_t i) HWY_ATTR { store(d, hn::LoadU(d, flat + i), to + i); },
        [&](std::size_t i, std::size_t count)
            HWY_ATTR { store_n(d, hn::LoadU(d, flat + i), to + i, count); });
  }
}

// ---- one pair of channels of a block of rows; kTaps 0: taps known at run time only ----

// z of kR rows from kR+K−1 rows e. Every z is summed from the oldest tap on, whatever kR.
template <int kTaps, int kR, bool kWhole, class T>
HWY_INLINE void convolve(const T* const* e, const float* w, int taps, std::size_t i, std::size_t n,
                         Pair (&z)[kR]) {
  const std::size_t step = pair_lanes();
  if constexpr (kTaps != 0) {
    HWY_UNROLL(16)
    for (int j = 0; j < kR + kTaps - 1; ++j) {
      const Pair x = get<kWhole>(e[j] + i, n);
      HWY_UNROLL(16)
      for (int r = 0; r < kR; ++r) {
        const int k = j - r;
        if (k < 0 || k >= kTaps) continue;
        const Pair wk = load_f32(w + i * kTaps + static_cast<std::size_t>(k) * step);
        z[r] = k == 0 ? mul(wk, x) : mul_add(wk, x, z[r]);
      }
    }
  } else {
    const float* wi = w + i * static_cast<std::size_t>(taps);
    for (int r = 0; r < kR; ++r) z[r] = mul(load_f32(wi), get<kWhole>(e[r] + i, n));
    for (int k = 1; k < taps; ++k) {
      const Pair wk = load_f32(wi + static_cast<std::size_t>(k) * step);
      for (int r = 0; r < kR; ++r) z[r] = mul_add(wk, get<kWhole>(e[r + k] + i, n), z[r]);
    }
  }
}

template <int kTaps, int kR, bool kSilu, bool kStream, bool kWhole, class T>
HWY_INLINE void forward_pair(const T* const* e, const float* w, int taps, std::size_t i,
                             std::size_t n, T* const* y) {
  Pair z[kR];
  convolve<kTaps, kR, kWhole>(e, w, taps, i, n, z);
  HWY_UNROLL(16)
  for (int r = 0; r < kR; ++r) {
    const Pair v = kSilu ? Pair{silu<T>(z[r].lo), silu<T>(z[r].hi)} : z[r];
    put<kWhole, kStream>(v, y[r] + i, n);
  }
}

// dz of kR rows with silu.
template <int kTaps, int kR, bool kWhole, class T>
HWY_INLINE void dz_pair(const T* const* e, const T* const* dy, const float* w, int taps,
                        std::size_t i, std::size_t n, Dz* const* dz) {
  Pair z[kR];
  convolve<kTaps, kR, kWhole>(e, w, taps, i, n, z);
  HWY_UNROLL(16)
  for (int r = 0; r < kR; ++r) {
    const Pair slope{silu_slope<T>(z[r].lo), silu_slope<T>(z[r].hi)};
    store_f32(mul(slope, get<kWhole>(dy[r] + i, n)), &(dz[r] + i)->value);
  }
}

// de of kR rows from kR+K−1 rows of dz, and their part of dw; rows are added to dw in order.
template <int kTaps, int kR, bool kStream, bool kWhole, class T, class D>
HWY_INLINE void backward_pair(const T* const* e, const D* const* dz, const T* add, const float* w,
                              int taps, std::size_t i, std::size_t n, T* const* de, float* dw) {
  const std::size_t step = pair_lanes();
  Pair x[kR];
  Pair g[kR] = {};
  HWY_UNROLL(16)
  for (int r = 0; r < kR; ++r) x[r] = get<kWhole>(e[r] + i, n);
  if constexpr (kTaps != 0) {
    const float* wi = w + i * kTaps;
    float* dwi = dw + i * kTaps;
    Pair s[kTaps];
    HWY_UNROLL(16)
    for (int k = 0; k < kTaps; ++k) s[k] = load_f32(dwi + static_cast<std::size_t>(k) * step);
    HWY_UNROLL(16)
    for (int j = 0; j < kR + kTaps - 1; ++j) {
      const Pair d = get<kWhole>(dz[j] + i, n);
      HWY_UNROLL(16)
      for (int r = 0; r < kR; ++r) {
        const int k = r + kTaps - 1 - j;
        if (k < 0 || k >= kTaps) continue;
        const Pair wk = load_f32(wi + static_cast<std::size_t>(k) * step);
        g[r] = j == r ? mul(wk, d) : mul_add(wk, d, g[r]);
        s[k] = mul_add(x[r], d, s[k]);
      }
    }
    HWY_UNROLL(16)
    for (int k = 0; k < kTaps; ++k) store_f32(s[k], dwi + static_cast<std::size_t>(k) * step);
  } else {
    const std::size_t block = i * static_cast<std::size_t>(taps);
    for (int k = taps - 1; k >= 0; --k) {
      const std::size_t at = block + static_cast<std::size_t>(k) * step;
      const Pair wk = load_f32(w + at);
      Pair s = load_f32(dw + at);
      for (int r = 0; r < kR; ++r) {
        const Pair d = get<kWhole>(dz[r + taps - 1 - k] + i, n);
        g[r] = k == taps - 1 ? mul(wk, d) : mul_add(wk, d, g[r]);
        s = mul_add(x[r], d, s);
      }
      store_f32(s, dw + at);
    }
  }
  if constexpr (kR == 1) {
    if (add != nullptr) {
      const Pair a = get<kWhole>(add + i, n);
      g[0] = {hn::Add(g[0].lo, a.lo), hn::Add(g[0].hi, a.hi)};
    }
  }
  HWY_UNROLL(16)
  for (int r = 0; r < kR; ++r) put<kWhole, kStream>(g[r], de[r] + i, n);
}

// The channels of one row that are left over when the pairs are done: rare, and one copy each.
template <bool kSilu, class T>
HWY_NOINLINE void forward_rest(const T* const* e, const float* w, int taps, std::size_t i,
                               std::size_t n, T* const* y) {
  forward_pair<0, 1, kSilu, false, false>(e, w, taps, i, n, y);
}
template <class T>
HWY_NOINLINE void dz_rest(const T* const* e, const T* const* dy, const float* w, int taps,
                          std::size_t i, std::size_t n, Dz* const* dz) {
  dz_pair<0, 1, false>(e, dy, w, taps, i, n, dz);
}
template <class T, class D>
HWY_NOINLINE void backward_rest(const T* const* e, const D* const* dz, const T* add, const float* w,
                                int taps, std::size_t i, std::size_t n, T* const* de, float* dw) {
  backward_pair<0, 1, false, false>(e, dz, add, w, taps, i, n, de, dw);
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
