// Which file lies where in memory: what a handler of SIGBUS needs to say which of them became shorter.
//
// Threads    All at any time. mapped_file_at may also be called in a signal's handler.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace mlxtape {

// The path of the MappedFile that holds this address; nullptr: none does. Good as long as the file is mapped.
const char* mapped_file_at(const void* address) noexcept;

// What MappedFile calls. A path of more than 4095 bytes is cut.
void note_mapped(std::span<const std::byte> bytes, const std::string& path);
void forget_mapped(std::span<const std::byte> bytes) noexcept;

}  // namespace mlxtape
