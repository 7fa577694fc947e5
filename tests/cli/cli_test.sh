#!/bin/sh
# cli_test.sh <mlxtape> [device]: the program as a user meets it: commands, exit codes, files.
# shellcheck disable=SC2086,SC1091,SC2154  # flags that are several words; expect.sh
set -u
program=$1
here=$(cd "$(dirname "$0")" && pwd)
. "$here/expect.sh"

expect 0 "cpu: " info
expect 0 "cpu softmax softmax_fwd f16 bf16 f32" kernels
expect 0 "bench" --help
expect 0 "--json" bench ops --help
expect 0 "." --version
expect 2 "a command is required"
expect 2 "unknown command: frobnicate" frobnicate
expect 2 "unknown flag: --frobnicate" --frobnicate
expect 2 "unknown command: frobnicate" --threads 2 frobnicate
expect 2 "unknown command: frobnicate" bench frobnicate
expect 2 "--threads" --threads 5000 info
expect 2 "--threads" --threads many info
expect 2 "one of" --cpu-target AVX9 info
expect 0 "threads           2" --threads 2 info
expect 0 "threads           2" info --threads 2
expect 0 "PASSED" selftest --filter 'SoftmaxCheck*'
expect 2 "must match a test" selftest --filter 'Nope*'
# The tests are a program of their own; without it the rest works, and selftest says what is missing.
beside=$program program=$folder/alone
cp "$beside" "$program"
expect 1 "mlxtape-selftest does not exist" selftest
expect 0 "cpu: " info
program=$beside

# demo: all of it, too short to learn
expect 0 "report.html" demo --iters 3 --cases 5 --out "$folder/demo" --quiet
for file in demo.json report.html full/config.json 4bit/model.safetensors 2bit/tokenizer.json 2bit-dwq/model.safetensors; do
  [ -s "$folder/demo/$file" ] || complain "demo wrote no $file"
done
expect 0 '"kl_removed"' demo --iters 2 --cases 5 --seconds 100 --out "$folder/demo" --quiet --json
expect 0 "finish" generate --model "$folder/demo/4bit" --prompt 'plus 1+2>' --max-tokens 3 --json
mkdir "$folder/taken" && touch "$folder/taken/mine"
expect 1 "already exists and was not written by demo" demo --iters 2 --out "$folder/taken"
expect 2 "--iters" demo --iters 0 --out "$folder/none"
[ "$(ls "$folder/taken")" = mine ] && [ ! -e "$folder/none" ] || complain "demo wrote where it must not"

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
expect 0 "decode, 1 after" bench --filter "$row" --model "$here/../parity/golden/qwen3_5" --seconds 0.001 --out "$folder/results"
for file in ops model model-4bit; do
  [ -s "$folder/results/$file.json" ] || complain "bench --out wrote no $file.json"
done
expect 0 "$row" bench ops --filter "$row" --seconds 0.01 --json "$folder/results/ops.json"
for line in mine '{"mine": 1}' '[1]' '{"rows": 1}'; do
  echo "$line" >"$folder/results/model-4bit.json"
  expect 1 "results/model-4bit.json: already exists and holds no results of a benchmark" \
    bench --filter "$row" --seconds 0.001 --out "$folder/results"
  expect 1 "results/model-4bit.json: already exists and holds no results of a benchmark" \
    bench ops --filter "$row" --seconds 0.001 --json "$folder/results/model-4bit.json"
  same "$(cat "$folder/results/model-4bit.json")" "$line" "a file that no benchmark wrote"
done
expect 1 "results/ops.json" bench --filter "$row" --seconds 0.001 --out "$folder/results/ops.json"
expect 2 "must match a row" bench --filter 'no such row'
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

# ---- errors and exit codes ----

"$program" kernels >&- 2>"$folder/err" && complain "kernels >&-: exit 0, want 1"
same "$(cat "$folder/err")" "mlxtape: cannot write to stdout" "kernels >&-"
"$program" kernels 2>"$folder/err" | head -n 1 >/dev/null
same "$(cat "$folder/err")" "" "what kernels | head says"
for command in '' generate chat train lora fuse convert quantize dwq dynamic-quant eval perplexity compare inspect info kernels 'bench ops' selftest completion man; do
  "$program" $command --help >"$folder/help" || complain "$command --help: exit $?"
  grep -q '^Usage: mlxtape' "$folder/help" || complain "$command --help has no usage"
  [ -z "$command" ] || grep -q '^Example' "$folder/help" || complain "$command --help has no example"
  awk 'length > 100 { exit 1 }' "$folder/help" || complain "$command --help has lines of over 100 characters"
