// libFuzzer's way in. MLXTAPE_FUZZ_TARGET: the function of targets.h.
#include <cstddef>
#include <cstdint>

#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mlxtape::fuzz::MLXTAPE_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}
