"""`dpo` and `grpo`: one sample a record, from any store, and the collators that pad them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.dataset.stores import as_lists, astrai, check_fresh, hdf5, penstock
from torch.utils.data import DataLoader

from penstock.batch import Place
from penstock.dataset import (
    BaseDataset,
    DatasetFactory,
    DPODataset,
    GRPODataset,
    dpo_collate_fn,
    grpo_collate_fn,
)
from penstock.errors import ConfigError, DataError
from penstock.store import Key, Store

DPO: dict[str, Key | str | None] = {
    "chosen": "uint16",
    "chosen_mask": "bool",
    "rejected": "uint16",
    "rejected_mask": "bool",
}
GRPO: dict[str, Key | str | None] = {
    "prompts": "uint16",
    "responses": Key(dtype="uint16", nested=True),
    "masks": Key(dtype="bool", nested=True),
    "rewards": "float32",
}


def pair(chosen: int, rejected: int, first: int = 10) -> dict[str, Any]:
    """A preference pair of those lengths; the first two tokens of each are masked."""
    return {
        "chosen": list(range(first, first + chosen)),
        "chosen_mask": [i >= 2 for i in range(chosen)],
        "rejected": list(range(first, first + rejected)),
        "rejected_mask": [i >= 2 for i in range(rejected)],
    }


PAIRS = [pair(4, 3), pair(2, 6, 100), pair(5, 5, 200), pair(1, 0, 300)]


def group(prompt: int, *responses: int, first: int = 10) -> dict[str, Any]:
    """A prompt of that length with responses of those, and a reward of 1/8 more for each."""
    return {
        "prompts": list(range(first, first + prompt)),
        "responses": [
            list(range(first + 50 * i, first + 50 * i + n)) for i, n in enumerate(responses)
        ],
        "masks": [[j % 2 == 0 for j in range(n)] for n in responses],
        "rewards": [i / 8 - 0.25 for i in range(len(responses))],
    }


GROUPS = [group(3, 2, 4), group(1, 1, 0, 5, first=300), group(4), group(2, 3, 3, first=600)]


def stored_pairs(kind: str, path: Path) -> Path:
    """PAIRS in a format that knows records, in several shards where it can have them."""
    match kind:
        case "penstock":
            return penstock(path, PAIRS, DPO)
        case "penstock, small shards":
            return penstock(path, PAIRS, DPO, shard=9)
        case "penstock, hdf5":
            return penstock(path, PAIRS, DPO, shard=9, storage="h5")
        case "astrai":
            shards = [PAIRS[:2], PAIRS[2:]]
            arrays, offsets = [], []
            for part in shards:
                arrays.append(
                    {k: np.concatenate([np.array(r[k], "int32") for r in part]) for k in DPO}
                )
                offsets.append(
                    {k: np.cumsum([0, *(len(r[k]) for r in part)]).tolist() for k in DPO}
                )
            return astrai(path, *arrays, offsets=offsets)
    return hdf5(path / "a.h5", {key: [np.array(r[key], "int64") for r in PAIRS] for key in DPO})


RECORDED = ["penstock", "penstock, small shards", "penstock, hdf5", "astrai", "hdf5"]


def in_memory(name: str, window: int, **keys: list[Any]) -> BaseDataset:
    """A dataset over records in memory; a list in a list is a group."""
    store = Store()
    store._segments_are_records = True
    store._normalize(keys)
    dataset = DatasetFactory.create(name, window)
    dataset._check(store)
    dataset._store = store
    return dataset


# -------------------------------------------------------------------------------------------- dpo


@pytest.mark.parametrize("kind", RECORDED)
def test_a_dpo_sample_is_a_whole_record_from_any_shard_of_any_format(
    tmp_path: Path, kind: str
) -> None:
    dataset = DatasetFactory.load("dpo", stored_pairs(kind, tmp_path / "s"), window_size=0)
    assert isinstance(dataset, DPODataset)
    assert [as_lists(dataset[i]) for i in range(len(dataset))] == PAIRS
    assert dataset.cut_records == 0
    assert dataset.count == 12  # tokens of the shortest key


def test_dpo_has_the_documented_keys_and_dtypes(tmp_path: Path) -> None:
    sample = DatasetFactory.load("dpo", penstock(tmp_path / "s", PAIRS, DPO), 0)[0]
    assert {key: value.dtype for key, value in sample.items()} == {
        "chosen": torch.int64,
        "rejected": torch.int64,
        "chosen_mask": torch.bool,
        "rejected_mask": torch.bool,
    }


@pytest.mark.parametrize(("window", "cut"), [(6, 0), (5, 1), (4, 2), (3, 3), (1, 3), (0, 0)])
def test_records_longer_than_the_window_are_cut_and_counted(
    tmp_path: Path, window: int, cut: int
) -> None:
    dataset = DatasetFactory.load("dpo", penstock(tmp_path / "s", PAIRS, DPO, shard=9), window)
    assert isinstance(dataset, DPODataset)
    assert len(dataset) == len(PAIRS)
    assert dataset.cut_records == cut
    end = window or None
    for i, record in enumerate(PAIRS):
        assert as_lists(dataset[i]) == {key: value[:end] for key, value in record.items()}


def test_a_flat_dpo_store_is_windowed_as_astrai_does(tmp_path: Path) -> None:
    flat = {key: np.arange(20, dtype="int32") % 7 for key in DPO}
    dataset = DatasetFactory.load("dpo", astrai(tmp_path / "a", flat), 6, stride=4)
    assert isinstance(dataset, DPODataset)
    assert len(dataset) == (20 - 1 - 6) // 4 + 1
    assert dataset[1]["chosen"].tolist() == [4, 5, 6, 0, 1, 2]
    assert dataset[1]["rejected_mask"].tolist() == [True, True, True, False, True, True]
    assert dataset.cut_records == 0
    batch = dataset.take([0, 3])
    assert batch["rejected"].tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 0, 1, 2, 3]]


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_a_flat_store_needs_a_window(tmp_path: Path, name: str) -> None:
    keys = DPO if name == "dpo" else GRPO
    folder = astrai(tmp_path / "a", {key: np.arange(20, dtype="int32") for key in keys})
    with pytest.raises(ConfigError, match=r"no record boundaries.* window_size must be at least"):
        DatasetFactory.load(name, folder, 0)


def test_a_store_that_knows_the_records_of_some_keys_alone_is_refused(tmp_path: Path) -> None:
    flat = {key: np.arange(20, dtype="int32") for key in DPO}
    folder = astrai(tmp_path / "a", flat, offsets=[{"chosen": [0, 9, 20]}])
    with pytest.raises(DataError, match="no record offsets for 'rejected'"):
        DatasetFactory.load("dpo", folder, 4)


def test_a_record_whose_mask_has_another_length_is_named() -> None:
    dataset = in_memory(
        "dpo",
        0,
        chosen=[np.arange(3), np.arange(4)],
        chosen_mask=[np.ones(3, bool), np.ones(5, bool)],
        rejected=[np.arange(3), np.arange(4)],
        rejected_mask=[np.ones(3, bool), np.ones(4, bool)],
    )
    _ = dataset[0]
    with pytest.raises(DataError, match=r"record 1 .*chosen 4, chosen_mask 5.*prepare it again"):
        _ = dataset[1]


@pytest.mark.parametrize("index", [4, -1, True, np.int64(4)])
def test_an_index_outside_is_an_index_error_on_both_sides(tmp_path: Path, index: Any) -> None:
    dataset = DatasetFactory.load("dpo", penstock(tmp_path / "s", PAIRS, DPO), 0)
    with pytest.raises(IndexError):
        _ = dataset[index]
    with pytest.raises(IndexError):
        dataset.take([index])


def test_dpo_batches_are_padded_on_the_right_to_the_longest_of_all(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("dpo", penstock(tmp_path / "s", PAIRS, DPO), 0)
    assert as_lists(dataset.take([0, 1, 3])) == {
        "chosen": [[10, 11, 12, 13, 0, 0], [100, 101, 0, 0, 0, 0], [300, 0, 0, 0, 0, 0]],
        "rejected": [[10, 11, 12, 0, 0, 0], [100, 101, 102, 103, 104, 105], [0] * 6],
        "chosen_mask": [
            [False, False, True, True, False, False],
            [False] * 6,
            [False] * 6,
        ],
        "rejected_mask": [
            [False, False, True, False, False, False],
            [False, False, True, True, True, True],
            [False] * 6,
        ],
    }


def test_the_dpo_padding_is_what_the_caller_says_and_masks_stay_false(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("dpo", penstock(tmp_path / "s", PAIRS, DPO), 0)
    batch = dpo_collate_fn([dataset[0], dataset[3]], pad_id=9)
    assert batch["chosen"].tolist() == [[10, 11, 12, 13], [300, 9, 9, 9]]
    assert batch["rejected"].tolist() == [[10, 11, 12, 9], [9, 9, 9, 9]]
    assert not batch["rejected_mask"][1].any()
    assert batch["rejected_mask"].dtype == torch.bool


# ------------------------------------------------------------------------------------------- grpo


@pytest.mark.parametrize("storage", ["bin", "h5"])
@pytest.mark.parametrize("shard", [1 << 20, 12])
def test_a_grpo_sample_is_a_prompt_and_its_group(tmp_path: Path, storage: Any, shard: int) -> None:
    folder = penstock(tmp_path / "s", GROUPS, GRPO, shard=shard, storage=storage)
    dataset = DatasetFactory.load("grpo", folder, 0)
    assert isinstance(dataset, GRPODataset)
    assert [as_lists(dataset[i]) for i in range(len(dataset))] == GROUPS


def test_grpo_has_the_documented_keys_and_dtypes(tmp_path: Path) -> None:
    sample = DatasetFactory.load("grpo", penstock(tmp_path / "s", GROUPS, GRPO), 0)[0]
    assert list(sample) == ["prompts", "responses", "masks", "rewards"]
    assert sample["prompts"].dtype == torch.int64
    assert [each.dtype for each in sample["responses"]] == [torch.int64] * 2
    assert [each.dtype for each in sample["masks"]] == [torch.bool] * 2
    assert sample["rewards"].dtype == torch.float32


def test_rewards_keep_their_fractions(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("grpo", penstock(tmp_path / "s", GROUPS, GRPO), 0)
    assert dataset[1]["rewards"].tolist() == [-0.25, -0.125, 0.0]
    assert dataset.take([1])["rewards"].tolist() == [[-0.25, -0.125, 0.0]]
    whole = in_memory(
        "grpo",
        0,
        prompts=[np.arange(2)],
        responses=[[np.arange(2), np.arange(3)]],
        masks=[[np.ones(2, bool), np.ones(3, bool)]],
        rewards=[np.array([1, 0])],
    )
    assert whole[0]["rewards"].dtype == torch.float32


@pytest.mark.parametrize(("window", "cut"), [(0, 0), (5, 0), (4, 1), (3, 3), (2, 4), (1, 4)])
def test_a_long_prompt_loses_its_start_and_a_long_response_its_end(
    tmp_path: Path, window: int, cut: int
) -> None:
    dataset = DatasetFactory.load("grpo", penstock(tmp_path / "s", GROUPS, GRPO, shard=9), window)
    assert isinstance(dataset, GRPODataset)
    assert dataset.cut_records == cut
    for i, record in enumerate(GROUPS):
        sample = as_lists(dataset[i])
        assert sample["prompts"] == record["prompts"][-window:]
        assert sample["responses"] == [each[: window or None] for each in record["responses"]]
        assert sample["masks"] == [each[: window or None] for each in record["masks"]]
        assert sample["rewards"] == record["rewards"]


def test_a_flat_grpo_store_is_windowed_with_a_reward_a_token(tmp_path: Path) -> None:
    flat = {
        "prompts": np.arange(20, dtype="int32"),
        "responses": np.arange(100, 120, dtype="int32"),
        "masks": np.ones(20, "int32"),
        "rewards": np.arange(20, dtype="float32") / 4,
    }
    dataset = DatasetFactory.load("grpo", astrai(tmp_path / "a", flat), 6)
    assert len(dataset) == 3
    assert as_lists(dataset[1]) == {
        "prompts": [6, 7, 8, 9, 10, 11],
        "responses": [106, 107, 108, 109, 110, 111],
        "masks": [True] * 6,
        "rewards": [1.5, 1.75, 2.0, 2.25, 2.5, 2.75],
    }
    batch = dataset.take([0, 2])
    assert {key: tuple(value.shape) for key, value in batch.items()} == {
        "prompts": (2, 6),
        "responses": (2, 6),
        "masks": (2, 6),
        "rewards": (2, 6),
    }


def test_a_flat_grpo_store_with_a_reward_a_response_is_refused(tmp_path: Path) -> None:
    flat = {key: np.arange(20, dtype="int32") for key in ("prompts", "responses", "masks")}
    for rewards in (np.ones(4, "float32"), np.ones(4, "int32")):
        folder = astrai(tmp_path / rewards.dtype.name, {**flat, "rewards": rewards})
        with pytest.raises(DataError, match="4 rewards for 20 tokens of responses and no record"):
            DatasetFactory.load("grpo", folder, 6)


def test_tokens_of_records_that_int64_would_turn_negative_are_refused() -> None:
    ids = np.array([1, 2**63], np.uint64)
    mask = np.ones(2, bool)
    keys = {"chosen": [ids], "rejected": [ids], "chosen_mask": [mask], "rejected_mask": [mask]}
    with pytest.raises(DataError, match="holds the token 9223372036854775808"):
        _ = in_memory("dpo", 0, **keys)[0]


def test_grpo_batches_pad_prompts_on_the_left_and_groups_to_the_largest(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("grpo", penstock(tmp_path / "s", GROUPS, GRPO), 0)
    batch = dataset.take([0, 1, 2])
    assert as_lists(batch) == {
        "prompts": [[0, 10, 11, 12], [0, 0, 0, 300], [10, 11, 12, 13]],
        "prompt_mask": [[False, True, True, True], [False] * 3 + [True], [True] * 4],
        "responses": [
            [[10, 11, 0, 0, 0], [60, 61, 62, 63, 0], [0] * 5],
            [[300, 0, 0, 0, 0], [0] * 5, [400, 401, 402, 403, 404]],
            [[0] * 5] * 3,
        ],
        "masks": [
            [[True, False, False, False, False], [True, False, True, False, False], [False] * 5],
            [[True, False, False, False, False], [False] * 5, [True, False, True, False, True]],
            [[False] * 5] * 3,
        ],
        "rewards": [[-0.25, -0.125, 0.0], [-0.25, -0.125, 0.0], [0.0] * 3],
        "group_mask": [[True, True, False], [True, True, True], [False] * 3],
    }
    dtypes = {key: value.dtype for key, value in batch.items()}
    assert dtypes["rewards"] == torch.float32
    assert {dtypes[k] for k in ("masks", "prompt_mask", "group_mask")} == {torch.bool}
    assert {dtypes[k] for k in ("prompts", "responses")} == {torch.int64}


def test_an_empty_response_stays_in_its_group_with_its_reward(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("grpo", penstock(tmp_path / "s", GROUPS, GRPO), 0)
    assert [len(each) for each in dataset[1]["responses"]] == [1, 0, 5]
    batch = dataset.take([1])
    assert batch["group_mask"].tolist() == [[True, True, True]]
    assert batch["rewards"][0, 1] == -0.125
    assert not batch["masks"][0, 1].any()


def test_the_grpo_padding_is_what_the_caller_says(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("grpo", penstock(tmp_path / "s", GROUPS, GRPO), 0)
    batch = grpo_collate_fn([dataset[0], dataset[2]], pad_id=9)
    assert batch["prompts"].tolist() == [[9, 10, 11, 12], [10, 11, 12, 13]]
    assert batch["responses"].tolist() == [[[10, 11, 9, 9], [60, 61, 62, 63]], [[9] * 4] * 2]
    assert not batch["masks"][1].any()


@pytest.mark.parametrize(
    ("spoiled", "found"),
    [
        ({"masks": [[np.ones(2, bool), np.ones(4, bool)]]}, r"responses \[2, 3\], masks \[2, 4\]"),
        ({"masks": [[np.ones(2, bool)]]}, r"responses \[2, 3\], masks \[2\]"),
        ({"masks": [np.ones(5, bool)]}, r"responses \[2, 3\], masks \[1, 1, 1, 1, 1\]"),
        ({"rewards": [np.ones(3, np.float32)]}, r"responses 2, rewards 3"),
    ],
)
def test_a_group_whose_keys_do_not_belong_together_is_refused(
    spoiled: dict[str, Any], found: str
) -> None:
    keys = {
        "prompts": [np.arange(2)],
        "responses": [[np.arange(2), np.arange(3)]],
        "masks": [[np.ones(2, bool), np.ones(3, bool)]],
        "rewards": [np.ones(2, np.float32)],
    }
    dataset = in_memory("grpo", 0, **{**keys, **spoiled})
    with pytest.raises(DataError, match=f"record 0 .*{found}"):
        _ = dataset[0]


def test_responses_without_groups_are_batched_only_where_they_have_one_length() -> None:
    dataset = in_memory(
        "grpo",
        0,
        prompts=[np.arange(2), np.arange(2), np.arange(2)],
        responses=[np.arange(3), np.arange(3), np.arange(4)],
        masks=[np.ones(3, bool), np.ones(3, bool), np.ones(4, bool)],
        rewards=[np.ones(1), np.ones(1), np.ones(1)],
    )
    assert dataset.take([0, 1])["responses"].shape == (2, 3)
    with pytest.raises(ConfigError, match="not grouped"):
        dataset.take([0, 2])


def test_a_reward_a_token_is_cut_with_its_tokens() -> None:
    dataset = in_memory(
        "grpo",
        2,
        prompts=[np.arange(5)],
        responses=[np.arange(3)],
        masks=[np.ones(3, bool)],
        rewards=[np.array([0.5, 0.25, 0.125])],
    )
    assert as_lists(dataset[0]) == {
        "prompts": [3, 4],
        "responses": [0, 1],
        "masks": [True, True],
        "rewards": [0.5, 0.25],
    }


# ------------------------------------------------------------------------------- both of them


@pytest.fixture(params=["dpo", "grpo"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> BaseDataset:
    records, keys = (PAIRS, DPO) if request.param == "dpo" else (GROUPS, GRPO)
    return DatasetFactory.load(request.param, penstock(tmp_path / "s", records, keys, shard=9), 4)


def test_take_is_the_items_collated(dataset: BaseDataset) -> None:
    indices = [2, 0, 0, 3]
    batch = dataset.take(indices)
    assert as_lists(batch) == as_lists(dataset.collate([dataset[i] for i in indices]))
    loader = DataLoader(dataset, batch_size=4, sampler=indices, collate_fn=dataset.collate)
    assert as_lists(next(iter(loader))) == as_lists(batch)


def test_gathered_batches_are_those_taken_alone_here_or_at_a_place(dataset: BaseDataset) -> None:
    group = dataset.gather(np.arange(4))
    place = Place(torch.device("cpu"))
    for lo, hi in ((0, 1), (1, 4)):
        expected = as_lists(dataset.take(range(lo, hi)))
        assert as_lists(group.batch(lo, hi, None)) == expected
        assert as_lists(group.batch(lo, hi, place)) == expected


def test_every_batch_has_tensors_of_its_own(dataset: BaseDataset) -> None:
    check_fresh(dataset[0], dataset[0], dataset.take([0]), dataset.take([0, 1]), dataset.take([0]))


def test_take_of_nothing_is_an_empty_batch(dataset: BaseDataset) -> None:
    empty, full = dataset.take([]), dataset.take([0])
    assert set(empty) == set(full)
    for key, value in empty.items():
        assert len(value) == 0
        assert value.dtype == full[key].dtype
        assert value.dim() == full[key].dim()
