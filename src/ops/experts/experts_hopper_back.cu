// Backward kernels of experts for compute capability 9.0, 16 bits (design: experts_hopper.cuh).
#include "experts_back.cuh"
#include "experts_hopper.cuh"

namespace mlxtape::ops::hopper {

namespace {

// A tile of a matrix [depth][columns] for 64 steps of its depth, turned: blocks of 64 columns.
__device__ __forceinline__ void bring_turned(unsigned to, const CUtensorMap& map, int col,
                                             int depth, int expert, std::uint64_t* full) {
#pragma unroll
  for (int b = 0; b < kCols / 64; ++b) {
    cuda::bring_tile(to + static_cast<unsigned>(b) * cuda::kTurnedBlock, map, col + b * 64, depth,
                     expert, full);
  }
}

// A warp's 16 rows × 64 columns of a block, as they are, in both its stages: rows of 256 bytes, 8 columns of row r at the
// place of the 8 with r % 8 exclusive-or'ed. Then a lane has 8 columns of a row.
__device__ __forceinline__ void stage_sums(unsigned stage, const Block& sums, int part) {
  const unsigned lane = lane_now(), row = lane / 4;
  const unsigned mine = stage + row * 256 + (row << 5U) + lane % 4 * 8;
#pragma unroll
  for (int eight = 0; eight < 8; ++eight) {
    const unsigned at = mine ^ (static_cast<unsigned>(eight) << 5U);
    const float* v = sums.v[part * 8 + eight];
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v[0]), "f"(v[1]) : "memory");
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * 256), "f"(v[2]), "f"(v[3])
                 : "memory");
  }
}
__device__ __forceinline__ void load_four(unsigned at, float (&v)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(at));
}

