"""The shards of one work in the making, and what became of each of its documents."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.pack import bounds_of, pack_rows, position_ids
from penstock.prepare.chunk import Chunk, joined
from penstock.prepare.outcome import Built, Dropped
from penstock.prepare.tally import Tally
from penstock.store import ShardWriter
from penstock.store.paths import safe_name
from penstock.text.arrow import integers, strings
from penstock.text.documents import Records, Reject, Texts, refuse
from penstock.text.files import InputFile

if TYPE_CHECKING:
    from penstock.prepare.worker import Worker

I64 = npt.NDArray[np.int64]
DEFAULT_DOMAIN = "__default__"
LONGEST_NAME = 200  # bytes of a domain's folder
TAKEN = ("manifest.json", "rejects.jsonl")


class Part:
    """Takes batches of documents, up to `limit` that are kept, and writes their records."""

    def __init__(self, worker: Worker, folder: Path, limit: int | None) -> None:
        self._worker, self._folder, self._limit = worker, folder, limit
        self.tally = Tally()
        self.rejects: list[dict[str, Any]] = []
        self._writers: dict[str, ShardWriter] = {}
        self._waiting: dict[str, list[Chunk]] = {}  # for packing, which looks at all of a work
        self._next: dict[str, int] = {}  # position of the next token, where they are continuous

    @property
    def full(self) -> bool:
        """Whether as many documents are kept as were wanted."""
        return self._limit is not None and self.tally.kept >= self._limit

    # --- documents in

    def take(self, file: InputFile, found: Records | Texts) -> None:
        """Tokenize, mask and write a batch; what follows the last wanted document is not seen."""
        if isinstance(found, Texts):
            self._take_texts(file, found)
        else:
            self._take_records(file, found)

    def _unread(self, file: InputFile, rejects: Sequence[Reject], last: int | None) -> None:
        """Documents that could not be read, up to the address of the last one wanted."""
        for each in rejects:
            if last is None or each.address < last:
                self.tally.documents += 1
                rule = re.split("[;:]", each.reason)[0][:60]  # without the particulars
                self._reject(file, each, rule, by_policy=True)

    def _reject(self, file: InputFile, reject: Reject, rule: str, *, by_policy: bool) -> None:
        """Count a document out, with its reason; or stop the run, where the policy says so."""
        if by_policy and self._worker.task.policy == "error":
            refuse(file, reject)
        self.tally.rejected = dict(Counter(self.tally.rejected) + Counter({rule: 1}))
        where = {"file": reject.path, "address": reject.address, "line": reject.line}
        self.rejects.append({**where, "reason": reject.reason, "text": reject.text})

    def _filtered(self, rule: str, count: int) -> None:
        if count:
            counted = Counter(self.tally.filtered) + Counter({rule: count})
            self.tally.filtered = dict(counted)

    def _take_texts(self, file: InputFile, found: Texts) -> None:
        builder = self._worker.builder
        texts, addresses, own = found.texts, found.addresses, found.ids
        gone = builder.sift(texts)
        kept = np.flatnonzero(~np.logical_or.reduce(list(gone.values())))
        read, last = len(texts), None
        if self._limit is not None and self.tally.kept + len(kept) >= self._limit:
            kept = kept[: self._limit - self.tally.kept]
            read = int(kept[-1]) + 1  # what follows was not looked at
            last = int(addresses[kept[-1]])
        self._unread(file, found.rejects, last)
        self.tally.documents += read
        for rule, which in gone.items():
            self._filtered(rule, int(which[:read].sum()))
        if not len(kept):
            return
        if len(kept) < len(texts):
            texts, addresses, own = _chosen(kept, texts, addresses, own)
        self._encode(file, texts, addresses, own)
        if read < len(found.texts) and not self.full:  # some had no tokens: others take their place
            texts, addresses, own = _chosen(
                np.arange(read, len(found.texts)), found.texts, found.addresses, found.ids
            )
            rejects = [each for each in found.rejects if last is None or each.address >= last]
            self._take_texts(file, Texts(addresses, texts, rejects, own))

    def _encode(self, file: InputFile, texts: Any, addresses: I64, own: Any) -> None:
        """Tokenize and write texts that no rule filters; those without a token are no documents."""
        ids, offsets = self._worker.tokenizer.encode(texts)
        whole = np.diff(offsets)
        if not whole.all():
            self._filtered("empty", int((whole == 0).sum()))
            kept = np.flatnonzero(whole)
            if not len(kept):
                return
            texts, addresses, own = _chosen(kept, texts, addresses, own)
            whole, offsets = whole[kept], bounds_of(whole[kept])
        ids, offsets, cut = self._worker.builder.frame(ids, offsets)
        lengths = np.diff(offsets)
        self.tally.kept += len(texts)
        self.tally.tokens_in += len(ids) + cut
        self.tally.truncated_tokens += cut
        self.tally.truncated_documents += int((lengths < whole + self._worker.around).sum())
        chunk = Chunk({"sequence": ids}, {"sequence": lengths}, file.path, addresses, own)
        self._write(DEFAULT_DOMAIN, file, chunk)

    def _take_records(self, file: InputFile, found: Records) -> None:
        domain_key = self._worker.config.output.domain_key
        by_domain: dict[str, list[_Kept]] = {}
        built = self._worker.builder.build(found.records)
        outcomes = [
            _placed(each, record, domain_key)
            for each, record in zip(built, found.records, strict=True)
        ]
        wanted = None if self._limit is None else self._limit - self.tally.kept
        read, last = _up_to(wanted, outcomes, found)
        self._unread(file, found.rejects, last)
        for place, outcome in enumerate(outcomes[:read]):
            self.tally.documents += 1
            address, record = int(found.addresses[place]), found.records[place]
            if isinstance(outcome, Dropped):
                self._drop(file, address, outcome, record)
                continue
            self.tally.kept += 1
            self.tally.tokens_in += outcome.tokens_in
            self.tally.truncated_tokens += outcome.truncated
            self.tally.truncated_documents += outcome.truncated > 0
            domain = _domain(record, domain_key) or DEFAULT_DOMAIN
            kept = _Kept(address, record.get("id"), outcome)
            by_domain.setdefault(domain, []).append(kept)
        for name, those in by_domain.items():
            self._write(name, file, self._columns(file, those))

    def _drop(self, file: InputFile, address: int, dropped: Dropped, record: Any) -> None:
        if not dropped.rejected:
            self._filtered(dropped.rule, 1)
            return
        text = json.dumps(record, ensure_ascii=True, default=str)[:200]
        reason = dropped.reason.removeprefix("rejected: ")
        reject = Reject(path=file.path, address=address, line=None, reason=reason, text=text)
        bad = dropped.rule in ("missing_field", "bad_value", "bad_domain")
        self._reject(file, reject, dropped.rule, by_policy=bad)

    def _columns(self, file: InputFile, kept: Sequence[_Kept]) -> Chunk:
        """Records one by one as the columns of a chunk."""
        values: dict[str, npt.NDArray[Any]] = {}
        lengths: dict[str, I64] = {}
        for name, key in self._worker.builder.keys.items():
            parts: list[Any] = [each.built.values[name] for each in kept]
            lengths[name] = np.array([len(each) for each in parts], np.int64)
            if key.nested:
                parts = [each for group in parts for each in group]
                lengths[f"{name}.items"] = np.array([len(each) for each in parts], np.int64)
            values[name] = np.concatenate(parts) if parts else np.empty(0, np.int64)
        addresses = np.array([each.address for each in kept], np.int64)
        named = [None if each.id is None else str(each.id) for each in kept]
        own = strings(named) if any(named) else None
        return Chunk(values, lengths, file.path, addresses, own)

    # --- records out

    def _write(self, domain: str, file: InputFile, chunk: Chunk) -> None:
        limits = self._worker.config.preprocessing
        if "sequence" not in chunk.values:
            self._out(domain, chunk)
            return
        # A recipe without a limit of length has no rows to fit into, unless it packs some.
        packing = limits.packing_strategy
        if packing == "bfd" or (packing == "simple" and limits.max_seq_len is not None):
            chunk = self._cut(file, chunk)
        if packing == "simple":
            self._out(domain, chunk)
        else:
            self._waiting.setdefault(domain, []).append(chunk)

    def _cut(self, file: InputFile, chunk: Chunk) -> Chunk:
        """Records cut to what a row may hold; those with nothing trained left are rejected."""
        limits = self._worker.config.preprocessing
        before = chunk.lengths["sequence"]
        cut = chunk.cut(limits.max_packed_len, from_end=limits.truncation_mode == "keep_end")
        if cut is chunk:
            return chunk
        gone = cut.untrained()
        for i in gone.tolist():
            reason = f"no_trained_token: none is left of {limits.max_packed_len}"
            address = int(chunk.addresses[i])
            reject = Reject(path=file.path, address=address, line=None, reason=reason, text="")
            self._reject(file, reject, "no_trained_token", by_policy=False)
        self.tally.kept -= len(gone)
        self.tally.tokens_in -= int(before[gone].sum())
        lost = np.delete(before - cut.lengths["sequence"], gone)
        self.tally.truncated_tokens += int(lost.sum())
        self.tally.truncated_documents += int((lost > 0).sum())
        return cut.without(gone)

    def _out(self, domain: str, chunk: Chunk, rows: I64 | None = None) -> None:
        """Write a chunk; `rows` says in which packed row each record stands."""
        writer = self._writer(domain)
        values = dict(chunk.values)
        if "position_ids" in self._worker.keys:
            values["position_ids"] = self._positions(domain, chunk.lengths["sequence"], rows)
        offsets = {array: bounds_of(chunk.lengths[array]) for array in writer.schema.parents}
        writer.extend(values, offsets, chunk.source(rows))
        self.tally.records += len(chunk)
        roles = {name: key.role for name, key in writer.schema.keys.items()}
        masks = [name for name, role in roles.items() if role == "mask"]
        trained = masks or ["sequence"]  # where nothing is masked, everything is trained
        self.tally.tokens += sum(len(values[n]) for n, role in roles.items() if role == "ids")
        self.tally.trained += sum(
            int(np.count_nonzero(values[n])) if masks else len(values[n]) for n in trained
        )

    def _positions(self, domain: str, lengths: I64, rows: I64 | None) -> npt.NDArray[np.int32]:
        """Positions by document, or going on: in a packed row, else through all of a work."""
        if self._worker.config.output.position_ids_mode == "doc_reset":
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
            self._pack(domain, joined(chunks))
        shards = {}
        for domain, writer in sorted(self._writers.items()):
            writer.close()
            shards[domain] = [Path(shard.path).name for shard in writer.shards]
        return shards

    def abort(self) -> None:
        """Let go of whatever is not finished."""
        for writer in self._writers.values():
            writer.abort()

    def _pack(self, domain: str, whole: Chunk) -> None:
        """All records of the work in the order of their rows."""
        limits = self._worker.config.preprocessing
        rows = pack_rows(whole.lengths["sequence"], limits.max_packed_len, limits.packing_strategy)
        assert not rows.ledger.cropped, "records were cut before"
        self.tally.rows += len(rows)
        self.tally.padding += rows.ledger.padding
        row = np.repeat(np.arange(len(rows)), np.diff(rows.row_splits))
        self._out(domain, whole.pieces(rows.document, rows.start, rows.length), row)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record that passed: where it stands, its own id if it has one, and what it became."""

    address: int
    id: Any
    built: Built


