"""Penstock brings text to a training run: raw documents in, exact batches out.

Training order is a function, and a checkpoint is an address: a batch depends on the data, the
config and the position in the run, on nothing else.

    loader = penstock.build_dataloader("train.toml", batch_size=8, seq_len=2048)
    for batch in loader:
        loss = train(batch["input_ids"], batch["labels"])
        state = loader.state_dict()  # small, JSON; goes on from here on any number of ranks

Every name in `__all__` is imported when it is first used, so that `import penstock` costs nothing
and does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.build import build_dataloader
    from penstock.config import DataConfig, DatasetSource, TrainingPhase, load_config
    from penstock.dataset import (
        BaseDataset,
        DatasetFactory,
        DPODataset,
        GRPODataset,
        MemoryMappedDataset,
        MixtureDataset,
        PackedDataset,
        SEQDataset,
        SFTDataset,
        WindowDataset,
        dpo_collate_fn,
        grpo_collate_fn,
    )
    from penstock.errors import (
        ConfigError,
        DataError,
        MissingData,
        MissingExtra,
        OutOfBounds,
        PenstockError,
        StateMismatch,
    )
    from penstock.forecast import Forecast, forecast_run
    from penstock.hub import HuggingFaceDataset, StreamingHuggingFaceDataset
    from penstock.loader import StatefulDataLoader, edit_state
    from penstock.order import ORDER_VERSION, MixtureOrder, Permutation, Plan, Stage
    from penstock.pack import pack_rows
    from penstock.prepare import Pipeline, PipelineConfig
    from penstock.sampler import DistributedSampler, MixtureSampler, ResumableDistributedSampler
    from penstock.store import (
        H5Store,
        MmapStore,
        ShardWriter,
        Store,
        StoreFactory,
        detect_format,
        open_store,
        verify,
    )
    from penstock.stream import (
        TextStream,
        merge_states,
        tokenizing_distributed_data_loader,
        tokenizing_distributed_data_loader_bos_bestfit,
        tokenizing_distributed_data_loader_with_state,
        tokenizing_distributed_data_loader_with_state_bos_bestfit,
    )
    from penstock.text import open_tokenizer

__version__ = "0.1.0"

__all__ = [
    "ORDER_VERSION",
    "BaseDataset",
    "ConfigError",
    "DPODataset",
    "DataConfig",
    "DataError",
    "DatasetFactory",
    "DatasetSource",
    "DistributedSampler",
    "Forecast",
    "GRPODataset",
    "H5Store",
    "HuggingFaceDataset",
    "MemoryMappedDataset",
    "MissingData",
    "MissingExtra",
    "MixtureDataset",
    "MixtureOrder",
    "MixtureSampler",
    "MmapStore",
    "OutOfBounds",
    "PackedDataset",
    "PenstockError",
    "Permutation",
    "Pipeline",
    "PipelineConfig",
    "Plan",
    "ResumableDistributedSampler",
    "SEQDataset",
    "SFTDataset",
    "ShardWriter",
    "Stage",
    "StateMismatch",
    "StatefulDataLoader",
    "Store",
    "StoreFactory",
    "StreamingHuggingFaceDataset",
    "TextStream",
    "TrainingPhase",
    "WindowDataset",
    "__version__",
    "build_dataloader",
    "detect_format",
    "dpo_collate_fn",
    "edit_state",
    "forecast_run",
    "grpo_collate_fn",
    "load_config",
    "merge_states",
    "open_store",
    "open_tokenizer",
    "pack_rows",
    "tokenizing_distributed_data_loader",
    "tokenizing_distributed_data_loader_bos_bestfit",
    "tokenizing_distributed_data_loader_with_state",
    "tokenizing_distributed_data_loader_with_state_bos_bestfit",
    "verify",
]

# Room → its public names; tests/test_import.py holds this, `__all__` and the block above together.
_ROOMS = {
    "build": "build_dataloader",
    "config": "DataConfig DatasetSource TrainingPhase load_config",
    "dataset": "BaseDataset DPODataset DatasetFactory GRPODataset MemoryMappedDataset"
    " MixtureDataset PackedDataset SEQDataset SFTDataset WindowDataset dpo_collate_fn"
    " grpo_collate_fn",
    "errors": "ConfigError DataError MissingData MissingExtra OutOfBounds PenstockError"
    " StateMismatch",
    "forecast": "Forecast forecast_run",
    "hub": "HuggingFaceDataset StreamingHuggingFaceDataset",
    "loader": "StatefulDataLoader edit_state",
    "order": "MixtureOrder ORDER_VERSION Permutation Plan Stage",
    "pack": "pack_rows",
    "prepare": "Pipeline PipelineConfig",
    "sampler": "DistributedSampler MixtureSampler ResumableDistributedSampler",
    "store": "H5Store MmapStore ShardWriter Store StoreFactory detect_format open_store verify",
    "stream": "TextStream merge_states tokenizing_distributed_data_loader"
    " tokenizing_distributed_data_loader_bos_bestfit tokenizing_distributed_data_loader_with_state"
    " tokenizing_distributed_data_loader_with_state_bos_bestfit",
    "text": "open_tokenizer",
}
_HOME = {name: f"penstock.{room}" for room, names in _ROOMS.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Import a public name from its room, once.

    >>> import penstock
    >>> penstock.MissingData.__module__
    'penstock.errors'
    """
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    message = f"module 'penstock' has no attribute {name!r}"
    if not name.startswith("_"):
        from difflib import get_close_matches  # noqa: PLC0415 - only needed to say no

        if nearest := get_close_matches(name, __all__, n=1):
            message += f"; did you mean {nearest[0]!r}?"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted(__all__)
