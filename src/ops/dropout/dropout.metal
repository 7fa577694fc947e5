// Metal kernels of dropout (formula: mlxtape/ops/dropout.h). A thread has two packs of 16 bytes, half the tensor apart,
// whose words come from the same counters, or one element of each half where addresses and sizes are not whole packs. 256
// threads a group, no threadgroup memory, some 40 registers a thread. Bound by memory for f32, for 16-bit types by the
// rounds of Threefry.
#include "dropout_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/threefry.h"
#include "backends/metal/device/vectors.h"

constant bool packs [[function_constant(0)]];
constant bool copies_key [[function_constant(1)]];

// What is dropped is 0, even NaN.
inline float kept_value(uint word, float v, constant DropoutArgs& args) {
  return word <= args.last ? v * args.scale : 0.0f;
}

template <typename T>
inline void drop_pack(thread const uint* words, device const T* x, device T* y, long at,
                      constant DropoutArgs& args) {
  float v[Pack<T>::kCount];
  Pack<T>::unpack(load_pack(x + at), v);
  for (int k = 0; k < Pack<T>::kCount; ++k) v[k] = kept_value(words[k], v[k], args);
  store_pack(Pack<T>::pack(v), y + at);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void dropout_fwd(
    device const T* x [[buffer(0)]], device const uint* key [[buffer(1)]],
    device T* y [[buffer(2)]], device uint* key_copy [[buffer(3)]],
    constant DropoutArgs& args [[buffer(4)]], constant uint& first_group [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]]) {
  enum { kEach = Pack<T>::kCount };
  const long item = (long(group) + first_group) * 256 + index;
  if (copies_key && item == 0) {
    key_copy[0] = key[0];
    key_copy[1] = key[1];
  }
  const Words<kEach> w = words_of<kEach>(threefry_of(key), args.count, item, packs);
  if (packs) {
    if (!w.has_first) return;
    drop_pack(w.a, x, y, w.first, args);
    drop_pack(w.b, x, y, w.second, args);
  } else {
    if (w.has_first) y[w.first] = narrow<T>(kept_value(w.a[0], widen(x[w.first]), args));
    if (w.has_second) y[w.second] = narrow<T>(kept_value(w.b[0], widen(x[w.second]), args));
  }
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
MAKE("dropout_fwd_f32", dropout_fwd<float>)
MAKE("dropout_fwd_f16", dropout_fwd<half>)
MAKE("dropout_fwd_bf16", dropout_fwd<bf16>)

#else

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kThreads = 256;
constexpr double kOperations = 40;  // of a word: integers, but they take as long

template <class T>
void dropout_fwd(const KernelCall& call) {
  constexpr std::int64_t kEach = 16 / sizeof(T);
  const auto& args = call.as<DropoutArgs>();
  const bool packs = metal::is_aligned(call.in[0]) && metal::is_aligned(call.out[0]) &&
                     args.count % (2 * kEach) == 0;
  void* copy = call.output<std::uint32_t>(1);
  metal::Launch(call, metal::kernel<T>("dropout_fwd"))
      .constant(0, packs)
      .constant(1, copy != nullptr)
      .input(0, call.in[0])
      .input(1, call.in[1])
      .output(2, call.out[0])
      .output(3, copy)
      .bytes(4, args)
      .in_parts()
      .operations(kOperations * static_cast<double>(args.count))
      .groups(ceil_div(ceil_div(args.count, 2), (packs ? kEach : 1) * kThreads))
      .threads(kThreads)
      .run();
}

}  // namespace

void register_dropout_metal(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "dropout_fwd_f32", dropout_fwd<float>);
  registry.add(Backend::kMetal, "dropout_fwd_f16", dropout_fwd<F16>);
  registry.add(Backend::kMetal, "dropout_fwd_bf16", dropout_fwd<BF16>);
}

}  // namespace mlxtape::ops

#endif
