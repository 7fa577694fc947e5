// CUDA kernels of conv1d_depthwise_causal (formula and layout: mlxtape/ops/conv1d_depthwise_causal.h).
//
// A thread owns 4 neighbouring channels (1 where rows are ragged or misaligned) and walks a strip of
// rows with the K−1 rows before in registers, so that every row is read once, but for those K−1 of
// each strip. Several rows are under way before the first is used: in the forward in registers, in
// the backward, which has none to spare, in shared memory, where a thread alone reads what it
// fetched. The backward walks with dz in a second window: at row t it makes dz[t] and, from it and
// those before, dx[t−(K−1)] and that row's part of dw, which stays in registers; the strips' dw are
// added in order by a second kernel. K = 3 and K = 4 have kernels of their own, the others share one
// for up to 16. Bound by memory.
#include <cuda_runtime.h>

#include <algorithm>

#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/fetch.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/partials.cuh"
#include "backends/cuda/device/rows.cuh"
#include "conv1d_depthwise_causal_args.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

using Args = Conv1dDepthwiseCausalArgs;
using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::widen;

constexpr int kBlock = 256;  // threads
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

// The starts as they would be if they obeyed the contract, from 0 to rows, never falling: the largest
// so far. One block; a thread carries what the threads before it found.
template <class I>
__global__ void __launch_bounds__(kBlock)
    clamp_starts(const I* from, std::int64_t sequences, std::int64_t rows, std::int64_t* to) {
  __shared__ std::int64_t largest[kBlock / kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  std::int64_t before = 0;
  for (std::int64_t base = 0; base <= sequences; base += kBlock) {
    const std::int64_t s = base + threadIdx.x;
    std::int64_t v = 0;
    if (s > 0 && s < sequences) v = min(rows, max(std::int64_t{0}, std::int64_t{from[s]}));
    if (s == sequences) v = rows;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const std::int64_t other = __shfl_up_sync(cuda::kAll, v, step);
      if (lane >= step) v = max(v, other);
    }
    if (lane == kWarp - 1) largest[warp] = v;
    __syncthreads();
    v = max(v, before);
#pragma unroll
    for (int w = 0; w < kBlock / kWarp; ++w) {
      if (w < warp) v = max(v, largest[w]);
      before = max(before, largest[w]);
    }
    __syncthreads();
    if (s <= sequences) to[s] = v;
  }
}

// ---- how the work is cut ----

// A block is across · down threads: across of them share the rows of each of down strips.
struct Strips {
  std::int64_t rows, count;  // of one; of all
  std::int64_t tiles;        // that hold the channels
  int across, down;

  std::int64_t blocks() const { return tiles * cuda::blocks_for(count, down); }
};

// wanted: blocks in all. A strip has at least 32 rows, to make up for the K−1 read twice.
Strips strips_of(const Args& args, int wide, std::int64_t wanted) {
  Strips strips{};
  const std::int64_t owners = cuda::blocks_for(args.channels, wide);
  strips.across = kWarp;
  while (strips.across < kBlock && strips.across < owners) strips.across *= 2;
  strips.down = kBlock / strips.across;
  strips.tiles = cuda::blocks_for(owners, strips.across);
  const std::int64_t many = std::max<std::int64_t>(1, wanted * strips.down / strips.tiles);
  strips.rows = cuda::blocks_for(std::max<std::int64_t>(32, cuda::blocks_for(args.rows, many)), 8);
  strips.rows *= 8;
  strips.count = cuda::blocks_for(args.rows, strips.rows);
  return strips;
}

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
__device__ __forceinline__ float tap_at(const Args& args, const void* w, std::int64_t c, int k) {
  const std::int64_t i = c * args.taps + k;
  return args.w_is_f32 != 0 ? static_cast<const float*>(w)[i] : widen(static_cast<const T*>(w)[i]);
}

// A thread's channels and rows.
template <int kWide>
struct Place {
  std::int64_t c, strip, r0, r1;
  bool exists;

