// Which GPUs the kernels can use, and what to say of the others. Plain facts in, words out: no system is asked.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace mlxtape::metal {

struct GpuFacts {
  std::string name;
  bool is_apple7 = false;   // M1 or newer: bfloat, simdgroup matrices, barriers that order memory
  bool is_unified = false;  // the host sees its memory
};

struct GpuChoice {
  std::vector<std::size_t> usable;  // by their place in the list
  std::string others;               // each that is not, and why; empty: there is none
};

inline GpuChoice choose_gpus(const std::vector<GpuFacts>& all) {
  GpuChoice choice;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].is_apple7 && all[i].is_unified) {
      choice.usable.push_back(i);
      continue;
    }
    choice.others +=
        (choice.others.empty() ? "" : "; ") + all[i].name +
        (all[i].is_apple7 ? " has memory of its own; the kernels need memory that the host sees"
                          : " is not an Apple GPU of the M1's family or a newer one, "
                            "which the kernels need");
  }
  return choice;
}

}  // namespace mlxtape::metal
