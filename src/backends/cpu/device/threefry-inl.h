// Threefry-2x32 with 20 rounds, a vector of counters at a time, and the order in which words leave it.
//
// Of n words the counters (i, i + h), h = ⌈n/2⌉, make words i and i + h; where n is odd, the last of the
// first half is the first word of counter (h − 1, 0). A word depends on the key, n and its place alone,
// so that any cut into tasks gives the same words.
#include "backends/cpu/device/simd-inl.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/core/threads.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_THREEFRY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_THREEFRY_INL_H_
#undef MLXTAPE_CPU_THREEFRY_INL_H_
#else
#define MLXTAPE_CPU_THREEFRY_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {

using VU = hn::Vec<DU>;

HWY_INLINE hn::Mask<DU> at_most(VU word, std::uint32_t last) {
  return hn::Eq(hn::Min(word, hn::Set(DU(), last)), word);
}

struct Threefry {
  VU k[3];

  HWY_INLINE Threefry(std::uint32_t k0, std::uint32_t k1)
      : k{hn::Set(DU(), k0), hn::Set(DU(), k1), hn::Set(DU(), k0 ^ k1 ^ 0x1bd11bdaU)} {}

  // (x, y): the counters, and then the two words of each.
  HWY_INLINE void operator()(VU& x, VU& y) const {
    x = hn::Add(x, k[0]);
    y = hn::Add(y, k[1]);
    four<13, 15, 26, 6>(x, y, k[1], k[2], 1);
    four<17, 29, 16, 24>(x, y, k[2], k[0], 2);
    four<13, 15, 26, 6>(x, y, k[0], k[1], 3);
    four<17, 29, 16, 24>(x, y, k[1], k[2], 4);
    four<13, 15, 26, 6>(x, y, k[2], k[0], 5);
  }

 private:
  template <int kBits>
  static HWY_INLINE void round(VU& x, VU& y) {
    x = hn::Add(x, y);
    y = hn::Xor(hn::RotateRight<32 - kBits>(y), x);
  }
  template <int kA, int kB, int kC, int kD>
  static HWY_INLINE void four(VU& x, VU& y, VU kx, VU ky, std::uint32_t number) {
    round<kA>(x, y);
    round<kB>(x, y);
    round<kC>(x, y);
    round<kD>(x, y);
    x = hn::Add(x, kx);
    y = hn::Add(y, hn::Add(ky, hn::Set(DU(), number)));
  }
};

inline constexpr std::int64_t kThreefryTask = 8192;  // counters: about 10 us

// The n words of the key: fn.whole<kStream>(at, a, b) is given 2·Lanes of them from place at on, and
// fn.part(at, words, count) the count < 2·Lanes that are left over, at most Lanes at a time.
template <bool kStream, class Fn>
void for_words(const std::uint32_t* key, std::int64_t n, const Fn& fn) {
  const std::int64_t pairs = n / 2;
  const std::int64_t h = n - pairs;
  const Threefry hash(key[0], key[1]);
  const std::int64_t tasks = ceil_div(h, kThreefryTask);
  parallel_for(tasks, [&](std::int64_t task) HWY_ATTR {
    const DU du;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(du));
    const VU places = hn::Iota(du, 0);
    const auto counter = [&](std::int64_t i) HWY_ATTR {
      return hn::Add(hn::Set(du, static_cast<std::uint32_t>(i)), places);
    };
    std::int64_t i = task * kThreefryTask;
    const std::int64_t end = std::min(pairs, i + kThreefryTask);
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      VU a = counter(i), b = counter(i + h);
      VU c = counter(i + lanes), d = counter(i + lanes + h);
      hash(a, b);
      hash(c, d);
      fn.template whole<kStream>(i, a, c);
      fn.template whole<kStream>(i + h, b, d);
    }
    for (std::int64_t count; i < end; i += count) {
      count = std::min(lanes, end - i);
      VU a = counter(i), b = counter(i + h);
      hash(a, b);
      fn.part(i, a, static_cast<std::size_t>(count));
      fn.part(i + h, b, static_cast<std::size_t>(count));
    }
    if (h != pairs && task == tasks - 1) {
      VU a = counter(pairs), b = hn::Zero(du);
      hash(a, b);
      fn.part(pairs, a, 1);
    }
    if constexpr (kStream) hwy::FlushStream();
  });
}

// May whole vectors of n elements of T at out, made by for_words, go past the cache?
template <class T>
bool words_stream(const T* out, std::int64_t n, std::int64_t least_bytes) {
  const auto size = static_cast<std::int64_t>(sizeof(T));
  return n * size >= least_bytes && reinterpret_cast<std::uintptr_t>(out) % 64 == 0 &&
         (n - n / 2) * size % 64 == 0;
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
