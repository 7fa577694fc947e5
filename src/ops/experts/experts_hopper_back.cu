// Backward kernels of experts for compute capability 9.0, 16 bits (design: experts_hopper.cuh).
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

// A warp's 16 rows × 64 columns of the sums from v[first] on, as they are, in both its stages: rows of 256 bytes, 8
// columns of row r at the place of the 8 with r % 8 exclusive-or'ed. Then a lane has 8 columns of a row.
__device__ __forceinline__ void stage_sums(unsigned stage, const cuda::GroupSums& sums, int first) {
  const unsigned lane = threadIdx.x % cuda::kWarp, row = lane / 4;
  unsigned mine = stage + row * 256 + (row << 5U) + lane % 4 * 8;
  here(mine);
#pragma unroll
  for (unsigned eight = 0; eight < 8; ++eight) {
    const unsigned at = mine ^ (eight << 5U);
    const float* v = sums.v + first + eight * 4;
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v[0]), "f"(v[1]) : "memory");
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 8 * 256), "f"(v[2]), "f"(v[3])
                 : "memory");
  }
}
__device__ __forceinline__ void staged_sums(unsigned stage, int row, float (&v)[8]) {
  const auto r = static_cast<unsigned>(row);
  const unsigned at = stage + r * 256 + ((threadIdx.x % 8 ^ r % 8) << 5U);
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[i]), "=f"(v[i + 1]), "=f"(v[i + 2]), "=f"(v[i + 3])
                 : "r"(at + static_cast<unsigned>(i) * 4));
  }
}

// Not before the stores that come before it: what may be loaded at any time all would be, at once, and fill registers.
template <class T>
__device__ __forceinline__ cuda::Pack<T> load_late(const T* p) {
  cuda::Pack<T> pack;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "l"(p)
               : "memory");
  return pack;
}

// What becomes of b = Σ_h dy·down for one element.
struct Back {
  float dg, du, scaled, dot;

