"""Makes small models and runs mlx-lm's own perplexity, dwq and dynamic_quant on them (README.md: the layout).

    python reference_jobs.py OUTPUT [--only TEXT]

The functions of mlx-lm are called as they are. What they print is rounded, so losses are caught where
dwq adds them up over machines.
"""

import argparse
import contextlib
import copy
import importlib.metadata
import json
import pathlib
import shutil
import time

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx_lm import perplexity
from mlx_lm.quant import dwq, dynamic_quant
from mlx_lm.utils import load_model, quantize_model

import cases
import directories

SIZES = {"num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
MIXTURE = {
    "hidden_size": 64,
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
}
CASES = {
    "qwen3": cases.qwen3(**SIZES, hidden_size=32, intermediate_size=64),
    "qwen3_next": cases.qwen3_next(**{**SIZES, **MIXTURE, "tie_word_embeddings": True}),
}
DWQ = {"bits": 2, "group_size": 32, "learning_rate": 1e-3, "batch_size": 4, "max_tokens": 33, "seed": 123}
DYNAMIC = {"low_bits": 2, "high_bits": 4, "group_size": 32, "length": 16, "batch_size": 4}
PERPLEXITY = {"length": 16, "batch_size": 8}


def samples(random, count, vocabulary):
    """Random walks over the vocabulary, of many lengths."""
    result = []
    for _ in range(count):
        steps = random.integers(-3, 4, random.integers(4, 40))
        result.append(((random.integers(0, vocabulary) + np.cumsum(steps)) % vocabulary).tolist())
    return result


def rows(data, length):
    tokens = sum(data, [])
    return mx.array(tokens[: len(tokens) // length * length]).reshape(-1, length)


@contextlib.contextmanager
def caught_sums(into):
    original = mx.distributed.all_sum

    def note(value, **options):
        into.append(value.item())
        return original(value, **options)

    mx.distributed.all_sum = note
    try:
        yield
    finally:
        mx.distributed.all_sum = original


def run_dwq(model, config, train, valid, others):
    student = copy.deepcopy(model)
    quantize_model(student, copy.deepcopy(config), DWQ["group_size"], DWQ["bits"])
    if not others:  # mlx-lm's own command does not: norms learn with the scales
        student.freeze()
    numbers = []
    start = time.time()
    with caught_sums(numbers):
        dwq.dwq_quantize(
            student,
            lambda batch, index, split: model(batch),
            optimizers.Adam(learning_rate=DWQ["learning_rate"], bias_correction=True),
            [(tokens[: DWQ["max_tokens"]], 0) for tokens in train],
            [(tokens[: DWQ["max_tokens"]], 0) for tokens in valid],
            batch_size=DWQ["batch_size"],
            max_seq_length=DWQ["max_tokens"],
            seed=DWQ["seed"],
            dtype=mx.float32,
        )
    seconds = time.time() - start
    losses, counts = numbers[::2], numbers[1::2]
    each = len(valid) // DWQ["batch_size"]

    def mean(part):
        return float(np.average(losses[part], weights=counts[part]))

    found = {
        **DWQ,
        "losses": losses[each:-each],
        "tokens": counts[each:-each],
        "initial": mean(slice(0, each)),
        "final": mean(slice(-each, None)),
    }
    return found, seconds


def run_dynamic(model, data):
    low, high, group = DYNAMIC["low_bits"], DYNAMIC["high_bits"], DYNAMIC["group_size"]
    found = dynamic_quant.estimate_sensitivities(
        model, rows(data, DYNAMIC["length"]), low, group, high, group, batch_size=DYNAMIC["batch_size"]
    )
    values = dict(found)

    def bits_of(high_ones):
        quantised = copy.deepcopy(model)
        more = {"bits": high, "group_size": group}
        nn.quantize(quantised, group, low, class_predicate=lambda path, m: hasattr(m, "to_quantized")
                    and (more if path in high_ones else True))
        return dynamic_quant.compute_bits_per_weight(quantised)

    least, most = bits_of([]), bits_of(values)
    choices = []
    for part in (0.1, 0.25, 0.4, 0.6, 0.75, 0.9):
        target = least + part * (most - least)
        threshold = dynamic_quant.estimate_threshold(model, values, target, low, group, high, group)
        chosen = sorted(path for path, value in values.items() if value > threshold)
        choices.append({"target": target, "high": chosen, "bits": bits_of(chosen)})
    return {**DYNAMIC, "values": found, "choices": choices}


def write_case(name, config, path):
    case = cases.Case(name, "", config)
    model, config = directories.make_model(case, 1)
    shutil.rmtree(path, ignore_errors=True)
    directories.write_mlx(path, model, config)
    model, _ = load_model(path)
    random = np.random.default_rng(7)
    train, valid = samples(random, 160, 64), samples(random, 16, 64)
    value, error = perplexity.eval_ppl(model, rows(valid, PERPLEXITY["length"]), PERPLEXITY["batch_size"])
    run, seconds = run_dwq(model, config, train, valid, False)
    found = {
        "versions": {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")},
        "train": train,
        "valid": valid,
        "perplexity": {**PERPLEXITY, "value": value, "error": error},
        "dynamic": run_dynamic(model, valid),
        "dwq": run,
        "dwq_others": run_dwq(model, config, train, valid, True)[0],
    }
    with open(path / "jobs.json", "w") as file:
        json.dump(found, file)
        file.write("\n")
    print(f"{name}: perplexity {value:.3f} ± {error:.3f}, dwq {run['initial']:.4f} to {run['final']:.4f}"
          f" in {seconds:.2f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description="What mlx-lm's jobs give, for the parity tests.")
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for name, config in CASES.items():
        if options.only in name:
            write_case(name, config, options.output / name)


if __name__ == "__main__":
    main()
