// The formulas of elementwise.h in double, for elementwise_test.cpp: every function with its slopes and the
// numbers it is tried with.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "mlxtape/ops/elementwise.h"

namespace mlxtape::test {

inline double sigma(double x) { return 1 / (1 + std::exp(-x)); }
inline double normal_share(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
inline double normal_density(double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); }
inline double gelu_u(double x) { return 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }
inline double gelu_du(double x) { return 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x); }

// slope: of x and y = value(x). value_scale and slope_scale: how large the terms were, times one plus what the
// rounding of an exponent may cost, in units of 16 roundings.
using Of1 = double (*)(double);
using Of2 = double (*)(double, double);
struct Unary {
  const char* name;
  Tensor (*run)(CommandEncoder&, Tensor);
  Tensor (*record)(Tape&, const Tensor&);
  double low, high;  // of the numbers it is tried with
  bool keeps_y;      // the gradient is made from the stored y
  Of1 value;
  Of2 slope;
  Of1 value_scale;
  Of2 slope_scale;
};

inline const std::vector<Unary>& unaries() {
  const Of1 nothing = nullptr;  // |value|
  const Of2 none = nullptr;     // |slope|
  static const std::vector<Unary> table = {
      {"abs", ops::abs, ops::abs, -3, 3, false, [](double x) { return std::abs(x); },
       [](double x, double) { return x > 0   ? 1.0
                                     : x < 0 ? -1.0
                                             : 0.0; }, nothing, none},
      {"exp", ops::exp, ops::exp, -9, 9, true, [](double x) { return std::exp(x); },
       [](double, double y) { return y; }, nothing, none},
      {"gelu", ops::gelu, ops::gelu, -5, 5, false, [](double x) { return x * normal_share(x); },
       [](double x, double) { return normal_share(x) + x * normal_density(x); },
       [](double x) { return std::abs(x) * normal_share(x) * (1 + x * x / 16); },
       [](double x, double) {
         return normal_share(x) + std::abs(x) * normal_density(x) * (1 + x * x / 16);
       }},
      {"gelu_tanh", ops::gelu_tanh, ops::gelu_tanh, -5, 5, false,
       [](double x) { return x * sigma(gelu_u(x)); },
       [](double x, double) {
         const double s = sigma(gelu_u(x));
         return s + x * s * (1 - s) * gelu_du(x);
       },
       [](double x) { return std::abs(x) * sigma(gelu_u(x)) * (1 + std::abs(gelu_u(x)) / 8); },
       [](double x, double) {
         const double s = sigma(gelu_u(x));
         return (s + std::abs(x) * s * (1 - s) * gelu_du(x)) * (1 + std::abs(gelu_u(x)) / 8);
       }},
      {"log", ops::log, ops::log, 0.01, 9, false, [](double x) { return std::log(x); },
       [](double x, double) { return 1 / x; }, nothing, none},
      {"log1p", ops::log1p, ops::log1p, -0.9, 9, false, [](double x) { return std::log1p(x); },
       [](double x, double) { return 1 / (1 + x); }, nothing, none},
      {"negative", ops::negative, ops::negative, -3, 3, false, [](double x) { return -x; },
       [](double, double) { return -1.0; }, nothing, none},
      {"rsqrt", ops::rsqrt, ops::rsqrt, 0.05, 9, true, [](double x) { return 1 / std::sqrt(x); },
       [](double, double y) { return -0.5 * y * y * y; }, nothing, none},
      {"sigmoid", ops::sigmoid, ops::sigmoid, -9, 9, true, sigma,
       [](double, double y) { return y * (1 - y); }, nothing, none},
      {"silu", ops::silu, ops::silu, -9, 9, false, [](double x) { return x * sigma(x); },
       [](double x, double) { return sigma(x) * (1 + x * sigma(-x)); }, nothing,
       [](double x, double) {
         return sigma(x) * (1 + std::abs(x) * sigma(-x));
       }},
      {"softplus", ops::softplus, ops::softplus, -9, 9, false,
       [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); },
       [](double x, double) { return sigma(x); }, nothing, none},
      {"sqrt", ops::sqrt, ops::sqrt, 0.05, 9, true, [](double x) { return std::sqrt(x); },
       [](double, double y) { return 0.5 / y; }, nothing, none},
      {"square", ops::square, ops::square, -3, 3, false, [](double x) { return x * x; },
       [](double x, double) { return 2 * x; }, nothing, none},
      {"tanh", ops::tanh, ops::tanh, -4, 4, true, [](double x) { return std::tanh(x); },
       [](double, double y) { return 1 - y * y; }, nothing,
       [](double, double y) {
         return 1 + y * y;
       }},
      {"clip", [](CommandEncoder& e, Tensor x) { return ops::clip(e, std::move(x), -1.25, 0.5); },
       [](Tape& t, const Tensor& x) { return ops::clip(t, x, -1.25, 0.5); }, -3, 3, false,
       [](double x) { return std::min(std::max(x, -1.25), 0.5); },
       [](double x, double) { return x > -1.25 && x < 0.5 ? 1.0 : 0.0; }, nothing, none},
  };
  return table;
}

