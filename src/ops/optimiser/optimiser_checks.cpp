#include "optimiser_checks.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace mlxtape::ops::optimiser {

Error wrong(Errc code, const std::string& what) { return {code, "optimiser: " + what}; }

std::string of(std::size_t slot) { return " of parameter " + std::to_string(slot); }

Check check_number(const char* name, const Tensor& t, DType dtype, Backend backend) {
  if (t.size() != 1 || t.dtype() != dtype) {
    return wrong(t.dtype() != dtype ? Errc::kDType : Errc::kShape,
                 std::string(name) + " must be one " + name_of(dtype) + ", got " +
                     to_string(t.shape()) + " " + name_of(t.dtype()));
  }
  if (t.backend() != backend) {
    return wrong(Errc::kDevice, std::string(name) + " must be where the parameters are");
  }
  return std::nullopt;
}

Check check_state(const char* name, const Tensor& t, const Tensor& w, DType dtype,
                  std::size_t slot) {
  if (!t.defined()) {
    return wrong(Errc::kArgument, std::string(name) + of(slot) + " is needed, got none");
  }
  if (!(t.shape() == w.shape())) {
    return wrong(Errc::kShape, std::string(name) + of(slot) + " must have its shape " +
                                   to_string(w.shape()) + ", got " + to_string(t.shape()));
  }
  if (t.dtype() != dtype) {
    return wrong(Errc::kDType, std::string(name) + of(slot) + " must be " + name_of(dtype) +
                                   ", got " + name_of(t.dtype()));
  }
  if (!t.is_contiguous()) {
    return wrong(Errc::kShape, std::string(name) + of(slot) + " must be contiguous, got strides " +
                                   to_string(t.strides()));
  }
  if (t.backend() != w.backend()) {
    return wrong(Errc::kDevice, std::string(name) + of(slot) + " must be where it is, " +
                                    name_of(w.backend()) + ", got " + name_of(t.backend()));
  }
  return std::nullopt;
}

namespace {

// ids, and the rows that they name of w.
Check check_rows(const Tensor& ids, const Tensor& grad, const Tensor& w, DType grad_type,
                 std::size_t slot) {
  if (ids.rank() != 1 || w.rank() < 1) {
    return wrong(Errc::kShape, "ids" + of(slot) + " must be [n] and it [V, …], got " +
                                   to_string(ids.shape()) + " and " + to_string(w.shape()));
  }
  if (const Check check = check_state("ids", ids, ids, DType::kI32, slot)) return check;
  if (ids.backend() != w.backend()) {
    return wrong(Errc::kDevice, "ids" + of(slot) + " must be where it is, " + name_of(w.backend()) +
                                    ", got " + name_of(ids.backend()));
  }
  Shape shape = w.shape();
  shape[0] = ids.dim(0);
  if (!element_count(shape)) {
    return wrong(Errc::kShape,
                 "the rows" + of(slot) + " must fit in 63 bits, got " + to_string(shape));
  }
  return check_state("grad", grad, Tensor::meta(shape, grad_type, w.backend()), grad_type, slot);
}

}  // namespace

Check check_parameter(const Tensor& w, const Tensor& grad, const Tensor& master, const Tensor& ids,
                      Backend backend, std::size_t slot) {
  if (!is_kernel_float(w.dtype())) {
    return wrong(Errc::kDType,
                 "w" + of(slot) + " must be f32, f16 or bf16, got " + name_of(w.dtype()));
  }
  if (w.backend() != backend) {
    return wrong(Errc::kDevice, "w" + of(slot) + " must be where the first is, " +
                                    name_of(backend) + ", got " + name_of(w.backend()));
  }
  if (const Check bad = check_state("w", w, w, w.dtype(), slot)) return bad;
  const DType grad_type = grad.dtype() == DType::kF32 ? DType::kF32 : w.dtype();
  const Check check = ids.defined() ? check_rows(ids, grad, w, grad_type, slot)
                                    : check_state("grad", grad, w, grad_type, slot);
  if (check) return check;
  if (!master.defined()) return std::nullopt;
  return check_state("master", master, w, DType::kF32, slot);
}

Check check_numbers(const StepNumbers& numbers, Backend backend, bool has_t) {
  if (const Check check = check_number("lr", numbers.lr, DType::kF32, backend)) return check;
  if (has_t) {
    if (const Check check = check_number("t", numbers.t, DType::kI32, backend)) return check;
  }
  if (!numbers.scale.defined()) return std::nullopt;
  return check_number("scale", numbers.scale, DType::kF32, backend);
}

Check check_rate(const char* name, double value) {
  if (value >= 0 && value < 1) return std::nullopt;
  return wrong(Errc::kArgument,
               std::string(name) + " must be in [0, 1), got " + std::to_string(value));
}

Check check_least(const char* name, double value) {
  if (value >= 0 && std::isfinite(value)) return std::nullopt;
  return wrong(Errc::kArgument,
               std::string(name) + " must be at least 0 and finite, got " + std::to_string(value));
}

Check check_apart(std::size_t slots, const std::function<const Tensor&(std::size_t)>& w_of) {
  struct Extent {
    std::uintptr_t first, end;
    std::size_t slot;
  };
  std::vector<Extent> extents;
  extents.reserve(slots);
  for (std::size_t i = 0; i < slots; ++i) {
    const Tensor& w = w_of(i);
    if (!w.has_memory() || w.size() == 0) continue;
    const auto first = reinterpret_cast<std::uintptr_t>(w.data());
    extents.push_back({first, first + w.bytes(), i});
  }
  const auto before = [](const Extent& a, const Extent& b) {
    return a.first < b.first;
  };
  // Parameters that were made one after the other often lie so.
  if (!std::is_sorted(extents.begin(), extents.end(), before)) {
    std::sort(extents.begin(), extents.end(), before);
  }
  for (std::size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].first >= extents[i - 1].end) continue;
    const auto [low, high] = std::minmax(extents[i - 1].slot, extents[i].slot);
    return wrong(Errc::kArgument, "w" + of(high) + " must have memory of its own, got that" +
                                      of(low) + "; each parameter once in a step");
  }
  return std::nullopt;
}

}  // namespace mlxtape::ops::optimiser
