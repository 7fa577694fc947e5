// Read by elementwise.cpp and the elementwise kernels: one layout, every compiler.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Up to four operands read element by element, in the shape of the result, whose memory is contiguous.
// Axes that every operand walks as one are one, those of length 1 are gone; rank >= 1.
struct ElementwiseArgs {
  int64_t size;  // elements of the result, at least 1
  int64_t rank;
  int64_t shape[8];
  int64_t strides[4][8];  // of each operand, in elements; 0 where it is stretched
  double value[4];        // of the operands that are numbers, exact in the operands' type
  int64_t numbers;        // a bit for each operand that is a number and has no tensor
};
static_assert(sizeof(ElementwiseArgs) == 376, "host and device must agree");

// A contiguous tensor of size elements.
struct CastArgs {
  int64_t size;
};
