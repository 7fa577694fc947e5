// How the CUDA forward of moe_route chooses: a list of indices of a row among which are the k largest.
//
// A warp has the row in registers. The k-th largest of the lanes' maxima is a floor under the k-th
// largest logit, for k lanes have one at or above it. What reaches the floor (12 of 512 logits on
// average for k = 10) is the list. Where that is too long many are equal: then what is above the
// floor is listed and, of those that equal it, the first. Where that is too long as well, where the
// floor is not a number above −inf, and for k > 32, the list is made by bisection on the bits of the
// keys, and of the indices where keys are equal.
//
// Bound by the number of instructions.
#pragma once

#include <type_traits>

#include "backends/cuda/device/vectors.cuh"

namespace mlxtape::ops {

constexpr int kMostExperts = 1024;
constexpr int kMostChosen = 64;
constexpr int kPlaces = 64;  // of a list

// ---- keys: unsigned numbers that compare like the contract says ----

constexpr unsigned kAbsent = 0;  // past the end of the row
constexpr unsigned kNaN = 1;

__device__ __forceinline__ unsigned key_of(float v) {
  const unsigned bits = __float_as_uint(v + 0.0F);  // −0 becomes 0
  const unsigned key = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000U);
  return isnan(v) ? kNaN : key;
}
// ---- numbers of a lane ----

// The largest, or −inf: NaN is passed over.
template <int kEach>
__device__ __forceinline__ float largest_of(const float (&v)[kEach]) {
  float most[4] = {-INFINITY, v[1], v[2], v[3]};  // four chains, each a quarter as long
#pragma unroll
  for (int j = 0; j < kEach; j = j == 0 ? 4 : j + 1) most[j % 4] = fmaxf(most[j % 4], v[j]);
  return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
}

// The largest number below that of the bits, which are those of a number above −inf of a type whose
// sign they are in.
template <unsigned kSign>
__device__ __forceinline__ unsigned bits_below(unsigned bits) {
  if ((bits & ~kSign) == 0) return kSign + 1;
  return (bits & kSign) == 0 ? bits - 1 : bits + 1;
}
__device__ __forceinline__ float value_below(float v) {
  return __uint_as_float(bits_below<0x80000000U>(__float_as_uint(v)));
}

// Bit j: v[j] > bound, which NaN is not. The sign of a difference is an addition and a shift.
template <int kEach>
__device__ __forceinline__ unsigned above(const float (&v)[kEach], float bound) {
  unsigned bits[2] = {0, 0};  // two chains
#pragma unroll
  for (int j = kEach / 2 - 1; j >= 0; --j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float d = bound - v[half * (kEach / 2) + j];
      bits[half] = __funnelshift_l(__float_as_uint(d), bits[half], 1);
    }
  }
  return bits[1] << (kEach / 2U) | bits[0];
}

// ---- two 16-bit numbers in a word ----

template <class T>
using Two = std::conditional_t<std::is_same_v<T, F16>, __half2, __nv_bfloat162>;

template <class T>
__device__ __forceinline__ Two<T> two_of(unsigned word) {
  return *reinterpret_cast<const Two<T>*>(&word);
}
template <class T>
__device__ __forceinline__ unsigned word_of(Two<T> two) {
  return *reinterpret_cast<const unsigned*>(&two);
}

// As largest_of, of words.
template <class T, int kWords>
__device__ __forceinline__ float largest_of_words(const unsigned (&word)[kWords]) {
  Two<T> most[2] = {two_of<T>(word[0]), two_of<T>(word[1])};
#pragma unroll
  for (int w = 2; w < kWords; ++w) most[w % 2] = __hmax2(most[w % 2], two_of<T>(word[w]));
  float both[cuda::kPack<T>];
  cuda::unpack(cuda::Pack<T>{{word_of<T>(__hmax2(most[0], most[1])), 0, 0, 0}}, both);
  return fmaxf(fmaxf(both[0], -INFINITY), both[1]);
}

// Bit w: the low half of word w is at least floor, a number of type T; bit 16 + w: the high half.
template <class T, int kWords>
__device__ __forceinline__ unsigned reaching(const unsigned (&word)[kWords], float floor) {
  const unsigned below = bits_below<0x8000U>(cuda::narrow<T>(floor).bits);
  const Two<T> bound = two_of<T>(below | below << 16U);
  unsigned bits = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    bits = bits >> 1U | (word_of<T>(__hsub2(bound, two_of<T>(word[w]))) & 0x80008000U);
  }
  return bits >> (16U - kWords);
}

