"""Raw documents to a committed store: restartable, parallel, the same bytes in the end.

    Pipeline(recipe("pretrain"), ["corpus/"], "tokens", "tokenizer/").run()

The input is cut into works, and workers, processes of their own, make a part of each. When all
are done, parts are renamed into place in the order of the input and the manifest is written. A run
that was killed is taken up where it was; one that is complete is left alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, DataError, PenstockError
from penstock.prepare.config import PipelineConfig
from penstock.prepare.plan import Folder, Work, check_same, definition_of, replace_file, works_of
from penstock.prepare.pool import Note, Pool
from penstock.prepare.tally import Tally
from penstock.prepare.worker import Task
from penstock.store import commit, discard
from penstock.store.manifest import MANIFEST
from penstock.store.paths import sync_directory
from penstock.store.spool import SOURCE_SUFFIX
from penstock.store.workspace import mark_unfinished
from penstock.text.definition import content_hash
from penstock.text.documents import Policy, read_records, units_of
from penstock.text.files import InputFile, find_files
from penstock.text.tokenizer import FileTokenizer, Opening
from penstock.text.tokenizer_files import define

REJECTS = "rejects.jsonl"
LEAST_FOR_SHARE = 1000  # documents before a share of rejects says anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    bytes: int
    total: int
    tally: Tally
    workers: int


class Pipeline:
    """Prepares the documents of `input_paths` by a recipe, into the store `output_dir`.

    `policy` "reject" writes bad documents to `rejects.jsonl`, up to a share of `max_rejects`;
    "error" stops at the first. `workers` are processes, by default as many as there are cores for
    this one; 0 does all the work here.
    """

    def __init__(
        self,
        config: PipelineConfig,
        input_paths: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
        output_dir: str | os.PathLike[str],
        tokenizer_path: str | os.PathLike[str],
        *,
        workers: int | None = None,
        policy: Policy = "error",
        max_rejects: float = 0.01,
        backend: str = "auto",
        trust_pickle: bool = False,
        overwrite: bool = False,
    ) -> None:
        if policy not in ("error", "reject"):
            raise ConfigError(f"policy is 'error' or 'reject', not {policy!r}")
        if not 0 <= max_rejects <= 1:
            raise ConfigError(f"max_rejects is a share from 0 to 1, not {max_rejects}")
        if workers is not None and workers < 0:
            raise ConfigError(f"workers is a number of processes, or 0, not {workers}")
        self.config, self.out = config, Path(output_dir).absolute()
        if isinstance(input_paths, str | os.PathLike):
            input_paths = [input_paths]
        self.paths = list(input_paths)
        self.tokenizer_path = os.fspath(tokenizer_path)
        self.workers = len(os.sched_getaffinity(0)) if workers is None else workers
        self.max_rejects, self.overwrite = max_rejects, overwrite
        self._policy: Policy = policy
        self._backend, self._trust_pickle = backend, trust_pickle

    def run(self, progress: Callable[[Progress], None] | None = None) -> Tally:
        """Do what is left to do; gives what became of every document and token."""
        files = find_files(self.paths)
        folder, facts = Folder(self.out), self._tokenizer_facts()
        definition = definition_of(
            files,
            recipe=self.config.to_dict(),
            tokenizer=facts["tokenizer"],
            policy=self._policy,
        )
        with folder.locked():
            done = self._already(folder, definition)
            if done is not None:
                return done
            self._check_room(files)
            folder.begin(definition)
            run = _Run(folder, works_of(files), self.config.preprocessing.max_items, self.workers)
            marks = self._done(run, files, progress)
            return self._finish(folder, marks, facts)

    def _done(
        self, run: _Run, files: Sequence[InputFile], progress: Callable[[Progress], None] | None
    ) -> list[dict[str, Any]]:
        """All works done, as their marks in order.

        They are begun while the tokenizer's fast backend is still being compared, and again by the
        reference where it turns out to differ: nothing counts until that is settled.
        """
        backend: Any = self._backend
        opening: Opening | None = None

        def note(number: int, mark: dict[str, Any]) -> None:
            self._note(run, number, mark, progress)

        while True:
            with Pool(min(self.workers, len(run.missing))) as pool:
                if opening is None:
                    opening = Opening(
                        self.tokenizer_path,
                        backend=backend,
                        trust_pickle=self._trust_pickle,
                        sample=() if backend == "reference" else sample_of(files),
                    )
                    tokenizer = opening.first

                try:
                    pool.begin(
                        Task(
                            config=self.config,
                            files=tuple(files),
                            tokenizer=tokenizer,
                            policy=self._policy,
                            out=self.out,
                            now=run.folder.began(),
                        )
                    )
                    return run.through(pool, _once_settled(opening, tokenizer, note))
                except (PenstockError, _DifferentIds):
                    if opening.settled() is tokenizer:
                        raise
            tokenizer = opening.settled()

    def _note(
        self,
        run: _Run,
        number: int,
        mark: dict[str, Any],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        """Keep a completion mark, and say how far it is."""
        run.folder.mark(number, mark)
        run.marks[number] = mark
        so_far = reduce(Tally.__add__, (Tally(**m["tally"]) for m in run.marks.values()))
        self._check_rejects(so_far)
        if progress is not None:
            at = sum(run.works[n].size for n in run.marks)
            total = sum(work.size for work in run.works)
            progress(Progress(bytes=at, total=total, tally=so_far, workers=self.workers))

    # --- before

    def _already(self, folder: Folder, definition: dict[str, Any]) -> Tally | None:
        """The tally of this very run, if it is complete; what is in the way is removed or said."""
        begun = folder.definition()
        if self.overwrite:
            folder.forget(everything=True)
            discard(self.out)
            (self.out / REJECTS).unlink(missing_ok=True)
            return None
        if begun is not None and begun != definition:
            if folder.marks() or (self.out / MANIFEST).exists():
                check_same(begun, definition, self.out)
            folder.forget(everything=True)  # a run that failed at its start: nothing is lost
            begun = None
        if not (self.out / MANIFEST).exists():
            return None
        if begun is None:
            raise ConfigError(
                f"{self.out} holds a store that was not prepared here: write somewhere else, or "
                "replace it with --overwrite"
            )
        summary = folder.root / "tally.json"
        return Tally(**json.loads(summary.read_text())) if summary.exists() else None

    def _check_room(self, files: Sequence[InputFile]) -> None:
        """Say now, rather than in some hours, that the disk is too small."""
        self.out.mkdir(parents=True, exist_ok=True)
        least = sum(file.size for file in files) // 4  # a token of 2 bytes is 4 characters or more
        free = shutil.disk_usage(self.out).free
        if free < least:
            raise ConfigError(
                f"{self.out} has {free / 1e9:.1f} GB of disk left, and these documents may take "
                f"{least / 1e9:.1f} GB or more: free some, or write somewhere else"
            )

    def _tokenizer_facts(self) -> dict[str, Any]:
        """What the manifest says of the tokenizer."""
        found = define(self.tokenizer_path, trust_pickle=self._trust_pickle)
        facts = {
            "tokenizer": content_hash(found.content),
            "tokenizer_name": Path(self.tokenizer_path).name,
            "vocab_size": found.vocab_size,
            "eos_token_id": found.eos_id,
            "bos_token_id": found.bos_id,
            "pad_token_id": found.pad_id,
        }
        return {name: value for name, value in facts.items() if value is not None}

    # --- the work

    def _check_rejects(self, tally: Tally, *, at_the_end: bool = False) -> None:
        """Stop where more is rejected than was said may be."""
        enough = at_the_end or tally.documents >= LEAST_FOR_SHARE
        if enough and tally.rejects > self.max_rejects * tally.documents:
            worst = max(tally.rejected, key=lambda rule: tally.rejected[rule])
            raise DataError(
                f"{tally.rejects:,} of {tally.documents:,} documents were rejected, most as "
                f"{worst!r}, more than the share of {self.max_rejects:g} that max_rejects allows: "
                f"look at {self.out}/.prepare/parts/*/{REJECTS}, or raise it"
            )

    # --- after

    def _finish(
        self, folder: Folder, marks: Sequence[dict[str, Any]], facts: dict[str, Any]
    ) -> Tally:
        """Rename the parts into place, in order, and write the manifest."""
        tally = reduce(Tally.__add__, (Tally(**mark["tally"]) for mark in marks), Tally())
        self._check_rejects(tally, at_the_end=True)
        assert tally.balanced, tally
        mark_unfinished(self.out)
        numbers: dict[str, int] = {}
        for mark in marks:
            for domain, names in mark["shards"].items():
                for name in names:
                    number = numbers.get(domain, 0)
                    numbers[domain] = number + 1
                    _move(folder.parts / mark["part"] / domain / name, self.out / domain, number)
        for domain in sorted(numbers):
            sync_directory(self.out / domain)
        _join(
            [folder.parts / mark["part"] / REJECTS for mark in marks],
            self.out / REJECTS,
            wanted=bool(tally.rejects),
        )
        if not numbers:
            raise DataError(
                f"not one of {tally.documents:,} documents was kept: {dict(tally.filtered)}, "
                f"{dict(tally.rejected)}; look at the recipe"
            )
        replace_file(folder.root / "tally.json", json.dumps(tally.to_dict()).encode())
        metadata = facts | {"recipe": self.config.to_dict()}
        commit(self.out, metadata=metadata, ledger=tally.to_dict())
        folder.forget(everything=False)
        return tally


def _once_settled(opening: Opening, used: FileTokenizer, note: Note) -> Note:
    """`note`, once it is known that the tokenizer in use is the one to keep."""

    def guarded(number: int, mark: dict[str, Any]) -> None:
        if opening.settled() is not used:
            raise _DifferentIds
        note(number, mark)

    return guarded


class _DifferentIds(Exception):
    """The fast backend's ids are not the reference's."""


class _Run:
    """The works of a run and their marks; `most` is how many documents may be kept."""

    def __init__(
        self, folder: Folder, works: Sequence[Work], most: int | None, workers: int
    ) -> None:
        self.folder, self.works = folder, works
        self.marks = folder.marks()
        self._most, self._step = most, max(workers, 1)

    @property
    def missing(self) -> list[Work]:
        """Works without a completion mark."""
        return [work for work in self.works if work.number not in self.marks]

    def through(self, pool: Pool, note: Note) -> list[dict[str, Any]]:
        """Do what is missing; gives the marks of the works that count, in order."""
        if self._most is not None:
            return self._up_to(self._most, pool, note)
        pool.run(self.missing, note)
        return [self.marks[work.number] for work in self.works]

    def _up_to(self, most: int, pool: Pool, note: Note) -> list[dict[str, Any]]:
        """Works in order until `most` documents are kept: the last one is done up to that many."""
        kept, chosen = 0, []
        for at in range(0, len(self.works), self._step):
            group = self.works[at : at + self._step]
            pool.run([work for work in group if work.number not in self.marks], note)
            for work in group:
                mark = self.marks[work.number]
                if kept + mark["tally"]["kept"] > most:
                    pool.run([work], note, limit=most - kept)
                    mark = self.marks[work.number]
                chosen.append(mark)
                kept += mark["tally"]["kept"]
                if kept >= most:
                    return chosen
        return chosen


def sample_of(files: Sequence[InputFile], most: int = 64) -> list[str]:
    """Some of the text of an input: what its first documents hold, of any field."""
    texts: list[str] = []
    for unit in units_of(files[:1], target_bytes=1 << 20)[:1]:
        for batch in read_records(files[0], unit, policy="reject"):
            for record in batch.records[:most]:
                texts += (text[:4000] for text in _strings(record))
            break
    return texts[:most]


def _strings(value: Any) -> Iterator[str]:
    """Every string in a document, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _move(made: Path, domain: Path, number: int) -> None:
    """A shard to its final place; one that is there already was moved before a kill."""
    prefix, suffix = made.stem.rsplit("_", 1)[0], made.suffix
    target = domain / f"{prefix}_{number:04d}{suffix}"
    domain.mkdir(parents=True, exist_ok=True)
    beside = made.with_suffix(SOURCE_SUFFIX)
    if suffix and beside.exists():
        beside.rename(target.with_suffix(SOURCE_SUFFIX))
    if made.exists():
        made.rename(target)
    elif not target.exists():
        raise DataError(f"{made} is missing, though its work is complete: start with --overwrite")


def _join(parts: Iterable[Path], target: Path, *, wanted: bool) -> None:
    """Rejects of all works in one file, in the order of the input."""
    if not wanted:
        target.unlink(missing_ok=True)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    with temporary.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(target)