  template <class T>
  __device__ static __forceinline__ Back of(float b, float g, float u, float score) {
    const cuda::Sigmoid s = cuda::sigmoid<T>(g);
    const float made = g * s.value, a = made * u, da = score * b;
    return {da * u * fmaf(made, s.rest, s.value), da * made, score * a, b * a};
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    hidden_back_kernel(ExpertsArgs args, ExpertsTiles tiles, const T* dy, const T* hidden,
                       const unsigned* order, const T* scores,
                       const __grid_constant__ CUtensorMap down, T* d_hidden, T* active,
                       float* parts) {
  cuda::wait_turn();
  Room& r = room();
  prepare(r, cuda::kGroup + 1);
  const int inner = static_cast<int>(args.inner), width = static_cast<int>(args.width);
  const int steps = width / kDepth, across = (inner + kCols - 1) / kCols;
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
          cuda::barrier_arrive_expect(&r.full[at.slot], kBytesB);
          bring_turned(to + kBytesA, down, walk.col() * kCols, s * kDepth, walk.tile.expert,
                       &r.full[at.slot]);
        }
        rows.bring(to, dy, static_cast<unsigned>(width), s * kDepth);
        cuda::arrive_with_chunks(&r.full[at.slot]);
      }
    }
  } else {
    cuda::take_registers<kMakerRegisters>();
    const unsigned stage = cuda::shared_address(r.stage[threadIdx.x / cuda::kWarp]);
    const int above = maker_group() * 64, row = above + maker_warp() * 16;
    for (Walk walk(tiles, across); walk.more(); walk.next()) {
      if (walk.tile.count <= above) {
        pass_by(r, at, steps);
      } else {
        cuda::GroupSums sums;
        multiply<T, false, true, true>(r, at, steps, sums);
        const int rows = walk.tile.count - row, first_col = walk.col() * kCols;
        unsigned place = walk.tile.first + static_cast<unsigned>(row + chunk_row(0));
        // A lane has the chunks of the rows chunk_row(0..3).
        float dot[4] = {0, 0, 0, 0};
        unsigned score[2];  // two in each
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const auto of = [&](int j) {
            return chunk_row(j) < rows ? cuda::widen(scores[order[place + 4 * j]]) : 0.0F;
          };
          score[i / 2] = cuda::two_of<T>(of(i), of(i + 1));
        }
#pragma unroll 1
        for (int part = 0; part < kCols / 64; ++part) {
          const bool in = part * 64 + chunk_col() < inner - first_col;
          cuda::Pack<T> gs[4], us[4];
          here(place);  // so that addresses are made where they are used, and wait in no register
          const int col = first_col + part * 64 + chunk_col();
          const T* g_at = hidden + std::int64_t{place} * (2 * inner) + col;
#pragma unroll
          for (int i = 0; i < 4; ++i, g_at += 8 * inner) {
            gs[i] = us[i] = {};
            if (in && chunk_row(i) < rows) {
              gs[i] = load_late(g_at);
              us[i] = load_late(g_at + inner);
            }
          }
#pragma unroll
          for (int p = 0; p < kCols / 64; ++p) {  // registers have no index at run time
            if (p == part) stage_sums(stage, sums, p * 32);
          }
          __syncwarp();
          here(place);
          T* d_at = d_hidden + std::int64_t{place} * (2 * inner) + col;
          T* a_at = active + std::int64_t{place} * inner + col;
#pragma unroll
          for (int i = 0; i < 4; ++i, d_at += 8 * inner, a_at += 4 * inner) {
            float b[8], g[8], u[8], scaled[8];
            staged_sums(stage, chunk_row(i), b);
            const float2 pair = cuda::both_of<T>(score[i / 2]);
            cuda::unpack(gs[i], g);
            cuda::unpack(us[i], u);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
              const Back back = Back::of<T>(b[c], g[c], u[c], i % 2 == 0 ? pair.x : pair.y);
              g[c] = back.dg;
              u[c] = back.du;
              scaled[c] = back.scaled;
              dot[i] += back.dot;
            }
            if (in && chunk_row(i) < rows) {
              cuda::store_pack(cuda::pack_of<T>(g), d_at);
              cuda::store_pack(cuda::pack_of<T>(u), d_at + inner);
              cuda::store_pack(cuda::pack_of<T>(scaled), a_at);
            }
          }
          __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float sum = cuda::lanes_sum<8>(dot[i]);
          if (threadIdx.x % 8 == 0 && chunk_row(i) < rows) {
            parts[walk.col() * args.tokens * args.chosen + place + 4 * i] = sum;
          }
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
          cuda::barrier_arrive_expect(full, kBytesA + kBytesB);
          cuda::bring_tile(to, d_hidden, depth, static_cast<int>(walk.tile.first), 0, full);
          if (depth < inner) {
            bring_turned(to + kBytesA, gate, walk.col() * kCols, depth, walk.tile.expert, full);
          } else {
            bring_turned(to + kBytesA, up, walk.col() * kCols, depth - inner, walk.tile.expert,
                         full);
          }
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
        multiply<T, false, true, false>(r, at, steps, sums);
        store_sums(stage, sums,
                   out + (std::int64_t{walk.tile.first} + row) * width + walk.col() * kCols, width,
                   walk.tile.count - row, width - walk.col() * kCols);
      }
      walk = later;
    }
  }
}

// ---- gradients of weights: pairs are the depth, and tiles are of all experts, with pairs or without ----
//
// Of each expert [H, n]: rows come from x or dy, gathered, columns from what there is for each pair, brought by the
// copy engine. The last step, with less than 64 pairs, is brought by threads: zeros where there is no
// pair, for what stands there is another expert's, and may be no number.

struct WeightTile {
  unsigned expert, row, col, first, count, steps;

  // Pairs past the end belong to nobody, whatever the offsets say.
  __device__ __forceinline__ WeightTile(const ExpertsArgs& args, unsigned at, unsigned down,
                                        unsigned across, const unsigned* offsets) {
    expert = at / (down * across);
    const unsigned in = at - expert * down * across;
    row = in / across * kTilePairs;
    col = in % across * kCols;
    const auto pairs = static_cast<unsigned>(args.tokens * args.chosen);
    first = min(__ldg(offsets + expert), pairs);
    count = max(first, min(__ldg(offsets + expert + 1), pairs)) - first;
    steps = (count + kDepth - 1) / kDepth;
  }
};

// 64 pairs × kWide columns, turned: chunks of a row have consecutive threads, which have one of kAtOnce rows each time.
template <int kWide>
struct PairRows {
  static constexpr unsigned kChunks = kWide / 8, kAtOnce = cuda::kGroup / kChunks;
  unsigned token;  // of the row that this thread has at the time its lane among those of a row says

  __device__ static unsigned chunk() { return loader_thread() % kChunks; }
  __device__ static unsigned begin() { return loader_thread() / kChunks; }

