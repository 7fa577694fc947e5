"""The cases of the parity suite: which models are made, and what is computed with each.

`full()` are the cases of `make parity`, each with several seeds. `golden()` are small ones, one of each
kind, whose directories are kept in tests/parity/golden.
"""

import dataclasses


@dataclasses.dataclass
class Case:
    name: str
    about: str
    config: dict  # config.json, before anything about quantisation is added
    batch: int = 2
    length: int = 33
    dtype: str = "float32"
    gradients: bool = True
    greedy: int = 64  # tokens to generate
    hf: bool = False  # the directory is as Hugging Face has it, not as mlx-lm saves it
    bits: int = 0  # of the quantised weights; 0: none are
    group_size: int = 32
    # End of a module's path -> its own quantisation, or False. None: mlx-lm's own choice for the model.
    overrides: dict | None = None
    # LoRA: num_layers, rank, scale and, if not mlx-lm's own choice, keys. None: the model is as it is.
    lora: dict | None = None
    seed: int = 1

    @property
    def text(self):
        """The part of the configuration that describes the language model."""
        return self.config.get("text_config", self.config)


COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}
# Sizes that differ wherever two could be mistaken for each other.
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MROPE = {**ROPE, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}


def qwen3_next(**other):
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    kind = {"model_type": "qwen3_next", "mlp_only_layers": [], "norm_topk_prob": True}
    return {**COMMON, **LINEAR, **EXPERTS, **rope, **kind, "tie_word_embeddings": False, **other}


def qwen3_5(**other):
    kind = {"model_type": "qwen3_5", "rope_parameters": ROPE, "tie_word_embeddings": False}
    return {**COMMON, **LINEAR, **kind, **other}


def nested(config, **outside):
    """The text model inside a `text_config`, as the published models have it."""
    kind = config["model_type"]
    text = {**config, "model_type": kind + "_text"}
    return {"model_type": kind, "text_config": text, **outside}


def qwen3_5_moe(**other):
    config = {**qwen3_5(rope_parameters=MROPE), **EXPERTS, "model_type": "qwen3_5_moe"}
    return nested({**config, "norm_topk_prob": True, **other}, tie_word_embeddings=False)


def qwen3(**other):
    kind = {"model_type": "qwen3", "rope_theta": 10000.0, "tie_word_embeddings": True}
    return {**COMMON, **kind, **other}


def llama(**other):
    kind = {"model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": True}
    return {**COMMON, **kind, **other}


def qwen2(**other):
    kind = {"model_type": "qwen2", "rope_theta": 10000.0, "tie_word_embeddings": True}
    config = {**COMMON, **kind, **other}
    del config["head_dim"]  # which it is not asked for: the width over the number of heads
    return config


