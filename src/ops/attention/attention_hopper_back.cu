// Backward of attention for compute capability 9.0, 16 bits, widths over 64 (formula: mlxtape/ops/attention.h).
//
// As in attention.cu the products with the keys are made twice, for dq and for dk and dv, so that nothing is added by two
// blocks and no gradient waits for another's turn: 7 products where 5 would do.
#include "attention_hopper.cuh"

namespace mlxtape::ops::hopper {

namespace {

// dy lies without gaps, [B, T, H, Dv].
template <class T>
struct Gradient {
  const T* at;
  std::int64_t stride[3];
};

// ---- dq: a block has 128 queries of a head, a group 64, and goes over the keys ----

// Values before keys, which are needed longer.
template <int kWidth>
struct QueriesRoom {
  alignas(1024) unsigned char tile[3][kTileBytes<kWidth, kTile>];
  unsigned char q[2][kTileBytes<kWidth, kTile>], dy[2][kTileBytes<kWidth, kTile>];
  Signals<3> ring;
  std::uint64_t kept;  // full when q and dy are there
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    queries_back(AttentionArgs args, AttentionInputs<T> in,
                 const __grid_constant__ CUtensorMap map_q,
                 const __grid_constant__ CUtensorMap map_k,
                 const __grid_constant__ CUtensorMap map_v,
                 const __grid_constant__ CUtensorMap map_dy, Gradient<T> dy, const float* lse,
                 const float* row_dots, T* dq) {
  cuda::wait_turn();
  auto& r = room_of<QueriesRoom<kWidth>>();
  const auto heads = static_cast<unsigned>(args.heads);
  const unsigned h = blockIdx.x % heads;
  Sequence s{};
  const std::int64_t first = find<kQueries>(args, in, from_the_end(heads), false, s);
  if (first < 0) return;
  if (threadIdx.x == 0) {
    r.ring.init();
    cuda::barrier_init(&r.kept, cuda::kWarp);
    cuda::barrier_init_done();
  }
  __syncthreads();
  const int here = static_cast<int>(min(std::int64_t{kQueries}, s.queries - first));
  const auto from = static_cast<int>(first_key(args, s, first));
  const auto to = static_cast<int>(last_key(args, s, first + here - 1));
  const int steps = (to - from + kTile - 1) / kTile;  // may be 0
  // The step, the last if any, whose tiles would hold another sequence's rows.
  const int cut = args.sequences != 0 && from + steps * kTile > s.keys ? steps - 1 : -1;
  const std::int64_t head_row = (s.batch * args.queries + s.query + first) * args.heads + h;
  Signals<3>::At at;
  if (threadIdx.x >= 2 * cuda::kGroup) {
    cuda::give_registers<kLoaderRegisters>();
    if (steps <= 0 || !is_loader()) return;
    cuda::see_memory();
    const unsigned kh = h / static_cast<unsigned>(args.heads / args.key_heads);
    for (int half = 0; half < 2; ++half) {
      const auto keep = [&](unsigned char* where, const Rows<T>& rows) {
        bring_rows<kWidth, kTile>(cuda::shared_address(where), rows, s.batch,
                                  s.query + first + half * kTile, h, kTile, false, &r.kept);
      };
      keep(r.dy[half], {map_dy, dy.at, dy.stride, args.value_dim});
      keep(r.q[half], {map_q, in.q, args.q, args.dim});
    }
    arrive_with_rows(&r.kept, false);
    for (int step = 0; step < steps; ++step) {
      const int key = from + step * kTile;
      const auto bring = [&](const Rows<T>& rows) {
        r.ring.wait_empty(at);
        std::uint64_t* full = &r.ring.full[at.slot];
        bring_rows<kWidth, kTile>(cuda::shared_address(r.tile[at.slot]), rows, s.batch, s.key + key,
                                  kh, static_cast<int>(s.keys) - key, step == cut, full);
        arrive_with_rows(full, step == cut);
        at.next();
      };
      bring({map_v, in.v, args.v, args.value_dim});
      bring({map_k, in.k, args.k, args.dim});
    }
    return;
  }
  cuda::take_registers<kMakerRegisters>();
  const int lane = threadIdx.x % cuda::kWarp, warp_row = threadIdx.x / cuda::kWarp * 16;
  const auto row = [&](int i) {
    return first + min(warp_row + lane / 4 + 8 * i, here - 1);
  };
  const Span span[2] = {span_of(args, s, row(0)), span_of(args, s, row(1))};
  float shift[2], dot[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::int64_t place = head_row + (row(i) - first) * args.heads;
    // Where no key counts every score is −inf; then p is 0 with any number here.
    shift[i] = lse[place] == -INFINITY ? 0 : lse[place] * kLog2E;
    dot[i] = row_dots[place];
  }
  cuda::GroupTile<kWidth> sums;
  sums.clear();
  cuda::GroupTile<kTile> p, d;
  const auto weigh = [&](int j) {
    const bool all = all_count(args, span, j, kTile);
    if (!all) count<false>(p.v, args, in, s, h, j, span, row);
    const float factor = all ? args.scale * kLog2E : 1;
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d.v[n][i] = power_of_two(fmaf(p.v[n][i], factor, -shift[i / 2])) * (d.v[n][i] - dot[i / 2]);
      }
    }
  };
  const auto tile_at = [&](const Signals<3>::At& slot) {
    return cuda::factor_at(cuda::shared_address(r.tile[slot.slot]));
  };
  if (steps > 0) {
    cuda::barrier_wait(&r.kept, 0);
    const std::uint64_t q_at = cuda::factor_at(cuda::shared_address(r.q[maker_group()]));
    const std::uint64_t dy_at = cuda::factor_at(cuda::shared_address(r.dy[maker_group()]));
    // The other group's products fill the time of this one's weights: registers for more under way are not there.
    for (int step = 0; step < steps; ++step) {
      const auto values_at = at;
      at.next();
      r.ring.wait_full(values_at, step == cut);
      cuda::products_begin();
      begin_scores<T, kWidth>(d, dy_at, tile_at(values_at));
      cuda::products_commit();
      r.ring.wait_full(at, step == cut);
      const std::uint64_t k_at = tile_at(at);
      cuda::products_begin();
      begin_scores<T, kWidth>(p, q_at, k_at);
      cuda::products_commit();
      cuda::products_wait<1>();
      r.ring.release(values_at);
      cuda::products_wait<0>();
      p.settle();
      d.settle();
      weigh(from + step * kTile);
      unsigned weights[kTile / 16][4];
      as_factor<T>(weights, d.v);
      cuda::products_begin();
      begin_sums<T, kWidth>(sums, weights, k_at);
      cuda::products_commit();
      cuda::products_wait<0>();
      sums.settle();
      r.ring.release(at);
      at.next();
    }
  }
  const int two = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = warp_row + lane / 4 + 8 * i;
    if (place >= here) continue;
    T* out = dq + (head_row + place * args.heads) * args.dim + two;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      if (n * 8 < args.dim) {
        *reinterpret_cast<unsigned*>(out + n * 8) =
            cuda::two_of<T>(sums.v[n][i * 2] * args.scale, sums.v[n][i * 2 + 1] * args.scale);
      }
    }
  }
}

