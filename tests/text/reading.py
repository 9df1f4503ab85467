"""What the tests of reading share: writing inputs, and reading them whole, unit by unit."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.text.documents import (
    InputFile,
    Policy,
    Reject,
    find_files,
    read_records,
    read_texts,
    units_of,
)


@dataclass
class Read:
    """All that the units of a file gave, one after another."""

    addresses: list[int] = field(default_factory=list)
    documents: list[Any] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    ids: list[Any] = field(default_factory=list)


def only(path: Path | str) -> InputFile:
    (file,) = find_files([path])
    return file


def texts(
    path: Path | str, field: str = "text", *, policy: Policy = "error", target: int = 64 << 20
) -> Read:
    file, found = only(path), Read()
    for unit in units_of([file], target_bytes=target):
        for batch in read_texts(file, unit, field, policy=policy):
            assert batch.texts.type == pa.large_string()
            assert batch.texts.null_count == 0
            batch.texts.validate(full=True)
            assert len(batch.texts) == len(batch.addresses)
            found.addresses += batch.addresses.tolist()
            found.documents += batch.texts.to_pylist()
            found.rejects += batch.rejects
            found.ids += [None] * len(batch.texts) if batch.ids is None else batch.ids.to_pylist()
    return found


def records(path: Path | str, *, policy: Policy = "error", target: int = 64 << 20) -> Read:
    file, found = only(path), Read()
    for unit in units_of([file], target_bytes=target):
        for batch in read_records(file, unit, policy=policy):
            assert len(batch.records) == len(batch.addresses) <= 1000
            found.addresses += batch.addresses.tolist()
            found.documents += batch.records
            found.rejects += batch.rejects
    return found


def lines(*documents: object, newline: bytes = b"\n", last: bool = True) -> bytes:
    """JSON Lines; bytes go in as they are."""
    made = [d if isinstance(d, bytes) else json.dumps(d).encode() for d in documents]
    return newline.join(made) + (newline if last and made else b"")


def compressed(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data, mtime=0)
    if suffix:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        return bytes(sink.getvalue())
    return data


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def parquet(path: Path, columns: dict[str, Any], *, rows: int = 1 << 30, **options: Any) -> Path:
    """A Parquet file with row groups of so many rows."""
    pq.write_table(pa.table(columns), path, row_group_size=rows, **options)
    return path


def numbered(count: int, words: Sequence[str] = ("one", "two", "naïve", "日本")) -> list[str]:
    """Texts of which no two are alike."""
    return [f"{i} " + " ".join(words[: i % (len(words) + 1)]) for i in range(count)]
