// How the CPU kernels of moe_route look at rows: the vectors of one row, sorting with a row per
// lane, and the exact choice of any row.
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "backends/cpu/device/simd-inl.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_MOE_ROUTE_CHOOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_MOE_ROUTE_CHOOSE_INL_H_
#undef MLXTAPE_MOE_ROUTE_CHOOSE_INL_H_
#else
#define MLXTAPE_MOE_ROUTE_CHOOSE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

using VI = hn::Vec<DI>;

constexpr std::size_t kLanes = hn::MaxLanes(DF());
constexpr std::size_t kBuckets = 32;
constexpr std::size_t kPlaces = 16;  // of a list that the network sorts
constexpr std::size_t kMostExperts = 1024;
constexpr std::size_t kMostChosen = 64;
constexpr std::size_t kMostRanked = 64;  // longest list that is ranked by counting
constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();  // the key of NaN
static_assert(kBuckets % (2 * kLanes) == 0 && kPlaces % kLanes == 0);

// ---- networks ----

// Batcher's odd-even merge sort of 16: the pairs to compare, in order.
struct Pair {
  std::size_t a, b;
};
constexpr std::size_t kPairs = 63;
constexpr std::array<Pair, kPairs> make_network() {
  std::array<Pair, kPairs> pairs{};
  std::size_t n = 0;
  for (std::size_t p = 1; p < kPlaces; p *= 2) {
    for (std::size_t q = p; q >= 1; q /= 2) {
      for (std::size_t j = q % p; j + q < kPlaces; j += 2 * q) {
        for (std::size_t i = j; i < std::min(j + q, kPlaces - q); ++i) {
          if (i / (2 * p) == (i + q) / (2 * p)) pairs[n++] = {i, i + q};
        }
      }
    }
  }
  return pairs;
}
constexpr std::array<Pair, kPairs> kNetwork = make_network();

// Neither is NaN: buckets pass it over, and no NaN reaches a floor.
HWY_INLINE void order(VF& a, VF& b) {
  const VF high = hn::Max(a, b);
  b = hn::Min(a, b);
  a = high;
}

// By value, equal ones by index.
HWY_INLINE void order(VF& a, VF& b, VI& ia, VI& ib) {
  const DI di;
  const auto wins = hn::Or(hn::RebindMask(di, hn::Gt(a, b)),
                           hn::And(hn::RebindMask(di, hn::Eq(a, b)), hn::Lt(ia, ib)));
  const VI first = hn::IfThenElse(wins, ia, ib);
  ib = hn::IfThenElse(wins, ib, ia);
  ia = first;
  order(a, b);
}

// Largest first, in each lane.
template <std::size_t... i>
HWY_INLINE void sort(VF* v, std::index_sequence<i...>) {
  (order(v[kNetwork[i].a], v[kNetwork[i].b]), ...);
}
template <std::size_t... i>
HWY_INLINE void sort(VF* v, VI* id, std::index_sequence<i...>) {
  (order(v[kNetwork[i].a], v[kNetwork[i].b], id[kNetwork[i].a], id[kNetwork[i].b]), ...);
}

// The square of kLanes vectors mirrored at its diagonal: by elements within blocks of 16 bytes,
// then by blocks, then by halves.
template <class D, class V>
HWY_INLINE void transpose(D d, V* v) {
  for (std::size_t g = 0; g < kLanes; g += 4) {
    const V a = hn::InterleaveLower(d, v[g], v[g + 2]);
    const V b = hn::InterleaveLower(d, v[g + 1], v[g + 3]);
    const V c = hn::InterleaveUpper(d, v[g], v[g + 2]);
    const V e = hn::InterleaveUpper(d, v[g + 1], v[g + 3]);
    v[g] = hn::InterleaveLower(d, a, b);
    v[g + 1] = hn::InterleaveUpper(d, a, b);
    v[g + 2] = hn::InterleaveLower(d, c, e);
    v[g + 3] = hn::InterleaveUpper(d, c, e);
  }
  if constexpr (kLanes >= 8) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      if ((i & 4) != 0) continue;
      const V a = v[i];
      v[i] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(v[i + 4]), a);
      v[i + 4] = hn::OddEvenBlocks(v[i + 4], hn::SwapAdjacentBlocks(a));
    }
  }
  if constexpr (kLanes >= 16) {
    for (std::size_t i = 0; i < 8; ++i) {
      const V a = v[i];
      v[i] = hn::ConcatLowerLower(d, v[i + 8], a);
      v[i + 8] = hn::ConcatUpperUpper(d, v[i + 8], a);
    }
  }
}

// ---- one row ----

// body(i, v) for each vector of a row from i on; where the row ends within it the rest is −inf.
template <class T, class Body>
HWY_INLINE void each_vector(const T* x, std::size_t experts, const Body& body) {
  const DF d;
  for_row(
      d, experts, [&](std::size_t i) HWY_ATTR { body(i, load(d, x + i)); },
      [&](std::size_t i, std::size_t n) HWY_ATTR {
        body(i, hn::IfThenElse(hn::FirstN(d, n), load_n(d, x + i, n), hn::Set(d, -INFINITY)));
      });
}

