"""Config to loader: the four paths of the `[data]` table, in one place.

    loader = build_dataloader("run.toml", batch_size=8, seq_len=2048, seed=1)

`datasets` make a mixture; else `dataset_path` names a store or a folder of token files; else a
dataset of the Hub is read whole or streamed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.config import DataConfig, DatasetSource, Resolved, data_path, load_config, resolve
from penstock.dataset import MemoryMappedDataset, MixtureDataset, PackedDataset, WindowDataset
from penstock.dataset.tokens import TokenDataset
from penstock.errors import ConfigError
from penstock.loader import StatefulDataLoader
from penstock.loader.setup import BatchSize, batch_schedule, run_plan
from penstock.order import Stage, quantise
from penstock.ranks import rank_and_world
from penstock.sampler import DistributedSampler, MixtureSampler
from penstock.store import MmapStore, Store, open_store
from penstock.store.flat import raw_dtype_beside
from penstock.store.folder import holds_store, token_files
from penstock.store.schema import dtype_for
from penstock.text import eos_token_id, vocab_size

if TYPE_CHECKING:
    import torch

    from penstock.hub import StreamingHuggingFaceDataset


def build_dataloader(
    config: DataConfig | str | os.PathLike[str],
    *,
    batch_size: BatchSize,
    seq_len: int,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    accumulation: int = 1,
    device: str | torch.device | None = None,
    split: Literal["train", "val"] = "train",
    shuffle: bool = True,
) -> StatefulDataLoader:
    """The loader that a `[data]` table describes, for this rank.

    Batches are dicts with `input_ids` and `labels`, both (batch_size, seq_len) int64. `batch_size`
    may be a schedule: [(0, 8), (1000, 16)]. With split="val" or shuffle=False the loader is finite:
    every sample once, in order, the last batch padded with labels of -100.
    """
    if not isinstance(config, DataConfig):
        config = load_config(config)
    if split not in ("train", "val"):
        raise ConfigError(f"split is 'train' or 'val', not {split!r}")
    if seq_len < 1:
        raise ConfigError(f"seq_len must be at least 1, not {seq_len}")
    rank, world = rank_and_world(rank, world_size)
    path = data_path(config)
    if path == "hub_stream":
        return StatefulDataLoader(
            _streamed(config, seq_len, seed, rank, world, shuffle=shuffle and split == "train"),
            batch_size,
            None,
            config,
            accumulation=accumulation,
            device=device,
            tail="drop" if shuffle and split == "train" else "pad",
        )
    resolved = resolve(config)
    datasets = [_tokens(source, config, seq_len) for source in resolved.sources]
    _check_tokenizers(datasets, resolved)
    mixed = path == "mixture"
    names = [source.name for source in resolved.sources]
    dataset = MixtureDataset(datasets, names) if mixed else datasets[0]
    stages: list[Stage] = []
    sampler: DistributedSampler | MixtureSampler
    if split == "val" or not shuffle:
        sampler = DistributedSampler(dataset, world, rank, shuffle=False, seed=seed)
    else:
        plan = run_plan(
            len(dataset),
            batch_schedule(batch_size),
            world=world,
            accumulation=accumulation,
            tail="endless" if mixed else "drop",
        )
        stages = stages_of(config, resolved, datasets, plan.position_of)
        sampler = DistributedSampler(dataset, world, rank, seed=seed)
        if isinstance(dataset, MixtureDataset):
            sizes = dataset.cumulative_sizes
            sampler = MixtureSampler(sizes, [], world, rank, seed=seed, names=names, stages=stages)
    return StatefulDataLoader(
        dataset,
        batch_size,
        sampler,
        config,
        accumulation=accumulation,
        device=device,
        stages=() if mixed else stages,
        tail="drop" if shuffle and split == "train" else "pad",
    )


def _streamed(
    config: DataConfig, seq_len: int, seed: int, rank: int, world: int, *, shuffle: bool
) -> StreamingHuggingFaceDataset:
    """The `hf_streaming` path: nothing is tokenized before it is read."""
    from penstock.hub import StreamingHuggingFaceDataset  # noqa: PLC0415 - of text

    resolve(config)  # for what it refuses
    if config.packing or config.balance:
        raise ConfigError(
            "packing and balance need all documents' lengths, which a stream does not know: leave "
            "them out, or leave hf_streaming out, and the dataset is tokenized once"
        )
    if not config.tokenizer_path:
        raise ConfigError("a dataset of the Hub needs a tokenizer: set tokenizer_path in [data]")
    return StreamingHuggingFaceDataset(
        str(config.hf_dataset_name),
        config.hf_dataset_split,
        config.hf_dataset_text_field,
        seq_len,
        config.tokenizer_path,
        config.hf_dataset_config,
        rank=rank,
        world_size=world,
        seed=seed,
        shuffle_buffer_size=10_000 if shuffle else 0,
        pack_sequences=config.pack_sequences,
        threads=max(config.num_workers, 1),
    )


def _tokens(source: DatasetSource, config: DataConfig, seq_len: int) -> TokenDataset:
    """Samples of seq_len + 1 tokens over a store, a folder of token files, or a Hub's dataset.

    Files of the folder that match file_pattern come before a store in a folder below it.
    """
    if source.hf_name:
        return _hub_tokens(source, config, seq_len)
    path = source.path
    pack = config.pack_sequences or bool(config.packing)
    dataset: TokenDataset
    if config.packing or holds_store(path, config.file_pattern):
        store = _store(path, config)
        eos = None
        if pack and not store.documents:
            eos = _eos(config, path) if store.eos_token_id is None else store.eos_token_id
        if config.packing:
            dataset = _packed(store, config, seq_len, eos)
        else:
            dataset = WindowDataset(store, seq_len, pack, eos)
    else:
        dataset = MemoryMappedDataset(
            path,
            seq_len + 1,
            config.file_pattern,
            pack,
            _eos(config, path) if pack else None,
            dtype=config.token_dtype or None,
            default_dtype=_dtype_by_vocabulary(config, path),
        )
    if not len(dataset):
        raise ConfigError(
            f"{path} has no sample of {seq_len} inputs and labels: "
            f"its {len(dataset.store)} tokens are too few"
        )
    return dataset


def _hub_tokens(source: DatasetSource, config: DataConfig, seq_len: int) -> TokenDataset:
    """The same of a dataset of the Hub, which is tokenized when it is first used."""
    from penstock.hub import HuggingFaceDataset, sources_of, store_of  # noqa: PLC0415 - of text

    if not config.tokenizer_path:
        raise ConfigError(
            f"{source.hf_name} is text, and nothing says how to tokenize it: set tokenizer_path in "
            "[data]"
        )
    split, text_field = config.hf_dataset_split, config.hf_dataset_text_field
    subset = source.hf_config or None
    if config.packing:
        files = sources_of(source.hf_name, subset, split)
        store = open_store(store_of(files, text_field, config.tokenizer_path))
        return _packed(store, config, seq_len, None)
    return HuggingFaceDataset(
        source.hf_name,
        split,
        text_field,
        seq_len,
        config.tokenizer_path,
        subset,
        config.pack_sequences,
    )


def _packed(store: Store, config: DataConfig, seq_len: int, eos: int | None) -> PackedDataset:
    balance: Any = config.balance
    return PackedDataset(store, seq_len, config.packing or "", eos_token_id=eos, balance=balance)


def _store(path: str, config: DataConfig) -> Store:
    """The store in a folder, or the folder's token files as one."""
    if holds_store(path, config.file_pattern):
        return open_store(path, file_pattern=config.file_pattern)
    files = MmapStore(
        dtype=config.token_dtype,
        default_dtype=_dtype_by_vocabulary(config, path),
        file_pattern=config.file_pattern,
    )
    return files.load(path)


def _eos(config: DataConfig, path: str) -> int:
    if not config.tokenizer_path:
        raise ConfigError(
            f"packing needs to know which token ends a document, and {path} does not say: "
            "set tokenizer_path in [data]"
        )
    return eos_token_id(config.tokenizer_path)


def _dtype_by_vocabulary(config: DataConfig, path: str) -> str | None:
    """What a raw .bin file must hold, where nothing else says: the vocabulary's own width."""
    files = token_files(Path(path), config.file_pattern)
    if not config.tokenizer_path or config.token_dtype or all(map(_stated, files)):
        return None
    return dtype_for(vocab_size(config.tokenizer_path))


def _stated(file: Path) -> bool:
    return file.suffix.lower() != ".bin" or raw_dtype_beside(file) is not None


def _check_tokenizers(datasets: list[TokenDataset], resolved: Resolved) -> None:
    """Ids of different tokenizers mean different texts."""
    named = {
        source.name: dataset.store.metadata["tokenizer"]
        for source, dataset in zip(resolved.sources, datasets, strict=True)
        if dataset.store.metadata.get("tokenizer")
    }
    first = next(iter(named), None)
    for name, tokenizer in named.items():
        if first is not None and tokenizer != named[first]:
            raise ConfigError(
                f"sources {first!r} and {name!r} were made with different tokenizers: "
                "prepare one of them again"
            )


def stages_of(
    config: DataConfig,
    resolved: Resolved,
    datasets: list[TokenDataset],
    position_of: Callable[[int], int],
) -> list[Stage]:
    """Declared stages, from steps to positions and from weights to integers."""
    stages = []
    for stage in resolved.stages:
        weights = list(stage.weights)
        if config.weights_count == "tokens":  # shares of tokens: fewer of the longer samples
            weights = [w / d.tokens_a_sample for w, d in zip(weights, datasets, strict=True)]
        stages.append(Stage(position_of(stage.start_step), quantise(weights), stage.start_step))
    return stages
