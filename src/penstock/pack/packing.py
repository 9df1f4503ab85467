"""Document lengths to rows, by one of three strategies.

    >>> rows = pack_rows([3, 4, 1], 4)
    >>> [rows.pieces(r) for r in range(len(rows))]      # (document, start, length)
    [[(1, 0, 4)], [(0, 0, 3), (2, 0, 1)]]
    >>> rows.ledger.utilisation
    1.0

`concat` is one stream cut into rows: nothing lost, documents cut wherever a row ends.
`best_fit_crop` is nanochat's: rows begin with a document and are full; what fills them is cropped.
`best_fit_decreasing` keeps documents whole and pads. AstrAI's `simple`, `bfd` and `bfd_split` are
names for them: concat of truncated documents, and best_fit_decreasing that truncates or splits.

`pack_rows` packs lengths that are there; `pack_blocks` packs them as they come, in bounded memory,
and gives the same rows however they are blocked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.pack.concat import concat
from penstock.pack.crop import crop
from penstock.pack.decreasing import decreasing
from penstock.pack.policy import Bos, Last, Overflow, Packing
from penstock.pack.rows import Ints, Rows, join


def pack_rows(
    lengths: npt.ArrayLike,
    capacity: int,
    strategy: str = "best_fit_decreasing",
    *,
    overflow: Overflow | None = None,
    bos: Bos = "never",
    overlap: int = 0,
    last: Last = "pad",
    chunk_rows: int | None = None,
    buffer_size: int = 1000,
    refill: int = 128,
    groups: tuple[int, ...] | None = None,
) -> Rows:
    """Rows of `capacity` tokens from documents of these lengths; see `Packing` for the options.

    >>> rows = pack_rows([9, 2], 4, overflow="split")
    >>> [rows.pieces(r) for r in range(len(rows))]
    [[(0, 0, 4)], [(0, 4, 4)], [(1, 0, 2), (0, 8, 1)]]
    >>> rows = pack_rows([3, 3], 4, "best_fit_crop")
    >>> [rows.pieces(r) for r in range(len(rows))], rows.ledger.cropped
    ([[(0, 0, 3), (1, 0, 1)]], 2)
    """
    packing = Packing(
        capacity=capacity,
        strategy=strategy,
        overflow=overflow,
        bos=bos,
        overlap=overlap,
        last=last,
        chunk_rows=chunk_rows,
        buffer_size=buffer_size,
        refill=refill,
        groups=groups,
    )
    return join(list(pack_blocks([checked_lengths(lengths)], packing)), capacity)


def checked_lengths(lengths: npt.ArrayLike) -> Ints:
    """Lengths as an array of whole numbers >= 0, in the dtype they have."""
    found = np.asarray(lengths)
    if found.ndim != 1:
        raise ConfigError(f"lengths are one number a document, not an array of {found.shape}")
    if not len(found):
        return np.empty(0, np.int32)
    if found.dtype.kind not in "iu":
        raise ConfigError(f"lengths are whole numbers of tokens, not {found.dtype}")
    if found.dtype.kind == "i" and int(found.min()) < 0:
        raise ConfigError(f"lengths are whole numbers of tokens, not {int(found.min())}")
    return found


def pack_blocks(blocks: Iterable[Ints], packing: Packing) -> Iterator[Rows]:
    """Rows of documents whose lengths come in blocks, numbered over all of them."""
    if packing.strategy == "best_fit_decreasing":
        chunks = blocks if packing.chunk_rows is None else _chunks(blocks, packing)
        if packing.chunk_rows is None:
            chunks = [_all_of(blocks)]
        base = 0
        for lengths in chunks:
            yield decreasing(lengths, base, packing)
            base += len(lengths)
    elif packing.strategy == "concat":
        yield from concat(blocks, packing)
    else:
        yield from crop(blocks, packing)


def _all_of(blocks: Iterable[Ints]) -> Ints:
    parts = list(blocks)
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.int32)])


def _chunks(blocks: Iterable[Ints], packing: Packing) -> Iterator[Ints]:
    """Documents in closed chunks: each ends with the document that completes its tokens."""
    assert packing.chunk_rows is not None
    enough = packing.chunk_rows * packing.capacity
    rest: list[Ints] = []
    held = 0
    for block in blocks:
        ends = np.cumsum(block, dtype=np.int64)
        begin = done = 0
        while begin < len(block):
            at = int(np.searchsorted(ends, done + enough - held))
            if at == len(block):
                break
            yield np.concatenate([*rest, block[begin : at + 1]])
            begin, done, held, rest = at + 1, int(ends[at]), 0, []
        if begin < len(block):
            rest.append(block[begin:])
            held += int(ends[-1]) - done
    if rest:
        yield np.concatenate(rest)
