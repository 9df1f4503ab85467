"""nanochat's two loaders, told again in the plainest way: what ours are compared and timed with.

Documents come from the row groups of each file that are this rank's, in order, for ever, in
tokenizer batches that end where row groups do. The flat loader cuts one run of tokens; the other
fills rows from a pool of waiting documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

Place = tuple[int, int, int]  # file, row group, epoch


def batches_of_texts(
    files: Sequence[Path], rank: int, world: int, size: int, start: dict[str, int] | None
) -> Iterator[tuple[list[str], Place]]:
    """Texts of this rank, `size` at a time, with the place of their row group."""
    epoch = start.get("epoch", 1) if start else 1
    first_file = start["pq_idx"] if start else 0
    resumed = start is not None
    while True:
        for index in range(first_file, len(files)):
            file = pq.ParquetFile(files[index])
            group = rank
            if resumed and start is not None and index == start["pq_idx"]:
                group = (start["rg_idx"] // world + 1) * world + rank
            resumed = resumed and group >= file.num_row_groups and index == first_file
            while group < file.num_row_groups:
                texts = file.read_row_group(group).column("text").to_pylist()
                for at in range(0, len(texts), size):
                    yield texts[at : at + size], (index, group, epoch)
                group += world
            resumed = False
        first_file = 0
        epoch += 1


def flat(
    tokenizer: Any,
    B: int,
    T: int,
    files: Sequence[Path],
    *,
    rank: int = 0,
    world: int = 1,
    size: int = 128,
    start: dict[str, int] | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Place]]:
    """One run of tokens, B * T at a time and one more as the last target."""
    texts, bos = batches_of_texts(files, rank, world, size, start), tokenizer.get_bos_token_id()
    held: list[int] = []
    place = (0, 0, 1)
    while True:
        while len(held) < B * T + 1:
            batch, place = next(texts)
            for ids in tokenizer.encode(batch, prepend=bos, num_threads=4):
                held.extend(ids)
        cut = torch.tensor(held[: B * T + 1], dtype=torch.long)
        del held[: B * T]
        yield cut[:-1].view(B, T), cut[1:].view(B, T), place


def best_fit(
    tokenizer: Any,
    B: int,
    T: int,
    files: Sequence[Path],
    *,
    rank: int = 0,
    world: int = 1,
    size: int = 128,
    buffer_size: int = 1000,
    start: dict[str, int] | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Place]]:
    """Rows that begin with BOS: the longest that fits, else the shortest, cropped."""
    texts, bos = batches_of_texts(files, rank, world, size, start), tokenizer.get_bos_token_id()
    pool: list[torch.Tensor] = []
    place = (0, 0, 1)
    while True:
        rows = torch.empty((B, T + 1), dtype=torch.long)
        for row in rows:
            filled = 0
            while filled < T + 1:
                while len(pool) < buffer_size:
                    batch, place = next(texts)
                    lists = tokenizer.encode(batch, prepend=bos, num_threads=4)
                    pool += [torch.tensor(ids, dtype=torch.long) for ids in lists]
                room, best, longest = T + 1 - filled, -1, 0
                for i, document in enumerate(pool):
                    if longest < len(document) <= room:
                        best, longest = i, len(document)
                if best < 0:
                    best = min(range(len(pool)), key=lambda i: len(pool[i]))
                found = pool.pop(best)[:room]
                row[filled : filled + len(found)] = found
                filled += len(found)
        yield rows[:, :-1].clone(), rows[:, 1:].clone(), place
