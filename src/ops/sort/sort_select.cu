// CUDA kernels of sort that look for the best few of a row (Best in sort_args.h), and of its gradient.
//
// Short rows, few best: a warp each, which takes the best of its lanes again and again. Other short rows are
// sorted. Long rows: a block each. The block guesses from a sample which rank about 2.5 · count elements reach,
// reads the row once, collects those, and sorts them in shared memory. Where they are too few or too
// many (elements that are alike, rows in some order) it finds the rank of the last of the best by its
// digits, in four more passes, and takes as many of its equals as are missing.
#include <algorithm>
#include <string>

#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "backends/cuda/device/vectors.cuh"
#include "mlxtape/base/dtype.h"
#include "mlxtape/core/registry.h"
#include "sort_args.h"
#include "sort_rows.cuh"

namespace mlxtape::ops {

namespace {

using cuda::kWarp;

// As 32 bits: smaller is better.
template <class T>
__device__ __forceinline__ unsigned rank_of(T v, Best best) {
  constexpr unsigned kBits = 8 * sizeof(KeyOf<T>);
  unsigned key = key_in_order(v, best == Best::kLargest);
  if (best == Best::kLast) key = ~key & (~0U >> (32 - kBits));
  return key;
}
// kLast prefers the later of equals: it counts from the row's end.
__device__ __forceinline__ std::int64_t place_of(std::int64_t index, std::int64_t cols, Best best) {
  return best == Best::kLast ? cols - 1 - index : index;
}

// ---- a warp a row ----

constexpr int kChooseThreads = 128;
constexpr unsigned kTaken = ~0U;

// kEach: elements of a lane. For floats alone, whose keys of 32 bits are all below kTaken but for NaN.
template <class T, int kEach>
__global__ void __launch_bounds__(kChooseThreads) choose_rows(SelectArgs args, Result<T> result) {
  cuda::wait_turn();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t row =
      std::int64_t{blockIdx.x} * (kChooseThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= args.rows) return;
  const T* x = result.x + row * args.cols;
  const int cols = static_cast<int>(args.cols), count = static_cast<int>(args.count);
  unsigned rank[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = j * kWarp + lane;
    // kTaken itself is what NaN has in 32 bits, and all that 16 bits have is less.
    rank[j] = kTaken;
    if (i < cols) rank[j] = min(rank_of(x[i], Best::kLargest), kTaken - 1);
  }
  unsigned best = 0;
  int at = 0;
  const auto look = [&] {  // the lane's best
    best = rank[0];
    at = 0;
#pragma unroll
    for (int j = 1; j < kEach; ++j) {
      if (rank[j] < best) {
        best = rank[j];
        at = j;
      }
    }
  };
  look();
  unsigned mine = 0;
  for (int k = 0; k < count; ++k) {
    const unsigned all = __reduce_min_sync(cuda::kAll, best);
    const unsigned own = static_cast<unsigned>(at * kWarp + lane);
    const unsigned first = __reduce_min_sync(cuda::kAll, best == all ? own : ~0U);
    if (lane == k) mine = first;
    if (own == first) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (j == at) rank[j] = kTaken;
      }
      look();
    }
  }
  if (lane < count) result.put(row, lane, mine);
}

// ---- a block a row ----

constexpr int kThreads = 512;  // and two blocks side by side: one reads while the other sorts
constexpr int kWarps = kThreads / kWarp;
constexpr int kSamples = 4;  // of a thread
constexpr int kRounds = 4;   // elements of a thread that are put in place together
constexpr int kAhead = 4;    // loads of a thread under way
constexpr int kRoom = 8192;  // entries in shared memory
constexpr int kDigits = 256;
constexpr int kSortedWhole = 4096;  // columns up to which rows are sorted instead

struct Shared {
  Entry last;                // of the best
  unsigned found;            // entries, also those that there was no room for
  unsigned counts[kDigits];  // of a digit
  unsigned digit, before;    // of the last of the best, and how many are before it
  unsigned sums[kWarps];
};

