// How the CUDA kernels of conv1d_depthwise_causal see their tensors: neighbouring channels of a row,
// the sequences that rows belong to, taps, and the rows that a thread has.
#pragma once

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/fetch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "conv1d_depthwise_causal_args.h"

namespace mlxtape::ops {

using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::widen;

constexpr int kMostTaps = 16;

// ---- neighbouring channels of a row, as stored ----

template <class T, int kWide>
struct Cells;

template <class T>
struct Cells<T, 1> {
  T value;

  static __device__ Cells load(const T* p) { return {*p}; }
  __device__ void get(float (&v)[1]) const { v[0] = widen(value); }
  static __device__ void store(const float (&v)[1], T* p) { *p = narrow<T>(v[0]); }
};

template <class T>
struct alignas(4 * sizeof(T)) Cells<T, 4> {
  unsigned word[sizeof(T)];

  static __device__ Cells load(const T* p) {
    if constexpr (sizeof(T) == 4) {
      const Pack<T> pack = cuda::load_pack(p);
      return {{pack.word[0], pack.word[1], pack.word[2], pack.word[3]}};
    } else {
      const uint2 bits = __ldcs(reinterpret_cast<const uint2*>(p));
      return {{bits.x, bits.y}};
    }
  }
  // Read again by others: taps.
  static __device__ Cells load_shared(const T* p) {
    if constexpr (sizeof(T) == 4) {
      const Pack<T> pack = cuda::load_pack_shared(p);
      return {{pack.word[0], pack.word[1], pack.word[2], pack.word[3]}};
    } else {
      const uint2 bits = __ldg(reinterpret_cast<const uint2*>(p));
      return {{bits.x, bits.y}};
    }
  }
  __device__ void get(float (&v)[4]) const {
    if constexpr (sizeof(T) == 4) {
      cuda::unpack(Pack<T>{{word[0], word[1], word[2], word[3]}}, v);
    } else {
      float both[8];
      cuda::unpack(Pack<T>{{word[0], word[1], 0, 0}}, both);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = both[i];
    }
  }
  static __device__ void store(const float (&v)[4], T* p) {
    if constexpr (sizeof(T) == 4) {
      cuda::store_pack(cuda::pack_of<T>(v), p);
    } else {
      const float both[8] = {v[0], v[1], v[2], v[3]};
      const Pack<T> pack = cuda::pack_of<T>(both);
      __stcs(reinterpret_cast<uint2*>(p), make_uint2(pack.word[0], pack.word[1]));
    }
  }
};

// ---- sequences ----

struct Sequences {
  const std::int64_t* starts;  // [S+1], or null: all of one length
  std::int64_t each, count;

  __device__ std::int64_t start(std::int64_t s) const {
    return starts != nullptr ? starts[s] : s * each;
  }
  // The last sequence that begins at the row or before it.
  __device__ std::int64_t holding(std::int64_t row) const {
    if (count == 1) return 0;
    if (starts == nullptr) return row / each;
    std::int64_t low = 0;
    std::int64_t high = count;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (starts[middle] <= row ? low : high) = middle;
    }
    return low;
  }
};

// ---- taps ----

// Taps that a kernel is made for: kTaps of them, or, where not kExact, up to that many.
template <int kTaps_, bool kExact_>
struct Taps {
  static constexpr int kTaps = kTaps_;
  static constexpr bool kExact = kExact_;
  std::int64_t taps;

  __device__ bool has(int k) const { return kExact || k < taps; }
  __device__ int count() const { return kExact ? kTaps : static_cast<int>(taps); }
};

template <class T>
__device__ __forceinline__ float tap_at(const Conv1dDepthwiseCausalArgs& args, const void* w,
                                        std::int64_t c, int k) {
  const std::int64_t i = c * args.taps + k;
  return args.w_is_f32 != 0 ? static_cast<const float*>(w)[i] : widen(static_cast<const T*>(w)[i]);
}

// The taps of kWide channels, in the order of the tensor or by age: the last tap, which meets the row
// itself, first. Those of 4 channels are 4·K neighbours, which the backward reads together; in the
// forward of 16-bit numbers one by one is 15 % faster.
template <class T, bool kByAge, int kWide, class K>
__device__ __forceinline__ void load_taps(const Conv1dDepthwiseCausalArgs& args, const K& taps,
                                          const void* w, std::int64_t c,
                                          float (&out)[K::kTaps][kWide]) {
  if constexpr (kWide == 4 && K::kExact && !kByAge) {
    const auto load = [&]<class W>(const W* from) {
#pragma unroll
      for (int at = 0; at < 4 * K::kTaps; at += 4) {
        float v[4];
        Cells<W, 4>::load_shared(from + c * K::kTaps + at).get(v);
#pragma unroll
        for (int i = at; i < at + 4; ++i) {
          const int k = i % K::kTaps;
          out[k][i / K::kTaps] = v[i - at];
        }
      }
    };
    args.w_is_f32 != 0 ? load(static_cast<const float*>(w)) : load(static_cast<const T*>(w));
  } else {
#pragma unroll
    for (int k = 0; k < K::kTaps; ++k) {
      const int from = kByAge ? taps.count() - 1 - k : k;
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        out[k][i] = taps.has(k) ? tap_at<T>(args, w, c + i, from) : 0;
      }
    }
  }
}

// ---- how the work is cut ----

// A block is across · down threads: across of them share the rows of each of down strips. Blocks that
// follow each other have neighbouring channels of the same rows, so that what is under way at one time
// lies together in memory.
struct Strips {
  std::int64_t rows, count;  // of one; of all
  unsigned tiles;            // that hold the channels
  int across, down;

