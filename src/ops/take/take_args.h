// Read by take.cpp and the take kernels.
// take_fwd_<unsigned type of the element's size>: in x, indices (contiguous); out y.
// take_places_i64: in 1 to 8 tensors of indices, contiguous and of one size; out the place of each in row-major order
// of the axes that they index, or kTakeNowhere.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

#include "core/program_constant.h"

namespace mlxtape::ops {

struct TakeArgs {
  int64_t outer, count, width;        // y [outer, count, width]
  int64_t length;                     // C
  int64_t outer_stride, axis_stride;  // of x, which is contiguous along width
  int64_t index_type;                 // a DType
};
static_assert(sizeof(TakeArgs) == 56, "host and device must agree");

MT_CONSTANT int kTakeMostAxes = 8;
MT_CONSTANT int64_t kTakeNowhere =
    -9223372036854775807 - 1;  // outside, also once a length was added

struct TakePlacesArgs {
  int64_t count;  // of each tensor
  int64_t axes;
  int64_t lengths[kTakeMostAxes];
  int64_t index_types[kTakeMostAxes];
};

}  // namespace mlxtape::ops