  __device__ __forceinline__ void find(const ExpertsArgs& args, const unsigned* order,
                                       unsigned first, unsigned count) {
    const unsigned row = chunk() * kAtOnce + begin();
    token = 0;
    if (row < min(count, unsigned{kDepth})) {
      token = __ldg(order + first + row) / static_cast<unsigned>(args.chosen);
    }
  }
  // Zeros where there is no pair, or no column. kGathered: a row for each token; else for each pair, `from` being
  // the first.
  template <bool kGathered, class T>
  __device__ __forceinline__ void bring(unsigned to, const T* from, unsigned pitch, unsigned col,
                                        unsigned cols, unsigned count) const {
    const bool in = col + chunk() * 8 < cols;
    from += col + chunk() * 8;
    if constexpr (!kGathered) {
      from += std::uint64_t{begin()} * pitch;
      here(from);
    }
    // kAtOnce is 4 or 8: after 8 rows a chunk has its place again, after 4 the one beside.
    to += chunk() / 8 * cuda::kTurnedBlock + cuda::tile_place(begin(), chunk() % 8);
    const unsigned beside = to ^ 64U;
#pragma unroll
    for (unsigned i = 0; i < kDepth / kAtOnce; ++i) {
      const bool there = in && i * kAtOnce + begin() < count;
      const T* at = from;
      if constexpr (kGathered) {
        at += std::uint64_t{__shfl_sync(cuda::kAll, token, static_cast<int>(i), kChunks)} * pitch;
      } else {
        from += kAtOnce * pitch;
      }
      cuda::bring_chunk((i * kAtOnce % 8 == 0 ? to : beside) + i * kAtOnce * cuda::kTileRow, at,
                        there);
    }
  }
};

// A warp's 16 rows, of an expert without pairs.
template <class T>
__device__ __forceinline__ void store_zeros(T* to, std::int64_t pitch, int cols) {
  for (int part = 0; part * 64 < cols && part * 64 < kCols; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<uint4*>(to + chunk_row(i) * pitch + part * 64 + chunk_col()) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// A group's 64 rows of the sums as 64 columns: `to(part)` is where the 64 columns of the sums from 64·part on begin, as
// rows, or null where there are none. room: 8192 bytes of the group.
template <class T, class To>
__device__ __forceinline__ void store_turned(unsigned room, const cuda::GroupSums& sums,
                                             std::int64_t pitch, const To& to) {
  const unsigned lane = threadIdx.x % cuda::kWarp, warp = static_cast<unsigned>(maker_warp());
  const auto meet = [] {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + maker_group()) : "memory");
  };
#pragma unroll
  for (int part = 0; part < kCols / 64; ++part) {
    T* rows = to(part);
    if (rows == nullptr) return;
    meet();  // the part before has been read
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned w[4];
      words_of(part * 4 + i, w, [&](int j) { return cuda::two_of<T>(sums.v[j], sums.v[j + 1]); });
      const unsigned at =
          room + cuda::tile_place(static_cast<unsigned>(i) * 16 + lane / 16 * 8 + lane % 8,
                                  warp * 2 + lane / 8 % 2);
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
          "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
          : "memory");
    }
    meet();
    store_stage(room + warp * kStageBytes, rows + warp * 16 * pitch, pitch, 16, 64);
  }
}

