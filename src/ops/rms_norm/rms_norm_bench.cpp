#include "mlxtape/ops/rms_norm.h"

#include "cases/bench_case.h"
#include "cases/random.h"

namespace mlxtape::bench {

std::vector<BenchCase> rms_norm_bench_cases() {
  std::vector<BenchCase> cases;
  constexpr float kEps = 1e-6F;
  struct Inputs {
    Tensor x, w, dy, other;
  };
  const auto make = [](CommandEncoder& encoder, const Shape& shape, DType dtype) {
    return Inputs{random_tensor(encoder, shape, dtype, 1),
                  random_tensor(encoder, {shape[1]}, dtype, 2),
                  random_tensor(encoder, shape, dtype, 3), random_tensor(encoder, shape, dtype, 4)};
  };
  const auto add = [&](const char* form, const char* pass, const Shape& shape, DType dtype,
                       int read, int written, const auto& start) {
    const std::int64_t bytes = shape[0] * shape[1] * static_cast<std::int64_t>(size_of(dtype));
    cases.push_back({form, pass, std::to_string(shape[0]) + "x" + std::to_string(shape[1]), dtype,
                     read * bytes, written * bytes, read, written, [=](CommandEncoder& encoder) {
                       return start(encoder, make(encoder, shape, dtype));
                     }});
  };
  for (const DType dtype : kFloats) {
    for (const Shape& shape :
         {Shape{16384, 2048}, Shape{8192, 2048}, Shape{16384, 128}, Shape{8192, 128},
          Shape{8192, 8192}, Shape{4096, 8192}, Shape{2048, 32768}, Shape{1024, 32768},
          Shape{64, 2048}, Shape{256, 128}, Shape{1000, 2047}}) {
      add("", "fwd", shape, dtype, 1, 1,
          [](CommandEncoder& encoder, const Inputs& in) -> BenchCall {
            return [=, &encoder] {
              ops::rms_norm(encoder, in.x, in.w, kEps);
            };
          });
      add("", "bwd", shape, dtype, 2, 1,
          [](CommandEncoder& encoder, const Inputs& in) -> BenchCall {
            const Tensor r = ops::rms_norm(encoder, in.x, in.w, kEps).r;
            return [=, &encoder] {
              ops::rms_norm_backward(encoder, in.x, in.w, r, in.dy);
            };
          });
    }
    const Shape hidden{16384, 2048}, heads{131072, 128};
    add("l2", "fwd", heads, dtype, 1, 1,
        [](CommandEncoder& encoder, const Inputs& in) -> BenchCall {
          return [=, &encoder] {
            ops::l2_norm(encoder, in.x);
          };
        });
    add("l2", "bwd", heads, dtype, 2, 1,
        [](CommandEncoder& encoder, const Inputs& in) -> BenchCall {
          const Tensor r = ops::l2_norm(encoder, in.x).r;
          return [=, &encoder] {
            ops::l2_norm_backward(encoder, in.x, r, in.dy);
          };
        });
    add("residual", "fwd", hidden, dtype, 2, 2,
        [](CommandEncoder& encoder, const Inputs& in) -> BenchCall {
          return [=, &encoder] {
            ops::rms_norm_residual(encoder, in.x, in.other, in.w, kEps);
          };
        });
    add("residual", "bwd", hidden, dtype, 3, 1,
        [](CommandEncoder& encoder, const Inputs& in) -> BenchCall {
          const Tensor r = ops::rms_norm(encoder, in.x, in.w, kEps).r;
          return [=, &encoder] {
            ops::rms_norm_residual_backward(encoder, in.x, in.w, r, in.dy, in.other);
          };
        });
    add("gated", "fwd", heads, dtype, 2, 1,
        [](CommandEncoder& encoder, const Inputs& in) -> BenchCall {
          return [=, &encoder] {
            ops::rms_norm_gated(encoder, in.x, in.w, in.other, kEps);
          };
        });
    add("gated", "bwd", heads, dtype, 3, 2,
        [](CommandEncoder& encoder, const Inputs& in) -> BenchCall {
          const Tensor r = ops::rms_norm(encoder, in.x, in.w, kEps).r;
          return [=, &encoder] {
            ops::rms_norm_gated_backward(encoder, in.x, in.w, in.other, r, in.dy);
          };
        });
  }
  return cases;
}

}  // namespace mlxtape::bench
