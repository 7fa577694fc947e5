#include "mlxtape/ops/moe_route.h"

#include "mlxtape/base/checked.h"
#include "moe_route_args.h"

namespace mlxtape::ops {

namespace {

constinit const KernelHandle kForward("moe_route_fwd");
constinit const KernelHandle kBackward("moe_route_bwd");

constexpr std::int64_t kMostExperts = 1024;
constexpr std::int64_t kMostChosen = 64;

Error wrong(Errc code, const std::string& what) { return {code, "moe_route: " + what}; }

// t must have this shape and type and be where logits is.
Check same(const char* name, const Tensor& t, const Shape& shape, DType dtype, Backend backend) {
  if (!(t.shape() == shape)) {
    return wrong(Errc::kShape, std::string(name) + " must be " + to_string(shape) + ", got " +
                                   to_string(t.shape()));
  }
  if (t.dtype() != dtype) {
    return wrong(Errc::kDType,
                 std::string(name) + " must be " + name_of(dtype) + ", got " + name_of(t.dtype()));
  }
  if (t.backend() != backend) {
    return wrong(Errc::kDevice, std::string(name) + " must be where logits is (" +
                                    name_of(backend) + "), got " + name_of(t.backend()));
  }
  return std::nullopt;
}

}  // namespace

Check moe_route_check(const Tensor& logits, std::int64_t k) {
  if (logits.rank() != 2) {
    return wrong(Errc::kShape, "logits must be [T, E], got " + to_string(logits.shape()));
  }
  if (!is_kernel_float(logits.dtype())) {
    return wrong(Errc::kDType,
                 std::string("logits must be f32, f16 or bf16, got ") + name_of(logits.dtype()));
  }
  const std::int64_t experts = logits.dim(1);
  if (experts < 1 || experts > kMostExperts) {
    return wrong(Errc::kShape, "E must be in [1, 1024], got " + std::to_string(experts));
  }
  const std::int64_t most = std::min(experts, kMostChosen);
  if (k < 1 || k > most) {
    return wrong(Errc::kArgument, "k must be in [1, min(E, 64)] = [1, " + std::to_string(most) +
                                      "], got " + std::to_string(k));
  }
  if (logits.dim(0) > std::int64_t{0xffffffff} / k) {
    return wrong(Errc::kShape, "T*k must be less than 2^32, got T = " +
                                   std::to_string(logits.dim(0)) + ", k = " + std::to_string(k));
  }
  return std::nullopt;
}

Check moe_route_backward_check(const MoeRouteSaved& saved, const Tensor& dscores) {
  if (saved.indices.rank() != 2) {
    return wrong(Errc::kShape, "indices must be [T, k], got " + to_string(saved.indices.shape()));
  }
  const std::int64_t k = saved.indices.dim(1);
  if (const Check check = moe_route_check(saved.logits, k)) return check;
  const std::int64_t rows = saved.logits.dim(0);
  const DType dtype = saved.logits.dtype();
  const Backend backend = saved.logits.backend();
  const Shape chosen{rows, k};
  if (const Check c = same("indices", saved.indices, chosen, DType::kU32, backend)) return c;
  if (const Check c = same("scores", saved.scores, chosen, dtype, backend)) return c;
  if (const Check c = same("dscores", dscores, chosen, dtype, backend)) return c;
  if (!saved.lse.defined()) return std::nullopt;
  if (const Check c = same("lse", saved.lse, {rows}, DType::kF32, backend)) return c;
  if (!saved.logits.has_memory() && saved.logits.size() != 0) {
    return wrong(Errc::kArgument, "logits must have memory when lse is given, got shape alone");
  }
  return std::nullopt;
}

MoeRoute moe_route(CommandEncoder& encoder, const Tensor& logits, std::int64_t k,
                   MoeRouteOptions options) {
  require(moe_route_check(logits, k));
  const std::int64_t rows = logits.dim(0);
  const std::int64_t experts = logits.dim(1);
  const Tensor dense = encoder.contiguous(logits);
  MoeRoute route;
  route.indices = encoder.empty({rows, k}, DType::kU32);
  route.scores = encoder.empty({rows, k}, logits.dtype());
  route.counts = encoder.empty({experts}, DType::kU32);
  route.offsets = encoder.empty({experts + 1}, DType::kU32);
  if (!options.renormalise) route.lse = encoder.empty({rows}, DType::kF32);
  const MoeRouteArgs args{rows, experts, k, options.renormalise ? 0 : 1};
  encoder.dispatch(kForward, logits.dtype(), args, {dense},
                   {route.indices, route.scores, route.counts, route.offsets, route.lse});
  return route;
}

Tensor moe_route_backward(CommandEncoder& encoder, const MoeRouteSaved& saved,
                          const Tensor& dscores) {
  require(moe_route_backward_check(saved, dscores));
  const Shape& shape = saved.logits.shape();
  const bool full = saved.lse.defined();
  Tensor dlogits = encoder.empty(shape, saved.logits.dtype());
  if (dlogits.size() == 0) return dlogits;
  const Tensor indices = encoder.contiguous(saved.indices);
  const Tensor scores = encoder.contiguous(saved.scores);
  const Tensor dense_dscores = encoder.contiguous(dscores);
  const Tensor logits = full ? encoder.contiguous(saved.logits) : Tensor();
  const Tensor lse = full ? encoder.contiguous(saved.lse) : Tensor();
  const MoeRouteArgs args{shape[0], shape[1], saved.indices.dim(1), full ? 1 : 0};
  encoder.dispatch(kBackward, saved.logits.dtype(), args,
                   {indices, scores, dense_dscores, logits, lse}, {dlogits});
  return dlogits;
}

namespace {

struct LogitsLike {
  Shape shape;
  DType dtype;
};

void moe_route_pullback(Pullback& pullback) {
  const Saved& saved = pullback.saved();  // indices, scores, and logits, lse in the full form
  const auto& [shape, dtype] = saved.args<LogitsLike>();
  MoeRouteSaved kept{saved[2], saved[0], saved[1], saved[3]};
  if (!kept.logits.defined()) kept.logits = Tensor::meta(shape, dtype, saved[0].backend());
  pullback.give(0, moe_route_backward(pullback.encoder(), kept, pullback.grad(0)));
}

}  // namespace

MoeRoute moe_route(Tape& tape, const Tensor& logits, std::int64_t k, MoeRouteOptions options) {
  MoeRoute route = moe_route(tape.encoder(), logits, k, options);
  if (tape.wants({logits})) {
    tape.record(
        "moe_route", moe_route_pullback, {logits}, {&route.scores},
        Saved({route.indices, route.scores, options.renormalise ? Tensor() : logits, route.lse},
              LogitsLike{logits.shape(), logits.dtype()}));
  }
  route.lse = Tensor();
  return route;
}

}  // namespace mlxtape::ops
