"""Texts to ids and masks, many at a time.

A template's text is tokenised whole, its special tokens recognised. A message that spells one, say
`<|im_end|>`, must not end its turn: its conversation is rendered a second time with such spellings
replaced, character by character, by ones of private use, which shows the template's own specials.
What stands between those is then tokenised as the text it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.prepare.outcome import Refused

if TYPE_CHECKING:
    from penstock.prepare.conversation import Spans
    from penstock.text.tokenizer import Tokenizer

Ids = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]

_PRIVATE, _LAST = 0xF0000, 0x10FFFD
_LEADS = ("\n", ".", "|", " ")


@dataclass(slots=True)
class Piece:
    """One text to tokenise. `trained` is all of it, nothing, or spans of characters.

    `parse`: its special tokens are special. `hidden` is the text with the spellings of messages
    replaced, where there are any.
    """

    text: str
    trained: bool | Spans
    parse: bool = False
    hidden: str | None = None
    ids: Ids = field(default_factory=lambda: np.empty(0, np.uint32))
    mask: Mask = field(default_factory=lambda: np.empty(0, np.bool_))


class Encoder:
    """Fills pieces with one call of the tokenizer for each way of calling it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._specials = dict(tokenizer.specials)
        longest = sorted(filter(None, self._specials), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest))) if longest else None
        self._lead: bool | None = None

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Give every piece its ids and mask."""
        plain, parsed, placed = [], [], []
        for piece in pieces:
            if not piece.parse:
                plain.append(piece)
            elif isinstance(piece.trained, bool) and piece.hidden is None:
                parsed.append(piece)
            else:
                placed.append(piece)
        ways: tuple[tuple[list[Piece], Literal["text", "parse"]], ...]
        ways = ((plain, "text"), (parsed, "parse"))
        for group, specials in ways:
            texts = [piece.text for piece in group]
            if texts:
                ids, offsets = self._tokenizer.encode(texts, specials=specials)
                for i, piece in enumerate(group):
                    piece.ids = ids[offsets[i] : offsets[i + 1]]
                    piece.mask = np.full(len(piece.ids), piece.trained is True)
        if placed:
            self._fill_placed(placed)

    def _fill_placed(self, pieces: Sequence[Piece]) -> None:
        texts = [piece.text if piece.hidden is None else piece.hidden for piece in pieces]
        ids, offsets, places = self._tokenizer.encode_spans(texts, specials="parse")
        spelled = []
        for i, piece in enumerate(pieces):
            span = slice(int(offsets[i]), int(offsets[i + 1]))
            if piece.hidden is None:
                piece.ids = ids[span]
                piece.mask = token_mask(places[span], piece.trained, len(piece.text))
            else:
                spelled.append((piece, self._own(piece.hidden, ids[span], places[span])))
        if spelled:
            self._fill_spelled(spelled)

    def _own(
        self, text: str, ids: Ids, places: npt.NDArray[np.int64]
    ) -> list[tuple[int, int, int]]:
        """The template's special tokens: where they begin and end, and their ids."""
        special = np.isin(ids, list(self._specials.values()))
        return [
            (begin, end, token)
            for token, (begin, end) in zip(
                ids[special].tolist(), places[special].tolist(), strict=True
            )
            if self._specials.get(text[begin:end].strip()) == token
        ]

    def _fill_spelled(self, pieces: Sequence[tuple[Piece, list[tuple[int, int, int]]]]) -> None:
        texts: list[str] = []
        for piece, own in pieces:
            begins = [0, *(end for _, end, _ in own)]
            ends = [*(begin for begin, _, _ in own), len(piece.text)]
            texts += [piece.text[b:e] for b, e in zip(begins, ends, strict=True)]
        found = iter(self._between(texts, [len(own) for _, own in pieces]))
        for piece, own in pieces:
            ids, places = [], []
            for begin, end, token in [(0, 0, -1), *own]:
                if token >= 0:
                    ids.append(np.array([token], np.uint32))
                    places.append(np.array([[begin, end]], np.int64))
                more, at = next(found)
                ids.append(more)
                places.append(at + end)
            piece.ids = np.concatenate(ids)
            piece.mask = token_mask(np.concatenate(places), piece.trained, len(piece.text))

    def _between(
        self, texts: list[str], inner: list[int]
    ) -> list[tuple[Ids, npt.NDArray[np.int64]]]:
        """Texts between special tokens, as they are tokenised there: all but the first of each."""
        firsts = {0, *np.cumsum([count + 1 for count in inner]).tolist()}
        encode = self._tokenizer.encode_spans
        if self._lead is None:
            self._lead = self._prefixes_starts()
        found = _split(*encode(texts, specials="text"))
        for lead in _LEADS if self._lead else ():
            # Only the start of a text is prefixed, so these must not be one.
            wrong = [i for i in range(len(texts)) if i not in firsts and texts[i]]
            if not wrong:
                break
            again = _split(*encode([lead + texts[i] for i in wrong], specials="text"))
            for i, (ids, places) in zip(wrong, again, strict=True):
                keep = places[:, 0] >= len(lead)
                if keep.any() and (places[~keep, 1] <= len(lead)).all():
                    found[i] = ids[keep], places[keep] - len(lead)
                    firsts.add(i)
        return found

    def _prefixes_starts(self) -> bool:
        """Whether the tokenizer puts a space before a text, but not after a special token."""
        for text, token in self._specials.items():
            parsed, _ = self._tokenizer.encode([f"{text}so"], specials="parse")
            alone, _ = self._tokenizer.encode(["so"])
            if parsed[:1].tolist() == [token]:
                return not np.array_equal(parsed[1:], alone)
        return False

    # ------------------------------------------------------------------ spellings

    def spells(self, value: Any) -> bool:
        """Whether a special token is spelt anywhere in a conversation."""
        if self._spelled is None:
            return False
        if isinstance(value, str):
            return self._spelled.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.spells(key) or self.spells(item) for key, item in value.items())
        return isinstance(value, (list, tuple)) and any(map(self.spells, value))

    def hidden(self, value: Any, render: Callable[[Any], str], text: str) -> str:
        """`text`, which is `render(value)`, with the spellings in `value` replaced."""
        assert self._spelled is not None
        strings: list[str] = []
        _collect(value, strings)
        spelt = sorted({match for string in strings for match in self._spelled.findall(string)})
        used = max(map(ord, "".join(map(max, filter(None, strings)))))
        table: dict[str, str] = {}
        back: dict[int, str] = {}
        code = max(_PRIVATE, used + 1)
        for spelling in spelt:
            codes = range(code, code + len(spelling))
            table[spelling] = "".join(map(chr, codes))
            back |= dict(zip(codes, spelling, strict=True))
            code += len(spelling)
        if code > _LAST:
            raise Refused("special_token", "it uses up the characters of private use")
        pattern = self._spelled
        replaced = render(
            _mapped(value, lambda s: pattern.sub(lambda match: table[match.group()], s))
        )
        if replaced.translate(back) != text:
            raise Refused(
                "special_token",
                f"a message spells {' and '.join(spelt)}, and the chat template makes something "
                "of that: take it out of the text, or give it in a field of its own",
            )
        return replaced


