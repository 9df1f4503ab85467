"""Text to batches, with no store between.

stream = TextStream("data/", "tokenizers/mine", seq_len=2048, batch_size=16, seed=1)
for batch in stream:                             # for ever
    loss = train(batch["input_ids"], batch["labels"])
    state = stream.state_dict()                  # this rank's lanes; merge_states joins them
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from penstock.batch import IGNORED, Place, Sample, Windows, place_of, to_place
from penstock.checks import at_least, whole
from penstock.errors import ConfigError
from penstock.order import ORDER_VERSION
from penstock.order.identity import check_identity
from penstock.ranks import rank_and_world
from penstock.stream.chunks import chunk_packer
from penstock.stream.corpus import Corpus, open_corpus
from penstock.stream.counts import Counts
from penstock.stream.deal import Turns
from penstock.stream.encoding import framing_encoder, opened
from penstock.stream.feed import Source
from penstock.stream.index import counts_of
from penstock.stream.lanes import Drawn
from penstock.stream.reading import CHUNK, Reader
from penstock.stream.share import LANES, Policy, Share
from penstock.stream.state import VERSION, read_stream_state
from penstock.text.documents import Policy as Rejects
from penstock.text.tokenizer import Tokenizer

Packing = Literal["chunked", "concat", "best_fit_crop"]
PACKINGS = ("chunked", "concat", "best_fit_crop")
FEW_ROWS = 16  # a unit: with fewer, padding passes 5%
_LOG = logging.getLogger("penstock")


class TextStream:
    """Batches of documents that are read, tokenized and packed on the way; without an end.

    `paths` are files, directories, globs or URLs of Parquet, JSON Lines or JSON, whose
    `text_field` is read; `tokenizer` is a path, a name of the Hub, or an open one. Documents end
    with EOS where the tokenizer has one, else begin with BOS; `bos` and `eos` decide otherwise.

    Units of the corpus (row groups, or slices) are permuted in each epoch and dealt to `lanes`,
    whose rows the stream takes in turn. With packing="chunked" each unit is packed by itself by
    best-fit decreasing; "concat" cuts each lane's run of tokens into rows, "best_fit_crop" fills
    them as nanochat does. Labels never cross documents, unless `isolate` is False; with
    `pack_sequences` batches hold doc_ids, position_ids, cu_seqlens and max_seqlen too.

    A batch depends on the data, these settings and its number, not on ranks, `threads` or what was
    read ahead. `policy` says what becomes of documents that cannot be read: "error", or "reject".
    `steps` ends the stream after so many batches; with "epoch", after those of one epoch, which
    `penstock index` has counted: in the cache directory, or at `index`.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        tokenizer: str | os.PathLike[str] | Tokenizer,
        seq_len: int,
        batch_size: int,
        *,
        text_field: str = "text",
        packing: Packing = "chunked",
        lanes: int = LANES,
        seed: int = 0,
        shuffle: bool = True,
        pack_sequences: bool = True,
        isolate: bool = True,
        bos: bool | None = None,
        eos: bool | None = None,
        buffer_size: int = 1000,
        tokenizer_batch_size: int = 128,
        policy: Rejects = "error",
        rank: int | None = None,
        world_size: int | None = None,
        threads: int | None = None,
        steps: int | Literal["epoch"] | None = None,
        index: str | os.PathLike[str] | None = None,
        device: str | torch.device | None = None,
        pin_memory: bool = True,
    ) -> None:
        if packing not in PACKINGS:
            raise ConfigError(f"packing is one of {', '.join(PACKINGS)}, not {packing!r}")
        if policy not in ("error", "reject"):
            raise ConfigError(f"policy is 'error' or 'reject', not {policy!r}")
        self.seq_len, self.batch_size = (
            at_least(1, seq_len, "seq_len"),
            at_least(1, batch_size, "batch_size"),
        )
        self.text_field, self.packing, self.seed = text_field, packing, whole(seed, "seed")
        self.shuffle, self.pack_sequences = bool(shuffle), bool(pack_sequences)
        self._isolate = bool(isolate) or self.pack_sequences
        self.rank, self.world_size = rank_and_world(rank, world_size)
        self.tokenizer = opened(tokenizer)
        self._framing = _framing(self.tokenizer, bos, eos)
        self._buffer = at_least(1, buffer_size, "buffer_size")
        self._refill = at_least(1, tokenizer_batch_size, "tokenizer_batch_size")
        self._place, self._pin = place_of(device, pin_memory)
        self._dtype = np.uint16 if self.tokenizer.vocab_size <= 1 << 16 else np.uint32
        pads = (self.tokenizer.pad_id, self.tokenizer.eos_id, self._framing["bos"], 0)
        self._policy = Policy(
            name=packing,
            width=self.seq_len + 1,
            pad=next(pad for pad in pads if pad is not None),
            buffer_size=self._buffer,
        )
        paths = [paths] if isinstance(paths, str | os.PathLike) else paths
        self.inputs = [os.fspath(path) for path in paths]
        lanes = at_least(1, lanes, "lanes")
        self.corpus = open_corpus(self.inputs, text_field, lanes=lanes)
        self.rejects: Rejects = policy
        self._reader = Reader(self.corpus, text_field, policy)
        self.threads = threads_here() if threads is None else at_least(1, threads, "threads")
        self.share = Share(
            self._source,
            self._policy,
            lanes=lanes,
            rank=self.rank,
            world=self.world_size,
            threads=self.threads,
        )
        self._passes = False
        self.step = 0  # batches delivered since the run began
        if packing == "chunked":
            _say_if_small(self.corpus, lanes, self._policy.width)
        self._index = index
        self._counts: Counts | None = None
        self._steps = steps if steps is None or steps == "epoch" else at_least(1, steps, "steps")
        if self._steps == "epoch":
            self._epoch().steps(self.batch_size * self.world_size)  # an error now, not at the end
        self._reset_stats()

    # --- batches

    def __iter__(self) -> Iterator[Sample]:
        """Batches from where the last one ended, whoever took it."""
        while self._left() != 0:
            yield self.next_batch()

    def __len__(self) -> int:
        """All batches up to the end, where there is one."""
        left = self._left()
        if left is None:
            raise TypeError(
                "this stream has no end: give it steps=N, or steps='epoch' after `penstock index`"
            )
        return self.step + left

    def __bool__(self) -> bool:
        """A stream is something, whether or not it has a length."""
        return True

    def _left(self) -> int | None:
        """Batches up to the end; of an epoch by its rows, which another batch size leaves."""
        if self._steps is None:
            return None
        if self._steps == "epoch":
            left = (self._epoch().rows or 0) - self.share.row
            return max(0, left // (self.batch_size * self.world_size))
        return max(0, self._steps - self.step)

    @property
    def steps_in_epoch(self) -> int:
        """Global batches in one epoch, from the index that `penstock index` has made."""
        return self._epoch().steps(self.batch_size * self.world_size)

    def _epoch(self) -> Counts:
        if self._counts is None:
            self._counts = counts_of(self, self._index)
        return self._counts

    def next_batch(self) -> Sample:
        """The next batch; from here on it counts as delivered."""
        asked = time.perf_counter()
        tokens, drawn = self.share.draw(self.batch_size, self._dtype)
        try:
            batch = self.batch_of(tokens, drawn)
        except BaseException:
            self.share.undo()  # what was not delivered comes again
            raise
        self.step += 1
        self._batches += 1
        self._waited += time.perf_counter() - asked
        return batch

    def in_passes(self) -> None:
        """Have epochs that end; of packing="concat"."""
        self._passes = True

    def row_of(self, epoch: int) -> tuple[npt.NDArray[Any], Drawn] | None:
        """The next row of an epoch of this rank's documents, if there is one; of "concat"."""
        return self.share.row_of(epoch, self._dtype)

    def batch_of(self, tokens: npt.NDArray[Any], drawn: Sequence[Drawn]) -> Sample:
        """Rows as a batch."""
        used = np.array([each.used for each in drawn])
        self.share.tally.trained += int(used.sum()) - len(drawn)
        if self._isolate:
            width = self._policy.width
            cuts = np.concatenate([each.cuts + row * width for row, each in enumerate(drawn)])
            self.share.tally.trained -= len(cuts)
            batch = Windows(tokens, cuts=cuts, used=used).batch(0, len(drawn), self._place)
        else:
            batch = Windows(tokens).batch(0, len(drawn), self._place)
            for row in np.flatnonzero(used <= self.seq_len).tolist():
                batch["labels"][row, used[row] - 1 :] = IGNORED
        if not self.pack_sequences:
            batch = {name: batch[name] for name in ("input_ids", "labels")}
        if self._pin:
            batch = to_place(batch, Place(torch.device("cpu"), pin=True))
        return batch

    def _source(self) -> Source:
        crop, rejected = self.packing == "best_fit_crop", self._reader.rejected
        # Anew in a forked child, as is all that threads share.
        self._reader = Reader(self.corpus, self.text_field, self.rejects, rejected)
        return Source(
            name=self.corpus.name,
            units=self.corpus.units,
            deal=Turns(
                len(self.corpus.units),
                self.share.lanes,
                self.seed,
                self.shuffle,
                alternate=not self._passes,
            ),
            parts=partial(self._reader.batches, count=self._refill)
            if crop
            else self._reader.chunks,
            encode=framing_encoder(
                self.tokenizer, bos=self._framing["bos"], eos=self._framing["eos"]
            ),
            seed=self.seed,
            shuffle=self.shuffle and self.packing == "concat",
            passes=self._passes,
            make=chunk_packer(
                self.seed if self.shuffle else None,
                self._policy.width,
                self._dtype,
                self._policy.pad,
            )
            if self.packing == "chunked"
            else None,
        )

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """The addresses of this rank's lanes after the batch last delivered: small, and JSON."""
        lanes = self.share.addresses()
        return {
            "version": VERSION,
            "row": self.share.row,
            "step": self.step,
            "rank": self.rank,
            "world_size": self.world_size,
            "lanes": {str(lane): address for lane, address in lanes.items()},
            "identity": self.identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch at which `state` was taken.

        One rank's own state serves where the number of ranks is the same; another number needs that
        of all ranks, which `merge_states` makes.
        """
        saved = read_stream_state(state)
        check_identity(saved.identity, self.identity())
        self.share.load(saved.row, saved.lanes)
        self.step = saved.step
        self._reset_stats()

    def begin_epoch(self, epoch: int) -> None:
        """Have every lane begin an epoch, wherever it was."""
        self.share.begin_epoch(epoch)

    def identity(self) -> dict[str, Any]:
        """What decides the content of each row."""
        found: dict[str, Any] = {
            "data": self.corpus.fingerprint,
            "text_field": self.text_field,
            "tokenizer": self.tokenizer.content_hash,
            "framing": self._framing,
            "seq_len": self.seq_len,
            "packing": self.packing,
            "lanes": self.share.lanes,
            "units": len(self.corpus.units),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "order": ORDER_VERSION,
        }
        if self.packing == "best_fit_crop":
            found |= {"buffer_size": self._buffer, "tokenizer_batch_size": self._refill}
        else:
            found["chunk"] = CHUNK
        return found

    # --- accounts

    def stats(self) -> dict[str, Any]:
        """What this rank was given since it began or loaded a state, and where each token went.

        tokens = delivered + cropped + waiting, and rows × (seq_len + 1) = delivered + repeated +
        padding; `trained` are labels. `rejected` are the documents left out, by file: of all
        that this process has read, ahead too, each counted once.
        """
        seconds = time.perf_counter() - self._since
        tokens = self._batches * self.batch_size * self.seq_len
        return {
            "batches": self._batches,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "waited_seconds": self._waited,
            "ledger": self.share.tally.to_dict(),
            "rejected": self._reader.rejected.by_file(),
        }

    def _reset_stats(self) -> None:
        self._since, self._waited, self._batches = time.perf_counter(), 0.0, 0

    def close(self) -> None:
        """Let the threads go; the next batch starts them again."""
        self.share.rest()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<stream of {self.corpus.name}: {len(self.corpus.units):,} units to "
            f"{self.share.lanes} lanes, rank {self.rank} of {self.world_size}>"
        )


def threads_here() -> int:
    """The cores that this process may use, shared with the other ranks on this machine."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdecimal() else 1, 1))


def _framing(tokenizer: Tokenizer, bos: bool | None, eos: bool | None) -> dict[str, int | None]:
    """The tokens that begin and end a document: what is asked for, or EOS alone, or BOS alone."""
    if eos is None:
        eos = tokenizer.eos_id is not None
    if bos is None:
        bos = not eos and tokenizer.bos_id is not None
    for wanted, found, name in ((bos, tokenizer.bos_id, "bos"), (eos, tokenizer.eos_id, "eos")):
        if wanted and found is None:
            raise ConfigError(
                f"{tokenizer.name} names no {name}_token in its tokenizer_config.json: add it there"
            )
    if not (bos or eos):
        raise ConfigError(
            f"{tokenizer.name} names neither eos_token nor bos_token in its tokenizer_config.json, "
            "and nothing else would tell documents apart: add one there"
        )
    return {"bos": tokenizer.bos_id if bos else None, "eos": tokenizer.eos_id if eos else None}


def _say_if_small(corpus: Corpus, lanes: int, width: int) -> None:
    """A unit is packed by itself, so many small ones are much padding."""
    rows = corpus.bytes / 4 / len(corpus.units) / width  # at about 4 bytes a token
    if rows < FEW_ROWS:
        _LOG.warning(
            "%s is small for %d lanes: its %d units hold about %.1f rows of %d tokens each, so "
            "padding may pass 5%%; state fewer lanes, a multiple of the number of ranks",
            corpus.name,
            lanes,
            len(corpus.units),
            rows,
            width,
        )
