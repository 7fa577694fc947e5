// Metal kernels of random (formula: mlxtape/ops/random.h). A thread has two packs of 16 bytes of results, half the tensor
// apart, or one result of each half where addresses and sizes are not whole packs. 256 threads a group, no threadgroup
// memory, some 40 registers a thread. Bound by the rounds of Threefry (backends/metal/device/threefry.h).
#include "random_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/threefry.h"
#include "backends/metal/device/vectors.h"

constant bool packs [[function_constant(0)]];
constant bool is_normal [[function_constant(1)]];  // else uniform

#define RANDOM_PLACE                                                                      \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]], \
      uint index [[thread_position_in_threadgroup]]

// ---- keys ----

[[kernel, max_total_threads_per_threadgroup(32)]] void random_key(
    device uint* key [[buffer(0)]], constant uint64_t& seed [[buffer(1)]],
    uint index [[thread_position_in_threadgroup]]) {
  if (index == 0) {
    key[0] = uint(seed >> 32);
    key[1] = uint(seed);
  }
}

// The four words of split_key(key, 2): counters (0, 2) and (1, 3).
[[kernel, max_total_threads_per_threadgroup(32)]] void random_advance(
    device uint* key [[buffer(0)]], device uint* next [[buffer(1)]],
    uint index [[thread_position_in_threadgroup]]) {
  if (index == 0) {
    const Threefry hash = threefry_of(key);
    uint a = 0, b = 2, c = 1, d = 3;
    threefry(hash, a, b);
    threefry(hash, c, d);
    key[0] = a;
    key[1] = c;
    next[0] = b;
    next[1] = d;
  }
}

// ---- bits ----

inline void store_bits(device uchar* out, long bytes, long at, uint word) {
  if (4 * at + 4 <= bytes) {
    ((device uint*)out)[at] = word;
    return;
  }
  for (long b = 4 * at; b < bytes; ++b, word >>= 8) out[b] = uchar(word);
}

[[kernel, max_total_threads_per_threadgroup(256)]] void random_bits(
    device const uint* key [[buffer(0)]], device uchar* out [[buffer(1)]],
    constant RandomArgs& args [[buffer(2)]], RANDOM_PLACE) {
  const long item = (long(group) + first_group) * 256 + index;
  const Words<4> w = words_of<4>(threefry_of(key), args.count, item, packs);
  if (packs) {
    if (!w.has_first) return;
    store_pack(uint4(w.a[0], w.a[1], w.a[2], w.a[3]), (device uint*)out + w.first);
    store_pack(uint4(w.b[0], w.b[1], w.b[2], w.b[3]), (device uint*)out + w.second);
  } else {
    if (w.has_first) store_bits(out, args.bytes, w.first, w.a[0]);
    if (w.has_second) store_bits(out, args.bytes, w.second, w.b[0]);
  }
}

// ---- truth values ----

inline uint4 truth_of(thread const uint* words, uint last) {
  uint4 bits = uint4(0);
  for (int k = 0; k < 16; ++k) bits[k / 4] |= (words[k] <= last ? 1u : 0u) << (8 * (k % 4));
  return bits;
}

[[kernel, max_total_threads_per_threadgroup(256)]] void random_bernoulli(
    device const uint* key [[buffer(0)]], device uchar* out [[buffer(1)]],
    constant RandomArgs& args [[buffer(2)]], RANDOM_PLACE) {
  const long item = (long(group) + first_group) * 256 + index;
  const Words<16> w = words_of<16>(threefry_of(key), args.count, item, packs);
  if (packs) {
    if (!w.has_first) return;
    store_pack(truth_of(w.a, args.last), out + w.first);
    store_pack(truth_of(w.b, args.last), out + w.second);
  } else {
    if (w.has_first) out[w.first] = w.a[0] <= args.last ? 1 : 0;
    if (w.has_second) out[w.second] = w.b[0] <= args.last ? 1 : 0;
  }
}

// ---- floats ----

// The largest T below 1: 24, 11 or 8 bits of it.
template <typename T>
inline float below_one();
template <>
inline float below_one<float>() {
  return 1.0f - 1.0f / 16777216;
}
template <>
inline float below_one<half>() {
  return 1.0f - 1.0f / 2048;
}
template <>
inline float below_one<bf16>() {
  return 1.0f - 1.0f / 256;
}

template <typename T>
inline float unit(uint word) {
  return min(float(word) * (1.0f / 4294967296.0f), below_one<T>());
}

