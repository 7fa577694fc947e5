// Metal kernels of the elementwise family: casts between all types but f64, and where.
//
// Casts: one kernel, which learns both types when its pipeline is made. A thread has four elements: neighbours that are
// read and written together where both types are floats and the addresses allow it, else elements 256 apart, so that
// neighbouring lanes have neighbouring elements. where: by the size of the elements, four neighbours a thread where every
// operand is contiguous or one number, else one element. 256 threads a group, no threadgroup memory, some 20 registers a
// thread. Bound by memory.
#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// What ElementwiseArgs says of condition, a and b, without its doubles.
struct WherePlan {
  int64_t size;
  int64_t shape[8];
  int64_t strides[3][8];
  uint64_t
      number[2];  // a's and b's where they are numbers: bits of which the element's size counts
  uint32_t rank;
  uint32_t numbers;  // 2: a is a number, 4: b is
};
static_assert(sizeof(WherePlan) == 288, "host and device must agree");

#ifdef __METAL_VERSION__

#include "backends/metal/device/index.h"
#include "backends/metal/device/types.h"
#include "backends/metal/device/vectors.h"

constant uint from_type [[function_constant(0)]];  // StoredType
constant uint to_type [[function_constant(1)]];
constant bool in_fours [[function_constant(2)]];

// ---- casts ----

// An element: of floats f, of whole numbers the bits, as many as the widest has, the sign repeated.
struct Element {
  float f;
  ulong bits;
};

inline Element element_at(device const uchar* x, long i) {
  Element e;
  e.f = 0;
  e.bits = 0;
  switch (uint(from_type)) {
    case kStoredBool:
    case kStoredU8: e.bits = x[i]; break;
    case kStoredU16: e.bits = ((device const ushort*)x)[i]; break;
    case kStoredU32: e.bits = ((device const uint*)x)[i]; break;
    case kStoredU64: e.bits = ((device const ulong*)x)[i]; break;
    case kStoredI8: e.bits = ulong(long(((device const int8_t*)x)[i])); break;
    case kStoredI16: e.bits = ulong(long(((device const short*)x)[i])); break;
    case kStoredI32: e.bits = ulong(long(((device const int*)x)[i])); break;
    case kStoredI64: e.bits = ulong(((device const long*)x)[i]); break;
    case kStoredF16: e.f = widen(((device const half*)x)[i]); break;
    case kStoredBF16: e.f = widen(((device const bf16*)x)[i]); break;
    default: e.f = ((device const float*)x)[i]; break;
  }
  return e;
}

inline bool is_float_type(uint type) { return type >= kStoredF16; }
inline bool is_signed_type(uint type) { return type >= kStoredI8 && type <= kStoredI64; }

// The bits of a float as a whole number of so many digits: cut off and clamped, NaN is 0.
inline ulong whole_of(float v, uint digits, bool is_signed) {
  const float end = as_type<float>((127u + digits) << 23);
  const ulong most = digits == 64 ? ~ulong(0) : (ulong(1) << (digits % 64)) - 1;
  if (v != v) return 0;
  if (v >= end) return most;
  if (v <= (is_signed ? -end : 0.0f)) return is_signed ? ~most : 0;
  return is_signed ? ulong(long(v)) : ulong(v);
}

// The nearest f32; for 16 bits, which are rounded again, one that is odd where it is not exact, so that there is one
// rounding in effect.
inline float float_of_whole(ulong bits) {
  const bool is_negative = is_signed_type(from_type) && long(bits) < 0;
  if (to_type == kStoredF32) return is_negative ? float(long(bits)) : float(bits);
  ulong size = is_negative ? ~bits + 1 : bits;
  const int excess = size == 0 ? 0 : 40 - int(clz(size));  // bits beyond 24
  float v = 1.0f;
  if (excess > 0) {
    const bool is_cut = (size & ((ulong(1) << excess) - 1)) != 0;
    size = size >> excess | (is_cut ? 1 : 0);
    v = as_type<float>(uint(127 + excess) << 23);
  }
  v *= float(size);
  return is_negative ? -v : v;
}

