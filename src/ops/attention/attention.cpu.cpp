// CPU kernels of attention (formula: mlxtape/ops/attention.h).
//
// Forward: keys, transposed, and values are copied once as f32, kKeys at a time. A task has kRows queries of one
// head and goes over the blocks of keys that count, with the softmax's maximum and sum so far: where a block raises
// the maximum, what was added up before is scaled down. A few queries on many keys (decoding) are bound by reading
// the keys, which are then not copied: a task has a piece of the keys and all heads that share them, and the pieces
// are joined in their order.
// Backward: a task has some heads that share keys. Over blocks of keys, then of queries: the products with the
// keys are made again, the weights follow from lse, and five products give the parts of dq, dk and dv. dq of a head
// stays with the task; dk and dv are kept by task and added in order.
// Bound by arithmetic: the products.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/attention.cpu.cpp"
#include <hwy/foreach_target.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_args.h"
#include "backends/cpu/device/products-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kRows = 64;
constexpr std::int64_t kKeys = 64;
constexpr std::int64_t kPitch = row_pitch(kKeys);
constexpr std::int64_t kFewQueries = 4;
constexpr std::int64_t kPiece = 512;  // keys of a task for a few queries
constexpr std::int64_t kTasks =
    16;  // tasks wanted of a backward pass: each keeps its own dk and dv
constexpr float kNever = -std::numeric_limits<float>::infinity();

// ---- what a kernel is given ----

// A sequence: its queries and keys, and its first block of keys among all.
struct Sequence {
  std::int64_t batch, query, queries, key, keys, block;
  std::int64_t blocks() const { return ceil_div(keys, kKeys); }
};

// By the shape alone; enough however packed sequences are cut.
std::int64_t most_blocks(const AttentionArgs& args) {
  return args.sequences == 0 ? args.batch * ceil_div(args.keys, kKeys)
                             : args.keys / kKeys + args.sequences;
}

template <class T>
struct Problem {
  const AttentionArgs& args;
  const T *q, *k, *v;
  const void* mask;
  const float* sinks;
  std::vector<Sequence> sequences;
  std::int64_t group, nd, nv, pd, pv;

  explicit Problem(const KernelCall& call)
      : args(call.as<AttentionArgs>()),
        q(call.input<T>(0)),
        k(call.input<T>(1)),
        v(call.input<T>(2)),
        mask(call.in[3]),
        sinks(call.input<float>(4)),
        group(args.heads / args.key_heads),
        nd(in_units(args.dim)),
        nv(in_units(args.value_dim)),
        pd(row_pitch(args.dim)),
        pv(row_pitch(args.value_dim)) {
    if (args.sequences == 0) {
      for (std::int64_t b = 0; b < args.batch; ++b) {
        sequences.push_back({b, 0, args.queries, 0, args.keys, b * ceil_div(args.keys, kKeys)});
      }
      return;
    }
    const auto start = [&](std::size_t input, std::int64_t n, std::int64_t low, std::int64_t high) {
      if (n == args.sequences) return high;
      const std::int64_t given = args.start_bytes == 4 ? call.input<std::int32_t>(input)[n]
                                                       : call.input<std::int64_t>(input)[n];
      return std::clamp(given, low, high);
    };
    std::int64_t query = 0, key = 0, block = 0;
    for (std::int64_t n = 0; n < args.sequences; ++n) {
      const std::int64_t next_query = start(5, n + 1, query, args.queries);
      const std::int64_t next_key = start(6, n + 1, key, args.keys);
      sequences.push_back({0, query, next_query - query, key, next_key - key, block});
      block += sequences.back().blocks();
      query = next_query;
      key = next_key;
    }
  }

  const T* q_row(const Sequence& s, std::int64_t t, std::int64_t h) const {
    return q + s.batch * args.q[0] + (s.query + t) * args.q[1] + h * args.q[2];
  }
  const T* k_row(const Sequence& s, std::int64_t j, std::int64_t h) const {
    return k + s.batch * args.k[0] + (s.key + j) * args.k[1] + h * args.k[2];
  }
  const T* v_row(const Sequence& s, std::int64_t j, std::int64_t h) const {
    return v + s.batch * args.v[0] + (s.key + j) * args.v[1] + h * args.v[2];
  }
  // Of [B, T, H] without gaps.
  std::int64_t at(const Sequence& s, std::int64_t t, std::int64_t h) const {
    return (s.batch * args.queries + s.query + t) * args.heads + h;
  }

