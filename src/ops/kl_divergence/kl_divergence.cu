// CUDA kernels of kl_divergence (formula and layout: mlxtape/ops/kl_divergence.h).
//
// Long rows of one type are kept in shared memory (kl_divergence_ring.cuh). All others, short, ragged or of two
// types, are walked twice by a block or a cluster of blocks. From saved sums the gradient is element by
// element. A stored teacher: one kernel makes its sums and gathers the student's logits at its
// indices, one walks the student's rows as if the teacher had nothing, one puts right the gradient at the
// indices from what was gathered, for the rows may have been overwritten in place.
#include <cuda_runtime.h>

#include "backends/cuda/device/kept_rows.cuh"
#include "backends/cuda/device/launch.cuh"
#include "backends/cuda/device/rows.cuh"
#include "kl_divergence_args.h"
#include "kl_divergence_ring.cuh"
#include "kl_divergence_rows.cuh"
#include "mlxtape/core/registry.h"

namespace mlxtape::ops {

namespace {

// ---- any row: walked twice ----

constexpr int kWalkBlocks = 8;                // of a cluster
constexpr std::int64_t kShortWalk = 1 << 12;  // columns up to which a small block does
constexpr std::int64_t kLongWalk = 1 << 16;   // columns from which on a cluster walks together
constexpr int kBatch = 4;                     // elements of a thread that are under way at once

// The columns of a thread: first, first + step and so on.
template <int kThreads, int kCluster>
struct Walk {
  static constexpr std::int64_t kStep = kThreads * kCluster;
  std::int64_t row, first;

