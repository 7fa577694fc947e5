// Checked kernels are compiled with a few of UndefinedBehaviorSanitizer's checks as well, and linked without its runtime:
// these are the functions that they call. The descriptions that the compiler passes are laid out as both compilers have it.
#include <cstdint>
#include <cstring>
#include <string>

#include "backends/metal/emulator/check.h"
#include "backends/metal/emulator/group.h"

namespace mlxtape::emulator {
namespace {

struct Place {
  const char* file;
  std::uint32_t line, column;
};
struct Type {
  std::uint16_t kind;  // 0: a whole number
  std::uint16_t
      info;  // of a whole number: twice the logarithm of its bits, and one where it has a sign
  char name[1];
};
struct OutOfBounds {
  Place place;
  const Type *array, *index;
};
struct Shift {
  Place place;
  const Type *left, *right;
};
struct Overflow {
  Place place;
  const Type* type;
};

struct TypeMismatch {
  Place place;
  const Type* type;
  std::uint8_t alignment;  // its logarithm
  std::uint8_t kind;
};

std::string value_of(const Type& type, std::uintptr_t value) {
  const unsigned bits = 1U << (type.info >> 1);
  if (type.kind != 0 || bits > 64) return "a number";
  if ((type.info & 1) == 0) return std::to_string(value);
  const auto shift = static_cast<int>(64 - bits);
  return std::to_string(static_cast<std::int64_t>(std::uint64_t{value} << shift) >> shift);
}

// 'float [4]' as 4.
std::string length_of(const Type& array) {
  const char* open = std::strrchr(array.name, '[');
  return open == nullptr ? array.name : std::string(open + 1, std::strcspn(open + 1, "]"));
}

[[noreturn]] void refuse(const std::string& what, const Place& place) {
  running->fail(what + " at " + place.file + ":" + std::to_string(place.line) + " (" +
                running->describe(*self) + ")");
}

}  // namespace
}  // namespace mlxtape::emulator

using namespace mlxtape::emulator;

extern "C" {
void __ubsan_handle_out_of_bounds(OutOfBounds* data, std::uintptr_t index) {
  refuse("index " + value_of(*data->index, index) + " of an array of " + length_of(*data->array),
         data->place);
}
void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, std::uintptr_t address) {
  refuse(std::string("a ") + data->type->name + " at an address that is no multiple of " +
             std::to_string(1U << data->alignment) + ": " +
             where_is(reinterpret_cast<const void*>(address)) + ",",
         data->place);
}
void __ubsan_handle_shift_out_of_bounds(Shift* data, std::uintptr_t, std::uintptr_t by) {
  refuse("a shift by " + value_of(*data->right, by) + " of a type as narrow as that", data->place);
}
void __ubsan_handle_divrem_overflow(Overflow* data, std::uintptr_t left, std::uintptr_t right) {
  refuse("the quotient of " + value_of(*data->type, left) + " and " + value_of(*data->type, right),
         data->place);
}
}
