// lr_schedule of mlx-lm's configuration files.
#pragma once

#include <string>

#include "mlxtape/formats/json.h"
#include "mlxtape/jobs/schedule.h"

namespace mlxtape::cli {

// {"name": "cosine_decay", "arguments": [1e-5, 1000, 1e-7], "warmup": 100, "warmup_init": 1e-7}; null: none. Throws kIo.
jobs::Schedule schedule_of(const formats::Json& value, const std::string& file);

}  // namespace mlxtape::cli
