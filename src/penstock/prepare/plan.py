"""Which work there is, fixed by the input alone; and where a run stands that was interrupted.

    out/.prepare/
      plan.json              inputs, recipe, tokenizer, works: what a run is
      parts/000012-…/        the shards of one work, as a worker leaves them
      done/000012.json       its completion mark, naming the part; written last
      lock                   held by the process that runs

A *work* is a stretch of consecutive units. Its shards depend on its documents
and the plan, on nothing else, so it does not matter who makes them, when, or how often.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.cache import locked, write_whole
from penstock.errors import ConfigError, DataError
from penstock.text.documents import Unit, units_of
from penstock.text.files import InputFile

PLAN_VERSION = 1
LEAST_WORK, MOST_WORK = 1 << 20, 256 << 20  # bytes of input
WORKS = 32  # about as many, where sizes allow: each costs a dozen waits for the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Consecutive units that one worker reads, and about how many bytes they are."""

    number: int
    units: tuple[Unit, ...]
    size: int


def works_of(files: Sequence[InputFile], target: int | None = None) -> list[Work]:
    """All works of an input, in order: some 32 of 1 to 256 MiB, so that the input alone decides."""
    if target is None:
        total = sum(file.size for file in files)
        target = min(max(total // WORKS, LEAST_WORK), MOST_WORK)
    units = units_of(files, target_bytes=target)
    in_file = [0] * len(files)
    for unit in units:
        in_file[unit.file] += 1
    works: list[Work] = []
    waiting: list[Unit] = []
    size = 0
    for unit in units:
        each = files[unit.file].size // in_file[unit.file]
        if waiting and size + each > target:
            works.append(Work(number=len(works), units=tuple(waiting), size=size))
            waiting, size = [], 0
        waiting.append(unit)
        size += each
    if waiting:
        works.append(Work(number=len(works), units=tuple(waiting), size=size))
    return works


def definition_of(files: Sequence[InputFile], **settings: Any) -> dict[str, Any]:
    """All that decides what a run writes, as it is kept in plan.json."""
    plan = {
        "version": PLAN_VERSION,
        "inputs": [asdict(file) for file in files],
        **settings,
    }
    again: dict[str, Any] = json.loads(json.dumps(plan))
    return again


class Folder:
    """`out/.prepare`: what is kept of a run beside its store."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.root = out / ".prepare"
        self.parts, self.done = self.root / "parts", self.root / "done"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For one run at a time; the kernel lets go of the lock when its holder dies."""
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.root / "lock", wait=False))
            except BlockingIOError:
                raise ConfigError(
                    f"another `penstock prepare` is writing to {self.out}: wait for it, or write "
                    "somewhere else"
                ) from None
            yield

    def definition(self) -> dict[str, Any] | None:
        """The plan of the run that was begun here, if there is one."""
        file = self.root / "plan.json"
        if not file.exists():
            return None
        try:
            found = json.loads(file.read_text())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise DataError(f"{file} is damaged: start anew with --overwrite")
        return found

    def begin(self, definition: dict[str, Any]) -> None:
        """Keep the plan, and clear away what no completion mark names."""
        for folder in (self.parts, self.done):
            folder.mkdir(parents=True, exist_ok=True)
        if self.definition() is None:
            write_whole(self.root / "plan.json", json.dumps(definition, indent=1).encode())
            write_whole(self.root / "began", datetime.now(UTC).isoformat().encode())
        named = {mark["part"] for mark in self.marks().values()}
        for part in sorted(self.parts.iterdir()):
            if part.name not in named:
                shutil.rmtree(part, ignore_errors=True)

    def began(self) -> datetime:
        """When the run was begun: what templates that write dates are told, restarted or not."""
        return datetime.fromisoformat((self.root / "began").read_text())

    def marks(self) -> dict[int, dict[str, Any]]:
        """The completion marks, by work."""
        if not self.done.is_dir():
            return {}
        files = sorted(self.done.glob("*.json"))
        return {int(file.stem): json.loads(file.read_text()) for file in files}

    def mark(self, number: int, mark: dict[str, Any]) -> None:
        """Note that a work is complete: from now on it is not done again."""
        write_whole(self.done / f"{number:06d}.json", json.dumps(mark).encode())

    def forget(self, *, everything: bool) -> None:
        """Remove parts and marks; with `everything`, the plan too."""
        for folder in (self.done, self.parts):
            shutil.rmtree(folder, ignore_errors=True)
        if everything:
            (self.root / "plan.json").unlink(missing_ok=True)


def check_same(begun: dict[str, Any], wanted: dict[str, Any], out: Path) -> None:
    """Refuse to go on with a run that was begun with something else, naming what differs."""
    if begun == wanted:
        return
    differing = [name for name in wanted if begun.get(name) != wanted[name]]
    was = {file["path"]: file["stamp"] for file in begun.get("inputs", [])}
    now = {file["path"]: file["stamp"] for file in wanted["inputs"]}
    said = [name for name in differing if name != "inputs"]
    if "inputs" in differing:
        changed = sorted(path for path in was.keys() & now.keys() if was[path] != now[path])
        said += [f"{path} (changed)" for path in changed]
        said += [f"{path} (new)" for path in sorted(now.keys() - was.keys())]
        said += [f"{path} (gone)" for path in sorted(was.keys() - now.keys())]
        said = said or ["the order of the inputs"]
    more = f" and {len(said) - 5} more" if len(said) > 5 else ""
    raise ConfigError(
        f"{out} was prepared from something else: {', '.join(said[:5])}{more}. Write somewhere "
        "else, or start anew with --overwrite"
    )
