#pragma once

#include <cstdint>
#include <string>

namespace mlxtape::metal_bind {

// C++ for the emulator, from a preprocessed text in Metal's language. Throws Error where the text breaks a rule of the
// language that C++ does not know.
std::string bind_kernels(const std::string& stem, const std::string& preprocessed,
                         std::uint64_t text_hash);

// The same text for Clang's OpenCL C++, whose address spaces are types: nothing of it is run.
std::string bind_strictly(const std::string& preprocessed);

}  // namespace mlxtape::metal_bind
