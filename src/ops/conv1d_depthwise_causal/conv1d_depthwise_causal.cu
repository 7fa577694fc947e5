// CUDA kernels of conv1d_depthwise_causal (formula and layout: mlxtape/ops/conv1d_depthwise_causal.h).
//
// A thread owns 4 neighbouring channels (1 where rows are not whole packs of 16 bytes) of a strip of
// rows. Bound by memory.
//
// Forward: strips of a few rows, which are all read, with the K−1 before them, before the first is
// used; those K−1 come from the cache. Blocks begin in the order of memory, which it rewards: 94 to
// 96 % of a copy's speed, where long strips read each row once and reach 90 to 92 %.
//
// Backward: long strips, for each leaves a dw. A thread walks with K−1 rows of x and dz in registers:
// at row t it makes dz[t] and, from it and those before, dx[t−(K−1)] and that row's part of dw, which
// stays in registers; the strips' dw are added in order by a second kernel. The rows ahead are under
// way in shared memory.
//
// K = 3 and K = 4 have kernels of their own, the others share one for up to 16.
#include <cuda_runtime.h>

#include <algorithm>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/partials.cuh"
#include "conv1d_depthwise_causal_rows.cuh"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

using Args = Conv1dDepthwiseCausalArgs;

constexpr int kBlock = 256;  // threads
constexpr int kForwardBlock = 128;

// The starts as they would be if they obeyed the contract, from 0 to rows, never falling: the largest
// so far. One block; a thread carries what the threads before it found.
template <class I>
__global__ void __launch_bounds__(kBlock)
    clamp_starts(const I* from, std::int64_t sequences, std::int64_t rows, std::int64_t* to) {
  cuda::wait_turn();
  __shared__ std::int64_t largest[kBlock / kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  std::int64_t before = 0;
  for (std::int64_t base = 0; base <= sequences; base += kBlock) {
    const std::int64_t s = base + threadIdx.x;
    std::int64_t v = 0;
    if (s > 0 && s < sequences) v = min(rows, max(std::int64_t{0}, std::int64_t{from[s]}));
    if (s == sequences) v = rows;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const std::int64_t other = __shfl_up_sync(cuda::kAll, v, step);
      if (lane >= step) v = max(v, other);
    }
    if (lane == kWarp - 1) largest[warp] = v;
    __syncthreads();
    v = max(v, before);
#pragma unroll
    for (int w = 0; w < kBlock / kWarp; ++w) {
      if (w < warp) v = max(v, largest[w]);
      before = max(before, largest[w]);
    }
    __syncthreads();
    if (s <= sequences) to[s] = v;
  }
}

// ---- forward ----

template <class T>
struct ForwardCall {
  const T* x;        // [rows, C]
  const void* w;     // [C, K]
  const T* initial;  // [S, K−1, C] or null
  T* y;              // [rows, C]
  Sequences sequences;

  template <int kWide>
  __device__ Sequence<T, kWide> sequence(const Args& args, std::int64_t s, std::int64_t c) const {
    const std::int64_t before = args.taps - 1;
    return {x + sequences.start(s) * args.channels + c,
            initial != nullptr ? initial + s * before * args.channels + c : nullptr, args.channels,
            before};
  }
};

// Rows of a strip: of 4 channels, with the 3 before them, what 102 registers a thread hold; of one
// enough to make up for up to 15 before them.
template <int kWide>
constexpr int kForwardRows = kWide == 4 ? 8 : 32;

// z of a row near the start of a sequence, whatever is before it.
template <class T, int kWide, class K>
__device__ __forceinline__ void convolve(const Sequence<T, kWide>& x, std::int64_t p, const K& taps,
                                         const float (&w)[K::kTaps][kWide], float (&z)[kWide]) {
#pragma unroll
  for (int a = K::kTaps - 1; a >= 0; --a) {
    if (!taps.has(a)) continue;
    float e[kWide];
    x.get(p - a, e);
#pragma unroll
    for (int i = 0; i < kWide; ++i) z[i] = fmaf(w[a][i], e[i], z[i]);
  }
}

