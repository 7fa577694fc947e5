// CPU kernels of experts (formula: mlxtape/ops/experts.h).
//
// Pairs (token, expert) stand in the order of their experts. Products have weights as their first factor and pairs
// as columns, so that weights are read as they lie and once for each kColumns pairs; only activations, which are
// fewer, are turned around. What adds up over a token's experts (y and dx) is cut by channels: a task goes over all
// experts in order for its channels of every token, so nothing is kept for each pair and nothing is added twice at
// once. Bound by reading the weights while an expert has fewer than about 30 pairs, by arithmetic with more.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/experts/experts.cpu.cpp"
#include <hwy/foreach_target.h>

#include <type_traits>
#include <utility>
#include <vector>

#include "backends/cpu/device/dots-inl.h"
#include "backends/cpu/device/products-inl.h"
#include "backends/cpu/device/tasks.h"
#include "experts_args.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kColumns = 128;  // pairs at a time, at most
constexpr std::int64_t kPitch = row_pitch(kColumns);
constexpr std::int64_t kSummed = 64;     // pairs at a time where they are summed over
constexpr std::int64_t kDepth = 256;     // of a product at a time: of 32 columns 32 KiB
constexpr std::int64_t kStrip = 64;      // rows of weights at a time
constexpr std::int64_t kChannels = 128;  // of y and dx in a task
constexpr std::int64_t kFew =
    8;  // pairs of an expert, or fewer: forward nothing is turned, weights go by once

// ---- pairs ----

void experts_order(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const auto* indices = call.input<std::uint32_t>(0);
  auto* order = call.output<std::uint32_t>(0);
  const std::int64_t pairs = args.tokens * args.chosen;
  std::vector<std::int64_t> next(static_cast<std::size_t>(args.experts) + 1, 0);
  const auto of = [&](std::int64_t pair) {
    return static_cast<std::size_t>(std::min<std::int64_t>(indices[pair], args.experts));
  };
  for (std::int64_t i = 0; i < pairs; ++i) ++next[of(i)];
  std::int64_t sum = 0;
  for (std::int64_t& place : next) sum += std::exchange(place, sum);
  for (std::int64_t i = 0; i < pairs; ++i) order[next[of(i)]++] = static_cast<std::uint32_t>(i);
}

// Some of an expert's pairs: places [first, first + count) of the order.
struct Block {
  std::int64_t expert, first, count;
  std::int64_t columns;  // of all blocks before, as far apart as pitch() says
  std::int64_t pitch() const { return row_pitch(count); }
  bool few() const { return count <= kFew; }
};

struct Pairs {
  const ExpertsArgs& args;
  const std::uint32_t* order;
  const std::uint32_t* offsets;

  std::int64_t begin(std::int64_t expert) const {
    return std::min<std::int64_t>(offsets[expert], args.tokens * args.chosen);
  }
  std::int64_t end(std::int64_t expert) const { return std::max(begin(expert), begin(expert + 1)); }
  std::int64_t token(std::int64_t place) const { return order[place] / args.chosen; }
  std::vector<Block> blocks() const {
    std::vector<Block> all;
    std::int64_t columns = 0;
    for (std::int64_t e = 0; e < args.experts; ++e) {
      const std::int64_t count = end(e) - begin(e), parts = ceil_div(count, kColumns);
      for (std::int64_t i = 0; i < parts; ++i) {  // alike, none with a handful
        const std::int64_t from = begin(e) + count * i / parts;
        all.push_back({e, from, begin(e) + count * (i + 1) / parts - from, columns});
        columns += all.back().pitch();
      }
    }
    return all;
  }
};

// ---- matrices ----

// kUnit lines become columns of out [width, pitch]: whole lines of the cache are written.
HWY_INLINE void turn_unit(const float* lines, std::int64_t apart, std::int64_t width, float* out,
                          std::int64_t pitch) {
  for (std::int64_t c = 0; c < width; ++c) {
#pragma GCC unroll 16
    for (std::int64_t k = 0; k < kUnit; ++k) out[c * pitch + k] = lines[k * apart + c];
  }
}

// Rows given by row(i) become the block's columns, and zeros up to whole units.
constexpr std::int64_t kLines = kUnit * row_pitch(kDepth);
template <class Row>
HWY_INLINE void load_columns(const Block& b, std::int64_t width, const Row& row, float* lines,
                             float* out) {
  const std::int64_t apart = row_pitch(kDepth);
  for (std::int64_t i = 0; i < b.count; i += kUnit) {
    for (std::int64_t c = 0; c < width; c += kDepth) {
      const std::int64_t some = std::min(kDepth, width - c);
      for (std::int64_t k = 0; k < kUnit; ++k) {
        float* line = lines + k * apart;
        i + k < b.count ? load_row(row(i + k) + c, some, line) : fill_row(0, in_units(some), line);
      }
      turn_unit(lines, apart, some, out + c * b.pitch() + i, b.pitch());
    }
  }
}

// A part of a weight matrix as f32, ready to be a first factor: rows × depth from (row, at) on. Element (r, l) of
// the whole is w[r·row_step + l·col_step], one of which is 1. Zeros fill up the rows.
template <class T>
HWY_INLINE Factor weights_part(const T* w, std::int64_t row_step, std::int64_t col_step,
                               std::int64_t rows, std::int64_t depth, float* room) {
  const bool by_rows = col_step == 1;
  if constexpr (std::is_same_v<T, float>) {
    if (by_rows && rows % kUnit == 0) return {w, row_step, 1};  // as it lies
  }
  const std::int64_t lines = by_rows ? rows : depth, length = by_rows ? depth : rows;
  const std::int64_t step = by_rows ? row_step : col_step, pitch = row_pitch(length);
  for (std::int64_t i = 0; i < lines; ++i) load_row(w + i * step, length, room + i * pitch);
  if (!by_rows) return {room, 1, pitch};
  for (std::int64_t i = rows; i < in_units(rows); ++i)
    fill_row(0, in_units(length), room + i * pitch);
  return {room, pitch, 1};
}
constexpr std::int64_t kPartRoom = std::max(kStrip * row_pitch(kDepth), kDepth* row_pitch(kStrip));

// out [rows, kPitch] (+)= w [rows, depth]·columns [depth, the block's pitch], rows ≤ kStrip.
template <class T>
HWY_INLINE void weights_product(bool add, const T* w, std::int64_t row_step, std::int64_t col_step,
                                std::int64_t rows, std::int64_t depth, const float* columns,
                                const Block& b, float* room, float* out) {
  for (std::int64_t l = 0; l < depth; l += kDepth) {
    const std::int64_t some = std::min(kDepth, depth - l);
    const Factor part = weights_part(w + l * col_step, row_step, col_step, rows, some, room);
    product(add || l > 0, part, columns + l * b.pitch(), b.pitch(), out, kPitch, in_units(rows),
            in_units(b.count), some);
  }
}

// a = g·σ(g)∘u of a pair, for `count` inner channels from `from` on; hidden [2, I]; g: as much room as a.
template <class T>
HWY_INLINE void activate(const T* hidden, std::int64_t inner, std::int64_t from, std::int64_t count,
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
template <class T>
HWY_INLINE void hidden_of_few(const Block& b, const Pairs& pairs, const T* x, const T* w,
                              std::int64_t from, std::int64_t rows, int which, T* hidden) {
  const ExpertsArgs& args = pairs.args;
  const std::int64_t apart = row_pitch(args.width);
  Pieces pieces{cpu::thread_scratch(kFew * (apart + kStrip))};
  float *lines = pieces.take(kFew * apart), *out = pieces.take(kFew * kStrip);
  for (std::int64_t i = 0; i < b.count; ++i) {
    load_row(x + pairs.token(b.first + i) * args.width, args.width, lines + i * apart);
  }
  dot_rows(lines, apart, b.count, w + (b.expert * args.inner + from) * args.width, args.width, rows,
           args.width, out, kStrip);
  for (std::int64_t i = 0; i < b.count; ++i) {
    store_row(out + i * kStrip, rows, hidden + ((b.first + i) * 2 + which) * args.inner + from);
  }
}

template <class T>
void experts_hidden_fwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const T* x = call.input<T>(0);
  const Pairs pairs{args, call.input<std::uint32_t>(1), call.input<std::uint32_t>(2)};
  const T *gate = call.input<T>(3), *up = call.input<T>(4);
  T* hidden = call.output<T>(0);  // [pairs, 2, I]
  const std::vector<Block> all = pairs.blocks();
  std::vector<Block> few, blocks;
  for (const Block& b : all) (b.few() ? few : blocks).push_back(b);
  const std::int64_t strips = ceil_div(args.inner, kStrip);
  parallel_for(static_cast<std::int64_t>(few.size()) * 2 * strips, [&](std::int64_t task) {
    const std::int64_t from = task % strips * kStrip;
    const int which = static_cast<int>(task / strips % 2);
    hidden_of_few(few[static_cast<std::size_t>(task / strips / 2)], pairs, x,
                  which == 0 ? gate : up, from, std::min(kStrip, args.inner - from), which, hidden);
  });
  parallel_for(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t task) {
    const Block& b = blocks[static_cast<std::size_t>(task)];
    Pieces pieces{
        cpu::thread_scratch(args.width * kPitch + kLines + kPartRoom + kStrip * kPitch + 64)};
    float* lines = pieces.take(kLines);
    float* columns = pieces.take(args.width * kPitch);
    float* room = pieces.take(kPartRoom);
    float* out = pieces.take(kStrip * kPitch);
    load_columns(
        b, args.width, [&](std::int64_t i) { return x + pairs.token(b.first + i) * args.width; },
        lines, columns);
    for (int which = 0; which < 2; ++which) {
      const T* w = (which == 0 ? gate : up) + b.expert * args.inner * args.width;
      for (std::int64_t r = 0; r < args.inner; r += kStrip) {
        const std::int64_t rows = std::min(kStrip, args.inner - r);
        weights_product(false, w + r * args.width, args.width, 1, rows, args.width, columns, b,
                        room, out);
        for (std::int64_t i = 0; i < b.count; ++i) {
          T* to = hidden + ((b.first + i) * 2 + which) * args.inner + r;
          for (std::int64_t c = 0; c < rows; ++c) to[c] = static_cast<T>(out[c * kPitch + i]);
        }
      }
    }
  });
}

// Columns of every block for sums over experts, made by make(place, line, room): line and room are [height]. Where
// there are few of them and by_dots, they stay rows.
template <class Make>
void all_columns(const std::vector<Block>& blocks, std::int64_t height, const Make& make,
                 float* columns, bool by_dots = false) {
  const std::int64_t apart = row_pitch(height);
  parallel_for(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t task) {
    const Block& b = blocks[static_cast<std::size_t>(task)];
    float* lines = cpu::thread_scratch((kUnit + 1) * apart);
    if (by_dots && b.few()) {
      for (std::int64_t i = 0; i < b.count; ++i) {
        make(b.first + i, lines, lines + kUnit * apart);
        std::copy_n(lines, height, columns + b.columns * height + i * height);
      }
      return;
    }
    for (std::int64_t i = 0; i < b.count; i += kUnit) {
      for (std::int64_t k = 0; k < kUnit; ++k) {
        float* line = lines + k * apart;
        i + k < b.count ? make(b.first + i + k, line, lines + kUnit * apart)
                        : fill_row(0, in_units(height), line);
      }
      turn_unit(lines, apart, height, columns + b.columns * height + i, b.pitch());
    }
  });
}
// A block has less than two units of columns more than pairs, and an expert one block that may not be full.
std::int64_t most_columns(const ExpertsArgs& args) {
  const std::int64_t pairs = args.tokens * args.chosen;
  return pairs + 2 * kUnit * (std::min(args.experts, pairs) + pairs / kColumns);
}

// Where the product of row r and pair i of a block stands: i·of_pair + r·of_row.
struct Made {
  std::int64_t of_pair = 1, of_row = kPitch;
};

// out_t = Σ over a token's pairs of factor(place)·(weights of its expert · its column). part(block, row, rows, columns,
// room, sums) makes the product for some rows, which are channels of out, and says where it put them.
template <class T, class Part, class Weight>
void add_up(const Pairs& pairs, const std::vector<Block>& blocks, std::int64_t height,
            const float* columns, const Part& part, const Weight& weight, T* out) {
  const ExpertsArgs& args = pairs.args;
  parallel_for(ceil_div(args.width, kChannels), [&](std::int64_t task) {
    const std::int64_t from = task * kChannels, width = std::min(kChannels, args.width - from);
    Pieces pieces{cpu::thread_scratch(args.tokens * kChannels + kPartRoom + kStrip * kPitch + 64)};
    float* sums = pieces.take(args.tokens * kChannels);
    float* room = pieces.take(kPartRoom);
    float* made = pieces.take(kStrip * kPitch);
    std::fill(sums, sums + args.tokens * kChannels, 0.0F);
    for (const Block& block : blocks) {
      for (std::int64_t r = 0; r < width; r += kStrip) {
        const std::int64_t rows = std::min(kStrip, width - r);
        const Made at = part(block, from + r, rows, columns + block.columns * height, room, made);
        for (std::int64_t i = 0; i < block.count; ++i) {
          const float factor = weight(block.first + i);
          float* to = sums + pairs.token(block.first + i) * kChannels + r;
          const float* product = made + i * at.of_pair;
          for (std::int64_t c = 0; c < rows; ++c) to[c] += factor * product[c * at.of_row];
        }
      }
    }
    for (std::int64_t t = 0; t < args.tokens; ++t) {
      store_row(sums + t * kChannels, width, out + t * args.width + from);
    }
  });
}

template <class T>
void experts_out_fwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const T* hidden = call.input<T>(0);
  const Pairs pairs{args, call.input<std::uint32_t>(1), call.input<std::uint32_t>(2)};
  const T *scores = call.input<T>(3), *down = call.input<T>(4);
  auto* columns = static_cast<float*>(call.workspace);
  const std::vector<Block> blocks = pairs.blocks();
  const std::int64_t inner = args.inner;
  all_columns(
      blocks, inner,
      [&](std::int64_t place, float* line, float* g) {
        activate(hidden + place * 2 * inner, inner, 0, inner, g, line);
      },
      columns, true);
  add_up(
      pairs, blocks, inner, columns,
      [&](const Block& b, std::int64_t row, std::int64_t rows, const float* a, float* room,
          float* out) {
        const T* w = down + (b.expert * args.width + row) * inner;
        if (b.few()) {
          dot_rows(a, inner, b.count, w, inner, rows, inner, out, kStrip);
          return Made{kStrip, 1};
        }
        weights_product(false, w, inner, 1, rows, inner, a, b, room, out);
        return Made{};
      },
      [&](std::int64_t place) { return static_cast<float>(scores[pairs.order[place]]); },
      call.output<T>(0));
}

std::size_t out_room(const void* opaque) {
  const auto& args = *static_cast<const ExpertsArgs*>(opaque);
  return static_cast<std::size_t>(most_columns(args) * args.inner) * sizeof(float);
}

// ---- backward ----

template <class T>
void experts_hidden_bwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const T *dy = call.input<T>(0), *hidden = call.input<T>(1);
  const Pairs pairs{args, call.input<std::uint32_t>(2), call.input<std::uint32_t>(3)};
  const T *scores = call.input<T>(4), *down = call.input<T>(5);
  T *d_hidden = call.output<T>(0), *dscores = call.output<T>(1);
  const std::int64_t inner = args.inner, wide = in_units(inner);
  const std::vector<Block> blocks = pairs.blocks();
  for (std::int64_t i = pairs.end(args.experts - 1); i < args.tokens * args.chosen; ++i) {
    dscores[pairs.order[i]] = static_cast<T>(0.0F);
    std::fill_n(d_hidden + i * 2 * inner, 2 * inner, static_cast<T>(0.0F));
  }
  parallel_for(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t task) {
    const Block& b = blocks[static_cast<std::size_t>(task)];
    Pieces pieces{cpu::thread_scratch((args.width + in_units(inner)) * kPitch + kLines + kPartRoom +
                                      5 * wide + 128)};
    float* lines = pieces.take(kLines);
    float* columns = pieces.take(args.width * kPitch);
    float* room = pieces.take(kPartRoom);
    float* back = pieces.take(in_units(inner) * kPitch);  // downᵀ·dy
    float* g = pieces.take(5 * wide);
    load_columns(
        b, args.width, [&](std::int64_t i) { return dy + pairs.token(b.first + i) * args.width; },
        lines, columns);
    const T* w = down + b.expert * args.width * inner;
    for (std::int64_t r = 0; r < inner; r += kStrip) {
      weights_product(false, w + r, 1, inner, std::min(kStrip, inner - r), args.width, columns, b,
                      room, back + r * kPitch);
    }
    const DF d;
    float *u = g + wide, *from = u + wide, *dg = from + wide, *du = dg + wide;
    for (std::int64_t i = 0; i < b.count; ++i) {
      const std::int64_t place = b.first + i;
      load_row(hidden + place * 2 * inner, inner, g);
      load_row(hidden + place * 2 * inner + inner, inner, u);
      fill_row(0, wide, from);
      for (std::int64_t c = 0; c < inner; ++c) from[c] = back[c * kPitch + i];
      const VF score = hn::Set(d, static_cast<float>(scores[pairs.order[place]]));
      VF sum = hn::Zero(d);
      each_vector(wide, [&](std::int64_t c) HWY_ATTR {
        const VF z = hn::LoadU(d, g + c), vu = hn::LoadU(d, u + c), vb = hn::LoadU(d, from + c);
        const Sigmoid s = sigmoid(d, 0.0F, z);
        const VF silu = hn::Mul(z, s.value);
        sum = hn::MulAdd(vb, hn::Mul(silu, vu), sum);
        const VF da = hn::Mul(score, vb);
        hn::StoreU(hn::Mul(da, silu), d, du + c);
        const VF slope = hn::MulAdd(silu, s.rest, s.value);
        hn::StoreU(hn::Mul(hn::Mul(da, vu), slope), d, dg + c);
      });
      dscores[pairs.order[place]] = static_cast<T>(sum_lanes(d, sum));
      store_row(dg, inner, d_hidden + place * 2 * inner);
      store_row(du, inner, d_hidden + place * 2 * inner + inner);
    }
  });
}

template <class T>
void experts_x_bwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const T* d_hidden = call.input<T>(0);
  const Pairs pairs{args, call.input<std::uint32_t>(1), call.input<std::uint32_t>(2)};
  const T *gate = call.input<T>(3), *up = call.input<T>(4);
  auto* columns = static_cast<float*>(call.workspace);
  const std::vector<Block> blocks = pairs.blocks();
  const std::int64_t inner = args.inner;
  all_columns(
      blocks, 2 * inner,
      [&](std::int64_t place, float* line, float*) {
        load_row(d_hidden + place * 2 * inner, 2 * inner, line);
      },
      columns);
  add_up(
      pairs, blocks, 2 * inner, columns,
      [&](const Block& b, std::int64_t row, std::int64_t rows, const float* d, float* room,
          float* out) {
        const std::int64_t at = b.expert * inner * args.width + row;
        weights_product(false, gate + at, 1, args.width, rows, inner, d, b, room, out);
        weights_product(true, up + at, 1, args.width, rows, inner, d + inner * b.pitch(), b, room,
                        out);
        return Made{};
      },
      [](std::int64_t) { return 1.0F; }, call.output<T>(0));
}

std::size_t x_room(const void* opaque) { return 2 * out_room(opaque); }

template <class T>
void experts_weights_bwd(const KernelCall& call) {
  const auto& args = call.as<ExpertsArgs>();
  const T *x = call.input<T>(0), *dy = call.input<T>(1);
  const T *hidden = call.input<T>(2), *d_hidden = call.input<T>(3);
  const Pairs pairs{args, call.input<std::uint32_t>(4), call.input<std::uint32_t>(5)};
  const T* scores = call.input<T>(6);
  T *dgate = call.output<T>(0), *dup = call.output<T>(1), *ddown = call.output<T>(2);
  const std::int64_t inner = args.inner, width = args.width;
  const std::int64_t strips = ceil_div(inner, kStrip);
  const std::int64_t wide = row_pitch(width), part = row_pitch(kStrip);
  // A strip of the inner channels of an expert: rows of dgate and dup, columns of ddown.
  parallel_for(args.experts * strips, [&](std::int64_t task) {
    const std::int64_t e = task / strips, from = task % strips * kStrip;
    const std::int64_t rows = std::min(kStrip, inner - from), m = in_units(rows);
    Pieces pieces{cpu::thread_scratch((2 * kStrip + kSummed) * wide + in_units(width) * part +
                                      3 * kSummed * part + 256)};
    float *gates = pieces.take(kStrip * wide), *ups = pieces.take(kStrip * wide);
    float* downs = pieces.take(in_units(width) * part);
    std::fill(gates, gates + m * wide, 0.0F);
    std::fill(ups, ups + m * wide, 0.0F);
    std::fill(downs, downs + in_units(width) * part, 0.0F);
    float* rows_of = pieces.take(kSummed * wide);  // x, then dy
    float* left[3];
    for (float*& l : left) l = pieces.take(kSummed * part);
    float* line = pieces.take(kStrip);
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
      const std::int64_t n = in_units(width);
      product(true, {left[0], 1, part}, rows_of, wide, gates, wide, m, n, count);
      product(true, {left[1], 1, part}, rows_of, wide, ups, wide, m, n, count);
      for (std::int64_t i = 0; i < count; ++i) {
        load_row(dy + pairs.token(first + i) * width, width, rows_of + i * wide);
      }
      product(true, {rows_of, 1, wide}, left[2], part, downs, part, n, m, count);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      store_row(gates + r * wide, width, dgate + (e * inner + from + r) * width);
      store_row(ups + r * wide, width, dup + (e * inner + from + r) * width);
    }
    for (std::int64_t c = 0; c < width; ++c) {
      store_row(downs + c * part, rows, ddown + (e * width + c) * inner + from);
    }
  });
}

}  // namespace

void register_experts(KernelRegistry& registry) {
  registry.add(Backend::kCpu, "experts_order_u32", experts_order);
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCpu, "experts_hidden_fwd_" + type, experts_hidden_fwd<T>);
    registry.add(Backend::kCpu, "experts_out_fwd_" + type, experts_out_fwd<T>, out_room);
    registry.add(Backend::kCpu, "experts_hidden_bwd_" + type, experts_hidden_bwd<T>);
    registry.add(Backend::kCpu, "experts_x_bwd_" + type, experts_x_bwd<T>, x_room);
    registry.add(Backend::kCpu, "experts_weights_bwd_" + type, experts_weights_bwd<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(experts)
