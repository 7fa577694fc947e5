// exp and the logistic function, as exact as the type of the result asks for.
#pragma once

#include "backends/metal/device/vectors.h"

// For 16 bits the fast one, whose error grows with |x| but stays far below half an ulp of theirs.
template <typename T>
inline float exp_for(float x) {
  return fast::exp(x);
}
template <>
inline float exp_for<float>(float x) {
  return precise::exp(x);
}

// σ(z) and 1 − σ(z), neither by a subtraction, from exp(−|z|), which cannot overflow.
struct Sigmoid {
  float value, rest;
};

template <typename T>
inline Sigmoid sigmoid(float z) {
  const float t = exp_for<T>(-fabs(z));
  const float large = 1.0f / (1.0f + t);
  const float small = t * large;
  Sigmoid result;
  result.value = z < 0 ? small : large;
  result.rest = z < 0 ? large : small;
  return result;
}
