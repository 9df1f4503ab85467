"""Packing plans on disk: computed once, found by a name made of everything that decides them.

    tokens.packing/bfd-4f0c…/        beside the store, or in the cache directory
      plan.json                      what was packed and how, and the ledger; last to be written
      row_splits.column  begin.column  length.column  document.column  bos.column

A plan is written to a temporary folder and renamed; whoever comes while it is being written waits
for a lock that dies with the writer. It is mapped, so that all ranks of a machine share its pages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import reduce
from hashlib import blake2b
from operator import index
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock.cache import cache_folder, locked, sync_directory, write_synced
from penstock.dataset.tokens import MASK, TOKENS
from penstock.errors import DataError, MissingData
from penstock.pack import Ledger, Packing, Rows, bounds_of, pack_blocks, sums
from penstock.pack.rows import BLOCK
from penstock.store import Store
from penstock.store.mapping import map_file
from penstock.store.workspace import Workspace

PLAN_VERSION = 1
DTYPES = {
    "row_splits": np.dtype(np.int64),
    "begin": np.dtype(np.int64),
    "length": np.dtype(np.int64),
    "document": np.dtype(np.int64),
    "bos": np.dtype(np.bool_),
}
_TOKENS_AT_ONCE = 1 << 21
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Row r has the pieces [row_splits[r], row_splits[r + 1]): spans of the store's tokens."""

    row_splits: I64
    begin: I64  # (pieces,), among the store's tokens
    length: I64
    document: I64
    bos: npt.NDArray[np.bool_]
    ledger: Ledger
    unlabelled: int  # rows without a single label
    path: Path
    labels: int | None = None  # in all rows; None: a plan of a release that did not count them

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    def pieces(self, rows: I64) -> tuple[I64, I64]:
        """(pieces in each row, which pieces they are)."""
        first = self.row_splits[rows]
        count = self.row_splits[rows + 1] - first
        which = np.repeat(first - np.cumsum(count) + count, count)
        which += np.arange(len(which))
        return count, which

    def costs(self, rows: I64) -> I64:
        """What varlen attention spends on each row: the sum of its pieces' squared lengths."""
        count, which = self.pieces(rows)
        cells = self.length[which] + self.bos[which]
        return sums(cells * cells, bounds_of(count))


def plan_for(
    store: Store, packing: Packing, eos: int | None, cache_dir: str | Path | None = None
) -> RowPlan:
    """The plan of a packing over a store: read where it stands, else computed and written."""
    definition = {
        "version": PLAN_VERSION,
        "data": store.fingerprint,
        "documents": "records" if eos is None else f"ended by {eos}",
        "packing": asdict(packing),
    }
    definition = json.loads(json.dumps(definition))  # as it will be read back
    digest = blake2b(json.dumps(definition, sort_keys=True).encode(), digest_size=12).hexdigest()
    name = f"{packing.strategy}-{digest}"
    folders = _folders(store, cache_dir)
    for folder in folders:
        with suppress(PermissionError):
            if (folder / name / "plan.json").exists():
                return _read(folder / name, definition)
    for folder in filter(_writable, folders):
        with suppress(PermissionError):  # another user's lock or plan: this place is not for us
            with _alone(folder / f".{name}.lock"):
                if not (folder / name / "plan.json").exists():  # another process was first
                    _write(folder, name, store, packing, eos, definition)
            return _read(folder / name, definition)
    raise DataError(
        f"no packing plan can be written beside {store.path} nor to {folders[-1]}: set "
        "PENSTOCK_CACHE_DIR to a folder that can be written"
    )


def _folders(store: Store, cache_dir: str | Path | None) -> list[Path]:
    """Where a plan may stand: beside the store, or in the cache directory."""
    if cache_dir is not None:
        return [Path(cache_dir)]
    cache = cache_folder("packing")
    if store.path is None:
        return [cache]
    path = store.path.resolve()
    return [path.with_name(f"{path.name}.packing"), cache]


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process at a time."""
    with ExitStack() as held:
        with _saying(lock.parent):
            held.enter_context(locked(lock, wait=True))
        yield


@contextmanager
def _saying(folder: Path) -> Iterator[None]:
    """What the system refuses, in words; but for permissions, which another place may give."""
    try:
        yield
    except PermissionError:
        raise
    except OSError as error:
        raise DataError(
            f"a packing plan cannot be written to {folder}: {error.strerror} "
            f"({error.filename}); free the place, or set PENSTOCK_CACHE_DIR"
        ) from error


# --- writing


def _write(
    folder: Path,
    name: str,
    store: Store,
    packing: Packing,
    eos: int | None,
    definition: dict[str, Any],
) -> None:
    with _saying(folder):
        workspace = Workspace(folder)
    try:
        with _saying(folder):
            documents = _documents(store, eos, workspace.path / "documents")
            made = workspace.path / "plan"
            made.mkdir()
            summary = _write_rows(made, store, packing, documents)
            plan = {"definition": definition, **summary}
            write_synced(made / "plan.json", json.dumps(plan, indent=1).encode())
            sync_directory(made)
            made.rename(folder / name)
            sync_directory(folder)
    finally:
        workspace.close()


def _write_rows(
    made: Path, store: Store, packing: Packing, documents: _Documents
) -> dict[str, Any]:
    """Append rows to the plan's files as they are made; what they come to."""
    files: dict[str, BinaryIO] = {each: (made / f"{each}.column").open("wb") for each in DTYPES}
    rows = pieces = unlabelled = labels = 0
    ledgers = [Ledger(capacity=packing.capacity)]
    try:
        files["row_splits"].write(np.zeros(1, np.int64).tobytes())
        for part in pack_blocks(documents.lengths(), packing):
            ledgers.append(part.ledger)
            if len(part):
                begin = documents.begins(part.document) + part.start
                found = _labels(store, part, begin)
                unlabelled, labels = unlabelled + int((found == 0).sum()), labels + int(found.sum())
                columns = {
                    "row_splits": part.row_splits[1:] + pieces,
                    "begin": begin,
                    "length": part.length,
                    "document": part.document,
                    "bos": part.bos,
                }
                for each, values in columns.items():
                    files[each].write(np.ascontiguousarray(values, DTYPES[each]).data)
                rows, pieces = rows + len(part), pieces + len(part.length)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    ledger = reduce(Ledger.__add__, ledgers)
    assert ledger.balanced, ledger
    return {
        "rows": rows,
        "pieces": pieces,
        "unlabelled": unlabelled,
        "labels": labels,
        "ledger": ledger.to_dict(),
    }


