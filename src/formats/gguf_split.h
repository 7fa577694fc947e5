// Files that belong together: NAME-00001-of-00003.gguf and so on, with split.no and split.count in each.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "mlxtape/formats/gguf.h"

namespace mlxtape::formats {

// The name of a part, counted from 0 here and from 1 in the name.
std::string part_path(const std::string& stem, std::size_t part, std::size_t count);

// Of a file's first part whose metadata were read: the paths of all parts, its own the first.
std::vector<std::string> part_paths(const GgufFile& first);

// `file` holds the metadata of this part just now. Fails where it says it is another.
void check_part(const GgufFile& file, const std::string& path, std::size_t part);

}  // namespace mlxtape::formats
