// CPU kernels of kl_divergence (formula and layout: mlxtape/ops/kl_divergence.h).
//
// Rows over threads, each in blocks with a reference for the student's and one for the teacher's logits
// (backends/cpu/device/blocks-inl.h): one pass sums, a second, which finds the rows in the cache, makes
// the exponentials again for the gradient. A stored teacher's k elements are put right block by block.
// Bound by the exponentials.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kl_divergence/kl_divergence.cpu.cpp"
#include <hwy/foreach_target.h>

#include "backends/cpu/device/blocks-inl.h"
#include "backends/cpu/device/simd-inl.h"
#include "kl_divergence_args.h"
#include "mlxtape/core/registry.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// The exponential that either type's results ask for.
template <class Q, class P>
using ExpType = std::conditional_t<sizeof(Q) == 4 || sizeof(P) == 4, float, BF16>;

// What a block, or a row, knows: cross = Σ exp((p − m_p)/T)·(p − q).
struct Part {
  BlockSum q, p;
  float cross;
};

// dq[v] = exp((q − m_q)/T)·share_q − exp((p − m_p)/T)·share_p
struct Gradient {
  float m_q, share_q, m_p, share_p;
};

// c: dloss·w, divided by Σ w for a mean.
Gradient gradient_of(const KlDivergenceArgs& args, float c, const BlockSum& q, const BlockSum& p) {
  c *= args.factor * args.inverse;
  return {finite_reference(q.m), c / q.sum, finite_reference(p.m), c / p.sum};
}

// The loss of a row before its weight.
float divergence(const KlDivergenceArgs& args, const Part& row) {
  const float apart = row.cross / row.p.sum + (row.q.m - row.p.m);
  return args.factor * (args.inverse * apart + (std::log(row.q.sum) - std::log(row.p.sum)));
}

// Blocks in order, whatever thread made them.
Part join_parts(const Part* parts, std::int64_t count, float k) {
  Part row{{-INFINITY, 0}, {-INFINITY, 0}, 0};
  for (std::int64_t b = 0; b < count; ++b) {
    row.q.m = std::max(row.q.m, parts[b].q.m);
    row.p.m = std::max(row.p.m, parts[b].p.m);
  }
  for (std::int64_t b = 0; b < count; ++b) {
    const float to_row = std::exp((parts[b].p.m - row.p.m) * k);
    row.q.sum += parts[b].q.sum * std::exp((parts[b].q.m - row.q.m) * k);
    row.p.sum += parts[b].p.sum * to_row;
    if (to_row != 0) row.cross += parts[b].cross * to_row;  // cross may be infinite
  }
  row.q.sum = at_least_one(row.q.sum);
  row.p.sum = at_least_one(row.p.sum);
  return row;
}

// ---- the student alone ----

template <class Q>
HWY_INLINE float sum_scaled(const Q* q, std::size_t n, float m, float k) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  const VF vm = hn::Set(d, finite_reference(m)), vk = hn::Set(d, k);
  VF sum_a = hn::Zero(d), sum_b = sum_a;
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    VF a, b;
    load_pair(d, q + i, a, b);
    sum_a = hn::Add(sum_a, exp_for(d, Q(), hn::Mul(hn::Sub(a, vm), vk)));
    sum_b = hn::Add(sum_b, exp_for(d, Q(), hn::Mul(hn::Sub(b, vm), vk)));
  }
  for (std::size_t count; i < n; i += count) {
    count = std::min(lanes, n - i);
    const VF e = exp_for(d, Q(), hn::Mul(hn::Sub(load_n(d, q + i, count), vm), vk));
    sum_a = hn::Add(sum_a, hn::IfThenElseZero(hn::FirstN(d, count), e));
  }
  return sum_lanes(d, hn::Add(sum_a, sum_b));
}

template <class Q>
BlockSum student_block(const Q* q, std::size_t n, float k) {
  float m = reference(q, n);
  float sum = sum_scaled(q, n, m, k);
  if (!good_reference(m, sum)) {
    m = row_max(DF(), q, n);
    sum = sum_scaled(q, n, m, k);
  }
  return {m, sum};
}

