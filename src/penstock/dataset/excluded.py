"""Documents that are not trained on any more: their samples stay, their labels are masked.

    web = excluding(web, {"data": [(120, 140)]})    # a view of it, without documents 120 to 139

A dataset is never changed: what comes back is another one over the same store, so that whoever
shares it sees nothing of it.

>>> spans = Spans.of([(3, 5), (5, 6), (9, 10)])
>>> spans.hold(np.array([2, 3, 5, 6, 9])).tolist()
[False, True, True, False, True]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, OutOfBounds

if TYPE_CHECKING:
    from penstock.store import Store

I64 = npt.NDArray[np.int64]
Ranges = Sequence[tuple[int, int]]  # [first, end) each
ALONE = "data"  # what a dataset is called that is no source of a mixture


@dataclass(frozen=True, slots=True)
class Spans:
    """Ranges [begin, end), in order and apart."""

    begin: I64
    end: I64

    @classmethod
    def of(cls, ranges: Ranges) -> Spans:
        """Ranges that may touch, in order."""
        pairs = np.array(ranges, np.int64).reshape(-1, 2)
        return cls(pairs[:, 0], pairs[:, 1])

    def __len__(self) -> int:
        return int((self.end - self.begin).sum())

    def hold(self, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of the values lie in one of the ranges."""
        at = self.begin.searchsorted(values, "right") - 1
        held: npt.NDArray[np.bool_] = (at >= 0) & (values < self.end[at])
        return held

    def masked(
        self, starts: I64, width: int, mask: npt.NDArray[np.bool_] | None
    ) -> npt.NDArray[np.bool_] | None:
        """The mask of rows of `width` from each start, False where a range holds them, too.

        >>> Spans.of([(2, 4)]).masked(np.array([0, 4]), 3, None).tolist()
        [[True, True, False], [True, True, True]]
        """
        low, high = self.end.searchsorted(starts, "right"), self.begin.searchsorted(starts + width)
        touched = np.flatnonzero(high > low)
        if not len(touched):
            return mask
        found = np.ones((len(starts), width), np.bool_) if mask is None else mask.copy()
        for row in touched.tolist():
            start = int(starts[row])
            for k in range(int(low[row]), int(high[row])):
                begin, end = int(self.begin[k]) - start, int(self.end[k]) - start
                found[row, max(begin, 0) : end] = False
        return found


@dataclass(frozen=True, slots=True)
class Excluded:
    """What a view leaves out: where it is masked, and how much that is."""

    spans: Spans
    documents: int
    tokens: int


def excluding(dataset: Any, documents: Mapping[str, Ranges]) -> Any:
    """A view of a dataset, or of the sources of a mixture by name, without some documents."""
    if not documents:
        return dataset
    names = getattr(dataset, "dataset_names", None)
    if names is None:
        _known(documents, [ALONE], "this run has no mixture, and its one dataset is 'data'")
        return _without(dataset, ALONE, documents[ALONE])
    _known(documents, names, f"the sources of this run are {list(names)}")
    view = copy(dataset)
    view.datasets = [
        _without(each, name, documents[name]) if name in documents else each
        for name, each in zip(names, dataset.datasets, strict=True)
    ]
    return view


def excluded_in(view: Any) -> dict[str, dict[str, int]]:
    """What `excluding` left out: `documents` and `tokens` by source."""
    names = getattr(view, "dataset_names", [ALONE])
    found = zip(names, getattr(view, "datasets", [view]), strict=True)
    return {
        name: {"documents": each.excluded.documents, "tokens": each.excluded.tokens}
        for name, each in found
        if getattr(each, "excluded", None) is not None
    }


def _known(documents: Mapping[str, Ranges], names: Sequence[str], what: str) -> None:
    unknown = [name for name in documents if name not in names]
    if unknown:
        raise ConfigError(f"documents of {unknown[0]!r} are excluded, and {what}")


def _without(dataset: Any, name: str, documents: Ranges) -> Any:
    exclude = getattr(dataset, "excluding", None)
    if exclude is None:
        raise ConfigError(
            f"documents of {name!r} are excluded, and a {type(dataset).__name__} does not tell "
            "which document a token is from: leave steps out instead, or the source"
        )
    try:
        return exclude(documents)
    except (ConfigError, OutOfBounds) as error:
        raise type(error)(f"documents of {name!r} cannot be excluded: {error}") from None


def tokens_of(store: Store, key: str, documents: Ranges) -> Excluded:
    """The documents, by where they lie among the store's tokens."""
    count = store.documents_of(key)
    if not count:
        raise ConfigError(
            f"{store.path} has no record boundaries, so its documents have no numbers; "
            "`penstock prepare` makes a store that has them"
        )
    check_documents(documents, count, store)
    spans = Spans.of(documents)
    begin, _ = store.document_spans(spans.begin, key)
    _, end = store.document_spans(spans.end - 1, key)
    kept = end > begin
    found = Spans(begin[kept], end[kept])
    return Excluded(found, len(spans), len(found))


def check_documents(documents: Ranges, count: int, store: Store) -> None:
    """Refuse documents that are not there."""
    last = max((end for _, end in documents), default=0)
    if last > count:
        raise OutOfBounds(f"{store.path} has {count:,} documents, and {last - 1:,} is none of them")
