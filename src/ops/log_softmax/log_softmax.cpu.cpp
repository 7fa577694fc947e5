// CPU kernels of log_softmax (formula and layout: mlxtape/ops/log_softmax.h).
//
// Rows over threads, each in blocks (backends/cpu/device/blocks-inl.h): one pass sums exponentials, a
// second, which finds the row in the cache, writes. Rows that are not contiguous: neighbours side by
// side. Bound by the exponential in 16 bits, else by memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/log_softmax/log_softmax.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/blocks-inl.h"
#include "backends/cpu/device/simd-inl.h"
#include "log_softmax_args.h"
#include "mlxtape/core/registry.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kTile = 256;  // rows side by side when a row is not contiguous

// y = (x − m) − log_sum
template <bool kStream, class T>
HWY_INLINE void write_block(const T* x, T* y, std::size_t n, float m, float log_sum) {
  const DF d;
  const VF vm = hn::Set(d, m), vlog = hn::Set(d, log_sum);
  write_pairs<kStream>(
      d, y, n,
      [&](std::size_t i, VF& a, VF& b) HWY_ATTR {
        load_pair(d, x + i, a, b);
        a = hn::Sub(hn::Sub(a, vm), vlog);
        b = hn::Sub(hn::Sub(b, vm), vlog);
      },
      [&](std::size_t i, std::size_t count)
          HWY_ATTR { return hn::Sub(hn::Sub(load_n(d, x + i, count), vm), vlog); });
}

template <class T>
HWY_INLINE float sum_values(const T* x, std::size_t n) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  VF sum_a = hn::Zero(d), sum_b = sum_a;
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    VF a, b;
    load_pair(d, x + i, a, b);
    sum_a = hn::Add(sum_a, a);
    sum_b = hn::Add(sum_b, b);
  }
  for (std::size_t count; i < n; i += count) {
    count = std::min(lanes, n - i);
    sum_a = hn::Add(sum_a, load_n(d, x + i, count));
  }
  return sum_lanes(d, hn::Add(sum_a, sum_b));
}

// dx = dy − exp(y)·s
template <bool kStream, class T>
HWY_INLINE void backward_block(const T* y, const T* dy, T* dx, std::size_t n, float s) {
  const DF d;
  const VF vs = hn::Set(d, s);
  write_pairs<kStream>(
      d, dx, n,
      [&](std::size_t i, VF& a, VF& b) HWY_ATTR {
        VF y_a, y_b;
        load_pair(d, y + i, y_a, y_b);
        load_pair(d, dy + i, a, b);
        a = hn::NegMulAdd(exp_for(d, T(), y_a), vs, a);
        b = hn::NegMulAdd(exp_for(d, T(), y_b), vs, b);
      },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        return hn::NegMulAdd(exp_for(d, T(), load_n(d, y + i, count)), vs,
                             load_n(d, dy + i, count));
      });
}

template <bool kStream, class T>
void forward_rows(const LogSoftmaxArgs& args, const T* x, T* y) {
  const std::int64_t cols = args.cols;
  rows_in_blocks<BlockSum>(
      args.outer, cols, 2 * cols * static_cast<std::int64_t>(sizeof(T)),
      [&](std::int64_t r, std::int64_t b) {
        return sum_of_block(DF(), x + r * cols + b * kBlock, block_length(cols, b));
      },
      [&](std::int64_t, const BlockSum* blocks) { return join(blocks, ceil_div(cols, kBlock)); },
      [&](std::int64_t r, std::int64_t b, const BlockSum& row) {
        const std::int64_t at = r * cols + b * kBlock;
        write_block<kStream>(x + at, y + at, block_length(cols, b), row.m, std::log(row.sum));
      });
}

template <bool kStream, class T>
void backward_rows(const LogSoftmaxArgs& args, const T* y, const T* dy, T* dx) {
  const std::int64_t cols = args.cols;
  rows_in_blocks<float>(
      args.outer, cols, 3 * cols * static_cast<std::int64_t>(sizeof(T)),
      [&](std::int64_t r, std::int64_t b) {
        return sum_values(dy + r * cols + b * kBlock, block_length(cols, b));
      },
      [&](std::int64_t, const float* sums) {
        float s = 0;
        for (std::int64_t b = 0; b < ceil_div(cols, kBlock); ++b) s += sums[b];
        return s;
      },
      [&](std::int64_t r, std::int64_t b, float s) {
        const std::int64_t at = r * cols + b * kBlock;
        backward_block<kStream>(y + at, dy + at, dx + at, block_length(cols, b), s);
      });
}

// ---- rows that are not contiguous ----

