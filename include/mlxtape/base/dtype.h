// Element types: their names, sizes and C++ types, and conversion between any two.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "mlxtape/base/half.h"

namespace mlxtape {

enum class DType : std::uint8_t {
  kBool,
  kU8,
  kU16,
  kU32,
  kU64,
  kI8,
  kI16,
  kI32,
  kI64,
  kF16,
  kBF16,
  kF32,
  kF64,
};
inline constexpr std::size_t kDTypeCount = 13;

namespace detail {
struct DTypeFacts {
  const char* name;
  std::uint8_t bytes;
  char kind;  // b bool, u unsigned, i signed, f float
};
inline constexpr std::array<DTypeFacts, kDTypeCount> kDTypeFacts{{
    {"bool", 1, 'b'},
    {"u8", 1, 'u'},
    {"u16", 2, 'u'},
    {"u32", 4, 'u'},
    {"u64", 8, 'u'},
    {"i8", 1, 'i'},
    {"i16", 2, 'i'},
    {"i32", 4, 'i'},
    {"i64", 8, 'i'},
    {"f16", 2, 'f'},
    {"bf16", 2, 'f'},
    {"f32", 4, 'f'},
    {"f64", 8, 'f'},
}};
constexpr const DTypeFacts& facts(DType t) { return kDTypeFacts[static_cast<std::size_t>(t)]; }
}  // namespace detail

constexpr std::size_t size_of(DType t) { return detail::facts(t).bytes; }
constexpr const char* name_of(DType t) { return detail::facts(t).name; }
constexpr bool is_float(DType t) { return detail::facts(t).kind == 'f'; }
constexpr bool is_integer(DType t) {
  return detail::facts(t).kind == 'u' || detail::facts(t).kind == 'i';
}
constexpr bool is_signed(DType t) { return detail::facts(t).kind == 'i'; }

// The types that kernels compute on: f32, f16, bf16.
constexpr bool is_kernel_float(DType t) { return is_float(t) && t != DType::kF64; }

// The type that an operation on both computes in and returns. A float wins over an integer, an integer over
// bool; of two floats the wider, f16 and bf16 meet in f32; signed and unsigned meet in the signed type
// that holds both, but u64 and a signed one in f32.
constexpr DType promote(DType a, DType b) {
  if (a == b) return a;
  const auto [kind_a, kind_b] = std::pair(detail::facts(a).kind, detail::facts(b).kind);
  if (kind_a == 'b') return b;
  if (kind_b == 'b') return a;
  if (kind_a == 'f' && kind_b == 'f') {
    if (size_of(a) != size_of(b)) return size_of(a) > size_of(b) ? a : b;
    return DType::kF32;
  }
  if (kind_a == 'f') return a;
  if (kind_b == 'f') return b;
  if (kind_a == kind_b) return size_of(a) > size_of(b) ? a : b;
  const DType with_sign = kind_a == 'i' ? a : b;
  const std::size_t without = size_of(kind_a == 'i' ? b : a);
  if (size_of(with_sign) > without) return with_sign;
  switch (without) {
    case 1: return DType::kI16;
    case 2: return DType::kI32;
    case 4: return DType::kI64;
    default: return DType::kF32;
  }
}

constexpr std::optional<DType> dtype_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    if (name == detail::kDTypeFacts[i].name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

// kDType<T>: the DType of a C++ element type. Other types do not compile.
template <class T>
inline constexpr DType kDType = T::not_an_element_type;
template <> inline constexpr DType kDType<bool> = DType::kBool;
template <> inline constexpr DType kDType<std::uint8_t> = DType::kU8;
template <> inline constexpr DType kDType<std::uint16_t> = DType::kU16;
template <> inline constexpr DType kDType<std::uint32_t> = DType::kU32;
template <> inline constexpr DType kDType<std::uint64_t> = DType::kU64;
template <> inline constexpr DType kDType<std::int8_t> = DType::kI8;
template <> inline constexpr DType kDType<std::int16_t> = DType::kI16;
template <> inline constexpr DType kDType<std::int32_t> = DType::kI32;
template <> inline constexpr DType kDType<std::int64_t> = DType::kI64;
template <> inline constexpr DType kDType<F16> = DType::kF16;
template <> inline constexpr DType kDType<BF16> = DType::kBF16;
template <> inline constexpr DType kDType<float> = DType::kF32;
template <> inline constexpr DType kDType<double> = DType::kF64;

// Calls fn with a value of the C++ type of t: visit(t, [](auto zero) { using T = decltype(zero); }).
template <class Fn>
decltype(auto) visit(DType t, Fn&& fn) {
  switch (t) {
    case DType::kBool: return fn(bool{});
    case DType::kU8: return fn(std::uint8_t{});
    case DType::kU16: return fn(std::uint16_t{});
    case DType::kU32: return fn(std::uint32_t{});
    case DType::kU64: return fn(std::uint64_t{});
    case DType::kI8: return fn(std::int8_t{});
    case DType::kI16: return fn(std::int16_t{});
    case DType::kI32: return fn(std::int32_t{});
    case DType::kI64: return fn(std::int64_t{});
    case DType::kF16: return fn(F16{});
    case DType::kBF16: return fn(BF16{});
    case DType::kF32: return fn(float{});
    case DType::kF64: break;
  }
  return fn(double{});
}

// Converts n elements on the host. Each value is rounded at most once (to nearest, ties to
// even); a float becomes an integer by dropping its fraction, clamped to the integer's range,
// NaN gives 0; anything but zero becomes true. from and to may be the same memory only if the
// types have the same size.
void convert(const void* from, DType from_type, void* to, DType to_type, std::size_t n);

}  // namespace mlxtape
