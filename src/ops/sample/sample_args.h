// Read by sample.cpp and the sample kernels. in: logits, numbers, whole, history, lengths, bias_ids, bias (these two may
// be missing). out: tokens, logprobs, top_ids, top_logprobs (all three may be missing), and with append history and
// lengths again.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mlxtape::ops {

// How CUDA works on a row; the CPU has one way.
enum class SampleForm : int32_t {
  kQuickest,  // what the shape and the device allow
  kPortable,  // one block, and what does not fit its shared memory is read again
};

struct SampleArgs {
  int64_t rows, vocabulary;
  int64_t room;    // H
  int64_t biases;  // K
  int32_t logprobs, top, append;
  SampleForm form;
};
static_assert(sizeof(SampleArgs) == 48, "host and device must agree");

}  // namespace mlxtape::ops
