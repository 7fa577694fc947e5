// CUDA kernels of quantized_matmul (formula: mlxtape/ops/quantized_matmul.h).
//
// Up to 8 rows of x: a warp has a few rows of the weights and goes along them, 8 or 32 codes a lane at a time
// (backends/cuda/device/quantized.cuh); where there are few rows, a block of four warps does, so that there are enough
// reads under way. Bound by reading the codes for one row of x; with 8 by arithmetic.
#include <cuda_runtime.h>

#include <algorithm>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/quantized.cuh"
#include "backends/cuda/device/rows.cuh"
#include "mlxtape/core/registry.h"
#include "quantized_matmul_args.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / cuda::kWarp;

template <class T, int kBits, int kFew>
__global__ void __launch_bounds__(kThreads)
    few_rows(QuantizedMatmulArgs args, cuda::Quantized<T> w, bool by_block, bool aligned,
             const T* x, T* y) {
  cuda::wait_turn();
  constexpr int kRows = kFew == 8 ? 2 : 4;
  __shared__ float room[kWarps][cuda::kWarp];
  const int warp = threadIdx.x / cuda::kWarp, lane = threadIdx.x % cuda::kWarp;
  const std::int64_t n0 =
      (by_block ? blockIdx.x : std::int64_t{blockIdx.x} * kWarps + warp) * kRows;
  if (n0 >= args.n) return;  // a whole block where the block shares rows
  std::int64_t rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = n0 + r < args.n ? n0 + r : args.n - 1;
  const T* rows_of_x[kFew];
#pragma unroll
  for (int m = 0; m < kFew; ++m) rows_of_x[m] = x + (m < args.m ? m : 0) * args.k;
  float sum[kRows][kFew] = {};
  cuda::quantized_products<kBits>(w, rows, rows_of_x, aligned, by_block ? threadIdx.x : lane,
                                  by_block ? kThreads : cuda::kWarp, sum);
  float mine = cuda::hand_out(sum);
  if (by_block) {
    room[warp][lane] = mine;
    __syncthreads();
    if (warp != 0) return;
    mine = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) mine += room[i][lane];
  }
  const int r = lane / kFew, m = lane % kFew;
  if (r < kRows && n0 + r < args.n && m < args.m) y[m * args.n + n0 + r] = cuda::narrow<T>(mine);
}

template <class T, int kFew>
void run_few(const KernelCall& call) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  const T* x = call.input<T>(0);
  const cuda::Quantized<T> w{
      call.input<unsigned>(1),    call.in[2],    call.in[3], static_cast<int>(args.k), args.bits,
      cuda::shift_of(args.group), args.wide != 0};
  constexpr int kRows = kFew == 8 ? 2 : 4;
  const std::int64_t parts = cuda::blocks_for(args.n, kRows);
  const bool by_block = parts < 16 * kWarps * cuda::kMultiprocessors;
  const std::int64_t blocks = by_block ? parts : cuda::blocks_for(parts, kWarps);
  cuda::with_bits(args.bits, [&](auto bits) {
    cuda::launch(few_rows<T, bits(), kFew>, blocks, kThreads, 0, 1,
                 static_cast<cudaStream_t>(call.queue), args, w, by_block, cuda::is_aligned(x), x,
                 call.output<T>(0));
  });
}

template <class T>
void quantized_matmul_fwd(const KernelCall& call) {
  const std::int64_t m = call.as<QuantizedMatmulArgs>().m;
  m == 1 ? run_few<T, 1>(call) : m <= 4 ? run_few<T, 4>(call) : run_few<T, 8>(call);
}

}  // namespace

void register_quantized_matmul_cuda(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCuda, "quantized_matmul_fwd_" + type, quantized_matmul_fwd<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops
