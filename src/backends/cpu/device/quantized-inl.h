// Quantised weights, w = s·q + b with one s and b for each group of codes q: codes as bytes, and products of rows with
// few rows of x. Codes come in packs of 32, which are as many whole words as a code has bits.
//
// Codes of 4 and 8 bits are widened in registers, two of them from one lane: those at even places and those at odd
// ones, so x is put in that order first. Others are spread to bytes before: 6 instructions for 32 codes of 4 bits with
// AVX-512, 9 for 8 bits.
//
// Where the processor multiplies pairs of bf16, x is bf16 and codes have 4 bits, 3 do it: w = s·(q − 8) + (8·s + b), so of
// each group Σ (q − 8)·x is exact in its products and takes one multiplication by s, and the rest is Σ x of the group,
// which no row of weights has to find anew.
#include "backends/cpu/device/rows-inl.h"
#include "backends/cpu/targets.h"

#include <array>
#include <type_traits>

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_QUANTIZED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_QUANTIZED_INL_H_
#undef MLXTAPE_CPU_QUANTIZED_INL_H_
#else
#define MLXTAPE_CPU_QUANTIZED_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kPackCodes = 32;
constexpr int kMostFew = 8;  // rows of x at a time

// What is fetched is so many rows further, in the order of memory: rows are read several at a time, and the processor
// does not look ahead in so many places at once.
constexpr std::int64_t kRowsAhead = 8;

// Calls fn(integral_constant) for the widths there are, which the host has checked.
template <class Fn>
void with_bits(int bits, const Fn& fn) {
  switch (bits) {
    case 2: return fn(std::integral_constant<int, 2>());
    case 3: return fn(std::integral_constant<int, 3>());
    case 4: return fn(std::integral_constant<int, 4>());
    case 5: return fn(std::integral_constant<int, 5>());
    case 6: return fn(std::integral_constant<int, 6>());
    default: return fn(std::integral_constant<int, 8>());
  }
}

// ---- codes as bytes ----

// The lowest 8·kBits bits, kBits in each byte.
template <int kBits>
HWY_INLINE std::uint64_t spread_eight(std::uint64_t u) {
  constexpr std::uint64_t kCode = (1U << kBits) - 1;
#if HWY_TARGET == HWY_AVX3
  return _pdep_u64(u, kCode * 0x0101010101010101U);
#else
  // In halves: the upper four codes go to the upper 32 bits, of these two each to the upper 16, of these one.
  constexpr std::uint64_t kFour = (std::uint64_t{1} << (4 * kBits)) - 1;
  constexpr std::uint64_t kTwo = ((1U << (2 * kBits)) - 1) * 0x0000000100000001U;
  constexpr std::uint64_t kOne = kCode * 0x0001000100010001U;
  u = (u & kFour) | ((u & (kFour << (4 * kBits))) << (32 - 4 * kBits));
  u = (u & kTwo) | ((u & (kTwo << (2 * kBits))) << (16 - 2 * kBits));
  return (u & kOne) | ((u & (kOne << kBits)) << (8 - kBits));
#endif
}

template <int kBits>
HWY_INLINE void spread_packs(const std::uint8_t* p, std::int64_t packs, std::uint8_t* bytes) {
  constexpr std::int64_t kPackBytes = std::int64_t{4} * kBits;
  for (std::int64_t i = 0; i < packs; ++i, p += kPackBytes, bytes += kPackCodes) {
#pragma GCC unroll 4
    for (std::int64_t eight = 0; eight < 4; ++eight) {
      // 8 bytes are read, of which kBits are wanted: none past the pack's end.
      const std::int64_t at = std::min(eight * kBits, kPackBytes - 8);
      std::uint64_t u;
      std::memcpy(&u, p + at, sizeof(u));
      u = spread_eight<kBits>(u >> (8 * (eight * kBits - at)));
      std::memcpy(bytes + 8 * eight, &u, sizeof(u));
    }
  }
}

// A byte for each code: the codes themselves where they have 8 bits, else made in room.
HWY_INLINE const std::uint8_t* codes_as_bytes(int bits, const std::uint32_t* codes,
                                              std::int64_t packs, std::uint8_t* room) {
  const auto* p = reinterpret_cast<const std::uint8_t*>(codes);
  if (bits == 8) return p;
  with_bits(bits, [&](auto width) HWY_ATTR { spread_packs<width()>(p, packs, room); });
  return room;
}

