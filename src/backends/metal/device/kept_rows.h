// Rows of whole packs that the threads of a row keep in registers, so that they are read once, and the sums of exponentials
// over them and over rows that are walked.
#pragma once

#include "backends/metal/device/rows.h"

// A thread's packs of a row: kPacks of them, threads apart.
template <typename T, int kPacks>
struct KeptRow {
  enum { kCount = Pack<T>::kCount };
  uint4 bits[kPacks];
  uint first, step, end;  // packs of the row

  inline bool has(int j) const { return first + uint(j) * step < end; }
  inline uint at(int j) const { return (first + uint(j) * step) * uint(kCount); }
  inline void place(uint index, uint threads, uint packs) {
    first = index;
    step = threads;
    end = packs;
  }
  inline void load(device const T* x) {
    for (int j = 0; j < kPacks; ++j) {
      if (has(j)) bits[j] = load_pack(x + at(j));
    }
  }
};

template <typename T, int kPacks>
inline float kept_largest(thread const KeptRow<T, kPacks>& row) {
  float v[Pack<T>::kCount];
  float m = -INFINITY;
  for (int j = 0; j < kPacks; ++j) {
    if (!row.has(j)) continue;
    Pack<T>::unpack(row.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) m = max(m, v[i]);
  }
  return m;
}

// Σ exp(v − m)
template <typename T, int kPacks>
inline float kept_exp_sum(thread const KeptRow<T, kPacks>& row, float m) {
  float v[Pack<T>::kCount];
  float sum = 0;
  for (int j = 0; j < kPacks; ++j) {
    if (!row.has(j)) continue;
    Pack<T>::unpack(row.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) sum += exp_for<T>(v[i] - m);
  }
  return sum;
}

template <typename T, int kPacks>
inline float kept_sum(thread const KeptRow<T, kPacks>& row) {
  float v[Pack<T>::kCount];
  float sum = 0;
  for (int j = 0; j < kPacks; ++j) {
    if (!row.has(j)) continue;
    Pack<T>::unpack(row.bits[j], v);
    for (int i = 0; i < Pack<T>::kCount; ++i) sum += v[i];
  }
  return sum;
}

// Takes another number into a sum of exponentials.
template <typename T>
inline void add_exp(thread Total& total, float v) {
  if (v > total.top) {
    total.sum = moved_sum<T>(total.sum, total.top, v);
    total.top = v;
  }
  total.sum += exp_for<T>(v - finite_reference(total.top));
}
