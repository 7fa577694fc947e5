// CPU kernels of softmax (formula and layout: mlxtape/ops/softmax.h).
//
// Rows over threads, each row in blocks. A block's exponentials are taken relative to a reference
// of its own, the largest of its first elements, and wait in the cache, as f32, until all of the row
// is known: one factor per block then makes them the result. So x is read once, in one stream, and
// nobody looks for the maximum first: any reference does that is less than 2^40 off, and a block
// whose sum says otherwise is done again with its true maximum. A row whose exponentials do not fit
// one core's cache is cut over all threads. Bound by memory; in 16 bits the arithmetic takes three
// quarters of that time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/softmax/softmax.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/blocks-inl.h"
#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "softmax_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::size_t kAhead = 8192;             // bytes
constexpr std::int64_t kCacheBytes = 960 << 10;  // of a 1.25 MiB second-level cache
constexpr std::int64_t kTile = 256;              // rows side by side when a row is not contiguous

// Reading must go on while results are written, and the hardware looks ahead only while something
// is read: of four pairs of vectors, three are fetched kAhead bytes before their turn by the loop
// over x and one by the loop over y. Into the second-level cache, because the first is full of
// exponentials.
enum class Loop { kOfX, kOfY };
template <Loop kLoop, bool kStream, class T>
HWY_INLINE void fetch_ahead(const T* x, std::size_t i) {
  constexpr std::size_t kPair = 2 * hn::MaxLanes(DF());
  if (!kStream || (i / kPair % 4 == 3) != (kLoop == Loop::kOfY)) return;
  const char* at = reinterpret_cast<const char*>(x + i) + kAhead;
  __builtin_prefetch(at, 0, 2);
  if constexpr (kPair * sizeof(T) > 64) __builtin_prefetch(at + 64, 0, 2);
}

// e[i] = exp(x[i] − m) for a block of n, in the order of load_pair from element `lead` on. Returns
// their sum.
template <bool kStream, class T>
HWY_INLINE float exp_block(DF d, const T* x, std::size_t n, float m, float* e, std::size_t lead) {
  const std::size_t lanes = hn::Lanes(d);
  const VF vm = hn::Set(d, finite_reference(m));
  VF sum_a = hn::Zero(d), sum_b = sum_a;
  std::size_t i = 0;
  const auto some = [&](std::size_t end) HWY_ATTR {
    while (i < end) {
      const std::size_t count = std::min(lanes, end - i);
      const VF v = exp_for(d, T(), hn::Sub(load_n(d, x + i, count), vm));
      store_n(d, v, e + i, count);
      sum_a = hn::Add(sum_a, hn::IfThenElseZero(hn::FirstN(d, count), v));
      i += count;
    }
  };
  some(lead);
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    fetch_ahead<Loop::kOfX, kStream>(x, i);
    VF a, b;
    load_pair(d, x + i, a, b);
    a = exp_for(d, T(), hn::Sub(a, vm));
    b = exp_for(d, T(), hn::Sub(b, vm));
    hn::StoreU(a, d, e + i);
    hn::StoreU(b, d, e + i + lanes);
    sum_a = hn::Add(sum_a, a);
    sum_b = hn::Add(sum_b, b);
  }
  some(n);
  return sum_lanes(d, hn::Add(sum_a, sum_b));
}

