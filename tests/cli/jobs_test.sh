#!/bin/sh
# jobs_test.sh <mlxtape> [device]: the commands that train, pack and measure, on a tiny model: results, files, errors, Ctrl-C.
# shellcheck disable=SC2086,SC1091,SC2154  # flags that are several words; expect.sh
set -u
program=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
here=$(cd "$(dirname "$0")" && pwd)
. "$here/expect.sh"
cd "$folder" || exit 1
on="--device ${2:-cpu}"
. "$here/tiny_model.sh"

# ---- train ----

steps="--iters 6 --batch-size 8 --steps-per-report 3 --steps-per-eval 3 --save-every 2"
scratch="$on --config quantised/config.json --from-scratch --data data $steps"
expect 0 "validation loss" train $scratch --out new
expect 0 "qwen3_next, f32" inspect new
expect 0 "tokens/s" generate $on --model new -p '1+1=' -m 4
[ ! -e new.state ] || complain "train left new.state"
expect 0 '"best_validation_loss"' train $scratch --out again --json --keep-state
same_files new/model.safetensors again/model.safetensors "the same run twice"
[ -e again.state/state.safetensors ] || complain "train --keep-state kept nothing"
expect 0 "steps" train $scratch --out threads --threads 1
same_files new/model.safetensors threads/model.safetensors "a run on one thread"
expect 0 "validation loss" train $on --model model --data data $steps --out tuned --dtype bfloat16 \
  --schedule cosine --warmup 2 --grad-accumulation-steps 2 --grad-checkpoint --mask-prompt
expect 0 "qwen3_next, bf16" inspect tuned
expect 0 "from step" train $on --model quantised --data data/train.jsonl $steps --out scales
expect 0 "4 bits" inspect scales

echo '{"txt": 1}' >bad.jsonl
expect 1 "new: already exists; use --force to overwrite, or another --out" train $scratch --out new
expect 0 "from step" train $scratch --out new --force
expect 1 "again.state: contains an unfinished run; use --resume, or delete" train $scratch --out again --force
expect 1 "must be a directory or absent" train $scratch --out bad.jsonl --force
expect 1 "must be a writable directory" train $scratch --out bad.jsonl/x
expect 2 "use either --model" train $on --data data --out no
expect 2 "use either --model" train $scratch --model model --out no
expect 2 "add --from-scratch" train $on --config quantised/config.json --data data --out no
expect 2 "--out is required" train $scratch
expect 2 "--data is required" train $on --model model --out no
expect 2 "--iters" train $scratch --out no --iters 0
expect 2 "--state ./no must not be --out no; use another --state" train $scratch --out no --state ./no
mkdir silent && cp data/train.jsonl silent && : >silent/valid.jsonl
expect 1 "silent/valid.jsonl: must contain samples, got an empty file" train $scratch --out no --data silent
expect 2 "--learning-rate: must be a number above 0" train $scratch --out no --learning-rate -1
expect 2 "--weight-decay: must be a number from 0" train $scratch --out no --weight-decay -1
expect 2 "--clip: must be a number from 0" train $scratch --out no --clip -1
expect 2 "at least batch_size = 100 samples, got 48" train $scratch --out no --batch-size 100
expect 1 "nowhere: no such file or folder" train $on --model model --data nowhere --out no
expect 1 "no such directory" train $on --model nowhere --data data --out no
expect 1 "no such file" train $on --config nowhere/config.json --from-scratch --data data --out no
one_line "bad.jsonl: line 1: a line must be an object with" train $on --model model --data bad.jsonl --out no
echo '{"text": "abc"}' >letters.jsonl
one_line "must be in the model's vocabulary of 64, got 97" train $on --model model --data letters.jsonl \
  --out no --batch-size 1

