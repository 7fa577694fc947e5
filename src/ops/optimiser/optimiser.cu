// CUDA kernels of optimiser (formulas: mlxtape/ops/optimiser.h). A block has one piece of one parameter, found
// by bisection among the pieces of all; addresses travel as kernel arguments. 16 bytes of the 16-bit side,
// or of f32, a thread and turn. By rows, the pieces are the gradient's. Bound by memory.
#include <algorithm>
#include <string>

#include "backends/cuda/device/index.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/core/registry.h"
#include "optimiser_args.h"

namespace mlxtape::ops {

namespace {

using cuda::narrow;
using cuda::widen;

__device__ __forceinline__ float root(float v) { return sqrtf(v); }
// 0 of 0, and NaN of NaN: it must reach the weight.
__device__ __forceinline__ float sign(float v) { return fabsf(v) > 0 ? copysignf(1, v) : v; }
template <class V>
__device__ __forceinline__ V all(float value) {
  return value;
}
#define MT_STEP __device__ __forceinline__
#include "optimiser_formula.h"  // NOLINT: inside this namespace

constexpr int kThreads = 256;
constexpr int kEach = 4;  // elements of a thread at once: 16 bytes of f32, 8 of 16 bits

// Where every parameter's arrays are. Under 4 KB, what a kernel's arguments may have.
struct Addresses {
  std::int32_t ends[kOptimiserMost];  // of pieces, counted over all parameters
  std::int32_t count;
  const void* grad[kOptimiserMost];
  void* w[kOptimiserMost];
  float* states[kOptimiserMostStates][kOptimiserMost];
  float* master[kOptimiserMost];
  const std::int32_t* ids[kOptimiserMostRows];
};
static_assert(sizeof(Addresses) + sizeof(OptimiserArgs) < 4000);

// The parameter and the first element of this block's piece.
struct Piece {
  int parameter;
  std::int64_t first;