// da and db are slopes times dy.
using Of3 = double (*)(double, double, double);
struct Binary {
  const char* name;
  Tensor (*run)(CommandEncoder&, Tensor, const Tensor&);
  Tensor (*record)(Tape&, const Tensor&, const Tensor&);
  Tensor (*run_left)(CommandEncoder&, Tensor, double);
  Tensor (*run_right)(CommandEncoder&, double, Tensor);
  Tensor (*record_left)(Tape&, const Tensor&, double);
  Tensor (*record_right)(Tape&, double, const Tensor&);
  double low, high;  // of the numbers it is tried with
  Of2 value, slope_a, slope_b;
  Of2 value_scale, scale_a;  // null: |value|, |slope|
};

#define MT_BINARY(name) #name, ops::name, ops::name, ops::name, ops::name, ops::name, ops::name
inline const std::vector<Binary>& binaries() {
  static const std::vector<Binary> table = {
      {MT_BINARY(add), -3, 3, [](double a, double b) { return a + b; },
       [](double, double) { return 1.0; }, [](double, double) { return 1.0; },
       [](double a, double b) { return std::abs(a) + std::abs(b); }, nullptr},
      {MT_BINARY(subtract), -3, 3, [](double a, double b) { return a - b; },
       [](double, double) { return 1.0; }, [](double, double) { return -1.0; },
       [](double a, double b) { return std::abs(a) + std::abs(b); }, nullptr},
      {MT_BINARY(multiply), -3, 3, [](double a, double b) { return a * b; },
       [](double, double b) { return b; }, [](double a, double) { return a; }, nullptr, nullptr},
      {MT_BINARY(divide), 0.25, 3, [](double a, double b) { return a / b; },
       [](double, double b) { return 1 / b; }, [](double a, double b) { return -a / b / b; },
       nullptr, nullptr},
      {MT_BINARY(power), 0.25, 3, [](double a, double b) { return std::pow(a, b); },
       [](double a, double b) { return b * std::pow(a, b - 1); },
       [](double a, double b) { return std::log(a) * std::pow(a, b); }, nullptr,
       // b − 1 is rounded
       [](double a, double b) {
         return b * std::pow(a, b - 1) * (1 + std::abs(std::log(a)) * std::abs(b - 1) / 8);
       }},
      {MT_BINARY(maximum), -3, 3, [](double a, double b) { return std::max(a, b); },
       [](double a, double b) { return a > b ? 1.0 : 0.0; },
       [](double a, double b) { return a <= b ? 1.0 : 0.0; }, nullptr, nullptr},
      {MT_BINARY(minimum), -3, 3, [](double a, double b) { return std::min(a, b); },
       [](double a, double b) { return a < b ? 1.0 : 0.0; },
       [](double a, double b) { return a >= b ? 1.0 : 0.0; }, nullptr, nullptr},
      {"swiglu", ops::swiglu, ops::swiglu, nullptr, nullptr, nullptr, nullptr, -4, 4,
       [](double a, double b) { return a * sigma(a) * b; },
       [](double a, double b) { return b * sigma(a) * (1 + a * sigma(-a)); },
       [](double a, double) { return a * sigma(a); }, nullptr,
       [](double a, double b) {
         return std::abs(b) * sigma(a) * (1 + std::abs(a) * sigma(-a));
       }},
  };
  return table;
}
#undef MT_BINARY

}  // namespace mlxtape::test