template <bool kStream, class Q>
HWY_INLINE void write_student(const Q* q, Q* dq, std::size_t n, const Gradient& g, float k) {
  const DF d;
  const VF m = hn::Set(d, g.m_q), vk = hn::Set(d, k), share = hn::Set(d, g.share_q);
  const auto value = [&](VF v) HWY_ATTR {
    return hn::Mul(exp_for(d, Q(), hn::Mul(hn::Sub(v, m), vk)), share);
  };
  write_pairs<kStream>(
      d, dq, n,
      [&](std::size_t i, VF& a, VF& b) HWY_ATTR {
        load_pair(d, q + i, a, b);
        a = value(a);
        b = value(b);
      },
      [&](std::size_t i, std::size_t count) HWY_ATTR { return value(load_n(d, q + i, count)); });
}

// ---- both ----

template <class Q, class P>
HWY_INLINE Part sum_both(const Q* q, const P* p, std::size_t n, float m_q, float m_p, float k) {
  using E = ExpType<Q, P>;
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  const VF vm_q = hn::Set(d, finite_reference(m_q)), vm_p = hn::Set(d, finite_reference(m_p));
  const VF vk = hn::Set(d, k);
  VF sum_q = hn::Zero(d), sum_p = sum_q, cross = sum_q;
  const auto add = [&](VF vq, VF vp, hn::Mask<DF> in) HWY_ATTR {
    const VF e_q = exp_for(d, E(), hn::Mul(hn::Sub(vq, vm_q), vk));
    const VF e_p = hn::IfThenElseZero(in, exp_for(d, E(), hn::Mul(hn::Sub(vp, vm_p), vk)));
    sum_q = hn::Add(sum_q, hn::IfThenElseZero(in, e_q));
    sum_p = hn::Add(sum_p, e_p);
    // 0·∞ where the teacher has nothing; NaN is in the sums already.
    const VF term = hn::Mul(e_p, hn::Sub(vp, vq));
    cross = hn::Add(cross, hn::IfThenElseZero(hn::Gt(e_p, hn::Zero(d)), term));
  };
  const auto all = hn::FirstN(d, lanes);
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    VF q_a, q_b, p_a, p_b;
    if constexpr (std::is_same_v<Q, P>) {
      load_pair(d, q + i, q_a, q_b);
      load_pair(d, p + i, p_a, p_b);
    } else {  // pairs of two types come in two orders
      q_a = load(d, q + i), q_b = load(d, q + i + lanes);
      p_a = load(d, p + i), p_b = load(d, p + i + lanes);
    }
    add(q_a, p_a, all);
    add(q_b, p_b, all);
  }
  for (std::size_t count; i < n; i += count) {
    count = std::min(lanes, n - i);
    add(load_n(d, q + i, count), load_n(d, p + i, count), hn::FirstN(d, count));
  }
  return {{m_q, sum_lanes(d, sum_q)}, {m_p, sum_lanes(d, sum_p)}, sum_lanes(d, cross)};
}

template <class Q, class P>
Part both_block(const Q* q, const P* p, std::size_t n, float k) {
  Part part = sum_both(q, p, n, reference(q, n), reference(p, n), k);
  if (!good_reference(part.q.m, part.q.sum) || !good_reference(part.p.m, part.p.sum)) {
    part = sum_both(q, p, n, row_max(DF(), q, n), row_max(DF(), p, n), k);
  }
  return part;
}

template <bool kStream, class Q, class P>
HWY_INLINE void write_both(const Q* q, const P* p, Q* dq, std::size_t n, const Gradient& g,
                           float k) {
  using E = ExpType<Q, P>;
  const DF d;
  const VF m_q = hn::Set(d, g.m_q), m_p = hn::Set(d, g.m_p), vk = hn::Set(d, k);
  const VF share_q = hn::Set(d, g.share_q), share_p = hn::Set(d, g.share_p);
  const auto value = [&](VF vq, VF vp) HWY_ATTR {
    const VF e_q = exp_for(d, E(), hn::Mul(hn::Sub(vq, m_q), vk));
    const VF e_p = exp_for(d, E(), hn::Mul(hn::Sub(vp, m_p), vk));
    const VF v = hn::NegMulAdd(e_p, share_p, hn::Mul(e_q, share_q));
    // store_pair cannot have a NaN of f32's own.
    return sizeof(Q) == 2 && sizeof(P) == 4 ? plain_nan(d, v) : v;
  };
  const auto part = [&](std::size_t i, std::size_t count) HWY_ATTR {
    return value(load_n(d, q + i, count), load_n(d, p + i, count));
  };
  if constexpr (std::is_same_v<Q, P>) {
    write_pairs<kStream>(
        d, dq, n,
        [&](std::size_t i, VF& a, VF& b) HWY_ATTR {
          VF p_a, p_b;
          load_pair(d, q + i, a, b);
          load_pair(d, p + i, p_a, p_b);
          a = value(a, p_a);
          b = value(b, p_b);
        },
        part);
  } else {
    write_row<kStream>(
        d, dq, n, [&](std::size_t i) HWY_ATTR { return value(load(d, q + i), load(d, p + i)); },
        part);
  }
}