// As many codes as f32 has lanes.
HWY_INLINE VF load_codes(DF d, const std::uint8_t* bytes) {
  return hn::ConvertTo(d, hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<std::uint8_t, DF>(), bytes)));
}

// ---- products ----

// 2·Lanes codes: w at even and at odd places. kBits: 4, or 8, which also stands for codes spread to bytes.
struct Group {
  VF s, b;  // of one row and group
#if HWY_TARGET == HWY_AVX3
  VF table;  // w of every code of 4 bits
#endif
  HWY_INLINE void set(DF d, float scale, float bias) {
    s = hn::Set(d, scale);
    b = hn::Set(d, bias);
#if HWY_TARGET == HWY_AVX3
    table = hn::MulAdd(s, hn::Iota(d, 0), b);
#endif
  }
  template <int kBits>
  HWY_INLINE void widen_codes(DF d, const std::uint8_t* p, VF& even, VF& odd) const {
    if constexpr (kBits == 4) {
      const auto both = hn::PromoteTo(DU(), hn::LoadU(hn::Rebind<std::uint8_t, DF>(), p));
#if HWY_TARGET == HWY_AVX3  // a lookup reads the lowest 4 bits of its lane
      even = VF{_mm512_permutexvar_ps(both.raw, table.raw)};
      odd = VF{_mm512_permutexvar_ps(hn::ShiftRight<4>(both).raw, table.raw)};
#else
      even = weight(d, hn::And(both, hn::Set(DU(), 15)));
      odd = weight(d, hn::ShiftRight<4>(both));
#endif
    } else {
      const auto both =
          hn::PromoteTo(DU(), hn::LoadU(DU16(), reinterpret_cast<const std::uint16_t*>(p)));
      even = weight(d, hn::And(both, hn::Set(DU(), 255)));
      odd = weight(d, hn::ShiftRight<8>(both));
    }
  }
  HWY_INLINE VF weight(DF d, hn::Vec<DU> q) const {
    return hn::MulAdd(s, hn::ConvertTo(d, hn::BitCast(DI(), q)), b);
  }
};

// How x lies for the products: f32, even places before odd ones of every two vectors; or bf16 in the same way, and after
// them Σ x of each group as f32.
enum class Order : std::uint8_t { kF32, kPairs };
constexpr std::int64_t kPairCodes = 64;  // even and odd ones fill a vector of bf16 each
template <class T>
Order order_for(int bits, std::int64_t group) {
  const bool pairs =
      std::is_same_v<T, BF16> && bits == 4 && group % kPairCodes == 0 && cpu::bf16_dots();
  return pairs ? Order::kPairs : Order::kF32;
}

// x of n elements as f32, in the order in which codes are widened. n: whole packs.
template <class T>
HWY_INLINE void order_row(const T* x, std::int64_t n, float* out) {
  const DF d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < n; i += 2 * lanes) {
    const VF first = load(d, x + i), second = load(d, x + i + lanes);
    hn::StoreU(hn::ConcatEven(d, second, first), d, out + i);
    hn::StoreU(hn::ConcatOdd(d, second, first), d, out + i + lanes);
  }
}

#if HWY_TARGET == HWY_AVX3
inline void order_pairs(const BF16* x, std::int64_t k, std::int64_t group, float* out) {
  const DF d;
  const auto* from = reinterpret_cast<const std::uint16_t*>(x);
  auto* to = reinterpret_cast<std::uint16_t*>(out);
  for (std::int64_t i = 0; i < k; i += kPairCodes) {
    for (std::int64_t j = 0; j < kPairCodes / 2; ++j) {
      to[i + j] = from[i + 2 * j];
      to[i + kPairCodes / 2 + j] = from[i + 2 * j + 1];
    }
  }
  float* sums = out + k / 2;
  for (std::int64_t i = 0; i < k; i += group) {
    VF sum = hn::Zero(d);
    each_vector(group, [&](std::int64_t j) HWY_ATTR { sum = hn::Add(sum, load(d, x + i + j)); });
    sums[i / group] = sum_lanes(d, sum);
  }
}
#endif

// One row of x, k long, for products with weights in such groups; room for k floats.
template <class T>
HWY_INLINE void order_row([[maybe_unused]] Order order, const T* x, std::int64_t k,
                          [[maybe_unused]] std::int64_t group, float* out) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (std::is_same_v<T, BF16>) {
    if (order == Order::kPairs) return order_pairs(x, k, group, out);
  }
#endif
  order_row(x, k, out);
}

