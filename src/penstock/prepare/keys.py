"""The keys of a prepared store: the recipe's, and positions where they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.errors import ConfigError
from penstock.prepare.config import PipelineConfig
from penstock.store import Key
from penstock.store.schema import is_mask


def keys_of(config: PipelineConfig, keys: Mapping[str, Key]) -> dict[str, Key]:
    """The keys with their dtypes as the recipe states them; what no key can be is refused."""
    found = dict(keys)
    if config.output.position_ids_mode != "none" and "sequence" in found:
        found["position_ids"] = Key(dtype="int32")
    for name, dtype in config.output.dtype.items():
        if name not in found:
            raise ConfigError(f"output.dtype.{name}: the recipe's keys are {', '.join(found)}")
        if is_mask(name) and dtype.startswith("float"):
            raise ConfigError(f"output.dtype.{name} is {dtype}: a mask is bool, or a whole number")
        if name == "position_ids" and dtype not in ("uint16", "int32", "uint32", "int64", "uint64"):
            raise ConfigError(f"output.dtype.{name} is {dtype}: positions need uint16 or wider")
        found[name] = replace(found[name], dtype=dtype)
    return found