  __device__ Walk()
      : row(blockIdx.x / kCluster), first(blockIdx.x % kCluster * kThreads + threadIdx.x) {}
};

// A row's sums in every thread of its blocks.
template <int kThreads, int kCluster>
__device__ __forceinline__ Sums join_blocks(Sums sums, float inverse,
                                            cuda::Gathering<kCluster, kSums>& meeting,
                                            float (*room)[kThreads / kWarp]) {
  sums.join_lanes(inverse);
  if (threadIdx.x % kWarp == 0) leave(sums, room, static_cast<int>(threadIdx.x) / kWarp);
  __syncthreads();
  sums = join_room(room, inverse);
  if constexpr (kCluster > 1) {
    meeting.tell({sums.m_q, sums.q, sums.m_p, sums.p, sums.cross});
    sums = join_room(meeting.told, inverse);
  }
  return sums;
}

template <class Q, class P, int kThreads, int kCluster>
__global__ void __launch_bounds__(kThreads) forward_walked(Rows<Q, P> rows) {
  __shared__ float room[kSums][kThreads / kWarp];
  __shared__ cuda::Gathering<kCluster, kSums> meeting;
  cuda::wait_turn();
  meeting.open();
  using W = Walk<kThreads, kCluster>;
  const W walk;
  const KlDivergenceArgs& args = rows.args;
  const Q* q = rows.q + walk.row * args.cols;
  const P* p = rows.p + walk.row * args.cols;
  const float w = rows.weight[walk.row];
  const Exp<Q, P> e(args.inverse);
  Sums sums;
  for (std::int64_t c = walk.first; w != 0 && c < args.cols; c += kBatch * W::kStep) {
    float vq[kBatch];
    float vp[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const std::int64_t at = c + k * W::kStep;
      vq[k] = at < args.cols ? widen(q[at]) : -INFINITY;
      vp[k] = at < args.cols ? widen(p[at]) : -INFINITY;
    }
    sums.add(e, vq, vp);
  }
  sums = join_blocks<kThreads, kCluster>(sums, args.inverse, meeting, room);
  if (walk.first == 0) rows.write_loss(walk.row, w, sums);
  if (rows.dq == nullptr) return;
  Q* dq = rows.dq + walk.row * args.cols;
  const Gradient g(args, w * *rows.scale, sums.m_q, sums.q, sums.m_p, sums.p, e.kConstant);
  for (std::int64_t c = walk.first; c < args.cols; c += W::kStep) {
    dq[c] = narrow<Q>(w != 0 ? g.at(e, widen(q[c]), widen(p[c])) : 0);
  }
}

// ---- the gradient from saved sums ----

constexpr int kThreads = 256;
constexpr int kEach = 4;  // packs or elements a thread

// A block: kThreads·kEach packs of a row, or fewer at its end; without packs, elements. Without p the
// student's share alone.
template <class Q, class P, bool kPacked>
__global__ void __launch_bounds__(kThreads)
    backward(Rows<Q, P> rows, std::int64_t parts, const float* norm, const float* dloss) {
  cuda::wait_turn();
  constexpr int kWidth = kPacked ? kPack<Q> : 1;
  const KlDivergenceArgs& args = rows.args;
  const std::int64_t r = blockIdx.x / parts;
  const std::int64_t start = blockIdx.x % parts * kThreads * kEach * kWidth;
  const float w = rows.weight[r];
  const float* n = norm + 4 * r;
  const Exp<Q, P> e(args.inverse);
  const Gradient g(args, dloss[r * args.dloss_step] * w * *rows.scale, n[0], n[1], n[2], n[3],
                   e.kConstant);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const std::int64_t c =
        start + std::int64_t{k * kThreads + static_cast<int>(threadIdx.x)} * kWidth;
    if (c >= args.cols) break;
    const std::int64_t at = r * args.cols + c;
    if constexpr (kPacked) {
      float u[kPack<Q>];
      float v[kPack<Q>];
      cuda::unpack(w != 0 ? cuda::load_pack(rows.q + at) : Pack<Q>{}, u);
      if (rows.p != nullptr) cuda::unpack(w != 0 ? cuda::load_pack(rows.p + at) : Pack<P>{}, v);
#pragma unroll
      for (int i = 0; i < kPack<Q>; ++i) {
        const float own = e.times_constant(u[i] - g.m_q) * g.share_q;
        u[i] = w == 0 ? 0 : rows.p != nullptr ? g.at(e, u[i], v[i]) : own;
      }
      cuda::store_pack(cuda::pack_of<Q>(u), rows.dq + at);
    } else {
      float v = 0;
      if (w != 0 && rows.p != nullptr) {
        v = g.at(e, widen(rows.q[at]), widen(rows.p[at]));
      } else if (w != 0) {
        v = e.times_constant(widen(rows.q[at]) - g.m_q) * g.share_q;
      }
      rows.dq[at] = narrow<Q>(v);
    }
  }
}

// ---- a stored teacher ----

constexpr int kTopThreads = 128;

// The arrays of a stored teacher.
template <class P>
struct Top {
  const P* values;             // [R, k]
  const std::uint32_t* index;  // [R, k]
  float* sums;                 // [R, 4]: of the teacher m, Σ exp, cross, and nothing
  float* student;              // [R, k]: its logits at the indices
};

// One block a row.
template <class Q, class P>
__global__ void __launch_bounds__(kTopThreads) top_sums(Rows<Q, P> rows, Top<P> top) {
  __shared__ float room[kSums][kTopThreads / kWarp];
  __shared__ cuda::Gathering<1, kSums> meeting;
  cuda::wait_turn();
  const KlDivergenceArgs& args = rows.args;
  const std::int64_t r = blockIdx.x;
  const Exp<float, P> e(args.inverse);
  const bool counts = rows.weight[r] != 0;
  Sums sums;
  for (std::int64_t j = threadIdx.x; counts && j < args.top; j += kTopThreads) {
    const std::int64_t at = r * args.top + j;
    const std::int64_t c = top.index[at];
    const float p[1] = {widen(top.values[at])};
    const float q[1] = {c < args.cols ? widen(rows.q[r * args.cols + c])
                                      : __int_as_float(0x7fc00000)};
    top.student[at] = q[0];
    sums.add(e, q, p);
    if (c >= args.cols) sums.p = q[0];  // NaN, which no later scaling takes back
  }
  sums = join_blocks<kTopThreads, 1>(sums, args.inverse, meeting, room);
  if (threadIdx.x == 0) {
    top.sums[4 * r] = sums.m_p;
    top.sums[4 * r + 1] = sums.p;
    top.sums[4 * r + 2] = sums.cross;
  }
}

// The rows of a student whose teacher has nothing: sums, loss and dq = c·softmax.
template <class Q, bool kPacked, int kThreads, int kCluster>
__global__ void __launch_bounds__(kThreads) student_walked(Rows<Q, Q> rows, const float* top_sums) {
  constexpr int kWidth = kPacked ? kPack<Q> : 1;
  __shared__ float room[kSums][kThreads / kWarp];
  __shared__ cuda::Gathering<kCluster, kSums> meeting;
  cuda::wait_turn();
  meeting.open();
  using W = Walk<kThreads, kCluster>;
  const W walk;
  const KlDivergenceArgs& args = rows.args;
  const Q* q = rows.q + walk.row * args.cols;
  const float w = rows.weight[walk.row];
  const Exp<Q, Q> e(args.inverse);
  const std::int64_t count = args.cols / kWidth;
  const auto read = [&](std::int64_t i, float(&v)[kWidth]) {
    if constexpr (kPacked) {
      cuda::unpack(cuda::load_own_pack(q + i * kWidth), v);
    } else {
      v[0] = widen(q[i]);
    }
  };
  float v[kWidth];
  Sums sums;
  for (std::int64_t i = walk.first; w != 0 && i < count; i += W::kStep) {
    read(i, v);
    float top = sums.m_q;
#pragma unroll
    for (const float z : v) top = max_nan(top, z);
    const float reference = finite_reference(top);
    sums.q *= e(sums.m_q - reference);
#pragma unroll
    for (const float z : v) sums.q += e(z - reference);
    sums.m_q = top;
  }
  sums = join_blocks<kThreads, kCluster>(sums, args.inverse, meeting, room);
  sums.m_p = top_sums[4 * walk.row];
  sums.p = top_sums[4 * walk.row + 1];
  sums.cross = top_sums[4 * walk.row + 2];
  if (walk.first == 0) rows.write_loss(walk.row, w, sums);
  if (rows.dq == nullptr) return;
  Q* dq = rows.dq + walk.row * args.cols;
  const Gradient g(args, w * *rows.scale, sums.m_q, sums.q, sums.m_p, sums.p, e.kConstant);
  for (std::int64_t i = walk.first; i < count; i += W::kStep) {
    if (w != 0) read(i, v);
#pragma unroll
    for (float& z : v) z = w != 0 ? e.times_constant(z - g.m_q) * g.share_q : 0;
    if constexpr (kPacked) {
      cuda::store_pack(cuda::pack_of<Q>(v), dq + i * kWidth);
    } else {
      dq[i] = narrow<Q>(v[0]);
    }
  }
}

// dq at the indices. dloss null: 1.
template <class Q, class P>
__global__ void __launch_bounds__(kTopThreads)
    top_gradient(Rows<Q, P> rows, Top<P> top, const float* norm, const float* dloss) {
  cuda::wait_turn();
  const KlDivergenceArgs& args = rows.args;
  const std::int64_t r = blockIdx.x;
  const float w = rows.weight[r];
  if (w == 0) return;
  const float upstream = dloss == nullptr ? 1 : dloss[r * args.dloss_step];
  const float* n = norm + 4 * r;
  const Exp<float, P> e(args.inverse);
  const Gradient g(args, upstream * w * *rows.scale, n[0], n[1], n[2], n[3], e.kConstant);
  for (std::int64_t j = threadIdx.x; j < args.top; j += kTopThreads) {
    const std::int64_t at = r * args.top + j;
    const std::int64_t c = top.index[at];
    if (c >= args.cols) continue;
    const float q = top.student != nullptr ? top.student[at] : widen(rows.q[r * args.cols + c]);
    rows.dq[r * args.cols + c] = narrow<Q>(g.at(e, q, widen(top.values[at])));
  }
}

// ---- launch ----

// Calls body(zero of the teacher's type).
template <class Body>
void with_teacher(KlDivergenceTeacher type, const Body& body) {
  switch (type) {
    case kKlTeacherF32: return body(float{});
    case kKlTeacherF16: return body(F16{});
    case kKlTeacherBF16: return body(BF16{});
  }
}

template <class Q, class P>
Rows<Q, P> rows_of(const KernelCall& call) {
  return {call.as<KlDivergenceArgs>(), call.input<Q>(0),     call.input<P>(1),
          call.input<float>(2),        call.input<float>(3), call.output<float>(0),
          call.output<float>(1),       call.output<Q>(2)};
}

// Calls body(first row, rows, threads, blocks each as constants).
template <class Body>
void in_walks(const KlDivergenceArgs& args, const Body& body) {
  const auto walk = [&](auto threads, auto cluster) {
    cuda::in_grids(args.rows, cluster(), [&](std::int64_t first, std::int64_t count) {
      body(first, count, threads, cluster);
    });
  };
  using std::integral_constant;
  if (args.cols <= kShortWalk) {
    return walk(integral_constant<int, 128>(), integral_constant<int, 1>());
  }
  if (args.cols < kLongWalk) {
    return walk(integral_constant<int, 512>(), integral_constant<int, 1>());
  }
  walk(integral_constant<int, 512>(), integral_constant<int, kWalkBlocks>());
}

// False where the device has no room for it.
template <class T, int kBlocks, bool kGrad>
bool launch_ring(const Rows<T, T>& rows, cudaStream_t stream) {
  const auto kernel = forward_ring<T, kBlocks, kGrad>;
  constexpr int kBytes = kRingBytes<kBlocks>;
  static_assert(kBytes <= cuda::kSharedBytes);
  static const int clusters = kBlocks == 1
                                  ? cuda::kMultiprocessors
                                  : cuda::clusters_at_once(kernel, kBlocks, kRingThreads, kBytes);
  if (clusters == 0) return false;
  cuda::launch(kernel, std::min<std::int64_t>(rows.args.rows, clusters) * kBlocks, kRingThreads,
               kBytes, kBlocks, stream, rows);
  return true;
}

template <class T>
bool in_ring(const Rows<T, T>& rows, cudaStream_t stream) {
  const std::int64_t packs = rows.args.cols / kPack<T>;
  if (rows.args.cols % kPack<T> != 0 || packs < kConsumers || !cuda::is_aligned(rows.q) ||
      !cuda::is_aligned(rows.p) || !cuda::is_aligned(rows.dq)) {
    return false;
  }
  const auto run = [&]<int kBlocks>(std::integral_constant<int, kBlocks>) {
    return rows.dq != nullptr ? launch_ring<T, kBlocks, true>(rows, stream)
                              : launch_ring<T, kBlocks, false>(rows, stream);
  };
  // As few blocks as leave a third of the ring for the row to come.
  constexpr int kMost = kSlots * 2 / 3;
  if (slots_for(packs, 1) <= kMost) return run(std::integral_constant<int, 1>());
  if (slots_for(packs, 2) <= kMost) return run(std::integral_constant<int, 2>());
  if (slots_for(packs, 4) <= kMost) return run(std::integral_constant<int, 4>());
  if (slots_for(packs, 8) <= kSlots) return run(std::integral_constant<int, 8>());
  return false;
}

template <class Q>
void kl_divergence_fwd(const KernelCall& call) {
  const auto& args = call.as<KlDivergenceArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  with_teacher(args.teacher, [&]<class P>(P) {
    const Rows<Q, P> rows = rows_of<Q, P>(call);
    if constexpr (std::is_same_v<Q, P>) {
      if (in_ring(rows, stream)) return;
    }
    in_walks(args, [&](std::int64_t first, std::int64_t count, auto threads, auto cluster) {
      cuda::launch(forward_walked<Q, P, threads(), cluster()>, count * cluster(), threads(), 0,
                   cluster(), stream, rows.from(first, count));
    });
  });
}

// p null: the student's share alone.
template <class Q, class P>
void launch_backward(const Rows<Q, P>& rows, const float* norm, const float* dloss,
                     cudaStream_t stream) {
  const KlDivergenceArgs& args = rows.args;
  bool whole = false;
  auto kernel = backward<Q, P, false>;
  if constexpr (std::is_same_v<Q, P>) {
    whole = args.cols % kPack<Q> == 0 && cuda::is_aligned(rows.q) && cuda::is_aligned(rows.p) &&
            cuda::is_aligned(rows.dq);
    if (whole) kernel = backward<Q, P, true>;
  }
  const std::int64_t parts =
      cuda::blocks_for(args.cols, std::int64_t{kThreads} * kEach * (whole ? kPack<Q> : 1));
  cuda::in_grids(args.rows, parts, [&](std::int64_t first, std::int64_t count) {
    cuda::launch(kernel, count * parts, kThreads, 0, 1, stream, rows.from(first, count), parts,
                 norm + 4 * first, dloss + first * args.dloss_step);
  });
}

template <class Q, class P>
Rows<Q, P> backward_rows_of(const KernelCall& call, const P* p) {
  return {call.as<KlDivergenceArgs>(), call.input<Q>(0), p,       call.input<float>(2),
          call.input<float>(3),        nullptr,          nullptr, call.output<Q>(0)};
}

template <class Q>
void kl_divergence_bwd(const KernelCall& call) {
  with_teacher(call.as<KlDivergenceArgs>().teacher, [&]<class P>(P) {
    launch_backward(backward_rows_of<Q, P>(call, call.input<P>(1)), call.input<float>(4),
                    call.input<float>(5), static_cast<cudaStream_t>(call.queue));
  });
}

// ---- a stored teacher ----

// The teacher's sums, norm where the caller has no room for it, the student's logits at the indices.
std::size_t top_workspace(const void* args) {
  const auto& a = *static_cast<const KlDivergenceArgs*>(args);
  return static_cast<std::size_t>(a.rows * (4 + 4 + a.top)) * sizeof(float);
}

template <class Q>
void kl_divergence_top_fwd(const KernelCall& call) {
  const auto& args = call.as<KlDivergenceArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  auto* sums = static_cast<float*>(call.workspace);  // [R, 4]
  Rows<Q, Q> student = rows_of<Q, Q>(call);
  student.p = nullptr;
  if (student.norm == nullptr) student.norm = sums + 4 * args.rows;
  with_teacher(args.teacher, [&]<class P>(P) {
    Rows<Q, P> rows = rows_of<Q, P>(call);
    rows.p = nullptr;
    const Top<P> top{call.input<P>(1), call.input<std::uint32_t>(4), sums, sums + 8 * args.rows};
    cuda::launch(top_sums<Q, P>, args.rows, kTopThreads, 0, 1, stream, rows, top);
    const bool whole =
        args.cols % kPack<Q> == 0 && cuda::is_aligned(student.q) && cuda::is_aligned(student.dq);
    in_walks(args, [&](std::int64_t first, std::int64_t count, auto threads, auto cluster) {
      const auto kernel = whole ? student_walked<Q, true, threads(), cluster()>
                                : student_walked<Q, false, threads(), cluster()>;
      cuda::launch(kernel, count * cluster(), threads(), 0, cluster(), stream,
                   student.from(first, count), sums + 4 * first);
    });
    if (rows.dq == nullptr) return;
    cuda::launch(top_gradient<Q, P>, args.rows, kTopThreads, 0, 1, stream, rows, top, student.norm,
                 static_cast<const float*>(nullptr));
  });
}

template <class Q>
void kl_divergence_top_bwd(const KernelCall& call) {
  const auto& args = call.as<KlDivergenceArgs>();
  const auto stream = static_cast<cudaStream_t>(call.queue);
  const auto* norm = call.input<float>(4);   // [R, 4]
  const auto* dloss = call.input<float>(5);  // [R] or [1]
  launch_backward(backward_rows_of<Q, Q>(call, nullptr), norm, dloss, stream);
  with_teacher(args.teacher, [&]<class P>(P) {
    const Top<P> top{call.input<P>(1), call.input<std::uint32_t>(6), nullptr, nullptr};
    cuda::launch(top_gradient<Q, P>, args.rows, kTopThreads, 0, 1, stream,
                 backward_rows_of<Q, P>(call, nullptr), top, norm, dloss);
  });
}

template <class Q>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<Q>);
  registry.add(Backend::kCuda, "kl_divergence_fwd_" + type, kl_divergence_fwd<Q>);
  registry.add(Backend::kCuda, "kl_divergence_bwd_" + type, kl_divergence_bwd<Q>);
  registry.add(Backend::kCuda, "kl_divergence_top_fwd_" + type, kl_divergence_top_fwd<Q>,
               top_workspace);
  registry.add(Backend::kCuda, "kl_divergence_top_bwd_" + type, kl_divergence_top_bwd<Q>);
}

}  // namespace

void register_kl_divergence_cuda(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops
