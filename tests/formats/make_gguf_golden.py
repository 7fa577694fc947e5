"""Writes golden/types.gguf and golden/split-*.gguf with the Python package gguf (0.19.0), for gguf_test.cpp.

    python make_gguf_golden.py        needs: pip install gguf

types.gguf   metadata of every type; of each quantised type T a tensor T of random blocks, T.numbers (F32) as gguf unpacks them;
             of each type that gguf packs, T.from (F32) and T.quantised.
split-*      three parts of one model, two tensors each.
"""
import pathlib

import numpy as np
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type, GGUFValueType as Value

GOLDEN = pathlib.Path(__file__).parent / "golden"
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4")
# Where a block's halves are: any other bytes may be random, these must be finite.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "NVFP4": []}
MADE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16")


def random_blocks(rng, name, count):
    block, size = GGML_QUANT_SIZES[Type[name]]
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES[name]:
        halves = rng.normal(size=count).astype(np.float16)
        blocks[:, at:at + 2] = halves.view(np.uint8).reshape(count, 2)
    return blocks


def types():
    rng = np.random.default_rng(7)
    writer = GGUFWriter(GOLDEN / "types.gguf", "llama")
    writer.add_uint8("of.u8", 200)
    writer.add_int8("of.i8", -100)
    writer.add_uint16("of.u16", 60000)
    writer.add_int16("of.i16", -30000)
    writer.add_uint32("of.u32", 4000000000)
    writer.add_int32("of.i32", -2000000000)
    writer.add_uint64("of.u64", 2 ** 64 - 1)
    writer.add_int64("of.i64", -2 ** 63)
    writer.add_float32("of.f32", 0.1)
    writer.add_float64("of.f64", 0.1)
    writer.add_bool("of.bool", True)
    writer.add_string("of.string", "é 水\n")
    writer.add_array("of.strings", ["", "a", "水"])
    writer.add_array("of.wholes", [1, -2, 3])
    writer.add_array("of.numbers", [0.5, -1.5])
    writer.add_array("of.bools", [True, False, True])
    writer.add_key_value("of.arrays", [[1, 2], [3]], Value.ARRAY, Value.ARRAY)
    for name in PACKED:
        block, size = GGML_QUANT_SIZES[Type[name]]
        count = 512 // block
        blocks = random_blocks(rng, name, count)
        numbers = quants.dequantize(blocks, Type[name]).reshape(2, 256)
        assert np.isfinite(numbers).all()
        writer.add_tensor(name, blocks.reshape(2, -1), raw_dtype=Type[name])
        writer.add_tensor(name + ".numbers", numbers)
    numbers = (rng.normal(size=(4, 64)) * np.array([[1], [1e-3], [0], [100]])).astype(np.float32)
    numbers[3, 32:] = -0.25
    for name in MADE:
        quantised = quants.quantize(numbers, Type[name])
        writer.add_tensor(name + ".from", numbers)
        if name == "F16":
            writer.add_tensor(name + ".quantised", quantised)
        else:
            writer.add_tensor(name + ".quantised", quantised.view(np.uint8), raw_dtype=Type[name])
    close(writer)


def close(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split():
    writer = GGUFWriter(GOLDEN / "split.gguf", "llama", split_max_tensors=2)
    for i in range(6):
        writer.add_tensor("t%d" % i, np.full((i + 1, 3), i, dtype=np.float32))
    close(writer)


if __name__ == "__main__":
    types()
    split()
