// Threefry-2x32 with 20 rounds, and the order in which words leave it: of n words the counters (i, i + h),
// h = ⌈n/2⌉, make words i and i + h; where n is odd, the last of the first half is the first word of counter
// (h − 1, 0). About 70 integer operations a pair, of which only the additions can leave the one pipe that
// shifts and logic share: 132 multiprocessors make some 4 to 7·10¹¹ words a second.
#pragma once

#include <cstdint>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"

namespace mlxtape::cuda {

struct Threefry {
  unsigned k[3];

  __device__ explicit Threefry(const std::uint32_t* key)
      : k{key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bdaU} {}

  // (x, y): the counters, and then their two words.
  __device__ __forceinline__ void operator()(unsigned& x, unsigned& y) const {
    x += k[0];
    y += k[1];
    four<13, 15, 26, 6>(x, y, k[1], k[2] + 1);
    four<17, 29, 16, 24>(x, y, k[2], k[0] + 2);
    four<13, 15, 26, 6>(x, y, k[0], k[1] + 3);
    four<17, 29, 16, 24>(x, y, k[1], k[2] + 4);
    four<13, 15, 26, 6>(x, y, k[2], k[0] + 5);
  }

 private:
  template <int kBits>
  static __device__ __forceinline__ void round(unsigned& x, unsigned& y) {
    x += y;
    y = __funnelshift_l(y, y, kBits) ^ x;
  }
  template <int kA, int kB, int kC, int kD>
  static __device__ __forceinline__ void four(unsigned& x, unsigned& y, unsigned kx, unsigned ky) {
    round<kA>(x, y);
    round<kB>(x, y);
    round<kC>(x, y);
    round<kD>(x, y);
    x += kx;
    y += ky;
  }
};

constexpr int kWordThreads = 256;

// A thread has Fn::kEach counters, whose words become packs of 16 bytes, or one: fn.pack(at, words) and
// fn.one(at, word) are given the words from place at on; fn.start(key) is called once.
template <class Fn, bool kPacks>
__global__ void __launch_bounds__(kWordThreads)
    words_kernel(std::int64_t n, const std::uint32_t* key, Fn fn) {
  wait_turn();
  const std::int64_t pairs = n / 2, h = n - pairs;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kWordThreads + threadIdx.x;
  if (thread == 0) fn.start(key);
  const Threefry hash(key);
  if constexpr (!kPacks) {
    if (thread >= h) return;
    unsigned a = static_cast<unsigned>(thread);
    unsigned b = thread == pairs ? 0 : static_cast<unsigned>(thread + h);
    hash(a, b);
    fn.one(thread, a);
    if (thread != pairs) fn.one(thread + h, b);
  } else {
    const std::int64_t i = thread * Fn::kEach;
    if (i >= pairs) return;
    unsigned a[Fn::kEach], b[Fn::kEach];
#pragma unroll
    for (int k = 0; k < Fn::kEach; ++k) {
      a[k] = static_cast<unsigned>(i + k);
      b[k] = static_cast<unsigned>(i + h + k);
      hash(a[k], b[k]);
    }
    fn.pack(i, a);
    fn.pack(i + h, b);
  }
}

// n ≥ 1. packs: may memory be read and written in packs?
template <class Fn>
void for_words(std::int64_t n, const std::uint32_t* key, const Fn& fn, bool packs,
               cudaStream_t stream) {
  if (packs && n % (2 * Fn::kEach) == 0) {
    launch(words_kernel<Fn, true>, blocks_for(n / 2 / Fn::kEach, kWordThreads), kWordThreads, 0, 1,
           stream, n, key, fn);
  } else {
    launch(words_kernel<Fn, false>, blocks_for(n - n / 2, kWordThreads), kWordThreads, 0, 1, stream,
           n, key, fn);
  }
}

}  // namespace mlxtape::cuda
