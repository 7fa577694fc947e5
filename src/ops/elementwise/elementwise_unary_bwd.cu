// CUDA kernels of the elementwise family: gradients of functions of one tensor.
#include "elementwise_map.cuh"

namespace mlxtape::ops {

namespace {

template <class T, class Formula>
struct UnaryBackward : OfFloats<T, 2> {  // dy, what is kept
  static MT_FORMULA void apply(const Number<T>* in, Number<T>* out) {
    out[0] = Formula::pull(in[0], in[1]);
  }
};
template <class T>
struct ClipBackward : OfFloats<T, 4> {  // dy, x, low, high
  static MT_FORMULA void apply(const Number<T>* in, Number<T>* out) {
    out[0] = clip_pull(in[0], in[1], in[2], in[3]);
  }
};

template <class T, class Formula>
void add_unary(KernelRegistry& registry, const std::string& name) {
  if constexpr (Formula::kKeeps != 'n') add_kernel(registry, name, map<UnaryBackward<T, Formula>>);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
#define MT_ADD(name, keeps, value, pull) \
  add_unary<T, name##_formula>(registry, #name "_bwd_" + type);
  MT_UNARY_FORMULAS(MT_ADD)
#undef MT_ADD
  add_kernel(registry, "clip_bwd_" + type, map<ClipBackward<T>>);
}

}  // namespace

void register_elementwise_unary_bwd_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
