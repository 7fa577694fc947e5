#include "base.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace mlxtape::jobs {

std::string base_fingerprint(CommandEncoder& encoder, const models::Model& model) {
  constexpr std::int64_t kFirst = 16;
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  std::array<unsigned char, kFirst * 8> bytes{};
  for (const models::Parameter& p : models::parameters(model)) {
    const Tensor flat = encoder.contiguous(p.tensor.detach()).reshape({p.tensor.size()});
    const Tensor part = flat.slice(0, 0, std::min(kFirst, flat.size()));
    encoder.download(part, bytes.data(), part.bytes());
    for (std::size_t i = 0; i < part.bytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ULL;
  }
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(hash));
  return text.data();
}

}  // namespace mlxtape::jobs
