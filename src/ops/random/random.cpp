#include "mlxtape/ops/random.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "mlxtape/ops/elementwise.h"
#include "random_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kKey("random_key_fwd");
constinit const KernelHandle kAdvance("random_advance_fwd");
constinit const KernelHandle kBits("random_bits_fwd");
constinit const KernelHandle kUniform("random_uniform_fwd");
constinit const KernelHandle kNormal("random_normal_fwd");
constinit const KernelHandle kBernoulli("random_bernoulli_fwd");

constexpr float kWords = 0x1p32F + 512;  // the f32 after 2³²: with p = 1 every word is below

Error wrong(const char* op, Errc code, const std::string& what) {
  return {code, std::string(op) + ": " + what};
}

Check check_type(const char* op, DType dtype) {
  if (is_kernel_float(dtype)) return std::nullopt;
  return wrong(op, Errc::kDType,
               std::string("the type must be f32, f16 or bf16, got ") + name_of(dtype));
}

Check check_finite(const char* op, const char* first, double a, const char* second, double b) {
  if (std::isfinite(a) && std::isfinite(b)) return std::nullopt;
  return wrong(op, Errc::kArgument,
               std::string(first) + " and " + second + " must be finite, got " + std::to_string(a) +
                   " and " + std::to_string(b));
}

// v rounded to t.
float stored(DType t, double v) {
  switch (t) {
    case DType::kF16: return static_cast<float>(F16(v));
    case DType::kBF16: return static_cast<float>(BF16(v));
    default: return static_cast<float>(v);
  }
}

Tensor draw(CommandEncoder& encoder, const KernelHandle& handle, const Tensor& key, Tensor out,
            RandomArgs args) {
  args.count = out.size();
  const Tensor dense = encoder.contiguous(key);
  if (out.size() != 0) encoder.dispatch(handle, out.dtype(), args, {dense}, {out});
  return out;
}

}  // namespace

Check random_key_check(const char* op, const Tensor& key) {
  if (!(key.shape() == Shape{2})) {
    return wrong(op, Errc::kShape, "the key must be [2], got " + to_string(key.shape()));
  }
  if (key.dtype() != DType::kU32) {
    return wrong(op, Errc::kDType, std::string("the key must be u32, got ") + name_of(key.dtype()));
  }
  return std::nullopt;
}

Check split_key_check(const Tensor& key, std::int64_t n) {
  if (const Check check = random_key_check("split_key", key)) return check;
  if (n < 0) {
    return wrong("split_key", Errc::kArgument, "n must be at least 0, got " + std::to_string(n));
  }
  return std::nullopt;
}

Check random_bits_check(const Tensor& key, DType dtype) {
  if (const Check check = random_key_check("random_bits", key)) return check;
  if (dtype != DType::kU32 && dtype != DType::kU16 && dtype != DType::kU8) {
    return wrong("random_bits", Errc::kDType,
                 std::string("the type must be u32, u16 or u8, got ") + name_of(dtype));
  }
  return std::nullopt;
}

Check random_uniform_check(const Tensor& key, DType dtype, double low, double high) {
  if (const Check check = random_key_check("random_uniform", key)) return check;
  if (const Check check = check_type("random_uniform", dtype)) return check;
  return check_finite("random_uniform", "low", low, "high", high);
}

Check random_normal_check(const Tensor& key, DType dtype, double mean, double deviation) {
  if (const Check check = random_key_check("random_normal", key)) return check;
  if (const Check check = check_type("random_normal", dtype)) return check;
  return check_finite("random_normal", "mean", mean, "deviation", deviation);
}

Check random_bernoulli_check(const Tensor& key, const Shape& shape, const Tensor& p) {
  constexpr const char* kName = "random_bernoulli";
  if (const Check check = random_key_check(kName, key)) return check;
  if (const Check check = check_type(kName, p.dtype())) return check;
  const auto both = broadcast_shapes(p.shape(), shape);
  if (!both || !(*both == shape)) {
    return wrong(kName, Errc::kShape,
                 "p must broadcast to " + to_string(shape) + ", got " + to_string(p.shape()));
  }
  if (p.backend() != key.backend())
    return wrong(kName, Errc::kDevice, "p must be where the key is");
  return std::nullopt;
}

