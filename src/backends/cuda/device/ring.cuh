// A ring of slots in shared memory that one thread fills with bulk copies while others work on what
// has come: memory is read at full speed whatever the others wait for.
//
// A slot is full when its bytes have arrived and empty when every consumer has said so. Producer and
// consumers walk the slots with cursors of their own, in the same order.
#pragma once

#include <cstdint>

namespace mlxtape::cuda {

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// ---- barriers in shared memory ----

__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
// What barrier_init wrote is seen by the copy engine and by the other blocks of the cluster.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// As so many.
__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(std::uint64_t* barrier, unsigned bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Returns when the barrier's phase of this parity is over. kCluster: and what other blocks of the
// cluster sent with it is seen.
template <bool kCluster = false>
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, unsigned parity) {
  unsigned done = 0;
  while (done == 0) {
    if constexpr (kCluster) {
      asm volatile(
          "{\n .reg .pred p;\n"
          " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          " selp.b32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(shared_address(barrier)), "r"(parity)
          : "memory");
    } else {
      asm volatile(
          "{\n .reg .pred p;\n"
          " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          " selp.b32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(shared_address(barrier)), "r"(parity)
          : "memory");
    }
  }
}

// bytes: a multiple of 16, as both addresses. Counts towards what the barrier expects.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, unsigned bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// 8 bytes to the same place in another block's shared memory; counts towards that block's barrier.
__device__ __forceinline__ void send(float2* to, float2 value, std::uint64_t* barrier,
                                     unsigned block) {
  asm volatile(
      "{\n .reg .b32 to, bar;\n"
      " mapa.shared::cluster.u32 to, %0, %4;\n"
      " mapa.shared::cluster.u32 bar, %1, %4;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%2, %3}, [bar];\n}" ::
          "r"(shared_address(to)),
      "r"(shared_address(barrier)), "f"(value.x), "f"(value.y), "r"(block)
      : "memory");
}

// 4 bytes.
__device__ __forceinline__ void send(float* to, float value, std::uint64_t* barrier,
                                     unsigned block) {
  asm volatile(
      "{\n .reg .b32 to, bar;\n"
      " mapa.shared::cluster.u32 to, %0, %3;\n"
      " mapa.shared::cluster.u32 bar, %1, %3;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %2, [bar];\n}" ::"r"(
          shared_address(to)),
      "r"(shared_address(barrier)), "f"(value), "r"(block)
      : "memory");
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// ---- the ring ----

template <int kSlots>
struct Cursor {
  int slot = 0;
  unsigned phase = 0;  // of the slot's barriers

  __device__ void next() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1U;
    }
  }
};

template <int kCount, int kBytes>
struct Ring {
  static constexpr int kSlots = kCount;
  static constexpr int kSlotBytes = kBytes;
  using At = Cursor<kSlots>;

  alignas(128) unsigned char slot[kSlots][kSlotBytes];
  std::uint64_t full[kSlots];
  std::uint64_t empty[kSlots];

  // By one thread, before a barrier of the block. consumers: the threads that release each slot.
  __device__ void init(unsigned consumers) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], consumers);
    }
    barrier_init_done();
  }
  // By the one producer. A fresh barrier counts as through with the phase before its first.
  __device__ void fill(const At& at, const void* from, unsigned bytes) {
    barrier_wait(&empty[at.slot], at.phase ^ 1U);
    barrier_arrive_expect(&full[at.slot], bytes);
    bulk_copy(slot[at.slot], from, bytes, &full[at.slot]);
  }
  __device__ const unsigned char* wait(const At& at) {
    barrier_wait(&full[at.slot], at.phase);
    return slot[at.slot];
  }
  // By every consumer, when it has read the slot for good. One lane for its warp takes as long.
  __device__ void release(const At& at) { barrier_arrive(&empty[at.slot]); }
};

}  // namespace mlxtape::cuda