  // Keys that count for a query, but for the mask: from first to last, which is not one of them.
  std::int64_t last_key(const Sequence& s, std::int64_t t) const {
    return args.causal != 0 ? std::clamp<std::int64_t>(t + s.keys - s.queries + 1, 0, s.keys)
                            : s.keys;
  }
  std::int64_t first_key(const Sequence& s, std::int64_t t) const {
    if (args.window == 0) return 0;
    return std::clamp<std::int64_t>(t + s.keys - s.queries + 1 - args.window, 0, last_key(s, t));
  }

  // Scores of query t and the keys from j on: the mask added, and −inf where they do not count.
  void count(const Sequence& s, std::int64_t t, std::int64_t h, std::int64_t j,
             std::int64_t columns, float* scores) const {
    const std::int64_t first = std::clamp<std::int64_t>(first_key(s, t) - j, 0, columns);
    const std::int64_t last = std::clamp<std::int64_t>(last_key(s, t) - j, 0, columns);
    std::fill(scores, scores + first, kNever);
    std::fill(scores + last, scores + columns, kNever);
    if (args.mask_kind == AttentionMask::kNone) return;
    const std::int64_t row = s.batch * args.mask[0] + h * args.mask[1] + t * args.mask[2];
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t place = row + (j + i) * args.mask[3];
      if (args.mask_kind == AttentionMask::kBool) {
        if (!static_cast<const bool*>(mask)[place]) scores[i] = kNever;
      } else if (args.mask_kind == AttentionMask::kF32) {
        scores[i] += static_cast<const float*>(mask)[place];
      } else {
        scores[i] += static_cast<float>(static_cast<const T*>(mask)[place]);
      }
      if (scores[i] < kLeastScore) scores[i] = kNever;
    }
  }
};

// Rows [from, from + count) as f32, and zeros up to `rows` of them.
template <class Row>
HWY_INLINE void load_rows(std::int64_t count, std::int64_t rows, std::int64_t columns,
                          std::int64_t pitch, const Row& row, float* out) {
  for (std::int64_t i = 0; i < rows; ++i) {
    if (i < count) {
      load_row(row(i), columns, out + i * pitch);
    } else {
      fill_row(0, in_units(columns), out + i * pitch);
    }
  }
}
HWY_INLINE void transpose(const float* from, std::int64_t from_pitch, std::int64_t rows,
                          std::int64_t columns, std::int64_t to_pitch, float* to) {
  for (std::int64_t c = 0; c < columns; ++c) {
    for (std::int64_t r = 0; r < rows; ++r) to[c * to_pitch + r] = from[r * from_pitch + c];
  }
}

// NaN is passed over; the sum of exponentials has it.
HWY_INLINE float row_max(const float* x, std::int64_t n) {
  const DF d;
  VF most = hn::Set(d, kNever);
  each_vector(n, [&](std::int64_t i) HWY_ATTR { most = largest(most, hn::LoadU(d, x + i)); });
  return max_lanes(d, most);
}
// x = exp(x − shift); their sum.
HWY_INLINE float exp_row(float shift, std::int64_t n, float* x) {
  const DF d;
  VF sum = hn::Zero(d);
  each_vector(n, [&](std::int64_t i) HWY_ATTR {
    const VF p = exp_f32(d, hn::Sub(hn::LoadU(d, x + i), hn::Set(d, shift)));
    hn::StoreU(p, d, x + i);
    sum = hn::Add(sum, p);
  });
  return sum_lanes(d, sum);
}

// The softmax of a row as far as it got: Σ exp(s − most) and the values' sum, relative to most.
struct Running {
  float most = kNever, sum = 0;

