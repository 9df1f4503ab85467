"""The loader: a cursor over a plan, and the loop that turns positions into batches."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

import torch

from penstock.batch import IGNORED, Place, Sample, place_of, to_place
from penstock.checks import at_least
from penstock.config import DataConfig
from penstock.dataset.base import Gathered, SampleDataset
from penstock.dataset.mixture import MixtureDataset, identity_of
from penstock.errors import ConfigError, StateMismatch
from penstock.loader.ahead import Job, ReadAhead
from penstock.loader.fetch import Collate, Fetch, Fetched, in_workers, name_sample
from penstock.loader.jobs import jobs
from penstock.loader.setup import (
    BatchSize,
    Workers,
    batch_schedule,
    checked_sampler,
    in_process,
    run_plan,
)
from penstock.loader.state import (
    VERSION,
    Address,
    Documented,
    check_ranks,
    read_state,
    stages_to_state,
)
from penstock.order import ORDER_VERSION, Plan, Segment, Stage
from penstock.order.hashing import key_of
from penstock.order.identity import check_identity
from penstock.order.plan import Tail
from penstock.sampler import AnySampler, MixtureSampler

_TOKEN_KEYS = ("chosen", "rejected", "prompts", "responses")


class StatefulDataLoader:
    """Batches of a map-style dataset in a sampler's order, resumable at any of them.

    `batch_size` is this rank's, or a schedule of them: [(0, 8), (1000, 16)] means 16 from step
    1,000 on. A *step* is `accumulation` batches on every rank. Of `config`, `num_workers`,
    `prefetch_factor` and `pin_memory` are used.

    Datasets with `take` (all of Penstock's) make batches in the calling thread, and `num_workers`
    threads read ahead of it, `prefetch_factor` groups of batches each; for any other
    dataset `num_workers` are torch's worker processes. `workers` = "thread" or "process" decides
    otherwise. With `device`, tokens travel there as narrow as they are stored and widen there.

    Over a stream of passes (`StreamingHuggingFaceDataset`), which needs no sampler, an `iter` is
    one pass; a batch at its end is filled from the next.
    """

    def __new__(cls, dataset: Any, *_: Any, **__: Any) -> StatefulDataLoader:
        """A loader of streams, where the dataset is one."""
        streams = sys.modules.get("penstock.stream.passes")  # without it, nothing is one
        if cls is StatefulDataLoader and streams and isinstance(dataset, streams.PassStream):
            from penstock.loader.streaming import StreamLoader  # noqa: PLC0415 - a subclass

            cls = StreamLoader  # noqa: PLW0642
        return super().__new__(cls)

    def __init__(
        self,
        dataset: Any,
        batch_size: BatchSize,
        sampler: AnySampler | None = None,
        config: DataConfig | None = None,
        *,
        accumulation: int = 1,
        device: str | torch.device | None = None,
        workers: Workers = "auto",
        collate_fn: Collate | None = None,
        tail: Literal["drop", "pad"] = "drop",
        stages: Sequence[Stage] = (),
        fingerprint: str | None = None,
        check_every: int = 0,
    ) -> None:
        self.config = config or DataConfig()
        self.dataset = dataset
        self.sampler = checked_sampler(sampler, dataset)
        self._schedule = batch_schedule(batch_size)
        self._accumulation = at_least(1, accumulation, "accumulation")
        if tail not in ("drop", "pad"):
            raise ConfigError(f"tail is 'drop' or 'pad', not {tail!r}")
        self._tail: Tail = "endless" if isinstance(self.sampler, MixtureSampler) else tail
        self._place, self._pin = place_of(device, self.config.pin_memory)
        self._fetch = Fetch(dataset, collate_fn)
        self._in_process = in_process(workers, dataset, self.config.num_workers, collate_fn)
        own = isinstance(dataset, SampleDataset) and collate_fn is None
        self._grouped = own and self._in_process
        if own and self.sampler.shuffle:
            dataset.expect_random()
        self._stages: tuple[Stage, ...] = tuple(stages)
        self._phases = [stage.start_step for stage in stages if stage.start_step]
        self._fingerprint = fingerprint
        self._check_every = check_every
        self._version = 0
        self._under_way: list[int] = []  # the epochs of iterators that have begun and not ended
        self._last: int | None = None  # where the batch last delivered started
        self._goes_on = False  # whether the next `iter` is one that a loaded state was saved in
        self._plan = self._planned([], self.sampler.position)
        self._position = self._settled(self.sampler.position)
        self._reset_stats()

    # --- where we are

    @property
    def position(self) -> int:
        """The first position of the next batch, on the run's one axis."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._plan.epoch(self._position)

    _epoch = epoch

    @property
    def step(self) -> int:
        """The step that the next batch belongs to, counted from the start of the run."""
        return self._plan.step_at(self._position)

    @property
    def lr_scale(self) -> float:
        """The phase's learning-rate scale, for the batch last delivered or else the first."""
        at = self._position if self._last is None else self._last
        steps = [s.start_step for s in self._declared() if s.position <= at and s.start_step]
        return self.config.lr_scale(steps[-1] if steps else 0)

    @property
    def plan(self) -> Plan:
        """Which positions each batch of the run holds, past and to come."""
        return self._plan

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages declared or begun so far."""
        return self._declared()

    def __len__(self) -> int:
        """Batches in the current epoch, from its start."""
        return self._plan.epoch_batches(self._position)

    # --- batches

    def __iter__(self) -> Iterator[Sample]:
        """One epoch from the current position on; in mid-epoch, the rest of it."""
        if not self._goes_on:
            stages = self._declared()
            self.sampler.start(self._position)
            self._version += self._declared() != stages
        self._goes_on = False
        return self._run(self.epoch)

    def _run(self, epoch: int) -> Iterator[Any]:
        self._under_way.append(epoch)
        try:
            while self.epoch == epoch:
                version = self._version
                make = self._make_here if self._in_process else self._make_in_workers
                with closing(make(self._jobs(epoch))) as batches:
                    asked = time.perf_counter()
                    for at, batch in batches:
                        if self._version != version or at != self._position:
                            break  # another state was loaded: go on from there
                        delivered = self._deliver(at, batch, time.perf_counter() - asked)
                        del batch
                        yield delivered
                        del delivered  # its memory, still in the cache, serves the next one
                        asked = time.perf_counter()
        finally:
            self._under_way.remove(epoch)

    def _jobs(self, epoch: int) -> Generator[Job]:
        return jobs(
            self._plan,
            self.sampler,
            self.dataset,
            self._position,
            epoch,
            grouped=self._grouped,
        )

    def _make_here(self, jobs: Generator[Job]) -> Generator[tuple[int, Any]]:
        threads = self.config.num_workers if self._grouped else 0
        with ReadAhead(self.dataset, threads, threads * self.config.prefetch_factor) as ahead:
            for job in ahead.walk(jobs):
                rows = len(job.indices) // job.batches
                try:
                    start = time.perf_counter()
                    gathered = self._gather(job)
                    ahead.gathered(job, time.perf_counter() - start)
                    for k in range(job.batches):
                        position = job.position + k * rows * self.sampler.num_replicas
                        yield position, gathered.batch(k * rows, (k + 1) * rows, self._place)
                except Exception as error:
                    if self._grouped:
                        name_sample(error, self.dataset, job.indices)
                    error.add_note(f"raised by the batches from position {job.position} on")
                    raise

    def _gather(self, job: Job) -> Gathered:
        if self._grouped:
            gathered: Gathered = self.dataset.gather(job.indices)
            return gathered
        return Fetched(self._fetch, job.indices)

    def _make_in_workers(self, jobs: Generator[Job]) -> Generator[tuple[int, Any]]:
        made = in_workers(
            self._fetch,
            jobs,
            workers=self.config.num_workers,
            prefetch=self.config.prefetch_factor,
            seed=key_of("workers", self.sampler.seed, self._position) >> 1,
        )
        with closing(made):
            for job, batch in made:
                yield job.position, batch if self._place is None else to_place(batch, self._place)

    def _deliver(self, at: int, batch: Any, waited: float) -> Any:
        """The batch as the trainer gets it; from here on it counts as delivered."""
        if self._tail == "pad":
            self._mask_padding(at, batch)
        if self._pin:
            batch = to_place(batch, Place(torch.device("cpu"), pin=True))
        self._last, self._position = at, self._plan.following(at)
        self._waited += waited
        self._batches += 1
        if isinstance(batch, Mapping):
            self._tokens += _tokens_in(batch)
        if self._check_every:
            step = self.step
            if step != self._plan.step_at(at) and step % self._check_every == 0:
                self.check_ranks()
        return batch

    def _mask_padding(self, at: int, batch: Any) -> None:
        rank, world = self.sampler.rank, self.sampler.num_replicas
        left = (self._plan.epoch(at) + 1) * self._plan.n - at
        real = len(range(rank, min(left, self._plan.segment(at).size), world))
        if real == self._plan.segment(at).size // world:
            return
        labels = [k for k in ("labels", "target_ids") if isinstance(batch, dict) and k in batch]
        if not labels:
            raise ConfigError("the last batch can only be padded where samples have labels to mask")
        batch[labels[0]][real:] = IGNORED
        if "loss_mask" in batch:
            batch["loss_mask"][real:] = 0

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """The address of the batch last delivered: `epoch`, `batches_yielded`, `sampler`, more."""
        segment = self._plan.segment(self._position)
        offset = self._position - self.epoch * self._plan.n
        own = self.sampler.state_dict()
        state = {
            "version": VERSION,
            "epoch": self.epoch,
            "batches_yielded": offset // segment.size,
            "sampler": {"epoch": self.epoch}
            | {k: own[k] for k in ("seed", "num_replicas", "rank")},
            "position": self._position,
            "step": self.step,
            "segments": [
                [each.position, each.size, each.accumulation]
                for each in self._plan.segments
                if each.position < self._position
            ],
            "stages": stages_to_state(self._declared()),
            "identity": self.identity(),
        }
        if own.get("pending"):
            state["pending"] = own["pending"]
            state["under_way"] = self._goes_on or self.epoch in self._under_way
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch at which `state` was taken, at any world size and batch size.

        A state with only the documented keys loads too, with a warning: its place is counted in
        batches of this loader's size.
        """
        found = read_state(state)
        if isinstance(found, Documented):
            found = self._addressed(found)
        else:
            check_identity(found.identity, self.identity())
        plan = self._planned(found.segments, found.position)
        self._load_stages(found)
        self._plan = plan
        self._position = self._settled(found.position)
        self.sampler.set_epoch(self.epoch)
        self._goes_on = found.under_way
        self._version += 1
        self._reset_stats()

    def _addressed(self, state: Documented) -> Address:
        """The documented keys as an address in this run."""
        world = state.num_replicas or self.sampler.num_replicas
        if state.seed is not None:
            check_identity({"sampler.seed": state.seed}, {"sampler.seed": self.sampler.seed})
        size = self._schedule[0][1] * world
        warnings.warn(
            "this state has no position, only the documented keys: its batches are taken to be of "
            f"{self._schedule[0][1]} samples on {world} ranks, and its data is not checked",
            stacklevel=3,
        )
        return Address(
            position=state.epoch * self._plan.n + state.batches_yielded * size,
            segments=(Segment(0, size, self._accumulation),),
            stages=self._declared(),
        )

    def _load_stages(self, state: Address) -> None:
        if isinstance(self.sampler, MixtureSampler):
            if not state.stages:
                raise StateMismatch("this state has no stages, and that of a mixture has them")
            stages = stages_to_state(state.stages)
            self.sampler.load_state_dict(
                {"epoch": self.epoch, "stages": stages, "pending": state.pending}
            )
        else:
            self._stages = state.stages

    def _declared(self) -> tuple[Stage, ...]:
        return self.sampler.stages if isinstance(self.sampler, MixtureSampler) else self._stages

    def _settled(self, position: int) -> int:
        """Where the next batch starts, seen from `position`."""
        return self._plan.settle(position, self._plan.segment(position).size)

    def _planned(self, lived: Sequence[Segment], position: int) -> Plan:
        return run_plan(
            self.sampler.order.n,
            self._schedule,
            world=self.sampler.num_replicas,
            accumulation=self._accumulation,
            tail=self._tail,
            lived=lived,
            position=position,
        )

    def identity(self) -> dict[str, Any]:
        """What decides the batches besides the position: data, windows, order, seed."""
        return (
            identity_of(self.dataset, self._fingerprint)
            | self.sampler.identity()
            | ({"phases": self._phases} if self._phases else {})
            | {"order": ORDER_VERSION}
        )

    # --- reports

    def check_ranks(self) -> None:
        """Refuse to go on where ranks have gone apart. A collective: call it on every rank."""
        stages = stages_to_state(self._declared())
        check_ranks(self._position, self.identity() | {"stages": stages})

    def stats(self) -> dict[str, Any]:
        """What was delivered since this loader was built or its state loaded.

        Batches, tokens, speed and waiting are this rank's; `samples_by_source` is of all ranks.
        """
        seconds = time.perf_counter() - self._since
        stats: dict[str, Any] = {
            "batches": self._batches,
            "tokens": self._tokens,
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds if seconds else 0.0,
            "waited_seconds": self._waited,
        }
        if isinstance(self.sampler, MixtureSampler):
            order = self.sampler.order
            given = order.counts(self._position) - order.counts(self._began)
            named = isinstance(self.dataset, MixtureDataset)
            names = self.dataset.dataset_names if named else order.names
            stats["samples_by_source"] = dict(zip(names, given.tolist(), strict=True))
        return stats

    def _reset_stats(self) -> None:
        self._since = time.perf_counter()
        self._began = self._position
        self._last = None
        self._batches = self._tokens = 0
        self._waited = 0.0


def _tokens_in(batch: Mapping[str, Any]) -> int:
    if "input_ids" in batch:
        return _numel(batch["input_ids"])
    return sum(_numel(batch[key]) for key in _TOKEN_KEYS if key in batch)


def _numel(value: Any) -> int:
    return sum(map(_numel, value)) if isinstance(value, list) else int(value.numel())
