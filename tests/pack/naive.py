"""What packing means, token by token: the reference for everything that does it in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Naive:
    """Lists of what `Boundaries` holds in arrays."""

    doc_ids: list[list[int]] = field(default_factory=list)
    position_ids: list[list[int]] = field(default_factory=list)
    ignored: list[int] = field(default_factory=list)
    cu_seqlens: list[int] = field(default_factory=list)
    max_seqlen: int = 0


def naive(begins: Sequence[Sequence[bool]]) -> Naive:
    """The masks of rows, of which each token says whether a document begins with it."""
    found = Naive()
    inputs = 0
    for row, flags in enumerate(begins):
        width = len(flags)
        docs, positions, document, position = [], [], 0, 0
        for column, begin in enumerate(flags):
            if column and begin:
                found.ignored.append(row * (width - 1) + column - 1)
                document, position = document + 1, 0
            if column < width - 1:
                if position == 0:
                    found.cu_seqlens.append(inputs)
                docs.append(document)
                positions.append(position)
                inputs += 1
                found.max_seqlen = max(found.max_seqlen, position + 1)
            position += 1
        found.doc_ids.append(docs)
        found.position_ids.append(positions)
    found.cu_seqlens.append(inputs)
    return found


def after_eos(rows: Sequence[Sequence[int]], eos: int) -> list[list[bool]]:
    """Which tokens begin a document, where each one ends with `eos`."""
    return [[before == eos for before in [eos, *row[:-1]]] for row in rows]
