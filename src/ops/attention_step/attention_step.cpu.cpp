// CPU kernel of attention_step (formula: mlxtape/ops/attention_step.h).
//
// A task has a piece of kPiece keys of one key head and all queries of the heads that share it, so that the cache is
// read once. It stores the new rows that fall into its piece and makes scores [keys, queries]: queries lie side by side
// in vectors, and nothing is summed across lanes. Maxima and sums of weights follow column by column, then the weighted
// values. The pieces, as many as the longest sequence needs, are joined in their order. Bound by reading the cache
// where threads are many, by the products with the keys where they are few.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention_step/attention_step.cpu.cpp"
#include <hwy/foreach_target.h>

#include <cmath>
#include <limits>

#include "attention_step_args.h"
#include "backends/cpu/device/products-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kPiece = 256;
constexpr std::int64_t kBlock =
    32;  // rows that are f32 at a time: few enough for the first-level cache
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Keys [first, last) of a sequence count for one of its queries; the new ones are those from `before` on.
struct Span {
  std::int64_t first, before, last;
  std::int64_t pieces() const { return ceil_div(last - first, kPiece); }
};
Span span_of(const AttentionStepArgs& args, const std::int32_t* lengths, std::int64_t b) {
  const std::int64_t n = std::clamp<std::int64_t>(lengths[b], 0, args.capacity - args.tokens);
  const std::int64_t first = args.window == 0 ? 0 : std::max<std::int64_t>(0, n + 1 - args.window);
  return {first, n, n + args.tokens};
}

// Of one key head: its queries, row t·group + member, and how far they are filled up.
struct Sizes {
  std::int64_t group, rows, columns, padded, nd, nv, pd, pv;
  explicit Sizes(const AttentionStepArgs& args)
      : group(args.heads / args.key_heads),
        rows(args.tokens * group),
        columns(in_units(rows)),
        padded(ceil_div(rows, kProductRows) * kProductRows),
        nd(in_units(args.dim)),
        nv(in_units(args.value_dim)),
        pd(row_pitch(args.dim)),
        pv(row_pitch(args.value_dim)) {}
  // What a piece leaves: the values' sums [padded, nv], then maxima and sums of weights [columns].
  std::int64_t part() const { return padded * nv + 2 * columns; }
};

// Rows of one head in the cache, and the new ones.
template <class T>
struct Rows {
  T* cache;
  const T* fresh;
  std::int64_t step, fresh_step, channels;

  void store(std::int64_t from, std::int64_t to, std::int64_t before) const {
    for (std::int64_t j = std::max(from, before); j < to; ++j) {
      const T* row = fresh + (j - before) * fresh_step;
      std::copy(row, row + channels, cache + j * step);
    }
  }
  // Rows [from, from + count) as f32. Products take more of them, up to a whole unit: nobody looks at what comes of those.
  void load(std::int64_t from, std::int64_t count, std::int64_t pitch, float* out) const {
    for (std::int64_t i = 0; i < count; ++i) {
      load_row(cache + (from + i) * step, channels, out + i * pitch);
    }
  }
};

// −inf where key j, the first of `count`, or one behind it does not count for a query.
void count_keys(const AttentionStepArgs& args, const Sizes& z, const Span& span, std::int64_t j,
                std::int64_t count, float* scores) {
  for (std::int64_t i = 0; i < count; ++i, ++j, scores += z.columns) {
    const std::int64_t early = std::max<std::int64_t>(0, j - span.before);
    std::fill(scores, scores + early * z.group, kNever);
    if (args.window == 0) continue;
    const std::int64_t late = std::min(args.tokens, j - span.before + args.window);
    std::fill(scores + late * z.group, scores + z.rows, kNever);
  }
}

// Scores [count, columns] become weights relative to each column's maximum.
HWY_INLINE void weigh(std::int64_t count, std::int64_t columns, float* scores, float* most,
                      float* sum) {
  const DF d;
  each_vector(columns, [&](std::int64_t c) HWY_ATTR {
    VF top = hn::Set(d, kNever), total = hn::Zero(d);
    for (std::int64_t i = 0; i < count; ++i) {
      top = largest(top, hn::LoadU(d, scores + i * columns + c));
    }
    // Where no key counts weights are 0, but for a NaN, which stays one.
    const VF shift = hn::IfThenZeroElse(hn::Eq(top, hn::Set(d, kNever)), top);
    for (std::int64_t i = 0; i < count; ++i) {
      float* at = scores + i * columns + c;
      const VF weight = exp_f32(d, hn::Sub(hn::LoadU(d, at), shift));
      hn::StoreU(weight, d, at);
      total = hn::Add(total, weight);
    }
    hn::StoreU(top, d, most + c);
    hn::StoreU(total, d, sum + c);
  });
}

template <class T>
struct Step {
  const AttentionStepArgs& args;
  const T* q;
  Rows<T> keys, values;  // of batch entry 0, key head 0
  const std::int32_t* lengths;
  const float* sinks;
  T* y;
  Sizes z;

  explicit Step(const KernelCall& call)
      : args(call.as<AttentionStepArgs>()),
        q(call.input<T>(0)),
        keys{call.output<T>(1), call.input<T>(1), args.key_heads * args.dim, args.k[1], args.dim},
        values{call.output<T>(2), call.input<T>(2), args.key_heads * args.value_dim, args.v[1],
               args.value_dim},
        lengths(call.input<std::int32_t>(3)),
        sinks(call.input<float>(4)),
        y(call.output<T>(0)),
        z(args) {}

  Rows<T> at(Rows<T> rows, const std::int64_t (&strides)[3], std::int64_t b,
             std::int64_t kh) const {
    rows.cache += b * args.capacity * rows.step + kh * rows.channels;
    rows.fresh += b * strides[0] + kh * strides[2];
    return rows;
  }

  // Keys [from, to) of one key head.
  void piece(std::int64_t b, std::int64_t kh, const Span& span, std::int64_t from, std::int64_t to,
             float* out) const {
    const Rows<T> key_rows = at(keys, args.k, b, kh), value_rows = at(values, args.v, b, kh);
    key_rows.store(from, to, span.before);
    value_rows.store(from, to, span.before);
    Pieces scratch{cpu::thread_scratch((z.nd + kPiece) * z.columns +
                                       (kBlock + 1) * std::max(z.pd, z.pv) + 64)};
    float* turned = scratch.take(z.nd * z.columns);  // queries, [nd, columns]
    float* scores = scratch.take(kPiece * z.columns);
    float* block = scratch.take(kBlock * std::max(z.pd, z.pv));
    float* row = scratch.take(z.pd);
    fill_row(0, z.nd * z.columns, turned);
    for (std::int64_t r = 0; r < z.rows; ++r) {
      const std::int64_t h = kh * z.group + r % z.group;
      load_row(q + b * args.q[0] + r / z.group * args.q[1] + h * args.q[2], args.dim, row);
      for (std::int64_t c = 0; c < args.dim; ++c) turned[c * z.columns + r] = args.scale * row[c];
    }
    for (std::int64_t j = from; j < to; j += kBlock) {
      const std::int64_t count = std::min(kBlock, to - j);
      key_rows.load(j, count, z.pd, block);
      product(false, {block, z.pd, 1}, turned, z.columns, scores + (j - from) * z.columns,
              z.columns, in_units(count), z.columns, z.nd);
    }
    count_keys(args, z, span, from, to - from, scores);
    float* most = out + z.padded * z.nv;
    weigh(to - from, z.columns, scores, most, most + z.columns);
    for (std::int64_t j = from; j < to; j += kBlock) {
      const std::int64_t count = std::min(kBlock, to - j);
      value_rows.load(j, count, z.pv, block);
      product(j != from, {scores + (j - from) * z.columns, 1, z.columns}, block, z.pv, out, z.nv,
              z.padded, z.nv, count);
    }
  }

  // Row r of a key head from what its pieces left.
  void join(std::int64_t b, std::int64_t kh, std::int64_t r, std::int64_t pieces,
            const float* parts) const {
    const std::int64_t h = kh * z.group + r % z.group;
    float* sums = cpu::thread_scratch(z.nv);
    fill_row(0, z.nv, sums);
    float most = sinks == nullptr ? kNever : sinks[h];
    float sum = most == kNever ? 0 : 1;
    for (std::int64_t i = 0; i < pieces; ++i, parts += z.part()) {
      const float* stats = parts + z.padded * z.nv + r;
      if (stats[z.columns] == 0) continue;  // its maximum is −inf, as `most` may be
      const float next = std::max(most, stats[0]);
      const float keep = std::exp(most - next), add = std::exp(stats[0] - next);
      scale_row(keep, z.nv, sums);
      add_row(add, parts + r * z.nv, z.nv, sums);
      sum = sum * keep + stats[z.columns] * add;
      most = next;
    }
    if (sum != 0) scale_row(1 / sum, z.nv, sums);
    const std::int64_t place = (b * args.tokens + r / z.group) * args.heads + h;
    store_row(sums, args.value_dim, y + place * args.value_dim);
  }
};

std::size_t step_room(const void* opaque) {
  const auto& args = *static_cast<const AttentionStepArgs*>(opaque);
  const std::int64_t pieces = ceil_div(args.capacity, kPiece);
  const std::int64_t floats = args.batch * args.key_heads * pieces * Sizes(args).part();
  return static_cast<std::size_t>(floats) * sizeof(float);
}

template <class T>
void attention_step(const KernelCall& call) {
  const Step<T> step(call);
  const AttentionStepArgs& args = step.args;
  auto* parts = static_cast<float*>(call.workspace);
  std::int64_t pieces = 0;  // of the longest sequence
  for (std::int64_t b = 0; b < args.batch; ++b) {
    pieces = std::max(pieces, span_of(args, step.lengths, b).pieces());
  }
  parallel_for(args.batch * args.key_heads * pieces, [&](std::int64_t task) {
    const std::int64_t b = task / pieces / args.key_heads, kh = task / pieces % args.key_heads;
    const Span span = span_of(args, step.lengths, b);
    const std::int64_t from = span.first + task % pieces * kPiece;
    if (from >= span.last) return;
    step.piece(b, kh, span, from, std::min(from + kPiece, span.last), parts + task * step.z.part());
  });
  const std::int64_t rows = step.z.rows;
  parallel_for(args.batch * args.key_heads * rows, [&](std::int64_t task) {
    const std::int64_t head = task / rows, b = head / args.key_heads;
    step.join(b, head % args.key_heads, task % rows, span_of(args, step.lengths, b).pieces(),
              parts + head * pieces * step.z.part());
  });
}

}  // namespace

void register_attention_step(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "attention_step_f32", attention_step<float>, step_room);
  registry.add(Backend::kCpu, "attention_step_f16", attention_step<F16>, step_room);
  registry.add(Backend::kCpu, "attention_step_bf16", attention_step<BF16>, step_room);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(attention_step)
