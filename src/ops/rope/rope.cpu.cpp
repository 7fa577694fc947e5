// CPU kernels of rope (formula: mlxtape/ops/rope.h). A task is one token of one batch entry: its sines and
// cosines are made once and used for every head. Bound by memory from a few heads on.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rope/rope.cpu.cpp"
#include <hwy/foreach_target.h>

#include <cmath>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "rope_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// cos θ and sin θ for the h pairs of a position.
void angles(const RopeArgs& args, const float* periods, std::int64_t position, float* c, float* s) {
  const double p = static_cast<double>(position) * args.scale * (args.back != 0 ? -1 : 1);
  for (std::int64_t j = 0; j < args.half; ++j) {
    const double f =
        periods != nullptr
            ? 1 / static_cast<double>(periods[j])
            : std::exp2(-static_cast<double>(j) / static_cast<double>(args.half) * args.log2_base);
    const double turns = p * f / (2 * M_PI);
    const auto angle = static_cast<float>((turns - std::rint(turns)) * (2 * M_PI));
    c[j] = std::cos(angle);
    s[j] = std::sin(angle);
  }
}

template <class T>
HWY_INLINE void turn_halves(const T* x, T* y, std::size_t h, const float* c, const float* s) {
  const DF d;
  const auto some = [&](std::size_t i, std::size_t count) HWY_ATTR {
    const VF a = load_n(d, x + i, count), b = load_n(d, x + h + i, count);
    const VF vc = load_n(d, c + i, count), vs = load_n(d, s + i, count);
    store_n(d, hn::Sub(hn::Mul(a, vc), hn::Mul(b, vs)), y + i, count);
    store_n(d, hn::MulAdd(a, vs, hn::Mul(b, vc)), y + h + i, count);
  };
  for_row(
      d, h,
      [&](std::size_t i) HWY_ATTR {
        const VF a = load(d, x + i), b = load(d, x + h + i);
        const VF vc = load(d, c + i), vs = load(d, s + i);
        store(d, hn::Sub(hn::Mul(a, vc), hn::Mul(b, vs)), y + i);
        store(d, hn::MulAdd(a, vs, hn::Mul(b, vc)), y + h + i);
      },
      some);
}

template <class T>
HWY_INLINE void turn_pairs(const T* x, T* y, std::size_t h, const float* c, const float* s) {
  for (std::size_t j = 0; j < h; ++j) {
    const auto a = static_cast<float>(x[2 * j]), b = static_cast<float>(x[2 * j + 1]);
    y[2 * j] = static_cast<T>(a * c[j] - b * s[j]);
    y[2 * j + 1] = static_cast<T>(a * s[j] + b * c[j]);
  }
}

template <class T>
void rope_fwd(const KernelCall& call) {
  const auto& args = call.as<RopeArgs>();
  const T* x = call.input<T>(0);  // [batch, heads, tokens, cols], the middle two by their steps
  const auto* offsets = call.input<std::int32_t>(1);
  const auto* periods = call.input<float>(2);
  T* y = call.output<T>(0);
  parallel_for(args.batch * args.tokens, [&](std::int64_t task) {
    const std::int64_t b = task / args.tokens, t = task % args.tokens;
    std::int64_t position = t + args.offset;
    if (args.offsets != 0) position += offsets[args.offsets == 1 ? 0 : b];
    float* c = cpu::thread_scratch(2 * args.half);
    float* s = c + args.half;
    angles(args, periods, position, c, s);
    const auto h = static_cast<std::size_t>(args.half);
    for (std::int64_t head = 0; head < args.heads; ++head) {
      const std::int64_t at =
          b * args.heads * args.tokens * args.cols + head * args.head_step + t * args.token_step;
      args.traditional != 0 ? turn_pairs(x + at, y + at, h, c, s)
                            : turn_halves(x + at, y + at, h, c, s);
      std::copy(x + at + 2 * args.half, x + at + args.cols, y + at + 2 * args.half);
    }
  });
}

}  // namespace

void register_rope(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "rope_fwd_f32", rope_fwd<float>);
  registry.add(Backend::kCpu, "rope_fwd_f16", rope_fwd<F16>);
  registry.add(Backend::kCpu, "rope_fwd_bf16", rope_fwd<BF16>);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(rope)