# Optimizers: each trains, resumes to the same bits, and says which flags are its own.
for optimizer in adam "sgd --momentum 0.9 --nesterov true" "muon --adamw-share 0.1" "lion --beta2 0.95 --weight-decay 0.1"; do
  steps8="--iters 8 --batch-size 8 --save-every 1 --steps-per-eval 4 --val-batches 1"
  by="train $on --config quantised/config.json --from-scratch --data data $steps8 --optimizer $optimizer"
  expect 0 "from step" $by --out by.whole
  "$program" $by --out by.parts --quiet >/dev/null 2>&1 &
  job=$!
  until_there by.parts.state/state.safetensors
  kill -9 $job
  wait $job 2>/dev/null
  expect 0 "from step" $by --out by.parts --resume --force
  same_files by.whole/model.safetensors by.parts/model.safetensors "a run of $optimizer that was killed, and a whole one"
  rm -rf by.whole by.parts
done
expect 2 "adafactor is not supported; must be one of adamw, adam, sgd, muon, lion, got 'adafactor'" \
  train $scratch --out no --optimizer adafactor
expect 2 "--momentum does not apply to --optimizer adamw, which takes --beta1, --beta2" train $scratch --out no --momentum 0.9
expect 2 "--weight-decay does not apply to --optimizer adam" train $scratch --out no --optimiser adam --weight-decay 0.1
expect 2 "--nesterov" train $scratch --out no --optimizer sgd --nesterov maybe
expect 2 "nesterov needs momentum" train $scratch --out no --optimizer sgd --nesterov true
expect 2 "beta2 must be in [0, 1)" train $scratch --out no --beta2 1
expect 2 "--eps: must be a number from 0" train $scratch --out no --eps -1
expect 0 "from step" train $scratch --out kept --keep-state
expect 2 "is the checkpoint of another run: optimizer must be adamw to resume it, got lion" \
  train $scratch --out kept --state kept.state --resume --optimizer lion --force
rm -rf kept kept.state

# Ctrl-C, and the command that it tells.
long="--steps-per-report 100 --save-every 1 --val-batches 0"
interrupted "a b.state/state.safetensors" train $scratch $long --iters 100000 --out "a b"
grep -q "progress has been saved in a b.state, resume with:" err || complain "train, interrupted: $(cat err)"
grep -q "^  .*mlxtape train .* --out 'a b' --resume$" err || complain "train, interrupted: $(cat err)"
[ ! -e "a b" ] || complain "train, interrupted, wrote its output"
step=$(sed -n 's/^stopped after step \([0-9]*\) of.*/\1/p' err)
told=$(sed -n 's/^  \(.*--resume\)$/\1/p' err)
eval "$told --iters $((step + 2)) --keep-state" >out 2>err || complain "resumed: $(cat err)"
grep -q "resumed after step $step" err || complain "resumed: $(cat err)"
expect 0 "steps" train $scratch $long --iters $((step + 2)) --out whole
same_files "a b/model.safetensors" whole/model.safetensors "an interrupted run and a whole one"
expect 1 "whole: already exists" train $scratch $long --iters 4 --out whole --resume
expect 2 "is the checkpoint of another run: learning_rate must be" train $scratch $long --out c --state "a b.state" \
  --resume --learning-rate 0.5
expect 2 "is the checkpoint of another run: training data must be" train $scratch $long --out c --state "a b.state" \
  --resume --data data/valid.jsonl --batch-size 8
expect 2 "steps, so iterations must be at least that" train $scratch $long --out c --state "a b.state" --resume --iters 1
expect 0 "c.state: contains no unfinished run; starting a new one" train $scratch --out c --resume

# Losses that run away: one line, the state before stays, nothing is written.
one_line "must be finite" train $scratch --out no --learning-rate 1e30 --clip 0 --quiet
expect 1 "to start over with other settings, delete no.state" train $scratch --learning-rate 1e30 --clip 0 --out no --resume
[ -e no.state/state.safetensors ] || complain "a loss that ran away took its state away"
rm -r no.state

# A disk that is full: here, a file that may grow no more.
(ulimit -f 200 && "$program" train $scratch --out full --quiet) >out 2>err
same $? 1 "train on a full disk"
same "$(wc -l <err)" 1 "lines of the error of a full disk"
grep -q "must be writable, got File too large" err || complain "train on a full disk: $(cat err)"
[ ! -e full ] || complain "train on a full disk wrote its output"
rm -rf full.state