// b of 192 pairs and 256 inner channels, then what becomes of it, for which g and u come by the same ring.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    hidden_back_kernel(ExpertsArgs args, ExpertsTiles tiles, const T* dy,
                       const __grid_constant__ CUtensorMap hidden, const unsigned* order,
                       const T* scores, const __grid_constant__ CUtensorMap down, T* d_hidden,
                       T* active, float* parts) {
  cuda::wait_turn();
  Room& r = room();
  prepare(r, cuda::kGroup + 1);
  const int inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const int steps = width / kDepth, across = (inner + kCols - 1) / kCols;
  Cursor at;
  if (is_loader()) {
    cuda::give_registers<kLoaderRegisters>();
    cuda::see_memory();
    GatheredRows<T> rows;
    for (Walk walk(tiles, across); walk.more(); walk.next()) {
      rows.find(args, walk.tile, order);
      for (int s = 0; s < steps; ++s, at.next()) {
        wait_empty(r, at);
        const unsigned to = cuda::shared_address(r.slot[at.slot]);
        if (loader_thread() == 0) {
          r.note[at.slot] = walk.note();
          cuda::barrier_arrive_expect(&r.full[at.slot], kBytesB);
          bring_turned(to + kBytesA, down, walk.col() * kCols, s * kDepth, walk.tile.expert,
                       &r.full[at.slot]);
        }
        rows.bring(to, dy, static_cast<unsigned>(width), s * kDepth);
        cuda::arrive_with_chunks(&r.full[at.slot]);
      }
      // Blocks after blocks, of each two halves: what both groups need, g and u of 64 channels each.
      for (int i = 0; i < 2 * blocks_of(walk.tile.count); ++i, at.next()) {
        wait_empty(r, at);
        if (loader_thread() == 0) {
          unsigned to = cuda::shared_address(r.slot[at.slot]);
          const int col = walk.col() * kCols + i % 2 * 64;
          const int row = static_cast<int>(walk.tile.first) + i / 2 * 64;
          cuda::barrier_arrive_expect(&r.full[at.slot], 4 * kBlockBytesA);
#pragma unroll
          for (int which = 0; which < 4; ++which, to += kBlockBytesA) {
            cuda::bring_tile(to, hidden, which % 2 * inner + col + which / 2 * kGroupCols, row, 0,
                             &r.full[at.slot]);
          }
        }
        cuda::arrive_with_chunks(&r.full[at.slot]);
      }
    }
    end_notes<true>(r, at);
  } else {
    cuda::take_registers<kMakerRegisters>();
    for (Note tile; (tile = next_note(r, at)).count >= 0;) {
      Sums sums;
      multiply<T, false, true, true>(r, at, steps, blocks_of(tile.count), sums);
      const unsigned end = tile.first + static_cast<unsigned>(tile.count);
#pragma unroll
      for (int m = 0; m < kBlocksDown; ++m) {
        if (tile.first + m * 64 >= end) break;
        const unsigned place = tile.first + m * 64 + warp_now() % 4 * 16;
        const unsigned scored = place + lane_now() % 16;
        const float score = scored < end ? cuda::widen(scores[order[scored]]) : 0;
#pragma unroll
        for (int part = 0; part < kGroupCols / 64; ++part) {
          const unsigned warp = warp_now();
          const unsigned stage = cuda::shared_address(r.stage[warp]);
          stage_sums(stage, sums.block[m], part);
          cuda::barrier_wait(&r.full[at.slot], at.phase);
          __syncwarp();
          const Chunks mine;
          const int col = tile.which * kCols + static_cast<int>(warp / 4) * kGroupCols + part * 64;
          unsigned pair = place + mine.row;
          unsigned gs = cuda::shared_address(r.slot[at.slot]) + warp / 4 * 2 * kBlockBytesA +
                        warp % 4 * 16 * cuda::kTileRow + mine.place;
          unsigned bs = stage + mine.row * 256 + ((mine.col / 8 ^ mine.row) << 5U);
#pragma unroll 1
          for (int i = 0; i < 4; ++i) {  // unrolled, they would mix and need too many registers
            cuda::Pack<T> g = load_shared<T>(gs), u = load_shared<T>(gs + kBlockBytesA), scaled;
            const float weight = __shfl_sync(cuda::kAll, score, 4 * i + lane_now() / 8);
            float b[4], dot = 0;
#pragma unroll
            for (unsigned c = 0; c < 4; ++c) {
              if (c % 2 == 0) load_four(bs + c * 8, b);
              const float2 z = cuda::both_of<T>(g.word[c]), v = cuda::both_of<T>(u.word[c]);
              const Back first = Back::of<T>(b[c % 2 * 2], z.x, v.x, weight);
              const Back second = Back::of<T>(b[c % 2 * 2 + 1], z.y, v.y, weight);
              g.word[c] = cuda::two_of<T>(first.dg, second.dg);
              u.word[c] = cuda::two_of<T>(first.du, second.du);
              scaled.word[c] = cuda::two_of<T>(first.scaled, second.scaled);
              dot += first.dot;
              dot += second.dot;
            }
            dot = cuda::lanes_sum<8>(dot);
            if (pair < end && col < inner) {
              here(
                  pair);  // so that addresses are made where they are used, and wait in no register
              const unsigned left = static_cast<unsigned>(col) + lane_now() % 8 * 8;
              int pitch = static_cast<int>(args.inner);
              here(pitch);
              T* to = d_hidden + std::int64_t{pair} * 2 * pitch + left;
              store_now(g, to);
              store_now(u, to + pitch);
              store_now(scaled, active + std::int64_t{pair} * pitch + left);
              if (left % 64 == 0) parts[col / 64 * args.tokens * args.chosen + pair] = dot;
            }
            pair += 4;
            gs = (gs ^ 64U) + 4 * cuda::kTileRow;  // 4 rows on, the chunk beside
            bs = (bs ^ 128U) + 4 * 256;
          }
          __syncwarp();
          release(r, at.slot);
          at.next();
        }
      }
    }
  }
}

