"""Makes model directories with mlx-lm and writes what mlx-lm computes with them (README.md: the layout).

    python reference.py OUTPUT [--golden] [--seeds N] [--only TEXT]

Every result comes from the model as mlx-lm loads it from the directory. A seed with which a choice (an
expert, a greedy token) would hang on rounding is passed over for the next one.
"""

import argparse
import contextlib
import importlib.metadata
import json
import pathlib
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock
from mlx_lm.utils import load_adapters, load_model

import cases
import directories

# A choice counts as clear when the best beats the next by this part of the largest value.
CLEAR_CHOICE = {
    "router": {"float32": 1e-4, "bfloat16": 0.02},
    "greedy": {"float32": 1e-3, "bfloat16": 0.02},
}
# Allowed error over what the last bits of the weights can do (f32) or over mlx-lm's own error (bf16).
TIMES_NOISE = 8
TIMES_OWN_ERROR = 2
SMALLEST_TOLERANCE = 1e-6
# A model that rounding changes by more than this proves little.
LARGEST_TOLERANCE = 1e-3
LARGEST_OWN_ERROR = 0.06
SEEDS_TRIED = 2000


@contextlib.contextmanager
def watched(kind, note):
    """Calls note(module, input, output) whenever a module of this class is called."""
    original = kind.__call__

    def call(self, x, *args, **kwargs):
        y = original(self, x, *args, **kwargs)
        note(self, x, y)
        return y

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


class Routers:
    """Which experts the routers chose, call by call, and how clear the choices were."""

    def __init__(self):
        self.margin = np.inf
        self.chosen = []

    def note(self, block, x, _):
        logits = np.array(block.gate(x).astype(mx.float32)).reshape(-1, block.num_experts)
        order = np.argsort(logits, axis=-1)
        values = np.take_along_axis(logits, order, -1)
        gap = values[:, -block.top_k] - values[:, -block.top_k - 1]
        self.margin = min(self.margin, (gap / np.abs(values).max(-1)).min())
        self.chosen.append(np.sort(order[:, -block.top_k :], axis=-1).tolist())


def forward_results(model, tokens):
    """Logits, loss, and what comes out of each part of the model."""
    layers, final = [], []
    inner = model.model
    with watched(type(inner.layers[0]), lambda _, x, y: layers.append((x, y))):
        with watched(type(inner), lambda _, x, y: final.append(y)):
            logits = model(tokens)
    found = {"logits": logits, "loss": mean_loss(model, tokens)}
    found.update({"hidden.embed": layers[0][0], "hidden.norm": final[0]})
    found.update({f"hidden.{l}": y for l, (_, y) in enumerate(layers)})
    return {name: value.astype(mx.float32) for name, value in found.items()}


def greedy(model, prompt, count):
    """Tokens by mlx-lm's own generation, and by how much each beat the next best."""
    tokens, margins = [], []
    for token, logprobs in generate_step(prompt, model, max_tokens=count):
        values = np.sort(np.array(logprobs.astype(mx.float32)))
        tokens.append(token)
        margins.append((values[-1] - values[-2]) / (values[-1] - values[0]))
    return np.array(tokens, np.int32), np.array(margins, np.float32)


def chunked(model, tokens, split):
    """Logits of the last token when the tokens come in two parts."""
    cache = make_prompt_cache(model)
    model(tokens[:, :split], cache=cache)
    return model(tokens[:, split:], cache=cache)[:, -1]


def mean_loss(model, tokens):
    return nn.losses.cross_entropy(model(tokens[:, :-1]).astype(mx.float32), tokens[:, 1:], reduction="mean")


def gradients(model, tokens):
    """Of every parameter that holds numbers, the scales and biases of quantised ones among them; with adapters of
    these alone.

    The indices of a router are behind a stop_gradient in the mlx-lm that scripts/parity.sh installs;
    an older one fails here, and must not be made to work by gradients of zero.
    """
    weights = numbers(model)
    adapters = {name: value for name, value in weights.items() if name.endswith((".lora_a", ".lora_b"))}
    weights = adapters or weights

    def loss(values):
        model.update(tree_unflatten(list(values.items())))
        return mean_loss(model, tokens)

    _, result = mx.value_and_grad(loss)(weights)
    mx.eval(result)
    model.update(tree_unflatten(list(weights.items())))
    return result


def random_tokens(case, seed):
    random = np.random.default_rng(seed + 500000)
    return mx.array(random.integers(0, case.text["vocab_size"], (case.batch, case.length)).astype(np.int32))


def numbers(model):
    """The parameters that are floating point, by name."""
    return {k: v for k, v in tree_flatten(model.parameters()) if mx.issubdtype(v.dtype, mx.floating)}


@contextlib.contextmanager
def changed(model, change):
    """The model with other parameters, for a while."""
    original = numbers(model)
    model.update(tree_unflatten([(k, change(v)) for k, v in original.items()]))
    try:
        yield model
    finally:
        model.update(tree_unflatten(list(original.items())))


def in_f32(model):
    return changed(model, lambda v: v.astype(mx.float32))


