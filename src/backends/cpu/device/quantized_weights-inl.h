// Quantised weights as a source of products (weights-inl.h): a part is dequantised when it is needed, into the cache; a few rows
// of x meet the codes themselves (quantized-inl.h). As f32 a weight is exact; as half of a pair it is rounded to bf16.
#include "backends/cpu/device/quantized-inl.h"
#include "backends/cpu/device/weights-inl.h"

#include <cmath>

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_QUANTIZED_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_QUANTIZED_WEIGHTS_INL_H_
#undef MLXTAPE_CPU_QUANTIZED_WEIGHTS_INL_H_
#else
#define MLXTAPE_CPU_QUANTIZED_WEIGHTS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kMostPart = 2 * kDepth;  // numbers of a row at a time

// Scales and biases have type T, or are f32: wide.
template <class T>
struct QuantizedWeights {
  const std::uint32_t* codes;   // [N, K·bits/32]
  const void *scales, *biases;  // [N, K/group]
  std::int64_t k;
  int bits;
  std::int64_t group;
  bool wide;

  // Calls body(Quantized) with their type.
  template <class Body>
  void with_type(const Body& body) const {
    const auto as = [&](auto zero) {
      using S = decltype(zero);
      body(Quantized<S>{codes, static_cast<const S*>(scales), static_cast<const S*>(biases), k,
                        bits, group});
    };
    wide ? as(float()) : as(T());
  }

  // Calls body(s, b, where, codes, count) for each group, or what a part has of it. Codes of 4 bits as they are, two in a
  // byte, others as bytes.
  template <class Body>
  HWY_INLINE void each_group(std::int64_t row, std::int64_t col, std::int64_t length,
                             const Body& body) const {
    HWY_ALIGN std::uint8_t room[kMostPart];
    const std::uint32_t* from = codes + row * (k * bits / 32) + col * bits / 32;
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(from);
    if (bits != 4) bytes = codes_as_bytes(bits, from, length / kPackCodes, room);
    const auto number = [&](const void* all, std::int64_t i) {
      const float v = wide ? static_cast<const float*>(all)[i]
                           : static_cast<float>(static_cast<const T*>(all)[i]);
      return std::isnan(v) ? std::numeric_limits<float>::quiet_NaN() : v;  // see round_bf16
    };
    for (std::int64_t i = 0; i < length;) {
      const std::int64_t g = (col + i) / group;
      const std::int64_t count = std::min(length, (g + 1) * group - col) - i;
      const std::int64_t at = row * (k / group) + g;
      body(number(scales, at), number(biases, at), i, bytes + (bits == 4 ? i / 2 : i), count);
      i += count;
    }
  }
  // Calls store(where, w at even places, w at odd ones) for every two vectors of a part of a row.
  template <int kBits, class Store>
  HWY_INLINE void unpack(std::int64_t row, std::int64_t col, std::int64_t length,
                         const Store& store) const {
    each_group(row, col, length,
               [&](float s, float b, std::int64_t at, const std::uint8_t* p, std::int64_t count)
                   HWY_ATTR {
                     const DF d;
                     const auto step = static_cast<std::int64_t>(2 * hn::Lanes(d));
                     Group g;
                     g.set(d, s, b);
                     for (std::int64_t i = 0; i < count; i += step, p += step * kBits / 8) {
                       VF even, odd;
                       g.widen_codes<kBits>(d, p, even, odd);
                       store(at + i, even, odd);
                     }
                   });
  }