// d_hidden [pairs, 2I] · [gate; up], whose depth is I of one and I of the other.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    x_back_kernel(ExpertsArgs args, ExpertsTiles tiles,
                  const __grid_constant__ CUtensorMap d_hidden,
                  const __grid_constant__ CUtensorMap gate, const __grid_constant__ CUtensorMap up,
                  T* out) {
  cuda::wait_turn();
  Room& r = room();
  prepare(r, 1);
  const int inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const int steps = 2 * inner / kDepth, across = (width + kCols - 1) / kCols;
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
          const int depth = s * kDepth;
          r.note[at.slot] = walk.note();
          cuda::barrier_arrive_expect(
              full, kBytesB + static_cast<unsigned>(blocks_of(walk.tile.count)) * kBlockBytesA);
          bring_rows(to, d_hidden, depth, walk.tile, full);
          if (depth < inner) {
            bring_turned(to + kBytesA, gate, walk.col() * kCols, depth, walk.tile.expert, full);
          } else {
            bring_turned(to + kBytesA, up, walk.col() * kCols, depth - inner, walk.tile.expert,
                         full);
          }
        }
      }
      end_notes<false>(r, at);
    }
  } else {
    cuda::take_registers<kMakerRegisters>();
    const unsigned stage = cuda::shared_address(r.stage[threadIdx.x / cuda::kWarp]);
    for (Note tile; (tile = next_note(r, at)).count >= 0;) {
      Sums sums;
      multiply<T, false, true, false>(r, at, steps, blocks_of(tile.count), sums);
      store_sums(stage, sums, out + std::int64_t{tile.first} * width + tile.which * kCols, width,
                 tile.count, width - tile.which * kCols);
    }
  }
}

// ---- gradients of weights: pairs are the depth, and tiles are of all experts, with pairs or without ----
//
// Of each expert [H, n]: rows come from x or dy, gathered, columns from what there is for each pair, brought by the
// copy engine. The last step, with less than 64 pairs, is brought by threads: zeros where there is no
// pair, for what stands there is another expert's, and may be no number.

// Of all experts' tiles, each with `each` of them.
__device__ __forceinline__ Note weight_note(const ExpertsArgs& args, unsigned at, unsigned each,
                                            const unsigned* offsets) {
  const unsigned expert = at / each;
  if (expert >= static_cast<unsigned>(args.experts)) return {-1, 0, 0, 0};
  // Pairs past the end belong to nobody, whatever the offsets say.
  const auto pairs = static_cast<unsigned>(args.tokens * args.chosen);
  const unsigned first = min(__ldg(offsets + expert), pairs);
  const unsigned end = max(first, min(__ldg(offsets + expert + 1), pairs));
  return {static_cast<int>(expert), first, static_cast<int>(end - first),
          static_cast<int>(at - expert * each)};
}

// 64 pairs × blocks of 64 columns, turned: a thread has the same chunk of each block for every 16th pair.
struct PairRows {
  unsigned
      token;  // of the pair that this thread has at the time that its lane among those of a pair says

  __device__ __forceinline__ void find(const ExpertsArgs& args, const unsigned* order,
                                       unsigned first, unsigned count) {
    const unsigned row = loader_thread() % 8 * 16 + loader_thread() / 8;
    token = 0;
    if (row < min(count, unsigned{kDepth})) {
      token = __ldg(order + first + row) / static_cast<unsigned>(args.chosen);
    }
  }
  // Zeros where there is no pair, and nothing where there are no columns: cols: how many from `from` on.
  // kGathered: a row for each token; else for each pair, `from` being the first.
  template <int kBlocksWide, bool kGathered, class T>
  __device__ __forceinline__ void bring(unsigned to, const T* from, unsigned pitch, unsigned cols,
                                        unsigned count) const {
    const unsigned chunk = loader_thread() % 8, first = loader_thread() / 8;
    from += chunk * 8;
    to += cuda::tile_place(first, chunk);  // 16 rows on, the same
#pragma unroll
    for (unsigned i = 0; i < kDepth / 16; ++i, to += 16 * cuda::kTileRow) {
      unsigned row = i * 16 + first;
      const bool there = row < count;
      if constexpr (kGathered) row = __shfl_sync(cuda::kAll, token, static_cast<int>(i), 8);
      const T* at = from + std::uint64_t{row} * pitch;
#pragma unroll
      for (unsigned b = 0; b < kBlocksWide; ++b) {
        if (b * 64 < cols) cuda::bring_chunk(to + b * cuda::kTurnedBlock, at + b * 64, there);
      }
    }
  }
};

