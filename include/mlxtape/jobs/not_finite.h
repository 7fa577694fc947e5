// NotFinite: a loss, a gradient, a sensitivity or logits became NaN or infinite. Unlike other errors of kArgument, nothing that
// the caller passed is wrong by itself: the numbers diverged.
#pragma once

#include <cmath>
#include <string>

#include "mlxtape/base/error.h"

namespace mlxtape::jobs {

// nan, inf or -inf. The sign of NaN means nothing, and differs between processors.
inline std::string text_of_nonfinite(double value) {
  if (std::isnan(value)) return "nan";
  return value > 0 ? "inf" : "-inf";
}

class NotFinite : public Error {
 public:
  explicit NotFinite(const std::string& message) : Error(Errc::kArgument, message) {}
};

}  // namespace mlxtape::jobs
