// NotFinite: a loss, a gradient, a sensitivity or logits are no numbers or without bounds: nothing that the caller passed
// is wrong by itself, the numbers ran away. Other errors of kArgument are.
#pragma once

#include "mlxtape/base/error.h"

namespace mlxtape::jobs {

class NotFinite : public Error {
 public:
  explicit NotFinite(const std::string& message) : Error(Errc::kArgument, message) {}
};

}  // namespace mlxtape::jobs
