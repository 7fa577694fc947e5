// The backward of softmax rows that are too long for registers: kept in the shared memory of a cluster.
#pragma once

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "softmax_args.h"

namespace mlxtape::ops {

namespace {

using cuda::kPack;
using cuda::kWarp;
using cuda::Pack;

constexpr int kConsumers = 512;
constexpr int kChunk = 8192;  // bytes of a slot: a pack for each consumer
constexpr int kSlots = 27;    // 221,184 of 232,448 bytes
constexpr int kBlocks = 8;    // of a cluster

struct LongRow {
  cuda::Ring<kSlots, kChunk> ring;
  float2 parts[2][kBlocks];             // of the blocks of the cluster; rows take turns
  std::uint64_t told[2];                // parts have come
  float warp_sums[kConsumers / kWarp];  // of this block
};
constexpr int kLongBytes = sizeof(LongRow);
constexpr int kLongThreads = kConsumers + kWarp;
static_assert(kLongBytes <= cuda::kSharedBytes);

// The packs of a row that this block of the cluster keeps.
struct Slice {
  std::int64_t first;
  int packs;
};
__device__ __forceinline__ Slice slice_of(std::int64_t packs) {
  const unsigned rank = cuda::cluster_rank();
  const std::int64_t first = packs * rank / kBlocks;
  return {first, static_cast<int>(packs * (rank + 1) / kBlocks - first)};
}

__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// The sum over all consumers of the cluster, in a fixed order; turn counts the calls.
__device__ __forceinline__ float sum_over_cluster(LongRow& s, float v, unsigned turn) {
  v = cuda::lanes_sum(v);
  if (threadIdx.x % kWarp == 0) s.warp_sums[threadIdx.x / kWarp] = v;
  consumers_sync();
  float mine = 0;
#pragma unroll
  for (const float sum : s.warp_sums) mine += sum;
  const unsigned side = turn % 2;
  if (threadIdx.x < kBlocks) {
    cuda::send(&s.parts[side][cuda::cluster_rank()], {mine, 0}, &s.told[side], threadIdx.x);
  }
  if (threadIdx.x == 0) cuda::barrier_arrive_expect(&s.told[side], sizeof s.parts[side]);
  cuda::barrier_wait<true>(&s.told[side], turn / 2 % 2);
  float all = 0;
#pragma unroll
  for (const float2& part : s.parts[side]) all += part.x;
  consumers_sync();  // warp_sums may be written again
  return all;
}

// Streams rows of y and dy into the ring: chunk by chunk, one of each after the other.
template <class T>
__device__ void produce(LongRow& s, const SoftmaxArgs& args, const Slice& slice, const T* y,
                        const T* dy) {
  decltype(s.ring)::At at;
  for (std::int64_t row = blockIdx.x / kBlocks; row < args.outer; row += gridDim.x / kBlocks) {
    const std::int64_t start = row * args.cols + slice.first * kPack<T>;
    for (int done = 0; done < slice.packs; done += kConsumers) {
      const unsigned bytes = min(kConsumers, slice.packs - done) * 16;
      const std::int64_t from = start + std::int64_t{done} * kPack<T>;
      s.ring.fill(at, y + from, bytes);
      at.next();
      s.ring.fill(at, dy + from, bytes);
      at.next();
    }
  }
}

template <class T>
__device__ __forceinline__ Pack<T> pack_in(const unsigned char* slot) {
  const uint4 bits = reinterpret_cast<const uint4*>(slot)[threadIdx.x];
  return {{bits.x, bits.y, bits.z, bits.w}};
}

template <class T>
__global__ void __launch_bounds__(kLongThreads, 1)
    backward_long(SoftmaxArgs args, const T* y, const T* dy, T* dx) {
  extern __shared__ __align__(128) unsigned char memory[];
  LongRow& s = *reinterpret_cast<LongRow*>(memory);
  cuda::wait_turn();
  if (threadIdx.x == 0) {
    s.ring.init(kConsumers);
    cuda::barrier_init(&s.told[0], 1);
    cuda::barrier_init(&s.told[1], 1);
    cuda::barrier_init_done();
  }
  cuda::cluster_sync();
  const Slice slice = slice_of(args.cols / kPack<T>);
  const int rank = threadIdx.x;
  if (rank >= kConsumers) {
    if (rank == kConsumers) produce(s, args, slice, y, dy);
    return;
  }
  decltype(s.ring)::At at;
  unsigned turn = 0;
  float u[kPack<T>];
  float v[kPack<T>];
  for (std::int64_t row = blockIdx.x / kBlocks; row < args.outer;
       row += gridDim.x / kBlocks, ++turn) {
    float dot = 0;
    auto again = at;
    for (int done = 0; done < slice.packs; done += kConsumers) {
      const unsigned char* y_slot = s.ring.wait(at);
      at.next();
      const unsigned char* dy_slot = s.ring.wait(at);
      at.next();
      if (done + rank >= slice.packs) continue;
      cuda::unpack(pack_in<T>(y_slot), u);
      cuda::unpack(pack_in<T>(dy_slot), v);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) dot += u[i] * v[i];
    }
    dot = sum_over_cluster(s, dot, turn);
    T* out = dx + row * args.cols + slice.first * kPack<T>;
    for (int done = 0; done < slice.packs; done += kConsumers) {
      auto dy_at = again;
      dy_at.next();
      if (done + rank < slice.packs) {
        cuda::unpack(pack_in<T>(s.ring.slot[again.slot]), u);
        cuda::unpack(pack_in<T>(s.ring.slot[dy_at.slot]), v);
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) u[i] *= v[i] - dot;
        cuda::store_pack(cuda::pack_of<T>(u), out + std::int64_t{done + rank} * kPack<T>);
      }
      s.ring.release(again);
      s.ring.release(dy_at);
      again = dy_at;
      again.next();
    }
  }
}

}  // namespace

}  // namespace mlxtape::ops
