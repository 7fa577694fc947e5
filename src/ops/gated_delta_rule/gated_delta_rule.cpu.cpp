// CPU kernels of gated_delta_rule (formula: mlxtape/ops/gated_delta_rule.h).
//
// Tokens go kChunk at a time. Within a chunk let A_ti = Π_{i<s≤t} g_s (by channel), e_t = Π_{s≤t} g_s and S the
// state before it, transposed: [Dk, Dv]. Then, rows being tokens,
//   N_ti = k_t·(A_ti∘k_i) for i < t,  M_ti = q_t·(A_ti∘k_i) for i ≤ t,  W = V − (e∘K)·S
//   (I + diag(β)·N)·U = diag(β)·W       solved row by row,  Y = (e∘Q)·S + M·U,  S ← diag(e_C)·S + (A_C∘K)ᵀ·U
// Products A are running ones: nothing is divided, and all are at most 1 where the decays are.
//
// Back, with dS the gradient of the state behind the chunk (docs/decisions derives it):
//   dU = Mᵀ·dY + (A_C∘K)·dS;  (I + diag(β)·N)ᵀ·dR = dU;  dM = dY·Uᵀ;  dN = −diag(β)·dR·Uᵀ
//   dV = β·dR;  dβ_t = dR_t·W_t − Σ_i (dR_t·U_i)·N_ti;  X = dY·Sᵀ;  Z = −β·dR·Sᵀ
//   dS ← diag(e_C)·dS + (e∘Q)ᵀ·dY − (e∘K)ᵀ·(β·dR)
//   H_t,i = Σ_{s≥t} A_st∘(dM_si·q_s + dN_si·k_s) + A_Ct∘(dS·u_i), likewise h_t from X, Z and Σ_rows dS∘S; then
//   dq_t = e_t∘X_t + Σ_i dM_ti·A_ti∘k_i;  dk_t = e_t∘Z_t + Σ_i dN_ti·A_ti∘k_i + H_t,t
//   dg_t = Σ_{i<t} H_t,i∘A_{t−1,i}∘k_i + h_t∘e_{t−1}
//
// Bound by arithmetic: 3 products of [16, Dk]·[Dk, Dv] a chunk forward, 13 backward. 16 tokens and not more, since
// those products cost the same whatever the chunk, and all else grows with it. A task is a key head of a sequence.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gated_delta_rule/gated_delta_rule.cpu.cpp"
#include <hwy/foreach_target.h>

#include <cmath>
#include <vector>

#include "backends/cpu/device/products-inl.h"
#include "backends/cpu/device/tasks.h"
#include "gated_delta_rule_args.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

HWY_BEFORE_NAMESPACE();
namespace mlxtape::ops::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kChunk = 16;
static_assert(kChunk == kUnit, "a chunk's rows are a product's rows");
constexpr std::int64_t kSegment = 8;  // chunks between the states that a walk back keeps

// ---- what a kernel is given ----

struct Sizes {
  std::int64_t dk, dv;  // channels
  std::int64_t nk, nv;  // in whole units
  std::int64_t pk, pv;  // from row to row
  explicit Sizes(const GatedDeltaRuleArgs& args)
      : dk(args.key_dim),
        dv(args.value_dim),
        nk(in_units(dk)),
        nv(in_units(dv)),
        pk(row_pitch(dk)),
        pv(row_pitch(dv)) {}
  std::int64_t keys() const { return kChunk * pk; }    // a chunk's rows of Dk
  std::int64_t values() const { return kChunk * pv; }  // and of Dv
  std::int64_t by_key() const { return nk * pv; }      // a state [Dk, Dv]
  std::int64_t by_value() const { return nv * pk; }    // and [Dv, Dk]
};

template <class T>
struct Problem {
  const GatedDeltaRuleArgs& args;
  Sizes size;
  const T *q, *k, *v;
  const float *decay, *beta;
  const bool* mask;
  std::vector<std::int64_t> starts;  // of packed sequences

  explicit Problem(const KernelCall& call, const void* packed = nullptr)
      : args(call.as<GatedDeltaRuleArgs>()),
        size(args),
        q(call.input<T>(0)),
        k(call.input<T>(1)),
        v(call.input<T>(2)),
        decay(call.input<float>(3)),
        beta(call.input<float>(4)),
        mask(call.input<bool>(5)) {
    if (args.start_bytes == 0) return;
    starts.resize(static_cast<std::size_t>(args.sequences) + 1, 0);
    for (std::size_t s = 1; s < starts.size(); ++s) {
      const std::int64_t given = args.start_bytes == 4
                                     ? static_cast<const std::int32_t*>(packed)[s]
                                     : static_cast<const std::int64_t*>(packed)[s];
      starts[s] = std::clamp(given, starts[s - 1], args.tokens);
    }
    starts.back() = args.tokens;
  }

