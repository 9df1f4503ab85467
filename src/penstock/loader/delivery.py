"""A batch on its way to the trainer: its padding masked, its tokens counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.batch import IGNORED
from penstock.errors import ConfigError
from penstock.order import Plan

_TOKEN_KEYS = ("chosen", "rejected", "prompts", "responses")


def mask_padding(plan: Plan, at: int, batch: Any, *, rank: int, world: int) -> None:
    """Mask the labels of what pads the last batch of an epoch, in this rank's part of it."""
    left = (plan.epoch(at) + 1) * plan.n - at
    size = plan.segment(at).size
    real = len(range(rank, min(left, size), world))
    if real == size // world:
        return
    labels = [k for k in ("labels", "target_ids") if isinstance(batch, dict) and k in batch]
    if not labels:
        raise ConfigError("the last batch can only be padded where samples have labels to mask")
    batch[labels[0]][real:] = IGNORED
    if "loss_mask" in batch:
        batch["loss_mask"][real:] = 0


def tokens_in(batch: Any) -> int:
    """How many tokens a batch holds, as far as its keys tell.

    >>> import torch
    >>> tokens_in({"input_ids": torch.zeros(2, 8), "labels": torch.zeros(2, 8)})
    16
    """
    if not isinstance(batch, Mapping):
        return 0
    if "input_ids" in batch:
        return _numel(batch["input_ids"])
    return sum(_numel(batch[key]) for key in _TOKEN_KEYS if key in batch)


def _numel(value: Any) -> int:
    return sum(map(_numel, value)) if isinstance(value, list) else int(value.numel())
