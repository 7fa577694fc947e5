// The formula block of sample.h for one row, with a sort and 128-bit integers, for sample_test.cpp. Written without the
// kernels' formulas.h, whose bits it must have.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "mlxtape/ops/sample.h"

namespace mlxtape::test {

struct SampleCase {
  std::vector<double> logits;
  ops::SampleRow row = {};
  std::vector<std::int32_t> history = {};
  std::vector<std::pair<std::int32_t, float>> bias = {};
};

// A number and the size of the terms that made it.
struct Sized {
  double value, scale;
};

struct Chosen {
  std::int32_t token = -1;
  Sized logprob = {NAN, 1};
  std::vector<std::int32_t> top_ids = std::vector<std::int32_t>(20, -1);
  std::vector<Sized> top_logprobs = std::vector<Sized>(20, {NAN, 1});
  std::vector<float> z;            // changed logits
  std::vector<std::int32_t> kept;  // who may be drawn, most likely first
};

// Threefry-2x32 with 20 rounds as its authors write it.
inline std::pair<std::uint32_t, std::uint32_t> threefry(std::uint32_t k0, std::uint32_t k1,
                                                        std::uint32_t x0, std::uint32_t x1) {
  const std::uint32_t ks[3] = {k0, k1, 0x1BD11BDAU ^ k0 ^ k1};
  const unsigned rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  x0 += ks[0];
  x1 += ks[1];
  for (std::uint32_t round = 0; round < 20; ++round) {
    const unsigned by = rotations[round % 8];
    x0 += x1;
    x1 = (x1 << by) | (x1 >> (32 - by));
    x1 ^= x0;
    if (round % 4 != 3) continue;
    const std::uint32_t s = round / 4 + 1;
    x0 += ks[s % 3];
    x1 += ks[(s + 1) % 3] + s;
  }
  return {x0, x1};
}

// w(d, c): 2^(−d·c) in units of 2⁻⁴⁰, every operation of f32 rounded.
inline std::uint64_t weight_of(float d, float c) {
  float t = d * -c;
  if (t < -45) t = -45;
  const float n = (t + 12582912.0F) - 12582912.0F;  // the nearest whole number
  const float f = t - n;
  float p = 0x1.23ca7ep-10F;
  for (const float a : {0x1.3ca128p-7F, 0x1.c73808p-5F, 0x1.ebfa90p-3F, 0x1.62e3b6p-1F, 1.0F}) {
    p = p * f;
    p = p + a;
  }
  return static_cast<std::uint64_t>(std::ldexp(static_cast<double>(p), static_cast<int>(n) + 40));
}

inline std::vector<float> changed_logits(const SampleCase& c, const std::vector<float>& x) {
  std::vector<float> z = x;
  const auto count = static_cast<std::int64_t>(z.size());
  const auto length = static_cast<std::int64_t>(c.history.size());
  std::map<std::int32_t, bool> seen;
  for (const auto& [id, bias] : c.bias) {
    if (id < 0 || id >= count || seen[id]) continue;
    seen[id] = true;
    z[static_cast<std::size_t>(id)] += bias;
  }
  const auto begin = [&](std::int64_t context) {
    return context < 0 ? 0 : std::max<std::int64_t>(0, length - context);
  };
  std::map<std::int32_t, bool> repeated;
  for (std::int64_t j = begin(c.row.repetition_context); j < length; ++j) {
    repeated[c.history[static_cast<std::size_t>(j)]] = true;
  }
  std::map<std::int32_t, int> times;
  for (std::int64_t j = std::max(begin(c.row.penalty_context), c.row.start); j < length; ++j) {
    ++times[c.history[static_cast<std::size_t>(j)]];
  }
  const auto penalty = static_cast<float>(c.row.repetition_penalty);
  for (const auto& [token, is] : repeated) {
    if (token < 0 || token >= count || penalty == 1) continue;
    float& v = z[static_cast<std::size_t>(token)];
    v = v < 0 ? v * penalty : v / penalty;
  }
  const auto presence = static_cast<float>(c.row.presence_penalty);
  const auto frequency = static_cast<float>(c.row.frequency_penalty);
  for (const auto& [token, n] : times) {
    if (token < 0 || token >= count || (presence == 0 && frequency == 0)) continue;
    const float product = frequency * static_cast<float>(n);
    z[static_cast<std::size_t>(token)] -= product + presence;
  }
  for (float& v : z) {
    if (std::isnan(v)) v = -INFINITY;
  }
  return z;
}

struct Likely {
  float d;
  std::int32_t token;
};
// Most likely first; `most` is the largest of z and finite.
inline std::vector<Likely> in_order(const std::vector<float>& z, float most) {
  std::vector<Likely> order;
  order.reserve(z.size());
  for (const float v : z) order.push_back({most - v, static_cast<std::int32_t>(order.size())});
  std::sort(order.begin(), order.end(), [](const Likely& a, const Likely& b) {
    return a.d != b.d ? a.d < b.d : a.token < b.token;
  });
  return order;
}

// How many of the order all filters keep.
inline std::size_t kept_of(const ops::SampleRow& row, const std::vector<Likely>& order) {
  constexpr float kLog2E = 1.44269504F;
  std::size_t kept = order.size();
  if (row.top_k > 0) kept = std::min(kept, static_cast<std::size_t>(row.top_k));
  const auto top_p = static_cast<float>(row.top_p);
  if (top_p < 1) {
    unsigned __int128 all = 0, mass = 0;
    for (const Likely& l : order) all += weight_of(l.d, kLog2E);
    const auto least = std::max<unsigned __int128>(
        1, (all * static_cast<std::uint64_t>(static_cast<double>(top_p) * 0x1p32)) >> 32U);
    std::size_t n = 0;
    while (mass < least) mass += weight_of(order[n++].d, kLog2E);
    kept = std::min(kept, n);
  }
  if (row.min_p > 0) {
    const auto reach = static_cast<float>(-std::log(row.min_p));
    while (kept > 1 && order[kept - 1].d > reach) --kept;
  }
  return kept;
}

inline Chosen choose(const SampleCase& c) {
  constexpr float kLog2E = 1.44269504F;
  Chosen chosen;
  std::vector<float> x;
  for (const double v : c.logits) {
    x.push_back(std::isnan(v) ? -INFINITY : static_cast<float>(v));
  }
  const auto most_of = [](const std::vector<float>& v) {
    return *std::max_element(v.begin(), v.end()) + 0.0F;
  };
  const float raw_most = most_of(x);
  chosen.z = changed_logits(c, x);
  const float most = most_of(chosen.z);
  if (!std::isfinite(raw_most) || !std::isfinite(most)) return chosen;

  const auto order = in_order(chosen.z, most);
  const std::size_t kept = kept_of(c.row, order);
  for (std::size_t i = 0; i < kept; ++i) chosen.kept.push_back(order[i].token);
  chosen.token = order[0].token;
  if (c.row.temperature > 0) {
    const float temperature =
        std::max(std::numeric_limits<float>::denorm_min(), static_cast<float>(c.row.temperature));
    const float slope =
        std::clamp(kLog2E / temperature, 0x1p-126F, std::numeric_limits<float>::max());
    std::vector<std::uint64_t> v(x.size());
    unsigned __int128 all = 0;
    for (std::size_t i = 0; i < kept; ++i) {
      all += v[static_cast<std::size_t>(order[i].token)] = weight_of(order[i].d, slope);
    }
    const auto [high, low] = threefry(static_cast<std::uint32_t>(c.row.seed >> 32U),
                                      static_cast<std::uint32_t>(c.row.seed),
                                      static_cast<std::uint32_t>(c.history.size()), 0);
    const auto target = ((std::uint64_t{high} << 32U | low) * all) >> 64U;
    unsigned __int128 sum = 0;
    for (chosen.token = 0;; ++chosen.token) {
      sum += v[static_cast<std::size_t>(chosen.token)];
      if (sum > target) break;
    }
  }

  double mass = 0;
  for (const float v : x) mass += std::exp(static_cast<double>(v) - static_cast<double>(raw_most));
  const auto logprob = [&](std::int32_t token) {
    const double d =
        static_cast<double>(raw_most) - static_cast<double>(x[static_cast<std::size_t>(token)]);
    return Sized{-d - std::log(mass), d + std::log(mass) + 1};
  };
  chosen.logprob = logprob(chosen.token);
  const auto top = in_order(x, raw_most);
  for (std::size_t i = 0; i < 20; ++i) {
    const bool is = i < top.size() && std::isfinite(top[i].d);
    chosen.top_ids[i] = is ? top[i].token : -1;
    chosen.top_logprobs[i] = is ? logprob(top[i].token) : Sized{-INFINITY, 1};
  }
  return chosen;
}

// Any settings that are allowed, often several filters and penalties at once.
template <class Noise>
SampleCase any_case(Noise& noise, std::int64_t tokens, double deviation) {
  const auto one_of = [&](std::initializer_list<double> values) {
    return *(values.begin() + noise.below(static_cast<std::int64_t>(values.size())));
  };
  SampleCase c;
  for (std::int64_t i = 0; i < tokens; ++i) c.logits.push_back(deviation * noise.normal());
  c.row.temperature = one_of({0, 1, 1, 0.7, 1.5, 3});
  c.row.top_p = one_of({1, 1, 0.9, 0.5, 0.95, 0.01});
  c.row.min_p = one_of({0, 0, 0.05, 0.3});
  c.row.top_k = static_cast<std::int64_t>(
      one_of({0, 0, 1, 5, 50, static_cast<double>(tokens), static_cast<double>(tokens + 5)}));
  c.row.seed = static_cast<std::uint64_t>(noise.below(1LL << 40));
  if (noise.below(2) == 0) return c;
  c.row.repetition_penalty = one_of({1, 1.1, 1.5, 0.8});
  c.row.presence_penalty = one_of({0, 0.5, -0.5});
  c.row.frequency_penalty = one_of({0, 0.25, 1});
  c.row.repetition_context = static_cast<std::int64_t>(one_of({-1, 0, 3, 20}));
  c.row.penalty_context = static_cast<std::int64_t>(one_of({-1, 0, 4, 20}));
  c.row.start = noise.below(10);
  const std::int64_t length = noise.below(40);
  for (std::int64_t j = 0; j < length; ++j) {
    c.history.push_back(static_cast<std::int32_t>(noise.below(std::min<std::int64_t>(tokens, 9)) -
                                                  (noise.below(9) == 0 ? 3 : 0)));
  }
  const std::int64_t biases = noise.below(4);
  for (std::int64_t k = 0; k < biases; ++k) {
    c.bias.emplace_back(static_cast<std::int32_t>(noise.below(tokens + 2) - 1),
                        static_cast<float>(3 * noise.next()));
  }
  return c;
}

}  // namespace mlxtape::test
