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
  float* m[kOptimiserMost];
  float* v[kOptimiserMost];
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

template <bool kRows, class T, class G>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(__grid_constant__ const OptimiserArgs args, __grid_constant__ const Addresses all,
                 const float* lr_at, const std::int32_t* t_at, const float* scale_at) {
  cuda::wait_turn();
  const Piece piece(all);
  const int p = piece.parameter;
  const float lr = *lr_at;
  const auto t = static_cast<float>(*t_at);
  const float factor = scale_at == nullptr ? 1 : *scale_at;
  const bool corrects = args.bias_correction != 0;
  const float c1 = corrects ? -1 / expm1f(t * args.log_beta1) : 1;
  const float c2 = corrects ? 1 / sqrtf(-expm1f(t * args.log_beta2)) : 1;
  const AdamWRates<float> rates{1 - lr * args.weight_decay,
                                args.beta1,
                                args.rest1,
                                args.beta2,
                                args.rest2,
                                lr * c1,
                                c2,
                                args.eps};
  T* w = static_cast<T*>(all.w[p]);
  const G* grad = static_cast<const G*>(all.grad[p]);
  float* m = all.m[p];
  float* v = all.v[p];
  float* master = all.master[p];
  const bool aligned =
      is_whole(w) && is_whole(grad) && is_whole(m) && is_whole(v) && is_whole(master);
  for_turns<kRows>(args, all, piece, aligned,
                   [&](std::int64_t from, std::int64_t i, bool whole, int count) {
                     float vw[kEach], vg[kEach], vm[kEach], vv[kEach];
                     load_some(grad + from, whole, count, vg);
                     load_some(m + i, whole, count, vm);
                     load_some(v + i, whole, count, vv);
                     master != nullptr ? load_some(master + i, whole, count, vw)
                                       : load_some(w + i, whole, count, vw);
#pragma unroll
                     for (int k = 0; k < kEach; ++k)
                       adamw(rates, vg[k] * factor, vw[k], vm[k], vv[k]);
                     store_some(m + i, whole, count, vm);
                     store_some(v + i, whole, count, vv);
                     if (master != nullptr) store_some(master + i, whole, count, vw);
                     store_some(w + i, whole, count, vw);
                   });
}

template <bool kRows, class T, class G>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(__grid_constant__ const OptimiserArgs args, __grid_constant__ const Addresses all,
               const float* lr_at, const float* scale_at) {
  cuda::wait_turn();
  const Piece piece(all);
  const int p = piece.parameter;
  const float factor = scale_at == nullptr ? 1 : *scale_at;
  const SgdRates<float> rates{*lr_at, args.weight_decay, args.beta1, args.eps};
  const bool has_momentum = args.has_momentum != 0, nesterov = args.bias_correction != 0;
  T* w = static_cast<T*>(all.w[p]);
  const G* grad = static_cast<const G*>(all.grad[p]);
  float* v = all.v[p];
  float* master = all.master[p];
  const bool aligned = is_whole(w) && is_whole(grad) && is_whole(v) && is_whole(master);
  for_turns<kRows>(args, all, piece, aligned,
                   [&](std::int64_t from, std::int64_t i, bool whole, int count) {
                     float vw[kEach], vg[kEach], vv[kEach] = {};
                     load_some(grad + from, whole, count, vg);
                     if (has_momentum) load_some(v + i, whole, count, vv);
                     master != nullptr ? load_some(master + i, whole, count, vw)
                                       : load_some(w + i, whole, count, vw);
#pragma unroll
                     for (int k = 0; k < kEach; ++k) {
                       sgd(rates, has_momentum, nesterov, vg[k] * factor, vw[k], vv[k]);
                     }
                     if (has_momentum) store_some(v + i, whole, count, vv);
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

// first: number of the first gradient among the inputs. each: outputs of a parameter; w first, master last. by_rows: ids come
// behind the gradients.
Addresses addresses(const KernelCall& call, std::size_t first, std::size_t each,
                    bool by_rows = false) {
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
    if (each == 0) continue;
    all.w[p] = call.out[each * p];
    all.v[p] = call.output<float>(each * p + each - 2);
    all.m[p] = call.output<float>(each * p + 1);
    all.master[p] = call.output<float>(each * p + each - 1);
  }
  return all;
}

std::int64_t pieces_of(const Addresses& all) { return all.ends[all.count - 1]; }

template <bool kRows, class T>
void adamw_step(const KernelCall& call) {
  const auto& args = call.as<OptimiserArgs>();
  const Addresses all = addresses(call, 3, 4, kRows);
  if (pieces_of(all) == 0) return;
  const auto run = [&](auto kernel) {
    cuda::launch(kernel, pieces_of(all), kThreads, 0, 1, stream_of(call), args, all,
                 call.input<float>(0), call.input<std::int32_t>(1), call.input<float>(2));
  };
  args.f32_grads != 0 ? run(adamw_kernel<kRows, T, float>) : run(adamw_kernel<kRows, T, T>);
}

template <bool kRows, class T>
void sgd_step(const KernelCall& call) {
  const auto& args = call.as<OptimiserArgs>();
  const Addresses all = addresses(call, 2, 3, kRows);
  if (pieces_of(all) == 0) return;
  const auto run = [&](auto kernel) {
    cuda::launch(kernel, pieces_of(all), kThreads, 0, 1, stream_of(call), args, all,
                 call.input<float>(0), call.input<float>(1));
  };
  args.f32_grads != 0 ? run(sgd_kernel<kRows, T, float>) : run(sgd_kernel<kRows, T, T>);
}

template <class T>
void squares(const KernelCall& call) {
  const Addresses all = addresses(call, 0, 0);
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

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "optimiser_adamw_" + type, adamw_step<false, T>);
  registry.add(Backend::kCuda, "optimiser_sgd_" + type, sgd_step<false, T>);
  registry.add(Backend::kCuda, "optimiser_adamw_rows_" + type, adamw_step<true, T>);
  registry.add(Backend::kCuda, "optimiser_sgd_rows_" + type, sgd_step<true, T>);
  registry.add(Backend::kCuda, "optimiser_squares_" + type, squares<T>, squares_workspace);
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
