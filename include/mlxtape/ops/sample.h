// sample: samples the next token of each row from its logits on the device; greedy and random rows in one batch.
//
// Formula    x = logits; a NaN counts as −inf.  z = x, then for each row, in f32, in this order:
//            bias        z[bias_ids[k]] += bias[k]; if an id occurs twice, the first counts
//            repetition  z < 0: z ← z·penalty, else z ← z/penalty, once for each token among the last
//                        repetition_context of history
//            presence    z ← z − (frequency·n + presence) where n > 0: how often the token occurs in the last
//            frequency   penalty_context of history, those before `start` not counted
//            d[i] = max z − z[i].  i is more likely than j if d[i] < d[j], or d[i] = d[j] and i < j.  greedy:
//            temperature = 0: the most likely.  Else one of those that all three filters keep, top_p, top_k and min_p:
//            w(d,c) = ⌊2⁴⁰·2^(−d·c)⌋,  w[i] = w(d[i], log₂e) (1 at temperature 1, in units of 2⁻⁴⁰),  W = Σ w[i]
//            top_p < 1   the fewest, most likely first, with Σ w ≥ max(1, ⌊W·⌊top_p·2³²⌋/2³²⌋)
//            top_k > 0   the k most likely
//            min_p > 0   those with d ≤ −ln(min_p)
//            drawn       v[i] = w(d[i], log₂e/temperature), 0 for those not kept: the first token, in the order of ids,
//                        with Σ_{j ≤ i} v[j] > ⌊R·Σ v/2⁶⁴⌋.  R: the two words of Threefry-2x32 (20 rounds) with the
//                        row's seed as its key (high word, low word) at (lengths[b], 0), the first word above
//            logprobs    x[token] − max x − ln Σ exp(x − max x): from the raw logits, before bias and penalties
// Gradient   none
// Layout     logits: [B, V]. numbers: [B, 6]; whole: [B, 6], as put_sample_row writes them. history: [B, H], each row's
//            tokens so far; lengths: [B], how many of them count. bias_ids, bias: [B, K]; ids outside [0, V) are skipped.
//            tokens, logprobs: [B]; top_ids, top_logprobs: [B, 20], most likely first. Strided inputs are copied first.
// Types      logits: f32, f16, bf16. numbers, bias, logprobs: f32. whole, history, lengths, ids and tokens: i32.
//            Every sum that affects the choice is a sum of integers, and 2^t uses f32 operations that round the same way
//            everywhere (src/ops/sample/formulas.h): equal logits give the same tokens on every device, instruction set
//            and number of threads, alone or in a batch. w has a relative error of 2⁻¹⁸. logprobs are rounded as f32 sums.
// Cost       reads 1·BV. Greedy: one pass over a row; logprobs: one more; drawn: one more; top_p or top_k: 3 to 5 more;
//            bias and penalties: one more, and their windows. On CUDA a row stays in the shared memory of 8
//            blocks; if it does not fit, or the GPU has no clusters, it is read again from memory.
// Limits     1 ≤ V < 2²⁴; B and H may be 0; K at most 1024. Where the largest x or the largest z of a row is not finite
//            (all NaN or −inf, or any +inf), its token is −1, its logprobs are NaN and nothing is appended. Tokens whose
//            weight v is below 2⁻⁴⁰ of the largest are never drawn. Values of numbers and whole are not checked on the
//            device; those out of range choose some token. append: the token goes to history[b, lengths[b]] where
//            0 ≤ lengths[b] < H, else nowhere, and lengths[b] grows by one in both cases, so that sampling goes on;
//            penalties do not see what did not fit. Settings are read when the kernel runs: a captured step may be replayed with
//            other settings.
#pragma once

#include <cstdint>
#include <span>

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"

namespace mlxtape::ops {

inline constexpr std::int64_t kSampleNumbers = 6;  // of a row: columns of `numbers`
inline constexpr std::int64_t kSampleWhole = 6;    // and of `whole`
inline constexpr std::int64_t kSampleTop = 20;
inline constexpr std::int64_t kSampleMostBiases = 1024;

// The settings of one row.
struct SampleRow {
  double temperature = 0;  // 0: greedy
  double top_p = 1;        // above 0; off at 1
  double min_p = 0;        // off at 0
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  std::int64_t top_k = 0;  // off at 0
  // How many of the last tokens penalties apply to: 0 none, negative all.
  std::int64_t repetition_context = 20;
  std::int64_t penalty_context = -1;  // presence and frequency
  std::int64_t start =
      0;  // they apply to history[start, …): 0 all, the prompt's length the answer only
  std::uint64_t seed = 0;
};

Check sample_row_check(const SampleRow& row);

// Writes a row of `numbers` and one of `whole`. Throws what sample_row_check returns.
//   numbers  temperature, top_p, −ln(min_p), repetition, presence, frequency penalty
//   whole    top_k, repetition_context, penalty_context, start, seed's low word, its high word
void put_sample_row(const SampleRow& row, std::span<float, kSampleNumbers> numbers,
                    std::span<std::int32_t, kSampleWhole> whole);

// The settings and histories of all rows, on the device.
struct SampleRows {
  Tensor numbers, whole;    // [B, 6]
  Tensor history, lengths;  // [B, H], [B]
  Tensor bias_ids = {};     // [B, K]; undefined: none
  Tensor bias = {};
};

struct SampleOptions {
  bool logprobs = false;
  bool top = false;  // top_ids and top_logprobs; needs logprobs
  bool append =
      false;  // append the tokens to history, in place, and add 1 to lengths; both must be contiguous
};

struct Sampled {
  Tensor tokens;                 // −1: none could be chosen
  Tensor logprobs;               // undefined unless requested
  Tensor top_ids, top_logprobs;  // likewise; −1 and −inf if fewer tokens have a finite logit
};

// The contract as code: the first rule violated, or nothing.
Check sample_check(const Tensor& logits, const SampleRows& rows, SampleOptions options = {});

Sampled sample(CommandEncoder& encoder, const Tensor& logits, const SampleRows& rows,
               SampleOptions options = {});

}  // namespace mlxtape::ops
