// CPU kernels of cross_entropy (formula and layout: mlxtape/ops/cross_entropy.h).
//
// Rows over threads, each in blocks (backends/cpu/device/blocks-inl.h): one pass sums exponentials, a
// second, which finds the row in the cache, makes them again for the gradient: writing them down in f32
// would take four times the row's room in 16 bits. The target's own element is put right at the end.
// Bound by the exponential in 16 bits, else by memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cross_entropy/cross_entropy.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/blocks-inl.h"
#include "backends/cpu/device/simd-inl.h"
#include "cross_entropy_args.h"
#include "mlxtape/core/registry.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// What a block tells its row.
struct Part {
  BlockSum exp;
  float sum;  // Σ z, with smoothing
};

// What the gradient of a row is made of: dz[v] = exp(z[v] − m)·share − rest, at the target less hit.
struct Gradient {
  float m, share, rest, hit;
};

Gradient gradient_of(const CrossEntropyArgs& args, float c, float m, float sum) {
  const float smoothed = args.smoothing / static_cast<float>(args.cols);
  return {finite_reference(m), c / sum, c * smoothed, c * (1 - args.smoothing)};
}

template <class T>
HWY_INLINE float sum_values(const T* x, std::size_t n) {
  const DF d;
  VF sum = hn::Zero(d);
  for_row(
      d, n, [&](std::size_t i) HWY_ATTR { sum = hn::Add(sum, load(d, x + i)); },
      [&](std::size_t i, std::size_t count)
          HWY_ATTR { sum = hn::Add(sum, load_n(d, x + i, count)); });
  return sum_lanes(d, sum);
}

// In place where dz is z: each pair is read before it is written.
template <bool kStream, class T>
HWY_INLINE void write_block(const T* z, T* dz, std::size_t n, const Gradient& g) {
  const DF d;
  const VF m = hn::Set(d, g.m), share = hn::Set(d, g.share), rest = hn::Set(d, g.rest);
  write_pairs<kStream>(
      d, dz, n,
      [&](std::size_t i, VF& a, VF& b) HWY_ATTR {
        load_pair(d, z + i, a, b);
        a = hn::MulSub(exp_for(d, T(), hn::Sub(a, m)), share, rest);
        b = hn::MulSub(exp_for(d, T(), hn::Sub(b, m)), share, rest);
      },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        return hn::MulSub(exp_for(d, T(), hn::Sub(load_n(d, z + i, count), m)), share, rest);
      });
}

// One block of a row's gradient; z_target is the target's logit, which dz may have overwritten.
template <bool kStream, class T>
HWY_INLINE void write_gradient(const T* z, T* dz, std::int64_t first, std::size_t n,
                               const Gradient& g, std::int64_t target, float z_target) {
  write_block<kStream>(z + first, dz + first, n, g);
  if (target < first || target >= first + static_cast<std::int64_t>(n)) return;
  if (kStream) hwy::FlushStream();  // the element is written again
  dz[target] = T(std::exp(z_target - g.m) * g.share - g.rest - g.hit);
}

