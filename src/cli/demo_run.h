// The demo's run in a terminal: its progress, how it is stopped and resumed, and what it writes.
#pragma once

#include <array>
#include <string>

#include "demo/demo_result.h"

namespace mlxtape::cli {

struct Globals;

struct DemoFlags {
  std::string out = "mlxtape-demo";
  bool resume = false;
  // What 98 to 99 % of the answers right take: on two cores less than two minutes.
  std::int64_t iterations = 1800, cases = 2000;
  double seconds = 0;  // above 0: no more iterations than fit into about so many in all
  std::uint64_t seed = 1;
};
// Writes the models, demo.json and report.html to out. Until it is done out/state holds what it goes on from, to the same
// bits: the states of training and distillation, and progress.json. Where Interrupts asks to stop it says how to go on and
// ends with kInterrupted.
demo::DemoResult run_demo(const Globals& globals, const DemoFlags& flags);
// The models' folders in out.
inline constexpr std::array kDemoModels = {"full", "4bit", "2bit", "2bit-dwq"};

// Is there a run in out that is not done?
bool has_demo_state(const std::string& out);

}  // namespace mlxtape::cli
