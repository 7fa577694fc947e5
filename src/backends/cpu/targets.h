// Which SIMD instruction set the CPU kernels use. Chosen when the kernels are first registered:
// the best one that both the build and this processor have, unless limited before.
#pragma once

#include <string>
#include <vector>

namespace mlxtape::cpu {

// Names, best first: "AVX3_BF16", "AVX3", "AVX2", "SSSE3", or what the architecture has. AVX3_BF16 is AVX3 with
// bf16_dots(): no code of its own but for the loops that ask for it.
std::vector<std::string> available_targets();

// Use no target better than this one. To be called before anything is computed; throws kArgument
// when the name is not among available_targets().
void limit_target(const std::string& name);

// May kernels of AVX3 multiply pairs of bf16 (vdpbf16ps)?
bool bf16_dots();

}  // namespace mlxtape::cpu
