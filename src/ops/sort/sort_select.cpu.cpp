// CPU kernels of sort that look for the best few of a row (Best in sort_args.h) and of its gradient.
//
// A row is read once. What is better than the worst of the best so far goes into a buffer; when that is full, it is
// sorted and the best stay. Where to begin is guessed from a sample: so that about 1.5 · count elements are better,
// and the buffer is sorted once. If fewer than count are, the row is read again without a guess. A few best
// are kept in order all the time instead.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sort/sort_select.cpu.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "sort_args.h"
#include "sort_radix.h"
#include "sort_scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

template <Best kBest, class T>
HWY_INLINE VI scores(const T* x) {
  return scores_of<(kBest == Best::kFirst), (kBest == Best::kLast)>(x);
}
template <Best kBest, class T>
HWY_INLINE VI scores(const T* x, std::size_t n) {
  return first_scores_of<(kBest == Best::kFirst), (kBest == Best::kLast)>(x, n);
}

// A rank above the index, so that no two are equal: smaller is better, but for kLast, where the last is best.
template <Best kBest>
HWY_INLINE std::uint64_t entry_of(std::int32_t score, std::int64_t index) {
  const auto key = static_cast<std::uint32_t>(score) ^ 0x80000000U;
  return std::uint64_t{kBest == Best::kLast ? key : ~key} << 32U |
         static_cast<std::uint32_t>(index);
}
template <Best kBest>
std::int32_t score_of_entry(std::uint64_t entry) {
  const auto key = static_cast<std::uint32_t>(entry >> 32U);
  return static_cast<std::int32_t>((kBest == Best::kLast ? key : ~key) ^ 0x80000000U);
}

constexpr std::int64_t kFew = 32;       // best that are kept in order
constexpr std::int64_t kSample = 1024;  // elements
constexpr std::int64_t kMaxLanes = 16;
constexpr std::int64_t room_for(std::int64_t count) { return 4 * count + 2 * kMaxLanes; }

// Calls found(score, index) for every element from `begin` on that is better than `worst`, which found may raise.
template <Best kBest, class T, class Found>
HWY_INLINE void for_better(const T* x, std::int64_t begin, std::int64_t n, std::int32_t& worst,
                           const Found& found) {
  const DI di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(di));
  // kLast: the later of equals is better.
  const auto is_better = [&](VI v) HWY_ATTR {
    const VI w = hn::Set(di, worst);
    return kBest == Best::kLast ? hn::Not(hn::Lt(v, w)) : hn::Gt(v, w);
  };
  HWY_ALIGN std::int32_t score[hn::MaxLanes(DI())];
  const auto look = [&](VI v, std::int64_t at, std::int64_t some) HWY_ATTR {
    std::uint8_t mask[8] = {};
    hn::StoreMaskBits(di, is_better(v), mask);
    unsigned bits = mask[0] | static_cast<unsigned>(mask[1]) << 8U;
    bits &= (1U << some) - 1;
    if (bits == 0) return;
    hn::Store(v, di, score);
    for (; bits != 0; bits &= bits - 1) {
      const int k = __builtin_ctz(bits);
      found(score[k], at + k);
    }
  };
  std::int64_t i = begin;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const VI a = scores<kBest>(x + i), b = scores<kBest>(x + i + lanes);
    const VI c = scores<kBest>(x + i + 2 * lanes), d = scores<kBest>(x + i + 3 * lanes);
    if (HWY_LIKELY(hn::AllFalse(di, is_better(hn::Max(hn::Max(a, b), hn::Max(c, d)))))) continue;
    look(a, i, lanes);
    look(b, i + lanes, lanes);
    look(c, i + 2 * lanes, lanes);
    look(d, i + 3 * lanes, lanes);
  }
  for (; i < n; i += lanes) {
    const std::int64_t some = std::min(lanes, n - i);
    look(scores<kBest>(x + i, static_cast<std::size_t>(some)), i, some);
  }
}

// The first `some` entries of a row.
template <Best kBest, class T>
HWY_INLINE void make_entries(const T* x, std::int64_t some, std::uint64_t* to) {
  const DI di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(di));
  HWY_ALIGN std::int32_t score[hn::MaxLanes(DI())];
  for (std::int64_t i = 0; i < some; i += lanes) {
    const std::int64_t part = std::min(lanes, some - i);
    hn::Store(scores<kBest>(x + i, static_cast<std::size_t>(part)), di, score);
    for (std::int64_t k = 0; k < part; ++k) to[i + k] = entry_of<kBest>(score[k], i + k);
  }
}