template <class T, int kWide, class K, bool kSilu>
__global__ void __launch_bounds__(kForwardBlock, K::kExact ? 5 : 3)
    forward_strips(Args args, Strips strips, ForwardCall<T> f) {
  cuda::wait_turn();
  constexpr int kRows = kForwardRows<kWide>;
  constexpr int kPast = K::kTaps - 1;
  const Place at(args.rows, strips, kWide);
  if (at.c >= args.channels || at.r0 >= args.rows) return;
  const int rows = static_cast<int>(at.r1 - at.r0);
  const T* from = f.x + at.r0 * args.channels + at.c;
  T* to = f.y + at.r0 * args.channels + at.c;
  Cells<T, kWide> next[kRows] = {};
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (u < rows) next[u] = Cells<T, kWide>::load(from + u * args.channels);
  }
  const K taps{args.taps};
  float w[K::kTaps][kWide];
  load_taps<T, true>(args, taps, f.w, at.c, w);
  std::int64_t s = f.sequences.holding(at.r0);
  Sequence<T, kWide> x = f.template sequence<kWide>(args, s, at.c);
  std::int64_t p = at.r0 - f.sequences.start(s);
  const auto finish = [&](float(&z)[kWide], int u) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) z[i] = kSilu ? cuda::silu<T>(z[i]) : z[i];
    Cells<T, kWide>::store(z, to + u * args.channels);
  };
  if (f.sequences.start(s + 1) < at.r1) {  // rows of several sequences
#pragma unroll 1
    for (int u = 0; u < rows; ++u, ++p) {
      while (at.r0 + u >= f.sequences.start(s + 1)) {
        x = f.template sequence<kWide>(args, ++s, at.c);
        p = 0;
      }
      float z[kWide] = {};
      convolve<T>(x, p, taps, w, z);
      finish(z, u);
    }
    return;
  }
  float e[kPast + kRows][kWide];
#pragma unroll
  for (int j = 0; j < kPast; ++j) x.get(p - kPast + j, e[j]);
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    next[u].get(e[kPast + u]);
    float z[kWide] = {};
#pragma unroll
    for (int a = K::kTaps - 1; a >= 0; --a) {
      if (!taps.has(a)) continue;
#pragma unroll
      for (int i = 0; i < kWide; ++i) z[i] = fmaf(w[a][i], e[kPast + u - a][i], z[i]);
    }
    if (u < rows) finish(z, u);
  }
}

// final_state [S, K−1, C], an element a thread.
template <class T>
__global__ void __launch_bounds__(kBlock)
    write_final_state(Args args, ForwardCall<T> f, T* final_state) {
  cuda::wait_turn();
  const std::int64_t before = args.taps - 1;
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= args.sequences * before * args.channels) return;
  const std::int64_t c = i % args.channels;
  const std::int64_t j = i / args.channels % before;
  const std::int64_t s = i / args.channels / before;
  const std::int64_t start = f.sequences.start(s);
  const std::int64_t p = f.sequences.start(s + 1) - start - before + j;
  if (p >= 0) {
    final_state[i] = f.x[(start + p) * args.channels + c];
  } else if (f.initial != nullptr) {
    final_state[i] = f.initial[(s * before + before + p) * args.channels + c];
  } else {
    final_state[i] = narrow<T>(0);
  }
}

// ---- backward ----

template <class T>
struct BackwardCall {
  const T* x;        // [rows, C]
  const void* w;     // [C, K]
  const T* dy;       // [rows, C]
  const T* initial;  // [S, K−1, C] or null
  const T* d_final;  // [S, K−1, C] or null
  T* dx;             // [rows, C]
  T* d_initial;      // [S, K−1, C] or null
  float* parts;      // [strips, C, K]: their dw
  Sequences sequences;
};

