#!/bin/sh
# `make test-arm`: the CPU kernels as 64-bit ARM has them (NEON), the processor of every Apple silicon Mac, built
# by Debian's cross compiler and run by qemu-user.
#
#   scripts/test_arm.sh             each op forward and backward, NaN, what kernels share, and the reader of numbers
#   scripts/test_arm.sh --all       every test of op_tests, unit_tests and formats_tests: hours
#   scripts/test_arm.sh FILTER ...  tests by GoogleTest's patterns
#
# The sweeps over shapes and forms, the random tests and those that repeat a call on several threads are left out of
# the short run. It takes as long as its build, which is that of the kernels and their tests alone.
set -eu
cd "$(dirname "$0")/.."
jobs=${JOBS:-2}

fail() { printf 'test_arm: %s\n' "$*" >&2; exit 1; }

command -v apt-get >/dev/null || fail "needs apt-get: it takes libraries from Debian's arm64 packages"
scripts/setup.sh arm

# ---- libraries: the arm64 packages, unpacked beside; the system's own packages and lists stay as they are ----

work=$PWD/build/arm-packages
root=$work/root
packages='libgtest-dev libgmock-dev librapidcheck-dev libpcre2-dev libutf8proc-dev libhwy-dev libcli11-dev nlohmann-json3-dev'
if [ "$(cat "$work/done" 2>/dev/null)" != "$packages" ]; then
  rm -rf "$work"
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$root"
  : >"$work/status"
  cat >"$work/apt.conf" <<CONFIG
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "root";
Acquire::Retries "3";
Dir::State "$work";
Dir::State::Lists "$work/lists";
Dir::State::Status "$work/status";
Dir::Cache "$work/cache";
CONFIG
  export APT_CONFIG="$work/apt.conf"
  # A source that has nothing for arm64 must not stop what the others can deliver.
  apt-get -q update || printf 'test_arm: apt-get update reported errors; trying with what is known\n'
  # shellcheck disable=SC2086  # one word per package; CMake's file for Highway asks for the shared library
  (cd "$work/debs" && apt-get -q download $packages \
    "$(apt-cache depends libhwy-dev | sed -n 's/^ *Depends: \(libhwy[0-9a-z.]*\)$/\1/p')") ||
    fail "apt-get could not download: $packages"
  unset APT_CONFIG
  for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$root"; done
  printf '%s' "$packages" >"$work/done"
fi

# ---- build and run ----

cmake --preset arm -DMLXTAPE_ARM_ROOT="$root"

# run PROGRAM FILTER: its tests, in as many processes as there are jobs.
run() {
  program=build/arm/bin/$1
  count=$(qemu-aarch64 -L /usr/aarch64-linux-gnu "$program" --gtest_list_tests --gtest_filter="$2" | grep -c '^  ') ||
    fail "no test of $1 fits $2"
  pids='' shard=0
  while [ "$shard" -lt "$jobs" ]; do
    GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$shard MLXTAPE_TEST_SECONDS=3600 \
      qemu-aarch64 -L /usr/aarch64-linux-gnu "$program" --gtest_filter="$2" >"build/arm/$1.$shard.log" 2>&1 &
    pids="$pids $!" shard=$((shard + 1))
  done
  status=0
  for pid in $pids; do wait "$pid" || status=1; done
  if [ "$status" != 0 ]; then
    cat build/arm/"$1".[0-9]*.log
    fail "tests of $1 failed"
  fi
  printf 'test_arm: %s: %s tests passed\n' "$1" "$count"
}

# Numbers typed in from MLX, forward and backward, for most ops; what stands for them in the others; NaN, infinities and
# ties; what kernels share (exp and its like over their whole range, conversions); threads, memory, the tape.
few='*Mlx*:*NaN*:*Nan*:*ExtremeNumbers*:*WhatIsNoNumber*:*NumbersThatAreNone*:*WhatIsNotFinite*:*LargeNumbers*:*TiesGoToEven*'
few=$few:'*AtTheEdges*:*PowerAsIeee*:*CastsBetween*:*CountWhatTheyShould*:*ReduceMatchesOracle*:*RowGradsAreAdded*:*FrozenWeights*'
few=$few:'*StepsEqualOneForward*:*BackwardTakesAnyIndices*:*NothingTracked*:*SmallRows*:*EqualIndicesAddUp*:*GradientThrough*'
few=$few:'*GradientsThrough*:*CpuSimd*:*CpuMath*:Half*:Convert*:*OnEncoder*:*OnTape*:Threads*:Tensor*'
few=$few:'Real.*:*GreedyTakesTheFirst*:*PenaltiesByHand*:*TopPAtItsEdge*:*RowsWithNothingToChoose*:SampleOracle*'
# A child that a process with threads forks does not end well on the emulator.
few=$few:'-Threads.AForkedChild*'

case ${1:-} in
  --all)
    cmake --build --preset arm -j "$jobs" --target op_tests unit_tests formats_tests
    for program in op_tests unit_tests formats_tests; do run "$program" '-Threads.AForkedChild*'; done ;;
  -*) fail "no such argument: $1" ;;
  *)
    # The emulator of Metal has instructions of its own for each processor.
    cmake --build --preset arm -j "$jobs" --target metal_emulator_tests metal_emulator_tests_checked
    for program in metal_emulator_tests metal_emulator_tests_checked; do run $program '-*Death*'; done
    cmake --build --preset arm -j "$jobs" --target kernel_tests
    if [ $# -gt 0 ]; then few=$(printf '%s:' "$@"); fi
    run kernel_tests "$few" ;;
esac
