// CPU kernels of quantize (formula: mlxtape/ops/quantize.h). A task is a run of groups. Codes are read as bytes,
// spread in scratch for some groups at once, and written eight at a time, squeezed together in a 64-bit word. Bound by
// memory; quantize on few cores by what it does for a group.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize/quantize.cpu.cpp"
#include <hwy/foreach_target.h>

#include <cmath>

#include "backends/cpu/device/quantized-inl.h"
#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "quantize_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::size_t kMostGroup = 128;
constexpr std::size_t kSpread = 16;  // groups whose codes are spread at once

// fn(begin, end) for runs of groups; bytes: what a group moves in all.
template <class Fn>
HWY_INLINE void for_runs(const QuantizeArgs& args, std::size_t bytes, const Fn& fn) {
  const std::int64_t each = cpu::rows_per_task(static_cast<std::int64_t>(bytes));
  parallel_for(ceil_div(args.groups, each), [&](std::int64_t task) {
    fn(static_cast<std::size_t>(task * each),
       static_cast<std::size_t>(std::min(args.groups, (task + 1) * each)));
    hwy::FlushStream();
  });
}
// fn(g, its codes as bytes) for all groups.
template <class Fn>
HWY_INLINE void for_groups(const KernelCall& call, std::size_t bytes, const Fn& fn) {
  const auto& args = call.as<QuantizeArgs>();
  const auto* codes = call.input<std::uint32_t>(0);
  const std::size_t size = std::size_t{1} << args.group_shift;
  const std::size_t words = size / 32 * static_cast<std::size_t>(args.bits);
  for_runs(args, bytes + 4 * words, [&](std::size_t begin, std::size_t end) HWY_ATTR {
    std::uint8_t room[kSpread * kMostGroup];
    for (std::size_t g = begin; g < end;) {
      const std::size_t stop = std::min(end, g + kSpread);
      const std::uint8_t* q = codes_as_bytes(
          args.bits, codes + g * words, static_cast<std::int64_t>((stop - g) * size / 32), room);
      for (; g < stop; ++g, q += size) fn(g, q);
    }
  });
}

// Eight codes in each lane, one in each byte, without the gaps between them: first in pairs, then in fours.
using DEights = hn::CappedTag<std::uint64_t, 4>;  // no more than the smallest group has
template <int kBits>
HWY_INLINE hn::Vec<DEights> squeeze(hn::Vec<DEights> x) {
  const DEights d;
  const auto low = [&](std::uint64_t mask) HWY_ATTR {
    return hn::And(x, hn::Set(d, mask));
  };
  x = hn::Or(low(0x00ff00ff00ff00ffU), hn::ShiftRight<8 - kBits>(low(0xff00ff00ff00ff00U)));
  x = hn::Or(low(0x0000ffff0000ffffU), hn::ShiftRight<16 - 2 * kBits>(low(0xffff0000ffff0000U)));
  return hn::Or(low(0x00000000ffffffffU), hn::ShiftLeft<4 * kBits>(hn::ShiftRight<32>(x)));
}

// ---- scales and biases of any type ----

HWY_INLINE float get(const void* p, std::int32_t dtype, std::size_t i) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF16: return static_cast<float>(static_cast<const F16*>(p)[i]);
    case DType::kBF16: return static_cast<float>(static_cast<const BF16*>(p)[i]);
    default: return static_cast<const float*>(p)[i];
  }
}
HWY_INLINE void put(void* p, std::int32_t dtype, std::size_t i, float v) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF16: static_cast<F16*>(p)[i] = static_cast<F16>(v); return;
    case DType::kBF16: static_cast<BF16*>(p)[i] = static_cast<BF16>(v); return;
    default: static_cast<float*>(p)[i] = v;
  }
}

// ---- kernels ----

template <class T>
HWY_INLINE GroupFit fit(const T* w, std::size_t size, float n, bool gpu_rule) {
  const DF d;
  // With a NaN hi and lo may be anything: poison makes NaN of all that comes of them.
  VF hi = load(d, w), lo = hi, poison = hn::Zero(d);
  for (std::size_t i = 0; i < size; i += hn::Lanes(d)) {
    const VF x = load(d, w + i);
    hi = hn::Max(hi, x);
    lo = hn::Min(lo, x);
    poison = hn::MulAdd(x, hn::Zero(d), poison);
  }
  return fit_group(max_lanes(d, hi), hn::GetLane(hn::MinOfLanes(d, lo)), sum_lanes(d, poison), n,
                   gpu_rule);
}

