"""One work: documents read, tokenized, masked, packed and written as the shards of a part.

What a part holds follows from the work and the plan alone, so that it may be made by any process,
at any time, and again.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.pack import pack_rows, position_ids
from penstock.prepare.config import PipelineConfig
from penstock.prepare.masks import MaskBuilder
from penstock.prepare.outcome import Built, Dropped
from penstock.prepare.plan import Folder, Work
from penstock.prepare.tally import Tally
from penstock.store import Key, ShardWriter
from penstock.store.paths import safe_name
from penstock.text.documents import Policy, Records, Reject, Texts, read_records, read_texts
from penstock.text.files import InputFile
from penstock.text.tokenizer import Tokenizer

I64 = npt.NDArray[np.int64]
DEFAULT_DOMAIN = "__default__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every worker of a run has to know."""

    config: PipelineConfig
    files: tuple[InputFile, ...]
    tokenizer: Tokenizer  # pickled as what opens it again
    policy: Policy
    out: Path
    now: datetime  # what templates that write dates are told: when the run was begun


class Worker:
    """A mask builder that is kept from one work to the next."""

    def __init__(self, task: Task) -> None:
        self.task, self.config = task, task.config
        self.tokenizer = task.tokenizer
        self.builder = MaskBuilder(task.config, self.tokenizer, now=task.now)
        self.keys = keys_of(task.config, self.builder)
        self.around = 0  # tokens that are put around each text: BOS, EOS
        if self.builder.plain_text is not None:
            nothing = np.empty(0, np.uint32), np.zeros(2, np.int64)
            self.around = len(self.builder.frame(*nothing)[0])

    def run(self, work: Work, limit: int | None = None) -> dict[str, Any]:
        """Do a work, at most `limit` documents of it, and give its completion mark."""
        part = Folder(self.task.out).parts / f"{work.number:06d}-{secrets.token_hex(4)}"
        part.mkdir(parents=True)
        making = _Part(self, part)
        try:
            with (part / "rejects.jsonl").open("w", encoding="utf-8") as rejects:
                for batch in self._batches(work):
                    making.take(batch, limit)
                    for reject in making.rejects:
                        rejects.write(json.dumps(reject, ensure_ascii=False) + "\n")
                    making.rejects.clear()
                    if limit is not None and making.tally.kept >= limit:
                        break
                shards = making.close()
        finally:
            making.abort()
        tally = making.tally + Tally(bytes=work.size)
        assert tally.balanced, tally
        return {"part": part.name, "shards": shards, "tally": tally.to_dict()}

    def _batches(self, work: Work) -> Iterator[Batch]:
        for unit in work.units:
            file = self.task.files[unit.file]
            if self.builder.plain_text is not None and self.config.output.domain_key is None:
                read: Iterator[Any] = read_texts(
                    file, unit, self.builder.plain_text, policy=self.task.policy
                )
            else:
                read = read_records(file, unit, policy=self.task.policy)
            for found in read:
                yield Batch(file, found)


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents of one file."""

    file: InputFile
    found: Records | Texts


def keys_of(config: PipelineConfig, builder: MaskBuilder) -> dict[str, Key]:
    """The store's keys: the recipe's, positions where they are asked for, dtypes as stated."""
    keys = dict(builder.keys)
    if config.output.position_ids_mode != "none" and "sequence" in keys:
        keys["position_ids"] = Key(dtype="int32")
    for name, dtype in config.output.dtype.items():
        if name in keys:
            keys[name] = replace(keys[name], dtype=dtype)
    return keys


class _Part:
    """The shards of one work in the making: a writer for each domain."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        self._worker, self._folder = worker, folder
        self.tally = Tally()
        self.rejects: list[dict[str, Any]] = []
        self._writers: dict[str, ShardWriter] = {}
        self._waiting: dict[str, list[_Chunk]] = {}  # for packing, which looks at all of a work
        self._next: dict[str, int] = {}  # position of the next token, where they are continuous

    # --- documents in

    def take(self, batch: Batch, limit: int | None) -> None:
        """Tokenize, mask and write a batch, up to `limit` documents kept in all."""
        found = batch.found
        self._reject(found.rejects)
        if isinstance(found, Texts):
            self._take_texts(batch.file, found, limit)
        else:
            self._take_records(batch.file, found, limit)

    def _reject(self, rejects: Sequence[Reject]) -> None:
        for each in rejects:
            self._rejected(each.path, each.address, each.line, each.reason, each.reason, each.text)
            self.tally.documents += 1

    def _rejected(
        self, path: str, address: int, line: int | None, rule: str, reason: str, text: str = ""
    ) -> None:
        rule = rule.split(":", maxsplit=1)[0][:60]
        self.tally.rejected = dict(Counter(self.tally.rejected) + Counter({rule: 1}))
        where = {"file": path, "address": address, "line": line}
        self.rejects.append({**where, "reason": reason, "text": text})

    def _take_texts(self, file: InputFile, found: Texts, limit: int | None) -> None:
        builder = self._worker.builder
        texts, addresses, own = found.texts, found.addresses, found.ids
        gone = builder.sift(texts)
        kept = np.flatnonzero(~np.logical_or.reduce(list(gone.values())))
        read = len(texts)
        if limit is not None and self.tally.kept + len(kept) > limit:
            kept = kept[: limit - self.tally.kept]
            read = int(kept[-1]) + 1 if len(kept) else 0  # what follows was not looked at
        self.tally.documents += read
        for rule, which in gone.items():
            self._count_filtered(rule, int(which[:read].sum()))
        if not len(kept):
            return
        if len(kept) < len(texts):
            texts, addresses = texts.take(pa.array(kept)), addresses[kept]
            own = None if own is None else own.take(pa.array(kept))
        ids, offsets = self._worker.tokenizer.encode(texts)
        whole = np.diff(offsets)
        ids, offsets, cut = builder.frame(ids, offsets)
        lengths = np.diff(offsets)
        self.tally.kept += len(texts)
        self.tally.tokens_in += len(ids) + cut
        self.tally.truncated_tokens += cut
        self.tally.truncated_documents += int((lengths < whole + self._worker.around).sum())
        self.tally.trained += len(ids)
        self._write(DEFAULT_DOMAIN, {"sequence": ids}, {"sequence": lengths}, file, addresses, own)

    def _take_records(self, file: InputFile, found: Records, limit: int | None) -> None:
        builder, domain_key = self._worker.builder, self._worker.config.output.domain_key
        by_domain: dict[str, list[_Kept]] = {}
        for place, built in enumerate(builder.build(found.records)):
            if limit is not None and self.tally.kept >= limit:
                break
            self.tally.documents += 1
            address, record = int(found.addresses[place]), found.records[place]
            if isinstance(built, Dropped):
                self._drop(file, address, built, record)
                continue
            domain = _domain(record, domain_key)
            if domain is None:
                reason = f"bad_domain: {domain_key} is {record.get(domain_key or '')!r}"
                self._rejected(file.path, address, None, "bad_domain", reason)
                continue
            self.tally.kept += 1
            self.tally.tokens_in += built.tokens_in
            self.tally.truncated_tokens += built.truncated
            self.tally.truncated_documents += built.truncated > 0
            by_domain.setdefault(domain, []).append(_Kept(address, record.get("id"), built))
        for domain, kept in by_domain.items():
            self._write_built(domain, file, kept)

    def _drop(self, file: InputFile, address: int, dropped: Dropped, record: Any) -> None:
        if dropped.rejected:
            text = json.dumps(record, ensure_ascii=True, default=str)[:200]
            self._rejected(file.path, address, None, dropped.rule, dropped.reason, text)
        else:
            self._count_filtered(dropped.rule, 1)

    def _count_filtered(self, rule: str, count: int) -> None:
        if count:
            counted = Counter(self.tally.filtered) + Counter({rule: count})
            self.tally.filtered = dict(counted)

    def _write_built(self, domain: str, file: InputFile, kept: list[_Kept]) -> None:
        """Records one by one as the columns of a batch."""
        values: dict[str, npt.NDArray[Any]] = {}
        lengths: dict[str, I64] = {}
        for name, key in self._worker.builder.keys.items():
            parts: list[Any] = [each.built.values[name] for each in kept]
            if key.nested:
                inner = [len(each) for group in parts for each in group]
                lengths[name] = np.array([len(group) for group in parts], np.int64)
                lengths[f"{name}.items"] = np.array(inner, np.int64)
                parts = [each for group in parts for each in group]
            else:
                lengths[name] = np.array([len(each) for each in parts], np.int64)
            values[name] = np.concatenate(parts) if parts else np.empty(0, np.int64)
        addresses = np.array([each.address for each in kept], np.int64)
        mask = values.get("loss_mask")
        self.tally.trained += int(mask.sum()) if mask is not None else 0
        named = [None if each.id is None else str(each.id) for each in kept]
        own = pa.array(named, pa.string()) if any(named) else None
        self._write(domain, values, lengths, file, addresses, own)

    # --- records out

    def _write(
        self,
        domain: str,
        values: dict[str, npt.NDArray[Any]],
        lengths: dict[str, I64],
        file: InputFile,
        addresses: I64,
        own: pa.Array | None,
    ) -> None:
        chunk = _Chunk(values, lengths, file.path, addresses, own)
        config = self._worker.config
        if config.preprocessing.packing_strategy == "simple" or "sequence" not in values:
            self._out(domain, chunk.truncated(config, self.tally))
        else:
            self._waiting.setdefault(domain, []).append(chunk)

    def _out(self, domain: str, chunk: _Chunk, rows: I64 | None = None) -> None:
        """Write a chunk; `rows` says in which packed row each record stands."""
        writer = self._writer(domain)
        values = dict(chunk.values)
        if "position_ids" in self._worker.keys:
            values["position_ids"] = self._positions(domain, chunk.lengths["sequence"], rows)
        arrays = writer.schema.parents
        offsets = {array: _offsets(chunk.lengths[array]) for array in arrays}
        writer.extend(values, offsets, chunk.source(rows))
        self.tally.records += len(chunk.addresses)
        for name, key in writer.schema.keys.items():
            self.tally.tokens += len(values[name]) if key.role == "ids" else 0

    def _positions(self, domain: str, lengths: I64, rows: I64 | None) -> npt.NDArray[np.int32]:
        """Positions by document, or going on: in a packed row, else through all of a work."""
        mode = self._worker.config.output.position_ids_mode
        if mode == "doc_reset":
            return position_ids(lengths, "doc_reset")
        if rows is not None:
            return position_ids(np.bincount(rows, lengths).astype(np.int64), "doc_reset")
        first = self._next.get(domain, 0)
        self._next[domain] = first + int(lengths.sum())
        return position_ids(lengths, "continuous") + np.int32(first)

    def _writer(self, domain: str) -> ShardWriter:
        if domain not in self._writers:
            config = self._worker.config.output
            storage: Any = config.storage_format
            self._writers[domain] = ShardWriter(
                self._folder,
                self._worker.keys,
                domain=domain,
                storage=storage,
                max_tokens_per_shard=config.max_tokens_per_shard,
                vocab_size=self._worker.tokenizer.vocab_size,
                commit=False,
            )
        return self._writers[domain]

    def close(self) -> dict[str, list[str]]:
        """Pack what waited, finish all shards, and give their names by domain."""
        for domain, chunks in sorted(self._waiting.items()):
            self._pack(domain, chunks)
        shards = {}
        for domain, writer in sorted(self._writers.items()):
            writer.close()
            shards[domain] = [Path(shard.path).name for shard in writer.shards]
        return shards

    def abort(self) -> None:
        """Let go of whatever is not finished."""
        for writer in self._writers.values():
            writer.abort()

    def _pack(self, domain: str, chunks: list[_Chunk]) -> None:
        """All records of the work in the order of their rows."""
        config = self._worker.config.preprocessing
        whole = _joined(chunks)
        lengths = whole.lengths["sequence"]
        overflow: Any = None
        if config.packing_strategy == "bfd" and config.truncation_mode == "keep_end":
            overflow = "truncate_start"
        rows = pack_rows(lengths, config.max_packed_len, config.packing_strategy, overflow=overflow)
        self.tally.rows += len(rows)
        self.tally.padding += rows.ledger.padding
        self.tally.truncated_tokens += rows.ledger.cropped
        self.tally.truncated_documents += rows.ledger.documents_cropped
        row = np.repeat(np.arange(len(rows)), np.diff(rows.row_splits))
        self._out(domain, whole.pieces(rows.document, rows.start, rows.length), row)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record that passed: where it stands, its own id if it has one, and what it became."""

    address: int
    id: Any
    built: Built


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Records as columns, with where each came from."""

    values: dict[str, npt.NDArray[Any]]
    lengths: dict[str, I64]  # by offsets array
    path: str | list[str]  # of all records, or of each
    addresses: I64
    own: pa.Array | None

    def truncated(self, config: PipelineConfig, tally: Tally) -> _Chunk:
        """Records cut to what a packed row may hold, where that is shorter than they are."""
        most = config.preprocessing.max_packed_len
        lengths = self.lengths.get("sequence")
        unlimited = config.preprocessing.max_seq_len is None
        if lengths is None or unlimited or int(lengths.max(initial=0)) <= most:
            return self
        kept = np.minimum(lengths, most)
        tally.truncated_tokens += int((lengths - kept).sum())
        tally.truncated_documents += int((kept < lengths).sum())
        from_end = config.preprocessing.truncation_mode == "keep_end"
        start = lengths - kept if from_end else np.zeros_like(lengths)
        return self.pieces(np.arange(len(lengths)), start, kept)

    def pieces(self, record: npt.NDArray[Any], start: npt.NDArray[Any], length: I64) -> _Chunk:
        """Spans of records, each a record of its own; all keys are cut alike."""
        first = _offsets(self.lengths["sequence"])[:-1][record] + start
        length = length.astype(np.int64)
        at = np.repeat(first - _offsets(length)[:-1], length) + np.arange(int(length.sum()))
        values = {name: value[at] for name, value in self.values.items()}
        path = self.path if isinstance(self.path, str) else [self.path[i] for i in record.tolist()]
        own = None if self.own is None else self.own.take(pa.array(record))
        lengths = dict.fromkeys(self.lengths, length)
        return _Chunk(values, lengths, path, self.addresses[record], own)

    def source(self, rows: I64 | None) -> pa.Table:
        """Where each record came from: its file, its address there, its own id, its packed row."""
        count = len(self.addresses)
        paths = [self.path] * count if isinstance(self.path, str) else self.path
        columns: dict[str, Any] = {
            "file": pa.array(paths, pa.string()).dictionary_encode(),
            "address": pa.array(self.addresses),
            "id": pa.nulls(count, pa.string()) if self.own is None else self.own.cast(pa.string()),
        }
        if rows is not None:
            columns["row"] = pa.array(rows)
        return pa.table(columns)


def _joined(chunks: Sequence[_Chunk]) -> _Chunk:
    names, arrays = chunks[0].values, chunks[0].lengths
    paths = [[c.path] * len(c.addresses) if isinstance(c.path, str) else c.path for c in chunks]
    own = [
        pa.nulls(len(c.addresses), pa.string()) if c.own is None else c.own.cast(pa.string())
        for c in chunks
    ]
    return _Chunk(
        {name: np.concatenate([c.values[name] for c in chunks]) for name in names},
        {name: np.concatenate([c.lengths[name] for c in chunks]) for name in arrays},
        [path for each in paths for path in each],
        np.concatenate([c.addresses for c in chunks]),
        pa.concat_arrays(own),
    )


def _offsets(lengths: I64) -> I64:
    edges = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=edges[1:])
    return edges


def _domain(record: dict[str, Any], key: str | None) -> str | None:
    """The folder a record's domain names; None where it is no name."""
    if key is None:
        return DEFAULT_DOMAIN
    found = record.get(key, DEFAULT_DOMAIN)
    name = str(found) if isinstance(found, str | int) and not isinstance(found, bool) else None
    return name if name is not None and safe_name(name) and "/" not in name else None
