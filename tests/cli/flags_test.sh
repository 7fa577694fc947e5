#!/bin/sh
# flags_test.sh <mlxtape> [device]: what flags take and refuse, words that nobody knows, weights that are no numbers, and texts
# longer than the model.
# shellcheck disable=SC2086,SC1091,SC2154  # flags that are several words; expect.sh
set -u
program=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
here=$(cd "$(dirname "$0")" && pwd)
. "$here/expect.sh"
cd "$folder" || exit 1
on="--device ${2:-cpu}"

# A model, quantised and not, and sums to learn.
make_models
printf '{"text": "12+3=15 7+8=15 "}\n{"text": "4+5=9 20+1=21"}\n' >two.jsonl

# ---- numbers ----

one="generate $on --model model -p 1 -m 2 --quiet"
# refused <flag> <value> <what it takes>
refused() {
  expect 2 "$1: must be $3, got '$2'" $one "$1" "$2"
}
least0="a number of at least 0"
for value in -1 inf -inf nan NaN 1e999 1e-999 1e 1e+ . +1 '1 ' '' warm 0x1 1.5.2; do refused --temp "$value" "$least0"; done
for value in 0 -0.5 2 1.0001 nan inf; do refused --top-p "$value" "a number above 0 and at most 1"; done
for value in -0.1 1.1 nan; do refused --min-p "$value" "a number from 0 to 1"; done
for value in -1 1.5 many ''; do refused --top-k "$value" "a whole number from 0 to 9223372036854775807"; done
for value in 0 -1 inf nan; do refused --repetition-penalty "$value" "a number above 0"; done
for value in -1 1.5; do refused --seed "$value" "a whole number from 0 to 18446744073709551615"; done
for value in 0 -5 1e2 9999999999; do
  expect 2 "--max-tokens: must be a whole number from 1 to 2147483648, got '$value'" generate $on --model model -p 1 -m "$value"
done
expect 2 "--context: must be a whole number from 1" inspect model --context 1e2
expect 2 "--sequence-length: must be a whole number from 2" eval $on --model model --data two.jsonl --sequence-length 1
expect 2 "--iters: must be a whole number from 1" train $on --model model --data two.jsonl --out no --iters 1e2
expect 0 "" $one --temp 0 --top-p 1 --min-p 0 --top-k 0 --repetition-penalty 1 --seed 18446744073709551615
expect 0 "" $one --temp .5 --top-p 1. --min-p 5E-1 --repetition-penalty 1.e+0
expect 0 "" $one --temp 1e-3 --top-p 0.01 --min-p 1 --top-k 1 --repetition-penalty 1.5
whole="must be a whole number from"
for command in "train $on --model model --data two.jsonl --out no" "lora $on --model model --train --data two.jsonl --adapter-path no" \
  "dwq $on --model model --data-path two.jsonl --mlx-path no"; do
  expect 2 "--learning-rate: must be a number above 0 and at most 3.40282e+38, got '1e2x'" $command --learning-rate 1e2x
  expect 2 "--seed: $whole 0 to 4294967295, got '-1'" $command --seed -1
  expect 2 "--max-seq-length: $whole 2 to 1073741824, got '1'" $command --max-seq-length 1
  expect 2 "--batch-size: $whole 1 to 1073741824, got '1.5'" $command --batch-size 1.5