// ---- a row in registers ----

// kEach logits a lane. kWhole: the row has as many as the warp has room for, and is read in packs of
// 16 bytes, neighbouring lanes reading neighbouring packs; else neighbouring logits.
template <class T, int kEach, bool kWhole>
struct Row {
  static constexpr bool kPairs = kWhole && sizeof(T) == 2;
  static constexpr int kTogether = kWhole ? cuda::kPack<T> : 1;
  static constexpr int kLoads = kEach / kTogether;
  static constexpr int kWords = kPairs ? kEach / 2 : kEach;
  std::conditional_t<kWhole, unsigned, T> word[kWords];

  // The index of this lane's j-th logit is base() + offset(j). Compare offsets, which are constants.
  static __device__ __forceinline__ unsigned base() {
    return threadIdx.x % cuda::kWarp * kTogether;
  }
  static __device__ __forceinline__ constexpr unsigned offset(unsigned j) {
    return j / kTogether * (cuda::kWarp * kTogether) + j % kTogether;
  }
  static __device__ __forceinline__ bool has(unsigned j, int experts) {
    return kWhole || static_cast<int>(base() + offset(j)) < experts;
  }

  // Through the first-level cache: what is listed is read again.
  __device__ __forceinline__ void load(const T* x, int experts) {
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const T* from = x + base() + offset(l * kTogether);
      if constexpr (kWhole) {
        const cuda::Pack<T> pack = cuda::load_pack_shared(from);
#pragma unroll
        for (int i = 0; i < 4; ++i) word[4 * l + i] = pack.word[i];
      } else {
        word[l] = {};
        if (has(l, experts)) word[l] = *from;
      }
    }
  }

  // −inf past the end.
  __device__ __forceinline__ void widen_to(float (&v)[kEach], int experts) const {
    if constexpr (kWhole) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        float pack[kTogether];
        cuda::unpack(
            cuda::Pack<T>{{word[4 * l], word[4 * l + 1], word[4 * l + 2], word[4 * l + 3]}}, pack);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) v[l * kTogether + i] = pack[i];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        v[j] = has(j, experts) ? cuda::widen(word[j]) : -INFINITY;
      }
    }
  }

  __device__ __forceinline__ float largest(int experts) const {
    if constexpr (kPairs) {
      return largest_of_words<T>(word);
    } else {
      float v[kEach];
      widen_to(v, experts);
      return largest_of(v);
    }
  }

  // A bit for each logit that is at least floor, which is above −inf.
  __device__ __forceinline__ unsigned bits_reaching(float floor, int experts) const {
    if constexpr (kPairs) {
      return reaching<T>(word, floor);
    } else {
      float v[kEach];
      widen_to(v, experts);
      return above(v, value_below(floor));
    }
  }
  // Where the j-th logit has its bit.
  static __device__ __forceinline__ unsigned bit_of(unsigned j) {
    return kPairs ? j / 2 + j % 2 * 16 : j;
  }
  // The index of a logit by its lane and bit.
  static __device__ __forceinline__ unsigned index_of(unsigned lane, unsigned bit) {
    return lane * kTogether + (kPairs ? offset(bit % 16 * 2) + bit / 16 : offset(bit));
  }
};

// ---- lists ----

// A place of a list names a logit by its lane and bit, for that is quick to write: 32 · lane + bit.
using Place = std::uint16_t;

__device__ __forceinline__ Place place_of(unsigned bit) {
  return static_cast<Place>(threadIdx.x % cuda::kWarp * 32 + bit);
}
template <class RowOf>
__device__ __forceinline__ unsigned index_of(Place place) {
  return RowOf::index_of(place / 32, place % 32);
}

// Lists each bit set, in any order; returns how many there are, or more than kPlaces.
__device__ __forceinline__ int list_bits(unsigned bits, Place* list) {
  const unsigned lower = (1U << (threadIdx.x % cuda::kWarp)) - 1;
  int n = 0;
  __syncwarp();  // the list before has been read
  while (true) {
    const unsigned lanes = __ballot_sync(cuda::kAll, bits != 0);
    const int at = n + __popc(lanes & lower);
    n += __popc(lanes);
    if (lanes == 0 || n > kPlaces) return n;
    if (bits != 0) list[at] = place_of(__ffs(static_cast<int>(bits)) - 1);
    bits &= bits - 1;
  }
}

