"""From `hf_name` and `hf_dataset_name` in TOML to batches: what was planned is delivered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.hub.support import documents, rows_of, windows, write
from tests.text.tokenizers_for_tests import gpt2_like, llama3_like

from penstock import (
    ConfigError,
    DataConfig,
    DatasetSource,
    DistributedSampler,
    HuggingFaceDataset,
    MixtureDataset,
    PackedDataset,
    Pipeline,
    StatefulDataLoader,
    StateMismatch,
    build_dataloader,
    edit_state,
)
from penstock.prepare import recipe

T = 32


def build(config: Any, **options: Any) -> StatefulDataLoader:
    return build_dataloader(config, **{"batch_size": 4, "seq_len": T, **options})


def tokenized(folder: Path, split: str = "train") -> Path:
    """The same folder, once it has been tokenized in this very process."""
    HuggingFaceDataset(folder, split, "text", T, gpt2_like(), workers=0, backend="reference")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "d", "jsonl", "test", documents(30, seed=5))
    return tokenized(write(tmp_path / "d", "jsonl", "train", documents(60)))


def test_a_dataset_of_the_hub_is_read_whole_and_shuffled(tmp_path: Path) -> None:
    texts = documents(60)
    toml = tmp_path / "run.toml"
    toml.write_text(
        "[data]\n"
        f'hf_dataset_name = "{write(tmp_path / "d", "parquet", "train", texts)}"\n'
        f'tokenizer_path = "{gpt2_like()}"\n'
    )
    loader = build(toml, batch_size=1)
    assert isinstance(loader.dataset, HuggingFaceDataset)
    assert isinstance(loader.sampler, DistributedSampler)
    rows = [batch["input_ids"][0].tolist() for batch in loader]
    expected = windows(texts, T)[:, :-1].tolist()
    assert rows != expected
    assert sorted(rows) == sorted(expected)
    validation = build(toml, split="val")
    ordered = torch.cat([batch["input_ids"] for batch in validation])[: len(expected)]
    assert ordered.tolist() == expected


def test_split_config_and_field_come_from_the_table(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write(folder / "en", "csv", "train", ["nothing"])
    write(folder / "en", "csv", "validation", documents(60))
    files = "{split: validation, path: en/val*}, {split: train, path: en/train*}"
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: en\n  data_files: [{files}]\n"
        "- config_name: de\n  data_files: de/*\n---\n"
    )
    options = {
        "hf_dataset_name": str(folder),
        "hf_dataset_config": "en",
        "hf_dataset_split": "validation",
        "tokenizer_path": str(gpt2_like()),
    }
    dataset = build(DataConfig(**options)).dataset
    assert np.array_equal(rows_of(dataset), windows(documents(60), T))
    wrong = r"'id' of split 'validation' of .*d \(en\) is int, not text; its columns: id, text$"
    with pytest.raises(ConfigError, match=wrong):
        build(DataConfig(**options, hf_dataset_text_field="id"))


@pytest.mark.parametrize("packing", ["concat", "best_fit_decreasing"])
def test_packing_and_pack_sequences_work_on_it(folder: Path, packing: str) -> None:
    options = {"hf_dataset_name": str(folder), "tokenizer_path": str(gpt2_like())}
    plain = build(DataConfig(**options))
    apart = build(DataConfig(**options, pack_sequences=True))
    assert {"doc_ids", "cu_seqlens"} < set(next(iter(apart)))
    config = DataConfig(**options, packing=packing, balance="attention")
    loader = build(config)
    assert isinstance(loader.dataset, PackedDataset)
    assert loader.dataset.store.path == plain.dataset.store.path == apart.dataset.store.path
    assert {"doc_ids", "position_ids", "cu_seqlens"} < set(next(iter(loader)))
    again = build(config)
    again.load_state_dict(loader.state_dict())
    assert torch.equal(next(iter(again))["labels"], next(iter(loader))["labels"])


@pytest.mark.parametrize("packing", ["", "best_fit_decreasing"])
def test_a_mixture_with_a_prepared_store_delivers_what_was_planned(
    packing: str, folder: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", "parquet", "train", documents(60, seed=1))
    Pipeline(recipe("pretrain"), other, tmp_path / "own", gpt2_like(), workers=0).run()
    toml = tmp_path / "run.toml"
    toml.write_text(
        f"""
        [data]
        packing = "{packing}"
        tokenizer_path = "{gpt2_like()}"

        [[data.datasets]]
        path = "{tmp_path / "own"}"
        weight = 2

        [[data.datasets]]
        hf_name = "{folder}"
        name = "web"

        [[data.phases]]
        start_step = 9
        dataset_weights = {{ web = 5.0 }}
        """
    )
    ranks = [build(toml, batch_size=3, seed=3, rank=rank, world_size=2) for rank in range(2)]
    dataset, order = ranks[0].dataset, ranks[0].sampler.order
    assert isinstance(dataset, MixtureDataset)
    assert dataset.dataset_names == ["own", "web"]
    delivered: Counter[int] = Counter()
    rows: list[list[int]] = []
    for batches in zip(*ranks, strict=True):
        for batch in batches:
            delivered.update(batch["dataset_idx"].tolist())
            rows += batch["input_ids"][batch["dataset_idx"] == 1].tolist()
    planned = order.counts(ranks[0].position).tolist()
    assert [delivered[0], delivered[1]] == planned
    assert min(planned) > 0
    own = dataset.take(np.arange(*dataset.cumulative_sizes[1:]))["input_ids"].tolist()
    assert {tuple(row) for row in rows} <= {tuple(row) for row in own}


def test_a_source_with_another_tokenizer_does_not_mix(folder: Path, tmp_path: Path) -> None:
    Pipeline(recipe("pretrain"), folder, tmp_path / "own", llama3_like(), workers=0).run()
    sources = [DatasetSource(str(tmp_path / "own")), DatasetSource(hf_name=str(folder))]
    config = DataConfig(datasets=sources, tokenizer_path=str(gpt2_like()))
    with pytest.raises(ConfigError, match="made with different tokenizers"):
        build(config)


def test_what_a_config_lacks_is_said(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"is text, .*: set tokenizer_path in \[data\]"):
        build(DataConfig(hf_dataset_name=str(folder)))
    with pytest.raises(ConfigError, match=r"set tokenizer_path in \[data\]"):
        build(DataConfig(datasets=[DatasetSource(hf_name=str(folder))]))
    options = {"hf_dataset_name": str(folder), "tokenizer_path": str(gpt2_like())}
    with pytest.raises(ConfigError, match="no sample of 99999 inputs and labels"):
        build(DataConfig(**options), seq_len=99_999)
    with pytest.raises(ConfigError, match="packing and balance need all documents' lengths"):
        build(DataConfig(**options, hf_streaming=True, packing="concat"))


def test_a_stream_has_no_mixture_to_allow_and_no_state_to_edit(folder: Path) -> None:
    options = {"hf_dataset_name": str(folder), "tokenizer_path": str(gpt2_like())}
    loader = build(DataConfig(**options, hf_streaming=True, num_workers=0))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    iterator.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="allow='mixture' means nothing over a stream"):
        loader.load_state_dict(state, allow="mixture")
    with pytest.raises(StateMismatch, match="the state of a stream cannot be edited"):
        edit_state(state, skip_steps=[5])
    stored = build(DataConfig(**options, num_workers=0))
    with pytest.raises(StateMismatch, match="this is the state of a stream"):
        stored.load_state_dict(state)
