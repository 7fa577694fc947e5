// CPU kernels of random (formula: mlxtape/ops/random.h). Bound by the rounds of Threefry, about one cycle a
// word with 16 lanes; normal by its logarithm and polynomials.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/random/random.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/math-inl.h"
#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "backends/cpu/device/threefry-inl.h"
#include "mlxtape/core/registry.h"
#include "random_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// ---- keys ----

void random_key_fwd(const KernelCall& call) {
  const auto& args = call.as<RandomArgs>();
  auto* key = call.output<std::uint32_t>(0);
  key[0] = static_cast<std::uint32_t>(args.seed >> 32U);
  key[1] = static_cast<std::uint32_t>(args.seed);
}

struct Bits {
  std::byte* out;
  std::int64_t bytes;

  HWY_INLINE void part(std::int64_t at, VU words, std::size_t count) const {
    HWY_ALIGN std::uint32_t all[hn::MaxLanes(DU())];
    hn::Store(words, DU(), all);
    const auto left = static_cast<std::size_t>(bytes - 4 * at);
    std::memcpy(out + 4 * at, all, std::min(4 * count, left));
  }
  template <bool kStream>
  HWY_INLINE void whole(std::int64_t at, VU a, VU b) const {
    const DU du;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(du));
    if (4 * (at + 2 * lanes) > bytes) {  // the last word is not whole
      part(at, a, static_cast<std::size_t>(lanes));
      part(at + lanes, b, static_cast<std::size_t>(lanes));
      return;
    }
    auto* to = reinterpret_cast<std::uint32_t*>(out + 4 * at);
    if constexpr (kStream) {
      hn::Stream(a, du, to);
      hn::Stream(b, du, to + lanes);
    } else {
      hn::StoreU(a, du, to);
      hn::StoreU(b, du, to + lanes);
    }
  }
};

void random_bits_fwd(const KernelCall& call) {
  const auto& args = call.as<RandomArgs>();
  const Bits bits{call.output<std::byte>(0), args.bytes};
  const auto* key = call.input<std::uint32_t>(0);
  const auto* to = call.output<std::uint32_t>(0);
  words_stream(to, args.count, cpu::kStreamBytes) ? for_words<true>(key, args.count, bits)
                                                  : for_words<false>(key, args.count, bits);
}

void random_advance_fwd(const KernelCall& call) {
  auto* key = call.output<std::uint32_t>(0);
  std::uint32_t both[4];
  for_words<false>(key, 4, Bits{reinterpret_cast<std::byte*>(both), sizeof(both)});
  std::copy(both, both + 2, key);
  std::copy(both + 2, both + 4, call.output<std::uint32_t>(1));
}

// ---- floats ----

template <class T>
HWY_INLINE VF rounded(DF d, VF v) {
  if constexpr (sizeof(T) == 4) {
    return v;
  } else {
    return widen(d, T(), narrow(d, T(), v));
  }
}

// The largest T below 1: 24, 11 or 8 bits of it.
template <class T>
constexpr float kBelowOne = 1 - (sizeof(T) == 4           ? 0x1p-24F
                                 : std::is_same_v<T, F16> ? 0x1p-11F
                                                          : 0x1p-8F);

template <class T>
HWY_INLINE VF unit(DF d, VU word) {
  const VF u = hn::Mul(hn::ConvertTo(d, word), hn::Set(d, 0x1p-32F));
  return hn::Min(u, hn::Set(d, kBelowOne<T>));
}

template <class T, bool kUnit>
struct Uniform {
  T* out;
  float low, span;

  HWY_INLINE VF value(DF d, VU word) const {
    const VF u = unit<T>(d, word);
    if constexpr (kUnit) return u;
    const VF product = rounded<T>(d, hn::Mul(hn::Set(d, span), rounded<T>(d, u)));
    return hn::Add(product, hn::Set(d, low));
  }
  template <bool kStream>
  HWY_INLINE void whole(std::int64_t at, VU a, VU b) const {
    const DF d;
    store2<kStream>(d, value(d, a), value(d, b), out + at);
  }
  HWY_INLINE void part(std::int64_t at, VU words, std::size_t count) const {
    const DF d;
    store_n(d, value(d, words), out + at, count);
  }
};

