// The scalar half of the CPU kernels of sample: what is known of a row, and what is done with few of its tokens.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "formulas.h"

namespace mlxtape::ops::sampling {

constexpr std::int64_t kPart = 8192;  // tokens of a task
constexpr std::size_t kBins = 512;    // of d, sixteen for each unit, the last for all the rest
constexpr float kBinsOfUnit = 16;
constexpr std::size_t kListed = 20;  // top_ids

struct Bin {
  std::uint64_t mass, tokens;
};

// What the task of one part of a row leaves for the row.
struct Part {
  float raw_max, max;            // of x and of z
  std::uint64_t raw_mass, mass;  // Σ w of x; Σ v of what is kept
  std::int64_t candidates;
  std::int64_t listed;
  std::array<std::uint64_t, kListed> list;  // the most likely by x, places in order
  std::array<Bin, kBins> bins;
};

struct Row {
  Settings settings;
  Windows windows;
  float raw_max, max;
  float slope;           // of v
  bool changed;          // bias or penalties: z is not x
  bool good;             // there is something to choose
  bool drawn, searched;  // of good ones
  std::uint32_t bin;     // that holds the last place kept, and how much is still to find there
  std::uint64_t mass_left, tokens_left;
  std::uint64_t last;  // the last place that is kept
};

// ---- bias and penalties ----

inline void add_biases(const std::int32_t* ids, const float* bias, std::int64_t count, float* z,
                       std::int64_t tokens) {
  for (std::int64_t k = 0; k < count; ++k) {
    if (ids[k] < 0 || ids[k] >= tokens || std::find(ids, ids + k, ids[k]) != ids + k) continue;
    z[ids[k]] = counted(z[ids[k]] + bias[k]);
  }
}

// room: a word for each token of the windows.
inline void add_penalties(const Row& row, const std::int32_t* history, float* z,
                          std::int64_t tokens, std::uint32_t* room) {
  const Windows& w = row.windows;
  const Settings& s = row.settings;
  // Each token with whether presence and frequency count it, so that equal ones come to stand together.
  std::uint32_t* end = room;
  for (std::int64_t j = w.begin(); j < w.end; ++j) {
    if (history[j] < 0 || history[j] >= tokens) continue;
    *end++ = static_cast<std::uint32_t>(history[j]) << 2U | (j >= w.repetition ? 2U : 0U) |
             (j >= w.penalty ? 1U : 0U);
  }
  std::sort(room, end);
  for (const std::uint32_t* at = room; at != end;) {
    const std::uint32_t token = *at >> 2U;
    bool repeated = false;
    std::uint32_t times = 0;
    for (; at != end && *at >> 2U == token; ++at) {
      repeated = repeated || (*at & 2U) != 0;
      times += *at & 1U;
    }
    z[token] = penalised(s, z[token], repeated, times);
  }
}

// ---- the last place that top_p and top_k keep ----

// Puts into row which bin holds it; bins: of the whole row.
inline void choose_bin(Row& row, const std::array<Bin, kBins>& bins) {
  std::uint64_t all = 0;
  for (const Bin& b : bins) all += b.mass;
  row.mass_left = row.settings.least_mass(all);
  row.tokens_left = row.settings.most_tokens();
  for (std::uint32_t b = 0; b < kBins; ++b) {
    if (bins[b].mass >= row.mass_left || bins[b].tokens >= row.tokens_left) {
      row.bin = b;
      return;
    }
    row.mass_left -= bins[b].mass;
    row.tokens_left -= bins[b].tokens;
  }
  row.searched = false;  // more tokens than there are
}

// The same among n places that are all that there are in the bin, in the order of their tokens; they are moved.
inline std::uint64_t last_place(const Row& row, std::uint64_t* places, std::int64_t n) {
  constexpr std::int64_t kFew = 48;  // sorted by comparing
  constexpr unsigned kDigitBits = 11;
  static thread_local std::array<Bin, 1U << kDigitBits> bins;
  std::uint64_t mass_left = row.mass_left, tokens_left = row.tokens_left;
  const auto weight_at = [](std::uint64_t place) {
    return weight(std::bit_cast<float>(static_cast<std::uint32_t>(place >> 32U)), -kLog2E);
  };
  while (n > kFew) {
    std::uint32_t low = ~0U, high = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto key = static_cast<std::uint32_t>(places[i] >> 32U);
      low = std::min(low, key);
      high = std::max(high, key);
    }
    if (low == high) {  // equally likely: by their tokens
      const std::uint64_t w = weight_at(places[0]);
      const std::uint64_t needed = w == 0 ? ~std::uint64_t{0} : (mass_left - 1) / w + 1;
      return places[std::min(static_cast<std::uint64_t>(n), std::min(needed, tokens_left)) - 1];
    }
    const auto width = static_cast<unsigned>(std::bit_width(high - low));
    const unsigned shift = width > kDigitBits ? width - kDigitBits : 0;
    const auto digit = [&](std::uint64_t place) {
      return (static_cast<std::uint32_t>(place >> 32U) - low) >> shift;
    };
    bins.fill({});
    for (std::int64_t i = 0; i < n; ++i) {
      Bin& b = bins[digit(places[i])];
      b.mass += weight_at(places[i]);
      ++b.tokens;
    }
    std::uint32_t found = 0;
    for (; bins[found].mass < mass_left && bins[found].tokens < tokens_left; ++found) {
      mass_left -= bins[found].mass;
      tokens_left -= bins[found].tokens;
    }
    n = std::remove_if(places, places + n, [&](auto place) { return digit(place) != found; }) -
        places;
  }
  std::sort(places, places + n);
  for (std::int64_t i = 0; i + 1 < n; ++i) {
    const std::uint64_t w = weight_at(places[i]);
    if (w >= mass_left || tokens_left == 1) return places[i];
    mass_left -= w;
    --tokens_left;
  }
  return places[n - 1];
}

// ---- the most likely few ----

// place joins the best `most` of list, in order.
inline void enlist(std::uint64_t place, std::array<std::uint64_t, kListed>& list,
                   std::int64_t& count) {
  auto at = count < static_cast<std::int64_t>(kListed) ? count++ : count - 1;
  for (; at > 0 && list[static_cast<std::size_t>(at - 1)] > place; --at) {
    list[static_cast<std::size_t>(at)] = list[static_cast<std::size_t>(at - 1)];
  }
  list[static_cast<std::size_t>(at)] = place;
}

inline float d_of(std::uint64_t place) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(place >> 32U));
}

}  // namespace mlxtape::ops::sampling
