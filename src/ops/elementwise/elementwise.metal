// Metal kernels of the elementwise family (formulas: formulas.h): functions of floats, of whole numbers and of truth values,
// and comparisons. Casts and where are in elementwise_cast.metal.
//
// One kernel for each type; a formula is chosen by its number when a pipeline is made, so that the text stays short and
// what is compiled for one formula has no other in it. A thread has a pack of 16 bytes of the results where every operand
// is contiguous or one number along the last axis and rows are whole packs, or where there is but one row, whose end one
// thread does number by number; else it has one element. 256 threads a group, no threadgroup memory, up to some 50 registers
// a thread (four operands of 8 numbers). Bound by memory; the functions are the precise ones, for which the M1 has time
// while it reads.
#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// The numbers of the formulas, of which both halves make an enum after they have read the tables.
#define ELEMENTWISE_UNARY(name, ...) kForward_##name, kBackward_##name,
#define ELEMENTWISE_PLAIN(name, ...) kForward_##name,
#define ELEMENTWISE_BINARY(name, ...) kForward_##name, kBackwardA_##name, kBackwardB_##name,
#define ELEMENTWISE_NUMBERS                                                           \
  enum ElementwiseFormula {                                                           \
    MT_UNARY_FORMULAS(ELEMENTWISE_UNARY) MT_PLAIN_FORMULAS(ELEMENTWISE_PLAIN)         \
        MT_BINARY_FORMULAS(ELEMENTWISE_BINARY) MT_COMPARE_FORMULAS(ELEMENTWISE_PLAIN) \
            kForwardClip,                                                             \
    kBackwardClip,                                                                    \
    kForwardSwiglu,                                                                   \
    kBackwardSwiglu,                                                                  \
    kLogicalAnd,                                                                      \
    kLogicalOr,                                                                       \
    kLogicalNot                                                                       \
  };

// What ElementwiseArgs says, without its doubles.
struct ElementwisePlan {
  int64_t size;
  int64_t shape[8];
  int64_t strides[4][8];
  uint64_t number[4];  // of operands that are numbers: the bits of an f32, or a whole number
  uint32_t rank;
  uint32_t numbers;    // a bit for each operand that is a number
  uint32_t constants;  // and for each that is one number along the last axis
  uint32_t unused;
};
static_assert(sizeof(ElementwisePlan) == 376, "host and device must agree");

#ifdef __METAL_VERSION__

#include "backends/metal/device/functions.h"
#include "backends/metal/device/index.h"
#include "backends/metal/device/vectors.h"
#include "ops/elementwise/formulas.h"

ELEMENTWISE_NUMBERS

constant uint formula [[function_constant(0)]];
constant uint operands [[function_constant(1)]];
constant bool has_second [[function_constant(2)]];  // a second result
constant bool gives_truth [[function_constant(3)]];
constant bool in_packs [[function_constant(4)]];

// ---- floats ----

struct Number {
  float v;
  Number() = default;
  explicit Number(float value) { v = value; }
};
inline Number operator+(Number a, Number b) { return Number(a.v + b.v); }
inline Number operator-(Number a, Number b) { return Number(a.v - b.v); }
inline Number operator*(Number a, Number b) { return Number(a.v * b.v); }
inline Number operator/(Number a, Number b) { return Number(a.v / b.v); }
inline Number operator-(Number a) { return Number(-a.v); }
inline bool operator==(Number a, Number b) { return a.v == b.v; }
inline bool operator!=(Number a, Number b) { return a.v != b.v; }
inline bool operator<(Number a, Number b) { return a.v < b.v; }
inline bool operator<=(Number a, Number b) { return a.v <= b.v; }
inline bool operator>(Number a, Number b) { return a.v > b.v; }
inline bool operator>=(Number a, Number b) { return a.v >= b.v; }
inline Number select(bool t, Number yes, Number no) { return t ? yes : no; }
inline Number abs(Number x) { return Number(fabs(x.v)); }
inline Number sqrt(Number x) { return Number(precise::sqrt(x.v)); }
inline Number rsqrt(Number x) { return Number(1.0f / precise::sqrt(x.v)); }
inline Number exp(Number x) { return Number(precise::exp(x.v)); }
inline Number log(Number x) { return Number(precise::log(x.v)); }
inline Number log1p(Number x) { return Number(log_of_one_plus(x.v)); }
inline Number tanh(Number x) { return Number(precise::tanh(x.v)); }
inline Number pow(Number a, Number b) { return Number(power_of(a.v, b.v)); }
// NaN if either is; b where they are equal.
inline Number max(Number a, Number b) { return a.v != a.v || a.v > b.v ? a : b; }
inline Number min(Number a, Number b) { return a.v != a.v || a.v < b.v ? a : b; }

