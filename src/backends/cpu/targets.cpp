// The functions of Highway that are not in its headers, so that programs link no libhwy (Debian
// has it as a shared library only), and the choice of target built on them.
#include "backends/cpu/targets.h"

#include <hwy/targets.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "mlxtape/base/error.h"

namespace mlxtape::cpu {

namespace {

constexpr const char* kBf16Name = "AVX3_BF16";

std::atomic<std::int64_t> allowed{~std::int64_t{0}};
std::atomic<bool> bf16_allowed{true};

std::int64_t detected_targets() {
  std::int64_t found = HWY_STATIC_TARGET;
#if HWY_ARCH_X86
  __builtin_cpu_init();
  // What each Highway target compiles for, beyond the one before it.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("f16c");
  const bool avx3 = avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2) found |= HWY_AVX2;
  if (avx3) found |= HWY_AVX3;
#endif
  return found & HWY_TARGETS;
}

bool detected_bf16() {
#if HWY_ARCH_X86
  return (detected_targets() & HWY_AVX3) != 0 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace

bool bf16_dots() {
  static const bool there = detected_bf16();
  return there && bf16_allowed && (allowed & HWY_AVX3) != 0;
}

std::vector<std::string> available_targets() {
  std::vector<std::string> names;
  if (detected_bf16()) names.emplace_back(kBf16Name);
  for (std::int64_t rest = detected_targets(); rest != 0; rest &= rest - 1) {
    names.emplace_back(hwy::TargetName(rest & -rest));  // the lowest bit is the best target
  }
  return names;
}

void limit_target(const std::string& name) {
  const bool with_bf16 = name == kBf16Name && detected_bf16();
  std::string known = detected_bf16() ? kBf16Name : "";
  for (std::int64_t rest = detected_targets(); rest != 0; rest &= rest - 1) {
    const std::int64_t target = rest & -rest;
    if (name == hwy::TargetName(target) || (with_bf16 && target == HWY_AVX3)) {
      allowed = ~(target - 1);
      bf16_allowed = with_bf16;
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      return;
    }
    known += std::string(known.empty() ? "" : ", ") + hwy::TargetName(target);
  }
  throw Error(Errc::kArgument, "cpu target: one of " + known + ", got " + name);
}

}  // namespace mlxtape::cpu

namespace hwy {

std::int64_t SupportedTargets() {
  const std::int64_t found = mlxtape::cpu::detected_targets() & mlxtape::cpu::allowed.load();
  return found != 0 ? found : HWY_STATIC_TARGET;
}

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

// Called by Highway's own assertions, which unoptimised and sanitized builds have.
void Abort(const char* file, int line, const char* format, ...) {
  std::fprintf(stderr, "%s:%d: ", file, line);
  std::va_list args;
  va_start(args, format);
  std::vfprintf(stderr, format, args);
  va_end(args);
  std::fputc('\n', stderr);
  std::abort();
}

}  // namespace hwy
