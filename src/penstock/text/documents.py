"""Documents in: files to units of work, units to batches of documents, each with its address.

    files = find_files(["data/"])
    for unit in units_of(files):                    # fixed by the input, not by who reads it
        for batch in read_texts(files[unit.file], unit, "text"):
            batch.texts, batch.addresses            # one Arrow array; no Python object a document

Read are Parquet, JSON Lines and JSON, the last two under gzip or zstd too. Memory is bounded by the
longest document, not by a file or a row group; only a JSON list is held whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, get_args

from penstock.errors import ConfigError
from penstock.text import jsonl, parquet
from penstock.text.batches import Policy, Records, Reject, Texts, Unit, refused
from penstock.text.files import InputFile, find_files

__all__ = [
    "InputFile",
    "Policy",
    "Records",
    "Reject",
    "Texts",
    "Unit",
    "find_files",
    "read_at",
    "read_records",
    "read_texts",
    "refuse",
    "units_of",
]


def units_of(files: Sequence[InputFile], *, target_bytes: int = 64 << 20) -> list[Unit]:
    """What is read at a time: about `target_bytes` of a file, or all of one that cannot be cut.

    >>> file = InputFile(path="a.jsonl", kind="jsonl", compression=None, size=250, stamp="")
    >>> [(unit.begin, unit.end) for unit in units_of([file], target_bytes=100)]
    [(0, 83), (83, 166), (166, 250)]
    """
    if target_bytes < 1:
        raise ConfigError(f"target_bytes is {target_bytes}: it has to be at least 1")
    units: list[Unit] = []
    for index, file in enumerate(files):
        if file.kind == "parquet":
            units += parquet.units_of(file, index, target_bytes)
            continue
        whole = file.kind == "json" or file.compression
        count = 1 if whole else max(1, -(-file.size // target_bytes))
        cuts = [file.size * i // count for i in range(count + 1)]
        units += [Unit(file=index, begin=cuts[i], end=cuts[i + 1]) for i in range(count)]
    return units


def read_records(file: InputFile, unit: Unit, *, policy: Policy = "error") -> Iterator[Records]:
    r"""The documents of a unit as dicts, in order, in batches.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.jsonl"
    >>> _ = path.write_bytes(b'{"text": "a"}\n{"text": "b", "n": [1]}\n')
    >>> files = find_files([path])
    >>> batch = next(read_records(files[0], units_of(files)[0]))
    >>> batch.addresses.tolist(), batch.records
    ([0, 14], [{'text': 'a'}, {'text': 'b', 'n': [1]}])
    """
    _check(policy)
    if file.kind == "parquet":
        return parquet.read_records(file, unit, policy)
    return jsonl.read_records(file, unit, policy)


def read_texts(
    file: InputFile, unit: Unit, field: str, *, policy: Policy = "error"
) -> Iterator[Texts]:
    r"""One text field of a unit's documents, in order, in batches.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.jsonl"
    >>> _ = path.write_bytes(b'{"text": "a", "id": 1}\n{"no": "text"}\n')
    >>> files = find_files([path])
    >>> batch = next(read_texts(files[0], units_of(files)[0], "text", policy="reject"))
    >>> batch.texts.to_pylist(), batch.ids.to_pylist(), batch.addresses.tolist()
    (['a'], ['1'], [0])
    >>> batch.rejects[0].line, batch.rejects[0].reason
    (2, "no field 'text'; its fields: 'no'")
    """
    _check(policy)
    if file.kind == "parquet":
        return parquet.read_texts(file, unit, field, policy)
    return jsonl.read_texts(file, unit, field, policy)


def read_at(file: InputFile, address: int) -> dict[str, Any]:
    r"""The document at an address that a batch gave.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.jsonl"
    >>> _ = path.write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
    >>> read_at(find_files([path])[0], 14)
    {'text': 'b'}
    """
    return (
        parquet.read_at(file, address) if file.kind == "parquet" else jsonl.read_at(file, address)
    )


def refuse(file: InputFile, reject: Reject) -> NoReturn:
    """The error that a reject is under the policy "error", naming file and line."""
    if file.kind == "parquet":
        refused(reject, "error", f"row {reject.address}")
    refused(reject, "error", jsonl.place_of(file, reject.address, reject.line))
    raise AssertionError


def _check(policy: str) -> None:
    if policy not in get_args(Policy):
        raise ConfigError(f"policy is {policy!r}: it is one of {', '.join(get_args(Policy))}")
