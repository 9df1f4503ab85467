"""Packed rows as samples: each row holds whole documents, or pieces of them, by a plan made once.

    dataset = PackedDataset(open_store("tokens/"), 2048)            # best_fit_decreasing
    batch = dataset.take([0, 7])
    batch["cu_seqlens"]                                             # for FlashAttention's varlen

Labels never cross from one document to the next, and padding has none.
"""

from __future__ import annotations

import operator
import warnings
from copy import copy
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from penstock.batch import Windows
from penstock.dataset.excluded import Excluded, Ranges, Spans, check_documents, tokens_of
from penstock.dataset.plans import plan_for
from penstock.dataset.tokens import MASK, TOKENS, TokenDataset
from penstock.errors import ConfigError
from penstock.order import EpochOrder, deal
from penstock.pack import CHUNK_ROWS, Packing
from penstock.pack.policy import Bos, Last, Overflow
from penstock.store import Store

Balance = Literal["attention"]


class PackedDataset(TokenDataset):
    """Rows of `seq_len` inputs and as many labels, packed from a store's documents.

    `strategy` is concat, best_fit_crop or best_fit_decreasing (or AstrAI's names for them); the
    options are those of `penstock.pack_rows`. best_fit_decreasing splits long documents unless
    `overflow` says otherwise, and packs in closed chunks of `chunk_rows` rows' worth of tokens.
    Documents are the store's records or, where it has none, end at `eos_token_id`. A BOS, where
    `bos` wants any, is `bos_token_id`; without `bos`, best_fit_crop puts one before every piece of
    a store that states a BOS and whose documents do not begin with it. What is padded is padded
    with `pad_token_id`.

    The plan is written beside the store on first use. `balance="attention"` has loaders deal the
    rows of a global batch to ranks so that their attention costs about the same.
    """

    _documented = ("input_ids", "labels", "doc_ids", "position_ids")

    def __init__(
        self,
        store: Store,
        seq_len: int,
        strategy: str = "best_fit_decreasing",
        *,
        overflow: Overflow | None = None,
        bos: Bos | None = None,
        last: Last = "pad",
        chunk_rows: int | None = CHUNK_ROWS,
        buffer_size: int = 1000,
        refill: int = 128,
        groups: tuple[int, ...] | None = None,
        eos_token_id: int | None = None,
        bos_token_id: int | None = None,
        pad_token_id: int | None = None,
        balance: Balance | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.seq_len = operator.index(seq_len)
        super().__init__(store, self.seq_len + 1, eos_token_id)
        if balance not in (None, "attention"):
            raise ConfigError(f"balance is 'attention' or None, not {balance!r}")
        concat = strategy in ("concat", "simple")
        bos = _bos_wanted(store, strategy) if bos is None else bos
        self.packing = Packing(
            capacity=self.seq_len + 1,
            strategy=strategy,
            overflow=overflow or ("split" if strategy == "best_fit_decreasing" else None),
            bos=bos,
            overlap=int(concat),
            last=last,
            chunk_rows=None if concat or strategy == "best_fit_crop" else chunk_rows,
            buffer_size=buffer_size,
            refill=refill,
            groups=groups,
        )
        self._bos, self._pad = _tokens_put(store, bos, bos_token_id, pad_token_id)
        self._eos = _eos(store, eos_token_id)
        self.balanced = balance == "attention"
        self.plan = plan_for(store, self.packing, self._eos, cache_dir)
        self.group_bytes = 1 << 20  # a dozen calls a group
        if self.plan.unlabelled:
            warnings.warn(
                f"{self.plan.unlabelled:,} of the {len(self):,} rows packed from {store.path} have "
                "no label to train on: their documents are masked, or a single token long",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self.plan)

    def excluding(self, documents: Ranges) -> Self:
        """A view in which the labels of these documents are -100."""
        view = copy(self)
        spans = Spans.of(documents)
        if self._eos is None:
            tokens = tokens_of(self.store, TOKENS, documents).tokens
        else:  # numbered by their ends, in the plan alone
            count = int(self.plan.document.max(initial=-1)) + 1
            check_documents(documents, count, self.store)
            tokens = int(self.plan.length[spans.hold(self.plan.document)].sum())
        view.excluded = Excluded(spans, len(spans), tokens)  # by document, as the plan's pieces are
        return view

    @property
    def tokens_a_sample(self) -> float:
        """Labels in a row, on average: its padding has none."""
        ledger = self.plan.ledger
        used = ledger.placed + ledger.repeated + ledger.bos
        return max(used / ledger.rows - 1, 1.0) if ledger.rows else 1.0

    def gather(self, indices: npt.NDArray[np.int64]) -> Windows:
        """The rows' tokens and masks, and where their documents begin."""
        plan, width = self.plan, self.seq_len + 1
        count, which = plan.pieces(indices)
        begin, length = plan.begin[which], plan.length[which]
        cells = length if self.packing.bos == "never" else length + plan.bos[which]
        ends = np.cumsum(cells)
        past = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(count)])]
        used = np.diff(past)
        row = np.repeat(np.arange(len(indices)), count)
        column = ends - cells - past[row]  # of each piece in its row
        put = np.flatnonzero(cells > length)
        flat = self.store.spans(begin, length, TOKENS)
        tokens = _in_rows(flat, used, width, self._pad, row[put], column[put], self._bos)
        mask = None
        if self._masked:
            trained = self.store.spans(begin, length, MASK).astype(np.bool_, copy=False)
            mask = _in_rows(trained, used, width, 0, row[put], column[put], 0)
        out = None if self.excluded is None else self.excluded.spans.hold(plan.document[which])
        if out is not None and out.any():
            there = np.repeat(~out, length)
            there = _in_rows(there, used, width, 0, row[put], column[put], 0)
            mask = there if mask is None else mask & there
        inner = column > 0
        cuts = (row * width + column)[inner]
        return Windows(tokens, mask, cuts, None if (used == width).all() else used)

    def advise(self, indices: npt.NDArray[np.int64]) -> None:
        """Have the rows' pages read ahead."""
        _, which = self.plan.pieces(indices)
        for key in self._keys:
            self.store.advise(self.plan.begin[which], self.plan.length[which], key)

    def costs(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What each row's attention costs: the sum of its documents' squared lengths."""
        return self.plan.costs(indices)

    def report(self, *, batch_size: int = 0, world_size: int = 1) -> dict[str, Any]:
        """The plan's ledger: where every token went.

        With a batch size and a number of ranks also what balancing gains: the attention of the
        slowest rank over that of the average one, with and without, over some global batches.
        """
        report = {
            **self.plan.ledger.to_dict(),
            "rows_without_labels": self.plan.unlabelled,
            "strategy": self.packing.strategy,
            "path": str(self.plan.path),
        }
        if batch_size:
            report["attention"] = self._attention(batch_size, world_size)
        return report

    def _attention(self, batch_size: int, world: int) -> dict[str, float]:
        size = batch_size * world
        batches = min(len(self) // size, 100)
        if not batches:
            raise ConfigError(f"{len(self)} rows do not fill a global batch of {size}")
        rows = EpochOrder(len(self), seed=0).indices(np.arange(batches * size))
        unbalanced: list[float] = []
        balanced: list[float] = []
        for costs in self.plan.costs(rows).reshape(batches, size):
            for slowest, places in (
                (unbalanced, np.arange(size).reshape(-1, world).T),
                (balanced, deal(costs, world)),
            ):
                of_ranks = costs[places].sum(1)
                slowest.append(float(of_ranks.max() / of_ranks.mean()))
        return {"unbalanced": float(np.mean(unbalanced)), "balanced": float(np.mean(balanced))}

    def layout(self) -> str:
        """What a sample looks like, in words."""
        return f"{self.seq_len} inputs and labels, packed"

    def identity(self) -> dict[str, Any]:
        """The store's fingerprint, and how rows are packed from it."""
        packing = {k: getattr(self.packing, k) for k in self.packing.__dataclass_fields__}
        return {
            "data": self.store.fingerprint,
            "samples": len(self),
            "packing": packing | {"groups": list(packing["groups"] or [])},
            "tokens": {"bos": self._bos, "pad": self._pad, "eos": self._eos},
        }


def _in_rows(
    flat: npt.NDArray[Any],
    used: npt.NDArray[np.int64],
    width: int,
    pad: int,
    bos_row: npt.NDArray[np.int64],
    bos_column: npt.NDArray[np.int64],
    bos: int,
) -> npt.NDArray[Any]:
    """Pieces end to end as rows: padded at the end, a BOS at each place that wants one."""
    rows = len(used)
    if len(flat) == rows * width:
        return flat.reshape(rows, width)
    out = np.full((rows, width), pad, flat.dtype)
    if len(bos_row):
        there = np.arange(width) < used[:, None]
        there[bos_row, bos_column] = False
        out[there] = flat
        out[bos_row, bos_column] = bos
        return out
    at = 0
    for row, count in enumerate(used.tolist()):
        out[row, :count] = flat[at : at + count]
        at += count
    return out


def _bos_wanted(store: Store, strategy: str) -> Bos:
    """Whether rows of best_fit_crop, which begin with BOS, have to be given theirs."""
    stated = store.metadata.get("bos_token_id")
    if strategy != "best_fit_crop" or stated is None or not store.documents_of(TOKENS):
        return "never"
    begins, ends = store.document_spans(np.arange(min(store.documents_of(TOKENS), 16)), TOKENS)
    firsts = store.spans(begins, np.minimum(ends - begins, 1), TOKENS)
    return "never" if (firsts == stated).all() else "every"


def _eos(store: Store, given: int | None) -> int | None:
    """What ends a document; None where records say so, or where there is none to end."""
    if not store.total(TOKENS):
        return None
    if store.documents_of(TOKENS):
        return None
    eos = store.eos_token_id if given is None else operator.index(given)
    if eos is None:
        raise ConfigError(
            f"{store.path} has no record boundaries, so eos_token_id is required to pack its "
            "documents"
        )
    return eos


def _tokens_put(
    store: Store, bos: Bos, bos_token_id: int | None, pad_token_id: int | None
) -> tuple[int, int]:
    """The ids of BOS and of padding: given, else the store's own; padding may be any token."""
    top = np.iinfo(store.dtype(TOKENS)).max
    found = store.metadata.get("bos_token_id") if bos_token_id is None else bos_token_id
    if bos != "never" and found is None:
        raise ConfigError(f"bos={bos!r} needs bos_token_id, which {store.path} does not state")
    pad = store.metadata.get("pad_token_id") if pad_token_id is None else pad_token_id
    if pad is None:
        eos = store.eos_token_id or 0
        pad = eos if eos <= top else 0
    for name, value in (("bos_token_id", found or 0), ("pad_token_id", pad)):
        if not 0 <= value <= top:
            raise ConfigError(f"{name} {value} does not fit into {store.dtype(TOKENS)} tokens")
    return (0 if bos == "never" else int(found or 0)), int(pad)