def _labels(store: Store, part: Rows, begin: I64) -> I64:
    """Labels in each row: a piece's first token is none, nor is what a mask leaves out."""
    first = 1 - part.bos.astype(np.int64)  # after a BOS the piece's first token is one
    length = np.maximum(part.length - first, 0)
    if MASK in store.keys:
        length = _trained(store, begin + first, length)
    return sums(length, part.row_splits)


def _trained(store: Store, begin: I64, length: I64) -> I64:
    """How much of each span is trained; a few million tokens at a time."""
    found = np.empty_like(length)
    ends = np.cumsum(length)
    lo = 0
    while lo < len(length):
        before = int(ends[lo - 1]) if lo else 0
        hi = max(int(np.searchsorted(ends, before + _TOKENS_AT_ONCE, "right")), lo + 1)
        trained = store.spans(begin[lo:hi], length[lo:hi], MASK) != 0
        found[lo:hi] = sums(trained, bounds_of(length[lo:hi]))
        lo = hi
    return found


class _Documents:
    """Lengths of a store's documents in blocks, and where any of them begins."""

    def __init__(self, store: Store, ends: I64 | None) -> None:
        self._store, self._ends = store, ends

    def lengths(self) -> Iterator[npt.NDArray[Any]]:
        count = self._store.documents_of(TOKENS) if self._ends is None else len(self._ends)
        for lo in range(0, count, BLOCK):
            hi = min(lo + BLOCK, count)
            if self._ends is None:
                yield self._store.record_lengths(TOKENS, lo, hi)
            else:
                before = self._ends[lo - 1] if lo else 0
                yield np.diff(self._ends[lo:hi], prepend=before)

    def begins(self, documents: npt.NDArray[Any]) -> I64:
        if self._ends is None:
            return self._store.document_spans(documents, TOKENS)[0]
        begins = self._ends[np.maximum(documents, 1) - 1]
        return np.where(documents > 0, begins, 0)


def _documents(store: Store, eos: int | None, spool: Path) -> _Documents:
    """The documents by the store's records; or by `eos`, found in one pass over the tokens."""
    if eos is None:
        return _Documents(store, None)
    total, files = store.total(TOKENS), store.bounds(TOKENS)
    with spool.open("wb") as out:
        last = 0
        for lo in range(0, total, BLOCK * 16):
            hi = min(lo + BLOCK * 16, total)
            ends = np.flatnonzero(store.spans([lo], [hi - lo], TOKENS) == eos) + lo + 1
            shards = files[(files > lo) & (files <= hi)]  # a file's end is a document's, too
            ends = np.union1d(ends, shards).astype(np.int64)
            out.write(ends.tobytes())
            last = int(ends[-1]) if len(ends) else last
        if last < total:
            out.write(np.array([total], np.int64).tobytes())
    return _Documents(store, map_file(spool).view(np.int64))


# --- reading


def _read(path: Path, definition: dict[str, Any]) -> RowPlan:
    again = f"remove {path}, and the plan is made anew"
    try:
        plan = json.loads((path / "plan.json").read_text())
        sizes = dict.fromkeys(DTYPES, index(plan["pieces"]))
        sizes["row_splits"] = index(plan["rows"]) + 1
        ledger, unlabelled = Ledger.from_dict(plan["ledger"]), int(plan["unlabelled"])
        labels = index(plan["labels"]) if "labels" in plan else None
        found = plan["definition"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / 'plan.json'} is no packing plan ({error!r}): {again}") from None
    if found != definition:
        raise DataError(f"{path} is the plan of another packing: {again}")
    columns = {}
    for each, dtype in DTYPES.items():
        try:
            columns[each] = map_file(path / f"{each}.column", sizes[each] * dtype.itemsize).view(
                dtype
            )
        except (DataError, MissingData) as error:
            raise DataError(f"{error} Or {again}.") from None
    return RowPlan(**columns, ledger=ledger, unlabelled=unlabelled, path=path, labels=labels)
