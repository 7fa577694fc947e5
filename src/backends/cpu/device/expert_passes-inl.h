// The passes of a mixture of SwiGLU networks (formula and letters: mlxtape/ops/experts.h), forward and backward, for
// weights from any source (weights-inl.h): gate and up have rows [E·I, H], down [E·H, I]. hidden and d_hidden hold g and u
// of each place, [T·k, 2, I]. Bound by reading the weights while an expert has fewer than about 30 pairs, by arithmetic
// with more.
#include "backends/cpu/device/expert_blocks-inl.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_EXPERT_PASSES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_EXPERT_PASSES_INL_H_
#undef MLXTAPE_CPU_EXPERT_PASSES_INL_H_
#else
#define MLXTAPE_CPU_EXPERT_PASSES_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// a = g·σ(g)∘u of a pair, for `count` inner channels from `from` on; hidden [2, I]; g: as much room as a.
template <class H>
HWY_INLINE void activate(const H* hidden, std::int64_t inner, std::int64_t from, std::int64_t count,
                         float* g, float* a) {
  const DF d;
  load_row(hidden + from, count, g);
  load_row(hidden + inner + from, count, a);
  each_vector(in_units(count), [&](std::int64_t i) HWY_ATTR {
    const VF z = hn::LoadU(d, g + i);
    hn::StoreU(hn::Mul(hn::Mul(z, sigmoid(d, 0.0F, z).value), hn::LoadU(d, a + i)), d, a + i);
  });
}

// ---- forward ----

// Some rows of gate or up for a block of few pairs.
template <class T, class H, class W>
HWY_INLINE void hidden_of_few(const Block& b, const Pairs& pairs, const T* x, const W& w,
                              std::int64_t from, std::int64_t rows, int which, H* hidden) {
  const auto [inner, width] = std::pair(pairs.shape.inner, pairs.shape.width);
  const std::int64_t apart = w.few_pitch();
  Pieces pieces{cpu::thread_scratch(b.count * (apart + kStrip) + w.few_room() + 64)};
  float *lines = pieces.take(b.count * apart), *out = pieces.take(b.count * kStrip);
  for (std::int64_t i = 0; i < b.count; ++i) {
    w.prepare(x + pairs.token(b.first + i) * width, lines + i * apart);
  }
  w.template few<T>(b.expert * inner + from, rows, lines, apart, b.count, pieces.take(w.few_room()),
                    out, kStrip);
  for (std::int64_t i = 0; i < b.count; ++i) {
    store_row(out + i * kStrip, rows, hidden + ((b.first + i) * 2 + which) * inner + from);
  }
}

// All rows of gate and up for a block of more.
template <ProductStep kStep, class T, class H, class W>
HWY_INLINE void hidden_of_block(const Block& b, const Pairs& pairs, const T* x, const W& gate,
                                const W& up, H* hidden) {
  const std::int64_t inner = pairs.shape.inner, width = pairs.shape.width;
  const std::int64_t steps = width / width_of(kStep);
  Pieces pieces{cpu::thread_scratch(steps * kPitch + kLines + kPartRoom + kStrip * kPitch + 64)};
  float* lines = pieces.take(kLines);
  float* columns = pieces.take(steps * kPitch);
  float* room = pieces.take(kPartRoom);
  float* out = pieces.take(kStrip * kPitch);
  load_columns<kStep>(
      b, width, [&](std::int64_t i) { return x + pairs.token(b.first + i) * width; }, lines,
      columns);
  for (int which = 0; which < 2; ++which) {
    for (std::int64_t r = 0; r < inner; r += kStrip) {
      const std::int64_t rows = std::min(kStrip, inner - r);
      rows_product<kStep>(which == 0 ? gate : up, b.expert * inner + r, rows, columns, b.pitch(),
                          in_units(b.count), room, out, kPitch);
      const Made made = turn_products(b, rows, out, room);
      for (std::int64_t i = 0; i < b.count; ++i) {
        store_row(made.at + i * made.pitch, rows, hidden + ((b.first + i) * 2 + which) * inner + r);
      }
    }
  }
}

template <class T, class H, class W>
void expert_hidden(const Pairs& pairs, const T* x, const W& gate, const W& up, H* hidden) {
  const std::int64_t inner = pairs.shape.inner, strips = ceil_div(inner, kStrip);
  const std::int64_t most = std::min(gate.most_few(), up.most_few());
  std::vector<Block> few, blocks;
  for (const Block& b : pairs.blocks()) (b.count <= most ? few : blocks).push_back(b);
  parallel_for(static_cast<std::int64_t>(few.size()) * 2 * strips, [&](std::int64_t task) {
    const std::int64_t from = task % strips * kStrip;
    const int which = static_cast<int>(task / strips % 2);
    hidden_of_few(few[static_cast<std::size_t>(task / strips / 2)], pairs, x,
                  which == 0 ? gate : up, from, std::min(kStrip, inner - from), which, hidden);
  });
  parallel_for(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t task) {
    const Block& b = blocks[static_cast<std::size_t>(task)];
    with_step<T>(pairs.shape.width, [&](auto step) {
      hidden_of_block<decltype(step)::value>(b, pairs, x, gate, up, hidden);
    });
  });
}

// Floats of columns.
inline std::int64_t expert_out_room(const ExpertShape& shape) {
  return most_columns(shape) * shape.inner;
}
template <class T, class H, class W>
void expert_out(const Pairs& pairs, const H* hidden, const T* scores, const W& down, float* columns,
                T* y) {
  const std::int64_t inner = pairs.shape.inner, width = pairs.shape.width;
  const std::vector<Block> blocks = pairs.blocks();
  with_step<T>(inner, [&](auto step) {
    constexpr ProductStep kStep = decltype(step)::value;
    all_columns<kStep>(
        blocks, inner,
        [&](std::int64_t place, float* line, float* g) {
          activate(hidden + place * 2 * inner, inner, 0, inner, g, line);
        },
        columns, down.most_few(), [&](const float* line, float* row) { down.prepare(line, row); });
    add_up(
        pairs, blocks, inner, columns, down.few_room(),
        [&](const Block& b, std::int64_t row, std::int64_t rows, const float* a, float* room,
            float* out) {
          const std::int64_t from = b.expert * width + row;
          if (b.count <= down.most_few()) {
            down.template few<float>(from, rows, a, inner, b.count, room, out, kStrip);
            return Made{out, kStrip};
          }
          rows_product<kStep>(down, from, rows, a, b.pitch(), in_units(b.count), room, out, kPitch);
          return turn_products(b, rows, out, room);
        },
        [&](std::int64_t place) { return static_cast<float>(scores[pairs.order[place]]); }, y);
  });
}

// ---- backward ----

// One pair: of g, u and b = downᵀ·dy [in_units(I)] makes dg and du in the place of g and u, and dscore.
HWY_INLINE float hidden_gradient(float score, std::int64_t wide, const float* back, float* g,
                                 float* u) {
  const DF d;
  const VF factor = hn::Set(d, score);
  VF sum = hn::Zero(d);
  each_vector(wide, [&](std::int64_t c) HWY_ATTR {
    const VF z = hn::LoadU(d, g + c), vu = hn::LoadU(d, u + c), vb = hn::LoadU(d, back + c);
    const Sigmoid s = sigmoid(d, 0.0F, z);
    const VF silu = hn::Mul(z, s.value);
    sum = hn::MulAdd(vb, hn::Mul(silu, vu), sum);
    const VF da = hn::Mul(factor, vb);
    hn::StoreU(hn::Mul(da, silu), d, u + c);
    const VF slope = hn::MulAdd(silu, s.rest, s.value);
    hn::StoreU(hn::Mul(hn::Mul(da, vu), slope), d, g + c);
  });
  return sum_lanes(d, sum);
}

template <class T, class W>
void expert_hidden_back(const Pairs& pairs, const T* dy, const T* hidden, const T* scores,
                        const W& down, T* d_hidden, T* dscores) {
  const ExpertShape& shape = pairs.shape;
  const std::int64_t inner = shape.inner, width = shape.width;
  const std::int64_t wide = in_units(inner), apart = row_pitch(inner);
  const std::vector<Block> blocks = pairs.blocks();
  for (std::int64_t i = pairs.end(shape.experts - 1); i < shape.pairs(); ++i) {
    dscores[pairs.order[i]] = static_cast<T>(0.0F);
    std::fill_n(d_hidden + i * 2 * inner, 2 * inner, static_cast<T>(0.0F));
  }
  parallel_for(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t task) {
    const Block& b = blocks[static_cast<std::size_t>(task)];
    Pieces pieces{cpu::thread_scratch((width + kStrip) * kPitch + kColumns * apart + kLines +
                                      kPartRoom + 2 * wide + 128)};
    float* lines = pieces.take(kLines);
    float* columns = pieces.take(width * kPitch);
    float* room = pieces.take(kPartRoom);
    float* out = pieces.take(kStrip * kPitch);
    float* back = pieces.take(kColumns * apart);  // downᵀ·dy
    float *g = pieces.take(wide), *u = pieces.take(wide);
    load_columns<ProductStep::kNumber>(
        b, width, [&](std::int64_t i) { return dy + pairs.token(b.first + i) * width; }, lines,
        columns);
    for (std::int64_t r = 0; r < inner; r += kStrip) {
      const std::int64_t rows = std::min(kStrip, inner - r);
      columns_product(false, down, b.expert * width, width, r, rows, columns, b.pitch(),
                      in_units(b.count), room, out, kPitch);
      turn(out, kPitch, in_units(rows), b.count, back + r, apart);
    }
    for (std::int64_t i = 0; i < b.count; ++i) {
      const std::int64_t place = b.first + i;
      load_row(hidden + place * 2 * inner, inner, g);
      load_row(hidden + place * 2 * inner + inner, inner, u);
      const std::uint32_t pair = pairs.order[place];
      dscores[pair] = static_cast<T>(
          hidden_gradient(static_cast<float>(scores[pair]), wide, back + i * apart, g, u));
      store_row(g, inner, d_hidden + place * 2 * inner);
      store_row(u, inner, d_hidden + place * 2 * inner + inner);
    }
  });
}

inline std::int64_t expert_x_room(const ExpertShape& shape) { return 2 * expert_out_room(shape); }
template <class T, class W>
void expert_x_back(const Pairs& pairs, const T* d_hidden, const W& gate, const W& up,
                   float* columns, T* dx) {
  const std::int64_t inner = pairs.shape.inner;
  const std::vector<Block> blocks = pairs.blocks();
  all_columns<ProductStep::kNumber>(
      blocks, 2 * inner,
      [&](std::int64_t place, float* line, float*) {
        load_row(d_hidden + place * 2 * inner, 2 * inner, line);
      },
      columns);
  add_up(
      pairs, blocks, 2 * inner, columns, 0,
      [&](const Block& b, std::int64_t row, std::int64_t rows, const float* d, float* room,
          float* out) {
        columns_product(false, gate, b.expert * inner, inner, row, rows, d, b.pitch(),
                        in_units(b.count), room, out, kPitch);
        columns_product(true, up, b.expert * inner, inner, row, rows, d + inner * b.pitch(),
                        b.pitch(), in_units(b.count), room, out, kPitch);
        return turn_products(b, rows, out, room);
      },
      [](std::int64_t) { return 1.0F; }, dx);
}

// What the gradient of an expert's weights is made of, and where it goes: put(row, col, rows, length, dw, pitch) takes a
// part of it, whole groups of the weight where it has groups.
constexpr std::int64_t kSummed = 64;  // pairs at a time
template <class T, class Gate, class Up, class Down>
void expert_weights_back(const Pairs& pairs, const T* x, const T* dy, const T* hidden,
                         const T* d_hidden, const T* scores, std::int64_t strip, const Gate& dgate,
                         const Up& dup, const Down& ddown) {
  const std::int64_t inner = pairs.shape.inner, width = pairs.shape.width;
  const std::int64_t strips = ceil_div(inner, strip);
  const std::int64_t wide = row_pitch(width), part = row_pitch(strip);
  // A strip of the inner channels of an expert: rows of dgate and dup, columns of ddown.
  parallel_for(pairs.shape.experts * strips, [&](std::int64_t task) {
    const std::int64_t e = task / strips, from = task % strips * strip;
    const std::int64_t rows = std::min(strip, inner - from), m = in_units(rows);
    const std::int64_t n = in_units(width);
    Pieces pieces{cpu::thread_scratch((2 * strip + kSummed) * wide + n * part +
                                      (3 * kSummed + 1) * part + 256)};
    float *gates = pieces.take(strip * wide), *ups = pieces.take(strip * wide);
    float* downs = pieces.take(n * part);
    fill_row(0, m * wide, gates);
    fill_row(0, m * wide, ups);
    fill_row(0, n * part, downs);
    float* rows_of = pieces.take(kSummed * wide);  // x, then dy
    float* left[3];
    for (float*& l : left) l = pieces.take(kSummed * part);
    float* line = pieces.take(part);
    for (std::int64_t first = pairs.begin(e); first < pairs.end(e); first += kSummed) {
      const std::int64_t count = std::min(kSummed, pairs.end(e) - first);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t place = first + i;
        load_row(d_hidden + place * 2 * inner + from, rows, left[0] + i * part);
        load_row(d_hidden + place * 2 * inner + inner + from, rows, left[1] + i * part);
        activate(hidden + place * 2 * inner, inner, from, rows, line, left[2] + i * part);
        scale_row(static_cast<float>(scores[pairs.order[place]]), m, left[2] + i * part);
        load_row(x + pairs.token(place) * width, width, rows_of + i * wide);
      }
      product(true, {left[0], 1, part}, rows_of, wide, gates, wide, m, n, count);
      product(true, {left[1], 1, part}, rows_of, wide, ups, wide, m, n, count);
      for (std::int64_t i = 0; i < count; ++i) {
        load_row(dy + pairs.token(first + i) * width, width, rows_of + i * wide);
      }
      product(true, {rows_of, 1, wide}, left[2], part, downs, part, n, m, count);
    }
    dgate.put(e * inner + from, 0, rows, width, gates, wide);
    dup.put(e * inner + from, 0, rows, width, ups, wide);
    ddown.put(e * width, from, width, rows, downs, part);
  });
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
