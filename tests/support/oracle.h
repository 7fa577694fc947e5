// What every op test shares: a reference value that knows its own size, a rounding bound made from
// it, a check that the check can fail, random data, and finite differences.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cases/random.h"
#include "mlxtape/base/dtype.h"

namespace mlxtape::test {

using bench::Noise;

// value: the exact result, in double. scale: the same formula with every term made positive,
// i.e. how large the numbers were that had to cancel to give value.
struct Ref {
  double value;
  double scale;
};
using Refs = std::vector<Ref>;
std::vector<double> values_of(const Refs& refs);
// Each with its own size as its scale, and how large the numbers were that cancelled.
Refs refs_of(const std::vector<double>& values, double cancelled = 0);

// Relative to scale: half an ulp of the stored type plus the a-priori bound of an f32 sum of n
// terms, each made with at most 16 roundings.
double rounding_bound(DType stored, std::int64_t n);

// The spacing of the stored type's smallest numbers: what rounding may cost however small scale is.
double smallest_step(DType stored);
// Whether the device may take what is too small for a normal f32 for 0: the smallest step is then the smallest normal
// number, also of bf16, which is made from f32.
void set_flushes_subnormals(bool may);

// How many of got are further from want than the bound allows; a NaN counts, and so does every
// missing or extra element. A want that is NaN must be met by NaN.
std::int64_t count_wrong(const std::vector<double>& got, const Refs& want, DType stored,
                         std::int64_t n);

// Checks got, then checks that the same comparison rejects planted mistakes: zeros, a constant, a
// shift by one, a missing last element, a flipped sign, a value one step of the stored type off.
void expect_close(const std::string& what, const std::vector<double>& got, const Refs& want,
                  DType stored, std::int64_t n);

// Where numbers feed back into each other no sum of terms tells how large they were. Then the same oracle is run a
// few times with every number that it makes blurred, at random, by as much as it is rounded on the device. scale is
// such that eight times the furthest that a number of eight rows strayed is within rounding_bound(stored, 0).
// kBlur: f32 rounds by 2^-24, but tensor cores cut off, by 2^-23 and always downwards, so that the errors of a sum add
// up where rounded ones would cancel.
constexpr double kBlur = 0x1p-21;
Refs blurred(const std::vector<double>& exact, const std::vector<std::vector<double>>& tries,
             std::int64_t row, DType stored);

// v as the device will see it once it is stored.
double round_to(DType t, double v);

// n numbers in [-size, size), rounded to the stored type.
std::vector<double> random_values(Noise& noise, std::int64_t n, DType dtype, double size = 1);

// loss(inputs) changes by Σ gradient·direction along random directions, by central differences in
// double. inputs and gradients are parallel lists of arrays.
using Arrays = std::vector<std::vector<double>>;
void expect_gradient(const std::function<double(const Arrays&)>& loss, const Arrays& inputs,
                     const Arrays& gradients);

}  // namespace mlxtape::test
