#!/usr/bin/env python3
"""Writes the seeds of tests/fuzz/corpus anew: what files look like, and lies in the places where a reader could believe
them. Past findings lie beside them and stay; their names begin with found-.

    python3 tests/fuzz/make_corpus.py
"""
import base64
import json
import pathlib
import struct
import sys

TESTS = pathlib.Path(__file__).resolve().parent.parent
CORPUS = TESTS / "fuzz" / "corpus"
GOLDEN = TESTS / "formats" / "golden"
MARK = "\n----\n"


def write(target, seeds):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if not old.name.startswith("found-"):
            old.unlink()
    for name, data in seeds.items():
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def json_seeds():
    return {
        "values": '[null, true, false, 0, -0, 1.5e3, -1E-2, "", [], {}, [[]], {"a": {"b": [1, 2]}}]\n',
        "numbers": "[9223372036854775807, -9223372036854775808, 9223372036854775808, 0.1, 5e-324, "
                   "1.7976931348623157e308, 123456789012345678901234567890, 2.2250738585072011e-308]",
        "too-large": "[1e999]", "too-near-zero": "[1e-999]", "leading-zero": "[01]", "plus": "[+1]", "dot": "[1.]",
        "escapes": r'"\"\\\/\b\f\n\r\t\u0000\u001f\u00e9\u20ac\ud83d\ude42"',
        "surrogate-alone": r'"\ud800"', "surrogates-swapped": r'"\ude42\ud83d"', "surrogate-and-text": r'"\ud83dx"',
        "utf8": '{"ключ": "日本 🙂 é"}', "utf8-cut": b'"\xe6\x97"', "utf8-overlong": b'"\xc0\xaf"',
        "utf8-surrogate": b'"\xed\xa0\x80"', "raw-control": '"a\nb"', "raw-nul": b'"a\x00b"',
        "deepest": "[" * 128 + "]" * 128, "too-deep": "[" * 129 + "]" * 129, "never-closed": "[" * 10000,
        "objects-deep": '{"a":' * 64 + "1" + "}" * 64,
        "key-twice": '{"a": 1, "a": 2}', "comma-last": "[1, 2,]", "comment": "/* no */ 1", "two-values": "1 2", "empty": "",
        "nan": "[NaN, Infinity]", "byte-order-mark": b"\xef\xbb\xbf[]", "spaces": " \t\r\n[ 1 , 2 ]\n ",
        "terminal": r'{"model_type":"\u001b[31mEVIL\u0007"}',
    }


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, str) else json.dumps(header, ensure_ascii=False)
    text = text.encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_seeds():
    one = {"w": entry("F32", [2], 0, 8)}
    eight = bytes(range(8))
    many = {"__metadata__": {"format": "mlx", "é": "日本"}}
    at = 0
    for name, size in (("F64", 8), ("I64", 8), ("U64", 8), ("F32", 4), ("I32", 4), ("U32", 4), ("BF16", 2), ("F16", 2),
                       ("I16", 2), ("U16", 2), ("I8", 1), ("U8", 1), ("BOOL", 1), ("F8_E4M3", 1), ("F4", 1)):
        many["t." + name] = entry(name, [1, 2, 1], at, at + 2 * size)
        at += 2 * size
    seeds = {name.replace(".safetensors", ""): (GOLDEN / name).read_bytes()
             for name in ("mlx.safetensors", "mlx_plain.safetensors", "numpy.safetensors", "ours.safetensors",
                          "torch.safetensors")}
    seeds |= {
        "every-type": safetensors(many, bytes(i % 2 for i in range(at))),
        "one": safetensors(one, eight), "empty-header": safetensors({}), "no-header": safetensors(""),
        "scalar": safetensors({"s": entry("F32", [], 0, 4)}, eight[:4]),
        "nothing-in-it": safetensors({"e": entry("F32", [0, 3], 0, 0), "f": entry("F32", [0], 8, 8)}, eight),
        "not-aligned": safetensors({"w": entry("F32", [1], 1, 5)}, eight),
        "gap": safetensors({"w": entry("U8", [1], 0, 1), "v": entry("U8", [1], 7, 8)}, eight),
        "behind-the-data": safetensors(one, eight + bytes(100)),
        "length-too-long": safetensors(one, eight, 1 << 40), "length-all-ones": b"\xff" * 8 + b"{}",
        "length-past-the-end": safetensors(one, b"", 100), "cut": safetensors(one, eight[:7]), "seven-bytes": bytes(7),
        "overlap": safetensors({"w": entry("F32", [2], 0, 8), "v": entry("F32", [1], 4, 8)}, eight),
        "shape-overflows": safetensors({"w": entry("U8", [1 << 32, 1 << 32], 0, 8)}, eight),
        "shape-negative": safetensors({"w": entry("U8", [-8, -1], 0, 8)}, eight),
        "shape-of-nine": safetensors({"w": entry("U8", [1] * 9, 0, 1)}, eight),
        "offsets-swapped": safetensors({"w": entry("U8", [8], 8, 0)}, eight),
        "offsets-largest": safetensors({"w": entry("U8", [1], (1 << 63) - 2, (1 << 63) - 1)}, eight),
        "bool-of-two": safetensors({"b": entry("BOOL", [2], 0, 2)}, b"\x01\x02"),
        "name-twice": safetensors('{"w": %s, "w": %s}' % ((json.dumps(one["w"]),) * 2), eight),
        "metadata-null": safetensors('{"__metadata__": null}'), "metadata-number": safetensors('{"__metadata__": {"a": 1}}'),
        "metadata-twice": safetensors('{"__metadata__": {}, "__metadata__": {}}'),
        "dtype-absent": safetensors({"w": {"shape": [1], "data_offsets": [0, 1]}}, eight),
    }
    return seeds