struct Shares {
  Number value, rest;
};
inline Shares sigmoid(Number x) {
  const Sigmoid s = sigmoid<float>(x.v);
  Shares result;
  result.value = Number(s.value);
  result.rest = Number(s.rest);
  return result;
}
struct Bell {
  Number share, density;
};
inline Bell normal(Number x) {
  const Normal n = normal_of(x.v);
  Bell result;
  result.share = Number(n.share);
  result.density = Number(n.density);
  return result;
}

inline void apply(thread const Number* in, thread Number* out) {
  typedef Number V;         // as the tables call it
  out[0] = out[1] = in[0];  // each formula has its own
  const Number first = in[0], second = in[1], third = in[2];
  switch (uint(formula)) {
#define ELEMENTWISE_CASE(name, keeps, of_x, pulled) \
  case kForward_##name: {                           \
    const Number x = first;                         \
    out[0] = of_x;                                  \
    break;                                          \
  }                                                 \
  case kBackward_##name: {                          \
    const Number g = first, x = second, y = second; \
    out[0] = pulled;                                \
    (void)x;                                        \
    (void)y;                                        \
    break;                                          \
  }
    MT_UNARY_FORMULAS(ELEMENTWISE_CASE)
#undef ELEMENTWISE_CASE
#define ELEMENTWISE_CASE(name, of_ab)   \
  case kForward_##name: {               \
    const Number a = first, b = second; \
    out[0] = of_ab;                     \
    break;                              \
  }
    MT_PLAIN_FORMULAS(ELEMENTWISE_CASE)
#undef ELEMENTWISE_CASE
#define ELEMENTWISE_CASE(name, of_ab, a_needs, of_a, b_needs, of_b) \
  case kForward_##name: {                                           \
    const Number a = first, b = second;                             \
    out[0] = of_ab;                                                 \
    break;                                                          \
  }                                                                 \
  case kBackwardA_##name: {                                         \
    const Number g = first, a = second, b = third;                  \
    out[0] = of_a;                                                  \
    (void)a;                                                        \
    (void)b;                                                        \
    break;                                                          \
  }                                                                 \
  case kBackwardB_##name: {                                         \
    const Number g = first, a = second, b = third;                  \
    out[0] = of_b;                                                  \
    (void)a;                                                        \
    (void)b;                                                        \
    break;                                                          \
  }
    MT_BINARY_FORMULAS(ELEMENTWISE_CASE)
#undef ELEMENTWISE_CASE
    case kForwardClip: out[0] = clip_value(first, second, third); break;
    case kBackwardClip: out[0] = clip_pull(first, second, third, in[3]); break;
    case kForwardSwiglu: out[0] = swiglu_value(first, second); break;
    case kBackwardSwiglu: swiglu_pull(first, second, third, out[0], out[1]); break;
    default: break;
  }
}

// ---- whole numbers, whose sums and products wrap around; truth values are bytes of 1 and 0 ----

template <typename T>
struct Whole {
  T v;
};
template <typename T>
inline T wrapped(ulong bits) {
  return T(bits);
}
template <>
inline uchar wrapped<uchar>(ulong bits) {
  return (bits & 0xff) != 0 ? 1 : 0;
}

template <typename T>
inline void apply(thread const Whole<T>* in, thread Whole<T>* out) {
  const T a = in[0].v, b = in[1].v;
  out[0] = out[1] = in[0];  // each formula has its own
  const ulong u = ulong(a), v = ulong(b);
  switch (uint(formula)) {
    case kForward_add: out[0].v = wrapped<T>(u + v); break;
    case kForward_subtract: out[0].v = wrapped<T>(u - v); break;
    case kForward_multiply: out[0].v = wrapped<T>(u * v); break;
    case kForward_maximum: out[0].v = a > b ? a : b; break;
    case kForward_minimum: out[0].v = a < b ? a : b; break;
    case kLogicalAnd: out[0].v = T(u & v); break;
    case kLogicalOr: out[0].v = T(u | v); break;
    case kLogicalNot: out[0].v = T(u ^ 1); break;
    default: break;
  }
}

template <typename V>
inline bool is_true(V left, V right) {
  const auto a = left.v;
  const auto b = right.v;
  switch (uint(formula)) {
#define ELEMENTWISE_CASE(name, truth) \
  case kForward_##name: return truth;
    MT_COMPARE_FORMULAS(ELEMENTWISE_CASE)
#undef ELEMENTWISE_CASE
    default: return false;
  }
}

// ---- elements in memory ----

