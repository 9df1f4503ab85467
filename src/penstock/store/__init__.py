"""Tokens at rest: written once, checked, and read from any number of shards.

    open_store("tokens/").fetch(0, 2049, "sequence")

`ShardWriter` and `commit` make a store, `verify` finds what is wrong with one. HDF5 is imported
when a store of it is opened, torch when tensors are fetched.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.store.base import Store
from penstock.store.formats import StoreFactory, detect_format, open_store
from penstock.store.manifest import FORMAT_VERSION
from penstock.store.mmap import MmapStore
from penstock.store.schema import Key
from penstock.store.sources import source_of
from penstock.store.verify import Report, verify
from penstock.store.workspace import commit, discard
from penstock.store.writer import ShardWriter

if TYPE_CHECKING:
    from penstock.store.hdf5 import H5Store

__all__ = [
    "FORMAT_VERSION",
    "H5Store",
    "Key",
    "MmapStore",
    "Report",
    "ShardWriter",
    "Store",
    "StoreFactory",
    "commit",
    "detect_format",
    "discard",
    "open_store",
    "source_of",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "H5Store":
        return import_module("penstock.store.hdf5").H5Store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
