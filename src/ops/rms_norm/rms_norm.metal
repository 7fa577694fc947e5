// Metal kernels of rms_norm (formula and layout: mlxtape/ops/rms_norm.h).
//
// Rows of whole 16-byte packs are read once and kept in registers, by neighbouring lanes where a pack each is enough, else
// by a group; other rows are walked twice.
//
// Backward: up to 512 groups walk the rows, each a range of them, so that dw of a thread's columns is summed in registers
// over all of them; a second kernel adds the groups' sums in order. Where rows are walked twice, dw is a kernel of its own.
// The grid follows from the shape alone. All are bound by memory.
#include "rms_norm_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/exp.h"
#include "backends/metal/device/partials.h"
#include "backends/metal/device/rows.h"

constant uint weight_kind [[function_constant(0)]];  // RmsNormWeight
constant uint lanes
    [[function_constant(1)]];  // of a row that neighbouring lanes keep: 4, 8, 16 or 32

enum Form { kPlain, kResidual, kGated };

#define RMS_NORM_PLACE                                                                         \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],      \
      uint index [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]], \
      uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],   \
      uint simds [[simdgroups_per_threadgroup]]

// ---- scalars ----

// w has the type of x or f32, which the launcher says.
template <typename T>
inline float weight_at(device const uchar* w, long i) {
  if (weight_kind == kRmsNormNoWeight) return 1.0f;
  if (weight_kind == kRmsNormWeightF32) return ((device const float*)w)[i];
  return widen(((device const T*)w)[i]);
}

// Both steps are rounded correctly: rsqrt is not, and one a row is no cost.
inline float inverse_root(float sum, float share, float eps) {
  return 1.0f / sqrt(fma(sum, share, eps));
}

// s·r²/D, in an order that does not overflow where the result does not.
inline float pull(float s, float r, float share) { return s * r * share * r; }

// silu and its derivative.
struct Gate {
  float silu, slope;
};
template <typename T>
inline Gate gate(float g) {
  const Sigmoid sigma = sigmoid<T>(g);
  Gate result;
  result.silu = g * sigma.value;
  result.slope = fma(result.silu, sigma.rest, sigma.value);
  return result;
}

// ---- rows in registers ----

// The packs of a thread: first, first + step, ... of a row's.
struct Share {
  uint first, step, end;
  inline bool has(int j) const { return first + uint(j) * step < end; }
  inline uint pack(int j) const { return first + uint(j) * step; }
};

template <typename T>
inline Share share_of(constant RmsNormArgs& args, uint first, uint step, bool in) {
  Share share;
  share.first = first;
  share.step = step;
  share.end = in ? uint(args.cols) / Pack<T>::kCount : 0;
  return share;
}

// A thread's weights of one pack.
template <typename T>
inline void load_weights(device const uchar* w, uint pack, bool has, thread float* v) {
  enum { kCount = Pack<T>::kCount };
  if (weight_kind == kRmsNormWeightLikeX && has) {
    Pack<T>::unpack(load_pack((device const T*)w + pack * kCount), v);
  } else {
    for (int i = 0; i < kCount; ++i) v[i] = has ? weight_at<T>(w, pack * kCount + i) : 0.0f;
  }
}

// ---- forward ----

// What a thread keeps of a row between the sum and the results.
template <typename T, int kForm, int kPacks>
struct ForwardRow {
  enum { kCount = Pack<T>::kCount };
  uint4 bits[kPacks];

  inline float load(Share share, device const T* x, device const T* other, device T* h) {
    float v[kCount], u[kCount];
    float sum = 0;
    for (int j = 0; j < kPacks; ++j) {
      if (!share.has(j)) continue;
      const uint at = share.pack(j) * kCount;
      bits[j] = load_pack(x + at);
      if (kForm == kResidual) {
        Pack<T>::unpack(bits[j], v);
        Pack<T>::unpack(load_pack(other + at), u);
        for (int i = 0; i < kCount; ++i) v[i] += u[i];
        bits[j] = Pack<T>::pack(v);  // the norm is of h as it is stored
        store_pack(bits[j], h + at);
      }
      Pack<T>::unpack(bits[j], v);
      for (int i = 0; i < kCount; ++i) sum = fma(v[i], v[i], sum);
    }
    return sum;
  }