  std::int64_t group() const { return args.value_heads / args.key_heads; }
  std::int64_t tasks() const { return args.sequences * args.key_heads; }
  std::int64_t most_tokens() const {
    if (starts.empty()) return args.sequence_tokens;
    std::int64_t most = 0;
    for (std::size_t s = 1; s < starts.size(); ++s) {
      most = std::max(most, starts[s] - starts[s - 1]);
    }
    return most;
  }
};

// One value head of one sequence.
template <class T>
struct Head {
  const Problem<T>& p;
  std::int64_t sequence, key_head, head;
  std::int64_t first, count;  // tokens, among all

  Head(const Problem<T>& problem, std::int64_t task, std::int64_t member)
      : p(problem),
        sequence(task / p.args.key_heads),
        key_head(task % p.args.key_heads),
        head(key_head * p.group() + member) {
    const auto s = static_cast<std::size_t>(sequence);
    first = p.starts.empty() ? sequence * p.args.sequence_tokens : p.starts[s];
    count = p.starts.empty() ? p.args.sequence_tokens : p.starts[s + 1] - first;
  }

  // Strided rows: the batch entry is the sequence where none are packed.
  const T* row(const T* base, const std::int64_t (&strides)[3], std::int64_t t,
               std::int64_t h) const {
    return p.starts.empty() ? base + sequence * strides[0] + t * strides[1] + h * strides[2]
                            : base + (first + t) * strides[1] + h * strides[2];
  }
  const T* q(std::int64_t t) const { return row(p.q, p.args.q, t, key_head); }
  const T* k(std::int64_t t) const { return row(p.k, p.args.k, t, key_head); }
  const T* v(std::int64_t t) const { return row(p.v, p.args.v, t, head); }
  bool off(std::int64_t t) const { return p.mask != nullptr && !p.mask[first + t]; }
  // Places in contiguous tensors.
  std::int64_t by_head(std::int64_t t) const { return (first + t) * p.args.value_heads + head; }
  std::int64_t by_key(std::int64_t t) const {
    return ((first + t) * p.args.key_heads + key_head) * p.args.key_dim;
  }
  std::int64_t by_value(std::int64_t t) const { return by_head(t) * p.args.value_dim; }
  std::int64_t state() const {
    return (sequence * p.args.value_heads + head) * p.args.value_dim * p.args.key_dim;
  }
};

// ---- a chunk ----

// rsqrt(Σ x² + ε), with which the row was multiplied.
HWY_INLINE float normalise_row(float eps, std::int64_t n, float* row) {
  const float factor = 1 / std::sqrt(dot(row, row, n) + eps);
  scale_row(factor, n, row);
  return factor;
}

struct Chunk {
  const Sizes& size;
  // Rows of tokens; q, k as the formula has them, and 0, 0, β = 0, g = 1 where there is no token.
  float *q, *k, *g, *e;  // [kChunk, Dk]
  float *qe, *ke;        // e∘q, e∘k
  float* faded;          // [Dk, kChunk]: A_Ct∘k_t behind the last token, transposed
  float *w, *u;          // [kChunk, Dv]: V − (e∘K)·S; U
  float *m, *n;          // [kChunk, kChunk]
  float *beta, *q_factor, *k_factor;

  Chunk(const Sizes& sizes, Pieces& pieces) : size(sizes) {
    for (float** rows : {&q, &k, &g, &e, &qe, &ke}) *rows = pieces.take(size.keys());
    faded = pieces.take(size.nk * kChunk);
    for (float** rows : {&w, &u}) *rows = pieces.take(size.values());
    for (float** square : {&m, &n}) *square = pieces.take(kChunk * kChunk);
    for (float** row : {&beta, &q_factor, &k_factor}) *row = pieces.take(kChunk);
  }
  static std::int64_t room(const Sizes& s) {
    return 6 * s.keys() + s.nk * kChunk + 2 * s.values() + 2 * kChunk * kChunk + 3 * kChunk;
  }

