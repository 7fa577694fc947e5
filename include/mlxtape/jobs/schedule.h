// Learning rates that change from step to step, with the names and arguments of mlx.optimizers, as mlx-lm's lr_schedule has them.
//
// Formula    s: updates done before, 0 at the first. rate, end: arguments, n: their steps
//            cosine_decay      [rate, n, end = 0]: end + (rate − end)·(1 + cos(π·min(s, n)/n))/2
//            linear_schedule   [rate, end, n]:     rate + (end − rate)·min(s, n)/n
//            exponential_decay [rate, d]:          rate·dˢ
//            step_decay        [rate, d, n]:       rate·dᵏ, k = ⌊s/n⌋
//            With a warm-up of w updates, w > 0: warmup_init + (rate − warmup_init)·s/w up to s = w, then the above at s − w − 1.
//            So the rate is reached at the update after the warm-up, and stays for one more, as in mlx-lm.
// Types      mlx computes in f32, this in double: they agree to the rounding of f32.
// Threads    any
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mlxtape/base/error.h"

namespace mlxtape::jobs {

struct Schedule {
  std::string name;               // empty: none
  std::vector<double> arguments;  // the first is the rate
  std::int64_t warmup = 0;
  double warmup_init = 0;
};

Check schedule_check(const Schedule& schedule);
double rate_at(const Schedule& schedule, std::int64_t done);  // of the update after so many
std::string to_string(const Schedule& schedule);              // all of it, for messages and states

}  // namespace mlxtape::jobs
