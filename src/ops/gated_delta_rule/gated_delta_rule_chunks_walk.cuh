// gated_delta_rule in chunks: the walk over the states.
#pragma once

#include "gated_delta_rule_chunks_tiles.cuh"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops::chunks {

// ---- the walk over the chunks; a warp has 16 value channels of a head ----

// All is turned: Sᵀ [16, 128] stays in a warp's registers, and what a product of the tensor cores leaves there is, made
// 16 bits, the first factor of the next one. So no warp waits for another, only for what one more warp fetches.
template <class Stage, int kCount, int kGroups>
struct alignas(128) Stages {
  Stage stage[kCount];
  std::uint64_t full[kCount], empty[kCount];

  // By one thread. arrivals: the producer's on full.
  __device__ void init(unsigned arrivals) {
    for (int i = 0; i < kCount; ++i) {
      cuda::barrier_init(&full[i], arrivals);
      cuda::barrier_init(&empty[i], kGroups * cuda::kWarp);
    }
    cuda::barrier_init_done();
  }
};

// The first factors that a warp's Sᵀ or its gradient is: 16 keys from 16·l on.
template <class T>
__device__ __forceinline__ void as_factor(const float (&s)[16][4], int l, unsigned (&a)[4]) {
  a[0] = cuda::two_of<T>(s[2 * l][0], s[2 * l][1]);
  a[1] = cuda::two_of<T>(s[2 * l][2], s[2 * l][3]);
  a[2] = cuda::two_of<T>(s[2 * l + 1][0], s[2 * l + 1][1]);
  a[3] = cuda::two_of<T>(s[2 * l + 1][2], s[2 * l + 1][3]);
}
// Into a warp's rows [16][128] of a tile.
template <class T>
__device__ __forceinline__ void lay_factor(const Lane& lane, int l, const unsigned (&a)[4],
                                           T* rows) {
  T* to = rows + place<kWidth>(lane.g, l * 16 + 2 * lane.t4);
  T* beside = rows + place<kWidth>(lane.g, l * 16 + 8 + 2 * lane.t4);
  *reinterpret_cast<unsigned*>(to) = a[0];
  *reinterpret_cast<unsigned*>(to + 8 * kWidth) = a[1];
  *reinterpret_cast<unsigned*>(beside) = a[2];
  *reinterpret_cast<unsigned*>(beside + 8 * kWidth) = a[3];
}

// A warp's Sᵀ from and to states [128 values][128 keys] of f32.
__device__ __forceinline__ void load_state(const Lane& lane, const float* from, float (&s)[16][4]) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0;
    if (from == nullptr) continue;
    const float* at = from + lane.g * kWidth + n * 8 + 2 * lane.t4;
    s[n][0] = at[0];
    s[n][1] = at[1];
    s[n][2] = at[8 * kWidth];
    s[n][3] = at[8 * kWidth + 1];
  }
}
__device__ __forceinline__ void store_state(const Lane& lane, const float (&s)[16][4], float* to) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    float* at = to + lane.g * kWidth + n * 8 + 2 * lane.t4;
    at[0] = s[n][0];
    at[1] = s[n][1];
    at[8 * kWidth] = s[n][2];
    at[8 * kWidth + 1] = s[n][3];
  }
}

template <class T, int kGroups, bool kKeep>
struct WalkStage {
  alignas(128) T w[kRows], k[kRows];
  T u[kChunk * kGroups * 16];
  Numbers numbers;
  T q[kRows], m[kPairs];
};
template <class T, int kGroups>
struct WalkStage<T, kGroups, true> {
  alignas(128) T w[kRows], k[kRows];
  T u[kChunk * kGroups * 16];
  Numbers numbers;
};

template <class T, int kGroups, bool kKeep>
struct WalkRoom {
  static constexpr int kStages = 3;
  Stages<WalkStage<T, kGroups, kKeep>, kStages, kGroups> ring;
  alignas(128) T out[kGroups][kKeep ? 16 * kWidth : 16 * kChunk];  // Sᵀ of a warp, or its Yᵀ
  alignas(128) T u[kKeep ? kGroups : 1][kKeep ? 16 * kChunk : 8];
};

