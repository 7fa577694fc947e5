// Relaxed atomics of 32-bit integers: the only ones that every supported system has.
#pragma once

#include "backends/metal/emulator/msl/simdgroup.h"

namespace metal {
enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  static_assert(is_same_v<T, int> || is_same_v<T, uint>, "atomics are int or uint");
  T value;
};
}  // namespace metal
using metal::memory_order_relaxed;
using atomic_int = metal::atomic<int>;
using atomic_uint = metal::atomic<uint>;

namespace metal {
// Threadgroups run side by side, so the atomics are the machine's.
template <class T, class F>
MLXTAPE_UNCHECKED inline T atomically(volatile atomic<T>* at, F f) {
  T* place = const_cast<T*>(&at->value);
  if constexpr (MLXTAPE_CHECKED_KERNELS != 0) emu::check_atomic(place, sizeof(T));
  return f(place);
}
#define MLXTAPE_ATOMIC(name, call)                                                               \
  template <class T>                                                                             \
  T name(volatile atomic<T>* at, std::type_identity_t<T> v, memory_order) {                      \
    return atomically(at, [v](T* p) MLXTAPE_UNCHECKED { return call(p, v, __ATOMIC_RELAXED); }); \
  }
MLXTAPE_ATOMIC(atomic_fetch_add_explicit, __atomic_fetch_add)
MLXTAPE_ATOMIC(atomic_fetch_sub_explicit, __atomic_fetch_sub)
MLXTAPE_ATOMIC(atomic_fetch_and_explicit, __atomic_fetch_and)
MLXTAPE_ATOMIC(atomic_fetch_or_explicit, __atomic_fetch_or)
MLXTAPE_ATOMIC(atomic_fetch_xor_explicit, __atomic_fetch_xor)
MLXTAPE_ATOMIC(atomic_exchange_explicit, __atomic_exchange_n)
#undef MLXTAPE_ATOMIC
#define MLXTAPE_ATOMIC_CHOICE(name, op)                                                            \
  template <class T>                                                                               \
  T name(volatile atomic<T>* at, std::type_identity_t<T> v, memory_order) {                        \
    return atomically(at, [v](T* p) MLXTAPE_UNCHECKED {                                            \
      T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                \
      while (v op old &&                                                                           \
             !__atomic_compare_exchange_n(p, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
      }                                                                                            \
      return old;                                                                                  \
    });                                                                                            \
  }
MLXTAPE_ATOMIC_CHOICE(atomic_fetch_max_explicit, >)
MLXTAPE_ATOMIC_CHOICE(atomic_fetch_min_explicit, <)
#undef MLXTAPE_ATOMIC_CHOICE
template <class T>
T atomic_load_explicit(const volatile atomic<T>* at, memory_order) {
  return atomically(const_cast<volatile atomic<T>*>(at),
                    [](T* p) MLXTAPE_UNCHECKED { return __atomic_load_n(p, __ATOMIC_RELAXED); });
}
template <class T>
void atomic_store_explicit(volatile atomic<T>* at, std::type_identity_t<T> v, memory_order) {
  atomically(at, [v](T* p) MLXTAPE_UNCHECKED {
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
    return v;
  });
}
template <class T>
bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* at, T* expected,
                                           std::type_identity_t<T> v, memory_order, memory_order) {
  bool done = false;
  T old = *expected;
  atomically(at, [&](T* p) MLXTAPE_UNCHECKED {
    done = __atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return old;
  });
  if (!done) *expected = old;
  return done;
}
}  // namespace metal
