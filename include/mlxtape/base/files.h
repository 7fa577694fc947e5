// Files that are there whole or not at all.
#pragma once

#include <string>
#include <string_view>

namespace mlxtape {

// Written beside the file, brought to the disk, then renamed: whatever happens, path holds the old bytes
// or the new ones. A link stays a link, a file keeps its rights. A path that is no file (a pipe,
// /dev/null) is just written to. Throws kIo, which begins with who asked; then nothing is left behind.
void write_whole(const std::string& path, std::string_view bytes, const char* who);

// Throws kIo.
std::string read_whole(const std::string& path, const char* who);

}  // namespace mlxtape