// A warp's 16 rows × 64 columns, of an expert without pairs.
template <class T>
__device__ __forceinline__ void store_zeros(T* to, std::int64_t pitch) {
  const unsigned lane = lane_now();
  to += lane / 8 * pitch + lane % 8 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i, to += 4 * pitch)
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
}

// What a group makes, 192 × 128 numbers rounded, waits in a slot of the ring for the copy engine, in tiles of 64 × 64,
// two for each block: the group goes on while they leave.
constexpr unsigned kMadeTile = 64 * cuda::kTileRow;

// This warp's share of a tile. kTurned: rows of the product become columns.
template <class T, bool kTurned>
__device__ __forceinline__ void put_tile(unsigned tile, const Block& sums, int part) {
  const unsigned lane = lane_now(), warp = warp_now() % 4;
  const unsigned at =
      kTurned ? tile + cuda::tile_place(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2)
              : tile + warp * 16 * cuda::kTileRow + cuda::tile_place(lane % 16, lane / 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned w[4];
    words_of<T>(sums, part * 4 + i, w);
    if constexpr (kTurned) {
      cuda::store_turned_at(at + static_cast<unsigned>(i) * 16 * cuda::kTileRow, w);
    } else {
      put_matrices(at, i, w);
    }
  }
}

using WeightRoom = RoomOf<4, 16>;

