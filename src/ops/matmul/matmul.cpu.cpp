// CPU kernels of matmul (formula and layout: mlxtape/ops/matmul.h).
//
// C is cut into tiles, one task each. A task copies kDepth columns of its rows of A, all of them (second-level
// cache), then for each kTileCols columns the same depth of B (first-level cache), then goes down the rows:
// a register tile at a time, 28 sums in AVX-512 (matmul_micro-inl.h). bf16 stays so where the processor multiplies pairs
// of them, which is twice as fast. Sums of every element run over k in one chain whatever the cut, so bits do not depend on it. Bound by arithmetic: of a core's peak, copying costs
// 32·c/rows + 32·c/cols, where c = 0.1 to 0.3 cycles is what copying an element takes.
// 16 rows or columns and fewer are bound by reading the other matrix, which is not copied (matmul_few-inl.h).
// Where there are fewer tiles than kTasks and k is long, k is cut as well, by the shape alone, and the parts
// are added in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul/matmul.cpu.cpp"
#include <hwy/foreach_target.h>

#include <type_traits>

#include "backends/cpu/targets.h"
#include "matmul_few-inl.h"
#include "matmul_finish-inl.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

// ---- how the work is cut, by the shape alone ----

constexpr std::int64_t kTasks = 16;       // fewer tiles than this: k is cut, too
constexpr std::int64_t kShortest = 2048;  // part of k
constexpr double kSmallWork = 0x1p18;  // multiplications; with less, several of a batch make a task
constexpr std::int64_t kMostRows = 37 * kTileRows;  // of a tile: 564 KB of A in AVX-512
constexpr std::int64_t kMostCols = 512;

std::int64_t rounded_up(std::int64_t n, std::int64_t to) { return ceil_div(n, to) * to; }

// n cut into parts of at most `most`, as equal as multiples of unit allow: the length of a part.
std::int64_t equal_parts(std::int64_t n, std::int64_t most, std::int64_t unit) {
  return n == 0 ? unit : rounded_up(ceil_div(n, ceil_div(n, most)), unit);
}

enum class Way { kTiles, kFewRows, kFewCols };

struct Plan {
  Way way = Way::kTiles;
  std::int64_t batches = 1;
  std::int64_t rows = 0, cols = 0;  // of a tile
  std::int64_t row_tiles = 1, col_tiles = 1;
  std::int64_t splits = 1, depth = 0;  // of k: how many parts, how long
  std::int64_t each = 1;               // matrices of a batch in one task

  std::int64_t tiles() const { return row_tiles * col_tiles; }
  explicit Plan(const MatmulArgs& args);
};

Plan::Plan(const MatmulArgs& args) {
  const auto [m, n, k] = std::array{args.m, args.n, args.k};
  for (std::int64_t i = 0; i < args.batch_axes; ++i) batches *= args.batch[i];
  if (m <= kFew || n <= kFew) {
    way = m <= n ? Way::kFewRows : Way::kFewCols;
    const std::int64_t many = std::max(m, n);
    const std::int64_t strip = equal_parts(many, many >= 8192 ? 512 : 256, kTileCols);
    (way == Way::kFewRows ? cols : rows) = strip;
    (way == Way::kFewRows ? rows : cols) = std::min(m, n);
    (way == Way::kFewRows ? col_tiles : row_tiles) = ceil_div(many, strip);
  } else {
    std::int64_t most_rows = kMostRows, most_cols = kMostCols;
    for (;;) {
      rows = equal_parts(m, most_rows, kTileRows);
      cols = equal_parts(n, most_cols, kTileCols);
      row_tiles = ceil_div(m, rows);
      col_tiles = ceil_div(n, cols);
      if (batches * tiles() >= kTasks / 2) break;
      if (cols >= rows / 2 && cols > 2 * kTileCols) {
        most_cols = cols / 2;
      } else if (rows > 4 * kTileRows) {
        most_rows = rows / 2;
      } else {
        break;
      }
    }
  }
  if (batches * tiles() < kTasks) {
    splits = std::clamp<std::int64_t>(k / kShortest, 1, kTasks / (batches * tiles()));
  }
  depth = splits == 1 ? k : rounded_up(ceil_div(k, splits), kDepth);
  splits = std::max<std::int64_t>(1, depth == 0 ? 1 : ceil_div(k, depth));
  if (tiles() == 1 && splits == 1) {
    const double work = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    each = static_cast<std::int64_t>(
        std::clamp(kSmallWork / std::max(1.0, work), 1.0, static_cast<double>(batches)));
  }
}

// ---- one tile ----