template <class T, int kWide, class K, bool kSilu>
__global__ void __launch_bounds__(kBlock, K::kExact ? 2 : 1)
    backward_strips(Args args, Strips strips, BackwardCall<T> b) {
  constexpr int kAhead = Ahead<T, kWide, kBlock>::kRows;
  constexpr int kPast = K::kTaps - 1;
  cuda::hold_next_wait_turn();
  const Place at(args.rows, strips, kWide);
  // Lanes without channels help their warp to fetch.
  const std::int64_t first_c = at.c - threadIdx.x % kWarp * kWide;
  const bool exists = at.c < args.channels;
  if (first_c >= args.channels || at.r0 >= args.rows) return;
  const int packs =
      static_cast<int>(min(args.channels - first_c, std::int64_t{kWarp} * kWide)) / kPack<T>;
  const K taps{args.taps};
  const std::int64_t before = args.taps - 1;
  float w[K::kTaps][kWide] = {};
  float dw[K::kTaps][kWide] = {};
  // By age, as in the forward.
  const auto w_of_age = [&](int a, int i) {
    if constexpr (K::kExact) return w[kPast - a][i];
    return exists ? tap_at<T>(args, b.w, at.c + i, taps.count() - 1 - a) : 0;
  };
  std::int64_t s = b.sequences.holding(at.r0);
  for (std::int64_t row = at.r0; row < at.r1; ++s) {
    const std::int64_t start = b.sequences.start(s);
    const std::int64_t next_start = b.sequences.start(s + 1);
    const std::int64_t end = min(at.r1, next_start);
    if (end <= row) continue;  // empty
    const std::int64_t state = s * before * args.channels + at.c;
    // From here on positions count from the strip's first row of the sequence.
    const int last = static_cast<int>(end - row);  // dx of positions before it
    const std::int64_t ending = next_start - row;
    const int limit = static_cast<int>(min(ending, last + before));  // rows that are read
    // Whoever has a sequence's first row also has the state before it.
    const int first = row == start && b.initial != nullptr ? -static_cast<int>(before) : 0;
    const int final_from =
        static_cast<int>(min(b.d_final != nullptr ? ending - before : ending, std::int64_t{last}));
    const Sequence<T, kWide> x{b.x + start * args.channels + at.c,
                               b.initial != nullptr ? b.initial + state : nullptr, args.channels,
                               before};
    T* dx = b.dx + row * args.channels + at.c;
    float e[kPast + kAhead][kWide] = {};   // of rows t − kPast to t + kAhead − 1
    float dz[kPast + kAhead][kWide] = {};  // of the same
    Ahead<T, kWide, kBlock> ahead;
    const std::int64_t first_cell = row * args.channels + first_c;
    ahead.start(b.x + first_cell, b.dy + first_cell, args.channels, limit, packs);
    if (exists) {
      if (row == at.r0) load_taps<T, false>(args, taps, b.w, at.c, w);
#pragma unroll
      for (int j = 0; j < kPast; ++j) x.get(row - start - kPast + j, e[j]);
    }
    // kInner: the rows t to t + kAhead − 1 are read, and those that they finish have nothing special.
    // With silu, which takes the registers for it, none is.
    const auto step = [&]<bool kInner>(int t) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        float(&d)[kWide] = dz[kPast + u];
        ahead.x(u).get(e[kPast + u]);
        ahead.dy(u).get(d);
        if constexpr (kSilu) {
          float z[kWide] = {};
#pragma unroll
          for (int a = kPast; a >= 0; --a) {
            if (!taps.has(a)) continue;
#pragma unroll
            for (int i = 0; i < kWide; ++i) z[i] = fmaf(w_of_age(a, i), e[kPast + u - a][i], z[i]);
          }
#pragma unroll
          for (int i = 0; i < kWide; ++i) {
            d[i] = kInner || t + u < limit ? d[i] * cuda::silu_and_slope<T>(z[i]).slope : 0;
          }
        }
        const int p = t + u - static_cast<int>(before);
        if (!kInner && (p < first || p >= last || !exists)) continue;
        float old[kWide];
        if constexpr (K::kExact) {
#pragma unroll
          for (int i = 0; i < kWide; ++i) old[i] = e[u][i];
        } else {
          x.get(row - start + p, old);
        }
        float de[kWide] = {};
        if (!kInner && p >= final_from) {
          Cells<T, kWide>::load(b.d_final + state + (p - final_from) * args.channels).get(de);
        }
#pragma unroll
        for (int k = 0; k < K::kTaps; ++k) {
          if (!taps.has(k)) continue;
#pragma unroll
          for (int i = 0; i < kWide; ++i) {
            de[i] = fmaf(w[k][i], dz[kPast + u - k][i], de[i]);
            dw[k][i] = fmaf(old[i], dz[kPast + u - k][i], dw[k][i]);
          }
        }
        T* to = kInner || p >= 0 ? dx + p * args.channels
                                 : b.d_initial + state + (before + p) * args.channels;
        Cells<T, kWide>::store(de, to);
      }
    };
    for (int t = 0; t < last + before; t += kAhead) {
      ahead.wait(b.x + (row + t) * args.channels + at.c, b.dy + (row + t) * args.channels + at.c,
                 args.channels, exists ? limit - t : 0);
      const bool inner = exists && t >= before && t + kAhead <= min(limit, final_from);
      if (!kSilu && inner) {
        step.template operator()<!kSilu>(t);
      } else {
        step.template operator()<false>(t);
      }
      ahead.next();
#pragma unroll
      for (int j = 0; j < kPast; ++j) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          e[j][i] = e[kAhead + j][i];
          dz[j][i] = dz[kAhead + j][i];
        }
      }
    }
    row = end;
  }
  cuda::wait_batches<0>();  // nothing is on its way to a block that is gone
  cuda::next_may_start();
  if (!exists) return;
  float* part = b.parts + (at.strip * args.channels + at.c) * args.taps;
  if constexpr (kWide == 4 && K::kExact) {
    const auto flat = [&](int i) {
      return dw[i % K::kTaps][i / K::kTaps];
    };
#pragma unroll
    for (int i = 0; i < 4 * K::kTaps; i += 4) {
      *reinterpret_cast<float4*>(part + i) =
          make_float4(flat(i), flat(i + 1), flat(i + 2), flat(i + 3));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
#pragma unroll
      for (int k = 0; k < K::kTaps; ++k) {
        if (taps.has(k)) part[i * args.taps + k] = dw[k][i];
      }
    }
  }
}