// ---- dk and dv: a block has 64 keys, and goes over the heads that share them and their queries ----
//
// The first group makes the weights p and sums dv, the second makes their gradients d of the first one's weights and
// sums dk. Behind its sums a group has the products for the next step under way, and works on these while the other's
// are: both tensor core time and shared memory are in use throughout.

// The first 64 channels of keys and values stay in registers: a step reads less from shared memory, and there is room for
// three tiles of queries, which are needed from a step's first product to its last.
constexpr int kHeld = 64 / 16;
template <int kWidth>
struct KeysRoom {
  static constexpr unsigned kKeptBytes = kTileBytes<kWidth, kTile> - kBlockBytes<kTile>;
  alignas(1024) unsigned char q[3][kTileBytes<kWidth, kTile>];
  unsigned char dy[2][kTileBytes<kWidth, kTile>], k[kKeptBytes], v[kKeptBytes];
  // Weights, from a thread to the same thread of the other group; before the first weights what is to be held of k, v.
  union {
    float4 told[kTile / 8][cuda::kGroup];
    unsigned char held[2][kBlockBytes<kTile>];
  };
  float shift[3][kTile], dot[2][kTile];
  Signals<3> q_ring;
  Signals<2> dy_ring;
  std::uint64_t kept;   // full when k and v are there
  std::uint64_t heard;  // full when there is room for the next weights
  std::int64_t out;     // the first row of the results: makers have no registers to keep it in
};
static_assert(kRoomBytes<KeysRoom<256>> <= cuda::kSharedBytes);

// Between the groups: there are weights to read.
__device__ __forceinline__ void tell() { asm volatile("bar.arrive 1, 256;" ::: "memory"); }
__device__ __forceinline__ void hear() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    keys_back(AttentionArgs args, AttentionInputs<T> in, const __grid_constant__ CUtensorMap map_q,
              const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
              const __grid_constant__ CUtensorMap map_dy, Gradient<T> dy, const float* lse,
              const float* row_dots, KeyGradients<T> to) {
  cuda::wait_turn();
  auto& r = room_of<KeysRoom<kWidth>>();
  const auto heads = static_cast<unsigned>(args.key_heads), parts = static_cast<unsigned>(to.count);
  const unsigned part = blockIdx.x % parts, kh = blockIdx.x / parts % heads;
  Sequence s{};
  const std::int64_t first = find<kTile>(args, in, blockIdx.x / parts / heads, true, s);
  if (first < 0) return;
  if (threadIdx.x == 0) {
    // A group's threads read a number of each row, and the other's products read the tile.
    r.q_ring.init(cuda::kGroup + kMakerWarps / 2);
    r.dy_ring.init(cuda::kGroup + kMakerWarps / 2);
    cuda::barrier_init(&r.kept, cuda::kWarp);
    cuda::barrier_init(&r.heard, 2 * cuda::kGroup);
    r.out = (s.batch * args.keys + s.key + first) * args.key_heads + kh;
    cuda::barrier_init_done();
  }
  __syncthreads();
  const int here = static_cast<int>(min(std::int64_t{kTile}, s.keys - first));
  const auto group = static_cast<int>(args.heads / args.key_heads) / to.count;
  const unsigned first_head = (kh * parts + part) * static_cast<unsigned>(group);
  // The queries for which one of these keys counts.
  const std::int64_t ahead = s.keys - s.queries;
  std::int64_t begin = 0, end = s.queries;
  if (args.causal != 0) begin = min(max(first - ahead, std::int64_t{0}), s.queries) / kTile * kTile;
  if (args.window != 0) end = min(max(first + here + args.window - 1 - ahead, begin), s.queries);
  const auto steps = static_cast<int>((end - begin + kTile - 1) / kTile);
  const int all = steps * group;
  const auto head_of = [&](int step) {
    return first_head + static_cast<unsigned>(step / steps);
  };
  const auto query_of = [&](int step) {
    return begin + step % steps * kTile;
  };
  Signals<3>::At q_at;
  Signals<2>::At dy_at;
  if (threadIdx.x >= 2 * cuda::kGroup) {
    cuda::give_registers<kLoaderRegisters>();
    if (all <= 0 || !is_loader()) return;
    cuda::see_memory();
    const auto lane = static_cast<int>(threadIdx.x % cuda::kWarp);
    if (lane == 0) {
      cuda::barrier_expect(&r.kept, 2 * kTileBytes<kWidth, kTile>);
      const auto keep = [&](const CUtensorMap& map, unsigned char* held, unsigned char* rest) {
        for (int c = 0; c < kWidth / 64; ++c) {
          unsigned char* where = c == 0 ? held : rest + (c - 1) * kBlockBytes<kTile>;
          cuda::bring_tile(cuda::shared_address(where), map, c * 64,
                           static_cast<int>(s.key + first), static_cast<int>(kh),
                           static_cast<int>(s.batch), &r.kept);
        }
      };
      keep(map_k, r.held[0], r.k);
      keep(map_v, r.held[1], r.v);
    }
    arrive_with_rows(&r.kept, false);
    // Of each query its lse and D, a step ahead.
    float shift[2], dot[2];
    const auto look = [&](int step) {
      const std::int64_t t = query_of(step);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::int64_t row = t + lane + i * cuda::kWarp;
        const bool there = row < s.queries;
        const std::int64_t place =
            (s.batch * args.queries + s.query + row) * args.heads + head_of(step);
        shift[i] = there ? lse[place] : 0;
        dot[i] = there ? row_dots[place] : 0;
      }
    };
    look(0);
#pragma unroll 1
    for (int step = 0; step < all; ++step) {
      const std::int64_t t = query_of(step);
      const auto left = static_cast<int>(min(s.queries - t, std::int64_t{kTile}));
      const bool cut = args.sequences != 0 && left < kTile;
      const auto bring = [&](unsigned char* where, const Rows<T>& rows, std::uint64_t* full) {
        bring_rows<kWidth, kTile>(cuda::shared_address(where), rows, s.batch, s.query + t,
                                  head_of(step), left, cut, full);
      };
      r.q_ring.wait_empty(q_at);
      bring(r.q[q_at.slot], {map_q, in.q, args.q, args.dim}, &r.q_ring.full[q_at.slot]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        r.shift[q_at.slot][lane + i * cuda::kWarp] = shift[i] == -INFINITY ? 0 : shift[i] * kLog2E;
      }
      arrive_with_rows(&r.q_ring.full[q_at.slot], cut);
      q_at.next();
      r.dy_ring.wait_empty(dy_at);
      bring(r.dy[dy_at.slot], {map_dy, dy.at, dy.stride, args.value_dim},
            &r.dy_ring.full[dy_at.slot]);
#pragma unroll
      for (int i = 0; i < 2; ++i) r.dot[dy_at.slot][lane + i * cuda::kWarp] = dot[i];
      arrive_with_rows(&r.dy_ring.full[dy_at.slot], cut);
      dy_at.next();
      if (step + 1 < all) look(step + 1);
    }
    return;
  }
  cuda::take_registers<kMakerRegisters>();
  const int lane = threadIdx.x % cuda::kWarp, warp = threadIdx.x / cuda::kWarp % 4;
  const int two = lane % 4 * 2;
  const bool may_be_cut = args.sequences != 0;
  cuda::GroupTile<kWidth> sums;
  sums.clear();
  cuda::GroupTile<kTile> tile;
  unsigned held[kHeld][4], weights[kTile / 16][4];
  const auto hold = [&](const unsigned char* from) {
    cuda::barrier_wait(&r.kept, 0);
#pragma unroll
    for (int l = 0; l < kHeld; ++l) {
      cuda::load_matrices(
          cuda::shared_address(from) + static_cast<unsigned>(warp) * 16 * cuda::kTileRow, l,
          held[l]);
    }
  };
  // tile = (k or v) · bᵀ
  const auto begin_tile = [&](std::uint64_t kept, const unsigned char* rows) {
    const std::uint64_t b = cuda::factor_at(cuda::shared_address(rows));
    cuda::products_begin();
#pragma unroll
    for (int l = 0; l < kWidth / 16; ++l) {
      constexpr std::uint64_t kNextBlock = kBlockBytes<kTile> >> 4;
      const std::uint64_t next = l % 4 * cuda::kNextDepth<false>;
      if (l < kHeld) {
        cuda::group_product<T, false>(tile, held[l], b + next, l);
      } else {
        cuda::group_product<T, false, false>(tile, kept + (l / 4 - 1) * kNextBlock + next,
                                             b + l / 4 * kNextBlock + next, l);
      }
    }
    cuda::products_commit();
  };
  const auto begin_add = [&](const unsigned char* rows) {
    as_factor<T>(weights, tile.v);
    cuda::products_begin();
    begin_sums<T, kWidth>(sums, weights, cuda::factor_at(cuda::shared_address(rows)));
    cuda::products_commit();
  };
  if (all > 0 && maker_group() == 0) {
    // All keys count for all queries of a tile that begins in [whole_from, whole_to].
    const auto whole_from = static_cast<int>(args.causal == 0 ? 0 : first + kTile - 1 - ahead);
    std::int64_t last_whole = here < kTile ? -1 : s.queries - kTile;
    if (args.window != 0) last_whole = min(last_whole, first + args.window - kTile - ahead);
    const auto whole_to = static_cast<int>(max(last_whole, std::int64_t{-1}));
    const auto weigh = [&](int step) {
      const auto t = static_cast<int>(query_of(step));
      const float* shift = r.shift[q_at.slot] + two;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        const float2 both = *reinterpret_cast<const float2*>(shift + n * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          tile.v[n][i] =
              power_of_two(fmaf(tile.v[n][i], args.scale * kLog2E, i % 2 == 0 ? -both.x : -both.y));
        }
      }
      r.q_ring.release_by_each(q_at);
      if (t < whole_from || t > whole_to) {
        const int key = static_cast<int>(first) + warp * 16 + lane / 4;
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int query = t + n * 8 + two + i;
            const Span span = query < s.queries ? span_of(args, s, query) : Span{0, 0};
            if (key < span.first || key >= span.last) tile.v[n][i] = 0;
            if (key + 8 < span.first || key + 8 >= span.last) tile.v[n][i + 2] = 0;
          }
        }
      }
      // The ring of dy has two slots: which one is the step's parity.
      cuda::barrier_wait(&r.heard, static_cast<unsigned>(dy_at.slot));
      cuda::barrier_arrive(
          &r.heard);  // for the next: all had to arrive once, when k and v were held
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        const auto& v = tile.v[n];
        r.told[n][threadIdx.x] = {v[0], v[1], v[2], v[3]};
      }
      tell();
      r.dy_ring.wait_full(dy_at, may_be_cut);
      begin_add(r.dy[dy_at.slot]);
    };
    hold(r.held[0]);
    cuda::barrier_arrive(&r.heard);
    const std::uint64_t k_at = cuda::factor_at(cuda::shared_address(r.k));
    r.q_ring.wait_full(q_at, may_be_cut);
    begin_tile(k_at, r.q[q_at.slot]);
    cuda::products_wait<0>();
    tile.settle();
    for (int step = 0; step + 1 < all; ++step) {
      weigh(step);
      q_at.next();
      r.q_ring.wait_full(q_at, may_be_cut);
      begin_tile(k_at, r.q[q_at.slot]);
      cuda::products_wait<1>();
      r.dy_ring.release(dy_at);
      dy_at.next();
      cuda::products_wait<0>();
      tile.settle();
    }
    weigh(all - 1);
    cuda::products_wait<0>();
    sums.settle();
  } else if (all > 0) {
    const auto weigh = [&] {
      const float* dot = r.dot[dy_at.slot] + two;
      hear();
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        const float2 both = *reinterpret_cast<const float2*>(dot + n * 8);
        const float4 p = r.told[n][threadIdx.x % cuda::kGroup];
        auto& v = tile.v[n];
        v[0] = p.x * (v[0] - both.x);
        v[1] = p.y * (v[1] - both.y);
        v[2] = p.z * (v[2] - both.x);
        v[3] = p.w * (v[3] - both.y);
      }
      r.dy_ring.release_by_each(dy_at);
    };
    hold(r.held[1]);
    cuda::barrier_arrive(&r.heard);
    const std::uint64_t v_at = cuda::factor_at(cuda::shared_address(r.v));
    r.dy_ring.wait_full(dy_at, may_be_cut);
    begin_tile(v_at, r.dy[dy_at.slot]);
    cuda::products_wait<0>();
    tile.settle();
    for (int step = 0; step + 1 < all; ++step) {
      weigh();
      cuda::barrier_arrive(&r.heard);
      r.q_ring.wait_full(q_at, may_be_cut);
      begin_add(r.q[q_at.slot]);
      dy_at.next();
      r.dy_ring.wait_full(dy_at, may_be_cut);
      begin_tile(v_at, r.dy[dy_at.slot]);
      cuda::products_wait<1>();
      r.q_ring.release(q_at);
      q_at.next();
      cuda::products_wait<0>();
      tile.settle();
    }
    weigh();
    r.q_ring.wait_full(q_at, may_be_cut);
    begin_add(r.q[q_at.slot]);
    cuda::products_wait<0>();
    sums.settle();
  }
  const std::int64_t out = r.out;
  const bool of_keys = maker_group() == 1;
  const float factor = of_keys ? args.scale : 1;
  const std::int64_t width = of_keys ? args.dim : args.value_dim;
  const int before = of_keys ? 0 : static_cast<int>(args.dim);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = warp * 16 + lane / 4 + 8 * i;
    if (place >= here) continue;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      if (n * 8 < width) {
        to.store(args, static_cast<int>(part), out + place * args.key_heads, before + n * 8 + two,
                 sums.v[n][i * 2] * factor, sums.v[n][i * 2 + 1] * factor);
      }
    }
  }
}

}  // namespace

template <class T>
void attention_backward(const KernelCall& call, const float* row_dots, const KeyGradients<T>& to) {
  const auto& args = call.as<AttentionArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const AttentionInputs<T> in = inputs_of<T>(call);
  const auto* lse = call.input<float>(8);
  const Gradient<T> dy{
      call.input<T>(9),
      {args.queries * args.heads * args.value_dim, args.heads * args.value_dim, args.value_dim}};
  const Maps<T> maps(args, in, kTile);
  const CUtensorMap map_dy =
      rows_map(dy.at, args.batch, args.queries, args.heads, args.value_dim, dy.stride, kTile);
  with_width(args, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    cuda::launch(queries_back<T, kWidth>, blocks_of(args, false, kQueries) * args.heads, kThreads,
                 kRoomBytes<QueriesRoom<kWidth>>, 1, stream, args, in, maps.q, maps.k, maps.v,
                 map_dy, dy, lse, row_dots, call.output<T>(0));
    cuda::launch(keys_back<T, kWidth>, blocks_of(args, true, kTile) * args.key_heads * to.count,
                 kThreads, kRoomBytes<KeysRoom<kWidth>>, 1, stream, args, in, maps.q, maps.k,
                 maps.v, map_dy, dy, lse, row_dots, to);
  });
}

template void attention_backward<F16>(const KernelCall& call, const float* row_dots,
                                      const KeyGradients<F16>& to);
template void attention_backward<BF16>(const KernelCall& call, const float* row_dots,
                                       const KeyGradients<BF16>& to);

}  // namespace mlxtape::ops::hopper
