#!/bin/sh
# outputs_test.sh <mlxtape> [device]: what the commands write, and what they must never destroy: a user's own files, their
# inputs, files behind links, states that are damaged; and signals that come meanwhile.
# shellcheck disable=SC2086,SC1091,SC2154  # flags that are several words; expect.sh
set -u
program=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
here=$(cd "$(dirname "$0")" && pwd)
. "$here/expect.sh"
cd "$folder" || exit 1
on="--device ${2:-cpu}"
. "$here/tiny_model.sh"

# contents <path...>: every name there and a sum of each file.
contents() {
  find "$@" | sort
  find "$@" -type f -exec cksum {} + | sort
}

# refuses <exit code> <text> <arguments...>: one line with this text, and everything stays as it is.
refuses() {
  code=$1 text=$2
  shift 2
  before=$(contents . | grep -v ' ./stdout$')
  expect "$code" "$text" "$@"
  same "$(printf '%s\n' "$output" | wc -l)" 1 "lines of the error of $*"
  same "$before" "$(contents . | grep -v ' ./stdout$')" "files before and after $*"
}

steps="--iters 3 --batch-size 8 --steps-per-eval 100 --save-every 1 --val-batches 0 --learning-rate 1e-3"
scratch="train $on --config quantised/config.json --from-scratch --data data $steps --out"
tuned="train $on --model quantised --data data $steps --out"
tune="lora $on --model quantised --train --data data $steps --rank 2 --lora-keys q_proj --adapter-path"
teach="dwq $on --model model --bits 2 --group-size 32 --data-path data --batch-size 8 --mlx-path"
pack="dynamic-quant $on --model model --low-bits 2 --low-group-size 32 --high-bits 6 --high-group-size 32 --target-bpw 7"
expect 0 "from step" $tune adapters
fuse="fuse --model quantised --adapter-path adapters --save-path"
expect 0 "bits per weight" $pack --data-path data --sequence-length 16 --mlx-path dynamic
expect 0 "bits per weight" quantize --model model --mlx-path two --q-bits 2 --q-group-size 32
pack="$pack --sensitivities model_sensitivities.json --mlx-path"
pack4="quantize --model model --q-group-size 32 --mlx-path"

# ---- --force replaces models, and nothing of a user's ----

mkdir -p webapp/.git && echo '{"port": 80}' >webapp/config.json
echo x >webapp/server.js && echo x >webapp/.git/HEAD
cp -r two noted && echo mine >noted/notes.txt
cp -r two scripted && echo mine >scripted/train.py
cp -r two nested && cp -r adapters nested
cp -r two linked && mv linked/tokenizer.json elsewhere.json && ln -s ../elsewhere.json linked/tokenizer.json
mkdir configured && echo '{"port": 80}' >configured/config.json
for command in "$pack4" "convert --model quantised -d --mlx-path" "$scratch" "$tuned" "$fuse" "$teach" "$pack"; do
  refuses 1 "webapp: already exists and contains .git, which is not part of a model, so --force does not overwrite it" \
    $command webapp --force
  refuses 1 "noted: already exists and contains notes.txt, which is not part of a model" $command noted --force
done
refuses 1 "scripted: already exists and contains train.py" $pack4 scripted --force
refuses 1 "nested: already exists and contains adapters" $pack4 nested --force
refuses 1 "linked: already exists and contains tokenizer.json" $pack4 linked --force
refuses 1 "configured: already exists and contains config.json, which is not a model's" $pack4 configured --force
refuses 1 "webapp: already exists and contains .git" $pack4 webapp
refuses 1 "two: already exists; use --force to overwrite, or another --mlx-path" $pack4 two
# What only looks like a model: without weights, with code or notes of a user's own.
mkdir coded handmade && cp two/config.json coded && echo "import torch" >coded/modeling_foo.py && echo "{{ x }}" >coded/prompt.jinja
cp two/config.json two/tokenizer.json handmade
cp -r two studied && echo mine >studied/modeling_foo.py
cp -r two worded && echo mine >worded/tokenizer_notes.json
cp -r two described && printf -- '---\nlibrary_name: mlx\n---\n# me/mine\nusing mlx-lm version **0.28.0**.\n\nMy notes.\n' >described/README.md
for command in "$pack4" "convert --model quantised -d --mlx-path" "$scratch" "$fuse" "$teach" "$pack"; do
  refuses 1 "coded: already exists and contains modeling_foo.py, which is not part of a model" $command coded --force
  refuses 1 "handmade: already exists and has no weights of a model" $command handmade --force
  refuses 1 "studied: already exists and contains modeling_foo.py" $command studied --force
  refuses 1 "described: already exists and contains README.md" $command described --force
  refuses 1 "worded: already exists and contains tokenizer_notes.json, which is not part of a model" $command worded --force
