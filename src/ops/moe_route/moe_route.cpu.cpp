// CPU kernels of moe_route (formula and layout: mlxtape/ops/moe_route.h).
//
// Forward, k ≤ 16: as many rows as a vector has lanes go together, few enough to stay in the cache
// once read. Of each row the maxima of 32 buckets (one of every 32 neighbours in each) are kept. Then,
// a row per lane, both halves of the maxima are sorted by a network; the k-th largest maximum is a
// floor under the k-th largest logit, for k buckets have one at or above it. What reaches the floor
// (12 of 512 logits on average for k = 10) is put on a list, nearly without branches, and a second
// network sorts the lists of all rows, 16 places each. Longer lists are ranked by counting. Rows
// with very many equal logits, or with fewer than k numbers above −inf, take the exact path.
// A NaN reaches no maximum and no floor. Meanwhile the rows to come are fetched.
//
// The exact path (moe_route_choose-inl.h) orders any row: keys of 32 bits that compare like the
// contract says, a floor (the one found above or the exact one, by bisection on the bits), what is
// above it, the first of what equals it, and the rank of each by counting. k > 16 always goes there.
//
// Backward: a few rows are made up in the first-level cache and leave it as whole lines.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/moe_route/moe_route.cpu.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "moe_route_args.h"
#include "moe_route_choose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kMostTasks = 128;  // each has its own counts, which are added at the end

// ---- forward ----

// What a task works in. value and id hold a row per lane.
template <class T>
struct Scratch {
  HWY_ALIGN float maxima[kLanes * kBuckets] = {};
  HWY_ALIGN float floors[kLanes];
  HWY_ALIGN T stored[kPlaces * kLanes] = {};
  HWY_ALIGN float value[kPlaces * kLanes];
  HWY_ALIGN std::int32_t id[kPlaces * kLanes] = {};
  HWY_ALIGN std::int32_t count[kLanes] = {};
  HWY_ALIGN std::int32_t list[3 * 64 + kPlaces];
  HWY_ALIGN std::int32_t exact[kLanes * kPlaces];
};

// floors[r] = the k-th largest of maxima[r, ·].
HWY_INLINE void find_floors(const float* maxima, std::size_t k, float* floors) {
  const DF d;
  HWY_ALIGN float sorted[2][(kPlaces + 1) * kLanes];
  for (std::size_t half = 0; half < 2; ++half) {
    VF v[kPlaces];
    for (std::size_t part = 0; part < kPlaces; part += kLanes) {
      for (std::size_t r = 0; r < kLanes; ++r) {
        v[part + r] = hn::LoadU(d, maxima + r * kBuckets + half * kPlaces + part);
      }
      transpose(d, v + part);
    }
    sort(v, std::make_index_sequence<kPairs>());
    hn::Store(hn::Set(d, INFINITY), d, sorted[half]);
    for (std::size_t i = 0; i < kPlaces; ++i) hn::Store(v[i], d, sorted[half] + (i + 1) * kLanes);
  }
  // The k-th of two sorted lists: for the right i it is the smaller of the i-th of one and the
  // (k−i)-th of the other, and for every other i that is no larger.
  VF floor = hn::Set(d, -INFINITY);
  for (std::size_t i = 0; i <= k; ++i) {
    floor = hn::Max(floor, hn::Min(hn::Load(d, sorted[0] + i * kLanes),
                                   hn::Load(d, sorted[1] + (k - i) * kLanes)));
  }
  hn::StoreU(floor, d, floors);
}

// Lanes to rows: out[r, c] = v[c] lane r, for c < k. Nothing outside [0, rows·k) is touched; a row
// is written with its neighbour's first elements, which the neighbour then overwrites.
template <class V, class Store>
HWY_INLINE void write_lanes(V* v, std::size_t rows, std::size_t k, const Store& store_lanes) {
  for (std::size_t part = 0; part < kPlaces; part += kLanes) {
    transpose(hn::DFromV<V>(), v + part);
  }
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t part = 0; part < kPlaces; part += kLanes) {
      if (part >= k) break;
      const std::size_t at = r * k + part;
      const std::size_t room = rows * k - at;
      store_lanes(v[part + r], at, std::min(room, kLanes));
    }
  }
}

// scores = share of each value in the sum of its lane; value is sorted.
template <class T>
struct Results {
  std::uint32_t* indices;  // [rows, k]
  T* scores;               // [rows, k]
  float* lse;              // [rows], or null: renormalised
};

