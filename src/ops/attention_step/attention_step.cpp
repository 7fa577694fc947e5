#include "mlxtape/ops/attention_step.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "attention_step_args.h"
#include "ops/expect.h"
#include "ops/views.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kStep("attention_step");

constexpr std::int64_t kMostChannels = 256;
constexpr std::int64_t kMostTokens = 16;                       // more are the business of attention
constexpr std::int64_t kMostCapacity = std::int64_t{1} << 30;  // CUDA counts keys in 32 bits

Error wrong(Errc code, const std::string& what) { return {code, "attention_step: " + what}; }

Check expect_tensor(const Tensor& q, const char* name, const Tensor& t, const Shape& shape,
                    DType dtype) {
  return ops::expect_tensor(Beside{"attention_step", "q", q}, name, t, shape, dtype);
}

Check check_shapes(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!is_kernel_float(q.dtype())) {
    return wrong(Errc::kDType,
                 std::string("q must be f32, f16 or bf16, got ") + name_of(q.dtype()));
  }
  if (q.rank() != 4 || k.rank() != 4 || v.rank() != 4) {
    return wrong(Errc::kShape, "q, k and v must be [B, T, heads, channels], got " +
                                   to_string(q.shape()) + ", " + to_string(k.shape()) + " and " +
                                   to_string(v.shape()));
  }
  const std::int64_t batch = q.dim(0), tokens = q.dim(1), heads = q.dim(2), dim = q.dim(3);
  const std::int64_t key_heads = k.dim(2), value_dim = v.dim(3);
  if (tokens < 1 || tokens > kMostTokens) {
    return wrong(Errc::kShape, "T must be from 1 to 16, got " + std::to_string(tokens));
  }
  if (heads < 1 || key_heads < 1 || heads % key_heads != 0) {
    return wrong(Errc::kShape, "heads must be a multiple of key heads, at least 1 each, got " +
                                   std::to_string(heads) + " and " + std::to_string(key_heads));
  }
  if (dim < 1 || dim > kMostChannels || value_dim < 1 || value_dim > kMostChannels) {
    return wrong(Errc::kShape, "D and Dv must be from 1 to 256, got " + std::to_string(dim) +
                                   " and " + std::to_string(value_dim));
  }
  if (const Check check = expect_tensor(q, "k", k, {batch, tokens, key_heads, dim}, q.dtype())) {
    return check;
  }
  return expect_tensor(q, "v", v, {batch, tokens, key_heads, value_dim}, q.dtype());
}

// A half of the cache, whose rows are like those of `rows`.
Check check_half(const Tensor& q, const char* name, const Tensor& half, std::int64_t capacity,
                 const Tensor& rows) {
  if (const Check check =
          expect_tensor(q, name, half, {q.dim(0), capacity, rows.dim(2), rows.dim(3)}, q.dtype())) {
    return check;
  }
  if (!half.is_contiguous()) {
    return wrong(Errc::kShape, std::string(name) +
                                   " must be contiguous, for they are changed in place, got " +
                                   "strides " + to_string(half.strides()));
  }
  return std::nullopt;
}

}  // namespace

Check attention_step_check(const Tensor& q, const Tensor& k, const Tensor& v,
                           const AttentionCache& cache, const AttentionStepOptions& options) {
  if (const Check check = check_shapes(q, k, v)) return check;
  if (cache.keys.rank() != 4 || cache.keys.dim(1) < q.dim(1) || cache.keys.dim(1) > kMostCapacity) {
    return wrong(Errc::kShape,
                 "keys must be [B, C, Hk, D] with C from T = " + std::to_string(q.dim(1)) +
                     " to 2^30, got " + to_string(cache.keys.shape()));
  }
  const std::int64_t capacity = cache.keys.dim(1);
  if (const Check check = check_half(q, "keys", cache.keys, capacity, k)) return check;
  if (const Check check = check_half(q, "values", cache.values, capacity, v)) return check;
  if (const Check check = expect_tensor(q, "lengths", cache.lengths, {q.dim(0)}, DType::kI32)) {
    return check;
  }
  if (!std::isfinite(options.scale)) {
    return wrong(Errc::kArgument, "scale must be finite, got " + std::to_string(options.scale));
  }
  if (options.window < 0) {
    return wrong(Errc::kArgument,
                 "window must be at least 0, got " + std::to_string(options.window));
  }
  if (options.sinks.defined()) {
    if (const Check check = expect_tensor(q, "sinks", options.sinks, {q.dim(2)}, DType::kF32)) {
      return check;
    }
  }
  const std::pair<const char*, const Tensor*> beside[] = {{"q", &q},
                                                          {"k", &k},
                                                          {"v", &v},
                                                          {"lengths", &cache.lengths},
                                                          {"sinks", &options.sinks},
                                                          {"keys", &cache.keys}};
  for (const Tensor* half : {&cache.keys, &cache.values}) {
    for (const auto& [name, t] : beside) {
      if (t != half && t->has_memory() && half->has_memory() &&
          t->buffer().address() == half->buffer().address()) {
        return wrong(Errc::kArgument, std::string(half == &cache.keys ? "keys" : "values") +
                                          " must lie in a buffer of their own, for they are "
                                          "changed in place, got that of " +
                                          name);
      }
    }
  }
  return std::nullopt;
}

Tensor attention_step(CommandEncoder& encoder, const Tensor& q, const Tensor& k, const Tensor& v,
                      const AttentionCache& cache, const AttentionStepOptions& options) {
  require(attention_step_check(q, k, v, cache, options));
  AttentionStepArgs args{};
  args.batch = q.dim(0);
  args.tokens = q.dim(1);
  args.capacity = cache.keys.dim(1);
  args.heads = q.dim(2);
  args.key_heads = k.dim(2);
  args.dim = q.dim(3);
  args.value_dim = v.dim(3);
  args.window = std::min(options.window, args.capacity);  // none is longer, and sums stay small
  args.scale = static_cast<float>(options.scale == 0 ? 1 / std::sqrt(static_cast<double>(args.dim))
                                                     : options.scale);
  const Tensor queries = heads_of(encoder, q, args.q);
  const Tensor new_keys = heads_of(encoder, k, args.k);
  const Tensor new_values = heads_of(encoder, v, args.v);
  const Tensor lengths = encoder.contiguous(cache.lengths);
  const Tensor sinks = contiguous_or_absent(encoder, options.sinks);
  Tensor y = encoder.empty({args.batch, args.tokens, args.heads, args.value_dim}, q.dtype());
  if (y.size() != 0) {
    encoder.dispatch(kStep, q.dtype(), args, {queries, new_keys, new_values, lengths, sinks},
                     {y, cache.keys, cache.values});
  }
  return y;
}

}  // namespace mlxtape::ops