# Memory that does not suffice, where the program runs with as much at all: sanitizers do not, nor do GPUs.
if [ "$on" = "--device cpu" ] && (ulimit -v 200000 && "$program" --threads 1 info) >out 2>&1; then
  awk 'BEGIN { for (i = 0; i < 40000; i++) printf "%d+%d ", i % 7, i % 11 }' >long.txt
  (ulimit -v 200000 && "$program" train $on --threads 1 --model model --data long.txt --out large --quiet \
    --max-seq-length 4000 --batch-size 40) >out 2>err
  same $? 1 "train without memory"
  same "$(wc -l <err)" 1 "lines of the error of memory"
  grep -q "has no room for .* smaller batches" err || complain "train without memory: $(cat err)"
  [ ! -e large ] || complain "train without memory wrote its output"
fi
if [ "$on" != "--device cpu" ]; then # an embedding of 256 GiB
  mkdir vast && cp quantised/tokenizer.json vast
  sed -e 's/"vocab_size": [0-9]*/"vocab_size": 8388608/' -e 's/"hidden_size": [0-9]*/"hidden_size": 8192/' \
    quantised/config.json >vast/config.json
  one_line "has no room for" train $on --config vast/config.json --from-scratch --data data --out large --quiet
  [ ! -e large ] || complain "train without memory wrote its output"
fi

# ---- lora, fuse ----

tune="lora $on --model quantised --train --data data $steps --learning-rate 1e-3"
expect 0 "test loss" $tune --test --rank 4 --scale 2
expect 0 "from step" $tune --adapter-path dropped --dropout 0.1 --lora-keys q_proj,v_proj
[ -e adapters/0000002_adapters.safetensors ] || complain "lora: no adapters of step 2"
[ ! -e adapters/state.safetensors ] || complain "lora left its state"
expect 1 "adapters/0000002_adapters.safetensors: already exists; use --force to overwrite" $tune
expect 0 '"step_of_adapters"' $tune --adapter-path keyed --lora-keys self_attn.q_proj,down_proj --num-layers 1 --json
grep -q '"self_attn.q_proj"' keyed/adapter_config.json || complain "lora --lora-keys: $(cat keyed/adapter_config.json)"
expect 0 "test loss" lora $on --model quantised --test --data data
expect 0 "from step" $tune --adapter-path more --resume-adapter-file adapters/adapters.safetensors --rank 4 --scale 2
expect 1 "must be [" $tune --adapter-path no --resume-adapter-file adapters/adapters.safetensors --rank 5
cat >lora.json <<'END'
{"model": "quantised", "train": true, "data": "data", "iters": 4, "batch_size": 8, "steps_per_eval": 3, "device": null,
 "learning_rate": 1e-3, "fine_tune_type": "lora", "optimizer_config": {"adam": {}}, "lr_schedule": null,
 "lora_parameters": {"rank": 2, "scale": 3.0, "dropout": 0.0, "keys": ["q_proj", "down_proj"]}, "adapter_path": "fromfile"}
END
expect 0 "fromfile: adapters from step" lora $on -c lora.json
grep -q '"rank": 2' fromfile/adapter_config.json || complain "lora -c: $(cat fromfile/adapter_config.json)"
expect 0 "flagged: adapters from step" lora $on -c lora.json --rank 3 --adapter-path flagged
grep -q '"rank": 3' flagged/adapter_config.json || complain "lora -c and --rank: $(cat flagged/adapter_config.json)"
cat >optimizer.json <<'END'
{"optimizer": "adamw", "optimizer_config": {"adam": {}, "adamw": {"betas": [0.8, 0.95], "weight_decay": 0.1, "eps": null},
 "adafactor": {"eps": [1e-30, 1e-3]}}}
END
expect 0 "from step" $tune -c optimizer.json --iters 2 --adapter-path byfile --keep-state
expect 0 "from step" $tune --optimizer adamw --beta1 0.8 --beta2 0.95 --weight-decay 0.1 --iters 2 --adapter-path byflags
same_files byfile/adapters.safetensors byflags/adapters.safetensors "lora with an optimizer from a file and from flags"
expect 2 "optimizer must be adamw to resume it, got sgd" $tune -c optimizer.json --adapter-path byfile --resume --optimizer sgd
for optimizer in sgd muon lion; do
  expect 0 "from step" $tune --optimizer $optimizer --iters 2 --adapter-path by.$optimizer