// Calls each(value, index) for every element: 16 bytes at a time but for the ends.
template <class T, class Each>
__device__ __forceinline__ void for_row(const T* x, std::int64_t cols, const Each& each) {
  constexpr int kPack = cuda::kPack<T>;
  const std::int64_t past =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(x) % 16 / sizeof(T));
  const std::int64_t head = past == 0 ? 0 : min(cols, std::int64_t{kPack} - past);
  const std::int64_t packs = (cols - head) / kPack;
  for (std::int64_t i = threadIdx.x; i < head; i += kThreads) each(x[i], i);
  for (std::int64_t p = threadIdx.x; p < packs; p += kThreads * kAhead) {
    uint4 bits[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t pack = p + a * kThreads;
      if (pack < packs) bits[a] = __ldg(reinterpret_cast<const uint4*>(x + head + pack * kPack));
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t pack = p + a * kThreads;
      if (pack >= packs) continue;
      const unsigned words[4] = {bits[a].x, bits[a].y, bits[a].z, bits[a].w};
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        T v;
        if constexpr (sizeof(T) == 2) {
          v.bits = static_cast<std::uint16_t>(words[k / 2] >> (k % 2 * 16));
        } else {
          v = __builtin_bit_cast(T, words[k]);
        }
        each(v, head + pack * kPack + k);
      }
    }
  }
  for (std::int64_t i = head + packs * kPack + threadIdx.x; i < cols; i += kThreads) each(x[i], i);
}

// A rank that about 2.5 · count elements have or are better than.
template <class T>
__device__ unsigned guess(const SelectArgs& args, const T* x) {
  constexpr int kRuns = kSamples * kWarps;  // of 32 neighbours
  unsigned sample[kSamples];
  const std::int64_t step = (args.cols - kWarp) / (kRuns - 1);
#pragma unroll
  for (int s = 0; s < kSamples; ++s) {
    const std::int64_t run = std::int64_t{s} * kWarps + threadIdx.x / kWarp;
    sample[s] = rank_of(x[run * step + threadIdx.x % kWarp], args.best);
  }
  // The fewest that count in the sample; 12 more against bad luck, about 1 in a million.
  const int wanted = static_cast<int>(kSamples * kThreads * 5 * args.count / (2 * args.cols)) + 12;
  unsigned limit = 0;  // the smallest that wanted of the sample are not above
  for (unsigned bit = 1U << (8 * sizeof(KeyOf<T>) - 1); bit != 0; bit /= 2) {
    const unsigned most = limit + bit - 1;
    int have = 0;
#pragma unroll
    for (int s = 0; s < kSamples; ++s) have += __syncthreads_count(sample[s] <= most ? 1 : 0);
    if (have < wanted) limit += bit;
  }
  return limit;
}

template <class T>
__device__ __forceinline__ void collect(const SelectArgs& args, T v, std::int64_t i, Shared& shared,
                                        Entry* room) {
  const unsigned at = atomicAdd(&shared.found, 1U);
  if (at < kRoom) {
    room[at] = static_cast<Entry>(rank_of(v, args.best)) << 32U |
               static_cast<unsigned>(place_of(i, args.cols, args.best));
  }
}

// The block's threads have kThreads · kRounds elements, a warp 32 · kRounds neighbours and a lane each 32nd of them:
// where a thread's first is, how many with the flag come before each of them, and how many there are.
__device__ __forceinline__ int first_of_thread() {
  return static_cast<int>(threadIdx.x) / kWarp * kWarp * kRounds +
         static_cast<int>(threadIdx.x) % kWarp;
}
__device__ __forceinline__ unsigned flags_before(const bool (&flag)[kRounds],
                                                 unsigned (&before)[kRounds], unsigned* sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  unsigned votes[kRounds];
  unsigned of_warp = 0;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    votes[r] = __ballot_sync(cuda::kAll, flag[r]);
    of_warp += static_cast<unsigned>(__popc(votes[r]));
  }
  if (lane == 0) sums[warp] = of_warp;
  __syncthreads();
  const unsigned own = lane < kWarps ? sums[lane] : 0;
  unsigned sum = own;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const unsigned left = __shfl_up_sync(cuda::kAll, sum, step);
    if (lane >= step) sum += left;
  }
  unsigned next = __shfl_sync(cuda::kAll, sum - own, warp);
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    before[r] = next + static_cast<unsigned>(__popc(votes[r] & ((1U << lane) - 1)));
    next += static_cast<unsigned>(__popc(votes[r]));
  }
  __syncthreads();  // sums may be written again
  return __shfl_sync(cuda::kAll, sum, kWarp - 1);
}