template <typename T>
struct FloatStored {
  typedef Number Value;
  enum { kCount = Pack<T>::kCount };
  static inline Number read(T stored) { return Number(widen(stored)); }
  static inline Number number(ulong bits) { return Number(as_type<float>(uint(bits))); }
  static inline T written(Number v) { return narrow<T>(v.v); }
  static inline void unpack(uint4 bits, thread Number* v) {
    float f[kCount];
    Pack<T>::unpack(bits, f);
    for (int i = 0; i < kCount; ++i) v[i] = Number(f[i]);
  }
  static inline uint4 pack(thread const Number* v) {
    float f[kCount];
    for (int i = 0; i < kCount; ++i) f[i] = v[i].v;
    return Pack<T>::pack(f);
  }
};
template <typename T>
struct WholeStored {
  typedef Whole<T> Value;
  enum { kBytes = sizeof(T), kCount = 16 / kBytes, kEach = kBytes < 4 ? 4 / kBytes : 1 };
  static inline Whole<T> read(T stored) {
    Whole<T> v;
    v.v = stored;
    return v;
  }
  static inline Whole<T> number(ulong bits) { return read(T(bits)); }
  static inline T written(Whole<T> v) { return v.v; }
  static inline void unpack(uint4 bits, thread Whole<T>* v) {
    for (int i = 0; i < kCount; ++i) {
      if (kBytes == 8) {
        v[i].v = T(ulong(bits[2 * i % 4 + 1]) << 32 | bits[2 * i % 4]);
      } else {
        v[i].v = T(bits[i / kEach] >> (8 * kBytes % 32 * (i % kEach)));
      }
    }
  }
  static inline uint4 pack(thread const Whole<T>* v) {
    uint4 bits = uint4(0);
    for (int i = 0; i < kCount; ++i) {
      if (kBytes == 8) {
        bits[2 * i % 4] = uint(ulong(v[i].v));
        bits[2 * i % 4 + 1] = uint(ulong(v[i].v) >> 32);
      } else {
        bits[i / kEach] |= uint(v[i].v) << (8 * kBytes % 32 * (i % kEach));
      }
    }
    return bits;
  }
};
template <typename T>
struct Stored : WholeStored<T> {};
template <>
struct Stored<float> : FloatStored<float> {};
template <>
struct Stored<half> : FloatStored<half> {};
template <>
struct Stored<bf16> : FloatStored<bf16> {};

// kCount truth values, 2 to 16 bytes that lie at a multiple of their number.
template <int kCount>
inline void store_truth(thread const uint* bytes, device uchar* y) {
  uint word[4] = {0, 0, 0, 0};
  for (int i = 0; i < kCount; ++i) word[i / 4] |= bytes[i] << (8 * (i % 4));
  if (kCount == 16) {
    *(device uint4*)y = uint4(word[0], word[1], word[2], word[3]);
  } else if (kCount == 8) {
    *(device uint2*)y = uint2(word[0], word[1]);
  } else if (kCount == 4) {
    *(device uint*)y = word[0];
  } else {
    *(device ushort*)y = ushort(word[0]);
  }
}

// ---- the kernel ----

