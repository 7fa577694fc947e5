#include "fingerprint.h"

#include <algorithm>
#include <array>

#include "hash.h"

namespace mlxtape::jobs {

std::string base_fingerprint(CommandEncoder& encoder, const models::Model& model) {
  constexpr std::int64_t kFirst = 16;
  Hash hash;
  std::array<std::byte, kFirst * 8> bytes{};
  for (const models::Parameter& p : models::parameters(model)) {
    const Tensor flat = encoder.contiguous(p.tensor.detach()).reshape({p.tensor.size()});
    const Tensor part = flat.slice(0, 0, std::min(kFirst, flat.size()));
    encoder.download(part, bytes.data(), part.bytes());
    hash.add(std::span(bytes).first(part.bytes()));
  }
  return hash.digits();
}

}  // namespace mlxtape::jobs