// The best by their digits: exactly count entries in room.
template <class T>
__device__ void collect_exactly(const SelectArgs& args, const T* x, Shared& shared, Entry* room) {
  const int t = static_cast<int>(threadIdx.x);
  unsigned last = 0;                                 // of the best: the digits known so far
  auto missing = static_cast<unsigned>(args.count);  // among those that begin with these digits
  for (int shift = 8 * static_cast<int>(sizeof(KeyOf<T>)) - 8; shift >= 0; shift -= 8) {
    __syncthreads();
    if (t < kDigits) shared.counts[t] = 0;
    __syncthreads();
    for_row(x, args.cols, [&](T v, std::int64_t) {
      const unsigned rank = rank_of(v, args.best);
      if (((rank ^ last) >> shift) < kDigits) atomicAdd(&shared.counts[rank >> shift & 255U], 1U);
    });
    __syncthreads();
    if (t == 0) {
      unsigned before = 0, digit = 0;
      while (before + shared.counts[digit] < missing) before += shared.counts[digit++];
      shared.digit = digit;
      shared.before = before;
    }
    __syncthreads();
    last |= shared.digit << shift;
    missing -= shared.before;
  }
  if (t == 0) shared.found = 0;
  __syncthreads();
  for_row(x, args.cols, [&](T v, std::int64_t i) {
    if (rank_of(v, args.best) < last) collect(args, v, i, shared, room);
  });
  // Of its equals those that come first.
  unsigned have = 0;
  for (std::int64_t begin = 0; have < missing; begin += kThreads * kRounds) {
    bool equal[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const std::int64_t place = begin + first_of_thread() + r * kWarp;
      equal[r] =
          place < args.cols && rank_of(x[place_of(place, args.cols, args.best)], args.best) == last;
    }
    unsigned before[kRounds];
    const unsigned all = flags_before(equal, before, shared.sums);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (!equal[r] || have + before[r] >= missing) continue;
      const std::int64_t place = begin + first_of_thread() + r * kWarp;
      const std::int64_t i = place_of(place, args.cols, args.best);
      collect(args, x[i], i, shared, room);
    }
    have += all;
  }
  __syncthreads();
}

