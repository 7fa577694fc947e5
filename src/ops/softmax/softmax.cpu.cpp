// CPU kernels of softmax (formula and layout: mlxtape/ops/softmax.h).
//
// Rows over threads. Where a row's f32 exponentials fit the cache beside the row, they wait there
// for their sum; longer rows (of f32) are read again from the second-level cache and their
// exponentials computed again. The next row is fetched during the arithmetic, so that memory and
// arithmetic overlap. A row too large for one core's cache is cut over all threads. Bound by
// memory for f32, by both for 16-bit types: about 13 cycles of arithmetic a vector of 16.
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

constexpr std::int64_t kBlock = 4096;  // columns of a long row that are summed together
constexpr std::int64_t kCacheBytes = 960 << 10;  // of a 1.25 MiB second-level cache
constexpr std::int64_t kTile = 256;  // rows side by side when a row is not contiguous

// Columns whose exponentials are kept: f32 rows in the first-level cache, 16-bit rows, which have
// less time for each element, in the second.
template <class T>
constexpr std::int64_t kKept = sizeof(T) == 4 ? 4096 : kCacheBytes / 6;

template <class T>
HWY_INLINE float row_max(DF d, const T* x, std::size_t n) {
  const std::size_t lanes = hn::Lanes(d);
  VF m = hn::Set(d, -INFINITY);
  VF m1 = m, m2 = m, m3 = m;  // four chains: one max takes four cycles
  std::size_t at = 0;
  for (; at + 4 * lanes <= n; at += 4 * lanes) {
    m = hn::Max(m, load(d, x + at));
    m1 = hn::Max(m1, load(d, x + at + lanes));
    m2 = hn::Max(m2, load(d, x + at + 2 * lanes));
    m3 = hn::Max(m3, load(d, x + at + 3 * lanes));
  }
  x += at;
  for_row(d, n - at, [&](std::size_t i) HWY_ATTR { m = hn::Max(m, load(d, x + i)); },
          [&](std::size_t i, std::size_t count) HWY_ATTR {
            m = hn::IfThenElse(hn::FirstN(d, count), hn::Max(m, load_n(d, x + i, count)), m);
          });
  return max_lanes(d, hn::Max(hn::Max(m, m1), hn::Max(m2, m3)));
}

// exponentials[i] = exp(x[i] − m), returned: their sum. Fetches the next row on the way.
template <class T>
HWY_INLINE float exp_row(DF d, const T* x, std::size_t n, float m, float* exponentials) {
  const VF vm = hn::Set(d, m);
  VF sum = hn::Zero(d);
  for_row(d, n,
          [&](std::size_t i) HWY_ATTR {
            hwy::Prefetch(x + n + i);
            const VF e = exp_nonpositive(d, hn::Sub(load(d, x + i), vm));
            hn::StoreU(e, d, exponentials + i);
            sum = hn::Add(sum, e);
          },
          [&](std::size_t i, std::size_t count) HWY_ATTR {
            const VF e = exp_nonpositive(d, hn::Sub(load_n(d, x + i, count), vm));
            store_n(d, e, exponentials + i, count);
            sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, count), e));
          });
  return sum_lanes(d, sum);
}

template <class T>
HWY_INLINE float exp_sum(DF d, const T* x, std::size_t n, float m) {
  const VF vm = hn::Set(d, m);
  VF sum = hn::Zero(d);
  for_row(d, n,
          [&](std::size_t i) HWY_ATTR {
            hwy::Prefetch(x + n + i);  // the next block
            sum = hn::Add(sum, exp_nonpositive(d, hn::Sub(load(d, x + i), vm)));
          },
          [&](std::size_t i, std::size_t count) HWY_ATTR {
            const VF e = exp_nonpositive(d, hn::Sub(load_n(d, x + i, count), vm));
            sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, count), e));
          });
  return sum_lanes(d, sum);
}

// Σ y·dy
template <class T>
HWY_INLINE float dot(DF d, const T* y, const T* dy, std::size_t n) {
  const std::size_t lanes = hn::Lanes(d);
  VF a = hn::Zero(d);
  VF b = hn::Zero(d);
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    a = hn::MulAdd(load(d, y + i), load(d, dy + i), a);
    b = hn::MulAdd(load(d, y + i + lanes), load(d, dy + i + lanes), b);
  }
  for_row(d, n - i,
          [&](std::size_t j) HWY_ATTR { a = hn::MulAdd(load(d, y + i + j), load(d, dy + i + j), a); },
          [&](std::size_t j, std::size_t count) HWY_ATTR {
            a = hn::MulAdd(load_n(d, y + i + j, count), load_n(d, dy + i + j, count), a);
          });
  return sum_lanes(d, hn::Add(a, b));
}

template <bool kStream, class T>
void forward_row(const T* x, T* y, std::size_t n, float* e) {
  const DF d;
  const float m = row_max(d, x, n);
  const VF share = hn::Set(d, 1 / exp_row(d, x, n, m, e));
  write_row<kStream>(d, y, n,
                     [&](std::size_t i) HWY_ATTR { return hn::Mul(hn::LoadU(d, e + i), share); },
                     [&](std::size_t i, std::size_t count) HWY_ATTR {
                       return hn::Mul(load_n(d, e + i, count), share);
                     });
}

// The maximum of a block and the sum of its exponentials relative to it.
struct BlockSum {
  float m, sum;
};

