// The parts of mlxtape/ops/sample.h that must have the same bits everywhere, for the kernels' scalar code; the CPU's
// vectors repeat power() operation by operation (sample_passes-inl.h).
//
// No two operations are fused: the least instruction set of a CPU could not do that.
#pragma once

#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define MT_SAMPLE __host__ __device__ inline
#else
#define MT_SAMPLE inline
#endif

namespace mlxtape::ops::sampling {

// ---- f32, each rounded ----

MT_SAMPLE float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
MT_SAMPLE float sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
MT_SAMPLE float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

constexpr float kMinusInfinity = -__builtin_huge_valf();

// A logit as it counts. −0 becomes +0.
MT_SAMPLE float counted(float x) { return x == x ? sum(x, 0.0F) : kMinusInfinity; }

// ---- weights ----

constexpr float kLog2E = 0x1.715476p+0F;
constexpr float kMagic = 0x1.8p+23F;  // adding it rounds to a whole number
constexpr float kLeast = -45.0F;      // 2^kLeast is less than a unit
constexpr float kUnit = 0x1p+40F;
// 2^f = 1 + f·(c1 + …), fitted to the smallest relative error, 7.0e-7, on [−1/2, 1/2].
constexpr float kC1 = 0x1.62e3b6p-1F, kC2 = 0x1.ebfa90p-3F, kC3 = 0x1.c73808p-5F;
constexpr float kC4 = 0x1.3ca128p-7F, kC5 = 0x1.23ca7ep-10F;

// 2^t for t ≤ 0; from kLeast down as there.
MT_SAMPLE float power(float t) {
  t = t > kLeast ? t : kLeast;
  const float shifted = sum(t, kMagic);
  const float f = sum(t, -sum(shifted, -kMagic));
  float p = sum(product(kC5, f), kC4);
  p = sum(product(p, f), kC3);
  p = sum(product(p, f), kC2);
  p = sum(product(p, f), kC1);
  p = sum(product(p, f), 1.0F);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(p) +
                              (std::bit_cast<std::uint32_t>(shifted) << 23U));
}
// w(d, −slope); at most 2⁴⁰, so that those of 2²⁴ tokens add up within 64 bits.
MT_SAMPLE std::uint64_t weight(float d, float slope) {
  return static_cast<std::uint64_t>(product(power(product(d, slope)), kUnit));
}
// −log₂e/temperature, neither 0 nor infinite.
MT_SAMPLE float slope_of(float temperature) {
  const float c = quotient(kLog2E, temperature);
  return c < 0x1p-126F ? -0x1p-126F : c > 0x1.fffffep+127F ? -0x1.fffffep+127F : -c;
}

// ---- order ----

// What is more likely has the smaller place: d above the token.
MT_SAMPLE std::uint64_t place_of(std::uint32_t d_bits, std::uint32_t token) {
  return std::uint64_t{d_bits} << 32U | token;
}

// The upper half of a·b.
MT_SAMPLE std::uint64_t product_high(std::uint64_t a, std::uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  const std::uint64_t a0 = a & 0xffffffffU, a1 = a >> 32U;
  const std::uint64_t b0 = b & 0xffffffffU, b1 = b >> 32U;
  const std::uint64_t low = a0 * b0, cross = a1 * b0 + (low >> 32U);
  const std::uint64_t other = a0 * b1 + (cross & 0xffffffffU);
  return a1 * b1 + (cross >> 32U) + (other >> 32U);
#endif
}

// ---- settings ----

struct Settings {
  float temperature, top_p, reach, repetition, presence, frequency;
  std::int32_t top_k, repetition_context, penalty_context, start;
  std::uint32_t seed_low, seed_high;

  MT_SAMPLE bool greedy() const { return !(temperature > 0); }
  MT_SAMPLE bool searches() const { return !greedy() && (top_p < 1 || top_k > 0); }
  // The mass that top_p asks for of W; what no mass reaches where it is off.
  MT_SAMPLE std::uint64_t least_mass(std::uint64_t all) const {
    if (!(top_p < 1)) return ~std::uint64_t{0};
    const float p = top_p > 0 ? product(top_p, 0x1p+32F) : 0.0F;
    const std::uint64_t least = product_high(all, static_cast<std::uint64_t>(p) << 32U);
    return least > 0 ? least : 1;
  }
  MT_SAMPLE std::uint64_t most_tokens() const {
    return top_k > 0 ? static_cast<std::uint64_t>(top_k) : ~std::uint64_t{0};
  }
  // The last place that min_p keeps.
  MT_SAMPLE std::uint64_t last_in_reach() const {
    return place_of(std::bit_cast<std::uint32_t>(reach > 0 ? reach : 0.0F), 0xffffffffU);
  }
};
static_assert(sizeof(Settings) == 48, "the columns of numbers, then those of whole");
static_assert(sizeof(Settings) == 48, "the columns of numbers, then those of whole");
MT_SAMPLE Settings settings_of(const float* numbers, const std::int32_t* whole) {
  return {numbers[0],
          numbers[1],
          numbers[2],
          numbers[3],
          numbers[4],
          numbers[5],
          whole[0],
          whole[1],
          whole[2],
          whole[3],
          static_cast<std::uint32_t>(whole[4]),
          static_cast<std::uint32_t>(whole[5])};
}

// The parts of a row's history that penalties look at: [from, end); empty where a penalty is off.
struct Windows {
  std::int64_t repetition, penalty, end;

  MT_SAMPLE std::int64_t begin() const { return repetition < penalty ? repetition : penalty; }
  MT_SAMPLE bool any() const { return begin() < end; }
};
MT_SAMPLE Windows windows_of(const Settings& s, std::int64_t length, std::int64_t room) {
  const std::int64_t end = length < 0 ? 0 : length < room ? length : room;
  const auto from = [&](std::int32_t context, std::int64_t start) {
    const std::int64_t first = context < 0 || length < context ? 0 : length - context;
    return first > start ? first : start;
  };
  Windows w{end, end, end};
  if (s.repetition != 1) w.repetition = from(s.repetition_context, 0);
  if (s.presence != 0 || s.frequency != 0) w.penalty = from(s.penalty_context, s.start);
  return w;
}

MT_SAMPLE float penalised(const Settings& s, float z, bool repeated, std::uint32_t times) {
  if (repeated) z = z < 0 ? product(z, s.repetition) : quotient(z, s.repetition);
  if (times > 0) {
    z = sum(z, -sum(product(s.frequency, static_cast<float>(times)), s.presence));
  }
  return counted(z);
}

// ---- the number that is drawn ----

MT_SAMPLE std::uint64_t random_of(const Settings& s, std::uint32_t position) {
  const std::uint32_t key[3] = {s.seed_high, s.seed_low, s.seed_high ^ s.seed_low ^ 0x1bd11bdaU};
  std::uint32_t x = position + key[0], y = key[1];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (std::uint32_t r = 0; r < 20; ++r) {
    constexpr std::uint32_t kShifts = 0x061a0f0dU, kOther = 0x18101d11U;  // 13 15 26 6, 17 29 16 24
    const std::uint32_t by = ((r / 4 % 2 == 0 ? kShifts : kOther) >> (r % 4 * 8)) & 31U;
    x += y;
    y = (y << by | y >> (32 - by)) ^ x;
    if (r % 4 == 3) {
      const std::uint32_t turn = r / 4 + 1;
      x += key[turn % 3];
      y += key[(turn + 1) % 3] + turn;
    }
  }
  return std::uint64_t{x} << 32U | y;
}

}  // namespace mlxtape::ops::sampling
