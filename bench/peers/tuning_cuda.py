"""Times steps of `mlxtape lora`, `dwq` and `train` on a GPU, and beside them PyTorch's of the same Qwen3.

    python tuning_cuda.py PROGRAM [--steps N] [--out FILE]

Random weights in bfloat16 of a Qwen3 with the sizes of Qwen3-0.6B and of a Qwen3-Next with 64 experts; four texts of
2048 tokens a step. A side's time is the median of its steps without the first four, its memory the most that was allocated.
PyTorch, where it is there: transformers' Qwen3 with its attention by scaled_dot_product_attention, fused AdamW, adapters
of rank 8 beside every projection; as it is and compiled.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BATCH, TOKENS, RANK, SCALE, RATE = 4, 2048, 8, 20.0, 1e-5
SHARED = {
    "hidden_size": 1024,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3 = {
    **SHARED,
    "head_dim": 128,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
}
MODELS = {
    "Qwen3, 0.6 B": {**QWEN3, "model_type": "qwen3", "torch_dtype": "bfloat16"},
    "Qwen3-Next, 1.5 B": {
        **SHARED,
        "model_type": "qwen3_next",
        "torch_dtype": "bfloat16",
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "intermediate_size": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 8,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 12,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "shared_expert_intermediate_size": 512,
    },
}


def run(program, *arguments):
    done = subprocess.run([program, *map(str, arguments), "--quiet", "--force"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{arguments}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def prepare(place, config, program, steps):
    """A model of random weights, plain and in 4 bits, and as many texts as the steps take."""
    scratch, data = place / "scratch", place / "data"
    scratch.mkdir(parents=True)
    data.mkdir()
    (scratch / "config.json").write_text(json.dumps(config))
    shutil.copy(ROOT / "examples/bytes/tokenizer.json", scratch)
    words = "a model learns to say what is likely to come next "
    for part, count in (("train", steps * BATCH), ("valid", BATCH)):
        texts = [(f"{i} {words}" * (TOKENS // 40 + 2))[: TOKENS + 8] for i in range(count)]
        (data / f"{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(program, "train", "--device", "cuda", "--config", scratch / "config.json", "--from-scratch", "--data", data,
        "--out", place / "plain", "--iters", 1, "--batch-size", 1, "--max-seq-length", 32, "--val-batches", 0)
    run(program, "quantize", "--model", place / "plain", "--mlx-path", place / "quantised", "--q-bits", 4)


def ours(place, program, steps):
    """(job, seconds of a step in the mean of four at a time, bytes) of each job: a report of each step would wait for it."""
    data = place / "data"
    common = ["--device", "cuda", "--json", "--batch-size", BATCH, "--max-seq-length", TOKENS + 1,
              "--learning-rate", RATE, "--steps-per-report", 4, "--save-every", 0]
    learn = ["--data", data, "--iters", steps, "--val-batches", 0]
    jobs = {
        "lora": ["lora", "--train", "--model", place / "plain", *learn, "--num-layers", -1, "--adapter-path", place / "a"],
        "lora, 4 bits": ["lora", "--train", "--model", place / "quantised", *learn, "--num-layers", -1, "--adapter-path", place / "b"],
        "dwq, 4 bits": ["dwq", "--model", place / "plain", "--data-path", data, "--num-samples", steps * BATCH,
                        "--mlx-path", place / "student"],
        "train": ["train", "--model", place / "plain", *learn, "--out", place / "trained"],
    }
    for job, arguments in jobs.items():
        found = json.loads(run(program, *arguments, *common))
        seconds = [BATCH * TOKENS / report["tokens_per_second"] for report in found["reports"]]
        yield job, seconds, found["peak_memory_bytes"]


def with_adapters(model):
    import torch

    class Adapted(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            start = torch.randn(RANK, base.in_features, dtype=torch.float32, device="cuda")
            self.a = torch.nn.Parameter(start / base.in_features**0.5)
            self.b = torch.nn.Parameter(torch.zeros(base.out_features, RANK, dtype=torch.float32, device="cuda"))

        def forward(self, x):
            return self.base(x) + SCALE * ((x @ self.a.to(x.dtype).T) @ self.b.to(x.dtype).T)

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, Adapted(child))
    return model


def theirs(steps):
    """(job, side, steps' seconds, bytes) of PyTorch's."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    config = Qwen3Config(**QWEN3, attn_implementation="sdpa")
    for job in ("lora", "train"):
        model = Qwen3ForCausalLM(config).cuda().train()
        if job == "lora":
            model = with_adapters(model)
        for side in ("PyTorch", "PyTorch, compiled"):
            called = torch.compile(model) if side != "PyTorch" else model
            learned = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(learned, lr=RATE, fused=True)
            ids = torch.randint(0, 256, (BATCH, TOKENS), device="cuda")
            torch.cuda.reset_peak_memory_stats()
            seconds = []
            for _ in range(steps):
                torch.cuda.synchronize()
                start = time.perf_counter()
                loss = called(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loss.item()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
            yield job, side, seconds, torch.cuda.max_memory_allocated()
            del called, optimizer, loss
            torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description="Steps of lora, dwq and train on a GPU.")
    parser.add_argument("program", type=pathlib.Path, help="the mlxtape program")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    program = options.program.resolve()
    rows = []

    def add(model, job, side, seconds, peak):
        rows.append({"model": model, "job": job, "side": side, "ms": 1e3 * statistics.median(seconds),
                     "peak_bytes": peak})
        row = rows[-1]
        print(f"{model:<18} {job:<13} {side:<18} {row['ms']:>7.1f} ms {BATCH * TOKENS / row['ms']:>6.1f} thousand tokens/s"
              f" {peak / 2**30:>6.2f} GiB", flush=True)
        if options.out:
            options.out.write_text(json.dumps({"batch": BATCH, "tokens": TOKENS, "rows": rows}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        for model, config in MODELS.items():
            place = pathlib.Path(temporary) / config["model_type"]
            prepare(place, config, program, options.steps)
            for job, seconds, peak in ours(place, program, options.steps):
                add(model, job, "mlxtape", seconds[1:], peak)
    try:
        import transformers  # noqa: F401
    except ImportError:
        print("no transformers here, so nothing to compare with")
        return
    for job, side, seconds, peak in theirs(options.steps):
        add("Qwen3, 0.6 B", job, side, seconds[4:], peak)


if __name__ == "__main__":
    main()
