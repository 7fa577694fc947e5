// What kernels of the checked build call at each access: the functions of ThreadSanitizer's library, which is not linked.
#include <cstddef>
#include <cstring>

#include "backends/metal/emulator/check.h"

using mlxtape::emulator::check;
extern "C" {
#define MLXTAPE_ACCESS(bytes)                                                   \
  void __tsan_read##bytes(void* p) { check(p, bytes, false, false); }           \
  void __tsan_write##bytes(void* p) { check(p, bytes, true, false); }           \
  void __tsan_unaligned_read##bytes(void* p) { check(p, bytes, false, false); } \
  void __tsan_unaligned_write##bytes(void* p) { check(p, bytes, true, false); } \
  void __tsan_volatile_read##bytes(void* p) { check(p, bytes, false, false); }  \
  void __tsan_volatile_write##bytes(void* p) { check(p, bytes, true, false); }  \
  void __tsan_read_write##bytes(void* p) {                                      \
    check(p, bytes, false, false);                                              \
    check(p, bytes, true, false);                                               \
  }                                                                             \
  void __tsan_unaligned_read_write##bytes(void* p) {                            \
    check(p, bytes, false, false);                                              \
    check(p, bytes, true, false);                                               \
  }
MLXTAPE_ACCESS(1)
MLXTAPE_ACCESS(2)
MLXTAPE_ACCESS(4)
MLXTAPE_ACCESS(8)
MLXTAPE_ACCESS(16)
#undef MLXTAPE_ACCESS
void __tsan_read_range(void* p, std::size_t bytes) { check(p, bytes, false, false); }
void __tsan_write_range(void* p, std::size_t bytes) { check(p, bytes, true, false); }
void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
  check(from, bytes, false, false);
  check(to, bytes, true, false);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, std::size_t bytes) {
  check(from, bytes, false, false);
  check(to, bytes, true, false);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, std::size_t bytes) {
  check(to, bytes, true, false);
  return std::memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