inline void store_element(Element e, device uchar* y, long i) {
  const bool from_float = is_float_type(from_type);
  if (is_float_type(to_type)) {
    const float v = from_float ? e.f : float_of_whole(e.bits);
    if (to_type == kStoredF16) {
      ((device half*)y)[i] = narrow<half>(v);
    } else if (to_type == kStoredBF16) {
      ((device bf16*)y)[i] = narrow<bf16>(v);
    } else {
      ((device float*)y)[i] = v;
    }
    return;
  }
  ulong bits = e.bits;
  uint size = 1;
  switch (uint(to_type)) {
    case kStoredU16:
    case kStoredI16: size = 2; break;
    case kStoredU32:
    case kStoredI32: size = 4; break;
    case kStoredU64:
    case kStoredI64: size = 8; break;
    default: break;
  }
  if (to_type == kStoredBool) {
    bits = from_float ? (e.f != 0 ? 1 : 0) : (bits != 0 ? 1 : 0);
  } else if (from_float) {
    const bool is_signed = is_signed_type(to_type);
    bits = whole_of(e.f, 8 * size - (is_signed ? 1 : 0), is_signed);
  }
  if (size == 1) {
    y[i] = uchar(bits);
  } else if (size == 2) {
    ((device ushort*)y)[i] = ushort(bits);
  } else if (size == 4) {
    ((device uint*)y)[i] = uint(bits);
  } else {
    ((device ulong*)y)[i] = bits;
  }
}

inline float4 four_at(device const uchar* x, long i) {
  if (from_type == kStoredF16) return load_four((device const half*)x + i);
  if (from_type == kStoredBF16) return load_four((device const bf16*)x + i);
  return load_four((device const float*)x + i);
}
inline void store_four_at(float4 v, device uchar* y, long i) {
  if (to_type == kStoredF16) {
    store_four(v, (device half*)y + i);
  } else if (to_type == kStoredBF16) {
    store_four(v, (device bf16*)y + i);
  } else {
    store_four(v, (device float*)y + i);
  }
}

[[kernel, max_total_threads_per_threadgroup(256)]] void elementwise_cast(
    device const uchar* x [[buffer(0)]], device uchar* y [[buffer(1)]],
    constant int64_t& size [[buffer(2)]], constant uint& first_group [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]]) {
  const long start = (long(group) + first_group) * 1024;
  if (in_fours && start + 1024 <= size) {
    const long i = start + 4 * index;
    store_four_at(four_at(x, i), y, i);
  } else {
    for (long i = start + index; i < min(start + 1024, long(size)); i += 256) {
      store_element(element_at(x, i), y, i);
    }
  }
}

// ---- where ----

template <typename S>
inline vec<S, 4> four_of(device const S* from, long stride, long i, bool is_number, ulong number) {
  if (is_number) return vec<S, 4>(S(number));
  if (stride == 0) return vec<S, 4>(from[0]);
  return *(device const vec<S, 4>*)(from + i);
}