// kTile of them side by side, so that loads are: body(first element, rows).
template <class Body>
void for_tiles(const LogSoftmaxArgs& args, const Body& body) {
  const std::int64_t tiles = ceil_div(args.inner, kTile);
  parallel_for(args.outer * tiles, [&](std::int64_t task) {
    const std::int64_t first = task % tiles * kTile;
    const std::int64_t width = std::min(kTile, args.inner - first);
    body(task / tiles * args.cols * args.inner + first, static_cast<std::size_t>(width));
  });
}

// body(lane, lanes in use, offset of the vector's first element) for each vector of a tile.
template <class Body>
HWY_INLINE void sweep(const LogSoftmaxArgs& args, std::int64_t start, std::size_t width,
                      const Body& body) {
  const DF d;
  for (std::int64_t c = 0; c < args.cols; ++c) {
    const std::int64_t at = start + c * args.inner;
    for (std::size_t i = 0; i < width; i += hn::Lanes(d)) {
      body(i, std::min(hn::Lanes(d), width - i), at + static_cast<std::int64_t>(i));
    }
  }
}

template <class T>
void forward_columns(const LogSoftmaxArgs& args, const T* x, T* y) {
  for_tiles(args, [&](std::int64_t start, std::size_t width) {
    const DF d;
    HWY_ALIGN float m[kTile];
    HWY_ALIGN float sum[kTile] = {};
    std::fill(m, m + width, -INFINITY);
    sweep(args, start, width, [&](std::size_t i, std::size_t n, std::int64_t at) HWY_ATTR {
      store_n(d, largest(load_n(d, m + i, n), load_n(d, x + at, n)), m + i, n);
    });
    sweep(args, start, width, [&](std::size_t i, std::size_t n, std::int64_t at) HWY_ATTR {
      const VF e = exp_for(d, T(), hn::Sub(load_n(d, x + at, n), load_n(d, m + i, n)));
      store_n(d, hn::Add(load_n(d, sum + i, n), e), sum + i, n);
    });
    for (std::size_t i = 0; i < width; ++i) sum[i] = std::log(at_least_one(sum[i]));
    sweep(args, start, width, [&](std::size_t i, std::size_t n, std::int64_t at) HWY_ATTR {
      const VF v = hn::Sub(load_n(d, x + at, n), load_n(d, m + i, n));
      store_n(d, hn::Sub(v, load_n(d, sum + i, n)), y + at, n);
    });
  });
}

template <class T>
void backward_columns(const LogSoftmaxArgs& args, const T* y, const T* dy, T* dx) {
  for_tiles(args, [&](std::int64_t start, std::size_t width) {
    const DF d;
    HWY_ALIGN float sum[kTile] = {};
    sweep(args, start, width, [&](std::size_t i, std::size_t n, std::int64_t at) HWY_ATTR {
      store_n(d, hn::Add(load_n(d, sum + i, n), load_n(d, dy + at, n)), sum + i, n);
    });
    sweep(args, start, width, [&](std::size_t i, std::size_t n, std::int64_t at) HWY_ATTR {
      const VF e = exp_for(d, T(), load_n(d, y + at, n));
      store_n(d, hn::NegMulAdd(e, load_n(d, sum + i, n), load_n(d, dy + at, n)), dx + at, n);
    });
  });
}

bool streams(const LogSoftmaxArgs& a, std::size_t element) {
  return a.outer * a.cols * static_cast<std::int64_t>(element) >= cpu::kStreamBytes;
}

template <class T>
void log_softmax_fwd(const KernelCall& call) {
  const auto& args = call.as<LogSoftmaxArgs>();
  const T* x = call.input<T>(0);  // [outer, cols, inner]
  T* y = call.output<T>(0);       // [outer, cols, inner]
  if (args.inner != 1) return forward_columns(args, x, y);
  streams(args, sizeof(T)) ? forward_rows<true>(args, x, y) : forward_rows<false>(args, x, y);
}

template <class T>
void log_softmax_bwd(const KernelCall& call) {
  const auto& args = call.as<LogSoftmaxArgs>();
  const T* y = call.input<T>(0);   // [outer, cols, inner]
  const T* dy = call.input<T>(1);  // [outer, cols, inner]
  T* dx = call.output<T>(0);       // [outer, cols, inner]
  if (args.inner != 1) return backward_columns(args, y, dy, dx);
  streams(args, sizeof(T)) ? backward_rows<true>(args, y, dy, dx)
                           : backward_rows<false>(args, y, dy, dx);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "log_softmax_fwd_" + type, log_softmax_fwd<T>);
  registry.add(Backend::kCpu, "log_softmax_bwd_" + type, log_softmax_bwd<T>);
}

}  // namespace

void register_log_softmax(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(log_softmax)
