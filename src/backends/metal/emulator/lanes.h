// What an emulated kernel sees of the emulator: the thread that it is, the others of its threadgroup and simdgroup, and
// memory. Included by every kernel, so it includes little.
//
// Each thread of a threadgroup is a lane: a fiber with a stack of its own, which runs until it has to wait for others.
// Between two such points nothing else of its threadgroup runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <type_traits>

// Kernels of the checked build are compiled with -fsanitize=thread, which turns each of their accesses into a call
// (check.cpp). What is marked so reads the emulator's own memory and is left as it is.
#if defined(__SANITIZE_THREAD__)
#define MLXTAPE_CHECKED_KERNELS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MLXTAPE_CHECKED_KERNELS 1
#endif
#endif
#if defined(MLXTAPE_CHECKED_KERNELS) && defined(__clang__)
// Clang turns atomics into calls whatever no_sanitize says.
#define MLXTAPE_UNCHECKED __attribute__((no_sanitize("thread"), disable_sanitizer_instrumentation))
#elif defined(MLXTAPE_CHECKED_KERNELS)
#define MLXTAPE_UNCHECKED __attribute__((no_sanitize("thread")))
#else
#define MLXTAPE_CHECKED_KERNELS 0
#define MLXTAPE_UNCHECKED
#endif

namespace mlxtape::emulator {

inline constexpr unsigned kSimdWidth = 32;
inline constexpr unsigned kMaxThreads = 1024;  // of a threadgroup
inline constexpr unsigned kMaxSimdgroups = kMaxThreads / kSimdWidth;
inline constexpr unsigned kMaxBuffers = 31;
inline constexpr unsigned kMaxThreadgroupArguments = 8;
inline constexpr unsigned kMaxConstants = 64;  // function constants
inline constexpr unsigned kExchangeBytes =
    32;  // the largest value that lanes of a simdgroup exchange

struct Size3 {
  std::uint32_t x = 1, y = 1, z = 1;
};

enum class MemoryFlags : std::uint32_t { kNone = 0, kDevice = 1, kThreadgroup = 2 };

struct Simdgroup {
  // What its lanes exchange, in two turns: none can be at the next but one before all have read this one.
  alignas(64) unsigned char slots[2][kSimdWidth][kExchangeBytes];
  unsigned char result[2][kExchangeBytes];
  bool has_result[2];
  std::uint8_t turn;
  std::uint32_t size, live, waiting;  // lanes: in all, not yet ended, at an exchange
  // How many barriers of the simdgroup ordered device and threadgroup memory.
  std::uint32_t device_epoch, threadgroup_epoch;
};

struct Threadgroup;

struct alignas(64) Lane {  // a line of the cache
  void* stack_pointer;     // where it goes on
  Simdgroup* simd;
  std::uint32_t index;  // in the threadgroup
  std::uint32_t lane;   // in the simdgroup
  Size3 position;       // in the threadgroup
  std::uint32_t stack;
  enum class State : std::uint8_t { kReady, kExchange, kBarrier, kEnded } state;
  MemoryFlags flags;  // of the barrier where it waits
  const char* what;   // the function in which it waits
  std::source_location where;
};

// What arguments are made of. One for each worker thread.
struct Threadgroup {
  void* const* buffers;          // by index
  const void* const* constants;  // function constants, by index; null where not set
  unsigned char* arguments[kMaxThreadgroupArguments];  // threadgroup memory given by index
  Size3 id, size;                 // in the grid; threads, less than the usual at the grid's end
  Size3 full_size, groups, grid;  // threads of a whole one; threadgroups and threads of the grid
  std::uint32_t threads, simdgroups;
};

extern thread_local Lane* self;
extern thread_local Threadgroup* self_group;
extern thread_local std::uint64_t
    order_state;  // of the generator that draws orders; 0: nothing is drawn
extern thread_local std::uint64_t operations, functions;  // of counted kernels
extern thread_local std::uint64_t salt;  // of what arithmetic leaves open; 0: nothing is

MLXTAPE_UNCHECKED inline Lane& current() { return *self; }
MLXTAPE_UNCHECKED inline Threadgroup& current_group() { return *self_group; }
MLXTAPE_UNCHECKED inline unsigned lane_index() { return self->lane; }

constexpr std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t n = a * 0x9E3779B97F4A7C15U + b * 0xD1B54A32D192ED03U;
  n = (n ^ n >> 31) * 0xBF58476D1CE4E5B9U;
  return n ^ n >> 29;
}
// The next number drawn from state, below limit.
MLXTAPE_UNCHECKED inline std::uint32_t draw(std::uint64_t& state, std::uint32_t limit) {
  std::uint64_t n = state;
  n ^= n << 13;
  n ^= n >> 7;
  n ^= n << 17;
  state = n;
  return static_cast<std::uint32_t>(((n >> 32) * limit) >> 32);
}
// What a seed makes of a choice that the hardware has made once and for all: the same for the same question. 0: no seed.
MLXTAPE_UNCHECKED inline std::uint64_t choice(std::uint64_t question) {
  return salt == 0 ? 0 : mix(salt, question) | 1;
}
MLXTAPE_UNCHECKED inline std::uint64_t choice(const std::source_location& where) {
  return salt == 0 ? 0 : mix(salt, std::uint64_t{where.line()} << 16 ^ where.column()) | 1;
}

