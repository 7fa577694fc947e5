// The last place of a row that top_p and top_k keep, by the digits of d: sums of the tokens in each of 256 bins, over all
// blocks of the team, say which bin holds it, and then the same within that bin.
//
// The first bins are cut by d itself, eight for each unit, where the tokens of a row spread over many; further down d's
// bits are cut. There are four copies of each bin, lanes in turn, because atomics on one address wait for each other.
#pragma once

#include "sample_team.cuh"

namespace mlxtape::ops::sampling {

constexpr unsigned kBins = 256;
constexpr unsigned kCopies = 4;
constexpr float kBinsOfUnit = 8;
constexpr unsigned kInfinityBits = 0x7f800000U;

struct Found {
  Number mass_left, tokens_left;  // still to find in the bin
  unsigned bin, tokens;           // the tokens in it; kBins: none has it
};

struct Bins {
  unsigned low[kBins * kCopies], high[kBins * kCopies];  // halves of a mass
  unsigned tokens[kBins * kCopies];
  Number block_mass[2][kBins];
  unsigned block_tokens[2][kBins];
  Number warp_mass[kBins / kWarp];
  Number warp_tokens[kBins / kWarp];
  Found found;
  unsigned cut;  // the last of equally likely tokens

  __device__ void clear() {
    for (unsigned i = threadIdx.x; i < kBins * kCopies; i += kThreads) {
      low[i] = high[i] = tokens[i] = 0;
    }
  }
  __device__ __forceinline__ void add(unsigned bin, Number mass, bool counts) {
    const unsigned slot = bin * kCopies + threadIdx.x % kCopies;
    unsigned upper = static_cast<unsigned>(mass >> 32U);
    if (const auto lower = static_cast<unsigned>(mass)) {
      const unsigned before = atomicAdd(&low[slot], lower);
      if (before + lower < before) ++upper;
    }
    if (upper != 0) atomicAdd(&high[slot], upper);
    if (counts) atomicAdd(&tokens[slot], 1U);
  }
};

// What the team looks for, and a row as its block has it.
struct Share {
  const float* z;
  float most;
  int n;
  unsigned first;  // the token of z[0]

  __device__ float d(int i) const { return sum(most, -z[i]); }
  __device__ unsigned d_bits(int i) const { return __float_as_uint(d(i)); }
  __device__ std::uint64_t place(int i) const {
    return place_of(d_bits(i), first + static_cast<unsigned>(i));
  }
};

// The bins of all blocks, cleared; least(mass of all) is the mass that is looked for.
template <int kBlocks, class Least>
__device__ __forceinline__ Found choose_bin(Team<kBlocks>& team, Bins& bins, unsigned turn,
                                            const Least& least, Number most_tokens) {
  __syncthreads();
  const unsigned t = threadIdx.x;
  if (t < kBins) {
    Number mass = 0;
    unsigned tokens = 0;
#pragma unroll
    for (unsigned i = t * kCopies; i < (t + 1) * kCopies; ++i) {
      mass += Number{bins.high[i]} << 32U | bins.low[i];
      tokens += bins.tokens[i];
      bins.low[i] = bins.high[i] = bins.tokens[i] = 0;
    }
    bins.block_mass[turn][t] = mass;
    bins.block_tokens[turn][t] = tokens;
  }
  if (t == 0) bins.found.bin = kBins;
  team.meet();
  Number mass = 0, tokens = 0, mass_to = 0, tokens_to = 0;
  if (t < kBins) {
#pragma unroll
    for (unsigned b = 0; b < kBlocks; ++b) {
      mass += *team.in_block(&bins.block_mass[turn][t], b);
      tokens += *team.in_block(&bins.block_tokens[turn][t], b);
    }
    mass_to = warp_running_sum(mass);
    tokens_to = warp_running_sum(tokens);
    if (lane_of() == kWarp - 1) {
      bins.warp_mass[warp_of()] = mass_to;
      bins.warp_tokens[warp_of()] = tokens_to;
    }
  }
  __syncthreads();
  if (t < kBins) {
    Number all = 0;
#pragma unroll
    for (unsigned w = 0; w < kBins / kWarp; ++w) {
      all += bins.warp_mass[w];
      if (w >= warp_of()) continue;
      mass_to += bins.warp_mass[w];
      tokens_to += bins.warp_tokens[w];
    }
    const Number least_mass = least(all);
    const Number mass_before = mass_to - mass, tokens_before = tokens_to - tokens;
    const bool before = mass_before >= least_mass || tokens_before >= most_tokens;
    if (!before && (mass_to >= least_mass || tokens_to >= most_tokens)) {
      bins.found = {least_mass - mass_before, most_tokens - tokens_before, t,
                    static_cast<unsigned>(tokens)};
    }
  }
  __syncthreads();
  return bins.found;
}

// least: of the mass of all; it gives what nothing reaches where mass does not count.
template <int kBlocks, class Least>
__device__ __forceinline__ std::uint64_t last_place(Team<kBlocks>& team, Bins& bins,
                                                    const Share& share, bool by_mass,
                                                    const Least& least, Number most_tokens) {
  const bool by_tokens = most_tokens != ~Number{0};
  for (int i = static_cast<int>(threadIdx.x); i < share.n; i += kThreads) {
    const float d = share.d(i);
    const auto bin = static_cast<unsigned>(fminf(product(d, kBinsOfUnit), kBins - 1));
    bins.add(bin, by_mass ? weight(d, -kLog2E) : 0, by_tokens);
  }
  Found found = choose_bin(team, bins, 0, least, most_tokens);
  if (found.bin == kBins) return ~std::uint64_t{0};
  unsigned low = __float_as_uint(static_cast<float>(found.bin) / kBinsOfUnit);
  unsigned high = found.bin == kBins - 1
                      ? kInfinityBits
                      : __float_as_uint(static_cast<float>(found.bin + 1) / kBinsOfUnit) - 1;
  for (unsigned turn = 1;; turn ^= 1U) {
    const int width = 32 - __clz(static_cast<int>(high - low));
    const int shift = max(width - 8, 0);
    for (int i = static_cast<int>(threadIdx.x); i < share.n; i += kThreads) {
      const unsigned past = share.d_bits(i) - low;
      if (past > high - low) continue;
      bins.add(past >> shift, by_mass ? weight(share.d(i), -kLog2E) : 0, true);
    }
    const Number wanted = found.mass_left;
    found = choose_bin(team, bins, turn, [=](Number) { return wanted; }, found.tokens_left);
    low += found.bin << shift;
    high = min(high, low + ((1U << shift) - 1));
    if (found.tokens == 1) return place_of(high, ~0U);
    if (shift == 0) break;
  }
  // Equally likely ones: so many, by their tokens.
  const Number each = by_mass ? weight(__uint_as_float(low), -kLog2E) : 0;
  Number keep = each == 0 ? ~Number{0} : (found.mass_left - 1) / each + 1;
  keep = min(keep, found.tokens_left);
  if (keep >= found.tokens) return place_of(low, ~0U);
  int at = 0;
  const auto is = [&](int i) -> Number {
    return share.d_bits(i) == low ? 1 : 0;
  };
  if (team.pass(share.n, is, [=](Number) { return keep - 1; }, at)) {
    for (unsigned b = 0; b < kBlocks; ++b) {
      *team.in_block(&bins.cut, b) = share.first + static_cast<unsigned>(at);
    }
  }
  team.meet();
  return place_of(low, bins.cut);
}

}  // namespace mlxtape::ops::sampling