  __device__ explicit Piece(const Addresses& all) {
    int low = 0, high = all.count - 1;
    const auto block = static_cast<int>(blockIdx.x);
    while (low < high) {
      const int middle = (low + high) / 2;
      if (block < all.ends[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    parameter = low;
    first = (block - (low == 0 ? 0 : all.ends[low - 1])) * kOptimiserPiece;
  }
};

template <class T>
struct alignas(sizeof(T) * kEach) Some {
  T at[kEach];
};

// Loads kEach elements, or fewer at the end, or where p is not aligned one by one; floats of any type.
template <class T>
__device__ __forceinline__ void load_some(const T* p, bool whole, int count, float (&v)[kEach]) {
  if (whole) {
    const Some<T> some = *reinterpret_cast<const Some<T>*>(p);
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = widen(some.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = i < count ? widen(p[i]) : 0;
  }
}
template <class T>
__device__ __forceinline__ void store_some(T* p, bool whole, int count, const float (&v)[kEach]) {
  if (whole) {
    Some<T> some;
#pragma unroll
    for (int i = 0; i < kEach; ++i) some.at[i] = narrow<T>(v[i]);
    *reinterpret_cast<Some<T>*>(p) = some;
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i < count) p[i] = narrow<T>(v[i]);
    }
  }
}

__device__ __forceinline__ bool is_whole(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

// Calls step(of the gradient, of the parameter, whole, count) for the turns of this thread: where they are.
template <bool kRows, class Step>
__device__ __forceinline__ void for_turns(const OptimiserArgs& args, const Addresses& all,
                                          const Piece& piece, bool aligned, const Step& step) {
  const int p = piece.parameter;
  const std::int64_t end = min(args.sizes[p], piece.first + kOptimiserPiece);
  const std::int64_t start = piece.first + std::int64_t{threadIdx.x} * kEach;
  for (std::int64_t i = start; i < end; i += kThreads * kEach) {
    const int count = static_cast<int>(min(std::int64_t{kEach}, end - i));
    if constexpr (!kRows) {
      step(i, i, aligned && count == kEach, count);
    } else {
      // Four elements of one row at once, or one by one where a row may end among them.
      const std::int64_t width = args.widths[p];
      const bool whole = aligned && width % kEach == 0;
      const int each = whole ? kEach : 1;
      for (int k = 0; k < count; k += each) {
        std::int64_t column;
        const std::int64_t row = cuda::divide(i + k, width, column);
        const std::int64_t id = all.ids[p][row];
        if (id >= 0 && id < args.rows[p]) step(i + k, id * width + column, whole, each);
      }
    }
  }
}

template <template <class> class Rule, bool kRows, class T, class G>
__global__ void __launch_bounds__(kThreads)
    step_kernel(__grid_constant__ const OptimiserArgs args, __grid_constant__ const Addresses all,
                const float* lr_at, const std::int32_t* t_at, const float* scale_at) {
  cuda::wait_turn();
  constexpr int kStates = Rule<float>::kStates;
  const Piece piece(all);
  const int p = piece.parameter;
  const float factor = scale_at == nullptr ? 1 : *scale_at;
  if (isnan(factor)) return;
  const Rule<float> rule(args, *lr_at, t_at == nullptr ? 0 : static_cast<float>(*t_at));
  T* w = static_cast<T*>(all.w[p]);
  const G* grad = static_cast<const G*>(all.grad[p]);
  float* master = all.master[p];
  float* states[kStates];
  bool aligned = is_whole(w) && is_whole(grad) && is_whole(master);
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    states[s] = all.states[s][p];
    aligned = aligned && is_whole(states[s]);
  }
  for_turns<kRows>(args, all, piece, aligned,
                   [&](std::int64_t from, std::int64_t i, bool whole, int count) {
                     float vw[kEach], vg[kEach], vs[kStates][kEach] = {};
                     load_some(grad + from, whole, count, vg);
#pragma unroll
                     for (int s = 0; s < kStates; ++s) {
                       if (states[s] != nullptr) load_some(states[s] + i, whole, count, vs[s]);
                     }
                     master != nullptr ? load_some(master + i, whole, count, vw)
                                       : load_some(w + i, whole, count, vw);
#pragma unroll
                     for (int k = 0; k < kEach; ++k) {
                       float of_one[kStates];
#pragma unroll
                       for (int s = 0; s < kStates; ++s) of_one[s] = vs[s][k];
                       rule(vg[k] * factor, vw[k], of_one);
#pragma unroll
                       for (int s = 0; s < kStates; ++s) vs[s][k] = of_one[s];
                     }
#pragma unroll
                     for (int s = 0; s < kStates; ++s) {
                       if (states[s] != nullptr) store_some(states[s] + i, whole, count, vs[s]);
                     }
                     if (master != nullptr) store_some(master + i, whole, count, vw);
                     store_some(w + i, whole, count, vw);
                   });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(__grid_constant__ const OptimiserArgs args,
                   __grid_constant__ const Addresses all, float* sums) {
  cuda::wait_turn();
  __shared__ float room[kThreads / cuda::kWarp];
  const Piece piece(all);
  const T* grad = static_cast<const T*>(all.grad[piece.parameter]);
  float sum = 0;
  for_turns<false>(args, all, piece, is_whole(grad),
                   [&](std::int64_t i, std::int64_t, bool whole, int count) {
                     float g[kEach];
                     load_some(grad + i, whole, count, g);
#pragma unroll
                     for (int k = 0; k < kEach; ++k) sum = fmaf(g[k], g[k], sum);
                   });
  sum = cuda::RowThreads<kThreads>::sum(sum, room);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block: each thread its share in order, then all threads' shares in order.
__global__ void __launch_bounds__(kThreads)
    total_kernel(std::int64_t n, const float* sums, float* to) {
  cuda::wait_turn();
  __shared__ double room[kThreads];
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) sum += static_cast<double>(sums[i]);
  room[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads; ++i) sum += room[i];
  *to = static_cast<float>(sum);
}

__global__ void norm_kernel(NormArgs args, const float* sums, float* norm, float* scale) {
  cuda::wait_turn();
  double sum = 0;
  for (std::int64_t i = 0; i < args.sums; ++i) sum += static_cast<double>(sums[i]);
  const auto root_of = static_cast<float>(sqrt(sum));
  *norm = root_of;
  const float share = args.most / (root_of + 1e-6F);
  *scale = share < 1 ? share : 1;
}

__global__ void advance_kernel(std::int32_t* t) {
  cuda::wait_turn();
  ++*t;
}

cudaStream_t stream_of(const KernelCall& call) { return static_cast<cudaStream_t>(call.queue); }

// first: number of the first gradient among the inputs. states: of a parameter, whose outputs they are with w before and
// master behind them; -1: there are no outputs. by_rows: ids come behind the gradients.
Addresses addresses(const KernelCall& call, std::size_t first, int states, bool by_rows = false) {
  const auto& args = call.as<OptimiserArgs>();
  Addresses all{};
  all.count = static_cast<std::int32_t>(args.count);
  std::int64_t pieces = 0;
  for (std::size_t p = 0; p < static_cast<std::size_t>(args.count); ++p) {
    pieces += optimiser_pieces(args.sizes[p]);
    if (pieces > std::numeric_limits<std::int32_t>::max()) {
      throw Error(Errc::kShape, "at most 2^31 pieces of 16384 elements in one step");
    }
    all.ends[p] = static_cast<std::int32_t>(pieces);
    all.grad[p] = call.in[first + p];
    if (by_rows) {
      all.ids[p] = call.input<std::int32_t>(first + static_cast<std::size_t>(args.count) + p);
    }
    if (states < 0) continue;
    const auto count = static_cast<std::size_t>(states), at = (count + 2) * p;
    all.w[p] = call.out[at];
    for (std::size_t s = 0; s < count; ++s) all.states[s][p] = call.output<float>(at + 1 + s);
    all.master[p] = call.output<float>(at + 1 + count);
  }
  return all;
}

std::int64_t pieces_of(const Addresses& all) { return all.ends[all.count - 1]; }

template <template <class> class Rule, bool kRows, class T>
void step(const KernelCall& call) {
  const auto& args = call.as<OptimiserArgs>();
  const Addresses all = addresses(call, 3, Rule<float>::kStates, kRows);
  if (pieces_of(all) == 0) return;
  const auto run = [&](auto kernel) {
    cuda::launch(kernel, pieces_of(all), kThreads, 0, 1, stream_of(call), args, all,
                 call.input<float>(0), call.input<std::int32_t>(1), call.input<float>(2));
  };
  args.f32_grads != 0 ? run(step_kernel<Rule, kRows, T, float>)
                      : run(step_kernel<Rule, kRows, T, T>);
}

template <class T>
void squares(const KernelCall& call) {
  const Addresses all = addresses(call, 0, -1);
  auto* sums = static_cast<float*>(call.workspace);
  if (pieces_of(all) != 0) {
    cuda::launch(squares_kernel<T>, pieces_of(all), kThreads, 0, 1, stream_of(call),
                 call.as<OptimiserArgs>(), all, sums);
  }
  cuda::launch(total_kernel, 1, kThreads, 0, 1, stream_of(call), pieces_of(all),
               static_cast<const float*>(sums), call.output<float>(0));
}

std::size_t squares_workspace(const void* args) {
  const auto& a = *static_cast<const OptimiserArgs*>(args);
  std::int64_t all = 0;
  for (std::int64_t p = 0; p < a.count; ++p) all += optimiser_pieces(a.sizes[p]);
  return static_cast<std::size_t>(all) * sizeof(float);
}

void norm(const KernelCall& call) {
  cuda::launch(norm_kernel, 1, 1, 0, 1, stream_of(call), call.as<NormArgs>(), call.input<float>(0),
               call.output<float>(0), call.output<float>(1));
}

void advance_by_one(const KernelCall& call) {
  cuda::launch(advance_kernel, 1, 1, 0, 1, stream_of(call), call.output<std::int32_t>(0));
}

template <template <class> class Rule, class T>
void add_steps(KernelRegistry& registry, const std::string& name) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "optimiser_" + name + "_" + type, step<Rule, false, T>);
  registry.add(Backend::kCuda, "optimiser_" + name + "_rows_" + type, step<Rule, true, T>);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  add_steps<AdamWRule, T>(registry, "adamw");
  add_steps<SgdRule, T>(registry, "sgd");
  add_steps<LionRule, T>(registry, "lion");
  registry.add(Backend::kCuda, std::string("optimiser_muon_") + name_of(kDType<T>),
               step<MuonRule, false, T>);
  registry.add(Backend::kCuda, std::string("optimiser_squares_") + name_of(kDType<T>), squares<T>,
               squares_workspace);
}

}  // namespace

void register_optimiser_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  registry.add(Backend::kCuda, "optimiser_norm_f32", norm);
  registry.add(Backend::kCuda, "optimiser_advance_i32", advance_by_one);
}

}  // namespace mlxtape::ops