def qwen3_moe(**other):
    kind = {"model_type": "qwen3_moe", "mlp_only_layers": [], "norm_topk_prob": True, "rope_theta": 10000.0}
    config = {**COMMON, **EXPERTS, **kind, "tie_word_embeddings": False, **other}
    del config["shared_expert_intermediate_size"]
    return config


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
# Two layers, the first with a window that every prompt of the suite is longer than.
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
BIASES = {"attention_bias": True, "mlp_bias": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# The router of a mixture in 8 bits, one projection as it was.
OVERRIDES = {
    "mlp.gate": {"group_size": 32, "bits": 8},
    "layers.1.mlp.shared_expert.up_proj": False,
}
# In bf16 a choice that hangs on the last bits says nothing, so these are short: there are fewer choices.
SHORT = {"length": 12, "greedy": 8, "gradients": False, "dtype": "bfloat16"}
TWO_LAYERS = {"num_hidden_layers": 2, "full_attention_interval": 2}
EVERY = {"num_layers": -1, "rank": 4, "scale": 2.0}
FEW_CHOICES = {**TWO_LAYERS, "num_experts": 4, "num_experts_per_tok": 2}


def full(seeds):
    cases = [
        Case("qwen3_next", "mixture in every layer, untied head", qwen3_next(), length=77),
        Case("qwen3_next_scores", "scores of the experts not normalised", qwen3_next(norm_topk_prob=False)),
        Case("qwen3_next_bias", "attention with biases, tied head",
             qwen3_next(attention_bias=True, tie_word_embeddings=True)),
        Case("qwen3_next_sparse", "mixture in some layers only",
             qwen3_next(mlp_only_layers=[1], decoder_sparse_step=2)),
        Case("qwen3_5", "dense, tied head, flat configuration", qwen3_5(tie_word_embeddings=True), length=77),
        Case("qwen3_5_nested", "dense, untied head, text_config", nested(qwen3_5())),
        Case("qwen3_5_moe", "mixture, text_config, mrope sections", qwen3_5_moe()),
        Case("qwen3", "plain attention, tied head", qwen3()),
        Case("qwen3_untied", "plain attention, untied head", qwen3(tie_word_embeddings=False)),
        Case("qwen3_linear", "positions scaled linearly",
             qwen3(rope_scaling={"rope_type": "linear", "factor": 2.0})),
        Case("qwen3_yarn", "positions scaled by yarn", qwen3(rope_scaling=YARN), length=77),
        Case("qwen3_5_bf16", "dense in bf16", nested(qwen3_5(**TWO_LAYERS)), **SHORT),
        # On the CPU mlx multiplies by chosen experts in f32 alone, unless they are quantised.
        Case("qwen3_next_q8_bf16", "mixture in bf16, 8 bits", qwen3_next(**FEW_CHOICES), bits=8,
             **{**SHORT, "batch": 1, "length": 9, "greedy": 4}),
        Case("qwen3_5_q4_bf16", "dense in bf16, 4 bits", nested(qwen3_5(**TWO_LAYERS)), bits=4,
             **{**SHORT, "batch": 1, "greedy": 4}),
        Case("qwen3_next_q4", "4 bits, some modules otherwise", qwen3_next(), bits=4, overrides=OVERRIDES),
        Case("qwen3_5_moe_q4", "4 bits, groups of 64", qwen3_5_moe(), bits=4, group_size=64),
        Case("qwen3_q4", "4 bits, the tied head too", qwen3(), bits=4),
        Case("hf_qwen3_next", "Hugging Face names, one tensor per expert", qwen3_next(), hf=True),
        Case("hf_qwen3_5", "Hugging Face names", nested(qwen3_5(rope_parameters=MROPE)), hf=True),
        Case("hf_qwen3_5_moe", "Hugging Face names, experts in one tensor", qwen3_5_moe(), hf=True),
    ]
    cases += [
        Case("llama", "tied head", llama(), length=77),
        Case("llama_biases", "biases of every projection, untied head", llama(tie_word_embeddings=False, **BIASES)),
        Case("llama_llama3", "positions scaled as Llama 3's", llama(rope_scaling=LLAMA3), length=77),
        Case("llama_linear", "positions scaled linearly",
             llama(rope_scaling={"rope_type": "linear", "factor": 2.0})),
        Case("llama_yarn", "positions scaled by yarn", llama(rope_scaling=YARN), length=77),
        Case("llama_traditional", "neighbouring channels rotated", llama(rope_traditional=True)),
        Case("llama_windows", "windows in half of the layers",
             llama(**{**WINDOWS, "layer_types": WINDOWS["layer_types"] * 2}), length=77),
        Case("llama_q4", "4 bits, beside biases", llama(**BIASES), bits=4),
        Case("llama_bf16", "in bf16", llama(**{**TWO_LAYERS, **BIASES}), **SHORT),
        Case("smollm3", "a layer without positions", {**llama(), "model_type": "smollm3"}),
        Case("qwen2", "biases of queries, keys and values", qwen2()),
        Case("qwen2_untied", "untied head", qwen2(tie_word_embeddings=False)),
        Case("qwen2_q4", "4 bits, beside biases", qwen2(), bits=4),
        Case("qwen3_moe", "mixture without a shared expert", qwen3_moe(), length=77),
        Case("qwen3_moe_sparse", "mixture in some layers only, scores not normalised",
             qwen3_moe(mlp_only_layers=[1], decoder_sparse_step=2, norm_topk_prob=False)),
        Case("qwen3_moe_q4", "4 bits", qwen3_moe(), bits=4),
        Case("hf_qwen3_moe", "Hugging Face names, one tensor per expert", qwen3_moe(), hf=True),
        Case("lora_llama", "adapters beside biases", llama(**BIASES), lora=EVERY),
        Case("lora_qwen2_q4", "adapters beside biases and 4 bits", qwen2(), bits=4, lora=EVERY),
        Case("lora_qwen3_moe", "adapters, mixture without a shared expert", qwen3_moe(), lora=EVERY),
        Case("lora_qwen3", "adapters, plain attention", qwen3(), lora=EVERY),
        Case("lora_qwen3_q4", "adapters beside 4 bits", qwen3(), bits=4, lora=EVERY),
        Case("lora_qwen3_head", "adapters of the head and of some modules of the last layers",
             qwen3(tie_word_embeddings=False),
             lora={"num_layers": 2, "rank": 8, "scale": 1.0,
                   "keys": ["self_attn.q_proj", "mlp.down_proj", "lm_head", "model.layers.0.self_attn.o_proj"]}),
        Case("lora_qwen3_next", "adapters, experts and routers among them", qwen3_next(), length=77, lora=EVERY),
        Case("lora_qwen3_next_bias", "adapters beside biases",
             qwen3_next(attention_bias=True, tie_word_embeddings=True), lora=EVERY),
        Case("lora_qwen3_next_q4", "adapters beside 4 bits, some modules otherwise", qwen3_next(), bits=4,
             overrides=OVERRIDES, lora=EVERY),
        Case("lora_qwen3_5", "adapters, dense", nested(qwen3_5()), lora={**EVERY, "num_layers": 2}),
        Case("lora_qwen3_5_q4", "adapters beside 4 bits, dense", nested(qwen3_5()), bits=4, lora=EVERY),
        Case("lora_qwen3_5_moe", "adapters, mixture", qwen3_5_moe(), lora=EVERY),
        Case("lora_qwen3_5_moe_q4", "adapters beside 4 bits, mixture", qwen3_5_moe(), bits=4, lora=EVERY),
        Case("lora_qwen3_5_bf16", "adapters in f32 beside bf16", nested(qwen3_5(**TWO_LAYERS)), lora=EVERY, **SHORT),
        Case("lora_qwen3_next_q8_bf16", "adapters in f32 beside 8 bits and bf16", qwen3_next(**FEW_CHOICES), bits=8,
             lora=EVERY, **{**SHORT, "batch": 1, "length": 9, "greedy": 4}),
    ]
    cases += [Case(f"qwen3_next_q{bits}", f"{bits} bits", qwen3_next(), bits=bits) for bits in (2, 3, 5, 6, 8)]
    return [
        dataclasses.replace(case, name=f"{case.name}.{seed}", seed=1000 * seed)
        for case in cases
        for seed in range(1, seeds + 1)
    ]


def golden():
    """All directories together stay below 1200 KB, hence the two layers, of both kinds."""
    small = {**TWO_LAYERS, "hidden_size": 32, "intermediate_size": 16, "head_dim": 8, "vocab_size": 64}
    linear = {"linear_key_head_dim": 4, "linear_value_head_dim": 6}
    experts = {"moe_intermediate_size": 4, "shared_expert_intermediate_size": 8}
    quantised = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    dense = {**small, **linear}
    mixture = {**dense, **experts}
    del small["full_attention_interval"]
    one = {"batch": 1, "length": 15}
    return [
        Case("hf_qwen3_next", "Hugging Face names, one tensor per expert, two files", qwen3_next(**mixture),
             hf=True, **one),
        Case("hf_qwen3_5_moe", "Hugging Face names, experts in one tensor", qwen3_5_moe(**mixture), hf=True,
             gradients=False, **one),
        Case("qwen3_5", "dense, tied head, flat configuration", qwen3_5(tie_word_embeddings=True, **dense),
             batch=2, length=11),
        Case("qwen3_yarn", "plain attention, tied head, positions scaled by yarn",
             qwen3(rope_scaling=YARN, **small), **one),
        Case("qwen3_5_bf16", "dense in bf16, text_config, untied head", nested(qwen3_5(**dense)),
             batch=1, **SHORT),
        Case("qwen3_next_q4", "mixture, 4 bits, some modules otherwise",
             qwen3_next(**{**dense, **quantised}), bits=4, overrides=OVERRIDES, **one),
        Case("llama_windows", "a window in one layer, biases, untied head, positions as Llama 3's",
             llama(rope_scaling=LLAMA3, tie_word_embeddings=False, **{**small, **WINDOWS, **BIASES}), **one),
        Case("qwen2_q4", "biases of queries, keys and values, tied head, 4 bits",
             qwen2(**{**small, "intermediate_size": 32}), bits=4, **one),
        Case("hf_qwen3_moe", "Hugging Face names, one tensor per expert, none shared",
             qwen3_moe(**{**small, "moe_intermediate_size": 4}), hf=True, **one),
        Case("lora_qwen3_next_q4", "adapters beside 4 bits, mixture", qwen3_next(**{**dense, **quantised}), bits=4,
             overrides=OVERRIDES, lora={**EVERY, "rank": 2}, **one),
    ]
