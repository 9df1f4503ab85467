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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from penstock.cache import sync_directory, write_whole
from penstock.errors import ConfigError, DataError, PenstockError
from penstock.prepare.config import PipelineConfig
from penstock.prepare.finish import join, move, shards_in
from penstock.prepare.plan import Folder, check_same, definition_of, works_of
from penstock.prepare.pool import Note, Pool, said
from penstock.prepare.run import Run, total_of
from penstock.prepare.tally import Tally
from penstock.prepare.worker import Task, check_unchanged
from penstock.store import commit, discard
from penstock.store.manifest import MANIFEST
from penstock.store.workspace import mark_unfinished, tidy
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
        try:
            return self._run(progress)
        except OSError as error:  # of the parent's own writing; workers say theirs by themselves
            if isinstance(error, PenstockError):
                raise
            raise said(error) from error

    def _run(self, progress: Callable[[Progress], None] | None) -> Tally:
        self._check_out()
        files = find_files(self.paths)
        folder = Folder(self.out)
        facts, kind = tokenizer_facts(self.tokenizer_path, trust_pickle=self._trust_pickle)
        definition = definition_of(
            files,
            recipe=self.config.to_dict(),
            tokenizer=kind,
            policy=self._policy,
        )
        with folder.locked():
            done = self._already(folder, definition)
            if done is not None:
                return done
            folder.begin(definition)
            run = Run(folder, works_of(files), self.config.preprocessing.max_items, self.workers)
            self._check_room(run)
            marks = self._done(run, files, progress)
            for file in files:
                check_unchanged(file)
            return self._finish(folder, marks, facts)

    def _done(
        self, run: Run, files: Sequence[InputFile], progress: Callable[[Progress], None] | None
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
        run: Run,
        number: int,
        mark: dict[str, Any],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        """Keep a completion mark, and say how far it is."""
        run.keep(number, mark)
        self._check_rejects(run.tally)
        if progress is not None:
            so_far = run.tally
            progress(
                Progress(bytes=so_far.bytes, total=run.size, tally=so_far, workers=self.workers)
            )

    # --- before

    def _already(self, folder: Folder, definition: dict[str, Any]) -> Tally | None:
        """The tally of this very run, if it is complete; what is in the way is removed or said."""
        removing = folder.root / "removing"
        if self.overwrite or removing.exists():  # the second: somebody began to, and was killed
            write_whole(removing, b"")
            folder.forget(everything=True)
            discard(self.out)
            (self.out / REJECTS).unlink(missing_ok=True)
            removing.unlink()
            return None
        begun = folder.definition()
        if begun is not None and begun != definition:
            if folder.marks() or (self.out / MANIFEST).exists():
                check_same(begun, definition, self.out)
            folder.forget(everything=True)  # a run that failed at its start: nothing is lost
            begun = None
        if begun is None:
            self._check_free()
        summary = folder.root / "tally.json"
        if not (self.out / MANIFEST).exists() or not summary.exists():
            return None
        folder.forget(everything=False)  # what a kill after the manifest may have left
        tidy(self.out)
        return Tally(**json.loads(summary.read_text()))

    def _check_free(self) -> None:
        """Refuse a place where something else stands, or was left unfinished."""
        if (self.out / MANIFEST).exists() or shards_in(self.out):
            raise ConfigError(
                f"{self.out} holds a store, or parts of one, that were not prepared here: write "
                "somewhere else, or replace it with --overwrite"
            )

    def _check_out(self) -> None:
        """Refuse an output among the documents, which the next run would take for some."""
        out = self.out.resolve()
        for path in self.paths:
            folder = Path(path)
            local = "://" not in os.fspath(path) and folder.is_dir()
            if local and out.is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"{self.out} lies inside {folder}, whose files are the documents: write the "
                    "store somewhere else"
                )

    def _check_room(self, run: Run) -> None:
        """Say now, rather than in some hours, that the disk is too small."""
        if self.config.preprocessing.max_items is not None:
            return  # who knows how much of the input that is
        least = sum(work.size for work in run.missing) // 4  # 2 bytes for 4 characters or more
        free = shutil.disk_usage(self.out).free
        if free < least:
            raise ConfigError(
                f"{self.out} has {free / 1e6:,.0f} MB of disk left, and what is to be done may "
                f"take {least / 1e6:,.0f} MB or more: free some, or write somewhere else"
            )

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
        tally = total_of(marks)
        self._check_rejects(tally, at_the_end=True)
        assert tally.balanced, tally
        if not tally.kept:
            raise DataError(_nothing_kept(tally))
        mark_unfinished(self.out)
        numbers: dict[str, int] = {}
        for mark in marks:
            for domain, names in mark["shards"].items():
                for name in names:
                    number = numbers.get(domain, 0)
                    numbers[domain] = number + 1
                    move(folder.parts / mark["part"] / domain / name, self.out / domain, number)
        for domain in sorted(numbers):
            sync_directory(self.out / domain)
        join(
            [folder.parts / mark["part"] / REJECTS for mark in marks],
            self.out / REJECTS,
            wanted=bool(tally.rejects),
        )
        there, made = len(shards_in(self.out)), sum(numbers.values())
        if there != made:
            raise DataError(
                f"{self.out} holds {there} shards, {made} of which this run made: move the others "
                "away, or start anew with --overwrite"
            )
        write_whole(folder.root / "tally.json", json.dumps(tally.to_dict()).encode())
        metadata = facts | {"recipe": self.config.to_dict()}
        commit(self.out, metadata=metadata, ledger=tally.to_dict())
        folder.forget(everything=False)
        return tally


def tokenizer_facts(
    path: str | os.PathLike[str], *, trust_pickle: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a manifest says of a tokenizer; and all of it that decides what is written."""
    found = define(path, trust_pickle=trust_pickle)
    facts = {
        "tokenizer": content_hash(found.content),
        "tokenizer_name": Path(path).name,
        "vocab_size": found.vocab_size,
        "eos_token_id": found.eos_id,
        "bos_token_id": found.bos_id,
        "pad_token_id": found.pad_id,
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    kind = {name: value for name, value in facts.items() if name != "tokenizer_name"}
    kind["named"] = dict(found.named)
    kind["chat_template"] = blake2b((found.chat_template or "").encode()).hexdigest()[:32]
    return facts, kind


def _once_settled(opening: Opening, used: FileTokenizer, note: Note) -> Note:
    """`note`, once it is known that the tokenizer in use is the one to keep."""

    def guarded(number: int, mark: dict[str, Any]) -> None:
        if opening.settled() is not used:
            raise _DifferentIds
        note(number, mark)

    return guarded


class _DifferentIds(Exception):
    """The fast backend's ids are not the reference's."""


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


def _nothing_kept(tally: Tally) -> str:
    if not tally.documents:
        return "the input holds no documents: nothing but empty files or blank lines"
    gone = {**tally.filtered, **tally.rejected}
    why = ", ".join(f"{rule} {count:,}" for rule, count in sorted(gone.items()))
    return f"not one of {tally.documents:,} documents was kept ({why}): look at the recipe"
