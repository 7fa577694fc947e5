// Forward kernels of experts for compute capability 9.0, 16 bits (design: experts_hopper.cuh).
#include "experts_hopper.cuh"

namespace mlxtape::ops::hopper {

namespace {

// g and u of 192 pairs and 128 inner channels, and a: of a group's columns half are g, half u of 64 channels.
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
    for (Walk walk(tiles, across); walk.more(); walk.next()) {
      rows.find(args, walk.tile, order);
      for (int s = 0; s < steps; ++s, at.next()) {
        wait_empty(r, at);
        const unsigned to = cuda::shared_address(r.slot[at.slot]);
        if (loader_thread() == 0) {
          std::uint64_t* full = &r.full[at.slot];
          const int row = walk.col() * (kCols / 2);
          r.note[at.slot] = walk.note();
          cuda::barrier_arrive_expect(full, kBytesB);
#pragma unroll
          for (int group = 0; group < 2; ++group) {
            const unsigned at_group = to + kBytesA + static_cast<unsigned>(group) * (kBytesB / 2);
            const int first = row + group * 64;
            cuda::bring_tile(at_group, gate, s * kDepth, first, walk.tile.expert, full);
            cuda::bring_tile(at_group + kBytesB / 4, up, s * kDepth, first, walk.tile.expert, full);
          }
        }
        rows.bring(to, x, static_cast<unsigned>(width), s * kDepth);
        cuda::arrive_with_chunks(&r.full[at.slot]);
      }
    }
    end_notes<true>(r, at);
  } else {
    cuda::take_registers<kMakerRegisters>();
    const unsigned stage = cuda::shared_address(r.stage[threadIdx.x / cuda::kWarp]);
    const int above = maker_warp() * 16;
    for (Note tile; (tile = next_note(r, at)).count >= 0;) {
      Sums sums;
      multiply<T, false, false, true>(r, at, steps, blocks_of(tile.count), sums);
      int first_col = tile.which * (kCols / 2) + maker_group() * 64, pitch = inner;
      here(first_col);
      here(pitch);
#pragma unroll
      for (int m = 0; m < kBlocksDown; ++m) {
        if (m * 64 >= tile.count || first_col >= inner) break;
        const int rows = tile.count - m * 64 - above;
        unsigned place = tile.first + static_cast<unsigned>(m * 64 + above);
        const unsigned staged = matrices_in(stage);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          unsigned w[4];
          words_of<T>(sums.block[m], i, w);
          put_matrices(staged, i, w);
          words_of<T>(sums.block[m], 4 + i, w);
          put_matrices(staged + kStageBytes, i, w);
        }
        __syncwarp();
        const Chunks mine;
        place += mine.row;
        here(place);
        T* g_to = hidden + std::int64_t{place} * 2 * pitch + first_col + mine.col;
        T* a_to = active + std::int64_t{place} * pitch + first_col + mine.col;
#pragma unroll
        for (int i = 0; i < 4; ++i, g_to += 8 * pitch, a_to += 4 * pitch) {
          const cuda::Pack<T> gs = mine.load<T>(stage, i),
                              us = mine.load<T>(stage + kStageBytes, i);
          if (4 * i + static_cast<int>(mine.row) >= rows) continue;
          store_now(gs, g_to);
          store_now(us, g_to + pitch);
          float g[8], u[8];
          cuda::unpack(gs, g);
          cuda::unpack(us, u);
#pragma unroll
          for (int c = 0; c < 8; ++c) g[c] *= cuda::sigmoid<T>(g[c]).value * u[c];
          store_now(cuda::pack_of<T>(g), a_to);
        }
        __syncwarp();
      }
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
          r.note[at.slot] = walk.note();
          cuda::barrier_arrive_expect(
              full, kBytesB + static_cast<unsigned>(blocks_of(walk.tile.count)) * kBlockBytesA);
          bring_rows(to, active, s * kDepth, walk.tile, full);
          cuda::bring_tile(to + kBytesA, down, s * kDepth, walk.col() * kCols, walk.tile.expert,
                           full);
        }
      }
      end_notes<false>(r, at);
    }
  } else {
    cuda::take_registers<kMakerRegisters>();
    const unsigned stage = cuda::shared_address(r.stage[threadIdx.x / cuda::kWarp]);
    for (Note tile; (tile = next_note(r, at)).count >= 0;) {
      Sums sums;
      multiply<T, false, false, false>(r, at, steps, blocks_of(tile.count), sums);
      store_sums(stage, sums, out + std::int64_t{tile.first} * width + tile.which * kCols, width,
                 tile.count, width - tile.which * kCols);
    }
  }
}

}  // namespace

bool takes(const ExpertsArgs& args) {
  // Tiles, of pairs by channels and of weights, are counted in 32 bits.
  constexpr std::int64_t kMostWide = std::int64_t{1} << 16, kMostPairs = std::int64_t{1} << 28;
  return args.width % 64 == 0 && args.inner % 64 == 0 && args.width > 0 && args.inner > 0 &&
         args.width <= kMostWide && args.inner <= kMostWide &&
         args.tokens * args.chosen <= kMostPairs && cuda::on_hopper();
}

template <class T>
void hidden_forward(const ExpertsArgs& args, ExpertsTiles tiles, const T* x, const unsigned* order,
                    const T* gate, const T* up, T* hidden, T* active, cudaStream_t stream) {
  const auto map = [&](const T* w) {
    return cuda::tensor_map(w, args.width, args.inner, args.experts, 64);
  };
  cuda::launch(hidden_kernel<T>, kBlocks, kThreads, kRoomBytes, 1, stream, args, tiles, x, order,
               map(gate), map(up), hidden, active);
}

template <class T>
void out_forward(const ExpertsArgs& args, ExpertsTiles tiles, const T* active, const T* down,
                 T* out, cudaStream_t stream) {
  cuda::launch(out_kernel<T>, kBlocks, kThreads, kRoomBytes, 1, stream, args, tiles,
               cuda::tensor_map(active, args.inner, args.tokens * args.chosen, 1, 64),
               cuda::tensor_map(down, args.inner, args.width, args.experts, kCols), out);
}

#define MT_FORWARD(T)                                                                          \
  template void hidden_forward<T>(const ExpertsArgs&, ExpertsTiles, const T*, const unsigned*, \
                                  const T*, const T*, T*, T*, cudaStream_t);                   \
  template void out_forward<T>(const ExpertsArgs&, ExpertsTiles, const T*, const T*, T*,       \
                               cudaStream_t);
MT_FORWARD(F16)
MT_FORWARD(BF16)
#undef MT_FORWARD

}  // namespace mlxtape::ops::hopper