  // Takes a row of scores, which become weights relative to the new maximum; values is scaled to it.
  void take(std::int64_t columns, float* scores, std::int64_t nv, float* values) {
    const float next = std::max(most, row_max(scores, columns));
    if (next == kNever) {  // weights of 0, but for a NaN, which stays one
      sum += exp_row(0, columns, scores);
      return;
    }
    const float keep = std::exp(most - next);
    if (keep != 1) scale_row(keep, nv, values);
    sum = sum * keep + exp_row(next, columns, scores);
    most = next;
  }
  // The mean of the values, and lse.
  float finish(const float* sink, std::int64_t nv, float* values) {
    if (sink != nullptr && *sink != kNever) {
      const float next = std::max(most, *sink), keep = std::exp(most - next);
      scale_row(keep, nv, values);
      sum = sum * keep + std::exp(*sink - next);
      most = next;
    }
    if (sum == 0) return kNever;
    scale_row(1 / sum, nv, values);
    return most + std::log(sum);
  }
};

// ---- forward ----

template <class T>
void write_row(const Problem<T>& p, const Sequence& s, std::int64_t t, std::int64_t h,
               Running running, float* values, T* y, float* lse) {
  const std::int64_t at = p.at(s, t, h);
  lse[at] = running.finish(p.sinks == nullptr ? nullptr : p.sinks + h, p.nv, values);
  store_row(values, p.args.value_dim, y + at * p.args.value_dim);
}

std::int64_t block_floats(const AttentionArgs& args) {
  return in_units(args.dim) * kPitch + kKeys * row_pitch(args.value_dim);
}

template <class T>
void many_queries(const Problem<T>& p, float* blocks, T* y, float* lse) {
  const AttentionArgs& args = p.args;
  const std::int64_t block_size = block_floats(args);
  struct Part {
    const Sequence* s;
    std::int64_t first;
  };
  std::vector<Part> key_parts, query_parts;
  for (const Sequence& s : p.sequences) {
    for (std::int64_t b = 0; b < s.blocks(); ++b) key_parts.push_back({&s, b});
    for (std::int64_t t = s.queries - 1; t >= 0; t -= kRows) {  // the longest rows first
      query_parts.push_back({&s, t / kRows * kRows});
    }
  }
  parallel_for(static_cast<std::int64_t>(key_parts.size()) * args.key_heads,
               [&](std::int64_t task) {
                 const auto& [s, b] = key_parts[static_cast<std::size_t>(task / args.key_heads)];
                 const std::int64_t h = task % args.key_heads;
                 float* keys = blocks + ((s->block + b) * args.key_heads + h) * block_size;
                 float* values = keys + p.nd * kPitch;
                 float* rows = cpu::thread_scratch(kKeys * p.pd);
                 const std::int64_t first = b * kKeys, count = std::min(kKeys, s->keys - first);
                 load_rows(
                     count, kKeys, args.dim, p.pd,
                     [&](std::int64_t i) { return p.k_row(*s, first + i, h); }, rows);
                 transpose(rows, p.pd, kKeys, p.nd, kPitch, keys);
                 load_rows(
                     count, kKeys, args.value_dim, p.pv,
                     [&](std::int64_t i) { return p.v_row(*s, first + i, h); }, values);
               });
  parallel_for(static_cast<std::int64_t>(query_parts.size()) * args.heads, [&](std::int64_t task) {
    const auto& [s, first] = query_parts[static_cast<std::size_t>(task / args.heads)];
    const std::int64_t h = task % args.heads;
    const std::int64_t count = std::min(kRows, s->queries - first), rows = in_units(count);
    Pieces pieces{cpu::thread_scratch(kRows * (p.pd + p.pv + kPitch) + 64)};
    float* q = pieces.take(kRows * p.pd);
    float* values = pieces.take(kRows * p.pv);
    float* scores = pieces.take(kRows * kPitch);
    load_rows(
        count, rows, args.dim, p.pd, [&](std::int64_t i) { return p.q_row(*s, first + i, h); }, q);
    for (std::int64_t i = 0; i < rows; ++i) {
      scale_row(args.scale, p.nd, q + i * p.pd);
      fill_row(0, p.nv, values + i * p.pv);
    }
    std::array<Running, kRows> running{};
    const std::int64_t last = p.last_key(*s, first + count - 1);
    for (std::int64_t b = p.first_key(*s, first) / kKeys; b * kKeys < last; ++b) {
      const float* keys = blocks + ((s->block + b) * args.key_heads + h / p.group) * block_size;
      const std::int64_t columns = in_units(std::min(kKeys, last - b * kKeys));
      product(false, {q, p.pd, 1}, keys, kPitch, scores, kPitch, rows, columns, p.nd);
      for (std::int64_t i = 0; i < count; ++i) {
        p.count(*s, first + i, h, b * kKeys, columns, scores + i * kPitch);
        running[static_cast<std::size_t>(i)].take(columns, scores + i * kPitch, p.nv,
                                                  values + i * p.pv);
      }
      product(true, {scores, kPitch, 1}, keys + p.nd * kPitch, p.pv, values, p.pv, rows, p.nv,
              columns);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      write_row(p, *s, first + i, h, running[static_cast<std::size_t>(i)], values + i * p.pv, y,
                lse);
    }
  });
}

