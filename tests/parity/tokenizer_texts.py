"""Texts that tell tokenizers apart: many scripts, code, white space, emoji, marks, numbers. Made up, the same each time."""
import inspect
import pydoc
import random
import string
import unicodedata

# First and last code point of what is drawn from.
SCRIPTS = {
    "latin": (0x41, 0x24F), "ipa": (0x250, 0x2FF), "marks": (0x300, 0x36F), "greek": (0x370, 0x3FF), "cyrillic": (0x400, 0x52F),
    "armenian": (0x531, 0x58A), "hebrew": (0x591, 0x5F4), "arabic": (0x600, 0x6FF), "syriac": (0x700, 0x74F), "devanagari": (0x900, 0x97F),
    "bengali": (0x980, 0x9FE), "gurmukhi": (0xA01, 0xA76), "tamil": (0xB82, 0xBFA), "telugu": (0xC00, 0xC7F), "malayalam": (0xD00, 0xD7F),
    "sinhala": (0xD81, 0xDF4), "thai": (0xE01, 0xE5B), "lao": (0xE81, 0xEDF), "tibetan": (0xF00, 0xFDA), "burmese": (0x1000, 0x109F),
    "georgian": (0x10A0, 0x10FF), "jamo": (0x1100, 0x11FF), "ethiopic": (0x1200, 0x139F), "cherokee": (0x13A0, 0x13FD),
    "khmer": (0x1780, 0x17F9), "mongolian": (0x1800, 0x18AA), "vietnamese": (0x1E00, 0x1EFF), "old greek": (0x1F00, 0x1FFE),
    "punctuation": (0x2000, 0x206F), "raised": (0x2070, 0x209C), "money": (0x20A0, 0x20C0), "letters": (0x2100, 0x218B), "arrows": (0x2190, 0x21FF),
    "maths": (0x2200, 0x22FF), "technical": (0x2300, 0x23FF), "ringed": (0x2460, 0x24FF), "boxes": (0x2500, 0x25FF), "signs": (0x2600, 0x27BF),
    "braille": (0x2800, 0x28FF), "cjk marks": (0x3000, 0x303F), "hiragana": (0x3041, 0x309F), "katakana": (0x30A0, 0x30FF),
    "bopomofo": (0x3105, 0x312F), "cjk squares": (0x3200, 0x33FF), "chinese": (0x4E00, 0x9FFF), "yi": (0xA000, 0xA48C), "hangul": (0xAC00, 0xD7A3),
    "private": (0xE000, 0xE0FF), "ligatures": (0xFB00, 0xFB4F), "arabic forms": (0xFB50, 0xFDFF), "wide": (0xFF01, 0xFFEE), "gothic": (0x10330, 0x1034A),
    "music": (0x1D100, 0x1D1E8), "mathematical": (0x1D400, 0x1D7FF), "emoji": (0x1F300, 0x1F6FF), "faces": (0x1F900, 0x1F9FF), "rare chinese": (0x20000, 0x20FFF),
}
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\u00a0", "\u2003", "\u3000", "\u200b", "\u2028", "\x85", "\x0b", "\x0c", "\x1c"]
SEQUENCES = ["👩‍👩‍👧‍👦", "🇨🇭", "🇩🇪🇫🇷", "👍🏽", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "1️⃣", "e\u0301", "e\u0323\u0301", "A\u030a", "ﬁ", "ﷺ", "Å", "Ǆ", "가", "각", "각", "क्षि",
             "ﾊﾞ", "㎏", "½", "Ⅷ", "١٢٣", "๑๒", "ß", "ẞ", "İ", "ı", "ſ", "K", "ς", "\ufeff", "\u00ad", "\ufffd", "\u202e", "don't", "I'LL", "we'VE", "'s", "’s",
             "https://example.org/a?b=c&d=%20#e", "x@y.z", "C:\\new\\table", "3.14159e-10", "1,234,567.89", "0xDEADBEEF", "2024-02-29T23:59:60Z",
             "<p class=\"x\">", "</s>x", "<|x|>", "[INST]x", "#include <x>", "$\\frac{a}{b}$", "a_b_c", "camelCaseWord", "SCREAMING_SNAKE", "____", "----", "....", "====", "\x00",
             "\x1b[0m", "\x7f", "▁", "▁▁", "▁a", "Ġ", "Ċ", "<0x0A>", "<unk", "\u180e", "ｈｅｌｌｏ"]


def characters(low, high):
    # Python 3.11's Unicode is 14, as PCRE2's: characters that are newer have no properties there.
    return [chr(c) for c in range(low, high + 1) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]


POOLS = {name: characters(*ends) for name, ends in SCRIPTS.items()}


def words(rng, pool, count):
    return " ".join("".join(rng.choice(pool) for _ in range(rng.choice((1, 2, 3, 4, 5, 6, 8, 12)))) for _ in range(count))


def mixed(rng, length):
    out = []
    while sum(map(len, out)) < length:
        kind = rng.random()
        if kind < 0.3:
            out.append(words(rng, POOLS[rng.choice(list(POOLS))], rng.randint(1, 4)))
        elif kind < 0.45:
            out.append(rng.choice(SPACES) * rng.randint(1, 3))
        elif kind < 0.6:
            out.append(rng.choice(SEQUENCES))
        elif kind < 0.7:
            out.append("".join(rng.choice(string.digits) for _ in range(rng.randint(1, 9))))
        elif kind < 0.8:
            out.append("".join(rng.choice(string.punctuation) for _ in range(rng.randint(1, 4))))
        else:
            out.append(words(rng, string.ascii_letters if rng.random() < 0.3 else "etaoinshrdlu", rng.randint(1, 3)))
        if rng.random() < 0.3:
            out.append(" ")
    return "".join(out)


def prose_and_code():
    """What Python's own library says of itself, and how it is written."""
    for module in ("argparse", "ast", "asyncio.tasks", "collections", "csv", "datetime", "difflib", "email.message", "heapq", "inspect", "json.decoder", "logging",
                   "pathlib", "pickle", "random", "statistics", "tarfile", "textwrap", "turtle", "typing", "unittest.mock", "urllib.parse", "zipfile"):
        found = pydoc.locate(module)
        yield pydoc.render_doc(found, renderer=pydoc.plaintext)[:30000]
        yield inspect.getsource(found)[:30000]


def texts(characters_in_all=1_200_000, seed=1):
    rng = random.Random(seed)
    out = ["", " ", "  ", "a", "\n", "▁", "é", "日", "🙂", "\u0301", "\x00", "a" * 3000, " " * 300, "\n" * 300, "日本" * 1500, "\u0301" * 300, "=" * 1000, "1" * 1000]
    out += SEQUENCES + SPACES + [a + "x" + b for a in SPACES for b in SPACES]
    for name, pool in POOLS.items():
        out += [words(rng, pool, 8) for _ in range(12)]
        out += pool[:200] if name == "marks" else []
    for text in prose_and_code():
        at = 0
        while at < len(text):
            step = rng.choice((40, 200, 900))
            out.append(text[at:at + step])
            at += step
    count = sum(map(len, out))
    while count < characters_in_all:
        out.append(mixed(rng, rng.choice((10, 40, 150, 600))))
        count += len(out[-1])
    return out


def broken(seed=2, count=3000):
    """Bytes that are no UTF-8, now and then."""
    rng = random.Random(seed)
    for _ in range(count):
        text = bytearray(mixed(rng, 30).encode())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            if rng.random() < 0.5:
                text[at] = rng.randrange(256)
            else:
                del text[at]
        yield bytes(text)
