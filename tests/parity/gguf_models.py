"""Small random models as GGUF files, put together with the Python package gguf by the names that llama.cpp has, and what
llama.cpp computes with them. gguf_parity_test.cpp compares; gguf_reread.py reads what we write.

    python gguf_models.py OUTPUT             needs: pip install gguf xllamacpp
    python gguf_models.py OUTPUT --golden    smaller ones, for tests/parity/golden_gguf

OUTPUT/NAME.gguf and OUTPUT/NAME.json: {"tokens": [...], "logprobs": [of the token that follows them, one for each id],
"tolerance": how far they may be apart}.
"""
import json
import pathlib
import sys

import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type

from gguf_llama import logprobs

ROWS = 272  # tokens: 256 of text, 3 special ones, and rows without a token
WIDTH, LAYERS, HEADS, KEY_HEADS, HEAD_DIM, INNER = 256, 4, 4, 2, 64, 512
EXPERTS, CHOSEN, EXPERT_INNER = 4, 2, 256
DELTA_KEYS, DELTA_VALUES, KEY_DIM, VALUE_DIM, KERNEL = 2, 4, 64, 64, 4
HALVES = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}
# Of d, so that random weights are about as large as those of a model, and of the minimum over d, so that their mean is 0.
SCALE = {"Q6_K": 3e-5, "Q3_K": 1e-3, "IQ4_XS": 2e-5, "IQ4_NL": 1e-3, "Q2_K": 5e-3, "Q4_K": 3e-4, "Q5_K": 1.5e-4}
MIDDLE = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


def byte_letters():
    """The letters that byte-level BPE writes bytes with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, more = {}, 0
    for byte in range(256):
        letters[byte] = chr(byte) if byte in plain else chr(256 + more)
        more += byte not in plain
    return [letters[byte] for byte in range(256)]


def add_tokenizer(writer):
    # Text in full characters after each token: llama.cpp's server holds probabilities back in the midst of one.
    tokens = byte_letters()[:128] + ["w%d" % i for i in range(128)] + ["<|bos|>", "<|eos|>", "<|pad|>"]
    tokens += ["[PAD%d]" % i for i in range(len(tokens), ROWS)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 3 + [5] * (ROWS - 259))
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(258)
    writer.add_add_bos_token(False)


class Model:
    def __init__(self, path, arch, kind, seed):
        self.rng = np.random.default_rng(seed)
        self.writer = GGUFWriter(path, arch)
        self.arch, self.kind = arch, kind
        w = self.writer
        w.add_block_count(LAYERS)
        w.add_context_length(512)
        w.add_embedding_length(WIDTH)
        w.add_feed_forward_length(INNER)
        w.add_head_count(HEADS)
        w.add_head_count_kv(KEY_HEADS)
        w.add_key_length(HEAD_DIM)
        w.add_value_length(HEAD_DIM)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_rope_freq_base(10000.0)
        w.add_vocab_size(ROWS)
        add_tokenizer(w)

    def matrix(self, name, *shape, kind=None):
        kind = kind or self.kind
        if kind in HALVES:
            block, size = GGML_QUANT_SIZES[Type[kind]]
            count = int(np.prod(shape)) // block
            blocks = self.rng.integers(0, 256, (count, size), dtype=np.uint8)
            scales = np.abs(self.rng.normal(size=count)) * SCALE.get(kind, 3e-4)
            for at, times in zip(HALVES[kind], (1, MIDDLE.get(kind))):
                blocks[:, at:at + 2] = (scales * times).astype(np.float16).view(np.uint8).reshape(count, 2)
            data = blocks.reshape(*shape[:-1], -1)
        else:
            numbers = (self.rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
            if kind == "F32":
                self.writer.add_tensor(name, numbers)
                return
            data = quants.quantize(numbers, Type[kind])
            if kind == "F16":
                self.writer.add_tensor(name, data)
                return
            data = data.view(np.uint8)
        self.writer.add_tensor(name, data, raw_dtype=Type[kind])

    def vector(self, name, size, around=1.0, spread=0.1):
        self.writer.add_tensor(name, (around + spread * self.rng.normal(size=size)).astype(np.float32))

    def outer(self, tied):
        self.matrix("token_embd.weight", ROWS, WIDTH)
        self.vector("output_norm.weight", WIDTH)
        if not tied:
            self.matrix("output.weight", ROWS, WIDTH)

    def attention(self, b, norms, gated):
        self.matrix(b + "attn_q.weight", HEADS * HEAD_DIM * (2 if gated else 1), WIDTH)
        self.matrix(b + "attn_k.weight", KEY_HEADS * HEAD_DIM, WIDTH)
        self.matrix(b + "attn_v.weight", KEY_HEADS * HEAD_DIM, WIDTH)
        self.matrix(b + "attn_output.weight", WIDTH, HEADS * HEAD_DIM)
        if norms:
            self.vector(b + "attn_q_norm.weight", HEAD_DIM)
            self.vector(b + "attn_k_norm.weight", HEAD_DIM)

    def mlp(self, b):
        self.matrix(b + "ffn_gate.weight", INNER, WIDTH)
        self.matrix(b + "ffn_up.weight", INNER, WIDTH)
        self.matrix(b + "ffn_down.weight", WIDTH, INNER)

    def moe(self, b):
        self.matrix(b + "ffn_gate_inp.weight", EXPERTS, WIDTH, kind="F32")
        self.matrix(b + "ffn_gate_exps.weight", EXPERTS, EXPERT_INNER, WIDTH)
        self.matrix(b + "ffn_up_exps.weight", EXPERTS, EXPERT_INNER, WIDTH)
        self.matrix(b + "ffn_down_exps.weight", EXPERTS, WIDTH, EXPERT_INNER)
        self.vector(b + "ffn_gate_inp_shexp.weight", WIDTH, 0.0)
        self.matrix(b + "ffn_gate_shexp.weight", EXPERT_INNER, WIDTH)
        self.matrix(b + "ffn_up_shexp.weight", EXPERT_INNER, WIDTH)
        self.matrix(b + "ffn_down_shexp.weight", WIDTH, EXPERT_INNER)

    def delta(self, b, by_head):
        keys, values = DELTA_KEYS * KEY_DIM, DELTA_VALUES * VALUE_DIM
        self.matrix(b + "attn_qkv.weight", 2 * keys + values, WIDTH)
        self.matrix(b + "attn_gate.weight", values, WIDTH)
        if by_head:
            self.matrix(b + "ssm_ba.weight", 2 * DELTA_VALUES, WIDTH)
        else:
            self.matrix(b + "ssm_beta.weight", DELTA_VALUES, WIDTH)
            self.matrix(b + "ssm_alpha.weight", DELTA_VALUES, WIDTH)
        self.writer.add_tensor(b + "ssm_conv1d.weight",
                               (self.rng.normal(size=(2 * keys + values, KERNEL)) / 2).astype(np.float32))
        self.writer.add_tensor(b + "ssm_a", -self.rng.uniform(1, 8, DELTA_VALUES).astype(np.float32))
        self.vector(b + "ssm_dt.bias", DELTA_VALUES, -3.0, 1.0)
        self.vector(b + "ssm_norm.weight", VALUE_DIM)
        self.matrix(b + "ssm_out.weight", WIDTH, values)

    def hybrid_keys(self, experts):
        w = self.writer
        w.add_rope_dimension_count(HEAD_DIM // 4)
        w.add_ssm_conv_kernel(KERNEL)
        w.add_ssm_state_size(KEY_DIM)
        w.add_ssm_group_count(DELTA_KEYS)
        w.add_ssm_time_step_rank(DELTA_VALUES)
        w.add_ssm_inner_size(DELTA_VALUES * VALUE_DIM)
        w.add_uint32(self.arch + ".full_attention_interval", 2)
        if self.arch.startswith("qwen35"):
            w.add_array(self.arch + ".rope.dimension_sections", [3, 3, 2, 0] if HEAD_DIM == 64 else [2, 1, 1, 0])
        if experts:
            w.add_expert_count(EXPERTS)
            w.add_expert_used_count(CHOSEN)
            w.add_expert_feed_forward_length(EXPERT_INNER)
            w.add_expert_shared_feed_forward_length(EXPERT_INNER)

    def close(self):
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def dense(path, arch, kind, seed):
    m = Model(path, arch, kind, seed)
    m.writer.add_rope_dimension_count(HEAD_DIM)
    m.outer(tied=seed % 2 == 0)
    for layer in range(LAYERS):
        b = "blk.%d." % layer
        m.vector(b + "attn_norm.weight", WIDTH)
        m.attention(b, norms=arch == "qwen3", gated=False)
        m.vector(b + "ffn_norm.weight", WIDTH)
        m.mlp(b)
    m.close()


def hybrid(path, arch, kind, seed):
    m = Model(path, arch, kind, seed)
    experts = arch in ("qwen3next", "qwen35moe")
    m.hybrid_keys(experts)
    m.outer(tied=False)
    for layer in range(LAYERS):
        b = "blk.%d." % layer
        m.vector(b + "attn_norm.weight", WIDTH)
        if layer % 2 == 1:
            m.attention(b, norms=True, gated=True)
        else:
            m.delta(b, by_head=arch == "qwen3next")
        m.vector(b + "post_attention_norm.weight", WIDTH)
        m.moe(b) if experts else m.mlp(b)
    m.close()


# With quantised weights llama.cpp rounds activations to 8 bits, and ours does not: those are looked at for gross faults only.
CASES = [(dense, arch, kind) for arch in ("llama", "qwen3")
         for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")]
CASES += [(hybrid, arch, kind) for arch in ("qwen3next", "qwen35", "qwen35moe") for kind in ("F32", "Q8_0", "Q4_K")]
TOLERANCE = {"F32": 1e-4, "F16": 2e-2, "BF16": 0.1} | {kind: 0.2 for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")}


GOLDEN = [(dense, "llama", "Q8_0"), (hybrid, "qwen3next", "Q8_0"), (hybrid, "qwen35", "Q8_0")]


def main():
    output = pathlib.Path(sys.argv[1])
    cases = CASES
    if "--golden" in sys.argv:
        cases = GOLDEN
        globals().update(WIDTH=64, LAYERS=2, HEAD_DIM=32, INNER=64, EXPERT_INNER=32, KEY_DIM=32, VALUE_DIM=32)
    output.mkdir(parents=True, exist_ok=True)
    for seed, (make, arch, kind) in enumerate(cases):
        name = "%s-%s" % (arch, kind)
        path = output / (name + ".gguf")
        make(path, arch, kind, seed)
        tokens = [int(t) for t in np.random.default_rng(seed).integers(0, 256, 24)]
        values = logprobs(path, tokens, ROWS)
        case = {"tokens": tokens, "logprobs": values, "tolerance": TOLERANCE.get(kind, 0.4)}
        (output / (name + ".json")).write_text(json.dumps(case) + "\n")
        print("%-16s largest %.3f" % (name, max(values)), flush=True)


if __name__ == "__main__":
    main()
