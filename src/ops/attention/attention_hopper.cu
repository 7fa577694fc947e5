// Forward of attention for compute capability 9.0, 16 bits, widths over 64 (formula: mlxtape/ops/attention.h).
//
// A block has 128 queries of a head, a group of makers 64 of them. The scores of the next keys are made while the values
// of the keys before are added, so that the tensor cores work through the softmax: of 2560 cycles that the products of 80
// keys take, the exponentials take 640. With 80 keys reading the factors takes 0.95 of the time of the products, at 128
// bytes a cycle; with 64 it takes all of it, and a block 1.16 times as long as its products (with 80: 1.01).
#include "attention_hopper.cuh"

namespace mlxtape::ops::hopper {

namespace {

// With fewer makers would spill, at width 256; the loader would, at width 128.
template <int kWidth>
constexpr int kFewRegisters = kWidth == 256 ? 24 : kLoaderRegisters;
template <int kWidth>
constexpr int kMostRegisters = kWidth == 256 ? 240 : kMakerRegisters;

template <int kWidth>
struct Room {
  static constexpr int kKeys = kWidth == 256 ? 80 : 128;
  alignas(1024) unsigned char tile[4][kTileBytes<kWidth, kKeys>], q[2][kTileBytes<kWidth, kTile>];
  Signals<4> ring;
  std::uint64_t kept;  // full when q is there
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    forward(AttentionArgs args, AttentionInputs<T> in, const __grid_constant__ CUtensorMap map_q,
            const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
            T* y, float* lse) {
  cuda::wait_turn();
  constexpr int kKeys = Room<kWidth>::kKeys;
  auto& r = room_of<Room<kWidth>>();
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
  const int steps = (to - from + kKeys - 1) / kKeys;  // may be 0
  // The step, the last if any, whose tiles would hold another sequence's rows.
  const int cut = args.sequences != 0 && from + steps * kKeys > s.keys ? steps - 1 : -1;
  Signals<4>::At at;
  if (threadIdx.x >= 2 * cuda::kGroup) {
    cuda::give_registers<kFewRegisters<kWidth>>();
    if (steps <= 0 || !is_loader()) return;
    cuda::see_memory();
    const unsigned kh = h / static_cast<unsigned>(args.heads / args.key_heads);
    for (int half = 0; half < 2; ++half) {
      bring_rows<kWidth, kTile>(cuda::shared_address(r.q[half]),
                                Rows<T>{map_q, in.q, args.q, args.dim}, s.batch,
                                s.query + first + half * kTile, h, kTile, false, &r.kept);
    }
    arrive_with_rows(&r.kept, false);
    for (int step = 0; step < steps; ++step) {
      const int key = from + step * kKeys;
      const auto bring = [&](const Rows<T>& rows) {
        r.ring.wait_empty(at);
        std::uint64_t* full = &r.ring.full[at.slot];
        bring_rows<kWidth, kKeys>(cuda::shared_address(r.tile[at.slot]), rows, s.batch, s.key + key,
                                  kh, static_cast<int>(s.keys) - key, step == cut, full);
        arrive_with_rows(full, step == cut);
        at.next();
      };
      bring({map_k, in.k, args.k, args.dim});
      bring({map_v, in.v, args.v, args.value_dim});
    }
    return;
  }
  cuda::take_registers<kMostRegisters<kWidth>>();
  const int lane = threadIdx.x % cuda::kWarp, warp_row = threadIdx.x / cuda::kWarp * 16;
  const auto row = [&](int i) {
    return first + min(warp_row + lane / 4 + 8 * i, here - 1);
  };
  const Span span[2] = {span_of(args, s, row(0)), span_of(args, s, row(1))};
  const std::int64_t head_row = (s.batch * args.queries + s.query + first) * args.heads + h;

  cuda::GroupTile<kWidth> values;
  values.clear();
  cuda::GroupTile<kKeys> scores;
  unsigned weights[kKeys / 16][4];
  Softening soft;
  const auto soften = [&](int j) {
    const bool all = args.scale >= 0 && all_count(args, span, j, kKeys);
    if (!all) count<false>(scores.v, args, in, s, h, j, span, row);
    soft.next(scores.v, all ? args.scale * kLog2E : 1);
  };
  const auto tile_at = [&](const Signals<4>::At& slot) {
    return cuda::factor_at<kKeys>(cuda::shared_address(r.tile[slot.slot]));
  };
  if (steps > 0) {
    cuda::barrier_wait(&r.kept, 0);
    const std::uint64_t q_at = cuda::factor_at(cuda::shared_address(r.q[maker_group()]));
    r.ring.wait_full(at, cut == 0);
    cuda::products_begin();
    begin_scores<T, kWidth>(scores, q_at, tile_at(at));
    cuda::products_commit();
    cuda::products_wait<0>();
    scores.settle();
    r.ring.release(at);
    at.next();
    soften(from);
    as_factor<T>(weights, scores.v);
    for (int step = 1; step < steps; ++step) {
      // In the ring the values of a step stand before the next step's keys.
      const auto values_at = at;
      at.next();
      r.ring.wait_full(at, step == cut);
      cuda::products_begin();
      begin_scores<T, kWidth>(scores, q_at, tile_at(at));
      cuda::products_commit();
      r.ring.wait_full(values_at, false);
      cuda::products_begin();
      begin_sums<T, kWidth>(values, weights, tile_at(values_at));
      cuda::products_commit();
      cuda::products_wait<1>();
      scores.settle();
      r.ring.release(at);
      at.next();
      soften(from + step * kKeys);
      cuda::products_wait<0>();
      values.settle();
      r.ring.release(values_at);
      if (__any_sync(cuda::kAll, soft.keep[0] != 1 || soft.keep[1] != 1)) {
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) values.v[i / 4][i % 4] *= soft.keep[i / 2 % 2];
      }
      as_factor<T>(weights, scores.v);
    }
    r.ring.wait_full(at, cut >= 0);
    cuda::products_begin();
    begin_sums<T, kWidth>(values, weights, tile_at(at));
    cuda::products_commit();
    cuda::products_wait<0>();
    values.settle();
  }
  const int two = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = warp_row + lane / 4 + 8 * i;
    const Total total = total_of(soft.most[i], over_lanes_of_row(soft.sum[i]),
                                 in.sinks == nullptr ? -INFINITY : in.sinks[h]);
    if (place >= here) continue;
    const std::int64_t out = head_row + place * args.heads;
    if (two == 0) lse[out] = total.lse;
    T* to_y = y + out * args.value_dim + two;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      if (n * 8 < args.value_dim) {
        *reinterpret_cast<unsigned*>(to_y + n * 8) = cuda::two_of<T>(
            values.v[n][i * 2] * total.factor, values.v[n][i * 2 + 1] * total.factor);
      }
    }
  }
}

}  // namespace

template <class T>
void attention_forward(const KernelCall& call) {
  const auto& args = call.as<AttentionArgs>();
  const AttentionInputs<T> in = inputs_of<T>(call);
  with_width(args, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    const Maps<T> maps(args, in, Room<kWidth>::kKeys);
    cuda::launch(forward<T, kWidth>, blocks_of(args, false, kQueries) * args.heads, kThreads,
                 kRoomBytes<Room<kWidth>>, 1, static_cast<cudaStream_t>(call.queue), args, in,
                 maps.q, maps.k, maps.v, call.output<T>(0), call.output<float>(1));
  });
}

template void attention_forward<F16>(const KernelCall& call);
template void attention_forward<BF16>(const KernelCall& call);

}  // namespace mlxtape::ops::hopper