// The best count ≤ kFew, each put where it belongs.
template <Best kBest, class T>
void select_few(const T* x, std::int64_t n, std::int64_t count, std::uint64_t* best) {
  const auto is_before = [](std::uint64_t a, std::uint64_t b) {
    return kBest == Best::kLast ? a > b : a < b;
  };
  const auto put = [&](std::uint64_t e, std::int64_t at) {
    for (; at > 0 && is_before(e, best[at - 1]); --at) best[at] = best[at - 1];
    best[at] = e;
  };
  make_entries<kBest>(x, count, best);
  for (std::int64_t i = 1; i < count; ++i) put(best[i], i);
  std::int32_t worst = score_of_entry<kBest>(best[count - 1]);
  for_better<kBest>(x, count, n, worst, [&](std::int32_t score, std::int64_t index) HWY_ATTR {
    const std::uint64_t e = entry_of<kBest>(score, index);
    if (!is_before(e, best[count - 1])) return;  // no longer
    put(e, count - 1);
    worst = score_of_entry<kBest>(best[count - 1]);
  });
}

// A score that more than count elements are likely to reach, and not many more.
template <Best kBest, class T>
std::int32_t guess(const T* x, std::int64_t n, std::int64_t count) {
  const DI di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(di));
  HWY_ALIGN std::int32_t sample[kSample];
  const std::int64_t step = n / (kSample / lanes);
  for (std::int64_t i = 0; i < kSample / lanes; ++i) {
    hn::Store(scores<kBest>(x + i * step), di, sample + i * lanes);
  }
  // 8 more than 1.5 · count of n: of rows of 150,000 and a count of 1024 one in 3000 has not enough.
  const std::int64_t rank = kSample * 3 * count / (2 * n) + 8;
  std::nth_element(sample, sample + rank, sample + kSample, std::greater<>());
  return sample[rank];
}

// The best `count` of n elements, in order, at the address returned: best or other. Both: room_for(count).
template <Best kBest, class T>
std::uint64_t* select_row(const T* x, std::int64_t n, std::int64_t count, std::uint64_t* best,
                          std::uint64_t* other) {
  if (count <= kFew) {
    select_few<kBest>(x, n, count, best);
    return best;
  }
  const std::int64_t full = room_for(count) - kMaxLanes;
  std::int64_t have = 0;
  // Entries come in the order of their indices, also after what was kept, so that the ranks alone are sorted.
  const auto keep_best = [&]() {
    std::uint64_t* sorted = radix_sort_upper(best, other, have);
    if (sorted != best) std::swap(best, other);
    if (kBest == Best::kLast) std::move(best + have - count, best + have, best);
    have = count;
  };
  std::int32_t worst = 0;
  const auto collect = [&](std::int64_t begin) {
    for_better<kBest>(x, begin, n, worst, [&](std::int32_t score, std::int64_t index) HWY_ATTR {
      best[have++] = entry_of<kBest>(score, index);
      if (have < full) return;
      keep_best();
      worst = score_of_entry<kBest>(best[kBest == Best::kLast ? 0 : count - 1]);
    });
  };
  if (n >= 8 * count && n >= 8 * kSample) {
    worst = guess<kBest>(x, n, count);
    if (kBest != Best::kLast && worst > std::numeric_limits<std::int32_t>::min()) --worst;
    collect(0);
  }
  if (have < count) {
    const std::int64_t begin = std::min(n, full);
    make_entries<kBest>(x, begin, best);
    have = begin;
    if (begin < n) {
      keep_best();
      worst = score_of_entry<kBest>(best[kBest == Best::kLast ? 0 : count - 1]);
      collect(begin);
    }
  }
  keep_best();
  if (kBest == Best::kLast) std::reverse(best, best + count);
  return best;
}

