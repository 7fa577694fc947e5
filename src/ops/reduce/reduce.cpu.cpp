// CPU kernels of reduce (formulas and layout: mlxtape/ops/reduce.h).
//
// Rows (inner = 1) are folded by four vectors side by side; a row that fits a core's cache stays with one
// thread, so that a second look at it finds it there; longer ones are cut into blocks whose partial results
// are joined in order. Otherwise neighbouring results are the lanes: tiles of them, with chunks of rows
// where the tiles alone are too few for the threads. Bound by memory; logsumexp in cache by exp.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/reduce/reduce.cpu.cpp"
#include <hwy/foreach_target.h>

#include <cmath>

#include "backends/cpu/device/simd-inl.h"
#include "backends/cpu/device/tasks.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"
#include "reduce_args.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kBlock = 16384;       // elements of a long row that are folded together
constexpr std::int64_t kWhole = 128 * 1024;  // elements up to which a row is one thread's
constexpr std::int64_t kTile = 1024;         // results side by side
constexpr std::int64_t kChunk = 65536;       // elements of a tile that are folded together
constexpr std::int64_t kEnoughTiles = 64;
constexpr float kInf = std::numeric_limits<float>::infinity();

// ---- folds: how an element joins what came before, and how two of those join ----

template <class T>
struct Sum {
  static constexpr float kStart = 0;
  static HWY_INLINE VF step(VF all, VF x, VF) { return hn::Add(all, x); }
  static HWY_INLINE VF join(VF a, VF b) { return hn::Add(a, b); }
};
template <class T>
struct SumExp : Sum<T> {  // of x relative to a reference
  static HWY_INLINE VF step(VF all, VF x, VF m) {
    return hn::Add(all, exp_for(DF(), T(), hn::Sub(x, m)));
  }
};
template <class T>
struct SumSquares : Sum<T> {  // of the distance to a mean
  static HWY_INLINE VF step(VF all, VF x, VF mean) {
    const VF away = hn::Sub(x, mean);
    return hn::MulAdd(away, away, all);
  }
};
template <class T>
struct CountEqual : Sum<T> {
  static HWY_INLINE VF step(VF all, VF x, VF y) {
    return hn::Add(all, hn::IfThenElseZero(hn::Eq(x, y), hn::Set(DF(), 1.0F)));
  }
};
template <class T>
struct Max {  // NaN wins and stays
  static constexpr float kStart = -kInf;
  static HWY_INLINE VF step(VF all, VF x, VF) { return join(all, x); }
  static HWY_INLINE VF join(VF a, VF b) {
    return hn::IfThenElse(hn::Or(hn::Gt(b, a), hn::IsNaN(b)), b, a);
  }
};
template <class T>
struct Min {
  static constexpr float kStart = kInf;
  static HWY_INLINE VF step(VF all, VF x, VF) { return join(all, x); }
  static HWY_INLINE VF join(VF a, VF b) {
    return hn::IfThenElse(hn::Or(hn::Lt(b, a), hn::IsNaN(b)), b, a);
  }
};

template <class Fold>
HWY_INLINE float fold_lanes(DF d, VF v) {
  HWY_ALIGN float lanes[hn::MaxLanes(DF())];
  hn::Store(v, d, lanes);
  for (std::size_t half = hn::Lanes(d) / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) {
      const VF both = Fold::join(hn::Set(d, lanes[i]), hn::Set(d, lanes[i + half]));
      lanes[i] = hn::GetLane(both);
    }
  }
  return lanes[0];
}

// n neighbours to one number. about: what a fold looks at x relative to.
template <class Fold, class T>
HWY_INLINE float fold_row(const T* x, std::int64_t count, float about) {
  const DF d;
  const std::size_t lanes = hn::Lanes(d);
  const auto n = static_cast<std::size_t>(count);
  const VF v = hn::Set(d, about);
  VF a = hn::Set(d, Fold::kStart), b = a, c = a, e = a;
  std::size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    VF x0, x1, x2, x3;
    load_pair(d, x + i, x0, x1);
    load_pair(d, x + i + 2 * lanes, x2, x3);
    a = Fold::step(a, x0, v);
    b = Fold::step(b, x1, v);
    c = Fold::step(c, x2, v);
    e = Fold::step(e, x3, v);
  }
  while (i < n) {
    const std::size_t some = std::min(lanes, n - i);
    a = hn::IfThenElse(hn::FirstN(d, some), Fold::step(a, load_n(d, x + i, some), v), a);
    i += some;
  }
  return fold_lanes<Fold>(d, Fold::join(Fold::join(a, b), Fold::join(c, e)));
}