done
echo '{"optimizer": "adafactor"}' >adafactor.json
expect 2 "adafactor is not supported" $tune -c adafactor.json --adapter-path no
echo '{"optimizer_config": {"adam": {"betas": 0.9}}}' >betas.json
expect 1 "optimizer_config.adam.betas must be two numbers, got 0.9" $tune -c betas.json --adapter-path no
# mlx-lm's schedules: rates 5e-4, 1e-3, 1e-3 and half way from that to 1e-4.
echo '{"learning_rate": 1, "lr_schedule": {"name": "cosine_decay", "warmup": 1, "warmup_init": 5e-4, "arguments": [1e-3, 2, 1e-4]}}' >schedule.json
plain="lora $on --model quantised --train --data data $steps"
"$program" $plain -c schedule.json --adapter-path scheduled --steps-per-report 1 --json --quiet | grep -o '"learning_rate": [0-9.e-]*' | head -4 >rates
same "$(cut -c 18-24 rates | tr '\n' ' ')" "0.0005 0.001 0.001 0.00055 " "rates of lr_schedule"
for flag in "--learning-rate 1e-3" "--schedule cosine" "--warmup 2" "--final-share 0.1"; do
  expect 2 "${flag% *} and lr_schedule of schedule.json exclude each other" $plain -c schedule.json --adapter-path no $flag
