#!/usr/bin/env python3
"""Writes golden/tokenizer.json: two small vocabularies trained with the pre-tokenizers of Qwen and of Llama 3, variants
of them that differ in a step, texts, and the ids that the package `tokenizers` gives.

    python3 tests/formats/make_tokenizer_golden.py > tests/formats/golden/tokenizer.json
"""
import json
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)

WORDS = """the a of to and in is it that was he for on are with as his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down only way
find use may water long little very after words called just where most know model token letter train learn weight tensor
memory kernel matrix vector number quantise distil stream decode encode space line break return import define class print
über schön größer Straße naïve café façade señor mañana être français где время человек слово язык это был для 日本語 言葉 学習
中文 模型 训练 数据 한국어 단어 العربية كلمة हिन्दी शब्द ελληνικά λέξη""".split()


def corpus():
    rng = random.Random(1)
    for _ in range(1500):
        words = [rng.choice(WORDS) for _ in range(rng.randint(3, 12))]
        if rng.random() < 0.2:
            words.append(str(rng.randint(0, 99999)))
        line = " ".join(words)
        yield (line[0].upper() + line[1:] + rng.choice([".", "!", "?", ";\n", ":\n    ", "'s", "\n\n"]))
    for _ in range(200):
        name = rng.choice(WORDS[:100])
        yield f"def {name}(self, x={rng.randint(0, 9)}):\n    return self.{name}[x] + 1  # don't\n"


def train(pattern, size):
    t = Tokenizer(models.BPE(ignore_merges=pattern == LLAMA))
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return t


def qwen():
    t = train(QWEN, 1000)
    t.normalizer = normalizers.NFC()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    t.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    t.add_tokens([AddedToken(s, normalized=False) for s in ("<tool_call>", "<think>", "</think>", "<|im")])
    return json.loads(t.to_str())


def llama():
    data = json.loads(train(LLAMA, 900).to_str())
    data["model"]["vocab"]["Ġzzqx"] = 900  # a word that is a token, and that no merges lead to
    t = Tokenizer.from_str(json.dumps(data))
    t.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|end|>", lstrip=True, rstrip=True, special=True)])
    t.add_tokens([AddedToken("word", single_word=True), AddedToken("<left>", lstrip=True, normalized=False),
                  AddedToken("<right>", rstrip=True), AddedToken("é!", normalized=True), AddedToken("two words")])
    t.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B",
                                      special_tokens=[("<|begin|>", t.token_to_id("<|begin|>"))])])
    data = json.loads(t.to_str())
    data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
    return data


TEXTS = [
    "", " ", "  ", "a", "Hello world", " Hello  world ", "the model's weights, don't they'LL WE'VE I'd 'S 'x",
    "line\nbreak\r\n\r\n  indented\n\n\n", "tabs\t\tand \t mixed \n \n x", "12345 1 22 333 4444 1.5e-3 ½ ² Ⅷ ٣",
    "def f(self, x=3):\n    return self.f[x] + 1  # don't\n", "über schön größer Straße café", "cafe\u0301 e\u0301\u0323 A\u030a \u1e9b\u0323",
    "где время человек", "日本語の言葉を学習する。", "中文模型训练数据", "한국어 단어", "\u1112\u1161\u11ab", "العربية كلمة", "हिन्दी शब्द", "🙂🙃👩‍👩‍👧‍👦 🇨🇭",
    "a\u00a0b\u2003c\u3000d\u180ee\u200bf\u2028g\x85h", "!!! ... ?!? --- *** (a) [b] {c} <d> \"e\" 'f' `g`", "snake_case camelCase PascalCase SCREAMING",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nso\n</think>", "<|im_start|", "<|im_", "<|im_end|><|im_end|>",
    "x <|end|>  y", "word words sword word, word_ word 12word ⓐword word²", " two words", "two wordsx", "a  <left>  b", "a  <right>  b", "<|begin|><left> <right> <|end|> ", "é! e\u0301! É!",
    "zzqx zzqx", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "thethethethethethethethethethethethethethethethethethethethethethethethethethethethethe", "\x00\x01\x7f", "ﬁ ﬃ Å ㎏ ① ｱ", "\ufffd\ufeff", "İıſK",
]


def random_texts(rng, n):
    pools = ["abcdefgh etaoin ETAOIN  ", "0123456789 .,;:!?'\"-_()", " \n\r\t\u00a0\u2003\u3000\u180e\u0085", "äöüßéèçñ\u0301\u0308\u0323",
             "чтоэпривет", "日本語中文한국어", "🙂👩\u200d🇨\U00010348\U0001d7d8", "'sS'tT'LL'Re ſ", "<|im_start|><think>word <left>"]
    for _ in range(n):
        yield "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 18)))


def variants():
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

    def split(pattern, behavior, invert=False, kind="Regex"):
        return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}, byte]}}

    for behavior in ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        for invert in (False, True):
            yield split(r"[ t,]", behavior, invert)
    yield split(r"\s", "Removed")
    yield split("e t", "Isolated", False, "String")
    yield split(".t", "Removed", False, "String")
    for digits in (False, True):
        yield {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": digits}, byte]}}
    for prefix in (False, True):
        yield {"pre_tokenizer": dict(byte, add_prefix_space=prefix, use_regex=True)}
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        yield {"normalizer": {"type": form}}
    yield {"normalizer": None}
    yield {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": " "}, "content": "_"}, {"type": "Replace", "pattern": {"Regex": r"[0-9]+|\s"}, "content": "#"},
        {"type": "Prepend", "prepend": ">>"}]}}


VARIANT_TEXTS = [t for t in TEXTS if t in ("", "Hello world", "12345 1 22 333 4444 1.5e-3 ½ ² Ⅷ ٣", "ﬁ ﬃ Å ㎏ ① ｱ", "İıſK", "<|im_end|><|im_end|>",
                                           "\u1112\u1161\u11ab")] + [
    "the theatre, it's at ten to ten, tt,,  t", "a\u180eb c\u2003d", ",,a,, b ", "e\u0301\u0323\u0316\u0301 A\u030a \u1e9b\u0323 두"]


def main():
    rng = random.Random(2)
    golden = {"vocabularies": {"qwen": qwen(), "llama": llama()}, "cases": {}, "variants": []}
    # Words that are long enough for the way with a heap, where many pairs are alike and many change.
    words = ["".join(rng.choice(letters) for _ in range(rng.randint(60, 90))) for letters in ("etaoinsh", "leo", "ale", "then") for _ in range(4)]
    texts = TEXTS + words + list(random_texts(rng, 60))
    for name, data in golden["vocabularies"].items():
        t = Tokenizer.from_str(json.dumps(data))
        golden["cases"][name] = [[s, t.encode(s).ids, t.decode(t.encode(s).ids, skip_special_tokens=True)] for s in texts]
    for patch in variants():
        t = Tokenizer.from_str(json.dumps({**golden["vocabularies"]["qwen"], **patch}))
        golden["variants"].append([patch, [[s, t.encode(s).ids] for s in VARIANT_TEXTS]])
    # Decoding alone: bytes that make no characters, ids that are no tokens.
    t = Tokenizer.from_str(json.dumps(golden["vocabularies"]["qwen"]))
    golden["decodes"] = [[ids, t.decode(ids, skip_special_tokens=False)]
                         for ids in [[rng.randrange(1100) for _ in range(rng.randint(1, 12))] for _ in range(60)]
                         + [[rng.randrange(94, 256) for _ in range(8)] for _ in range(30)]]
    json.dump(golden, sys.stdout, ensure_ascii=False, separators=(",", ":"))
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