// The numbers of the lanes, of which none is NaN, in falling order: Batcher's bitonic sort.
__device__ __forceinline__ float sort_lanes(float v) {
  const unsigned lane = threadIdx.x % cuda::kWarp;
  const auto exchange = [&](unsigned with, unsigned bit) {
    const float other = __shfl_xor_sync(cuda::kAll, v, with);
    if ((v < other) != ((lane & bit) != 0)) v = other;
  };
#pragma unroll
  for (unsigned size = 2; size <= cuda::kWarp; size *= 2) {
    exchange(size - 1, size / 2);  // two sorted halves, the second from behind
#pragma unroll
    for (unsigned step = size / 4; step > 0; step /= 2) exchange(step, step);
  }
  return v;
}

// For a row of which too many reach the floor: what is above it, and the first of what equals it. May
// be too long again.
template <class RowOf, int kEach>
__device__ __forceinline__ int list_ties(const float (&v)[kEach], float floor, int k, Place* list) {
  const unsigned more = above(v, floor);
  unsigned equal = above(v, value_below(floor)) & ~more;
  unsigned bits = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) bits |= (more >> j & 1U) << RowOf::bit_of(j);
  int n = list_bits(bits, list);
  for (; n < k; ++n) {
    const unsigned j = __ffs(static_cast<int>(equal)) - 1;
    const unsigned own = equal != 0 ? RowOf::base() + RowOf::offset(j) : ~0U;
    const unsigned first = __reduce_min_sync(cuda::kAll, own);
    if (own != first) continue;
    list[n] = place_of(RowOf::bit_of(j));
    equal &= equal - 1;
  }
  return n;
}

// The list of exactly the k chosen, whatever the row holds.
template <class RowOf, int kEach>
__device__ __forceinline__ void list_exactly(const float (&v)[kEach], int experts, int k,
                                             Place* list) {
  unsigned key[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) key[j] = RowOf::has(j, experts) ? key_of(v[j]) : kAbsent;
  const auto count = [&](const auto& holds) {
    unsigned n = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) n += holds(j) ? 1 : 0;
    return __reduce_add_sync(cuda::kAll, n);
  };
  const auto wanted = static_cast<unsigned>(k);
  unsigned bound = 0;                    // the k-th largest key, or one below it that k keys reach
  unsigned reach = cuda::kWarp * kEach;  // how many do
#pragma unroll 1
  for (unsigned bit = 1U << 31; bit != 0 && reach != wanted; bit >>= 1) {
    const unsigned n = count([&](int j) { return key[j] >= (bound | bit); });
    if (n >= wanted) {
      bound |= bit;
      reach = n;
    }
  }
  int last = kMostExperts;  // less the base: the last index chosen of the keys that equal the bound
  if (reach != wanted) {
    const unsigned equal = wanted - count([&](int j) { return key[j] > bound; });
    last = 0;
#pragma unroll 1
    for (int bit = kMostExperts / 2; bit != 0; bit /= 2) {
      const int end = last + bit - static_cast<int>(RowOf::base());
      const unsigned n =
          count([&](int j) { return key[j] == bound && static_cast<int>(RowOf::offset(j)) < end; });
      if (n < equal) last += bit;
    }
    last -= static_cast<int>(RowOf::base());
  }
  unsigned chosen = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const bool in =
        key[j] > bound || (key[j] == bound && static_cast<int>(RowOf::offset(j)) <= last);
    chosen |= in ? 1U << RowOf::bit_of(j) : 0U;
  }
  list_bits(chosen, list);
}

// The list of a row: at most kPlaces indices, the k chosen among them. Returns how many. largest: those
// of the lanes, sorted.
template <class RowOf, int kEach>
__device__ __forceinline__ int choose(const RowOf& row, float largest, int experts, int k,
                                      Place* list) {
  // Lane 31's for k > 32, where it is no floor.
  const float floor = __shfl_sync(cuda::kAll, largest, min(k, cuda::kWarp) - 1);
  const bool good = k <= cuda::kWarp && floor > -INFINITY;
  int n = kPlaces + 1;
  if (good) n = list_bits(row.bits_reaching(floor, experts), list);
  if (n <= kPlaces) return n;
  float v[kEach];
  row.widen_to(v, experts);
  if (good) n = list_ties<RowOf>(v, floor, k, list);
  if (n <= kPlaces) return n;
  list_exactly<RowOf>(v, experts, k, list);
  return k;
}

}  // namespace mlxtape::ops