// kKeep: leaves the states and U for the gradient, and no y.
template <class T, int kGroups, bool kKeep>
__global__ void __launch_bounds__((kGroups + 1) * cuda::kWarp, 1)
    walk(GatedDeltaRuleArgs args, Made<T> made, const float* initial, T* y, float* final_state) {
  cuda::wait_turn();
  extern __shared__ __align__(128) char memory[];
  using Room = WalkRoom<T, kGroups, kKeep>;
  auto& room = *reinterpret_cast<Room*>(memory);
  constexpr int kStages = Room::kStages, kSlice = kGroups * 16, kSlices = kWidth / kSlice;
  const auto heads = static_cast<unsigned>(args.value_heads);
  const unsigned slice = blockIdx.x % kSlices, head = blockIdx.x / kSlices % heads;
  const std::int64_t sequence = blockIdx.x / kSlices / heads;
  const unsigned key_head = head / (heads / static_cast<unsigned>(args.key_heads));
  const auto chunks = static_cast<int>((args.sequence_tokens + kChunk - 1) / kChunk);
  const int warp = threadIdx.x / cuda::kWarp;
  if (threadIdx.x == 0) room.ring.init(1);
  __syncthreads();
  cuda::Cursor<kStages> at;

  if (warp == kGroups) {
    if (threadIdx.x % cuda::kWarp != 0) return;
    for (int chunk = 0; chunk < chunks; ++chunk, at.next()) {
      auto& stage = room.ring.stage[at.slot];
      const std::int64_t pair = (sequence * chunks + chunk) * args.value_heads + head;
      const std::int64_t key_pair = (sequence * chunks + chunk) * args.key_heads + key_head;
      std::uint64_t* full = &room.ring.full[at.slot];
      cuda::barrier_wait(&room.ring.empty[at.slot], at.phase ^ 1U);
      cuda::barrier_arrive_expect(full, sizeof(stage.w) + sizeof(stage.k) + sizeof(stage.u) +
                                            sizeof(Numbers) +
                                            (kKeep ? 0 : (kRows + kPairs) * sizeof(T)));
      cuda::bulk_copy(stage.w, made.w + pair * kRows, sizeof(stage.w), full);
      cuda::bulk_copy(stage.k, made.k + key_pair * kRows, sizeof(stage.k), full);
      cuda::bulk_copy(stage.u, made.u + pair * kRows + slice * kChunk * kSlice, sizeof(stage.u),
                      full);
      cuda::bulk_copy(&stage.numbers, made.numbers + pair, sizeof(Numbers), full);
      if constexpr (!kKeep) {
        cuda::bulk_copy(stage.q, made.q + key_pair * kRows, sizeof(stage.q), full);
        cuda::bulk_copy(stage.m, made.m + pair * kPairs, sizeof(stage.m), full);
      }
    }
    return;
  }

  const Lane lane;
  const int t4 = lane.t4, thread = threadIdx.x % cuda::kWarp;
  const std::int64_t state_at =
      ((sequence * args.value_heads + head) * kWidth + slice * kSlice + warp * 16) * kWidth;
  float s[16][4];
  load_state(lane, initial == nullptr ? nullptr : initial + state_at, s);
  for (int chunk = 0; chunk < chunks; ++chunk, at.next()) {
    const auto& in = room.ring.stage[at.slot];
    const std::int64_t pair = (sequence * chunks + chunk) * args.value_heads + head;
    if constexpr (kKeep) {
      if (thread == 0) wait_stores_read();
      __syncwarp();
    }
    cuda::barrier_wait(&room.ring.full[at.slot], at.phase);
    // Sᵀ·Wᵀ, and Sᵀ·Qᵀ.
    float x[8][4] = {}, made_y[kKeep ? 1 : 8][4] = {};
    {
      const Tile<kWidth> w(in.w);
#pragma unroll
      for (int l = 0; l < 8; ++l) {
        unsigned a[4], b[4][4];
        as_factor<T>(s, l, a);
#pragma unroll
        for (int n = 0; n < 4; ++n) w.b_turned(b[n], lane, l * 16, n * 16);
        if constexpr (kKeep) lay_factor(lane, l, a, room.out[warp]);
#pragma unroll
        for (int n = 0; n < 4; ++n) multiply_add_two<T>(x[2 * n], x[2 * n + 1], a, b[n]);
        if constexpr (!kKeep) {
          const Tile<kWidth> q(in.q);
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            unsigned c[4];
            q.b_turned(c, lane, l * 16, n * 16);
            multiply_add_two<T>(made_y[2 * n], made_y[2 * n + 1], a, c);
          }
        }
      }
    }
    // Uᵀ = U₀ᵀ − Sᵀ·Wᵀ, as it is and as it has faded behind the chunk.
    unsigned u[4][4], faded[4][4];
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      unsigned before[4];
      Tile<kSlice>(in.u).a_turned(before, lane, warp * 16, l * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * l + i / 2;
        const float2 value = cuda::both_of<T>(before[i]);
        const float2 f = *reinterpret_cast<const float2*>(in.numbers.f + n * 8 + 2 * t4);
        const float one = value.x - x[n][i % 2 * 2], other = value.y - x[n][i % 2 * 2 + 1];
        u[l][i] = cuda::two_of<T>(one, other);
        faded[l][i] = cuda::two_of<T>(f.x * one, f.y * other);
      }
    }
    // Sᵀ = e_C·Sᵀ + (A_C∘U)ᵀ·K
    {
      const float last = in.numbers.e[kChunk - 1];
      const Tile<kWidth> k(in.k);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= last;
      }