// Sequences without a row: the state passes through unchanged, and so does its gradient.
template <class T>
__global__ void __launch_bounds__(kBlock) pass_through_empty(Args args, BackwardCall<T> b) {
  cuda::wait_turn();
  const std::int64_t state = (args.taps - 1) * args.channels;
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= args.sequences * state) return;
  const std::int64_t s = i / state;
  if (b.sequences.start(s) != b.sequences.start(s + 1)) return;
  b.d_initial[i] = b.d_final != nullptr ? b.d_final[i] : narrow<T>(0);
}

// ---- step ----

// A channel of one sequence a thread: one forward row, and the state moves up by a row.
template <class T>
__global__ void __launch_bounds__(kBlock)
    step_channels(Args args, const T* x, const void* w, T* y, T* state) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i >= args.sequences * args.channels) return;
  const std::int64_t c = i % args.channels;
  const int before = static_cast<int>(args.taps) - 1;
  T* own = state + i / args.channels * before * args.channels + c;
  float z = 0;
  for (int k = 0; k <= before; ++k) {
    const T e = k < before ? own[k * args.channels] : x[i];
    z = fmaf(tap_at<T>(args, w, c, k), widen(e), z);
    if (k > 0) own[(k - 1) * args.channels] = e;
  }
  y[i] = narrow<T>(args.silu != 0 ? cuda::silu<T>(z) : z);
}

// ---- launch ----

// The starts as they are used; clamped into room.
Sequences sequences_of(const Args& args, const void* starts, void* room, cudaStream_t stream) {
  if (args.start_bytes == 0) return {nullptr, args.sequence_rows, args.sequences};
  auto* clamped = static_cast<std::int64_t*>(room);
  const auto clamp = [&](const auto* from) {
    cuda::launch(clamp_starts<std::remove_cvref_t<decltype(*from)>>, 1, kBlock, 0, 1, stream, from,
                 args.sequences, args.rows, clamped);
  };
  args.start_bytes == 4 ? clamp(static_cast<const std::int32_t*>(starts))
                        : clamp(static_cast<const std::int64_t*>(starts));
  return {clamped, 0, args.sequences};
}

// Calls body(channels of a thread, Taps, whether silu), all but Taps as constants.
template <class Body>
void with_form(const Args& args, bool wide, const Body& body) {
  const auto with_taps = [&](auto channels, auto silu) {
    if (args.taps == 4) return body(channels, Taps<4, true>(), silu);
    if (args.taps == 3) return body(channels, Taps<3, true>(), silu);
    body(std::integral_constant<int, 1>(), Taps<kMostTaps, false>(), silu);
  };
  const auto with_silu = [&](auto channels) {
    args.silu != 0 ? with_taps(channels, std::true_type()) : with_taps(channels, std::false_type());
  };
  wide ? with_silu(std::integral_constant<int, 4>()) : with_silu(std::integral_constant<int, 1>());
}

// Every row is whole packs.
template <class T, class... Pointers>
bool is_wide(const Args& args, Pointers... pointers) {
  return args.channels % kPack<T> == 0 && (cuda::is_aligned(pointers) && ...);  // a null pointer is
}

std::int64_t blocks_of(std::int64_t elements) { return cuda::blocks_for(elements, kBlock); }

// Blocks of the backward in all, each of which leaves a dw: one wave of two a multiprocessor. A strip
// has at least 32 rows, to make up for the K−1 read twice.
constexpr std::int64_t kBackwardBlocks = 2 * cuda::kMultiprocessors;

