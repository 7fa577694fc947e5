#include "mlxtape/ops/conv1d_depthwise_causal.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> conv1d_depthwise_causal_bench_cases() {
  struct Size {
    std::int64_t rows, channels, taps;
    bool silu;
  };
  std::vector<BenchCase> cases;
  for (const auto& [rows, channels, taps, silu] : std::vector<Size>{{16384, 8192, 4, false},
                                                                    {16384, 8192, 4, true},
                                                                    {8192, 8192, 4, false},
                                                                    {4096, 2048, 4, false},
                                                                    {64, 1024, 4, false},
                                                                    {1000, 2047, 3, false}}) {
    for (const DType dtype : kFloats) {
      const auto size = static_cast<std::int64_t>(size_of(dtype));
      const std::int64_t bytes = rows * channels * size, w_bytes = channels * taps * size;
      const Shape shape{rows, channels}, w_shape{channels, taps};
      const ops::Conv1dDepthwiseCausalOptions options{.silu = silu};
      const std::string name =
          std::to_string(rows) + "x" + std::to_string(channels) + "x" + std::to_string(taps);
      const char* form = silu ? "silu" : "";
      cases.push_back(
          {form, "fwd", name, dtype, bytes + w_bytes, bytes, 1, 1, [=](CommandEncoder& encoder) {
             const Tensor x = random_tensor(encoder, shape, dtype, 1);
             const Tensor w = random_tensor(encoder, w_shape, dtype, 2);
             return [=, &encoder] {
               ops::conv1d_depthwise_causal(encoder, x, w, options);
             };
           }});
      cases.push_back({form, "bwd", name, dtype, 2 * bytes + w_bytes, bytes + w_bytes, 2, 1,
                       [=](CommandEncoder& encoder) {
                         const Tensor x = random_tensor(encoder, shape, dtype, 1);
                         const Tensor w = random_tensor(encoder, w_shape, dtype, 2);
                         const Tensor dy = random_tensor(encoder, shape, dtype, 3);
                         return [=, &encoder] {
                           ops::conv1d_depthwise_causal_backward(encoder, x, w, dy, options);
                         };
                       }});
    }
  }
  for (const std::int64_t batch : {1, 8}) {
    for (const DType dtype : kFloats) {
      const std::int64_t channels = 8192, taps = 4;
      const std::int64_t one = batch * channels * static_cast<std::int64_t>(size_of(dtype));
      const std::int64_t w_bytes = one / batch * taps;
      const std::string name = std::to_string(batch) + "x8192x4";
      cases.push_back({"step", "fwd", name, dtype, taps * one + w_bytes, taps * one, 3, 2,
                       [=](CommandEncoder& encoder) {
                         const Tensor x = random_tensor(encoder, {batch, channels}, dtype, 1);
                         const Tensor w = random_tensor(encoder, {channels, taps}, dtype, 2, 0.3);
                         const Tensor state =
                             random_tensor(encoder, {batch, taps - 1, channels}, dtype, 3);
                         return [=, &encoder] {
                           ops::conv1d_depthwise_causal_step(encoder, x, w, state, true);
                         };
                       }});
    }
  }
  return cases;
}

}  // namespace mlxtape::bench
