"""What a source's samples are made of: labels trained, masked, across documents, padding.

    makeup = makeup_of(dataset, order)
    makeup.between(0, 2 * len(dataset)).trained     # of its first two epochs

Every label of a sample is one of the four. Plain windows are all trained, so any number of them is
known. Else whole epochs are known exactly where a ledger says so or the data is small enough to be
looked at, and part of an epoch is looked at too, or taken to be like the epoch's average: `exact`
tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batch import Windows
from penstock.dataset import PackedDataset, WindowDataset
from penstock.dataset.tokens import MASK, TOKENS, TokenDataset
from penstock.dataset.windows import TokenWindows
from penstock.order import EpochOrder

I64 = npt.NDArray[np.int64]

LOOKED_AT = 64 << 20  # bytes of a source that are looked at without being asked to
OFFSETS = 1 << 30  # bytes of a source's record boundaries, likewise
SAMPLED = 1024  # samples of a source that is larger and has no ledger
AT_ONCE = 8 << 20  # bytes of samples


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels by what becomes of them; whether each number is exact, and if not, how it was had."""

    trained: int = 0
    masked: int = 0  # by the source's loss mask
    crossing: int = 0  # the first token of another document
    padding: int = 0
    how: str = "exact"

    @property
    def exact(self) -> bool:
        """Whether these are counts, and not estimates."""
        return self.how == "exact"

    @property
    def total(self) -> int:
        """All labels."""
        return self.trained + self.masked + self.crossing + self.padding

    def __add__(self, other: Labels) -> Labels:
        return Labels(
            self.trained + other.trained,
            self.masked + other.masked,
            self.crossing + other.crossing,
            self.padding + other.padding,
            other.how if self.exact else self.how,
        )


AVERAGE = "part of an epoch taken as its average"


@dataclass(frozen=True, kw_only=True)
class Makeup:
    """What a source's samples are made of, in the order in which they come.

    `epoch` has the labels of a whole epoch that are masked, crossing and padding. `each` has those
    of each sample, where they were looked at; `uniform` says that all samples are alike.
    """

    order: EpochOrder
    width: int  # labels of a sample
    epoch: tuple[Fraction, Fraction, Fraction]
    how: str = "exact"  # the epoch is known
    uniform: bool = False
    each: npt.NDArray[Any] | None = None  # (n, 3)

    def between(self, begin: int, end: int) -> Labels:
        """The labels of the source's samples from ordinal `begin` to `end`."""
        n, count = self.order.n, end - begin
        if count <= 0:
            return Labels()
        if self.each is not None:
            parts = self._looked_at(end) - self._looked_at(begin)
            return self._labels(count, parts.tolist(), "exact")
        means = [Fraction(part) * count / n for part in self.epoch]
        whole = self.uniform or count % n == begin % n == 0
        how = self.how if self.how != "exact" or whole else AVERAGE
        return self._labels(count, [round(mean) for mean in means], how)

    def _labels(self, count: int, parts: Sequence[int], how: str) -> Labels:
        masked, crossing, padding = parts
        trained = count * self.width - masked - crossing - padding
        return Labels(trained, masked, crossing, padding, how)

    def _looked_at(self, ordinal: int) -> I64:
        """Masked, crossing and padding labels of the samples before an ordinal."""
        assert self.each is not None
        epochs, rest = divmod(ordinal, self.order.n)
        found = self._sum * epochs
        first, last = epochs * self.order.n, epochs * self.order.n + rest
        for at in range(first, last, 1 << 20):
            samples = self.order.indices(np.arange(at, min(at + (1 << 20), last)))
            found += self.each[samples].sum(0, dtype=np.int64)
        return found

    @cached_property
    def _sum(self) -> I64:
        assert self.each is not None
        return np.asarray(self.each.sum(0, dtype=np.int64))


def makeup_of(
    dataset: TokenDataset,
    order: EpochOrder,
    *,
    count: bool = False,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Makeup:
    """The makeup of a source: by looking at all of it with `count`, and where it is small anyway.

    `progress` is told of samples that have been looked at.
    """
    n, width = len(dataset), dataset.width - 1
    masked = _masked(dataset)
    if isinstance(dataset, TokenWindows) and not masked and not dataset.pack_sequences:
        return _epoch(order, width, 0, 0, 0, uniform=True)
    by_plan = isinstance(dataset, PackedDataset) and not masked
    size = n * 24 if by_plan else n * dataset.sample_bytes
    if count or size <= (LOOKED_AT if limit is None else limit):
        each = _each(dataset, progress)
        return Makeup(order=order, width=width, epoch=_fractions(each.sum(0)), each=each)
    known = None if dataset.excluded is not None else _by_ledger(dataset)
    if known is not None:
        return _epoch(order, width, *known)
    chosen = np.unique(np.linspace(0, n - 1, min(n, SAMPLED)).astype(np.int64))
    parts = makeup(dataset.gather(chosen)).sum(0)
    epoch = tuple(Fraction(int(part) * n, len(chosen)) for part in parts)
    return Makeup(
        order=order,
        width=width,
        epoch=(epoch[0], epoch[1], epoch[2]),
        how=f"estimated from {len(chosen):,} samples",
    )


def _epoch(
    order: EpochOrder,
    width: int,
    masked: int,
    crossing: int,
    padding: int,
    *,
    uniform: bool = False,
) -> Makeup:
    epoch = Fraction(masked), Fraction(crossing), Fraction(padding)
    return Makeup(order=order, width=width, epoch=epoch, uniform=uniform)


def _fractions(parts: I64) -> tuple[Fraction, Fraction, Fraction]:
    a, b, c = (Fraction(int(part)) for part in parts)
    return a, b, c


def makeup(rows: Windows) -> I64:
    """(n, 3): labels of each row that are masked, crossing into another document, and padding.

    >>> makeup(Windows(np.array([[1, 2, 0, 3]]), cuts=np.array([3]))).tolist()
    [[0, 1, 0]]
    """
    n, width = rows.tokens.shape
    found = np.zeros((n, 3), np.int64)
    cuts = np.empty(0, np.int64) if rows.cuts is None else rows.cuts
    found[:, 1] = np.bincount(cuts // width, minlength=n)
    if rows.used is not None:
        found[:, 2] = width - rows.used
    if rows.mask is not None:
        trained = rows.mask[:, 1:].sum(1)
        trained -= np.bincount(cuts[rows.mask.reshape(-1)[cuts]] // width, minlength=n)
        found[:, 0] = width - 1 - trained - found[:, 1] - found[:, 2]
    return found


def _each(dataset: TokenDataset, progress: Callable[[int], None] | None) -> npt.NDArray[Any]:
    """`makeup` of every sample."""
    n = len(dataset)
    each = np.empty((n, 3), np.uint16 if dataset.width <= 1 << 16 else np.uint32)
    at_once = max(AT_ONCE // max(dataset.sample_bytes, 1), 1)
    by_plan = isinstance(dataset, PackedDataset) and not _masked(dataset)
    for lo in range(0, n, at_once):
        indices = np.arange(lo, min(lo + at_once, n))
        if by_plan:
            assert isinstance(dataset, PackedDataset)
            each[indices] = _by_plan(dataset, indices)
        else:
            rows = dataset.gather(indices)
            each[indices] = makeup(rows)
        if progress is not None:
            progress(len(indices))
    return each


def _masked(dataset: TokenDataset) -> bool:
    """Whether labels are masked by the store, or by documents that are excluded."""
    return MASK in dataset.store.keys or dataset.excluded is not None


def _by_plan(dataset: PackedDataset, rows: I64) -> I64:
    """`makeup` of packed rows without a mask: their tokens need not be read."""
    count, which = dataset.plan.pieces(rows)
    cells = dataset.plan.length[which] + dataset.plan.bos[which]
    used = np.diff(np.concatenate([[0], np.cumsum(cells)])[np.concatenate([[0], np.cumsum(count)])])
    found = np.zeros((len(rows), 3), np.int64)
    found[:, 1], found[:, 2] = count - 1, dataset.width - used
    return found


def _by_ledger(dataset: TokenDataset) -> tuple[int, int, int] | None:
    """Masked, crossing and padding labels of an epoch, where they are known without the data."""
    n, width = len(dataset), dataset.width - 1
    if isinstance(dataset, PackedDataset):
        ledger, labels = dataset.plan.ledger, dataset.plan.labels
        crossing, padding = ledger.pieces - ledger.rows, ledger.padding
        if MASK not in dataset.store.keys:
            return 0, crossing, padding
        if labels is None:
            return None
        return n * width - crossing - padding - labels, crossing, padding
    if not isinstance(dataset, TokenWindows):
        return None
    if MASK not in dataset.store.keys:
        starts = _record_starts(dataset)
        return None if starts is None else (0, starts, 0)
    trained = _trained(dataset) if isinstance(dataset, WindowDataset) else None
    if trained is None or dataset.pack_sequences:
        return None
    return n * width - trained, 0, 0


def _record_starts(dataset: TokenWindows) -> int | None:
    """Labels that are the first token of a record; None where records are too many, or unknown."""
    store = dataset.store
    records = store.documents_of(TOKENS) if dataset.eos_token_id is None else 0
    if not records or records * 8 > OFFSETS:
        return None
    last = (len(dataset) - 1) * dataset.stride + dataset.width  # of the tokens that samples have
    found = at = 0
    for lo in range(0, records, 1 << 20):
        lengths = store.record_lengths(TOKENS, lo, min(lo + (1 << 20), records))
        begins = at + np.cumsum(lengths) - lengths
        begins = begins[(lengths > 0) & (begins < last) & (begins > 0)]
        # where samples do not overlap, the first token of one is no label
        found += int(
            (begins % dataset.stride != 0).sum() if dataset.stride == dataset.width else len(begins)
        )
        at += int(lengths.sum())
    return found


def _trained(dataset: WindowDataset) -> int | None:
    """Labels that the mask trains, by the ledger of the run that prepared the store."""
    store = dataset.store
    ledger: Any = store.metadata.get("ledger") or {}
    total, trained = store.total(TOKENS), ledger.get("trained")
    if not isinstance(trained, int) or ledger.get("tokens") != total:
        return None
    last = len(dataset) * dataset.stride + 1
    ends = store.spans([0, last], [1, total - last], MASK)  # the first token is never a label
    return trained - int((ends != 0).sum())
