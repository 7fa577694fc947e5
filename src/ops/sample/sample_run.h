// What sample() does, with the form of its kernels to be chosen: tests run each.
#pragma once

#include "mlxtape/ops/sample.h"
#include "sample_args.h"

namespace mlxtape::ops {

Sampled run_sample(CommandEncoder& encoder, const Tensor& logits, const SampleRows& rows,
                   SampleOptions options, SampleForm form);

}  // namespace mlxtape::ops
