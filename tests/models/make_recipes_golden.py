"""Writes golden/recipes.json: which layers mlx-lm's mixed recipes give more bits to. Needs mlx-lm.

    python make_recipes_golden.py
"""

import importlib
import json
from pathlib import Path

convert = importlib.import_module("mlx_lm.convert")


class Layers:
    """A model as the recipes look at one: its layers, and the names of its modules."""

    def __init__(self, count):
        self.layers = [None] * count

    def named_modules(self):
        return [("model.layers.0.mlp.down_proj", None)]


def bits(recipe, count, path):
    return convert.mixed_quant_predicate_builder(recipe, Layers(count), 64)(path, None)["bits"]


recipes = {
    name: {
        path: bits(name, 8, path)
        for path in [
            "lm_head",
            "model.embed_tokens",
            "model.layers.1.self_attn.v_proj",
            "model.layers.3.self_attn.v_proj",
            "model.layers.7.self_attn.k_proj",
            "model.layers.7.mlp.switch_mlp.down_proj",
            "model.layers.7.mlp.shared_expert.down_proj",
            "model.layers.7.mlp.switch_mlp.up_proj",
            "model.layers.7.linear_attn.in_proj_qkvz",
        ]
    }
    for name in convert.QUANT_RECIPES
}
matters = {
    str(count): "".join(
        "1" if bits("mixed_3_6", count, f"model.layers.{i}.mlp.down_proj") == 6 else "0"
        for i in range(count)
    )
    for count in [1, 2, 3, 4, 7, 8, 9, 15, 16, 24, 28, 36, 40, 48, 61, 64]
}
text = json.dumps({"layers that matter": matters, "bits of 8 layers": recipes}, indent=1)
(Path(__file__).parent / "golden" / "recipes.json").write_text(text + "\n")