done
tune="lora $on --model model --train --data two.jsonl --adapter-path no"
expect 2 "--val-batches: $whole -1 to 1073741824, got '-2'" $tune --val-batches -2
expect 2 "--dropout: must be a number from 0 to 0.999, got '1.5'" $tune --dropout 1.5
expect 2 "--rank: $whole 1 to 1048576, got '0'" $tune --rank 0
expect 2 "--num-layers: $whole -1 to 1048576, got '-2'" $tune --num-layers -2
expect 2 "--test-batches: $whole -1 to 1073741824, got 'x'" $tune --test-batches x
expect 2 "--target-bpw: must be a number above 0, got 'inf'" dynamic-quant $on --model model --data-path two.jsonl --target-bpw inf
for value in -1 nan inf; do expect 2 "--seconds: must be a number from 0 to 1e+06, got '$value'" demo $on --seconds $value; done
expect 2 "--cases: $whole 5 to 1048576, got '4'" demo $on --cases 4
expect 2 "--threads: $whole 0 to 1024, got '-1'" info --threads -1
expect 2 "--mlx-path: must be a directory, got an empty path" quantize --model model --mlx-path ""
expect 2 "--model: must be a directory, got an empty path" generate $on --model "" -p 1
expect 2 "--prompt-file: must be a file, got an empty path" $one --prompt-file ""
expect 2 "DIR: must be a directory, got an empty path" inspect ""
# A path that was forgotten, and the flag behind it.
expect 2 "--mlx-path: must be a directory, got the flag --q-bits; for a path of that name write ./--q-bits" \
  convert --model model --mlx-path --q-bits 4
expect 2 "--mlx-path: must be a directory, got the flag -q" convert --model model --mlx-path -q --q-bits 4
expect 2 "--prompt-file: must be a file, got the flag --quiet" generate $on --model model --prompt-file --quiet
expect 2 "samples, got 2; use --batch-size 2" train $on --model model --data two.jsonl --out no
printf 'model: "model"\ntrain: true\n' >lora.yaml
cp lora.yaml lora.yml
for file in lora.yaml lora.yml; do
  expect 1 "$file: YAML is not supported; write the same keys as JSON" lora $on -c $file
done

# ---- words of other programs ----

text=$("$program" generate $on --model model -p '12 + 3' -m 5 --temp 0.7 --seed 3 --quiet)
for flags in "-n 5 --temperature 0.7" "--max-new-tokens 5 --temp 0.7" "--n-predict 5 --temperature 0.7" "-m 9 -n 5 --temp 0.7"; do
  same "$text" "$("$program" generate $on --model model -p '12 + 3' $flags --seed 3 --quiet)" "generate $flags"
done
expect 2 "--temp: must be $least0, got 'hot'" $one --temperature hot
expect 0 "bits per weight" quantize --model model --mlx-path three --bits 3 --group-size 32
expect 0 "3 bits, groups of 32" inspect three
"$program" generate --help >help
grep -qE -- '--temperature|--n-predict| -n' help && complain "help shows hidden names"

# means <typed> <meant> <arguments...>
means() {
  typed=$1 meant=$2
  shift 2
  expect 2 ": $typed. $meant (see mlxtape" "$@"
}
means gnerate "Did you mean generate?" gnerate --model model
means quantise "Did you mean quantize?" quantise --model model
means run "Did you mean generate or chat?" run model
means finetune "Did you mean lora?" finetune
means serve "There is no server; generate and chat run a model." serve
means opps "Did you mean ops?" bench opps
means --tmep "Did you mean --temp?" $one --tmep 1
means -temp "Did you mean --temp?" $one -temp 1
means --top_p=0.9 "Did you mean --top-p?" $one --top_p=0.9
means --max-token "Did you mean --max-tokens?" $one --max-token 3
means --ctx-size "It is not needed: the cache grows with the text." $one --ctx-size 4096
means --n-gpu-layers "--device cuda runs the whole model on the GPU." $one --n-gpu-layers 99
means --output "Did you mean --mlx-path?" quantize --model model --output x
means --devcie "Did you mean --device?" $one --devcie cpu
expect 2 "unknown flag: --frobnicate (see mlxtape generate --help)" $one --frobnicate
# Before what is missing, which may be what was meant.
expect 2 "unknown flag: --badflag (see mlxtape generate --help)" generate --badflag
means --modle "Did you mean --model?" generate --modle model -p 1
means --mdoel "Did you mean --model?" quantize --mdoel model --mlx-path no
expect 2 "--model is required" generate -p 1

# ---- names with control characters ----

