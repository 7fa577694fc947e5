#include "mlxtape/ops/dropout.h"

#include <string>

#include "dropout_args.h"
#include "mlxtape/ops/random.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("dropout_fwd");

Error wrong(Errc code, const std::string& what) { return {code, "dropout: " + what}; }

// Between p = 0 and p = 1. kept_key: where the key is copied to, or nothing.
Tensor drop(CommandEncoder& encoder, const Tensor& x, double p, const Tensor& key,
            const Tensor& kept_key) {
  const DropoutArgs args{x.size(), bernoulli_last_word(1 - p), static_cast<float>(1 / (1 - p))};
  const Tensor dense = encoder.contiguous(x);
  const Tensor dense_key = encoder.contiguous(key);
  Tensor y = encoder.empty(x.shape(), x.dtype());
  if (y.size() != 0) encoder.dispatch(kForward, x.dtype(), args, {dense, dense_key}, {y, kept_key});
  return y;
}

void dropout_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();
  pullback.give(
      0, drop(pullback.encoder(), pullback.grad(), saved.args<double>(), saved[0], Tensor()));
}

void nothing_pullback(Pullback& pullback) { pullback.give_none(0); }

}  // namespace

Check dropout_check(const Tensor& x, double p, const Tensor& key) {
  if (!is_kernel_float(x.dtype())) {
    return wrong(Errc::kDType,
                 std::string("x must be f32, f16 or bf16, got ") + name_of(x.dtype()));
  }
  if (!(p >= 0 && p <= 1)) {
    return wrong(Errc::kArgument, "p must be in [0, 1], got " + std::to_string(p));
  }
  if (const Check check = random_key_check("dropout", key)) return check;
  if (key.backend() != x.backend()) return wrong(Errc::kDevice, "the key must be where x is");
  return std::nullopt;
}

Tensor dropout(CommandEncoder& encoder, const Tensor& x, double p, const Tensor& key) {
  require(dropout_check(x, p, key));
  if (p == 0) return x;
  if (p == 1) return encoder.zeros(x.shape(), x.dtype());
  return drop(encoder, x, p, key, Tensor());
}

Tensor dropout(Tape& tape, const Tensor& x, double p, const Tensor& key) {
  if (p == 0 || !tape.wants({x})) return dropout(tape.encoder(), x, p, key);
  require(dropout_check(x, p, key));
  CommandEncoder& encoder = tape.encoder();
  if (p == 1) {
    Tensor y = encoder.zeros(x.shape(), x.dtype());
    tape.record("dropout", nothing_pullback, {x}, {&y}, Saved());
    return y;
  }
  const Tensor kept_key = encoder.empty({2}, DType::kU32);
  Tensor y = drop(encoder, x, p, key, kept_key);
  tape.record("dropout", dropout_pullback, {x}, {&y}, Saved({kept_key}, p));
  return y;
}

}  // namespace mlxtape::ops
