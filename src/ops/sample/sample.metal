// Metal kernel of sample (formula and layout: mlxtape/ops/sample.h).
//
// A group has a row, up to 1024 threads with eight tokens each or more. It keeps the logits as f32 in scratch memory, where they
// are read again from the caches.
// Every step is a pass over these: the largest; top_p and top_k; the running sum that the drawn number falls into. The last
// place that top_p and top_k keep is found by the digits of d: sums of the tokens in each of 256 bins say which bin holds it,
// and then the same within that bin. The first bins are cut by d itself, eight for each unit, where the tokens of a row spread
// over many; further down d's bits are cut. Sums are of integers, so that their order does not count; there are four
// copies of each bin, lanes in turn, because additions to one address wait for each other. A running sum is found in two
// steps: which simdgroup's share it falls into, and where there. Bound by the passes' latency, one core to a row.
// Threadgroup memory: 13 KB. About 56 registers a
// thread.
#include "sample_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/vectors.h"

using namespace mlxtape::ops;

#pragma clang fp contract(off)  // as sample/formulas.h

constant bool wants_logprobs [[function_constant(0)]];
constant bool wants_top [[function_constant(1)]];
constant bool appends [[function_constant(2)]];

constant constexpr uint kBins = 256;
constant constexpr uint kCopies = 4;
constant constexpr float kBinsOfUnit = 8;
constant constexpr uint kInfinityBits = 0x7f800000u;
constant constexpr uint kTop = 20;  // top_ids
constant constexpr ulong kNothing = ~0ul;

// ---- the formulas of sample/formulas.h, operation by operation ----

inline float product(float a, float b) { return a * b; }
inline float sum_of(float a, float b) { return a + b; }

// A logit as it counts. −0 becomes +0.
inline float counted(float x) { return x == x ? sum_of(x, 0.0f) : -INFINITY; }

constant constexpr float kLog2E = 1.44269502162933349609375f;
constant constexpr float kMagic = 12582912.0f;      // adding it rounds to a whole number
constant constexpr float kLeast = -45.0f;           // 2^kLeast is less than a unit
constant constexpr float kUnit = 1099511627776.0f;  // 2⁴⁰

// 2^t for t ≤ 0; from kLeast down as there. Its coefficients are those of formulas.h as bits.
inline float power(float t) {
  t = t > kLeast ? t : kLeast;
  const float shifted = sum_of(t, kMagic);
  const float f = sum_of(t, -sum_of(shifted, -kMagic));
  float p = sum_of(product(as_type<float>(0x3a91e53fu), f), as_type<float>(0x3c1e5094u));
  p = sum_of(product(p, f), as_type<float>(0x3d639c04u));
  p = sum_of(product(p, f), as_type<float>(0x3e75fd48u));
  p = sum_of(product(p, f), as_type<float>(0x3f3171dbu));
  p = sum_of(product(p, f), 1.0f);
  return as_type<float>(as_type<uint>(p) + (as_type<uint>(shifted) << 23));
}
inline ulong weight(float d, float slope) {
  return ulong(product(power(product(d, slope)), kUnit));
}
inline float slope_of(float temperature) {
  const float c = kLog2E / temperature;
  const float least = as_type<float>(0x00800000u), most = as_type<float>(0x7f7fffffu);
  return c < least ? -least : c > most ? -most : -c;
}

// What is more likely has the smaller place: d above the token.
inline ulong place_of(uint d_bits, uint token) { return ulong(d_bits) << 32 | token; }

// The upper half of a·b.
inline ulong product_high(ulong a, ulong b) {
  const ulong a0 = a & 0xffffffffu, a1 = a >> 32;
  const ulong b0 = b & 0xffffffffu, b1 = b >> 32;
  const ulong low = a0 * b0, cross = a1 * b0 + (low >> 32);
  const ulong other = a0 * b1 + (cross & 0xffffffffu);
  return a1 * b1 + (cross >> 32) + (other >> 32);
}

struct Settings {
  float temperature, top_p, reach, repetition, presence, frequency;
  int top_k, repetition_context, penalty_context, start;
  uint seed_low, seed_high;
};
inline Settings settings_of(device const float* numbers, device const int* whole) {
  Settings s;
  s.temperature = numbers[0];
  s.top_p = numbers[1];
  s.reach = numbers[2];
  s.repetition = numbers[3];
  s.presence = numbers[4];
  s.frequency = numbers[5];
  s.top_k = whole[0];
  s.repetition_context = whole[1];
  s.penalty_context = whole[2];
  s.start = whole[3];
  s.seed_low = uint(whole[4]);
  s.seed_high = uint(whole[5]);
  return s;
}
// By its bits: a temperature that is too small for a GPU's arithmetic is not greedy. Nor is NaN a temperature.
inline bool is_greedy(Settings s) {
  const int bits = as_type<int>(s.temperature);
  return bits <= 0 || bits > int(kInfinityBits);
}
// The mass that top_p asks for of all; what no mass reaches where it is off.
inline ulong least_mass(Settings s, ulong all) {
  if (!(s.top_p < 1)) return kNothing;
  const float p = s.top_p > 0 ? product(s.top_p, 4294967296.0f) : 0.0f;
  const ulong least = product_high(all, ulong(p) << 32);
  return least > 0 ? least : 1;
}

// The parts of a row's history that penalties look at: [from, end); empty where a penalty is off.
struct Windows {
  long repetition, penalty, end;
};
inline long window_from(int context, long start, long length) {
  const long first = context < 0 || length < context ? 0 : length - context;
  return first > start ? first : start;
}
inline Windows windows_of(Settings s, long length, long room) {
  Windows w;
  w.end = length < 0 ? 0 : length < room ? length : room;
  w.repetition = w.penalty = w.end;
  if (s.repetition != 1) w.repetition = window_from(s.repetition_context, 0, length);
  if (s.presence != 0 || s.frequency != 0) {
    w.penalty = window_from(s.penalty_context, s.start, length);
  }
  return w;
}
inline float penalised(Settings s, float z, bool repeated, uint times) {
  if (repeated) z = z < 0 ? product(z, s.repetition) : z / s.repetition;
  if (times > 0) z = sum_of(z, -sum_of(product(s.frequency, float(times)), s.presence));
  return counted(z);
}

inline ulong random_of(Settings s, uint position) {
  const uint key[3] = {s.seed_high, s.seed_low, s.seed_high ^ s.seed_low ^ 0x1bd11bdau};
  uint x = position + key[0], y = key[1];
  for (uint r = 0; r < 20; ++r) {
    // 13 15 26 6, 17 29 16 24
    const uint by = ((r / 4 % 2 == 0 ? 0x061a0f0du : 0x18101d11u) >> (r % 4 * 8)) & 31;
    x += y;
    y = (y << by | y >> (32 - by)) ^ x;
    if (r % 4 == 3) {
      const uint turn = r / 4 + 1;
      x += key[turn % 3];
      y += key[(turn + 1) % 3] + turn;
    }
  }
  return ulong(x) << 32 | y;
}

// ---- sums over a group; exchanges are of 32 bits ----

inline ulong across(ulong v, ushort mask) {
  return as_type<ulong>(simd_shuffle_xor(as_type<uint2>(v), mask));
}
inline ulong from_lane(ulong v, uint lane) {
  return as_type<ulong>(simd_shuffle(as_type<uint2>(v), ushort(lane)));
}
inline ulong simd_all(ulong v) {
  for (uint step = 16; step > 0; step /= 2) v += across(v, ushort(step));
  return v;
}
inline ulong simd_least(ulong v) {
  for (uint step = 16; step > 0; step /= 2) v = min(v, across(v, ushort(step)));
  return v;
}
// With what comes before in the order of the lanes.
inline ulong simd_running(ulong v, uint lane) {
  for (uint step = 1; step < 32; step *= 2) {
    const ulong below = as_type<ulong>(simd_shuffle_up(as_type<uint2>(v), ushort(step)));
    if (lane >= step) v += below;
  }
  return v;
}

// What the bin that was looked for has.
struct Found {
  ulong mass_left, tokens_left;  // still to find in the bin
  uint bin, tokens;              // the tokens in it; kBins: none has it
};

// A row as its threads have it, and where they meet.
struct Row {
  device float* z;
  float most;
  uint n;
  uint t, threads, lane, simd, simds;
  threadgroup atomic_uint *low, *high, *tokens;  // halves of a mass; [kBins, kCopies]
  threadgroup ulong *masses, *counts;            // of each simdgroup
  threadgroup Found* found;
  threadgroup uint* at;

  inline float d(uint i) const { return sum_of(most, -z[i]); }
  inline uint d_bits(uint i) const { return as_type<uint>(d(i)); }
  inline ulong place(uint i) const { return place_of(d_bits(i), i); }
};

inline ulong group_all(ulong v, Row row) {
  v = simd_all(v);
  if (row.lane == 0) row.masses[row.simd] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  v = simd_all(row.lane < row.simds ? row.masses[row.lane] : 0);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return v;
}
inline ulong group_least(ulong v, Row row) {
  v = simd_least(v);
  if (row.lane == 0) row.masses[row.simd] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  v = simd_least(row.lane < row.simds ? row.masses[row.lane] : kNothing);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return v;
}

// Numbers of a row's tokens, and where their running sum is looked for.
struct Draws {  // the weights of what is kept
  ulong last;
  float slope;
  ulong random;
  inline ulong value(Row row, uint i) const {
    return row.place(i) <= last ? weight(row.d(i), slope) : 0;
  }
  inline ulong target(ulong all) const { return product_high(random, all); }
};
struct Equals {  // one for each that is as likely as this
  uint bits;
  ulong before;
  inline ulong value(Row row, uint i) const { return row.d_bits(i) == bits ? 1 : 0; }
  inline ulong target(ulong) const { return before; }
};

// The token at which the running sum passes what is looked for; n where none does.
template <typename Numbers>
inline uint pass(Numbers numbers, Row row) {
  const uint each = (row.n + row.threads - 1) / row.threads * 32;
  const uint first = row.simd * each, end = min(first + each, row.n);
  ulong own = 0;
  for (uint i = first + row.lane; i < end; i += 32) own += numbers.value(row, i);
  own = simd_all(own);
  if (row.lane == 0) row.masses[row.simd] = own;
  if (row.t == 0) row.at[0] = row.n;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const ulong upto = simd_running(row.lane < row.simds ? row.masses[row.lane] : 0, row.lane);
  const ulong rest_of_all = numbers.target(from_lane(upto, 31));
  const ulong before = from_lane(upto, row.simd) - own;
  if (rest_of_all >= before && rest_of_all - before < own) {  // a simdgroup as a whole
    ulong rest = rest_of_all - before;
    for (uint begin = first; begin < end; begin += 32) {
      const uint i = begin + row.lane;
      const ulong running = simd_running(i < end ? numbers.value(row, i) : 0, row.lane);
      const uint who = simd_min(running > rest ? row.lane : 32u);
      if (who < 32) {
        if (row.lane == who) row.at[0] = i;
        break;
      }
      rest -= from_lane(running, 31);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint at = row.at[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return at;
}

// ---- the last place that top_p and top_k keep ----

inline void add_to_bin(Row row, uint bin, ulong mass, bool counts) {
  const uint slot = bin * kCopies + row.t % kCopies;
  const uint lower = uint(mass);
  uint upper = uint(mass >> 32);
  if (lower != 0) {
    const uint before = atomic_fetch_add_explicit(row.low + slot, lower, memory_order_relaxed);
    if (before + lower < before) ++upper;
  }
  if (upper != 0) atomic_fetch_add_explicit(row.high + slot, upper, memory_order_relaxed);
  if (counts) atomic_fetch_add_explicit(row.tokens + slot, 1u, memory_order_relaxed);
}

// What top_p and top_k ask for; a mass of the whole row where by_share.
struct Asked {
  Settings settings;
  bool by_share;
  ulong mass, tokens;
};

// The bins are cleared.
inline Found choose_bin(Row row, Asked asked) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // A thread has one bin, or where there are fewer threads up to eight neighbours.
  const uint each = row.threads < kBins ? (kBins + row.threads - 1) / row.threads : 1;
  const uint first = min(row.t * each, kBins), end = min(first + each, kBins);
  ulong masses[8], tokens[8];
  ulong mass_to = 0, tokens_to = 0;
  for (uint b = first; b < end; ++b) {
    ulong mass = 0, count = 0;
    for (uint i = b * kCopies; i < (b + 1) * kCopies; ++i) {
      mass += ulong(atomic_exchange_explicit(row.high + i, 0u, memory_order_relaxed)) << 32;
      mass += atomic_exchange_explicit(row.low + i, 0u, memory_order_relaxed);
      count += atomic_exchange_explicit(row.tokens + i, 0u, memory_order_relaxed);
    }
    mass_to += masses[b - first] = mass;
    tokens_to += tokens[b - first] = count;
  }
  const ulong own_mass = mass_to, own_tokens = tokens_to;
  mass_to = simd_running(mass_to, row.lane);
  tokens_to = simd_running(tokens_to, row.lane);
  if (row.lane == 31) {
    row.masses[row.simd] = mass_to;
    row.counts[row.simd] = tokens_to;
  }
  if (row.t == 0) {
    Found none;
    none.mass_left = none.tokens_left = 0;
    none.bin = kBins;
    none.tokens = 0;
    *row.found = none;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ulong all = 0;
  for (uint s = 0; s < row.simds; ++s) {
    all += row.masses[s];
    if (s >= row.simd) continue;
    mass_to += row.masses[s];
    tokens_to += row.counts[s];
  }
  const ulong least = asked.by_share ? least_mass(asked.settings, all) : asked.mass;
  ulong mass_before = mass_to - own_mass, tokens_before = tokens_to - own_tokens;
  for (uint b = first; b < end; ++b) {
    const ulong mass_after = mass_before + masses[b - first];
    const ulong tokens_after = tokens_before + tokens[b - first];
    const bool before = mass_before >= least || tokens_before >= asked.tokens;
    if (!before && (mass_after >= least || tokens_after >= asked.tokens)) {
      Found found;
      found.mass_left = least - mass_before;
      found.tokens_left = asked.tokens - tokens_before;
      found.bin = b;
      found.tokens = uint(tokens[b - first]);
      *row.found = found;
    }
    mass_before = mass_after;
    tokens_before = tokens_after;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Found found = *row.found;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return found;
}

inline ulong last_place(Row row, Asked asked, bool by_mass) {
  const bool by_tokens = asked.tokens != kNothing;
  for (uint i = row.t; i < row.n; i += row.threads) {
    const float d = row.d(i);
    const uint bin = uint(min(product(d, kBinsOfUnit), float(kBins - 1)));
    add_to_bin(row, bin, by_mass ? weight(d, -kLog2E) : 0, by_tokens);
  }
  Found found = choose_bin(row, asked);
  if (found.bin == kBins) return kNothing;
  uint low = as_type<uint>(float(found.bin) / kBinsOfUnit);
  uint high = found.bin == kBins - 1 ? kInfinityBits
                                     : as_type<uint>(float(found.bin + 1) / kBinsOfUnit) - 1;
  asked.by_share = false;
  for (;;) {
    const uint width = 32 - clz(high - low);
    const uint shift = width > 8 ? width - 8 : 0;
    for (uint i = row.t; i < row.n; i += row.threads) {
      const uint past = row.d_bits(i) - low;
      if (past > high - low) continue;
      add_to_bin(row, past >> shift, by_mass ? weight(row.d(i), -kLog2E) : 0, true);
    }
    asked.mass = found.mass_left;
    asked.tokens = found.tokens_left;
    found = choose_bin(row, asked);
    low += found.bin << shift;
    high = min(high, low + ((1u << shift) - 1));
    if (found.tokens == 1) return place_of(high, 0xffffffffu);
    if (shift == 0) break;
  }
  // Equally likely ones: so many, by their tokens.
  const ulong each = by_mass ? weight(as_type<float>(low), -kLog2E) : 0;
  const ulong needed = each == 0 ? kNothing : (found.mass_left - 1) / each + 1;
  const ulong keep = min(needed, found.tokens_left);
  if (keep >= found.tokens) return place_of(low, 0xffffffffu);
  Equals equals;
  equals.bits = low;
  equals.before = keep - 1;
  return place_of(low, pass(equals, row));
}

// ---- a row's largest ----

// In the order of numbers, the largest first, with the token below.
inline ulong rank_of(float z, uint token) {
  const uint bits = as_type<uint>(z);
  const uint key = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return ulong(~key) << 32 | token;
}
inline float logit_of(ulong rank) {
  const uint key = ~uint(rank >> 32);
  return as_type<float>((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}
inline bool is_a_number(float v) { return (as_type<uint>(v) & 0x7fffffffu) < kInfinityBits; }

inline ulong best_of(Row row) {
  float most = -INFINITY;
  uint at = 0;
  for (uint i = row.t; i < row.n; i += row.threads) {
    if (row.z[i] > most) {
      most = row.z[i];
      at = i;
    }
  }
  return group_least(rank_of(most, at), row);
}

// ---- bias and penalties ----

inline void add_biases(Row row, device const int* ids, device const float* bias, int count) {
  for (int k = int(row.t); k < count; k += int(row.threads)) {
    const int id = ids[k];
    if (id < 0 || uint(id) >= row.n) continue;
    bool is_first = true;
    for (int j = 0; j < k; ++j) is_first = is_first && ids[j] != id;
    if (is_first) row.z[id] = counted(sum_of(row.z[id], bias[k]));
  }
  threadgroup_barrier(mem_flags::mem_device);
}

// marks: a word for each token, whatever is in it. How often presence and frequency count the token, and above that whether
// repetition does. Who takes a mark away changes the logit.
inline void add_penalties(Row row, Settings s, Windows w, device const int* history,
                          device atomic_uint* marks) {
  const uint repeated = 0x80000000u;
  const long first = min(w.repetition, w.penalty) + row.t;
  for (long j = first; j < w.end; j += row.threads) {
    const uint i = uint(history[j]);
    if (i < row.n) atomic_store_explicit(marks + i, 0u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_device);
  for (long j = first; j < w.end; j += row.threads) {
    const uint i = uint(history[j]);
    if (i >= row.n) continue;
    if (j >= w.penalty) atomic_fetch_add_explicit(marks + i, 1u, memory_order_relaxed);
    if (j >= w.repetition) atomic_fetch_or_explicit(marks + i, repeated, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_device);
  for (long j = first; j < w.end; j += row.threads) {
    const uint i = uint(history[j]);
    if (i >= row.n) continue;
    const uint mark = atomic_exchange_explicit(marks + i, 0u, memory_order_relaxed);
    if (mark != 0) {
      row.z[i] = penalised(s, row.z[i], (mark & repeated) != 0, mark & ~repeated);
    }
  }
  threadgroup_barrier(mem_flags::mem_device);
}

// ---- a row ----

template <typename T>
[[kernel, max_total_threads_per_threadgroup(1024)]] void sample_rows(
    device const T* logits [[buffer(0)]], device const float* numbers [[buffer(1)]],
    device const int* whole [[buffer(2)]], device int* history [[buffer(3)]],
    device int* lengths [[buffer(4)]], device const int* bias_ids [[buffer(5)]],
    device const float* bias [[buffer(6)]], device int* tokens [[buffer(7)]],
    device float* logprobs [[buffer(8)]], device int* top_ids [[buffer(9)]],
    device float* top_logprobs [[buffer(10)]], device float* kept [[buffer(11)]],
    device atomic_uint* marks [[buffer(12)]], constant SampleArgs& args [[buffer(13)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint simds [[simdgroups_per_threadgroup]]) {
  threadgroup atomic_uint low[1024], high[1024], counts[1024];
  threadgroup ulong of_simds[2][32];
  threadgroup Found found[1];
  threadgroup uint at[1];
  threadgroup ulong list[20];
  threadgroup atomic_uint listed[1];
  const long number = long(group) + first_group;
  device const T* x = logits + number * args.vocabulary;
  Row row;
  row.z = kept + number * args.vocabulary;
  row.n = uint(args.vocabulary);
  row.t = t;
  row.threads = threads;
  row.lane = lane;
  row.simd = simd;
  row.simds = simds;
  row.low = low;
  row.high = high;
  row.tokens = counts;
  row.masses = of_simds[0];
  row.counts = of_simds[1];
  row.found = found;
  row.at = at;

  for (uint i = t; i < kBins * kCopies; i += threads) {
    atomic_store_explicit(low + i, 0u, memory_order_relaxed);
    atomic_store_explicit(high + i, 0u, memory_order_relaxed);
    atomic_store_explicit(counts + i, 0u, memory_order_relaxed);
  }
  if (t == 0) atomic_store_explicit(listed, 0u, memory_order_relaxed);
  const Settings settings = settings_of(numbers + number * 6, whole + number * 6);
  const int length = lengths[number];
  for (uint i = t; i < row.n; i += threads) row.z[i] = counted(widen(x[i]));
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  ulong best = best_of(row);
  row.most = logit_of(best);
  const float raw_most = row.most;
  bool good = is_a_number(raw_most);
  float log_sum = 0;
  if (good && wants_logprobs) {
    ulong mass = 0;
    for (uint i = t; i < row.n; i += threads) mass += weight(row.d(i), -kLog2E);
    log_sum = precise::log(float(group_all(mass, row)) / kUnit);
    if (wants_top) {
      Asked asked;
      asked.settings = settings;
      asked.by_share = false;
      asked.mass = kNothing;
      asked.tokens = kTop;
      const ulong last = last_place(row, asked, false);
      for (uint i = t; i < row.n; i += threads) {
        const ulong place = row.place(i);
        if (place > last || row.d_bits(i) == kInfinityBits) continue;
        list[atomic_fetch_add_explicit(listed, 1u, memory_order_relaxed)] = place;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  const Windows windows = windows_of(settings, length, args.room);
  const bool looks_back = min(windows.repetition, windows.penalty) < windows.end;
  if (args.biases != 0 || looks_back) {
    threadgroup_barrier(mem_flags::mem_device);  // all have read z
    const long first = number * args.biases;
    if (args.biases != 0) add_biases(row, bias_ids + first, bias + first, int(args.biases));
    if (looks_back) {
      add_penalties(row, settings, windows, history + number * args.room,
                    marks + number * args.vocabulary);
    }
    best = best_of(row);
    row.most = logit_of(best);
    good = good && is_a_number(row.most);
  }
  if (wants_top && t < kTop) {
    // Each of the list to its place.
    const uint count = good ? atomic_load_explicit(listed, memory_order_relaxed) : 0;
    uint to = t;  // past the listed: where nothing stands
    ulong place = 0;
    if (t < count) {
      place = list[t];
      to = 0;
      for (uint j = 0; j < count; ++j) to += list[j] < place ? 1 : 0;
    }
    const float d = as_type<float>(uint(place >> 32));
    top_ids[number * kTop + to] = t < count ? int(uint(place)) : -1;
    top_logprobs[number * kTop + to] = !good ? NAN : t < count ? -d - log_sum : -INFINITY;
  }
  uint token = uint(best);
  if (good && !is_greedy(settings)) {
    Draws draws;
    draws.last = place_of(as_type<uint>(settings.reach > 0 ? settings.reach : 0.0f), 0xffffffffu);
    if (settings.top_p < 1 || settings.top_k > 0) {
      Asked asked;
      asked.settings = settings;
      asked.by_share = true;
      asked.mass = 0;
      asked.tokens = settings.top_k > 0 ? ulong(settings.top_k) : kNothing;
      draws.last = min(draws.last, last_place(row, asked, settings.top_p < 1));
    }
    draws.slope = slope_of(settings.temperature);
    draws.random = random_of(settings, uint(length));
    token = pass(draws, row);
  }
  if (t != 0) return;
  tokens[number] = good ? int(token) : -1;
  if (wants_logprobs) {
    logprobs[number] = good ? (counted(widen(x[token])) - raw_most) - log_sum : NAN;
  }
  if (!appends || !good) return;
  if (length >= 0 && length < args.room) history[number * args.room + length] = int(token);
  lengths[number] = length + 1;
}

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
MAKE("sample_rows_f32", sample_rows<float>)
MAKE("sample_rows_f16", sample_rows<half>)
MAKE("sample_rows_bf16", sample_rows<bf16>)

#else

#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

// Logits and marks.
std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const SampleArgs*>(args);
  return static_cast<std::size_t>(a.rows * a.vocabulary) * 8;
}

template <class T>
void sample_fwd(const KernelCall& call) {
  const auto& args = call.as<SampleArgs>();
  auto* kept = static_cast<float*>(call.workspace);
  metal::Launch launch(call, metal::kernel<T>("sample_rows"));
  launch.constant(0, args.logprobs != 0).constant(1, args.top != 0).constant(2, args.append != 0);
  for (unsigned long i = 0; i < 7; ++i) {
    if (args.append != 0 && (i == 3 || i == 4)) {
      launch.output(i, call.out[i + 1]);
    } else {
      launch.input(i, call.in[i]);
    }
  }
  for (unsigned long i = 0; i < 4; ++i) launch.output(7 + i, call.out[i]);
  launch.output(11, kept)
      .output(12, kept + args.rows * args.vocabulary)
      .bytes(13, args)
      .operations(static_cast<double>(args.rows * args.vocabulary) * 400)
      .in_parts()
      .groups(args.rows)
      .threads(metal::row_threads(args.vocabulary, 8))
      .run();
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  registry.add(Backend::kMetal, std::string("sample_fwd_") + name_of(kDType<T>), sample_fwd<T>,
               workspace);
}

}  // namespace

void register_sample_metal(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops

#endif
