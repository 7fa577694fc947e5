// Metal kernels of cross_entropy (formula and layout: mlxtape/ops/cross_entropy.h).
//
// Rows of whole 16-byte packs that a group's registers hold are read once: sums, loss and gradient by one kernel. The thread
// that has the target's logit writes the loss. Longer rows, of about 32,768 columns in 16 bits, and ragged ones take three
// kernels: parts of 16,384 columns are summed by a group each, a simdgroup joins a row's parts and writes its loss, and the
// gradient is made element by element, as it is from saved sums. A row that does not count is not read. In place a thread
// writes what it alone has read; what others may have overwritten, the target's logit, is read before. Bound by memory.
// Threads of a group: 32 to 1024. Threadgroup memory: 384 bytes. About 24 registers a thread, 40 with four packs.
#include "cross_entropy_args.h"

struct CrossEntropyParts {
  int64_t parts;  // of a row
  int64_t each;   // columns of a part; packs of the gradient's
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/kept_rows.h"

constant bool packs [[function_constant(0)]];           // rows are whole packs
constant bool wants_gradient [[function_constant(1)]];  // of the forward
constant bool wants_norm [[function_constant(2)]];
constant bool has_dloss [[function_constant(3)]];  // else it is 1

#define CROSS_ENTROPY_PLACE                                                                    \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],      \
      uint index [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]], \
      uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],   \
      uint simds [[simdgroups_per_threadgroup]]

// A row's sums; z_sum counts with smoothing alone.
struct RowSums {
  Total total;
  float z_sum;
};

// By one thread of a row.
inline void write_loss(constant CrossEntropyArgs& args, long row, float w, RowSums sums,
                       float z_target, device float* loss, device float* norm) {
  float away = (sums.total.top - z_target) * (1 - args.smoothing);
  if (args.smoothing != 0) {
    away += (sums.total.top - sums.z_sum / float(args.cols)) * args.smoothing;
  }
  loss[row] = w == 0 ? 0.0f : w * (precise::log(sums.total.sum) + away);
  if (wants_norm) {
    norm[2 * row] = sums.total.top;
    norm[2 * row + 1] = sums.total.sum;
  }
}

// dz[v] = exp(z[v] − top)·share − rest, at the target less hit.
struct Gradient {
  float top, share, rest, hit;
};
inline Gradient gradient_of(constant CrossEntropyArgs& args, float c, float top, float sum) {
  Gradient g;
  g.top = top;
  g.share = c / sum;
  g.rest = c * (args.smoothing / float(args.cols));
  g.hit = c * (1 - args.smoothing);
  return g;
}
template <typename T>
inline float slope(Gradient g, float z, bool is_target) {
  const float v = fma(exp_for<T>(z - g.top), g.share, -g.rest);
  return is_target ? v - g.hit : v;
}

// ---- rows that are kept in registers: a group each ----

