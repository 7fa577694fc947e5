// CPU kernels of softmax (formula and layout: mlxtape/ops/softmax.h).
//
// Rows over threads, each row in blocks. A block's exponentials are taken relative to the block's
// own maximum and wait in the cache, as f32, until the row's maximum and sum are known: one
// factor per block then makes them the result. The maximum of the next block is found in the same
// loop, so x is read once, in one stream, and memory and arithmetic overlap. A row whose
// exponentials do not fit one core's cache is cut over all threads. Bound by memory for f32, by
// both for 16-bit types: about 13 cycles of arithmetic a vector of 16.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/softmax/softmax.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "softmax_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kBlock = 2048;            // columns with one maximum
constexpr std::int64_t kCacheBytes = 960 << 10;  // of a 1.25 MiB second-level cache
constexpr std::int64_t kTile = 256;              // rows side by side when a row is not contiguous

template <class T>
HWY_INLINE float row_max(DF d, const T* x, std::size_t n) {
  VF m = hn::Set(d, -INFINITY);
  for_row(
      d, n, [&](std::size_t i) HWY_ATTR { m = hn::Max(m, load(d, x + i)); },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        m = hn::IfThenElse(hn::FirstN(d, count), hn::Max(m, load_n(d, x + i, count)), m);
      });
  return max_lanes(d, m);
}

// The maximum of a block and the sum of its exponentials relative to it.
struct BlockSum {
  float m, sum;
};

// e[i] = exp(x[i] − m) for a block of n, in the order of load_pair from element `lead` on. Returns
// their sum, and the maximum of the block after it, x[n] to x[n + next_n − 1], which is fetched
// on the way.
template <class T>
HWY_INLINE BlockSum exp_block(DF d, const T* x, std::size_t n, float m, float* e, std::size_t lead,
                              std::size_t next_n) {
  const std::size_t lanes = hn::Lanes(d);
  // −inf − −inf would be NaN: a block of −inf alone adds nothing, one with NaN adds NaN.
  const VF vm = hn::Set(d, m == -INFINITY ? 0 : m);
  const T* next = x + n;
  VF sum_a = hn::Zero(d), sum_b = sum_a;
  VF next_a = hn::Set(d, -INFINITY), next_b = next_a;
  std::size_t i = 0;
  std::size_t seen = 0;  // of the next block
  const auto some = [&](std::size_t end) HWY_ATTR {
    while (i < end) {
      const std::size_t count = std::min(lanes, end - i);
      const VF v = exp_nonpositive(d, hn::Sub(load_n(d, x + i, count), vm));
      store_n(d, v, e + i, count);
      sum_a = hn::Add(sum_a, hn::IfThenElseZero(hn::FirstN(d, count), v));
      i += count;
    }
  };
  const auto pair = [&]() HWY_ATTR {
    VF a, b;
    load_pair(d, x + i, a, b);
    a = exp_nonpositive(d, hn::Sub(a, vm));
    b = exp_nonpositive(d, hn::Sub(b, vm));
    hn::StoreU(a, d, e + i);
    hn::StoreU(b, d, e + i + lanes);
    sum_a = hn::Add(sum_a, a);
    sum_b = hn::Add(sum_b, b);
    i += 2 * lanes;
  };
  some(lead);
  for (; i + 2 * lanes <= n && seen + 2 * lanes <= next_n; seen += 2 * lanes) {
    VF a, b;
    load_pair(d, next + seen, a, b);
    next_a = hn::Max(next_a, a);
    next_b = hn::Max(next_b, b);
    pair();
  }
  while (i + 2 * lanes <= n) pair();
  some(n);
  float next_m = max_lanes(d, hn::Max(next_a, next_b));
  if (next_n > seen) next_m = std::max(next_m, row_max(d, next + seen, next_n - seen));
  return {next_m, sum_lanes(d, hn::Add(sum_a, sum_b))};
}

// Σ y·dy
template <class T>
HWY_INLINE float dot(DF d, const T* y, const T* dy, std::size_t n) {
  const std::size_t lanes = hn::Lanes(d);
  VF a = hn::Zero(d), b = a;
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    VF y0, y1, dy0, dy1;
    load_pair(d, y + i, y0, y1);
    load_pair(d, dy + i, dy0, dy1);
    a = hn::MulAdd(y0, dy0, a);
    b = hn::MulAdd(y1, dy1, b);
  }
  for (std::size_t count; i < n; i += count) {
    count = std::min(lanes, n - i);
    a = hn::MulAdd(load_n(d, y + i, count), load_n(d, dy + i, count), a);
  }
  return sum_lanes(d, hn::Add(a, b));
}

