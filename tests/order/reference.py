"""The order once more, from the text of the laws: one number at a time, in Python's own integers.

Slow, and sharing nothing with `penstock.order` but the constants that define a hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from typing import NamedTuple

MASK = (1 << 64) - 1
BLOCK = 4096


def key_of(*parts: int | str) -> int:
    """64 bits of BLAKE2b over (kind, length, text) of each part."""
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def subkey(key: int, number: int) -> int:
    return mix(key ^ mix((number + 1) * 0x9E3779B97F4A7C15 & MASK))


def _hash32(x: int, key: int) -> int:
    x = (x + key) * 0xD6E8FEB86659FD93 & MASK
    x = (x ^ (x >> 32)) * 0xA0761D6478BD642F & MASK
    return x >> 32


def permuted(index: int, n: int, key: int) -> int:
    """Where `index` goes: through a Feistel network of eight rounds over a grid of n cells or more,
    again until it lands inside; through four of them in a row up to 255 elements.
    """
    for turn in range(4 if n <= 255 else 1):
        index = _once(index, n, key if turn == 0 else subkey(key, 8 + turn))
    return index


def _once(index: int, n: int, key: int) -> int:
    shift = (n - 1).bit_length() // 2
    rows, columns = ((n - 1) >> shift) + 1, 1 << shift
    while True:
        row, column = divmod(index, columns)
        for r in range(0, 8, 2):
            row = (row + _hash32(column, subkey(key, r)) * rows // 2**32) % rows
            column = (column + _hash32(row, subkey(key, r + 1))) % columns
        index = row * columns + column
        if index < n:
            return index


def split(m: int, weights: Sequence[int]) -> list[int]:
    """m positions dealt out down a balanced binary tree: floor(m * left / sum), and the rest."""
    size = 1
    while size < len(weights):
        size *= 2

    def deal(m: int, weights: list[int]) -> list[int]:
        if len(weights) == 1:
            return [m]
        half = len(weights) // 2
        left, total = sum(weights[:half]), sum(weights)
        first = m * left // total if total else 0
        return deal(first, weights[:half]) + deal(m - first, weights[half:])

    return deal(m, [*weights, *[0] * (size - len(weights))])[: len(weights)]


def quantised(weights: Sequence[float]) -> list[int]:
    """Integers that sum to 2^32 by largest remainder; a positive weight gets at least 1."""
    total = sum(map(Fraction, weights))
    shares = [Fraction(w) * 2**32 / total for w in weights]
    found = [max(1, share.numerator // share.denominator) if share else 0 for share in shares]
    short = sorted(range(len(shares)), key=lambda i: found[i] - shares[i])
    for i in short[: max(2**32 - sum(found), 0)]:
        found[i] += 1
    while sum(found) > 2**32:
        found[found.index(max(found))] -= 1
    return found


@dataclass
class Mixture:
    """A mixture, block by block: `stages` are (position, integer weights)."""

    sizes: Sequence[int]
    names: Sequence[str]
    seed: int
    stages: Sequence[tuple[int, Sequence[int]]]
    shuffle: bool = True
    _blocks: dict[tuple[int, int], tuple[list[int], list[int]]] = field(default_factory=dict)

    def counts(self, position: int) -> list[int]:
        """How many samples of each source were given before `position`."""
        stage, offset = self._stage(position)
        block, place = divmod(offset, BLOCK)
        before = self._before(stage, block)
        sources, _ = self._block(stage, block)
        return [b + sources[:place].count(s) for s, b in enumerate(before)]

    def draw(self, position: int) -> tuple[int, int, int]:
        """Source, ordinal and index of the sample at `position`."""
        stage, offset = self._stage(position)
        sources, ordinals = self._block(stage, offset // BLOCK)
        source, ordinal = sources[offset % BLOCK], ordinals[offset % BLOCK]
        epoch, place = divmod(ordinal, self.sizes[source])
        if self.shuffle:
            key = subkey(key_of("source", self.seed, self.names[source]), epoch)
            place = permuted(place, self.sizes[source], key)
        return source, ordinal, sum(self.sizes[:source]) + place

    def _stage(self, position: int) -> tuple[int, int]:
        stage = max(s for s, (start, _) in enumerate(self.stages) if start <= position)
        return stage, position - self.stages[stage][0]

    def _before(self, stage: int, block: int) -> list[int]:
        """Samples given before a block: in the stages before, and in this one."""
        earlier = [0] * len(self.sizes)
        if stage:
            start, last = self.stages[stage][0], self.stages[stage - 1][0]
            length, place = divmod(start - last, BLOCK)
            earlier = self._before(stage - 1, length)
            for source in self._block(stage - 1, length)[0][:place]:
                earlier[source] += 1
        here = split(block * BLOCK, self.stages[stage][1])
        return [a + b for a, b in zip(earlier, here, strict=True)]

    def _block(self, stage: int, block: int) -> tuple[list[int], list[int]]:
        if (stage, block) not in self._blocks:
            start, weights = self.stages[stage]
            before, after = split(block * BLOCK, weights), split((block + 1) * BLOCK, weights)
            sources = []
            for source, (b, a) in enumerate(zip(before, after, strict=True)):
                sources += [source] * (a - b)
            if self.shuffle:
                key = key_of("mixture", self.seed)
                at = start + block * BLOCK
                # keys of 52 bits; where two are equal, the earlier place comes first
                hashed = [subkey(key, at + place) >> 12 for place in range(BLOCK)]
                sources = [sources[i] for i in sorted(range(BLOCK), key=hashed.__getitem__)]
            else:
                # spread evenly: the k-th of q samples of a source (2k + 1) / 2q of the way
                quota = [a - b for b, a in zip(before, after, strict=True)]
                way = [Fraction(2 * k + 1, 2 * q) for q in quota for k in range(q)]
                sources = [sources[i] for i in sorted(range(BLOCK), key=way.__getitem__)]
            given = self._before(stage, block)
            ordinals = []
            for source in sources:
                ordinals.append(given[source])
                given[source] += 1
            self._blocks[stage, block] = sources, ordinals
        return self._blocks[stage, block]


class Batch(NamedTuple):
    """Where a batch begins, how many positions it holds, its step and its segment's number."""

    position: int
    size: int
    step: int
    segment: int


def batches(n: int, segments: Sequence[tuple[int, int, int]], tail: str) -> Iterator[Batch]:
    """The batches of a run as one rank meets them, one after the other.

    `segments` are (position, size, accumulation), in order. One is in force for every batch that
    would start at its position or later; the first batch starts where the first segment does.
    """
    position = segments[0][0]
    step = inside = segment = 0  # inside: batches of this step so far
    while True:
        while True:
            found = max([0, *(i for i, s in enumerate(segments) if s[0] <= position)])
            size, left = segments[found][1], n - position % n
            if tail != "drop" or size <= left:
                break
            position += left
        if found != segment and inside:  # a step that was under way is over
            step, inside = step + 1, 0
        segment = found
        if tail == "pad":
            size = min(size, left)
        yield Batch(position, size, step, segment)
        position, inside = position + size, inside + 1
        if inside == segments[segment][2]:
            step, inside = step + 1, 0
