#!/usr/bin/env python3
"""Writes the files of tests/formats/golden: safetensors as other programs write them, and as we must.

Needs mlx, numpy, safetensors and torch. ours.safetensors is put together here from the layout alone, and read
back by two of those packages: formats_tests expects write_safetensors to give the same bytes.
"""

import json
import pathlib
import struct

import mlx.core as mx
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

FOLDER = pathlib.Path(__file__).parent / "golden"


def values(count, kind):
    """What formats_tests expects, exact in every type: integers below 11, signed ones from -5, floats by halves."""
    v = (7 * np.arange(count) + 3) % 11
    if kind == "b":
        return v % 2 == 1
    return v if kind == "u" else v - 5 if kind == "i" else (v - 5) / 2


def array(shape, dtype):
    kind = np.dtype(dtype).kind
    return values(int(np.prod(shape)), kind).astype(dtype).reshape(shape)


numpy_types = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
numpy_types += ["float16", "float32", "float64"]
by_numpy = {name: array((2, 3), name) for name in numpy_types}
by_numpy |= {"scalar": array((), "float32"), "empty": array((3, 0, 2), "float32")}
safetensors.numpy.save_file(by_numpy, FOLDER / "numpy.safetensors", {"made by": "numpy", "text": 'é "水"\n'})

floats = torch.from_numpy(values(5, "f").astype("float32"))
torch_types = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
safetensors.torch.save_file({name: floats.to(t) for name, t in torch_types.items()}, FOLDER / "torch.safetensors")

by_mlx = {name: mx.array(a) for name, a in by_numpy.items() if name != "float64"}
by_mlx["bfloat16"] = mx.array(array((2, 3), "float32")).astype(mx.bfloat16)
by_mlx["complex64"] = mx.array([1 + 2j], dtype=mx.complex64)
mx.save_safetensors(str(FOLDER / "mlx.safetensors"), by_mlx, {"format": "mlx"})
mx.save_safetensors(str(FOLDER / "mlx_plain.safetensors"), {"w": by_mlx["float32"]})

# Keys sorted, ", " and ": " between them, spaces up to 8 bytes; wide types first, else in the order given.
given = [("z", array((3,), "uint8"), "U8"), ("b", array((2, 3), "float32"), "F32"), ("none", array((0, 4), "int64"), "I64"),
         ("a", array((5,), "int16"), "I16"), ("c", array((), "float32"), "F32")]
header, data = {"__metadata__": {"format": "mlx", "note": 'é"'}}, b""
for name, a, type_name in sorted(given, key=lambda item: -item[1].itemsize):
    header[name] = {"dtype": type_name, "shape": list(a.shape), "data_offsets": [len(data), len(data) + a.nbytes]}
    data += a.tobytes()
text = json.dumps(dict(sorted(header.items())), ensure_ascii=False).encode()
text += b" " * (-len(text) % 8)
ours = FOLDER / "ours.safetensors"
ours.write_bytes(struct.pack("<Q", len(text)) + text + data)

for read in (safetensors.numpy.load_file(ours), {k: np.array(v) for k, v in mx.load(str(ours)).items()}):
    assert sorted(read) == sorted(name for name, _, _ in given)
    for name, a, _ in given:
        assert read[name].dtype == a.dtype and read[name].shape == a.shape and (read[name] == a).all(), name
print(*(f"{p.name}: {p.stat().st_size} bytes" for p in sorted(FOLDER.iterdir())), sep="\n")
