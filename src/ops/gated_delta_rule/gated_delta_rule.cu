// CUDA kernels of gated_delta_rule (formula: mlxtape/ops/gated_delta_rule.h; the chunks: gated_delta_rule.cpu.cpp).
//
// A block has some value channels (a slice) of one value head of one sequence and goes through the sequence in
// chunks of 16 tokens, with its slice of the state in shared memory. Products run on the tensor cores with f32 split
// in two (products.cuh). What queries, keys and decays owe to a slice is kept by slice and head and added up, in
// order, by a kernel at the end. Bound by how long a chunk takes: one follows the other.
#include <algorithm>
#include <array>
#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/products.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "gated_delta_rule_args.h"
#include "gated_delta_rule_chunks.cuh"
#include "gated_delta_rule_heads.cuh"
#include "mlxtape/base/checked.h"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

using namespace heads;

// ---- a chunk, by the whole block ----

// Arrays in shared memory are found by their place: pointers to all of them would take more registers than there are.
struct Chunk {
  Sizes size;
  float* at;

  // [tokens, Dk], as the formula has them; 0, 0, β = 0, g = 1 where there is no token; e∘q, e∘k; and A_Ct∘k_t behind
  // the last token.
  __device__ float* q() const { return at; }
  __device__ float* k() const { return at + size.keys(); }
  __device__ float* g() const { return at + 2 * size.keys(); }
  __device__ float* qe() const { return at + 3 * size.keys(); }
  __device__ float* ke() const { return at + 4 * size.keys(); }
  __device__ float* faded() const { return at + 5 * size.keys(); }
  __device__ float* last_e() const { return at + 6 * size.keys(); }  // [Dk]
  __device__ float* w() const { return last_e() + size.pk; }         // [tokens, slice]
  __device__ float* u() const { return w() + size.values(); }        // [tokens, slice]
  __device__ float* m() const { return u() + size.values(); }        // [tokens, tokens]
  __device__ float* n() const { return m() + kChunk * kPair; }       // [tokens, tokens]
  __device__ float* beta() const { return n() + kChunk * kPair; }
  __host__ __device__ static int room(const Sizes& s) {
    return 6 * s.keys() + s.pk + 2 * s.values() + 2 * kChunk * kPair + kChunk;
  }

  template <class T>
  __device__ void open(const Head<T>& h, std::int64_t t) {
    const GatedDeltaRuleArgs& args = h.args;
    const int lane = threadIdx.x % cuda::kWarp;
    for (int i = threadIdx.x / cuda::kWarp; i < kChunk; i += kWarps) {
      const bool there = h.there(t + i);
      const std::int64_t at = there ? h.by_head(t + i) : 0;
      const T* from_q = there ? h.row(h.in.q, args.q, t + i, h.key_head) : nullptr;
      const T* from_k = there ? h.row(h.in.k, args.k, t + i, h.key_head) : nullptr;
      float squares_q = 0, squares_k = 0;
      const float one_g = there && args.per_channel == 0 ? h.in.decay[at] : 0;
      for (int j = lane; j < size.nk; j += cuda::kWarp) {
        const bool real = there && j < size.dk;
        const float vq = real ? cuda::widen(from_q[j]) : 0;
        const float vk = real ? cuda::widen(from_k[j]) : 0;
        squares_q += vq * vq;
        squares_k += vk * vk;
        q()[i * size.pk + j] = vq;
        k()[i * size.pk + j] = vk;
        float fade = 1;
        if (real) {
          fade = args.per_channel != 0 ? h.in.decay[at * size.dk + j] : one_g;
          if (args.log_decay != 0) fade = expf(fade);
        }
        g()[i * size.pk + j] = fade;
      }
      float fq = 1, fk = 1;
      if (args.normalise != 0 && there) {
        fq = 1 / sqrtf(cuda::lanes_sum<cuda::kWarp>(squares_q) + args.eps);
        fk = 1 / sqrtf(cuda::lanes_sum<cuda::kWarp>(squares_k) + args.eps);
      }
      for (int j = lane; j < size.nk; j += cuda::kWarp) {
        q()[i * size.pk + j] *= fq * args.scale;
        k()[i * size.pk + j] *= fk;
      }
      if (lane == 0) {
        beta()[i] = there ? h.in.beta[at] : 0;
      }
      const T* from_v = there ? h.row(h.in.v, args.v, t + i, h.head) + h.from : nullptr;
      for (int j = lane; j < size.nv; j += cuda::kWarp) {
        w()[i * size.pv + j] = there && j < h.width ? cuda::widen(from_v[j]) : 0;
      }
    }
    __syncthreads();
    for (int j = threadIdx.x; j < size.nk; j += kThreads) {
      float e = 1;
      for (int i = 0; i < kChunk; ++i) {
        e *= g()[i * size.pk + j];
        qe()[i * size.pk + j] = e * q()[i * size.pk + j];
        ke()[i * size.pk + j] = e * k()[i * size.pk + j];
      }
      last_e()[j] = e;
      float behind = 1;
      for (int i = kChunk - 1; i >= 0; --i) {
        faded()[i * size.pk + j] = behind * k()[i * size.pk + j];
        behind *= g()[i * size.pk + j];
      }
    }
    meet();
  }