// kDown: ddown [H, I] from dy and scores∘a; else [dgate; dup] [2I, H] from x and d_hidden, made as [H, 2I].
template <class T, bool kDown>
__global__ void __launch_bounds__(kThreads, 1)
    weights_kernel(ExpertsArgs args, const T* by_token, const T* by_pair,
                   const __grid_constant__ CUtensorMap pairs_map, const unsigned* order,
                   const unsigned* offsets, const __grid_constant__ CUtensorMap out_map,
                   const __grid_constant__ CUtensorMap up_map, T* out, T* out_up) {
  cuda::wait_turn();
  auto& r = room<WeightRoom>();
  prepare(r, cuda::kGroup + 1);
  const auto inner = static_cast<unsigned>(args.inner), width = static_cast<unsigned>(args.width);
  const unsigned wide = kDown ? inner : 2 * inner;
  const unsigned across = (wide + kCols - 1) / kCols;
  const unsigned each = (width + kRows - 1) / kRows * across;
  WeightRoom::Cursor at;
  if (is_loader()) {
    cuda::give_registers<kLoaderRegisters>();
    cuda::see_memory();
    PairRows a;
    unsigned i = blockIdx.x;
    Note tile = weight_note(args, i, each, offsets);
    a.find(args, order, tile.first, static_cast<unsigned>(tile.count));
    while (tile.expert >= 0) {
      i += gridDim.x;
      const Note later = weight_note(args, i, each, offsets);
      const unsigned row = static_cast<unsigned>(tile.which) / across * kRows;
      const unsigned col = static_cast<unsigned>(tile.which) % across * kCols;
      unsigned first = tile.first, count = static_cast<unsigned>(tile.count);
      do {  // without pairs a slot brings the note alone
        wait_empty(r, at);
        const unsigned to = cuda::shared_address(r.slot[at.slot]);
        std::uint64_t* full = &r.full[at.slot];
        if (loader_thread() == 0) {
          r.note[at.slot] = tile;
          if (count >= kDepth) {
            cuda::barrier_arrive_expect(full, kBytesB);
            bring_turned(to + kBytesA, pairs_map, static_cast<int>(col), static_cast<int>(first), 0,
                         full);
          } else {
            cuda::barrier_arrive(full);
          }
        }
        if (count > 0) {
          a.template bring<kRows / 64, true>(to, by_token + row, width, width - row, count);
          if (count < kDepth) {
            a.template bring<kCols / 64, false>(
                to + kBytesA, by_pair + std::uint64_t{first} * wide + col, wide, wide - col, count);
          }
        }
        cuda::arrive_with_chunks(&r.full[at.slot]);
        at.next();
        first += kDepth;
        count -= min(count, unsigned{kDepth});
        if (count > 0) {
          a.find(args, order, first, count);
        } else {
          a.find(args, order, later.first, static_cast<unsigned>(later.count));
        }
      } while (count > 0);
      for (int group = 0; group < 2 && tile.count > 0; ++group, at.next()) {  // for what they make
        wait_empty(r, at);
        if (loader_thread() == 0) cuda::barrier_arrive(&r.full[at.slot]);
        cuda::arrive_with_chunks(&r.full[at.slot]);
      }
      tile = later;
    }
    end_notes<true>(r, at);
  } else {
    cuda::take_registers<kMakerRegisters>();
    const auto group = static_cast<unsigned>(maker_group());
    int leaving = -1;  // the slot from which what this group made is leaving
    // One thread knows when it has left.
    const auto let_go = [&] {
      if (leaving >= 0 && threadIdx.x % cuda::kGroup == 0) {
        cuda::wait_sent();
        cuda::barrier_arrive(&r.empty[leaving], kMakerWarps);
      }
      leaving = -1;
    };
    for (Note tile; (tile = next_note(r, at)).count >= 0;) {
      const unsigned first_row = static_cast<unsigned>(tile.which) / across * kRows;
      const unsigned first_col =
          static_cast<unsigned>(tile.which) % across * kCols + group * kGroupCols;
      const int blocks = blocks_of(static_cast<int>(width - first_row));
      if (tile.count == 0) {
        release(r, at.slot);
        at.next();
        let_go();
        for (int m = 0; m < blocks; ++m) {
          for (int part = 0; part < kGroupCols / 64; ++part) {
            const unsigned row = first_row + static_cast<unsigned>(m) * 64;
            const unsigned col = first_col + static_cast<unsigned>(part) * 64;
            if (col >= wide) break;
            const unsigned warp = warp_now() % 4;
            const auto expert = static_cast<unsigned>(tile.expert);
            if constexpr (kDown) {
              store_zeros(out + (std::uint64_t{expert} * width + row + warp * 16) * inner + col,
                          inner);
            } else {
              const bool of_gate = col < inner;
              const unsigned channel = (of_gate ? col : col - inner) + warp * 16;
              store_zeros((of_gate ? out : out_up) +
                              (std::uint64_t{expert} * inner + channel) * width + row,
                          width);
            }
          }
        }
        continue;
      }
      Sums sums;
      multiply<T, true, true, true>(r, at, (tile.count + kDepth - 1) / kDepth, blocks, sums,
                                    let_go);
      if (group == 1) at.next();
      cuda::barrier_wait(&r.full[at.slot], at.phase);
      leaving = at.slot;
      const unsigned made = cuda::shared_address(r.slot[at.slot]);
      at.next();
      if (group == 0) at.next();
#pragma unroll
      for (int m = 0; m < kBlocksDown; ++m) {
        if (m >= blocks) break;
#pragma unroll
        for (int part = 0; part < kGroupCols / 64; ++part) {
          put_tile<T, !kDown>(made + static_cast<unsigned>(m * 2 + part) * kMadeTile, sums.block[m],
                              part);
        }
      }
      cuda::see_writes();
      asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");  // of the group
      if (threadIdx.x % cuda::kGroup == 0) {
        for (int i = 0; i < 2 * blocks; ++i) {
          const unsigned from = made + static_cast<unsigned>(i) * kMadeTile;
          const auto row = static_cast<int>(first_row) + i / 2 * 64;
          const auto col = static_cast<int>(first_col) + i % 2 * 64;
          const auto end = static_cast<int>(inner);
          if (col >= static_cast<int>(wide)) continue;
          if constexpr (kDown) {
            cuda::send_tile(out_map, from, col, row, tile.expert);
          } else if (col < end) {  // 64 divides I
            cuda::send_tile(out_map, from, row, col, tile.expert);
          } else {
            cuda::send_tile(up_map, from, row, col - end, tile.expert);
          }
        }
        cuda::sent();
      }
    }
    if (threadIdx.x % cuda::kGroup == 0) cuda::wait_arrived();
  }
}

}  // namespace

