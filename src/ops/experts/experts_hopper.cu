// Forward kernels of experts for compute capability 9.0, 16 bits (design: experts_hopper.cuh).
#include <algorithm>

#include "experts_hopper.cuh"

namespace mlxtape::ops::hopper {

namespace {

// g and u of 128 pairs and 128 inner channels, which are the two halves of a tile's columns, and a.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    hidden_kernel(ExpertsArgs args, ExpertsTiles tiles, const T* x, const unsigned* order,
                  const __grid_constant__ CUtensorMap gate, const __grid_constant__ CUtensorMap up,
                  T* hidden, T* active) {
  cuda::wait_turn();
  Room& r = room();
  prepare(r, cuda::kGroup + 1);
  const int inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const int steps = width / kDepth, across = (inner + kCols / 2 - 1) / (kCols / 2);
  Cursor at;
  if (is_loader()) {
    cuda::give_registers<kLoaderRegisters>();
    GatheredRows<T> rows;
    unsigned turn = 0;
    for (Walk walk(tiles, across); walk.more(); walk.next(), turn ^= 1U) {
      rows.find(r, turn, args, walk.tile, order);
      for (int s = 0; s < steps; ++s, at.next()) {
        wait_empty(r, at);
        const unsigned to = cuda::shared_address(r.slot[at.slot]);
        if (loader_thread() == 0) {
          std::uint64_t* full = &r.full[at.slot];
          const int row = walk.col() * (kCols / 2);
          cuda::barrier_arrive_expect(full, kBytesB);
          cuda::bring_tile(to + kBytesA, gate, s * kDepth, row, walk.tile.expert, full);
          cuda::bring_tile(to + kBytesA + kBytesB / 2, up, s * kDepth, row, walk.tile.expert, full);
        }
        rows.bring(to, x, static_cast<unsigned>(width), s * kDepth);
        cuda::arrive_with_chunks(&r.full[at.slot]);
      }
    }
  } else {
    cuda::take_registers<kMakerRegisters>();
    const unsigned stage = cuda::shared_address(r.stage[threadIdx.x / cuda::kWarp]);
    const int above = maker_group() * 64, row = above + maker_warp() * 16;
    Walk walk(tiles, across);
    while (walk.more()) {
      Walk later = walk;
      later.next();
      if (walk.tile.count <= above) {
        pass_by(r, at, steps);
      } else {
        cuda::GroupSums sums;
        multiply<T, false, false, true>(r, at, steps, sums);
        const int rows = walk.tile.count - row, first_col = walk.col() * (kCols / 2);
        const std::int64_t place = std::int64_t{walk.tile.first} + row;
        T* g_to = hidden + place * 2 * inner + first_col;
        T* a_to = active + place * inner + first_col;
#pragma unroll 1
        for (int part = 0; part < 2;
             ++part) {  // unrolled, the two would mix and need too many registers
          const int cols = inner - first_col - part * 64;
          unsigned g[4][4], u[4][4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            words_of(i, g[i], [&](int j) { return cuda::two_of<T>(sums.v[j], sums.v[j + 1]); });
            words_of(i, u[i],
                     [&](int j) { return cuda::two_of<T>(sums.v[64 + j], sums.v[65 + j]); });
            cuda::store_matrices(stage, i, g[i]);
            cuda::store_matrices(stage + kStageBytes, i, u[i]);
          }
          store_stage(stage, g_to + part * 64, 2 * inner, rows, cols);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            unsigned made[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              const float2 z = cuda::both_of<T>(g[i][m]), v = cuda::both_of<T>(u[i][m]);
              made[m] = cuda::two_of<T>(z.x * cuda::sigmoid<T>(z.x).value * v.x,
                                        z.y * cuda::sigmoid<T>(z.y).value * v.y);
            }
            cuda::store_matrices(stage, i, made);
          }
          store_stage(stage + kStageBytes, g_to + inner + part * 64, 2 * inner, rows, cols);
          store_stage(stage, a_to + part * 64, inner, rows, cols);
#pragma unroll
          for (int j = 0; j < 32; ++j) {
            sums.v[j] = sums.v[32 + j];
            sums.v[64 + j] = sums.v[96 + j];
          }
        }
      }
      walk = later;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    out_kernel(ExpertsArgs args, ExpertsTiles tiles, const __grid_constant__ CUtensorMap active,
               const __grid_constant__ CUtensorMap down, T* out) {
  cuda::wait_turn();
  Room& r = room();
  prepare(r, 1);
  const int width = static_cast<int>(args.width);
  const int steps = static_cast<int>(args.inner) / kDepth, across = (width + kCols - 1) / kCols;
  Cursor at;
  if (is_loader()) {
    cuda::give_registers<kLoaderRegisters>();
    if (loader_thread() == 0) {
      cuda::see_memory();
      for (Walk walk(tiles, across); walk.more(); walk.next()) {
        for (int s = 0; s < steps; ++s, at.next()) {
          wait_empty(r, at);
          const unsigned to = cuda::shared_address(r.slot[at.slot]);
          std::uint64_t* full = &r.full[at.slot];
          cuda::barrier_arrive_expect(full, kBytesA + kBytesB);
          cuda::bring_tile(to, active, s * kDepth, static_cast<int>(walk.tile.first), 0, full);
          cuda::bring_tile(to + kBytesA, down, s * kDepth, walk.col() * kCols, walk.tile.expert,
                           full);
        }
      }
    }
  } else {
    cuda::take_registers<kMakerRegisters>();
    const unsigned stage = cuda::shared_address(r.stage[threadIdx.x / cuda::kWarp]);
    const int above = maker_group() * 64, row = above + maker_warp() * 16;
    Walk walk(tiles, across);
    while (walk.more()) {
      Walk later = walk;
      later.next();
      if (walk.tile.count <= above) {
        pass_by(r, at, steps);
      } else {
        cuda::GroupSums sums;
        multiply<T, false, false, false>(r, at, steps, sums);
        store_sums(stage, sums,
                   out + (std::int64_t{walk.tile.first} + row) * width + walk.col() * kCols, width,
                   walk.tile.count - row, width - walk.col() * kCols);
      }
      walk = later;
    }
  }
}

// A thread has 8 channels of a token.
constexpr int kCombineThreads = 256;

template <class T, int kAtOnce>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(ExpertsArgs args, const T* from, const unsigned* places, const unsigned* offsets,
                   const T* scores, T* to) {
  cuda::wait_turn();
  const unsigned packs = static_cast<unsigned>(args.width / 8);
  const std::int64_t i = std::int64_t{blockIdx.x} * kCombineThreads + threadIdx.x;
  const std::int64_t t = i / packs;
  if (t >= args.tokens) return;
  const unsigned h = static_cast<unsigned>(i - t * packs) * 8;
  const unsigned end = offsets[args.experts];
  const int chosen = static_cast<int>(args.chosen);
  float sum[8] = {};
  for (int j = 0; j < chosen; j += kAtOnce) {
    cuda::Pack<T> some[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      weight[k] = 0;
      some[k] = {};
      if (j + k >= chosen) continue;
      const std::int64_t pair = t * chosen + j + k;
      const unsigned place = places[pair];
      if (place >= end) continue;
      weight[k] = scores == nullptr ? 1 : cuda::widen(scores[pair]);
      some[k] = cuda::load_pack(from + std::int64_t{place} * args.width + h);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      float v[8];
      cuda::unpack(some[k], v);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = fmaf(weight[k], v[c], sum[c]);
    }
  }
  cuda::store_pack(cuda::pack_of<T>(sum), to + t * args.width + h);
}

}  // namespace

bool takes(const ExpertsArgs& args, std::initializer_list<const void*> addresses) {
  // Tiles, of pairs by channels and of weights, are counted in 32 bits.
  constexpr std::int64_t kMostWide = std::int64_t{1} << 16, kMostPairs = std::int64_t{1} << 28;
  if (args.width % 64 != 0 || args.inner % 64 != 0 || args.width == 0 || args.inner == 0 ||
      args.width > kMostWide || args.inner > kMostWide || args.tokens * args.chosen > kMostPairs) {
    return false;
  }
  const bool aligned = std::all_of(addresses.begin(), addresses.end(), [](const void* p) {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
  });
  return aligned && cuda::on_hopper();
}

template <class T>
void hidden_forward(const ExpertsArgs& args, ExpertsTiles tiles, const T* x, const unsigned* order,
                    const T* gate, const T* up, T* hidden, T* active, cudaStream_t stream) {
  const auto map = [&](const T* w) {
    return cuda::tensor_map(w, args.width, args.inner, args.experts, kCols / 2);
  };
  cuda::launch(hidden_kernel<T>, kBlocks, kThreads, kRoomBytes, 1, stream, args, tiles, x, order,
               map(gate), map(up), hidden, active);
}

template <class T>
void out_forward(const ExpertsArgs& args, ExpertsTiles tiles, const T* active, const T* down,
                 T* out, cudaStream_t stream) {
  cuda::launch(out_kernel<T>, kBlocks, kThreads, kRoomBytes, 1, stream, args, tiles,
               cuda::tensor_map(active, args.inner, args.tokens * args.chosen, 1, kRows),
               cuda::tensor_map(down, args.inner, args.width, args.experts, kCols), out);
}

template <class T>
void combine(const ExpertsArgs& args, const T* from, const unsigned* places,
             const unsigned* offsets, const T* scores, T* to, cudaStream_t stream) {
  const std::int64_t packs = args.tokens * (args.width / 8);
  cuda::launch(combine_kernel<T, 5>, (packs + kCombineThreads - 1) / kCombineThreads,
               kCombineThreads, 0, 1, stream, args, from, places, offsets, scores, to);
}

#define MT_FORWARD(T)                                                                          \
  template void hidden_forward<T>(const ExpertsArgs&, ExpertsTiles, const T*, const unsigned*, \
                                  const T*, const T*, T*, T*, cudaStream_t);                   \
  template void out_forward<T>(const ExpertsArgs&, ExpertsTiles, const T*, const T*, T*,       \
                               cudaStream_t);                                                  \
  template void combine<T>(const ExpertsArgs&, const T*, const unsigned*, const unsigned*,     \
                           const T*, T*, cudaStream_t);
MT_FORWARD(F16)
MT_FORWARD(BF16)
#undef MT_FORWARD

}  // namespace mlxtape::ops::hopper