  inline void store(Share share, float r, device const uchar* w, device const T* other,
                    device T* y) const {
    float v[kCount], u[kCount];
    for (int j = 0; j < kPacks; ++j) {
      if (!share.has(j)) continue;
      const uint at = share.pack(j) * kCount;
      Pack<T>::unpack(bits[j], v);
      load_weights<T>(w, share.pack(j), true, u);
      for (int i = 0; i < kCount; ++i) v[i] = v[i] * r * u[i];
      if (kForm == kGated) {
        Pack<T>::unpack(load_pack(other + at), u);
        for (int i = 0; i < kCount; ++i) v[i] *= gate<T>(u[i]).silu;
      }
      store_pack(Pack<T>::pack(v), y + at);
    }
  }
};

#define FORWARD_BUFFERS                                                                          \
  device const T *x [[buffer(0)]], device const uchar *w [[buffer(1)]],                          \
      device const T *other [[buffer(2)]], device T *y [[buffer(3)]], device T *h [[buffer(4)]], \
      device float *r [[buffer(5)]], constant RmsNormArgs &args [[buffer(6)]], RMS_NORM_PLACE

template <typename T, int kForm>
[[kernel, max_total_threads_per_threadgroup(256)]] void rms_norm_fwd_lanes(FORWARD_BUFFERS) {
  const long row = (long(group) + first_group) * (threads / lanes) + index / lanes;
  const bool in = row < args.rows;
  const long start = in ? row * args.cols : 0;
  const Share share = share_of<T>(args, index % lanes, lanes, in);
  ForwardRow<T, kForm, 1> kept;
  const float sum = lanes_sum(kept.load(share, x + start, other + start, h + start), lanes);
  const float root = inverse_root(sum, 1 / args.divisor, args.eps);
  if (in && index % lanes == 0) r[row] = root;
  kept.store(share, root, w, other + start, y + start);
}

template <typename T, int kForm, int kPacks>
[[kernel, max_total_threads_per_threadgroup(1024)]] void rms_norm_fwd_kept(FORWARD_BUFFERS) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const long row = long(group) + first_group;
  const long start = row * args.cols;
  const Share share = share_of<T>(args, index, threads, true);
  ForwardRow<T, kForm, kPacks> kept;
  const float sum = group_sum(kept.load(share, x + start, other + start, h + start), room, place);
  const float root = inverse_root(sum, 1 / args.divisor, args.eps);
  if (index == 0) r[row] = root;
  kept.store(share, root, w, other + start, y + start);
}

template <typename T, int kForm>
[[kernel, max_total_threads_per_threadgroup(1024)]] void rms_norm_fwd_walked(FORWARD_BUFFERS) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const long row = long(group) + first_group;
  const long start = row * args.cols;
  const uint cols = uint(args.cols);
  float sum = 0;
  for (uint c = index; c < cols; c += threads) {
    float v = widen(x[start + c]);
    if (kForm == kResidual) {
      const T stored = narrow<T>(v + widen(other[start + c]));
      h[start + c] = stored;
      v = widen(stored);
    }
    sum = fma(v, v, sum);
  }
  const float root = inverse_root(group_sum(sum, room, place), 1 / args.divisor, args.eps);
  if (index == 0) r[row] = root;
  for (uint c = index; c < cols; c += threads) {
    // What this thread wrote into h it reads itself.
    float v = widen(kForm == kResidual ? h[start + c] : x[start + c]);
    v = v * root * weight_at<T>(w, c);
    if (kForm == kGated) v *= gate<T>(widen(other[start + c])).silu;
    y[start + c] = narrow<T>(v);
  }
}

// ---- backward ----

// dw of f32 holds more than what the fast exponential of 16 bits leaves.
template <typename T>
inline Gate exact_gate(float g) {
  return weight_kind == kRmsNormWeightF32 ? gate<float>(g) : gate<T>(g);
}

// A thread's packs of one row, from dy to dx, and what it knows of its columns over all rows.
template <typename T, int kForm, int kPacks>
struct BackwardRows {
  enum { kCount = Pack<T>::kCount };
  float weights[kPacks][kCount];
  float dw[kPacks][kCount];
  uint4 x_bits[kPacks], dy_bits[kPacks];

