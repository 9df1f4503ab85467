"""A run, as a TOML file describes it: its data, and how batches are cut of them.

    [run]
    batch_size = 8              # a rank's; or [[0, 8], [1000, 16]]: 16 from step 1,000 on
    seq_len = 2048
    world_size = 64
    seed = 1
    accumulation = 4
    steps = 100_000

    [data]
    ...

Trainers build their loaders from their own settings. This table is for what looks at a run from
outside (`penstock plan`, `explain`, `batch`, `view`); options of these commands come before it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.checks import at_least, whole
from penstock.config import DataConfig, made, parse_config, read_config, tables_of
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.loader import StatefulDataLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The `[run]` table, and the `[data]` table beside it.

    >>> RunConfig(batch_size=8, seq_len=128).schedule
    ((0, 8),)
    """

    batch_size: int | Sequence[Sequence[int]]
    seq_len: int
    seed: int = 0
    world_size: int = 1
    accumulation: int = 1
    steps: int | None = None
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        for name in ("seq_len", "world_size", "accumulation"):
            at_least(1, getattr(self, name), name)
        whole(self.seed, "seed")
        if self.steps is not None:
            at_least(1, self.steps, "steps")
        if not self.schedule:
            raise ConfigError("batch_size is a number, or a list of [step, size], and is empty")

    @property
    def schedule(self) -> tuple[tuple[int, int], ...]:
        """Batch sizes of a rank as (from step, size)."""
        if not isinstance(self.batch_size, list | tuple):
            return ((0, at_least(1, self.batch_size, "batch_size")),)
        entries = [
            tuple(each) if isinstance(each, list | tuple) else () for each in self.batch_size
        ]
        if not all(len(each) == 2 for each in entries):
            raise ConfigError(
                f"batch_size is a number, or a list of [step, size], not {self.batch_size}"
            )
        return tuple(
            (at_least(0, step, "a step of batch_size"), at_least(1, size, "a batch_size"))
            for step, size in entries
        )


def load_run(path: str | os.PathLike[str], **options: Any) -> RunConfig:
    """The run that a TOML file describes; of `options` those that are not None come before it."""
    where = os.fspath(path)
    text = read_config(path)
    data = parse_config(text, where)
    table = tables_of(text, where).get("run", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: run must be a table, [run], found {table!r}")
    if "data" in table:
        raise ConfigError(f"{where}: [data] stands beside [run], not in it")
    values = table | {name: value for name, value in options.items() if value is not None}
    for name in ("batch_size", "seq_len"):
        if name not in values:
            raise ConfigError(
                f"{where} does not say {name}: set it in a table [run], or give "
                f"--{name.replace('_', '-')}"
            )
    return replace(made(RunConfig, values, where, "run"), data=data)


def open_run(run: RunConfig, rank: int = 0, **options: Any) -> StatefulDataLoader:
    """The loader of one of a run's ranks."""
    from penstock.build import build_dataloader  # noqa: PLC0415 - torch

    return build_dataloader(
        run.data,
        batch_size=list(run.schedule) if len(run.schedule) > 1 else run.schedule[0][1],
        seq_len=run.seq_len,
        seed=run.seed,
        rank=rank,
        world_size=run.world_size,
        accumulation=run.accumulation,
        **options,
    )