// ---- a teacher of k stored logits ----

template <class P>
struct Top {
  const P* values;             // [k]
  const std::uint32_t* index;  // [k]
  std::int64_t count;

  // The teacher's m and sum, and cross.
  template <class Q>
  void sum(const Q* q, std::int64_t cols, float k, Part& row) const {
    row.p = {-INFINITY, 0};
    row.cross = 0;
    for (std::int64_t j = 0; j < count; ++j) {
      row.p.m = std::max(row.p.m, static_cast<float>(values[j]));
    }
    for (std::int64_t j = 0; j < count; ++j) {
      const auto v = static_cast<float>(values[j]);
      const float e = std::exp((v - row.p.m) * k);
      row.p.sum += e;
      if (std::int64_t{index[j]} >= cols) {
        row.cross = std::numeric_limits<float>::quiet_NaN();
      } else if (e > 0) {
        row.cross += e * (v - static_cast<float>(q[index[j]]));
      }
    }
  }

  // One block of a row's gradient. q is read before dq, which may be the same, is written.
  template <bool kStream, class Q>
  void write(const Q* q, Q* dq, std::int64_t first, std::size_t n, const Gradient& g,
             float k) const {
    float q_at[kBlock];
    std::int64_t found = 0;
    const auto for_found = [&](const auto& body) {
      found = 0;
      for (std::int64_t j = 0; j < count && found < kBlock; ++j) {
        const std::int64_t at = std::int64_t{index[j]} - first;
        if (at >= 0 && at < static_cast<std::int64_t>(n)) body(j, found++);
      }
    };
    for_found([&](std::int64_t j, std::int64_t i) { q_at[i] = static_cast<float>(q[index[j]]); });
    write_student<kStream>(q + first, dq + first, n, g, k);
    if (kStream && found > 0) hwy::FlushStream();  // the elements are written again
    for_found([&](std::int64_t j, std::int64_t i) {
      const float e_q = std::exp((q_at[i] - g.m_q) * k);
      const float e_p = std::exp((static_cast<float>(values[j]) - g.m_p) * k);
      dq[index[j]] = Q(e_q * g.share_q - e_p * g.share_p);
    });
  }
};

// ---- rows ----

// The tensors of a call, in the order of its kernel.
template <class Q, class P>
struct Call {
  const KlDivergenceArgs& args;
  const Q* q;                  // [R, V]
  const P* p;                  // [R, V] or [R, k]
  const float* weight;         // [R]
  const float* scale;          // [1]
  const std::uint32_t* index;  // [R, k]

  Call(const KernelCall& call, std::size_t index_at)
      : args(call.as<KlDivergenceArgs>()),
        q(call.input<Q>(0)),
        p(call.input<P>(1)),
        weight(call.input<float>(2)),
        scale(call.input<float>(3)),
        index(args.top != 0 ? call.input<std::uint32_t>(index_at) : nullptr) {}

  Top<P> top(std::int64_t r) const { return {p + r * args.top, index + r * args.top, args.top}; }

  template <bool kStream>
  void write(std::int64_t r, std::int64_t b, Q* dq, const Gradient& g) const {
    const std::int64_t row = r * args.cols, first = b * kBlock;
    const std::size_t n = block_length(args.cols, b);
    if (weight[r] == 0) {
      std::fill_n(dq + row + first, n, Q());
    } else if (args.top != 0) {
      top(r).template write<kStream>(q + row, dq + row, first, n, g, args.inverse);
    } else {
      write_both<kStream>(q + row + first, p + row + first, dq + row + first, n, g, args.inverse);
    }
  }
};

