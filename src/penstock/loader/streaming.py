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
from penstock.stream.passes import PassStream


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
        unused = [name for name, value in {"sampler": sampler, **others}.items() if value]
        if unused or workers == "process" or collate_fn is not None:
            what = (
                unused[0] if unused else "workers='process'" if collate_fn is None else "collate_fn"
            )
            raise ConfigError(
                f"{what} means nothing over a stream, which deals its rows itself and makes them "
                "in threads: leave it out, or give the dataset to torch's DataLoader"
            )
        if tail not in ("drop", "pad"):
            raise ConfigError(f"tail is 'drop' or 'pad', not {tail!r}")
        self.config = config or DataConfig()
        self.dataset: PassStream = dataset
        self._schedule = batch_schedule(batch_size)
        self._accumulation = at_least(1, accumulation, "accumulation")
        self._pads = tail == "pad"
        self._place, self._pin = place_of(device, self.config.pin_memory)
        self._check_every = check_every
        self._done = self._in_epoch = 0  # batches, since the run began and in this epoch
        self._skip = 0  # batches that a state of the documented keys says were had
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
        return self._done // self._accumulation

    @property
    def lr_scale(self) -> float:
        """The phase's learning-rate scale, for the batch last delivered or else the first."""
        return self.config.lr_scale(max(self._done - 1, 0) // self._accumulation)

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
            self._done += 1
            self._in_epoch += 1
            if self._skip:
                self._skip -= 1
                continue
            delivered = self._placed(batch)
            self._waited += time.perf_counter() - asked
            self._batches += 1
            self._tokens += int(batch["input_ids"].numel())
            if self._check_every and self._done % (self._check_every * self._accumulation) == 0:
                self.check_ranks()
            yield delivered
            asked = time.perf_counter()
        self._in_epoch = 0

    def _size(self) -> int:
        """The batch size of the step under way."""
        return [size for start, size in self._schedule if start <= self.step][-1]

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
            "step": self._done,
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
        counts = {name: state.get(name, 0) for name in ("step", "batches_yielded")}
        for name, value in counts.items():
            if type(value) is not int or value < 0:
                raise StateMismatch(
                    f"this is not a state of a stream: {name} is {value!r}, where a whole number "
                    "was expected"
                )
        self.dataset.load_state_dict(state)
        self._done, self._in_epoch, self._skip = counts["step"], counts["batches_yielded"], 0
        if "lanes" not in state:
            self._skip, self._in_epoch = self._in_epoch, 0
            if self._skip:
                warnings.warn(
                    f"this state has no lanes: {self._skip:,} batches of this loader's size are "
                    "read again and left out",
                    stacklevel=2,
                )
        self._reset_stats()

    def identity(self) -> dict[str, Any]:
        """What decides the rows besides their number."""
        return self.dataset.opened().identity()

    def check_ranks(self) -> None:
        """Refuse to go on where ranks have gone apart. A collective: call it on every rank."""
        check_ranks(self.position, self.identity())

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