// What the lanes of a simdgroup gave each other.
struct Exchange {
  const unsigned char (*slots)[kExchangeBytes];  // by lane
  unsigned char* result;  // what the first to return may leave for the others
  bool* has_result;
};
Exchange wait_for_simdgroup(const char* what, std::source_location where);

// Puts a value where the other lanes of the simdgroup can read it, and waits until all have done so.
template <class T>
MLXTAPE_UNCHECKED inline Exchange exchange(const T& value, const char* what,
                                           std::source_location where) {
  static_assert(sizeof(T) <= kExchangeBytes && std::is_trivially_copyable_v<T>);
  Simdgroup& simd = *self->simd;
  __builtin_memcpy(simd.slots[simd.turn][self->lane], &value, sizeof(T));
  return wait_for_simdgroup(what, where);
}

void threadgroup_barrier(MemoryFlags flags, std::source_location where);
void simdgroup_barrier(MemoryFlags flags, std::source_location where);

// A variable in threadgroup memory, told apart by the address of key.
void* threadgroup_variable(const void* key, const char* name, std::size_t bytes, std::size_t align);

// The kernel is wrong: the dispatch ends, and its fault says this. Does not return.
[[noreturn]] void fail(const char* message);
[[noreturn]] void fail_lane(const char* what,
                            unsigned from);  // what reads a lane that there is not
[[noreturn]] void fail_constant(int index);  // read and not set
[[noreturn]] void fail_argument(const char* kind, unsigned index);  // not bound
void check_atomic(const void* address, std::size_t bytes);          // of the checked build
// Multiplications and additions of a kernel that its arithmetic does not show: matrices.
MLXTAPE_UNCHECKED void count_matrix_product();

// ---- what bound C++ is made of (bind.cpp) ----

enum class Kind : std::uint8_t {
  kBuffer,
  kThreadgroupArgument,
  kThreadPositionInGrid,
  kThreadPositionInThreadgroup,
  kThreadgroupPositionInGrid,
  kThreadIndexInThreadgroup,
  kThreadsPerThreadgroup,
  kDispatchThreadsPerThreadgroup,
  kThreadsPerGrid,
  kThreadgroupsPerGrid,
  kThreadIndexInSimdgroup,
  kSimdgroupIndexInThreadgroup,
  kSimdgroupsPerThreadgroup,
  kThreadsPerSimdgroup,
};

// Where a parameter comes from. condition: one more than the function constant without which it is not there.
struct Slot {
  Kind kind;
  std::uint8_t index = 0;
  std::uint8_t condition = 0;
};

struct Parameter {
  Slot slot;
  bool is_written;      // its pointee is not const
  std::uint32_t bytes;  // of what a reference refers to; 0: a pointer
  std::uint32_t align;  // of its pointee
};

using Entry = void (*)();
struct KernelInfo {
  const char* name;
  Entry entry;
  const Parameter* parameters;
  unsigned parameter_count;
  unsigned max_threads;  // what the kernel says with max_total_threads_per_threadgroup; 0: nothing
  bool is_checked;
};

struct ConstantInfo {
  int index;
  const char* type;  // "bool", "int", "uint", "float"
};

struct KernelFile {
  const char* name;    // "softmax"
  std::uint64_t text;  // hash of the text that it was made from
  const KernelInfo* kernels;
  unsigned kernel_count;
  const ConstantInfo* constants;
  unsigned constant_count;
};

MLXTAPE_UNCHECKED inline const void* constant_or_null(unsigned index) {
  return self_group->constants[index];
}