  __device__ Place(const Args& args, const Strips& strips) {
    const int x = static_cast<int>(threadIdx.x) % strips.across;
    const int y = static_cast<int>(threadIdx.x) / strips.across;
    c = (blockIdx.x % strips.tiles * strips.across + x) * kWide;
    strip = blockIdx.x / strips.tiles * strips.down + y;
    r0 = strip * strips.rows;
    r1 = min(args.rows, r0 + strips.rows);
    exists = c < args.channels && r0 < args.rows;
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

// ---- forward ----

template <class T>
struct ForwardCall {
  const T* x;        // [rows, C]
  const void* w;     // [C, K]
  const T* initial;  // [S, K−1, C] or null
  T* y;              // [rows, C]
  Sequences sequences;
};

template <class T>
__device__ __forceinline__ float silu(float z) {
  return z * cuda::sigmoid<T>(z).value;
}
template <class T>
__device__ __forceinline__ float silu_slope(float z) {
  const auto [value, rest] = cuda::sigmoid<T>(z);
  return fmaf(z * value, rest, value);
}

template <class T, int kWide, class K, bool kSilu>
__global__ void __launch_bounds__(kBlock, 2)
    forward_strips(Args args, Strips strips, ForwardCall<T> f) {
  constexpr int kAhead = 16;
  constexpr int kPast = K::kTaps - 1;
  const Place<kWide> at(args, strips);
  if (!at.exists) return;
  const K taps{args.taps};
  const std::int64_t before = args.taps - 1;
  float w[K::kTaps][kWide];  // by age: w[a] meets e[t−a]
#pragma unroll
  for (int a = 0; a < K::kTaps; ++a) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      w[a][i] = taps.has(a) ? tap_at<T>(args, f.w, at.c + i, taps.count() - 1 - a) : 0;
    }
  }
  std::int64_t s = f.sequences.holding(at.r0);
  for (std::int64_t row = at.r0; row < at.r1; ++s) {
    const std::int64_t start = f.sequences.start(s);
    const std::int64_t end = min(at.r1, f.sequences.start(s + 1));
    if (end <= row) continue;  // empty
    const T* initial =
        f.initial != nullptr ? f.initial + s * before * args.channels + at.c : nullptr;
    const Sequence<T, kWide> x{f.x + start * args.channels + at.c, initial, args.channels, before};
    float e[kPast + kAhead][kWide];
#pragma unroll
    for (int j = 0; j < kPast; ++j) x.get(row - start - kPast + j, e[j]);
    for (; row < end; row += kAhead) {
      const T* from = f.x + row * args.channels + at.c;
      T* to = f.y + row * args.channels + at.c;
      const int left = static_cast<int>(min(std::int64_t{kAhead}, end - row));
      Cells<T, kWide> next[kAhead] = {};
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (u < left) next[u] = Cells<T, kWide>::load(from + u * args.channels);
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        next[u].get(e[kPast + u]);
        float z[kWide] = {};
#pragma unroll
        for (int a = K::kTaps - 1; a >= 0; --a) {
          if (!taps.has(a)) continue;
#pragma unroll
          for (int i = 0; i < kWide; ++i) z[i] = fmaf(w[a][i], e[kPast + u - a][i], z[i]);
        }
#pragma unroll
        for (int i = 0; i < kWide; ++i) z[i] = kSilu ? silu<T>(z[i]) : z[i];
        if (u < left) Cells<T, kWide>::store(z, to + u * args.channels);
      }
#pragma unroll
      for (int j = 0; j < kPast; ++j) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) e[j][i] = e[kAhead + j][i];
      }
    }
    row = end;
  }
}

// final_state [S, K−1, C], an element a thread.
template <class T>
__global__ void __launch_bounds__(kBlock)
    write_final_state(Args args, ForwardCall<T> f, T* final_state) {
  const std::int64_t before = args.taps - 1;
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= args.sequences * before * args.channels) return;
  const std::int64_t c = i % args.channels;
  const std::int64_t j = i / args.channels % before;
  const std::int64_t s = i / args.channels / before;
  const std::int64_t start = f.sequences.start(s);
  const std::int64_t p = f.sequences.start(s + 1) - start - before + j;
  if (p >= 0) {
    final_state[i] = f.x[(start + p) * args.channels + c];
  } else if (f.initial != nullptr) {
    final_state[i] = f.initial[(s * before + before + p) * args.channels + c];
  } else {
    final_state[i] = narrow<T>(0);
  }
}

