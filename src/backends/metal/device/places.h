// Indices of any integer type as places along an axis.
#pragma once

#include <metal_stdlib>
using namespace metal;

// The numbers of DType, by which kernels learn an index's type.
enum IndexType {
  kIndexU8 = 1,
  kIndexU16,
  kIndexU32,
  kIndexU64,
  kIndexI8,
  kIndexI16,
  kIndexI32,
  kIndexI64
};

// The place that index i names, counted from the end where it is negative; not in [0, length) when it names none, whatever
// the index.
inline ulong place_of(device const uchar* indices, int type, long i, long length) {
  long index = 0;
  switch (type) {
    case kIndexU8: return indices[i];
    case kIndexU16: return ((device const ushort*)indices)[i];
    case kIndexU32: return ((device const uint*)indices)[i];
    case kIndexU64: return ((device const ulong*)indices)[i];
    case kIndexI8: index = ((device const char*)indices)[i]; break;
    case kIndexI16: index = ((device const short*)indices)[i]; break;
    case kIndexI32: index = ((device const int*)indices)[i]; break;
    default: index = ((device const long*)indices)[i]; break;
  }
  return ulong(index < 0 ? index + length : index);
}