template <class T, class P>
constexpr T from_position(const P& p) {
  if constexpr (requires(T t) { t.z; }) {
    return T(p.x, p.y, p.z);
  } else if constexpr (requires(T t) { t.y; }) {
    return T(p.x, p.y);
  } else {
    return static_cast<T>(p.x);
  }
}

template <Kind kKind>
MLXTAPE_UNCHECKED inline Size3 position() {
  const Lane& l = *self;
  const Threadgroup& g = *self_group;
  switch (kKind) {
    case Kind::kThreadPositionInGrid:
      return {g.id.x * g.full_size.x + l.position.x, g.id.y * g.full_size.y + l.position.y,
              g.id.z * g.full_size.z + l.position.z};
    case Kind::kThreadPositionInThreadgroup: return l.position;
    case Kind::kThreadgroupPositionInGrid: return g.id;
    case Kind::kThreadIndexInThreadgroup: return {l.index, 0, 0};
    case Kind::kThreadsPerThreadgroup: return g.size;
    case Kind::kDispatchThreadsPerThreadgroup: return g.full_size;
    case Kind::kThreadsPerGrid: return g.grid;
    case Kind::kThreadgroupsPerGrid: return g.groups;
    case Kind::kThreadIndexInSimdgroup: return {l.lane, 0, 0};
    case Kind::kSimdgroupIndexInThreadgroup: return {l.index / kSimdWidth, 0, 0};
    case Kind::kSimdgroupsPerThreadgroup: return {g.simdgroups, 0, 0};
    case Kind::kThreadsPerSimdgroup: return {kSimdWidth, 0, 0};
    default: return {};
  }
}

template <class T, Slot kSlot>
MLXTAPE_UNCHECKED inline T argument() {
  if constexpr (kSlot.kind == Kind::kBuffer || kSlot.kind == Kind::kThreadgroupArgument) {
    void* at = kSlot.kind == Kind::kBuffer ? self_group->buffers[kSlot.index]
                                           : self_group->arguments[kSlot.index];
    if constexpr (std::is_reference_v<T>) {
      return *static_cast<std::remove_reference_t<T>*>(at);
    } else {
      return static_cast<T>(at);
    }
  } else {
    return from_position<std::remove_cv_t<T>>(position<kSlot.kind>());
  }
}

template <class T, Slot kSlot>
constexpr Parameter parameter() {
  if constexpr (kSlot.kind == Kind::kBuffer || kSlot.kind == Kind::kThreadgroupArgument) {
    using Pointee = std::remove_pointer_t<std::remove_reference_t<T>>;
    return {kSlot, !std::is_const_v<Pointee>,
            std::is_reference_v<T> ? std::uint32_t{sizeof(Pointee)} : 0,
            std::uint32_t{alignof(Pointee)}};
  } else {
    return {kSlot, false, 0, 1};
  }
}

template <auto kKernel, Slot... kSlots>
struct Call;
template <class... A, void (*kKernel)(A...), Slot... kSlots>
struct Call<kKernel, kSlots...> {
  static_assert(sizeof...(A) == sizeof...(kSlots));
  MLXTAPE_UNCHECKED static void run() { kKernel(argument<A, kSlots>()...); }
  static constexpr Parameter kParameters[sizeof...(A) + 1] = {parameter<A, kSlots>()..., {}};
  static constexpr KernelInfo info(const char* name, unsigned max_threads) {
    return {name, &run, kParameters, sizeof...(A), max_threads, MLXTAPE_CHECKED_KERNELS != 0};
  }
};

// threadgroup float sums[2][32]; of kernel number kSite of its file
template <class T, int kSite>
inline char variable_key;
template <class T, int kSite>
MLXTAPE_UNCHECKED T& variable(const char* name) {
  static_assert(std::is_trivially_default_constructible_v<T>);
  return *static_cast<T*>(
      threadgroup_variable(&variable_key<T, kSite>, name, sizeof(T), alignof(T)));
}

// constant bool has_weight [[function_constant(0)]];
template <class T, int kIndex>
struct FunctionConstant {
  static_assert(kIndex >= 0 && kIndex < static_cast<int>(kMaxConstants));
  MLXTAPE_UNCHECKED operator T() const {
    const void* value = constant_or_null(kIndex);
    if (value == nullptr) fail_constant(kIndex);
    return *static_cast<const T*>(value);
  }
  bool is_defined() const { return constant_or_null(kIndex) != nullptr; }
};

}  // namespace mlxtape::emulator
