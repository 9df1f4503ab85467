"""One run of a pipeline, from the files to the committed store.

The input is cut into works, and workers, processes of their own, make a part of each. When all
are done, parts are renamed into place in the order of the input and the manifest is written. A run
that was killed is taken up where it was; one that is complete is left alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cache import sync_directory, write_whole
from penstock.errors import ConfigError, DataError, PenstockError
from penstock.prepare.finish import join, move, shards_in
from penstock.prepare.pipeline import COMPLETE
from penstock.prepare.plan import Folder, check_same, definition_of, works_of
from penstock.prepare.pool import Note, Pool
from penstock.prepare.run import Run, total_of
from penstock.prepare.tally import Progress, Tally
from penstock.prepare.worker import Task, check_unchanged
from penstock.store import commit, discard
from penstock.store.manifest import MANIFEST
from penstock.store.workspace import mark_unfinished, tidy
from penstock.text.definition import content_hash
from penstock.text.documents import read_records, units_of
from penstock.text.tokenizer import FileTokenizer, Opening
from penstock.text.tokenizer_files import define

if TYPE_CHECKING:
    from penstock.prepare.pipeline import Pipeline
    from penstock.text.definition import Definition
    from penstock.text.files import InputFile

REJECTS = "rejects.jsonl"
LEAST_FOR_SHARE = 1000  # documents before a share of rejects says anything


class Preparation:
    """What `asked` says, done for the files that were found."""

    def __init__(
        self,
        asked: Pipeline,
        files: Sequence[InputFile],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.config, self.out, self.workers = asked.config, asked.out, asked.workers
        self._asked, self._files, self._progress = asked, files, progress
        backend: Any = asked.backend
        # Read once: workers are given what is found here.
        self._opening = Opening(
            asked.tokenizer_path,
            backend=backend,
            trust_pickle=asked.trust_pickle,
            alone=asked.workers > 0,
        )

    def run(self, pool: Pool) -> Tally:
        """Do what is left to do; gives what became of every document and token."""
        pool.open(self._opening.first)
        folder, (facts, kind) = Folder(self.out), _facts(self._opening.first)
        definition = definition_of(
            self._files,
            recipe=self.config.to_dict(),
            tokenizer=kind,
            policy=self._asked.policy,
        )
        with folder.locked():
            done = self._already(folder, definition)
            if done is not None:
                return done
            folder.begin(definition)
            works = works_of(self._files)
            run = Run(folder, works, self.config.preprocessing.max_items, self.workers)
            self._check_room(run)
            marks = self._done(run, pool)
            for file in self._files:
                check_unchanged(file)
            return self._finish(folder, marks, facts)

    def _done(self, run: Run, pool: Pool) -> list[dict[str, Any]]:
        """All works done, as their marks in order.

        They are begun while the tokenizer's fast backend is still being compared, and again by the
        reference where it turns out to differ: nothing counts until that is settled.
        """
        opening, used = self._opening, self._opening.first
        pool.resize(min(self.workers, len(run.missing)))
        opening.compare([] if self._asked.backend == "reference" else sample_of(self._files))
        task = Task(
            config=self.config,
            files=tuple(self._files),
            policy=self._asked.policy,
            out=self.out,
            now=run.folder.began(),
        )
        while True:
            try:
                pool.begin(task)
                return run.through(pool, _once_settled(opening, used, partial(self._note, run)))
            except (PenstockError, _DifferentIds):
                if opening.settled() is used:
                    raise
            used = opening.settled()
            pool.restart(used)

    def _note(self, run: Run, number: int, mark: dict[str, Any]) -> None:
        """Keep a completion mark, and say how far it is."""
        run.keep(number, mark)
        self._check_rejects(run.tally)
        if self._progress is not None:
            so_far = run.tally
            self._progress(
                Progress(bytes=so_far.bytes, total=run.size, tally=so_far, workers=self.workers)
            )

    # --- before

    def _already(self, folder: Folder, definition: dict[str, Any]) -> Tally | None:
        """The tally of this very run, if it is complete; what is in the way is removed or said."""
        removing = folder.root / "removing"
        # The second where somebody began to, and was killed.
        if self._asked.overwrite or removing.exists():
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
        summary = self.out / COMPLETE
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
        if enough and tally.rejects > self._asked.max_rejects * tally.documents:
            worst = max(tally.rejected, key=lambda rule: tally.rejected[rule])
            share = self._asked.max_rejects
            raise DataError(
                f"{tally.rejects:,} of {tally.documents:,} documents were rejected, most as "
                f"{worst!r}, more than the share of {share:g} that max_rejects allows: look at "
                f"{self.out}/.prepare/parts/*/{REJECTS}, or raise it"
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
        write_whole(self.out / COMPLETE, json.dumps(tally.to_dict()).encode())
        metadata = facts | {"recipe": self.config.to_dict()}
        commit(self.out, metadata=metadata, ledger=tally.to_dict())
        folder.forget(everything=False)
        return tally


def _facts(tokenizer: FileTokenizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the manifest says of the tokenizer; and all of it that decides what is written."""
    named = tokenizer.special_tokens_map
    return facts_of(tokenizer.name, tokenizer.content_hash, tokenizer, named)


def tokenizer_facts(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same of a tokenizer that is not open."""
    found = define(path)
    return facts_of(os.fspath(path), content_hash(found.content), found, found.named)


def facts_of(
    name: str, digest: str, found: FileTokenizer | Definition, named: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is stated of a tokenizer; and what of that decides tokens."""
    stated = {
        "tokenizer": digest,
        "tokenizer_name": Path(name).name,
        "vocab_size": found.vocab_size,
        "eos_token_id": found.eos_id,
        "bos_token_id": found.bos_id,
        "pad_token_id": found.pad_id,
    }
    facts = {key: value for key, value in stated.items() if value is not None}
    kind = {key: value for key, value in facts.items() if key != "tokenizer_name"}
    kind["named"] = dict(named)
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