  // Tokens from t on: keys, queries, decays and how they meet. v goes to w.
  template <class T>
  void open(const Head<T>& h, std::int64_t t) {
    const GatedDeltaRuleArgs& args = h.p.args;
    for (std::int64_t i = 0; i < kChunk; ++i) {
      float *qi = q + i * size.pk, *ki = k + i * size.pk, *gi = g + i * size.pk;
      q_factor[i] = k_factor[i] = 1;
      if (t + i >= h.count || h.off(t + i)) {
        for (float* row : {qi, ki}) fill_row(0, size.nk, row);
        fill_row(1, size.nk, gi);
        fill_row(0, size.nv, w + i * size.pv);
        beta[i] = 0;
        continue;
      }
      load_row(h.q(t + i), size.dk, qi);
      load_row(h.k(t + i), size.dk, ki);
      load_row(h.v(t + i), size.dv, w + i * size.pv);
      if (args.normalise != 0) {
        q_factor[i] = normalise_row(args.eps, size.nk, qi);
        k_factor[i] = normalise_row(args.eps, size.nk, ki);
      }
      scale_row(args.scale, size.nk, qi);
      const std::int64_t at = h.by_head(t + i);
      beta[i] = h.p.beta[at];
      if (args.per_channel != 0) {
        load_row(h.p.decay + at * size.dk, size.dk, gi);
        if (args.log_decay != 0) {
          const DF d;
          each_vector(size.nk, [&](std::int64_t j) HWY_ATTR {
            hn::StoreU(exp_f32(d, hn::LoadU(d, gi + j)), d, gi + j);
          });
        }
      } else {
        fill_row(args.log_decay != 0 ? std::exp(h.p.decay[at]) : h.p.decay[at], size.nk, gi);
      }
    }
    for (std::int64_t i = 0; i < kChunk; ++i) {
      const std::int64_t at = i * size.pk;
      i == 0 ? fill_row(1, size.nk, e) : times(e + at - size.pk, g + at, size.nk, e + at);
      if (i == 0) times(e, g, size.nk, e);
      times(e + at, q + at, size.nk, qe + at);
      times(e + at, k + at, size.nk, ke + at);
    }
    meet();
  }

  // M and N. `faded` begins as Kᵀ; at token t its columns before t fade, so that row t of both is a sum over
  // channels of whole vectors of columns.
  void meet() {
    const DF d;
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
    for (std::int64_t j = 0; j < size.nk; ++j) {
      for (std::int64_t i = 0; i < kChunk; ++i) faded[j * kChunk + i] = k[i * size.pk + j];
    }
    for (std::int64_t part = 0; part < kChunk; part += lanes) {
      for (std::int64_t t = 0; t < kChunk; ++t) {
        const std::int64_t past = std::clamp<std::int64_t>(t - part, 0, lanes);
        const auto before = hn::FirstN(d, static_cast<std::size_t>(past));
        const auto upto = hn::FirstN(
            d, static_cast<std::size_t>(std::clamp<std::int64_t>(t + 1 - part, 0, lanes)));
        const VF one = hn::Set(d, 1.0F);
        VF sum_m[2] = {hn::Zero(d), hn::Zero(d)}, sum_n[2] = {hn::Zero(d), hn::Zero(d)};
        const float *qt = q + t * size.pk, *kt = k + t * size.pk, *gt = g + t * size.pk;
        float* column = faded + part;
        for (std::int64_t j = 0; j < size.nk; j += 2) {
#pragma GCC unroll 2
          for (int b = 0; b < 2; ++b) {
            const VF fade = hn::IfThenElse(before, hn::Set(d, gt[j + b]), one);
            const VF row = hn::Mul(fade, hn::LoadU(d, column));
            hn::StoreU(row, d, column);
            sum_m[b] = hn::MulAdd(hn::Set(d, qt[j + b]), row, sum_m[b]);
            sum_n[b] = hn::MulAdd(hn::Set(d, kt[j + b]), row, sum_n[b]);
            column += kChunk;
          }
        }
        hn::StoreU(hn::IfThenElseZero(upto, hn::Add(sum_m[0], sum_m[1])), d, m + t * kChunk + part);
        hn::StoreU(hn::IfThenElseZero(before, hn::Add(sum_n[0], sum_n[1])), d,
                   n + t * kChunk + part);
      }
    }
  }

  // w = V − (e∘K)·S, for w = V.
  void recall(const float* state) {
    product(false, {ke, size.pk, 1}, state, size.pv, u, size.pv, kChunk, size.nv, size.nk);
    for (std::int64_t i = 0; i < kChunk; ++i)
      add_row(-1, u + i * size.pv, size.nv, w + i * size.pv);
  }

  // U from w.
  void solve() {
    const DF d;
    for (std::int64_t t = 0; t < kChunk; ++t) {
      const VF b = hn::Set(d, beta[t]);
      each_vector(size.nv, [&](std::int64_t j) HWY_ATTR {
        VF rest = hn::LoadU(d, w + t * size.pv + j);
        for (std::int64_t i = 0; i < t; ++i) {
          rest =
              hn::NegMulAdd(hn::Set(d, n[t * kChunk + i]), hn::LoadU(d, u + i * size.pv + j), rest);
        }
        hn::StoreU(hn::Mul(b, rest), d, u + t * size.pv + j);
      });
    }
  }