def clear_choices(case, model, tokens):
    """All experts and tokens that were chosen; None if one of the choices was not clear."""
    routers = Routers()
    with watched(Qwen3NextSparseMoeBlock, routers.note), watched(Qwen3MoeSparseMoeBlock, routers.note):
        mx.eval(model(tokens))
        if routers.margin < CLEAR_CHOICE["router"][case.dtype]:
            return None
        ids, margins = greedy(model, tokens[0, : case.length // 2], case.greedy)
    if routers.margin < CLEAR_CHOICE["router"][case.dtype] or margins.min() < CLEAR_CHOICE["greedy"][case.dtype]:
        return None
    return routers.chosen, ids.tolist()


def is_clear(case, model, tokens):
    """Whether no choice hangs on rounding: where that is coarse, f32 must choose the same."""
    choices = clear_choices(case, model, tokens)
    if choices is None or case.dtype == "float32":
        return choices is not None
    with in_f32(model):
        return clear_choices(case, model, tokens) == choices


def results(case, model, tokens):
    found = forward_results(model, tokens)
    split = case.length // 3
    found["chunked.logits"] = chunked(model, tokens, split).astype(mx.float32)
    prompt = tokens[0, : case.length // 2]
    ids, margins = greedy(model, prompt, case.greedy)
    found.update({
        "tokens": tokens,
        "chunked.split": mx.array(split, mx.int32),
        "greedy.prompt": prompt,
        "greedy.tokens": mx.array(ids),
        "greedy.margin": mx.array(margins),
    })
    if case.gradients:
        found.update({f"grad.{name}": value for name, value in gradients(model, tokens).items()})
    if case.dtype != "float32":
        with in_f32(model):
            found.update({f"exact.{name}": value for name, value in forward_results(model, tokens).items()})
    mx.eval(found)
    for name, value in found.items():
        assert bool(mx.all(mx.isfinite(value))), f"{case.name}: {name} is not finite"
    return found


def tolerance(case, model, tokens, found):
    """What another correct program may differ by, as a part of the largest value of each tensor.

    In f32: what comes of moving every weight by at most its last bit. It is measured because it depends on
    the model and the tensor. One that happens to move less than most of its kind gets what these get.
    """
    if case.dtype != "float32":
        return {"own_error": TIMES_OWN_ERROR}
    noise = {}  # kind -> tensor -> change
    for seed in range(3):
        random = np.random.default_rng(seed)

        def moved(weight):
            return weight * mx.array(1 + random.uniform(-(2**-23), 2**-23, weight.shape), mx.float32)

        with changed(model, moved):
            other = forward_results(model, tokens)
            if case.gradients:
                other.update({f"grad.{name}": value for name, value in gradients(model, tokens).items()})
        for name, value in other.items():
            size = mx.abs(found[name]).max().item()
            change = mx.abs(value - found[name]).max().item() / size if size else 0
            of_kind = noise.setdefault(name.split(".")[0], {})
            of_kind[name] = max(of_kind.get(name, 0), change)
    result = {}
    for of_kind in noise.values():
        usual = float(np.median(list(of_kind.values())))
        for name, change in of_kind.items():
            result[name] = float(f"{max(TIMES_NOISE * max(change, usual), SMALLEST_TOLERANCE):.1e}")
    return result


def try_seed(case, seed, path):
    """Writes the model of this seed; returns results and tolerances, or None if another seed must be tried."""
    model, config = directories.make_model(case, seed)
    tokens = random_tokens(case, seed)
    if case.lora is None and not is_clear(case, model, tokens):
        return None
    shutil.rmtree(path, ignore_errors=True)
    write = directories.write_hf if case.hf else directories.write_mlx
    write(path, model, config)
    model, _ = load_model(path)
    if case.lora is not None:
        directories.write_adapters(path / "adapters", load_model(path)[0], case.lora, seed)
        model = load_adapters(model, path / "adapters")
        if not is_clear(case, model, tokens):
            return None
    kinds = {value.dtype for value in numbers(model).values()}
    assert getattr(mx, case.dtype) in kinds, f"{case.name}: must hold {case.dtype}, got {kinds}"
    found = results(case, model, tokens)
    allowed = tolerance(case, model, tokens, found)
    if case.dtype == "float32":
        sharp = max(allowed.values()) <= LARGEST_TOLERANCE
    else:
        error = mx.abs(found["logits"] - found["exact.logits"]).max() / mx.abs(found["exact.logits"]).max()
        sharp = error.item() <= LARGEST_OWN_ERROR
    return (found, allowed) if sharp else None


def write_case(case, path):
    for seed in range(case.seed, case.seed + SEEDS_TRIED):
        outcome = try_seed(case, seed, path)
        if outcome is not None:
            break
    else:
        raise SystemExit(f"{case.name}: none of {SEEDS_TRIED} seeds will do")
    found, allowed = outcome
    mx.save_safetensors(str(path / "reference.safetensors"), found)
    about = {
        "about": case.about,
        "dtype": case.dtype,
        "format": "hf" if case.hf else "mlx",
        "gradients": case.gradients,
        "seed": seed,
        "tolerance": allowed,
        "versions": {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")},
    }
    with open(path / "case.json", "w") as file:
        json.dump(about, file, indent=2, sort_keys=True)
        file.write("\n")
    print(f"{case.name}: seed {seed}, loss {found['loss'].item():.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Reference results of mlx-lm for the parity tests.")
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--golden", action="store_true", help="the small cases that are kept in the tree")
    parser.add_argument("--seeds", type=int, default=3, help="models of each case")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    chosen = cases.golden() if options.golden else cases.full(options.seeds)
    for case in chosen:
        if options.only in case.name:
            write_case(case, options.output / case.name)


if __name__ == "__main__":
    main()