Tensor random_key(CommandEncoder& encoder, std::uint64_t seed) {
  Tensor key = encoder.empty({2}, DType::kU32);
  RandomArgs args{};
  args.seed = seed;
  encoder.dispatch(kKey, DType::kU32, args, {}, {key});
  return key;
}

Tensor split_key(CommandEncoder& encoder, const Tensor& key, std::int64_t n) {
  require(split_key_check(key, n));
  return random_bits(encoder, key, {n, 2});
}

Tensor advance_key(CommandEncoder& encoder, const Tensor& key) {
  require(random_key_check("advance_key", key));
  if (!key.is_contiguous()) {
    throw wrong("advance_key", Errc::kArgument,
                "the key is written in place: it must be contiguous");
  }
  Tensor next = encoder.empty({2}, DType::kU32);
  encoder.dispatch(kAdvance, DType::kU32, RandomArgs{}, {}, {key, next});
  return next;
}

Tensor random_bits(CommandEncoder& encoder, const Tensor& key, Shape shape, DType dtype) {
  require(random_bits_check(key, dtype));
  Tensor out = encoder.empty(shape, dtype);
  RandomArgs args{};
  args.bytes = static_cast<std::int64_t>(out.bytes());
  args.count = args.bytes / 4 + (args.bytes % 4 != 0 ? 1 : 0);
  const Tensor dense = encoder.contiguous(key);
  if (out.size() != 0) encoder.dispatch(kBits, DType::kU32, args, {dense}, {out});
  return out;
}

Tensor random_uniform(CommandEncoder& encoder, const Tensor& key, Shape shape, DType dtype,
                      double low, double high) {
  require(random_uniform_check(key, dtype, low, high));
  RandomArgs args{};
  args.low = stored(dtype, low);
  args.span = stored(dtype, static_cast<double>(stored(dtype, high)) - args.low);
  return draw(encoder, kUniform, key, encoder.empty(shape, dtype), args);
}

Tensor random_normal(CommandEncoder& encoder, const Tensor& key, Shape shape, DType dtype,
                     double mean, double deviation) {
  require(random_normal_check(key, dtype, mean, deviation));
  RandomArgs args{};
  args.low = static_cast<float>(mean);
  args.span = static_cast<float>(std::sqrt(2.0) * deviation);
  return draw(encoder, kNormal, key, encoder.empty(shape, dtype), args);
}

Tensor random_bernoulli(CommandEncoder& encoder, const Tensor& key, Shape shape, double p) {
  require(random_key_check("random_bernoulli", key));
  if (!(static_cast<float>(p) * kWords > 0))
    return encoder.zeros(shape, DType::kBool);  // NaN too: nothing is below it
  RandomArgs args{};
  args.last = bernoulli_last_word(p);
  return draw(encoder, kBernoulli, key, encoder.empty(shape, DType::kBool), args);
}

Tensor random_bernoulli(CommandEncoder& encoder, const Tensor& key, Shape shape, const Tensor& p) {
  require(random_bernoulli_check(key, shape, p));
  const Tensor words = cast(encoder, random_bits(encoder, key, shape), DType::kF32);
  return less(encoder, words, multiply(encoder, cast(encoder, p, DType::kF32), kWords));
}

// Rounding to f32 keeps the order of words, so those below a number are the first ones.
std::uint32_t bernoulli_last_word(double p) {
  const float below = static_cast<float>(p) * kWords;
  std::uint64_t low = 0, high = std::uint64_t{1} << 32U;  // low is below, high counts as not
  while (high - low > 1) {
    const std::uint64_t middle = (low + high) / 2;
    (static_cast<float>(middle) < below ? low : high) = middle;
  }
  return static_cast<std::uint32_t>(low);
}

KeySequence::KeySequence(Tensor key) : state_(std::move(key)) {
  require(random_key_check("KeySequence", state_));
}

Tensor KeySequence::next(Tape& tape) {
  tape.carry(state_);
  return advance_key(tape.encoder(), state_);
}

}  // namespace mlxtape::ops
