"""What a forecast says, as plain data: `to_dict()` is what `penstock plan --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any

from penstock.forecast.makeup import Labels
from penstock.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What one source gives in a stretch of the run."""

    name: str
    samples: int
    share: float  # of all samples of the stretch
    planned: float | None  # the share that its weight asks for; None for the whole run
    tokens: int  # inputs, padding included
    labels: Labels
    epochs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForecast:
    """A stretch with fixed weights, as far as the plan reaches into it."""

    declared: int | None  # the phase's start_step; None where it was begun by hand
    first_step: int
    end_step: int | None  # the first one without a sample of it; None: endless
    begin: int  # positions
    end: int
    lr_scale: float
    sources: tuple[Amount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """A source as a whole, and how often the run goes through it."""

    name: str
    path: str | None
    samples: int  # of an epoch
    tokens: int  # in its store
    cropped: int  # of them, cut off documents by the packing
    unused: int  # of them, left at the ends of files or of a last row
    how: str  # the makeup of an epoch: "exact", or how it was estimated
    epochs_before: float  # gone through before the plan begins, since the start of the run
    epochs_after: float  # and when it ends
    seen: int  # times that its samples are seen, at most, since the start of the run
    repeats: int  # times that it begins to repeat within the plan
    repeats_at: tuple[int, ...]  # the steps of the first hundred of them
    plan_bytes: int
    ledger: dict[str, Any]  # of the run that prepared it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEntry:
    """From `step` on, this global batch."""

    step: int
    position: int
    global_batch: int
    accumulation: int
    tokens_a_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Bytes on disk."""

    stores: int
    plans: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that a rank holds."""

    mapped: int  # of packing plans and offsets, shared by the ranks of a machine
    batch: int  # one batch, as tensors
    group: int  # what is gathered for several batches together
    ahead: int  # asked for ahead of use, at most: pages of the system's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Bytes read in a step, on average, and the rates that follow."""

    step: int  # by all ranks
    rank: int
    pages: int  # by all ranks, in whole pages: what a cold disk has to read, at most
    rate: float | None = None  # bytes a second, by all ranks
    pages_rate: float | None = None
    tokens_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """A source whose `max_epochs` the plan goes past."""

    name: str
    max_epochs: float
    epochs: float
    step: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What each source has given by some steps of a stage, the first and the last among them."""

    steps: tuple[int, ...]
    given: tuple[tuple[int, ...], ...]  # since the start of the run: one a step, of each source


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """What is known of a stream without reading it."""

    dataset: str
    files: int
    units: int
    lanes: int
    documents: int | None  # where the files say
    text_bytes: int  # about
    tokens: int | None  # of an epoch, where `penstock index` has counted it
    epochs: float | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run delivers and needs."""

    run: RunConfig
    until: str  # "steps", or the end of an "epoch"
    first_step: int
    last_step: int | None  # the plan ends before it
    begin: int
    end: int | None
    total: tuple[Amount, ...]
    stages: tuple[StageForecast, ...]
    sources: tuple[SourceFacts, ...]
    schedule: tuple[ScheduleEntry, ...]
    epoch_steps: float | None
    tail_an_epoch: int
    dropped: int
    disk: Disk
    memory: Memory
    reading: Reading | None
    step_time: float | None
    unreached: tuple[int, ...]  # start steps of phases beyond the plan's end
    caps: tuple[Cap, ...]
    course: tuple[Course, ...] = ()  # one a stage
    stream: StreamFacts | None = field(default=None)

    @property
    def steps(self) -> int | None:
        """How many steps the plan is over."""
        return None if self.last_step is None else self.last_step - self.first_step

    @property
    def samples(self) -> int:
        """All that are delivered."""
        return sum(amount.samples for amount in self.total)

    @property
    def tokens(self) -> int:
        """All inputs that are delivered."""
        return sum(amount.tokens for amount in self.total)

    @property
    def labels(self) -> Labels:
        """All labels, by what becomes of them."""
        return summed(self.total)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: each count is exact unless its `how` says otherwise."""
        plain, run = asdict(self), self.run
        del plain["run"], plain["course"]
        plain["run"] = {
            "batch_size": [list(entry) for entry in run.schedule],
            "seq_len": run.seq_len,
            "seed": run.seed,
            "world_size": run.world_size,
            "accumulation": run.accumulation,
        }
        plain["steps"] = self.steps
        plain["samples"], plain["tokens"] = self.samples, self.tokens
        plain["labels"] = asdict(self.labels)
        seconds = None
        if self.step_time is not None and self.steps is not None:
            seconds = self.steps * self.step_time
        plain["seconds"] = seconds
        return plain


def summed(amounts: Sequence[Amount]) -> Labels:
    """The labels of several sources together."""
    return reduce(Labels.__add__, (amount.labels for amount in amounts), Labels())
