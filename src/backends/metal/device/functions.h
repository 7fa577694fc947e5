// Logarithms, powers and the normal distribution, within a few ulp of f32 whatever the hardware's functions leave open.
#pragma once

#include "backends/metal/device/exp.h"

// (2·atanh s − 2s)/s³ for s² up to 0.03.
inline float atanh_rest(float square) {
  float p = fma(square, 2.0f / 11, 2.0f / 9);
  p = fma(square, p, 2.0f / 7);
  p = fma(square, p, 2.0f / 5);
  return fma(square, p, 2.0f / 3);
}

// log(1 + x): near 1 a series, within 2 ulp; elsewhere what the rounding of the sum changes is less than what the logarithm
// may be off.
inline float log_of_one_plus(float x) {
  if (x > -0.29f && x < 0.41f) {
    const float s = x / (2.0f + x);
    const float square = s * s;
    return fma(s * square, atanh_rest(square), s + s);
  }
  return precise::log(1.0f + x);
}

// log2 of the positive, finite number that has these bits, in two parts of which the second is small: 2^-40 of it may be
// wrong. m·2^e with m in [√½, √2), log m = 2·atanh s with s = (m − 1)/(m + 1).
struct Log2 {
  float high, low;
};
inline Log2 log2_of(uint bits) {
  int e = 0;
  if (bits < 0x00800000u) {  // subnormal: by integers, for arithmetic may take it for 0
    const int shift = int(clz(bits)) - 8;
    bits <<= shift;
    e = -shift;
  }
  const int half_up = int(bits - 0x3f3504f3u) >> 23;
  e += half_up;
  const float m = as_type<float>(bits - (uint(half_up) << 23));
  const float d = m - 1.0f, whole = m + 1.0f;
  const float s = d / whole;
  const float whole_low = d - (whole - 2.0f);  // what m + 1 = 2 + d has lost
  const float s_low = (fma(-s, whole, d) - s * whole_low) / whole;
  const float square = s * s;
  const float p = atanh_rest(square);
  // log2 m = (2s + s³·p)/log 2
  const float kHigh = 1.44269502f, kLow = 1.92596303e-08f;  // 1/log 2
  const float two = 2.0f * s;
  const float rest = fma(s * square, p, 2.0f * s_low);
  const float product = two * kHigh;
  const float product_low = fma(two, kHigh, -product) + fma(two, kLow, rest * kHigh);
  Log2 log;
  log.high = float(e) + product;  // e is 0 or the larger
  log.low = (e == 0 ? 0.0f : product - (log.high - float(e))) + product_low;
  return log;
}

// 2^f for |f| <= ½, within 2 ulp: the first terms of its series.
inline float exp2_of(float f) {
  float p = fma(f, 1.52527338e-05f, 0.000154035304f);
  p = fma(f, p, 0.00133335581f);
  p = fma(f, p, 0.00961812911f);
  p = fma(f, p, 0.0555041087f);
  p = fma(f, p, 0.240226507f);
  p = fma(f, p, 0.693147181f);
  return fma(f, p, 1.0f);
}

// a^b, as IEEE 754 says it for special cases; within 3 ulp.
inline float power_of(float a, float b) {
  const uint size = as_type<uint>(a) & 0x7fffffffu;
  const bool is_plain = size != 0 && size < 0x7f800000u && fabs(b) < INFINITY && b != 0;
  const bool is_whole = floor(b) == b;
  const float half_b = 0.5f * b;
  const bool is_odd = is_whole && floor(half_b) != half_b;
  const bool is_negative = as_type<int>(a) < 0;
  if (a != a || b != b) return b == 0 || a == 1.0f ? 1.0f : NAN;
  if (!is_plain) {
    if (b == 0 || a == 1.0f || (a == -1.0f && fabs(b) == INFINITY)) return 1.0f;
    float y;
    if (fabs(b) == INFINITY) {
      y = (size > 0x3f800000u) == (b > 0) ? INFINITY : 0.0f;
    } else {
      y = (size != 0) == (b > 0) ? INFINITY : 0.0f;  // a is 0 or infinite
      if (is_negative && is_odd) y = -y;
    }
    return y;
  }
  if (a == 1.0f) return 1.0f;
  const Log2 log = log2_of(size);
  // b·log2 a, in two parts; the fraction of it to be raised, the rest to be the exponent.
  const float high = b * log.high;
  float y;
  if (!(fabs(high) < 250.0f)) {
    y = high > 0 ? INFINITY : 0.0f;
  } else {
    const float low = fma(b, log.high, -high) + b * log.low;
    const float whole = rint(high);
    y = exp2_of((high - whole) + low);
    // In two steps: 2^whole may be too small or too large for a normal number where y·2^whole is not.
    const int first = int(whole) / 2;
    y = y * as_type<float>(uint(first + 127) << 23) *
        as_type<float>(uint(int(whole) - first + 127) << 23);
  }
  if (is_negative) y = !is_whole ? NAN : is_odd ? -y : y;
  return y;
}

// The normal distribution: its share below x, Φ(x), and its density there; of NaN, those of 15.
//
// Φ(−a) = exp(−a²/2)·t·P(1 − t) with t = 1/(1 + 0.4·a), P fitted to the smallest relative error (1.7e-8) for a in [0, 15]
// with P(0) = ½ exactly. What the rounding of a² loses is put back.
struct Normal {
  float share, density;
};
inline Normal normal_of(float x) {
  const float a = min(fabs(x), 15.0f);  // Φ(−15) is 0 in f32
  const float a2 = a * a;
  float e = precise::exp(-0.5f * a2);
  e = fma(-0.5f * fma(a, a, -a2), e, e);
  const float t = 1.0f / fma(0.4f, a, 1.0f);
  const float u = 0.4f * a * t;
  float p = fma(u, -0.0319373198f, 0.11194139f);
  p = fma(u, p, -0.125404581f);
  p = fma(u, p, 0.0552458018f);
  p = fma(u, p, -0.0599238127f);
  p = fma(u, p, 0.0224236455f);
  p = fma(u, p, 0.116744764f);
  p = fma(u, p, 0.067843087f);
  p = fma(u, p, -0.497356892f);
  p = fma(u, p, 0.5f);
  const float beyond = e * (t * p);
  Normal result;
  result.share = x < 0 ? beyond : 1.0f - beyond;
  result.density = e * 0.3989422804f;
  return result;
}