done
expect 0 "130  interrupted" --help
expect 2 "(see mlxtape bench ops --help)" bench ops --nope
if "$program" --device cuda generate --model nowhere -p 1 2>/dev/null; then complain "no such model: exit 0"; fi

# ---- a tiny model: its vocabulary is the bytes below 64: digits, spaces, < > ----

model=$folder/model
cp -r "$here/../parity/golden/qwen3_next_q4" "$model" && chmod -R u+w "$model"
cp "$here/../../examples/bytes/tokenizer.json" "$model"
on="--device ${2:-cpu}"

expect 0 '"version"' info --json
expect 0 '"instruction sets"' info --json
expect 0 '"op": "softmax"' kernels --json

expect 0 "qwen3_next, f32" inspect "$model"
expect 0 "44.0 K, 31.7 K active per token" inspect "$model"
expect 0 "bits per weight  6.892" inspect "$model"
expect 0 "8 bits, groups of 32" inspect "$model"
expect 0 '"bits_per_weight": 6.89' inspect "$model" --json
expect 0 '"state_bytes": 2816' inspect "$model" --json --context 8
expect 0 "model.layers.1.self_attn.q_proj.scales" inspect "$model" --tensors
expect 1 "no such directory" inspect "$folder/nowhere"
expect 1 "has no config.json" inspect "$folder"
expect 1 "got another file" inspect "$0"
expect 2 "DIR is required" inspect
expect 2 "--context" inspect "$model" --context 0

text=$("$program" generate $on --model "$model" -p '12 + 3' -m 12 --quiet)
[ "${#text}" -gt 8 ] || complain "generate: '$text' is short"
same "$text" "$(printf '12 + 3' | "$program" generate $on --model "$model" -p - -m 12 --quiet)" "generate -p -"
printf '12 + 3' >"$folder/prompt"
same "$text" "$("$program" generate $on --model "$model" --prompt-file "$folder/prompt" -m 12 --verbose false)" \
  "generate --prompt-file"
same "$text" "$("$program" generate --threads 1 $on --model "$model" -p '12 + 3' -m 12 2>/dev/null)" "generate on one thread"
expect 0 "tokens/s" generate $on --model "$model" -p '12 + 3' -m 12
expect 0 "peak memory" generate $on --model "$model" -p '12 + 3' -m 12
expect 0 '"finish": "length"' generate $on --model "$model" -p '12 + 3' -m 12 --json
expect 0 '==> 45' generate $on --model "$model" -p '12 + 3' -p 45 -m 12
expect 0 "$text" generate $on --model "$model" -p '12 + 3' -p 45 -m 12
expect 0 '"finish": "stop string"' generate $on --model "$model" -p '12 + 3' -m 12 --stop '$' --json
expect 0 '"finish": "stop"' generate $on --model "$model" -p '12 + 3' -m 12 --extra-eos-token '$' --json
one=$("$program" generate $on --model "$model" -p 12 --temp 1 --top-p 0.9 --seed 7 --quiet)
same "$one" "$("$program" generate $on --model "$model" -p 12 --temp 1 --top-p 0.9 --seed 7 --quiet)" "the same seed"
[ "$one" != "$("$program" generate $on --model "$model" -p 12 --temp 1 --top-p 0.9 --seed 8 --quiet)" ] ||
  complain "two seeds give the same text"
