"""Passes: each `iter` gives the rows of one epoch of this rank's documents, and then ends.

    rows = PassStream("data/", "tokenizers/mine", 2048, rank=0, world_size=8)
    for row in rows: ...                             # {"input_ids": (2048,), "labels": (2048,)}

Documents end with EOS and are cut into rows lane by lane; a lane's last row in an epoch is padded,
so that each pass has every document once. Ranks may end a few batches apart: train by steps.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from penstock.batch import IGNORED, Sample, cut_up
from penstock.errors import StateMismatch
from penstock.stream.lanes import Drawn
from penstock.stream.share import LANES
from penstock.stream.text_stream import TextStream
from penstock.text.documents import Policy as Rejects

Row = tuple[npt.NDArray[Any], Drawn]
WORKERS = 1024  # of torch's, whose passes are told apart
ITEM = ("input_ids", "labels", "doc_ids")


class PassStream(IterableDataset[Sample]):
    """Rows of documents that are read and tokenized on the way, one epoch an `iter`.

    Nothing is opened before it is needed, so that it may be sent to torch's worker processes: each
    of `num_workers` has its own part of the rank's lanes, and a state of its own.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        tokenizer: Any,
        seq_len: int,
        *,
        text_field: str = "text",
        lanes: int = LANES,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        pack_sequences: bool = False,
        policy: Rejects = "error",
        threads: int | None = None,
    ) -> None:
        super().__init__()
        self.paths, self.seq_len, self.pack_sequences = paths, seq_len, bool(pack_sequences)
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self._tokenizer = tokenizer
        self._options: dict[str, Any] = {
            "text_field": text_field,
            "lanes": lanes,
            "rank": rank,
            "world_size": world_size,
            "seed": seed,
            "shuffle": shuffle,
            "policy": policy,
            "threads": threads,
        }
        self.epoch = 0
        self._documents = 0  # of this rank's that have begun in this pass
        self._stream: TextStream | None = None
        self._before = 0, 0  # epoch and documents, before the batch that is being made
        self._worker: int | None = None  # torch's, if this is one's copy
        self._ended = torch.zeros(WORKERS, dtype=torch.int64)
        self._ended.share_memory_()  # type: ignore[no-untyped-call]
        self._pending: Mapping[str, Any] | None = None  # a state that was loaded before opening

    # --- rows

    def __iter__(self) -> Iterator[Sample]:
        """The rows of this pass, or in mid-pass the rest of it."""
        info = get_worker_info()
        if info is not None:
            self._be_worker(info.id, info.num_workers)
        stream = self.opened()
        self._begin()
        for row in self._one_pass():
            batch = self._made(stream, [row])
            yield cut_up({key: batch[key] for key in ITEM if key in batch}, 1)[0]

    def batches(self, size: int | Callable[[], int], *, pad: bool = False) -> Iterator[Sample]:
        """The rows of this pass in batches, whose size may be asked for at each.

        A batch at its end is filled from the next pass; or, with `pad`, with rows that have no
        labels.
        """
        stream, held, crossed = self.opened(), list[Row](), False
        self._begin()
        while True:
            wanted = size() if callable(size) else size
            for row in self._one_pass():
                held.append(row)
                if len(held) == wanted:
                    yield self._made(stream, held)
                    if crossed:
                        return
                    held, wanted = [], size() if callable(size) else size
            if held and pad:
                real = len(held)
                batch = self._made(stream, held + [held[-1]] * (wanted - real))
                batch["labels"][real:] = IGNORED
                yield batch
            if not held or pad:
                return
            crossed = True

    def _one_pass(self) -> Iterator[Row]:
        """The rows of this pass, as tokens and what is known of each; then the next one begins."""
        try:
            for row in self.opened().one_pass(self.epoch):
                self._documents += row[1].begun
                yield row
        except GeneratorExit:
            raise
        except BaseException:  # the rows were taken back
            self.epoch, self._documents = self._before
            raise
        self.epoch += 1
        self._documents = 0
        if self._worker is not None:
            self._ended[self._worker] = self.epoch

    def _begin(self) -> None:
        """Begin a batch: if it fails, all of it comes again."""
        self._before = self.epoch, self._documents
        self.opened().share.begin()

    def _made(self, stream: TextStream, rows: Sequence[Row]) -> Sample:
        """Rows as a batch, which from here on counts as delivered."""
        try:
            tokens = np.stack([tokens for tokens, _ in rows])
            batch = stream.batch_of(tokens, [each for _, each in rows])
        except BaseException:
            stream.share.undo()
            self.epoch, self._documents = self._before
            raise
        self._begin()
        return batch

    def opened(self) -> TextStream:
        """The stream that the rows come from."""
        if self._stream is None:
            self._stream = TextStream(
                self.files(),
                self.tokenizer(),
                self.seq_len,
                1,
                packing="concat",
                pack_sequences=self.pack_sequences,
                eos=True,
                isolate=self.pack_sequences,
                **self._options,
            )
            if self._pending is not None:
                pending, self._pending = self._pending, None
                self._load(pending)
        return self._stream

    def files(self) -> Any:
        """What is read."""
        return self.paths

    def tokenizer(self) -> Any:
        """What it is read by."""
        return self._tokenizer

    def close(self) -> None:
        """Let the threads go; the next row starts them again."""
        if self._stream is not None:
            self._stream.close()

    def _be_worker(self, worker: int, workers: int) -> None:
        """Be one of torch's workers: a part of this rank's lanes, in the pass that is its next.

        Workers are made anew for each `iter` of torch's loader, from the dataset in its process,
        which hears nothing of them: how many passes each has ended stands in shared memory.
        """
        if self._worker is not None:  # it lives on, and goes on
            return
        self._worker = worker % WORKERS
        self.opened().share.divide(worker, workers)
        ended = int(self._ended[self._worker])
        if ended > self.epoch:
            self.epoch = ended
            self.opened().begin_epoch(ended)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """`epoch`, `rank_docs_consumed`, and the addresses of this rank's lanes."""
        return {
            "epoch": self.epoch,
            "rank_docs_consumed": self._documents,
            "pass": self.epoch,
        } | self.opened().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the row at which `state` was taken, at any number of ranks.

        A state of `epoch` and `rank_docs_consumed` alone is gone on from by reading as many
        documents and leaving their rows out.
        """
        self._ended.zero_()
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        stream = self.opened()
        if "lanes" in state:
            stream.load_state_dict(state)
            self.epoch = _number(state, "pass")
            self._documents = _number(state, "rank_docs_consumed", 0)
            return
        self.epoch, documents = _number(state, "epoch"), _number(state, "rank_docs_consumed", 0)
        stream.begin_epoch(self.epoch)
        self._documents = 0
        if documents:
            warnings.warn(
                f"this state has no lanes, only {documents:,} documents to leave out, as its own "
                "order counted them: they are read again, and the place is near, not exact",
                stacklevel=3,
            )
            epoch = self.epoch
            for _ in self._one_pass():
                if self._documents >= documents:
                    break
            assert self.epoch in (epoch, epoch + 1)

    def __getstate__(self) -> dict[str, Any]:
        """For another process: all but what is open, and where it stands."""
        kept = self.__dict__.copy()
        if self._stream is not None:
            kept["_pending"] = self.state_dict()
            kept["_stream"] = None
        return kept


def _number(state: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = state.get(name, default)
    if type(value) is not int or value < 0:
        raise StateMismatch(
            f"this is not a state of a stream: {name} is {value!r}, where a whole number was "
            "expected"
        )
    return value
