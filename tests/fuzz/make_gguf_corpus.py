#!/usr/bin/env python3
"""Writes the seeds of tests/fuzz/corpus/gguf but for past findings (found-*), which lie beside them and stay.

    python3 tests/fuzz/make_gguf_corpus.py
"""
import pathlib
import struct

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus" / "gguf"


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value & (2 ** 64 - 1))


def text(value):
    value = value.encode() if isinstance(value, str) else value
    return u64(len(value)) + value


def string(value):
    return u32(8) + text(value)


def whole(value):
    return u32(4) + u32(value)


def real(value):
    return u32(6) + struct.pack("<f", value)


def array(kind, values):
    return u32(9) + u32(kind) + u64(len(values)) + b"".join(values)


class File:
    def __init__(self, **keys):
        self.keys, self.tensors, self.data, self.version = dict(keys), [], b"", 3

    def tensor(self, name, dims, kind, size):
        self.tensors.append((name, dims, kind, len(self.data)))
        data = bytes((7 * i + 3) % 60 for i in range(size))  # of 16 bits, small numbers
        self.data += data + bytes(-size % 32)
        return self

    def dump(self):
        out = b"GGUF" + u32(self.version) + u64(len(self.tensors)) + u64(len(self.keys))
        for key, value in self.keys.items():
            out += text(key) + value
        for name, dims, kind, offset in self.tensors:
            out += text(name) + u32(len(dims)) + b"".join(u64(d) for d in dims) + u32(kind) + u64(offset)
        return out + bytes(-len(out) % 32) + self.data


SIZES = {"block_count": whole(1), "embedding_length": whole(32), "context_length": whole(64), "feed_forward_length": whole(32),
         "attention.head_count": whole(2), "attention.head_count_kv": whole(1), "attention.layer_norm_rms_epsilon": real(1e-5)}


def sizes(arch, **more):
    keys = {"general.architecture": string(arch)}
    keys |= {"%s.%s" % (arch, key): value for key, value in (SIZES | more).items()}
    return File(**keys)


def llama(kind=1, size=lambda n: 2 * n):
    f = sizes("llama")
    for name, out in (("token_embd", 4), ("blk.0.attn_q", 32), ("blk.0.attn_k", 16), ("blk.0.attn_v", 16), ("blk.0.attn_output", 32),
                      ("blk.0.ffn_gate", 32), ("blk.0.ffn_up", 32), ("blk.0.ffn_down", 32)):
        f.tensor(name + ".weight", (32, out), kind, size(32 * out))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        f.tensor(name + ".weight", (32,), 0, 128)
    return f


def hybrid(arch):
    f = sizes(arch, **{"ssm.conv_kernel": whole(2), "ssm.state_size": whole(2), "ssm.group_count": whole(1), "ssm.time_step_rank": whole(2),
                       "ssm.inner_size": whole(4), "rope.dimension_count": whole(4), "expert_count": whole(2), "expert_used_count": whole(1),
                       "expert_feed_forward_length": whole(8), "expert_shared_feed_forward_length": whole(8)})
    for name, dims in (("token_embd.weight", (32, 4)), ("blk.0.attn_qkv.weight", (32, 8)), ("blk.0.attn_gate.weight", (32, 4)),
                       ("blk.0.ssm_conv1d.weight", (2, 8)), ("blk.0.ssm_out.weight", (4, 32)), ("blk.0.ffn_gate_up_exps.weight", (32, 4, 2))):
        size = 1
        for dim in dims:
            size *= dim
        f.tensor(name, dims, 1, 2 * size)
    for name in ("ssm_a", "ssm_dt.bias"):
        f.tensor("blk.0." + name, (2,), 0, 8)
    return f


def tokenizer(kind, **more):
    tokens = [text(t) for t in ("<unk>", "<s>", "a", "b", "ab", "<0x41>", "\u2581", "\u2581a")]
    keys = {"tokenizer.ggml.model": string(kind), "tokenizer.ggml.tokens": array(8, tokens),
            "tokenizer.ggml.token_type": array(5, [u32(t) for t in (2, 3, 1, 1, 1, 6, 1, 1)]),
            "tokenizer.ggml.bos_token_id": whole(1), "tokenizer.ggml.unknown_token_id": whole(0)}
    if kind == "llama":
        keys["tokenizer.ggml.scores"] = array(6, [struct.pack("<f", -i) for i in range(8)])
    else:
        keys |= {"tokenizer.ggml.pre": string("qwen2"), "tokenizer.ggml.merges": array(8, [text("a b")])}
    return File(**keys | more).dump()


