// What only compute capability 9.0 has: products of 64 rows, up to 256 columns and a depth of 16 by four warps (wgmma)
// from tiles in shared memory, and tiles that the copy engine brings there. For files compiled for sm_90a (<op>_hopper*.cu).
//
// Tiles have rows of 128 bytes, 64 numbers; of the row r (counted from an address that 1024 divides) the 16 bytes c
// stand at c ^ (r % 8), which keeps every access free of bank conflicts: the copy engine and wgmma call it the swizzle
// of 128 bytes.
//   along the depth   rows are rows or columns of the product, [rows][64 of depth]; 8 rows are 1024 bytes.
//   turned            rows are steps of the depth: blocks [depth][64 rows or columns of the product], of 8192 bytes
//                     each where the depth is 64, one after the other.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "backends/cuda/device/ring.cuh"
#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::cuda {

constexpr int kGroup = 128;    // threads that make a product together: four warps
constexpr int kTileRow = 128;  // bytes
constexpr int kTileDepth = 64;
constexpr int kTurnedBlock = kTileDepth * kTileRow;

// Where 16 bytes of a tile's row stand.
__device__ __forceinline__ unsigned tile_place(unsigned row, unsigned chunk) {
  return row * kTileRow + ((chunk ^ (row % 8)) << 4U);
}

// ---- products ----

// The 64 bits that tell wgmma where a factor is: bits 0-13 the address, 16-29 the leading offset, 32-45 the stride,
// all in units of 16 bytes, 62-63 = 1: the swizzle of 128 bytes. Along the depth the stride is from 8 rows to the next
// 8, and the leading offset means nothing. Turned, the stride is from 8 steps of the depth to the next 8, and the
// leading offset from a block to the next.
// kDepth: of a block.
template <int kDepth = kTileDepth>
__device__ __forceinline__ std::uint64_t factor_at(unsigned shared) {
  constexpr std::uint64_t kRest = (std::uint64_t{kDepth * kTileRow >> 4} << 16U) |
                                  (std::uint64_t{1024 >> 4} << 32U) | (std::uint64_t{1} << 62U);
  return kRest | ((shared & 0x3ffffU) >> 4U);
}
// What 16 steps of the depth add to it: 32 bytes of each row, or 16 rows.
template <bool kTurned>
constexpr std::uint64_t kNextDepth = (kTurned ? 16 * kTileRow : 32) >> 4;

// The registers of sums and the shared memory are as the program has left them.
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All batches but the latest kLatest are done.
template <int kLatest>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLatest) : "memory");
}
// Before products read what threads, or copies of threads, have written to shared memory.
__device__ __forceinline__ void see_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Sums of 64 × kCols over the threads of a group. Thread t has, of the rows (t / 32)·16 + t % 32 / 4 (half 0) and 8 below
// (half 1) and of each 8 columns `eight`, the two from t % 4 · 2 on: v[eight][half·2 ...].
template <int kCols>
struct GroupTile {
  float v[kCols / 8][4];

  // Nobody reads the registers before this.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) asm volatile("" : "+f"(v[i / 4][i % 4])::"memory");
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) v[i / 4][i % 4] = 0;
  }
};

#define MT_EIGHT(i) "+f"(sums.v[i][0]), "+f"(sums.v[i][1]), "+f"(sums.v[i][2]), "+f"(sums.v[i][3])
#define MT_WGMMA_64(type)                                                                          \
  asm volatile(                                                                                    \
      "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"                                               \
      " wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                 \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "              \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, "  \
      "1, 1, %35, %36;\n}"                                                                         \
      : MT_EIGHT(0), MT_EIGHT(1), MT_EIGHT(2), MT_EIGHT(3), MT_EIGHT(4), MT_EIGHT(5), MT_EIGHT(6), \
        MT_EIGHT(7)                                                                                \
      : "l"(a), "l"(b), "r"(add), "n"(kTurnedA ? 1 : 0), "n"(kTurnedB ? 1 : 0))
