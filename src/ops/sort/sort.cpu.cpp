// CPU kernels of sort (mlxtape/ops/sort.h): radix sort of entries, from the lowest digit up, stable in each pass.
// The counts of every digit are known after one look at the row, so digits that are the same in
// all keys (token ids, exponents of similar size) cost nothing more.
//
// A row of up to kRow columns stays with one thread and in its cache. Longer ones, and few of them, are cut
// into pieces: each thread counts its pieces, and moves its elements behind those of the pieces before.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "backends/cpu/device/tasks.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "sort_args.h"
#include "sort_keys.h"
#include "sort_radix.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kRow = 65536;
constexpr std::int64_t kFewRows = 16;
constexpr std::int64_t kFewest = 8192;  // columns worth cutting
constexpr std::int64_t kPiece = 16384;
constexpr std::int64_t kShort = 128;  // columns that are sorted by comparing

// Entry: u64, or u32 for rows of up to 65,536 elements of 16 bits.
template <class T, class Entry>
struct Radix {
  static constexpr int kIndexBits = sizeof(Entry) * 4;
  static constexpr int kPasses = sizeof(KeyOf<T>);

  static Entry entry(T v, std::int64_t index, bool down) {
    return static_cast<Entry>(key_in_order(v, down)) << kIndexBits | static_cast<Entry>(index);
  }
  static std::uint32_t index(Entry e) {
    return static_cast<std::uint32_t>(e & ((Entry{1} << kIndexBits) - 1));
  }
  static unsigned digit(Entry e, int pass) { return e >> (kIndexBits + 8 * pass) & 255U; }

  static void make(const T* x, std::int64_t begin, std::int64_t end, bool down, Entry* to,
                   Counts* counts) {
    for (int p = 0; p < kPasses; ++p) counts[p].fill(0);
    for (std::int64_t i = begin; i < end; ++i) {
      const Entry e = entry(x[i], i, down);
      to[i] = e;
      for (int p = 0; p < kPasses; ++p) ++counts[p][digit(e, p)];
    }
  }
};

// Where a pass puts its entries: memory for the next, or the result.
template <class T, class Entry>
struct Result {
  const T* x;
  T* values;  // may be null
  std::uint32_t* indices;
  std::int64_t keep;
  bool down;

  void put(std::uint32_t at, Entry e) const {
    if (at >= keep) return;
    const std::uint32_t i = Radix<T, Entry>::index(e);
    indices[at] = i;
    if (values != nullptr) values[at] = x[i];
  }
};

template <class T, class Entry>
void move(const Entry* from, std::int64_t begin, std::int64_t end, int pass, Counts& place,
          Entry* to, const Result<T, Entry>* result) {
  if (result != nullptr) {
    for (std::int64_t i = begin; i < end; ++i) {
      result->put(place[Radix<T, Entry>::digit(from[i], pass)]++, from[i]);
    }
  } else {
    for (std::int64_t i = begin; i < end; ++i) {
      to[place[Radix<T, Entry>::digit(from[i], pass)]++] = from[i];
    }
  }
}

// The passes whose digit is not the same in all n keys: into list, returns how many.
template <std::size_t kPasses>
int passes_needed(const std::array<Counts, kPasses>& counts, std::int64_t n,
                  std::array<int, kPasses>& list) {
  int needed = 0;
  for (std::size_t p = 0; p < kPasses; ++p) {
    const bool same =
        std::any_of(counts[p].begin(), counts[p].end(), [&](std::uint32_t c) { return c == n; });
    if (!same) list[static_cast<std::size_t>(needed++)] = static_cast<int>(p);
  }
  return needed;
}

template <class T, class Entry>
void sort_row(const T* x, std::int64_t n, Entry* a, Entry* b, const Result<T, Entry>& result) {
  using R = Radix<T, Entry>;
  const auto finish = [&](const Entry* sorted) {
    for (std::int64_t i = 0; i < n; ++i) result.put(static_cast<std::uint32_t>(i), sorted[i]);
  };
  if (n <= kShort) {
    for (std::int64_t i = 0; i < n; ++i) a[i] = R::entry(x[i], i, result.down);
    std::sort(a, a + n);
    return finish(a);
  }
  std::array<Counts, R::kPasses> counts;
  R::make(x, 0, n, result.down, a, counts.data());
  std::array<int, R::kPasses> list;
  const int needed = passes_needed(counts, n, list);
  if (needed == 0) return finish(a);
  for (int i = 0; i < needed; ++i) {
    const int p = list[static_cast<std::size_t>(i)];
    Counts& place = counts[static_cast<std::size_t>(p)];
    places(place);
    move(a, 0, n, p, place, b, i + 1 == needed ? &result : nullptr);
    std::swap(a, b);
  }
}

// ---- one long row, all threads ----

bool is_cut(const SortArgs& args) {
  return args.cols > kRow || (args.cols >= kFewest && args.rows < kFewRows);
}
std::int64_t piece_of(std::int64_t n) { return std::max(kPiece, ceil_div(n, 256)); }

