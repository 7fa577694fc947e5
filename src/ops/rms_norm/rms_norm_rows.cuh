// How the CUDA kernels of rms_norm share out rows of whole 16-byte packs: who has which packs, what the
// threads of a row tell each other, and rows that stream through shared memory.
#pragma once

#include <algorithm>

#include "backends/cuda/device/fetch.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "rms_norm_args.h"

namespace mlxtape::ops {

namespace {

using cuda::kPack;
using cuda::kWarp;
using cuda::Pack;

// kThreads threads of each of kCluster blocks share a row, up to kPacks packs each. A block has kGroups
// groups of such threads, each with rows of its own.
template <int kThreads_, int kPacks_, int kGroups_ = 1, int kCluster_ = 1>
struct Cut {
  static constexpr int kThreads = kThreads_, kPacks = kPacks_, kGroups = kGroups_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kBlock = kThreads * kGroups;  // threads
  static constexpr int kSlots = kThreads * kPacks;   // packs of a row in one block
  static constexpr int kMost = kSlots * kCluster;    // packs of a row
  static constexpr bool kOneWarp = kThreads <= kWarp;
  static constexpr int kWarps = kOneWarp ? 1 : kThreads / kWarp;

  static __device__ int rank() { return threadIdx.x % kThreads; }
  static __device__ int group() { return threadIdx.x / kThreads; }
  static __device__ int block() { return kCluster == 1 ? 0 : blockIdx.x % kCluster; }
  // Groups of the launch before this one.
  static __device__ std::int64_t index() {
    return std::int64_t{blockIdx.x / kCluster} * kGroups + group();
  }
  static __device__ std::int64_t groups() { return std::int64_t{gridDim.x / kCluster} * kGroups; }
};

template <class T>
__device__ __forceinline__ Pack<T> pack_at(const uint4* p) {
  const uint4 bits = *p;
  return {{bits.x, bits.y, bits.z, bits.w}};
}

// The packs of a row that a block has.
template <class C>
struct Part {
  int first, packs;

  __device__ explicit Part(std::int64_t whole) {
    const int all = static_cast<int>(whole);
    const int each = (all + C::kCluster - 1) / C::kCluster;
    first = C::block() * each;
    packs = min(each, all - first);
  }
};

// The packs of a row that a thread has.
template <class T, class C>
struct Place {
  std::int64_t at;  // the first element of the first
  int packs;        // of this block, from the first on; none where there is no row

  __device__ bool has(int j) const { return j * C::kThreads < packs; }
  static __device__ int offset(int j) { return j * C::kThreads * kPack<T>; }
  __device__ Pack<T> get(const T* from, int j) const {
    if (!has(j)) return {};
    return cuda::load_pack(from + at + offset(j));
  }
  __device__ void put(T* to, int j, const Pack<T>& pack) const {
    if (has(j)) cuda::store_pack(pack, to + at + offset(j));
  }
};

template <class T, class C>
__device__ __forceinline__ Place<T, C> place_of(const RmsNormArgs& args, const Part<C>& part,
                                                std::int64_t row) {
  return {row * args.cols + std::int64_t{part.first + C::rank()} * kPack<T>,
          row < args.rows ? part.packs - C::rank() : 0};
}

// ---- columns ----

// w of a thread's j-th pack as f32; ones where there is no w. columns: place_of row 0.
template <class T, class C>
__device__ __forceinline__ void load_weight(const RmsNormArgs& args, const void* w,
                                            const Place<T, C>& columns, int j,
                                            float (&v)[kPack<T>]) {
  const std::int64_t c = columns.at + columns.offset(j);
#pragma unroll
  for (float& one : v) one = 1;
  if (!columns.has(j)) return;
  if (args.weight == kRmsNormWeightLikeX) {
    cuda::unpack(cuda::load_pack_shared(static_cast<const T*>(w) + c), v);
  } else if (args.weight == kRmsNormWeightF32) {
#pragma unroll
    for (int i = 0; i < kPack<T>; i += 4) {
      const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(w) + c + i);
      const float4 four = __ldg(from);
      v[i] = four.x;
      v[i + 1] = four.y;
      v[i + 2] = four.z;
      v[i + 3] = four.w;
    }
  }
}

// A thread's columns: their w, and their dw over the rows that it has seen.
template <class T, class C>
struct Columns {
  static constexpr int kAll = C::kSlots * kPack<T>;  // of the block
  float w[C::kPacks][kPack<T>];
  float dw[C::kPacks][kPack<T>] = {};

