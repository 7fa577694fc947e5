// CUDA kernels of the elementwise family: functions of one tensor of floats, and clip.
#include "elementwise_map.cuh"

namespace mlxtape::ops {

namespace {

template <class T, class Formula>
struct UnaryForward : OfFloats<T, 1> {
  static MT_FORMULA void apply(const Number<T>* in, Number<T>* out) {
    out[0] = Formula::value(in[0]);
  }
};
template <class T>
struct ClipForward : OfFloats<T, 3> {  // x, low, high
  static MT_FORMULA void apply(const Number<T>* in, Number<T>* out) {
    out[0] = clip_value(in[0], in[1], in[2]);
  }
};

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
#define MT_ADD(name, keeps, value, pull) \
  add_kernel(registry, #name "_fwd_" + type, map<UnaryForward<T, name##_formula>>);
  MT_UNARY_FORMULAS(MT_ADD)
#undef MT_ADD
  add_kernel(registry, "clip_fwd_" + type, map<ClipForward<T>>);
}

}  // namespace

void register_elementwise_unary_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
