#!/bin/sh
# cli_test.sh <mlxtape>: the program as a user meets it: commands, exit codes, files.
set -u
program=$1
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
failures=0

# expect <exit code> <text in the output> <arguments...>
expect() {
  code=$1 text=$2
  shift 2
  output=$("$program" "$@" 2>&1)
  status=$?
  if [ "$status" -ne "$code" ]; then
    echo "mlxtape $*: exit $status, want $code"
    failures=$((failures + 1))
  fi
  case $output in
    *"$text"*) ;;
    *)
      echo "mlxtape $*: no '$text' in: $output"
      failures=$((failures + 1))
      ;;
  esac
}

expect 0 "cpu: " info
expect 0 "cpu softmax softmax_fwd f16 bf16 f32" kernels
expect 0 "bench" --help
expect 0 "--json" bench ops --help
expect 0 "." --version
expect 2 "a command is needed"
expect 2 "here: frobnicate" frobnicate
expect 2 "here: --frobnicate" --frobnicate
expect 2 "here: frobnicate" --threads 2 frobnicate
expect 2 "here: frobnicate" bench frobnicate
expect 2 "measure is needed" bench
expect 2 "--threads" --threads 5000 info
expect 2 "--threads" --threads many info
expect 2 "one of" --cpu-target AVX9 info
expect 0 "2 threads used" --threads 2 info
expect 0 "2 threads used" info --threads 2
expect 0 "PASSED" selftest --filter 'SoftmaxCheck*'
expect 2 "must match a test" selftest --filter 'Nope*'

row='softmax fwd 64x512 f32'
expect 0 "$row" bench ops --filter "$row" --seconds 0.01 --json "$folder/result.json"
for key in '"schema": 1' '"op": "softmax"' '"shape": "64x512"' '"floor_us"' '"peak_bytes"' '"peers"' \
  '"copy_gbps"' '"commit"' '"allocations": 0'; do
  grep -q "$key" "$folder/result.json" || {
    echo "result.json has no $key"
    failures=$((failures + 1))
  }
done
small="--layers 1 --width 16 --hidden 16 --vocab 32 --tokens 8 --seconds 0.01"
expect 0 "captured and replayed" bench step $small --json "$folder/step.json"
for key in '"host_percent"' '"nodes"' '"peak_bytes"'; do
  grep -q "$key" "$folder/step.json" || {
    echo "step.json has no $key"
    failures=$((failures + 1))
  }
done
expect 0 "in bf16" bench step $small --dtype bf16
expect 2 "--layers" bench step --layers 0
expect 2 "--dtype" bench step --dtype f64
expect 1 "must be writable" bench step $small --json "$folder/no/such/file"
few="--tokens 3 --experts 2 --seconds 0.001"
expect 0 "self_attention" bench layers $few --json "$folder/layers.json"
for key in fwd_us fwd_bwd_us weight_bytes peak_bytes; do
  grep -q "$key" "$folder/layers.json" || {
    echo "layers.json has no $key"
    failures=$((failures + 1))
  }
done
expect 0 "in bf16" bench layers $few --dtype bf16
expect 2 "--experts" bench layers --experts 0
expect 1 "must be writable" bench ops --filter "$row" --seconds 0.01 --json "$folder/no/such/file"
expect 2 "regular expression" bench ops --filter '(' --seconds 0.01
expect 2 "must match a row" bench ops --filter 'no such row'
expect 2 "0.001 to 60" bench ops --filter "$row" --seconds nan
expect 1 "must be readable" bench ops --filter "$row" --seconds 0.01 --peers /no/script
expect 1 "a line" bench ops --filter "$row" --seconds 0.01 --peers "$0" --python /no/python
if "$program" kernels >/dev/full 2>/dev/null; then
  echo "mlxtape kernels > /dev/full: exit 0, want 1"
  failures=$((failures + 1))
fi
exit $((failures > 0))
