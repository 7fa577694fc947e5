// Read by sum_rows.cpp and the sum_rows kernels.
// sum_rows_places_i32: in indices; out places [n] i32: in [0, rows), or kSumRowsNowhere, which is sorted last.
// sum_rows_keys_i32:   in places, order (what sorts them); out keys [n]: places in order, and if ids are asked for
//                      slots [n]: how many different keys are before each; ids [slots]: those keys, then -1.
// sum_rows_fwd_<terms>: in terms, keys, order, and slots and ids or neither; out y. Chunks of kSumRowsChunk sorted positions add
//                      up what they have; what reaches over an end goes to scratch memory, and is added in order.
// sum_rows_add_<dense>: in ids, rows; out dense.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>

constexpr int64_t kSumRowsChunk = 32;
constexpr int32_t kSumRowsNowhere = INT32_MAX;
#else
constant int64_t kSumRowsChunk = 32;
constant int32_t kSumRowsNowhere = 0x7fffffff;
#endif

struct SumRowsPlacesArgs {
  int64_t count, rows;
  int64_t index_type;  // a DType
};

struct SumRowsKeysArgs {
  int64_t count, slots;  // slots 0: keys alone
};

struct SumRowsArgs {
  int64_t outer, count, width;  // terms [outer, count, width]
  int64_t rows;                 // y [outer, rows, width]
  int32_t by_slot;              // rows of y are slots, and those without an id are zero; else keys
  int32_t adds;                 // to what y has
  int64_t f32_sums;             // y is f32, else as terms
};
static_assert(sizeof(SumRowsArgs) == 48, "host and device must agree");

struct SumRowsAddArgs {
  int64_t count, width;  // rows [count, width]
  int64_t rows;          // dense [rows, width]; ids outside are skipped
  int64_t from;          // DType of rows
};
