// An operation of your own, y = x³, with its gradient: it is recorded, freed, checkpointed and reported like ours.
#include <mlxtape/mlxtape.h>

#include <cstdio>

using namespace mlxtape;

struct CubeArgs {  // kernels get addresses and a plain struct
  std::int64_t size;
};

void cube_fwd(const KernelCall& call) {
  const float* x = call.input<float>(0);
  float* y = call.output<float>(0);
  parallel_for(call.as<CubeArgs>().size, [&](std::int64_t i) { y[i] = x[i] * x[i] * x[i]; });
}

void cube_bwd(const KernelCall& call) {
  const float *x = call.input<float>(0), *dy = call.input<float>(1);
  float* dx = call.output<float>(0);
  parallel_for(call.as<CubeArgs>().size, [&](std::int64_t i) { dx[i] = 3 * x[i] * x[i] * dy[i]; });
}

constinit const KernelHandle kForward("cube_fwd"), kBackward("cube_bwd");

Tensor cube(Tape& tape, const Tensor& x) {
  CommandEncoder& encoder = tape.encoder();
  const Tensor in = encoder.contiguous(x);
  Tensor y = encoder.empty_like(in);
  const CubeArgs args{in.size()};
  encoder.dispatch(kForward, in.dtype(), args, {in}, {y});
  const auto backward = [](Pullback& pullback) {
    const Tensor& x = pullback.saved()[0];
    const Tensor dy = pullback.encoder().contiguous(pullback.grad());
    const Tensor dx = pullback.encoder().empty_like(x);
    pullback.encoder().dispatch(kBackward, x.dtype(), pullback.saved().args<CubeArgs>(), {x, dy},
                                {dx});
    pullback.give(0, dx);
  };
  tape.record("cube", backward, {x}, {&y}, Saved({in}, args));
  return y;
}

int main() try {
  KernelRegistry::instance().add(Backend::kCpu, "cube_fwd_f32", cube_fwd);
  KernelRegistry::instance().add(Backend::kCpu, "cube_bwd_f32", cube_bwd);
  const auto encoder = Device::cpu().make_encoder();
  float values[] = {1, 2, 3}, ones[] = {1, 1, 1};
  Tape tape(*encoder);
  const Tensor x = tape.watch(Tensor::wrap(values, {3}));
  const Tensor y = cube(tape, x);
  tape.backward(y, Tensor::wrap(ones, {3}));
  const auto dx = tape.grad(x).host<float>();
  std::printf("%g %g %g\n", dx[0], dx[1], dx[2]);
  return dx[0] == 3 && dx[1] == 12 && dx[2] == 27 ? 0 : 1;
} catch (const Error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
