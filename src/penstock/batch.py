"""From narrow tokens to batches: one gather, two widenings, and masks from the boundaries.

>>> rows = Windows(np.array([[1, 2, 0, 3]], np.uint16), cuts=np.array([3]))
>>> batch = rows.batch(0, 1)
>>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["doc_ids"].tolist()
([[1, 2, 0]], [[2, 0, -100]], [[0, 0, 0]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.pack import Boundaries, Documents
from penstock.store.values import check_int64

Sample = dict[str, Any]
IGNORED = -100
_SIGNED = {np.dtype(f"u{size}"): np.dtype(f"i{size}") for size in (2, 4, 8)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where batches go: a device, by way of pinned memory when asked."""

    device: torch.device
    pin: bool = False

    def send(self, tensor: Tensor) -> Tensor:
        """The tensor over there; the copy runs beside the trainer's own work where it can."""
        if self.pin:
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=self.pin)


def place_of(device: str | torch.device | None, pin: bool) -> tuple[Place | None, bool]:
    """Where batches go, and whether those that stay here are pinned."""
    there = torch.cuda.is_available()
    if device is None:
        return None, pin and there
    device = torch.device(device)
    if device.type == "cuda" and not there:
        raise ConfigError(
            f"device {device} was asked for, and torch finds no CUDA here: pass device='cpu'"
        )
    if device.type == "cpu":
        return None, False  # widened by numpy: torch's threads cost those that read ahead a core
    return Place(device, pin=pin and device.type == "cuda"), False


@dataclass(slots=True)
class Windows:
    """Rows of T + 1 tokens as they are stored, and what is known of them.

    `mask` marks the tokens that are trained; `cuts`, the places where documents begin, gives packed
    batches their doc ids; `used` is where each row's padding begins; `source` is each row's dataset
    in a mixture.
    """

    tokens: npt.NDArray[Any]  # (n, T + 1)
    mask: npt.NDArray[np.bool_] | None = None  # (n, T + 1)
    cuts: npt.NDArray[np.int64] | None = None  # flat, sorted
    used: npt.NDArray[np.int64] | None = None  # (n,); of rows with cuts
    source: npt.NDArray[np.int64] | None = None  # (n,)
    target: str = "labels"
    _documents: Documents | None = None

    def __post_init__(self) -> None:
        check_int64(self.tokens, "A batch")

    def batch(self, lo: int, hi: int, place: Place | None = None) -> Sample:
        """Rows lo to hi as one batch, widened here or at `place`."""
        tokens = self.tokens[lo:hi]
        masked = None if self.mask is None else ~self.mask[lo:hi, 1:]
        found = self._boundaries(lo, hi)
        if place is None:
            batch = _widen(tokens, masked, found, self.target)
        else:
            batch = _widen_there(tokens, masked, found, self.target, place)
        if self.source is not None:
            source = torch.from_numpy(self.source[lo:hi].copy())
            batch["dataset_idx"] = source if place is None else place.send(source)
        return batch

    def _boundaries(self, lo: int, hi: int) -> Boundaries | None:
        if self.cuts is None:
            return None
        if self._documents is None:
            rows, width = self.tokens.shape
            self._documents = Documents.of(self.cuts, rows, width, self.used)
        return self._documents.batch(lo, hi)


def merge(parts: Sequence[Windows], places: Sequence[npt.NDArray[np.int64]]) -> Windows:
    """Windows of several sources as one, `parts[k]`'s rows at `places[k]` of the whole."""
    rows, width = sum(len(p.tokens) for p in parts), parts[0].tokens.shape[1]
    dtype = np.result_type(*(p.tokens.dtype for p in parts))
    tokens = np.empty((rows, width), dtype if dtype.kind in "iu" else np.int64)  # never a float
    for part, place in zip(parts, places, strict=True):
        tokens[place] = part.tokens
    whole = Windows(tokens, target=parts[0].target)
    if any(part.mask is not None for part in parts):
        whole.mask = np.ones((rows, width), np.bool_)
    cuts = []
    for part, place in zip(parts, places, strict=True):
        if part.mask is not None and whole.mask is not None:
            whole.mask[place] = part.mask
        if part.used is not None:
            if whole.used is None:
                whole.used = np.full(rows, width)
            whole.used[place] = part.used
        if part.cuts is not None:
            row, column = np.divmod(part.cuts, width)
            cuts.append(place[row] * width + column)
    if cuts:
        whole.cuts = np.sort(np.concatenate(cuts))
    return whole


def _widen(
    tokens: npt.NDArray[Any],
    masked: npt.NDArray[np.bool_] | None,
    found: Boundaries | None,
    target: str,
) -> Sample:
    labels = tokens[:, 1:].astype(np.int64)
    if masked is not None:
        labels[masked] = IGNORED
    if found is not None:
        labels.reshape(-1)[found.ignored] = IGNORED
    batch: Sample = {
        "input_ids": torch.from_numpy(tokens[:, :-1].astype(np.int64)),
        target: torch.from_numpy(labels),
    }
    return batch if found is None else batch | _packed(found)


def _widen_there(
    tokens: npt.NDArray[Any],
    masked: npt.NDArray[np.bool_] | None,
    found: Boundaries | None,
    target: str,
    place: Place,
) -> Sample:
    """The same with tokens travelling as they are stored: a quarter of the bytes."""
    there = place.send(_signed(tokens))
    wide = there.to(torch.int64)
    if tokens.dtype in (np.uint16, np.uint32):
        wide &= np.iinfo(tokens.dtype).max  # undo the sign that torch saw in the top bit
    # Clones, since one row's slice is contiguous already, and labels are written into.
    labels = wide[:, 1:].clone(memory_format=torch.contiguous_format)
    if masked is not None:
        labels.masked_fill_(place.send(torch.from_numpy(masked)), IGNORED)
    inputs = wide[:, :-1].clone(memory_format=torch.contiguous_format)
    batch: Sample = {"input_ids": inputs, target: labels}
    if found is None:
        return batch
    labels.view(-1)[place.send(torch.from_numpy(found.ignored))] = IGNORED
    packed = _packed(found)
    return batch | {k: place.send(v) if isinstance(v, Tensor) else v for k, v in packed.items()}


def _signed(tokens: npt.NDArray[Any]) -> Tensor:
    """Few devices compute with uint16 and uint32: the same bytes under a signed name."""
    return torch.from_numpy(tokens.view(_SIGNED.get(tokens.dtype, tokens.dtype)))


def _packed(found: Boundaries) -> Sample:
    return {
        "doc_ids": torch.from_numpy(found.doc_ids),
        "position_ids": torch.from_numpy(found.position_ids),
        "cu_seqlens": torch.from_numpy(found.cu_seqlens),
        "max_seqlen": found.max_seqlen,
    }


def to_place(batch: Any, place: Place) -> Any:
    """A finished batch, its tensors moved: a dict, or whatever a dataset's collation gives."""
    if isinstance(batch, Tensor):
        return place.send(batch)
    if isinstance(batch, dict):
        return {key: to_place(value, place) for key, value in batch.items()}
    if isinstance(batch, list):
        return [to_place(value, place) for value in batch]
    if isinstance(batch, tuple):
        moved = [to_place(value, place) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else tuple(moved)
    return batch


def cut_up(batch: Sample, count: int) -> list[Sample]:
    """A batch of tensors as its `count` items.

    >>> cut_up({"labels": torch.tensor([[1, 2], [3, 4]])}, 2)
    [{'labels': tensor([1, 2])}, {'labels': tensor([3, 4])}]
    """
    return [{key: value[row] for key, value in batch.items()} for row in range(count)]