using MicroFn = void (*)(const float*, const float*, std::int64_t, float*, std::int64_t, bool);
template <PanelA kForm, ProductStep kStep>
constexpr auto kMicro = table_of(std::make_index_sequence<kTileRows>(), [](auto n) {
  return static_cast<MicroFn>(micro<n(), kForm, kStep>);
});

// Part of a problem: rows × cols of C from (row, col) on, over depth of k.
template <class T>
struct Part {
  Matrix<T> a, b;       // from the part's first row, column and k on
  std::int64_t at;      // of its first element in y
  std::int64_t pitch;   // of y
  std::int64_t column;  // its first column
  std::int64_t rows, cols, depth;
};

template <class T, class O>
void finish_rows(const Part<T>& p, const Finish<T, O>& finish, std::int64_t row, std::int64_t col,
                 std::int64_t rows, std::int64_t cols, const float* sums, std::int64_t pitch) {
  for (std::int64_t r = 0; r < rows; ++r) {
    finish.row(sums + r * pitch, p.at + (row + r) * p.pitch + col, p.column + col, cols);
  }
}

template <ProductStep kStep, class T, class O>
void run_tile(const Part<T>& p, const Finish<T, O>& finish) {
  constexpr std::int64_t kWidth = width_of(kStep);
  const std::int64_t blocks = std::max<std::int64_t>(1, ceil_div(p.depth, kWidth * kDepth));
  // The sums of one block can go where they belong at once.
  const bool plain = blocks == 1 && finish.is_plain();
  const std::int64_t block = equal_parts(p.depth, kWidth * kDepth, kWidth);
  const std::int64_t panels = ceil_div(p.rows, kTileRows);
  const bool waits = blocks > 1;  // sums, for the next block
  const std::int64_t wait_pitch = waits ? rounded_up(p.cols, kTileCols) : kTileCols;
  float* a = cpu::thread_scratch(panels * kPanelA + kLanes + kPanelB +
                                 (waits ? panels : 1) * kTileRows * wait_pitch + 16);
  float* b = a + rounded_up(panels * kPanelA + kLanes, 16);
  float* c = b + kPanelB;
  const auto& micros =
      p.a.col == 1 ? kMicro<PanelA::kRows, kStep> : kMicro<PanelA::kColumns, kStep>;

  for (std::int64_t i = 0; i < blocks; ++i) {
    const std::int64_t k = i * block, depth = std::min(block, p.depth - k);
    const std::int64_t steps = ceil_div(depth, kWidth);
    pack_a<kStep>(p.a.from(0, k), p.rows, depth, a);
    for (std::int64_t col = 0; col < p.cols; col += kTileCols) {
      const std::int64_t cols = std::min(kTileCols, p.cols - col);
      pack_b<kStep>(p.b.from(k, col), depth, p.cols - col, b);
      for (std::int64_t row = 0; row < p.rows; row += kTileRows) {
        const std::int64_t rows = std::min(kTileRows, p.rows - row);
        const MicroFn run = micros[static_cast<std::size_t>(rows - 1)];
        const float* panel = a + row / kTileRows * kPanelA;
        if constexpr (sizeof(O) == 4) {
          if (plain && cols == kTileCols) {
            run(panel, b, steps, finish.y + p.at + row * p.pitch + col, p.pitch, finish.beta != 0);
            continue;
          }
        }
        float* sums = waits ? c + row * wait_pitch + col : c;
        run(panel, b, steps, sums, wait_pitch, i > 0);
        if (i + 1 == blocks) finish_rows(p, finish, row, col, rows, cols, sums, wait_pitch);
      }
    }
  }
}

template <class T, class O>
void run_tile(const Part<T>& p, const Finish<T, O>& finish) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (std::is_same_v<T, BF16>) {
    if (cpu::bf16_dots()) return run_tile<ProductStep::kPair>(p, finish);
  }
#endif
  run_tile<ProductStep::kNumber>(p, finish);
}

template <class T, class O>
void run_few(const Part<T>& p, const Finish<T, O>& finish, bool few_rows) {
  // Few columns: the same of the transposed matrices.
  const Matrix<T> s = few_rows ? p.a : p.b.transposed();
  const Matrix<T> l = few_rows ? p.b : p.a.transposed();
  const std::int64_t few = few_rows ? p.rows : p.cols, many = few_rows ? p.cols : p.rows;
  const std::int64_t pitch = rounded_up(many, kTileCols);
  float* sums = cpu::thread_scratch(kFew * pitch + few_rows_room(few, p.depth) + 16);
  l.col == 1 ? few_streams(s, l, few, many, p.depth, sums, pitch)
             : few_products(s, l, few, many, p.depth, sums, pitch, sums + kFew * pitch);
  if (few_rows) return finish_rows(p, finish, 0, 0, few, many, sums, pitch);
  if (few == 1 && p.pitch == 1 && finish.bias == nullptr) {  // y is one long row
    return finish.row(sums, p.at, 0, many);
  }
  HWY_ALIGN float turned[kFew];
  for (std::int64_t r = 0; r < many; ++r) {
    for (std::int64_t c = 0; c < few; ++c) turned[c] = sums[c * pitch + r];
    finish.row(turned, p.at + r * p.pitch, p.column, few);
  }
}