  __device__ Columns(const RmsNormArgs& args, const void* weights, const Part<C>& part) {
    const auto place = place_of<T>(args, part, 0);
#pragma unroll
    for (int j = 0; j < C::kPacks; ++j) load_weight(args, weights, place, j, w[j]);
  }

  // By all threads: the block's dw, the sum over its groups in order, as one row of parts [.., D]. room
  // [kGroups, kAll]: shared memory that nobody uses any more.
  __device__ void leave_dw(const RmsNormArgs& args, const Part<C>& part, float* room,
                           float* parts) const {
#pragma unroll
    for (int j = 0; j < C::kPacks; ++j) {
      float* to = room + C::group() * kAll + (C::rank() + j * C::kThreads) * kPack<T>;
#pragma unroll
      for (int i = 0; i < kPack<T>; i += 4) {
        *reinterpret_cast<float4*>(to + i) =
            make_float4(dw[j][i], dw[j][i + 1], dw[j][i + 2], dw[j][i + 3]);
      }
    }
    __syncthreads();
    parts += blockIdx.x / C::kCluster * args.cols + std::int64_t{part.first} * kPack<T>;
    for (int c = threadIdx.x; c < part.packs * kPack<T>; c += C::kBlock) {
      float sum = room[c];
#pragma unroll
      for (int g = 1; g < C::kGroups; ++g) sum += room[g * kAll + c];
      parts[c] = sum;
    }
  }
};

// What is needed only when r is known waits in shared memory, a place for each pack of each thread: g, and
// w where there are no registers for it. A thread reads what it fetched itself, so nobody waits for others.
template <class C, bool kGated>
struct Waiting {
  static constexpr bool kWeights = C::kPacks > 4;
  static constexpr int kGates = kGated ? C::kPacks : 0;
  static constexpr int kBytes = (kGates + (kWeights ? C::kPacks : 0)) * C::kBlock * 16;
  uint4* room;

  __device__ uint4* gate(int j) const { return room + threadIdx.x + j * C::kBlock; }
  __device__ uint4* weight(int j) const { return gate(kGates + j); }
};

// Stops the compiler from keeping 16-bit elements as f32 until they are needed again.
template <class T, int kPacks>
__device__ __forceinline__ void keep_packed(Pack<T> (&packs)[kPacks]) {
  if constexpr (sizeof(T) < sizeof(float)) {
#pragma unroll
    for (Pack<T>& pack : packs) {
#pragma unroll
      for (unsigned& word : pack.word) asm volatile("" : "+r"(word));
    }
  }
}

// ---- sums ----

// Where the warps that share a row leave their sums for each other, kTurns rows of each group in turn; in
// shared memory. Each waits for the sums of its row and for nothing else: with the cluster's own barrier
// a row of 32768 columns and 16 bits took 2.4 us instead of 1.5.
template <class C, int kTurns>
struct Sums {
  static constexpr int kCount = C::kWarps * C::kCluster;  // that make a row's

  float part[kTurns][C::kGroups][kCount];
  std::uint64_t told[kTurns][C::kGroups];

  // By one thread of each group, before all of the cluster meet.
  __device__ void init() {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      cuda::barrier_init(&told[t][C::group()], C::kThreads);
    }
    cuda::barrier_init_done();
  }

  // The sum of v over the threads of the turn-th row, in one order for all of them. With two turns
  // nobody still reads what is written, for all have told the row between.
  __device__ float sum(float v, unsigned turn) {
    const int lane = threadIdx.x % kWarp;
    const int warp = C::rank() / kWarp;
    float* parts = part[turn % kTurns][C::group()];
    std::uint64_t* barrier = &told[turn % kTurns][C::group()];
    v = cuda::lanes_sum(v);
    if constexpr (C::kCluster > 1) {
      if (lane < C::kCluster) {
        cuda::send(parts + C::block() * C::kWarps + warp, v, barrier, static_cast<unsigned>(lane));
      }
    } else if (lane == 0) {
      parts[warp] = v;
    }
    // Every thread arrives, not one of a warp: what it has read until now may be written over.
    if (C::kCluster > 1 && C::rank() == 0) {
      cuda::barrier_arrive_expect(barrier, kCount * sizeof(float));
    } else {
      cuda::barrier_arrive(barrier);
    }
    cuda::barrier_wait<(C::kCluster > 1)>(barrier, turn / kTurns % 2);
    float all = 0;
    if constexpr (kCount > 16) {
      static_assert(kCount % kWarp == 0);
#pragma unroll
      for (int i = 0; i < kCount; i += kWarp) all += parts[lane + i];
      all = cuda::lanes_sum(all);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) all += parts[i];
    }
    return all;
  }
};