template <class T>
HWY_INLINE void write_results(Scratch<T>& s, const MoeRouteArgs& args, const T* x, std::size_t rows,
                              const Results<T>& out, std::uint32_t* counts) {
  const DF d;
  const DI di;
  const auto k = static_cast<std::size_t>(args.k);
  const auto experts = static_cast<std::size_t>(args.experts);
  const VF m = hn::Load(d, s.value);
  VF e[kPlaces];
  VF sum = hn::Zero(d);
  for (std::size_t c = 0; c < kPlaces; ++c) e[c] = hn::Zero(d);
  for (std::size_t c = 0; c < k; ++c) {
    e[c] = exp_nonpositive(d, hn::Sub(hn::Load(d, s.value + c * kLanes), m));
    sum = hn::Add(sum, e[c]);
  }
  if (out.lse != nullptr) {
    HWY_ALIGN float sums[kLanes] = {};
    HWY_ALIGN float largest[kLanes];
    hn::Store(m, d, largest);
    for (std::size_t r = 0; r < rows; ++r) {
      sums[r] = exp_sum(x + r * experts, experts, largest[r]);
      out.lse[r] = largest[r] + std::log(sums[r]);
    }
    sum = hn::Load(d, sums);
  }
  const VF share = hn::Div(hn::Set(d, 1.0F), sum);
  for (std::size_t c = 0; c < kPlaces; ++c) e[c] = hn::Mul(e[c], share);
  write_lanes(e, rows, k, [&](VF v, std::size_t at, std::size_t n) HWY_ATTR {
    n == kLanes ? store(d, v, out.scores + at) : store_n(d, v, out.scores + at, n);
  });
  VI id[kPlaces];
  for (std::size_t c = 0; c < kPlaces; ++c) id[c] = hn::Load(di, s.id + c * kLanes);
  write_lanes(id, rows, k, [&](VI v, std::size_t at, std::size_t n) HWY_ATTR {
    float* to = reinterpret_cast<float*>(out.indices + at);
    n == kLanes ? store(d, hn::BitCast(d, v), to) : store_n(d, hn::BitCast(d, v), to, n);
  });
  for (std::size_t i = 0; i < rows * k; ++i) ++counts[out.indices[i]];
}

// rows ≤ kLanes rows, k ≤ kPlaces.
template <class T>
HWY_INLINE void route_together(Scratch<T>& s, const MoeRouteArgs& args, const T* x,
                               std::size_t rows, const Results<T>& out, std::uint32_t* counts) {
  const DF d;
  const DI di;
  const auto k = static_cast<std::size_t>(args.k);
  const auto experts = static_cast<std::size_t>(args.experts);
  for (std::size_t r = 0; r < rows; ++r) {
    bucket_maxima(x + r * experts, experts, s.maxima + r * kBuckets);
  }
  find_floors(s.maxima, k, s.floors);
  std::uint32_t exact = 0;  // a bit per row
  for (std::size_t r = 0; r < rows; ++r) {
    const T* row = x + r * experts;
    const float floor = s.floors[r];
    const std::size_t n = reach(row, experts, floor, kLanes * experts, s.list);
    std::size_t used = n;
    if (HWY_UNLIKELY(!(floor > -INFINITY) || n > kMostRanked || n < k)) {
      choose(row, experts, k, n < k ? -INFINITY : floor, s.exact + r * kPlaces);
      exact |= 1U << r;
      used = 0;  // at a floor of −inf the list also holds places behind the row's end
    } else if (HWY_UNLIKELY(n > kPlaces)) {
      rank_list(s.list, n, k, s.exact + r * kPlaces,
                [&](std::size_t i) { return key_of(static_cast<float>(row[s.list[i]])); });
      exact |= 1U << r;
      used = 0;
    }
    s.count[r] = static_cast<std::int32_t>(used);
    for (std::size_t i = 0; i < kPlaces; i += kLanes) {
      hn::StoreU(hn::Zero(di), di, s.list + used + i);
    }
    for (std::size_t c = 0; c < kPlaces; ++c) {
      s.id[c * kLanes + r] = s.list[c];
      s.stored[c * kLanes + r] = row[s.list[c]];
    }
  }
  VF v[kPlaces];
  VI id[kPlaces];
  const VI count = hn::Load(di, s.count);
  for (std::size_t c = 0; c < kPlaces; ++c) {
    const auto used = hn::Lt(hn::Set(di, static_cast<std::int32_t>(c)), count);
    v[c] = hn::IfThenElse(hn::RebindMask(d, used), load(d, s.stored + c * kLanes),
                          hn::Set(d, -INFINITY));
    id[c] = hn::Load(di, s.id + c * kLanes);
  }
  sort(v, id, std::make_index_sequence<kPairs>());
  for (std::size_t c = 0; c < kPlaces; ++c) {
    hn::Store(v[c], d, s.value + c * kLanes);
    hn::Store(id[c], di, s.id + c * kLanes);
  }
  for (; exact != 0; exact &= exact - 1) {
    const auto r = static_cast<std::size_t>(std::countr_zero(exact));
    for (std::size_t c = 0; c < k; ++c) {
      const std::int32_t place = s.exact[r * kPlaces + c];
      s.id[c * kLanes + r] = place;
      s.value[c * kLanes + r] =
          static_cast<float>(x[r * experts + static_cast<std::size_t>(place)]);
    }
  }
  write_results(s, args, x, rows, out, counts);
}

// One row, any k.
template <class T>
void route_alone(const MoeRouteArgs& args, const T* x, const Results<T>& out,
                 std::uint32_t* counts) {
  const DF d;
  const auto k = static_cast<std::size_t>(args.k);
  const auto experts = static_cast<std::size_t>(args.experts);
  HWY_ALIGN std::int32_t chosen[kMostChosen];
  HWY_ALIGN float value[kMostChosen];
  std::fill_n(value, kMostChosen, -INFINITY);
  choose(x, experts, k, -INFINITY, chosen);
  for (std::size_t c = 0; c < k; ++c) {
    value[c] = static_cast<float>(x[chosen[c]]);
    out.indices[c] = static_cast<std::uint32_t>(chosen[c]);
    ++counts[chosen[c]];
  }
  const float m = value[0];
  const bool full = out.lse != nullptr;
  const float sum = full ? exp_sum(x, experts, m) : exp_sum(value, k, m);
  if (full) *out.lse = m + std::log(sum);
  const VF share = hn::Set(d, 1 / sum);
  for (std::size_t c = 0; c < k; c += kLanes) {
    const VF e = exp_nonpositive(d, hn::Sub(hn::Load(d, value + c), hn::Set(d, m)));
    store_n(d, hn::Mul(e, share), out.scores + c, std::min(k - c, kLanes));
  }
}

// Rows of a task: whole vectors of rows on every target.
std::int64_t rows_each(const MoeRouteArgs& args) {
  return ceil_div(ceil_div(std::max<std::int64_t>(args.rows, 1), kMostTasks), 16) * 16;
}

std::size_t forward_workspace(const void* args) {
  const auto& a = *static_cast<const MoeRouteArgs*>(args);
  return static_cast<std::size_t>(ceil_div(a.rows, rows_each(a)) * a.experts) *
         sizeof(std::uint32_t);
}

template <class T>
void moe_route_fwd(const KernelCall& call) {
  const auto& args = call.as<MoeRouteArgs>();
  const auto [rows, experts, k, full] = args;
  const T* logits = call.input<T>(0);                               // [T, E]
  auto* indices = call.output<std::uint32_t>(0);                    // [T, k]
  T* scores = call.output<T>(1);                                    // [T, k]
  auto* counts = call.output<std::uint32_t>(2);                     // [E]
  auto* offsets = call.output<std::uint32_t>(3);                    // [E+1]
  auto* lse = call.output<float>(4);                                // [T] or null
  auto* task_counts = static_cast<std::uint32_t*>(call.workspace);  // [tasks, E]
  const std::int64_t each = rows_each(args);
  const std::int64_t tasks = ceil_div(rows, each);

  parallel_for(tasks, [&](std::int64_t task) {
    Scratch<T> s;
    std::uint32_t* own = task_counts + task * args.experts;
    std::fill_n(own, args.experts, 0U);
    const std::int64_t end = std::min(args.rows, (task + 1) * each);
    const std::int64_t step = args.k <= static_cast<std::int64_t>(kPlaces) ? kLanes : 1;
    for (std::int64_t r = task * each; r < end; r += step) {
      const T* x = logits + r * args.experts;
      const Results<T> out{indices + r * args.k, scores + r * args.k,
                           args.full != 0 ? lse + r : nullptr};
      if (step == 1) {
        route_alone(args, x, out, own);
      } else {
        route_together(s, args, x, static_cast<std::size_t>(std::min(step, end - r)), out, own);
      }
    }
  });

  std::fill_n(counts, experts, 0U);
  for (std::int64_t task = 0; task < tasks; ++task) {
    for (std::int64_t e = 0; e < args.experts; ++e)
      counts[e] += task_counts[task * args.experts + e];
  }
  std::uint32_t before = 0;
  for (std::int64_t e = 0; e < args.experts; ++e) {
    offsets[e] = before;
    before += counts[e];
  }
  offsets[args.experts] = before;
}

// ---- backward ----

constexpr std::size_t kStage = 16 << 10;  // bytes of rows made up together, of 48 KiB

// n elements to memory that need not be aligned.
template <bool kStream, class T>
HWY_INLINE void copy_out(const T* from, T* to, std::size_t n) {
  const hn::ScalableTag<std::uint8_t> d8;
  const auto* source = reinterpret_cast<const std::uint8_t*>(from);
  auto* target = reinterpret_cast<std::uint8_t*>(to);
  const std::size_t bytes = n * sizeof(T);
  std::size_t i = 0;
  if constexpr (kStream) {
    i = std::min(bytes, (64 - reinterpret_cast<std::uintptr_t>(target) % 64) % 64);
    std::memcpy(target, source, i);
    for (; i + hn::Lanes(d8) <= bytes; i += hn::Lanes(d8)) {
      hn::Stream(hn::LoadU(d8, source + i), d8, target + i);
    }
  }
  std::memcpy(target + i, source + i, bytes - i);
}

template <class T>
struct Chosen {
  const std::uint32_t* indices;  // [k]
  const T* scores;               // [k]
  const T* dscores;              // [k]

  Chosen row(std::int64_t r, std::size_t k) const {
    const auto at = static_cast<std::size_t>(r) * k;
    return {indices + at, scores + at, dscores + at};
  }
};

// Σ s·ds over the valid indices.
template <class T>
HWY_INLINE float inner(const Chosen<T>& row, std::size_t k, std::uint32_t experts) {
  const DF d;
  const DU du;
  VF sum = hn::Zero(d);
  for (std::size_t j = 0; j < k; j += kLanes) {
    const std::size_t n = std::min(k - j, kLanes);
    const auto* at = reinterpret_cast<const float*>(row.indices + j);
    const auto valid = hn::Lt(hn::BitCast(du, load_n(d, at, n)), hn::Set(du, experts));
    const VF product = hn::Mul(load_n(d, row.scores + j, n), load_n(d, row.dscores + j, n));
    sum = hn::Add(sum, hn::IfThenElseZero(hn::RebindMask(d, valid), product));
  }
  return sum_lanes(d, sum);
}

// What the rows of one task share. seen[e] is the last row that chose e.
template <class T>
struct Stage {
  HWY_ALIGN T rows[kStage / sizeof(T)] = {};
  HWY_ALIGN std::int64_t seen[kMostExperts];
};

// A row with an index twice, into zeroes: the gradients of equal indices are added before they are
// rounded.
template <class T>
HWY_NOINLINE void place_sums(const std::uint32_t* indices, const float* dl, std::size_t k,
                             std::uint32_t experts, T* out) {
  float sums[kMostExperts] = {};
  for (std::size_t j = 0; j < k; ++j) {
    if (indices[j] < experts) sums[indices[j]] += dl[j];
  }
  for (std::size_t j = 0; j < k; ++j) {
    if (indices[j] < experts) out[indices[j]] = T(sums[indices[j]]);
  }
}

// The chosen places of one zeroed row.
template <class T>
HWY_INLINE void place_row(const Chosen<T>& in, std::int64_t r, std::size_t k, std::uint32_t experts,
                          T* out, std::int64_t* seen) {
  const DF d;
  HWY_ALIGN float dl[kMostChosen];
  HWY_ALIGN T stored[kMostChosen];
  const Chosen<T> row = in.row(r, k);
  const VF c = hn::Set(d, inner(row, k, experts));
  for (std::size_t j = 0; j < k; j += kLanes) {
    const std::size_t n = std::min(k - j, kLanes);
    const VF s = load_n(d, row.scores + j, n);
    const VF v = hn::Mul(s, hn::Sub(load_n(d, row.dscores + j, n), c));
    hn::Store(v, d, dl + j);
    store(d, v, stored + j);
  }
  bool twice = false;
  for (std::size_t j = 0; j < k; ++j) {
    const std::uint32_t e = row.indices[j];
    if (HWY_UNLIKELY(e >= experts)) continue;
    twice |= seen[e] == r;
    seen[e] = r;
    out[e] = stored[j];
  }
  if (HWY_UNLIKELY(twice)) place_sums(row.indices, dl, k, experts, out);
}