// maxima[b] = the largest logit of bucket b, NaN passed over, −inf where there is none. Of each kBuckets neighbours
// one goes to each bucket, whichever is cheapest.
template <class T>
HWY_INLINE void bucket_maxima(const T* x, std::size_t experts, float* maxima) {
  const DF d;
  constexpr std::size_t kParts = kBuckets / kLanes;
  VF best[kParts];
  for (std::size_t p = 0; p < kParts; ++p) best[p] = hn::Set(d, -INFINITY);
  const std::size_t whole = experts / kBuckets * kBuckets;
  for (std::size_t i = 0; i < whole; i += kBuckets) {
    for (std::size_t p = 0; p < kParts; p += 2) {
      VF a, b;
      load_pair(d, x + i + p * kLanes, a, b);
      best[p] = largest(best[p], a);
      best[p + 1] = largest(best[p + 1], b);
    }
  }
  for (std::size_t p = 0; p < kParts; ++p) hn::StoreU(best[p], d, maxima + p * kLanes);
  each_vector(x + whole, experts - whole, [&](std::size_t i, VF v) HWY_ATTR {
    hn::StoreU(largest(hn::LoadU(d, maxima + i), v), d, maxima + i);
  });
}

// A bit per element of x[0, n), n ≤ 64: does it reach the floor?
template <class T>
HWY_INLINE std::uint64_t reaching(const T* x, std::size_t n, VF floor) {
  const DF d;
  std::uint64_t bits = 0;
  each_vector(x, n, [&](std::size_t i, VF v) HWY_ATTR {
    std::conditional_t<kLanes == 16, std::uint16_t, std::uint8_t> part = 0;
    hn::StoreMaskBits(d, hn::Ge(v, floor), reinterpret_cast<std::uint8_t*>(&part));
    bits |= std::uint64_t{part} << i;
  });
  return bits;
}

// The places, in order, where the row reaches the floor; returned: how many. It stops where there
// are more than kMostRanked. Fetches the row that lies ahead. Four places of each word are written
// whether they are there or not: a branch on each would be mispredicted, and the next word writes
// over them.
template <class T>
HWY_INLINE std::size_t reach(const T* x, std::size_t experts, float floor, std::size_t ahead,
                             std::int32_t* list) {
  const VF at_least = hn::Set(DF(), floor);
  std::size_t n = 0;
  const auto take = [&](std::size_t i, std::uint64_t bits) HWY_ATTR {
    std::size_t m = n;
    n += static_cast<std::size_t>(std::popcount(bits));
    for (int j = 0; j < 4; ++j) {
      list[m++] = static_cast<std::int32_t>(i) + std::countr_zero(bits);
      bits &= bits - 1;
    }
    for (; HWY_UNLIKELY(bits != 0); bits &= bits - 1) {
      list[m++] = static_cast<std::int32_t>(i) + std::countr_zero(bits);
    }
  };
  const std::size_t whole = experts / 64 * 64;
  for (std::size_t i = 0; i < whole && n <= kMostRanked; i += 64) {
    for (std::size_t line = 0; line < 64 * sizeof(T); line += 64) {
      hwy::Prefetch(reinterpret_cast<const char*>(x + i + ahead) + line);
    }
    take(i, reaching(x + i, 64, at_least));
  }
  if (whole < experts) take(whole, reaching(x + whole, experts - whole, at_least));
  return n;
}

// Σ exp(x − m)
template <class T>
HWY_INLINE float exp_sum(const T* x, std::size_t experts, float m) {
  const DF d;
  const VF vm = hn::Set(d, m);
  VF a = hn::Zero(d);
  VF b = hn::Zero(d);
  const std::size_t whole = experts / (2 * kLanes) * 2 * kLanes;
  for (std::size_t i = 0; i < whole; i += 2 * kLanes) {
    VF x_a, x_b;
    load_pair(d, x + i, x_a, x_b);
    a = hn::Add(a, exp_for(d, T(), hn::Sub(x_a, vm)));
    b = hn::Add(b, exp_for(d, T(), hn::Sub(x_b, vm)));
  }
  each_vector(x + whole, experts - whole,
              [&](std::size_t, VF v) HWY_ATTR { a = hn::Add(a, exp_for(d, T(), hn::Sub(v, vm))); });
  return sum_lanes(d, hn::Add(a, b));
}

// ---- the exact path ----

// 0, 1, 2 ...; Highway's own goes through memory in small pieces, and waits for them.
HWY_INLINE VI count_up() {
  alignas(64) static constexpr std::int32_t kNumbers[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                            8, 9, 10, 11, 12, 13, 14, 15};
  return hn::Load(DI(), kNumbers);
}

// Keys compare like the contract: −0 is 0, NaN is lowest.
std::int32_t key_of(float v) {
  if (std::isnan(v)) return kLowest;
  const auto bits = std::bit_cast<std::int32_t>(v);
  return bits < 0 ? -(bits & 0x7fffffff) : bits;
}