// ---- the whole ----

template <class T>
Part<T> part_of(const MatmulArgs& args, const Plan& plan, Matrix<T> a, Matrix<T> b,
                std::int64_t batch, std::int64_t tile, std::int64_t split) {
  std::int64_t rest = batch;
  for (std::int64_t i = args.batch_axes - 1; i >= 0; --i) {
    a.at += rest % args.batch[i] * args.a_batch[i];
    b.at += rest % args.batch[i] * args.b_batch[i];
    rest /= args.batch[i];
  }
  const std::int64_t row = tile / plan.col_tiles * plan.rows;
  const std::int64_t col = tile % plan.col_tiles * plan.cols;
  const std::int64_t k = split * plan.depth;
  return {a.from(row, k),
          b.from(k, col),
          (batch * args.m + row) * args.n + col,
          args.n,
          col,
          std::min(plan.rows, args.m - row),
          std::min(plan.cols, args.n - col),
          std::min(plan.depth, args.k - k)};
}

template <class T, class O>
void run_parts(const MatmulArgs& args, const Plan& plan, const Matrix<T>& a, const Matrix<T>& b,
               const Finish<T, O>& finish, float* parts) {
  const std::int64_t tiles = plan.tiles(), total = plan.batches * args.m * args.n;
  const auto one = [&](std::int64_t batch, std::int64_t tile, std::int64_t split) {
    const Part<T> part = part_of(args, plan, a, b, batch, tile, split);
    const auto run = [&](const auto& finish_it) {
      plan.way == Way::kTiles ? run_tile(part, finish_it)
                              : run_few(part, finish_it, plan.way == Way::kFewRows);
    };
    if (plan.splits == 1) return run(finish);
    run(Finish<T, float>{parts + split * total, nullptr, nullptr, nullptr, 0, kMatmulNone});
  };
  if (plan.each > 1) {
    return parallel_for(ceil_div(plan.batches, plan.each), [&](std::int64_t task) {
      const std::int64_t end = std::min(plan.batches, (task + 1) * plan.each);
      for (std::int64_t batch = task * plan.each; batch < end; ++batch) one(batch, 0, 0);
    });
  }
  parallel_for(plan.batches * tiles * plan.splits, [&](std::int64_t task) {
    one(task / plan.splits / tiles, task / plan.splits % tiles, task % plan.splits);
  });
}

// parts [splits, batches · m, n] added up, in order.
template <class T, class O>
void join_parts(const MatmulArgs& args, const Plan& plan, const float* parts,
                const Finish<T, O>& finish) {
  const std::int64_t rows = plan.batches * args.m, total = rows * args.n;
  const std::int64_t each = cpu::rows_per_task(args.n * 4 * (plan.splits + 1));
  parallel_for(ceil_div(rows, each), [&](std::int64_t task) {
    const DF d;
    float* sums = cpu::thread_scratch(rounded_up(args.n, kLanes));
    for (std::int64_t r = task * each; r < std::min(rows, (task + 1) * each); ++r) {
      const float* from = parts + r * args.n;
      for (std::int64_t i = 0; i < args.n; i += kLanes) {
        const auto count = static_cast<std::size_t>(std::min(kLanes, args.n - i));
        VF v = load_n(d, from + i, count);
        for (std::int64_t s = 1; s < plan.splits; ++s) {
          v = hn::Add(v, load_n(d, from + s * total + i, count));
        }
        hn::StoreU(v, d, sums + i);
      }
      finish.row(sums, r * args.n, 0, args.n);
    }
  });
}

template <class T, class O>
void run_as(const KernelCall& call) {
  const auto& args = call.as<MatmulArgs>();
  const Matrix<T> a{call.input<T>(0), args.a_row, args.a_col};  // [..., m, k]
  const Matrix<T> b{call.input<T>(1), args.b_row, args.b_col};  // [..., k, n]
  const Finish<T, O> finish{call.output<O>(0), call.output<O>(1), call.input<T>(2),
                            call.input<O>(3),  args.beta,         args.activation};
  const Plan plan(args);
  auto* parts = static_cast<float*>(call.workspace);
  run_parts(args, plan, a, b, finish, parts);
  if (plan.splits > 1) join_parts(args, plan, parts, finish);
}

template <class T>
void matmul_fwd(const KernelCall& call) {
  if constexpr (sizeof(T) == 2) {
    if (call.as<MatmulArgs>().wide != 0) return run_as<T, float>(call);
  }
  run_as<T, T>(call);
}

std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const MatmulArgs*>(args);
  const Plan plan(a);
  if (plan.splits == 1) return 0;
  return static_cast<std::size_t>(plan.splits * plan.batches * a.m * a.n) * sizeof(float);
}

// ---- gradients of what is not a matmul ----

template <class T, class O>
void dz_as(const KernelCall& call) {
  const auto& args = call.as<MatmulDzArgs>();
  const O* dy = call.input<O>(0);  // [count]
  const O* z = call.input<O>(1);   // [count], or null
  T* dz = call.output<T>(0);       // [count]
  const std::int64_t each = cpu::rows_per_task(3 * sizeof(O));
  parallel_for(ceil_div(args.count, each), [&](std::int64_t task) {
    const DF d;
    const std::int64_t first = task * each, n = std::min(each, args.count - first);
    const O* dy_part = dy + first;
    const O* z_part = z == nullptr ? nullptr : z + first;
    T* dz_part = dz + first;
    for_row(
        d, static_cast<std::size_t>(n),
        [&](std::size_t i) HWY_ATTR {
          VF v = load(d, dy_part + i);
          if (z_part != nullptr) v = hn::Mul(v, slope(d, args.activation, load(d, z_part + i)));
          store(d, v, dz_part + i);
        },
        [&](std::size_t i, std::size_t count) HWY_ATTR {
          VF v = load_n(d, dy_part + i, count);
          if (z_part != nullptr) {
            v = hn::Mul(v, slope(d, args.activation, load_n(d, z_part + i, count)));
          }
          store_n(d, v, dz_part + i, count);
        });
  });
}

template <class T>
void matmul_dz(const KernelCall& call) {
  if constexpr (sizeof(T) == 2) {
    if (call.as<MatmulDzArgs>().wide != 0) return dz_as<T, float>(call);
  }
  dz_as<T, T>(call);
}

// Rows in groups of kGroup, a strip of columns a task; the groups' sums are added in order.
constexpr std::int64_t kGroup = 512;
constexpr std::int64_t kStrip = 128;

std::size_t bias_workspace(const void* args) {
  const auto& a = *static_cast<const MatmulBiasArgs*>(args);
  return static_cast<std::size_t>(ceil_div(a.rows, kGroup) * a.n) * sizeof(float);
}

template <class T>
void matmul_bias(const KernelCall& call) {
  const auto& args = call.as<MatmulBiasArgs>();
  const T* dz = call.input<T>(0);                     // [rows, n]
  T* db = call.output<T>(0);                          // [n]
  auto* parts = static_cast<float*>(call.workspace);  // [groups, n]
  const std::int64_t groups = ceil_div(args.rows, kGroup), strips = ceil_div(args.n, kStrip);
  parallel_for(groups * strips, [&](std::int64_t task) {
    const DF d;
    const std::int64_t group = task / strips, first = task % strips * kStrip;
    const std::int64_t end = std::min(args.rows, (group + 1) * kGroup);
    const auto n = static_cast<std::size_t>(std::min(kStrip, args.n - first));
    HWY_ALIGN float sums[kStrip] = {};
    for (std::int64_t r = group * kGroup; r < end; ++r) {
      const T* row = dz + r * args.n + first;
      for_row(
          d, n,
          [&](std::size_t i) HWY_ATTR {
            hn::Store(hn::Add(hn::Load(d, sums + i), load(d, row + i)), d, sums + i);
          },
          [&](std::size_t i, std::size_t count) HWY_ATTR {
            hn::Store(hn::Add(hn::Load(d, sums + i), load_n(d, row + i, count)), d, sums + i);
          });
    }
    std::copy_n(sums, n, parts + group * args.n + first);
  });
  parallel_for(strips, [&](std::int64_t strip) {
    const DF d;
    const std::int64_t first = strip * kStrip;
    for (std::int64_t i = first; i < std::min(args.n, first + kStrip); i += kLanes) {
      const auto count = static_cast<std::size_t>(std::min(kLanes, args.n - i));
      VF v = hn::Zero(d);
      for (std::int64_t g = 0; g < groups; ++g) {
        v = hn::Add(v, load_n(d, parts + g * args.n + i, count));
      }
      store_n(d, v, db + i, count);
    }
  });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  registry.add(Backend::kCpu, "matmul_fwd_" + type, matmul_fwd<T>, workspace);
  registry.add(Backend::kCpu, "matmul_dz_bwd_" + type, matmul_dz<T>);
  registry.add(Backend::kCpu, "matmul_bias_bwd_" + type, matmul_bias<T>, bias_workspace);
}

}  // namespace

void register_matmul(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(matmul)
