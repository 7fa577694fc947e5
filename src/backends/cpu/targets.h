// Which SIMD instruction set the CPU kernels use. Chosen when the kernels are first registered:
// the best one that both the build and this processor have, unless limited before.
#pragma once

#include <string>
#include <vector>

namespace mlxtape::cpu {

// Names, best first: "AVX3", "AVX2", "SSSE3", or what the architecture has.
std::vector<std::string> available_targets();

// Use no target better than this one. To be called before anything is computed; throws kArgument
// when the name is not among available_targets().
void limit_target(const std::string& name);

}  // namespace mlxtape::cpu