expect 0 "$(printf '%040d' 0 | tr 0 5)" generate $on --model "$model" -p 12 -m 40 --logit-bias 53=1000
expect 0 '"logprobs": [' generate $on --model "$model" -p 12 -m 2 --json --logprobs
expect 0 '"top": [' generate $on --model "$model" -p 12 -m 2 --json --logprobs 3
lines=$("$program" generate $on --model "$model" -p 12 -m 1 --json --logprobs 3 | grep -c '"logprob":')
same "$lines" 4 "log-probabilities of one token and of three at its position"
expect 2 "--logprobs needs --json" generate $on --model "$model" -p 1 --logprobs
expect 2 "from 0 to 20, got '21'" generate $on --model "$model" -p 1 --json --logprobs 21
expect 2 "got '5'" generate $on --model "$model" -p 1 --logit-bias 5
expect 2 "got '5=nan'" generate $on --model "$model" -p 1 --logit-bias 5=nan
expect 2 "token 5 is given twice" generate $on --model "$model" -p 1 --logit-bias 5=1 --logit-bias 5=2
expect 2 "got 99999" generate $on --model "$model" -p 1 --logit-bias 99999=1
expect 2 "a prompt is required" generate $on --model "$model"
expect 2 "--model is required" generate $on -p 1
expect 2 "--max-tokens" generate $on --model "$model" -p 1 -m 0
expect 2 "--stop must not be empty" generate $on --model "$model" -p 1 --stop ''
expect 2 "must be a JSON object" generate $on --model "$model" -p 1 --chat-template-config '[1]'
expect 2 "has no token 'nope'" generate $on --model "$model" -p 1 --extra-eos-token nope
expect 2 "need a chat template" generate $on --model "$model" -p 1 --system-prompt 2
expect 1 "tokens must be in the vocabulary of" generate $on --model "$model" -p a
expect 1 "must be readable" generate $on --model "$model" --prompt-file "$folder/nowhere"
expect 1 "must be a file, got a device" generate $on --model "$model" --prompt-file /dev/zero
mkfifo "$folder/fifo"
expect 1 "must be a file, got a pipe" generate $on --model "$model" --prompt-file "$folder/fifo"
printf 'GGUF' >"$folder/a.gguf"
expect 1 "the version must lie in the file" generate $on --model "$folder/a.gguf" -p 1
# What a model says is its own fault, whoever asks; and a terminal is given none of its control characters.
cp -r "$model" "$folder/evil"
printf '{{ raise_exception("\033[31mno\007") }}' >"$folder/evil/chat_template.jinja"
expect 1 'line 1: \x1b[31mno\x07' generate $on --model "$folder/evil" -p 1
printf '{{ 1 // 0 }}' >"$folder/evil/chat_template.jinja"
expect 1 "division by zero" generate $on --model "$folder/evil" -p 1
sed 's/"rms_norm_eps": [^,]*/"rms_norm_eps": 1e300/' "$model/config.json" >"$folder/evil/config.json"
expect 1 '"rms_norm_eps" must be a number above 0 that a float can hold' inspect "$folder/evil"
printf '{"model_type":"\\u001b[31mEVIL\\u0007"}' >"$folder/evil/config.json"
expect 1 'type "\x1b[31mEVIL\x07"' inspect "$folder/evil"
printf '\357\273\277{}' >"$folder/evil/config.json"
expect 1 "byte order mark" inspect "$folder/evil"
rm "$folder/evil/config.json"
mkfifo "$folder/evil/config.json"
expect 1 "must be a file, got a pipe" inspect "$folder/evil"
expect 1 'no such directory' inspect "$folder/$(printf '\033[2J')"
case $output in *"$(printf '\033')"*) complain "a path gives a terminal control characters: $output" ;; esac
expect 1 "models are not downloaded" generate $on --model mlx-community/nothing -p 1
"$program" generate $on --model "$model" -p 1 >/dev/full 2>/dev/null && complain "generate >/dev/full: exit 0, want 1"
"$program" generate $on --model "$model" -p 1 >&- 2>/dev/null && complain "generate >&-: exit 0, want 1"
"$program" generate $on --model "$model" -p 1 -m 1000000 2>"$folder/err" | head -c 100 >/dev/null  # ends

# Ctrl-C: what was made is there, and the code says so.
"$program" generate $on --model "$model" -p 1 -m 1000000 >"$folder/cut" 2>"$folder/err" &
job=$!
tries=0
while [ ! -s "$folder/cut" ] && [ $tries -lt 300 ]; do
  sleep 0.1
  tries=$((tries + 1))
done
kill -INT $job
wait $job
same $? 130 "generate, interrupted"
[ -s "$folder/cut" ] || complain "generate, interrupted: nothing was written"
for text in 'mlxtape: stopping; press Ctrl-C again to quit at once' 'generation: '; do
  grep -q "$text" "$folder/err" || complain "generate, interrupted: no '$text' in $(cat "$folder/err")"
done

# ---- chat ----

