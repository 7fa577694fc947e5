"""Loads the directories that model_tests saved with mlx-lm, strictly, and compares the logits.

    python reread.py FOLDER
"""

import pathlib
import sys

import mlx.core as mx
from mlx_lm.utils import load_model

# Of the largest logit. In bf16 each side is off from the result in f32, and mlx on a CPU rounds scale times code as well:
# up to 0.12 was seen. That the files are right is shown by the models in f32.
ALLOWED = {mx.float32: 2e-4, mx.bfloat16: 0.2}


def main():
    mx.set_default_device(mx.cpu)
    worst, failed, count = {}, [], 0
    for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
        ours = mx.load(str(path / "ours.safetensors"))
        model, _ = load_model(path)
        logits = model(ours["tokens"])
        kind = logits.dtype
        off = mx.abs(logits.astype(mx.float32) - ours["logits"]).max() / mx.abs(ours["logits"]).max()
        worst[kind] = max(worst.get(kind, 0), off.item())
        count += 1
        if not off.item() <= ALLOWED[kind]:  # NaN too
            failed.append(f"{path.name}: off by {off.item():.2g} of the largest logit")
    print(f"reread: {count} directories, off by at most", {str(k): f"{v:.1g}" for k, v in worst.items()})
    if failed or count == 0:
        sys.exit("\n".join(failed) or "reread: there are no directories")


if __name__ == "__main__":
    main()
