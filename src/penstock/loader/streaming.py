"""The loader over a stream of passes: its rows in batches, its addresses in the state."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from penstock.batch import Place, Sample, place_of, to_place
from penstock.checks import at_least
from penstock.config import DataConfig
from penstock.errors import ConfigError, StateMismatch
from penstock.loader.core import StatefulDataLoader
from penstock.loader.fetch import Collate
from penstock.loader.setup import BatchSize, Workers, batch_schedule
from penstock.loader.state import check_ranks
from penstock.loader.surgery import Allow
from penstock.order.identity import short
from penstock.stream.passes import PassStream, check_is_state, number_in


class StreamLoader(StatefulDataLoader):
    """What `StatefulDataLoader` is over a `PassStream`: made by that name, from the same arguments.

    Ranks may end an epoch a few batches apart. What a step is, batch sizes by step, states and
    `stats()` are as for stores; there is no length.
    """

    def __init__(
        self,
        dataset: PassStream,
        batch_size: BatchSize,
        sampler: None = None,
        config: DataConfig | None = None,
        *,
        accumulation: int = 1,
        device: str | torch.device | None = None,
        workers: Workers = "auto",
        collate_fn: Collate | None = None,
        tail: Literal["drop", "pad"] = "drop",
        check_every: int = 0,
        **others: Any,
    ) -> None:
        given = {"sampler": sampler, "collate_fn": collate_fn, **others}
        given["workers='process'"] = workers == "process" or None
        unused = [name for name, value in given.items() if value not in (None, ())]
        if unused:
            what = " and ".join(unused)
            raise ConfigError(
                f"{what} cannot be had over a stream, which deals its rows itself and makes them "
                "in threads: leave it out, or give the dataset to torch's DataLoader"
            )
        if workers not in ("auto", "thread"):
            raise ConfigError(f"workers is 'auto' or 'thread' over a stream, not {workers!r}")
        if tail not in ("drop", "pad"):
            raise ConfigError(f"tail is 'drop' or 'pad', not {tail!r}")
        self.config = config or DataConfig()
        self.dataset: PassStream = dataset
        if config is not None and dataset.threads is None:
            dataset.threads = max(config.num_workers, 1)
        self._schedule = batch_schedule(batch_size)
        self._accumulation = at_least(1, accumulation, "accumulation")
        self._pads = tail == "pad"
        self._place, self._pin = place_of(device, self.config.pin_memory)
        self._check_every = check_every
        self._step = self._of_step = 0  # steps of the run, and batches of the one under way
        self._in_epoch, self._last_epoch = 0, 0  # batches in this epoch; which one that is
        self._reset_stats()

    # --- where we are

    @property
    def position(self) -> int:
        """The row of the stream at which the next batch begins."""
        return self.dataset.opened().share.row

    @property
    def epoch(self) -> int:
        """The pass that the next batch belongs to."""
        return self.dataset.epoch

    @property
    def step(self) -> int:
        """The step that the next batch belongs to, counted from the start of the run."""
        return self._step

    @property
    def lr_scale(self) -> float:
        """The phase's learning-rate scale, for the batch last delivered or else the first."""
        last = self._step if self._of_step else max(self._step - 1, 0)
        return self.config.lr_scale(last)

    def __len__(self) -> int:
        raise TypeError(
            "a stream does not know how many batches it has: train by steps, or count its tokens "
            "with `penstock index`"
        )

    # --- batches

    def __iter__(self) -> Iterator[Any]:
        """One pass from the current row on."""
        asked = time.perf_counter()
        for batch in self.dataset.batches(self._size, pad=self._pads):
            self._count()
            delivered = self._placed(batch)
            self._waited += time.perf_counter() - asked
            self._batches += 1
            self._tokens += int(batch["input_ids"].numel())
            if self._check_every and not self._of_step and not self._step % self._check_every:
                self.check_ranks()
            yield delivered
            asked = time.perf_counter()

    def _count(self) -> None:
        """One more batch; after an epoch's last one this is at the beginning of the next."""
        whole_step, self._of_step = divmod(self._of_step + 1, self._accumulation)
        self._step += whole_step
        self._in_epoch = self._in_epoch + 1 if self.epoch == self._last_epoch else 0
        self._last_epoch = self.epoch

    def _size(self) -> int:
        """The batch size of the step under way."""
        return [size for start, size in self._schedule if start <= self._step][-1]

    def _placed(self, batch: Sample) -> Any:
        if self._place is not None:
            return to_place(batch, self._place)
        return to_place(batch, Place(torch.device("cpu"), pin=True)) if self._pin else batch

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """This rank's lanes after the batch last delivered, `epoch`, `batches_yielded`, `sampler`.

        `merge_states` joins those of all ranks, for another number of them.
        """
        data = self.dataset
        sampler = {"seed": data.seed, "num_replicas": data.world_size, "rank": data.rank}
        return data.state_dict() | {
            "step": self._step,
            "batch_of_step": [self._of_step, self._accumulation],
            "batches_yielded": self._in_epoch,
            "sampler": {"epoch": self.epoch, **sampler},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Allow = None) -> None:
        """Go on after the batch at which `state` was taken."""
        if allow is not None:
            raise ConfigError(
                f"allow={allow!r} means nothing over a stream, which has no sources to add, remove "
                "or weigh: leave it out"
            )
        check_is_state(state)
        if "lanes" not in state:
            self._load_documented(state)
        else:
            counts = _counts(state)
            self.dataset.load_state_dict(state)
            self._step, of_step, accumulation, self._in_epoch = counts
            self._of_step = of_step if accumulation == self._accumulation else 0
            self._step += bool(of_step) and not self._of_step  # a step under way has ended
        self._last_epoch = self.epoch
        self._reset_stats()

    def _load_documented(self, state: Mapping[str, Any]) -> None:
        """A state of `epoch`, `batches_yielded`, `sampler`, of a loader with our batch sizes."""
        batches, sampler = number_in(state, "batches_yielded", 0), state.get("sampler") or {}
        if not isinstance(sampler, Mapping):
            raise StateMismatch(
                f"this is not a state of a stream: sampler is {short(sampler)}, where a dict was "
                "expected"
            )
        ranks = number_in(sampler, "num_replicas", self.dataset.world_size)
        self.dataset.load_state_dict(state)
        if batches and "rank_docs_consumed" not in state:
            warnings.warn(
                f"this state has no lanes: the rows of {batches:,} batches of this loader's sizes "
                "are read again and left out",
                stacklevel=3,
            )
            self.dataset.leave_out(self._rows_in(batches) * ranks // self.dataset.world_size)
        self._step, self._of_step = divmod(batches, self._accumulation)
        self._in_epoch = batches

    def _rows_in(self, batches: int) -> int:
        """This rank's rows in the first batches of a run."""
        starts = [start * self._accumulation for start, _ in self._schedule]
        ends = [min(end, batches) for end in (*starts[1:], batches)]
        sizes = [size for _, size in self._schedule]
        spans = zip(starts, ends, sizes, strict=True)
        return sum(size * max(end - start, 0) for start, end, size in spans)

    def identity(self) -> dict[str, Any]:
        """What decides the rows besides their number."""
        return self.dataset.opened().identity()

    def check_ranks(self) -> None:
        """Refuse to go on where ranks have gone apart. A collective: call it on every rank.

        What is compared is how far they are in steps: passes end where each rank's lanes do.
        """
        done = self._step * self._accumulation + self._of_step
        check_ranks(done, self.identity())

    # --- accounts

    def stats(self) -> dict[str, Any]:
        """What was delivered since this loader was built or its state loaded, and the ledger."""
        seconds = time.perf_counter() - self._since
        stream = self.dataset.opened().stats()
        return {
            "batches": self._batches,
            "tokens": self._tokens,
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds if seconds else 0.0,
            "waited_seconds": self._waited,
            "ledger": stream["ledger"],
            "rejected": stream["rejected"],
        }

    def _reset_stats(self) -> None:
        self._since, self._waited = time.perf_counter(), 0.0
        self._batches = self._tokens = 0


def _counts(state: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Of a state: steps, batches of the one under way, accumulation, batches of the epoch."""
    of_step = state.get("batch_of_step", [0, 1])
    if not isinstance(of_step, list | tuple) or len(of_step) != 2:
        raise StateMismatch(
            f"this is not a state of a stream: batch_of_step is {short(of_step)}, where two "
            "numbers were expected"
        )
    named = {"batch_of_step": of_step[0], "accumulation": of_step[1]}
    return (
        number_in(state, "step", 0),
        number_in(named, "batch_of_step"),
        number_in(named, "accumulation"),
        number_in(state, "batches_yielded", 0),
    )