done
# Code that came along from the source, and comes again.
cp -r model own-code && echo "import torch" >own-code/modeling_foo.py
expect 0 "bits per weight" quantize --model own-code --q-group-size 32 --mlx-path with-code
expect 0 "bits per weight" quantize --model own-code --q-group-size 32 --mlx-path with-code --force
same_files own-code/modeling_foo.py with-code/modeling_foo.py "code that comes along"
refuses 1 "with-code: already exists and contains modeling_foo.py" $pack4 with-code --force
rm noted/notes.txt
for command in "$pack4" "convert --model quantised -d --mlx-path" "$scratch" "$fuse" "$teach" "$pack"; do
  cp model/generation_config.json noted 2>/dev/null || echo '{}' >noted/generation_config.json
  expect 0 "noted" $command noted --force
done
same "$(ls -d noted*)" noted "folders beside one that was replaced"

# What a process that was killed had put aside is removed but for what is not a model's, once there is a new model. A folder
# whose name alone is like that stays, and a command that is refused removes nothing.
cp -r two swept.tmp123.0 && cp -r webapp swept.tmp123.1 && cp -r two vict.tmp999999.2024
echo "mlxtape makes a model here" | tee swept.tmp123.0.lock >swept.tmp123.1.lock
for name in swept vict; do
  refuses 2 "--q-bits" $pack4 $name --q-bits 7
  refuses 1 "must contain" $tuned $name --data swept.tmp123.0
done
before=$(contents vict.tmp999999.2024)
expect 0 "bits per weight" $pack4 swept
expect 0 "bits per weight" $pack4 vict
same "$before" "$(contents vict.tmp999999.2024)" "a model of a user's own beside one that was made"
[ ! -e swept.tmp123.0 ] || complain "a folder of a killed process is left"
[ -e swept.tmp123.1/server.js ] && [ -e swept.tmp123.1/.git/HEAD ] || complain "a user's files are gone"
rm -r swept.tmp123.1 vict.tmp999999.2024

# A demo replaces demos alone.
mkdir -p own/full other && echo '{"mine": 1}' >other/demo.json
echo '{}' >own/demo.json && cp two/config.json own/full && echo x >own/full/notes.txt
refuses 1 "own/full: contains notes.txt, which is not part of a model" demo $on --iters 2 --cases 5 --out own
refuses 1 "other: already exists and was not written by demo" demo $on --iters 2 --cases 5 --out other

# ---- an output is no input ----

ln -s model alias
mkdir below && ln -s ../model below/alias
for name in model ./model/ below/../model alias below/alias "$folder/model"; do
  refuses 2 "--mlx-path $name must not be --model model; use another --mlx-path" $pack4 "$name" --force
done
refuses 2 "--mlx-path model must not be --model alias" quantize --model alias --mlx-path model --force
mkdir around && cp -r model around/inner
refuses 2 "--mlx-path around must not contain --model around/inner" quantize --model around/inner --mlx-path around --force
refuses 2 "--out quantised must not be --model quantised" $tuned quantised --force
refuses 2 "--out data must not be --data data" $tuned data --force
refuses 2 "--out quantised must not contain --config quantised/config.json" $scratch quantised --force
refuses 2 "--state data must not be --data data; use another --state" $tuned new --state data
refuses 2 "--out new must not contain --state new/state" $tuned new --state new/state
refuses 2 "--save-path quantised must not be --model quantised" $fuse quantised --force
refuses 2 "--save-path adapters must not be --adapter-path adapters" $fuse adapters --force
refuses 2 "--mlx-path model must not be --model model" $teach model --force
refuses 2 "--mlx-path two must not be --quantized-model two" $teach two --quantized-model two --force
refuses 2 "--mlx-path data must not be --data-path data" $teach data --force
refuses 2 "--target-dir model must not be --model model" $teach new --target-dir model
refuses 2 "--mlx-path model must not be --model model" $pack model --force
refuses 2 "--mlx-path . must not contain --model model" $pack . --force
refuses 2 "--adapter-path quantised must not be --model quantised" $tune quantised --force
refuses 2 "--adapter-path adapters must not contain --resume-adapter-file adapters/adapters.safetensors" \
  $tune adapters --resume-adapter-file adapters/adapters.safetensors --force
