// Kernels that move memory (arguments: core/memory_kernels.h). Bound by memory.
//
// Bytes are written and moved 16 at a time, apart from those before the first multiple of 16 and behind the last, which
// the first group does. A strided copy is one of three: rows that are contiguous in both tensors, a piece of one to a group;
// squares through threadgroup memory, where the source is contiguous along another axis; else an element a thread.
#include "core/memory_kernels.h"

namespace mlxtape {

// bytes of a pattern, which is that of the 16 bytes from the first multiple of 16 on.
struct FillBytes {
  uint64_t bytes;
  uint64_t head;  // before the first multiple of 16
  uint32_t pattern[4];
};

struct MoveBytes {
  uint64_t bytes;
  uint64_t head;  // before the first whole unit
};

// CopyArgs for whole rows or squares: what one group does.
struct CopyTiles {
  int64_t axis;    // that the source is contiguous along; the last one for rows
  int64_t strips;  // of that axis, or pieces of a row
  int64_t across;  // groups that share the last axis
  int64_t units;   // of a row
};

}  // namespace mlxtape

#ifdef __METAL_VERSION__

#include "backends/metal/device/vectors.h"

using namespace mlxtape;

constant constexpr uint kThreads = 256;
constant constexpr uint kEach = 4;  // units of a thread

// ---- fill and move ----

[[kernel, max_total_threads_per_threadgroup(256)]] void fill_bytes(
    device uchar* to [[buffer(0)]], constant FillBytes& args [[buffer(1)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]]) {
  const long packs = long(args.bytes - args.head) / 16;
  const long first = (long(group) + first_group) * (kThreads * kEach) + index;
  const uint4 pattern = uint4(args.pattern[0], args.pattern[1], args.pattern[2], args.pattern[3]);
  device uint4* body = (device uint4*)(to + args.head);
  for (uint k = 0; k < kEach; ++k) {
    const long i = first + k * kThreads;
    if (i < packs) body[i] = pattern;
  }
  if (group + first_group != 0) return;
  const long tail = long(args.head) + packs * 16;
  // The element's size divides head, so the pattern begins anew at the start as well.
  if (index < args.head) to[index] = uchar(args.pattern[index / 4] >> (index % 4 * 8));
  if (tail + index < long(args.bytes) && index < 16) {
    to[tail + index] = uchar(args.pattern[index / 4] >> (index % 4 * 8));
  }
}

template <typename Unit>
[[kernel, max_total_threads_per_threadgroup(256)]] void move_bytes(
    device const uchar* from [[buffer(0)]], device uchar* to [[buffer(1)]],
    constant MoveBytes& args [[buffer(2)]], constant uint& first_group [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]]) {
  const long units = long(args.bytes - args.head) / long(sizeof(Unit));
  const long first = (long(group) + first_group) * (kThreads * kEach) + index;
  device const Unit* source = (device const Unit*)(from + args.head);
  device Unit* target = (device Unit*)(to + args.head);
  for (uint k = 0; k < kEach; ++k) {
    const long i = first + k * kThreads;
    if (i < units) target[i] = source[i];
  }
  if (group + first_group != 0) return;
  const long tail = long(args.head) + units * long(sizeof(Unit));
  if (index < args.head) to[index] = from[index];
  if (tail + index < long(args.bytes) && index < sizeof(Unit))
    to[tail + index] = from[tail + index];
}
#define MAKE_MOVE(name, Unit) \
  template [[host_name(name)]] [[kernel]] decltype(move_bytes<Unit>) move_bytes<Unit>;
MAKE_MOVE("move_bytes_16", uint4)
MAKE_MOVE("move_bytes_4", uint)
MAKE_MOVE("move_bytes_1", uchar)

// ---- copies between views ----

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void copy_elements(
    device const T* from [[buffer(0)]], device T* to [[buffer(1)]],
    constant CopyArgs& args [[buffer(2)]], constant long& size [[buffer(3)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]]) {
  const long first = (long(group) + first_group) * (kThreads * kEach) + index;
  for (uint k = 0; k < kEach; ++k) {
    long rest = first + k * kThreads;
    if (rest >= size) return;
    long source = 0, target = 0;
    for (int axis = int(args.rank) - 1; axis >= 0; --axis) {
      const long n = args.shape[axis];
      long place = 0;
      if (rest <= 0x7fffffff && n <= 0x7fffffff) {  // 64-bit divisions take ten times as long
        place = uint(rest) % uint(n);
        rest = uint(rest) / uint(n);
      } else {
        place = rest % n;
        rest /= n;
      }
      source += place * args.from[axis];
      target += place * args.to[axis];
    }
    to[target] = from[source];
  }
}

