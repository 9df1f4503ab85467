"""The datasets of preference and reinforcement learning: `dpo` and `grpo`, one sample a record.

    dataset = DatasetFactory.load("dpo", "pairs/", window_size=0)   # 0: records of any length
    dataset.take([0, 7])["chosen"]                                  # (2, S), padded on the right

Where a store knows no records, samples are windows of its flat keys, as AstrAI cuts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from penstock.batch import Sample
from penstock.dataset.excluded import Excluded, Ranges, Spans, check_documents, tokens_of
from penstock.dataset.tasks import BaseDataset, DatasetFactory
from penstock.errors import ConfigError, DataError
from penstock.store import Store
from penstock.store.values import check_int64


class RecordDataset(BaseDataset):
    """One sample a record where the store has records, else windows of the flat keys.

    Records longer than `window_size` are cut to it (0: no limit); `cut_records` counts them.
    """

    least_window = 0
    measured: ClassVar[tuple[str, ...]] = ()  # the keys that `window_size` limits

    def excluding(self, documents: Ranges) -> Self:
        """A view in which the masks of these records are False."""
        if not self.by_record:
            raise ConfigError(f"{self.loaded.path} has no record boundaries")
        check_documents(documents, self.loaded.documents, self.loaded)
        view = copy(self)
        spans = Spans.of(documents)
        tokens = sum(tokens_of(self.loaded, key, documents).tokens for key in self._token_keys())
        view.excluded = Excluded(spans, len(spans), tokens)
        return view

    def _check(self, store: Store) -> None:
        super()._check(store)
        for key in self.required_keys if store.documents else ():
            store.record_lengths(key, 0, 0)  # says so now if only other keys have records
        if not store.documents and not self.window_size:
            raise ConfigError(
                f"{store.path} has no record boundaries, so its samples are windows: "
                "window_size must be at least 1, not 0"
            )

    @property
    def by_record(self) -> bool:
        """Whether the store knows its records."""
        return self._store is not None and self._store.documents > 0

    def __len__(self) -> int:
        return self.loaded.documents if self.by_record else super().__len__()

    @property
    def cut_records(self) -> int:
        """How many records are longer than `window_size`, and so lose tokens."""
        if not self.by_record or not self.window_size:
            return 0
        over = [self.loaded.record_lengths(key) > self.window_size for key in self.measured]
        return int(np.logical_or.reduce(over).sum())

    def _token_keys(self) -> list[str]:
        store, keys = self.loaded, self.required_keys
        return [key for key in keys if not store.is_mask(key) and store.dtype(key).kind in "iu"]

    def layout(self) -> str:
        """What a sample looks like, in words."""
        return f"samples of {type(self).__name__}"

    def __getitem__(self, index: int) -> Sample:
        at = int(self.checked([index])[0])
        keys = list(self.required_keys)
        if not self.by_record:
            return self._sample(self.loaded.read(*self.get_index(at), keys), f"window {at}")
        record = self.loaded.record(at, keys)
        if self.excluded is not None and self.excluded.spans.hold(np.array([at]))[0]:
            record |= {key: _nothing(record[key]) for key in keys if self.loaded.is_mask(key)}
        return self._sample(record, f"record {at}")

    def _sample(self, record: dict[str, Any], what: str) -> Sample:
        raise NotImplementedError

    def _belong(self, what: str, lengths: dict[str, Any]) -> None:
        """Refuse keys whose lengths, one a token or one a response, are not the same."""
        if len({str(length) for length in lengths.values()}) > 1:
            found = ", ".join(f"{key} {length}" for key, length in lengths.items())
            raise DataError(
                f"{what} of {self.loaded.path} has keys that do not belong together, by their "
                f"lengths ({found}): prepare it again"
            )


@DatasetFactory.register("dpo")
class DPODataset(RecordDataset):
    """Preference pairs: `chosen`, `rejected` and the mask of each."""

    required_keys = ("chosen", "rejected", "chosen_mask", "rejected_mask")
    measured = ("chosen", "rejected")

    def _sample(self, record: dict[str, Any], what: str) -> Sample:
        for key in self.measured:
            mask = f"{key}_mask"
            self._belong(what, {key: len(record[key]), mask: len(record[mask])})
        keep = slice(self.window_size or None)
        return {
            key: _tensor(value[keep], torch.bool if key.endswith("_mask") else torch.int64)
            for key, value in record.items()
        }

    def collate(self, samples: list[Sample]) -> Sample:
        """Samples padded to the longest of them."""
        return dpo_collate_fn(samples)


@DatasetFactory.register("grpo")
class GRPODataset(RecordDataset):
    """A prompt, its group of `responses` with `masks`, and a reward each.

    A prompt that is too long loses its start, a response its end. Over a flat store all four are
    tensors of one window, with a reward a token.
    """

    required_keys = ("prompts", "responses", "masks", "rewards")

    def _check(self, store: Store) -> None:
        super()._check(store)
        tokens, rewards = store.total("responses"), store.total("rewards")
        if not store.documents and rewards != tokens:
            raise DataError(
                f"{store.path} has {rewards:,} rewards for {tokens:,} tokens of responses and no "
                "record boundaries, so nothing says which belongs to which: give each token its "
                "reward, or prepare it again with records"
            )

    @property
    def cut_records(self) -> int:
        """How many records have a prompt or a response longer than `window_size`."""
        if not self.by_record or not self.window_size:
            return 0
        store, most = self.loaded, self.window_size
        over = store.record_lengths("prompts") > most
        # A response is no longer than all of its group together.
        unsure = np.flatnonzero(~over & (store.record_lengths("responses") > most))
        groups = (store.record(i, "responses") for i in unsure.tolist())
        return int(over.sum()) + sum(
            max(map(len, group)) > most if isinstance(group, list) else 1 for group in groups
        )

    def _sample(self, record: dict[str, Any], what: str) -> Sample:
        prompts, responses, masks, rewards = (record[key] for key in self.required_keys)
        keep = slice(self.window_size or None)
        sample = {"prompts": _tensor(prompts[-self.window_size or None :], torch.int64)}
        if isinstance(responses, list):
            self._belong(what, {"responses": _lengths(responses), "masks": _lengths(masks)})
            self._belong(what, {"responses": len(responses), "rewards": len(rewards)})
            return sample | {
                "responses": [_tensor(each[keep], torch.int64) for each in responses],
                "masks": [_tensor(each[keep], torch.bool) for each in masks],
                "rewards": _tensor(rewards, torch.float32),
            }
        self._belong(what, {"responses": len(responses), "masks": len(masks)})
        a_token = len(rewards) == len(responses)
        return sample | {
            "responses": _tensor(responses[keep], torch.int64),
            "masks": _tensor(masks[keep], torch.bool),
            "rewards": _tensor(rewards[keep] if a_token else rewards, torch.float32),
        }

    def collate(self, samples: list[Sample]) -> Sample:
        """Samples padded to the longest prompt, group and response among them."""
        return grpo_collate_fn(samples)


def dpo_collate_fn(batch: Sequence[Sample], pad_id: int = 0) -> Sample:
    """Pairs of any length, padded on the right to the longest: (B, S) each.

    >>> one = torch.tensor([1, 2]), torch.tensor([True, True])
    >>> pair = {"chosen": one[0], "chosen_mask": one[1]}
    >>> pair |= {"rejected": one[0][:1], "rejected_mask": one[1][:1]}
    >>> dpo_collate_fn([pair])["rejected"].tolist()
    [[1, 0]]
    """
    width = max((len(sample[key]) for sample in batch for key in DPODataset.measured), default=0)
    padded = {}
    for key in DPODataset.required_keys:
        rows = [sample[key] for sample in batch]
        is_mask = key.endswith("_mask")
        dtype = torch.bool if is_mask else torch.int64
        padded[key] = _padded(rows, width, 0 if is_mask else pad_id, dtype)
    return padded


def grpo_collate_fn(batch: Sequence[Sample], pad_id: int = 0) -> Sample:
    """Groups of any size, padded: the batch of all of them.

    `prompts` (B, P) are padded on the left, `responses` and `masks` (B, G, R) on the right,
    `rewards` are (B, G); `prompt_mask` (B, P) and `group_mask` (B, G) tell what is there. Windows
    of a flat store have no groups and are stacked as they are.
    """
    if any(isinstance(sample["responses"], Tensor) for sample in batch):
        return _without_groups(batch)
    size = len(batch)
    group = max((len(sample["responses"]) for sample in batch), default=0)
    prompt = max((len(sample["prompts"]) for sample in batch), default=0)
    width = max((len(each) for sample in batch for each in sample["responses"]), default=0)
    prompts = [sample["prompts"] for sample in batch]
    ones = [torch.ones(len(each), dtype=torch.bool) for each in prompts]
    there = [torch.ones(len(sample["responses"]), dtype=torch.bool) for sample in batch]

    def grouped(key: str, dtype: torch.dtype, value: int) -> Tensor:
        absent = torch.empty(0, dtype=dtype)
        rows: list[Tensor] = []
        for sample in batch:
            rows += [*sample[key], *[absent] * (group - len(sample[key]))]
        return _padded(rows, width, value, dtype).view(size, group, width)

    return {
        "prompts": _padded(prompts, prompt, pad_id, torch.int64, left=True),
        "prompt_mask": _padded(ones, prompt, 0, torch.bool, left=True),
        "responses": grouped("responses", torch.int64, pad_id),
        "masks": grouped("masks", torch.bool, 0),
        "rewards": _padded([sample["rewards"] for sample in batch], group, 0, torch.float32),
        "group_mask": _padded(there, group, 0, torch.bool),
    }


def _without_groups(batch: Sequence[Sample]) -> Sample:
    shapes = [{key: tuple(value.shape) for key, value in sample.items()} for sample in batch]
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError(
            "responses that are not grouped can only be batched as windows of one length: write "
            "the store with lists of responses (penstock.store.Key(nested=True))"
        )
    stacked: Sample = default_collate(list(batch))
    return stacked


def _padded(
    rows: Sequence[Tensor], width: int, value: int, dtype: torch.dtype, *, left: bool = False
) -> Tensor:
    padded = torch.full((len(rows), width), value, dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        (target[width - len(row) :] if left else target[: len(row)]).copy_(row)
    return padded


def _nothing(mask: Any) -> Any:
    """The mask of a record, or of each of its responses, that trains nothing."""
    return [each & False for each in mask] if isinstance(mask, list) else mask & False


def _lengths(values: Any) -> list[int]:
    return [np.size(value) for value in values]


def _tensor(array: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A fresh tensor; numpy converts, since torch knows fewer types."""
    if dtype == torch.int64:
        check_int64(array, "A record")
    names = {torch.int64: np.int64, torch.bool: np.bool_, torch.float32: np.float32}
    return torch.from_numpy(np.array(array, dtype=names[dtype]))
