"""Texts on which tokenizers go wrong: two backends have to agree on them, or one serves.

    for text in hard_set(specials=["<|endoftext|>"]): ...

Each line is a place where tokenizers may part. With the tokens of a tokenizer given, they
are spelt in the text in the ways that matter: alone, inside words, twice, between spaces.
"""

from __future__ import annotations

from collections.abc import Iterable

SPACE = [
    "",
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\r",
    "a ",
    " a",
    "  a  b   c    ",
    "\ta\t\tb\t",
    "a\n    ",  # two published cl100k regexes split this differently, at the end of the text only
    "a \n \n  b",
    "\n\n\n  \n",
    "one\r\ntwo\r\n\r\n  three\r\n ",
    "a\u00a0b\u2003c\u3000d\u2028e\u0085f\u200bg\ufeffh",
    "\x0b\x0c\x1c\x1f",
]
WORDS = [
    "Hello, world!",
    "I'll we've they'RE O'Neill 'S 'tis rock'n'roll don’t",
    "camelCaseHTTPServer snake_case __init__ SCREAMING",
    "Ünïcödé ǅ ǆ ſ İ ı ß ẞ ŉ ﬁ",
    "ﬁne ½ ² Ⅷ ① ㊙ ｆｕｌｌ",
    "e\u0301 é a\u0308\u0323 \u0301start q\u0307\u0323 \u1100\u1161\u11a8",
    "Ελληνικά Русский Հայերեն ქართული",
    "שָׁלוֹם עולם",
    "السَّلَامُ عَلَيْكُم \u202eabc\u202c",
    "हिन्दी क्षत्रिय ไทย ภาษาไทย မြန်မာ",
    "日本語の文章、中文分词。한국어 문장",
    "𠀀𠮷 𝒜𝓫𝔠 𐍈",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇯🇵 ❤️ 🏴\U000e0067\U000e0062\U000e007f",
    "don't\u2019s “quoted” — … «x»",
    "https://example.org/a?b=c&d=%20#e f@g.h C:\\x\\y",
    "if (x<=1&&y!=2){z+=3;}//###$$$%%%^^^",
]
NUMBERS = [
    "1",
    "12",
    "123",
    "1234",
    "12345678901234567890",
    "3.14159 1,000,000 0xFF 1e-9",
    "٣١٤ १२३ ½3",
]
ODD = [
    "\x00",
    "a\x00b\x00\x00",
    "\x01\x7f\x80\x9f",
    "\ufffd\ufffe\uffff\ufdd0",
    "\ue000\uf8ff\U000f0000\U0010fffd\U0010ffff",
    "▁ ▁▁a ▁ b▁",
    "Ġ Ċ ĉ Ġa",
    "<0x0A> <0x00> <0xFF>",
    "<s></s><unk><pad>[CLS][MASK]<|endoftext|><|im_start|>",
]
# Runs: long enough for quadratic code to show, short enough that opening a tokenizer is quick.
RUN = 10_000
RUNS = [
    unit * (RUN // len(unit))
    for unit in (" ", "a", "\n", "=", "0", "ab", "é", "日", "👍", " \n", "\x00")
]


def hard_set(specials: Iterable[str] = ()) -> list[str]:
    """The texts, with those tokens spelt in some of them.

    >>> "" in hard_set() and "x<s>y" in hard_set(["<s>"])
    True
    """
    texts = [*SPACE, *WORDS, *NUMBERS, *ODD, *RUNS]
    tokens = sorted(set(specials), key=lambda token: (len(token), token))[:100]
    for token in tokens:
        texts += [token, f"x{token}y", f"a {token} b", f"{token}{token}\n{token}", token[:-1]]
        texts.append(f"{token[: len(token) // 2]}{token}{token[1:]}é{token}日")
    texts.append(" then ".join(tokens))
    return texts
