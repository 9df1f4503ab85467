"""The three strategies the slow way, by tokens or documents one at a time, as described."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Piece = tuple[int, int, int, bool]  # document, start, length, whether a BOS stands before it


def concat(lengths: Sequence[int], capacity: int, *, overlap: int, drop: bool) -> list[list[Piece]]:
    """Token by token: each is (document, place in it)."""
    stream = [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    rows, at = [], 0
    while at + (overlap if at else 0) < len(stream):
        row = stream[at : at + capacity]
        if len(row) < capacity and drop:
            break
        rows.append(_pieces(row))
        at += capacity - overlap
    return rows


def _pieces(tokens: Sequence[tuple[int, int]]) -> list[Piece]:
    pieces: list[Piece] = []
    for document, place in tokens:
        if pieces and pieces[-1][0] == document:
            d, start, length, bos = pieces[-1]
            pieces[-1] = (d, start, length + 1, bos)
        else:
            pieces.append((document, place, 1, False))
    return pieces


def best_fit_crop(
    lengths: Sequence[int], capacity: int, *, buffer_size: int, refill: int, groups: Sequence[int]
) -> Iterator[list[tuple[int, int]]]:
    """The loop of the policy, scanning the whole buffer for each pick: (document, tokens of it)."""
    batches, document = [], 0
    for group in [*groups, len(lengths)]:
        end = min(document + group, len(lengths))
        while document < end:
            batches.append(range(document, min(document + refill, end)))
            document = batches[-1].stop
    waiting: list[tuple[int, int]] = []
    while True:
        row: list[tuple[int, int]] = []
        room = capacity
        while room:
            while len(waiting) < buffer_size and batches:
                waiting += [(d, lengths[d]) for d in batches.pop(0) if lengths[d]]
            if not waiting:
                break
            fitting = [pair for pair in waiting if pair[1] <= room]
            if fitting:
                best = max(fitting, key=lambda pair: pair[1])  # the first of equals
            else:
                best = min(waiting, key=lambda pair: pair[1])
            waiting.remove(best)
            row.append((best[0], min(best[1], room)))
            room -= row[-1][1]
        if not row:
            return
        yield row


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of places in `sizes`; among equally full rows the one opened first."""
    rows: list[list[int]] = []
    left: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [r for r in range(len(rows)) if left[r] >= sizes[i]]
        if fitting:
            best = min(fitting, key=left.__getitem__)
        else:
            best = len(rows)
            rows.append([])
            left.append(capacity)
        rows[best].append(i)
        left[best] -= sizes[i]
    return rows


def cut(lengths: Sequence[int], capacity: int, *, overflow: str, bos: str) -> list[Piece]:
    """Documents as pieces for best_fit_decreasing, in order."""
    pieces = []
    for document, length in enumerate(lengths):
        at, left = 0, length
        while left:
            put = bos == "every" or (bos == "continued" and at > 0)
            room = capacity - put
            if overflow == "truncate_start" and left > room:
                at, left = length - room, room
            size = min(left, room)
            pieces.append((document, at, size, put))
            at, left = at + size, left - size
            if overflow != "split":
                break
    return pieces


def fewest_rows(sizes: Sequence[int], capacity: int) -> int:
    """The optimum, by trying everything; for a handful of documents."""
    best = len(sizes)

    def search(i: int, left: list[int]) -> None:
        nonlocal best
        if len(left) >= best:
            return
        if i == len(sizes):
            best = len(left)
            return
        for r in range(len(left)):
            if left[r] >= sizes[i] and left[r] not in left[:r]:
                left[r] -= sizes[i]
                search(i + 1, left)
                left[r] += sizes[i]
        search(i + 1, [*left, capacity - sizes[i]])

    search(0, [])
    return best if sizes else 0
