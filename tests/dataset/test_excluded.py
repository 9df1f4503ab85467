"""Excluded documents: their labels are masked in every sample they are in, and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.support import assert_same, write_groups, write_npy, write_pairs, write_store

from penstock import (
    ConfigError,
    DatasetFactory,
    MemoryMappedDataset,
    MixtureDataset,
    OutOfBounds,
    PackedDataset,
    ShardWriter,
    Store,
    WindowDataset,
    open_store,
)
from penstock.dataset.excluded import Spans, excluded_in, excluding
from penstock.store import MmapStore

DOCUMENTS, FIRST = 45, 100
OUT = [(0, 3), (7, 8), (20, 31)]


def twin(folder: Path, of: Path) -> Path:
    """A store of documents as long as those of another, each token the number of its document."""
    lengths = open_store(of).record_lengths().tolist()
    with ShardWriter(folder, {"sequence": "uint16"}, max_tokens_per_shard=150) as out:
        for number, length in enumerate(lengths):
            out.append({"sequence": np.full(length, FIRST + number)})
    return folder


def rows(store: Store, **options: Any) -> PackedDataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a few rows of random masks have no label
        return PackedDataset(store, 8, bos_token_id=1, **options)


def task(kind: str) -> Callable[[Store], Any]:
    def made(store: Store) -> Any:
        return DatasetFactory.load(kind, store.path, 8, stride=5)

    return made


KINDS: dict[str, Callable[[Store], Any]] = {
    "windows": lambda store: WindowDataset(store, 8),
    "windows_packed": lambda store: WindowDataset(store, 8, pack_sequences=True),
    "rows": rows,
    "rows_crop": lambda store: rows(store, strategy="best_fit_crop", buffer_size=9, refill=4),
    "rows_concat": lambda store: rows(store, strategy="concat"),
    "rows_bos": lambda store: rows(store, bos="every"),
    "seq": task("seq"),
    "sft": task("sft"),
}


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_label_is_masked_where_its_token_is_of_an_excluded_document(
    tmp_path: Path, kind: str, masked: bool
) -> None:
    store = open_store(write_store(tmp_path / "tokens", DOCUMENTS, masked=masked))
    numbers = open_store(twin(tmp_path / "numbers", tmp_path / "tokens"))
    whole, told = KINDS[kind](store), KINDS[kind](numbers)
    assert len(whole) == len(told)
    view = whole.excluding(OUT)
    indices = np.random.default_rng(3).permutation(len(whole))
    expected, target = whole.take(indices), "target_ids" if kind in ("seq", "sft") else "labels"
    of = told.take(indices)[target].numpy() - FIRST
    out = torch.from_numpy(np.isin(of, [d for a, b in OUT for d in range(a, b)]))
    assert out.any()
    expected[target][out] = -100
    if "loss_mask" in expected:
        expected["loss_mask"][out] = False
    assert_same(view.take(indices), expected)
    assert_same(view.take(indices[:1]), _row(expected, 0, view.take(indices[:1])))
    assert view.excluded.documents == 15
    lengths = store.record_lengths()
    assert view.excluded.tokens == sum(int(lengths[a:b].sum()) for a, b in OUT)


def _row(batch: dict[str, Any], row: int, like: dict[str, Any]) -> dict[str, Any]:
    """The tensors of one row; the flat ones are those of the batch that was taken."""
    flat = ("cu_seqlens", "max_seqlen")
    return {k: like[k] if k in flat else v[row : row + 1] for k, v in batch.items()}


def test_a_view_leaves_the_dataset_as_it_is(tmp_path: Path) -> None:
    dataset = WindowDataset(open_store(write_store(tmp_path / "tokens", DOCUMENTS)), 8)
    before = dataset.take([0, 1, 2])
    view = dataset.excluding([(0, DOCUMENTS)])
    assert (view.take([0, 1, 2])["labels"] == -100).all()
    assert_same(dataset.take([0, 1, 2]), before)
    assert dataset.excluded is None
    assert view.identity() == dataset.identity()


def test_documents_that_end_at_a_token_are_numbered_by_the_packing(tmp_path: Path) -> None:
    tokens = np.array([5, 5, 3, 6, 3, 7, 7, 7, 3, 8, 3], np.uint16)
    (tmp_path / "tokens").mkdir()
    np.save(tmp_path / "tokens" / "a.npy", tokens)
    store = MmapStore().load(tmp_path / "tokens")
    dataset = PackedDataset(store, 5, eos_token_id=3, cache_dir=tmp_path / "plans")
    view = dataset.excluding([(2, 3)])
    assert (view.excluded.documents, view.excluded.tokens) == (1, 4)  # type: ignore[union-attr]
    batch, masked = dataset.take(range(len(dataset))), view.take(range(len(dataset)))
    of_it = batch["labels"] == 7
    of_it |= (batch["labels"] == 3) & (batch["input_ids"] == 7)
    batch["labels"][of_it] = -100
    assert_same(masked, batch)
    with pytest.raises(OutOfBounds, match="has 4 documents, and 4 is none of them"):
        dataset.excluding([(4, 5)])


def test_the_masks_of_excluded_pairs_train_nothing(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("dpo", write_pairs(tmp_path / "pairs", 20), 8)
    expected, view = dataset.take(range(20)), dataset.excluding([(3, 5), (19, 20)])
    for key in ("chosen_mask", "rejected_mask"):
        expected[key][[3, 4, 19]] = False
    assert_same(view.take(range(20)), expected)
    lengths = [dataset.loaded.record_lengths(key)[[3, 4, 19]] for key in ("chosen", "rejected")]
    assert view.excluded.tokens == sum(int(each.sum()) for each in lengths)


def test_the_masks_of_excluded_groups_train_nothing(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("grpo", write_groups(tmp_path / "groups", 20), 6)
    expected, view = dataset.take(range(20)), dataset.excluding([(3, 5)])
    expected["masks"][[3, 4]] = False
    assert_same(view.take(range(20)), expected)


def test_what_knows_no_documents_is_refused_in_words(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "plain", [300])
    plain = MemoryMappedDataset(folder, 9)
    store = WindowDataset(open_store(write_store(tmp_path / "tokens", DOCUMENTS)), 8)
    both = MixtureDataset([plain, store], ["plain", "tokens"])
    with pytest.raises(ConfigError, match=r"'plain' cannot be excluded.*no record boundaries"):
        excluding(both, {"plain": [(0, 1)]})
    with pytest.raises(ConfigError, match=r"'data' are excluded, and a list does not tell"):
        excluding([1, 2], {"data": [(0, 1)]})
    with pytest.raises(OutOfBounds, match=r"'tokens' cannot be excluded.*45 documents, and 45"):
        excluding(both, {"tokens": [(40, 46)]})
    with pytest.raises(ConfigError, match=r"'web' are excluded.*\['plain', 'tokens'\]"):
        excluding(both, {"web": [(0, 1)]})
    with pytest.raises(ConfigError, match=r"'web' are excluded.*its one dataset is 'data'"):
        excluding(store, {"web": [(0, 1)]})


def test_a_mixture_masks_the_documents_of_its_sources(tmp_path: Path) -> None:
    stores = [write_store(tmp_path / name, DOCUMENTS, seed=k) for k, name in enumerate("ab")]
    parts = [WindowDataset(open_store(store), 8) for store in stores]
    both = MixtureDataset(parts, ["a", "b"])
    view = excluding(both, {"b": [(2, 6)]})
    alone = parts[1].excluding([(2, 6)])
    first = len(parts[0])
    assert_same(view.take(range(first)), both.take(range(first)))
    got, expected = view.take(range(first, len(both))), alone.take(range(len(alone)))
    assert_same(got, expected | {"dataset_idx": torch.ones(len(alone), dtype=torch.int64)})
    assert excluded_in(view) == {"b": {"documents": 4, "tokens": alone.excluded.tokens}}  # type: ignore[union-attr]
    assert excluding(both, {}) is both


@given(
    st.lists(st.integers(0, 60), unique=True, max_size=10),
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.integers(1, 12),
)
def test_spans_mask_rows_as_a_set_of_their_places_does(
    edges: list[int], starts: list[int], width: int
) -> None:
    edges.sort()
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    spans, places = Spans.of(pairs), {p for a, b in pairs for p in range(a, b)}
    assert len(spans) == len(places)
    mask = spans.masked(np.array(starts), width, None)
    expected = [[start + i not in places for i in range(width)] for start in starts]
    assert (np.ones((len(starts), width), bool) if mask is None else mask).tolist() == expected
