"""Passes: each `iter` gives the rows of one epoch of this rank's documents, and then ends.

    rows = PassStream("data/", "tokenizers/mine", 2048, rank=0, world_size=8)
    for row in rows: ...                             # {"input_ids": (2048,), "labels": (2048,)}

Documents end with EOS and are cut into rows lane by lane; a lane's last row in an epoch is padded,
so that each pass has every document once. Ranks may end a few batches apart: train by steps.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

from penstock.batch import IGNORED, Sample, cut_up
from penstock.checks import at_least, whole
from penstock.errors import ConfigError, StateMismatch
from penstock.order.identity import short
from penstock.ranks import rank_and_world
from penstock.stream.encoding import opened
from penstock.stream.lanes import Drawn
from penstock.stream.share import LANES, Share, check_world
from penstock.stream.text_stream import TextStream, threads_here
from penstock.stream.workers import PassTable
from penstock.text.documents import Policy as Rejects
from penstock.text.tokenizer import Tokenizer

Row = tuple[npt.NDArray[Any], Drawn]
ITEM = ("input_ids", "labels", "doc_ids")
MUCH = 0.05  # padding that is worth a word
_LOG = logging.getLogger("penstock")


class PassStream(IterableDataset[Sample]):
    """Rows of documents that are read and tokenized on the way, one epoch an `iter`.

    A second `iter` in mid-pass gives the rest of it. In torch's worker processes, each of which has
    its own part of the rank's lanes and a state of its own, an `iter` that was broken off has rows
    in flight that nobody counts: there, the next one begins the next pass.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        tokenizer: str | os.PathLike[str] | Tokenizer,
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
        self.paths, self.seq_len = paths, at_least(1, seq_len, "seq_len")
        self.rank, self.world_size = rank_and_world(rank, world_size)
        self.seed, self.pack_sequences = whole(seed, "seed"), bool(pack_sequences)
        self.threads = None if threads is None else at_least(1, threads, "threads")
        check_world(at_least(1, lanes, "lanes"), self.world_size)
        self.tokenizer = opened(tokenizer)
        if self.tokenizer.eos_id is None:
            raise ConfigError(
                f"{self.tokenizer.name} names no eos_token, and documents have to end with one: "
                "add it to its tokenizer_config.json"
            )
        self._options: dict[str, Any] = {
            "text_field": text_field,
            "lanes": lanes,
            "seed": self.seed,
            "shuffle": bool(shuffle),
            "pack_sequences": self.pack_sequences,
            "policy": policy,
        }
        self.epoch = 0  # the pass that the next row belongs to
        self._documents = 0  # of this rank's that have begun in this pass
        self._given = 0  # rows of this pass, since the state that it began with
        self._loads = 0
        self._error: Exception | None = None  # met after a row that was whole
        self._stream: TextStream | None = None
        self._pending: Mapping[str, Any] | None = None  # where to go on, when it is opened
        self._worker: int | None = None  # torch's, if this is one's copy
        self._goes_on = False  # where that worker is: it has begun an `iter`, or was given a state
        self._table = PassTable()

    # --- rows

    def __iter__(self) -> Iterator[Sample]:
        """The rows of this pass, or in mid-pass the rest of it."""
        self._begin_in_worker()
        for tokens, drawn in self._rows():
            batch = self.opened().batch_of(tokens[None], [drawn])
            yield cut_up({key: batch[key] for key in ITEM if key in batch}, 1)[0]

    def _rows(self) -> Iterator[Row]:
        ended, loads = False, self._loads
        while not ended or loads != self._loads:
            loads = self._loads
            row, ended = self._next()
            if row is not None:
                yield row

    def batches(self, size: int | Callable[[], int], *, pad: bool = False) -> Iterator[Sample]:
        """The rows of this pass in batches, whose size may be asked for at each.

        A batch at its end is filled from the next pass; or, with `pad`, with rows that have no
        labels.
        """
        ended, loads = False, self._loads
        while not ended or loads != self._loads:
            loads = self._loads
            batch, ended = self._batch(size() if callable(size) else size, pad=pad)
            if batch is not None:
                yield batch

    def _batch(self, size: int, *, pad: bool) -> tuple[Sample | None, bool]:
        """The next batch, if this pass has a row; and whether it had its last ones."""
        stream = self.opened()
        before = self.epoch, self._documents, self._given
        stream.share.begin()
        held, ended = list[Row](), False
        try:
            while len(held) < size and not (ended and (pad or not held)):
                row, last = self._next()
                held += [] if row is None else [row]
                ended = ended or last
            return (_batch(stream, held, size) if held else None), ended
        except BaseException:  # what was not delivered comes again
            self.epoch, self._documents, self._given = before
            stream.share.undo()
            raise

    def _next(self) -> tuple[Row | None, bool]:
        """The next row, if there is one, and whether it was the last of its pass.

        After the last, this stands at the beginning of the next pass.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        stream = self.opened()
        row = stream.row_of(self.epoch)
        if row is not None:
            self._documents += row[1].begun
            self._given += 1
            try:
                if stream.share.has_more(self.epoch):
                    return row, False
            except Exception as error:  # noqa: BLE001 - raised in place of the row after this one
                self._error = error
                return row, False
        elif not self._given and not self._documents:
            stream.share.source.check_not_empty()
        self._go_to(self.epoch + 1)
        return row, True

    def _go_to(self, epoch: int) -> None:
        self.epoch, self._documents, self._given = epoch, 0, 0

    def opened(self) -> TextStream:
        """The stream that the rows come from, opened when it is first needed."""
        if self._stream is None:
            self._join_workers()
            threads = self.threads or threads_here()
            info = get_worker_info()
            self._stream = TextStream(
                self.paths,
                self.tokenizer,
                self.seq_len,
                1,
                packing="concat",
                eos=True,
                isolate=self.pack_sequences,
                rank=self.rank,
                world_size=self.world_size,
                threads=max(1, threads // info.num_workers) if info else threads,
                pin_memory=False,  # torch's loader and ours pin whole batches
                **self._options,
            )
            self._stream.in_passes()
            _say_if_small(self._stream)
            if self._pending is not None:
                pending, self._pending = self._pending, None
                self._load(pending)
            if info is not None:
                self._stream.share.divide(info.id, info.num_workers)
        return self._stream

    def close(self) -> None:
        """Let the threads go; the next row starts them again."""
        self._error = None
        if self._stream is not None:
            self._stream.close()

    # --- torch's workers

    def _join_workers(self) -> None:
        """In one of torch's worker processes, let go of what it was forked with.

        Locks in it may be held by threads that are not here.
        """
        info = get_worker_info()
        if info is not None and self._worker is None:
            if self._stream is not None:
                self._pending, self._stream = self._state(), None
            self._worker = info.id

    def _begin_in_worker(self) -> None:
        """Be in the pass that all workers of this `iter` are in."""
        info = get_worker_info()
        if info is None:
            return
        self._join_workers()
        stream, epoch = self.opened(), self.epoch
        begun = self._table.begin(worker=info.id, seed=info.seed - info.id, least=epoch)
        if not self._goes_on:
            epoch = begun
        elif self._given:  # all workers live on through an `iter` that was broken off
            epoch += 1
        if epoch != self.epoch:
            self._error = None
            stream.begin_epoch(epoch)
            self._go_to(epoch)
        self._goes_on = True

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """`epoch`, `rank_docs_consumed`, and the addresses of this rank's lanes."""
        if self._worker is None and self._table.following:
            warnings.warn(
                "rows of this dataset were given by torch's worker processes, and where they are "
                "is not known here: this state is of before. Use StatefulDataLoader, whose "
                "threads do as well",
                stacklevel=2,
            )
        return self._state()

    def _state(self) -> dict[str, Any]:
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
        self._join_workers()
        self._load(state)
        if self._worker is None:
            self._table.clear()
        else:
            self._goes_on = True

    def _load(self, state: Mapping[str, Any]) -> None:
        check_is_state(state)
        own = "lanes" in state
        epoch = number_in(state, "pass" if own else "epoch")
        documents = number_in(state, "rank_docs_consumed", 0)
        stream = self.opened()
        if own:
            stream.load_state_dict(state)
        else:
            stream.begin_epoch(epoch)
        self._error = None
        self._loads += 1
        self._go_to(epoch)
        if own:
            self._documents = documents
        elif documents:
            warnings.warn(
                f"this state has no lanes, only {documents:,} documents to leave out, as its own "
                "order counted them: they are read again, and the place is near, not exact",
                stacklevel=3,
            )
            self._leave_out(lambda: self._documents < documents)

    def leave_out(self, rows: int) -> None:
        """Go on after so many rows more, or where this pass ends."""
        end = self._given + rows
        self._leave_out(lambda: self._given < end)

    def _leave_out(self, going: Callable[[], bool]) -> None:
        ended = False
        while not ended and going():
            _, ended = self._next()

    def __getstate__(self) -> dict[str, Any]:
        """For another process: all but what is open, and where it stands."""
        kept = self.__dict__ | {"_error": None}
        if self._stream is not None:
            kept |= {"_pending": self._state(), "_stream": None}
        return kept

    def __repr__(self) -> str:
        return f"<passes over {self._named()}: rank {self.rank} of {self.world_size}>"

    def _named(self) -> str:
        if isinstance(self.paths, str | os.PathLike):
            return os.fspath(self.paths)
        return f"{len(self.paths)} paths"


def _batch(stream: TextStream, rows: Sequence[Row], size: int) -> Sample:
    """Rows as a batch of `size`, filled up with one that has no labels."""
    real, padded = len(rows), [*rows, *[rows[-1]] * (size - len(rows))]
    batch = stream.batch_of(np.stack([tokens for tokens, _ in padded]), [d for _, d in padded])
    if real < size:
        stream.share.tally.trained -= int((batch["labels"][real:] != IGNORED).sum())
        batch["labels"][real:] = IGNORED
    return batch


def _say_if_small(stream: TextStream) -> None:
    """Each lane's last row in a pass is half empty, so many lanes and few rows are much padding."""
    share: Share = stream.share
    rows = stream.corpus.bytes / 4 / (stream.seq_len + 1)  # at about 4 bytes a token
    ends = min(share.lanes, len(stream.corpus.units)) / 2
    if ends > MUCH * rows:
        _LOG.warning(
            "%s is small for %d lanes: of about %.0f rows of %d tokens, %.0f%% will be padding; "
            "state fewer lanes, a multiple of the number of ranks",
            stream.corpus.name,
            share.lanes,
            rows + ends,
            stream.seq_len + 1,
            100 * ends / (rows + ends),
        )


def check_is_state(state: Any) -> None:
    """Refuse what is no dict."""
    if not isinstance(state, Mapping):
        raise StateMismatch(
            f"this is not a state of a stream: it is {short(state)}, where a dict was expected"
        )


def number_in(state: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of a state.

    >>> number_in({"epoch": 3}, "epoch"), number_in({}, "rank_docs_consumed", 0)
    (3, 0)
    """
    value = state.get(name, default)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise StateMismatch(
            f"this is not a state of a stream: {name} is {short(value)}, where a whole number was "
            "expected"
        )
    return value
