#include "mlxtape/ops/rope.h"

#include <cmath>
#include <string>

#include "rope_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kTurn("rope_fwd");

Error wrong(Errc code, const std::string& what) { return {code, "rope: " + what}; }

std::int64_t dims_of(const Tensor& x, const RopeOptions& options) {
  return options.dims == 0 ? x.shape().back() : options.dims;
}

Tensor turn(CommandEncoder& encoder, const Tensor& x, const RopeOptions& options, bool back) {
  require(rope_check(x, options));
  const std::int64_t rank = x.rank();
  RopeArgs args{};
  args.batch = x.dim(0);
  args.heads = 1;
  for (std::int64_t i = 1; i < rank - 2; ++i) args.heads *= x.dim(i);
  args.tokens = x.dim(rank - 2);
  args.cols = x.dim(rank - 1);
  args.half = dims_of(x, options) / 2;
  args.offset = options.offset;
  args.offsets = options.offsets.defined() ? options.offsets.size() : 0;
  args.log2_base = std::log2(options.base);
  args.scale = options.scale;
  args.traditional = options.traditional;
  args.back = back;
  // As projections leave it.
  const bool by_token =
      rank == 4 && !x.is_contiguous() && x.transpose({0, 2, 1, 3}).is_contiguous();
  args.head_step = by_token ? args.cols : args.tokens * args.cols;
  args.token_step = by_token ? args.heads * args.cols : args.cols;
  const Tensor dense = by_token ? x : encoder.contiguous(x);
  const auto dense_or_absent = [&](const Tensor& t) {
    return t.defined() ? encoder.contiguous(t) : t;
  };
  const Tensor offsets = dense_or_absent(options.offsets);
  const Tensor periods = dense_or_absent(options.periods);
  Tensor y = by_token ? encoder.empty({x.dim(0), x.dim(2), x.dim(1), x.dim(3)}, x.dtype())
                            .transpose({0, 2, 1, 3})
                      : encoder.empty(x.shape(), x.dtype());
  if (y.size() != 0) encoder.dispatch(kTurn, x.dtype(), args, {dense, offsets, periods}, {y});
  return y;
}

}  // namespace

Check rope_check(const Tensor& x, const RopeOptions& options) {
  if (x.rank() < 3) {
    return wrong(Errc::kShape, "x must be [B, …, T, D], got " + to_string(x.shape()));
  }
  if (!is_kernel_float(x.dtype())) {
    return wrong(Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  const std::int64_t dims = dims_of(x, options);
  if (dims < 2 || dims % 2 != 0 || dims > x.shape().back()) {
    return wrong(Errc::kArgument, "dims must be even and in [2, " +
                                      std::to_string(x.shape().back()) + "], got " +
                                      std::to_string(dims));
  }
  if (!(options.base > 0) || !std::isfinite(options.base) || !std::isfinite(options.scale)) {
    return wrong(Errc::kArgument, "base must be above 0 and scale finite, got " +
                                      std::to_string(options.base) + " and " +
                                      std::to_string(options.scale));
  }
  if (options.offsets.defined()) {
    const Tensor& t = options.offsets;
    if (t.dtype() != DType::kI32) {
      return wrong(Errc::kDType, std::string("offsets must be i32, got ") + name_of(t.dtype()));
    }
    if (t.rank() > 1 || (t.size() != 1 && t.size() != x.dim(0))) {
      return wrong(Errc::kShape, "offsets must be [1] or [B] = [" + std::to_string(x.dim(0)) +
                                     "], got " + to_string(t.shape()));
    }
    if (t.backend() != x.backend()) return wrong(Errc::kDevice, "offsets must be where x is");
  }
  if (options.periods.defined()) {
    const Tensor& t = options.periods;
    if (t.dtype() != DType::kF32) {
      return wrong(Errc::kDType, std::string("periods must be f32, got ") + name_of(t.dtype()));
    }
    if (!(t.shape() == Shape{dims / 2})) {
      return wrong(Errc::kShape, "periods must be [dims/2] = [" + std::to_string(dims / 2) +
                                     "], got " + to_string(t.shape()));
    }
    if (t.backend() != x.backend()) return wrong(Errc::kDevice, "periods must be where x is");
  }
  return std::nullopt;
}

Tensor rope(CommandEncoder& encoder, const Tensor& x, const RopeOptions& options) {
  return turn(encoder, x, options, false);
}

Tensor rope_backward(CommandEncoder& encoder, const Tensor& dy, const RopeOptions& options) {
  return turn(encoder, dy, options, true);
}

namespace {

struct Kept {
  std::int64_t dims, offset;
  double base, scale;
  bool traditional;
};

void rope_pullback(Pullback& pullback) {
  const auto& kept = pullback.saved().args<Kept>();
  RopeOptions options;
  options.dims = kept.dims;
  options.offset = kept.offset;
  options.base = kept.base;
  options.scale = kept.scale;
  options.traditional = kept.traditional;
  options.offsets = pullback.saved()[0];
  options.periods = pullback.saved()[1];
  pullback.give(0, rope_backward(pullback.encoder(), pullback.grad(), options));
}

}  // namespace

Tensor rope(Tape& tape, const Tensor& x, const RopeOptions& options) {
  Tensor y = rope(tape.encoder(), x, options);
  if (tape.wants({x})) {
    tape.record(
        "rope", rope_pullback, {x}, {&y},
        Saved({options.offsets, options.periods}, Kept{options.dims, options.offset, options.base,
                                                       options.scale, options.traditional}));
  }
  return y;
}

}  // namespace mlxtape::ops
