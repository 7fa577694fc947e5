// Read by take.cpp and the take kernels.
// take_fwd_<unsigned type of the element's size>: in x, indices (contiguous); out y.
// take_places_i64: in 1 to 8 tensors of indices, contiguous and of one size; out the place of each in row-major order
// of the axes that they index, or kTakeNowhere.
#pragma once

#include <cstdint>

namespace mlxtape::ops {

struct TakeArgs {
  std::int64_t outer, count, width;        // y [outer, count, width]
  std::int64_t length;                     // C
  std::int64_t outer_stride, axis_stride;  // of x, which is contiguous along width
  std::int64_t index_type;                 // a DType
};
static_assert(sizeof(TakeArgs) == 56, "host and device must agree");

constexpr int kTakeMostAxes = 8;
constexpr std::int64_t kTakeNowhere = INT64_MIN;  // outside, also once a length was added

struct TakePlacesArgs {
  std::int64_t count;  // of each tensor
  std::int64_t axes;
  std::int64_t lengths[kTakeMostAxes];
  std::int64_t index_types[kTakeMostAxes];
};

}  // namespace mlxtape::ops