  inline void begin(Share share, device const uchar* w) {
    for (int j = 0; j < kPacks; ++j) {
      load_weights<T>(w, share.pack(j), share.has(j), weights[j]);
      for (int i = 0; i < kCount; ++i) dw[j][i] = 0;
    }
  }

  // dy, or dy·silu(g).
  inline void through(int j, uint at, device const T* other, thread float* v) const {
    Pack<T>::unpack(dy_bits[j], v);
    if (kForm != kGated) return;
    float g[kCount];
    Pack<T>::unpack(load_pack(other + at), g);
    for (int i = 0; i < kCount; ++i) v[i] *= exact_gate<T>(g[i]).silu;
  }

  // The thread's part of s; adds to dw.
  inline float load(Share share, float r, device const T* x, device const T* dy,
                    device const T* other) {
    float v[kCount], u[kCount];
    float s = 0;
    for (int j = 0; j < kPacks; ++j) {
      if (!share.has(j)) continue;
      const uint at = share.pack(j) * kCount;
      x_bits[j] = load_pack(x + at);
      dy_bits[j] = load_pack(dy + at);
      Pack<T>::unpack(x_bits[j], v);
      through(j, at, other, u);
      for (int i = 0; i < kCount; ++i) {
        const float term = v[i] * u[i];
        s = fma(term, weights[j][i], s);
        dw[j][i] = fma(term, r, dw[j][i]);
      }
    }
    return s;
  }

  inline void store(Share share, float r, float back, device const T* other, device T* dx,
                    device T* dg) const {
    float v[kCount], u[kCount], o[kCount];
    for (int j = 0; j < kPacks; ++j) {
      if (!share.has(j)) continue;
      const uint at = share.pack(j) * kCount;
      Pack<T>::unpack(x_bits[j], v);
      if (kForm == kGated) {
        Pack<T>::unpack(dy_bits[j], u);
        Pack<T>::unpack(load_pack(other + at), o);
        for (int i = 0; i < kCount; ++i) {
          o[i] = v[i] * r * weights[j][i] * (u[i] * exact_gate<T>(o[i]).slope);
        }
        store_pack(Pack<T>::pack(o), dg + at);
      }
      through(j, at, other, u);
      if (kForm == kResidual) Pack<T>::unpack(load_pack(other + at), o);
      for (int i = 0; i < kCount; ++i) {
        const float inner = fma(-v[i], back, u[i] * weights[j][i]);
        v[i] = kForm == kResidual ? fma(inner, r, o[i]) : inner * r;
      }
      store_pack(Pack<T>::pack(v), dx + at);
    }
  }
};

// parts: [groups, D]; each: rows of a group.
#define BACKWARD_BUFFERS                                                                           \
  device const T *x [[buffer(0)]], device const uchar *w [[buffer(1)]],                            \
      device const float *r [[buffer(2)]], device const T *dy [[buffer(3)]],                       \
      device const T *other [[buffer(4)]], device T *dx [[buffer(5)]], device T *dg [[buffer(6)]], \
      device float *parts [[buffer(7)]], constant RmsNormArgs &args [[buffer(8)]],                 \
      constant long &each [[buffer(9)]], RMS_NORM_PLACE

// Lanes have a row together, a group 256 / lanes rows at a time.
template <typename T, int kForm>
[[kernel, max_total_threads_per_threadgroup(256)]] void rms_norm_bwd_lanes(BACKWARD_BUFFERS) {
  threadgroup float room[256][Pack<T>::kCount];
  const uint rows = threads / lanes;
  const long whole = long(group) + first_group;
  const long end = min(args.rows, (whole + 1) * each);
  const Share columns = share_of<T>(args, index % lanes, lanes, true);
  BackwardRows<T, kForm, 1> kept;
  kept.begin(columns, w);
  for (long first = whole * each; first < end; first += rows) {
    const long row = first + index / lanes;
    const bool in = row < end;
    const long start = in ? row * args.cols : 0;
    const Share share = share_of<T>(args, index % lanes, lanes, in);
    const float root = in ? r[row] : 0.0f;
    const float s = lanes_sum(kept.load(share, root, x + start, dy + start, other + start), lanes);
    kept.store(share, root, pull(s, root, 1 / args.divisor), other + start, dx + start, dg + start);
  }
  if (weight_kind == kRmsNormNoWeight) return;
  for (int i = 0; i < Pack<T>::kCount; ++i) room[index][i] = kept.dw[0][i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index >= lanes || !columns.has(0)) return;
  for (int i = 0; i < Pack<T>::kCount; ++i) {
    float sum = 0;
    for (uint k = 0; k < rows; ++k) sum += room[k * lanes + index][i];
    parts[whole * args.cols + index * Pack<T>::kCount + i] = sum;
  }
}