// erf⁻¹ of |a| < 1, within 4 ulp: a·P(w), w = −log((1 − a)·(1 + a)), which does not cancel. P was fitted to the smallest
// relative error (6e-9) in w on [0, 5] and in √w on [√5, 4]; 1 − 2⁻²⁴ is at w = 15.9.
inline float inverse_erf(float a) {
  const float w = -precise::log((1.0f - a) * (1.0f + a));
  float p;
  if (w > 5.0f) {  // one in 300
    const float r = precise::sqrt(w) - 3.0f;
    p = fma(r, 0.000128964224f, -0.000318723527f);
    p = fma(r, p, -7.6619559e-05f);
    p = fma(r, p, 0.00149585702f);
    p = fma(r, p, -0.0035869875f);
    p = fma(r, p, 0.00568317203f);
    p = fma(r, p, -0.00763940997f);
    p = fma(r, p, 0.00944568403f);
    p = fma(r, p, 1.00167513f);
    p = fma(r, p, 2.83297682f);
  } else {
    const float r = w - 2.5f;
    p = fma(r, -8.79105677e-09f, 2.32326443e-08f);
    p = fma(r, p, 4.66170661e-07f);
    p = fma(r, p, -3.46270485e-06f);
    p = fma(r, p, -4.96334769e-06f);
    p = fma(r, p, 0.000218344445f);
    p = fma(r, p, -0.0012527419f);
    p = fma(r, p, -0.00417738687f);
    p = fma(r, p, 0.24664028f);
    p = fma(r, p, 1.50140941f);
  }
  return a * p;
}

// uniform: each step is rounded, none fused, so that the bits are those of every other backend.
template <typename T>
inline float draw(uint word, float low, float span) {
  if (is_normal) {
    const float u = unit<float>(word);
    return fma(span, inverse_erf((u + u) - below_one<float>()), low);
  }
  const float u = widen(narrow<T>(unit<T>(word)));
  const float product = widen(narrow<T>(span * u));
  return product + low;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void random_floats(
    device const uint* key [[buffer(0)]], device T* out [[buffer(1)]],
    constant RandomArgs& args [[buffer(2)]], RANDOM_PLACE) {
  enum { kEach = Pack<T>::kCount };
  const long item = (long(group) + first_group) * 256 + index;
  const Words<kEach> w = words_of<kEach>(threefry_of(key), args.count, item, packs);
  if (packs) {
    if (!w.has_first) return;
    float v[kEach];
    for (int k = 0; k < kEach; ++k) v[k] = draw<T>(w.a[k], args.low, args.span);
    store_pack(Pack<T>::pack(v), out + w.first);
    for (int k = 0; k < kEach; ++k) v[k] = draw<T>(w.b[k], args.low, args.span);
    store_pack(Pack<T>::pack(v), out + w.second);
  } else {
    if (w.has_first) out[w.first] = narrow<T>(draw<T>(w.a[0], args.low, args.span));
    if (w.has_second) out[w.second] = narrow<T>(draw<T>(w.b[0], args.low, args.span));
  }
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
MAKE("random_floats_f32", random_floats<float>)
MAKE("random_floats_f16", random_floats<half>)
MAKE("random_floats_bf16", random_floats<bf16>)

#else

#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 256;
constexpr double kOperations = 40;  // of a word: integers, but they take as long

// each: results of a pack.
void run(const KernelCall& call, Launch& launch, std::int64_t each, bool may_pack) {
  const auto& args = call.as<RandomArgs>();
  const bool packs = may_pack && metal::is_aligned(call.out[0]) && args.count % (2 * each) == 0;
  launch.constant(0, packs)
      .input(0, call.in[0])
      .output(1, call.out[0])
      .bytes(2, args)
      .in_parts()
      .operations(kOperations * static_cast<double>(args.count))
      .groups(ceil_div(ceil_div(args.count, 2), (packs ? each : 1) * kThreads))
      .threads(kThreads)
      .run();
}

void random_key_fwd(const KernelCall& call) {
  Launch(call, metal::kernel("random_key"))
      .output(0, call.out[0])
      .bytes(1, call.as<RandomArgs>().seed)
      .groups(1)
      .threads(metal::kSimd)
      .run();
}
void random_advance_fwd(const KernelCall& call) {
  Launch(call, metal::kernel("random_advance"))
      .output(0, call.out[0])
      .output(1, call.out[1])
      .groups(1)
      .threads(metal::kSimd)
      .run();
}
void random_bits_fwd(const KernelCall& call) {
  const auto& args = call.as<RandomArgs>();
  Launch launch(call, metal::kernel("random_bits"));
  run(call, launch, 4, args.bytes == 4 * args.count);
}
void random_bernoulli_fwd(const KernelCall& call) {
  Launch launch(call, metal::kernel("random_bernoulli"));
  run(call, launch, 16, true);
}

template <class T, bool kIsNormal>
void draw_fwd(const KernelCall& call) {
  Launch launch(call, metal::kernel<T>("random_floats"));
  launch.constant(1, kIsNormal);
  run(call, launch, 16 / sizeof(T), true);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kMetal, "random_uniform_fwd_" + type, draw_fwd<T, false>);
  registry.add(Backend::kMetal, "random_normal_fwd_" + type, draw_fwd<T, true>);
}

}  // namespace

void register_random_metal(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "random_key_fwd_u32", random_key_fwd);
  registry.add(Backend::kMetal, "random_advance_fwd_u32", random_advance_fwd);
  registry.add(Backend::kMetal, "random_bits_fwd_u32", random_bits_fwd);
  registry.add(Backend::kMetal, "random_bernoulli_fwd_bool", random_bernoulli_fwd);
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