// Blocks in order, whatever thread made them.
BlockSum join(const BlockSum* blocks, std::int64_t count) {
  float m = -INFINITY;
  for (std::int64_t b = 0; b < count; ++b) m = std::max(m, blocks[b].m);
  float sum = 0;
  for (std::int64_t b = 0; b < count; ++b) sum += blocks[b].sum * std::exp(blocks[b].m - m);
  return {m, sum};
}

// y = e · exp(block − row) / sum. Fetches n elements from ahead on meanwhile: reading goes on while
// this only writes.
template <bool kStream, class T>
HWY_INLINE void write_block(DF d, const float* e, T* y, std::size_t n, float block_m,
                            const BlockSum& row, const T* ahead) {
  const VF share = hn::Set(d, (block_m == row.m ? 1 : std::exp(block_m - row.m)) / row.sum);
  write_pairs<kStream>(
      d, y, n,
      [&](std::size_t i, VF& a, VF& b) HWY_ATTR {
        hwy::Prefetch(ahead + i);
        if constexpr (sizeof(T) == 4) hwy::Prefetch(ahead + i + hn::Lanes(d));
        a = hn::Mul(hn::LoadU(d, e + i), share);
        b = hn::Mul(hn::LoadU(d, e + i + hn::Lanes(d)), share);
      },
      [&](std::size_t i, std::size_t count)
          HWY_ATTR { return hn::Mul(load_n(d, e + i, count), share); });
}

template <bool kStream, class T>
void backward_block(const T* y, const T* dy, T* dx, std::size_t n, float s, std::size_t ahead) {
  const DF d;
  const VF vs = hn::Set(d, s);
  write_pairs<kStream>(
      d, dx, n,
      [&](std::size_t i, VF& a, VF& b) HWY_ATTR {
        hwy::Prefetch(y + i + ahead);
        hwy::Prefetch(dy + i + ahead);
        if constexpr (sizeof(T) == 4) {  // two lines
          hwy::Prefetch(y + i + ahead + hn::Lanes(d));
          hwy::Prefetch(dy + i + ahead + hn::Lanes(d));
        }
        VF dy_a, dy_b;
        load_pair(d, y + i, a, b);
        load_pair(d, dy + i, dy_a, dy_b);
        a = hn::Mul(a, hn::Sub(dy_a, vs));
        b = hn::Mul(b, hn::Sub(dy_b, vs));
      },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        return hn::Mul(load_n(d, y + i, count), hn::Sub(load_n(d, dy + i, count), vs));
      });
}

std::size_t block_length(std::int64_t cols, std::int64_t block) {
  return static_cast<std::size_t>(std::min(kBlock, cols - block * kBlock));
}

// Rows [first, end), one after the other; e and blocks serve one row at a time.
template <bool kStream, class T>
void forward_some(const T* x, T* y, std::int64_t first, std::int64_t end, std::int64_t cols,
                  float* e, BlockSum* blocks) {
  const DF d;
  const std::int64_t count = ceil_div(cols, kBlock);
  float m = row_max(d, x + first * cols, block_length(cols, 0));
  for (std::int64_t r = first; r < end; ++r) {
    for (std::int64_t b = 0; b < count; ++b) {
      const std::int64_t at = r * cols + b * kBlock;
      const bool last = b + 1 == count;
      const std::size_t next_n = !last         ? block_length(cols, b + 1)
                                 : r + 1 < end ? block_length(cols, 0)
                                               : 0;
      const std::size_t n = block_length(cols, b);
      const std::size_t lead = kStream ? before_line(y + at, n) : 0;
      const BlockSum made = exp_block(d, x + at, n, m, e + b * kBlock, lead, next_n);
      blocks[b] = {m, made.sum};
      m = made.m;
    }
    const BlockSum row = count == 1 ? blocks[0] : join(blocks, count);
    for (std::int64_t b = 0; b < count; ++b) {
      write_block<kStream>(
          d, e + b * kBlock, y + r * cols + b * kBlock, block_length(cols, b), blocks[b].m, row,
          x + (r + 1) * cols + static_cast<std::int64_t>(block_length(cols, 0)) + b * kBlock);
    }
  }
  if (kStream) hwy::FlushStream();
}