  void output(const float* state, float* y) const {
    product(false, {qe, size.pk, 1}, state, size.pv, y, size.pv, kChunk, size.nv, size.nk);
    product(true, {m, kChunk, 1}, u, size.pv, y, size.pv, kChunk, size.nv, kChunk);
  }

  const float* last_e() const { return e + (kChunk - 1) * size.pk; }

  // The state behind the chunk, [Dk, Dv].
  void advance(float* state) const {
    for (std::int64_t j = 0; j < size.nk; ++j) scale_row(last_e()[j], size.nv, state + j * size.pv);
    product(true, {faded, kChunk, 1}, u, size.pv, state, size.pv, size.nk, size.nv, kChunk);
  }
};

// ---- forward ----

// state [Dk, Dv] from and to [Dv, Dk] without gaps.
void load_state(const Sizes& size, const float* from, float* state) {
  std::fill(state, state + size.by_key(), 0.0F);
  if (from == nullptr) return;
  for (std::int64_t j = 0; j < size.dk; ++j) {
    for (std::int64_t i = 0; i < size.dv; ++i) state[j * size.pv + i] = from[i * size.dk + j];
  }
}
void store_state(const Sizes& size, const float* state, float* to) {
  for (std::int64_t i = 0; i < size.dv; ++i) {
    for (std::int64_t j = 0; j < size.dk; ++j) to[i * size.dk + j] = state[j * size.pv + i];
  }
}

template <class T>
void gated_delta_rule_fwd(const KernelCall& call) {
  const Problem<T> problem(call, call.in[6]);
  const auto* initial = call.input<float>(7);
  T* y = call.output<T>(0);
  auto* final_state = call.output<float>(1);
  const Sizes& size = problem.size;
  parallel_for(problem.tasks() * problem.group(), [&](std::int64_t task) {
    const Head<T> h(problem, task / problem.group(), task % problem.group());
    Pieces pieces{cpu::thread_scratch(Chunk::room(size) + size.by_key() + size.values() + 16)};
    Chunk chunk(size, pieces);
    float* state = pieces.take(size.by_key());
    float* rows = pieces.take(size.values());
    load_state(size, initial == nullptr ? nullptr : initial + h.state(), state);
    for (std::int64_t t = 0; t < h.count; t += kChunk) {
      chunk.open(h, t);
      chunk.recall(state);
      chunk.solve();
      chunk.output(state, rows);
      for (std::int64_t i = 0; i < std::min(kChunk, h.count - t); ++i) {
        store_row(rows + i * size.pv, size.dv, y + h.by_value(t + i));
      }
      chunk.advance(state);
    }
    if (final_state != nullptr) store_state(size, state, final_state + h.state());
  });
}

// ---- backward ----

// What a walk back carries for one value head.
struct Back {
  const Sizes& size;
  float *ds, *ds_rows;         // gradient of the state, [Dk, Dv] and [Dv, Dk]
  float *dy, *du, *x, *z, *h;  // [kChunk, Dv] ×2, [kChunk, Dk] ×3
  float *dm, *dn;              // [kChunk, kChunk]
  float* u_columns;            // [Dv, kChunk]
  float* met;                  // [kChunk, kChunk, Dk]: A_ti∘k_i
  float *start, *dg;           // [Dk]; [kChunk, Dk]
  float *dq, *dk;              // [kChunk, Dk]
  float* dbeta;

  Back(const Sizes& sizes, Pieces& pieces) : size(sizes) {
    ds = pieces.take(size.by_key());
    ds_rows = pieces.take(size.by_value());
    for (float** rows : {&dy, &du}) *rows = pieces.take(size.values());
    for (float** rows : {&x, &z, &h, &dg, &dq, &dk}) *rows = pieces.take(size.keys());
    for (float** square : {&dm, &dn}) *square = pieces.take(kChunk * kChunk);
    u_columns = pieces.take(size.nv * kChunk);
    met = pieces.take(kChunk * size.keys());
    start = pieces.take(size.pk);
    dbeta = pieces.take(kChunk);
  }
  static std::int64_t room(const Sizes& s) {
    return s.by_key() + s.by_value() + 2 * s.values() + (6 + kChunk) * s.keys() +
           2 * kChunk * kChunk + s.nv * kChunk + s.pk + kChunk;
  }

  template <class T>
  void load_dy(const Head<T>& head, const T* from, std::int64_t t) {
    for (std::int64_t i = 0; i < kChunk; ++i) {
      if (from == nullptr || t + i >= head.count || head.off(t + i)) {
        fill_row(0, size.nv, dy + i * size.pv);
      } else {
        load_row(from + head.by_value(t + i), size.dv, dy + i * size.pv);
      }
    }
  }

