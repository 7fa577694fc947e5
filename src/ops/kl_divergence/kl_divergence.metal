// Metal kernels of kl_divergence (formula and layout: mlxtape/ops/kl_divergence.h).
//
// Rows of one type and of whole 16-byte packs that a group's registers hold are read once: sums, loss and gradient by one
// kernel. All others, longer than about 32,768 columns in 16 bits, ragged or of two types, take three: parts of 16,384
// columns are summed by a group each, a simdgroup joins a row's parts and writes its loss, and the gradient is made element by
// element, as it is from saved sums. A stored teacher: one kernel makes its sums and gathers the student's logits at its
// indices, the student's rows go the same two ways as if the teacher had nothing, and a last kernel puts right the
// gradient at the indices from what was gathered, for the rows may have been overwritten in place. A row that does not count
// is not read. Bound by memory. Threads of a group: 32 to 1024. Threadgroup memory: 640 bytes. About 32 registers a thread,
// 64 with four packs of both rows.
#include "kl_divergence_args.h"

struct KlDivergenceParts {
  int64_t parts;  // of a row
  int64_t each;   // columns of a part
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/kept_rows.h"

constant bool packs [[function_constant(0)]];           // rows are whole packs
constant bool wants_gradient [[function_constant(1)]];  // of the forward
constant bool wants_norm [[function_constant(2)]];
constant bool has_dloss [[function_constant(3)]];     // else it is 1
constant bool has_top [[function_constant(4)]];       // the teacher's sums are there already
constant bool has_gathered [[function_constant(5)]];  // the student's logits at the indices

#define KL_PLACE                                                                               \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],      \
      uint index [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]], \
      uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],   \
      uint simds [[simdgroups_per_threadgroup]]

// The exponential that either type's results ask for.
template <typename Q, typename P>
struct KlExp {
  enum { kExact = sizeof(Q) == 4 || sizeof(P) == 4 };
  static inline float of(float x) { return kExact ? precise::exp(x) : fast::exp(x); }
};

// Of some elements: the largest of each, Σ exp((z − that)/T) of each, and cross = Σ exp((p − m_p)/T)·(p − q).
struct KlSums {
  float m_q, q, m_p, p, cross;
};
inline KlSums no_sums() {
  KlSums s;
  s.m_q = s.m_p = -INFINITY;
  s.q = s.p = s.cross = 0;
  return s;
}

template <typename E>
inline void add_student(thread KlSums& s, float v, float k) {
  if (v > s.m_q) {
    s.q = s.q == 0 ? 0.0f : s.q * E::of((s.m_q - v) * k);
    s.m_q = v;
  }
  s.q += E::of((v - finite_reference(s.m_q)) * k);
}

// What the teacher's element adds, whose reference is there. 0·∞ where it has nothing; NaN is in p already.
inline void add_cross(thread KlSums& s, float e_p, float vq, float vp) {
  s.p += e_p;
  if (e_p > 0) s.cross += e_p * (vp - vq);
}

template <typename E>
inline void add_both(thread KlSums& s, float vq, float vp, float k) {
  add_student<E>(s, vq, k);
  if (vp > s.m_p) {
    const float to_p = E::of((s.m_p - vp) * k);
    s.p = s.p == 0 ? 0.0f : s.p * to_p;
    s.cross = to_p == 0 ? 0.0f : s.cross * to_p;  // cross may be infinite
    s.m_p = vp;
  }
  add_cross(s, E::of((vp - finite_reference(s.m_p)) * k), vq, vp);
}

// To other references; sums of nothing stay so.
inline KlSums moved(KlSums s, float top_q, float top_p, float k) {
  const float to_p = precise::exp((s.m_p - finite_reference(top_p)) * k);
  s.q *= precise::exp((s.m_q - finite_reference(top_q)) * k);
  s.p *= to_p;
  s.cross = to_p == 0 ? 0.0f : s.cross * to_p;
  s.m_q = top_q;
  s.m_p = top_p;
  return s;
}

