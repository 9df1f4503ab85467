"""What the trainer gets: tensors of its own, the same wherever they are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.loader.support import (
    EOS,
    Kind,
    Squares,
    assert_same,
    make_kinds,
    write_npy,
)

from penstock import (
    ConfigError,
    DataConfig,
    DistributedSampler,
    MemoryMappedDataset,
    StatefulDataLoader,
)
from penstock.config import TOKEN_DTYPES

KINDS = (
    "windows", "packed", "store", "store_packed", "seq", "sft", "dpo", "grpo",
    "items", "tuples", "taking", "mixture", "mixture_packed", "mixture_items", "mixture_sft",
)  # fmt: skip
ONE_THREAD = DataConfig(num_workers=1)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return make_kinds(tmp_path_factory.mktemp("kinds"))


def make(dataset: Any, batch_size: int = 4, **options: Any) -> StatefulDataLoader:
    options.setdefault("config", ONE_THREAD)
    options.setdefault("workers", "thread")
    return StatefulDataLoader(dataset, batch_size, DistributedSampler(dataset, 1, 0), **options)


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors(value)


# ---------------------------------------------------------------------------------------- fresh


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", KINDS)
def test_no_two_tensors_of_any_two_batches_share_memory(
    kinds: dict[str, Kind], name: str, batch_size: int, device: str | None
) -> None:
    kept = [list(tensors(batch)) for batch in make(kinds[name].dataset, batch_size, device=device)]
    spans = sorted(
        (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        for batch in kept
        for storage in (tensor.untyped_storage() for tensor in batch)
    )
    assert len(spans) > 10
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(tensor.is_contiguous() for batch in kept for tensor in batch)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("name", KINDS)
def test_a_batch_that_is_overwritten_changes_no_other(
    kinds: dict[str, Kind], name: str, device: str | None
) -> None:
    dataset = kinds[name].dataset
    expected = list(make(dataset, 2, device=device))
    loader = make(dataset, 2, device=device)
    for number, batch in enumerate(loader):
        assert_same(batch, expected[number])
        for tensor in tensors(batch):
            tensor.fill_(1)
    assert_same(next(iter(make(dataset, 2))), expected[0])


def test_a_batch_kept_alone_keeps_only_its_own_memory(kinds: dict[str, Kind]) -> None:
    for batch in make(kinds["packed"].dataset, 4):
        for tensor in tensors(batch):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


# -------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_batches_sent_to_the_cpu_are_those_made_there(
    kinds: dict[str, Kind], name: str, batch_size: int
) -> None:
    dataset = kinds[name].dataset
    here, sent = make(dataset, batch_size), make(dataset, batch_size, device="cpu")
    for a, b in zip(here, sent, strict=True):
        assert_same(b, a)


@pytest.mark.parametrize("dtype", TOKEN_DTYPES)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_tokens_of_every_width_arrive_whole(tmp_path: Any, dtype: str, batch_size: int) -> None:
    top = min(np.iinfo(dtype).max, 2**63 - 1)
    tokens = np.full(120, top, dtype)
    tokens[::7] = EOS
    np.save(tmp_path / "tokens.npy", tokens)
    dataset = MemoryMappedDataset(tmp_path, 6, pack_sequences=True, eos_token_id=EOS)
    loaders = [make(dataset, batch_size, device=device) for device in (None, "cpu")]
    for here, sent in zip(*loaders, strict=True):
        assert_same(sent, here)
        assert set(here["input_ids"].unique().tolist()) <= {EOS, top}
        assert set(here["labels"].unique().tolist()) <= {EOS, top, -100}


def test_a_cuda_device_without_cuda_is_an_error_in_words() -> None:
    with pytest.raises(ConfigError, match="device cuda:0 was asked for, and torch finds no CUDA"):
        make(Squares(), device="cuda:0")


def test_pin_memory_without_cuda_does_nothing_in_silence(kinds: dict[str, Kind]) -> None:
    config = DataConfig(num_workers=0, pin_memory=True)
    for batch in make(kinds["windows"].dataset, config=config):
        assert not any(tensor.is_pinned() for tensor in tensors(batch))


class Edge:
    """A CUDA device that is not there: what is pinned, and what travels, is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: list[torch.dtype] = []
        self.sent: list[tuple[torch.dtype, bool, bool]] = []  # dtype, was pinned, non-blocking
        self._kept: list[torch.Tensor] = []  # so that no address is used twice
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.Tensor, "pin_memory", self._pin())
        monkeypatch.setattr(torch.Tensor, "to", self._to())

    def _pin(self) -> Any:
        def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
            self.pinned.append(tensor.dtype)
            copy = tensor.clone()
            self._kept.append(copy)
            return copy

        return pin_memory

    def _to(self) -> Any:
        real = torch.Tensor.to

        def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            if not isinstance(args[0], torch.device) or args[0].type != "cuda":
                return real(tensor, *args, **options)
            pinned = any(tensor is each for each in self._kept)
            self.sent.append((tensor.dtype, pinned, options["non_blocking"]))
            return tensor.clone()

        return to


