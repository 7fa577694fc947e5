#!/usr/bin/env python3
"""Writes golden/tokenizer_files.json: small tokenizers of every kind of file but tokenizer.json of bytes (that is
make_tokenizer_golden.py), and what sentencepiece, tiktoken and tokenizers make of a few texts with them.

    python3 tests/formats/make_tokenizer_files_golden.py > tests/formats/golden/tokenizer_files.json
"""
import base64
import io
import json
import pathlib
import random
import sys
import tempfile

import sentencepiece
import tiktoken
from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).parent
sys.dont_write_bytecode = True
sys.path[:0] = [str(HERE), str(HERE.parent / "parity")]
import make_tokenizer_golden as bytes_golden  # noqa: E402
import reference_tokenizers as reference  # noqa: E402
import tokenizer_texts  # noqa: E402

# A few of the replacements that published tables have thousands of: one to one, to several, to none, of several.
RULES = [("Ａ", "A"), ("ａ", "a"), ("ﬁ", "fi"), ("½", "1/2"), ("㎏", "kg"), ("\u3000", " "), ("\t", " "), ("\n", " "), ("\u00a0", " "), ("\u00ad", ""),
         ("e\u0301", "é"), ("e\u0323\u0301", "ẹ́"), ("\ufffd", " "), ("…", "..."), ("İ", "i\u0307"), ("👍", "+1 ")]

TEXTS = ["", " ", "  ", "a", "hello world", "  hello   world  ", "the model's weights", "line\nbreak\n\n  x\t y", "1234 5.6e-7", "über schön größer", "cafe\u0301 e\u0323\u0301",
         "日本語の言葉を学習する。", "中文模型", "한국어 단어", "العربية كلمة", "🙂👍🏽 👩‍👩‍👧", "Ａａ ﬁ ½ ㎏ … İ\u00ad", "a\u00a0b\u3000c", "▁", "▁▁a ▁ b", "<0x0A>", "x<mask>y <mask>", "== === ====",
         "日本日本", "\n\n\n\n", "\u0301", "\x00\x01", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "the the the the the the the the the the the the the the the the",
         "UPPER Lower ſtraße ΑΣ", "(a) [b] {c} <d> \"e\" 'f' `g` $5 ^~|+=", "a_b-c", "!!! ... ?", "end "]
BROKEN = [b"a\xffb", b"\xe2\x82", b"\xc3(x", b"\xf0\x9f\x99", b"\xed\xa0\x80z", b" \xff "]


def texts():
    rng = random.Random(4)
    return TEXTS + list(bytes_golden.random_texts(rng, 8)) + [tokenizer_texts.mixed(rng, 30) for _ in range(8)]


def train(**options):
    with tempfile.TemporaryDirectory() as folder:
        if options.pop("table", False):
            rules = pathlib.Path(folder) / "rules.tsv"
            rules.write_text("".join("%s\t%s\n" % tuple(" ".join("%X" % ord(c) for c in side) for side in rule) for rule in RULES))
            options["normalization_rule_tsv"] = str(rules)
        out = io.BytesIO()
        lines = [line for text in bytes_golden.corpus() for line in text.split("\n") if line]
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, minloglevel=2, num_threads=1, character_coverage=0.995, **options)
        return out.getvalue()


def sentencepiece_models():
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    yield "llama", train(model_type="bpe", vocab_size=520, byte_fallback=True, **plain)
    yield "gemma", train(model_type="bpe", vocab_size=520, byte_fallback=True, add_dummy_prefix=False, user_defined_symbols=["\n\n", "▁▁▁", "<mask>"], **plain)
    yield "old", train(model_type="bpe", vocab_size=360, table=True)
    yield "unigram", train(model_type="unigram", vocab_size=360, table=True)
    yield "unigram_bytes", train(model_type="unigram", vocab_size=520, byte_fallback=True, table=True, user_defined_symbols=["<mask>", "==", "日本"])
    yield "suffix", train(model_type="unigram", vocab_size=360, treat_whitespace_as_suffix=True, normalization_rule_name="identity")


