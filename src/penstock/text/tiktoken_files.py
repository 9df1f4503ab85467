r"""Ranks of tiktoken as a tokenizer.json: `.tiktoken` files and nanochat's pickles.

A `.tiktoken` file is lines of "base64-bytes rank" and nothing else. Its split regex and special
tokens follow from its name (cl100k_base.tiktoken) or from a JSON file beside it
(mine.tiktoken.json):

    {"encoding": "cl100k_base"}
    {"pattern": "\\p{L}+|...", "special_tokens": {"<|end|>": 50256}, "eos_token": "<|end|>"}

tiktoken merges the neighbours whose bytes together have the lowest rank; a tokenizer.json names
pairs. The two agree when a token's every split into two tokens is a pair, in order of the token's
rank: the state in which one of the others would apply does not arise. A word that is one token
needs no merges.
"""

from __future__ import annotations

import base64
import binascii
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, DataError, MissingExtra
from penstock.text.definition import Definition, deciding_content, read_json, read_vocabulary

END = "<|endoftext|>"
FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
P50K_EDIT = {END: 50256, **{token: 50281 + i for i, token in enumerate(FIM)}}
CL100K_SPECIALS = {
    END: 100257,
    **{token: 100258 + i for i, token in enumerate(FIM)},
    "<|endofprompt|>": 100276,
}
O200K_SPECIALS = {END: 199999, "<|endofprompt|>": 200018}
# The published encodings: their pattern and special tokens.
ENCODINGS: dict[str, tuple[str, dict[str, int]]] = {
    "r50k_base": (R50K, {END: 50256}),
    "p50k_base": (R50K, {END: 50256}),
    "p50k_edit": (R50K, P50K_EDIT),
    "cl100k_base": (CL100K, CL100K_SPECIALS),
    "o200k_base": (O200K, O200K_SPECIALS),
}
# How the fast backend spells patterns that mean the same; it knows regexes by their very text.
FAST = {
    R50K: r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    CL100K: CL100K + "+",
}


def define_ranks(file: Path) -> Definition:
    """The tokenizer that a .tiktoken file and its name or sidecar define."""
    pattern, specials, eos = _scheme(file)
    ranks = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(
                f"{file}, line {number}: found {line[:40]!r}, expected base64 bytes and their rank"
            ) from None
    return from_ranks(file, ranks, pattern, specials, eos)


def define_pickle(file: Path, *, trust_pickle: bool) -> Definition:
    """The tokenizer that a pickled tiktoken.Encoding is."""
    if not trust_pickle:
        raise ConfigError(
            f"{file} is a pickle, and opening one runs whatever code is in it: pass "
            "trust_pickle=True if you trust who made it, or give a tokenizer.json"
        )
    try:
        import tiktoken  # noqa: PLC0415 - optional
    except ImportError:
        raise MissingExtra(
            f"{file} is a pickled tiktoken encoding, and tiktoken is not installed: "
            "pip install tiktoken"
        ) from None
    try:
        encoding = pickle.loads(file.read_bytes())  # noqa: S301 - the caller trusts it, in words
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise anything
        raise DataError(f"{file} cannot be unpickled: {error!r}") from None
    if not isinstance(encoding, tiktoken.Encoding):
        raise DataError(f"{file} holds a {type(encoding).__name__}, expected a tiktoken.Encoding")
    # tiktoken has no public way to them.
    ranks, specials = encoding._mergeable_ranks, encoding._special_tokens  # noqa: SLF001
    pattern = encoding._pat_str  # noqa: SLF001
    return from_ranks(file, ranks, pattern, specials, END if END in specials else None)


