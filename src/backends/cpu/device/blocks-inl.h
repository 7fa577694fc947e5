// Rows in blocks: a block's exponentials are summed relative to a reference of its own, the largest of
// its first elements, so that nobody looks for the row's maximum first. Any reference does that is less than
// 2^40 off; a block whose sum says otherwise is done again with its true maximum. Blocks are joined in
// their order, so a row gives the same bits whichever threads had its blocks.
#include <cmath>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/core/threads.h"

#if defined(MLXTAPE_CPU_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_BLOCKS_INL_H_
#undef MLXTAPE_CPU_BLOCKS_INL_H_
#else
#define MLXTAPE_CPU_BLOCKS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {

inline constexpr std::int64_t kBlock = 2048;  // columns with one reference
inline constexpr std::size_t kSample = 64;    // elements it is the largest of

inline std::size_t block_length(std::int64_t cols, std::int64_t block) {
  return static_cast<std::size_t>(std::min(kBlock, cols - block * kBlock));
}

// NaN is passed over; −inf where there is nothing else. The sum of exponentials has it.
template <class T>
HWY_INLINE float row_max(DF d, const T* x, std::size_t n) {
  VF m = hn::Set(d, -INFINITY);
  for_row(
      d, n, [&](std::size_t i) HWY_ATTR { m = largest(m, load(d, x + i)); },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        m = hn::IfThenElse(hn::FirstN(d, count), largest(m, load_n(d, x + i, count)), m);
      });
  return max_lanes(d, m);
}

template <class T>
HWY_INLINE float reference(const T* x, std::size_t n) {
  return row_max(DF(), x, std::min(n, kSample));
}

// Is m, one of a block's numbers, good enough as its reference, given Σ exp(x − m)? −inf is not: it
// leaves nothing to work with.
HWY_INLINE bool good_reference(float m, float sum) {
  return m > -INFINITY && sum >= 0.5F && sum < 0x1p40F;
}

// −inf − −inf would be NaN: a block of −inf alone adds nothing, one with NaN adds NaN.
HWY_INLINE float finite_reference(float m) { return m == -INFINITY ? 0 : m; }

// The sum of a block's exponentials relative to m.
struct BlockSum {
  float m, sum;
};

// Σ exp(x − m)
template <class T>
HWY_INLINE float sum_exp(DF d, const T* x, std::size_t n, float m) {
  const std::size_t lanes = hn::Lanes(d);
  const VF vm = hn::Set(d, finite_reference(m));
  VF sum_a = hn::Zero(d), sum_b = sum_a;
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    VF a, b;
    load_pair(d, x + i, a, b);
    sum_a = hn::Add(sum_a, exp_for(d, T(), hn::Sub(a, vm)));
    sum_b = hn::Add(sum_b, exp_for(d, T(), hn::Sub(b, vm)));
  }
  for (std::size_t count; i < n; i += count) {
    count = std::min(lanes, n - i);
    const VF e = exp_for(d, T(), hn::Sub(load_n(d, x + i, count), vm));
    sum_a = hn::Add(sum_a, hn::IfThenElseZero(hn::FirstN(d, count), e));
  }
  return sum_lanes(d, hn::Add(sum_a, sum_b));
}

template <class T>
HWY_INLINE BlockSum sum_of_block(DF d, const T* x, std::size_t n) {
  float m = reference(x, n);
  float sum = sum_exp(d, x, n, m);
  if (!good_reference(m, sum)) {
    m = row_max(d, x, n);
    sum = sum_exp(d, x, n, m);
  }
  return {m, sum};
}

// m is one of the numbers, so that Σ exp(x − m) is at least 1, whatever an exponential's last bit; NaN stays.
HWY_INLINE float at_least_one(float sum) { return sum < 1 ? 1 : sum; }

// Blocks in order, whatever thread made them. k: exponentials are of (x − m)·k.
inline BlockSum join(const BlockSum* blocks, std::int64_t count, float k = 1) {
  float m = -INFINITY;
  for (std::int64_t b = 0; b < count; ++b) m = std::max(m, blocks[b].m);
  float sum = 0;
  for (std::int64_t b = 0; b < count; ++b) sum += blocks[b].sum * std::exp((blocks[b].m - m) * k);
  return {m, at_least_one(sum)};
}

// Where there are fewer rows than this, of at least so many blocks, a row's blocks are shared by the
// threads. The numbers do not matter for the result.
inline constexpr std::int64_t kFewRows = 32;
inline constexpr std::int64_t kManyBlocks = 16;

// For each row r: each of its blocks by part(r, b) -> Part, then whole(r, parts) -> what is known of the
// row, then each of its blocks by write(r, b, that). row_bytes: what a row moves in all.
template <class Part, class PartFn, class WholeFn, class WriteFn>
void rows_in_blocks(std::int64_t rows, std::int64_t cols, std::int64_t row_bytes,
                    const PartFn& part, const WholeFn& whole, const WriteFn& write) {
  const std::int64_t count = ceil_div(cols, kBlock);
  const auto room = [&] {
    return reinterpret_cast<Part*>(
        cpu::thread_scratch(count * static_cast<std::int64_t>(sizeof(Part) / sizeof(float))));
  };
  if (rows < kFewRows && count >= kManyBlocks) {
    Part* parts = room();
    for (std::int64_t r = 0; r < rows; ++r) {
      parallel_for(count, [&](std::int64_t b) { parts[b] = part(r, b); });
      const auto row = whole(r, static_cast<const Part*>(parts));
      parallel_for(count, [&](std::int64_t b) {
        write(r, b, row);
        hwy::FlushStream();
      });
    }
    return;
  }
  const std::int64_t each = cpu::rows_per_task(row_bytes);
  parallel_for(ceil_div(rows, each), [&](std::int64_t task) {
    Part* parts = room();
    for (std::int64_t r = task * each; r < std::min(rows, (task + 1) * each); ++r) {
      for (std::int64_t b = 0; b < count; ++b) parts[b] = part(r, b);
      const auto row = whole(r, static_cast<const Part*>(parts));
      for (std::int64_t b = 0; b < count; ++b) write(r, b, row);
    }
    hwy::FlushStream();
  });
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
