"""A tokenizer as its files define it: content that decides ids, and the names around it.

    definition = define("tokenizers/mine")                # penstock.text.tokenizer_files
    definition.eos_id, definition.vocab_size, content_hash(definition.content)

The content is a `tokenizer.json` without what belongs to other stages: truncation, padding, dropout
and the post-processor that adds BOS. A tokenizer of any other format is written as one, so that
both backends serve it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import operator
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import DataError

MODEL_TYPES = ("BPE", "Unigram", "WordPiece", "WordLevel")
LARGEST_ID = 2**32 - 1
# What of an added token decides ids, next to its content and id; absent is False.
FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a tokenizer's files say, read and checked but not loaded."""

    path: str  # what opens the same tokenizer again
    content: dict[str, Any]  # as tokenizer.json has it
    ids: dict[str, int]  # every token, the added ones too
    named: dict[str, str]  # "eos_token" -> "</s>"
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    chat_template: str | None = None
    fast_pattern: str | None = None  # the same split regex, spelt as the fast backend knows it

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values()) + 1

    @property
    def specials(self) -> dict[str, int]:
        """The added tokens marked special, by text."""
        return {t["content"]: t["id"] for t in self.content["added_tokens"] if t.get("special")}

    @property
    def added(self) -> list[tuple[str, int]]:
        """Every added token's text and id, in order of id."""
        tokens = [(token["content"], token["id"]) for token in self.content["added_tokens"]]
        return sorted(tokens, key=operator.itemgetter(1))


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{file} should hold a JSON object, and holds a {type(content).__name__}")
    return content


def read_vocabulary(content: dict[str, Any], file: object) -> dict[str, int]:
    """Every token's id.

    >>> added = [{"content": "</s>", "id": 2}]
    >>> read_vocabulary({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added}, "a file")
    {'a': 0, 'b': 1, '</s>': 2}
    """
    try:
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # unigram: [token, score] in order of id
            vocab = {row[0]: i for i, row in enumerate(vocab)}
        ids = {str(token): operator.index(i) for token, i in vocab.items()}
        added = content.get("added_tokens") or []
        ids |= {str(token["content"]): operator.index(token["id"]) for token in added}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(
            f"{file} has no vocabulary where tokenizer.json keeps it: {error!r}"
        ) from None
    if not ids:
        raise DataError(f"{file} has an empty vocabulary")
    for token, i in ids.items():
        if not 0 <= i <= LARGEST_ID:
            raise DataError(
                f"{file} gives {token!r} the id {i}, and ids are from 0 to {LARGEST_ID} (uint32)"
            )
    return ids


def deciding_content(
    content: dict[str, Any], ids: dict[str, int], specials: set[str], file: object
) -> dict[str, Any]:
    """A tokenizer.json without the stages that are not encoding; `specials` become special tokens.

    A token that only tokenizer_config.json calls special is one, as it is for transformers.
    """
    model = content["model"]
    kind = model.get("type")  # old files have none, and are known by their fields
    if kind is not None and kind not in MODEL_TYPES:
        raise DataError(
            f"{file} has a model of type {kind!r}, and the types known are {', '.join(MODEL_TYPES)}"
        )
    added = [
        {
            **dict.fromkeys(FLAGS, False),
            **token,
            "special": bool(token.get("special")) or token["content"] in specials,
        }
        for token in content.get("added_tokens") or []
    ]
    there = {token["content"] for token in added}
    for token in sorted((specials & ids.keys()) - there, key=ids.__getitem__):
        flags = dict.fromkeys(FLAGS, False)
        added.append({"id": ids[token], "content": token, **flags, "special": True})
    added.sort(key=operator.itemgetter("id"))
    stages = {"added_tokens": added, "truncation": None, "padding": None, "post_processor": None}
    try:
        merges = {"merges": [_pair(merge) for merge in model["merges"]]}
    except KeyError:
        merges = {}
    except (ValueError, TypeError, AttributeError):
        raise DataError(f"{file} has merges that are not pairs of words") from None
    dropout = {"dropout": None} if "dropout" in model else {}
    model = {**model, **dropout, **merges}
    return {**content, **stages, "model": model}


def content_hash(content: dict[str, Any]) -> str:
    """SHA-256 of what decides ids: not of names, spacing, the order of keys, or how ids decode.

    >>> model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    >>> newer = {**model, "merges": [["a", "b"]], "fuse_unk": False}
    >>> content_hash({"model": model}) == content_hash({"model": newer})
    True
    """
    model = {k: v for k, v in content["model"].items() if v is not None and v is not False}
    if "merges" in model:
        model["merges"] = [_pair(merge) for merge in model["merges"]]
    added = [
        [token["id"], token["content"], *(bool(token.get(flag)) for flag in FLAGS)]
        for token in content.get("added_tokens") or []
    ]
    stages = [content.get("normalizer"), content.get("pre_tokenizer")]
    canonical = json.dumps([model, sorted(added), *stages], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def sealed(content: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """The content under which text that spells a special token is text.

    Every special token is given a random name of 128 bits, which no text spells, in the added
    tokens and in the vocabulary: Unigram, or BPE that looks up whole words, would find "</s>"
    there. Words that other words are merged from, and single characters, stay what they are. With
    keep=False the added tokens marked special are left out; that is quicker, and right only where
    the ids of the others are read from the file instead of counted (the fast backend).

    >>> added = [{"id": 7, "content": "</s>", "special": True}, {"id": 8, "content": "<think>"}]
    >>> there = {"model": {"vocab": {"a": 0}}, "added_tokens": added}
    >>> [token["content"] for token in sealed(there, keep=False)["added_tokens"]]
    ['<think>']
    """
    content = copy.copy(content)
    specials = [t["content"] for t in content["added_tokens"] if t.get("special")]
    names = {token: f"<|{secrets.token_hex(16)}|>" for token in specials}
    content["model"] = _rename(content["model"], names)
    content["added_tokens"] = [
        {**token, "content": names[token["content"]]} if token.get("special") else token
        for token in content["added_tokens"]
        if keep or not token.get("special")
    ]
    return content


def _rename(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The model with those words of its vocabulary renamed, and no merges that make them."""
    vocab, merges = model["vocab"], [_pair(merge) for merge in model.get("merges", ())]
    parts = {part for pair in merges for part in pair}
    kept = {token for token in names if len(token) == 1 or token in parts}
    if model.get("byte_fallback"):
        kept |= {token for token in names if BYTE_PIECE.fullmatch(token)}
    names = {token: name for token, name in names.items() if token not in kept}
    renamed = dict(model)
    if isinstance(vocab, list):
        renamed["vocab"] = [[names.get(row[0], row[0]), *row[1:]] for row in vocab]
    else:
        renamed["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
    if model.get("unk_token") in names:
        renamed["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        prefix = len(model.get("continuing_subword_prefix") or "")
        renamed["merges"] = [pair for pair in merges if pair[0] + pair[1][prefix:] not in names]
    return renamed


def _pair(merge: str | list[str]) -> list[str]:
    """The two words of a merge, of which older files make one string.

    A list is given as it is: 50,000 new ones cost less than what the collector then looks through.
    """
    pair = merge.split(" ") if isinstance(merge, str) else merge
    _, _ = pair
    return pair
