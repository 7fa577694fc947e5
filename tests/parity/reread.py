"""Loads the directories that model_tests saved with mlx-lm, strictly, their adapters too, and compares the logits.

    python reread.py FOLDER
"""

import pathlib
import sys

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_adapters, load_model

# In f32, of the largest logit. In bf16, as in the parity tests: as a multiple of what mlx-lm's own result is off from
# the same weights computed in f32.
ALLOWED_F32 = 2e-4
OWN_ERROR = 2


def largest(x):
    return mx.abs(x).max().item()


def in_f32(model, tokens):
    wide = [
        (name, value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value)
        for name, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(wide))
    return model(tokens)


def main():
    mx.set_default_device(mx.cpu)
    worst, failed, count = {}, [], 0
    for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
        ours = mx.load(str(path / "ours.safetensors"))
        model, _ = load_model(path)
        if (path / "adapters").exists():
            model = load_adapters(model, path / "adapters")
        logits = model(ours["tokens"])
        kind = logits.dtype
        if kind == mx.float32:
            part = largest(logits - ours["logits"]) / largest(logits) / ALLOWED_F32
        else:
            exact = in_f32(model, ours["tokens"])
            own = largest(logits.astype(mx.float32) - exact)
            part = largest(ours["logits"] - exact) / own / OWN_ERROR
        worst[kind] = max(worst.get(kind, 0), part)
        count += 1
        if not part <= 1:  # NaN too
            failed.append(f"{path.name}: {part:.2g} of what is allowed")
    print(f"reread: {count} directories, of what is allowed at most", {str(k): f"{v:.2g}" for k, v in worst.items()})
    if failed or count == 0:
        sys.exit("\n".join(failed) or "reread: there are no directories")


if __name__ == "__main__":
    main()
