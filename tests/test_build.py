"""From a `[data]` table to batches: which path is taken, and that what was planned is delivered."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.loader.support import EOS, write_npy, write_pairs, write_store

from penstock import (
    ConfigError,
    DataConfig,
    DatasetSource,
    MemoryMappedDataset,
    MissingData,
    MixtureDataset,
    PackedDataset,
    StatefulDataLoader,
    TrainingPhase,
    WindowDataset,
    build_dataloader,
)
from penstock.store import ShardWriter


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def build(config: Any, **options: Any) -> StatefulDataLoader:
    return build_dataloader(config, **{"batch_size": 4, "seq_len": 8, **options})


def tokens_of(name: str, folder: Path, *, vocabulary: int = 60_000, **config: Any) -> Path:
    """The files of a tokenizer that say what its end-of-text token and its vocabulary are."""
    folder.mkdir()
    table = {"<eos>": EOS, "last": vocabulary - 1}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": table}, "added_tokens": []})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", **config}))
    return folder


# ------------------------------------------------------------------------------------ the paths


def test_batches_are_dicts_of_int64_in_batch_size_by_seq_len(tmp_path: Path) -> None:
    for path in (write_npy(tmp_path / "npy", [500]), write_store(tmp_path / "store", 60)):
        batch = next(iter(build(DataConfig(str(path)))))
        assert set(batch) == {"input_ids", "labels"}
        assert all(value.shape == (4, 8) for value in batch.values())
        assert all(value.dtype == torch.int64 for value in batch.values())


def test_a_folder_of_files_and_a_store_take_their_own_datasets(tmp_path: Path) -> None:
    files = build(DataConfig(str(write_npy(tmp_path / "npy", [500]))))
    assert isinstance(files.dataset, MemoryMappedDataset)
    assert files.dataset.seq_len == 9  # windows of seq_len + 1, as the training script cuts them
    store = build(DataConfig(str(write_store(tmp_path / "store", 60)), file_pattern="*.nothing"))
    assert isinstance(store.dataset, WindowDataset)  # file_pattern is unused here


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_stores_of_both_formats_give_the_same_batches(tmp_path: Path, storage: Any) -> None:
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path / "s", {"sequence": "uint16"}, storage=storage) as writer:
        for _ in range(40):
            writer.append({"sequence": rng.integers(0, 999, 11)})
    rows = [batch["labels"].tolist() for batch in build(DataConfig(str(tmp_path / "s")))]
    with ShardWriter(tmp_path / "t", {"sequence": "uint16"}) as writer:
        rng = np.random.default_rng(0)
        for _ in range(40):
            writer.append({"sequence": rng.integers(0, 999, 11)})
    assert rows == [batch["labels"].tolist() for batch in build(DataConfig(str(tmp_path / "t")))]


def test_packed_batches_carry_all_that_varlen_attention_needs(tmp_path: Path) -> None:
    tokenizer = tokens_of("t", tmp_path / "tok")
    config = DataConfig(
        str(write_npy(tmp_path / "npy", [500])), tokenizer_path=str(tokenizer), pack_sequences=True
    )
    batch = next(iter(build(config)))
    assert {"doc_ids", "position_ids", "cu_seqlens", "max_seqlen"} < set(batch)
    assert int(batch["cu_seqlens"][-1]) == 4 * 8
    after_eos = batch["input_ids"] == EOS
    assert (batch["labels"][after_eos] == -100).all()


def test_pack_sequences_without_anything_that_names_eos_says_what_to_set(tmp_path: Path) -> None:
    config = DataConfig(str(write_npy(tmp_path / "npy", [500])), pack_sequences=True)
    with pytest.raises(ConfigError, match="set tokenizer_path"):
        build(config)


@pytest.mark.parametrize("packing", ["concat", "best_fit_crop", "best_fit_decreasing", "bfd"])
def test_packing_makes_rows_of_documents_from_a_store_or_from_token_files(
    tmp_path: Path, packing: str
) -> None:
    tokenizer = tokens_of("t", tmp_path / "tok")
    for path in (
        write_npy(tmp_path / "npy", [900]),
        write_store(tmp_path / "store", 90, masked=False),
    ):
        config = DataConfig(str(path), packing=packing, tokenizer_path=str(tokenizer))
        loader = build(config)
        assert isinstance(loader.dataset, PackedDataset)
        batch = next(iter(loader))
        assert batch["input_ids"].shape == (4, 8)
        assert {"doc_ids", "position_ids", "cu_seqlens", "max_seqlen"} < set(batch)
        again = build(config)
        again.load_state_dict(loader.state_dict())
        assert torch.equal(next(iter(again))["labels"], next(iter(loader))["labels"])


def test_packed_sources_mix_and_share_attention_evenly(tmp_path: Path) -> None:
    sources = [
        DatasetSource(str(write_store(tmp_path / name, 90, masked=False, seed=seed)))
        for seed, name in enumerate("ab")
    ]
    config = DataConfig(datasets=sources, packing="bfd_split", balance="attention")
    ranks = [build(config, batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    assert ranks[0].dataset.balanced
    one = build(config, batch_size=4)
    for whole, *parts in zip(one, *ranks, strict=True):
        rows = torch.cat([part["input_ids"] for part in parts]).tolist()
        assert sorted(rows) == sorted(whole["input_ids"].tolist())


def test_a_packing_that_does_not_exist_is_answered_with_those_that_do(tmp_path: Path) -> None:
    path = str(write_store(tmp_path / "store", 60))
    with pytest.raises(ConfigError, match=r"packing is one of concat, .* \(meant: concat\?\)"):
        build(DataConfig(path, packing="conct"))
    with pytest.raises(ConfigError, match="balance must be one of attention, found 'tokens'"):
        DataConfig(path, packing="concat", balance="tokens")
    with pytest.raises(ConfigError, match="balance deals out packed rows: set packing, too"):
        DataConfig(path, balance="attention")


def test_a_raw_bin_takes_its_dtype_from_the_config_else_the_vocabulary_else_says_how(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    ids = np.arange(500) % 300
    ids.astype("uint32").tofile(folder / "a.bin")
    config = DataConfig(str(folder), file_pattern="*.bin")
    with pytest.raises(ConfigError, match="dtype"):
        build(config)
    small = tokens_of("small", tmp_path / "small", vocabulary=300)
    large = tokens_of("large", tmp_path / "large", vocabulary=100_000)
    stated = DataConfig(str(folder), file_pattern="*.bin", token_dtype="uint32")
    by_vocabulary = DataConfig(str(folder), file_pattern="*.bin", tokenizer_path=str(large))
    for each in (stated, by_vocabulary):
        loader = build(each)
        assert loader.dataset.store.total("sequence") == 500
        assert next(iter(loader))["input_ids"].max() < 300
    narrow = DataConfig(str(folder), file_pattern="*.bin", tokenizer_path=str(small))
    assert build(narrow).dataset.store.total("sequence") == 1000  # uint16, as the words say


def test_a_dtype_beside_raw_files_does_not_make_a_store_of_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    np.arange(100, dtype=np.uint16).tofile(folder / "train.bin")
    np.arange(100, 200, dtype=np.uint16).tofile(folder / "val.bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint16"}))
    config = DataConfig(str(folder), file_pattern="train*.bin")
    loader = build(config)
    assert isinstance(loader.dataset, MemoryMappedDataset)
    assert max(int(batch["labels"].max()) for batch in loader) < 100
    stated = DataConfig(str(folder), file_pattern="train*.bin", token_dtype="uint32")
    assert build(stated).dataset.store.total("sequence") == 50
    (folder / "meta.json").write_text(json.dumps({"val": {"dtype": "uint16"}}))
    with pytest.raises(ConfigError, match=r"train\.bin has a meta\.json .* states no dtype"):
        build(config)
    small = tokens_of("small", tmp_path / "small", vocabulary=300)
    config = DataConfig(str(folder), file_pattern="train*", tokenizer_path=str(small))
    assert build(config).dataset.store.total("sequence") == 100


def test_files_that_match_come_before_a_store_in_a_folder_below(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "npy", [500])
    with ShardWriter(folder / "val", {"sequence": "uint16"}, storage="h5") as writer:
        writer.append({"sequence": [1] * 200})
    write_store(folder / "other", 60)
    loader = build(DataConfig(str(folder)))
    assert isinstance(loader.dataset, MemoryMappedDataset)
    assert loader.dataset.store.total("sequence") == 500


def test_stores_in_folders_below_are_read_where_no_file_matches(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        np.arange(50, dtype=np.int32).tofile(tmp_path / name / "sequence.bin")
        meta = {"sequence": {"shape": [50], "dtype": "int32"}}
        (tmp_path / name / "meta.json").write_text(json.dumps(meta))
    loader = build(DataConfig(str(tmp_path)))
    assert isinstance(loader.dataset, WindowDataset)
    assert loader.dataset.store.total("sequence") == 100


def test_a_toml_file_does_as_a_config_does(tmp_path: Path) -> None:
    path = write_npy(tmp_path / "npy", [500])
    toml = tmp_path / "run.toml"
    toml.write_text(f'[data]\ndataset_path = "{path}"\n[train]\nsteps = 3\n')
    rows = [batch["labels"].tolist() for batch in build(toml)]
    assert rows == [batch["labels"].tolist() for batch in build(DataConfig(str(path)))]


def test_what_is_missing_or_cannot_be_trained_on_is_said(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="nowhere"):
        build(DataConfig(str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="no sample of 8 inputs"):
        build(DataConfig(str(write_npy(tmp_path / "short", [8]))))
    with pytest.raises(ValueError, match="DatasetFactory"):
        build(DataConfig(str(write_pairs(tmp_path / "pairs", 9))))
    with pytest.raises(ConfigError, match="seq_len must be at least 1"):
        build(DataConfig(str(write_npy(tmp_path / "npy", [80]))), seq_len=0)
    with pytest.raises(ConfigError, match="split is"):
        build(DataConfig(str(tmp_path / "npy")), split="test")


def test_sources_made_with_different_tokenizers_do_not_mix(tmp_path: Path) -> None:
    for name in "abc":
        meta = {"tokenizer": "x" if name != "c" else "y"}
        with ShardWriter(tmp_path / name, {"sequence": "uint16"}, metadata=meta) as writer:
            writer.append({"sequence": np.arange(200)})
    sources = [DatasetSource(str(tmp_path / name)) for name in "abc"]
    build(DataConfig(datasets=sources[:2]))
    with pytest.raises(ConfigError, match="'a' and 'c' were made with different tokenizers"):
        build(DataConfig(datasets=sources))


# ----------------------------------------------------------------------------------------- ranks


def test_ranks_come_from_arguments_else_the_environment_else_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(str(write_npy(tmp_path / "npy", [500])))
    assert build(config).sampler.num_replicas == 1
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = build(config).sampler
    assert (sampler.rank, sampler.num_replicas) == (2, 3)
    sampler = build(config, rank=0, world_size=1).sampler
    assert (sampler.rank, sampler.num_replicas) == (0, 1)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ConfigError, match="RANK='two'"):
        build(config)


# ---------------------------------------------------------------------------------------- honest


def three_sources(root: Path, **changed: Any) -> DataConfig:
    lengths = {"web": [3000], "code": [900, 501], "prose": [700]}
    for seed, (name, files) in enumerate(lengths.items()):
        write_npy(root / name, files, seed=seed)
    names = list(lengths)
    return DataConfig(
        datasets=[
            DatasetSource(str(root / n), w) for n, w in zip(names, (5, 2, 1e-3), strict=True)
        ],
        phases=[TrainingPhase(17, {"web": 0.5}), TrainingPhase(50, {"web": 0, "prose": 3})],
        **changed,
    )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_three_epochs_of_a_mixture_deliver_exactly_the_counts_that_were_planned(
    tmp_path: Path, world: int
) -> None:
    config = three_sources(tmp_path)
    ranks = [
        build(config, batch_size=12 // world, rank=rank, world_size=world, seed=3)
        for rank in range(world)
    ]
    order, names = ranks[0].sampler.order, ranks[0].dataset.dataset_names
    assert [stage.position for stage in order.stages] == [0, 17 * 12, 50 * 12]
    delivered: Counter[str] = Counter()
    for epoch in range(3):
        before = dict(delivered)
        planned = order.counts(ranks[0].position), None
        for batches in zip(*ranks, strict=True):
            for batch in batches:
                delivered.update(names[k] for k in batch["dataset_idx"].tolist())
        counts = order.counts(ranks[0].position)
        gained = {name: delivered[name] - before.get(name, 0) for name in names}
        assert gained == dict(zip(names, (counts - planned[0]).tolist(), strict=True)), epoch
        stats = ranks[0].stats()["samples_by_source"]
        assert stats == {name: delivered[name] for name in names}
    assert sum(delivered.values()) == ranks[0].position >= 3 * len(ranks[0].dataset)


def test_no_sample_comes_twice_before_its_source_is_used_up(tmp_path: Path) -> None:
    loader = build(three_sources(tmp_path), batch_size=8)
    dataset = loader.dataset
    assert isinstance(dataset, MixtureDataset)
    order = loader.sampler.order
    drawn = order.indices(np.arange(3 * len(dataset)))
    for lo, hi in zip(dataset.cumulative_sizes, dataset.cumulative_sizes[1:], strict=False):
        own = drawn[(lo <= drawn) & (drawn < hi)]
        for start in range(0, len(own), hi - lo):
            stretch = own[start : start + hi - lo]
            assert len(set(stretch.tolist())) == len(stretch)


def test_weights_of_tokens_become_weights_of_samples(tmp_path: Path) -> None:
    """With samples of one length for every source the two are the same."""
    by_samples = build(three_sources(tmp_path / "a")).sampler.stages
    by_tokens = build(three_sources(tmp_path / "b", weights_count="tokens")).sampler.stages
    assert by_samples == by_tokens