// all[i] joined by rows of x, stride apart; width results. about: one number for each, or null.
template <class Fold, class T>
HWY_INLINE void fold_columns(const T* x, std::int64_t rows, std::int64_t stride, std::size_t width,
                             const float* about, float* all) {
  const DF d;
  const auto some_rows = [&](const T* at, auto count) HWY_ATTR {
    const auto one = [&](std::size_t i, const auto& get, const auto& get_f32) HWY_ATTR {
      const VF v = about == nullptr ? hn::Zero(d) : get_f32(about + i);
      VF sum = get_f32(all + i);
      for (std::int64_t r = 0; r < count(); ++r) sum = Fold::step(sum, get(at + r * stride + i), v);
      return sum;
    };
    const auto whole = [&](const auto* p) HWY_ATTR {
      return load(d, p);
    };
    for_row(
        d, width, [&](std::size_t i) HWY_ATTR { hn::StoreU(one(i, whole, whole), d, all + i); },
        [&](std::size_t i, std::size_t n) HWY_ATTR {
          const auto part = [&](const auto* p) HWY_ATTR {
            return load_n(d, p, n);
          };
          store_n(d, one(i, part, part), all + i, n);
        });
  };
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    some_rows(x + r * stride, std::integral_constant<std::int64_t, 4>());
  for (; r < rows; ++r) some_rows(x + r * stride, std::integral_constant<std::int64_t, 1>());
}

// ---- how a tensor is cut, by its shape alone ----

struct Cut {
  std::int64_t tiles, rows, chunks;  // rows of x in a chunk
};
Cut cut_of(const ReduceArgs& args) {
  if (args.inner == 1) {
    const std::int64_t rows = args.count <= kWhole ? std::max<std::int64_t>(args.count, 1) : kBlock;
    return {1, rows, std::max<std::int64_t>(1, ceil_div(args.count, rows))};
  }
  const std::int64_t tiles = ceil_div(args.inner, kTile);
  constexpr std::int64_t kMostRows = 4096;  // of one f32 sum: a longer one loses too many bits
  std::int64_t rows = std::clamp<std::int64_t>(args.count, 1, kMostRows);
  if (args.outer * tiles < kEnoughTiles) {
    rows = std::min(rows, std::max<std::int64_t>(16, kChunk / std::min(args.inner, kTile)));
  }
  return {tiles, rows, std::max<std::int64_t>(1, ceil_div(args.count, rows))};
}

// Partial results where there is more than one for each.
std::int64_t partial_floats(const ReduceArgs& args) {
  const Cut cut = cut_of(args);
  return cut.chunks == 1 ? 0 : args.outer * cut.chunks * args.inner;
}

