// Which weights a run begins with, for its state: a run must not go on from other ones.
#pragma once

#include <string>

#include "mlxtape/models/model.h"

namespace mlxtape::jobs {

// Of the first numbers of every weight: two models of one config are told apart without reading them.
std::string base_fingerprint(CommandEncoder& encoder, const models::Model& model);

}  // namespace mlxtape::jobs