// ---- backward ----

template <class T>
struct BackwardCall {
  const T* x;        // [rows, C]
  const void* w;     // [C, K]
  const T* dy;       // [rows, C]
  const T* initial;  // [S, K−1, C] or null
  const T* d_final;  // [S, K−1, C] or null
  T* dx;             // [rows, C]
  T* d_initial;      // [S, K−1, C] or null
  float* parts;      // [strips, C, K]: their dw
  Sequences sequences;
};

// Rows of x and dy, kRows at a time, on their way before they are asked for: single channels in
// registers, for the smallest copies are of two channels, others in shared memory.
template <class T, int kWide>
struct Ahead {
  static constexpr int kRows = 8;
  static constexpr int kBytes = 0;  // of shared memory
  Cells<T, 1> kept_x[kRows], kept_dy[kRows];

  __device__ void start(const T*, const T*, std::int64_t, std::int64_t) const {}
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

template <class T>
struct Ahead<T, 4> {
  static constexpr int kRows = 16 / sizeof(T);  // 96 KiB, of which a multiprocessor has two
  static constexpr int kStages = 3;
  static constexpr int kBytes =
      kStages * 2 * kRows * kBlock * static_cast<int>(sizeof(Cells<T, 4>));
  const T* from_x;  // the next to fetch
  const T* from_dy;
  std::int64_t channels, left;  // rows to fetch
  int stage;

  __device__ Cells<T, 4>* slot(int s, int array, int u) const {
    extern __shared__ __align__(16) unsigned char shared[];
    return reinterpret_cast<Cells<T, 4>*>(shared) + ((s * 2 + array) * kRows + u) * kBlock +
           threadIdx.x;
  }
  __device__ void fetch() {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      cuda::fetch<sizeof(Cells<T, 4>)>(slot(stage, 0, u), from_x + u * channels, u < left);
      cuda::fetch<sizeof(Cells<T, 4>)>(slot(stage, 1, u), from_dy + u * channels, u < left);
    }
    cuda::end_batch();
    from_x += kRows * channels;
    from_dy += kRows * channels;
    left -= kRows;
  }