template <bool kStream, class T>
void forward_rows(const SoftmaxArgs& args, const T* x, T* y, void* workspace) {
  const std::int64_t rows = args.outer;
  const std::int64_t cols = args.cols;
  const std::int64_t count = ceil_div(cols, kBlock);
  if (cols * 4 <= kCacheBytes) {
    const std::int64_t each = cpu::rows_per_task(2 * cols * static_cast<std::int64_t>(sizeof(T)));
    parallel_for(ceil_div(rows, each), [&](std::int64_t task) {
      float* e = cpu::thread_scratch(cols + 2 * count);
      forward_some<kStream>(x, y, task * each, std::min(rows, (task + 1) * each), cols, e,
                            reinterpret_cast<BlockSum*>(e + cols));
    });
    return;
  }
  auto* blocks = static_cast<BlockSum*>(workspace);    // [count]
  auto* e = reinterpret_cast<float*>(blocks + count);  // [cols]
  for (std::int64_t r = 0; r < rows; ++r) {
    parallel_for(count, [&](std::int64_t b) {
      const DF d;
      const T* at = x + r * cols + b * kBlock;
      const std::size_t n = block_length(cols, b);
      const float m = row_max(d, at, n);
      const std::size_t lead = kStream ? before_line(y + r * cols + b * kBlock, n) : 0;
      blocks[b] = {m, exp_block(d, at, n, m, e + b * kBlock, lead, 0).sum};
    });
    const BlockSum row = join(blocks, count);
    parallel_for(count, [&](std::int64_t b) {
      write_block<kStream>(DF(), e + b * kBlock, y + r * cols + b * kBlock, block_length(cols, b),
                           blocks[b].m, row, x + (r + 1) * cols + b * kBlock);
      if (kStream) hwy::FlushStream();
    });
  }
}

template <bool kStream, class T>
void backward_rows(const SoftmaxArgs& args, const T* y, const T* dy, T* dx, float* sums) {
  const auto [rows, cols, inner] = args;
  const std::int64_t blocks = ceil_div(cols, kBlock);
  const auto sum_one = [&, cols = cols](std::int64_t r, std::int64_t b) {
    const std::int64_t at = r * cols + b * kBlock;
    sums[r * blocks + b] = dot(DF(), y + at, dy + at, block_length(cols, b));
  };
  const auto row_sum = [&](std::int64_t r) {
    float s = 0;
    for (std::int64_t b = 0; b < blocks; ++b) s += sums[r * blocks + b];
    return s;
  };
  const auto write_one = [&, cols = cols](std::int64_t r, std::int64_t b, float s) {
    const std::int64_t at = r * cols + b * kBlock;
    backward_block<kStream>(y + at, dy + at, dx + at, block_length(cols, b), s,
                            static_cast<std::size_t>(cols));
  };
  if (2 * cols * static_cast<std::int64_t>(sizeof(T)) <= kCacheBytes) {
    const std::int64_t each = cpu::rows_per_task(3 * cols * static_cast<std::int64_t>(sizeof(T)));
    parallel_for(ceil_div(rows, each), [&, rows = rows](std::int64_t task) {
      for (std::int64_t r = task * each; r < std::min(rows, (task + 1) * each); ++r) {
        for (std::int64_t b = 0; b < blocks; ++b) sum_one(r, b);
        const float s = row_sum(r);
        for (std::int64_t b = 0; b < blocks; ++b) write_one(r, b, s);
      }
      if (kStream) hwy::FlushStream();
    });
    return;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    parallel_for(blocks, [&](std::int64_t b) { sum_one(r, b); });
    const float s = row_sum(r);
    parallel_for(blocks, [&](std::int64_t b) {
      write_one(r, b, s);
      if (kStream) hwy::FlushStream();
    });
  }
}

// Rows that are not contiguous: kTile of them side by side, so that loads are.
template <class T, class Body>
void for_tiles(const SoftmaxArgs& args, const Body& body) {
  const std::int64_t tiles = ceil_div(args.inner, kTile);
  parallel_for(args.outer * tiles, [&](std::int64_t task) {
    const std::int64_t first = task % tiles * kTile;
    const std::int64_t width = std::min(kTile, args.inner - first);
    body(task / tiles * args.cols * args.inner + first, static_cast<std::size_t>(width));
  });
}

template <class T>
void forward_columns(const SoftmaxArgs& args, const T* x_all, T* y_all) {
  for_tiles<T>(args, [&](std::int64_t start, std::size_t width) {
    const DF d;
    HWY_ALIGN float m[kTile];
    HWY_ALIGN float sum[kTile];
    for (std::size_t i = 0; i < width; ++i) m[i] = -INFINITY, sum[i] = 0;
    const auto sweep = [&](const auto& body) HWY_ATTR {
      for (std::int64_t c = 0; c < args.cols; ++c) {
        const T* x = x_all + start + c * args.inner;
        T* y = y_all + start + c * args.inner;
        for_row(
            d, width, [&](std::size_t i) HWY_ATTR { body(i, load(d, x + i), y + i, hn::Lanes(d)); },
            [&](std::size_t i, std::size_t count)
                HWY_ATTR { body(i, load_n(d, x + i, count), y + i, count); });
      }
    };
    sweep([&](std::size_t i, VF v, T*, std::size_t count)
              HWY_ATTR { store_n(d, hn::Max(load_n(d, m + i, count), v), m + i, count); });
    sweep([&](std::size_t i, VF v, T*, std::size_t count) HWY_ATTR {
      const VF e = exp_nonpositive(d, hn::Sub(v, load_n(d, m + i, count)));
      store_n(d, hn::Add(load_n(d, sum + i, count), e), sum + i, count);
    });
    sweep([&](std::size_t i, VF v, T* y, std::size_t count) HWY_ATTR {
      const VF e = exp_nonpositive(d, hn::Sub(v, load_n(d, m + i, count)));
      store_n(d, hn::Div(e, load_n(d, sum + i, count)), y, count);
    });
  });
}