// out [outer, inner], f32. partials: partial_floats of them.
template <class Fold, class T>
void fold(const ReduceArgs& args, const T* x, const float* about, float* out, float* partials) {
  const Cut cut = cut_of(args);
  float* to = cut.chunks == 1 ? out : partials;  // [outer, chunks, inner]
  const std::int64_t tasks = args.outer * cut.chunks * cut.tiles;
  const std::int64_t bytes =
      cut.rows * std::min(args.inner, kTile) * static_cast<std::int64_t>(sizeof(T));
  const std::int64_t each = cpu::rows_per_task(bytes);
  parallel_for(ceil_div(tasks, each), [&](std::int64_t group) {
    for (std::int64_t task = group * each; task < std::min(tasks, (group + 1) * each); ++task) {
      const std::int64_t tile = task % cut.tiles;
      const std::int64_t chunk = task / cut.tiles % cut.chunks;
      const std::int64_t outer = task / cut.tiles / cut.chunks;
      const std::int64_t first = chunk * cut.rows;
      const std::int64_t rows = std::min(cut.rows, args.count - first);
      const T* from = x + (outer * args.count + first) * args.inner + tile * kTile;
      float* result = to + (outer * cut.chunks + chunk) * args.inner + tile * kTile;
      const float* reference =
          about == nullptr ? nullptr : about + outer * args.inner + tile * kTile;
      if (args.inner == 1) {
        *result = fold_row<Fold>(from, rows, reference == nullptr ? 0 : *reference);
        continue;
      }
      const std::int64_t width = std::min(kTile, args.inner - tile * kTile);
      std::fill_n(result, width, Fold::kStart);
      fold_columns<Fold>(from, rows, args.inner, static_cast<std::size_t>(width), reference,
                         result);
    }
  });
  if (cut.chunks == 1) return;
  parallel_for(args.outer * cut.tiles, [&](std::int64_t task) {
    const std::int64_t outer = task / cut.tiles;
    const std::int64_t first = task % cut.tiles * kTile;
    const std::int64_t width = std::min(kTile, args.inner - first);
    const float* from = partials + outer * cut.chunks * args.inner + first;
    float* result = out + outer * args.inner + first;
    const DF d;
    std::fill_n(result, width, Fold::kStart);
    for (std::int64_t c = 0; c < cut.chunks; ++c, from += args.inner) {
      for_row(
          d, static_cast<std::size_t>(width),
          [&](std::size_t i) HWY_ATTR {
            hn::StoreU(Fold::join(hn::LoadU(d, result + i), hn::LoadU(d, from + i)), d, result + i);
          },
          [&](std::size_t i, std::size_t n) HWY_ATTR {
            store_n(d, Fold::join(load_n(d, result + i, n), load_n(d, from + i, n)), result + i, n);
          });
    }
  });
}

// body(first, n) for pieces of the results.
template <class Body>
void for_results(const ReduceArgs& args, const Body& body) {
  constexpr std::int64_t kPiece = 8192;
  const std::int64_t n = args.outer * args.inner;
  parallel_for(ceil_div(n, kPiece), [&](std::int64_t task) {
    body(task * kPiece, static_cast<std::size_t>(std::min(kPiece, n - task * kPiece)));
  });
}

// y[i] = fn(vectors of each of the arrays at i)
template <class Out, class Fn, class... In>
HWY_INLINE void map_row(Out* y, std::size_t n, const Fn& fn, const In*... in) {
  const DF d;
  write_row<false>(
      d, y, n, [&](std::size_t i) HWY_ATTR { return fn(load(d, in + i)...); },
      [&](std::size_t i, std::size_t count) HWY_ATTR { return fn(load_n(d, in + i, count)...); });
}

// Rows that one thread keeps: body(row, its elements).
bool has_whole_rows(const ReduceArgs& args) { return args.inner == 1 && args.count <= kWhole; }
template <class T, class Body>
void for_whole_rows(const ReduceArgs& args, const T* x, const Body& body) {
  const std::int64_t each = cpu::rows_per_task(args.count * static_cast<std::int64_t>(sizeof(T)));
  parallel_for(ceil_div(args.outer, each), [&](std::int64_t task) {
    for (std::int64_t r = task * each; r < std::min(args.outer, (task + 1) * each); ++r) {
      body(r, x + r * args.count);
    }
  });
}

std::int64_t results(const ReduceArgs& args) { return args.outer * args.inner; }
template <int kArrays>  // of results, besides the partial ones
std::size_t workspace(const void* args) {
  const auto& a = *static_cast<const ReduceArgs*>(args);
  return static_cast<std::size_t>(kArrays * results(a) + partial_floats(a)) * sizeof(float);
}

// ---- forward ----

template <class T>
void sum_fwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const T* x = call.input<T>(0);  // [outer, count, inner]
  T* y = call.output<T>(0);       // [outer, inner]
  const auto divisor = static_cast<float>(args.divisor);
  if (has_whole_rows(args)) {
    return for_whole_rows(args, x, [&](std::int64_t r, const T* row) HWY_ATTR {
      y[r] = T(fold_row<Sum<T>>(row, args.count, 0) / divisor);
    });
  }
  auto* sums = static_cast<float*>(call.workspace);  // [outer, inner]
  fold<Sum<T>>(args, x, nullptr, sums, sums + results(args));
  for_results(args, [&](std::int64_t first, std::size_t n) HWY_ATTR {
    const VF by = hn::Set(DF(), divisor);
    map_row(y + first, n, [&](VF v) HWY_ATTR { return hn::Div(v, by); }, sums + first);
  });
}