def state(tensors=None, **changes):
    """A state of the run of tests/fuzz/run_state.cpp."""
    options = {"accumulation": "1", "learning_rate": "1.0000000000000001e-05", "warmup": "0", "cosine": "off", "clip": "0",
               "beta1": "0.90000000000000002", "beta2": "0.999", "eps": "9.9999999392252903e-09",
               "weight_decay": "0.0099999997764825821", "bias_correction": "off", "lazy_rows": "on", "validate_every": "200"}
    progress = {"step": 7, "best_step": 4, "best_loss": 1.25, "loss": 3.5, "seconds": 0.25, "steps": 2, "tokens": 96,
                "reports": [[5, 2.5, 1e-05, 0.5, 1000.0]], "validations": [[0, 3.0, 0, 0, 0], [4, 1.25, 1e-05, 0.5, 0]]}
    progress |= changes.pop("progress", {})
    metadata = {"format": "mlxtape fit 2", "progress": json.dumps(progress), "options": json.dumps(options),
                "fingerprint": json.dumps({"data": "fuzz"}), "step": "7"} | changes
    header, data = {"__metadata__": metadata}, b""
    for name, shape, values in (("a", [2, 3], 6), ("b", [4], 4)):
        for prefix in ("", "adamw.m:", "adamw.v:"):
            header[prefix + name] = entry("F32", shape, len(data), len(data) + 4 * values)
            data += struct.pack("<%df" % values, *(0.5 * i for i in range(values)))
    header["__checksum__"] = entry("U8", [8], len(data), len(data) + 8)  # the target writes the right one there
    header |= tensors or {}
    return safetensors(header, data + bytes(8))


def run_state_seeds():
    def at(**progress):
        return state(progress=progress)
    return {
        "whole": state(), "no-points": at(reports=[], validations=[], best_step=-1, steps=7),
        "step-negative": at(step=-5), "step-largest": at(step=(1 << 63) - 1), "step-of-text": at(step="7"),
        "step-null": at(step=None), "best-later": at(best_step=8),
        "best-negative": at(best_step=-9), "steps-more": at(steps=8), "tokens-negative": at(tokens=-1),
        "point-later": at(reports=[[8, 1, 1, 1, 1]]), "points-out-of-order": at(reports=[[5, 1, 1, 1, 1], [4, 1, 1, 1, 1]]),
        "point-of-four": at(reports=[[1, 2, 3, 4]]), "point-of-text": at(reports=["x"]),
        "another-format": state(format="mlxtape fit 0"), "older-format": state(format="mlxtape fit 1"),
        "terminal": state(format="\x1b[31mEVIL\x07"), "terminal-options": state(options='{"\\u001b[31mEVIL\\u0007": "\\u0007"}'), "another-fingerprint": state(fingerprint='{"data": "other"}'),
        "options-no-json": state(options="{"), "options-array": state(options="[]"), "options-number": state(options='{"a": 1}'),
        "another-shape": state({"a": entry("F32", [3, 2], 0, 24)}), "another-type": state({"a": entry("I32", [2, 3], 0, 24)}),
        "half": state({"adamw.m:b": entry("F16", [4], 88, 96)}), "cut": state()[:-8], "one-more": state({"c": entry("U8", [0], 0, 0)}),
    }


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def tokenizer_json(**changes):
    plain = [b for b in range(256) if 32 < b < 127 or b > 160 and b != 173]  # bytes that stand for themselves
    tokens = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))] + ["th", "in", "Ġth", "he"]
    parts = {"version": "1.0", "truncation": None, "padding": None,
             "added_tokens": [{"id": 260 + i, "content": text, "single_word": i == 2, "lstrip": i == 3, "rstrip": i == 4,
                               "normalized": i > 1, "special": i < 2}
                              for i, text in enumerate(["<|im_start|>", "<|im_end|>", "def", "<left>", "<right>"])],
             "normalizer": None, "pre_tokenizer": BYTE_LEVEL, "post_processor": None, "decoder": {"type": "ByteLevel"},
             "model": {"type": "BPE", "dropout": None, "unk_token": None, "ignore_merges": False,
                       "vocab": {token: i for i, token in enumerate(tokens)},
                       "merges": ["t h", "i n", "Ġ th", "h e"]}}
    return json.dumps(parts | changes, ensure_ascii=False, separators=(",", ":"))


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}, BYTE_LEVEL]}


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}


def text_tokenizer(change):
    """As tokenizer_json, of characters: some of them, and bytes for the others."""
    tokens = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256) if b not in (0xF5, 0xFF)] + list("▁Helowrdtins") + ["▁w", "lo", "▁▁"]
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": {token: i for i, token in enumerate(tokens)},
             "merges": ["▁ w", "l o", "▁ ▁"]}
    model |= {key[6:]: value for key, value in change.items() if key.startswith("model.") and key != "model.without"}
    parts = {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, "pre_tokenizer": None, "added_tokens": [],
             "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                                                         {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}}
    return tokenizer_json(**parts | {key: value for key, value in change.items() if not key.startswith("model.")}, model=model)


def varint(value):
    value %= 1 << 64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def message(**fields):
    """A protocol buffer: f3=1 is field 3, a number; bytes and text are blocks; a float is one."""
    out = b""
    for name, values in fields.items():
        number = int(name[1:])
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, float):
                out += varint(number << 3 | 5) + struct.pack("<f", value)
            elif isinstance(value, int):
                out += varint(number << 3) + varint(value)
            else:
                value = value.encode() if isinstance(value, str) else value
                out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def charsmap():
    """The table that two letters, a space and a pair are replaced by: taken from a model that has one."""
    files = json.loads((GOLDEN / "tokenizer_files.json").read_text())
    sys.path.insert(0, str(TESTS / "parity"))
    from protobuf_fields import block_in  # noqa: E402
    return block_in(base64.b64decode(files["sentencepiece"]["old"]["model"]), 3, 2)


def piece(text, score=0.0, kind=1):
    return message(f1=text, f2=float(score), f3=kind)


def model(pieces, trainer=None, normalizer=None, **others):
    return message(f1=[piece("<unk>", 0, 2), piece("<s>", 0, 3), piece("</s>", 0, 3)] + pieces, f2=message(**{"f3": 2, "f40": 0, "f41": 1, "f42": 2, "f43": -1} | (trainer or {})),
                   f3=message(**{"f1": "identity", "f3": 1, "f4": 0, "f5": 1} | (normalizer or {})), **others)


def tokenizer_file_seeds():
    words = [piece(text, -i) for i, text in enumerate(["▁w", "lo", "el", "▁H", "wo", "▁▁", "or", "▁wor", *"▁Helowrdtins,!"])]
    table = charsmap()
    ranks = [base64.b64encode(bytes([b])).decode() for b in range(256)] + [base64.b64encode(w).decode() for w in (b"lo", b"He", b"ll", b"Hell", b" w")]
    tekken = {"config": {"pattern": r"\p{L}+|\s|[^\s\p{L}]", "num_vocab_tokens": 261, "default_vocab_size": 280, "default_num_special_tokens": 20, "version": "v3"},
              "vocab": [{"rank": i, "token_bytes": token} for i, token in enumerate(ranks)]}
    text = json.dumps(tekken, separators=(",", ":"))
    bytes_ = [piece("<0x%02X>" % b, 0, 6) for b in range(256)]
    return {
        "bpe": model(words), "bpe-bytes": model(bytes_ + words, {"f35": 1}), "bpe-some-bytes": model(bytes_[:40] + words, {"f35": 1}),
        "bpe-words": model([piece("wor", 0, 4), piece("\n\n", 0, 4)] + words, None, {"f3": 0}), "unused": model([piece("Hel", -1, 5)] + words),
        "unigram": model(words, {"f3": 1}), "unigram-bytes": model(bytes_ + words, {"f3": 1, "f35": 1}),
        "unigram-words": model([piece("ll", 0, 4)] + words, {"f3": 1, "f24": 1}), "scores-equal": model([piece(c, -1) for c in "Helo"] + [piece("ll", -1), piece("el", -1)]),
        "table": model(words, {"f3": 1}, {"f2": table, "f4": 1}), "table-bpe": model(words, None, {"f2": table}),
        "table-cut": model(words, None, {"f2": table[:-1]}), "table-trie-too-long": model(words, None, {"f2": struct.pack("<I", 1 << 31) + table[4:]}),
        "table-without-trie": model(words, None, {"f2": struct.pack("<I", 0) + table[4:]}), "table-of-ones": model(words, None, {"f2": table[:4] + b"\xff" * (len(table) - 5) + b"\0"}),
        "table-zeros": model(words, None, {"f2": struct.pack("<I", 64) + bytes(65)}),
        "not-escaped": model(words, None, {"f5": 0}), "suffix": model(words, {"f3": 1, "f24": 1}, {"f4": 1}), "denormalizer": model(words, f5=message(f2=table)),
        "word-model": model(words, {"f3": 3}), "no-unknown": message(f1=words, f2=message(f3=2)), "no-trainer": message(f1=[piece("<unk>", 0, 2)] + words),
        "piece-empty": model([piece("")]), "piece-twice": model(words + words), "piece-long": model([piece("l" * 3000)] + words), "score-nan": model([piece("a", float("nan"))]),
        "score-least": model([piece("H", -3e38), piece("e", -3e38)] + words, {"f3": 1}), "type-seven": model([piece("a", 0, 7)]), "byte-wrong": model([piece("<0xG0>", 0, 6)]),
        "ids-wrong": model(words, {"f41": -5, "f42": 1 << 40}), "control-in-text": model([piece("He", 0, 3)] + words),
        "block-too-long": model(words) + b"\x0a\xff\xff\xff\xff\x0f", "number-too-long": b"\x0a\x00\x20" + b"\xff" * 11, "group": b"\x0a\x00\x23\x24", "empty": b"",
        "unknown-fields": model(words, f100=[1, 2.5, "x"]), "tekken": text, "tekken-named": json.dumps(tekken | {"special_tokens": [{"rank": 0, "token_str": "<s>"}]}),
        "tekken-vocab-first": json.dumps(dict(reversed(tekken.items()))), "tekken-cut": text[:-400], "tekken-too-few": text.replace('"default_vocab_size":280', '"default_vocab_size":290'),
        "tekken-new": text.replace("v3", "v13"), "ranks": "".join("%s %d\n" % (token, i) for i, token in enumerate(ranks)), "ranks-no-number": "IQ== \n", "ranks-no-base64": "? 1\n",
    }