template <class T>
BlockSum sum_block(const T* x, std::size_t n) {
  const DF d;
  const float m = row_max(d, x, n);
  // −inf − −inf would be NaN: a block of −inf alone adds nothing, one with NaN adds NaN.
  return {m, exp_sum(d, x, n, m == -INFINITY ? 0 : m)};
}

// Blocks in order, whatever thread made them.
BlockSum join(const BlockSum* blocks, std::int64_t count) {
  float m = -INFINITY;
  for (std::int64_t b = 0; b < count; ++b) m = blocks[b].m > m ? blocks[b].m : m;
  float sum = 0;
  for (std::int64_t b = 0; b < count; ++b) sum += blocks[b].sum * std::exp(blocks[b].m - m);
  return {m, sum};
}

template <bool kStream, class T>
void write_block(const T* x, T* y, std::size_t n, const BlockSum& row) {
  const DF d;
  const VF m = hn::Set(d, row.m);
  const VF share = hn::Set(d, 1 / row.sum);
  write_row<kStream>(
      d, y, n,
      [&](std::size_t i) HWY_ATTR {
        return hn::Mul(exp_nonpositive(d, hn::Sub(load(d, x + i), m)), share);
      },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        return hn::Mul(exp_nonpositive(d, hn::Sub(load_n(d, x + i, count), m)), share);
      });
}

template <bool kStream, class T>
void backward_block(const T* y, const T* dy, T* dx, std::size_t n, float s, std::size_t ahead) {
  const DF d;
  const VF vs = hn::Set(d, s);
  write_row<kStream>(d, dx, n,
                     [&](std::size_t i) HWY_ATTR {
                       hwy::Prefetch(y + i + ahead);
                       hwy::Prefetch(dy + i + ahead);
                       return hn::Mul(load(d, y + i), hn::Sub(load(d, dy + i), vs));
                     },
                     [&](std::size_t i, std::size_t count) HWY_ATTR {
                       return hn::Mul(load_n(d, y + i, count), hn::Sub(load_n(d, dy + i, count), vs));
                     });
}

std::size_t block_length(std::int64_t cols, std::int64_t block) {
  return static_cast<std::size_t>(std::min(kBlock, cols - block * kBlock));
}

template <bool kStream, class T>
void forward_rows(const SoftmaxArgs& args, const T* x, T* y, BlockSum* sums) {
  const auto [rows, cols, inner] = args;
  if (cols <= kKept<T>) {
    const std::int64_t each = cpu::rows_per_task(2 * cols * static_cast<std::int64_t>(sizeof(T)));
    parallel_for(ceil_div(rows, each), [&, cols = cols, rows = rows](std::int64_t task) {
      float* e = cpu::thread_scratch(cols);
      for (std::int64_t r = task * each; r < std::min(rows, (task + 1) * each); ++r) {
        forward_row<kStream>(x + r * cols, y + r * cols, static_cast<std::size_t>(cols), e);
      }
      if (kStream) hwy::FlushStream();
    });
    return;
  }
  const std::int64_t blocks = ceil_div(cols, kBlock);
  const auto sum_one = [&, cols = cols](std::int64_t r, std::int64_t b) {
    sums[r * blocks + b] = sum_block(x + r * cols + b * kBlock, block_length(cols, b));
  };
  const auto write_one = [&, cols = cols](std::int64_t r, std::int64_t b, const BlockSum& row) {
    const std::int64_t at = r * cols + b * kBlock;
    write_block<kStream>(x + at, y + at, block_length(cols, b), row);
  };
  if (cols * static_cast<std::int64_t>(sizeof(T)) <= kCacheBytes) {
    parallel_for(rows, [&](std::int64_t r) {
      for (std::int64_t b = 0; b < blocks; ++b) sum_one(r, b);
      const BlockSum row = join(sums + r * blocks, blocks);
      for (std::int64_t b = 0; b < blocks; ++b) write_one(r, b, row);
      if (kStream) hwy::FlushStream();
    });
    return;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    parallel_for(blocks, [&](std::int64_t b) { sum_one(r, b); });
    const BlockSum row = join(sums + r * blocks, blocks);
    parallel_for(blocks, [&](std::int64_t b) {
      write_one(r, b, row);
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
        for_row(d, width, [&](std::size_t i) HWY_ATTR { body(i, load(d, x + i), y + i, hn::Lanes(d)); },
                [&](std::size_t i, std::size_t count) HWY_ATTR {
                  body(i, load_n(d, x + i, count), y + i, count);
                });
      }
    };
    sweep([&](std::size_t i, VF v, T*, std::size_t count) HWY_ATTR {
      store_n(d, hn::Max(load_n(d, m + i, count), v), m + i, count);
    });
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
        for_row(d, width,
                [&](std::size_t i) HWY_ATTR {
                  body(i, load(d, y + i), load(d, dy + i), dx + i, hn::Lanes(d));
                },
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

template <class T>
std::size_t forward_workspace(const void* args) {
  const auto& a = *static_cast<const SoftmaxArgs*>(args);
  if (a.inner != 1 || a.cols <= kKept<T>) return 0;
  return static_cast<std::size_t>(a.outer * ceil_div(a.cols, kBlock)) * sizeof(BlockSum);
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
  auto* sums = static_cast<BlockSum*>(call.workspace);  // [outer, blocks]
  streams(args, sizeof(T)) ? forward_rows<true>(args, x, y, sums)
                           : forward_rows<false>(args, x, y, sums);
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
  registry.add(Backend::kCpu, "softmax_fwd_" + type, softmax_fwd<T>, forward_workspace<T>);
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
