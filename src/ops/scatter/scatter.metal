// Metal kernels of scatter (formula and layout: mlxtape/ops/scatter.h). A thread an element of values. Which of those that meet
// in one place is the last is found first, by the largest number, in scratch memory of y's size: an order of the writes
// themselves would leave most threads waiting. The largest of integers is the same in whatever order they come. Bound by the
// lines of y and of scratch memory that are touched. Threads of a group: 256. No threadgroup memory; about 24 registers.
#include "scatter_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/index.h"
#include "backends/metal/device/places.h"

using namespace mlxtape::ops;

constant int index_type [[function_constant(0)]];

constant constexpr uint kThreads = 256;

#define SCATTER_PLACE                                                                     \
  constant uint &first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]], \
      uint index [[thread_position_in_threadgroup]]

[[kernel, max_total_threads_per_threadgroup(256)]] void scatter_clear(
    device uint* last [[buffer(0)]], constant long& size [[buffer(1)]], SCATTER_PLACE) {
  const long i = (long(group) + first_group) * kThreads + index;
  if (i < size) last[i] = 0;
}

// Where element e of values goes, -1: nowhere; j: its number along the axis.
inline long target_of(constant ScatterArgs& args, device const uchar* indices, long e,
                      thread long& j) {
  long i;
  const long row = divide(e, args.width, i);
  const long outer = divide(row, args.count, j);
  const ulong p = place_of(indices, index_type, e, args.length);
  if (p >= ulong(args.length)) return -1;
  return (outer * args.length + long(p)) * args.width + i;
}

[[kernel, max_total_threads_per_threadgroup(256)]] void scatter_find_last(
    device const uchar* indices [[buffer(0)]], device atomic_uint* last [[buffer(1)]],
    constant ScatterArgs& args [[buffer(2)]], SCATTER_PLACE) {
  const long e = (long(group) + first_group) * kThreads + index;
  if (e >= args.outer * args.count * args.width) return;
  long j;
  const long to = target_of(args, indices, e, j);
  if (to >= 0) atomic_fetch_max_explicit(last + to, uint(j) + 1, memory_order_relaxed);
}

template <typename Unit>
[[kernel, max_total_threads_per_threadgroup(256)]] void scatter_put(
    device const uchar* indices [[buffer(0)]], device const Unit* values [[buffer(1)]],
    device const uint* last [[buffer(2)]], device Unit* y [[buffer(3)]],
    constant ScatterArgs& args [[buffer(4)]], SCATTER_PLACE) {
  const long e = (long(group) + first_group) * kThreads + index;
  if (e >= args.outer * args.count * args.width) return;
  long j;
  const long to = target_of(args, indices, e, j);
  if (to >= 0 && last[to] == uint(j) + 1) y[to] = values[e];
}

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
MAKE("scatter_put_u8", scatter_put<uchar>)
MAKE("scatter_put_u16", scatter_put<ushort>)
MAKE("scatter_put_u32", scatter_put<uint>)
MAKE("scatter_put_u64", scatter_put<ulong>)

#else

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

using metal::Launch;

constexpr std::int64_t kThreads = 256;

std::int64_t places_of(const ScatterArgs& args) { return args.outer * args.length * args.width; }

std::size_t scatter_workspace(const void* args) {
  return static_cast<std::size_t>(places_of(*static_cast<const ScatterArgs*>(args))) *
         sizeof(std::uint32_t);
}

template <class T>
void scatter_put(const KernelCall& call) {
  const auto& args = call.as<ScatterArgs>();
  const auto type = static_cast<std::int32_t>(args.index_type);
  const std::int64_t places = places_of(args);
  const std::int64_t groups = ceil_div(args.outer * args.count * args.width, kThreads);
  Launch(call, metal::kernel("scatter_clear"))
      .output(0, call.workspace)
      .bytes(1, places)
      .in_parts()
      .groups(ceil_div(places, kThreads))
      .threads(kThreads)
      .run();
  Launch(call, metal::kernel("scatter_find_last"))
      .constant(0, type)
      .input(0, call.in[0])
      .output(1, call.workspace)
      .bytes(2, args)
      .in_parts()
      .groups(groups)
      .threads(kThreads)
      .run();
  Launch(call, metal::kernel<T>("scatter_put"))
      .constant(0, type)
      .input(0, call.in[0])
      .input(1, call.in[1])
      .input(2, call.workspace)
      .output(3, call.out[0])
      .bytes(4, args)
      .in_parts()
      .groups(groups)
      .threads(kThreads)
      .run();
}

template <class T>
void add_kernel(KernelRegistry& registry) {
  registry.add(Backend::kMetal, std::string("scatter_put_") + name_of(kDType<T>), scatter_put<T>,
               scatter_workspace);
}

}  // namespace

void register_scatter_metal(KernelRegistry& registry) {
  add_kernel<std::uint8_t>(registry);
  add_kernel<std::uint16_t>(registry);
  add_kernel<std::uint32_t>(registry);
  add_kernel<std::uint64_t>(registry);
}

}  // namespace mlxtape::ops

#endif