template <typename T, int kPacks>
[[kernel, max_total_threads_per_threadgroup(1024)]] void cross_entropy_fwd_kept(
    device const T* z [[buffer(0)]], device const float* weight [[buffer(1)]],
    device const long* target_of [[buffer(2)]], device const float* scale [[buffer(3)]],
    device float* loss [[buffer(4)]], device float* norm [[buffer(5)]], device T* dz [[buffer(6)]],
    constant CrossEntropyArgs& args [[buffer(7)]], CROSS_ENTROPY_PLACE) {
  threadgroup float room[64];
  threadgroup float z_room[32];
  const Place place = {index, lane, simd, simds};
  const long row = long(group) + first_group;
  const long start = row * args.cols;
  const float w = weight[row];
  const long target = target_of[row];
  KeptRow<T, kPacks> kept;
  // Sums of a row that does not count are those of nothing.
  kept.place(index, threads, w == 0 ? 0 : uint(args.cols) / Pack<T>::kCount);
  kept.load(z + start);
  RowSums sums;
  sums.total.top = simd_max(kept_largest<T, kPacks>(kept));
  sums.total.sum = kept_exp_sum<T, kPacks>(kept, finite_reference(sums.total.top));
  sums.total = group_total<T>(sums.total, room, place);
  sums.z_sum = 0;
  if (args.smoothing != 0) {
    sums.z_sum = group_sum(kept_sum<T, kPacks>(kept), z_room, place);
  }
  const Gradient g =
      gradient_of(args, w == 0 ? 0.0f : w * scale[0], sums.total.top, sums.total.sum);
  float v[Pack<T>::kCount];
  bool has_target = false;
  float z_target = 0;
  for (int j = 0; j < kPacks; ++j) {
    if (!kept.has(j)) continue;
    const long to_target = target - kept.at(j);
    Pack<T>::unpack(kept.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) {
      if (i == to_target) {
        has_target = true;
        z_target = v[i];
      }
      if (wants_gradient) v[i] = slope<T>(g, v[i], i == to_target);
    }
    if (wants_gradient) store_pack(Pack<T>::pack(v), dz + start + kept.at(j));
  }
  // Nobody has a target that is outside, nor that of a row which does not count: there the first thread writes.
  if (has_target || (index == 0 && (target < 0 || w == 0))) {
    write_loss(args, row, w, sums, z_target, loss, norm);
  }
  if (wants_gradient && w == 0) {
    for (uint p = index; p < uint(args.cols) / Pack<T>::kCount; p += threads) {
      store_pack(uint4(0), dz + start + p * Pack<T>::kCount);
    }
  }
}

// ---- any row: sums of its parts, then of the row ----

// sums: [R, parts], the largest number, the sum of exponentials, and the sum, of each.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(512)]] void cross_entropy_fwd_part(
    device const T* z [[buffer(0)]], device const float* weight [[buffer(1)]],
    device float* sums [[buffer(2)]], constant CrossEntropyArgs& args [[buffer(3)]],
    constant CrossEntropyParts& parts [[buffer(4)]], CROSS_ENTROPY_PLACE) {
  threadgroup float room[64];
  threadgroup float z_room[32];
  const Place place = {index, lane, simd, simds};
  const long whole = long(group) + first_group;
  const long row = whole / parts.parts;
  const long first = whole % parts.parts * parts.each;
  const uint count = weight[row] == 0 ? 0 : uint(min(parts.each, args.cols - first));
  device const T* x = z + row * args.cols + first;
  Total total;
  total.top = -INFINITY;
  total.sum = 0;
  float z_sum = 0;
  if (packs) {
    float v[Pack<T>::kCount];
    for (uint c = index * Pack<T>::kCount; c < count; c += threads * Pack<T>::kCount) {
      Pack<T>::unpack(load_pack(x + c), v);
      for (int i = 0; i < Pack<T>::kCount; ++i) {
        add_exp<T>(total, v[i]);
        z_sum += v[i];
      }
    }
  } else {
    for (uint c = index; c < count; c += threads) {
      const float v = widen(x[c]);
      add_exp<T>(total, v);
      z_sum += v;
    }
  }
  total = group_total<T>(total, room, place);
  z_sum = group_sum(z_sum, z_room, place);
  if (index == 0) {
    sums[3 * whole] = total.top;
    sums[3 * whole + 1] = total.sum;
    sums[3 * whole + 2] = z_sum;
  }
}

// A simdgroup a row.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void cross_entropy_fwd_join(
    device const T* z [[buffer(0)]], device const float* weight [[buffer(1)]],
    device const long* target_of [[buffer(2)]], device const float* sums [[buffer(3)]],
    device float* loss [[buffer(4)]], device float* norm [[buffer(5)]],
    constant CrossEntropyArgs& args [[buffer(6)]], constant CrossEntropyParts& parts [[buffer(7)]],
    CROSS_ENTROPY_PLACE) {
  const long row = (long(group) + first_group) * simds + simd;
  const bool in = row < args.rows;
  RowSums all;
  all.total.top = -INFINITY;
  all.total.sum = 0;
  all.z_sum = 0;
  for (long p = lane; in && p < parts.parts; p += 32) {
    const long at = 3 * (row * parts.parts + p);
    const float top = max(all.total.top, sums[at]);
    all.total.sum =
        moved_sum<T>(all.total.sum, all.total.top, top) + moved_sum<T>(sums[at + 1], sums[at], top);
    all.total.top = top;
    all.z_sum += sums[at + 2];
  }
  all.total = simd_total<T>(all.total);
  all.z_sum = simd_sum(all.z_sum);
  if (lane != 0 || !in) return;
  const float w = weight[row];
  const long target = target_of[row];
  const float z_target = target < 0 || w == 0 ? 0.0f : widen(z[row * args.cols + target]);
  write_loss(args, row, w, all, z_target, loss, norm);
}