template <bool kStream, class T>
void backward_chosen(const MoeRouteArgs& args, const Chosen<T>& in, T* dlogits, std::int64_t first,
                     std::int64_t end) {
  Stage<T> stage;
  const auto k = static_cast<std::size_t>(args.k);
  const auto experts = static_cast<std::uint32_t>(args.experts);
  std::fill_n(stage.seen, experts, -1);
  const std::int64_t together = static_cast<std::int64_t>(kStage / sizeof(T)) / args.experts;
  for (std::int64_t r = first; r < end; r += together) {
    const std::int64_t rows = std::min(together, end - r);
    for (std::int64_t i = 0; i < rows; ++i) {
      place_row(in, r + i, k, experts, stage.rows + i * args.experts, stage.seen);
    }
    copy_out<kStream>(stage.rows, dlogits + r * args.experts,
                      static_cast<std::size_t>(rows * args.experts));
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::uint32_t* indices = in.row(r + i, k).indices;
      T* row = stage.rows + i * args.experts;
      for (std::size_t j = 0; j < k; ++j) {
        if (HWY_LIKELY(indices[j] < experts)) row[indices[j]] = T();
      }
    }
  }
}

template <bool kStream, class T>
void backward_full(const MoeRouteArgs& args, const Chosen<T>& in, const T* logits, const float* lse,
                   T* dlogits, std::int64_t first, std::int64_t end) {
  constexpr std::int64_t kTogether = 4;
  const DF d;
  HWY_ALIGN float ds[kTogether * kMostExperts] = {};  // Σ_j [indices = e]·ds
  HWY_ALIGN float c[kTogether];
  const auto k = static_cast<std::size_t>(args.k);
  const auto experts = static_cast<std::size_t>(args.experts);
  for (std::int64_t r = first; r < end; r += kTogether) {
    const std::int64_t rows = std::min(kTogether, end - r);
    for (std::int64_t i = 0; i < rows; ++i) {
      const Chosen<T> row = in.row(r + i, k);
      c[i] = inner(row, k, static_cast<std::uint32_t>(experts));
      float* sums = ds + i * args.experts;
      for (std::size_t j = 0; j < k; ++j) {
        if (row.indices[j] < experts) sums[row.indices[j]] += static_cast<float>(row.dscores[j]);
      }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* x = logits + (r + i) * args.experts;
      const float* sums = ds + i * args.experts;
      const VF vc = hn::Set(d, c[i]);
      const VF vl = hn::Set(d, lse[r + i]);
      const std::size_t ahead = static_cast<std::size_t>(kTogether) * experts;
      write_row<kStream>(
          d, dlogits + (r + i) * args.experts, experts,
          [&](std::size_t e) HWY_ATTR {
            hwy::Prefetch(x + e + ahead);
            return hn::Mul(exp_f32(d, hn::Sub(load(d, x + e), vl)),
                           hn::Sub(hn::LoadU(d, sums + e), vc));
          },
          [&](std::size_t e, std::size_t n) HWY_ATTR {
            return hn::Mul(exp_f32(d, hn::Sub(load_n(d, x + e, n), vl)),
                           hn::Sub(load_n(d, sums + e, n), vc));
          });
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      const Chosen<T> row = in.row(r + i, k);
      for (std::size_t j = 0; j < k; ++j) {
        if (row.indices[j] < experts)
          ds[static_cast<std::size_t>(i) * experts + row.indices[j]] = 0;
      }
    }
  }
}

template <bool kStream, class T>
void backward(const KernelCall& call) {
  const auto& args = call.as<MoeRouteArgs>();
  const Chosen<T> in{call.input<std::uint32_t>(0), call.input<T>(1), call.input<T>(2)};  // [T, k]
  const T* logits = call.input<T>(3);      // [T, E], or null: renormalised
  const auto* lse = call.input<float>(4);  // [T], or null
  T* dlogits = call.output<T>(0);          // [T, E]
  const std::int64_t row_bytes = args.experts * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t each = 2 * cpu::rows_per_task(row_bytes);
  parallel_for(ceil_div(args.rows, each), [&](std::int64_t task) {
    const std::int64_t first = task * each;
    const std::int64_t end = std::min(args.rows, first + each);
    if (args.full != 0) {
      backward_full<kStream>(args, in, logits, lse, dlogits, first, end);
    } else {
      backward_chosen<kStream>(args, in, dlogits, first, end);
    }
    if (kStream) hwy::FlushStream();
  });
}

template <class T>
void moe_route_bwd(const KernelCall& call) {
  const auto& args = call.as<MoeRouteArgs>();
  const std::int64_t bytes = args.rows * args.experts * static_cast<std::int64_t>(sizeof(T));
  bytes >= cpu::kStreamBytes ? backward<true, T>(call) : backward<false, T>(call);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "moe_route_fwd_" + type, moe_route_fwd<T>, forward_workspace);
  registry.add(Backend::kCpu, "moe_route_bwd_" + type, moe_route_bwd<T>);
}

}  // namespace

void register_moe_route(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(moe_route)