// The places of a result in each operand, counted over the axes before `axes`.
inline void locate(constant ElementwisePlan& plan, uint axes, long i, thread long* at) {
  for (uint k = 0; k < operands; ++k) at[k] = 0;
  for (uint axis = axes; axis-- > 0;) {
    long index = i;
    if (axis > 0) i = divide(i, plan.shape[axis], index);
    for (uint k = 0; k < operands; ++k) at[k] += index * plan.strides[k][axis];
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void elementwise_map(
    device const T* in0 [[buffer(0)]], device const T* in1 [[buffer(1)]],
    device const T* in2 [[buffer(2)]], device const T* in3 [[buffer(3)]],
    device uchar* out0 [[buffer(4)]], device uchar* out1 [[buffer(5)]],
    constant ElementwisePlan& plan [[buffer(6)]], constant uint& first_group [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]]) {
  typedef typename Stored<T>::Value Value;
  enum { kCount = Stored<T>::kCount };
  device const T* const tensors[4] = {in0, in1, in2, in3};
  const uint last = plan.rank - 1;
  const long item = (long(group) + first_group) * 256 + index;
  long first = item, end = item + 1;  // what is done one by one
  if (in_packs) {
    const long packs = plan.size / kCount;
    first = end = plan.size;
    if (item == packs) first = packs * kCount;
    if (item < packs) {
      long p = item;
      const long row = last == 0 ? 0 : divide(item, plan.shape[last] / kCount, p);
      long at[4];
      locate(plan, last, row, at);
      Value v[4][kCount];
      for (uint k = 0; k < operands; ++k) {
        if ((plan.constants >> k & 1) == 0) {
          Stored<T>::unpack(load_pack(tensors[k] + at[k] + p * kCount), v[k]);
          continue;
        }
        const Value one = (plan.numbers >> k & 1) != 0 ? Stored<T>::number(plan.number[k])
                                                       : Stored<T>::read(tensors[k][at[k]]);
        for (int i = 0; i < kCount; ++i) v[k][i] = one;
      }
      if (gives_truth) {
        uint truth[kCount];
        for (int i = 0; i < kCount; ++i) truth[i] = is_true(v[0][i], v[1][i]) ? 1 : 0;
        store_truth<kCount>(truth, out0 + item * kCount);
      } else {
        Value y[2][kCount];
        for (int i = 0; i < kCount; ++i) {
          Value in[4], out[2];
          for (uint k = 0; k < 4; ++k) in[k] = v[k < operands ? k : 0][i];
          apply(in, out);
          y[0][i] = out[0];
          if (has_second) y[1][i] = out[1];
        }
        store_pack(Stored<T>::pack(y[0]), (device T*)out0 + item * kCount);
        if (has_second) store_pack(Stored<T>::pack(y[1]), (device T*)out1 + item * kCount);
      }
    }
  }
  for (long i = first; i < metal::min(end, long(plan.size)); ++i) {
    long at[4];
    locate(plan, plan.rank, i, at);
    Value in[4], out[2];
    for (uint j = 0; j < 4; ++j) {
      const uint k = j < operands ? j : 0;
      in[j] = (plan.numbers >> k & 1) != 0 ? Stored<T>::number(plan.number[k])
                                           : Stored<T>::read(tensors[k][at[k]]);
    }
    if (gives_truth) {
      out0[i] = is_true(in[0], in[1]) ? 1 : 0;
      continue;
    }
    apply(in, out);
    ((device T*)out0)[i] = Stored<T>::written(out[0]);
    if (has_second) ((device T*)out1)[i] = Stored<T>::written(out[1]);
  }
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
MAKE("elementwise_map_f32", elementwise_map<float>)
MAKE("elementwise_map_f16", elementwise_map<half>)
MAKE("elementwise_map_bf16", elementwise_map<bf16>)
MAKE("elementwise_map_bool", elementwise_map<uchar>)
MAKE("elementwise_map_i32", elementwise_map<int>)
MAKE("elementwise_map_u32", elementwise_map<uint>)
MAKE("elementwise_map_i64", elementwise_map<long>)

#else

#include <bit>
#include <string>
#include <type_traits>

#include "backends/metal/launch.h"
#include "elementwise_args.h"

namespace mlxtape::ops {

void register_elementwise_cast_metal(KernelRegistry& registry);

namespace {

#include "ops/elementwise/formulas.h"  // the tables' names

ELEMENTWISE_NUMBERS

constexpr std::int64_t kThreads = 256;

template <class T>
constexpr bool kIsFloat =
    std::is_same_v<T, float> || std::is_same_v<T, F16> || std::is_same_v<T, BF16>;

template <class T>
std::uint64_t bits_of_number(double value) {
  if constexpr (kIsFloat<T>) {
    return std::bit_cast<std::uint32_t>(static_cast<float>(value));  // exact: it has been rounded
  } else {
    return static_cast<std::uint64_t>(static_cast<T>(value));
  }
}

// A formula's number, how many operands it has and what it gives.
struct Form {
  std::uint32_t formula, operands;
  bool has_second = false, gives_truth = false;
};

template <class T>
void map(const KernelCall& call, const Form& form) {
  constexpr std::int64_t kPack = 16 / sizeof(T);
  const auto& args = call.as<ElementwiseArgs>();
  ElementwisePlan plan{};
  plan.size = args.size;
  plan.rank = static_cast<std::uint32_t>(args.rank);
  plan.numbers = static_cast<std::uint32_t>(args.numbers);
  const std::int64_t last = args.rank - 1;
  bool flat = args.rank == 1;
  bool in_packs = args.shape[last] % kPack == 0;
  for (std::int64_t axis = 0; axis <= last; ++axis) plan.shape[axis] = args.shape[axis];
  const void* in[4] = {};
  std::size_t tensor = 0;
  for (std::uint32_t k = 0; k < form.operands; ++k) {
    if ((plan.numbers >> k & 1U) != 0) {
      plan.number[k] = bits_of_number<T>(args.value[k]);
    } else {
      in[k] = call.in[tensor++];
    }
    for (std::int64_t axis = 0; axis <= last; ++axis) {
      plan.strides[k][axis] = args.strides[k][axis];
    }
    const std::int64_t inner = args.strides[k][last];
    if (inner == 0) plan.constants |= 1U << k;
    const bool whole = inner == 0 || (inner == 1 && metal::is_aligned(in[k]));
    flat = flat && whole;
    in_packs = in_packs && whole;
    for (std::int64_t axis = 0; axis < last && inner == 1; ++axis) {
      in_packs = in_packs && args.strides[k][axis] % kPack == 0;
    }
  }
  for (const void* out : call.out) {
    flat = flat && metal::is_aligned(out);
    in_packs = in_packs && metal::is_aligned(out);
  }
  in_packs = in_packs || flat;
  metal::Launch launch(call, metal::kernel<T>("elementwise_map"));
  launch.constant(0, form.formula)
      .constant(1, form.operands)
      .constant(2, form.has_second)
      .constant(3, form.gives_truth)
      .constant(4, in_packs);
  for (std::uint32_t k = 0; k < 4; ++k) launch.input(k, in[k]);
  launch.output(4, call.out[0])
      .output(5, form.has_second ? call.out[1] : nullptr)
      .bytes(6, plan)
      .in_parts()
      .groups(ceil_div(in_packs ? args.size / kPack + 1 : args.size, kThreads))
      .threads(kThreads)
      .run();
}

template <class T, std::uint32_t kFormula, std::uint32_t kOperands, bool kSecond = false,
          bool kTruth = false>
void add(KernelRegistry& registry, const std::string& name) {
  registry.add(Backend::kMetal, name + name_of(kDType<T>), [](const KernelCall& call) {
    map<T>(call, {kFormula, kOperands, kSecond, kTruth});
  });
}

template <class T>
void add_comparisons(KernelRegistry& registry) {
#define MT_ADD(name, truth) add<T, kForward_##name, 2, false, true>(registry, #name "_fwd_");
  MT_COMPARE_FORMULAS(MT_ADD)
#undef MT_ADD
}

template <class T>
void add_floats(KernelRegistry& registry) {
#define MT_ADD(name, keeps, of_x, pulled)              \
  add<T, kForward_##name, 1>(registry, #name "_fwd_"); \
  if (name##_formula::kKeeps != 'n') add<T, kBackward_##name, 2>(registry, #name "_bwd_");
  MT_UNARY_FORMULAS(MT_ADD)
#undef MT_ADD
#define MT_ADD(name, value) add<T, kForward_##name, 2>(registry, #name "_fwd_");
  MT_PLAIN_FORMULAS(MT_ADD)
#undef MT_ADD
#define MT_ADD(name, value, a_needs, pull_a, b_needs, pull_b) \
  add<T, kForward_##name, 2>(registry, #name "_fwd_");        \
  add<T, kBackwardA_##name, 3>(registry, #name "_bwd_a_");    \
  add<T, kBackwardB_##name, 3>(registry, #name "_bwd_b_");
  MT_BINARY_FORMULAS(MT_ADD)
#undef MT_ADD
  add<T, kForwardClip, 3>(registry, "clip_fwd_");
  add<T, kBackwardClip, 4>(registry, "clip_bwd_");
  add<T, kForwardSwiglu, 2>(registry, "swiglu_fwd_");
  add<T, kBackwardSwiglu, 3, true>(registry, "swiglu_bwd_");
  add_comparisons<T>(registry);
}

template <class T>
void add_wholes(KernelRegistry& registry) {
#define MT_ADD(name, value) add<T, kForward_##name, 2>(registry, #name "_fwd_");
  MT_PLAIN_FORMULAS(MT_ADD)
#undef MT_ADD
  add<T, kForward_maximum, 2>(registry, "maximum_fwd_");
  add<T, kForward_minimum, 2>(registry, "minimum_fwd_");
  add_comparisons<T>(registry);
}

}  // namespace

void register_elementwise_metal(KernelRegistry& registry) {
  add_floats<float>(registry);
  add_floats<F16>(registry);
  add_floats<BF16>(registry);
  add_wholes<bool>(registry);
  add_wholes<std::int32_t>(registry);
  add_wholes<std::uint32_t>(registry);
  add_wholes<std::int64_t>(registry);
  add<bool, kLogicalAnd, 2>(registry, "logical_and_fwd_");
  add<bool, kLogicalOr, 2>(registry, "logical_or_fwd_");
  add<bool, kLogicalNot, 1>(registry, "logical_not_fwd_");
  register_elementwise_cast_metal(registry);
}

}  // namespace mlxtape::ops

#endif
