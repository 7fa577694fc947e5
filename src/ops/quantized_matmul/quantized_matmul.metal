// Metal kernels of quantized_matmul (formula: mlxtape/ops/quantized_matmul.h).
//
// Up to 8 rows of x: a simdgroup has four rows of the weights, and its lanes go along them, 16 or 32 codes at a time
// (backends/metal/device/quantized.h). Two simdgroups a group, which do not meet; with 8 rows of x 32 sums, 32 codes as floats and
// 16 words of codes a thread, about 100 registers. Bound by reading the codes for one row of x; with 8 by arithmetic. More
// rows, and gradients, are products with weights that the host has dequantised.
#include "quantized_matmul_args.h"

#ifdef __METAL_VERSION__

#include "backends/metal/device/quantized.h"

using namespace mlxtape::ops;

constant bool packs [[function_constant(0)]];  // rows of x begin at multiples of 16 bytes

template <typename T, int kBits, int kFew>
[[kernel, max_total_threads_per_threadgroup(64)]] void quantized_matmul_few(
    device const T* x [[buffer(0)]], device const uint* codes [[buffer(1)]],
    device const uchar* scales [[buffer(2)]], device const uchar* biases [[buffer(3)]],
    device T* y [[buffer(4)]], constant QuantizedMatmulArgs& args [[buffer(5)]],
    constant uint& first_group [[buffer(30)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  enum { kRows = 4 };
  const long first = ((long(group) + first_group) * 2 + simd) * kRows;
  Quantized w;
  w.codes = codes;
  w.scales = scales;
  w.biases = biases;
  w.k = uint(args.k);
  w.group_shift = args.group == 32 ? 5 : args.group == 64 ? 6 : 7;
  w.wide = args.wide != 0;
  QuantizedSums<kRows, kFew> sums;
  quantized_products<T, kBits>(w, first, args.n, x, args.k, uint(args.m), packs, lane, sums);
  const float mine = quantized_sum(sums, lane);
  const long row = first + lane / kFew;
  const uint m = lane % kFew;
  if (lane < uint(kRows * kFew) && row < args.n && m < args.m) {
    y[m * args.n + row] = narrow<T>(mine);
  }
}

#define MAKE(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MAKE_FEW(bits, type, T)                                                \
  MAKE("quantized_matmul_" #bits "_1_" type, quantized_matmul_few<T, bits, 1>) \
  MAKE("quantized_matmul_" #bits "_4_" type, quantized_matmul_few<T, bits, 4>) \
  MAKE("quantized_matmul_" #bits "_8_" type, quantized_matmul_few<T, bits, 8>)
#define MAKE_TYPE(type, T) \
  MAKE_FEW(2, type, T)     \
  MAKE_FEW(3, type, T)     \
  MAKE_FEW(4, type, T)     \
  MAKE_FEW(5, type, T)     \
  MAKE_FEW(6, type, T)     \
  MAKE_FEW(8, type, T)
MAKE_TYPE("f32", float)
MAKE_TYPE("f16", half)
MAKE_TYPE("bf16", bf16)

#else

#include <array>
#include <string>

#include "backends/metal/launch.h"

namespace mlxtape::ops {

namespace {

constexpr std::int64_t kRows = 8;  // of the weights, for a group

// Names of the kernels for 1, 4 and 8 rows of x.
const char* name_for(std::int32_t bits, std::int64_t m) {
  constexpr std::array<std::array<const char*, 3>, 6> kNames{{
      {"quantized_matmul_2_1", "quantized_matmul_2_4", "quantized_matmul_2_8"},
      {"quantized_matmul_3_1", "quantized_matmul_3_4", "quantized_matmul_3_8"},
      {"quantized_matmul_4_1", "quantized_matmul_4_4", "quantized_matmul_4_8"},
      {"quantized_matmul_5_1", "quantized_matmul_5_4", "quantized_matmul_5_8"},
      {"quantized_matmul_6_1", "quantized_matmul_6_4", "quantized_matmul_6_8"},
      {"quantized_matmul_8_1", "quantized_matmul_8_4", "quantized_matmul_8_8"},
  }};
  const auto which = static_cast<std::size_t>(bits == 8 ? 5 : bits - 2);
  return kNames[which][m == 1 ? 0 : m <= 4 ? 1 : 2];
}

template <class T>
void forward(const KernelCall& call) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  // Rows are whole groups of 32 elements: they begin at packs where the first one does.
  metal::Launch(call, metal::kernel<T>(name_for(args.bits, args.m)))
      .constant(0, metal::is_aligned(call.in[0]))
      .buffers()
      .operations(2.0 * static_cast<double>(args.m) * static_cast<double>(args.n) *
                  static_cast<double>(args.k))
      .in_parts()
      .groups(ceil_div(args.n, kRows))
      .threads(2 * metal::kSimd)
      .run();
}

}  // namespace

void register_quantized_matmul_metal(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kMetal, "quantized_matmul_fwd_" + type, forward<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops

#endif