// Rows of weights; s and b as f32.
struct CodeRows {
  const std::uint8_t* codes;
  std::int64_t pitch;  // bytes from row to row
  std::int64_t ahead;  // bytes from the first row to what is fetched first
  const float *s, *b;  // [row, groups]
  std::int64_t groups, group;
};

// sums [kFew, pitch] = x·wᵀ for kRows rows of weights and kFew of x [kFew, K], ordered.
template <int kBits, int kFew, int kRows>
HWY_NOINLINE void code_products(const CodeRows& w, const float* x, float* sums,
                                std::int64_t pitch) {
  const DF d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t k = w.groups * w.group;
  VF sum[kRows][kFew];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int m = 0; m < kFew; ++m) sum[r][m] = hn::Zero(d);
  }
  const std::uint8_t* p = w.codes;
  const std::uint8_t* ahead = w.codes + w.ahead;
  for (std::int64_t g = 0; g < w.groups; ++g) {
    Group group[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      group[r].set(d, w.s[r * w.groups + g], w.b[r * w.groups + g]);
      __builtin_prefetch(ahead);
      ahead += w.group * kBits / 8;
    }
    for (std::int64_t i = 0; i < w.group; i += 2 * lanes) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        VF even, odd;
        group[r].template widen_codes<kBits>(d, p + r * w.pitch, even, odd);
#pragma GCC unroll 8
        for (int m = 0; m < kFew; ++m) {
          sum[r][m] = hn::MulAdd(even, hn::LoadU(d, x + m * k), sum[r][m]);
          sum[r][m] = hn::MulAdd(odd, hn::LoadU(d, x + m * k + lanes), sum[r][m]);
        }
      }
      x += 2 * lanes;
      p += 2 * lanes * kBits / 8;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int m = 0; m < kFew; ++m) sums[m * pitch + r] = sum_lanes(d, sum[r][m]);
  }
}

// Rows of weights at a time: more share what is read of x, as far as the registers go.
constexpr int rows_beside(int few, Order order) {
  const int sums = HWY_TARGET == HWY_AVX3 ? (order == Order::kPairs ? 8 : 16) : 8;
  return std::clamp(sums / few, 1, 4);
}
using CodeProducts = void (*)(const CodeRows&, const float*, float*, std::int64_t);

#if HWY_TARGET == HWY_AVX3
// The same of codes of 4 bits and rows of x in Order::kPairs, K floats apart.
template <int kFew, int kRows>
HWY_NOINLINE void pair_products(const CodeRows& w, const float* x, float* sums,
                                std::int64_t pitch) {
  const DF d;
  const std::int64_t k = w.groups * w.group;
  // q − 8 as bf16, twice: a lookup reads 5 bits, of which the fifth belongs to the next code.
  HWY_ALIGN std::uint16_t numbers[32];
  for (int q = 0; q < 32; ++q) {
    numbers[q] = detail::bf16_bits(static_cast<float>(q % 16 - 8));
  }
  const __m512i table = _mm512_load_si512(numbers);
  VF sum[kRows][kFew];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int m = 0; m < kFew; ++m) sum[r][m] = hn::Zero(d);
  }
  const std::uint8_t* p = w.codes;
  const std::uint8_t* ahead = w.codes + w.ahead;
  const float* at = x;
  for (std::int64_t g = 0; g < w.groups; ++g) {
    VF part[kRows][kFew];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      __builtin_prefetch(ahead);
      ahead += w.group / 2;
#pragma GCC unroll 8
      for (int m = 0; m < kFew; ++m) part[r][m] = hn::Zero(d);
    }
    for (std::int64_t i = 0; i < w.group; i += kPairCodes) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512i both = _mm512_cvtepu8_epi16(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + r * w.pitch)));
        const __m512i even = _mm512_permutexvar_epi16(both, table);
        const __m512i odd = _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table);
