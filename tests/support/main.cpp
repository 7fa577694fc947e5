// main of the test programs: GoogleTest's flags and --cpu-target=NAME, which runs the CPU kernels
// with no better instruction set than NAME: "best" does not limit it, "baseline" is the least one.
// Exit 77: not on this machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "backends/cpu/targets.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const std::string flag = "--cpu-target=";
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind(flag, 0) != 0) {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
    std::string target = arg.substr(flag.size());
    if (target == "best") continue;
    const auto names = mlxtape::cpu::available_targets();
    if (target == "baseline") target = names.back();
    if (std::find(names.begin(), names.end(), target) == names.end()) {
      std::printf("skipped: this machine or build has no %s\n", target.c_str());
      return 77;
    }
    mlxtape::cpu::limit_target(target);
  }
  return RUN_ALL_TESTS();
}