expect 1 "has no chat template" chat $on --model "$model" </dev/null
cat >"$model/chat_template.jinja" <<'END'
{% for m in messages %}{{ '<1>' if m.role == 'user' else '<2>' if m.role == 'assistant' else '<3>' }}{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<2>{% endif %}
END
printf '12\n/help\n34\n/reset\n/nope\n\n12\n' |
  "$program" chat $on --model "$model" -m 8 --json >"$folder/chat" 2>"$folder/err" || complain "chat: exit $?"
same "$(wc -l <"$folder/chat")" 3 "answers of chat"
same "$(sed -n 1p "$folder/chat")" "$(sed -n 3p "$folder/chat")" "chat after /reset"
sed -n 2p "$folder/chat" | grep -q '"prompt_tokens_kept": 1[0-9]' || complain "chat remembers nothing: $(cat "$folder/chat")"
for said in '/exit' 'new chat' 'unknown command: /nope' ' cached)'; do
  grep -q -- "$said" "$folder/err" || complain "chat says nothing of $said"
done
printf '12\n/exit\n34\n' | "$program" chat $on --model "$model" -m 8 --quiet >"$folder/chat" 2>"$folder/err"
same "$(cat "$folder/err")" "" "chat --quiet"
# The first answer is generate's own.
"$program" generate $on --model "$model" -p 12 -m 8 --quiet >"$folder/text"
cmp -s "$folder/text" "$folder/chat" || complain "chat and generate answer differently"
expect 0 "prompt:      11 tokens" generate $on --model "$model" -p 12 --system-prompt '' --prefill-response '45' -m 4
expect 0 "prompt:      15 tokens" generate $on --model "$model" -p 12 --system-prompt 34 -m 4
expect 0 "prompt:      2 tokens" generate $on --model "$model" -p 12 --ignore-chat-template -m 4
printf '12\n' | "$program" chat $on --model "$model" -m 8 --max-context 5 >/dev/null 2>"$folder/err"
grep -q 'must have 1 to 4 tokens' "$folder/err" || complain "chat --max-context: $(cat "$folder/err")"

# A template that writes nothing, or another answer than the one that was begun: the model's fault.
cp -r "$model" "$folder/silent" && printf '{%% if false %%}x{%% endif %%}' >"$folder/silent/chat_template.jinja"
expect 1 "silent: the chat template renders to an empty prompt" generate $on --model "$folder/silent" -p 1
printf '12\n' | "$program" chat $on --model "$folder/silent" >/dev/null 2>"$folder/err"
same $? 1 "chat with a template that writes nothing"
grep -q "the model's chat template renders to an empty prompt" "$folder/err" || complain "chat, nothing written: $(cat "$folder/err")"
printf '{%% for m in messages %%}{{ m.content|upper }}{%% endfor %%}' >"$folder/silent/chat_template.jinja"
expect 1 "chat template changes the beginning of an answer" generate $on --model "$folder/silent" -p 1 --prefill-response ab
expect 2 "chat template changes the beginning of an answer" generate $on --model "$folder/silent" -p 1 --prefill-response ' '
cp -r "$model" "$folder/untold" && echo '{% for %}' >"$folder/untold/chat_template.jinja"
expect 1 "chat_template.jinja: line 1: " chat $on --model "$folder/untold" </dev/null

# ---- convert, quantize ----

expect 0 "32.000 bits per weight" convert --model "$model" --mlx-path "$folder/wide" -d
expect 1 "wide: already exists; use --force to overwrite, or another --mlx-path" convert --model "$model" --mlx-path "$folder/wide" -d
expect 0 "bits per weight" convert --model "$model" --mlx-path "$folder/wide" -d --force
expect 0 "with a chat template" inspect "$folder/wide"
expect 0 "16.000 bits per weight" convert --model "$folder/wide" --mlx-path "$folder/half" --dtype bfloat16
expect 0 "qwen3_next, bf16" inspect "$folder/half"
expect 0 "bits per weight" quantize --hf-path "$folder/half" --mlx-path "$folder/q" --quant-predicate mixed_3_6 --q-group-size 32
expect 0 "3 bits, groups of 32" inspect "$folder/q"
expect 0 "6 bits, groups of 32" inspect "$folder/q"
expect 0 "tokens/s" generate $on --model "$folder/q" -p 12 -m 4
expect 0 '"bits_per_weight"' quantize --model "$folder/half" --mlx-path "$folder/q2" --q-bits 2 --q-group-size 32 \
  --q-module '*.down_proj=8:32' --q-module 'lm_head=0' --json
expect 0 "8 bits, groups of 32" inspect "$folder/q2"
expect 2 "must not be --model" convert --model "$folder/q2" --mlx-path "$folder/q2" -d --force
expect 0 "modules are not quantised" quantize --model "$folder/wide" --mlx-path "$folder/q3" --q-group-size 32
expect 0 "bits per weight" quantize --model "$folder/q3" --mlx-path "$folder/q4" --q-module '*gate=8:32'
expect 2 "are already quantised" quantize --model "$folder/q4" --mlx-path "$folder/no"
expect 2 "no module matches" quantize --model "$folder/wide" --mlx-path "$folder/no" --q-module 'no.such=4'
expect 2 "must be PATTERN=BITS" quantize --model "$folder/wide" --mlx-path "$folder/no" --q-module '*=many'
expect 2 "no multiple of the group size 128" quantize --model "$folder/wide" --mlx-path "$folder/no" --q-module '*=4:128'
expect 2 "no weight can be quantised" quantize --model "$folder/wide" --mlx-path "$folder/no"
expect 2 "not both" convert --model "$folder/wide" --mlx-path "$folder/no" -q -d
expect 2 "need --quantize" convert --model "$folder/wide" --mlx-path "$folder/no" --q-bits 4
expect 2 "sets the bits itself" convert --model "$folder/wide" --mlx-path "$folder/no" -q --q-bits 4 --quant-predicate mixed_3_6
expect 2 "--q-bits" convert --model "$folder/wide" --mlx-path "$folder/no" -q --q-bits 7
expect 1 "no such directory" convert --model "$folder/nowhere" --mlx-path "$folder/no"
expect 1 "must be a writable directory" convert --model "$folder/wide" --mlx-path "$0/x"
[ ! -e "$folder/no" ] || complain "a conversion that failed left $folder/no"
same "$(find "$folder" -name '*.tmp*' -o -name '*.old' | wc -l)" 0 "folders left behind"

# ---- broken files ----

cp -r "$model" "$folder/broken"
head -c 3000 "$model/model.safetensors" >"$folder/broken/model.safetensors"
for command in "inspect" "generate $on -p 1 --model" "chat $on --model" "convert --mlx-path $folder/no --model"; do
  expect 1 "$folder/broken/model.safetensors: " $command "$folder/broken" </dev/null
  same "$("$program" $command "$folder/broken" 2>&1 >/dev/null </dev/null | wc -l)" 1 "lines of the error of $command"
done
cp "$model/model.safetensors" "$folder/broken"
echo '{"model_type": "gpt_oss"}' >"$folder/broken/config.json"
expect 1 'models of type "gpt_oss" are not supported' inspect "$folder/broken"
echo '{' >"$folder/broken/config.json"
expect 1 "config.json" inspect "$folder/broken"
cp "$model/config.json" "$folder/broken"
echo 'no tokenizer' >"$folder/broken/tokenizer.json"
expect 1 "tokenizer.json" generate $on --model "$folder/broken" -p 1
rm "$folder/broken/tokenizer.json"
expect 1 "tokenizer.json" generate $on --model "$folder/broken" -p 1
expect 0 "tokenizer        none" inspect "$folder/broken"

# ---- completion, man ----

expect 2 "bash" completion csh
for shell in bash zsh fish; do
  "$program" completion $shell >"$folder/$shell" || complain "completion $shell: exit $?"
  grep -q -- quant-predicate "$folder/$shell" || complain "completion $shell knows no --quant-predicate"
  if command -v $shell >/dev/null 2>&1; then
    $shell -n "$folder/$shell" || complain "completion $shell is no $shell"
  fi
done
if command -v bash >/dev/null 2>&1; then
  # completes <word> <words before it, and its beginning>
  completes() {
    # shellcheck disable=SC2016  # expanded by the inner shell
    got=$(bash -c 'source "$0"; COMP_WORDS=("${@:2}"); COMP_CWORD=$(($# - 2)); _mlxtape; echo " ${COMPREPLY[*]} "' \
      "$folder/bash" "$@")
    case $got in
      *" $1 "*) ;;
      *) complain "bash completes $*: $got" ;;
    esac
  }
  completes generate mlxtape gen
  completes --temp mlxtape generate --te
  completes cpu mlxtape generate --device c
  completes layers mlxtape bench l
  completes mixed_3_6 mlxtape quantize --quant-predicate mixed
  completes fish mlxtape completion f
fi
"$program" man >"$folder/mlxtape.1" || complain "man: exit $?"
for text in '.TH MLXTAPE 1' '.SH NAME' 'quant\\-predicate' '.SS mlxtape bench ops' '130  interrupted'; do
  grep -qF -- "$(printf '%b' "$text")" "$folder/mlxtape.1" || complain "man has no $text"
done
if command -v groff >/dev/null 2>&1; then
  same "$(groff -man -ww -z -Tutf8 "$folder/mlxtape.1" 2>&1)" "" "groff of the man page"
fi
exit $((failures > 0))