evil="evil$(printf '\033')[31m"
escape=$(printf '\033')
# tame <arguments...>: what it prints has the name, and gives the terminal nothing to obey
tame() {
  "$program" "$@" >out 2>err || complain "$*: $(cat err)"
  grep -qF 'evil\x1b[31m' out || complain "$*: no name in $(cat out)"
  grep -q "$escape" out err && complain "$*: control characters on stdout or stderr"
}
tame quantize --model model --mlx-path "$evil" --q-group-size 32
tame convert --model quantised --mlx-path "$evil" -d --force
tame new "$evil/new" --samples 40
tame train $on --model model --data two.jsonl --out "$evil/tuned" --iters 1 --batch-size 1 --val-batches 0
tame lora $on --model model --train --data two.jsonl --adapter-path "$evil/adapters" --iters 1 --batch-size 1 --val-batches 0
tame fuse --model model --adapter-path "$evil/adapters" --save-path "$evil/fused"
tame compare $on model "$evil" --data two.jsonl --sequence-length 16 --prompt-tokens 8 -m 2
# A token's name, in a file of the model's.
cp -r model ended
sed 's/"added_tokens": *\[\]/"added_tokens": [{"id": 256, "content": "evil\\u001b[31m", "special": true}]/' \
  model/tokenizer.json >ended/tokenizer.json
echo '{"eos_token": "evil\u001b[31m"}' >ended/tokenizer_config.json
tame inspect ended --tensors

# ---- a reader that leaves ----

{
  "$program" kernels 2>err
  echo $? >status
} | head -n 1 >out
same "$(cat status)" 0 "the exit code of kernels | head -n 1"
same "$(cat err)" "" "what kernels | head says"
# One that never reads: the pipe is closed when the program begins to write.
{
  sleep 1
  "$program" kernels 2>err
  echo $? >status
} | true
same "$(cat status)" 0 "kernels without a reader"
same "$(cat err)" "" "what kernels without a reader says"

# ---- weights that are NaN or infinite ----

# plant <model> <new model> <bytes of its last number>
plant() {
  cp -r "$1" "$2"
  size=$(wc -c <"$2/model.safetensors")
  printf %b "$3" | dd of="$2/model.safetensors" bs=1 seek=$((size - 4)) conv=notrunc 2>/dev/null
}
plant model nan '\0377\0377\0377\0177'
plant model infinite '\0000\0000\0200\0377'
for bad in nan infinite; do
  for command in "convert -d" "convert --dtype bfloat16" "quantize --q-group-size 32"; do
    expect 1 "$bad: the tensor " $command --model $bad --mlx-path no
    expect 1 " has 1 value that is NaN or infinite" $command --model $bad --mlx-path no
    [ ! -e no ] || complain "$command wrote a model with NaN"
  done
  expect 0 "warning: $bad: the tensor " quantize --model $bad --mlx-path $bad-q --q-group-size 32 --allow-nonfinite
  "$program" inspect $bad | grep -q '^warning  *the tensor .* has 1 value that is NaN' || complain "inspect $bad warns of nothing"
  expect 0 '"numbers": 1' inspect $bad --json
  expect 0 '"nonfinite": null' inspect $bad --json --headers-only
done
expect 0 '"nonfinite": {' inspect model --json
"$program" inspect model | grep -q warning && complain "inspect warns of a model that is well"
"$program" inspect nan --headers-only | grep -q warning && complain "inspect --headers-only reads weights"
# Every number of every tensor, and what a narrow type makes of a large one: 1e6.
LC_ALL=C awk 'BEGIN { for (i = 0; i < 64; i++) printf "%c%c%c%c", 255, 255, 255, 255 }' >ones
cp -r model many
size=$(wc -c <many/model.safetensors)
dd if=ones of=many/model.safetensors bs=1 seek=$((size - 256)) conv=notrunc 2>/dev/null
expect 1 "values that are NaN or infinite" quantize --model many --mlx-path no --q-group-size 32
plant model large '\0000\0044\0164\0111'
expect 0 "16.000 bits" convert --model large --mlx-path large16 --dtype bfloat16
expect 1 "large, converted to f16: the tensor " convert --model large --mlx-path no --dtype float16
expect 0 "warning: large, converted to f16" convert --model large --mlx-path large-inf --dtype float16 --allow-nonfinite

awk 'BEGIN { for (i = 0; i < 16; i++) printf "{\"text\": \"%d+%d=%d\"}\n", i, i + 1, 2 * i + 1 }' >sums.jsonl
on_sums="--data-path sums.jsonl --batch-size 1 --mlx-path no"
expect 1 "nan: the tensor " dynamic-quant $on --model nan $on_sums --sequence-length 4
expect 1 "nan: the tensor " dwq $on --model nan $on_sums --bits 2 --group-size 32
expect 1 "nan: the tensor " dwq $on --model nan $on_sums --target-dir targets --targets-only
expect 1 "nan: the tensor " dwq $on --model model --quantized-model nan $on_sums
expect 0 "from step" lora $on --model model --train --data two.jsonl --batch-size 1 --iters 1 --lora-rank 2 --quiet
grep -q '"rank": 2' adapters/adapter_config.json || complain "lora --lora-rank: $(cat adapters/adapter_config.json)"
expect 1 "nan with its adapters: the tensor " fuse --model nan --adapter-path adapters --save-path no
expect 0 "modules fused" fuse --model model --adapter-path adapters --save-path fused
cp -r adapters broken
size=$(wc -c <broken/adapters.safetensors)
printf '\377\377\377\177' | dd of=broken/adapters.safetensors bs=1 seek=$((size - 4)) conv=notrunc 2>/dev/null
expect 1 "lora_" fuse --model model --adapter-path broken --save-path no
[ ! -e no ] || complain "a command that failed left its output"

# ---- texts longer than the model ----

cp -r model short
change 's/"max_position_embeddings": [0-9]*/"max_position_embeddings": 8/' short/config.json
grep -q '"max_position_embeddings": 8' short/config.json || complain "no positions in config.json"
warns="is longer than the model's maximum context length of 8 tokens"
# warned <times> <text> <arguments...>
warned() {
  times=$1 text=$2
  shift 2
  "$program" "$@" >out 2>err || complain "$*: exit $?: $(cat err)"
  same "$(grep -c "$warns" err)" "$times" "warnings of $*"
  [ "$times" = 0 ] || grep -q "warning: $text $warns" err || complain "$*: no '$text' in $(cat err)"
}
warned 0 "" generate $on --model short -p 1234 -m 3
warned 1 "a text of 12 tokens" generate $on --model short -p 123456789012 -m 3
warned 1 "a text of 9 tokens" generate $on --model short -p 1234 -m 20
warned 1 "a text of 12 tokens" generate $on --model short -p 123456789012 -p 1 -m 3 --json
warned 0 "" generate $on --model short -p 123456789012 -m 3 --quiet
# The warning stands by itself, not in the middle of the text.
"$program" generate $on --model short -p 1234 -m 20 >both 2>&1
grep -q "^mlxtape: warning: a text of 9 tokens" both || complain "generate warns in the middle: $(cat both)"
warned 1 "a row of 16 tokens" eval $on --model short --data two.jsonl --sequence-length 16
echo '{% for m in messages %}{{ m.content }}{% endfor %}' >short/chat_template.jinja
printf '1\n2\n3\n' | "$program" chat $on --model short -m 9 --max-context 100 >out 2>err || complain "chat: $(cat err)"
same "$(grep -c "$warns" err)" 1 "warnings of chat"