def _chosen(which: I64, texts: Any, addresses: I64, own: Any) -> tuple[Any, I64, Any]:
    """Some texts of a batch, with their addresses and ids."""
    rows = integers(which)
    return texts.take(rows), addresses[which], None if own is None else own.take(rows)


def _up_to(
    wanted: int | None, outcomes: Sequence[Built | Dropped], found: Records
) -> tuple[int, int | None]:
    """How many records of a batch are looked at, and the address of the last, if that is all."""
    if wanted is None:
        return len(outcomes), None
    passed = np.cumsum([isinstance(each, Built) for each in outcomes])
    if not len(passed) or passed[-1] < wanted:
        return len(outcomes), None
    last = int(np.searchsorted(passed, wanted))
    return last + 1, int(found.addresses[last])


def _domain(record: dict[str, Any], key: str | None) -> str | None:
    """The folder a record's domain names; None where it can be none."""
    if key is None:
        return DEFAULT_DOMAIN
    found = record.get(key, DEFAULT_DOMAIN)
    name = str(found) if isinstance(found, str | int) and not isinstance(found, bool) else ""
    good = safe_name(name) and "/" not in name and name not in TAKEN
    return name if good and len(name.encode()) <= LONGEST_NAME else None


def _placed(outcome: Built | Dropped, record: dict[str, Any], key: str | None) -> Built | Dropped:
    """The outcome, unless the record's domain is none."""
    if isinstance(outcome, Dropped) or _domain(record, key) is not None:
        return outcome
    found = str(record.get(key or ""))[:60]
    reason = f"rejected: {key} is {found!r}, which cannot name a folder"
    return Dropped(reason=reason, rule="bad_domain", rejected=True)