// Sorts the entries in room and writes the first count of them.
template <class T, int kItems>
__device__ __forceinline__ void finish(const SelectArgs& args, const Result<T>& result,
                                       std::int64_t row, int have, Entry* room, Shared& shared) {
  Entry e[kItems];
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int i = j * kThreads + static_cast<int>(threadIdx.x);
    e[j] = i < have ? room[i] : kLastEntry;
  }
  __syncthreads();
  block_sort(e, room);
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const std::int64_t at = std::int64_t{threadIdx.x} * kItems + j;
    if (at >= args.count) continue;
    const bool last = args.best == Best::kLast;
    const std::int64_t index = place_of(static_cast<unsigned>(e[j]), args.cols, args.best);
    result.put(row, args.whole != 0 && last ? args.cols - 1 - at : at, static_cast<Entry>(index));
    if (at == args.count - 1) shared.last = e[j];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) select_rows(SelectArgs args, Result<T> result) {
  cuda::wait_turn();
  extern __shared__ Entry room[];
  __shared__ Shared shared;
  const std::int64_t row = blockIdx.x;
  const T* x = result.x + row * args.cols;
  const unsigned limit = args.cols > kRoom ? guess(args, x) : ~0U;
  if (threadIdx.x == 0) shared.found = 0;
  __syncthreads();
  for_row(x, args.cols, [&](T v, std::int64_t i) {
    if (rank_of(v, args.best) <= limit) collect(args, v, i, shared, room);
  });
  __syncthreads();
  if (shared.found < args.count || shared.found > kRoom) {
    __syncthreads();
    collect_exactly(args, x, shared, room);
  }
  const int have = static_cast<int>(shared.found);
  if (have <= 4 * kThreads) {
    finish<T, 4>(args, result, row, have, room, shared);
  } else if (have <= 8 * kThreads) {
    finish<T, 8>(args, result, row, have, room, shared);
  } else {
    finish<T, 16>(args, result, row, have, room, shared);
  }
  if (args.whole == 0) return;
  // All that is worse than the last of the best, in the order of the indices.
  __syncthreads();
  const Entry last = shared.last;
  std::int64_t to = args.best == Best::kFirst ? args.count : 0;
  for (std::int64_t begin = 0; begin < args.cols; begin += kThreads * kRounds) {
    const std::int64_t first = begin + first_of_thread();
    bool worse[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const std::int64_t i = first + r * kWarp;
      worse[r] = i < args.cols && (static_cast<Entry>(rank_of(x[i], args.best)) << 32U |
                                   static_cast<unsigned>(place_of(i, args.cols, args.best))) > last;
    }
    unsigned before[kRounds];
    const unsigned all = flags_before(worse, before, shared.sums);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (worse[r]) result.put(row, to + before[r], static_cast<Entry>(first + r * kWarp));
    }
    to += all;
  }
}

template <class T>
void select_fwd(const KernelCall& call) {
  const auto& args = call.as<SelectArgs>();
  const Result<T> result{call.input<T>(0), call.output<T>(0), call.output<unsigned>(1), args.cols,
                         args.whole != 0 ? args.cols : args.count};
  auto* stream = static_cast<cudaStream_t>(call.queue);
  if (args.best == Best::kLargest && args.cols <= kSortedWhole) {
    if constexpr (is_float(kDType<T>)) {
      if (args.cols <= 1024 && args.count <= kWarp) {
        const auto kernel = args.cols <= 128   ? choose_rows<T, 4>
                            : args.cols <= 512 ? choose_rows<T, 16>
                                               : choose_rows<T, 32>;
        cuda::launch(kernel, cuda::blocks_for(args.rows, kChooseThreads / kWarp), kChooseThreads, 0,
                     1, stream, args, result);
        return;
      }
    }
    return launch_sort_rows(args.rows, true, result, stream);
  }
  cuda::launch(select_rows<T>, args.rows, kThreads, kRoom * static_cast<int>(sizeof(Entry)), 1,
               stream, args, result);
}

// ---- gradient ----

constexpr int kMoveThreads = 256;

template <class T>
__global__ void __launch_bounds__(kMoveThreads)
    move_back(SortBackwardArgs args, const T* dy, const unsigned* indices, T* dx) {
  cuda::wait_turn();
  const std::int64_t i = std::int64_t{blockIdx.x} * kMoveThreads + threadIdx.x;
  if (i >= args.rows * args.count) return;
  dx[i / args.count * args.cols + indices[i]] = dy[i];
}

template <class T>
void sort_bwd(const KernelCall& call) {
  const auto& args = call.as<SortBackwardArgs>();
  auto* stream = static_cast<cudaStream_t>(call.queue);
  cuda::launch(move_back<T>, cuda::blocks_for(args.rows * args.count, kMoveThreads), kMoveThreads,
               0, 1, stream, args, call.input<T>(0), call.input<unsigned>(1), call.output<T>(0));
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCuda, "select_fwd_" + type, select_fwd<T>);
  if constexpr (is_float(kDType<T>)) registry.add(Backend::kCuda, "sort_bwd_" + type, sort_bwd<T>);
}

}  // namespace

void register_sort_select_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  add_kernels<std::int32_t>(registry);
  add_kernels<std::uint32_t>(registry);
}

}  // namespace mlxtape::ops
