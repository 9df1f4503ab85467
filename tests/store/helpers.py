"""Stores for the tests, and what they hold, the slow and obvious way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.store import Key, ShardWriter, Store, open_store
from penstock.store.manifest import sealed

SEQUENCE = {"sequence": "uint16", "loss_mask": "bool"}


def token_records(lengths: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
    """Records with a mask, of those lengths; id 0 ends each."""
    rng = np.random.default_rng(seed)
    records = []
    for length in lengths:
        ids = rng.integers(1, 60_000, length, dtype=np.uint16)
        ids[-1:] = 0
        records.append({"sequence": ids, "loss_mask": rng.random(length) < 0.5})
    return records


def write(
    path: Path,
    records: Sequence[Mapping[str, Any]],
    keys: Mapping[str, Key | str | None] = SEQUENCE,
    **options: Any,
) -> Path:
    """A committed store of these records."""
    with ShardWriter(path, keys, **options) as writer:
        for record in records:
            writer.append(record)
    return path


def write_flat(folder: Path, arrays: Mapping[str, Any], offsets: Any = None) -> Path:
    """A folder as AstrAI writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {}
    for key, given in arrays.items():
        values = np.asarray(given)
        values.tofile(folder / f"{key}.bin")
        meta[key] = {"shape": list(values.shape), "dtype": str(values.dtype)}
        if offsets is not None:
            meta[key]["offsets"] = offsets
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def three_shards(path: Path) -> Store:
    """100 tokens in records of 0 to 9, in shards of at most 25."""
    lengths = [9, 0, 8, 7, 3, 9, 6, 0, 0, 5, 8, 4, 9, 9, 9, 9, 5]
    return open_store(write(path, token_records(lengths), max_tokens_per_shard=25))


def flat_tokens(records: Sequence[Mapping[str, Any]], key: str = "sequence") -> Any:
    return np.concatenate([np.asarray(record[key]) for record in records])


def naive_cuts(begins: Sequence[int], starts: Sequence[int], length: int) -> list[int]:
    """Places in rows at which a record begins, by looking at every token."""
    there = set(begins)
    return [
        row * length + column
        for row, start in enumerate(starts)
        for column in range(1, length)
        if start + column in there
    ]


def edit_json(path: Path, change: Any) -> None:
    """Change a JSON file in place; a manifest that holds a digest gets its new one."""
    value = json.loads(path.read_text())
    change(value)
    digest = value.pop("digest", None)
    raw = json.dumps(value).encode()
    path.write_bytes(raw if digest is None else sealed(raw))


record_lengths = st.lists(st.integers(0, 12), min_size=1, max_size=30)