  // M and N: a warp follows a key from its token on as it fades, and takes two of them.
  __device__ void meet() {
    constexpr int kEach = 8;  // channels of a lane
    const int lane = threadIdx.x % cuda::kWarp;
    for (int half = 0; half < 2; ++half) {
      const int warp = threadIdx.x / cuda::kWarp;
      const int i = half == 0 ? warp : kChunk - 1 - warp;
      float key[kEach];
#pragma unroll
      for (int c = 0; c < kEach; ++c) {
        const int j = lane + c * cuda::kWarp;
        key[c] = j < size.nk ? k()[i * size.pk + j] : 0;
      }
      for (int t = 0; t < kChunk; ++t) {
        float with_q = 0, with_k = 0;
        if (t >= i) {
#pragma unroll
          for (int c = 0; c < kEach; ++c) {
            const int j = lane + c * cuda::kWarp;
            if (j >= size.nk) continue;
            if (t > i) key[c] *= g()[t * size.pk + j];
            with_q = fmaf(q()[t * size.pk + j], key[c], with_q);
            with_k = fmaf(k()[t * size.pk + j], key[c], with_k);
          }
          with_q = cuda::lanes_sum<cuda::kWarp>(with_q);
          with_k = cuda::lanes_sum<cuda::kWarp>(with_k);
        }
        if (lane == 0) {
          m()[t * kPair + i] = with_q;
          n()[t * kPair + i] = t > i ? with_k : 0;
        }
      }
    }
    __syncthreads();
  }

  // w = V − (e∘K)·S, for w = V. u is used on the way.
  __device__ void recall(const float* state) {
    cuda::product(false, {ke(), size.pk, 1}, {state, size.pv, 1}, u(), size.pv, kChunk, size.nv,
                  size.nk);
    __syncthreads();
    for (int i = threadIdx.x; i < size.values(); i += kThreads) w()[i] -= u()[i];
    __syncthreads();
  }

  // U from w: a thread has a channel.
  __device__ void solve() {
    for (int j = threadIdx.x; j < size.nv; j += kThreads) {
      float made[kChunk];
#pragma unroll
      for (int t = 0; t < kChunk; ++t) {
        float rest = w()[t * size.pv + j];
#pragma unroll
        for (int i = 0; i < t; ++i) rest = fmaf(-n()[t * kPair + i], made[i], rest);
        made[t] = beta()[t] * rest;
        u()[t * size.pv + j] = made[t];
      }
    }
    __syncthreads();
  }

  // The state behind the chunk, [Dk, slice].
  __device__ void advance(float* state) const {
    for (int i = threadIdx.x; i < size.by_key(); i += kThreads) state[i] *= last_e()[i / size.pv];
    __syncthreads();
    cuda::product(true, {faded(), 1, size.pk}, {u(), size.pv, 1}, state, size.pv, size.nk, size.nv,
                  kChunk);
    __syncthreads();
  }
};

// A slice of a state [Dv, Dk] without gaps, to and from [Dk, slice].
template <class T>
__device__ void load_state(const Head<T>& h, const Sizes& size, const float* from, float* state) {
  for (int i = threadIdx.x; i < size.by_key(); i += kThreads) state[i] = 0;
  __syncthreads();
  if (from != nullptr) {
    for (int i = threadIdx.x; i < h.width * size.dk; i += kThreads) {
      state[i % size.dk * size.pv + i / size.dk] = from[h.state() + i];
    }
  }
  __syncthreads();
}

