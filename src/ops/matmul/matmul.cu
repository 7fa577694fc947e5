// CUDA kernels of matmul (formula and layout: mlxtape/ops/matmul.h).
//
// Products are cuBLASLt's, with the bias, and the tanh form of gelu where nobody wants z, in its epilogue,
// and a residual as the matrix that is added. Every other activation is a pass of our own over z. One batch
// axis, the longest, goes to cuBLASLt, the others are loops. A bias must be aligned and of the result's type
// there: where it is not, a copy in the workspace is. 16-bit products with an inner axis of 8 or 16 that are added to
// something are ours (matmul_short.cuh). Where 16-bit rows of a, b or y are no whole 16 bytes there is no
// epilogue there, or one that rounds the product first:
// their sums go through f32 in the workspace, so that they are rounded once.
#include <cuda_runtime.h>

#include <algorithm>

#include "backends/cuda/blas.h"
#include "backends/cuda/device/exp.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/partials.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "matmul_args.h"
#include "matmul_short.cuh"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

using cuda::kPack;
using cuda::kWarp;
using cuda::narrow;
using cuda::Pack;
using cuda::widen;

constexpr int kThreads = 256;
constexpr float kGeluInner = 0.7978845608028654F;  // √(2/π)
constexpr float kGeluCubic = 0.044715F;

// ---- activations ----

__device__ __forceinline__ float gelu_tanh_inner(float z) {  // 2·√(2/π)·(z + 0.044715·z³)
  return 2 * kGeluInner * z * fmaf(z * z, kGeluCubic, 1.0F);
}

template <int kActivation>
__device__ __forceinline__ float activate(float z) {
  if constexpr (kActivation == kMatmulSilu) return cuda::silu<float>(z);
  if constexpr (kActivation == kMatmulGelu) return z * normcdff(z);
  if constexpr (kActivation == kMatmulGeluTanh) {
    return z * cuda::sigmoid<float>(gelu_tanh_inner(z)).value;
  }
  return z;
}

// The activation's slope at z; beyond ±110 it is 0 or 1 to the last bit, and products of z would overflow.
template <int kActivation>
__device__ __forceinline__ float slope(float z) {
  z = z != z ? z : fminf(110.0F, fmaxf(-110.0F, z));
  if constexpr (kActivation == kMatmulSilu) {
    const cuda::Sigmoid s = cuda::sigmoid<float>(z);
    return s.value * fmaf(z, s.rest, 1.0F);
  }
  if constexpr (kActivation == kMatmulGelu) {
    return fmaf(z, 0.3989422804014327F * expf(-0.5F * z * z), normcdff(z));
  }
  if constexpr (kActivation == kMatmulGeluTanh) {
    const cuda::Sigmoid s = cuda::sigmoid<float>(gelu_tanh_inner(z));
    const float rate = 2 * kGeluInner * fmaf(z * z, 3 * kGeluCubic, 1.0F);
    return s.value * fmaf(z * s.rest, rate, 1.0F);
  }
  return 1;
}

template <class Fn>
void with_activation(std::int32_t activation, const Fn& fn) {
  switch (activation) {
    case kMatmulSilu: return fn(std::integral_constant<int, kMatmulSilu>());
    case kMatmulGelu: return fn(std::integral_constant<int, kMatmulGelu>());
    case kMatmulGeluTanh: return fn(std::integral_constant<int, kMatmulGeluTanh>());
    default: return fn(std::integral_constant<int, kMatmulNone>());
  }
}

// kCount neighbouring elements: as one pack, or one by one.
template <int kCount, class T>
__device__ __forceinline__ void load_some(const T* p, float (&v)[kCount]) {
  if constexpr (kCount == kPack<T>) {
    cuda::unpack(cuda::load_pack(p), v);
  } else if constexpr (kCount == 1) {
    v[0] = widen(*p);
  }
}
template <int kCount, class T>
__device__ __forceinline__ void store_some(const float (&v)[kCount], T* p) {
  if constexpr (kCount == kPack<T>) {
    cuda::store_pack(cuda::pack_of<T>(v), p);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) p[i] = narrow<T>(v[i]);
  }
}

// As load_some, of memory that this kernel may write.
template <int kCount, class T>
__device__ __forceinline__ void load_own(const T* p, float (&v)[kCount]) {
  if constexpr (kCount == kPack<T>) {
    cuda::unpack(*reinterpret_cast<const Pack<T>*>(p), v);
  } else {
    v[0] = widen(*p);
  }
}

// ---- what cuBLASLt does not do ----

// Each thread kCount elements. sums: the products, or null for zeros; may be y or z.
template <class S, class O, int kCount, int kActivation>
__global__ void __launch_bounds__(kThreads)
    finish(std::int64_t groups, std::int64_t n, const S* sums, const O* bias, const O* residual,
           float beta, O* z, O* y) {
  cuda::wait_turn();
  const std::int64_t group = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (group >= groups) return;
  const std::int64_t at = group * kCount;
  float v[kCount], more[kCount];
  if (sums != nullptr) {
    load_own<kCount>(sums + at, v);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = 0;
  }
  if (bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] += widen(bias[(at + i) % n]);
  }
  const bool is_z = static_cast<const void*>(sums) == z && bias == nullptr;
  if (z != nullptr && !is_z) store_some<kCount>(v, z + at);
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = activate<kActivation>(v[i]);
  if (residual != nullptr) {
    load_some<kCount>(residual + at, more);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] += more[i];
  }
  if (beta != 0) {
    load_own<kCount>(y + at, more);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = fmaf(beta, more[i], v[i]);
  }
  store_some<kCount>(v, y + at);
}

template <class S, class O>
struct FinishCall {
  std::int64_t count, n;
  const S* sums;
  const O* bias;
  const O* residual;
  float beta;
  O* z;
  O* y;
  std::int32_t activation;

  void launch(cudaStream_t stream) const {
    const bool whole = count % kPack<O> == 0 && cuda::is_aligned(sums) &&
                       cuda::is_aligned(residual) && cuda::is_aligned(z) && cuda::is_aligned(y);
    with_activation(activation, [&](auto act) {
      const auto run = [&](auto kernel, int each) {
        const std::int64_t groups = count / each;
        cuda::launch(kernel, cuda::blocks_for(groups, kThreads), kThreads, 0, 1, stream, groups, n,
                     sums, bias, residual, beta, z, y);
      };
      if constexpr (std::is_same_v<S, O>) {
        if (whole) return run(finish<S, O, kPack<O>, act()>, kPack<O>);
      }
      run(finish<S, O, 1, act()>, 1);
    });
  }
};

template <class T, class O>
__global__ void __launch_bounds__(kThreads) copy_bias(std::int64_t n, const T* from, O* to) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) to[i] = narrow<O>(widen(from[i]));
}

// ---- the product ----

std::int64_t batches_of(const MatmulArgs& args) {
  std::int64_t count = 1;
  for (std::int64_t i = 0; i < args.batch_axes; ++i) count *= args.batch[i];
  return count;
}

// The workspace: a bias, sums in f32, and what cuBLASLt uses; each may be of no size.
struct Rooms {
  std::size_t bias = 0, sums = 0, blas = 0;

  Rooms(const MatmulArgs& args, bool is_16_bit) {
    const auto room = [](std::int64_t floats) {
      return (static_cast<std::size_t>(floats) * sizeof(float) + 255) / 256 * 256;
    };
    const bool has_bias = (args.has & kMatmulHasBias) != 0;
    if (has_bias) bias = room(args.n);
    if (args.k == 0) return;
    blas = cuda::blas_workspace(args.m, args.n, batches_of(args));
    const bool has_epilogue =
        has_bias || args.activation != kMatmulNone || (args.has & kMatmulHasResidual) != 0;
    const auto is_ragged = [](std::int64_t row, std::int64_t col) {
      return std::max(row, col) % 8 != 0;
    };
    if (is_16_bit && args.wide == 0 && has_epilogue &&
        (args.n % 8 != 0 || is_ragged(args.a_row, args.a_col) ||
         is_ragged(args.b_row, args.b_col))) {
      sums = room(batches_of(args) * args.m * args.n);
    }
  }
};
template <class T>
std::size_t workspace(const void* args) {
  const Rooms rooms(*static_cast<const MatmulArgs*>(args), sizeof(T) == 2);
  return rooms.bias + rooms.sums + rooms.blas;
}

// y = epilogue(a · b + bias) + beta · added over the whole batch; false where there is no such function.
template <class T, class O>
bool multiply(const MatmulArgs& args, const KernelCall& call, cuda::BlasEpilogue epilogue,
              const O* bias, const O* added, float beta, O* y) {
  std::int64_t axis = 0;  // that cuBLASLt counts through
  for (std::int64_t i = 1; i < args.batch_axes; ++i) {
    if (args.batch[i] > args.batch[axis]) axis = i;
  }
  std::int64_t inside = 1;  // matrices of y from one step along the axis to the next
  for (std::int64_t i = axis + 1; i < args.batch_axes; ++i) inside *= args.batch[i];
  const std::int64_t size = args.m * args.n;
  const bool batched = args.batch_axes > 0;
  const std::int64_t along = batched ? args.batch[axis] : 1;
  constexpr std::int64_t kMostBatch = 65535;
  const Rooms rooms(args, sizeof(T) == 2);
  const auto one = [&](std::int64_t a_at, std::int64_t b_at, std::int64_t y_at) {
    for (std::int64_t first = 0; first < along; first += kMostBatch) {
      const cuda::BlasShape shape{args.m,
                                  args.n,
                                  args.k,
                                  args.a_row,
                                  args.a_col,
                                  args.b_row,
                                  args.b_col,
                                  std::min(kMostBatch, along - first),
                                  batched ? args.a_batch[axis] : 0,
                                  batched ? args.b_batch[axis] : 0,
                                  inside * size,
                                  kDType<T>,
                                  kDType<O>,
                                  epilogue};
      const std::int64_t y_first = y_at + first * shape.c_batch;
      const cuda::BlasMemory memory{call.input<T>(0) + a_at + first * shape.a_batch,
                                    call.input<T>(1) + b_at + first * shape.b_batch,
                                    added == nullptr ? nullptr : added + y_first,
                                    y + y_first,
                                    bias,
                                    static_cast<char*>(call.workspace) + rooms.bias + rooms.sums,
                                    rooms.blas};
      if (!cuda::blas_product(shape, memory, beta, static_cast<cudaStream_t>(call.queue))) {
        return false;
      }
    }
    return true;
  };
  const std::int64_t others = batches_of(args) / along;
  for (std::int64_t i = 0; i < others; ++i) {
    std::int64_t rest = i, a_at = 0, b_at = 0, y_at = 0, step = size;
    for (std::int64_t x = args.batch_axes - 1; x >= 0; --x) {
      if (x != axis) {
        const std::int64_t index = rest % args.batch[x];
        rest /= args.batch[x];
        a_at += index * args.a_batch[x];
        b_at += index * args.b_batch[x];
        y_at += index * step;
      }
      step *= args.batch[x];
    }
    if (!one(a_at, b_at, y_at)) {
      // The first call says whether the function is there.
      if (i == 0) return false;
      throw Error(Errc::kBackend,
                  "cuBLASLt must do every matrix of a batch alike, got one refused");
    }
  }
  return true;
}

template <class T, class O>
void run_as(const KernelCall& call) {
  using cuda::BlasEpilogue;
  const auto& args = call.as<MatmulArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const T* given_bias = call.input<T>(2);  // [n], or null
  const O* residual = call.input<O>(3);    // like y, or null
  O* y = call.output<O>(0);                // [..., m, n]
  O* z = call.output<O>(1);                // like y, or null
  const std::int64_t count = batches_of(args) * args.m * args.n;

  const O* bias = nullptr;
  if (given_bias != nullptr) {
    bias = reinterpret_cast<const O*>(given_bias);
    if (!std::is_same_v<T, O> || !cuda::is_aligned(given_bias)) {
      auto* copy = static_cast<O*>(call.workspace);
      cuda::launch(copy_bias<T, O>, cuda::blocks_for(args.n, kThreads), kThreads, 0, 1, stream,
                   args.n, given_bias, copy);
      bias = copy;
    }
  }
  FinishCall<O, O> rest{count, args.n, nullptr, bias, residual, args.beta, z, y, args.activation};
  if (args.k == 0) return rest.launch(stream);
  const auto refused = [&] {
    return Error(Errc::kBackend, "cuBLASLt must have a function for " + std::to_string(args.m) +
                                     " x " + std::to_string(args.k) + " x " +
                                     std::to_string(args.n) + ", got none");
  };
  if constexpr (sizeof(O) == 2) {
    const Rooms rooms(args, true);
    if (rooms.sums != 0) {
      auto* sums = reinterpret_cast<float*>(static_cast<char*>(call.workspace) + rooms.bias);
      if (!multiply<T, float>(args, call, BlasEpilogue::kNone, nullptr, nullptr, 0, sums)) {
        throw refused();
      }
      return FinishCall<float, O>{count, args.n, sums, bias, residual, 0, z, y, args.activation}
          .launch(stream);
    }
  }

  if (args.activation == kMatmulNone) {
    // What is added: a residual, or what y holds.
    const O* added = residual != nullptr ? residual : y;
    const float beta = residual != nullptr ? 1 : args.beta;
    if constexpr (sizeof(T) == 2 && std::is_same_v<T, O>) {
      if (bias == nullptr && beta == 1 &&
          add_short_product(args, call.input<T>(0), call.input<T>(1), added, y, stream)) {
        return;
      }
    }
    if (multiply<T>(args, call, bias != nullptr ? BlasEpilogue::kBias : BlasEpilogue::kNone, bias,
                    added, beta, y)) {
      return;
    }
  } else if (args.activation == kMatmulGeluTanh && sizeof(O) == 2 && z == nullptr &&
             residual == nullptr) {  // theirs is not exact enough for f32
    if (multiply<T, O>(args, call,
                       bias != nullptr ? BlasEpilogue::kBiasGeluTanh : BlasEpilogue::kGeluTanh,
                       bias, nullptr, 0, y)) {
      return;
    }
  } else if (bias != nullptr) {
    O* sums = z != nullptr ? z : y;
    if (multiply<T, O>(args, call, BlasEpilogue::kBias, bias, nullptr, 0, sums)) {
      rest.sums = sums;
      rest.bias = nullptr;
      return rest.launch(stream);
    }
  }
  // Without an epilogue. beta is not with anything else (matmul.cpp), so it can be left to the product.
  O* sums = z != nullptr ? z : y;
  if (!multiply<T, O>(args, call, BlasEpilogue::kNone, nullptr, y, args.beta, sums)) {
    throw refused();
  }
  rest.sums = sums;
  rest.beta = 0;
  const bool done = bias == nullptr && residual == nullptr && args.activation == kMatmulNone;
  if (!done) rest.launch(stream);
}

template <class T>
void matmul_fwd(const KernelCall& call) {
  if constexpr (sizeof(T) == 2) {
    if (call.as<MatmulArgs>().wide != 0) return run_as<T, float>(call);
  }
  run_as<T, T>(call);
}

// ---- gradients of what is not a product ----

// Each thread kCount elements: a pack of O, or one.
template <class T, class O, int kCount, int kActivation>
__global__ void __launch_bounds__(kThreads)
    dz_kernel(std::int64_t groups, const O* dy, const O* z, T* dz) {
  cuda::wait_turn();
  const std::int64_t group = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (group >= groups) return;
  const std::int64_t at = group * kCount;
  float v[kCount];
  load_some<kCount>(dy + at, v);
  if constexpr (kActivation != kMatmulNone) {
    float u[kCount];
    load_some<kCount>(z + at, u);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] *= slope<kActivation>(u[i]);
  }
  store_some<kCount>(v, dz + at);
}

template <class T, class O>
void dz_as(const KernelCall& call) {
  const auto& args = call.as<MatmulDzArgs>();
  const O* dy = call.input<O>(0);  // [count]
  const O* z = call.input<O>(1);   // [count], or null
  T* dz = call.output<T>(0);       // [count]
  const bool whole = args.count % kPack<O> == 0 && cuda::is_aligned(dy) && cuda::is_aligned(z) &&
                     cuda::is_aligned(dz);
  with_activation(args.activation, [&](auto act) {
    const auto run = [&](auto kernel, int each) {
      const std::int64_t groups = args.count / each;
      cuda::launch(kernel, cuda::blocks_for(groups, kThreads), kThreads, 0, 1,
                   static_cast<cudaStream_t>(call.queue), groups, dy, z, dz);
    };
    whole ? run(dz_kernel<T, O, kPack<O>, act()>, kPack<O>) : run(dz_kernel<T, O, 1, act()>, 1);
  });
}

template <class T>
void matmul_dz(const KernelCall& call) {
  if constexpr (sizeof(T) == 2) {
    if (call.as<MatmulDzArgs>().wide != 0) return dz_as<T, float>(call);
  }
  dz_as<T, T>(call);
}

// Sums of columns: a block has kWarp · kCount columns and a part of the rows, which its warps share.
constexpr int kWarps = kThreads / kWarp;
constexpr std::int64_t kFewestRows = 64;  // of a part
constexpr std::int64_t kMostParts = 256;

std::int64_t row_parts(const MatmulBiasArgs& args) {
  return std::clamp<std::int64_t>(args.rows / kFewestRows, 1, kMostParts);
}
std::size_t bias_workspace(const void* p) {
  const auto& args = *static_cast<const MatmulBiasArgs*>(p);
  return static_cast<std::size_t>(row_parts(args) * args.n) * sizeof(float);
}

template <class T, int kCount>
__global__ void __launch_bounds__(kThreads)
    column_sums(MatmulBiasArgs args, std::int64_t rows_of_part, const T* dz, float* parts) {
  cuda::wait_turn();
  __shared__ float room[kWarps][kWarp * kCount];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t column = (std::int64_t{blockIdx.x} * kWarp + lane) * kCount;
  const std::int64_t first = blockIdx.y * rows_of_part;
  const std::int64_t end = min(first + rows_of_part, args.rows);
  float sum[kCount] = {};
  if (column < args.n) {
    for (std::int64_t r = first + warp; r < end; r += kWarps) {
      float v[kCount];
      load_some<kCount>(dz + r * args.n + column, v);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] += v[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) room[warp][i * kWarp + lane] = sum[i];
  __syncthreads();
  for (int c = threadIdx.x; c < kWarp * kCount; c += kThreads) {
    const std::int64_t to = (std::int64_t{blockIdx.x} * kWarp + c % kWarp) * kCount + c / kWarp;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += room[w][c];
    if (to < args.n) parts[blockIdx.y * args.n + to] = total;
  }
}

template <class T>
void matmul_bias(const KernelCall& call) {
  const auto& args = call.as<MatmulBiasArgs>();
  const T* dz = call.input<T>(0);                     // [rows, n]
  T* db = call.output<T>(0);                          // [n]
  auto* parts = static_cast<float*>(call.workspace);  // [parts, n]
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const std::int64_t count = row_parts(args);
  const std::int64_t rows = cuda::blocks_for(args.rows, count);
  const auto run = [&](auto kernel, int each) {
    cuda::launch(kernel, cuda::Blocks(cuda::blocks_for(args.n, kWarp * each), count), kThreads, 0,
                 1, stream, args, rows, dz, parts);
  };
  args.n % kPack<T> == 0 && cuda::is_aligned(dz) ? run(column_sums<T, kPack<T>>, kPack<T>)
                                                 : run(column_sums<T, 1>, 1);
  cuda::sum_partials(parts, count, args.n, db, stream);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "matmul_fwd_" + type, matmul_fwd<T>, workspace<T>);
  registry.add(Backend::kCuda, "matmul_dz_bwd_" + type, matmul_dz<T>);
  registry.add(Backend::kCuda, "matmul_bias_bwd_" + type, matmul_bias<T>, bias_workspace);
}

}  // namespace

void register_matmul_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
