// The encoder of Metal devices: kernels go to the device's stream, or between begin_capture and end_capture into a list
// that is encoded again at each replay.
#pragma once

#include <memory>

#include "backends/metal/machine.h"
#include "backends/metal/transfers.h"
#include "mlxtape/core/encoder.h"

namespace mlxtape::metal {

std::unique_ptr<CommandEncoder> make_encoder(Device& device, Machine& machine, Uploads& uploads,
                                             Downloads& downloads);

}  // namespace mlxtape::metal
