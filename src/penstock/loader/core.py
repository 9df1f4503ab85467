"""The loader: a cursor over a plan, and the loop that turns positions into batches."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Literal

import torch

from penstock.batch import Place, Sample, place_of, to_place
from penstock.checks import at_least
from penstock.config import DataConfig
from penstock.dataset.base import Gathered, SampleDataset
from penstock.dataset.excluded import excluded_in, excluding
from penstock.dataset.mixture import MixtureDataset, identity_of
from penstock.errors import ConfigError
from penstock.loader.ahead import Job, ReadAhead
from penstock.loader.delivery import mask_padding, tokens_in
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
    Address,
    Documented,
    Surgery,
    check_ranks,
    read_state,
    stages_to_state,
    state_of,
)
from penstock.loader.surgery import Allow, continued
from penstock.order import ORDER_VERSION, Plan, Segment, Stage
from penstock.order.hashing import key_of
from penstock.order.identity import check_identity
from penstock.order.plan import Tail
from penstock.sampler import AnySampler, MixtureSampler


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
        self._collate = collate_fn
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
        self._surgery = Surgery()
        self._read_from(dataset)
        self._plan = self._planned([], self.sampler.position)
        self._position = self._settled(self.sampler.position)
        self._reset_stats()

    def _read_from(self, view: Any) -> None:
        """Have batches made from this view of the dataset."""
        self._view, self._fetch = view, Fetch(view, self._collate)

    # --- where we are

    @property
    def plan(self) -> Plan:
        """Positions as batches and steps; which of them are left out."""
        return self._plan

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
        with ReadAhead(self._view, threads, threads * self.config.prefetch_factor) as ahead:
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
                        name_sample(error, self._view, job.indices)
                    error.add_note(f"raised by the batches from position {job.position} on")
                    raise

    def _gather(self, job: Job) -> Gathered:
        if self._grouped:
            gathered: Gathered = self._view.gather(job.indices)
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
            rank, world = self.sampler.rank, self.sampler.num_replicas
            mask_padding(self._plan, at, batch, rank=rank, world=world)
        if self._pin:
            batch = to_place(batch, Place(torch.device("cpu"), pin=True))
        self._last, self._position = at, self._plan.following(at)
        self._waited += waited
        self._batches += 1
        self._tokens += tokens_in(batch)
        if self._check_every:
            step = self.step
            if step != self._plan.step_at(at) and step % self._check_every == 0:
                self.check_ranks()
        return batch

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """The address of the batch last delivered: `epoch`, `batches_yielded`, `sampler`, more."""
        own = self.sampler.state_dict()
        address = Address(
            position=self._position,
            segments=tuple(s for s in self._plan.segments if s.position < self._position),
            stages=self._declared(),
            sources=self._sources(),
            identity=self._identity(),
            pending=own.get("pending"),
            under_way=self._goes_on or self.epoch in self._under_way,
            surgery=self._surgery,
            tail=self._tail,
        )
        local = {key: own[key] for key in ("seed", "num_replicas", "rank")}
        return state_of(address, self._plan, local)

    def load_state_dict(self, state: dict[str, Any], *, allow: Allow = None) -> None:
        """Go on after the batch at which `state` was taken, at any world size and batch size.

        With `allow="mixture"` sources may have been added, removed or given other weights, which
        holds from here on. A state with only the documented keys loads too, with a warning: its
        place is counted in batches of this loader's size.
        """
        found = read_state(state)
        documented = isinstance(found, Documented)
        if isinstance(found, Documented):
            found = self._addressed(found)
        plan = self._planned(found.segments, found.position, found.surgery.skipped)
        if not documented:
            found = continued(found, self._identity(), plan.position_of, allow=allow)
        view = self.dataset_at(found.position, found.surgery)
        self._load_stages(found)
        self._plan, self._surgery = plan, found.surgery
        self._read_from(view)
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
            sources=self._sources(),
            surgery=Surgery(retired=self._surgery.retired),
        )

    def _load_stages(self, state: Address) -> None:
        if isinstance(self.sampler, MixtureSampler):
            stages = stages_to_state(state.stages)
            sizes = {name: gone.get("samples", 0) for name, gone in state.surgery.retired.items()}
            sources = {name: sizes.get(name, 0) for name in state.sources}
            own = list(sources) == self.sampler.names  # whose sizes the sampler knows
            self.sampler.load_state_dict(
                {"epoch": self.epoch, "stages": stages, "pending": state.pending}
                | ({} if own else {"sources": sources})
            )
        else:
            self._stages = state.stages

    def _sources(self) -> tuple[str, ...]:
        return self.sampler.order.names if isinstance(self.sampler, MixtureSampler) else ()

    def _declared(self) -> tuple[Stage, ...]:
        return self.sampler.stages if isinstance(self.sampler, MixtureSampler) else self._stages

    def _settled(self, position: int) -> int:
        """Where the next batch starts, seen from `position`."""
        return self._plan.settle(position, self._plan.segment(position).size)

    def _planned(
        self, lived: Sequence[Segment], position: int, skipped: Sequence[tuple[int, int]] = ()
    ) -> Plan:
        return run_plan(
            self.sampler.order.n,
            self._schedule,
            world=self.sampler.num_replicas,
            accumulation=self._accumulation,
            tail=self._tail,
            lived=lived,
            position=position,
            skipped=skipped,
        )

    def dataset_at(self, position: int, surgery: Surgery | None = None) -> Any:
        """The dataset as batches at a position are made from it: without excluded documents."""
        documents = (surgery or self._surgery).excluded_at(position)
        return excluding(self.dataset, documents)

    def identity(self) -> dict[str, Any]:
        """What decides the batches besides the position: data, windows, order, seed, exclusions."""
        return self._identity() | self._surgery.excluded_state()

    def _identity(self) -> dict[str, Any]:
        return (
            identity_of(self.dataset, self._fingerprint)
            | self.sampler.identity()
            | ({"phases": self._phases} if self._phases else {})
            | {"order": ORDER_VERSION}
        )

    # --- reports

    def check_ranks(self) -> None:
        """Refuse to go on where ranks have gone apart. A collective: call it on every rank."""
        state = self.state_dict()
        lived = {k: state.get(k) for k in ("stages", "sources", "skipped")}
        check_ranks(self._position, self.identity() | lived)

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
            given = self.sampler.own(order.given(self._plan.kept(self._began, self._position)))
            named = isinstance(self.dataset, MixtureDataset)
            names = self.dataset.dataset_names if named else self.sampler.names
            stats["samples_by_source"] = dict(zip(names, given, strict=True))
        if self._surgery.excluded:
            stats["excluded"] = excluded_in(self._view)
        return stats

    def _reset_stats(self) -> None:
        self._since = time.perf_counter()
        self._began = self._position
        self._last = None
        self._batches = self._tokens = 0
        self._waited = 0.0
