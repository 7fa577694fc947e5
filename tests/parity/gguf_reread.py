"""Reads with the Python package gguf and with llama.cpp the files that gguf_parity_test.cpp wrote.

    python gguf_reread.py MADE SAVED

MADE: what gguf_models.py wrote, SAVED: the same models written by mlxtape. Tensors of F32, F16, BF16, Q4_0 to Q8_0 must have
the same numbers (Q4_0 and Q5_0 become Q4_1 and Q5_1, and −exp(A_log) does not come back bit by bit), and llama.cpp must compute
nearly the same with both.
"""
import json
import pathlib
import sys

import numpy as np
from gguf import GGUFReader, quants

from gguf_llama import logprobs
from gguf_models import ROWS

EXACT = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")


def numbers(tensor):
    return quants.dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(-1)


def main():
    made, saved = (pathlib.Path(arg) for arg in sys.argv[1:3])
    wrong = 0
    for path in sorted(saved.glob("*.gguf")):
        name = path.stem
        case = json.loads((made / (name + ".json")).read_text())
        before = {t.name: t for t in GGUFReader(made / path.name).tensors}
        after = {t.name: t for t in GGUFReader(path).tensors}
        faults = [] if before.keys() == after.keys() else ["other tensors"]
        for tensor in before if name.split("-")[1] in EXACT and not faults else ():
            a, b = numbers(before[tensor]), numbers(after[tensor])
            same = np.allclose(a, b, rtol=1e-6, atol=0) if tensor.endswith("ssm_a") else np.array_equal(a, b)
            if not same:
                faults.append("%s differs, %d numbers" % (tensor, int((a != b).sum())))
        values = logprobs(path, case["tokens"], ROWS)
        apart = max(abs(a - b) for a, b in zip(values, case["logprobs"]) if max(a, b) > -12)
        if apart > case["tolerance"]:
            faults.append("probabilities differ")
        print("%-16s %.6f apart%s" % (name, apart, "".join("; " + fault for fault in faults)), flush=True)
        wrong += bool(faults)
    if wrong:
        raise SystemExit("gguf: %d files differ" % wrong)


if __name__ == "__main__":
    main()
