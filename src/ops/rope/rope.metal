// Metal kernels of rope (formula: mlxtape/ops/rope.h).
//
// A thread has one pair of channels of one token and goes through up to eight heads with its sine and cosine, or one of the
// channels that stay. Metal has no f64: turns are counted in units of 2⁻⁶⁴ of a turn, in 64-bit integers, where a multiple
// of a whole turn drops out by itself. How far a pair turns with each position the host says (kTable pairs a launch), or,
// where the periods are on the device, a long division. The angle that is left is at most an eighth of a turn. 256 threads
// a group, no threadgroup memory, some 30 registers a thread. Bound by memory from a few heads on; before, by the angle.
#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct RopePlan {
  int64_t batch, heads, tokens, cols;
  int64_t head_step, token_step;
  int64_t half_dims;  // pairs
  int64_t offset;
  int64_t first_pair;   // of this launch
  int64_t pairs, stay;  // of this launch; and channels that stay
  int64_t
      scale_bits;  // with periods: the size of scale/2π as scale_bits·2^(scale_exponent − 64), without a sign
  int32_t scale_exponent;
  int32_t offsets;  // how many: 0, 1 or batch
  int32_t traditional;
  int32_t back;  // the other way round, with periods: the table has the sign in it
};
static_assert(sizeof(RopePlan) == 112, "host and device must agree");

// Of each pair of a launch, turns for each position in units of 2⁻⁶⁴.
struct RopeTable {
  uint64_t turns[256];
};

#ifdef __METAL_VERSION__

#include "backends/metal/device/index.h"
#include "backends/metal/device/vectors.h"

constant bool has_periods [[function_constant(0)]];
constant uint heads_each [[function_constant(1)]];

struct Turn {
  float sine, cosine;
};

inline Turn turn_of(ulong turns) {
  const ulong quarter = (turns + (ulong(1) << 61)) >> 62;
  const float angle = float(long(turns - (quarter << 62))) * 3.40612158e-19f;  // 2π/2⁶⁴
  const float s = precise::sin(angle), c = precise::cos(angle);
  Turn turn;
  turn.sine = (quarter & 1) != 0 ? c : s;
  turn.cosine = (quarter & 1) != 0 ? s : c;
  if (quarter == 2 || quarter == 3) turn.sine = -turn.sine;
  if (quarter == 1 || quarter == 2) turn.cosine = -turn.cosine;
  return turn;
}

