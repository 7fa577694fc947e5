// What every slot of an optimiser's step must hold.
#pragma once

#include <functional>
#include <string>

#include "mlxtape/ops/optimiser.h"

namespace mlxtape::ops::optimiser {

Error wrong(Errc code, const std::string& what);
std::string of(std::size_t slot);

Check check_number(const char* name, const Tensor& t, DType dtype, Backend backend);
Check check_numbers(const StepNumbers& numbers, Backend backend, bool has_t);
Check check_state(const char* name, const Tensor& t, const Tensor& w, DType dtype,
                  std::size_t slot);
// ids not defined: grad is dense.
Check check_parameter(const Tensor& w, const Tensor& grad, const Tensor& master, const Tensor& ids,
                      Backend backend, std::size_t slot);
Check check_rate(const char* name, double value);   // in [0, 1)
Check check_least(const char* name, double value);  // at least 0
// Two slots that write one parameter would do so at once, in no order.
Check check_apart(std::size_t slots, const std::function<const Tensor&(std::size_t)>& w_of);

}  // namespace mlxtape::ops::optimiser