  void lines(std::int64_t row, std::int64_t col, std::int64_t count, std::int64_t length,
             float* out, std::int64_t pitch) const {
    for (std::int64_t i = 0; i < count; ++i, ++row, out += pitch) {
      const auto store = [&](std::int64_t at, VF even, VF odd) HWY_ATTR {
        hn::StoreInterleaved2(even, odd, DF(), out + at);
      };
      bits == 4 ? unpack<4>(row, col, length, store) : unpack<8>(row, col, length, store);
    }
  }

#if HWY_TARGET == HWY_AVX3
  void pairs(std::int64_t row, std::int64_t col, std::int64_t count, std::int64_t length,
             float* out, std::int64_t pitch) const {
    for (std::int64_t i = 0; i < count; ++i, ++row, out += pitch) {
      if (bits == 4) {
        pairs_of_nibbles(row, col, length, out);
        continue;
      }
      unpack<8>(row, col, length, [&](std::int64_t at, VF even, VF odd) HWY_ATTR {
        hn::StoreU(pair_of(even, odd), DF(), out + at / 2);
      });
    }
  }
  // Sixteen weights are rounded for a group, and looked up for each code.
  void pairs_of_nibbles(std::int64_t row, std::int64_t col, std::int64_t length, float* out) const {
    each_group(
        row, col, length,
        [&](float s, float b, std::int64_t at, const std::uint8_t* p, std::int64_t count) HWY_ATTR {
          const DF d;
          Group g;
          g.set(d, s, b);
          const VF lower = pair_of(g.table, hn::Zero(d));
          const VF upper = pair_of(hn::Zero(d), g.table);
          for (std::int64_t i = 0; i < count; i += 32, p += 16) {
            const auto both = hn::PromoteTo(DU(), hn::LoadU(hn::Rebind<std::uint8_t, DF>(), p));
            const VF even{_mm512_permutexvar_ps(both.raw, lower.raw)};
            const VF odd{_mm512_permutexvar_ps(hn::ShiftRight<4>(both).raw, upper.raw)};
            hn::StoreU(hn::Or(even, odd), d, out + (at + i) / 2);
          }
        });
  }
  static HWY_INLINE VF pair_of(VF even, VF odd) {
    const auto upper = hn::And(round_bf16(odd), hn::Set(DU(), 0xffff0000U));
    return hn::BitCast(DF(), hn::Or(hn::ShiftRight<16>(round_bf16(even)), upper));
  }
#endif

  template <ProductStep kStep>
  static constexpr bool lies() {
    return false;
  }

  // Codes that are widened in registers are read a second time sooner than dequantised.
  std::int64_t most_few() const { return bits == 4 || bits == 8 ? 2 * kMostFew : kMostFew; }
  std::int64_t few_pitch() const { return k; }
  std::int64_t few_room() const { return quantized_room(k); }
  template <class X>
  void prepare(const X* x, float* out) const {
    order_row(order_for<X>(bits, group), x, k, group, out);
  }
  template <class X>
  void few(std::int64_t row, std::int64_t rows, const float* x, std::int64_t /*apart*/,
           std::int64_t count, float* room, float* out, std::int64_t pitch) const {
    with_type([&](const auto& w) {
      for (std::int64_t i = 0; i < count; i += kMostFew) {
        quantized_products(w, row, rows, order_for<X>(bits, group), x + i * k,
                           std::min<std::int64_t>(kMostFew, count - i), room, out + i * pitch,
                           pitch);
      }
    });
  }
};

// The gradient of scales and biases: ds = Σ dw·q, db = Σ dw over each group of the parts of dw that are put, whole groups.
template <class T>
struct QuantizedGradient {
  QuantizedWeights<T> w;
  void *ds, *db;  // as scales and biases

  void put(std::int64_t row, std::int64_t col, std::int64_t rows, std::int64_t length,
           const float* dw, std::int64_t pitch) const {
    const DF d;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    const std::int64_t packs = w.group / kPackCodes;
    HWY_ALIGN std::uint8_t room[kMostPart];
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t c = 0; c < length; c += w.group) {
        const std::int64_t g = (row + i) * (w.k / w.group) + (col + c) / w.group;
        const std::uint8_t* q = codes_as_bytes(w.bits, w.codes + g * packs * w.bits, packs, room);
        const float* from = dw + i * pitch + c;
        VF s = hn::Zero(d), b = s;
        for (std::int64_t j = 0; j < w.group; j += lanes) {
          const VF v = hn::LoadU(d, from + j);
          s = hn::MulAdd(v, load_codes(d, q + j), s);
          b = hn::Add(b, v);
        }
        store_at(ds, g, sum_lanes(d, s));
        store_at(db, g, sum_lanes(d, b));
      }
    }
  }
  void store_at(void* all, std::int64_t i, float v) const {
    w.wide ? void(static_cast<float*>(all)[i] = v)
           : void(static_cast<T*>(all)[i] = static_cast<T>(v));
  }
};

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
