// CUDA kernels of the elementwise family: comparisons, integers and truth values, where.
#include "elementwise_map.cuh"

namespace mlxtape::ops {

namespace {

// Truth values are bytes of 1 and 0; their sums are true where not 0.
template <class T>
using Stored = std::conditional_t<std::is_same_v<T, bool>, std::uint8_t, T>;

template <class T, class Formula>
struct WholeForward {
  using In = Stored<T>;
  using Out = In;
  using Result = Whole<In>;
  static constexpr int kIn = 2, kOut = 1;
  static MT_FORMULA void apply(const Whole<In>* in, Whole<In>* out) {
    const Whole<In> y = Formula::value(in[0], in[1]);
    out[0] = std::is_same_v<T, bool> ? Whole<In>(y.v != 0 ? 1 : 0) : y;
  }
};
template <class T, class Formula>
struct Compare {
  using In = Stored<T>;
  using Out = std::uint8_t;
  using Result = bool;
  static constexpr int kIn = 2, kOut = 1;
  static MT_FORMULA void apply(const ValueOf<In>* in, bool* out) {
    out[0] = Formula::value(in[0], in[1]);
  }
};

using Byte = Whole<std::uint8_t>;
template <int kOperands>
struct OfBytes {
  using In = std::uint8_t;
  using Out = std::uint8_t;
  using Result = Byte;
  static constexpr int kIn = kOperands, kOut = 1;
};
struct LogicalAnd : OfBytes<2> {
  static MT_FORMULA void apply(const Byte* in, Byte* out) {
    out[0] = Byte(static_cast<std::uint8_t>(in[0].v & in[1].v));
  }
};
struct LogicalOr : OfBytes<2> {
  static MT_FORMULA void apply(const Byte* in, Byte* out) {
    out[0] = Byte(static_cast<std::uint8_t>(in[0].v | in[1].v));
  }
};
struct LogicalNot : OfBytes<1> {
  static MT_FORMULA void apply(const Byte* in, Byte* out) {
    out[0] = Byte(static_cast<std::uint8_t>(in[0].v ^ 1U));
  }
};

// where: elements of sizeof(S) bytes, whatever they mean. kEach neighbours a thread, as vectors where each
// operand is contiguous or one number.
constexpr int kEach = 4;
template <class S>
struct Sides {
  const std::uint8_t* condition;
  const S* a;  // null: the number
  const S* b;
  S number_a, number_b;
  S* y;
};
template <class S>
struct alignas(sizeof(S) * kEach) Four {
  S v[kEach];
};

template <class S>
MT_FORMULA Four<S> four_of(const S* from, std::int64_t stride, std::int64_t at, S number) {
  if (from != nullptr && stride == 1) return *reinterpret_cast<const Four<S>*>(from + at);
  const S one = from == nullptr ? number : *from;
  return {{one, one, one, one}};
}

template <class S>
__global__ void __launch_bounds__(kThreads)
    where_kernel(const __grid_constant__ ElementwiseArgs args, bool flat, Sides<S> t) {
  cuda::wait_turn();
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (flat) {
    for (std::int64_t p = thread; p < args.size / kEach; p += step) {
      const std::int64_t at = p * kEach;
      const auto c = four_of<std::uint8_t>(t.condition, args.strides[0][0], at, 0);
      const Four<S> a = four_of(t.a, args.strides[1][0], at, t.number_a);
      const Four<S> b = four_of(t.b, args.strides[2][0], at, t.number_b);
      Four<S> y;
#pragma unroll
      for (int i = 0; i < kEach; ++i) y.v[i] = c.v[i] != 0 ? a.v[i] : b.v[i];
      *reinterpret_cast<Four<S>*>(t.y + at) = y;
    }
  }
  const std::int64_t first = flat ? args.size / kEach * kEach : 0;  // what vectors leave
  for (std::int64_t i = first + thread; i < args.size; i += step) {
    std::int64_t at[3];
    locate(args, args.rank, i, at);
    const S a = t.a == nullptr ? t.number_a : t.a[at[1]];
    const S b = t.b == nullptr ? t.number_b : t.b[at[2]];
    t.y[i] = t.condition[at[0]] != 0 ? a : b;
  }
}

template <class S>
void where_fwd(const KernelCall& call) {  // condition, a, b; of the two sides one may be a number
  const auto& args = call.as<ElementwiseArgs>();
  Sides<S> t{};
  std::size_t tensor = 0;
  t.condition = call.input<std::uint8_t>(tensor++);
  t.number_a = static_cast<S>(args.value[1]);
  t.number_b = static_cast<S>(args.value[2]);
  if ((args.numbers & 2) == 0) t.a = call.input<S>(tensor++);
  if ((args.numbers & 4) == 0) t.b = call.input<S>(tensor++);
  t.y = call.output<S>(0);
  bool flat = args.rank == 1;
  const void* const from[] = {t.condition, t.a, t.b, t.y};
  for (int k = 0; k < 4; ++k) {
    const std::int64_t inner = k == 3 ? 1 : args.strides[k][0];
    const std::size_t bytes = k == 0 ? kEach : kEach * sizeof(S);
    flat = flat &&
           (inner == 0 || (inner == 1 && reinterpret_cast<std::uintptr_t>(from[k]) % bytes == 0));
  }
  constexpr std::int64_t kMostBlocks = 64 * cuda::kMultiprocessors;
  const std::int64_t work = flat ? args.size / kEach + 1 : args.size;
  cuda::launch(where_kernel<S>, std::min(cuda::blocks_for(work, kThreads), kMostBlocks), kThreads,
               0, 1, static_cast<cudaStream_t>(call.queue), args, flat, t);
}

template <class T>
void add_comparisons(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
#define MT_ADD(name, truth) \
  add_kernel(registry, #name "_fwd_" + type, map<Compare<T, name##_formula>>);
  MT_COMPARE_FORMULAS(MT_ADD)
#undef MT_ADD
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
#define MT_ADD(name, value) \
  add_kernel(registry, #name "_fwd_" + type, map<WholeForward<T, name##_formula>>);
  MT_PLAIN_FORMULAS(MT_ADD)
#undef MT_ADD
  add_kernel(registry, "maximum_fwd_" + type, map<WholeForward<T, maximum_formula>>);
  add_kernel(registry, "minimum_fwd_" + type, map<WholeForward<T, minimum_formula>>);
  add_comparisons<T>(registry);
}

}  // namespace

void register_elementwise_whole_cuda(KernelRegistry& registry) {
  add_kernels<bool>(registry);
  add_kernels<std::int32_t>(registry);
  add_kernels<std::uint32_t>(registry);
  add_kernels<std::int64_t>(registry);
  add_comparisons<float>(registry);
  add_comparisons<F16>(registry);
  add_comparisons<BF16>(registry);
  add_kernel(registry, "logical_and_fwd_bool", map<LogicalAnd>);
  add_kernel(registry, "logical_or_fwd_bool", map<LogicalOr>);
  add_kernel(registry, "logical_not_fwd_bool", map<LogicalNot>);
  add_kernel(registry, "where_fwd_u8", where_fwd<std::uint8_t>);
  add_kernel(registry, "where_fwd_u16", where_fwd<std::uint16_t>);
  add_kernel(registry, "where_fwd_u32", where_fwd<std::uint32_t>);
  add_kernel(registry, "where_fwd_u64", where_fwd<std::uint64_t>);
}

}  // namespace mlxtape::ops