// The indices of all elements that are worse than `worst`, in their order: up to `end`.
template <Best kBest, class T>
void write_others(const T* x, std::int64_t n, std::uint64_t worst, std::uint32_t* indices,
                  const std::uint32_t* end) {
  const DI di;
  const DU du;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(di));
  const VI limit = hn::Set(di, score_of_entry<kBest>(worst));
  HWY_ALIGN std::int32_t score[hn::MaxLanes(DI())];
  std::int64_t i = 0;
  const auto one_by_one = [&](std::int64_t some) HWY_ATTR {
    hn::Store(scores<kBest>(x + i, static_cast<std::size_t>(some)), di, score);
    for (std::int64_t k = 0; k < some; ++k) {
      const std::uint64_t e = entry_of<kBest>(score[k], i + k);
      if (kBest == Best::kLast ? e < worst : e > worst) {
        *indices++ = static_cast<std::uint32_t>(i + k);
      }
    }
  };
  for (; i + lanes <= n; i += lanes) {
    const VI v = scores<kBest>(x + i);
    // Where vectors are stored by mixing them with memory, that must not be another row's.
    if (end - indices < lanes || !hn::AllFalse(di, hn::Eq(v, limit))) {
      one_by_one(lanes);
    } else {
      const auto index = hn::Iota(du, static_cast<std::uint32_t>(i));
      indices += hn::CompressBlendedStore(index, hn::RebindMask(du, hn::Lt(v, limit)), du, indices);
    }
  }
  if (i < n) one_by_one(n - i);
}

template <Best kBest, class T>
void select_rows(const KernelCall& call) {
  const auto& args = call.as<SelectArgs>();
  const T* x = call.input<T>(0);
  T* values = call.output<T>(0);
  auto* indices = call.output<std::uint32_t>(1);
  const std::int64_t cols = args.whole != 0 ? args.cols : args.count;
  const std::int64_t each =
      cpu::rows_per_task(args.cols * static_cast<std::int64_t>(sizeof(T)) + args.count * 64);
  parallel_for(ceil_div(args.rows, each), [&](std::int64_t task) {
    auto* room = reinterpret_cast<std::uint64_t*>(cpu::thread_scratch(4 * room_for(args.count)));
    for (std::int64_t r = task * each; r < std::min(args.rows, (task + 1) * each); ++r) {
      const T* row = x + r * args.cols;
      std::uint32_t* to = indices + r * cols;
      const std::uint64_t* best =
          select_row<kBest>(row, args.cols, args.count, room, room + room_for(args.count));
      const bool at_end = args.whole != 0 && kBest == Best::kLast;
      for (std::int64_t j = 0; j < args.count; ++j) {
        to[at_end ? cols - 1 - j : j] = static_cast<std::uint32_t>(best[j]);
      }
      if (args.whole != 0) {
        std::uint32_t* others = at_end ? to : to + args.count;
        write_others<kBest>(row, args.cols, best[args.count - 1], others,
                            others + args.cols - args.count);
      }
      if (values == nullptr) continue;
      for (std::int64_t j = 0; j < cols; ++j) values[r * cols + j] = row[to[j]];
    }
  });
}

template <class T>
void select_fwd(const KernelCall& call) {
  switch (call.as<SelectArgs>().best) {
    case Best::kLargest: return select_rows<Best::kLargest, T>(call);
    case Best::kFirst: return select_rows<Best::kFirst, T>(call);
    case Best::kLast: return select_rows<Best::kLast, T>(call);
  }
}

// ---- gradient ----

template <class T>
void sort_bwd(const KernelCall& call) {
  const auto& args = call.as<SortBackwardArgs>();
  const T* dy = call.input<T>(0);
  const auto* indices = call.input<std::uint32_t>(1);
  T* dx = call.output<T>(0);
  const std::int64_t each =
      cpu::rows_per_task((args.cols + args.count) * static_cast<std::int64_t>(sizeof(T)));
  parallel_for(ceil_div(args.rows, each), [&](std::int64_t task) {
    for (std::int64_t r = task * each; r < std::min(args.rows, (task + 1) * each); ++r) {
      T* to = dx + r * args.cols;
      for (std::int64_t j = r * args.count; j < (r + 1) * args.count; ++j) to[indices[j]] = dy[j];
    }
  });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "select_fwd_" + type, select_fwd<T>);
  if constexpr (is_float(kDType<T>)) registry.add(Backend::kCpu, "sort_bwd_" + type, sort_bwd<T>);
}

}  // namespace

void register_sort_select(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  add_kernels<std::int32_t>(registry);
  add_kernels<std::uint32_t>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(sort_select)
