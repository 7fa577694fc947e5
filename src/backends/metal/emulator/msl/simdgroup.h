// Functions of a simdgroup, and barriers. All 32 lanes must take part: a lane that has ended or is elsewhere makes the
// result undefined, or depend on the chip, so it is a fault here.
#pragma once

#include "backends/metal/emulator/msl/math.h"

#define MLXTAPE_WHERE std::source_location where = std::source_location::current()

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

inline void threadgroup_barrier(mem_flags flags, MLXTAPE_WHERE) {
  emu::threadgroup_barrier(emu::MemoryFlags(flags), where);
}
inline void simdgroup_barrier(mem_flags flags, MLXTAPE_WHERE) {
  emu::simdgroup_barrier(emu::MemoryFlags(flags), where);
}

// What lanes can exchange. Metal has no such functions for 64-bit integers, and of bfloat only on some systems.
template <class T>
struct Exchangeable {
  static constexpr bool kValue =
      std::is_same_v<T, float> || std::is_same_v<T, half> ||
      (std::is_integral_v<T> && sizeof(T) <= 4 && !std::is_same_v<T, bool>);
};
template <class T, int N>
struct Exchangeable<vec<T, N>> : Exchangeable<T> {};
template <class T>
constexpr void check_exchangeable() {
  static_assert(Exchangeable<T>::kValue, "exchange this as float, or as uint or ushort by as_type");
}

template <class T>
MLXTAPE_UNCHECKED inline T taken(const emu::Exchange& all, unsigned lane) {
  T value;
  __builtin_memcpy(&value, all.slots[lane], sizeof value);
  return value;
}

template <class T, class F>
MLXTAPE_UNCHECKED inline T reduced(T value, F f, const char* what, std::source_location where) {
  check_exchangeable<T>();
  const emu::Exchange all = emu::exchange(value, what, where);
  T result;
  if (*all.has_result) {
    __builtin_memcpy(&result, all.result, sizeof result);
    return result;
  }
  T terms[emu::kSimdWidth];
  for (unsigned i = 0; i < emu::kSimdWidth; ++i) terms[i] = taken<T>(all, i);
  if (std::uint64_t order = emu::choice(where); order != 0) {  // any is right
    for (unsigned i = emu::kSimdWidth; i > 1; --i) {
      const unsigned other = emu::draw(order, i);
      const T term = terms[i - 1];
      terms[i - 1] = terms[other];
      terms[other] = term;
    }
  }
  for (unsigned n = emu::kSimdWidth / 2; n > 0; n /= 2) {
    for (unsigned i = 0; i < n; ++i) terms[i] = f(terms[i], terms[i + n]);
  }
  __builtin_memcpy(all.result, &terms[0], sizeof(T));
  *all.has_result = true;
  return terms[0];
}