template <typename T, int kForm, int kPacks>
[[kernel, max_total_threads_per_threadgroup(1024)]] void rms_norm_bwd_kept(BACKWARD_BUFFERS) {
  threadgroup float room[2][32];
  const Place place = {index, lane, simd, simds};
  const long whole = long(group) + first_group;
  const long end = min(args.rows, (whole + 1) * each);
  const Share share = share_of<T>(args, index, threads, true);
  BackwardRows<T, kForm, kPacks> kept;
  kept.begin(share, w);
  uint turn = 0;
  for (long row = whole * each; row < end; ++row, turn ^= 1) {
    const long start = row * args.cols;
    const float root = r[row];
    const float s =
        group_sum(kept.load(share, root, x + start, dy + start, other + start), room[turn], place);
    kept.store(share, root, pull(s, root, 1 / args.divisor), other + start, dx + start, dg + start);
  }
  if (weight_kind == kRmsNormNoWeight) return;
  for (int j = 0; j < kPacks; ++j) {
    if (!share.has(j)) continue;
    for (int i = 0; i < Pack<T>::kCount; ++i) {
      parts[whole * args.cols + share.pack(j) * Pack<T>::kCount + i] = kept.dw[j][i];
    }
  }
}

template <typename T, int kForm>
inline float through_at(device const T* dy, device const T* other, long i) {
  const float v = widen(dy[i]);
  return kForm == kGated ? v * exact_gate<T>(widen(other[i])).silu : v;
}

template <typename T, int kForm>
[[kernel, max_total_threads_per_threadgroup(1024)]] void rms_norm_bwd_walked(BACKWARD_BUFFERS) {
  threadgroup float room[32];
  const Place place = {index, lane, simd, simds};
  const long row = long(group) + first_group;
  const long start = row * args.cols;
  const uint cols = uint(args.cols);
  const float root = r[row];
  float s = 0;
  for (uint c = index; c < cols; c += threads) {
    const float term = widen(x[start + c]) * through_at<T, kForm>(dy, other, start + c);
    s = fma(term, weight_at<T>(w, c), s);
  }
  const float back = pull(group_sum(s, room, place), root, 1 / args.divisor);
  for (uint c = index; c < cols; c += threads) {
    const float v = widen(x[start + c]);
    const float weight = weight_at<T>(w, c);
    const float inner = fma(-v, back, through_at<T, kForm>(dy, other, start + c) * weight);
    float result = inner * root;
    if (kForm == kResidual) result = fma(inner, root, widen(other[start + c]));
    dx[start + c] = narrow<T>(result);
    if (kForm == kGated) {
      const float slope = exact_gate<T>(widen(other[start + c])).slope;
      dg[start + c] = narrow<T>(v * root * weight * (widen(dy[start + c]) * slope));
    }
  }
}

// dw of 32 columns over one strip of rows, which the simdgroups of a group share. groups: tiles of columns, then strips.
template <typename T, int kForm>
[[kernel, max_total_threads_per_threadgroup(256)]] void rms_norm_bwd_dw(BACKWARD_BUFFERS) {
  threadgroup float room[8][32];
  const long whole = long(group) + first_group;
  const long tiles = (args.cols + 31) / 32;
  const long strip = whole / tiles;
  const long c = whole % tiles * 32 + lane;
  const long end = min(args.rows, (strip + 1) * each);
  float sum = 0;
  if (c < args.cols) {
    for (long row = strip * each + simd; row < end; row += simds) {
      const long i = row * args.cols + c;
      sum = fma(widen(x[i]) * through_at<T, kForm>(dy, other, i), r[row], sum);
    }
  }
  room[simd][lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd != 0 || c >= args.cols) return;
  for (uint k = 1; k < simds; ++k) sum += room[k][lane];
  parts[strip * args.cols + c] = sum;
}

