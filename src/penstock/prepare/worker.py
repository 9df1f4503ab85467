"""One work: documents read, tokenized, masked, packed and written as the shards of a part.

What a part holds follows from the work and the plan alone, so that it may be made by any process,
at any time, and again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.prepare.config import PipelineConfig
from penstock.prepare.keys import keys_of
from penstock.prepare.masks import MaskBuilder
from penstock.prepare.part import Part
from penstock.prepare.plan import Folder, Work
from penstock.prepare.tally import Tally
from penstock.text.documents import Policy, Records, Texts, read_records, read_texts
from penstock.text.files import InputFile, find_files
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every worker of a run has to know."""

    config: PipelineConfig
    files: tuple[InputFile, ...]
    policy: Policy
    out: Path
    now: datetime  # what templates that write dates are told: when the run was begun


class Worker:
    """A mask builder that is kept from one work to the next."""

    def __init__(self, task: Task, tokenizer: Tokenizer) -> None:
        self.task, self.config = task, task.config
        self.tokenizer = tokenizer
        self.builder = MaskBuilder(task.config, self.tokenizer, now=task.now)
        self.keys = keys_of(task.config, self.builder.keys)
        self.around = 0  # tokens that are put around each text: BOS, EOS
        if self.builder.plain_text is not None:
            nothing = np.empty(0, np.uint32), np.zeros(2, np.int64)
            self.around = len(self.builder.frame(*nothing)[0])

    def run(self, work: Work, limit: int | None = None) -> dict[str, Any]:
        """Do a work, at most `limit` documents of it, and give its completion mark."""
        folder = Folder(self.task.out).parts / f"{work.number:06d}-{secrets.token_hex(4)}"
        folder.mkdir(parents=True)
        part = Part(self, folder, limit)
        try:
            with (folder / "rejects.jsonl").open("w", encoding="utf-8") as rejects:
                for file, found in self._batches(work):
                    part.take(file, found)
                    if part.full:
                        break
                shards = part.close()
                for reject in part.rejects:
                    rejects.write(json.dumps(reject, ensure_ascii=False) + "\n")
        finally:
            part.abort()
        self._check_unchanged(work)
        tally = part.tally + Tally(bytes=work.size)
        assert tally.balanced, tally
        return {"part": folder.name, "shards": shards, "tally": tally.to_dict()}

    def _batches(self, work: Work) -> Iterator[tuple[InputFile, Records | Texts]]:
        """Batches of documents. What is bad in them is left to the part, which knows its limit."""
        field = self.builder.plain_text if self.config.output.domain_key is None else None
        for unit in work.units:
            file = self.task.files[unit.file]
            found: Iterator[Records | Texts]
            if field is not None:
                found = read_texts(file, unit, field, policy="reject")
            else:
                found = read_records(file, unit, policy="reject")
            for batch in found:
                yield file, batch

    def _check_unchanged(self, work: Work) -> None:
        """Refuse what was read of a file while somebody wrote to it."""
        for number in sorted({unit.file for unit in work.units}):
            check_unchanged(self.task.files[number])


def check_unchanged(file: InputFile) -> None:
    """Refuse a file that is not the one that was found when the run was begun."""
    if find_files([file.path])[0].stamp != file.stamp:
        raise DataError(
            f"{file.path} was changed while it was being prepared: let it be finished, and start "
            "anew with --overwrite"
        )