template <class T, class Fold>
void extreme_fwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const T* x = call.input<T>(0);  // [outer, count, inner]
  T* y = call.output<T>(0);       // [outer, inner]
  if (has_whole_rows(args)) {
    return for_whole_rows(args, x, [&](std::int64_t r, const T* row) HWY_ATTR {
      y[r] = T(fold_row<Fold>(row, args.count, 0));
    });
  }
  auto* found = static_cast<float*>(call.workspace);  // [outer, inner]
  fold<Fold>(args, x, nullptr, found, found + results(args));
  for_results(args, [&](std::int64_t first, std::size_t n) HWY_ATTR {
    map_row(y + first, n, [](VF v) HWY_ATTR { return v; }, found + first);
  });
}

// m + log s, m where it is infinite.
float joined(float m, float s) { return std::isinf(m) ? m : m + std::log(s); }

template <class T>
void logsumexp_fwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const T* x = call.input<T>(0);     // [outer, count, inner]
  T* y = call.output<T>(0);          // [outer, inner]
  float* m = call.output<float>(1);  // [outer, inner]
  float* s = m + results(args);      // [outer, inner]
  if (has_whole_rows(args)) {
    return for_whole_rows(args, x, [&](std::int64_t r, const T* row) HWY_ATTR {
      m[r] = fold_row<Max<T>>(row, args.count, 0);
      s[r] = fold_row<SumExp<T>>(row, args.count, m[r]);
      y[r] = T(joined(m[r], s[r]));
    });
  }
  auto* partials = static_cast<float*>(call.workspace);
  fold<Max<T>>(args, x, nullptr, m, partials);
  fold<SumExp<T>>(args, x, m, s, partials);
  for_results(args, [&](std::int64_t first, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i, ++first) y[first] = T(joined(m[first], s[first]));
  });
}

template <class T>
void var_fwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const T* x = call.input<T>(0);        // [outer, count, inner]
  T* y = call.output<T>(0);             // [outer, inner]
  float* mean = call.output<float>(1);  // [outer, inner]
  const auto divisor = static_cast<float>(args.divisor);
  const auto count = static_cast<float>(args.count);
  if (has_whole_rows(args)) {
    return for_whole_rows(args, x, [&](std::int64_t r, const T* row) HWY_ATTR {
      mean[r] = fold_row<Sum<T>>(row, args.count, 0) / count;
      y[r] = T(fold_row<SumSquares<T>>(row, args.count, mean[r]) / divisor);
    });
  }
  auto* squares = static_cast<float*>(call.workspace);  // [outer, inner]
  float* partials = squares + results(args);
  const auto over = [&](auto* to, const float* from, float by) {
    for_results(args, [&](std::int64_t first, std::size_t n) HWY_ATTR {
      const VF v = hn::Set(DF(), by);
      map_row(to + first, n, [&](VF sum) HWY_ATTR { return hn::Div(sum, v); }, from + first);
    });
  };
  fold<Sum<T>>(args, x, nullptr, squares, partials);
  over(mean, squares, count);
  fold<SumSquares<T>>(args, x, mean, squares, partials);
  over(y, squares, divisor);
}

// ---- backward: dx = fn(x, a, b) with a and b, one for each result, made first ----

constexpr std::int64_t kPiece = 16384;  // elements