  // state_rows: the state before the chunk, [Dv, Dk].
  void chunk(const Chunk& c, const float* state_rows) {
    const auto [pk, pv, nk, nv] = std::array{size.pk, size.pv, size.nk, size.nv};
    // dU, then dR in its place.
    product(false, {c.m, 1, kChunk}, dy, pv, du, pv, kChunk, nv, kChunk);
    product(true, {c.faded, 1, kChunk}, ds, pv, du, pv, kChunk, nv, nk);
    const DF d;
    for (std::int64_t t = kChunk - 1; t >= 0; --t) {
      each_vector(nv, [&](std::int64_t j) HWY_ATTR {
        VF rest = hn::LoadU(d, du + t * pv + j);
        for (std::int64_t s = t + 1; s < kChunk; ++s) {
          const float l = c.beta[s] * c.n[s * kChunk + t];
          rest = hn::NegMulAdd(hn::Set(d, l), hn::LoadU(d, du + s * pv + j), rest);
        }
        hn::StoreU(rest, d, du + t * pv + j);
      });
    }
    // How the tokens' meetings count: dM and, of the same form, −dR·Uᵀ.
    for (std::int64_t j = 0; j < nv; ++j) {
      for (std::int64_t i = 0; i < kChunk; ++i) u_columns[j * kChunk + i] = c.u[i * pv + j];
    }
    product(false, {dy, pv, 1}, u_columns, kChunk, dm, kChunk, kChunk, kChunk, nv);
    product(false, {du, pv, 1}, u_columns, kChunk, dn, kChunk, kChunk, kChunk, nv);
    for (std::int64_t t = 0; t < kChunk; ++t) {
      dbeta[t] =
          dot(du + t * pv, c.w + t * pv, nv) - dot(dn + t * kChunk, c.n + t * kChunk, kChunk);
      scale_row(-c.beta[t], kChunk, dn + t * kChunk);
      scale_row(c.beta[t], nv, du + t * pv);  // dV from here on
    }
    // What reaches keys, queries and decays through the state before.
    product(false, {dy, pv, 1}, state_rows, pk, x, pk, kChunk, nk, nv);
    product(false, {du, pv, 1}, state_rows, pk, z, pk, kChunk, nk, nv);
    for (std::int64_t t = 0; t < kChunk; ++t) scale_row(-1, nk, z + t * pk);
    // And the state behind.
    product(false, {c.u, pv, 1}, ds_rows, pk, h, pk, kChunk, nk, nv);
    fill_row(0, nk, start);
    for (std::int64_t i = 0; i < nv; ++i)
      add_times(ds_rows + i * pk, state_rows + i * pk, nk, start);
    sweep(c);
    step_back(c);
  }

  void sweep(const Chunk& c) {
    const auto [pk, nk] = std::array{size.pk, size.nk};
    const DF d;
    for (std::int64_t t = 0; t < kChunk; ++t) {
      float* now = met + t * size.keys();
      for (std::int64_t i = 0; i < t; ++i) {
        times(now - size.keys() + i * pk, c.g + t * pk, nk, now + i * pk);
      }
      std::copy(c.k + t * pk, c.k + t * pk + nk, now + t * pk);
    }
    for (std::int64_t t = kChunk - 1; t >= 0; --t) {
      const float* now = met + t * size.keys();
      const float* before = now - size.keys();
      each_vector(nk, [&](std::int64_t j) HWY_ATTR {
        const VF q = hn::LoadU(d, c.q + t * pk + j), k = hn::LoadU(d, c.k + t * pk + j);
        const VF next = t + 1 < kChunk ? hn::LoadU(d, c.g + (t + 1) * pk + j) : hn::Set(d, 1.0F);
        const VF e = hn::LoadU(d, c.e + t * pk + j);
        const VF x_t = hn::LoadU(d, x + t * pk + j), z_t = hn::LoadU(d, z + t * pk + j);
        VF sum_q = hn::Mul(e, x_t), sum_k = hn::Mul(e, z_t);
        VF from_start = hn::Mul(next, hn::LoadU(d, start + j));
        from_start = hn::MulAdd(q, x_t, hn::MulAdd(k, z_t, from_start));
        hn::StoreU(from_start, d, start + j);
        VF sum_g = t == 0 ? from_start : hn::Mul(from_start, hn::LoadU(d, c.e + (t - 1) * pk + j));
        for (std::int64_t i = 0; i < t; ++i) {
          const VF vm = hn::Set(d, dm[t * kChunk + i]), vn = hn::Set(d, dn[t * kChunk + i]);
          VF here = hn::Mul(next, hn::LoadU(d, h + i * pk + j));
          here = hn::MulAdd(vm, q, hn::MulAdd(vn, k, here));
          hn::StoreU(here, d, h + i * pk + j);
          const VF met_now = hn::LoadU(d, now + i * pk + j);
          sum_q = hn::MulAdd(vm, met_now, sum_q);
          sum_k = hn::MulAdd(vn, met_now, sum_k);
          sum_g = hn::MulAdd(here, hn::LoadU(d, before + i * pk + j), sum_g);
        }
        const VF vm = hn::Set(d, dm[t * kChunk + t]);
        sum_q = hn::MulAdd(vm, k, sum_q);
        sum_k = hn::Add(sum_k, hn::MulAdd(vm, q, hn::Mul(next, hn::LoadU(d, h + t * pk + j))));
        hn::StoreU(sum_q, d, dq + t * pk + j);
        hn::StoreU(sum_k, d, dk + t * pk + j);
        hn::StoreU(sum_g, d, dg + t * pk + j);
      });
    }
  }

