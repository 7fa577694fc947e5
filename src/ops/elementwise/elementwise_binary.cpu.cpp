// CPU kernels of the elementwise family: functions of two tensors of floats, comparisons of them, swiglu.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/elementwise/elementwise_binary.cpu.cpp"
#include <hwy/foreach_target.h>

#include "elementwise_map-inl.h"
#include "mlxtape/core/registry.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

template <class T, class Formula>
void binary_fwd(const KernelCall& call) {  // a, b
  map<T, 2>(call, [](Number<T> a, Number<T> b) HWY_ATTR { return Formula::value(a, b); });
}
template <class T, class Formula>
void binary_bwd_a(const KernelCall& call) {  // dy, a, b
  map<T, 3>(call, [](Number<T> g, Number<T> a, Number<T> b)
                      HWY_ATTR { return Formula::pull_a(g, a, b); });
}
template <class T, class Formula>
void binary_bwd_b(const KernelCall& call) {  // dy, a, b
  map<T, 3>(call, [](Number<T> g, Number<T> a, Number<T> b)
                      HWY_ATTR { return Formula::pull_b(g, a, b); });
}
template <class T>
void swiglu_fwd(const KernelCall& call) {  // a, b
  map<T, 2>(call, [](Number<T> a, Number<T> b) HWY_ATTR { return swiglu_value(a, b); });
}

// Two results in one pass. Written past the cache only if both begin lines at the same elements.
template <bool kStream, class T>
void swiglu_pull_piece(const Piece& piece, T* da, T* db) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  const Inputs<T, 3> inputs(piece);
  da += piece.at;
  db += piece.at;
  std::size_t i = 0;
  const auto some = [&](std::size_t end) HWY_ATTR {
    while (i < end) {
      const std::size_t count = std::min(lanes, end - i);
      VF v[3];
      inputs.part(d, i, count, v);
      Number<T> a, b;
      swiglu_pull(Number<T>(v[0]), Number<T>(v[1]), Number<T>(v[2]), a, b);
      store_n(d, a.v, da + i, count);
      store_n(d, b.v, db + i, count);
      i += count;
    }
  };
  if constexpr (kStream) some(before_line(da, piece.n));
  for (; i + 2 * lanes <= piece.n; i += 2 * lanes) {
    VF u[3], v[3];
    inputs.pair(d, i, u, v);
    Number<T> a0, a1, b0, b1;
    swiglu_pull(Number<T>(u[0]), Number<T>(u[1]), Number<T>(u[2]), a0, b0);
    swiglu_pull(Number<T>(v[0]), Number<T>(v[1]), Number<T>(v[2]), a1, b1);
    store_pair<kStream>(d, a0.v, a1.v, da + i);
    store_pair<kStream>(d, b0.v, b1.v, db + i);
  }
  some(piece.n);
}

template <class T>
void swiglu_bwd(const KernelCall& call) {  // dy, a, b
  T* da = call.output<T>(0);
  T* db = call.output<T>(1);
  const bool stream = streams(call, sizeof(T)) && reinterpret_cast<std::uintptr_t>(da) % 64 ==
                                                      reinterpret_cast<std::uintptr_t>(db) % 64;
  for_pieces(call, {3, {sizeof(T), sizeof(T), sizeof(T)}, kDType<T>, false, stream},
             [&](const Piece& piece) HWY_ATTR {
               stream ? swiglu_pull_piece<true>(piece, da, db)
                      : swiglu_pull_piece<false>(piece, da, db);
             });
}

// As bytes of 1 and 0, one for each of count lanes.
HWY_INLINE void store_truth(DF d, Truth t, std::uint8_t* p, std::size_t count) {
#if HWY_TARGET == HWY_AVX3
  const __m128i bytes = _mm_maskz_set1_epi8(static_cast<__mmask16>(t.m.raw), 1);
  _mm_mask_storeu_epi8(p, static_cast<__mmask16>((1U << count) - 1), bytes);
#else
  const hn::Rebind<std::uint8_t, DF> d8;
  const auto ones = hn::And(hn::BitCast(DI(), hn::VecFromMask(d, t.m)), hn::Set(DI(), 1));
  const auto bytes = hn::DemoteTo(d8, ones);
  if (count == hn::Lanes(d)) return hn::StoreU(bytes, d8, p);
  HWY_ALIGN std::uint8_t room[hn::MaxLanes(DF())];
  hn::StoreU(bytes, d8, room);
  std::memcpy(p, room, count);
#endif
}

template <class T, class Formula>
void compare_fwd(const KernelCall& call) {  // a, b
  auto* out = call.output<std::uint8_t>(0);
  for_pieces(call, {2, {sizeof(T), sizeof(T)}, kDType<T>}, [&](const Piece& piece) HWY_ATTR {
    const DF d;
    const Inputs<T, 2> inputs(piece);
    for_row(
        d, piece.n,
        [&](std::size_t i) HWY_ATTR {
          const Number<T> a(load(d, inputs.in[0] + i * inputs.step[0]));
          const Number<T> b(load(d, inputs.in[1] + i * inputs.step[1]));
          store_truth(d, Formula::value(a, b), out + piece.at + i, hn::Lanes(d));
        },
        [&](std::size_t i, std::size_t count) HWY_ATTR {
          VF v[2];
          inputs.part(d, i, count, v);
          store_truth(d, Formula::value(Number<T>(v[0]), Number<T>(v[1])), out + piece.at + i,
                      count);
        });
  });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  const auto add = [&](const char* name, KernelFn fn) {
    registry.add(Backend::kCpu, name + type, fn);
  };
#define MT_ADD(name, value) add(#name "_fwd_", binary_fwd<T, name##_formula>);
  MT_PLAIN_FORMULAS(MT_ADD)
#undef MT_ADD
#define MT_ADD(name, value, a_needs, pull_a, b_needs, pull_b) \
  add(#name "_fwd_", binary_fwd<T, name##_formula>);          \
  add(#name "_bwd_a_", binary_bwd_a<T, name##_formula>);      \
  add(#name "_bwd_b_", binary_bwd_b<T, name##_formula>);
  MT_BINARY_FORMULAS(MT_ADD)
#undef MT_ADD
#define MT_ADD(name, truth) add(#name "_fwd_", compare_fwd<T, name##_formula>);
  MT_COMPARE_FORMULAS(MT_ADD)
#undef MT_ADD
  add("swiglu_fwd_", swiglu_fwd<T>);
  add("swiglu_bwd_", swiglu_bwd<T>);
}

}  // namespace

void register_elementwise_binary(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(elementwise_binary)