  std::int64_t blocks() const { return tiles * cuda::blocks_for(count, down); }
};

// Strips of one row; rows and count are to be set.
inline Strips strips_of(std::int64_t channels, int wide, int threads) {
  Strips strips{};
  const std::int64_t owners = cuda::blocks_for(channels, wide);
  strips.across = kWarp;
  while (strips.across < threads && strips.across < owners) strips.across *= 2;
  strips.down = threads / strips.across;
  strips.tiles = static_cast<unsigned>(cuda::blocks_for(owners, strips.across));
  return strips;
}

// A thread's channels and rows.
struct Place {
  std::int64_t c, strip, r0, r1;

  __device__ Place(std::int64_t rows, const Strips& strips, int wide) {
    const unsigned x = threadIdx.x % static_cast<unsigned>(strips.across);
    const unsigned y = threadIdx.x / static_cast<unsigned>(strips.across);
    c = (std::int64_t{blockIdx.x % strips.tiles} * strips.across + x) * wide;
    strip = std::int64_t{blockIdx.x / strips.tiles} * strips.down + y;
    r0 = strip * strips.rows;
    r1 = min(rows, r0 + strips.rows);
  }
};

// A sequence as one thread sees it: its channels of row p are at first + p·channels. Rows −(K−1) to
// −1 are the initial state, or zeros.
template <class T, int kWide>
struct Sequence {
  const T* first;
  const T* initial;  // or null
  std::int64_t channels, before;

  __device__ void get(std::int64_t p, float (&v)[kWide]) const {
    const T* from = nullptr;
    if (p >= 0) from = first + p * channels;
    if (p < 0 && p >= -before && initial != nullptr) from = initial + (before + p) * channels;
#pragma unroll
    for (float& value : v) value = 0;
    if (from != nullptr) Cells<T, kWide>::load(from).get(v);
  }
};

// ---- rows under way ----

// Rows of x and dy, kRows at a time, on their way before they are asked for: single channels in
// registers, for the smallest copies are of two channels, others in shared memory. There a warp
// fetches for its lanes, 16 bytes a copy: of 16-bit numbers, two rows at once.
template <class T, int kWide, int kThreads>
struct Ahead {
  static constexpr int kRows = 8;
  static constexpr int kBytes = 0;  // of shared memory, for kThreads
  Cells<T, 1> kept_x[kRows], kept_dy[kRows];

  __device__ void start(const T*, const T*, std::int64_t, int, int) const {}
  __device__ void wait(const T* x, const T* dy, std::int64_t channels, int left) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      kept_x[u] = kept_dy[u] = {};
      if (u < left) {
        kept_x[u] = Cells<T, 1>::load(x + u * channels);
        kept_dy[u] = Cells<T, 1>::load(dy + u * channels);
      }
    }
  }
  __device__ Cells<T, 1> x(int u) const { return kept_x[u]; }
  __device__ Cells<T, 1> dy(int u) const { return kept_dy[u]; }
  __device__ void next() const {}
};

template <class T, int kThreads>
struct Ahead<T, 4, kThreads> {
  using Cell = Cells<T, 4>;
  static constexpr int kRows = 16 / sizeof(T);
  static constexpr int kStages = 3;  // 96 KiB for 256 threads, of which a multiprocessor has two
  static constexpr int kBytes = kStages * 2 * kRows * kThreads * static_cast<int>(sizeof(Cell));
  static constexpr int kTogether = 16 / sizeof(Cell);  // rows of a copy
  static constexpr int kPacks = kWarp / kTogether;     // copies of a row

  const T* from_x;  // this lane's next to fetch
  const T* from_dy;
  std::int64_t channels;
  int left;  // rows to fetch, from this lane's first on
  int stage;

  static __device__ Cell* slot(int s, int array, int u) {
    extern __shared__ __align__(16) unsigned char shared[];
    return reinterpret_cast<Cell*>(shared) +
           (((threadIdx.x / kWarp * kStages + s) * 2 + array) * kRows + u) * kWarp;
  }
  __device__ void fetch() {
    const int at = threadIdx.x % kWarp * kTogether;
#pragma unroll
    for (int u = 0; u < kRows; u += kTogether) {
      cuda::fetch(slot(stage, 0, u) + at, from_x + u * channels, u < left);
      cuda::fetch(slot(stage, 1, u) + at, from_dy + u * channels, u < left);
    }
    cuda::end_batch();
    from_x += kRows * channels;
    from_dy += kRows * channels;
    left -= kRows;
  }

  // x, dy: the warp's first channel of the first row; packs: of 16 bytes that its row has. Rows of the
  // sequence before may still be on their way to where these will be.
  __device__ void start(const T* x, const T* dy, std::int64_t row_length, int rows, int packs) {
    cuda::wait_batches<0>();
    __syncwarp();
    const int row = threadIdx.x % kWarp / kPacks;
    const int pack = threadIdx.x % kPacks;
    channels = row_length;
    from_x = x + row * channels + pack * kPack<T>;
    from_dy = dy + row * channels + pack * kPack<T>;
    left = pack < packs ? rows - row : 0;
    for (stage = 0; stage < kStages; ++stage) fetch();
    stage = 0;
  }
  __device__ void wait(const T*, const T*, std::int64_t, int) const {
    cuda::wait_batches<kStages - 1>();
    __syncwarp();
  }
  __device__ Cell x(int u) const { return slot(stage, 0, u)[threadIdx.x % kWarp]; }
  __device__ Cell dy(int u) const { return slot(stage, 1, u)[threadIdx.x % kWarp]; }
  __device__ void next() {
    __syncwarp();  // all have read
    fetch();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
};

}  // namespace mlxtape::ops