// ---- forward ----

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    forward(GatedDeltaRuleArgs args, Inputs<T> in, T* y, float* final_state) {
  cuda::wait_turn();
  extern __shared__ float shared[];
  const Sizes size(args);
  const Head<T> h(args, in, size, blockIdx.x);
  Chunk chunk{size, shared};
  float* state = shared + Chunk::room(size);
  float* rows = state + size.by_key();
  load_state(h, size, in.initial, state);
  for (std::int64_t t = 0; t < h.count; t += kChunk) {
    chunk.open(h, t);
    chunk.recall(state);
    chunk.solve();
    cuda::product(false, {chunk.qe(), size.pk, 1}, {state, size.pv, 1}, rows, size.pv, kChunk,
                  size.nv, size.nk);
    __syncthreads();
    cuda::product(true, {chunk.m(), kPair, 1}, {chunk.u(), size.pv, 1}, rows, size.pv, kChunk,
                  size.nv, kChunk);
    __syncthreads();
    for (int i = threadIdx.x; i < kChunk * h.width; i += kThreads) {
      const int token = i / h.width, j = i % h.width;
      if (t + token < h.count) {
        y[h.by_head(t + token) * args.value_dim + h.from + j] =
            cuda::narrow<T>(rows[token * size.pv + j]);
      }
    }
    chunk.advance(state);
  }
  if (final_state == nullptr) return;
  for (int i = threadIdx.x; i < h.width * size.dk; i += kThreads) {
    final_state[h.state() + i] = state[i % size.dk * size.pv + i / size.dk];
  }
}

int forward_shared(const Sizes& size) {
  return (Chunk::room(size) + size.by_key() + size.values()) * static_cast<int>(sizeof(float));
}

template <class T>
Inputs<T> inputs_of(const KernelCall& call, bool step) {
  return {call.input<T>(0),
          call.input<T>(1),
          call.input<T>(2),
          call.input<float>(3),
          call.input<float>(4),
          call.input<bool>(5),
          step ? nullptr : call.in[6],
          step ? nullptr : call.input<float>(7)};
}

std::int64_t blocks_of(const GatedDeltaRuleArgs& args) {
  return args.sequences * args.value_heads * Sizes(args).slices;
}

template <class T>
void gated_delta_rule_fwd(const KernelCall& call) {
  if constexpr (sizeof(T) == 2) {
    if (chunks_take(call)) return chunks_forward<T>(call);
  }
  const auto& args = call.as<GatedDeltaRuleArgs>();
  cuda::launch(forward<T>, blocks_of(args), kThreads, forward_shared(Sizes(args)), 1,
               static_cast<cudaStream_t>(call.queue), args, inputs_of<T>(call, false),
               call.output<T>(0), call.output<float>(1));
}

// ---- backward ----

// What the blocks leave: states, and their shares of the gradients that slices and heads have in common.
struct Kept {
  float* states;        // [blocks, segments, Dk, slice]: before each segment
  float* rows;          // [blocks, kSegment, slice, Dk]: before each chunk of a segment
  float* words;         // [blocks, kSegment, tokens, slice]: each chunk's w
  float *dq, *dk, *dg;  // [slices, tokens, heads, Dk]; dg of a whole head: [slices, tokens, heads]
  float* dbeta;         // [slices, tokens, heads]
  std::int64_t segments;

  __host__ __device__ static std::int64_t most_segments(const GatedDeltaRuleArgs& args) {
    const std::int64_t longest = args.start_bytes == 0 ? args.sequence_tokens : args.tokens;
    return (longest + kTokens - 1) / kTokens;
  }
  __host__ __device__ Kept(const GatedDeltaRuleArgs& args, float* memory) {
    const Sizes size(args);
    const std::int64_t blocks = args.sequences * args.value_heads * size.slices;
    const std::int64_t pairs = size.slices * args.tokens * args.value_heads;
    segments = most_segments(args);
    states = memory;
    rows = states + blocks * segments * size.by_key();
    words = rows + blocks * kSegment * size.by_value();
    dq = words + blocks * kSegment * size.values();
    dk = dq + pairs * size.dk;
    dbeta = dk + pairs * size.dk;
    dg = dbeta + pairs;
    end = dg + pairs * (args.per_channel != 0 ? size.dk : 1);
  }
  float* end;
};

struct Back {
  Sizes size;
  float* at;

