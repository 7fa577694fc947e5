// CPU kernels of the elementwise family: integers and truth values, where, and cast. The loops are plain
// ones that the compiler turns into vectors of each instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/elementwise/elementwise_whole.cpu.cpp"
#include <hwy/foreach_target.h>

#include <array>

#include "elementwise_map-inl.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// An integer whose sums and products wrap around.
template <class T>
struct Whole {
  using Bits = std::make_unsigned_t<T>;
  T v;
  friend HWY_INLINE Whole operator+(Whole a, Whole b) {
    return {static_cast<T>(static_cast<Bits>(a.v) + static_cast<Bits>(b.v))};
  }
  friend HWY_INLINE Whole operator-(Whole a, Whole b) {
    return {static_cast<T>(static_cast<Bits>(a.v) - static_cast<Bits>(b.v))};
  }
  friend HWY_INLINE Whole operator*(Whole a, Whole b) {
    return {static_cast<T>(static_cast<Bits>(a.v) * static_cast<Bits>(b.v))};
  }
  friend HWY_INLINE bool operator==(Whole a, Whole b) { return a.v == b.v; }
  friend HWY_INLINE bool operator!=(Whole a, Whole b) { return a.v != b.v; }
  friend HWY_INLINE bool operator<(Whole a, Whole b) { return a.v < b.v; }
  friend HWY_INLINE bool operator<=(Whole a, Whole b) { return a.v <= b.v; }
  friend HWY_INLINE bool operator>(Whole a, Whole b) { return a.v > b.v; }
  friend HWY_INLINE bool operator>=(Whole a, Whole b) { return a.v >= b.v; }
  friend HWY_INLINE Whole max(Whole a, Whole b) { return a.v > b.v ? a : b; }
  friend HWY_INLINE Whole min(Whole a, Whole b) { return a.v < b.v ? a : b; }
};

// The stored type of In and Out, and what is computed with: truth values are bytes, their sums are not 0.
template <class T>
using Stored = std::conditional_t<std::is_same_v<T, bool>, std::uint8_t, T>;

template <class T, class Formula>
void whole_fwd(const KernelCall& call) {  // a, b
  using S = Stored<T>;
  S* out = call.output<S>(0);
  for_pieces(call, {2, {sizeof(S), sizeof(S)}, kDType<T>, true}, [&](const Piece& piece) HWY_ATTR {
    const S* a = static_cast<const S*>(piece.in[0]);
    const S* b = static_cast<const S*>(piece.in[1]);
    S* y = out + piece.at;
    for (std::size_t i = 0; i < piece.n; ++i) {
      const S v = Formula::value(Whole<S>{a[i]}, Whole<S>{b[i]}).v;
      y[i] = std::is_same_v<T, bool> ? v != 0 : v;
    }
  });
}

template <class T, class Formula>
void whole_compare_fwd(const KernelCall& call) {  // a, b
  using S = Stored<T>;
  auto* out = call.output<std::uint8_t>(0);
  for_pieces(call, {2, {sizeof(S), sizeof(S)}, kDType<T>, true}, [&](const Piece& piece) HWY_ATTR {
    const S* a = static_cast<const S*>(piece.in[0]);
    const S* b = static_cast<const S*>(piece.in[1]);
    std::uint8_t* y = out + piece.at;
    for (std::size_t i = 0; i < piece.n; ++i) {
      y[i] = static_cast<std::uint8_t>(Formula::value(Whole<S>{a[i]}, Whole<S>{b[i]}));
    }
  });
}

// Bytes of 1 and 0.
template <class Fn>
void logical(const KernelCall& call, int operands, const Fn& fn) {
  auto* out = call.output<std::uint8_t>(0);
  for_pieces(call, {operands, {1, 1}, DType::kBool, true}, [&](const Piece& piece) HWY_ATTR {
    const auto* a = static_cast<const std::uint8_t*>(piece.in[0]);
    const auto* b = operands == 1 ? a : static_cast<const std::uint8_t*>(piece.in[1]);
    std::uint8_t* y = out + piece.at;
    for (std::size_t i = 0; i < piece.n; ++i) y[i] = static_cast<std::uint8_t>(fn(a[i], b[i]));
  });
}
void logical_and_fwd(const KernelCall& call) {
  logical(call, 2, [](unsigned a, unsigned b) { return a & b; });
}
void logical_or_fwd(const KernelCall& call) {
  logical(call, 2, [](unsigned a, unsigned b) { return a | b; });
}
void logical_not_fwd(const KernelCall& call) {
  logical(call, 1, [](unsigned a, unsigned) { return a ^ 1U; });
}

// Elements of sizeof(S) bytes, whatever they mean.
template <class S>
void where_fwd(const KernelCall& call) {  // condition, a, b
  S* out = call.output<S>(0);
  for_pieces(call, {3, {1, sizeof(S), sizeof(S)}, kDType<S>, true},
             [&](const Piece& piece) HWY_ATTR {
               const auto* condition = static_cast<const std::uint8_t*>(piece.in[0]);
               const S* a = static_cast<const S*>(piece.in[1]);
               const S* b = static_cast<const S*>(piece.in[2]);
               S* y = out + piece.at;
               for (std::size_t i = 0; i < piece.n; ++i) {
                 const S mask = static_cast<S>(-static_cast<S>(condition[i] != 0));
                 y[i] = static_cast<S>((a[i] & mask) | (b[i] & static_cast<S>(~mask)));
               }
             });
}

