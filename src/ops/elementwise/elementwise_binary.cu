// CUDA kernels of the elementwise family: functions of two tensors of floats, their gradients, swiglu.
#include "elementwise_map.cuh"

namespace mlxtape::ops {

namespace {

template <class T, class Formula>
struct BinaryForward : OfFloats<T, 2> {
  static MT_FORMULA void apply(const Number<T>* in, Number<T>* out) {
    out[0] = Formula::value(in[0], in[1]);
  }
};
template <class T, class Formula>
struct BinaryBackwardA : OfFloats<T, 3> {  // dy, a, b
  static MT_FORMULA void apply(const Number<T>* in, Number<T>* out) {
    out[0] = Formula::pull_a(in[0], in[1], in[2]);
  }
};
template <class T, class Formula>
struct BinaryBackwardB : OfFloats<T, 3> {  // dy, a, b
  static MT_FORMULA void apply(const Number<T>* in, Number<T>* out) {
    out[0] = Formula::pull_b(in[0], in[1], in[2]);
  }
};
template <class T>
struct SwigluForward : OfFloats<T, 2> {
  static MT_FORMULA void apply(const Number<T>* in, Number<T>* out) {
    out[0] = swiglu_value(in[0], in[1]);
  }
};
template <class T>
struct SwigluBackward : OfFloats<T, 3, 2> {  // dy, a, b
  static MT_FORMULA void apply(const Number<T>* in, Number<T>* out) {
    swiglu_pull(in[0], in[1], in[2], out[0], out[1]);
  }
};

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
#define MT_ADD(name, value) \
  add_kernel(registry, #name "_fwd_" + type, map<BinaryForward<T, name##_formula>>);
  MT_PLAIN_FORMULAS(MT_ADD)
#undef MT_ADD
#define MT_ADD(name, value, a_needs, pull_a, b_needs, pull_b)                            \
  add_kernel(registry, #name "_fwd_" + type, map<BinaryForward<T, name##_formula>>);     \
  add_kernel(registry, #name "_bwd_a_" + type, map<BinaryBackwardA<T, name##_formula>>); \
  add_kernel(registry, #name "_bwd_b_" + type, map<BinaryBackwardB<T, name##_formula>>);
  MT_BINARY_FORMULAS(MT_ADD)
#undef MT_ADD
  add_kernel(registry, "swiglu_fwd_" + type, map<SwigluForward<T>>);
  add_kernel(registry, "swiglu_bwd_" + type, map<SwigluBackward<T>>);
}

}  // namespace

void register_elementwise_binary_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