template <class T>
void backward_columns(const SoftmaxArgs& args, const T* y_all, const T* dy_all, T* dx_all) {
  for_tiles<T>(args, [&](std::int64_t start, std::size_t width) {
    const DF d;
    HWY_ALIGN float sum[kTile] = {};
    const auto sweep = [&](const auto& body) HWY_ATTR {
      for (std::int64_t c = 0; c < args.cols; ++c) {
        const T* y = y_all + start + c * args.inner;
        const T* dy = dy_all + start + c * args.inner;
        T* dx = dx_all + start + c * args.inner;
        for_row(
            d, width,
            [&](std::size_t i)
                HWY_ATTR { body(i, load(d, y + i), load(d, dy + i), dx + i, hn::Lanes(d)); },
            [&](std::size_t i, std::size_t count) HWY_ATTR {
              body(i, load_n(d, y + i, count), load_n(d, dy + i, count), dx + i, count);
            });
      }
    };
    sweep([&](std::size_t i, VF y, VF dy, T*, std::size_t count) HWY_ATTR {
      store_n(d, hn::MulAdd(y, dy, load_n(d, sum + i, count)), sum + i, count);
    });
    sweep([&](std::size_t i, VF y, VF dy, T* dx, std::size_t count) HWY_ATTR {
      store_n(d, hn::Mul(y, hn::Sub(dy, load_n(d, sum + i, count))), dx, count);
    });
  });
}

std::size_t forward_workspace(const void* args) {
  const auto& a = *static_cast<const SoftmaxArgs*>(args);
  if (a.inner != 1 || a.cols * 4 <= kCacheBytes) return 0;
  return static_cast<std::size_t>(ceil_div(a.cols, kBlock)) * sizeof(BlockSum) +
         static_cast<std::size_t>(a.cols) * sizeof(float);
}

std::size_t backward_workspace(const void* args) {
  const auto& a = *static_cast<const SoftmaxArgs*>(args);
  if (a.inner != 1) return 0;
  return static_cast<std::size_t>(a.outer * ceil_div(a.cols, kBlock)) * sizeof(float);
}

bool streams(const SoftmaxArgs& a, std::size_t element) {
  return a.outer * a.cols * static_cast<std::int64_t>(element) >= cpu::kStreamBytes;
}

template <class T>
void softmax_fwd(const KernelCall& call) {
  const auto& args = call.as<SoftmaxArgs>();
  const T* x = call.input<T>(0);  // [outer, cols, inner]
  T* y = call.output<T>(0);       // [outer, cols, inner]
  if (args.inner != 1) return forward_columns(args, x, y);
  streams(args, sizeof(T)) ? forward_rows<true>(args, x, y, call.workspace)
                           : forward_rows<false>(args, x, y, call.workspace);
}

template <class T>
void softmax_bwd(const KernelCall& call) {
  const auto& args = call.as<SoftmaxArgs>();
  const T* y = call.input<T>(0);   // [outer, cols, inner]
  const T* dy = call.input<T>(1);  // [outer, cols, inner]
  T* dx = call.output<T>(0);       // [outer, cols, inner]
  if (args.inner != 1) return backward_columns(args, y, dy, dx);
  auto* sums = static_cast<float*>(call.workspace);  // [outer, blocks]
  streams(args, sizeof(T)) ? backward_rows<true>(args, y, dy, dx, sums)
                           : backward_rows<false>(args, y, dy, dx, sums);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "softmax_fwd_" + type, softmax_fwd<T>, forward_workspace);
  registry.add(Backend::kCpu, "softmax_bwd_" + type, softmax_bwd<T>, backward_workspace);
}

}  // namespace

void register_softmax(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mlxtape::ops {
HWY_EXPORT(register_softmax);
void register_softmax_cpu(KernelRegistry& registry) {
  HWY_DYNAMIC_DISPATCH(register_softmax)(registry);
}
}  // namespace mlxtape::ops
#endif
