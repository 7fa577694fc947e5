// CUDA kernels of quantized_experts (formula: mlxtape/ops/experts.h and quantize.h), for few pairs.
//
// Each pair's products are made by themselves: a warp has two rows of its expert's weights
// (backends/cuda/device/quantized.cuh), so there are enough reads under way for one token. Bound by reading the codes;
// pairs of one expert find them in the cache. What lies between the products is left in f32.
#include <cuda_runtime.h>

#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/quantized.cuh"
#include "backends/cuda/device/rows.cuh"
#include "mlxtape/core/registry.h"
#include "quantized_experts_args.h"

namespace mlxtape::ops {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / cuda::kWarp;
constexpr int kRows = 2;  // of weights, for a warp

cudaStream_t stream_of(const KernelCall& call) { return static_cast<cudaStream_t>(call.queue); }

// out [pairs, n] = w[its expert] [n, k]·(row pair/per of x); nothing where the index is past E.
template <class T, class X, int kBits>
__global__ void __launch_bounds__(kThreads)
    pair_products(QuantizedExpertsArgs args, cuda::Quantized<T> w, std::int64_t n, std::int64_t per,
                  bool aligned, const X* x, const unsigned* indices, float* out) {
  cuda::wait_turn();
  const int lane = threadIdx.x % cuda::kWarp;
  const std::int64_t parts = (n + kRows - 1) / kRows;
  const std::int64_t part =
      std::int64_t{blockIdx.x} * kWarps + threadIdx.x / cuda::kWarp;  // a warp's
  const std::int64_t pair = part / parts, first = part % parts * kRows;
  if (pair >= args.tokens * args.chosen) return;
  const std::int64_t expert = indices[pair];
  if (expert >= args.experts) return;
  std::int64_t rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = expert * n + (first + r < n ? first + r : n - 1);
  const X* const row_of_x[1] = {x + pair / per * w.k};
  float sum[kRows][1] = {};
  cuda::quantized_products<kBits>(w, rows, row_of_x, aligned, lane, cuda::kWarp, sum);
  const float mine = cuda::hand_out(sum);
  if (lane < kRows && first + lane < n) out[pair * n + first + lane] = mine;
}

// weight: which input holds its codes.
template <class T, class X>
void run_products(const KernelCall& call, std::size_t weight,
                  const QuantizedExpertsArgs::Form& form, std::int64_t n, std::int64_t k,
                  std::int64_t per, float* out) {
  const auto& args = call.as<QuantizedExpertsArgs>();
  const X* x = call.input<X>(0);
  const cuda::Quantized<T> w{call.input<unsigned>(weight),
                             call.in[weight + 1],
                             call.in[weight + 2],
                             static_cast<int>(k),
                             form.bits,
                             cuda::shift_of(form.group),
                             form.wide != 0};
  const std::int64_t parts = args.tokens * args.chosen * cuda::blocks_for(n, kRows);
  cuda::with_bits(form.bits, [&](auto bits) {
    cuda::launch(pair_products<T, X, bits()>, cuda::blocks_for(parts, kWarps), kThreads, 0, 1,
                 stream_of(call), args, w, n, per, cuda::is_aligned(x), x, call.input<unsigned>(1),
                 out);
  });
}

// a = g·σ(g)∘u, in place of g.
__global__ void __launch_bounds__(kThreads)
    activate(QuantizedExpertsArgs args, const unsigned* indices, const float* u, float* g) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t pair = i / args.inner;
  if (pair >= args.tokens * args.chosen || indices[pair] >= args.experts) return;
  g[i] = g[i] / (1 + expf(-g[i])) * u[i];
}

// y_t = Σ_j scores[t,j]·from[t,j], in the order of the choices.
template <class T>
__global__ void __launch_bounds__(kThreads)
    combine(QuantizedExpertsArgs args, const float* from, const unsigned* indices, const T* scores,
            T* y) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.tokens * args.width) return;
  const std::int64_t t = i / args.width, h = i % args.width;
  float sum = 0;
  for (std::int64_t pair = t * args.chosen; pair < (t + 1) * args.chosen; ++pair) {
    if (indices[pair] < args.experts) {
      sum = fmaf(cuda::widen(scores[pair]), from[pair * args.width + h], sum);
    }
  }
  y[i] = cuda::narrow<T>(sum);
}

std::size_t hidden_room(const void* opaque) {  // u
  const auto& args = *static_cast<const QuantizedExpertsArgs*>(opaque);
  return static_cast<std::size_t>(args.tokens * args.chosen * args.inner) * sizeof(float);
}
std::size_t out_room(const void* opaque) {  // what each pair brings to y
  const auto& args = *static_cast<const QuantizedExpertsArgs*>(opaque);
  return static_cast<std::size_t>(args.tokens * args.chosen * args.width) * sizeof(float);
}

template <class T>
void hidden_fwd(const KernelCall& call) {
  const auto& args = call.as<QuantizedExpertsArgs>();
  float* active = call.output<float>(0);
  auto* u = static_cast<float*>(call.workspace);
  run_products<T, T>(call, 2, args.gate, args.inner, args.width, args.chosen, active);
  run_products<T, T>(call, 5, args.up, args.inner, args.width, args.chosen, u);
  const std::int64_t count = args.tokens * args.chosen * args.inner;
  cuda::launch(activate, cuda::blocks_for(count, kThreads), kThreads, 0, 1, stream_of(call), args,
               call.input<unsigned>(1), u, active);
}

template <class T>
void out_fwd(const KernelCall& call) {
  const auto& args = call.as<QuantizedExpertsArgs>();
  auto* parts = static_cast<float*>(call.workspace);
  run_products<T, float>(call, 3, args.down, args.width, args.inner, 1, parts);
  cuda::launch(combine<T>, cuda::blocks_for(args.tokens * args.width, kThreads), kThreads, 0, 1,
               stream_of(call), args, parts, call.input<unsigned>(1), call.input<T>(2),
               call.output<T>(0));
}

}  // namespace

void register_quantized_experts_cuda(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCuda, "quantized_experts_hidden_fwd_" + type, hidden_fwd<T>,
                 hidden_room);
    registry.add(Backend::kCuda, "quantized_experts_out_fwd_" + type, out_fwd<T>, out_room);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops
