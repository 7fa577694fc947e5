// CUDA kernels of argmax and argmin (mlxtape/ops/sort.h). A candidate is a rank above the index, as one number:
// the smallest is the result, in whatever order they meet. Rows: a warp or a block each; other axes: a thread
// a result, neighbours beside each other. Where that would leave the device idle, the elements of a result are
// cut into pieces and a second kernel joins their candidates. Bound by memory.
#include <algorithm>
#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "sort_args.h"
#include "sort_keys.h"

namespace mlxtape::ops {

namespace {

using cuda::kWarp;
using Candidate = unsigned long long;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr Candidate kNone = ~Candidate{0};

// The smallest is the best. NaN comes before all: its key is the largest, and those of the smallest are moved
// up by one, around the end.
template <class T, bool kSmallest>
__device__ __forceinline__ unsigned rank_of(T v) {
  using Key = KeyOf<T>;
  const Key key = key_of(v);
  if constexpr (!kSmallest) return static_cast<Key>(~key);
  return static_cast<Key>(key + (is_float(kDType<T>) ? 1 : 0));
}

// The best that a thread has seen. It looks at its elements in the order of their indices, so that only what
// is better replaces it. Nothing is better than nothing at first where its rank is the largest there is; if
// that holds for all elements of a result, they are equal, and the first is the one.
struct Best {
  unsigned rank = ~0U, index = ~0U;
  __device__ __forceinline__ void look(unsigned other, std::int64_t at) {
    if (other >= rank) return;
    rank = other;
    index = static_cast<unsigned>(at);
  }
  __device__ Candidate candidate() const { return static_cast<Candidate>(rank) << 32U | index; }
};
__device__ __forceinline__ unsigned index_of(Candidate c) {
  return c == kNone ? 0 : static_cast<unsigned>(c);
}

__device__ __forceinline__ Candidate best_of_warp(Candidate best) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Candidate other = __shfl_xor_sync(cuda::kAll, best, step);
    best = other < best ? other : best;
  }
  return best;
}

// How the elements of each result are cut: by the shape alone.
struct Pieces {
  std::int64_t each, count;
};
Pieces pieces_of(const ArgmaxArgs& args) {
  const std::int64_t results = args.outer * args.inner;
  const std::int64_t threads = args.inner > 1 ? 1 : kThreads;  // of a piece
  const std::int64_t least = args.inner > 1 ? 64 : 8192;       // elements of one
  const std::int64_t wanted =
      std::max<std::int64_t>(1, std::int64_t{cuda::kMultiprocessors} * 2048 /
                                    std::max<std::int64_t>(1, results * threads));
  const std::int64_t count = std::clamp<std::int64_t>(args.count / least, 1, wanted);
  const std::int64_t each = cuda::blocks_for(args.count, count);
  return {each, cuda::blocks_for(args.count, each)};
}

// Where the candidates of a piece go: to parts [results, pieces], or straight to the indices.
struct Out {
  Candidate* parts;  // may be null
  unsigned* indices;
  __device__ void put(std::int64_t result, std::int64_t piece, std::int64_t pieces,
                      Candidate best) const {
    if (parts != nullptr) {
      parts[result * pieces + piece] = best;
    } else {
      indices[result] = index_of(best);
    }
  }
};

// kPerRow threads have a row's piece: a warp or the block.
template <class T, bool kSmallest, int kPerRow>
__global__ void __launch_bounds__(kThreads)
    argmax_rows(ArgmaxArgs args, Pieces pieces, const T* x, Out out) {
  cuda::wait_turn();
  constexpr int kPack = cuda::kPack<T>;
  const std::int64_t work = std::int64_t{blockIdx.x} * (kThreads / kPerRow) + threadIdx.x / kPerRow;
  if (work >= args.outer * pieces.count) return;  // a warp as a whole
  const std::int64_t row = work / pieces.count, piece = work % pieces.count;
  const std::int64_t begin = piece * pieces.each;
  const std::int64_t n = min(pieces.each, args.count - begin);
  x += row * args.count + begin;
  const int t = static_cast<int>(threadIdx.x) % kPerRow;
  Best own;
  const auto look = [&](T v, std::int64_t i) {
    own.look(rank_of<T, kSmallest>(v), begin + i);
  };
  const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(x) % 16 / sizeof(T));
  const std::int64_t head = past == 0 ? 0 : min(n, std::int64_t{kPack} - past);
  const std::int64_t packs = (n - head) / kPack;
  for (std::int64_t i = t; i < head; i += kPerRow) look(x[i], i);
#pragma unroll 4
  for (std::int64_t p = t; p < packs; p += kPerRow) {
    const std::int64_t at = head + p * kPack;
    const cuda::Pack<T> pack = cuda::load_pack(x + at);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      T v;
      if constexpr (sizeof(T) == 2) {
        v.bits = static_cast<std::uint16_t>(pack.word[k / 2] >> (k % 2 * 16));
      } else {
        v = __builtin_bit_cast(T, pack.word[k]);
      }
      look(v, at + k);
    }
  }
  for (std::int64_t i = head + packs * kPack + t; i < n; i += kPerRow) look(x[i], i);
  Candidate best = best_of_warp(own.candidate());
  if constexpr (kPerRow > kWarp) {
    __shared__ Candidate room[kWarps];
    if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = best;
    __syncthreads();
    best = room[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) best = room[w] < best ? room[w] : best;
  }
  if (t == 0) out.put(row, piece, pieces.count, best);
}

template <class T, bool kSmallest>
__global__ void __launch_bounds__(kThreads)
    argmax_columns(ArgmaxArgs args, Pieces pieces, const T* x, Out out) {
  cuda::wait_turn();
  const std::int64_t results = args.outer * args.inner;
  const std::int64_t work = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (work >= results * pieces.count) return;
  const std::int64_t result = work % results, piece = work / results;
  const std::int64_t begin = piece * pieces.each, end = min(args.count, begin + pieces.each);
  x += result / args.inner * args.count * args.inner + result % args.inner;
  Best own;
#pragma unroll 8
  for (std::int64_t i = begin; i < end; ++i) own.look(rank_of<T, kSmallest>(x[i * args.inner]), i);
  out.put(result, piece, pieces.count, own.candidate());
}

__global__ void __launch_bounds__(kThreads)
    join(std::int64_t results, std::int64_t pieces, const Candidate* parts, unsigned* indices) {
  cuda::wait_turn();
  const std::int64_t result = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (result >= results) return;
  Candidate best = kNone;
  for (std::int64_t p = threadIdx.x % kWarp; p < pieces; p += kWarp) {
    const Candidate c = parts[result * pieces + p];
    best = c < best ? c : best;
  }
  best = best_of_warp(best);
  if (threadIdx.x % kWarp == 0) indices[result] = index_of(best);
}

template <class T, bool kSmallest>
void run(const ArgmaxArgs& args, const T* x, const Out& out, cudaStream_t stream) {
  const Pieces pieces = pieces_of(args);
  const std::int64_t results = args.outer * args.inner;
  const std::int64_t work = results * pieces.count;
  if (args.inner > 1) {
    cuda::launch(argmax_columns<T, kSmallest>, cuda::blocks_for(work, kThreads), kThreads, 0, 1,
                 stream, args, pieces, x, out);
  } else if (pieces.each <= 2048) {
    cuda::launch(argmax_rows<T, kSmallest, kWarp>, cuda::blocks_for(work, kWarps), kThreads, 0, 1,
                 stream, args, pieces, x, out);
  } else {
    cuda::launch(argmax_rows<T, kSmallest, kThreads>, work, kThreads, 0, 1, stream, args, pieces, x,
                 out);
  }
  if (out.parts != nullptr) {
    cuda::launch(join, cuda::blocks_for(results, kWarps), kThreads, 0, 1, stream, results,
                 pieces.count, static_cast<const Candidate*>(out.parts), out.indices);
  }
}

std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const ArgmaxArgs*>(args);
  const std::int64_t pieces = pieces_of(a).count;
  return pieces == 1 ? 0 : static_cast<std::size_t>(a.outer * a.inner * pieces) * sizeof(Candidate);
}

template <class T>
void argmax_fwd(const KernelCall& call) {
  const auto& args = call.as<ArgmaxArgs>();
  const Out out{pieces_of(args).count == 1 ? nullptr : static_cast<Candidate*>(call.workspace),
                call.output<unsigned>(0)};
  auto* stream = static_cast<cudaStream_t>(call.queue);
  args.smallest != 0 ? run<T, true>(args, call.input<T>(0), out, stream)
                     : run<T, false>(args, call.input<T>(0), out, stream);
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  registry.add(Backend::kCuda, std::string("argmax_fwd_") + name_of(kDType<T>), argmax_fwd<T>,
               workspace);
}

}  // namespace

void register_sort_argmax_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  add_kernels<std::int32_t>(registry);
  add_kernels<std::uint32_t>(registry);
}

}  // namespace mlxtape::ops
