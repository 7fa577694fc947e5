// Backward of attention for compute capability 9.0, 16 bits, widths over 128 (formula: mlxtape/ops/attention.h).
//
// As in attention.cu the products with the keys are made twice, for dq and for dk and dv, so that nothing is added by two
// blocks and no gradient waits for another's turn: 7 products where 5 would do.
#include "attention_hopper.cuh"

namespace mlxtape::ops::hopper {

namespace {

// ---- dq: a block has 128 queries of a head, a group 64, and goes over the keys ----

// Values before keys, which are needed longer.
struct QueriesRoom {
  Tiles<3> tiles;
  alignas(1024) unsigned char q[2][kTileBytes], dy[2][kTileBytes];
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    queries_back(AttentionArgs args, AttentionInputs<T> in, const T* dy, const float* lse,
                 const float* row_dots, T* dq) {
  cuda::wait_turn();
  auto& r = room_of<QueriesRoom>();
  const auto heads = static_cast<unsigned>(args.heads);
  const unsigned h = blockIdx.x % heads;
  Sequence s{};
  const std::int64_t first = find<kQueries>(args, in, from_the_end(heads), false, s);
  if (first < 0) return;
  r.tiles.prepare();
  const int here = static_cast<int>(min(std::int64_t{kQueries}, s.queries - first));
  const int from = static_cast<int>(first_key(args, s, first)) / kTile * kTile;
  const int to = static_cast<int>(last_key(args, s, first + here - 1));
  const int steps = (to - from + kTile - 1) / kTile;  // may be 0
  const auto dim = static_cast<int>(args.dim);
  const std::int64_t head_row = (s.batch * args.queries + s.query + first) * args.heads + h;
  Tiles<3>::At at;
  if (threadIdx.x >= 2 * cuda::kGroup) {
    cuda::give_registers<kLoaderRegisters>();
    if (steps <= 0) return;
    const unsigned kh = h / static_cast<unsigned>(args.heads / args.key_heads);
    const auto value_dim = static_cast<int>(args.value_dim), keys = static_cast<int>(s.keys);
    const T* q = in.q + s.batch * args.q[0] + (s.query + first) * args.q[1] + h * args.q[2];
    const T* k = in.k + s.batch * args.k[0] + (s.key + from) * args.k[1] + kh * args.k[2];
    const T* v = in.v + s.batch * args.v[0] + (s.key + from) * args.v[1] + kh * args.v[2];
    for (int half = 0; half < 2; ++half) {
      bring_rows(cuda::shared_address(r.q[half]), q + half * kTile * args.q[1], args.q[1],
                 here - half * kTile, dim);
      const std::int64_t stride = args.heads * value_dim;
      bring_rows(cuda::shared_address(r.dy[half]),
                 dy + head_row * value_dim + half * kTile * stride, stride, here - half * kTile,
                 value_dim);
    }
    cuda::arrive_with_chunks(&r.tiles.kept);
    for (int step = 0; step < steps; ++step) {
      const int left = keys - from - step * kTile;
      for (const bool values : {true, false}) {
        r.tiles.wait_empty(at);
        const std::int64_t stride = values ? args.v[1] : args.k[1];
        bring_rows(r.tiles.address(at), (values ? v : k) + step * kTile * stride, stride, left,
                   values ? value_dim : dim);
        cuda::arrive_with_chunks(&r.tiles.full[at.slot]);
        at.next();
      }
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
  cuda::GroupSums sums;
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
  if (steps > 0) {
    r.tiles.wait_kept();
    const std::uint64_t q_at = cuda::factor_at(cuda::shared_address(r.q[maker_group()]));
    const std::uint64_t dy_at = cuda::factor_at(cuda::shared_address(r.dy[maker_group()]));
    // The other group's products fill the time of this one's weights: registers for more under way are not there.
    for (int step = 0; step < steps; ++step) {
      const auto values_at = at;
      at.next();
      const std::uint64_t v_at = r.tiles.wait_full(values_at), k_at = r.tiles.wait_full(at);
      cuda::products_begin();
      begin_scores<T>(d, dy_at, v_at);
      begin_scores<T>(p, q_at, k_at);
      cuda::products_commit();
      cuda::products_wait<0>();
      p.settle();
      d.settle();
      r.tiles.release(values_at);
      weigh(from + step * kTile);
      unsigned weights[kTile / 16][4];
      as_factor<T>(weights, d.v);
      cuda::products_begin();
      begin_sums<T>(sums, weights, k_at);
      cuda::products_commit();
      cuda::products_wait<0>();
      sums.settle();
      r.tiles.release(at);
      at.next();
    }
  }
  const int two = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = warp_row + lane / 4 + 8 * i;
    if (place >= here) continue;
    T* out = dq + (head_row + place * args.heads) * dim + two;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      if (n * 8 < dim) {
        *reinterpret_cast<unsigned*>(out + n * 8) = cuda::two_of<T>(
            sums.v[n * 4 + i * 2] * args.scale, sums.v[n * 4 + i * 2 + 1] * args.scale);
      }
    }
  }
}

// ---- dk and dv: a block has 64 keys, and goes over the heads that share them and their queries ----

// A group makes the weights of all keys and half of 64 queries, then sums for half of the channels: each needs the
// other's weights, which go through shared memory.
struct KeysRoom {
  Tiles<4> tiles;
  alignas(1024) unsigned char k[kTileBytes], v[kTileBytes];
  unsigned char p[kBlockBytes], d[kBlockBytes];  // [keys][queries], rows as in a tile
  float shift[2][kTile], dot[2][kTile];
  Span span[2][kTile];
};

__device__ __forceinline__ void makers_meet() { asm volatile("bar.sync 3, 256;" ::: "memory"); }

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    keys_back(AttentionArgs args, AttentionInputs<T> in, const T* dy, const float* lse,
              const float* row_dots, KeyGradients<T> to) {
  cuda::wait_turn();
  auto& r = room_of<KeysRoom>();
  const auto heads = static_cast<unsigned>(args.key_heads), parts = static_cast<unsigned>(to.count);
  const unsigned part = blockIdx.x % parts, kh = blockIdx.x / parts % heads;
  Sequence s{};
  const std::int64_t first = find<kTile>(args, in, blockIdx.x / parts / heads, true, s);
  if (first < 0) return;
  r.tiles.prepare();
  const int here = static_cast<int>(min(std::int64_t{kTile}, s.keys - first));
  const auto group = static_cast<int>(args.heads / args.key_heads) / to.count;
  const std::int64_t first_head = std::int64_t{kh} * to.count * group + part * group;
  const auto dim = static_cast<int>(args.dim), value_dim = static_cast<int>(args.value_dim);
  // The queries for which one of these keys counts.
  const std::int64_t ahead = s.keys - s.queries;
  std::int64_t begin = 0, end = s.queries;
  if (args.causal != 0) begin = min(max(first - ahead, std::int64_t{0}), s.queries) / kTile * kTile;
  if (args.window != 0) end = min(max(first + here + args.window - 1 - ahead, begin), s.queries);
  const auto steps = static_cast<int>((end - begin + kTile - 1) / kTile);
  const int all = steps * group;
  Tiles<4>::At at;
  if (threadIdx.x >= 2 * cuda::kGroup) {
    cuda::give_registers<kLoaderRegisters>();
    if (all <= 0) return;
    bring_rows(cuda::shared_address(r.k),
               in.k + s.batch * args.k[0] + (s.key + first) * args.k[1] + kh * args.k[2], args.k[1],
               here, dim);
    bring_rows(cuda::shared_address(r.v),
               in.v + s.batch * args.v[0] + (s.key + first) * args.v[1] + kh * args.v[2], args.v[1],
               here, value_dim);
    cuda::arrive_with_chunks(&r.tiles.kept);
    for (int step = 0; step < all; ++step) {
      const std::int64_t h = first_head + step / steps;
      const std::int64_t t0 = s.query + begin + std::int64_t{step % steps} * kTile;
      const auto left = static_cast<int>(min(s.query + s.queries - t0, std::int64_t{kTile}));
      r.tiles.wait_empty(at);
      bring_rows(r.tiles.address(at), in.q + s.batch * args.q[0] + t0 * args.q[1] + h * args.q[2],
                 args.q[1], left, dim);
      cuda::arrive_with_chunks(&r.tiles.full[at.slot]);
      at.next();
      r.tiles.wait_empty(at);
      bring_rows(r.tiles.address(at),
                 dy + ((s.batch * args.queries + t0) * args.heads + h) * value_dim,
                 args.heads * value_dim, left, value_dim);
      cuda::arrive_with_chunks(&r.tiles.full[at.slot]);
      at.next();
    }
    return;
  }
  cuda::take_registers<kMakerRegisters>();
  const int lane = threadIdx.x % cuda::kWarp, warp = threadIdx.x / cuda::kWarp % 4;
  const int half = maker_group();
  cuda::GroupTile<kWidth / 2> sum_k, sum_v;
  sum_k.clear();
  sum_v.clear();
  // Of each query its lse, D and keys; a step ahead.
  const auto look = [&](int step) {
    if (threadIdx.x >= kTile) return;
    const std::int64_t t = begin + std::int64_t{step % steps} * kTile + threadIdx.x;
    const bool there = t < s.queries;
    const std::int64_t place = (s.batch * args.queries + s.query + (there ? t : 0)) * args.heads +
                               first_head + step / steps;
    const int i = threadIdx.x, stage = step % 2;
    r.shift[stage][i] = there && lse[place] != -INFINITY ? lse[place] * kLog2E : 0;
    r.dot[stage][i] = there ? row_dots[place] : 0;
    r.span[stage][i] = there ? span_of(args, s, t) : Span{0, 0};
  };
  if (all > 0) {
    look(0);
    r.tiles.wait_kept();
    const std::uint64_t k_at = cuda::factor_at(cuda::shared_address(r.k));
    const std::uint64_t v_at = cuda::factor_at(cuda::shared_address(r.v));
    const std::uint64_t p_at = cuda::factor_at(cuda::shared_address(r.p));
    const std::uint64_t d_at = cuda::factor_at(cuda::shared_address(r.d));
    const unsigned slab = static_cast<unsigned>(warp) * 16 * cuda::kTileRow;
    const std::uint64_t half_queries =
        static_cast<unsigned>(half) * (kTile / 2 * cuda::kTileRow >> 4);
    const std::uint64_t half_channels = static_cast<unsigned>(half) * (2 * kBlockBytes >> 4);
    for (int step = 0; step < all; ++step) {
      const auto queries_at = at;
      at.next();
      const auto grads_at = at;
      at.next();
      const std::uint64_t q_at = r.tiles.wait_full(queries_at);
      const std::uint64_t dy_at = r.tiles.wait_full(grads_at);
      cuda::GroupTile<kTile / 2> p, d;
      cuda::products_begin();
      begin_scores<T>(p, k_at, q_at + half_queries);
      begin_scores<T>(d, v_at, dy_at + half_queries);
      cuda::products_commit();
      cuda::products_wait<0>();
      p.settle();
      d.settle();
      // Both groups' sums of the step before are done, so that the weights may be written, and look's numbers are there.
      makers_meet();
      if (step + 1 < all) look(step + 1);
      const int stage = step % 2;
#pragma unroll
      for (int n = 0; n < kTile / 16; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int c = half * (kTile / 2) + n * 8 + lane % 4 * 2 + i % 2;
          const int j = static_cast<int>(first) + warp * 16 + lane / 4 + i / 2 * 8;
          const Span span = r.span[stage][c];
          float weight = 0;
          if (j >= span.first && j < span.last) {
            weight = power_of_two(fmaf(p.v[n][i], args.scale * kLog2E, -r.shift[stage][c]));
          }
          p.v[n][i] = weight;
          d.v[n][i] = weight * (d.v[n][i] - r.dot[stage][c]);
        }
      }
      unsigned words[kTile / 32][4];
      as_factor<T>(words, p.v);
#pragma unroll
      for (int i = 0; i < kTile / 32; ++i) {
        cuda::store_matrices(cuda::shared_address(r.p) + slab, half * 2 + i, words[i]);
      }
      as_factor<T>(words, d.v);
#pragma unroll
      for (int i = 0; i < kTile / 32; ++i) {
        cuda::store_matrices(cuda::shared_address(r.d) + slab, half * 2 + i, words[i]);
      }
      cuda::see_writes();
      makers_meet();
      cuda::products_begin();
#pragma unroll
      for (int l = 0; l < kTile / 16; ++l) {
        cuda::group_product<T, false, true>(sum_v, p_at + l * cuda::kNextDepth<false>,
                                            dy_at + half_channels + l * cuda::kNextDepth<true>, 1);
      }
#pragma unroll
      for (int l = 0; l < kTile / 16; ++l) {
        cuda::group_product<T, false, true>(sum_k, d_at + l * cuda::kNextDepth<false>,
                                            q_at + half_channels + l * cuda::kNextDepth<true>, 1);
      }
      cuda::products_commit();
      cuda::products_wait<0>();
      sum_k.settle();
      sum_v.settle();
      r.tiles.release(queries_at);
      r.tiles.release(grads_at);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = warp * 16 + lane / 4 + 8 * i;
    if (place >= here) continue;
    const std::int64_t out = (s.batch * args.keys + s.key + first + place) * args.key_heads + kh;
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      const int c = half * (kWidth / 2) + n * 8, two = lane % 4 * 2;
      if (c < dim) {
        to.store(args, static_cast<int>(part), out, c + two, sum_k.v[n][2 * i] * args.scale,
                 sum_k.v[n][2 * i + 1] * args.scale);
      }
      if (c < value_dim) {
        to.store(args, static_cast<int>(part), out, dim + c + two, sum_v.v[n][2 * i],
                 sum_v.v[n][2 * i + 1]);
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
  const T* dy = call.input<T>(9);
  if (args.batch * args.queries * args.heads > 0) {
    cuda::launch(queries_back<T>, blocks_of(args, false, kQueries) * args.heads, kThreads,
                 kRoomBytes<QueriesRoom>, 1, stream, args, in, dy, lse, row_dots,
                 call.output<T>(0));
  }
  if (args.batch * args.keys > 0) {
    cuda::launch(keys_back<T>, blocks_of(args, true, kTile) * args.key_heads * to.count, kThreads,
                 kRoomBytes<KeysRoom>, 1, stream, args, in, dy, lse, row_dots, to);
  }
}

template void attention_backward<F16>(const KernelCall& call, const float* row_dots,
                                      const KeyGradients<F16>& to);
template void attention_backward<BF16>(const KernelCall& call, const float* row_dots,
                                       const KeyGradients<BF16>& to);

}  // namespace mlxtape::ops::hopper
