// What the CUDA kernels of kl_divergence share: the arrays of a call, a row's sums and how they join.
#pragma once

#include "backends/cuda/device/kept_rows.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "kl_divergence_args.h"

namespace mlxtape::ops {

namespace {

using cuda::finite_reference;
using cuda::kPack;
using cuda::kWarp;
using cuda::max_nan;
using cuda::narrow;
using cuda::Pack;
using cuda::widen;

// The exponential that either type's results ask for, of (z − m)/T; tiny results are 0 in 16 bits.
template <class Q, class P>
struct Exp {
  static constexpr bool kExact = sizeof(Q) == 4 || sizeof(P) == 4;
  float k;

  __device__ explicit Exp(float inverse) : k(kExact ? inverse : inverse * 1.4426950408889634F) {}
  __device__ float operator()(float x) const {
    if constexpr (kExact) return expf(x * k);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * k));
    return y;
  }
  // Times a constant, for quotients: moved up so that none is tiny.
  static constexpr float kConstant = kExact ? 1.0F : 0x1p-64F;  // what it is too large by
  __device__ float times_constant(float x) const {
    if constexpr (kExact) return expf(x * k);
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, k, 64.0F)));
    return y;
  }
};

// Of some elements: the largest of each, Σ exp((z − that)/T) of each, and cross = Σ exp((p − m_p)/T)·(p − q).
struct Sums {
  float m_q = -INFINITY, q = 0, m_p = -INFINITY, p = 0, cross = 0;

  // n elements more.
  template <class E, int kCount>
  __device__ __forceinline__ void add(const E& e, const float (&vq)[kCount],
                                      const float (&vp)[kCount]) {
    float top_q = m_q;
    float top_p = m_p;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      top_q = max_nan(top_q, vq[i]);
      top_p = max_nan(top_p, vp[i]);
    }
    const float ref_q = finite_reference(top_q);
    const float ref_p = finite_reference(top_p);
    const float to_p = e(m_p - ref_p);
    q *= e(m_q - ref_q);
    p *= to_p;
    cross = to_p == 0 ? 0 : cross * to_p;  // cross may be infinite
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float e_p = e(vp[i] - ref_p);
      q += e(vq[i] - ref_q);
      p += e_p;
      // 0·∞ where the teacher has nothing; NaN is in the sums already.
      cross += e_p > 0 ? e_p * (vp[i] - vq[i]) : 0;
    }
    m_q = top_q;
    m_p = top_p;
  }

  // To other references; sums of nothing stay so.
  __device__ __forceinline__ void move(float inverse, float top_q, float top_p) {
    const float to_p = expf((m_p - finite_reference(top_p)) * inverse);
    q *= expf((m_q - finite_reference(top_q)) * inverse);
    p *= to_p;
    cross = to_p == 0 ? 0 : cross * to_p;
    m_q = top_q;
    m_p = top_p;
  }
  // Over a warp.
  __device__ __forceinline__ void join_lanes(float inverse) {
    move(inverse, cuda::lanes_max(m_q), cuda::lanes_max(m_p));
    q = cuda::lanes_sum(q);
    p = cuda::lanes_sum(p);
    cross = cuda::lanes_sum(cross);
  }
  // The loss of a row before its weight.
  __device__ float divergence(const KlDivergenceArgs& args) const {
    const float apart = cross / p + (m_q - m_p);
    return args.factor * (args.inverse * apart + (logf(q) - logf(p)));
  }
};
constexpr int kSums = 5;

// kCount of them, in room[number][i], joined in every thread of a warp; kCount at most a warp.
template <int kCount>
__device__ __forceinline__ Sums join_room(const float (*room)[kCount], float inverse) {
  const int lane = threadIdx.x % kWarp;
  Sums all;
  if (lane < kCount) {
    all.m_q = room[0][lane];
    all.q = room[1][lane];
    all.m_p = room[2][lane];
    all.p = room[3][lane];
    all.cross = room[4][lane];
  }
  all.join_lanes(inverse);
  return all;
}
template <int kCount>
__device__ __forceinline__ void leave(const Sums& sums, float (*room)[kCount], int i) {
  room[0][i] = sums.m_q;
  room[1][i] = sums.q;
  room[2][i] = sums.m_p;
  room[3][i] = sums.p;
  room[4][i] = sums.cross;
}

// dq[v] = exp((q − m_q)/T)·share_q − exp((p − m_p)/T)·share_p, for Exp::times_constant.
struct Gradient {
  float m_q, share_q, m_p, share_p;

  // c: dloss·w, divided by Σ w for a mean.
  __device__ Gradient(const KlDivergenceArgs& args, float c, float mq, float sum_q, float mp,
                      float sum_p, float constant)
      : m_q(mq), m_p(mp) {
    c *= args.factor * args.inverse * constant;
    share_q = c / sum_q;
    share_p = c / sum_p;
  }
  template <class E>
  __device__ float at(const E& e, float q, float p) const {
    return e.times_constant(q - m_q) * share_q - e.times_constant(p - m_p) * share_p;
  }
};

// The arrays of a forward call.
template <class Q, class P>
struct Rows {
  KlDivergenceArgs args;
  const Q* q;           // [R, V]
  const P* p;           // [R, V]
  const float* weight;  // [R]
  const float* scale;   // [1]
  float* loss;          // [R]
  float* norm;          // [R, 4] or null
  Q* dq;                // [R, V] or null

  Rows from(std::int64_t row, std::int64_t rows) const {
    Rows some = *this;
    some.args.rows = rows;
    some.q += row * args.cols;
    if (p != nullptr) some.p += row * args.cols;
    some.weight += row;
    some.loss += row;
    if (norm != nullptr) some.norm += 4 * row;
    if (dq != nullptr) some.dq += row * args.cols;
    return some;
  }
  // By one thread.
  __device__ void write_loss(std::int64_t r, float w, const Sums& sums) const {
    loss[r] = w == 0 ? 0 : w * sums.divergence(args);
    if (norm != nullptr) {
      norm[4 * r] = sums.m_q;
      norm[4 * r + 1] = sums.q;
      norm[4 * r + 2] = sums.m_p;
      norm[4 * r + 3] = sums.p;
    }
  }
};

}  // namespace

}  // namespace mlxtape::ops
