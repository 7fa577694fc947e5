// CPU kernels of sort that look for the best few of a row (Best in sort_args.h) and of its gradient.
//
// A row is read once. What is better than the worst of the best so far goes into a buffer of twice as many;
// when that is full, the better half stays. Of n elements in random order about count · ln(n / count) are
// ever better, so the time is that of reading and comparing; in the worst order all of them are, which
// costs a few comparisons for each.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sort/sort_select.cpu.cpp"
#include <hwy/foreach_target.h>

#include <functional>
#include <string>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "sort_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

using VI = hn::Vec<DI>;

// Lanes, or the first n, as signed integers: larger is better.
template <Best kBest>
HWY_INLINE VI score_of(VF v) {
  const DI di;
  v = hn::Add(v, hn::Zero(DF()));  // −0 becomes +0
  const VI bits = hn::BitCast(di, v);
  VI key = hn::Xor(bits, hn::And(hn::ShiftRight<31>(bits), hn::Set(di, 0x7fffffff)));
  if constexpr (kBest == Best::kFirst) key = hn::Not(key);
  const std::int32_t nan = kBest == Best::kLast ? 0x7fffffff : -0x7fffffff - 1;
  return hn::IfThenElse(hn::RebindMask(di, hn::IsNaN(v)), hn::Set(di, nan), key);
}
template <Best kBest, class T>
HWY_INLINE VI scores(const T* x, std::size_t n) {
  const DI di;
  if constexpr (std::is_same_v<T, std::int32_t> || std::is_same_v<T, std::uint32_t>) {
    VI key = hn::BitCast(di, load_n(DF(), reinterpret_cast<const float*>(x), n));
    if constexpr (std::is_same_v<T, std::uint32_t>) {
      key = hn::Xor(key, hn::Set(di, -0x7fffffff - 1));
    }
    return kBest == Best::kFirst ? hn::Not(key) : key;
  } else {
    return score_of<kBest>(load_n(DF(), x, n));
  }
}
template <Best kBest, class T>
HWY_INLINE VI scores(const T* x) {
  const DI di;
  if constexpr (std::is_same_v<T, std::int32_t> || std::is_same_v<T, std::uint32_t>) {
    VI key = hn::LoadU(di, reinterpret_cast<const std::int32_t*>(x));
    if constexpr (std::is_same_v<T, std::uint32_t>) {
      key = hn::Xor(key, hn::Set(di, -0x7fffffff - 1));
    }
    return kBest == Best::kFirst ? hn::Not(key) : key;
  } else {
    return score_of<kBest>(load(DF(), x));
  }
}

// A score above the index, so that no two are equal: larger is better. kLast prefers the later of equals.
template <Best kBest>
std::uint64_t entry_of(std::int32_t score, std::uint32_t index) {
  const auto key = static_cast<std::uint32_t>(score) ^ 0x80000000U;
  return std::uint64_t{key} << 32U | (kBest == Best::kLast ? index : ~index);
}
template <Best kBest>
std::uint32_t index_of(std::uint64_t entry) {
  const auto low = static_cast<std::uint32_t>(entry);
  return kBest == Best::kLast ? low : ~low;
}
std::int32_t score_of_entry(std::uint64_t entry) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(entry >> 32U) ^ 0x80000000U);
}

constexpr std::int64_t room_for(std::int64_t count) { return 2 * count + 64; }

// The best `count` of n elements in the first places of `best`, in order. best: room_for(count) + a vector.
template <Best kBest, class T>
void select_row(const T* x, std::int64_t n, std::int64_t count, std::uint64_t* best) {
  const DI di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(di));
  const std::int64_t full = room_for(count);
  std::int64_t have = 0;
  HWY_ALIGN std::int32_t score[hn::MaxLanes(DI())];
  const auto keep_better = [&]() {
    std::nth_element(best, best + count - 1, best + have, std::greater<>());
    have = count;
  };
  // The first ones fill the buffer.
  std::int64_t i = 0;
  for (; i < n && have < full; i += lanes) {
    const std::int64_t some = std::min(lanes, n - i);
    hn::Store(scores<kBest>(x + i, static_cast<std::size_t>(some)), di, score);
    for (std::int64_t k = 0; k < some; ++k) {
      best[have++] = entry_of<kBest>(score[k], static_cast<std::uint32_t>(i + k));
    }
  }
  if (i < n) {
    keep_better();
    VI worst = hn::Set(di, score_of_entry(best[count - 1]));
    const auto is_better = [&](VI v) HWY_ATTR {
      return kBest == Best::kLast ? hn::Not(hn::Lt(v, worst)) : hn::Gt(v, worst);
    };
    // The lanes of v, elements from `at` on, that are better.
    const auto look = [&](VI v, std::int64_t at, std::int64_t some) HWY_ATTR {
      std::uint8_t mask[8] = {};
      hn::StoreMaskBits(di, is_better(v), mask);
      unsigned bits = mask[0] | static_cast<unsigned>(mask[1]) << 8U;
      bits &= (1U << some) - 1;
      if (bits == 0) return;
      hn::Store(v, di, score);
      for (; bits != 0; bits &= bits - 1) {
        const auto k = static_cast<std::int64_t>(__builtin_ctz(bits));
        best[have++] = entry_of<kBest>(score[k], static_cast<std::uint32_t>(at + k));
      }
      if (have >= full) {
        keep_better();
        worst = hn::Set(di, score_of_entry(best[count - 1]));
      }
    };
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
  if (have > count) keep_better();
  std::sort(best, best + count, std::greater<>());
}

// The indices of all elements that are worse than `worst`, in their order.
template <Best kBest, class T>
void write_others(const T* x, std::int64_t n, std::uint64_t worst, std::uint32_t* indices) {
  const DI di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(di));
  HWY_ALIGN std::int32_t score[hn::MaxLanes(DI())];
  for (std::int64_t i = 0; i < n; i += lanes) {
    const std::int64_t some = std::min(lanes, n - i);
    hn::Store(scores<kBest>(x + i, static_cast<std::size_t>(some)), di, score);
    for (std::int64_t k = 0; k < some; ++k) {
      const auto index = static_cast<std::uint32_t>(i + k);
      if (entry_of<kBest>(score[k], index) < worst) *indices++ = index;
    }
  }
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
    auto* best =
        reinterpret_cast<std::uint64_t*>(cpu::thread_scratch(2 * (room_for(args.count) + 4 * 64)));
    for (std::int64_t r = task * each; r < std::min(args.rows, (task + 1) * each); ++r) {
      const T* row = x + r * args.cols;
      std::uint32_t* to = indices + r * cols;
      select_row<kBest>(row, args.cols, args.count, best);
      const bool at_end = args.whole != 0 && kBest == Best::kLast;
      for (std::int64_t j = 0; j < args.count; ++j) {
        to[at_end ? cols - 1 - j : j] = index_of<kBest>(best[j]);
      }
      if (args.whole != 0) {
        write_others<kBest>(row, args.cols, best[args.count - 1], at_end ? to : to + args.count);
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
      if (args.count < args.cols) std::fill(to, to + args.cols, T());
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
