// Rows that threadgroups walk, as real kernels do: the backward pass of a norm, in three types.
#include <metal_stdlib>
using namespace metal;

constant bool has_weight [[function_constant(0)]];

struct RowsArgs {
  long rows;
  long cols;
  uint rows_each;
  uint unused;
};

// dx and each threadgroup's part of dw. Columns of a thread stay in registers; r is one over the root mean square.
template <typename T, int kPacks>
[[kernel]] void norm_backward(device const T* x [[buffer(0)]], device const T* w [[buffer(1)]],
                              device const float* r [[buffer(2)]], device const T* dy [[buffer(3)]],
                              device T* dx [[buffer(4)]], device float* parts [[buffer(5)]],
                              constant RowsArgs& args [[buffer(6)]],
                              uint group [[threadgroup_position_in_grid]],
                              uint tid [[thread_position_in_threadgroup]],
                              uint threads [[threads_per_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint simd [[simdgroup_index_in_threadgroup]],
                              uint simds [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[2][32];
  using Pack = vec<T, 4>;
  float dw[kPacks][4], weight[kPacks][4];
  for (int p = 0; p < kPacks; ++p) {
    const long c = (long(p) * threads + tid) * 4;
    for (int i = 0; i < 4; ++i) {
      dw[p][i] = 0;
      weight[p][i] = c < args.cols ? (has_weight ? float(w[c + i]) : 1.0) : 0.0;
    }
  }
  int turn = 0;
  const long first = long(group) * args.rows_each;
  for (long row = first; row < min(first + long(args.rows_each), args.rows); ++row, turn ^= 1) {
    Pack xs[kPacks], dys[kPacks];
    float sum = 0;
    for (int p = 0; p < kPacks; ++p) {
      const long c = (long(p) * threads + tid) * 4;
      xs[p] = Pack(T(0));
      dys[p] = Pack(T(0));
      if (c < args.cols) {
        xs[p] = *(device const Pack*)(x + row * args.cols + c);
        dys[p] = *(device const Pack*)(dy + row * args.cols + c);
      }
      for (int i = 0; i < 4; ++i) {
        const float v = float(xs[p][i]), g = float(dys[p][i]);
        dw[p][i] = fma(v * r[row], g, dw[p][i]);
        sum = fma(g * weight[p][i], v, sum);
      }
    }
    sum = simd_sum(sum);
    if (lane == 0) sums[turn][simd] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = simd_sum(lane < simds ? sums[turn][lane] : 0.0f);
    const float pull = sum * r[row] / float(args.cols) * r[row];
    for (int p = 0; p < kPacks; ++p) {
      const long c = (long(p) * threads + tid) * 4;
      if (c >= args.cols) continue;
      Pack out;
      for (int i = 0; i < 4; ++i) {
        out[i] = T(r[row] * fma(float(dys[p][i]), weight[p][i], -float(xs[p][i]) * pull));
      }
      *(device Pack*)(dx + row * args.cols + c) = out;
    }
  }
  for (int p = 0; p < kPacks; ++p) {
    const long c = (long(p) * threads + tid) * 4;
    if (c >= args.cols) continue;
    for (int i = 0; i < 4; ++i) parts[long(group) * args.cols + c + i] = dw[p][i];
  }
}

#define NORM_BACKWARD(name, T, packs) \
  template [[host_name(name)]] [[kernel]] decltype(norm_backward<T, packs>) norm_backward<T, packs>;
NORM_BACKWARD("norm_backward_f32", float, 1)
NORM_BACKWARD("norm_backward_f16", half, 1)
NORM_BACKWARD("norm_backward_bf16", bfloat, 1)
NORM_BACKWARD("norm_backward_bf16_2", bfloat, 2)

// Sums by a tree: many barriers, many switches.
kernel void sum_by_tree(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                        uint group [[threadgroup_position_in_grid]],
                        uint tid [[thread_index_in_threadgroup]],
                        uint threads [[threads_per_threadgroup]],
                        threadgroup float* room [[threadgroup(0)]]) {
  room[tid] = x[group * threads + tid];
  for (uint n = threads / 2; n > 0; n /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < n) room[tid] += room[tid + n];
  }
  if (tid == 0) y[group] = room[0];
}

// For timing: barriers, exchanges, and nothing at all.
kernel void twenty_barriers(device float* x [[buffer(0)]], uint tid [[thread_index_in_threadgroup]],
                            uint group [[threadgroup_position_in_grid]],
                            uint threads [[threads_per_threadgroup]]) {
  threadgroup float room[1024];
  float v = x[group * threads + tid];
  for (int i = 0; i < 10; ++i) {
    room[tid] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    v = 0.5f * (v + room[(tid + 1) % threads]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  x[group * threads + tid] = v;
}
kernel void twenty_sums(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float v = x[i];
  for (int k = 0; k < 20; ++k) v = 0.03125f * simd_sum(v);
  x[i] = v;
}
kernel void add_one(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] += 1;
}
kernel void halve(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] *= 0.5;
}
kernel void nothing(device float* x [[buffer(0)]]) {}