def every_type():
    values = [u32(0) + b"\1", u32(1) + b"\xff", u32(2) + b"\1\1", u32(3) + b"\1\1", whole(1), u32(5) + u32(1), real(1.5), u32(7) + b"\1",
              string("text"), array(4, [u32(1)] * 2), array(9, [u32(0) + u64(1) + b"x"] * 2), array(7, [b"\0", b"\1"]), u32(10) + u64(-1),
              u32(11) + u64(-1), u32(12) + struct.pack("<d", 0.5)]
    f = File(**{"key.%d" % i: value for i, value in enumerate(values)})
    sizes_of = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84), 11: (256, 110), 12: (256, 144),
                13: (256, 176), 14: (256, 210), 20: (32, 18), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
                39: (32, 17), 40: (64, 36)}
    for kind, (block, size) in sizes_of.items():
        f.tensor("t.%d" % kind, (block,), kind, size)
    return f.dump()


def changed(f, **change):
    f.keys |= {key.replace("__", "."): value for key, value in change.items()}
    return f.dump()


def seeds():
    version1, big, late = llama(), llama(), llama()
    version1.version, big.version = 1, 0x03000000
    late.tensors[0] = late.tensors[0][:3] + (2 ** 63,)
    twice = llama()
    twice.tensors.append(twice.tensors[0])
    overlap = llama()
    overlap.tensors[1] = overlap.tensors[1][:3] + (0,)
    part = {"split__no": u32(2) + b"\0\0", "split__count": u32(2) + b"\3\0"}
    return {
        "every-type": every_type(), "llama": llama().dump(), "llama-q4_0": llama(2, lambda n: n // 32 * 18).dump(),
        "llama-q8_0": llama(8, lambda n: n // 32 * 34).dump(), "llama-bf16": llama(30).dump(), "qwen3next": hybrid("qwen3next").dump(),
        "qwen35": hybrid("qwen35").dump(), "tokenizer-gpt2": tokenizer("gpt2"), "tokenizer-llama": tokenizer("llama"),
        "tokenizer-bert": tokenizer("bert"), "tokenizer-id-late": tokenizer("gpt2", **{"tokenizer.ggml.eos_token_id": whole(99)}),
        "tokenizer-scores-short": tokenizer("llama", **{"tokenizer.ggml.scores": array(6, [b"\0\0\0\0"])}),
        "empty": b"", "magic": b"GGUF", "nothing-in-it": File().dump(), "version-1": version1.dump(), "big-endian": big.dump(),
        "offset-late": late.dump(), "name-twice": twice.dump(), "overlap": overlap.dump(), "cut": llama().dump()[:-600],
        "part-of-three": changed(llama(), **part), "alignment-0": changed(llama(), general__alignment=whole(0)),
        "alignment-64": changed(File(), general__alignment=whole(64)), "layers-many": changed(llama(), llama__block_count=whole(4096)),
        "heads-many": changed(llama(), llama__attention__head_count=whole(2 ** 32 - 1)),
        "key-length-largest": changed(llama(), llama__attention__key_length=u32(10) + u64(-1)),
        "count-largest": b"GGUF" + u32(3) + u64(-1) + u64(-1), "string-largest": b"GGUF" + u32(3) + u64(0) + u64(1) + u64(-1) + bytes(64),
        "array-largest": File(k=u32(9) + u32(4) + u64(2 ** 62)).dump(), "strings-many": File(k=u32(9) + u32(8) + u64(2 ** 61)).dump(),
        "arrays-deep": File(k=u32(9) + (u32(9) + u64(1)) * 20).dump(), "dims-overflow": File().tensor("t", (2 ** 32, 2 ** 32), 0, 64).dump(),
        "terminal": changed(llama(), general__architecture=string("\x1b[31mEVIL\x07")),
    }


def main():
    CORPUS.mkdir(parents=True, exist_ok=True)
    for path in CORPUS.iterdir():
        if not path.name.startswith("found-"):
            path.unlink()
    for name, data in seeds().items():
        (CORPUS / name).write_bytes(data)


if __name__ == "__main__":
    main()