template <typename Out>
[[kernel, max_total_threads_per_threadgroup(256)]] void rms_norm_sum_dw(
    device const float* parts [[buffer(0)]], device Out* dw [[buffer(1)]],
    constant uint& count [[buffer(2)]], constant uint& columns [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float room[256];
  sum_partials(parts, count, columns, dw, room, group, lane, simd);
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_FORM(form, kForm, type, T)                                    \
  MAKE("rms_norm" form "_fwd_lanes_" type, rms_norm_fwd_lanes<T, kForm>)   \
  MAKE("rms_norm" form "_fwd_kept1_" type, rms_norm_fwd_kept<T, kForm, 1>) \
  MAKE("rms_norm" form "_fwd_kept2_" type, rms_norm_fwd_kept<T, kForm, 2>) \
  MAKE("rms_norm" form "_fwd_kept4_" type, rms_norm_fwd_kept<T, kForm, 4>) \
  MAKE("rms_norm" form "_fwd_walked_" type, rms_norm_fwd_walked<T, kForm>) \
  MAKE("rms_norm" form "_bwd_lanes_" type, rms_norm_bwd_lanes<T, kForm>)   \
  MAKE("rms_norm" form "_bwd_kept1_" type, rms_norm_bwd_kept<T, kForm, 1>) \
  MAKE("rms_norm" form "_bwd_kept2_" type, rms_norm_bwd_kept<T, kForm, 2>) \
  MAKE("rms_norm" form "_bwd_walked_" type, rms_norm_bwd_walked<T, kForm>) \
  MAKE("rms_norm" form "_bwd_dw_" type, rms_norm_bwd_dw<T, kForm>)
#define MAKE_TYPE(type, T)                   \
  MAKE_FORM("", kPlain, type, T)             \
  MAKE_FORM("_residual", kResidual, type, T) \
  MAKE_FORM("_gated", kGated, type, T)       \
  MAKE("rms_norm_sum_dw_" type, rms_norm_sum_dw<T>)
MAKE_TYPE("f32", float)
MAKE_TYPE("f16", half)
MAKE_TYPE("bf16", bf16)
// Twice as many packs for rows of f32, whose packs hold half as much.
MAKE("rms_norm_bwd_kept4_f32", rms_norm_bwd_kept<float, kPlain, 4>)
MAKE("rms_norm_residual_bwd_kept4_f32", rms_norm_bwd_kept<float, kResidual, 4>)
MAKE("rms_norm_gated_bwd_kept4_f32", rms_norm_bwd_kept<float, kGated, 4>)

#else

#include <algorithm>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

enum class Form { kPlain, kResidual, kGated };

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kByLanes = 32;       // packs of a row that lanes keep
constexpr std::int64_t kMostGroups = 512;   // that walk rows in a backward
constexpr std::int64_t kBySimdgroup = 512;  // columns of a walked row that one simdgroup has
constexpr std::int64_t kLeastStrip = 64;    // rows of a strip of dw

template <class T>
constexpr std::int64_t kPack = 16 / sizeof(T);

// Packs of a row that a group keeps, by the packs of a thread: 32 numbers forward, and backward 16 for each of w and dw.
constexpr std::int64_t kMostForward = 4;
template <class T>
constexpr std::int64_t kMostBackward = 16 / kPack<T>;

std::uint32_t lanes_for(std::int64_t packs) {
  std::uint32_t count = 4;
  while (count < packs) count *= 2;
  return count;
}

// One pack a thread, two, or four: as few as do for a row.
std::int64_t packs_each(std::int64_t packs) { return packs <= 512 ? 1 : packs <= 1024 ? 2 : 4; }

template <class... Pointers>
bool all_aligned(Pointers... pointers) {
  return (metal::is_aligned(pointers) && ...);  // a null pointer is
}

// The names of one form's kernels.
struct Names {
  const char *lanes, *kept[3], *walked, *dw;
};
constexpr Names kForward[] = {
    {"rms_norm_fwd_lanes",
     {"rms_norm_fwd_kept1", "rms_norm_fwd_kept2", "rms_norm_fwd_kept4"},
     "rms_norm_fwd_walked",
     nullptr},
    {"rms_norm_residual_fwd_lanes",
     {"rms_norm_residual_fwd_kept1", "rms_norm_residual_fwd_kept2", "rms_norm_residual_fwd_kept4"},
     "rms_norm_residual_fwd_walked",
     nullptr},
    {"rms_norm_gated_fwd_lanes",
     {"rms_norm_gated_fwd_kept1", "rms_norm_gated_fwd_kept2", "rms_norm_gated_fwd_kept4"},
     "rms_norm_gated_fwd_walked",
     nullptr}};
constexpr Names kBackward[] = {
    {"rms_norm_bwd_lanes",
     {"rms_norm_bwd_kept1", "rms_norm_bwd_kept2", "rms_norm_bwd_kept4"},
     "rms_norm_bwd_walked",
     "rms_norm_bwd_dw"},
    {"rms_norm_residual_bwd_lanes",
     {"rms_norm_residual_bwd_kept1", "rms_norm_residual_bwd_kept2", "rms_norm_residual_bwd_kept4"},
     "rms_norm_residual_bwd_walked",
     "rms_norm_residual_bwd_dw"},
    {"rms_norm_gated_bwd_lanes",
     {"rms_norm_gated_bwd_kept1", "rms_norm_gated_bwd_kept2", "rms_norm_gated_bwd_kept4"},
     "rms_norm_gated_bwd_walked",
     "rms_norm_gated_bwd_dw"}};

// ---- forward ----

template <Form kForm, class T>
void forward(const KernelCall& call) {
  const auto& args = call.as<RmsNormArgs>();
  constexpr bool kResidual = kForm == Form::kResidual;
  const Names& names = kForward[static_cast<std::size_t>(kForm)];
  const void* x = call.in[0];                                        // [R, D]
  const void* w = call.in[1];                                        // [D]
  const void* other = kForm == Form::kPlain ? nullptr : call.in[2];  // [R, D]: residual or g
  void* y = call.out[0];                                             // [R, D]
  void* h = kResidual ? call.out[1] : nullptr;                       // [R, D]
  void* r = call.out[kResidual ? 2 : 1];                             // [R]
  const auto launch = [&](const char* name) {
    Launch made(call, metal::kernel<T>(name));
    made.constant(0, static_cast<std::uint32_t>(args.weight))
        .input(0, x)
        .input(1, w)
        .input(2, other)
        .output(3, y)
        .output(4, h)
        .output(5, r)
        .bytes(6, args)
        .in_parts();
    return made;
  };
  const std::int64_t packs = args.cols / kPack<T>;
  const bool whole = args.cols % kPack<T> == 0 && all_aligned(x, w, other, y, h);
  if (whole && packs <= kByLanes) {
    const std::uint32_t lanes = lanes_for(packs);
    return launch(names.lanes)
        .constant(1, lanes)
        .groups(ceil_div(args.rows, kThreads / lanes))
        .threads(kThreads)
        .run();
  }
  if (whole && packs <= kMostForward * metal::kMostThreads) {
    const std::int64_t each = packs_each(packs);
    return launch(names.kept[each / 2])
        .groups(args.rows)
        .threads(metal::row_threads(packs, each))
        .run();
  }
  const std::int64_t threads =
      args.cols <= kBySimdgroup ? metal::kSimd : metal::row_threads(args.cols, 8);
  launch(names.walked).groups(args.rows).threads(threads).run();
}

// ---- backward ----

struct Strips {
  std::int64_t each, count;  // rows of one, and how many
};
Strips strips_of(std::int64_t rows, std::int64_t least) {
  const std::int64_t each = std::max(least, ceil_div(rows, kMostGroups));
  return {each, ceil_div(rows, each)};
}

// dw of the groups or of the strips, whichever are more: which it will be, the addresses say.
std::size_t backward_workspace(const void* p) {
  const auto& args = *static_cast<const RmsNormArgs*>(p);
  if (args.weight == kRmsNormNoWeight) return 0;
  return static_cast<std::size_t>(strips_of(args.rows, 1).count * args.cols) * sizeof(float);
}

template <class T>
void sum_dw(const KernelCall& call, std::int64_t count) {
  const auto& args = call.as<RmsNormArgs>();
  Launch(call, args.weight == kRmsNormWeightF32 ? metal::kernel<float>("rms_norm_sum_dw")
                                                : metal::kernel<T>("rms_norm_sum_dw"))
      .input(0, call.workspace)
      .output(1, call.out[1])
      .bytes(2, static_cast<std::uint32_t>(count))
      .bytes(3, static_cast<std::uint32_t>(args.cols))
      .groups(ceil_div(args.cols, metal::kSimd))
      .threads(kThreads)
      .run();
}

template <Form kForm, class T>
void backward(const KernelCall& call) {
  const auto& args = call.as<RmsNormArgs>();
  const Names& names = kBackward[static_cast<std::size_t>(kForm)];
  const void* x = call.in[0];                                        // [R, D]
  const void* w = call.in[1];                                        // [D]
  const void* r = call.in[2];                                        // [R]
  const void* dy = call.in[3];                                       // [R, D]
  const void* other = kForm == Form::kPlain ? nullptr : call.in[4];  // [R, D]: dh_in or g
  void* dx = call.out[0];                                            // [R, D]
  void* dg = kForm == Form::kGated ? call.out[2] : nullptr;          // [R, D]
  const auto launch = [&](const char* name, std::int64_t each) {
    Launch made(call, metal::kernel<T>(name));
    made.constant(0, static_cast<std::uint32_t>(args.weight))
        .input(0, x)
        .input(1, w)
        .input(2, r)
        .input(3, dy)
        .input(4, other)
        .output(5, dx)
        .output(6, dg)
        .output(7, call.workspace)
        .bytes(8, args)
        .bytes(9, each)
        .in_parts();
    return made;
  };
  const bool has_dw = args.weight != kRmsNormNoWeight;
  const std::int64_t packs = args.cols / kPack<T>;
  const bool whole = args.cols % kPack<T> == 0 && all_aligned(x, w, dy, other, dx, dg);
  Strips strips = strips_of(args.rows, 1);
  if (whole && packs <= kByLanes) {
    const std::uint32_t lanes = lanes_for(packs);
    // At least one turn of all lanes of a group.
    strips = strips_of(args.rows, kThreads / lanes);
    launch(names.lanes, strips.each)
        .constant(1, lanes)
        .groups(strips.count)
        .threads(kThreads)
        .run();
  } else if (whole && packs <= kMostBackward<T> * metal::kMostThreads) {
    const std::int64_t each = std::min(packs_each(packs), kMostBackward<T>);
    launch(names.kept[each / 2], strips.each)
        .groups(strips.count)
        .threads(metal::row_threads(packs, each))
        .run();
  } else {
    const std::int64_t threads =
        args.cols <= kBySimdgroup ? metal::kSimd : metal::row_threads(args.cols, 8);
    launch(names.walked, 0).groups(args.rows).threads(threads).run();
    if (!has_dw) return;
    strips = strips_of(args.rows, kLeastStrip);
    launch(names.dw, strips.each)
        .groups(strips.count * ceil_div(args.cols, metal::kSimd))
        .threads(kThreads)
        .run();
  }
  if (has_dw) sum_dw<T>(call, strips.count);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  const auto add = [&]<Form kForm>(const std::string& name, std::integral_constant<Form, kForm>) {
    registry.add(Backend::kMetal, name + "_fwd_" + type, forward<kForm, T>);
    registry.add(Backend::kMetal, name + "_bwd_" + type, backward<kForm, T>, backward_workspace);
  };
  add("rms_norm", std::integral_constant<Form, Form::kPlain>());
  add("rms_norm_residual", std::integral_constant<Form, Form::kResidual>());
  add("rms_norm_gated", std::integral_constant<Form, Form::kGated>());
}

}  // namespace

void register_rms_norm_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