@pytest.mark.parametrize("name", KINDS)
def test_with_cuda_batches_are_pinned_and_copied_without_blocking(
    kinds: dict[str, Kind], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = kinds[name].dataset
    expected = list(make(dataset))
    edge = Edge(monkeypatch)
    for a, b in zip(expected, make(dataset, device="cuda"), strict=True):
        assert_same(b, a)
    assert edge.sent
    assert all(pinned and non_blocking for _, pinned, non_blocking in edge.sent)
    assert len(edge.pinned) == len(edge.sent)


def test_tokens_travel_as_narrow_as_they_are_stored(
    kinds: dict[str, Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = Edge(monkeypatch)
    batches = list(make(kinds["windows"].dataset, device="cuda"))
    assert Counter(edge.sent) == {(torch.int16, True, True): len(batches)}


def test_without_pin_memory_nothing_is_pinned_and_copies_block(
    kinds: dict[str, Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = Edge(monkeypatch)
    config = DataConfig(num_workers=0, pin_memory=False)
    list(make(kinds["windows"].dataset, config=config, device="cuda"))
    assert not edge.pinned
    assert {(pinned, asynchronous) for _, pinned, asynchronous in edge.sent} == {(False, False)}


@pytest.mark.parametrize("name", ["windows", "tuples", "grpo"])
def test_with_cuda_but_no_device_batches_stay_here_pinned(
    kinds: dict[str, Kind], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = kinds[name].dataset
    expected = list(make(dataset))
    edge = Edge(monkeypatch)
    got = list(make(dataset))
    assert_same(got, expected)
    assert len(edge.pinned) == sum(len(list(tensors(batch))) for batch in expected)
    assert not edge.sent


# ------------------------------------------------------------------------------------- defaults


def test_the_default_config_works_for_a_mapped_dataset(tmp_path: Any) -> None:
    dataset = MemoryMappedDataset(write_npy(tmp_path / "t", [2000]), 9)
    loader = StatefulDataLoader(dataset, 4, DistributedSampler(dataset, 1, 0))
    assert loader.config.num_workers == 4
    assert len(list(loader)) == len(dataset) // 4


def test_without_a_sampler_the_order_is_shuffled_over_the_ranks_there_are() -> None:
    loader = StatefulDataLoader(Squares(12), 4, config=DataConfig(num_workers=0))
    seen = torch.cat([batch["square"] for batch in loader])
    assert sorted(seen.tolist()) == [i**2 for i in range(12)]
    assert seen.tolist() != sorted(seen.tolist())


def test_a_collate_function_makes_the_batches_of_any_dataset(kinds: dict[str, Kind]) -> None:
    def shapes(samples: list[Any]) -> list[tuple[int, ...]]:
        return [tuple(sample["input_ids"].shape) for sample in samples]

    for name, workers in (("windows", "thread"), ("windows", "auto"), ("items", "thread")):
        dataset = kinds[name].dataset
        width = 4 if name == "items" else 8
        got = list(make(dataset, collate_fn=shapes, workers=workers))
        assert got == [[(width,)] * 4] * (len(dataset) // 4)


def test_own_masks_of_a_packed_batch_agree_with_each_other(kinds: dict[str, Kind]) -> None:
    for batch in make(kinds["mixture_packed"].dataset, 5):
        docs, lengths = batch["doc_ids"], batch["cu_seqlens"].diff()
        assert int(lengths.sum()) == docs.numel()
        assert int(lengths.max()) == batch["max_seqlen"]
        starts = (batch["position_ids"] == 0).flatten().nonzero().flatten()
        assert starts.tolist() == batch["cu_seqlens"][:-1].tolist()
        assert len(lengths) == int((docs.max(1).values + 1).sum())