  __device__ float* ds() const { return at; }  // gradient of the state, [Dk, slice]
  __device__ float* ds_rows() const { return at + size.by_key(); }  // and [slice, Dk]
  __device__ float* state_rows() const {
    return ds_rows() + size.by_value();
  }  // the state before the chunk
  __device__ float* x() const { return state_rows() + size.by_value(); }  // [tokens, Dk]
  __device__ float* z() const { return x() + size.keys(); }
  __device__ float* h() const { return z() + size.keys(); }
  __device__ float* dy() const { return h() + size.keys(); }  // [tokens, slice]
  __device__ float* du() const { return dy() + size.values(); }
  __device__ float* dm() const { return du() + size.values(); }  // [tokens, tokens]
  __device__ float* dn() const { return dm() + kChunk * kPair; }
  __host__ __device__ static int room(const Sizes& s) {
    return s.by_key() + 2 * s.by_value() + 2 * s.values() + 3 * s.keys() + 2 * kChunk * kPair;
  }
};

// The chunk whose forward half is in c and whose dY is in dy, by the whole block.
template <class T>
__device__ void chunk_back(const Head<T>& head, const Chunk& c, const Back& b, const Kept& kept,
                           std::int64_t t0, T* dv) {
  const Sizes& size = b.size;
  const GatedDeltaRuleArgs& args = head.args;
  const auto [pk, pv, nk, nv] = std::array{size.pk, size.pv, size.nk, size.nv};
  const int lane = threadIdx.x % cuda::kWarp, warp = threadIdx.x / cuda::kWarp;
  const auto pair_of = [&](int t) {
    return (head.slice * args.tokens + head.first + t0 + t) * args.value_heads + head.head;
  };
  // dU, then dR in its place: a thread has a channel.
  cuda::product(false, {c.m(), 1, kPair}, {b.dy(), pv, 1}, b.du(), pv, kChunk, nv, kChunk);
  __syncthreads();
  cuda::product(true, {c.faded(), pk, 1}, {b.ds(), pv, 1}, b.du(), pv, kChunk, nv, nk);
  __syncthreads();
  for (int j = threadIdx.x; j < nv; j += kThreads) {
    float made[kChunk];
#pragma unroll
    for (int t = kChunk - 1; t >= 0; --t) {
      float rest = b.du()[t * pv + j];
#pragma unroll
      for (int i = t + 1; i < kChunk; ++i) {
        rest = fmaf(-c.beta()[i] * c.n()[i * kPair + t], made[i], rest);
      }
      made[t] = rest;
      b.du()[t * pv + j] = rest;
    }
  }
  __syncthreads();
  cuda::product(false, {b.dy(), pv, 1}, {c.u(), 1, pv}, b.dm(), kPair, kChunk, kChunk, nv);
  cuda::product(false, {b.du(), pv, 1}, {c.u(), 1, pv}, b.dn(), kPair, kChunk, kChunk, nv);
  __syncthreads();
  for (int t = warp; t < kChunk; t += kWarps) {
    float sum = 0;
    for (int j = lane; j < nv; j += cuda::kWarp) sum += b.du()[t * pv + j] * c.w()[t * pv + j];
    if (lane < kChunk) sum -= b.dn()[t * kPair + lane] * c.n()[t * kPair + lane];
    sum = cuda::lanes_sum<cuda::kWarp>(sum);
    if (lane == 0 && t0 + t < head.count) kept.dbeta[pair_of(t)] = head.off(t0 + t) ? 0 : sum;
    __syncwarp();
    if (lane < kChunk) b.dn()[t * kPair + lane] *= -c.beta()[t];
    for (int j = lane; j < nv; j += cuda::kWarp) b.du()[t * pv + j] *= c.beta()[t];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kChunk * head.width; i += kThreads) {
    const int t = i / head.width, j = i % head.width;
    if (t0 + t < head.count) {
      dv[head.by_head(t0 + t) * args.value_dim + head.from + j] =
          cuda::narrow<T>(b.du()[t * pv + j]);
    }
  }
  cuda::product(false, {b.dy(), pv, 1}, {b.state_rows(), pk, 1}, b.x(), pk, kChunk, nk, nv);
  cuda::product(false, {b.du(), pv, 1}, {b.state_rows(), pk, 1}, b.z(), pk, kChunk, nk, nv);
  cuda::product(false, {c.u(), pv, 1}, {b.ds_rows(), pk, 1}, b.h(), pk, kChunk, nk, nv);
  __syncthreads();
  // Back over the tokens, a thread for a channel; the sums' names are those of the formulas in the CPU's file.
  for (int j = threadIdx.x; j < nk; j += kThreads) {
    float k[kChunk], g[kChunk], e[kChunk], h[kChunk];
    float start = 0;
    for (int i = 0; i < nv; ++i)
      start = fmaf(b.ds_rows()[i * pk + j], b.state_rows()[i * pk + j], start);
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      k[t] = c.k()[t * pk + j];
      g[t] = c.g()[t * pk + j];
      h[t] = b.h()[t * pk + j];
      e[t] = t == 0 ? g[t] : e[t > 0 ? t - 1 : 0] * g[t];
    }
#pragma unroll
    for (int t = kChunk - 1; t >= 0; --t) {
      const float next = t + 1 < kChunk ? g[t + 1 < kChunk ? t + 1 : t] : 1;
      asm volatile(
          "" ::
              : "memory");  // else what later tokens load is fetched now, and registers run short
      const float q = c.q()[t * pk + j], x = b.x()[t * pk + j], z = -b.z()[t * pk + j];
      start = fmaf(next, start, fmaf(q, x, k[t] * z));
      float sum_q = e[t] * x, sum_k = e[t] * z;
      float sum_g = t == 0 ? start : start * e[t > 0 ? t - 1 : 0];
      float fade = 1;
#pragma unroll
      for (int i = t - 1; i >= 0; --i) {
        const float dm = b.dm()[t * kPair + i], dn = b.dn()[t * kPair + i];
        h[i] = fmaf(next, h[i], fmaf(dm, q, dn * k[t]));
        const float before = k[i] * fade, now = g[t] * before;
        sum_q = fmaf(dm, now, sum_q);
        sum_k = fmaf(dn, now, sum_k);
        sum_g = fmaf(h[i], before, sum_g);
        fade *= g[i];
      }
      const float dm = b.dm()[t * kPair + t];
      sum_q = fmaf(dm, k[t], sum_q);
      sum_k += fmaf(dm, q, next * h[t]);
      // Where x, z and h of this token were, which nobody needs any more.
      b.x()[t * pk + j] = sum_g;
      b.z()[t * pk + j] = sum_q;
      b.h()[t * pk + j] = sum_k;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kChunk * nk; i += kThreads) {
    const int t = i / nk, j = i % nk;
    if (t0 + t >= head.count || j >= size.dk) continue;
    const std::int64_t at = pair_of(t) * size.dk + j;
    const bool off = head.off(t0 + t);
    kept.dq[at] = off ? 0 : b.z()[t * pk + j];
    kept.dk[at] = off ? 0 : b.h()[t * pk + j];
    if (args.per_channel != 0) {
      const float dg = b.x()[t * pk + j];
      kept.dg[at] = off ? 0 : args.log_decay != 0 ? dg * c.g()[t * pk + j] : dg;
    }
  }
  if (args.per_channel == 0) {
    for (int t = warp; t < kChunk; t += kWarps) {
      float sum = 0;
      for (int j = lane; j < size.dk; j += cuda::kWarp) sum += b.x()[t * pk + j];
      sum = cuda::lanes_sum<cuda::kWarp>(sum);
      if (lane == 0 && t0 + t < head.count) {
        const float made = args.log_decay != 0 ? sum * c.g()[t * pk] : sum;
        kept.dg[pair_of(t)] = head.off(t0 + t) ? 0 : made;
      }
    }
  }
  // The gradient of the state before the chunk, both ways round; du, which holds β·dR, counts less.
  for (int i = threadIdx.x; i < size.by_key(); i += kThreads) b.ds()[i] *= c.last_e()[i / pv];
  for (int i = threadIdx.x; i < nv * nk; i += kThreads) {
    b.ds_rows()[i / nk * pk + i % nk] *= c.last_e()[i % nk];
  }
  for (int i = threadIdx.x; i < size.values(); i += kThreads) b.du()[i] = -b.du()[i];
  __syncthreads();
  cuda::product(true, {c.qe(), 1, pk}, {b.dy(), pv, 1}, b.ds(), pv, nk, nv, kChunk);
  cuda::product(true, {b.dy(), 1, pv}, {c.qe(), pk, 1}, b.ds_rows(), pk, nv, nk, kChunk);
  __syncthreads();
  cuda::product(true, {c.ke(), 1, pk}, {b.du(), pv, 1}, b.ds(), pv, nk, nv, kChunk);
  cuda::product(true, {b.du(), 1, pv}, {c.ke(), pk, 1}, b.ds_rows(), pk, nv, nk, kChunk);
  __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    backward(GatedDeltaRuleArgs args, Inputs<T> in, const T* dy, const float* d_final,
             float* memory, T* dv, float* d_initial) {
  cuda::wait_turn();
  extern __shared__ float shared[];
  const Sizes size(args);
  const Head<T> h(args, in, size, blockIdx.x);
  const Kept kept(args, memory);
  Chunk chunk{size, shared};
  const Back b{size, shared + Chunk::room(size)};
  float* state = b.ds();  // until the walk back begins
  const std::int64_t segments = (h.count + kTokens - 1) / kTokens;
  float* states = kept.states + blockIdx.x * kept.segments * size.by_key();
  float* rows = kept.rows + blockIdx.x * std::int64_t{kSegment} * size.by_value();
  float* words = kept.words + blockIdx.x * std::int64_t{kSegment} * size.values();
  const auto copy = [](const float* from, int floats, float* to) {
    for (int i = threadIdx.x; i < floats; i += kThreads) to[i] = from[i];
  };

  load_state(h, size, in.initial, state);
  for (std::int64_t s = 0; s < segments; ++s) {
    copy(state, size.by_key(), states + s * size.by_key());
    __syncthreads();
    if (s + 1 == segments) break;
    for (std::int64_t t = s * kTokens; t < (s + 1) * kTokens; t += kChunk) {
      chunk.open(h, t);
      chunk.recall(state);
      chunk.solve();
      chunk.advance(state);
    }
  }
  load_state(h, size, d_final, b.ds());
  for (int i = threadIdx.x; i < size.by_value(); i += kThreads) {
    const int j = i % size.pk;
    b.ds_rows()[i] = j < size.nk ? b.ds()[j * size.pv + i / size.pk] : 0;
  }
  __syncthreads();
  for (std::int64_t s = segments - 1; s >= 0; --s) {
    // The segment's states again, by rows. The gradient of the state waits where its last state was kept.
    float* waiting = states + s * size.by_key();
    for (int i = threadIdx.x; i < size.by_key(); i += kThreads) {
      const float gradient = state[i];
      state[i] = waiting[i];
      waiting[i] = gradient;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size.by_value(); i += kThreads) {
      const int j = i % size.pk;
      b.state_rows()[i] = j < size.nk ? state[j * size.pv + i / size.pk] : 0;
    }
    __syncthreads();
    const std::int64_t left = (h.count - s * kTokens + kChunk - 1) / kChunk;
    const int chunks = left < kSegment ? static_cast<int>(left) : kSegment;
    for (int c = 0; c < chunks; ++c) {
      copy(b.state_rows(), size.by_value(), rows + c * size.by_value());
      chunk.open(h, s * kTokens + c * kChunk);
      chunk.recall(state);
      copy(chunk.w(), size.values(), words + c * size.values());
      if (c + 1 == chunks) break;
      chunk.solve();
      chunk.advance(state);
      for (int i = threadIdx.x; i < size.nv * size.nk; i += kThreads) {
        b.state_rows()[i / size.nk * size.pk + i % size.nk] *= chunk.last_e()[i % size.nk];
      }
      __syncthreads();
      cuda::product(true, {chunk.u(), 1, size.pv}, {chunk.faded(), size.pk, 1}, b.state_rows(),
                    size.pk, size.nv, size.nk, kChunk);
      __syncthreads();
    }
    __syncthreads();
    copy(waiting, size.by_key(), b.ds());
    __syncthreads();
    for (int c = chunks - 1; c >= 0; --c) {
      const std::int64_t t = s * kTokens + c * kChunk;
      copy(rows + c * size.by_value(), size.by_value(), b.state_rows());
      for (int i = threadIdx.x; i < size.values(); i += kThreads) {
        const int token = i / size.pv, j = i % size.pv;
        const bool there = dy != nullptr && j < h.width && h.there(t + token);
        b.dy()[i] = there ? cuda::widen(dy[h.by_head(t + token) * args.value_dim + h.from + j]) : 0;
      }
      chunk.open(h, t);
      copy(words + c * size.values(), size.values(), chunk.w());
      __syncthreads();
      chunk.solve();
      chunk_back(h, chunk, b, kept, t, dv);
    }
  }
  if (d_initial == nullptr) return;
  for (int i = threadIdx.x; i < h.width * size.dk; i += kThreads) {
    d_initial[h.state() + i] = b.ds_rows()[i / size.dk * size.pk + i % size.dk];
  }
}

// dq and dk of a token and key head from all slices and value heads; a warp each.
template <class T>
__global__ void __launch_bounds__(kThreads)
    join_keys(GatedDeltaRuleArgs args, Inputs<T> in, float* memory, T* dq, T* dk) {
  cuda::wait_turn();
  constexpr int kEach = 8;  // channels of a lane
  const Sizes size(args);
  const Kept kept(args, memory);
  const int lane = threadIdx.x % cuda::kWarp;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / cuda::kWarp;
  if (row >= args.tokens * args.key_heads) return;
  const std::int64_t token = row / args.key_heads, kh = row % args.key_heads;
  const std::int64_t group = args.value_heads / args.key_heads;
  const std::int64_t entry = args.start_bytes == 0 ? token / args.sequence_tokens : 0;
  const std::int64_t within = token - entry * args.sequence_tokens;
  for (int which = 0; which < 2; ++which) {
    const float* parts = which == 0 ? kept.dq : kept.dk;
    const T* x = which == 0 ? in.q + entry * args.q[0] + within * args.q[1] + kh * args.q[2]
                            : in.k + entry * args.k[0] + within * args.k[1] + kh * args.k[2];
    float sum[kEach] = {}, value[kEach] = {};
    float squares = 0, along = 0;
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      const int j = lane + c * cuda::kWarp;
      if (j >= size.dk) continue;
      for (std::int64_t s = 0; s < size.slices; ++s) {
        for (std::int64_t member = 0; member < group; ++member) {
          sum[c] +=
              parts[((s * args.tokens + token) * args.value_heads + kh * group + member) * size.dk +
                    j];
        }
      }
      if (args.normalise != 0) value[c] = cuda::widen(x[j]);
      squares = fmaf(value[c], value[c], squares);
      along = fmaf(value[c], sum[c], along);
    }
    float factor = which == 0 ? args.scale : 1;
    float less = 0;
    // Where the mask is false the sums are 0, whatever x is.
    const bool off = in.mask != nullptr && !in.mask[token];
    if (args.normalise != 0 && !off) {
      const float r = 1 / sqrtf(cuda::lanes_sum<cuda::kWarp>(squares) + args.eps);
      less = cuda::lanes_sum<cuda::kWarp>(along) * r * r;
      factor *= r;
    }
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      const int j = lane + c * cuda::kWarp;
      if (j >= size.dk) continue;
      const float made = off ? 0 : factor * (sum[c] - less * value[c]);
      (which == 0 ? dq : dk)[row * size.dk + j] = cuda::narrow<T>(made);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    join_slices(const float* parts, std::int64_t size, int slices, float* out) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size) return;
  float sum = 0;
  for (int s = 0; s < slices; ++s) sum += parts[s * size + i];
  out[i] = sum;
}