// ---- the gradient from saved sums ----

constant constexpr uint kEach = 4;  // packs or elements of a thread

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void cross_entropy_bwd(
    device const T* z [[buffer(0)]], device const float* weight [[buffer(1)]],
    device const long* target_of [[buffer(2)]], device const float* scale [[buffer(3)]],
    device const float* norm [[buffer(4)]], device const float* dloss [[buffer(5)]],
    device T* dz [[buffer(6)]], constant CrossEntropyArgs& args [[buffer(7)]],
    constant CrossEntropyParts& parts [[buffer(8)]], CROSS_ENTROPY_PLACE) {
  const long whole = long(group) + first_group;
  const long row = whole / parts.parts;
  const uint width = packs ? uint(Pack<T>::kCount) : 1u;
  const uint first = (uint(whole % parts.parts) * (threads * kEach) + index) * width;
  const float w = weight[row];
  const long target = target_of[row];
  float c = w * scale[0];
  if (has_dloss) c *= dloss[row * args.dloss_step];
  const Gradient g = gradient_of(args, c, norm[2 * row], norm[2 * row + 1]);
  device const T* from = z + row * args.cols;
  device T* to = dz + row * args.cols;
  for (uint k = 0; k < kEach; ++k) {
    const uint at = first + k * threads * width;
    if (at >= uint(args.cols)) break;
    if (packs) {
      float v[Pack<T>::kCount] = {};
      if (w != 0) {
        Pack<T>::unpack(load_pack(from + at), v);
        for (int i = 0; i < Pack<T>::kCount; ++i) v[i] = slope<T>(g, v[i], at + i == target);
      }
      store_pack(Pack<T>::pack(v), to + at);
    } else {
      to[at] = narrow<T>(w == 0 ? 0.0f : slope<T>(g, widen(from[at]), at == target));
    }
  }
}

// ---- names ----

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_ALL(type, T)                                             \
  MAKE("cross_entropy_fwd_kept1_" type, cross_entropy_fwd_kept<T, 1>) \
  MAKE("cross_entropy_fwd_kept2_" type, cross_entropy_fwd_kept<T, 2>) \
  MAKE("cross_entropy_fwd_kept4_" type, cross_entropy_fwd_kept<T, 4>) \
  MAKE("cross_entropy_fwd_part_" type, cross_entropy_fwd_part<T>)     \
  MAKE("cross_entropy_fwd_join_" type, cross_entropy_fwd_join<T>)     \
  MAKE("cross_entropy_bwd_" type, cross_entropy_bwd<T>)
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
constexpr std::int64_t kEach = 4;            // packs or elements of a thread of the gradient
constexpr std::int64_t kMostByGroup = 4096;  // packs of a row that a group keeps: four a thread
constexpr std::int64_t kPartColumns = 16384;

template <class T>
constexpr std::int64_t kPack = 16 / sizeof(T);

CrossEntropyParts parts_of(const CrossEntropyArgs& args) {
  // Packs must not lie across two parts.
  const std::int64_t wanted = ceil_div(args.cols, kPartColumns);
  const std::int64_t each = ceil_div(ceil_div(args.cols, wanted), 64) * 64;
  return {ceil_div(args.cols, each), each};
}

bool is_whole(const CrossEntropyArgs& args, std::int64_t pack, const void* z, const void* dz) {
  return args.cols % pack == 0 && metal::is_aligned(z) && metal::is_aligned(dz);
}

// The parts' sums, and norm where the caller has no room for it: which way it will be, the addresses say.
std::size_t forward_workspace(const void* p) {
  const auto& args = *static_cast<const CrossEntropyArgs*>(p);
  return static_cast<std::size_t>(args.rows * (3 * parts_of(args).parts + 2)) * sizeof(float);
}

