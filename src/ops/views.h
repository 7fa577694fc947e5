// Inputs as kernels take them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "mlxtape/core/encoder.h"

namespace mlxtape::ops {

// Whether t begins where its device's kernels for 16-bit numbers can read it pack by pack. Memory of a device does, a view
// may not.
inline bool begins_a_pack(const Tensor& t) {
  return size_of(t.dtype()) != 2 || t.device() == nullptr ||
         reinterpret_cast<std::uintptr_t>(t.data()) % t.device()->traits().pack_bytes == 0;
}

// t without gaps, and beginning so; a copy where it is not. With it the address decides neither which kernel runs nor,
// by that, in which order sums are made.
inline Tensor in_packs(CommandEncoder& encoder, const Tensor& t) {
  const Tensor dense = encoder.contiguous(t);
  if (begins_a_pack(dense)) return dense;
  Tensor copy = encoder.empty_like(dense);
  encoder.copy(dense, copy);
  return copy;
}

inline Tensor contiguous_or_absent(CommandEncoder& encoder, const Tensor& t) {
  return t.defined() ? encoder.contiguous(t) : t;
}

// Of [B, T, H, D] or [T, H, D]: from one batch entry, token and head to the next, for kernels that need channels
// side by side, and the tensor, which is a copy where they were not.
inline Tensor heads_of(CommandEncoder& encoder, const Tensor& t, std::int64_t (&strides)[3]) {
  const std::int64_t rank = t.rank();
  const bool side_by_side = t.shape().back() == 1 || t.strides()[rank - 1] == 1;
  Tensor rows = side_by_side ? t : encoder.contiguous(t);
  strides[0] = rank == 4 ? rows.strides()[0] : 0;
  strides[1] = rows.strides()[rank - 3];
  strides[2] = rows.strides()[rank - 2];
  return rows;
}

// The same for kernels that read heads of whole packs of 16-bit numbers in packs: a copy also where they could not.
inline Tensor heads_in_packs(CommandEncoder& encoder, const Tensor& t, std::int64_t (&strides)[3]) {
  Tensor rows = heads_of(encoder, t, strides);
  const bool has_packs = encoder.device().traits().pack_bytes > 1 && size_of(t.dtype()) == 2 &&
                         t.shape().back() % 8 == 0;
  const bool all_whole = std::all_of(std::begin(strides), std::end(strides),
                                     [](std::int64_t stride) { return stride % 8 == 0; });
  if (!has_packs || (all_whole && begins_a_pack(rows))) return rows;
  const Tensor copy = encoder.empty_like(rows);
  encoder.copy(rows, copy);
  return heads_of(encoder, copy, strides);
}

}  // namespace mlxtape::ops
