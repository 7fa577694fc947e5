// Places in tensors of several axes.
#pragma once

#include <metal_stdlib>
using namespace metal;

// i / n, and what is left: with 32 bits where they suffice, which is several times as fast. Neither is negative.
inline long divide(long i, long n, thread long& rest) {
  if (((ulong(i) | ulong(n)) >> 32) == 0) {
    const uint above = uint(i) / uint(n);
    rest = uint(i) - above * uint(n);
    return above;
  }
  const long above = i / n;
  rest = i - above * n;
  return above;
}
