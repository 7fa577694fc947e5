#!/bin/bash
# Runs the fuzzers that `make fuzz` builds, a program for each target of tests/fuzz/targets.h.
#
#   scripts/fuzz.sh                       every target for 60 seconds
#   scripts/fuzz.sh --seconds 600         ... for as long as that
#   scripts/fuzz.sh --runs 1000000        ... until so many inputs were tried, however long that takes
#   scripts/fuzz.sh --target json         that one alone; may be given again
#   scripts/fuzz.sh --jobs 4              so many at once; 2 otherwise
#   scripts/fuzz.sh --seed 7              inputs in the same order again, as long as the programs are the same
#
# What was learned stays in build/fuzz/corpus and the next run begins with it. An input that something is wrong with is
# kept in build/fuzz/findings, its line to try it again is printed, and the exit is 1. Once it is mended it goes to
# tests/fuzz/corpus/<target>, under a name that says what it was.
set -euo pipefail
cd "$(dirname "$0")/.."

limit=-max_total_time=60
jobs=2
seed=0  # another one each time
targets=()
usage() { sed -n '4,9s/^#   //p' "$0" >&2; exit 2; }
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || usage
  case $1 in
    --seconds | --runs | --jobs | --seed) [[ $2 =~ ^[1-9][0-9]*$ ]] || usage ;;&
    --seconds) limit=-max_total_time=$2 ;;
    --runs) limit=-runs=$2 ;;
    --jobs) jobs=$2 ;;
    --seed) seed=$2 ;;
    --target) targets+=("$2") ;;
    *) usage ;;
  esac
  shift 2
done

build=build/fuzz
if [ ${#targets[@]} -eq 0 ]; then
  for folder in tests/fuzz/corpus/*/; do targets+=("$(basename "$folder")"); done
fi
for target in "${targets[@]}"; do
  [ -x "$build/bin/fuzz_$target" ] || { echo "fuzz: there is no target $target in $build/bin: call make fuzz" >&2; exit 2; }
done

# Files that readers are given lie in memory where that can be had.
if [ -w /dev/shm ]; then export TMPDIR=/dev/shm; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
symbolizer=$(scripts/llvm.sh llvm-symbolizer) && export ASAN_SYMBOLIZER_PATH=$(command -v "$symbolizer")

# What a finding does not need costs much where little else is done: 30 frames of who asked for each piece of memory, and 256 MB
# of freed memory that is not used again (an input frees far less than 16).
export ASAN_OPTIONS=malloc_context_size=8:quarantine_size_mb=16${ASAN_OPTIONS:+:$ASAN_OPTIONS}

# The longest input, by target: nearly all seeds fit, and what takes another way for being long does (a word of 49 bytes, a text
# of 256, a sample of more tokens than are wanted).
# libFuzzer likes long inputs, and a text goes through several tokenizers several times.
max_len() {
  case $1 in
    tokenizer_text) echo 320 ;;
    tokenizer_file) echo 10240 ;;  # 256 tokens, one of each byte
    gguf) echo 16384 ;;  # a model of one layer
    dataset | json) echo 1024 ;;
    config | run_state | safetensors) echo 2048 ;;
    *) echo 4096 ;;
  esac
}

# A reader must be done with 4 KB in 10 seconds, sanitizers and all, and never ask for more than 1 GB at once.
run() {
  local target=$1 build=$2 limit=$3 seed=$4 status=0 log dictionary seeds
  log=$build/$target.log
  dictionary=tests/fuzz/dictionaries/$target.dict
  seeds=tests/fuzz/corpus/$target
  mkdir -p "$build/corpus/$target" "$build/findings"
  "$build/bin/fuzz_$target" "$limit" -seed="$seed" -timeout=10 -rss_limit_mb=2560 -malloc_limit_mb=1024 -max_len="$(max_len "$target")" \
    -print_final_stats=1 -artifact_prefix="$build/findings/$target-" \
    $([ -f "$dictionary" ] && echo "-dict=$dictionary") "$build/corpus/$target" "$seeds" >"$log" 2>&1 || status=$?
  stat() { sed -n "s/^stat::$1: *//p" "$log" | tail -n 1; }
  printf '%-16s%12s runs%8s a second%7s in the corpus%7s MB   %s\n' "$target" "$(stat number_of_executed_units)" \
    "$(stat average_exec_per_sec)" "$(find "$build/corpus/$target" -type f | wc -l)" "$(stat peak_rss_mb)" \
    "$([ $status = 0 ] && echo 'nothing found' || echo 'FOUND:')"
  [ $status != 0 ] || return 0
  local finding
  finding=$(sed -n 's/^.*Test unit written to //p' "$log" | tail -n 1)
  grep -m 3 -E 'ERROR: |SUMMARY: |runtime error: |what\(\): |terminate called' "$log" | cut -c 1-300 | sed 's/^/  /'
  if [ -n "$finding" ]; then
    printf '  again: %s -timeout=10 -rss_limit_mb=2560 -malloc_limit_mb=1024 %s\n' "$build/bin/fuzz_$target" "$finding"
  else
    tail -n 5 "$log" | sed 's/^/  /'
  fi
  return 1
}
export -f run max_len
printf '%s\0' "${targets[@]}" | xargs -0 -I '{}' -P "$jobs" bash -c 'run "$@"' run '{}' "$build" "$limit" "$seed" || {
  echo "fuzz: something was found; $build/<target>.log has the whole of it" >&2
  exit 1
}
