// Places that indices of any integer type name.
#pragma once

#include "backends/metal/device/types.h"

#include <metal_stdlib>
using namespace metal;

// The place that index i names among length; not below length where it names none. Negative ones count from the end.
inline ulong place_of(device const uchar* indices, uint type, long i, long length) {
  long v = 0;
  switch (type) {
    case kStoredU8: return indices[i];
    case kStoredU16: return ((device const ushort*)indices)[i];
    case kStoredU32: return ((device const uint*)indices)[i];
    case kStoredU64: return ((device const ulong*)indices)[i];
    case kStoredI8: v = ((device const int8_t*)indices)[i]; break;
    case kStoredI16: v = ((device const short*)indices)[i]; break;
    case kStoredI32: v = ((device const int*)indices)[i]; break;
    default: v = ((device const long*)indices)[i]; break;
  }
  return ulong(v < 0 ? v + length : v);
}