#define MT_WGMMA_80(type)                                                                          \
  asm volatile(                                                                                    \
      "{\n .reg .pred p;\n setp.ne.b32 p, %42, 0;\n"                                               \
      " wgmma.mma_async.sync.aligned.m64n80k16.f32." type "." type                                 \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "              \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                \
      "%32, %33, %34, %35, %36, %37, %38, %39}, %40, %41, p, 1, 1, %43, %44;\n}"                   \
      : MT_EIGHT(0), MT_EIGHT(1), MT_EIGHT(2), MT_EIGHT(3), MT_EIGHT(4), MT_EIGHT(5), MT_EIGHT(6), \
        MT_EIGHT(7), MT_EIGHT(8), MT_EIGHT(9)                                                      \
      : "l"(a), "l"(b), "r"(add), "n"(kTurnedA ? 1 : 0), "n"(kTurnedB ? 1 : 0))
#define MT_WGMMA_128(type)                                                                         \
  asm volatile(                                                                                    \
      "{\n .reg .pred p;\n setp.ne.b32 p, %66, 0;\n"                                               \
      " wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "              \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "                \
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "                \
      "%62, %63}, %64, %65, p, 1, 1, %67, %68;\n}"                                                 \
      : MT_EIGHT(0), MT_EIGHT(1), MT_EIGHT(2), MT_EIGHT(3), MT_EIGHT(4), MT_EIGHT(5), MT_EIGHT(6), \
        MT_EIGHT(7), MT_EIGHT(8), MT_EIGHT(9), MT_EIGHT(10), MT_EIGHT(11), MT_EIGHT(12),           \
        MT_EIGHT(13), MT_EIGHT(14), MT_EIGHT(15)                                                   \
      : "l"(a), "l"(b), "r"(add), "n"(kTurnedA ? 1 : 0), "n"(kTurnedB ? 1 : 0))

// sums = a·b, or + a·b where add is not 0, for 16 steps of the depth; done at products_wait. 64, 80 or 128 columns.
template <class T, bool kTurnedA, bool kTurnedB, int kCols>
__device__ __forceinline__ void group_product(GroupTile<kCols>& sums, std::uint64_t a,
                                              std::uint64_t b, int add) {
  constexpr bool kBrain = std::is_same_v<T, BF16>;
  if constexpr (kCols == 64) {
    if constexpr (kBrain) {
      MT_WGMMA_64("bf16");
    } else {
      MT_WGMMA_64("f16");
    }
  } else if constexpr (kCols == 80) {
    if constexpr (kBrain) {
      MT_WGMMA_80("bf16");
    } else {
      MT_WGMMA_80("f16");
    }
  } else {
    static_assert(kCols == 128);
    if constexpr (kBrain) {
      MT_WGMMA_128("bf16");
    } else {
      MT_WGMMA_128("f16");
    }
  }
}

#define MT_WGMMA_KEPT_64(type)                                                                     \
  asm volatile(                                                                                    \
      "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"                                               \
      " wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                 \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "         \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, "         \
      "%34, %35}, %36, p, 1, 1, %38;\n}"                                                           \
      : MT_EIGHT(0), MT_EIGHT(1), MT_EIGHT(2), MT_EIGHT(3), MT_EIGHT(4), MT_EIGHT(5), MT_EIGHT(6), \
        MT_EIGHT(7)                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTurnedB ? 1 : 0))

#define MT_WGMMA_KEPT_128(type)                                                                    \
  asm volatile(                                                                                    \
      "{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"                                               \
      " wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "         \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "           \
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "           \
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, "         \
      "%66, %67}, %68, p, 1, 1, %70;\n}"                                                           \
      : MT_EIGHT(0), MT_EIGHT(1), MT_EIGHT(2), MT_EIGHT(3), MT_EIGHT(4), MT_EIGHT(5), MT_EIGHT(6), \
        MT_EIGHT(7), MT_EIGHT(8), MT_EIGHT(9), MT_EIGHT(10), MT_EIGHT(11), MT_EIGHT(12),           \
        MT_EIGHT(13), MT_EIGHT(14), MT_EIGHT(15)                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTurnedB ? 1 : 0))