std::size_t backward_room(const void* opaque) {
  const auto& args = *static_cast<const GatedDeltaRuleArgs*>(opaque);
  float* const base = nullptr;
  return static_cast<std::size_t>(Kept(args, base).end - base) * sizeof(float);
}

// Which of the two ways a call of 16-bit heads goes depends on its addresses, too.
std::size_t backward_room16(const void* opaque) {
  return std::max(backward_room(opaque), chunks_room_back(opaque));
}

template <class T>
void gated_delta_rule_bwd(const KernelCall& call) {
  if constexpr (sizeof(T) == 2) {
    if (chunks_take(call)) return chunks_backward<T>(call);
  }
  const auto& args = call.as<GatedDeltaRuleArgs>();
  const Sizes size(args);
  const auto stream = static_cast<cudaStream_t>(call.queue);
  auto* memory = static_cast<float*>(call.workspace);
  const Inputs<T> in = inputs_of<T>(call, false);
  const int shared = (Chunk::room(size) + Back::room(size)) * static_cast<int>(sizeof(float));
  cuda::launch(backward<T>, blocks_of(args), kThreads, shared, 1, stream, args, in,
               call.input<T>(8), call.input<float>(9), memory, call.output<T>(2),
               call.output<float>(5));
  if (args.tokens == 0) return;
  const Kept kept(args, memory);
  cuda::launch(join_keys<T>, cuda::blocks_for(args.tokens * args.key_heads, kWarps), kThreads, 0, 1,
               stream, args, in, memory, call.output<T>(0), call.output<T>(1));
  const std::int64_t pairs = args.tokens * args.value_heads;
  const std::int64_t decays = args.per_channel != 0 ? pairs * size.dk : pairs;
  cuda::launch(join_slices, cuda::blocks_for(decays, kThreads), kThreads, 0, 1, stream, kept.dg,
               decays, size.slices, call.output<float>(3));
  cuda::launch(join_slices, cuda::blocks_for(pairs, kThreads), kThreads, 0, 1, stream, kept.dbeta,
               pairs, size.slices, call.output<float>(4));
}