# Links inside an input's folder, some or all of its files.
mkdir m2 m3 && cp model/* m2 && ln -s ../m2/model.safetensors m3 && cp model/config.json model/tokenizer.json m3
refuses 2 "--mlx-path m2 must not contain model.safetensors of --model m3, which is a link; use another --mlx-path" \
  quantize --model m3 --mlx-path m2 --q-group-size 32 --force
mkdir -p hub/blobs hub/snapshots && cp -r m2 hub/blobs/whole && ln -s ../blobs/whole/config.json hub/snapshots
for file in model/*; do ln -sf "../blobs/whole/$(basename "$file")" hub/snapshots; done
for name in hub/blobs/whole hub/snapshots/../blobs/whole "$folder/hub/blobs/whole/"; do
  refuses 2 "must not contain config.json of --model hub/snapshots, which is a link" \
    quantize --model hub/snapshots --mlx-path "$name" --q-group-size 32 --force
done
refuses 2 "--out m2 must not contain model.safetensors of --model m3" train $on --model m3 --data data $steps --out m2 --force
refuses 2 "--save-path m2 must not contain model.safetensors of --model m3" \
  fuse --model m3 --adapter-path adapters --save-path m2 --force
mkdir linked-data && ln -s ../m2/train.jsonl linked-data && cp data/train.jsonl m2
refuses 2 "--out m2 must not contain train.jsonl of --data linked-data" train $on --model quantised --data linked-data $steps --out m2 --force
refuses 2 "--state m2 must not contain train.jsonl of --data linked-data" \
  train $on --model quantised --data linked-data $steps --out new --state m2
# The same links, and an output elsewhere.
expect 0 "bits per weight" quantize --model hub/snapshots --mlx-path linked-out --q-group-size 32
same_files hub/blobs/whole/model.safetensors model/model.safetensors "what an input's links lead to"
# A folder of its own inside an input takes nothing away.
expect 0 "bits per weight" $pack4 model/q4 && rm -r model/q4

# ---- an output that cannot be made ----

echo x >afile && ln -s nowhere astray
for command in "$pack4" "convert --model quantised -d --mlx-path" "$scratch" "$tuned" "$fuse" "$teach" "$pack" "$tune"; do
  for name in afile afile/ afile//; do
    refuses 1 "$name: must be a directory or absent, got a file" $command $name --force
  done
  refuses 1 "astray: must be a directory or absent, got a link to nothing" $command astray --force
done
refuses 1 "afile/: must be a directory or absent, got a file" $scratch new --state afile/
refuses 1 "astray: must be a directory or absent" $teach new --state astray
refuses 1 "afile/: must be a directory or absent, got a file" demo $on --iters 2 --cases 5 --out afile/
refuses 1 "astray: must be a directory or absent" demo $on --iters 2 --cases 5 --out astray
refuses 1 "afile/: must be a directory or absent, got a file" $teach new --target-dir afile/
rm afile astray

# ---- adapters ----

mkdir tuned && echo '{"mine": 1}' >tuned/adapter_config.json
refuses 1 "tuned/adapter_config.json: already exists and is not an adapter file" $tune tuned --force
mkdir best && echo mine >best/best.safetensors
refuses 1 "best/best.safetensors: already exists; use --force to overwrite, or another --adapter-path" $tune best
mkdir links && echo precious >precious
for name in adapters.safetensors adapter_config.json 0000001_adapters.safetensors best.safetensors; do
  [ $name = adapter_config.json ] && cp adapters/$name . && ln -s ../$name links/$name && continue
  ln -s ../precious links/$name
done
cp adapter_config.json adapter_config.before
expect 0 "from step" $tune links --force
same "$(cat precious)" precious "a file behind a link"
same_files adapter_config.json adapter_config.before "a config behind a link"
[ ! -h links/adapters.safetensors ] && [ ! -h links/adapter_config.json ] || complain "lora left a link"
same_files links/adapters.safetensors adapters/adapters.safetensors "adapters in place of a link, and others"
expect 0 "from step" $tune last --only-last
same "$(ls last | tr '\n' ' ')" "adapter_config.json adapters.safetensors " "lora --only-last"
same_files last/adapters.safetensors adapters/adapters.safetensors "lora with --only-last and without"

mkdir -p written
for name in adapters.safetensors 0000001_adapters.safetensors best.safetensors; do
  rm -f written/* && cp adapters/adapter_config.json written && echo mine >written/$name
  refuses 1 "written/$name: already exists and is not an adapter file, so --force does not overwrite it" $tune written --force
done

# ---- sensitivities ----

measure="${pack% --sensitivities*} --data-path data --sequence-length 16"
mv model_sensitivities.json kept.json
for text in '{"mine": 1}' '["mine"]' mine; do
  echo "$text" >model_sensitivities.json
  refuses 1 "it is not a list of sensitivities, so --force does not overwrite it" $measure --mlx-path dynamic --force
done
cp kept.json model_sensitivities.json
# What is there is replaced only once there is a model.
sed 's/\[\[/[["other", 1], [/' kept.json >model_sensitivities.json
cp model_sensitivities.json before.json
(ulimit -f 8 && "$program" $measure --mlx-path dynamic --force --quiet) >out 2>&1
same $? 1 "dynamic-quant on a full disk"
same_files model_sensitivities.json before.json "sensitivities of before, where no model was made"
expect 0 "bits per weight" $measure --mlx-path dynamic --force
same_files model_sensitivities.json kept.json "sensitivities that were measured again"

# ---- a folder for a state ----

mkdir mine && echo precious >mine/best.safetensors
for command in "$scratch new" "$scratch new --force" "$scratch new --resume" "$tuned new" "$teach new"; do
  refuses 1 "mine/best.safetensors: already exists, belongs to no run, and would be overwritten" $command --state mine
done
cp adapters/adapters.safetensors mine/best.safetensors # also one in the right format
refuses 1 "mine/best.safetensors: already exists, belongs to no run, and would be overwritten" $scratch new --state mine
mv mine/best.safetensors mine/state.safetensors
refuses 1 "mine/state.safetensors: already exists and is not the checkpoint of a run; use another --state" $scratch new --state mine
mv mine/state.safetensors mine/weights.safetensors && echo mine >mine/other.safetensors.tmp12.0
ln -s nowhere mine/state.safetensors
refuses 1 "mine/state.safetensors: already exists" $scratch new --state mine
rm mine/state.safetensors
before=$(contents mine)
expect 0 "from step" $scratch new --state mine
same "$before" "$(contents mine)" "a user's files in the folder of a state"
# One that a run did not write, which comes while it is stopped.
interrupted mine/state.safetensors $scratch later --state mine --iters 100000
echo precious >mine/best.safetensors
refuses 1 "mine/best.safetensors belongs to another run than the checkpoint next to it" \
  $scratch later --state mine --iters 100000 --resume
rm -r mine new

# ---- weights that run away in the last step ----

cp -r model good
before=$(contents good)
runaway="--data data --batch-size 8 --val-batches 0 --iters 1 --force --quiet"
for flags in "--learning-rate 1e38" "--learning-rate 10 --weight-decay 1e38" \
  "--dtype float16 --learning-rate 1e36"; do
  expect 1 "the weights after step 1 must be finite: the tensor " train $on --model quantised $runaway $flags --out good
  same "$before" "$(contents good)" "a model whose place weights that are NaN were to take, with $flags"
  [ ! -e good.state/state.safetensors ] || complain "train $flags saved weights that are NaN"
done
expect 1 "must be finite: the tensor " lora $on --model quantised --train $runaway --learning-rate 3e38 --adapter-path ran
same "$(ls ran)" "" "what lora left of adapters that are NaN"
expect 1 "must be finite" $teach good --force --learning-rate 1e38 --num-samples 8 --quiet
same "$before" "$(contents good)" "a model whose place a student that is NaN was to take"
for value in inf nan 1e39; do
  for flag in --learning-rate --weight-decay --clip; do
    refuses 2 "$flag: must be a number " $tuned good --force $flag $value
  done
  refuses 2 "--final-share: must be a number from 0 to 1, got '$value'" $tuned good --force --final-share $value
  refuses 2 "--scale: must be a number " $tune no --scale $value
  refuses 2 "--learning-rate: must be a number above 0" $teach no --learning-rate $value
  refuses 2 "--temperature: must be a number above 0" $teach no --temperature $value
done

# ---- states that are not as they were written ----

# damage <file>: 3000 other bytes in its middle.
damage() {
  awk 'BEGIN { srand(1); for (i = 0; i < 3000; i++) printf "%c", 33 + int(90 * rand()) }' |
    dd of="$1" bs=1 seek=9000 conv=notrunc 2>/dev/null
}
long="--iters 100000 --steps-per-report 100000"
interrupted "h t.state/state.safetensors" $scratch "h t" $long
cp -r "h t.state" copy.state
damage "h t.state/state.safetensors"
refuses 1 "h t.state/state.safetensors: is damaged (" $scratch "h t" $long --resume
interrupted tuned2/state.safetensors $tune tuned2 $long
damage tuned2/state.safetensors
refuses 1 "tuned2/state.safetensors: is damaged (" $tune tuned2 $long --resume
interrupted taught.state/state.safetensors $teach taught --save-every 1 --batch-size 1 --steps-per-eval 1
damage taught.state/best.safetensors
refuses 1 "taught.state/best.safetensors: is damaged (" $teach taught --save-every 1 --batch-size 1 --steps-per-eval 1 --resume
rm -r "h t.state" && mv copy.state "h t.state"

# An error of a run under way tells the command that resumes it, as a shell takes it.
(ulimit -f 200 && "$program" $scratch "h t" $long --resume --quiet) >out 2>err
same $? 1 "train on a full disk"
grep -q "; after fixing this, resume with: .*mlxtape train .* --out 'h t' .*--resume" err || complain "train on a full disk: $(cat err)"
same "$(wc -l <err)" 1 "lines of the error of a full disk"

# A state that is removed meanwhile is not called saved.
"$program" $scratch gone $long --save-every 100000 --val-batches 1 --quiet >out 2>err &
job=$!
until_there gone.state/best.safetensors
rm -r gone.state
kill -INT $job
wait $job
same $? 1 "a run whose state was removed"
grep -q "the checkpoint of step 0 is lost: .*gone.state/state.safetensors: is missing" err || complain "state removed: $(cat err)"
if grep -q -- "--resume\|saved in" err; then complain "state removed: $(cat err)"; fi

# Two runs that make one folder: the second to end keeps its state, and the first's model.
"$program" $scratch race --iters 60 --quiet >out 2>err &
job=$!
until_there race.state/state.safetensors
cp -r two race
before=$(contents race)
wait $job
same $? 1 "the second of two runs that make one folder"
grep -q "race: was created by another run in the meantime and is left as it is; use another path; after fixing this, resume with: " err ||
  complain "two runs: $(cat err)"
same "$before" "$(contents race)" "a folder that another run made"
mv race first
expect 0 "from step 60" $scratch race --iters 60 --resume

# ---- signals ----

# The terminal is gone, perhaps with more than one word of it; unless nobody is to hear of it.
with_hangup=$(env --default-signal=HUP true 2>/dev/null && echo "env --default-signal=HUP")
$with_hangup "$program" $scratch hung $long >out 2>err &
job=$!
until_there hung.state/state.safetensors
kill -HUP $job
kill -HUP $job 2>/dev/null
wait $job
same $? 130 "train and SIGHUP"
grep -q "progress has been saved in hung.state, resume with:" err || complain "train and SIGHUP: $(cat err)"
expect 0 "resumed after step" $scratch hung --resume --iters $(($(sed -n 's/^stopped after step \([0-9]*\) of.*/\1/p' err) + 1))
nohup "$program" $scratch kept $long >out 2>err &
job=$!
until_there kept.state/state.safetensors
kill -HUP $job
sleep 0.3
kill -0 $job 2>/dev/null || complain "nohup mlxtape ends with SIGHUP"
kill -TERM $job
wait $job
same $? 130 "train and SIGTERM"
same "$(grep -c 'mlxtape: stopping' err)" 1 "words of a run under nohup"