// Where an outer position lies in both tensors: of the axes before the last, but skip.
struct Origin {
  long from, to;
};
inline Origin origin_of(constant CopyArgs& args, int skip, long position) {
  Origin origin;
  origin.from = origin.to = 0;
  for (int axis = int(args.rank) - 2; axis >= 0; --axis) {
    if (axis == skip) continue;
    const long place = position % args.shape[axis];
    origin.from += place * args.from[axis];
    origin.to += place * args.to[axis];
    position /= args.shape[axis];
  }
  return origin;
}

// A group has one piece of one row. Unit: 16 bytes, or an element.
template <typename T, typename Unit>
[[kernel, max_total_threads_per_threadgroup(256)]] void copy_rows(
    device const T* from [[buffer(0)]], device T* to [[buffer(1)]],
    constant CopyArgs& args [[buffer(2)]], constant CopyTiles& tiles [[buffer(3)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]]) {
  const long whole = long(group) + first_group;
  const Origin origin = origin_of(args, -1, whole / tiles.strips);
  device const Unit* source = (device const Unit*)(from + origin.from);
  device Unit* target = (device Unit*)(to + origin.to);
  const long first = whole % tiles.strips * (kThreads * kEach) + index;
  for (uint k = 0; k < kEach; ++k) {
    const long i = first + k * kThreads;
    if (i < tiles.units) target[i] = source[i];
  }
}

