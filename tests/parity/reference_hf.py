"""Runs transformers on the directories in its format and writes what it computes beside what mlx-lm did.

    python reference_hf.py MODELS      needs torch and transformers

Adds NAME/reference_hf.safetensors with logits [B, L, V] and loss, and prints how far mlx-lm is from them.
Fails if transformers misses or does not know a weight, or if the two disagree: then a directory is not
what transformers would load, and nothing that is checked with it counts.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

LARGEST_DIFFERENCE = 1e-4  # as a part of the largest logit


def compare(path):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise SystemExit(f"{path.name}: {kind}: {sorted(report[kind])}")
    reference = load_file(path / "reference.safetensors")
    tokens = reference["tokens"].long()
    with torch.no_grad():
        logits = model.eval()(tokens, use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    save_file({"logits": logits.contiguous(), "loss": loss}, path / "reference_hf.safetensors")
    difference = ((logits - reference["logits"]).abs().max() / logits.abs().max()).item()
    print(f"{path.name}: mlx-lm and transformers differ by {difference:.1e} of the largest logit")
    return difference


def main():
    models = pathlib.Path(sys.argv[1])
    found = [file.parent for file in sorted(models.glob("*/case.json")) if json.load(open(file))["format"] == "hf"]
    if not found:
        raise SystemExit(f"{models}: no directory in Hugging Face format")
    worst = max([compare(path) for path in found])
    if worst > LARGEST_DIFFERENCE:
        raise SystemExit(f"the largest difference is {worst:.1e}, at most {LARGEST_DIFFERENCE:.0e} was expected")


if __name__ == "__main__":
    main()
