// CPU kernels of argmax and argmin (mlxtape/ops/sort.h). Rows are read for their best score alone, then the piece
// that has it is searched; it is still in the cache. Otherwise neighbouring results are the lanes. Long ones
// are cut into chunks whose best are compared in order. Bound by memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sort/sort_argmax.cpu.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <limits>
#include <string>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "sort_args.h"
#include "sort_scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kPiece = 4096;   // elements whose best is known together
constexpr std::int64_t kTile = 1024;    // results side by side
constexpr std::int64_t kChunk = 65536;  // elements, of one or several results

struct Found {
  std::int32_t score;
  std::uint32_t index;
};

std::int64_t chunk_of(const ArgmaxArgs& a) {  // in elements of one result
  return std::max<std::int64_t>(64, kChunk / std::min(a.inner, kTile));
}
std::int64_t chunks_of(const ArgmaxArgs& a) { return ceil_div(a.count, chunk_of(a)); }
std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const ArgmaxArgs*>(args);
  const std::int64_t chunks = chunks_of(a);
  return chunks == 1 ? 0 : static_cast<std::size_t>(a.outer * chunks * a.inner) * sizeof(Found);
}

// The first of the best of n neighbours.
template <bool kSmall, class T>
Found best_of_row(const T* x, std::int64_t n) {
  const DI di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(di));
  Found best{std::numeric_limits<std::int32_t>::min(), 0};
  std::int64_t piece = 0;  // where the best is
  for (std::int64_t begin = 0; begin < n; begin += kPiece) {
    const std::int64_t end = std::min(n, begin + kPiece);
    VI a = hn::Set(di, std::numeric_limits<std::int32_t>::min());
    VI b = a;
    std::int64_t i = begin;
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      a = hn::Max(a, scores_of<kSmall, true>(x + i));
      b = hn::Max(b, scores_of<kSmall, true>(x + i + lanes));
    }
    std::int32_t score = hn::GetLane(hn::MaxOfLanes(di, hn::Max(a, b)));
    HWY_ALIGN std::int32_t rest[hn::MaxLanes(DI())];
    while (i < end) {
      const std::int64_t some = std::min(lanes, end - i);
      hn::Store(first_scores_of<kSmall, true>(x + i, static_cast<std::size_t>(some)), di, rest);
      score = std::max(score, *std::max_element(rest, rest + some));
      i += some;
    }
    if (score > best.score) {
      best.score = score;
      piece = begin;
    }
  }
  const VI wanted = hn::Set(di, best.score);
  std::int64_t i = piece;
  for (; i + lanes <= n; i += lanes) {
    const auto at = hn::FindFirstTrue(di, hn::Eq(scores_of<kSmall, true>(x + i), wanted));
    if (at >= 0) {
      best.index = static_cast<std::uint32_t>(i + at);
      return best;
    }
  }
  HWY_ALIGN std::int32_t rest[hn::MaxLanes(DI())];
  hn::Store(first_scores_of<kSmall, true>(x + i, static_cast<std::size_t>(n - i)), di, rest);
  const auto* at = std::find(rest, rest + (n - i), best.score);
  best.index = static_cast<std::uint32_t>(i + (at - rest));
  return best;
}

// The same for `width` ≤ kTile columns of n rows, inner elements apart; put(column, found).
template <bool kSmall, class T, class Put>
void best_of_columns(const T* x, std::int64_t n, std::int64_t inner, std::int64_t width,
                     const Put& put) {
  const DI di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(di));
  HWY_ALIGN std::int32_t score[kTile];
  HWY_ALIGN std::int32_t index[kTile];
  std::fill(score, score + kTile, std::numeric_limits<std::int32_t>::min());
  std::fill(index, index + kTile, 0);
  for (std::int64_t r = 0; r < n; ++r) {
    const T* row = x + r * inner;
    const VI here = hn::Set(di, static_cast<std::int32_t>(r));
    const auto join = [&](VI v, std::int64_t c) HWY_ATTR {
      const VI old = hn::Load(di, score + c);
      const auto better = hn::Gt(v, old);
      hn::Store(hn::IfThenElse(better, v, old), di, score + c);
      hn::Store(hn::IfThenElse(better, here, hn::Load(di, index + c)), di, index + c);
    };
    std::int64_t c = 0;
    for (; c + lanes <= width; c += lanes) join(scores_of<kSmall, true>(row + c), c);
    if (c < width)
      join(first_scores_of<kSmall, true>(row + c, static_cast<std::size_t>(width - c)), c);
  }
  for (std::int64_t c = 0; c < width; ++c) {
    put(c, Found{score[c], static_cast<std::uint32_t>(index[c])});
  }
}

template <bool kSmall, class T>
void run(const ArgmaxArgs& args, const T* x, std::uint32_t* indices, Found* parts) {
  const std::int64_t chunk = chunk_of(args), chunks = chunks_of(args);
  const std::int64_t tiles = ceil_div(args.inner, kTile);
  const std::int64_t work = args.outer * chunks * tiles;
  const std::int64_t each =
      cpu::rows_per_task(std::min(args.count, chunk) * std::min(args.inner, kTile) *
                         static_cast<std::int64_t>(sizeof(T)));
  const auto one = [&](std::int64_t i) HWY_ATTR {
    const std::int64_t tile = i % tiles, k = i / tiles % chunks, outer = i / tiles / chunks;
    const std::int64_t begin = k * chunk, n = std::min(chunk, args.count - begin);
    const std::int64_t first = tile * kTile, width = std::min(kTile, args.inner - first);
    const T* from = x + (outer * args.count + begin) * args.inner + first;
    const auto put = [&](std::int64_t c, Found found) {
      found.index += static_cast<std::uint32_t>(begin);
      if (parts == nullptr) {
        indices[outer * args.inner + first + c] = found.index;
      } else {
        parts[(outer * chunks + k) * args.inner + first + c] = found;
      }
    };
    if (args.inner == 1) {
      put(0, best_of_row<kSmall>(from, n));
    } else {
      best_of_columns<kSmall>(from, n, args.inner, width, put);
    }
  };
  parallel_for(ceil_div(work, each), [&](std::int64_t task) {
    for (std::int64_t i = task * each; i < std::min(work, (task + 1) * each); ++i) one(i);
  });
  if (parts == nullptr) return;
  const std::int64_t results = args.outer * args.inner, some = 1024;
  parallel_for(ceil_div(results, some), [&](std::int64_t task) {
    for (std::int64_t i = task * some; i < std::min(results, (task + 1) * some); ++i) {
      const Found* part = parts + i / args.inner * chunks * args.inner + i % args.inner;
      Found best = *part;
      for (std::int64_t k = 1; k < chunks; ++k) {
        part += args.inner;
        if (part->score > best.score) best = *part;
      }
      indices[i] = best.index;
    }
  });
}

template <class T>
void argmax_fwd(const KernelCall& call) {
  const auto& args = call.as<ArgmaxArgs>();
  auto* parts = chunks_of(args) == 1 ? nullptr : static_cast<Found*>(call.workspace);
  const T* x = call.input<T>(0);
  auto* indices = call.output<std::uint32_t>(0);
  args.smallest != 0 ? run<true>(args, x, indices, parts) : run<false>(args, x, indices, parts);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  registry.add(Backend::kCpu, std::string("argmax_fwd_") + name_of(kDType<T>), argmax_fwd<T>,
               workspace);
}

}  // namespace

void register_sort_argmax(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  add_kernels<std::int32_t>(registry);
  add_kernels<std::uint32_t>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(sort_argmax)
