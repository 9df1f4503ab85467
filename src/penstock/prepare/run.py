"""The works of a run, done in order or as they come, and their completion marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import PenstockError
from penstock.prepare.plan import Folder, Work
from penstock.prepare.pool import Answer, Note, Pool
from penstock.prepare.tally import Tally


def total_of(marks: Iterable[dict[str, Any]]) -> Tally:
    """What completion marks come to."""
    return sum((Tally(**mark["tally"]) for mark in marks), start=Tally())


class Run:
    """The works of a run and their marks; `most` is how many documents may be kept."""

    def __init__(
        self, folder: Folder, works: Sequence[Work], most: int | None, workers: int
    ) -> None:
        self.folder, self.works = folder, works
        self.marks = folder.marks()
        self.tally = total_of(self.marks.values())
        self.size = sum(work.size for work in works)
        self._most, self._step = most, max(workers, 1)

    @property
    def missing(self) -> list[Work]:
        """Works without a completion mark."""
        return [work for work in self.works if work.number not in self.marks]

    def keep(self, number: int, mark: dict[str, Any]) -> None:
        """Keep a completion mark: a work's first, or one in place of it."""
        again = number in self.marks
        self.folder.mark(number, mark)
        self.marks[number] = mark
        if again:
            self.tally = total_of(self.marks.values())
        else:
            self.tally += Tally(**mark["tally"])

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
            answers = self._tried(pool, group, most - kept)
            for work in group:
                answer = answers.get(work.number, self.marks.get(work.number, {}))
                # An error, or a document, may lie past the last one wanted: see without it.
                if isinstance(answer, PenstockError) or kept + answer["tally"]["kept"] > most:
                    pool.run([work], note, limit=most - kept)
                elif work.number not in self.marks:
                    note(work.number, answer)
                chosen.append(self.marks[work.number])
                kept += chosen[-1]["tally"]["kept"]
                if kept >= most:
                    return chosen
        return chosen

    def _tried(self, pool: Pool, group: Sequence[Work], limit: int) -> dict[int, Answer]:
        """How each work of a group ended that has no mark yet."""
        answers: dict[int, Answer] = {}

        def told(work: Work, answer: Answer) -> None:
            answers[work.number] = answer

        pool.tried([work for work in group if work.number not in self.marks], told, limit)
        return answers