// kDown: ddown [H, I] from dy and scores∘a; else [dgate; dup] [2I, H] from x and d_hidden, made as [H, 2I].
template <class T, bool kDown>
__global__ void __launch_bounds__(kThreads, 1)
    weights_kernel(ExpertsArgs args, const T* by_token, const T* by_pair,
                   const __grid_constant__ CUtensorMap pairs_map, const unsigned* order,
                   const unsigned* offsets, T* out, T* out_up) {
  cuda::wait_turn();
  Room& r = room();
  prepare(r, cuda::kGroup + 1);
  const auto inner = static_cast<unsigned>(args.inner), width = static_cast<unsigned>(args.width);
  const unsigned wide = kDown ? inner : 2 * inner;
  const unsigned down = (width + kRows - 1) / kRows, across = (wide + kCols - 1) / kCols;
  const unsigned tiles = static_cast<unsigned>(args.experts) * down * across;
  Cursor at;
  if (is_loader()) {
    cuda::give_registers<kLoaderRegisters>();
    cuda::see_memory();
    for (unsigned i = blockIdx.x; i < tiles; i += gridDim.x) {
      const WeightTile tile(args, i, down, across, offsets);
      PairRows<kRows> a;
      a.find(args, order, tile.first, tile.count);
      for (unsigned s = 0; s < tile.steps; ++s, at.next()) {
        const unsigned first = tile.first + s * kDepth, count = tile.count - s * kDepth;
        wait_empty(r, at);
        const unsigned to = cuda::shared_address(r.slot[at.slot]);
        std::uint64_t* full = &r.full[at.slot];
        if (count >= kDepth) {
          if (loader_thread() == 0) {
            cuda::barrier_arrive_expect(full, kBytesB);
            bring_turned(to + kBytesA, pairs_map, static_cast<int>(tile.col),
                         static_cast<int>(first), 0, full);
          }
        } else {
          const PairRows<kCols> b{};
          b.template bring<false>(to + kBytesA, by_pair + std::uint64_t{first} * wide, wide,
                                  tile.col, wide, count);
          if (loader_thread() == 0) cuda::barrier_arrive(full);
        }
        a.template bring<true>(to, by_token, width, tile.row, width, count);
        cuda::arrive_with_chunks(full);
        if (s + 1 < tile.steps) a.find(args, order, first + kDepth, count - kDepth);
      }
    }
  } else {
    cuda::take_registers<kMakerRegisters>();
    const unsigned above = static_cast<unsigned>(maker_group()) * 64;
    const auto warp = static_cast<unsigned>(maker_warp());
    for (unsigned i = blockIdx.x; i < tiles; i += gridDim.x) {
      const WeightTile tile(args, i, down, across, offsets);
      const unsigned row = tile.row + above;
      if (row >= width) {
        pass_by(r, at, static_cast<int>(tile.steps));
        continue;
      }
      // Where 64 columns of the product begin in dgate or dup: 64 divides I.
      const auto turned = [&](int part) -> T* {
        const unsigned col = tile.col + static_cast<unsigned>(part) * 64;
        if (col >= wide) return nullptr;
        return (col < inner ? out : out_up) +
               (std::uint64_t{tile.expert} * inner + (col < inner ? col : col - inner)) * width +
               row;
      };
      T* straight = out + (std::uint64_t{tile.expert} * width + row + warp * 16) * inner + tile.col;
      const int cols = static_cast<int>(wide - tile.col);
      if (tile.steps == 0) {
        if constexpr (kDown) {
          store_zeros(straight, inner, cols);
        } else {
          for (int part = 0; part < kCols / 64; ++part) {
            if (T* to = turned(part)) store_zeros(to + std::uint64_t{warp} * 16 * width, width, 64);
          }
        }
        continue;
      }
      cuda::GroupSums sums;
      multiply<T, true, true, true>(r, at, static_cast<int>(tile.steps), sums);
      if constexpr (kDown) {
        store_sums(cuda::shared_address(r.stage[threadIdx.x / cuda::kWarp]), sums, straight, inner,
                   16, cols);
      } else {
        store_turned<T>(cuda::shared_address(r.stage[maker_group() * 4]), sums, width, turned);
      }
    }
  }
}

}  // namespace

template <class T>
void hidden_backward(const ExpertsArgs& args, ExpertsTiles tiles, const T* dy, const T* hidden,
                     const unsigned* order, const T* scores, const T* down, T* d_hidden, T* active,
                     float* parts, cudaStream_t stream) {
  cuda::launch(hidden_back_kernel<T>, kBlocks, kThreads, kRoomBytes, 1, stream, args, tiles, dy,
               hidden, order, scores,
               cuda::tensor_map(down, args.inner, args.width, args.experts, kDepth), d_hidden,
               active, parts);
}

template <class T>
void x_backward(const ExpertsArgs& args, ExpertsTiles tiles, const T* d_hidden, const T* gate,
                const T* up, T* out, cudaStream_t stream) {
  const auto map = [&](const T* w) {
    return cuda::tensor_map(w, args.width, args.inner, args.experts, kDepth);
  };
  cuda::launch(x_back_kernel<T>, kBlocks, kThreads, kRoomBytes, 1, stream, args, tiles,
               cuda::tensor_map(d_hidden, 2 * args.inner, args.tokens * args.chosen, 1, kRows),
               map(gate), map(up), out);
}

template <class T>
void weights_backward(const ExpertsArgs& args, const T* x, const T* dy, const T* d_hidden,
                      const T* active, const unsigned* order, const unsigned* offsets, T* dgate,
                      T* dup, T* ddown, cudaStream_t stream) {
  const std::int64_t pairs = args.tokens * args.chosen;
  cuda::launch(weights_kernel<T, false>, kBlocks, kThreads, kRoomBytes, 1, stream, args, x,
               d_hidden, cuda::tensor_map(d_hidden, 2 * args.inner, pairs, 1, kDepth), order,
               offsets, dgate, dup);
  cuda::launch(weights_kernel<T, true>, kBlocks, kThreads, kRoomBytes, 1, stream, args, dy, active,
               cuda::tensor_map(active, args.inner, pairs, 1, kDepth), order, offsets, ddown,
               static_cast<T*>(nullptr));
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
