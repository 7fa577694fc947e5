// Metal kernels of quantize (formula: mlxtape/ops/quantize.h).
//
// A thread has the 16 bytes of weights that it moves at once, 4 or 8 of a group, whose threads are 4 to 32 neighbouring lanes;
// their codes lie within 64 bits. Codes are written by way of threadgroup memory, a word each, because a thread's own need not
// fill words: 2 KB. 256 threads a group, about 30 registers. Bound by memory; nothing of the arithmetic is left to chance,
// because codes must have the rule's bits: quotients are divisions, and s·q + b is two operations.
#include "quantize_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/rows.h"

using namespace mlxtape::ops;

constant int bits [[function_constant(0)]];
constant bool packs
    [[function_constant(1)]];  // weights or their gradient begin at a multiple of 16 bytes
constant int params_type [[function_constant(2)]];  // of scales and biases: 0 f32, 1 f16, 2 bf16

// A thread's pack, and its place among those of its group.
struct QuantizePlace {
  long pack, group;
  uint lanes;  // packs of a group
  bool exists, first;
};
template <typename T>
inline QuantizePlace place_of(constant QuantizeArgs& args, long pack) {
  QuantizePlace at;
  at.pack = pack;
  at.group = pack * Pack<T>::kCount >> args.group_shift;
  at.lanes = (1u << args.group_shift) / Pack<T>::kCount;
  at.exists = at.group < args.groups;
  at.first = (uint(pack) & (at.lanes - 1)) == 0;
  return at;
}

template <typename T>
inline void load_weights(device const T* w, QuantizePlace at, thread float* v) {
  device const T* p = w + at.pack * Pack<T>::kCount;
  if (packs) {
    Pack<T>::unpack(load_pack(p), v);
  } else {
    for (int k = 0; k < Pack<T>::kCount; ++k) v[k] = widen(p[k]);
  }
}

// The codes that go with the weights of a pack, the first in the lowest bits.
template <typename T>
inline ulong codes_of(device const uint* codes, long pack) {
  const int all = Pack<T>::kCount * bits;
  const long bit = pack * all;
  const int shift = int(bit % 32);
  ulong words = codes[bit / 32];
  if (shift + all > 32) words |= ulong(codes[bit / 32 + 1]) << 32;
  return words >> shift;
}
inline float code(ulong codes, int k) {
  return float(uint(codes >> (k * bits)) & ((1u << bits) - 1));
}

// Scales and biases of any type.
inline float get(device const uchar* p, long i) {
  if (params_type == 1) return widen(((device const half*)p)[i]);
  if (params_type == 2) return widen(((device const bf16*)p)[i]);
  return ((device const float*)p)[i];
}
inline void put(device uchar* p, long i, float v) {
  if (params_type == 1) {
    ((device half*)p)[i] = narrow<half>(v);
  } else if (params_type == 2) {
    ((device bf16*)p)[i] = narrow<bf16>(v);
  } else {
    ((device float*)p)[i] = v;
  }
}

// d/s rounded and within [0, last]; NaN gives 0.
inline uint quotient(float d, float s, float last, bool gpu_rule) {
  float t = d / s;
  t = t > 0 ? min(t, last) : 0.0f;
  const float whole = rint(t);
  return uint(whole) + (gpu_rule && t - whole == 0.5f ? 1u : 0u);
}

