// CUDA kernels of quantized_matmul (formula: mlxtape/ops/quantized_matmul.h).
//
// fwd, up to 8 rows of x: a warp has a few rows of the weights and goes along them, 8 or 32 codes a lane at a time
// (backends/cuda/device/packed.cuh); where there are few rows, a block of four warps does, so that there are enough
// reads under way. Bound by reading the codes for one row of x; with 8 by arithmetic.
// unpack and params_bwd: a thread has the same 8 or 32 codes; threads of a group add up by shuffles. Bound by the
// matrix beside the codes. Codes of 2, 3, 5 and 6 bits write it in pieces of half a line.
#include <cuda_runtime.h>

#include <algorithm>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/packed.cuh"
#include "backends/cuda/device/rows.cuh"
#include "mlxtape/core/registry.h"
#include "quantized_matmul_args.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / cuda::kWarp;

template <class T>
cuda::Packed<T> packed_of(const KernelCall& call, std::size_t first) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  return {call.input<unsigned>(first),
          call.in[first + 1],
          call.in[first + 2],
          static_cast<int>(args.k),
          args.bits,
          cuda::shift_of(args.group),
          args.wide != 0};
}

cudaStream_t stream_of(const KernelCall& call) { return static_cast<cudaStream_t>(call.queue); }

// ---- few rows of x ----

template <class T, int kBits, int kFew>
__global__ void __launch_bounds__(kThreads)
    few_rows(QuantizedMatmulArgs args, cuda::Packed<T> w, bool by_block, bool aligned, const T* x,
             T* y) {
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
  cuda::packed_products<kBits>(w, rows, rows_of_x, aligned, by_block ? threadIdx.x : lane,
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
  constexpr int kRows = kFew == 8 ? 2 : 4;
  const std::int64_t parts = cuda::blocks_for(args.n, kRows);
  const bool by_block = parts < 16 * kWarps * cuda::kMultiprocessors;
  const std::int64_t blocks = by_block ? parts : cuda::blocks_for(parts, kWarps);
  cuda::with_bits(args.bits, [&](auto bits) {
    cuda::launch(few_rows<T, bits(), kFew>, blocks, kThreads, 0, 1, stream_of(call), args,
                 packed_of<T>(call, 1), by_block, cuda::is_aligned(x), x, call.output<T>(0));
  });
}

template <class T>
void quantized_matmul_fwd(const KernelCall& call) {
  const std::int64_t m = call.as<QuantizedMatmulArgs>().m;
  m == 1 ? run_few<T, 1>(call) : m <= 4 ? run_few<T, 4>(call) : run_few<T, 8>(call);
}

// ---- whole matrices ----

template <class T, int kBits>
__global__ void __launch_bounds__(kThreads)
    unpack(QuantizedMatmulArgs args, cuda::Packed<T> w, bool aligned, T* out) {
  cuda::wait_turn();
  constexpr int kCount = cuda::Codes<kBits>::kCount;
  const std::int64_t part = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (part >= args.n * args.k / kCount) return;
  const std::int64_t row = part * kCount / args.k;
  const int k = static_cast<int>(part * kCount % args.k);
  cuda::Codes<kBits> codes;
  codes.load(w.codes + part * cuda::Codes<kBits>::kWords);
  const float s = w.scale(w.group_of(row, k)), b = w.bias(w.group_of(row, k));
  out += part * kCount;
#pragma unroll
  for (int i = 0; i < kCount; i += cuda::kPack<T>) {
    float v[cuda::kPack<T>];
#pragma unroll
    for (int j = 0; j < cuda::kPack<T>; ++j) v[j] = fmaf(s, codes[i + j], b);
    if (aligned) {
      cuda::store_pack(cuda::pack_of<T>(v), out + i);
    } else {
#pragma unroll
      for (int j = 0; j < cuda::kPack<T>; ++j) out[i + j] = cuda::narrow<T>(v[j]);
    }
  }
}

template <class T>
void quantized_matmul_unpack(const KernelCall& call) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  T* out = call.output<T>(0);
  cuda::with_bits(args.bits, [&](auto bits) {
    const std::int64_t parts = args.n * args.k / cuda::Codes<bits()>::kCount;
    cuda::launch(unpack<T, bits()>, cuda::blocks_for(parts, kThreads), kThreads, 0, 1,
                 stream_of(call), args, packed_of<T>(call, 0), cuda::is_aligned(out), out);
  });
}

template <class T, int kBits>
__global__ void __launch_bounds__(kThreads)
    params_back(QuantizedMatmulArgs args, bool aligned, const float* dw, const unsigned* codes,
                T* dscales, T* dbiases) {
  cuda::wait_turn();
  constexpr int kCount = cuda::Codes<kBits>::kCount;
  const std::int64_t part = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  float scale = 0, bias = 0;
  if (part < args.n * args.k / kCount) {
    cuda::Codes<kBits> q;
    q.load(codes + part * cuda::Codes<kBits>::kWords);
#pragma unroll
    for (int from = 0; from < kCount; from += 8) {
      float v[8];
      cuda::load_eight(dw + part * kCount + from, aligned, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        scale = fmaf(q[from + i], v[i], scale);
        bias += v[i];
      }
    }
  }
  // A group's threads stand beside each other, a power of two of them: every lane takes part.
  const int threads = args.group / kCount;
  for (int step = 1; step < threads; step *= 2) {
    scale += __shfl_xor_sync(cuda::kAll, scale, step);
    bias += __shfl_xor_sync(cuda::kAll, bias, step);
  }
  if (part % threads != 0 || part >= args.n * args.k / kCount) return;
  if (dscales != nullptr) dscales[part / threads] = cuda::narrow<T>(scale);
  if (dbiases != nullptr) dbiases[part / threads] = cuda::narrow<T>(bias);
}

template <class T>
void quantized_matmul_params_bwd(const KernelCall& call) {
  const auto& args = call.as<QuantizedMatmulArgs>();
  const float* dw = call.input<float>(0);
  cuda::with_bits(args.bits, [&](auto bits) {
    const std::int64_t parts = args.n * args.k / cuda::Codes<bits()>::kCount;
    cuda::launch(params_back<T, bits()>, cuda::blocks_for(parts, kThreads), kThreads, 0, 1,
                 stream_of(call), args, cuda::is_aligned(dw), dw, call.input<unsigned>(1),
                 call.output<T>(0), call.output<T>(1));
  });
}

}  // namespace

void register_quantized_matmul_cuda(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCuda, "quantized_matmul_fwd_" + type, quantized_matmul_fwd<T>);
    registry.add(Backend::kCuda, "quantized_matmul_unpack_" + type, quantized_matmul_unpack<T>);
    registry.add(Backend::kCuda, "quantized_matmul_params_bwd_" + type,
                 quantized_matmul_params_bwd<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops
