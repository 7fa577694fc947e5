// Pairs (token, expert) in the order of their experts, and what is made of an expert's pairs at once.
//
// Products have weights as their first factor and pairs as columns, so that weights are read as they lie and once for each
// kColumns pairs; only activations, which are fewer, are turned around. What adds up over a token's experts is cut by
// channels: a task goes over all experts in order for its channels of every token, so nothing is kept for each pair and
// nothing is added twice at once.
#include "backends/cpu/device/turn-inl.h"
#include "backends/cpu/device/weights-inl.h"

#include <utility>
#include <vector>

#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/threads.h"

// Per-target include guard: Highway flips the toggle for each target.
#if defined(MLXTAPE_CPU_EXPERT_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MLXTAPE_CPU_EXPERT_BLOCKS_INL_H_
#undef MLXTAPE_CPU_EXPERT_BLOCKS_INL_H_
#else
#define MLXTAPE_CPU_EXPERT_BLOCKS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kColumns = 128;  // pairs at a time, at most
constexpr std::int64_t kPitch = row_pitch(kColumns);
constexpr std::int64_t kTurned =
    row_pitch(kStrip);                   // from pair to pair of a strip's products, turned
constexpr std::int64_t kChannels = 128;  // of what adds up, in a task
static_assert(kColumns * kTurned <= kPartRoom,
              "products are turned where a part of the weights was");

struct ExpertShape {
  std::int64_t tokens, chosen, experts, width, inner;  // T, k, E, H, I
  std::int64_t pairs() const { return tokens * chosen; }
};

// order [T·k]: pairs t·k + j by expert, then by pair; behind the last those whose index is past E.
inline void order_pairs(const ExpertShape& shape, const std::uint32_t* indices,
                        std::uint32_t* order) {
  std::vector<std::int64_t> next(static_cast<std::size_t>(shape.experts) + 1, 0);
  const auto of = [&](std::int64_t pair) {
    return static_cast<std::size_t>(std::min<std::int64_t>(indices[pair], shape.experts));
  };
  for (std::int64_t i = 0; i < shape.pairs(); ++i) ++next[of(i)];
  std::int64_t sum = 0;
  for (std::int64_t& place : next) sum += std::exchange(place, sum);
  for (std::int64_t i = 0; i < shape.pairs(); ++i) {
    order[next[of(i)]++] = static_cast<std::uint32_t>(i);
  }
}

// Some of an expert's pairs: places [first, first + count) of the order.
struct Block {
  std::int64_t expert, first, count;
  std::int64_t columns;  // of all blocks before, as far apart as pitch() says
  std::int64_t pitch() const { return row_pitch(count); }
};

struct Pairs {
  ExpertShape shape;
  const std::uint32_t* order;
  const std::uint32_t* offsets;  // [E + 1]

  std::int64_t begin(std::int64_t expert) const {
    return std::min<std::int64_t>(offsets[expert], shape.pairs());
  }
  std::int64_t end(std::int64_t expert) const { return std::max(begin(expert), begin(expert + 1)); }
  std::int64_t token(std::int64_t place) const { return order[place] / shape.chosen; }
  std::vector<Block> blocks() const {
    std::vector<Block> all;
    std::int64_t columns = 0;
    for (std::int64_t e = 0; e < shape.experts; ++e) {
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

// A block has less than two units of columns more than pairs, and an expert one block that may not be full.
inline std::int64_t most_columns(const ExpertShape& shape) {
  return shape.pairs() +
         2 * kUnit * (std::min(shape.experts, shape.pairs()) + shape.pairs() / kColumns);
}

// n elements as steps.
template <ProductStep kStep, class T>
HWY_INLINE void load_steps(const T* x, std::int64_t n, float* out) {
  if constexpr (kStep == ProductStep::kNumber) {
    load_row(x, n, out);
  } else if constexpr (std::is_same_v<T, float>) {
    store_row(x, n, reinterpret_cast<BF16*>(out));
  } else {
    std::memcpy(out, x, static_cast<std::size_t>(n) * sizeof(T));
  }
}

// Rows given by row(i) become the block's columns [width in steps, its pitch], and zeros up to whole units.
constexpr std::int64_t kLines = kUnit * row_pitch(kDepth);
template <ProductStep kStep, class Row>
HWY_INLINE void load_columns(const Block& b, std::int64_t width, const Row& row, float* lines,
                             float* out) {
  constexpr std::int64_t kWidth = width_of(kStep), kApart = row_pitch(kDepth);
  for (std::int64_t i = 0; i < b.count; i += kUnit) {
    for (std::int64_t c = 0; c < width; c += kWidth * kDepth) {
      const std::int64_t some = std::min(kWidth * kDepth, width - c), steps = some / kWidth;
      for (std::int64_t k = 0; k < kUnit; ++k) {
        float* line = lines + k * kApart;
        i + k < b.count ? load_steps<kStep>(row(i + k) + c, some, line)
                        : fill_row(0, in_units(steps), line);
      }
      turn(lines, kApart, kUnit, steps, out + c / kWidth * b.pitch() + i, b.pitch());
    }
  }
}

// Columns of every block for sums over experts, made by make(place, line, room): line and room are [height] of f32. Of
// blocks with no more pairs than `few` they stay rows, put by prepare(line, row), height apart.
struct NoRows {};
template <ProductStep kStep, class Make, class Prepare = NoRows>
void all_columns(const std::vector<Block>& blocks, std::int64_t height, const Make& make,
                 float* columns, std::int64_t few = 0, const Prepare& prepare = {}) {
  const std::int64_t apart = row_pitch(height), steps = height / width_of(kStep);
  parallel_for(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t task) {
    const Block& b = blocks[static_cast<std::size_t>(task)];
    float* lines = cpu::thread_scratch((kUnit + 2) * apart);
    float *made = lines + kUnit * apart, *room = made + apart;
    float* out = columns + b.columns * height;
    if constexpr (!std::is_same_v<Prepare, NoRows>) {
      for (std::int64_t i = 0; b.count <= few && i < b.count; ++i) {
        make(b.first + i, made, room);
        prepare(made, out + i * height);
      }
      if (b.count <= few) return;
    }
    for (std::int64_t i = 0; i < b.count; i += kUnit) {
      for (std::int64_t k = 0; k < kUnit; ++k) {
        float* line = lines + k * apart;
        if (i + k >= b.count) {
          fill_row(0, in_units(steps), line);
        } else if constexpr (kStep == ProductStep::kNumber) {
          make(b.first + i + k, line, room);
        } else {
          make(b.first + i + k, made, room);
          load_steps<kStep>(made, height, line);
        }
      }
      turn(lines, apart, kUnit, steps, out + i, b.pitch());
    }
  });
}

// Products of some rows and a block's pairs: row r of pair i is at[i·pitch + r].
struct Made {
  const float* at;
  std::int64_t pitch;
};
HWY_INLINE Made turn_products(const Block& b, std::int64_t rows, const float* out, float* room) {
  turn(out, kPitch, in_units(rows), b.count, room, kTurned);
  return {room, kTurned};
}

// out_t = Σ over a token's pairs of factor(place)·(weights of its expert · its column). part(block, row, rows, columns,
// room, sums) makes the product for some rows, which are channels of out [T, H].
template <class T, class Part, class Weight>
void add_up(const Pairs& pairs, const std::vector<Block>& blocks, std::int64_t height,
            const float* columns, std::int64_t part_room, const Part& part, const Weight& weight,
            T* out) {
  const ExpertShape& shape = pairs.shape;
  parallel_for(ceil_div(shape.width, kChannels), [&](std::int64_t task) {
    const std::int64_t from = task * kChannels, width = std::min(kChannels, shape.width - from);
    Pieces pieces{cpu::thread_scratch(shape.tokens * kChannels + std::max(kPartRoom, part_room) +
                                      kStrip * kPitch + 64)};
    float* sums = pieces.take(shape.tokens * kChannels);
    float* room = pieces.take(std::max(kPartRoom, part_room));
    float* products = pieces.take(kStrip * kPitch);
    fill_row(0, shape.tokens * kChannels, sums);
    for (const Block& block : blocks) {
      for (std::int64_t r = 0; r < width; r += kStrip) {
        const std::int64_t rows = std::min(kStrip, width - r);
        const Made made =
            part(block, from + r, rows, columns + block.columns * height, room, products);
        for (std::int64_t i = 0; i < block.count; ++i) {
          add_row(weight(block.first + i), made.at + i * made.pitch, in_units(rows),
                  sums + pairs.token(block.first + i) * kChannels + r);
        }
      }
    }
    for (std::int64_t t = 0; t < shape.tokens; ++t) {
      store_row(sums + t * kChannels, width, out + t * shape.width + from);
    }
  });
}

}  // namespace
}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
