// Metal kernels of conv1d_depthwise_causal (formula and layout: mlxtape/ops/conv1d_depthwise_causal.h).
//
// A thread owns 4 neighbouring channels (1 where rows are not whole packs, or for more than 4 taps) of a strip of rows;
// neighbouring lanes have neighbouring channels. It walks down its strip with K rows of x, and backward of dz, in
// registers, so that each row is read once but for the K−1 before (backward: behind) the strip. The number of taps is a
// constant of the pipeline. 256 threads a group. Bound by memory.
//
// Forward: strips of 16 or 32 rows; 16 registers for the rows and 16 for the taps at K = 4. Backward: strips of 32 rows and
// more, for each leaves a dw; at row t it makes dz[t] and, from it and those before, dx[t−(K−1)] and that row's part of dw,
// which stays in registers (64 in all for rows, taps and sums); a second kernel adds the strips' dw in order.
#include "conv1d_depthwise_causal_args.h"

struct Conv1dStrips {
  int64_t rows, count;  // of one; of all
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/exp.h"
#include "backends/metal/device/index.h"
#include "backends/metal/device/partials.h"

constant uint taps [[function_constant(0)]];
constant bool in_fours [[function_constant(1)]];
constant bool silu [[function_constant(2)]];
constant bool w_is_f32 [[function_constant(3)]];
constant bool has_initial [[function_constant(4)]];
constant bool has_final
    [[function_constant(5)]];  // forward: a final state is wanted; backward: it has a gradient

#define CONV1D_PLACE                                                                      \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]], \
      uint index [[thread_position_in_threadgroup]]

// ---- sequences ----

// The starts as they would be if they obeyed the contract, from 0 to rows, never falling: the largest so far. One group,
// which carries what it has found from turn to turn; 64 bits have no simd functions.
[[kernel, max_total_threads_per_threadgroup(256)]] void conv1d_clamp_starts(
    device const uchar* from [[buffer(0)]], device long* to [[buffer(1)]],
    constant Conv1dDepthwiseCausalArgs& args [[buffer(2)]],
    uint index [[thread_position_in_threadgroup]]) {
  threadgroup long room[256];
  long before = 0;
  for (long base = 0; base <= args.sequences; base += 256) {
    const long s = base + index;
    long v = 0;
    if (s > 0 && s < args.sequences) {
      v = args.start_bytes == 4 ? long(((device const int*)from)[s])
                                : ((device const long*)from)[s];
      v = min(long(args.rows), max(0l, v));
    }
    if (s == args.sequences) v = args.rows;
    room[index] = v;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint step = 1; step < 256; step *= 2) {
      const long other = index >= step ? room[index - step] : 0;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      v = max(v, other);
      room[index] = v;
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (s <= args.sequences) to[s] = max(v, before);
    before = max(before, room[255]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

inline long start_of(constant Conv1dDepthwiseCausalArgs& args, device const long* starts, long s) {
  return args.start_bytes != 0 ? starts[s] : s * args.sequence_rows;
}
// The last sequence that begins at the row or before it.
inline long sequence_of(constant Conv1dDepthwiseCausalArgs& args, device const long* starts,
                        long row) {
  if (args.sequences == 1) return 0;
  long low = 0, high = args.sequences;
  if (args.start_bytes == 0) return divide(row, args.sequence_rows, high);
  while (high - low > 1) {
    const long middle = (low + high) / 2;
    if (starts[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// ---- a thread's channels of a row ----

inline uint wide() { return in_fours ? 4 : 1; }

template <typename T>
inline void load_cells(device const T* p, thread float* v) {
  if (in_fours) {
    const float4 four = load_four(p);
    for (int i = 0; i < 4; ++i) v[i] = four[i];
  } else {
    v[0] = widen(p[0]);
  }
}
template <typename T>
inline void store_cells(thread const float* v, device T* p) {
  if (in_fours) {
    store_four(float4(v[0], v[1], v[2], v[3]), p);
  } else {
    p[0] = narrow<T>(v[0]);
  }
}

template <typename T>
inline float tap_at(device const uchar* w, long c, uint k) {
  const long i = c * taps + k;
  return w_is_f32 ? ((device const float*)w)[i] : widen(((device const T*)w)[i]);
}

// A sequence as one thread sees it; rows −(K−1) to −1 are the initial state, or zeros.
template <typename T>
struct Sequence {
  device const T* first;
  device const T* initial;
  long channels;
};
template <typename T>
inline void load_row(Sequence<T> s, long p, thread float* v) {
  for (uint i = 0; i < wide(); ++i) v[i] = 0;
  if (p >= 0) {
    load_cells(s.first + p * s.channels, v);
  } else if (has_initial) {
    load_cells(s.initial + (long(taps) - 1 + p) * s.channels, v);
  }
}

struct Rows {
  float v[16][4];  // the first of `taps`, oldest first
};
inline void move_up(thread Rows& rows) {
  for (uint j = 0; j + 1 < taps; ++j) {
    for (uint i = 0; i < wide(); ++i) rows.v[j][i] = rows.v[j + 1][i];
  }
}
template <typename T>
inline void load_taps(device const uchar* w, long c, thread Rows& rows) {
  for (uint k = 0; k < taps; ++k) {
    for (uint i = 0; i < wide(); ++i) rows.v[k][i] = tap_at<T>(w, c + i, k);
  }
}
// The K−1 rows before position p.
template <typename T>
inline void load_before(Sequence<T> s, long p, thread Rows& rows) {
  for (uint j = 0; j + 1 < taps; ++j) load_row(s, p - (long(taps) - 1) + j, rows.v[j]);
}
inline void convolve(thread const Rows& w, thread const Rows& e, thread float* z) {
  for (uint i = 0; i < wide(); ++i) {
    z[i] = 0;
    for (uint k = 0; k < taps; ++k) z[i] = fma(w.v[k][i], e.v[k][i], z[i]);
  }
}

// A thread's strip.
struct Strip {
  long c, number, first, end;
  bool in;
};
inline Strip strip_of(constant Conv1dDepthwiseCausalArgs& args, constant Conv1dStrips& strips,
                      long item) {
  const long owners = (args.channels + wide() - 1) / wide();
  long owner = 0;
  Strip strip;
  strip.number = divide(item, owners, owner);
  strip.in = strip.number < strips.count;
  strip.c = owner * wide();
  strip.first = strip.number * strips.rows;
  strip.end = min(long(args.rows), strip.first + strips.rows);
  return strip;
}

// ---- forward ----

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void conv1d_fwd(
    device const T* x [[buffer(0)]], device const uchar* w [[buffer(1)]],
    device const long* starts [[buffer(2)]], device const T* initial [[buffer(3)]],
    device T* y [[buffer(4)]], constant Conv1dDepthwiseCausalArgs& args [[buffer(5)]],
    constant Conv1dStrips& strips [[buffer(6)]], CONV1D_PLACE) {
  const Strip strip = strip_of(args, strips, (long(group) + first_group) * 256 + index);
  if (!strip.in) return;
  const long channels = args.channels, states = (long(taps) - 1) * channels;
  Rows w_rows, e;
  load_taps<T>(w, strip.c, w_rows);
  long s = sequence_of(args, starts, strip.first);
  long start = start_of(args, starts, s), next = start_of(args, starts, s + 1);
  Sequence<T> own;
  own.first = x + start * channels + strip.c;
  own.initial = initial + s * states + strip.c;
  own.channels = channels;
  load_before(own, strip.first - start, e);
  for (long r = strip.first; r < strip.end; ++r) {
    if (r >= next) {
      while (r >= next) next = start_of(args, starts, ++s + 1);
      own.first = x + r * channels + strip.c;
      own.initial = initial + s * states + strip.c;
      load_before(own, 0, e);
    }
    load_cells(x + r * channels + strip.c, e.v[taps - 1]);
    float z[4];
    convolve(w_rows, e, z);
    for (uint i = 0; i < wide() && silu; ++i) z[i] *= sigmoid<T>(z[i]).value;
    store_cells(z, y + r * channels + strip.c);
    move_up(e);
  }
}

// final_state [S, K−1, C], an element a thread.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void conv1d_final_state(
    device const T* x [[buffer(0)]], device const long* starts [[buffer(1)]],
    device const T* initial [[buffer(2)]], device T* final_state [[buffer(3)]],
    constant Conv1dDepthwiseCausalArgs& args [[buffer(4)]], CONV1D_PLACE) {
  const long before = long(taps) - 1;
  const long i = (long(group) + first_group) * 256 + index;
  if (i >= args.sequences * before * args.channels) return;
  long c = 0, j = 0;
  const long s = divide(divide(i, args.channels, c), before, j);
  const long start = start_of(args, starts, s);
  const long p = start_of(args, starts, s + 1) - start - before + j;
  if (p >= 0) {
    final_state[i] = x[(start + p) * args.channels + c];
  } else if (has_initial) {
    final_state[i] = initial[(s * before + before + p) * args.channels + c];
  } else {
    final_state[i] = narrow<T>(0);
  }
}

// ---- backward ----

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void conv1d_bwd(
    device const T* x [[buffer(0)]], device const uchar* w [[buffer(1)]],
    device const T* dy [[buffer(2)]], device const long* starts [[buffer(3)]],
    device const T* initial [[buffer(4)]], device const T* d_final [[buffer(5)]],
    device T* dx [[buffer(6)]], device T* d_initial [[buffer(7)]],
    device float* parts [[buffer(8)]], constant Conv1dDepthwiseCausalArgs& args [[buffer(9)]],
    constant Conv1dStrips& strips [[buffer(10)]], CONV1D_PLACE) {
  const Strip strip = strip_of(args, strips, (long(group) + first_group) * 256 + index);
  if (!strip.in) return;
  const long channels = args.channels, before = long(taps) - 1;
  Rows w_rows, dw;
  load_taps<T>(w, strip.c, w_rows);
  for (uint k = 0; k < taps; ++k) {
    for (uint i = 0; i < wide(); ++i) dw.v[k][i] = 0;
  }
  long s = sequence_of(args, starts, strip.first);
  for (long row = strip.first; row < strip.end; ++s) {
    const long start = start_of(args, starts, s), next = start_of(args, starts, s + 1);
    const long end = min(strip.end, next);
    if (end <= row) continue;  // empty
    // From here on positions count from the strip's first row of the sequence.
    const long last = end - row;                    // dx of positions before it
    const long ending = next - row;                 // of the sequence
    const long limit = min(ending, last + before);  // rows that are read
    // Whoever has a sequence's first row also has the state before it.
    const long first = row == start && has_initial ? -before : 0;
    const long state = s * before * channels + strip.c;
    Sequence<T> own;
    own.first = x + start * channels + strip.c;
    own.initial = initial + state;
    own.channels = channels;
    Rows e, dz;  // of positions t − before to t
    load_before(own, row - start, e);
    for (uint j = 0; j + 1 < taps; ++j) {
      for (uint i = 0; i < wide(); ++i) dz.v[j][i] = 0;
    }
    for (long t = 0; t < last + before; ++t) {
      const long at = (row + t) * channels + strip.c;
      thread float* const d = dz.v[taps - 1];
      if (t < limit) {
        load_cells(x + at, e.v[taps - 1]);
        load_cells(dy + at, d);
      }
      for (uint i = 0; i < wide() && t >= limit; ++i) e.v[taps - 1][i] = d[i] = 0;
      if (silu && t < limit) {
        float z[4];
        convolve(w_rows, e, z);
        for (uint i = 0; i < wide(); ++i) {
          const Sigmoid sigma = sigmoid<T>(z[i]);
          d[i] *= fma(z[i] * sigma.value, sigma.rest, sigma.value);
        }
      }
      const long p = t - before;
      if (p >= first) {
        float de[4] = {0, 0, 0, 0};
        if (has_final && p >= ending - before) {
          load_cells(d_final + state + (p - (ending - before)) * channels, de);
        }
        for (uint k = 0; k < taps; ++k) {
          for (uint i = 0; i < wide(); ++i) {
            de[i] = fma(w_rows.v[k][i], dz.v[taps - 1 - k][i], de[i]);
            dw.v[k][i] = fma(e.v[0][i], dz.v[taps - 1 - k][i], dw.v[k][i]);
          }
        }
        if (p >= 0) {
          store_cells(de, dx + (row + p) * channels + strip.c);
        } else {
          store_cells(de, d_initial + state + (before + p) * channels);
        }
      }
      move_up(e);
      move_up(dz);
    }
    row = end;
  }
  for (uint i = 0; i < wide(); ++i) {
    for (uint k = 0; k < taps; ++k) {
      parts[(strip.number * channels + strip.c + i) * taps + k] = dw.v[k][i];
    }
  }
}

template <typename Out>
[[kernel, max_total_threads_per_threadgroup(256)]] void conv1d_sum_dw(
    device const float* parts [[buffer(0)]], device Out* dw [[buffer(1)]],
    constant uint& count [[buffer(2)]], constant uint& columns [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float room[8 * 32];
  sum_partials(parts, count, columns, dw, room, group, lane, simd);
}

// Sequences without a row: the state passes through unchanged, and so does its gradient.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void conv1d_pass_through(
    device const long* starts [[buffer(0)]], device const T* d_final [[buffer(1)]],
    device T* d_initial [[buffer(2)]], constant Conv1dDepthwiseCausalArgs& args [[buffer(3)]],
    CONV1D_PLACE) {
  const long state = (long(taps) - 1) * args.channels;
  const long i = (long(group) + first_group) * 256 + index;
  if (i >= args.sequences * state) return;
  long rest = 0;
  const long s = divide(i, state, rest);
  if (start_of(args, starts, s) != start_of(args, starts, s + 1)) return;
  if (has_final) {
    d_initial[i] = d_final[i];
  } else {
    d_initial[i] = narrow<T>(0);
  }
}

// ---- step ----

// A channel of one sequence a thread: one forward row, and the state moves up by a row.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void conv1d_step(
    device const T* x [[buffer(0)]], device const uchar* w [[buffer(1)]], device T* y [[buffer(2)]],
    device T* state [[buffer(3)]], constant Conv1dDepthwiseCausalArgs& args [[buffer(4)]],
    CONV1D_PLACE) {
  const long i = (long(group) + first_group) * 256 + index;
  if (i >= args.sequences * args.channels) return;
  long c = 0;
  const long s = divide(i, args.channels, c);
  device T* own = state + s * (long(taps) - 1) * args.channels + c;
  float z = 0;
  for (uint k = 0; k < taps; ++k) {
    const T e = k + 1 < taps ? own[k * args.channels] : x[i];
    z = fma(tap_at<T>(w, c, k), widen(e), z);
    if (k > 0) own[(long(k) - 1) * args.channels] = e;
  }
  y[i] = narrow<T>(silu ? z * sigmoid<T>(z).value : z);
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
#define MAKE_ALL(type, T)                                   \
  MAKE("conv1d_fwd_" type, conv1d_fwd<T>)                   \
  MAKE("conv1d_final_state_" type, conv1d_final_state<T>)   \
  MAKE("conv1d_bwd_" type, conv1d_bwd<T>)                   \
  MAKE("conv1d_sum_dw_" type, conv1d_sum_dw<T>)             \
  MAKE("conv1d_pass_through_" type, conv1d_pass_through<T>) \
  MAKE("conv1d_step_" type, conv1d_step<T>)
MAKE_ALL("f32", float)
MAKE_ALL("f16", half)
MAKE_ALL("bf16", bf16)

#else

#include <algorithm>
#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using Args = Conv1dDepthwiseCausalArgs;
using metal::Launch;

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kWideTaps = 4;     // more than these leave no registers for four channels
constexpr std::int64_t kManyRows = 4096;  // for which strips of the forward are twice as long
constexpr std::int64_t kMostStrips = 512;

std::int64_t groups_of(std::int64_t items) { return ceil_div(items, kThreads); }

// Four channels a thread: every row begins and ends with whole fours. A null pointer is never read.
template <class... Pointers>
bool has_fours(const Args& args, Pointers... pointers) {
  return args.taps <= kWideTaps && args.channels % 4 == 0 && (metal::is_aligned(pointers) && ...);
}

Conv1dStrips strips_of(const Args& args, std::int64_t rows) {
  return {rows, ceil_div(args.rows, rows)};
}
Conv1dStrips forward_strips(const Args& args) {
  return strips_of(args, args.rows >= kManyRows ? 32 : 16);
}
// A strip leaves K numbers a channel and reads K−1 rows twice: the longer the better, while there are enough of them.
Conv1dStrips backward_strips(const Args& args) {
  const std::int64_t wanted = std::clamp<std::int64_t>(ceil_div(args.rows, 64), 32, 128);
  return strips_of(args, std::max(wanted, ceil_div(args.rows, kMostStrips)));
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
  const std::int64_t floats = backward_strips(args).count * args.channels * args.taps;
  return starts_bytes(args) + static_cast<std::size_t>(floats) * sizeof(float);
}

// The starts as they are used, in scratch memory, or nothing.
const void* clamped(const KernelCall& call, const void* starts) {
  const auto& args = call.as<Args>();
  if (args.start_bytes == 0) return nullptr;
  Launch(call, metal::kernel("conv1d_clamp_starts"))
      .input(0, starts)
      .output(1, call.workspace)
      .bytes(2, args)
      .groups(1)
      .threads(kThreads)
      .run();
  return call.workspace;
}

// in: x, w, starts, initial state; out: y, final state.
template <class T>
void forward(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const void* x = call.in[0];
  const void* initial = call.in[3];
  const void* starts = clamped(call, call.in[2]);
  const bool silu = args.silu != 0;
  const auto taps = static_cast<std::uint32_t>(args.taps);
  if (args.rows != 0 && args.channels != 0) {
    const bool fours = has_fours(args, x, initial, call.out[0]);
    const Conv1dStrips strips = forward_strips(args);
    Launch(call, metal::kernel<T>("conv1d_fwd"))
        .constant(0, taps)
        .constant(1, fours)
        .constant(2, silu)
        .constant(3, args.w_is_f32 != 0)
        .constant(4, initial != nullptr)
        .input(0, x)
        .input(1, call.in[1])
        .input(2, starts)
        .input(3, initial)
        .output(4, call.out[0])
        .bytes(5, args)
        .bytes(6, strips)
        .in_parts()
        .groups(groups_of(strips.count * ceil_div(args.channels, fours ? 4 : 1)))
        .threads(kThreads)
        .run();
  }
  const std::int64_t states = args.sequences * (args.taps - 1) * args.channels;
  if (call.out[1] == nullptr || states == 0) return;
  Launch(call, metal::kernel<T>("conv1d_final_state"))
      .constant(0, taps)
      .constant(4, initial != nullptr)
      .input(0, x)
      .input(1, starts)
      .input(2, initial)
      .output(3, call.out[1])
      .bytes(4, args)
      .in_parts()
      .groups(groups_of(states))
      .threads(kThreads)
      .run();
}

// in: x, w, dy, starts, initial state, gradient of the final state; out: dx, dw, gradient of the initial state.
template <class T>
void backward(const KernelCall& call) {
  const auto& args = call.as<Args>();
  const void* initial = call.in[4];
  const void* d_final = call.in[5];
  void* d_initial = call.out[2];
  const void* starts = clamped(call, call.in[3]);
  void* parts = static_cast<char*>(call.workspace) + starts_bytes(args);
  const auto taps = static_cast<std::uint32_t>(args.taps);
  const Conv1dStrips strips = backward_strips(args);
  if (args.rows != 0) {
    const bool fours =
        has_fours(args, call.in[0], call.in[2], initial, d_final, call.out[0], d_initial);
    Launch(call, metal::kernel<T>("conv1d_bwd"))
        .constant(0, taps)
        .constant(1, fours)
        .constant(2, args.silu != 0)
        .constant(3, args.w_is_f32 != 0)
        .constant(4, initial != nullptr)
        .constant(5, d_final != nullptr)
        .input(0, call.in[0])
        .input(1, call.in[1])
        .input(2, call.in[2])
        .input(3, starts)
        .input(4, initial)
        .input(5, d_final)
        .output(6, call.out[0])
        .output(7, d_initial)
        .output(8, parts)
        .bytes(9, args)
        .bytes(10, strips)
        .in_parts()
        .groups(groups_of(strips.count * ceil_div(args.channels, fours ? 4 : 1)))
        .threads(kThreads)
        .run();
  }
  const std::int64_t states = args.sequences * (args.taps - 1) * args.channels;
  if (d_initial != nullptr && states != 0) {
    Launch(call, metal::kernel<T>("conv1d_pass_through"))
        .constant(0, taps)
        .constant(5, d_final != nullptr)
        .input(0, starts)
        .input(1, d_final)
        .output(2, d_initial)
        .bytes(3, args)
        .in_parts()
        .groups(groups_of(states))
        .threads(kThreads)
        .run();
  }
  const std::int64_t columns = args.channels * args.taps;
  Launch(call, args.w_is_f32 != 0 ? metal::kernel<float>("conv1d_sum_dw")
                                  : metal::kernel<T>("conv1d_sum_dw"))
      .input(0, strips.count == 0 ? nullptr : parts)
      .output(1, call.out[1])
      .bytes(2, static_cast<std::uint32_t>(strips.count))
      .bytes(3, static_cast<std::uint32_t>(columns))
      .groups(ceil_div(columns, metal::kSimd))
      .threads(kThreads)
      .run();
}

// in: x, w; out: y, and the state, which is moved on.
template <class T>
void step(const KernelCall& call) {
  const auto& args = call.as<Args>();
  Launch(call, metal::kernel<T>("conv1d_step"))
      .constant(0, static_cast<std::uint32_t>(args.taps))
      .constant(2, args.silu != 0)
      .constant(3, args.w_is_f32 != 0)
      .input(0, call.in[0])
      .input(1, call.in[1])
      .output(2, call.out[0])
      .output(3, call.out[1])
      .bytes(4, args)
      .in_parts()
      .groups(groups_of(args.sequences * args.channels))
      .threads(kThreads)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string op = "conv1d_depthwise_causal_";
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, op + "fwd_" + type, forward<T>, forward_workspace);
  registry.add(Backend::kMetal, op + "bwd_" + type, backward<T>, backward_workspace);
  registry.add(Backend::kMetal, op + "step_" + type, step<T>);
}

}  // namespace

void register_conv1d_depthwise_causal_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