template <bool kStream, class Q, class P>
void forward_rows(const KernelCall& raw) {
  const Call<Q, P> call(raw, 4);
  const KlDivergenceArgs& args = call.args;
  const std::int64_t cols = args.cols;
  auto* loss = raw.output<float>(0);  // [R]
  auto* norm = raw.output<float>(1);  // [R, 4] or null
  Q* dq = raw.output<Q>(2);           // [R, V] or null
  const auto part = [&](std::int64_t r, std::int64_t b) -> Part {
    if (call.weight[r] == 0) return {{0, 1}, {0, 1}, 0};
    const std::int64_t at = r * cols + b * kBlock;
    const std::size_t n = block_length(cols, b);
    if (args.top == 0) return both_block(call.q + at, call.p + at, n, args.inverse);
    return {student_block(call.q + at, n, args.inverse), {0, 1}, 0};
  };
  const auto whole = [&](std::int64_t r, const Part* parts) -> Gradient {
    Part row = join_parts(parts, ceil_div(cols, kBlock), args.inverse);
    if (args.top != 0 && call.weight[r] != 0) {
      call.top(r).sum(call.q + r * cols, cols, args.inverse, row);
    }
    loss[r] = call.weight[r] == 0 ? 0 : call.weight[r] * divergence(args, row);
    if (norm != nullptr) {
      norm[4 * r] = row.q.m, norm[4 * r + 1] = row.q.sum;
      norm[4 * r + 2] = row.p.m, norm[4 * r + 3] = row.p.sum;
    }
    return gradient_of(args, call.weight[r] * *call.scale, row.q, row.p);
  };
  const auto write = [&](std::int64_t r, std::int64_t b, const Gradient& g) {
    if (dq != nullptr) call.template write<kStream>(r, b, dq, g);
  };
  const std::int64_t row_bytes = cols * static_cast<std::int64_t>(2 * sizeof(Q) + sizeof(P));
  rows_in_blocks<Part>(args.rows, cols, row_bytes, part, whole, write);
}

template <bool kStream, class Q, class P>
void backward_rows(const KernelCall& raw) {
  const Call<Q, P> call(raw, 6);
  const KlDivergenceArgs& args = call.args;
  const auto* norm = raw.input<float>(4);   // [R, 4]
  const auto* dloss = raw.input<float>(5);  // [R] or [1]
  Q* dq = raw.output<Q>(0);                 // [R, V]
  const std::int64_t count = ceil_div(args.cols, kBlock);
  const std::int64_t each =
      ceil_div(cpu::kTaskBytes,
               std::min(args.cols, kBlock) * static_cast<std::int64_t>(2 * sizeof(Q) + sizeof(P)));
  parallel_for(ceil_div(args.rows * count, each), [&](std::int64_t task) {
    const std::int64_t end = std::min(args.rows * count, (task + 1) * each);
    for (std::int64_t i = task * each; i < end; ++i) {
      const std::int64_t r = i / count;
      const float c = dloss[r * args.dloss_step] * call.weight[r] * *call.scale;
      const float* of_row = norm + 4 * r;
      call.template write<kStream>(
          r, i % count, dq, gradient_of(args, c, {of_row[0], of_row[1]}, {of_row[2], of_row[3]}));
    }
    if (kStream) hwy::FlushStream();
  });
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

template <class Q>
bool large(const KlDivergenceArgs& args) {
  return args.rows * args.cols * static_cast<std::int64_t>(sizeof(Q)) >= cpu::kStreamBytes;
}

template <class Q>
void kl_divergence_fwd(const KernelCall& call) {
  const auto& args = call.as<KlDivergenceArgs>();
  // In place the row's lines are in the cache already.
  const bool stream = call.output<Q>(2) != call.input<Q>(0) && large<Q>(args);
  with_teacher(args.teacher, [&](auto zero) {
    using P = decltype(zero);
    stream ? forward_rows<true, Q, P>(call) : forward_rows<false, Q, P>(call);
  });
}

template <class Q>
void kl_divergence_bwd(const KernelCall& call) {
  const auto& args = call.as<KlDivergenceArgs>();
  with_teacher(args.teacher, [&](auto zero) {
    using P = decltype(zero);
    large<Q>(args) ? backward_rows<true, Q, P>(call) : backward_rows<false, Q, P>(call);
  });
}

template <class Q>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<Q>);
  registry.add(Backend::kCpu, "kl_divergence_fwd_" + type, kl_divergence_fwd<Q>);
  registry.add(Backend::kCpu, "kl_divergence_bwd_" + type, kl_divergence_bwd<Q>);
  registry.add(Backend::kCpu, "kl_divergence_top_fwd_" + type, kl_divergence_fwd<Q>);
  registry.add(Backend::kCpu, "kl_divergence_top_bwd_" + type, kl_divergence_bwd<Q>);
}

}  // namespace

void register_kl_divergence(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(kl_divergence)