def tokenizer_seeds():
    golden = json.loads((GOLDEN / "tokenizer.json").read_text())
    seeds = {}
    for i, variant in enumerate(golden["variants"][::2]):
        (key, value), = variant[0].items()
        seeds["step-%02d" % i] = tokenizer_json(**{key: value})
    model = json.loads(tokenizer_json())["model"]
    around = golden["vocabularies"]["llama"]["post_processor"]
    around = json.loads(json.dumps(around).replace("<|begin|>", "<|im_end|>").replace("901", "261"))
    regex = golden["vocabularies"]["qwen"]["pre_tokenizer"]
    files = json.loads((GOLDEN / "tokenizer_files.json").read_text())
    for i, (base, change, _) in enumerate(files["variants"]):
        if base == "bpe":
            seeds["text-%02d" % i] = text_tokenizer(change)
    unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
               "vocab": [["<unk>", 0], ["▁", -2.5], ["e", -3], ["l", -3.25], ["o", -3.5], ["lo", -4], ["▁wor", -5.5], ["ll", -6]]}
    table = base64.b64encode(charsmap()).decode()
    seeds |= {
        "unigram": tokenizer_json(model=unigram, pre_tokenizer=METASPACE, decoder=METASPACE),
        "unigram-without-unknown": tokenizer_json(model=unigram | {"unk_id": None}, pre_tokenizer=METASPACE),
        "unigram-bytes": tokenizer_json(model=unigram | {"byte_fallback": True}, pre_tokenizer=None),
        "charsmap": tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": table}),
        "charsmap-cut": tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": table[:40]}),
        "letters-twice": tokenizer_json(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL, BYTE_LEVEL]}),
        "letters-often": tokenizer_json(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}),
        "letters-before": tokenizer_json(normalizer={"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30}),
        "replace-often": tokenizer_json(normalizer={"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "l"}, "content": "ll"}] * 40}),
        "replace-tokens-often": tokenizer_json(decoder={"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "l"}, "content": "ll"}] * 40}),
        "set-and-set": tokenizer_json(pre_tokenizer=split({"Regex": r"[\p{L}&&[^\p{Han}]]+|\p{N}{1,3}+|a{2}?"})),
        "set-in-set": tokenizer_json(pre_tokenizer=split({"Regex": "[a[b]]"})),
        "bert": tokenizer_json(post_processor={"type": "BertProcessing", "cls": ["<|im_start|>", 260], "sep": ["<|im_end|>", 261]}),
    }
    seeds |= {
        "plain": tokenizer_json(), "pairs": tokenizer_json(model=model | {"merges": [["t", "h"], ["Ġ", "th"]]}),
        "words": tokenizer_json(pre_tokenizer=regex), "around": tokenizer_json(post_processor=around),
        "around-without-token": tokenizer_json(post_processor=json.loads(json.dumps(around).replace("261", "5000"))),
        "ignore-merges": tokenizer_json(model=model | {"ignore_merges": True}),
        "match-before-its-start": tokenizer_json(pre_tokenizer=split({"Regex": r"(?:(?=Hello(?1))H|(\K)z)"})),
        "match-of-nothing": tokenizer_json(pre_tokenizer=split({"Regex": "x*"})),
        "match-without-end": tokenizer_json(pre_tokenizer=split({"Regex": "(?:a*)*b|(?R)"})),
        "match-slow": tokenizer_json(pre_tokenizer=split({"Regex": r"^(\w+\s?)*$"})),
        "regex-wrong": tokenizer_json(pre_tokenizer=split({"Regex": "(?P<"})),
        "replace-with-more": tokenizer_json(normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": "xx" * 50}),
        "id-largest": tokenizer_json(added_tokens=[{"id": 70000, "content": "far", "special": True}]),
        "id-too-large": tokenizer_json(model=model | {"vocab": {"a": 1 << 24}}),
        "id-negative": tokenizer_json(model=model | {"vocab": {"a": -1}}),
        "id-twice": tokenizer_json(model=model | {"vocab": {"a": 1, "b": 1}}),
        "merge-unknown": tokenizer_json(model=model | {"merges": ["q q"]}),
        "merge-of-one": tokenizer_json(model=model | {"merges": ["th"]}),
        "no-model": json.dumps({"model": None}), "wordpiece": json.dumps({"model": {"type": "WordPiece"}}),
        "empty-token": tokenizer_json(added_tokens=[{"id": 260, "content": "", "special": False}]),
        "terminal": tokenizer_json(normalizer={"type": "\x1b[31mEVIL\x07"}),
    }
    return seeds


def tokenizer_text_seeds():
    golden = json.loads((GOLDEN / "tokenizer.json").read_text())
    texts = [case[0] for case in golden["cases"]["qwen"]][:44]
    seeds = {"text-%02d" % i: text for i, text in enumerate(texts)}
    seeds |= {"bytes-cut": b"\xe6\x97", "bytes-none": bytes(range(128, 160)), "long": "the theatre, ten " * 40,
              "marks": "e" + "\u0301\u0323" * 60, "one-word": "tho" * 400}
    return seeds


def chat_seeds():
    golden = json.loads((GOLDEN / "chat.json").read_text())
    given, seeds = {}, {}
    for i, options in enumerate(golden["options"]):
        given[i] = {"tools": options.get("tools"), "add_generation_prompt": options.get("add_generation_prompt", False),
                    "variables": {k: v for k, v in options.items() if k not in ("tools", "add_generation_prompt")}}
    talks = golden["conversations"]
    for i, (name, text) in enumerate(golden["templates"].items()):
        talk = ("calls", "many", "unicode", "system", "parts")[i]
        seeds["talk-" + name] = text + MARK + json.dumps({"messages": talks[talk]} | given[i % 4], ensure_ascii=False)
    variables = MARK + json.dumps({"variables": golden["variables"]}, ensure_ascii=False)
    right = [text for text, want in golden["expressions"] if want is not None]
    wrong = [text for text, want in golden["expressions"] if want is None]
    for i in range(0, len(right), 5):
        seeds["right-%02d" % (i // 5)] = "\n".join(right[i:i + 5]) + variables
    for i in range(0, len(wrong), 3):  # the first that is refused ends it: libFuzzer takes them apart
        seeds["wrong-%02d" % (i // 3)] = "\n".join(wrong[i:i + 3]) + variables
    grow = "{%% set ns = namespace(s='aaaaaaaaaa') %%}{%% for i in range(40) %%}{%% set ns.s = %s %%}{%% endfor %%}"
    seeds |= {
        "grow-replace": grow % "ns.s.replace('a', 'aaaaaaaaaa')", "grow-join": grow % "[ns.s, ns.s] | join(ns.s)",
        "grow-add": grow % "ns.s ~ ns.s", "grow-indent": grow % "(ns.s ~ '\\n' ~ ns.s) | indent(10)",
        "grow-times": grow % "ns.s * 10", "split-much": "{{ ('a' * 60000000).split('a') | length }}",
        "indent-much": "{{ 'a\\nb' | indent(1000000000) }}", "tojson-much": "{{ {'a': [1]} | tojson(indent=1000000000) }}",
        "terminal": "{{ raise_exception('\x1b[31mEVIL\x07') }}",
        "macro-calls-itself": "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
        "ranges": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "deep": "{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "loop-of-loops": "{% for a in messages %}" * 150,
        "integers": "{{ 9223372036854775807 + 1 }} {{ (-9223372036854775807 - 1) // -1 }} {{ 2 ** 64 }} {{ 1 % 0 }}",
    }
    return seeds


def dataset_seeds():
    def lines(*values):
        return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello 🙂"}]
    return {
        "texts": lines(*({"text": "line %d é" % i} for i in range(8))),
        "pairs": lines(*({"prompt": "1 + %d" % i, "completion": str(1 + i)} for i in range(8))),
        "talks": lines(*({"messages": talk * i} for i in range(1, 5))),
        "tools": lines({"messages": talk, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        "prompt-last": lines({"messages": talk + talk[:1]}, {"messages": talk[:1]}),
        "long": lines({"text": "word " * 600}), "blank-lines": "\n \r\n\t\n" + lines({"text": "ab"}) + "\n",
        "prompt-long": lines({"prompt": "word " * 80, "completion": "x"}),
        "no-end-of-line": '{"text": "ab"}', "byte-order-mark": b"\xef\xbb\xbf" + lines({"text": "ab"}).encode(),
        "not-json": "not json\n", "empty": "", "empty-text": lines({"text": ""}), "text-of-number": lines({"text": 1}),
        "content-null": lines({"messages": [{"role": "user", "content": None}]}), "no-messages": lines({"messages": []}),
        "no-role": lines({"messages": [{"content": "x"}]}), "messages-of-numbers": lines({"messages": [1]}),
        "only-prompt": lines({"prompt": "x"}), "array": lines([1, 2]), "special": lines({"text": "<|im_end|><think></think>"}),
        "bytes": bytes(range(256)), "carriage-returns": '{"text": "ab"}\r{"text": "cd"}\r',
    }


def config_seeds():
    seeds = {}
    for path in sorted((TESTS / "parity" / "golden").glob("*/config.json")):
        seeds[path.parent.name] = path.read_bytes()
    plain = json.loads((TESTS / "parity" / "golden" / "qwen3_yarn" / "config.json").read_text())
    mixed = json.loads((TESTS / "parity" / "golden" / "hf_qwen3_next" / "config.json").read_text())
    for name, config, change in (
            ("llama3", plain, {"rope_scaling": {"type": "llama3", "factor": 8, "original_max_position_embeddings": 64}}),
            ("linear", plain, {"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}),
            ("eps-huge", plain, {"rms_norm_eps": 1e300}), ("eps-tiny", plain, {"rms_norm_eps": 1e-300}),
            ("rotary-huge", mixed, {"partial_rotary_factor": 1e300}), ("rotary-tiny", mixed, {"partial_rotary_factor": 5e-324}),
            ("sizes-largest", plain, {"hidden_size": (1 << 31) - 1, "vocab_size": (1 << 31) - 1}),
            ("layers-many", mixed, {"num_hidden_layers": 4096}), ("layers-too-many", mixed, {"num_hidden_layers": 4097}),
            ("heads-zero", plain, {"num_key_value_heads": 0}), ("heads-uneven", plain, {"num_attention_heads": 3}),
            ("width-of-text", plain, {"hidden_size": "64"}), ("width-of-half", plain, {"hidden_size": 64.5}),
            ("quantized", plain, {"quantization": {"bits": 4, "group_size": 64, "lm_head": {"bits": 6, "group_size": 32},
                                                   "model.embed_tokens": False}}),
            ("bits-of-seven", plain, {"quantization": {"bits": 7}}), ("gptq", plain, {"quantization_config": {"quant_method": "gptq"}}),
            ("terminal", plain, {"model_type": "\x1b[31mEVIL\x07"})):
        seeds[name] = json.dumps(config | change, indent=1)
    return seeds


def main():
    write("json", json_seeds())
    write("safetensors", safetensors_seeds())
    write("run_state", run_state_seeds())
    write("tokenizer", tokenizer_seeds())
    write("tokenizer_file", tokenizer_file_seeds())
    write("tokenizer_text", tokenizer_text_seeds())
    write("chat_template", chat_seeds())
    write("dataset", dataset_seeds())
    write("config", config_seeds())


if __name__ == "__main__":
    main()