// ---- streams ----

// The rows of a group, one after another, from kArrays tensors. One thread has whole rows copied into
// shared memory, up to kStages of them ahead; the others take them into registers from there. When a
// row's sum is known all have taken theirs, and its room is free for another.
template <class T, class C, int kArrays>
struct Stream {
  static constexpr int kStageBytes = kArrays * C::kSlots * C::kGroups * 16;
  static constexpr int kOwn = 3072;  // the barriers and the sums
  static constexpr int kStages = std::min((cuda::kSharedBytes - kOwn) / kStageBytes, 4);
  static constexpr int kBytes = kStages * kStageBytes;
  static_assert(kStages > 0);

  struct Shared {
    std::uint64_t full[kStages][C::kGroups];
    Sums<C, 2> sums;
  };
  static_assert(sizeof(Shared) <= kOwn);

  const T* const (&in)[kArrays];
  Shared& shared;
  uint4* slots;  // [kStages][kArrays][kSlots], this group's
  Part<C> part;
  std::int64_t row, rows;
  std::int64_t step;  // elements from it to the next
  Place<T, C> place;  // of the row
  unsigned turn = 0;
  cuda::Cursor<kStages> stage;

  // By all threads; they meet before the first row is taken.
  __device__ Stream(const RmsNormArgs& args, const T* const (&tensors)[kArrays], void* room,
                    Shared& own)
      : in(tensors),
        shared(own),
        slots(static_cast<uint4*>(room) + C::group() * (kStages * kArrays * C::kSlots)),
        part(args.cols / kPack<T>),
        row(C::index()),
        rows(args.rows),
        step(C::groups() * args.cols),
        place(place_of<T>(args, part, row)) {
    if (C::rank() != 0) return;
    shared.sums.init();
#pragma unroll
    for (int s = 0; s < kStages; ++s) cuda::barrier_init(&shared.full[s][C::group()], 1);
    cuda::barrier_init_done();
    for (int s = 0; s < kStages; ++s) fill(s, s);
  }
  // By the first thread, whose place is where the row begins.
  __device__ void fill(int slot, int ahead) {
    if (row + ahead * C::groups() >= rows) return;
    const unsigned bytes = part.packs * 16;
    std::uint64_t* full = &shared.full[slot][C::group()];
    cuda::barrier_arrive_expect(full, kArrays * bytes);
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
      cuda::bulk_copy(slots + (slot * kArrays + a) * C::kSlots, in[a] + place.at + ahead * step,
                      bytes, full);
    }
  }

  __device__ bool more() const { return row < rows; }
  __device__ void next() {
    row += C::groups();
    place.at += step;
    stage.next();
    ++turn;
  }
  // Zeros where there is no pack.
  __device__ void take(Pack<T> (&to)[kArrays][C::kPacks]) {
    cuda::barrier_wait(&shared.full[stage.slot][C::group()], stage.phase);
#pragma unroll
    for (int a = 0; a < kArrays; ++a) {
      const uint4* from = slots + (stage.slot * kArrays + a) * C::kSlots + C::rank();
#pragma unroll
      for (int j = 0; j < C::kPacks; ++j) {
        to[a][j] = {};
        if (place.has(j)) to[a][j] = pack_at<T>(from + j * C::kThreads);
      }
    }
  }
  // Of the row that was taken.
  __device__ float sum(float v) {
    const float all = shared.sums.sum(v, turn);
    if (C::rank() == 0) fill(stage.slot, kStages);
    return all;
  }
};

// ---- launches ----

// Blocks of a launch of which at_once blocks, or clusters, run at once: so many, or fewer where the
// busiest group has no more rows for it. They leave fewer sums to add: 16384 rows take 32 turns of 128
// blocks with 4 groups, and as many of 132.
template <class C>
std::int64_t blocks_of(std::int64_t rows, std::int64_t at_once) {
  const std::int64_t turns = cuda::blocks_for(rows, at_once * C::kGroups);
  return cuda::blocks_for(rows, std::max<std::int64_t>(turns, 1) * C::kGroups) * C::kCluster;
}

// Calls body with the first of the cuts that holds a row of so many packs; false where none does.
template <class... Cuts, class Body>
bool with_cut(std::int64_t packs, const Body& body) {
  const auto fits = [&]<class C>(C cut) {
    if (packs > C::kMost) return false;
    body(cut);
    return true;
  };
  return (fits(Cuts()) || ...);
}

}  // namespace

}  // namespace mlxtape::ops