template <typename S>
[[kernel, max_total_threads_per_threadgroup(256)]] void elementwise_where(
    device const uchar* condition [[buffer(0)]], device const S* a [[buffer(1)]],
    device const S* b [[buffer(2)]], device S* y [[buffer(3)]],
    constant WherePlan& plan [[buffer(4)]], constant uint& first_group [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]]) {
  const long item = (long(group) + first_group) * 256 + index;
  const bool a_is_number = (plan.numbers & 2) != 0, b_is_number = (plan.numbers & 4) != 0;
  long first = item, end = min(item + 1, long(plan.size));
  if (in_fours) {
    first = 4 * item;
    end = min(first + 4, long(plan.size));
    if (first + 4 <= plan.size) {
      const vec<uchar, 4> c = four_of(condition, plan.strides[0][0], first, false, 0);
      const vec<S, 4> u = four_of(a, plan.strides[1][0], first, a_is_number, plan.number[0]);
      const vec<S, 4> v = four_of(b, plan.strides[2][0], first, b_is_number, plan.number[1]);
      vec<S, 4> chosen;
      for (int i = 0; i < 4; ++i) chosen[i] = c[i] != 0 ? u[i] : v[i];
      *(device vec<S, 4>*)(y + first) = chosen;
      first = end;
    }
  }
  for (long i = first; i < end; ++i) {
    long at[3] = {0, 0, 0};
    long rest = i;
    for (uint axis = plan.rank; axis-- > 0;) {
      long place = rest;
      if (axis > 0) rest = divide(rest, plan.shape[axis], place);
      for (uint k = 0; k < 3; ++k) at[k] += place * plan.strides[k][axis];
    }
    const S u = a_is_number ? S(plan.number[0]) : a[at[1]];
    const S v = b_is_number ? S(plan.number[1]) : b[at[2]];
    y[i] = condition[at[0]] != 0 ? u : v;
  }
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
MAKE("elementwise_where_u8", elementwise_where<uchar>)
MAKE("elementwise_where_u16", elementwise_where<ushort>)
MAKE("elementwise_where_u32", elementwise_where<uint>)
MAKE("elementwise_where_u64", elementwise_where<ulong>)

#else

#include <string>
#include <type_traits>

#include "backends/metal/device/types.h"
#include "backends/metal/launch.h"
#include "elementwise_args.h"

namespace mlxtape::ops {

namespace {

static_assert(static_cast<int>(DType::kBool) == kStoredBool &&
                  static_cast<int>(DType::kI8) == kStoredI8 &&
                  static_cast<int>(DType::kF16) == kStoredF16 &&
                  static_cast<int>(DType::kF32) == kStoredF32,
              "the kernels read a DType's number");

constexpr std::int64_t kThreads = 256;

template <DType kFrom, DType kTo>
void cast(const KernelCall& call) {
  const std::int64_t size = call.as<CastArgs>().size;
  const bool in_fours = kFrom >= DType::kF16 && kTo >= DType::kF16 &&
                        metal::is_aligned(call.in[0]) && metal::is_aligned(call.out[0]);
  metal::Launch(call, metal::kernel("elementwise_cast"))
      .constant(0, static_cast<std::uint32_t>(kFrom))
      .constant(1, static_cast<std::uint32_t>(kTo))
      .constant(2, in_fours)
      .input(0, call.in[0])
      .output(1, call.out[0])
      .bytes(2, size)
      .in_parts()
      .groups(ceil_div(size, 4 * kThreads))
      .threads(kThreads)
      .run();
}

template <class S>
void where(const KernelCall& call) {  // condition, a, b; of the two sides one may be a number
  const auto& args = call.as<ElementwiseArgs>();
  WherePlan plan{};
  plan.size = args.size;
  plan.rank = static_cast<std::uint32_t>(args.rank);
  plan.numbers = static_cast<std::uint32_t>(args.numbers);
  const void* in[3] = {};
  std::size_t tensor = 0;
  bool in_fours =
      args.rank == 1 && reinterpret_cast<std::uintptr_t>(call.out[0]) % (4 * sizeof(S)) == 0;
  for (std::uint32_t k = 0; k < 3; ++k) {
    if ((plan.numbers >> k & 1U) != 0) {
      plan.number[k - 1] = static_cast<std::uint64_t>(static_cast<S>(args.value[k]));
    } else {
      in[k] = call.in[tensor++];
    }
    for (std::int64_t axis = 0; axis < args.rank; ++axis) {
      plan.shape[axis] = args.shape[axis];
      plan.strides[k][axis] = args.strides[k][axis];
    }
    const std::int64_t inner = args.strides[k][0];
    const std::uintptr_t bytes = k == 0 ? 4 : 4 * sizeof(S);
    in_fours = in_fours &&
               (inner == 0 || (inner == 1 && reinterpret_cast<std::uintptr_t>(in[k]) % bytes == 0));
  }
  metal::Launch(call, metal::kernel<S>("elementwise_where"))
      .constant(2, in_fours)
      .input(0, in[0])
      .input(1, in[1])
      .input(2, in[2])
      .output(3, call.out[0])
      .bytes(4, plan)
      .in_parts()
      .groups(ceil_div(ceil_div(args.size, in_fours ? 4 : 1), kThreads))
      .threads(kThreads)
      .run();
}

template <DType... kTypes>
struct List {};
template <DType kFrom, DType kTo>
void add_cast(KernelRegistry& registry) {
  if constexpr (kFrom != kTo) {
    registry.add(Backend::kMetal, std::string("cast_") + name_of(kFrom) + "_" + name_of(kTo),
                 cast<kFrom, kTo>);
  }
}
template <DType kFrom, DType... kTo>
void add_from(KernelRegistry& registry, List<kTo...>) {
  (add_cast<kFrom, kTo>(registry), ...);
}
template <DType... kFrom>
void add_all(KernelRegistry& registry, List<kFrom...> types) {
  (add_from<kFrom>(registry, types), ...);
}

}  // namespace

void register_elementwise_cast_metal(KernelRegistry& registry) {
  add_all(registry,
          List<DType::kBool, DType::kU8, DType::kU16, DType::kU32, DType::kU64, DType::kI8,
               DType::kI16, DType::kI32, DType::kI64, DType::kF16, DType::kBF16, DType::kF32>());
  registry.add(Backend::kMetal, "where_fwd_u8", where<std::uint8_t>);
  registry.add(Backend::kMetal, "where_fwd_u16", where<std::uint16_t>);
  registry.add(Backend::kMetal, "where_fwd_u32", where<std::uint32_t>);
  registry.add(Backend::kMetal, "where_fwd_u64", where<std::uint64_t>);
}

}  // namespace mlxtape::ops

#endif