  // The gradient of the state before the chunk, both ways round. du holds dV = β·dR.
  void step_back(const Chunk& c) {
    const auto [pk, pv, nk, nv] = std::array{size.pk, size.pv, size.nk, size.nv};
    for (std::int64_t j = 0; j < nk; ++j) scale_row(c.last_e()[j], nv, ds + j * pv);
    for (std::int64_t i = 0; i < nv; ++i) {
      times(ds_rows + i * pk, c.last_e(), nk, ds_rows + i * pk);
    }
    product(true, {c.qe, 1, pk}, dy, pv, ds, pv, nk, nv, kChunk);
    product(true, {dy, 1, pv}, c.qe, pk, ds_rows, pk, nv, nk, kChunk);
    for (std::int64_t t = 0; t < kChunk; ++t) scale_row(-1, nv, du + t * pv);
    product(true, {c.ke, 1, pk}, du, pv, ds, pv, nk, nv, kChunk);
    product(true, {du, 1, pv}, c.ke, pk, ds_rows, pk, nv, nk, kChunk);
    for (std::int64_t t = 0; t < kChunk; ++t) scale_row(-1, nv, du + t * pv);
  }
};

// dx of x·r·scale, r = rsqrt(Σx² + ε), from the gradient and the result.
void normalise_back(float factor, float scale, const float* result, std::int64_t n, float* grad) {
  const float along = dot(result, grad, n) / (scale * scale);
  add_row(-along, result, n, grad);
  scale_row(factor, n, grad);
}

template <class T>
struct Gradients {
  T *dq, *dk, *dv;
  float *decay, *beta, *state;
};

