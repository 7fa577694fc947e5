// CPU kernels of dropout (formula: mlxtape/ops/dropout.h). A pair of counters makes the words of two elements, half
// the tensor apart. Bound by memory for f32, for 16-bit types as much by the rounds of Threefry.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/dropout/dropout.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "backends/cpu/device/threefry-inl.h"
#include "dropout_args.h"
#include "mlxtape/core/registry.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

template <class T>
struct Drop {
  const T* x;
  T* y;
  std::uint32_t last;
  float scale;

  HWY_INLINE VF value(DF d, VU word, VF v) const {
    const auto kept = hn::RebindMask(d, at_most(word, last));
    return hn::IfThenElseZero(kept, hn::Mul(v, hn::Set(d, scale)));
  }
  template <bool kStream>
  HWY_INLINE void whole(std::int64_t at, VU a, VU b) const {
    const DF d;
    const T* from = x + at;
    store2<kStream>(d, value(d, a, load(d, from)), value(d, b, load(d, from + hn::Lanes(d))),
                    y + at);
  }
  HWY_INLINE void part(std::int64_t at, VU words, std::size_t count) const {
    const DF d;
    store_n(d, value(d, words, load_n(d, x + at, count)), y + at, count);
  }
};

template <class T>
void dropout_fwd(const KernelCall& call) {
  const auto& args = call.as<DropoutArgs>();
  const auto* key = call.input<std::uint32_t>(1);
  if (auto* copy = call.output<std::uint32_t>(1); copy != nullptr) std::copy(key, key + 2, copy);
  const Drop<T> drop{call.input<T>(0), call.output<T>(0), args.last, args.scale};
  words_stream(drop.y, args.count, cpu::kStreamBytes) ? for_words<true>(key, args.count, drop)
                                                      : for_words<false>(key, args.count, drop);
}

}  // namespace

void register_dropout(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "dropout_fwd_f32", dropout_fwd<float>);
  registry.add(Backend::kCpu, "dropout_fwd_f16", dropout_fwd<F16>);
  registry.add(Backend::kCpu, "dropout_fwd_bf16", dropout_fwd<BF16>);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(dropout)