// Squares: read along axis a, written along the last. A group has one strip of a and walks the last axis.
constant constexpr uint kTile = 32;
constant constexpr uint kTileRows = kThreads / kTile;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void copy_squares(
    device const T* from [[buffer(0)]], device T* to [[buffer(1)]],
    constant CopyArgs& args [[buffer(2)]], constant CopyTiles& tiles [[buffer(3)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]]) {
  threadgroup T square[kTile][kTile + 1];
  const int a = int(tiles.axis);
  const int b = int(args.rank) - 1;
  const long whole = long(group) + first_group;
  const long strip = whole / tiles.across;
  const Origin origin = origin_of(args, a, strip / tiles.strips);
  const long first = strip % tiles.strips * kTile;
  const uint x = index % kTile;
  const uint y = index / kTile;
  for (long c = whole % tiles.across * kTile; c < args.shape[b]; c += tiles.across * kTile) {
    for (uint j = y; j < kTile; j += kTileRows) {
      if (first + x < args.shape[a] && c + j < args.shape[b]) {
        square[j][x] = from[origin.from + first + x + (c + j) * args.from[b]];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = y; i < kTile; i += kTileRows) {
      if (first + i < args.shape[a] && c + x < args.shape[b]) {
        to[origin.to + (first + i) * args.to[a] + (c + x) * args.to[b]] = square[x][i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

#define MAKE_COPY(type, T)                                                                         \
  template                                                                                         \
      [[host_name("copy_elements_" type)]] [[kernel]] decltype(copy_elements<T>) copy_elements<T>; \
  template [[host_name("copy_rows_" type)]] [[kernel]] decltype(copy_rows<T, T>) copy_rows<T, T>;  \
  template [[host_name(                                                                            \
      "copy_packs_" type)]] [[kernel]] decltype(copy_rows<T, uint4>) copy_rows<T, uint4>;          \
  template [[host_name("copy_squares_" type)]] [[kernel]] decltype(copy_squares<T>) copy_squares<T>;
MAKE_COPY("u8", uchar)
MAKE_COPY("u16", ushort)
MAKE_COPY("u32", uint)
MAKE_COPY("u64", ulong)

// ---- sums ----

// Four neighbours a thread where both arrays allow it.
template <typename Sum, typename T, bool kFours>
[[kernel, max_total_threads_per_threadgroup(256)]] void add_into(
    device const T* x [[buffer(0)]], device Sum* sum [[buffer(1)]],
    constant AddIntoArgs& args [[buffer(2)]], constant uint& first_group [[buffer(30)]],
    uint group [[threadgroup_position_in_grid]], uint index [[thread_position_in_threadgroup]]) {
  const long whole = long(group) + first_group;
  if (kFours) {
    const long i = (whole * kThreads + index) * 4;
    if (i + 4 <= args.size) {
      store_four(load_four(sum + i) + load_four(x + i), sum + i);
      return;
    }
    for (long k = i; k < args.size; ++k) sum[k] = narrow<Sum>(widen(sum[k]) + widen(x[k]));
  } else {
    const long i = whole * kThreads + index;
    if (i < args.size) sum[i] = narrow<Sum>(widen(sum[i]) + widen(x[i]));
  }
}
#define MAKE_ADD(sum, Sum, type, T)                                                     \
  template [[host_name(                                                                 \
      "add_into_" sum                                                                   \
      "_" type)]] [[kernel]] decltype(add_into<Sum, T, false>) add_into<Sum, T, false>; \
  template                                                                              \
      [[host_name("add_into_fours_" sum                                                 \
                  "_" type)]] [[kernel]] decltype(add_into<Sum, T, true>) add_into<Sum, T, true>;
#define MAKE_ADDS(sum, Sum)        \
  MAKE_ADD(sum, Sum, "f32", float) \
  MAKE_ADD(sum, Sum, "f16", half)  \
  MAKE_ADD(sum, Sum, "bf16", bf16)
MAKE_ADDS("f32", float)
MAKE_ADDS("f16", half)
MAKE_ADDS("bf16", bf16)

#else

#include <algorithm>

#include "backends/metal/launch.h"

namespace mlxtape::metal {

namespace {

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kEach = 4;

std::uint64_t address_of(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

// The groups for so many units, one at least: the bytes outside of whole units are the first group's.
std::int64_t groups_for(std::uint64_t units) {
  return std::max<std::int64_t>(1, ceil_div(static_cast<std::int64_t>(units), kThreads * kEach));
}

void fill_with(const KernelCall& call, std::uint64_t bytes, const std::uint32_t (&pattern)[4]) {
  FillBytes args{bytes, std::min(bytes, (16 - address_of(call.out[0]) % 16) % 16), {}};
  std::copy(std::begin(pattern), std::end(pattern), args.pattern);
  Launch(call, kernel("fill_bytes"))
      .output(0, call.out[0])
      .bytes(1, args)
      .in_parts()
      .traffic(static_cast<double>(bytes))
      .groups(bytes == 0 ? 0 : groups_for((bytes - args.head) / 16))
      .threads(kThreads)
      .run();
}

void zero(const KernelCall& call) { fill_with(call, call.as<BytesArgs>().bytes, {0, 0, 0, 0}); }

template <class T>
void fill(const KernelCall& call) {
  const auto& args = call.as<FillArgs>();
  std::uint64_t bits = static_cast<T>(args.bits);
  for (unsigned size = 8 * sizeof(T); size < 64; size *= 2) bits |= bits << size;
  const auto low = static_cast<std::uint32_t>(bits), high = static_cast<std::uint32_t>(bits >> 32U);
  fill_with(call, static_cast<std::uint64_t>(args.size) * sizeof(T), {low, high, low, high});
}

void move(const KernelCall& call) {
  const std::uint64_t bytes = call.as<BytesArgs>().bytes;
  const std::uint64_t apart = address_of(call.in[0]) ^ address_of(call.out[0]);
  const std::uint64_t unit = apart % 16 == 0 ? 16 : apart % 4 == 0 ? 4 : 1;
  const MoveBytes args{bytes, std::min(bytes, (unit - address_of(call.out[0]) % unit) % unit)};
  Launch(call, kernel(unit == 16  ? "move_bytes_16"
                      : unit == 4 ? "move_bytes_4"
                                  : "move_bytes_1"))
      .input(0, call.in[0])
      .output(1, call.out[0])
      .bytes(2, args)
      .in_parts()
      .groups(bytes == 0 ? 0 : groups_for((bytes - args.head) / unit))
      .threads(kThreads)
      .run();
}

// ---- copies between views ----

// Both are contiguous along the last axis, and rows are not short.
template <class T>
bool copy_as_rows(const KernelCall& call, const CopyArgs& args, std::int64_t size) {
  const std::int64_t last = args.rank - 1;
  if (last < 0 || args.from[last] != 1 || args.to[last] != 1 || args.shape[last] < kThreads) {
    return false;
  }
  constexpr std::int64_t kPack = 16 / sizeof(T);
  bool packs = args.shape[last] % kPack == 0 && is_aligned(call.in[0]) && is_aligned(call.out[0]);
  for (std::int64_t i = 0; i < last; ++i) {
    packs = packs && args.from[i] % kPack == 0 && args.to[i] % kPack == 0;
  }
  CopyTiles tiles{last, 0, 1, packs ? args.shape[last] / kPack : args.shape[last]};
  tiles.strips = ceil_div(tiles.units, kThreads * kEach);
  Launch(call, metal::kernel<T>(packs ? "copy_packs" : "copy_rows"))
      .buffers()
      .bytes(3, tiles)
      .in_parts()
      .groups(size / args.shape[last] * tiles.strips)
      .threads(kThreads)
      .run();
  return true;
}

template <class T>
bool copy_as_squares(const KernelCall& call, const CopyArgs& args, std::int64_t size) {
  constexpr std::int64_t kTile = 32;
  constexpr std::int64_t kLeast = 8;  // shorter axes leave most of a square empty
  const std::int64_t last = args.rank - 1;
  if (last < 1 || args.from[last] == 1 || args.shape[last] < kLeast) return false;
  for (std::int64_t a = 0; a < last; ++a) {
    if (args.from[a] != 1 || args.shape[a] < kLeast) continue;
    const CopyTiles tiles{a, ceil_div(args.shape[a], kTile),
                          std::min<std::int64_t>(ceil_div(args.shape[last], kTile), 64), 0};
    Launch(call, metal::kernel<T>("copy_squares"))
        .buffers()
        .bytes(3, tiles)
        .in_parts()
        .groups(size / args.shape[a] / args.shape[last] * tiles.strips * tiles.across)
        .threads(kThreads)
        .run();
    return true;
  }
  return false;
}

template <class T>
void copy(const KernelCall& call) {
  const auto& args = call.as<CopyArgs>();
  std::int64_t size = 1;
  for (std::int64_t i = 0; i < args.rank; ++i) size *= args.shape[i];
  if (copy_as_rows<T>(call, args, size) || copy_as_squares<T>(call, args, size)) return;
  Launch(call, metal::kernel<T>("copy_elements"))
      .buffers()
      .bytes(3, size)
      .in_parts()
      .groups(ceil_div(size, kThreads * kEach))
      .threads(kThreads)
      .run();
}

// ---- sums ----

template <class Sum>
void add_into(const KernelCall& call) {
  const auto& args = call.as<AddIntoArgs>();
  const auto from = static_cast<DType>(args.from);
  const bool fours = address_of(call.in[0]) % (4 * size_of(from)) == 0 &&
                     address_of(call.out[0]) % (4 * sizeof(Sum)) == 0;
  const auto named = [&](const char* one, const char* four) {
    return KernelName{kernel("").text, fours ? four : one, name_of(from)};
  };
  const KernelName name = sizeof(Sum) == 4 ? named("add_into_f32", "add_into_fours_f32")
                          : kDType<Sum> == DType::kF16
                              ? named("add_into_f16", "add_into_fours_f16")
                              : named("add_into_bf16", "add_into_fours_bf16");
  Launch(call, name)
      .buffers()
      .in_parts()
      .groups(ceil_div(args.size, kThreads * (fours ? 4 : 1)))
      .threads(kThreads)
      .run();
}

}  // namespace

void register_memory_kernels(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "zero_u8", zero);
  registry.add(Backend::kMetal, "move_u8", move);
  registry.add(Backend::kMetal, "copy_u8", copy<std::uint8_t>);
  registry.add(Backend::kMetal, "copy_u16", copy<std::uint16_t>);
  registry.add(Backend::kMetal, "copy_u32", copy<std::uint32_t>);
  registry.add(Backend::kMetal, "copy_u64", copy<std::uint64_t>);
  registry.add(Backend::kMetal, "fill_u8", fill<std::uint8_t>);
  registry.add(Backend::kMetal, "fill_u16", fill<std::uint16_t>);
  registry.add(Backend::kMetal, "fill_u32", fill<std::uint32_t>);
  registry.add(Backend::kMetal, "fill_u64", fill<std::uint64_t>);
  registry.add(Backend::kMetal, "add_into_f32", add_into<float>);
  registry.add(Backend::kMetal, "add_into_f16", add_into<F16>);
  registry.add(Backend::kMetal, "add_into_bf16", add_into<BF16>);
}

}  // namespace mlxtape::metal

#endif