#define MLXTAPE_REDUCTION(name, expression)                                      \
  template <class T>                                                             \
  T name(T value, MLXTAPE_WHERE) {                                               \
    return reduced(value, [](T a, T b) { return T(expression); }, #name, where); \
  }
MLXTAPE_REDUCTION(simd_sum, a + b)
MLXTAPE_REDUCTION(simd_product, a* b)
MLXTAPE_REDUCTION(simd_max, max(a, b))
MLXTAPE_REDUCTION(simd_min, min(a, b))
MLXTAPE_REDUCTION(simd_and, a& b)
MLXTAPE_REDUCTION(simd_or, a | b)
MLXTAPE_REDUCTION(simd_xor, a ^ b)
#undef MLXTAPE_REDUCTION
inline bool simd_any(bool value, MLXTAPE_WHERE) {
  return reduced(uint(value), [](uint a, uint b) { return a | b; }, "simd_any", where) != 0;
}
inline bool simd_all(bool value, MLXTAPE_WHERE) {
  return reduced(uint(value), [](uint a, uint b) { return a & b; }, "simd_all", where) != 0;
}

// The value of another lane; nothing is known of a lane past the end.
template <class T>
MLXTAPE_UNCHECKED inline T from_lane(T value, unsigned lane, const char* what,
                                     std::source_location where) {
  check_exchangeable<T>();
  const emu::Exchange all = emu::exchange(value, what, where);
  if (lane >= emu::kSimdWidth) emu::fail_lane(what, lane);
  return taken<T>(all, lane);
}
template <class T>
T simd_shuffle(T value, ushort lane, MLXTAPE_WHERE) {
  return from_lane(value, lane, "simd_shuffle", where);
}
template <class T>
T simd_shuffle_xor(T value, ushort mask, MLXTAPE_WHERE) {
  return from_lane(value, emu::lane_index() ^ mask, "simd_shuffle_xor", where);
}
template <class T>
MLXTAPE_UNCHECKED inline T common_lane(T value, unsigned lane, const char* what,
                                       std::source_location where) {
  const unsigned mine = lane;
  struct {
    T value;
    uint lane;
  } both = {value, lane};
  static_assert(sizeof both <= emu::kExchangeBytes);
  const emu::Exchange all = emu::exchange(both, what, where);
  if (lane >= emu::kSimdWidth) emu::fail_lane(what, lane);
  if (taken<decltype(both)>(all, 0).lane != mine)
    emu::fail("simd_broadcast from lanes that differ among the threads");
  return taken<decltype(both)>(all, lane).value;
}
template <class T>
T simd_broadcast(T value, ushort lane, MLXTAPE_WHERE) {
  check_exchangeable<T>();
  return common_lane(value, lane, "simd_broadcast", where);
}
template <class T>
T simd_broadcast_first(T value, MLXTAPE_WHERE) {
  check_exchangeable<T>();
  return common_lane(value, 0, "simd_broadcast_first", where);
}
// Lanes that would read past the end keep their own value, as on Apple's; code should not rely on it.
template <class T>
T simd_shuffle_down(T value, ushort by, MLXTAPE_WHERE) {
  const unsigned lane = emu::lane_index();
  return from_lane(value, lane + by < emu::kSimdWidth ? lane + by : lane, "simd_shuffle_down",
                   where);
}
template <class T>
T simd_shuffle_up(T value, ushort by, MLXTAPE_WHERE) {
  const unsigned lane = emu::lane_index();
  return from_lane(value, lane >= by ? lane - by : lane, "simd_shuffle_up", where);
}
template <class T>
T simd_shuffle_rotate_down(T value, ushort by, MLXTAPE_WHERE) {
  return from_lane(value, (emu::lane_index() + by) % emu::kSimdWidth, "simd_shuffle_rotate_down",
                   where);
}
template <class T>
T simd_shuffle_rotate_up(T value, ushort by, MLXTAPE_WHERE) {
  return from_lane(value, (emu::lane_index() - by) % emu::kSimdWidth, "simd_shuffle_rotate_up",
                   where);
}

// Sums over the lanes before this one, in the order of lanes or, with a seed, in another that gives as good a sum.
template <class T, class F>
MLXTAPE_UNCHECKED inline T prefix(T value, T none, bool inclusive, F f, const char* what,
                                  std::source_location where) {
  check_exchangeable<T>();
  const emu::Exchange all = emu::exchange(value, what, where);
  const unsigned end = emu::lane_index() + (inclusive ? 1 : 0);
  T sum = none;
  const bool backwards = (emu::choice(where) >> 32 & 1) != 0;
  for (unsigned i = 0; i < end; ++i) sum = f(sum, taken<T>(all, backwards ? end - 1 - i : i));
  return sum;
}
#define MLXTAPE_PREFIX(name, none, inclusive, op)                                               \
  template <class T>                                                                            \
  T name(T value, MLXTAPE_WHERE) {                                                              \
    return prefix(value, T(none), inclusive, [](T a, T b) { return T(a op b); }, #name, where); \
  }
MLXTAPE_PREFIX(simd_prefix_inclusive_sum, 0, true, +)
MLXTAPE_PREFIX(simd_prefix_exclusive_sum, 0, false, +)
MLXTAPE_PREFIX(simd_prefix_inclusive_product, 1, true, *)
MLXTAPE_PREFIX(simd_prefix_exclusive_product, 1, false, *)
#undef MLXTAPE_PREFIX

class simd_vote {
 public:
  using vote_t = ulong;
  explicit constexpr simd_vote(vote_t votes = 0) : votes_(votes) {}
  explicit constexpr operator vote_t() const { return votes_; }
  constexpr bool all() const { return votes_ == 0xFFFFFFFFu; }
  constexpr bool any() const { return votes_ != 0; }

 private:
  vote_t votes_;
};
MLXTAPE_UNCHECKED inline simd_vote simd_ballot(bool value, MLXTAPE_WHERE) {
  const emu::Exchange all = emu::exchange(value, "simd_ballot", where);
  ulong votes = 0;
  for (unsigned i = 0; i < emu::kSimdWidth; ++i) votes |= ulong(taken<bool>(all, i)) << i;
  return simd_vote(votes);
}
inline bool simd_is_first() { return emu::lane_index() == 0; }

template <class T, int I>
bool is_function_constant_defined(const emu::FunctionConstant<T, I>& constant) {
  return constant.is_defined();
}
}  // namespace metal