# While a prompt is read: nothing but on a terminal.
awk 'BEGIN { for (i = 0; i < 20000; i++) printf "%d", i % 10 }' >long.txt
"$program" generate $on --model model --prompt-file long.txt -m 1 --verbose false >out 2>err || complain "a long prompt: $(cat err)"
grep -q "processing" err && complain "progress where there is no terminal: $(cat err)"
# Work that is soon done shows none, so the prompt grows until this machine needs long enough.
# on_terminal <file> <command>: what it prints on one; script of Linux and that of macOS and the BSDs take other arguments
on_terminal() {
  if script --version >/dev/null 2>&1; then
    TERM=xterm script -qec "$2" "$1" >/dev/null </dev/null
  else
    TERM=xterm script -q "$1" sh -c "$2" >/dev/null </dev/null
  fi
}
if command -v script >/dev/null 2>&1; then
  for count in 20000 80000 320000; do
    awk -v n=$count 'BEGIN { for (i = 0; i < n; i++) printf "%d", i % 10 }' >long.txt
    on_terminal typed "'$program' generate $on --threads 1 --model model --prompt-file long.txt -m 1"
    grep -q "processing the prompt  [0-9]*/$count " typed && break
  done
  grep -q "processing the prompt  [0-9]*/$count " typed || complain "no progress of a long prompt: $(head -c 2000 typed)"
fi

# ---- an input without an end ----

# endless <text> <arguments...>: /dev/zero on stdin
endless() {
  text=$1
  shift
  "$program" "$@" </dev/zero >out 2>err
  same $? 1 "$* </dev/zero"
  same "$(wc -l <err)" 1 "lines of the error of $* </dev/zero"
  grep -q "^mlxtape: $text" err || complain "$* </dev/zero: $(head -c 300 err)"
}
endless "stdin: a line must have at most 67108864 bytes, got more" chat $on --model short -m 1 --quiet
endless "--prompt -: stdin must have at most 536870912 bytes, got more" generate $on --model model -p - -m 1 --quiet
same "$(printf '12+3' | "$program" generate $on --model model -p - -m 3 --quiet)" \
  "$("$program" generate $on --model model -p 12+3 -m 3 --quiet)" "a prompt from stdin"

# ---- new ----

expect 0 "mlxtape train --config 'a b/config.json' --from-scratch --data 'a b/data'" new "a b" --samples 40
same "$(wc -l <"a b/data/train.jsonl")" 40 "samples of new"
sort -u "a b/data/train.jsonl" >trained
sort -u "a b/data/valid.jsonl" "a b/data/test.jsonl" >held
same "$(comm -12 trained held | wc -l)" 0 "samples that are held out and trained on"
cmp -s "a b/data/valid.jsonl" "a b/data/test.jsonl" && complain "new: valid and test are the same"
expect 0 "a b/model: 1.98 M parameters" train $on --config 'a b/config.json' --from-scratch --data 'a b/data' --out 'a b/model' \
  --mask-prompt --iters 2 --batch-size 4 --val-batches 1
expect 0 "finish" generate $on --model 'a b/model' -p 'plus 17+25>' -m 3 --json
expect 0 '"train": "mlxtape train' new again --samples 40 --json
for file in config.json tokenizer.json data/train.jsonl data/test.jsonl; do
  cmp -s "a b/$file" "again/$file" || complain "new writes another $file the second time"
done
expect 0 "Next:" new other --samples 40 --seed 1
cmp -s again/data/train.jsonl other/data/train.jsonl && complain "new: two seeds give the same samples"
expect 1 "again: already exists" new again
expect 1 "lora.yaml: already exists" new lora.yaml
expect 1 "cannot write to this folder" new lora.yaml/inside
expect 2 "DIR is required" new
mkdir empty
(ulimit -f 2 && "$program" new empty) >out 2>&1
same $? 1 "new on a full disk"
same "$(ls empty)" "" "what new left on a full disk"
expect 0 "Next:" new empty --samples 40

# ---- settings of devices ----

for variable in OPS MB SERIAL RESIDENCY; do
  for value in many 1e '' -1 nan; do
    export "MLXTAPE_METAL_$variable=$value"
    expect 2 "MLXTAPE_METAL_$variable must be a number of 0 or more, got $value" info
    unset "MLXTAPE_METAL_$variable"
  done
done
export MLXTAPE_METAL_OPS=80
expect 0 "cpu: " info
unset MLXTAPE_METAL_OPS
expect 0 "metal: " info

exit $((failures > 0))
