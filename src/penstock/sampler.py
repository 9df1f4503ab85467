"""The samplers people know, each a thin face of `order/`: indices by arithmetic, nothing stored.

    >>> list(DistributedSampler(range(10), num_replicas=2, rank=1, shuffle=False))
    [1, 3, 5, 7, 9]

Iterating computes up to 4,096 indices at a time, so a sampler over 10^12 samples starts at once. A
`StatefulDataLoader` does not iterate its sampler: it takes `order`, `rank` and `num_replicas`
from it and keeps the position itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from penstock.checks import whole
from penstock.errors import ConfigError, StateMismatch
from penstock.order import (
    EpochOrder,
    MixtureOrder,
    Stage,
    check_weights,
    quantise,
    rest_of_epoch,
    shares,
)
from penstock.order.weights import TOTAL
from penstock.ranks import rank_and_world

CHUNK = 4096
FIRST_CHUNK = 16  # each of a mixture's places may need a block of its own, where ranks are many

Order = EpochOrder | MixtureOrder  # what a loader reads from a sampler: position to sample


def _epoch(epoch: int) -> int:
    if whole(epoch, "an epoch") < 0:
        raise ConfigError(f"epochs are counted from 0, and {epoch} is none")
    return index(epoch)


class _EpochSampler(Sampler[int]):
    """What the two samplers of one epoch share: epoch, skip, and this rank's part."""

    def __init__(
        self, num_replicas: int | None, rank: int | None, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.rank, self.num_replicas = rank_and_world(rank, num_replicas)
        self.shuffle, self.seed, self.drop_last = shuffle, index(seed), drop_last
        self._epoch = 0
        self._skip = 0

    @property
    def order(self) -> Order:
        raise AssertionError("each sampler has its own order")

    @property
    def position(self) -> int:
        """Where the next `__iter__` starts on the run's axis."""
        return self._epoch * self.order.n + self._skip * self.num_replicas

    @property
    def num_samples(self) -> int:
        """How many indices a full `__iter__` gives, the same on every rank."""
        return _part(self, 0)[2]

    def start(self, position: int) -> None:
        """Begin an iteration at `position`: what waited for the next `__iter__` happens here."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `__iter__` gives."""
        self._epoch = _epoch(epoch)

    def set_skip(self, skip: int) -> None:
        """Leave out this rank's first `skip` samples, in the next `__iter__` only."""
        if whole(skip, "a skip") < 0:
            raise ConfigError(f"set_skip takes a number of samples >= 0, not {skip}")
        self._skip = index(skip)

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        offset, self._skip = self._skip * self.num_replicas, 0
        start = self._epoch * self.order.n
        self.start(start + offset)
        return _walk(self.order, start, *_part(self, offset))

    def identity(self) -> dict[str, Any]:
        """What decides the order, for checkpoints."""
        return {"seed": self.seed, "shuffle": self.shuffle}

    def state_dict(self) -> dict[str, Any]:
        """Keys: `epoch`, `seed`, `num_replicas`, `rank`."""
        return _documented(self, self._epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `epoch`; the rest is this process's own."""
        self.set_epoch(state.get("epoch", 0))


class DistributedSampler(_EpochSampler):
    """Each rank's part of a dataset, shuffled anew each epoch.

    >>> sampler = DistributedSampler(range(100), num_replicas=4, rank=0)
    >>> sampler.set_skip(20)
    >>> len(list(sampler)), len(list(sampler))      # a skip holds for one iteration
    (5, 25)
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        super().__init__(num_replicas, rank, shuffle, seed, drop_last)
        self.dataset = dataset

    @property
    def order(self) -> EpochOrder:
        """Position to sample."""
        return EpochOrder(len(self.dataset), self.seed, self.shuffle)


class MixtureSampler(_EpochSampler):
    """Samples of several datasets laid end to end, by weight.

    >>> sampler = MixtureSampler([0, 4096, 8192], [3, 1], num_replicas=1, rank=0)
    >>> sum(i < 4096 for i in sampler)              # of 8,192: half of them a second time
    6144

    Counts are exact at every multiple of 4,096 samples, and shuffled in between. An epoch is as
    many samples as there are. Its draws go on where the last epoch's ended, so a sample comes again
    only when its dataset has been used up. A dataset without samples gives none, whatever its
    weight. Without `shuffle`, each dataset's samples come in their order, evenly spread.
    """

    def __init__(
        self,
        cumulative_sizes: Sequence[int],
        weights: Sequence[float],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        temperature: float = 1.0,
        *,
        names: Sequence[str] | None = None,
        stages: Sequence[Stage] | None = None,
    ) -> None:
        super().__init__(num_replicas, rank, shuffle, seed, drop_last)
        bounds = [index(bound) for bound in cumulative_sizes]
        if bounds[:1] != [0] or bounds != sorted(bounds):
            raise ConfigError(f"cumulative_sizes start at 0 and never fall, unlike {bounds}")
        self._sizes = [b - a for a, b in pairwise(bounds)]
        self._names = [str(i) for i in range(len(self._sizes))] if names is None else list(names)
        if stages is None:
            integers = self._quantise(weights, temperature, "MixtureSampler(weights=...)")
            stages = [Stage(0, integers)]
        self._order = self._ordered(stages, {})
        self._pending: tuple[int, ...] | None = None  # over the order's sources
        self._declared = [[stage.start_step, list(stage.weights)] for stage in stages]

    @property
    def order(self) -> MixtureOrder:
        """Position to sample."""
        return self._order

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages declared or begun so far."""
        return self._order.stages

    @property
    def names(self) -> list[str]:
        """What this sampler's datasets are called."""
        return list(self._names)

    @property
    def _probs(self) -> list[float]:
        """The weights in force at the next `__iter__`, as shares of 1."""
        begun = [stage.weights for stage in self.stages if stage.position <= self.position]
        return [weight / TOTAL for weight in self.own(self._pending or begun[-1])]

    def own(self, values: Sequence[int]) -> list[int]:
        """Of one value for each of the order's sources, those of this sampler's datasets."""
        of = dict(zip(self._order.names, values, strict=True))
        return [of[name] for name in self._names]

    def update_weights(self, weights: Sequence[float], temperature: float = 1.0) -> None:
        """Begin a stage with these weights at the next `__iter__`."""
        integers = self._quantise(weights, temperature, "MixtureSampler.update_weights")
        of = dict(zip(self._names, integers, strict=True))
        self._pending = tuple(of.get(name, 0) for name in self._order.names)

    def start(self, position: int) -> None:
        """Begin the stage that `update_weights` asked for, at `position`."""
        if self._pending is not None:
            self._order = self._order.with_stage(Stage(position, self._pending))
            self._pending = None

    def _ordered(self, stages: Sequence[Stage], history: Mapping[str, int]) -> MixtureOrder:
        """The order of these stages.

        Where datasets were added or removed on the way, `history` has the name and size of each
        that there ever was, in the order of the stages' weights.
        """
        sizes, names, first = self._sizes, self._names, None
        if history:
            own = dict(zip(names, sizes, strict=True))
            begin = dict(zip(names, accumulate([0, *sizes]), strict=False))
            names = list(history)
            sizes = [own.get(name, history[name]) for name in names]
            first = [begin.get(name) for name in names]
        return MixtureOrder(
            sizes, names, seed=self.seed, stages=stages, shuffle=self.shuffle, first=first
        )

    def _quantise(self, weights: Sequence[float], temperature: float, what: str) -> tuple[int, ...]:
        if len(weights) != len(self._sizes):
            raise ConfigError(
                f"{what}: Expected {len(self._sizes)} weights, one for each dataset, "
                f"got {len(weights) or 'an empty list'}"
            )
        check_weights(weights, what)
        scaled = shares(weights, temperature)
        there = [w if size else 0.0 for w, size in zip(scaled, self._sizes, strict=True)]
        if any(self._sizes) and not any(there):
            raise ConfigError(f"all weight is on datasets without samples: sizes {self._sizes}")
        return quantise(there if any(there) else scaled)

    def identity(self) -> dict[str, Any]:
        """Seed, and the sources and weights this sampler was built with, in their order."""
        return super().identity() | {"mixture": {"names": self._names, "weights": self._declared}}

    def state_dict(self) -> dict[str, Any]:
        """The documented keys, the stages, and weights that wait for the next `__iter__`.

        Where datasets were added or removed, also `sources`: the size of each, by name, in the
        order of the stages' weights.
        """
        order = self._order
        sources = dict(zip(order.names, order.sizes.tolist(), strict=True))
        return (
            super().state_dict()
            | {
                "stages": [[s.position, list(s.weights), s.start_step] for s in self.stages],
                "pending": list(self._pending) if self._pending else None,
            }
            | ({"sources": sources} if order.first is not None else {})
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `epoch` and, where the state has them, the stages."""
        if state.get("stages"):
            try:
                stages = [Stage(at, tuple(weights), step) for at, weights, step in state["stages"]]
            except (TypeError, ValueError) as error:
                raise StateMismatch(
                    f"this is no state of a MixtureSampler: its stages are {state['stages']!r}, "
                    "where [[position, weights, step], ...] was expected"
                ) from error
            sources = state.get("sources") or {}
            known = len(sources) or len(self._sizes)
            if len(stages[0].weights) != known or (
                sources and not set(self._names) <= set(sources)
            ):
                raise StateMismatch(
                    f"the state's mixture has {len(stages[0].weights)} datasets, "
                    f"this one has {len(self._sizes)}: build the sampler over the same datasets"
                )
            self._order = self._ordered(stages, sources)
            self._pending = tuple(state["pending"]) if state.get("pending") else None
        super().load_state_dict(state)


class ResumableDistributedSampler(Sampler[int]):
    """A sampler that knows where it is: `epoch` and `iter` (this rank's samples) are live.

    >>> sampler = ResumableDistributedSampler(range(10), start_iter=7, shuffle=False)
    >>> list(sampler), sampler.epoch
    ([7, 8, 9], 1)

    They say which sample comes next: with the last sample of an epoch they are (epoch + 1, 0), so
    that whatever was saved at any moment goes on from there.
    """

    def __init__(
        self,
        data_source: Sized,
        start_epoch: int = 0,
        start_iter: int = 0,
        seed: int = 42,
        drop_last: bool = False,
        shuffle: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if process_group is None:
            self.rank, self.num_replicas = rank_and_world()
        else:
            self.rank = dist.get_rank(process_group)
            self.num_replicas = dist.get_world_size(process_group)
            if self.rank < 0:
                raise ConfigError("this process is no member of the process_group given")
        self.data_source = data_source
        self.seed, self.drop_last, self.shuffle = index(seed), drop_last, shuffle
        self._begin(_epoch(start_epoch))
        self.iter = index(start_iter) % max(self.num_samples_per_replica, 1)

    @property
    def order(self) -> EpochOrder:
        """Position to sample."""
        return EpochOrder(len(self.data_source), self.seed, self.shuffle)

    @property
    def num_samples_per_replica(self) -> int:
        """This rank's samples in a whole epoch, the same on every rank."""
        return _part(self, 0)[2]

    @property
    def position(self) -> int:
        """Where the ranks' next samples begin on the run's axis."""
        return self.epoch * self.order.n + self._offset

    @property
    def _offset(self) -> int:
        return self.iter * self.num_replicas + self._between

    def start(self, position: int) -> None:
        """Nothing waits for an iteration to begin."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; going to the one it is in changes nothing."""
        if epoch != self.epoch:
            self._begin(_epoch(epoch))

    def _begin(self, epoch: int) -> None:
        self.epoch, self.iter = epoch, 0
        self._between = 0  # samples given past iter * num_replicas, after a change of num_replicas

    def __len__(self) -> int:
        return _part(self, self._offset)[2]

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch."""
        first, stride, left = _part(self, self._offset)
        if not left:
            self._begin(self.epoch + 1)
        for sample in _walk(self.order, self.epoch * self.order.n, first, stride, left):
            self.iter, left = self.iter + 1, left - 1
            if not left:
                self._begin(self.epoch + 1)
            yield sample

    def identity(self) -> dict[str, Any]:
        """What decides the order, for checkpoints."""
        return {"seed": self.seed, "shuffle": self.shuffle}

    def state_dict(self) -> dict[str, Any]:
        """The documented keys, `iter`, and `offset`: what all ranks were given of the epoch."""
        return _documented(self, self.epoch) | {"iter": self.iter, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken; at another number of ranks, at the same global place."""
        self._begin(_epoch(state.get("epoch", 0)))
        world = state.get("num_replicas", self.num_replicas)
        offset = index(state.get("offset", state.get("iter", 0) * world))
        self.iter, self._between = divmod(offset, self.num_replicas)
        if offset and not len(self):
            self._begin(self.epoch + 1)


AnySampler = DistributedSampler | MixtureSampler | ResumableDistributedSampler
_AnySampler = _EpochSampler | ResumableDistributedSampler


def _documented(sampler: _AnySampler, epoch: int) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "seed": sampler.seed,
        "num_replicas": sampler.num_replicas,
        "rank": sampler.rank,
    }


def _part(sampler: _AnySampler, offset: int) -> tuple[int, int, int]:
    """What is left of the epoch for the sampler's rank: (first place, stride, how many)."""
    rank, world = sampler.rank, sampler.num_replicas
    return rest_of_epoch(
        sampler.order.n, offset, rank=rank, world=world, drop_last=sampler.drop_last
    )


def _walk(order: Order, start: int, first: int, stride: int, count: int) -> Iterator[int]:
    """Indices at places first, first + stride, ... of the epoch that starts at `start`."""
    done, chunk = 0, FIRST_CHUNK
    while done < count:
        places = first + stride * np.arange(done, min(done + chunk, count), dtype=np.int64)
        yield from order.indices(start + places % order.n).tolist()
        done, chunk = done + chunk, min(2 * chunk, CHUNK)
