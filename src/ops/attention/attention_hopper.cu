// Forward of attention for compute capability 9.0, 16 bits, widths over 128 (formula: mlxtape/ops/attention.h).
//
// A block has 128 queries of a head, a group of makers 64 of them. The scores of the next keys are made while the values
// of the keys before are added, so that the tensor cores work through the softmax: of 2048 cycles that the products of 64
// keys take, the exponentials take 512. Reading the factors takes as long as the products, at 128 bytes a cycle.
#include "attention_hopper.cuh"

namespace mlxtape::ops::hopper {

namespace {

struct Room {
  Tiles<4> tiles;
  alignas(1024) unsigned char q[2][kTileBytes];
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    forward(AttentionArgs args, AttentionInputs<T> in, T* y, float* lse) {
  cuda::wait_turn();
  Room& r = room_of<Room>();
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
  const auto value_dim = static_cast<int>(args.value_dim);
  Tiles<4>::At at;
  if (threadIdx.x >= 2 * cuda::kGroup) {
    cuda::give_registers<kLoaderRegisters>();
    if (steps <= 0) return;
    const unsigned kh = h / static_cast<unsigned>(args.heads / args.key_heads);
    const auto dim = static_cast<int>(args.dim), keys = static_cast<int>(s.keys);
    const T* q = in.q + s.batch * args.q[0] + (s.query + first) * args.q[1] + h * args.q[2];
    const T* k = in.k + s.batch * args.k[0] + (s.key + from) * args.k[1] + kh * args.k[2];
    const T* v = in.v + s.batch * args.v[0] + (s.key + from) * args.v[1] + kh * args.v[2];
    for (int half = 0; half < 2; ++half) {
      bring_rows(cuda::shared_address(r.q[half]), q + half * kTile * args.q[1], args.q[1],
                 here - half * kTile, dim);
    }
    cuda::arrive_with_chunks(&r.tiles.kept);
    for (int step = 0; step < steps; ++step) {
      const int left = keys - from - step * kTile;
      for (const bool values : {false, true}) {
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

  cuda::GroupSums values;
  values.clear();
  cuda::GroupTile<kTile> scores;
  unsigned weights[kTile / 16][4];
  Softening soft;
  const auto soften = [&](int j) {
    const bool all = args.scale >= 0 && all_count(args, span, j, kTile);
    if (!all) count<false>(scores.v, args, in, s, h, j, span, row);
    soft.next(scores.v, all ? args.scale * kLog2E : 1);
  };
  if (steps > 0) {
    if (maker_group() == 1) your_turn();
    r.tiles.wait_kept();
    const std::uint64_t q_at = cuda::factor_at(cuda::shared_address(r.q[maker_group()]));
    std::uint64_t k_at = r.tiles.wait_full(at);
    cuda::products_begin();
    begin_scores<T>(scores, q_at, k_at);
    cuda::products_commit();
    cuda::products_wait<0>();
    scores.settle();
    r.tiles.release(at);
    at.next();
    soften(from);
    as_factor<T>(weights, scores.v);
    for (int step = 1; step < steps; ++step) {
      // In the ring the values of a step stand before the next step's keys.
      const auto values_at = at;
      at.next();
      my_turn();
      k_at = r.tiles.wait_full(at);
      cuda::products_begin();
      begin_scores<T>(scores, q_at, k_at);
      cuda::products_commit();
      const std::uint64_t v_at = r.tiles.wait_full(values_at);
      cuda::products_begin();
      begin_sums<T>(values, weights, v_at);
      cuda::products_commit();
      your_turn();
      cuda::products_wait<1>();
      scores.settle();
      r.tiles.release(at);
      at.next();
      soften(from + step * kTile);
      cuda::products_wait<0>();
      values.settle();
      r.tiles.release(values_at);
      // Most steps have no new maximum.
      if (__any_sync(cuda::kAll, soft.keep[0] != 1 || soft.keep[1] != 1)) {
#pragma unroll
        for (int i = 0; i < 128; ++i) values.v[i] *= soft.keep[i / 2 % 2];
      }
      as_factor<T>(weights, scores.v);
    }
    const std::uint64_t v_at = r.tiles.wait_full(at);
    cuda::products_begin();
    begin_sums<T>(values, weights, v_at);
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
    const std::int64_t out = (s.batch * args.queries + s.query + first + place) * args.heads + h;
    if (two == 0) lse[out] = total.lse;
    T* to_y = y + out * value_dim + two;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      if (n * 8 < value_dim) {
        *reinterpret_cast<unsigned*>(to_y + n * 8) = cuda::two_of<T>(
            values.v[n * 4 + i * 2] * total.factor, values.v[n * 4 + i * 2 + 1] * total.factor);
      }
    }
  }
}

}  // namespace

template <class T>
void attention_forward(const KernelCall& call) {
  const auto& args = call.as<AttentionArgs>();
  cuda::launch(forward<T>, blocks_of(args, false, kQueries) * args.heads, kThreads,
               kRoomBytes<Room>, 1, static_cast<cudaStream_t>(call.queue), args, inputs_of<T>(call),
               call.output<T>(0), call.output<float>(1));
}

template void attention_forward<F16>(const KernelCall& call);
template void attention_forward<BF16>(const KernelCall& call);

}  // namespace mlxtape::ops::hopper
