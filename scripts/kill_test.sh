#!/bin/bash
# Kills a run with -9 at moments drawn from a seed, resumes it, and expects the bits of a run that was never killed.
#
#   scripts/kill_test.sh [train|lora|dwq] [--kills 50] [--seed 1] [--device cpu] [--program build/release/bin/mlxtape]
#
# A run that is done before the last kill is compared, and another begins. The seed is printed first, and at the end how many
# runs there were. Moments are shares of the time that a whole run takes: the same seed draws the same shares.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
command=train kills=50 seed=1 device=cpu program=$root/build/release/bin/mlxtape
while [ $# -gt 0 ]; do
  case $1 in
    train | lora | dwq) command=$1 && shift ;;
    --kills) kills=$2 && shift 2 ;;
    --seed) seed=$2 && shift 2 ;;
    --device) device=$2 && shift 2 ;;
    --program) program=$(cd "$(dirname "$2")" && pwd)/$(basename "$2") && shift 2 ;;
    *) echo "kill_test: no such argument: $1" >&2 && exit 2 ;;
  esac
done
case $seed$kills in
  *[!0-9]*) echo "kill_test: --seed and --kills must be numbers, got '$seed' and '$kills'" >&2 && exit 2 ;;
esac
echo "kill_test: $command, seed $seed"
RANDOM=$seed
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

# A model of a few layers whose vocabulary is the bytes below 64, and sums: 12+3=15.
cp -r "$root/tests/parity/golden/qwen3_next_q4" quantised
chmod -R u+w quantised
cp "$root/examples/bytes/tokenizer.json" quantised
"$program" --quiet convert --model quantised --mlx-path model -d >setup
mkdir data
for part in train:96 valid:8; do
  awk -v n="${part#*:}" 'BEGIN {
    for (i = 0; i < n; i++) {
      a = (7 * i) % 23; b = (11 * i + n) % 19
      printf "{\"prompt\": \"%d+%d=\", \"completion\": \"%d\"}\n", a, b, a + b
    }
  }' >"data/${part%:*}.jsonl"
done

# A save every 2 steps and a validation every 5: files are written most of the time. 'out' holds what is made.
flags=(--device "$device" --quiet --threads 1 --save-every 2 --steps-per-eval 5 --data data --learning-rate 1e-3 --resume)
case $command in
  train) run=(train --config quantised/config.json --from-scratch --iters 60 "${flags[@]}" --out) ;;
  lora) run=(lora --model quantised --train --iters 60 --dropout 0.1 --lora-keys q_proj --lora-keys v_proj "${flags[@]}" --adapter-path) ;;
  dwq) run=(dwq --model model --bits 2 --group-size 32 --batch-size 2 "${flags[@]}" --mlx-path) ;;
esac

# is_done: what was to be made is there, whole, and it is not a run's.
is_done() {
  case $command in
    lora) [ -e out/adapters.safetensors ] && [ ! -e out/state.safetensors ] ;;
    *) [ -d out ] ;;
  esac
}

now_ms() { perl -MTime::HiRes=time -e 'printf "%d\n", time * 1000'; }  # BSD date has no %N
start=$(now_ms)
"$program" "${run[@]}" whole >setup 2>&1 || { cat setup && exit 1; }
took=$(($(now_ms) - start))

compared=0
compare() {
  for file in whole/*.safetensors; do
    if ! cmp "$file" "out/$(basename "$file")"; then
      echo "kill_test: $command, run $((compared + 1)), seed $seed: other bits than a run that was not killed" >&2
      exit 1
    fi
  done
  compared=$((compared + 1))
  rm -rf out out.state
}

killed=0 resumed=0
while ! { [ "$killed" -ge "$kills" ] && is_done; }; do
  if is_done; then compare; fi
  if [ -e out.state/state.safetensors ] || [ -e out/state.safetensors ]; then resumed=$((resumed + 1)); fi
  "$program" "${run[@]}" out >said 2>&1 &
  job=$!
  if [ "$killed" -lt "$kills" ]; then
    # Anywhere from the first moment to two thirds of a whole run.
    wait_ms=$((RANDOM * took * 2 / 3 / 32768))
    sleep "$((wait_ms / 1000)).$(printf %03d $((wait_ms % 1000)))"
    kill -9 "$job" 2>/dev/null || true
  fi
  status=0
  wait "$job" 2>/dev/null || status=$?
  if [ "$status" -eq 137 ]; then
    killed=$((killed + 1))
  elif [ "$status" -ne 0 ]; then
    cat said >&2
    echo "kill_test: $command, seed $seed, after $killed kills: exit $status" >&2
    exit 1
  fi
done
compare
left=$(find . -name '*.tmp*' | wc -l)
if [ "$left" -ne 0 ]; then
  echo "kill_test: $command, seed $seed: $left files were left behind" >&2
  exit 1
fi
echo "kill_test: $command: $killed kills, $resumed of the starts went on from a state, $compared runs, all with the same bits"