def sentencepiece_cases(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    special = [processor.id_to_piece(i) for i in range(len(processor)) if processor.is_control(i) or processor.is_unknown(i)]
    out = []
    for text in reference.without(texts() + BROKEN, special):
        ids = processor.encode(text)
        back = None if processor.unk_id() in ids else processor.decode(ids)
        out.append([{"base64": base64.b64encode(text).decode()} if isinstance(text, bytes) else text, ids, back])
    return out


def hugging_face_cases(data, chosen):
    t = Tokenizer.from_str(json.dumps(data))
    found = [t.encode(text, add_special_tokens=False).ids for text in chosen]

    def back(ids):
        try:
            return t.decode(ids, skip_special_tokens=True)
        except BaseException:  # Strip breaks down where it strips all of a token
            return None
    return [[text, ids, back(ids)] for text, ids in zip(chosen, found)]


def variants(llama, unigram):
    """tokenizer.json by parts: a model and what is changed in it."""
    space, prepend = reference.SPACE, {"type": "Prepend", "prepend": reference.SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": space}
    yield "bpe", {}
    yield "bpe", {"normalizer": replace, "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}}
    for scheme in ("always", "first", "never"):
        for cut in (True, False):
            for model in ("bpe", "unigram"):
                yield model, {"normalizer": None, "pre_tokenizer": reference.metaspace(scheme, cut), "decoder": reference.metaspace(scheme, cut)}
    yield "bpe", {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": space, "add_prefix_space": True, "prepend_scheme": "always", "split": True}}
    for kind in ({"type": "Whitespace"}, {"type": "WhitespaceSplit"}, {"type": "BertPreTokenizer"}, {"type": "Punctuation", "behavior": "Isolated"},
                 {"type": "Punctuation", "behavior": "Contiguous"}, {"type": "CharDelimiterSplit", "delimiter": "e"},
                 {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, reference.metaspace("first", True)]}):
        yield "bpe", {"normalizer": None, "pre_tokenizer": kind, "decoder": None}
    for step in ({"type": "Lowercase"}, {"type": "StripAccents"}, {"type": "Strip", "strip_left": True, "strip_right": False},
                 {"type": "Strip", "strip_left": False, "strip_right": True}, {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(reference.charsmap_of(unigram)).decode()}):
        yield "bpe", {"normalizer": {"type": "Sequence", "normalizers": [step, prepend, replace]}}
    fuse, bytes_, words = {"type": "Fuse"}, {"type": "ByteFallback"}, {"type": "Replace", "pattern": {"String": space}, "content": " "}
    for chain in ([words], [bytes_, words], [words, fuse, {"type": "Strip", "content": "e", "start": 2, "stop": 3}], [{"type": "Strip", "content": space, "start": 1, "stop": 1}, bytes_],
                  [bytes_, fuse, words], [fuse, {"type": "Replace", "pattern": {"Regex": "[ae]+"}, "content": "_"}], [{"type": "Replace", "pattern": {"Regex": "[ae]+"}, "content": "_"}, bytes_]):
        yield "bpe", {"decoder": {"type": "Sequence", "decoders": chain}}
    for fuse_unknown in (True, False):
        yield "bpe", {"model.byte_fallback": False, "model.fuse_unk": fuse_unknown}
    yield "bpe", {"model.byte_fallback": False, "model.unk_token": None}
    yield "bpe", {"model.without": ["<0xE2>", "<0xF0>"]}


def patched(base, patch):
    data = json.loads(json.dumps(base))
    for key, value in patch.items():
        if key == "model.without":
            data["model"]["vocab"] = {t: i for t, i in data["model"]["vocab"].items() if t not in value}
            continue
        where, last = (data["model"], key[6:]) if key.startswith("model.") else (data, key)
        where[last] = value
    return data


def json_tokenizers(models):
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            (pathlib.Path(folder) / f"{name}.model").write_bytes(model)
        space = reference.SPACE
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": space}, {"type": "Replace", "pattern": {"String": " "}, "content": space}]}
        bpe = reference.sentencepiece_bpe(pathlib.Path(folder) / "llama.model", normalizer, None, reference.DECODER)
        unigram = reference.unigram_json(pathlib.Path(folder), "unigram_bytes")
    return {"bpe": bpe, "unigram": unigram}


def tekken():
    """Bytes in order, then what is merged of them, one more than is used."""
    ranks = {bytes([b]): b for b in range(256)}
    for word in ("th", "he", "the", " t", " the", "in", "er", "on", "日".encode()[:2], "日", "本", "日本", "  ", "ing", "model", "never"):
        token = word if isinstance(word, bytes) else word.encode()
        ranks[token] = len(ranks)
    used = len(ranks) - 1
    vocab = [{"rank": r, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for t, r in ranks.items()]
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    data = {"config": {"pattern": pattern, "num_vocab_tokens": len(ranks), "default_vocab_size": used + 30, "default_num_special_tokens": 30, "version": "v3"}, "vocab": vocab}
    encoding = tiktoken.Encoding(name="tekken", pat_str=pattern, mergeable_ranks={t: r for t, r in ranks.items() if r < used}, special_tokens={})
    cases = [[text, [i + 30 for i in encoding.encode(text, disallowed_special=())], text] for text in TEXTS + ["the never ending models in 日本日本", "  the  th"]]
    return {"json": data, "cases": cases}


def main():
    models = dict(sentencepiece_models())
    bases = json_tokenizers(models)
    chosen = TEXTS[1:6] + TEXTS[7:11] + TEXTS[12:13] + TEXTS[15:21] + TEXTS[25:27] + TEXTS[29:31]
    golden = {
        "sentencepiece": {name: {"model": base64.b64encode(model).decode(), "cases": sentencepiece_cases(model)} for name, model in models.items()},
        "json": bases,
        "variants": [[base, patch, hugging_face_cases(patched(bases[base], patch), chosen)] for base, patch in variants(models["llama"], models["unigram"])],
        "tekken": tekken()}
    json.dump(golden, sys.stdout, ensure_ascii=False, separators=(",", ":"))
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