// The product with 1/s is off by less than 2^-14, so that the quotient itself, which takes ten times as long, matters
// only near a half.
template <class T, int kBits>
HWY_INLINE void write_codes(const T* w, std::size_t size, GroupFit f, bool gpu_rule,
                            std::uint8_t* codes) {
  const DF d;
  const DU du;
  const hn::Rebind<std::uint8_t, DF> d8;
  const VF s = hn::Set(d, f.s), b = hn::Set(d, f.b), inverse = hn::Set(d, 1 / f.s);
  const VF n = hn::Set(d, (1 << kBits) - 1), half = hn::Set(d, 0.5F);
  const VF magic = hn::Set(d, 0x1p23F);  // adding it rounds, and leaves the code in the lowest bits
  const auto clamped = [&](VF t) HWY_ATTR {  // NaN gives 0
    return hn::Min(hn::IfThenElseZero(hn::Gt(t, hn::Zero(d)), t), n);
  };
  HWY_ALIGN std::uint8_t each[kMostGroup];
  for (std::size_t i = 0; i < size; i += hn::Lanes(d)) {
    const VF x = hn::Sub(load(d, w + i), b);
    VF t = clamped(hn::Mul(x, inverse));
    VF rounded = hn::Add(t, magic);
    const VF rest = hn::Sub(t, hn::Sub(rounded, magic));
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::Gt(hn::Abs(rest), hn::Set(d, 0.5F - 0x1p-13F))))) {
      t = clamped(hn::Div(x, s));
      rounded = hn::Add(t, magic);
      const auto tie = hn::Eq(hn::Sub(t, hn::Sub(rounded, magic)), half);
      if (gpu_rule) rounded = hn::Add(rounded, hn::IfThenElseZero(tie, hn::Set(d, 1.0F)));
    }
    hn::StoreU(hn::TruncateTo(d8, hn::BitCast(du, rounded)), d8, each + i);
  }
  const DEights d64;
  HWY_ALIGN std::uint64_t eights[hn::MaxLanes(d64)];
  for (std::size_t i = 0; i < size; i += 8 * hn::Lanes(d64)) {
    const auto bytes = hn::Load(hn::Repartition<std::uint8_t, DEights>(), each + i);
    hn::Store(squeeze<kBits>(hn::BitCast(d64, bytes)), d64, eights);
    for (std::size_t k = 0; k < hn::Lanes(d64); ++k, codes += kBits) {
      std::memcpy(codes, eights + k, kBits);
    }
  }
}

template <class T>
void quantize_fwd(const KernelCall& call) {
  const auto& args = call.as<QuantizeArgs>();
  const T* w = call.input<T>(0);
  auto* codes = call.output<std::uint8_t>(0);
  T* scales = call.output<T>(1);
  T* biases = call.output<T>(2);
  const std::size_t size = std::size_t{1} << args.group_shift;
  const bool gpu_rule = args.gpu_rule != 0;
  with_bits(args.bits, [&](auto bits) {
    constexpr int kBits = bits;
    const std::size_t bytes = size * kBits / 8;
    const auto fitted = [&](std::size_t g) HWY_ATTR {
      return fit(w + g * size, size, (1 << kBits) - 1, gpu_rule);
    };
    for_runs(args, size * sizeof(T) + bytes, [&](std::size_t begin, std::size_t end) HWY_ATTR {
      GroupFit next = fitted(begin);
      for (std::size_t g = begin; g < end; ++g) {
        const GroupFit f = next;
        if (g + 1 < end) next = fitted(g + 1);  // beside g's codes: its divisions are a chain
        write_codes<T, kBits>(w + g * size, size, f, gpu_rule, codes + g * bytes);
        scales[g] = static_cast<T>(f.s);
        biases[g] = static_cast<T>(f.b);
      }
    });
  });
}

template <class T, bool kStream>
HWY_INLINE void dequantize_groups(const KernelCall& call) {
  const auto& args = call.as<QuantizeArgs>();
  T* w = call.output<T>(0);
  const std::size_t size = std::size_t{1} << args.group_shift;
  for_groups(call, size * sizeof(T), [&](std::size_t g, const std::uint8_t* q) HWY_ATTR {
    const DF d;
    const VF s = hn::Set(d, get(call.in[1], args.scales, g));
    const VF b = hn::Set(d, get(call.in[2], args.scales, g));
    T* row = w + g * size;
    for (const T* end = row + size; row != end; row += 2 * hn::Lanes(d), q += 2 * hn::Lanes(d)) {
      const VF first = hn::Add(hn::Mul(s, load_codes(d, q)), b);
      const VF second = hn::Add(hn::Mul(s, load_codes(d, q + hn::Lanes(d))), b);
      store2<kStream>(d, first, second, row);
    }
  });
}

template <class T>
void dequantize_fwd(const KernelCall& call) {
  const auto& args = call.as<QuantizeArgs>();
  const std::int64_t bytes = (args.groups << args.group_shift) * std::int64_t{sizeof(T)};
  const bool stream =
      bytes >= cpu::kStreamBytes && reinterpret_cast<std::uintptr_t>(call.out[0]) % 64 == 0;
  stream ? dequantize_groups<T, true>(call) : dequantize_groups<T, false>(call);
}

template <class T>
void dequantize_bwd(const KernelCall& call) {
  const auto& args = call.as<QuantizeArgs>();
  const T* dw = call.input<T>(1);
  const std::size_t size = std::size_t{1} << args.group_shift;
  for_groups(call, size * sizeof(T), [&](std::size_t g, const std::uint8_t* q) HWY_ATTR {
    const DF d;
    VF ds = hn::Zero(d), db = ds;
    for (std::size_t i = 0; i < size; i += 2 * hn::Lanes(d)) {
      const VF first = load(d, dw + g * size + i);
      const VF second = load(d, dw + g * size + i + hn::Lanes(d));
      ds = hn::MulAdd(first, load_codes(d, q + i), ds);
      ds = hn::MulAdd(second, load_codes(d, q + i + hn::Lanes(d)), ds);
      db = hn::Add(db, hn::Add(first, second));
    }
    put(call.out[0], args.scales, g, sum_lanes(d, ds));
    put(call.out[1], args.scales, g, sum_lanes(d, db));
  });
}

template <class T>
void register_type(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "quantize_fwd_" + type, quantize_fwd<T>);
  registry.add(Backend::kCpu, "dequantize_fwd_" + type, dequantize_fwd<T>);
  registry.add(Backend::kCpu, "dequantize_bwd_" + type, dequantize_bwd<T>);
}

}  // namespace

void register_quantize(KernelRegistry& registry) {
  register_type<float>(registry);
  register_type<F16>(registry);
  register_type<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(quantize)
