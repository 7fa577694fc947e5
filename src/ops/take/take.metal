// Metal kernels of take (formula and layout: mlxtape/ops/take.h). A thread moves four times 16 bytes of rows, or four elements
// where rows are not whole 16 bytes, 256 apart so that neighbours are beside each other. Bound by memory. Threads of a group:
// 256. No threadgroup memory; about 30 registers.
#include "take_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/index.h"
#include "backends/metal/device/places.h"

using namespace mlxtape::ops;

constant int index_type [[function_constant(0)]];

constant constexpr uint kThreads = 256;
constant constexpr uint kEach = 4;

// Unit: what is moved at once; width and strides count it.
template <typename Unit>
[[kernel, max_total_threads_per_threadgroup(256)]] void take_fwd(
    device const Unit* x [[buffer(0)]], device const uchar* indices [[buffer(1)]],
    device Unit* y [[buffer(2)]], constant TakeArgs& args [[buffer(3)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]]) {
  const long first = (long(group) + first_group) * (kThreads * kEach) + index;
  const long size = args.outer * args.count * args.width;
  for (uint k = 0; k < kEach; ++k) {
    const long e = first + k * kThreads;
    if (e >= size) break;
    long i, j;
    const long row = divide(e, args.width, i);
    const long outer = divide(row, args.count, j);
    const ulong p = place_of(indices, index_type, j, args.length);
    Unit v = Unit(0);
    if (p < ulong(args.length)) v = x[outer * args.outer_stride + long(p) * args.axis_stride + i];
    y[e] = v;
  }
}

struct IndexTensors {
  device const uchar* at[kTakeMostAxes];
};

[[kernel, max_total_threads_per_threadgroup(256)]] void take_places(
    constant IndexTensors& in [[buffer(0)]], device long* places [[buffer(1)]],
    constant TakePlacesArgs& args [[buffer(2)]], constant uint& first_group [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]]) {
  const long i = (long(group) + first_group) * kThreads + index;
  if (i >= args.count) return;
  long place = 0;
  for (int k = 0; k < int(args.axes); ++k) {
    const long length = args.lengths[k];
    const ulong p = place_of(in.at[k], int(args.index_types[k]), i, length);
    const bool outside = p >= ulong(length) || place == kTakeNowhere;
    place = outside ? kTakeNowhere : place * length + long(p);
  }
  places[i] = place;
}

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
MAKE("take_fwd_u8", take_fwd<uchar>)
MAKE("take_fwd_u16", take_fwd<ushort>)
MAKE("take_fwd_u32", take_fwd<uint>)
MAKE("take_fwd_u64", take_fwd<ulong>)
MAKE("take_fwd_packs", take_fwd<uint4>)

#else

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kEach = 4;

template <class T>
void take_fwd(const KernelCall& call) {
  TakeArgs args = call.as<TakeArgs>();
  constexpr std::int64_t kPack = 16 / static_cast<std::int64_t>(sizeof(T));
  if (args.outer == 1) args.outer_stride = 0;  // nobody steps along it
  const bool packs = args.width % kPack == 0 && args.outer_stride % kPack == 0 &&
                     args.axis_stride % kPack == 0 && metal::is_aligned(call.in[0]) &&
                     metal::is_aligned(call.out[0]);
  if (packs) {
    args.width /= kPack;
    args.outer_stride /= kPack;
    args.axis_stride /= kPack;
  }
  metal::Launch(call, packs ? metal::kernel("take_fwd_packs") : metal::kernel<T>("take_fwd"))
      .constant(0, static_cast<std::int32_t>(args.index_type))
      .input(0, call.in[0])
      .input(1, call.in[1])
      .output(2, call.out[0])
      .bytes(3, args)
      .in_parts()
      .groups(ceil_div(args.outer * args.count * args.width, kThreads * kEach))
      .threads(kThreads)
      .run();
}

void take_places(const KernelCall& call) {
  const auto& args = call.as<TakePlacesArgs>();
  metal::Launch(call, metal::kernel("take_places"))
      .table(0, kTakeMostAxes, call.in, {})
      .output(1, call.out[0])
      .bytes(2, args)
      .in_parts()
      .groups(ceil_div(args.count, kThreads))
      .threads(kThreads)
      .run();
}

}  // namespace

void register_take_metal(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "take_fwd_u8", take_fwd<std::uint8_t>);
  registry.add(Backend::kMetal, "take_fwd_u16", take_fwd<std::uint16_t>);
  registry.add(Backend::kMetal, "take_fwd_u32", take_fwd<std::uint32_t>);
  registry.add(Backend::kMetal, "take_fwd_u64", take_fwd<std::uint64_t>);
  registry.add(Backend::kMetal, "take_places_i64", take_places);
}

}  // namespace mlxtape::ops

#endif