template <class T>
HWY_INLINE void make_keys(const T* x, std::size_t experts, std::int32_t* keys) {
  const DI di;
  each_vector(x, experts, [&](std::size_t i, VF v) HWY_ATTR {
    const VI bits = hn::BitCast(di, v);
    const VI sign = hn::ShiftRight<31>(bits);
    const VI size = hn::And(bits, hn::Set(di, 0x7fffffff));
    const VI key = hn::Sub(hn::Xor(size, sign), sign);
    const auto is_nan = hn::RebindMask(di, hn::IsNaN(v));
    hn::StoreU(hn::IfThenElse(is_nan, hn::Set(di, kLowest), key), di, keys + i);
  });
  for (std::size_t i = experts; i % kLanes != 0; ++i) keys[i] = kLowest;
}

std::size_t count_above(const std::int32_t* keys, std::size_t length, std::int32_t bound) {
  const DI di;
  const VI vb = hn::Set(di, bound);
  std::size_t n = 0;
  for (std::size_t i = 0; i < length; i += kLanes) {
    n += hn::CountTrue(di, hn::Gt(hn::LoadU(di, keys + i), vb));
  }
  return n;
}

// The k-th largest key, or one below it that k keys reach.
std::int32_t kth_key(const std::int32_t* keys, std::size_t length, std::size_t k) {
  const auto signed_key = [](std::uint32_t u) {
    return std::bit_cast<std::int32_t>(u ^ (1U << 31));
  };
  std::uint32_t found = 0;
  for (std::uint32_t bit = 1U << 31; bit != 0; bit >>= 1) {
    const std::size_t n = count_above(keys, length, signed_key(found | bit) - 1);
    if (n >= k) found |= bit;
    if (n == k) break;
  }
  return signed_key(found);
}

// Appends to the list of n the places whose key is above (or, not kAbove, equals) bound, in order;
// stops once enough are there. Returns the new length.
template <bool kAbove>
std::size_t append(const std::int32_t* keys, std::size_t length, std::int32_t bound,
                   std::size_t enough, std::int32_t* list, std::size_t n) {
  const DI di;
  const VI vb = hn::Set(di, bound);
  VI place = count_up();
  for (std::size_t i = 0; i < length && n < enough; i += kLanes) {
    const VI key = hn::LoadU(di, keys + i);
    const auto hit = kAbove ? hn::Gt(key, vb) : hn::Eq(key, vb);
    hn::StoreU(hn::Compress(place, hit), di, list + n);
    n += hn::CountTrue(di, hit);
    place = hn::Add(place, hn::Set(di, static_cast<std::int32_t>(kLanes)));
  }
  return n;
}

// chosen = the k best of the n ≤ kMostRanked places listed, key_at(i) their keys; of equal keys the
// earlier listed.
template <class KeyAt>
HWY_INLINE void rank_list(const std::int32_t* list, std::size_t n, std::size_t k,
                          std::int32_t* chosen, const KeyAt& key_at) {
  const DI di;
  HWY_ALIGN std::int32_t key[kMostRanked];
  HWY_ALIGN std::int32_t rank[kMostRanked];
  std::fill_n(key, kMostRanked, kLowest);
  for (std::size_t i = 0; i < n; ++i) key[i] = key_at(i);
  for (std::size_t i = 0; i < n; i += kLanes) {
    const VI mine = hn::Load(di, key + i);
    const VI place = hn::Add(count_up(), hn::Set(di, static_cast<std::int32_t>(i)));
    VI r = hn::Zero(di);
    for (std::size_t j = 0; j < n; ++j) {
      const VI other = hn::Set(di, key[j]);
      const VI other_place = hn::Set(di, static_cast<std::int32_t>(j));
      const auto wins =
          hn::Or(hn::Gt(other, mine), hn::And(hn::Eq(other, mine), hn::Lt(other_place, place)));
      r = hn::Sub(r, hn::VecFromMask(di, wins));
    }
    hn::Store(r, di, rank + i);
  }
  for (std::size_t i = 0; i < n; ++i) {
    if (static_cast<std::size_t>(rank[i]) < k) chosen[rank[i]] = list[i];
  }
}

// The k places of a row, in order, whatever it holds. floor: −inf, or a number that at least k
// logits reach; not used for k > kPlaces.
template <class T>
HWY_NOINLINE void choose(const T* x, std::size_t experts, std::size_t k, float floor,
                         std::int32_t* chosen) {
  HWY_ALIGN std::int32_t keys[kMostExperts];
  HWY_ALIGN std::int32_t list[kMostExperts + kLanes];
  const std::size_t length = (experts + kLanes - 1) / kLanes * kLanes;
  make_keys(x, experts, keys);
  std::int32_t bound = key_of(floor);
  if (k > kPlaces || count_above(keys, length, bound) > kMostRanked) {
    bound = kth_key(keys, length, k);
  }
  std::size_t n = append<true>(keys, length, bound, length, list, 0);
  if (n < k) n = std::min(k, append<false>(keys, length, bound, k, list, n));
  // Only where the bound is −inf: the NaNs come last.
  if (n < k) n = std::min(k, append<false>(keys, length, kLowest, k, list, n));
  rank_list(list, n, k, chosen, [&](std::size_t i) { return keys[list[i]]; });
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
