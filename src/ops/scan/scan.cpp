#include "mlxtape/ops/scan.h"

#include <string>

#include "mlxtape/ops/elementwise.h"
#include "scan_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kCumsum("cumsum_fwd");

Error wrong(Errc code, const std::string& what) { return {code, "cumsum: " + what}; }

// Sums that wrap around are the same for signed and unsigned numbers.
DType kernel_type(DType t) {
  switch (t) {
    case DType::kI8: return DType::kU8;
    case DType::kI16: return DType::kU16;
    case DType::kI32: return DType::kU32;
    case DType::kI64: return DType::kU64;
    default: return t;
  }
}

struct Kept {
  std::int64_t axis;
  bool reverse, inclusive;
};

void cumsum_pullback(Pullback& pullback) {
  const auto& kept = pullback.saved().args<Kept>();
  pullback.give(
      0, cumsum(pullback.encoder(), pullback.grad(), kept.axis, !kept.reverse, kept.inclusive));
}

}  // namespace

Check cumsum_check(const Tensor& x, std::int64_t axis) {
  if (x.rank() < 1) return wrong(Errc::kShape, "x must have at least one axis, got []");
  if (!normal_axis(axis, x.rank())) {
    return wrong(Errc::kArgument, "axis must be in [-" + std::to_string(x.rank()) + ", " +
                                      std::to_string(x.rank()) + "), got " + std::to_string(axis));
  }
  if (x.dtype() == DType::kF64) {
    return wrong(Errc::kDType,
                 std::string("x must not be wider than f32, got ") + name_of(x.dtype()));
  }
  return std::nullopt;
}

Tensor cumsum(CommandEncoder& encoder, const Tensor& x, std::int64_t axis, bool reverse,
              bool inclusive) {
  require(cumsum_check(x, axis));
  const Tensor numbers = x.dtype() == DType::kBool ? cast(encoder, x, DType::kI32) : x;
  const std::int64_t a = *normal_axis(axis, x.rank());
  ScanArgs args{1, x.dim(a), 1, reverse ? 1 : 0, inclusive ? 0 : 1};
  for (std::int64_t i = 0; i < a; ++i) args.outer *= x.dim(i);
  for (std::int64_t i = a + 1; i < x.rank(); ++i) args.inner *= x.dim(i);
  const Tensor dense = encoder.contiguous(numbers);
  Tensor y = encoder.empty(x.shape(), numbers.dtype());
  if (y.size() != 0) encoder.dispatch(kCumsum, kernel_type(y.dtype()), args, {dense}, {y});
  return y;
}

Tensor cumsum(Tape& tape, const Tensor& x, std::int64_t axis, bool reverse, bool inclusive) {
  Tensor y = cumsum(tape.encoder(), x, axis, reverse, inclusive);
  if (tape.wants({x})) {
    tape.record("cumsum", cumsum_pullback, {x}, {&y}, Saved({}, Kept{axis, reverse, inclusive}));
  }
  return y;
}

}  // namespace mlxtape::ops