// scale/2π divided by the size of a period, in units of 2⁻⁶⁴; 0 for a period of inf.
inline ulong turns_of(constant RopePlan& plan, uint period) {
  const uint field = period >> 23 & 0xff;
  if (field == 0xff) return 0;
  const uint m = (period & 0x7fffff) | (field != 0 ? 0x800000 : 0);  // period = m·2^(e − 150)
  const int e = int(max(field, 1u));
  if (m == 0) return 0;
  const ulong scale = ulong(plan.scale_bits);
  const ulong high = scale / m;
  const ulong low = ((scale - high * m) << 40) / m;  // 40 digits more
  const int up = plan.scale_exponent - (e - 150);
  if (up >= 64) return up < 104 ? low << (up - 40) : 0;
  if (up >= 40) return (high << up) + (low << (up - 40));
  if (up >= 0) return (high << up) + (low >> (40 - up));
  return up > -64 ? high >> -up : 0;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void rope_turn(
    device const T* x [[buffer(0)]], device const int* offsets [[buffer(1)]],
    device const float* periods [[buffer(2)]], device T* y [[buffer(3)]],
    constant RopePlan& plan [[buffer(4)]], constant RopeTable& table [[buffer(5)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint index [[thread_position_in_threadgroup]]) {
  const long shares = (plan.heads + heads_each - 1) / heads_each;
  long j = 0, t = 0, share = 0;
  const long token = divide((long(group) + first_group) * 256 + index, plan.pairs + plan.stay, j);
  const long b = divide(divide(token, plan.tokens, t), shares, share);
  if (b >= plan.batch) return;
  const long first = share * heads_each;
  const uint heads = uint(min(long(plan.heads) - first, long(heads_each)));
  const long at =
      b * plan.heads * plan.tokens * plan.cols + t * plan.token_step + first * plan.head_step;
  if (j >= plan.pairs) {
    long c = at + 2 * plan.half_dims + j - plan.pairs;
    for (uint h = 0; h < heads; ++h, c += plan.head_step) y[c] = x[c];
    return;
  }
  const long pair = plan.first_pair + j;
  long position = t + plan.offset;
  if (plan.offsets != 0) position += offsets[plan.offsets == 1 ? 0 : b];
  ulong each = has_periods ? 0 : ulong(table.turns[j]);
  bool is_number = true;
  if (has_periods) {
    const uint period = as_type<uint>(periods[pair]);
    is_number = (period & 0x7fffffff) != 0 && (period & 0x7fffffff) <= 0x7f800000;
    each = turns_of(plan, period);
    if ((period >> 31 != 0) != (plan.back != 0)) each = 0 - each;
  }
  Turn turn = turn_of(ulong(position) * each);
  if (!is_number) turn.sine = turn.cosine = NAN;
  const bool neighbours = plan.traditional != 0;
  long p = at + (neighbours ? 2 * pair : pair);
  long q = neighbours ? p + 1 : p + plan.half_dims;
  for (uint h = 0; h < heads; ++h, p += plan.head_step, q += plan.head_step) {
    const float u = widen(x[p]), v = widen(x[q]);
    y[p] = narrow<T>(fma(u, turn.cosine, -(v * turn.sine)));
    y[q] = narrow<T>(fma(u, turn.sine, v * turn.cosine));
  }
}

#define MAKE(name, function) template [[host_name(name)]] [[kernel]] decltype(function) function;
MAKE("rope_turn_f32", rope_turn<float>)
MAKE("rope_turn_f16", rope_turn<half>)
MAKE("rope_turn_bf16", rope_turn<bf16>)

#else

#include <algorithm>
#include <cmath>

#include "backends/metal/launch.h"
#include "rope_args.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kThreads = 256;
constexpr std::int64_t kTable = 256;  // pairs of a launch: 2 KB of setBytes
constexpr std::uint32_t kHeads = 8;   // of a thread
constexpr double kTurn = 6.283185307179586476925;

// The fraction of a turn, in units of 2⁻⁶⁴.
std::uint64_t fraction_of(double turns) {
  const double fraction = turns - std::floor(turns);
  return fraction < 1 ? static_cast<std::uint64_t>(std::ldexp(fraction, 64)) : 0;
}

template <class T>
void rope_fwd(const KernelCall& call) {
  const auto& args = call.as<RopeArgs>();
  const bool has_periods = call.in[2] != nullptr;
  const double scale = args.scale * (args.back != 0 ? -1 : 1) / kTurn;
  RopePlan plan{};
  plan.batch = args.batch;
  plan.heads = args.heads;
  plan.tokens = args.tokens;
  plan.cols = args.cols;
  plan.head_step = args.head_step;
  plan.token_step = args.token_step;
  plan.half_dims = args.half;
  plan.offset = args.offset;
  plan.offsets = static_cast<std::int32_t>(args.offsets);
  plan.traditional = args.traditional;
  plan.back = scale < 0 ? 1 : 0;
  int exponent = 0;
  const double mantissa = std::frexp(std::abs(scale), &exponent);
  plan.scale_bits = static_cast<std::int64_t>(static_cast<std::uint64_t>(std::ldexp(mantissa, 64)));
  plan.scale_exponent = exponent;
  for (std::int64_t first = 0; first < args.half; first += kTable) {
    RopeTable table{};
    plan.first_pair = first;
    plan.pairs = std::min(kTable, args.half - first);
    plan.stay = first == 0 ? args.cols - 2 * args.half : 0;
    for (std::int64_t j = 0; j < plan.pairs && !has_periods; ++j) {
      const double share = static_cast<double>(first + j) / static_cast<double>(args.half);
      table.turns[j] = fraction_of(scale * std::exp2(-share * args.log2_base));
    }
    const std::int64_t items = args.batch * ceil_div(args.heads, std::int64_t{kHeads}) *
                               args.tokens * (plan.pairs + plan.stay);
    metal::Launch(call, metal::kernel<T>("rope_turn"))
        .constant(0, has_periods)
        .constant(1, kHeads)
        .input(0, call.in[0])
        .input(1, call.in[1])
        .input(2, call.in[2])
        .output(3, call.out[0])
        .bytes(4, plan)
        .bytes(5, table)
        .in_parts()
        .groups(ceil_div(items, kThreads))
        .threads(kThreads)
        .run();
  }
}

}  // namespace

void register_rope_metal(KernelRegistry& registry) {
  registry.add(Backend::kMetal, "rope_fwd_f32", rope_fwd<float>);
  registry.add(Backend::kMetal, "rope_fwd_f16", rope_fwd<F16>);
  registry.add(Backend::kMetal, "rope_fwd_bf16", rope_fwd<BF16>);
}

}  // namespace mlxtape::ops

#endif