  // Rows of the sequence before may still be on their way to where these will be.
  __device__ void start(const T* x, const T* dy, std::int64_t row_length, std::int64_t rows) {
    cuda::wait_batches<0>();
    from_x = x;
    from_dy = dy;
    channels = row_length;
    left = rows;
    for (stage = 0; stage < kStages; ++stage) fetch();
    stage = 0;
  }
  __device__ void wait(const T*, const T*, std::int64_t, int) const {
    cuda::wait_batches<kStages - 1>();
  }
  __device__ Cells<T, 4> x(int u) const { return *slot(stage, 0, u); }
  __device__ Cells<T, 4> dy(int u) const { return *slot(stage, 1, u); }
  __device__ void next() {
    fetch();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
};

template <class T, int kWide, class K, bool kSilu>
__global__ void __launch_bounds__(kBlock, K::kExact ? 2 : 1)
    backward_strips(Args args, Strips strips, BackwardCall<T> b) {
  constexpr int kAhead = Ahead<T, kWide>::kRows;
  constexpr int kPast = K::kTaps - 1;
  const Place<kWide> at(args, strips);
  if (!at.exists) return;
  const K taps{args.taps};
  const std::int64_t before = args.taps - 1;
  float w[K::kTaps][kWide];
  float dw[K::kTaps][kWide] = {};
#pragma unroll
  for (int k = 0; k < K::kTaps; ++k) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) w[k][i] = taps.has(k) ? tap_at<T>(args, b.w, at.c + i, k) : 0;
  }
  // By age, as in the forward.
  const auto w_of_age = [&](int a, int i) {
    if constexpr (K::kExact) return w[kPast - a][i];
    return tap_at<T>(args, b.w, at.c + i, taps.count() - 1 - a);
  };
  std::int64_t s = b.sequences.holding(at.r0);
  for (std::int64_t row = at.r0; row < at.r1; ++s) {
    const std::int64_t start = b.sequences.start(s);
    const std::int64_t next_start = b.sequences.start(s + 1);
    const std::int64_t end = min(at.r1, next_start);
    if (end <= row) continue;  // empty
    const std::int64_t length = next_start - start;
    const std::int64_t state = s * before * args.channels + at.c;
    const std::int64_t last = end - start;  // dx of positions before it
    // Whoever has a sequence's first row also has the state before it.
    const bool with_state = row == start && b.initial != nullptr;
    const std::int64_t first = with_state ? -before : row - start;
    const std::int64_t final_from = b.d_final != nullptr ? length - before : length;
    const Sequence<T, kWide> x{b.x + start * args.channels + at.c,
                               b.initial != nullptr ? b.initial + state : nullptr, args.channels,
                               before};
    const T* dy = b.dy + start * args.channels + at.c;
    float e[kPast + kAhead][kWide];        // of rows t − kPast to t + kAhead − 1
    float dz[kPast + kAhead][kWide] = {};  // of the same
#pragma unroll
    for (int j = 0; j < kPast; ++j) x.get(row - start - kPast + j, e[j]);
    std::int64_t t = row - start;
    const std::int64_t limit = min(length, last + before);  // rows that are read
    Ahead<T, kWide> ahead;
    ahead.start(x.first + t * args.channels, dy + t * args.channels, args.channels, limit - t);
    for (; t < last + before; t += kAhead) {
      const int left = static_cast<int>(min(std::int64_t{kAhead}, limit - t));
      ahead.wait(x.first + t * args.channels, dy + t * args.channels, args.channels, left);
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        float(&d)[kWide] = dz[kPast + u];
        ahead.x(u).get(e[kPast + u]);
        ahead.dy(u).get(d);
        if constexpr (kSilu) {
          float z[kWide] = {};
#pragma unroll
          for (int a = kPast; a >= 0; --a) {
            if (!taps.has(a)) continue;
#pragma unroll
            for (int i = 0; i < kWide; ++i) z[i] = fmaf(w_of_age(a, i), e[kPast + u - a][i], z[i]);
          }
#pragma unroll
          for (int i = 0; i < kWide; ++i) d[i] = u < left ? d[i] * silu_slope<T>(z[i]) : 0;
        }
        const std::int64_t p = t + u - before;
        if (p < first || p >= last) continue;
        float old[kWide];
        if constexpr (K::kExact) {
#pragma unroll
          for (int i = 0; i < kWide; ++i) old[i] = e[u][i];
        } else {
          x.get(p, old);
        }
        float de[kWide] = {};
        if (p >= final_from) {
          Cells<T, kWide>::load(b.d_final + state + (p - final_from) * args.channels).get(de);
        }
#pragma unroll
        for (int k = 0; k < K::kTaps; ++k) {
          if (!taps.has(k)) continue;
#pragma unroll
          for (int i = 0; i < kWide; ++i) {
            de[i] = fmaf(w[k][i], dz[kPast + u - k][i], de[i]);
            dw[k][i] = fmaf(old[i], dz[kPast + u - k][i], dw[k][i]);
          }
        }
        T* to = p >= 0 ? b.dx + (start + p) * args.channels + at.c
                       : b.d_initial + state + (before + p) * args.channels;
        Cells<T, kWide>::store(de, to);
      }
      ahead.next();
#pragma unroll
      for (int j = 0; j < kPast; ++j) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          e[j][i] = e[kAhead + j][i];
          dz[j][i] = dz[kAhead + j][i];
        }
      }
    }
    row = end;
  }
  cuda::wait_batches<0>();  // nothing is on its way to a block that is gone
  float* part = b.parts + (at.strip * args.channels + at.c) * args.taps;
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
#pragma unroll
    for (int k = 0; k < K::kTaps; ++k) {
      if (taps.has(k)) part[i * args.taps + k] = dw[k][i];
    }
  }
}