#define MT_WGMMA_KEPT_256(type)                                                                    \
  asm volatile(                                                                                    \
      "{\n .reg .pred p;\n setp.ne.b32 p, %133, 0;\n"                                              \
      " wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "         \
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "           \
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "           \
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "           \
      "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "           \
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "           \
      "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "         \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "             \
      "%125, %126, %127}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;\n}"                       \
      : MT_EIGHT(0), MT_EIGHT(1), MT_EIGHT(2), MT_EIGHT(3), MT_EIGHT(4), MT_EIGHT(5), MT_EIGHT(6), \
        MT_EIGHT(7), MT_EIGHT(8), MT_EIGHT(9), MT_EIGHT(10), MT_EIGHT(11), MT_EIGHT(12),           \
        MT_EIGHT(13), MT_EIGHT(14), MT_EIGHT(15), MT_EIGHT(16), MT_EIGHT(17), MT_EIGHT(18),        \
        MT_EIGHT(19), MT_EIGHT(20), MT_EIGHT(21), MT_EIGHT(22), MT_EIGHT(23), MT_EIGHT(24),        \
        MT_EIGHT(25), MT_EIGHT(26), MT_EIGHT(27), MT_EIGHT(28), MT_EIGHT(29), MT_EIGHT(30),        \
        MT_EIGHT(31)                                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTurnedB ? 1 : 0))

// The same for 64, 128 and 256 columns with 16 columns of a in registers, as load_matrices finds it there and as_factor
// leaves it, which must stay until products_wait.
template <class T, bool kTurnedB, int kCols>
__device__ __forceinline__ void group_product(GroupTile<kCols>& sums, const unsigned (&a)[4],
                                              std::uint64_t b, int add) {
  constexpr bool kBrain = std::is_same_v<T, BF16>;
  if constexpr (kCols == 64) {
    if constexpr (kBrain) {
      MT_WGMMA_KEPT_64("bf16");
    } else {
      MT_WGMMA_KEPT_64("f16");
    }
  } else if constexpr (kCols == 128) {
    if constexpr (kBrain) {
      MT_WGMMA_KEPT_128("bf16");
    } else {
      MT_WGMMA_KEPT_128("f16");
    }
  } else {
    static_assert(kCols == 256);
    if constexpr (kBrain) {
      MT_WGMMA_KEPT_256("bf16");
    } else {
      MT_WGMMA_KEPT_256("f16");
    }
  }
}
#undef MT_WGMMA_KEPT_256
#undef MT_WGMMA_KEPT_128
#undef MT_WGMMA_KEPT_64
#undef MT_WGMMA_128
#undef MT_WGMMA_80
#undef MT_WGMMA_64
#undef MT_EIGHT

// The share of a group's registers: all its warps, once.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- tiles brought by the copy engine ----

// By one thread; counts towards what the barrier expects, with zeros where there is nothing.
__device__ __forceinline__ void bring_tile(unsigned to, const CUtensorMap& map, int x, int y, int z,
                                           std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void bring_tile(unsigned to, const CUtensorMap& map, int x, int y, int z,
                                           int w, std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
      : "memory");
}
// Before it brings what kernels before this one have stored.
__device__ __forceinline__ void see_memory() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// By one thread, from shared memory that all have made seen (see_writes): a tile to device memory, as bring_tile would
// find it there. What is sent waits for sent.
__device__ __forceinline__ void send_tile(const CUtensorMap& map, unsigned from, int x, int y,
                                          int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          &map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void sent() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// What this thread sent has left shared memory; has arrived.
__device__ __forceinline__ void wait_sent() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_arrived() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// 16 bytes that the thread copies itself; zeros where !there.
__device__ __forceinline__ void bring_chunk(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
// The thread arrives when its chunks so far have.
__device__ __forceinline__ void arrive_with_chunks(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// ---- a warp's 16 rows × 64 columns of 16-bit numbers, from registers to rows in shared memory and back ----

// words: of the columns 16·i the four 8 × 8 matrices at words[4·i]: rows 0-7, 8-15, and the same of the next 8 columns.
__device__ __forceinline__ unsigned matrices_at(unsigned room, int i) {
  const unsigned lane = threadIdx.x % kWarp;
  return room + tile_place(lane % 16, static_cast<unsigned>(2 * i) + lane / 16);
}
__device__ __forceinline__ void store_matrices(unsigned room, int i, const unsigned (&w)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   matrices_at(room, i)),
               "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}
__device__ __forceinline__ void load_matrices(unsigned room, int i, unsigned (&w)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(matrices_at(room, i))
               : "memory");
}

}  // namespace mlxtape::cuda