template <class T>
void hidden_backward(const ExpertsArgs& args, ExpertsTiles tiles, const T* dy, const T* hidden,
                     const unsigned* order, const T* scores, const T* down, T* d_hidden, T* active,
                     float* parts, cudaStream_t stream) {
  cuda::launch(hidden_back_kernel<T>, kBlocks, kThreads, kRoomBytes, 1, stream, args, tiles, dy,
               cuda::tensor_map(hidden, 2 * args.inner, args.tokens * args.chosen, 1, 64), order,
               scores, cuda::tensor_map(down, args.inner, args.width, args.experts, kDepth),
               d_hidden, active, parts);
}

template <class T>
void x_backward(const ExpertsArgs& args, ExpertsTiles tiles, const T* d_hidden, const T* gate,
                const T* up, T* out, cudaStream_t stream) {
  const auto map = [&](const T* w) {
    return cuda::tensor_map(w, args.width, args.inner, args.experts, kDepth);
  };
  cuda::launch(x_back_kernel<T>, kBlocks, kThreads, kRoomBytes, 1, stream, args, tiles,
               cuda::tensor_map(d_hidden, 2 * args.inner, args.tokens * args.chosen, 1, 64),
               map(gate), map(up), out);
}

template <class T>
void weights_backward(const ExpertsArgs& args, const T* x, const T* dy, const T* d_hidden,
                      const T* active, const unsigned* order, const unsigned* offsets, T* dgate,
                      T* dup, T* ddown, cudaStream_t stream) {
  const std::int64_t pairs = args.tokens * args.chosen;
  const auto map = [&](const T* w) {
    return cuda::tensor_map(w, args.width, args.inner, args.experts, 64);
  };
  constexpr int kBytes = kRoomBytesOf<WeightRoom>;
  static_assert(kBytes <= cuda::kSharedBytes);
  cuda::launch(weights_kernel<T, false>, kBlocks, kThreads, kBytes, 1, stream, args, x, d_hidden,
               cuda::tensor_map(d_hidden, 2 * args.inner, pairs, 1, kDepth), order, offsets,
               map(dgate), map(dup), dgate, dup);
  const CUtensorMap down = cuda::tensor_map(ddown, args.inner, args.width, args.experts, 64);
  cuda::launch(weights_kernel<T, true>, kBlocks, kThreads, kBytes, 1, stream, args, dy, active,
               cuda::tensor_map(active, args.inner, pairs, 1, kDepth), order, offsets, down, down,
               ddown, static_cast<T*>(nullptr));
}

#define MT_BACKWARD(T)                                                                            \
  template void hidden_backward<T>(const ExpertsArgs&, ExpertsTiles, const T*, const T*,          \
                                   const unsigned*, const T*, const T*, T*, T*, float*,           \
                                   cudaStream_t);                                                 \
  template void x_backward<T>(const ExpertsArgs&, ExpertsTiles, const T*, const T*, const T*, T*, \
                              cudaStream_t);                                                      \
  template void weights_backward<T>(const ExpertsArgs&, const T*, const T*, const T*, const T*,   \
                                    const unsigned*, const unsigned*, T*, T*, T*, cudaStream_t);
MT_BACKWARD(F16)
MT_BACKWARD(BF16)
#undef MT_BACKWARD

}  // namespace mlxtape::ops::hopper