def token_mask(places: npt.NDArray[np.int64], trained: bool | Spans, length: int) -> Mask:
    """The tokens that have any character in a span; empty ones go with the character after them.

    >>> places = np.array([[0, 3], [3, 5], [5, 9]])
    >>> token_mask(places, [(4, 6)], 9).tolist()
    [False, True, True]
    """
    if isinstance(trained, bool):
        return np.full(len(places), trained)
    if not len(places):
        return np.empty(0, np.bool_)
    edges = np.zeros(length + 2, np.int64)
    for begin, end in trained:
        edges[begin] += 1
        edges[end] -= 1
    inside = np.concatenate([[0], np.cumsum(edges[:-1]) > 0]).cumsum()  # (length + 2,)
    ends = np.maximum.accumulate(places[:, 1])
    # A tokenizer that trims its spans leaves blanks between them: they belong to the next token.
    begins = np.minimum(places[:, 0], np.concatenate([[0], ends[:-1]]))
    ends = np.maximum(ends, begins + 1)
    return np.asarray(inside[np.minimum(ends, length + 1)] > inside[begins])


def _split(
    ids: Ids, offsets: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
) -> list[tuple[Ids, npt.NDArray[np.int64]]]:
    bounds = offsets[1:-1]
    return list(zip(np.split(ids, bounds), np.split(places, bounds), strict=True))


def _collect(value: Any, strings: list[str]) -> None:
    if isinstance(value, str):
        strings.append(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(key, strings)
            _collect(item, strings)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, strings)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like values with every string changed.

    >>> _mapped({"a": ["b", 1]}, str.upper)
    {'A': ['B', 1]}
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value