done
# wrong_schedule <lr_schedule> <error>
wrong_schedule() {
  echo "{\"lr_schedule\": $1}" >schedule.json
  expect 1 "schedule.json: lr_schedule: $2" lora $on -c schedule.json
}
wrong_schedule '{"name": "cosine_decay"}' "arguments of cosine_decay must be [rate, steps] or [rate, steps, end], got 0 numbers"
wrong_schedule '{"name": "join_schedules", "arguments": [1]}' "name must be cosine_decay, linear_schedule, exponential_decay or step_decay, got 'join_schedules'"
wrong_schedule '{"name": "step_decay", "arguments": [1, "0.5", 1]}' 'arguments must be a list of numbers, got "0.5"'
wrong_schedule '{"name": "step_decay", "arguments": [1, 0.5, 1], "warmup": 1.5}' "warmup must be a whole number, got 1.5"
wrong_schedule '{"nme": "step_decay"}' "must have name, arguments, warmup and warmup_init alone, got 'nme'"
wrong_schedule '"cosine_decay"' 'must be an object, got "cosine_decay"'
awk 'BEGIN { printf "{\"odd\": [1"; for (i = 0; i < 9999; i++) printf ", 1"; print "]}" }' >odd.json
expect 1 "odd: unknown setting, got [1, 1" lora $on -c odd.json
[ ${#output} -lt 400 ] || complain "lora -c quotes ${#output} bytes of its file"
printf 'model: quantised\ntrain: true\n' >lora.conf
for file in lora.conf rates; do
  expect 1 "$file: must be a JSON object; YAML is not read: write the same keys as JSON" lora $on -c $file
done
echo '{"iters": "many"}' >many.json
expect 2 "--iters" lora $on -c many.json
expect 1 "nowhere.json" lora $on -c nowhere.json
expect 2 "mlxtape train" $tune --fine-tune-type full
expect 2 "DoRA is not supported" $tune --fine-tune-type dora
expect 2 "--weight-decay does not apply to --optimizer adam, which takes --beta1" $tune --weight-decay 0.1
expect 2 "--train, --test or both" lora $on --model quantised --data data
expect 2 "--model is required" lora $on --train --data data
expect 2 "no.such" $tune --adapter-path no --lora-keys no.such
one_line "--test needs samples" $tune --iters 100000 --test --data data/train.jsonl --adapter-path untested
[ ! -e untested ] || complain "lora --test without samples began all the same"
expect 1 "--test needs samples in test.jsonl" lora $on --model quantised --test --data data/train.jsonl
interrupted held/state.safetensors $tune $long --iters 100000 --adapter-path held
grep -q -- "--adapter-path held --resume$" err || complain "lora, interrupted: $(cat err)"
step=$(sed -n 's/^stopped after step \([0-9]*\) of.*/\1/p' err)
expect 1 "held: contains an unfinished run" $tune $long --adapter-path held
expect 0 "from step $((step + 2))" $tune $long --iters $((step + 2)) --adapter-path held --resume
expect 0 "steps" $tune $long --iters $((step + 2)) --adapter-path straight
same_files held/adapters.safetensors straight/adapters.safetensors "lora, interrupted and not"

# With a validation at step 0, which no later one has beaten yet: what is there is the last save.
interrupted valid/0000003_adapters.safetensors $tune --save-every 1 --steps-per-eval 100000 --iters 100000 --adapter-path valid
last=$(find valid -name '0*_adapters.safetensors' | sort | tail -n 1)
same_files "$last" valid/adapters.safetensors "the adapters of a run that was interrupted, and its last save"

expect 0 "modules fused" fuse --model quantised --adapter-path adapters --save-path fused
expect 0 "4 bits" inspect fused
expect 1 "fused: already exists" fuse --model quantised --adapter-path adapters --save-path fused
expect 0 "32.000 bits per weight" fuse --model quantised --adapter-path adapters --save-path wide -d
expect 0 '"modules"' fuse --model quantised --adapter-path adapters --save-path wide -d --force --json
same "$("$program" generate $on --model quantised --adapter-path adapters -p '12+3=' -m 8 --quiet)" \
  "$("$program" generate $on --model wide -p '12+3=' -m 8 --quiet)" "with adapters, and fused and dequantised"
expect 1 "adapter_config.json" generate $on --model quantised --adapter-path nowhere -p 1
expect 1 "adapter_config.json" fuse --model quantised --adapter-path nowhere --save-path no
same "$("$program" eval $on --model quantised --data data --adapter-path adapters --sequence-length 16 | grep perplexity)" \
  "$("$program" eval $on --model wide --data data --sequence-length 16 | grep perplexity)" "eval with adapters and fused"

# ---- dwq ----

teach="dwq $on --model model --bits 2 --group-size 32 --data-path data --batch-size 8 --learning-rate 1e-3 --save-every 2"
expect 0 "% lower" $teach --mlx-path taught
expect 0 "2 bits" inspect taught
expect 0 '"kl_after"' $teach --mlx-path stored --target-dir targets --json
[ -e targets/manifest.json ] || complain "dwq --target-dir wrote no manifest"
expect 0 "targets of 7 batches" $teach --target-dir targets --targets-only
expect 2 "batch_size must be 4, got 8" $teach --mlx-path no --target-dir targets --batch-size 4
expect 0 "bits per weight" quantize --model model --mlx-path two --q-bits 2 --q-group-size 32
expect 0 "% lower" $teach --quantized-model two --mlx-path same
same_files taught/model.safetensors same/model.safetensors "dwq of a student that was there and of one made"
expect 0 "% lower" $teach --data-path data/train.jsonl --mlx-path drawn --num-samples 16 --num-valid-samples 4
expect 2 "is already quantised" dwq $on --model quantised --data-path data --mlx-path no
expect 2 "--data-path is required" dwq $on --model model --mlx-path no
expect 2 "--targets-only needs --target-dir" $teach --targets-only
expect 1 "taught: already exists" $teach --mlx-path taught
one_line "must be finite" $teach --mlx-path no --learning-rate 1e38 --quiet
rm -rf no.state
interrupted late.state/state.safetensors $teach --save-every 1 --batch-size 1 --steps-per-eval 1 --mlx-path late
expect 0 "% lower" $teach --save-every 1 --batch-size 1 --steps-per-eval 1 --mlx-path late --resume
expect 0 "% lower" $teach --save-every 1 --batch-size 1 --steps-per-eval 1 --mlx-path ontime
same_files late/model.safetensors ontime/model.safetensors "dwq, interrupted and not"

# ---- demo ----

show="demo $on --iters 12 --cases 5"
expect 0 "report.html" $show --out shown
[ ! -e shown/state ] || complain "demo left its state"
interrupted shown2/state/training/state.safetensors $show --seconds 1000 --out shown2
grep -q "stopped while training; progress has been saved in shown2/state, resume with:" err || complain "demo, interrupted: $(cat err)"
grep -q -- "--out shown2 --resume$" err || complain "demo, interrupted: $(cat err)"
expect 1 "shown2/state: contains an unfinished demo; use --resume" $show --out shown2
expect 2 "is the checkpoint of another run: seed must be 1" $show --out shown2 --resume --seed 2
expect 2 "is the checkpoint of another run: iterations must be 12" $show --out shown2 --resume --iters 13
# What was refused has changed nothing.
expect 0 "training resumed after step" $show --seconds 1000 --out shown2 --resume
# Every score of the whole run is there again, of this training and of this alone.
for all in shown shown2; do
  sed -n '/"held_out": /,/"expert_shares"/p' $all/demo.json >$all.points
  [ -s $all.points ] || complain "$all: no scores in demo.json"
done
same_files shown.points shown2.points "scores of a demo that was interrupted and of one that was not"
same_files shown/2bit-dwq/model.safetensors shown2/2bit-dwq/model.safetensors "demo, interrupted and not"
interrupted shown3/state/distilling/state.safetensors $show --threads 1 --out shown3
dead=$(sh -c 'echo $$')
for name in state/progress.json demo.json tokenizer/tokenizer.json; do : >"shown3/$name.tmp$dead.0"; done
expect 0 "training resumed after step 12" $show --out shown3 --resume
same_files shown/2bit-dwq/model.safetensors shown3/2bit-dwq/model.safetensors "demo, interrupted late and not"
[ ! -e shown3/state ] || complain "demo left $(ls shown3/state)"
# Scores of steps that were lost, as the state of an earlier one is back, are found out again.
interrupted shown4/state/training/state.safetensors $show --out shown4
cp -r shown4/state/training early
interrupted shown4/state/distilling/state.safetensors $show --threads 1 --out shown4 --resume
rm -r shown4/state/training shown4/state/distilling && mv early shown4/state/training
expect 0 "report.html" $show --out shown4 --resume
sed -n '/"held_out": /,/"expert_shares"/p' shown4/demo.json >shown4.points
same_files shown.points shown4.points "scores of a demo that lost steps and of one that did not"
interrupted shown4/state/training/state.safetensors $show --out shown4
change 's/"peak_bytes": /&1/' shown4/state/progress.json
one_line "progress.json: is damaged (its content does not match its checksum); delete shown4/state to start over" \
  $show --out shown4 --resume
echo '{"iterations": "many"}' >shown4/state/progress.json
one_line "progress.json: is damaged" $show --out shown4 --resume
# One at a time, also where nothing is trained.
"$program" $show --iters 100000 --out shown5 >busy.out 2>&1 &
job=$!
until_there shown5/demo.json
one_line "shown5: is in use" $show --out shown5
kill -INT $job
wait $job
same $? 130 "a demo that another wanted to disturb"
(ulimit -f 0 && "$program" $show --out shown6) >out 2>&1
same $? 1 "demo on a full disk"
expect 0 "report.html" $show --iters 2 --out shown6

# ---- what may not be mixed ----

# A run goes on from the model that it began with, or not at all.
interrupted based.state/state.safetensors train $on --model quantised --data data --save-every 1 --iters 100000 --out based
one_line "weights must be" train $on --model scales --data data --save-every 1 --iters 1 --out based --resume

# One run at a time in a folder.
"$program" train $scratch --iters 100000 --save-every 1 --out busy >busy.out 2>&1 &
job=$!
until_there busy.state/state.safetensors
one_line "busy.state: is in use" train $scratch --iters 1 --save-every 1 --out busy --resume
kill -INT $job
wait $job
same $? 130 "a run that another wanted to disturb"

# What a process left that was killed while it wrote is taken away; a model that it had moved aside comes back.
mkdir swept.tmp123.0 && cp -r model swept.tmp123.1.old
echo "mlxtape makes a model here" | tee swept.tmp123.0.lock >swept.tmp123.1.lock
expect 1 "swept: already exists" quantize --model model --mlx-path swept
[ -e swept/config.json ] || complain "a model that was moved aside did not come back"
expect 0 "bits per weight" quantize --model model --mlx-path swept --q-group-size 32 --force
[ "$(ls -d swept*)" = swept ] || complain "quantize --force left $(ls -d swept*)"

# ---- dynamic-quant ----

pack="dynamic-quant $on --model model --low-bits 2 --low-group-size 32 --high-bits 6 --high-group-size 32"
rows="--data-path data --sequence-length 16"
expect 0 "bits per weight" $pack $rows --target-bpw 7 --mlx-path dynamic --report-ppl
expect 0 "6 bits, groups of 32" inspect dynamic
[ -e model_sensitivities.json ] || complain "dynamic-quant wrote no sensitivities"
expect 1 "model_sensitivities.json: already exists" $pack $rows --target-bpw 7 --mlx-path dynamic2
expect 0 '"threshold"' $pack --sensitivities model_sensitivities.json --target-bpw 7 --mlx-path dynamic2 --json
same_files dynamic/model.safetensors dynamic2/model.safetensors "dynamic-quant from its sensitivities"
expect 0 '"threshold": null' $pack --sensitivities model_sensitivities.json --target-bpw 30 --mlx-path dynamic3 --json
expect 0 " modules" $pack --sensitivities model_sensitivities.json --target-bpw 30 --mlx-path dynamic4
expect 2 "--target-bpw: must be a number above 0" $pack --sensitivities model_sensitivities.json --target-bpw nan --mlx-path dynamic5
expect 2 "--sensitivities is required" $pack --mlx-path no
expect 2 "--high-bits must be above" $pack $rows --mlx-path no --high-bits 2
expect 2 "target" $pack --sensitivities model_sensitivities.json --mlx-path no --target-bpw 1
mkdir early
expect 2 "the target must be at least" $pack $rows --mlx-path early/no --target-bpw 1
[ "$(ls early)" = "" ] || complain "dynamic-quant measured for a target that cannot be: $(ls early)"
expect 1 "nowhere.json" $pack --sensitivities nowhere.json --mlx-path no

# ---- eval, compare ----

expect 0 "perplexity  " eval $on --model model --data data/test.jsonl --sequence-length 16
same "$("$program" eval $on --model model --data data --sequence-length 16 | grep perplexity)" \
  "$("$program" perplexity $on --model model --data-path data/test.jsonl --sequence-length 16 | grep perplexity)" \
  "eval of a folder and of its test"
expect 0 "top-1 agreement      100.0 ± 0.0 %" eval $on --model model --reference model --data data --sequence-length 16
expect 0 '"top1_agreement"' eval $on --model two --reference model --data data --sequence-length 16 --json
# Answers alone: what lora's test tells.
"$program" eval $on --model quantised --data data --mask-prompt --adapter-path adapters --json >out || complain "eval --mask-prompt"
"$program" lora $on --model quantised --data data --mask-prompt --test --json >out2 || complain "lora --test --mask-prompt"
same "$(sed -n 's/.*"loss": \(.....\).*/\1/p' out)" "$(sed -n 's/.*"test_loss": \(.....\).*/\1/p' out2)" "answers alone"
same "$(sed -n 's/.*"tokens": \([0-9]*\).*/\1/p' out)" "$(sed -n 's/.*"test_tokens": \([0-9]*\).*/\1/p' out2)" "answers alone"
expect 1 "needs samples with a completion" eval $on --model model --data data --mask-prompt --sequence-length 3
expect 2 "--data is required" eval $on --model model
expect 2 "must" eval $on --model model --data data --sequence-length 4000
expect 0 "top-1 agreement" compare model two --data data --sequence-length 16 --prompt-tokens 32 -m 8 $on
expect 0 '"kl_of_b_to_a"' compare model two --data data --sequence-length 16 --prompt-tokens 32 -m 8 $on --json
expect 2 "B is required" compare model --data data
expect 1 "no such directory" compare model nowhere --data data

[ ! -e no ] || complain "a command that failed left its output"
same "$(find . -name '*.tmp*' -o -name '*.old' | wc -l)" 0 "files left behind"
exit $((failures > 0))