#define QUANTIZE_PLACE                                                                    \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]], \
      uint index [[thread_position_in_threadgroup]]

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantize_codes(
    device const T* w [[buffer(0)]], device uint* codes [[buffer(1)]],
    device T* scales [[buffer(2)]], device T* biases [[buffer(3)]],
    constant QuantizeArgs& args [[buffer(4)]], QUANTIZE_PLACE) {
  threadgroup ulong room[256];
  const int all = Pack<T>::kCount * bits;  // bits of a thread
  const float last = float((1 << bits) - 1);
  const long here = long(group) + first_group;
  const QuantizePlace at = place_of<T>(args, here * 256 + index);
  const bool gpu_rule = args.gpu_rule != 0;
  float v[Pack<T>::kCount];
  for (int k = 0; k < Pack<T>::kCount; ++k) v[k] = 0;
  if (at.exists) load_weights(w, at, v);
  float hi = v[0], lo = v[0], poison = 0;
  for (int k = 0; k < Pack<T>::kCount; ++k) {
    hi = max(hi, v[k]);
    lo = min(lo, v[k]);
    poison = fma(v[k], 0.0f, poison);
  }
  hi = lanes_max(hi, at.lanes);
  lo = -lanes_max(-lo, at.lanes);
  poison = lanes_sum(poison, at.lanes);
  const GroupFit fit = fit_group(hi, lo, poison, last, gpu_rule);
  if (at.exists && at.first) {
    scales[at.group] = narrow<T>(fit.s);
    biases[at.group] = narrow<T>(fit.b);
  }
  ulong own = 0;
  for (int k = 0; k < Pack<T>::kCount; ++k) {
    own |= ulong(quotient(v[k] - fit.b, fit.s, last, gpu_rule)) << (k * bits);
  }
  room[index] = own;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int words = 256 * all / 32;
  const long begin = here * words, end = (args.groups << args.group_shift) / 32 * bits;
  for (int j = int(index); j < words && begin + j < end; j += 256) {
    int from = 32 * j / all, have = all - 32 * j % all;
    ulong word = room[from] >> (all - have);
    for (; have < 32; have += all) word |= room[++from] << have;
    codes[begin + j] = uint(word);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantize_back(
    device const uint* codes [[buffer(0)]], device const uchar* scales [[buffer(1)]],
    device const uchar* biases [[buffer(2)]], device T* w [[buffer(3)]],
    constant QuantizeArgs& args [[buffer(4)]], QUANTIZE_PLACE) {
  const QuantizePlace at = place_of<T>(args, (long(group) + first_group) * 256 + index);
  if (!at.exists) return;
  const float s = get(scales, at.group), b = get(biases, at.group);
  const ulong q = codes_of<T>(codes, at.pack);
  float v[Pack<T>::kCount];
  for (int k = 0; k < Pack<T>::kCount; ++k) {
    const float product = s * code(q, k);
    v[k] = product + b;
  }
  device T* to = w + at.pack * Pack<T>::kCount;
  if (packs) {
    store_pack(Pack<T>::pack(v), to);
  } else {
    for (int k = 0; k < Pack<T>::kCount; ++k) to[k] = narrow<T>(v[k]);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantize_params(
    device const uint* codes [[buffer(0)]], device const T* dw [[buffer(1)]],
    device uchar* d_scales [[buffer(2)]], device uchar* d_biases [[buffer(3)]],
    constant QuantizeArgs& args [[buffer(4)]], QUANTIZE_PLACE) {
  const QuantizePlace at = place_of<T>(args, (long(group) + first_group) * 256 + index);
  float ds = 0, db = 0;
  if (at.exists) {
    float v[Pack<T>::kCount];
    load_weights(dw, at, v);
    const ulong q = codes_of<T>(codes, at.pack);
    for (int k = 0; k < Pack<T>::kCount; ++k) {
      ds = fma(v[k], code(q, k), ds);
      db += v[k];
    }
  }
  ds = lanes_sum(ds, at.lanes);
  db = lanes_sum(db, at.lanes);
  if (at.exists && at.first) {
    put(d_scales, at.group, ds);
    put(d_biases, at.group, db);
  }
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
#define MAKE_TYPE(type, T)                        \
  MAKE("quantize_codes_" type, quantize_codes<T>) \
  MAKE("quantize_back_" type, quantize_back<T>)   \
  MAKE("quantize_params_" type, quantize_params<T>)
MAKE_TYPE("f32", float)
MAKE_TYPE("f16", half)
MAKE_TYPE("bf16", bf16)

#else

#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kThreads = 256;

std::int32_t code_of(std::int32_t dtype) {
  const auto type = static_cast<DType>(dtype);
  return type == DType::kF16 ? 1 : type == DType::kBF16 ? 2 : 0;
}

// dense: the tensor of weights.
template <class T>
void run(const KernelCall& call, const char* name, const void* dense) {
  const auto& args = call.as<QuantizeArgs>();
  constexpr std::int64_t kPack = 16 / sizeof(T);
  metal::Launch(call, metal::kernel<T>(name))
      .constant(0, args.bits)
      .constant(1, metal::is_aligned(dense))
      .constant(2, code_of(args.scales))
      .buffers()
      .in_parts()
      .groups(ceil_div((args.groups << args.group_shift) / kPack, kThreads))
      .threads(kThreads)
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "quantize_fwd_" + type,
               [](const KernelCall& call) { run<T>(call, "quantize_codes", call.in[0]); });
  registry.add(Backend::kMetal, "dequantize_fwd_" + type,
               [](const KernelCall& call) { run<T>(call, "quantize_back", call.out[0]); });
  registry.add(Backend::kMetal, "dequantize_bwd_" + type,
               [](const KernelCall& call) { run<T>(call, "quantize_params", call.in[1]); });
}

}  // namespace

void register_quantize_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
