"""Times steps of `mlxtape lora` and `mlxtape dwq` beside mlx-lm's own on this machine's CPU, in turns.

    python tuning.py PROGRAM [--tokens N ...] [--models NAME ...] [--steps N] [--rounds N] [--out FILE]

Needs mlx-lm with MLX's CPU build. Two small models with random weights in float32, the type that MLX is
fastest in on a CPU: a Qwen3 and a Qwen3-Next. Each side runs in a process of its own: of its steps the first
is left out, the median of the others counts; memory is the most that the process had in RAM, less what it
has when it has only started (an interpreter, a program).
"""

import argparse
import copy
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 768,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
MODELS = {
    "qwen3": {**SHARED, "model_type": "qwen3", "vocab_size": 16384},
    "qwen3_next": {
        **SHARED,
        "model_type": "qwen3_next",
        "vocab_size": 256,
        "decoder_sparse_step": 1,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "partial_rotary_factor": 0.5,
        "shared_expert_intermediate_size": 64,
    },
}
JOBS = ("lora", "dwq")
BITS, GROUP, RATE = 4, 32, 1e-5


def run(command, **options):
    """The command's standard output, and the most KiB that it had in RAM."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{command}: exit code {process.returncode}\n{text}")
    return text, usage.ru_maxrss


def prepare(folder, name, tokens, steps, program):
    """A model of random weights and as many samples as steps, each longer than tokens."""
    place = folder / f"{name}-{tokens}"
    (place / "data").mkdir(parents=True)
    scratch = place / "scratch"
    scratch.mkdir()
    (scratch / "config.json").write_text(json.dumps(MODELS[name]))
    shutil.copy(ROOT / "examples/bytes/tokenizer.json", scratch)
    words = "a model learns to say what is likely to come next "
    for part, count in (("train", steps), ("valid", 1)):
        lines = [json.dumps({"text": (f"{i} {words}" * (tokens // 40 + 2))[: tokens + 8]}) for i in range(count)]
        (place / "data" / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    run([program, "train", "--device", "cpu", "--config", scratch / "config.json", "--from-scratch", "--data",
         place / "data", "--out", place / "model", "--iters", "1", "--batch-size", "1", "--max-seq-length", "32", "--quiet"])
    return place


def ours(place, job, tokens, steps, program):
    common = ["--device", "cpu", "--json", "--quiet", "--model", place / "model", "--batch-size", "1",
              "--max-seq-length", str(tokens + 1), "--learning-rate", str(RATE), "--steps-per-report", "1", "--force"]
    if job == "lora":
        command = ["lora", *common, "--train", "--data", place / "data", "--iters", str(steps), "--val-batches", "0",
                   "--adapter-path", place / "adapters"]
    else:
        command = ["dwq", *common, "--bits", str(BITS), "--group-size", str(GROUP), "--data-path", place / "data",
                   "--num-samples", str(steps), "--mlx-path", place / "student"]
    text, peak = run([program, *command])
    found = json.loads(text)
    return {"seconds": [tokens / report["tokens_per_second"] for report in found["reports"]], "peak": peak * 1024}


def mlx_side(place, job, tokens, steps):
    """Runs in a process of its own; prints seconds of each step."""
    import mlx.core as mx
    import mlx.optimizers as optimizers
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, config = load_model(place / "model")
    data = [json.loads(line)["text"] for line in (place / "data/train.jsonl").read_text().splitlines()]
    samples = [(list(text.encode())[: tokens + 1], 0) for text in data]
    moments = []
    if job == "lora":
        from mlx_lm.tuner.trainer import TrainingArgs, TrainingCallback, train
        from mlx_lm.tuner.utils import linear_to_lora_layers

        class Times(TrainingCallback):
            def on_train_loss_report(self, info):
                moments.append(1 / info["iterations_per_second"])

        model.freeze()
        linear_to_lora_layers(model, len(model.layers), {"rank": 8, "scale": 20.0, "dropout": 0.0})
        arguments = TrainingArgs(batch_size=1, iters=steps, val_batches=0, steps_per_report=1, steps_per_eval=10**9,
                                 steps_per_save=10**9, max_seq_length=tokens + 1,
                                 adapter_file=place / "mlx_adapters.safetensors")
        train(model, optimizers.Adam(learning_rate=RATE), samples, None, arguments, training_callback=Times())
    else:
        from mlx_lm.quant import dwq
        from mlx_lm.utils import quantize_model

        student = copy.deepcopy(model)
        quantize_model(student, config, GROUP, BITS)
        student.freeze()
        starts = []

        def target(batch, index, split):
            if split == "train":
                starts.append(time.perf_counter())
            return model(batch)

        original = mx.distributed.all_sum

        def note(value, **options):  # called twice at the end of each step
            moments.append((time.perf_counter(), len(starts)))
            return original(value, **options)

        mx.distributed.all_sum = note
        dwq.dwq_quantize(student, target, optimizers.Adam(learning_rate=RATE, bias_correction=True), samples,
                         samples[:1], batch_size=1, max_seq_length=tokens + 1, seed=123, dtype=mx.float32)
        ends = {}
        for moment, step in moments:
            if step > 0:
                ends.setdefault(step, moment)
        moments = [ends[i + 1] - start for i, start in enumerate(starts)]
    print("\n" + json.dumps({"seconds": moments, "allocated": mx.get_peak_memory()}))


def theirs(place, job, tokens, steps):
    text, peak = run([sys.executable, __file__, "--mlx", place, "--job", job, "--tokens", str(tokens), "--steps",
                      str(steps)], stderr=subprocess.DEVNULL)
    return {**json.loads(text.splitlines()[-1]), "peak": peak * 1024}


def idle_bytes(program):
    _, ours_idle = run([program, "--version"])
    _, mlx_idle = run([sys.executable, "-c", "import mlx.core, mlx_lm.tuner.trainer, mlx_lm.quant.dwq"],
                      stderr=subprocess.DEVNULL)
    return ours_idle * 1024, mlx_idle * 1024


def typical(runs):
    return statistics.median(seconds for one in runs for seconds in one["seconds"][1:])


def measure(options):
    program = pathlib.Path(options.program).resolve()
    idle = idle_bytes(program)
    rows = []
    print(f"{'model':<11} {'job':<5} {'tokens':>6}  {'mlxtape':>9} {'mlx-lm':>9} {'ratio':>6}"
          f"  {'mlxtape':>9} {'mlx-lm':>9} {'share':>6}")
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.models:
            for tokens in options.tokens:
                place = prepare(pathlib.Path(temporary), name, tokens, options.steps, program)
                for job in JOBS:
                    a, b = [], []
                    for _ in range(options.rounds):
                        a.append(ours(place, job, tokens, options.steps, program))
                        b.append(theirs(place, job, tokens, options.steps))
                    row = {"model": name, "job": job, "tokens": tokens, "seconds": [typical(a), typical(b)],
                           "bytes": [max(one["peak"] for one in side) - started for side, started in zip((a, b), idle)],
                           "mlx_allocated": max(one["allocated"] for one in b)}
                    rows.append(row)
                    s, m = row["seconds"], row["bytes"]
                    print(f"{name:<11} {job:<5} {tokens:>6}  {s[0]:>7.3f} s {s[1]:>7.3f} s {s[1] / s[0]:>6.1f}"
                          f"  {m[0] / 2**20:>5.0f} MiB {m[1] / 2**20:>5.0f} MiB {m[0] / m[1]:>6.3f}", flush=True)
    if options.out:
        text = json.dumps({"machine": platform.processor() or platform.machine(), "rows": rows}, indent=1)
        pathlib.Path(options.out).write_text(text + "\n")


def main():
    parser = argparse.ArgumentParser(description="Steps of lora and dwq beside mlx-lm's.")
    parser.add_argument("program", nargs="?", help="the mlxtape program")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out")
    parser.add_argument("--mlx", type=pathlib.Path, help=argparse.SUPPRESS)  # the other side's process
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mlx:
        mlx_side(options.mlx, options.job, options.tokens[0], options.steps)
    elif options.program:
        measure(options)
    else:
        parser.error("which mlxtape?")


if __name__ == "__main__":
    main()