// Sequences without a row: the state passes through unchanged, and so does its gradient.
template <class T>
__global__ void __launch_bounds__(kBlock) pass_through_empty(Args args, BackwardCall<T> b) {
  const std::int64_t state = (args.taps - 1) * args.channels;
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= args.sequences * state) return;
  const std::int64_t s = i / state;
  if (b.sequences.start(s) != b.sequences.start(s + 1)) return;
  b.d_initial[i] = b.d_final != nullptr ? b.d_final[i] : narrow<T>(0);
}

// ---- step ----

// A channel of one sequence a thread: one forward row, and the state moves up by a row.
template <class T>
__global__ void __launch_bounds__(kBlock)
    step_channels(Args args, const T* x, const void* w, T* y, T* state) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= args.sequences * args.channels) return;
  const std::int64_t c = i % args.channels;
  const int before = static_cast<int>(args.taps) - 1;
  T* own = state + i / args.channels * before * args.channels + c;
  float z = 0;
  for (int k = 0; k <= before; ++k) {
    const T e = k < before ? own[k * args.channels] : x[i];
    z = fmaf(tap_at<T>(args, w, c, k), widen(e), z);
    if (k > 0) own[(k - 1) * args.channels] = e;
  }
  y[i] = narrow<T>(args.silu != 0 ? silu<T>(z) : z);
}

// ---- launch ----

// The starts as they are used; clamped into room.
Sequences sequences_of(const Args& args, const void* starts, void* room, cudaStream_t stream) {
  if (args.start_bytes == 0) return {nullptr, args.sequence_rows, args.sequences};
  auto* clamped = static_cast<std::int64_t*>(room);
  if (args.start_bytes == 4) {
    clamp_starts<<<1, kBlock, 0, stream>>>(static_cast<const std::int32_t*>(starts), args.sequences,
                                           args.rows, clamped);
  } else {
    clamp_starts<<<1, kBlock, 0, stream>>>(static_cast<const std::int64_t*>(starts), args.sequences,
                                           args.rows, clamped);
  }
  return {clamped, 0, args.sequences};
}

// Calls body(channels of a thread, Taps, whether silu), all but Taps as constants.
template <class Body>
void with_form(const Args& args, bool wide, const Body& body) {
  const auto with_taps = [&](auto channels, auto silu) {
    if (args.taps == 4) return body(channels, Taps<4, true>(), silu);
    if (args.taps == 3) return body(channels, Taps<3, true>(), silu);
    body(std::integral_constant<int, 1>(), Taps<kMostTaps, false>(), silu);
  };
  const auto with_silu = [&](auto channels) {
    args.silu != 0 ? with_taps(channels, std::true_type()) : with_taps(channels, std::false_type());
  };
  wide ? with_silu(std::integral_constant<int, 4>()) : with_silu(std::integral_constant<int, 1>());
}

// Four channels of every row can be read and written at once.
template <class T, class... Pointers>
bool is_wide(const Args& args, Pointers... pointers) {
  const auto aligned = [](const void* p) {
    return reinterpret_cast<std::uintptr_t>(p) % (4 * sizeof(T)) == 0;
  };
  return args.channels % 4 == 0 && (aligned(pointers) && ...);  // a null pointer is
}

unsigned blocks_of(std::int64_t elements) {
  return static_cast<unsigned>(cuda::blocks_for(elements, kBlock));
}

// Blocks in all: two waves of two a multiprocessor in the forward, one in the backward, whose strips
// each leave a dw.
constexpr std::int64_t kForwardBlocks = 4 * cuda::kMultiprocessors;
constexpr std::int64_t kBackwardBlocks = 2 * cuda::kMultiprocessors;