struct Scratch {
  std::size_t a, b, counts, bytes;  // where each begins, and all of it
};
template <int kPasses>
Scratch scratch_of(std::int64_t n) {
  const auto entries = static_cast<std::size_t>(n) * sizeof(std::uint64_t);
  const auto pieces = static_cast<std::size_t>(ceil_div(n, piece_of(n)));
  return {0, entries, 2 * entries, 2 * entries + pieces * kPasses * sizeof(Counts)};
}

template <class T>
void sort_long_row(const T* x, std::int64_t n, void* scratch,
                   const Result<T, std::uint64_t>& result) {
  using R = Radix<T, std::uint64_t>;
  const Scratch at = scratch_of<R::kPasses>(n);
  auto* memory = static_cast<std::byte*>(scratch);
  auto* a = reinterpret_cast<std::uint64_t*>(memory + at.a);
  auto* b = reinterpret_cast<std::uint64_t*>(memory + at.b);
  auto* counts = reinterpret_cast<Counts*>(memory + at.counts);  // [pieces, passes]
  const std::int64_t each = piece_of(n), pieces = ceil_div(n, each);
  const auto for_pieces = [&](auto&& body) {
    parallel_for(pieces, [&](std::int64_t piece) {
      body(counts + piece * R::kPasses, piece * each, std::min(n, (piece + 1) * each));
    });
  };
  for_pieces([&](Counts* own, std::int64_t begin, std::int64_t end) {
    R::make(x, begin, end, result.down, a, own);
  });
  std::array<Counts, R::kPasses> all{};
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    for (std::size_t p = 0; p < R::kPasses; ++p) {
      const Counts& own = counts[piece * R::kPasses + static_cast<std::int64_t>(p)];
      for (std::size_t d = 0; d < kDigits; ++d) all[p][d] += own[d];
    }
  }
  std::array<int, R::kPasses> list;
  const int needed = passes_needed(all, n, list);
  if (needed == 0) {
    return for_pieces([&](Counts*, std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) result.put(static_cast<std::uint32_t>(i), a[i]);
    });
  }
  for (int i = 0; i < needed; ++i) {
    const int p = list[static_cast<std::size_t>(i)];
    if (i != 0) {  // the entries are in another order than when they were made
      for_pieces([&](Counts* own, std::int64_t begin, std::int64_t end) {
        own[p].fill(0);
        for (std::int64_t k = begin; k < end; ++k) ++own[p][R::digit(a[k], p)];
      });
    }
    std::uint32_t before = 0;
    for (std::size_t d = 0; d < kDigits; ++d) {
      for (std::int64_t piece = 0; piece < pieces; ++piece) {
        before += std::exchange(counts[piece * R::kPasses + p][d], before);
      }
    }
    for_pieces([&](Counts* own, std::int64_t begin, std::int64_t end) {
      move(a, begin, end, p, own[p], b, i + 1 == needed ? &result : nullptr);
    });
    std::swap(a, b);
  }
}

template <class T>
std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const SortArgs*>(args);
  return is_cut(a) ? scratch_of<sizeof(KeyOf<T>)>(a.cols).bytes : 0;
}

template <class T>
void sort_fwd(const KernelCall& call) {
  const auto& args = call.as<SortArgs>();
  const T* x = call.input<T>(0);
  T* values = call.output<T>(0);
  auto* indices = call.output<std::uint32_t>(1);
  const auto result_of = [&]<class Entry>(std::int64_t row, Entry) {
    const std::int64_t at = row * args.keep;
    return Result<T, Entry>{x + row * args.cols, values == nullptr ? nullptr : values + at,
                            indices + at, args.keep, args.down != 0};
  };
  if (is_cut(args)) {
    for (std::int64_t r = 0; r < args.rows; ++r) {
      sort_long_row(x + r * args.cols, args.cols, call.workspace, result_of(r, std::uint64_t{}));
    }
    return;
  }
  using Entry = std::conditional_t<sizeof(T) == 2, std::uint32_t, std::uint64_t>;
  const std::int64_t each = cpu::rows_per_task(args.cols * 16);
  parallel_for(ceil_div(args.rows, each), [&](std::int64_t task) {
    auto* a = reinterpret_cast<Entry*>(
        cpu::thread_scratch(2 * args.cols * static_cast<std::int64_t>(sizeof(Entry) / 4)));
    for (std::int64_t r = task * each; r < std::min(args.rows, (task + 1) * each); ++r) {
      sort_row(x + r * args.cols, args.cols, a, a + args.cols, result_of(r, Entry{}));
    }
  });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  registry.add(Backend::kCpu, std::string("sort_fwd_") + name_of(kDType<T>), sort_fwd<T>,
               workspace<T>);
}

}  // namespace

void register_sort_argmax_cpu(KernelRegistry& registry);
void register_sort_select_cpu(KernelRegistry& registry);

void register_sort_cpu(KernelRegistry& registry) {
  register_sort_argmax_cpu(registry);
  register_sort_select_cpu(registry);
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  add_kernels<std::int32_t>(registry);
  add_kernels<std::uint32_t>(registry);
}

}  // namespace mlxtape::ops
