"""Store to samples: windows, records, mixtures, task datasets. `take(indices)` makes a batch."""

from penstock.dataset.base import SampleDataset
from penstock.dataset.mixture import MixtureDataset
from penstock.dataset.packed import PackedDataset
from penstock.dataset.records import DPODataset, GRPODataset, dpo_collate_fn, grpo_collate_fn
from penstock.dataset.tasks import BaseDataset, DatasetFactory, SEQDataset, SFTDataset
from penstock.dataset.windows import MemoryMappedDataset, WindowDataset

__all__ = [
    "BaseDataset",
    "DPODataset",
    "DatasetFactory",
    "GRPODataset",
    "MemoryMappedDataset",
    "MixtureDataset",
    "PackedDataset",
    "SEQDataset",
    "SFTDataset",
    "SampleDataset",
    "WindowDataset",
    "dpo_collate_fn",
    "grpo_collate_fn",
]
