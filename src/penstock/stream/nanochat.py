"""nanochat's loaders under their own names: the same rows, and a state that is exact.

    for inputs, targets, state in tokenizing_distributed_data_loader_with_state_bos_bestfit(
        tokenizer, 16, 2048, "train", data_dir="base_data", device="cpu"
    ): ...

`data_dir` (or PENSTOCK_DATA_DIR) holds files of documents: the last one is `val`, all before it are
`train`. Lanes are as many as ranks unless stated: then row group j of each file goes to rank j mod
W, and rows are nanochat's token for token. With more lanes, a state goes on at any number of ranks
that divides them. A state of only `pq_idx`, `rg_idx` and `epoch` goes on where nanochat would.

`tokenizer` is one of nanochat's shape (`encode(texts, prepend=, num_threads=)`,
`get_bos_token_id()`), or Penstock's own, or its path. With packing="chunked" rows are packed by
unit instead (see `TextStream`), over 240 lanes unless stated: nothing is cropped, the padding's
targets are `ignore_index`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch

from penstock.batch import Windows, place_of
from penstock.checks import at_least
from penstock.errors import ConfigError, MissingData, StateMismatch
from penstock.order import ORDER_VERSION
from penstock.order.identity import check_identity
from penstock.ranks import rank_and_world
from penstock.stream.chunks import chunk_packer
from penstock.stream.corpus import cut_corpus, group_corpus
from penstock.stream.deal import Deal, Groups, Turns
from penstock.stream.encoding import (
    bos_of,
    framing_encoder,
    is_nanochats,
    nanochats_encoder,
    opened,
)
from penstock.stream.feed import Source
from penstock.stream.reading import CHUNK, Reader
from penstock.stream.share import LANES, Policy, Share
from penstock.stream.state import VERSION, read_stream_state
from penstock.text.files import InputFile, find_files
from penstock.text.tokenizer import FileTokenizer

Batch = tuple[torch.Tensor, torch.Tensor]
BatchAndState = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
GROUP = 1 << 18  # 1 MiB of tokens, some batches' worth
IGNORED = -1  # what nanochat's own loss leaves out


def tokenizing_distributed_data_loader_with_state(
    tokenizer: Any,
    B: int,
    T: int,
    split: str,
    tokenizer_threads: int = 4,
    tokenizer_batch_size: int = 128,
    device: str | torch.device = "cuda",
    resume_state_dict: Mapping[str, Any] | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    lanes: int | None = None,
    packing: Literal["concat", "chunked"] = "concat",
    text_field: str = "text",
    ignore_index: int = IGNORED,
) -> Iterator[BatchAndState]:
    """(inputs, targets, state) for ever: one run of tokens, a BOS before each document.

    Nothing is lost or padded: each batch begins with the last token of the one before.
    """
    return Loader(
        tokenizer,
        _policy(packing, "concat", T, overlap=1),
        _files(split, data_dir),
        batch=at_least(1, B, "B"),
        text_field=text_field,
        threads=tokenizer_threads,
        refill=tokenizer_batch_size,
        device=device,
        ranks=rank_and_world(rank, world_size),
        lanes=lanes,
        state=resume_state_dict,
        ignore_index=ignore_index,
    )


def tokenizing_distributed_data_loader_with_state_bos_bestfit(
    tokenizer: Any,
    B: int,
    T: int,
    split: str,
    tokenizer_threads: int = 4,
    tokenizer_batch_size: int = 128,
    device: str | torch.device = "cuda",
    resume_state_dict: Mapping[str, Any] | None = None,
    buffer_size: int = 1000,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    lanes: int | None = None,
    packing: Literal["best_fit_crop", "chunked"] = "best_fit_crop",
    text_field: str = "text",
    ignore_index: int = IGNORED,
) -> Iterator[BatchAndState]:
    """(inputs, targets, state) for ever: each row begins with a BOS and is full.

    Of `buffer_size` waiting documents the longest that fits comes next; where none does, the
    shortest is cropped.
    """
    return Loader(
        tokenizer,
        _policy(packing, "best_fit_crop", T, buffer_size=at_least(1, buffer_size, "buffer_size")),
        _files(split, data_dir),
        batch=at_least(1, B, "B"),
        text_field=text_field,
        threads=tokenizer_threads,
        refill=tokenizer_batch_size,
        device=device,
        ranks=rank_and_world(rank, world_size),
        lanes=lanes,
        state=resume_state_dict,
        ignore_index=ignore_index,
    )


def tokenizing_distributed_data_loader(*args: Any, **kwargs: Any) -> Iterator[Batch]:
    """`tokenizing_distributed_data_loader_with_state` without the state."""
    loader: Any = tokenizing_distributed_data_loader_with_state(*args, **kwargs)
    loader.stateful = False
    return loader  # type: ignore[no-any-return]


def tokenizing_distributed_data_loader_bos_bestfit(*args: Any, **kwargs: Any) -> Iterator[Batch]:
    """`tokenizing_distributed_data_loader_with_state_bos_bestfit` without the state."""
    loader: Any = tokenizing_distributed_data_loader_with_state_bos_bestfit(*args, **kwargs)
    loader.stateful = False
    return loader  # type: ignore[no-any-return]


class Loader(Iterator[Any]):
    """What the four functions give."""

    def __init__(
        self,
        tokenizer: Any,
        policy: Policy,
        files: Sequence[InputFile],
        *,
        batch: int,
        text_field: str,
        threads: int,
        refill: int,
        device: str | torch.device,
        ranks: tuple[int, int],
        lanes: int | None,
        state: Mapping[str, Any] | None,
        ignore_index: int,
    ) -> None:
        self.stateful = True
        self._rows, self._policy, self._ignored = batch, policy, ignore_index
        self._place, _ = place_of(device, pin=True)
        self._threads = at_least(1, threads, "tokenizer_threads")
        self._refill = at_least(1, refill, "tokenizer_batch_size")
        self._own = not is_nanochats(tokenizer)
        self._tokenizer = opened(tokenizer) if self._own else tokenizer
        self._bos = bos_of(self._tokenizer)
        rank, world = ranks
        chunked = policy.name == "chunked"
        lanes = _lanes(state) or (LANES if chunked else world) if lanes is None else lanes
        at_least(1, lanes, "lanes")
        if chunked:
            self._corpus = cut_corpus(files, text_field, lanes=lanes)
            self._deal: Deal = Turns(len(self._corpus.units), lanes, seed=0)
        else:
            self._corpus, groups = group_corpus(files, text_field)
            self._deal = Groups(groups, lanes)
        self._text_field = text_field
        self._share = Share(
            self._source,
            policy,
            lanes=lanes,
            rank=rank,
            world=world,
            threads=self._threads if chunked and self._own else 1,
        )
        self._step = 0
        if state is not None:
            self._load(state)

    def _source(self) -> Source:
        reader = Reader(self._corpus, self._text_field, "error")
        chunked = self._policy.name == "chunked"
        width, bos = self._policy.width, self._bos
        if self._own:
            tokenizer = self._tokenizer
            if not chunked and isinstance(tokenizer, FileTokenizer):
                tokenizer = tokenizer.using(self._threads)
            encode = framing_encoder(tokenizer, bos=bos, eos=None, empty=True)
        else:
            encode = nanochats_encoder(self._tokenizer, bos=bos, threads=self._threads)
        return Source(
            name=self._corpus.name,
            units=self._corpus.units,
            deal=self._deal,
            parts=reader.chunks if chunked else partial(reader.batches, count=self._refill),
            encode=encode,
            seed=0,
            group=1 if chunked else GROUP,
            make=chunk_packer(0, width, np.uint32, self._policy.pad) if chunked else None,
        )

    def __next__(self) -> tuple[Any, ...]:
        """The next batch, in tensors of its own."""
        tokens, drawn = self._share.draw(self._rows, np.uint32)
        try:
            batch = Windows(tokens).batch(0, self._rows, self._place)
            inputs, targets = batch["input_ids"], batch["labels"]
            for row, each in enumerate(drawn):
                if each.used < self._policy.width:
                    targets[row, max(each.used - 1, 0) :] = self._ignored
            if not self.stateful:
                self._step += 1
                return inputs, targets
            state = self.state_dict() | {"step": self._step + 1}
        except BaseException:
            self._share.undo()  # what was not delivered comes again
            raise
        self._step += 1
        return inputs, targets, state

    def state_dict(self) -> dict[str, Any]:
        """Nanochat's own keys, and this rank's lanes exactly."""
        lanes = self._share.addresses()
        epoch, number = self._share.last_read()
        file, group = self._place_of(number, epoch)
        return {
            "pq_idx": file,
            "rg_idx": group,
            "epoch": epoch + 1,
            "version": VERSION,
            "row": self._share.row,
            "step": self._step,
            "lanes": {str(lane): address for lane, address in lanes.items()},
            "identity": self._identity,
        }

    def _place_of(self, number: int, epoch: int) -> tuple[int, int]:
        """The file of a unit and its row group there."""
        if isinstance(self._deal, Groups):
            return self._deal.place(number)
        unit = self._corpus.units[self._deal.unit((epoch, number))]
        return unit.file, unit.begin

    @cached_property
    def _identity(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "data": self._corpus.fingerprint,
            "text_field": self._text_field,
            "tokenizer": _named(self._tokenizer),
            "seq_len": self._policy.width - 1,
            "packing": self._policy.name,
            "lanes": self._share.lanes,
            "order": ORDER_VERSION,
        }
        if self._policy.name == "chunked":
            return found | {"chunk": CHUNK}
        if self._policy.name == "best_fit_crop":
            found["buffer_size"] = self._policy.buffer_size
        return found | {"tokenizer_batch_size": self._refill}

    def _load(self, state: Mapping[str, Any]) -> None:
        if "lanes" in state:
            saved = read_stream_state(state)
            check_identity(saved.identity, self._identity)
            self._share.load(saved.row, saved.lanes)
            self._step = saved.step
            return
        if not isinstance(self._deal, Groups):
            raise StateMismatch(
                "a state of only pq_idx, rg_idx and epoch says where nanochat's rows go on, and "
                "packing='chunked' makes other rows: begin anew, or leave packing out"
            )
        file, group, epoch = (_number(state, name) for name in ("pq_idx", "rg_idx", "epoch"))
        deal = self._deal
        at = {lane: deal.resumed(lane, epoch - 1, file, group) for lane in self._share.own()}
        self._share.load(0, {lane: self._policy.begin(place) for lane, place in at.items()})


def _number(state: Mapping[str, Any], name: str) -> int:
    """One of nanochat's three keys; a state without an epoch is of the first."""
    value = state.get(name, 1 if name == "epoch" else None)
    if type(value) is not int or value < (name == "epoch"):
        raise StateMismatch(
            f"this is not a state of nanochat's loaders: {name} is {value!r}, where a whole number "
            "was expected"
        )
    return value


def _lanes(state: Mapping[str, Any] | None) -> int | None:
    """The lanes of the run that a state was saved in."""
    identity = (state or {}).get("identity")
    lanes = identity.get("lanes") if isinstance(identity, Mapping) else None
    return lanes if type(lanes) is int and lanes > 0 else None


def _named(tokenizer: Any) -> str:
    """What tells a tokenizer from another."""
    if hasattr(tokenizer, "content_hash"):
        return str(tokenizer.content_hash)
    size = tokenizer.get_vocab_size() if hasattr(tokenizer, "get_vocab_size") else ""
    return f"{type(tokenizer).__name__} {size}".strip()


def _policy(packing: str, own: str, T: int, **options: int) -> Policy:
    if packing not in (own, "chunked"):
        raise ConfigError(f"packing is {own!r} or 'chunked' here, not {packing!r}")
    return Policy(name=packing, width=at_least(1, T, "T") + 1, **options)


def _files(split: str, data_dir: str | os.PathLike[str] | None) -> Sequence[InputFile]:
    """The files of a split."""
    if split not in ("train", "val"):
        raise ConfigError(f"split must be 'train' or 'val', not {split!r}")
    place = data_dir or os.environ.get("PENSTOCK_DATA_DIR")
    if not place:
        raise ConfigError("no data: give data_dir, or set PENSTOCK_DATA_DIR, to a folder of files")
    files = find_files([place])
    if split == "train" and len(files) == 1:
        raise MissingData(
            f"{os.fspath(place)} holds one file alone, which is the 'val' split: 'train' is all "
            "files but the last, so there have to be two or more"
        )
    return files[:-1] if split == "train" else files[-1:]