#pragma unroll
      for (int l = 0; l < 4; ++l) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          unsigned b[4];
          k.b(b, lane, l * 16, n * 16);
          multiply_add_two<T>(s[2 * n], s[2 * n + 1], faded[l], b);
        }
      }
    }
    if constexpr (kKeep) {
#pragma unroll
      for (int l = 0; l < 4; ++l) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          T* to = room.u[warp] + place<kChunk>(lane.g, (2 * l + i / 2) * 8 + 2 * t4);
          *reinterpret_cast<unsigned*>(to + i % 2 * 8 * kChunk) = u[l][i];
        }
      }
      publish_shared();
      __syncwarp();
      if (thread == 0) {
        const int channel = static_cast<int>(slice) * kSlice + warp * 16;
        bulk_store(made.states + pair * kState + channel * kWidth, room.out[warp],
                   16 * kWidth * sizeof(T));
        bulk_store(made.u + pair * kRows + channel * kChunk, room.u[warp], 16 * kChunk * sizeof(T));
        commit_stores();
      }
    } else {
      // Yᵀ = (e∘(Q·S))ᵀ + Uᵀ·Mᵀ
      const Tile<kChunk> m(in.m);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 e = *reinterpret_cast<const float2*>(in.numbers.e + n * 8 + 2 * t4);
#pragma unroll
        for (int i = 0; i < 4; ++i) made_y[n][i] *= i % 2 == 0 ? e.x : e.y;
      }
#pragma unroll
      for (int l = 0; l < 4; ++l) {
#pragma unroll
        for (int n = l; n < 4; ++n) {
          unsigned b[4];
          m.b_turned(b, lane, l * 16, n * 16);
          multiply_add_two<T>(made_y[2 * n], made_y[2 * n + 1], u[l], b);
        }
      }
      // Turned in shared memory, [64 tokens][16 channels]: a row's two pieces change places every four rows.
      const unsigned out = cuda::shared_address(room.out[warp]);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        const int t = n * 8 + thread / 16 * 8 + thread % 8;
        const unsigned r[4] = {cuda::two_of<T>(made_y[n][0], made_y[n][1]),
                               cuda::two_of<T>(made_y[n][2], made_y[n][3]),
                               cuda::two_of<T>(made_y[n + 1][0], made_y[n + 1][1]),
                               cuda::two_of<T>(made_y[n + 1][2], made_y[n + 1][3])};
        cuda::store_turned_at(out + t * 32 + ((thread / 8 % 2) ^ (t / 4 % 2)) * 16, r);
      }
      __syncwarp();
#pragma unroll
      for (int i = thread; i < kChunk * 2; i += cuda::kWarp) {
        const int t = i / 2, piece = i % 2;
        const std::int64_t token = std::int64_t{chunk} * kChunk + t;
        const uint4 bits =
            reinterpret_cast<const uint4*>(room.out[warp])[t * 2 + (piece ^ (t / 4 % 2))];
        if (token < args.sequence_tokens) {
          *reinterpret_cast<uint4*>(
              y + ((sequence * args.sequence_tokens + token) * args.value_heads + head) * kWidth +
              slice * kSlice + warp * 16 + piece * 8) = bits;
        }
      }
    }
    __syncwarp();
    cuda::barrier_arrive(&room.ring.empty[at.slot]);
  }
  if constexpr (kKeep) {
    if (thread == 0) wait_stores();
  }
  if (final_state != nullptr) store_state(lane, s, final_state + state_at);
}

template <class T, int kGroups, bool kKeep>
void launch_walk(const KernelCall& call, const GatedDeltaRuleArgs& args, const Made<T>& made, T* y,
                 float* final_state) {
  cuda::launch(walk<T, kGroups, kKeep>, args.sequences * args.value_heads * (kWidth / 16 / kGroups),
               (kGroups + 1) * cuda::kWarp, static_cast<int>(sizeof(WalkRoom<T, kGroups, kKeep>)),
               1, static_cast<cudaStream_t>(call.queue), args, made, call.input<float>(7), y,
               final_state);
}

}  // namespace mlxtape::ops::chunks
