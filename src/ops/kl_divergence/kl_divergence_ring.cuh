// kl_divergence of two arrays of one type whose rows are whole packs: both rows are kept in the shared memory
// of a block or a cluster. A producer thread streams row after row into a ring of slots; the others sum
// what has come, tell the other blocks, go over it again to write the gradient and free the slots, so
// that the next row is on its way before this one is done. Bound by memory where four exponentials an
// element leave time: 16 a clock is what a multiprocessor makes, 0.7 of the 0.9 ms that 4096 rows of
// 151936 take to move.
#pragma once

#include "backends/cuda/device/ring.cuh"
#include "kl_divergence_rows.cuh"

namespace mlxtape::ops {

namespace {

constexpr int kConsumers = 512;
constexpr int kConsumerWarps = kConsumers / kWarp;
constexpr int kChunk = 8192;  // bytes of a slot: a pack for each consumer
constexpr int kSlots = 27;    // 221,184 of 232,448 bytes
constexpr int kRingThreads = kConsumers + kWarp;

template <int kBlocks>
struct RingRow {
  cuda::Ring<kSlots, kChunk> ring;
  float parts[2][kSums][kBlocks];            // of the blocks of the cluster; rows take turns
  float of_warps[2][kSums][kConsumerWarps];  // of this block
  std::uint64_t told[2];                     // parts have come
};
template <int kBlocks>
constexpr int kRingBytes = sizeof(RingRow<kBlocks>);

// The packs of a row that this block of the cluster keeps.
struct Slice {
  std::int64_t first;
  int packs;
};
template <int kBlocks>
__device__ __forceinline__ Slice slice_of(std::int64_t packs) {
  const unsigned rank = kBlocks == 1 ? 0 : cuda::cluster_rank();
  const std::int64_t first = packs * rank / kBlocks;
  return {first, static_cast<int>(packs * (rank + 1) / kBlocks - first)};
}

// Slots that a row takes in the block that has most of it; they must be there at once.
inline std::int64_t slots_for(std::int64_t packs, int blocks) {
  return 2 * cuda::blocks_for(cuda::blocks_for(packs, blocks), kConsumers);
}

__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}

// The sums of the row over all consumers of the cluster, in a fixed order; turn counts the calls. Each side's
// memory is free again after two turns: whoever is there has heard from all, who had done with it.
template <int kBlocks>
__device__ __forceinline__ Sums join_cluster(RingRow<kBlocks>& s, Sums mine, float inverse,
                                             unsigned turn) {
  const unsigned side = turn % 2;
  mine.join_lanes(inverse);
  if (threadIdx.x % kWarp == 0)
    leave(mine, s.of_warps[side], static_cast<int>(threadIdx.x) / kWarp);
  consumers_sync();
  mine = join_room(s.of_warps[side], inverse);
  if constexpr (kBlocks == 1) return mine;
  if (threadIdx.x < kBlocks) {
    const unsigned rank = cuda::cluster_rank();
    const auto tell = [&](int number, float v) {
      cuda::send(&s.parts[side][number][rank], v, &s.told[side], threadIdx.x);
    };
    tell(0, mine.m_q);
    tell(1, mine.q);
    tell(2, mine.m_p);
    tell(3, mine.p);
    tell(4, mine.cross);
  }
  if (threadIdx.x == 0) cuda::barrier_arrive_expect(&s.told[side], sizeof s.parts[side]);
  cuda::barrier_wait<true>(&s.told[side], turn / 2 % 2);
  return join_room(s.parts[side], inverse);
}

// Streams rows of q and p into the ring: chunk by chunk, one of each after the other.
template <class T, int kBlocks>
__device__ void produce(RingRow<kBlocks>& s, const Rows<T, T>& rows, const Slice& slice) {
  typename decltype(s.ring)::At at;
  const std::int64_t step = gridDim.x / kBlocks;
  std::int64_t row = blockIdx.x / kBlocks;
  float w = row < rows.args.rows ? rows.weight[row] : 0;
  while (row < rows.args.rows) {
    const float next_w = row + step < rows.args.rows ? rows.weight[row + step] : 0;
    const std::int64_t start = row * rows.args.cols + slice.first * kPack<T>;
    for (int done = 0; w != 0 && done < slice.packs; done += kConsumers) {
      const unsigned bytes = min(kConsumers, slice.packs - done) * 16;
      const std::int64_t from = start + std::int64_t{done} * kPack<T>;
      s.ring.fill(at, rows.q + from, bytes);
      at.next();
      s.ring.fill(at, rows.p + from, bytes);
      at.next();
    }
    row += step;
    w = next_w;
  }
}

template <class T>
__device__ __forceinline__ void unpack_slot(const unsigned char* slot, float (&v)[kPack<T>]) {
  const uint4 bits = reinterpret_cast<const uint4*>(slot)[threadIdx.x];
  cuda::unpack(Pack<T>{{bits.x, bits.y, bits.z, bits.w}}, v);
}

template <class T, int kBlocks, bool kGrad>
__global__ void __launch_bounds__(kRingThreads, 1) forward_ring(Rows<T, T> rows) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& s = *reinterpret_cast<RingRow<kBlocks>*>(memory);
  cuda::wait_turn();
  if (threadIdx.x == 0) {
    s.ring.init(kConsumers);
    cuda::barrier_init(&s.told[0], 1);
    cuda::barrier_init(&s.told[1], 1);
    cuda::barrier_init_done();
  }
  if constexpr (kBlocks > 1) {
    cuda::cluster_sync();
  } else {
    __syncthreads();
  }
  const KlDivergenceArgs& args = rows.args;
  const Slice slice = slice_of<kBlocks>(args.cols / kPack<T>);
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= kConsumers) {
    if (rank == kConsumers) produce(s, rows, slice);
    return;
  }
  const Exp<T, T> e(args.inverse);
  typename decltype(s.ring)::At at;
  unsigned turn = 0;
  float u[kPack<T>];
  float v[kPack<T>];
  const std::int64_t step = gridDim.x / kBlocks;
  const float scale = *rows.scale;
  for (std::int64_t row = blockIdx.x / kBlocks; row < args.rows; row += step) {
    const float w = rows.weight[row];
    T* out = kGrad ? rows.dq + row * args.cols + slice.first * kPack<T> : nullptr;
    if (w == 0) {
      for (int i = rank; kGrad && i < slice.packs; i += kConsumers) {
        cuda::store_pack(Pack<T>{}, out + std::int64_t{i} * kPack<T>);
      }
      if (rank == 0 && slice.first == 0) rows.write_loss(row, 0, {0, 1, 0, 1, 0});
      continue;
    }
    Sums sums;
    auto again = at;
    for (int done = 0; done < slice.packs; done += kConsumers) {
      const auto q_at = at;
      const unsigned char* q_slot = s.ring.wait(at);
      at.next();
      const auto p_at = at;
      const unsigned char* p_slot = s.ring.wait(at);
      at.next();
      if (done + rank < slice.packs) {
        unpack_slot<T>(q_slot, u);
        unpack_slot<T>(p_slot, v);
        sums.add(e, u, v);
      }
      if constexpr (!kGrad) {
        s.ring.release(q_at);
        s.ring.release(p_at);
      }
    }
    sums = join_cluster<kBlocks>(s, sums, args.inverse, turn++);
    if (rank == 0 && slice.first == 0) rows.write_loss(row, w, sums);
    if constexpr (kGrad) {
      const Gradient g(args, w * scale, sums.m_q, sums.q, sums.m_p, sums.p, e.kConstant);
      for (int done = 0; done < slice.packs; done += kConsumers) {
        auto p_at = again;
        p_at.next();
        if (done + rank < slice.packs) {
          unpack_slot<T>(s.ring.slot[again.slot], u);
          unpack_slot<T>(s.ring.slot[p_at.slot], v);
#pragma unroll
          for (int i = 0; i < kPack<T>; ++i) u[i] = g.at(e, u[i], v[i]);
          cuda::store_pack(cuda::pack_of<T>(u), out + std::int64_t{done + rank} * kPack<T>);
        }
        s.ring.release(again);
        s.ring.release(p_at);
        again = p_at;
        again.next();
      }
    }
  }
}

}  // namespace

}  // namespace mlxtape::ops
