// gated_delta_rule in chunks: the walk back over the gradients of the states.
#pragma once

#include "gated_delta_rule_chunks_walk.cuh"

namespace mlxtape::ops::chunks {

// ---- the walk back; a warp has 16 value channels of a head ----

template <class T, int kGroups>
struct BackStage {
  alignas(128) T k[kRows], w[kRows], q_hat[kRows];
  T dy[kChunk * kGroups * 16];  // [64 tokens][slice]
  Numbers numbers;
};

template <class T, int kGroups>
struct BackRoom {
  static constexpr int kStages = 3;
  Stages<BackStage<T, kGroups>, kStages, kGroups> ring;
  alignas(128) T out[kGroups][16 * kWidth];
};

// When this thread's copies have come, that is one arrival, which the barrier counts with.
__device__ __forceinline__ void arrive_with_copies(std::uint64_t* barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cuda::shared_address(barrier))
      : "memory");
}

template <class T, int kGroups>
__global__ void __launch_bounds__((kGroups + 1) * cuda::kWarp, 1)
    walk_back(GatedDeltaRuleArgs args, Made<T> made, const T* dy, const bool* mask,
              const float* d_final, float* d_initial) {
  cuda::wait_turn();
  extern __shared__ __align__(128) char memory[];
  using Room = BackRoom<T, kGroups>;
  auto& room = *reinterpret_cast<Room*>(memory);
  constexpr int kSlice = kGroups * 16, kSlices = kWidth / kSlice;
  const auto heads = static_cast<unsigned>(args.value_heads);
  const unsigned slice = blockIdx.x % kSlices, head = blockIdx.x / kSlices % heads;
  const std::int64_t sequence = blockIdx.x / kSlices / heads;
  const unsigned key_head = head / (heads / static_cast<unsigned>(args.key_heads));
  const auto chunks = static_cast<int>((args.sequence_tokens + kChunk - 1) / kChunk);
  const int warp = threadIdx.x / cuda::kWarp, thread = threadIdx.x % cuda::kWarp;
  if (threadIdx.x == 0) room.ring.init(1 + cuda::kWarp);
  __syncthreads();
  cuda::Cursor<Room::kStages> at;

  if (warp == kGroups) {
    for (int chunk = chunks - 1; chunk >= 0; --chunk, at.next()) {
      auto& stage = room.ring.stage[at.slot];
      const std::int64_t pair = (sequence * chunks + chunk) * args.value_heads + head;
      const std::int64_t key_pair = (sequence * chunks + chunk) * args.key_heads + key_head;
      std::uint64_t* full = &room.ring.full[at.slot];
      cuda::barrier_wait(&room.ring.empty[at.slot], at.phase ^ 1U);
      if (thread == 0) {
        cuda::barrier_arrive_expect(full, 3 * sizeof(stage.k) + sizeof(Numbers));
        cuda::bulk_copy(stage.k, made.k + key_pair * kRows, sizeof(stage.k), full);
        cuda::bulk_copy(stage.w, made.w + pair * kRows, sizeof(stage.w), full);
        cuda::bulk_copy(stage.q_hat, made.q_hat + pair * kRows, sizeof(stage.q_hat), full);
        cuda::bulk_copy(&stage.numbers, made.numbers + pair, sizeof(Numbers), full);
      }
      __syncwarp();
      for (int i = thread; i < kChunk * kSlice / 8; i += cuda::kWarp) {
        const int t = i / (kSlice / 8), c = i % (kSlice / 8) * 8;
        const std::int64_t within = std::int64_t{chunk} * kChunk + t;
        const std::int64_t token = sequence * args.sequence_tokens + within;
        const bool there =
            dy != nullptr && within < args.sequence_tokens && (mask == nullptr || mask[token]);
        const T* from =
            dy + ((there ? token : 0) * args.value_heads + head) * kWidth + slice * kSlice;
        cuda::copy_later(stage.dy + place<kSlice>(t, c),
                         there ? from + c : reinterpret_cast<const T*>(made.k), there);
      }
      arrive_with_copies(full);
    }
    cuda::commit_copies();
    cuda::wait_copies<0>();
    return;
  }

  const Lane lane;
  const int t4 = lane.t4;
  const std::int64_t state_at =
      ((sequence * args.value_heads + head) * kWidth + slice * kSlice + warp * 16) * kWidth;
  float s[16][4];
  load_state(lane, d_final == nullptr ? nullptr : d_final + state_at, s);
  for (int chunk = chunks - 1; chunk >= 0; --chunk, at.next()) {
    const auto& in = room.ring.stage[at.slot];
    const std::int64_t pair = (sequence * chunks + chunk) * args.value_heads + head;
    if (thread == 0) wait_stores_read();
    __syncwarp();
    cuda::barrier_wait(&room.ring.full[at.slot], at.phase);
    // (K·dS)ᵀ
    float x[8][4] = {};
    {
      const Tile<kWidth> k(in.k);
#pragma unroll
      for (int l = 0; l < 8; ++l) {
        unsigned a[4], b[4][4];
        as_factor<T>(s, l, a);
#pragma unroll
        for (int n = 0; n < 4; ++n) k.b_turned(b[n], lane, l * 16, n * 16);
        lay_factor(lane, l, a, room.out[warp]);
#pragma unroll
        for (int n = 0; n < 4; ++n) multiply_add_two<T>(x[2 * n], x[2 * n + 1], a, b[n]);
      }
    }
    publish_shared();
    __syncwarp();
    if (thread == 0) {
      bulk_store(made.d_states + pair * kState + (slice * kSlice + warp * 16) * kWidth,
                 room.out[warp], 16 * kWidth * sizeof(T));
      commit_stores();
    }
    // dSᵀ = e_C·dSᵀ + dYᵀ·Q̂ − (A_C∘(K·dS))ᵀ·W
    const float last = in.numbers.e[kChunk - 1];
    const Tile<kWidth> q_hat(in.q_hat), w(in.w);
    const Tile<kSlice> rows(in.dy);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= last;
    }
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      unsigned a[4];
      rows.a_turned(a, lane, warp * 16, l * 16);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        unsigned b[4];
        q_hat.b(b, lane, l * 16, n * 16);
        multiply_add_two<T>(s[2 * n], s[2 * n + 1], a, b);
      }
    }
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      unsigned a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * l + i / 2;
        const float2 f = *reinterpret_cast<const float2*>(in.numbers.f + n * 8 + 2 * t4);
        a[i] = cuda::two_of<T>(-f.x * x[n][i % 2 * 2], -f.y * x[n][i % 2 * 2 + 1]);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        unsigned b[4];
        w.b(b, lane, l * 16, n * 16);
        multiply_add_two<T>(s[2 * n], s[2 * n + 1], a, b);
      }
    }
    __syncwarp();
    cuda::barrier_arrive(&room.ring.empty[at.slot]);
  }
  if (thread == 0) wait_stores();
  if (d_initial != nullptr) store_state(lane, s, d_initial + state_at);
}

template <class T, int kGroups>
void launch_walk_back(const KernelCall& call, const GatedDeltaRuleArgs& args, const Made<T>& made) {
  cuda::launch(walk_back<T, kGroups>, args.sequences * args.value_heads * (kWidth / 16 / kGroups),
               (kGroups + 1) * cuda::kWarp, static_cast<int>(sizeof(BackRoom<T, kGroups>)), 1,
               static_cast<cudaStream_t>(call.queue), args, made, call.input<T>(8),
               call.input<bool>(5), call.input<float>(9), call.output<float>(5));
}

}  // namespace mlxtape::ops::chunks
