// elementwise: functions of each element: arithmetic, activations, comparisons, casts.
//
// Formula    negative −x; abs |x|; square x²; sqrt √x; rsqrt 1/√x; exp; log; log1p log(1 + x); tanh
//            sigmoid σ(x) = 1/(1 + exp(−x)); silu x·σ(x); softplus log(1 + exp(x))
//            gelu x·Φ(x), Φ(x) = ½·erfc(−x/√2); gelu_tanh x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
//            clip min(max(x, low), high); add, subtract, multiply, divide, power a^b, maximum, minimum
//            swiglu silu(a)·b; where a if condition, else b; cast the nearest number of another type
// Gradient   dx = dy·f'(x), with these choices: abs'(0) = 0; of two equal numbers b is the maximum and
//            the minimum; clip'(low) = clip'(high) = 0; where and maximum send 0, whatever dy, to the
//            side not taken; d(a^b)/db = 0 where a^b = 0. Reduced to the input's shape by sum_to.
//            Comparisons, logical functions and results that are not floats have none.
// Layout     operands of two shapes broadcast; any strides, read in place. The result is contiguous. Saved
//            for backward: exp, sqrt, rsqrt, sigmoid, tanh y; negative, add, subtract, cast nothing;
//            multiply, divide (da) the other operand; where the condition; the rest their inputs.
// Types      f32, f16, bf16: all. bool, i32, u32, i64: add, subtract, multiply, maximum, minimum,
//            comparisons; integers wrap around, sums of bools are true where not 0. where: all types. cast:
//            between all, on a GPU but f64; floats drop their fraction, clamped to the integer's range. Two
//            types meet in promote() of them; a number takes the tensor's type, for integers it must be
//            whole. Logical functions take what is not 0 as true.
// Cost       each element of each operand is read once, of the result written once; backward likewise, with
//            dy as one more operand.
// Limits     sqrt, log of negative numbers NaN, log 0 = −inf, NaN and infinity as IEEE 754 says; maximum,
//            minimum and clip of NaN are NaN, of +0 and −0, which are equal, b. exp, sqrt within 2 ulp of
//            f32, log, log1p, tanh and power within 4, Φ within 5 (without fused multiply-add x²/2
//            more); on CUDA in 16 bits, before the rounding, log and log1p within 2^-18 of themselves, power
//            4e-4, Φ 1e-5. Tensors moved into a function give it their memory for the result if it fits
//            (core/reuse.h).
#pragma once

#include "mlxtape/base/error.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/tape/tape.h"

