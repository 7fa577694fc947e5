#!/bin/bash
# Proves the CUDA backend on the machine it runs on: tests, sanitizers, the program's commands, benchmark.
# `make gpu-package` puts it into build/gpu-package beside what it needs; that folder runs on any Linux
# machine with an NVIDIA driver and CUDA 13 tools.
#
#   ./gpu_check.sh [--only ops|jobs|bench] [results.json [rows]]
#
# rows: an expression for the rows that are measured (mlxtape bench ops --filter); else all in f32 and bf16.
# The demo of jobs stays in the folder demo, with its report.
#
# Where python3 has PyTorch (and, if importable, liger_kernel and fla), these run beside ours and the
# last thing printed is a table of both. Exit 0 only if everything passed.
set -uo pipefail
cd "$(dirname "$0")" || exit 1
only=all
if [ "${1:-}" = --only ]; then
  only=${2:-}
  shift 2
  case $only in ops | jobs | bench) ;; *) echo "gpu_check: --only ops, jobs or bench" >&2 && exit 2 ;; esac
fi
results=${1:-gpu-results.json}
rows=${2:-' (f32|bf16)$'}
failed=()
pids=()

step() { # name, command ...
  local name=$1 start=$SECONDS
  shift
  printf '\n==== %s\n' "$name"
  if "$@"; then
    printf '==== %s: ok after %d s\n' "$name" $((SECONDS - start))
  else
    failed+=("$name")
    printf '==== %s: FAILED after %d s\n' "$name" $((SECONDS - start))
  fi
}

# Proofs do not disturb each other, so they run at once, each into its own log: name, command ...
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
proofs=()
proof() {
  local name=$1
  shift
  proofs+=("$name")
  {
    step "$name" "$@"
    [ ${#failed[@]} = 0 ]
  } >"$logs/$name" 2>&1 &
  pids+=($!)
}
gather() {
  local at
  for at in "${!proofs[@]}"; do
    wait "${pids[$at]}" || failed+=("${proofs[$at]}")
    cat "$logs/${proofs[$at]}"
  done
}

export MLXTAPE_TEST_SECONDS=${MLXTAPE_TEST_SECONDS:-600}
brief='--gtest_brief=1'
step info ./mlxtape info
if ! ./mlxtape info | grep -q '^cuda:[0-9]'; then
  echo 'no CUDA device: nothing can be proved here' >&2
  exit 1
fi
wanted() { [ "$only" = all ] || [ "$only" = "$1" ]; }

# Alone, for its times.
if wanted jobs; then step demo ./mlxtape demo --device cuda --out demo; fi

if wanted ops; then
  proof 'tests of the ops' ./mlxtape-selftest $brief --gtest_filter='*/cuda'
  proof 'tests of the backend' ./unit_tests $brief --gtest_filter='Cuda*:*/cuda'
  proof 'tests of files' ./formats_tests $brief --gtest_filter='*/cuda'
  # Shapes enough to reach every form of every kernel; the long sweeps would take hours under these tools.
  reduced='*EveryShape*/cuda:*EveryForm*/cuda:*EveryAxis*/cuda:*EveryWidth*/cuda:*Extreme*/cuda:*Random*/cuda:*Batches*/cuda'
  for tool in memcheck racecheck initcheck synccheck; do
    proof "$tool" timeout 900 compute-sanitizer --tool $tool \
      --error-exitcode 1 ./mlxtape-selftest $brief --gtest_filter="$reduced"
  done
fi

if wanted jobs; then
  export MLXTAPE_PARITY_MODELS=tests/parity/golden MLXTAPE_PARITY_JOBS=tests/parity/golden_jobs MLXTAPE_PARITY_GGUF=tests/parity/golden_gguf
  proof 'tests of models and jobs' ./model_tests $brief --gtest_filter='*cuda'
  proof 'the commands' tests/cli/cli_test.sh ./mlxtape cuda
  proof 'the commands of jobs' tests/cli/jobs_test.sh ./mlxtape cuda
  proof 'what the commands write' tests/cli/outputs_test.sh ./mlxtape cuda
  proof 'the flags of the commands' tests/cli/flags_test.sh ./mlxtape cuda
  for command in train lora dwq; do
    proof "kill -9 of $command" scripts/kill_test.sh $command --kills 10 --device cuda --program ./mlxtape
  done
  proof 'memcheck of jobs' timeout 900 compute-sanitizer --tool memcheck --error-exitcode 1 \
    ./model_tests $brief --gtest_filter='*Dwq*/cuda:*DynamicQuant*/cuda:*LoraJob*/cuda:*Train*/cuda:*Evaluate*/cuda:*Generate*/cuda'
fi
gather

if wanted bench; then
  peers=()
  if python3 -c 'import torch' 2>/dev/null; then
    peers=(--peers peers/cuda_peers.py)
  else
    echo 'python3 has no torch, so no peers to compare with'
  fi
  # What is measured in the regime of one kernel after the other is in the second file.
  step benchmark timeout 3600 ./mlxtape bench ops --device cuda --seconds 0.1 --filter "$rows" \
    --json "$results" "${peers[@]}"
  step 'benchmark without overlap' timeout 1800 ./mlxtape bench ops --device cuda --no-overlap \
    --seconds 0.05 --filter "$rows" --json "${results%.json}-no-overlap.json"
  if [ -s "$results" ] && command -v python3 >/dev/null; then python3 peers/table.py "$results"; fi
fi

if [ ${#failed[@]} != 0 ]; then
  printf '\nFAILED: %s\n' "${failed[*]}"
  exit 1
fi
printf '\nall passed in %d s\n' "$SECONDS"
