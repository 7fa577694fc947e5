// Read by sample.cpp and the sample kernels. in: logits, numbers, whole, history, lengths, bias_ids, bias (these two may
// be missing). out: tokens, logprobs, top_ids, top_logprobs (all three may be missing), and with append history and
// lengths again.
#pragma once

#include <cstdint>

namespace mlxtape::ops {

// How CUDA works on a row; the CPU has one way.
enum class SampleForm : std::int32_t {
  kQuickest,  // what the shape and the device allow
  kPortable,  // one block, and what does not fit its shared memory is read again
};

struct SampleArgs {
  std::int64_t rows, vocabulary;
  std::int64_t room;    // H
  std::int64_t biases;  // K
  std::int32_t logprobs, top, append;
  SampleForm form;
};
static_assert(sizeof(SampleArgs) == 48, "host and device must agree");

}  // namespace mlxtape::ops