def from_ranks(
    file: Path,
    ranks: Mapping[bytes, int],
    pattern: str,
    specials: Mapping[str, int],
    eos: str | None,
) -> Definition:
    """The definition of an encoding: bytes to ranks, a split regex, special tokens."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{file} has no rank for {len(missing)} of the 256 bytes: {missing[:5]} …")
    taken = set(ranks.values())
    if len(taken) < len(ranks):
        raise DataError(f"{file} gives two tokens the same rank")
    for token, i in specials.items():
        if i in taken:
            raise DataError(f"{file}: the special token {token!r} has id {i}, which is a rank too")
        taken.add(i)
    added = [{"id": i, "content": token, "special": True} for token, i in specials.items()]
    # Special tokens are words of the vocabulary too, since added tokens alone cannot leave holes.
    vocab = {spell(token): rank for token, rank in ranks.items()} | dict(specials)
    split = {"Regex": onig_pattern(pattern)}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": split, "behavior": "Isolated", "invert": False},
                {**BYTE_LEVEL, "use_regex": False},
            ],
        },
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": vocab,
            "merges": pairs(ranks),
        },
    }
    ids = read_vocabulary(content, file)
    bos = "<|bos|>" if "<|bos|>" in specials else None
    named = {"eos_token": eos, "bos_token": bos}
    return Definition(
        path=str(file.absolute()),
        content=deciding_content(content, ids, set(), file),
        ids=ids,
        named={name: token for name, token in named.items() if token is not None},
        eos_id=None if eos is None else specials[eos],
        bos_id=None if bos is None else specials[bos],
        pad_id=None,
        fast_pattern=FAST.get(pattern),
    )


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def pairs(ranks: Mapping[bytes, int]) -> list[list[str]]:
    """Each way to make a token of two others, in order of the token's rank.

    >>> pairs({b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5})
    [['a', 'b'], ['b', 'c'], ['a', 'bc'], ['ab', 'c']]
    """
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                found.append([spell(left), spell(right)])
    return found


def onig_pattern(pattern: str) -> str:
    r"""A pattern of tiktoken's (Rust) for Oniguruma, in which two constructs mean something else.

    {1,3}+ is possessive there, and one or more times here; $ is the end there, and any line's here.

    >>> onig_pattern(r"\p{N}{1,3}+|\s++$|[$]\$")
    '(?>\\p{N}{1,3})|\\s++\\z|[$]\\$'
    """
    atom = r"(\\[pP]\{\^?\w+\}|\\.|\[(?:\\.|[^\]\\])*\]|[^\\\[\](){}|?*+])"
    pattern = re.sub(atom + r"(\{\d+(?:,\d*)?\})\+", r"(?>\1\2)", pattern)
    token = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\$", re.DOTALL)
    return token.sub(lambda found: r"\z" if found[0] == "$" else found[0], pattern)


def _alphabet() -> list[str]:
    """GPT-2's letter for each byte: itself where that can be seen, else one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, hidden = [], 0
    for byte in range(256):
        letters.append(chr(byte if byte in shown else 256 + hidden))
        hidden += byte not in shown
    return letters


ALPHABET = dict(enumerate(_alphabet()))  # for str.translate


def spell(token: bytes) -> str:
    r"""Bytes as a byte-level vocabulary spells them.

    >>> spell(b" caf\xc3")
    'ĠcafÃ'
    """
    return token.decode("latin-1").translate(ALPHABET)


def _scheme(file: Path) -> tuple[str, dict[str, int], str | None]:
    """The pattern, special tokens and EOS of a .tiktoken file."""
    sidecar = file.with_name(file.name + ".json")
    said: dict[str, Any] = read_json(sidecar) if sidecar.is_file() else {"encoding": file.stem}
    name = said.get("encoding")
    if "pattern" in said:
        pattern, specials = said["pattern"], said.get("special_tokens", {})
    elif name in ENCODINGS:
        pattern, specials = ENCODINGS[name]
    else:
        raise ConfigError(
            f"{file} holds ranks only, and its split regex does not follow from the name {name!r} "
            f"(known are {', '.join(ENCODINGS)}): write {sidecar.name} beside it with "
            '{"encoding": a known name} or {"pattern": …, "special_tokens": {…}, "eos_token": …}'
        )
    good = isinstance(specials, dict) and all(type(i) is int for i in specials.values())
    if not isinstance(pattern, str) or not good:
        raise DataError(
            f"{sidecar} should have a string as pattern and ids by token as special_tokens"
        )
    eos = said.get("eos_token", END if END in specials else None)
    if eos is not None and eos not in specials:
        raise DataError(f"{sidecar} names {eos!r} as EOS, which is not in its special_tokens")
    return pattern, specials, eos