# A model's file that becomes shorter while it is in use; on a GPU it is not in use any more.
ulimit -c 0
cut="cut$(printf '\033')[31m" # which a terminal would obey
cp -r quantised "$cut"
echo '{% for m in messages %}<{{ m.content }}>{% endfor %}' >"$cut/chat_template.jinja"
# talk: chat with what comes through the pipe, once it has answered.
talk() {
  rm -f pipe answers && mkfifo pipe
  # AddressSanitizer would take SIGBUS for itself.
  ASAN_OPTIONS="${ASAN_OPTIONS:-}:handle_sigbus=0" "$program" chat $on --model "$cut" -m 2 --quiet <pipe >answers 2>err &
  job=$!
  exec 3>pipe
  echo 12 >&3
  tries=0
  while [ ! -s answers ] && [ $tries -lt 3000 ]; do
    sleep 0.01
    tries=$((tries + 1))
  done
}
talk
kill -BUS $job
exec 3>&-
wait $job 2>/dev/null
same "$(kill -l $?)" BUS "chat that was sent SIGBUS"
if [ "$on" = "--device cpu" ]; then
  talk
  head -c 4096 "$cut/model.safetensors" >begin
  cat begin >"$cut/model.safetensors"
  echo 34 >&3
  exec 3>&-
  wait $job
  same $? 1 "chat with a model that became shorter"
  same "$(wc -l <err)" 1 "lines of the error of a file that became shorter"
  grep -qF "mlxtape: cut\\x1b[31m/model.safetensors: was truncated or became unreadable" err || complain "a file that became shorter: $(cat err)"
fi

same "$(find . -name '*.tmp*' -o -name '*.old' | wc -l)" 0 "files left behind"
exit $((failures > 0))
