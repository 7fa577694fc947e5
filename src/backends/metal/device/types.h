// The types of elements as numbers, for kernels that learn a type when they are compiled: DType's own numbers, which the
// launchers that pass them check.
#pragma once

enum StoredType {
  kStoredBool,
  kStoredU8,
  kStoredU16,
  kStoredU32,
  kStoredU64,
  kStoredI8,
  kStoredI16,
  kStoredI32,
  kStoredI64,
  kStoredF16,
  kStoredBF16,
  kStoredF32
};