template <bool kStream, bool kHasX, class T, class Fn>
HWY_INLINE void spread_row(const T* x, const float* a, const float* b, std::size_t step, T* dx,
                           std::size_t n, const Fn& fn) {
  const DF d;
  const VF a0 = hn::Set(d, *a), b0 = hn::Set(d, *b);
  write_row<kStream>(
      d, dx, n,
      [&](std::size_t i) HWY_ATTR {
        const VF v = kHasX ? load(d, x + i) : hn::Zero(d);
        return step == 0 ? fn(v, a0, b0) : fn(v, hn::LoadU(d, a + i), hn::LoadU(d, b + i));
      },
      [&](std::size_t i, std::size_t count) HWY_ATTR {
        const VF v = kHasX ? load_n(d, x + i, count) : hn::Zero(d);
        return step == 0 ? fn(v, a0, b0) : fn(v, load_n(d, a + i, count), load_n(d, b + i, count));
      });
}

template <bool kHasX, class T, class Fn>
void spread(const ReduceArgs& args, const T* x, const float* a, const float* b, T* dx,
            const Fn& fn) {
  const std::int64_t size = args.outer * args.count * args.inner;
  const bool stream = size * static_cast<std::int64_t>(sizeof(T)) >= cpu::kStreamBytes;
  const bool columns = args.inner > 1;
  const std::int64_t length = columns ? args.inner : args.count;  // of a row
  const std::int64_t pieces = ceil_div(length, kPiece);
  const std::int64_t tasks = size / length * pieces;
  const std::int64_t each = std::max<std::int64_t>(1, kPiece / std::min(length, kPiece));
  parallel_for(ceil_div(tasks, each), [&](std::int64_t group) {
    for (std::int64_t task = group * each; task < std::min(tasks, (group + 1) * each); ++task) {
      const std::int64_t row = task / pieces;
      const std::int64_t first = task % pieces * kPiece;
      const auto n = static_cast<std::size_t>(std::min(kPiece, length - first));
      const std::int64_t at = row * length + first;
      const std::int64_t of = columns ? row / args.count * args.inner + first : row;
      const T* from = kHasX ? x + at : nullptr;
      const std::size_t step = columns ? 1 : 0;
      stream ? spread_row<true, kHasX>(from, a + of, b + of, step, dx + at, n, fn)
             : spread_row<false, kHasX>(from, a + of, b + of, step, dx + at, n, fn);
    }
    if (stream) hwy::FlushStream();
  });
}

template <class T>
void sum_bwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const T* dy = call.input<T>(0);                 // [outer, inner]
  T* dx = call.output<T>(0);                      // [outer, count, inner]
  auto* a = static_cast<float*>(call.workspace);  // [outer, inner]
  const auto divisor = static_cast<float>(args.divisor);
  for_results(args, [&](std::int64_t first, std::size_t n) HWY_ATTR {
    const VF by = hn::Set(DF(), divisor);
    map_row(a + first, n, [&](VF g) HWY_ATTR { return hn::Div(g, by); }, dy + first);
  });
  spread<false, T>(args, nullptr, a, a, dx, [](VF, VF each, VF) HWY_ATTR { return each; });
}

template <class T>
void extreme_bwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const T* dy = call.input<T>(0);                 // [outer, inner]
  const T* x = call.input<T>(1);                  // [outer, count, inner]
  const T* y = call.input<T>(2);                  // [outer, inner]
  T* dx = call.output<T>(0);                      // [outer, count, inner]
  auto* a = static_cast<float*>(call.workspace);  // [outer, inner]
  float* b = a + results(args);
  for_results(args, [&](std::int64_t first, std::size_t n) HWY_ATTR {
    map_row(b + first, n, [](VF v) HWY_ATTR { return v; }, y + first);
  });
  fold<CountEqual<T>>(args, x, b, a, b + results(args));
  for_results(args, [&](std::int64_t first, std::size_t n) HWY_ATTR {
    map_row(
        a + first, n, [](VF count, VF g) HWY_ATTR { return hn::Div(g, count); }, a + first,
        dy + first);
  });
  // Nothing equals y where it is NaN.
  spread<true>(args, x, a, b, dx, [](VF v, VF share, VF top) HWY_ATTR {
    const VF none = hn::IfThenElseZero(hn::IsNaN(top), top);
    return hn::IfThenElse(hn::Eq(v, top), share, none);
  });
}

template <class T>
void logsumexp_bwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const T* dy = call.input<T>(0);                 // [outer, inner]
  const T* x = call.input<T>(1);                  // [outer, count, inner]
  const float* m = call.input<float>(2);          // [outer, inner]
  const float* s = m + results(args);             // [outer, inner]
  T* dx = call.output<T>(0);                      // [outer, count, inner]
  auto* a = static_cast<float*>(call.workspace);  // [outer, inner]
  for_results(args, [&](std::int64_t first, std::size_t n) HWY_ATTR {
    map_row(
        a + first, n, [](VF g, VF sum) HWY_ATTR { return hn::Div(g, sum); }, dy + first, s + first);
  });
  spread<true>(args, x, a, m, dx, [](VF v, VF share, VF top) HWY_ATTR {
    return hn::Mul(share, exp_for(DF(), T(), hn::Sub(v, top)));
  });
}

template <class T>
void var_bwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const T* dy = call.input<T>(0);                 // [outer, inner]
  const T* x = call.input<T>(1);                  // [outer, count, inner]
  const float* mean = call.input<float>(2);       // [outer, inner]
  T* dx = call.output<T>(0);                      // [outer, count, inner]
  auto* a = static_cast<float*>(call.workspace);  // [outer, inner]
  const auto divisor = static_cast<float>(args.divisor);
  for_results(args, [&](std::int64_t first, std::size_t n) HWY_ATTR {
    const VF by = hn::Set(DF(), divisor);
    map_row(a + first, n, [&](VF g) HWY_ATTR { return hn::Div(hn::Add(g, g), by); }, dy + first);
  });
  spread<true>(args, x, a, mean, dx, [](VF v, VF share, VF middle) HWY_ATTR {
    return hn::Mul(share, hn::Sub(v, middle));
  });
}

// ---- integers: they wrap around, so any order does ----

template <class U>
void whole_sum_fwd(const KernelCall& call) {
  const auto& args = call.as<ReduceArgs>();
  const U* x = call.input<U>(0);  // [outer, count, inner]
  U* y = call.output<U>(0);       // [outer, inner]
  parallel_for(args.outer, [&](std::int64_t o) {
    const U* from = x + o * args.count * args.inner;
    U* to = y + o * args.inner;
    if (args.inner == 1) {
      U sum = 0;
      for (std::int64_t c = 0; c < args.count; ++c) sum += from[c];
      *to = sum;
      return;
    }
    std::fill_n(to, args.inner, U{0});
    for (std::int64_t c = 0; c < args.count; ++c, from += args.inner) {
      for (std::int64_t i = 0; i < args.inner; ++i) to[i] += from[i];
    }
  });
}

template <class T>
void add_kernels(KernelRegistry& registry) {
  const std::string type = name_of(kDType<T>);
  const auto add = [&](const char* name, KernelFn fn, WorkspaceFn scratch) {
    registry.add(Backend::kCpu, name + type, fn, scratch);
  };
  add("sum_fwd_", sum_fwd<T>, workspace<1>);
  add("max_fwd_", extreme_fwd<T, Max<T>>, workspace<1>);
  add("min_fwd_", extreme_fwd<T, Min<T>>, workspace<1>);
  add("logsumexp_fwd_", logsumexp_fwd<T>, workspace<0>);
  add("var_fwd_", var_fwd<T>, workspace<1>);
  add("sum_bwd_", sum_bwd<T>, workspace<1>);
  add("extreme_bwd_", extreme_bwd<T>, workspace<2>);
  add("logsumexp_bwd_", logsumexp_bwd<T>, workspace<1>);
  add("var_bwd_", var_bwd<T>, workspace<1>);
}

}  // namespace

void register_reduce(KernelRegistry& registry) {
  add_kernels<float>(registry);
  add_kernels<F16>(registry);
  add_kernels<BF16>(registry);
  registry.add(Backend::kCpu, "sum_fwd_i32", whole_sum_fwd<std::uint32_t>);
  registry.add(Backend::kCpu, "sum_fwd_u32", whole_sum_fwd<std::uint32_t>);
  registry.add(Backend::kCpu, "sum_fwd_i64", whole_sum_fwd<std::uint64_t>);
  registry.add(Backend::kCpu, "sum_fwd_u64", whole_sum_fwd<std::uint64_t>);
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(reduce)
