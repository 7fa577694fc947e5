#!/bin/bash
# Where the time of the last builds and tests went: scripts/times.sh [rows], 20 unless told.
#
# Objects: seconds from start to end as Ninja saw them, so on a machine that is busy with something
# else, or where the compiler cache answered, they say little. Tests: of the last run of ctest.
set -euo pipefail
cd "$(dirname "$0")/.."
rows=${1:-20}

# The newest line of an output counts: a log keeps those of earlier builds.
objects() {
  awk -v build="$1" '!/^#/ { time[$4] = ($2 - $1) / 1000 }
    END { for (file in time) printf "%8.1f  %s/%s\n", time[file], build, file }' "$1/.ninja_log"
}
# Seconds and name of each program that ctest ran.
programs() {
  awk -v build="$1" '/^[0-9]+\/[0-9]+ Testing: / { name = $3 }
    /^Test time = / { printf "%8.1f  %s: %s\n", $4, build, name }' "$1/Testing/Temporary/LastTest.log"
}
# Seconds and name of each case of GoogleTest inside them.
cases() {
  awk -v build="$1" '/^[0-9]+\/[0-9]+ Testing: / { program = $3 }
    /^\[       OK \] .* \([0-9]+ ms\)$/ { time = $(NF - 1); sub(/\(/, "", time);
      printf "%8.1f  %s: %s %s\n", time / 1000, build, program, $4 }' "$1/Testing/Temporary/LastTest.log"
}
# total <title> <function> <file that a build must have>
total() {
  local build found=
  printf '\n%s\n' "$1"
  for build in build/*/; do
    build=${build%/}
    if [ -f "$build/$3" ]; then
      found=yes
      "$2" "$build" | awk -v build="$build" '{ sum += $1 } END { printf "%8.1f  sum of %s (%d)\n", sum, build, NR }'
    fi
  done
  if [ -z "$found" ]; then
    echo '      none yet'
    return
  fi
  for build in build/*/; do
    build=${build%/}
    if [ -f "$build/$3" ]; then "$2" "$build"; fi
  done | sort -rn | sed "${rows}q"
}

total 'objects and programs, seconds' objects .ninja_log
total 'tests, seconds' programs Testing/Temporary/LastTest.log
total 'cases of tests, seconds' cases Testing/Temporary/LastTest.log
