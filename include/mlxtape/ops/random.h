// random: pseudo-random numbers, each a function of a key and its position only: the same as in MLX.
//
// Formula    words        Threefry-2x32 (20 rounds, of the key) makes two words of each pair of counters:
//                         (w[i], w[i+h]) = hash(i, i+h) for h = ⌈n/2⌉; n odd: w[h−1] is the first of hash(h−1, 0)
//            key          (seed >> 32, seed mod 2³²);  split_key: n·2 words, row by row
//            advance_key  (k, next) = the two rows of split_key(key, 2): key becomes k, next is returned
//            bits         the bytes of ⌈bytes/4⌉ words
//            uniform      low + (high − low)·u,  u = min(f32(w)/2³², the largest number below 1)
//            normal       mean + deviation·√2·erf⁻¹(2·u − (1 − 2⁻²⁴)), u as for f32
//            bernoulli    f32(w) < p·(2³² + 512), p in f32
// Gradient   none
// Layout     key: [2] u32 on the device, read when the kernel runs. Results: any shape, contiguous, drawn in the
//            order of their elements; a word for each but for bits.
// Types      key u32. bits: u32, u16, u8. uniform, normal: f32, f16, bf16. uniform has MLX's bits: low, high,
//            high − low, u, the product and the sum are each rounded to the type. normal is made in f32 and
//            rounded once, which MLX does after each step. bernoulli: bool.
// Cost       writes 1 element each. 70 integer operations for two words, which is the bottleneck: 16-bit
//            numbers are not faster than f32. normal: a logarithm and two polynomials more.
// Limits     counters have 32 bits: beyond 2³² pairs they wrap around. uniform: low, high finite. Bits are the
//            same on every backend and for any number of threads, those of normal within 4 ulp of f32.
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// The contract as code: the first rule violated, or nothing. op: the function's name.
Check random_key_check(const char* op, const Tensor& key);
Check split_key_check(const Tensor& key, std::int64_t n);
Check random_bits_check(const Tensor& key, DType dtype);
Check random_uniform_check(const Tensor& key, DType dtype, double low, double high);
Check random_normal_check(const Tensor& key, DType dtype, double mean, double deviation);
Check random_bernoulli_check(const Tensor& key, const Shape& shape, const Tensor& p);

Tensor random_key(CommandEncoder& encoder, std::uint64_t seed);
Tensor split_key(CommandEncoder& encoder, const Tensor& key, std::int64_t n = 2);  // [n, 2]

// Writes the next key into key and returns the one to draw from: a replayed step draws different
// numbers each time.
Tensor advance_key(CommandEncoder& encoder, const Tensor& key);

Tensor random_bits(CommandEncoder& encoder, const Tensor& key, Shape shape,
                   DType dtype = DType::kU32);
Tensor random_uniform(CommandEncoder& encoder, const Tensor& key, Shape shape,
                      DType dtype = DType::kF32, double low = 0, double high = 1);
Tensor random_normal(CommandEncoder& encoder, const Tensor& key, Shape shape,
                     DType dtype = DType::kF32, double mean = 0, double deviation = 1);
Tensor random_bernoulli(CommandEncoder& encoder, const Tensor& key, Shape shape, double p = 0.5);
// p: f32, f16 or bf16, broadcast to shape.
Tensor random_bernoulli(CommandEncoder& encoder, const Tensor& key, Shape shape, const Tensor& p);

// random_bernoulli is true for words up to this one; p·(2³² + 512) must be above 0 in f32.
std::uint32_t bernoulli_last_word(double p);

// A sequence of keys from a state on the device. Copies share it.
class KeySequence {
 public:
  KeySequence(CommandEncoder& encoder, std::uint64_t seed) : state_(random_key(encoder, seed)) {}
  explicit KeySequence(Tensor key);  // advanced in place

  const Tensor& state() const { return state_; }
  Tensor next(CommandEncoder& encoder) { return advance_key(encoder, state_); }
  // Inside activation checkpointing: the recomputation draws the same keys again.
  Tensor next(Tape& tape);

 private:
  Tensor state_;
};

}  // namespace mlxtape::ops