// Results of a piece of the keys: for each row the values' sum and, behind it, its Running.
std::int64_t piece_floats(const AttentionArgs& args) {
  return args.queries * (args.heads / args.key_heads) * (in_units(args.value_dim) + kUnit);
}
std::int64_t pieces_of(const AttentionArgs& args) {
  return std::max<std::int64_t>(1, ceil_div(args.keys, kPiece));
}

template <class T>
void few_queries(const Problem<T>& p, float* parts, T* y, float* lse) {
  const AttentionArgs& args = p.args;
  const std::int64_t pieces = pieces_of(args), size = piece_floats(args), pitch = p.nv + kUnit;
  const std::int64_t rows = args.queries * p.group;  // row: query t, head of the group
  parallel_for(args.batch * args.key_heads * pieces, [&](std::int64_t task) {
    const Sequence& s = p.sequences[static_cast<std::size_t>(task / pieces / args.key_heads)];
    const std::int64_t kh = task / pieces % args.key_heads, piece = task % pieces;
    float* out = parts + task * size;
    Pieces scratch{cpu::thread_scratch(rows * (p.pd + kPitch) + kKeys * std::max(p.pd, p.pv) + 64)};
    float* q = scratch.take(rows * p.pd);
    float* scores = scratch.take(rows * kPitch);
    float* block = scratch.take(kKeys * std::max(p.pd, p.pv));
    std::vector<Running> running(static_cast<std::size_t>(rows));
    for (std::int64_t r = 0; r < rows; ++r) {
      load_row(p.q_row(s, r / p.group, kh * p.group + r % p.group), args.dim, q + r * p.pd);
      scale_row(args.scale, p.nd, q + r * p.pd);
      fill_row(0, p.nv, out + r * pitch);
    }
    const std::int64_t last = std::min((piece + 1) * kPiece, p.last_key(s, args.queries - 1));
    std::int64_t first = std::max(piece * kPiece, p.first_key(s, 0) / kKeys * kKeys);
    for (; first < last; first += kKeys) {
      const std::int64_t count = std::min(kKeys, last - first), columns = in_units(count);
      load_rows(
          count, count, args.dim, p.pd, [&](std::int64_t i) { return p.k_row(s, first + i, kh); },
          block);
      for (std::int64_t r = 0; r < rows; ++r) {
        float* row = scores + r * kPitch;
        for (std::int64_t i = 0; i < count; ++i) row[i] = dot(q + r * p.pd, block + i * p.pd, p.nd);
        p.count(s, r / p.group, kh * p.group + r % p.group, first, columns, row);
        running[static_cast<std::size_t>(r)].take(columns, row, p.nv, out + r * pitch);
      }
      load_rows(
          count, count, args.value_dim, p.pv,
          [&](std::int64_t i) { return p.v_row(s, first + i, kh); }, block);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t i = 0; i < count; ++i) {
          add_row(scores[r * kPitch + i], block + i * p.pv, p.nv, out + r * pitch);
        }
      }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      out[r * pitch + p.nv] = running[static_cast<std::size_t>(r)].most;
      out[r * pitch + p.nv + 1] = running[static_cast<std::size_t>(r)].sum;
    }
  });
  parallel_for(args.batch * args.key_heads * rows, [&](std::int64_t task) {
    const Sequence& s = p.sequences[static_cast<std::size_t>(task / rows / args.key_heads)];
    const std::int64_t kh = task / rows % args.key_heads, r = task % rows;
    float* values = cpu::thread_scratch(p.pv);
    fill_row(0, p.nv, values);
    Running all;
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      const float* part = parts + (task / rows * pieces + piece) * size + r * pitch;
      const float most = part[p.nv], next = std::max(all.most, most);
      if (part[p.nv + 1] == 0) continue;
      const float keep = std::exp(all.most - next), add = std::exp(most - next);
      scale_row(keep, p.nv, values);
      add_row(add, part, p.nv, values);
      all.sum = all.sum * keep + part[p.nv + 1] * add;
      all.most = next;
    }
    write_row(p, s, r / p.group, kh * p.group + r % p.group, all, values, y, lse);
  });
}

bool has_few_queries(const AttentionArgs& args) {
  return args.sequences == 0 && args.queries <= kFewQueries;
}

std::size_t forward_room(const void* opaque) {
  const auto& args = *static_cast<const AttentionArgs*>(opaque);
  const std::int64_t floats =
      has_few_queries(args) ? args.batch * args.key_heads * pieces_of(args) * piece_floats(args)
                            : most_blocks(args) * args.key_heads * block_floats(args);
  return static_cast<std::size_t>(floats) * sizeof(float);
}

template <class T>
void attention_fwd(const KernelCall& call) {
  const Problem<T> problem(call);
  auto* memory = static_cast<float*>(call.workspace);
  T* y = call.output<T>(0);
  auto* lse = call.output<float>(1);
  has_few_queries(problem.args) ? few_queries(problem, memory, y, lse)
                                : many_queries(problem, memory, y, lse);
}

// ---- backward ----

// How many tasks share the heads of a key head.
std::int64_t parts_of(const AttentionArgs& args) {
  const std::int64_t group = args.heads / args.key_heads;
  return std::clamp<std::int64_t>(kTasks / std::max<std::int64_t>(1, args.batch * args.key_heads),
                                  1, std::max<std::int64_t>(group, 1));
}
// dk and dv of a task: [blocks·kKeys, Dk] and [blocks·kKeys, Dv], of one batch entry.
std::int64_t entry_blocks(const AttentionArgs& args) {
  return args.sequences == 0 ? ceil_div(args.keys, kKeys) : most_blocks(args);
}
std::int64_t kept_floats(const AttentionArgs& args) {
  return entry_blocks(args) * kKeys * (row_pitch(args.dim) + row_pitch(args.value_dim));
}
std::size_t backward_room(const void* opaque) {
  const auto& args = *static_cast<const AttentionArgs*>(opaque);
  const std::int64_t floats =
      args.batch * (args.key_heads * parts_of(args) * kept_floats(args) + args.heads);
  return static_cast<std::size_t>(floats) * sizeof(float);
}

template <class T>
struct Back {
  const Problem<T>& p;
  const T *y, *dy;
  const float* lse;
  T* dq;
  float *q, *dys, *s, *ds, *keys, *key_rows, *values, *sums, *dots;

  Back(const Problem<T>& problem, const KernelCall& call, std::int64_t most_queries)
      : p(problem),
        y(call.input<T>(7)),
        dy(call.input<T>(9)),
        lse(call.input<float>(8)),
        dq(call.output<T>(0)) {
    const std::int64_t rows = ceil_div(most_queries, kRows) * kRows;
    Pieces pieces{cpu::thread_scratch(kRows * (2 * p.pd + p.pv + 2 * kPitch) +
                                      (p.nd + p.nv) * kPitch + rows * (p.pd + 1) + 256)};
    q = pieces.take(kRows * p.pd);
    dys = pieces.take(kRows * p.pv);
    s = pieces.take(kRows * kPitch);
    ds = pieces.take(kRows * kPitch);
    keys = pieces.take(p.nd * kPitch);
    key_rows = pieces.take(kKeys * p.pd);
    values = pieces.take(p.nv * kPitch);
    sums = pieces.take(rows * p.pd);
    dots = pieces.take(rows);
  }

  // D_t, and the sink's gradient.
  float open(const Sequence& seq, std::int64_t h) {
    float sink = 0;
    for (std::int64_t t = 0; t < seq.queries; ++t) {
      const std::int64_t at = p.at(seq, t, h);
      load_row(y + at * p.args.value_dim, p.args.value_dim, dys);
      load_row(dy + at * p.args.value_dim, p.args.value_dim, dys + p.pv);
      dots[t] = dot(dys, dys + p.pv, p.nv);
      if (p.sinks != nullptr && p.sinks[h] != kNever) {
        sink -= std::exp(p.sinks[h] - lse[at]) * dots[t];
      }
      fill_row(0, p.nd, sums + t * p.pd);
    }
    for (std::int64_t t = seq.queries; t % kRows != 0; ++t) fill_row(0, p.nd, sums + t * p.pd);
    return sink;
  }

  // One head: its dq, and its share of dk and dv, added.
  void head(const Sequence& seq, std::int64_t h, float* dk, float* dv) {
    const AttentionArgs& args = p.args;
    for (std::int64_t b = 0; b < seq.blocks(); ++b) {
      const std::int64_t j = b * kKeys, count = std::min(kKeys, seq.keys - j);
      const std::int64_t columns = in_units(count);
      load_rows(
          count, kKeys, args.value_dim, p.pv,
          [&](std::int64_t i) { return p.v_row(seq, j + i, h / p.group); }, dys);
      transpose(dys, p.pv, kKeys, p.nv, kPitch, values);
      load_rows(
          count, kKeys, args.dim, p.pd,
          [&](std::int64_t i) { return p.k_row(seq, j + i, h / p.group); }, key_rows);
      transpose(key_rows, p.pd, kKeys, p.nd, kPitch, keys);
      for (std::int64_t first = 0; first < seq.queries; first += kRows) {
        const std::int64_t rows = std::min(kRows, seq.queries - first), m = in_units(rows);
        if (p.last_key(seq, first + rows - 1) <= j || p.first_key(seq, first) >= j + count)
          continue;
        load_rows(
            rows, m, args.dim, p.pd, [&](std::int64_t i) { return p.q_row(seq, first + i, h); }, q);
        load_rows(
            rows, m, args.value_dim, p.pv,
            [&](std::int64_t i) { return dy + p.at(seq, first + i, h) * args.value_dim; }, dys);
        for (std::int64_t i = 0; i < m; ++i) scale_row(args.scale, p.nd, q + i * p.pd);
        product(false, {q, p.pd, 1}, keys, kPitch, s, kPitch, m, columns, p.nd);
        product(false, {dys, p.pv, 1}, values, kPitch, ds, kPitch, m, columns, p.nv);
        for (std::int64_t i = 0; i < m; ++i) weigh(seq, first + i, h, j, columns, i < rows, i);
        product(true, {s, 1, kPitch}, dys, p.pv, dv + j * p.pv, p.pv, columns, p.nv, m);
        product(true, {ds, 1, kPitch}, q, p.pd, dk + j * p.pd, p.pd, columns, p.nd, m);
        product(true, {ds, kPitch, 1}, key_rows, p.pd, sums + first * p.pd, p.pd, m, p.nd, columns);
      }
    }
    for (std::int64_t t = 0; t < seq.queries; ++t) {
      scale_row(args.scale, p.nd, sums + t * p.pd);
      store_row(sums + t * p.pd, args.dim, dq + p.at(seq, t, h) * args.dim);
    }
  }

  // Row i of s becomes p, of ds p∘(ds − D).
  void weigh(const Sequence& seq, std::int64_t t, std::int64_t h, std::int64_t j,
             std::int64_t columns, bool there, std::int64_t i) {
    float *weights = s + i * kPitch, *grads = ds + i * kPitch;
    const float shift = there ? lse[p.at(seq, t, h)] : kNever;
    if (shift == kNever) {
      fill_row(0, columns, weights);
      fill_row(0, columns, grads);
      return;
    }
    p.count(seq, t, h, j, columns, weights);
    const DF d;
    const VF dots_t = hn::Set(d, dots[t]), v_shift = hn::Set(d, shift);
    each_vector(columns, [&](std::int64_t c) HWY_ATTR {
      const VF w = exp_f32(d, hn::Sub(hn::LoadU(d, weights + c), v_shift));
      hn::StoreU(w, d, weights + c);
      hn::StoreU(hn::Mul(w, hn::Sub(hn::LoadU(d, grads + c), dots_t)), d, grads + c);
    });
  }
};

template <class T>
void attention_bwd(const KernelCall& call) {
  const Problem<T> p(call);
  const AttentionArgs& args = p.args;
  auto* kept = static_cast<float*>(call.workspace);
  const std::int64_t parts = parts_of(args), size = kept_floats(args);
  const std::int64_t entries = args.batch * args.key_heads;
  float* sink_parts = kept + entries * parts * size;
  const std::int64_t each = ceil_div(p.group, parts);  // heads of a task
  std::int64_t most_queries = 0;
  for (const Sequence& s : p.sequences) most_queries = std::max(most_queries, s.queries);
  const auto of_entry = [&](std::int64_t entry, const auto& fn) {
    for (const Sequence& s : p.sequences) {
      if (args.sequences != 0 || s.batch == entry / args.key_heads) {
        fn(s, args.sequences == 0 ? 0 : s.block);
      }
    }
  };
  parallel_for(entries * parts, [&](std::int64_t task) {
    const std::int64_t entry = task / parts, kh = entry % args.key_heads;
    float* dk = kept + task * size;
    float* dv = dk + entry_blocks(args) * kKeys * p.pd;
    std::fill(dk, dk + size, 0.0F);
    Back<T> back(p, call, most_queries);
    const std::int64_t from = task % parts * each;
    for (std::int64_t member = from; member < std::min(from + each, p.group); ++member) {
      const std::int64_t h = kh * p.group + member;
      float sink = 0;
      of_entry(entry, [&](const Sequence& s, std::int64_t block) {
        sink += back.open(s, h);
        back.head(s, h, dk + block * kKeys * p.pd, dv + block * kKeys * p.pv);
      });
      sink_parts[entry / args.key_heads * args.heads + h] = sink;
    }
  });
  T *dk = call.output<T>(1), *dv = call.output<T>(2);
  parallel_for(entries, [&](std::int64_t entry) {
    float* sum = cpu::thread_scratch(std::max(p.nd, p.nv));
    of_entry(entry, [&](const Sequence& s, std::int64_t block) {
      for (std::int64_t j = 0; j < s.keys; ++j) {
        const std::int64_t at =
            (s.batch * args.keys + s.key + j) * args.key_heads + entry % args.key_heads;
        const auto join = [&](std::int64_t n, std::int64_t place, T* out, std::int64_t width) {
          fill_row(0, n, sum);
          for (std::int64_t part = 0; part < parts; ++part) {
            add_row(1, kept + (entry * parts + part) * size + place, n, sum);
          }
          store_row(sum, width, out + at * width);
        };
        const std::int64_t row = block * kKeys + j;
        join(p.nd, row * p.pd, dk, args.dim);
        join(p.nv, entry_blocks(args) * kKeys * p.pd + row * p.pv, dv, args.value_dim);
      }
    });
  });
  if (auto* d_sinks = call.output<float>(3)) {
    for (std::int64_t h = 0; h < args.heads; ++h) {
      d_sinks[h] = 0;
      for (std::int64_t b = 0; b < args.batch; ++b) d_sinks[h] += sink_parts[b * args.heads + h];
    }
  }
}

}  // namespace

void register_attention(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCpu, "attention_fwd_" + type, attention_fwd<T>, forward_room);
    registry.add(Backend::kCpu, "attention_bwd_" + type, attention_bwd<T>, backward_room);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(attention)