// One value head: adds to sums_q and sums_k [tokens, Dk], which the first head sets.
template <class T>
void walk_back(const Head<T>& head, const KernelCall& call, const Gradients<T>& out, bool first,
               float* sums_q, float* sums_k, Chunk& chunk, Back& back, float* kept, float* work) {
  const Sizes& size = head.p.size;
  const GatedDeltaRuleArgs& args = head.p.args;
  const auto* initial = call.input<float>(7);
  const T* dy = call.input<T>(8);
  const auto* d_final = call.input<float>(9);
  constexpr std::int64_t kTokens = kSegment * kChunk;
  const std::int64_t segments = ceil_div(head.count, kTokens);
  float* state = work;
  float* rows = state + size.by_key();                    // [kSegment, Dv, Dk]: before each chunk
  float* remembered = rows + kSegment * size.by_value();  // [kSegment, kChunk, Dv]: each chunk's w

  load_state(size, initial == nullptr ? nullptr : initial + head.state(), state);
  for (std::int64_t s = 0; s < segments; ++s) {
    std::copy(state, state + size.by_key(), kept + s * size.by_key());
    if (s + 1 == segments) break;
    for (std::int64_t t = s * kTokens; t < (s + 1) * kTokens; t += kChunk) {
      chunk.open(head, t);
      chunk.recall(state);
      chunk.solve();
      chunk.advance(state);
    }
  }
  std::fill(back.ds, back.ds + size.by_key(), 0.0F);
  std::fill(back.ds_rows, back.ds_rows + size.by_value(), 0.0F);
  if (d_final != nullptr) {
    load_state(size, d_final + head.state(), back.ds);
    for (std::int64_t i = 0; i < size.dv; ++i) {
      std::copy_n(d_final + head.state() + i * size.dk, size.dk, back.ds_rows + i * size.pk);
    }
  }
  for (std::int64_t s = segments - 1; s >= 0; --s) {
    std::copy(kept + s * size.by_key(), kept + (s + 1) * size.by_key(), state);
    const std::int64_t chunks = std::min(kSegment, ceil_div(head.count - s * kTokens, kChunk));
    for (std::int64_t c = 0; c < chunks; ++c) {
      float* now = rows + c * size.by_value();
      if (c == 0) {
        std::fill(now, now + size.by_value(), 0.0F);
        for (std::int64_t i = 0; i < size.dv; ++i) {
          for (std::int64_t j = 0; j < size.dk; ++j) now[i * size.pk + j] = state[j * size.pv + i];
        }
      }
      chunk.open(head, s * kTokens + c * kChunk);
      chunk.recall(state);
      std::copy(chunk.w, chunk.w + size.values(), remembered + c * size.values());
      if (c + 1 == chunks) break;
      chunk.solve();
      chunk.advance(state);
      float* next = now + size.by_value();
      for (std::int64_t i = 0; i < size.nv; ++i) {
        times(now + i * size.pk, chunk.last_e(), size.nk, next + i * size.pk);
      }
      // faded is [Dk, kChunk]; as the second factor it is needed by rows of tokens.
      float* faded = back.dq;
      for (std::int64_t j = 0; j < size.nk; ++j) {
        for (std::int64_t t = 0; t < kChunk; ++t)
          faded[t * size.pk + j] = chunk.faded[j * kChunk + t];
      }
      product(true, {chunk.u, 1, size.pv}, faded, size.pk, next, size.pk, size.nv, size.nk, kChunk);
    }
    for (std::int64_t c = chunks - 1; c >= 0; --c) {
      const std::int64_t t = s * kTokens + c * kChunk;
      chunk.open(head, t);
      std::copy_n(remembered + c * size.values(), size.values(), chunk.w);
      chunk.solve();
      back.load_dy(head, dy, t);
      back.chunk(chunk, rows + c * size.by_value());
      for (std::int64_t i = 0; i < std::min(kChunk, head.count - t); ++i) {
        const bool off = head.off(t + i);
        const std::int64_t at = head.by_head(t + i);
        store_row(back.du + i * size.pv, size.dv, out.dv + head.by_value(t + i));
        out.beta[at] = off ? 0 : back.dbeta[i];
        float* dg = back.dg + i * size.pk;
        if (args.per_channel != 0) {
          if (args.log_decay != 0) times(dg, chunk.g + i * size.pk, size.nk, dg);
          if (off) fill_row(0, size.nk, dg);
          store_row(dg, size.dk, out.decay + at * size.dk);
        } else {
          // g of the channels that fill up a unit is that of the others; its gradient is 0.
          float* ones = back.x;
          fill_row(1, size.nk, ones);
          const float sum = dot(dg, ones, size.nk);
          out.decay[at] = off ? 0 : args.log_decay != 0 ? sum * chunk.g[i * size.pk] : sum;
        }
        float* dq = sums_q + (t + i) * size.nk;
        float* dk = sums_k + (t + i) * size.nk;
        if (first) {
          fill_row(0, size.nk, dq);
          fill_row(0, size.nk, dk);
        }
        if (off) continue;
        float *dq_now = back.dq + i * size.pk, *dk_now = back.dk + i * size.pk;
        if (args.normalise != 0) {
          normalise_back(chunk.q_factor[i], args.scale, chunk.q + i * size.pk, size.nk, dq_now);
          normalise_back(chunk.k_factor[i], 1, chunk.k + i * size.pk, size.nk, dk_now);
        }
        add_row(args.scale, dq_now, size.nk, dq);
        add_row(1, dk_now, size.nk, dk);
      }
    }
  }
  if (out.state != nullptr) {
    for (std::int64_t i = 0; i < size.dv; ++i) {
      std::copy_n(back.ds_rows + i * size.pk, size.dk, out.state + head.state() + i * size.dk);
    }
  }
}

template <class T>
void gated_delta_rule_bwd(const KernelCall& call) {
  const Problem<T> problem(call, call.in[6]);
  const Sizes& size = problem.size;
  const Gradients<T> out{call.output<T>(0),     call.output<T>(1),     call.output<T>(2),
                         call.output<float>(3), call.output<float>(4), call.output<float>(5)};
  const std::int64_t most = problem.most_tokens();
  const std::int64_t kept_room = ceil_div(most, kSegment * kChunk) * size.by_key();
  const std::int64_t work_room = size.by_key() + kSegment * (size.by_value() + size.values());
  const std::int64_t sums_room = most * size.nk;
  parallel_for(problem.tasks(), [&](std::int64_t task) {
    Pieces pieces{cpu::thread_scratch(Chunk::room(size) + Back::room(size) + kept_room + work_room +
                                      2 * sums_room + 64)};
    Chunk chunk(size, pieces);
    Back back(size, pieces);
    float* kept = pieces.take(kept_room);
    float* work = pieces.take(work_room);
    float* sums_q = pieces.take(sums_room);
    float* sums_k = pieces.take(sums_room);
    for (std::int64_t member = 0; member < problem.group(); ++member) {
      walk_back(Head<T>(problem, task, member), call, out, member == 0, sums_q, sums_k, chunk, back,
                kept, work);
    }
    const Head<T> head(problem, task, 0);
    for (std::int64_t t = 0; t < head.count; ++t) {
      store_row(sums_q + t * size.nk, size.dk, out.dq + head.by_key(t));
      store_row(sums_k + t * size.nk, size.dk, out.dk + head.by_key(t));
    }
  });
}

