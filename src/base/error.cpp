#include "mlxtape/base/error.h"

#include <cstdio>
#include <cstdlib>

namespace mlxtape {

const char* name_of(Errc code) noexcept {
  switch (code) {
    case Errc::kShape: return "shape";
    case Errc::kDType: return "dtype";
    case Errc::kDevice: return "device";
    case Errc::kArgument: return "argument";
    case Errc::kNoKernel: return "no kernel";
    case Errc::kNoGradient: return "no gradient";
    case Errc::kOutOfMemory: return "out of memory";
    case Errc::kIo: return "io";
    case Errc::kBackend: return "backend";
  }
  return "unknown";
}

void assert_failed(const char* condition, const char* file, int line) noexcept {
  std::fprintf(stderr, "mlxtape: broken invariant %s at %s:%d\n", condition, file, line);
  std::abort();
}

}  // namespace mlxtape