// ---- one token ----

// A warp has a row of the state: a value channel.
template <class T>
__global__ void __launch_bounds__(kThreads)
    step(GatedDeltaRuleArgs args, Inputs<T> in, T* y, float* states) {
  cuda::wait_turn();
  constexpr int kEach = 8;  // channels of a lane
  const int lane = threadIdx.x % cuda::kWarp;
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / cuda::kWarp;
  if (row >= args.sequences * args.value_heads * args.value_dim) return;
  const std::int64_t channel = row % args.value_dim, pair = row / args.value_dim;
  const std::int64_t head = pair % args.value_heads, b = pair / args.value_heads;
  const std::int64_t kh = head / (args.value_heads / args.key_heads);
  if (in.mask != nullptr && !in.mask[b]) {
    if (lane == 0) y[row] = cuda::narrow<T>(0);
    return;
  }
  const T* from_q = in.q + b * args.q[0] + kh * args.q[2];
  const T* from_k = in.k + b * args.k[0] + kh * args.k[2];
  const float v = cuda::widen(in.v[b * args.v[0] + head * args.v[2] + channel]);
  float* state = states + row * args.key_dim;
  float q[kEach] = {}, k[kEach] = {}, s[kEach] = {};
  float qq = 0, kk = 0, kq = 0, say_q = 0, say_k = 0;
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    const int j = lane + c * cuda::kWarp;
    if (j >= args.key_dim) continue;
    q[c] = cuda::widen(from_q[j]);
    k[c] = cuda::widen(from_k[j]);
    float g = args.per_channel != 0 ? in.decay[pair * args.key_dim + j] : in.decay[pair];
    if (args.log_decay != 0) g = expf(g);
    s[c] = state[j] * g;
    qq = fmaf(q[c], q[c], qq);
    kk = fmaf(k[c], k[c], kk);
    kq = fmaf(k[c], q[c], kq);
    say_q = fmaf(s[c], q[c], say_q);
    say_k = fmaf(s[c], k[c], say_k);
  }
  kq = cuda::lanes_sum<cuda::kWarp>(kq);
  say_q = cuda::lanes_sum<cuda::kWarp>(say_q);
  say_k = cuda::lanes_sum<cuda::kWarp>(say_k);
  float fq = args.scale, fk = 1;
  if (args.normalise != 0) {
    fq /= sqrtf(cuda::lanes_sum<cuda::kWarp>(qq) + args.eps);
    fk /= sqrtf(cuda::lanes_sum<cuda::kWarp>(kk) + args.eps);
  }
  const float u = in.beta[pair] * (v - say_k * fk);
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    const int j = lane + c * cuda::kWarp;
    if (j < args.key_dim) state[j] = fmaf(u, k[c] * fk, s[c]);
  }
  if (lane == 0) y[row] = cuda::narrow<T>(fq * (say_q + u * fk * kq));
}

template <class T>
void gated_delta_rule_step(const KernelCall& call) {
  const auto& args = call.as<GatedDeltaRuleArgs>();
  const std::int64_t rows = args.sequences * args.value_heads * args.value_dim;
  cuda::launch(step<T>, cuda::blocks_for(rows, kWarps), kThreads, 0, 1,
               static_cast<cudaStream_t>(call.queue), args, inputs_of<T>(call, true),
               call.output<T>(0), call.output<float>(1));
}

}  // namespace

void register_gated_delta_rule_cuda(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCuda, "gated_delta_rule_fwd_" + type, gated_delta_rule_fwd<T>,
                 sizeof(T) == 2 ? chunks_room : nullptr);
    registry.add(Backend::kCuda, "gated_delta_rule_bwd_" + type, gated_delta_rule_bwd<T>,
                 sizeof(T) == 2 ? backward_room16 : backward_room);
    registry.add(Backend::kCuda, "gated_delta_rule_step_" + type, gated_delta_rule_step<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops
