// Threefry-2x32 with 20 rounds, and the order in which words leave it: of n words the counters (i, i + h), h = ⌈n/2⌉, make
// words i and i + h; where n is odd, the last of the first half is the first word of counter (h − 1, 0). About 70 integer
// operations a pair.
#pragma once

#include <metal_stdlib>
using namespace metal;

struct Threefry {
  uint k0, k1, k2;
};
inline Threefry threefry_of(device const uint* key) {
  Threefry hash;
  hash.k0 = key[0];
  hash.k1 = key[1];
  hash.k2 = hash.k0 ^ hash.k1 ^ 0x1bd11bdau;
  return hash;
}

inline void threefry_round(thread uint& x, thread uint& y, uint bits) {
  x += y;
  y = (y << bits | y >> (32 - bits)) ^ x;
}
// Two times four rounds, with what is added after each.
inline void threefry_rounds(thread uint& x, thread uint& y, uint x1, uint y1) {
  threefry_round(x, y, 13);
  threefry_round(x, y, 15);
  threefry_round(x, y, 26);
  threefry_round(x, y, 6);
  x += x1;
  y += y1;
}
inline void threefry_other_rounds(thread uint& x, thread uint& y, uint x1, uint y1) {
  threefry_round(x, y, 17);
  threefry_round(x, y, 29);
  threefry_round(x, y, 16);
  threefry_round(x, y, 24);
  x += x1;
  y += y1;
}

// (x, y): the counters, and then their two words.
inline void threefry(Threefry hash, thread uint& x, thread uint& y) {
  x += hash.k0;
  y += hash.k1;
  threefry_rounds(x, y, hash.k1, hash.k2 + 1);
  threefry_other_rounds(x, y, hash.k2, hash.k0 + 2);
  threefry_rounds(x, y, hash.k0, hash.k1 + 3);
  threefry_other_rounds(x, y, hash.k1, hash.k2 + 4);
  threefry_rounds(x, y, hash.k2, hash.k0 + 5);
}

// The words of one thread: kEach in each half of n words, or one.
template <int kEach>
struct Words {
  uint a[kEach], b[kEach];  // of places first .. and second ..
  long first, second;
  bool has_first, has_second;
};

// With packs n is a multiple of 2·kEach, else a and b have one word.
template <int kEach>
inline Words<kEach> words_of(Threefry hash, long n, long item, bool packs) {
  const long pairs = n / 2, half_n = n - pairs;
  Words<kEach> w;
  w.first = item * (packs ? kEach : 1);
  w.second = w.first + half_n;
  w.has_first = w.first < half_n;
  w.has_second = w.first < pairs;
  for (int k = 0; k < kEach; ++k) {
    w.a[k] = uint(w.first + k);
    w.b[k] = w.has_second ? uint(w.second + k) : 0;
    if (w.has_first && (packs || k == 0)) threefry(hash, w.a[k], w.b[k]);
  }
  return w;
}