// ---- one token ----

template <class T>
void gated_delta_rule_step(const KernelCall& call) {
  const Problem<T> problem(call);
  const Sizes& size = problem.size;
  const GatedDeltaRuleArgs& args = problem.args;
  T* y = call.output<T>(0);
  auto* states = call.output<float>(1);
  parallel_for(args.sequences * args.value_heads, [&](std::int64_t task) {
    const Head<T> h(problem, task / problem.group(), task % problem.group());
    T* out = y + h.by_value(0);
    if (h.off(0)) {
      std::fill_n(out, size.dv, T(0.0F));
      return;
    }
    Pieces pieces{cpu::thread_scratch(3 * size.pk + 2 * size.pv + 16)};
    float *q = pieces.take(size.pk), *k = pieces.take(size.pk), *g = pieces.take(size.pk);
    float *v = pieces.take(size.pv), *rows = pieces.take(size.pv);
    load_row(h.q(0), size.dk, q);
    load_row(h.k(0), size.dk, k);
    load_row(h.v(0), size.dv, v);
    if (args.normalise != 0) {
      normalise_row(args.eps, size.nk, q);
      normalise_row(args.eps, size.nk, k);
    }
    scale_row(args.scale, size.nk, q);
    const std::int64_t at = h.by_head(0);
    if (args.per_channel != 0) {
      load_row(problem.decay + at * size.dk, size.dk, g);
      for (std::int64_t j = 0; args.log_decay != 0 && j < size.dk; ++j) g[j] = std::exp(g[j]);
    } else {
      fill_row(args.log_decay != 0 ? std::exp(problem.decay[at]) : problem.decay[at], size.nk, g);
    }
    const float beta = problem.beta[at], kq = dot(k, q, size.nk);
    const DF d;
    float* state = states + h.state();
    for (std::int64_t i = 0; i < size.dv; ++i) {
      float* row = state + i * size.dk;
      // Once over the row: what it says of k and of q, before the correction, which then adds u·(k·q).
      VF say_k = hn::Zero(d), say_q = hn::Zero(d);
      const auto n = static_cast<std::size_t>(size.dk);
      const auto look = [&](std::size_t j, VF s) HWY_ATTR {
        const VF faded = hn::Mul(s, hn::LoadU(d, g + j));
        say_k = hn::MulAdd(faded, hn::LoadU(d, k + j), say_k);
        say_q = hn::MulAdd(faded, hn::LoadU(d, q + j), say_q);
      };
      for_row(
          d, n, [&](std::size_t j) HWY_ATTR { look(j, hn::LoadU(d, row + j)); },
          [&](std::size_t j, std::size_t c) HWY_ATTR { look(j, load_n(d, row + j, c)); });
      const float u = beta * (v[i] - sum_lanes(d, say_k));
      const VF vu = hn::Set(d, u);
      const auto next = [&](std::size_t j, VF s) HWY_ATTR {
        return hn::MulAdd(vu, hn::LoadU(d, k + j), hn::Mul(s, hn::LoadU(d, g + j)));
      };
      for_row(
          d, n,
          [&](std::size_t j) HWY_ATTR { hn::StoreU(next(j, hn::LoadU(d, row + j)), d, row + j); },
          [&](std::size_t j, std::size_t c)
              HWY_ATTR { store_n(d, next(j, load_n(d, row + j, c)), row + j, c); });
      rows[i] = sum_lanes(d, say_q) + u * kq;
    }
    store_row(rows, size.dv, out);
  });
}

}  // namespace

void register_gated_delta_rule(KernelRegistry& registry) {
  const auto add = [&]<class T>(T, const std::string& type) {
    registry.add(Backend::kCpu, "gated_delta_rule_fwd_" + type, gated_delta_rule_fwd<T>);
    registry.add(Backend::kCpu, "gated_delta_rule_bwd_" + type, gated_delta_rule_bwd<T>);
    registry.add(Backend::kCpu, "gated_delta_rule_step_" + type, gated_delta_rule_step<T>);
  };
  add(float(), "f32");
  add(F16(), "f16");
  add(BF16(), "bf16");
}

}  // namespace mlxtape::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

MT_REGISTER_CPU_KERNELS(gated_delta_rule)