// Workspace: the clamped starts, then the strips' dw.
std::size_t starts_bytes(const Args& args) {
  if (args.start_bytes == 0) return 0;
  const auto bytes = static_cast<std::size_t>(args.sequences + 1) * sizeof(std::int64_t);
  return (bytes + 15) / 16 * 16;
}
std::size_t forward_workspace(const void* p) { return starts_bytes(*static_cast<const Args*>(p)); }
std::size_t backward_workspace(const void* p) {
  const auto& args = *static_cast<const Args*>(p);
  const std::int64_t strips = std::max(strips_of(args, 1, kBackwardBlocks).count,
                                       strips_of(args, 4, kBackwardBlocks).count);
  const std::int64_t floats = strips * args.channels * args.taps;
  return starts_bytes(args) + static_cast<std::size_t>(floats) * sizeof(float);
}

template <class T>
void conv1d_fwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  T* final_state = call.output<T>(1);
  const ForwardCall<T> f{call.input<T>(0), call.in[1], call.input<T>(3), call.output<T>(0),
                         sequences_of(args, call.in[2], call.workspace, stream)};
  if (args.rows != 0 && args.channels != 0) {
    with_form(args, is_wide<T>(args, f.x, f.initial, f.y), [&]<class K>(auto wide, K, auto silu) {
      const Strips strips = strips_of(args, wide(), kForwardBlocks);
      forward_strips<T, wide(), K, silu()>
          <<<static_cast<unsigned>(strips.blocks()), kBlock, 0, stream>>>(args, strips, f);
    });
  }
  const std::int64_t states = args.sequences * (args.taps - 1) * args.channels;
  if (final_state != nullptr && states != 0) {
    write_final_state<<<blocks_of(states), kBlock, 0, stream>>>(args, f, final_state);
  }
}

template <class T>
void conv1d_bwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  auto* parts = reinterpret_cast<float*>(static_cast<char*>(call.workspace) + starts_bytes(args));
  const BackwardCall<T> b{call.input<T>(0),
                          call.in[1],
                          call.input<T>(2),
                          call.input<T>(4),
                          call.input<T>(5),
                          call.output<T>(0),
                          call.output<T>(2),
                          parts,
                          sequences_of(args, call.in[3], call.workspace, stream)};
  std::int64_t count = 0;
  if (args.rows != 0) {
    with_form(args, is_wide<T>(args, b.x, b.dy, b.initial, b.d_final, b.dx, b.d_initial),
              [&]<class K>(auto wide, K, auto silu) {
                const Strips strips = strips_of(args, wide(), kBackwardBlocks);
                count = strips.count;
                cuda::launch(backward_strips<T, wide(), K, silu()>, strips.blocks(), kBlock,
                             Ahead<T, wide()>::kBytes, 1, stream, args, strips, b);
              });
  }
  const std::int64_t states = args.sequences * (args.taps - 1) * args.channels;
  if (b.d_initial != nullptr && states != 0) {
    pass_through_empty<<<blocks_of(states), kBlock, 0, stream>>>(args, b);
  }
  const std::int64_t n = args.channels * args.taps;
  if (args.w_is_f32 != 0) {
    cuda::sum_partials(parts, count, n, call.output<float>(1), stream);
  } else {
    cuda::sum_partials(parts, count, n, call.output<T>(1), stream);
  }
}

template <class T>
void conv1d_step(const KernelCall& call) {
  const auto& args = call.as<Args>();
  step_channels<<<blocks_of(args.sequences * args.channels), kBlock, 0,
                  static_cast<cudaStream_t>(call.queue)>>>(args, call.input<T>(0), call.in[1],
                                                           call.output<T>(0), call.output<T>(1));
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string op = "conv1d_depthwise_causal_";
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, op + "fwd_" + type, conv1d_fwd<T>, forward_workspace);
  registry.add(Backend::kCuda, op + "bwd_" + type, conv1d_bwd<T>, backward_workspace);
  registry.add(Backend::kCuda, op + "step_" + type, conv1d_step<T>);
}

}  // namespace

void register_conv1d_depthwise_causal_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
