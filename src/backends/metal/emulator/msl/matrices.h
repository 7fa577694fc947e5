// 8x8 matrices of a simdgroup. A lane holds two neighbours of a row, as on Apple's chips from M1 to M4; selftest asks a
// real device whether that is so.
#pragma once

#include "backends/metal/emulator/msl/simdgroup.h"

namespace metal {
template <class T, int kColumns, int kRows>
struct simdgroup_matrix {
  static_assert(kColumns == 8 && kRows == 8, "Metal has 8x8 alone");
  static_assert(is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>);
  simdgroup_matrix() : elements_(T(NAN)) {}
  explicit simdgroup_matrix(T diagonal) {
    const uint row = row_of(emu::lane_index()), column = column_of(emu::lane_index());
    elements_ = vec<T, 2>(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
  }
  vec<T, 2>& thread_elements() { return elements_; }
  const vec<T, 2>& thread_elements() const { return elements_; }

  static constexpr uint row_of(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
  static constexpr uint column_of(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
  static constexpr uint lane_of(uint row, uint column) {
    return (row & 4) * 4 + (row & 3) * 2 + (column & 4) * 2 + (column & 2) / 2;
  }

 private:
  vec<T, 2> elements_;
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int kColumns, int kRows>
simdgroup_matrix<T, kColumns, kRows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, kColumns, kRows> m;
  m.thread_elements() = vec<T, 2>(value);
  return m;
}
template <class T>
simdgroup_matrix<T, 8, 8> make_filled_simdgroup_matrix(T value) {
  return make_filled_simdgroup_matrix<T, 8, 8>(value);
}

// The checked build asks that all lanes load and store together; it costs a switch.
inline void meet(const char* what, std::source_location where) {
  if constexpr (MLXTAPE_CHECKED_KERNELS != 0) {
    emu::exchange('\0', what, where);
  }
}

template <class T>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* from, ulong row_elements = 8,
                    ulong2 origin = ulong2(0), bool transposed = false, MLXTAPE_WHERE) {
  meet("simdgroup_load", where);
  const ulong row = m.row_of(emu::lane_index()), column = m.column_of(emu::lane_index());
  from += origin.y * row_elements + origin.x;
  vec<T, 2> pair;
  for (int i = 0; i < 2; ++i) {
    pair[i] = transposed ? from[(column + i) * row_elements + row]
                         : from[row * row_elements + column + i];
  }
  m.thread_elements() = pair;
}
template <class T>
void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* to, ulong row_elements = 8,
                     ulong2 origin = ulong2(0), bool transposed = false, MLXTAPE_WHERE) {
  meet("simdgroup_store", where);
  const ulong row = m.row_of(emu::lane_index()), column = m.column_of(emu::lane_index());
  to += origin.y * row_elements + origin.x;
  const vec<T, 2> pair = m.thread_elements();
  for (int i = 0; i < 2; ++i) {
    (transposed ? to[(column + i) * row_elements + row] : to[row * row_elements + column + i]) =
        pair[i];
  }
}

// Products and sums are f32 whatever the types are. Which order they come in is the chip's own.
struct PairsOfFactors {
  PlainFloat a[2], b[2];
};
MLXTAPE_UNCHECKED inline vec<float, 2> product(PairsOfFactors mine, const char* what,
                                               std::source_location where) {
  using M = simdgroup_matrix<float, 8, 8>;
  const emu::Exchange all = emu::exchange(mine, what, where);
  emu::count_matrix_product();
  const uint lane = emu::lane_index();
  const uint row = M::row_of(lane), column = M::column_of(lane);
  const bool backwards = (emu::choice(where) >> 32 & 1) != 0;
  PlainFloat first = 0, second = 0;
  for (uint i = 0; i < 8; ++i) {
    const uint k = backwards ? 7 - i : i;
    const PlainFloat a =
        reinterpret_cast<const PairsOfFactors*>(all.slots[M::lane_of(row, k)])->a[k & 1];
    const auto* b = reinterpret_cast<const PairsOfFactors*>(all.slots[M::lane_of(k, column)]);
    first += a * b->b[0];
    second += a * b->b[1];
  }
  return vec<float, 2>(first, second);
}
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b,
                                   const simdgroup_matrix<C, 8, 8>& c, MLXTAPE_WHERE) {
  const vec<A, 2> fa = a.thread_elements();
  const vec<B, 2> fb = b.thread_elements();
  const vec<C, 2> fc = c.thread_elements();
  const vec<float, 2> p = product({{float(fa[0]), float(fa[1])}, {float(fb[0]), float(fb[1])}},
                                  "simdgroup_multiply_accumulate", where);
  // Not counted among the operations of scalars.
  const PlainFloat c0 = float(fc[0]), c1 = float(fc[1]), p0 = p[0], p1 = p[1];
  d.thread_elements() = vec<D, 2>(D(c0 + p0), D(c1 + p1));
}
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                        const simdgroup_matrix<B, 8, 8>& b, MLXTAPE_WHERE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), where);
}
}  // namespace metal