// A block's exponentials and their sum. m is a reference from among them, so the sum is at least 1,
// unless it is −inf, which exp_block cannot work with.
template <bool kStream, class T>
HWY_INLINE BlockSum sum_block(DF d, const T* x, std::size_t n, float m, float* e,
                              std::size_t lead) {
  float sum = exp_block<kStream>(d, x, n, m, e, lead);
  if (!good_reference(m, sum)) {
    m = row_max(d, x, n);
    sum = exp_block<kStream>(d, x, n, m, e, lead);
  }
  return {m, sum};
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

// y = e · exp(block − row) / sum
template <bool kStream, class T>
HWY_INLINE void write_block(DF d, const T* x, float* e, T* y, std::size_t n, std::size_t lead,
                            float block_m, const BlockSum& row) {
  float share = (block_m == row.m ? 1 : std::exp(block_m - row.m)) / row.sum;
  if (share < 0x1p-80F && block_m > -INFINITY) {
    // So far below the row's largest that the factor may have lost bits to underflow which e, up to
    // 2^40, would bring back: once more, relative to the row.
    exp_block<kStream>(d, x, n, row.m, e, lead);
    share = 1 / row.sum;
  }
  const VF vshare = hn::Set(d, share);
  write_pairs<kStream>(
      d, y, n,
      [&](std::size_t i, VF& a, VF& b) HWY_ATTR {
        fetch_ahead<Loop::kOfY, kStream>(x, i);
        a = hn::Mul(hn::LoadU(d, e + i), vshare);
        b = hn::Mul(hn::LoadU(d, e + i + hn::Lanes(d)), vshare);
      },
      [&](std::size_t i, std::size_t count)
          HWY_ATTR { return hn::Mul(load_n(d, e + i, count), vshare); });
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

template <bool kStream, class T>
void forward_rows(const SoftmaxArgs& args, const T* x, T* y, void* workspace) {
  const std::int64_t rows = args.outer;
  const std::int64_t cols = args.cols;
  const std::int64_t count = ceil_div(cols, kBlock);
  const auto lead = [&](std::int64_t at, std::size_t n) {
    return kStream ? before_line(y + at, n) : 0;
  };
  const auto reference_of = [&](std::int64_t r, std::int64_t b) {
    return reference(x + r * cols + b * kBlock, block_length(cols, b));
  };
  const auto sum_one = [&](std::int64_t r, std::int64_t b, float m, float* e) {
    const std::int64_t at = r * cols + b * kBlock;
    const std::size_t n = block_length(cols, b);
    return sum_block<kStream>(DF(), x + at, n, m, e + b * kBlock, lead(at, n));
  };
  const auto write_one = [&](std::int64_t r, std::int64_t b, float* e, float m, BlockSum row) {
    const std::int64_t at = r * cols + b * kBlock;
    const std::size_t n = block_length(cols, b);
    write_block<kStream>(DF(), x + at, e + b * kBlock, y + at, n, lead(at, n), m, row);
  };
  if (cols * 4 <= kCacheBytes) {
    const std::int64_t each = cpu::rows_per_task(2 * cols * static_cast<std::int64_t>(sizeof(T)));
    parallel_for(ceil_div(rows, each), [&](std::int64_t task) {
      float* e = cpu::thread_scratch(cols + 2 * count);
      auto* blocks = reinterpret_cast<BlockSum*>(e + cols);
      const std::int64_t end = std::min(rows, (task + 1) * each);
      float m = reference_of(task * each, 0);
      for (std::int64_t r = task * each; r < end; ++r) {
        for (std::int64_t b = 0; b < count; ++b) {
          // The next block's reference before this block's sum: short rows would wait for it.
          const std::int64_t next = b + 1 < count ? b + 1 : 0;
          const float next_m = next == 0 && r + 1 == end ? 0 : reference_of(r + (next == 0), next);
          blocks[b] = sum_one(r, b, m, e);
          m = next_m;
        }
        const BlockSum row = count == 1 ? blocks[0] : join(blocks, count);
        for (std::int64_t b = 0; b < count; ++b) write_one(r, b, e, blocks[b].m, row);
      }
      if (kStream) hwy::FlushStream();
    });
    return;
  }
  auto* blocks = static_cast<BlockSum*>(workspace);    // [count]
  auto* e = reinterpret_cast<float*>(blocks + count);  // [cols]
  for (std::int64_t r = 0; r < rows; ++r) {
    parallel_for(count, [&](std::int64_t b) { blocks[b] = sum_one(r, b, reference_of(r, b), e); });
    const BlockSum row = join(blocks, count);
    parallel_for(count, [&](std::int64_t b) {
      write_one(r, b, e, blocks[b].m, row);
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
              HWY_ATTR { store_n(d, largest(load_n(d, m + i, count), v), m + i, count); });
    sweep([&](std::size_t i, VF v, T*, std::size_t count) HWY_ATTR {
      const VF e = exp_for(d, T(), hn::Sub(v, load_n(d, m + i, count)));
      store_n(d, hn::Add(load_n(d, sum + i, count), e), sum + i, count);
    });
    sweep([&](std::size_t i, VF v, T* y, std::size_t count) HWY_ATTR {
      const VF e = exp_for(d, T(), hn::Sub(v, load_n(d, m + i, count)));
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

MT_REGISTER_CPU_KERNELS(softmax)