// erf⁻¹ of |a| < 1, within 4 ulp: a·P(w), w = −log(1 − a²) = −log((1 − a)·(1 + a)), which does not cancel.
// P was fitted to the smallest relative error (6e-9) in w on [0, 5] and in √w on [√5, 4]; 1 − 2⁻²⁴ is at
// w = 15.9.
HWY_INLINE VF erfinv_f32(DF d, VF a) {
  const VF one = hn::Set(d, 1.0F);
  const VF w = hn::Neg(log_f32(d, hn::Mul(hn::Sub(one, a), hn::Add(one, a))));
  const VF near = polynomial(d, hn::Sub(w, hn::Set(d, 2.5F)), -0x1.2e0ef4p-27F, 0x1.8f2240p-26F,
                             0x1.f48c04p-22F, -0x1.d0c1a2p-19F, -0x1.4d15aap-18F, 0x1.c9e6c8p-13F,
                             -0x1.486616p-10F, -0x1.11c4ecp-8F, 0x1.f91e8ap-3F, 0x1.805c5ep+0F);
  const auto is_far = hn::Gt(w, hn::Set(d, 5.0F));  // one in 300
  if (hn::AllFalse(d, is_far)) return hn::Mul(a, near);
  const VF far =
      polynomial(d, hn::Sub(hn::Sqrt(hn::Max(w, hn::Zero(d))), hn::Set(d, 3.0F)), 0x1.0e7524p-13F,
                 -0x1.4e34b2p-12F, -0x1.415da0p-14F, 0x1.882144p-10F, -0x1.d62754p-9F,
                 0x1.7473cep-8F, -0x1.f4a808p-8F, 0x1.358424p-7F, 0x1.006dc8p+0F, 0x1.6a9efcp+1F);
  return hn::Mul(a, hn::IfThenElse(is_far, far, near));
}

template <class T>
struct Gaussian {
  T* out;
  float mean, scale;

  HWY_INLINE VF value(DF d, VU word) const {
    // Uniform in (−1, 1): 2·u is exact.
    const VF u = unit<float>(d, word);
    const VF a = hn::Sub(hn::Add(u, u), hn::Set(d, 1 - 0x1p-24F));
    return hn::MulAdd(hn::Set(d, scale), erfinv_f32(d, a), hn::Set(d, mean));
  }
  template <bool kStream>
  HWY_INLINE void whole(std::int64_t at, VU a, VU b) const {
    const DF d;
    store2<kStream>(d, value(d, a), value(d, b), out + at);
  }
  HWY_INLINE void part(std::int64_t at, VU words, std::size_t count) const {
    const DF d;
    store_n(d, value(d, words), out + at, count);
  }
};

template <class T, class Fn>
void draw(const KernelCall& call, const Fn& fn) {
  const std::int64_t n = call.as<RandomArgs>().count;
  const auto* key = call.input<std::uint32_t>(0);
  words_stream(fn.out, n, cpu::kStreamBytes) ? for_words<true>(key, n, fn)
                                             : for_words<false>(key, n, fn);
}

template <class T>
void random_uniform_fwd(const KernelCall& call) {
  const auto& args = call.as<RandomArgs>();
  if (args.low == 0 && args.span == 1)
    return draw<T>(call, Uniform<T, true>{call.output<T>(0), 0, 1});
  draw<T>(call, Uniform<T, false>{call.output<T>(0), args.low, args.span});
}

template <class T>
void random_normal_fwd(const KernelCall& call) {
  const auto& args = call.as<RandomArgs>();
  draw<T>(call, Gaussian<T>{call.output<T>(0), args.low, args.span});
}

struct Truth {
  std::uint8_t* out;
  std::uint32_t last;

  HWY_INLINE void part(std::int64_t at, VU words, std::size_t count) const {
    const hn::Rebind<std::uint8_t, DU> d8;
    HWY_ALIGN std::uint8_t all[hn::MaxLanes(DU())];
    hn::StoreU(truth(words), d8, all);
    std::memcpy(out + at, all, count);
  }
  template <bool kStream>
  HWY_INLINE void whole(std::int64_t at, VU a, VU b) const {
    const hn::Rebind<std::uint8_t, DU> d8;
    hn::StoreU(truth(a), d8, out + at);
    hn::StoreU(truth(b), d8, out + at + hn::Lanes(d8));
  }

 private:
  HWY_INLINE hn::Vec<hn::Rebind<std::uint8_t, DU>> truth(VU words) const {
    const DU du;
    const auto is = at_most(words, last);
    return hn::DemoteTo(hn::Rebind<std::uint8_t, DU>(),
                        hn::BitCast(DI(), hn::IfThenElseZero(is, hn::Set(du, 1U))));
  }
};

void random_bernoulli_fwd(const KernelCall& call) {
  const auto& args = call.as<RandomArgs>();
  for_words<false>(call.input<std::uint32_t>(0), args.count,
                   Truth{call.output<std::uint8_t>(0), args.last});
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "random_uniform_fwd_" + type, random_uniform_fwd<T>);
  registry.add(Backend::kCpu, "random_normal_fwd_" + type, random_normal_fwd<T>);
}

}  // namespace

void register_random(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "random_key_fwd_u32", random_key_fwd);
  registry.add(Backend::kCpu, "random_advance_fwd_u32", random_advance_fwd);
  registry.add(Backend::kCpu, "random_bits_fwd_u32", random_bits_fwd);
  registry.add(Backend::kCpu, "random_bernoulli_fwd_bool", random_bernoulli_fwd);
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(random)