// Over a simdgroup.
inline KlSums simd_sums(KlSums s, float k) {
  s = moved(s, simd_max(s.m_q), simd_max(s.m_p), k);
  s.q = simd_sum(s.q);
  s.p = simd_sum(s.p);
  s.cross = simd_sum(s.cross);
  return s;
}

// Over a group; room: 5 numbers of each simdgroup.
inline KlSums group_sums(KlSums s, float k, threadgroup float* room, Place place) {
  s = simd_sums(s, k);
  if (place.simds == 1) return s;
  if (place.lane == 0) {
    threadgroup float* own = room + 5 * place.simd;
    own[0] = s.m_q;
    own[1] = s.q;
    own[2] = s.m_p;
    own[3] = s.p;
    own[4] = s.cross;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  s = no_sums();
  if (place.lane < place.simds) {
    threadgroup const float* own = room + 5 * place.lane;
    s.m_q = own[0];
    s.q = own[1];
    s.m_p = own[2];
    s.p = own[3];
    s.cross = own[4];
  }
  return simd_sums(s, k);
}

// By one thread of a row.
inline void write_loss(constant KlDivergenceArgs& args, long row, float w, KlSums s,
                       device float* loss, device float* norm) {
  const float apart = s.cross / s.p + (s.m_q - s.m_p);
  const float sums = precise::log(s.q) - precise::log(s.p);
  loss[row] = w == 0 ? 0.0f : w * (args.factor * (args.inverse * apart + sums));
  if (wants_norm) {
    norm[4 * row] = s.m_q;
    norm[4 * row + 1] = s.q;
    norm[4 * row + 2] = s.m_p;
    norm[4 * row + 3] = s.p;
  }
}

// dq[v] = exp((q − m_q)/T)·share_q − exp((p − m_p)/T)·share_p
struct KlGradient {
  float m_q, share_q, m_p, share_p, k;
};
// c: dloss·w, divided by Σ w for a mean.
inline KlGradient gradient_of(constant KlDivergenceArgs& args, float c, KlSums s) {
  KlGradient g;
  c *= args.factor * args.inverse;
  g.m_q = s.m_q;
  g.share_q = c / s.q;
  g.m_p = s.m_p;
  g.share_p = c / s.p;
  g.k = args.inverse;
  return g;
}
template <typename E>
inline float student_slope(KlGradient g, float q) {
  return E::of((q - g.m_q) * g.k) * g.share_q;
}
template <typename E>
inline float slope(KlGradient g, float q, float p) {
  return student_slope<E>(g, q) - E::of((p - g.m_p) * g.k) * g.share_p;
}

inline void take_top(thread KlSums& s, device const float* top, long row) {
  s.m_p = top[4 * row];
  s.p = top[4 * row + 1];
  s.cross = top[4 * row + 2];
}

// ---- rows that are kept in registers: a group each ----

// kTop: the student's alone, whose teacher's sums are in top [R, 4].
template <typename Q, int kPacks, bool kTop>
[[kernel, max_total_threads_per_threadgroup(1024)]] void kl_divergence_kept(
    device const Q* q [[buffer(0)]], device const Q* p [[buffer(1)]],
    device const float* weight [[buffer(2)]], device const float* scale [[buffer(3)]],
    device const float* top [[buffer(4)]], device float* loss [[buffer(5)]],
    device float* norm [[buffer(6)]], device Q* dq [[buffer(7)]],
    constant KlDivergenceArgs& args [[buffer(8)]], KL_PLACE) {
  typedef KlExp<Q, Q> E;
  threadgroup float room[160];
  const Place place = {index, lane, simd, simds};
  const long row = long(group) + first_group;
  const long start = row * args.cols;
  const float w = weight[row];
  const float k = args.inverse;
  // Sums of a row that does not count are those of nothing.
  KeptRow<Q, kPacks> a, b;
  a.place(index, threads, w == 0 ? 0 : uint(args.cols) / Pack<Q>::kCount);
  b.place(a.first, a.step, a.end);
  a.load(q + start);
  if (!kTop) b.load(p + start);
  KlSums s = no_sums();
  s.m_q = simd_max(kept_largest<Q, kPacks>(a));
  if (!kTop) s.m_p = simd_max(kept_largest<Q, kPacks>(b));
  const float ref_q = finite_reference(s.m_q), ref_p = finite_reference(s.m_p);
  float u[Pack<Q>::kCount], v[Pack<Q>::kCount];
  for (int j = 0; j < kPacks; ++j) {
    if (!a.has(j)) continue;
    Pack<Q>::unpack(a.bits[j], u);
    if (!kTop) Pack<Q>::unpack(b.bits[j], v);
    for (int i = 0; i < Pack<Q>::kCount; ++i) {
      s.q += E::of((u[i] - ref_q) * k);
      if (!kTop) add_cross(s, E::of((v[i] - ref_p) * k), u[i], v[i]);
    }
  }
  s = group_sums(s, k, room, place);
  if (kTop) take_top(s, top, row);
  if (index == 0) write_loss(args, row, w, s, loss, norm);
  if (!wants_gradient) return;
  const KlGradient g = gradient_of(args, w * scale[0], s);
  for (int j = 0; j < kPacks; ++j) {
    if (!a.has(j)) continue;
    Pack<Q>::unpack(a.bits[j], u);
    if (!kTop) Pack<Q>::unpack(b.bits[j], v);
    for (int i = 0; i < Pack<Q>::kCount; ++i) {
      u[i] = kTop ? student_slope<E>(g, u[i]) : slope<E>(g, u[i], v[i]);
    }
    store_pack(Pack<Q>::pack(u), dq + start + a.at(j));
  }
  if (w == 0) {
    for (uint i = index; i < uint(args.cols) / Pack<Q>::kCount; i += threads) {
      store_pack(uint4(0), dq + start + i * Pack<Q>::kCount);
    }
  }
}

// ---- any row: sums of its parts, then of the row ----

// sums: [R, parts, 5]. Packs: where both are of one type.
template <typename Q, typename P, bool kTop>
[[kernel, max_total_threads_per_threadgroup(512)]] void kl_divergence_part(
    device const Q* q [[buffer(0)]], device const P* p [[buffer(1)]],
    device const float* weight [[buffer(2)]], device float* sums [[buffer(3)]],
    constant KlDivergenceArgs& args [[buffer(4)]], constant KlDivergenceParts& parts [[buffer(5)]],
    KL_PLACE) {
  typedef KlExp<Q, P> E;
  threadgroup float room[160];
  const Place place = {index, lane, simd, simds};
  const long whole = long(group) + first_group;
  const long row = whole / parts.parts;
  const long first = whole % parts.parts * parts.each;
  const uint count = weight[row] == 0 ? 0 : uint(min(parts.each, args.cols - first));
  const long start = row * args.cols + first;
  const float k = args.inverse;
  KlSums s = no_sums();
  if (packs && sizeof(Q) == sizeof(P)) {
    float u[Pack<Q>::kCount], v[Pack<P>::kCount];
    for (uint c = index * Pack<Q>::kCount; c < count; c += threads * Pack<Q>::kCount) {
      Pack<Q>::unpack(load_pack(q + start + c), u);
      if (!kTop) Pack<P>::unpack(load_pack(p + start + c), v);
      for (int i = 0; i < Pack<Q>::kCount; ++i) {
        if (kTop) {
          add_student<E>(s, u[i], k);
        } else {
          add_both<E>(s, u[i], v[i], k);
        }
      }
    }
  } else {
    for (uint c = index; c < count; c += threads) {
      if (kTop) {
        add_student<E>(s, widen(q[start + c]), k);
      } else {
        add_both<E>(s, widen(q[start + c]), widen(p[start + c]), k);
      }
    }
  }
  s = group_sums(s, k, room, place);
  if (index != 0) return;
  device float* own = sums + 5 * whole;
  own[0] = s.m_q;
  own[1] = s.q;
  own[2] = s.m_p;
  own[3] = s.p;
  own[4] = s.cross;
}

// A simdgroup a row.
[[kernel, max_total_threads_per_threadgroup(256)]] void kl_divergence_join(
    device const float* sums [[buffer(0)]], device const float* weight [[buffer(1)]],
    device const float* top [[buffer(2)]], device float* loss [[buffer(3)]],
    device float* norm [[buffer(4)]], constant KlDivergenceArgs& args [[buffer(5)]],
    constant KlDivergenceParts& parts [[buffer(6)]], KL_PLACE) {
  const long row = (long(group) + first_group) * simds + simd;
  const bool in = row < args.rows;
  const float k = args.inverse;
  KlSums all = no_sums();
  for (long i = lane; in && i < parts.parts; i += 32) {
    device const float* from = sums + 5 * (row * parts.parts + i);
    KlSums s;
    s.m_q = from[0];
    s.q = from[1];
    s.m_p = from[2];
    s.p = from[3];
    s.cross = from[4];
    const float top_q = max(all.m_q, s.m_q), top_p = max(all.m_p, s.m_p);
    all = moved(all, top_q, top_p, k);
    s = moved(s, top_q, top_p, k);
    all.q += s.q;
    all.p += s.p;
    all.cross += s.cross;
  }
  all = simd_sums(all, k);
  if (lane != 0 || !in) return;
  if (has_top) take_top(all, top, row);
  write_loss(args, row, weight[row], all, loss, norm);
}

// ---- the gradient from saved sums ----

constant constexpr uint kEach = 4;  // packs or elements of a thread

// kTop: the student's share alone.
template <typename Q, typename P, bool kTop>
[[kernel, max_total_threads_per_threadgroup(256)]] void kl_divergence_bwd(
    device const Q* q [[buffer(0)]], device const P* p [[buffer(1)]],
    device const float* weight [[buffer(2)]], device const float* scale [[buffer(3)]],
    device const float* norm [[buffer(4)]], device const float* dloss [[buffer(5)]],
    device Q* dq [[buffer(6)]], constant KlDivergenceArgs& args [[buffer(7)]],
    constant KlDivergenceParts& parts [[buffer(8)]], KL_PLACE) {
  typedef KlExp<Q, P> E;
  const bool whole_packs = packs && sizeof(Q) == sizeof(P);
  const long whole = long(group) + first_group;
  const long row = whole / parts.parts;
  const uint width = whole_packs ? uint(Pack<Q>::kCount) : 1u;
  const uint first = (uint(whole % parts.parts) * (threads * kEach) + index) * width;
  const float w = weight[row];
  float c = w * scale[0];
  if (has_dloss) c *= dloss[row * args.dloss_step];
  KlSums s = no_sums();
  s.m_q = norm[4 * row];
  s.q = norm[4 * row + 1];
  s.m_p = norm[4 * row + 2];
  s.p = norm[4 * row + 3];
  const KlGradient g = gradient_of(args, c, s);
  const long start = row * args.cols;
  for (uint k = 0; k < kEach; ++k) {
    const uint at = first + k * threads * width;
    if (at >= uint(args.cols)) break;
    if (whole_packs) {
      float u[Pack<Q>::kCount] = {};
      float v[Pack<P>::kCount];
      if (w != 0) {
        Pack<Q>::unpack(load_pack(q + start + at), u);
        if (!kTop) Pack<P>::unpack(load_pack(p + start + at), v);
        for (int i = 0; i < Pack<Q>::kCount; ++i) {
          u[i] = kTop ? student_slope<E>(g, u[i]) : slope<E>(g, u[i], v[i]);
        }
      }
      store_pack(Pack<Q>::pack(u), dq + start + at);
    } else {
      float v = 0;
      if (w != 0) {
        const float own = widen(q[start + at]);
        v = kTop ? student_slope<E>(g, own) : slope<E>(g, own, widen(p[start + at]));
      }
      dq[start + at] = narrow<Q>(v);
    }
  }
}

// ---- a stored teacher: a group a row ----

// top: [R, 4], the teacher's m, its sum, cross, and nothing. gathered: [R, k].
template <typename Q, typename P>
[[kernel, max_total_threads_per_threadgroup(128)]] void kl_divergence_top_sums(
    device const Q* q [[buffer(0)]], device const P* values [[buffer(1)]],
    device const float* weight [[buffer(2)]], device const uint* places [[buffer(3)]],
    device float* top [[buffer(4)]], device float* gathered [[buffer(5)]],
    constant KlDivergenceArgs& args [[buffer(6)]], KL_PLACE) {
  typedef KlExp<float, P> E;
  threadgroup float room[20];
  const Place place = {index, lane, simd, simds};
  const long row = long(group) + first_group;
  const bool counts = weight[row] != 0;
  const float k = args.inverse;
  KlSums s = no_sums();
  for (long j = index; counts && j < args.top; j += threads) {
    const long at = row * args.top + j;
    const long c = places[at];
    const bool in = c < args.cols;
    const float own = in ? widen(q[row * args.cols + c]) : 0.0f;
    gathered[at] = own;
    add_both<E>(s, own, widen(values[at]), k);
    if (!in) s.p = NAN;  // which no later scaling takes back
  }
  s = group_sums(s, k, room, place);
  if (index == 0) {
    top[4 * row] = s.m_p;
    top[4 * row + 1] = s.p;
    top[4 * row + 2] = s.cross;
  }
}

template <typename Q, typename P>
[[kernel, max_total_threads_per_threadgroup(128)]] void kl_divergence_top_gradient(
    device const Q* q [[buffer(0)]], device const P* values [[buffer(1)]],
    device const float* weight [[buffer(2)]], device const uint* places [[buffer(3)]],
    device const float* scale [[buffer(4)]], device const float* norm [[buffer(5)]],
    device const float* dloss [[buffer(6)]], device const float* gathered [[buffer(7)]],
    device Q* dq [[buffer(8)]], constant KlDivergenceArgs& args [[buffer(9)]], KL_PLACE) {
  typedef KlExp<float, P> E;
  const long row = long(group) + first_group;
  const float w = weight[row];
  float c = w * scale[0];
  if (has_dloss) c *= dloss[row * args.dloss_step];
  KlSums s = no_sums();
  s.m_q = norm[4 * row];
  s.q = norm[4 * row + 1];
  s.m_p = norm[4 * row + 2];
  s.p = norm[4 * row + 3];
  const KlGradient g = gradient_of(args, c, s);
  for (long j = index; w != 0 && j < args.top; j += threads) {
    const long at = row * args.top + j;
    const long to = places[at];
    if (to >= args.cols) continue;
    const float own = has_gathered ? gathered[at] : widen(q[row * args.cols + to]);
    dq[row * args.cols + to] = narrow<Q>(slope<E>(g, own, widen(values[at])));
  }
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_PAIR(q, p, Q, P)                                              \
  MAKE("kl_divergence_part_of_" p "_" q, kl_divergence_part<Q, P, false>)  \
  MAKE("kl_divergence_bwd_of_" p "_" q, kl_divergence_bwd<Q, P, false>)    \
  MAKE("kl_divergence_top_sums_of_" p "_" q, kl_divergence_top_sums<Q, P>) \
  MAKE("kl_divergence_top_gradient_of_" p "_" q, kl_divergence_top_gradient<Q, P>)
#define MAKE_ALL(q, Q)                                                 \
  MAKE_PAIR(q, "f32", Q, float)                                        \
  MAKE_PAIR(q, "f16", Q, half)                                         \
  MAKE_PAIR(q, "bf16", Q, bf16)                                        \
  MAKE("kl_divergence_part_of_top_" q, kl_divergence_part<Q, Q, true>) \
  MAKE("kl_divergence_bwd_of_top_" q, kl_divergence_bwd<Q, Q, true>)   \
  MAKE("kl_divergence_kept1_" q, kl_divergence_kept<Q, 1, false>)      \
  MAKE("kl_divergence_kept2_" q, kl_divergence_kept<Q, 2, false>)      \
  MAKE("kl_divergence_kept4_" q, kl_divergence_kept<Q, 4, false>)      \
  MAKE("kl_divergence_top_kept1_" q, kl_divergence_kept<Q, 1, true>)   \
  MAKE("kl_divergence_top_kept2_" q, kl_divergence_kept<Q, 2, true>)   \
  MAKE("kl_divergence_top_kept4_" q, kl_divergence_kept<Q, 4, true>)
MAKE_ALL("f32", float)
MAKE_ALL("f16", half)
MAKE_ALL("bf16", bf16)

#else

#include <algorithm>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kTopThreads = 128;
constexpr std::int64_t kEach = 4;            // packs or elements of a thread of the gradient
constexpr std::int64_t kMostByGroup = 4096;  // packs of a row that a group keeps: four a thread
constexpr std::int64_t kPartColumns = 16384;

template <class T>
constexpr std::int64_t kPack = 16 / sizeof(T);

// Names of kernels by the teacher's type, and of those without one.
constexpr int kTop = 3;
constexpr const char* kPart[] = {"kl_divergence_part_of_f32", "kl_divergence_part_of_f16",
                                 "kl_divergence_part_of_bf16", "kl_divergence_part_of_top"};
constexpr const char* kGradient[] = {"kl_divergence_bwd_of_f32", "kl_divergence_bwd_of_f16",
                                     "kl_divergence_bwd_of_bf16", "kl_divergence_bwd_of_top"};
constexpr const char* kTopSums[] = {"kl_divergence_top_sums_of_f32",
                                    "kl_divergence_top_sums_of_f16",
                                    "kl_divergence_top_sums_of_bf16"};
constexpr const char* kTopGradient[] = {"kl_divergence_top_gradient_of_f32",
                                        "kl_divergence_top_gradient_of_f16",
                                        "kl_divergence_top_gradient_of_bf16"};
constexpr const char* kKept[][3] = {
    {"kl_divergence_kept1", "kl_divergence_kept2", "kl_divergence_kept4"},
    {"kl_divergence_top_kept1", "kl_divergence_top_kept2", "kl_divergence_top_kept4"}};

template <class Q>
constexpr KlDivergenceTeacher kOwnType = sizeof(Q) == 4             ? kKlTeacherF32
                                         : kDType<Q> == DType::kF16 ? kKlTeacherF16
                                                                    : kKlTeacherBF16;

// The tensors of a call, and where scratch memory has what: parts' sums [R, parts, 5], norm [R, 4] where the caller has no
// room for it, the sums of a stored teacher [R, 4], the student's logits at its indices [R, k].
struct Tensors {
  const void *q, *p, *weight, *scale;  // p: null for a stored teacher
  void *loss, *norm, *dq;
  float *sums, *spare_norm, *top, *gathered;
};

KlDivergenceParts parts_of(const KlDivergenceArgs& args) {
  // Packs must not lie across two parts.
  const std::int64_t wanted = ceil_div(args.cols, kPartColumns);
  const std::int64_t each = ceil_div(ceil_div(args.cols, wanted), 64) * 64;
  return {ceil_div(args.cols, each), each};
}

std::size_t forward_workspace(const void* p) {
  const auto& args = *static_cast<const KlDivergenceArgs*>(p);
  const std::int64_t top = args.top == 0 ? 0 : 4 + args.top;
  return static_cast<std::size_t>(args.rows * (5 * parts_of(args).parts + 4 + top)) * sizeof(float);
}

Tensors tensors_of(const KernelCall& call) {
  const auto& args = call.as<KlDivergenceArgs>();
  Tensors t{};
  t.q = call.in[0];
  t.p = args.top == 0 ? call.in[1] : nullptr;
  t.weight = call.in[2];
  t.scale = call.in[3];
  t.sums = static_cast<float*>(call.workspace);
  if (t.sums == nullptr) return t;
  t.spare_norm = t.sums + args.rows * 5 * parts_of(args).parts;
  t.top = args.top == 0 ? nullptr : t.spare_norm + args.rows * 4;
  t.gathered = args.top == 0 ? nullptr : t.top + args.rows * 4;
  return t;
}

// Can rows be read as packs? Those of two types cannot.
template <class Q>
bool is_whole(const KlDivergenceArgs& args, const Tensors& t) {
  return args.cols % kPack<Q> == 0 && (args.top != 0 || args.teacher == kOwnType<Q>) &&
         metal::is_aligned(t.q) && metal::is_aligned(t.p) && metal::is_aligned(t.dq);
}

// dloss null: 1.
template <class Q>
void run_gradient(const KernelCall& call, const Tensors& t, const void* norm, const void* dloss) {
  const auto& args = call.as<KlDivergenceArgs>();
  const bool whole = is_whole<Q>(args, t);
  const std::int64_t each = kThreads * kEach * (whole ? kPack<Q> : 1);
  const KlDivergenceParts parts{ceil_div(args.cols, each), each};
  Launch(call, metal::kernel<Q>(kGradient[args.top != 0 ? kTop : args.teacher]))
      .constant(0, whole)
      .constant(3, dloss != nullptr)
      .input(0, t.q)
      .input(1, t.p)
      .input(2, t.weight)
      .input(3, t.scale)
      .input(4, norm)
      .input(5, dloss)
      .output(6, t.dq)
      .bytes(7, args)
      .bytes(8, parts)
      .in_parts()
      .groups(args.rows * parts.parts)
      .threads(kThreads)
      .run();
}

template <class Q>
void run_rows(const KernelCall& call, const Tensors& t) {
  const auto& args = call.as<KlDivergenceArgs>();
  const bool whole = is_whole<Q>(args, t);
  const std::int64_t row_packs = args.cols / kPack<Q>;
  if (whole && row_packs <= kMostByGroup) {
    const std::int64_t each = row_packs <= 512 ? 1 : row_packs <= 1024 ? 2 : 4;
    return Launch(call, metal::kernel<Q>(kKept[args.top != 0 ? 1 : 0][each / 2]))
        .constant(1, t.dq != nullptr)
        .constant(2, t.norm != nullptr)
        .input(0, t.q)
        .input(1, t.p)
        .input(2, t.weight)
        .input(3, t.scale)
        .input(4, t.top)
        .output(5, t.loss)
        .output(6, t.norm)
        .output(7, t.dq)
        .bytes(8, args)
        .in_parts()
        .groups(args.rows)
        .threads(metal::row_threads(row_packs, each))
        .run();
  }
  const KlDivergenceParts parts = parts_of(args);
  Launch(call, metal::kernel<Q>(kPart[args.top != 0 ? kTop : args.teacher]))
      .constant(0, whole)
      .input(0, t.q)
      .input(1, t.p)
      .input(2, t.weight)
      .output(3, t.sums)
      .bytes(4, args)
      .bytes(5, parts)
      .in_parts()
      .groups(args.rows * parts.parts)
      .threads(metal::row_threads(parts.each, 32, 512))
      .run();
  Launch(call, metal::kernel("kl_divergence_join"))
      .constant(2, t.norm != nullptr)
      .constant(4, args.top != 0)
      .input(0, t.sums)
      .input(1, t.weight)
      .input(2, t.top)
      .output(3, t.loss)
      .output(4, t.norm)
      .bytes(5, args)
      .bytes(6, parts)
      .in_parts()
      .groups(ceil_div(args.rows, kThreads / metal::kSimd))
      .threads(kThreads)
      .run();
  if (t.dq != nullptr) run_gradient<Q>(call, t, t.norm, nullptr);
}

template <class Q>
void kl_divergence_fwd(const KernelCall& call) {
  Tensors t = tensors_of(call);
  t.loss = call.out[0];
  t.norm = call.out[1] == nullptr && call.out[2] != nullptr ? t.spare_norm : call.out[1];
  t.dq = call.out[2];
  run_rows<Q>(call, t);
}

template <class Q>
void kl_divergence_bwd(const KernelCall& call) {
  Tensors t = tensors_of(call);
  t.dq = call.out[0];
  run_gradient<Q>(call, t, call.in[4], call.in[5]);
}

// ---- a stored teacher ----

// gathered null: the student is as it was. dloss null: 1.
template <class Q>
void run_top_gradient(const KernelCall& call, const Tensors& t, const void* places,
                      const void* dloss, const float* gathered) {
  const auto& args = call.as<KlDivergenceArgs>();
  Launch(call, metal::kernel<Q>(kTopGradient[args.teacher]))
      .constant(3, dloss != nullptr)
      .constant(5, gathered != nullptr)
      .input(0, t.q)
      .input(1, call.in[1])
      .input(2, t.weight)
      .input(3, places)
      .input(4, t.scale)
      .input(5, t.norm)
      .input(6, dloss)
      .input(7, gathered)
      .output(8, t.dq)
      .bytes(9, args)
      .traffic(static_cast<double>(args.rows * args.top * 16))
      .in_parts()
      .groups(args.rows)
      .threads(kTopThreads)
      .run();
}

template <class Q>
void kl_divergence_top_fwd(const KernelCall& call) {
  const auto& args = call.as<KlDivergenceArgs>();
  Tensors t = tensors_of(call);
  t.loss = call.out[0];
  t.norm = call.out[1] == nullptr && call.out[2] != nullptr ? t.spare_norm : call.out[1];
  t.dq = call.out[2];
  Launch(call, metal::kernel<Q>(kTopSums[args.teacher]))
      .input(0, t.q)
      .input(1, call.in[1])
      .input(2, t.weight)
      .input(3, call.in[4])
      .output(4, t.top)
      .output(5, t.gathered)
      .bytes(6, args)
      .traffic(static_cast<double>(args.rows * args.top * 16))
      .in_parts()
      .groups(args.rows)
      .threads(kTopThreads)
      .run();
  run_rows<Q>(call, t);
  if (t.dq != nullptr) run_top_gradient<Q>(call, t, call.in[4], nullptr, t.gathered);
}

template <class Q>
void kl_divergence_top_bwd(const KernelCall& call) {
  Tensors t = tensors_of(call);
  t.dq = call.out[0];
  t.norm = const_cast<void*>(static_cast<const void*>(call.in[4]));
  run_gradient<Q>(call, t, t.norm, call.in[5]);
  run_top_gradient<Q>(call, t, call.in[6], call.in[5], nullptr);
}

template <class Q>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<Q>);
  const auto add = [&](const std::string& name, const auto& run, auto workspace) {
    registry.add(Backend::kMetal, name + "_" + type, run, workspace);
  };
  add("kl_divergence_fwd", kl_divergence_fwd<Q>, forward_workspace);
  add("kl_divergence_top_fwd", kl_divergence_top_fwd<Q>, forward_workspace);
  registry.add(Backend::kMetal, "kl_divergence_bwd_" + type, kl_divergence_bwd<Q>);
  registry.add(Backend::kMetal, "kl_divergence_top_bwd_" + type, kl_divergence_top_bwd<Q>);
}

}  // namespace

void register_kl_divergence_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
