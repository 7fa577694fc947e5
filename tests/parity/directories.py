"""Random models of mlx-lm, and the directories they are saved to."""

import copy
import json
import re

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes, quantize_model, save_config, save_model

# Norms that a Hugging Face model stores less 1.
ZERO_CENTRED = re.compile(r"(input_layernorm|post_attention_layernorm|model\.norm|q_norm|k_norm)\.weight$")
# Families whose norms and names Hugging Face has as MLX has them.
NORMS_AS_THEY_ARE = ("qwen3_moe",)


def random_weight(random, name, shape):
    """Numbers of the size that trained models have, so that no part of a layer is lost in another."""
    leaf = name.split(".")[-1]
    if leaf == "A_log":
        return np.log(random.uniform(1, 16, shape))
    if leaf == "dt_bias":  # steps from 0.01 to 0.3, before softplus
        return np.log(np.expm1(np.exp(random.uniform(np.log(0.01), np.log(0.3), shape))))
    if leaf == "bias":
        return random.normal(0, 0.2, shape)
    if len(shape) == 1:
        return random.uniform(0.8, 1.2, shape)
    if "conv1d" in name:  # so small that the eps in the norms of q and k behind it shows in the results
        return random.normal(0, 0.15, shape)
    if "embed_tokens" in name or "lm_head" in name or name.endswith("mlp.gate.weight"):
        return random.normal(0, 2 / np.sqrt(shape[1]), shape)
    return random.normal(0, 1 / np.sqrt(shape[-1]), shape)


def write_adapters(path, model, lora, seed):
    """Adapters of the model's own modules, all with numbers of the size that training leads to, as mlx-lm saves them.
    The model has them afterwards."""
    parameters = {"dropout": 0.0, **{key: value for key, value in lora.items() if key != "num_layers"}}
    linear_to_lora_layers(model, lora["num_layers"], parameters)
    random = np.random.default_rng(seed + 700000)
    adapters = {}
    for name, value in sorted(tree_flatten(model.parameters())):
        if name.endswith(".lora_a"):
            size = value.shape[-1] if value.ndim == 3 else value.shape[0]
            adapters[name] = random.normal(0, 1 / np.sqrt(size), value.shape)
        elif name.endswith(".lora_b"):  # so that what is added is about a fifth of what is there
            adapters[name] = random.normal(0, 0.2 / (lora["scale"] * np.sqrt(lora["rank"])), value.shape)
    adapters = {name: mx.array(value.astype(np.float32)) for name, value in adapters.items()}
    path.mkdir(parents=True)
    mx.save_safetensors(str(path / "adapters.safetensors"), adapters)
    config = {"fine_tune_type": "lora", "num_layers": lora["num_layers"], "lora_parameters": parameters}
    with open(path / "adapter_config.json", "w") as file:
        json.dump(config, file, indent=4)


def leave_one_out(router, k):
    """Changes a router's weight so that the last expert is never among the k best: its logit is 0, and of the
    first 2k experts, whose logits are pairs of opposite sign, k are above that."""
    if len(router) > 2 * k:
        router[k : 2 * k] = -router[:k]
        router[-1] = 0


def make_model(case, seed):
    """The model and its config.json. The numbers depend on the case and the seed alone."""
    config = copy.deepcopy(case.config)
    kind, arguments = _get_classes(config)
    model = kind(arguments.from_dict(copy.deepcopy(config)))
    random = np.random.default_rng(seed)
    weights = {
        name: random_weight(random, name, value.shape).astype(np.float32)
        for name, value in sorted(tree_flatten(model.parameters()))
    }
    for name, value in weights.items():
        if name.endswith("layers.0.mlp.gate.weight"):
            leave_one_out(value, case.text["num_experts_per_tok"])
    model.update(tree_unflatten([(name, mx.array(value)) for name, value in weights.items()]))
    if case.dtype != "float32":
        # As mlx-lm converts: a model may ask to keep some parameters as they are.
        casts = getattr(model, "cast_predicate", lambda _: True)
        dtype = getattr(mx, case.dtype)
        model.update(tree_map_with_path(lambda k, v: v.astype(dtype) if casts(k) else v, model.parameters()))
    if case.bits:
        model, config = quantized(case, model, config)
    model.eval()
    return model, config


def quantized(case, model, config):
    left = {}

    def choose(path, module):
        for end, choice in case.overrides.items():
            if path.endswith(end):
                if choice is False:
                    left[path] = False
                return choice if choice is False else dict(choice)
        return True

    predicate = choose if case.overrides is not None else None
    model, config = quantize_model(model, config, case.group_size, case.bits, quant_predicate=predicate)
    config["quantization"].update(left)
    return model, config


def write_mlx(path, model, config):
    save_model(path, model)
    save_config(copy.deepcopy(config), path / "config.json")


def hf_weights(config, weights):
    """The names and layouts in which Hugging Face publishes such a model."""
    result = {}
    for name, value in weights.items():
        if "conv1d.weight" in name:
            value = value.moveaxis(1, 2)  # [C, K, 1] -> [C, 1, K]
        if ZERO_CENTRED.search(name) and config["model_type"] not in NORMS_AS_THEY_ARE:
            value = value - 1.0
        name = name.replace("language_model.model.", "model.language_model.")
        name = name.replace("language_model.lm_head.", "lm_head.")
        result[name] = value
    for name in [n for n in result if ".switch_mlp.gate_proj." in n]:
        mlp = name.split(".switch_mlp.")[0]
        parts = {p: result.pop(f"{mlp}.switch_mlp.{p}_proj.weight") for p in ("gate", "up", "down")}
        if config["model_type"] in ("qwen3_next", "qwen3_moe"):
            for p, value in parts.items():
                for e, expert in enumerate(value):
                    result[f"{mlp}.experts.{e}.{p}_proj.weight"] = expert
        else:
            result[f"{mlp}.experts.gate_up_proj"] = mx.concatenate([parts["gate"], parts["up"]], axis=1)
            result[f"{mlp}.experts.down_proj"] = parts["down"]
    if config["model_type"] in NORMS_AS_THEY_ARE:
        return result
    # What a reader must leave out: the head that predicts several tokens, and the eyes.
    result["mtp.norm.weight"] = mx.ones(4)
    if config["model_type"] != "qwen3_next":
        result["model.visual.merger.norm.weight"] = mx.ones(4)
    return result


def write_hf(path, model, config):
    """In two files, with an index, as large models come."""
    config = copy.deepcopy(config)
    text = config.get("text_config", config)
    if "full_attention_interval" in text:
        interval = text["full_attention_interval"]
        text["layer_types"] = [
            "linear_attention" if (l + 1) % interval else "full_attention" for l in range(text["num_hidden_layers"])
        ]
    path.mkdir(parents=True, exist_ok=True)
    with open(path / "config.json", "w") as file:
        json.dump(config, file, indent=2)
        file.write("\n")
    weights = hf_weights(config, dict(tree_flatten(model.parameters())))
    names = sorted(weights)
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": {}}
    for part, chosen in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{part:05}-of-00002.safetensors"
        mx.save_safetensors(str(path / file), {n: weights[n] for n in chosen}, metadata={"format": "pt"})
        index["weight_map"].update({n: file for n in chosen})
    with open(path / "model.safetensors.index.json", "w") as file:
        json.dump(index, file, indent=2, sort_keys=True)
        file.write("\n")
