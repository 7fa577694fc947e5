// Products whose inner axis is short, 8 or 16, added to what is there: the second product of a LoRA adapter, and its part of
// the gradient of x. They only read and write y, while cuBLASLt's tiles reach half of the memory's speed (on an H200
// 8192 x 3072 x 8 in bf16 takes 45 us, reading and writing y 24).
//
// A thread has a pack of 8 columns, whose part of b it keeps in registers, and goes down the rows of its block, eight at
// a time; a row of a is the same for the whole warp. Sums over k in order, in f32, then added to y and rounded once.
#pragma once

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "matmul_args.h"

namespace mlxtape::ops {

constexpr int kShortThreads = 256, kShortLanes = 128, kShortRows = 32, kShortAtOnce = 8;

// Eight columns of b [kInner, n]: widened where registers are enough for it.
template <class T, int kInner>
struct ShortColumns {
  static constexpr bool kWide = kInner == 8;
  float wide[kWide ? kInner : 1][8];
  cuda::Pack<T> packs[kWide ? 1 : kInner];

  __device__ __forceinline__ void set(int k, const float (&v)[8]) {
    if constexpr (kWide) {
#pragma unroll
      for (int c = 0; c < 8; ++c) wide[k][c] = v[c];
    } else {
      packs[k] = cuda::pack_of<T>(v);
    }
  }
  __device__ __forceinline__ void get(int k, float (&v)[8]) const {
    if constexpr (kWide) {
#pragma unroll
      for (int c = 0; c < 8; ++c) v[c] = wide[k][c];
    } else {
      cuda::unpack(packs[k], v);
    }
  }
};

// kTurned: b is stored as [n, kInner]. b_step: from one of its stored rows to the next.
template <class T, int kInner, bool kTurned>
__global__ void __launch_bounds__(kShortThreads)
    add_short(std::int64_t m, std::int64_t n, const T* a, std::int64_t a_row, const T* b,
              std::int64_t b_step, const T* added, T* y) {
  cuda::wait_turn();
  const auto tiles = static_cast<unsigned>((n / 8 + kShortLanes - 1) / kShortLanes);
  const std::int64_t col =
      (std::int64_t{blockIdx.x % tiles} * kShortLanes + threadIdx.x % kShortLanes) * 8;
  if (col >= n) return;
  ShortColumns<T, kInner> columns;
  if constexpr (kTurned) {
    float turned[kInner][8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
      for (int part = 0; part < kInner / 8; ++part) {
        float v[8];
        cuda::unpack(cuda::load_pack_shared(b + (col + c) * b_step + part * 8), v);
#pragma unroll
        for (int k = 0; k < 8; ++k) turned[part * 8 + k][c] = v[k];
      }
    }
#pragma unroll
    for (int k = 0; k < kInner; ++k) columns.set(k, turned[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kInner; ++k) {
      float v[8];
      cuda::unpack(cuda::load_pack_shared(b + k * b_step + col), v);
      columns.set(k, v);
    }
  }
  constexpr int kGroups = kShortThreads / kShortLanes;
  const std::int64_t first = std::int64_t{blockIdx.x / tiles} * kShortRows;
  const std::int64_t stop = min(first + kShortRows, m);
  for (std::int64_t row = first + threadIdx.x / kShortLanes; row < stop;
       row += kGroups * kShortAtOnce) {
    cuda::Pack<T> old[kShortAtOnce];
#pragma unroll
    for (int i = 0; i < kShortAtOnce; ++i) {
      const std::int64_t r = row + i * kGroups;
      if (r >= stop) continue;
      const uint4 bits = *reinterpret_cast<const uint4*>(added + r * n + col);  // perhaps y itself
      old[i] = {{bits.x, bits.y, bits.z, bits.w}};
    }
#pragma unroll
    for (int i = 0; i < kShortAtOnce; ++i) {
      const std::int64_t r = row + i * kGroups;
      if (r >= stop) continue;
      float sum[8] = {};
#pragma unroll
      for (int part = 0; part < kInner / 8; ++part) {
        float factor[8];
        cuda::unpack(cuda::load_pack_shared(a + r * a_row + part * 8), factor);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          float v[8];
          columns.get(part * 8 + k, v);
#pragma unroll
          for (int c = 0; c < 8; ++c) sum[c] = fmaf(factor[k], v[c], sum[c]);
        }
      }
      float before[8];
      cuda::unpack(old[i], before);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] += before[c];
      cuda::store_pack(cuda::pack_of<T>(sum), y + r * n + col);
    }
  }
}

// y = a·b + added for 16-bit numbers; false where the shapes or addresses are not for it.
template <class T>
bool add_short_product(const MatmulArgs& args, const T* a, const T* b, const T* added, T* y,
                       cudaStream_t stream) {
  constexpr std::int64_t kFewest = std::int64_t{1} << 16;  // elements of y
  const bool turned = args.b_row == 1;
  const std::int64_t b_step = turned ? args.b_col : args.b_row;
  const auto whole = [](std::int64_t step) {
    return step % 8 == 0;
  };
  if ((args.k != 8 && args.k != 16) || args.batch_axes != 0 || args.m * args.n < kFewest ||
      args.a_col != 1 || !whole(args.n) || !whole(args.a_row) || !whole(b_step)) {
    return false;
  }
  for (const T* p : {a, b, added, static_cast<const T*>(y)}) {
    if (!cuda::is_aligned(p)) return false;
  }
  const std::int64_t blocks = cuda::blocks_for(args.n / 8, kShortLanes) *
                              cuda::blocks_for(args.m, std::int64_t{kShortRows});
  const auto run = [&](auto kernel) {
    cuda::launch(kernel, blocks, kShortThreads, 0, 1, stream, args.m, args.n, a, args.a_row, b,
                 b_step, added, y);
  };
  if (args.k == 8) {
    turned ? run(add_short<T, 8, true>) : run(add_short<T, 8, false>);
  } else {
    turned ? run(add_short<T, 16, true>) : run(add_short<T, 16, false>);
  }
  return true;
}

}  // namespace mlxtape::ops