// ---- cast ----

constexpr std::int64_t kCastTask = 16384;  // elements

template <class Body>
void cast_tasks(const KernelCall& call, const Body& body) {
  const std::int64_t size = call.as<CastArgs>().size;
  parallel_for(ceil_div(size, kCastTask), [&](std::int64_t task) {
    const std::int64_t first = task * kCastTask;
    body(first, static_cast<std::size_t>(std::min(kCastTask, size - first)));
  });
}

struct Types {
  DType from, to;
};

void cast_any(const KernelCall& call) {
  const auto [from, to] = *static_cast<const Types*>(call.state);
  const auto from_bytes = static_cast<std::int64_t>(size_of(from));
  const auto to_bytes = static_cast<std::int64_t>(size_of(to));
  cast_tasks(call, [&, from = from, to = to](std::int64_t first, std::size_t n) {
    convert(call.input<char>(0) + first * from_bytes, from, call.output<char>(0) + first * to_bytes,
            to, n);
  });
}

template <bool kStream, class From, class To>
HWY_INLINE void cast_piece(const From* x, To* y, std::size_t n) {
  const DF d;
  write_row<kStream>(
      d, y, n, [&](std::size_t i) HWY_ATTR { return load(d, x + i); },
      [&](std::size_t i, std::size_t count) HWY_ATTR { return load_n(d, x + i, count); });
}
template <class From, class To>
void cast_floats(const KernelCall& call) {
  const From* x = call.input<From>(0);
  To* y = call.output<To>(0);
  const bool stream =
      call.as<CastArgs>().size * static_cast<std::int64_t>(sizeof(To)) >= cpu::kStreamBytes;
  cast_tasks(call, [&](std::int64_t first, std::size_t n) {
    stream ? cast_piece<true>(x + first, y + first, n) : cast_piece<false>(x + first, y + first, n);
    if (stream) hwy::FlushStream();
  });
}

// The pairs of types that vectors convert; the others go one by one.
KernelFn cast_kernel(DType from, DType to) {
  if (from == DType::kF32 && to == DType::kF16) return cast_floats<float, F16>;
  if (from == DType::kF32 && to == DType::kBF16) return cast_floats<float, BF16>;
  if (from == DType::kF16 && to == DType::kF32) return cast_floats<F16, float>;
  if (from == DType::kF16 && to == DType::kBF16) return cast_floats<F16, BF16>;
  if (from == DType::kBF16 && to == DType::kF32) return cast_floats<BF16, float>;
  if (from == DType::kBF16 && to == DType::kF16) return cast_floats<BF16, F16>;
  return cast_any;
}

void add_casts(KernelRegistry& registry) {
  static std::array<Types, kDTypeCount * kDTypeCount> types;
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    for (std::size_t j = 0; j < kDTypeCount; ++j) {
      if (i == j) continue;
      Types& pair = types[i * kDTypeCount + j];
      pair = {static_cast<DType>(i), static_cast<DType>(j)};
      registry.add(Backend::kCpu,
                   std::string("cast_") + name_of(pair.from) + "_" + name_of(pair.to),
                   cast_kernel(pair.from, pair.to), nullptr, &pair);
    }
  }
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  const auto add = [&](const char* name, KernelFn fn) {
    registry.add(Backend::kCpu, name + type, fn);
  };
#define MT_ADD(name, value) add(#name "_fwd_", whole_fwd<T, name##_formula>);
  MT_PLAIN_FORMULAS(MT_ADD)
#undef MT_ADD
#define MT_ADD(name, truth) add(#name "_fwd_", whole_compare_fwd<T, name##_formula>);
  MT_COMPARE_FORMULAS(MT_ADD)
#undef MT_ADD
  add("maximum_fwd_", whole_fwd<T, maximum_formula>);
  add("minimum_fwd_", whole_fwd<T, minimum_formula>);
}

}  // namespace

void register_elementwise_whole(KernelRegistry& registry) {
  add_kernels<bool>(registry);
  add_kernels<std::int32_t>(registry);
  add_kernels<std::uint32_t>(registry);
  add_kernels<std::int64_t>(registry);
  registry.add(Backend::kCpu, "logical_and_fwd_bool", logical_and_fwd);
  registry.add(Backend::kCpu, "logical_or_fwd_bool", logical_or_fwd);
  registry.add(Backend::kCpu, "logical_not_fwd_bool", logical_not_fwd);
  registry.add(Backend::kCpu, "where_fwd_u8", where_fwd<std::uint8_t>);
  registry.add(Backend::kCpu, "where_fwd_u16", where_fwd<std::uint16_t>);
  registry.add(Backend::kCpu, "where_fwd_u32", where_fwd<std::uint32_t>);
  registry.add(Backend::kCpu, "where_fwd_u64", where_fwd<std::uint64_t>);
  add_casts(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(elementwise_whole)
