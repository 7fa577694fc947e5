// Files that fit wrote: a checksum of all their bytes is at their end.
#pragma once

#include <string>

#include "mlxtape/formats/safetensors.h"

namespace mlxtape::jobs {

// Every byte is as it was written. Throws kIo: the file is missing, damaged, or of a version that wrote no checksum.
formats::SafetensorsFile open_checked(const std::string& path);

}  // namespace mlxtape::jobs