Strips backward_strips_of(const Args& args, int wide) {
  Strips strips = strips_of(args.channels, wide, kBlock);
  const std::int64_t many = std::max<std::int64_t>(1, kBackwardBlocks * strips.down / strips.tiles);
  strips.rows = std::max<std::int64_t>(32, cuda::blocks_for(args.rows, many));
  strips.rows = cuda::blocks_for(strips.rows, 8) * 8;
  strips.count = cuda::blocks_for(args.rows, strips.rows);
  return strips;
}

// Workspace: the clamped starts, then the strips' dw.
std::size_t starts_bytes(const Args& args) {
  if (args.start_bytes == 0) return 0;
  const auto bytes = static_cast<std::size_t>(args.sequences + 1) * sizeof(std::int64_t);
  return (bytes + 15) / 16 * 16;
}
std::size_t forward_workspace(const void* p) { return starts_bytes(*static_cast<const Args*>(p)); }
std::size_t backward_workspace(const void* p) {
  const auto& args = *static_cast<const Args*>(p);
  const std::int64_t strips =
      std::max(backward_strips_of(args, 1).count, backward_strips_of(args, 4).count);
  const std::int64_t floats = strips * args.channels * args.taps;
  return starts_bytes(args) + static_cast<std::size_t>(floats) * sizeof(float);
}

template <class T>
void conv1d_fwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  T* final_state = call.output<T>(1);
  const ForwardCall<T> f{call.input<T>(0), call.in[1], call.input<T>(3), call.output<T>(0),
                         sequences_of(args, call.in[2], call.workspace, stream)};
  if (args.rows != 0 && args.channels != 0) {
    with_form(args, is_wide<T>(args, f.x, f.w, f.initial, f.y),
              [&]<class K>(auto wide, K, auto silu) {
                Strips strips = strips_of(args.channels, wide(), kForwardBlock);
                strips.rows = kForwardRows<wide()>;
                strips.count = cuda::blocks_for(args.rows, strips.rows);
                cuda::launch(forward_strips<T, wide(), K, silu()>, strips.blocks(), kForwardBlock,
                             0, 1, stream, args, strips, f);
              });
  }
  const std::int64_t states = args.sequences * (args.taps - 1) * args.channels;
  if (final_state != nullptr && states != 0) {
    cuda::launch(write_final_state<T>, blocks_of(states), kBlock, 0, 1, stream, args, f,
                 final_state);
  }
}

template <class T>
void conv1d_bwd(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  auto* parts = reinterpret_cast<float*>(static_cast<char*>(call.workspace) + starts_bytes(args));
  const BackwardCall<T> b{call.input<T>(0),
                          call.in[1],
                          call.input<T>(2),
                          call.input<T>(4),
                          call.input<T>(5),
                          call.output<T>(0),
                          call.output<T>(2),
                          parts,
                          sequences_of(args, call.in[3], call.workspace, stream)};
  std::int64_t count = 0;
  if (args.rows != 0) {
    with_form(args, is_wide<T>(args, b.x, b.w, b.dy, b.initial, b.d_final, b.dx, b.d_initial),
              [&]<class K>(auto wide, K, auto silu) {
                const Strips strips = backward_strips_of(args, wide());
                count = strips.count;
                cuda::launch(backward_strips<T, wide(), K, silu()>, strips.blocks(), kBlock,
                             Ahead<T, wide(), kBlock>::kBytes, 1, stream, args, strips, b);
              });
  }
  const std::int64_t states = args.sequences * (args.taps - 1) * args.channels;
  if (b.d_initial != nullptr && states != 0) {
    cuda::launch(pass_through_empty<T>, blocks_of(states), kBlock, 0, 1, stream, args, b);
  }
  const std::int64_t n = args.channels * args.taps;
  if (args.w_is_f32 != 0) {
    cuda::sum_partials(parts, count, n, call.output<float>(1), stream);
  } else {
    cuda::sum_partials(parts, count, n, call.output<T>(1), stream);
  }
}

template <class T>
void conv1d_step(const KernelCall& call) {
  const auto& args = call.as<Args>();
  cuda::launch(step_channels<T>, blocks_of(args.sequences * args.channels), kBlock, 0, 1,
               static_cast<cudaStream_t>(call.queue), args, call.input<T>(0), call.in[1],
               call.output<T>(0), call.output<T>(1));
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string op = "conv1d_depthwise_causal_";
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, op + "fwd_" + type, conv1d_fwd<T>, forward_workspace);
  registry.add(Backend::kCuda, op + "bwd_" + type, conv1d_bwd<T>, backward_workspace);
  registry.add(Backend::kCuda, op + "step_" + type, conv1d_step<T>);
}

}  // namespace

void register_conv1d_depthwise_causal_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
