// Blind changes nearly always break the header's length, and nothing behind it is reached then. So most changes are made to
// what follows the length, and the length is set to the end of what may be a header.
#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  std::uint64_t length = 0;
  constexpr std::size_t kPrefix = sizeof length;
  if (seed % 16 == 0 || size <= kPrefix || max_size <= kPrefix) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  size = kPrefix + LLVMFuzzerMutate(data + kPrefix, size - kPrefix, max_size - kPrefix);
  for (std::size_t at = size; at > kPrefix && length == 0; --at) {
    if (data[at - 1] == '}') length = at - kPrefix;
  }
  std::memcpy(data, &length, kPrefix);
  return size;
}