template <bool kStream, class T>
void forward_rows(const KernelCall& call) {
  const auto& args = call.as<CrossEntropyArgs>();
  const std::int64_t cols = args.cols;
  const T* z = call.input<T>(0);                    // [R, V]
  const auto* weight = call.input<float>(1);        // [R]
  const auto* index = call.input<std::int64_t>(2);  // [R]
  const auto* scale = call.input<float>(3);         // [1]
  auto* loss = call.output<float>(0);               // [R]
  auto* norm = call.output<float>(1);               // [R, 2] or null
  T* dz = call.output<T>(2);                        // [R, V] or null
  const float epsilon = args.smoothing;
  const auto part = [&](std::int64_t r, std::int64_t b) -> Part {
    if (weight[r] == 0) return {{0, 1}, 0};
    const T* x = z + r * cols + b * kBlock;
    const std::size_t n = block_length(cols, b);
    return {sum_of_block(DF(), x, n), epsilon != 0 ? sum_values(x, n) : 0};
  };
  struct Row {
    Gradient gradient;
    float z_target;
  };
  const auto whole = [&](std::int64_t r, const Part* parts) -> Row {
    const std::int64_t count = ceil_div(cols, kBlock);
    const std::int64_t target = index[r];
    const float z_target = target < 0 ? 0 : static_cast<float>(z[r * cols + target]);
    BlockSum row{-INFINITY, 0};
    float sum = 0;
    for (std::int64_t b = 0; b < count; ++b) row.m = std::max(row.m, parts[b].exp.m);
    for (std::int64_t b = 0; b < count; ++b) {
      row.sum += parts[b].exp.sum * std::exp(parts[b].exp.m - row.m);
      sum += parts[b].sum;
    }
    row.sum = at_least_one(row.sum);
    float from_target = (row.m - z_target) * (1 - epsilon);
    if (epsilon != 0) from_target += (row.m - sum / static_cast<float>(cols)) * epsilon;
    loss[r] = weight[r] == 0 ? 0 : weight[r] * (std::log(row.sum) + from_target);
    if (norm != nullptr) {
      norm[2 * r] = row.m;
      norm[2 * r + 1] = row.sum;
    }
    return {gradient_of(args, weight[r] * *scale, row.m, row.sum), z_target};
  };
  const auto write = [&](std::int64_t r, std::int64_t b, const Row& row) {
    if (dz == nullptr) return;
    const std::size_t n = block_length(cols, b);
    if (weight[r] == 0) {
      std::fill_n(dz + r * cols + b * kBlock, n, T());
      return;
    }
    write_gradient<kStream>(z + r * cols, dz + r * cols, b * kBlock, n, row.gradient, index[r],
                            row.z_target);
  };
  const std::int64_t row_bytes = 2 * cols * static_cast<std::int64_t>(sizeof(T));
  rows_in_blocks<Part>(args.rows, cols, row_bytes, part, whole, write);
}

template <bool kStream, class T>
void backward_rows(const KernelCall& call) {
  const auto& args = call.as<CrossEntropyArgs>();
  const std::int64_t cols = args.cols;
  const T* z = call.input<T>(0);                    // [R, V]
  const auto* weight = call.input<float>(1);        // [R]
  const auto* index = call.input<std::int64_t>(2);  // [R]
  const auto* scale = call.input<float>(3);         // [1]
  const auto* norm = call.input<float>(4);          // [R, 2]
  const auto* dloss = call.input<float>(5);         // [R] or [1]
  T* dz = call.output<T>(0);                        // [R, V]
  const std::int64_t count = ceil_div(cols, kBlock);
  const std::int64_t each =
      ceil_div(cpu::kTaskBytes, 2 * std::min(cols, kBlock) * static_cast<std::int64_t>(sizeof(T)));
  parallel_for(ceil_div(args.rows * count, each), [&](std::int64_t task) {
    const std::int64_t end = std::min(args.rows * count, (task + 1) * each);
    for (std::int64_t i = task * each; i < end; ++i) {
      const std::int64_t r = i / count, b = i % count;
      const std::size_t n = block_length(cols, b);
      if (weight[r] == 0) {
        std::fill_n(dz + r * cols + b * kBlock, n, T());
        continue;
      }
      const float c = dloss[r * args.dloss_step] * weight[r] * *scale;
      const float z_target = index[r] < 0 ? 0 : static_cast<float>(z[r * cols + index[r]]);
      write_gradient<kStream>(z + r * cols, dz + r * cols, b * kBlock, n,
                              gradient_of(args, c, norm[2 * r], norm[2 * r + 1]), index[r],
                              z_target);
    }
    if (kStream) hwy::FlushStream();
  });
}

template <class T>
bool large(const CrossEntropyArgs& args) {
  return args.rows * args.cols * static_cast<std::int64_t>(sizeof(T)) >= cpu::kStreamBytes;
}

template <class T>
void cross_entropy_fwd(const KernelCall& call) {
  // In place the row's lines are in the cache already.
  const bool apart = call.output<T>(2) != call.input<T>(0);
  apart&& large<T>(call.as<CrossEntropyArgs>()) ? forward_rows<true, T>(call)
                                                : forward_rows<false, T>(call);
}

template <class T>
void cross_entropy_bwd(const KernelCall& call) {
  large<T>(call.as<CrossEntropyArgs>()) ? backward_rows<true, T>(call)
                                        : backward_rows<false, T>(call);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "cross_entropy_fwd_" + type, cross_entropy_fwd<T>);
  registry.add(Backend::kCpu, "cross_entropy_bwd_" + type, cross_entropy_bwd<T>);
}

}  // namespace

void register_cross_entropy(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(cross_entropy)