#pragma GCC unroll 8
        for (int m = 0; m < kFew; ++m) {
          part[r][m] = add_pairs(part[r][m], even, _mm512_loadu_si512(at + m * k));
          part[r][m] = add_pairs(part[r][m], odd, _mm512_loadu_si512(at + m * k + 16));
        }
      }
      at += kPairCodes / 2;
      p += kPairCodes / 2;
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const VF s = hn::Set(d, w.s[r * w.groups + g]);
#pragma GCC unroll 8
      for (int m = 0; m < kFew; ++m) sum[r][m] = hn::MulAdd(s, part[r][m], sum[r][m]);
    }
  }
  const VF eight = hn::Set(d, 8.0F);
  for (std::int64_t g = 0; g < w.groups; g += kUnit) {
    const auto count = static_cast<std::size_t>(std::min<std::int64_t>(kUnit, w.groups - g));
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t from = r * w.groups + g;
      const VF b = hn::MulAdd(eight, load_n(d, w.s + from, count), load_n(d, w.b + from, count));
#pragma GCC unroll 8
      for (int m = 0; m < kFew; ++m) {
        sum[r][m] = hn::MulAdd(b, load_n(d, x + m * k + k / 2 + g, count), sum[r][m]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int m = 0; m < kFew; ++m) sums[m * pitch + r] = sum_lanes(d, sum[r][m]);
  }
}
template <bool kOneRow>
constexpr std::array<CodeProducts, kMostFew> kPairProducts =
    []<int... kFew>(std::integer_sequence<int, kFew...>) {
      return std::array<CodeProducts, kMostFew>{
          (&pair_products<kFew + 1, (kOneRow ? 1 : rows_beside(kFew + 1, Order::kPairs))>)...};
    }(std::make_integer_sequence<int, kMostFew>());
#endif

template <int kBits, bool kOneRow>
constexpr std::array<CodeProducts, kMostFew> kCodeProducts =
    []<int... kFew>(std::integer_sequence<int, kFew...>) {
      return std::array<CodeProducts, kMostFew>{
          (&code_products<kBits, kFew + 1, (kOneRow ? 1 : rows_beside(kFew + 1, Order::kF32))>)...};
    }(std::make_integer_sequence<int, kMostFew>());

// Weights as they are stored: codes [N, K·bits/32], scales and biases [N, K/group].
template <class S>
struct Quantized {
  const std::uint32_t* codes;
  const S *scales, *biases;
  std::int64_t k;
  int bits;
  std::int64_t group;

  std::int64_t words() const { return k * bits / 32; }
  std::int64_t groups() const { return k / group; }
};

// Floats of room that quantized_products needs.
inline std::int64_t quantized_room(std::int64_t k) {
  return 2 * in_units(4 * (k / 32)) + in_units(k);
}

// Which of them: codes of 4 bits or bytes, rows one by one or several.
HWY_INLINE CodeProducts products_of([[maybe_unused]] Order order, bool nibbles, bool one_row,
                                    std::int64_t few) {
  const auto which = static_cast<std::size_t>(few - 1);
#if HWY_TARGET == HWY_AVX3
  if (order == Order::kPairs)
    return one_row ? kPairProducts<true>[which] : kPairProducts<false>[which];
#endif
  if (one_row) return nibbles ? kCodeProducts<4, true>[which] : kCodeProducts<8, true>[which];
  return nibbles ? kCodeProducts<4, false>[which] : kCodeProducts<8, false>[which];
}

// out [few, pitch] = x·wᵀ for rows [row, row + rows) of the weights and few <= kMostFew rows of x, in the order given. A
// sum does not depend on the rows beside it.
template <class S>
HWY_NOINLINE void quantized_products(const Quantized<S>& w, std::int64_t row, std::int64_t rows,
                                     Order order, const float* x, std::int64_t few, float* room,
                                     float* out, std::int64_t pitch) {
  const std::int64_t groups = w.groups();
  Pieces pieces{room};
  float *s = pieces.take(4 * (w.k / 32)), *b = pieces.take(4 * (w.k / 32));
  auto* bytes = reinterpret_cast<std::uint8_t*>(pieces.take(w.k));
  const bool nibbles = w.bits == 4, whole = nibbles || w.bits == 8;
  for (std::int64_t i = 0; i < rows;) {
    const std::int64_t beside = rows_beside(static_cast<int>(few), order);
    const std::int64_t count = i + beside <= rows ? beside : 1;
    const std::uint32_t* codes = w.codes + (row + i) * w.words();
    load_row(w.scales + (row + i) * groups, count * groups, s);
    load_row(w.biases + (row + i) * groups, count * groups, b);
    const std::int64_t row_bytes = w.words() * 4;
    CodeRows some{reinterpret_cast<const std::uint8_t*>(codes),
                  row_bytes,
                  kRowsAhead * row_bytes,
                  s,
                  b,
                  groups,
                  w.group};
    if (!whole) {
      some.codes = codes_as_bytes(w.bits, codes, count * w.k / kPackCodes, bytes);
      some.pitch = w.k;
      some.ahead = 0;
    }
    products_of(order, nibbles, count == 1, few)(some, x, out + i, pitch);
    i += count;
  }
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