namespace mlxtape::ops {

// The contract as code: the first rule violated, or nothing. op: the function's name.
Check unary_check(const char* op, const Tensor& x);
Check binary_check(const char* op, const Tensor& a, const Tensor& b);
Check number_check(const char* op, const Tensor& x, double number);
Check logical_check(const char* op, const Tensor& a, const Tensor& b);
Check where_check(const Tensor& condition, const Tensor& a, const Tensor& b);

// ---- of one tensor ----

Tensor abs(CommandEncoder& encoder, Tensor x);
Tensor exp(CommandEncoder& encoder, Tensor x);
Tensor gelu(CommandEncoder& encoder, Tensor x);
Tensor gelu_tanh(CommandEncoder& encoder, Tensor x);
Tensor log(CommandEncoder& encoder, Tensor x);
Tensor log1p(CommandEncoder& encoder, Tensor x);
Tensor negative(CommandEncoder& encoder, Tensor x);
Tensor rsqrt(CommandEncoder& encoder, Tensor x);
Tensor sigmoid(CommandEncoder& encoder, Tensor x);
Tensor silu(CommandEncoder& encoder, Tensor x);
Tensor softplus(CommandEncoder& encoder, Tensor x);
Tensor sqrt(CommandEncoder& encoder, Tensor x);
Tensor square(CommandEncoder& encoder, Tensor x);
Tensor tanh(CommandEncoder& encoder, Tensor x);
Tensor clip(CommandEncoder& encoder, Tensor x, double low, double high);
Tensor cast(CommandEncoder& encoder, Tensor x, DType dtype);  // x itself if it has that type

Tensor abs(Tape& tape, const Tensor& x);
Tensor exp(Tape& tape, const Tensor& x);
Tensor gelu(Tape& tape, const Tensor& x);
Tensor gelu_tanh(Tape& tape, const Tensor& x);
Tensor log(Tape& tape, const Tensor& x);
Tensor log1p(Tape& tape, const Tensor& x);
Tensor negative(Tape& tape, const Tensor& x);
Tensor rsqrt(Tape& tape, const Tensor& x);
Tensor sigmoid(Tape& tape, const Tensor& x);
Tensor silu(Tape& tape, const Tensor& x);
Tensor softplus(Tape& tape, const Tensor& x);
Tensor sqrt(Tape& tape, const Tensor& x);
Tensor square(Tape& tape, const Tensor& x);
Tensor tanh(Tape& tape, const Tensor& x);
Tensor clip(Tape& tape, const Tensor& x, double low, double high);
Tensor cast(Tape& tape, const Tensor& x, DType dtype);

// ---- of two ----

Tensor add(CommandEncoder& encoder, Tensor a, const Tensor& b);
Tensor add(CommandEncoder& encoder, Tensor a, double b);
Tensor add(CommandEncoder& encoder, double a, Tensor b);
Tensor subtract(CommandEncoder& encoder, Tensor a, const Tensor& b);
Tensor subtract(CommandEncoder& encoder, Tensor a, double b);
Tensor subtract(CommandEncoder& encoder, double a, Tensor b);
Tensor multiply(CommandEncoder& encoder, Tensor a, const Tensor& b);
Tensor multiply(CommandEncoder& encoder, Tensor a, double b);
Tensor multiply(CommandEncoder& encoder, double a, Tensor b);
Tensor divide(CommandEncoder& encoder, Tensor a, const Tensor& b);
Tensor divide(CommandEncoder& encoder, Tensor a, double b);
Tensor divide(CommandEncoder& encoder, double a, Tensor b);
Tensor power(CommandEncoder& encoder, Tensor a, const Tensor& b);
Tensor power(CommandEncoder& encoder, Tensor a, double b);
Tensor power(CommandEncoder& encoder, double a, Tensor b);
Tensor maximum(CommandEncoder& encoder, Tensor a, const Tensor& b);
Tensor maximum(CommandEncoder& encoder, Tensor a, double b);
Tensor maximum(CommandEncoder& encoder, double a, Tensor b);
Tensor minimum(CommandEncoder& encoder, Tensor a, const Tensor& b);
Tensor minimum(CommandEncoder& encoder, Tensor a, double b);
Tensor minimum(CommandEncoder& encoder, double a, Tensor b);
Tensor swiglu(CommandEncoder& encoder, Tensor a, const Tensor& b);

Tensor add(Tape& tape, const Tensor& a, const Tensor& b);
Tensor add(Tape& tape, const Tensor& a, double b);
Tensor add(Tape& tape, double a, const Tensor& b);
Tensor subtract(Tape& tape, const Tensor& a, const Tensor& b);
Tensor subtract(Tape& tape, const Tensor& a, double b);
Tensor subtract(Tape& tape, double a, const Tensor& b);
Tensor multiply(Tape& tape, const Tensor& a, const Tensor& b);
Tensor multiply(Tape& tape, const Tensor& a, double b);
Tensor multiply(Tape& tape, double a, const Tensor& b);
Tensor divide(Tape& tape, const Tensor& a, const Tensor& b);
Tensor divide(Tape& tape, const Tensor& a, double b);
Tensor divide(Tape& tape, double a, const Tensor& b);
Tensor power(Tape& tape, const Tensor& a, const Tensor& b);
Tensor power(Tape& tape, const Tensor& a, double b);
Tensor power(Tape& tape, double a, const Tensor& b);
Tensor maximum(Tape& tape, const Tensor& a, const Tensor& b);
Tensor maximum(Tape& tape, const Tensor& a, double b);
Tensor maximum(Tape& tape, double a, const Tensor& b);
Tensor minimum(Tape& tape, const Tensor& a, const Tensor& b);
Tensor minimum(Tape& tape, const Tensor& a, double b);
Tensor minimum(Tape& tape, double a, const Tensor& b);
Tensor swiglu(Tape& tape, const Tensor& a, const Tensor& b);

// ---- truth values ----

Tensor equal(CommandEncoder& encoder, const Tensor& a, const Tensor& b);
Tensor not_equal(CommandEncoder& encoder, const Tensor& a, const Tensor& b);
Tensor less(CommandEncoder& encoder, const Tensor& a, const Tensor& b);
Tensor less_equal(CommandEncoder& encoder, const Tensor& a, const Tensor& b);
Tensor greater(CommandEncoder& encoder, const Tensor& a, const Tensor& b);
Tensor greater_equal(CommandEncoder& encoder, const Tensor& a, const Tensor& b);
Tensor logical_and(CommandEncoder& encoder, Tensor a, const Tensor& b);
Tensor logical_or(CommandEncoder& encoder, Tensor a, const Tensor& b);
Tensor logical_not(CommandEncoder& encoder, Tensor a);
Tensor where(CommandEncoder& encoder, const Tensor& condition, Tensor a, const Tensor& b);
Tensor where(Tape& tape, const Tensor& condition, const Tensor& a, const Tensor& b);

}  // namespace mlxtape::ops