// dloss null: 1.
template <class T>
void run_gradient(const KernelCall& call, const void* norm, const void* dloss, void* dz) {
  const auto& args = call.as<CrossEntropyArgs>();
  const bool whole = is_whole(args, kPack<T>, call.in[0], dz);
  const std::int64_t each = kThreads * kEach * (whole ? kPack<T> : 1);
  const CrossEntropyParts parts{ceil_div(args.cols, each), each};
  Launch(call, metal::kernel<T>("cross_entropy_bwd"))
      .constant(0, whole)
      .constant(3, dloss != nullptr)
      .input(0, call.in[0])
      .input(1, call.in[1])
      .input(2, call.in[2])
      .input(3, call.in[3])
      .input(4, norm)
      .input(5, dloss)
      .output(6, dz)
      .bytes(7, args)
      .bytes(8, parts)
      .in_parts()
      .groups(args.rows * parts.parts)
      .threads(kThreads)
      .run();
}

template <class T>
void cross_entropy_fwd(const KernelCall& call) {
  const auto& args = call.as<CrossEntropyArgs>();
  const void* z = call.in[0];       // [R, V]
  const void* weight = call.in[1];  // [R]
  const void* target = call.in[2];  // [R]
  void* loss = call.out[0];         // [R]
  void* norm = call.out[1];         // [R, 2] or null
  void* dz = call.out[2];           // [R, V], null without a gradient
  const bool whole = is_whole(args, kPack<T>, z, dz);
  const std::int64_t row_packs = args.cols / kPack<T>;
  if (whole && row_packs <= kMostByGroup) {
    const std::int64_t each = row_packs <= 512 ? 1 : row_packs <= 1024 ? 2 : 4;
    return Launch(call, metal::kernel<T>(each == 1   ? "cross_entropy_fwd_kept1"
                                         : each == 2 ? "cross_entropy_fwd_kept2"
                                                     : "cross_entropy_fwd_kept4"))
        .constant(1, dz != nullptr)
        .constant(2, norm != nullptr)
        .input(0, z)
        .input(1, weight)
        .input(2, target)
        .input(3, call.in[3])
        .output(4, loss)
        .output(5, norm)
        .output(6, dz)
        .bytes(7, args)
        .in_parts()
        .groups(args.rows)
        .threads(metal::row_threads(row_packs, each))
        .run();
  }
  const CrossEntropyParts parts = parts_of(args);
  auto* sums = static_cast<float*>(call.workspace);
  if (norm == nullptr && dz != nullptr) norm = sums + args.rows * parts.parts * 3;
  Launch(call, metal::kernel<T>("cross_entropy_fwd_part"))
      .constant(0, whole)
      .input(0, z)
      .input(1, weight)
      .output(2, sums)
      .bytes(3, args)
      .bytes(4, parts)
      .in_parts()
      .groups(args.rows * parts.parts)
      .threads(metal::row_threads(parts.each, 32, 512))
      .run();
  Launch(call, metal::kernel<T>("cross_entropy_fwd_join"))
      .constant(2, norm != nullptr)
      .input(0, z)
      .input(1, weight)
      .input(2, target)
      .input(3, sums)
      .output(4, loss)
      .output(5, norm)
      .bytes(6, args)
      .bytes(7, parts)
      .traffic(static_cast<double>(args.rows * (parts.parts + 4) * 12))
      .in_parts()
      .groups(ceil_div(args.rows, kThreads / metal::kSimd))
      .threads(kThreads)
      .run();
  if (dz != nullptr) run_gradient<T>(call, norm, nullptr, dz);
}

template <class T>
void cross_entropy_bwd(const KernelCall& call) {
  run_gradient<T>(call, call.in[4], call.in[5], call.out[0]);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "cross_entropy_fwd_" + type, cross_entropy_fwd<T>,
               forward_workspace);
  registry.add(Backend::kMetal, "cross_entropy_bwd_" + type, cross_entropy_bwd<T>);
}

}  // namespace

void register_cross_entropy_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
